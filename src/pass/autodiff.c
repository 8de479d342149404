/* Autodiff: one reverse walk that adds ordinary nodes, so that every later pass sees the backward too. */
#include "base/fail.h"
#include "ops/op.h"
#include "pass/pass.h"

#include <string.h>

/* Which values lie on a path from a trained parameter (or from a value that was asked for by name). */
static void mark_needed(const vla_graph *g, bool *needed)
{
    for (size_t v = 0; v < g->n_values; v++)
        needed[v] = g->values[v].kind == VLAI_PARAM && !g->values[v].frozen;
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        if (vlai_ops[node->op].kind != VLAI_OP_DIFF)
            continue;
        bool any = false;
        for (int i = 0; i < node->n_inputs; i++)
            any = any || (node->inputs[i] != VLA_NONE && needed[node->inputs[i]]);
        for (int i = 0; i < node->n_outputs; i++)
            needed[node->outputs[i]] = any;
    }
}

static void contribute(vla_graph *g, vla_value value, vla_value dx)
{
    if (dx == VLA_NONE)
        return;
    vla_value *slot = &g->gradient[value];
    *slot = *slot == VLA_NONE ? dx : vla_add(g, *slot, dx);
}

vla_status vla_graph_backward(vla_graph *g, vla_value loss, double scale, vla_error *err)
{
    VLA_TRY(vla_graph_check(g, err));
    if (loss == VLA_NONE || vlai_value(g, loss)->elements != 1)
        return vlai_fail(err, VLA_E_SHAPE, "backward: the loss must be a value of one element");
    if (g->gradient)
        return vlai_fail(err, VLA_E_INVALID, "backward: this graph already has its backward pass");
    size_t forward_values = g->n_values, forward_nodes = g->n_nodes;
    bool *needed = vlai_calloc(forward_values, sizeof *needed);
    g->gradient = vlai_array(forward_values, sizeof *g->gradient);
    vla_status status = VLA_OK;
    if (!needed || !g->gradient) {
        status = vlai_nomem(err, forward_values * sizeof *g->gradient);
        goto done;
    }
    for (size_t v = 0; v < forward_values; v++)
        g->gradient[v] = VLA_NONE;
    g->n_gradient = forward_values;
    g->loss = loss;
    mark_needed(g, needed);
    int32_t layer = g->layer;
    int8_t lane = g->lane;
    g->backward = true;
    g->layer = -1;
    if (needed[loss])
        g->gradient[loss] = vla_fill(g, vlai_value(g, loss)->dtype, vlai_value(g, loss)->rank, vlai_value(g, loss)->shape, scale);
    for (size_t n = forward_nodes; n-- > 0;) {
        vlai_node node = g->nodes[n]; /* a copy: the array moves as nodes are added */
        const vlai_op_info *info = &vlai_ops[node.op];
        vla_value dy[VLAI_MAX_OUTPUTS], dx[VLAI_MAX_INPUTS];
        bool need[VLAI_MAX_INPUTS] = {0}, any_dy = false, any_need = false;
        for (int i = 0; i < node.n_outputs; i++) {
            dy[i] = g->gradient[node.outputs[i]];
            any_dy = any_dy || dy[i] != VLA_NONE;
        }
        for (int i = 0; i < VLAI_MAX_INPUTS; i++) {
            dx[i] = VLA_NONE;
            need[i] = i < node.n_inputs && node.inputs[i] != VLA_NONE && needed[node.inputs[i]];
            any_need = any_need || need[i];
        }
        if (!any_dy || !any_need || info->kind != VLAI_OP_DIFF)
            continue;
        g->layer = node.layer;
        g->lane = node.lane;
        info->vjp(g, &node, dy, need, dx);
        for (int i = 0; i < node.n_inputs; i++)
            contribute(g, node.inputs[i], dx[i]);
        if (g->error.status != VLA_OK) {
            status = vlai_prefix(err, vla_graph_check(g, err), "gradient of %s", info->name);
            goto done;
        }
    }
    g->layer = layer;
    g->lane = lane;
    status = vla_graph_check(g, err);
done:
    vlai_free(needed);
    return status;
}
