/* One step: the next batch into the inputs of its plan, the plan, the update, and what came of it.
 *
 * A step is begun and ended. With options.ahead the host prepares the next batch between the two, and where the update is
 * part of the plan (options.whole_step) it also begins the next step before it ends this one: the device never waits for the
 * host. The order of the device's work, and every number that it is given, are the same either way. */
#include "train/trainer_internal.h"

#include "base/bf16.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/time.h"
#include "exec/executor.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void advance(const vla_trainer *t, vlai_progress *p, bool applied)
{
    p->step++;
    p->updates += applied;
    p->skips += !applied;
    p->bad_in_a_row = applied ? 0 : p->bad_in_a_row + 1;
    p->samples += vlai_step_samples(t);
    p->place += vlai_step_samples(t);
    if (p->place >= t->epoch_samples) {
        p->epoch++;
        p->place = 0;
    }
}

vlai_progress vlai_step_cursor(const vla_trainer *t)
{
    vlai_progress p = t->progress;
    for (int i = 0; i < t->flight_count; i++)
        advance(t, &p, true);
    return p;
}

/* ---- results ---- */

static double scalar(vla_tensor t, int64_t at)
{
    return t.dtype == VLA_F64 ? ((const double *)t.data)[at] : (double)((const float *)t.data)[at];
}

static bool has_channel(const vla_model *model, int i)
{
    return model->channels && i < VLA_RECORD_CHANNELS && model->channels[i].name;
}

vlai_micro vlai_micro_of(const vla_model *model, const vla_run *run, double weight)
{
    vlai_micro m = {.weight = weight, .loss = scalar(vla_run_tensor(run, "loss"), 0)};
    for (int i = 0; model->parts && model->parts[i] && i < VLA_RECORD_PARTS; i++) {
        vla_tensor part = vla_run_tensor(run, model->parts[i]);
        if (!part.data)
            continue;
        m.part[i] = scalar(part, 0);
        m.has |= 1u << i;
    }
    for (int i = 0; has_channel(model, i); i++) {
        vla_tensor mean = vla_run_tensor(run, model->channels[i].mean), count = vla_run_tensor(run, model->channels[i].count);
        m.terms[i] = mean.data && count.data ? scalar(count, 0) : 0;
        m.channel[i] = m.terms[i] > 0 ? m.terms[i] * scalar(mean, 0) : 0;
    }
    return m;
}

void vlai_sums_add(vlai_sums *s, const vlai_micro *m)
{
    s->loss += m->weight * m->loss;
    s->weight += m->weight;
    for (int i = 0; i < VLA_RECORD_PARTS; i++) {
        if (!(m->has >> i & 1))
            continue;
        s->part[i] += m->weight * m->part[i];
        s->part_weight[i] += m->weight;
    }
    for (int i = 0; i < VLA_RECORD_CHANNELS; i++) {
        s->channel[i] += m->channel[i];
        s->terms[i] += m->terms[i];
    }
}

void vlai_sums_take(vla_trainer *t, const vlai_sums *s, vla_record *r)
{
    const vla_model *model = &t->model;
    r->loss = s->loss / (s->weight > 0 ? s->weight : 1);
    r->parts = 0;
    for (int i = 0; model->parts && model->parts[i] && i < VLA_RECORD_PARTS; i++) {
        if (s->part_weight[i] == 0)
            continue;
        r->part_name[r->parts] = model->parts[i];
        r->part[r->parts++] = s->part[i] / s->part_weight[i];
    }
    t->more_count = 0;
    for (int i = 0; has_channel(model, i); i++)
        if (s->terms[i] > 0)
            t->more[t->more_count++] = (vla_metric){model->channels[i].name, s->channel[i] / s->terms[i]};
}

/* ---- blame ---- */

static const char *nonfinite_name(double x)
{
    return isnan(x) ? "nan" : x > 0 ? "inf" : "-inf"; /* printf would tell nan's sign */
}

