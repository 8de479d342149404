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
 */
#ifndef VLAI_ATTENTION_WINDOW_CUH
#define VLAI_ATTENTION_WINDOW_CUH

#include "kernels/attention_rows.cuh"

enum {
    WINDOW_BLOCK = ROWS_BLOCK,
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
    int at = begin, n = 0;
    window_strip open = {}; /* short segments, the last of which may be followed by another */
    while (at < end) {
        short2 seen = tile.seen[at];
        int length = seen.y > seen.x ? seen.y - at : 1;
        length = length > WINDOW_LONGEST ? WINDOW_LONGEST : length;
        length = length > end - at ? end - at : length;
        if (at + length - begin > WINDOW_ROWS || n + 1 + (length + 15) / 16 > WINDOW_STRIPS)
            break;
        int row = at - begin;
        at += length;
        if (length < 16 && open.rows + length <= 16) {
            open.row = open.rows ? open.row : (short)row;
            open.rows += (short)length;
            continue;
        }
        if (open.rows) {
            open.first = open.row;
            open.count = open.rows;
            tile.strip[n++] = open;
            open.rows = 0;
        }
        if (length < 16) {
            open.row = (short)row;
            open.rows = (short)length;
            continue;
        }
        window_strip strip = {(short)row, 16, (short)row, (short)length, length % 16 == 0 && seen.y > seen.x};
        for (int left = length; left > 0; left -= 16, strip.row += 16) {
            strip.rows = (short)(left < 16 ? left : 16);
            tile.strip[n++] = strip;
        }
    }
    if (open.rows) {
        open.first = open.row;
        open.count = open.rows;
        tile.strip[n++] = open;
    }
    tile.strips = n;
    tile.begin = begin;
    tile.end = at;
}

/* First operand [16][16]: rows from `row`, the last of `rows` again for those past it. */
template <int DP> __device__ inline void window_first(uint32_t (&r)[4], const bf16 *tile, int row, int rows, int piece)
{
    int lane = threadIdx.x % WARP, at = lane % 16 < rows ? lane % 16 : rows - 1;
    load_fragments(r, tile + row_piece<DP>(row + at, piece + lane / 16));
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
                rows_second<DP>(fb, b, strip.first + 16 * j, 2 * k);
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
                rows_transposed<DP>(fb, b, strip.first + 16 * k, 2 * j);
                multiply(acc[2 * j], p[k], fb[0], fb[1]);
                multiply(acc[2 * j + 1], p[k], fb[2], fb[3]);
            }
}

