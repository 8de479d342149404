/* Reading config.json: tables of keys with the reference's class defaults and the bounds that keep products of sizes far
 * from overflow, then the constraints between sizes. Keys that are not in the tables are left alone: the file is shared
 * with other programs, which keep theirs in it. */
#include "model/wallx_config.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct integer_row {
    const char *key;
    size_t offset;
    int64_t fallback, low, high;
} integer_row;

typedef struct real_row {
    const char *key;
    size_t offset;
    double fallback, low, high;
} real_row;

typedef struct flag_row {
    const char *key;
    size_t offset;
    bool fallback;
} flag_row;

enum { WIDTH = 1 << 20, COUNT = 1024, TOKENS = 1 << 28 };

#define AT(field) offsetof(vlai_wallx_config, field)
static const integer_row text_integers[] = {
    {"vocab_size", AT(vocab_size), 152064, 1, TOKENS},
    {"hidden_size", AT(hidden_size), 8192, 1, WIDTH},
    {"intermediate_size", AT(intermediate_size), 29568, 1, WIDTH},
    {"num_hidden_layers", AT(num_hidden_layers), 80, 1, COUNT},
    {"num_attention_heads", AT(num_attention_heads), 64, 1, COUNT},
    {"num_key_value_heads", AT(num_key_value_heads), 8, 1, COUNT},
    {"action_hidden_size", AT(action_hidden_size), 2048, 2, WIDTH},
    {"state_hidden_size", AT(state_hidden_size), 2048, 1, WIDTH},
    {"pad_token_id", AT(pad_token_id), -1, -1, TOKENS},
    {"image_token_id", AT(image_token_id), 151655, 0, TOKENS},
    {"video_token_id", AT(video_token_id), 151656, 0, TOKENS},
    {"vision_start_token_id", AT(vision_start_token_id), 151652, 0, TOKENS},
    {"action_horizon_flow", AT(action_horizon_flow), 32, 1, 4096},
};
static const real_row text_reals[] = {
    {"rms_norm_eps", AT(rms_norm_eps), 1e-5, 0, 1},
    {"rope_theta", AT(rope_theta), 1e6, 1, 1e12},
    {"ar_loss_weight", AT(ar_loss_weight), 1, 0, 1e6},
};
static const flag_row text_flags[] = {
    {"tie_word_embeddings", AT(tie_word_embeddings), false},
    {"causal_action_attention_mask", AT(causal_action_attention_mask), false},
    {"proj_with_mask", AT(proj_with_mask), true},
    {"use_adarms", AT(use_adarms), false},
    {"use_x_pred", AT(use_x_pred), false},
    {"use_x_loss", AT(use_x_loss), false},
    {"use_flow_action_expert", AT(use_flow_action_expert), true},
    {"use_state_string_representation", AT(use_state_string_representation), false},
};
static const integer_row noise_integers[] = {
    {"num_inference_timesteps", AT(noise.num_inference_timesteps), 10, 1, 100000},
};
static const real_row noise_reals[] = {
    {"beta_alpha", AT(noise.beta_alpha), 1.5, 1e-6, 1e3},
    {"beta_beta", AT(noise.beta_beta), 1.0, 1e-6, 1e3},
    {"s", AT(noise.s), 0.999, 1e-6, 1},
    {"time_shift", AT(noise.time_shift), 1.0, 1e-6, 1e3},
};
static const integer_row vision_integers[] = {
    {"depth", AT(vision.depth), 32, 1, 128},
    {"hidden_size", AT(vision.hidden_size), 3584, 1, WIDTH},
    {"intermediate_size", AT(vision.intermediate_size), 3420, 1, WIDTH},
    {"num_heads", AT(vision.num_heads), 16, 1, COUNT},
    {"in_channels", AT(vision.in_channels), 3, 1, 64},
    {"patch_size", AT(vision.patch_size), 14, 1, 256},
    {"temporal_patch_size", AT(vision.temporal_patch_size), 2, 1, 16},
    {"spatial_merge_size", AT(vision.spatial_merge_size), 2, 1, 16},
    {"window_size", AT(vision.window_size), 112, 1, 65536},
    {"out_hidden_size", AT(vision.out_hidden_size), 3584, 1, WIDTH},
    {"tokens_per_second", AT(vision.tokens_per_second), 4, 1, 65536},
};
#undef AT

