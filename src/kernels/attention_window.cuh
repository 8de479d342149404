/* Attention inside short segments (windows of the vision tower) in bf16 on tensor cores, forward and backward.
 *
 *     VLA_MASK_FULL, no segment longer than 64 rows, as many kv heads as heads: q, k, v, o, do, gradients [N, ...]
 *
 * Bound by memory: every operand is read once and every result written once, 8 D bytes a row and head forward, 14 D backward.
 * o is not read: a warp has all p and dp of its rows, so delta = rowsum(do o) = rowsum(p dp), without o's rounding.
 *
 * A block takes the whole segments that begin in 64 neighbouring rows, for a few neighbouring heads. They are cut into chunks,
 * each one segment of 17 to 64 rows, or up to four slots of at most 16 rows in short segments; which is done once for all
 * heads. A warp has 16 rows of a chunk, a slot of it, as queries with all keys that they see (64 rows, or its own 16), so that
 * no softmax is rescaled, and then as keys with all queries: nothing is added by two warps, the order of every sum is fixed.
 * Loads and arithmetic of a block alternate; the blocks of a multiprocessor (five forward, four backward) fill each other's gaps.
 */
#ifndef VLAI_ATTENTION_WINDOW_CUH
#define VLAI_ATTENTION_WINDOW_CUH

#include "kernels/attention_rows.cuh"

enum {
    WINDOW_BLOCK = ROWS_BLOCK,
    WINDOW_LONGEST = 64,
    WINDOW_ANCHOR = 64, /* a block's segments begin in so many rows */
    WINDOW_SEEN = 128,  /* they end in fewer: WINDOW_ANCHOR - 1 + WINDOW_LONGEST */
    WINDOW_SLOTS = 4,   /* of 16 rows, one to a warp */
    WINDOW_ROWS = WINDOW_SLOTS * 16,
    WINDOW_CHUNKS = 16, /* at most 15: segments of 1 and 17 rows by turns */
    WINDOW_HEADS = 2    /* of a block */
};

/* slot: first row, from the anchor, and rows. Rows of a slot that do not exist are zeros in shared memory. */
struct window_chunk {
    short2 slot[WINDOW_SLOTS];
    int wide; /* rows of the one segment; 0: short segments */
};

/* What a block knows of its rows. */
struct window_plan {
    short2 seen[WINDOW_SEEN]; /* by row from the anchor: first and end of the segment; first == end: sees nothing */
    window_chunk chunk[WINDOW_CHUNKS];
    int chunks;
    short bound[2];
};

/* By one thread: the segments from row `begin` to row `end`, as chunks. */
__device__ inline void window_cut(window_plan &plan, int begin, int end)
{
    int chunks = 0, slots = 0;
    short2 *open = nullptr; /* a slot that the next short segment may join */
    for (int at = begin, length; at < end && chunks < WINDOW_CHUNKS; at += length) {
        short2 seen = plan.seen[at];
        length = seen.y > at ? seen.y - at : 1;
        length = length > WINDOW_LONGEST ? WINDOW_LONGEST : length;
        length = length > end - at ? end - at : length;
        if (open && open->y + length <= 16) {
            open->y = (short)(open->y + length);
            continue;
        }
        if (!open || length > 16 || slots == WINDOW_SLOTS) {
            plan.chunk[chunks++] = {{}, length > 16 ? length : 0};
            slots = 0;
        }
        window_chunk &chunk = plan.chunk[chunks - 1];
        for (int done = 0; done < length; done += 16)
            chunk.slot[slots++] = make_short2((short)(at + done), (short)(length - done < 16 ? length - done : 16));
        open = chunk.wide ? nullptr : &chunk.slot[slots - 1];
    }
    plan.chunks = chunks;
}

