/* What follows from the values of a configuration: old places of keys, the two places of some, computed values, and what
 * must hold between keys. */
#include "train/config_internal.h"

#include "base/fail.h"
#include "base/io.h"
#include "ckpt/ckpt.h"
#include "train/switches.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WHERE_SIZE = 640, PATH_SIZE = 4096 };

static bool is_set(const vlai_config *c, const char *key)
{
    return vlai_config_origin(c, key).file != NULL;
}

/* A text that stands at an old place moves to the new one, unless something stands there already. */
static vla_status move_text(vlai_config *c, const char *old_key, const char **old, const char *key, const char **now,
                            vla_error *err)
{
    char where[WHERE_SIZE];
    if (!is_set(c, old_key))
        return VLA_OK;
    if (!is_set(c, key)) {
        *now = *old;
        *vlai_config_origin_of(c, key) = vlai_config_origin(c, old_key);
    } else if (!*now || strcmp(*now, *old)) {
        VLA_TRY(vlai_config_notice(c, err, "%s = '%s' is not used: %s = '%s' stands beside it",
                                   vlai_config_where(c, old_key, where, sizeof where), *old, key, *now));
    }
    *old = NULL;
    *vlai_config_origin_of(c, old_key) = (vlai_option_origin){NULL, 0};
    return VLA_OK;
}

static vla_status move_old_places(vlai_config *c, vla_error *err)
{
    const struct {
        const char *old_key;
        const char **old;
        const char *key;
        const char **now;
    } moves[] = {
        {"norm_stats_path", &c->top.norm_stats_path, "data.norm_stats_path", &c->data.norm_stats_path},
        {"save_path", &c->top.save_path, "checkpoint.save_path", &c->checkpoint.save_path},
        {"processor_path", &c->top.processor_path, "model.processor_path", &c->model.processor_path},
        {"qwen_vl_act_config_path", &c->top.qwen_vl_act_config_path, "model.config_path", &c->model.config_path},
        {"pretrained_qwen_vl_path", &c->top.pretrained_qwen_vl_path, "model.pretrained_path",
         &c->model.pretrained_path},
    };
    for (size_t i = 0; i < sizeof moves / sizeof *moves; i++)
        VLA_TRY(move_text(c, moves[i].old_key, moves[i].old, moves[i].key, moves[i].now, err));
    if (c->top.state_bins) {
        if (!is_set(c, "data.state_bins")) {
            c->data.state_bins = c->top.state_bins;
            *vlai_config_origin_of(c, "data.state_bins") = vlai_config_origin(c, "state_bins");
        }
        c->top.state_bins = 0;
        *vlai_config_origin_of(c, "state_bins") = (vlai_option_origin){NULL, 0};
    }
    if (c->top.dataset_type && strcmp(c->top.dataset_type, "lerobot")) {
        char where[WHERE_SIZE];
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s is '%s', wanted lerobot",
                         vlai_config_where(c, "dataset_type", where, sizeof where), c->top.dataset_type);
    }
    return VLA_OK;
}

/* data.KEY wins over task.KEY; both are left with the one value that counts. */
static vla_status merge_integer(vlai_config *c, const char *key, int64_t *task, int64_t *data, vla_error *err)
{
    char task_key[64], data_key[64], where[WHERE_SIZE];
    snprintf(task_key, sizeof task_key, "task.%s", key);
    snprintf(data_key, sizeof data_key, "data.%s", key);
    if (is_set(c, data_key)) {
        if (is_set(c, task_key) && *task != *data)
            VLA_TRY(vlai_config_notice(c, err, "%s = %lld wins over %s = %lld",
                                       vlai_config_where(c, data_key, where, sizeof where), (long long)*data, task_key,
                                       (long long)*task));
        *task = *data;
        *vlai_config_origin_of(c, task_key) = vlai_config_origin(c, data_key);
    }
    *data = *task;
    return VLA_OK;
}