typedef struct reader {
    vlai_wallx_config *c;
    const char *path;
    vla_error *err;
} reader;

#define ROWS(table) (table), sizeof(table) / sizeof *(table)

static vla_status read_integers(reader *r, const json_t *object, const char *prefix, const integer_row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int64_t *field = (int64_t *)(void *)((char *)r->c + rows[i].offset);
        vla_status status = vlai_json_int(object, rows[i].key, rows[i].fallback, r->path, field, r->err);
        if (status != VLA_OK)
            return *prefix ? vlai_prefix(r->err, status, "%s", prefix) : status;
        if (*field < rows[i].low || *field > rows[i].high)
            return vlai_fail(r->err, VLA_E_INVALID, "%s: %s%s is %lld%s, wanted %lld to %lld", r->path, prefix,
                             rows[i].key, (long long)*field,
                             json_object_get(object, rows[i].key) ? "" : " (the class default)",
                             (long long)rows[i].low, (long long)rows[i].high);
    }
    return VLA_OK;
}

static vla_status read_reals(reader *r, const json_t *object, const char *prefix, const real_row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        double *field = (double *)(void *)((char *)r->c + rows[i].offset);
        VLA_TRY(vlai_json_real(object, rows[i].key, rows[i].fallback, r->path, field, r->err));
        if (!(*field >= rows[i].low && *field <= rows[i].high))
            return vlai_fail(r->err, VLA_E_INVALID, "%s: %s%s is %g, wanted %g to %g", r->path, prefix, rows[i].key,
                             *field, rows[i].low, rows[i].high);
    }
    return VLA_OK;
}

static vla_status read_flags(reader *r, const json_t *object, const flag_row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++)
        VLA_TRY(vlai_json_bool(object, rows[i].key, rows[i].fallback, r->path,
                               (bool *)(void *)((char *)r->c + rows[i].offset), r->err));
    return VLA_OK;
}

/* A list of exactly `count` integers. */
static vla_status read_list(reader *r, const json_t *object, const char *key, size_t count, int64_t *out)
{
    const json_t *list = json_object_get(object, key);
    bool fits = json_array_size(list) == count;
    for (size_t i = 0; i < count && fits; i++) {
        fits = json_is_integer(json_array_get(list, i));
        out[i] = json_integer_value(json_array_get(list, i));
    }
    return fits ? VLA_OK
                : vlai_fail(r->err, VLA_E_INVALID, "%s: %s is not a list of %zu integers", r->path, key, count);
}

static vla_status section_of(reader *r, const json_t *root, const char *key, const json_t **out)
{
    *out = json_object_get(root, key);
    if (!*out || json_is_null(*out) || json_is_object(*out))
        return VLA_OK;
    return vlai_fail(r->err, VLA_E_INVALID, "%s: %s is not an object", r->path, key);
}

/* ---- parts ---- */

static vla_status read_act(reader *r, const json_t *object, const char *prefix)
{
    const char *act;
    VLA_TRY(vlai_json_string(object, "hidden_act", "silu", r->path, &act, r->err));
    return strcmp(act, "silu") == 0 ? VLA_OK
                                    : vlai_fail(r->err, VLA_E_UNSUPPORTED, "%s: %shidden_act is '%.32s', wanted silu",
                                                r->path, prefix, act);
}

static const struct {
    const char *name;
    vlai_wallx_attention value;
} attentions[] = {
    {"sdpa", VLAI_WALLX_SDPA},
    {"eager", VLAI_WALLX_SDPA},
    {"flash_attention_2", VLAI_WALLX_FLASH},
    {"flash_mask", VLAI_WALLX_FLASH_MASK},
    {"flash_mask_ki", VLAI_WALLX_FLASH_MASK_KI},
};

