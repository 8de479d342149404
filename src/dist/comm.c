/* The calls of dist/comm.h: world 1 is done here, the rest by a transport; the first failure is kept. */
#include "base/fail.h"
#include "base/memory.h"
#include "base/time.h"
#include "dist/comm_impl.h"
#include "dist/group.h"
#include "exec/executor.h"
#ifdef VLA_CUDA
#include "kernels/device.h"
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

struct vlai_comm {
    int rank, world;
    vlai_group *group;
    const char *device;              /* "cpu", "cuda" */
    const vlai_transport *transport; /* NULL: world 1 */
    void *state;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t wake;
    atomic_bool failed;
    bool aborted, closing, watched;
    bool paused; /* of the thread that enqueues */
    vla_error failure;
    pthread_t watcher; /* asks the group and the transport now and then */
};

static const double watch_s = 0.25;

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

static void end(vlai_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    bool first = !comm->aborted;
    comm->aborted = true;
    pthread_mutex_unlock(&comm->lock);
    if (first && comm->transport)
        comm->transport->abort(comm->state);
}

/* A lost rank, or what failed in the transport by itself. */
static vla_status ask(const vlai_comm *comm, vla_error *failure)
{
    VLA_TRY(vlai_group_status(comm->group, failure));
    return comm->transport->poll ? comm->transport->poll(comm->state, failure) : VLA_OK;
}

