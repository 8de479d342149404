/* Small things that every kernel family uses: how work is cut into tiles, and how sums are taken.
 *
 *     static void L(scale_tile)(void *context, int64_t tile, int thread)
 *     {
 *         const vlai_cpu_call *call = context;
 *         vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS, call->out[0].elements);
 *         for (int64_t i = span.first; i < span.end; i++) ...
 *     }
 *
 * Tile sizes depend on shapes alone: a problem too small to be worth waking a thread is one tile. */
#ifndef VLAI_CPU_KERNEL_H
#define VLAI_CPU_KERNEL_H

#include "base/bf16.h"
#include "cpu/cpu.h"

#include <math.h>
#include <string.h>

/* Hot loops are compiled twice, for the baseline and for AVX2, and picked at load time. Contraction to fused
 * multiply-add is off, so both give the same bits. Sanitizers do not run before the loader's choice, hence not there. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&          \
    !defined(__SANITIZE_THREAD__)
#define VLAI_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define VLAI_CLONES
#endif

/* Sharing a job costs a few microseconds: a tile is at least ten of one core's. */
enum {
    VLAI_TILE_ELEMENTS = 131072, /* elements of one tile of a kernel that moves or adds; 1/COST of that for dearer ones */
    VLAI_TILE_UPDATE = 32768,    /* elements of one tile of the optimiser */
    VLAI_CHUNK_ROWS = 512,       /* rows of one partial sum over rows */
    VLAI_CHUNK_ELEMENTS = 65536  /* elements of one partial sum over a whole tensor */
};

typedef struct vlai_span {
    int64_t first, end;
} vlai_span;

static inline int64_t vlai_tiles(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

static inline vlai_span vlai_span_of(int64_t tile, int64_t size, int64_t n)
{
    int64_t first = tile * size;
    return (vlai_span){first, n - first < size ? n : first + size};
}

/* Rows per tile when each row touches `cost` elements. */
static inline int64_t vlai_tile_rows(int64_t cost)
{
    int64_t rows = VLAI_TILE_ELEMENTS / (cost > 0 ? cost : 1);
    return rows < 1 ? 1 : rows;
}

static inline int64_t vlai_rows(const vlai_cpu_tensor *t)
{
    return t->shape[0];
}

static inline int64_t vlai_cols(const vlai_cpu_tensor *t)
{
    return t->rank > 1 ? t->shape[1] : 1;
}

static inline void vlai_run(const vlai_cpu_call *call, int64_t tiles, vlai_tile_fn fn)
{
    vlai_pool_run(call->pool, tiles, fn, (void *)call);
}

static inline void *vlai_thread_scratch(const vlai_cpu_call *call, int thread)
{
    return (char *)call->thread_workspace + (size_t)thread * call->workspace_per_thread;
}

/* sums [C] of x [N,C] over its rows, as they are stored: a bf16 result of the call is rounded first. Workspace as col_sum.
 * result_sums: those that vlai_sums_at names. */
void vlai_cpu_column_sums_float(const vlai_cpu_call *call, const vlai_cpu_tensor *x, void *sums);
void vlai_cpu_column_sums_double(const vlai_cpu_call *call, const vlai_cpu_tensor *x, void *sums);
void vlai_cpu_result_sums_float(const vlai_cpu_call *call);
void vlai_cpu_result_sums_double(const vlai_cpu_call *call);

/* Data of result k; NULL when nobody wants it, and where there are only column sums. */
static inline void *vlai_result(const vlai_cpu_call *call, int k)
{
    return k < vlai_plain_outputs(call->node) ? call->out[k].data : NULL;
}

static inline float vlai_round_bf16(float x)
{
    return vlai_bf16_to_float(vlai_bf16_from_float(x));
}

/* result = sum over i in 0..n-1 of `term` (an expression of i), in double or another type. Eight
 * running sums, added pairwise at the end: the order is fixed by n. */
#define VLAI_SUM(result, n, term) VLAI_SUM_AS(double, result, n, term)
#define VLAI_SUM_AS(type, result, n, term)                                                                       \
    do {                                                                                                         \
        type lane_[8] = {0};                                                                                     \
        int64_t n_ = (n), base_ = 0;                                                                             \
        for (; base_ + 8 <= n_; base_ += 8)                                                                      \
            for (int l_ = 0; l_ < 8; l_++) {                                                                     \
                int64_t i = base_ + l_;                                                                          \
                lane_[l_] += (type)(term);                                                                       \
            }                                                                                                    \
        for (int l_ = 0; base_ < n_ && l_ < 8; base_++, l_++) {                                                  \
            int64_t i = base_;                                                                                   \
            lane_[l_] += (type)(term);                                                                           \
        }                                                                                                        \
        result = ((lane_[0] + lane_[1]) + (lane_[2] + lane_[3])) + ((lane_[4] + lane_[5]) + (lane_[6] + lane_[7])); \
    } while (0)

/* exp in single precision as straight-line code that vectorises: exp(x) = 2^n exp(r), |r| <= ln2/2, exp(r) by its
 * Taylor series to r^7/7! (remainder below 2^-29). Within 2 ulp of exp; results below 2^-125 may be 0;
 * infinities and NaN as exp. */
static inline float vlai_expf(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    float t = x * 1.44269504f + shift;
    uint32_t bits;
    memcpy(&bits, &t, 4);
    float n = t - shift;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f; /* ln2 = 355/512 - 2.1219444e-4, the first part exact */
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    /* 2^n as 2 * 2^(n-1), so that n = 128 (x near 88.7) still has a factor in range. */
    uint32_t factor_bits = (bits + 126u) << 23;
    float factor;
    memcpy(&factor, &factor_bits, 4);
    float y = p * factor * 2.0f;
    y = x > 88.7228394f ? INFINITY : y;
    return x < -87.3365479f ? 0.0f : y;
}

#endif
