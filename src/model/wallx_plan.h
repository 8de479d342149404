/* The plan of one training micro-batch of Wall-X: graph, narrowed, differentiated, gradients in the store. Needs no
 * weights: the store may be a list of parameters that was never allocated.
 *
 *     vla_store_create(&store, &err), vlai_wallx_params(&config, NULL, NULL, store, &err);
 *     vla_gradient_status *gradients = ... one per parameter, zero ...;
 *     VLA_TRY(vlai_wallx_plan_training(&config, &shape, store, 1, &options, gradients, &plan, err)); */
#ifndef VLAI_WALLX_PLAN_H
#define VLAI_WALLX_PLAN_H

#include "model/wallx.h"

VLA_BEGIN_DECLS

enum { VLAI_WALLX_PLAN_IMAGES = 64 };

/* What a plan takes samples for where there are none to measure; 0: not said. */
typedef struct vlai_wallx_sizes {
    int64_t text_tokens; /* of a sample, beside those of pictures and actions */
    int64_t vocab;       /* rows of the embedding */
    int64_t images;
    int32_t grid[3 * VLAI_WALLX_PLAN_IMAGES]; /* of each picture of a sample: 1, height, width in patches */
} vlai_wallx_sizes;

/* "18x18,18x18" into images and grid. */
vla_status vlai_wallx_grids_parse(const char *text, vlai_wallx_sizes *out, vla_error *err);

/* Of a step of `accumulation` micro-batches (1 or more), whose gradients are added up as those of their mean. `gradients` (one per
 * parameter of the store) is raised as vla_graph_store_gradients says. The caller owns the plan. */
vla_status vlai_wallx_plan_training(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vla_store *store,
                                    int64_t accumulation, const vla_plan_options *options, vla_gradient_status *gradients,
                                    vla_plan **out, vla_error *err);

/* The plan of a whole step of one micro-batch: forward, backward, clip and AdamW (vla_graph_step). Of one rank of several where
 * the store is sharded: the step is then that of the mean over the ranks' micro-batches. */
vla_status vlai_wallx_plan_step(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vla_store *store,
                                const vla_adamw_options *adamw, const vla_plan_options *options,
                                vla_gradient_status *gradients, vla_plan **out, vla_error *err);

VLA_END_DECLS

#endif
