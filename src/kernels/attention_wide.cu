/* Attention inside short segments (windows of the vision tower) in bf16 on Hopper's products of 64 rows, forward and backward; and the
 * backward pass of longer ones (whole pictures), at the end of this file.
 *
 *     VLA_MASK_FULL, no segment longer than 64 rows, as many kv heads as heads, of at most 80: q, k, v, o, do, gradients [N, ...]
 *
 * What kernels/attention_window.cuh does, with a fifth of its instructions for products and with loads that never stop. A unit of work is
 * a segment of one head; of two or four neighbouring heads when it has at most 32 or 16 rows, row r of the 64 then being row r / H of the
 * segment and head r % H, so that what a row sees are the columns of its own remainder. Blocks stay: each takes a run of neighbouring
 * units, as many rows and heads as every other, and asks for the next unit's operands before it computes with those that came. Units
 * are found in the table of rows as they go by, a segment ahead.
 *
 * Backward: p and dS of a unit pass from the team's warps as queries to them as keys over v and k, which nobody needs by then; v is
 * therefore asked for late, in the middle of the unit before. o is not read: delta = rowsum(p dp). dS has the scale of the scores in it.
 *
 * Tiles have 64 rows of 80 columns: a panel of 64 as in kernels/hopper.cuh, and one of 16, whose two 16-byte pieces change places in rows
 * 4 to 7 of 8 (the 32-byte swizzle). Rows that do not exist, and columns past the head dimension, are zeros. Every sum has a fixed order. */
#include "kernels/attention_wide.cuh"
#include "kernels/attention_rows.cuh"
#include "kernels/attention_segments.cuh"
#include "kernels/hopper.cuh"

namespace {

enum {
    WIDE_DIM = 80,
    WIDE_PIECES = WIDE_DIM / 8,
    TAIL_BYTES = 32,                     /* of a row of the panel of 16 columns */
    TAIL_AT = TEAM_ROWS * PANEL_BYTES,   /* of that panel in a tile */
    WIDE_TILE = TAIL_AT + TEAM_ROWS * TAIL_BYTES,
    WIDE_BLOCKS = 3,                     /* of a multiprocessor */
    FORWARD_TILES = 2 * 3,               /* q, k, v twice */
    BACKWARD_TILES = 2 * 3 + 1,          /* q, k, do twice, v */
    LONG_TILES = 2 + 2 * 2,              /* of long segments: two that stay, two that pass by twice */
    LONG_KEY_BLOCKS = 2,                 /* of a multiprocessor */
    LONG_LONGEST = 65535 * TEAM_ROWS     /* rows of a segment: tiles are a grid's y */
};

/* Of a query and head of long segments: lse in powers of 2, delta times the scale. */
using long_facts = float2;

/* Dynamic shared memory of so many tiles, which begin at a multiple of 1024 bytes. */
constexpr size_t wide_shared(int tiles)
{
    return 1024 + (size_t)tiles * WIDE_TILE;
}

#ifdef VLAI_HOPPER

/* `rows` rows from `row` on, of `heads` heads from `head` on, in tiles of 64 >> shift rows and 1 << shift heads; 0 rows: none.
 * keys: rows that each sees, all or none. */
struct wide_unit {
    int row, rows, keys, head, heads, shift;

    __device__ int query(int r) const
    {
        return r >> shift;
    }
    __device__ int part(int r) const
    {
        return r & ((1 << shift) - 1);
    }
    /* Is row r of a tile one of the unit? */
    __device__ bool has(int r) const
    {
        return query(r) < rows && part(r) < heads;
    }
    /* All 64 rows see all. */
    __device__ bool whole() const
    {
        return keys == TEAM_ROWS;
    }
};

/* A block's units, one after another. A unit's place is the number of rows, times heads, that come before it: a block has those whose
 * place lies in its share. A row that sees nothing is a segment of its own. */
struct wide_walk {
    const int2 *spans;
    int n, heads;
    int64_t share_end;
    int first, end, length, head, shift;
    bool sees;
    int2 next; /* of row `end` */

