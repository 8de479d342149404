/* The trainer's loop: next batch, run, update, note, save, stop. What does not fit that sentence lives in its own file:
 * loader.c, bucket.c (plans), metrics.c, resume.c (state of a run), ckpt/. */
#include "vla/trainer.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/time.h"
#include "ckpt/ckpt.h"
#include "exec/store.h"
#include "optim/schedule.h"
#include "train/bucket.h"
#include "train/loader.h"
#include "train/metrics.h"
#include "train/resume.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

struct vla_trainer {
    vla_model model;
    vla_samples samples, validation;
    bool validates;
    vla_trainer_options options;
    vlai_schedule schedule;
    vla_store *store;
    vla_executor *executor;
    vlai_plans *plans;
    vlai_loader *loader;
    vlai_metrics *metrics;
    vla_checkpoint_writer *writer;
    int run_lock; /* open while the run folder is ours; -1 */
    vla_gradient_status *status; /* of the step in progress */
    void *shape;
    uint8_t *guilty;
    int64_t epoch_samples; /* that an epoch hands out: whole steps */
    vlai_progress progress;
    int64_t saved;         /* step of the newest save that was begun; -1 = none */
    char *resumed;         /* checkpoint that the run started from; NULL */
    char culprit[256];     /* what was not finite in the newest step that was skipped */
    double *window_loss;   /* the last losses, for smooth_loss */
    int64_t window;
    /* of the step in progress */
    void *const *slots; /* read ahead by vla_trainer_prepare */
    int64_t slot_count;
    bool ready;
    double stall, flops, last_end;
    double usual_seconds; /* of a step: a running mean, for the time left */
};

static int64_t steps_per_epoch(const vla_trainer *t)
{
    return t->epoch_samples / (t->options.batch * t->options.accumulation);
}

static bool is_over(const vla_trainer *t)
{
    const vla_trainer_options *o = &t->options;
    return (o->steps > 0 && t->progress.step >= o->steps) || t->progress.epoch >= o->epochs;
}

/* Steps of the whole run, as far as is known now. */
static int64_t total_steps(const vla_trainer *t)
{
    const vla_trainer_options *o = &t->options;
    int64_t left = (o->epochs - t->progress.epoch) * steps_per_epoch(t) -
                   t->progress.place / (o->batch * o->accumulation);
    int64_t all = t->progress.step + (left > 0 ? left : 0);
    return o->steps > 0 && o->steps < all ? o->steps : all;
}

static void report(vla_trainer *t, const vla_record *record)
{
    if (t->options.report)
        t->options.report(t->options.report_user, record);
}

/* ---- creation ---- */

static vla_status check_options(const vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    if (o->batch < 1 || o->accumulation < 1 || o->epochs < 1 || o->group_count < 1 || o->workers < 0 || !o->run)
        return vlai_fail(err, VLA_E_INVALID, "trainer: batch %lld, accumulation %lld, epochs %lld, groups %d: wanted at least 1 "
                         "each, and a run folder", (long long)o->batch, (long long)o->accumulation, (long long)o->epochs,
                         o->group_count);
    if (t->epoch_samples < 1)
        return vlai_fail_hint(err, VLA_E_INVALID, "lower hyperparams.batch_size_per_gpu or gradient_accumulation_steps, or add data",
                              "the training split has %lld samples, a step takes %lld x %lld", (long long)t->samples.count,
                              (long long)o->batch, (long long)o->accumulation);
    return vlai_schedule_check(&t->schedule, err);
}

