/* The Wall-X graph. Shapes: N0, N1 rows of the streams; P patches, U merged units; H, A widths of the experts; R =
 * samples * horizon action rows; D action channels. Layer numbers for the recompute pass: vision blocks, the merger, then
 * decoder layers. Next: model/wallx_fill.c, which writes the integer tables that this graph reads. */
#include "model/wallx.h"

#include "base/fail.h"
#include "graph/graph.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct {
    vla_graph *g;
    const vlai_wallx_config *c;
    const vlai_wallx_shape *s;
    vlai_wallx_options o;
    bool skipped; /* what is built belongs to an expert without rows */
} builder;

static vla_value param(builder *b, vla_dtype dtype, const char *name, int64_t rows, int64_t cols)
{
    vla_value v = cols < 0 ? vla_graph_param(b->g, name, dtype, 1, &rows)
                           : vla_graph_param(b->g, name, dtype, 2, (int64_t[]){rows, cols});
    if (b->skipped)
        vla_graph_freeze(b->g, v);
    else
        vlai_graph_touch(b->g, v);
    return v;
}

/* "prefix.suffix" parameters; cols < 0 gives a vector. */
static vla_value weight(builder *b, vla_dtype dtype, const char *prefix, const char *suffix, int64_t rows, int64_t cols)
{
    char name[256];
    snprintf(name, sizeof name, "%s.%s", prefix, suffix);
    return param(b, dtype, name, rows, cols);
}

static vla_value linear(builder *b, vla_dtype dtype, const char *prefix, vla_value x, int64_t out, bool bias)
{
    vla_value w = weight(b, dtype, prefix, "weight", out, vla_value_dim(b->g, x, 1));
    return vla_linear(b->g, x, w, bias ? weight(b, dtype, prefix, "bias", out, -1) : VLA_NONE);
}

/* Names an activation for comparisons. A value that has a name already gets a copy to carry the second one. */
__attribute__((format(printf, 3, 4))) static void act(builder *b, vla_value v, const char *format, ...)
{
    char name[96] = "act.";
    if (!b->o.activations || v == VLA_NONE)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(name + 4, sizeof name - 4, format, args);
    va_end(args);
    vla_graph_name(b->g, vlai_value(b->g, v)->name ? vla_scale(b->g, v, 1.0) : v, name);
}

static vla_value ints(builder *b, const char *name, int64_t rows, int64_t cols)
{
    return cols < 0 ? vla_graph_input(b->g, name, VLA_I32, 1, &rows)
                    : vla_graph_input(b->g, name, VLA_I32, 2, (int64_t[]){rows, cols});
}

static vla_value reals(builder *b, const char *name, int64_t rows, int64_t cols)
{
    return cols < 0 ? vla_graph_input(b->g, name, VLA_PRECISE, 1, &rows)
                    : vla_graph_input(b->g, name, VLA_PRECISE, 2, (int64_t[]){rows, cols});
}

/* Rows of `group` consecutive rows each, taken in the order of index. */
static vla_value gather_groups(builder *b, vla_value x, vla_value index, int64_t group)
{
    int64_t rows = vla_value_dim(b->g, x, 0), cols = vla_value_dim(b->g, x, 1);
    vla_value grouped = vla_reshape(b->g, x, 2, (int64_t[]){rows / group, cols * group});
    grouped = vla_gather_rows(b->g, grouped, index, -1);
    return vla_reshape(b->g, grouped, 2, (int64_t[]){rows, cols});
}

/* ---- Vision tower -------------------------------------------------------------------------------------------- */

/* Who sees whom in a block: the windows' tables, or those of whole pictures. */
typedef struct {
    vla_value rows, cols, segments;
    int64_t pairs, longest;
} sight;

