/* Sums over the rows of a matrix in a fixed order, used for bias and norm weight gradients.
 *
 * Stage 1: a block takes 256 columns of a chunk of rows; its 8 warps take every eighth row, a lane 8 neighbouring columns;
 * the warps' sums are added in order -> partial [chunks, C] fp32. Stage 2: chunks in order, 8 groups of them side by side.
 * Chunks follow from the shape alone: blocks of equal work, as many as 132 multiprocessors hold at once. Bytes: the operands
 * once, and 8 C chunks for the partials. */
#ifndef VLAI_COLUMNS_CUH
#define VLAI_COLUMNS_CUH

#include "kernels/common.cuh"

enum { COLUMN_TILE = 256, COLUMN_BLOCKS = 528, COLUMN_ROWS = 32 };

static inline int64_t column_chunks(int64_t rows, int64_t cols)
{
    int64_t tiles = (cols + COLUMN_TILE - 1) / COLUMN_TILE;
    int64_t most = (rows + COLUMN_ROWS - 1) / COLUMN_ROWS, chunks = tiles ? COLUMN_BLOCKS / tiles : 1;
    chunks = chunks < most ? chunks : most;
    return chunks < 1 ? 1 : chunks;
}

static inline size_t column_workspace(int64_t rows, int64_t cols)
{
    return round_256((size_t)column_chunks(rows, cols) * (size_t)cols * sizeof(float));
}

