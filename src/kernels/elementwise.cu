/* Elementwise kernels: y[i] = f(a[i]) or f(a[i], b[i]), and SwiGLU on rows.
 *
 *     add, sub, mul, scale, cast, copy, accumulate, silu, gelu and their gradients: [n], any mixture of bf16 and fp32
 *     swiglu       x [N, 2I] = gate | up  ->  y [N, I] = silu(gate) up
 *     swiglu_grad  dy [N, I], x [N, 2I]   ->  dx [N, 2I] = dy up silu'(gate) | dy silu(gate)
 *     swiglu_backward: the same, and h [N, I] = swiglu(x), and the column sums [2I] of dx
 *
 * Each element is read and written once: (operands + 1) x n x size bytes; SwiGLU 3 I, 5 I and 6 I elements a row. A block takes
 * UNROLL x 256 packs of 8 neighbouring elements, all loads before the first use; swiglu one pack of each half a thread, whose loads
 * more threads keep under way: 105 us where two packs a thread took 110 ([6784,22016] on an H200). Measured there: 1.2 of the
 * bandwidth of a copy as long, for SwiGLU and its gradients at the sizes of a step.
 * A result may lie over an operand: a thread reads its own elements before it writes there.
 *
 * With column sums (widths that are multiples of 8) a block takes a strip of 256 columns of gate and the same of up, and its 8
 * warps 8 rows at a time; the blocks of a strip go down the rows together, so that all that is under way lies close. The next row
 * is loaded ahead; a lane has 8 neighbouring columns of each half, whose sums stay in its registers. As many blocks as are resident
 * at once; their partial sums stay in L2. Measured: 186 us at [16848,6912], 169 without sums. */
#include "kernels/columns.cuh"

namespace {

enum { PACK = 8, UNROLL = 2, BLOCK_ELEMENTS = PACK * UNROLL * THREADS };

template <class F, class A, class Y>
__global__ void __launch_bounds__(THREADS) unary_kernel(F f, const A *a, Y *y, int64_t n, bool vector)
{
    int64_t first = (int64_t)blockIdx.x * BLOCK_ELEMENTS + threadIdx.x * PACK;
    pack<A, PACK> pa[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int64_t at = first + k * PACK * THREADS;
        if (vector && at + PACK <= n)
            pa[k].load(a + at);
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int64_t at = first + k * PACK * THREADS;
        if (vector && at + PACK <= n) {
            float x[PACK];
            pa[k].get(x);
#pragma unroll
            for (int i = 0; i < PACK; i++)
                x[i] = f(x[i]);
            pack<Y, PACK> py;
            py.set(x);
            py.store(y + at);
        } else {
            for (int64_t i = at; i < n && i < at + PACK; i++)
                y[i] = from_float<Y>(f(to_float(a[i])));
        }
    }
}

template <class F, class A, class B, class Y>
__global__ void __launch_bounds__(THREADS) binary_kernel(F f, const A *a, const B *b, Y *y, int64_t n, bool vector)
{
    int64_t first = (int64_t)blockIdx.x * BLOCK_ELEMENTS + threadIdx.x * PACK;
    pack<A, PACK> pa[UNROLL];
    pack<B, PACK> pb[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int64_t at = first + k * PACK * THREADS;
        if (vector && at + PACK <= n) {
            pa[k].load(a + at);
            pb[k].load(b + at);
        }
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int64_t at = first + k * PACK * THREADS;
        if (vector && at + PACK <= n) {
            float x[PACK], z[PACK];
            pa[k].get(x);
            pb[k].get(z);
#pragma unroll
            for (int i = 0; i < PACK; i++)
                x[i] = f(x[i], z[i]);
            pack<Y, PACK> py;
            py.set(x);
            py.store(y + at);
        } else {
            for (int64_t i = at; i < n && i < at + PACK; i++)
                y[i] = from_float<Y>(f(to_float(a[i]), to_float(b[i])));
        }
    }
}

struct add_op {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct sub_op {
    __device__ float operator()(float a, float b) const { return a - b; }
};
struct mul_op {
    __device__ float operator()(float a, float b) const { return a * b; }
};
struct scale_op {
    float factor;
    __device__ float operator()(float a) const { return a * factor; }
};
struct same_op {
    __device__ float operator()(float a) const { return a; }
};

template <bool FAST> struct silu_op {
    __device__ float operator()(float x) const
    {
        if constexpr (FAST)
            return x * sigmoid<true>(x);
        else
            return x / (1.0f + expf(-x));
    }
};

/* d silu / dx = s (1 + x (1 - s)), s = sigmoid(x). */
template <bool FAST> __device__ inline float silu_slope(float x)
{
    float s = sigmoid<FAST>(x);
    return s * (1.0f + x * (1.0f - s));
}

template <bool FAST> struct silu_grad_op {
    __device__ float operator()(float dy, float x) const { return dy * silu_slope<FAST>(x); }
};

/* Phi(x), the normal distribution function, and e = exp(-x^2 / 2). FAST, for values that are stored as bf16: Phi(-a) = e t P(t), t = 1 / (1 +
 * 0.362 a), P of degree 6 fitted by least squares of relative errors over 0 <= a <= 14: off by 8e-7 of Phi(-a), 3e-6 in fp32. */
template <bool FAST> __device__ inline float phi(float x, float &e)
{
    if constexpr (FAST) {
        float t, p = 0.04793756f;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(1.0f + 0.362f * fabsf(x)));
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * x * -0.72134752f));
        p = p * t - 0.18000723f;
        p = p * t + 0.17661399f;
        p = p * t + 0.0288337f;
        p = p * t + 0.13942889f;
        p = p * t + 0.14268945f;
        p = p * t + 0.1445039f;
        p = p * t * e;
        return x < 0 ? p : 1.0f - p;
    } else {
        e = expf(-0.5f * x * x);
        return 0.5f * erfcf(-x * 0.70710678118654752440f);
    }
}

