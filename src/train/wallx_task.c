#include "train/wallx_task.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/pool.h"
#include "ckpt/ckpt.h"
#include "ckpt/fill.h"
#include "data/feed.h"
#include "model/wallx_layout.h"
#include "optim/settings.h"
#include "train/contract_config.h"
#include "train/device.h"
#include "train/switches.h"
#include "train/wallx_batch.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { FILES = 16, PATH = 4096, HELD_LISTED = 100000 };

/* Draws of one sample. */
enum { SITE_TIME = 1, SITE_NOISE = 2 };

/* The files of a processor folder that a checkpoint takes along. */
static const char *const processor_files[] = {"preprocessor_config.json", "tokenizer_config.json",  "tokenizer.json",
                                              "tokenizer.model",          "special_tokens_map.json", "vocab.json",
                                              "merges.txt",               "added_tokens.json",       "chat_template.json"};

/* One of the two splits. */
typedef struct {
    struct vlai_wallx_task *task;
    vlai_order *order;
    int64_t count;
} split;

struct vlai_wallx_task {
    const vlai_config *config;
    vlai_wallx_setup setup;
    vlai_wallx_config model;
    vlai_wallx_tokens tokens;
    vlai_tokenizer *tok;
    vlai_contract contract;
    bool contract_made;
    vlai_flow_time flow;
    vla_dataset *set;
    split train, held;
    int64_t *held_episodes;
    vlai_sampler *collator; /* data.padding: reference */
    vlai_frame_cache *cache;
    vlai_wallx_assembly assembly;
    char **frozen;          /* parameters that are not trained */
    size_t frozen_count, frozen_capacity;
    vla_lr_group *groups;
    vla_checkpoint_file files[FILES];
    size_t file_count;
    vlai_arena strings;
    vlai_text notes, contract_text;
    char *config_text;
    vla_channel channels[3];
    char root[PATH];
    char device[VLAI_DEVICE_NAME];
};

const vlai_wallx_setup *vlai_wallx_task_setup(const vlai_wallx_task *t)
{
    return &t->setup;
}

void vlai_wallx_task_rows(vlai_wallx_task *t, int64_t rows)
{
    t->model.vocab_size = rows;
}

/* ---- samples ---- */

static vla_status slot_create(void *user, void **slot, vla_error *err)
{
    const split *s = user;
    size_t noise = (size_t)(s->task->contract.horizon * vlai_contract_action_width(&s->task->contract));
    vlai_wallx_slot *made = vlai_calloc(1, sizeof *made);
    if (made)
        made->noise = vlai_array(noise, sizeof *made->noise);
    if (!made || !made->noise) {
        vlai_free(made);
        return vlai_nomem(err, noise * sizeof(float));
    }
    *slot = made;
    return VLA_OK;
}

static void slot_destroy(void *user, void *slot)
{
    (void)user;
    vlai_wallx_slot *s = slot;
    vlai_sample_fini(&s->sample);
    vlai_free(s->noise);
    vlai_free(s);
}

static vla_status worker_create(void *user, void **worker, vla_error *err)
{
    const split *s = user;
    VLA_TRY(vlai_feed_create(s->task->set, &s->task->contract, s->task->tok, (vlai_feed **)worker, err));
    vlai_feed_use_cache(*worker, s->task->cache);
    return VLA_OK;
}

static void worker_destroy(void *user, void *worker)
{
    (void)user;
    vlai_feed_destroy(worker);
}

static vla_status read_sample(void *user, void *worker, const vla_sample_key *key, void *slot, vla_error *err)
{
    const split *s = user;
    const vlai_wallx_task *t = s->task;
    vlai_wallx_slot *out = slot;
    int64_t row;
    VLA_TRY(vlai_order_at(s->order, key->epoch, key->place, &row, err));
    VLA_TRY(vlai_feed_read(worker, row, &out->sample, err));
    vlai_rng_key rng = {.seed = (uint64_t)t->config->hyperparams.seed,
                        .stream = key->stream == VLA_SAMPLES_VALIDATION ? VLAI_RNG_VALIDATION : VLAI_RNG_TRAIN,
                        .position = key->position, .site = SITE_TIME};
    out->time = vlai_flow_time_map(&t->flow, vlai_flow_time_draw(&t->flow, &rng));
    rng.site = SITE_NOISE;
    vlai_rng_normal(&rng, 0, (size_t)(out->sample.horizon * out->sample.action_width), out->noise);
    return VLA_OK;
}

static void describe(void *user, const void *slot, char *text, size_t size)
{
    const split *s = user;
    const vlai_sample *sample = &((const vlai_wallx_slot *)slot)->sample;
    snprintf(text, size, "%s, episode %" PRId64 ", frame %" PRId64, s->task->root, sample->episode, sample->frame);
}