    __device__ int2 span(int row) const
    {
        return row < n ? spans[row] : make_int2(row, row);
    }
    /* The segment of a row. */
    __device__ void enter(int row, int2 of)
    {
        sees = of.x <= row && of.y > row;
        first = sees ? max(of.x, 0) : row;
        end = sees ? min(of.y, n) : row + 1;
        length = min(end - first, (int)TEAM_ROWS);
        shift = length <= 16 ? 2 : length <= 32 ? 1 : 0;
        head = 0;
        next = span(end);
    }
    __device__ void begin(const attention_shape &s)
    {
        spans = s.rows;
        n = (int)s.queries;
        heads = s.heads;
        int64_t all = s.queries * s.heads, begin = all * blockIdx.x / gridDim.x;
        share_end = all * (blockIdx.x + 1) / gridDim.x;
        int row = (int)(begin / heads);
        enter(row, span(row));
        int64_t passed = begin - (int64_t)first * heads; /* of the segment, before the share begins */
        int step = 1 << shift;
        head = (int)((passed + length - 1) / length + step - 1) / step * step;
        if (head >= heads)
            enter(end, next);
    }
    __device__ wide_unit unit() const
    {
        bool there = first < n && (int64_t)first * heads + head * length < share_end;
        return {first, there ? length : 0, sees ? length : 0, head, min(heads - head, 1 << shift), shift};
    }
    __device__ void advance()
    {
        head += 1 << shift;
        if (head >= heads)
            enter(end, next);
    }
};

__device__ inline unsigned char *wide_tiles()
{
    extern __shared__ unsigned char wide_memory[];
    uint32_t at = shared_address(wide_memory);
    return wide_memory + ((at + 1023) / 1024 * 1024 - at);
}

/* Of a 16-byte piece of a row in a tile. */
__device__ inline int wide_place(int row, int piece)
{
    return piece < 8 ? row * PANEL_BYTES + ((piece ^ row % 8) * 16) : TAIL_AT + row * TAIL_BYTES + (((piece - 8) ^ row / 4 % 2) * 16);
}

/* Tiles of a unit in the background. from: of the unit's first row and head, of matrices of one stride. A thread has piece i % 8 of every
 * sixteenth row, and one of the two last pieces of a row. Where nothing is read the address is not looked at. */
template <int N>
__device__ inline void wide_load(const wide_unit &unit, unsigned char *const (&to)[N], const bf16 *const (&from)[N], int stride, int dim)
{
    int row = threadIdx.x / 8, piece = threadIdx.x % 8, place = wide_place(row, piece), query = unit.query(row), step = 16 >> unit.shift;
    int offset = query * stride + unit.part(row) * dim + piece * 8;
    bool there = unit.part(row) < unit.heads && piece * 8 < dim;
#pragma unroll
    for (int i = 0; i < TEAM_ROWS / 16; i++) {
        bool have = there && query + i * step < unit.rows;
#pragma unroll
        for (int k = 0; k < N; k++)
            copy_async<16>(to[k] + place + i * 16 * PANEL_BYTES, from[k] + (offset + i * step * stride), have);
    }
    row = threadIdx.x / 2;
    piece = 8 + threadIdx.x % 2;
    there = unit.has(row) && piece * 8 < dim;
    offset = unit.query(row) * stride + unit.part(row) * dim + piece * 8;
#pragma unroll
    for (int k = 0; k < N; k++)
        copy_async<16>(to[k] + wide_place(row, piece), from[k] + offset, there);
}

/* What came is seen by all threads and by products. */
__device__ inline void wide_arrived()
{
    copy_wait<0>();
    shared_fence();
    __syncthreads();
}

__device__ inline uint64_t wide_tail(const unsigned char *tile)
{
    return (uint64_t)(shared_address(tile + TAIL_AT) >> 4) | (uint64_t)1 << 16 | (uint64_t)(8 * TAIL_BYTES >> 4) << 32 | (uint64_t)3 << 62;
}

/* x [64][64] = a b^T. */
__device__ inline void wide_scores(float (&x)[8][4], const unsigned char *a, const unsigned char *b)
{
    tile_scores<PANEL, TEAM_ROWS>(x, a, b);
    wide_product<64>::shared(x, wide_tail(a), wide_tail(b));
}

/* A team's result [64][80]. */
struct wide_result {
    float panel[8][4], tail[2][4];

    /* = p b [64][80]. */
    __device__ void begin(const uint32_t (&p)[4][4], const unsigned char *b)
    {
        uint64_t at = tile_descriptor(b, PANEL_BYTES), at_tail = wide_tail(b);
        product_begin();
        wide_product<64>::first_registers(panel, p[0], at);
        wide_product<16>::first_registers(tail, p[0], at_tail);
#pragma unroll
        for (int k = 1; k < 4; k++) {
            wide_product<64>::registers(panel, p[k], at + k * 16 * PANEL_BYTES / 16);
            wide_product<16>::registers(tail, p[k], at_tail + k * 16 * TAIL_BYTES / 16);
        }
        product_end();
    }
    __device__ void end()
    {
        product_wait<0>();
        take();
    }
    __device__ void take()
    {
        product_take(panel);
        product_take(tail);
    }
    /* += p b. */
    __device__ void add(const uint32_t (&p)[4][4], const unsigned char *b)
    {
        uint64_t at = tile_descriptor(b, PANEL_BYTES), at_tail = wide_tail(b);
        take();
        product_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            wide_product<64>::registers(panel, p[k], at + k * 16 * PANEL_BYTES / 16);
            wide_product<16>::registers(tail, p[k], at_tail + k * 16 * TAIL_BYTES / 16);
        }
        product_end();
    }
};