static vla_value vision_block(builder *b, int64_t n, vla_value x, vla_rope_tables tables, vla_value qpos, const sight *s)
{
    vla_graph *g = b->g;
    int64_t width = b->c->vision.hidden_size, inner = vlai_wallx_inner(b->c, b->c->vision.intermediate_size), head = b->c->vision.head_dim;
    vla_attention_options attention = {(int)b->c->vision.num_heads, (int)b->c->vision.num_heads, (int)head,
                                       vlai_inverse_sqrt((double)head), s->pairs, VLA_MASK_FULL, s->longest};
    char block[64], name[96];
    vla_value qkv[3];
    snprintf(block, sizeof block, "visual.blocks.%lld", (long long)n);
    vla_value y = vla_rms_norm(g, x, weight(b, VLA_COMPUTE, block, "norm1.weight", width, -1), b->c->vision.eps);
    snprintf(name, sizeof name, "%s.attn.qkv", block);
    vla_split_cols(g, linear(b, VLA_COMPUTE, name, y, 3 * width, true), 3, (int64_t[]){width, width, width}, qkv);
    qkv[0] = vla_rope(g, qkv[0], tables, (int)head);
    qkv[1] = vla_rope(g, qkv[1], tables, (int)head);
    y = vla_attention(g, qkv[0], qkv[1], qkv[2], qpos, s->rows, s->cols, s->segments, &attention);
    snprintf(name, sizeof name, "%s.attn.proj", block);
    y = linear(b, VLA_COMPUTE, name, y, width, true);
    act(b, y, "vision.block.%lld.attn", (long long)n);
    x = vla_add(g, x, y);
    y = vla_rms_norm(g, x, weight(b, VLA_COMPUTE, block, "norm2.weight", width, -1), b->c->vision.eps);
    snprintf(name, sizeof name, "%s.mlp.gate_up_proj", block);
    y = vla_swiglu(g, linear(b, VLA_COMPUTE, name, y, 2 * inner, true));
    snprintf(name, sizeof name, "%s.mlp.down_proj", block);
    x = vla_add(g, x, linear(b, VLA_COMPUTE, name, y, width, true));
    act(b, x, "vision.block.%lld", (long long)n);
    return x;
}

/* Pictures -> merged tokens [U, out_hidden] in picture order. */
static vla_value vision_tower(builder *b)
{
    vla_graph *g = b->g;
    const vlai_wallx_config *c = b->c;
    int64_t width = c->vision.hidden_size, patches = b->s->patches, units = b->s->units;
    int64_t group = c->vision.spatial_merge_size * c->vision.spatial_merge_size;
    int64_t row = c->vision.in_channels * c->vision.temporal_patch_size * c->vision.patch_size * c->vision.patch_size;
    vla_value x;
    vlai_graph_layer(g, 0);
    if (b->s->pixel_bytes) {
        vla_patchify_options o = {(int)c->vision.patch_size, (int)c->vision.temporal_patch_size,
                                  {b->s->mean[0], b->s->mean[1], b->s->mean[2]}, {b->s->std[0], b->s->std[1], b->s->std[2]},
                                  VLA_COMPUTE};
        vla_value pixels = vla_graph_input(g, "pixels", VLA_U8, 1, &b->s->pixel_bytes);
        x = vla_patchify(g, pixels, ints(b, "patches", patches, 3), &o);
    } else {
        x = vla_cast(g, reals(b, "pixel_values", patches, row), VLA_COMPUTE);
    }
    x = linear(b, VLA_COMPUTE, "visual.patch_embed.proj", x, width, false);
    act(b, x, "vision.patch_embed");
    x = gather_groups(b, x, ints(b, "vision.window", units, -1), group);
    int quarter = (int)c->vision.head_dim / 4;
    vla_rope_options rope = {.base = c->vision.theta, .half = 2 * quarter, .axes = 2, .restart = 1,
                             .sections = {quarter, quarter}, .dtype = VLA_PRECISE};
    vla_rope_tables tables = vla_rope_table(g, ints(b, "vision.pos", 2, patches), &rope);
    vla_value qpos = ints(b, "vision.qpos", patches, -1);
    sight window = {ints(b, "vision.rows.window", patches, 2), ints(b, "vision.cols.window", patches, 4),
                    ints(b, "vision.segments.window", b->s->windows + 1, -1), b->s->pairs_window, b->s->longest_window};
    sight full = {ints(b, "vision.rows.full", patches, 2), ints(b, "vision.cols.full", patches, 4),
                  ints(b, "vision.segments.full", b->s->images + 1, -1), b->s->pairs_full, b->s->longest_picture};
    for (int64_t n = 0; n < c->vision.depth; n++) {
        vlai_graph_layer(g, (int32_t)n);
        x = vision_block(b, n, x, tables, qpos, vlai_wallx_full_attention(c, n) ? &full : &window);
    }
    vlai_graph_layer(g, (int32_t)c->vision.depth);
    x = vla_rms_norm(g, x, param(b, VLA_COMPUTE, "visual.merger.ln_q.weight", width, -1), c->vision.eps);
    x = vla_reshape(g, x, 2, (int64_t[]){units, width * group});
    x = vla_gelu(g, linear(b, VLA_COMPUTE, "visual.merger.mlp.0", x, width * group, true));
    x = linear(b, VLA_COMPUTE, "visual.merger.mlp.2", x, c->vision.out_hidden_size, true);
    act(b, x, "vision.merger");
    x = vla_gather_rows(g, x, ints(b, "vision.unwindow", units, -1), -1);
    act(b, x, "vision.out");
    return x;
}

