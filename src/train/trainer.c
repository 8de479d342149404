/* The trainer: what a run needs, the loop over its steps, validation and saving. One step is in step.c, plans in bucket.c, the
 * state of a run in resume.c, checkpoints in ckpt/. */
#include "train/trainer_internal.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/system.h"
#include "base/time.h"
#include "dist/comm.h"
#include "dist/group.h"
#include "exec/device_facts.h"
#include "exec/executor.h"
#include "exec/store.h"
#include "optim/settings.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t steps_per_epoch(const vla_trainer *t)
{
    return t->epoch_samples / vlai_step_samples(t);
}

static bool is_over(const vla_trainer *t, const vlai_progress *p)
{
    const vla_trainer_options *o = &t->options;
    return (o->steps > 0 && p->step >= o->steps) || p->epoch >= o->epochs;
}

/* Steps of the whole run, as far as is known now. */
static int64_t total_steps(const vla_trainer *t)
{
    const vla_trainer_options *o = &t->options;
    int64_t left = (o->epochs - t->progress.epoch) * steps_per_epoch(t) -
                   t->progress.place / vlai_step_samples(t);
    int64_t all = t->progress.step + (left > 0 ? left : 0);
    return o->steps > 0 && o->steps < all ? o->steps : all;
}

static void report(vla_trainer *t, const vla_record *record)
{
    if (t->options.report)
        t->options.report(t->options.report_user, record);
}

/* ---- creation ---- */

/* A part of the start is done: how long it took. */
static void mark(vla_trainer *t, const char *part)
{
    double now = vlai_now();
    if (t->options.timing)
        vlai_info("start: %.2f s %s", now - t->phase_began, part);
    t->phase_began = now;
    vlai_ranks_work(t, "start");
}

static vla_status check_options(const vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    if (o->batch < 1 || o->accumulation < 1 || o->epochs < 1 || o->group_count < 1 || o->workers < 0 || !o->run)
        return vlai_fail(err, VLA_E_INVALID, "trainer: batch %lld, accumulation %lld, epochs %lld, groups %d: wanted at least 1 "
                         "each, and a run folder", (long long)o->batch, (long long)o->accumulation, (long long)o->epochs,
                         o->group_count);
    VLA_TRY(vlai_ckpt_check_path(o->run, o->files, o->file_count, err));
    if (o->whole_step && o->accumulation > 1)
        return vlai_fail(err, VLA_E_INVALID, "trainer: a step of one plan has one micro-batch, not %lld", (long long)o->accumulation);
    return vlai_schedule_check(&t->schedule, err);
}

/* Only a step of one plan can reduce gradients while it makes them: between ranks that overlap is one wherever it can be. */
static void choose_form(vla_trainer *t)
{
    vla_trainer_options *o = &t->options;
    o->whole_step = (o->whole_step || (t->world > 1 && o->overlap)) && o->accumulation == 1;
}

/* How many samples an epoch hands out, once the step's size is known. */
static vla_status count_epoch(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    t->epoch_samples = t->samples.count / vlai_step_samples(t) * vlai_step_samples(t);
    if (t->epoch_samples > 0)
        return VLA_OK;
    char ranks[32] = "";
    if (t->world > 1)
        snprintf(ranks, sizeof ranks, " x %d ranks", t->world);
    return vlai_fail_hint(err, VLA_E_INVALID, "lower hyperparams.batch_size_per_gpu or gradient_accumulation_steps, or add data",
                          "the training split has %lld samples, a step takes %lld x %lld%s", (long long)t->samples.count,
                          (long long)o->batch, (long long)o->accumulation, ranks);
}

/* Opens the checkpoint that the run starts from, if any: rank 0 chooses and verifies it for all. The step keeps its size when
 * another number of ranks has saved it. */
static vla_status choose_checkpoint(vla_trainer *t, vla_error *err)
{
    vla_trainer_options *o = &t->options;
    char path[VLAI_CKPT_PATH] = "";
    if (o->resume && t->rank == 0) {
        VLA_TRY(vla_checkpoint_open(o->resume, &t->from, err));
        snprintf(path, sizeof path, "%s", vla_checkpoint_path(t->from));
    }
    VLA_TRY(vlai_ranks_choose(t, path, sizeof path, err));
    if (*path && !t->from)
        VLA_TRY(vlai_checkpoint_open_known(path, &t->from, err));
    if (!t->from)
        return VLA_OK;
    VLA_TRY(vlai_state_follow(vla_checkpoint_state(t->from), path, o, err));
    choose_form(t);
    return VLA_OK;
}

