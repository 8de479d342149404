/* The update: gradient norm, clipping and AdamW, on operands as they are stored.
 *
 *     sum_squares  x [n] -> norms[index]: 8 squares in fp32, everything above in double, blocks in order
 *     clip_factor  norms [k] -> norm, min(1, max_norm / (norm + 1e-6)), 1 if finite
 *     adamw        p *= 1 - lr wd; m += (1-b1)(g - m); v = b2 v + (1-b2) g^2; p -= lr/bc1 m / (sqrt(v)/sqrt(bc2) + eps)
 *
 * adamw rounds every step as the CPU twin does (no fused multiply-add), so that both give the same bits. A bf16 parameter
 * with low bits is a float master: its upper half, rounded half up, and its lower 16 bits. Bytes per element: 16-bit
 * parameter, low bits and gradient, fp32 moments: 14 read, 12 written; all bf16: 8 and 6. Expected: 0.9 of copy bandwidth. */
#include "kernels/common.cuh"

namespace {

enum { PACK = 8, PIECE = PACK * THREADS, MAX_BLOCKS = 1024 };

/* Elements of one block of sum_squares: whole pieces, so that at most MAX_BLOCKS are needed. */
int64_t chunk_of(int64_t n)
{
    int64_t pieces = (n + PIECE - 1) / PIECE, each = (pieces + MAX_BLOCKS - 1) / MAX_BLOCKS;
    return (each < 8 ? 8 : each) * PIECE;
}

template <class X>
__global__ void __launch_bounds__(THREADS) squares_kernel(const X *x, double *partial, int64_t n, int64_t chunk, bool vector)
{
    int64_t first = blockIdx.x * chunk, end = first + chunk < n ? first + chunk : n;
    double sum = 0;
#pragma unroll 4
    for (int64_t at = first + threadIdx.x * PACK; at < end; at += PIECE) {
        float v[PACK];
        if (vector && at + PACK <= end) {
            pack<X, PACK> p;
            p.load(x + at);
            p.get(v);
        } else {
#pragma unroll
            for (int i = 0; i < PACK; i++)
                v[i] = at + i < end ? to_float(x[at + i]) : 0.0f;
        }
        if constexpr (std::is_same_v<X, bf16>) {
            float part = 0; /* squares of bf16 are exact in fp32 */
#pragma unroll
            for (int i = 0; i < PACK; i++)
                part += v[i] * v[i];
            sum += (double)part;
        } else {
#pragma unroll
            for (int i = 0; i < PACK; i++)
                sum += (double)v[i] * (double)v[i];
        }
    }
    sum = block_sum(sum, THREADS);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(THREADS) squares_total_kernel(const double *partial, int64_t blocks, double *to)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < blocks; i += THREADS)
        sum += partial[i];
    sum = block_sum(sum, THREADS);
    if (threadIdx.x == 0)
        *to = sum;
}

__global__ void __launch_bounds__(THREADS) clip_kernel(const double *norms, int64_t n, double limit, double *clip)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS)
        sum += norms[i];
    double norm = sqrt(block_sum(sum, THREADS)), factor = 1;
    if (limit > 0 && limit / (norm + 1e-6) < 1)
        factor = limit / (norm + 1e-6);
    if (threadIdx.x == 0) {
        clip[0] = norm;
        clip[1] = factor;
        clip[2] = isfinite(norm) ? 1 : 0;
    }
}

struct adamw_options {
    double weight_decay;
    float b1, b2, c2, eps;
    int group;
};

/* One step's numbers, the same for every element. */
struct adamw_step {
    float decay, step, root, clip;
};

__device__ inline void adamw_one(float &p, float g, float &m, float &v, const adamw_step &s, const adamw_options &o)
{
    float gradient = __fmul_rn(g, s.clip);
    m = __fadd_rn(m, __fmul_rn(o.b1, __fsub_rn(gradient, m)));
    v = __fadd_rn(__fmul_rn(v, o.b2), __fmul_rn(o.c2, __fmul_rn(gradient, gradient)));
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root), o.eps);
    p = __fsub_rn(__fmul_rn(p, s.decay), __fmul_rn(s.step, __fdiv_rn(m, denominator)));
}

/* The rounding of the upper half carried exactly when low >= 0x8000. */
__device__ inline float master(uint16_t high, uint16_t low)
{
    return __uint_as_float((uint32_t)(uint16_t)(high - (low >> 15)) << 16 | low);
}

__device__ inline void split_master(float p, uint16_t &high, uint16_t &low)
{
    uint32_t bits = __float_as_uint(p);
    high = (uint16_t)((bits + 0x8000u) >> 16);
    low = (uint16_t)bits;
}

