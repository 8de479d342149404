/* RMSNorm and its gradients.
 *
 *     rms_norm              x [N,C], w [C] or none -> y = x r w, r [N] = 1/sqrt(mean(x^2) + eps) (fp32)
 *     rms_norm_grad         dy, x [N,C], r, w      -> dx = r (w dy) - x r^3 mean(w dy x)
 *     rms_norm_grad_weight  dy, x [N,C], r         -> dw [C] = sum over rows of dy x r
 *     rms_norm_backward     dy, x, r, w, add       -> dx + add, dw, where wanted y = x r w once more and the column sums of dx + add
 *
 * Rows of up to 2048 columns (a multiple of 8): a warp per row, the row kept in registers as it is stored, so x (and dy)
 * are read once: 2 N C and 3 N C elements of traffic. Other rows: a block per row, which reads the row again, from cache.
 *
 * rms_norm_backward of bf16 rows of 1024, 1280 or, without column sums, 2048 columns: kernels/norm_rows.cuh, from compute
 * capability 9.0 on. Else up to 4096 columns (fp32 up to 2048, others apart): a thread owns 8 neighbouring columns of the rows of its
 * block, B, B + blocks, ..., one or two a turn; those of the next turns are on their way to shared memory, where they cost no
 * registers. Sums of dw and of dx stay in registers until the rows are done. 4 N C elements (5 with y), and the partial sums
 * [blocks, C] of each in fp32, written and read once, from L2. Blocks follow from the shape alone. dx may lie over dy or add: a
 * thread has its part of a row before it writes there, and the rows ahead are others.
 *
 * Measured on an H200 (bf16; replayed): forward 18 us at [6784,2048] and 24 us at [16848,1280], 1.05 and 1.2 of a copy as long;
 * backward at 2048 columns 31.7 us, with y 38.4 us; by a thread per 8 columns 33.4 and 40.2: 1.1 of a copy as long. */
#include "kernels/async.cuh"
#include "kernels/columns.cuh"
#include "kernels/norm_rows.cuh"

namespace {

enum { ROW_THREADS = 128, LANE = 8, WARP_COLS = WARP * LANE };

template <class X, class W, int PACKS>
__global__ void __launch_bounds__(ROW_THREADS)
    norm_warp_kernel(const X *x, const W *w, X *y, float *rstd, int64_t rows, int cols, float eps)
{
    int64_t row = (int64_t)blockIdx.x * (ROW_THREADS / WARP) + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= rows)
        return;
    pack<X, LANE> p[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (k * WARP_COLS + lane * LANE < cols)
            p[k].load(x + row * cols + k * WARP_COLS + lane * LANE);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (k * WARP_COLS + lane * LANE < cols) {
            float v[LANE];
            p[k].get(v);
#pragma unroll
            for (int i = 0; i < LANE; i++)
                sum += v[i] * v[i];
        }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)cols + eps);
    if (rstd && lane == 0)
        rstd[row] = r;
    if (!y)
        return;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int col = k * WARP_COLS + lane * LANE;
        if (col < cols) {
            float v[LANE];
            p[k].get(v);
#pragma unroll
            for (int i = 0; i < LANE; i++)
                v[i] *= r;
            if (w) {
                pack<W, LANE> pw;
                float u[LANE];
                pw.load(w + col);
                pw.get(u);
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    v[i] *= u[i];
            }
            p[k].set(v);
            p[k].store(y + row * cols + col);
        }
    }
}

