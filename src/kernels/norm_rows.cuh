/* rms_norm_backward of bf16 rows of 1024, 1280 or 2048 columns: a team of 1 or 4 warps per row. A lane has 8 neighbouring columns
 * of each 256 of its warp's, so that nothing but the one sum of a row passes between threads. A warp alone meets no barrier until
 * the rows are done; the warps of a larger team exchange their sums in shared memory, behind the one barrier that a row costs. Each
 * team goes down rows of its own; the copy engine brings the next ones to the team's part of shared memory. Sums of dw and of dx
 * stay in registers; the block's teams add them in order, and each block leaves one row of partial sums.
 *
 * A thread per 8 columns of a row spends as many instructions on addresses, barriers and the sum of the row as on its columns
 * (370 in all, by its SASS): 35 us of a tower's norm at 1.7 GHz, whatever memory does. Here they are shared by 40 columns, or by 16.
 * Measured on an H200: [16848,1280] with sums 48 us, 1.14 of a copy as long; 57 us by a thread per 8 columns. [6784,2048] 31.7 us,
 * with y 38.4; by a thread per 8 columns 33.4 and 40.2, by 2 warps per row or 4 rows at once 31.9 to 32.4 without y.
 *
 * Compiled for less than 9.0, or for 12.0 on, where a block has no room for the rows, the kernel is empty and must not be launched. */
#ifndef VLAI_NORM_ROWS_CUH
#define VLAI_NORM_ROWS_CUH

#include "kernels/async.cuh"
#include "kernels/columns.cuh"

/* How a block of norm_rows_kernel divides its work: TEAMS rows of COLS columns at once, each by TEAM warps; of every team's rows,
 * STAGES are in shared memory. */
template <int COLUMNS, int WARPS, int ROWS, int DEPTH> struct row_teams {
    enum {
        COLS = COLUMNS,
        TEAM = WARPS,
        TEAMS = ROWS,
        STAGES = DEPTH,
        BLOCK = TEAMS * TEAM * WARP, /* threads */
        TENSOR = COLS / 8,           /* words of 16 bytes in a row */
        STAGE = 3 * TENSOR,
        PACKS = TENSOR / (TEAM * WARP), /* words of a lane */
        BYTES = TEAMS * (STAGES * (STAGE * 16 + 8) + (TEAM > 1 ? 2 * TEAM * 4 : 0)) /* dynamic shared memory: rows, barriers, sums of two rows */
    };
    static_assert(PACKS * TEAM * WARP == TENSOR, "whole packs");
    static_assert(COLS * 4 <= STAGES * STAGE * 16, "a team's part of the ring holds a sum");

    /* As many as are resident on 132 multiprocessors, and a row for each team. */
    static int64_t blocks(int64_t rows)
    {
        int64_t most = (rows + TEAMS - 1) / TEAMS;
        return most < 132 ? most : 132;
    }
};

/* The compiler does not know what is in these words, nor in memory, from here on. */
template <class T> __device__ inline void as_stored(pack<T, 8> &p)
{
#pragma unroll
    for (int i = 0; i < pack<T, 8>::WORDS; i++)
        asm volatile("" : "+r"(p.w[i].x), "+r"(p.w[i].y), "+r"(p.w[i].z), "+r"(p.w[i].w)::"memory");
}

/* partial, sums [blocks, C]: of dw and, if SUMS, of dx over a block's rows; partial, y, w, add: NULL when there is none. dx may
 * lie over dy or add: the rows ahead are others. BY: row_teams. */