/* Four 8x8 tiles of bf16 to shared memory; lane l gives the address of row l % 8 of tile l / 8. */
__device__ inline void store_fragments(unsigned char *row, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

struct wide_thread {
    int warp, lane, g, t;

    __device__ wide_thread()
    {
        warp = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / WARP, 0);
        lane = threadIdx.x % WARP;
        g = lane / 4;
        t = lane % 4;
    }
    __device__ int row(int r) const
    {
        return warp * 16 + g + 8 * r;
    }
    /* Column 8 j + 2 t + e is seen when 8 j < bound(e). */
    __device__ int bound(const wide_unit &unit, int e) const
    {
        return unit.part(2 * t + e) == unit.part(g) ? (unit.keys << unit.shift) - 2 * t - e : 0;
    }
};

/* A warp's rows of an operand of products, columns 0..63, to a tile. */
__device__ inline void wide_put(unsigned char *tile, const wide_thread &me, const uint32_t (&p)[4][4])
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        store_fragments(tile + wide_place(me.warp * 16 + me.lane % 16, 2 * k + me.lane / 16), p[k][0], p[k][1], p[k][2], p[k][3]);
}

/* The same of a tile, transposed: its columns 16 warp.. of all rows. */
__device__ inline void wide_columns(uint32_t (&p)[4][4], const unsigned char *tile, const wide_thread &me)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        load_fragments_transposed(
            p[k], (const bf16 *)(tile + wide_place(16 * k + me.lane / 16 * 8 + me.lane % 8, 2 * me.warp + me.lane / 8 % 2)));
}

/* A warp's rows of a result, rounded, as `store_fragments` takes them. */
__device__ inline void wide_round(uint32_t (&to)[WIDE_PIECES / 2][4], const wide_result &x, float factor0, float factor1)
{
#pragma unroll
    for (int k = 0; k < WIDE_PIECES / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&of)[4] = k < 4 ? x.panel[(2 * k + i / 2) % 8] : x.tail[i / 2];
            float factor = i % 2 ? factor1 : factor0;
            to[k][i] = pack_pair(of[i % 2 * 2] * factor, of[i % 2 * 2 + 1] * factor);
        }
}

/* The same to a unit's rows in memory, through the same rows of a tile that nobody else uses by now. */
__device__ inline void wide_store(bf16 *to, int stride, int dim, const wide_unit &unit, unsigned char *tile, const wide_thread &me,
                                  const uint32_t (&x)[WIDE_PIECES / 2][4])
{
    __syncwarp();
#pragma unroll
    for (int k = 0; k < WIDE_PIECES / 2; k++)
        store_fragments(tile + wide_place(me.warp * 16 + me.lane % 16, 2 * k + me.lane / 16), x[k][0], x[k][1], x[k][2], x[k][3]);
    __syncwarp();
    if (!to)
        return;
    to += (int64_t)unit.row * stride + (int64_t)unit.head * dim;
    int row = me.warp * 16 + me.lane / 8, piece = me.lane % 8, step = 4 >> unit.shift;
    int offset = unit.query(row) * stride + unit.part(row) * dim + piece * 8;
    bool there = unit.part(row) < unit.heads && piece * 8 < dim;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (there && unit.query(row) + i * step < unit.rows)
            *reinterpret_cast<uint4 *>(to + offset + i * step * stride) = *reinterpret_cast<const uint4 *>(tile + wide_place(row + 4 * i, piece));
    row = me.warp * 16 + me.lane / 2;
    piece = 8 + me.lane % 2;
    if (unit.has(row) && piece * 8 < dim)
        *reinterpret_cast<uint4 *>(to + unit.query(row) * stride + unit.part(row) * dim + piece * 8) =
            *reinterpret_cast<const uint4 *>(tile + wide_place(row, piece));
}

#endif

