/* Setting up an evaluation: checkpoint, contract, data set, model, and which frames are predicted. */
#include "train/predict_internal.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/pool.h"
#include "ckpt/ckpt.h"
#include "data/norm_stats.h"
#include "format/safetensors.h"
#include "model/wallx_layout.h"
#include "text/prompt.h"
#include "train/contract_config.h"
#include "train/device.h"
#include "train/wallx_batch.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static vla_status join(char out[VLAI_PREDICT_PATH], const char *dir, const char *name, vla_error *err)
{
    return vlai_path_join(out, VLAI_PREDICT_PATH, dir, name) ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
}

const char *vlai_predict_checkpoint(const vlai_predict *p)
{
    return vla_checkpoint_path(p->checkpoint);
}

int64_t vlai_predict_step(const vlai_predict *p)
{
    return vla_checkpoint_step(p->checkpoint);
}

const vlai_predict_result *vlai_predict_get(const vlai_predict *p)
{
    return &p->result;
}

const char *vlai_predict_notes(const vlai_predict *p)
{
    return p->notes.data ? p->notes.data : "";
}

/* ---- contract ---- */

/* Another configuration must ask for what the checkpoint was trained with. */
static vla_status match_config(vlai_predict *p, const json_t *saved, vla_error *err)
{
    vlai_tokenizer *tok;
    vlai_contract wanted;
    VLA_TRY(vlai_config_tokenizer(p->config, &tok, err));
    vla_status status = vlai_config_contract(p->config, tok, &wanted, err);
    vlai_tokenizer_close(tok);
    VLA_TRY(status);
    json_t *now = vlai_contract_to_json(&wanted);
    status = now ? vlai_contract_match(saved, now, "the checkpoint", p->options.config, err) : vlai_nomem(err, 4096);
    json_decref(now);
    vlai_contract_fini(&wanted);
    return status;
}

/* As many action tokens as the model was trained with. */
static vla_status add_tokens(vlai_predict *p, vla_error *err)
{
    const vlai_contract *c = &p->contract;
    bool actions = false;
    for (size_t i = 0; i < c->token_count; i++)
        actions |= !strcmp(c->tokens[i].text, "<|action_token_0|>");
    VLA_TRY(vlai_prompt_add_tokens(p->tok, 0, NULL, 0, err));
    int64_t missing = c->vocabulary - vlai_tokenizer_size(p->tok);
    return actions && missing > 0 ? vlai_prompt_add_tokens(p->tok, missing, NULL, 0, err) : VLA_OK;
}

/* The FAST processor that the checkpoint holds. */
static vla_status open_fast(vlai_predict *p, const json_t *saved, vla_error *err)
{
    char config[VLAI_PREDICT_PATH], tokenizer[VLAI_PREDICT_PATH];
    VLA_TRY(join(config, vlai_predict_checkpoint(p), VLAI_FAST_CONFIG_FILE, err));
    VLA_TRY(join(tokenizer, vlai_predict_checkpoint(p), VLAI_FAST_TOKENIZER_FILE, err));
    VLA_TRY(vlai_fast_open_files(config, tokenizer, &p->contract.fast, err));
    json_t *now = vlai_fast_to_json(p->contract.fast);
    vla_status status = now ? vlai_contract_match(json_object_get(json_object_get(saved, "prompt"), "action_tokens"), now, "state.json", tokenizer, err)
                            : vlai_nomem(err, 256);
    json_decref(now);
    return status;
}

static vla_status open_contract(vlai_predict *p, vla_error *err)
{
    const char *dir = vlai_predict_checkpoint(p);
    char path[VLAI_PREDICT_PATH];
    json_t *saved;
    VLA_TRY(join(path, dir, "state.json", err));
    const char *text = vla_checkpoint_state(p->checkpoint);
    VLA_TRY(vlai_json_parse(text, strlen(text), path, &p->state, err));
    VLA_TRY(vlai_json_need(p->state, "contract", JSON_OBJECT, path, &saved, err));
    VLA_TRY(vlai_contract_from_json(saved, path, &p->contract, err));
    p->contract_made = true;
    if (p->options.config) {
        VLA_TRY(vlai_config_load(p->options.config, NULL, 0, &p->config, err));
        VLA_TRY(match_config(p, saved, err));
    } else {
        VLA_TRY(join(path, dir, "config.yml", err));
        VLA_TRY(vlai_config_load(path, NULL, 0, &p->config, err));
    }
    VLA_TRY(vlai_tokenizer_open(dir, &p->tok, err)); /* the checkpoint's own */
    VLA_TRY(add_tokens(p, err));
    if (p->contract.discrete)
        VLA_TRY(open_fast(p, saved, err));
    const char *padding;
    const json_t *layout = json_object_get(p->state, "layout");
    VLA_TRY(vlai_json_string(layout, "padding", "packed", path, &padding, err));
    p->pads = !strcmp(padding, "reference");
    return vlai_contract_check_tokens(&p->contract, p->tok, err);
}

