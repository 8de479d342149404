/* qkv_rope_grad of the tower with column sums: rows of 32 heads of 80 columns and 1280 columns behind them, bf16, a warp per row. The copy
 * engine brings the row and its two tables to the warp's part of shared memory, the warp rotates the heads there, one a lane, and the
 * copy engine takes the result away, so that memory sees whole pieces of 5 KB although half a head is 2.5 sectors. Each warp goes down
 * rows of its own and meets no barrier until they are done; sums stay in registers, and the block's warps add them in order. Each block
 * leaves one row of partial sums.
 *
 * A thread per 16 columns goes down 43 rows one after the other, and what is asked for only a row ahead, as the tables are, makes each
 * of them as long as memory's latency under load. Here a warp goes down 16, with all that it reads two rows ahead.
 * Measured on an H200: [16848,3840] in place 61.7 us, 69.5 by a thread per 16 columns.
 *
 * Compiled for less than 9.0, or for 12.0 on, where a block has no room for the rows, the kernel is empty and must not be launched. */
#ifndef VLAI_ROPE_ROWS_CUH
#define VLAI_ROPE_ROWS_CUH

#include "kernels/async.cuh"
#include "kernels/columns.cuh"

enum { ROPE_WARPS = 8 /* of a block */, ROPE_STAGES = 3 /* rows that a warp has in shared memory */ };

/* Of a row: packs of half a head, and of a lane behind the heads; words of 16 bytes. */
enum { ROPE_PACKS = 5, ROPE_HALF = 8 * ROPE_PACKS, ROPE_HEADS = WARP, ROPE_REST = 8 * ROPE_PACKS * WARP };
enum { ROPE_COLS = 2 * ROPE_HALF * ROPE_HEADS + ROPE_REST, ROPE_WORDS = ROPE_COLS / 8, ROPE_HEAD_WORDS = ROPE_WORDS - ROPE_REST / 8 };

/* Words of a stage: the row, and its cosines and sines. */
template <class C> constexpr int rope_stage()
{
    return ROPE_WORDS + 2 * ROPE_HALF * (int)sizeof(C) / 16;
}

/* Dynamic shared memory of a block: its warps' stages and their barriers. */
template <class C> constexpr int rope_rows_bytes()
{
    return ROPE_WARPS * ROPE_STAGES * (rope_stage<C>() * 16 + 8);
}

/* As many blocks as are resident on 132 multiprocessors, and a row for each warp. */
static inline int64_t rope_rows_blocks(int64_t rows)
{
    int64_t most = (rows + ROPE_WARPS - 1) / ROPE_WARPS;
    return most < 132 ? most : 132;
}