/* ---- Action head ---------------------------------------------------------------------------------------------- */

typedef struct {
    vla_value x_t, flow, mask, target;
    vla_value embedding; /* [R, A] precise */
    vla_value condition; /* [samples, A] of adaRMS, or none */
    vla_value sample_of_row; /* [R] */
} actions;

static actions embed_actions(builder *b)
{
    vla_graph *g = b->g;
    int64_t rows = b->s->samples * b->s->horizon, d = b->c->action_dim, width = b->c->action_hidden_size;
    actions a = {.condition = VLA_NONE, .sample_of_row = ints(b, "sample_of_row", rows, -1)};
    a.mask = reals(b, "dof_mask", rows, d);
    vla_value t = reals(b, "t", b->s->samples, -1);
    if (b->o.inference) {
        a.x_t = reals(b, "x_t", rows, d);
    } else {
        vla_value noise = reals(b, "noise", rows, d);
        a.target = reals(b, "action", rows, d);
        a.x_t = vla_add(g, vla_mul_rows(g, noise, reals(b, "one_minus_t", rows, -1)), vla_mul_rows(g, a.target, reals(b, "t_rows", rows, -1)));
        act(b, a.x_t, "action.x_t");
        a.flow = vla_sub(g, a.target, noise);
        act(b, a.flow, "action.flow");
    }
    vla_value tau = vla_sinusoid(g, t, (int)width, 10000.0);
    act(b, tau, "action.time_embed");
    vla_value x = b->c->proj_with_mask ? vla_concat_cols(g, 2, (vla_value[]){a.x_t, a.mask}) : a.x_t;
    vla_value z = linear(b, VLA_PRECISE, "action_preprocessor.w1", x, width, false);
    act(b, z, "action.w1");
    if (b->c->use_adarms) {
        vla_value m = linear(b, VLA_PRECISE, "action_preprocessor.time_mlp_in", tau, width, true);
        act(b, m, "action.time_mlp_in");
        m = linear(b, VLA_PRECISE, "action_preprocessor.time_mlp_out", vla_silu(g, m), width, true);
        act(b, m, "action.time_mlp_out");
        a.condition = vla_silu(g, m);
        a.embedding = z;
    } else {
        vla_value tau_rows = vla_gather_rows(g, tau, a.sample_of_row, -1);
        z = linear(b, VLA_PRECISE, "action_preprocessor.w2", vla_concat_cols(g, 2, (vla_value[]){z, tau_rows}), width, false);
        act(b, z, "action.w2");
        a.embedding = linear(b, VLA_PRECISE, "action_preprocessor.w3", vla_silu(g, z), width, false);
        act(b, a.embedding, "action.w3");
    }
    act(b, a.embedding, "action.embed");
    return a;
}

