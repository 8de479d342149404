/* Collectives between GPUs by NCCL, which is loaded at run time: a machine with one GPU does without. Calls enqueue on the stream
 * that they are given, so that a captured stream captures them. What NCCL_* variables of the environment ask for stays as it is.
 *
 * A collective of which a rank is missing hangs on the device, and so would the calls that connect the ranks: those run in a thread
 * of their own, which is left alone at the time limit, and exchange something once of every kind, so that connections and their
 * memory are there from then on. */
#include "base/fail.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/time.h"
#include "dist/comm_impl.h"
#include "dist/group.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The functions that are used, found by name in the library. */
#define FUNCTIONS(X)                                                                                                \
    X(ncclGetVersion) X(ncclGetUniqueId) X(ncclCommInitRankConfig) X(ncclCommDestroy) X(ncclCommAbort)              \
    X(ncclCommGetAsyncError) X(ncclGetErrorString) X(ncclGetLastError) X(ncclReduceScatter) X(ncclAllGather) X(ncclAllReduce)

/* Those of gathers by copy engines, for which this build's header and the library have to be new enough. */
#ifdef NCCL_CTA_POLICY_ZERO
#define COPY_FUNCTIONS(X) X(ncclMemAlloc) X(ncclMemFree) X(ncclCommWindowRegister) X(ncclCommWindowDeregister)
#else
#define COPY_FUNCTIONS(X)
#endif

enum {
    OLDEST = NCCL_VERSION(2, 18, 1), /* whose ncclConfig_t the header's can be read as */
    COPIES = NCCL_VERSION(2, 28, 1), /* gathers by copy engines */
    SHARED = 4,                      /* pieces of memory for those */
    WARM = 16 << 20                  /* bytes of the exchange that connects the ranks */
};

static struct {
    bool tried;
    char missing[256]; /* why it cannot be used; empty: it can */
    int version;
#define MEMBER(name) __typeof__(name) *name;
    FUNCTIONS(MEMBER) COPY_FUNCTIONS(MEMBER)
#undef MEMBER
} lib;

typedef struct nccl {
    int rank, world, device;
    double limit;
    ncclComm_t comm;      /* NULL once ended */
    pthread_mutex_t lock; /* of comm: who enqueues, who asks, who ends */
    bool copies;          /* copy engines gather what lies in `shared` */
#ifdef NCCL_CTA_POLICY_ZERO
    struct {
        void *memory;
        ncclWindow_t window;
    } shared[SHARED];
#endif
} nccl;

