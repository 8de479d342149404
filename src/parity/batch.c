/* Golden cases of whole batches: YAML and data set through the reader, both splits, the order, the contract and the sampler
 * that training uses, to what the reference's collator returned. */
#include "parity/parity.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "data/feed.h"
#include "data/order.h"
#include "train/contract_config.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 1024 };

typedef struct batch_case {
    vlai_config *config;
    vlai_tokenizer *tok;
    vlai_contract contract;
    vla_dataset *set;
    vlai_feed *feed;
    vlai_safetensors *in, *want;
    int64_t *episodes; /* that train */
    size_t episode_count;
    int64_t *split, train; /* rows permuted; the first `train` of them train */
    int64_t rows, world, rank;
    vlai_order *order;
} batch_case;

/* A quoted YAML value of an override: names in the file are relative to the golden folder or the case. */
static vla_status override_path(const vlai_parity_case *c, const char *key, const char *name, char *out, size_t size,
                                vla_error *err)
{
    char path[4096], quoted[4096];
    VLA_TRY(vlai_parity_path(c, name, path, sizeof path, err));
    size_t n = 0;
    for (const char *p = path; *p && n + 3 < sizeof quoted; p++) {
        if (*p == '\'')
            quoted[n++] = '\'';
        quoted[n++] = *p;
    }
    quoted[n] = 0;
    int used = snprintf(out, size, "%s='%s'", key, quoted);
    if (used < 0 || (size_t)used >= size)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", name);
    return VLA_OK;
}

static vla_status load_config(const vlai_parity_case *c, batch_case *b, vla_error *err)
{
    const char *file, *set;
    char path[4096], lines[3][4200];
    const json_t *options = json_object_get(c->meta, "options");
    VLA_TRY(vlai_json_string(options, "config", "config.yml", "case.json", &file, err));
    VLA_TRY(vlai_parity_path(c, file, path, sizeof path, err));
    VLA_TRY(vlai_config_load(path, NULL, 0, &b->config, err));
    VLA_TRY(vlai_json_string(options, "dataset", b->config->lerobot.repo_id, "case.json", &set, err));
    if (!set || !b->config->model.processor_path || !b->config->data.norm_stats_path)
        return vlai_fail(err, VLA_E_INVALID, "%s: a batch needs a data set, a processor and statistics", path);
    VLA_TRY(override_path(c, "data.lerobot_config.repo_id", set, lines[0], sizeof lines[0], err));
    VLA_TRY(override_path(c, "model.processor_path", b->config->model.processor_path, lines[1], sizeof lines[1], err));
    VLA_TRY(override_path(c, "data.norm_stats_path", b->config->data.norm_stats_path, lines[2], sizeof lines[2], err));
    vlai_config_destroy(b->config);
    b->config = NULL;
    const char *overrides[] = {lines[0], lines[1], lines[2]};
    return vlai_config_load(path, overrides, 3, &b->config, err);
}

/* The first share of the episodes, in the order of the list, trains; the rest is not used. */
static vla_status choose_episodes(const batch_case *b, const char *root, int64_t **out, size_t *count, vla_error *err)
{
    vla_dataset *all;
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    options.flags = VLA_DATASET_NO_CACHE;
    VLA_TRY(vla_dataset_open(root, &options, &all, err));
    int64_t total = vla_dataset_info_get(all)->total_episodes;
    vla_dataset_close(all);
    size_t listed = b->config->lerobot.episodes.count, n = listed ? listed : (size_t)total;
    *count = (size_t)floor((double)n * b->config->data.train_test_split);
    if (!*count)
        return vlai_fail(err, VLA_E_INVALID, "train_test_split %g of %zu episodes yields 0 train episodes",
                         b->config->data.train_test_split, n);
    *out = vlai_array(*count, sizeof **out);
    if (!*out)
        return vlai_nomem(err, *count * sizeof **out);
    for (size_t i = 0; i < *count; i++)
        (*out)[i] = listed ? (int64_t)b->config->lerobot.episodes.values[i] : (int64_t)i;
    return VLA_OK;
}