/* out [R, D]: what action_proj_back gives. */
static vla_value flow_loss(builder *b, const actions *a, vla_value out)
{
    vla_graph *g = b->g;
    int64_t rows = b->s->samples * b->s->horizon;
    vla_value mask = reals(b, "loss_mask", rows, b->c->action_dim), prediction = out, target = a->flow;
    if (b->c->use_x_pred && !b->c->use_x_loss) /* v = (x - x_t) / max(1 - t, 0.05) */
        prediction = vla_mul_rows(g, vla_sub(g, out, a->x_t), reals(b, "x_inverse", rows, -1));
    else if (b->c->use_x_pred)
        target = a->target;
    else if (b->c->use_x_loss) { /* x = (1 - t) v + x_t */
        prediction = vla_add(g, vla_mul_rows(g, out, vla_graph_find(g, "one_minus_t")), a->x_t);
        target = a->target;
    }
    vla_loss loss = vla_masked_mse(g, prediction, target, mask);
    vla_value mean = b->s->flow_scale != 1 ? vla_scale(g, loss.loss, b->s->flow_scale) : loss.loss;
    vla_graph_name(g, loss.error, "flow_error");
    vla_graph_name(g, mean, "flow_loss");
    vla_graph_name(g, loss.count, "flow_count");
    return mean;
}

/* ---- Two-expert backbone -------------------------------------------------------------------------------------- */

typedef struct {
    vla_value y, gate; /* gate: none unless adaRMS */
} normed;

/* The norm of one expert. adaRMS: n (1 + scale) + shift in fp32, and a gate for the branch. */
static normed expert_norm(builder *b, const char *prefix, int expert, vla_value x, const actions *a)
{
    vla_graph *g = b->g;
    int64_t width = vla_value_dim(g, x, 1);
    char name[128];
    snprintf(name, sizeof name, "%s.%d", prefix, expert);
    if (expert == 0 || !b->c->use_adarms)
        return (normed){vla_rms_norm(g, x, weight(b, VLA_PRECISE, name, "weight", width, -1), b->c->rms_norm_eps), VLA_NONE};
    vla_value parts[3];
    snprintf(name, sizeof name, "%s.%d.dense", prefix, expert);
    vla_value m = linear(b, VLA_PRECISE, name, a->condition, 3 * width, true);
    vla_split_cols(g, vla_gather_rows(g, m, a->sample_of_row, -1), 3, (int64_t[]){width, width, width}, parts);
    vla_value n = vla_rms_norm(g, vla_cast(g, x, VLA_PRECISE), VLA_NONE, b->c->rms_norm_eps);
    n = vla_add(g, vla_add(g, n, vla_mul(g, n, parts[0])), parts[1]);
    return (normed){vla_cast(g, n, VLA_COMPUTE), parts[2]};
}

/* x + branch, the branch times the norm's gate where there is one. */
static vla_value residual(builder *b, vla_value x, vla_value branch, vla_value gate)
{
    if (gate != VLA_NONE)
        branch = vla_cast(b->g, vla_mul(b->g, vla_cast(b->g, branch, VLA_PRECISE), gate), VLA_COMPUTE);
    return vla_add(b->g, x, branch);
}

typedef struct {
    vla_rope_tables tables;
    vla_value map, at[2], qpos, rows, cols, segments, qpos_of[2], rows_of[2];
    vla_attention_options attention;
} tables;

