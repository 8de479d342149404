/* A small model for tests of the trainer: a two-layer perceptron that learns a fixed function of random rows. Samples have
 * one to three rows, so that batches come in several shapes. */
#ifndef TOY_H
#define TOY_H

#include "base/memory.h"
#include "base/fail.h"
#include "base/rng.h"
#include "vla/trainer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { TOY_IN = 6, TOY_HIDDEN = 24, TOY_OUT = 3, TOY_ROWS = 3 };

typedef struct {
    int64_t position, rows;
    float x[TOY_ROWS][TOY_IN], y[TOY_ROWS][TOY_OUT];
} toy_sample;

typedef struct {
    int64_t samples, rows;
} toy_shape;

typedef struct {
    uint64_t seed;
    int64_t nan_from, nan_to; /* positions whose target is NaN */
    int64_t fail_at;          /* position that cannot be read; -1 = none */
    int64_t nanoseconds;      /* a read takes up to so long */
    int64_t poison_at;        /* filling a batch with this position spoils an accumulated gradient; 0 = never */
    vla_store *store;         /* of the newest trainer */
} toy;

static inline vla_status toy_slot_create(void *user, void **slot, vla_error *err)
{
    (void)user;
    *slot = vlai_calloc(1, sizeof(toy_sample));
    return *slot ? VLA_OK : vlai_nomem(err, sizeof(toy_sample));
}

static inline void toy_slot_destroy(void *user, void *slot)
{
    (void)user;
    vlai_free(slot);
}

static inline vla_status toy_read(void *user, void *worker, const vla_sample_key *key, void *slot, vla_error *err)
{
    toy *t = user;
    toy_sample *s = slot;
    (void)worker;
    s->position = (int64_t)key->position;
    if (s->position == t->fail_at)
        return vlai_fail(err, VLA_E_CORRUPT, "toy set, episode 1, frame %lld, camera top: broken", (long long)s->position);
    vlai_rng_key rng = {.seed = t->seed, .stream = key->stream, .position = key->position};
    if (t->nanoseconds)
        nanosleep(&(struct timespec){.tv_nsec = vlai_rng_u32(&rng, 99) % t->nanoseconds}, NULL);
    s->rows = 1 + vlai_rng_u32(&rng, 0) % TOY_ROWS;
    rng.site = 1;
    vlai_rng_normal(&rng, 0, TOY_ROWS * TOY_IN, &s->x[0][0]);
    for (int r = 0; r < TOY_ROWS; r++)
        for (int c = 0; c < TOY_OUT; c++)
            s->y[r][c] = sinf(s->x[r][c]) + 0.5f * s->x[r][c + 3];
    if (s->position >= t->nan_from && s->position < t->nan_to)
        s->y[0][0] = NAN;
    return VLA_OK;
}

static inline void toy_describe(void *user, const void *slot, char *text, size_t size)
{
    (void)user;
    snprintf(text, size, "toy set, sample %lld", (long long)((const toy_sample *)slot)->position);
}

static inline vla_status toy_params(void *user, vla_store *store, vla_error *err)
{
    ((toy *)user)->store = store;
    VLA_TRY(vla_store_add(store, "in.weight", VLA_COMPUTE, 2, (int64_t[]){TOY_HIDDEN, TOY_IN}, 0, err));
    VLA_TRY(vla_store_add(store, "in.bias", VLA_COMPUTE, 1, (int64_t[]){TOY_HIDDEN}, 0, err));
    VLA_TRY(vla_store_add(store, "unused", VLA_COMPUTE, 1, (int64_t[]){5}, 0, err));
    VLA_TRY(vla_store_add(store, "out.weight", VLA_COMPUTE, 2, (int64_t[]){TOY_OUT, TOY_HIDDEN}, 0, err));
    return vla_store_add(store, "out.bias", VLA_PRECISE, 1, (int64_t[]){TOY_OUT}, 0, err);
}

static inline vla_status toy_init(void *user, vla_store *store, vla_error *err)
{
    toy *t = user;
    (void)err;
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor w = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        float values[TOY_HIDDEN * TOY_IN];
        vlai_rng_key rng = {.seed = t->seed, .stream = VLAI_RNG_INIT, .position = i};
        vlai_rng_normal(&rng, 0, (size_t)w.elements, values);
        for (int64_t k = 0; k < w.elements; k++)
            values[k] *= 0.3f;
        vla_store_set_float(store, i, 0, w.elements, values);
    }
    return VLA_OK;
}

static inline vla_status toy_shape_of(void *user, void *const *slots, int64_t count, void *shape, vla_error *err)
{
    toy_shape *s = shape;
    (void)user;
    (void)err;
    *s = (toy_shape){.samples = count};
    for (int64_t i = 0; i < count; i++)
        s->rows += ((toy_sample *)slots[i])->rows;
    s->rows = (s->rows + 3) / 4 * 4;
    return VLA_OK;
}

