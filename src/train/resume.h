/* What a checkpoint records of a run besides tensors, and whether a run may go on from it.
 *
 * state.json holds the counters; sections that decide the bits: "settings" (seed, batch, numerics, optimizer) and those of
 * the caller ("contract", "data"); and "schedule" (rates, lengths), which may change between the parts of a run. Resuming
 * compares every value of the former and lists all that differ, each with both values. The number of ranks may change: what counts
 * is the batch of all of them. */
#ifndef VLAI_RESUME_H
#define VLAI_RESUME_H

#include "base/text.h"
#include "vla/trainer.h"

VLA_BEGIN_DECLS

/* The counters that move. */
typedef struct vlai_progress {
    int64_t step;    /* steps completed, skipped ones included */
    int64_t updates; /* steps applied: Adam's t */
    int64_t skips, bad_in_a_row;
    int64_t epoch, place; /* of the next sample */
    int64_t samples;      /* seen */
} vlai_progress;

/* state.json as text. `count`: samples of an epoch's order. `choices`: of vla_executor_choices; NULL or "" = none. */
vla_status vlai_state_text(const vla_trainer_options *options, int64_t count, const vlai_progress *progress, const char *choices,
                           vlai_text *out, vla_error *err);
/* Gives the choices of algorithms that a state holds to the executor, so that a run goes on to the bit. */
vla_status vlai_state_adopt(const char *text, const char *path, vla_executor *executor, vla_error *err);
/* With another number of ranks than the state's, accumulation follows, so that batch x accumulation x ranks stays; an error where
 * it cannot, unless options->allow_change has "accumulation" or "batch". It does so again where the state is of a run that has followed
 * and the options are that run's. */
vla_status vlai_state_follow(const char *text, const char *path, vla_trainer_options *options, vla_error *err);
/* Every name of options->allow_change is one that a resume compares: of the options' own values, or of the state's (text NULL: there
 * is none). */
vla_status vlai_state_check_allowed(const char *text, const char *path, const vla_trainer_options *options, int64_t count, vla_error *err);
/* Reads the counters of a checkpoint's state and compares it with what the options say now. options->allow_change:
 * names (or sections) that may differ; "all" = any. Differences that are allowed, and those of the schedule, are logged. */
vla_status vlai_state_read(const char *text, const char *path, const vla_trainer_options *options, int64_t count,
                           vlai_progress *out, vla_error *err);

VLA_END_DECLS

#endif