/* term(row, col, x[8]) loads the summands of 8 columns. */
template <class TERM>
__global__ void __launch_bounds__(THREADS) column_partial_kernel(TERM term, float *partial, int64_t rows, int64_t cols, int64_t chunk)
{
    __shared__ float sums[THREADS / WARP][COLUMN_TILE + 8];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t col = (int64_t)blockIdx.x * COLUMN_TILE + lane * 8;
    int64_t first = blockIdx.y * chunk, end = first + chunk < rows ? first + chunk : rows;
    float sum[8] = {0};
    if (col < cols) {
        int64_t row = first + warp;
        for (; row + 3 * (THREADS / WARP) < end; row += 4 * (THREADS / WARP)) {
            float x[4][8];
#pragma unroll
            for (int k = 0; k < 4; k++)
                term(row + k * (THREADS / WARP), col, x[k]);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sum[i] += x[k][i];
        }
        for (; row < end; row += THREADS / WARP) {
            float x[8];
            term(row, col, x);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum[i] += x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[warp][lane * 8 + i] = sum[i];
    __syncthreads();
    col = (int64_t)blockIdx.x * COLUMN_TILE + threadIdx.x;
    if (col >= cols)
        return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; w++)
        total += sums[w][threadIdx.x];
    partial[blockIdx.y * cols + col] = total;
}

/* Partial sums [chunks, C] of one vector, which may be none: y NULL. */
struct column_parts {
    const float *partial;
    void *y;
    int64_t chunks;
};
struct column_pair {
    column_parts of[2];
};

/* Block: 32 columns by 8 groups of chunks, whose loads are under way together; y: the one of two. */
template <class Y> __global__ void __launch_bounds__(THREADS) column_total_kernel(__grid_constant__ const column_pair pair, int64_t cols)
{
    const column_parts &parts = pair.of[blockIdx.y];
    const float *partial = parts.partial;
    Y *y = (Y *)parts.y;
    int64_t chunks = parts.chunks;
    enum { AHEAD = 8, GROUPS = THREADS / WARP };
    __shared__ float sums[GROUPS][WARP];
    int lane = threadIdx.x % WARP, group = threadIdx.x / WARP;
    int64_t col = (int64_t)blockIdx.x * WARP + lane, each = (chunks + GROUPS - 1) / GROUPS;
    int64_t first = group * each, end = first + each < chunks ? first + each : chunks;
    float sum = 0;
    for (int64_t c = first; col < cols && c < end; c += AHEAD) {
        float part[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            part[k] = c + k < end ? partial[(c + k) * cols + col] : 0.0f;
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            sum += part[k];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group || col >= cols)
        return;
    sum = 0;
#pragma unroll
    for (int k = 0; k < GROUPS; k++)
        sum += sums[k][lane];
    y[col] = from_float<Y>(sum);
}

static inline int column_totals(const vlai_cuda_call *call, vla_dtype dtype, const column_pair &pair, unsigned n, int64_t cols)
{
    return with_type(dtype, [&](auto ty) {
        using Y = typename decltype(ty)::is;
        column_total_kernel<Y><<<dim3(blocks_for(cols, WARP), n), THREADS, 0, stream_of(call)>>>(pair, cols);
        return launched();
    });
}

/* y [C] = the partial sums [chunks, C] added in order. */
static inline int column_total(const vlai_cuda_call *call, const vlai_cuda_tensor &y, const float *partial, int64_t chunks, int64_t cols)
{
    return y.data ? column_totals(call, y.dtype, {{{partial, y.data, chunks}}}, 1, cols) : 0;
}

/* Two of them, either of which may be unwanted: one launch where they have one type. */
static inline int column_total_2(const vlai_cuda_call *call, const vlai_cuda_tensor &y0, const float *partial0, int64_t chunks0,
                                 const vlai_cuda_tensor &y1, const float *partial1, int64_t chunks1, int64_t cols)
{
    if (y0.data && y1.data && y0.dtype == y1.dtype)
        return column_totals(call, y0.dtype, {{{partial0, y0.data, chunks0}, {partial1, y1.data, chunks1}}}, 2, cols);
    int status = column_total(call, y0, partial0, chunks0, cols);
    return status ? status : column_total(call, y1, partial1, chunks1, cols);
}

template <class TERM>
static int column_sum(const vlai_cuda_call *call, const vlai_cuda_tensor &y, TERM term, int64_t rows, int64_t cols)
{
    float *partial = (float *)call->workspace;
    int64_t chunks = column_chunks(rows, cols), chunk = (rows + chunks - 1) / chunks;
    dim3 grid(blocks_for(cols, COLUMN_TILE), (unsigned)chunks);
    column_partial_kernel<<<grid, THREADS, 0, stream_of(call)>>>(term, partial, rows, cols, chunk);
    return column_total(call, y, partial, chunks, cols);
}

/* 8 columns from `col`, zeros past the last. */
template <class X> __device__ inline void load_columns(const X *x, int64_t row, int64_t col, int64_t cols, bool vector, float (&to)[8])
{
    if (vector) {
        pack<X, 8> p;
        p.load(x + row * cols + col);
        p.get(to);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        to[i] = col + i < cols ? to_float(x[row * cols + col + i]) : 0.0f;
}

template <class X> struct column_term {
    const X *x;
    int64_t cols;
    bool vector;
    __device__ void operator()(int64_t row, int64_t col, float (&to)[8]) const { load_columns(x, row, col, cols, vector, to); }
};

/* y [C] = the sums of x [N,C] over its rows. */
static inline int column_sum_of(const vlai_cuda_call *call, const vlai_cuda_tensor &x, const vlai_cuda_tensor &y)
{
    int64_t rows = rows_of(x), cols = cols_of(x);
    return with_type(x.dtype, [&](auto tx) {
        using X = typename decltype(tx)::is;
        return column_sum(call, y, column_term<X>{(const X *)x.data, cols, aligned(x.data) && cols % 8 == 0}, rows, cols);
    });
}

/* --- fused gradients that sum the columns of what they make --- */

/* By a block of BLOCK threads: to [COLS] = the sums over `rows` [N, COLS], which lie in shared memory. */
template <int N, int COLS, int BLOCK> __device__ inline void add_in_order(const float *rows, float *to)
{
    for (int col = threadIdx.x * 4; col < COLS; col += BLOCK * 4) {
        float4 total = *(const float4 *)(rows + col);
#pragma unroll
        for (int n = 1; n < N; n++) {
            float4 one = *(const float4 *)(rows + n * COLS + col);
            total.x += one.x;
            total.y += one.y;
            total.z += one.z;
            total.w += one.w;
        }
        *(float4 *)(to + col) = total;
    }
}

/* Result k; one without data where only sums stand. */
static inline vlai_cuda_tensor plain_result(const vlai_cuda_call *call, int k)
{
    return k < vlai_plain_outputs(call->node) ? call->out[k] : vlai_cuda_tensor{};
}

/* The sums of result k; without data where nobody wants them. */
static inline vlai_cuda_tensor sums_result(const vlai_cuda_call *call, int k)
{
    int at = vlai_sums_at(call->node, k);
    return at >= 0 && call->out[at].elements ? call->out[at] : vlai_cuda_tensor{};
}

/* Of results that stand: for shapes that do not suit the kernels that sum on the way. */
static inline int sums_apart(const vlai_cuda_call *call)
{
    int status = 0;
    for (int k = 0; k < 2 && !status; k++)
        if (sums_result(call, k).data && call->out[k].data)
            status = column_sum_of(call, call->out[k], sums_result(call, k));
    return status;
}

#endif