static inline vla_status toy_build(void *user, const void *shape, vla_graph **out, vla_error *err)
{
    const toy_shape *s = shape;
    vla_graph *g;
    (void)user;
    VLA_TRY(vla_graph_create(&g, err));
    *out = g;
    vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){s->rows, TOY_IN});
    vla_value y = vla_graph_input(g, "y", VLA_PRECISE, 2, (int64_t[]){s->rows, TOY_OUT});
    vla_value mask = vla_graph_input(g, "mask", VLA_PRECISE, 2, (int64_t[]){s->rows, TOY_OUT});
    vla_value w1 = vla_graph_param(g, "in.weight", VLA_COMPUTE, 2, (int64_t[]){TOY_HIDDEN, TOY_IN});
    vla_value b1 = vla_graph_param(g, "in.bias", VLA_COMPUTE, 1, (int64_t[]){TOY_HIDDEN});
    vla_value w2 = vla_graph_param(g, "out.weight", VLA_COMPUTE, 2, (int64_t[]){TOY_OUT, TOY_HIDDEN});
    vla_value b2 = vla_graph_param(g, "out.bias", VLA_PRECISE, 1, (int64_t[]){TOY_OUT});
    vla_value h = vla_silu(g, vla_linear(g, x, w1, b1));
    vla_value p = vla_add(g, vla_cast(g, vla_linear(g, h, w2, VLA_NONE), VLA_PRECISE), vla_expand_rows(g, b2, s->rows));
    vla_loss loss = vla_masked_mse(g, p, y, mask);
    vla_graph_name(g, loss.loss, "loss");
    vla_graph_name(g, loss.count, "loss_count");
    vla_graph_name(g, vla_row_sum(g, loss.error), "row_error");
    return vla_graph_check(g, err);
}

static inline vla_status toy_fill(void *user, const void *shape, void *const *slots, int64_t count, vla_run *run, vla_error *err)
{
    const toy_shape *s = shape;
    const toy *t = user;
    (void)err;
    for (int64_t i = 0; i < count; i++)
        if (t->poison_at && ((toy_sample *)slots[i])->position == t->poison_at)
            ((float *)vla_store_tensor(t->store, VLA_STORE_GRADIENT, (size_t)vla_store_find(t->store, "out.weight")).data)[7] = INFINITY;
    vla_tensor x = vla_run_tensor(run, "x");
    float *y = vla_run_data(run, "y"), *mask = vla_run_data(run, "mask");
    int64_t row = 0;
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < ((toy_sample *)slots[i])->rows; r++, row++) {
            const toy_sample *from = slots[i];
            for (int c = 0; c < TOY_IN; c++)
                if (x.dtype == VLA_F32)
                    ((float *)x.data)[row * TOY_IN + c] = from->x[r][c];
                else {
                    uint32_t bits;
                    memcpy(&bits, &from->x[r][c], 4);
                    ((uint16_t *)x.data)[row * TOY_IN + c] = (uint16_t)(bits >> 16);
                }
            for (int c = 0; c < TOY_OUT; c++) {
                y[row * TOY_OUT + c] = from->y[r][c];
                mask[row * TOY_OUT + c] = 1;
            }
        }
    for (; row < s->rows; row++) {
        memset((char *)x.data + (size_t)(row * TOY_IN) * vla_dtype_size(x.dtype), 0, TOY_IN * vla_dtype_size(x.dtype));
        memset(y + row * TOY_OUT, 0, TOY_OUT * sizeof *y);
        memset(mask + row * TOY_OUT, 0, TOY_OUT * sizeof *mask);
    }
    return VLA_OK;
}

static inline double toy_weight(void *user, void *const *slots, int64_t count)
{
    double rows = 0;
    (void)user;
    for (int64_t i = 0; i < count; i++)
        rows += (double)((toy_sample *)slots[i])->rows;
    return rows * TOY_OUT;
}

static const vla_channel toy_channels[] = {{"channel_loss_a \"toy\"", "loss", "loss_count"}, {"never", "nothing", "loss_count"}, {NULL, NULL, NULL}};
static const vla_norm toy_norms[] = {{"in_param_norm", "in."}, {"none_param_norm", "no such name"}, {"out_param_norm", "out."}, {NULL, NULL}};

static inline vla_model toy_model(toy *t)
{
    return (vla_model){.size = sizeof(vla_model), .user = t, .shape_size = sizeof(toy_shape), .params = toy_params, .channels = toy_channels,
                       .norms = toy_norms,
                       .init = toy_init, .shape = toy_shape_of, .build = toy_build, .fill = toy_fill, .weight = toy_weight};
}

static inline vla_samples toy_samples(toy *t, int64_t count)
{
    return (vla_samples){.size = sizeof(vla_samples), .user = t, .count = count, .slot_create = toy_slot_create,
                         .slot_destroy = toy_slot_destroy, .read = toy_read, .describe = toy_describe};
}

static const vla_lr_group toy_groups[] = {{"base", 0.02}};

static inline vla_trainer_options toy_options(const char *run)
{
    vla_trainer_options o = VLA_TRAINER_OPTIONS_DEFAULT;
    o.run = run;
    o.batch = 4;
    o.steps = 20;
    o.epochs = 1000;
    o.workers = 2;
    o.threads = 1;
    o.groups = toy_groups;
    o.group_count = 1;
    o.schedule = VLA_LR_COSINE;
    o.warmup = 3;
    o.epoch_save_interval = 0;
    o.keep_last = 2;
    return o;
}

/* The step of a run's newest whole checkpoint; -1: there is none. */
static inline int64_t toy_newest_step(const char *run)
{
    vla_error err = VLA_ERROR_INIT;
    vla_checkpoint *c;
    if (vla_checkpoint_open(run, &c, &err) != VLA_OK)
        return -1;
    int64_t step = vla_checkpoint_step(c);
    vla_checkpoint_close(c);
    return step;
}

#endif