/* Segments of the rows from `anchor` on. */
__device__ inline void window_prepare(const attention_shape &s, int64_t anchor, window_plan &plan)
{
    static_assert(WINDOW_BLOCK == WINDOW_SEEN, "a row to a thread");
    int row = threadIdx.x;
    int64_t i = anchor + row;
    int2 span = i < s.queries ? s.rows[i] : make_int2(0, 0);
    bool sees = span.y > span.x && span.x <= i && span.y > i;
    int first = sees ? (int)(span.x - anchor) : row, end = sees ? (int)(span.y - anchor) : row;
    end = end > WINDOW_SEEN ? WINDOW_SEEN : end; /* of a segment that another block has */
    plan.seen[row] = make_short2((short)first, (short)end);
    /* The segment that holds row 0 or WINDOW_ANCHOR is another block's unless it begins there. */
    if (row == 0 || row == WINDOW_ANCHOR) {
        int at = first < row ? end : row;
        plan.bound[row != 0] = (short)(anchor + at > s.queries ? s.queries - anchor : at);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        window_cut(plan, plan.bound[0], plan.bound[1]);
    __syncthreads();
}

/* x, which the compiler takes for new: what follows from it is computed where it is needed, and takes no registers in between. */
__device__ inline int window_hidden(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

__device__ inline int window_lane()
{
    return window_hidden(threadIdx.x % WARP);
}

/* A warp's slot of a chunk. Its queries see a window of keys: the whole buffer, or the slot itself. */
struct window_slot {
    int row, rows;       /* from the anchor */
    int low[2], high[2]; /* what this lane's two rows see of the window */
};

__device__ inline window_slot window_slot_of(const window_plan &plan, const window_chunk &chunk)
{
    short2 mine = chunk.slot[threadIdx.x / WARP];
    window_slot slot = {mine.x, mine.y};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = threadIdx.x % WARP / 4 + 8 * r;
        short2 seen = !chunk.wide && row < slot.rows ? plan.seen[slot.row + row] : make_short2((short)slot.row, (short)slot.row);
        slot.low[r] = seen.x - slot.row;
        slot.high[r] = chunk.wide ? chunk.wide : seen.y - slot.row;
    }
    return slot;
}

/* The slot's first row. */
__device__ inline int64_t window_first(const window_slot &slot)
{
    return (int64_t)blockIdx.y * WINDOW_ANCHOR + window_hidden(slot.row);
}

/* Rows in shared memory are padded so that the eight that one ldmatrix reads lie in different banks. */
template <int DP> constexpr int WINDOW_PITCH = DP + 8;
template <int DP> constexpr int WINDOW_TILE = WINDOW_ROWS * WINDOW_PITCH<DP>;

/* Shared memory of `tiles` operands. */
template <int DP, int TILES> constexpr size_t window_shared()
{
    return TILES * WINDOW_TILE<DP> * sizeof(bf16) + sizeof(window_plan);
}

/* The slot's rows of an operand in the background; `from`: its first row. */
template <int DP> __device__ inline void window_load(bf16 *to, const bf16 *from, int rows, int64_t stride, int dim, int lane)
{
    constexpr int PIECES = DP / 8;
#pragma unroll
    for (int n = 0; n < PIECES / 2; n++) {
        int i = lane + n * WARP, row = i / PIECES, piece = i % PIECES;
        bool have = row < rows && piece * 8 < dim;
        copy_async<16>(to + row * WINDOW_PITCH<DP> + piece * 8, have ? from + row * (int)stride + piece * 8 : from, have);
    }
}

/* Lane's address in 16 rows and columns from `at` on: of a first operand, and of a transposed second one. */
template <int DP> __device__ inline const bf16 *window_along(const bf16 *at)
{
    int lane = window_lane();
    return at + lane % 16 * WINDOW_PITCH<DP> + lane / 16 * 8;
}

/* The same of a second operand as it lies, and of a transposed first one. */
template <int DP> __device__ inline const bf16 *window_across(const bf16 *at)
{
    int lane = window_lane();
    return at + (lane / 16 * 8 + lane % 8) * WINDOW_PITCH<DP> + lane / 8 % 2 * 8;
}

/* x [16][KEYS] = 16 rows of a times KEYS rows of b. */
template <int DP, int KEYS> __device__ inline void window_scores(float (&x)[KEYS / 8][4], const bf16 *a, const bf16 *b)
{
    a = window_along<DP>(a);
    b = window_across<DP>(b);
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        uint32_t fa[4], fb[4];
        load_fragments(fa, a + 16 * k);
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            load_fragments(fb, b + 16 * j * WINDOW_PITCH<DP> + 16 * k);
            multiply(x[2 * j], fa, fb[0], fb[1]);
            multiply(x[2 * j + 1], fa, fb[2], fb[3]);
        }
    }
}