/* Algorithms chosen by timing: a rank's own, where as many have saved, else rank 0's. */
static vla_status adopt_choices(vla_trainer *t, vla_error *err)
{
    char *own = NULL;
    if (t->rank > 0)
        VLA_TRY(vla_checkpoint_own(t->from, t->rank, t->world, &own, err));
    vla_status status = own ? vla_executor_adopt(t->executor, own, err)
                            : vlai_state_adopt(vla_checkpoint_state(t->from), vla_checkpoint_path(t->from), t->executor, err);
    free(own);
    return status;
}

/* Weights and counters: from the checkpoint, or fresh. */
static vla_status start_state(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    VLA_TRY(vlai_state_check_allowed(t->from ? vla_checkpoint_state(t->from) : NULL, t->from ? vla_checkpoint_path(t->from) : "", o,
                                     t->samples.count, err));
    if (!t->from)
        return t->model.init ? t->model.init(t->model.user, t->store, err) : VLA_OK;
    const char *state = vla_checkpoint_state(t->from), *path = vla_checkpoint_path(t->from);
    VLA_TRY(vlai_state_read(state, path, o, t->samples.count, &t->progress, err));
    VLA_TRY(adopt_choices(t, err));
    VLA_TRY(vla_checkpoint_restore(t->from, t->store, err));
    if (!(t->resumed = vlai_strdup(path)))
        return vlai_nomem(err, strlen(path));
    /* A step never straddles an epoch; after an allowed change of its size the cursor goes back to a boundary. */
    t->progress.place -= t->progress.place % vlai_step_samples(t);
    if (t->progress.place >= t->epoch_samples) {
        t->progress.epoch++;
        t->progress.place = 0;
    }
    t->saved = t->progress.step;
    vlai_info("global_step: %lld, start_epoch: %lld from %s", (long long)t->progress.step, (long long)t->progress.epoch, path);
    vla_checkpoint_close(t->from);
    t->from = NULL;
    return VLA_OK;
}

static vla_store_use store_use(const vla_trainer_options *o)
{
    return o->whole_step ? VLA_STORE_STEP : o->accumulation > 1 ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN;
}

static vla_status make_store(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    VLA_TRY(vla_executor_create_on(o->device ? o->device : "cpu", o->threads, &t->executor, err));
    mark(t, "device");
    t->on_device = strcmp(vla_executor_device(t->executor), "cpu") != 0;
    vla_executor_limit(t->executor, o->memory_limit);
    vlai_device_facts facts;
    vla_error ignored = VLA_ERROR_INIT;
    if (t->on_device && vlai_device_facts_get(t->executor, &facts, &ignored) == VLA_OK && *facts.name)
        vlai_info("%s, %.1f GB, driver %s: %s numerics%s", facts.name, 1e-9 * (double)facts.memory, facts.driver, vlai_numerics_name(o->numerics),
                  o->whole_step ? ", whole steps in one plan" : "");
    VLA_TRY(vla_store_create(&t->store, err));
    VLA_TRY(t->model.params(t->model.user, t->store, err));
    if (t->group) {
        VLA_TRY(vlai_comm_open(t->group, o->device ? o->device : "cpu", &t->comm, err));
        vlai_executor_set_comm(t->executor, t->comm);
        vla_shard_options share = {sizeof share, t->rank, t->world, o->bucket_bytes, o->zero};
        VLA_TRY(vla_store_shard(t->store, &share, err));
        mark(t, "communicator");
    }
    VLA_TRY(vla_store_allocate_on(t->store, t->executor, o->numerics, store_use(o), 0, err));
    mark(t, "memory of parameters");
    VLA_TRY(start_state(t, err));
    mark(t, t->resumed ? "weights and optimizer state" : "weights");
    return vlai_ranks_agree_weights(t, err);
}

/* Two trainings in one folder would move each other's checkpoints aside. */
static vla_status lock_run_folder(vla_trainer *t, vla_error *err)
{
    const char *run = t->options.run;
    vla_status status = VLA_OK;
    if (t->rank > 0)
        return vlai_ranks_see_folder(t, err);
    status = vlai_mkdirs(run, err);
    if (status != VLA_OK)
        return vlai_hint(err, status, "checkpoint.save_path names the folder of the run: choose one that can be made and written to");
    status = vlai_lock_dir(run, ".lock", &t->run_lock, err);
    return status == VLA_E_INVALID ? vlai_hint(err, status, "another training writes to this run folder: wait for its end, stop it, "
                                                            "or choose another checkpoint.save_path")
           : status == VLA_OK      ? vlai_ranks_see_folder(t, err)
                                   : status;
}

static vla_status make_run_folder(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    uint64_t bytes = vlai_ckpt_bytes(t->store);
    int64_t saves = 1 + (o->save_interval > 0 && o->steps > 0 ? o->steps / o->save_interval : 0);
    if (t->rank == 0) {
        VLA_TRY(vlai_ckpt_check_room(o->run, bytes, o->keep_last, o->steps > 0 ? saves : -1, err));
        VLA_TRY(vlai_ckpt_set_aside(o->run, t->progress.step, err));
    }
    vla_checkpoint_writer_options w = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
    w.keep_last = o->keep_last;
    w.group = t->group;
    w.rank = t->rank;
    w.world = t->world;
    VLA_TRY(vla_checkpoint_writer_create(o->run, &w, &t->writer, err));
    vlai_checkpoint_reserve(t->writer, t->store);
    return t->rank > 0 ? VLA_OK : vlai_metrics_open(o->run, t->progress.step, &t->metrics, err);
}

