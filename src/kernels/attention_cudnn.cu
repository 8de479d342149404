/* Attention of whole segments by cuDNN (vendor/cudnn.h): what the library wants to know of the segments is made on the
 * device before each call, in one small kernel that also does what the library leaves: rows that belong to no segment. */
#include "kernels/attention_cudnn.cuh"

#include "vendor/cudnn.h"

#include <cstdio>

namespace {

enum { ARRAYS = 7, OUTSIDE_BLOCKS = 32 };

/* The indices in scratch, each of segments + 1 numbers: lengths, then offsets of q, kv, o, lse, dq, dkv. */
struct segment_index {
    int32_t *at;
    int64_t n;

    __host__ __device__ int32_t *array(int i) const
    {
        return at + i * (n + 1);
    }
};

struct strides {
    int32_t of[ARRAYS]; /* of[0] unused */
};

/* Rows outside the segments get zeros: cols elements of bf16 from a row's start, and lse -inf. to NULL: nothing. */
struct outside {
    bf16 *to[3];
    int64_t stride[3];
    int cols[3];
    float *lse;
    int heads;
};

__global__ void __launch_bounds__(THREADS)
    segment_index_kernel(const int32_t *segments, int64_t n, segment_index index, strides by, outside rest, int64_t rows)
{
    if (blockIdx.x == 0)
        for (int64_t i = threadIdx.x; i <= n; i += THREADS) {
            int32_t first = segments[i];
            if (i < n)
                index.array(0)[i] = segments[i + 1] - first;
#pragma unroll
            for (int a = 1; a < ARRAYS; a++)
                index.array(a)[i] = first * by.of[a];
        }
    int64_t before = segments[0], after = rows - segments[n];
    for (int64_t k = blockIdx.x; k < before + after; k += gridDim.x) {
        int64_t row = k < before ? k : segments[n] + k - before;
#pragma unroll
        for (int r = 0; r < 3; r++)
            for (int c = threadIdx.x; rest.to[r] && c < rest.cols[r]; c += THREADS)
                rest.to[r][row * rest.stride[r] + c] = __float2bfloat16_rn(0.0f);
        for (int h = threadIdx.x; rest.lse && h < rest.heads; h += THREADS)
            rest.lse[row * rest.heads + h] = -INFINITY;
    }
}

size_t index_bytes(int64_t segments)
{
    return round_256((size_t)(ARRAYS * (segments + 1)) * sizeof(int32_t));
}

} // namespace

size_t attention_cudnn_workspace(int64_t segments, int64_t longest, int heads, int kv_heads, int dim, bool backward)
{
    size_t rows = (size_t)segments * (size_t)((longest + 127) / 128 * 128) * (size_t)heads;
    size_t each = backward ? ((heads == kv_heads ? 1 : 2) * (size_t)dim + 2) * sizeof(float) : 0;
    return index_bytes(segments) + rows * each + (1 << 20);
}

bool attention_cudnn_fits(const attention_task &t)
{
    const attention_shape &s = t.shape;
    int64_t widest = s.q_stride > s.kv_stride ? s.q_stride : s.kv_stride;
    return t.dtype == VLA_BF16 && t.mask != VLA_MASK_COLUMNS && t.segments && t.n_segments > 0 && t.longest > 0 && s.vector &&
           s.dim <= 128 && s.queries == s.keys && s.queries * (widest > s.o_stride ? widest : s.o_stride) <= INT32_MAX;
}

const void *attention_cudnn_plan(const attention_task &t, bool backward, vlai_cudnn *cudnn, char *why, size_t why_bytes)
{
    const attention_shape &s = t.shape;
    vlai_sdpa_shape shape = {};
    shape.backward = backward;
    shape.causal = t.mask == VLA_MASK_CAUSAL;
    shape.heads = s.heads;
    shape.kv_heads = s.kv_heads;
    shape.head_dim = s.dim;
    shape.segments = t.n_segments;
    shape.longest = t.longest;
    shape.q_stride = s.q_stride;
    shape.kv_stride = s.kv_stride;
    shape.o_stride = s.o_stride;
    shape.dq_stride = s.dq_stride;
    shape.dkv_stride = s.dkv_stride;
    shape.scale = s.scale;
    const vlai_sdpa *plan = vlai_cudnn_sdpa(cudnn, &shape, why, why_bytes);
    if (plan && index_bytes(t.n_segments) + vlai_cudnn_sdpa_workspace(plan) > t.workspace_bytes) {
        snprintf(why, why_bytes, "cuDNN wants %zu bytes of scratch for attention, %zu are there", vlai_cudnn_sdpa_workspace(plan), t.workspace_bytes);
        return nullptr;
    }
    return plan;
}

int attention_cudnn_run(const attention_task &t, bool backward)
{
    const attention_shape &s = t.shape;
    if (!t.o || !t.lse || (backward && (!t.dq || !t.dk || !t.dv)))
        return (int)cudaErrorInvalidValue;
    segment_index index = {(int32_t *)t.workspace, t.n_segments};
    strides by = {{0, (int32_t)s.q_stride, (int32_t)s.kv_stride, (int32_t)s.o_stride, s.heads, (int32_t)s.dq_stride, (int32_t)s.dkv_stride}};
    int q = s.heads * s.dim, kv = s.kv_heads * s.dim;
    outside rest = {{(bf16 *)t.o, nullptr, nullptr}, {s.o_stride, 0, 0}, {q, 0, 0}, t.lse, s.heads};
    if (backward)
        rest = {{(bf16 *)t.dq, (bf16 *)t.dk, (bf16 *)t.dv}, {s.dq_stride, s.dkv_stride, s.dkv_stride}, {q, kv, kv}, nullptr, s.heads};
    segment_index_kernel<<<OUTSIDE_BLOCKS, THREADS, 0, t.stream>>>(t.segments, t.n_segments, index, by, rest, s.queries);
    int status = launched();
    if (status)
        return status;
    vlai_sdpa_data d = {};
    d.dy = t.dy;
    d.q = t.q;
    d.k = t.k;
    d.v = t.v;
    d.o = t.o;
    d.lse = t.lse;
    d.dq = t.dq;
    d.dk = t.dk;
    d.dv = t.dv;
    d.lengths = index.array(0);
    d.q_offsets = index.array(1);
    d.kv_offsets = index.array(2);
    d.o_offsets = index.array(3);
    d.lse_offsets = index.array(4);
    d.dq_offsets = index.array(5);
    d.dkv_offsets = index.array(6);
    return vlai_cudnn_sdpa_run((const vlai_sdpa *)t.plan, &d, (char *)t.workspace + index_bytes(t.n_segments), t.stream)
               ? (int)cudaErrorUnknown
               : 0;
}
