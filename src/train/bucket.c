#include "train/bucket.h"

#include "base/fail.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/text.h"
#include "exec/executor.h"
#include "exec/shard.h"
#include "exec/touched.h"
#include "optim/settings.h"
#include "pass/pass.h"
#include "train/device.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    vla_gradient_status *status;
    vla_plan *plan;
    vla_run *run;
    uint64_t used;
} update;

struct vlai_plans {
    vla_model model;
    vla_store *store;
    vla_executor *executor;
    vlai_plans_options options;
    vlai_bucket *buckets;
    update *updates;
    size_t count, update_count;
    uint64_t clock;
    vla_plan_memory largest;
    vlai_plans_use use;
    vla_recompute recompute; /* of the newest plan of a batch */
    bool told;
    /* Several ranks: what the first plan of a step says for all that follow. */
    vlai_comm_order order;         /* of collectives */
    vla_gradient_status *stepped;  /* per parameter; NULL before it */
    vla_plan *gather;              /* weights alone */
    vla_run *gather_run;
    vla_plan *norms;               /* of weights */
    vla_run *norms_run;
};

enum { UPDATES = 8 /* combinations of parameters with gradients; one run has one or two */ };

vla_status vlai_plans_create(const vla_model *model, vla_store *store, vla_executor *executor,
                             const vlai_plans_options *options, vlai_plans **out, vla_error *err)
{
    *out = NULL;
    vlai_plans *p = vlai_calloc(1, sizeof *p);
    if (!p)
        return vlai_nomem(err, sizeof *p);
    *p = (vlai_plans){.model = *model, .store = store, .executor = executor, .options = *options,
                      .recompute = options->plan.recompute};
    p->options.plan.store = store;
    if (p->options.most < 2)
        p->options.most = 2;
    p->buckets = vlai_calloc((size_t)p->options.most, sizeof *p->buckets);
    p->updates = vlai_calloc(UPDATES, sizeof *p->updates);
    if (!p->buckets || !p->updates) {
        vla_status status = vlai_nomem(err, (size_t)p->options.most * sizeof *p->buckets);
        vlai_plans_destroy(p);
        return status;
    }
    *out = p;
    return VLA_OK;
}

static void drop_bucket(vlai_bucket *b)
{
    vla_run_destroy(b->run);
    vla_plan_destroy(b->plan);
    vlai_free(b->shape);
    vlai_free(b->status);
    *b = (vlai_bucket){0};
}

static void drop_update(update *u)
{
    vla_run_destroy(u->run);
    vla_plan_destroy(u->plan);
    vlai_free(u->status);
    *u = (update){0};
}

void vlai_plans_destroy(vlai_plans *p)
{
    if (!p)
        return;
    for (size_t i = 0; i < p->count; i++)
        drop_bucket(&p->buckets[i]);
    for (size_t i = 0; i < p->update_count; i++)
        drop_update(&p->updates[i]);
    vla_run_destroy(p->gather_run);
    vla_plan_destroy(p->gather);
    vla_run_destroy(p->norms_run);
    vla_plan_destroy(p->norms);
    vlai_comm_order_fini(&p->order);
    vlai_free(p->stepped);
    vlai_free(p->buckets);
    vlai_free(p->updates);
    vlai_free(p);
}

static void raise_memory(vlai_plans *p, const vla_plan *plan)
{
    vla_plan_memory m = vla_plan_memory_get(plan), *top = &p->largest;
    const size_t *from = (const size_t *)&m;
    size_t *to = (size_t *)top;
    for (size_t i = 0; i < sizeof m / sizeof *from; i++)
        if (from[i] > to[i])
            to[i] = from[i];
    if (plan->memory.arena_bytes > p->use.arena) {
        p->use.arena = plan->memory.arena_bytes;
        p->use.live = plan->memory.peak_bytes;
    }
}

static vla_status rebind(vlai_plans *p, const vla_plan *plan, vla_run **run, vla_error *err)
{
    vla_run_destroy(*run);
    *run = NULL;
    return vla_run_create(p->executor, plan, p->store, run, err);
}

/* Makes room for a plan first. When the arena moved, every run made before points to freed memory and is made again. */
static vla_status bind(vlai_plans *p, const vla_plan *plan, vla_run **run, vla_error *err)
{
    size_t before = vla_executor_bytes(p->executor);
    VLA_TRY(vla_executor_reserve(p->executor, plan, err));
    if (vla_executor_bytes(p->executor) != before) {
        for (size_t i = 0; i < p->count; i++)
            if (p->buckets[i].run)
                VLA_TRY(rebind(p, p->buckets[i].plan, &p->buckets[i].run, err));
        for (size_t i = 0; i < p->update_count; i++)
            if (p->updates[i].run)
                VLA_TRY(rebind(p, p->updates[i].plan, &p->updates[i].run, err));
        if (p->gather_run)
            VLA_TRY(rebind(p, p->gather, &p->gather_run, err));
        if (p->norms_run)
            VLA_TRY(rebind(p, p->norms, &p->norms_run, err));
    }
    raise_memory(p, plan);
    return vla_run_create(p->executor, plan, p->store, run, err);
}