static vla_status merge_places(vlai_config *c, vla_error *err)
{
    char where[WHERE_SIZE];
    bool data_string = is_set(c, "data.use_state_string_representation");
    bool data_flow = is_set(c, "data.action_horizon_flow"), task_flow = is_set(c, "task.action_horizon_flow");
    c->reference_model.use_state_string_representation = data_string && c->data.use_state_string_representation;
    c->reference_model.action_horizon_flow = data_flow ? c->data.action_horizon_flow : 32;

    if (data_string) {
        if (is_set(c, "task.use_state_string_representation") &&
            c->task.use_state_string_representation != c->data.use_state_string_representation)
            VLA_TRY(vlai_config_notice(
                c, err, "%s = %s wins over the same key of the task",
                vlai_config_where(c, "data.use_state_string_representation", where, sizeof where),
                c->data.use_state_string_representation ? "true" : "false"));
        c->task.use_state_string_representation = c->data.use_state_string_representation;
    }
    c->data.use_state_string_representation = c->task.use_state_string_representation;

    VLA_TRY(merge_integer(c, "action_horizon", &c->task.action_horizon, &c->data.action_horizon, err));
    VLA_TRY(merge_integer(c, "action_horizon_flow", &c->task.action_horizon_flow, &c->data.action_horizon_flow, err));
    if (!data_flow && !task_flow)
        c->task.action_horizon_flow = c->data.action_horizon_flow = c->task.action_horizon;
    else if (c->task.action_horizon_flow != c->task.action_horizon)
        VLA_TRY(vlai_config_notice(c, err, "%s = %lld has no effect: the model takes the %lld actions of task.action_horizon",
                                   vlai_config_where(c, "task.action_horizon_flow", where, sizeof where),
                                   (long long)c->task.action_horizon_flow, (long long)c->task.action_horizon));

    const section *from = vlai_config_section("task.noise_scheduler", strlen("task.noise_scheduler"));
    for (size_t i = 0; i < from->count; i++) {
        const char *key = from->rows()[i].key;
        char task_key[64], data_key[64];
        snprintf(task_key, sizeof task_key, "task.noise_scheduler.%s", key);
        snprintf(data_key, sizeof data_key, "data.noise_scheduler.%s", key);
        if (!is_set(c, task_key))
            continue;
        const section *to = NULL;
        const option *o = vlai_config_option(data_key, &to);
        size_t size = o->kind == KIND_INT ? sizeof(int64_t) : sizeof(double);
        void *value = vlai_config_field(c, to, o);
        const void *other = vlai_config_field(c, from, &from->rows()[i]);
        if (!is_set(c, data_key)) {
            memcpy(value, other, size);
            *vlai_config_origin_of(c, data_key) = vlai_config_origin(c, task_key);
        } else if (memcmp(value, other, size)) {
            VLA_TRY(vlai_config_notice(c, err, "%s wins over the same key of the task",
                                       vlai_config_where(c, data_key, where, sizeof where)));
        }
    }
    return VLA_OK;
}

/* ---- learning rates ---- */

/* Names of the action expert's parameters, as the reference's older option picks them. */
static const char *const action_keywords[] = {
    "action_preprocessor", "moe.experts.1", "qkv_proj_experts.1",          "o_proj_experts.1",
    "input_layernorms.1",  "model.norms.1", "post_attention_layernorms.1",
};

/* The older form of one group becomes that group. */
static vla_status make_action_group(vlai_config *c, vla_error *err)
{
    char where[WHERE_SIZE];
    c->base_group = "base";
    bool rate = !isnan(c->optimizer.action_expert_learning_rate), words = c->optimizer.action_lr_keywords.count > 0;
    if (!rate && !words)
        return VLA_OK;
    const char *key = rate ? "hyperparams.optimizer.action_expert_learning_rate"
                           : "hyperparams.optimizer.action_lr_keywords";
    if (c->optimizer.lr_groups.count)
        return vlai_fail_hint(err, VLA_E_INVALID, "write the action expert as an entry of lr_groups",
                              "%s stands beside lr_groups; only one of the two forms is taken",
                              vlai_config_where(c, key, where, sizeof where));
    if (!rate)
        return vlai_fail(err, VLA_E_INVALID, "%s needs action_expert_learning_rate beside it",
                         vlai_config_where(c, key, where, sizeof where));
    vlai_lr_group *group = vlai_arena_alloc(&c->internal->arena, sizeof *group);
    if (!group)
        return vlai_nomem(err, sizeof *group);
    group->name = "action_lr_group";
    group->lr = c->optimizer.action_expert_learning_rate;
    group->fail_on_empty = true;
    group->include = words ? c->optimizer.action_lr_keywords
                           : (vlai_texts){sizeof action_keywords / sizeof *action_keywords, action_keywords};
    c->base_group = "base_lr_group";
    c->optimizer.lr_groups = (vlai_lr_groups){1, group};
    c->optimizer.action_expert_learning_rate = NAN;
    c->optimizer.action_lr_keywords = (vlai_texts){0};
    return VLA_OK;
}