/* Which norm each parameter that is trained belongs to: groups are those that have any. */
static vla_status make_norms(vla_trainer *t, vla_error *err)
{
    int group_of[VLA_RECORD_NORMS + 1];
    size_t params = vla_store_count(t->store);
    t->norm_group = vlai_calloc(params + 1, sizeof *t->norm_group);
    if (!t->norm_group)
        return vlai_nomem(err, params * sizeof *t->norm_group);
    memset(group_of, 0xFF, sizeof group_of);
    for (size_t i = 0; i < params; i++) {
        const vla_norm *rows = t->model.norms;
        const char *name = vla_store_tensor(t->store, VLA_STORE_WEIGHT, i).name;
        int k = 0;
        t->norm_group[i] = -1;
        if (t->model.frozen && t->model.frozen(t->model.user, name))
            continue;
        while (rows && k < VLA_RECORD_NORMS && rows[k].name && !strstr(name, rows[k].part))
            k++;
        bool taken = rows && k < VLA_RECORD_NORMS && rows[k].name;
        int *group = &group_of[taken ? k : VLA_RECORD_NORMS];
        if (*group < 0) {
            *group = t->norm_groups++;
            t->norm_name[*group] = taken ? rows[k].name : NULL;
        }
        t->norm_group[i] = *group;
    }
    return VLA_OK;
}

/* What a record has besides its own fields: vla_record.more. */
static vla_status make_metrics(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    static const char prefix[] = "lr_group/";
    size_t bytes = 1;
    for (int g = 0; g < o->group_count; g++)
        bytes += sizeof prefix + (o->groups[g].name ? strlen(o->groups[g].name) : 0);
    t->more = vlai_calloc((size_t)o->group_count + VLA_RECORD_CHANNELS + VLA_RECORD_NORMS + 2, sizeof *t->more);
    t->rate_names = vlai_calloc(bytes, 1);
    if (!t->more || !t->rate_names)
        return vlai_nomem(err, bytes);
    char *at = t->rate_names;
    for (int g = 0; g < o->group_count; g++)
        at += snprintf(at, bytes - (size_t)(at - t->rate_names), "%s%s", prefix, o->groups[g].name ? o->groups[g].name : "") + 1;
    return o->norm_interval > 0 ? make_norms(t, err) : VLA_OK;
}

static vla_status make_machinery(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    size_t params = vla_store_count(t->store), window = (size_t)(o->loss_smooth > 0 ? o->loss_smooth : 1);
    t->status = vlai_calloc(params ? params : 1, sizeof *t->status);
    t->shape = vlai_calloc(1, t->model.shape_size);
    t->guilty = vlai_calloc((size_t)(o->batch * o->accumulation), 1);
    double *last = vlai_calloc((1 + VLA_RECORD_PARTS) * window, sizeof *last);
    for (size_t i = 0; last && i < 1 + VLA_RECORD_PARTS; i++)
        t->window[i].last = last + i * window;
    t->flight_slots = vlai_calloc(VLAI_FLIGHTS * (size_t)o->batch, sizeof *t->flight_slots);
    t->micro_room = vlai_calloc(VLAI_FLIGHTS * (size_t)o->accumulation, sizeof *t->micro_room);
    t->step_slots = vlai_calloc((size_t)(o->batch * o->accumulation), sizeof *t->step_slots);
    t->weights = vlai_calloc((size_t)(o->accumulation * (t->world + 1)), sizeof *t->weights);
    if (!t->step_slots || !t->weights || !t->micro_room || !t->status || !t->shape || !t->guilty || !last || !t->flight_slots)
        return vlai_nomem(err, params * sizeof *t->status);
    for (int i = 0; i < VLAI_FLIGHTS; i++)
        t->flights[i] = (vlai_flight){.slots = t->flight_slots + (size_t)i * (size_t)o->batch,
                                      .micro = t->micro_room + (size_t)i * (size_t)o->accumulation};
    VLA_TRY(make_metrics(t, err));
    vlai_plans_options p = {.plan = VLA_PLAN_OPTIONS_DEFAULT, .accumulation = o->accumulation, .world = t->world, .most = o->most_plans,
                            .whole_step = o->whole_step, .scaled = o->global_loss && o->accumulation * t->world > 1, .adamw = o->adamw};
    p.plan.numerics = o->numerics;
    p.plan.recompute = o->recompute;
    p.plan.layout = o->layout;
    p.plan.fuse = o->fuse;
    p.plan.visual_layers = o->visual_layers;
    p.plan.fast_attention = o->fast_attention;
    p.plan.fast = o->fast;
    p.plan.overlap = o->overlap;
    p.plan.gradient_dtype = o->gradient_dtype;
    p.plan.product_sms_free = o->product_sms_free;
    p.plan.keep = o->memory_keep;
    p.automatic = o->recompute_auto != 0;
    p.limit = o->memory_limit;
    p.adamw.groups = o->group_count;
    VLA_TRY(vlai_plans_create(&t->model, t->store, t->executor, &p, &t->plans, err));
    vlai_loader_options l = vlai_loader_of(o);
    l.end = -1;
    l.first = t->progress.epoch * t->epoch_samples + t->progress.place;
    l.epoch_samples = t->epoch_samples;
    l.stream = VLA_SAMPLES_TRAIN;
    l.stride = t->world;
    l.offset = t->rank;
    return vlai_loader_create(&t->samples, &l, &t->loader, err);
}

