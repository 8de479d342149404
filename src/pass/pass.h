/* Passes: graph in, graph out, verified after each. In the order of the pipeline (exec/plan.c):
 *
 *   vlai_pass_narrow     narrow.c     computes rows only where they are read (forward graph, before autodiff)
 *   vla_graph_backward   autodiff.c   adds the backward pass
 *   vlai_pass_dead       dead.c       removes nodes that no result needs
 *   vlai_pass_precision  precision.c  symbolic types become concrete, identity casts go
 *   vlai_pass_update     update.c     adds accumulation, or clip and AdamW
 *   vlai_pass_recompute  recompute.c  forward values are made again in the backward pass instead of kept
 *   vlai_pass_fuse       fuse.c       (pass/fuse.h) nodes are joined into fused operations
 *   vlai_pass_chain      chain.c      element-wise operations that feed each other become one
 *   vlai_pass_communicate communicate.c (pass/communicate.h) updates of one rank of several: buckets, collectives, slices
 *   vlai_pass_beside     beside.c     products that run beside collectives are marked
 *   vlai_pass_memory     memory.c     offsets in one arena, by lifetime */
#ifndef VLAI_PASS_H
#define VLAI_PASS_H

#include "graph/graph.h"
#include "vla/plan.h"

VLA_BEGIN_DECLS

/* Removes nodes from which no kept value is reached. Kept: named values, gradients of trained parameters, and what nodes
 * that write in place need. `removed` (may be NULL) counts nodes. */
vla_status vlai_pass_dead(vla_graph *g, size_t *removed, vla_error *err);
/* Pushes gather_rows towards the leaves: attention (queries), rope, splits and merges are then computed for the gathered
 * rows only, and a linear whose leading columns are unread loses those weight rows. The values that remain keep their
 * bits. Runs before autodiff; `rewritten` (may be NULL) counts rewrites. */
vla_status vlai_pass_narrow(vla_graph *g, size_t *rewritten, vla_error *err);
vla_status vlai_pass_precision(vla_graph *g, vla_numerics numerics, vla_error *err);
/* keep: bytes of what `cheap` would make again that are kept instead; with `layer`, of the last
 * layers' values, as many layers as that holds: these follow the rule of cheap. */
vla_status vlai_pass_recompute(vla_graph *g, vla_recompute mode, size_t keep, vla_error *err);

/* A graph of its own: the norms of a store's whole weights. group: per parameter, one of `groups`, each of which must have some, or -1.
 * Result "norm.K" [3] F64 of group K begins with the norm. */
vla_status vlai_graph_norms(const struct vla_store *store, const int *group, int groups, vla_graph **out, vla_error *err);

/* Joins chains of element-wise operations in the regions that options->fuse names, where a value in between has one reader.
 * *joined (may be NULL) counts the operations that went into chains. */
vla_status vlai_pass_chain(vla_graph *g, const vla_plan_options *options, size_t *joined, vla_error *err);

/* Of plans with collectives that overlap, where options->product_sms_free says so: vlai_node.sms_free. */
void vlai_pass_beside(vla_graph *g, const vla_plan_options *options);

/* Where each value lives. */
typedef struct vlai_memory {
    int64_t *offset;      /* per value: byte offset in the arena, 256-byte aligned; -1: not in the arena (persistent or
                             never made). A reshape, stop_gradient or part of an operand has its bytes, a value with a
                             home those of the bucket. */
    int32_t *root;        /* per value: the value in whose bytes it lies; itself for most */
    size_t n_values;
    size_t arena_bytes;
    size_t input_bytes;   /* inputs stand side by side in [0, input_bytes) */
    size_t peak_bytes;    /* largest sum of live bytes at any node: the lower bound of arena_bytes */
} vlai_memory;

/* Inputs live for the whole run, results (named values, the loss, gradients that no store takes) from producer to end,
 * everything else from producer to last reader. With `lifetimes`, a result may also take over the bytes of an operand that
 * dies at its making; it then shares that operand's root. */
vla_status vlai_pass_memory(const vla_graph *g, vla_memory_layout layout, vlai_memory *out, vla_error *err);
void vlai_memory_fini(vlai_memory *memory);
/* Proves that no two values alive at once share bytes unless they share a root; names the first pair that does. */
vla_status vlai_memory_verify(const vla_graph *g, const vlai_memory *memory, vla_error *err);

VLA_END_DECLS

#endif
