/* Recompute: forward values that the backward pass reads are made again there instead of being kept.
 *
 * A mode is a choice of values (`again`); the rest is shared. Just before the first backward node that reads such a value,
 * a copy of its producer is added, after copies of what the producer reads if that is made again too, down to values that
 * are kept. A copy computes what the original computed from the same operands, so no bit of any result changes.
 *
 *   cheap   values of element-wise and moving ops, where that keeps fewer bytes: h = swiglu(u) goes because u is kept
 *           anyway; a rotated q stays because its unrotated twin would have to be kept for it.
 *           With room to spare (`keep` bytes), some of them are kept after all: copies of rows first, which cost a read and
 *           a write each time, then those made last, which have the shortest way to their reader.
 *   layer   every value read only by nodes of the layer that made it. Values outside of layers follow the rule of cheap.
 *           With room to spare so do the last layers, as many as fit into `keep` bytes. */
#include "base/fail.h"
#include "ops/op.h"
#include "pass/pass.h"

#include <string.h>

/* How many cheap ops may stand between a value and what it is made again from. */
enum { MAX_CHAIN = 6 };

enum { BY_RULE = 1, BY_LAYER = 2 };

typedef struct state {
    vla_graph *g;
    bool *kept;      /* per value: the backward reads it, or a copy does, or it is a result */
    uint8_t *again;  /* per value: made again; BY_LAYER when with its layer */
    int32_t *copy;   /* per value: its copy, or VLA_NONE */
    int32_t *extra;  /* scratch of cheap(): values that would have to be kept in addition */
    size_t n_extra;
    size_t n_values; /* before copies */
    vlai_node *nodes; /* the new list */
    size_t n_nodes, cap_nodes;
} state;

/* Ops whose work is small beside the bytes that they write. */
static bool is_cheap(vlai_op op)
{
    switch (op) {
    case VLAI_OP_add:
    case VLAI_OP_sub:
    case VLAI_OP_mul:
    case VLAI_OP_scale:
    case VLAI_OP_cast:
    case VLAI_OP_stop_gradient:
    case VLAI_OP_silu:
    case VLAI_OP_gelu:
    case VLAI_OP_swiglu:
    case VLAI_OP_rms_norm:
    case VLAI_OP_rope:
    case VLAI_OP_gather_rows:
    case VLAI_OP_put_rows:
    case VLAI_OP_zero_rows:
    case VLAI_OP_merge_rows:
    case VLAI_OP_split_cols:
    case VLAI_OP_concat_cols:
    case VLAI_OP_slice_rows:
    case VLAI_OP_pad_rows:
    case VLAI_OP_concat_rows:
    case VLAI_OP_reshape:
    case VLAI_OP_mul_rows:
    case VLAI_OP_expand_cols:
    case VLAI_OP_expand_rows:
    case VLAI_OP_fill:
    case VLAI_OP_patchify: return true;
    default: return false;
    }
}

static bool is_view(vlai_op op)
{
    return op == VLAI_OP_reshape || op == VLAI_OP_stop_gradient;
}

/* Made by the forward pass, and not a result. */
static bool is_forward(const vla_graph *g, vla_value v)
{
    const vlai_value_info *info = &g->values[v];
    return info->kind == VLAI_TEMP && !info->name && info->producer >= 0 && !g->nodes[info->producer].backward && g->loss != v;
}

static double bytes_of(const vla_graph *g, vla_value v)
{
    return (double)g->values[v].elements * (double)vla_dtype_size(g->values[v].dtype);
}

/* Adds to s->extra what must be kept, beyond what is kept already, to make `v` again. False: it cannot be made again. */
static bool collect(state *s, vla_value v, int depth)
{
    const vla_graph *g = s->g;
    const vlai_node *node = &g->nodes[g->values[v].producer];
    if (!is_cheap(node->op) || depth > MAX_CHAIN)
        return false;
    for (int i = 0; i < node->n_inputs; i++) {
        vla_value x = node->inputs[i];
        if (x == VLA_NONE || !is_forward(g, x))
            continue;
        if (s->again[x] == BY_LAYER)
            return false;
        if (s->kept[x])
            continue;
        /* Keep x, or what x is made from, whichever is smaller. */
        size_t before = s->n_extra;
        bool through = collect(s, x, depth + 1);
        double more = 0;
        for (size_t e = before; through && e < s->n_extra; e++)
            more += bytes_of(g, s->extra[e]);
        if (through && more < bytes_of(g, x))
            continue;
        s->n_extra = before;
        bool listed = false;
        for (size_t e = 0; e < s->n_extra; e++)
            listed = listed || s->extra[e] == x;
        if (!listed)
            s->extra[s->n_extra++] = x;
    }
    return true;
}

