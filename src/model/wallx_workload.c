#include "model/wallx_workload.h"

#include "base/bf16.h"
#include "base/fail.h"
#include "base/rng.h"
#include "model/wallx_flops.h"

#include <string.h>

/* Keys of one micro-batch: those of the first are 1 and 2. */
static uint64_t seed_of(const vlai_wallx_workload_options *o, uint64_t kind)
{
    return kind + 8 * (uint64_t)o->number;
}

static float *uniform(vlai_wallx_workload *w, const vlai_wallx_workload_options *o, int64_t n, uint32_t site, float low, float high)
{
    float *out = vlai_arena_alloc(&w->arena, (size_t)n * sizeof *out + 1);
    vlai_rng_key key = {.seed = seed_of(o, 1), .stream = VLAI_RNG_SYNTH, .site = site};
    for (int64_t i = 0; out && i < n; i++)
        out[i] = low + (high - low) * vlai_rng_uniform(&key, (uint32_t)i);
    return out;
}

static void fill_tokens(const vlai_wallx_config *c, const vlai_wallx_workload_options *o, int64_t units, const vlai_wallx_workload *w,
                        int64_t *offset, int32_t *ids)
{
    vlai_rng_key key = {.seed = seed_of(o, 2), .stream = VLAI_RNG_SYNTH};
    int64_t at = 0, words = c->vocab_size > 8 ? c->vocab_size / 2 : 1;
    for (int64_t s = 0; s < o->samples; s++) {
        offset[s] = at;
        for (int64_t i = 0; i < o->text; i++, at++) {
            int32_t id = (int32_t)(vlai_rng_u32(&key, (uint32_t)at) % (uint32_t)words);
            ids[at] = id == c->image_token_id ? id + 1 : id;
        }
        for (int64_t i = 0; i < o->pictures * units; i++)
            ids[at++] = (int32_t)c->image_token_id;
        for (int64_t i = 0; i < o->horizon; i++)
            ids[at++] = (int32_t)w->tokens.action;
    }
    offset[o->samples] = at;
}

vla_status vlai_wallx_workload_init(const vlai_wallx_config *c, const vlai_wallx_workload_options *o, vlai_wallx_workload *w, vla_error *err)
{
    static const float mean[3] = {0.48145466f, 0.4578275f, 0.40821073f}, std[3] = {0.26862954f, 0.26130258f, 0.27577711f};
    *w = (vlai_wallx_workload){.tokens = {c->vocab_size - 1, c->vocab_size - 2, -1}};
    int64_t unit = c->vision.patch_size * c->vision.spatial_merge_size, side = o->side / unit * unit;
    int64_t patches = side / c->vision.patch_size, units = side / unit * (side / unit), images = o->samples * o->pictures;
    if (side <= 0)
        return vlai_fail(err, VLA_E_INVALID, "pictures of %lld pixels: wanted at least %lld", (long long)o->side, (long long)unit);
    w->length = o->text + o->pictures * units + o->horizon;
    int64_t *offset = vlai_arena_alloc(&w->arena, (size_t)(o->samples + 1) * sizeof *offset);
    int32_t *ids = vlai_arena_alloc(&w->arena, (size_t)(o->samples * w->length) * sizeof *ids);
    int32_t *grid = vlai_arena_alloc(&w->arena, (size_t)images * 12 + 12);
    const uint8_t **pixels = vlai_arena_alloc(&w->arena, (size_t)images * sizeof *pixels + 8);
    uint8_t *picture = vlai_arena_alloc(&w->arena, (size_t)(side * side * 3));
    int64_t rows = o->samples * o->horizon * c->action_dim, states = o->samples * c->propri_dim;
    w->batch = (vlai_wallx_batch){.samples = o->samples, .horizon = o->horizon, .images = images, .offset = offset, .ids = ids, .grid = grid,
                                  .pixels = pixels, .mean = mean, .std = std,
                                  .action = uniform(w, o, rows, 1, -1, 1), .dof_mask = uniform(w, o, rows, 2, 1, 1), .noise = uniform(w, o, rows, 3, -1, 1),
                                  .time = uniform(w, o, o->samples, 4, 0, 1), .state = uniform(w, o, states, 5, -1, 1), .state_mask = uniform(w, o, states, 6, 1, 1)};
    if (!offset || !ids || !grid || !pixels || !picture || !w->batch.action || !w->batch.dof_mask || !w->batch.noise || !w->batch.time ||
        !w->batch.state || !w->batch.state_mask) {
        vlai_arena_fini(&w->arena);
        return vlai_nomem(err, (size_t)(o->samples * w->length) * sizeof *ids);
    }
    vlai_rng_key key = {.seed = seed_of(o, 2), .stream = VLAI_RNG_SYNTH, .site = 1};
    for (int64_t i = 0; i < side * side * 3; i++)
        picture[i] = (uint8_t)vlai_rng_u32(&key, (uint32_t)i);
    fill_tokens(c, o, units, w, offset, ids);
    for (int64_t i = 0; i < images; i++) {
        grid[3 * i] = 1;
        grid[3 * i + 1] = grid[3 * i + 2] = (int32_t)patches;
        pixels[i] = picture;
    }
    vlai_wallx_flops flops;
    vlai_wallx_flops_of(c, o->text, o->horizon, 0, o->pictures, grid, &flops);
    w->flops = flops.training;
    vla_status status = vlai_wallx_shape_of(c, &w->tokens, &w->batch, true, &w->shape, err);
    if (status != VLA_OK)
        vlai_arena_fini(&w->arena);
    return status;
}