static vla_status take_arguments(vla_trainer *t, const vla_model *model, const vla_samples *samples, const vla_samples *validation,
                                 const vla_trainer_options *options, vla_error *err)
{
    t->options = (vla_trainer_options)VLA_TRAINER_OPTIONS_DEFAULT;
    VLA_TRY(vlai_take_sized(&t->options, sizeof t->options, options, "vla_trainer_options", err));
    VLA_TRY(vlai_take_sized(&t->model, sizeof t->model, model, "vla_model", err));
    VLA_TRY(vlai_take_sized(&t->samples, sizeof t->samples, samples, "vla_samples", err));
    if (validation)
        VLA_TRY(vlai_take_sized(&t->validation, sizeof t->validation, validation, "vla_samples", err));
    t->validates = t->validation.count > 0;
    return VLA_OK;
}

vla_status vla_trainer_create(const vla_model *model, const vla_samples *samples, const vla_samples *validation,
                              const vla_trainer_options *options, vla_trainer **out, vla_error *err)
{
    *out = NULL;
    vla_trainer *t = vlai_calloc(1, sizeof *t);
    if (!t)
        return vlai_nomem(err, sizeof *t);
    vla_status status = take_arguments(t, model, samples, validation, options, err);
    if (status != VLA_OK) {
        vlai_free(t);
        return status;
    }
    options = &t->options;
    t->saved = -1;
    t->group = options->world > 1 ? options->group : NULL;
    t->world = t->options.world = t->group ? options->world : 1;
    t->rank = t->options.rank = t->group ? options->rank : 0;
    t->schedule = (vlai_schedule){.kind = options->schedule == VLA_LR_COSINE ? VLAI_SCHEDULE_COSINE : VLAI_SCHEDULE_CONSTANT,
                                  .peak = options->group_count > 0 ? options->groups[0].rate : 0, .min = options->min_rate,
                                  .warmup = options->warmup, .steps = options->steps};
    t->run_lock = -1;
    t->phase_began = vlai_now();
    vlai_ranks_work(t, "start");
    status = check_options(t, err);
    choose_form(t);
    if (status == VLA_OK && !options->resume)
        status = count_epoch(t, err);
    if (status == VLA_OK) /* before a checkpoint of the folder is chosen */
        status = lock_run_folder(t, err);
    if (status == VLA_OK)
        status = choose_checkpoint(t, err);
    if (status == VLA_OK)
        status = count_epoch(t, err);
    if (status == VLA_OK)
        status = vlai_ranks_agree_settings(t, err);
    if (status == VLA_OK)
        status = vlai_ranks_open(t, err);
    if (status == VLA_OK)
        status = make_store(t, err);
    if (status == VLA_OK)
        status = make_run_folder(t, err);
    if (status == VLA_OK)
        status = make_machinery(t, err);
    if (status != VLA_OK) {
        status = vlai_ranks_failed(t, status, err);
        vla_trainer_destroy(t);
        return status;
    }
    mark(t, "run folder, loader");
    t->last_end = vlai_now();
    *out = t;
    return VLA_OK;
}