/* ---- data ---- */

static vla_status open_set(vlai_predict *p, vla_error *err)
{
    if (p->options.dataset)
        snprintf(p->root, sizeof p->root, "%s", p->options.dataset);
    else
        VLA_TRY(vlai_config_dataset(p->config, p->root, sizeof p->root, err));
    VLA_TRY(vlai_config_open_set(p->config, p->root, !p->options.dataset && !p->options.episode_count, &p->set, err));
    VLA_TRY(vlai_contract_check_set(&p->contract, p->set, &p->notes, err));
    VLA_TRY(vla_dataset_numbers(p->set, p->contract.state_key, &p->states, &p->state_dims, err));
    VLA_TRY(vla_dataset_numbers(p->set, p->contract.action_key, &p->actions, &p->action_dims, err));
    return VLA_OK;
}

static const json_t *split_of(const vlai_predict *p)
{
    return json_object_get(json_object_get(p->state, "data"), "split");
}

/* Only in the set that was trained on do the recorded numbers mean anything. */
static bool same_set(const vlai_predict *p)
{
    const char *digest = json_string_value(json_object_get(json_object_get(p->state, "data"), "digest"));
    return digest && !strcmp(digest, vla_dataset_info_get(p->set)->digest);
}

static bool is_held_out(const vlai_predict *p, int64_t number, int64_t place)
{
    const json_t *held = json_object_get(split_of(p), "held_out_episodes");
    if (!same_set(p) || !json_is_array(held)) {
        int64_t count = vla_dataset_info_get(p->set)->episodes;
        return place >= (int64_t)floor((double)count * p->config->data.train_test_split);
    }
    for (size_t i = 0; i < json_array_size(held); i++)
        if (json_integer_value(json_array_get(held, i)) == number)
            return true;
    return false;
}

static bool is_wanted(const vlai_predict *p, int64_t number, int64_t place, bool all)
{
    for (size_t i = 0; i < p->options.episode_count; i++)
        if (p->options.episodes[i] == number)
            return true;
    return !p->options.episode_count && (all || is_held_out(p, number, place));
}

static vla_status choose_episodes(vlai_predict *p, vla_error *err)
{
    int64_t count = vla_dataset_info_get(p->set)->episodes, chosen = 0;
    p->episodes = vlai_array((size_t)count + 1, sizeof *p->episodes);
    p->numbers = vlai_array((size_t)count + 1, sizeof *p->numbers);
    if (!p->episodes || !p->numbers)
        return vlai_nomem(err, (size_t)count * 2 * sizeof *p->numbers);
    for (size_t i = 0; i < p->options.episode_count; i++) {
        bool there = false;
        for (int64_t e = 0; e < count && !there; e++)
            there = vla_dataset_episode(p->set, e)->index == p->options.episodes[i];
        if (!there)
            return vlai_fail(err, VLA_E_NOT_FOUND, "%s has no episode %" PRId64 " (%" PRId64 " episodes)", p->root,
                             p->options.episodes[i], count);
    }
    bool none_held = !p->options.episode_count;
    for (int64_t e = 0; e < count && none_held; e++)
        none_held = !is_held_out(p, vla_dataset_episode(p->set, e)->index, e);
    if (!same_set(p))
        vlai_text_printf(&p->notes, "%s is not the data set of the training: its last %g %% of the episodes count as held out\n", p->root,
                         100 * (1 - p->config->data.train_test_split));
    if (none_held)
        vlai_text_puts(&p->notes, "no episode was held out from training: all are evaluated\n");
    for (int64_t e = 0; e < count; e++) {
        int64_t number = vla_dataset_episode(p->set, e)->index;
        if (!is_wanted(p, number, e, none_held))
            continue;
        p->episodes[chosen] = e;
        p->numbers[chosen++] = number;
    }
    p->result.episode_count = chosen;
    p->result.episode_numbers = p->numbers;
    return chosen ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "%s: no episode to evaluate", p->root);
}

