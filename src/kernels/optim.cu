/* The update: gradient norm, clipping and AdamW, on operands as they are stored.
 *
 *     sum_squares  x [n] -> norms[index]: 8 squares in fp32, everything above in double, chunks in order
 *     clip_factor  norms [k] -> norm, min(1, max_norm / (norm + 1e-6)), 1 if finite
 *     adamw        p *= 1 - lr wd; m += (1-b1)(g - m); v = b2 v + (1-b2) g^2; p -= lr/bc1 m / (sqrt(v) (1/sqrt(bc2)) + eps)
 *
 * Both forms, one tensor per launch and many (kernels/optim.h), cut tensors into chunks of VLAI_OPTIM_CHUNK elements and run
 * the same device function on each. A slice of a tensor is cut where the whole tensor would be. adamw rounds every step as
 * the CPU twin does (no fused multiply-add), so that both give the same bits. A bf16 parameter with low bits is a float master: its
 * upper half, rounded half up, and its lower 16 bits.
 * Bytes per element: 16-bit parameter, low bits and gradient, fp32 moments: 14 read, 12 written; all bf16: 8 and 6.
 * Expected: 0.9 of copy bandwidth, at the clock of a step too: about 55 instructions an element with stochastic rounding, where
 * 85 would keep an H200 at 1.45 GHz as busy as its memory. Measured there: 0.94 in a step, 0.91 (fp32) to 0.98 by gpu_optim. */
#include "kernels/optim.h"

#include "base/fail.h"
#include "kernels/common.cuh"
#include "optim/rounding.h"
#include "vla/run.h"

#include <string.h>

namespace {

enum { PACK = 8, PIECE = PACK * THREADS, CHUNK = VLAI_OPTIM_CHUNK };

/* Chunk `index` of tensor `tensor` of a table: elements index * CHUNK and on, in adamw less what a slice begins behind the
 * last cut before it. */
struct chunk {
    uint32_t tensor, index;
};

struct squares_record {
    const void *x;
    int64_t n, index;       /* index: in norms */
    uint32_t first, chunks; /* its partial sums */
    bool vector;
};

/* PACK neighbouring elements as they are stored, handled in pairs. Memory is streamed: each byte is met once a step. Pointers
 * come from a table, so that only these calls tell the compiler that they are global. */
template <class T> struct piece {
    uint4 w[PACK * sizeof(T) / 16];

    __device__ void load(const void *from, int64_t at)
    {
#pragma unroll
        for (int k = 0; k < (int)(sizeof w / 16); k++)
            w[k] = __ldcs((const uint4 *)((const T *)from + at) + k);
    }
    __device__ void store(void *to, int64_t at) const
    {
#pragma unroll
        for (int k = 0; k < (int)(sizeof w / 16); k++)
            __stcs((uint4 *)((T *)to + at) + k, w[k]);
    }
    __device__ uint32_t &word(int k)
    {
        return reinterpret_cast<uint32_t *>(w)[k];
    }
    /* Elements 2 k and 2 k + 1. */
    __device__ float2 get(int k)
    {
        if constexpr (sizeof(T) == 2)
            return {__uint_as_float(word(k) << 16), __uint_as_float(word(k) & 0xFFFF0000u)};
        else
            return {__uint_as_float(word(2 * k)), __uint_as_float(word(2 * k + 1))};
    }
    __device__ void set(int k, float2 x)
    {
        if constexpr (std::is_same_v<T, bf16>) {
            __nv_bfloat162 h = __floats2bfloat162_rn(x.x, x.y);
            memcpy(&word(k), &h, 4);
        } else {
            word(2 * k) = __float_as_uint(x.x);
            word(2 * k + 1) = __float_as_uint(x.y);
        }
    }
    __device__ void set_halves(int k, uint16_t a, uint16_t b)
    {
        word(k) = a | (uint32_t)b << 16;
    }
};

/* The sum of PACK squares; those of bf16 are exact in fp32. */
__device__ inline double squares_of(const float (&x)[PACK], bf16)
{
    float part = 0;
#pragma unroll
    for (int i = 0; i < PACK; i++)
        part += x[i] * x[i];
    return (double)part;
}

__device__ inline double squares_of(const float (&x)[PACK], float)
{
    double part = 0;
#pragma unroll
    for (int i = 0; i < PACK; i++)
        part += (double)x[i] * (double)x[i];
    return part;
}

template <class X> __device__ inline double squares_at(const void *from, int64_t at)
{
    piece<X> p;
    float x[PACK];
    p.load(from, at);
#pragma unroll
    for (int k = 0; k < PACK / 2; k++) {
        float2 two = p.get(k);
        x[2 * k] = two.x;
        x[2 * k + 1] = two.y;
    }
    return squares_of(x, X{});
}

/* Elements first and on of a tensor, at most CHUNK, on a block; every thread gets the sum. */
template <class X> __device__ double squares_chunk(const squares_record &t, int64_t first)
{
    int64_t end = first + CHUNK < t.n ? first + CHUNK : t.n;
    double sum = 0;
    if (t.vector && end - first == CHUNK) {
#pragma unroll 4
        for (int k = 0; k < CHUNK / PIECE; k++)
            sum += squares_at<X>(t.x, first + (int64_t)k * PIECE + threadIdx.x * PACK);
        return block_sum(sum, THREADS);
    }
    for (int64_t at = first + threadIdx.x * PACK; at < end; at += PIECE) {
        float x[PACK];
#pragma unroll
        for (int i = 0; i < PACK; i++)
            x[i] = at + i < end ? to_float(((const X *)t.x)[at + i]) : 0.0f;
        sum += squares_of(x, X{});
    }
    return block_sum(sum, THREADS);
}

template <class X> __global__ void __launch_bounds__(THREADS) squares_kernel(squares_record t, double *partial)
{
    double sum = squares_chunk<X>(t, (int64_t)blockIdx.x * CHUNK);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = sum;
}

template <class X>
__global__ void __launch_bounds__(THREADS) squares_table_kernel(const squares_record *tensors, const chunk *chunks, double *partial)
{
    chunk c = chunks[blockIdx.x];
    squares_record t = tensors[c.tensor];
    double sum = squares_chunk<X>(t, (int64_t)c.index * CHUNK);
    if (threadIdx.x == 0)
        partial[t.first + c.index] = sum;
}

__device__ void squares_total(const squares_record &t, const double *partial, double *norms)
{
    double sum = 0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < t.chunks; i += THREADS)
        sum += partial[t.first + i];
    sum = block_sum(sum, THREADS);
    if (threadIdx.x == 0)
        norms[t.index] = sum;
}

