/* A graph: what is computed, as typed nodes in execution order. No device, no memory, no bytes.
 *
 * A model is a C function that adds nodes for one shape bucket. Shapes are checked as nodes are added; the first error
 * is kept in the graph and every later call returns VLA_NONE, so model code needs no checks of its own: ask once, with
 * vla_graph_check. Parameters carry their checkpoint names. No model writes a backward pass: vla_graph_backward adds it.
 *
 *     vla_graph *g = NULL;
 *     if (vla_graph_create(&g, &err) != VLA_OK) return report(&err);
 *     vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){32, 8});
 *     vla_value w = vla_graph_param(g, "head.weight", VLA_COMPUTE, 2, (int64_t[]){4, 8});
 *     vla_value y = vla_linear(g, x, w, VLA_NONE);
 *     vla_value loss = vla_masked_mse(g, y, target, mask).loss;
 *     vla_graph_name(g, loss, "loss");
 *     if (vla_graph_backward(g, loss, 1.0, &err) != VLA_OK) return report(&err);
 *
 * Element types may be symbolic: VLA_COMPUTE (fp32, bf16 or fp64, by the numerics mode of the plan) and VLA_PRECISE
 * (fp32, or fp64 where everything is). Integers are VLA_I32, pictures VLA_U8.
 *
 * All matrices are row-major. "Rows" are tokens, patches or action steps; heads lie side by side in a row.
 * Ownership: values are indices; names are copied; everything dies with the graph. Threads: one caller at a time. */
#ifndef VLA_GRAPH_H
#define VLA_GRAPH_H

#include "vla/dtype.h"
#include "vla/error.h"

typedef int32_t vla_value;
#define VLA_NONE ((vla_value)-1)

enum { VLA_MAX_RANK = 4 };

/* Symbolic element types, resolved by the precision pass. */
#define VLA_COMPUTE ((vla_dtype)100)
#define VLA_PRECISE ((vla_dtype)101)

typedef struct vla_graph vla_graph;

VLA_BEGIN_DECLS

VLA_API vla_status vla_graph_create(vla_graph **out, vla_error *err);
VLA_API void vla_graph_destroy(vla_graph *graph);
/* The first error of any builder call, if there was one. */
VLA_API vla_status vla_graph_check(const vla_graph *graph, vla_error *err);

/* Leaves. An input is filled before each run; a parameter lives in the store and is trained unless frozen. */
VLA_API vla_value vla_graph_input(vla_graph *graph, const char *name, vla_dtype dtype, int rank, const int64_t *shape);
VLA_API vla_value vla_graph_param(vla_graph *graph, const char *name, vla_dtype dtype, int rank, const int64_t *shape);
/* The parameter gets no gradient and is not stepped. */
VLA_API void vla_graph_freeze(vla_graph *graph, vla_value param);
/* Gives a value a name by which results are found after a run; it is then kept until the end of the run. */
VLA_API void vla_graph_name(vla_graph *graph, vla_value value, const char *name);
VLA_API vla_value vla_graph_find(const vla_graph *graph, const char *name);

/* Adds the backward pass of `loss` (one element), seeded with `scale`. */
VLA_API vla_status vla_graph_backward(vla_graph *graph, vla_value loss, double scale, vla_error *err);
/* d loss / d value after vla_graph_backward; VLA_NONE when there is no path. */
VLA_API vla_value vla_graph_gradient(const vla_graph *graph, vla_value value);

VLA_API int vla_value_rank(const vla_graph *graph, vla_value value);
VLA_API int64_t vla_value_dim(const vla_graph *graph, vla_value value, int axis);
VLA_API vla_dtype vla_value_dtype(const vla_graph *graph, vla_value value);

/* Operations. N, R: rows; C, K, M: columns; [..] shapes. Results have the element type of the first operand unless said
 * otherwise. Index operands are VLA_I32. */

