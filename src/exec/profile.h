/* Where a run's time goes: by operation, and what its matrix products alone would take. */
#ifndef VLAI_PROFILE_H
#define VLAI_PROFILE_H

#include "ops/op.h"
#include "vla/run.h"

VLA_BEGIN_DECLS

/* Launches of one kind: the same operation on the same shapes and types. */
typedef struct vlai_profile_row {
    const vlai_node *node; /* one of them */
    int64_t calls;         /* per execution */
    double seconds;        /* per execution, all calls */
    double flops, bytes;   /* per execution; bytes: every operand and result once, without what a launch leaves alone */
    double in_a_row;       /* seconds per execution, one call behind the other without events between, as in a replay; 0: not measured */
    double copy_seconds;   /* that as many copies within the device take which move as many bytes; 0: not measured */
    double of_fastest;     /* matmul: time of the fastest algorithm over that of the one taken, timed in turns; 0: not measured */
} vlai_profile_row;

typedef struct vlai_profile {
    double seconds[VLAI_OP_COUNT]; /* per execution, mean */
    int64_t calls[VLAI_OP_COUNT];  /* per execution */
    double total;                  /* median time of a whole execution */
    double matmul_alone;           /* median time of its matrix products run back to back, same operands and threads */
    double flops_matmul;
    vlai_profile_row *rows; /* on a device; slowest first, NULL on the CPU */
    size_t n_rows;
    double *nodes; /* per node of the plan, of one execution, mean; what runs in one launch is the first's; NULL in a profile that was not taken */
} vlai_profile;

/* Executes `repeats` times (at least 3 are sensible). Contents of inputs must be valid. On the CPU results are those of a usual
 * run; on a device they are lost, and 512 MB of its memory are taken meanwhile. There the launches are timed one by one, by
 * events, each alone: an empty launch then takes about 4 us, which a replayed step does not spend. `total` is of usual
 * executions. */
vla_status vlai_run_profile(vla_run *run, int repeats, vlai_profile *out, vla_error *err);
void vlai_profile_fini(vlai_profile *profile);

VLA_END_DECLS

#endif
