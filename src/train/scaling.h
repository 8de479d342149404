/* What a step would take on more GPUs than were measured: a model of the sharded step from one rank's times, the buckets, and
 * what links carry.
 *
 *     vlai_scaling_step step = {.forward = .1, .backward = .2, .update = .02, .buckets = buckets, .count = n, .overlap = true, .zero = true};
 *     vlai_scaling_net net = vlai_scaling_cluster(16, 8, 360e9, 50e9);    // 16 GPUs, 8 a machine; bytes per second
 *     vlai_scaling s = vlai_scaling_model(&step, &net);
 *     s.step, s.exposed, one rank's step / s.step = efficiency of weak scaling */
#ifndef VLAI_SCALING_H
#define VLAI_SCALING_H

#include "vla/api.h"

#include <stdbool.h>
#include <stddef.h>

VLA_BEGIN_DECLS

typedef struct vlai_scaling_bucket {
    double gradient, weight; /* bytes that are reduced and gathered: of the whole bucket */
    double needed;           /* seconds of computing from the begin of the forward pass to its first reader */
    double ready;            /* seconds of computing from the begin of the backward pass to its last gradient */
} vlai_scaling_bucket;

typedef struct vlai_scaling_step {
    double forward, backward, update; /* seconds on one rank, which steps everything */
    const vlai_scaling_bucket *buckets;
    size_t count;
    bool overlap; /* weights are gathered under the forward pass, gradients reduced under the backward pass; else behind them */
    bool zero;    /* each rank steps its shard; else gradients are summed on all, and all step everything */
} vlai_scaling_step;

/* Times of a collective: start + hops * hop + node_hops * node_hop + (ranks - 1) / ranks * bytes / bandwidth. */
typedef struct vlai_scaling_net {
    int ranks, nodes;
    double reduce, gather; /* bus bandwidth in bytes per second: of the slowest link of the ring */
    double start, hop, node_hop; /* seconds: of a collective, of a hop within a machine, and between two */
} vlai_scaling_net;

typedef struct vlai_scaling {
    double step;
    double forward_wait, backward_wait; /* for weights; for the sums of gradients, and where nothing overlaps for weights too */
    double norm;                        /* for the sum of the norms */
    double exposed;                     /* all of these */
    double update;
} vlai_scaling;

/* `per_node` GPUs a machine; bandwidths in bytes per second within a machine, and of what connects two. */
vlai_scaling_net vlai_scaling_cluster(int ranks, int per_node, double inside, double between);
double vlai_scaling_collective(const vlai_scaling_net *net, double bytes, double bandwidth);
vlai_scaling vlai_scaling_model(const vlai_scaling_step *step, const vlai_scaling_net *net);

VLA_END_DECLS

#endif