/* "Knowledge insulation": action queries read the prefix's keys and values, no gradient flows back into them. */
static void insulated_attention(builder *b, const tables *t, const vla_value qkv[3], vla_value o[2])
{
    vla_graph *g = b->g;
    vla_value cut[2];
    for (int i = 0; i < 2; i++)
        cut[i] = vla_merge_rows(g, vla_stop_gradient(g, vla_gather_rows(g, qkv[1 + i], t->at[0], -1)),
                                vla_gather_rows(g, qkv[1 + i], t->at[1], -1), t->map, t->at[0], t->at[1]);
    o[0] = vla_attention(g, vla_gather_rows(g, qkv[0], t->at[0], -1), qkv[1], qkv[2], t->qpos_of[0], t->rows_of[0], t->cols, VLA_NONE, &t->attention);
    o[1] = vla_attention(g, vla_gather_rows(g, qkv[0], t->at[1], -1), cut[0], cut[1], t->qpos_of[1], t->rows_of[1], t->cols, VLA_NONE, &t->attention);
}

/* Keys or values of the prefix in front of those of the action rows. */
static vla_value behind_prefix(builder *b, const char *format, int64_t l, vla_value own)
{
    char name[64];
    snprintf(name, sizeof name, "cache.%s.%lld", format, (long long)l);
    vla_value kept = vla_graph_input(b->g, name, VLA_COMPUTE, 2, (int64_t[]){b->s->tokens0, vla_value_dim(b->g, own, 1)});
    return vla_concat_rows(b->g, kept, own);
}

static void keep_prefix(builder *b, const char *format, int64_t l, vla_value all, vla_value at0)
{
    char name[64];
    snprintf(name, sizeof name, "cache.%s.%lld", format, (long long)l);
    vla_graph_name(b->g, vla_gather_rows(b->g, all, at0, -1), name);
}

/* What follows is of expert e. The reference skips an expert without rows (SparseMoeBlock.forward and its like in norms and
 * projections), so that its parameters have no gradient and are not stepped; a batch of nothing but actions has no rows for the first.
 * Without actions this graph has no second expert. */
static void enter_expert(builder *b, int e)
{
    vlai_graph_lane(b->g, e);
    b->skipped = e == 0 && b->s->tokens0 == 0;
}

static void leave_expert(builder *b)
{
    vlai_graph_lane(b->g, 0);
    b->skipped = false;
}

/* x[first] .. x[1]: the streams that this graph computes; stream 0 is left out when its keys and values are inputs. */
static void decoder_layer(builder *b, int64_t l, vla_value x[2], int first, int experts, const tables *t, const actions *a)
{
    vla_graph *g = b->g;
    const vlai_wallx_config *c = b->c;
    int64_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
    char layer[64], name[128];
    vla_value gate[2] = {VLA_NONE, VLA_NONE}, fused[2] = {VLA_NONE, VLA_NONE}, qkv[3], o[2];
    snprintf(layer, sizeof layer, "model.layers.%lld", (long long)l);
    for (int e = first; e < experts; e++) {
        enter_expert(b, e);
        snprintf(name, sizeof name, "%s.input_layernorms", layer);
        normed n = expert_norm(b, name, e, x[e], a);
        gate[e] = n.gate;
        snprintf(name, sizeof name, "%s.self_attn.qkv_proj_experts.%d", layer, e);
        fused[e] = linear(b, VLA_COMPUTE, name, n.y, q + 2 * kv, true);
    }
    leave_expert(b);
    vla_value all = first == 1     ? fused[1]
                    : experts == 2 ? vla_merge_rows(g, fused[0], fused[1], t->map, t->at[0], t->at[1])
                                   : fused[0];
    vla_split_cols(g, all, 3, (int64_t[]){q, kv, kv}, qkv);
    qkv[0] = vla_rope(g, qkv[0], t->tables, (int)c->head_dim);
    qkv[1] = vla_rope(g, qkv[1], t->tables, (int)c->head_dim);
    act(b, qkv[0], "layer.%lld.q", (long long)l);
    act(b, qkv[1], "layer.%lld.k", (long long)l);
    if (b->o.keep_prefix) {
        keep_prefix(b, "k", l, qkv[1], t->at[0]);
        keep_prefix(b, "v", l, qkv[2], t->at[0]);
    }
    if (first == 1) {
        o[1] = vla_attention(g, qkv[0], behind_prefix(b, "k", l, qkv[1]), behind_prefix(b, "v", l, qkv[2]), t->qpos, t->rows,
                             t->cols, VLA_NONE, &t->attention);
    } else if (experts == 2 && c->attention == VLAI_WALLX_FLASH_MASK_KI) {
        insulated_attention(b, t, qkv, o);
    } else {
        vla_value joint = vla_attention(g, qkv[0], qkv[1], qkv[2], t->qpos, t->rows, t->cols, t->segments, &t->attention);
        for (int e = 0; e < experts; e++) {
            vlai_graph_lane(g, e);
            o[e] = experts == 2 ? vla_gather_rows(g, joint, t->at[e], -1) : joint;
        }
    }
    for (int e = first; e < experts; e++) {
        enter_expert(b, e);
        int64_t width = vla_value_dim(g, x[e], 1), inner = vlai_wallx_inner(c, c->expert_intermediate[e]);
        snprintf(name, sizeof name, "%s.self_attn.o_proj_experts.%d", layer, e);
        vla_value y = linear(b, VLA_COMPUTE, name, o[e], width, false);
        act(b, y, "layer.%lld.attn.e%d", (long long)l, e);
        x[e] = residual(b, x[e], y, gate[e]);
        snprintf(name, sizeof name, "%s.post_attention_layernorms", layer);
        normed n = expert_norm(b, name, e, x[e], a);
        snprintf(name, sizeof name, "%s.moe.experts.%d.gate_up_proj", layer, e);
        y = vla_swiglu(g, linear(b, VLA_COMPUTE, name, n.y, 2 * inner, false));
        snprintf(name, sizeof name, "%s.moe.experts.%d.down_proj", layer, e);
        x[e] = residual(b, x[e], linear(b, VLA_COMPUTE, name, y, width, false), n.gate);
        act(b, x[e], "layer.%lld.e%d", (long long)l, e);
    }
    leave_expert(b);
}