__global__ void __launch_bounds__(THREADS) squares_total_kernel(squares_record t, const double *partial, double *norms)
{
    squares_total(t, partial, norms);
}

__global__ void __launch_bounds__(THREADS) squares_totals_kernel(const squares_record *tensors, const double *partial, double *norms)
{
    squares_total(tensors[blockIdx.x], partial, norms);
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

struct adamw_record {
    void *p;
    const void *g; /* NULL: zero */
    void *m, *v;
    uint16_t *low; /* lower halves, for bf16 parameters of masters */
    int64_t n, first; /* first: of the slice, in the whole tensor */
    double weight_decay;
    float b1, b2, c2, eps;
    int group;
    uint64_t key; /* of stochastic rounding */
    bool vector;
};

/* How a bf16 parameter and its moments are stored: rounded to nearest, as an upper half beside its low bits, or rounded
 * stochastically (optim/rounding.h; why: cpu/optim.inc.h). */
enum storing { NEAREST, SPLIT, STOCHASTIC };

/* One step's numbers, the same for every element. */
struct adamw_step {
    float decay, step, root, clip; /* root: 1 / sqrt(bc2) */
};

__device__ inline void adamw_moments(float g, float &m, float &v, const adamw_step &s, const adamw_record &o)
{
    float gradient = __fmul_rn(g, s.clip);
    m = __fadd_rn(m, __fmul_rn(o.b1, __fsub_rn(gradient, m)));
    v = __fadd_rn(__fmul_rn(v, o.b2), __fmul_rn(o.c2, __fmul_rn(gradient, gradient)));
}

__device__ inline void adamw_one(float &p, float g, float &m, float &v, const adamw_step &s, const adamw_record &o)
{
    adamw_moments(g, m, v, s, o);
    float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), s.root), o.eps);
    p = __fsub_rn(__fmul_rn(p, s.decay), __fmul_rn(s.step, __fdiv_rn(m, denominator)));
}