static vla_status read_attention(reader *r, const json_t *root)
{
    const char *name;
    VLA_TRY(vlai_json_string(root, "_attn_implementation", "sdpa", r->path, &name, r->err));
    for (size_t i = 0; i < sizeof attentions / sizeof *attentions; i++)
        if (!strcmp(name, attentions[i].name)) {
            r->c->attention = attentions[i].value;
            return VLA_OK;
        }
    return vlai_fail(r->err, VLA_E_INVALID,
                     "%s: _attn_implementation is '%.32s', wanted sdpa, eager, flash_attention_2, flash_mask or "
                     "flash_mask_ki",
                     r->path, name);
}

static vla_status read_rope(reader *r, const json_t *root)
{
    const json_t *rope;
    VLA_TRY(section_of(r, root, "rope_scaling", &rope));
    int64_t sections[3];
    if (!json_is_object(rope))
        return vlai_fail(r->err, VLA_E_INVALID, "%s: rope_scaling is missing, wanted {type: mrope, mrope_section}", r->path);
    const char *type;
    VLA_TRY(vlai_json_string(rope, json_object_get(rope, "rope_type") ? "rope_type" : "type", "mrope", r->path, &type, r->err));
    if (strcmp(type, "mrope") != 0 && strcmp(type, "default") != 0)
        return vlai_fail(r->err, VLA_E_UNSUPPORTED, "%s: rope_scaling is of type '%.32s', wanted mrope (also written default)",
                         r->path, type);
    VLA_TRY(read_list(r, rope, "mrope_section", 3, sections));
    int64_t sum = 0, half = r->c->head_dim / 2;
    for (int i = 0; i < 3; i++) {
        if (sections[i] < 0 || sections[i] > half)
            return vlai_fail(r->err, VLA_E_INVALID, "%s: mrope_section entry %d is %lld, wanted 0 to %lld", r->path, i,
                             (long long)sections[i], (long long)half);
        r->c->mrope_section[i] = (int)sections[i];
        sum += sections[i];
    }
    return sum == half ? VLA_OK
                       : vlai_fail(r->err, VLA_E_SHAPE,
                                   "%s: mrope_section sums to %lld, wanted %lld, half of the head dimension %lld", r->path,
                                   (long long)sum, (long long)half, (long long)r->c->head_dim);
}

static vla_status read_experts(reader *r, const json_t *root)
{
    vlai_wallx_config *c = r->c;
    static const char *const branches[] = {"attention_moe", "mlp_moe", "norm_moe", "mot_opt"};
    for (size_t i = 0; i < 4; i++) {
        bool on;
        VLA_TRY(vlai_json_bool(root, branches[i], false, r->path, &on, r->err));
        if (!on)
            return vlai_fail_hint(r->err, VLA_E_UNSUPPORTED,
                                  "this is an older wall-oss architecture, whose experts share attention or norms",
                                  "%s: %s is false; only models whose experts have their own attention, MLP and norms "
                                  "(all of attention_moe, mlp_moe, norm_moe, mot_opt) are trained here",
                                  r->path, branches[i]);
    }
    int64_t count;
    VLA_TRY(vlai_json_int(root, "num_experts", 4, r->path, &count, r->err));
    const json_t *experts = json_object_get(root, "experts");
    if (count != 2 || json_array_size(experts) != 2)
        return vlai_fail(r->err, VLA_E_UNSUPPORTED, "%s: num_experts is %lld and experts has %zu entries, wanted 2 and 2",
                         r->path, (long long)count, json_array_size(experts));
    VLA_TRY(read_list(r, root, "dim_inputs", 2, c->expert_hidden));
    const int64_t wanted[2] = {c->hidden_size, c->action_hidden_size};
    for (size_t i = 0; i < 2; i++) {
        const json_t *expert = json_array_get(experts, i);
        int64_t hidden;
        VLA_TRY(vlai_json_need_int(expert, "hidden_size", r->path, &hidden, r->err));
        VLA_TRY(vlai_json_need_int(expert, "intermediate_size", r->path, &c->expert_intermediate[i], r->err));
        VLA_TRY(read_act(r, expert, "experts: "));
        if (c->expert_hidden[i] != wanted[i] || hidden != wanted[i])
            return vlai_fail(r->err, VLA_E_SHAPE, "%s: dim_inputs[%zu] is %lld and experts[%zu].hidden_size %lld, wanted %s %lld",
                             r->path, i, (long long)c->expert_hidden[i], i, (long long)hidden,
                             i ? "action_hidden_size" : "hidden_size", (long long)wanted[i]);
        if (c->expert_intermediate[i] < 1 || c->expert_intermediate[i] > WIDTH)
            return vlai_fail(r->err, VLA_E_INVALID, "%s: experts[%zu].intermediate_size is %lld, wanted 1 to %d", r->path, i,
                             (long long)c->expert_intermediate[i], WIDTH);
    }
    return VLA_OK;
}

