/* Executors and runs, whatever the device: the calls of vla/run.h go to a backend (exec/executor.h). */
#include "base/fail.h"
#include "base/memory.h"
#include "dist/comm.h"
#include "exec/executor.h"
#include "exec/shard.h"
#include "exec/state_names.h"
#include "exec/store.h"

#include <stdlib.h>
#include <string.h>

const vlai_backend *vlai_backend_other;

vla_status vla_executor_create(int threads, vla_executor **out, vla_error *err)
{
    return vla_executor_create_on("cpu", threads, out, err);
}

int vlai_gpu_of(const char *device)
{
    if (!strcmp(device, "cpu"))
        return -1;
    if (!strcmp(device, "cuda"))
        return 0;
    const char *number = strncmp(device, "cuda:", 5) ? "" : device + 5;
    size_t digits = strspn(number, "0123456789");
    return digits > 0 && digits < 5 && !number[digits] ? atoi(number) : -2;
}

vla_status vla_executor_create_on(const char *device, int threads, vla_executor **out, vla_error *err)
{
    *out = NULL;
    const vlai_backend *backend = NULL;
    int index = vlai_gpu_of(device);
    if (index == -1) {
        backend = &vlai_backend_cpu;
    } else if (index >= 0) {
#ifdef VLA_CUDA
        backend = &vlai_backend_cuda;
#else
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "build with -DVLA_CUDA=ON, or use the device cpu", "device '%s': this build has no CUDA part", device);
#endif
    }
    if (vlai_backend_other && !strcmp(device, vlai_backend_other->name))
        backend = vlai_backend_other;
    if (!backend)
        return vlai_fail(err, VLA_E_INVALID, "device '%s': wanted cpu, cuda or cuda:N", device);
    vla_executor *ex = vlai_calloc(1, sizeof *ex);
    if (!ex)
        return vlai_nomem(err, sizeof *ex);
    ex->backend = backend;
    ex->index = index > 0 ? index : 0;
    ex->threads = threads;
    vla_status status = backend->open(ex, err);
    if (status != VLA_OK) {
        vla_executor_destroy(ex);
        return status;
    }
    *out = ex;
    return VLA_OK;
}

void vla_executor_destroy(vla_executor *ex)
{
    if (!ex)
        return;
    ex->backend->close(ex);
    vlai_free(ex);
}

int vla_executor_threads(const vla_executor *ex)
{
    return ex->threads;
}

const char *vla_executor_device(const vla_executor *ex)
{
    return ex->backend->name;
}

vla_status vla_executor_reserve(vla_executor *ex, const vla_plan *plan, vla_error *err)
{
    return ex->backend->reserve(ex, plan, err);
}

size_t vla_executor_bytes(const vla_executor *ex)
{
    return ex->arena_bytes + ex->workspace_bytes + ex->per_thread * (size_t)ex->threads + ex->widen_bytes;
}

void vla_executor_limit(vla_executor *ex, size_t bytes)
{
    ex->limit = bytes;
}

size_t vla_executor_held(const vla_executor *ex)
{
    return ex->allocated;
}

vla_status vla_executor_choices(const vla_executor *ex, char **text, vla_error *err)
{
    vlai_text out = {0};
    vla_status status = ex->backend->choices ? ex->backend->choices(ex, &out, err) : VLA_OK;
    if (status == VLA_OK)
        status = vlai_text_status(&out, err);
    *text = status == VLA_OK ? strdup(out.data ? out.data : "") : NULL;
    vlai_text_fini(&out);
    return status == VLA_OK && !*text ? vlai_nomem(err, 1) : status;
}

vla_status vla_executor_adopt(vla_executor *ex, const char *text, vla_error *err)
{
    return ex->backend->adopt ? ex->backend->adopt(ex, text, err) : VLA_OK;
}

vla_status vlai_run_profile(vla_run *run, int repeats, vlai_profile *out, vla_error *err)
{
    *out = (vlai_profile){0};
    return run->executor->backend->profile(run, repeats, out, err);
}

void vlai_profile_fini(vlai_profile *profile)
{
    vlai_free(profile->rows);
    vlai_free(profile->nodes);
    profile->rows = NULL;
    profile->nodes = NULL;
}

/* A bucket of weights or gradients, by number. */
static vla_status bind_bucket(const vla_executor *ex, const vlai_value_info *v, const vla_store *store, void **data, vla_error *err)
{
    vla_store_kind kind = strncmp(v->name, VLAI_STATE_WEIGHTS, 2) ? VLA_STORE_GRADIENT : VLA_STORE_WEIGHT;
    size_t b = strtoull(v->name + 2, NULL, 10);
    if (!store || b >= store->n_buckets || store->buckets[b].length != v->elements || vlai_store_bucket_dtype(store, kind, &store->buckets[b]) != v->dtype)
        return vlai_fail(err, VLA_E_SHAPE, "bucket '%s' of the plan, %lld elements of %s, is not one of the store: it was sharded for other ranks",
                         v->name, (long long)v->elements, vlai_graph_dtype_name(v->dtype));
    char *arena = vlai_store_arena(store, ex, kind);
    *data = arena ? arena + vlai_store_bucket_offset(store, kind, &store->buckets[b]) : NULL;
    return *data ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "bucket '%s': the store is not on the device %s", v->name, ex->backend->name);
}

