/* Attention in bf16 on tensor cores: forward, and backward as two kernels (kernels/attention.cu says which and why).
 *
 * A block has 4 warps; a warp owns 16 rows of its tile. Matrices of scores live in registers, 16 rows at a time, and go from
 * one product into the next without touching memory: the accumulator of m16n8k16 has the layout of its first operand. Head
 * dimensions are padded with zeros to DP, a multiple of 16, in shared memory only. Rows there are DP + 8 long, so that the
 * eight rows of an 8x8 tile start in different banks. */
#ifndef VLAI_ATTENTION_TILES_CUH
#define VLAI_ATTENTION_TILES_CUH

#include "kernels/attention.cuh"

enum { BLOCK = 128, TILE = 64, HALF_TILE = 32 };

/* Rows first.. (below `end`) of one head, to [ROWS][DP + 8]; zeros past the end and past the head dimension. */
template <int ROWS, int DP>
__device__ inline void load_tile(bf16 *to, const bf16 *from, int64_t first, int64_t end, int64_t stride, int dim, bool vector)
{
    constexpr int PER_ROW = DP / 8;
#pragma unroll
    for (int k = 0; k < (ROWS * PER_ROW + BLOCK - 1) / BLOCK; k++) {
        int i = threadIdx.x + k * BLOCK, row = i / PER_ROW, col = i % PER_ROW * 8;
        if (ROWS * PER_ROW % BLOCK && i >= ROWS * PER_ROW)
            break;
        bool there = first + row < end && col < dim;
        bf16 *p = to + row * (DP + 8) + col;
        const bf16 *q = there ? from + (first + row) * stride + col : from;
        if (vector)
            copy_async<16>(p, q, there);
        else
            for (int c = 0; c < 8; c++)
                p[c] = there && col + c < dim ? q[c] : __float2bfloat16_rn(0.0f);
    }
}

/* Operand addresses of this lane. First operand: rows of a [16][16] block. Second: [n][k] as it lies, or [k][n] transposed,
 * two 8-wide blocks of n at once. */
template <int DP> __device__ inline const bf16 *first_operand(const bf16 *tile, int row, int col)
{
    int lane = threadIdx.x % WARP;
    return tile + (row + lane % 16) * (DP + 8) + col + lane / 16 * 8;
}

template <int DP> __device__ inline const bf16 *second_operand(const bf16 *tile, int n, int k)
{
    int lane = threadIdx.x % WARP;
    return tile + (n + lane / 16 * 8 + lane % 8) * (DP + 8) + k + lane / 8 % 2 * 8;
}

template <int DP> __device__ inline const bf16 *second_transposed(const bf16 *tile, int k, int n)
{
    int lane = threadIdx.x % WARP;
    return tile + (k + lane % 16) * (DP + 8) + n + lane / 16 * 8;
}

/* c [16][8 NT] += rows of `a` (16 from `row`) times rows of `b` (8 NT), over the head dimension. */
template <int DP, int NT> __device__ inline void multiply_rows(float (&c)[NT][4], const bf16 *a, int row, const bf16 *b)
{
#pragma unroll
    for (int k = 0; k < DP; k += 16) {
        uint32_t fa[4], fb[4];
        load_fragments(fa, first_operand<DP>(a, row, k));
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            load_fragments(fb, second_operand<DP>(b, j * 8, k));
            multiply(c[j], fa, fb[0], fb[1]);
            multiply(c[j + 1], fa, fb[2], fb[3]);
        }
    }
}

/* The accumulator x [16][8 NT], rounded to bf16, as first operands of products over its columns. */
template <int NT> __device__ inline void to_operand(uint32_t (&a)[NT / 2][4], const float (&x)[NT][4])
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        a[k][0] = pack_pair(x[2 * k][0], x[2 * k][1]);
        a[k][1] = pack_pair(x[2 * k][2], x[2 * k][3]);
        a[k][2] = pack_pair(x[2 * k + 1][0], x[2 * k + 1][1]);
        a[k][3] = pack_pair(x[2 * k + 1][2], x[2 * k + 1][3]);
    }
}

