/* Attention of whole segments, causal or full, in bf16 on Hopper's products of 64 rows.
 *
 * With G query heads to a kv head, the 64 rows of a product are 64 / G neighbouring queries of all G heads: row r is query
 * r / G, head r % G. They see the same keys of the same kv head but for the diagonal, which so crosses 64 / G keys rather
 * than 64: at G = 8 and segments of 270 rows a third fewer pairs are multiplied than in tiles of 64 queries. A query's heads
 * lie side by side in memory.
 *
 *     forward     a team (4 warps) has 64 rows; the teams of a block are neighbours and share the tiles of keys that pass by
 *     query grad  the same: dq = scale dS K, and what the other one needs: lse in powers of 2, delta = rowsum(do o)
 *     key grad    a block has 64 keys; its two teams take the tiles of 64 rows of q and do by turns, from the last query to
 *                 the first, so that the blocks of a segment read the same tiles at about the same time; their sums are
 *                 added at the end. p and dS are transposed there, and pass from product to product in registers
 *
 * o and do may be two streams of rows, whose places are looked up when a tile comes or goes. Tiles of do whose queries follow each
 * other in a stream come as one piece, others a query at a time: its heads fill whole groups of 8 rows of the tile.
 *
 * Every sum has a fixed order. The copy engine brings all tiles. Rows past a segment's end are read with the last tile (they
 * are another segment's, or zeros) and made zeros before they can meet a factor of zero. Grid of all: x kv heads, y segments
 * and one more for the rows outside them, z tiles, those with most work first. */
#include "kernels/attention_groups.cuh"
#include "kernels/attention_segments.cuh"
#include "kernels/hopper.cuh"

namespace {

/* dy: of do, by stream; dy_query: the same, one query at a time. */
struct group_maps {
    CUtensorMap q, k, v, dy[2], dy_query[2];
};

/* Of a query and head: lse in powers of 2, delta. */
using row_facts = float2;

#ifdef VLAI_HOPPER

/* What a thread is in its team, and its two rows of the team's 64. */
struct team_place {
    int team, thread, warp, g, t; /* team, warp: the same in all lanes, and known to be */

    __device__ team_place()
    {
        team = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / TEAM, 0);
        thread = threadIdx.x % TEAM;
        warp = thread / WARP;
        g = thread % WARP / 4;
        t = thread % 4;
    }
    __device__ int row(int r) const
    {
        return warp * 16 + g + 8 * r;
    }
};

/* Dynamic shared memory from the first multiple of 1024 bytes on. */
__device__ inline unsigned char *shared_tiles()
{
    extern __shared__ unsigned char group_memory[];
    uint32_t at = shared_address(group_memory);
    return group_memory + ((at + 1023) / 1024 * 1024 - at);
}

/* By a team: rows from..rows of a tile become zeros. */
template <int DP> __device__ inline void tile_clear(unsigned char *tile, int rows, int from)
{
    for (int i = threadIdx.x % TEAM; i < panels_of(DP) * (rows - from) * 8; i += TEAM) {
        int panel = i / ((rows - from) * 8), at = i % ((rows - from) * 8);
        *reinterpret_cast<uint4 *>(tile + (panel * rows + from) * PANEL_BYTES + at * 16) = make_uint4(0, 0, 0, 0);
    }
}

/* By a warp: a tile of the queries of do whose places its first lanes have; `queries` of them are read, what follows them in the tile
 * may be anything. */
template <int DP>
__device__ inline void tile_load_streams(unsigned char *to, const group_maps *maps, int shift, int queries, int head, int place, uint64_t *full)
{
    int lane = threadIdx.x % WARP, first = __shfl_sync(0xFFFFFFFFu, place, 0);
    bool follows = lane >= queries || place == (first >= 0 ? first + lane : first - lane);
    if (__all_sync(0xFFFFFFFFu, follows && first != NOWHERE)) {
        if (lane == 0)
            tile_load<DP>(to, &maps->dy[first < 0], TEAM_ROWS, head, first >= 0 ? first : -1 - first, full);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < TEAM_ROWS >> shift; i++) {
        int at = __shfl_sync(0xFFFFFFFFu, place, i);
        if (lane == 0)
            tile_load<DP>(to + (i << shift) * PANEL_BYTES, &maps->dy_query[at < 0], TEAM_ROWS, head, at >= 0 ? at : -1 - at, full);
    }
}

/* A team's results, of which the first `rows` rows are wanted: row r from to(r) on, unless that is NULL, through a tile that nobody
 * uses by now. */
