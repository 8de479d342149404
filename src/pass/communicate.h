/* Collectives into a plan of one rank of several; see pass/communicate.c. */
#ifndef VLAI_COMMUNICATE_H
#define VLAI_COMMUNICATE_H

#include "graph/graph.h"
#include "vla/plan.h"
#include "vla/run.h"

VLA_BEGIN_DECLS

/* Buckets of the store in the order in which a plan reduces their gradients and gathers their weights. */
typedef struct vlai_comm_order {
    int32_t *reduce, *gather;
    size_t n_reduce, n_gather;
} vlai_comm_order;

/* Nothing without a sharded options->store, or without an update in the graph. Fills *order, which the caller releases, also
 * when it fails. */
vla_status vlai_pass_communicate(vla_graph *g, const vla_plan_options *options, vlai_comm_order *order, vla_error *err);
vla_status vlai_comm_order_copy(const vlai_comm_order *from, vlai_comm_order *to, vla_error *err);
void vlai_comm_order_fini(vlai_comm_order *order);
/* A graph that gathers weights alone, in that order. */
vla_status vlai_graph_gather(const vla_store *store, const vlai_comm_order *order, vla_graph **out, vla_error *err);

VLA_END_DECLS

#endif