/* c [16][DP] += a [16][16 K] b, b [16 K][DP] in shared memory. */
template <int DP, int K> __device__ inline void multiply_columns(float (&c)[DP / 8][4], const uint32_t (&a)[K][4], const bf16 *b)
{
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int j = 0; j < DP / 8; j += 2) {
            uint32_t fb[4];
            load_fragments_transposed(fb, second_transposed<DP>(b, k * 16, j * 8));
            multiply(c[j], a[k], fb[0], fb[1]);
            multiply(c[j + 1], a[k], fb[2], fb[3]);
        }
}

/* The warp's 16 rows of results, through its own rows of a tile in shared memory that nobody reads any more. */
template <int DP>
__device__ inline void store_rows(bf16 *to, int64_t first, int64_t end, int64_t stride, int dim, bool vector, bf16 *tile, int row,
                                  const float (&x)[DP / 8][4], float factor0, float factor1)
{
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    bf16 *mine = tile + row * (DP + 8);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < DP / 8; j++) {
        *reinterpret_cast<uint32_t *>(mine + g * (DP + 8) + j * 8 + 2 * t) = pack_pair(x[j][0] * factor0, x[j][1] * factor0);
        *reinterpret_cast<uint32_t *>(mine + (g + 8) * (DP + 8) + j * 8 + 2 * t) = pack_pair(x[j][2] * factor1, x[j][3] * factor1);
    }
    __syncwarp();
    for (int i = lane; i < 16 * (DP / 8); i += WARP) {
        int r = i / (DP / 8), col = i % (DP / 8) * 8;
        if (first + r >= end || col >= dim)
            continue;
        bf16 *p = to + (first + r) * stride + col;
        const bf16 *q = mine + r * (DP + 8) + col;
        if (vector)
            *reinterpret_cast<uint4 *>(p) = *reinterpret_cast<const uint4 *>(q);
        else
            for (int c = 0; c < 8 && col + c < dim; c++)
                p[c] = q[c];
    }
}

/* What the 16 queries of a warp see; every lane holds the same. */
struct warp_queries {
    int q_min, q_max, first_min, first_max, end_min, end_max;
};

/* Rows i0 and i0 + 8 of this lane: position and span. */
__device__ inline warp_queries look_at_queries(const attention_shape &s, int64_t i0, int (&q)[2], int2 (&span)[2])
{
    warp_queries w = {INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int64_t i = i0 + 8 * r;
        span[r] = key_span(s, i);
        q[r] = i < s.queries ? s.qpos[i] : 0;
        if (i >= s.queries)
            continue;
        w.first_max = max(w.first_max, span[r].x);
        w.end_min = min(w.end_min, span[r].y);
        if (span[r].y == 0)
            continue;
        w.q_min = min(w.q_min, q[r]);
        w.q_max = max(w.q_max, q[r]);
        w.first_min = min(w.first_min, span[r].x);
        w.end_max = max(w.end_max, span[r].y);
    }
    w.q_min = __reduce_min_sync(0xFFFFFFFFu, w.q_min);
    w.q_max = __reduce_max_sync(0xFFFFFFFFu, w.q_max);
    w.first_min = __reduce_min_sync(0xFFFFFFFFu, w.first_min);
    w.first_max = __reduce_max_sync(0xFFFFFFFFu, w.first_max);
    w.end_min = __reduce_min_sync(0xFFFFFFFFu, w.end_min);
    w.end_max = __reduce_max_sync(0xFFFFFFFFu, w.end_max);
    return w;
}

/* The keys that any query of the block may see. */
__device__ inline int2 block_span(const warp_queries &w)
{
    __shared__ int2 part[BLOCK / WARP];
    if (threadIdx.x % WARP == 0)
        part[threadIdx.x / WARP] = make_int2(w.first_min, w.end_max);
    __syncthreads();
    int2 all = part[0];
    for (int i = 1; i < BLOCK / WARP; i++)
        all = make_int2(min(all.x, part[i].x), max(all.y, part[i].y));
    return all;
}

