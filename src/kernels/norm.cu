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
 * rms_norm_backward, up to 4096 columns: a thread owns 8 neighbouring columns and goes down the rows of its block, two at a
 * time while the next two are on their way; sums of dw and of dx stay in its registers until the rows are done. 4 N C elements
 * (5 with y), and the partial sums [blocks, C] of each in fp32, written and read once, from L2. Blocks follow from the shape alone.
 * Expected: 0.9 of copy bandwidth at C = 1280 and 2048. dx may lie over dy or add: a row is read before it is written. */
#include "kernels/columns.cuh"

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

enum { PAIR = 2, MOST_THREADS = 512, FUSED_COLS = MOST_THREADS * LANE, MULTIPROCESSORS = 132 };

/* The rows of a block, and how many blocks: as many as are resident at once, 512 threads on each of 132 multiprocessors (up
 * to 128 registers each), so that none begins late. */
struct row_blocks {
    int threads;
    int64_t blocks, rows;
};

row_blocks row_blocks_of(int64_t rows, int64_t cols)
{
    row_blocks b;
    b.threads = (int)((cols / LANE + WARP - 1) / WARP * WARP);
    int64_t most = (rows + PAIR - 1) / PAIR, wanted = MULTIPROCESSORS * (MOST_THREADS / (b.threads ? b.threads : 1));
    b.blocks = wanted < most ? wanted : most;
    b.rows = b.blocks ? (rows + b.blocks - 1) / b.blocks : 0;
    b.blocks = b.rows ? (rows + b.rows - 1) / b.rows : 0;
    return b;
}

/* A pair of rows as one thread sees it. */
template <class D, class X> struct row_pair {
    pack<D, LANE> dy[PAIR];
    pack<X, LANE> x[PAIR], add[PAIR];
    float rstd[PAIR];
};

template <class D, class X>
__device__ inline void load_pair(row_pair<D, X> &p, const D *dy, const X *x, const float *rstd, const X *add, int64_t row, int64_t end,
                                 int64_t cols, bool mine)
{
#pragma unroll
    for (int k = 0; k < PAIR; k++)
        if (row + k < end && mine) {
            p.dy[k].load(dy + k * cols);
            p.x[k].load(x + k * cols);
            if (add)
                p.add[k].load(add + k * cols);
            p.rstd[k] = rstd[row + k];
        }
}

