/* Dead code: what no result needs is not computed. A parameter whose gradient is thereby exactly zero is still stepped
 * (pass/update.c), because the reference steps it. */
#include "base/fail.h"
#include "ops/op.h"
#include "pass/pass.h"

vla_status vlai_pass_dead(vla_graph *g, size_t *removed, vla_error *err)
{
    bool *live = vlai_calloc(g->n_values + 1, sizeof *live), *keep = vlai_calloc(g->n_nodes + 1, sizeof *keep);
    vla_status status = VLA_OK;
    if (!live || !keep) {
        status = vlai_nomem(err, g->n_values);
        goto done;
    }
    for (size_t v = 0; v < g->n_values; v++)
        live[v] = g->values[v].name != NULL;
    for (size_t v = 0; v < g->n_gradient; v++)
        if (g->gradient[v] != VLA_NONE && g->values[v].kind == VLAI_PARAM)
            live[g->gradient[v]] = true;
    if (g->loss != VLA_NONE)
        live[g->loss] = true;
    size_t dropped = 0;
    for (size_t n = g->n_nodes; n-- > 0;) {
        const vlai_node *node = &g->nodes[n];
        keep[n] = vlai_ops[node->op].writes != 0;
        for (int i = 0; i < node->n_outputs; i++)
            keep[n] = keep[n] || live[node->outputs[i]];
        for (int i = 0; keep[n] && i < node->n_inputs; i++)
            if (node->inputs[i] != VLA_NONE)
                live[node->inputs[i]] = true;
        dropped += !keep[n];
    }
    vlai_graph_keep(g, keep);
    if (removed)
        *removed = dropped;
    status = vlai_graph_verify(g, "dead code", err);
done:
    vlai_free(live);
    vlai_free(keep);
    return status;
}