template <int DP, class F>
__device__ inline void tile_store(F to, int dim, int rows, unsigned char *tile, const team_place &me, const float (&x)[DP / 8][4],
                                  float factor0, float factor1)
{
    constexpr int PIECES = DP / 8;
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        *reinterpret_cast<uint32_t *>(tile_piece(tile, TEAM_ROWS, me.row(0), j) + 4 * me.t) = pack_pair(x[j][0] * factor0, x[j][1] * factor0);
        *reinterpret_cast<uint32_t *>(tile_piece(tile, TEAM_ROWS, me.row(1), j) + 4 * me.t) = pack_pair(x[j][2] * factor1, x[j][3] * factor1);
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < PIECES / 2; n++) {
        int i = n * WARP + threadIdx.x % WARP, row = me.warp * 16 + i / PIECES, piece = i % PIECES;
        bf16 *start = row < rows && piece * 8 < dim ? to(row) : nullptr;
        if (start)
            *reinterpret_cast<uint4 *>(start + piece * 8) = *reinterpret_cast<const uint4 *>(tile_piece(tile, TEAM_ROWS, row, piece));
    }
}

/* Tiles of keys and values that pass by the teams of a block, STAGES at a time. Whoever leaves a stage last fills it again. */
template <int DP, int KEYS, int STAGES, int TEAMS> struct key_ring {
    static constexpr int TILE = tile_bytes(DP, KEYS);
    unsigned char *tiles;
    uint64_t *full; /* [STAGES] */
    int *left;      /* [STAGES] */
    const group_maps *maps;
    int head, first, end, chunks;

    __device__ unsigned char *k(int n) const
    {
        return tiles + n % STAGES * 2 * TILE;
    }
    __device__ unsigned char *v(int n) const
    {
        return k(n) + TILE;
    }
    __device__ int key(int n) const
    {
        return first + n * KEYS;
    }
    __device__ void load(int n) const /* by one thread */
    {
        uint64_t *ready = &full[n % STAGES];
        full_expect(ready, 2 * TILE);
        tile_load<DP>(k(n), &maps->k, KEYS, head, key(n), ready);
        tile_load<DP>(v(n), &maps->v, KEYS, head, key(n), ready);
    }
    __device__ void wait(int n) const
    {
        full_wait(&full[n % STAGES], n / STAGES);
    }
    /* By a team: tile n is there, and zeros past the segment's end. */
    __device__ void take(int n, int team) const
    {
        wait(n);
        if (key(n) + KEYS > end) {
            tile_clear<DP>(k(n), KEYS, end - key(n));
            tile_clear<DP>(v(n), KEYS, end - key(n));
            shared_fence();
            team_wait(team);
        }
    }
    /* By one thread of a team that needs tile n no more. */
    __device__ void leave(int n) const
    {
        __threadfence_block();
        if (atomicAdd(&left[n % STAGES], 1) % TEAMS == TEAMS - 1) {
            __threadfence_block();
            load(n + STAGES);
        }
    }
};

/* The rows of a block of queries, and of each team. */
template <int TEAMS, int KEYS> struct query_block {
    segment_rows segment;
    int per_team, first, last; /* queries of a team; first query of the block; end of the keys it sees */

    __device__ bool make(const attention_shape &s, const int32_t *segments, bool causal, int shift)
    {
        segment = segment_of(s, segments, blockIdx.y);
        per_team = TEAM_ROWS >> shift;
        int length = segment.end - segment.first, tiles = (length + TEAMS * per_team - 1) / (TEAMS * per_team);
        int tile = tiles - 1 - (int)blockIdx.z;
        first = segment.first + tile * TEAMS * per_team;
        last = causal ? min(first + TEAMS * per_team, segment.end) : segment.end;
        return tile >= 0;
    }
    __device__ int chunks() const
    {
        return (last - segment.first + KEYS - 1) / KEYS;
    }
    /* Places of the block's queries, NOWHERE past the segment's end, to places [TEAMS * TEAM_ROWS]; the first team is left to other
     * things. */
    __device__ void find(const row_streams<bf16> &o, int *places) const
    {
        int i = (int)threadIdx.x - TEAM;
        static_assert((TEAMS - 1) * TEAM >= TEAMS * TEAM_ROWS, "a thread for each");
        if (i >= 0 && i < TEAMS * per_team)
            places[i] = first + i < segment.end ? o.place(first + i) : NOWHERE;
    }
    __device__ int team_first(int team) const
    {
        return first + team * per_team;
    }
    __device__ int team_rows(int team) const
    {
        return min(segment.end - team_first(team), per_team);
    }
    __device__ int team_chunks(int team, bool causal) const
    {
        int rows = team_rows(team), end = causal ? team_first(team) + rows : segment.end;
        return rows <= 0 ? 0 : (end - segment.first + KEYS - 1) / KEYS;
    }
};