/* Weights and counters: from the checkpoint, or fresh. */
static vla_status start_state(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    if (!o->resume)
        return t->model.init ? t->model.init(t->model.user, t->store, err) : VLA_OK;
    vla_checkpoint *c;
    VLA_TRY(vla_checkpoint_open(o->resume, &c, err));
    vla_status status = vlai_state_read(vla_checkpoint_state(c), vla_checkpoint_path(c), o, t->samples.count, &t->progress, err);
    if (status == VLA_OK)
        status = vla_checkpoint_restore(c, t->store, err);
    if (status == VLA_OK && !(t->resumed = vlai_strdup(vla_checkpoint_path(c))))
        status = vlai_nomem(err, strlen(vla_checkpoint_path(c)));
    if (status == VLA_OK) {
        /* A step never straddles an epoch; after an allowed change of its size the cursor goes back to a boundary. */
        int64_t step_samples = o->batch * o->accumulation;
        t->progress.place -= t->progress.place % step_samples;
        if (t->progress.place >= t->epoch_samples) {
            t->progress.epoch++;
            t->progress.place = 0;
        }
        t->saved = t->progress.step;
        vlai_info("global_step: %lld, start_epoch: %lld from %s", (long long)t->progress.step, (long long)t->progress.epoch,
                  vla_checkpoint_path(c));
    }
    vla_checkpoint_close(c);
    return status;
}

static vla_status make_store(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    VLA_TRY(vla_store_create(&t->store, err));
    VLA_TRY(t->model.params(t->model.user, t->store, err));
    VLA_TRY(vla_store_allocate(t->store, o->numerics, o->accumulation > 1 ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN, err));
    return start_state(t, err);
}

/* Two trainings in one folder would move each other's checkpoints aside. */
static vla_status lock_run_folder(vla_trainer *t, vla_error *err)
{
    const char *run = t->options.run;
    VLA_TRY(vlai_mkdirs(run, err));
    vla_status status = vlai_lock_dir(run, &t->run_lock, err);
    return status == VLA_E_INVALID ? vlai_hint(err, status, "another training writes to this run folder: wait for its end, stop it, "
                                                            "or choose another checkpoint.save_path")
                                   : status;
}

static vla_status make_run_folder(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    uint64_t bytes = vlai_ckpt_bytes(t->store);
    int64_t saves = 1 + (o->save_interval > 0 && o->steps > 0 ? o->steps / o->save_interval : 0);
    VLA_TRY(vlai_ckpt_check_room(o->run, bytes, o->keep_last, o->steps > 0 ? saves : -1, err));
    VLA_TRY(vlai_ckpt_set_aside(o->run, t->progress.step, err));
    vla_checkpoint_writer_options w = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
    w.keep_last = o->keep_last;
    VLA_TRY(vla_checkpoint_writer_create(o->run, &w, &t->writer, err));
    return vlai_metrics_open(o->run, t->progress.step, &t->metrics, err);
}

static vla_status make_machinery(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    size_t params = vla_store_count(t->store), window = (size_t)(o->loss_smooth > 0 ? o->loss_smooth : 1);
    t->status = vlai_calloc(params ? params : 1, sizeof *t->status);
    t->shape = vlai_calloc(1, t->model.shape_size);
    t->guilty = vlai_calloc((size_t)(o->batch * o->accumulation), 1);
    t->window_loss = vlai_calloc(window, sizeof(double));
    if (!t->status || !t->shape || !t->guilty || !t->window_loss)
        return vlai_nomem(err, params * sizeof *t->status);
    VLA_TRY(vla_executor_create(o->threads, &t->executor, err));
    vlai_plans_options p = {.plan = VLA_PLAN_OPTIONS_DEFAULT, .accumulation = o->accumulation, .most = o->most_plans,
                            .scaled = o->global_loss && o->accumulation > 1, .adamw = o->adamw};
    p.plan.numerics = o->numerics;
    p.plan.recompute = o->recompute;
    p.plan.layout = o->layout;
    p.adamw.groups = o->group_count;
    VLA_TRY(vlai_plans_create(&t->model, t->store, t->executor, &p, &t->plans, err));
    vlai_loader_options l = {.batch = o->global_loss ? o->batch * o->accumulation : o->batch, .workers = o->workers, .end = -1,
                             .first = t->progress.epoch * t->epoch_samples + t->progress.place,
                             .epoch_samples = t->epoch_samples, .stream = VLA_SAMPLES_TRAIN};
    return vlai_loader_create(&t->samples, &l, &t->loader, err);
}