/* Do the warp's queries see any, or all, of KEYS keys from `key`? cols: theirs, in shared memory. */
template <int KEYS> __device__ inline void look_at_keys(const warp_queries &w, int key, const int4 *cols, bool &any, bool &all)
{
    any = false;
    all = w.first_max <= key && w.end_min >= key + KEYS;
#pragma unroll
    for (int k = threadIdx.x % WARP; k < KEYS; k += WARP) {
        int4 c = cols[k];
        any |= c.x <= w.q_max && c.y > w.q_min;
        all &= c.x <= w.q_min && c.y > w.q_max && no_hole(c, w.q_min, w.q_max);
    }
    any = __any_sync(0xFFFFFFFFu, any) && w.first_min < key + KEYS && w.end_max > key;
    all = __all_sync(0xFFFFFFFFu, all);
}

template <int KEYS> __device__ inline void load_cols(int4 *to, const attention_shape &s, int64_t key)
{
    if (threadIdx.x < KEYS)
        copy_async<16>(to + threadIdx.x, s.cols + (key + threadIdx.x < s.keys ? key + threadIdx.x : 0), key + threadIdx.x < s.keys);
}

template <int DP> constexpr size_t attention_shared()
{
    return 3 * TILE * (DP + 8) * sizeof(bf16) + 2 * TILE * sizeof(int4);
}

/* Forward. Block: 64 queries of one head, keys in tiles of 64. */
template <int DP>
__global__ void __launch_bounds__(BLOCK, 3)
    attention_tile_kernel(attention_shape s, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse)
{
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tile_q = (bf16 *)memory, *tile_k = tile_q + TILE * (DP + 8), *tile_v = tile_k + TILE * (DP + 8);
    int4 *cols = (int4 *)(tile_v + TILE * (DP + 8)); /* [2][TILE] */
    int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = lane % 4;
    int64_t query = (int64_t)(gridDim.y - 1 - blockIdx.y) * TILE, q_stride = s.q_stride, kv_stride = s.kv_stride;
    q += (int64_t)head * s.dim;
    k += (int64_t)(head / s.group) * s.dim;
    v += (int64_t)(head / s.group) * s.dim;

    int position[2];
    int2 span[2];
    warp_queries seen = look_at_queries(s, query + warp * 16 + lane / 4, position, span);
    int2 keys = block_span(seen);
    load_tile<TILE, DP>(tile_q, q, query, s.queries, q_stride, s.dim, s.vector);
    if (keys.x < keys.y) {
        load_tile<TILE, DP>(tile_k, k, keys.x, s.keys, kv_stride, s.dim, s.vector);
        load_cols<TILE>(cols, s, keys.x);
    }
    copy_commit();
    if (keys.x < keys.y)
        load_tile<TILE, DP>(tile_v, v, keys.x, s.keys, kv_stride, s.dim, s.vector);
    copy_commit();

    float acc[DP / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, scale = s.scale * LOG2E;
    int parity = 0;
    for (int key = keys.x; key < keys.y; key += TILE, parity ^= 1) {
        copy_wait<1>();
        __syncthreads();
        bool any, all;
        look_at_keys<TILE>(seen, key, cols + parity * TILE, any, all);
        float x[TILE / 8][4] = {};
        if (any)
            multiply_rows<DP>(x, tile_q, warp * 16, tile_k);
        __syncthreads(); /* tile_k is free */
        if (key + TILE < keys.y) {
            load_tile<TILE, DP>(tile_k, k, key + TILE, s.keys, kv_stride, s.dim, s.vector);
            load_cols<TILE>(cols + (parity ^ 1) * TILE, s, key + TILE);
        }
        copy_commit();
        uint32_t fp[TILE / 16][4];
        if (any) {
            float most[2] = {top[0], top[1]}, shrink[2];
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[j][e] *= scale;
            if (!all) {
#pragma unroll
                for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int at = j * 8 + 2 * t + e;
                        int4 c = cols[parity * TILE + at];
                        x[j][e] = visible(position[0], span[0], key + at, c) ? x[j][e] : -INFINITY;
                        x[j][2 + e] = visible(position[1], span[1], key + at, c) ? x[j][2 + e] : -INFINITY;
                    }
            }
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
                most[0] = fmaxf(most[0], fmaxf(x[j][0], x[j][1]));
                most[1] = fmaxf(most[1], fmaxf(x[j][2], x[j][3]));
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFu, most[r], 1));
                most[r] = fmaxf(most[r], __shfl_xor_sync(0xFFFFFFFFu, most[r], 2));
                float base = most[r] == -INFINITY ? 0.0f : most[r];
                shrink[r] = exp2_fast(top[r] - base);
                top[r] = most[r];
                float part = 0;
#pragma unroll
                for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        x[j][e] = exp2_fast(x[j][e] - base);
                        part += x[j][e];
                    }
                sum[r] = sum[r] * shrink[r] + part;
            }