static vla_status check_text(reader *r, const json_t *root)
{
    vlai_wallx_config *c = r->c;
    bool sliding;
    VLA_TRY(read_act(r, root, ""));
    VLA_TRY(vlai_json_bool(root, "use_sliding_window", false, r->path, &sliding, r->err));
    double dropout;
    VLA_TRY(vlai_json_real(root, "attention_dropout", 0, r->path, &dropout, r->err));
    if (sliding || dropout != 0)
        return vlai_fail(r->err, VLA_E_UNSUPPORTED, "%s: use_sliding_window %s and attention_dropout %g, wanted false and 0",
                         r->path, sliding ? "true" : "false", dropout);
    if (c->hidden_size % c->num_attention_heads)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: hidden_size %lld is not a multiple of num_attention_heads %lld", r->path,
                         (long long)c->hidden_size, (long long)c->num_attention_heads);
    if (c->num_attention_heads % c->num_key_value_heads)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: num_attention_heads %lld is not a multiple of num_key_value_heads %lld",
                         r->path, (long long)c->num_attention_heads, (long long)c->num_key_value_heads);
    c->head_dim = c->hidden_size / c->num_attention_heads;
    if (c->head_dim % 2)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: the head dimension %lld is odd, rotary pairs need an even one", r->path,
                         (long long)c->head_dim);
    if (c->action_hidden_size > c->hidden_size || c->action_hidden_size % 2 || c->action_hidden_size < 4)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: action_hidden_size is %lld, wanted an even number from 4 to hidden_size %lld",
                         r->path, (long long)c->action_hidden_size, (long long)c->hidden_size);
    if (c->state_hidden_size > c->hidden_size)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: state_hidden_size %lld exceeds hidden_size %lld", r->path,
                         (long long)c->state_hidden_size, (long long)c->hidden_size);
    if (!c->use_flow_action_expert)
        return vlai_fail(r->err, VLA_E_UNSUPPORTED, "%s: use_flow_action_expert is false, wanted true", r->path);
    int64_t cond;
    VLA_TRY(vlai_json_int(root, "adarms_cond_dim", c->action_hidden_size, r->path, &cond, r->err));
    if (c->use_adarms && cond != c->action_hidden_size)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: adarms_cond_dim is %lld, wanted action_hidden_size %lld", r->path,
                         (long long)cond, (long long)c->action_hidden_size);
    return VLA_OK;
}

