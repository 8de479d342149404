#include "optim/schedule.h"

#include "base/fail.h"

#include <math.h>

vla_status vlai_schedule_check(const vlai_schedule *s, vla_error *err)
{
    if (!(s->peak >= 0) || !isfinite(s->peak) || s->warmup < 0)
        return vlai_fail(err, VLA_E_INVALID, "hyperparams: learning_rate %g, num_warmup_steps %lld; neither may be negative",
                         s->peak, (long long)s->warmup);
    if (s->kind == VLAI_SCHEDULE_COSINE && s->steps <= 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "set hyperparams.scheduler.num_training_steps, or scheduler_type: constant",
                              "num_training_steps must be > 0 for cosine scheduler, not %lld", (long long)s->steps);
    return VLA_OK;
}

double vlai_schedule_factor(const vlai_schedule *s, int64_t step)
{
    if (s->kind == VLAI_SCHEDULE_CONSTANT || s->peak == 0)
        return 1;
    double t = (double)step, warmup = (double)s->warmup, min = s->min < 0 ? 0.1 * s->peak : s->min;
    double first = s->peak / (warmup + 1);
    if (step < s->warmup)
        return (first + (s->peak - first) * t / warmup) / s->peak;
    double length = (double)(s->steps - s->warmup), progress = (t - warmup) / (length > 1 ? length : 1);
    progress = progress < 1 ? progress : 1;
    return (min + (s->peak - min) * 0.5 * (1 + cos(3.14159265358979323846 * progress))) / s->peak;
}

double vlai_schedule_rate(const vlai_schedule *s, int64_t step, double group_peak)
{
    return group_peak * vlai_schedule_factor(s, step);
}
