/* Learning rates over the steps: linear warm-up and cosine decay, or constant. Pure functions of the step.
 *
 *     vlai_schedule s = {.kind = VLAI_SCHEDULE_COSINE, .peak = 5e-5, .min = 1e-6, .warmup = 1000, .steps = 200000};
 *     double lr = vlai_schedule_rate(&s, step, group_lr);     // step 0 is the first optimiser step
 *
 * Every parameter group has its own peak; all are scaled by the same factor lr(t) / peak. */
#ifndef VLAI_SCHEDULE_H
#define VLAI_SCHEDULE_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef enum vlai_schedule_kind { VLAI_SCHEDULE_COSINE, VLAI_SCHEDULE_CONSTANT } vlai_schedule_kind;

typedef struct vlai_schedule {
    vlai_schedule_kind kind;
    double peak, min;      /* min < 0: a tenth of the peak */
    int64_t warmup, steps; /* cosine */
} vlai_schedule;

/* Refuses a cosine without steps and negative numbers. */
vla_status vlai_schedule_check(const vlai_schedule *s, vla_error *err);
/* lr(t) / peak. */
double vlai_schedule_factor(const vlai_schedule *s, int64_t step);
double vlai_schedule_rate(const vlai_schedule *s, int64_t step, double group_peak);

VLA_END_DECLS

#endif