/* partial [blocks, C]: the sums of dw over a block's rows; `sums` those of dx if SUMS. partial, y: NULL when not wanted. */
template <class D, class X, class W, bool SUMS>
__global__ void __launch_bounds__(MOST_THREADS)
    norm_backward_kernel(const D *dy, const X *x, const float *rstd, const W *w, const X *add, X *dx, X *y, float *partial, float *sums,
                         int64_t rows, int64_t cols, int64_t block_rows)
{
    __shared__ float dots[2][PAIR][WARP];
    int col = threadIdx.x * LANE, warps = blockDim.x / WARP, warp = threadIdx.x / WARP, turn = 0;
    bool mine = col < cols;
    int64_t row = blockIdx.x * block_rows, end = row + block_rows < rows ? row + block_rows : rows;
    int64_t at = row * cols + col;
    float weight[LANE], dw[LANE] = {0}, sum_dx[SUMS ? LANE : 1] = {0};
#pragma unroll
    for (int i = 0; i < LANE; i++)
        weight[i] = 1;
    if (w && mine) {
        pack<W, LANE> pw;
        pw.load(w + col);
        pw.get(weight);
    }
    row_pair<D, X> now, next;
    load_pair(now, dy + at, x + at, rstd, add ? add + at : nullptr, row, end, cols, mine);
    for (; row < end; row += PAIR) {
        at = row * cols + col;
        int64_t ahead = at + PAIR * cols;
        load_pair(next, dy + ahead, x + ahead, rstd, add ? add + ahead : nullptr, row + PAIR, end, cols, mine);
#pragma unroll
        for (int k = 0; k < PAIR; k++) {
            float sum = 0;
            if (row + k < end && mine) {
                float vx[LANE], vd[LANE];
                now.x[k].get(vx);
                now.dy[k].get(vd);
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    sum += weight[i] * vd[i] * vx[i];
            }
            sum = warp_sum(sum);
            if (threadIdx.x % WARP == 0)
                dots[turn][k][warp] = sum;
        }
        __syncthreads(); /* the other half of `dots` is written next, so that one barrier a turn is enough */
#pragma unroll
        for (int k = 0; k < PAIR; k++)
            if (row + k < end && mine) {
                float mean = 0, vx[LANE], vd[LANE], va[LANE] = {0}, r = now.rstd[k];
                for (int i = 0; i < warps; i++)
                    mean += dots[turn][k][i];
                float b = r * r * r * (mean / (float)cols);
                now.x[k].get(vx);
                now.dy[k].get(vd);
                if (add)
                    now.add[k].get(va);
                if (y) {
                    pack<X, LANE> py;
                    float vy[LANE];
#pragma unroll
                    for (int i = 0; i < LANE; i++)
                        vy[i] = vx[i] * r * weight[i];
                    py.set(vy);
                    py.store(y + at + k * cols);
                }
#pragma unroll
                for (int i = 0; i < LANE; i++) {
                    dw[i] += vd[i] * (vx[i] * r);
                    vx[i] = r * (weight[i] * vd[i]) - vx[i] * b + va[i];
                }
                now.x[k].set(vx);
                now.x[k].store(dx + at + k * cols);
                if constexpr (SUMS) {
                    now.x[k].get(vx); /* as it is stored */
#pragma unroll
                    for (int i = 0; i < LANE; i++)
                        sum_dx[i] += vx[i];
                }
            }
        turn ^= 1;
        now = next;
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
    size_t apart = column_workspace(x.shape[0], cols_of(x));
    size_t both = node->attrs.norm.sums == VLA_DTYPE_NONE ? 1 : 2;
    size_t fused = round_256(both * (size_t)row_blocks_of(x.shape[0], cols_of(x)).blocks * (size_t)cols_of(x) * sizeof(float));
    return apart > fused ? apart : fused;
}

extern "C" int vlai_cuda_rms_norm_backward(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &dy = call->in[0], &x = call->in[1], &w = call->in[3], &add = call->in[4], &dx = call->out[0];
    const vlai_cuda_tensor dw = plain_result(call, 1), y = plain_result(call, 2), sums = sums_result(call, 0);
    int64_t rows = rows_of(x), cols = cols_of(x);
    bool fused = dx.data && x.elements && cols % LANE == 0 && cols <= FUSED_COLS && aligned(dy.data) && aligned(x.data) && aligned(w.data) &&
                 aligned(add.data) && aligned(dx.data) && aligned(y.data);
    if (!fused) { /* the weight's gradient first: dx may lie over dy */
        int status = norm_weight(call, dw);
        if (!status && y.data && x.elements)
            status = norm_again(call, y);
        if (!status)
            status = vlai_cuda_rms_norm_grad(call);
        return status ? status : sums_apart(call);
    }
    if (dx.dtype != x.dtype || (add.data && add.dtype != x.dtype) || (y.data && y.dtype != x.dtype))
        return (int)cudaErrorInvalidValue;
    row_blocks b = row_blocks_of(rows, cols);
    float *partial = (float *)call->workspace, *partial_sums = partial + (dw.data ? b.blocks * cols : 0);
    int status = with_types(dy.dtype, x.dtype, w.data ? w.dtype : x.dtype, [&](auto td, auto tx, auto tw) {
        using D = typename decltype(td)::is;
        using X = typename decltype(tx)::is;
        using W = typename decltype(tw)::is;
        auto launch = [&](auto with_sums) {
            norm_backward_kernel<D, X, W, decltype(with_sums)::value><<<(unsigned)b.blocks, b.threads, 0, stream_of(call)>>>(
                (const D *)dy.data, (const X *)x.data, (const float *)call->in[2].data, (const W *)w.data, (const X *)add.data,
                (X *)dx.data, (X *)y.data, dw.data ? partial : nullptr, partial_sums, rows, cols, b.rows);
            return launched();
        };
        return sums.data ? launch(std::true_type{}) : launch(std::false_type{});
    });
    return status ? status : column_total_2(call, dw, partial, b.blocks, sums, partial_sums, b.blocks, cols);
}