static vla_status prepare(vlai_parity_case *c, batch_case *b, vla_error *err)
{
    const json_t *options = json_object_get(c->meta, "options");
    char root[4096];
    VLA_TRY(load_config(c, b, err));
    VLA_TRY(vlai_json_int(options, "world", 1, "case.json", &b->world, err));
    VLA_TRY(vlai_json_int(options, "rank", 0, "case.json", &b->rank, err));
    if (b->world < 1 || b->rank < 0 || b->rank >= b->world)
        return vlai_fail(err, VLA_E_INVALID, "case.json: rank %lld of %lld", (long long)b->rank, (long long)b->world);
    VLA_TRY(vlai_config_dataset(b->config, root, sizeof root, err));
    VLA_TRY(vlai_config_tokenizer(b->config, &b->tok, err));
    VLA_TRY(vlai_config_contract(b->config, b->tok, &b->contract, err));
    b->contract.truncate = b->contract.feature_order = true; /* as the reference does */
    VLA_TRY(choose_episodes(b, root, &b->episodes, &b->episode_count, err));
    vla_dataset_options open = VLA_DATASET_OPTIONS_DEFAULT;
    open.episodes = b->episodes;
    open.episode_count = b->episode_count;
    open.flags = VLA_DATASET_NO_CACHE;
    VLA_TRY(vla_dataset_open(root, &open, &b->set, err));
    VLA_TRY(vlai_feed_create(b->set, &b->contract, b->tok, &b->feed, err));
    b->rows = vla_dataset_info_get(b->set)->rows;
    b->split = vlai_array((size_t)b->rows, sizeof *b->split);
    if (!b->split)
        return vlai_nomem(err, (size_t)b->rows * sizeof *b->split);
    uint64_t seed = (uint64_t)b->config->hyperparams.seed;
    VLA_TRY(vlai_order_split(b->rows, seed, b->split, &b->train, err));
    VLA_TRY(vlai_order_create(b->split, b->train, seed, true, &b->order, err));
    VLA_TRY(vlai_parity_open(c, "inputs.safetensors", &b->in, err));
    return vlai_parity_open(c, "outputs.safetensors", &b->want, err);
}

static void report_count(vlai_parity_case *c, const char *name, int64_t got)
{
    const json_t *want = json_object_get(json_object_get(c->meta, "options"), name);
    if (want)
        vlai_parity_report(c, name, name, json_integer_value(want) == got ? 0 : 1, 0);
}

/* What the case says about the run as a whole. */
static void compare_counts(vlai_parity_case *c, const batch_case *b)
{
    int64_t train = vlai_order_per_rank(b->train, b->world, true) / b->config->hyperparams.batch_size_per_gpu;
    int64_t batch = b->config->top.eval_batch_size_per_gpu;
    int64_t validation = (vlai_order_per_rank(b->rows - b->train, b->world, false) + batch - 1) / batch;
    report_count(c, "train_batches", train);
    report_count(c, "val_batches", validation);
    const json_t *want = json_object_get(json_object_get(c->meta, "options"), "train_episodes");
    if (!want)
        return;
    double wrong = json_array_size(want) == b->episode_count ? 0 : 1;
    for (size_t i = 0; i < b->episode_count && i < json_array_size(want); i++)
        wrong += json_integer_value(json_array_get(want, i)) != b->episodes[i];
    vlai_parity_report(c, "train_episodes", "train_episodes", wrong, 0);
}

/* Rows of batch `name`: "train3" = fourth of its epoch, "val0" = first of the validation. */
static vla_status batch_rows(const batch_case *b, const json_t *entry, const char *name, int64_t *rows, int64_t *count,
                             vla_error *err)
{
    bool train = !strncmp(name, "train", 5);
    const char *digits = name + (train ? 5 : 3);
    if ((!train && strncmp(name, "val", 3)) || !isdigit((unsigned char)*digits))
        return vlai_fail(err, VLA_E_FORMAT, "case.json: batch '%s' is neither trainN nor valN", name);
    int64_t number = strtoll(digits, NULL, 10), epoch, validation = b->rows - b->train;
    VLA_TRY(vlai_json_int(entry, "epoch", 0, "case.json", &epoch, err));
    int64_t size = train ? b->config->hyperparams.batch_size_per_gpu : b->config->top.eval_batch_size_per_gpu;
    int64_t end = vlai_order_per_rank(train ? b->train : validation, b->world, train);
    *count = 0;
    for (int64_t i = number * size; i < (number + 1) * size && i < end && *count < MAX_ROWS; i++) {
        int64_t place = vlai_order_place(i, b->rank, b->world);
        if (train)
            VLA_TRY(vlai_order_at(b->order, epoch, place, &rows[*count], err));
        else
            rows[*count] = b->split[b->train + place % validation];
        (*count)++;
    }
    if (train && *count < size)
        *count = 0; /* incomplete training batches are dropped */
    return *count ? VLA_OK : vlai_fail(err, VLA_E_NOT_FOUND, "there is no batch '%s'", name);
}