/* Forward. */
__global__ void __launch_bounds__(TEAM, WIDE_BLOCKS)
    wide_kernel(attention_shape s, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse)
{
#ifdef VLAI_HOPPER
    unsigned char *tiles = wide_tiles();
    const wide_thread me;
    float scale = s.scale * LOG2E;
    auto load = [&](const wide_unit &unit, int n) {
        unsigned char *stage = tiles + n % 2 * 3 * WIDE_TILE, *const to[3] = {stage, stage + WIDE_TILE, stage + 2 * WIDE_TILE};
        int64_t at = unit.row * s.q_stride + (int64_t)unit.head * s.dim;
        const bf16 *const from[3] = {q + at, k + at, v + at};
        wide_load(unit, to, from, (int)s.q_stride, s.dim);
        copy_commit();
    };
    wide_walk walk;
    walk.begin(s);
    wide_unit unit = walk.unit();
    if (unit.rows)
        load(unit, 0);
#pragma unroll 1
    for (int n = 0; unit.rows; n++) {
        unsigned char *tile_q = tiles + n % 2 * 3 * WIDE_TILE, *tile_k = tile_q + WIDE_TILE, *tile_v = tile_k + WIDE_TILE;
        walk.advance();
        wide_unit next = walk.unit();
        wide_arrived(); /* and nobody needs the other stage */
        float x[8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
        product_begin();
        wide_scores(x, tile_q, tile_k);
        product_end();
        if (next.rows)
            load(next, n + 1);
        product_wait<0>();
        product_take(x);
        if (!unit.whole()) {
            int bound[2] = {me.bound(unit, 0), me.bound(unit, 1)};
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[j][e] = 8 * j < bound[e % 2] ? x[j][e] : -INFINITY;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                top[r] = fmaxf(top[r], fmaxf(x[j][2 * r], x[j][2 * r + 1]));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 2));
            top[r] = top[r] == -INFINITY ? 0.0f : top[r] * scale;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    x[j][e] = exp2_fast(x[j][e] * scale - top[r]);
                    sum[r] += x[j][e];
                }
        }
        uint32_t p[4][4];
        wide_result acc;
        rows_pack<4>(p, x);
        product_take(p);
        acc.begin(p, tile_v);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
            int row = me.row(r);
            if (lse && me.t == 0 && unit.has(row))
                lse[(int64_t)(unit.row + unit.query(row)) * s.heads + unit.head + unit.part(row)] =
                    sum[r] > 0 ? (top[r] + log2f(sum[r])) * LN2 : -INFINITY;
        }
        __syncthreads(); /* nobody needs q */
        acc.end();
        uint32_t rounded[WIDE_PIECES / 2][4];
        wide_round(rounded, acc, sum[0] > 0 ? __fdividef(1.0f, sum[0]) : 0.0f, sum[1] > 0 ? __fdividef(1.0f, sum[1]) : 0.0f);
        wide_store(o, (int)s.o_stride, s.dim, unit, tile_q, me, rounded);
        unit = next;
    }
#endif
}