void vla_trainer_destroy(vla_trainer *t)
{
    if (!t)
        return;
    for (int i = 0; i < t->flight_count; i++)
        if (!t->flights[i].collected)
            (void)vla_run_wait(t->flights[i].run, NULL); /* its memory must not go while the device works on it */
    vlai_loader_destroy(t->loader);
    vla_checkpoint_writer_destroy(t->writer);
    vla_checkpoint_close(t->from);
    vlai_metrics_close(t->metrics);
    vlai_unlock_dir(t->run_lock);
    vlai_plans_destroy(t->plans);
    vla_store_destroy(t->store);
    vlai_comm_close(t->comm);
    vla_executor_destroy(t->executor);
    vlai_free(t->row);
    vlai_free(t->rows);
    vlai_free(t->micro_room);
    vlai_free(t->flight_slots);
    vlai_free(t->step_slots);
    vlai_free(t->weights);
    vlai_free(t->status);
    vlai_free(t->shape);
    vlai_free(t->guilty);
    vlai_free(t->window[0].last);
    vlai_free(t->more);
    vlai_free(t->rate_names);
    vlai_free(t->norm_group);
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

vla_status vla_trainer_prepare(vla_trainer *t, vla_trainer_memory *memory, vla_error *err)
{
    vlai_bucket *b;
    VLA_TRY(vlai_step_slots(t, err));
    mark(t, "first batch");
    VLA_TRY(vlai_step_bucket(t, t->slots, t->options.batch, true, false, &b, err));
    vlai_ranks_work(t, "start");
    vla_run *update;
    if (!t->options.whole_step)
        VLA_TRY(vlai_plans_update(t->plans, b->status, &update, err));
    mark(t, "plan");
    memory->plan = vlai_plans_memory(t->plans);
    size_t bytes[VLA_STORE_KINDS] = {0};
    for (int k = 0; k < VLA_STORE_KINDS; k++)
        bytes[k] = vla_store_bytes(t->store, k, t->options.numerics, store_use(&t->options));
    memory->plan.weights = bytes[VLA_STORE_WEIGHT];
    memory->plan.gradients = bytes[VLA_STORE_GRADIENT];
    memory->plan.optimizer = bytes[VLA_STORE_M] + bytes[VLA_STORE_V] + bytes[VLA_STORE_LOW];
    memory->executor = vla_executor_bytes(t->executor);
    if (!t->on_device) { /* as vla preflight counts */
        size_t touched, arena = t->executor->arena_bytes;
        VLA_TRY(vlai_plans_touched(t->plans, &touched, err));
        memory->plan.activations = touched > memory->plan.inputs ? touched - memory->plan.inputs : 0;
        memory->executor -= arena > touched ? arena - touched : 0;
    }
    memory->snapshot = vlai_ckpt_staging(vlai_ckpt_host_share(t->store, t->group, t->rank)) ? vlai_ckpt_share(t->store, t->rank) : 0;
    return VLA_OK;
}

/* ---- one step ---- */

/* Mean of a window's last values that are finite, this one among them; where none is, the value itself. */
static double smooth(vla_trainer *t, int which, double value)
{
    int64_t size = t->options.loss_smooth > 0 ? t->options.loss_smooth : 1, finite = 0;
    double sum = 0, *last = t->window[which].last;
    last[t->window[which].count++ % size] = value;
    int64_t n = t->window[which].count < size ? t->window[which].count : size;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(last[i])) {
            sum += last[i];
            finite++;
        }
    return finite ? sum / (double)finite : value;
}

/* As the reference does with what it prints (MetricsLogger.smooth): a step that lacks a part leaves that part's window alone. */
static void smooth_record(vla_trainer *t, vla_record *r)
{
    r->smooth_loss = smooth(t, 0, r->loss);
    for (int i = 0, k = 0; k < r->parts; i++)
        if (t->model.parts[i] == r->part_name[k]) {
            r->smooth_part[k] = smooth(t, 1 + i, r->part[k]);
            k++;
        }
}

static void fill_record(vla_trainer *t, vla_record *r)
{
    const vla_trainer_options *o = &t->options;
    double now = t->on_device ? vlai_now() : t->flights[t->flight_count].ended; /* vlai_step_end has put the flight there */
    r->steps = total_steps(t);
    r->epochs = o->epochs;
    r->iterations = t->epoch_samples / (o->batch * t->world);
    r->rate = vlai_schedule_rate(&t->schedule, t->progress.step - 1, o->groups[0].rate);
    r->next_rate = vlai_schedule_rate(&t->schedule, t->progress.step, o->groups[0].rate);
    const char *name = t->rate_names;
    for (int g = 0; o->group_count > 1 && g < o->group_count; g++, name += strlen(name) + 1)
        t->more[t->more_count++] = (vla_metric){name, vlai_schedule_rate(&t->schedule, t->progress.step - 1, o->groups[g].rate)};
    smooth_record(t, r);
    r->step_seconds = now - t->last_end;
    r->samples_per_second = (double)vlai_step_samples(t) / r->step_seconds;
    r->teraflops /= r->step_seconds;
    t->usual_seconds = t->usual_seconds > 0 ? 0.95 * t->usual_seconds + 0.05 * r->step_seconds : r->step_seconds;
    r->eta_seconds = t->usual_seconds * (double)(r->steps - t->progress.step);
    r->resident = vlai_resident_bytes();
    r->device = vla_executor_held(t->executor);
    r->save_seconds = t->save_stall;
    r->step = t->progress.step;
    r->samples = t->progress.samples;
    r->skips = t->progress.skips;
    t->last_end = now;
    t->save_stall = 0;
}