/* Where a thread's rows stop seeing keys. */
__device__ inline int key_limit(const segment_rows &segment, bool causal, int query)
{
    return causal ? min(query + 1, segment.end) : segment.end;
}

template <int N> __device__ inline void mask_scores(float (&x)[N][4], int key, const int (&limit)[2], int t)
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[j][e] = key + j * 8 + 2 * t + e % 2 < limit[e / 2] ? x[j][e] : -INFINITY;
}

#endif

/* Teams of a block, keys of a tile, tiles in flight, blocks of a multiprocessor: the fastest of those tried on an H200. */
struct forward_block {
    enum { TEAMS = 2, KEYS = 32, STAGES = 4, BLOCKS = 2 };
};

struct query_grad_block {
    enum { TEAMS = 3, KEYS = 64, STAGES = 2, BLOCKS = 1 };
};

struct key_grad_block {
    enum { TEAMS = 2, STAGES = 2 };
};

template <int DP> constexpr size_t group_shared()
{
    using block = forward_block;
    return 1024 + block::TEAMS * tile_bytes(DP, TEAM_ROWS) + block::STAGES * 2 * tile_bytes(DP, block::KEYS);
}

/* The scores of the next keys are begun with the product of these. */
template <int DP>
__global__ void __launch_bounds__(forward_block::TEAMS *TEAM, forward_block::BLOCKS)
    group_kernel(attention_shape s, const int32_t *segments, bool causal, int shift, const __grid_constant__ group_maps maps,
                 row_streams<bf16> o, float *lse)
{
#ifdef VLAI_HOPPER
    constexpr int TEAMS = forward_block::TEAMS, KEYS = forward_block::KEYS, STAGES = forward_block::STAGES;
    __shared__ uint64_t query_full[TEAMS], key_full[STAGES];
    __shared__ int left[STAGES], places[TEAMS * TEAM_ROWS];
    unsigned char *tiles = shared_tiles();
    const team_place me;
    int head = blockIdx.x << shift;
    if (blockIdx.y == gridDim.y - 1) {
        rows_outside(s, segments, gridDim.y - 1, [&](int row) {
            int place = o.place(row);
            for (int c = threadIdx.x; place != NOWHERE && c < s.dim << shift; c += TEAMS * TEAM)
                o.at(place, s.o_stride)[head * s.dim + c] = __float2bfloat16_rn(0.0f);
            if (lse && threadIdx.x < 1 << shift)
                lse[(int64_t)row * s.heads + head + threadIdx.x] = -INFINITY;
        });
        return;
    }
    query_block<TEAMS, KEYS> block;
    if (!block.make(s, segments, causal, shift))
        return;
    key_ring<DP, KEYS, STAGES, TEAMS> ring = {tiles + TEAMS * tile_bytes(DP, TEAM_ROWS), key_full, left, &maps, (int)blockIdx.x,
                                              block.segment.first, block.segment.end, block.chunks()};
    block.find(o, places);
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS; i++)
            full_init(&query_full[i], 1);
        for (int i = 0; i < STAGES; i++) {
            full_init(&key_full[i], 1);
            left[i] = 0;
        }
        full_init_done();
        for (int i = 0; i < TEAMS; i++)
            if (block.team_rows(i) > 0) {
                full_expect(&query_full[i], tile_bytes(DP, TEAM_ROWS));
                tile_load<DP>(tiles + i * tile_bytes(DP, TEAM_ROWS), &maps.q, TEAM_ROWS, head, block.team_first(i), &query_full[i]);
            }
        for (int n = 0; n < STAGES && n < ring.chunks; n++)
            ring.load(n);
    }
    __syncthreads();
    unsigned char *tile_q = tiles + me.team * tile_bytes(DP, TEAM_ROWS);
    int first = block.team_first(me.team), rows = block.team_rows(me.team), chunks = block.team_chunks(me.team, causal);
    float x[KEYS / 8][4], acc[DP / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, scale = s.scale * LOG2E;
    int limit[2] = {key_limit(block.segment, causal, first + (me.row(0) >> shift)), key_limit(block.segment, causal, first + (me.row(1) >> shift))};
    int whole = key_limit(block.segment, causal, first); /* all of the team's rows see keys before this */
    auto leave = [&](int n) {
        if (n >= 0 && n + STAGES < ring.chunks) {
            team_wait(me.team);
            if (me.thread == 0)
                ring.leave(n);
        }
    };
    uint32_t p[KEYS / 16][4];
    /* The scores of tile n, which are on their way, become p; acc and the sums are rescaled. */
    auto soften = [&](int n) {
        product_wait<0>();
        product_take(x);
        product_take(acc);
        leave(n - 1);
        if (ring.key(n) + KEYS > whole)
            mask_scores(x, ring.key(n), limit, me.t);
        float shrink[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = top[r];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                most = fmaxf(most, fmaxf(x[j][2 * r], x[j][2 * r + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
            rows_soften(x, r, most, top[r], sum[r], shrink[r], scale);
        }
        rows_shrink(acc, shrink);
        rows_pack<KEYS / 16>(p, x);
        product_take(p);
    };
    auto begin_scores = [&](int n) {
        product_begin();
        tile_scores<DP, KEYS>(x, tile_q, ring.k(n));
        product_end();
    };
    if (chunks) {
        full_wait(&query_full[me.team], 0);
        ring.take(0, me.team);
        product_take(acc);
        begin_scores(0);
#pragma unroll 1
        for (int n = 0; n < chunks - 1; n++) {
            soften(n);
            ring.take(n + 1, me.team);
            product_take(acc);
            product_begin();
            tile_product<DP, KEYS>(acc, p, ring.v(n));
            tile_scores<DP, KEYS>(x, tile_q, ring.k(n + 1));
            product_end();
        }
        soften(chunks - 1);
        product_take(acc);
        product_begin();
        tile_product<DP, KEYS>(acc, p, ring.v(chunks - 1));
        product_end();
        product_wait<0>();
        product_take(acc);
    }
    team_wait(me.team); /* nobody of the team needs q, k and v */
    for (int n = chunks ? chunks - 1 : 0; n + STAGES < ring.chunks; n++)
        if (me.thread == 0) {
            ring.wait(n);
            ring.leave(n);
        }
    if (!chunks)
        return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
        int query = first + (me.row(r) >> shift);
        if (lse && me.t == 0 && query < block.segment.end)
            lse[(int64_t)query * s.heads + head + (me.row(r) & ((1 << shift) - 1))] = (top[r] * scale + log2f(sum[r])) * LN2;
    }
    const int *mine = places + me.team * block.per_team;
    auto to = [&](int row) {
        int place = mine[row >> shift];
        return place == NOWHERE ? nullptr : o.at(place, s.o_stride) + (head + (row & ((1 << shift) - 1))) * s.dim;
    };
    tile_store<DP>(to, s.dim, rows << shift, tile_q, me, acc, 1.0f / sum[0], 1.0f / sum[1]);
#endif
}

template <int DP> constexpr size_t group_query_shared()
{
    using block = query_grad_block;
    return 1024 + block::TEAMS * 2 * tile_bytes(DP, TEAM_ROWS) + block::STAGES * 2 * tile_bytes(DP, block::KEYS);
}

/* facts [N, heads] and, unless NULL, dq. */
template <int DP>
__global__ void __launch_bounds__(query_grad_block::TEAMS *TEAM, query_grad_block::BLOCKS)
    group_query_grad_kernel(attention_shape s, const int32_t *segments, bool causal, int shift, const __grid_constant__ group_maps maps,
                            row_streams<bf16> o, const float *lse, row_facts *facts, bf16 *dq)
{
#ifdef VLAI_HOPPER
    constexpr int TEAMS = query_grad_block::TEAMS, KEYS = query_grad_block::KEYS, STAGES = query_grad_block::STAGES;
    constexpr int TILE = tile_bytes(DP, TEAM_ROWS);
    __shared__ uint64_t query_full[TEAMS], key_full[STAGES];
    __shared__ int left[STAGES], places[TEAMS * TEAM_ROWS];
    unsigned char *tiles = shared_tiles();
    const team_place me;
    int head = blockIdx.x << shift;
    int64_t col = (int64_t)head * s.dim;
    if (blockIdx.y == gridDim.y - 1) {
        rows_outside(s, segments, gridDim.y - 1, [&](int row) {
            for (int c = threadIdx.x; dq && c < s.dim << shift; c += TEAMS * TEAM)
                dq[row * s.dq_stride + col + c] = __float2bfloat16_rn(0.0f);
        });
        return;
    }
    query_block<TEAMS, KEYS> block;
    if (!block.make(s, segments, causal, shift))
        return;
    key_ring<DP, KEYS, STAGES, TEAMS> ring = {tiles + TEAMS * 2 * TILE, key_full, left, &maps, (int)blockIdx.x, block.segment.first,
                                              block.segment.end, dq ? block.chunks() : 0};
    block.find(o, places);
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS; i++)
            full_init(&query_full[i], 1);
        for (int i = 0; i < STAGES; i++) {
            full_init(&key_full[i], 1);
            left[i] = 0;
        }
        full_init_done();
        for (int i = 0; i < TEAMS; i++)
            if (block.team_rows(i) > 0) {
                full_expect(&query_full[i], 2 * TILE);
                tile_load<DP>(tiles + i * 2 * TILE, &maps.q, TEAM_ROWS, head, block.team_first(i), &query_full[i]);
                if (!o.map)
                    tile_load<DP>(tiles + i * 2 * TILE + TILE, &maps.dy[0], TEAM_ROWS, head, block.team_first(i), &query_full[i]);
            }
        for (int n = 0; n < STAGES && n < ring.chunks; n++)
            ring.load(n);
    }
    __syncthreads();
    unsigned char *tile_q = tiles + me.team * 2 * TILE, *tile_dy = tile_q + TILE;
    int first = block.team_first(me.team), rows = block.team_rows(me.team), chunks = dq ? block.team_chunks(me.team, causal) : 0;
    float power[2] = {INFINITY, INFINITY}, mean[2], scale = s.scale * LOG2E; /* rows that do not exist: p = 0 */
    int limit[2] = {key_limit(block.segment, causal, first + (me.row(0) >> shift)), key_limit(block.segment, causal, first + (me.row(1) >> shift))};
    int whole = key_limit(block.segment, causal, first);
    if (rows > 0) {
        const int *own_places = places + me.team * block.per_team;
        if (o.map && me.warp == 0)
            tile_load_streams<DP>(tile_dy, &maps, shift, rows, head, own_places[threadIdx.x % WARP], &query_full[me.team]);
        int row = me.thread / 2, piece = me.thread % 2 * (DP / 16), sub = row & ((1 << shift) - 1), query = first + (row >> shift);
        bool there = query < block.segment.end;
        int place = own_places[row >> shift];
        const bf16 *from = place == NOWHERE ? nullptr : o.at(place, s.o_stride) + col + sub * s.dim;
        uint4 out[DP / 16];
#pragma unroll
        for (int i = 0; i < DP / 16; i++)
            out[i] = from && (piece + i) * 8 < s.dim ? *reinterpret_cast<const uint4 *>(from + (piece + i) * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int mine = first + (me.row(r) >> shift);
            if (mine < block.segment.end)
                power[r] = lse[(int64_t)mine * s.heads + head + (me.row(r) & ((1 << shift) - 1))] * LOG2E;
        }
        float own = there ? lse[(int64_t)query * s.heads + head + sub] * LOG2E : 0.0f, sum = 0;
        full_wait(&query_full[me.team], 0);
#pragma unroll
        for (int i = 0; i < DP / 16; i++) {
            uint4 other = *reinterpret_cast<const uint4 *>(tile_piece(tile_dy, TEAM_ROWS, row, piece + i));
            const __nv_bfloat162 *a = reinterpret_cast<const __nv_bfloat162 *>(&other), *b = reinterpret_cast<const __nv_bfloat162 *>(&out[i]);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float2 fa = __bfloat1622float2(a[c]), fb = __bfloat1622float2(b[c]);
                sum += fa.x * fb.x + fa.y * fb.y;
            }
        }
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        if (there && me.thread % 2 == 0)
            facts[(int64_t)query * s.heads + head + sub] = make_float2(own, sum);
        /* Row r of a warp's 16 was summed by its lanes 2 r and 2 r + 1. */
        mean[0] = __shfl_sync(0xFFFFFFFFu, sum, 2 * me.g);
        mean[1] = __shfl_sync(0xFFFFFFFFu, sum, 2 * me.g + 16);
    }
    float x[KEYS / 8][4], dp[KEYS / 8][4], acc[DP / 8][4] = {};
