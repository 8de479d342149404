/* Fuse: nodes that pass large values to each other become one, so that the values in between are never written.
 *
 * One row of the table below per pattern. Patterns are tried in its order, each over all nodes; a match puts the fused
 * node in the place of its last member, with the values that members made for others as its results. A pattern leaves
 * alone what somebody else needs too: a value in between must be made for the pattern's members only, have no name and not
 * be a result. Afterwards every node stands before its readers again, otherwise in the old order.
 *
 * Runs after recompute, on concrete types: what is made again in the backward is fused with what reads it there. */
#include "pass/fuse.h"

#include "base/fail.h"
#include "ops/op.h"

#include <string.h>

typedef struct fusion {
    vla_graph *g;
    const vla_plan_options *options;
    size_t n_values;       /* when the uses were counted */
    int32_t *first, *list; /* nodes that read value v, once per operand: list[first[v]] .. list[first[v + 1]] */
    bool *result;          /* per value: must exist whoever reads it */
    bool *gone;            /* per node: replaced */
    int32_t *seen, search; /* per node: the last search that came by; this one's number */
} fusion;

/* A member that stands further from the last one is left where it is: moved, it would keep its operands alive. */
enum { NEAR = 64 };

/* --- who reads what --- */

static void uses_fini(fusion *f)
{
    vlai_free(f->first);
    vlai_free(f->list);
    vlai_free(f->result);
    vlai_free(f->gone);
    vlai_free(f->seen);
    f->first = f->list = f->seen = NULL;
    f->result = f->gone = NULL;
}

static vla_status count_uses(fusion *f, vla_error *err)
{
    const vla_graph *g = f->g;
    size_t operands = 0;
    for (size_t n = 0; n < g->n_nodes; n++)
        operands += (size_t)g->nodes[n].n_inputs;
    f->n_values = g->n_values;
    f->first = vlai_calloc(g->n_values + 2, sizeof *f->first);
    f->list = vlai_array(operands + 1, sizeof *f->list);
    f->result = vlai_calloc(g->n_values + 1, sizeof *f->result);
    f->gone = vlai_calloc(g->n_nodes + 1, sizeof *f->gone);
    f->seen = vlai_calloc(g->n_nodes + 1, sizeof *f->seen);
    f->search = 0;
    if (!f->first || !f->list || !f->result || !f->gone || !f->seen)
        return vlai_nomem(err, (operands + g->n_values) * sizeof *f->list);
    /* Counted one place further on, so that filling the list moves first[v] to its start. */
    for (size_t n = 0; n < g->n_nodes; n++)
        for (int i = 0; i < g->nodes[n].n_inputs; i++)
            if (g->nodes[n].inputs[i] != VLA_NONE)
                f->first[g->nodes[n].inputs[i] + 2]++;
    for (size_t v = 2; v < g->n_values + 2; v++)
        f->first[v] += f->first[v - 1];
    for (size_t n = 0; n < g->n_nodes; n++)
        for (int i = 0; i < g->nodes[n].n_inputs; i++)
            if (g->nodes[n].inputs[i] != VLA_NONE)
                f->list[f->first[g->nodes[n].inputs[i] + 1]++] = (int32_t)n;
    for (size_t v = 0; v < g->n_values; v++)
        f->result[v] = g->values[v].kind != VLAI_TEMP || g->values[v].name;
    for (size_t v = 0; v < g->n_gradient; v++)
        if (g->values[v].kind == VLAI_PARAM && g->gradient[v] != VLA_NONE)
            f->result[g->gradient[v]] = true;
    if (g->loss != VLA_NONE)
        f->result[g->loss] = true;
    return VLA_OK;
}

static int readers(const fusion *f, vla_value v)
{
    return (size_t)v < f->n_values ? f->first[v + 1] - f->first[v] : 0;
}

static size_t reader(const fusion *f, vla_value v, int i)
{
    return (size_t)f->list[f->first[v] + i];
}

/* Is `v` made for `count` operands of other nodes and for nothing else? */
static bool is_inner(const fusion *f, vla_value v, int count)
{
    return (size_t)v < f->n_values && !f->result[v] && readers(f, v) == count;
}

