/* Shared by the model stages of the golden runner: a case's configuration, weights and batches. */
#ifndef VLAI_PARITY_MODEL_H
#define VLAI_PARITY_MODEL_H

#include "base/memory.h"
#include "model/wallx.h"
#include "parity/parity.h"

typedef struct vlai_parity_model {
    vlai_wallx_config config;
    vlai_wallx_tokens tokens;
    vlai_config *train;          /* train.json, or NULL */
    vlai_safetensors *inputs, *outputs, *weights;
    vla_store *store;
    vla_executor *executor;
    vla_numerics numerics;
    bool fuse;
    struct { double loss, act, dact, grads, after, after_median, step_loss, grad_norm; } bound;
} vlai_parity_model;

/* Opens what the case has; with_weights also makes a training store and fills it. */
vla_status vlai_parity_model_open(vlai_parity_case *c, bool with_weights, bool accumulate, vlai_parity_model *m, vla_error *err);
void vlai_parity_model_close(vlai_parity_model *m);
/* The weights stand in model.safetensors or in several files with an index; the other files of the case are not weights. */
vla_status vlai_parity_weights(const vlai_parity_case *c, vlai_safetensors **out, vla_error *err);
/* Every tensor that has a gradient (status, or NULL), or has been stepped (updates), must stand in the file. */
vla_status vlai_parity_check_complete(const vlai_parity_model *m, const vlai_safetensors *st, const char *file,
                                      const vla_gradient_status *status, const int64_t *updates, vla_error *err);

/* What a bf16 run is held to: twice the reference's own distance from its fp32, as the case recorded it for `what` (and
 * its `statistic`, or NULL). 0 when the case recorded none. */
double vlai_parity_bf16_bound(const vlai_parity_case *c, const char *what, const char *statistic);
/* A case that recorded no bf16 mode of the reference has nothing to hold a bf16 run to: it is skipped then. */
bool vlai_parity_no_bf16(vlai_parity_case *c, const vlai_parity_model *m);
/* Compares every tensor of a file with the store's tensor of that kind. */
vla_status vlai_parity_compare_store(vlai_parity_case *c, const vlai_parity_model *m, const vlai_safetensors *st, vla_store_kind kind, vla_error *err);

/* How the case's graphs are planned. */
vla_plan_options vlai_parity_plan(const vlai_parity_model *m);

/* One micro-batch out of inputs.safetensors; everything lies in one arena. */
typedef struct vlai_parity_micro {
    vlai_wallx_batch b;
    vlai_arena arena;
    int64_t length; /* S */
} vlai_parity_micro;
/* `training`: with actions and times. Every tensor has the shape that the others and the configuration ask for. */
vla_status vlai_parity_micro_read(const vlai_parity_model *m, const char *prefix, bool training, vlai_parity_micro *out, vla_error *err);
/* The pictures of a batch: their grids [images,3] and patches, NULL without pictures. Does nothing unless *status is VLA_OK. */
const float *vlai_parity_pixels(const vlai_parity_model *m, vlai_arena *arena, const char *prefix, int64_t *images, const int32_t **grid,
                                vla_status *status, vla_error *err);

/* A tensor of a file as float (ints converted); *out from the arena. NULL when absent. */
vla_status vlai_parity_floats(vlai_arena *arena, const vlai_safetensors *st, const char *name, float **out,
                              const vlai_tensor_view **view, vla_error *err);
/* A result of a run as float, whatever its type. */
vla_status vlai_parity_result(vlai_arena *arena, const vla_run *run, const char *name, float **out, int64_t *elements,
                              vla_error *err);

#endif
