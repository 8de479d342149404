/* Shape rules: one function per op. Each checks its operands and says what comes out; messages give the shapes. */
#include "base/fail.h"
#include "ops/op.h"
#include "vla/run.h"

#include <stdio.h>
#include <string.h>

#define RULE(name) vla_status vlai_infer_##name(const vla_graph *g, vlai_node *node, vlai_shape *out, vla_error *err)

static const vlai_value_info *operand(const vla_graph *g, const vlai_node *node, int i)
{
    static const vlai_value_info none = {.rank = 0};
    return node->inputs[i] == VLA_NONE ? &none : vlai_value(g, node->inputs[i]);
}

static bool present(const vlai_node *node, int i)
{
    return i < node->n_inputs && node->inputs[i] != VLA_NONE;
}

static void describe(const vlai_value_info *v, char *text, size_t size)
{
    int n = snprintf(text, size, "%s[", vlai_graph_dtype_name(v->dtype));
    for (int i = 0; i < v->rank && n > 0 && (size_t)n < size; i++)
        n += snprintf(text + n, size - (size_t)n, "%s%lld", i ? "," : "", (long long)v->shape[i]);
    if (n > 0 && (size_t)n < size)
        snprintf(text + n, size - (size_t)n, "]%s%s", v->name ? " " : "", v->name ? v->name : "");
}

static vla_status bad(const vla_graph *g, const vlai_node *node, const char *wanted, vla_error *err)
{
    char text[640];
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < node->n_inputs && used + 2 < sizeof text; i++) {
        char one[128];
        describe(operand(g, node, i), one, sizeof one);
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? ", " : "", one);
    }
    return vlai_fail(err, VLA_E_SHAPE, "operands %s; wanted %s", text, wanted);
}

static bool is_float(vla_dtype d)
{
    return d == VLA_F32 || d == VLA_F64 || d == VLA_BF16 || d == VLA_COMPUTE || d == VLA_PRECISE;
}

static bool same_shape(const vlai_value_info *a, const vlai_value_info *b)
{
    if (a->rank != b->rank)
        return false;
    for (int i = 0; i < a->rank; i++)
        if (a->shape[i] != b->shape[i])
            return false;
    return true;
}

static void like(vlai_shape *out, const vlai_value_info *v)
{
    out->dtype = v->dtype;
    out->rank = v->rank;
    memcpy(out->dim, v->shape, sizeof out->dim);
}

static void set1(vlai_shape *out, vla_dtype dtype, int64_t a)
{
    *out = (vlai_shape){dtype, 1, {a}};
}

static void set2(vlai_shape *out, vla_dtype dtype, int64_t a, int64_t b)
{
    *out = (vlai_shape){dtype, 2, {a, b}};
}

/* The precise type that goes with a value's type: fp64 graphs are fp64 throughout. */
static vla_dtype precise(vla_dtype d)
{
    return d == VLA_F64 ? VLA_F64 : d == VLA_F32 || d == VLA_BF16 ? VLA_F32 : VLA_PRECISE;
}

#define WANT(condition, text)                  \
    do {                                       \
        if (!(condition))                      \
            return bad(g, node, (text), err);  \
    } while (0)

RULE(matmul)
{
    const vlai_value_info *a = operand(g, node, 0), *b = operand(g, node, 1);
    WANT(a->rank == 2 && b->rank == 2 && is_float(a->dtype) && is_float(b->dtype), "two float matrices");
    int ta = node->attrs.matmul.transpose_a, tb = node->attrs.matmul.transpose_b;
    int64_t m = a->shape[ta ? 1 : 0], k = a->shape[ta ? 0 : 1], k2 = b->shape[tb ? 1 : 0], n = b->shape[tb ? 0 : 1];
    WANT(k == k2, "equal inner dimensions");
    if (present(node, 2)) {
        const vlai_value_info *bias = operand(g, node, 2);
        WANT(bias->rank == 1 && bias->shape[0] == n, "a bias as long as the result is wide");
    }
    if (node->attrs.matmul.dtype == VLA_DTYPE_NONE)
        node->attrs.matmul.dtype = a->dtype;
    set2(out, node->attrs.matmul.dtype, m, n);
    if (present(node, 3)) {
        const vlai_value_info *residual = operand(g, node, 3);
        WANT(residual->rank == 2 && residual->shape[0] == m && residual->shape[1] == n && residual->dtype == node->attrs.matmul.dtype,
             "a residual of the result's shape and type");
    }
    if (node->attrs.matmul.sums != VLA_DTYPE_NONE)
        set1(&out[1], node->attrs.matmul.sums, m);
    return VLA_OK;
}

