/* A device for tests that is as asynchronous as a device can be: memory of its own, two sets of inputs and results per run,
 * and executions that are done no earlier than somebody must know their outcome. Kernels are the CPU's, so that results have
 * the CPU's bits.
 *
 *     lazy_install();                      // then "lazy" is the name of a device
 *     ... options.device = "lazy" ...
 *     assert_int_equal(lazy_violations, 0);
 *
 * A violation is what would be undefined on a device: inputs written while they may still be read, memory that goes while
 * something is under way, results read of an execution that was not waited for (they are NaN). */
#ifndef LAZY_DEVICE_H
#define LAZY_DEVICE_H

#include "base/fail.h"
#include "base/memory.h"
#include "exec/executor.h"
#include "exec/store.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAZY_RUNS = 64, LAZY_QUEUE = 16 };

typedef struct lazy_run {
    vla_run *run;
    char *inputs[2], *seen[2]; /* seen: as they were when they were submitted */
    char **results[2];         /* per value */
    int slot, shown;
    int64_t submitted, waited;
} lazy_run;

typedef struct lazy_execution {
    lazy_run *of;
    int slot, result;
    bool done;
} lazy_execution;

static lazy_run lazy_runs[LAZY_RUNS];
static lazy_execution lazy_queue[LAZY_QUEUE];
static int lazy_queued, lazy_violations, lazy_ahead; /* lazy_ahead: most executions that were under way at once */
static int64_t lazy_executions;
static pthread_mutex_t lazy_lock = PTHREAD_MUTEX_INITIALIZER;

static void lazy_blame(const char *what)
{
    fprintf(stderr, "lazy device: %s\n", what);
    lazy_violations++;
}

static lazy_run *lazy_of(const vla_run *run)
{
    for (int i = 0; i < LAZY_RUNS; i++)
        if (lazy_runs[i].run == run)
            return &lazy_runs[i];
    return NULL;
}

static size_t lazy_bytes(const vlai_value_info *v)
{
    return (size_t)v->elements * vla_dtype_size(v->dtype);
}

static bool lazy_is_result(const vlai_value_info *v)
{
    return v->kind == VLAI_TEMP && v->name;
}

static void lazy_perform(lazy_execution *e)
{
    lazy_run *l = e->of;
    vla_run *run = l->run;
    size_t bytes = run->plan->memory.input_bytes;
    if (bytes && memcmp(l->inputs[e->slot], l->seen[e->slot], bytes) != 0)
        lazy_blame("inputs were written while an execution could still read them");
    if (bytes)
        memcpy(run->executor->arena, l->seen[e->slot], bytes);
    vlai_backend_cpu.execute(run, NULL);
    const vla_graph *g = run->plan->graph;
    for (size_t v = 0; v < g->n_values; v++)
        if (l->results[e->result][v])
            memcpy(l->results[e->result][v], run->data[v], lazy_bytes(&g->values[v]));
    if (run->executor->arena_bytes)
        memset(run->executor->arena, 0xFE, run->executor->arena_bytes); /* nothing lasts there */
    e->done = true;
    lazy_executions++;
}

/* The first n of the queue, in order. */
static void lazy_until(int n)
{
    for (int i = 0; i < n; i++)
        if (!lazy_queue[i].done)
            lazy_perform(&lazy_queue[i]);
}

static void lazy_drop_done(void)
{
    int kept = 0;
    for (int i = 0; i < lazy_queued; i++)
        if (!lazy_queue[i].done)
            lazy_queue[kept++] = lazy_queue[i];
    lazy_queued = kept;
}

static bool lazy_is_pending(const lazy_run *l)
{
    for (int i = 0; i < lazy_queued; i++)
        if (lazy_queue[i].of == l && !lazy_queue[i].done)
            return true;
    return false;
}

static vla_status lazy_reserve(vla_executor *ex, const vla_plan *plan, vla_error *err)
{
    char *before = ex->arena;
    lazy_drop_done();
    int pending = lazy_queued;
    if (ex->limit && ex->allocated + plan->memory.arena_bytes > ex->limit)
        return vlai_fail(err, VLA_E_DEVICE_NOMEM, "the arena: %zu bytes are more than the limit of %zu", plan->memory.arena_bytes, ex->limit);
    vla_status status = vlai_backend_cpu.reserve(ex, plan, err);
    if (ex->arena != before && pending)
        lazy_blame("the arena moved while an execution was under way");
    return status;
}

static vla_status lazy_bind(vla_run *run, vla_store *store, vla_error *err)
{
    lazy_run *l = lazy_of(NULL);
    const vla_graph *g = run->plan->graph;
    VLA_TRY(vlai_backend_cpu.bind(run, store, err));
    *l = (lazy_run){.run = run};
    for (int s = 0; s < 2; s++) {
        l->inputs[s] = calloc(run->plan->memory.input_bytes + 1, 1);
        l->seen[s] = calloc(run->plan->memory.input_bytes + 1, 1);
        l->results[s] = calloc(g->n_values + 1, sizeof(char *));
        for (size_t v = 0; v < g->n_values; v++)
            if (lazy_is_result(&g->values[v]) && run->data[v]) {
                l->results[s][v] = malloc(lazy_bytes(&g->values[v]) + 1);
                memset(l->results[s][v], 0xFF, lazy_bytes(&g->values[v]));
            }
    }
    return VLA_OK;
}

static void lazy_unbind(vla_run *run)
{
    lazy_run *l = lazy_of(run);
    if (l) {
        lazy_drop_done();
        if (lazy_is_pending(l))
            lazy_blame("a run went while an execution of it was under way");
        for (int s = 0; s < 2; s++) {
            for (size_t v = 0; v < run->plan->graph->n_values; v++)
                free(l->results[s][v]);
            free(l->inputs[s]);
            free(l->seen[s]);
            free(l->results[s]);
        }
        *l = (lazy_run){0};
    }
    vlai_backend_cpu.unbind(run);
}

