/* Attention inside short segments (windows of the vision tower) in bf16 on tensor cores, forward and backward.
 *
 *     VLA_MASK_FULL, no segment longer than 64 rows, as many kv heads as heads: q, k, v, o, do, gradients [N, ...]
 *
 * Bound by memory: every operand is read once and every result written once, 8 D bytes a row and head forward, 16 D backward
 * (o is read for delta = rowsum(do o), which therefore needs no kernel of its own).
 *
 * A block takes the whole segments that begin in 64 neighbouring rows, for one head, up to 80 rows at a time. They are cut
 * into strips of at most 16 rows, each inside one segment or made of several whole segments; a warp takes a strip together
 * with all keys (or queries) of its segments, at most 64, so that no softmax is rescaled and nothing is added by two warps:
 * the order of every sum is fixed. Backward goes by key strips: scores transposed, P^T and dS^T in registers, dv = P^T do,
 * dk = dS^T q; dS^T is left where the strip's v was, and a second round over the same strips makes dq = dS k.
 *
 * Shared memory holds rows without padding; their 16-byte pieces are permuted so that the eight rows that one ldmatrix reads
 * lie in different banks. */
#ifndef VLAI_ATTENTION_WINDOW_CUH
#define VLAI_ATTENTION_WINDOW_CUH

#include "kernels/attention.cuh"

enum {
    WINDOW_BLOCK = 128,
    WINDOW_LONGEST = 64,
    WINDOW_ANCHOR = 64, /* a block's segments begin in so many rows */
    WINDOW_SEEN = 128,  /* they end in fewer: WINDOW_ANCHOR - 1 + WINDOW_LONGEST */
    WINDOW_ROWS = 80,   /* rows in shared memory at a time: segments of 64 and 16 */
    WINDOW_BUFFER = WINDOW_ROWS + 16, /* operands are read 16 rows at a time: zeros after the last row */
    WINDOW_STRIPS = 32  /* at most 3 per 18 rows (segments of 17 and 1 by turns) */
};

/* Rows of the buffer: its own, and those of its segments. */
struct window_strip {
    short row, rows, first, count;
    bool whole; /* 16 own rows of one segment whose length is a multiple of 16: nothing to mask */
};

/* What a block knows of its rows. */
struct window_tile {
    short2 seen[WINDOW_SEEN];     /* by row from the anchor: first and end of the segment; first == end: sees nothing */
    window_strip strip[WINDOW_STRIPS];
    int strips, begin, end;       /* of the rows now in shared memory, from the anchor */
    float top[WINDOW_BUFFER], mean[WINDOW_BUFFER]; /* lse in powers of 2 and delta, by row of the buffer */
};

/* Offset of a 16-byte piece of a row of DP elements. */
template <int DP> __device__ inline int window_piece(int row, int piece)
{
    constexpr int PIECES = DP / 8, SHARE = PIECES % 8 == 0 ? 8 : PIECES % 4 == 0 ? 4 : 2;
    return row * DP + ((piece ^ (row / (8 / SHARE) % SHARE)) * 8);
}

/* Segments of the rows from `anchor` on, by row. Returns the rows, from the anchor, between which the block's segments lie. */
__device__ inline int2 window_segments(const attention_shape &s, int64_t anchor, window_tile &tile)
{
    __shared__ short bound[2];
    static_assert(WINDOW_BLOCK == WINDOW_SEEN, "a row to a thread");
    int row = threadIdx.x;
    int64_t i = anchor + row;
    int2 span = i < s.queries ? s.rows[i] : make_int2(0, 0);
    bool sees = span.y > span.x && span.x <= i && span.y > i;
    int first = sees ? (int)(span.x - anchor) : row, end = sees ? (int)(span.y - anchor) : row;
    end = end > WINDOW_SEEN ? WINDOW_SEEN : end; /* of a segment that another block has */
    tile.seen[row] = make_short2((short)first, (short)end);
    /* The segment that holds row 0 or WINDOW_ANCHOR is another block's unless it begins there. */
    if (row == 0 || row == WINDOW_ANCHOR) {
        int at = first < row ? end : row;
        bound[row != 0] = (short)(anchor + at > s.queries ? s.queries - anchor : at);
    }
    __syncthreads();
    return make_int2(bound[0] < 0 ? 0 : bound[0], bound[1]);
}