static vla_status too_many_bad(vla_trainer *t, vla_error *err)
{
    const char *path = "";
    vla_error ignored = VLA_ERROR_INIT;
    vlai_ranks_work(t, "save");
    (void)vla_checkpoint_wait(t->writer, &path, &ignored); /* of a save in progress: its failure is no news now */
    if (t->rank > 0) /* rank 0 knows most and says it; it does not come here */
        VLA_TRY(vlai_group_barrier(t->group, "the end after too many steps that were not finite", 0, err));
    return vlai_fail_hint(err, VLA_E_NONFINITE,
                          "look at the samples named above (vla check), or lower the learning rate, and go on from the last good "
                          "checkpoint; where there is none, the weights that the run began with may be damaged; "
                          "checkpoint.max_bad_steps is the bound",
                          "%lld steps in a row were not finite, the last of them step %lld: %s; nothing of them was applied; last "
                          "good checkpoint: %s",
                          (long long)t->progress.bad_in_a_row, (long long)t->progress.step, t->culprit,
                          *path ? path : t->resumed ? t->resumed : "none was saved yet");
}

/* With options.overlap the next step's plan brings the weights that other ranks have stepped; who wants them before it brings
 * them itself. */
static vla_status gather_weights(vla_trainer *t, vla_error *err)
{
    return vlai_plans_gather(t->plans, err);
}

/* The reference counts steps from 0. */
static bool is_norm_due(const vla_trainer *t, const vlai_progress *p)
{
    return t->norm_group && p->step > 0 && (p->step - 1) % t->options.norm_interval == 0;
}

/* Norms of the weights as the step has left them. Their time is no step's. */
static vla_status measure_norms(vla_trainer *t, vla_error *err)
{
    double norm[VLA_RECORD_NORMS + 1], squares = 0;
    VLA_TRY(gather_weights(t, err));
    if (t->rank == 0) {
        VLA_TRY(vlai_plans_norms(t->plans, t->norm_group, t->norm_groups, norm, err));
        for (int k = 0; k < t->norm_groups; k++) {
            squares += norm[k] * norm[k];
            if (t->norm_name[k])
                t->more[t->more_count++] = (vla_metric){t->norm_name[k], norm[k]};
        }
        t->more[t->more_count++] = (vla_metric){"total_param_norm", sqrt(squares)};
    }
    t->last_end = vlai_now();
    return VLA_OK;
}

/* Ends the oldest step under way, and reports it. */
static vla_status end_step(vla_trainer *t, vla_record *r, vla_error *err)
{
    VLA_TRY(vlai_step_end(t, r, err));
    if (t->phase_began > 0)
        mark(t, "first step");
    t->phase_began = 0;
    fill_record(t, r);
    if (is_norm_due(t, &t->progress) && t->flight_count == 0)
        VLA_TRY(measure_norms(t, err));
    r->more = t->more;
    r->more_count = t->more_count;
    if (t->metrics)
        VLA_TRY(vlai_metrics_put(t->metrics, r, err));
    report(t, r);
    return t->progress.bad_in_a_row >= t->options.max_bad_steps ? too_many_bad(t, err) : VLA_OK;
}

/* A step that could not be begun while the one before was under way. */
static vla_status take_broken(vla_trainer *t, vla_error *err)
{
    vla_status status = t->broken;
    t->broken = VLA_OK;
    if (status != VLA_OK && err)
        *err = t->broken_error;
    return status;
}

vla_status vla_trainer_step(vla_trainer *t, vla_record *r, vla_error *err)
{
    if (is_over(t, &t->progress))
        return vlai_fail(err, VLA_E_CANCELLED, "the run is over after step %lld", (long long)t->progress.step);
    VLA_TRY(take_broken(t, err));
    if (t->flight_count == 0)
        VLA_TRY(vlai_step_begin(t, err));
    return end_step(t, r, err);
}

/* ---- validation ---- */

static vla_status validate_batch(vla_trainer *t, void *const *slots, int64_t count, vlai_micro *out, vla_error *err)
{
    vlai_bucket *b;
    VLA_TRY(vlai_step_bucket(t, slots, count, false, false, &b, err));
    VLA_TRY(t->model.fill(t->model.user, b->shape, slots, count, b->run, err));
    VLA_TRY(vla_run_execute(b->run, err));
    *out = vlai_micro_of(&t->model, b->run, 1);
    return VLA_OK;
}