static vla_samples samples_of(split *s)
{
    return (vla_samples){.size = sizeof(vla_samples), .user = s, .count = s->count, .slot_create = slot_create,
                         .slot_destroy = slot_destroy, .worker_create = worker_create, .worker_destroy = worker_destroy,
                         .read = read_sample, .describe = describe};
}

/* ---- the model ---- */

/* With train_action_expert_only: what no group of learning rates takes. */
static int is_frozen(void *user, const char *name)
{
    const vlai_wallx_task *t = user;
    return t->config->optimizer.train_action_expert_only && vlai_settings_group(name, (void *)(uintptr_t)t->config) == 0;
}

static vla_status note_frozen(vlai_wallx_task *t, const vla_store *store, vla_error *err)
{
    for (size_t i = 0; i < vla_store_count(store); i++) {
        const char *name = vla_store_tensor(store, VLA_STORE_WEIGHT, i).name;
        if (!is_frozen(t, name))
            continue;
        VLA_TRY(vlai_reserve((void **)&t->frozen, &t->frozen_capacity, t->frozen_count, sizeof *t->frozen, err));
        t->frozen[t->frozen_count] = vlai_arena_strdup(&t->strings, name);
        if (!t->frozen[t->frozen_count++])
            return vlai_nomem(err, strlen(name));
    }
    return VLA_OK;
}

static vla_status params(void *user, vla_store *store, vla_error *err)
{
    vlai_wallx_task *t = user;
    VLA_TRY(vlai_wallx_params(&t->model, vlai_settings_group, (void *)(uintptr_t)t->config, store, err));
    VLA_TRY(vlai_settings_check_groups(t->config, store, err));
    return note_frozen(t, store, err);
}

/* Matrices from normal(0, 0.02), biases 0, norm weights 1 (wallx-model.md: fresh init). A draw depends on the seed, the
 * tensor's name and the element alone. */
typedef struct drawing {
    const vla_store *store;
    uint64_t seed;
} drawing;

static vla_status draw_tile(void *user, const vlai_fill_tile *t, float *values, const void **raw, vla_error *err)
{
    const drawing *d = user;
    vla_tensor w = vla_store_tensor(d->store, VLA_STORE_WEIGHT, t->index);
    vlai_rng_key rng = {.seed = d->seed, .stream = VLAI_RNG_INIT, .position = XXH64(w.name, strlen(w.name), 0)};
    const char *last = strrchr(w.name, '.');
    bool bias = w.rank == 1 && last && !strcmp(last, ".bias"), norm = w.rank == 1 && !bias;
    (void)raw;
    (void)err;
    if (!norm && !bias)
        vlai_rng_normal(&rng, (uint32_t)t->first, (size_t)t->n, values);
    for (int64_t k = 0; k < t->n; k++)
        values[k] = norm ? 1.0f : bias ? 0.0f : 0.02f * values[k];
    return VLA_OK;
}

/* Weights of a file for the tensors that it holds; draws for the others, and for rows beyond the stored ones. */
typedef struct pretrained {
    drawing drawing;
    const vlai_wallx_layout *layout;
    int64_t *weight; /* per tensor of the store: its place in the layout; -1 = not stored */
} pretrained;

static vla_status pretrained_tile(void *user, const vlai_fill_tile *t, float *values, const void **raw, vla_error *err)
{
    pretrained *p = user;
    int64_t i = p->weight[t->index], stored = i < 0 ? 0 : p->layout->weights[i].elements;
    if (stored < t->first + t->n)
        VLA_TRY(draw_tile(&p->drawing, t, values, raw, err));
    int64_t n = stored - t->first < t->n ? stored - t->first : t->n;
    if (n > 0)
        VLA_TRY(vlai_wallx_layout_check(p->layout, (size_t)i, t->first, n, err));
    return n > 0 ? vlai_wallx_layout_read(p->layout, (size_t)i, t->first, n, values, err) : VLA_OK;
}

/* Qwen2.5-VL weights for expert 0 and the vision tower; what the folder does not hold is drawn. The embedding keeps the
 * model's number of rows: further stored ones are left out, and further own ones are drawn. */
