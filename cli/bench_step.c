/* One row of vla bench: a store of random weights, the plans that these switches stand for, and the steps. */
#include "bench.h"

#include "base/fail.h"
#include "base/order.h"
#include "base/time.h"
#include "bench_engine.h"
#include "dist/comm.h"
#include "exec/executor.h"
#include "exec/plan.h"
#include "exec/store.h"
#include "model/wallx_plan.h"
#include "optim/settings.h"
#include "train/device.h"
#include "train/switches.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef bench_engine engine;

static void engine_destroy(engine *e)
{
    if (!e)
        return;
    vla_run_destroy(e->update);
    vla_run_destroy(e->run);
    vla_plan_destroy(e->update_plan);
    vla_plan_destroy(e->plan);
    vla_store_destroy(e->store);
    vlai_comm_close(e->comm);
    vla_executor_destroy(e->executor);
    vlai_wallx_workload_fini(&e->work);
    for (int64_t i = 0; i < e->n_more; i++)
        vlai_wallx_workload_fini(&e->more[i]);
    vlai_free(e->more);
    vlai_free(e->gradients);
    vlai_free(e);
}

static vla_plan_options plan_options(const bench_setup *s, const engine *e, const bench_row *row, vla_recompute recompute)
{
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    const bench_switches *w = &row->switches;
    o.numerics = row->numerics;
    o.layout = w->alloc ? VLA_MEMORY_LIFETIMES : VLA_MEMORY_FREE_LISTS;
    o.recompute = recompute;
    o.fuse = !strcmp(s->device, "cpu") ? 0u : (w->compile ? VLA_FUSE_MODEL : 0u) | (w->visual ? VLA_FUSE_VISUAL : 0u); /* as the trainer does */
    o.visual_layers = (int)s->model.vision.depth + 1;
    o.fast_attention = w->attention;
    o.fast = (w->compile ? VLA_FAST_SEARCH | VLA_FAST_REPLAY | VLA_FAST_LANES | VLA_FAST_UPDATE : 0u) | (w->visual ? VLA_FAST_SEARCH : 0u) |
             (w->optimizer ? VLA_FAST_UPDATE : 0u);
    if (s->first_choice)
        o.fast &= ~(unsigned)VLA_FAST_SEARCH;
    o.store = e->store;
    o.overlap = bench_overlaps(w);
    o.gradient_dtype = s->train->dist.gradient_dtype == VLAI_GRADIENTS_BF16   ? VLA_BF16
                       : s->train->dist.gradient_dtype == VLAI_GRADIENTS_FP32 ? VLA_F32
                                                                              : VLA_DTYPE_NONE;
    o.product_sms_free = (int)s->train->dist.product_sms_free;
    return o;
}

size_t bench_bucket_bytes(const vlai_config *config, const bench_switches *s)
{
    return (size_t)(bench_overlaps(s) ? vlai_switch_number("WALLX_PERF_BUCKET", config->perf.bucket) : 25) * 1000000;
}

/* As the trainer does: the executor, the communicator, this rank's part of the store. */
static vla_status share_out(const bench_setup *s, const bench_row *row, engine *e, vla_error *err)
{
    const vlai_ranks *r = &s->ranks->ranks;
    vla_shard_options share = {sizeof share, r->rank, r->world, bench_bucket_bytes(s->train, &row->switches), (int)s->train->dist.zero};
    VLA_TRY(vlai_comm_open(s->ranks->group, s->device, &e->comm, err));
    vlai_executor_set_comm(e->executor, e->comm);
    return vla_store_shard(e->store, &share, err);
}

/* A step of several micro-batches has its gradients in the store, as has one without `compile`. */
static bool in_parts(const bench_setup *s, const bench_row *row)
{
    return s->accumulate > 1 || !row->switches.compile;
}

static int group_of(const char *name, void *config)
{
    return vlai_settings_group(name, config);
}