template <class X, class W, int V>
__global__ void __launch_bounds__(THREADS)
    norm_block_kernel(const X *x, const W *w, X *y, float *rstd, int64_t cols, float eps)
{
    int64_t row = blockIdx.x;
    x += row * cols;
    float sum = 0;
    for (int64_t i = threadIdx.x * V; i < cols; i += THREADS * V) {
        pack<X, V> p;
        float v[V];
        p.load(x + i);
        p.get(v);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += v[k] * v[k];
    }
    float r = 1.0f / sqrtf(block_sum(sum, THREADS) / (float)cols + eps);
    if (rstd && threadIdx.x == 0)
        rstd[row] = r;
    if (!y)
        return;
    for (int64_t i = threadIdx.x * V; i < cols; i += THREADS * V) {
        pack<X, V> p;
        pack<W, V> pw;
        float v[V], u[V];
        p.load(x + i);
        p.get(v);
        if (w) {
            pw.load(w + i);
            pw.get(u);
        }
#pragma unroll
        for (int k = 0; k < V; k++)
            v[k] = w ? v[k] * r * u[k] : v[k] * r;
        p.set(v);
        p.store(y + row * cols + i);
    }
}

template <class D, class X, class W, int PACKS>
__global__ void __launch_bounds__(ROW_THREADS)
    norm_grad_warp_kernel(const D *dy, const X *x, const float *rstd, const W *w, const X *add, X *dx, int64_t rows, int cols)
{
    int64_t row = (int64_t)blockIdx.x * (ROW_THREADS / WARP) + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= rows)
        return;
    pack<X, LANE> px[PACKS];
    pack<D, LANE> pd[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int col = k * WARP_COLS + lane * LANE;
        if (col < cols) {
            px[k].load(x + row * cols + col);
            pd[k].load(dy + row * cols + col);
        }
    }
    float r = rstd[row], sum = 0;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int col = k * WARP_COLS + lane * LANE;
        if (col < cols) {
            float vx[LANE], vd[LANE], vw[LANE];
            px[k].get(vx);
            pd[k].get(vd);
            if (w) {
                pack<W, LANE> pw;
                pw.load(w + col);
                pw.get(vw);
            }
#pragma unroll
            for (int i = 0; i < LANE; i++)
                sum += (w ? vw[i] * vd[i] : vd[i]) * vx[i];
        }
    }
    float b = r * r * r * (warp_sum(sum) / (float)cols);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int col = k * WARP_COLS + lane * LANE;
        if (col < cols) {
            float vx[LANE], vd[LANE], vw[LANE];
            px[k].get(vx);
            pd[k].get(vd);
            if (w) {
                pack<W, LANE> pw;
                pw.load(w + col);
                pw.get(vw);
            }
#pragma unroll
            for (int i = 0; i < LANE; i++)
                vx[i] = r * (w ? vw[i] * vd[i] : vd[i]) - vx[i] * b;
            if (add) {
                pack<X, LANE> pa;
                pa.load(add + row * cols + col);
                pa.get(vd);
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    vx[i] += vd[i];
            }
            px[k].set(vx);
            px[k].store(dx + row * cols + col);
        }
    }
}

template <class D, class X, class W, int V>
__global__ void __launch_bounds__(THREADS)
    norm_grad_block_kernel(const D *dy, const X *x, const float *rstd, const W *w, const X *add, X *dx, int64_t cols)
{
    int64_t row = blockIdx.x;
    dy += row * cols;
    x += row * cols;
    float r = rstd[row], sum = 0, b = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = threadIdx.x * V; i < cols; i += THREADS * V) {
            pack<D, V> pd;
            pack<X, V> px;
            pack<W, V> pw;
            float vd[V], vx[V], vw[V];
            pd.load(dy + i);
            px.load(x + i);
            pd.get(vd);
            px.get(vx);
            if (w) {
                pw.load(w + i);
                pw.get(vw);
            }
#pragma unroll
            for (int k = 0; k < V; k++) {
                float g = w ? vw[k] * vd[k] : vd[k];
                if (pass == 0)
                    sum += g * vx[k];
                else
                    vx[k] = r * g - vx[k] * b;
            }
            if (pass == 1) {
                if (add) {
                    pack<X, V> pa;
                    pa.load(add + row * cols + i);
                    pa.get(vd);
#pragma unroll
                    for (int k = 0; k < V; k++)
                        vx[k] += vd[k];
                }
                px.set(vx);
                px.store(dx + row * cols + i);
            }
        }
        if (pass == 0)
            b = r * r * r * (block_sum(sum, THREADS) / (float)cols);
    }
}