/* May node n be part of a pattern: not replaced, and in a region that is to be fused? */
static bool is_open(const fusion *f, size_t n)
{
    int32_t layer = f->g->nodes[n].layer;
    unsigned region = layer >= 0 && layer < f->options->visual_layers ? VLA_FUSE_VISUAL : VLA_FUSE_MODEL;
    return !f->gone[n] && (f->options->fuse & region);
}

static bool is_op(const fusion *f, int64_t n, vlai_op op)
{
    return n >= 0 && f->g->nodes[n].op == op && is_open(f, (size_t)n);
}

static int64_t maker(const fusion *f, vla_value v, vlai_op op)
{
    int64_t n = v == VLA_NONE ? -1 : f->g->values[v].producer;
    return is_op(f, n, op) ? n : -1;
}

/* The one node of that op which reads `v`, and reads it alone; -1: other or more. */
static int64_t sole_reader(const fusion *f, vla_value v, vlai_op op)
{
    return is_inner(f, v, 1) && is_op(f, (int64_t)reader(f, v, 0), op) ? (int64_t)reader(f, v, 0) : -1;
}

static vla_dtype type_of(const fusion *f, vla_value v)
{
    return f->g->values[v].dtype;
}

static vla_value input(const fusion *f, int64_t n, int i)
{
    const vlai_node *node = &f->g->nodes[n];
    return i < node->n_inputs ? node->inputs[i] : VLA_NONE;
}

/* Does making `v` need a node of `members`? Only nodes from `first` on are looked at: the members stand there. */
static bool needs(fusion *f, vla_value v, const int64_t *members, int n_members, int64_t first)
{
    int64_t n = v == VLA_NONE ? -1 : f->g->values[v].producer;
    if (n < first || f->seen[n] == f->search)
        return false;
    f->seen[n] = f->search;
    for (int i = 0; i < n_members; i++)
        if (members[i] == n)
            return true;
    for (int i = 0; i < f->g->nodes[n].n_inputs; i++)
        if (needs(f, f->g->nodes[n].inputs[i], members, n_members, first))
            return true;
    return false;
}

/* Puts `node` where the last of the members (-1: left out) stands and drops the others. False, and nothing changes, when
 * an operand of it could only be made after a member. */
static bool replace(fusion *f, vlai_node node, const int64_t *members, int n_members)
{
    vla_graph *g = f->g;
    int64_t first = INT64_MAX, last = -1;
    for (int i = 0; i < n_members; i++)
        if (members[i] >= 0) {
            first = members[i] < first ? members[i] : first;
            last = members[i] > last ? members[i] : last;
        }
    f->search++;
    for (int i = 0; i < node.n_inputs; i++)
        if (needs(f, node.inputs[i], members, n_members, first))
            return false;
    for (int i = 0; i < n_members; i++)
        if (members[i] >= 0) {
            for (int k = 0; k < g->nodes[members[i]].n_outputs; k++)
                g->values[g->nodes[members[i]].outputs[k]].producer = -1;
            f->gone[members[i]] = members[i] != last;
        }
    node.backward = node.backward || g->nodes[last].backward;
    node.n_outputs = vlai_outputs_of(&node);
    for (int k = 0; k < node.n_outputs; k++)
        g->values[node.outputs[k]].producer = (int32_t)last;
    g->nodes[last] = node;
    return true;
}

/* A node of another op in the place and region of node n, without operands or results yet. */
static vlai_node like_node(const fusion *f, int64_t n, vlai_op op)
{
    vlai_node node = f->g->nodes[n];
    node.op = op;
    node.n_inputs = 0;
    for (int i = 0; i < VLAI_MAX_INPUTS; i++)
        node.inputs[i] = VLA_NONE;
    for (int i = 0; i < VLAI_MAX_OUTPUTS; i++)
        node.outputs[i] = VLA_NONE;
    memset(&node.attrs, 0, sizeof node.attrs);
    return node;
}

/* For members that no operand can need. */
static void must_replace(fusion *f, vlai_node node, const int64_t *members, int n_members)
{
    if (!replace(f, node, members, n_members) && f->g->error.status == VLA_OK)
        vlai_fail(&f->g->error, VLA_E_INTERNAL, "fuse: %s reads what it replaces", vlai_ops[node.op].name);
}

