/* What only Hopper (sm_90a) has, as functions: tiles that the copy engine brings to shared memory, barriers that count its
 * bytes, and products of 64 rows by a warpgroup, a team of four warps.
 *
 * A tile is rows of at most 128 bf16 in panels of 64 columns: [panels][rows][64], a row of a panel being 128 bytes, whose
 * 16-byte pieces are permuted: piece p of row r lies at p ^ r % 8. Tiles begin at multiples of 1024 bytes. Both engines know
 * this order as the 128-byte swizzle; the same tile serves products over its columns and products over its rows.
 *
 * Without sm_90a there is only the host's part; kernels are empty and must not be launched. */
#ifndef VLAI_HOPPER_CUH
#define VLAI_HOPPER_CUH

#include "kernels/attention.cuh"

#include <cudaTypedefs.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VLAI_HOPPER 1
#endif

enum { TEAM = 128 /* threads */, TEAM_ROWS = 64 /* of a team's product */, PANEL = 64 /* columns */, PANEL_BYTES = 128 /* of a row */ };

/* Panels of a row of `columns`. */
constexpr int panels_of(int columns)
{
    return (columns + PANEL - 1) / PANEL;
}

constexpr int tile_bytes(int columns, int rows)
{
    return panels_of(columns) * rows * PANEL_BYTES;
}

/* A tensor [rows][heads][dim] of bf16 whose rows are `stride` elements apart, of which a tile takes `box_heads` heads of
 * `box_rows` rows; the tile's rows are ordered by row, then head. What lies outside reads as zeros. */
static inline int tensor_map_make(CUtensorMap *map, const void *data, int64_t rows, int heads, int dim, int64_t stride, int box_heads,
                                  int box_rows)
{
    static PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
        void *f = nullptr;
        cudaDriverEntryPointQueryResult found;
        return cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) ||
                       found != cudaDriverEntryPointSuccess
                   ? (PFN_cuTensorMapEncodeTiled_v12000) nullptr
                   : (PFN_cuTensorMapEncodeTiled_v12000)f;
    }();
    if (!encode)
        return (int)cudaErrorNotSupported;
    const cuuint64_t shape[3] = {(cuuint64_t)dim, (cuuint64_t)heads, (cuuint64_t)rows}, strides[2] = {(cuuint64_t)dim * 2, (cuuint64_t)stride * 2};
    const cuuint32_t box[3] = {PANEL, (cuuint32_t)box_heads, (cuuint32_t)box_rows}, steps[3] = {1, 1, 1};
    CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void *>(data), shape, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? 0 : (int)cudaErrorInvalidValue;
}

#ifdef VLAI_HOPPER

/* By one thread: a tile of a tensor from row `row` and head `head` on; `rows`: of the tile. */
template <int COLUMNS> __device__ inline void tile_load(unsigned char *to, const CUtensorMap *map, int rows, int head, int row, uint64_t *full)
{
#pragma unroll
    for (int p = 0; p < panels_of(COLUMNS); p++)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                         shared_address(to + p * rows * PANEL_BYTES)),
                     "l"(map), "r"(shared_address(full)), "r"(p * PANEL), "r"(head), "r"(row)
                     : "memory");
}

/* What threads wrote to shared memory before is seen by products and copies that follow. */
__device__ inline void shared_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* All threads of team `team` of a block come here. */
__device__ inline void team_wait(int team)
{
    asm volatile("bar.sync %0, 128;" ::"r"(team + 1) : "memory");
}

__device__ inline unsigned char *tile_piece(unsigned char *tile, int rows, int row, int piece)
{
    return tile + (piece / 8 * rows + row) * PANEL_BYTES + ((piece % 8 ^ row % 8) * 16);
}

/* Products: registers that follow are as they are in memory; the batch so far; until at most PENDING batches run. */
__device__ inline void product_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void product_end()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ inline void product_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* The compiler has x in registers at this place: before product_begin, what it computed there; after a wait, what products left. */
template <int N> __device__ inline void product_take(float (&x)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("" : "+f"(x[j][e])::"memory");
}

template <int N> __device__ inline void product_take(uint32_t (&x)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("" : "+r"(x[j][e])::"memory");
}

/* x [64][N], held as `multiply` holds its c: lane l of warp w has rows 16 w + l / 4 and 8 more, columns 8 j + 2 (l % 4) and the
 * next. first: x = a b^T; shared: x += a b^T, a [64][16], b [N][16] as they lie; registers: x += a b, b [16][N] as it lies;
 * first_registers: x = a b. */
template <int N> struct wide_product;

#define FOUR(x, j) "+f"(x[j][0]), "+f"(x[j][1]), "+f"(x[j][2]), "+f"(x[j][3])
#define FOUR_NEW(x, j) "=f"(x[j][0]), "=f"(x[j][1]), "=f"(x[j][2]), "=f"(x[j][3])

