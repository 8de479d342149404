#include "ops/op.h"

/* The VJP column is filled for differentiable rows only, so the others need no such function. */
#define VJP_DIFF(name) vlai_vjp_##name
#define VJP_LEAF(name) NULL
#define VJP_GRAD(name) NULL
#define VJP_FUSED(name) NULL

const vlai_op_info vlai_ops[VLAI_OP_COUNT] = {
#define VLA_OP(name, lo, hi, outs, kind, writes)                                                              \
    [VLAI_OP_##name] = {#name, lo, hi, outs, VLAI_OP_##kind, writes, vlai_infer_##name, VJP_##kind(name),     \
                        vlai_cost_##name, vlai_cpu_##name##_float, vlai_cpu_##name##_double},
#include "ops/ops.def"
#undef VLA_OP
};

_Static_assert(sizeof vlai_ops / sizeof *vlai_ops == VLAI_OP_COUNT, "one row per op");
