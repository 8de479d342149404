/* The calls of dist/comm.h: world 1 is done here, the rest by a transport; the first failure is kept. */
#include "dist/comm_impl.h"

#include "base/fail.h"
#include "base/memory.h"
#include "exec/executor.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

struct vlai_comm {
    int rank, world;
    const vlai_transport *transport; /* NULL: world 1 */
    void *state;
    pthread_mutex_t lock; /* of the failure */
    atomic_bool failed;
    bool aborted;
    vla_error failure;
};

vla_status vlai_comm_open(struct vlai_group *group, const char *device, vlai_comm **out, vla_error *err)
{
    (void)device;
    *out = NULL;
    if (group)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "run one rank alone", "this build has no transport between ranks");
    vlai_comm *comm = vlai_calloc(1, sizeof *comm);
    if (!comm)
        return vlai_nomem(err, sizeof *comm);
    comm->world = 1;
    pthread_mutex_init(&comm->lock, NULL);
    *out = comm;
    return VLA_OK;
}

void vlai_comm_close(vlai_comm *comm)
{
    if (!comm)
        return;
    if (comm->transport)
        comm->transport->close(comm->state);
    pthread_mutex_destroy(&comm->lock);
    vlai_free(comm);
}

int vlai_comm_rank(const vlai_comm *comm)
{
    return comm ? comm->rank : 0;
}

int vlai_comm_world(const vlai_comm *comm)
{
    return comm ? comm->world : 1;
}

/* Keeps the first failure. */
static vla_status keep(vlai_comm *comm, vla_status status, const vla_error *failure)
{
    if (status == VLA_OK)
        return VLA_OK;
    pthread_mutex_lock(&comm->lock);
    if (!comm->failed) {
        comm->failure = *failure;
        comm->failed = true;
    }
    pthread_mutex_unlock(&comm->lock);
    return VLA_E_NCCL;
}

vla_status vlai_comm_reduce_scatter(vlai_comm *comm, const void *in, void *out, int64_t n, vla_dtype dtype, void *scratch, void *stream)
{
    vla_error failure = VLA_ERROR_INIT;
    if (comm->failed)
        return VLA_E_NCCL;
    return n ? keep(comm, comm->transport->reduce_scatter(comm->state, in, out, n, dtype, scratch, stream, &failure), &failure) : VLA_OK;
}

vla_status vlai_comm_all_gather(vlai_comm *comm, void *data, int64_t n, vla_dtype dtype, void *stream)
{
    vla_error failure = VLA_ERROR_INIT;
    if (vlai_comm_world(comm) == 1)
        return VLA_OK;
    if (comm->failed)
        return VLA_E_NCCL;
    return n ? keep(comm, comm->transport->all_gather(comm->state, data, n, dtype, stream, &failure), &failure) : VLA_OK;
}

vla_status vlai_comm_all_reduce(vlai_comm *comm, void *data, int64_t n, vla_dtype dtype, void *scratch, void *stream)
{
    vla_error failure = VLA_ERROR_INIT;
    if (vlai_comm_world(comm) == 1)
        return VLA_OK;
    if (comm->failed)
        return VLA_E_NCCL;
    return n ? keep(comm, comm->transport->all_reduce(comm->state, data, n, dtype, scratch, stream, &failure), &failure) : VLA_OK;
}

size_t vlai_comm_scratch(int64_t elements, vla_dtype dtype, int world)
{
    size_t size = vla_dtype_size(dtype) ? vla_dtype_size(dtype) : sizeof(double); /* a symbolic type may become that */
    int64_t part = (elements + world - 1) / world;
    return world == 1 ? 0 : ((size_t)(part * world) * size + 63) & ~(size_t)63;
}

bool vlai_comm_error(vlai_comm *comm, char *text, size_t size)
{
    if (!comm)
        return false;
    if (!comm->failed && comm->transport && comm->transport->poll) {
        vla_error failure = VLA_ERROR_INIT;
        keep(comm, comm->transport->poll(comm->state, &failure), &failure);
    }
    if (!comm->failed)
        return false;
    pthread_mutex_lock(&comm->lock);
    snprintf(text, size, "%s", comm->failure.message);
    pthread_mutex_unlock(&comm->lock);
    return true;
}

void vlai_comm_abort(vlai_comm *comm, const char *why)
{
    if (!comm)
        return;
    vla_error failure = VLA_ERROR_INIT;
    keep(comm, vlai_fail(&failure, VLA_E_NCCL, "%s", why), &failure);
    pthread_mutex_lock(&comm->lock);
    bool first = !comm->aborted;
    comm->aborted = true;
    pthread_mutex_unlock(&comm->lock);
    if (first && comm->transport)
        comm->transport->abort(comm->state);
}

void vlai_executor_set_comm(vla_executor *executor, vlai_comm *comm)
{
    executor->comm = comm;
}
