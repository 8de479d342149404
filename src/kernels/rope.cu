/* Rotary tables and rotation, and the sinusoid of the flow time.
 *
 *     rope_table  positions [A,N] -> cos, sin [N,half]: angle = fp32 position x fp32 frequency; frequencies are computed on
 *                 the host as the CPU twin does; cos and sin of the fp32 angle in double, rounded once
 *     rope        x [N, heads D], cos, sin [N, D/2] -> y_i = x_i c - x_{i+D/2} s, y_{i+D/2} = x_{i+D/2} c + x_i s
 *     sinusoid    t [N] -> [N, dim] = sin(t f_k) | cos(t f_k), f_k = exp(-k ln(period) / (dim/2 - 1))
 *
 * rope: a thread takes V pairs; x is read and written once, the tables' row stays in cache over the heads. 2 N heads D
 * elements; expected 0.85 of copy bandwidth. y may lie over x. The others are small. */
#include "kernels/common.cuh"

#include <math.h>

namespace {

enum { TABLE = 256 };

/* Frequencies of up to TABLE pairs, passed by value. */
struct frequencies {
    float f[TABLE];
    uint8_t axis[TABLE];
};

template <class C>
__global__ void __launch_bounds__(THREADS)
    table_kernel(const int32_t *position, __grid_constant__ const frequencies table, C *c, C *s, int64_t n, int first, int count, int half)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n * count)
        return;
    int64_t row = divide(i, count);
    int pair = (int)(i - row * count);
    float angle = __fmul_rn((float)position[table.axis[pair] * n + row], table.f[pair]);
    double sine, cosine;
    sincos((double)angle, &sine, &cosine);
    if (c)
        c[row * half + first + pair] = from_float<C>((float)cosine);
    if (s)
        s[row * half + first + pair] = from_float<C>((float)sine);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    sinusoid_kernel(const T *t, __grid_constant__ const frequencies table, T *y, int64_t n, int first, int count, int half)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n * count)
        return;
    int64_t row = divide(i, count);
    int k = (int)(i - row * count);
    float angle = __fmul_rn(to_float(t[row]), table.f[k]);
    double sine, cosine;
    sincos((double)angle, &sine, &cosine);
    y[row * 2 * half + first + k] = from_float<T>((float)sine);
    y[row * 2 * half + half + first + k] = from_float<T>((float)cosine);
}

/* groups: packs of V pairs in the matrix; per_row of them in a row, per_head in a head. */
template <class X, class C, class Y, int V>
__global__ void __launch_bounds__(THREADS)
    rope_kernel(const X *x, const C *c, const C *s, Y *y, int64_t groups, int64_t per_row, int per_head, int half, float sign)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= groups)
        return;
    int64_t row = divide(i, per_row);
    int in_row = (int)(i - row * per_row), head = in_row / per_head, pair = (in_row - head * per_head) * V;
    int64_t at = row * per_row * V * 2 + (int64_t)head * 2 * half + pair;
    pack<X, V> pa, pb;
    pack<C, V> pc, ps;
    pa.load(x + at);
    pb.load(x + at + half);
    pc.load(c + row * half + pair);
    ps.load(s + row * half + pair);
    float a[V], b[V], cosine[V], sine[V];
    pa.get(a);
    pb.get(b);
    pc.get(cosine);
    ps.get(sine);
#pragma unroll
    for (int k = 0; k < V; k++) {
        float u = a[k], v = b[k], w = sign * sine[k];
        a[k] = u * cosine[k] - v * w;
        b[k] = v * cosine[k] + u * w;
    }
    pack<Y, V> ya, yb;
    ya.set(a);
    yb.set(b);
    ya.store(y + at);
    yb.store(y + at + half);
}

} // namespace

NO_WORKSPACE(rope_table)
NO_WORKSPACE(rope)
NO_WORKSPACE(sinusoid)

extern "C" int vlai_cuda_rope_table(const vlai_cuda_call *call)
{
    const vla_rope_options *options = &call->node->attrs.rope_table;
    const vlai_cuda_tensor &p = call->in[0], &c = call->out[0], &s = call->out[1];
    if ((!c.data && !s.data) || !c.elements)
        return 0;
    int64_t n = p.shape[1];
    int half = options->half, at = 0, axis = 0, in_section = 0;
    while (at < half) {
        frequencies table = {};
        int count = 0;
        for (; count < TABLE && at + count < half; count++) {
            while (axis < options->axes - 1 && in_section >= options->sections[axis]) {
                axis++;
                in_section = 0;
            }
            int i = at + count, j = options->restart ? in_section : i, span = options->restart ? options->sections[axis] : half;
            float exponent = (float)(2 * j) / (float)(2 * span);
            table.f[count] = 1.0f / (float)pow((double)(float)options->base, (double)exponent);
            table.axis[count] = (uint8_t)axis;
            in_section++;
        }
        int status = with_type(c.dtype, [&](auto tc) {
            using C = typename decltype(tc)::is;
            table_kernel<<<blocks_for(n * count, THREADS), THREADS, 0, stream_of(call)>>>(
                (const int32_t *)p.data, table, (C *)c.data, (C *)s.data, n, at, count, half);
            return launched();
        });
        if (status)
            return status;
        at += count;
    }
    return 0;
}

extern "C" int vlai_cuda_rope(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &c = call->in[1], &s = call->in[2], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    if (s.dtype != c.dtype)
        return (int)cudaErrorInvalidValue;
    int half = call->node->attrs.rope.head_dim / 2;
    float sign = call->node->attrs.rope.inverse ? -1.0f : 1.0f;
    bool vector = half % 8 == 0 && aligned(x.data) && aligned(c.data) && aligned(s.data) && aligned(y.data);
    return with_types(x.dtype, c.dtype, y.dtype, [&](auto tx, auto tc, auto ty) {
        using X = typename decltype(tx)::is;
        using C = typename decltype(tc)::is;
        using Y = typename decltype(ty)::is;
        auto launch = [&](auto v) {
            constexpr int V = decltype(v)::value;
            int64_t groups = y.elements / (2 * V), per_row = cols_of(x) / (2 * V);
            rope_kernel<X, C, Y, V><<<blocks_for(groups, THREADS), THREADS, 0, stream_of(call)>>>(
                (const X *)x.data, (const C *)c.data, (const C *)s.data, (Y *)y.data, groups, per_row, half / V, half, sign);
            return launched();
        };
        return vector ? launch(std::integral_constant<int, 8>{}) : launch(std::integral_constant<int, 1>{});
    });
}

extern "C" int vlai_cuda_sinusoid(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &t = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    if (t.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    int64_t n = rows_of(y);
    int half = (int)(cols_of(y) / 2);
    float slope = half > 1 ? (float)-(log(call->node->attrs.sinusoid.period) / (double)(half - 1)) : 0.0f;
    for (int at = 0; at < half; at += TABLE) {
        frequencies table = {};
        int count = half - at < TABLE ? half - at : (int)TABLE;
        for (int k = 0; k < count; k++)
            table.f[k] = (float)exp((double)((float)(at + k) * slope));
        int status = with_type(y.dtype, [&](auto ty) {
            using T = typename decltype(ty)::is;
            sinusoid_kernel<<<blocks_for(n * count, THREADS), THREADS, 0, stream_of(call)>>>((const T *)t.data, table, (T *)y.data, n,
                                                                                            at, count, half);
            return launched();
        });
        if (status)
            return status;
    }
    return 0;
}