vla_status vla_trainer_create(const vla_model *model, const vla_samples *samples, const vla_samples *validation,
                              const vla_trainer_options *options, vla_trainer **out, vla_error *err)
{
    *out = NULL;
    vla_trainer *t = vlai_calloc(1, sizeof *t);
    if (!t)
        return vlai_nomem(err, sizeof *t);
    t->model = *model;
    t->samples = *samples;
    t->validates = validation && validation->count > 0;
    if (t->validates)
        t->validation = *validation;
    t->options = *options;
    t->saved = -1;
    int64_t step_samples = options->batch > 0 && options->accumulation > 0 ? options->batch * options->accumulation : 1;
    t->epoch_samples = samples->count / step_samples * step_samples;
    t->schedule = (vlai_schedule){.kind = options->schedule == VLA_LR_COSINE ? VLAI_SCHEDULE_COSINE : VLAI_SCHEDULE_CONSTANT,
                                  .peak = options->group_count > 0 ? options->groups[0].rate : 0, .min = options->min_rate,
                                  .warmup = options->warmup, .steps = options->steps};
    t->run_lock = -1;
    vla_status status = check_options(t, err);
    if (status == VLA_OK) /* before a checkpoint of the folder is chosen */
        status = lock_run_folder(t, err);
    if (status == VLA_OK)
        status = make_store(t, err);
    if (status == VLA_OK)
        status = make_run_folder(t, err);
    if (status == VLA_OK)
        status = make_machinery(t, err);
    if (status != VLA_OK) {
        vla_trainer_destroy(t);
        return status;
    }
    t->last_end = vlai_now();
    *out = t;
    return VLA_OK;
}

void vla_trainer_destroy(vla_trainer *t)
{
    if (!t)
        return;
    vlai_loader_destroy(t->loader);
    vla_checkpoint_writer_destroy(t->writer);
    vlai_metrics_close(t->metrics);
    vlai_unlock_dir(t->run_lock);
    vlai_plans_destroy(t->plans);
    vla_executor_destroy(t->executor);
    vla_store_destroy(t->store);
    vlai_free(t->status);
    vlai_free(t->shape);
    vlai_free(t->guilty);
    vlai_free(t->window_loss);
    vlai_free(t->resumed);
    vlai_free(t);
}

vla_store *vla_trainer_store(vla_trainer *t)
{
    return t->store;
}

int64_t vla_trainer_steps_done(const vla_trainer *t)
{
    return t->progress.step;
}

/* ---- one step ---- */

static double scalar(vla_tensor t, int64_t at)
{
    return t.dtype == VLA_F64 ? ((const double *)t.data)[at] : (double)((const float *)t.data)[at];
}

static void set_scalar(vla_tensor t, double value)
{
    if (t.dtype == VLA_F64)
        *(double *)t.data = value;
    else
        *(float *)t.data = (float)value;
}

static vla_status next_slots(vla_trainer *t, vla_error *err)
{
    if (t->ready)
        return VLA_OK;
    double stall = 0;
    VLA_TRY(vlai_loader_next(t->loader, &t->slots, &t->slot_count, &stall, err));
    t->stall += stall;
    t->ready = true;
    return VLA_OK;
}

static vla_status bucket_of(vla_trainer *t, void *const *slots, int64_t count, bool training, vlai_bucket **out, vla_error *err)
{
    memset(t->shape, 0, t->model.shape_size);
    VLA_TRY(t->model.shape(t->model.user, slots, count, t->shape, err));
    return vlai_plans_get(t->plans, t->shape, training, out, err);
}

