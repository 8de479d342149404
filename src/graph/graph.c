/* Building, checking and printing graphs. Next: ops/ops.def, then ops/infer.c. */
#include "graph/graph.h"

#include "base/fail.h"
#include "ops/op.h"

#include <stdio.h>
#include <string.h>

vla_status vla_graph_create(vla_graph **out, vla_error *err)
{
    *out = vlai_calloc(1, sizeof **out);
    if (!*out)
        return vlai_nomem(err, sizeof **out);
    (*out)->layer = -1;
    (*out)->loss = VLA_NONE;
    return VLA_OK;
}

void vla_graph_destroy(vla_graph *g)
{
    if (!g)
        return;
    vlai_arena_fini(&g->names);
    vlai_free(g->values);
    vlai_free(g->nodes);
    vlai_free(g->gradient);
    vlai_free(g);
}

vla_status vla_graph_check(const vla_graph *g, vla_error *err)
{
    if (g->error.status != VLA_OK && err)
        *err = g->error;
    return g->error.status;
}

static vla_value new_value(vla_graph *g, vlai_kind kind, const char *name, const vlai_shape *shape)
{
    if (g->error.status != VLA_OK)
        return VLA_NONE;
    if (vlai_reserve((void **)&g->values, &g->cap_values, g->n_values, sizeof *g->values, &g->error) != VLA_OK)
        return VLA_NONE;
    vlai_value_info *v = &g->values[g->n_values];
    *v = (vlai_value_info){.kind = kind, .dtype = shape->dtype, .rank = shape->rank, .elements = 1, .producer = -1,
                           .layer = g->layer, .home = VLA_NONE};
    for (int i = 0; i < shape->rank; i++) {
        v->shape[i] = shape->dim[i];
        if (shape->dim[i] < 0 || __builtin_mul_overflow(v->elements, shape->dim[i], &v->elements)) {
            vlai_fail(&g->error, VLA_E_SHAPE, "value '%s': dimension %d is %lld", name ? name : "", i,
                      (long long)shape->dim[i]);
            return VLA_NONE;
        }
    }
    if (name && !(v->name = vlai_arena_strdup(&g->names, name))) {
        vlai_nomem(&g->error, strlen(name));
        return VLA_NONE;
    }
    return (vla_value)g->n_values++;
}

vla_value vlai_graph_leaf(vla_graph *g, vlai_kind kind, const char *name, vla_dtype dtype, int rank,
                          const int64_t *shape)
{
    vlai_shape s = {.dtype = dtype, .rank = rank};
    if (rank < 0 || rank > VLA_MAX_RANK) {
        if (g->error.status == VLA_OK)
            vlai_fail(&g->error, VLA_E_SHAPE, "value '%s': rank %d, at most %d", name, rank, VLA_MAX_RANK);
        return VLA_NONE;
    }
    for (int i = 0; i < rank; i++)
        s.dim[i] = shape[i];
    return new_value(g, kind, name, &s);
}

vla_value vla_graph_input(vla_graph *g, const char *name, vla_dtype dtype, int rank, const int64_t *shape)
{
    return vlai_graph_leaf(g, VLAI_INPUT, name, dtype, rank, shape);
}

vla_value vla_graph_param(vla_graph *g, const char *name, vla_dtype dtype, int rank, const int64_t *shape)
{
    vla_value old = vla_graph_find(g, name);
    if (old == VLA_NONE)
        return vlai_graph_leaf(g, VLAI_PARAM, name, dtype, rank, shape);
    const vlai_value_info *v = vlai_value(g, old);
    bool same = v->kind == VLAI_PARAM && v->dtype == dtype && v->rank == rank;
    for (int i = 0; same && i < rank; i++)
        same = v->shape[i] == shape[i];
    if (!same && g->error.status == VLA_OK)
        vlai_fail(&g->error, VLA_E_SHAPE, "parameter '%s' is declared twice with different shapes or types", name);
    return same ? old : VLA_NONE;
}

void vla_graph_freeze(vla_graph *g, vla_value param)
{
    if (param != VLA_NONE)
        g->values[param].frozen = true;
}

void vlai_graph_touch(vla_graph *g, vla_value param)
{
    if (param != VLA_NONE)
        g->values[param].touched = true;
}