static vla_status binary(const vla_graph *g, vlai_node *node, vlai_shape *out, vla_error *err)
{
    const vlai_value_info *a = operand(g, node, 0), *b = operand(g, node, 1);
    WANT(same_shape(a, b) && a->dtype == b->dtype && is_float(a->dtype), "two float operands of one shape and type");
    like(out, a);
    return VLA_OK;
}

RULE(add) { return binary(g, node, out, err); }
RULE(sub) { return binary(g, node, out, err); }
RULE(mul) { return binary(g, node, out, err); }
RULE(silu_grad) { return binary(g, node, out, err); }
RULE(gelu_grad) { return binary(g, node, out, err); }

static vla_status unary(const vla_graph *g, vlai_node *node, vlai_shape *out, vla_error *err)
{
    WANT(is_float(operand(g, node, 0)->dtype), "a float operand");
    like(out, operand(g, node, 0));
    return VLA_OK;
}

RULE(scale) { return unary(g, node, out, err); }
RULE(stop_gradient) { return unary(g, node, out, err); }
RULE(silu) { return unary(g, node, out, err); }
RULE(gelu) { return unary(g, node, out, err); }
RULE(copy) { return unary(g, node, out, err); }

RULE(cast)
{
    WANT(is_float(operand(g, node, 0)->dtype) && is_float(node->attrs.fill.dtype), "a float operand and a float type");
    like(out, operand(g, node, 0));
    out->dtype = node->attrs.fill.dtype;
    return VLA_OK;
}

RULE(swiglu)
{
    const vlai_value_info *x = operand(g, node, 0);
    WANT(x->rank == 2 && x->shape[1] % 2 == 0 && is_float(x->dtype), "a matrix of even width");
    set2(out, x->dtype, x->shape[0], x->shape[1] / 2);
    return VLA_OK;
}

RULE(swiglu_grad)
{
    const vlai_value_info *dy = operand(g, node, 0), *x = operand(g, node, 1);
    WANT(x->rank == 2 && dy->rank == 2 && x->shape[0] == dy->shape[0] && x->shape[1] == 2 * dy->shape[1], "dy [N,I], x [N,2I]");
    like(out, x);
    return VLA_OK;
}

/* The column sums of results of the same width, behind the others. */
static void add_sums(vlai_node *node, vlai_shape *out)
{
    for (int k = 0; k < 2; k++)
        if (vlai_sums_at(node, k) >= 0)
            set1(&out[vlai_sums_at(node, k)], *vlai_sums_type(node, k), out[0].dim[1]);
}

RULE(swiglu_backward)
{
    VLA_TRY(vlai_infer_swiglu_grad(g, node, out, err));
    WANT(operand(g, node, 0)->dtype == operand(g, node, 1)->dtype, "dy and x of one type");
    if (node->attrs.swiglu.again)
        like(&out[1], operand(g, node, 0));
    add_sums(node, out);
    return VLA_OK;
}

RULE(chain)
{
    const vlai_chain *c = &node->attrs.chain;
    WANT(c->n > 0 && c->n <= VLAI_CHAIN_STEPS && c->steps[0].a >= 0 && c->steps[0].a < node->n_inputs, "one to 12 steps from an operand on");
    const vlai_value_info *x = operand(g, node, c->steps[0].a);
    for (int i = 0; i < c->n; i++) {
        const vlai_chain_step *s = &c->steps[i];
        bool two = vlai_ops[s->op].inputs_min == 2;
        WANT(s->a < VLAI_CHAIN_INPUTS + i && (!two || s->b < VLAI_CHAIN_INPUTS + i), "steps that read earlier ones");
        WANT(s->a >= VLAI_CHAIN_INPUTS || same_shape(operand(g, node, s->a), x), "operands of one shape");
        if (two && s->b < VLAI_CHAIN_INPUTS && s->op == VLAI_OP_mul_rows)
            WANT(operand(g, node, s->b)->elements == x->shape[0], "one factor a row");
        else if (two && s->b < VLAI_CHAIN_INPUTS)
            WANT(same_shape(operand(g, node, s->b), x), "operands of one shape");
    }
    like(out, x);
    out->dtype = c->steps[c->n - 1].dtype;
    return VLA_OK;
}

