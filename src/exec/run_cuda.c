/* One CUDA device: an arena and scratch in device memory, launches resolved once, on one stream or in lanes of a stream each
 * (exec/schedule.h, the last for the collectives of several ranks alone), replayed from a captured graph when the plan's
 * options say so.
 *
 * An execution: inputs go from one of two pinned host copies over their own stream to staging memory, from there in one
 * copy to the start of the arena; then the launches; then small results to pinned memory. Nothing is allocated and the host
 * waits for nothing but, in `wait`, the event at the end of an execution. Next: exec/cuda_profile.c. */
#ifdef VLA_CUDA

#include "exec/cuda_run.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/work.h"
#include "dist/comm.h"
#include "kernels/gemm_choices.h"
#include "vendor/cublaslt.h"
#include "vendor/cudnn.h"

#include <stdio.h>
#include <string.h>

enum {
    SMALL_RESULT = 1 << 20,   /* bytes up to which a named result is fetched after every execution */
    SEARCH = 4,               /* counts ways of choosing among them: what another has left on disk, or in src/kernels/products, is not taken */
    PATH = 4096
};

vla_status vlai_cuda_failed(vla_error *err, int code, const char *what)
{
    return code >= 100000 ? vlai_fail(err, VLA_E_CUDA, "%s: cuBLASLt: %s", what, vlai_cublaslt_error(code - 100000))
                          : vlai_fail(err, VLA_E_CUDA, "%s: CUDA: %s", what, vlai_device_error(code));
}

/* ---- device ---- */

/* What is known of products by this kind of GPU, library and search; kept in the cache where that has a place. */
static vla_status open_choices(vlai_cuda_device *d, vla_error *err)
{
    char name[sizeof d->info.name + 64], path[PATH];
    snprintf(name, sizeof name, "gemm-%s-%zu-%d.txt", d->info.name, vlai_cublaslt_version(), SEARCH);
    for (char *c = name; *c; c++)
        if (*c == ' ' || *c == '/')
            *c = '-';
    bool kept = vlai_cache_path(name, path, sizeof path);
    return vlai_gemm_choices_open(kept ? path : NULL, d->info.bus, vlai_gemm_choices_known(name), &d->context.choices, err);
}

static vla_status cuda_open(vla_executor *ex, vla_error *err)
{
    vlai_cuda_device *d = vlai_calloc(1, sizeof *d);
    if (!d)
        return vlai_nomem(err, sizeof *d);
    ex->state = d;
    ex->threads = 1;
    int count = 0, code = vlai_device_count(&count);
    if (code || ex->index >= count)
        return vlai_fail_hint(err, VLA_E_CUDA, "nvidia-smi shows the GPUs of this machine; use the device cpu without one",
                              "device cuda:%d: %d GPUs found%s%s", ex->index, count, code ? ", CUDA: " : "", code ? vlai_device_error(code) : "");
    code = vlai_device_select(ex->index, &d->info);
    d->context.arch = d->info.major * 10 + d->info.minor;
    for (int l = 0; !code && l < VLAI_LANES; l++)
        code = l == 1 || l == VLAI_LANE_COMM ? vlai_device_stream_create_urgent(&d->lanes[l]) : vlai_device_stream_create(&d->lanes[l]);
    if (!code)
        code = vlai_device_stream_create(&d->copies);
    for (int s = 0; !code && s < 2; s++)
        if (!(code = vlai_device_fence_create(&d->uploaded[s])))
            code = vlai_device_fence_create(&d->consumed[s]);
    if (!code)
        code = vlai_device_fence_create(&d->fork);
    for (int l = 1; !code && l < VLAI_LANES; l++)
        code = vlai_device_fence_create(&d->join[l]);
    if (code)
        return vlai_cuda_failed(err, code, "opening the GPU");
    d->context.cudnn = &d->cudnn;
    if ((code = vlai_cublaslt_open(&d->context.cublaslt)))
        return vlai_cuda_failed(err, 100000 + code, "opening cuBLASLt");
    return open_choices(d, err);
}