template <class D, class X> struct weight_term {
    const D *dy;
    const X *x;
    const float *rstd;
    int64_t cols;
    bool vector;
    __device__ void operator()(int64_t row, int64_t col, float (&to)[8]) const
    {
        float d[8], r = rstd[row];
        load_columns(dy, row, col, cols, vector, d);
        load_columns(x, row, col, cols, vector, to);
#pragma unroll
        for (int i = 0; i < 8; i++)
            to[i] = d[i] * (to[i] * r);
    }
};

/* f(packs of a lane) for rows of at most 2048 columns: the fewest that hold a row. False: wider, or not in packs. */
template <class F> bool with_packs(int64_t cols, bool vector, F f)
{
    if (!vector || cols > 8 * WARP_COLS)
        return false;
    if (cols <= 2 * WARP_COLS)
        f(std::integral_constant<int, 2>{});
    else if (cols <= 4 * WARP_COLS)
        f(std::integral_constant<int, 4>{});
    else if (cols <= 5 * WARP_COLS)
        f(std::integral_constant<int, 5>{});
    else
        f(std::integral_constant<int, 8>{});
    return true;
}

/* --- everything of the backward in one pass --- */

/* 512 threads on a multiprocessor, of up to 128 registers each. RING_BYTES: what a block of any GPU from 8.0 on may have. */
enum { MOST_THREADS = 512, FUSED_COLS = MOST_THREADS * LANE, MULTIPROCESSORS = 132, RING_BYTES = 96 << 10 };

/* The sums of `mine[k]` over the block, in `all`: warps first. `part` is written anew a turn later, behind another barrier. */
template <int N> __device__ inline void block_sums(float (&mine)[N], float (*part)[WARP], float (&all)[N])
{
    int warps = blockDim.x / WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int k = 0; k < N; k++)
        mine[k] = warp_sum(mine[k]);
    if (threadIdx.x % WARP == 0)
#pragma unroll
        for (int k = 0; k < N; k++)
            part[k][warp] = mine[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; k++)
        all[k] = 0;
    for (int w = 0; w < warps; w++)
#pragma unroll
        for (int k = 0; k < N; k++)
            all[k] += part[k][w];
}

