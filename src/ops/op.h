/* What ops.def expands to: the table of operations and the signatures of their parts. */
#ifndef VLAI_OP_H
#define VLAI_OP_H

#include "graph/graph.h"

VLA_BEGIN_DECLS

typedef enum vlai_op_kind { VLAI_OP_DIFF, VLAI_OP_LEAF, VLAI_OP_GRAD, VLAI_OP_FUSED } vlai_op_kind;

typedef struct vlai_shape {
    vla_dtype dtype;
    int rank;
    int64_t dim[VLA_MAX_RANK];
} vlai_shape;

/* Fills n_outputs shapes. `attrs` may be completed (a result type left 0 takes the operand's). */
typedef vla_status (*vlai_infer_fn)(const vla_graph *g, vlai_node *node, vlai_shape *out, vla_error *err);
/* Builds the gradients of the operands. dy[k] is the gradient of output k (VLA_NONE: zero); need[i] says that operand i
 * wants one; dx[i] stays VLA_NONE where there is none. */
typedef void (*vlai_vjp_fn)(vla_graph *g, const vlai_node *node, const vla_value *dy, const bool *need, vla_value *dx);

typedef struct vlai_cost {
    double flops;     /* multiply-add = 2; 0 for what moves or touches elements only */
    double bytes;     /* read + written, each operand once */
    size_t workspace; /* bytes of scratch that the CPU kernel wants, shared by its tiles */
    size_t workspace_per_thread;
} vlai_cost;
typedef void (*vlai_cost_fn)(const vla_graph *g, const vlai_node *node, vlai_cost *cost);

struct vlai_cpu_call;
typedef void (*vlai_cpu_fn)(const struct vlai_cpu_call *call);

typedef struct vlai_op_info {
    const char *name;
    int8_t inputs_min, inputs_max, outputs;
    vlai_op_kind kind;
    uint32_t writes;
    vlai_infer_fn infer;
    vlai_vjp_fn vjp; /* NULL unless DIFF */
    vlai_cost_fn cost;
    vlai_cpu_fn cpu_float, cpu_double;
} vlai_op_info;

extern const vlai_op_info vlai_ops[VLAI_OP_COUNT];

#define VLA_OP(name, lo, hi, outs, kind, writes)                                                           \
    vla_status vlai_infer_##name(const vla_graph *g, vlai_node *node, vlai_shape *out, vla_error *err);    \
    void vlai_vjp_##name(vla_graph *g, const vlai_node *node, const vla_value *dy, const bool *need,       \
                         vla_value *dx);                                                                   \
    void vlai_cost_##name(const vla_graph *g, const vlai_node *node, vlai_cost *cost);                     \
    void vlai_cpu_##name##_float(const struct vlai_cpu_call *call);                                        \
    void vlai_cpu_##name##_double(const struct vlai_cpu_call *call);
#include "ops/ops.def"
#undef VLA_OP

VLA_END_DECLS

#endif
