/* What the attention kernels share: the problem, the spans of queries, and the tensor-core instructions they use.
 *
 * Key j is visible to query i iff cols[j].x <= qpos[i] < cols[j].y, not cols[j].z <= qpos[i] < cols[j].w, and
 * rows[i].first <= j < rows[i].end. A tile's warp asks two questions first: does it see any key of this tile, and does it
 * see all of them? Only tiles in between pay for the mask. */
#ifndef VLAI_ATTENTION_CUH
#define VLAI_ATTENTION_CUH

#include "kernels/async.cuh"
#include "kernels/common.cuh"

struct attention_shape {
    int64_t queries, keys;
    int64_t q_stride, kv_stride, o_stride, dq_stride, dkv_stride; /* elements from row to row: q; k, v; o, do; gradients */
    int heads, kv_heads, group, dim; /* group: query heads per kv head */
    float scale;
    bool vector; /* rows may be read and written in 16-byte words */
    const int32_t *qpos;
    const int2 *rows;
    const int4 *cols;
};

/* The rows of o, or of do: one matrix, or two streams of them between which a map divides (merge_rows). A row has a place: row p
 * of `a` is p, row r of `b` is -1 - r; NOWHERE is that of rows which have none, and is no row of any stream. */
enum { NOWHERE = -(1 << 30), MOST_STREAM_ROWS = 1 << 30 };
template <class T> struct row_streams {
    T *a, *b;           /* NULL: nobody wants it */
    const int32_t *map; /* NULL: rows lie in their order in a */
    int rows_a, rows_b;

    __device__ int place(int64_t row) const
    {
        int p = map ? map[row] : (int)row;
        return (p >= 0 ? a && p < rows_a : b && -1 - p < rows_b) ? p : NOWHERE;
    }
    /* Of rows that have a place; stride: elements from row to row. */
    __device__ T *at(int place, int64_t stride) const
    {
        return place >= 0 ? a + place * stride : b + (-1 - place) * stride;
    }
};

/* One call: operands and results where they lie. A result is NULL when nobody wants it. Forward writes o and lse, backward
 * reads them; both are contiguous. With a map, o and do are the rows of stream a, o_b and dy_b those of stream b. */
struct attention_task {
    attention_shape shape;
    vla_dtype dtype; /* of all but lse */
    vla_attention_mask mask;
    int64_t longest; /* rows of the longest segment, 0 when unknown */
    const void *dy, *q, *k, *v, *dy_b;
    void *o, *dq, *dk, *dv, *o_b;
    bool backward;
    const int32_t *map;     /* NULL: one stream, a */
    int64_t rows_a, rows_b; /* of the streams */
    float *lse; /* [Nq, heads] */
    const int32_t *segments; /* [n_segments + 1], or NULL */
    int64_t n_segments;
    cudaStream_t stream;
    void *workspace;
    size_t workspace_bytes;
    const void *plan; /* cuDNN's, or NULL */
};

/* Of 32 neighbouring queries: positions, and least and greatest ends of their spans of keys. Queries that see nothing, or
 * lie past the end, count for first_max and end_min alone, which they keep from claiming that all is visible. */
struct query_tile {
    int q_min, q_max, first_min, end_max;
    int first_max, end_min, unused[2];
};

enum { TILE_QUERIES = 32 };

#define LOG2E 1.44269504088896340736f
#define LN2 0.69314718055994530942f

__device__ inline int2 key_span(const attention_shape &s, int64_t i)
{
    int2 span = make_int2(0, 0);
    if (i < s.queries) {
        span = s.rows[i];
        span.x = span.x < 0 ? 0 : span.x;
        span.y = span.y > s.keys ? (int)s.keys : span.y;
        if (span.y <= span.x)
            span = make_int2(0, 0);
    }
    return span;
}

__device__ inline bool visible(int q, int2 span, int key, const int4 &c)
{
    return (q >= c.x) & (q < c.y) & !((q >= c.z) & (q < c.w)) & (key >= span.x) & (key < span.y);
}

/* A hole that no query of [q_min, q_max] falls into. */
__device__ inline bool no_hole(const int4 &c, int q_min, int q_max)
{
    return c.z >= c.w || c.w <= q_min || c.z > q_max;
}

/* 2^x by the hardware (2^-22 relative); 2^-inf = 0. */
__device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Four 8x8 tiles of bf16 from shared memory; lane l gives the address of row l % 8 of tile l / 8. */
__device__ inline void load_fragments(uint32_t (&r)[4], const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void load_fragments_transposed(uint32_t (&r)[4], const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* c [16,8] += a [16,16] b [16,8]. Lane l holds of c: row l/4, columns 2(l%4), +1, and the same 8 rows below. */
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack_pair(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

#endif