/* partial [blocks, C]: the sums of dw over a block's rows; `sums` those of dx if SUMS. partial, y: NULL when not wanted. */
template <class D, class X, class W, bool SUMS, int TURN, int STAGES>
__global__ void __launch_bounds__(MOST_THREADS)
    norm_backward_kernel(const D *dy, const X *x, const float *rstd, const W *w, const X *add, X *dx, X *y, float *partial, float *sums,
                         int64_t rows, int64_t cols)
{
    enum { WD = pack<D, LANE>::WORDS, WX = pack<X, LANE>::WORDS, EACH = WD + 2 * WX };
    extern __shared__ uint4 ring_words[];
    __shared__ float part[2][TURN][WARP];
    word_ring<TURN * EACH, STAGES> ring(ring_words);
    int64_t col = threadIdx.x * LANE, first = blockIdx.x, step = gridDim.x;
    bool mine = col < cols;
    float weight[LANE], dw[LANE] = {0}, sum_dx[SUMS ? LANE : 1] = {0}, root[TURN], next_root[TURN];
#pragma unroll
    for (int i = 0; i < LANE; i++)
        weight[i] = 1;
    auto ask = [&](int stage, int64_t row) {
#pragma unroll
        for (int k = 0; k < TURN; k++)
            if (mine && row + k * step < rows) {
                int64_t at = (row + k * step) * cols + col;
                ring.ask(stage, k * EACH, dy + at);
                ring.ask(stage, k * EACH + WD, x + at);
                if (add)
                    ring.ask(stage, k * EACH + WD + WX, add + at);
            }
        copy_commit();
    };
    auto load_roots = [&](float (&to)[TURN], int64_t row) {
#pragma unroll
        for (int k = 0; k < TURN; k++)
            to[k] = row + k * step < rows ? rstd[row + k * step] : 0.0f;
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        ask(s, first + s * TURN * step);
    load_roots(root, first);
    if (w && mine) {
        pack<W, LANE> pw;
        pw.load(w + col);
        pw.get(weight);
    }
    int stage = 0, turn = 0;
    for (int64_t row = first; row < rows; row += TURN * step) {
        pack<D, LANE> pd[TURN];
        pack<X, LANE> px[TURN], pa[TURN];
        float sum[TURN], total[TURN];
        load_roots(next_root, row + TURN * step);
        copy_wait<STAGES - 2>();
#pragma unroll
        for (int k = 0; k < TURN; k++) {
            sum[k] = 0;
            if (mine && row + k * step < rows) {
                float vd[LANE], vx[LANE];
                ring.take(stage, k * EACH, pd[k]);
                ring.take(stage, k * EACH + WD, px[k]);
                if (add)
                    ring.take(stage, k * EACH + WD + WX, pa[k]);
                pd[k].get(vd);
                px[k].get(vx);
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    sum[k] += weight[i] * vd[i] * vx[i];
            }
        }
        ask(stage ? stage - 1 : STAGES - 1, row + (STAGES - 1) * TURN * step);
        block_sums<TURN>(sum, part[turn], total);
#pragma unroll
        for (int k = 0; k < TURN; k++) {
            int64_t at = (row + k * step) * cols + col;
            if (!mine || row + k * step >= rows)
                break;
            float vx[LANE], vd[LANE], va[LANE] = {0}, b = root[k] * root[k] * root[k] * (total[k] / (float)cols);
            px[k].get(vx);
            pd[k].get(vd);
            if (add)
                pa[k].get(va);
            if (y) {
                pack<X, LANE> py;
                float vy[LANE];
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    vy[i] = vx[i] * root[k] * weight[i];
                py.set(vy);
                py.store(y + at);
            }
#pragma unroll
            for (int i = 0; i < LANE; i++) {
                dw[i] += vd[i] * (vx[i] * root[k]);
                vx[i] = root[k] * (weight[i] * vd[i]) - vx[i] * b + va[i];
            }
            px[k].set(vx);
            px[k].store(dx + at);
            if constexpr (SUMS) {
                px[k].get(vx); /* as it is stored */
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    sum_dx[i] += vx[i];
            }
        }
#pragma unroll
        for (int k = 0; k < TURN; k++)
            root[k] = next_root[k];
        turn ^= 1;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    pack<float, LANE> total;
    if (partial && mine) {
        total.set(dw);
        total.store(partial + blockIdx.x * cols + col);
    }
    if constexpr (SUMS)
        if (mine) {
            total.set(sum_dx);
            total.store(sums + blockIdx.x * cols + col);
        }
}

/* Threads of a block: LANE columns each. */
int row_threads(int64_t cols)
{
    return (int)((cols + WARP_COLS - 1) / WARP_COLS * WARP);
}

/* As many blocks as are resident at once, so that none begins late; at least two rows each, since each adds a row of partial sums. */
int64_t row_blocks(int64_t rows, int64_t cols)
{
    int64_t most = (rows + 1) / 2, wanted = cols > 0 ? MULTIPROCESSORS * (MOST_THREADS / row_threads(cols)) : 0;
    return wanted < most ? wanted : most;
}

/* f(rows a turn, turns in shared memory) for the depth that was fastest; false where shared memory holds no two turns. */
template <class D, class X, class F> bool with_depth(int64_t cols, F f)
{
    using std::integral_constant;
    size_t each = sizeof(uint4) * (pack<D, LANE>::WORDS + 2 * pack<X, LANE>::WORDS) * row_threads(cols);
    if constexpr (sizeof(D) + sizeof(X) == 4) {
        if (cols <= 1536)
            return f(integral_constant<int, 1>{}, integral_constant<int, 5>{}, 5 * each), true;
        if (6 * each <= RING_BYTES)
            return f(integral_constant<int, 2>{}, integral_constant<int, 3>{}, 6 * each), true;
    }
    return 4 * each <= RING_BYTES && (f(integral_constant<int, 2>{}, integral_constant<int, 2>{}, 4 * each), true);
}

} // namespace

NO_WORKSPACE(rms_norm)
NO_WORKSPACE(rms_norm_grad)

extern "C" int vlai_cuda_rms_norm(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &w = call->in[1], &y = call->out[0], &rstd = call->out[1];
    if (!x.elements)
        return 0;
    int64_t rows = rows_of(x), cols = cols_of(x);
    bool vector = cols % LANE == 0 && aligned(x.data) && aligned(w.data) && aligned(y.data);
    float eps = (float)call->node->attrs.norm.eps;
    if (y.data && y.dtype != x.dtype)
        return (int)cudaErrorInvalidValue;
    return with_types(x.dtype, w.data ? w.dtype : x.dtype, [&](auto tx, auto tw) {
        using X = typename decltype(tx)::is;
        using W = typename decltype(tw)::is;
        const X *px = (const X *)x.data;
        const W *pw = (const W *)w.data;
        X *py = (X *)y.data;
        float *pr = (float *)rstd.data;
        bool done = with_packs(cols, vector, [&](auto packs) {
            constexpr int PACKS = decltype(packs)::value;
            norm_warp_kernel<X, W, PACKS><<<blocks_for(rows, ROW_THREADS / WARP), ROW_THREADS, 0, stream_of(call)>>>(px, pw, py, pr, rows,
                                                                                                                  (int)cols, eps);
        });
        if (!done && vector)
            norm_block_kernel<X, W, 8><<<(unsigned)rows, THREADS, 0, stream_of(call)>>>(px, pw, py, pr, cols, eps);
        else if (!done)
            norm_block_kernel<X, W, 1><<<(unsigned)rows, THREADS, 0, stream_of(call)>>>(px, pw, py, pr, cols, eps);
        return launched();
    });
}

/* add: none for rms_norm_grad. dx may lie over dy or add. */
extern "C" int vlai_cuda_rms_norm_grad(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &dy = call->in[0], &x = call->in[1], &rstd = call->in[2], &w = call->in[3], &add = call->in[4], &dx = call->out[0];
    if (!dx.data || !x.elements)
        return 0;
    if (dx.dtype != x.dtype || (add.data && add.dtype != x.dtype))
        return (int)cudaErrorInvalidValue;
    int64_t rows = rows_of(x), cols = cols_of(x);
    bool vector = cols % LANE == 0 && aligned(dy.data) && aligned(x.data) && aligned(w.data) && aligned(add.data) && aligned(dx.data);
    return with_types(dy.dtype, x.dtype, w.data ? w.dtype : x.dtype, [&](auto td, auto tx, auto tw) {
        using D = typename decltype(td)::is;
        using X = typename decltype(tx)::is;
        using W = typename decltype(tw)::is;
        const D *pd = (const D *)dy.data;
        const X *px = (const X *)x.data;
        const W *pw = (const W *)w.data;
        const X *pa = (const X *)add.data;
        X *po = (X *)dx.data;
        const float *pr = (const float *)rstd.data;
        bool done = with_packs(cols, vector, [&](auto packs) {
            constexpr int PACKS = decltype(packs)::value;
            norm_grad_warp_kernel<D, X, W, PACKS><<<blocks_for(rows, ROW_THREADS / WARP), ROW_THREADS, 0, stream_of(call)>>>(
                pd, px, pr, pw, pa, po, rows, (int)cols);
        });
        if (!done && vector)
            norm_grad_block_kernel<D, X, W, 8><<<(unsigned)rows, THREADS, 0, stream_of(call)>>>(pd, px, pr, pw, pa, po, cols);
        else if (!done)
            norm_grad_block_kernel<D, X, W, 1><<<(unsigned)rows, THREADS, 0, stream_of(call)>>>(pd, px, pr, pw, pa, po, cols);
        return launched();
    });
}

extern "C" size_t vlai_cuda_workspace_rms_norm_grad_weight(const vla_graph *g, const vlai_node *node)
{
    const vlai_value_info &x = operand_of(g, node, 1);
    return column_workspace(x.shape[0], cols_of(x));
}

static int norm_weight(const vlai_cuda_call *call, const vlai_cuda_tensor &dw)
{
    const vlai_cuda_tensor &dy = call->in[0], &x = call->in[1], &rstd = call->in[2];
    if (!dw.data || !dw.elements)
        return 0;
    int64_t rows = rows_of(x), cols = cols_of(x);
    bool vector = cols % 8 == 0 && aligned(dy.data) && aligned(x.data);
    return with_types(dy.dtype, x.dtype, [&](auto td, auto tx) {
        using D = typename decltype(td)::is;
        using X = typename decltype(tx)::is;
        weight_term<D, X> term = {(const D *)dy.data, (const X *)x.data, (const float *)rstd.data, cols, vector};
        return column_sum(call, dw, term, rows, cols);
    });
}

extern "C" int vlai_cuda_rms_norm_grad_weight(const vlai_cuda_call *call)
{
    return norm_weight(call, call->out[0]);
}

/* y = x r w, for rows that do not suit the fused kernel. */
template <class X, class W>
__global__ void __launch_bounds__(THREADS) norm_again_kernel(const X *x, const float *rstd, const W *w, X *y, int64_t n, int64_t cols)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        int64_t row = divide(i, cols);
        y[i] = from_float<X>(to_float(x[i]) * rstd[row] * to_float(w[i - row * cols]));
    }
}