/* By one thread: the next whole segments from `begin` that fit into the buffer, as strips. */
__device__ inline void window_cut(window_tile &tile, int begin, int end)
{
    int at = begin, n = 0, open = -1; /* open: a strip of short segments that may take one more */
    while (at < end && n < WINDOW_STRIPS) {
        short2 seen = tile.seen[at];
        int length = seen.y > seen.x ? seen.y - at : 1;
        length = length > WINDOW_LONGEST ? WINDOW_LONGEST : length;
        length = length > end - at ? end - at : length;
        if (at + length - begin > WINDOW_ROWS)
            break;
        int row = at - begin;
        if (length < 16 && open >= 0 && tile.strip[open].rows + length <= 16) {
            tile.strip[open].rows += (short)length;
            tile.strip[open].count += (short)length;
        } else {
            if (n + (length + 15) / 16 > WINDOW_STRIPS)
                break;
            bool whole = length % 16 == 0 && seen.y > seen.x;
            open = length < 16 ? n : -1;
            for (int r = 0; r < length; r += 16) {
                window_strip &strip = tile.strip[n++];
                strip.row = (short)(row + r);
                strip.rows = (short)(length - r < 16 ? length - r : 16);
                strip.first = (short)row;
                strip.count = (short)length;
                strip.whole = whole;
            }
        }
        at += length;
    }
    tile.strips = n;
    tile.begin = begin;
    tile.end = at;
}

/* Rows from `first` of one head into the buffer, zeros for the 16 that follow the last. */
template <int DP>
__device__ inline void window_load(bf16 *to, const bf16 *from, int64_t first, int rows, int64_t stride, int dim)
{
    constexpr int PIECES = DP / 8;
    from += first * stride;
    for (int i = threadIdx.x; i < (rows + 16) * PIECES; i += WINDOW_BLOCK) {
        int row = i / PIECES, piece = i % PIECES;
        bool there = row < rows && piece * 8 < dim;
        copy_async<16>(to + window_piece<DP>(row, piece), there ? from + row * stride + piece * 8 : from, there);
    }
}

/* First operand [16][16]: rows from `row`, the last of `rows` again for those past it. */
template <int DP> __device__ inline void window_first(uint32_t (&r)[4], const bf16 *tile, int row, int rows, int piece)
{
    int lane = threadIdx.x % WARP, at = lane % 16 < rows ? lane % 16 : rows - 1;
    load_fragments(r, tile + window_piece<DP>(row + at, piece + lane / 16));
}

/* Second operand, two 8-wide blocks of n: [n][k] as it lies. */
template <int DP> __device__ inline void window_second(uint32_t (&r)[4], const bf16 *tile, int n, int piece)
{
    int lane = threadIdx.x % WARP;
    load_fragments(r, tile + window_piece<DP>(n + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
}

/* The same of [k][n]. */
template <int DP> __device__ inline void window_transposed(uint32_t (&r)[4], const bf16 *tile, int k, int piece)
{
    int lane = threadIdx.x % WARP;
    load_fragments_transposed(r, tile + window_piece<DP>(k + lane % 16, piece + lane / 16));
}

/* x [16][64] = rows of `a` (16 from the strip's first) times rows `first`.. of b, as many blocks of 16 as `count` needs. */
template <int DP>
__device__ inline void window_scores(float (&x)[8][4], const bf16 *a, const bf16 *b, const window_strip &strip)
{
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        uint32_t fa[4], fb[4];
        window_first<DP>(fa, a, strip.row, strip.rows, 2 * k);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (16 * j < strip.count) {
                window_second<DP>(fb, b, strip.first + 16 * j, 2 * k);
                multiply(x[2 * j], fa, fb[0], fb[1]);
                multiply(x[2 * j + 1], fa, fb[2], fb[3]);
            }
    }
}

/* acc [16][DP] += p [16][64] times rows `first`.. of b. */
template <int DP>
__device__ inline void window_product(float (&acc)[DP / 8][4], const uint32_t (&p)[4][4], const bf16 *b, const window_strip &strip)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (16 * k < strip.count)
#pragma unroll
            for (int j = 0; j < DP / 16; j++) {
                uint32_t fb[4];
                window_transposed<DP>(fb, b, strip.first + 16 * k, 2 * j);
                multiply(acc[2 * j], p[k], fb[0], fb[1]);
                multiply(acc[2 * j + 1], p[k], fb[2], fb[3]);
            }
}