RULE(rms_norm)
{
    const vlai_value_info *x = operand(g, node, 0);
    WANT(x->rank == 2 && is_float(x->dtype), "a float matrix");
    if (present(node, 1)) {
        const vlai_value_info *w = operand(g, node, 1);
        WANT(w->rank == 1 && w->shape[0] == x->shape[1], "a weight as long as x is wide");
    }
    like(&out[0], x);
    set1(&out[1], precise(x->dtype), x->shape[0]);
    return VLA_OK;
}

RULE(rms_norm_grad)
{
    const vlai_value_info *dy = operand(g, node, 0), *x = operand(g, node, 1), *rstd = operand(g, node, 2);
    WANT(same_shape(dy, x) && x->rank == 2 && rstd->rank == 1 && rstd->shape[0] == x->shape[0], "dy, x [N,C], rstd [N]");
    like(out, x);
    return VLA_OK;
}

RULE(rms_norm_grad_weight)
{
    const vlai_value_info *dy = operand(g, node, 0), *x = operand(g, node, 1), *rstd = operand(g, node, 2);
    WANT(same_shape(dy, x) && x->rank == 2 && rstd->rank == 1 && rstd->shape[0] == x->shape[0], "dy, x [N,C], rstd [N]");
    set1(out, node->attrs.norm.dtype, x->shape[1]);
    return VLA_OK;
}

RULE(rms_norm_backward)
{
    const vlai_value_info *x = operand(g, node, 1);
    VLA_TRY(vlai_infer_rms_norm_grad(g, node, out, err));
    WANT(!present(node, 3) || (operand(g, node, 3)->rank == 1 && operand(g, node, 3)->shape[0] == x->shape[1]), "a weight as long as x is wide");
    WANT(!present(node, 4) || (same_shape(operand(g, node, 4), x) && operand(g, node, 4)->dtype == x->dtype), "an addend of x's shape and type");
    WANT(present(node, 3) || !node->attrs.norm.again, "a weight where the norm is made again");
    if (present(node, 3))
        set1(&out[1], node->attrs.norm.dtype, x->shape[1]);
    if (node->attrs.norm.again)
        like(&out[2], x);
    add_sums(node, out);
    return VLA_OK;
}

RULE(rope_table)
{
    const vlai_value_info *p = operand(g, node, 0);
    const vla_rope_options *o = &node->attrs.rope_table;
    WANT(p->rank == 2 && p->dtype == VLA_I32 && p->shape[0] == o->axes && o->axes <= 4, "positions i32 [axes,N]");
    int sum = 0;
    for (int i = 0; i < o->axes; i++)
        sum += o->sections[i];
    WANT(sum == o->half && o->half > 0, "sections that sum to half the head dimension");
    set2(&out[0], o->dtype, p->shape[1], o->half);
    out[1] = out[0];
    return VLA_OK;
}

RULE(rope)
{
    const vlai_value_info *x = operand(g, node, 0), *c = operand(g, node, 1), *s = operand(g, node, 2);
    int64_t d = node->attrs.rope.head_dim;
    WANT(x->rank == 2 && d > 0 && d % 2 == 0 && x->shape[1] % d == 0, "x [N, heads*head_dim]");
    WANT(same_shape(c, s) && c->rank == 2 && c->shape[0] == x->shape[0] && c->shape[1] == d / 2, "cos, sin [N, head_dim/2]");
    like(out, x);
    return VLA_OK;
}

static bool index_vector(const vlai_value_info *v)
{
    return v->rank == 1 && v->dtype == VLA_I32;
}

/* cos, sin [rows, head_dim/2], and heads of that width in a row of `cols` columns. */
static vla_status rope_operands(const vla_graph *g, const vlai_node *node, int tables, int64_t rows, int64_t cols, vla_error *err)
{
    const vlai_value_info *c = operand(g, node, tables), *s = operand(g, node, tables + 1);
    int64_t d = node->attrs.rope.head_dim, heads = node->attrs.rope.heads;
    WANT(d > 0 && d % 2 == 0 && heads >= 0 && heads * d <= cols, "rotated heads of an even width that fit in a row");
    WANT(same_shape(c, s) && c->dtype == s->dtype && c->rank == 2 && c->shape[0] == rows && c->shape[1] == d / 2, "cos, sin [N, head_dim/2]");
    return VLA_OK;
}

