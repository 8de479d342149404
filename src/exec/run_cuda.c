/* One CUDA device: an arena and scratch in device memory, launches resolved once, everything on one stream. Results that
 * have a name are fetched into host memory when they are asked for.
 *
 * The plain path: one kernel per node, nothing overlapped, no capture. The asynchronous state is checked once per run. */
#ifdef VLA_CUDA

#include "base/fail.h"
#include "base/memory.h"
#include "exec/executor.h"
#include "kernels/cuda.h"
#include "kernels/device.h"
#include "vendor/cublaslt.h"

#include <string.h>

typedef struct {
    vlai_device_info info;
    void *stream, *cublaslt;
} device;

typedef struct {
    vlai_cuda_call *calls;
    void **mirror; /* per value: pinned host memory of inputs and named results */
} resolved;

static vla_status failed(vla_error *err, int code, const char *what)
{
    return code >= 100000 ? vlai_fail(err, VLA_E_CUDA, "%s: cuBLASLt: %s", what, vlai_cublaslt_error(code - 100000))
                          : vlai_fail(err, VLA_E_CUDA, "%s: CUDA: %s", what, vlai_device_error(code));
}

static vla_status cuda_open(vla_executor *ex, vla_error *err)
{
    device *d = vlai_calloc(1, sizeof *d);
    if (!d)
        return vlai_nomem(err, sizeof *d);
    ex->state = d;
    ex->threads = 1;
    int count = 0, code = vlai_device_count(&count);
    if (code || ex->index >= count)
        return vlai_fail_hint(err, VLA_E_CUDA, "nvidia-smi shows the GPUs of this machine; use the device cpu without one",
                              "device cuda:%d: %d GPUs found%s%s", ex->index, count, code ? ", CUDA: " : "", code ? vlai_device_error(code) : "");
    if ((code = vlai_device_select(ex->index, &d->info)) || (code = vlai_device_stream_create(&d->stream)))
        return failed(err, code, "opening the GPU");
    if ((code = vlai_cublaslt_open(&d->cublaslt)))
        return failed(err, 100000 + code, "opening cuBLASLt");
    return VLA_OK;
}

static void cuda_close(vla_executor *ex)
{
    device *d = ex->state;
    if (!d)
        return;
    vlai_device_free(ex->arena);
    vlai_device_free(ex->workspace);
    vlai_cublaslt_close(d->cublaslt);
    vlai_device_stream_destroy(d->stream);
    vlai_free(d);
}

static vla_status grow(char **buffer, size_t *have, size_t want, const char *what, vla_error *err)
{
    if (*have >= want)
        return VLA_OK;
    vlai_device_free(*buffer);
    *buffer = NULL;
    *have = 0;
    void *got;
    int code = vlai_device_alloc(want, &got);
    if (code)
        return vlai_fail_hint(err, VLA_E_DEVICE_NOMEM, "a smaller batch, memory.recompute: cheap or layer, or numerics bf16 take less",
                              "%s: %zu bytes of device memory: %s", what, want, vlai_device_error(code));
    *buffer = got;
    *have = want;
    return VLA_OK;
}

static vla_status cuda_reserve(vla_executor *ex, const vla_plan *plan, vla_error *err)
{
    size_t scratch = (size_t)32 << 20;
    for (size_t n = 0; n < plan->graph->n_nodes; n++) {
        const vlai_node *node = &plan->graph->nodes[n];
        size_t bytes = vlai_cuda_workspaces[node->op](plan->graph, node);
        scratch = bytes > scratch ? bytes : scratch;
    }
    VLA_TRY(grow(&ex->arena, &ex->arena_bytes, plan->memory.arena_bytes, "the arena", err));
    return grow(&ex->workspace, &ex->workspace_bytes, scratch, "kernel scratch", err);
}

static void set_tensor(vlai_cuda_tensor *t, const vlai_value_info *v, void *data)
{
    t->data = data;
    t->dtype = v->dtype;
    t->rank = v->rank;
    t->elements = v->elements;
    memcpy(t->shape, v->shape, sizeof t->shape);
}

static vla_status prepare_matmul(const device *d, const vla_executor *ex, vlai_cuda_call *call, vla_error *err)
{
    const vlai_node *node = call->node;
    bool ta = node->attrs.matmul.transpose_a;
    vlai_gemm_shape s = {.m = call->out[0].shape[0], .n = call->out[0].shape[1], .k = call->in[0].shape[ta ? 0 : 1],
                         .transpose_a = ta, .transpose_b = node->attrs.matmul.transpose_b, .bias = node->n_inputs > 2,
                         .operand = call->in[0].dtype, .result = call->out[0].dtype, .bias_type = call->in[2].dtype};
    if (call->in[0].dtype != call->in[1].dtype)
        return vlai_fail(err, VLA_E_DTYPE, "matmul: operands of %s and %s", vla_dtype_name(call->in[0].dtype), vla_dtype_name(call->in[1].dtype));
    vlai_gemm *gemm;
    int code = vlai_cublaslt_prepare(d->cublaslt, &s, ex->workspace_bytes, &gemm);
    call->plan = gemm;
    if (code)
        return vlai_fail(err, VLA_E_CUDA, "cuBLASLt has no algorithm for [%lld,%lld] x [%lld,%lld] of %s: %s", (long long)s.m, (long long)s.k,
                         (long long)s.k, (long long)s.n, vla_dtype_name(s.operand), vlai_cublaslt_error(code));
    return VLA_OK;
}

static size_t bytes_of(const vlai_value_info *v)
{
    return (size_t)v->elements * vla_dtype_size(v->dtype);
}

