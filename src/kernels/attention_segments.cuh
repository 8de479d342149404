/* Attention of whole segments, causal or full, in bf16 on tensor cores: what attention_tiles.cuh does for any mask, done
 * faster where the mask is known.
 *
 * Tiles of 64 rows begin where a segment begins, so that a tile belongs to one segment; masks are comparisons of row numbers
 * and only in tiles on the diagonal or at a segment's end; no table is read but `segments`. A block has 4 warps, a warp owns
 * 16 rows of the block's tile and keeps its operands in registers where there is room.
 *
 *     forward     64 queries of one head; keys in tiles of 64, two in flight
 *     query grad  the same; delta = rowsum(do o) on the way; dS = P (dP - delta), dq = scale dS K
 *     key grad    64 keys of one kv head; query tiles of 32 of the group's heads. With several query heads to a kv head a
 *                 cluster of blocks shares them, and the blocks' sums are added through the cluster's shared memory
 *
 * Every sum has a fixed order. Grid of all: x heads, y segments and one more for the rows outside them, z tiles. */
#ifndef VLAI_ATTENTION_SEGMENTS_CUH
#define VLAI_ATTENTION_SEGMENTS_CUH

#include "kernels/attention_rows.cuh"

enum { SEGMENT_TILE = 64, SEGMENT_STEP = 32, SEGMENT_SPLIT = 4 /* most blocks of a cluster */ };

struct segment_rows {
    int first, end;
};

__device__ inline segment_rows segment_of(const attention_shape &s, const int32_t *segments, int i)
{
    segment_rows r = {segments[i], segments[i + 1]};
    r.first = r.first < 0 ? 0 : r.first;
    r.end = r.end > s.queries ? (int)s.queries : r.end;
    return r;
}

/* f(row) for share `mine` of `shares` of the rows that belong to no segment. */
template <class F> __device__ inline void rows_outside(const attention_shape &s, const int32_t *segments, int n, int mine, int shares, F f)
{
    int before = max(segments[0], 0), from = max(segments[n], before), all = before + (int)s.queries - from;
    for (int k = mine; k < all; k += shares)
        f(k < before ? k : from + k - before);
}

/* The same for this block, whose share is z. */
template <class F> __device__ inline void rows_outside(const attention_shape &s, const int32_t *segments, int n, F f)
{
    rows_outside(s, segments, n, (int)blockIdx.z, (int)gridDim.z, f);
}

/* x [16][8 N] += first operands in registers times rows `row`.. of b; the first `blocks` blocks of 16 columns, or all. */
template <int DP, int N, bool ALL>
__device__ inline void segment_scores(float (&x)[2 * N][4], const uint32_t (&a)[DP / 16][4], const bf16 *b, int row, int blocks)
{
#pragma unroll
    for (int k = 0; k < DP / 16; k++)
#pragma unroll
        for (int j = 0; j < N; j++)
            if (ALL || j < blocks) {
                uint32_t fb[4];
                rows_second<DP>(fb, b, row + 16 * j, 2 * k);
                multiply(x[2 * j], a[k], fb[0], fb[1]);
                multiply(x[2 * j + 1], a[k], fb[2], fb[3]);
            }
}

/* acc [16][DP] += p [16][16 N] times rows `row`.. of b. */
template <int DP, int N, bool ALL>
__device__ inline void segment_product(float (&acc)[DP / 8][4], const uint32_t (&p)[N][4], const bf16 *b, int row, int blocks)
{
#pragma unroll
    for (int k = 0; k < N; k++)
        if (ALL || k < blocks)
#pragma unroll
            for (int j = 0; j < DP / 16; j++) {
                uint32_t fb[4];
                rows_transposed<DP>(fb, b, row + 16 * k, 2 * j);
                multiply(acc[2 * j], p[k], fb[0], fb[1]);
                multiply(acc[2 * j + 1], p[k], fb[2], fb[3]);
            }
}

/* How many blocks of 16 keys from `key` a warp's rows need at all, and whether they need them whole. */
struct segment_need {
    int blocks;
    bool whole;
};

template <bool CAUSAL, int KEYS> __device__ inline segment_need segment_need_of(int key, int last, int row)
{
    int limit = CAUSAL && row + 16 < last ? row + 16 : last;
    int blocks = (limit - key + 15) / 16;
    segment_need need;
    need.blocks = blocks > KEYS / 16 ? KEYS / 16 : blocks;
    need.whole = key + KEYS <= (CAUSAL && row + 1 < last ? row + 1 : last);
    return need;
}