/* The data set holds angles where the layout has 6D rotations. */
static bool has_angles(const vlai_predict *p)
{
    const vlai_layout *dof = &p->contract.dof;
    return dof->six && p->action_dims == dof->euler;
}

vla_status vlai_predict_back(vlai_predict *p, const float *drawn, int64_t row, float *out, vla_error *err)
{
    const vlai_contract *c = &p->contract;
    vlai_model_unnormalise(&c->action, drawn, p->model_columns, true, p->row_model);
    if (c->dof.relative) {
        int64_t dims = vlai_layout_to_six(&c->pos, p->states + row * p->state_dims, p->state_dims, p->row_state);
        VLA_TRY(vlai_layout_absolute(&c->dof, p->row_model, p->model_columns, p->row_state, dims, err));
    }
    if (has_angles(p))
        vlai_layout_from_six(&c->dof, p->row_model, p->model_columns, out);
    else
        memcpy(out, p->row_model, (size_t)p->action_dims * sizeof *out);
    return VLA_OK;
}

/* What always predicting one action would say: the mean over the training episodes. */
static vla_status find_mean(vlai_predict *p, vla_error *err)
{
    int64_t columns = p->result.columns, rows = 0, episodes = vla_dataset_info_get(p->set)->episodes;
    double *sum = vlai_calloc((size_t)columns, sizeof *sum);
    if (!sum)
        return vlai_nomem(err, (size_t)columns * sizeof *sum);
    for (int pass = 0; pass < 2 && !rows; pass++) /* second: nothing trains, as with all episodes held out */
        for (int64_t e = 0; e < episodes; e++) {
            const vla_episode *episode = vla_dataset_episode(p->set, e);
            if (pass == 0 && is_held_out(p, episode->index, e))
                continue;
            for (int64_t r = episode->first_row; r < episode->first_row + episode->length; r++, rows++)
                for (int64_t i = 0; i < columns; i++)
                    sum[i] += p->actions[r * columns + i];
        }
    for (int64_t i = 0; i < columns && rows; i++)
        p->mean[i] = (float)(sum[i] / (double)rows);
    p->result.training_rows = rows;
    vlai_free(sum);
    return VLA_OK;
}

/* The range that half ranges count in: that of training where the columns are the model's, else the data set's own. */
static vla_status find_units(vlai_predict *p, vla_error *err)
{
    const vlai_contract *c = &p->contract;
    vlai_norm own = {0};
    if (c->dof.relative || has_angles(p)) {
        const vlai_norm_request request = {.state_key = c->state_key, .action_key = c->action_key, .threads = p->options.threads};
        json_t *stats;
        VLA_TRY(vlai_norm_stats(p->set, &request, &stats, err));
        vla_status status = vlai_norm_parse(json_object_get(stats, "norm_stats"), c->action_key, p->root, &own, err);
        json_decref(stats);
        VLA_TRY(status);
    }
    const vlai_norm *n = own.dims ? &own : &c->action;
    for (int64_t i = 0; i < p->result.columns; i++) {
        double delta = i < n->dims ? fabs((double)n->delta[i]) : 0;
        p->unit[i] = delta > 0 ? 2 / delta : 0;
    }
    vlai_norm_fini(&own);
    return VLA_OK;
}

/* The data set's names where it gives them, else those of the layout; and which columns are angles. */
static void name_columns(vlai_predict *p)
{
    const vla_feature *feature = vla_dataset_find(p->set, p->contract.action_key);
    int64_t columns = p->result.columns, at = 0;
    bool given = feature && feature->name_count == columns;
    for (int64_t i = 0; i < columns; i++) {
        snprintf(p->labels[i], sizeof p->labels[i], "%.95s", given ? feature->names[i] : "action");
        p->names[i] = p->labels[i];
    }
    for (int k = 0; k < p->contract.dof.count; k++) {
        const vlai_layout_part *part = &p->contract.dof.parts[k];
        int64_t width = part->skipped ? 0 : part->six && has_angles(p) ? 3 : part->dim;
        bool angle = part->rotation && width == 3 && (part->six || part->relative);
        for (int64_t i = 0; i < width && at < columns; i++, at++) {
            p->angle[at] = angle;
            if (!given)
                snprintf(p->labels[at], sizeof p->labels[at], "%.70s.%" PRId64, part->name, i);
        }
    }
}