/* ---- several ranks ---- */

/* Which parameters are stepped, and in which order buckets go, is the same for every batch and rank: else they would wait for
 * each other for ever. */
static vla_status note_step(vlai_plans *p, const vla_gradient_status *status, const vla_plan *plan, vla_error *err)
{
    size_t count = vla_store_count(p->store);
    if (!vlai_store_is_sharded(p->store))
        return VLA_OK;
    for (size_t i = 0; p->stepped && i < count; i++)
        if ((p->stepped[i] == VLA_GRADIENT_NONE) != (status[i] == VLA_GRADIENT_NONE))
            return vlai_fail(err, VLA_E_INTERNAL, "parameter '%s' is stepped by some plans of this run and not by others, on rank %d of %d",
                             p->store->params[i].name, p->store->rank, p->store->world);
    if (!p->stepped) {
        p->stepped = vlai_array(count + 1, sizeof *p->stepped);
        if (!p->stepped)
            return vlai_nomem(err, count * sizeof *p->stepped);
        memcpy(p->stepped, status, count * sizeof *status);
    }
    if (p->options.plan.order || plan->order.n_gather + plan->order.n_reduce == 0)
        return VLA_OK;
    VLA_TRY(vlai_comm_order_copy(&plan->order, &p->order, err));
    p->options.plan.order = &p->order;
    return VLA_OK;
}

vla_status vlai_plans_gather(vlai_plans *p, vla_error *err)
{
    if (!p->options.plan.overlap || !p->options.whole_step || p->order.n_gather == 0)
        return VLA_OK; /* every step ends with whole weights, or none was made */
    if (!p->gather_run) {
        vla_graph *graph;
        vla_plan_destroy(p->gather);
        p->gather = NULL;
        VLA_TRY(vlai_graph_gather(p->store, &p->order, &graph, err));
        VLA_TRY(vla_plan_build(graph, &p->options.plan, &p->gather, err));
        VLA_TRY(bind(p, p->gather, &p->gather_run, err));
    }
    return vla_run_execute(p->gather_run, err);
}

/* ---- plans of batches ---- */

/* The graph of a shape with its backward pass, as the options want it. */
static vla_status make_graph(vlai_plans *p, vlai_bucket *b, vla_graph **graph, vla_error *err)
{
    const vlai_plans_options *o = &p->options;
    VLA_TRY(p->model.build(p->model.user, b->shape, graph, err));
    vla_value loss = vla_graph_find(*graph, "loss");
    VLA_TRY(vla_graph_check(*graph, err));
    if (loss == VLA_NONE)
        return vlai_fail(err, VLA_E_INVALID, "the model's graph has no result named 'loss'");
    VLA_TRY(vlai_pass_narrow(*graph, NULL, err));
    loss = vla_graph_find(*graph, "loss");
    if (!b->training)
        return VLA_OK;
    double scale = 1.0 / (double)(o->accumulation * (o->world > 1 ? o->world : 1));
    if (o->scaled) {
        vla_value factor = vla_graph_input(*graph, "loss.scale", VLA_PRECISE, 1, (int64_t[]){1});
        loss = vla_mul(*graph, loss, factor);
        scale = 1.0;
    }
    VLA_TRY(vla_graph_backward(*graph, loss, scale, err));
    if (o->whole_step)
        return vla_graph_step(*graph, p->store, b->status, &o->adamw, err);
    return vla_graph_store_gradients(*graph, p->store, o->accumulation > 1, b->status, err);
}

static vla_status make_plan(vlai_plans *p, vlai_bucket *b, vla_recompute recompute, size_t keep, vla_error *err)
{
    vla_graph *graph = NULL;
    vla_plan_options options = p->options.plan;
    options.recompute = recompute;
    options.keep = keep;
    vla_status status = make_graph(p, b, &graph, err);
    if (status != VLA_OK) {
        vla_graph_destroy(graph);
        return status;
    }
    VLA_TRY(vla_plan_build(graph, &options, &b->plan, err)); /* takes the graph, also when it fails */
    return b->training ? note_step(p, b->status, b->plan, err) : VLA_OK;
}

/* With room to spare, less is made again, by `keep` bytes or, where those do not fit, by half as many; *need becomes what that takes. */
static vla_status keep_more(vlai_plans *p, vlai_bucket *b, vla_recompute mode, size_t keep, size_t room, size_t held, size_t *need, vla_error *err)
{
    do {
        vla_plan_destroy(b->plan);
        b->plan = NULL;
        VLA_TRY(make_plan(p, b, mode, keep, err));
        vlai_plan_need own = vlai_plan_needs(p->executor, b->plan);
        *need = held + own.arena + own.scratch;
        keep /= 2;
    } while (*need > room && keep);
    return VLA_OK;
}