void vlai_graph_layer(vla_graph *g, int32_t layer)
{
    g->layer = layer;
}

void vlai_graph_lane(vla_graph *g, int lane)
{
    g->lane = (int8_t)lane;
}

void vla_graph_name(vla_graph *g, vla_value value, const char *name)
{
    if (value == VLA_NONE || g->error.status != VLA_OK)
        return;
    char *copy = vlai_arena_strdup(&g->names, name);
    if (!copy)
        vlai_nomem(&g->error, strlen(name));
    g->values[value].name = copy;
}

vla_value vla_graph_find(const vla_graph *g, const char *name)
{
    for (size_t i = 0; i < g->n_values; i++)
        if (g->values[i].name && !strcmp(g->values[i].name, name))
            return (vla_value)i;
    return VLA_NONE;
}

vla_value vla_graph_gradient(const vla_graph *g, vla_value value)
{
    return g->gradient && value >= 0 && (size_t)value < g->n_gradient ? g->gradient[value] : VLA_NONE;
}

int vla_value_rank(const vla_graph *g, vla_value v)
{
    return v == VLA_NONE ? 0 : g->values[v].rank;
}

int64_t vla_value_dim(const vla_graph *g, vla_value v, int axis)
{
    return v == VLA_NONE || axis < 0 || axis >= g->values[v].rank ? 0 : g->values[v].shape[axis];
}

vla_dtype vla_value_dtype(const vla_graph *g, vla_value v)
{
    return v == VLA_NONE ? VLA_F32 : g->values[v].dtype;
}

vla_dtype *vlai_sums_type(vlai_node *node, int k)
{
    switch (node->op) {
    case VLAI_OP_swiglu_backward: return k ? NULL : &node->attrs.swiglu.sums;
    case VLAI_OP_rms_norm_backward: return k ? NULL : &node->attrs.norm.sums;
    case VLAI_OP_qkv_rope_grad: return &node->attrs.rope.sums[k];
    default: return NULL;
    }
}

static bool has_sums(const vlai_node *node, int k)
{
    vlai_node copy = *node;
    const vla_dtype *type = vlai_sums_type(&copy, k);
    return type && *type != VLA_DTYPE_NONE;
}

static int n_sums(const vlai_node *node)
{
    return has_sums(node, 0) + has_sums(node, 1);
}

int vlai_plain_outputs(const vlai_node *node)
{
    return node->n_outputs - n_sums(node);
}

int vlai_sums_at(const vlai_node *node, int k)
{
    return has_sums(node, k) ? vlai_plain_outputs(node) + (k && has_sums(node, 0)) : -1;
}

int8_t vlai_outputs_of(const vlai_node *node)
{
    switch (node->op) {
    case VLAI_OP_split_cols: return (int8_t)node->attrs.split.n;
    case VLAI_OP_matmul: return node->attrs.matmul.sums == VLA_DTYPE_NONE ? 1 : 2;
    case VLAI_OP_swiglu_backward: return (int8_t)(1 + (node->attrs.swiglu.again != 0) + n_sums(node));
    case VLAI_OP_rms_norm_backward:
        return (int8_t)((node->n_inputs < 4 || node->inputs[3] == VLA_NONE ? 1 : node->attrs.norm.again ? 3 : 2) + n_sums(node));
    case VLAI_OP_attention_qkv: return node->n_inputs > 5 && node->inputs[5] != VLA_NONE ? 3 : 2;
    case VLAI_OP_qkv_rope_grad: return (int8_t)((node->n_inputs > 4 && node->inputs[4] != VLA_NONE ? 2 : 1) + n_sums(node));
    default: return vlai_ops[node->op].outputs;
    }
}