static vla_status make_columns(vlai_predict *p, vla_error *err)
{
    vlai_predict_result *r = &p->result;
    r->horizon = p->contract.horizon;
    r->columns = p->action_dims;
    p->model_columns = has_angles(p) ? p->contract.dof.width : p->action_dims;
    size_t n = (size_t)r->columns;
    p->row_state = vlai_array((size_t)(p->contract.pos.width + p->state_dims), sizeof *p->row_state);
    p->row_model = vlai_array((size_t)p->model_columns, sizeof *p->row_model);
    p->unit = vlai_calloc(n, sizeof *p->unit);
    p->angle = vlai_calloc(n, sizeof *p->angle);
    p->labels = vlai_calloc(n, sizeof *p->labels);
    p->names = vlai_calloc(n, sizeof *p->names);
    p->mean = vlai_calloc(n, sizeof *p->mean);
    r->dims = vlai_calloc(n, sizeof *r->dims);
    r->steps = vlai_calloc((size_t)r->horizon, sizeof *r->steps);
    r->episodes = vlai_calloc((size_t)r->episode_count, sizeof *r->episodes);
    if (!p->row_state || !p->row_model || !p->unit || !p->angle || !p->labels || !p->names || !p->mean || !r->dims || !r->steps || !r->episodes)
        return vlai_nomem(err, n * sizeof *p->labels);
    r->names = p->names;
    r->mean_action = p->mean;
    name_columns(p);
    VLA_TRY(find_units(p, err));
    return find_mean(p, err);
}

/* ---- frames ---- */

/* The next evaluated episode, cyclically, with another instruction; without one, the next. -1: there is no other. */
static int64_t partner_of(const vlai_predict *p, int64_t i)
{
    const char *own = vla_dataset_task(p->set, vla_dataset_episode(p->set, p->episodes[i])->first_row);
    int64_t n = p->result.episode_count;
    for (int64_t k = 1; k < n; k++) {
        int64_t other = (i + k) % n;
        const char *task = vla_dataset_task(p->set, vla_dataset_episode(p->set, p->episodes[other])->first_row);
        if (own && task && strcmp(own, task) != 0)
            return other;
    }
    return p->options.swap == VLAI_SWAP_IMAGES && n > 1 ? (i + 1) % n : -1;
}

static vla_status list_frames(vlai_predict *p, vla_error *err)
{
    vlai_predict_result *r = &p->result;
    size_t capacity = 0;
    for (int64_t i = 0; i < r->episode_count; i++) {
        const vla_episode *episode = vla_dataset_episode(p->set, p->episodes[i]);
        int64_t partner = p->options.swap == VLAI_SWAP_NOTHING ? -1 : partner_of(p, i);
        if (p->options.swap != VLAI_SWAP_NOTHING && partner < 0)
            return vlai_fail_hint(err, VLA_E_INVALID, "evaluate more episodes with --episodes",
                                  "episode %" PRId64 " has no other evaluated episode with another instruction to swap with",
                                  episode->index);
        for (int64_t f = 0, taken = 0; f < episode->length && (!p->options.most_frames || taken < p->options.most_frames);
             f += p->options.stride, taken++) {
            VLA_TRY(vlai_reserve((void **)&r->frames, &capacity, (size_t)r->frame_count, sizeof *r->frames, err));
            int64_t known = episode->length - f < r->horizon ? episode->length - f : r->horizon;
            r->frames[r->frame_count++] = (vlai_predict_frame){
                .episode = i, .frame = f, .row = episode->first_row + f, .partner = partner < 0 ? -1 : p->numbers[partner],
                .known = known};
        }
    }
    size_t chunk = (size_t)(r->horizon * r->columns), floats;
    if (!vlai_mul_size((size_t)r->frame_count, 2 * chunk, &floats) || !(p->chunks = vlai_calloc(floats, sizeof(float))))
        return vlai_nomem(err, (size_t)r->frame_count * 2 * chunk * sizeof(float));
    for (int64_t k = 0; k < r->frame_count; k++) {
        r->frames[k].predicted = p->chunks + 2 * (size_t)k * chunk;
        r->frames[k].recorded = r->frames[k].predicted + chunk;
    }
    return VLA_OK;
}