static void release(vla_executor *ex, void *memory, size_t bytes)
{
    if (!memory)
        return;
    vlai_device_free(memory);
    ex->allocated -= bytes;
}

static void cuda_close(vla_executor *ex)
{
    vlai_cuda_device *d = ex->state;
    if (!d)
        return;
    vlai_device_free(ex->arena);
    for (int l = 0; l < VLAI_LANE_COMM; l++)
        vlai_device_free(d->scratch[l]);
    for (int l = 0; l < VLAI_LANES; l++) {
        vlai_device_stream_destroy(d->lanes[l]);
        vlai_device_event_destroy(d->join[l]);
    }
    for (int s = 0; s < 2; s++) {
        vlai_device_free(d->staging[s]);
        vlai_device_event_destroy(d->uploaded[s]);
        vlai_device_event_destroy(d->consumed[s]);
    }
    vlai_device_event_destroy(d->fork);
    vlai_device_stream_destroy(d->copies);
    vlai_gemm_choices_close(d->context.choices);
    vlai_cublaslt_close(d->context.cublaslt);
    vlai_cudnn_close(d->cudnn);
    vlai_free(d);
}

static vla_status allocate(vla_executor *ex, size_t bytes, const char *what, void **out, vla_error *err)
{
    *out = NULL;
    int code = 0;
    if (ex->limit && ex->allocated + bytes > ex->limit)
        return vlai_fail_hint(err, VLA_E_DEVICE_NOMEM, "a smaller batch, memory.recompute: cheap or layer, or numerics bf16-sr take less",
                              "%s: %zu bytes of device memory, with %zu held already, are more than the limit of %zu", what, bytes,
                              ex->allocated, ex->limit);
    if ((code = vlai_device_alloc(bytes, out)))
        return vlai_fail_hint(err, VLA_E_DEVICE_NOMEM, "a smaller batch, memory.recompute: cheap or layer, or numerics bf16-sr take less",
                              "%s: %zu bytes of device memory, with %zu held already: %s", what, bytes, ex->allocated, vlai_device_error(code));
    ex->allocated += bytes;
    return VLA_OK;
}

static vla_status grow(vla_executor *ex, void **buffer, size_t *have, size_t want, const char *what, vla_error *err)
{
    if (*have >= want)
        return VLA_OK;
    release(ex, *buffer, *have);
    *buffer = NULL;
    *have = 0;
    VLA_TRY(allocate(ex, want, what, buffer, err));
    *have = want;
    return VLA_OK;
}

static vla_status cuda_reserve(vla_executor *ex, const vla_plan *plan, vla_error *err)
{
    vlai_cuda_device *d = ex->state;
    size_t scratch = 0;
    for (size_t n = 0; n < plan->graph->n_nodes; n++) {
        const vlai_node *node = &plan->graph->nodes[n];
        size_t bytes = vlai_cuda_workspaces[node->op](plan->graph, node);
        scratch = bytes > scratch ? bytes : scratch;
    }
    void *arena = ex->arena;
    vla_status status = grow(ex, &arena, &ex->arena_bytes, plan->memory.arena_bytes, "the arena", err);
    ex->arena = arena;
    VLA_TRY(status);
    for (int l = 0; l < (plan->options.fast & VLA_FAST_LANES ? VLAI_LANE_COMM : 1); l++)
        VLA_TRY(grow(ex, &d->scratch[l], &d->scratch_bytes[l], scratch, "kernel scratch", err));
    for (int s = 0; s < 2; s++)
        VLA_TRY(grow(ex, &d->staging[s], &d->staging_bytes[s], plan->memory.input_bytes, "staging of inputs", err));
    ex->workspace_bytes = d->scratch_bytes[0] + d->scratch_bytes[1] + d->scratch_bytes[2] + d->staging_bytes[0] + d->staging_bytes[1];
    return VLA_OK;
}