#pragma unroll
            for (int j = 0; j < DP / 8; j++) {
                acc[j][0] *= shrink[0];
                acc[j][1] *= shrink[0];
                acc[j][2] *= shrink[1];
                acc[j][3] *= shrink[1];
            }
            to_operand<TILE / 8>(fp, x);
        }
        copy_wait<1>();
        __syncthreads(); /* tile_v is there */
        if (any)
            multiply_columns<DP, TILE / 16>(acc, fp, tile_v);
        __syncthreads(); /* tile_v is free */
        if (key + TILE < keys.y)
            load_tile<TILE, DP>(tile_v, v, key + TILE, s.keys, kv_stride, s.dim, s.vector);
        copy_commit();
    }
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
        int64_t row = query + warp * 16 + lane / 4 + 8 * r;
        if (lse && t == 0 && row < s.queries)
            lse[row * s.heads + head] = sum[r] > 0 ? (top[r] + log2f(sum[r])) * LN2 : -INFINITY;
    }
    if (o)
        store_rows<DP>(o + (int64_t)head * s.dim, query + warp * 16, s.queries, s.o_stride, s.dim, s.vector, tile_q, warp * 16, acc,
                       sum[0] > 0 ? 1.0f / sum[0] : 0.0f, sum[1] > 0 ? 1.0f / sum[1] : 0.0f);
}

template <int DP> constexpr size_t query_grad_shared()
{
    return (2 * TILE + 4 * HALF_TILE) * (DP + 8) * sizeof(bf16) + 2 * HALF_TILE * sizeof(int4);
}