RULE(qkv_rope)
{
    const vlai_value_info *a = operand(g, node, 0), *b = operand(g, node, 1), *map = operand(g, node, 2);
    WANT(a->rank == 2 && is_float(a->dtype) && present(node, 1) == present(node, 2), "a float matrix, and b together with map");
    int64_t rows = a->shape[0];
    if (present(node, 1)) {
        rows += b->shape[0];
        WANT(b->rank == 2 && a->shape[1] == b->shape[1] && a->dtype == b->dtype && index_vector(map) && map->shape[0] == rows,
             "a [Na,W], b [Nb,W] of one type, map [Na+Nb]");
    }
    VLA_TRY(rope_operands(g, node, 3, rows, a->shape[1], err));
    set2(out, a->dtype, rows, a->shape[1]);
    return VLA_OK;
}

RULE(qkv_rope_grad)
{
    const vlai_value_info *d = operand(g, node, 0);
    WANT(d->rank == 2 && is_float(d->dtype), "a float matrix");
    VLA_TRY(rope_operands(g, node, 1, d->shape[0], d->shape[1], err));
    WANT(!present(node, 4) || present(node, 3), "at_a where there is at_b");
    for (int i = 0; i < 2; i++) {
        like(&out[i], d);
        if (present(node, 3 + i)) {
            WANT(index_vector(operand(g, node, 3 + i)), "an i32 index [rows]");
            out[i].dim[0] = operand(g, node, 3 + i)->shape[0];
        }
    }
    WANT(node->attrs.rope.sums[1] == VLA_DTYPE_NONE || present(node, 4), "at_b where its sums are wanted");
    add_sums(node, out);
    return VLA_OK;
}

/* The optional segments: there exactly when the mask is said in their terms. */
static vla_status segments_operand(const vla_graph *g, const vlai_node *node, int at, int64_t queries, int64_t keys, vla_error *err)
{
    const vla_attention_options *o = &node->attrs.attention;
    WANT(present(node, at) == (o->mask != VLA_MASK_COLUMNS), "segments for a causal or full mask, none for a mask by columns");
    WANT(!present(node, at) || (index_vector(operand(g, node, at)) && operand(g, node, at)->shape[0] >= 1), "segments i32 [S+1]");
    WANT(!present(node, at) || (queries == keys && o->longest >= 0 && o->longest <= queries), "as many queries as keys, and `longest` of them at most");
    return VLA_OK;
}

static vla_status attention_operands(const vla_graph *g, const vlai_node *node, int q, int tables, vla_error *err)
{
    const vla_attention_options *o = &node->attrs.attention;
    const vlai_value_info *vq = operand(g, node, q), *vk = operand(g, node, q + 1), *vv = operand(g, node, q + 2);
    WANT(o->kv_heads > 0 && o->heads % o->kv_heads == 0 && o->head_dim > 0, "heads a multiple of kv_heads");
    WANT(vq->rank == 2 && vq->shape[1] == (int64_t)o->heads * o->head_dim, "q [Nq, heads*head_dim]");
    WANT(vk->rank == 2 && vk->shape[1] == (int64_t)o->kv_heads * o->head_dim && same_shape(vk, vv), "k, v [Nk, kv_heads*head_dim]");
    const vlai_value_info *qpos = operand(g, node, tables), *rows = operand(g, node, tables + 1), *cols = operand(g, node, tables + 2);
    WANT(qpos->dtype == VLA_I32 && rows->dtype == VLA_I32 && cols->dtype == VLA_I32, "integer tables");
    WANT(qpos->rank == 1 && qpos->shape[0] == vq->shape[0], "qpos [Nq]");
    WANT(rows->rank == 2 && rows->shape[0] == vq->shape[0] && rows->shape[1] == 2, "rows [Nq,2]");
    WANT(cols->rank == 2 && cols->shape[0] == vk->shape[0] && cols->shape[1] == 4, "cols [Nk,4]");
    return segments_operand(g, node, tables + 3, vq->shape[0], vk->shape[0], err);
}

