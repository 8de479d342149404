#include "train/wallx_batch.h"

#include "base/fail.h"
#include "base/memory.h"

#include <string.h>

typedef struct {
    int64_t tokens, images, samples, horizon, action_dim, state_dim;
} sizes;

static sizes measure(const vlai_wallx_assembly *a, const vlai_contract *c, void *const *slots, int64_t count)
{
    sizes s = {.samples = count, .horizon = c->horizon, .action_dim = vlai_contract_action_width(c),
               .state_dim = vlai_contract_state_width(c)};
    for (int64_t i = 0; i < count; i++) {
        const vlai_sample *sample = &((const vlai_wallx_slot *)slots[i])->sample;
        s.tokens += a->padded.rows ? a->padded.width : (int64_t)sample->ids.count;
        s.images += (int64_t)sample->picture_count;
    }
    return s;
}

/* Lays out one array after another in the buffer; with base NULL it only counts. */
static void *carve(char *base, size_t *at, size_t count, size_t size)
{
    void *p = base ? base + *at : NULL;
    *at += (count * size + 63) & ~(size_t)63;
    return p;
}

typedef struct {
    int64_t *offset;
    int32_t *ids, *labels, *grid;
    uint8_t *real;
    const uint8_t **pixels;
    float *action, *dof_mask, *loss_mask, *noise, *time, *state, *state_mask;
} arrays;

static size_t lay_out(char *base, const sizes *s, arrays *a)
{
    size_t at = 0, chunk = (size_t)(s->samples * s->horizon * s->action_dim), states = (size_t)(s->samples * s->state_dim);
    a->offset = carve(base, &at, (size_t)s->samples + 1, sizeof *a->offset);
    a->pixels = carve(base, &at, (size_t)s->images + 1, sizeof *a->pixels);
    a->ids = carve(base, &at, (size_t)s->tokens, sizeof *a->ids);
    a->labels = carve(base, &at, (size_t)s->tokens, sizeof *a->labels);
    a->grid = carve(base, &at, 3 * (size_t)s->images + 1, sizeof *a->grid);
    a->action = carve(base, &at, chunk, sizeof(float));
    a->dof_mask = carve(base, &at, chunk, sizeof(float));
    a->loss_mask = carve(base, &at, (size_t)(s->samples * s->horizon), sizeof(float));
    a->noise = carve(base, &at, chunk, sizeof(float));
    a->time = carve(base, &at, (size_t)s->samples, sizeof(float));
    a->state = carve(base, &at, states, sizeof(float));
    a->state_mask = carve(base, &at, states, sizeof(float));
    a->real = carve(base, &at, (size_t)s->tokens, 1);
    return at;
}

static vla_status pad_tokens(vlai_wallx_assembly *a, const vlai_sampler *sampler, void *const *slots, int64_t count, vla_error *err)
{
    if ((size_t)count > a->sample_capacity) {
        vlai_free(a->samples);
        a->sample_capacity = 0;
        a->samples = vlai_array((size_t)count, sizeof *a->samples);
        if (!a->samples)
            return vlai_nomem(err, (size_t)count * sizeof *a->samples);
        a->sample_capacity = (size_t)count;
    }
    for (int64_t i = 0; i < count; i++)
        a->samples[i] = &((const vlai_wallx_slot *)slots[i])->sample;
    vlai_token_batch_fini(&a->padded);
    return vlai_sampler_collate(sampler, a->samples, (size_t)count, &a->padded, err);
}