/* dq. Block: 64 queries of one head, keys in tiles of 32. dS = P (dP - delta), dq = scale dS K. */
template <int DP>
__global__ void __launch_bounds__(BLOCK, DP > 80 ? 3 : 4)
    query_grad_kernel(attention_shape s, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse,
                      const float *delta, bf16 *dq)
{
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tile_q = (bf16 *)memory, *tile_dy = tile_q + TILE * (DP + 8), *tile_k = tile_dy + TILE * (DP + 8); /* k, v: [2] */
    bf16 *tile_v = tile_k + 2 * HALF_TILE * (DP + 8);
    int4 *cols = (int4 *)(tile_v + 2 * HALF_TILE * (DP + 8)); /* [2][HALF_TILE] */
    int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = lane % 4;
    int64_t query = (int64_t)(gridDim.y - 1 - blockIdx.y) * TILE, q_stride = s.q_stride, kv_stride = s.kv_stride;
    k += (int64_t)(head / s.group) * s.dim;
    v += (int64_t)(head / s.group) * s.dim;

    int position[2];
    int2 span[2];
    int64_t row = query + warp * 16 + lane / 4;
    warp_queries seen = look_at_queries(s, row, position, span);
    int2 keys = block_span(seen);
    float top[2], mean[2], scale = s.scale * LOG2E;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool there = row + 8 * r < s.queries;
        top[r] = there ? lse[(row + 8 * r) * s.heads + head] * LOG2E : 0.0f;
        mean[r] = there ? delta[(row + 8 * r) * s.heads + head] : 0.0f;
    }
    auto load_keys = [&](int key, int at) {
        load_tile<HALF_TILE, DP>(tile_k + at * HALF_TILE * (DP + 8), k, key, s.keys, kv_stride, s.dim, s.vector);
        load_tile<HALF_TILE, DP>(tile_v + at * HALF_TILE * (DP + 8), v, key, s.keys, kv_stride, s.dim, s.vector);
        load_cols<HALF_TILE>(cols + at * HALF_TILE, s, key);
    };
    load_tile<TILE, DP>(tile_q, q + (int64_t)head * s.dim, query, s.queries, q_stride, s.dim, s.vector);
    load_tile<TILE, DP>(tile_dy, dy + (int64_t)head * s.dim, query, s.queries, s.o_stride, s.dim, s.vector);
    if (keys.x < keys.y)
        load_keys(keys.x, 0);
    copy_commit();

    float acc[DP / 8][4] = {};
    int parity = 0;
    for (int key = keys.x; key < keys.y; key += HALF_TILE, parity ^= 1) {
        copy_wait<0>();
        __syncthreads(); /* this tile is there, and the other buffer is free */
        if (key + HALF_TILE < keys.y)
            load_keys(key + HALF_TILE, parity ^ 1);
        copy_commit();
        const bf16 *my_k = tile_k + parity * HALF_TILE * (DP + 8), *my_v = tile_v + parity * HALF_TILE * (DP + 8);
        const int4 *my_cols = cols + parity * HALF_TILE;
        bool any, all;
        look_at_keys<HALF_TILE>(seen, key, my_cols, any, all);
        if (!any)
            continue;
        float x[HALF_TILE / 8][4] = {}, dp[HALF_TILE / 8][4] = {};
        multiply_rows<DP>(x, tile_q, warp * 16, my_k);
        multiply_rows<DP>(dp, tile_dy, warp * 16, my_v);
#pragma unroll
        for (int j = 0; j < HALF_TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int r = e / 2, at = j * 8 + 2 * t + e % 2;
                float p = exp2_fast(x[j][e] * scale - top[r]);
                if (!all)
                    p = visible(position[r], span[r], key + at, my_cols[at]) ? p : 0.0f;
                x[j][e] = p * (dp[j][e] - mean[r]);
            }
        uint32_t fs[HALF_TILE / 16][4];
        to_operand<HALF_TILE / 8>(fs, x);
        multiply_columns<DP, HALF_TILE / 16>(acc, fs, my_k);
    }
    copy_wait<0>();
    __syncthreads();
    store_rows<DP>(dq + (int64_t)head * s.dim, query + warp * 16, s.queries, s.dq_stride, s.dim, s.vector, tile_q, warp * 16, acc,
                   s.scale, s.scale);
}

enum { ROUND = BLOCK }; /* query tiles looked at together */

/* What a key tile needs to know of the queries in its buffers. */
struct query_side {
    int position[HALF_TILE];
    int2 span[HALF_TILE];
    float lse[HALF_TILE], delta[HALF_TILE];
};

template <int DP> constexpr size_t key_grad_shared()
{
    return (2 * TILE + 4 * HALF_TILE) * (DP + 8) * sizeof(bf16) + 2 * sizeof(query_side);
}

/* dk, dv. Block: 64 keys of one kv head; its group's heads and their query tiles of 32 in order. Scores are transposed, keys
 * in rows: P^T = exp(K Q^T - lse), dv = P^T dy, dk = scale dS^T Q. tiles [ceil(queries / 32)]. */
