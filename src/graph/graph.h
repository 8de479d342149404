/* The graph's inside: what passes read and write. Public face: vla/graph.h.
 *
 * Values and nodes are indices into growing arrays. The node list is the execution order: a node stands after the
 * producers of its inputs (vlai_graph_verify). */
#ifndef VLAI_GRAPH_H
#define VLAI_GRAPH_H

#include "base/memory.h"
#include "base/text.h"
#include "vla/graph.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

enum { VLAI_MAX_INPUTS = 12, VLAI_MAX_OUTPUTS = 4 };

/* Operation codes, one per row of ops.def. */
typedef enum vlai_op {
#define VLA_OP(name, ...) VLAI_OP_##name,
#include "ops/ops.def"
#undef VLA_OP
    VLAI_OP_COUNT
} vlai_op;

typedef enum vlai_kind {
    VLAI_TEMP,  /* output of a node */
    VLAI_INPUT, /* filled before each run */
    VLAI_PARAM, /* persistent, by checkpoint name: the compute copy */
    VLAI_STATE, /* persistent, by name: gradients, moments, low bits of masters */
} vlai_kind;

typedef struct vlai_value_info {
    vlai_kind kind;
    vla_dtype dtype; /* may be symbolic before the precision pass */
    int rank;
    int64_t shape[VLA_MAX_RANK];
    int64_t elements;
    const char *name; /* NULL for most temporaries; named temporaries survive until the end of the run */
    int32_t producer; /* node, or -1 */
    bool frozen;      /* PARAM: not trained */
    bool touched;     /* PARAM: the reference's autograd reaches it even where its gradient is exactly zero */
    int32_t layer;    /* region for recompute: -1 none, else the builder's layer when it was made */
    int32_t home;     /* the bucket in whose memory this temporary is made, or VLA_NONE */
    int64_t inside;   /* elements of the bucket before it */
} vlai_value_info;

/* A chain: element-wise operations one after the other, without their results in between. Operands are named by place: 0 to
 * 7 an input of the node, 8 + k the result of step k. `a` has the result's shape, and so has `b`, but for mul_rows: one
 * element a row. The last step is the result. Each step is rounded to its type, as if it had been stored. */
enum { VLAI_CHAIN_INPUTS = 8, VLAI_CHAIN_STEPS = 12 };
typedef struct vlai_chain_step {
    int16_t op; /* vlai_op: add, sub, mul, scale, cast, silu, silu_grad, gelu, gelu_grad, mul_rows */
    int8_t a, b;
    vla_dtype dtype;
    double value; /* factor of scale */
} vlai_chain_step;
typedef struct vlai_chain {
    int n;
    vlai_chain_step steps[VLAI_CHAIN_STEPS];
} vlai_chain;

/* Attributes: one typed struct per family. Unused bytes are zero. */
typedef union vlai_attrs {
    struct { int transpose_a, transpose_b; vla_dtype dtype, sums; } matmul;                     /* of the result; of the sums, or none */
    struct { double value; vla_dtype dtype; int rank; int64_t shape[VLA_MAX_RANK]; } fill;      /* fill, reshape, scale, cast */
    struct { double eps; vla_dtype dtype, sums; int again; } norm;                              /* dtype: of dweight */
    struct { vla_dtype sums; int again; } swiglu;                                               /* swiglu_backward */
    vla_rope_options rope_table;
    struct { int head_dim, inverse, heads; vla_dtype sums[2]; } rope; /* heads: how many of a row's are rotated (qkv_rope) */
    vla_attention_options attention;
    struct { int64_t rows, skip; vla_dtype dtype; } rows; /* gather_rows, scatter_add_rows */
    struct { int64_t first, count; } slice;               /* slice_rows: first, count; pad_rows: first, rows; expand: count */
    struct { int n; int64_t widths[VLAI_MAX_OUTPUTS]; } split;
    struct { int dim; double period; } sinusoid;
    vla_patchify_options patchify;
    struct { double beta1, beta2, eps, weight_decay; uint64_t key; int group, stochastic; int64_t first; } adamw; /* optim/rounding.h; first: of a slice, in the whole tensor */
    vlai_chain chain;
    struct { double max_norm; int64_t index; } clip;      /* sum_squares: index; clip_factor: max_norm, 0 = no clip */
    struct { int rank, world, order, bucket; } comm;      /* collectives; order: which of the plan's this is, from 0; bucket: of the store, or -1 */
} vlai_attrs;

