/* Precision: symbolic element types become concrete, and casts that change nothing disappear. */
#include "base/fail.h"
#include "ops/op.h"
#include "pass/pass.h"

static vla_dtype resolve(vla_dtype dtype, vla_numerics numerics)
{
    vla_dtype compute = numerics == VLA_FP32 ? VLA_F32 : numerics == VLA_FP64 ? VLA_F64 : VLA_BF16;
    if (dtype == VLA_COMPUTE)
        return compute;
    if (dtype == VLA_PRECISE)
        return numerics == VLA_FP64 ? VLA_F64 : VLA_F32;
    return dtype;
}

/* The attribute that holds a type, for the ops that carry one. */
static vla_dtype *type_attribute(vlai_node *node)
{
    switch (node->op) {
    case VLAI_OP_matmul:
    case VLAI_OP_col_sum: return &node->attrs.matmul.dtype;
    case VLAI_OP_cast:
    case VLAI_OP_fill: return &node->attrs.fill.dtype;
    case VLAI_OP_rms_norm_grad_weight: return &node->attrs.norm.dtype;
    case VLAI_OP_rope_table: return &node->attrs.rope_table.dtype;
    case VLAI_OP_scatter_add_rows: return &node->attrs.rows.dtype;
    case VLAI_OP_patchify: return &node->attrs.patchify.dtype;
    default: return NULL;
    }
}

vla_status vlai_pass_precision(vla_graph *g, vla_numerics numerics, vla_error *err)
{
    for (size_t v = 0; v < g->n_values; v++)
        g->values[v].dtype = resolve(g->values[v].dtype, numerics);
    for (size_t n = 0; n < g->n_nodes; n++) {
        vla_dtype *type = type_attribute(&g->nodes[n]);
        if (type)
            *type = resolve(*type, numerics);
        if (g->nodes[n].op == VLAI_OP_matmul)
            g->nodes[n].attrs.matmul.sums = resolve(g->nodes[n].attrs.matmul.sums, numerics);
    }
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_node *node = &g->nodes[n];
        if (node->op != VLAI_OP_cast || vlai_value(g, node->inputs[0])->dtype != vlai_value(g, node->outputs[0])->dtype)
            continue;
        /* A named cast stays (as a copy of its operand): results are found by its name. */
        if (vlai_value(g, node->outputs[0])->name)
            continue;
        vlai_graph_replace(g, node->outputs[0], node->inputs[0], n + 1);
        for (size_t v = 0; v < g->n_gradient; v++)
            if (g->gradient[v] == node->outputs[0])
                g->gradient[v] = node->inputs[0];
        if (g->loss == node->outputs[0])
            g->loss = node->inputs[0];
    }
    return vlai_pass_dead(g, NULL, err);
}
