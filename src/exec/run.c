/* The CPU executor: walks a plan's nodes and calls their kernels on buffers that were resolved once. */
#include "base/bf16.h"
#include "base/fail.h"
#include "base/memory.h"
#include "base/pool.h"
#include "base/time.h"
#include "cpu/cpu.h"
#include "exec/plan.h"
#include "exec/profile.h"
#include "exec/state_names.h"
#include "exec/store.h"
#include "vla/run.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, WIDEN_TILE = 1 << 15 };

struct vla_executor {
    vlai_pool *pool;
    int threads;
    char *arena, *workspace, *thread_workspace, *widen;
    size_t arena_bytes, workspace_bytes, per_thread, widen_bytes;
};

struct vla_run {
    vla_executor *executor;
    const vla_plan *plan;
    void **data; /* per value */
    vlai_cpu_call *calls;
};

vla_status vla_executor_create(int threads, vla_executor **out, vla_error *err)
{
    *out = NULL;
    vla_executor *ex = vlai_calloc(1, sizeof *ex);
    if (!ex)
        return vlai_nomem(err, sizeof *ex);
    vla_status status = vlai_pool_create(threads, &ex->pool, err);
    if (status != VLA_OK) {
        vlai_free(ex);
        return status;
    }
    ex->threads = vlai_pool_threads(ex->pool);
    *out = ex;
    return VLA_OK;
}

void vla_executor_destroy(vla_executor *ex)
{
    if (!ex)
        return;
    vlai_pool_destroy(ex->pool);
    vlai_free(ex->arena);
    vlai_free(ex->workspace);
    vlai_free(ex->thread_workspace);
    vlai_free(ex->widen);
    vlai_free(ex);
}

int vla_executor_threads(const vla_executor *ex)
{
    return ex->threads;
}

static vla_status grow(char **buffer, size_t *have, size_t want, vla_error *err)
{
    if (*have >= want)
        return VLA_OK;
    vlai_free(*buffer);
    *have = 0;
    *buffer = vlai_alloc_aligned(want, PAGE);
    if (!*buffer)
        return vlai_nomem(err, want);
    *have = want;
    return VLA_OK;
}

vla_status vla_executor_reserve(vla_executor *ex, const vla_plan *plan, vla_error *err)
{
    VLA_TRY(grow(&ex->arena, &ex->arena_bytes, plan->memory.arena_bytes, err));
    VLA_TRY(grow(&ex->workspace, &ex->workspace_bytes, plan->workspace, err));
    size_t per_thread = (plan->workspace_per_thread + 63) & ~(size_t)63, have = ex->per_thread * (size_t)ex->threads;
    VLA_TRY(grow(&ex->thread_workspace, &have, per_thread * (size_t)ex->threads, err));
    if (per_thread > ex->per_thread)
        ex->per_thread = per_thread;
    return grow(&ex->widen, &ex->widen_bytes, plan->widen, err);
}

size_t vla_executor_bytes(const vla_executor *ex)
{
    return ex->arena_bytes + ex->workspace_bytes + ex->per_thread * (size_t)ex->threads + ex->widen_bytes;
}

/* A parameter or state value finds its tensor in the store. */
static vla_status bind_persistent(const vlai_value_info *v, const vla_store *store, void **data, vla_error *err)
{
    vla_store_kind kind = VLA_STORE_WEIGHT;
    const char *name = v->name;
    if (v->kind == VLAI_STATE) {
        for (int k = 0; k < VLA_STORE_KINDS; k++)
            if (!strncmp(name, vlai_state_prefix[k], 2))
                kind = (vla_store_kind)k;
        name += 2;
    }
    int64_t index = store ? vla_store_find(store, name) : -1;
    if (index < 0)
        return vlai_fail(err, VLA_E_NOT_FOUND, "parameter '%s' of the plan is not in the store", name);
    vla_tensor t = vla_store_tensor(store, kind, (size_t)index);
    if (!t.data || t.elements != v->elements || t.dtype != v->dtype)
        return vlai_fail(err, VLA_E_SHAPE, "parameter '%s': the plan wants %lld elements of %s, the store has %lld of %s%s",
                         v->name, (long long)v->elements, vlai_graph_dtype_name(v->dtype), (long long)t.elements,
                         vla_dtype_name(t.dtype), t.data ? "" : " and keeps no such tensor");
    *data = t.data;
    return VLA_OK;
}