template <bool FAST> struct gelu_op {
    __device__ float operator()(float x) const
    {
        float e;
        return x * phi<FAST>(x, e);
    }
};
template <bool FAST> struct gelu_grad_op {
    /* Phi(x) + x phi(x), phi the normal density: 0.39894228 = 1/sqrt(2 pi). */
    __device__ float operator()(float dy, float x) const
    {
        float e, whole = phi<FAST>(x, e);
        return dy * (whole + x * (0.39894228040143267794f * e));
    }
};

template <class F> int unary(const vlai_cuda_call *call, F f)
{
    const vlai_cuda_tensor &a = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    return with_types(a.dtype, y.dtype, [&](auto ta, auto ty) {
        using A = typename decltype(ta)::is;
        using Y = typename decltype(ty)::is;
        bool vector = aligned(a.data) && aligned(y.data);
        unary_kernel<<<blocks_for(y.elements, BLOCK_ELEMENTS), THREADS, 0, stream_of(call)>>>(
            f, (const A *)a.data, (Y *)y.data, y.elements, vector);
        return launched();
    });
}

template <class F>
int binary(const vlai_cuda_call *call, F f, const vlai_cuda_tensor &a, const vlai_cuda_tensor &b, const vlai_cuda_tensor &y)
{
    if (!y.data || !y.elements)
        return 0;
    return with_types(a.dtype, b.dtype, y.dtype, [&](auto ta, auto tb, auto ty) {
        using A = typename decltype(ta)::is;
        using B = typename decltype(tb)::is;
        using Y = typename decltype(ty)::is;
        bool vector = aligned(a.data) && aligned(b.data) && aligned(y.data);
        binary_kernel<<<blocks_for(y.elements, BLOCK_ELEMENTS), THREADS, 0, stream_of(call)>>>(
            f, (const A *)a.data, (const B *)b.data, (Y *)y.data, y.elements, vector);
        return launched();
    });
}

/* The same bytes elsewhere, or another type. */
int move(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements || y.data == x.data)
        return 0;
    if (x.dtype == y.dtype)
        return (int)cudaMemcpyAsync(y.data, x.data, (size_t)y.elements * vla_dtype_size(y.dtype), cudaMemcpyDeviceToDevice,
                                    stream_of(call));
    return unary(call, same_op{});
}

/* A thread takes V neighbouring columns of a row. */
template <class X, class Y, int V>
__global__ void __launch_bounds__(THREADS) swiglu_kernel(const X *x, Y *y, int64_t packs, int64_t width)
{
    constexpr bool FAST = std::is_same_v<X, bf16>;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs)
        return;
    int64_t at = i * V + divide(i, width / V) * width; /* of gate, in x */
    pack<X, V> pg, pu;
    pg.load(x + at);
    pu.load(x + at + width);
    float gate[V], up[V];
    pg.get(gate);
    pu.get(up);
