/* Building a plan: the pipeline of passes, then sizes. Next: exec/run.c. */
#include "exec/plan.h"

#include "base/fail.h"
#include "base/text.h"
#include "ops/op.h"

#include <stdlib.h>
#include <string.h>

static size_t value_bytes(const vlai_value_info *v)
{
    return (size_t)v->elements * vla_dtype_size(v->dtype);
}

static size_t padded(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

/* Bytes of fp32 scratch when bf16 operands are widened and results rounded afterwards. */
static size_t widened_bytes(const vla_graph *g, const vlai_node *node)
{
    size_t total = 0;
    if (vlai_op_is_raw(node->op))
        return 0;
    for (int i = 0; i < node->n_inputs + node->n_outputs; i++) {
        vla_value v = i < node->n_inputs ? node->inputs[i] : node->outputs[i - node->n_inputs];
        if (v != VLA_NONE && vlai_value(g, v)->dtype == VLA_BF16)
            total += padded((size_t)vlai_value(g, v)->elements * sizeof(float));
    }
    return total;
}

/* Views and places for values to come move nothing, collectives by other means. */
static bool moves(const vlai_node *node)
{
    return !vlai_op_is_collective(node->op) && node->op != VLAI_OP_bucket && node->op != VLAI_OP_part && node->op != VLAI_OP_reshape &&
           node->op != VLAI_OP_stop_gradient;
}

static void measure(vla_plan *plan)
{
    const vla_graph *g = plan->graph;
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_cost cost = {0};
        vlai_ops[g->nodes[n].op].cost(g, &g->nodes[n], &cost);
        plan->flops += cost.flops;
        if (moves(&g->nodes[n]))
            plan->traffic += cost.bytes;
        if (vlai_op_is_collective(g->nodes[n].op)) {
            size_t bytes = value_bytes(vlai_value(g, g->nodes[n].inputs[0]));
            plan->collectives++;
            *(g->nodes[n].op == VLAI_OP_all_gather ? &plan->gathered : &plan->reduced) += bytes;
        }
        if (cost.workspace > plan->workspace)
            plan->workspace = cost.workspace;
        if (cost.workspace_per_thread > plan->workspace_per_thread)
            plan->workspace_per_thread = cost.workspace_per_thread;
        size_t widen = widened_bytes(g, &g->nodes[n]);
        if (widen > plan->widen)
            plan->widen = widen;
    }
    for (size_t v = 0; v < g->n_values; v++) {
        const vlai_value_info *info = &g->values[v];
        if (info->kind == VLAI_PARAM)
            plan->bytes.weights += value_bytes(info);
        if (info->kind == VLAI_INPUT)
            plan->bytes.inputs += padded(value_bytes(info));
    }
    plan->bytes.activations = plan->memory.arena_bytes > plan->bytes.inputs ? plan->memory.arena_bytes - plan->bytes.inputs : 0;
    plan->bytes.workspace = plan->workspace;
}

vla_status vla_plan_build(vla_graph *graph, const vla_plan_options *options, vla_plan **out, vla_error *err)
{
    *out = NULL;
    vla_plan *plan = vlai_calloc(1, sizeof *plan);
    if (!plan) {
        vla_graph_destroy(graph);
        return vlai_nomem(err, sizeof *plan);
    }
    plan->graph = graph;
    plan->options = (vla_plan_options)VLA_PLAN_OPTIONS_DEFAULT;
    vla_status status;
    VLA_TRY_GOTO(vlai_take_sized(&plan->options, sizeof plan->options, options, "vla_plan_options", err), fail);
    options = &plan->options;
    VLA_TRY_GOTO(vlai_graph_verify(graph, "building", err), fail);
    VLA_TRY_GOTO(vlai_pass_dead(graph, NULL, err), fail);
    VLA_TRY_GOTO(vlai_pass_precision(graph, options->numerics, err), fail);
    VLA_TRY_GOTO(vlai_pass_recompute(graph, options->recompute, options->keep, err), fail);
    VLA_TRY_GOTO(vlai_pass_fuse(graph, options, plan->fused, err), fail);
    VLA_TRY_GOTO(vlai_pass_chain(graph, options, NULL, err), fail);
    VLA_TRY_GOTO(vlai_pass_communicate(graph, options, &plan->order, err), fail);
    vlai_pass_beside(graph, options);
    VLA_TRY_GOTO(vlai_pass_memory(graph, options->layout, &plan->memory, err), fail);
    measure(plan);
    plan->options.store = NULL; /* they were lent */
    plan->options.order = NULL;
    *out = plan;
    return VLA_OK;
fail:
    vla_plan_destroy(plan);
    return status;
}

void vla_plan_destroy(vla_plan *plan)
{
    if (!plan)
        return;
    vlai_memory_fini(&plan->memory);
    vlai_comm_order_fini(&plan->order);
    vla_graph_destroy(plan->graph);
    vlai_free(plan);
}

vla_plan_memory vla_plan_memory_get(const vla_plan *plan)
{
    return plan->bytes;
}

double vla_plan_flops(const vla_plan *plan)
{
    return plan->flops;
}

size_t vla_plan_nodes(const vla_plan *plan)
{
    return plan->graph->n_nodes;
}

static void print_place(const vla_plan *plan, vla_value v, vlai_text *out)
{
    vlai_graph_print_value(plan->graph, v, out);
    if (v == VLA_NONE)
        return;
    if (plan->memory.offset[v] >= 0)
        vlai_text_printf(out, "@%lld", (long long)plan->memory.offset[v]);
}

vla_status vla_plan_print(const vla_plan *plan, char **text, vla_error *err)
{
    const vla_graph *g = plan->graph;
    vlai_text out = {0};
    vlai_text_printf(&out, "plan: %zu launches, arena %zu bytes (lower bound %zu), workspace %zu, %.6g GFLOP\n",
                     g->n_nodes, plan->memory.arena_bytes, plan->memory.peak_bytes, plan->workspace, plan->flops * 1e-9);
    if (plan->collectives)
        vlai_text_printf(&out, "%zu collectives: %zu bytes reduced, %zu gathered\n", plan->collectives, plan->reduced, plan->gathered);
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        vlai_text_printf(&out, "%5zu %-20s", n, vlai_ops[node->op].name);
        if (vlai_op_is_collective(node->op))
            vlai_text_printf(&out, " rank %d of %d, collective %d, bucket %d:", node->attrs.comm.rank, node->attrs.comm.world, node->attrs.comm.order,
                             node->attrs.comm.bucket);
        if (node->sms_free)
            vlai_text_printf(&out, " %d multiprocessors free:", node->sms_free);
        for (int i = 0; i < node->n_outputs; i++) {
            vlai_text_puts(&out, i ? ", " : " ");
            print_place(plan, node->outputs[i], &out);
        }
        vlai_text_puts(&out, " <-");
        for (int i = 0; i < node->n_inputs; i++) {
            vlai_text_puts(&out, i ? ", " : " ");
            print_place(plan, node->inputs[i], &out);
        }
        vlai_text_puts(&out, "\n");
    }
    vla_status status = vlai_text_status(&out, err);
    *text = status == VLA_OK ? strdup(out.data) : NULL;
    vlai_text_fini(&out);
    return status == VLA_OK && !*text ? vlai_nomem(err, out.size) : status;
}