__device__ inline void window_pack(uint32_t (&p)[4][4], const float (&x)[8][4])
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        p[k][0] = pack_pair(x[2 * k][0], x[2 * k][1]);
        p[k][1] = pack_pair(x[2 * k][2], x[2 * k][3]);
        p[k][2] = pack_pair(x[2 * k + 1][0], x[2 * k + 1][1]);
        p[k][3] = pack_pair(x[2 * k + 1][2], x[2 * k + 1][3]);
    }
}

/* Is the pair visible? Rows of the buffer; offset: of the buffer's first row from the anchor. */
__device__ inline bool window_sees(const window_tile &tile, int query, int key)
{
    short2 seen = tile.seen[tile.begin + query];
    return key + tile.begin >= seen.x && key + tile.begin < seen.y;
}

/* The strip's rows of results from row `to` on, through `rows` rows of a buffer that is the warp's own by now. */
template <int DP>
__device__ inline void window_store(bf16 *to, int64_t stride, int dim, bf16 *buffer, int row, int rows, const float (&x)[DP / 8][4],
                                    float factor0, float factor1)
{
    constexpr int PIECES = DP / 8;
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        if (g < rows)
            *reinterpret_cast<uint32_t *>(buffer + window_piece<DP>(row + g, j) + 2 * t) = pack_pair(x[j][0] * factor0, x[j][1] * factor0);
        if (g + 8 < rows)
            *reinterpret_cast<uint32_t *>(buffer + window_piece<DP>(row + g + 8, j) + 2 * t) = pack_pair(x[j][2] * factor1, x[j][3] * factor1);
    }
    __syncwarp();
    for (int i = lane; i < rows * PIECES; i += WARP) {
        int r = i / PIECES, piece = i % PIECES;
        if (piece * 8 < dim)
            *reinterpret_cast<uint4 *>(to + r * stride + piece * 8) = *reinterpret_cast<const uint4 *>(buffer + window_piece<DP>(row + r, piece));
    }
    __syncwarp();
}

template <int DP> constexpr size_t window_shared()
{
    return 3 * WINDOW_BUFFER * DP * sizeof(bf16) + sizeof(window_tile);
}

/* Forward. Grid: heads, anchors. */
template <int DP>
__global__ void __launch_bounds__(WINDOW_BLOCK, DP > 80 ? 2 : 4)
    window_kernel(attention_shape s, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse)
{
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tile_q = (bf16 *)memory, *tile_k = tile_q + WINDOW_BUFFER * DP, *tile_v = tile_k + WINDOW_BUFFER * DP;
    window_tile &tile = *(window_tile *)(tile_v + WINDOW_BUFFER * DP);
    int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int64_t anchor = (int64_t)blockIdx.y * WINDOW_ANCHOR;
    float scale = s.scale * LOG2E;
    q += (int64_t)head * s.dim;
    k += (int64_t)head * s.dim;
    v += (int64_t)head * s.dim;
    int2 part = window_segments(s, anchor, tile);
    for (int begin = part.x, rows; begin < part.y; begin += rows) {
        if (threadIdx.x == 0)
            window_cut(tile, begin, part.y);
        __syncthreads();
        rows = tile.end - begin; /* at least one: a segment has at most WINDOW_LONGEST of them */
        int64_t first = anchor + begin;
        window_load<DP>(tile_q, q, first, rows, s.q_stride, s.dim);
        window_load<DP>(tile_k, k, first, rows, s.kv_stride, s.dim);
        copy_commit();
        window_load<DP>(tile_v, v, first, rows, s.kv_stride, s.dim);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        for (int at = warp; at < tile.strips; at += WINDOW_BLOCK / WARP) {
            window_strip strip = tile.strip[at];
            float x[8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
            window_scores<DP>(x, tile_q, tile_k, strip);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int c = j * 8 + 2 * t + e % 2, r = g + e / 2 * 8;
                    bool sees = c < strip.count && (strip.whole || (r < strip.rows && window_sees(tile, strip.row + r, strip.first + c)));
                    x[j][e] = sees ? x[j][e] * scale : -INFINITY;
                    top[e / 2] = fmaxf(top[e / 2], x[j][e]);
                }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 1));
                top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 2));
                float base = top[r] == -INFINITY ? 0.0f : top[r];
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        x[j][e] = exp2_fast(x[j][e] - base);
                        sum[r] += x[j][e];
                    }
                sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
                sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
                if (lse && t == 0 && g + 8 * r < strip.rows)
                    lse[(first + strip.row + g + 8 * r) * s.heads + head] = sum[r] > 0 ? (top[r] + log2f(sum[r])) * LN2 : -INFINITY;
            }
            uint32_t p[4][4];
            window_pack(p, x);
            float acc[DP / 8][4] = {};
            window_product<DP>(acc, p, tile_v, strip);
            if (o)
                window_store<DP>(o + (first + strip.row) * s.o_stride + (int64_t)head * s.dim, s.o_stride, s.dim, tile_q, strip.row,
                                 strip.rows, acc, sum[0] > 0 ? 1.0f / sum[0] : 0.0f, sum[1] > 0 ? 1.0f / sum[1] : 0.0f);
        }
        __syncthreads(); /* buffers and strips are free */
    }
}