RULE(attention)
{
    VLA_TRY(attention_operands(g, node, 0, 3, err));
    const vlai_value_info *q = operand(g, node, 0);
    like(&out[0], q);
    set2(&out[1], precise(q->dtype), q->shape[0], node->attrs.attention.heads);
    return VLA_OK;
}

RULE(attention_grad)
{
    VLA_TRY(attention_operands(g, node, 1, 6, err));
    WANT(same_shape(operand(g, node, 0), operand(g, node, 1)) && same_shape(operand(g, node, 1), operand(g, node, 4)), "do, q, o of one shape");
    for (int i = 0; i < 3; i++)
        like(&out[i], operand(g, node, 1 + i));
    return VLA_OK;
}

static vla_status packed_operands(const vla_graph *g, const vlai_node *node, int qkv, int tables, vla_error *err)
{
    const vla_attention_options *o = &node->attrs.attention;
    const vlai_value_info *x = operand(g, node, qkv);
    WANT(o->kv_heads > 0 && o->heads % o->kv_heads == 0 && o->head_dim > 0, "heads a multiple of kv_heads");
    WANT(x->rank == 2 && is_float(x->dtype) && x->shape[1] == (int64_t)(o->heads + 2 * o->kv_heads) * o->head_dim,
         "qkv [N, (heads + 2 kv_heads) head_dim]");
    const vlai_value_info *qpos = operand(g, node, tables), *rows = operand(g, node, tables + 1), *cols = operand(g, node, tables + 2);
    WANT(index_vector(qpos) && qpos->shape[0] == x->shape[0], "qpos i32 [N]");
    WANT(rows->dtype == VLA_I32 && rows->rank == 2 && rows->shape[0] == x->shape[0] && rows->shape[1] == 2, "rows i32 [N,2]");
    WANT(cols->dtype == VLA_I32 && cols->rank == 2 && cols->shape[0] == x->shape[0] && cols->shape[1] == 4, "cols i32 [N,4]");
    return segments_operand(g, node, tables + 3, x->shape[0], x->shape[0], err);
}

/* The optional map of rows to two streams: of all rows. */
static vla_status map_operand(const vla_graph *g, const vlai_node *node, int at, int64_t rows, vla_error *err)
{
    WANT(!present(node, at) || (index_vector(operand(g, node, at)) && operand(g, node, at)->shape[0] == rows), "map i32 [N]");
    return VLA_OK;
}

RULE(attention_qkv)
{
    VLA_TRY(packed_operands(g, node, 0, 1, err));
    const vlai_value_info *x = operand(g, node, 0);
    int64_t rows = x->shape[0], wide = (int64_t)node->attrs.attention.heads * node->attrs.attention.head_dim, first = rows;
    VLA_TRY(map_operand(g, node, 5, rows, err));
    WANT(present(node, 5) == present(node, 6), "map and at_a, or neither");
    if (present(node, 5)) {
        WANT(index_vector(operand(g, node, 6)) && operand(g, node, 6)->shape[0] <= rows, "at_a i32 [Na], of at most N rows");
        first = operand(g, node, 6)->shape[0];
        set2(&out[2], x->dtype, rows - first, wide);
    }
    set2(&out[0], x->dtype, first, wide);
    set2(&out[1], precise(x->dtype), rows, node->attrs.attention.heads);
    return VLA_OK;
}

RULE(attention_qkv_grad)
{
    VLA_TRY(packed_operands(g, node, 1, 4, err));
    const vlai_value_info *dy = operand(g, node, 0), *x = operand(g, node, 1);
    int64_t wide = (int64_t)node->attrs.attention.heads * node->attrs.attention.head_dim, rows = dy->shape[0];
    WANT(same_shape(dy, operand(g, node, 2)) && dy->rank == 2 && dy->shape[1] == wide, "do, o [N, heads head_dim], with a map of stream a's rows");
    VLA_TRY(map_operand(g, node, 8, x->shape[0], err));
    WANT(present(node, 8) == present(node, 9) && present(node, 8) == present(node, 10), "map, do_b and o_b, or none of them");
    if (present(node, 8)) {
        const vlai_value_info *dy_b = operand(g, node, 9);
        WANT(same_shape(dy_b, operand(g, node, 10)) && dy_b->rank == 2 && dy_b->shape[1] == wide, "do_b, o_b [Nb, heads head_dim]");
        rows += dy_b->shape[0];
    }
    WANT(rows == x->shape[0], "as many rows of do as of qkv");
    like(out, x);
    return VLA_OK;
}