/* acc [16][DP] = p [16][KEYS] times KEYS rows of b. */
template <int DP, int KEYS>
__device__ inline void window_product(float (&acc)[DP / 8][4], const uint32_t (&p)[KEYS / 16][4], const bf16 *b)
{
    b = window_along<DP>(b);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int j = 0; j < DP / 16; j++) {
            uint32_t fb[4];
            load_fragments_transposed(fb, b + 16 * k * WINDOW_PITCH<DP> + 16 * j);
            multiply(acc[2 * j], p[k], fb[0], fb[1]);
            multiply(acc[2 * j + 1], p[k], fb[2], fb[3]);
        }
}

/* x [16][8 N] of this lane to columns 0.. of 16 rows of shared memory. */
template <int DP, int N> __device__ inline void window_put(bf16 *rows, const uint32_t (&x)[N][2])
{
    int lane = window_lane();
    bf16 *to = rows + lane / 4 * WINDOW_PITCH<DP> + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N; j++) {
        *reinterpret_cast<uint32_t *>(to + 8 * j) = x[j][0];
        *reinterpret_cast<uint32_t *>(to + 8 * WINDOW_PITCH<DP> + 8 * j) = x[j][1];
    }
}

/* The first `rows` of a warp's 16 rows of results, from `to` on: pairs of lanes exchange so that the four of a row write 32 bytes. */
template <int DP>
__device__ inline void window_store(bf16 *to, int64_t stride, int dim, int rows, const float (&x)[DP / 8][4], float factor0, float factor1)
{
    int lane = window_lane(), g = lane / 4, t = lane % 4, odd = t % 2, first = odd * 6 + t * 2;
    to += g * (int)stride + first;
#pragma unroll
    for (int j = 0; j < DP / 8; j += 2)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float factor = r ? factor1 : factor0;
            uint32_t a = pack_pair(x[j][2 * r] * factor, x[j][2 * r + 1] * factor);
            uint32_t b = pack_pair(x[j + 1][2 * r] * factor, x[j + 1][2 * r + 1] * factor);
            uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? a : b, 1);
            if (g + 8 * r < rows && 8 * j + first < dim)
                *reinterpret_cast<uint2 *>(to + 8 * r * stride + 8 * j) = odd ? make_uint2(other, b) : make_uint2(a, other);
        }
}

template <int KEYS> __device__ inline bool window_sees(const window_slot &slot, int r, int c)
{
    return KEYS > 16 ? c < slot.high[0] : c >= slot.low[r] && c < slot.high[r];
}

/* A warp's queries, of which q is the first; k, v: of their window. */
template <int DP, int KEYS>
__device__ inline void window_attend(const attention_shape &s, const window_slot &slot, const bf16 *q, const bf16 *k, const bf16 *v, int head,
                                     bf16 *o, float *lse)
{
    int lane = window_lane(), g = lane / 4, t = lane % 4;
    float x[KEYS / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, scale = s.scale * LOG2E;
    window_scores<DP, KEYS>(x, q, k);
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[j][e] = window_sees<KEYS>(slot, e / 2, j * 8 + 2 * t + e % 2) ? x[j][e] : -INFINITY;
            top[e / 2] = fmaxf(top[e / 2], x[j][e]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 2));
        float base = top[r] == -INFINITY ? 0.0f : top[r] * scale;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                x[j][e] = exp2_fast(x[j][e] * scale - base);
                sum[r] += x[j][e];
            }
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
        if (lse && t == 0 && g + 8 * r < slot.rows)
            lse[(window_first(slot) + g + 8 * r) * s.heads + head] = sum[r] > 0 ? (base + log2f(sum[r])) * LN2 : -INFINITY;
    }
    uint32_t p[KEYS / 16][4];
    float acc[DP / 8][4] = {};
    rows_pack<KEYS / 16>(p, x);
    window_product<DP, KEYS>(acc, p, v);
    if (o)
        window_store<DP>(o + window_first(slot) * s.o_stride + (int64_t)head * s.dim, s.o_stride, s.dim, slot.rows, acc,
                         sum[0] > 0 ? 1.0f / sum[0] : 0.0f, sum[1] > 0 ? 1.0f / sum[1] : 0.0f);
}