static void set_inputs(vlai_node *node, int n, const vla_value *inputs)
{
    node->n_inputs = (int8_t)n;
    memcpy(node->inputs, inputs, (size_t)n * sizeof *inputs);
}

/* --- the patterns: node n is the one of the op in the table; how many nodes were rewritten, 0 or 1 --- */

/* add(x, matmul(a, b, bias?)) = matmul(a, b, bias?, x), rounded once. */
static int residual(fusion *f, size_t n)
{
    vlai_node *add = &f->g->nodes[n];
    for (int side = 1; side >= 0; side--) {
        vla_value product = add->inputs[side], other = add->inputs[1 - side];
        int64_t m = maker(f, product, VLAI_OP_matmul);
        if (m < 0 || (int64_t)n - m > NEAR || !is_inner(f, product, 1) || f->g->nodes[m].n_inputs > 3 || f->g->nodes[m].n_outputs > 1)
            continue;
        vlai_node node = f->g->nodes[m];
        set_inputs(&node, 4, (vla_value[]){input(f, m, 0), input(f, m, 1), input(f, m, 2), other});
        node.outputs[0] = add->outputs[0];
        if (replace(f, node, (int64_t[]){m, (int64_t)n}, 2))
            return 1;
    }
    return 0;
}

/* rms_norm_grad, rms_norm_grad_weight of the same operands, the sum with the gradient that went around the norm, and the
 * norm itself where the backward makes it again. */
static int norm_backward(fusion *f, size_t n)
{
    vla_graph *g = f->g;
    const vlai_node *grad = &g->nodes[n];
    vla_value dx = grad->outputs[0], w = input(f, (int64_t)n, 3), other = VLA_NONE;
    int64_t weight = -1, again = -1, add = sole_reader(f, dx, VLAI_OP_add);
    if (add - (int64_t)n > NEAR)
        add = -1;
    for (int i = 0; w != VLA_NONE && i < readers(f, grad->inputs[2]); i++) {
        int64_t at = (int64_t)reader(f, grad->inputs[2], i);
        if (is_op(f, at, VLAI_OP_rms_norm_grad_weight) && !memcmp(g->nodes[at].inputs, grad->inputs, 3 * sizeof *grad->inputs))
            weight = at;
    }
    for (int i = 0; weight >= 0 && i < readers(f, w); i++) {
        int64_t at = (int64_t)reader(f, w, i);
        if (is_op(f, at, VLAI_OP_rms_norm) && g->nodes[at].backward && g->nodes[at].inputs[0] == grad->inputs[1] && g->nodes[at].inputs[1] == w &&
            is_inner(f, g->nodes[at].outputs[1], 0))
            again = at;
    }
    if (add >= 0)
        other = g->nodes[add].inputs[g->nodes[add].inputs[0] == dx];
    if ((w == VLA_NONE) != (weight < 0) || (add < 0 && weight < 0))
        return 0;
    vlai_node node = like_node(f, (int64_t)n, VLAI_OP_rms_norm_backward);
    set_inputs(&node, 5, (vla_value[]){grad->inputs[0], grad->inputs[1], grad->inputs[2], w, other});
    node.attrs.norm = grad->attrs.norm;
    node.outputs[0] = add >= 0 ? g->nodes[add].outputs[0] : dx;
    if (weight >= 0) {
        node.attrs.norm.dtype = g->nodes[weight].attrs.norm.dtype;
        node.outputs[1] = g->nodes[weight].outputs[0];
    }
    if (again >= 0) {
        vlai_node more = node;
        more.attrs.norm.again = 1;
        more.outputs[2] = g->nodes[again].outputs[0];
        if (replace(f, more, (int64_t[]){(int64_t)n, weight, add, again}, 4))
            return 1;
    }
    return replace(f, node, (int64_t[]){(int64_t)n, weight, add}, 3);
}

