/* The builders of vla/graph.h: operands and attributes in, a value out. */
#include "base/fail.h"
#include "graph/graph.h"
#include "ops/op.h"

#define OPS(...) (sizeof((vla_value[]){__VA_ARGS__}) / sizeof(vla_value)), (vla_value[]){__VA_ARGS__}

vla_value vla_matmul(vla_graph *g, vla_value a, vla_value b, int transpose_a, int transpose_b, vla_value bias)
{
    vlai_attrs attrs = {.matmul = {.transpose_a = !!transpose_a, .transpose_b = !!transpose_b}};
    return vlai_graph_op(g, VLAI_OP_matmul, bias == VLA_NONE ? 2 : 3, (vla_value[]){a, b, bias}, &attrs);
}

vla_value vla_linear(vla_graph *g, vla_value x, vla_value w, vla_value bias)
{
    return vla_matmul(g, x, w, 0, 1, bias);
}

vla_value vla_add(vla_graph *g, vla_value a, vla_value b)
{
    return vlai_graph_op(g, VLAI_OP_add, OPS(a, b), NULL);
}

vla_value vla_sub(vla_graph *g, vla_value a, vla_value b)
{
    return vlai_graph_op(g, VLAI_OP_sub, OPS(a, b), NULL);
}

vla_value vla_mul(vla_graph *g, vla_value a, vla_value b)
{
    return vlai_graph_op(g, VLAI_OP_mul, OPS(a, b), NULL);
}

vla_value vla_scale(vla_graph *g, vla_value x, double factor)
{
    return vlai_graph_op(g, VLAI_OP_scale, OPS(x), &(vlai_attrs){.fill = {.value = factor}});
}

vla_value vla_cast(vla_graph *g, vla_value x, vla_dtype dtype)
{
    if (x != VLA_NONE && vlai_value(g, x)->dtype == dtype)
        return x;
    return vlai_graph_op(g, VLAI_OP_cast, OPS(x), &(vlai_attrs){.fill = {.dtype = dtype}});
}

vla_value vla_stop_gradient(vla_graph *g, vla_value x)
{
    return vlai_graph_op(g, VLAI_OP_stop_gradient, OPS(x), NULL);
}

vla_value vla_silu(vla_graph *g, vla_value x)
{
    return vlai_graph_op(g, VLAI_OP_silu, OPS(x), NULL);
}

vla_value vla_gelu(vla_graph *g, vla_value x)
{
    return vlai_graph_op(g, VLAI_OP_gelu, OPS(x), NULL);
}

vla_value vla_swiglu(vla_graph *g, vla_value x)
{
    return vlai_graph_op(g, VLAI_OP_swiglu, OPS(x), NULL);
}

vla_value vla_rms_norm(vla_graph *g, vla_value x, vla_value weight, double eps)
{
    vlai_attrs attrs = {.norm = {.eps = eps}};
    return vlai_graph_op(g, VLAI_OP_rms_norm, weight == VLA_NONE ? 1 : 2, (vla_value[]){x, weight}, &attrs);
}

vla_rope_tables vla_rope_table(vla_graph *g, vla_value positions, const vla_rope_options *options)
{
    vla_value out[VLAI_MAX_OUTPUTS];
    vlai_graph_add(g, VLAI_OP_rope_table, OPS(positions), &(vlai_attrs){.rope_table = *options}, out);
    return (vla_rope_tables){out[0], out[1]};
}

vla_value vla_rope(vla_graph *g, vla_value x, vla_rope_tables tables, int head_dim)
{
    return vlai_graph_op(g, VLAI_OP_rope, OPS(x, tables.cos, tables.sin), &(vlai_attrs){.rope = {.head_dim = head_dim}});
}

vla_value vla_attention(vla_graph *g, vla_value q, vla_value k, vla_value v, vla_value qpos, vla_value rows,
                        vla_value cols, vla_value segments, const vla_attention_options *options)
{
    return vlai_graph_op(g, VLAI_OP_attention, segments == VLA_NONE ? 6 : 7, (vla_value[]){q, k, v, qpos, rows, cols, segments},
                         &(vlai_attrs){.attention = *options});
}

vla_value vla_gather_rows(vla_graph *g, vla_value x, vla_value index, int64_t skip)
{
    return vlai_graph_op(g, VLAI_OP_gather_rows, OPS(x, index), &(vlai_attrs){.rows = {.skip = skip}});
}

vla_value vla_scatter_add_rows(vla_graph *g, vla_value x, vla_value index, int64_t rows, int64_t skip)
{
    return vlai_graph_op(g, VLAI_OP_scatter_add_rows, OPS(x, index), &(vlai_attrs){.rows = {.rows = rows, .skip = skip}});
}

vla_value vla_put_rows(vla_graph *g, vla_value base, vla_value index, vla_value rows)
{
    return vlai_graph_op(g, VLAI_OP_put_rows, OPS(base, index, rows), NULL);
}

vla_value vla_merge_rows(vla_graph *g, vla_value a, vla_value b, vla_value map, vla_value at_a, vla_value at_b)
{
    return vlai_graph_op(g, VLAI_OP_merge_rows, OPS(a, b, map, at_a, at_b), NULL);
}

