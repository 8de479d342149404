/* Made-up work for Wall-X: a micro-batch of equal samples of any shape, and random weights. What measurements and the
 * device's tests run on: no data set, no tokenizer and no weights file. The same options give the same numbers everywhere.
 *
 *     vlai_wallx_workload w;
 *     vlai_wallx_workload_options o = {.samples = 26, .text = 98, .horizon = 10, .pictures = 2, .side = 252};
 *     VLA_TRY(vlai_wallx_workload_init(&config, &o, &w, err));
 *     ... plan from w.shape ...
 *     VLA_TRY(vlai_wallx_fill(&config, &w.tokens, &w.shape, &w.batch, find, run, err));
 *     vlai_wallx_workload_fini(&w);
 */
#ifndef VLAI_WALLX_WORKLOAD_H
#define VLAI_WALLX_WORKLOAD_H

#include "base/memory.h"
#include "model/wallx.h"

VLA_BEGIN_DECLS

typedef struct vlai_wallx_workload_options {
    int64_t samples;
    int64_t text;     /* tokens of a sample that are neither picture nor action */
    int64_t horizon;  /* actions of a sample */
    int64_t pictures; /* of a sample */
    int64_t side;     /* pixels along a picture's side; rounded down to a multiple of patch * merge */
    int64_t number;   /* of the micro-batch: others have other numbers in them, and the same shape */
} vlai_wallx_workload_options;

typedef struct vlai_wallx_workload {
    vlai_wallx_tokens tokens;
    vlai_wallx_batch batch; /* points into the arena */
    vlai_wallx_shape shape; /* of the bucket */
    int64_t length;         /* tokens of a sample */
    double flops;           /* model FLOPs of a sample's training, see model/wallx_flops.h */
    vlai_arena arena;
} vlai_wallx_workload;

/* Text, pictures, actions, in this order. Actions, states and noise are drawn from [-1, 1), times from [0, 1). */
vla_status vlai_wallx_workload_init(const vlai_wallx_config *config, const vlai_wallx_workload_options *options,
                                    vlai_wallx_workload *out, vla_error *err);
void vlai_wallx_workload_fini(vlai_wallx_workload *workload);

/* Matrices from N(0, 0.02^2), weights of norms 1, biases 0, written to where the store lives. Rows of one matrix repeat every
 * few million elements, so that 8 GB take seconds: what products cost does not depend on it. */
vla_status vlai_wallx_random_weights(vla_store *store, vla_error *err);

VLA_END_DECLS

#endif
