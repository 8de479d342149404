/* rms_norm_backward of bf16 rows of 1024 or 1280 columns: a warp per row. A lane has 8 neighbouring columns of each 256, so that
 * nothing but the one sum of a row passes between threads, and no barrier is met until the rows are done. Each warp goes down rows
 * of its own; the copy engine brings the next ones to the warp's part of shared memory. Sums of dw and of dx stay in registers; the
 * block's warps add them in order, and each block leaves one row of partial sums.
 *
 * A thread per 8 columns spends as many instructions on addresses, barriers and the sum of the row as on its columns
 * (370 in all, by its SASS): 35 us of a tower's norm at 1.7 GHz, whatever memory does. Here they are shared by 40 columns.
 * Measured on an H200: [16848,1280] with sums 48 us, 1.14 of a copy as long; 57 us by a thread per 8 columns.
 *
 * Compiled for less than 9.0 the kernel is empty and must not be launched. */
#ifndef VLAI_NORM_ROWS_CUH
#define VLAI_NORM_ROWS_CUH

#include "kernels/async.cuh"

enum { ROW_WARPS = 8 /* of a block */, ROW_STAGES = 3 /* rows that a warp has in shared memory */ };

/* Dynamic shared memory of a block: of each warp three parts of rows a stage, and its barriers. PACKS: of a lane. */
template <int PACKS> constexpr int norm_rows_bytes()
{
    return ROW_WARPS * ROW_STAGES * (3 * PACKS * WARP * 16 + 8);
}

/* As many blocks as are resident on 132 multiprocessors, and a row for each warp. */
static inline int64_t norm_rows_blocks(int64_t rows)
{
    int64_t most = (rows + ROW_WARPS - 1) / ROW_WARPS;
    return most < 132 ? most : 132;
}

#ifdef VLAI_COPY_ENGINE
/* The compiler does not know what is in these words, nor in memory, from here on. */
template <class T> __device__ inline void as_stored(pack<T, 8> &p)
{
#pragma unroll
    for (int i = 0; i < pack<T, 8>::WORDS; i++)
        asm volatile("" : "+r"(p.w[i].x), "+r"(p.w[i].y), "+r"(p.w[i].z), "+r"(p.w[i].w)::"memory");
}
#endif

/* partial, sums [blocks, C]: of dw and, if SUMS, of dx over a block's rows; partial, y, w, add: NULL when there is none. dx may
 * lie over dy or add: the rows ahead are others. */
template <class W, int PACKS, bool SUMS>
__global__ void __launch_bounds__(ROW_WARPS * WARP, 1)
    norm_rows_kernel(const bf16 *dy, const bf16 *x, const float *rstd, const W *w, const bf16 *add, bf16 *dx, bf16 *y, float *partial, float *sums,
                     int rows)
{
#ifdef VLAI_COPY_ENGINE
    enum { LANE = 8, COLS = PACKS * WARP * LANE, TENSOR = PACKS * WARP /* words */, STAGE = 3 * TENSOR };
    extern __shared__ uint4 row_words[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, step = gridDim.x * ROW_WARPS;
    uint4 *ring = row_words + warp * ROW_STAGES * STAGE;
    uint64_t *full = (uint64_t *)(row_words + ROW_WARPS * ROW_STAGES * STAGE) + warp * ROW_STAGES;
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
    if (lane == 0) {
        for (int s = 0; s < ROW_STAGES; s++)
            full_init(full + s, 1);
        full_init_done();
    }
    __syncwarp();
    auto ask = [&](int stage, int row) {
        if (lane == 0 && row < rows) {
            uint4 *to = ring + stage * STAGE;
            int64_t at = (int64_t)row * COLS;
            full_expect(full + stage, (add ? 3 : 2) * TENSOR * 16);
            full_copy(to, dy + at, TENSOR * 16, full + stage);
            full_copy(to + TENSOR, x + at, TENSOR * 16, full + stage);
            if (add)
                full_copy(to + 2 * TENSOR, add + at, TENSOR * 16, full + stage);
        }
    };
    int row = blockIdx.x * ROW_WARPS + warp;
#pragma unroll
    for (int s = 0; s < ROW_STAGES; s++)
        ask(s, row + s * step);
    float root = row < rows ? rstd[row] : 0.0f;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (w)
            weight[k].load(w + (k * WARP + lane) * LANE);
        else {
            const float one[LANE] = {1, 1, 1, 1, 1, 1, 1, 1};
            weight[k].set(one);
        }
    }
    int stage = 0, parity = 0;
    for (; row < rows; row += step) {
        float next_root = row + step < rows ? rstd[row + step] : 0.0f, part[PACKS];
        uint4 *from = ring + stage * STAGE + lane;
        full_wait(full + stage, parity);
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
        float b = root * root * root * (sum * (1.0f / COLS));
        int64_t at = (int64_t)row * COLS + lane * LANE;
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
        __syncwarp(); /* all lanes have read this stage */
        ask(stage, row + ROW_STAGES * step);
        root = next_root;
        if (++stage == ROW_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    /* The warps' sums, in order, by way of the ring. */
    auto leave = [&](const float(&mine)[PACKS][LANE], float *to) {
        float *all = (float *)row_words;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            pack<float, LANE> p;
            p.set(mine[k]);
            p.store(all + warp * COLS + (k * WARP + lane) * LANE);
        }
        __syncthreads();
        for (int col = threadIdx.x * 4; col < COLS; col += ROW_WARPS * WARP * 4) {
            float4 total = *(const float4 *)(all + col);
#pragma unroll
            for (int v = 1; v < ROW_WARPS; v++) {
                float4 one = *(const float4 *)(all + v * COLS + col);
                total.x += one.x;
                total.y += one.y;
                total.z += one.z;
                total.w += one.w;
            }
            *(float4 *)(to + (int64_t)blockIdx.x * COLS + col) = total;
        }
    };
    static_assert(COLS * (int)sizeof(float) <= ROW_STAGES * STAGE * 16, "a warp's part of the ring holds a sum");
    if (partial)
        leave(dw, partial);
    if constexpr (SUMS)
        leave(sum_dx, sums);
#endif
}

#endif