#pragma unroll 1
    for (int n = 0; n < chunks; n++) {
        ring.take(n, me.team);
        product_begin();
        tile_scores<DP, KEYS>(x, tile_q, ring.k(n));
        product_end();
        tile_scores<DP, KEYS>(dp, tile_dy, ring.v(n));
        product_end();
        product_wait<1>();
        product_take(x);
        if (ring.key(n) + KEYS > whole)
            mask_scores(x, ring.key(n), limit, me.t);
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[j][e] = exp2_fast(x[j][e] * scale - power[e / 2]);
        product_wait<0>();
        product_take(dp);
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[j][e] *= dp[j][e] - mean[e / 2];
        uint32_t ds[KEYS / 16][4];
        rows_pack<KEYS / 16>(ds, x);
        product_take(ds);
        product_take(acc);
        product_begin();
        tile_product<DP, KEYS>(acc, ds, ring.k(n));
        product_end();
        product_wait<0>();
        product_take(acc);
        if (n + STAGES < ring.chunks) {
            team_wait(me.team);
            if (me.thread == 0)
                ring.leave(n);
        }
    }
    team_wait(me.team); /* nobody of the team needs q, k and v */
    for (int n = chunks; n + STAGES < ring.chunks; n++)
        if (me.thread == 0) {
            ring.wait(n);
            ring.leave(n);
        }
    if (!chunks)
        return;
    auto to = [&](int row) { return dq + (first + (row >> shift)) * s.dq_stride + col + (row & ((1 << shift) - 1)) * s.dim; };
    tile_store<DP>(to, s.dim, rows << shift, tile_q, me, acc, s.scale, s.scale);