static vla_status load_pretrained(vlai_wallx_task *t, const char *path, vla_store *store, vlai_pool *pool, vla_error *err)
{
    vlai_safetensors *st = NULL;
    vlai_wallx_weight *weights = NULL;
    vlai_wallx_layout *layout = NULL;
    pretrained p = {.drawing = {store, (uint64_t)t->config->hyperparams.seed}};
    size_t count = 0, loaded = 0, own = vla_store_count(store);
    vlai_wallx_config stored = t->model;
    vla_status status;
    p.weight = vlai_array(own + 1, sizeof *p.weight);
    if (!p.weight)
        return vlai_nomem(err, own * sizeof *p.weight);
    memset(p.weight, 0xFF, own * sizeof *p.weight);
    VLA_TRY_GOTO(vlai_safetensors_open(path, &st, err), done);
    VLA_TRY_GOTO(vlai_wallx_stored_sizes(st, &stored.vocab_size, NULL, NULL, err), done);
    VLA_TRY_GOTO(vlai_wallx_weights(&stored, &weights, &count, err), done);
    VLA_TRY_GOTO(vlai_wallx_layout_open(st, weights, count, &layout, err), done);
    if (layout->report.reshaped.count) {
        status = vlai_fail(err, VLA_E_SHAPE, "%s: %s", path, layout->report.reshaped.names[0]);
        goto done;
    }
    for (size_t i = 0; i < count; i++) {
        int64_t param = vla_store_find(store, weights[i].name);
        if (param < 0 || !vlai_wallx_layout_has(layout, i))
            continue;
        loaded++;
        p.weight[param] = (int64_t)i;
    }
    p.layout = layout;
    VLA_TRY_GOTO(vlai_store_fill(store, VLA_STORE_WEIGHT, pool, pretrained_tile, &p, err), done);
    vlai_info("%zu of %zu tensors from %s; the others are drawn", loaded, own, path);
done:
    vlai_free(p.weight);
    vlai_wallx_layout_close(layout);
    vlai_free(weights);
    vlai_safetensors_close(st);
    return status;
}

static vla_status init_with(vlai_wallx_task *t, vla_store *store, vlai_pool *pool, vla_error *err)
{
    if (!t->setup.weights && t->config->model.pretrained_path)
        return load_pretrained(t, t->config->model.pretrained_path, store, pool, err);
    if (!t->setup.weights) {
        drawing d = {store, (uint64_t)t->config->hyperparams.seed};
        VLA_TRY(vlai_store_fill(store, VLA_STORE_WEIGHT, pool, draw_tile, &d, err));
        vlai_info("no weights are given (checkpoint.resume_from, model.pretrained_path): all are drawn from seed %" PRId64,
                  t->config->hyperparams.seed);
        return VLA_OK;
    }
    vlai_safetensors *st;
    VLA_TRY(vlai_safetensors_open(t->setup.weights, &st, err));
    vla_status status = vlai_wallx_load(&t->model, st, store, pool, err);
    if (status == VLA_OK)
        vlai_info("weights from %s (%zu tensors); step 0", t->setup.weights, vlai_safetensors_count(st));
    else if (err && strncmp(err->message, t->setup.weights, strlen(t->setup.weights)) != 0) /* of several files it may name another */
        vlai_prefix(err, status, "%s", t->setup.weights);
    vlai_safetensors_close(st);
    return status;
}

static vla_status init(void *user, vla_store *store, vla_error *err)
{
    vlai_wallx_task *t = user;
    vlai_pool *pool;
    VLA_TRY(vlai_pool_create((int)t->config->training.threads, &pool, err));
    vla_status status = init_with(t, store, pool, err);
    vlai_pool_destroy(pool);
    return status;
}

static vla_status shape_of(void *user, void *const *slots, int64_t count, void *shape, vla_error *err)
{
    vlai_wallx_task *t = user;
    VLA_TRY(vlai_wallx_assemble(&t->assembly, &t->contract, t->collator, slots, count, err));
    return vlai_wallx_shape_of(&t->model, &t->tokens, &t->assembly.batch, true, shape, err);
}

static vla_status build(void *user, const void *shape, vla_graph **out, vla_error *err)
{
    vlai_wallx_task *t = user;
    VLA_TRY(vlai_wallx_build(&t->model, shape, &(vlai_wallx_options){0}, out, err));
    for (size_t i = 0; i < t->frozen_count; i++) {
        vla_value p = vla_graph_find(*out, t->frozen[i]);
        if (p != VLA_NONE)
            vla_graph_freeze(*out, p);
    }
    return VLA_OK;
}

static vla_status fill(void *user, const void *shape, void *const *slots, int64_t count, vla_run *run, vla_error *err)
{
    vlai_wallx_task *t = user;
    (void)slots;
    (void)count;
    return vlai_wallx_fill(&t->model, &t->tokens, shape, &t->assembly.batch, vlai_wallx_find_in_run, run, err);
}

/* Samples with an error of the flow that is not finite. */
static void blame(void *user, const void *shape, vla_run *run, int64_t count, uint8_t *guilty)
{
    vlai_wallx_task *t = user;
    vla_tensor e = vla_run_tensor(run, "flow_error");
    (void)shape;
    int64_t per = t->contract.horizon * vlai_contract_action_width(&t->contract);
    if (!e.data || e.dtype != VLA_F32 || e.elements < count * per)
        return;
    bool any = false;
    uint8_t bad;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < count && (pass == 0 || any); i++) {
            bad = 0;
            for (int64_t k = 0; k < per && !bad; k++)
                bad = !isfinite(((const float *)e.data)[i * per + k]);
            any |= bad;
            if (pass)
                guilty[i] = bad;
        }
}