/* ---- model ---- */

/* On a CPU fp32 throughout; on a GPU as the run trained, but for masters and moments. */
static vla_numerics numerics_of(const vlai_predict *p)
{
    bool cpu = !strcmp(vla_executor_device(p->executor), "cpu");
    return cpu || p->config->training.numerics == VLAI_NUMERICS_FP32 ? VLA_FP32 : VLA_BF16_MASTER;
}

static vla_status load_weights(vlai_predict *p, vla_error *err)
{
    char path[VLAI_PREDICT_PATH];
    const char *dir = vlai_predict_checkpoint(p);
    vlai_safetensors *st;
    VLA_TRY(join(path, dir, "model.safetensors", err));
    p->weights = p->options.weights ? p->options.weights : dir;
    VLA_TRY(vlai_safetensors_open(p->options.weights ? p->options.weights : path, &st, err));
    VLA_TRY(join(path, dir, "config.json", err));
    vla_status status = vlai_wallx_config_load(path, &p->model, err);
    if (status == VLA_OK)
        status = vlai_wallx_config_update(&p->model, p->config, false, err);
    if (status == VLA_OK)
        status = vlai_wallx_check_pictures(&p->model, &p->contract.image, err);
    /* The contract is what counts; a configuration of the same contract may leave sizes to it. */
    p->model.action_dim = vlai_contract_action_width(&p->contract);
    p->model.propri_dim = vlai_contract_state_width(&p->contract);
    p->model.action_horizon_flow = p->contract.horizon;
    p->model.use_state_string_representation = p->contract.state_string;
    if (status == VLA_OK)
        status = vlai_wallx_stored_sizes(st, &p->model.vocab_size, NULL, NULL, err);
    if (status == VLA_OK)
        status = vlai_wallx_params(&p->model, NULL, NULL, p->store, err);
    vlai_pool *pool = NULL;
    if (status == VLA_OK)
        status = vlai_pool_create(p->options.threads, &pool, err);
    if (status == VLA_OK)
        status = vla_store_allocate_on(p->store, p->executor, numerics_of(p), VLA_STORE_PREDICT, 0, err);
    if (status == VLA_OK)
        status = vlai_wallx_load(&p->model, st, p->store, pool, err);
    vlai_pool_destroy(pool);
    vlai_safetensors_close(st);
    return status;
}

static vla_status open_model(vlai_predict *p, vla_error *err)
{
    vlai_prompt_tokens tokens;
    char device[VLAI_DEVICE_NAME];
    VLA_TRY(vlai_device_choose(p->options.device, device, err));
    VLA_TRY(vla_executor_create_on(device, p->options.threads, &p->executor, err));
    VLA_TRY(vla_store_create(&p->store, err));
    VLA_TRY(load_weights(p, err));
    VLA_TRY(vlai_prompt_tokens_of(p->tok, &tokens, err));
    p->tokens = (vlai_wallx_tokens){.action = tokens.action, .propri = tokens.propri, .pad = tokens.pad};
    p->first_action_token = tokens.first_action_token;
    p->end = tokens.end;
    if (p->contract.discrete)
        VLA_TRY(vlai_wallx_writer_create(&p->model, p->store, p->executor, &p->writer, err));
    else
        VLA_TRY(vlai_wallx_sampler_create(&p->model, p->store, p->executor, &p->sampler, err));
    return vlai_feed_create(p->set, &p->contract, p->tok, &p->feed, err);
}

static vla_status open_all(vlai_predict *p, vla_error *err)
{
    vlai_predict_options *o = &p->options;
    const struct {
        const char *name;
        int64_t value, least, most;
    } counts[] = {{"batch", o->batch, 1, 4096}, {"stride", o->stride, 0, INT64_MAX}, {"steps", o->steps, 0, 100000},
                  {"frames of an episode", o->most_frames, 0, INT64_MAX}, {"plots", o->plots, 0, INT64_MAX}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].value < counts[i].least || counts[i].value > counts[i].most)
            return vlai_fail(err, VLA_E_INVALID, "%s: %" PRId64 ", wanted %" PRId64 " to %" PRId64, counts[i].name, counts[i].value, counts[i].least,
                             counts[i].most);
    VLA_TRY(vla_checkpoint_open(p->from, &p->checkpoint, err));
    VLA_TRY(open_contract(p, err));
    VLA_TRY(open_set(p, err));
    if (!o->stride)
        o->stride = p->contract.horizon;
    VLA_TRY(choose_episodes(p, err));
    VLA_TRY(make_columns(p, err));
    VLA_TRY(list_frames(p, err));
    VLA_TRY(open_model(p, err));
    if (p->contract.discrete)
        o->steps = 0;
    else if (!o->steps)
        o->steps = p->model.noise.num_inference_timesteps;
    return vlai_text_status(&p->notes, err);
}

