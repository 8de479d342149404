/* What the collectives of a plan take by themselves: back to back, with nothing beside them. */
#ifndef VLAI_COMM_TIME_H
#define VLAI_COMM_TIME_H

#include "vla/run.h"

VLA_BEGIN_DECLS

typedef struct vlai_comm_rate {
    size_t calls, bytes; /* of one execution of the plan; bytes: of the whole buckets */
    double seconds;      /* median of `repeats`; 0: there are none */
    double bus;          /* bytes per second over each link of a ring: (N - 1) / N of the buckets, twice that for all_reduce */
} vlai_comm_rate;

typedef struct vlai_comm_rates {
    vlai_comm_rate reduce_scatter, all_gather, all_reduce; /* all_reduce: without what is as small as a norm */
} vlai_comm_rates;

/* Every rank calls it with runs of the same plan and with the same repeats, between executions. The collectives work on the run's own
 * memory, as they do in an execution: gradients of a store are summed again and again, and inputs of CPU runs must be given
 * again. World 1: all 0. */
vla_status vlai_comm_rates_measure(const vla_run *run, int repeats, vlai_comm_rates *out, vla_error *err);

VLA_END_DECLS

#endif
