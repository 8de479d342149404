#include "train/contract_config.h"

#include "base/fail.h"
#include "base/memory.h"
#include "text/prompt.h"

#include <string.h>

const char *vlai_config_fast_path(const vlai_config *c)
{
    if (!c->data.use_fast_tokenizer && !c->model.action_tokenizer_type)
        return NULL;
    return c->data.action_tokenizer_path ? c->data.action_tokenizer_path : c->model.action_tokenizer_path;
}

vla_status vlai_config_fast(const vlai_config *config, vlai_fast **out, vla_error *err)
{
    char where[1024];
    const char *path = vlai_config_fast_path(config), *key = "data.action_tokenizer_path";
    *out = NULL;
    if (!path)
        return VLA_OK;
    if (path == config->model.action_tokenizer_path)
        key = "model.action_tokenizer_path";
    vla_status status = vlai_fast_open(path, out, err);
    return status == VLA_OK ? status : vlai_prefix(err, status, "%s", vlai_config_where(config, key, where, sizeof where));
}

vla_status vlai_config_tokenizer(const vlai_config *config, vlai_tokenizer **out, vla_error *err)
{
    *out = NULL;
    if (!config->model.processor_path)
        return vlai_fail_hint(err, VLA_E_INVALID, "give the folder that holds tokenizer.json and preprocessor_config.json",
                              "%s: model.processor_path is required", config->path);
    vlai_fast *fast;
    VLA_TRY(vlai_config_fast(config, &fast, err));
    vla_status status = vlai_tokenizer_open(config->model.processor_path, out, err);
    if (status == VLA_OK)
        status = vlai_prompt_add_tokens(*out, fast ? vlai_fast_vocabulary(fast) : 0, NULL, 0, err);
    vlai_fast_close(fast);
    if (status != VLA_OK) {
        vlai_tokenizer_close(*out);
        *out = NULL;
    }
    return status;
}

vla_status vlai_config_layout(const vlai_config *config, const char *key, const vlai_dims *dims, vlai_layout *out, vla_error *err)
{
    char where[1024];
    if (dims->count == 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "a map of names to widths", "%s: %s is required and missing", config->path, key);
    vlai_config_where(config, key, where, sizeof where);
    json_t *object = json_object();
    for (size_t i = 0; i < dims->count; i++)
        if (json_object_set_new(object, dims->names[i], json_integer(dims->values[i]))) {
            json_decref(object);
            return vlai_nomem(err, 64);
        }
    vla_status status = vlai_layout_parse(object, where, out, err);
    json_decref(object);
    return status;
}

static const char *word_of(const vlai_words *words, const char *name)
{
    for (size_t i = 0; i < words->count; i++)
        if (!strcmp(words->names[i], name))
            return words->values[i];
    return NULL;
}

static int64_t resolution_of(const vlai_dims *dims, const char *view)
{
    for (size_t i = 0; i < dims->count; i++)
        if (!strcmp(dims->names[i], view))
            return dims->values[i];
    return -1;
}

static vla_status fill(const vlai_config *config, const vlai_tokenizer *tok, vlai_contract *c, vla_error *err)
{
    if (!config->keys.state || !config->keys.action || !config->keys.camera.count)
        return vlai_fail_hint(err, VLA_E_INVALID, "write data.key_mappings: {camera: {COLUMN: VIEW}, state: COLUMN, action: COLUMN}",
                              "%s: data.key_mappings needs camera, state and action", config->path);
    if (!config->data.norm_stats_path)
        return vlai_fail_hint(err, VLA_E_INVALID, "write them with `vla norm-stats`, then set data.norm_stats_path",
                              "%s: norm stats is required", config->path);
    VLA_TRY(vlai_contract_set_keys(c, config->keys.state, config->keys.action, err));
    for (size_t i = 0; i < config->keys.camera.count; i++) {
        const char *view = config->keys.camera.values[i];
        VLA_TRY(vlai_contract_add_camera(c, config->keys.camera.names[i], view,
                                         word_of(&config->data.camera_name_mapping, view),
                                         resolution_of(&config->data.resolution, view), err));
    }
    VLA_TRY(vlai_config_layout(config, "task.agent_pos_config", &config->task.agent_pos_config, &c->pos, err));
    VLA_TRY(vlai_config_layout(config, "task.dof_config", &config->task.dof_config, &c->dof, err));
    c->horizon = config->task.action_horizon;
    c->mask_padded = config->data.mask_padded_actions;
    c->state_string = config->task.use_state_string_representation;
    c->state_bins = config->data.state_bins;
    c->max_length = config->data.max_length;
    c->pads_left = config->data.padding_side == VLAI_PADDING_LEFT;
    c->feature_order = config->data.picture_order == VLAI_PICTURES_FEATURES;
    c->discrete = config->data.use_fast_tokenizer;
    if (c->discrete)
        VLA_TRY(vlai_config_fast(config, &c->fast, err));
    VLA_TRY(vlai_image_processor_read(config->model.processor_path, &c->image, err));
    VLA_TRY(vlai_contract_read_stats(c, config->data.norm_stats_path, err));
    return vlai_contract_take_tokens(c, tok, err);
}

vla_status vlai_config_contract(const vlai_config *config, const vlai_tokenizer *tok, vlai_contract *out, vla_error *err)
{
    VLA_TRY(vlai_contract_init(out, err));
    vla_status status = fill(config, tok, out, err);
    if (status != VLA_OK)
        vlai_contract_fini(out);
    return status;
}

vla_status vlai_config_open_set(const vlai_config *config, const char *root, bool chosen, vla_dataset **out, vla_error *err)
{
    const vlai_numbers *episodes = &config->lerobot.episodes;
    size_t count = chosen ? episodes->count : 0;
    vla_dataset_options o = VLA_DATASET_OPTIONS_DEFAULT;
    int64_t *list = vlai_array(count + 1, sizeof *list);
    *out = NULL;
    if (!list)
        return vlai_nomem(err, (count + 1) * sizeof *list);
    for (size_t i = 0; i < count; i++)
        list[i] = (int64_t)episodes->values[i];
    if (count)
        o.episodes = list;
    o.episode_count = count;
    o.flags = (config->lerobot.allow_partial ? (uint32_t)VLA_DATASET_ALLOW_PARTIAL : 0) |
              (config->lerobot.skip_missing ? (uint32_t)VLA_DATASET_SKIP_MISSING : 0);
    vla_status status = vla_dataset_open(root, &o, out, err);
    vlai_free(list);
    return status;
}

vlai_flow_time vlai_config_flow_time(const vlai_config *config)
{
    return (vlai_flow_time){.alpha = config->noise.beta_alpha,
                            .beta = config->noise.beta_beta,
                            .s = config->noise.s,
                            .shift = config->noise.time_shift};
}
