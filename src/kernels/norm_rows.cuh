/* rms_norm_backward of bf16 rows of 1024, 1280 or 2048 columns: a warp per row, or a team of a few. A lane has 8 neighbouring columns of each 256, so
 * that nothing but the one sum of a row passes between threads, and no barrier is met until the rows are done. Each warp goes
 * down rows of its own, those ahead on their way to its part of shared memory; a lane reads what it asked for itself (or what
 * the copy engine brought, ENGINE). Sums of dw and of dx stay in its registers; the block's warps add them in order, and each
 * block leaves one row of partial sums.
 *
 * A thread per 8 columns spends as many instructions on addresses, barriers and the sum of the row as on its columns
 * (370 in all, by its SASS): 35 us of a tower's norm at 1.7 GHz, whatever memory does. Here they are shared by 40 columns. */
#ifndef VLAI_NORM_ROWS_CUH
#define VLAI_NORM_ROWS_CUH

#include "kernels/async.cuh"

/* Of a kernel below: warps that share a row, packs of a lane, warps of a block, rows that a team has in shared memory, blocks that
 * a multiprocessor is to hold. */
template <int TEAM_, int PACKS_, int WARPS_, int STAGES_, int BLOCKS_, bool ENGINE_ = false> struct norm_shape {
    static constexpr int TEAM = TEAM_, PACKS = PACKS_, WARPS = WARPS_, STAGES = STAGES_, BLOCKS = BLOCKS_, TEAMS = WARPS / TEAM;
    static constexpr bool ENGINE = ENGINE_;
    /* Dynamic shared memory of a block: of each warp three parts of rows a stage, and its barriers. */
    static constexpr int BYTES = WARPS * STAGES * (3 * PACKS * 512 + (ENGINE ? 8 : 0));
    static_assert(WARPS % TEAM == 0, "whole teams");
};

/* As many blocks as are resident on 132 multiprocessors, and a row for each team. */
template <class S> int64_t norm_rows_blocks(int64_t rows)
{
    int64_t most = (rows + S::TEAMS - 1) / S::TEAMS, wanted = 132 * S::BLOCKS;
    return wanted < most ? wanted : most;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VLAI_COPY_ENGINE 1
#endif

/* A barrier that counts bytes, for one warp: made by one thread. */
__device__ inline void engine_init(uint64_t *full)
{
#ifdef VLAI_COPY_ENGINE
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full)) : "memory");
#endif
}

__device__ inline void engine_init_done()
{
#ifdef VLAI_COPY_ENGINE
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void engine_expect(uint64_t *full, int bytes)
{
#ifdef VLAI_COPY_ENGINE
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)), "r"(bytes) : "memory");
#endif
}

__device__ inline void engine_copy(void *to, const void *from, int bytes, uint64_t *full)
{
#ifdef VLAI_COPY_ENGINE
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes), "r"(shared_address(full))
                 : "memory");
#endif
}

__device__ inline void engine_wait(uint64_t *full, int parity)
{
#ifdef VLAI_COPY_ENGINE
    uint32_t at = shared_address(full), done;
    do
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
    while (!done);
#endif
}

/* The compiler does not know what is in these words, nor in memory, from here on. */
template <class T> __device__ inline void as_stored(pack<T, 8> &p)
{
#pragma unroll
    for (int i = 0; i < pack<T, 8>::WORDS; i++)
        asm volatile("" : "+r"(p.w[i].x), "+r"(p.w[i].y), "+r"(p.w[i].z), "+r"(p.w[i].w)::"memory");
}

/* partial, sums [blocks, C]: of dw and, if SUMS, of dx over a block's rows; partial, y, w, add: NULL when there is none. dx may
 * lie over dy or add: the rows ahead are others. */
