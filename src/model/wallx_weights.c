/* The list of tensors, in the order in which the model uses them: tower, embedding, layers, final norms, action head. */
#include "model/wallx_layout.h"

#include "base/fail.h"
#include "base/memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct list {
    vlai_wallx_weight *items;
    size_t count, capacity;
    vla_status status; /* the first failure; later additions do nothing */
    vla_error *err;
} list;

/* Adds a vector (columns 0) or a matrix. The result stands until the next addition. */
__attribute__((format(printf, 4, 5))) static vlai_wallx_weight *add(list *l, int64_t rows, int64_t columns,
                                                                    const char *format, ...)
{
    static const vlai_wallx_weight none = {{0}, 0, {0}, 0, false, 0, {0}};
    if (l->status == VLA_OK)
        l->status = vlai_reserve((void **)&l->items, &l->capacity, l->count, sizeof *l->items, l->err);
    if (l->status != VLA_OK)
        return NULL;
    vlai_wallx_weight *w = &l->items[l->count++];
    *w = none;
    va_list args;
    va_start(args, format);
    vsnprintf(w->name, sizeof w->name, format, args);
    va_end(args);
    w->rank = columns ? 2 : 1;
    w->shape[0] = rows;
    w->shape[1] = columns;
    w->part_count = 1;
    w->part_rows[0] = rows;
    w->elements = columns ? rows * columns : rows; /* both at most 2^28 */
    return w;
}

static void set_parts(vlai_wallx_weight *w, int count, int64_t first, int64_t second, int64_t third)
{
    if (!w)
        return;
    w->part_count = count;
    w->part_rows[0] = first;
    w->part_rows[1] = second;
    w->part_rows[2] = third;
}

static void add_linear(list *l, int64_t rows, int64_t columns, bool bias, const char *name)
{
    add(l, rows, columns, "%s.weight", name);
    if (bias)
        add(l, rows, 0, "%s.bias", name);
}

static void add_tower(list *l, const vlai_wallx_config *c)
{
    int64_t h = c->vision.hidden_size, i = c->vision.intermediate_size;
    int64_t unit = h * c->vision.spatial_merge_size * c->vision.spatial_merge_size;
    char name[80];
    vlai_wallx_weight *patch = add(l, h, 1, "visual.patch_embed.proj.weight");
    if (patch) {
        const int64_t shape[] = {h, c->vision.in_channels, c->vision.temporal_patch_size, c->vision.patch_size,
                                 c->vision.patch_size};
        patch->rank = 5;
        patch->elements = 1;
        for (int d = 0; d < 5; d++) {
            patch->shape[d] = shape[d];
            patch->elements *= shape[d]; /* the bounds of the configuration keep this below 2^52 */
        }
    }
    for (int64_t n = 0; n < c->vision.depth; n++) {
        add(l, h, 0, "visual.blocks.%lld.norm1.weight", (long long)n);
        snprintf(name, sizeof name, "visual.blocks.%lld.attn.qkv", (long long)n);
        add_linear(l, 3 * h, h, true, name);
        snprintf(name, sizeof name, "visual.blocks.%lld.attn.proj", (long long)n);
        add_linear(l, h, h, true, name);
        add(l, h, 0, "visual.blocks.%lld.norm2.weight", (long long)n);
        set_parts(add(l, 2 * i, h, "visual.blocks.%lld.mlp.gate_up_proj.weight", (long long)n), 2, i, i, 0);
        set_parts(add(l, 2 * i, 0, "visual.blocks.%lld.mlp.gate_up_proj.bias", (long long)n), 2, i, i, 0);
        snprintf(name, sizeof name, "visual.blocks.%lld.mlp.down_proj", (long long)n);
        add_linear(l, h, i, true, name);
    }
    add(l, h, 0, "visual.merger.ln_q.weight");
    add_linear(l, unit, unit, true, "visual.merger.mlp.0");
    add_linear(l, c->vision.out_hidden_size, unit, true, "visual.merger.mlp.2");
}