RULE(gather_rows)
{
    const vlai_value_info *x = operand(g, node, 0), *index = operand(g, node, 1);
    WANT((x->rank == 2 || (x->rank == 1 && x->dtype == VLA_I32)) && index_vector(index), "x [R,C], or i32 [R], and an i32 index [N]");
    like(out, x);
    out->dim[0] = index->shape[0];
    return VLA_OK;
}

RULE(scatter_add_rows)
{
    const vlai_value_info *x = operand(g, node, 0), *index = operand(g, node, 1);
    WANT(x->rank == 2 && index_vector(index) && index->shape[0] == x->shape[0], "x [N,C] and an i32 index [N]");
    if (node->attrs.rows.dtype == VLA_DTYPE_NONE)
        node->attrs.rows.dtype = x->dtype;
    set2(out, node->attrs.rows.dtype, node->attrs.rows.rows, x->shape[1]);
    return VLA_OK;
}

RULE(put_rows)
{
    const vlai_value_info *x = operand(g, node, 0), *index = operand(g, node, 1), *rows = operand(g, node, 2);
    WANT(x->rank == 2 && index_vector(index) && rows->rank == 2 && rows->shape[0] == index->shape[0] &&
             rows->shape[1] == x->shape[1] && rows->dtype == x->dtype,
         "base [R,C], index [N], rows [N,C] of one type");
    like(out, x);
    return VLA_OK;
}

RULE(zero_rows)
{
    WANT(operand(g, node, 0)->rank == 2 && index_vector(operand(g, node, 1)), "x [R,C] and an i32 index [N]");
    like(out, operand(g, node, 0));
    return VLA_OK;
}

RULE(merge_rows)
{
    const vlai_value_info *a = operand(g, node, 0), *b = operand(g, node, 1), *map = operand(g, node, 2);
    WANT(a->rank == 2 && b->rank == 2 && a->shape[1] == b->shape[1] && a->dtype == b->dtype, "a [Na,C], b [Nb,C] of one type");
    WANT(index_vector(map) && map->shape[0] == a->shape[0] + b->shape[0], "map [Na+Nb]");
    WANT(index_vector(operand(g, node, 3)) && operand(g, node, 3)->shape[0] == a->shape[0], "at_a [Na]");
    WANT(index_vector(operand(g, node, 4)) && operand(g, node, 4)->shape[0] == b->shape[0], "at_b [Nb]");
    set2(out, a->dtype, a->shape[0] + b->shape[0], a->shape[1]);
    return VLA_OK;
}

RULE(split_cols)
{
    const vlai_value_info *x = operand(g, node, 0);
    int n = node->attrs.split.n;
    WANT(x->rank == 2 && n >= 1 && n <= VLAI_MAX_OUTPUTS, "a matrix, and 1 to 4 pieces");
    int64_t sum = 0;
    for (int i = 0; i < n; i++) {
        sum += node->attrs.split.widths[i];
        set2(&out[i], x->dtype, x->shape[0], node->attrs.split.widths[i]);
    }
    WANT(sum == x->shape[1], "widths that sum to the columns");
    return VLA_OK;
}

RULE(concat_cols)
{
    const vlai_value_info *first = operand(g, node, 0);
    int64_t cols = 0;
    for (int i = 0; i < node->n_inputs; i++) {
        const vlai_value_info *x = operand(g, node, i);
        WANT(x->rank == 2 && x->shape[0] == first->shape[0] && x->dtype == first->dtype, "matrices of one height and type");
        cols += x->shape[1];
    }
    set2(out, first->dtype, first->shape[0], cols);
    return VLA_OK;
}

RULE(slice_rows)
{
    const vlai_value_info *x = operand(g, node, 0);
    int64_t first = node->attrs.slice.first, count = node->attrs.slice.count;
    WANT((x->rank == 1 || x->rank == 2) && first >= 0 && count >= 0 && first + count <= x->shape[0], "rows inside x");
    like(out, x);
    out->dim[0] = count;
    return VLA_OK;
}