/* op(a) op(b) (+ bias); transpose flags as in BLAS; a, b of rank 2; bias [columns of the result]. */
VLA_API vla_value vla_matmul(vla_graph *g, vla_value a, vla_value b, int transpose_a, int transpose_b, vla_value bias);
/* x [N,K], w [M,K], bias [M] or none -> [N,M] = x w^T + bias. */
VLA_API vla_value vla_linear(vla_graph *g, vla_value x, vla_value w, vla_value bias);
/* By element: a, b of one shape and floating type, as is the result. */
VLA_API vla_value vla_add(vla_graph *g, vla_value a, vla_value b);
VLA_API vla_value vla_sub(vla_graph *g, vla_value a, vla_value b);
VLA_API vla_value vla_mul(vla_graph *g, vla_value a, vla_value b);
VLA_API vla_value vla_scale(vla_graph *g, vla_value x, double factor);
VLA_API vla_value vla_cast(vla_graph *g, vla_value x, vla_dtype dtype);
/* The same value, through which no gradient flows. */
VLA_API vla_value vla_stop_gradient(vla_graph *g, vla_value x);
VLA_API vla_value vla_silu(vla_graph *g, vla_value x); /* x / (1 + exp(-x)) */
VLA_API vla_value vla_gelu(vla_graph *g, vla_value x); /* exact: x Phi(x), by erf */
/* x [N, 2I] = gate | up -> [N, I] = silu(gate) up; in bf16 silu(gate) is rounded before the product. */
VLA_API vla_value vla_swiglu(vla_graph *g, vla_value x);
/* x [N,C], weight [C] or none: x rsqrt(mean(x^2) + eps) weight, in fp32, rounded once. */
VLA_API vla_value vla_rms_norm(vla_graph *g, vla_value x, vla_value weight, double eps);
/* Rotary tables from integer positions [A,N], one row per axis. Pair i of `half` belongs to axis a by `sections` (counts
 * of pairs per axis, summing to half). Angle = position * base^(-2 j / (2 * span)), with j = i and span = half; with
 * restart, j counts inside the section and span is the section's length. -> cos, sin [N, half] of type `dtype`. */
typedef struct vla_rope_options {
    double base;
    int half, axes, restart;
    int sections[4];
    vla_dtype dtype;
} vla_rope_options;
typedef struct vla_rope_tables {
    vla_value cos, sin;
} vla_rope_tables;
VLA_API vla_rope_tables vla_rope_table(vla_graph *g, vla_value positions, const vla_rope_options *options);
/* x [N, heads*head_dim]; rotates pairs (i, i + head_dim/2) of every head by the tables' row. */
VLA_API vla_value vla_rope(vla_graph *g, vla_value x, vla_rope_tables tables, int head_dim);
/* Attention over packed rows with an arbitrary mask made of column intervals.
 *   q [Nq, heads*D], k, v [Nk, kv_heads*D]; query head h reads kv head h / (heads/kv_heads).
 *   Key j is visible to query i iff cols[j][0] <= qpos[i] < cols[j][1] and not cols[j][2] <= qpos[i] < cols[j][3].
 *   rows[i] = [first, end) of keys that query i may see at all (bounds the search; outside is invisible).
 *   qpos [Nq] I32, rows [Nq,2] I32, cols [Nk,4] I32. A query that sees nothing gives 0.
 * `pairs` = visible (query, key) pairs, for the FLOP count.
 *
 * Many masks are simpler than that, and a kernel for them is faster. A mask other than VLA_MASK_COLUMNS is a promise about
 * the tables, which say the same thing: queries and keys are the same rows, qpos[i] = i, and segments [S+1] I32, in
 * ascending order, cuts them into runs of rows: segment s is rows segments[s] .. segments[s+1] - 1. Rows in front of the
 * first segment and from segments[S] on belong to none: they see nothing and nobody sees them. `longest` = at least as
 * many rows as any segment has. segments = VLA_NONE: VLA_MASK_COLUMNS. */
typedef enum vla_attention_mask {
    VLA_MASK_COLUMNS, /* as the tables say */
    VLA_MASK_CAUSAL,  /* a key is seen by the queries of its segment from its own row on */
    VLA_MASK_FULL     /* a key is seen by all queries of its segment */
} vla_attention_mask;
typedef struct vla_attention_options {
    int heads, kv_heads, head_dim;
    double scale;
    int64_t pairs;
    vla_attention_mask mask;
    int64_t longest;
} vla_attention_options;
VLA_API vla_value vla_attention(vla_graph *g, vla_value q, vla_value k, vla_value v, vla_value qpos, vla_value rows,
                                vla_value cols, vla_value segments, const vla_attention_options *options);