static vla_status make_store(const bench_setup *s, bench_row *row, engine *e, vla_error *err)
{
    double start = vlai_now();
    e->model = s->model;
    e->model.exact_widths = !row->switches.visual; /* as the trainer does */
    VLA_TRY(vla_executor_create_on(s->device, s->threads, &e->executor, err));
    e->device = strcmp(vla_executor_device(e->executor), "cpu") != 0;
    vla_executor_limit(e->executor, s->limit);
    VLA_TRY(vla_store_create(&e->store, err));
    VLA_TRY(vlai_wallx_params(&e->model, group_of, (void *)(uintptr_t)s->train, e->store, err));
    e->gradients = vlai_calloc(vla_store_count(e->store) + 1, sizeof *e->gradients);
    if (!e->gradients)
        return vlai_nomem(err, vla_store_count(e->store) * sizeof *e->gradients);
    if (s->ranks && s->ranks->group)
        VLA_TRY(share_out(s, row, e, err));
    vla_store_use use = !in_parts(s, row) ? VLA_STORE_STEP : s->accumulate > 1 ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN;
    VLA_TRY(vla_store_allocate_on(e->store, e->executor, row->numerics, use, 0, err));
    VLA_TRY(vlai_wallx_random_weights(e->store, err));
    row->weights_seconds = vlai_now() - start;
    return VLA_OK;
}

/* What store and plans take together, and the room that the trainer would leave too. */
static size_t needed(const engine *e)
{
    vlai_plan_need a = vlai_plan_needs(e->executor, e->plan), b = {0, 0};
    if (e->update_plan)
        b = vlai_plan_needs(e->executor, e->update_plan);
    return vlai_store_held(e->store) + (a.arena > b.arena ? a.arena : b.arena) + (a.scratch > b.scratch ? a.scratch : b.scratch);
}

static size_t room_of(const bench_setup *s, const engine *e)
{
    return vlai_device_room(e->executor, s->limit, vlai_store_held(e->store));
}

static vla_status make_plans(const bench_setup *s, const bench_row *row, vla_recompute recompute, size_t keep, engine *e, vla_error *err)
{
    vla_plan_options o = plan_options(s, e, row, recompute);
    o.keep = keep;
    vla_adamw_options adamw = vlai_settings_adamw(s->train);
    memset(e->gradients, 0, vla_store_count(e->store) * sizeof *e->gradients);
    if (!in_parts(s, row)) {
        VLA_TRY(vlai_wallx_plan_step(&e->model, &e->work.shape, e->store, &adamw, &o, e->gradients, &e->plan, err));
    } else {
        vla_graph *update;
        VLA_TRY(vlai_wallx_plan_training(&e->model, &e->work.shape, e->store, s->accumulate > 1 ? s->accumulate : 1, &o, e->gradients, &e->plan, err));
        VLA_TRY(vla_graph_adamw(e->store, e->gradients, &adamw, &update, err));
        VLA_TRY(vla_plan_build(update, &o, &e->update_plan, err));
    }
    return VLA_OK;
}

static void drop_runs(engine *e)
{
    vla_run_destroy(e->update);
    vla_run_destroy(e->run);
    vla_plan_destroy(e->update_plan);
    vla_plan_destroy(e->plan);
    e->update = e->run = NULL;
    e->update_plan = e->plan = NULL;
}

/* What does not fit is known before anything is allocated. `spare`: with room to spare less is made again. */
static vla_status make_runs(const bench_setup *s, bench_row *row, vla_recompute recompute, bool spare, engine *e, vla_error *err)
{
    double start = vlai_now();
    size_t wanted = (size_t)(1e9 * s->train->memory.keep_gb);
    VLA_TRY(make_plans(s, row, recompute, spare ? 0 : wanted, e, err));
    size_t room = room_of(s, e), need = needed(e);
    if (e->device && need > room)
        return vlai_fail(err, VLA_E_DEVICE_NOMEM, "%lld samples: %.2f GB, of %.2f GB that there are", (long long)row->batch, (double)need * 1e-9, (double)room * 1e-9);
    spare = spare && (s->limit || wanted || !e->comm); /* as the trainer does */
    size_t keep = spare && e->device ? vlai_device_keep(recompute, row->numerics, wanted, room, need, vlai_plan_needs(e->executor, e->plan).arena) : 0;
    for (; keep; keep = needed(e) > room ? keep / 2 : 0) {
        drop_runs(e);
        VLA_TRY(make_plans(s, row, recompute, keep, e, err));
    }
    if (e->update_plan)
        VLA_TRY(vla_executor_reserve(e->executor, e->update_plan, err));
    row->plan_seconds = vlai_now() - start;
    start = vlai_now();
    e->executor->explore = s->products;
    VLA_TRY(vla_run_create(e->executor, e->plan, e->store, &e->run, err));
    if (e->update_plan)
        VLA_TRY(vla_run_create(e->executor, e->update_plan, e->store, &e->update, err));
    row->bind_seconds = vlai_now() - start;
    return VLA_OK;
}