/* ---- binding ---- */

static void set_tensor(vlai_cuda_tensor *t, const vlai_value_info *v, void *data)
{
    t->data = data;
    t->dtype = v->dtype;
    t->rank = v->rank;
    t->elements = v->elements;
    memcpy(t->shape, v->shape, sizeof t->shape);
}

static size_t bytes_of(const vlai_value_info *v)
{
    return (size_t)v->elements * vla_dtype_size(v->dtype);
}

static bool is_result(const vlai_value_info *v)
{
    return v->kind == VLAI_TEMP && v->name;
}

/* A view shows its operand's bytes: there is nothing to launch. */
static bool is_nothing(const vlai_cuda_call *call)
{
    vlai_op op = call->node->op;
    if (op == VLAI_OP_part)
        return (const char *)call->in[0].data + (size_t)call->node->attrs.slice.first * vla_dtype_size(call->in[0].dtype) == call->out[0].data;
    return op == VLAI_OP_bucket || ((op == VLAI_OP_reshape || op == VLAI_OP_stop_gradient) && call->in[0].data == call->out[0].data);
}

/* Lane 0: the main work. 1: small work, by the graph. 2: gradients of weights, which nobody waits for until the update: they
 * fill what the chain of the activations' gradients leaves free. The last: collectives, on which the other ranks wait too. */
static int lane_of(const vla_run *run, const vlai_node *node)
{
    if (vlai_op_is_collective(node->op))
        return run->plan->options.overlap ? VLAI_LANE_COMM : 0;
    if (!(run->plan->options.fast & VLA_FAST_LANES))
        return 0;
    bool of_weight = node->op == VLAI_OP_matmul && node->backward && node->attrs.matmul.transpose_a;
    return node->lane == 0 && of_weight ? 2 : node->lane;
}

static void set_call(const vla_run *run, size_t n, vlai_cuda_call *call)
{
    const vla_graph *g = run->plan->graph;
    const vlai_cuda_device *d = run->executor->state;
    const vlai_node *node = &g->nodes[n];
    int lane = lane_of(run, node);
    *call = (vlai_cuda_call){.node = node, .stream = d->lanes[lane], .workspace = lane < VLAI_LANE_COMM ? d->scratch[lane] : NULL,
                             .workspace_bytes = lane < VLAI_LANE_COMM ? d->scratch_bytes[lane] : 0,
                             .multiprocessors = d->info.multiprocessors, .comm = run->executor->comm};
    for (int i = 0; i < node->n_inputs; i++)
        if (node->inputs[i] != VLA_NONE)
            set_tensor(&call->in[i], vlai_value(g, node->inputs[i]), run->data[node->inputs[i]]);
    for (int i = 0; i < node->n_outputs; i++)
        set_tensor(&call->out[i], vlai_value(g, node->outputs[i]), run->data[node->outputs[i]]);
}

static bool groups(const vlai_cuda_call *call)
{
    return call->node->op == VLAI_OP_sum_squares || call->node->op == VLAI_OP_adamw;
}

static vlai_span span_of(const vlai_cuda_tensor *t, bool write)
{
    uintptr_t first = (uintptr_t)t->data;
    return (vlai_span){first, t->data ? first + (size_t)t->elements * vla_dtype_size(t->dtype) : first, write};
}