void vlai_wallx_workload_fini(vlai_wallx_workload *w)
{
    vlai_arena_fini(&w->arena);
}

enum { POOL = 1 << 22, SHIFTS = 4096 /* of the pool: where a tensor begins in it */ };

/* values[POOL] as elements of the type. */
static void *convert(const float *values, vla_dtype dtype)
{
    char *out = vlai_array(POOL, vla_dtype_size(dtype));
    for (int64_t i = 0; out && i < POOL; i++)
        if (dtype == VLA_BF16)
            ((uint16_t *)(void *)out)[i] = vlai_bf16_from_float(values[i]);
        else if (dtype == VLA_F64)
            ((double *)(void *)out)[i] = (double)values[i];
        else
            ((float *)(void *)out)[i] = values[i];
    return out;
}

static vla_status write_tensor(vla_store *store, size_t index, const void *pool, int64_t shift, vla_error *err)
{
    vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, index);
    const char *from = (const char *)pool + (size_t)shift * vla_dtype_size(t.dtype);
    for (int64_t first = 0, n; first < t.elements; first += n) {
        n = t.elements - first < POOL - SHIFTS ? t.elements - first : POOL - SHIFTS;
        VLA_TRY(vla_store_write(store, VLA_STORE_WEIGHT, index, first, n, from, err));
    }
    return VLA_OK;
}

vla_status vlai_wallx_random_weights(vla_store *store, vla_error *err)
{
    enum { TYPES = 2 }; /* of a store: compute and precise */
    void *normal[TYPES] = {0}, *one[TYPES] = {0};
    vla_dtype types[TYPES];
    int made = 0;
    float *values = vlai_array(POOL, sizeof *values);
    vla_status status = values ? VLA_OK : vlai_nomem(err, POOL * sizeof *values);
    for (size_t i = 0; status == VLA_OK && i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        if (t.rank == 1 && strstr(t.name, "bias"))
            continue; /* the store begins as zeros */
        int k = 0;
        while (k < made && types[k] != t.dtype)
            k++;
        if (k == made) {
            types[made++] = t.dtype;
            vlai_rng_key key = {.seed = 3, .stream = VLAI_RNG_INIT};
            vlai_rng_normal(&key, 0, POOL, values);
            for (int64_t n = 0; n < POOL; n++)
                values[n] *= 0.02f;
            normal[k] = convert(values, t.dtype);
            for (int64_t n = 0; n < POOL; n++)
                values[n] = 1;
            one[k] = convert(values, t.dtype);
            if (!normal[k] || !one[k]) {
                status = vlai_nomem(err, POOL * sizeof *values);
                break;
            }
        }
        status = write_tensor(store, i, t.rank == 1 ? one[k] : normal[k], (int64_t)(i * 977 % SHIFTS), err);
    }
    for (int k = 0; k < TYPES; k++) {
        vlai_free(normal[k]);
        vlai_free(one[k]);
    }
    vlai_free(values);
    return status;
}