/* Inputs and named results have host memory. */
static bool mirrored(const vlai_value_info *v)
{
    return v->kind == VLAI_INPUT || (v->kind == VLAI_TEMP && v->name);
}

static vla_status cuda_bind(vla_run *run, vla_store *store, vla_error *err)
{
    (void)store;
    vla_executor *ex = run->executor;
    const device *d = ex->state;
    const vla_graph *g = run->plan->graph;
    resolved *r = vlai_calloc(1, sizeof *r);
    run->state = r;
    if (!r || !(r->calls = vlai_calloc(g->n_nodes + 1, sizeof *r->calls)) || !(r->mirror = vlai_calloc(g->n_values + 1, sizeof *r->mirror)))
        return vlai_nomem(err, g->n_nodes * sizeof *r->calls);
    for (size_t v = 0; v < g->n_values; v++)
        if (mirrored(&g->values[v]) && run->data[v]) {
            int code = vlai_device_pinned_alloc(bytes_of(&g->values[v]), &r->mirror[v]);
            if (code)
                return failed(err, code, "pinned host memory");
            memset(r->mirror[v], 0, bytes_of(&g->values[v]));
        }
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        vlai_cuda_call *call = &r->calls[n];
        *call = (vlai_cuda_call){.node = node, .stream = d->stream, .workspace = ex->workspace, .workspace_bytes = ex->workspace_bytes,
                                 .multiprocessors = d->info.multiprocessors};
        for (int i = 0; i < node->n_inputs; i++)
            if (node->inputs[i] != VLA_NONE)
                set_tensor(&call->in[i], vlai_value(g, node->inputs[i]), run->data[node->inputs[i]]);
        for (int i = 0; i < node->n_outputs; i++)
            set_tensor(&call->out[i], vlai_value(g, node->outputs[i]), run->data[node->outputs[i]]);
        if (node->op == VLAI_OP_matmul)
            VLA_TRY(prepare_matmul(d, ex, call, err));
    }
    return VLA_OK;
}

static void cuda_unbind(vla_run *run)
{
    resolved *r = run->state;
    if (!r)
        return;
    for (size_t n = 0; r->calls && n < run->plan->graph->n_nodes; n++)
        if (r->calls[n].plan)
            vlai_cublaslt_release(r->calls[n].plan);
    for (size_t v = 0; r->mirror && v < run->plan->graph->n_values; v++)
        vlai_device_pinned_free(r->mirror[v]);
    vlai_free(r->calls);
    vlai_free(r->mirror);
    vlai_free(r);
}

static vla_status cuda_execute(vla_run *run, vla_error *err)
{
    const device *d = run->executor->state;
    const resolved *r = run->state;
    const vla_graph *g = run->plan->graph;
    for (size_t v = 0; v < g->n_values; v++)
        if (g->values[v].kind == VLAI_INPUT && r->mirror[v]) {
            int code = vlai_device_upload(run->data[v], r->mirror[v], bytes_of(&g->values[v]), d->stream);
            if (code)
                return failed(err, code, g->values[v].name);
        }
    for (size_t n = 0; n < g->n_nodes; n++) {
        int code = vlai_cuda_launchers[g->nodes[n].op](&r->calls[n]);
        if (code)
            return vlai_prefix(err, failed(err, code, vlai_ops[g->nodes[n].op].name), "node %zu", n);
    }
    int code = vlai_device_synchronize(d->stream);
    return code ? failed(err, code, "a kernel of this run") : VLA_OK;
}

static void *cuda_data(const vla_run *run, vla_value v)
{
    const device *d = run->executor->state;
    const resolved *r = run->state;
    const vlai_value_info *info = vlai_value(run->plan->graph, v);
    if (!r->mirror[v])
        return NULL;
    if (info->kind != VLAI_INPUT)
        if (vlai_device_download(r->mirror[v], run->data[v], bytes_of(info), d->stream) || vlai_device_synchronize(d->stream))
            return NULL;
    return r->mirror[v];
}

static vla_status cuda_store_alloc(vla_executor *ex, size_t bytes, void **out, vla_error *err)
{
    (void)ex;
    int code = vlai_device_alloc(bytes, out);
    return code ? vlai_fail(err, VLA_E_DEVICE_NOMEM, "parameters and their state: %zu bytes of device memory: %s", bytes, vlai_device_error(code)) : VLA_OK;
}

static void cuda_store_free(vla_executor *ex, void *memory)
{
    (void)ex;
    vlai_device_free(memory);
}

static vla_status cuda_store_zero(vla_executor *ex, void *memory, size_t bytes, vla_error *err)
{
    const device *d = ex->state;
    int code = vlai_device_zero(memory, bytes, d->stream);
    return code ? failed(err, code, "zeroing parameters") : VLA_OK;
}

static vla_status cuda_store_copy(vla_executor *ex, void *memory, void *host, size_t bytes, int to_device, vla_error *err)
{
    const device *d = ex->state;
    int code = to_device ? vlai_device_upload(memory, host, bytes, d->stream) : vlai_device_download(host, memory, bytes, d->stream);
    if (!code)
        code = vlai_device_synchronize(d->stream);
    return code ? failed(err, code, "copying parameters") : VLA_OK;
}

const vlai_backend vlai_backend_cuda = {.name = "cuda", .open = cuda_open, .close = cuda_close, .reserve = cuda_reserve, .bind = cuda_bind,
                                        .unbind = cuda_unbind, .execute = cuda_execute, .data = cuda_data,
                                        .store_alloc = cuda_store_alloc, .store_free = cuda_store_free,
                                        .store_zero = cuda_store_zero, .store_copy = cuda_store_copy};

#else
/* A build without CUDA has no second device; vla_executor_create_on says so. */
typedef int vlai_no_cuda_in_this_build;
#endif