static void set_tensor(vlai_cpu_tensor *t, const vlai_value_info *v, void *data)
{
    t->data = data;
    t->dtype = v->dtype;
    t->rank = v->rank;
    t->elements = v->elements;
    memcpy(t->shape, v->shape, sizeof t->shape);
}

vla_status vla_run_create(vla_executor *ex, const vla_plan *plan, vla_store *store, vla_run **out, vla_error *err)
{
    *out = NULL;
    VLA_TRY(vla_executor_reserve(ex, plan, err));
    const vla_graph *g = plan->graph;
    vla_run *run = vlai_calloc(1, sizeof *run);
    if (!run)
        return vlai_nomem(err, sizeof *run);
    run->executor = ex;
    run->plan = plan;
    run->data = vlai_calloc(g->n_values + 1, sizeof *run->data);
    run->calls = vlai_calloc(g->n_nodes + 1, sizeof *run->calls);
    vla_status status = VLA_OK;
    if (!run->data || !run->calls)
        status = vlai_nomem(err, g->n_nodes * sizeof *run->calls);
    for (size_t v = 0; status == VLA_OK && v < g->n_values; v++) {
        const vlai_value_info *info = &g->values[v];
        if (info->kind == VLAI_PARAM || info->kind == VLAI_STATE)
            status = bind_persistent(info, store, &run->data[v], err);
        else if (plan->memory.offset[v] >= 0)
            run->data[v] = ex->arena + plan->memory.offset[v];
    }
    for (size_t v = 0; status == VLA_OK && v < g->n_values; v++)
        if (!run->data[v] && plan->memory.root[v] >= 0)
            run->data[v] = run->data[plan->memory.root[v]];
    for (size_t n = 0; status == VLA_OK && n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        vlai_cpu_call *call = &run->calls[n];
        call->node = node;
        call->pool = ex->pool;
        for (int i = 0; i < node->n_inputs; i++)
            if (node->inputs[i] != VLA_NONE)
                set_tensor(&call->in[i], vlai_value(g, node->inputs[i]), run->data[node->inputs[i]]);
        for (int i = 0; i < node->n_outputs; i++)
            set_tensor(&call->out[i], vlai_value(g, node->outputs[i]), run->data[node->outputs[i]]);
    }
    if (status != VLA_OK) {
        vla_run_destroy(run);
        return status;
    }
    *out = run;
    return VLA_OK;
}

void vla_run_destroy(vla_run *run)
{
    if (!run)
        return;
    vlai_free(run->data);
    vlai_free(run->calls);
    vlai_free(run);
}

typedef struct {
    void *wide;
    uint16_t *narrow;
    int64_t elements;
} widen_job;

static void widen_tile(void *context, int64_t tile, int thread)
{
    (void)thread;
    const widen_job *job = context;
    int64_t end = (tile + 1) * WIDEN_TILE < job->elements ? (tile + 1) * WIDEN_TILE : job->elements;
    for (int64_t i = tile * WIDEN_TILE; i < end; i++)
        ((float *)job->wide)[i] = vlai_bf16_to_float(job->narrow[i]);
}

static void round_tile(void *context, int64_t tile, int thread)
{
    (void)thread;
    const widen_job *job = context;
    int64_t end = (tile + 1) * WIDEN_TILE < job->elements ? (tile + 1) * WIDEN_TILE : job->elements;
    for (int64_t i = tile * WIDEN_TILE; i < end; i++)
        job->narrow[i] = vlai_bf16_from_float(((const float *)job->wide)[i]);
}

static void convert(vlai_pool *pool, vlai_tile_fn fn, void *wide, void *narrow, int64_t elements)
{
    widen_job job = {wide, narrow, elements};
    vlai_pool_run(pool, (elements + WIDEN_TILE - 1) / WIDEN_TILE, fn, &job);
}

