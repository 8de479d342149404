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

/* Block: 32 columns by 8 groups of chunks. */
template <class Y>
__global__ void __launch_bounds__(THREADS) column_total_kernel(const float *partial, Y *y, int64_t chunks, int64_t cols)
{
    __shared__ float sums[THREADS / WARP][WARP];
    int lane = threadIdx.x % WARP, group = threadIdx.x / WARP;
    int64_t col = (int64_t)blockIdx.x * WARP + lane, each = (chunks + THREADS / WARP - 1) / (THREADS / WARP);
    int64_t first = group * each, end = first + each < chunks ? first + each : chunks;
    float sum = 0;
    if (col < cols)
#pragma unroll 8
        for (int64_t c = first; c < end; c++)
            sum += partial[c * cols + col];
    sums[group][lane] = sum;
    __syncthreads();
    if (group || col >= cols)
        return;
    sum = 0;
#pragma unroll
    for (int k = 0; k < THREADS / WARP; k++)
        sum += sums[k][lane];
    y[col] = from_float<Y>(sum);
}

/* y [C] = the partial sums [chunks, C] added in order. */
static inline int column_total(const vlai_cuda_call *call, const vlai_cuda_tensor &y, const float *partial, int64_t chunks, int64_t cols)
{
    return with_type(y.dtype, [&](auto ty) {
        using Y = typename decltype(ty)::is;
        column_total_kernel<<<blocks_for(cols, WARP), THREADS, 0, stream_of(call)>>>(partial, (Y *)y.data, chunks, cols);
        return launched();
    });
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

#endif
