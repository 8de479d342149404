/* Collectives on a GPU, enqueued on the call's stream by the executor's communicator, and the views of what they work on. */
#include "dist/comm.h"
#include "kernels/cuda.h"
#include "kernels/device.h"

static int result(vla_status status)
{
    return status == VLA_OK ? 0 : VLAI_CUDA_COLLECTIVE;
}

/* One rank, or one that computes without the others for a while. */
static int is_alone(const vlai_cuda_call *call)
{
    return call->node->attrs.comm.world == 1 || vlai_comm_is_paused(call->comm);
}

int vlai_cuda_bucket(const vlai_cuda_call *call)
{
    (void)call;
    return 0;
}

int vlai_cuda_part(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor *in = &call->in[0], *out = &call->out[0];
    size_t size = vla_dtype_size(in->dtype);
    const char *from = (const char *)in->data + (size_t)call->node->attrs.slice.first * size;
    return out->data && out->data != from && out->elements ? vlai_device_copy(out->data, from, (size_t)out->elements * size, call->stream) : 0;
}

int vlai_cuda_reduce_scatter(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor *in = &call->in[0], *out = &call->out[0];
    if (!out->data)
        return 0;
    size_t bytes = (size_t)out->elements * vla_dtype_size(in->dtype);
    if (is_alone(call))
        return bytes ? vlai_device_copy(out->data, (const char *)in->data + (size_t)call->node->attrs.comm.rank * bytes, bytes, call->stream) : 0;
    return result(vlai_comm_reduce_scatter(call->comm, in->data, out->data, out->elements, in->dtype, NULL, call->stream));
}

int vlai_cuda_all_gather(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor *in = &call->in[0];
    return is_alone(call) ? 0 : result(vlai_comm_all_gather(call->comm, in->data, in->elements / call->node->attrs.comm.world, in->dtype, call->stream));
}

int vlai_cuda_all_reduce(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor *in = &call->in[0];
    return is_alone(call) ? 0 : result(vlai_comm_all_reduce(call->comm, in->data, in->elements, in->dtype, NULL, call->stream));
}

#define NO_WORKSPACE(name)                                                              \
    size_t vlai_cuda_workspace_##name(const vla_graph *g, const vlai_node *node)        \
    {                                                                                   \
        (void)g, (void)node;                                                            \
        return 0;                                                                       \
    }
NO_WORKSPACE(bucket)
NO_WORKSPACE(part)
NO_WORKSPACE(reduce_scatter)
NO_WORKSPACE(all_gather)
NO_WORKSPACE(all_reduce)