/* P: stored parameter; low: lower halves, for bf16 parameters of masters. A block takes 256 packs of 8 elements. */
template <class P, class G, class M, bool SPLIT>
__global__ void __launch_bounds__(THREADS)
    adamw_kernel(P *p, const G *g, M *m, M *v, uint16_t *low, const double *hyper, const double *clip, adamw_options o, int64_t n, bool vector)
{
    __shared__ adamw_step shared_step;
    __shared__ bool skip;
    int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * PACK;
    bool whole = vector && at + PACK <= n;
    pack<P, PACK> pp;
    pack<G, PACK> pg;
    pack<M, PACK> pm, pv;
    union low_pack {
        uint4 word;
        uint16_t h[PACK];
    } pl;
    if (whole) { /* the loads are on their way while one thread computes the step's numbers */
        pp.load(p + at);
        if (g)
            pg.load(g + at);
        pm.load(m + at);
        pv.load(v + at);
        if (SPLIT)
            pl.word = *reinterpret_cast<const uint4 *>(low + at);
    }
    if (threadIdx.x == 0) {
        double rate = hyper[2 + o.group];
        shared_step = {(float)(1 - rate * o.weight_decay), (float)(rate / hyper[0]), (float)sqrt(hyper[1]), (float)clip[1]};
        skip = clip[2] == 0;
    }
    __syncthreads();
    if (skip)
        return;
    adamw_step s = shared_step;
    if (whole) {
        float xp[PACK], xg[PACK] = {0}, xm[PACK], xv[PACK];
        if (SPLIT) {
            const uint16_t *high = reinterpret_cast<const uint16_t *>(pp.w);
#pragma unroll
            for (int i = 0; i < PACK; i++)
                xp[i] = master(high[i], pl.h[i]);
        } else {
            pp.get(xp);
        }
        if (g)
            pg.get(xg);
        pm.get(xm);
        pv.get(xv);
#pragma unroll
        for (int i = 0; i < PACK; i++)
            adamw_one(xp[i], xg[i], xm[i], xv[i], s, o);
        if (SPLIT) {
            uint16_t *high = reinterpret_cast<uint16_t *>(pp.w);
#pragma unroll
            for (int i = 0; i < PACK; i++)
                split_master(xp[i], high[i], pl.h[i]);
            *reinterpret_cast<uint4 *>(low + at) = pl.word;
        } else {
            pp.set(xp);
        }
        pm.set(xm);
        pv.set(xv);
        pp.store(p + at);
        pm.store(m + at);
        pv.store(v + at);
        return;
    }
    for (int64_t i = at; i < n && i < at + PACK; i++) {
        float xg = g ? to_float(g[i]) : 0.0f, xm = to_float(m[i]), xv = to_float(v[i]);
        float xp = SPLIT ? master(((const uint16_t *)p)[i], low[i]) : to_float(p[i]);
        adamw_one(xp, xg, xm, xv, s, o);
        if (SPLIT)
            split_master(xp, ((uint16_t *)p)[i], low[i]);
        else
            p[i] = from_float<P>(xp);
        m[i] = from_float<M>(xm);
        v[i] = from_float<M>(xv);
    }
}

} // namespace

NO_WORKSPACE(clip_factor)
NO_WORKSPACE(adamw)

extern "C" size_t vlai_cuda_workspace_sum_squares(const vla_graph *, const vlai_node *)
{
    return MAX_BLOCKS * sizeof(double);
}

extern "C" int vlai_cuda_sum_squares(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0];
    double *to = (double *)call->in[1].data + call->node->attrs.clip.index, *partial = (double *)call->workspace;
    if (!x.elements)
        return (int)cudaMemsetAsync(to, 0, sizeof *to, stream_of(call));
    int64_t chunk = chunk_of(x.elements);
    unsigned blocks = blocks_for(x.elements, chunk);
    return with_type(x.dtype, [&](auto tx) {
        using X = typename decltype(tx)::is;
        squares_kernel<<<blocks, THREADS, 0, stream_of(call)>>>((const X *)x.data, blocks > 1 ? partial : to, x.elements, chunk,
                                                                aligned(x.data));
        if (blocks > 1)
            squares_total_kernel<<<1, THREADS, 0, stream_of(call)>>>(partial, blocks, to);
        return launched();
    });
}

extern "C" int vlai_cuda_clip_factor(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &norms = call->in[0], &clip = call->out[0];
    if (!clip.data)
        return 0;
    clip_kernel<<<1, THREADS, 0, stream_of(call)>>>((const double *)norms.data, norms.elements, call->node->attrs.clip.max_norm,
                                                    (double *)clip.data);
    return launched();
}

extern "C" int vlai_cuda_adamw(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &p = call->in[0], &g = call->in[1], &m = call->in[2], &v = call->in[3], &low = call->in[6];
    int64_t n = p.elements;
    if (!n)
        return 0;
    if (m.dtype != v.dtype || call->in[4].dtype != VLA_F64 || call->in[5].dtype != VLA_F64)
        return (int)cudaErrorInvalidValue;
    bool split = p.dtype == VLA_BF16 && low.data;
    adamw_options o = {call->node->attrs.adamw.weight_decay, (float)(1 - call->node->attrs.adamw.beta1),
                       (float)call->node->attrs.adamw.beta2, (float)(1 - call->node->attrs.adamw.beta2),
                       (float)call->node->attrs.adamw.eps, call->node->attrs.adamw.group};
    bool vector = aligned(p.data) && aligned(g.data) && aligned(m.data) && aligned(v.data) && aligned(low.data);
    return with_types(p.dtype, g.data ? g.dtype : VLA_BF16, m.dtype, [&](auto tp, auto tg, auto tm) {
        using P = typename decltype(tp)::is;
        using G = typename decltype(tg)::is;
        using M = typename decltype(tm)::is;
        auto launch = [&](auto is_split) {
            adamw_kernel<P, G, M, decltype(is_split)::value><<<blocks_for(n, PIECE), THREADS, 0, stream_of(call)>>>(
                (P *)p.data, (const G *)g.data, (M *)m.data, (M *)v.data, (uint16_t *)low.data, (const double *)call->in[4].data,
                (const double *)call->in[5].data, o, n, vector);
            return launched();
        };
        if constexpr (std::is_same_v<P, bf16>)
            if (split)
                return launch(std::true_type{});
        return launch(std::false_type{});
    });
}