#endif
}

template <int DP> constexpr size_t group_key_shared()
{
    return 1024 + 2 * tile_bytes(DP, TEAM_ROWS) + key_grad_block::TEAMS * key_grad_block::STAGES * 2 * tile_bytes(DP, TEAM_ROWS);
}

/* dk, dv; either may be NULL. */
template <int DP>
__global__ void __launch_bounds__(key_grad_block::TEAMS *TEAM, 1)
    group_key_grad_kernel(attention_shape s, const int32_t *segments, bool causal, int shift, const __grid_constant__ group_maps maps,
                          row_streams<bf16> dy, const row_facts *facts, bf16 *dk, bf16 *dv)
{
#ifdef VLAI_HOPPER
    constexpr int TEAMS = key_grad_block::TEAMS, STAGES = key_grad_block::STAGES, TILE = tile_bytes(DP, TEAM_ROWS), N = TEAM_ROWS;
    __shared__ uint64_t key_full, full[TEAMS][STAGES];
    __shared__ __align__(16) row_facts side[TEAMS][2][TEAM_ROWS];
    unsigned char *tile_k = shared_tiles(), *tile_v = tile_k + TILE;
    const team_place me;
    int kv_head = blockIdx.x, group = 1 << shift, head = kv_head << shift;
    int64_t col = (int64_t)kv_head * s.dim;
    if (blockIdx.y == gridDim.y - 1) {
        rows_outside(s, segments, gridDim.y - 1, [&](int row) {
            for (int c = threadIdx.x; c < s.dim; c += TEAMS * TEAM) {
                if (dk)
                    dk[row * s.dkv_stride + col + c] = __float2bfloat16_rn(0.0f);
                if (dv)
                    dv[row * s.dkv_stride + col + c] = __float2bfloat16_rn(0.0f);
            }
        });
        return;
    }
    segment_rows segment = segment_of(s, segments, blockIdx.y);
    int first = segment.first + blockIdx.z * TEAM_ROWS;
    if (first >= segment.end)
        return;
    /* Tile n of this team is number all - 1 - team - 2 n of those from the first query on. */
    int per_tile = TEAM_ROWS >> shift, from = causal ? first : segment.first, all = (segment.end - from + per_tile - 1) / per_tile;
    int tiles = (all - me.team + TEAMS - 1) / TEAMS;
    unsigned char *stages = tile_v + TILE + me.team * STAGES * 2 * TILE;
    auto query_of = [&](int n) { return from + (all - 1 - me.team - n * TEAMS) * per_tile; };
    /* Of the query of tile n that this lane stands for. */
    auto place_of = [&](int n) {
        int lane = threadIdx.x % WARP, query = query_of(n) + lane;
        return dy.map && me.warp == 0 && n < tiles && lane < per_tile && query < segment.end ? dy.place(query) : NOWHERE;
    };
    auto load = [&](int n, int place) { /* by the first warp */
        uint64_t *ready = &full[me.team][n % STAGES];
        unsigned char *to = stages + n % STAGES * 2 * TILE;
        if (me.thread == 0) {
            full_expect(ready, 2 * TILE);
            tile_load<DP>(to, &maps.q, TEAM_ROWS, head, query_of(n), ready);
            if (!dy.map)
                tile_load<DP>(to + TILE, &maps.dy[0], TEAM_ROWS, head, query_of(n), ready);
        }
        if (dy.map)
            tile_load_streams<DP>(to + TILE, &maps, shift, min(per_tile, segment.end - query_of(n)), head, place, ready);
    };
    auto fetch = [&](int n) {
        int query = query_of(n) + (me.thread >> shift);
        row_facts none = make_float2(INFINITY, 0.0f); /* p = 0 */
        return n < tiles && me.thread < TEAM_ROWS && query < segment.end ? facts[(int64_t)query * s.heads + head + (me.thread & (group - 1))] : none;
    };
    if (threadIdx.x == 0) {
        full_init(&key_full, 1);
        for (int i = 0; i < TEAMS * STAGES; i++)
            full_init(&full[0][i], 1);
        full_init_done();
        full_expect(&key_full, 2 * TILE);
        tile_load<DP>(tile_k, &maps.k, TEAM_ROWS, kv_head, first, &key_full);
        tile_load<DP>(tile_v, &maps.v, TEAM_ROWS, kv_head, first, &key_full);
    }
    int places[STAGES];
#pragma unroll
    for (int n = 0; n < STAGES; n++)
        places[n] = place_of(n);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < STAGES; n++)
        if (me.warp == 0 && n < tiles)
            load(n, places[n]);
    row_facts next = fetch(0);
    if (me.thread < TEAM_ROWS)
        side[me.team][0][me.thread] = next;
    next = fetch(1);
    team_wait(me.team);
    full_wait(&key_full, 0);

    float acc_k[DP / 8][4] = {}, acc_v[DP / 8][4] = {}, scale = s.scale * LOG2E;