template <class W, class S, bool SUMS>
__global__ void __launch_bounds__(S::WARPS * WARP, S::BLOCKS)
    norm_rows_kernel(const bf16 *dy, const bf16 *x, const float *rstd, const W *w, const bf16 *add, bf16 *dx, bf16 *y, float *partial, float *sums,
                     int rows)
{
    constexpr int PACKS = S::PACKS;
    enum { LANE = 8, PART = PACKS * WARP * LANE, COLS = S::TEAM * PART, TENSOR = PACKS * WARP /* words */, STAGE = 3 * TENSOR };
    extern __shared__ uint4 row_words[];
    __shared__ float parts[2][S::WARPS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, team = warp / S::TEAM, step = gridDim.x * S::TEAMS;
    int first_col = warp % S::TEAM * PART; /* of the warp's part of a row */
    uint4 *ring = row_words + warp * S::STAGES * STAGE;
    uint64_t *full = (uint64_t *)(row_words + S::WARPS * S::STAGES * STAGE) + warp * S::STAGES;
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
    if constexpr (S::ENGINE) {
        if (lane == 0) {
            for (int s = 0; s < S::STAGES; s++)
                engine_init(full + s);
            engine_init_done();
        }
        __syncwarp();
    }
    auto ask = [&](int stage, int row) {
        uint4 *to = ring + stage * STAGE;
        if constexpr (S::ENGINE) {
            if (lane == 0 && row < rows) {
                int64_t at = (int64_t)row * COLS + first_col;
                engine_expect(full + stage, (add ? 3 : 2) * TENSOR * 16);
                engine_copy(to, dy + at, TENSOR * 16, full + stage);
                engine_copy(to + TENSOR, x + at, TENSOR * 16, full + stage);
                if (add)
                    engine_copy(to + 2 * TENSOR, add + at, TENSOR * 16, full + stage);
            }
            return;
        }
        if (row < rows) {
            int64_t at = (int64_t)row * COLS + first_col + lane * LANE;
            const uint4 *from_dy = (const uint4 *)(dy + at), *from_x = (const uint4 *)(x + at);
#pragma unroll
            for (int k = 0; k < PACKS; k++)
                copy_async<16>(to + k * WARP + lane, from_dy + k * WARP, true);
#pragma unroll
            for (int k = 0; k < PACKS; k++)
                copy_async<16>(to + TENSOR + k * WARP + lane, from_x + k * WARP, true);
            if (add) {
                const uint4 *from_add = (const uint4 *)(add + at);
#pragma unroll
                for (int k = 0; k < PACKS; k++)
                    copy_async<16>(to + 2 * TENSOR + k * WARP + lane, from_add + k * WARP, true);
            }
        }
        copy_commit();
    };
    int row = blockIdx.x * S::TEAMS + team;
#pragma unroll
    for (int s = 0; s < S::STAGES; s++)
        ask(s, row + s * step);
    float root = row < rows ? rstd[row] : 0.0f;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (w)
            weight[k].load(w + first_col + k * WARP * LANE + lane * LANE);
        else {
            const float one[LANE] = {1, 1, 1, 1, 1, 1, 1, 1};
            weight[k].set(one);
        }
    }
    int stage = 0, parity = 0, turn = 0;
    for (; row < rows; row += step) {
        float next_root = row + step < rows ? rstd[row + step] : 0.0f, part[PACKS];
        uint4 *from = ring + stage * STAGE + lane;
        if constexpr (S::ENGINE)
            engine_wait(full + stage, parity);
        else
            copy_wait<S::STAGES - 1>();
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if constexpr (SUMS && sizeof(W) == 2)
                as_stored(weight[k]);
            pack<bf16, LANE> pd, px;
            float vd[LANE], vx[LANE], vw[LANE];
            pd.w[0] = from[k * WARP];
            px.w[0] = from[TENSOR + k * WARP];
            pd.get(vd);
            px.get(vx);
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
        if constexpr (S::TEAM > 1) { /* a part is written anew two rows later, behind another barrier */
            if (lane == 0)
                parts[turn][warp] = sum;
            asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(S::TEAM * WARP) : "memory");
            sum = parts[turn][team * S::TEAM];
#pragma unroll
            for (int t = 1; t < S::TEAM; t++)
                sum += parts[turn][team * S::TEAM + t];
            turn ^= 1;
        }
        float b = root * root * root * (sum * (1.0f / COLS));
        int64_t at = (int64_t)row * COLS + first_col + lane * LANE;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if constexpr (SUMS && sizeof(W) == 2)
                as_stored(weight[k]);
            pack<bf16, LANE> pd, px, pa;
            float vd[LANE], vx[LANE], vw[LANE], va[LANE] = {0};
            pd.w[0] = from[k * WARP];
            px.w[0] = from[TENSOR + k * WARP];
            pd.get(vd);
            px.get(vx);
            weight[k].get(vw);
            if (add) {
                pa.w[0] = from[2 * TENSOR + k * WARP];
                pa.get(va);
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
            px.set(vx);
            px.store(dx + at + k * WARP * LANE);
            if constexpr (SUMS) {
                px.get(vx); /* as it is stored */
#pragma unroll
                for (int i = 0; i < LANE; i++)
                    sum_dx[k][i] += vx[i];
            }
        }
        if constexpr (S::ENGINE)
            __syncwarp(); /* all lanes have read this stage */
        ask(stage, row + S::STAGES * step);
        root = next_root;
        if (++stage == S::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    copy_wait<0>();
    /* The teams' sums, in order, by way of the ring. */
    auto leave = [&](const float(&mine)[PACKS][LANE], float *to) {
        float *all = (float *)row_words;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            pack<float, LANE> p;
            p.set(mine[k]);
            p.store(all + team * COLS + first_col + k * WARP * LANE + lane * LANE);
        }
        __syncthreads();
        for (int col = threadIdx.x * 4; col < COLS; col += S::WARPS * WARP * 4) {
            float4 total = *(const float4 *)(all + col);
#pragma unroll
            for (int v = 1; v < S::TEAMS; v++) {
                float4 one = *(const float4 *)(all + v * COLS + col);
                total.x += one.x;
                total.y += one.y;
                total.z += one.z;
                total.w += one.w;
            }
            *(float4 *)(to + (int64_t)blockIdx.x * COLS + col) = total;
        }
    };
    static_assert(S::TEAMS * COLS * (int)sizeof(float) <= S::WARPS * S::STAGES * STAGE * 16, "the ring holds a sum of each team");
    if (partial)
        leave(dw, partial);
    if constexpr (SUMS)
        leave(sum_dx, sums);
}

/* f(shape) for way `way` and rows of `cols` columns; false where there is no kernel. */
template <class F> bool with_norm_shape(int way, int64_t cols, F f)
{
    auto one_of = [&](auto one, auto two, auto three, auto four) {
        switch (way) {
        case 1: f(one); return true;
        case 2: f(two); return true;
        case 3: f(three); return true;
        case 4: f(four); return true;
        default: return false;
        }
    };
    switch (cols) {
    case 1024: return one_of(norm_shape<1, 4, 4, 2, 2>{}, norm_shape<1, 4, 8, 3, 1>{}, norm_shape<4, 1, 8, 5, 2>{}, norm_shape<1, 4, 8, 3, 1, true>{});
    case 1280: return one_of(norm_shape<1, 5, 4, 3, 2>{}, norm_shape<1, 5, 8, 3, 1>{}, norm_shape<5, 1, 10, 6, 2>{}, norm_shape<1, 5, 8, 3, 1, true>{});
    case 2048: return one_of(norm_shape<2, 4, 8, 2, 2>{}, norm_shape<2, 4, 8, 4, 1>{}, norm_shape<2, 4, 6, 3, 2>{}, norm_shape<2, 4, 8, 4, 1, true>{});
    default: return false;
    }
}

#endif