static double weight(void *user, void *const *slots, int64_t count)
{
    vlai_wallx_task *t = user;
    int64_t width = vlai_contract_action_width(&t->contract);
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        const vlai_sample *s = &((const vlai_wallx_slot *)slots[i])->sample;
        sum += (double)s->labelled; /* of action tokens, which have no flow */
        for (int64_t k = 0; k < t->contract.horizon * width && !s->discrete; k++)
            sum += (double)(s->dof_mask[k] * (t->contract.mask_padded ? s->loss_mask[k / width] : 1.0f));
    }
    return sum;
}

/* ---- opening ---- */

static bool has_file(const char *dir, const char *name)
{
    char path[PATH];
    return vlai_path_join(path, sizeof path, dir, name) && vlai_is_file(path);
}

vlai_resume_kind vlai_resume_kind_of(const char *path)
{
    if (!path || !*path)
        return VLAI_RESUME_NOTHING;
    if (!vlai_is_dir(path))
        return VLAI_RESUME_WEIGHTS;
    bool weights = has_file(path, "model.safetensors") || has_file(path, "model.safetensors.index.json");
    bool state = has_file(path, "state.json") || has_file(path, "checksums.json") || has_file(path, "DONE");
    return weights && !state ? VLAI_RESUME_WEIGHTS : VLAI_RESUME_RUN;
}

/* Embedding rows are those of the stored weights, else the tokenizer's length. */
static vla_status take_vocabulary(vlai_wallx_task *t, vla_error *err)
{
    const vlai_config *c = t->config;
    char path[PATH];
    vlai_safetensors *st = NULL;
    vla_checkpoint *ckpt = NULL;
    t->model.vocab_size = vlai_tokenizer_size(t->tok);
    if (t->setup.weights) {
        VLA_TRY(vlai_safetensors_open(t->setup.weights, &st, err));
    } else if (t->setup.options.resume) {
        const char *from = t->setup.options.resume; /* who loads it verifies it */
        VLA_TRY(has_file(from, "DONE") ? vlai_checkpoint_open_known(from, &ckpt, err) : vla_checkpoint_open(from, &ckpt, err));
        vla_status status = vlai_path_join(path, sizeof path, vla_checkpoint_path(ckpt), "model.safetensors")
                                ? vlai_safetensors_open(path, &st, err)
                                : vlai_fail(err, VLA_E_INVALID, "%s: path too long", vla_checkpoint_path(ckpt));
        vla_checkpoint_close(ckpt);
        VLA_TRY(status);
    } else {
        return VLA_OK;
    }
    int64_t action = c->action_dim, propri = c->propri_dim;
    vla_status status = vlai_wallx_stored_sizes(st, &t->model.vocab_size, &action, &propri, err);
    t->model.keep_propri_proj = vlai_safetensors_find(st, "action_preprocessor.propri_proj.weight") != NULL;
    vlai_safetensors_close(st);
    VLA_TRY(status);
    if (t->contract.discrete && t->model.vocab_size < vlai_tokenizer_size(t->tok))
        return vlai_fail_hint(err, VLA_E_SHAPE, "give them as model.pretrained_path: rows that they lack are drawn",
                              "the weights have %" PRId64 " embedding rows, the tokenizer with its action tokens %" PRId64, t->model.vocab_size,
                              vlai_tokenizer_size(t->tok));
    if (action != c->action_dim || (propri != c->propri_dim && !t->model.use_state_string_representation))
        return vlai_fail_hint(err, VLA_E_SHAPE, "pad task.dof_config and task.agent_pos_config to the weights' widths",
                              "the weights act on %" PRId64 " action and %" PRId64 " state values, the configuration's layouts have %"
                              PRId64 " and %" PRId64, action, propri, c->action_dim, c->propri_dim);
    return VLA_OK;
}

static vla_status open_model(vlai_wallx_task *t, vla_error *err)
{
    VLA_TRY(vlai_wallx_config_load(t->config->model.config_path, &t->model, err));
    if (t->model.noise.s != t->flow.s || t->model.noise.time_shift != t->flow.shift)
        vlai_text_printf(&t->notes, "noise_scheduler of %s has s %g and time_shift %g; data.noise_scheduler's %g and %g count\n",
                         t->config->model.config_path, t->model.noise.s, t->model.noise.time_shift, t->flow.s, t->flow.shift);
    VLA_TRY(vlai_wallx_config_update(&t->model, t->config, false, err));
    VLA_TRY(take_vocabulary(t, err));
    vlai_prompt_tokens tokens;
    VLA_TRY(vlai_prompt_tokens_of(t->tok, &tokens, err));
    t->tokens = (vlai_wallx_tokens){.action = tokens.action, .propri = tokens.propri, .pad = tokens.pad};
    return VLA_OK;
}

static vla_status open_set(vlai_wallx_task *t, vla_error *err)
{
    VLA_TRY(vlai_config_dataset(t->config, t->root, sizeof t->root, err));
    VLA_TRY(vlai_config_open_set(t->config, t->root, true, &t->set, err));
    for (int64_t i = 0; i < vla_dataset_info_get(t->set)->warnings; i++)
        vlai_text_printf(&t->notes, "%s\n", vla_dataset_warning(t->set, i));
    return vlai_contract_check_set(&t->contract, t->set, &t->notes, err);
}