/* What stands between `v` and kept values is made again with it. */
static void mark_chain(state *s, vla_value v)
{
    const vlai_node *node = &s->g->nodes[s->g->values[v].producer];
    s->again[v] = BY_RULE;
    for (int i = 0; i < node->n_inputs; i++) {
        vla_value x = node->inputs[i];
        if (x != VLA_NONE && is_forward(s->g, x) && !s->kept[x] && !s->again[x])
            mark_chain(s, x);
    }
}

/* In node order, so that an operand is decided before what is made from it. */
static void choose_cheap(state *s)
{
    const vla_graph *g = s->g;
    for (size_t n = 0; n < g->n_nodes && !g->nodes[n].backward; n++) {
        const vlai_node *node = &g->nodes[n];
        for (int i = 0; i < node->n_outputs; i++) {
            vla_value v = node->outputs[i];
            /* The statistics of a norm are a few bytes a row and keep their value. */
            if (!s->kept[v] || s->again[v] || !is_forward(g, v) || (node->op == VLAI_OP_rms_norm && i > 0))
                continue;
            if (is_view(node->op)) {
                s->again[v] = s->again[node->inputs[0]] ? BY_RULE : 0;
                continue;
            }
            s->n_extra = 0;
            if (!collect(s, v, 1))
                continue;
            double more = 0;
            for (size_t e = 0; e < s->n_extra; e++)
                more += bytes_of(g, s->extra[e]);
            if (more >= bytes_of(g, v))
                continue;
            for (size_t e = 0; e < s->n_extra; e++)
                s->kept[s->extra[e]] = true;
            mark_chain(s, v);
        }
    }
}

static bool moves_rows(vlai_op op)
{
    return op == VLAI_OP_gather_rows || op == VLAI_OP_merge_rows || op == VLAI_OP_split_cols || op == VLAI_OP_concat_cols;
}

/* Takes back decisions for values that the backward itself reads, while they fit into `keep` bytes. What stood between such
 * a value and kept ones is made again only if something else asks for it. */
static void keep_some(state *s, const bool *read, double keep)
{
    const vla_graph *g = s->g;
    for (int pass = 0; pass < 2; pass++)
        for (size_t n = g->n_nodes; n-- > 0;) {
            const vlai_node *node = &g->nodes[n];
            for (int i = 0; i < node->n_outputs; i++) {
                vla_value v = node->outputs[i];
                if (s->again[v] != BY_RULE || !read[v] || is_view(node->op) || moves_rows(node->op) != (pass == 0) || bytes_of(g, v) > keep)
                    continue;
                keep -= bytes_of(g, v);
                s->again[v] = 0;
            }
        }
    for (size_t n = 0; n < g->n_nodes; n++) /* who sees kept bytes differently sees those */
        if (is_view(g->nodes[n].op) && !s->again[g->nodes[n].inputs[0]])
            s->again[g->nodes[n].outputs[0]] = 0;
}

/* The first layer that is not made again: of it and of those behind it, what the rule of cheap keeps takes at most `keep` bytes. One
 * past the last layer where not even that one fits. */
static int first_kept_layer(const state *s, double keep)
{
    const vla_graph *g = s->g;
    int end = 0;
    for (size_t v = 0; v < s->n_values; v++)
        end = g->values[v].layer >= end ? g->values[v].layer + 1 : end;
    for (; end > 0; end--) {
        for (size_t v = 0; v < s->n_values; v++)
            if (g->values[v].layer == end - 1 && s->kept[v] && !s->again[v] && is_forward(g, (vla_value)v) && !is_view(g->nodes[g->values[v].producer].op))
                keep -= bytes_of(g, (vla_value)v);
        if (keep < 0)
            break;
    }
    return end;
}

/* Marks the values of the layers before `end` that are read in their own layer alone. */
static void choose_layer(state *s, int end)
{
    const vla_graph *g = s->g;
    for (size_t v = 0; v < s->n_values; v++)
        s->again[v] = is_forward(g, (vla_value)v) && g->values[v].layer >= 0 && g->values[v].layer < end ? BY_LAYER : 0;
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        for (int i = 0; !node->backward && i < node->n_inputs; i++)
            if (node->inputs[i] != VLA_NONE && g->values[node->inputs[i]].layer != node->layer)
                s->again[node->inputs[i]] = 0;
    }
    for (size_t n = g->n_nodes; n-- > 0;)
        if (is_view(g->nodes[n].op) && !s->again[g->nodes[n].outputs[0]] && !g->nodes[n].backward)
            s->again[g->nodes[n].inputs[0]] = 0;
}