/* The same bits in fewer instructions, if `quick` stays true: the root and the quotient by the sequences that nvcc makes of
 * __fsqrt_rn and __fdiv_rn for numbers in the middle of the range, without its branches for others. In the middle: v in [2^-100, 2^20],
 * |m| in [2^-100, 2^60], and the step's numbers as quick_step wants them; so the denominator is in [2^-60, 2^21], the quotient in
 * [2^-121, 2^120], and nothing between is subnormal or overflows. p is finite, and no result is NaN. */
__device__ inline void adamw_one_quick(float &p, float g, float &m, float &v, const adamw_step &s, const adamw_record &o, bool &quick)
{
    enum : uint32_t { LEAST = (127u - 100) << 23, MOST_V = (127u + 20) << 23, MOST_M = (127u + 60) << 23 };
    float y, r;
    adamw_moments(g, m, v, s, o);
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
    float root = __fmul_rn(v, y);
    root = __fmaf_rn(__fmaf_rn(-root, root, v), __fmul_rn(y, 0.5f), root);
    float denominator = __fadd_rn(__fmul_rn(root, s.root), o.eps);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(denominator));
    r = __fmaf_rn(r, __fmaf_rn(-denominator, r, 1.0f), r);
    float quotient = __fmul_rn(m, r);
    quotient = __fmaf_rn(r, __fmaf_rn(-denominator, quotient, m), quotient);
    p = __fsub_rn(__fmul_rn(p, s.decay), __fmul_rn(s.step, quotient));
    quick &= __float_as_uint(v) - LEAST <= MOST_V - LEAST;
    quick &= 2 * __float_as_uint(m) - 2 * LEAST <= 2 * (MOST_M - LEAST);
    quick &= fabsf(p) < __uint_as_float(0x7F800000);
}