void vla_split_cols(vla_graph *g, vla_value x, int n, const int64_t *widths, vla_value *out)
{
    vlai_attrs attrs = {.split = {.n = n}};
    vla_value results[VLAI_MAX_OUTPUTS] = {VLA_NONE, VLA_NONE, VLA_NONE, VLA_NONE};
    if (n < 1 || n > VLAI_MAX_OUTPUTS) {
        if (g->error.status == VLA_OK)
            vlai_fail(&g->error, VLA_E_INVALID, "split_cols: %d pieces, wanted 1 to %d", n, VLAI_MAX_OUTPUTS);
        return;
    }
    for (int i = 0; i < n; i++)
        attrs.split.widths[i] = widths[i];
    vlai_graph_add(g, VLAI_OP_split_cols, OPS(x), &attrs, results);
    for (int i = 0; i < n; i++)
        out[i] = results[i];
}

vla_value vla_concat_cols(vla_graph *g, int n, const vla_value *x)
{
    return vlai_graph_op(g, VLAI_OP_concat_cols, n, x, NULL);
}

vla_value vla_slice_rows(vla_graph *g, vla_value x, int64_t first, int64_t count)
{
    return vlai_graph_op(g, VLAI_OP_slice_rows, OPS(x), &(vlai_attrs){.slice = {first, count}});
}

vla_value vla_pad_rows(vla_graph *g, vla_value x, int64_t first, int64_t rows)
{
    return vlai_graph_op(g, VLAI_OP_pad_rows, OPS(x), &(vlai_attrs){.slice = {first, rows}});
}

vla_value vla_concat_rows(vla_graph *g, vla_value a, vla_value b)
{
    return vlai_graph_op(g, VLAI_OP_concat_rows, OPS(a, b), NULL);
}

/* fill and reshape carry a shape. */
static vlai_attrs shaped(vla_dtype dtype, int rank, const int64_t *shape, double value)
{
    vlai_attrs attrs = {.fill = {.value = value, .dtype = dtype, .rank = rank}};
    for (int i = 0; i < rank && i < VLA_MAX_RANK; i++)
        attrs.fill.shape[i] = shape[i];
    return attrs;
}

vla_value vla_reshape(vla_graph *g, vla_value x, int rank, const int64_t *shape)
{
    vlai_attrs attrs = shaped(VLA_DTYPE_NONE, rank, shape, 0);
    return vlai_graph_op(g, VLAI_OP_reshape, OPS(x), &attrs);
}

vla_value vla_mul_rows(vla_graph *g, vla_value x, vla_value s)
{
    return vlai_graph_op(g, VLAI_OP_mul_rows, OPS(x, s), NULL);
}

vla_value vla_row_sum(vla_graph *g, vla_value x)
{
    return vlai_graph_op(g, VLAI_OP_row_sum, OPS(x), NULL);
}

vla_value vla_col_sum(vla_graph *g, vla_value x)
{
    return vlai_graph_op(g, VLAI_OP_col_sum, OPS(x), NULL);
}

vla_value vla_expand_cols(vla_graph *g, vla_value s, int64_t cols)
{
    return vlai_graph_op(g, VLAI_OP_expand_cols, OPS(s), &(vlai_attrs){.slice = {0, cols}});
}

vla_value vla_expand_rows(vla_graph *g, vla_value b, int64_t rows)
{
    return vlai_graph_op(g, VLAI_OP_expand_rows, OPS(b), &(vlai_attrs){.slice = {0, rows}});
}

vla_value vla_fill(vla_graph *g, vla_dtype dtype, int rank, const int64_t *shape, double value)
{
    vlai_attrs attrs = shaped(dtype, rank, shape, value);
    return vlai_graph_op(g, VLAI_OP_fill, 0, NULL, &attrs);
}

vla_value vla_sinusoid(vla_graph *g, vla_value t, int dim, double period)
{
    return vlai_graph_op(g, VLAI_OP_sinusoid, OPS(t), &(vlai_attrs){.sinusoid = {dim, period}});
}

vla_loss vla_masked_mse(vla_graph *g, vla_value prediction, vla_value target, vla_value mask)
{
    vla_value out[VLAI_MAX_OUTPUTS];
    vlai_graph_add(g, VLAI_OP_masked_mse, OPS(prediction, target, mask), NULL, out);
    return (vla_loss){out[0], out[1], out[2]};
}

vla_loss vla_cross_entropy(vla_graph *g, vla_value logits, vla_value labels)
{
    vla_value out[VLAI_MAX_OUTPUTS];
    vlai_graph_add(g, VLAI_OP_cross_entropy, OPS(logits, labels), NULL, out);
    return (vla_loss){out[0], out[1], out[2]};
}

vla_value vla_patchify(vla_graph *g, vla_value pixels, vla_value patches, const vla_patchify_options *options)
{
    return vlai_graph_op(g, VLAI_OP_patchify, OPS(pixels, patches), &(vlai_attrs){.patchify = *options});
}

static vlai_attrs place(int rank, int world, int order)
{
    return (vlai_attrs){.comm = {.rank = rank, .world = world, .order = order}};
}

vla_value vlai_reduce_scatter(vla_graph *g, vla_value bucket, int rank, int world, int order)
{
    vlai_attrs attrs = place(rank, world, order);
    return vlai_graph_op(g, VLAI_OP_reduce_scatter, OPS(bucket), &attrs);
}

void vlai_all_gather(vla_graph *g, vla_value bucket, int rank, int world, int order)
{
    vlai_attrs attrs = place(rank, world, order);
    vlai_graph_add(g, VLAI_OP_all_gather, OPS(bucket), &attrs, NULL);
}

void vlai_all_reduce(vla_graph *g, vla_value x, int rank, int world, int order)
{
    vlai_attrs attrs = place(rank, world, order);
    vlai_graph_add(g, VLAI_OP_all_reduce, OPS(x), &attrs, NULL);
}