static vla_status compare_tensor(vlai_parity_case *c, const batch_case *b, const char *batch, const char *field,
                                 const float *got, int64_t n, vla_error *err)
{
    char name[160];
    snprintf(name, sizeof name, "%s.%s", batch, field);
    const vlai_tensor_view *t = vlai_safetensors_find(b->want, name);
    if (!t)
        return VLA_OK;
    double error = INFINITY;
    if (got && t->elements == n) {
        float *want = vlai_array(n ? (size_t)n : 1, sizeof *want);
        if (!want)
            return vlai_nomem(err, (size_t)n * sizeof *want);
        vla_status status = vlai_tensor_to_float(t, 0, n, want, err);
        if (status == VLA_OK)
            error = vlai_parity_max_abs(got, want, n);
        vlai_free(want);
        VLA_TRY(status);
    }
    vlai_parity_report(c, field, name, error, vlai_parity_bound(c, field));
    return VLA_OK;
}

static vla_status compare_whole(vlai_parity_case *c, const batch_case *b, const char *batch, const char *field,
                                const int64_t *got, int64_t n, vla_error *err)
{
    char name[160];
    snprintf(name, sizeof name, "%s.%s", batch, field);
    return vlai_parity_integers(c, field, name, vlai_safetensors_find(b->want, name), got, n, strcmp(field, "labels") != 0, err);
}

/* Float fields of all samples, one after the other. `patches` are made here from the resized pictures. */
static vla_status compare_numbers(vlai_parity_case *c, const batch_case *b, const char *batch, vlai_sample *samples,
                                  int64_t count, vla_error *err)
{
    static const char *const fields[] = {"proprioception", "agent_pos_mask", "action_chunk", "dof_mask", "pixel_values"};
    const vlai_image_processor *p = &b->contract.image;
    for (int f = 0; f < 5; f++) {
        int64_t n = 0, at = 0, states = samples[0].state_width, actions = samples[0].horizon * samples[0].action_width;
        for (int64_t i = 0; i < count; i++)
            n += f < 2 ? states : f < 4 ? actions : samples[i].patches * vlai_patch_width(p);
        float *got = vlai_array(n ? (size_t)n : 1, sizeof *got);
        if (!got)
            return vlai_nomem(err, (size_t)n * sizeof *got);
        for (int64_t i = 0; i < count; i++) {
            const vlai_sample *s = &samples[i];
            const float *from[] = {s->state, s->state_mask, s->action, s->dof_mask};
            if (f < 4) {
                memcpy(got + at, from[f], (size_t)(f < 2 ? states : actions) * sizeof *got);
                at += f < 2 ? states : actions;
                continue;
            }
            for (size_t k = 0; k < s->picture_count; k++) {
                const vlai_sample_picture *q = &s->pictures[k];
                vlai_patchify(p, s->pixels + q->offset, q->width, q->height, got + at);
                at += q->grid[1] * q->grid[2] * vlai_patch_width(p);
            }
        }
        vla_status status = compare_tensor(c, b, batch, fields[f], got, n, err);
        vlai_free(got);
        VLA_TRY(status);
    }
    return VLA_OK;
}

static vla_status compare_tokens(vlai_parity_case *c, const batch_case *b, const char *batch, vlai_sample *samples,
                                 int64_t count, vla_error *err)
{
    const vlai_sample *pointers[MAX_ROWS];
    int64_t frames[MAX_ROWS], *grids = vlai_array((size_t)count * VLAI_MAX_CAMERAS * 3, sizeof *grids), grid_count = 0;
    int64_t *types = NULL;
    vlai_token_batch tokens = {0};
    vla_status status = grids ? VLA_OK : vlai_nomem(err, (size_t)count * VLAI_MAX_CAMERAS * 24);
    if (status != VLA_OK)
        return status;
    for (int64_t i = 0; i < count; i++) {
        pointers[i] = &samples[i];
        frames[i] = samples[i].frame;
        for (size_t k = 0; k < samples[i].picture_count; k++)
            for (int d = 0; d < 3; d++)
                grids[grid_count++] = samples[i].pictures[k].grid[d];
    }
    VLA_TRY_GOTO(vlai_sampler_collate(vlai_feed_sampler(b->feed), pointers, (size_t)count, &tokens, err), done);
    int64_t n = tokens.rows * tokens.width;
    types = vlai_array((size_t)n + 1, sizeof *types);
    if (!types) {
        status = vlai_nomem(err, (size_t)n * sizeof *types);
        goto done;
    }
    for (int64_t i = 0; i < n; i++)
        types[i] = tokens.moe_token_types[i];
    VLA_TRY_GOTO(compare_whole(c, b, batch, "input_ids", tokens.input_ids, n, err), done);
    VLA_TRY_GOTO(compare_whole(c, b, batch, "attention_mask", tokens.attention_mask, n, err), done);
    VLA_TRY_GOTO(compare_whole(c, b, batch, "labels", tokens.labels, n, err), done);
    VLA_TRY_GOTO(compare_whole(c, b, batch, "moe_token_types", types, n, err), done);
    VLA_TRY_GOTO(compare_whole(c, b, batch, "image_grid_thw", grids, grid_count, err), done);
    VLA_TRY_GOTO(compare_whole(c, b, batch, "frame_index", frames, count, err), done);
done:
    vlai_free(grids);
    vlai_free(types);
    vlai_token_batch_fini(&tokens);
    return status;
}

