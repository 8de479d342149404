/* Gradients as graph: one function per differentiable op. dx[i] is left VLA_NONE for operands that want none. */
#include "ops/op.h"

#define VJP(name) \
    void vlai_vjp_##name(vla_graph *g, const vlai_node *node, const vla_value *dy, const bool *need, vla_value *dx)
#define OPS(...) (sizeof((vla_value[]){__VA_ARGS__}) / sizeof(vla_value)), (vla_value[]){__VA_ARGS__}

static int64_t dim(const vla_graph *g, vla_value v, int axis)
{
    return vlai_value(g, v)->shape[axis];
}

static vla_value matmul_as(vla_graph *g, vla_value a, vla_value b, int ta, int tb, vla_dtype dtype)
{
    return vlai_graph_op(g, VLAI_OP_matmul, OPS(a, b), &(vlai_attrs){.matmul = {.transpose_a = ta, .transpose_b = tb, .dtype = dtype}});
}

static vla_value col_sum_as(vla_graph *g, vla_value x, vla_dtype dtype)
{
    return vlai_graph_op(g, VLAI_OP_col_sum, OPS(x), &(vlai_attrs){.matmul = {.dtype = dtype}});
}

/* c = op(a) op(b): da = dc op(b)^T, db = op(a)^T dc, transposed where the operand was. */
VJP(matmul)
{
    vla_value a = node->inputs[0], b = node->inputs[1];
    int ta = node->attrs.matmul.transpose_a, tb = node->attrs.matmul.transpose_b;
    if (need[0])
        dx[0] = ta ? matmul_as(g, b, dy[0], tb, 1, vlai_value(g, a)->dtype)
                   : matmul_as(g, dy[0], b, 0, !tb, vlai_value(g, a)->dtype);
    if (need[1])
        dx[1] = tb ? matmul_as(g, dy[0], a, 1, ta, vlai_value(g, b)->dtype)
                   : matmul_as(g, a, dy[0], !ta, 0, vlai_value(g, b)->dtype);
    if (node->n_inputs > 2 && need[2])
        dx[2] = col_sum_as(g, dy[0], vlai_value(g, node->inputs[2])->dtype);
    if (node->n_inputs > 3 && need[3])
        dx[3] = dy[0];
}

VJP(add)
{
    (void)g;
    (void)node;
    if (need[0])
        dx[0] = dy[0];
    if (need[1])
        dx[1] = dy[0];
}

VJP(sub)
{
    (void)node;
    if (need[0])
        dx[0] = dy[0];
    if (need[1])
        dx[1] = vla_scale(g, dy[0], -1);
}

VJP(mul)
{
    if (need[0])
        dx[0] = vla_mul(g, dy[0], node->inputs[1]);
    if (need[1])
        dx[1] = vla_mul(g, dy[0], node->inputs[0]);
}

VJP(scale)
{
    if (need[0])
        dx[0] = vla_scale(g, dy[0], node->attrs.fill.value);
}

VJP(cast)
{
    if (need[0])
        dx[0] = vla_cast(g, dy[0], vlai_value(g, node->inputs[0])->dtype);
}

VJP(silu)
{
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_silu_grad, OPS(dy[0], node->inputs[0]), NULL);
}

VJP(gelu)
{
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_gelu_grad, OPS(dy[0], node->inputs[0]), NULL);
}

VJP(swiglu)
{
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_swiglu_grad, OPS(dy[0], node->inputs[0]), NULL);
}

VJP(rms_norm)
{
    vla_value x = node->inputs[0], w = node->n_inputs > 1 ? node->inputs[1] : VLA_NONE, rstd = node->outputs[1];
    if (dy[0] == VLA_NONE)
        return;
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_rms_norm_grad, w == VLA_NONE ? 3 : 4, (vla_value[]){dy[0], x, rstd, w}, &node->attrs);
    if (w != VLA_NONE && need[1])
        dx[1] = vlai_graph_op(g, VLAI_OP_rms_norm_grad_weight, OPS(dy[0], x, rstd),
                              &(vlai_attrs){.norm = {.dtype = vlai_value(g, w)->dtype}});
}

VJP(rope)
{
    vlai_attrs attrs = node->attrs;
    attrs.rope.inverse = !attrs.rope.inverse;
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_rope, OPS(dy[0], node->inputs[1], node->inputs[2]), &attrs);
}

VJP(attention)
{
    vla_value out[VLAI_MAX_OUTPUTS];
    if (dy[0] == VLA_NONE)
        return;
    vlai_graph_add(g, VLAI_OP_attention_grad, node->n_inputs + 3,
                   (vla_value[]){dy[0], node->inputs[0], node->inputs[1], node->inputs[2], node->outputs[0], node->outputs[1],
                                 node->inputs[3], node->inputs[4], node->inputs[5], node->inputs[6]},
                   &node->attrs, out);
    for (int i = 0; i < 3; i++)
        if (need[i])
            dx[i] = out[i];
}

VJP(gather_rows)
{
    vla_value x = node->inputs[0];
    vlai_attrs attrs = {.rows = {.rows = dim(g, x, 0), .skip = node->attrs.rows.skip, .dtype = vlai_value(g, x)->dtype}};
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_scatter_add_rows, OPS(dy[0], node->inputs[1]), &attrs);
}

