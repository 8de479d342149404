/* Small things that every kernel family uses: packs of elements as they are stored, the choice of element types, sums in a
 * fixed order.
 *
 *     return with_type(x.dtype, [&](auto tx) {
 *         using X = typename decltype(tx)::is;
 *         kernel<X><<<blocks_for(n, THREADS), THREADS, 0, stream_of(call)>>>((const X *)x.data, n);
 *         return launched();
 *     });
 *
 * Memory-bound kernels want about 30 KB in flight per multiprocessor: 16-byte words, two or more per thread before the
 * first use, and no more than 64 registers. */
#ifndef VLAI_COMMON_CUH
#define VLAI_COMMON_CUH

#include "kernels/cuda.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <type_traits>

using bf16 = __nv_bfloat16;

enum { THREADS = 256, WARP = 32 };

static inline cudaStream_t stream_of(const vlai_cuda_call *call)
{
    return (cudaStream_t)call->stream;
}

static inline int launched()
{
    return (int)cudaGetLastError();
}

static inline unsigned blocks_for(int64_t n, int64_t per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}

static inline int64_t rows_of(const vlai_cuda_tensor &t)
{
    return t.shape[0];
}

static inline int64_t cols_of(const vlai_cuda_tensor &t)
{
    return t.rank > 1 ? t.shape[1] : 1;
}

static inline int64_t cols_of(const vlai_value_info &v)
{
    return v.rank > 1 ? v.shape[1] : 1;
}

static inline const vlai_value_info &operand_of(const vla_graph *g, const vlai_node *node, int i)
{
    return g->values[node->inputs[i]];
}

static inline size_t round_256(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static inline bool aligned(const void *p, size_t bytes = 16)
{
    return ((size_t)p & (bytes - 1)) == 0;
}

/* Ops that need no scratch. */
#define NO_WORKSPACE(name)                                                                        \
    extern "C" size_t vlai_cuda_workspace_##name(const vla_graph *, const vlai_node *)            \
    {                                                                                             \
        return 0;                                                                                 \
    }

template <class T> struct type_is {
    using is = T;
};

/* f(type_is<T>) for the stored type; anything but bf16 and fp32 is refused. */
template <class F> static int with_type(vla_dtype dtype, F f)
{
    switch (dtype) {
    case VLA_BF16: return f(type_is<bf16>{});
    case VLA_F32: return f(type_is<float>{});
    default: return (int)cudaErrorInvalidValue;
    }
}

template <class F> static int with_types(vla_dtype a, vla_dtype b, F f)
{
    return with_type(a, [&](auto ta) { return with_type(b, [&](auto tb) { return f(ta, tb); }); });
}

template <class F> static int with_types(vla_dtype a, vla_dtype b, vla_dtype c, F f)
{
    return with_type(a, [&](auto ta) { return with_types(b, c, [&](auto tb, auto tc) { return f(ta, tb, tc); }); });
}

__device__ inline float to_float(float x)
{
    return x;
}

__device__ inline float to_float(bf16 x)
{
    return __bfloat162float(x);
}

template <class T> __device__ inline T from_float(float x)
{
    if constexpr (std::is_same_v<T, bf16>)
        return __float2bfloat16_rn(x);
    else
        return x;
}

__device__ inline float round_bf16(float x)
{
    return __bfloat162float(__float2bfloat16_rn(x));
}

template <int BYTES> struct word_of;
template <> struct word_of<16> {
    using is = uint4;
};
template <> struct word_of<8> {
    using is = uint2;
};
template <> struct word_of<4> {
    using is = uint32_t;
};
template <> struct word_of<2> {
    using is = uint16_t;
};
template <> struct word_of<1> {
    using is = uint8_t;
};

/* V neighbouring elements as they lie in memory, moved in words of up to 16 bytes. */
template <class T, int V> struct pack {
    static constexpr int BYTES = V * (int)sizeof(T), WORD_BYTES = BYTES > 16 ? 16 : BYTES, WORDS = BYTES / WORD_BYTES;
    using word = typename word_of<WORD_BYTES>::is;
    word w[WORDS];

    __device__ void load(const T *p)
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            w[i] = reinterpret_cast<const word *>(p)[i];
    }
    __device__ void store(T *p) const
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            reinterpret_cast<word *>(p)[i] = w[i];
    }
    __device__ void get(float (&x)[V]) const
    {
        const T *t = reinterpret_cast<const T *>(w);
#pragma unroll
        for (int i = 0; i < V; i++)
            x[i] = to_float(t[i]);
    }
    __device__ void set(const float (&x)[V])
    {
        T *t = reinterpret_cast<T *>(w);
        if constexpr (std::is_same_v<T, bf16> && V % 2 == 0) {
#pragma unroll
            for (int i = 0; i < V; i += 2)
                reinterpret_cast<__nv_bfloat162 *>(w)[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < V; i++)
                t[i] = from_float<T>(x[i]);
        }
    }
};

/* i / d, in 32 bits where that holds the number. */
__device__ inline int64_t divide(int64_t i, int64_t d)
{
    return (i | d) >> 32 ? i / d : (int64_t)((uint32_t)i / (uint32_t)d);
}

/* Sums and maxima over a warp: the same tree every time, and every lane gets the result. */
template <class T> __device__ inline T warp_sum(T x)
{
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

__device__ inline float warp_max(float x)
{
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

/* Over a block of `threads` (a multiple of 32, at most 1024): warps first, then the warps' sums in order. Every thread gets
 * the result. */
template <class T> __device__ inline T block_sum(T x, int threads)
{
    __shared__ T part[WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0)
        part[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = 0;
    for (int i = 0; i < threads / WARP; i++)
        sum += part[i];
    __syncthreads();
    return sum;
}

__device__ inline float block_max(float x, int threads)
{
    __shared__ float part[WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0)
        part[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = part[0];
    for (int i = 1; i < threads / WARP; i++)
        most = fmaxf(most, part[i]);
    __syncthreads();
    return most;
}

/* 1 / (1 + exp(-x)). For values that are stored as bf16 (2^-9), the hardware's exp2 and reciprocal (2^-21) do. */
template <bool FAST> __device__ inline float sigmoid(float x)
{
    if constexpr (FAST)
        return __fdividef(1.0f, 1.0f + __expf(-x));
    else
        return 1.0f / (1.0f + expf(-x));
}

#endif
