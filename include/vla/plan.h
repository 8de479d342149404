/* A plan: a graph made concrete for one device. Types resolved, dead work removed, memory laid out in one arena. It is
 * data, prints as text, and running it allocates nothing.
 *
 *     vla_plan *plan = NULL;
 *     vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
 *     if (vla_plan_build(graph, &o, &plan, &err) != VLA_OK) return report(&err);   // takes the graph
 *
 * A plan alone computes nothing: an executor (vla/run.h) binds it to a store of parameters and to an arena. Planning needs
 * no device, so a model of any size is planned on a laptop.
 *
 * Ownership: the plan owns the graph from the call on, also when the call fails. Threads: read-only after build. */
#ifndef VLA_PLAN_H
#define VLA_PLAN_H

#include "vla/graph.h"

/* fp32: everything fp32. bf16: bf16 compute copy, fp32 masters and moments. bf16_sr: bf16 weights and moments, both rounded
 * stochastically by the update. bf16_plain: bf16 weights and moments. fp64: everything fp64 (gradient checks). */
typedef enum vla_numerics { VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR, VLA_BF16_PLAIN, VLA_FP64 } vla_numerics;

/* What the backward pass keeps. none: everything it reads. cheap: norms, SwiGLU products and rotations are made again.
 * layer: only the residual streams between layers are kept (but see vla_plan_options.keep). */
typedef enum vla_recompute { VLA_RECOMPUTE_NONE, VLA_RECOMPUTE_CHEAP, VLA_RECOMPUTE_LAYER } vla_recompute;

/* How offsets in the arena are chosen. free_lists: power-of-two size classes, reused as buffers are freed at last use.
 * lifetimes: best fit over the whole plan. */
typedef enum vla_memory_layout { VLA_MEMORY_FREE_LISTS, VLA_MEMORY_LIFETIMES } vla_memory_layout;

/* Where nodes are joined into fused operations: in the layers of the vision tower, and everywhere else. */
enum { VLA_FUSE_MODEL = 1, VLA_FUSE_VISUAL = 2 };

/* What a GPU may do to be fast; without any it runs one kernel per node, one after the other, and the first algorithm that
 * the library proposes for a product. None of them makes two runs differ. */
enum {
    VLA_FAST_SEARCH = 1, /* times algorithms of matrix products when a run is bound, and keeps the choices on disk */
    VLA_FAST_REPLAY = 2, /* captures the plan's launches once and replays them */
    VLA_FAST_UPDATE = 4, /* one launch for the update of all tensors of one type */
    VLA_FAST_LANES = 8,  /* small work beside the main work */
    VLA_FAST_ALL = 15
};

typedef struct vla_plan_options {
    size_t size; /* of this struct */
    vla_numerics numerics;
    vla_recompute recompute;
    vla_memory_layout layout;
    unsigned fuse;      /* VLA_FUSE_MODEL | VLA_FUSE_VISUAL; 0: one kernel per operation */
    int visual_layers;  /* layers below this one are the vision tower's */
    int fast_attention; /* 0: attention kernels whose sums have a fixed order; 1: also cuDNN's, where it is faster */
    unsigned fast;      /* mask of VLA_FAST_*; the CPU has no use for it */
    size_t keep;        /* recompute cheap: bytes of values that are kept all the same, because there is room for them;
                         * layer: the last layers' values, as many layers as that holds, whose cheap values alone are made again */
    /* Several ranks: the plan's updates are those of the rank whose store this is (vla_store_shard); NULL or a whole store: of
     * one rank. Borrowed while the plan is made. */
    const struct vla_store *store;
    int overlap;              /* gradients are reduced while the backward pass runs, weights gathered under the forward pass */
    vla_dtype gradient_dtype; /* that gradients of weights in low precision are summed in: BF16, F32, or NONE: as they are */
    const struct vlai_comm_order *order; /* of collectives, that of the run's first plan; NULL: found by the plan */
    int product_sms_free; /* multiprocessors of a GPU that products leave free which run beside collectives (0 to 64); 0: none */
} vla_plan_options;

#define VLA_PLAN_OPTIONS_DEFAULT {sizeof(vla_plan_options), VLA_FP32, VLA_RECOMPUTE_NONE, VLA_MEMORY_LIFETIMES, 0, 0, 0, 0, 0, NULL, 0, VLA_DTYPE_NONE, NULL, 0}

typedef struct vla_plan vla_plan;

/* Bytes. */
typedef struct vla_plan_memory {
    size_t weights;     /* compute copies of the parameters */
    size_t gradients;
    size_t optimizer;   /* moments, and low bits of masters */
    size_t activations; /* the arena: temporaries and kept activations */
    size_t inputs;      /* slots of the batch */
    size_t workspace;   /* kernel scratch */
} vla_plan_memory;

VLA_BEGIN_DECLS

VLA_API vla_status vla_plan_build(vla_graph *graph, const vla_plan_options *options, vla_plan **out, vla_error *err);
VLA_API void vla_plan_destroy(vla_plan *plan);
VLA_API vla_plan_memory vla_plan_memory_get(const vla_plan *plan);
VLA_API double vla_plan_flops(const vla_plan *plan); /* executed, multiply-add = 2 */
VLA_API size_t vla_plan_nodes(const vla_plan *plan);
/* The plan as text, one line per launch with buffers as offsets. Released with free() of the C library. */
VLA_API vla_status vla_plan_print(const vla_plan *plan, char **text, vla_error *err);

VLA_END_DECLS

#endif