/* Forward. Grid: heads in groups of WINDOW_HEADS, anchors. */
template <int DP>
__global__ void __launch_bounds__(WINDOW_BLOCK, DP > 80 ? 3 : 5)
    window_kernel(attention_shape s, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse)
{
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tile_q = (bf16 *)memory, *tile_k = tile_q + WINDOW_TILE<DP>, *tile_v = tile_k + WINDOW_TILE<DP>;
    window_plan &plan = *(window_plan *)(tile_v + WINDOW_TILE<DP>);
    int mine = threadIdx.x / WARP * 16 * WINDOW_PITCH<DP>, last = min((int)(blockIdx.x + 1) * WINDOW_HEADS, s.heads);
    window_prepare(s, (int64_t)blockIdx.y * WINDOW_ANCHOR, plan);
    for (int n = 0; n < plan.chunks; n++) {
        const window_chunk &chunk = plan.chunk[n];
        window_slot slot = window_slot_of(plan, chunk);
        for (int head = blockIdx.x * WINDOW_HEADS; head < last; head++) {
            int64_t first = window_first(slot), col = (int64_t)head * s.dim;
            int lane = window_lane();
            window_load<DP>(tile_q + mine, q + first * s.q_stride + col, slot.rows, s.q_stride, s.dim, lane);
            window_load<DP>(tile_k + mine, k + first * s.kv_stride + col, slot.rows, s.kv_stride, s.dim, lane);
            window_load<DP>(tile_v + mine, v + first * s.kv_stride + col, slot.rows, s.kv_stride, s.dim, lane);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
            if (slot.rows && chunk.wide)
                window_attend<DP, WINDOW_ROWS>(s, slot, tile_q + mine, tile_k, tile_v, head, o, lse);
            else if (slot.rows)
                window_attend<DP, 16>(s, slot, tile_q + mine, tile_k + mine, tile_v + mine, head, o, lse);
            __syncthreads(); /* the tiles are free */
        }
    }
}

/* p or dS of all queries for the warp's own keys, transposed, as first operands. */
template <int DP, int KEYS> __device__ inline void window_columns(uint32_t (&f)[KEYS / 16][4], const bf16 *window)
{
    const bf16 *at = window_across<DP>(window + (KEYS > 16 ? threadIdx.x / WARP * 16 : 0));
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        load_fragments_transposed(f[k], at + 16 * k * WINDOW_PITCH<DP>);
}

/* A chunk's tiles; `mine`: offset of the warp's slot, `window`: of the keys and queries that belong to it. */
struct window_tiles {
    bf16 *q, *k, *v, *dy;
    int mine, window;
};

/* A warp's gradients; power: lse of its rows, in powers of 2. All warps of a block call it at once: p and dS pass from warp to
 * warp in columns 0.. of v and k. */