typedef struct vlai_node {
    vlai_op op;
    int32_t inputs[VLAI_MAX_INPUTS]; /* values; VLA_NONE for an optional operand left out */
    int32_t outputs[VLAI_MAX_OUTPUTS];
    int8_t n_inputs, n_outputs;
    bool backward;  /* added by autodiff or after it */
    bool recompute; /* a copy made by the recompute pass */
    int8_t lane;    /* nodes of one lane run in order; a device may run lanes side by side. The backward has the forward's */
    int8_t sms_free; /* multiprocessors that a product leaves to the collectives beside it (pass/beside.c); 0: none */
    int32_t layer;  /* see vlai_value_info.layer; a backward node carries that of the node it differentiates */
    vlai_attrs attrs;
} vlai_node;

struct vla_graph {
    vlai_arena names;
    vlai_value_info *values;
    size_t n_values, cap_values;
    vlai_node *nodes;
    size_t n_nodes, cap_nodes;
    int32_t *gradient; /* value -> its gradient, for values below n_gradient; NULL before vla_graph_backward */
    size_t n_gradient;
    int32_t layer;     /* given to new nodes and values */
    bool backward;     /* given to new nodes */
    int8_t lane;       /* given to new nodes */
    vla_value loss;
    vla_error error;   /* the first error of a builder call */
};

static inline const vlai_value_info *vlai_value(const vla_graph *g, vla_value v)
{
    return &g->values[v];
}

/* Adds a node: infers the outputs by the op's rule and writes their values to `outputs` (may be NULL). */
vla_status vlai_graph_add(vla_graph *g, vlai_op op, int n_inputs, const vla_value *inputs, const vlai_attrs *attrs,
                          vla_value *outputs);
/* Results that a node has: fewer than its op's most for some. */
int8_t vlai_outputs_of(const vlai_node *node);
/* Fused gradients make column sums of their result k, 0 or 1, where attrs.*.sums has a type for them: that type, NONE when
 * there are none (NULL: such an op never makes them), and which result they are (-1: none). They stand behind the others. */
vla_dtype *vlai_sums_type(vlai_node *node, int k);
int vlai_sums_at(const vlai_node *node, int k);
int vlai_plain_outputs(const vlai_node *node); /* how many the others are */
/* The usual case of one result; VLA_NONE after an error. */
vla_value vlai_graph_op(vla_graph *g, vlai_op op, int n_inputs, const vla_value *inputs, const vlai_attrs *attrs);
/* Collectives, see ops.def. Ranks of a world must make the same ones in the same order: `order` names it. */
vla_value vlai_reduce_scatter(vla_graph *g, vla_value bucket, int rank, int world, int order);
void vlai_all_gather(vla_graph *g, vla_value bucket, int rank, int world, int order);
void vlai_all_reduce(vla_graph *g, vla_value x, int rank, int world, int order);
static inline bool vlai_op_is_collective(vlai_op op)
{
    return op == VLAI_OP_reduce_scatter || op == VLAI_OP_all_gather || op == VLAI_OP_all_reduce;
}
/* A new value without producer. */
vla_value vlai_graph_leaf(vla_graph *g, vlai_kind kind, const char *name, vla_dtype dtype, int rank,
                          const int64_t *shape);
/* Marks the region of what is added from now on: layer index, or -1. */
void vlai_graph_layer(vla_graph *g, int32_t layer);
/* The lane of what is added from now on: 0, or 1 for small work that may run beside the main one. */
void vlai_graph_lane(vla_graph *g, int lane);
void vlai_graph_touch(vla_graph *g, vla_value param);

/* Every node after the producers of its inputs, each value made once, shapes as the rules say; the message names the
 * pass (`after`) and the first bad node. */
vla_status vlai_graph_verify(const vla_graph *g, const char *after, vla_error *err);
void vlai_graph_print(const vla_graph *g, vlai_text *out);
void vlai_graph_print_value(const vla_graph *g, vla_value v, vlai_text *out); /* %12 bf16 [324,1280] "name" */
const char *vlai_graph_dtype_name(vla_dtype dtype);                            /* also the symbolic ones */

/* Replaces every use of `from` as an operand by `to`, in nodes first..end. */
void vlai_graph_replace(vla_graph *g, vla_value from, vla_value to, size_t first);
/* Puts every node after the makers of its operands, otherwise in the old order; leaves out those whose flag in `gone` is set
 * (NULL: none). For passes that append or replace nodes. */
vla_status vlai_graph_order(vla_graph *g, const bool *gone, vla_error *err);
/* Drops the nodes whose flag is false, keeping order; producers are renumbered. */
void vlai_graph_keep(vla_graph *g, const bool *keep);

VLA_END_DECLS

#endif