/* Of a whole tensor. */
__device__ inline bool quick_step(const adamw_step &s, float eps)
{
    const float least = 0x1p-60f, most = 1;
    return eps >= least && eps <= most && s.root >= 0x1p-10f && s.root <= 0x1p10f && s.step >= 0;
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

__device__ inline void round_stochastic(float p, float m, float v, vlai_rounding r, uint32_t index, uint16_t &hp, uint16_t &hm, uint16_t &hv)
{
    vlai_rounding_bits bits = vlai_rounding_draw(r, index);
    hp = vlai_bf16_stochastic(p, bits.weight);
    hm = vlai_bf16_stochastic(m, bits.m);
    hv = vlai_bf16_stochastic(v, bits.v);
}

/* vlai_bf16_stochastic of two numbers that are not NaN, in one word. */
__device__ inline uint32_t round_two(float a, float b, uint32_t bits_a, uint32_t bits_b)
{
    return __byte_perm(__float_as_uint(a) + bits_a, __float_as_uint(b) + bits_b, 0x7632);
}

struct adamw_numbers {
    adamw_step step;
    vlai_rounding rounding;
    bool skip, quick;
};

/* Not 0 where any of the words has a bit set, a sign's included. */
template <int WORDS> __device__ inline uint32_t any_bit(const uint4 (&w)[WORDS])
{
    uint32_t all = 0;
#pragma unroll
    for (int k = 0; k < WORDS; k++)
        all |= w[k].x | w[k].y | w[k].z | w[k].w;
    return all;
}

/* The operands of PACK neighbouring elements as they are stored. */
template <class P, class G, class M> struct adamw_pack {
    piece<P> p;
    piece<G> g = {}; /* stays zero where there is none */
    piece<M> m, v;
    piece<uint16_t> low;
};

template <class P, class G, class M, storing STORE> __device__ inline void adamw_load(const adamw_record &t, int64_t at, adamw_pack<P, G, M> &x)
{
    x.p.load(t.p, at);
    if (t.g)
        x.g.load(t.g, at);
    x.m.load(t.m, at);
    x.v.load(t.v, at);
    if constexpr (STORE == SPLIT)
        x.low.load(t.low, at);
}

/* Parameters 2 k and 2 k + 1, as masters where there are any. */
template <storing STORE, class P, class G, class M> __device__ inline float2 adamw_parameters(adamw_pack<P, G, M> &x, int k)
{
    if constexpr (STORE == SPLIT)
        return {master((uint16_t)x.p.word(k), (uint16_t)x.low.word(k)), master((uint16_t)(x.p.word(k) >> 16), (uint16_t)(x.low.word(k) >> 16))};
    else
        return x.p.get(k);
}

template <storing STORE, class P, class G, class M> __device__ inline void adamw_keep(adamw_pack<P, G, M> &x, int k, float2 p)
{
    if constexpr (STORE == SPLIT) {
        uint16_t high[2], rest[2];
        split_master(p.x, high[0], rest[0]);
        split_master(p.y, high[1], rest[1]);
        x.p.set_halves(k, high[0], high[1]);
        x.low.set_halves(k, rest[0], rest[1]);
    } else {
        x.p.set(k, p);
    }
}

/* Updates and stores elements at..at+PACK-1; false, with nothing stored, where adamw_one_quick does not hold for all of them. */
template <class P, class G, class M, storing STORE>
__device__ inline bool adamw_quick(const adamw_record &t, int64_t at, const adamw_numbers &numbers, adamw_pack<P, G, M> &x)
{
    bool quick = true;
    uint32_t index = (uint32_t)(t.first + at);
#pragma unroll
    for (int k = 0; k < PACK / 2; k++) {
        float2 xg = x.g.get(k), xm = x.m.get(k), xv = x.v.get(k), xp = adamw_parameters<STORE>(x, k);
        adamw_one_quick(xp.x, xg.x, xm.x, xv.x, numbers.step, t, quick);
        adamw_one_quick(xp.y, xg.y, xm.y, xv.y, numbers.step, t, quick);
        if constexpr (STORE == STOCHASTIC) {
            vlai_rounding_bits a = vlai_rounding_draw(numbers.rounding, index | 2 * k), b = vlai_rounding_draw(numbers.rounding, index | (2 * k + 1));
            x.p.word(k) = round_two(xp.x, xp.y, a.weight, b.weight);
            x.m.word(k) = round_two(xm.x, xm.y, a.m, b.m);
            x.v.word(k) = round_two(xv.x, xv.y, a.v, b.v);
        } else {
            adamw_keep<STORE>(x, k, xp);
            x.m.set(k, xm);
            x.v.set(k, xv);
        }
    }
    if (!quick)
        return false;
    x.p.store(t.p, at);
    x.m.store(t.m, at);
    x.v.store(t.v, at);
    if constexpr (STORE == SPLIT)
        x.low.store(t.low, at);
    return true;
}

/* The same for elements whose gradient and moments are +0, as of words that no batch has met: moments stay, and of
 * p decay - step (0 / eps) the decay is left. */
template <class P, class G, class M, storing STORE>
__device__ inline bool adamw_rest(const adamw_record &t, int64_t at, const adamw_numbers &numbers, adamw_pack<P, G, M> &x)
{
    bool quick = true;
    uint32_t index = (uint32_t)(t.first + at);
#pragma unroll
    for (int k = 0; k < PACK / 2; k++) {
        float2 xp = adamw_parameters<STORE>(x, k);
        xp = {__fmul_rn(xp.x, numbers.step.decay), __fmul_rn(xp.y, numbers.step.decay)};
        quick &= xp.x == xp.x && xp.y == xp.y;
        if constexpr (STORE == STOCHASTIC)
            x.p.word(k) = round_two(xp.x, xp.y, vlai_rounding_draw(numbers.rounding, index | 2 * k).weight,
                                    vlai_rounding_draw(numbers.rounding, index | (2 * k + 1)).weight);
        else
            adamw_keep<STORE>(x, k, xp);
    }
    if (!quick)
        return false;
    x.p.store(t.p, at);
    if constexpr (STORE == SPLIT)
        x.low.store(t.low, at);
    return true;
}

template <class P, class G, class M, storing STORE>
__device__ inline void adamw_element(const adamw_record &t, int64_t i, const adamw_numbers &numbers)
{
    P *p = (P *)t.p + i;
    M *m = (M *)t.m + i, *v = (M *)t.v + i;
    float xg = t.g ? to_float(((const G *)t.g)[i]) : 0.0f, xm = to_float(*m), xv = to_float(*v), xp;
    if constexpr (STORE == SPLIT)
        xp = master(*(const uint16_t *)p, t.low[i]);
    else
        xp = to_float(*p);
    adamw_one(xp, xg, xm, xv, numbers.step, t);
    if constexpr (STORE == STOCHASTIC) {
        round_stochastic(xp, xm, xv, numbers.rounding, (uint32_t)(t.first + i), *(uint16_t *)p, *(uint16_t *)m, *(uint16_t *)v);
        return;
    }
    if constexpr (STORE == SPLIT)
        split_master(xp, *(uint16_t *)p, t.low[i]);
    else
        *p = from_float<P>(xp);
    *m = from_float<M>(xm);
    *v = from_float<M>(xv);
}

/* Chunk `index` of a tensor or slice on a block. P, G, M: stored parameter, gradient, moments. No chunk crosses a multiple of
 * 2^32 elements of the whole tensor, where the key of rounding changes. */
template <class P, class G, class M, storing STORE>
__device__ void adamw_chunk(const adamw_record &t, uint32_t index, const double *hyper, const double *clip)
{
    int64_t cut = (t.first / CHUNK + index) * (int64_t)CHUNK;
    __shared__ adamw_numbers shared_numbers;
    if (threadIdx.x == 0) { /* in double as on the host, where products are rounded before they are subtracted */
        double rate = hyper[VLA_HYPER_RATES + t.group];
        shared_numbers.step = {(float)__dsub_rn(1, __dmul_rn(rate, t.weight_decay)), (float)(rate / hyper[VLA_HYPER_BIAS1]),
                               (float)(1 / sqrt(hyper[VLA_HYPER_BIAS2])), (float)clip[1]};
        shared_numbers.skip = clip[2] == 0;
        shared_numbers.quick = quick_step(shared_numbers.step, t.eps);
        if constexpr (STORE == STOCHASTIC)
            shared_numbers.rounding = vlai_rounding_of((uint64_t)hyper[VLA_HYPER_SEED], (uint64_t)hyper[VLA_HYPER_UPDATE], t.key, (uint32_t)(cut >> 32));
    }
    __syncthreads();
    adamw_numbers numbers = shared_numbers;
    if (numbers.skip)
        return;
    int64_t first = cut > t.first ? cut - t.first : 0, end = cut + CHUNK - t.first < t.n ? cut + CHUNK - t.first : t.n;
    int64_t at = first + threadIdx.x * PACK;
    bool packs = t.vector && numbers.quick, whole = packs && at + PACK <= end;
    adamw_pack<P, G, M> x, next;
    if (whole)
        adamw_load<P, G, M, STORE>(t, at, x);
#pragma unroll 1
    for (; at < end; at += PIECE) {
        bool next_whole = packs && at + PIECE + PACK <= end;
        if (next_whole)
            adamw_load<P, G, M, STORE>(t, at + PIECE, next);
        if (whole)
            whole = any_bit(x.g.w) | any_bit(x.m.w) | any_bit(x.v.w) ? adamw_quick<P, G, M, STORE>(t, at, numbers, x)
                                                                     : adamw_rest<P, G, M, STORE>(t, at, numbers, x);
        if (!whole)
#pragma unroll 1
            for (int64_t i = at; i < end && i < at + PACK; i++)
                adamw_element<P, G, M, STORE>(t, i, numbers);
        x = next;
        whole = next_whole;
    }
}

/* Three blocks per multiprocessor, of up to 80 registers a thread: a pack is on its way while the one before it is computed. */
template <class P, class G, class M, storing STORE>
__global__ void __launch_bounds__(THREADS, 3) adamw_kernel(adamw_record t, const double *hyper, const double *clip)
{
    adamw_chunk<P, G, M, STORE>(t, blockIdx.x, hyper, clip);
}

template <class P, class G, class M, storing STORE>
__global__ void __launch_bounds__(THREADS, 3)
    adamw_table_kernel(const adamw_record *tensors, const chunk *chunks, const double *hyper, const double *clip)
{
    chunk c = chunks[blockIdx.x];
    adamw_record t = tensors[c.tensor];
    adamw_chunk<P, G, M, STORE>(t, c.index, hyper, clip);
}

uint32_t chunks_of(int64_t n)
{
    return (uint32_t)((n + CHUNK - 1) / CHUNK);
}

/* Chunks of a call's tensor, or of its slice. */
uint32_t chunks_of(const vlai_cuda_call *call)
{
    int64_t n = call->in[0].elements, first = call->node->op == VLAI_OP_adamw ? call->node->attrs.adamw.first % CHUNK : 0;
    return n ? chunks_of(first + n) : 0;
}

squares_record squares_record_of(const vlai_cuda_call *call, uint32_t first)
{
    const vlai_cuda_tensor &x = call->in[0];
    return {x.data, x.elements, call->node->attrs.clip.index, first, chunks_of(x.elements), aligned(x.data)};
}

adamw_record adamw_record_of(const vlai_cuda_call *call)
{
    const auto &a = call->node->attrs.adamw;
    const vlai_cuda_tensor *in = call->in;
    bool vector = aligned(in[0].data) && aligned(in[1].data) && aligned(in[2].data) && aligned(in[3].data) && aligned(in[6].data) && a.first % PACK == 0;
    return {in[0].data, in[1].data, in[2].data, in[3].data, (uint16_t *)in[6].data, in[0].elements, a.first, a.weight_decay, (float)(1 - a.beta1),
            (float)a.beta2, (float)(1 - a.beta2), (float)a.eps, a.group, a.key, vector};
}

/* The combination of element types of a call, without chunks. A gradient left out counts as one of the parameter's type. */
vlai_optim_part part_of(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor *in = call->in;
    vlai_optim_part part = {};
    if (call->node->op == VLAI_OP_sum_squares) {
        part.gradient = in[0].dtype;
        return part;
    }
    part.weight = in[0].dtype;
    part.gradient = in[1].data ? in[1].dtype : in[0].dtype;
    part.moment = in[2].dtype;
    part.masters = in[0].dtype == VLA_BF16 && in[6].data;
    part.stochastic = call->node->attrs.adamw.stochastic;
    return part;
}

bool same_types(const vlai_optim_part &a, const vlai_optim_part &b)
{
    return a.weight == b.weight && a.gradient == b.gradient && a.moment == b.moment && a.masters == b.masters && a.stochastic == b.stochastic;
}

/* f(P, G, M, STORE) for a combination. */
template <class F> int with_part(const vlai_optim_part &part, F f)
{
    return with_types(part.weight, part.gradient, part.moment, [&](auto tp, auto tg, auto tm) {
        if constexpr (std::is_same_v<typename decltype(tp)::is, bf16>) {
            if (part.masters)
                return f(tp, tg, tm, std::integral_constant<storing, SPLIT>{});
            if constexpr (std::is_same_v<typename decltype(tm)::is, bf16>)
                if (part.stochastic)
                    return f(tp, tg, tm, std::integral_constant<storing, STOCHASTIC>{});
        }
        return f(tp, tg, tm, std::integral_constant<storing, NEAREST>{});
    });
}

bool adamw_fits(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor *in = call->in;
    bool bf16_alone = in[0].dtype == VLA_BF16 && in[2].dtype == VLA_BF16 && !in[6].data;
    return in[2].dtype == in[3].dtype && in[4].dtype == VLA_F64 && in[5].dtype == VLA_F64 && (!call->node->attrs.adamw.stochastic || bf16_alone);
}

} // namespace