/* swiglu_grad(dy, x) and the product swiglu(x) that the backward makes again. */
static int swiglu_backward(fusion *f, size_t n)
{
    vla_graph *g = f->g;
    const vlai_node *grad = &g->nodes[n];
    vla_value dy = grad->inputs[0], x = grad->inputs[1];
    for (int i = 0; type_of(f, dy) == type_of(f, x) && i < readers(f, x); i++) {
        int64_t again = (int64_t)reader(f, x, i);
        if (!is_op(f, again, VLAI_OP_swiglu) || !g->nodes[again].backward)
            continue;
        vlai_node node = like_node(f, (int64_t)n, VLAI_OP_swiglu_backward);
        set_inputs(&node, 2, grad->inputs);
        node.attrs.swiglu.again = 1;
        node.outputs[0] = grad->outputs[0];
        node.outputs[1] = g->nodes[again].outputs[0];
        return replace(f, node, (int64_t[]){(int64_t)n, again}, 2);
    }
    return 0;
}

/* col_sum(dy) where dy is made: by a node that has every row of it in hand. That one stays in its place. */
static int made_sums(fusion *f, size_t n)
{
    vla_graph *g = f->g;
    vla_value dy = g->nodes[n].inputs[0];
    int64_t m = g->values[dy].producer;
    if (m < 0 || !is_open(f, (size_t)m) || readers(f, dy) < 2)
        return 0; /* not made at all, or for its sums alone */
    vlai_node node = g->nodes[m];
    if (node.op == VLAI_OP_swiglu_grad && type_of(f, node.inputs[0]) == type_of(f, node.inputs[1]))
        node.op = VLAI_OP_swiglu_backward;
    for (int k = 0; k < 2 && k < vlai_plain_outputs(&node); k++) {
        vla_dtype *type = vlai_sums_type(&node, k);
        if (!type || *type != VLA_DTYPE_NONE || node.outputs[k] != dy)
            continue;
        *type = g->nodes[n].attrs.matmul.dtype;
        node.n_outputs++;
        int at = vlai_sums_at(&node, k);
        memmove(node.outputs + at + 1, node.outputs + at, (size_t)(node.n_outputs - 1 - at) * sizeof *node.outputs);
        node.outputs[at] = g->nodes[n].outputs[0];
        g->values[node.outputs[at]].producer = (int32_t)m;
        g->nodes[m] = node;
        f->gone[n] = true;
        return 1;
    }
    return 0;
}

/* col_sum(dy) beside matmul(dy^T, x): the sums of the product's left operand. */
static int bias_sums(fusion *f, size_t n)
{
    vla_graph *g = f->g;
    vla_value dy = g->nodes[n].inputs[0];
    for (int i = 0; i < readers(f, dy); i++) {
        int64_t m = (int64_t)reader(f, dy, i);
        if (!is_op(f, m, VLAI_OP_matmul) || g->nodes[m].inputs[0] != dy || !g->nodes[m].attrs.matmul.transpose_a || g->nodes[m].n_outputs > 1)
            continue;
        vlai_node node = g->nodes[m];
        node.attrs.matmul.sums = g->nodes[n].attrs.matmul.dtype;
        node.outputs[1] = g->nodes[n].outputs[0];
        if (replace(f, node, (int64_t[]){(int64_t)n, m}, 2))
            return 1;
    }
    return 0;
}

/* A merge of two streams whose rows go to the places at_a and at_b; -1 when the graph has none. */
static int64_t find_merge(const fusion *f, vla_value at_a, vla_value at_b)
{
    for (int i = 0; i < readers(f, at_a); i++) {
        int64_t m = (int64_t)reader(f, at_a, i);
        if (f->g->nodes[m].op == VLAI_OP_merge_rows && f->g->nodes[m].inputs[3] == at_a && f->g->nodes[m].inputs[4] == at_b)
            return m;
    }
    return -1;
}