/* Operands widened to fp32 scratch, the kernel, results rounded back. */
static void run_widened(const vla_run *run, const vlai_cpu_call *original)
{
    vlai_cpu_call call = *original;
    const vlai_node *node = call.node;
    char *scratch = run->executor->widen;
    for (int i = 0; i < node->n_inputs; i++)
        if (call.in[i].data && call.in[i].dtype == VLA_BF16) {
            convert(call.pool, widen_tile, scratch, call.in[i].data, call.in[i].elements);
            call.in[i].data = scratch;
            scratch += ((size_t)call.in[i].elements * sizeof(float) + 63) & ~(size_t)63;
        }
    for (int i = 0; i < node->n_outputs; i++)
        if (call.out[i].data && call.out[i].dtype == VLA_BF16) {
            call.out[i].data = scratch;
            scratch += ((size_t)call.out[i].elements * sizeof(float) + 63) & ~(size_t)63;
        }
    vlai_ops[node->op].cpu_float(&call);
    for (int i = 0; i < node->n_outputs; i++)
        if (original->out[i].data && original->out[i].dtype == VLA_BF16)
            convert(call.pool, round_tile, call.out[i].data, original->out[i].data, call.out[i].elements);
}

static void run_node(const vla_run *run, size_t n)
{
    vla_numerics numerics = run->plan->options.numerics;
    vlai_cpu_call *call = &run->calls[n];
    const vlai_op_info *info = &vlai_ops[call->node->op];
    call->workspace = run->executor->workspace;
    call->thread_workspace = run->executor->thread_workspace;
    call->workspace_per_thread = run->executor->per_thread;
    if (numerics == VLA_FP64)
        info->cpu_double(call);
    else if (numerics != VLA_FP32 && !vlai_op_is_raw(call->node->op))
        run_widened(run, call);
    else
        info->cpu_float(call);
}

vla_status vla_run_execute(vla_run *run, vla_error *err)
{
    (void)err;
    for (size_t n = 0; n < run->plan->graph->n_nodes; n++)
        run_node(run, n);
    return VLA_OK;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

vla_status vlai_run_profile(vla_run *run, int repeats, vlai_profile *out, vla_error *err)
{
    *out = (vlai_profile){0};
    const vla_graph *g = run->plan->graph;
    double *totals = vlai_calloc((size_t)repeats * 2 + 2, sizeof *totals), *alone = totals + repeats;
    if (!totals)
        return vlai_nomem(err, (size_t)repeats * 2 * sizeof *totals);
    for (int r = 0; r < repeats; r++) {
        double start = vlai_now(), before = start;
        for (size_t n = 0; n < g->n_nodes; n++) {
            run_node(run, n);
            double now = vlai_now();
            out->seconds[g->nodes[n].op] += (now - before) / repeats;
            before = now;
        }
        totals[r] = before - start;
    }
    /* The products again, on whatever their operands hold now: their time does not depend on it. */
    for (int r = 0; r < repeats; r++) {
        double start = vlai_now();
        for (size_t n = 0; n < g->n_nodes; n++)
            if (g->nodes[n].op == VLAI_OP_matmul)
                run_node(run, n);
        alone[r] = vlai_now() - start;
    }
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_cost cost = {0};
        out->calls[g->nodes[n].op]++;
        vlai_ops[g->nodes[n].op].cost(g, &g->nodes[n], &cost);
        if (g->nodes[n].op == VLAI_OP_matmul)
            out->flops_matmul += cost.flops;
    }
    qsort(totals, (size_t)repeats, sizeof *totals, by_value);
    qsort(alone, (size_t)repeats, sizeof *alone, by_value);
    out->total = totals[repeats / 2];
    out->matmul_alone = alone[repeats / 2];
    vlai_free(totals);
    return VLA_OK;
}

vla_tensor vla_run_tensor(const vla_run *run, const char *name)
{
    vla_tensor t = {0};
    vla_value v = vla_graph_find(run->plan->graph, name);
    if (v == VLA_NONE || !run->data[v])
        return t;
    const vlai_value_info *info = vlai_value(run->plan->graph, v);
    t = (vla_tensor){.name = info->name, .data = run->data[v], .dtype = info->dtype, .rank = info->rank, .elements = info->elements};
    for (int i = 0; i < info->rank; i++)
        t.shape[i] = info->shape[i];
    return t;
}

void *vla_run_data(const vla_run *run, const char *name)
{
    return vla_run_tensor(run, name).data;
}