/* A parameter or state value finds its tensor in the store. */
static vla_status bind_persistent(const vla_executor *ex, const vlai_value_info *v, const vla_store *store, void **data, vla_error *err)
{
    vla_store_kind kind = VLA_STORE_WEIGHT;
    const char *name = v->name;
    if (v->kind == VLAI_STATE && (!strncmp(name, VLAI_STATE_WEIGHTS, 2) || !strncmp(name, VLAI_STATE_GRADIENTS, 2)))
        return bind_bucket(ex, v, store, data, err);
    bool slice = v->kind == VLAI_STATE && !strncmp(name, VLAI_STATE_SLICE, 2);
    if (v->kind == VLAI_STATE) {
        for (int k = 0; k < VLA_STORE_KINDS; k++)
            if (!strncmp(name, vlai_state_prefix[k], 2))
                kind = (vla_store_kind)k;
        name += 2;
    }
    int64_t index = store ? vla_store_find(store, name) : -1;
    if (index < 0)
        return vlai_fail(err, VLA_E_NOT_FOUND, "parameter '%s' of the plan is not in the store", name);
    const vlai_param *p = &store->params[index];
    char *place = vlai_store_place(store, ex, kind, (size_t)index);
    int64_t kept = slice ? p->count : vlai_param_kept(p, kind);
    if (kept != v->elements || p->dtype[kind] != v->dtype)
        return vlai_fail(err, VLA_E_SHAPE, "parameter '%s': the plan wants %lld elements of %s, the store has %lld of %s%s",
                         v->name, (long long)v->elements, vlai_graph_dtype_name(v->dtype), (long long)kept,
                         vla_dtype_name(p->dtype[kind]), p->dtype[kind] == VLA_DTYPE_NONE ? " and keeps no such tensor" : "");
    *data = place && slice ? place + (size_t)p->first * vla_dtype_size(v->dtype) : place;
    return *data ? VLA_OK
                 : vlai_fail(err, VLA_E_INVALID, "parameter '%s': the store is not on the device %s", v->name, ex->backend->name);
}

/* Collectives want a communicator with the place that the plan was made for. */
static vla_status check_comm(const vla_executor *ex, const vla_graph *g, vla_error *err)
{
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        if (!vlai_op_is_collective(node->op) || node->attrs.comm.world == 1)
            continue;
        if (ex->comm && !strcmp(vlai_comm_device(ex->comm), "cuda") != !strcmp(ex->backend->name, "cuda"))
            return vlai_fail(err, VLA_E_INVALID, "the communicator is one of the device %s, its executor runs on %s", vlai_comm_device(ex->comm),
                             ex->backend->name);
        if (node->attrs.comm.world != vlai_comm_world(ex->comm) || node->attrs.comm.rank != vlai_comm_rank(ex->comm))
            return vlai_fail(err, VLA_E_INVALID, "the plan is for rank %d of %d, its executor's communicator is rank %d of %d", node->attrs.comm.rank,
                             node->attrs.comm.world, vlai_comm_rank(ex->comm), vlai_comm_world(ex->comm));
    }
    return VLA_OK;
}

vla_status vla_run_create(vla_executor *ex, const vla_plan *plan, vla_store *store, vla_run **out, vla_error *err)
{
    *out = NULL;
    VLA_TRY(check_comm(ex, plan->graph, err));
    VLA_TRY(vla_executor_reserve(ex, plan, err));
    const vla_graph *g = plan->graph;
    vla_run *run = vlai_calloc(1, sizeof *run);
    if (!run)
        return vlai_nomem(err, sizeof *run);
    run->executor = ex;
    run->plan = plan;
    run->data = vlai_calloc(g->n_values + 1, sizeof *run->data);
    vla_status status = run->data ? VLA_OK : vlai_nomem(err, g->n_values * sizeof *run->data);
    for (size_t v = 0; status == VLA_OK && v < g->n_values; v++) {
        const vlai_value_info *info = &g->values[v];
        if (info->kind == VLAI_PARAM || info->kind == VLAI_STATE)
            status = bind_persistent(ex, info, store, &run->data[v], err);
        else if (plan->memory.offset[v] >= 0)
            run->data[v] = ex->arena + plan->memory.offset[v];
    }
    for (size_t v = 0; status == VLA_OK && v < g->n_values; v++)
        if (!run->data[v] && plan->memory.root[v] >= 0)
            run->data[v] = run->data[plan->memory.root[v]];
    if (status == VLA_OK)
        status = ex->backend->bind(run, store, err);
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
    run->executor->backend->unbind(run);
    vlai_free(run->data);
    vlai_free(run);
}

vla_status vla_run_execute(vla_run *run, vla_error *err)
{
    return run->executor->backend->execute(run, err);
}

vla_status vla_run_submit(vla_run *run, vla_error *err)
{
    const vlai_backend *backend = run->executor->backend;
    return backend->submit ? backend->submit(run, err) : backend->execute(run, err);
}

vla_status vla_run_wait(vla_run *run, vla_error *err)
{
    const vlai_backend *backend = run->executor->backend;
    return backend->wait ? backend->wait(run, err) : VLA_OK;
}

vla_status vla_run_other_inputs(vla_run *run, vla_error *err)
{
    const vlai_backend *backend = run->executor->backend;
    return backend->other_inputs ? backend->other_inputs(run, err) : VLA_OK;
}

vla_tensor vla_run_tensor(const vla_run *run, const char *name)
{
    vla_tensor t = {0};
    vla_value v = vla_graph_find(run->plan->graph, name);
    void *data = v == VLA_NONE || !run->data[v] ? NULL : run->executor->backend->data(run, v);
    if (!data)
        return t;
    const vlai_value_info *info = vlai_value(run->plan->graph, v);
    t = (vla_tensor){.name = info->name, .data = data, .dtype = info->dtype, .rank = info->rank, .elements = info->elements};
    for (int i = 0; i < info->rank; i++)
        t.shape[i] = info->shape[i];
    return t;
}

void *vla_run_data(const vla_run *run, const char *name)
{
    return vla_run_tensor(run, name).data;
}