template <int DP> constexpr size_t window_grad_shared()
{
    return (4 * WINDOW_BUFFER + WINDOW_BLOCK / WARP * 16) * DP * sizeof(bf16) + sizeof(window_tile);
}

/* Backward; dq, dk, dv: any may be NULL. Grid: heads, anchors. */
template <int DP>
__global__ void __launch_bounds__(WINDOW_BLOCK, DP > 80 ? 1 : 3)
    window_grad_kernel(attention_shape s, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *o, const float *lse,
                       bf16 *dq, bf16 *dk, bf16 *dv)
{
    constexpr int HALF = DP / 16; /* 16-byte pieces of half a row */
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tile_q = (bf16 *)memory, *tile_k = tile_q + WINDOW_BUFFER * DP, *tile_v = tile_k + WINDOW_BUFFER * DP;
    bf16 *tile_dy = tile_v + WINDOW_BUFFER * DP, *mine = tile_dy + WINDOW_BUFFER * DP + threadIdx.x / WARP * 16 * DP;
    window_tile &tile = *(window_tile *)(tile_dy + (WINDOW_BUFFER + WINDOW_BLOCK / WARP * 16) * DP);
    int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int64_t anchor = (int64_t)blockIdx.y * WINDOW_ANCHOR, col = (int64_t)head * s.dim;
    float scale = s.scale * LOG2E;
    int2 part = window_segments(s, anchor, tile);
    for (int begin = part.x, rows; begin < part.y; begin += rows) {
        if (threadIdx.x == 0)
            window_cut(tile, begin, part.y);
        __syncthreads();
        rows = tile.end - begin; /* at least one: a segment has at most WINDOW_LONGEST of them */
        int64_t first = anchor + begin;
        window_load<DP>(tile_dy, dy + col, first, rows, s.o_stride, s.dim);
        window_load<DP>(tile_q, q + col, first, rows, s.q_stride, s.dim);
        window_load<DP>(tile_k, k + col, first, rows, s.kv_stride, s.dim);
        window_load<DP>(tile_v, v + col, first, rows, s.kv_stride, s.dim);
        copy_commit();

        /* delta: two threads per row, o straight from memory while the rest is on its way. */
        int half = threadIdx.x % 2, row = threadIdx.x / 2;
        uint4 out[HALF];
        auto load_out = [&](int r) {
            const bf16 *from = o + (first + r) * s.o_stride + col;
#pragma unroll
            for (int i = 0; i < HALF; i++)
                out[i] = r < rows && (half * HALF + i) * 8 < s.dim ? *reinterpret_cast<const uint4 *>(from + (half * HALF + i) * 8)
                                                                   : make_uint4(0, 0, 0, 0);
        };
        load_out(row);
        float top = row < rows ? lse[(first + row) * s.heads + head] * LOG2E : 0.0f;
        copy_wait<0>();
        __syncthreads();
        for (; row < WINDOW_BUFFER; row += WINDOW_BLOCK / 2) {
            float sum = 0;
            if (row < rows)
#pragma unroll
                for (int i = 0; i < HALF; i++) {
                    uint4 piece = *reinterpret_cast<const uint4 *>(tile_dy + window_piece<DP>(row, half * HALF + i));
                    const __nv_bfloat162 *a = reinterpret_cast<const __nv_bfloat162 *>(&piece), *b = reinterpret_cast<const __nv_bfloat162 *>(&out[i]);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        float2 fa = __bfloat1622float2(a[c]), fb = __bfloat1622float2(b[c]);
                        sum += fa.x * fb.x + fa.y * fb.y;
                    }
                }
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
            if (half == 0) {
                tile.top[row] = top;
                tile.mean[row] = sum;
            }
            int next = row + WINDOW_BLOCK / 2;
            if (next < WINDOW_BUFFER) {
                load_out(next);
                top = next < rows ? lse[(first + next) * s.heads + head] * LOG2E : 0.0f;
            }
        }
        __syncthreads();

        for (int at = warp; at < tile.strips; at += WINDOW_BLOCK / WARP) {
            window_strip strip = tile.strip[at]; /* of keys; columns are queries */
            float x[8][4] = {}, dp[8][4] = {};
            window_scores<DP>(x, tile_k, tile_q, strip);
            window_scores<DP>(dp, tile_v, tile_dy, strip);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int c = j * 8 + 2 * t + e;
                    bool inside = c < strip.count;
                    float power = inside ? tile.top[strip.first + c] : 0.0f, mean = inside ? tile.mean[strip.first + c] : 0.0f;
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        bool sees = inside && (strip.whole || (g + 8 * r < strip.rows &&
                                                               window_sees(tile, strip.first + c, strip.row + g + 8 * r)));
                        float p = sees ? exp2_fast(x[j][2 * r + e] * scale - power) : 0.0f;
                        x[j][2 * r + e] = p;
                        dp[j][2 * r + e] = sees ? p * (dp[j][2 * r + e] - mean) : 0.0f;
                    }
                }
            uint32_t p[4][4], ds[4][4];
            window_pack(p, x);
            window_pack(ds, dp);
            int64_t to = first + strip.row;
            if (dv) {
                float acc[DP / 8][4] = {};
                window_product<DP>(acc, p, tile_dy, strip);
                window_store<DP>(dv + to * s.dkv_stride + col, s.dkv_stride, s.dim, mine, 0, strip.rows, acc, 1.0f, 1.0f);
            }
            if (dk) {
                float acc[DP / 8][4] = {};
                window_product<DP>(acc, ds, tile_q, strip);
                window_store<DP>(dk + to * s.dkv_stride + col, s.dkv_stride, s.dim, mine, 0, strip.rows, acc, s.scale, s.scale);
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (g < strip.rows)
                    *reinterpret_cast<uint32_t *>(tile_v + window_piece<DP>(strip.row + g, j) + 2 * t) = ds[j / 2][j % 2 * 2];
                if (g + 8 < strip.rows)
                    *reinterpret_cast<uint32_t *>(tile_v + window_piece<DP>(strip.row + g + 8, j) + 2 * t) = ds[j / 2][j % 2 * 2 + 1];
            }
        }
        __syncthreads(); /* dS^T of all strips is there */
        for (int at = warp; dq && at < tile.strips; at += WINDOW_BLOCK / WARP) {
            window_strip strip = tile.strip[at]; /* of queries */
            float acc[DP / 8][4] = {};
            int piece = (strip.row - strip.first) / 8;
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (16 * k < strip.count) {
                    uint32_t fs[4];
                    load_fragments_transposed(fs, tile_v + window_piece<DP>(strip.first + 16 * k + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
                    if (16 * k + 16 > strip.count) { /* rows of other segments */
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            int key = 16 * k + 8 * h + 2 * t;
                            uint32_t keep = (key < strip.count ? 0xFFFFu : 0u) | (key + 1 < strip.count ? 0xFFFF0000u : 0u);
                            fs[2 * h] &= keep;
                            fs[2 * h + 1] &= keep;
                        }
                    }
#pragma unroll
                    for (int j = 0; j < DP / 16; j++) {
                        uint32_t fb[4];
                        window_transposed<DP>(fb, tile_k, strip.first + 16 * k, 2 * j);
                        multiply(acc[2 * j], fs, fb[0], fb[1]);
                        multiply(acc[2 * j + 1], fs, fb[2], fb[3]);
                    }
                }
            window_store<DP>(dq + (first + strip.row) * s.dq_stride + col, s.dq_stride, s.dim, mine, 0, strip.rows, acc, s.scale, s.scale);
        }
        __syncthreads(); /* buffers and strips are free */
    }
}

#endif