static vla_status lazy_submit(vla_run *run, vla_error *err)
{
    lazy_run *l = lazy_of(run);
    if (l->submitted - l->waited == 2)
        return vlai_fail(err, VLA_E_INVALID, "two executions of this run are under way");
    lazy_drop_done();
    if (lazy_queued == LAZY_QUEUE)
        return vlai_fail(err, VLA_E_INVALID, "the queue of the lazy device is full");
    memcpy(l->seen[l->slot], l->inputs[l->slot], run->plan->memory.input_bytes);
    lazy_queue[lazy_queued++] = (lazy_execution){l, l->slot, (int)(l->submitted++ & 1), false};
    lazy_ahead = lazy_queued > lazy_ahead ? lazy_queued : lazy_ahead;
    return VLA_OK;
}

static vla_status lazy_wait(vla_run *run, vla_error *err)
{
    lazy_run *l = lazy_of(run);
    if (l->submitted == l->waited)
        return vlai_fail(err, VLA_E_INVALID, "no execution of this run is under way");
    l->shown = (int)(l->waited++ & 1);
    for (int i = 0; i < lazy_queued; i++)
        if (lazy_queue[i].of == l && lazy_queue[i].result == l->shown && !lazy_queue[i].done) {
            lazy_until(i + 1);
            break;
        }
    lazy_drop_done();
    return VLA_OK;
}

static vla_status lazy_other_inputs(vla_run *run, vla_error *err)
{
    lazy_run *l = lazy_of(run);
    (void)err;
    l->slot = !l->slot;
    for (int i = 0; i < lazy_queued; i++)
        if (lazy_queue[i].of == l && lazy_queue[i].slot == l->slot)
            lazy_until(i + 1);
    lazy_drop_done();
    return VLA_OK;
}

static vla_status lazy_execute(vla_run *run, vla_error *err)
{
    lazy_run *l = lazy_of(run);
    VLA_TRY(lazy_submit(run, err));
    while (l->waited < l->submitted)
        VLA_TRY(lazy_wait(run, err));
    return VLA_OK;
}

static void *lazy_data(const vla_run *run, vla_value v)
{
    const lazy_run *l = lazy_of(run);
    if (vlai_value(run->plan->graph, v)->kind == VLAI_INPUT)
        return run->data[v] ? l->inputs[l->slot] + run->plan->memory.offset[v] : NULL;
    return l->results[l->shown][v];
}

static vla_status lazy_store_alloc(vla_executor *ex, size_t bytes, bool gathered, void **out, vla_error *err)
{
    (void)gathered;
    *out = NULL;
    if (ex->limit && ex->allocated + bytes > ex->limit)
        return vlai_fail(err, VLA_E_DEVICE_NOMEM, "parameters: %zu bytes are more than the limit of %zu", bytes, ex->limit);
    *out = vlai_alloc_aligned(bytes ? bytes : 1, 256);
    ex->allocated += bytes;
    return *out ? VLA_OK : vlai_nomem(err, bytes);
}

static void lazy_store_free(vla_executor *ex, void *memory, size_t bytes)
{
    lazy_drop_done();
    if (lazy_queued)
        lazy_blame("parameters went while an execution was under way");
    ex->allocated -= bytes;
    vlai_free(memory);
}

static vla_status lazy_store_zero(vla_executor *ex, void *memory, size_t bytes, vla_error *err)
{
    (void)ex;
    (void)err;
    lazy_until(lazy_queued);
    memset(memory, 0, bytes);
    return VLA_OK;
}

static vla_status lazy_store_copy(vla_executor *ex, void *memory, void *host, size_t bytes, int to_device, vla_error *err)
{
    (void)ex;
    (void)err;
    pthread_mutex_lock(&lazy_lock); /* copies come from several threads */
    lazy_until(lazy_queued);
    memcpy(to_device ? memory : host, to_device ? host : memory, bytes);
    pthread_mutex_unlock(&lazy_lock);
    return VLA_OK;
}

static vla_status lazy_open(vla_executor *ex, vla_error *err)
{
    return vlai_backend_cpu.open(ex, err);
}

static void lazy_close(vla_executor *ex)
{
    vlai_backend_cpu.close(ex);
}

static char lazy_choices_kept[256]; /* as last adopted */

static vla_status lazy_choices(const vla_executor *ex, vlai_text *out, vla_error *err)
{
    (void)ex;
    (void)err;
    vlai_text_puts(out, "lazy 1\n");
    return VLA_OK;
}

static vla_status lazy_adopt(vla_executor *ex, const char *text, vla_error *err)
{
    (void)ex;
    (void)err;
    snprintf(lazy_choices_kept, sizeof lazy_choices_kept, "%s", text);
    return VLA_OK;
}

static inline void lazy_install(void)
{
    static const vlai_backend lazy = {.name = "lazy", .open = lazy_open, .close = lazy_close, .reserve = lazy_reserve, .bind = lazy_bind,
                                      .unbind = lazy_unbind, .execute = lazy_execute, .data = lazy_data, .submit = lazy_submit,
                                      .wait = lazy_wait, .other_inputs = lazy_other_inputs, .choices = lazy_choices, .adopt = lazy_adopt,
                                      .store_alloc = lazy_store_alloc, .store_free = lazy_store_free, .store_zero = lazy_store_zero,
                                      .store_copy = lazy_store_copy};
    vlai_backend_other = &lazy;
}

#endif