static int norm_again(const vlai_cuda_call *call, const vlai_cuda_tensor &y)
{
    const vlai_cuda_tensor &x = call->in[1], &w = call->in[3];
    if (y.dtype != x.dtype)
        return (int)cudaErrorInvalidValue;
    return with_types(x.dtype, w.dtype, [&](auto tx, auto tw) {
        using X = typename decltype(tx)::is;
        using W = typename decltype(tw)::is;
        norm_again_kernel<X, W><<<blocks_for(x.elements, THREADS), THREADS, 0, stream_of(call)>>>(
            (const X *)x.data, (const float *)call->in[2].data, (const W *)w.data, (X *)y.data, x.elements, cols_of(x));
        return launched();
    });
}

extern "C" size_t vlai_cuda_workspace_rms_norm_backward(const vla_graph *g, const vlai_node *node)
{
    const vlai_value_info &x = operand_of(g, node, 1);
    int64_t rows = x.shape[0], cols = cols_of(x);
    size_t apart = column_workspace(rows, cols), both = node->attrs.norm.sums == VLA_DTYPE_NONE ? 1 : 2;
    size_t fused = cols > FUSED_COLS ? 0 : round_256(both * (size_t)(row_blocks(rows, cols) * cols) * sizeof(float));
    return apart > fused ? apart : fused;
}

