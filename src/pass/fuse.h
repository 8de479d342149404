/* The fuse pass and its table of patterns (pass/fuse.c). */
#ifndef VLAI_FUSE_H
#define VLAI_FUSE_H

#include "graph/graph.h"
#include "vla/plan.h"

VLA_BEGIN_DECLS

enum { VLAI_FUSE_COUNT = 8 };

/* Joins nodes into fused operations in the regions that options->fuse names; fused[p] counts the rewrites of pattern p. The
 * values that remain keep their meaning; in bf16 fewer of them are rounded in between. */
vla_status vlai_pass_fuse(vla_graph *g, const vla_plan_options *options, size_t fused[VLAI_FUSE_COUNT], vla_error *err);
const char *vlai_fuse_name(int pattern);
const char *vlai_fuse_saves(int pattern); /* what is no longer moved */

VLA_END_DECLS

#endif