template <int DP>
__global__ void __launch_bounds__(BLOCK, DP > 80 ? 2 : 3)
    key_grad_kernel(attention_shape s, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse, const float *delta,
                    const query_tile *tiles, int n_tiles, bf16 *dk, bf16 *dv)
{
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tile_k = (bf16 *)memory, *tile_v = tile_k + TILE * (DP + 8), *tile_q = tile_v + TILE * (DP + 8); /* q, dy: [2] */
    bf16 *tile_dy = tile_q + 2 * HALF_TILE * (DP + 8);
    query_side *side = (query_side *)(tile_dy + 2 * HALF_TILE * (DP + 8)); /* [2] */
    __shared__ int list[ROUND], count[BLOCK / WARP];
    __shared__ query_tile listed[ROUND];
    __shared__ int2 block_range[BLOCK / WARP];
    int kv_head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = lane % 4;
    int64_t key = (int64_t)blockIdx.y * TILE, q_stride = s.q_stride, kv_stride = s.kv_stride;
    float scale = s.scale * LOG2E;

    /* The keys of this lane's two rows, and what the warp's 16 have in common. */
    int4 col[2];
    int low_min = INT32_MAX, low_max = INT32_MIN, high_min = INT32_MAX, high_max = INT32_MIN;
    int warp_key = (int)key + warp * 16, my_key = warp_key + lane / 4;
    bool holes = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        col[r] = my_key + 8 * r < s.keys ? s.cols[my_key + 8 * r] : make_int4(0, 0, 0, 0);
        low_max = max(low_max, col[r].x);
        high_min = min(high_min, col[r].y);
        if (col[r].x < col[r].y) {
            low_min = min(low_min, col[r].x);
            high_max = max(high_max, col[r].y);
        }
        holes |= col[r].z < col[r].w;
    }
    low_min = __reduce_min_sync(0xFFFFFFFFu, low_min);
    low_max = __reduce_max_sync(0xFFFFFFFFu, low_max);
    high_min = __reduce_min_sync(0xFFFFFFFFu, high_min);
    high_max = __reduce_max_sync(0xFFFFFFFFu, high_max);
    holes = __any_sync(0xFFFFFFFFu, holes);
    if (lane == 0)
        block_range[warp] = make_int2(low_min, high_max);
    load_tile<TILE, DP>(tile_k, k + (int64_t)kv_head * s.dim, key, s.keys, kv_stride, s.dim, s.vector);
    load_tile<TILE, DP>(tile_v, v + (int64_t)kv_head * s.dim, key, s.keys, kv_stride, s.dim, s.vector);
    copy_commit();
    __syncthreads();
    int2 range = block_range[0];
    for (int i = 1; i < BLOCK / WARP; i++)
        range = make_int2(min(range.x, block_range[i].x), max(range.y, block_range[i].y));

    float acc_k[DP / 8][4] = {}, acc_v[DP / 8][4] = {};
    for (int round = 0; round < n_tiles; round += ROUND) {
        /* The query tiles of this round that see any of the keys, in order. */
        int mine = round + threadIdx.x;
        bool wanted = false;
        query_tile f = {};
        if (mine < n_tiles) {
            f = tiles[mine];
            wanted = f.first_min < key + TILE && f.end_max > key && range.x <= f.q_max && range.y > f.q_min;
        }
        unsigned votes = __ballot_sync(0xFFFFFFFFu, wanted);
        if (lane == 0)
            count[warp] = __popc(votes);
        __syncthreads();
        int before = __popc(votes & ((1u << lane) - 1)), n = 0;
        for (int i = 0; i < BLOCK / WARP; i++) {
            before += i < warp ? count[i] : 0;
            n += count[i];
        }
        if (wanted) {
            list[before] = mine;
            listed[before] = f;
        }
        __syncthreads();
        int total = n * s.group;
        auto load_queries = [&](int step, int at) {
            int head = kv_head * s.group + step / n;
            int64_t query = (int64_t)list[step % n] * HALF_TILE, i = query + threadIdx.x;
            load_tile<HALF_TILE, DP>(tile_q + at * HALF_TILE * (DP + 8), q + (int64_t)head * s.dim, query, s.queries, q_stride, s.dim, s.vector);
            load_tile<HALF_TILE, DP>(tile_dy + at * HALF_TILE * (DP + 8), dy + (int64_t)head * s.dim, query, s.queries, s.o_stride, s.dim, s.vector);
            if (threadIdx.x < HALF_TILE) {
                bool there = i < s.queries;
                i = there ? i : 0;
                copy_async<4>(&side[at].position[threadIdx.x], s.qpos + i, there);
                copy_async<8>(&side[at].span[threadIdx.x], s.rows + i, there);
                copy_async<4>(&side[at].lse[threadIdx.x], lse + i * s.heads + head, there);
                copy_async<4>(&side[at].delta[threadIdx.x], delta + i * s.heads + head, there);
            }
        };
        if (total)
            load_queries(0, 0);
        copy_commit();
        for (int step = 0; step < total; step++) {
            int parity = step & 1;
            copy_wait<0>();
            __syncthreads(); /* these queries are there, and the other buffer is free */
            if (step + 1 < total)
                load_queries(step + 1, parity ^ 1);
            copy_commit();
            const query_tile &f = listed[step % n];
            bool any = f.first_min < warp_key + 16 && f.end_max > warp_key && low_min <= f.q_max && high_max > f.q_min;
            bool all = f.first_max <= warp_key && f.end_min >= warp_key + 16 && low_max <= f.q_min && high_min > f.q_max && !holes;
            if (!any)
                continue;
            const bf16 *my_q = tile_q + parity * HALF_TILE * (DP + 8), *my_dy = tile_dy + parity * HALF_TILE * (DP + 8);
            const query_side &my_side = side[parity];
            float x[HALF_TILE / 8][4] = {}, dp[HALF_TILE / 8][4] = {};
            multiply_rows<DP>(x, tile_k, warp * 16, my_q);
            multiply_rows<DP>(dp, tile_v, warp * 16, my_dy);
#pragma unroll
            for (int j = 0; j < HALF_TILE / 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    int at = j * 8 + 2 * t + c;
                    float top = my_side.lse[at] * LOG2E, mean = my_side.delta[at];
                    bool seen[2] = {true, true};
                    if (!all) {
                        int position = my_side.position[at];
                        int2 span = my_side.span[at];
#pragma unroll
                        for (int r = 0; r < 2; r++)
                            seen[r] = visible(position, span, my_key + 8 * r, col[r]);
                    }
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        int e = 2 * r + c;
                        float p = seen[r] ? exp2_fast(x[j][e] * scale - top) : 0.0f;
                        x[j][e] = p;
                        dp[j][e] = p * (dp[j][e] - mean);
                    }
                }
            uint32_t fp[HALF_TILE / 16][4];
            to_operand<HALF_TILE / 8>(fp, x);
            multiply_columns<DP, HALF_TILE / 16>(acc_v, fp, my_dy);
            to_operand<HALF_TILE / 8>(fp, dp);
            multiply_columns<DP, HALF_TILE / 16>(acc_k, fp, my_q);
        }
        copy_wait<0>();
        __syncthreads(); /* list and buffers are free */
    }
    copy_wait<0>();
    __syncthreads();
    int64_t at = (int64_t)kv_head * s.dim;
    if (dk)
        store_rows<DP>(dk + at, warp_key, s.keys, s.dkv_stride, s.dim, s.vector, tile_k, warp * 16, acc_k, s.scale, s.scale);
    if (dv)
        store_rows<DP>(dv + at, warp_key, s.keys, s.dkv_stride, s.dim, s.vector, tile_v, warp * 16, acc_v, 1.0f, 1.0f);
}

#endif
