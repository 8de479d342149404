/* The plan's inside: the graph after its passes, and where every value lives. */
#ifndef VLAI_PLAN_H
#define VLAI_PLAN_H

#include "graph/graph.h"
#include "pass/communicate.h"
#include "pass/fuse.h"
#include "pass/pass.h"

struct vla_plan {
    vla_graph *graph;
    vla_plan_options options;
    size_t fused[VLAI_FUSE_COUNT]; /* rewrites of each pattern */
    vlai_comm_order order; /* of the collectives of an update of several ranks */
    vlai_memory memory;
    vla_plan_memory bytes;
    size_t workspace;            /* largest shared scratch of any node */
    size_t workspace_per_thread; /* largest per-thread scratch of any node */
    size_t widen;                /* fp32 copies of bf16 operands and results of the largest node (CPU) */
    double flops;
    double traffic; /* bytes that nodes read and write, each operand once; collectives are not counted */
    size_t collectives, reduced, gathered; /* how many; bytes of the buckets that one execution reduces and gathers */
};

/* Operators that read and write stored types as they are (no widening): the optimiser's, plain copies, and collectives. */
static inline bool vlai_op_is_raw(vlai_op op)
{
    return op == VLAI_OP_copy || op == VLAI_OP_accumulate || op == VLAI_OP_sum_squares || op == VLAI_OP_clip_factor ||
           op == VLAI_OP_adamw || op == VLAI_OP_bucket || op == VLAI_OP_part || vlai_op_is_collective(op);
}

#endif