/* Rounds of one batch per rank, in the order of the batches; in the last one some may have none. */
static vla_status validate_all(vla_trainer *t, vlai_loader *loader, int64_t batch, vlai_sums *sums, vla_error *err)
{
    int64_t batches = (t->validation.count + batch - 1) / batch, count;
    for (int64_t done = 0; done < batches; done += t->world) {
        vlai_micro micro;
        void *const *slots;
        memset(&micro, 0, sizeof micro);
        vlai_ranks_progress(t, "validation");
        VLA_TRY(vlai_loader_next(loader, &slots, &count, NULL, err));
        if (count > 0)
            VLA_TRY(validate_batch(t, slots, count, &micro, err));
        VLA_TRY(vlai_ranks_add_round(t, &micro, sums, err));
    }
    return VLA_OK;
}

vla_status vla_trainer_validate(vla_trainer *t, vla_record *r, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    double began = vlai_now();
    *r = (vla_record){.kind = VLA_RECORD_VALIDATION, .step = t->progress.step, .epoch = t->progress.epoch,
                      .samples = t->progress.samples, .steps = total_steps(t), .epochs = o->epochs};
    if (!t->validates)
        return vlai_fail(err, VLA_E_INVALID, "there are no samples to validate on");
    vlai_loader_options l = {.batch = o->validation_batch > 0 ? o->validation_batch : o->batch, .workers = o->workers,
                             .end = t->validation.count, .epoch_samples = t->validation.count, .stream = VLA_SAMPLES_VALIDATION,
                             .stride = t->world, .offset = t->rank};
    vlai_loader *loader;
    vlai_sums sums = {0};
    VLA_TRY(gather_weights(t, err));
    VLA_TRY(vlai_loader_create(&t->validation, &l, &loader, err));
    vla_status status = validate_all(t, loader, l.batch, &sums, err);
    vlai_loader_destroy(loader);
    VLA_TRY(status);
    VLA_TRY(vlai_ranks_end_rounds(t, &sums, r, err));
    r->more = t->more;
    r->more_count = t->more_count;
    r->step_seconds = vlai_now() - began;
    if (t->metrics)
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
    vlai_ranks_work(t, "save");
    vla_status status = vla_checkpoint_wait(t->writer, &path, &failure);
    if (status == VLA_OK)
        report(t, &(vla_record){.kind = VLA_RECORD_SAVED, .step = t->saved, .text = path});
    return judge(t, status, &failure, last, err);
}

/* Begins the save of the state as it is. */
static vla_status begin_save(vla_trainer *t, vla_error *err)
{
    vlai_text state = {0};
    char *choices = NULL;
    vla_status status = vla_executor_choices(t->executor, &choices, err);
    if (status == VLA_OK)
        status = vlai_state_text(&t->options, t->samples.count, &t->progress, choices, &state, err);
    int64_t epoch = t->progress.place || t->progress.epoch == 0 ? t->progress.epoch : t->progress.epoch - 1;
    vla_checkpoint_content c = {.size = sizeof c, .epoch = epoch, .step = t->progress.step, .state = state.data,
                                .files = t->options.files, .file_count = t->options.file_count,
                                .own = t->rank > 0 ? choices : NULL};
    if (status != VLA_OK)
        c.state = NULL; /* refused, so that the other ranks learn of it */
    vla_status begun = vla_checkpoint_save(t->writer, t->store, &c, status == VLA_OK ? err : NULL);
    status = status == VLA_OK ? begun : status;
    free(choices);
    vlai_text_fini(&state);
    return status;
}

