/* Which of several kernels that do the same a launcher takes. What a step runs stands in ways.c; bench/gpu/gpu_kernels.c
 * and tests/gpu/test_cuda_ops.c go through all of them. Results of different ways differ by roundings of fp32 alone. */
#ifndef VLAI_WAYS_H
#define VLAI_WAYS_H

#ifdef __cplusplus
extern "C" {
#endif

/* norm_backward: of bf16 rows of 1024, 1280 or 2048 columns. 0: a block per row; then a warp per row, blocks of
 *                 1: 4 warps, 3 rows ahead (2 at 2048), two blocks a multiprocessor   2: 8 warps, one block
 *                 3: 6 warps, 2 rows ahead, two blocks (2048: 3 warps)                4: as 2, rows by the copy engine
 * rope_sums:     of bf16. 0: strips of columns; then whole rows, whose next ones are in shared memory,
 *                 1: 3 rows a block at once, 5 turns, one block a multiprocessor      2: 4 rows, 4 turns
 *                 3: 2 rows, 4 turns, two blocks
 * totals:        groups that share the partial sums of a column: 0: 8, 1: 32
 * gelu:          to bf16, and its gradient. 0: erff, 1: a polynomial (elementwise.cu)
 * scatter:       scatter_add_rows, where most rows of the result get nothing. 0: it is written by one kernel, 1: it is cleared, and
 *                 then written where there is something */
enum { VLAI_WAYS_NORM_BACKWARD = 5, VLAI_WAYS_ROPE_SUMS = 4, VLAI_WAYS_TOTALS = 2, VLAI_WAYS_GELU = 2, VLAI_WAYS_SCATTER = 2 };

typedef struct vlai_cuda_ways {
    int norm_backward, rope_sums, totals, gelu, scatter;
} vlai_cuda_ways;

extern vlai_cuda_ways vlai_cuda_way;

#ifdef __cplusplus
}
#endif

#endif