/* Which result made the loss so: a part of it, or the loss itself. */
static const char *guilty_result(const vla_trainer *t, const vla_run *run)
{
    for (int i = 0; t->model.parts && t->model.parts[i]; i++) {
        vla_tensor part = vla_run_tensor(run, t->model.parts[i]);
        if (part.data && !isfinite(scalar(part, 0)))
            return t->model.parts[i];
    }
    return "loss";
}

/* "rank 2: " where there are several: each names its own samples. */
static const char *prefix(const vla_trainer *t)
{
    static _Thread_local char text[24];
    snprintf(text, sizeof text, "rank %d: ", t->rank);
    return t->group ? text : "";
}

static void name_guilty(vla_trainer *t, int64_t step, void *const *slots, int64_t count)
{
    enum { NAMED = 16 };
    int64_t named = 0, bad = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!t->guilty[i])
            continue;
        bad++;
        char text[512];
        if (named == NAMED)
            continue;
        if (t->samples.describe)
            t->samples.describe(t->samples.user, slots[i], text, sizeof text);
        else
            snprintf(text, sizeof text, "sample %lld of the batch", (long long)i);
        named++;
        vlai_warn("%sstep %lld: the loss is not finite with %s", prefix(t), (long long)step, text);
    }
    if (bad > named)
        vlai_warn("%sstep %lld: and with %lld samples more", prefix(t), (long long)step, (long long)(bad - named));
}

typedef struct search {
    vla_tensor tensor;
    int64_t element; /* -1: all are finite */
    double value;
} search;

static vla_status search_piece(void *user, int64_t first, int64_t n, const void *data, vla_error *err)
{
    search *s = user;
    (void)err;
    for (int64_t k = 0; k < n && s->element < 0; k++) {
        double x = s->tensor.dtype == VLA_F32   ? (double)((const float *)data)[k]
                   : s->tensor.dtype == VLA_F64 ? ((const double *)data)[k]
                                                : (double)vlai_bf16_to_float(((const uint16_t *)data)[k]);
        if (!isfinite(x)) {
            s->element = first + k;
            s->value = x;
        }
    }
    return VLA_OK;
}

/* The first gradient of the store that is not finite: where the trouble shows, in checkpoint order. A plan of a whole step
 * keeps no gradients: false. */
static bool find_guilty_gradient(const vla_trainer *t, char *culprit, size_t size)
{
    vla_error ignored = VLA_ERROR_INIT;
    snprintf(culprit, size, "the gradient norm");
    for (size_t i = 0; i < vla_store_count(t->store); i++) {
        search s = {.tensor = vla_store_tensor(t->store, VLA_STORE_GRADIENT, i), .element = -1};
        if (vlai_ckpt_each_piece(t->store, VLA_STORE_GRADIENT, i, search_piece, &s, &ignored) != VLA_OK || s.element < 0)
            continue;
        snprintf(culprit, size, "the gradient of '%.100s' (%s at element %lld)", s.tensor.name, nonfinite_name(s.value), (long long)s.element);
        return true;
    }
    return false;
}

/* A loss may be finite and its gradient not; no single sample can be blamed, so all of the (last) micro-batch are named. Of
 * several ranks each looks at its own gradients, and says nothing where they are finite, or where they have become everybody's. */
static void report_guilty_gradient(vla_trainer *t, vlai_flight *f, double norm)
{
    bool own = !t->group || t->options.zero, found = own && find_guilty_gradient(t, f->culprit, sizeof f->culprit);
    if (t->group && !found) {
        f->culprit[0] = 0;
        return;
    }
    snprintf(t->culprit, sizeof t->culprit, "%s", f->culprit);
    vlai_warn("%sstep %lld: %s is not finite (norm %s), samples %lld to %lld of the order", prefix(t), (long long)f->step, f->culprit,
              isfinite(norm) ? "finite" : nonfinite_name(norm), (long long)f->first, (long long)(f->first + vlai_step_samples(t) - 1));
    for (int64_t i = 0; t->samples.describe && i < f->count && i < 16; i++) {
        char text[512];
        t->samples.describe(t->samples.user, f->slots[i], text, sizeof text);
        vlai_warn("%sstep %lld: in it %s", prefix(t), (long long)f->step, text);
    }
}

/* ---- the next batch ---- */