vla_status vla_trainer_prepare(vla_trainer *t, vla_trainer_memory *memory, vla_error *err)
{
    vlai_bucket *b;
    VLA_TRY(next_slots(t, err));
    VLA_TRY(bucket_of(t, t->slots, t->options.batch, true, &b, err));
    vla_run *update;
    VLA_TRY(vlai_plans_update(t->plans, b->status, &update, err));
    memory->plan = vlai_plans_memory(t->plans);
    size_t bytes[VLA_STORE_KINDS] = {0};
    for (int k = 0; k < VLA_STORE_KINDS; k++)
        bytes[k] = vla_store_bytes(t->store, k, t->options.numerics,
                                   t->options.accumulation > 1 ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN);
    memory->plan.weights = bytes[VLA_STORE_WEIGHT];
    memory->plan.gradients = bytes[VLA_STORE_GRADIENT];
    memory->plan.optimizer = bytes[VLA_STORE_M] + bytes[VLA_STORE_V] + bytes[VLA_STORE_LOW];
    memory->executor = vla_executor_bytes(t->executor);
    memory->snapshot = vlai_ckpt_staging(vlai_ckpt_bytes(t->store));
    return VLA_OK;
}

/* Adds the results of a run to the record's sums. */
static void add_results(vla_trainer *t, const vla_run *run, double weight, vla_record *r, double *part_weight)
{
    r->loss += weight * scalar(vla_run_tensor(run, "loss"), 0);
    for (int i = 0; t->model.parts && t->model.parts[i] && i < VLA_RECORD_PARTS; i++) {
        vla_tensor part = vla_run_tensor(run, t->model.parts[i]);
        if (!part.data)
            continue;
        r->part[i] += weight * scalar(part, 0);
        part_weight[i] += weight;
    }
}

/* Sums become means; parts that no batch had are left out. */
static void finish_results(vla_trainer *t, double weight, const double *part_weight, vla_record *r)
{
    r->loss /= weight;
    for (int i = 0; t->model.parts && t->model.parts[i] && i < VLA_RECORD_PARTS; i++) {
        if (part_weight[i] == 0)
            continue;
        r->part_name[r->parts] = t->model.parts[i];
        r->part[r->parts++] = r->part[i] / part_weight[i];
    }
}

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

static void name_guilty(vla_trainer *t, void *const *slots, const uint8_t *guilty, int64_t count)
{
    enum { NAMED = 16 };
    int64_t named = 0, bad = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!guilty[i])
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
        vlai_warn("step %lld: the loss is not finite with %s", (long long)t->progress.step + 1, text);
    }
    if (bad > named)
        vlai_warn("step %lld: and with %lld samples more", (long long)t->progress.step + 1, (long long)(bad - named));
}

/* One micro-batch: fill, run, note the losses. `finite` is cleared when the loss is not. */
static vla_status run_micro(vla_trainer *t, void *const *slots, int64_t count, double weight, double scale, vla_record *r,
                            double *part_weight, bool *finite, vla_error *err)
{
    vlai_bucket *b;
    VLA_TRY(bucket_of(t, slots, count, true, &b, err));
    VLA_TRY(t->model.fill(t->model.user, b->shape, slots, count, b->run, err));
    vla_tensor factor = vla_run_tensor(b->run, "loss.scale");
    if (factor.data)
        set_scalar(factor, scale);
    VLA_TRY(vla_run_execute(b->run, err));
    t->flops += vla_plan_flops(b->plan);
    for (size_t i = 0; i < vla_store_count(t->store); i++)
        if (b->status[i] > t->status[i])
            t->status[i] = b->status[i];
    double loss = scalar(vla_run_tensor(b->run, "loss"), 0);
    if (!isfinite(loss)) {
        *finite = false;
        snprintf(t->culprit, sizeof t->culprit, "'%s' (%s)", guilty_result(t, b->run), nonfinite_name(loss));
        memset(t->guilty, 1, (size_t)count);
        if (t->model.blame)
            t->model.blame(t->model.user, b->shape, b->run, count, t->guilty);
        name_guilty(t, slots, t->guilty, count);
    }
    add_results(t, b->run, weight, r, part_weight);
    return VLA_OK;
}