template <int DP> constexpr size_t segment_shared()
{
    return 4 * SEGMENT_TILE * DP * sizeof(bf16); /* k, v; twice */
}

/* One tile of keys for 16 queries from `row`: softmax rescaled. top is of raw scores; scale: theirs, in powers of 2. */
template <int DP, bool CAUSAL, bool WHOLE>
__device__ inline void segment_step(float (&acc)[DP / 8][4], float (&top)[2], float (&sum)[2], const uint32_t (&fq)[DP / 16][4],
                                    const bf16 *tile_k, const bf16 *tile_v, int key, int last, int row, int blocks, float scale)
{
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    float x[SEGMENT_TILE / 8][4] = {}, most[2] = {top[0], top[1]}, shrink[2];
    segment_scores<DP, SEGMENT_TILE / 16, WHOLE>(x, fq, tile_k, 0, blocks);
#pragma unroll
    for (int j = 0; j < SEGMENT_TILE / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int at = key + j * 8 + 2 * t + e % 2;
            if (!WHOLE)
                x[j][e] = at < last && (!CAUSAL || at <= row + g + e / 2 * 8) ? x[j][e] : -INFINITY;
            most[e / 2] = fmaxf(most[e / 2], x[j][e]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFu, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFu, most[r], 2));
        rows_soften(x, r, most[r], top[r], sum[r], shrink[r], scale);
    }
    rows_shrink(acc, shrink);
    uint32_t p[SEGMENT_TILE / 16][4];
    rows_pack<SEGMENT_TILE / 16>(p, x);
    segment_product<DP, SEGMENT_TILE / 16, WHOLE>(acc, p, tile_v, 0, blocks);
}

template <int DP, bool CAUSAL>
__global__ void __launch_bounds__(ROWS_BLOCK, DP > 80 ? 2 : 3)
    segment_kernel(attention_shape s, const int32_t *segments, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse)
{
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int TILE_ELEMENTS = SEGMENT_TILE * DP;
    bf16 *tiles = (bf16 *)memory; /* k, v of one stage; of the other */
    int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    if (blockIdx.y == gridDim.y - 1) {
        rows_outside(s, segments, gridDim.y - 1, [&](int row) {
            for (int c = threadIdx.x; o && c < s.dim; c += ROWS_BLOCK)
                o[row * s.o_stride + (int64_t)head * s.dim + c] = __float2bfloat16_rn(0.0f);
            if (lse && threadIdx.x == 0)
                lse[(int64_t)row * s.heads + head] = -INFINITY;
        });
        return;
    }
    segment_rows segment = segment_of(s, segments, blockIdx.y);
    int first = segment.first + (gridDim.z - 1 - blockIdx.z) * SEGMENT_TILE, row = first + warp * 16;
    if (first >= segment.end)
        return;
    int last = CAUSAL && first + SEGMENT_TILE < segment.end ? first + SEGMENT_TILE : segment.end;
    q += (int64_t)head * s.dim;
    k += (int64_t)(head / s.group) * s.dim;
    v += (int64_t)(head / s.group) * s.dim;
    auto load_keys = [&](int key, int stage) {
        bf16 *to = tiles + stage * 2 * TILE_ELEMENTS;
        rows_load<DP>(to, k + key * s.kv_stride, SEGMENT_TILE, segment.end - key, s.kv_stride, s.dim);
        rows_load<DP>(to + TILE_ELEMENTS, v + key * s.kv_stride, SEGMENT_TILE, segment.end - key, s.kv_stride, s.dim);
        copy_commit();
    };
    rows_load<DP>(tiles + 2 * TILE_ELEMENTS, q + first * s.q_stride, SEGMENT_TILE, segment.end - first, s.q_stride, s.dim);
    copy_commit();
    load_keys(segment.first, 0);
    copy_wait<1>();
    __syncthreads();
    uint32_t fq[DP / 16][4];
#pragma unroll
    for (int c = 0; c < DP / 16; c++)
        rows_first<DP>(fq[c], tiles + 2 * TILE_ELEMENTS, warp * 16, 2 * c);

    float acc[DP / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, scale = s.scale * LOG2E;
    int stage = 0;
    for (int key = segment.first; key < last; key += SEGMENT_TILE, stage ^= 1) {
        copy_wait<0>();
        __syncthreads(); /* this stage is there, and the other free */
        if (key + SEGMENT_TILE < last)
            load_keys(key + SEGMENT_TILE, stage ^ 1);
        segment_need need = segment_need_of<CAUSAL, SEGMENT_TILE>(key, last, row);
        if (row >= segment.end || need.blocks <= 0)
            continue;
        const bf16 *tile_k = tiles + stage * 2 * TILE_ELEMENTS, *tile_v = tile_k + TILE_ELEMENTS;
        if (need.whole)
            segment_step<DP, CAUSAL, true>(acc, top, sum, fq, tile_k, tile_v, key, last, row, need.blocks, scale);
        else
            segment_step<DP, CAUSAL, false>(acc, top, sum, fq, tile_k, tile_v, key, last, row, need.blocks, scale);
    }
    __syncthreads(); /* the stages are free */
    int rows = segment.end - row < 16 ? segment.end - row : 16;
    if (rows <= 0)
        return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
        if (lse && t == 0 && g + 8 * r < rows)
            lse[(int64_t)(row + g + 8 * r) * s.heads + head] = (top[r] * scale + log2f(sum[r])) * LN2;
    }
    if (o)
        rows_store<DP>(o + row * s.o_stride + (int64_t)head * s.dim, s.o_stride, s.dim, tiles, warp * 16, rows, acc, 1.0f / sum[0], 1.0f / sum[1]);
}