static vla_status open_cache(vlai_wallx_task *t, vla_error *err)
{
    const vlai_config *c = t->config;
    char dir[PATH];
    if (c->data.frame_cache_gb <= 0)
        return VLA_OK;
    if (!vlai_path_join(dir, sizeof dir, c->checkpoint.save_path, "frame_cache"))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", c->checkpoint.save_path);
    return vlai_feed_cache_open(t->set, &t->contract, c->data.frame_cache_dir ? c->data.frame_cache_dir : dir,
                                (uint64_t)(1e9 * c->data.frame_cache_gb), &t->cache, err);
}

/* The i-th episode of the configuration's list, or of the set. */
static int64_t listed_episode(const vlai_wallx_task *t, int64_t i)
{
    const vlai_numbers *chosen = &t->config->lerobot.episodes;
    return chosen->count ? (int64_t)chosen->values[i] : vla_dataset_episode(t->set, i)->index;
}

static int compare_integers(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Rows of the episodes that train, then those of the others, each in file order. */
static vla_status rows_by_episode(vlai_wallx_task *t, int64_t *rows, int64_t *train, int64_t *held, vla_error *err)
{
    int64_t episodes = vla_dataset_info_get(t->set)->episodes;
    int64_t n = t->config->lerobot.episodes.count ? (int64_t)t->config->lerobot.episodes.count : episodes;
    int64_t training = (int64_t)floor((double)n * t->config->data.train_test_split);
    if (training < 1)
        return vlai_fail_hint(err, VLA_E_INVALID, "raise data.train_test_split, or record more episodes",
                              "train_test_split %g of %" PRId64 " episodes yields 0 train episodes",
                              t->config->data.train_test_split, n);
    t->held_episodes = vlai_array((size_t)(n - training) + 1, sizeof *t->held_episodes);
    if (!t->held_episodes)
        return vlai_nomem(err, (size_t)n * sizeof *t->held_episodes);
    for (int64_t i = training; i < n; i++)
        t->held_episodes[i - training] = listed_episode(t, i);
    if (n > training)
        qsort(t->held_episodes, (size_t)(n - training), sizeof *t->held_episodes, compare_integers);
    t->setup.train_episodes = training;
    t->setup.validation_episodes = n - training;
    *train = *held = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t e = 0; e < episodes; e++) {
            const vla_episode *ep = vla_dataset_episode(t->set, e);
            bool is_held = bsearch(&ep->index, t->held_episodes, (size_t)(n - training), sizeof *t->held_episodes,
                                   compare_integers) != NULL;
            if (is_held != (pass == 1))
                continue;
            for (int64_t k = 0; k < ep->length; k++)
                rows[*train + *held + k] = ep->first_row + k;
            *(pass ? held : train) += ep->length;
        }
    if (*train == 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "list each episode once, and only such as the set has",
                              "data.lerobot_config.episodes: of the %" PRId64 " listed none is left to train on beside the %" PRId64
                              " held out", n, n - training);
    return VLA_OK;
}

static vla_status make_orders(vlai_wallx_task *t, int64_t *rows, vla_error *err)
{
    uint64_t seed = (uint64_t)t->config->hyperparams.seed;
    int64_t train, held, *held_rows;
    int64_t *permuted = NULL;
    VLA_TRY(rows_by_episode(t, rows, &train, &held, err));
    held_rows = rows + train;
    if (t->config->data.validation_split == VLAI_SPLIT_FRAME) {
        /* The reference permutes the training episodes' frames and validates on the last 5 %; the held episodes rest. */
        int64_t n = train;
        permuted = vlai_array((size_t)n, 2 * sizeof *permuted);
        if (!permuted)
            return vlai_nomem(err, (size_t)n * 2 * sizeof *permuted);
        vla_status status = vlai_order_split(n, seed, permuted, &train, err);
        if (status != VLA_OK) {
            vlai_free(permuted);
            return status;
        }
        for (int64_t i = 0; i < n; i++)
            permuted[n + i] = rows[permuted[i]];
        rows = permuted + n;
        held_rows = rows + train;
        held = n - train;
    }
    vla_status status = vlai_order_create(rows, train, seed, true, &t->train.order, err);
    if (status == VLA_OK && held > 0)
        status = vlai_order_create(held_rows, held, seed, false, &t->held.order, err);
    t->train.task = t->held.task = t;
    t->train.count = train;
    t->held.count = held;
    vlai_free(permuted);
    return status;
}

static vla_status make_split(vlai_wallx_task *t, vla_error *err)
{
    size_t n = (size_t)vla_dataset_info_get(t->set)->rows;
    int64_t *rows = vlai_array(n ? n : 1, sizeof *rows);
    if (!rows)
        return vlai_nomem(err, n * sizeof *rows);
    vla_status status = make_orders(t, rows, err);
    vlai_free(rows);
    return status;
}