/* Rows of two streams added at their places into zeros, and the two summed = merge_rows: the places do not meet. */
static int route(fusion *f, size_t n)
{
    vla_graph *g = f->g;
    int64_t part[2];
    for (int i = 0; i < 2; i++) {
        part[i] = maker(f, g->nodes[n].inputs[i], VLAI_OP_scatter_add_rows);
        if (part[i] < 0 || !is_inner(f, g->nodes[n].inputs[i], 1) || g->nodes[part[i]].attrs.rows.skip >= 0 ||
            type_of(f, g->nodes[part[i]].inputs[0]) != g->nodes[part[i]].attrs.rows.dtype)
            return 0;
    }
    for (int swap = 0; swap < 2; swap++) {
        const vlai_node *a = &g->nodes[part[swap]], *b = &g->nodes[part[1 - swap]];
        int64_t merge = find_merge(f, a->inputs[1], b->inputs[1]);
        if (merge < 0 || g->values[g->nodes[merge].inputs[2]].shape[0] != a->attrs.rows.rows)
            continue;
        vlai_node node = like_node(f, (int64_t)n, VLAI_OP_merge_rows);
        set_inputs(&node, 5, (vla_value[]){a->inputs[0], b->inputs[0], g->nodes[merge].inputs[2], a->inputs[1], b->inputs[1]});
        node.outputs[0] = g->nodes[n].outputs[0];
        return replace(f, node, (int64_t[]){part[0], part[1], (int64_t)n}, 3);
    }
    return 0;
}

/* q, k, v of one attention: where they come from, and where their gradients go. */
typedef struct packed {
    int64_t rope[2], split, merge;        /* merge: -1 when the split's operand is taken as it is */
    int64_t grad, back[2], concat, row[2]; /* attention_grad, inverse rotations; row: the gathers of the two streams */
} packed;

/* Every reader of v is the attention `n` or its gradient. */
static bool only_attention(const fusion *f, vla_value v, size_t n, int64_t grad)
{
    if (f->result[v])
        return false;
    for (int i = 0; i < readers(f, v); i++)
        if (reader(f, v, i) != n && (int64_t)reader(f, v, i) != grad)
            return false;
    return true;
}

static bool match_forward(const fusion *f, size_t n, packed *p)
{
    const vla_graph *g = f->g;
    const vlai_node *attention = &g->nodes[n];
    const vla_attention_options *o = &attention->attrs.attention;
    p->split = maker(f, attention->inputs[2], VLAI_OP_split_cols);
    if (p->split < 0 || g->nodes[p->split].n_outputs != 3 || g->nodes[p->split].outputs[2] != attention->inputs[2])
        return false;
    for (int i = 0; i < 2; i++) {
        int64_t rope = p->rope[i] = maker(f, attention->inputs[i], VLAI_OP_rope);
        vla_value piece = g->nodes[p->split].outputs[i];
        if (rope < 0 || g->nodes[rope].inputs[0] != piece || !is_inner(f, piece, 1) || g->nodes[rope].attrs.rope.inverse ||
            g->nodes[rope].attrs.rope.head_dim != o->head_dim || type_of(f, g->nodes[rope].outputs[0]) != type_of(f, piece))
            return false;
    }
    const vlai_node *first = &g->nodes[p->rope[0]], *second = &g->nodes[p->rope[1]];
    if (first->inputs[1] != second->inputs[1] || first->inputs[2] != second->inputs[2])
        return false;
    p->merge = maker(f, g->nodes[p->split].inputs[0], VLAI_OP_merge_rows);
    if (p->merge >= 0 && !is_inner(f, g->nodes[p->split].inputs[0], 1))
        p->merge = -1;
    return true;
}