/* Half a tile of keys, from row `at` of the stage, for 16 queries from `row`. */
template <int DP, bool CAUSAL, bool WHOLE>
__device__ inline void segment_grad_step(float (&acc)[DP / 8][4], const uint32_t (&fq)[DP / 16][4], const uint32_t (&fy)[DP / 16][4],
                                         const bf16 *tile_k, const bf16 *tile_v, int at, int key, int last, int row, int blocks, float scale,
                                         const float (&top)[2], const float (&mean)[2])
{
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    float x[SEGMENT_STEP / 8][4] = {}, dp[SEGMENT_STEP / 8][4] = {};
    segment_scores<DP, SEGMENT_STEP / 16, WHOLE>(x, fq, tile_k, at, blocks);
    segment_scores<DP, SEGMENT_STEP / 16, WHOLE>(dp, fy, tile_v, at, blocks);
#pragma unroll
    for (int j = 0; j < SEGMENT_STEP / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int c = key + j * 8 + 2 * t + e % 2;
            bool sees = WHOLE || (c < last && (!CAUSAL || c <= row + g + e / 2 * 8));
            x[j][e] = sees ? exp2_fast(x[j][e] * scale - top[e / 2]) * (dp[j][e] - mean[e / 2]) : 0.0f;
        }
    uint32_t ds[SEGMENT_STEP / 16][4];
    rows_pack<SEGMENT_STEP / 16>(ds, x);
    segment_product<DP, SEGMENT_STEP / 16, WHOLE>(acc, ds, tile_k, at, blocks);
}