/* All micro-batches of a step. With global_loss each weighs as much as its loss has terms. */
static vla_status run_micros(vla_trainer *t, vla_record *r, bool *finite, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    double part_weight[VLA_RECORD_PARTS] = {0}, total = 0;
    memset(t->status, 0, vla_store_count(t->store) * sizeof *t->status);
    if (o->accumulation > 1)
        vla_store_zero_gradients(t->store);
    if (o->global_loss) {
        VLA_TRY(next_slots(t, err));
        for (int64_t m = 0; m < o->accumulation; m++)
            total += t->model.weight ? t->model.weight(t->model.user, t->slots + m * o->batch, o->batch) : 1;
    }
    double sum = 0;
    for (int64_t m = 0; m < o->accumulation; m++) {
        VLA_TRY(next_slots(t, err));
        void *const *slots = o->global_loss ? t->slots + m * o->batch : t->slots;
        double weight = o->global_loss && t->model.weight ? t->model.weight(t->model.user, slots, o->batch) : 1;
        VLA_TRY(run_micro(t, slots, o->batch, weight, total > 0 ? weight / total : 1, r, part_weight, finite, err));
        sum += weight;
        if (!o->global_loss || m + 1 == o->accumulation)
            t->ready = false;
    }
    finish_results(t, sum > 0 ? sum : 1, part_weight, r);
    return VLA_OK;
}

/* The first gradient of the store that is not finite: where the trouble shows, in checkpoint order. */
static void find_guilty_gradient(vla_trainer *t)
{
    snprintf(t->culprit, sizeof t->culprit, "the gradient norm");
    for (size_t i = 0; i < vla_store_count(t->store); i++) {
        vla_tensor g = vla_store_tensor(t->store, VLA_STORE_GRADIENT, i);
        for (int64_t k = 0; g.data && k < g.elements; k++) {
            float x;
            vlai_store_floats(t->store, VLA_STORE_GRADIENT, i, k, 1, &x);
            if (!isfinite(x)) {
                snprintf(t->culprit, sizeof t->culprit, "the gradient of '%.128s' (%s at element %lld)", g.name, nonfinite_name((double)x),
                         (long long)k);
                return;
            }
        }
    }
}

/* A loss may be finite and its gradient not; no single sample can be blamed, so all of the (last) micro-batch are named. */
static void report_guilty_gradient(vla_trainer *t, double norm)
{
    int64_t step = t->progress.step + 1, first = t->progress.epoch * t->epoch_samples + t->progress.place;
    find_guilty_gradient(t);
    vlai_warn("step %lld: %s is not finite (norm %s), samples %lld to %lld of the order", (long long)step, t->culprit,
              isfinite(norm) ? "finite" : nonfinite_name(norm), (long long)first, (long long)(first + t->options.batch * t->options.accumulation - 1));
    const void *const *slots = (const void *const *)t->slots;
    int64_t offset = t->options.global_loss ? (t->options.accumulation - 1) * t->options.batch : 0;
    for (int64_t i = 0; t->samples.describe && i < t->options.batch && i < 16; i++) {
        char text[512];
        t->samples.describe(t->samples.user, slots[offset + i], text, sizeof text);
        vlai_warn("step %lld: in it %s", (long long)step, text);
    }
}

/* Clip and AdamW; nothing is stepped when a gradient is not finite. */
static vla_status update(vla_trainer *t, vla_record *r, bool *finite, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    vla_run *run;
    VLA_TRY(vlai_plans_update(t->plans, t->status, &run, err));
    double *hyper = vla_run_data(run, "hyper");
    if (!hyper) {
        *finite = true; /* no parameter has a gradient */
        return VLA_OK;
    }
    vla_hyper_fill(&o->adamw, o->seed, t->progress.updates, hyper);
    for (int g = 0; g < o->group_count; g++)
        hyper[VLA_HYPER_RATES + g] = vlai_schedule_rate(&t->schedule, t->progress.step, o->groups[g].rate);
    VLA_TRY(vla_run_execute(run, err));
    const double *clip = vla_run_data(run, "clip");
    r->grad_norm = o->adamw.max_norm > 0 || !isfinite(clip[0]) ? clip[0] : 0;
    *finite = clip[2] != 0;
    if (!*finite)
        report_guilty_gradient(t, clip[0]);
    return VLA_OK;
}