static vla_status load(vla_error *err)
{
    if (!lib.tried) {
        lib.tried = true;
        void *handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
        if (!handle)
            snprintf(lib.missing, sizeof lib.missing, "%s", dlerror());
#define FIND(name)                                                                                  \
    if (handle && !(*(void **)&lib.name = dlsym(handle, #name)) && !lib.missing[0])                 \
        snprintf(lib.missing, sizeof lib.missing, "libnccl.so.2 has no function %s", #name);
        FUNCTIONS(FIND)
#undef FIND
#define FIND(name) *(void **)&lib.name = handle ? dlsym(handle, #name) : NULL;
        COPY_FUNCTIONS(FIND)
#undef FIND
        if (!lib.missing[0] && (lib.ncclGetVersion(&lib.version) != ncclSuccess || lib.version < OLDEST))
            snprintf(lib.missing, sizeof lib.missing, "libnccl.so.2 is of version %d.%d.%d, wanted 2.18.1 or later", lib.version / 10000,
                     lib.version / 100 % 100, lib.version % 100);
    }
    if (!lib.missing[0])
        return VLA_OK;
    return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "install NCCL 2 (Debian and Ubuntu: libnccl2; pip: nvidia-nccl-cu13) and name its folder in LD_LIBRARY_PATH",
                          "NCCL, for several GPUs, cannot be used: %s", lib.missing);
}

vla_status vlai_nccl_version(int *version, vla_error *err)
{
    VLA_TRY(load(err));
    *version = lib.version;
    return VLA_OK;
}

static vla_status cuda_failed(cudaError_t code, const char *what, vla_error *err)
{
    return vlai_fail(err, VLA_E_CUDA, "%s: CUDA: %s", what, cudaGetErrorString(code));
}

/* Waits for a call that goes on by itself (the user's NCCL_COMM_BLOCKING=0); tells what it came to. */
static vla_status settle(const nccl *s, ncclResult_t code, const char *what, vla_error *err)
{
    double start = vlai_now();
    while (code == ncclInProgress && s->comm && vlai_now() - start < s->limit) {
        nanosleep(&(struct timespec){0, 100000}, NULL);
        if (lib.ncclCommGetAsyncError(s->comm, &code) != ncclSuccess)
            code = ncclInternalError;
    }
    if (code == ncclSuccess)
        return VLA_OK;
    if (code == ncclInProgress)
        return vlai_fail(err, VLA_E_NCCL, "%s: a rank did not take part within %g s", what, s->limit);
    const char *last = lib.ncclGetLastError(s->comm);
    return vlai_fail_hint(err, VLA_E_NCCL, "NCCL_DEBUG=WARN in the environment makes NCCL say more", "%s: NCCL: %s%s%s", what,
                          lib.ncclGetErrorString(code), last && *last ? "; " : "", last ? last : "");
}

static bool sum_type(vla_dtype dtype, ncclDataType_t *type)
{
    switch (dtype) {
    case VLA_BF16: *type = ncclBfloat16; return true;
    case VLA_F32: *type = ncclFloat32; return true;
    case VLA_F64: *type = ncclFloat64; return true;
    case VLA_I32: *type = ncclInt32; return true;
    case VLA_I64: *type = ncclInt64; return true;
    default: return false;
    }
}

static vla_status no_sum(vla_dtype dtype, const char *what, vla_error *err)
{
    return vlai_fail(err, VLA_E_DTYPE, "%s: no sum of %s", what, vla_dtype_name(dtype));
}

/* With s->lock held, and s->comm there: `call` enqueues. */
#define ENQUEUE(s, what, call)                                                                          \
    do {                                                                                                \
        pthread_mutex_lock(&(s)->lock);                                                                 \
        vla_status status_ = (s)->comm ? settle((s), (call), (what), err)                               \
                                       : vlai_fail(err, VLA_E_NCCL, "%s: the communicator has ended", (what)); \
        pthread_mutex_unlock(&(s)->lock);                                                               \
        return status_;                                                                                 \
    } while (0)

static vla_status nccl_reduce_scatter(void *state, const void *in, void *out, int64_t n, vla_dtype dtype, void *scratch, void *stream, vla_error *err)
{
    nccl *s = state;
    ncclDataType_t type;
    (void)scratch;
    if (!sum_type(dtype, &type))
        return no_sum(dtype, "reduce_scatter", err);
    ENQUEUE(s, "reduce_scatter", lib.ncclReduceScatter(in, out, (size_t)n, type, ncclSum, s->comm, stream));
}

/* Whatever the type, bytes are gathered. */
static vla_status nccl_all_gather(void *state, void *data, int64_t n, vla_dtype dtype, void *stream, vla_error *err)
{
    nccl *s = state;
    size_t bytes = (size_t)n * vla_dtype_size(dtype);
    ENQUEUE(s, "all_gather", lib.ncclAllGather((char *)data + (size_t)s->rank * bytes, data, bytes, ncclInt8, s->comm, stream));
}

static vla_status nccl_all_reduce(void *state, void *data, int64_t n, vla_dtype dtype, void *scratch, void *stream, vla_error *err)
{
    nccl *s = state;
    ncclDataType_t type;
    (void)scratch;
    if (!sum_type(dtype, &type))
        return no_sum(dtype, "all_reduce", err);
    ENQUEUE(s, "all_reduce", lib.ncclAllReduce(data, data, (size_t)n, type, ncclSum, s->comm, stream));
}

static vla_status nccl_poll(void *state, vla_error *err)
{
    nccl *s = state;
    ncclResult_t code = ncclSuccess;
    vla_status status = VLA_OK;
    if (pthread_mutex_trylock(&s->lock))
        return VLA_OK; /* whoever has it learns of a failure himself */
    if (s->comm && (lib.ncclCommGetAsyncError(s->comm, &code) != ncclSuccess || (code != ncclSuccess && code != ncclInProgress)))
        status = settle(s, code == ncclSuccess ? ncclInternalError : code, "a collective under way", err);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static void *abort_main(void *comm)
{
    lib.ncclCommAbort(comm);
    return NULL;
}

/* ncclCommAbort makes the kernels under way end at once, and then waits until no captured graph names the communicator: nobody here
 * should wait with it. A call that hangs in NCCL holds the lock, and is what this ends: it is not waited for long. */
static void nccl_abort(void *state)
{
    nccl *s = state;
    struct timespec until;
    pthread_t thread;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    bool locked = pthread_mutex_timedlock(&s->lock, &until) == 0;
    ncclComm_t comm = s->comm;
    s->comm = NULL;
    if (locked)
        pthread_mutex_unlock(&s->lock);
    if (comm && pthread_create(&thread, NULL, abort_main, comm) == 0)
        pthread_detach(thread);
}

/* ncclCommDestroy waits for the other ranks of this machine to call it: so does this, for the time limit, and then leaves the thread
 * to the end of the process. */
typedef struct parting {
    ncclComm_t comm;
    int device;
    atomic_bool done;
    atomic_int holders;
} parting;

static void parting_drop(parting *p)
{
    if (atomic_fetch_sub(&p->holders, 1) == 1)
        vlai_free(p);
}

static void *part_main(void *context)
{
    parting *p = context;
    if (cudaSetDevice(p->device) == cudaSuccess)
        lib.ncclCommDestroy(p->comm);
    p->done = true;
    parting_drop(p);
    return NULL;
}

static void part(const nccl *s)
{
    pthread_t thread;
    double start = vlai_now();
    parting *p = vlai_calloc(1, sizeof *p);
    if (!p)
        return; /* its memory goes with the process */
    p->comm = s->comm;
    p->device = s->device;
    p->holders = 2;
    if (pthread_create(&thread, NULL, part_main, p)) {
        vlai_free(p);
        return;
    }
    pthread_detach(thread);
    while (!p->done && vlai_now() - start < s->limit)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    parting_drop(p);
}

static void nccl_close(void *state)
{
    nccl *s = state;
    if (s->comm)
        part(s);
    pthread_mutex_destroy(&s->lock);
    vlai_free(s);
}

/* ---- gathers by copy engines ---- */

#ifdef NCCL_CTA_POLICY_ZERO
/* NCCL takes copy engines for a gather whose bytes lie in a window over memory of its own kind on every rank, with that policy in the
 * communicator's configuration; else it takes kernels, and says nothing. It does not use NVLink multicast for it where
 * NCCL_NVLS_ENABLE=0. */
static vla_status share(nccl *s, void *memory, size_t bytes, ncclWindow_t *window, vla_error *err)
{
    pthread_mutex_lock(&s->lock);
    vla_status status = s->comm ? settle(s, lib.ncclCommWindowRegister(s->comm, memory, bytes, window, NCCL_WIN_COLL_SYMMETRIC), "memory for copy engines", err)
                                : vlai_fail(err, VLA_E_NCCL, "memory for copy engines: the communicator has ended");
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* The first gather makes what all of them need: before anything is captured. */
static vla_status first_gather(nccl *s, void *memory, size_t bytes, vla_error *err)
{
    cudaStream_t stream = NULL;
    const int64_t n = 256;
    if (bytes < (size_t)n * sizeof(int32_t) * (size_t)s->world)
        return VLA_OK;
    cudaError_t code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    vla_status status = code == cudaSuccess ? nccl_all_gather(s, memory, n, VLA_I32, stream, err) : cuda_failed(code, "the first gather by copy engines", err);
    if (status == VLA_OK && (code = cudaStreamSynchronize(stream)) != cudaSuccess)
        status = cuda_failed(code, "the first gather by copy engines", err);
    if (stream)
        cudaStreamDestroy(stream);
    return status;
}

static vla_status nccl_alloc(void *state, size_t bytes, void **out, vla_error *err)
{
    nccl *s = state;
    int i = 0;
    while (i < SHARED && s->shared[i].memory)
        i++;
    if (!s->copies || i == SHARED || bytes == 0)
        return VLA_OK;
    ncclResult_t code = lib.ncclMemAlloc(out, bytes);
    if (code != ncclSuccess) {
        *out = NULL;
        return vlai_fail_hint(err, VLA_E_DEVICE_NOMEM, "without NCCL_CTA_POLICY=2 memory is allocated as usual",
                              "%zu bytes of device memory for gathers by copy engines: NCCL: %s", bytes, lib.ncclGetErrorString(code));
    }
    s->shared[i].memory = *out;
    VLA_TRY(share(s, *out, bytes, &s->shared[i].window, err));
    return first_gather(s, *out, bytes, err);
}

/* After a failure it is left to the end of the process. */
static bool nccl_free(void *state, void *memory)
{
    nccl *s = state;
    int i = 0;
    while (i < SHARED && (!memory || s->shared[i].memory != memory))
        i++;
    if (i == SHARED)
        return false;
    pthread_mutex_lock(&s->lock);
    if (s->comm && (!s->shared[i].window || lib.ncclCommWindowDeregister(s->comm, s->shared[i].window) == ncclSuccess))
        lib.ncclMemFree(memory);
    pthread_mutex_unlock(&s->lock);
    s->shared[i].memory = NULL;
    s->shared[i].window = NULL;
    return true;
}

/* What rank 0 decides for all. */
static bool wants_copies(void)
{
    const char *policy = getenv("NCCL_CTA_POLICY");
    if (!policy || strcmp(policy, "2") != 0)
        return false;
    bool can = lib.version >= COPIES;
#define FOUND(name) can = can && lib.name;
    COPY_FUNCTIONS(FOUND)
#undef FOUND
    if (!can)
        vlai_warn("NCCL_CTA_POLICY=2: NCCL %d.%d.%d has no gathers by copy engines, wanted 2.28 or later", lib.version / 10000, lib.version / 100 % 100,
                  lib.version % 100);
    return can;
}
#else
#define nccl_alloc NULL
#define nccl_free NULL

static bool wants_copies(void)
{
    return false;
}
#endif

const vlai_transport vlai_nccl = {nccl_close, nccl_reduce_scatter, nccl_all_gather, nccl_all_reduce, nccl_poll, nccl_abort, nccl_alloc, nccl_free};

/* ---- opening ---- */

/* Shared by the opener and the thread that connects; the last one to leave releases it, and the state with it if the opener left first. */
typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t over;
    bool connected, done, left; /* connected: what hangs from then on hangs on the device, and can be ended */
    nccl *state;
    ncclUniqueId id;
    vla_status status;
    vla_error err;
} meeting;

static vla_status exchange(nccl *s, char *in, char *out, void *stream, vla_error *err)
{
    const int64_t all = WARM / (int64_t)sizeof(float), parts[] = {256, all / s->world};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        VLA_TRY(nccl_reduce_scatter(s, in, out, parts[i], VLA_F32, NULL, stream, err));
        VLA_TRY(nccl_all_gather(s, in, parts[i], VLA_F32, stream, err));
        VLA_TRY(nccl_all_reduce(s, in, parts[i] * s->world, VLA_F32, NULL, stream, err));
    }
    cudaError_t code = cudaStreamSynchronize(stream);
    return code == cudaSuccess ? VLA_OK : cuda_failed(code, "the first collectives", err);
}

static vla_status warm(nccl *s, vla_error *err)
{
    void *in = NULL, *out = NULL;
    cudaStream_t stream = NULL;
    cudaError_t code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (code == cudaSuccess)
        code = cudaMalloc(&in, WARM);
    if (code == cudaSuccess)
        code = cudaMalloc(&out, WARM);
    if (code == cudaSuccess)
        code = cudaMemsetAsync(in, 0, WARM, stream);
    vla_status status = code == cudaSuccess ? exchange(s, in, out, stream, err) : cuda_failed(code, "the first collectives", err);
    cudaFree(in);
    cudaFree(out);
    if (stream)
        cudaStreamDestroy(stream);
    return status;
}

static vla_status meet(meeting *m)
{
    nccl *s = m->state;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
#ifdef NCCL_CTA_POLICY_ZERO
    if (s->copies)
        config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
    cudaError_t code = cudaSetDevice(s->device);
    if (code != cudaSuccess)
        return cuda_failed(code, "choosing the GPU", &m->err);
    VLA_TRY(settle(s, lib.ncclCommInitRankConfig(&s->comm, s->world, m->id, s->rank, &config), "connecting the GPUs", &m->err));
    pthread_mutex_lock(&m->lock);
    m->connected = true;
    pthread_mutex_unlock(&m->lock);
    return warm(s, &m->err);
}

static void meeting_free(meeting *m)
{
    if (m->left)
        vlai_free(m->state);
    pthread_mutex_destroy(&m->lock);
    pthread_cond_destroy(&m->over);
    vlai_free(m);
}

static void *meet_main(void *context)
{
    meeting *m = context;
    m->status = meet(m);
    pthread_mutex_lock(&m->lock);
    m->done = true;
    bool left = m->left;
    pthread_cond_signal(&m->over);
    pthread_mutex_unlock(&m->lock);
    if (left)
        meeting_free(m);
    return NULL;
}

/* Waits for the thread, for a lost rank or for the time limit (*status). true: the thread is done. */
static bool wait_for(meeting *m, vlai_group *group, double limit, vla_status *status, vla_error *err)
{
    double start = vlai_now();
    bool done;
    *status = VLA_OK;
    pthread_mutex_lock(&m->lock);
    while (!m->done && *status == VLA_OK) {
        vlai_cond_wait(&m->over, &m->lock, vlai_now() + 0.1);
        if (m->done)
            break;
        *status = vlai_group_status(group, err);
        if (*status == VLA_OK && vlai_now() - start > limit)
            *status = vlai_fail_hint(err, VLA_E_NCCL, "NCCL_DEBUG=INFO in the environment shows how far each rank came",
                                     "connecting %d GPUs took longer than %g s", m->state->world, limit);
    }
    bool stuck = !m->done && m->connected;
    pthread_mutex_unlock(&m->lock);
    if (stuck)
        nccl_abort(m->state);
    pthread_mutex_lock(&m->lock);
    done = m->done;
    m->left = !done;
    pthread_mutex_unlock(&m->lock);
    return done;
}

static vla_status connect_all(nccl *s, const ncclUniqueId *id, vlai_group *group, vla_error *err)
{
    pthread_t thread;
    vla_status status;
    meeting *m = vlai_calloc(1, sizeof *m);
    if (!m) {
        vlai_free(s);
        return vlai_nomem(err, sizeof *m);
    }
    if (vlai_cond_init(&m->over) != 0) {
        vlai_free(m);
        vlai_free(s);
        return vlai_nomem(err, sizeof m->over);
    }
    m->state = s;
    m->id = *id;
    pthread_mutex_init(&m->lock, NULL);
    if (pthread_create(&thread, NULL, meet_main, m)) {
        m->left = true;
        meeting_free(m);
        return vlai_fail(err, VLA_E_INTERNAL, "no thread for connecting the GPUs");
    }
    pthread_detach(thread);
    if (!wait_for(m, group, s->limit, &status, err))
        return status;
    if (status == VLA_OK) {
        status = m->status;
        if (status != VLA_OK && err)
            *err = m->err;
    }
    if (status != VLA_OK)
        nccl_abort(s);
    m->left = status != VLA_OK;
    meeting_free(m);
    return status;
}

/* What rank 0 sets for the others: its NCCL's version, whether copy engines gather, and the name of the communicator. */
typedef struct invitation {
    int32_t version, copies;
    ncclUniqueId id;
} invitation;

static vla_status invite(vlai_group *group, invitation *out, vla_error *err)
{
    static atomic_int opened; /* every rank opens the same communicators, so that the number names one of them */
    char key[32];
    snprintf(key, sizeof key, "nccl/%d", opened++);
    if (vlai_group_rank(group) == 0) {
        out->version = lib.version;
        out->copies = wants_copies();
        ncclResult_t code = lib.ncclGetUniqueId(&out->id);
        if (code != ncclSuccess)
            return vlai_fail(err, VLA_E_NCCL, "ncclGetUniqueId: %s; %s", lib.ncclGetErrorString(code), lib.ncclGetLastError(NULL));
        return vlai_group_set(group, key, out, sizeof *out, err);
    }
    void *data = NULL;
    size_t size = 0;
    VLA_TRY(vlai_group_get(group, key, 0, &data, &size, err));
    bool whole = size == sizeof *out;
    if (whole)
        memcpy(out, data, sizeof *out);
    vlai_free(data);
    if (!whole)
        return vlai_fail(err, VLA_E_INTERNAL, "%s: %zu bytes, wanted %zu", key, size, sizeof *out);
    if (out->version != lib.version)
        return vlai_fail_hint(err, VLA_E_INVALID, "install the same version on every host", "rank %d has NCCL %d, rank 0 has %d", vlai_group_rank(group),
                              lib.version, (int)out->version);
    return VLA_OK;
}

vla_status vlai_nccl_open(vlai_group *group, double limit, int device, void **state, vla_error *err)
{
    invitation from;
    *state = NULL;
    VLA_TRY(load(err));
    VLA_TRY(invite(group, &from, err));
    nccl *s = vlai_calloc(1, sizeof *s);
    if (!s)
        return vlai_nomem(err, sizeof *s);
    *s = (nccl){.rank = vlai_group_rank(group), .world = vlai_group_world(group), .device = device, .limit = limit, .copies = from.copies};
    pthread_mutex_init(&s->lock, NULL);
    VLA_TRY(connect_all(s, &from.id, group, err));
    *state = s;
    return VLA_OK;
}
