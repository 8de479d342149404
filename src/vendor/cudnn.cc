#include "vendor/cudnn.h"

#include <cstdio>
#include <new>

#ifdef VLA_CUDNN

#include <cudnn_frontend.h>

#include <dlfcn.h>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace fe = cudnn_frontend;

namespace {

void *library; /* libcudnn.so.9, or NULL */

template <class F> F *entry(const char *name)
{
    return library ? (F *)dlsym(library, name) : nullptr;
}

} // namespace

/* The entries of cuDNN that the front end calls, found in the library when it is loaded. */
#define FORWARD(name, parameters, arguments)                          \
    extern "C" cudnnStatus_t CUDNNWINAPI name parameters              \
    {                                                                 \
        static auto *const there = entry<decltype(name)>(#name);      \
        return there ? there arguments : CUDNN_STATUS_NOT_SUPPORTED;  \
    }

FORWARD(cudnnBackendCreateDescriptor, (cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *d), (type, d))
FORWARD(cudnnBackendDestroyDescriptor, (cudnnBackendDescriptor_t d), (d))
FORWARD(cudnnBackendFinalize, (cudnnBackendDescriptor_t d), (d))
FORWARD(cudnnBackendExecute, (cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack), (handle, plan, pack))
FORWARD(cudnnBackendSetAttribute,
        (cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name_, cudnnBackendAttributeType_t type, int64_t n, const void *from),
        (d, name_, type, n, from))
FORWARD(cudnnBackendGetAttribute,
        (cudnnBackendDescriptor_t const d, cudnnBackendAttributeName_t name_, cudnnBackendAttributeType_t type, int64_t most, int64_t *n, void *to),
        (d, name_, type, most, n, to))
FORWARD(cudnnCreate, (cudnnHandle_t * handle), (handle))
FORWARD(cudnnDestroy, (cudnnHandle_t handle), (handle))
FORWARD(cudnnSetStream, (cudnnHandle_t handle, cudaStream_t stream), (handle, stream))
FORWARD(cudnnGetStream, (cudnnHandle_t handle, cudaStream_t *stream), (handle, stream))
#undef FORWARD

extern "C" size_t CUDNNWINAPI cudnnGetVersion(void)
{
    auto *there = entry<decltype(cudnnGetVersion)>("cudnnGetVersion");
    return there ? there() : 0;
}

extern "C" const char *CUDNNWINAPI cudnnGetErrorString(cudnnStatus_t status)
{
    auto *there = entry<decltype(cudnnGetErrorString)>("cudnnGetErrorString");
    return there ? there(status) : "cuDNN is not loaded";
}

extern "C" void CUDNNWINAPI cudnnGetLastErrorString(char *message, size_t size)
{
    auto *there = entry<decltype(cudnnGetLastErrorString)>("cudnnGetLastErrorString");
    if (there)
        there(message, size);
    else if (size)
        *message = 0;
}

struct vlai_sdpa {
    vlai_sdpa_shape shape;
    cudnnHandle_t handle;
    fe::graph::Graph graph;
    int64_t workspace; /* -1: the library has no plan */
};

struct vlai_cudnn {
    cudnnHandle_t handle; /* NULL when the library is not there */
    std::string missing;  /* why; empty once told */
    std::vector<std::unique_ptr<vlai_sdpa>> plans;
};

namespace {

enum uid : int64_t { Q = 1, K, V, O, STATS, DY, DQ, DK, DV, LENGTHS, OFFSETS = 100 };

using tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

tensor index_tensor(fe::graph::Graph &graph, int64_t id, int64_t n)
{
    return graph.tensor(fe::graph::Tensor_attributes().set_uid(id).set_dim({n, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(fe::DataType_t::INT32));
}

/* [segments, heads, longest, dim] over packed rows. */
fe::graph::Tensor_attributes &describe(fe::graph::Tensor_attributes &t, int64_t id, const vlai_sdpa_shape &s, int64_t heads, int64_t dim,
                                       int64_t stride, const tensor &offsets)
{
    return t.set_uid(id).set_dim({s.segments, heads, s.longest, dim}).set_stride({s.longest * stride, dim, stride, 1}).set_ragged_offset(offsets);
}

tensor operand(fe::graph::Graph &graph, int64_t id, const vlai_sdpa_shape &s, int64_t heads, int64_t dim, int64_t stride, const tensor &offsets,
               fe::DataType_t type = fe::DataType_t::BFLOAT16)
{
    fe::graph::Tensor_attributes t;
    return graph.tensor(describe(t, id, s, heads, dim, stride, offsets).set_data_type(type));
}

void result(const tensor &t, int64_t id, const vlai_sdpa_shape &s, int64_t heads, int64_t dim, int64_t stride, const tensor &offsets,
            fe::DataType_t type = fe::DataType_t::BFLOAT16)
{
    describe(*t, id, s, heads, dim, stride, offsets).set_output(true).set_data_type(type);
}

void describe_graph(fe::graph::Graph &g, const vlai_sdpa_shape &s)
{
    g.set_io_data_type(fe::DataType_t::BFLOAT16).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    int64_t heads = s.heads, kv_heads = s.kv_heads, dim = s.head_dim;
    tensor lengths = index_tensor(g, LENGTHS, s.segments);
    auto offsets = [&](int64_t of) { return index_tensor(g, OFFSETS + of, s.segments + 1); };
    tensor of_q = offsets(Q), of_kv = offsets(K), of_o = offsets(O), of_stats = offsets(STATS);
    tensor q = operand(g, Q, s, heads, dim, s.q_stride, of_q), k = operand(g, K, s, kv_heads, dim, s.kv_stride, of_kv);
    tensor v = operand(g, V, s, kv_heads, dim, s.kv_stride, of_kv);
    if (!s.backward) {
        auto options = fe::graph::SDPA_attributes().set_generate_stats(true).set_attn_scale(s.scale).set_padding_mask(true);
        options.set_seq_len_q(lengths).set_seq_len_kv(lengths).set_causal_mask(s.causal != 0);
        auto [o, stats] = g.sdpa(q, k, v, options);
        result(o, O, s, heads, dim, s.o_stride, of_o);
        result(stats, STATS, s, heads, 1, heads, of_stats, fe::DataType_t::FLOAT);
        return;
    }
    tensor of_dq = offsets(DQ), of_dkv = offsets(DK);
    tensor o = operand(g, O, s, heads, dim, s.o_stride, of_o), dy = operand(g, DY, s, heads, dim, s.o_stride, of_o);
    tensor stats = operand(g, STATS, s, heads, 1, heads, of_stats, fe::DataType_t::FLOAT);
    auto options = fe::graph::SDPA_backward_attributes().set_attn_scale(s.scale).set_padding_mask(true);
    options.set_seq_len_q(lengths).set_seq_len_kv(lengths).set_causal_mask(s.causal != 0);
    auto [dq, dk, dv] = g.sdpa_backward(q, k, v, o, dy, stats, options);
    result(dq, DQ, s, heads, dim, s.dq_stride, of_dq);
    result(dk, DK, s, kv_heads, dim, s.dkv_stride, of_dkv);
    result(dv, DV, s, kv_heads, dim, s.dkv_stride, of_dkv);
}

bool same(const vlai_sdpa_shape &a, const vlai_sdpa_shape &b)
{
    return a.backward == b.backward && a.causal == b.causal && a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim &&
           a.segments == b.segments && a.longest == b.longest && a.q_stride == b.q_stride && a.kv_stride == b.kv_stride &&
           a.o_stride == b.o_stride && a.dq_stride == b.dq_stride && a.dkv_stride == b.dkv_stride && a.scale == b.scale;
}

} // namespace

int vlai_cudnn_version(void)
{
    return library ? (int)cudnnGetVersion() : 0;
}

vlai_cudnn *vlai_cudnn_open(void)
{
    try {
        std::unique_ptr<vlai_cudnn> c(new vlai_cudnn{});
        if (!library)
            library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            const char *error = dlerror();
            c->missing = std::string("cuDNN 9 is not there: ") + (error ? error : "libcudnn.so.9 does not load");
            return c.release();
        }
        cudnnStatus_t status = cudnnCreate(&c->handle);
        if (status != CUDNN_STATUS_SUCCESS) {
            c->handle = nullptr;
            c->missing = "cuDNN " + std::to_string(vlai_cudnn_version()) + " does not start: " + cudnnGetErrorString(status);
        }
        return c.release();
    } catch (const std::exception &) {
        return nullptr;
    }
}

void vlai_cudnn_close(vlai_cudnn *c)
{
    if (!c)
        return;
    c->plans.clear();
    if (c->handle)
        cudnnDestroy(c->handle);
    delete c;
}

const vlai_sdpa *vlai_cudnn_sdpa(vlai_cudnn *c, const vlai_sdpa_shape *shape, char *why, size_t why_bytes)
{
    if (why_bytes)
        *why = 0;
    if (!c)
        return nullptr;
    try {
        if (!c->handle) {
            snprintf(why, why_bytes, "%s", c->missing.c_str());
            c->missing.clear();
            return nullptr;
        }
        for (const auto &plan : c->plans)
            if (same(plan->shape, *shape))
                return plan->workspace < 0 ? nullptr : plan.get();
        c->plans.push_back(std::make_unique<vlai_sdpa>());
        vlai_sdpa *plan = c->plans.back().get();
        plan->shape = *shape;
        plan->handle = c->handle;
        plan->workspace = -1;
        describe_graph(plan->graph, *shape);
        fe::error_t status = plan->graph.build(c->handle, {fe::HeurMode_t::A});
        if (status.is_good())
            status = plan->graph.get_workspace_size(plan->workspace);
        if (status.is_good())
            return plan;
        plan->workspace = -1;
        snprintf(why, why_bytes, "cuDNN %d has no plan for attention of %d and %d heads of %d in %lld segments of up to %lld rows: %s",
                 vlai_cudnn_version(), shape->heads, shape->kv_heads, shape->head_dim, (long long)shape->segments,
                 (long long)shape->longest, status.get_message().c_str());
    } catch (const std::exception &e) {
        snprintf(why, why_bytes, "cuDNN makes no plan for attention: %s", e.what());
    }
    return nullptr;
}

size_t vlai_cudnn_sdpa_workspace(const vlai_sdpa *plan)
{
    return (size_t)plan->workspace;
}

int vlai_cudnn_sdpa_run(const vlai_sdpa *plan, const vlai_sdpa_data *d, void *workspace, void *stream)
{
    try {
        cudnnStatus_t status = cudnnSetStream(plan->handle, (cudaStream_t)stream);
        if (status != CUDNN_STATUS_SUCCESS)
            return (int)status;
        auto at = [](const void *p) { return const_cast<void *>(p); };
        std::unordered_map<int64_t, void *> data = {
            {Q, at(d->q)}, {K, at(d->k)}, {V, at(d->v)}, {O, d->o}, {STATS, d->lse}, {LENGTHS, at(d->lengths)},
            {OFFSETS + Q, at(d->q_offsets)}, {OFFSETS + K, at(d->kv_offsets)}, {OFFSETS + O, at(d->o_offsets)}, {OFFSETS + STATS, at(d->lse_offsets)}};
        if (plan->shape.backward)
            data.insert({{DY, at(d->dy)}, {DQ, d->dq}, {DK, d->dk}, {DV, d->dv}, {OFFSETS + DQ, at(d->dq_offsets)}, {OFFSETS + DK, at(d->dkv_offsets)}});
        fe::error_t error = const_cast<fe::graph::Graph &>(plan->graph).execute(plan->handle, data, workspace);
        return error.is_good() ? 0 : (int)CUDNN_STATUS_EXECUTION_FAILED;
    } catch (const std::exception &) {
        return (int)CUDNN_STATUS_INTERNAL_ERROR;
    }
}

#else

/* A build without cuDNN's headers. */
struct vlai_cudnn {
    bool told;
};

vlai_cudnn *vlai_cudnn_open(void)
{
    return new (std::nothrow) vlai_cudnn{};
}

void vlai_cudnn_close(vlai_cudnn *c)
{
    delete c;
}

int vlai_cudnn_version(void)
{
    return 0;
}

const vlai_sdpa *vlai_cudnn_sdpa(vlai_cudnn *c, const vlai_sdpa_shape *, char *why, size_t why_bytes)
{
    snprintf(why, why_bytes, "%s", !c || c->told ? "" : "this build has no cuDNN: tools/deps fetches the headers that it wants");
    if (c)
        c->told = true;
    return nullptr;
}

size_t vlai_cudnn_sdpa_workspace(const vlai_sdpa *)
{
    return 0;
}

int vlai_cudnn_sdpa_run(const vlai_sdpa *, const vlai_sdpa_data *, void *, void *)
{
    return 1;
}

#endif