/* The gradient's way back: dq, dk rotated back, joined with dv, and rows handed to the streams. */
static bool match_backward(const fusion *f, packed *p)
{
    const vla_graph *g = f->g;
    const vlai_node *grad = &g->nodes[p->grad], *forward = &g->nodes[p->rope[0]];
    for (int i = 0; i < 2; i++) {
        int64_t rope = p->back[i] = sole_reader(f, grad->outputs[i], VLAI_OP_rope);
        if (rope < 0 || !g->nodes[rope].attrs.rope.inverse || g->nodes[rope].attrs.rope.head_dim != forward->attrs.rope.head_dim ||
            g->nodes[rope].inputs[1] != forward->inputs[1] || g->nodes[rope].inputs[2] != forward->inputs[2])
            return false;
    }
    p->concat = sole_reader(f, grad->outputs[2], VLAI_OP_concat_cols);
    if (p->concat < 0 || g->nodes[p->concat].n_inputs != 3 || g->nodes[p->concat].inputs[2] != grad->outputs[2])
        return false;
    for (int i = 0; i < 2; i++)
        if (g->nodes[p->concat].inputs[i] != g->nodes[p->back[i]].outputs[0] || !is_inner(f, g->nodes[p->back[i]].outputs[0], 1))
            return false;
    /* Routed when nobody but the gathers of the two streams reads the whole. */
    vla_value whole = g->nodes[p->concat].outputs[0];
    int n = readers(f, whole);
    p->row[0] = p->row[1] = -1;
    if (p->merge < 0 || f->result[whole] || n < 1 || n > 2)
        return true;
    for (int i = 0; i < n; i++) {
        int64_t at = (int64_t)reader(f, whole, i);
        bool gather = is_op(f, at, VLAI_OP_gather_rows) && g->nodes[at].attrs.rows.skip < 0;
        for (int s = 0; gather && s < 2; s++)
            if (g->nodes[at].inputs[1] == g->nodes[p->merge].inputs[3 + s])
                p->row[s] = at;
    }
    if ((p->row[0] >= 0) + (p->row[1] >= 0) != n)
        p->row[0] = p->row[1] = -1;
    return true;
}

static vla_value new_value(fusion *f, vla_value like, int64_t cols)
{
    vla_graph *g = f->g;
    vlai_value_info of = g->values[like];
    vla_value v = vlai_graph_leaf(g, VLAI_TEMP, NULL, of.dtype, 2, (int64_t[]){of.shape[0], cols});
    if (v != VLA_NONE)
        g->values[v].layer = of.layer;
    return v;
}

/* The four tables of an attention, from operand `from` on, behind what `node` has. */
static void add_tables(const fusion *f, vlai_node *node, int64_t attention, int from)
{
    for (int i = 0; i < 4 && from + i < f->g->nodes[attention].n_inputs; i++)
        node->inputs[node->n_inputs++] = input(f, attention, from + i);
    node->attrs.attention = f->g->nodes[attention].attrs.attention;
}

/* attention of pieces that were merged, split and rotated = attention_qkv of what qkv_rope makes; its gradient likewise. */
static int pack_attention(fusion *f, size_t n)
{
    vla_graph *g = f->g;
    packed p = {.grad = -1};
    if (!match_forward(f, n, &p))
        return 0;
    const vla_value *q = g->nodes[n].inputs;
    for (int i = 0; i < readers(f, q[0]); i++) {
        int64_t at = (int64_t)reader(f, q[0], i);
        if (is_op(f, at, VLAI_OP_attention_grad) && g->nodes[at].inputs[1] == q[0] && g->nodes[at].inputs[2] == q[1] && g->nodes[at].inputs[3] == q[2])
            p.grad = at;
    }
    for (int i = 0; i < 3; i++)
        if (!only_attention(f, q[i], n, p.grad))
            return 0;
    if (p.grad >= 0 && !match_backward(f, &p))
        return 0;
    const vla_attention_options *o = &g->nodes[n].attrs.attention;
    int64_t cols = (int64_t)(o->heads + 2 * o->kv_heads) * o->head_dim;
    vla_value qkv = new_value(f, q[0], cols), dqkv = p.grad >= 0 ? new_value(f, q[0], cols) : VLA_NONE;
    if (g->error.status != VLA_OK)
        return 0;
    vla_value cosine = input(f, p.rope[0], 1), sine = input(f, p.rope[0], 2);
    vlai_attrs turned = {.rope = {.head_dim = o->head_dim, .heads = o->heads + o->kv_heads}};

    if (p.grad >= 0) {
        vlai_node grad = like_node(f, p.grad, VLAI_OP_attention_qkv_grad);
        set_inputs(&grad, 4, (vla_value[]){input(f, p.grad, 0), qkv, input(f, p.grad, 4), input(f, p.grad, 5)});
        add_tables(f, &grad, p.grad, 6);
        grad.outputs[0] = dqkv;
        bool routed = p.row[0] >= 0 || p.row[1] >= 0;
        int64_t one = p.row[0] >= 0 ? p.row[0] : p.row[1], two = p.row[0] >= 0 ? p.row[1] : -1;
        vlai_node back = like_node(f, p.concat, VLAI_OP_qkv_rope_grad);
        set_inputs(&back, 5, (vla_value[]){dqkv, cosine, sine, routed ? input(f, one, 1) : VLA_NONE, two >= 0 ? input(f, two, 1) : VLA_NONE});
        back.attrs = turned;
        back.outputs[0] = g->nodes[routed ? one : p.concat].outputs[0];
        back.outputs[1] = two >= 0 ? g->nodes[two].outputs[0] : VLA_NONE;
        must_replace(f, grad, &p.grad, 1);
        must_replace(f, back, (int64_t[]){p.back[0], p.back[1], p.concat, routed ? one : -1, two}, 5);
    }
    vlai_node rope = like_node(f, p.rope[1], VLAI_OP_qkv_rope);
    if (p.merge >= 0)
        set_inputs(&rope, 5, (vla_value[]){input(f, p.merge, 0), input(f, p.merge, 1), input(f, p.merge, 2), cosine, sine});
    else
        set_inputs(&rope, 5, (vla_value[]){input(f, p.split, 0), VLA_NONE, VLA_NONE, cosine, sine});
    rope.attrs = turned;
    rope.outputs[0] = qkv;
    vlai_node attention = like_node(f, (int64_t)n, VLAI_OP_attention_qkv);
    set_inputs(&attention, 1, &qkv);
    add_tables(f, &attention, (int64_t)n, 3);
    memcpy(attention.outputs, g->nodes[n].outputs, 2 * sizeof *attention.outputs);
    must_replace(f, rope, (int64_t[]){p.merge, p.split, p.rope[0], p.rope[1]}, 4);
    must_replace(f, attention, (int64_t[]){(int64_t)n}, 1);
    return 1;
}