static vla_status save(vla_trainer *t, bool last, vla_error *err)
{
    VLA_TRY(settle_save(t, true, false, err));
    if (t->saved == t->progress.step)
        return VLA_OK;
    vlai_ranks_work(t, "save");
    VLA_TRY(gather_weights(t, err));
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

static bool is_far_enough(const vla_trainer *t, const vlai_progress *p)
{
    return is_over(t, p) || (t->options.stop_at > 0 && p->step >= t->options.stop_at);
}

static bool is_due(const vla_trainer *t, const vlai_progress *p, int64_t interval)
{
    return interval > 0 && p->step % interval == 0 && p->step >= t->options.ignore_until;
}

static bool is_save_due(const vla_trainer *t, const vlai_progress *p)
{
    int64_t every = t->options.epoch_save_interval;
    return is_due(t, p, t->options.save_interval) || (p->place == 0 && every > 0 && p->epoch % every == 0);
}

static bool is_validation_due(const vla_trainer *t, const vlai_progress *p)
{
    return t->validates && (p->place == 0 || is_due(t, p, t->options.validation_interval));
}

/* Whether the step after those under way may be begun at once: nothing wants the state as it is before it. */
static bool goes_on(const vla_trainer *t, const vlai_progress *p)
{
    return !is_far_enough(t, p) && !is_save_due(t, p) && !is_validation_due(t, p) && !is_norm_due(t, p) && !vlai_ranks_stopped(t, p);
}

static vla_status save_if_due(vla_trainer *t, vla_error *err)
{
    if (!is_save_due(t, &t->progress))
        return settle_save(t, false, false, err);
    double began = vlai_now();
    vla_status status = save(t, false, err);
    t->last_end = vlai_now();
    t->save_stall += t->last_end - began;
    return status;
}

static vla_status validate_if_due(vla_trainer *t, vla_error *err)
{
    vla_record r;
    if (!is_validation_due(t, &t->progress))
        return VLA_OK;
    vla_status status = vla_trainer_validate(t, &r, err);
    t->last_end = vlai_now();
    return status;
}

/* A step or a validation failed (a damaged file, no memory): what was trained so far is saved, and the failure returned. */
static vla_status leave(vla_trainer *t, vla_status status)
{
    vla_error failure = VLA_ERROR_INIT;
    vla_record unreported;
    if (t->group) /* the others are elsewhere, or end as well: nothing can be saved */
        return status;
    while (t->flight_count > 0) /* what is under way belongs to the state that is saved */
        if (vlai_step_end(t, &unreported, &failure) != VLA_OK)
            return status;
    if (status != VLA_E_NONFINITE && t->progress.step > 0 && save(t, true, &failure) != VLA_OK)
        vlai_warn("%s", failure.message);
    return status;
}

/* One step is begun, if none is under way, and with options.ahead the one after it; the older is ended and reported. */
static vla_status step_on(vla_trainer *t, vla_error *err)
{
    vla_record r;
    VLA_TRY(t->flight_count == 0 ? take_broken(t, err) : VLA_OK);
    vlai_progress p = vlai_step_cursor(t);
    for (int i = t->flight_count; i < (t->options.ahead && t->options.whole_step ? VLAI_FLIGHTS : 1) && t->broken == VLA_OK; i++) {
        if (i > 0 && !goes_on(t, &p))
            break;
        vlai_progress after = p;
        after.step++;
        after.place += vlai_step_samples(t);
        if (after.place >= t->epoch_samples) {
            after.epoch++;
            after.place = 0;
        }
        t->goes_on = t->options.ahead && goes_on(t, &after);
        vla_status status = vlai_step_begin(t, i ? &t->broken_error : err);
        t->goes_on = false;
        if (status != VLA_OK && i == 0)
            return status;
        t->broken = status != VLA_OK ? status : t->broken;
        p = after;
    }
    return end_step(t, &r, err);
}

/* What the run has held, at its end. */
static void say_memory(const vla_trainer *t)
{
    vlai_plans_use use = vlai_plans_used(t->plans);
    if (use.made == 0)
        return;
    char device[48] = "";
    if (t->on_device)
        snprintf(device, sizeof device, " and %.3f GB of the device", 1e-9 * (double)vla_executor_held(t->executor));
    vlai_info("memory: %.3f GB of the host at the peak%s; arena of %.3f GB reserved, %.3f GB of it in use at once; %lld plan%s made", 1e-9 * (double)vlai_peak_resident_bytes(),
              device, 1e-9 * (double)use.arena, 1e-9 * (double)use.live, (long long)use.made, use.made == 1 ? "" : "s");
}

static vla_status run_steps(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    vla_record r;
    if (t->validates && o->validate_first)
        VLA_TRY(vla_trainer_validate(t, &r, err));
    t->last_end = vlai_now();
    if (is_far_enough(t, &t->progress))
        vlai_info("nothing to train: step %" PRId64 " of %" PRId64 " is done, epoch %" PRId64 " of %" PRId64 "%s", t->progress.step, total_steps(t),
                  t->progress.epoch, o->epochs, is_over(t, &t->progress) ? "; more of hyperparams.scheduler.num_training_steps or num_epoch goes on" : "");
    bool stopped = false;
    while (!stopped && !is_far_enough(t, &t->progress)) {
        vla_status status = step_on(t, err);
        stopped = vlai_ranks_stopped(t, &t->progress);
        while (status == VLA_OK && stopped && t->flight_count > 0)
            status = end_step(t, &r, err);
        bool settled = !stopped && t->flight_count == 0; /* with one under way nothing is due: else it would not have been begun */
        if (status == VLA_OK && settled)
            status = save_if_due(t, err);
        if (status == VLA_OK && settled)
            status = validate_if_due(t, err);
        if (status != VLA_OK)
            return leave(t, status);
    }
    VLA_TRY(save(t, true, err));
    say_memory(t);
    if (vlai_ranks_stopped(t, &t->progress) && !is_over(t, &t->progress))
        return vlai_fail(err, VLA_E_CANCELLED, "stopped on request after step %lld of %lld; the state is saved in %s",
                         (long long)t->progress.step, (long long)total_steps(t), o->run);
    return VLA_OK;
}

vla_status vla_trainer_run(vla_trainer *t, vla_error *err)
{
    vla_status status = run_steps(t, err);
    if (status != VLA_OK && status != VLA_E_CANCELLED)
        status = vlai_ranks_failed(t, status, err);
    return status;
}