/* Where rows do not suit the fused kernel. The weight's gradient first: dx may lie over dy. */
static int norm_backward_apart(const vlai_cuda_call *call, const vlai_cuda_tensor &dw, const vlai_cuda_tensor &y)
{
    int status = norm_weight(call, dw);
    if (!status && y.data && call->in[1].elements)
        status = norm_again(call, y);
    if (!status)
        status = vlai_cuda_rms_norm_grad(call);
    return status ? status : sums_apart(call);
}

/* By warps per row, where there is a kernel for such rows, compiled for a device that copies rows by itself (9.0 on) and has
 * room for them. */
static int norm_backward_rows(const vlai_cuda_call *call, const vlai_cuda_tensor &dw, const vlai_cuda_tensor &y, const vlai_cuda_tensor &sums,
                              bool *done)
{
    const vlai_cuda_tensor &dy = call->in[0], &x = call->in[1], &w = call->in[3], &add = call->in[4], &dx = call->out[0];
    int64_t rows = rows_of(x), cols = cols_of(x), blocks = 0;
    float *partial = (float *)call->workspace, *partial_sums = nullptr;
    *done = false;
    if (dy.dtype != VLA_BF16 || x.dtype != VLA_BF16 || rows > INT32_MAX / 64)
        return 0;
    int status = with_type(w.data ? w.dtype : x.dtype, [&](auto tw) {
        using W = typename decltype(tw)::is;
        auto launch = [&](auto by, auto with_sums) {
            using BY = decltype(by);
            auto kernel = norm_rows_kernel<BY, W, decltype(with_sums)::value>;
            if (!has_code(kernel) || allow_ring(kernel, BY::BYTES)) {
                (void)cudaGetLastError();
                return 0;
            }
            blocks = BY::blocks(rows);
            partial_sums = partial + (dw.data ? blocks * cols : 0);
            kernel<<<(unsigned)blocks, BY::BLOCK, BY::BYTES, stream_of(call)>>>(
                (const bf16 *)dy.data, (const bf16 *)x.data, (const float *)call->in[2].data, (const W *)w.data, (const bf16 *)add.data,
                (bf16 *)dx.data, (bf16 *)y.data, dw.data ? partial : nullptr, partial_sums, (int)rows);
            *done = true;
            return launched();
        };
        auto choose = [&](auto by) { return sums.data ? launch(by, std::true_type{}) : launch(by, std::false_type{}); };
        switch (cols) {
        case 1024: return choose(row_teams<1024, 1, 8, 3>{});
        case 1280: return choose(row_teams<1280, 1, 8, 3>{});
        case 2048: return sums.data ? 0 : launch(row_teams<2048, 4, 5, 3>{}, std::false_type{});
        default: return 0;
        }
    });
    return status || !*done ? status : column_total_2(call, dw, partial, blocks, sums, partial_sums, blocks, cols);
}

