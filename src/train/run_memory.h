/* What a training run on this machine will hold in memory at its peak, found before it starts: plans are made at the run's
 * real shapes and never executed.
 *
 *     vlai_run_memory m;
 *     VLA_TRY(vlai_run_memory_plan(&setup->model, &setup->options.adamw, slots, &settings, available, &m, err));
 *     printf("%zu of %zu bytes\n", m.total, vlai_available_bytes());   // base/system.h
 *
 * Counted is anonymous memory, which is what an out-of-memory killer counts: weights files are mapped and cost nothing.
 * The arena of a plan is reserved as a whole, but pages that no buffer lies on are never touched; only touched ones count.
 * Threads: one caller. */
#ifndef VLAI_RUN_MEMORY_H
#define VLAI_RUN_MEMORY_H

#include "vla/trainer.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

/* What may be changed to make a run fit. */
typedef struct vlai_run_settings {
    int64_t batch, accumulation, validation_batch; /* validation 0: the same as batch; negative: none */
    vla_numerics numerics;
    vla_recompute recompute;
    vla_memory_layout layout;
    unsigned fuse, fast; /* visual_layers and fast_attention too: as in vla_plan_options */
    int visual_layers, fast_attention;
    bool automatic;  /* recompute is where it begins; the least that fits is taken */
    size_t limit;    /* most bytes of the device (0: what is free) */
    size_t keep;     /* as in vlai_plans_options.plan */
    const vla_executor *executor; /* of a device; NULL: the run is on the CPU */
    bool whole_step; /* the update is part of the batch's plan; only with accumulation 1 */
    vla_shard_options shard; /* world 0 or 1: one rank */
    int ranks_here;          /* of them on this host, whose memory they share; 0 or 1: one */
    int overlap;             /* this and gradient_dtype: as in vla_plan_options */
    vla_dtype gradient_dtype;
    int threads; /* 0: one per processor */
} vlai_run_settings;

/* Device memory of a run on a GPU. */
typedef struct vlai_run_device {
    size_t weights, gradients, optimizer;
    size_t activations; /* the arena without inputs */
    size_t inputs;
    size_t workspace;   /* kernel scratch, staging of inputs */
    size_t driver;      /* kernels, captured steps */
    size_t collectives; /* NCCL's buffers; 0 for one rank */
    size_t total;
    size_t available;   /* to this run, before it holds anything */
} vlai_run_device;

typedef struct vlai_run_memory {
    size_t weights, gradients, optimizer; /* of the store */
    size_t activations; /* touched pages of the arena, without inputs */
    size_t inputs;
    size_t workspace; /* kernel scratch of all threads */
    size_t snapshot;  /* copy of weights and optimizer while a checkpoint is written; 0 when there is no room for those of all ranks_here */
    size_t loader;    /* samples read ahead, decoders */
    size_t process;   /* everything else: code, tables, tokenizer, plans */
    size_t total;
    size_t arena;      /* reserved, of which inputs and activations are touched */
    size_t checkpoint; /* bytes of the tensors that a checkpoint holds, of several ranks what this one copies */
    size_t files;      /* bytes of a checkpoint on the disk, of all ranks */
    vlai_run_device device; /* zero on the CPU; the rows above are then host memory alone */
    vla_recompute recompute; /* that was planned */
} vlai_run_memory;

/* `slots` holds at least as many filled slots as the batches. loader and process are taken from *out as they are, and
 * belong to the total. `available`: memory that the machine has left now, for all ranks_here, which decides about the snapshot. */
vla_status vlai_run_memory_plan(const vla_model *model, const vla_adamw_options *adamw, void *const *slots,
                                const vlai_run_settings *settings, size_t available, vlai_run_memory *out, vla_error *err);

VLA_END_DECLS

#endif
