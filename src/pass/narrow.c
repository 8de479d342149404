/* Narrow: rows and columns that nobody reads are not computed, where an op makes them together with others that are read.
 *
 * The case it is for: in the last layer of a model with two experts, the loss reads the action tokens alone. The other
 * tokens still give keys and values there, but their queries, and all that follows from them, are unread:
 *
 *     qkv = merge_rows(linear(a0), linear(a1)); q, k, v = split_cols(qkv); o = attention(rope(q), rope(k), v)
 *     o1 = gather_rows(o, at1)                               and nothing else reads o
 *
 * becomes: q = split_cols(linear(a1)) rotated with the gathered rows of the tables, attention for those queries alone, and
 * linear(a0) without the weight rows of q. Both steps are decided by who reads what, so no model asks for them.
 *
 * What remains is computed by the same operations on the same numbers: results equal those of the graph as it was, up to
 * the order of sums inside a matmul, which may depend on its width. The gradient of a dropped weight row is exactly 0.
 * Rewrites add nodes and redirect readers; what thereby becomes unread is removed by the dead-code pass. */
#include "base/fail.h"
#include "ops/op.h"
#include "pass/pass.h"

#define OPS(...) (sizeof((vla_value[]){__VA_ARGS__}) / sizeof(vla_value)), (vla_value[]){__VA_ARGS__}

/* Who is read, over the nodes that a result needs. */
typedef struct uses {
    int32_t *readers; /* per value: operands that read it, and 1 for a result */
    bool *live;       /* per node */
} uses;

static void uses_fini(uses *u)
{
    vlai_free(u->readers);
    vlai_free(u->live);
    *u = (uses){0};
}

static vla_status uses_of(const vla_graph *g, uses *u, vla_error *err)
{
    *u = (uses){.readers = vlai_calloc(g->n_values + 1, sizeof *u->readers), .live = vlai_calloc(g->n_nodes + 1, sizeof *u->live)};
    if (!u->readers || !u->live)
        return vlai_nomem(err, g->n_values * sizeof *u->readers);
    for (size_t v = 0; v < g->n_values; v++)
        u->readers[v] = g->values[v].name != NULL;
    for (size_t n = g->n_nodes; n-- > 0;) {
        const vlai_node *node = &g->nodes[n];
        u->live[n] = vlai_ops[node->op].writes != 0;
        for (int i = 0; i < node->n_outputs; i++)
            u->live[n] = u->live[n] || u->readers[node->outputs[i]];
        for (int i = 0; u->live[n] && i < node->n_inputs; i++)
            if (node->inputs[i] != VLA_NONE)
                u->readers[node->inputs[i]]++;
    }
    return VLA_OK;
}

static const vlai_node *producer(const vla_graph *g, vla_value v)
{
    int32_t n = v == VLA_NONE ? -1 : g->values[v].producer;
    return n < 0 ? NULL : &g->nodes[n];
}

static bool is_made_by(const vla_graph *g, vla_value v, vlai_op op)
{
    return producer(g, v) && producer(g, v)->op == op;
}

static vla_status reorder(vla_graph *g, vla_error *err)
{
    VLA_TRY(vla_graph_check(g, err));
    VLA_TRY(vlai_graph_order(g, NULL, err));
    return vlai_graph_verify(g, "narrow", err);
}