/* Embedding rows of stream 0, with pictures and state written over their placeholders. */
static vla_value embed_tokens(builder *b, vla_value table, vla_value vision)
{
    vla_graph *g = b->g;
    const vlai_wallx_config *c = b->c;
    vla_value x = vla_gather_rows(g, table, ints(b, "ids", b->s->tokens0, -1), c->pad_token_id);
    if (vision != VLA_NONE)
        x = vla_put_rows(g, x, ints(b, "image_at", b->s->units, -1), vision);
    if (!c->use_state_string_representation && b->s->state_rows) {
        /* The inputs are rounded to the embedding's type before the fp32 product. */
        vla_value state = vla_cast(g, vla_cast(g, reals(b, "state", b->s->state_rows, vlai_wallx_state_columns(c)), VLA_COMPUTE), VLA_PRECISE);
        vla_value y = vla_cast(g, linear(b, VLA_PRECISE, "action_preprocessor.propri_proj", state, c->state_hidden_size, false), VLA_COMPUTE);
        act(b, y, "propri.out");
        if (c->state_hidden_size < c->hidden_size)
            y = vla_concat_cols(g, 2, (vla_value[]){y, vla_fill(g, VLA_COMPUTE, 2, (int64_t[]){b->s->state_rows, c->hidden_size - c->state_hidden_size}, 0)});
        if (b->s->propri)
            x = vla_put_rows(g, x, ints(b, "propri_at", b->s->propri, -1), y);
    }
    return x;
}

/* Rows of the action expert at the language model's width: zeros behind their own columns. */
static vla_value widen(builder *b, vla_value x)
{
    int64_t rows = vla_value_dim(b->g, x, 0), more = b->c->hidden_size - vla_value_dim(b->g, x, 1);
    return more ? vla_concat_cols(b->g, 2, (vla_value[]){x, vla_fill(b->g, VLA_COMPUTE, 2, (int64_t[]){rows, more}, 0)}) : x;
}