#pragma unroll 1
    for (int n = 0; n < tiles; n++) {
        unsigned char *tile_q = stages + n % STAGES * 2 * TILE, *tile_dy = tile_q + TILE;
        int query = query_of(n);
        full_wait(&full[me.team][n % STAGES], n / STAGES);
        if (query + per_tile > segment.end) {
            tile_clear<DP>(tile_q, TEAM_ROWS, (segment.end - query) << shift);
            tile_clear<DP>(tile_dy, TEAM_ROWS, (segment.end - query) << shift);
            shared_fence();
            team_wait(me.team);
        }
        float x[N / 8][4], dp[N / 8][4];
        product_begin();
        tile_scores<DP, N>(x, tile_k, tile_q);
        product_end();
        tile_scores<DP, N>(dp, tile_v, tile_dy);
        product_end();
        if (me.thread < TEAM_ROWS)
            side[me.team][(n + 1) % 2][me.thread] = next; /* its last readers have met since */
        next = fetch(n + 2);
        int place = place_of(n + STAGES);
        const float4 *pair = reinterpret_cast<const float4 *>(side[me.team][n % 2]); /* of columns 2 i and 2 i + 1 */
        product_wait<1>();
        product_take(x);
        bool diagonal = causal && query < first + TEAM_ROWS - 1;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float4 of = pair[j * 4 + me.t];
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[j][e] = exp2_fast(x[j][e] * scale - (e % 2 ? of.z : of.x));
            if (diagonal)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[j][e] = query + ((j * 8 + 2 * me.t + e % 2) >> shift) >= first + me.row(e / 2) ? x[j][e] : 0.0f;
        }
        uint32_t p[N / 16][4], ds[N / 16][4];
        rows_pack<N / 16>(p, x);
        product_take(p);
        product_begin();
        tile_product<DP, N>(acc_v, p, tile_dy);
        product_end();
        product_wait<1>();
        product_take(dp);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float4 of = pair[j * 4 + me.t];
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[j][e] = x[j][e] * (dp[j][e] - (e % 2 ? of.w : of.y));
        }
        rows_pack<N / 16>(ds, dp);
        product_take(ds);
        product_begin();
        tile_product<DP, N>(acc_k, ds, tile_q);
        product_end();
        product_wait<0>();
        product_take(acc_v);
        product_take(acc_k);
        team_wait(me.team); /* nobody needs the stage, and the next facts are there */
        if (me.warp == 0 && n + STAGES < tiles)
            load(n + STAGES, place);
    }
    /* Sums of the two teams: the first finishes dk, the second dv. */
    bool keys = me.team == 0;
    float *mine = (float *)stages + me.thread;
    const float *other = (const float *)(tile_v + TILE + (1 - me.team) * STAGES * 2 * TILE) + me.thread;