static void advance(vla_trainer *t, bool applied)
{
    int64_t step_samples = t->options.batch * t->options.accumulation;
    vlai_progress *p = &t->progress;
    p->step++;
    p->updates += applied;
    p->skips += !applied;
    p->bad_in_a_row = applied ? 0 : p->bad_in_a_row + 1;
    p->samples += step_samples;
    p->place += step_samples;
    if (p->place >= t->epoch_samples) {
        p->epoch++;
        p->place = 0;
    }
}

static double smooth(vla_trainer *t, double loss)
{
    int64_t size = t->options.loss_smooth > 0 ? t->options.loss_smooth : 1;
    double sum = 0;
    t->window_loss[t->window++ % size] = loss;
    int64_t n = t->window < size ? t->window : size;
    for (int64_t i = 0; i < n; i++)
        sum += t->window_loss[i];
    return sum / (double)n;
}

static void fill_record(vla_trainer *t, vla_record *r)
{
    const vla_trainer_options *o = &t->options;
    int64_t step_samples = o->batch * o->accumulation;
    double now = vlai_now();
    r->steps = total_steps(t);
    r->epochs = o->epochs;
    r->iterations = t->epoch_samples / o->batch;
    r->rate = vlai_schedule_rate(&t->schedule, t->progress.step - 1, o->groups[0].rate);
    r->next_rate = vlai_schedule_rate(&t->schedule, t->progress.step, o->groups[0].rate);
    r->smooth_loss = smooth(t, r->loss);
    r->step_seconds = now - t->last_end;
    r->stall_seconds = t->stall;
    r->samples_per_second = (double)step_samples / r->step_seconds;
    r->teraflops = 1e-12 * t->flops / r->step_seconds;
    t->usual_seconds = t->usual_seconds > 0 ? 0.95 * t->usual_seconds + 0.05 * r->step_seconds : r->step_seconds;
    r->eta_seconds = t->usual_seconds * (double)(r->steps - t->progress.step);
    r->resident = vlai_resident_bytes();
    r->step = t->progress.step;
    r->samples = t->progress.samples;
    r->skips = t->progress.skips;
    t->last_end = now;
    t->stall = t->flops = 0;
}

static vla_status too_many_bad(vla_trainer *t, vla_error *err)
{
    const char *path = "";
    vla_error ignored = VLA_ERROR_INIT;
    (void)vla_checkpoint_wait(t->writer, &path, &ignored); /* of a save in progress: its failure is no news now */
    return vlai_fail_hint(err, VLA_E_NONFINITE,
                          "look at the samples named above (vla check), or lower the learning rate, and go on from the last good "
                          "checkpoint; checkpoint.max_bad_steps is the bound",
                          "%lld steps in a row were not finite, the last of them step %lld: %s; nothing of them was applied; last "
                          "good checkpoint: %s",
                          (long long)t->progress.bad_in_a_row, (long long)t->progress.step, t->culprit,
                          *path ? path : t->resumed ? t->resumed : "none was saved yet");
}

