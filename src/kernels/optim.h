/* Many tensors in one launch: the sum_squares or adamw nodes of an update that stand side by side.
 *
 *     size_t bytes = vlai_optim_table_bytes(calls, n);                        // plan time: n calls of one operation
 *     vlai_optim_launch_plan plan;
 *     VLA_TRY(vlai_optim_table_fill(calls, n, host, bytes, &plan, err));      // then copy `bytes` bytes to the device once
 *     int code = vlai_optim_launch(device, &plan, stream);                    // every step; only enqueues
 *
 * The table names each tensor and cuts it into chunks; one kernel per combination of element types goes through the chunks,
 * the blocks in any order. adamw is element by element, so its bits are those of one launch per tensor. sum_squares leaves
 * one fp64 partial sum per chunk in the table's own scratch and a last launch adds each tensor's in order: also the bits of
 * one launch per tensor. The calls' pointers are frozen into the table: it is made again when operands move. */
#ifndef VLAI_OPTIM_H
#define VLAI_OPTIM_H

#include "kernels/cuda.h"
#include "vla/error.h"

VLA_BEGIN_DECLS

enum { VLAI_OPTIM_CHUNK = 32768, VLAI_OPTIM_PARTS = 16 };

/* Chunks of one combination of element types. */
typedef struct vlai_optim_part {
    vla_dtype weight, gradient, moment; /* sum_squares: gradient alone */
    int masters, stochastic;            /* low bits beside bf16 weights; rounding of all three */
    uint32_t first, chunks;
} vlai_optim_part;

/* What a launch needs beside the table; plain data, by value. */
typedef struct vlai_optim_launch_plan {
    vlai_op op;
    uint32_t tensors, parts;
    vlai_optim_part part[VLAI_OPTIM_PARTS];
    size_t chunks_at, scratch_at;  /* bytes into the table; records of tensors stand at 0 */
    const double *hyper, *clip;    /* device; adamw */
    double *norms;                 /* device; sum_squares */
} vlai_optim_launch_plan;

/* 0 for an operation that has no grouped form. */
size_t vlai_optim_table_bytes(const vlai_cuda_call *calls, size_t n);
/* Fills `bytes` bytes of host memory, as many as vlai_optim_table_bytes said. Refuses calls of several operations, and
 * calls that do not share hyper, clip and norms. */
vla_status vlai_optim_table_fill(const vlai_cuda_call *calls, size_t n, void *host, size_t bytes, vlai_optim_launch_plan *plan,
                                 vla_error *err);
/* `table`: device memory of the table's bytes, 256-byte aligned; its scratch is written. */
int vlai_optim_launch(void *table, const vlai_optim_launch_plan *plan, void *stream);

VLA_END_DECLS

#endif