static vla_status check_groups(vlai_config *c, vla_error *err)
{
    const vlai_lr_groups *g = &c->optimizer.lr_groups;
    char where[WHERE_SIZE];
    vlai_config_where(c, "hyperparams.optimizer.lr_groups", where, sizeof where);
    for (size_t i = 0; i < g->count; i++) {
        const char *name = g->groups[i].name;
        if (!*name || !strcmp(name, c->base_group) || strchr(name, '/'))
            return vlai_fail(err, VLA_E_INVALID, "%s: '%s' cannot name a group (empty, the base group's, or with a '/')",
                             where, name);
        for (size_t j = 0; j < i; j++)
            if (!strcmp(name, g->groups[j].name))
                return vlai_fail(err, VLA_E_INVALID, "%s: two groups are named '%s'", where, name);
    }
    if (c->optimizer.train_action_expert_only && !g->count) {
        return vlai_fail(err, VLA_E_INVALID, "%s needs a group: without lr_groups everything would be frozen",
                         vlai_config_where(c, "hyperparams.optimizer.train_action_expert_only", where, sizeof where));
    }
    return VLA_OK;
}

/* ---- computed values ---- */

static vla_status sum_dims(const vlai_config *c, const char *key, const vlai_dims *dims, int64_t *out, vla_error *err)
{
    char where[WHERE_SIZE];
    *out = 0;
    for (size_t i = 0; i < dims->count; i++)
        *out += dims->values[i]; /* each at most 4096, so the sum cannot overflow */
    if (*out > 4096)
        return vlai_fail(err, VLA_E_INVALID, "%s: the widths sum to %lld, at most 4096 are taken",
                         vlai_config_where(c, key, where, sizeof where), (long long)*out);
    return VLA_OK;
}

static bool is_among(const char *name, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(names[i], name))
            return true;
    return false;
}

/* Maps by view hold more views than a data set has, on purpose; an entry that no camera uses beside a camera that has none is
 * more likely a slip. So are two cameras of one view: the prompt calls both by its name. */
static vla_status check_views(vlai_config *c, vla_error *err)
{
    char where[WHERE_SIZE];
    const vlai_words *views = &c->keys.camera;
    const struct {
        const char *key, *without;
        const char *const *names;
        size_t count;
    } maps[] = {
        {"data.resolution", "its pictures keep their size", c->data.resolution.names, c->data.resolution.count},
        {"data.camera_name_mapping", "it has its own name in the prompt", c->data.camera_name_mapping.names, c->data.camera_name_mapping.count},
    };
    for (size_t m = 0; m < 2; m++) {
        const char *unused = NULL, *lacks = NULL;
        for (size_t i = 0; i < maps[m].count; i++)
            if (!is_among(maps[m].names[i], views->values, views->count))
                unused = maps[m].names[i];
        for (size_t i = 0; i < views->count; i++)
            if (!is_among(views->values[i], maps[m].names, maps[m].count))
                lacks = views->values[i];
        if (unused && lacks && is_set(c, maps[m].key))
            VLA_TRY(vlai_config_notice(c, err, "%s: no camera of data.key_mappings.camera is '%s', and '%s' has no entry: %s",
                                       vlai_config_where(c, maps[m].key, where, sizeof where), unused, lacks, maps[m].without));
    }
    for (size_t i = 1; i < views->count; i++)
        if (is_among(views->values[i], views->values, i))
            VLA_TRY(vlai_config_notice(c, err, "%s: more than one camera is '%s': the prompt calls all of them so",
                                       vlai_config_where(c, "data.key_mappings.camera", where, sizeof where), views->values[i]));
    return VLA_OK;
}

