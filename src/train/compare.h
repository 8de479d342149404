/* Whether two runs took the same steps: their metrics.jsonl side by side, as far as both have a step.
 *
 *     vlai_comparison c;
 *     VLA_TRY(vlai_compare_runs("first", "second", 1e-3, &c, err));
 *     puts(c.text);                 // "PASS: 30 steps, loss and grad_norm within 0.001 (at most 0 apart)"
 *     return c.same ? 0 : 3;
 *
 * A value differs when it is further from the first run's than rtol times that, when one is finite and the other is not, or
 * when one step was skipped and the other was not. rtol 0: equal to the last digit. */
#ifndef VLAI_COMPARE_H
#define VLAI_COMPARE_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_comparison {
    bool same;
    int64_t steps;      /* that both have */
    int64_t alone[2];   /* that one has */
    int64_t first;      /* step that differs first; 0: none */
    double worst;       /* largest relative difference of finite values */
    char text[512];     /* PASS or FAIL, and why */
} vlai_comparison;

/* a, b: run folders, or files of metrics. NOT_FOUND, IO, FORMAT; INVALID when they have no step in common. */
vla_status vlai_compare_runs(const char *a, const char *b, double rtol, vlai_comparison *out, vla_error *err);

VLA_END_DECLS

#endif
