#include "train/run_memory.h"

#include "base/fail.h"
#include "base/memory.h"
#include "ckpt/ckpt.h"
#include "exec/plan.h"
#include "exec/store.h"
#include "exec/touched.h"
#include "pass/pass.h"
#include "train/device.h"

#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* ---- plans ---- */

static bool is_whole(const vlai_run_settings *s)
{
    return s->whole_step && s->accumulation == 1;
}

static vla_store_use use_of(const vlai_run_settings *s)
{
    return is_whole(s) ? VLA_STORE_STEP : s->accumulation > 1 ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN;
}

typedef struct planner {
    const vla_model *model;
    const vlai_run_settings *settings;
    const vla_adamw_options *adamw;
    vla_store *store; /* of parameters only: never allocated */
    vla_plan_options options;
    vla_gradient_status *status;
    void *shape;
    vlai_touched touched;
    size_t shared, per_thread, widen; /* scratch, largest of the plans */
    size_t snapshots;                 /* of all ranks of this host */
    vlai_plan_need need;              /* the same on a device, with the arena */
    vlai_run_memory *out;
} planner;

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Takes the graph, also when it fails. */
static vla_status note_plan(planner *p, vla_graph *graph, vla_error *err)
{
    vla_plan *plan;
    VLA_TRY(vla_plan_build(graph, &p->options, &plan, err));
    vla_status status = vlai_touched_add(&p->touched, plan, err);
    p->out->inputs = larger(p->out->inputs, plan->bytes.inputs);
    p->out->arena = larger(p->out->arena, plan->memory.arena_bytes);
    p->shared = larger(p->shared, plan->workspace);
    p->per_thread = larger(p->per_thread, plan->workspace_per_thread);
    p->widen = larger(p->widen, plan->widen);
    if (p->settings->executor) {
        vlai_plan_need need = vlai_plan_needs(p->settings->executor, plan);
        p->need.arena = larger(p->need.arena, need.arena);
        p->need.scratch = larger(p->need.scratch, need.scratch);
    }
    vla_plan_destroy(plan);
    return status;
}

/* The forward graph of a batch, with its backward pass when it trains. */
static vla_status plan_batch(planner *p, void *const *slots, int64_t count, bool training, vla_error *err)
{
    vla_graph *g = NULL;
    vla_status status;
    bool accumulate = p->settings->accumulation > 1;
    memset(p->shape, 0, p->model->shape_size);
    VLA_TRY(p->model->shape(p->model->user, slots, count, p->shape, err));
    VLA_TRY_GOTO(p->model->build(p->model->user, p->shape, &g, err), fail);
    VLA_TRY_GOTO(vla_graph_check(g, err), fail);
    VLA_TRY_GOTO(vlai_pass_narrow(g, NULL, err), fail);
    if (training) {
        VLA_TRY_GOTO(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0 / (double)p->settings->accumulation, err), fail);
        if (is_whole(p->settings))
            VLA_TRY_GOTO(vla_graph_step(g, p->store, p->status, p->adamw, err), fail);
        else
            VLA_TRY_GOTO(vla_graph_store_gradients(g, p->store, accumulate, p->status, err), fail);
    }
    return note_plan(p, g, err);
fail:
    vla_graph_destroy(g);
    return status;
}

static vla_status plan_all(planner *p, void *const *slots, vla_error *err)
{
    const vlai_run_settings *s = p->settings;
    VLA_TRY(plan_batch(p, slots, s->batch, true, err));
    int64_t validation = s->validation_batch ? s->validation_batch : s->batch;
    if (validation > 0)
        VLA_TRY(plan_batch(p, slots, validation, false, err));
    vla_graph *update;
    if (is_whole(s))
        return VLA_OK;
    VLA_TRY(vla_graph_adamw(p->store, p->status, p->adamw, &update, err));
    return note_plan(p, update, err);
}

static size_t ranks_here(const vlai_run_settings *s)
{
    return s->ranks_here > 1 ? (size_t)s->ranks_here : 1;
}

static void add_store(planner *p)
{
    const vlai_run_settings *s = p->settings;
    vla_store_use use = use_of(s);
    size_t bytes[VLA_STORE_KINDS];
    for (int k = 0; k < VLA_STORE_KINDS; k++)
        bytes[k] = vla_store_bytes(p->store, (vla_store_kind)k, s->numerics, use);
    p->out->weights = bytes[VLA_STORE_WEIGHT];
    p->out->gradients = bytes[VLA_STORE_GRADIENT];
    p->out->optimizer = bytes[VLA_STORE_M] + bytes[VLA_STORE_V] + bytes[VLA_STORE_LOW];
    p->out->checkpoint = p->out->weights + p->out->optimizer;
    p->out->files = vlai_ckpt_bytes(p->store);
    p->snapshots = p->out->checkpoint + (ranks_here(s) - 1) * vlai_ckpt_share(p->store, 1);
}

