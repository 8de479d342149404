/* Sampling the frames in batches, and the sums of the errors. */
#include "train/predict_internal.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/time.h"
#include "train/wallx_batch.h"

#include <math.h>
#include <string.h>

typedef struct group {
    vlai_wallx_slot *slots;
    void **pointers;
    int64_t count, made; /* filled now, with buffers */
    float *noise, *drawn; /* of all slots; what the sampler returns */
    vlai_wallx_assembly assembly;
} group;

static void group_fini(group *g)
{
    for (int64_t i = 0; i < g->made; i++)
        vlai_sample_fini(&g->slots[i].sample);
    vlai_free(g->slots);
    vlai_free(g->pointers);
    vlai_free(g->noise);
    vlai_free(g->drawn);
    vlai_wallx_assembly_fini(&g->assembly);
}

static vla_status group_make(group *g, int64_t size, size_t chunk, vla_error *err)
{
    g->slots = vlai_calloc((size_t)size, sizeof *g->slots);
    g->pointers = vlai_calloc((size_t)size, sizeof *g->pointers);
    g->noise = vlai_array((size_t)size, chunk * sizeof(float));
    g->drawn = vlai_array((size_t)size, chunk * sizeof(float));
    if (!g->slots || !g->pointers || !g->noise || !g->drawn)
        return vlai_nomem(err, (size_t)size * (sizeof *g->slots + 2 * chunk * sizeof(float)));
    for (; g->made < size; g->made++) {
        g->slots[g->made].noise = g->noise + (size_t)g->made * chunk;
        g->pointers[g->made] = &g->slots[g->made];
    }
    return VLA_OK;
}

/* The row of the partner episode that stands at the same frame, or its last. */
static int64_t partner_row(const vlai_predict *p, const vlai_predict_frame *f)
{
    for (int64_t i = 0; i < p->result.episode_count && f->partner >= 0; i++)
        if (p->numbers[i] == f->partner) {
            const vla_episode *e = vla_dataset_episode(p->set, p->episodes[i]);
            return e->first_row + (f->frame < e->length ? f->frame : e->length - 1);
        }
    return f->row;
}

static vla_status read_slot(vlai_predict *p, const vlai_predict_frame *f, vlai_wallx_slot *slot, vla_error *err)
{
    int64_t other = partner_row(p, f);
    bool images = p->options.swap == VLAI_SWAP_IMAGES, words = p->options.swap == VLAI_SWAP_INSTRUCTIONS;
    VLA_TRY(vlai_feed_observe(p->feed, f->row, images ? other : f->row, words ? other : f->row, &slot->sample, err));
    vlai_rng_key key = {p->options.seed, VLAI_RNG_PREDICT,
                        (uint64_t)p->numbers[f->episode] << 32 | (uint64_t)f->frame, 0};
    vlai_rng_normal(&key, 0, (size_t)(slot->sample.horizon * slot->sample.action_width), slot->noise);
    return VLA_OK;
}

/* The most tokens that a chunk can have (two bytes of text a value, and the end), as far as data.max_length has room for them. */
static int64_t most_tokens(const vlai_predict *p, const vlai_wallx_batch *b)
{
    int64_t most = 2 * p->contract.horizon * p->model_columns + 1, longest = 0;
    for (int64_t s = 0; s < b->samples; s++)
        longest = b->offset[s + 1] - b->offset[s] > longest ? b->offset[s + 1] - b->offset[s] : longest;
    int64_t room = p->contract.max_length - longest;
    most = p->contract.max_length > 0 && room < most ? room : most;
    return most > 0 ? most : 1;
}

/* Numbers of the action tokens among `n` ids, in place. */
static size_t action_tokens(const vlai_predict *p, int32_t *ids, int64_t n)
{
    size_t count = 0;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] >= p->first_action_token && ids[i] < p->first_action_token + vlai_fast_vocabulary(p->contract.fast))
            ids[count++] = ids[i] - p->first_action_token;
    return count;
}

/* The group's chunks from the tokens that the model writes. */
static vla_status write_group(vlai_predict *p, group *g, vla_error *err)
{
    const vlai_wallx_batch *b = &g->assembly.batch;
    int64_t width = vlai_contract_action_width(&p->contract), horizon = p->contract.horizon, dims = p->model_columns, most = most_tokens(p, b);
    int32_t *ids = vlai_array((size_t)(g->count * most), sizeof *ids);
    int64_t *count = vlai_array((size_t)g->count, sizeof *count);
    float *chunk = vlai_array((size_t)(horizon * dims), sizeof *chunk);
    vla_status status = ids && count && chunk ? VLA_OK : vlai_nomem(err, (size_t)(g->count * most) * sizeof *ids);
    if (status == VLA_OK)
        status = vlai_wallx_write(p->writer, &p->tokens, b, p->end, most, ids, count, err);
    memset(g->drawn, 0, (size_t)(g->count * horizon * width) * sizeof *g->drawn);
    for (int64_t k = 0; k < g->count && status == VLA_OK; k++) {
        bool whole;
        size_t n = action_tokens(p, ids + k * most, count[k]);
        status = vlai_fast_decode(p->contract.fast, ids + k * most, n, horizon, dims, chunk, &whole, err);
        if (status == VLA_OK)
            p->result.unreadable += !whole;
        for (int64_t h = 0; h < horizon && status == VLA_OK; h++) /* the data set's columns stand first */
            memcpy(g->drawn + (k * horizon + h) * width, chunk + h * dims, (size_t)dims * sizeof *chunk);
    }
    vlai_free(ids);
    vlai_free(count);
    vlai_free(chunk);
    return status;
}