template <int DP, int KEYS>
__device__ inline void window_differentiate(const attention_shape &s, const window_slot &slot, const window_tiles &tile,
                                            const float (&power)[2], int head, bf16 *dq, bf16 *dk, bf16 *dv)
{
    int t = window_lane() % 4;
    float x[KEYS / 8][4] = {}, dp[KEYS / 8][4] = {}, mean[2] = {0, 0}, scale = s.scale * LOG2E;
    window_scores<DP, KEYS>(x, tile.q + tile.mine, tile.k + tile.window);
    window_scores<DP, KEYS>(dp, tile.dy + tile.mine, tile.v + tile.window);
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            bool sees = window_sees<KEYS>(slot, e / 2, j * 8 + 2 * t + e % 2);
            x[j][e] = sees ? exp2_fast(x[j][e] * scale - power[e / 2]) : 0.0f;
            mean[e / 2] += x[j][e] * dp[j][e];
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        mean[r] += __shfl_xor_sync(0xFFFFFFFFu, mean[r], 1);
        mean[r] += __shfl_xor_sync(0xFFFFFFFFu, mean[r], 2);
    }
    uint32_t p[KEYS / 8][2], ds[KEYS / 8][2], f[KEYS / 16][4];
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *px = &x[j][2 * r], *pd = &dp[j][2 * r];
            p[j][r] = pack_pair(px[0], px[1]);
            ds[j][r] = pack_pair(px[0] * (pd[0] - mean[r]), px[1] * (pd[1] - mean[r]));
            f[j / 2][j % 2 * 2 + r] = ds[j][r];
        }
    int64_t first = window_first(slot), col = (int64_t)head * s.dim;
    if (dq) {
        float acc[DP / 8][4] = {};
        window_product<DP, KEYS>(acc, f, tile.k + tile.window);
        window_store<DP>(dq + first * s.dq_stride + col, s.dq_stride, s.dim, slot.rows, acc, s.scale, s.scale);
    }
    __syncthreads(); /* nobody needs k and v */
    window_put<DP>(tile.v + tile.mine, p);
    window_put<DP>(tile.k + tile.mine, ds);
    __syncthreads();
    first = window_first(slot);
    if (dv) {
        float acc[DP / 8][4] = {};
        window_columns<DP, KEYS>(f, tile.v + tile.window);
        window_product<DP, KEYS>(acc, f, tile.dy + tile.window);
        window_store<DP>(dv + first * s.dkv_stride + col, s.dkv_stride, s.dim, slot.rows, acc, 1.0f, 1.0f);
    }
    if (dk) {
        float acc[DP / 8][4] = {};
        window_columns<DP, KEYS>(f, tile.k + tile.window);
        window_product<DP, KEYS>(acc, f, tile.q + tile.window);
        window_store<DP>(dk + first * s.dkv_stride + col, s.dkv_stride, s.dim, slot.rows, acc, s.scale, s.scale);
    }
    __syncthreads(); /* the tiles are free */
}

/* Backward; dq, dk, dv: any may be NULL. Grid: as forward. */
template <int DP>
__global__ void __launch_bounds__(WINDOW_BLOCK, DP > 80 ? 2 : 4)
    window_grad_kernel(attention_shape s, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse, bf16 *dq, bf16 *dk,
                       bf16 *dv)
{
    extern __shared__ __align__(16) unsigned char memory[];
    bf16 *tiles = (bf16 *)memory;
    int mine = threadIdx.x / WARP * 16 * WINDOW_PITCH<DP>, last = min((int)(blockIdx.x + 1) * WINDOW_HEADS, s.heads);
    window_tiles tile = {tiles, tiles + WINDOW_TILE<DP>, tiles + 2 * WINDOW_TILE<DP>, tiles + 3 * WINDOW_TILE<DP>, mine, 0};
    window_plan &plan = *(window_plan *)(tiles + 4 * WINDOW_TILE<DP>);
    window_prepare(s, (int64_t)blockIdx.y * WINDOW_ANCHOR, plan);
    for (int n = 0; n < plan.chunks; n++) {
        const window_chunk &chunk = plan.chunk[n];
        window_slot slot = window_slot_of(plan, chunk);
        tile.window = chunk.wide ? 0 : mine;
        for (int head = blockIdx.x * WINDOW_HEADS; head < last; head++) {
            int64_t first = window_first(slot), col = (int64_t)head * s.dim;
            int lane = window_lane();
            window_load<DP>(tile.q + mine, q + first * s.q_stride + col, slot.rows, s.q_stride, s.dim, lane);
            window_load<DP>(tile.k + mine, k + first * s.kv_stride + col, slot.rows, s.kv_stride, s.dim, lane);
            window_load<DP>(tile.v + mine, v + first * s.kv_stride + col, slot.rows, s.kv_stride, s.dim, lane);
            window_load<DP>(tile.dy + mine, dy + first * s.o_stride + col, slot.rows, s.o_stride, s.dim, lane);
            copy_commit();
            float power[2]; /* infinite for rows that do not exist: p = 0 */
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = threadIdx.x % WARP / 4 + 8 * r;
                power[r] = row < slot.rows ? lse[(first + row) * s.heads + head] * LOG2E : INFINITY;
            }
            copy_wait<0>();
            __syncthreads();
            if (chunk.wide)
                window_differentiate<DP, WINDOW_ROWS>(s, slot, tile, power, head, dq, dk, dv);
            else
                window_differentiate<DP, 16>(s, slot, tile, power, head, dq, dk, dv);
        }
    }
}

#endif