/* The least recompute whose plan fits beside the parameters; all that there is when none does, which the executor then
 * refuses with its own numbers. It changes no bit of the results. line: what each needs, for whoever reads the log. */
static vla_status choose_recompute(vlai_plans *p, vlai_bucket *b, vla_recompute *mode, vlai_text *line, vla_error *err)
{
    size_t held = vlai_store_held(p->store), room = vlai_device_room(p->executor, p->options.limit, held);
    vlai_plan_need own;
    size_t need;
    for (*mode = p->options.plan.recompute;; ++*mode) {
        VLA_TRY(make_plan(p, b, *mode, 0, err));
        own = vlai_plan_needs(p->executor, b->plan);
        need = held + own.arena + own.scratch;
        vlai_text_printf(line, "%s%s needs %.3f GB", line->size ? ", " : "", vlai_recompute_name(*mode), 1e-9 * (double)need);
        if (*mode == VLA_RECOMPUTE_LAYER || need <= room)
            break;
        vla_plan_destroy(b->plan);
        b->plan = NULL;
    }
    /* Ranks leave room free, since sharing state out is to make it, unless a limit says how much they may take. */
    bool spare = p->options.limit || p->options.plan.keep || !vlai_store_is_sharded(p->store);
    size_t keep = spare ? vlai_device_keep(*mode, p->options.plan.numerics, p->options.plan.keep, room, need, own.arena) : 0;
    if (keep) {
        VLA_TRY(keep_more(p, b, *mode, keep, room, held, &need, err));
        vlai_text_printf(line, " and %.3f GB with %s it has room to keep", 1e-9 * (double)need, *mode == VLA_RECOMPUTE_LAYER ? "the last layers, which" : "what");
    }
    if (room < SIZE_MAX)
        vlai_text_printf(line, ", %.3f GB are there", 1e-9 * (double)room);
    return VLA_OK;
}

static vla_status make_fitting_plan(vlai_plans *p, vlai_bucket *b, vla_error *err)
{
    vlai_text line = {0};
    vla_recompute mode;
    vla_status status = choose_recompute(p, b, &mode, &line, err);
    if (status == VLA_OK && (mode != p->recompute || p->count == 1))
        vlai_info("memory.recompute auto: %s: %s", line.data ? line.data : "", vlai_recompute_name(mode));
    if (status == VLA_OK)
        p->recompute = mode;
    vlai_text_fini(&line);
    return status;
}

/* Batches a little larger than the first will come: where there is room, a device's arena is a little larger from the start, so
 * that it need not be made anew, and every captured step with it. */
static void leave_room(const vlai_plans *p, vla_plan *plan)
{
    size_t held = vlai_store_held(p->store), room = vlai_device_room(p->executor, p->options.limit, held);
    vlai_plan_need need = vlai_plan_needs(p->executor, plan);
    size_t more = need.arena / 32;
    if (strcmp(vla_executor_device(p->executor), "cpu") != 0 && need.arena > p->executor->arena_bytes && held + need.arena + more + need.scratch <= room)
        plan->memory.arena_bytes += more;
}

static vla_status fill_bucket(vlai_plans *p, vlai_bucket *b, const void *shape, bool training, vla_error *err)
{
    size_t params = vla_store_count(p->store);
    b->training = training;
    b->shape = vlai_alloc(p->model.shape_size);
    b->status = vlai_calloc(params ? params : 1, sizeof *b->status);
    if (!b->shape || !b->status)
        return vlai_nomem(err, p->model.shape_size + params * sizeof *b->status);
    memcpy(b->shape, shape, p->model.shape_size);
    VLA_TRY(p->options.automatic && training ? make_fitting_plan(p, b, err) : make_plan(p, b, p->options.plan.recompute, p->options.plan.keep, err));
    p->use.made++;
    if (training)
        leave_room(p, b->plan);
    return bind(p, b->plan, &b->run, err);
}

/* A free place among the buckets; the one used longest ago when all are taken. */
static vlai_bucket *free_bucket(vlai_plans *p)
{
    if (p->count < (size_t)p->options.most)
        return &p->buckets[p->count++];
    vlai_bucket *oldest = &p->buckets[0];
    for (size_t i = 1; i < p->count; i++)
        if (p->buckets[i].used < oldest->used)
            oldest = &p->buckets[i];
    if (!p->told)
        vlai_warn("more than %lld shapes of batches: plans are dropped and made again (WALLX_PERF_COMPILE_RECOMP_LIMIT)",
                  (long long)p->options.most);
    p->told = true;
    drop_bucket(oldest);
    return oldest;
}