/* Backward; dq, dk, dv: any may be NULL. */
__global__ void __launch_bounds__(TEAM, WIDE_BLOCKS)
    wide_grad_kernel(attention_shape s, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse, bf16 *dq, bf16 *dk,
                     bf16 *dv)
{
#ifdef VLAI_HOPPER
    unsigned char *tiles = wide_tiles(), *tile_v = tiles + 2 * 3 * WIDE_TILE;
    const wide_thread me;
    float scale = s.scale * LOG2E, power[2]; /* lse of the thread's rows, in powers of 2; infinite for rows that do not exist: p = 0 */
    auto fetch = [&](const wide_unit &unit, int r) {
        int row = me.row(r);
        return unit.has(row) ? lse[(int64_t)(unit.row + unit.query(row)) * s.heads + unit.head + unit.part(row)] : INFINITY;
    };
    auto load = [&](const wide_unit &unit, int n) {
        unsigned char *stage = tiles + n % 2 * 3 * WIDE_TILE, *const to[2] = {stage, stage + WIDE_TILE}, *const to_dy[1] = {stage + 2 * WIDE_TILE};
        int64_t at = unit.row * s.q_stride + (int64_t)unit.head * s.dim;
        const bf16 *const from[2] = {q + at, k + at}, *const from_dy[1] = {dy + unit.row * s.o_stride + (int64_t)unit.head * s.dim};
        wide_load(unit, to, from, (int)s.q_stride, s.dim);
        wide_load(unit, to_dy, from_dy, (int)s.o_stride, s.dim);
        copy_commit();
    };
    auto load_v = [&](const wide_unit &unit) {
        unsigned char *const to[1] = {tile_v};
        const bf16 *const from[1] = {v + unit.row * s.kv_stride + (int64_t)unit.head * s.dim};
        wide_load(unit, to, from, (int)s.kv_stride, s.dim);
        copy_commit();
    };
    wide_walk walk;
    walk.begin(s);
    wide_unit unit = walk.unit();
    float ahead[2];
    if (unit.rows) {
        load(unit, 0);
        load_v(unit);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        ahead[r] = unit.rows ? fetch(unit, r) : 0.0f;
#pragma unroll 1
    for (int n = 0; unit.rows; n++) {
        unsigned char *tile_q = tiles + n % 2 * 3 * WIDE_TILE, *tile_k = tile_q + WIDE_TILE, *tile_dy = tile_k + WIDE_TILE;
        walk.advance();
        wide_unit next = walk.unit();
#pragma unroll
        for (int r = 0; r < 2; r++)
            power[r] = ahead[r] * LOG2E;
        wide_arrived(); /* and nobody needs the other stage */
        float x[8][4], dp[8][4], mean[2] = {0, 0};
        product_begin();
        wide_scores(x, tile_q, tile_k);
        product_end();
        wide_scores(dp, tile_dy, tile_v);
        product_end();
        if (next.rows) {
            load(next, n + 1);
#pragma unroll
            for (int r = 0; r < 2; r++)
                ahead[r] = fetch(next, r);
        }
        product_wait<1>();
        product_take(x);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[j][e] = exp2_fast(x[j][e] * scale - power[e / 2]);
        if (!unit.whole()) {
            int bound[2] = {me.bound(unit, 0), me.bound(unit, 1)};
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[j][e] = 8 * j < bound[e % 2] ? x[j][e] : 0.0f;
        }
        product_wait<0>();
        product_take(dp);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                mean[e / 2] += x[j][e] * dp[j][e];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            mean[r] += __shfl_xor_sync(0xFFFFFFFFu, mean[r], 1);
            mean[r] += __shfl_xor_sync(0xFFFFFFFFu, mean[r], 2);
            mean[r] *= s.scale;
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[j][e] = x[j][e] * (dp[j][e] * s.scale - mean[e / 2]);
        uint32_t p[4][4], ds[4][4];
        rows_pack<4>(p, x);
        rows_pack<4>(ds, dp);
        product_take(ds);
        wide_result acc_q, acc_k, acc_v;
        acc_q.begin(ds, tile_k);
        acc_q.end();
        uint32_t rounded[WIDE_PIECES / 2][4];
        wide_round(rounded, acc_q, 1.0f, 1.0f);
        __syncthreads(); /* nobody needs k and v */
        wide_put(tile_v, me, p);
        wide_put(tile_k, me, ds);
        __syncthreads();
        wide_columns(p, tile_v, me);
        wide_columns(ds, tile_k, me);
        product_take(p);
        product_take(ds);
        acc_v.begin(p, tile_dy);
        __syncthreads(); /* nobody needs p and dS */
        if (next.rows)
            load_v(next);
        wide_store(dq, (int)s.dq_stride, s.dim, unit, tile_k, me, rounded);
        acc_v.end();
        wide_round(rounded, acc_v, 1.0f, 1.0f);
        acc_k.begin(ds, tile_q);
        wide_store(dv, (int)s.dkv_stride, s.dim, unit, tile_k, me, rounded);
        acc_k.end();
        wide_round(rounded, acc_k, 1.0f, 1.0f);
        wide_store(dk, (int)s.dkv_stride, s.dim, unit, tile_k, me, rounded);
        unit = next;
    }
#endif
}

/* Long segments, backward, in tiles of the same kind: a block has 64 queries, then 64 keys, and all of the segment passes by. Grid of both:
 * heads, tiles, segments and one more for the rows outside them. */

#ifdef VLAI_HOPPER

__device__ inline wide_unit long_tile(const segment_rows &of, int row, int head)
{
    return {row, min(of.end - row, (int)TEAM_ROWS), TEAM_ROWS, head, 1, 0};
}

__device__ inline int long_tiles(const segment_rows &of)
{
    return (of.end - of.first + TEAM_ROWS - 1) / TEAM_ROWS;
}

/* Where the two operands of tile n lie, behind those that stay. */
__device__ inline unsigned char *long_stage(unsigned char *tiles, int n)
{
    return tiles + (2 + n % 2 * 2) * WIDE_TILE;
}

/* Two operands of a tile. */
__device__ inline void long_load(unsigned char *to, const wide_unit &tile, const bf16 *a, int64_t a_stride, const bf16 *b, int64_t b_stride, int dim)
{
    unsigned char *const to_a[1] = {to}, *const to_b[1] = {to + WIDE_TILE};
    const bf16 *const from_a[1] = {a + tile.row * a_stride + (int64_t)tile.head * dim};
    const bf16 *const from_b[1] = {b + tile.row * b_stride + (int64_t)tile.head * dim};
    wide_load(tile, to_a, from_a, (int)a_stride, dim);
    wide_load(tile, to_b, from_b, (int)b_stride, dim);
}

#endif

/* facts [N, heads] and, unless NULL, dq. */
__global__ void __launch_bounds__(TEAM, WIDE_BLOCKS)
    long_query_grad_kernel(attention_shape s, const int32_t *segments, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v,
                           const bf16 *o, const float *lse, long_facts *facts, bf16 *dq)
{
#ifdef VLAI_HOPPER
    unsigned char *tiles = wide_tiles(), *tile_q = tiles, *tile_dy = tiles + WIDE_TILE;
    const wide_thread me;
    int head = blockIdx.x, outside = (int)gridDim.z - 1;
    if ((int)blockIdx.z == outside) {
        rows_outside(s, segments, outside, (int)blockIdx.y, (int)gridDim.y, [&](int row) {
            for (int c = threadIdx.x; dq && c < s.dim; c += TEAM)
                dq[row * s.dq_stride + (int64_t)head * s.dim + c] = __float2bfloat16_rn(0.0f);
        });
        return;
    }
    segment_rows of = segment_of(s, segments, blockIdx.z);
    int first = of.first + (int)blockIdx.y * TEAM_ROWS;
    if (first >= of.end)
        return;
    wide_unit mine = long_tile(of, first, head);
    int chunks = long_tiles(of);
    auto load = [&](int n) {
        long_load(long_stage(tiles, n), long_tile(of, of.first + n * TEAM_ROWS, head), k, s.kv_stride, v, s.kv_stride, s.dim);
        copy_commit();
    };
    long_load(tile_q, mine, q, s.q_stride, dy, s.o_stride, s.dim);
    load(0);
    float power[2], mean[2] = {0, 0}, scale = s.scale * LOG2E;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = me.row(r);
        power[r] = row < mine.rows ? lse[(int64_t)(first + row) * s.heads + head] * LOG2E : INFINITY; /* rows that do not exist: p = 0 */
    }
    /* Two threads take a row of o. */
    int half_row = threadIdx.x / 2, half = threadIdx.x % 2 * (WIDE_PIECES / 2);
    bool there = half_row < mine.rows;
    uint4 out[WIDE_PIECES / 2];
#pragma unroll
    for (int i = 0; i < WIDE_PIECES / 2; i++)
        out[i] = there && (half + i) * 8 < s.dim
                     ? *reinterpret_cast<const uint4 *>(o + (first + half_row) * s.o_stride + (int64_t)head * s.dim + (half + i) * 8)
                     : make_uint4(0, 0, 0, 0);
    float own = there ? lse[(int64_t)(first + half_row) * s.heads + head] * LOG2E : 0.0f;
    wide_result acc = {};
#pragma unroll 1
    for (int n = 0; n < chunks; n++) {
        unsigned char *tile_k = long_stage(tiles, n), *tile_v = tile_k + WIDE_TILE;
        wide_arrived(); /* and nobody needs the other stage */
        float x[8][4], dp[8][4];
        product_begin();
        wide_scores(x, tile_q, tile_k);
        product_end();
        wide_scores(dp, tile_dy, tile_v);
        product_end();
        if (n + 1 < chunks)
            load(n + 1);
        if (n == 0) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < WIDE_PIECES / 2; i++) {
                uint4 other = *reinterpret_cast<const uint4 *>(tile_dy + wide_place(half_row, half + i));
                const __nv_bfloat162 *a = reinterpret_cast<const __nv_bfloat162 *>(&other), *b = reinterpret_cast<const __nv_bfloat162 *>(&out[i]);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float2 fa = __bfloat1622float2(a[c]), fb = __bfloat1622float2(b[c]);
                    sum += fa.x * fb.x + fa.y * fb.y;
                }
            }
            sum = (sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 1)) * s.scale;
            if (there && threadIdx.x % 2 == 0)
                facts[(int64_t)(first + half_row) * s.heads + head] = make_float2(own, sum);
            /* Row r of a warp's 16 was summed by its lanes 2 r and 2 r + 1. */
            mean[0] = __shfl_sync(0xFFFFFFFFu, sum, 2 * me.g);
            mean[1] = __shfl_sync(0xFFFFFFFFu, sum, 2 * me.g + 16);
        }
        product_wait<1>();
        product_take(x);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[j][e] = exp2_fast(x[j][e] * scale - power[e / 2]);
        int left = of.end - of.first - n * TEAM_ROWS - 2 * me.t; /* keys from this thread's first column on */
        if (n + 1 == chunks)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[j][e] = 8 * j + e % 2 < left ? x[j][e] : 0.0f;
        product_wait<0>();
        product_take(dp);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[j][e] = x[j][e] * (dp[j][e] * s.scale - mean[e / 2]);
        uint32_t ds[4][4];
        rows_pack<4>(ds, dp);
        product_take(ds);
        acc.add(ds, tile_k);
        acc.end();
    }
    if (!dq)
        return;
    uint32_t rounded[WIDE_PIECES / 2][4];
    wide_round(rounded, acc, 1.0f, 1.0f);
    __syncthreads(); /* nobody needs q */
    wide_store(dq, (int)s.dq_stride, s.dim, mine, tile_q, me, rounded);