/* Rows `index` of v, without making the other rows where that can be helped. */
static vla_value rows_of(vla_graph *g, vla_value v, vla_value index)
{
    const vlai_node *made = producer(g, v);
    vlai_node node = made ? *made : (vlai_node){.op = VLAI_OP_COUNT}; /* a copy: the array moves as nodes are added */
    if (node.op == VLAI_OP_merge_rows && (node.inputs[3] == index || node.inputs[4] == index))
        return node.inputs[node.inputs[3] == index ? 0 : 1];
    if (node.op == VLAI_OP_rope)
        return vlai_graph_op(g, VLAI_OP_rope, OPS(rows_of(g, node.inputs[0], index), rows_of(g, node.inputs[1], index),
                                                  rows_of(g, node.inputs[2], index)), &node.attrs);
    if (node.op == VLAI_OP_split_cols && is_made_by(g, node.inputs[0], VLAI_OP_merge_rows)) {
        const vlai_node *merge = producer(g, node.inputs[0]);
        if (merge->inputs[3] == index || merge->inputs[4] == index) {
            vla_value pieces[VLAI_MAX_OUTPUTS];
            vla_split_cols(g, rows_of(g, node.inputs[0], index), node.n_outputs, node.attrs.split.widths, pieces);
            for (int i = 0; i < node.n_outputs; i++)
                if (node.outputs[i] == v)
                    return pieces[i];
        }
    }
    return vla_gather_rows(g, v, index, -1);
}

/* The gather_rows that alone reads the attention's output, as a node index; -1 when there is more or other. */
static int64_t only_gather(const vla_graph *g, const uses *u, const vlai_node *attention)
{
    vla_value o = attention->outputs[0];
    if (u->readers[o] != 1 || g->values[o].name || u->readers[attention->outputs[1]])
        return -1;
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        if (!u->live[n] || node->inputs[0] != o || node->op != VLAI_OP_gather_rows)
            continue;
        bool fewer = vlai_value(g, node->outputs[0])->shape[0] < vlai_value(g, o)->shape[0];
        return node->attrs.rows.skip < 0 && fewer && !vlai_value(g, node->outputs[0])->name ? (int64_t)n : -1;
    }
    return -1;
}

static vla_status narrow_queries(vla_graph *g, size_t *rewritten, vla_error *err)
{
    uses u;
    vla_status status = uses_of(g, &u, err);
    size_t n_nodes = g->n_nodes;
    for (size_t n = 0; status == VLA_OK && n < n_nodes; n++) {
        vlai_node node = g->nodes[n];
        int64_t at = node.op == VLAI_OP_attention && u.live[n] ? only_gather(g, &u, &node) : -1;
        if (at < 0)
            continue;
        vla_value result = g->nodes[at].outputs[0], index = g->nodes[at].inputs[1];
        g->layer = node.layer;
        g->lane = node.lane;
        /* The count of pairs is for FLOPs alone. Which of them the rows have is not known here: their share of the rows
         * stands in for it, and the attention of one layer is far below a thousandth of a model. */
        double share = (double)vlai_value(g, result)->shape[0] / (double)vlai_value(g, node.outputs[0])->shape[0];
        node.attrs.attention.pairs = (int64_t)((double)node.attrs.attention.pairs * share);
        /* Queries are no longer the rows of the keys: the tables alone say who sees whom. */
        node.attrs.attention.mask = VLA_MASK_COLUMNS;
        node.attrs.attention.longest = 0;
        vla_value o = vlai_graph_op(g, VLAI_OP_attention,
                                    OPS(rows_of(g, node.inputs[0], index), node.inputs[1], node.inputs[2],
                                        rows_of(g, node.inputs[3], index), rows_of(g, node.inputs[4], index), node.inputs[5]),
                                    &node.attrs);
        status = vla_graph_check(g, err);
        if (status == VLA_OK)
            vlai_graph_replace(g, result, o, 0);
        ++*rewritten;
    }
    uses_fini(&u);
    return status == VLA_OK ? reorder(g, err) : status;
}

/* A linear that only one operand reads: its columns are rows of its weight. */
static bool is_own_linear(const vla_graph *g, const uses *u, vla_value v)
{
    return is_made_by(g, v, VLAI_OP_matmul) && producer(g, v)->n_inputs < 4 && producer(g, v)->attrs.matmul.transpose_b && u->readers[v] == 1 && !g->values[v].name;
}

static bool is_own_merge(const vla_graph *g, const uses *u, vla_value v)
{
    return is_made_by(g, v, VLAI_OP_merge_rows) && u->readers[v] == 1 && !g->values[v].name;
}