vla_status vlai_graph_add(vla_graph *g, vlai_op op, int n_inputs, const vla_value *inputs, const vlai_attrs *attrs,
                          vla_value *outputs)
{
    const vlai_op_info *info = &vlai_ops[op];
    for (int i = 0; outputs && i < info->outputs; i++)
        outputs[i] = VLA_NONE;
    if (g->error.status != VLA_OK)
        return g->error.status;
    if (n_inputs < info->inputs_min || n_inputs > info->inputs_max)
        return vlai_fail(&g->error, VLA_E_INVALID, "%s: %d operands, wanted %d to %d", info->name, n_inputs,
                         info->inputs_min, info->inputs_max);
    vlai_node node = {.op = op, .n_inputs = (int8_t)n_inputs, .n_outputs = info->outputs, .backward = g->backward,
                      .lane = g->lane, .layer = g->layer};
    if (attrs)
        node.attrs = *attrs;
    for (int i = 0; i < VLAI_MAX_INPUTS; i++)
        node.inputs[i] = i < n_inputs ? inputs[i] : VLA_NONE;
    for (int i = 0; i < VLAI_MAX_OUTPUTS; i++)
        node.outputs[i] = VLA_NONE;
    for (int i = 0; i < n_inputs; i++)
        if (inputs[i] != VLA_NONE && (size_t)inputs[i] >= g->n_values)
            return vlai_fail(&g->error, VLA_E_INVALID, "%s: operand %d is not a value of this graph", info->name, i);
    node.n_outputs = vlai_outputs_of(&node);
    vlai_shape shapes[VLAI_MAX_OUTPUTS] = {0};
    VLA_TRY(vlai_prefix(&g->error, info->infer(g, &node, shapes, &g->error), "%s", info->name));
    VLA_TRY(vlai_reserve((void **)&g->nodes, &g->cap_nodes, g->n_nodes, sizeof *g->nodes, &g->error));
    for (int i = 0; i < node.n_outputs; i++) {
        node.outputs[i] = new_value(g, VLAI_TEMP, NULL, &shapes[i]);
        if (node.outputs[i] == VLA_NONE)
            return g->error.status;
        g->values[node.outputs[i]].producer = (int32_t)g->n_nodes;
        if (outputs)
            outputs[i] = node.outputs[i];
    }
    g->nodes[g->n_nodes++] = node;
    return VLA_OK;
}

vla_value vlai_graph_op(vla_graph *g, vlai_op op, int n_inputs, const vla_value *inputs, const vlai_attrs *attrs)
{
    vla_value out[VLAI_MAX_OUTPUTS] = {VLA_NONE, VLA_NONE, VLA_NONE, VLA_NONE};
    vlai_graph_add(g, op, n_inputs, inputs, attrs, out);
    return out[0];
}

void vlai_graph_replace(vla_graph *g, vla_value from, vla_value to, size_t first)
{
    for (size_t n = first; n < g->n_nodes; n++)
        for (int i = 0; i < g->nodes[n].n_inputs; i++)
            if (g->nodes[n].inputs[i] == from)
                g->nodes[n].inputs[i] = to;
}

/* A node after the makers of its operands. Depth follows from how far nodes were moved, which is a few. */
static void emit(const vla_graph *g, const bool *gone, size_t n, bool *done, vlai_node *order, size_t *count)
{
    if (done[n] || (gone && gone[n]))
        return;
    done[n] = true;
    for (int i = 0; i < g->nodes[n].n_inputs; i++) {
        vla_value v = g->nodes[n].inputs[i];
        if (v != VLA_NONE && g->values[v].producer >= 0)
            emit(g, gone, (size_t)g->values[v].producer, done, order, count);
    }
    order[(*count)++] = g->nodes[n];
}

vla_status vlai_graph_order(vla_graph *g, const bool *gone, vla_error *err)
{
    bool *done = vlai_calloc(g->n_nodes + 1, sizeof *done);
    vlai_node *order = vlai_array(g->n_nodes + 1, sizeof *order);
    if (!done || !order) {
        vlai_free(done);
        vlai_free(order);
        return vlai_nomem(err, g->n_nodes * sizeof *order);
    }
    size_t count = 0;
    for (size_t n = 0; n < g->n_nodes; n++)
        emit(g, gone, n, done, order, &count);
    for (size_t n = 0; n < count; n++) {
        g->nodes[n] = order[n];
        for (int i = 0; i < order[n].n_outputs; i++)
            g->values[order[n].outputs[i]].producer = (int32_t)n;
    }
    g->n_nodes = count;
    vlai_free(done);
    vlai_free(order);
    return VLA_OK;
}

