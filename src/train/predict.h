/* Open-loop evaluation: actions predicted at frames of recorded episodes, against the recorded ones.
 *
 *     vlai_predict_options o = VLAI_PREDICT_DEFAULT;
 *     o.checkpoint = "run";                                // a run folder (its newest checkpoint) or a checkpoint
 *     vlai_predict *p;
 *     VLA_TRY(vlai_predict_create(&o, &p, err));
 *     VLA_TRY(vlai_predict_run(p, err));                   // vlai_predict_get(p): errors and frames
 *     VLA_TRY(vlai_predict_save(p, "run/predict", err));   // CSV, JSON, PNG
 *     vlai_predict_destroy(p);
 *
 * Samples are made by the code that training uses, under the contract that the checkpoint recorded; a data set, processor or
 * configuration that does not keep it is refused. Errors are in the units of the data set's action column: over each
 * dimension, each step of the horizon, and all. Where the layout rewrites columns (6D rotations, actions relative to the
 * state) predictions are brought back first; angles of such columns differ by their way around the circle. Beside them stands
 * what the mean action of the training episodes would have got on the same frames.
 *
 * Noise is a function of (seed, episode, frame): neither batch size nor the choice of episodes changes a prediction.
 * Ownership: the options' strings are borrowed while the object lives. Threads: one caller. */
#ifndef VLAI_PREDICT_H
#define VLAI_PREDICT_H

#include "base/text.h"
#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef enum vlai_predict_swap { VLAI_SWAP_NOTHING, VLAI_SWAP_IMAGES, VLAI_SWAP_INSTRUCTIONS } vlai_predict_swap;

typedef struct vlai_predict_options {
    const char *checkpoint;
    const char *config;  /* another training configuration, which must agree with the contract; NULL: the checkpoint's */
    const char *dataset; /* folder instead of the configuration's; NULL */
    const char *weights; /* a file or folder instead of the checkpoint's; NULL */
    const int64_t *episodes; /* episode numbers; NULL: those held out from training */
    size_t episode_count;
    int64_t stride; /* frames between predictions; 0: the horizon */
    int64_t batch;  /* frames sampled together */
    int64_t steps;  /* Euler steps; 0: the architecture's num_inference_timesteps */
    int64_t most_frames; /* per episode; 0: all */
    vlai_predict_swap swap; /* pictures or instructions come from another episode with another instruction */
    uint64_t seed;
    int threads;
    const char *device; /* cpu, cuda, cuda:N or auto; NULL = auto */
    int64_t plots; /* episodes drawn by vlai_predict_save */
    void (*progress)(void *user, int64_t done, int64_t frames);
    void *user;
} vlai_predict_options;

#define VLAI_PREDICT_DEFAULT {.batch = 16, .plots = 8}

/* Sums of errors of one kind over the same values. */
typedef struct vlai_predict_error {
    double l1, mse;           /* means */
    double mean_l1, mean_mse; /* of the mean action */
    int64_t count;
} vlai_predict_error;

/* One prediction: `columns` values per step of the horizon. */
typedef struct vlai_predict_frame {
    int64_t episode; /* place among the evaluated ones */
    int64_t frame, row;
    int64_t partner; /* episode number that the swapped input is from; -1 */
    int64_t known;   /* steps of the horizon that lie inside the episode */
    const float *predicted, *recorded; /* [horizon, columns]; recorded: the first `known` steps */
} vlai_predict_frame;

typedef struct vlai_predict_result {
    int64_t horizon, columns;
    const char *const *names; /* of the columns */
    vlai_predict_error *dims;      /* [columns] */
    vlai_predict_error *steps;     /* [horizon], mean over the columns */
    vlai_predict_error all;        /* mean over everything */
    vlai_predict_error unit;       /* in units of half the data's range (q01 to q99), in which the model is trained */
    vlai_predict_error *episodes;  /* [episode_count] */
    const int64_t *episode_numbers;
    int64_t episode_count;
    vlai_predict_frame *frames;
    int64_t frame_count;
    int64_t unreadable;    /* predictions whose action tokens stand for no chunk: they count as zeros, the middle of the data's range */
    int64_t training_rows; /* that the mean action is the mean of */
    const float *mean_action;      /* [columns] */
    double seconds;
} vlai_predict_result;

typedef struct vlai_predict vlai_predict;

vla_status vlai_predict_create(const vlai_predict_options *options, vlai_predict **out, vla_error *err);
void vlai_predict_destroy(vlai_predict *predict);
vla_status vlai_predict_run(vlai_predict *predict, vla_error *err);
const vlai_predict_result *vlai_predict_get(const vlai_predict *predict);
const char *vlai_predict_checkpoint(const vlai_predict *predict); /* folder of the checkpoint */
int64_t vlai_predict_step(const vlai_predict *predict);
const char *vlai_predict_notes(const vlai_predict *predict); /* oddities, one a line; "" */

/* summary.json as text. */
vla_status vlai_predict_json(const vlai_predict *predict, vlai_text *out, vla_error *err);
/* The tables for a terminal. */
void vlai_predict_print(const vlai_predict *predict, vlai_text *out);
/* Writes summary.json, predictions.csv, and per episode epN_summary.json and epN.png. An older result there is replaced. */
vla_status vlai_predict_save(const vlai_predict *predict, const char *dir, vla_error *err);

VLA_END_DECLS

#endif