static vla_status push(state *s, const vlai_node *node, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&s->nodes, &s->cap_nodes, s->n_nodes, sizeof *s->nodes, err));
    for (int i = 0; i < node->n_outputs; i++)
        s->g->values[node->outputs[i]].producer = (int32_t)s->n_nodes;
    s->nodes[s->n_nodes++] = *node;
    return VLA_OK;
}

/* Adds copies until `v` has one. `producer` is as before this pass: producers in the graph move with every push. */
static vla_status copy_value(state *s, const int32_t *producer, vla_value v, vla_error *err)
{
    vla_graph *g = s->g;
    if (s->copy[v] != VLA_NONE)
        return VLA_OK;
    vlai_node node = g->nodes[producer[v]];
    for (int i = 0; i < node.n_inputs; i++) {
        vla_value x = node.inputs[i];
        if (x == VLA_NONE || !s->again[x])
            continue;
        VLA_TRY(copy_value(s, producer, x, err));
        node.inputs[i] = s->copy[x];
    }
    for (int i = 0; i < node.n_outputs; i++) {
        VLA_TRY(vlai_reserve((void **)&g->values, &g->cap_values, g->n_values, sizeof *g->values, err));
        g->values[g->n_values] = g->values[node.outputs[i]];
        g->values[g->n_values].name = NULL;
        s->copy[node.outputs[i]] = (int32_t)g->n_values;
        node.outputs[i] = (int32_t)g->n_values++;
    }
    node.backward = node.recompute = true;
    return push(s, &node, err);
}

static vla_status rewrite(state *s, const int32_t *producer, vla_error *err)
{
    vla_graph *g = s->g;
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_node node = g->nodes[n];
        for (int i = 0; node.backward && i < node.n_inputs; i++) {
            vla_value v = node.inputs[i];
            if (v == VLA_NONE || !s->again[v])
                continue;
            VLA_TRY(copy_value(s, producer, v, err));
            node.inputs[i] = s->copy[v];
        }
        VLA_TRY(push(s, &node, err));
    }
    vlai_free(g->nodes);
    g->nodes = s->nodes;
    g->n_nodes = s->n_nodes;
    g->cap_nodes = s->cap_nodes;
    s->nodes = NULL;
    return VLA_OK;
}

vla_status vlai_pass_recompute(vla_graph *g, vla_recompute mode, size_t keep, vla_error *err)
{
    if (mode == VLA_RECOMPUTE_NONE)
        return VLA_OK;
    size_t n = g->n_values + 1;
    state s = {.g = g, .n_values = g->n_values, .kept = vlai_calloc(n, sizeof(bool)), .again = vlai_calloc(n, 1),
               .copy = vlai_array(n, sizeof(int32_t)), .extra = vlai_array(n, sizeof(int32_t))};
    int32_t *producer = vlai_array(n, sizeof *producer);
    bool *read = vlai_calloc(n, sizeof *read);
    vla_status status = VLA_OK;
    if (!read || !s.kept || !s.again || !s.copy || !s.extra || !producer) {
        status = vlai_nomem(err, n * sizeof *producer);
        goto done;
    }
    for (size_t v = 0; v < g->n_values; v++) {
        s.copy[v] = VLA_NONE;
        producer[v] = g->values[v].producer;
    }
    for (size_t i = g->n_nodes; i-- > 0;) {
        /* Who reads a view reads its operand's bytes. */
        bool reads = g->nodes[i].backward || (is_view(g->nodes[i].op) && s.kept[g->nodes[i].outputs[0]]);
        for (int k = 0; reads && k < g->nodes[i].n_inputs; k++)
            if (g->nodes[i].inputs[k] != VLA_NONE)
                s.kept[g->nodes[i].inputs[k]] = true;
    }
    memcpy(read, s.kept, n * sizeof *read);
    int end = INT32_MAX;
    if (mode == VLA_RECOMPUTE_LAYER && keep) { /* what the rule of cheap would keep, to see how many layers fit; then undone */
        choose_cheap(&s);
        end = first_kept_layer(&s, (double)keep);
        memcpy(s.kept, read, n * sizeof *read);
    }
    if (mode == VLA_RECOMPUTE_LAYER)
        choose_layer(&s, end);
    choose_cheap(&s);
    if (mode == VLA_RECOMPUTE_CHEAP && keep)
        keep_some(&s, read, (double)keep);
    VLA_TRY_GOTO(rewrite(&s, producer, err), done);
    status = vlai_graph_verify(g, "recompute", err);
done:
    vlai_free(read);
    vlai_free(s.kept);
    vlai_free(s.again);
    vlai_free(s.copy);
    vlai_free(s.extra);
    vlai_free(s.nodes);
    vlai_free(producer);
    return status;
}