static vla_status check_values(vlai_config *c, vla_error *err)
{
    char where[WHERE_SIZE];
    const vlai_numbers *betas = &c->optimizer.betas;
    if (betas->count != 2)
        return vlai_fail(err, VLA_E_INVALID, "%s has %zu numbers, wanted 2",
                         vlai_config_where(c, "hyperparams.optimizer.betas", where, sizeof where), betas->count);
    if (c->lerobot.episodes.values && !c->lerobot.episodes.count)
        return vlai_fail_hint(err, VLA_E_INVALID, "null takes all episodes", "%s: an empty list, wanted numbers of episodes",
                              vlai_config_where(c, "data.lerobot_config.episodes", where, sizeof where));
    for (size_t i = 0; i < c->lerobot.episodes.count; i++)
        if (c->lerobot.episodes.values[i] != floor(c->lerobot.episodes.values[i]))
            return vlai_fail(err, VLA_E_INVALID, "%s: entry %zu is %g, wanted an integer",
                             vlai_config_where(c, "data.lerobot_config.episodes", where, sizeof where), i,
                             c->lerobot.episodes.values[i]);
    for (size_t i = 0; i < c->data.resolution.count; i++)
        if (c->data.resolution.values[i] == 0)
            return vlai_fail(err, VLA_E_INVALID, "%s: %s is 0, wanted a side in pixels, or -1 to keep the picture's",
                             vlai_config_where(c, "data.resolution", where, sizeof where), c->data.resolution.names[i]);
    VLA_TRY(check_views(c, err));
    if (c->scheduler.scheduler_type == VLAI_SCHEDULER_COSINE && c->scheduler.num_training_steps > 0 &&
        c->scheduler.num_warmup_steps > c->scheduler.num_training_steps)
        VLA_TRY(vlai_config_notice(c, err, "%s is %lld, more than num_training_steps %lld: the rate rises until the run ends",
                                   vlai_config_where(c, "hyperparams.scheduler.num_warmup_steps", where, sizeof where),
                                   (long long)c->scheduler.num_warmup_steps, (long long)c->scheduler.num_training_steps));
    return VLA_OK;
}

/* One FAST processor for prompts and vocabulary. */
static vla_status check_action_tokens(vlai_config *c, vla_error *err)
{
    const char *type = c->model.action_tokenizer_type, *data = c->data.action_tokenizer_path, *model = c->model.action_tokenizer_path;
    bool written = c->data.use_fast_tokenizer;
    char where[WHERE_SIZE];
    if (type && strcmp(type, "fast"))
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "null, or fast", "%s: '%s' is refused: of action tokenizers fast alone is built",
                              vlai_config_where(c, "model.action_tokenizer_type", where, sizeof where), type);
    if (data && model && strcmp(data, model))
        return vlai_fail(err, VLA_E_INVALID, "%s is '%s' and data.action_tokenizer_path '%s': model and data have one action tokenizer",
                         vlai_config_where(c, "model.action_tokenizer_path", where, sizeof where), model, data);
    const char *asks = written ? "data.use_fast_tokenizer" : "model.action_tokenizer_type";
    if ((written || type) && !data && !model)
        return vlai_fail_hint(err, VLA_E_INVALID, "give data.action_tokenizer_path: the folder of a FAST processor", "%s needs a processor",
                              vlai_config_where(c, asks, where, sizeof where));
    if (!written && !type && (data || model))
        return vlai_config_notice(c, err, "%s has no effect: data.use_fast_tokenizer is false",
                                  vlai_config_where(c, data ? "data.action_tokenizer_path" : "model.action_tokenizer_path", where, sizeof where));
    if (!written && type)
        return vlai_config_notice(c, err, "%s: action tokens join the vocabulary, but the flow is trained: data.use_fast_tokenizer is false",
                                  vlai_config_where(c, "model.action_tokenizer_type", where, sizeof where));
    if (written && c->optimizer.train_action_expert_only)
        return vlai_fail_hint(err, VLA_E_INVALID, "leave one of the two out", "%s: action tokens are predicted by the language model, which "
                              "hyperparams.optimizer.train_action_expert_only freezes", vlai_config_where(c, asks, where, sizeof where));
    if (written && c->data.mask_padded_actions)
        return vlai_config_notice(c, err, "%s has no effect: action tokens stand for a chunk as a whole",
                                  vlai_config_where(c, "data.mask_padded_actions", where, sizeof where));
    return VLA_OK;
}