/* delta [N, heads] and, unless NULL, dq. */
template <int DP, bool CAUSAL>
__global__ void __launch_bounds__(ROWS_BLOCK, DP > 80 ? 2 : 3)
    segment_query_grad_kernel(attention_shape s, const int32_t *segments, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v,
                              const bf16 *o, const float *lse, float *delta, bf16 *dq)
{
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int TILE_ELEMENTS = SEGMENT_TILE * DP;
    bf16 *tiles = (bf16 *)memory; /* k, v of one stage; of the other, where q and do lie first */
    int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4;
    int64_t col = (int64_t)head * s.dim;
    if (blockIdx.y == gridDim.y - 1) {
        rows_outside(s, segments, gridDim.y - 1, [&](int row) {
            for (int c = threadIdx.x; dq && c < s.dim; c += ROWS_BLOCK)
                dq[row * s.dq_stride + col + c] = __float2bfloat16_rn(0.0f);
        });
        return;
    }
    segment_rows segment = segment_of(s, segments, blockIdx.y);
    int first = segment.first + (gridDim.z - 1 - blockIdx.z) * SEGMENT_TILE, row = first + warp * 16;
    if (first >= segment.end)
        return;
    int last = CAUSAL && first + SEGMENT_TILE < segment.end ? first + SEGMENT_TILE : segment.end;
    k += (int64_t)(head / s.group) * s.dim;
    v += (int64_t)(head / s.group) * s.dim;
    auto load_keys = [&](int key, int stage) {
        bf16 *to = tiles + stage * 2 * TILE_ELEMENTS;
        rows_load<DP>(to, k + key * s.kv_stride, SEGMENT_TILE, segment.end - key, s.kv_stride, s.dim);
        rows_load<DP>(to + TILE_ELEMENTS, v + key * s.kv_stride, SEGMENT_TILE, segment.end - key, s.kv_stride, s.dim);
        copy_commit();
    };
    bf16 *tile_q = tiles + 2 * TILE_ELEMENTS, *tile_dy = tile_q + TILE_ELEMENTS;
    rows_load<DP>(tile_q, q + first * s.q_stride + col, SEGMENT_TILE, segment.end - first, s.q_stride, s.dim);
    rows_load<DP>(tile_dy, dy + first * s.o_stride + col, SEGMENT_TILE, segment.end - first, s.o_stride, s.dim);
    copy_commit();
    load_keys(segment.first, 0);
    int mine = threadIdx.x / 2; /* of the tile's rows, for delta */
    row_half<DP> out;
    out.load(o + (first + mine) * s.o_stride + col, first + mine < segment.end, s.dim);
    float top[2], mean[2], scale = s.scale * LOG2E;
#pragma unroll
    for (int r = 0; r < 2; r++)
        top[r] = row + g + 8 * r < segment.end ? lse[(int64_t)(row + g + 8 * r) * s.heads + head] * LOG2E : 0.0f;
    copy_wait<1>();
    __syncthreads();
    float product = out.product(tile_dy, mine);
    if (threadIdx.x % 2 == 0 && first + mine < segment.end)
        delta[(int64_t)(first + mine) * s.heads + head] = product;
    if (!dq) {
        copy_wait<0>();
        return;
    }
    /* Row r of a warp's 16 was summed by its lanes 2 r and 2 r + 1. */
    mean[0] = __shfl_sync(0xFFFFFFFFu, product, 2 * g);
    mean[1] = __shfl_sync(0xFFFFFFFFu, product, 2 * g + 16);
    uint32_t fq[DP / 16][4], fy[DP / 16][4];
#pragma unroll
    for (int c = 0; c < DP / 16; c++) {
        rows_first<DP>(fq[c], tile_q, warp * 16, 2 * c);
        rows_first<DP>(fy[c], tile_dy, warp * 16, 2 * c);
    }

    float acc[DP / 8][4] = {};
    int stage = 0;
    for (int key = segment.first; key < last; key += SEGMENT_TILE, stage ^= 1) {
        copy_wait<0>();
        __syncthreads(); /* this stage is there, and the other free */
        if (key + SEGMENT_TILE < last)
            load_keys(key + SEGMENT_TILE, stage ^ 1);
        if (row >= segment.end)
            continue;
        const bf16 *tile_k = tiles + stage * 2 * TILE_ELEMENTS, *tile_v = tile_k + TILE_ELEMENTS;
#pragma unroll 1
        for (int at = 0; at < SEGMENT_TILE; at += SEGMENT_STEP) {
            segment_need need = segment_need_of<CAUSAL, SEGMENT_STEP>(key + at, last, row);
            if (need.blocks <= 0)
                break;
            if (need.whole)
                segment_grad_step<DP, CAUSAL, true>(acc, fq, fy, tile_k, tile_v, at, key + at, last, row, need.blocks, scale, top, mean);
            else
                segment_grad_step<DP, CAUSAL, false>(acc, fq, fy, tile_k, tile_v, at, key + at, last, row, need.blocks, scale, top, mean);
        }
    }
    __syncthreads(); /* the stages are free */
    int rows = segment.end - row < 16 ? segment.end - row : 16;
    if (rows > 0)
        rows_store<DP>(dq + row * s.dq_stride + col, s.dq_stride, s.dim, tiles, warp * 16, rows, acc, s.scale, s.scale);
}

/* All blocks of the cluster come here, and what they wrote is seen by all. */
__device__ inline void cluster_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/* Four floats at the place of p in the shared memory of the cluster's block `rank`. */
__device__ inline float4 cluster_load(const float *p, int rank)
{
    float4 x = *reinterpret_cast<const float4 *>(p);
#if __CUDA_ARCH__ >= 900
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
#endif
    return x;
}

