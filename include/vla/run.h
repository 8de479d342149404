/* Running plans: the store of persistent tensors, the executor, and runs.
 *
 *     vla_store *store;                       // weights, gradients, moments: flat arenas, found by checkpoint name
 *     vla_store_create(&store, &err);
 *     vla_store_add(store, "head.weight", VLA_COMPUTE, 2, (int64_t[]){4, 8}, 0, &err);
 *     vla_store_allocate(store, VLA_FP32, VLA_STORE_TRAIN, &err);
 *     vla_executor *ex;                       // threads, and one arena for all plans of the run
 *     vla_executor_create(2, &ex, &err);
 *     vla_run *run;                           // a plan bound to both
 *     vla_run_create(ex, plan, store, &run, &err);
 *     memcpy(vla_run_data(run, "x"), x, sizeof x);
 *     vla_run_execute(run, &err);             // allocates nothing
 *     float loss = *(float *)vla_run_data(run, "loss");
 *
 * Ownership: a run borrows executor, plan and store, which must outlive it. Threads: one caller at a time per executor;
 * the kernels share the executor's own threads. */
#ifndef VLA_RUN_H
#define VLA_RUN_H

#include "vla/plan.h"

typedef struct vla_store vla_store;
typedef struct vla_executor vla_executor;
typedef struct vla_run vla_run;

typedef enum vla_store_kind {
    VLA_STORE_WEIGHT,   /* compute copy */
    VLA_STORE_GRADIENT,
    VLA_STORE_M,        /* first moment */
    VLA_STORE_V,        /* second moment */
    VLA_STORE_LOW,      /* U16: the 16 low bits of the fp32 master of a bf16 weight */
    VLA_STORE_KINDS
} vla_store_kind;

typedef enum vla_store_use {
    VLA_STORE_PREDICT, /* weights only */
    VLA_STORE_TRAIN,   /* gradients of the weights' own type */
    VLA_STORE_ACCUMULATE, /* gradients in fp32 (fp64 in fp64), for several micro-batches per step */
    VLA_STORE_STEP, /* no gradients: they live in the plan that makes and uses them (vla_graph_step) */
} vla_store_use;

/* One rank of several that train the same parameters. */
typedef struct vla_shard_options {
    size_t size; /* of this struct */
    int rank, world;
    size_t bucket_bytes; /* of gradients of the weights' own type that are reduced at once, but for tensors larger than that */
    int zero; /* every rank keeps moments and low bits of its own share alone; 0: of everything */
} vla_shard_options;

typedef struct vla_tensor {
    const char *name;
    void *data;
    vla_dtype dtype;
    int rank;
    int64_t shape[8]; /* as in the checkpoint */
    int64_t elements;
} vla_tensor;

VLA_BEGIN_DECLS

VLA_API vla_status vla_store_create(vla_store **out, vla_error *err);
VLA_API void vla_store_destroy(vla_store *store);
/* Declares a parameter in checkpoint order. dtype: VLA_COMPUTE or VLA_PRECISE; group: index of its learning rate. */
VLA_API vla_status vla_store_add(vla_store *store, const char *name, vla_dtype dtype, int rank, const int64_t *shape,
                                 int group, vla_error *err);
/* Lays out the arenas; everything is zero. No more parameters after that. */
VLA_API vla_status vla_store_allocate(vla_store *store, vla_numerics numerics, vla_store_use use, vla_error *err);
/* After the last parameter and before memory: the store becomes that of one rank. Weights and gradients stay whole on every
 * rank; of VLA_STORE_M, V and LOW each keeps slices that together are the whole. World 1 changes nothing. */
VLA_API vla_status vla_store_shard(vla_store *store, const vla_shard_options *options, vla_error *err);
/* The elements of a tensor that this rank keeps, in the checkpoint's order: all where nothing is sharded, none for some
 * tensors. Only they can be read and written. Known once the store is laid out or allocated. */
VLA_API void vla_store_slice(const vla_store *store, vla_store_kind kind, size_t index, int64_t *first, int64_t *count);
VLA_API size_t vla_store_count(const vla_store *store);
VLA_API int64_t vla_store_find(const vla_store *store, const char *name); /* -1 when absent */
/* Before vla_store_allocate: keeps a parameter in memory as runs of `run` elements, each `pitch` elements after the one before,
 * with zeros between that stay zero (their gradient must be). Graphs then see elements / run * pitch elements, so that a
 * width that no tensor core likes can be rounded up; shapes, checkpoints and the calls below keep the checkpoint's order. */