static vla_status compare_times(vlai_parity_case *c, const batch_case *b, const char *batch, vla_error *err)
{
    char name[160];
    snprintf(name, sizeof name, "%s.draw", batch);
    const vlai_tensor_view *t = vlai_safetensors_find(b->in, name);
    if (!t)
        return VLA_OK;
    float u[MAX_ROWS];
    if (t->elements > MAX_ROWS)
        return vlai_fail(err, VLA_E_SHAPE, "'%s' has %lld draws", name, (long long)t->elements);
    VLA_TRY(vlai_tensor_to_float(t, 0, t->elements, u, err));
    vlai_flow_time rule = vlai_config_flow_time(b->config);
    for (int64_t i = 0; i < t->elements; i++)
        u[i] = vlai_flow_time_map(&rule, u[i]);
    return compare_tensor(c, b, batch, "sample_time", u, t->elements, err);
}

static vla_status compare_batch(vlai_parity_case *c, batch_case *b, const json_t *entry, vla_error *err)
{
    const char *batch;
    int64_t rows[MAX_ROWS], count;
    VLA_TRY(vlai_json_string(entry, "batch", "", "case.json", &batch, err));
    VLA_TRY(batch_rows(b, entry, batch, rows, &count, err));
    const json_t *want = json_object_get(entry, "rows"), *pairs = json_object_get(entry, "episode_frame");
    double wrong = want && json_array_size(want) != (size_t)count;
    vlai_sample *samples = vlai_calloc((size_t)count, sizeof *samples);
    if (!samples)
        return vlai_nomem(err, (size_t)count * sizeof *samples);
    vla_status status = VLA_OK;
    for (int64_t i = 0; status == VLA_OK && i < count; i++) {
        status = vlai_feed_read(b->feed, rows[i], &samples[i], err);
        const json_t *pair = json_array_get(pairs, (size_t)i);
        wrong += want && json_integer_value(json_array_get(want, (size_t)i)) != rows[i];
        wrong += pair && (json_integer_value(json_array_get(pair, 0)) != samples[i].episode ||
                          json_integer_value(json_array_get(pair, 1)) != samples[i].frame);
    }
    if (status == VLA_OK) {
        vlai_parity_report(c, "rows", batch, wrong, 0);
        status = compare_tokens(c, b, batch, samples, count, err);
    }
    if (status == VLA_OK)
        status = compare_numbers(c, b, batch, samples, count, err);
    if (status == VLA_OK)
        status = compare_times(c, b, batch, err);
    for (int64_t i = 0; i < count; i++)
        vlai_sample_fini(&samples[i]);
    vlai_free(samples);
    return status;
}

vla_status vlai_parity_batch(vlai_parity_case *c, vla_error *err)
{
    batch_case b = {0};
    vla_status status = prepare(c, &b, err);
    size_t i;
    json_t *entry;
    if (status == VLA_OK) {
        compare_counts(c, &b);
        json_array_foreach(json_object_get(json_object_get(c->meta, "options"), "batches"), i, entry)
            if ((status = compare_batch(c, &b, entry, err)) != VLA_OK)
                break;
    }
    vlai_order_destroy(b.order);
    vlai_feed_destroy(b.feed);
    if (b.set)
        vla_dataset_close(b.set);
    vlai_contract_fini(&b.contract);
    vlai_tokenizer_close(b.tok);
    if (b.config)
        vlai_config_destroy(b.config);
    vlai_free(b.episodes);
    vlai_free(b.split);
    vlai_safetensors_close(b.in);
    vlai_safetensors_close(b.want);
    return status;
}