template <class BY, class W, bool SUMS>
__global__ void __launch_bounds__(BY::BLOCK, 1)
    norm_rows_kernel(const bf16 *dy, const bf16 *x, const float *rstd, const W *w, const bf16 *add, bf16 *dx, bf16 *y, float *partial, float *sums,
                     int rows)
{
#if defined(VLAI_COPY_ENGINE) && __CUDA_ARCH__ < 1200
    enum { LANE = 8, COLS = BY::COLS, TEAM = BY::TEAM, TEAMS = BY::TEAMS, STAGES = BY::STAGES };
    enum { TENSOR = BY::TENSOR, STAGE = BY::STAGE, PACKS = BY::PACKS };
    extern __shared__ uint4 row_words[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % TEAM, team = threadIdx.x / (WARP * TEAM), step = gridDim.x * TEAMS;
    int mine = warp * PACKS * WARP + lane; /* the thread's first word of a row */
    bool leads = threadIdx.x % (WARP * TEAM) == 0;
    uint4 *ring = row_words + team * STAGES * STAGE;
    uint64_t *all_full = (uint64_t *)(row_words + TEAMS * STAGES * STAGE), *full = all_full + team * STAGES;
    float *parts = (float *)(all_full + TEAMS * STAGES) + team * 2 * TEAM; /* the warps' sums of this row and of the one before */
    float dw[PACKS][LANE], sum_dx[SUMS ? PACKS : 1][LANE];
    pack<W, LANE> weight[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++)
#pragma unroll
        for (int i = 0; i < LANE; i++) {
            dw[k][i] = 0;
            if (SUMS)
                sum_dx[k][i] = 0;
        }
    auto ask = [&](int stage, int row) {
        if (leads && row < rows) {
            uint4 *to = ring + stage * STAGE;
            int64_t at = (int64_t)row * COLS;
            full_expect(full + stage, (add ? 3 : 2) * TENSOR * 16);
            full_copy(to, dy + at, TENSOR * 16, full + stage);
            full_copy(to + TENSOR, x + at, TENSOR * 16, full + stage);
            if (add)
                full_copy(to + 2 * TENSOR, add + at, TENSOR * 16, full + stage);
        }
    };
    /* Few teams: dealt out to blocks in turn, so that no multiprocessor has more than one row more than another. */
    int row = TEAM > 1 ? team * gridDim.x + blockIdx.x : blockIdx.x * TEAMS + team;
    if (leads) {
        for (int s = 0; s < STAGES; s++)
            full_init(full + s, 1);
        full_init_done();
        for (int s = 0; s < STAGES; s++)
            ask(s, row + s * step);
    }
    float root = row < rows ? rstd[row] : 0.0f;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (w)
            weight[k].load(w + (mine + k * WARP) * LANE);
        else {
            const float one[LANE] = {1, 1, 1, 1, 1, 1, 1, 1};
            weight[k].set(one);
        }
    }
    if constexpr (TEAM > 1) /* the barriers are made */
        __syncthreads();
    else
        __syncwarp();
    int stage = 0, parity = 0, turn = 0;
    for (; row < rows; row += step) {
        float next_root = row + step < rows ? rstd[row + step] : 0.0f, part[PACKS];
        const uint4 *from = ring + stage * STAGE + mine;
        pack<bf16, LANE> pd[PACKS], px[PACKS], pa[PACKS];
        auto take = [&](int k) {
            if constexpr (SUMS && sizeof(W) == 2)
                as_stored(weight[k]);
            pd[k].w[0] = from[k * WARP];
            px[k].w[0] = from[TENSOR + k * WARP];
        };
        full_wait(full + stage, parity);
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            float vd[LANE], vx[LANE], vw[LANE];
            take(k);
            if constexpr (TEAM > 1)
                pa[k].w[0] = add ? from[2 * TENSOR + k * WARP] : make_uint4(0, 0, 0, 0);
            pd[k].get(vd);
            px[k].get(vx);
            weight[k].get(vw);
            part[k] = 0;
#pragma unroll
            for (int i = 0; i < LANE; i++)
                part[k] += vw[i] * vd[i] * vx[i];
        }
        float sum = part[0];
#pragma unroll
        for (int k = 1; k < PACKS; k++)
            sum += part[k];
        sum = warp_sum(sum);
        if constexpr (TEAM > 1) {
            if (lane == 0)
                parts[turn * TEAM + warp] = sum;
            asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM * WARP) : "memory");
            ask(stage, row + STAGES * step); /* all have this stage in registers */
            sum = parts[turn * TEAM];
#pragma unroll
            for (int v = 1; v < TEAM; v++)
                sum += parts[turn * TEAM + v];
            turn ^= 1;
        }
        float b = root * root * root * (sum * (1.0f / COLS));
        int64_t at = (int64_t)row * COLS + mine * LANE;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            float vd[LANE], vx[LANE], vw[LANE], va[LANE] = {0};
            if constexpr (TEAM == 1)
                take(k); /* again: a warp alone has no registers for a row */
            pd[k].get(vd);
            px[k].get(vx);
            weight[k].get(vw);
            if (TEAM > 1)
                pa[k].get(va);
            else if (add) {
                pa[k].w[0] = from[2 * TENSOR + k * WARP];
                pa[k].get(va);
            }
            if (y) {
                pack<bf16, LANE> py;
                float vy[LANE];
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    vy[i] = vx[i] * root * vw[i];
                py.set(vy);
                py.store(y + at + k * WARP * LANE);
            }
#pragma unroll
            for (int i = 0; i < LANE; i++) {
                dw[k][i] += vd[i] * (vx[i] * root);
                vx[i] = root * (vw[i] * vd[i]) + (va[i] - vx[i] * b);
            }
            px[k].set(vx);
            px[k].store(dx + at + k * WARP * LANE);
            if constexpr (SUMS) {
                px[k].get(vx); /* as it is stored */
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    sum_dx[k][i] += vx[i];
            }
        }
        if constexpr (TEAM == 1) {
            __syncwarp(); /* all lanes have read this stage */
            ask(stage, row + STAGES * step);
        }
        root = next_root;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    /* The teams' sums, in order, by way of the ring. */
    auto leave = [&](const float(&own)[PACKS][LANE], float *to) {
        float *all = (float *)row_words;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            pack<float, LANE> p;
            p.set(own[k]);
            p.store(all + team * COLS + (mine + k * WARP) * LANE);
        }
        __syncthreads();
        if constexpr (TEAM > 1)
            __syncthreads(); /* for racecheck, as in attention_groups.cu */
        add_in_order<TEAMS, COLS, BY::BLOCK>(all, to + (int64_t)blockIdx.x * COLS);
    };
    if (partial)
        leave(dw, partial);
    if constexpr (SUMS)
        leave(sum_dx, sums);
#endif
}

#endif