/* x [R,C], index [N] -> [N,C]; a negative index gives a zero row. Rows of x with index == skip get no gradient (-1: all
 * do). */
VLA_API vla_value vla_gather_rows(vla_graph *g, vla_value x, vla_value index, int64_t skip);
/* x [N,C], index [N] -> [rows,C]: sums of the rows with each index, in order; negative indices are dropped. */
VLA_API vla_value vla_scatter_add_rows(vla_graph *g, vla_value x, vla_value index, int64_t rows, int64_t skip);
/* base [R,C] with row index[i] replaced by rows[i] ([N,C]); negative indices are dropped. */
VLA_API vla_value vla_put_rows(vla_graph *g, vla_value base, vla_value index, vla_value rows);
/* Two streams into one order: out[i] = map[i] >= 0 ? a[map[i]] : b[-1 - map[i]]; at_a[r] / at_b[r] = place of row r of a
 * / b in the result. a [Na,C], b [Nb,C], map [Na+Nb]. */
VLA_API vla_value vla_merge_rows(vla_graph *g, vla_value a, vla_value b, vla_value map, vla_value at_a, vla_value at_b);
/* Columns: n pieces of the given widths, side by side. */
VLA_API void vla_split_cols(vla_graph *g, vla_value x, int n, const int64_t *widths, vla_value *out);
VLA_API vla_value vla_concat_cols(vla_graph *g, int n, const vla_value *x);
VLA_API vla_value vla_slice_rows(vla_graph *g, vla_value x, int64_t first, int64_t count);
/* x placed at row `first` of `rows` zero rows (rank 1: elements). */
VLA_API vla_value vla_pad_rows(vla_graph *g, vla_value x, int64_t first, int64_t rows);
VLA_API vla_value vla_concat_rows(vla_graph *g, vla_value a, vla_value b);
VLA_API vla_value vla_reshape(vla_graph *g, vla_value x, int rank, const int64_t *shape);
VLA_API vla_value vla_mul_rows(vla_graph *g, vla_value x, vla_value s);       /* [N,C], [N] -> [N,C] */
VLA_API vla_value vla_row_sum(vla_graph *g, vla_value x);                     /* [N,C] -> [N] */
VLA_API vla_value vla_col_sum(vla_graph *g, vla_value x);                     /* [N,C] -> [C] */
VLA_API vla_value vla_expand_cols(vla_graph *g, vla_value s, int64_t cols);   /* [N] -> [N,C] */
VLA_API vla_value vla_expand_rows(vla_graph *g, vla_value b, int64_t rows);   /* [C] -> [N,C] */
VLA_API vla_value vla_fill(vla_graph *g, vla_dtype dtype, int rank, const int64_t *shape, double value);
/* t [N] -> [N, dim] = sin(t f_k) | cos(t f_k), f_k = period^(-k / (dim/2 - 1)). No gradient. */
VLA_API vla_value vla_sinusoid(vla_graph *g, vla_value t, int dim, double period);
/* prediction, target, mask [N,C]: sum(mask (p-t)^2) / sum(mask). error [N,C] = mask (p-t)^2; count [1] = sum(mask). */
typedef struct vla_loss {
    vla_value loss, error, count;
} vla_loss;
VLA_API vla_loss vla_masked_mse(vla_graph *g, vla_value prediction, vla_value target, vla_value mask);
/* logits [N,V], labels [N] (negative: not counted): mean of -log softmax over the counted rows; error [N], count [1]. No
 * counted row gives 0. */
VLA_API vla_loss vla_cross_entropy(vla_graph *g, vla_value logits, vla_value labels);
/* Pictures to patch rows. pixels [bytes] U8: pictures, HWC, 3 channels, one after another. patches [P,3] I32: byte offset
 * of the patch's first pixel and bytes per picture row, and 0. -> [P, 3*temporal*patch*patch], (x - 255 mean) / (255 std)
 * per channel, the frame repeated `temporal` times. No gradient. */
typedef struct vla_patchify_options {
    int patch, temporal;
    float mean[3], std[3];
    vla_dtype dtype;
} vla_patchify_options;
VLA_API vla_value vla_patchify(vla_graph *g, vla_value pixels, vla_value patches, const vla_patchify_options *options);

VLA_END_DECLS

#endif