#endif
}

/* dk, dv; either may be NULL. p and dS are transposed here, and pass from product to product in registers. Rows of q and do that do not
 * exist are zeros, as are their facts: p = 1 and dS = 0 meet zeros. */
__global__ void __launch_bounds__(TEAM, LONG_KEY_BLOCKS)
    long_key_grad_kernel(attention_shape s, const int32_t *segments, const bf16 *dy, const bf16 *q, const bf16 *k, const bf16 *v,
                         const long_facts *facts, bf16 *dk, bf16 *dv)
{
#ifdef VLAI_HOPPER
    __shared__ __align__(16) long_facts side[2][TEAM_ROWS];
    unsigned char *tiles = wide_tiles(), *tile_k = tiles, *tile_v = tiles + WIDE_TILE;
    const wide_thread me;
    int head = blockIdx.x, outside = (int)gridDim.z - 1;
    if ((int)blockIdx.z == outside) {
        rows_outside(s, segments, outside, (int)blockIdx.y, (int)gridDim.y, [&](int row) {
            for (int c = threadIdx.x; c < s.dim; c += TEAM) {
                if (dk)
                    dk[row * s.dkv_stride + (int64_t)head * s.dim + c] = __float2bfloat16_rn(0.0f);
                if (dv)
                    dv[row * s.dkv_stride + (int64_t)head * s.dim + c] = __float2bfloat16_rn(0.0f);
            }
        });
        return;
    }
    segment_rows of = segment_of(s, segments, blockIdx.z);
    int first = of.first + (int)blockIdx.y * TEAM_ROWS;
    if (first >= of.end)
        return;
    wide_unit mine = long_tile(of, first, head);
    int chunks = long_tiles(of);
    auto load = [&](int n) {
        wide_unit tile = long_tile(of, of.first + n * TEAM_ROWS, head);
        long_load(long_stage(tiles, n), tile, q, s.q_stride, dy, s.o_stride, s.dim);
        int row = threadIdx.x;
        if (row < TEAM_ROWS)
            copy_async<8>(&side[n % 2][row], facts + (int64_t)(tile.row + min(row, tile.rows - 1)) * s.heads + head, row < tile.rows);
        copy_commit();
    };
    long_load(tile_k, mine, k, s.kv_stride, v, s.kv_stride, s.dim);
    load(0);
    float scale = s.scale * LOG2E;
    wide_result acc_k = {}, acc_v = {};
#pragma unroll 1
    for (int n = 0; n < chunks; n++) {
        unsigned char *tile_q = long_stage(tiles, n), *tile_dy = tile_q + WIDE_TILE;
        const float4 *pair = reinterpret_cast<const float4 *>(side[n % 2]); /* of columns 2 i and 2 i + 1 */
        wide_arrived(); /* and nobody needs the other stage */
        float x[8][4], dp[8][4];
        product_begin();
        wide_scores(x, tile_k, tile_q);
        product_end();
        wide_scores(dp, tile_v, tile_dy);
        product_end();
        if (n + 1 < chunks)
            load(n + 1);
        product_wait<1>();
        product_take(x);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float4 two = pair[j * 4 + me.t];
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[j][e] = exp2_fast(x[j][e] * scale - (e % 2 ? two.z : two.x));
        }
        uint32_t p[4][4], ds[4][4];
        rows_pack<4>(p, x);
        product_take(p);
        acc_v.add(p, tile_dy);
        product_wait<1>();
        product_take(dp);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float4 two = pair[j * 4 + me.t];
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[j][e] = x[j][e] * (dp[j][e] * s.scale - (e % 2 ? two.w : two.y));
        }
        rows_pack<4>(ds, dp);
        product_take(ds);
        acc_k.add(ds, tile_q);
        product_wait<0>();
        acc_v.take();
        acc_k.take();
    }
    __syncthreads(); /* nobody needs k and v */
    uint32_t rounded[WIDE_PIECES / 2][4];
    wide_round(rounded, acc_k, 1.0f, 1.0f);
    wide_store(dk, (int)s.dkv_stride, s.dim, mine, tile_k, me, rounded);
    wide_round(rounded, acc_v, 1.0f, 1.0f);
    wide_store(dv, (int)s.dkv_stride, s.dim, mine, tile_v, me, rounded);