extern "C" int vlai_cuda_rms_norm_backward(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &dy = call->in[0], &x = call->in[1], &w = call->in[3], &add = call->in[4], &dx = call->out[0];
    const vlai_cuda_tensor dw = plain_result(call, 1), y = plain_result(call, 2), sums = sums_result(call, 0);
    int64_t rows = rows_of(x), cols = cols_of(x), blocks = row_blocks(rows, cols);
    if (!dx.data || !x.elements || cols % LANE || cols > FUSED_COLS || !aligned(dy.data) || !aligned(x.data) || !aligned(w.data) ||
        !aligned(add.data) || !aligned(dx.data) || !aligned(y.data))
        return norm_backward_apart(call, dw, y);
    if (dx.dtype != x.dtype || (add.data && add.dtype != x.dtype) || (y.data && y.dtype != x.dtype))
        return (int)cudaErrorInvalidValue;
    bool fused = false;
    int by_rows = norm_backward_rows(call, dw, y, sums, &fused);
    if (by_rows || fused)
        return by_rows;
    float *partial = (float *)call->workspace, *partial_sums = partial + (dw.data ? blocks * cols : 0);
    int status = with_types(dy.dtype, x.dtype, w.data ? w.dtype : x.dtype, [&](auto td, auto tx, auto tw) {
        using D = typename decltype(td)::is;
        using X = typename decltype(tx)::is;
        using W = typename decltype(tw)::is;
        int code = 0;
        fused = with_depth<D, X>(cols, [&](auto turn, auto stages, size_t bytes) {
            auto launch = [&](auto with_sums) {
                auto kernel = norm_backward_kernel<D, X, W, decltype(with_sums)::value, decltype(turn)::value, decltype(stages)::value>;
                if ((code = allow_ring(kernel, bytes)))
                    return;
                kernel<<<(unsigned)blocks, row_threads(cols), bytes, stream_of(call)>>>(
                    (const D *)dy.data, (const X *)x.data, (const float *)call->in[2].data, (const W *)w.data, (const X *)add.data,
                    (X *)dx.data, (X *)y.data, dw.data ? partial : nullptr, partial_sums, rows, cols);
                code = launched();
            };
            if (sums.data)
                launch(std::true_type{});
            else
                launch(std::false_type{});
        });
        return code;
    });
    if (!fused)
        return status ? status : norm_backward_apart(call, dw, y);
    return status ? status : column_total_2(call, dw, partial, blocks, sums, partial_sums, blocks, cols);
}