vla_status vlai_config_finish(vlai_config *c, vla_error *err)
{
    if (!is_set(c, "model_type"))
        return vlai_fail_hint(err, VLA_E_INVALID, "write model_type: qwen2_5",
                              "Missing required field 'model_type' in %s", c->path);
    VLA_TRY(move_old_places(c, err));
    VLA_TRY(merge_places(c, err));
    VLA_TRY(make_action_group(c, err));
    VLA_TRY(check_groups(c, err));
    VLA_TRY(check_values(c, err));
    VLA_TRY(check_action_tokens(c, err));
    VLA_TRY(sum_dims(c, "task.dof_config", &c->task.dof_config, &c->action_dim, err));
    VLA_TRY(sum_dims(c, "task.agent_pos_config", &c->task.agent_pos_config, &c->propri_dim, err));
    if (!c->task.ar_dof_config.count)
        c->task.ar_dof_config = c->task.dof_config;
    if (!c->top.eval_batch_size_per_gpu)
        c->top.eval_batch_size_per_gpu = c->hyperparams.batch_size_per_gpu;
    if (isnan(c->scheduler.min_lr))
        c->scheduler.min_lr = 0.1 * c->optimizer.learning_rate;
    if (!is_set(c, "memory.recompute")) {
        if (c->distributed.use_gradient_checkpointing)
            c->memory.recompute = VLAI_RECOMPUTE_LAYER;
        else if (c->distributed.use_selective_recompute)
            c->memory.recompute = VLAI_RECOMPUTE_CHEAP;
    }
    if (!is_set(c, "dist.gradient_dtype") && c->distributed.use_fsdp && c->distributed.fsdp_reduce_dtype == VLAI_REDUCE_FP32)
        c->dist.gradient_dtype = VLAI_GRADIENTS_FP32;
    char where[WHERE_SIZE];
    if (c->logging.use_wandb && is_set(c, "logging.use_wandb"))
        VLA_TRY(vlai_config_notice(c, err, "%s: nothing is sent to wandb; metrics.jsonl and report.html are written",
                                   vlai_config_where(c, "logging.use_wandb", where, sizeof where)));
    return VLA_OK;
}

/* ---- checks before training ---- */