vla_status vlai_step_slots(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    for (int64_t m = 0; !t->ready && m < (o->global_loss ? o->accumulation : 1); m++) {
        double stall = 0;
        int64_t count;
        VLA_TRY(vlai_loader_next(t->loader, &t->slots, &count, &stall, err));
        t->stall += stall;
        if (!o->global_loss)
            continue;
        memcpy(t->step_slots + m * o->batch, t->slots, (size_t)o->batch * sizeof *t->slots);
        t->slots = t->step_slots;
    }
    t->ready = true;
    return VLA_OK;
}

static vla_status collect(vla_trainer *t, vlai_flight *f, vla_error *err);

vla_status vlai_step_bucket(vla_trainer *t, void *const *slots, int64_t count, bool training, bool only_made, vlai_bucket **out, vla_error *err)
{
    *out = NULL;
    memset(t->shape, 0, t->model.shape_size);
    VLA_TRY(t->model.shape(t->model.user, slots, count, t->shape, err));
    bool made = vlai_plans_has(t->plans, t->shape, training);
    if (!made && only_made)
        return VLA_OK;
    if (made)
        return vlai_plans_get(t->plans, t->shape, training, out, err);
    for (int i = 0; i < t->flight_count; i++) /* making a plan may move the arena under what is running */
        VLA_TRY(collect(t, &t->flights[i], err));
    vlai_ranks_work(t, "plan");
    VLA_TRY(vlai_plans_get(t->plans, t->shape, training, out, err));
    vlai_ranks_progress(t, training ? "step" : "validation");
    return VLA_OK;
}

static bool is_under_way(const vla_trainer *t, const vla_run *run)
{
    for (int i = 0; i < t->flight_count; i++)
        if (!t->flights[i].collected && t->flights[i].run == run)
            return true;
    return false;
}

static double weight_of(const vla_trainer *t, void *const *slots)
{
    return t->model.weight ? t->model.weight(t->model.user, slots, t->options.batch) : 1;
}

static void set_scalar(vla_tensor t, double value)
{
    if (t.dtype == VLA_F64)
        *(double *)t.data = value;
    else
        *(float *)t.data = (float)value;
}

/* Fills the inputs of the next micro-batch's run. With global_loss each weighs as much as its loss has terms. `busy`: a run
 * of this step that is under way; then nothing is done where a plan would have to be made. */
static vla_status prepare(vla_trainer *t, const vla_run *busy, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    if (t->next.bucket)
        return VLA_OK;
    VLA_TRY(vlai_step_slots(t, err));
    if (o->global_loss && !t->weighed) {
        for (int64_t m = 0; m < o->accumulation; m++)
            t->weights[m] = weight_of(t, t->slots + m * o->batch);
        VLA_TRY(vlai_ranks_weigh(t, t->weights, &t->total_weight, err));
        t->weighed = true;
    }
    vlai_prepared n = {.slots = o->global_loss ? t->slots + t->micro * o->batch : t->slots, .count = o->batch};
    n.weight = o->global_loss ? t->weights[t->micro] : 1;
    n.scale = o->global_loss && t->total_weight > 0 ? n.weight / t->total_weight : 1;
    VLA_TRY(vlai_step_bucket(t, n.slots, n.count, true, busy != NULL, &n.bucket, err));
    if (!n.bucket)
        return VLA_OK;
    if (n.bucket->run == busy || is_under_way(t, n.bucket->run))
        VLA_TRY(vla_run_other_inputs(n.bucket->run, err));
    VLA_TRY(t->model.fill(t->model.user, n.bucket->shape, n.slots, n.count, n.bucket->run, err));
    vla_tensor factor = vla_run_tensor(n.bucket->run, "loss.scale");
    if (factor.data)
        set_scalar(factor, n.scale);
    t->next = n;
    t->micro = (t->micro + 1) % o->accumulation;
    if (!o->global_loss || t->micro == 0)
        t->ready = t->weighed = false;
    return VLA_OK;
}

/* Waits for a run. Where the device is still busy when the host comes to wait, it has not waited for samples: the stall is
 * then what it was before they were fetched. */