static json_t *split_json(const vlai_wallx_task *t)
{
    json_t *held = json_array();
    for (int64_t i = 0; i < t->setup.validation_episodes && i < HELD_LISTED; i++)
        json_array_append_new(held, json_integer(t->held_episodes[i]));
    return json_pack("{s:s, s:I, s:o}", "by", t->config->data.validation_split == VLAI_SPLIT_FRAME ? "frame" : "episode",
                     "training_episodes", (json_int_t)t->setup.train_episodes, "held_out_episodes", held);
}

/* The sections that a resume compares: contract, data, flow, layout, model. */
static vla_status write_contract(vlai_wallx_task *t, vla_error *err)
{
    const vla_dataset_info *info = vla_dataset_info_get(t->set);
    json_t *data = json_pack("{s:s, s:I, s:I, s:o}", "digest", info->digest, "rows", (json_int_t)info->rows, "episodes",
                             (json_int_t)info->episodes, "split", split_json(t));
    json_t *flow = json_pack("{s:f, s:f, s:f, s:f, s:f}", "beta_alpha", t->flow.alpha, "beta_beta", t->flow.beta, "s", t->flow.s,
                             "time_shift", t->flow.shift, "loss_weight", t->config->model.flow_loss_weight);
    json_t *layout = json_pack("{s:s}", "padding", t->collator ? "reference" : "packed");
    json_t *model = vlai_wallx_config_to_json(&t->model);
    if (model && json_object_set_new(model, "train_action_expert_only", json_boolean(t->config->optimizer.train_action_expert_only))) {
        json_decref(model);
        model = NULL;
    }
    json_t *all = json_pack("{s:o, s:o, s:o, s:o, s:o}", "contract", vlai_contract_to_json(&t->contract), "data", data, "flow", flow,
                            "layout", layout, "model", model);
    char *text = all ? json_dumps(all, JSON_REAL_PRECISION(17)) : NULL;
    json_decref(all);
    if (text)
        vlai_text_puts(&t->contract_text, text);
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
    return text ? vlai_text_status(&t->contract_text, err) : vlai_fail(err, VLA_E_NOMEM, "out of host memory while the contract is written");
}

static vla_status add_file(vlai_wallx_task *t, const char *name, const char *dir, const char *source, vla_error *err)
{
    char path[PATH];
    if (!vlai_path_join(path, sizeof path, dir ? dir : "", source))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", dir, source);
    if (!vlai_is_file(path) || t->file_count == FILES)
        return VLA_OK;
    const char *kept = vlai_arena_strdup(&t->strings, path);
    if (!kept)
        return vlai_nomem(err, strlen(path));
    t->files[t->file_count++] = (vla_checkpoint_file){.name = name, .source = kept};
    return VLA_OK;
}

static vla_status list_files(vlai_wallx_task *t, vla_error *err)
{
    const vlai_config *c = t->config;
    const char *architecture = c->model.config_path;
    VLA_TRY(add_file(t, "config.json", vlai_is_dir(architecture) ? architecture : NULL,
                     vlai_is_dir(architecture) ? "config.json" : architecture, err));
    VLA_TRY(add_file(t, "norm_stats.json", NULL, c->data.norm_stats_path, err));
    for (size_t i = 0; i < sizeof processor_files / sizeof *processor_files; i++)
        VLA_TRY(add_file(t, processor_files[i], c->model.processor_path, processor_files[i], err));
    if (vlai_config_fast_path(c)) {
        char config[PATH], tokenizer[PATH];
        VLA_TRY(vlai_fast_find(vlai_config_fast_path(c), config, tokenizer, err));
        VLA_TRY(add_file(t, VLAI_FAST_CONFIG_FILE, NULL, config, err));
        VLA_TRY(add_file(t, VLAI_FAST_TOKENIZER_FILE, NULL, tokenizer, err));
    }
    VLA_TRY(vlai_config_dump(c, &t->config_text, err));
    if (t->file_count < FILES) /* JSON is YAML */
        t->files[t->file_count++] =
            (vla_checkpoint_file){.name = "config.yml", .data = t->config_text, .size = strlen(t->config_text)};
    return VLA_OK;
}

/* The key where it is given; else with WALLX_PERF_ALLOC cheap, on a GPU more where that does not fit. */
static void set_recompute(const vlai_config *c, const vlai_switches *switches, bool cpu, vla_trainer_options *o)
{
    bool given = vlai_config_origin(c, "memory.recompute").file || c->memory.recompute != VLAI_RECOMPUTE_NONE;
    o->recompute_auto = given ? c->memory.recompute == VLAI_RECOMPUTE_AUTO : switches->alloc && !cpu;
    if (given) /* the same order, and auto begins at none */
        o->recompute = c->memory.recompute == VLAI_RECOMPUTE_AUTO ? VLA_RECOMPUTE_NONE : (vla_recompute)c->memory.recompute;
    else
        o->recompute = switches->alloc ? VLA_RECOMPUTE_CHEAP : VLA_RECOMPUTE_NONE;
}