#endif
}

bool compiled()
{
    static const bool there = has_code(wide_grad_kernel);
    return there;
}

/* As many blocks as run at once, where there are two full units for each. */
int wide_grid(const attention_shape &s, unsigned *blocks)
{
    int device = 0, processors = 0, status = (int)cudaGetDevice(&device);
    if (!status)
        status = (int)cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    *blocks = min((unsigned)(processors * WIDE_BLOCKS), blocks_for(s.queries * s.heads, 2 * TEAM_ROWS));
    return status;
}

} // namespace

bool attention_wide_fits(const attention_task &t)
{
    const attention_shape &s = t.shape;
    return t.dtype == VLA_BF16 && t.mask == VLA_MASK_FULL && t.longest > 0 && t.longest <= TEAM_ROWS && s.queries == s.keys &&
           s.queries < MOST_STREAM_ROWS && s.group == 1 && s.q_stride == s.kv_stride && s.dim <= WIDE_DIM && s.vector && s.scale > 0 && compiled();
}

int attention_wide_forward(const attention_task &t)
{
    unsigned blocks;
    int status = wide_grid(t.shape, &blocks);
    if (!status)
        status = allow_ring(wide_kernel, wide_shared(FORWARD_TILES));
    if (status)
        return status;
    wide_kernel<<<blocks, TEAM, wide_shared(FORWARD_TILES), t.stream>>>(t.shape, (const bf16 *)t.q, (const bf16 *)t.k, (const bf16 *)t.v,
                                                                      (bf16 *)t.o, t.lse);
    return launched();
}