struct segment_side {
    float lse[SEGMENT_STEP], delta[SEGMENT_STEP];
};

template <int DP> constexpr size_t segment_key_shared()
{
    return (2 * SEGMENT_TILE + 4 * SEGMENT_STEP) * DP * sizeof(bf16) + 2 * sizeof(segment_side);
}

/* x [16][32] = rows of `a` from `row` times the 32 rows of b. */
template <int DP> __device__ inline void segment_rows_product(float (&x)[SEGMENT_STEP / 8][4], const bf16 *a, int row, const bf16 *b)
{
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        uint32_t fa[4], fb[4];
        rows_first<DP>(fa, a, row, 2 * k);
#pragma unroll
        for (int j = 0; j < SEGMENT_STEP / 16; j++) {
            rows_second<DP>(fb, b, 16 * j, 2 * k);
            multiply(x[2 * j], fa, fb[0], fb[1]);
            multiply(x[2 * j + 1], fa, fb[2], fb[3]);
        }
    }
}

/* dk, dv; either may be NULL. Grid x: kv heads, each `split` blocks (a cluster when more than one) of group / split heads. */
template <int DP, bool CAUSAL>
__global__ void __launch_bounds__(ROWS_BLOCK, DP > 80 ? 2 : 3)
    segment_key_grad_kernel(attention_shape s, const int32_t *segments, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v,
                            const float *lse, const float *delta, bf16 *dk, bf16 *dv, int split)
{
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int STEP_ELEMENTS = SEGMENT_STEP * DP;
    bf16 *tile_k = (bf16 *)memory, *tile_v = tile_k + SEGMENT_TILE * DP, *stages = tile_v + SEGMENT_TILE * DP; /* q, do; twice */
    segment_side *side = (segment_side *)(stages + 4 * STEP_ELEMENTS);
    int kv_head = blockIdx.x / split, rank = blockIdx.x % split, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int64_t col = (int64_t)kv_head * s.dim;
    if (blockIdx.y == gridDim.y - 1) {
        rows_outside(s, segments, gridDim.y - 1, [&](int row) {
            for (int c = threadIdx.x; rank == 0 && c < s.dim; c += ROWS_BLOCK) {
                if (dk)
                    dk[row * s.dkv_stride + col + c] = __float2bfloat16_rn(0.0f);
                if (dv)
                    dv[row * s.dkv_stride + col + c] = __float2bfloat16_rn(0.0f);
            }
        });
        return;
    }
    segment_rows segment = segment_of(s, segments, blockIdx.y);
    int first = segment.first + blockIdx.z * SEGMENT_TILE, key = first + warp * 16;
    if (first >= segment.end)
        return; /* with the whole cluster */
    int from = CAUSAL ? first : segment.first, head = kv_head * s.group + rank * (s.group / split), last_head = head + s.group / split;
    float scale = s.scale * LOG2E;
    auto load_queries = [&](int head, int query, int stage) {
        bf16 *to = stages + stage * 2 * STEP_ELEMENTS;
        rows_load<DP, 1>(to, q + query * s.q_stride + (int64_t)head * s.dim, SEGMENT_STEP, segment.end - query, s.q_stride, s.dim);
        rows_load<DP, 1>(to + STEP_ELEMENTS, dy + query * s.o_stride + (int64_t)head * s.dim, SEGMENT_STEP, segment.end - query, s.o_stride, s.dim);
        if (threadIdx.x < SEGMENT_STEP) { /* zeros past the end: with do = 0 such queries add nothing */
            int i = query + threadIdx.x;
            bool there = i < segment.end;
            int64_t at = (int64_t)(there ? i : 0) * s.heads + head;
            copy_async<4>(&side[stage].lse[threadIdx.x], lse + at, there);
            copy_async<4>(&side[stage].delta[threadIdx.x], delta + at, there);
        }
        copy_commit();
    };
    rows_load<DP>(tile_k, k + first * s.kv_stride + col, SEGMENT_TILE, segment.end - first, s.kv_stride, s.dim);
    rows_load<DP>(tile_v, v + first * s.kv_stride + col, SEGMENT_TILE, segment.end - first, s.kv_stride, s.dim);
    load_queries(head, from, 0);

    float acc_k[DP / 8][4] = {}, acc_v[DP / 8][4] = {};
    for (int query = from, next, stage = 0; head < last_head; query = next, stage ^= 1) {
        next = query + SEGMENT_STEP < segment.end ? query + SEGMENT_STEP : from;
        head += next == from;
        copy_wait<0>();
        __syncthreads(); /* this stage is there, and the other free */
        if (head < last_head)
            load_queries(head, next, stage ^ 1);
        if (key >= segment.end || (CAUSAL && query + SEGMENT_STEP <= key))
            continue;
        const bf16 *tile_q = stages + stage * 2 * STEP_ELEMENTS, *tile_dy = tile_q + STEP_ELEMENTS;
        float x[SEGMENT_STEP / 8][4] = {}, dp[SEGMENT_STEP / 8][4] = {};
        segment_rows_product<DP>(x, tile_k, warp * 16, tile_q);
        segment_rows_product<DP>(dp, tile_v, warp * 16, tile_dy);
        bool diagonal = CAUSAL && query < key + 15;
#pragma unroll
        for (int j = 0; j < SEGMENT_STEP / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int at = j * 8 + 2 * t + c;
                float top = side[stage].lse[at] * LOG2E, mean = side[stage].delta[at];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    int e = 2 * r + c;
                    bool sees = !diagonal || query + at >= key + g + 8 * r;
                    float p = sees ? exp2_fast(x[j][e] * scale - top) : 0.0f;
                    x[j][e] = p;
                    dp[j][e] = p * (dp[j][e] - mean);
                }
            }
        uint32_t p[SEGMENT_STEP / 16][4];
        rows_pack<SEGMENT_STEP / 16>(p, x);
        segment_product<DP, SEGMENT_STEP / 16, true>(acc_v, p, tile_dy, 0, 0);
        rows_pack<SEGMENT_STEP / 16>(p, dp);
        segment_product<DP, SEGMENT_STEP / 16, true>(acc_k, p, tile_q, 0, 0);
    }
    int rows = segment.end - key < 16 ? segment.end - key : 16;
    if (split == 1) {
        if (rows > 0 && dk) /* the warp's own rows of k and v are read by it alone */
            rows_store<DP>(dk + key * s.dkv_stride + col, s.dkv_stride, s.dim, tile_k, warp * 16, rows, acc_k, s.scale, s.scale);
        if (rows > 0 && dv)
            rows_store<DP>(dv + key * s.dkv_stride + col, s.dkv_stride, s.dim, tile_v, warp * 16, rows, acc_v, 1.0f, 1.0f);
        return;
    }
    /* Sums of the cluster's blocks, in the order of their ranks; a block adds a share of the rows. */
    float *sums = (float *)memory; /* [2][SEGMENT_TILE][DP] */
    __syncthreads();