#pragma unroll
    for (int k = 0; k < V; k++) {
        float silu = silu_op<FAST>{}(gate[k]);
        gate[k] = (FAST ? round_bf16(silu) : silu) * up[k];
    }
    pack<Y, V> py;
    py.set(gate);
    py.store(y + i * V);
}

/* d, gate, up -> h, dgate, dup, in their places. */
template <bool FAST, int V> __device__ inline void swiglu_back(float (&d)[V], float (&gate)[V], float (&up)[V])
{
#pragma unroll
    for (int k = 0; k < V; k++) {
        float s = sigmoid<FAST>(gate[k]), slope = s * (1.0f + gate[k] * (1.0f - s)), dup = d[k] * up[k];
        float silu = FAST ? round_bf16(gate[k] * s) : gate[k] * s, factor = up[k];
        up[k] = d[k] * silu;
        gate[k] = (FAST ? round_bf16(dup) : dup) * slope;
        d[k] = silu * factor;
    }
}

/* A thread takes UNROLL times V neighbouring columns of a row, all loads before the first use. h: none for swiglu_grad. dx may
 * lie over x. */
template <class D, class X, int V>
__global__ void __launch_bounds__(THREADS) swiglu_grad_kernel(const D *dy, const X *x, X *dx, X *h, int64_t packs, int64_t width)
{
    constexpr bool FAST = std::is_same_v<X, bf16>;
    int64_t first = (int64_t)blockIdx.x * (UNROLL * THREADS) + threadIdx.x, at[UNROLL];
    pack<D, V> pd[UNROLL];
    pack<X, V> pg[UNROLL], pu[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int64_t i = first + u * THREADS;
        if (i < packs) {
            at[u] = i * V + divide(i, width / V) * width;
            pd[u].load(dy + i * V);
            pg[u].load(x + at[u]);
            pu[u].load(x + at[u] + width);
        }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int64_t i = first + u * THREADS;
        if (i >= packs)
            break;
        float d[V], gate[V], up[V];
        pd[u].get(d);
        pg[u].get(gate);
        pu[u].get(up);
        swiglu_back<FAST>(d, gate, up);
        if (h) {
            pack<X, V> ph;
            ph.set(d);
            ph.store(h + i * V);
        }
        pg[u].set(gate);
        pu[u].set(up);
        pg[u].store(dx + at[u]);
        pu[u].store(dx + at[u] + width);
    }
}

enum { WARPS = THREADS / WARP, STRIP = WARP * PACK, RESIDENT = 3 * 132 };

/* Strips of columns, and blocks that share the rows of each: as many in all as are resident, three on each of 132
 * multiprocessors. */
struct strips {
    int64_t n, blocks;
};

strips strips_of(int64_t rows, int64_t width)
{
    strips s;
    s.n = (width + STRIP - 1) / STRIP;
    int64_t most = (rows + 4 * WARPS - 1) / (4 * WARPS), wanted = s.n && RESIDENT > s.n ? RESIDENT / s.n : 1;
    s.blocks = wanted < most ? wanted : most;
    return s;
}

/* partial [blocks, 2 width]. h may be NULL; dx may lie over x. */
template <class X>
__global__ void __launch_bounds__(THREADS, sizeof(X) == 2 ? 3 : 2)
    swiglu_sums_kernel(const X *dy, const X *x, X *dx, X *h, float *partial, int64_t rows, int64_t width)
{
    __shared__ float sums[WARPS][2 * STRIP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t col = (int64_t)blockIdx.x * STRIP + lane * PACK;
    int64_t row = (int64_t)blockIdx.y * WARPS + warp, step = (int64_t)gridDim.y * WARPS;
    float gates[PACK] = {0}, ups[PACK] = {0};
    struct {
        pack<X, PACK> d, gate, up;
    } now, next;
    auto load = [&](auto &p, int64_t at) {
        if (at < rows) {
            p.d.load(dy + at * width + col);
            p.gate.load(x + at * 2 * width + col);
            p.up.load(x + at * 2 * width + width + col);
        }
    };
    if (col < width) {
        load(now, row);
        for (; row < rows; row += step) {
            load(next, row + step);
            float d[PACK], gate[PACK], up[PACK];
            now.d.get(d);
            now.gate.get(gate);
            now.up.get(up);
            swiglu_back<std::is_same_v<X, bf16>>(d, gate, up);
            now.gate.set(gate);
            now.up.set(up);
            now.gate.store(dx + row * 2 * width + col);
            now.up.store(dx + row * 2 * width + width + col);
            if (h) {
                now.d.set(d);
                now.d.store(h + row * width + col);
            }
            now.gate.get(gate);
            now.up.get(up);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                gates[i] += gate[i];
                ups[i] += up[i];
            }
            now = next;
        }
    }
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        sums[warp][lane * PACK + i] = gates[i];
        sums[warp][STRIP + lane * PACK + i] = ups[i];
    }
    __syncthreads();
    static_assert(STRIP == THREADS, "a thread for each column of a strip");
    col = (int64_t)blockIdx.x * STRIP + threadIdx.x;
    if (col >= width)
        return;
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        gate += sums[w][threadIdx.x];
        up += sums[w][STRIP + threadIdx.x];
    }
    partial[blockIdx.y * 2 * width + col] = gate;
    partial[blockIdx.y * 2 * width + width + col] = up;
}