#pragma unroll
    for (int j = 0; j < DP / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            mine[(j * 4 + e) * TEAM] = keys ? acc_v[j][e] : acc_k[j][e];
    /* The first wait, to which whole warps come, puts all writes before all reads: no address is written twice or read before. The
     * second is for racecheck. Behind a wait of the block that follows waits of single teams it now and then takes the first reads of
     * a warp for reads before the wait. What it named were the first one to ten that a warp makes, whenever their addresses had
     * been written; had a warp really got past, it would be all of them. Past the second wait, every warp has left the first. */
    __syncthreads();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < DP / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc_k[j][e] = (keys ? acc_k[j][e] : acc_v[j][e]) + other[(j * 4 + e) * TEAM];
    bf16 *to = keys ? dk : dv;
    float factor = keys ? s.scale : 1.0f;
    if (to)
        tile_store<DP>([&](int row) { return to + (first + row) * s.dkv_stride + col; }, s.dim, segment.end - first, keys ? tile_k : tile_v, me,
                       acc_k, factor, factor);
#endif
}

/* The padded head dimension. */
template <class F> int with_group_dim(int dim, F f)
{
    if (dim <= 64)
        return f(std::integral_constant<int, 64>{});
    if (dim <= 80)
        return f(std::integral_constant<int, 80>{});
    return f(std::integral_constant<int, 128>{});
}

int shift_of(int group)
{
    int shift = 0;
    while (1 << shift < group)
        shift++;
    return shift;
}