static vla_status read_vision(reader *r, const json_t *root)
{
    vlai_wallx_config *c = r->c;
    const json_t *vision;
    VLA_TRY(section_of(r, root, "vision_config", &vision));
    VLA_TRY(read_integers(r, vision, "vision_config.", ROWS(vision_integers)));
    VLA_TRY(read_act(r, vision, "vision_config."));
    c->vision.eps = 1e-6;
    c->vision.theta = 1e4;
    if (c->vision.hidden_size % c->vision.num_heads || c->vision.hidden_size / c->vision.num_heads % 4)
        return vlai_fail(r->err, VLA_E_SHAPE,
                         "%s: vision_config.hidden_size %lld over num_heads %lld is not a multiple of 4, as rotation in two "
                         "directions needs",
                         r->path, (long long)c->vision.hidden_size, (long long)c->vision.num_heads);
    c->vision.head_dim = c->vision.hidden_size / c->vision.num_heads;
    if (c->vision.out_hidden_size != c->hidden_size)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: vision_config.out_hidden_size is %lld, wanted hidden_size %lld", r->path,
                         (long long)c->vision.out_hidden_size, (long long)c->hidden_size);
    if (c->vision.window_size / c->vision.spatial_merge_size / c->vision.patch_size < 1)
        return vlai_fail(r->err, VLA_E_SHAPE, "%s: vision_config.window_size %lld holds no merged patch of %lld pixels", r->path,
                         (long long)c->vision.window_size,
                         (long long)(c->vision.spatial_merge_size * c->vision.patch_size));
    static const int64_t class_default[] = {7, 15, 23, 31};
    const json_t *list = json_object_get(vision, "fullatt_block_indexes");
    bool given = list && !json_is_null(list);
    if (given && !json_is_array(list))
        return vlai_fail(r->err, VLA_E_INVALID, "%s: vision_config.fullatt_block_indexes is not a list", r->path);
    for (size_t i = 0; i < (given ? json_array_size(list) : 4); i++) {
        const json_t *entry = given ? json_array_get(list, i) : NULL;
        int64_t block = given ? json_integer_value(entry) : class_default[i];
        if ((given && !json_is_integer(entry)) || block < 0)
            return vlai_fail(r->err, VLA_E_INVALID, "%s: vision_config.fullatt_block_indexes entry %zu is not a block number",
                             r->path, i);
        if (block >= c->vision.depth) /* the list of a deeper tower, as the class default is: no block to mark */
            continue;
        c->vision.full_attention[block / 64] |= (uint64_t)1 << (block % 64);
    }
    return VLA_OK;
}

static vla_status read_all(reader *r, const json_t *root)
{
    if (!json_is_object(root))
        return vlai_fail(r->err, VLA_E_INVALID, "%s: not a JSON object", r->path);
    const char *type;
    VLA_TRY(vlai_json_string(root, "model_type", "qwen2_5_vl", r->path, &type, r->err));
    if (!strstr(type, "qwen2_5"))
        return vlai_fail_hint(r->err, VLA_E_UNSUPPORTED, "model.config_path names the architecture of wall-oss-0.5",
                              "%s: model_type is '%.64s', wanted one that contains qwen2_5", r->path, type);
    const json_t *noise;
    VLA_TRY(section_of(r, root, "noise_scheduler", &noise));
    VLA_TRY(read_integers(r, root, "", ROWS(text_integers)));
    VLA_TRY(read_reals(r, root, "", ROWS(text_reals)));
    VLA_TRY(read_flags(r, root, ROWS(text_flags)));
    VLA_TRY(read_integers(r, noise, "noise_scheduler.", ROWS(noise_integers)));
    VLA_TRY(read_reals(r, noise, "noise_scheduler.", ROWS(noise_reals)));
    VLA_TRY(read_attention(r, root));
    VLA_TRY(check_text(r, root));
    VLA_TRY(read_rope(r, root));
    VLA_TRY(read_experts(r, root));
    r->c->flow_loss_weight = 1;
    return read_vision(r, root);
}

vla_status vlai_wallx_config_parse(const char *data, size_t size, const char *name, vlai_wallx_config *out, vla_error *err)
{
    *out = (vlai_wallx_config){0};
    json_t *root;
    VLA_TRY(vlai_json_parse(data, size, name, &root, err));
    reader r = {out, name, err};
    vla_status status = read_all(&r, root);
    json_decref(root);
    return status;
}

vla_status vlai_wallx_config_load(const char *path, vlai_wallx_config *out, vla_error *err)
{
    char inside[4096];
    if (vlai_is_dir(path)) {
        if (!vlai_path_join(inside, sizeof inside, path, "config.json"))
            return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
        path = inside;
    }
    char *data;
    size_t size;
    VLA_TRY(vlai_read_file(path, (size_t)1 << 24, &data, &size, err));
    vla_status status = vlai_wallx_config_parse(data, size, path, out, err);
    vlai_free(data);
    return status;
}