VLA_API vla_status vla_store_pad(vla_store *store, const char *name, int64_t run, int64_t pitch, vla_error *err);
/* Shape and elements of the checkpoint. data is NULL when the kind is not kept for this parameter, or not all of it on
 * this rank; it is in the checkpoint's order unless the parameter is padded. */
VLA_API vla_tensor vla_store_tensor(const vla_store *store, vla_store_kind kind, size_t index);
/* Bytes that the layout takes, also before vla_store_allocate (for planning). */
VLA_API size_t vla_store_bytes(const vla_store *store, vla_store_kind kind, vla_numerics numerics, vla_store_use use);
/* The fp32 value of a weight: its master where this rank keeps one, else the weight itself. set: every rank of a sharded store
 * sets the whole tensor, so that all have the same weights. */
VLA_API void vla_store_get_float(const vla_store *store, size_t index, int64_t first, int64_t n, float *out);
VLA_API void vla_store_set_float(vla_store *store, size_t index, int64_t first, int64_t n, const float *values);
VLA_API void vla_store_zero_gradients(vla_store *store);
/* Gives the store a second home on the executor's device, where runs of that executor find it, and copies everything
 * there; nothing happens for the CPU. vla_store_tensor goes on to show host memory: `pull` brings it up to date, `push`
 * carries changes of it to the device. */
VLA_API vla_status vla_store_attach(vla_store *store, vla_executor *executor, vla_error *err);
VLA_API vla_status vla_store_pull(vla_store *store, vla_store_kind kind, vla_error *err);
VLA_API vla_status vla_store_push(vla_store *store, vla_store_kind kind, vla_error *err);
/* Like vla_store_allocate and vla_store_attach at once, without a host copy of what is not asked for: host_kinds is a mask
 * of 1 << vla_store_kind. A kind without host memory has no vla_tensor.data; it is read and written in pieces. */
VLA_API vla_status vla_store_allocate_on(vla_store *store, vla_executor *executor, vla_numerics numerics, vla_store_use use,
                                         unsigned host_kinds, vla_error *err);
/* n elements of a tensor from `first` on, in the checkpoint's order and its stored type, to and from where runs find them: the device when the store
 * has a home there (the host copy is not touched), else host memory. */
VLA_API vla_status vla_store_write(vla_store *store, vla_store_kind kind, size_t index, int64_t first, int64_t n,
                                   const void *data, vla_error *err);
VLA_API vla_status vla_store_read(const vla_store *store, vla_store_kind kind, size_t index, int64_t first, int64_t n, void *data,
                                  vla_error *err);
VLA_API vla_numerics vla_store_numerics(const vla_store *store);

/* On the CPU. threads: of the host, the caller's among them; 0 = one per core. */
VLA_API vla_status vla_executor_create(int threads, vla_executor **out, vla_error *err);
/* device: "cpu", "cuda" or "cuda:N". Errors: INVALID for another word, UNSUPPORTED in a build without CUDA, CUDA
 * where the machine has no such device. */
VLA_API vla_status vla_executor_create_on(const char *device, int threads, vla_executor **out, vla_error *err);
VLA_API const char *vla_executor_device(const vla_executor *executor); /* "cpu" or "cuda" */
VLA_API void vla_executor_destroy(vla_executor *executor);
VLA_API int vla_executor_threads(const vla_executor *executor);
/* Makes the arena large enough for a plan; runs made before stay valid only if it did not grow, so reserve first. */
VLA_API vla_status vla_executor_reserve(vla_executor *executor, const vla_plan *plan, vla_error *err);
VLA_API size_t vla_executor_bytes(const vla_executor *executor);
/* The most device memory that this executor and stores on it may hold, as on a smaller card; 0: no limit of our own.
 * Nothing on the CPU. vla_executor_held: what they hold now. */
VLA_API void vla_executor_limit(vla_executor *executor, size_t bytes);
VLA_API size_t vla_executor_held(const vla_executor *executor);
/* Algorithms chosen by timing decide bits, so a run that must go on exactly takes its choices along: text, to be released
 * with free() of the C library; empty when nothing was chosen. adopt: before runs are created; lines that
 * are not understood are an error, choices that this machine's library refuses are made anew (the run then differs by
 * rounding). */
VLA_API vla_status vla_executor_choices(const vla_executor *executor, char **text, vla_error *err);
VLA_API vla_status vla_executor_adopt(vla_executor *executor, const char *text, vla_error *err);