/* Puts the calls first .. first + count - 1 into the order as one launch. */
static vla_status add_launch(vla_run *run, size_t first, size_t count, vla_error *err)
{
    vlai_cuda_run *r = run->state;
    enum { MOST = VLAI_MAX_INPUTS + VLAI_MAX_OUTPUTS };
    vlai_span *spans = vlai_array(count * MOST, sizeof *spans);
    int n = 0;
    if (!spans)
        return vlai_nomem(err, count * MOST * sizeof *spans);
    for (size_t c = first; c < first + count; c++) {
        const vlai_cuda_call *call = &r->calls[c];
        for (int i = 0; i < call->node->n_inputs; i++)
            spans[n++] = span_of(&call->in[i], vlai_ops[call->node->op].writes >> i & 1);
        for (int i = 0; i < call->node->n_outputs; i++)
            spans[n++] = span_of(&call->out[i], true);
    }
    int lane = lane_of(run, r->calls[first].node);
    vla_status status = vlai_schedule_add(&r->schedule, lane, spans, n, err);
    vlai_free(spans);
    VLA_TRY(status);
    r->lanes[lane] = true;
    vlai_cuda_launch *l = &r->launches[r->n_launches++];
    *l = (vlai_cuda_launch){.first = first, .count = count};
    if (count == 1)
        return VLA_OK;
    l->table_bytes = vlai_optim_table_bytes(&r->calls[first], count);
    void *host = vlai_alloc(l->table_bytes);
    if (!host)
        return vlai_nomem(err, l->table_bytes);
    status = vlai_optim_table_fill(&r->calls[first], count, host, l->table_bytes, &l->group, err);
    if (status == VLA_OK)
        status = allocate(run->executor, l->table_bytes, "tables of the update", &l->table, err);
    const vlai_cuda_device *d = run->executor->state;
    int code = status == VLA_OK ? vlai_device_upload(l->table, host, l->table_bytes, d->lanes[0]) : 0;
    if (!code && status == VLA_OK)
        code = vlai_device_synchronize(d->lanes[0]);
    vlai_free(host);
    return code ? vlai_cuda_failed(err, code, "tables of the update") : status;
}

static vla_status order_launches(vla_run *run, vla_error *err)
{
    vlai_cuda_run *r = run->state;
    size_t n_nodes = run->plan->graph->n_nodes;
    bool grouped = run->plan->options.fast & VLA_FAST_UPDATE;
    for (size_t n = 0, count; n < n_nodes; n += count) {
        count = 1;
        if (is_nothing(&r->calls[n]))
            continue;
        if (grouped && groups(&r->calls[n]))
            while (n + count < n_nodes && r->calls[n + count].node->op == r->calls[n].node->op)
                count++;
        VLA_TRY(add_launch(run, n, count, err));
    }
    for (size_t i = 0; i < r->n_launches; i++)
        if (r->schedule.signals[i]) {
            int code = vlai_device_fence_create(&r->launches[i].fence);
            if (code)
                return vlai_cuda_failed(err, code, "an event");
        }
    return VLA_OK;
}

/* Choices that cannot be kept are timed again by the next run; this one has them. */
static void keep_choices(vlai_gemm_choices *choices)
{
    vla_error why = VLA_ERROR_INIT;
    if (vlai_gemm_choices_save(choices, &why) != VLA_OK)
        vlai_warn("the choices of algorithms for matrix products are not kept for other runs: %s", why.message);
}

/* Products are timed on what looks like data: the arena is filled with weights. */
static vla_status fill_arena(const vla_run *run, const vla_store *store, vla_error *err)
{
    const vlai_cuda_device *d = run->executor->state;
    const char *weights = store ? store->device[VLA_STORE_WEIGHT] : NULL;
    size_t have = weights ? store->bytes[VLA_STORE_WEIGHT] : 0, want = run->plan->memory.arena_bytes;
    int code = 0;
    for (size_t at = 0; have && !code && at < want; at += have)
        code = vlai_device_copy(run->executor->arena + at, weights, have < want - at ? have : want - at, d->lanes[0]);
    if (!code)
        code = vlai_device_synchronize(d->lanes[0]); /* products of the other lanes are timed on it too */
    return code ? vlai_cuda_failed(err, code, "filling the arena") : VLA_OK;
}