/* Samples the group and brings the actions to the data set's units. */
static vla_status sample_group(vlai_predict *p, group *g, int64_t first, vla_error *err)
{
    const vlai_contract *c = &p->contract;
    const vlai_predict_result *r = &p->result;
    int64_t width = vlai_contract_action_width(c), chunk = r->horizon * width;
    VLA_TRY(vlai_wallx_assemble(&g->assembly, c, p->pads && !p->writer ? vlai_feed_sampler(p->feed) : NULL, g->pointers, g->count, err));
    float *padding = vlai_calloc((size_t)width, sizeof *padding); /* columns without data are driven to zero */
    if (!padding)
        return vlai_nomem(err, (size_t)width * sizeof *padding);
    vlai_wallx_sample_options o = {.steps = p->options.steps, .cache = true, .padding_action = padding};
    vla_status status = p->writer ? write_group(p, g, err) : vlai_wallx_sample(p->sampler, &p->tokens, &g->assembly.batch, &o, g->drawn, err);
    for (int64_t k = 0; status == VLA_OK && k < g->count; k++) {
        float *to = p->chunks + 2 * (size_t)(first + k) * (size_t)(r->horizon * r->columns);
        for (int64_t h = 0; h < r->horizon; h++) {
            const float *drawn = g->drawn + k * chunk + h * width;
            const vlai_predict_frame *f = &r->frames[first + k];
            for (int64_t i = 0; i < p->model_columns && status == VLA_OK; i++)
                if (!isfinite(drawn[i]))
                    status = vlai_fail(err, VLA_E_NONFINITE, "the prediction of episode %lld, frame %lld is not finite (column %lld, step %lld)",
                                       (long long)p->numbers[f->episode], (long long)f->frame, (long long)i, (long long)h);
            if (status == VLA_OK)
                status = vlai_predict_back(p, drawn, f->row, to + h * r->columns, err);
        }
    }
    vlai_free(padding);
    return status;
}

static void read_recorded(vlai_predict *p, int64_t at)
{
    const vlai_predict_result *r = &p->result;
    const vlai_predict_frame *f = &r->frames[at];
    float *to = p->chunks + (2 * (size_t)at + 1) * (size_t)(r->horizon * r->columns);
    memcpy(to, p->actions + f->row * r->columns, (size_t)(f->known * r->columns) * sizeof *to);
}

/* ---- sums ---- */

static void add(vlai_predict_error *e, double difference, double of_mean, double scale)
{
    e->l1 += fabs(difference) * scale;
    e->mse += difference * difference * scale * scale;
    e->mean_l1 += fabs(of_mean) * scale;
    e->mean_mse += of_mean * of_mean * scale * scale;
    e->count++;
}

static void finish(vlai_predict_error *e)
{
    double n = e->count ? (double)e->count : 1;
    e->l1 /= n;
    e->mse /= n;
    e->mean_l1 /= n;
    e->mean_mse /= n;
}

/* Of an angle: the shorter way around. */
static double apart(const vlai_predict *p, int64_t column, double a, double b)
{
    const double turn = 6.283185307179586;
    double d = a - b;
    return p->angle[column] ? d - turn * rint(d / turn) : d;
}

static void sum_up(vlai_predict *p)
{
    vlai_predict_result *r = &p->result;
    for (int64_t k = 0; k < r->frame_count; k++) {
        const vlai_predict_frame *f = &r->frames[k];
        for (int64_t h = 0; h < f->known; h++)
            for (int64_t i = 0; i < r->columns; i++) {
                double recorded = f->recorded[h * r->columns + i];
                double difference = apart(p, i, f->predicted[h * r->columns + i], recorded);
                double of_mean = apart(p, i, p->mean[i], recorded);
                add(&r->dims[i], difference, of_mean, 1);
                add(&r->steps[h], difference, of_mean, 1);
                add(&r->episodes[f->episode], difference, of_mean, 1);
                add(&r->all, difference, of_mean, 1);
                if (p->unit[i] > 0)
                    add(&r->unit, difference, of_mean, p->unit[i]);
            }
    }
    for (int64_t i = 0; i < r->columns; i++)
        finish(&r->dims[i]);
    for (int64_t h = 0; h < r->horizon; h++)
        finish(&r->steps[h]);
    for (int64_t e = 0; e < r->episode_count; e++)
        finish(&r->episodes[e]);
    finish(&r->all);
    finish(&r->unit);
}

vla_status vlai_predict_run(vlai_predict *p, vla_error *err)
{
    vlai_predict_result *r = &p->result;
    double began = vlai_now();
    group g = {0};
    int64_t size = p->options.batch < r->frame_count ? p->options.batch : r->frame_count;
    size_t chunk = (size_t)(r->horizon * vlai_contract_action_width(&p->contract));
    vla_status status = group_make(&g, size, chunk, err);
    for (int64_t first = 0; status == VLA_OK && first < r->frame_count; first += g.count) {
        for (g.count = 0; status == VLA_OK && g.count < size && first + g.count < r->frame_count; g.count++) {
            status = read_slot(p, &r->frames[first + g.count], &g.slots[g.count], err);
            read_recorded(p, first + g.count);
        }
        if (status == VLA_OK)
            status = sample_group(p, &g, first, err);
        if (status == VLA_OK && p->options.progress)
            p->options.progress(p->options.user, first + g.count, r->frame_count);
    }
    group_fini(&g);
    VLA_TRY(status);
    sum_up(p);
    r->seconds = vlai_now() - began;
    return VLA_OK;
}
