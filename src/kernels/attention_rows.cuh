/* Rows of bf16 operands in shared memory without padding, DP elements each: 16-byte pieces are permuted within a row so that
 * the eight rows that one ldmatrix reads lie in different banks. Head dimensions are padded with zeros to DP. */
#ifndef VLAI_ATTENTION_ROWS_CUH
#define VLAI_ATTENTION_ROWS_CUH

#include "kernels/attention.cuh"

enum { ROWS_BLOCK = 128 }; /* threads of every kernel that uses these */

/* Offset of a 16-byte piece of a row. */
template <int DP> __device__ inline int row_piece(int row, int piece)
{
    constexpr int PIECES = DP / 8, SHARE = PIECES % 8 == 0 ? 8 : PIECES % 4 == 0 ? 4 : 2;
    return row * DP + ((piece ^ (row / (8 / SHARE) % SHARE)) * 8);
}

/* `rows` rows in the background, of which the first `there` exist and the others are zeros. */
template <int DP, int UNROLL = 2> __device__ inline void rows_load(bf16 *to, const bf16 *from, int rows, int there, int64_t stride, int dim)
{
    constexpr int PIECES = DP / 8;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < rows * PIECES; i += ROWS_BLOCK) {
        int row = i / PIECES, piece = i % PIECES;
        bool have = row < there && piece * 8 < dim;
        copy_async<16>(to + row_piece<DP>(row, piece), have ? from + row * stride + piece * 8 : from, have);
    }
}

/* First operand [16][16] from row `row` and piece `piece` on. */
template <int DP> __device__ inline void rows_first(uint32_t (&r)[4], const bf16 *tile, int row, int piece)
{
    int lane = threadIdx.x % WARP;
    load_fragments(r, tile + row_piece<DP>(row + lane % 16, piece + lane / 16));
}

/* Second operand, two 8-wide blocks of n: [n][k] as it lies. */
template <int DP> __device__ inline void rows_second(uint32_t (&r)[4], const bf16 *tile, int n, int piece)
{
    int lane = threadIdx.x % WARP;
    load_fragments(r, tile + row_piece<DP>(n + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
}

/* The same of [k][n]. */
template <int DP> __device__ inline void rows_transposed(uint32_t (&r)[4], const bf16 *tile, int k, int piece)
{
    int lane = threadIdx.x % WARP;
    load_fragments_transposed(r, tile + row_piece<DP>(k + lane % 16, piece + lane / 16));
}

/* Of a tile's scores x [16][8 N] those of row r (of a thread's two) become weights, and the sum goes on. `most`: the row's largest score
 * yet, `top`: that before this tile; shrink is what is summed already has to be multiplied by. scale: of the scores, in powers of 2. */
template <int N>
__device__ __forceinline__ void rows_soften(float (&x)[N][4], int r, float most, float &top, float &sum, float &shrink, float scale)
{
    float base = most == -INFINITY ? 0.0f : most * scale, part = 0;
    shrink = exp2_fast(top * scale - base);
    top = most;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; e++) {
            x[j][e] = exp2_fast(x[j][e] * scale - base);
            part += x[j][e];
        }
    sum = sum * shrink + part;
}

template <int N> __device__ __forceinline__ void rows_shrink(float (&acc)[N][4], const float (&shrink)[2])
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[j][e] *= shrink[e / 2];
}

/* The accumulator x [16][16 K], rounded to bf16, as first operands of products over its columns. */
template <int K> __device__ inline void rows_pack(uint32_t (&p)[K][4], const float (&x)[2 * K][4])
{
#pragma unroll
    for (int k = 0; k < K; k++) {
        p[k][0] = pack_pair(x[2 * k][0], x[2 * k][1]);
        p[k][1] = pack_pair(x[2 * k][2], x[2 * k][3]);
        p[k][2] = pack_pair(x[2 * k + 1][0], x[2 * k + 1][1]);
        p[k][3] = pack_pair(x[2 * k + 1][2], x[2 * k + 1][3]);
    }
}

/* A warp's results, the first `rows` (at most 16) of x, to rows from `to` on, through rows `row`.. of a buffer that no other
 * warp uses by now. */
template <int DP>
__device__ inline void rows_store(bf16 *to, int64_t stride, int dim, bf16 *buffer, int row, int rows, const float (&x)[DP / 8][4],
                                  float factor0, float factor1)
{
    constexpr int PIECES = DP / 8;
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        if (g < rows)
            *reinterpret_cast<uint32_t *>(buffer + row_piece<DP>(row + g, j) + 2 * t) = pack_pair(x[j][0] * factor0, x[j][1] * factor0);
        if (g + 8 < rows)
            *reinterpret_cast<uint32_t *>(buffer + row_piece<DP>(row + g + 8, j) + 2 * t) = pack_pair(x[j][2] * factor1, x[j][3] * factor1);
    }
    __syncwarp();
    for (int i = lane; i < rows * PIECES; i += WARP) {
        int r = i / PIECES, piece = i % PIECES;
        if (piece * 8 < dim)
            *reinterpret_cast<uint4 *>(to + r * stride + piece * 8) = *reinterpret_cast<const uint4 *>(buffer + row_piece<DP>(row + r, piece));
    }
    __syncwarp();
}

/* This thread's half of a row of o, for delta = rowsum(do o): two threads take a row. */
template <int DP> struct row_half {
    uint4 piece[DP / 16];

    __device__ void load(const bf16 *row, bool there, int dim)
    {
        int first = threadIdx.x % 2 * (DP / 16);
#pragma unroll
        for (int i = 0; i < DP / 16; i++)
            piece[i] = there && (first + i) * 8 < dim ? *reinterpret_cast<const uint4 *>(row + (first + i) * 8) : make_uint4(0, 0, 0, 0);
    }

    /* Both threads get the sum over the row `row` of a buffer. */
    __device__ float product(const bf16 *buffer, int row) const
    {
        int first = threadIdx.x % 2 * (DP / 16);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < DP / 16; i++) {
            uint4 other = *reinterpret_cast<const uint4 *>(buffer + row_piece<DP>(row, first + i));
            const __nv_bfloat162 *a = reinterpret_cast<const __nv_bfloat162 *>(&other), *b = reinterpret_cast<const __nv_bfloat162 *>(&piece[i]);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float2 fa = __bfloat1622float2(a[c]), fb = __bfloat1622float2(b[c]);
                sum += fa.x * fb.x + fa.y * fb.y;
            }
        }
        return sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    }
};

#endif