/* The readers of o, when they are its gradient and gathers of the rows at[0] and at[1] alone: the gradient, or -1; the first
 * gather of each in made[]. False: there are others. */
static bool match_streams(const fusion *f, size_t n, vla_value at[2], int64_t made[2], int64_t *grad)
{
    const vla_graph *g = f->g;
    vla_value o = g->nodes[n].outputs[0];
    at[0] = at[1] = VLA_NONE;
    *grad = made[0] = made[1] = -1;
    for (int i = 0; i < readers(f, o); i++) {
        int64_t r = (int64_t)reader(f, o, i);
        const vlai_node *node = &g->nodes[r];
        if (is_op(f, r, VLAI_OP_attention_qkv_grad) && *grad < 0 && node->inputs[2] == o) {
            *grad = r;
        } else if (is_op(f, r, VLAI_OP_gather_rows)) {
            int s = at[0] != VLA_NONE && at[0] != node->inputs[1];
            if (at[s] != VLA_NONE && (at[s] != node->inputs[1] || f->result[node->outputs[0]]))
                return false;
            at[s] = node->inputs[1];
            made[s] = made[s] < 0 ? r : made[s];
        } else {
            return false;
        }
    }
    return made[1] >= 0 && !f->result[o];
}

/* Rows of o gathered for two streams, and do merged from theirs: the kernels look up where each row lies. */
static int attention_streams(fusion *f, size_t n)
{
    vla_graph *g = f->g;
    vla_value at[2], o = g->nodes[n].outputs[0];
    int64_t made[2], grad, way = -1;
    if (input(f, (int64_t)n, 5) != VLA_NONE || !match_streams(f, n, at, made, &grad))
        return 0;
    int64_t merge = find_merge(f, at[0], at[1]);
    if (merge < 0) {
        vla_value index = at[0];
        int64_t gather = made[0];
        at[0] = at[1], made[0] = made[1];
        at[1] = index, made[1] = gather;
        merge = find_merge(f, at[0], at[1]);
    }
    vla_value map = merge < 0 ? VLA_NONE : g->nodes[merge].inputs[2];
    if (merge < 0 || g->values[map].shape[0] != g->values[o].shape[0] || g->values[map].producer >= (int64_t)n ||
        g->values[at[0]].producer >= (int64_t)n)
        return 0;
    if (grad >= 0) {
        vla_value dy = g->nodes[grad].inputs[0];
        way = maker(f, dy, VLAI_OP_merge_rows);
        if (way < 0 || !is_inner(f, dy, 1) || g->nodes[way].inputs[2] != map || g->nodes[way].inputs[3] != at[0] || g->nodes[way].inputs[4] != at[1])
            return 0;
    }
    vla_value part[2] = {g->nodes[made[0]].outputs[0], g->nodes[made[1]].outputs[0]};
    for (int i = 0; i < readers(f, o); i++) {
        int64_t r = (int64_t)reader(f, o, i);
        if (r == grad)
            continue;
        f->gone[r] = true;
        g->values[g->nodes[r].outputs[0]].producer = -1;
        vlai_graph_replace(g, g->nodes[r].outputs[0], part[g->nodes[r].inputs[1] == at[1]], 0);
    }
    vlai_node node = g->nodes[n];
    set_inputs(&node, 7, (vla_value[]){node.inputs[0], node.inputs[1], node.inputs[2], node.inputs[3], input(f, (int64_t)n, 4), map, at[0]});
    node.outputs[0] = part[0];
    node.outputs[2] = part[1];
    node.n_outputs = 3;
    g->values[o].producer = -1;
    g->values[part[0]].producer = g->values[part[1]].producer = (int32_t)n;
    g->nodes[n] = node;
    if (grad < 0)
        return 1;
    node = g->nodes[grad];
    const vla_value *from = g->nodes[way].inputs;
    set_inputs(&node, 11, (vla_value[]){from[0], node.inputs[1], part[0], node.inputs[3], node.inputs[4], node.inputs[5], node.inputs[6],
                                        input(f, grad, 7), map, from[1], part[1]});
    must_replace(f, node, (int64_t[]){way, grad}, 2);
    return 1;
}