/* keys: rows of a tile of k and v. */
int maps_make(const attention_task &t, int keys, group_maps *maps)
{
    const attention_shape &s = t.shape;
    int status = tensor_map_make(&maps->q, t.q, s.queries, s.heads, s.dim, s.q_stride, s.group, TEAM_ROWS / s.group);
    for (int b = 0; t.backward && b < 2 && !status; b++) {
        /* A tensor map cannot be of no rows: a stream without any has the other's, by which nothing is read. */
        bool second = b ? t.rows_b > 0 : t.rows_a == 0;
        const void *data = second ? t.dy_b : t.dy;
        int64_t rows = second ? t.rows_b : t.rows_a;
        status = tensor_map_make(&maps->dy[b], data, rows, s.heads, s.dim, s.o_stride, s.group, TEAM_ROWS / s.group);
        if (!status)
            status = tensor_map_make(&maps->dy_query[b], data, rows, s.heads, s.dim, s.o_stride, s.group, 1);
    }
    if (!status)
        status = tensor_map_make(&maps->k, t.k, s.keys, s.kv_heads, s.dim, s.kv_stride, 1, keys);
    return status ? status : tensor_map_make(&maps->v, t.v, s.keys, s.kv_heads, s.dim, s.kv_stride, 1, keys);
}

/* Starts a kernel of a block shape; arguments: what follows the tensor maps. */
template <class BLOCK, class K, class... A>
int group_launch(const attention_task &t, K kernel, size_t shared, int keys, int rows, A... arguments)
{
    group_maps maps = {};
    int status = maps_make(t, keys, &maps);
    if (!status)
        status = allow_shared(kernel, shared);
    if (status)
        return status;
    dim3 grid((unsigned)t.shape.kv_heads, (unsigned)t.n_segments + 1, blocks_for(t.longest, rows));
    kernel<<<grid, BLOCK::TEAMS * TEAM, shared, t.stream>>>(t.shape, t.segments, t.mask == VLA_MASK_CAUSAL, shift_of(t.shape.group), maps,
                                                            arguments...);
    return launched();
}

row_streams<bf16> streams_of(const attention_task &t, const void *a, const void *b)
{
    return {(bf16 *)a, (bf16 *)b, t.map, (int)t.rows_a, (int)t.rows_b};
}

/* Whether the code was compiled for the device: kernels without it have no shared memory. */
bool compiled()
{
    static const bool there = [] {
        cudaFuncAttributes a;
        if (cudaFuncGetAttributes(&a, group_key_grad_kernel<128>) == cudaSuccess)
            return a.sharedSizeBytes > 0;
        cudaGetLastError();
        return false;
    }();
    return there;
}

} // namespace

size_t attention_groups_workspace(int64_t queries, int heads)
{
    return round_256((size_t)(queries * heads) * sizeof(row_facts));
}

bool attention_groups_fits(const attention_task &t)
{
    const attention_shape &s = t.shape;
    return t.dtype == VLA_BF16 && t.mask != VLA_MASK_COLUMNS && t.segments && t.n_segments > 0 && t.n_segments < 65535 && t.longest > 0 &&
           s.queries == s.keys && s.queries <= INT32_MAX && s.dim <= 128 && s.vector && s.scale > 0 && s.group <= TEAM_ROWS &&
           (s.group & (s.group - 1)) == 0 && (!t.backward || t.workspace_bytes >= attention_groups_workspace(s.queries, s.heads)) && compiled();
}

/* Backward, a query's heads have to be whole groups of 8 rows, for the permutation of a tile's pieces. */
bool attention_groups_streams(const attention_task &t)
{
    return !t.backward || t.shape.group >= 8;
}

int attention_groups_forward(const attention_task &t)
{
    using block = forward_block;
    return with_group_dim(t.shape.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        return group_launch<block>(t, group_kernel<DP>, group_shared<DP>(), block::KEYS, block::TEAMS * TEAM_ROWS / t.shape.group,
                                   streams_of(t, t.o, t.o_b), t.lse);
    });
}

int attention_groups_backward(const attention_task &t)
{
    using block = query_grad_block;
    return with_group_dim(t.shape.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        row_facts *facts = (row_facts *)t.workspace;
        int status = group_launch<block>(t, group_query_grad_kernel<DP>, group_query_shared<DP>(), block::KEYS,
                                         block::TEAMS * TEAM_ROWS / t.shape.group, streams_of(t, t.o, t.o_b), t.lse, facts, (bf16 *)t.dq);
        if (status || (!t.dk && !t.dv))
            return status;
        return group_launch<key_grad_block>(t, group_key_grad_kernel<DP>, group_key_shared<DP>(), TEAM_ROWS, TEAM_ROWS,
                                            streams_of(t, t.dy, t.dy_b), facts, (bf16 *)t.dk, (bf16 *)t.dv);
    });
}
