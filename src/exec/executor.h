/* The inside of executors and runs, shared by their devices. A device is a table of functions: exec/run_cpu.c and, in a
 * build with CUDA, exec/run_cuda.c. */
#ifndef VLAI_EXECUTOR_H
#define VLAI_EXECUTOR_H

#include "base/pool.h"
#include "cpu/cpu.h"
#include "base/text.h"
#include "exec/plan.h"
#include "exec/profile.h"
#include "vla/run.h"

typedef struct vlai_backend {
    const char *name;
    vla_status (*open)(vla_executor *ex, vla_error *err);
    void (*close)(vla_executor *ex);
    vla_status (*reserve)(vla_executor *ex, const vla_plan *plan, vla_error *err);
    vla_status (*bind)(vla_run *run, vla_store *store, vla_error *err);
    void (*unbind)(vla_run *run);
    vla_status (*execute)(vla_run *run, vla_error *err);
    void *(*data)(const vla_run *run, vla_value v); /* host memory of an input or a named result */
    /* The two halves of execute, see vla/run.h; NULL: submit executes. */
    vla_status (*submit)(vla_run *run, vla_error *err);
    vla_status (*wait)(vla_run *run, vla_error *err);
    vla_status (*other_inputs)(vla_run *run, vla_error *err);
    vla_status (*profile)(vla_run *run, int repeats, vlai_profile *out, vla_error *err);
    /* Choices of algorithms that decide bits, as lines of text; see vla_executor_choices. */
    vla_status (*choices)(const vla_executor *ex, vlai_text *out, vla_error *err);
    vla_status (*adopt)(vla_executor *ex, const char *text, vla_error *err);
    /* The store's second home; NULL for the CPU. gathered: collectives fill it in. */
    vla_status (*store_alloc)(vla_executor *ex, size_t bytes, bool gathered, void **device, vla_error *err);
    void (*store_free)(vla_executor *ex, void *device, size_t bytes);
    vla_status (*store_zero)(vla_executor *ex, void *device, size_t bytes, vla_error *err);
    vla_status (*store_copy)(vla_executor *ex, void *device, void *host, size_t bytes, int to_device, vla_error *err);
} vlai_backend;

struct vla_executor {
    const vlai_backend *backend;
    int threads, index; /* index: of the device */
    vlai_pool *pool;
    char *arena, *workspace, *thread_workspace, *widen;
    size_t arena_bytes, workspace_bytes, per_thread, widen_bytes;
    size_t allocated, limit; /* device memory held, and the most that may be (0: all that there is) */
    double explore; /* seconds that binding the next run spends on a search of all settings of its matrix products; 0: none */
    struct vlai_comm *comm; /* of the collectives; borrowed, NULL: rank 0 of 1 */
    void *state; /* of the backend */
};

struct vla_run {
    vla_executor *executor;
    const vla_plan *plan;
    void **data; /* per value, on the device */
    void *state; /* of the backend */
};

/* The GPU that a device's name says: 0 for "cuda", N for "cuda:N"; -1: "cpu"; -2: no device's name. */
int vlai_gpu_of(const char *device);

/* Where a tensor of the store stands for runs of this executor; NULL when the store was not attached to it. */
void *vlai_store_place(const vla_store *store, const vla_executor *ex, vla_store_kind kind, size_t index);
void *vlai_store_arena(const vla_store *store, const vla_executor *ex, vla_store_kind kind); /* the same, of all */

extern const vlai_backend vlai_backend_cpu;
void vlai_cpu_run_node(const vla_run *run, size_t node); /* one node of a run on the CPU */
/* Test seam: one more device, found by its name. */
extern const vlai_backend *vlai_backend_other;
#ifdef VLA_CUDA
extern const vlai_backend vlai_backend_cuda;
#endif

#endif