NO_WORKSPACE(clip_factor)
NO_WORKSPACE(adamw)

extern "C" size_t vlai_cuda_workspace_sum_squares(const vla_graph *g, const vlai_node *node)
{
    return chunks_of(operand_of(g, node, 0).elements) * sizeof(double);
}

extern "C" int vlai_cuda_sum_squares(const vlai_cuda_call *call)
{
    squares_record t = squares_record_of(call, 0);
    double *partial = (double *)call->workspace;
    return with_type(call->in[0].dtype, [&](auto tx) {
        if (t.chunks)
            squares_kernel<typename decltype(tx)::is><<<t.chunks, THREADS, 0, stream_of(call)>>>(t, partial);
        squares_total_kernel<<<1, THREADS, 0, stream_of(call)>>>(t, partial, (double *)call->in[1].data);
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
    uint32_t chunks = chunks_of(call);
    if (!chunks)
        return 0;
    if (!adamw_fits(call))
        return (int)cudaErrorInvalidValue;
    adamw_record t = adamw_record_of(call);
    return with_part(part_of(call), [&](auto tp, auto tg, auto tm, auto how) {
        adamw_kernel<typename decltype(tp)::is, typename decltype(tg)::is, typename decltype(tm)::is, decltype(how)::value>
            <<<chunks, THREADS, 0, stream_of(call)>>>(t, (const double *)call->in[4].data, (const double *)call->in[5].data);
        return launched();
    });
}

extern "C" size_t vlai_optim_table_bytes(const vlai_cuda_call *calls, size_t n)
{
    if (n == 0 || (calls[0].node->op != VLAI_OP_sum_squares && calls[0].node->op != VLAI_OP_adamw))
        return 0;
    bool squares = calls[0].node->op == VLAI_OP_sum_squares;
    size_t chunks = 0;
    for (size_t i = 0; i < n; i++)
        chunks += chunks_of(&calls[i]);
    return round_256(n * (squares ? sizeof(squares_record) : sizeof(adamw_record))) + round_256(chunks * sizeof(chunk)) +
           (squares ? chunks * sizeof(double) : 0);
}

extern "C" vla_status vlai_optim_table_fill(const vlai_cuda_call *calls, size_t n, void *host, size_t bytes, vlai_optim_launch_plan *plan,
                                            vla_error *err)
{
    if (bytes == 0 || bytes != vlai_optim_table_bytes(calls, n))
        return vlai_fail(err, VLA_E_INTERNAL, "a table of %zu updates: %zu bytes given, wanted %zu", n, bytes, vlai_optim_table_bytes(calls, n));
    const vlai_cuda_call *first = &calls[0];
    bool squares = first->node->op == VLAI_OP_sum_squares;
    *plan = {};
    plan->op = first->node->op;
    plan->tensors = (uint32_t)n;
    memset(host, 0, bytes);
    if (squares)
        plan->norms = (double *)first->in[1].data;
    else
        plan->hyper = (const double *)first->in[4].data, plan->clip = (const double *)first->in[5].data;
    plan->chunks_at = round_256(n * (squares ? sizeof(squares_record) : sizeof(adamw_record)));
    uint32_t partials = 0, chunks = 0;
    for (size_t i = 0; i < n; i++) {
        const vlai_cuda_call *call = &calls[i];
        bool shares = squares ? call->in[1].data == plan->norms : call->in[4].data == plan->hyper && call->in[5].data == plan->clip;
        if (call->node->op != plan->op || !shares || (!squares && !adamw_fits(call)))
            return vlai_fail(err, VLA_E_INTERNAL, "update %zu of %zu does not belong into one table with the first", i, n);
        vlai_optim_part part = part_of(call);
        uint32_t k = 0;
        while (k < plan->parts && !same_types(plan->part[k], part))
            k++;
        if (k == VLAI_OPTIM_PARTS)
            return vlai_fail(err, VLA_E_INTERNAL, "%zu updates of more than %d combinations of types", n, VLAI_OPTIM_PARTS);
        if (k == plan->parts)
            plan->part[plan->parts++] = part;
        plan->part[k].chunks += chunks_of(call);
        if (squares)
            ((squares_record *)host)[i] = squares_record_of(call, partials);
        else
            ((adamw_record *)host)[i] = adamw_record_of(call);
        partials += chunks_of(call);
    }
    plan->scratch_at = plan->chunks_at + round_256(partials * sizeof(chunk));
    chunk *to = (chunk *)((char *)host + plan->chunks_at);
    for (uint32_t k = 0; k < plan->parts; k++) {
        plan->part[k].first = chunks;
        for (size_t i = 0; i < n; i++)
            if (same_types(plan->part[k], part_of(&calls[i])))
                for (uint32_t c = 0; c < chunks_of(&calls[i]); c++)
                    to[chunks++] = {(uint32_t)i, c};
    }
    return VLA_OK;
}

extern "C" int vlai_optim_launch(void *table, const vlai_optim_launch_plan *plan, void *stream_)
{
    cudaStream_t stream = (cudaStream_t)stream_;
    const chunk *chunks = (const chunk *)((char *)table + plan->chunks_at);
    double *partial = (double *)((char *)table + plan->scratch_at);
    for (uint32_t k = 0; k < plan->parts; k++) {
        const vlai_optim_part &part = plan->part[k];
        if (!part.chunks)
            continue;
        int code;
        if (plan->op == VLAI_OP_sum_squares)
            code = with_type(part.gradient, [&](auto tx) {
                squares_table_kernel<typename decltype(tx)::is>
                    <<<part.chunks, THREADS, 0, stream>>>((const squares_record *)table, chunks + part.first, partial);
                return launched();
            });
        else
            code = with_part(part, [&](auto tp, auto tg, auto tm, auto how) {
                adamw_table_kernel<typename decltype(tp)::is, typename decltype(tg)::is, typename decltype(tm)::is, decltype(how)::value>
                    <<<part.chunks, THREADS, 0, stream>>>((const adamw_record *)table, chunks + part.first, plan->hyper, plan->clip);
                return launched();
            });
        if (code)
            return code;
    }
    if (plan->op == VLAI_OP_sum_squares)
        squares_totals_kernel<<<plan->tensors, THREADS, 0, stream>>>((const squares_record *)table, partial, plan->norms);
    return launched();
}
