/* A training run of Wall-X for the trainer: from a configuration to a model, samples and options.
 *
 *     vlai_wallx_task *task;
 *     VLA_TRY(vlai_wallx_task_open(config, &task, err));   // data set, tokenizer, contract, split, weights file
 *     const vlai_wallx_setup *s = vlai_wallx_task_setup(task);
 *     vla_trainer_create(&s->model, &s->samples, &s->validation, &s->options, &trainer, err);
 *     ...
 *     vla_trainer_destroy(trainer);
 *     vlai_wallx_task_close(task);
 *
 * Split: the first data.train_test_split of the episodes train. By episode (default), the others validate; by frame, 5 % of
 * the training episodes' frames do, by the reference's permutation.
 *
 * checkpoint.resume_from: a checkpoint or run folder is handed to the trainer; a weights file (or a folder of published
 * weights, without the state of a run) starts at step 0.
 *
 * Ownership: the task borrows the configuration; everything that it hands out dies with it. Threads: samples are read from
 * the loader's threads; model functions are called from one. */
#ifndef VLAI_WALLX_TASK_H
#define VLAI_WALLX_TASK_H

#include "data/contract.h"
#include "data/order.h"
#include "data/sample.h"
#include "model/wallx.h"
#include "train/config.h"
#include "vla/trainer.h"

VLA_BEGIN_DECLS

typedef struct vlai_wallx_setup {
    vla_model model;
    vla_samples samples, validation; /* validation.count may be 0 */
    vla_trainer_options options;     /* without report, stop, stop_at and allow_change */
    const char *weights;             /* cold start from this file or folder; NULL */
    const vlai_contract *contract;
    const vlai_wallx_config *config;
    vla_dataset *set;
    int64_t train_episodes, validation_episodes;
    const char *notes;               /* oddities of data and statistics, one a line; "" */
} vlai_wallx_setup;

typedef struct vlai_wallx_task vlai_wallx_task;

vla_status vlai_wallx_task_open(const vlai_config *config, vlai_wallx_task **out, vla_error *err);
void vlai_wallx_task_close(vlai_wallx_task *task);
const vlai_wallx_setup *vlai_wallx_task_setup(const vlai_wallx_task *task);

/* Another number of embedding rows, for plans alone: such a task trains nothing. */
void vlai_wallx_task_rows(vlai_wallx_task *task, int64_t rows);

/* What checkpoint.resume_from names. */
typedef enum vlai_resume_kind { VLAI_RESUME_NOTHING, VLAI_RESUME_WEIGHTS, VLAI_RESUME_RUN } vlai_resume_kind;
vlai_resume_kind vlai_resume_kind_of(const char *path);

/* A sample as the loader's slots hold it. */
typedef struct vlai_wallx_slot {
    vlai_sample sample;
    float time;   /* of the flow */
    float *noise; /* (horizon, action width) */
} vlai_wallx_slot;

VLA_END_DECLS

#endif