VLA_API vla_status vla_run_create(vla_executor *executor, const vla_plan *plan, vla_store *store, vla_run **out,
                                  vla_error *err);
VLA_API void vla_run_destroy(vla_run *run);
VLA_API vla_status vla_run_execute(vla_run *run, vla_error *err);
/* The same in two halves, so that the caller prepares the next batch meanwhile. submit starts an execution with the
 * inputs as they stand; after it vla_run_other_inputs gives vla_run_data a second set of input memory (its contents are
 * of two batches ago), and wait makes the results of the oldest execution that was not waited for those that
 * vla_run_data shows. At most two executions may be under way. On the CPU submit does all the work.
 *
 *     fill(run), vla_run_submit(run, &err);
 *     for (;;) {
 *         vla_run_other_inputs(run, &err), fill(run), vla_run_submit(run, &err);
 *         vla_run_wait(run, &err);                 // of the execution before
 *         loss = *(float *)vla_run_data(run, "loss");
 *     } */
VLA_API vla_status vla_run_submit(vla_run *run, vla_error *err);
VLA_API vla_status vla_run_wait(vla_run *run, vla_error *err);
VLA_API vla_status vla_run_other_inputs(vla_run *run, vla_error *err);
/* Where an input or a named result stands; NULL when the plan has none of that name (it may be dead). On a GPU a result of more
 * than 1 MB stays where the next execution writes, of whatever run: NULL while one is under way. */
VLA_API void *vla_run_data(const vla_run *run, const char *name);
/* The same with type and shape as the plan has them; all zero when there is none of that name. The name is the plan's. */
VLA_API vla_tensor vla_run_tensor(const vla_run *run, const char *name);

/* What the update does to each parameter, in store order. */
typedef enum vla_gradient_status {
    VLA_GRADIENT_NONE, /* no gradient: not touched */
    VLA_GRADIENT_ZERO, /* exactly zero: moments decay, weight decay applies */
    VLA_GRADIENT_SOME,
} vla_gradient_status;

typedef struct vla_adamw_options {
    size_t size;
    double beta1, beta2, eps, weight_decay;
    double max_norm; /* global L2 norm; 0 = no clip */
    int groups;      /* learning rates */
} vla_adamw_options;

/* Writes gradients of trained parameters of `graph` (after vla_graph_backward) to the store instead of temporaries; with
 * `accumulate` adds them. status[i] of store parameter i is raised to what this graph gives. */
VLA_API vla_status vla_graph_store_gradients(vla_graph *graph, const vla_store *store, int accumulate,
                                             vla_gradient_status *status, vla_error *err);
/* The whole step in one graph, for a step of one micro-batch: adds clip and AdamW behind the backward pass of `graph`.
 * Inputs, results and status as below; gradients are temporaries of the plan, so that they may stand where activations
 * were (the store is one of VLA_STORE_STEP, or its gradients stay as they are). */
VLA_API vla_status vla_graph_step(vla_graph *graph, const vla_store *store, vla_gradient_status *status,
                                  const vla_adamw_options *options, vla_error *err);
/* Entries of the "hyper" input, all F64. */
enum {
    VLA_HYPER_BIAS1,  /* 1 - beta1^t */
    VLA_HYPER_BIAS2,  /* 1 - beta2^t */
    VLA_HYPER_UPDATE, /* t: updates applied, this one among them */
    VLA_HYPER_SEED,   /* of stochastic rounding; a whole number below 2^53 */
    VLA_HYPER_RATES   /* learning rate of each group from here on */
};

/* A graph that clips and steps: input "hyper" F64 [VLA_HYPER_RATES + groups], see vla_hyper_fill;
 * input "guard" F32 [1], 0, or NaN when nothing may be stepped; result "clip" F64 [3] = gradient norm before the clip, factor,
 * 1 if finite. Nothing is stepped when it is not finite. Of a sharded store every rank runs it, and a guard of one is all's. */
VLA_API vla_status vla_graph_adamw(const vla_store *store, const vla_gradient_status *status,
                                   const vla_adamw_options *options, vla_graph **out, vla_error *err);
/* All of "hyper" but the rates. applied: updates before this one; seed: the run's (its lower 53 bits count). */
VLA_API void vla_hyper_fill(const vla_adamw_options *options, uint64_t seed, int64_t applied, double *hyper);

VLA_END_DECLS

#endif