vla_status vla_trainer_step(vla_trainer *t, vla_record *r, vla_error *err)
{
    if (is_over(t))
        return vlai_fail(err, VLA_E_CANCELLED, "the run is over after step %lld", (long long)t->progress.step);
    bool finite = true;
    *r = (vla_record){.kind = VLA_RECORD_STEP, .epoch = t->progress.epoch,
                      .iteration = t->progress.place / t->options.batch + t->options.accumulation - 1};
    VLA_TRY(run_micros(t, r, &finite, err));
    if (finite)
        VLA_TRY(update(t, r, &finite, err));
    else
        r->grad_norm = NAN;
    advance(t, finite);
    r->skipped = !finite;
    fill_record(t, r);
    VLA_TRY(vlai_metrics_put(t->metrics, r, err));
    report(t, r);
    if (t->progress.bad_in_a_row >= t->options.max_bad_steps)
        return too_many_bad(t, err);
    return VLA_OK;
}

/* ---- validation ---- */

static vla_status validate_batch(vla_trainer *t, void *const *slots, int64_t count, vla_record *r, double *part_weight,
                                 vla_error *err)
{
    vlai_bucket *b;
    VLA_TRY(bucket_of(t, slots, count, false, &b, err));
    VLA_TRY(t->model.fill(t->model.user, b->shape, slots, count, b->run, err));
    VLA_TRY(vla_run_execute(b->run, err));
    add_results(t, b->run, 1, r, part_weight);
    return VLA_OK;
}

vla_status vla_trainer_validate(vla_trainer *t, vla_record *r, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    double began = vlai_now(), part_weight[VLA_RECORD_PARTS] = {0};
    *r = (vla_record){.kind = VLA_RECORD_VALIDATION, .step = t->progress.step, .epoch = t->progress.epoch,
                      .samples = t->progress.samples, .steps = total_steps(t), .epochs = o->epochs};
    if (!t->validates)
        return vlai_fail(err, VLA_E_INVALID, "there are no samples to validate on");
    vlai_loader_options l = {.batch = o->validation_batch > 0 ? o->validation_batch : o->batch, .workers = o->workers,
                             .end = t->validation.count, .epoch_samples = t->validation.count, .stream = VLA_SAMPLES_VALIDATION};
    vlai_loader *loader;
    VLA_TRY(vlai_loader_create(&t->validation, &l, &loader, err));
    vla_status status = VLA_OK;
    int64_t batches = 0, count;
    for (;; batches++) {
        void *const *slots;
        status = vlai_loader_next(loader, &slots, &count, NULL, err);
        if (status != VLA_OK || count == 0)
            break;
        status = validate_batch(t, slots, count, r, part_weight, err);
        if (status != VLA_OK)
            break;
    }
    vlai_loader_destroy(loader);
    VLA_TRY(status);
    finish_results(t, batches ? (double)batches : 1, part_weight, r);
    r->step_seconds = vlai_now() - began;
    VLA_TRY(vlai_metrics_put(t->metrics, r, err));
    report(t, r);
    return VLA_OK;
}

/* ---- saving ---- */

/* A save that fails is tried again at the next occasion: the run goes on, and only a failing last save ends it with an
 * error. A state that is not finite ends it. */
static vla_status judge(vla_trainer *t, vla_status status, const vla_error *failure, bool last, vla_error *err)
{
    if (status == VLA_OK)
        return VLA_OK;
    t->saved = -1;
    if (!last && status != VLA_E_NONFINITE) {
        vlai_warn("%s; training goes on, the next save tries again", failure->message);
        return VLA_OK;
    }
    if (err)
        *err = *failure;
    return status;
}

/* The outcome of the save in progress, once it has one, or now with `wait`. */
static vla_status settle_save(vla_trainer *t, bool wait, bool last, vla_error *err)
{
    if (!vlai_checkpoint_pending(t->writer) || (!wait && !vlai_checkpoint_finished(t->writer)))
        return VLA_OK;
    vla_error failure = VLA_ERROR_INIT;
    const char *path = NULL;
    vla_status status = vla_checkpoint_wait(t->writer, &path, &failure);
    if (status == VLA_OK)
        report(t, &(vla_record){.kind = VLA_RECORD_SAVED, .step = t->saved, .text = path});
    return judge(t, status, &failure, last, err);
}