/* to = from [rows, ROPE_COLS] rotated back; to may be from. c, s [rows, ROPE_HALF]; partial [blocks, ROPE_COLS]: sums of a block's rows of to. */
template <class C>
__global__ void __launch_bounds__(ROPE_WARPS * WARP, 1) rope_rows_kernel(const bf16 *from, bf16 *to, const C *c, const C *s, float *partial, int rows)
{
#if defined(VLAI_COPY_ENGINE) && __CUDA_ARCH__ < 1200
    constexpr int PACKS = ROPE_PACKS, COLS = ROPE_COLS, STAGE = rope_stage<C>(), TABLE = (STAGE - ROPE_WORDS) / 2;
    extern __shared__ uint4 row_words[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, step = gridDim.x * ROPE_WARPS, row = blockIdx.x * ROPE_WARPS + warp;
    uint4 *ring = row_words + warp * ROPE_STAGES * STAGE;
    uint64_t *full = (uint64_t *)(row_words + ROPE_WARPS * ROPE_STAGES * STAGE) + warp * ROPE_STAGES;
    /* Pack k of the one and of the other half of the lane's head. A head is 10 words, so 8 lanes would meet in 4 of the 8 words that
     * shared memory gives at once: four of them take the halves in the other order, and turn the other way. */
    bool turned = lane & 4;
    auto one = [&](int k) { return lane * 2 * PACKS + (turned ? PACKS : 0) + k; };
    auto other = [&](int k) { return one(k) + (turned ? -PACKS : PACKS); };
    auto behind = [&](int k) { return ROPE_HEAD_WORDS + k * WARP + lane; };
    float sums[PACKS][2][8], rest[PACKS][8];
#pragma unroll
    for (int k = 0; k < PACKS; k++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            sums[k][0][i] = sums[k][1][i] = rest[k][i] = 0;
    if (lane == 0) {
        for (int i = 0; i < ROPE_STAGES; i++)
            full_init(full + i, 1);
        full_init_done();
    }
    __syncwarp();
    auto ask = [&](int stage, int at) {
        if (lane == 0 && at < rows) {
            uint4 *into = ring + stage * STAGE;
            full_expect(full + stage, STAGE * 16);
            full_copy(into, from + (int64_t)at * COLS, ROPE_WORDS * 16, full + stage);
            full_copy(into + ROPE_WORDS, c + (int64_t)at * ROPE_HALF, TABLE * 16, full + stage);
            full_copy(into + ROPE_WORDS + TABLE, s + (int64_t)at * ROPE_HALF, TABLE * 16, full + stage);
        }
    };
#pragma unroll
    for (int k = 0; k < ROPE_STAGES; k++)
        ask(k, row + k * step);
    int stage = 0, parity = 0, bytes = (to == from ? ROPE_HEAD_WORDS : ROPE_WORDS) * 16;
    bool begun = false;
    for (; row < rows; row += step) {
        uint4 *words = ring + stage * STAGE;
        const C *cosines = (const C *)(words + ROPE_WORDS), *sines = cosines + ROPE_HALF;
        full_wait(full + stage, parity);
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            pack<C, 8> pc, ps;
            pack<bf16, 8> a, b;
            float cosine[8], sine[8], u[8], v[8];
            pc.load(cosines + k * 8);
            ps.load(sines + k * 8);
            pc.get(cosine);
            ps.get(sine);
            a.w[0] = words[one(k)];
            b.w[0] = words[other(k)];
            a.get(u);
            b.get(v);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float x = u[i], y = v[i], w = turned ? -sine[i] : sine[i];
                u[i] = __fmaf_rn(x, cosine[i], __fmul_rn(y, w));
                v[i] = __fmaf_rn(y, cosine[i], -__fmul_rn(x, w));
            }
            a.set(u);
            b.set(v);
            words[one(k)] = a.w[0];
            words[other(k)] = b.w[0];
            a.get(u); /* as they are stored */
            b.get(v);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sums[k][0][i] += u[i];
                sums[k][1][i] += v[i];
            }
        }
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            pack<bf16, 8> a;
            float u[8];
            a.w[0] = words[behind(k)];
            a.get(u);
#pragma unroll
            for (int i = 0; i < 8; i++)
                rest[k][i] += u[i];
        }
        written_for_copies();
        __syncwarp();
        if (lane == 0)
            copy_out(to + (int64_t)row * COLS, words, bytes);
        if (begun) { /* the row before has left its stage */
            if (lane == 0)
                copied_out<1>();
            ask(stage ? stage - 1 : ROPE_STAGES - 1, row + (ROPE_STAGES - 1) * step);
        }
        begun = true;
        if (++stage == ROPE_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    /* The warps' sums, in order, by way of the ring. */
    if (lane == 0)
        copied_out<0>();
    float *each = (float *)row_words;
    __syncthreads();
    auto leave = [&](const float(&x)[8], int word) {
        pack<float, 8> p;
        p.set(x);
        p.store(each + warp * COLS + word * 8);
    };
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        leave(sums[k][0], one(k));
        leave(sums[k][1], other(k));
        leave(rest[k], behind(k));
    }
    __syncthreads();
    add_in_order<ROPE_WARPS, COLS, ROPE_WARPS * WARP>(each, partial + (int64_t)blockIdx.x * COLS);
    static_assert(COLS * (int)sizeof(float) <= ROPE_STAGES * STAGE * 16, "a warp's part of the ring holds a sum");
    if (lane == 0)
        copied_out_done();
#endif
}

#endif