#pragma unroll
    for (int j = 0; j < DP / 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *at = sums + (warp * 16 + g + 8 * r) * DP + j * 8 + 2 * t;
            *reinterpret_cast<float2 *>(at) = make_float2(acc_k[j][2 * r] * s.scale, acc_k[j][2 * r + 1] * s.scale);
            *reinterpret_cast<float2 *>(at + SEGMENT_TILE * DP) = make_float2(acc_v[j][2 * r], acc_v[j][2 * r + 1]);
        }
    cluster_wait();
    int share = SEGMENT_TILE / split;
    for (int i = threadIdx.x; i < 2 * share * (DP / 8); i += ROWS_BLOCK) {
        int piece = i % (DP / 8), r = i / (DP / 8) % share + rank * share, which = i / (share * (DP / 8));
        bf16 *to = which ? dv : dk;
        if (!to || first + r >= segment.end || piece * 8 >= s.dim)
            continue;
        const float *at = sums + (which * SEGMENT_TILE + r) * DP + piece * 8;
        float total8[8] = {};
        for (int block = 0; block < split; block++) {
            float4 a = cluster_load(at, block), b = cluster_load(at + 4, block);
            float part[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int c = 0; c < 8; c++)
                total8[c] += part[c];
        }
        pack<bf16, 8> word;
        word.set(total8);
        word.store(to + (first + r) * s.dkv_stride + col + piece * 8);
    }
    cluster_wait(); /* nobody leaves while others read */
}

#endif