/* Begins the save of the state as it is. */
static vla_status begin_save(vla_trainer *t, vla_error *err)
{
    vlai_text state = {0};
    vla_status status = vlai_state_text(&t->options, t->samples.count, &t->progress, &state, err);
    int64_t epoch = t->progress.place || t->progress.epoch == 0 ? t->progress.epoch : t->progress.epoch - 1;
    vla_checkpoint_content c = {.size = sizeof c, .epoch = epoch, .step = t->progress.step, .state = state.data,
                                .files = t->options.files, .file_count = t->options.file_count};
    if (status == VLA_OK)
        status = vla_checkpoint_save(t->writer, t->store, &c, err);
    vlai_text_fini(&state);
    return status;
}

static vla_status save(vla_trainer *t, bool last, vla_error *err)
{
    VLA_TRY(settle_save(t, true, false, err));
    if (t->saved == t->progress.step)
        return VLA_OK;
    vla_error failure = VLA_ERROR_INIT;
    vla_status status = begin_save(t, &failure);
    t->saved = t->progress.step;
    VLA_TRY(judge(t, status, &failure, last, err));
    if (status == VLA_OK && !vlai_checkpoint_pending(t->writer)) { /* it was written while we waited */
        const char *path;
        vla_checkpoint_wait(t->writer, &path, NULL);
        report(t, &(vla_record){.kind = VLA_RECORD_SAVED, .step = t->saved, .text = path});
    }
    return last ? settle_save(t, true, true, err) : VLA_OK;
}

/* ---- the run ---- */

static bool is_far_enough(const vla_trainer *t)
{
    return is_over(t) || (t->options.stop_at > 0 && t->progress.step >= t->options.stop_at);
}

static bool is_due(const vla_trainer *t, int64_t interval)
{
    int64_t step = t->progress.step;
    return interval > 0 && step % interval == 0 && step >= t->options.ignore_until;
}

static vla_status save_if_due(vla_trainer *t, bool epoch_ended, vla_error *err)
{
    int64_t every = t->options.epoch_save_interval;
    bool due = is_due(t, t->options.save_interval) || (epoch_ended && every > 0 && t->progress.epoch % every == 0);
    return due ? save(t, false, err) : settle_save(t, false, false, err);
}

static vla_status validate_if_due(vla_trainer *t, bool epoch_ended, vla_error *err)
{
    vla_record r;
    if (!t->validates || !(epoch_ended || is_due(t, t->options.validation_interval)))
        return VLA_OK;
    vla_status status = vla_trainer_validate(t, &r, err);
    t->last_end = vlai_now();
    return status;
}

/* A step failed (a damaged file, no memory): what was trained so far is saved, and the failure returned. */
static vla_status leave(vla_trainer *t, vla_status status)
{
    vla_error failure = VLA_ERROR_INIT;
    if (status != VLA_E_NONFINITE && t->progress.step > 0 && save(t, true, &failure) != VLA_OK)
        vlai_warn("%s", failure.message);
    return status;
}

vla_status vla_trainer_run(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    vla_record r;
    if (t->validates && o->validate_first)
        VLA_TRY(vla_trainer_validate(t, &r, err));
    t->last_end = vlai_now();
    while (!is_far_enough(t)) {
        vla_status status = vla_trainer_step(t, &r, err);
        if (status != VLA_OK)
            return leave(t, status);
        bool epoch_ended = t->progress.place == 0;
        if (o->stop && *o->stop)
            break;
        VLA_TRY(save_if_due(t, epoch_ended, err));
        VLA_TRY(validate_if_due(t, epoch_ended, err));
    }
    VLA_TRY(save(t, true, err));
    if (o->stop && *o->stop && !is_over(t))
        return vlai_fail(err, VLA_E_CANCELLED, "stopped on request after step %lld of %lld; the state is saved in %s",
                         (long long)t->progress.step, (long long)total_steps(t), o->run);
    return VLA_OK;
}