/* "run/latest" is what it points to now: the training that goes on will turn it to another one. */
static vla_status follow_latest(vlai_predict *p, vla_error *err)
{
    char target[VLAI_PREDICT_PATH];
    size_t end = strlen(p->options.checkpoint);
    while (end > 1 && p->options.checkpoint[end - 1] == '/')
        end--;
    if (end >= sizeof p->from)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", p->options.checkpoint);
    snprintf(p->from, sizeof p->from, "%.*s", (int)end, p->options.checkpoint);
    ssize_t n = readlink(p->from, target, sizeof target - 1);
    char *slash = strrchr(p->from, '/');
    if (n <= 0 || memchr(target, '/', (size_t)n))
        return VLA_OK; /* no link, or one into another folder, where nobody renews it */
    target[n] = 0;
    if (slash)
        *slash = 0;
    char dir[VLAI_PREDICT_PATH];
    snprintf(dir, sizeof dir, "%s", slash ? p->from : ".");
    return join(p->from, slash && !*dir ? "/" : dir, target, err);
}

/* A checkpoint that was there when it was named, and is not any more: its training has deleted it. */
static vla_status explain(const vlai_predict *p, bool named, vla_status status, vla_error *err)
{
    const char *dir = p->checkpoint ? vlai_predict_checkpoint(p) : named ? p->from : NULL;
    if (status == VLA_OK || status == VLA_E_NOMEM || !dir || vlai_ckpt_is_there(dir) || !err)
        return status;
    vla_error first = *err;
    return vlai_fail_hint(err, VLA_E_NOT_FOUND,
                          "name the run folder, of which the newest checkpoint is taken, or copy this checkpoint before its training deletes it; "
                          "a larger checkpoint.keep_last keeps it longer",
                          "%.300s was deleted while it was read, as a training does that has written checkpoint.keep_last newer ones (%.300s)", dir,
                          first.message);
}

vla_status vlai_predict_create(const vlai_predict_options *options, vlai_predict **out, vla_error *err)
{
    *out = NULL;
    vlai_predict *p = vlai_calloc(1, sizeof *p);
    if (!p)
        return vlai_nomem(err, sizeof *p);
    p->options = *options;
    vla_status status = follow_latest(p, err);
    bool named = status == VLA_OK && vlai_ckpt_is_there(p->from);
    if (status == VLA_OK)
        status = explain(p, named, open_all(p, err), err);
    if (status != VLA_OK) {
        vlai_predict_destroy(p);
        return status;
    }
    *out = p;
    return VLA_OK;
}

void vlai_predict_destroy(vlai_predict *p)
{
    if (!p)
        return;
    vlai_feed_destroy(p->feed);
    vlai_wallx_sampler_destroy(p->sampler);
    vlai_wallx_writer_destroy(p->writer);
    vla_store_destroy(p->store);
    vla_executor_destroy(p->executor);
    vla_dataset_close(p->set);
    vlai_tokenizer_close(p->tok);
    if (p->contract_made)
        vlai_contract_fini(&p->contract);
    vlai_config_destroy(p->config);
    json_decref(p->state);
    vla_checkpoint_close(p->checkpoint);
    vlai_free(p->row_state);
    vlai_free(p->row_model);
    vlai_free(p->unit);
    vlai_free(p->angle);
    vlai_free(p->episodes);
    vlai_free(p->numbers);
    vlai_free(p->chunks);
    vlai_free(p->labels);
    vlai_free(p->names);
    vlai_free(p->mean);
    vlai_free(p->result.dims);
    vlai_free(p->result.steps);
    vlai_free(p->result.episodes);
    vlai_free(p->result.frames);
    vlai_text_fini(&p->notes);
    vlai_free(p);
}
