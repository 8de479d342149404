/* Scratch memory of the CPU kernels, by shape. Sizes hold for float and for double. */
#ifndef VLAI_CPU_WORKSPACE_H
#define VLAI_CPU_WORKSPACE_H

#include "graph/graph.h"

VLA_BEGIN_DECLS

/* Bytes that the kernel of `node` wants: shared by its tiles, and for each thread. Both multiples of 64. */
void vlai_cpu_workspace(const vla_graph *g, const vlai_node *node, size_t *shared, size_t *per_thread);

VLA_END_DECLS

#endif