/* A norm of expert e: a weight, or with adaptive norms of expert 1 a linear map to scale, shift and gate. */
static void add_norm(list *l, const vlai_wallx_config *c, int e, const char *name)
{
    int64_t width = c->expert_hidden[e];
    if (e == 1 && c->use_adarms) {
        add(l, 3 * width, width, "%s.%d.dense.weight", name, e);
        add(l, 3 * width, 0, "%s.%d.dense.bias", name, e);
    } else {
        add(l, width, 0, "%s.%d.weight", name, e);
    }
}

static void add_layer(list *l, const vlai_wallx_config *c, long long n)
{
    int64_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
    char name[80];
    for (int e = 0; e < 2; e++) {
        int64_t width = c->expert_hidden[e], inner = c->expert_intermediate[e];
        snprintf(name, sizeof name, "model.layers.%lld.input_layernorms", n);
        add_norm(l, c, e, name);
        set_parts(add(l, q + 2 * kv, width, "model.layers.%lld.self_attn.qkv_proj_experts.%d.weight", n, e), 3, q, kv, kv);
        set_parts(add(l, q + 2 * kv, 0, "model.layers.%lld.self_attn.qkv_proj_experts.%d.bias", n, e), 3, q, kv, kv);
        add(l, width, q, "model.layers.%lld.self_attn.o_proj_experts.%d.weight", n, e);
        snprintf(name, sizeof name, "model.layers.%lld.post_attention_layernorms", n);
        add_norm(l, c, e, name);
        set_parts(add(l, 2 * inner, width, "model.layers.%lld.moe.experts.%d.gate_up_proj.weight", n, e), 2, inner, inner,
                  0);
        add(l, width, inner, "model.layers.%lld.moe.experts.%d.down_proj.weight", n, e);
    }
}

static void add_action_head(list *l, const vlai_wallx_config *c)
{
    int64_t a = c->action_hidden_size;
    add(l, a, c->proj_with_mask ? 2 * c->action_dim : c->action_dim, "action_preprocessor.w1.weight");
    if (c->use_adarms) {
        add_linear(l, a, a, true, "action_preprocessor.time_mlp_in");
        add_linear(l, a, a, true, "action_preprocessor.time_mlp_out");
    } else {
        add(l, a, 2 * a, "action_preprocessor.w2.weight");
        add(l, a, a, "action_preprocessor.w3.weight");
    }
    add(l, c->action_dim, a, "action_preprocessor.action_proj_back.weight");
}

vla_status vlai_wallx_weights(const vlai_wallx_config *c, vlai_wallx_weight **out, size_t *count, vla_error *err)
{
    *out = NULL;
    *count = 0;
    list l = {NULL, 0, 0, VLA_OK, err};
    add_tower(&l, c);
    add(&l, c->vocab_size, c->hidden_size, "model.embed_tokens.weight");
    for (int64_t n = 0; n < c->num_hidden_layers; n++)
        add_layer(&l, c, (long long)n);
    add_norm(&l, c, 0, "model.norms");
    add_norm(&l, c, 1, "model.norms");
    add_action_head(&l, c);
    vlai_wallx_weight *head = add(&l, c->vocab_size, c->hidden_size, "lm_head.weight");
    if (head)
        head->optional = c->tie_word_embeddings;
    vlai_wallx_weight *propri = add(&l, c->state_hidden_size, vlai_wallx_state_columns(c), "action_preprocessor.propri_proj.weight");
    if (propri)
        propri->optional = true;
    if (l.status != VLA_OK) {
        vlai_free(l.items);
        return l.status;
    }
    *out = l.items;
    *count = l.count;
    return VLA_OK;
}

bool vlai_wallx_part_name(const vlai_wallx_weight *weight, int part, char *out, size_t size)
{
    static const char *const qkv[] = {"q_proj", "k_proj", "v_proj"}, *const gate_up[] = {"gate_proj", "up_proj"};
    if (part < 0 || weight->part_count < 2 || part >= weight->part_count)
        return false;
    const char *fused = weight->part_count == 3 ? "qkv_proj" : "gate_up_proj";
    const char *at = strstr(weight->name, fused);
    int n = snprintf(out, size, "%.*s%s%s", (int)(at - weight->name), weight->name,
                     weight->part_count == 3 ? qkv[part] : gate_up[part], at + strlen(fused));
    return n > 0 && (size_t)n < size;
}