vla_status vlai_config_dataset(const vlai_config *c, char *out, size_t size, vla_error *err)
{
    const char *id = c->lerobot.repo_id, *root = c->lerobot.root;
    const char *cache = getenv("HF_LEROBOT_HOME"), *hub = getenv("HF_HOME"), *home = getenv("HOME");
    char where[WHERE_SIZE], below[PATH_SIZE], standard[PATH_SIZE], info[PATH_SIZE];
    if (!id)
        return vlai_fail_hint(err, VLA_E_INVALID, "give the folder of a LeRobot data set",
                              "%s: lerobot requires data.lerobot_config.repo_id to be set", c->path);
    if (hub && *hub)
        snprintf(standard, sizeof standard, "%s/lerobot", hub);
    else
        snprintf(standard, sizeof standard, "%s/.cache/huggingface/lerobot", home ? home : "");
    if (root && !vlai_path_join(below, sizeof below, root, id))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", root, id);
    const char *candidates[] = {root, root ? below : NULL, id, NULL, NULL};
    char in_cache[PATH_SIZE];
    if (!root && id[0] != '/' && vlai_path_join(in_cache, sizeof in_cache, cache && *cache ? cache : standard, id))
        candidates[3] = in_cache;
    for (int i = 0; i < 4; i++)
        if (candidates[i] && vlai_path_join(info, sizeof info, candidates[i], "meta/info.json") && vlai_is_file(info)) {
            if (strlen(candidates[i]) >= size)
                return vlai_fail(err, VLA_E_INVALID, "%s: path too long", candidates[i]);
            snprintf(out, size, "%s", candidates[i]);
            return VLA_OK;
        } else if (candidates[i] && i < 3 && vlai_path_join(info, sizeof info, candidates[i], "meta/info.json") && access(info, F_OK) != 0 &&
                   errno == EACCES) { /* the cache is only one of the places */
            return vlai_fail(err, VLA_E_IO, "%s: cannot open: %s", info, strerror(EACCES));
        }
    vlai_fail(err, VLA_E_NOT_FOUND, "%s = '%s': no such LeRobot data set (no meta/info.json%s%s%s%s)",
              vlai_config_where(c, "data.lerobot_config.repo_id", where, sizeof where), id, root ? " in " : "",
              root ? root : "", candidates[3] ? ", nor in " : "", candidates[3] ? candidates[3] : "");
    return vlai_hint(err, VLA_E_NOT_FOUND, "give the path of its folder; nothing is downloaded");
}

static vla_status need(const vlai_config *c, const char *key, bool present, const char *hint, vla_error *err)
{
    return present ? VLA_OK
                   : vlai_fail_hint(err, VLA_E_INVALID, hint, "%s: %s is required and missing", c->path, key);
}

static vla_status need_path(const vlai_config *c, const char *key, const char *path, bool required, vla_error *err)
{
    char where[WHERE_SIZE];
    const option *o = vlai_config_option(key, NULL);
    if (!path || !*path)
        return need(c, key, !required, o->text, err);
    if (vlai_is_file(path) || vlai_is_dir(path))
        return VLA_OK;
    return vlai_fail_hint(err, VLA_E_NOT_FOUND, o->text, "%s: '%s' does not exist",
                          vlai_config_where(c, key, where, sizeof where), path);
}

vla_status vlai_config_check_training(const vlai_config *c, vla_error *err)
{
    VLA_TRY(need(c, "task.dof_config", c->task.dof_config.count, "the action layout: a map of names to widths", err));
    VLA_TRY(need(c, "task.agent_pos_config", c->task.agent_pos_config.count,
                 "the state layout: a map of names to widths", err));
    VLA_TRY(need_path(c, "model.config_path", c->model.config_path, true, err));
    VLA_TRY(need_path(c, "model.processor_path", c->model.processor_path, true, err));
    VLA_TRY(need_path(c, "model.pretrained_path", c->model.pretrained_path, false, err));
    VLA_TRY(need_path(c, "data.norm_stats_path", c->data.norm_stats_path, true, err));
    VLA_TRY(need_path(c, "checkpoint.resume_from", c->checkpoint.resume_from, false, err));
    VLA_TRY(vlai_ckpt_check_path(c->checkpoint.save_path, NULL, 0, err));
    VLA_TRY(vlai_switches_check(err));
    VLA_TRY(need(c, "data.key_mappings.camera", c->keys.camera.count, "a map of camera columns to view names", err));
    VLA_TRY(need(c, "data.key_mappings.state", c->keys.state, "the column of the state", err));
    VLA_TRY(need(c, "data.key_mappings.action", c->keys.action, "the column of the action", err));
    if (c->scheduler.scheduler_type == VLAI_SCHEDULER_COSINE && c->scheduler.num_training_steps <= 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "give the length of the run, or scheduler_type: constant",
                              "%s: num_training_steps must be > 0 for cosine scheduler. It is %lld", c->path,
                              (long long)c->scheduler.num_training_steps);
    char folder[PATH_SIZE];
    return vlai_config_dataset(c, folder, sizeof folder, err);
}