/* Columns per thread: as many as divide the width and keep every row aligned. */
template <class F> int with_width(int64_t width, bool vector, F f)
{
    if (vector && width % 8 == 0)
        return f(std::integral_constant<int, 8>{});
    if (vector && width % 4 == 0)
        return f(std::integral_constant<int, 4>{});
    return f(std::integral_constant<int, 1>{});
}

template <class Y>
__global__ void __launch_bounds__(THREADS) fill_kernel(Y *y, int64_t n, float value)
{
    pack<Y, PACK> p;
    float x[PACK];
#pragma unroll
    for (int i = 0; i < PACK; i++)
        x[i] = value;
    p.set(x);
    int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (at + PACK <= n && (size_t)y % 16 == 0)
        p.store(y + at);
    else
        for (int64_t i = at; i < n && i < at + PACK; i++)
            y[i] = from_float<Y>(value);
}

} // namespace

#define UNARY(name, f)                                                                            \
    extern "C" int vlai_cuda_##name(const vlai_cuda_call *call) { return unary(call, f); }        \
    NO_WORKSPACE(name)
#define BINARY(name, f)                                                                           \
    extern "C" int vlai_cuda_##name(const vlai_cuda_call *call)                                                                                              \
    {                                                                                             \
        return binary(call, f, call->in[0], call->in[1], call->out[0]);                           \
    }                                                                                             \
    NO_WORKSPACE(name)
#define MOVE(name)                                                                                \
    extern "C" int vlai_cuda_##name(const vlai_cuda_call *call) { return move(call); }            \
    NO_WORKSPACE(name)

BINARY(add, add_op{})
BINARY(sub, sub_op{})
BINARY(mul, mul_op{})
UNARY(scale, scale_op{(float)call->node->attrs.fill.value})
MOVE(cast)
MOVE(stop_gradient)
MOVE(reshape)
MOVE(copy)
NO_WORKSPACE(accumulate)
NO_WORKSPACE(gelu)
NO_WORKSPACE(gelu_grad)
NO_WORKSPACE(silu)
NO_WORKSPACE(silu_grad)
NO_WORKSPACE(swiglu)
NO_WORKSPACE(swiglu_grad)
NO_WORKSPACE(fill)

extern "C" int vlai_cuda_silu(const vlai_cuda_call *call)
{
    return call->out[0].dtype == VLA_BF16 ? unary(call, silu_op<true>{}) : unary(call, silu_op<false>{});
}

extern "C" int vlai_cuda_silu_grad(const vlai_cuda_call *call)
{
    return call->out[0].dtype == VLA_BF16 ? binary(call, silu_grad_op<true>{}, call->in[0], call->in[1], call->out[0])
                                           : binary(call, silu_grad_op<false>{}, call->in[0], call->in[1], call->out[0]);
}

extern "C" int vlai_cuda_gelu(const vlai_cuda_call *call)
{
    return call->out[0].dtype == VLA_BF16 ? unary(call, gelu_op<true>{}) : unary(call, gelu_op<false>{});
}

extern "C" int vlai_cuda_gelu_grad(const vlai_cuda_call *call)
{
    return call->out[0].dtype == VLA_BF16 ? binary(call, gelu_grad_op<true>{}, call->in[0], call->in[1], call->out[0])
                                           : binary(call, gelu_grad_op<false>{}, call->in[0], call->in[1], call->out[0]);
}

