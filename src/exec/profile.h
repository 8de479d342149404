/* Where a run's time goes, on the CPU: by operation, and what its matrix products alone would take. */
#ifndef VLAI_PROFILE_H
#define VLAI_PROFILE_H

#include "ops/op.h"
#include "vla/run.h"

VLA_BEGIN_DECLS

typedef struct vlai_profile {
    double seconds[VLAI_OP_COUNT]; /* per execution, mean */
    int64_t calls[VLAI_OP_COUNT];  /* per execution */
    double total;                  /* median time of a whole execution */
    double matmul_alone;           /* median time of its matrix products run back to back, same operands and threads */
    double flops_matmul;
} vlai_profile;

/* Executes `repeats` times (at least 3 are sensible). Contents of inputs must be valid; results are those of a usual run. */
vla_status vlai_run_profile(vla_run *run, int repeats, vlai_profile *out, vla_error *err);

VLA_END_DECLS

#endif