/* Of the rows whose next token has a label. */
static vla_value logits_of(builder *b, vla_value hidden, vla_value table)
{
    vla_value rows = vla_gather_rows(b->g, hidden, ints(b, "label_rows", b->s->labels, -1), -1);
    return vla_cast(b->g, vla_linear(b->g, rows, table, VLA_NONE), VLA_PRECISE);
}

static vla_value cross_entropy(builder *b, vla_value hidden, vla_value table)
{
    vla_graph *g = b->g;
    vla_value logits = logits_of(b, hidden, table);
    act(b, logits, "ce_logits");
    vla_loss loss = vla_cross_entropy(g, logits, ints(b, "label_ids", b->s->labels, -1));
    vla_graph_name(g, loss.error, "ce_error");
    vla_graph_name(g, loss.loss, "cross_entropy_loss");
    vla_graph_name(g, loss.count, "cross_entropy_count");
    return loss.loss;
}

static void build(builder *b)
{
    vla_graph *g = b->g;
    const vlai_wallx_config *c = b->c;
    int first = b->o.from_prefix ? 1 : 0, experts = b->s->tokens1 ? 2 : 1;
    int64_t keys = b->s->tokens0 + b->s->tokens1, n = first ? b->s->tokens1 : keys;
    vla_value vision = b->s->patches && !first ? vision_tower(b) : VLA_NONE, table = VLA_NONE, x[2] = {VLA_NONE, VLA_NONE};
    vlai_graph_layer(g, -1);
    if (!first) {
        table = param(b, VLA_COMPUTE, "model.embed_tokens.weight", c->vocab_size, c->hidden_size);
        x[0] = embed_tokens(b, table, vision);
    }
    vlai_graph_lane(g, 1); /* the action expert's work is small: it may run beside the language model's */
    actions a = {.condition = VLA_NONE};
    if (b->s->horizon) /* a batch without actions leaves even their embedding alone */
        a = embed_actions(b);
    vlai_graph_lane(g, 0);
    act(b, x[0], "embeds.e0");
    tables t = {.map = VLA_NONE, .segments = VLA_NONE};
    vla_rope_options rope = {.base = c->rope_theta, .half = (int)c->head_dim / 2, .axes = 3,
                             .sections = {c->mrope_section[0], c->mrope_section[1], c->mrope_section[2]}, .dtype = VLA_COMPUTE};
    t.tables = vla_rope_table(g, ints(b, "positions", 3, n), &rope);
    t.qpos = ints(b, "qpos", n, -1);
    t.rows = ints(b, "rows", n, 2);
    t.cols = ints(b, "cols", keys, 4);
    t.attention = (vla_attention_options){(int)c->num_attention_heads, (int)c->num_key_value_heads, (int)c->head_dim,
                                          vlai_inverse_sqrt((double)c->head_dim), b->s->pairs, VLA_MASK_COLUMNS, 0};
    if (b->s->causal && !first && !(experts == 2 && c->attention == VLAI_WALLX_FLASH_MASK_KI)) {
        t.segments = ints(b, "segments", b->s->samples + 1, -1);
        t.attention.mask = VLA_MASK_CAUSAL;
        t.attention.longest = b->s->longest < n ? b->s->longest : n;
    }
    if (experts == 2) {
        x[1] = vla_cast(g, a.embedding, VLA_COMPUTE);
        act(b, x[1], "embeds.e1");
    }
    if (experts == 2 && !first) {
        t.map = ints(b, "map", n, -1);
        t.at[0] = ints(b, "at0", b->s->tokens0, -1);
        t.at[1] = ints(b, "at1", b->s->tokens1, -1);
        if (c->attention == VLAI_WALLX_FLASH_MASK_KI)
            for (int e = 0; e < 2; e++) {
                int64_t rows = e ? b->s->tokens1 : b->s->tokens0;
                t.qpos_of[e] = ints(b, e ? "qpos1" : "qpos0", rows, -1);
                t.rows_of[e] = ints(b, e ? "rows1" : "rows0", rows, 2);
            }
    }
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        vlai_graph_layer(g, (int32_t)(c->vision.depth + 1 + l));
        decoder_layer(b, l, x, first, experts, &t, &a);
    }
    vlai_graph_layer(g, -1);
    vla_value hidden0 = VLA_NONE, hidden1 = VLA_NONE, out = VLA_NONE;
    if (!first) {
        enter_expert(b, 0);
        hidden0 = expert_norm(b, "model.norms", 0, x[0], &a).y;
        leave_expert(b);
    }
    act(b, hidden0, "hidden.e0");
    if (experts == 2) {
        vlai_graph_lane(g, 1);
        hidden1 = expert_norm(b, "model.norms", 1, x[1], &a).y;
        act(b, hidden1, "hidden.e1");
        out = linear(b, VLA_PRECISE, "action_preprocessor.action_proj_back", vla_cast(g, hidden1, VLA_PRECISE), c->action_dim, false);
        act(b, out, "action.out");
        vlai_graph_lane(g, 0);
    }
    if (b->o.inference) {
        vla_graph_name(g, out, "action.out");
        return;
    }
    vla_value loss = VLA_NONE, head = VLA_NONE;
    if (b->s->labels >= 0)
        head = c->tie_word_embeddings ? table : param(b, VLA_COMPUTE, "lm_head.weight", c->vocab_size, c->hidden_size);
    if (b->o.next) {
        vla_graph_name(g, logits_of(b, hidden0, head), "next");
        return;
    }
    if (b->s->labels >= 0) {
        vla_value hidden = b->s->action_labels ? vla_concat_rows(g, hidden0, widen(b, hidden1)) : hidden0;
        loss = vla_scale(g, cross_entropy(b, hidden, head), c->ar_loss_weight);
    }
    if (experts == 2) {
        vla_value flow = flow_loss(b, &a, out);
        if (c->flow_loss_weight != 1)
            flow = vla_scale(g, flow, c->flow_loss_weight);
        loss = loss == VLA_NONE ? flow : vla_add(g, loss, flow);
    }
    if (loss == VLA_NONE)
        loss = vla_fill(g, VLA_PRECISE, 1, (int64_t[]){1}, 0);
    /* The total may be the flow loss itself: a scale by 1 gives it a value of its own to name. */
    loss = vla_scale(g, loss, 1.0);
    vla_graph_name(g, loss, "loss");
}