/* in[0] += in[1], in place. */
extern "C" int vlai_cuda_accumulate(const vlai_cuda_call *call)
{
    return binary(call, add_op{}, call->in[0], call->in[1], call->in[0]);
}

extern "C" int vlai_cuda_swiglu(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    int64_t width = cols_of(y);
    return with_types(x.dtype, y.dtype, [&](auto tx, auto ty) {
        using X = typename decltype(tx)::is;
        using Y = typename decltype(ty)::is;
        return with_width(width, aligned(x.data) && aligned(y.data), [&](auto v) {
            constexpr int V = decltype(v)::value;
            int64_t packs = y.elements / V;
            swiglu_kernel<X, Y, V><<<blocks_for(packs, THREADS), THREADS, 0, stream_of(call)>>>((const X *)x.data, (Y *)y.data, packs, width);
            return launched();
        });
    });
}

extern "C" int vlai_cuda_swiglu_grad(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &dy = call->in[0], &x = call->in[1], &dx = call->out[0], h = plain_result(call, 1);
    if (!dx.data || !dx.elements)
        return 0;
    if (dx.dtype != x.dtype || (h.data && h.dtype != x.dtype))
        return (int)cudaErrorInvalidValue;
    int64_t width = cols_of(dy);
    return with_types(dy.dtype, x.dtype, [&](auto td, auto tx) {
        using D = typename decltype(td)::is;
        using X = typename decltype(tx)::is;
        return with_width(width, aligned(dy.data) && aligned(x.data) && aligned(dx.data) && aligned(h.data), [&](auto v) {
            constexpr int V = decltype(v)::value;
            int64_t packs = dy.elements / V;
            swiglu_grad_kernel<D, X, V><<<blocks_for(packs, UNROLL * THREADS), THREADS, 0, stream_of(call)>>>(
                (const D *)dy.data, (const X *)x.data, (X *)dx.data, (X *)h.data, packs, width);
            return launched();
        });
    });
}

extern "C" size_t vlai_cuda_workspace_swiglu_backward(const vla_graph *g, const vlai_node *node)
{
    const vlai_value_info &x = operand_of(g, node, 1);
    if (node->attrs.swiglu.sums == VLA_DTYPE_NONE)
        return 0;
    size_t apart = column_workspace(x.shape[0], cols_of(x));
    size_t fused = round_256((size_t)strips_of(x.shape[0], cols_of(x) / 2).blocks * (size_t)cols_of(x) * sizeof(float));
    return apart > fused ? apart : fused;
}

extern "C" int vlai_cuda_swiglu_backward(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &dy = call->in[0], &x = call->in[1], &dx = call->out[0], h = plain_result(call, 1), sums = sums_result(call, 0);
    int64_t rows = rows_of(x), width = cols_of(dy);
    bool fused = sums.data && dx.data && dx.elements && width % PACK == 0 && dy.dtype == x.dtype && aligned(dy.data) && aligned(x.data) &&
                 aligned(dx.data) && aligned(h.data);
    if (!fused) {
        int status = vlai_cuda_swiglu_grad(call);
        return status ? status : sums_apart(call);
    }
    if (dx.dtype != x.dtype || (h.data && h.dtype != x.dtype))
        return (int)cudaErrorInvalidValue;
    strips s = strips_of(rows, width);
    float *partial = (float *)call->workspace;
    int status = with_type(x.dtype, [&](auto tx) {
        using X = typename decltype(tx)::is;
        swiglu_sums_kernel<X><<<dim3((unsigned)s.n, (unsigned)s.blocks), THREADS, 0, stream_of(call)>>>(
            (const X *)dy.data, (const X *)x.data, (X *)dx.data, (X *)h.data, partial, rows, width);
        return launched();
    });
    return status ? status : column_total(call, sums, partial, s.blocks, 2 * width);
}

extern "C" int vlai_cuda_fill(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    return with_type(y.dtype, [&](auto ty) {
        using Y = typename decltype(ty)::is;
        fill_kernel<<<blocks_for(y.elements, PACK * THREADS), THREADS, 0, stream_of(call)>>>(
            (Y *)y.data, y.elements, (float)call->node->attrs.fill.value);
        return launched();
    });
}
