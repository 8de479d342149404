/* The CPU kernels: the readable reference that every other device is tested against.
 *
 * Each kernel is written once, in terms of `real`, and compiled for float and for double (cpu/instantiate.h). Floating
 * operands of a call are all `real`: the executor widens bf16 operands before the call and rounds results after it.
 * Integers are int32_t, pictures uint8_t; rstd, lse, loss and count results are `real` too. Raw ops (vlai_op_is_raw in
 * exec/plan.h) are the exception: copy, accumulate, sum_squares, clip_factor, adamw, bucket, part and collectives take operands as stored
 * and look at its dtype (F32, F64 or BF16 for parameters, gradients and moments; F64 for norms and hyper; U16 for the low bits).
 *
 * Work is cut into tiles by shape alone and shared out by the pool, so that bits do not depend on the thread count; sums
 * run in a fixed order. A kernel allocates nothing: scratch comes from the call, as large as the op's cost row asked. */
#ifndef VLAI_CPU_H
#define VLAI_CPU_H

#include "base/pool.h"
#include "ops/op.h"

VLA_BEGIN_DECLS

typedef struct vlai_cpu_tensor {
    void *data; /* NULL for an optional operand left out, and for a result that nobody wants */
    vla_dtype dtype; /* of the stored value, before widening: tells bf16 kernels where to round inside */
    int rank;
    int64_t shape[VLA_MAX_RANK];
    int64_t elements;
} vlai_cpu_tensor;

typedef struct vlai_cpu_call {
    const vlai_node *node; /* attributes */
    vlai_cpu_tensor in[VLAI_MAX_INPUTS];
    vlai_cpu_tensor out[VLAI_MAX_OUTPUTS];
    vlai_pool *pool;
    void *workspace;        /* 64-byte aligned */
    void *thread_workspace; /* thread t's part starts at t * workspace_per_thread */
    size_t workspace_per_thread;
    struct vlai_comm *comm; /* collectives of more than one rank */
} vlai_cpu_call;

VLA_END_DECLS

#endif