static vla_status bind_results(vla_run *run, vla_error *err)
{
    vlai_cuda_run *r = run->state;
    const vla_graph *g = run->plan->graph;
    size_t bytes = 0;
    for (size_t v = 0; v < g->n_values; v++) {
        r->place[v] = -1;
        if (is_result(&g->values[v]) && run->data[v] && bytes_of(&g->values[v]) <= SMALL_RESULT) {
            r->place[v] = (int64_t)bytes;
            bytes += (bytes_of(&g->values[v]) + 63) & ~(size_t)63;
        }
    }
    for (int s = 0; s < 2; s++) {
        int code = vlai_device_pinned_alloc(run->plan->memory.input_bytes, &r->inputs[s]);
        if (!code)
            code = vlai_device_pinned_alloc(bytes, &r->results[s]);
        if (!code)
            code = vlai_device_fence_create(&r->finished[s]);
        if (code)
            return vlai_cuda_failed(err, code, "pinned host memory");
        memset(r->inputs[s], 0, run->plan->memory.input_bytes);
    }
    return VLA_OK;
}

static vla_status cuda_bind(vla_run *run, vla_store *store, vla_error *err)
{
    vla_executor *ex = run->executor;
    vlai_cuda_device *d = ex->state;
    const vla_graph *g = run->plan->graph;
    vlai_cuda_run *r = vlai_calloc(1, sizeof *r);
    run->state = r;
    if (!r || !(r->calls = vlai_calloc(g->n_nodes + 1, sizeof *r->calls)) || !(r->place = vlai_calloc(g->n_values + 1, sizeof *r->place)) ||
        !(r->large = vlai_calloc(g->n_values + 1, sizeof *r->large)) || !(r->launches = vlai_calloc(g->n_nodes + 1, sizeof *r->launches)))
        return vlai_nomem(err, g->n_nodes * sizeof *r->calls);
    VLA_TRY(bind_results(run, err));
    for (size_t n = 0; n < g->n_nodes; n++)
        set_call(run, n, &r->calls[n]);
    d->context.fast_attention = run->plan->options.fast_attention;
    d->context.search = (run->plan->options.fast & VLA_FAST_SEARCH) != 0;
    if (d->context.search)
        VLA_TRY(fill_arena(run, store, err));
    d->context.calls = r->calls;
    d->context.n_calls = g->n_nodes;
    if (vlai_cuda_matmul_will_search(&d->context))
        vlai_info("timing algorithms of matrix products in shapes that this GPU has not had before: up to two minutes, once");
    for (size_t n = 0; n < g->n_nodes; n++)
        if (vlai_cuda_preparers[g->nodes[n].op].prepare) { /* timing a product takes up to some seconds */
            VLA_TRY(vlai_cuda_preparers[g->nodes[n].op].prepare(&d->context, &r->calls[n], err));
            vlai_work_add();
        }
    if (d->context.search && ex->explore > 0)
        VLA_TRY(vlai_cuda_matmul_explore(&d->context, ex->explore, err));
    ex->explore = 0;
    d->context.calls = NULL;
    d->context.n_calls = 0;
    keep_choices(d->context.choices);
    return order_launches(run, err);
}

static void cuda_unbind(vla_run *run)
{
    vlai_cuda_run *r = run->state;
    vlai_cuda_device *d = run->executor->state;
    if (!r)
        return;
    const vla_graph *g = run->plan->graph;
    d->under_way -= r->submitted - r->waited;
    for (size_t n = 0; r->calls && n < g->n_nodes; n++)
        if (r->calls[n].plan)
            vlai_cuda_preparers[g->nodes[n].op].release(&r->calls[n]);
    for (size_t i = 0; i < r->n_launches; i++) {
        vlai_device_event_destroy(r->launches[i].fence);
        release(run->executor, r->launches[i].table, r->launches[i].table_bytes);
    }
    for (size_t v = 0; r->large && v < g->n_values; v++)
        vlai_device_pinned_free(r->large[v]);
    for (int s = 0; s < 2; s++) {
        vlai_device_pinned_free(r->inputs[s]);
        vlai_device_pinned_free(r->results[s]);
        vlai_device_event_destroy(r->finished[s]);
    }
    vlai_device_graph_destroy(r->graph);
    vlai_schedule_fini(&r->schedule);
    vlai_free(r->launches);
    vlai_free(r->calls);
    vlai_free(r->place);
    vlai_free(r->large);
    vlai_free(r);
}

