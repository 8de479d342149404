/* Collectives on the CPU: plain calls of the executor's communicator, on operands as they are stored. What failed is kept
 * by the communicator, and the executor asks it after the call. */
#include "cpu/cpu.h"
#include "dist/comm.h"

#include <stdbool.h>
#include <string.h>

/* One rank, or one that computes without the others for a while. */
static bool is_alone(const vlai_cpu_call *call)
{
    return call->node->attrs.comm.world == 1 || vlai_comm_is_paused(call->comm);
}

static void reduce_scatter(const vlai_cpu_call *call)
{
    const vlai_cpu_tensor *in = &call->in[0], *out = &call->out[0];
    if (!out->data)
        return;
    size_t bytes = (size_t)out->elements * vla_dtype_size(in->dtype);
    if (is_alone(call))
        memcpy(out->data, (const char *)in->data + (size_t)call->node->attrs.comm.rank * bytes, bytes);
    else
        vlai_comm_reduce_scatter(call->comm, in->data, out->data, out->elements, in->dtype, call->workspace, NULL);
}

static void all_gather(const vlai_cpu_call *call)
{
    const vlai_cpu_tensor *in = &call->in[0];
    if (!is_alone(call))
        vlai_comm_all_gather(call->comm, in->data, in->elements / call->node->attrs.comm.world, in->dtype, NULL);
}

static void all_reduce(const vlai_cpu_call *call)
{
    const vlai_cpu_tensor *in = &call->in[0];
    if (!is_alone(call))
        vlai_comm_all_reduce(call->comm, in->data, in->elements, in->dtype, call->workspace, NULL);
}

#define KERNELS(name)                                           \
    void vlai_cpu_##name##_float(const vlai_cpu_call *call)     \
    {                                                           \
        name(call);                                             \
    }                                                           \
    void vlai_cpu_##name##_double(const vlai_cpu_call *call)    \
    {                                                           \
        name(call);                                             \
    }
KERNELS(reduce_scatter)
KERNELS(all_gather)
KERNELS(all_reduce)