static const struct {
    const char *name, *saves;
    vlai_op op; /* at which a match is looked for */
    int (*match)(fusion *f, size_t n);
} patterns[VLAI_FUSE_COUNT] = {
    {"route", "two sums over all rows, and their zeros", VLAI_OP_add, route},
    {"attention qkv", "the copies that merge, split and join q, k, v and their gradients", VLAI_OP_attention, pack_attention},
    {"attention streams", "o taken apart and its gradient put together", VLAI_OP_attention_qkv, attention_streams},
    {"rms_norm backward", "the sum with the residual gradient; dy and x read twice, three times where the norm is made again", VLAI_OP_rms_norm_grad, norm_backward},
    {"matmul residual", "the product written and read once more", VLAI_OP_add, residual},
    {"swiglu backward", "gate and up read twice", VLAI_OP_swiglu_grad, swiglu_backward},
    {"made sums", "dy read once more for the bias, by products that are slower for it", VLAI_OP_col_sum, made_sums},
    {"matmul sums", "dy read once more for the bias", VLAI_OP_col_sum, bias_sums},
};

const char *vlai_fuse_name(int pattern)
{
    return patterns[pattern].name;
}

const char *vlai_fuse_saves(int pattern)
{
    return patterns[pattern].saves;
}

vla_status vlai_pass_fuse(vla_graph *g, const vla_plan_options *options, size_t fused[VLAI_FUSE_COUNT], vla_error *err)
{
    fusion f = {.g = g, .options = options};
    vla_status status = VLA_OK;
    memset(fused, 0, VLAI_FUSE_COUNT * sizeof *fused);
    if (!options->fuse)
        return VLA_OK;
    for (int p = 0; p < VLAI_FUSE_COUNT && status == VLA_OK; p++) {
        status = count_uses(&f, err);
        for (size_t n = 0; status == VLA_OK && n < g->n_nodes; n++)
            if (g->nodes[n].op == patterns[p].op && is_open(&f, n))
                fused[p] += (size_t)patterns[p].match(&f, n);
        if (status == VLA_OK)
            status = vla_graph_check(g, err);
        if (status == VLA_OK)
            status = vlai_graph_order(g, f.gone, err);
        uses_fini(&f);
    }
    return status == VLA_OK ? vlai_graph_verify(g, "fuse", err) : status;
}