static void put_sample(const vlai_wallx_assembly *a, const sizes *s, const arrays *to, const vlai_wallx_slot *slot, int64_t i,
                       int64_t *image)
{
    const vlai_sample *sample = &slot->sample;
    size_t chunk = (size_t)(s->horizon * s->action_dim), states = (size_t)s->state_dim;
    int64_t first = to->offset[i];
    if (a->padded.rows) {
        for (int64_t k = 0; k < a->padded.width; k++) {
            to->ids[first + k] = (int32_t)a->padded.input_ids[i * a->padded.width + k];
            to->real[first + k] = a->padded.attention_mask[i * a->padded.width + k] != 0;
            to->labels[first + k] = a->padded.labels ? (int32_t)a->padded.labels[i * a->padded.width + k] : -100;
        }
        to->offset[i + 1] = first + a->padded.width;
    } else {
        memcpy(to->ids + first, sample->ids.data, sample->ids.count * sizeof *to->ids);
        for (size_t k = 0; k < sample->ids.count; k++)
            to->labels[first + (int64_t)k] = sample->discrete ? (int32_t)sample->labels[k] : -100;
        to->offset[i + 1] = first + (int64_t)sample->ids.count;
    }
    for (size_t k = 0; k < sample->picture_count; k++, ++*image) {
        to->pixels[*image] = sample->pixels + sample->pictures[k].offset;
        for (int d = 0; d < 3; d++)
            to->grid[3 * *image + d] = (int32_t)sample->pictures[k].grid[d];
    }
    memcpy(to->action + (size_t)i * chunk, sample->action, chunk * sizeof(float));
    memcpy(to->dof_mask + (size_t)i * chunk, sample->dof_mask, chunk * sizeof(float));
    memcpy(to->loss_mask + i * s->horizon, sample->loss_mask, (size_t)s->horizon * sizeof(float));
    memcpy(to->noise + (size_t)i * chunk, slot->noise, chunk * sizeof(float));
    memcpy(to->state + (size_t)i * states, sample->state, states * sizeof(float));
    memcpy(to->state_mask + (size_t)i * states, sample->state_mask, states * sizeof(float));
    to->time[i] = slot->time;
}

vla_status vlai_wallx_check_pictures(const vlai_wallx_config *config, const vlai_image_processor *image, vla_error *err)
{
    static const char hint[] = "model.processor_path and model.config_path must belong to one model";
    const struct {
        const char *name;
        int64_t cut, taken;
    } rows[] = {{"patch_size", image->patch, config->vision.patch_size},
                {"temporal_patch_size", image->temporal, config->vision.temporal_patch_size},
                {"merge_size", image->merge, config->vision.spatial_merge_size},
                {"channels of a picture", 3, config->vision.in_channels}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].cut != rows[i].taken)
            return vlai_fail_hint(err, VLA_E_INVALID, hint, "%s: the processor has %lld, the architecture's vision_config %lld", rows[i].name,
                                  (long long)rows[i].cut, (long long)rows[i].taken);
    return VLA_OK;
}

vla_status vlai_wallx_assemble(vlai_wallx_assembly *a, const vlai_contract *contract, const vlai_sampler *sampler,
                               void *const *slots, int64_t count, vla_error *err)
{
    if (sampler)
        VLA_TRY(pad_tokens(a, sampler, slots, count, err));
    sizes s = measure(a, contract, slots, count);
    arrays to;
    size_t bytes = lay_out(NULL, &s, &to);
    if (bytes > a->capacity) {
        vlai_free(a->buffer);
        a->capacity = 0;
        size_t room = bytes + bytes / 4; /* the lengths of texts vary a little from batch to batch */
        a->buffer = vlai_alloc_aligned(room, 64);
        if (!a->buffer)
            return vlai_nomem(err, room);
        a->capacity = room;
    }
    lay_out(a->buffer, &s, &to);
    int64_t image = 0;
    to.offset[0] = 0;
    for (int64_t i = 0; i < count; i++)
        put_sample(a, &s, &to, slots[i], i, &image);
    for (int d = 0; d < 3; d++) {
        a->mean[d] = (float)contract->image.mean[d];
        a->std[d] = (float)contract->image.std[d];
    }
    a->batch = (vlai_wallx_batch){
        .samples = count,
        .offset = to.offset,
        .ids = to.ids,
        .real = sampler ? to.real : NULL,
        .labels = contract->discrete ? to.labels : NULL,
        .images = s.images,
        .grid = to.grid,
        .pixels = to.pixels,
        .mean = a->mean,
        .std = a->std,
        .horizon = s.horizon,
        .action = to.action,
        .dof_mask = to.dof_mask,
        .flow_loss_mask = contract->mask_padded ? to.loss_mask : NULL,
        .noise = to.noise,
        .time = to.time,
        .state = to.state,
        .state_mask = to.state_mask,
        .scratch = &a->scratch,
    };
    return VLA_OK;
}

void vlai_wallx_assembly_fini(vlai_wallx_assembly *a)
{
    vlai_free(a->buffer);
    vlai_free(a->samples);
    vlai_free(a->scratch.data);
    vlai_token_batch_fini(&a->padded);
    *a = (vlai_wallx_assembly){0};
}