static vlai_bucket *find_bucket(const vlai_plans *p, const void *shape, bool training)
{
    for (size_t i = 0; i < p->count; i++) {
        vlai_bucket *b = &p->buckets[i];
        if (b->run && b->training == training && !memcmp(b->shape, shape, p->model.shape_size))
            return b;
    }
    return NULL;
}

bool vlai_plans_has(const vlai_plans *p, const void *shape, bool training)
{
    return find_bucket(p, shape, training) != NULL;
}

vla_status vlai_plans_get(vlai_plans *p, const void *shape, bool training, vlai_bucket **out, vla_error *err)
{
    *out = NULL;
    vlai_bucket *b = find_bucket(p, shape, training);
    if (b) {
        b->used = ++p->clock;
        *out = b;
        return VLA_OK;
    }
    b = free_bucket(p);
    vla_status status = fill_bucket(p, b, shape, training, err);
    if (status != VLA_OK) {
        drop_bucket(b);
        return status;
    }
    b->used = ++p->clock;
    *out = b;
    return VLA_OK;
}

vla_status vlai_plans_update(vlai_plans *p, const vla_gradient_status *wanted, vla_run **out, vla_error *err)
{
    size_t bytes = vla_store_count(p->store) * sizeof *wanted;
    *out = NULL;
    for (size_t i = 0; i < p->update_count; i++)
        if (p->updates[i].run && !memcmp(p->updates[i].status, wanted, bytes)) {
            p->updates[i].used = ++p->clock;
            *out = p->updates[i].run;
            return VLA_OK;
        }
    update *u = &p->updates[0];
    if (p->update_count < UPDATES)
        u = &p->updates[p->update_count++];
    else
        for (size_t i = 1; i < UPDATES; i++)
            if (p->updates[i].used < u->used)
                u = &p->updates[i];
    drop_update(u);
    vla_graph *graph = NULL;
    u->status = vlai_alloc(bytes ? bytes : 1);
    vla_status status = u->status ? VLA_OK : vlai_nomem(err, bytes);
    if (status == VLA_OK) {
        memcpy(u->status, wanted, bytes);
        status = vla_graph_adamw(p->store, wanted, &p->options.adamw, &graph, err);
    }
    if (status == VLA_OK)
        status = vla_plan_build(graph, &p->options.plan, &u->plan, err);
    if (status == VLA_OK)
        status = note_step(p, wanted, u->plan, err);
    if (status == VLA_OK)
        status = bind(p, u->plan, &u->run, err);
    if (status != VLA_OK) {
        drop_update(u);
        return status;
    }
    u->used = ++p->clock;
    *out = u->run;
    return VLA_OK;
}

/* Plain launches, one per parameter: a plan that runs this seldom has no use for more. */
vla_status vlai_plans_norms(vlai_plans *p, const int *group, int groups, double *norms, vla_error *err)
{
    char name[32];
    if (!p->norms_run) {
        vla_graph *graph;
        vla_plan_options plain = VLA_PLAN_OPTIONS_DEFAULT;
        plain.numerics = p->options.plan.numerics;
        vla_plan_destroy(p->norms);
        p->norms = NULL;
        VLA_TRY(vlai_graph_norms(p->store, group, groups, &graph, err));
        VLA_TRY(vla_plan_build(graph, &plain, &p->norms, err));
        VLA_TRY(bind(p, p->norms, &p->norms_run, err));
    }
    VLA_TRY(vla_run_execute(p->norms_run, err));
    for (int k = 0; k < groups; k++) {
        snprintf(name, sizeof name, "norm.%d", k);
        const double *norm = vla_run_data(p->norms_run, name);
        if (!norm)
            return vlai_fail(err, VLA_E_INTERNAL, "the plan of norms has no result '%s'", name);
        norms[k] = *norm;
    }
    return VLA_OK;
}

vlai_plans_use vlai_plans_used(const vlai_plans *p)
{
    return p->use;
}

vla_status vlai_plans_touched(const vlai_plans *p, size_t *bytes, vla_error *err)
{
    vlai_touched t = {0};
    vla_status status = VLA_OK;
    for (size_t i = 0; status == VLA_OK && i < p->count; i++)
        if (p->buckets[i].plan)
            status = vlai_touched_add(&t, p->buckets[i].plan, err);
    for (size_t i = 0; status == VLA_OK && i < p->update_count; i++)
        if (p->updates[i].plan)
            status = vlai_touched_add(&t, p->updates[i].plan, err);
    *bytes = vlai_touched_bytes(&t);
    vlai_touched_fini(&t);
    return status;
}

vla_plan_memory vlai_plans_memory(const vlai_plans *p)
{
    return p->largest;
}