static vla_status make_options(vlai_wallx_task *t, vla_error *err)
{
    const vlai_config *c = t->config;
    vlai_schedule schedule = vlai_settings_schedule(c);
    int groups = 1 + (int)c->optimizer.lr_groups.count;
    t->groups = vlai_calloc((size_t)groups, sizeof *t->groups);
    if (!t->groups)
        return vlai_nomem(err, (size_t)groups * sizeof *t->groups);
    for (int g = 0; g < groups; g++)
        t->groups[g] = (vla_lr_group){g ? c->optimizer.lr_groups.groups[g - 1].name : c->base_group, vlai_settings_peak(c, g)};
    vla_trainer_options o = VLA_TRAINER_OPTIONS_DEFAULT;
    vlai_switches switches;
    VLA_TRY(vlai_device_choose(c->training.device, t->device, err));
    vlai_switches_read(c, &switches);
    bool cpu = !strcmp(t->device, "cpu");
    t->model.exact_widths = !switches.compile_visual;
    o.run = c->checkpoint.save_path;
    o.resume = t->setup.options.resume;
    o.batch = c->hyperparams.batch_size_per_gpu;
    o.validation_batch = c->top.eval_batch_size_per_gpu;
    o.accumulation = c->hyperparams.gradient_accumulation_steps;
    o.steps = c->scheduler.num_training_steps;
    o.epochs = c->hyperparams.num_epoch;
    o.workers = c->data.num_workers;
    o.threads = (int)c->training.threads;
    o.seed = (uint64_t)c->hyperparams.seed;
    o.device = t->device;
    o.numerics = vlai_settings_numerics(c, !cpu);
    set_recompute(c, &switches, cpu, &o);
    o.memory_limit = (size_t)(1e9 * c->memory.device_gb);
    o.memory_keep = (size_t)(1e9 * c->memory.keep_gb);
    o.layout = switches.alloc ? VLA_MEMORY_LIFETIMES : VLA_MEMORY_FREE_LISTS;
    /* A CPU's kernels are the reference and stay one per operation. */
    o.fuse = cpu ? 0 : (switches.compile ? VLA_FUSE_MODEL : 0) | (switches.compile_visual ? VLA_FUSE_VISUAL : 0);
    o.visual_layers = (int)t->model.vision.depth + 1;
    o.fast_attention = switches.attention;
    o.fast = (switches.compile ? VLA_FAST_ALL : 0) | (switches.compile_visual ? VLA_FAST_SEARCH : 0) |
             (switches.fused_optimizer ? VLA_FAST_UPDATE : 0);
    o.timing = switches.log;
    o.most_plans = switches.most_plans;
    o.whole_step = switches.compile && o.accumulation == 1;
    o.ahead = switches.no_barrier;
    o.zero = (int)c->dist.zero;
    o.overlap = switches.ddp;
    o.bucket_bytes = (size_t)switches.bucket_mb * 1000000;
    o.gradient_dtype = c->dist.gradient_dtype == VLAI_GRADIENTS_BF16   ? VLA_BF16
                       : c->dist.gradient_dtype == VLAI_GRADIENTS_FP32 ? VLA_F32
                                                                       : VLA_DTYPE_NONE;
    o.product_sms_free = (int)c->dist.product_sms_free;
    o.global_loss = c->hyperparams.loss_normalization == VLAI_LOSS_GLOBAL;
    o.adamw = vlai_settings_adamw(c);
    o.groups = t->groups;
    o.group_count = groups;
    o.schedule = schedule.kind == VLAI_SCHEDULE_COSINE ? VLA_LR_COSINE : VLA_LR_CONSTANT;
    o.min_rate = schedule.min;
    double peak = 0;
    for (int g = 0; g < groups; g++)
        peak = t->groups[g].rate > peak ? t->groups[g].rate : peak;
    if (o.schedule == VLA_LR_COSINE && o.min_rate > peak)
        vlai_warn("hyperparams.scheduler.min_lr %g lies above every learning rate (at most %g): the rate rises all the way", o.min_rate, peak);
    o.warmup = schedule.warmup;
    o.save_interval = c->logging.save_interval;
    o.validation_interval = c->logging.val_interval;
    o.epoch_save_interval = c->logging.epoch_save_interval;
    o.ignore_until = c->logging.ignore_until_interval;
    o.loss_smooth = c->logging.loss_log_smooth_window;
    o.norm_interval = c->logging.param_norm_interval;
    o.validate_first = c->checkpoint.validate_first;
    o.keep_last = c->checkpoint.keep_last;
    o.max_bad_steps = c->checkpoint.max_bad_steps;
    o.contract = t->contract_text.data;
    o.files = t->files;
    o.file_count = t->file_count;
    t->setup.options = o;
    return VLA_OK;
}