/* Is the pair visible? Rows of the buffer; offset: of the buffer's first row from the anchor. */
__device__ inline bool window_sees(const window_tile &tile, int query, int key)
{
    short2 seen = tile.seen[tile.begin + query];
    return key + tile.begin >= seen.x && key + tile.begin < seen.y;
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
        /* All that the buffer holds is on its way before it is known where the last whole segment ends. */
        int most = min(part.y - begin, (int)WINDOW_ROWS);
        int64_t first = anchor + begin;
        rows_load<DP>(tile_q, q + first * s.q_stride, most + 16, most, s.q_stride, s.dim);
        rows_load<DP>(tile_k, k + first * s.kv_stride, most + 16, most, s.kv_stride, s.dim);
        rows_load<DP>(tile_v, v + first * s.kv_stride, most + 16, most, s.kv_stride, s.dim);
        copy_commit();
        if (threadIdx.x == 0)
            window_cut(tile, begin, part.y);
        copy_wait<0>();
        __syncthreads();
        rows = tile.end - begin; /* at least one: a segment has at most WINDOW_LONGEST of them */
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
            rows_pack<4>(p, x);
            float acc[DP / 8][4] = {};
            window_product<DP>(acc, p, tile_v, strip);
            if (o)
                rows_store<DP>(o + (first + strip.row) * s.o_stride + (int64_t)head * s.dim, s.o_stride, s.dim, tile_q, strip.row,
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
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tile_q = (bf16 *)memory, *tile_k = tile_q + WINDOW_BUFFER * DP, *tile_v = tile_k + WINDOW_BUFFER * DP;
    bf16 *tile_dy = tile_v + WINDOW_BUFFER * DP, *mine = tile_dy + WINDOW_BUFFER * DP + threadIdx.x / WARP * 16 * DP;
    window_tile &tile = *(window_tile *)(tile_dy + (WINDOW_BUFFER + WINDOW_BLOCK / WARP * 16) * DP);
    int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int64_t anchor = (int64_t)blockIdx.y * WINDOW_ANCHOR, col = (int64_t)head * s.dim;
    float scale = s.scale * LOG2E;
    int2 part = window_segments(s, anchor, tile);
    for (int begin = part.x, rows; begin < part.y; begin += rows) {
        /* All that the buffer holds is on its way before it is known where the last whole segment ends. */
        int most = min(part.y - begin, (int)WINDOW_ROWS);
        int64_t first = anchor + begin;
        rows_load<DP>(tile_dy, dy + col + first * s.o_stride, most + 16, most, s.o_stride, s.dim);
        rows_load<DP>(tile_q, q + col + first * s.q_stride, most + 16, most, s.q_stride, s.dim);
        rows_load<DP>(tile_k, k + col + first * s.kv_stride, most + 16, most, s.kv_stride, s.dim);
        rows_load<DP>(tile_v, v + col + first * s.kv_stride, most + 16, most, s.kv_stride, s.dim);
        copy_commit();

        /* delta: o straight from memory while the rest is on its way. */
        int row = threadIdx.x / 2;
        row_half<DP> out;
        out.load(o + (first + row) * s.o_stride + col, row < most, s.dim);
        float top = row < most ? lse[(first + row) * s.heads + head] * LOG2E : 0.0f;
        if (threadIdx.x == 0)
            window_cut(tile, begin, part.y);
        copy_wait<0>();
        __syncthreads();
        rows = tile.end - begin; /* at least one: a segment has at most WINDOW_LONGEST of them */
        for (; row < WINDOW_BUFFER; row += WINDOW_BLOCK / 2) {
            float sum = out.product(tile_dy, row < most ? row : 0);
            if (threadIdx.x % 2 == 0) {
                tile.top[row] = top;
                tile.mean[row] = row < most ? sum : 0.0f;
            }
            int next = row + WINDOW_BLOCK / 2;
            out.load(o + (first + next) * s.o_stride + col, next < most, s.dim);
            top = next < most ? lse[(first + next) * s.heads + head] * LOG2E : 0.0f;
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
            rows_pack<4>(p, x);
            rows_pack<4>(ds, dp);
            int64_t to = first + strip.row;
            if (dv) {
                float acc[DP / 8][4] = {};
                window_product<DP>(acc, p, tile_dy, strip);
                rows_store<DP>(dv + to * s.dkv_stride + col, s.dkv_stride, s.dim, mine, 0, strip.rows, acc, 1.0f, 1.0f);
            }
            if (dk) {
                float acc[DP / 8][4] = {};
                window_product<DP>(acc, ds, tile_q, strip);
                rows_store<DP>(dk + to * s.dkv_stride + col, s.dkv_stride, s.dim, mine, 0, strip.rows, acc, s.scale, s.scale);
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (g < strip.rows)
                    *reinterpret_cast<uint32_t *>(tile_v + row_piece<DP>(strip.row + g, j) + 2 * t) = ds[j / 2][j % 2 * 2];
                if (g + 8 < strip.rows)
                    *reinterpret_cast<uint32_t *>(tile_v + row_piece<DP>(strip.row + g + 8, j) + 2 * t) = ds[j / 2][j % 2 * 2 + 1];
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
                    load_fragments_transposed(fs, tile_v + row_piece<DP>(strip.first + 16 * k + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
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
                        rows_transposed<DP>(fb, tile_k, strip.first + 16 * k, 2 * j);
                        multiply(acc[2 * j], fs, fb[0], fb[1]);
                        multiply(acc[2 * j + 1], fs, fb[2], fb[3]);
                    }
                }
            rows_store<DP>(dq + (first + strip.row) * s.dq_stride + col, s.dq_stride, s.dim, mine, 0, strip.rows, acc, s.scale, s.scale);
        }
        __syncthreads(); /* buffers and strips are free */
    }
}

#endif