template <> struct wide_product<16> {
    __device__ static void first_registers(float (&x)[2][4], const uint32_t (&a)[4], uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7}, "
                     "{%8,%9,%10,%11}, %12, p, 1, 1, 1;}"
                     : FOUR_NEW(x, 0), FOUR_NEW(x, 1)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }

    __device__ static void registers(float (&x)[2][4], const uint32_t (&a)[4], uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7}, "
                     "{%8,%9,%10,%11}, %12, p, 1, 1, 1;}"
                     : FOUR(x, 0), FOUR(x, 1)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <> struct wide_product<32> {
    __device__ static void first(float (&x)[4][4], uint64_t a, uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                     "%16, %17, p, 1, 1, 0, 0;}"
                     : FOUR_NEW(x, 0), FOUR_NEW(x, 1), FOUR_NEW(x, 2), FOUR_NEW(x, 3)
                     : "l"(a), "l"(b));
    }

    __device__ static void shared(float (&x)[4][4], uint64_t a, uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                     "%16, %17, p, 1, 1, 0, 0;}"
                     : FOUR(x, 0), FOUR(x, 1), FOUR(x, 2), FOUR(x, 3)
                     : "l"(a), "l"(b));
    }
};

template <> struct wide_product<64> {
    __device__ static void first(float (&x)[8][4], uint64_t a, uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "%32, %33, p, 1, 1, 0, 0;}"
                     : FOUR_NEW(x, 0), FOUR_NEW(x, 1), FOUR_NEW(x, 2), FOUR_NEW(x, 3), FOUR_NEW(x, 4), FOUR_NEW(x, 5), FOUR_NEW(x, 6), FOUR_NEW(x, 7)
                     : "l"(a), "l"(b));
    }

    __device__ static void shared(float (&x)[8][4], uint64_t a, uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "%32, %33, p, 1, 1, 0, 0;}"
                     : FOUR(x, 0), FOUR(x, 1), FOUR(x, 2), FOUR(x, 3), FOUR(x, 4), FOUR(x, 5), FOUR(x, 6), FOUR(x, 7)
                     : "l"(a), "l"(b));
    }

    __device__ static void first_registers(float (&x)[8][4], const uint32_t (&a)[4], uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "{%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                     : FOUR_NEW(x, 0), FOUR_NEW(x, 1), FOUR_NEW(x, 2), FOUR_NEW(x, 3), FOUR_NEW(x, 4), FOUR_NEW(x, 5), FOUR_NEW(x, 6), FOUR_NEW(x, 7)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }

    __device__ static void registers(float (&x)[8][4], const uint32_t (&a)[4], uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "{%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                     : FOUR(x, 0), FOUR(x, 1), FOUR(x, 2), FOUR(x, 3), FOUR(x, 4), FOUR(x, 5), FOUR(x, 6), FOUR(x, 7)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <> struct wide_product<80> {
    __device__ static void registers(float (&x)[10][4], const uint32_t (&a)[4], uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                     "%32,%33,%34,%35,%36,%37,%38,%39}, "
                     "{%40,%41,%42,%43}, %44, p, 1, 1, 1;}"
                     : FOUR(x, 0), FOUR(x, 1), FOUR(x, 2), FOUR(x, 3), FOUR(x, 4), FOUR(x, 5), FOUR(x, 6), FOUR(x, 7),
                       FOUR(x, 8), FOUR(x, 9)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <> struct wide_product<128> {
    __device__ static void registers(float (&x)[16][4], const uint32_t (&a)[4], uint64_t b)
    {
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                     "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                     "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                     "{%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
                     : FOUR(x, 0), FOUR(x, 1), FOUR(x, 2), FOUR(x, 3), FOUR(x, 4), FOUR(x, 5), FOUR(x, 6), FOUR(x, 7),
                       FOUR(x, 8), FOUR(x, 9), FOUR(x, 10), FOUR(x, 11), FOUR(x, 12), FOUR(x, 13), FOUR(x, 14), FOUR(x, 15)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

#undef FOUR
#undef FOUR_NEW

/* panel: bytes from panel to panel, where rows are summed over. */
__device__ inline uint64_t tile_descriptor(const unsigned char *tile, int panel)
{
    return (uint64_t)(shared_address(tile) >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(8 * PANEL_BYTES >> 4) << 32 | (uint64_t)1 << 62;
}

/* x [64][N] = a b^T, sums over the COLUMNS of tiles of 64 and N rows. */
template <int COLUMNS, int N> __device__ inline void tile_scores(float (&x)[N / 8][4], const unsigned char *a, const unsigned char *b)
{
    uint64_t at_a = tile_descriptor(a, 16), at_b = tile_descriptor(b, 16);
    wide_product<N>::first(x, at_a, at_b);
#pragma unroll
    for (int k = 1; k < COLUMNS / 16; k++)
        wide_product<N>::shared(x, at_a + (k / 4 * TEAM_ROWS * PANEL_BYTES + k % 4 * 32) / 16, at_b + (k / 4 * N * PANEL_BYTES + k % 4 * 32) / 16);
}

/* acc [64][COLUMNS] += p b, sums over the N rows of b. */
template <int COLUMNS, int N>
__device__ inline void tile_product(float (&acc)[COLUMNS / 8][4], const uint32_t (&p)[N / 16][4], const unsigned char *b)
{
    uint64_t at = tile_descriptor(b, N * PANEL_BYTES);
#pragma unroll
    for (int k = 0; k < N / 16; k++)
        wide_product<COLUMNS>::registers(acc, p[k], at + k * 16 * PANEL_BYTES / 16);
}

#endif
#endif