vla_status vlai_wallx_build(const vlai_wallx_config *config, const vlai_wallx_shape *shape,
                            const vlai_wallx_options *options, vla_graph **out, vla_error *err)
{
    builder b = {.c = config, .s = shape, .o = *options};
    VLA_TRY(vla_graph_create(&b.g, err));
    build(&b);
    vla_status status = vla_graph_check(b.g, err);
    if (status != VLA_OK) {
        vla_graph_destroy(b.g);
        return vlai_prefix(err, status, "wallx graph");
    }
    *out = b.g;
    return VLA_OK;
}

/* The tower alone: loss = sum(out * d_out), for golden cases of component "vision". */
vla_status vlai_wallx_build_vision(const vlai_wallx_config *config, const vlai_wallx_shape *shape, vla_graph **out,
                                   vla_error *err)
{
    builder b = {.c = config, .s = shape, .o = {.activations = true}};
    VLA_TRY(vla_graph_create(&b.g, err));
    vla_value y = vision_tower(&b);
    vlai_graph_layer(b.g, -1);
    int64_t elements = shape->units * config->vision.out_hidden_size;
    vla_value product = vla_mul(b.g, vla_cast(b.g, y, VLA_PRECISE), reals(&b, "d_out", shape->units, config->vision.out_hidden_size));
    vla_graph_name(b.g, vla_row_sum(b.g, vla_reshape(b.g, product, 2, (int64_t[]){1, elements})), "loss");
    vla_status status = vla_graph_check(b.g, err);
    if (status != VLA_OK) {
        vla_graph_destroy(b.g);
        return status;
    }
    *out = b.g;
    return VLA_OK;
}