static vla_status wait_run(vla_trainer *t, vla_run *run, double *stall, double before, vla_error *err)
{
    double began = vlai_now();
    VLA_TRY(vla_run_wait(run, err));
    if (t->options.ahead && t->on_device && vlai_now() - began > 5e-5)
        *stall = before;
    return VLA_OK;
}

/* ---- the update ---- */

/* Bias corrections, learning rates and the key of stochastic rounding of the step at `p`. The host may begin a step before it
 * knows whether the one before was applied, so Adam's t takes the step just before as applied: after a skipped step one
 * correction is that of t + 1. Rounding counts steps, so that no two share a key. */
static void set_hyper(const vla_trainer *t, const vlai_progress *p, double *hyper)
{
    const vla_trainer_options *o = &t->options;
    vla_hyper_fill(&o->adamw, o->seed, p->updates + (p->bad_in_a_row > 0), hyper);
    hyper[VLA_HYPER_UPDATE] = (double)(p->step + 1);
    for (int g = 0; g < o->group_count; g++)
        hyper[VLA_HYPER_RATES + g] = vlai_schedule_rate(&t->schedule, p->step, o->groups[g].rate);
}

/* clip: norm before the clip, factor, 1 if finite. */
static void take_clip(vla_trainer *t, vlai_flight *f, const double *clip)
{
    f->record.grad_norm = t->options.adamw.max_norm > 0 || !isfinite(clip[0]) ? clip[0] : 0;
    bool applied = clip[2] != 0;
    if (!applied && f->finite)
        report_guilty_gradient(t, f, clip[0]);
    f->finite = applied;
}

/* Clip and AdamW as a plan of their own; nothing is stepped when a loss or a gradient is not finite, on any rank: all run it. */
static vla_status update(vla_trainer *t, vlai_flight *f, vla_error *err)
{
    vla_run *run;
    VLA_TRY(vlai_plans_update(t->plans, t->status, &run, err));
    double *hyper = vla_run_data(run, "hyper");
    if (!hyper)
        return VLA_OK; /* no parameter has a gradient */
    set_hyper(t, &t->progress, hyper);
    set_scalar(vla_run_tensor(run, "guard"), f->finite ? 0 : NAN);
    VLA_TRY(vlai_ranks_agree_plan(t, run->plan, t->status, err));
    VLA_TRY(vla_run_submit(run, err));
    double stall = t->stall;
    if (t->goes_on && t->on_device && (t->broken = prepare(t, run, &t->broken_error)) != VLA_OK)
        t->next.bucket = NULL; /* the next step will say so */
    VLA_TRY(wait_run(t, run, &t->stall, stall, err));
    take_clip(t, f, vla_run_data(run, "clip"));
    return VLA_OK;
}

/* ---- begin and end ---- */

/* Losses of a micro-batch whose run was waited for. `finite` of the flight is cleared when the loss is not. */
static void take_losses(vla_trainer *t, vlai_flight *f)
{
    double loss = scalar(vla_run_tensor(f->run, "loss"), 0);
    if (!isfinite(loss)) {
        f->finite = false;
        snprintf(f->culprit, sizeof f->culprit, "'%s' (%s)", guilty_result(t, f->run), nonfinite_name(loss));
        snprintf(t->culprit, sizeof t->culprit, "%s", f->culprit);
        memset(t->guilty, 1, (size_t)f->count);
        if (t->model.blame)
            t->model.blame(t->model.user, f->bucket->shape, f->run, f->count, t->guilty);
        name_guilty(t, f->step, f->slots, f->count);
    }
}

/* What a step of one plan has brought, once the device has done it. */
static vla_status collect(vla_trainer *t, vlai_flight *f, vla_error *err)
{
    if (f->collected)
        return VLA_OK;
    VLA_TRY(wait_run(t, f->run, &f->stall, 0, err));
    f->collected = true;
    take_losses(t, f);
    f->micro[0] = vlai_micro_of(&t->model, f->run, f->weight);
    vlai_sums_add(&f->sums, &f->micro[0]);
    const double *clip = vla_run_data(f->run, "clip");
    if (clip)
        take_clip(t, f, clip);
    return VLA_OK;
}