/* Does columns_of drop work? */
static bool gains(const vla_graph *g, const uses *u, vla_value v)
{
    if (is_own_merge(g, u, v))
        return gains(g, u, producer(g, v)->inputs[0]) || gains(g, u, producer(g, v)->inputs[1]);
    return is_own_linear(g, u, v);
}

/* Columns first .. first+width of v. */
static vla_value columns_of(vla_graph *g, const uses *u, vla_value v, int64_t first, int64_t width)
{
    if (is_own_merge(g, u, v)) {
        vlai_node node = *producer(g, v);
        return vla_merge_rows(g, columns_of(g, u, node.inputs[0], first, width), columns_of(g, u, node.inputs[1], first, width),
                              node.inputs[2], node.inputs[3], node.inputs[4]);
    }
    if (is_own_linear(g, u, v)) {
        vlai_node node = *producer(g, v);
        vla_value w = vla_slice_rows(g, node.inputs[1], first, width);
        vla_value bias = node.n_inputs > 2 && node.inputs[2] != VLA_NONE ? vla_slice_rows(g, node.inputs[2], first, width) : VLA_NONE;
        return vlai_graph_op(g, VLAI_OP_matmul, bias == VLA_NONE ? 2 : 3, (vla_value[]){node.inputs[0], w, bias}, &node.attrs);
    }
    int64_t widths[3];
    vla_value pieces[3];
    int n = 0, mine = first > 0;
    if (first > 0)
        widths[n++] = first;
    widths[n++] = width;
    if (first + width < vlai_value(g, v)->shape[1])
        widths[n++] = vlai_value(g, v)->shape[1] - first - width;
    vla_split_cols(g, v, n, widths, pieces);
    return pieces[mine];
}

/* A split whose first or last pieces are unread takes only the columns in between. */
static vla_status narrow_columns(vla_graph *g, size_t *rewritten, vla_error *err)
{
    uses u;
    vla_status status = uses_of(g, &u, err);
    size_t n_nodes = g->n_nodes;
    for (size_t n = 0; status == VLA_OK && n < n_nodes; n++) {
        vlai_node node = g->nodes[n];
        if (node.op != VLAI_OP_split_cols || !u.live[n])
            continue;
        int low = 0, high = node.n_outputs;
        int64_t first = 0, width = 0;
        while (!u.readers[node.outputs[low]])
            first += node.attrs.split.widths[low++];
        while (!u.readers[node.outputs[high - 1]])
            high--;
        for (int i = low; i < high; i++)
            width += node.attrs.split.widths[i];
        if (high - low == node.n_outputs || !gains(g, &u, node.inputs[0]))
            continue;
        bool named = false;
        for (int i = low; i < high; i++)
            named = named || vlai_value(g, node.outputs[i])->name;
        if (named)
            continue;
        g->layer = node.layer;
        g->lane = node.lane;
        vla_value pieces[VLAI_MAX_OUTPUTS], x = columns_of(g, &u, node.inputs[0], first, width);
        if (high - low == 1)
            pieces[0] = x;
        else
            vla_split_cols(g, x, high - low, node.attrs.split.widths + low, pieces);
        status = vla_graph_check(g, err);
        for (int i = low; status == VLA_OK && i < high; i++)
            vlai_graph_replace(g, node.outputs[i], pieces[i - low], 0);
        ++*rewritten;
    }
    uses_fini(&u);
    return status == VLA_OK ? reorder(g, err) : status;
}

vla_status vlai_pass_narrow(vla_graph *g, size_t *rewritten, vla_error *err)
{
    size_t count = 0;
    int32_t layer = g->layer;
    int8_t lane = g->lane;
    if (g->gradient)
        return vlai_fail(err, VLA_E_INVALID, "narrow: runs before the backward pass is added, which this graph already has");
    vla_status status = vla_graph_check(g, err);
    if (status == VLA_OK)
        status = narrow_queries(g, &count, err);
    if (status == VLA_OK)
        status = narrow_columns(g, &count, err);
    g->layer = layer;
    g->lane = lane;
    if (rewritten)
        *rewritten = count;
    return status;
}
