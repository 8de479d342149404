/* The plans of a run: one per shape of batch, made when the shape is first met, bounded in number, all sharing the
 * executor's arena.
 *
 *     vlai_plans *plans;
 *     VLA_TRY(vlai_plans_create(&model, store, executor, &options, &plans, err));
 *     vlai_bucket *b;
 *     VLA_TRY(vlai_plans_get(plans, shape, true, &b, err));    // graph, backward, plan, run
 *     ... model.fill(..., b->run), vla_run_execute(b->run, err) ...
 *     VLA_TRY(vlai_plans_update(plans, status, &update, err)); // clip and AdamW for these gradients
 *     vlai_plans_destroy(plans);
 *
 * A bucket is valid until the next call of get or update: making a plan may move the arena, and past the bound the plan
 * that was used longest ago is dropped. */
#ifndef VLAI_BUCKET_H
#define VLAI_BUCKET_H

#include "vla/trainer.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_bucket {
    void *shape;
    bool training;
    vla_plan *plan;
    vla_run *run;
    vla_gradient_status *status; /* per parameter; training only */
    uint64_t used;
} vlai_bucket;

typedef struct vlai_plans_options {
    vla_plan_options plan; /* its store and order are set here */
    int64_t accumulation;
    int world;       /* ranks that share a step */
    bool whole_step; /* the plans clip and step; accumulation is 1 */
    bool scaled;     /* the backward starts from "loss.scale" (an input) times the loss */
    int64_t most;    /* plans kept */
    bool automatic;  /* plan.recompute is where it begins: the least that fits is taken, plan by plan; plan.keep is then the most
                        that is kept of what cheap would make again, 0: as much as there is room for (train/device.h) */
    size_t limit;    /* most bytes for parameters and plans; 0: what the device has free (nothing on the CPU) */
    vla_adamw_options adamw;
} vlai_plans_options;

typedef struct vlai_plans vlai_plans;

vla_status vlai_plans_create(const vla_model *model, vla_store *store, vla_executor *executor,
                             const vlai_plans_options *options, vlai_plans **out, vla_error *err);
void vlai_plans_destroy(vlai_plans *plans);
vla_status vlai_plans_get(vlai_plans *plans, const void *shape, bool training, vlai_bucket **out, vla_error *err);
/* Whether get would find the plan made. */
bool vlai_plans_has(const vlai_plans *plans, const void *shape, bool training);
/* The run that steps, for gradients of this status. */
vla_status vlai_plans_update(vlai_plans *plans, const vla_gradient_status *status, vla_run **out, vla_error *err);
/* Weights whole on every rank, where a step leaves each its own shard's alone (plan.overlap and whole_step, several ranks):
 * before a save, a validation, and at the end, by all ranks. Nothing otherwise. Waits until it is done. */
vla_status vlai_plans_gather(vlai_plans *plans, vla_error *err);
/* Norms of the weights, whole on this rank: of the parameters of each group (see pass/pass.h). Waits until it is done. */
vla_status vlai_plans_norms(vlai_plans *plans, const int *group, int groups, double *norms, vla_error *err);
/* Plans of batches made so far, and of the largest the bytes of its arena and those of values that live at the same time. */
typedef struct vlai_plans_use {
    int64_t made;
    size_t arena, live;
} vlai_plans_use;
vlai_plans_use vlai_plans_used(const vlai_plans *plans);
/* Bytes of the host's arena that the plans made so far use: exec/touched.h. */
vla_status vlai_plans_touched(const vlai_plans *plans, size_t *bytes, vla_error *err);
/* The largest of each kind over the plans made so far. */
vla_plan_memory vlai_plans_memory(const vlai_plans *plans);

VLA_END_DECLS

#endif