void vlai_graph_keep(vla_graph *g, const bool *keep)
{
    size_t kept = 0;
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_node *node = &g->nodes[n];
        for (int i = 0; i < node->n_outputs; i++)
            g->values[node->outputs[i]].producer = keep[n] ? (int32_t)kept : -1;
        if (keep[n])
            g->nodes[kept++] = *node;
    }
    g->n_nodes = kept;
}

const char *vlai_graph_dtype_name(vla_dtype dtype)
{
    return dtype == VLA_COMPUTE ? "compute" : dtype == VLA_PRECISE ? "precise" : vla_dtype_name(dtype);
}

void vlai_graph_print_value(const vla_graph *g, vla_value v, vlai_text *out)
{
    if (v == VLA_NONE) {
        vlai_text_puts(out, "-");
        return;
    }
    const vlai_value_info *info = vlai_value(g, v);
    vlai_text_printf(out, "%%%d %s [", (int)v, vlai_graph_dtype_name(info->dtype));
    for (int i = 0; i < info->rank; i++)
        vlai_text_printf(out, "%s%lld", i ? "," : "", (long long)info->shape[i]);
    vlai_text_puts(out, "]");
    if (info->name)
        vlai_text_printf(out, " \"%s\"", info->name);
}

void vlai_graph_print(const vla_graph *g, vlai_text *out)
{
    static const char *const kinds[] = {"temp", "input", "param", "state"};
    for (size_t i = 0; i < g->n_values; i++)
        if (g->values[i].kind != VLAI_TEMP) {
            vlai_text_printf(out, "%-6s", kinds[g->values[i].kind]);
            vlai_graph_print_value(g, (vla_value)i, out);
            vlai_text_printf(out, "%s\n", g->values[i].frozen ? " frozen" : "");
        }
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        vlai_text_printf(out, "%5zu %s%s ", n, node->recompute ? "again " : node->backward ? "back " : "", vlai_ops[node->op].name);
        for (int i = 0; i < node->n_outputs; i++) {
            vlai_text_puts(out, i ? ", " : "");
            vlai_graph_print_value(g, node->outputs[i], out);
        }
        vlai_text_puts(out, node->n_outputs ? " <-" : "");
        for (int i = 0; i < node->n_inputs; i++)
            node->inputs[i] == VLA_NONE ? vlai_text_puts(out, " -") : vlai_text_printf(out, " %%%d", (int)node->inputs[i]);
        vlai_text_puts(out, "\n");
    }
}

vla_status vlai_graph_verify(const vla_graph *g, const char *after, vla_error *err)
{
    VLA_TRY(vla_graph_check(g, err));
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_node node = g->nodes[n];
        const char *name = vlai_ops[node.op].name;
        for (int i = 0; i < node.n_inputs; i++) {
            vla_value v = node.inputs[i];
            if (v == VLA_NONE)
                continue;
            if ((size_t)v >= g->n_values)
                return vlai_fail(err, VLA_E_INTERNAL, "after %s: node %zu (%s) reads value %d of %zu", after, n, name, (int)v, g->n_values);
            const vlai_value_info *info = vlai_value(g, v);
            if (info->kind == VLAI_TEMP && (info->producer < 0 || (size_t)info->producer >= n))
                return vlai_fail(err, VLA_E_INTERNAL, "after %s: node %zu (%s) reads %%%d, which node %d makes", after, n, name, (int)v, (int)info->producer);
        }
        vlai_shape shapes[VLAI_MAX_OUTPUTS] = {0};
        VLA_TRY(vlai_prefix(err, vlai_ops[node.op].infer(g, &node, shapes, err), "after %s: node %zu (%s)", after, n, name));
        for (int i = 0; i < node.n_outputs; i++) {
            const vlai_value_info *info = vlai_value(g, node.outputs[i]);
            bool same = info->dtype == shapes[i].dtype && info->rank == shapes[i].rank && (size_t)info->producer == n;
            for (int d = 0; same && d < info->rank; d++)
                same = info->shape[d] == shapes[i].dim[d];
            if (!same)
                return vlai_fail(err, VLA_E_INTERNAL, "after %s: node %zu (%s): result %d is not what its rule says", after, n, name, i);
        }
    }
    return VLA_OK;
}