/* What the training configuration or the weights decide: others compare it. */
static bool is_foreign(const char *key)
{
    static const char *const keys[] = {"vocab_size", "action_horizon_flow", "use_state_string_representation"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!strcmp(key, keys[i]))
            return true;
    return false;
}

static int put_integers(json_t *to, const vlai_wallx_config *c, const integer_row *rows, size_t count)
{
    int failed = 0;
    for (size_t i = 0; i < count; i++)
        if (!is_foreign(rows[i].key))
            failed |= json_object_set_new(to, rows[i].key, json_integer(*(const int64_t *)(const void *)((const char *)c + rows[i].offset)));
    return failed;
}

json_t *vlai_wallx_config_to_json(const vlai_wallx_config *c)
{
    json_t *all = json_object(), *vision = json_object(), *blocks = json_array();
    const char *attention = "";
    int failed = put_integers(all, c, ROWS(text_integers)) | put_integers(vision, c, ROWS(vision_integers));
    for (size_t i = 0; i < sizeof text_reals / sizeof *text_reals; i++)
        failed |= json_object_set_new(all, text_reals[i].key, json_real(*(const double *)(const void *)((const char *)c + text_reals[i].offset)));
    for (size_t i = 0; i < sizeof text_flags / sizeof *text_flags; i++)
        if (!is_foreign(text_flags[i].key))
            failed |= json_object_set_new(all, text_flags[i].key, json_boolean(*(const bool *)(const void *)((const char *)c + text_flags[i].offset)));
    for (size_t i = sizeof attentions / sizeof *attentions; i-- > 0;)
        if (attentions[i].value == c->attention)
            attention = attentions[i].name;
    failed |= json_object_set_new(all, "_attn_implementation", json_string(attention));
    failed |= json_object_set_new(all, "mrope_section", json_pack("[i, i, i]", c->mrope_section[0], c->mrope_section[1], c->mrope_section[2]));
    for (int64_t i = 0; i < c->vision.depth; i++)
        if (vlai_wallx_full_attention(c, i))
            failed |= json_array_append_new(blocks, json_integer(i));
    failed |= json_object_set_new(vision, "fullatt_block_indexes", blocks);
    failed |= json_object_set_new(all, "vision_config", vision);
    if (failed) {
        json_decref(all);
        return NULL;
    }
    return all;
}

/* Predictions follow the times that training draws; the number of steps is the architecture's unless one is given. */
static void take_noise(vlai_wallx_config *c, const vlai_config *train)
{
    c->noise.beta_alpha = train->noise.beta_alpha;
    c->noise.beta_beta = train->noise.beta_beta;
    c->noise.s = train->noise.s;
    c->noise.time_shift = train->noise.time_shift;
    if (train->noise.num_inference_timesteps)
        c->noise.num_inference_timesteps = train->noise.num_inference_timesteps;
}

vla_status vlai_wallx_config_update(vlai_wallx_config *c, const vlai_config *train, bool reference_reading, vla_error *err)
{
    if (!train->action_dim || !train->propri_dim)
        return vlai_fail_hint(err, VLA_E_INVALID, "give the layouts of actions and state: maps of names to widths",
                              "%s: task.%s is required (cannot be empty)", train->path,
                              train->action_dim ? "agent_pos_config" : "dof_config");
    c->action_dim = train->action_dim;
    c->propri_dim = train->propri_dim;
    c->ar_loss_weight = train->model.ar_loss_weight;
    c->flow_loss_weight = reference_reading ? 1 : train->model.flow_loss_weight; /* the reference does not read it */
    c->use_state_string_representation = reference_reading ? train->reference_model.use_state_string_representation
                                                           : train->task.use_state_string_representation;
    c->action_horizon_flow = reference_reading ? train->reference_model.action_horizon_flow
                                               : train->task.action_horizon_flow;
    if (!reference_reading)
        take_noise(c, train);
    return VLA_OK;
}