int attention_wide_backward(const attention_task &t)
{
    unsigned blocks;
    if (!t.shape.queries)
        return 0;
    int status = wide_grid(t.shape, &blocks);
    if (!status)
        status = allow_ring(wide_grad_kernel, wide_shared(BACKWARD_TILES));
    if (status)
        return status;
    wide_grad_kernel<<<blocks, TEAM, wide_shared(BACKWARD_TILES), t.stream>>>(t.shape, (const bf16 *)t.dy, (const bf16 *)t.q, (const bf16 *)t.k,
                                                                            (const bf16 *)t.v, t.lse, (bf16 *)t.dq, (bf16 *)t.dk,
                                                                            (bf16 *)t.dv);
    return launched();
}

size_t attention_long_workspace(int64_t queries, int heads)
{
    return round_256((size_t)(queries * heads) * sizeof(long_facts));
}

bool attention_long_fits(const attention_task &t)
{
    const attention_shape &s = t.shape;
    return t.backward && t.dtype == VLA_BF16 && t.mask == VLA_MASK_FULL && t.segments && t.n_segments > 0 && t.n_segments < 65535 && t.longest > 0 &&
           t.longest <= LONG_LONGEST && s.queries == s.keys && s.queries < MOST_STREAM_ROWS && s.group == 1 && s.dim <= WIDE_DIM && s.vector && s.scale > 0 &&
           t.workspace_bytes >= attention_long_workspace(s.queries, s.heads) && compiled();
}

int attention_long_backward(const attention_task &t)
{
    const attention_shape &s = t.shape;
    long_facts *facts = (long_facts *)t.workspace;
    dim3 grid((unsigned)s.heads, blocks_for(t.longest, TEAM_ROWS), (unsigned)t.n_segments + 1);
    int status = allow_ring(long_query_grad_kernel, wide_shared(LONG_TILES));
    if (!status)
        status = allow_ring(long_key_grad_kernel, wide_shared(LONG_TILES));
    if (status)
        return status;
    long_query_grad_kernel<<<grid, TEAM, wide_shared(LONG_TILES), t.stream>>>(s, t.segments, (const bf16 *)t.dy, (const bf16 *)t.q, (const bf16 *)t.k,
                                                                            (const bf16 *)t.v, (const bf16 *)t.o, t.lse, facts, (bf16 *)t.dq);
    if ((status = launched()) || (!t.dk && !t.dv))
        return status;
    long_key_grad_kernel<<<grid, TEAM, wide_shared(LONG_TILES), t.stream>>>(s, t.segments, (const bf16 *)t.dy, (const bf16 *)t.q, (const bf16 *)t.k,
                                                                          (const bf16 *)t.v, facts, (bf16 *)t.dk, (bf16 *)t.dv);
    return launched();
}