/* Rows whose index is `skip` were not added: the gradient of that row of the sum is taken away first. */
VJP(scatter_add_rows)
{
    int64_t rows = node->attrs.rows.rows, skip = node->attrs.rows.skip;
    vla_value d = dy[0];
    if (!need[0])
        return;
    if (skip >= 0 && skip < rows)
        d = vla_sub(g, d, vla_pad_rows(g, vla_slice_rows(g, d, skip, 1), skip, rows));
    dx[0] = vla_gather_rows(g, d, node->inputs[1], -1);
}

VJP(put_rows)
{
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_zero_rows, OPS(dy[0], node->inputs[1]), NULL);
    if (need[2])
        dx[2] = vla_gather_rows(g, dy[0], node->inputs[1], -1);
}

VJP(zero_rows)
{
    if (need[0])
        dx[0] = vlai_graph_op(g, VLAI_OP_zero_rows, OPS(dy[0], node->inputs[1]), NULL);
}

VJP(merge_rows)
{
    if (need[0])
        dx[0] = vla_gather_rows(g, dy[0], node->inputs[3], -1);
    if (need[1])
        dx[1] = vla_gather_rows(g, dy[0], node->inputs[4], -1);
}

/* A piece that nothing reads contributes zeros. */
VJP(split_cols)
{
    vla_value pieces[VLAI_MAX_OUTPUTS];
    if (!need[0])
        return;
    for (int i = 0; i < node->n_outputs; i++) {
        const vlai_value_info *out = vlai_value(g, node->outputs[i]);
        pieces[i] = dy[i] != VLA_NONE ? dy[i] : vla_fill(g, out->dtype, 2, out->shape, 0);
    }
    dx[0] = vla_concat_cols(g, node->n_outputs, pieces);
}

VJP(concat_cols)
{
    int64_t widths[VLAI_MAX_OUTPUTS];
    vla_value pieces[VLAI_MAX_OUTPUTS] = {VLA_NONE, VLA_NONE, VLA_NONE, VLA_NONE};
    for (int i = 0; i < node->n_inputs; i++)
        widths[i] = dim(g, node->inputs[i], 1);
    vla_split_cols(g, dy[0], node->n_inputs, widths, pieces);
    for (int i = 0; i < node->n_inputs; i++)
        if (need[i])
            dx[i] = pieces[i];
}

VJP(slice_rows)
{
    if (need[0])
        dx[0] = vla_pad_rows(g, dy[0], node->attrs.slice.first, dim(g, node->inputs[0], 0));
}

VJP(pad_rows)
{
    if (need[0])
        dx[0] = vla_slice_rows(g, dy[0], node->attrs.slice.first, dim(g, node->inputs[0], 0));
}

VJP(concat_rows)
{
    int64_t first = dim(g, node->inputs[0], 0);
    if (need[0])
        dx[0] = vla_slice_rows(g, dy[0], 0, first);
    if (need[1])
        dx[1] = vla_slice_rows(g, dy[0], first, dim(g, node->inputs[1], 0));
}

VJP(reshape)
{
    const vlai_value_info *x = vlai_value(g, node->inputs[0]);
    int64_t shape[VLA_MAX_RANK] = {x->shape[0], x->shape[1], x->shape[2], x->shape[3]};
    if (need[0])
        dx[0] = vla_reshape(g, dy[0], x->rank, shape);
}

VJP(mul_rows)
{
    if (need[0])
        dx[0] = vla_mul_rows(g, dy[0], node->inputs[1]);
    if (need[1])
        dx[1] = vla_cast(g, vla_row_sum(g, vla_mul(g, dy[0], node->inputs[0])), vlai_value(g, node->inputs[1])->dtype);
}

VJP(row_sum)
{
    if (need[0])
        dx[0] = vla_expand_cols(g, dy[0], dim(g, node->inputs[0], 1));
}

VJP(col_sum)
{
    if (need[0])
        dx[0] = vla_cast(g, vla_expand_rows(g, dy[0], dim(g, node->inputs[0], 0)), vlai_value(g, node->inputs[0])->dtype);
}

VJP(expand_cols)
{
    (void)node;
    if (need[0])
        dx[0] = vla_row_sum(g, dy[0]);
}

VJP(expand_rows)
{
    if (need[0])
        dx[0] = col_sum_as(g, dy[0], vlai_value(g, node->inputs[0])->dtype);
}

/* The gradients of the per-element error and of the count are not carried: they are for logging. */
VJP(masked_mse)
{
    if (dy[0] == VLA_NONE || (!need[0] && !need[1]))
        return;
    vla_value dp = vlai_graph_op(g, VLAI_OP_masked_mse_grad,
                                 OPS(dy[0], node->inputs[0], node->inputs[1], node->inputs[2], node->outputs[2]), NULL);
    if (need[0])
        dx[0] = dp;
    if (need[1])
        dx[1] = vla_scale(g, dp, -1);
}

VJP(cross_entropy)
{
    if (need[0] && dy[0] != VLA_NONE)
        dx[0] = vlai_graph_op(g, VLAI_OP_cross_entropy_grad, OPS(dy[0], node->inputs[0], node->inputs[1], node->outputs[2]), NULL);
}