/* On a device: parameters and plans there, pinned copies of the inputs here. */
static void add_device(planner *p)
{
    vlai_run_memory *m = p->out;
    vlai_run_device *d = &m->device;
    *d = (vlai_run_device){.weights = m->weights, .gradients = m->gradients, .optimizer = m->optimizer, .inputs = m->inputs,
                           .activations = p->need.arena > m->inputs ? p->need.arena - m->inputs : 0, .workspace = p->need.scratch,
                           .driver = VLAI_DEVICE_SPARE, .collectives = p->settings->shard.world > 1 ? VLAI_DEVICE_COLLECTIVES : 0};
    /* A limit is for what the program allocates; what it finds free is for everything. */
    size_t beside = d->driver + d->collectives;
    size_t room = vlai_device_room(p->settings->executor, p->settings->limit, 0), found = vlai_device_room(p->settings->executor, 0, 0);
    if (found < SIZE_MAX)
        found = found > d->collectives ? found - d->collectives : 0;
    room = found < room ? found : room;
    d->available = room < SIZE_MAX - beside ? room + beside : room;
    d->total = d->weights + d->gradients + d->optimizer + d->inputs + d->activations + d->workspace + beside;
    m->inputs *= 2;
    m->weights = m->gradients = m->optimizer = 0;
    m->total = m->inputs + m->loader + m->process;
}

static void add_host(planner *p)
{
    vlai_run_memory *m = p->out;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    size_t threads = p->settings->threads > 0 ? (size_t)p->settings->threads : processors > 0 ? (size_t)processors : 1;
    size_t touched = vlai_touched_bytes(&p->touched);
    m->inputs = m->inputs < touched ? m->inputs : touched;
    m->activations = touched - m->inputs;
    m->workspace = p->shared + p->widen + threads * p->per_thread;
    m->total = m->weights + m->gradients + m->optimizer + m->inputs + m->activations + m->workspace + m->loader + m->process;
}

/* A snapshot is taken when there is room for those of all ranks of the host then (ckpt/): `available` counts from now, when what
 * `process` says is held already, by one. */
static void add_snapshot(const planner *p, size_t available)
{
    vlai_run_memory *m = p->out;
    size_t more = ranks_here(p->settings) * m->total - m->process;
    size_t left = available > more ? available - more : 0;
    m->snapshot = vlai_ckpt_has_room(left, p->snapshots) ? m->checkpoint : 0;
    m->total += m->snapshot;
}

/* What counts against the room: of the device, or of the limit on the host. */
static size_t taken(const planner *p)
{
    const vlai_run_memory *m = p->out;
    return p->settings->executor ? m->device.total : m->weights + m->gradients + m->optimizer + m->inputs + m->activations + m->workspace;
}

static size_t room(const planner *p)
{
    return p->settings->executor ? p->out->device.available : p->settings->limit ? p->settings->limit : SIZE_MAX;
}

/* Plans with what the options say, and fills *out. */
static vla_status plan_once(planner *p, void *const *slots, vla_error *err)
{
    vlai_run_memory *m = p->out;
    *m = (vlai_run_memory){.loader = m->loader, .process = m->process, .recompute = p->options.recompute};
    p->touched.count = p->shared = p->per_thread = p->widen = 0;
    p->need = (vlai_plan_need){0};
    memset(p->status, 0, vla_store_count(p->store) * sizeof *p->status);
    VLA_TRY(plan_all(p, slots, err));
    add_store(p);
    if (p->settings->executor)
        add_device(p);
    else
        add_host(p);
    return VLA_OK;
}

vla_status vlai_run_memory_plan(const vla_model *model, const vla_adamw_options *adamw, void *const *slots,
                                const vlai_run_settings *settings, size_t available, vlai_run_memory *out, vla_error *err)
{
    planner p = {.model = model, .settings = settings, .adamw = adamw, .options = VLA_PLAN_OPTIONS_DEFAULT, .out = out};
    vla_status status;
    p.options.numerics = settings->numerics;
    p.options.recompute = settings->recompute;
    p.options.layout = settings->layout;
    p.options.fuse = settings->fuse;
    p.options.visual_layers = settings->visual_layers;
    p.options.fast_attention = settings->fast_attention;
    p.options.fast = settings->fast;
    p.options.overlap = settings->overlap;
    p.options.gradient_dtype = settings->gradient_dtype;
    p.options.keep = settings->automatic ? 0 : settings->keep;
    VLA_TRY_GOTO(vla_store_create(&p.store, err), done);
    VLA_TRY_GOTO(model->params(model->user, p.store, err), done);
    if (settings->shard.world > 1)
        VLA_TRY_GOTO(vla_store_shard(p.store, &settings->shard, err), done);
    p.options.store = p.store;
    VLA_TRY_GOTO(vlai_store_lay_out(p.store, settings->numerics, use_of(settings), err), done);
    p.shape = vlai_calloc(1, model->shape_size);
    p.status = vlai_calloc(vla_store_count(p.store) + 1, sizeof *p.status);
    if (!p.shape || !p.status) {
        status = vlai_nomem(err, model->shape_size + vla_store_count(p.store) * sizeof *p.status);
        goto done;
    }
    VLA_TRY_GOTO(plan_once(&p, slots, err), done);
    while (settings->automatic && p.options.recompute < VLA_RECOMPUTE_LAYER && taken(&p) > room(&p)) {
        p.options.recompute++;
        VLA_TRY_GOTO(plan_once(&p, slots, err), done);
    }
    if (settings->automatic && (settings->limit || settings->keep || settings->shard.world < 2)) { /* as the run itself decides */
        size_t keep = vlai_device_keep(p.options.recompute, p.options.numerics, settings->keep, room(&p), taken(&p), settings->executor ? p.need.arena : out->arena);
        for (; keep; keep = taken(&p) > room(&p) ? keep / 2 : 0) {
            p.options.keep = keep;
            VLA_TRY_GOTO(plan_once(&p, slots, err), done);
        }
    }
    add_snapshot(&p, available);
done:
    vlai_touched_fini(&p.touched);
    vlai_free(p.shape);
    vlai_free(p.status);
    vla_store_destroy(p.store);
    return status;
}