/* ---- executing ---- */

int vlai_cuda_launch_one(const vla_run *run, size_t i)
{
    const vlai_cuda_run *r = run->state;
    const vlai_cuda_launch *l = &r->launches[i];
    const vlai_cuda_call *call = &r->calls[l->first];
    return l->count > 1 ? vlai_optim_launch(l->table, &l->group, call->stream)
                        : vlai_cuda_launchers[call->node->op](call);
}

vla_status vlai_cuda_launch_failed(const vla_run *run, size_t i, int code, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    size_t n = r->launches[i].first;
    if (code == VLAI_CUDA_COLLECTIVE) {
        const vlai_node *node = &run->plan->graph->nodes[n];
        char why[512];
        if (!vlai_comm_error(run->executor->comm, why, sizeof why))
            snprintf(why, sizeof why, "the communicator is closed");
        return vlai_fail(err, VLA_E_NCCL, "collective %d (%s): %s", node->attrs.comm.order, vlai_ops[node->op].name, why);
    }
    return vlai_prefix(err, vlai_cuda_failed(err, code, vlai_ops[run->plan->graph->nodes[n].op].name), "node %zu", n);
}

/* All launches, the other lanes forked from lane 0 and joined to it. */
static vla_status launch_all(const vla_run *run, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    const vlai_cuda_device *d = run->executor->state;
    int code = vlai_device_event_record(d->fork, d->lanes[0]);
    for (int l = 1; !code && l < VLAI_LANES; l++)
        if (r->lanes[l])
            code = vlai_device_wait(d->lanes[l], d->fork);
    if (code)
        return vlai_cuda_failed(err, code, "lanes");
    for (size_t i = 0; i < r->n_launches; i++) {
        void *stream = d->lanes[r->schedule.lanes[i]];
        for (int l = 0; !code && l < VLAI_LANES; l++)
            if (r->schedule.waits[i][l] >= 0)
                code = vlai_device_wait(stream, r->launches[r->schedule.waits[i][l]].fence);
        if (!code)
            code = vlai_cuda_launch_one(run, i);
        if (!code && r->launches[i].fence)
            code = vlai_device_event_record(r->launches[i].fence, stream);
        if (code)
            return vlai_cuda_launch_failed(run, i, code, err);
    }
    for (int l = 1; !code && l < VLAI_LANES; l++)
        if (r->lanes[l] && !(code = vlai_device_event_record(d->join[l], d->lanes[l])))
            code = vlai_device_wait(d->lanes[0], d->join[l]);
    return code ? vlai_cuda_failed(err, code, "lanes") : VLA_OK;
}

/* The first execution launches as it goes, so that every kernel is loaded; the second captures. */
static vla_status start(vla_run *run, vla_error *err)
{
    vlai_cuda_run *r = run->state;
    const vlai_cuda_device *d = run->executor->state;
    if (!(run->plan->options.fast & VLA_FAST_REPLAY) || r->executions++ == 0)
        return launch_all(run, err);
    if (!r->graph) {
        int code = vlai_device_capture_begin(d->lanes[0]);
        if (code)
            return vlai_cuda_failed(err, code, "capturing the step");
        vla_status status = launch_all(run, err);
        code = vlai_device_capture_end(d->lanes[0], &r->graph);
        VLA_TRY(status);
        if (code)
            return vlai_cuda_failed(err, code, "capturing the step");
    }
    int code = vlai_device_replay(r->graph, d->lanes[0]);
    return code ? vlai_cuda_failed(err, code, "replaying the step") : VLA_OK;
}