/* Losses by data set, which the reference names by repo_id. */
static vla_status name_channels(vlai_wallx_task *t, vla_error *err)
{
    static const struct {
        const char *behind, *mean, *count;
    } rows[] = {{"", "cross_entropy_loss", "cross_entropy_count"}, {"_flow", "flow_loss", "flow_count"}};
    char name[PATH + 32];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(name, sizeof name, "channel_loss_%s%s", t->config->lerobot.repo_id, rows[i].behind);
        t->channels[i] = (vla_channel){vlai_arena_strdup(&t->strings, name), rows[i].mean, rows[i].count};
        if (!t->channels[i].name)
            return vlai_nomem(err, strlen(name));
    }
    return VLA_OK;
}

static vla_status open_task(vlai_wallx_task *t, vla_error *err)
{
    const vlai_config *c = t->config;
    VLA_TRY(vlai_config_check_training(c, err));
    vlai_resume_kind kind = vlai_resume_kind_of(c->checkpoint.resume_from);
    t->setup.weights = kind == VLAI_RESUME_WEIGHTS ? c->checkpoint.resume_from : NULL;
    t->setup.options.resume = kind == VLAI_RESUME_RUN ? c->checkpoint.resume_from : NULL;
    if (kind == VLAI_RESUME_WEIGHTS && (has_file(t->setup.weights, "optimizer.pt") || has_file(t->setup.weights, "global_step.pth")))
        vlai_text_printf(&t->notes, "%s is a checkpoint of the reference: its weights are taken, its optimizer state and step are "
                         "not, and training starts at step 0\n", t->setup.weights);
    VLA_TRY(vlai_config_tokenizer(c, &t->tok, err));
    VLA_TRY(vlai_config_contract(c, t->tok, &t->contract, err));
    t->contract_made = true;
    t->flow = vlai_config_flow_time(c);
    if (c->data.padding == VLAI_PADDING_REFERENCE)
        VLA_TRY(vlai_sampler_create(&t->contract, t->tok, &t->collator, err));
    VLA_TRY(open_model(t, err));
    VLA_TRY(vlai_wallx_check_pictures(&t->model, &t->contract.image, err));
    VLA_TRY(open_set(t, err));
    VLA_TRY(open_cache(t, err));
    VLA_TRY(make_split(t, err));
    VLA_TRY(write_contract(t, err));
    VLA_TRY(list_files(t, err));
    VLA_TRY(make_options(t, err));
    VLA_TRY(name_channels(t, err));
    VLA_TRY(vlai_text_status(&t->notes, err));
    static const char *const parts[] = {"flow_loss", "cross_entropy_loss", NULL};
    static const vla_norm norms[] = {{"visual_param_norm", "visual"}, {"action_expert_param_norm", "action"}, {"org_vlm_param_norm", ""}, {NULL, NULL}};
    t->setup.model = (vla_model){.size = sizeof(vla_model), .user = t, .shape_size = sizeof(vlai_wallx_shape), .parts = parts,
                                 .channels = t->channels, .norms = norms, .params = params, .init = init, .shape = shape_of, .build = build, .fill = fill,
                                 .blame = t->contract.discrete ? NULL : blame, /* losses of tokens are not told apart */
                                 .weight = weight, .frozen = is_frozen};
    t->setup.samples = samples_of(&t->train);
    t->setup.validation = samples_of(&t->held);
    t->setup.contract = &t->contract;
    t->setup.config = &t->model;
    t->setup.set = t->set;
    t->setup.notes = t->notes.data ? t->notes.data : "";
    return VLA_OK;
}

vla_status vlai_wallx_task_open(const vlai_config *config, vlai_wallx_task **out, vla_error *err)
{
    *out = NULL;
    vlai_wallx_task *t = vlai_calloc(1, sizeof *t);
    if (!t)
        return vlai_nomem(err, sizeof *t);
    t->config = config;
    vla_status status = open_task(t, err);
    if (status != VLA_OK) {
        vlai_wallx_task_close(t);
        return status;
    }
    *out = t;
    return VLA_OK;
}

void vlai_wallx_task_close(vlai_wallx_task *t)
{
    if (!t)
        return;
    vlai_wallx_assembly_fini(&t->assembly);
    vlai_sampler_destroy(t->collator);
    vlai_order_destroy(t->train.order);
    vlai_order_destroy(t->held.order);
    vlai_frame_cache_close(t->cache);
    vla_dataset_close(t->set);
    if (t->contract_made)
        vlai_contract_fini(&t->contract);
    vlai_tokenizer_close(t->tok);
    vlai_free(t->held_episodes);
    vlai_free(t->groups);
    vlai_free(t->frozen);
    vlai_free(t->config_text);
    vlai_text_fini(&t->notes);
    vlai_text_fini(&t->contract_text);
    vlai_arena_fini(&t->strings);
    vlai_free(t);
}
