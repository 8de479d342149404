/* The inside of an evaluation, shared by predict.c (set-up), predict_run.c (sampling, sums) and predict_save.c (files). */
#ifndef VLAI_PREDICT_INTERNAL_H
#define VLAI_PREDICT_INTERNAL_H

#include "data/contract.h"
#include "data/feed.h"
#include "model/wallx.h"
#include "train/config.h"
#include "train/predict.h"
#include "vla/checkpoint.h"

#include <jansson.h>

enum { VLAI_PREDICT_PATH = 4096 };

struct vlai_predict {
    vlai_predict_options options;
    char from[VLAI_PREDICT_PATH]; /* options.checkpoint, a link followed */
    vla_checkpoint *checkpoint;
    json_t *state; /* of the checkpoint */
    vlai_config *config;
    vlai_contract contract;
    bool contract_made;
    vlai_tokenizer *tok;
    vla_dataset *set;
    char root[VLAI_PREDICT_PATH];
    vlai_wallx_config model;
    vlai_wallx_tokens tokens;
    vla_store *store;
    vla_executor *executor;
    vlai_wallx_sampler *sampler;
    vlai_wallx_writer *writer; /* of action tokens, instead of the sampler */
    int32_t first_action_token, end;
    vlai_feed *feed;
    const char *weights; /* where they came from */
    bool pads;           /* data.padding: reference */
    /* numbers of the data set */
    const float *states, *actions;
    int64_t state_dims, action_dims;
    int64_t model_columns;       /* of an action as the model has it, without padding */
    float *row_state, *row_model; /* one state and one action in the model's columns */
    double *unit;                /* [columns] half ranges per unit; 0 for a constant column, which has no scale */
    bool *angle;                 /* [columns] comes back through a rotation matrix */
    /* the evaluated frames, and the memory of the results */
    int64_t *episodes; /* places in the set */
    int64_t *numbers;
    float *chunks; /* predicted and recorded of every frame */
    char (*labels)[96];
    const char **names;
    float *mean;
    vlai_predict_result result;
    vlai_text notes;
};

/* One action of the model, normalised, predicted at `row`, in the data set's columns. */
vla_status vlai_predict_back(vlai_predict *p, const float *drawn, int64_t row, float *out, vla_error *err);

#endif