static int upload_inputs(vla_run *run)
{
    const vlai_cuda_run *r = run->state;
    vlai_cuda_device *d = run->executor->state;
    size_t bytes = run->plan->memory.input_bytes;
    if (bytes == 0)
        return 0; /* and the turn stays where the latest upload left it: cuda_other_inputs goes by that */
    int s = d->turn = !d->turn, code;
    if ((code = vlai_device_wait(d->copies, d->consumed[s])) || (code = vlai_device_upload(d->staging[s], r->inputs[r->slot], bytes, d->copies)) ||
        (code = vlai_device_event_record(d->uploaded[s], d->copies)) || (code = vlai_device_wait(d->lanes[0], d->uploaded[s])) ||
        (code = vlai_device_copy(run->executor->arena, d->staging[s], bytes, d->lanes[0])))
        return code;
    return vlai_device_event_record(d->consumed[s], d->lanes[0]);
}

static int fetch_results(vla_run *run, int place)
{
    const vlai_cuda_run *r = run->state;
    const vlai_cuda_device *d = run->executor->state;
    const vla_graph *g = run->plan->graph;
    int code = 0;
    for (size_t v = 0; !code && v < g->n_values; v++)
        if (r->place[v] >= 0)
            code = vlai_device_download((char *)r->results[place] + r->place[v], run->data[v], bytes_of(&g->values[v]), d->lanes[0]);
    return code ? code : vlai_device_event_record(r->finished[place], d->lanes[0]);
}

static vla_status cuda_submit(vla_run *run, vla_error *err)
{
    vlai_cuda_run *r = run->state;
    vlai_cuda_device *d = run->executor->state;
    if (r->submitted - r->waited == 2)
        return vlai_fail(err, VLA_E_INVALID, "two executions of this run are under way: wait for one");
    int code = upload_inputs(run);
    if (code)
        return vlai_cuda_failed(err, code, "inputs");
    VLA_TRY(start(run, err));
    if ((code = fetch_results(run, (int)(r->submitted & 1))))
        return vlai_cuda_failed(err, code, "results");
    r->submitted++;
    d->under_way++;
    return VLA_OK;
}

static vla_status cuda_wait(vla_run *run, vla_error *err)
{
    vlai_cuda_run *r = run->state;
    vlai_cuda_device *d = run->executor->state;
    if (r->submitted == r->waited)
        return vlai_fail(err, VLA_E_INVALID, "no execution of this run is under way");
    r->shown = (int)(r->waited++ & 1);
    d->under_way--;
    int code = vlai_device_event_synchronize(r->finished[r->shown]);
    char why[512];
    if (code)
        return vlai_cuda_failed(err, code, "a kernel of this run");
    /* A collective that was ended leaves the device as if all were well. */
    return vlai_comm_error(run->executor->comm, why, sizeof why) ? vlai_fail(err, VLA_E_NCCL, "%s", why) : VLA_OK;
}

/* The other pinned copy was uploaded an execution ago; that the upload is over is certain once that execution is. */
static vla_status cuda_other_inputs(vla_run *run, vla_error *err)
{
    vlai_cuda_run *r = run->state;
    const vlai_cuda_device *d = run->executor->state;
    r->slot = !r->slot;
    int code = r->submitted > 1 ? vlai_device_event_synchronize(d->uploaded[!d->turn]) : 0;
    return code ? vlai_cuda_failed(err, code, "inputs") : VLA_OK;
}

static vla_status cuda_execute(vla_run *run, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    VLA_TRY(cuda_submit(run, err));
    while (r->waited < r->submitted)
        VLA_TRY(cuda_wait(run, err));
    return VLA_OK;
}