/* The micro-batch that is prepared becomes the flight's. */
static void take_next(vla_trainer *t, vlai_flight *f)
{
    f->bucket = t->next.bucket;
    f->run = t->next.bucket->run;
    f->count = t->next.count;
    memcpy(f->slots, t->next.slots, (size_t)f->count * sizeof *f->slots);
    f->flops += vla_plan_flops(f->bucket->plan);
    t->next.bucket = NULL;
}

static vla_status begin_whole(vla_trainer *t, vlai_flight *f, const vlai_progress *at, vla_error *err)
{
    VLA_TRY(prepare(t, NULL, err));
    f->weight = t->next.weight;
    double *hyper = vla_run_data(t->next.bucket->run, "hyper");
    if (hyper)
        set_hyper(t, at, hyper);
    take_next(t, f);
    VLA_TRY(vlai_ranks_agree_plan(t, f->bucket->plan, f->bucket->status, err));
    VLA_TRY(vla_run_submit(f->run, err));
    return VLA_OK;
}

/* Micro-batches and an update: each is waited for, and with options.ahead the next is prepared while it runs. */
static vla_status run_parts(vla_trainer *t, vlai_flight *f, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    memset(t->status, 0, vla_store_count(t->store) * sizeof *t->status);
    if (o->accumulation > 1)
        vla_store_zero_gradients(t->store);
    for (int64_t m = 0; m < o->accumulation; m++) {
        VLA_TRY(prepare(t, NULL, err));
        double weight = t->next.weight;
        take_next(t, f);
        for (size_t i = 0; i < vla_store_count(t->store); i++)
            if (f->bucket->status[i] > t->status[i])
                t->status[i] = f->bucket->status[i];
        double stall = t->stall;
        VLA_TRY(vla_run_submit(f->run, err));
        if (o->ahead && t->on_device && m + 1 < o->accumulation)
            VLA_TRY(prepare(t, f->run, err));
        VLA_TRY(wait_run(t, f->run, &t->stall, stall, err));
        take_losses(t, f);
        f->micro[m] = vlai_micro_of(&t->model, f->run, weight);
        vlai_sums_add(&f->sums, &f->micro[m]);
    }
    f->collected = true;
    return update(t, f, err);
}

vla_status vlai_step_begin(vla_trainer *t, vla_error *err)
{
    vlai_progress at = vlai_step_cursor(t);
    vlai_flight *f = &t->flights[t->flight_count];
    void **slots = f->slots;
    vlai_micro *micro = f->micro;
    *f = (vlai_flight){.slots = slots, .micro = micro, .finite = true, .step = at.step + 1, .first = at.epoch * t->epoch_samples + at.place,
                       .record = {.kind = VLA_RECORD_STEP, .epoch = at.epoch,
                                  .iteration = at.place / (t->options.batch * t->world) + t->options.accumulation - 1}};
    vlai_ranks_progress(t, "step");
    VLA_TRY(t->options.whole_step ? begin_whole(t, f, &at, err) : run_parts(t, f, err));
    f->stall = t->stall;
    t->stall = 0;
    t->flight_count++;
    if (t->on_device)
        return VLA_OK;
    VLA_TRY(collect(t, f, err)); /* a CPU has done it, and keeps the results of one run */
    f->ended = vlai_now();
    return VLA_OK;
}

vla_status vlai_step_end(vla_trainer *t, vla_record *r, vla_error *err)
{
    vlai_flight *f = &t->flights[0];
    VLA_TRY(collect(t, f, err));
    VLA_TRY(vlai_ranks_step(t, f, err));
    advance(t, &t->progress, f->finite);
    vlai_sums_take(t, &f->sums, &f->record);
    *r = f->record;
    r->skipped = !f->finite;
    r->stall_seconds = f->stall;
    r->teraflops = 1e-12 * f->flops; /* per second once trainer.c knows the time */
    /* The flight's place goes to the end of the row, with its array of slots. */
    vlai_flight done = *f;
    t->flight_count--;
    memmove(t->flights, t->flights + 1, (size_t)t->flight_count * sizeof *t->flights);
    t->flights[t->flight_count] = done;
    return VLA_OK;
}