/* Micro-batch k of a step is the same on any number of ranks: rank r of N has those of k = a N + r. */
static vla_status make_work(const bench_setup *s, const bench_row *row, engine *e, vla_error *err)
{
    vlai_wallx_workload_options work = s->work;
    int world = s->ranks ? s->ranks->ranks.world : 1, rank = s->ranks ? s->ranks->ranks.rank : 0;
    work.samples = row->batch;
    work.number = s->accumulate > 0 ? rank : 0;
    VLA_TRY(vlai_wallx_workload_init(&s->model, &work, &e->work, err));
    if (s->accumulate < 2)
        return VLA_OK;
    if (!(e->more = vlai_calloc((size_t)s->accumulate - 1, sizeof *e->more)))
        return vlai_nomem(err, (size_t)s->accumulate * sizeof *e->more);
    for (; e->n_more < s->accumulate - 1; e->n_more++) {
        work.number += world;
        VLA_TRY(vlai_wallx_workload_init(&s->model, &work, &e->more[e->n_more], err));
    }
    return VLA_OK;
}

/* With `alloc`, and no level asked for, cheap recompute, less where there is room and more where that does not fit: as vla
 * train does. */
static vla_status make_engine(const bench_setup *s, bench_row *row, engine *e, vla_error *err)
{
    VLA_TRY(make_work(s, row, e, err));
    VLA_TRY(make_store(s, row, e, err));
    bool alloc = row->switches.alloc;
    int first = s->recompute >= 0 ? s->recompute : alloc ? VLA_RECOMPUTE_CHEAP : VLA_RECOMPUTE_NONE;
    int last = s->recompute < 0 && alloc ? VLA_RECOMPUTE_LAYER : first;
    vla_status status = VLA_OK;
    for (int level = first; level <= last; level++) {
        drop_runs(e);
        row->recompute = (vla_recompute)level;
        status = make_runs(s, row, row->recompute, last > first, e, err);
        if (status != VLA_E_DEVICE_NOMEM)
            break;
    }
    return status;
}

static vla_status fill(const bench_setup *s, const engine *e, int64_t micro, vla_error *err)
{
    const vlai_wallx_workload *w = micro ? &e->more[micro - 1] : &e->work;
    return vlai_wallx_fill(&s->model, &w->tokens, &e->work.shape, &w->batch, vlai_wallx_find_in_run, e->run, err);
}

static double loss_of(const engine *e)
{
    return (double)*(const float *)vla_run_data(e->run, "loss");
}

static void note(bench_row *row, const engine *e, int64_t step, double loss)
{
    if (!row)
        return;
    row->losses[step] = loss;
    for (int i = 0; i < BENCH_LOSSES; i++)
        if (bench_loss_at[i] == step)
            row->loss[i] = loss;
    row->grad_norm = *(const double *)vla_run_data(e->update ? e->update : e->run, "clip");
}

static void count_from_here(bench_row *row, const engine *e)
{
    if (!row)
        return;
    vlai_device_now now = vlai_device_now_get(e->executor);
    row->allocations = now.allocations;
    row->synchronizations = now.synchronizations;
}

static void count_to_here(bench_row *row, const engine *e)
{
    if (!row)
        return;
    row->now = vlai_device_now_get(e->executor);
    row->allocations = row->now.allocations - row->allocations;
    row->synchronizations = row->now.synchronizations - row->synchronizations;
}

