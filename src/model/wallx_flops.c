#include "model/wallx_flops.h"

/* Sum of squared lengths of the pieces when `length` is cut every `edge`. */
static double squared_pieces(int64_t length, int64_t edge)
{
    int64_t rest = length % edge;
    return (double)(length / edge) * (double)(edge * edge) + (double)(rest * rest);
}

static void vision(const vlai_wallx_config *c, int64_t images, const int32_t *grid, vlai_wallx_flops *f)
{
    double width = (double)c->vision.hidden_size, inner = (double)c->vision.intermediate_size, depth = (double)c->vision.depth;
    int64_t merge = c->vision.spatial_merge_size, edge = c->vision.window_size / merge / c->vision.patch_size;
    double patch = (double)(c->vision.in_channels * c->vision.temporal_patch_size * c->vision.patch_size * c->vision.patch_size);
    double group = (double)(merge * merge), patches = 0, full_pairs = 0, window_pairs = 0, full_blocks = 0;
    for (int64_t i = 0; i < images; i++) {
        double t = grid[3 * i], area = (double)grid[3 * i + 1] * (double)grid[3 * i + 2];
        patches += t * area;
        full_pairs += t * area * area;
        /* Windows are cut from the grid of merged units, a unit being merge x merge patches. */
        window_pairs += t * group * group * squared_pieces(grid[3 * i + 1] / merge, edge) * squared_pieces(grid[3 * i + 2] / merge, edge);
    }
    for (int64_t n = 0; n < c->vision.depth; n++)
        full_blocks += vlai_wallx_full_attention(c, n);
    double block = 4 * width * width + 3 * width * inner, merged = group * width;
    double merger = merged * merged + merged * (double)c->vision.out_hidden_size;
    f->vision_linear = 2 * patches * (patch * width + depth * block) + 2 * patches / group * merger;
    f->vision_attention = 4 * width * (full_blocks * full_pairs + (depth - full_blocks) * window_pairs);
}

/* One token of expert e in one layer: qkv, o, gate and up, down. */
static double expert_weights(const vlai_wallx_config *c, int e)
{
    double q = (double)(c->num_attention_heads * c->head_dim), kv = (double)(c->num_key_value_heads * c->head_dim);
    double width = (double)c->expert_hidden[e];
    return width * (q + 2 * kv) + q * width + 3 * width * (double)c->expert_intermediate[e];
}

/* The action embedding and action_proj_back per action token. adaRMS has no w2 and w3, but two time layers and a dense
 * layer per norm (two a layer, one at the end) for each sample. */
static double action_head(const vlai_wallx_config *c, double tokens)
{
    double width = (double)c->action_hidden_size, channels = (double)c->action_dim;
    double ends = width * channels * (c->proj_with_mask ? 2 : 1) + width * channels;
    if (!c->use_adarms)
        return 2 * tokens * (ends + 3 * width * width);
    return 2 * tokens * ends + 2 * (2 * width * width + (double)(2 * c->num_hidden_layers + 1) * 3 * width * width);
}

void vlai_wallx_flops_of(const vlai_wallx_config *c, int64_t text_tokens, int64_t action_tokens, int64_t label_rows,
                         int64_t images, const int32_t *grid, vlai_wallx_flops *out)
{
    *out = (vlai_wallx_flops){0};
    vision(c, images, grid, out);
    double n0 = (double)text_tokens, n1 = (double)action_tokens, layers = (double)c->num_hidden_layers;
    double merge = (double)(c->vision.spatial_merge_size * c->vision.spatial_merge_size);
    for (int64_t i = 0; i < images; i++)
        n0 += (double)grid[3 * i] * (double)grid[3 * i + 1] * (double)grid[3 * i + 2] / merge;
    double tokens = n0 + n1;
    out->language_linear = 2 * layers * (expert_weights(c, 0) * n0 + expert_weights(c, 1) * n1);
    out->language_attention = layers * 2 * (double)(c->num_attention_heads * c->head_dim) * tokens * (tokens + 1);
    out->action_head = n1 > 0 ? action_head(c, n1) : 0;
    out->lm_head = 2 * (double)c->hidden_size * (double)c->vocab_size * (double)label_rows;
    out->forward = out->vision_linear + out->vision_attention + out->language_linear + out->language_attention + out->action_head + out->lm_head;
    out->training = 3 * out->forward;
}