static void *watch_main(void *context)
{
    vlai_comm *comm = context;
    pthread_mutex_lock(&comm->lock);
    while (!comm->closing && !comm->failed) {
        vlai_cond_wait(&comm->wake, &comm->lock, vlai_now() + watch_s);
        if (comm->closing)
            break;
        pthread_mutex_unlock(&comm->lock);
        vla_error failure = VLA_ERROR_INIT;
        if (keep(comm, ask(comm, &failure), &failure) != VLA_OK)
            end(comm);
        pthread_mutex_lock(&comm->lock);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

vla_status vlai_comm_available(const char *device, char *text, size_t size, vla_error *err)
{
    if (vlai_gpu_of(device) >= 0) {
#ifdef VLA_NCCL
        int version;
        VLA_TRY(vlai_nccl_version(&version, err));
        snprintf(text, size, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
        return VLA_OK;
#else
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "build with -DVLA_CUDA=ON where nccl.h is found (libnccl-dev)",
                              "several ranks on GPUs: this build was made without NCCL");
#endif
    }
#ifdef VLA_GLOO
    snprintf(text, size, "Gloo");
    return VLA_OK;
#else
    return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "install libgloo-dev (tools/deps) and configure the build again",
                          "several ranks on CPUs: this build was made without Gloo");
#endif
}

static vla_status open_transport(vlai_comm *comm, struct vlai_group *group, const char *device, vla_error *err)
{
    char text[64];
    double limit = vlai_group_timeout(group);
    (void)limit;
    VLA_TRY(vlai_comm_available(device, text, sizeof text, err));
#ifdef VLA_NCCL
    if (vlai_gpu_of(device) >= 0) {
        comm->transport = &vlai_nccl;
        return vlai_nccl_open(group, limit, vlai_gpu_of(device), &comm->state, err);
    }
#endif
#ifdef VLA_GLOO
    comm->transport = &vlai_gloo;
    return vlai_gloo_open(group, limit, &comm->state, err);
#else
    return VLA_E_UNSUPPORTED;
#endif
}

vla_status vlai_comm_open(struct vlai_group *group, const char *device, vlai_comm **out, vla_error *err)
{
    *out = NULL;
    int gpu = vlai_gpu_of(device);
    if (gpu == -2)
        return vlai_fail(err, VLA_E_INVALID, "device '%s': wanted cpu, cuda or cuda:N", device);
    vlai_comm *comm = vlai_calloc(1, sizeof *comm);
    if (!comm)
        return vlai_nomem(err, sizeof *comm);
    comm->group = group;
    comm->rank = vlai_group_rank(group);
    comm->world = vlai_group_world(group);
    comm->device = gpu >= 0 ? "cuda" : "cpu";
    if (vlai_cond_init(&comm->wake) != 0) {
        vlai_free(comm);
        return vlai_nomem(err, sizeof comm->wake);
    }
    pthread_mutex_init(&comm->lock, NULL);
    vla_status status = comm->world > 1 ? open_transport(comm, group, device, err) : VLA_OK;
    if (status == VLA_OK && comm->transport) {
        comm->watched = pthread_create(&comm->watcher, NULL, watch_main, comm) == 0;
        if (!comm->watched)
            status = vlai_fail(err, VLA_E_INTERNAL, "no thread to watch the collectives");
    }
    if (status != VLA_OK) {
        vlai_comm_close(comm);
        return status;
    }
    *out = comm;
    return VLA_OK;
}

void vlai_comm_close(vlai_comm *comm)
{
    if (!comm)
        return;
    pthread_mutex_lock(&comm->lock);
    comm->closing = true;
    pthread_cond_signal(&comm->wake);
    pthread_mutex_unlock(&comm->lock);
    if (comm->watched)
        pthread_join(comm->watcher, NULL);
    if (comm->state)
        comm->transport->close(comm->state);
    pthread_mutex_destroy(&comm->lock);
    pthread_cond_destroy(&comm->wake);
    vlai_free(comm);
}

const char *vlai_comm_device(const vlai_comm *comm)
{
    return comm ? comm->device : "";
}

int vlai_comm_rank(const vlai_comm *comm)
{
    return comm ? comm->rank : 0;
}

int vlai_comm_world(const vlai_comm *comm)
{
    return comm ? comm->world : 1;
}

/* A stream says that it is device memory. */
static vla_status copy(const void *from, void *to, size_t bytes, void *stream)
{
#ifdef VLA_CUDA
    if (stream)
        return vlai_device_copy(to, from, bytes, stream) == 0 ? VLA_OK : VLA_E_CUDA;
#endif
    (void)stream;
    memcpy(to, from, bytes);
    return VLA_OK;
}

vla_status vlai_comm_reduce_scatter(vlai_comm *comm, const void *in, void *out, int64_t n, vla_dtype dtype, void *scratch, void *stream)
{
    vla_error failure = VLA_ERROR_INIT;
    if (vlai_comm_world(comm) == 1)
        return n ? copy(in, out, (size_t)n * vla_dtype_size(dtype), stream) : VLA_OK;
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

vla_status vlai_comm_memory_alloc(vlai_comm *comm, size_t bytes, void **out, vla_error *err)
{
    *out = NULL;
    return comm && comm->transport && comm->transport->alloc ? comm->transport->alloc(comm->state, bytes, out, err) : VLA_OK;
}

bool vlai_comm_memory_free(vlai_comm *comm, void *memory)
{
    return comm && comm->transport && comm->transport->free && comm->transport->free(comm->state, memory);
}

size_t vlai_comm_scratch(int64_t elements, vla_dtype dtype, int world)
{
    size_t size = vla_dtype_size(dtype) ? vla_dtype_size(dtype) : sizeof(double); /* a symbolic type may become that */
    int64_t part = (elements + world - 1) / world;
    return world == 1 ? 0 : ((size_t)(part * world) * size + 63) & ~(size_t)63;
}

bool vlai_comm_error(vlai_comm *comm, char *text, size_t size)
{
    if (!comm || !comm->failed)
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
    end(comm);
}

void vlai_comm_pause(vlai_comm *comm, bool paused)
{
    if (comm)
        comm->paused = paused;
}

bool vlai_comm_is_paused(const vlai_comm *comm)
{
    return comm && comm->paused;
}

void vlai_executor_set_comm(vla_executor *executor, vlai_comm *comm)
{
    executor->comm = comm;
}
