/* Passes: graph in, graph out, verified after each. In the order of the pipeline (exec/plan.c):
 *
 *   vla_graph_backward   autodiff.c   adds the backward pass
 *   vlai_pass_narrow     narrow.c     computes rows only where they are read
 *   vlai_pass_dead       dead.c       removes nodes that no result needs
 *   vlai_pass_precision  precision.c  symbolic types become concrete, identity casts go
 *   vlai_pass_update     update.c     adds clip and AdamW
 *   vlai_pass_recompute  recompute.c  forward values are made again in the backward pass instead of kept
 *   vlai_pass_memory     memory.c     offsets in one arena, by lifetime
 *
 * narrow and dead before autodiff act on the forward graph; dead runs again after it. */
#ifndef VLAI_PASS_H
#define VLAI_PASS_H

#include "graph/graph.h"

VLA_BEGIN_DECLS

typedef enum vla_numerics { VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR, VLA_BF16_PLAIN, VLA_FP64 } vla_numerics;
typedef enum vla_recompute { VLA_RECOMPUTE_NONE, VLA_RECOMPUTE_CHEAP, VLA_RECOMPUTE_LAYER } vla_recompute;

/* Removes nodes from which no kept value is reached. Kept: named values, gradients of trained parameters, and what nodes
 * that write in place need. `removed` (may be NULL) counts nodes. */
vla_status vlai_pass_dead(vla_graph *g, size_t *removed, vla_error *err);
/* Pushes gather_rows towards the leaves: attention, rope, splits and merges are then computed for the gathered rows only,
 * and a linear whose leading results are unread loses those weight rows. Bits do not change. */
vla_status vlai_pass_narrow(vla_graph *g, size_t *rewritten, vla_error *err);
vla_status vlai_pass_precision(vla_graph *g, vla_numerics numerics, vla_error *err);
vla_status vlai_pass_recompute(vla_graph *g, vla_recompute mode, vla_error *err);

VLA_END_DECLS

#endif
