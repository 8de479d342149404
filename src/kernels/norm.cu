/* RMSNorm and its gradients.
 *
 *     rms_norm              x [N,C], w [C] or none -> y = x r w, r [N] = 1/sqrt(mean(x^2) + eps) (fp32)
 *     rms_norm_grad         dy, x [N,C], r, w      -> dx = r (w dy) - x r^3 mean(w dy x)
 *     rms_norm_grad_weight  dy, x [N,C], r         -> dw [C] = sum over rows of dy x r
 *
 * Rows of up to 2048 columns (a multiple of 8): a warp per row, the row kept in registers as it is stored, so x (and dy)
 * are read once: 2 N C and 3 N C elements of traffic. Other rows: a block per row, which reads the row again, from cache.
 * Expected: 0.9 of copy bandwidth at C = 1280 and 2048. dx may lie over dy: a row is read before it is written. */
#include "kernels/columns.cuh"

namespace {

enum { ROW_THREADS = 128, LANE = 8, WARP_COLS = WARP * LANE };

template <class X, class W, class Y, int PACKS>
__global__ void __launch_bounds__(ROW_THREADS)
    norm_warp_kernel(const X *x, const W *w, Y *y, float *rstd, int64_t rows, int cols, float eps)
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
            pack<Y, LANE> py;
            py.set(v);
            py.store(y + row * cols + col);
        }
    }
}

template <class X, class W, class Y, int V>
__global__ void __launch_bounds__(THREADS)
    norm_block_kernel(const X *x, const W *w, Y *y, float *rstd, int64_t cols, float eps)
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
        pack<Y, V> py;
        py.set(v);
        py.store(y + row * cols + i);
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

bool fits_warp(int64_t cols, bool vector)
{
    return vector && cols <= 8 * WARP_COLS;
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
    return with_types(x.dtype, w.data ? w.dtype : x.dtype, y.dtype, [&](auto tx, auto tw, auto ty) {
        using X = typename decltype(tx)::is;
        using W = typename decltype(tw)::is;
        using Y = typename decltype(ty)::is;
        const X *px = (const X *)x.data;
        const W *pw = (const W *)w.data;
        Y *py = (Y *)y.data;
        float *pr = (float *)rstd.data;
        unsigned blocks = blocks_for(rows, ROW_THREADS / WARP);
        if (fits_warp(cols, vector) && cols <= 2 * WARP_COLS)
            norm_warp_kernel<X, W, Y, 2><<<blocks, ROW_THREADS, 0, stream_of(call)>>>(px, pw, py, pr, rows, (int)cols, eps);
        else if (fits_warp(cols, vector))
            norm_warp_kernel<X, W, Y, 8><<<blocks, ROW_THREADS, 0, stream_of(call)>>>(px, pw, py, pr, rows, (int)cols, eps);
        else if (vector)
            norm_block_kernel<X, W, Y, 8><<<(unsigned)rows, THREADS, 0, stream_of(call)>>>(px, pw, py, pr, cols, eps);
        else
            norm_block_kernel<X, W, Y, 1><<<(unsigned)rows, THREADS, 0, stream_of(call)>>>(px, pw, py, pr, cols, eps);
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
        unsigned blocks = blocks_for(rows, ROW_THREADS / WARP);
        if (fits_warp(cols, vector) && cols <= 2 * WARP_COLS)
            norm_grad_warp_kernel<D, X, W, 2><<<blocks, ROW_THREADS, 0, stream_of(call)>>>(pd, px, pr, pw, pa, po, rows, (int)cols);
        else if (fits_warp(cols, vector))
            norm_grad_warp_kernel<D, X, W, 8><<<blocks, ROW_THREADS, 0, stream_of(call)>>>(pd, px, pr, pw, pa, po, rows, (int)cols);
        else if (vector)
            norm_grad_block_kernel<D, X, W, 8><<<(unsigned)rows, THREADS, 0, stream_of(call)>>>(pd, px, pr, pw, pa, po, cols);
        else
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

extern "C" size_t vlai_cuda_workspace_rms_norm_backward(const vla_graph *g, const vlai_node *node)
{
    return vlai_cuda_workspace_rms_norm_grad_weight(g, node);
}

extern "C" int vlai_cuda_rms_norm_backward(const vlai_cuda_call *call)
{
    int status = norm_weight(call, call->out[1]);
    return status ? status : vlai_cuda_rms_norm_grad(call);
}