static void tell(const bench_setup *s, int64_t step)
{
    if (s->ranks)
        vlai_group_progress(s->ranks->group, "step", step);
}

/* Each step waited for before the next begins. On a device the batch stands in pinned memory and is uploaded every time; on
 * the CPU buffers of inputs are used again within a step, so it is written every time, outside the measured time. */
static vla_status run_in_turn(const bench_setup *s, engine *e, int64_t first, int64_t count, double *times, bench_row *row, vla_error *err)
{
    for (int64_t step = 0; step < count; step++) {
        if (step == count / 2)
            count_from_here(row, e);
        if (step == 0 || !e->device || e->n_more)
            VLA_TRY(fill(s, e, 0, err));
        if (!e->update)
            vlai_settings_hyper(s->train, first + step, first + step, vla_run_data(e->run, "hyper"));
        tell(s, first + step);
        double start = vlai_now(), loss = 0;
        if (e->n_more)
            vla_store_zero_gradients(e->store);
        for (int64_t micro = 0; micro <= e->n_more; micro++) {
            if (micro)
                VLA_TRY(fill(s, e, micro, err));
            VLA_TRY(vla_run_execute(e->run, err));
            loss += loss_of(e) / (double)(e->n_more + 1);
        }
        if (e->update) { /* the CPU's inputs stand in the arena, which both plans share */
            vlai_settings_hyper(s->train, first + step, first + step, vla_run_data(e->update, "hyper"));
            *(float *)vla_run_data(e->update, "guard") = 0;
            VLA_TRY(vla_run_execute(e->update, err));
        }
        times[step] = vlai_now() - start;
        note(row, e, step, loss);
    }
    count_to_here(row, e);
    return VLA_OK;
}

/* A step is handed over while the one before still runs; its time is from one end to the next. Both copies of the inputs hold
 * the batch after two steps. */
static vla_status run_ahead(const bench_setup *s, engine *e, int64_t first, int64_t count, double *times, bench_row *row, vla_error *err)
{
    double end = vlai_now();
    for (int64_t step = 0; step <= count; step++) {
        if (step < count) {
            if (step == count / 2)
                count_from_here(row, e);
            if (step > 0)
                VLA_TRY(vla_run_other_inputs(e->run, err));
            if (step < 2 || !e->device)
                VLA_TRY(fill(s, e, 0, err));
            vlai_settings_hyper(s->train, first + step, first + step, vla_run_data(e->run, "hyper"));
            tell(s, first + step);
            VLA_TRY(vla_run_submit(e->run, err));
        } else {
            count_to_here(row, e); /* the last step still runs */
        }
        if (step == 0)
            continue;
        VLA_TRY(vla_run_wait(e->run, err));
        double now = vlai_now();
        times[step - 1] = now - end;
        end = now;
        note(row, e, step - 1, loss_of(e));
    }
    return VLA_OK;
}

vla_status bench_steps(const bench_setup *s, engine *e, const bench_switches *switches, int64_t first, int64_t count, double *times, bench_row *row, vla_error *err)
{
    bool ahead = switches->ahead && e->device && !e->update;
    return ahead ? run_ahead(s, e, first, count, times, row, err) : run_in_turn(s, e, first, count, times, row, err);
}

static void summarize(const bench_setup *s, bench_row *row, const engine *e, double *times)
{
    int64_t late = s->steps - s->steps / 2;
    double *second = times + s->steps - late;
    qsort(second, (size_t)late, sizeof *second, vlai_by_value);
    row->measured = (int)late;
    row->step = second[late / 2];
    row->fastest = second[0];
    row->slowest = second[late - 1];
    row->flops = e->work.flops * (double)(row->batch * (e->n_more + 1));
    row->executed = vla_plan_flops(e->plan) * (double)(e->n_more + 1);
    row->nodes = vla_plan_nodes(e->plan) + (e->update_plan ? vla_plan_nodes(e->update_plan) : 0);
    row->held = vla_executor_held(e->executor);
    row->host_bytes = vla_executor_bytes(e->executor);
    row->threads = vla_executor_threads(e->executor);
}

