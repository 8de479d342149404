/* The CPU: walks a plan's nodes and calls their kernels on buffers that were resolved once. */
#include "base/bf16.h"
#include "base/fail.h"
#include "base/memory.h"
#include "base/order.h"
#include "base/time.h"
#include "cpu/gemm.h"
#include "dist/comm.h"
#include "exec/executor.h"
#include "exec/profile.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, WIDEN_TILE = 1 << 15 };

static vla_status cpu_open(vla_executor *ex, vla_error *err)
{
    VLA_TRY(vlai_blas_room(ex->threads > 0 ? ex->threads : vlai_pool_processors(), err));
    VLA_TRY(vlai_pool_create(ex->threads, &ex->pool, err));
    ex->threads = vlai_pool_threads(ex->pool);
    return VLA_OK;
}

static void cpu_close(vla_executor *ex)
{
    vlai_pool_destroy(ex->pool);
    vlai_free(ex->arena);
    vlai_free(ex->workspace);
    vlai_free(ex->thread_workspace);
    vlai_free(ex->widen);
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

static vla_status cpu_reserve(vla_executor *ex, const vla_plan *plan, vla_error *err)
{
    VLA_TRY(grow(&ex->arena, &ex->arena_bytes, plan->memory.arena_bytes, err));
    VLA_TRY(grow(&ex->workspace, &ex->workspace_bytes, plan->workspace, err));
    size_t per_thread = (plan->workspace_per_thread + 63) & ~(size_t)63, have = ex->per_thread * (size_t)ex->threads;
    VLA_TRY(grow(&ex->thread_workspace, &have, per_thread * (size_t)ex->threads, err));
    if (per_thread > ex->per_thread)
        ex->per_thread = per_thread;
    return grow(&ex->widen, &ex->widen_bytes, plan->widen, err);
}

static void set_tensor(vlai_cpu_tensor *t, const vlai_value_info *v, void *data)
{
    t->data = data;
    t->dtype = v->dtype;
    t->rank = v->rank;
    t->elements = v->elements;
    memcpy(t->shape, v->shape, sizeof t->shape);
}

/* run->state: one resolved call per node. */
static vla_status cpu_bind(vla_run *run, vla_store *store, vla_error *err)
{
    (void)store;
    const vla_graph *g = run->plan->graph;
    vlai_cpu_call *calls = vlai_calloc(g->n_nodes + 1, sizeof *calls);
    if (!calls)
        return vlai_nomem(err, g->n_nodes * sizeof *calls);
    run->state = calls;
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        calls[n].node = node;
        calls[n].pool = run->executor->pool;
        calls[n].comm = run->executor->comm;
        for (int i = 0; i < node->n_inputs; i++)
            if (node->inputs[i] != VLA_NONE)
                set_tensor(&calls[n].in[i], vlai_value(g, node->inputs[i]), run->data[node->inputs[i]]);
        for (int i = 0; i < node->n_outputs; i++)
            set_tensor(&calls[n].out[i], vlai_value(g, node->outputs[i]), run->data[node->outputs[i]]);
    }
    return VLA_OK;
}

static void cpu_unbind(vla_run *run)
{
    vlai_free(run->state);
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

void vlai_cpu_run_node(const vla_run *run, size_t n)
{
    vla_numerics numerics = run->plan->options.numerics;
    vlai_cpu_call *call = &((vlai_cpu_call *)run->state)[n];
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

static vla_status cpu_execute(vla_run *run, vla_error *err)
{
    const vla_graph *g = run->plan->graph;
    char why[512];
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_cpu_run_node(run, n);
        if (vlai_op_is_collective(g->nodes[n].op) && vlai_comm_error(run->executor->comm, why, sizeof why))
            return vlai_fail(err, VLA_E_NCCL, "collective %d (%s): %s", g->nodes[n].attrs.comm.order, vlai_ops[g->nodes[n].op].name, why);
    }
    return VLA_OK;
}

static void *cpu_data(const vla_run *run, vla_value v)
{
    return run->data[v];
}

static vla_status cpu_profile(vla_run *run, int repeats, vlai_profile *out, vla_error *err)
{
    const vla_graph *g = run->plan->graph;
    double *totals = vlai_calloc((size_t)repeats * 2 + 2, sizeof *totals), *alone = totals + repeats;
    out->nodes = vlai_calloc(g->n_nodes + 1, sizeof *out->nodes);
    if (!totals || !out->nodes) {
        vlai_free(totals);
        return vlai_nomem(err, ((size_t)repeats * 2 + g->n_nodes) * sizeof *totals);
    }
    for (int r = 0; r < repeats; r++) {
        double start = vlai_now(), before = start;
        for (size_t n = 0; n < g->n_nodes; n++) {
            vlai_cpu_run_node(run, n);
            double now = vlai_now();
            out->seconds[g->nodes[n].op] += (now - before) / repeats;
            out->nodes[n] += (now - before) / repeats;
            before = now;
        }
        totals[r] = before - start;
    }
    /* The products again, on whatever their operands hold now: their time does not depend on it. */
    for (int r = 0; r < repeats; r++) {
        double start = vlai_now();
        for (size_t n = 0; n < g->n_nodes; n++)
            if (g->nodes[n].op == VLAI_OP_matmul)
                vlai_cpu_run_node(run, n);
        alone[r] = vlai_now() - start;
    }
    for (size_t n = 0; n < g->n_nodes; n++) {
        vlai_cost cost = {0};
        out->calls[g->nodes[n].op]++;
        vlai_ops[g->nodes[n].op].cost(g, &g->nodes[n], &cost);
        if (g->nodes[n].op == VLAI_OP_matmul)
            out->flops_matmul += cost.flops;
    }
    qsort(totals, (size_t)repeats, sizeof *totals, vlai_by_value);
    qsort(alone, (size_t)repeats, sizeof *alone, vlai_by_value);
    out->total = totals[repeats / 2];
    out->matmul_alone = alone[repeats / 2];
    vlai_free(totals);
    return VLA_OK;
}

const vlai_backend vlai_backend_cpu = {.name = "cpu", .open = cpu_open, .close = cpu_close, .reserve = cpu_reserve, .bind = cpu_bind,
                                       .unbind = cpu_unbind, .execute = cpu_execute, .data = cpu_data, .profile = cpu_profile};