RULE(pad_rows)
{
    const vlai_value_info *x = operand(g, node, 0);
    int64_t first = node->attrs.slice.first, rows = node->attrs.slice.count;
    WANT((x->rank == 1 || x->rank == 2) && first >= 0 && first + x->shape[0] <= rows, "x to fit in the rows");
    like(out, x);
    out->dim[0] = rows;
    return VLA_OK;
}

RULE(concat_rows)
{
    const vlai_value_info *a = operand(g, node, 0), *b = operand(g, node, 1);
    WANT(a->rank == 2 && b->rank == 2 && a->shape[1] == b->shape[1] && a->dtype == b->dtype, "a [Na,C], b [Nb,C] of one type");
    set2(out, a->dtype, a->shape[0] + b->shape[0], a->shape[1]);
    return VLA_OK;
}

RULE(reshape)
{
    const vlai_value_info *x = operand(g, node, 0);
    out->dtype = x->dtype;
    out->rank = node->attrs.fill.rank;
    int64_t elements = 1;
    for (int i = 0; i < out->rank; i++)
        elements *= out->dim[i] = node->attrs.fill.shape[i];
    WANT(elements == x->elements, "as many elements as before");
    return VLA_OK;
}

RULE(mul_rows)
{
    const vlai_value_info *x = operand(g, node, 0), *s = operand(g, node, 1);
    WANT(x->rank == 2 && s->rank == 1 && s->shape[0] == x->shape[0], "x [N,C], s [N]");
    like(out, x);
    return VLA_OK;
}

RULE(row_sum)
{
    WANT(operand(g, node, 0)->rank == 2, "a matrix");
    set1(out, operand(g, node, 0)->dtype, operand(g, node, 0)->shape[0]);
    return VLA_OK;
}

RULE(col_sum)
{
    WANT(operand(g, node, 0)->rank == 2, "a matrix");
    if (node->attrs.matmul.dtype == VLA_DTYPE_NONE)
        node->attrs.matmul.dtype = operand(g, node, 0)->dtype;
    set1(out, node->attrs.matmul.dtype, operand(g, node, 0)->shape[1]);
    return VLA_OK;
}

RULE(expand_cols)
{
    WANT(operand(g, node, 0)->rank == 1, "a vector");
    set2(out, operand(g, node, 0)->dtype, operand(g, node, 0)->shape[0], node->attrs.slice.count);
    return VLA_OK;
}

RULE(expand_rows)
{
    WANT(operand(g, node, 0)->rank == 1, "a vector");
    set2(out, operand(g, node, 0)->dtype, node->attrs.slice.count, operand(g, node, 0)->shape[0]);
    return VLA_OK;
}

RULE(fill)
{
    (void)g;
    (void)err;
    out->dtype = node->attrs.fill.dtype;
    out->rank = node->attrs.fill.rank;
    memcpy(out->dim, node->attrs.fill.shape, sizeof out->dim);
    return VLA_OK;
}

RULE(sinusoid)
{
    WANT(operand(g, node, 0)->rank == 1 && node->attrs.sinusoid.dim >= 4 && node->attrs.sinusoid.dim % 2 == 0, "t [N] and an even width of at least 4");
    set2(out, operand(g, node, 0)->dtype, operand(g, node, 0)->shape[0], node->attrs.sinusoid.dim);
    return VLA_OK;
}

RULE(masked_mse)
{
    const vlai_value_info *p = operand(g, node, 0), *t = operand(g, node, 1), *mask = operand(g, node, 2);
    WANT(p->rank == 2 && same_shape(p, t) && same_shape(p, mask), "prediction, target, mask [N,C]");
    set1(&out[0], precise(p->dtype), 1);
    like(&out[1], p);
    set1(&out[2], precise(p->dtype), 1);
    return VLA_OK;
}

RULE(masked_mse_grad)
{
    WANT(same_shape(operand(g, node, 1), operand(g, node, 2)) && same_shape(operand(g, node, 1), operand(g, node, 3)), "p, t, mask of one shape");
    like(out, operand(g, node, 1));
    return VLA_OK;
}

RULE(cross_entropy)
{
    const vlai_value_info *logits = operand(g, node, 0), *labels = operand(g, node, 1);
    WANT(logits->rank == 2 && index_vector(labels) && labels->shape[0] == logits->shape[0], "logits [N,V], labels i32 [N]");
    set1(&out[0], precise(logits->dtype), 1);
    set1(&out[1], precise(logits->dtype), logits->shape[0]);
    set1(&out[2], precise(logits->dtype), 1);
    return VLA_OK;
}