/* What the ranks have come to before their first step. Memory that one of them lacks is lacking for all; recompute is that of
 * the rank with the least room; and all have the same collectives in the same order. */
static vla_status settle(const bench_setup *s, bench_row *row, engine *e, vla_error *err)
{
    typedef struct outcome {
        int32_t full, level;
        char reason[504];
    } outcome;
    int world = s->ranks->ranks.world, lacks = -1, level = 0;
    outcome own = {.full = row->out_of_memory, .level = (int32_t)row->recompute}, *all = vlai_calloc((size_t)world, sizeof *all);
    if (!all)
        return vlai_nomem(err, (size_t)world * sizeof *all);
    snprintf(own.reason, sizeof own.reason, "%.500s", row->reason);
    vla_status status = vlai_group_gather_all(s->ranks->group, "the memory of ranks", &own, sizeof own, all, err);
    for (int r = world - 1; status == VLA_OK && r >= 0; r--) {
        lacks = all[r].full ? r : lacks;
        level = all[r].level > level ? all[r].level : level;
    }
    if (lacks >= 0) {
        row->out_of_memory = true;
        snprintf(row->reason, sizeof row->reason, "rank %d: %.500s", lacks, all[lacks].reason);
    }
    vlai_free(all);
    if (status != VLA_OK || row->out_of_memory)
        return status;
    if (level > (int)row->recompute) {
        drop_runs(e);
        row->recompute = (vla_recompute)level;
        VLA_TRY(make_runs(s, row, row->recompute, false, e, err));
    }
    vlai_text text = {0};
    for (const vla_plan *p = e->plan; p; p = p == e->plan ? e->update_plan : NULL)
        for (size_t n = 0; n < p->graph->n_nodes; n++) {
            const vlai_node *node = &p->graph->nodes[n];
            if (vlai_op_is_collective(node->op))
                vlai_text_printf(&text, "collective %d: %s of bucket %d, %lld elements\n", node->attrs.comm.order, vlai_ops[node->op].name, node->attrs.comm.bucket,
                                 (long long)vlai_value(p->graph, node->inputs[0])->elements);
        }
    status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = vlai_group_agree(s->ranks->group, "the plan", text.data ? text.data : "", err);
    vlai_text_fini(&text);
    return status;
}

vla_status bench_measure(const bench_setup *s, bench_row *row, vla_error *err)
{
    double *times = vlai_calloc((size_t)s->steps + 1, sizeof *times);
    row->losses = vlai_calloc((size_t)s->steps + 1, sizeof *row->losses);
    engine *e = row->engine = vlai_calloc(1, sizeof *e);
    for (int i = 0; i < BENCH_LOSSES; i++)
        row->loss[i] = NAN;
    vla_status status = times && e && row->losses ? make_engine(s, row, e, err) : vlai_nomem(err, (size_t)s->steps * sizeof *times);
    if (status == VLA_E_DEVICE_NOMEM) {
        row->out_of_memory = true;
        memcpy(row->reason, err->message, sizeof row->reason);
        status = VLA_OK;
    }
    if (status == VLA_OK && s->ranks && s->ranks->group)
        status = settle(s, row, e, err);
    if (status == VLA_OK && !row->out_of_memory) {
        status = bench_steps(s, e, &row->switches, 0, s->steps, times, row, err);
        if (status == VLA_OK)
            summarize(s, row, e, times);
        if (status == VLA_OK && e->comm)
            status = bench_turns(s, e, row, err);
        if (status == VLA_OK && s->profile)
            status = fill(s, e, 0, err);
        if (status == VLA_OK && s->profile)
            status = vlai_run_profile(e->run, 5, &row->profile, err);
    }
    vlai_free(times);
    return status;
}

void bench_row_fini(bench_row *row)
{
    vlai_profile_fini(&row->profile);
    vlai_free(row->losses);
    row->losses = NULL;
    engine_destroy(row->engine);
    row->engine = NULL;
}

const vla_plan *bench_row_plan(const bench_row *row)
{
    return row->engine->plan;
}