static void *cuda_data(const vla_run *run, vla_value v)
{
    const vlai_cuda_device *d = run->executor->state;
    vlai_cuda_run *r = run->state;
    const vlai_value_info *info = vlai_value(run->plan->graph, v);
    if (info->kind == VLAI_INPUT)
        return run->data[v] ? (char *)r->inputs[r->slot] + run->plan->memory.offset[v] : NULL;
    if (r->place[v] >= 0)
        return (char *)r->results[r->shown] + r->place[v];
    if (!is_result(info) || !run->data[v] || d->under_way)
        return NULL; /* what is under way writes over large results */
    if ((!r->large[v] && vlai_device_pinned_alloc(bytes_of(info), &r->large[v])) ||
        vlai_device_download(r->large[v], run->data[v], bytes_of(info), d->lanes[0]) || vlai_device_synchronize(d->lanes[0]))
        return NULL;
    return r->large[v];
}

/* ---- choices, the store's second home ---- */

static vla_status cuda_choices(const vla_executor *ex, vlai_text *out, vla_error *err)
{
    const vlai_cuda_device *d = ex->state;
    (void)err;
    vlai_gemm_choices_text(d->context.choices, out);
    return VLA_OK;
}

static vla_status cuda_adopt(vla_executor *ex, const char *text, vla_error *err)
{
    const vlai_cuda_device *d = ex->state;
    return vlai_gemm_choices_adopt(d->context.choices, text, err);
}

static vla_status cuda_store_alloc(vla_executor *ex, size_t bytes, bool gathered, void **out, vla_error *err)
{
    vla_status status = VLA_OK;
    *out = NULL;
    if (gathered && (!ex->limit || ex->allocated + bytes <= ex->limit))
        status = vlai_comm_memory_alloc(ex->comm, bytes, out, err);
    if (*out)
        ex->allocated += bytes;
    return *out || status != VLA_OK ? status : allocate(ex, bytes, "parameters and their state", out, err);
}

static void cuda_store_free(vla_executor *ex, void *memory, size_t bytes)
{
    if (vlai_comm_memory_free(ex->comm, memory))
        ex->allocated -= bytes;
    else
        release(ex, memory, bytes);
}

static vla_status cuda_store_zero(vla_executor *ex, void *memory, size_t bytes, vla_error *err)
{
    const vlai_cuda_device *d = ex->state;
    int code = vlai_device_zero(memory, bytes, d->lanes[0]);
    return code ? vlai_cuda_failed(err, code, "zeroing parameters") : VLA_OK;
}

static vla_status cuda_store_copy(vla_executor *ex, void *memory, void *host, size_t bytes, int to_device, vla_error *err)
{
    const vlai_cuda_device *d = ex->state;
    int code = vlai_device_use(ex->index); /* threads that fill the store or read it begin with GPU 0 */
    if (!code)
        code = to_device ? vlai_device_upload(memory, host, bytes, d->lanes[0]) : vlai_device_download(host, memory, bytes, d->lanes[0]);
    if (!code)
        code = vlai_device_synchronize(d->lanes[0]);
    return code ? vlai_cuda_failed(err, code, "copying parameters") : VLA_OK;
}

const vlai_backend vlai_backend_cuda = {.name = "cuda", .open = cuda_open, .close = cuda_close, .reserve = cuda_reserve, .bind = cuda_bind,
                                        .unbind = cuda_unbind, .execute = cuda_execute, .data = cuda_data, .submit = cuda_submit,
                                        .wait = cuda_wait, .other_inputs = cuda_other_inputs, .profile = vlai_cuda_profile,
                                        .choices = cuda_choices, .adopt = cuda_adopt, .store_alloc = cuda_store_alloc,
                                        .store_free = cuda_store_free, .store_zero = cuda_store_zero, .store_copy = cuda_store_copy};

#else
/* A build without CUDA has no second device; vla_executor_create_on says so. */
typedef int vlai_no_cuda_in_this_build;
#endif