RULE(cross_entropy_grad)
{
    WANT(operand(g, node, 1)->rank == 2, "logits [N,V]");
    like(out, operand(g, node, 1));
    return VLA_OK;
}

RULE(patchify)
{
    const vlai_value_info *pixels = operand(g, node, 0), *patches = operand(g, node, 1);
    const vla_patchify_options *o = &node->attrs.patchify;
    WANT(pixels->rank == 1 && pixels->dtype == VLA_U8 && patches->rank == 2 && patches->shape[1] == 3 && patches->dtype == VLA_I32,
         "pixels u8 [bytes], patches i32 [P,3]");
    set2(out, o->dtype, patches->shape[0], (int64_t)3 * o->temporal * o->patch * o->patch);
    return VLA_OK;
}

RULE(accumulate)
{
    (void)out;
    WANT(same_shape(operand(g, node, 0), operand(g, node, 1)), "accumulator and addend of one shape");
    return VLA_OK;
}

RULE(sum_squares)
{
    (void)out;
    const vlai_value_info *norms = operand(g, node, 1);
    WANT(norms->rank == 1 && norms->dtype == VLA_F64 && node->attrs.clip.index < norms->shape[0], "norms f64 [n]");
    return VLA_OK;
}

RULE(clip_factor)
{
    WANT(operand(g, node, 0)->rank == 1 && operand(g, node, 0)->dtype == VLA_F64, "norms f64 [n]");
    set1(out, VLA_F64, 3);
    return VLA_OK;
}

RULE(adamw)
{
    (void)out;
    const vlai_value_info *p = operand(g, node, 0), *m = operand(g, node, 2), *v = operand(g, node, 3);
    WANT(same_shape(p, m) && same_shape(p, v) && (!present(node, 1) || same_shape(p, operand(g, node, 1))), "parameter, gradient and moments of one shape");
    WANT(operand(g, node, 4)->dtype == VLA_F64 && operand(g, node, 4)->shape[0] > VLA_HYPER_RATES + node->attrs.adamw.group, "hyper f64 [bc1, bc2, t, seed, lr...]");
    WANT(!node->attrs.adamw.stochastic || (p->dtype == VLA_BF16 && m->dtype == VLA_BF16 && v->dtype == VLA_BF16 && !present(node, 6)),
         "bf16 parameter and moments without low bits where rounding is stochastic");
    WANT(!present(node, 6) || (operand(g, node, 6)->dtype == VLA_U16 && same_shape(p, operand(g, node, 6))), "low bits u16 of the parameter's shape");
    return VLA_OK;
}

RULE(bucket) { return vlai_infer_fill(g, node, out, err); }

RULE(part)
{
    const vlai_value_info *x = operand(g, node, 0);
    int64_t first = node->attrs.slice.first, count = node->attrs.slice.count;
    WANT(first >= 0 && count >= 0 && first <= x->elements && count <= x->elements - first, "elements that the operand has");
    set1(out, x->dtype, count);
    return VLA_OK;
}

static bool is_place(const vlai_node *node)
{
    return node->attrs.comm.world >= 1 && node->attrs.comm.rank >= 0 && node->attrs.comm.rank < node->attrs.comm.world;
}

/* What can be summed over ranks. */
static bool is_sum_type(vla_dtype d)
{
    return is_float(d) || d == VLA_I32 || d == VLA_I64;
}

RULE(reduce_scatter)
{
    const vlai_value_info *x = operand(g, node, 0);
    WANT(is_place(node) && x->rank == 1 && is_sum_type(x->dtype) && x->shape[0] % node->attrs.comm.world == 0, "bucket [world n], and a rank below world");
    set1(out, x->dtype, x->shape[0] / node->attrs.comm.world);
    return VLA_OK;
}

RULE(all_gather)
{
    (void)out;
    WANT(is_place(node) && operand(g, node, 0)->elements % node->attrs.comm.world == 0, "bucket of world n elements, and a rank below world");
    return VLA_OK;
}

RULE(all_reduce)
{
    (void)out;
    WANT(is_place(node) && is_sum_type(operand(g, node, 0)->dtype), "float, i32 or i64, and a rank below world");
    return VLA_OK;
}
