/* The inside of preflight, shared by preflight.c (checks) and preflight_memory.c (the plan of the run). */
#ifndef VLAI_PREFLIGHT_INTERNAL_H
#define VLAI_PREFLIGHT_INTERNAL_H

#include "model/wallx_config.h"
#include "train/preflight.h"
#include "train/wallx_task.h"

#include <stdarg.h>

typedef struct look {
    const vlai_config *config;
    int ranks;
    const char *const *allow_change;
    const vlai_wallx_sizes *sizes;
    vlai_preflight *out;
    vla_error *err;
    vla_status status; /* what keeps it from looking on */
    vlai_wallx_config model;
    bool has_model, has_contract, keys_fit;
    vlai_tokenizer *tok;
    vla_dataset *set;
    vlai_contract contract;
    vlai_wallx_task *task;
    vla_trainer_options options; /* the task's, of so many ranks, as a run goes on from its checkpoint */
    vla_executor *executor; /* of the GPU that the run wants; NULL on a CPU */
} look;

void vlai_look_say(look *l, const char *name, vlai_verdict verdict, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* True when the status is VLA_OK; else the error becomes a line. */
bool vlai_look_judge(look *l, const char *name, vla_status status, const vla_error *error);
/* Plans the run of l->task and says whether it fits. */
void vlai_look_memory(look *l);

#endif
