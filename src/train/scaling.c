/* The model.
 *
 * A reduce_scatter or an all_gather of S bytes over N ranks on a ring moves (N - 1) / N * S bytes over every link, so that it
 * takes that by the bandwidth of the slowest link, the bus bandwidth (nccl-tests, doc/PERFORMANCE.md). A ring crosses the
 * boundary of every machine once in each direction, so that between machines the slowest link is what one machine sends. On
 * top comes what a collective takes to begin and N - 1 hops, of which one per machine but the last goes between machines
 * (NCCL, src/graph/tuning.cc: a ring with the Simple protocol begins in 8.4 us, a hop over NVLink takes 3.4 us, one over the
 * network 9.6 us).
 *
 * Collectives run one after the other beside the computing. Gathers begin with the step, in the order in which the forward
 * pass needs their buckets; the pass waits where a bucket is not there yet:
 *
 *     G_i = G_(i-1) + gather_i,   forward_wait = max(0, G_i - needed_i)
 *
 * A bucket is reduced from when its last gradient is made, and when the one before is done; the update waits for the last:
 *
 *     R_i = max(R_(i-1), ready_i) + reduce_i,   backward_wait = R_last - backward
 *
 * The bucket that becomes ready last does so at the end of the backward pass: it is never hidden. The update of 1 / N of the
 * state takes 1 / N of the time. Not in the model: what collectives take of the units and the memory that the passes compute
 * with, and ranks that are not equally fast. */
#include "train/scaling.h"

static const double ring_start = 8.4e-6, nvlink_hop = 3.4e-6, network_hop = 9.6e-6;

vlai_scaling_net vlai_scaling_cluster(int ranks, int per_node, double inside, double between)
{
    int nodes = (ranks + per_node - 1) / per_node;
    double slowest = nodes > 1 && between < inside ? between : inside;
    return (vlai_scaling_net){.ranks = ranks, .nodes = nodes, .reduce = slowest, .gather = slowest, .start = ring_start, .hop = nvlink_hop, .node_hop = network_hop};
}

double vlai_scaling_collective(const vlai_scaling_net *net, double bytes, double bandwidth)
{
    if (net->ranks < 2)
        return 0;
    int between = net->nodes - 1, within = net->ranks - 1 - between;
    return net->start + within * net->hop + between * net->node_hop + bytes * (net->ranks - 1) / net->ranks / bandwidth;
}

static double reduction(const vlai_scaling_step *s, const vlai_scaling_net *net, const vlai_scaling_bucket *b)
{
    double once = vlai_scaling_collective(net, b->gradient, net->reduce);
    return s->zero ? once : 2 * once; /* an all_reduce is both, one behind the other */
}

static double key(const vlai_scaling_bucket *b, bool by_ready)
{
    return by_ready ? b->ready : b->needed;
}

/* The bucket behind `last` in the order of its key, then of its number; -1 for the first; count: there is none. */
static size_t next(const vlai_scaling_step *s, bool by_ready, size_t last)
{
    size_t found = s->count;
    for (size_t i = 0; i < s->count; i++) {
        double own = key(&s->buckets[i], by_ready);
        if (last != (size_t)-1 && (own < key(&s->buckets[last], by_ready) || (own <= key(&s->buckets[last], by_ready) && i <= last)))
            continue;
        if (found == s->count || own < key(&s->buckets[found], by_ready))
            found = i;
    }
    return found;
}

static double wait_for_weights(const vlai_scaling_step *s, const vlai_scaling_net *net)
{
    double there = 0, wait = 0;
    for (size_t i = next(s, false, (size_t)-1); i < s->count; i = next(s, false, i)) {
        there += vlai_scaling_collective(net, s->buckets[i].weight, net->gather);
        wait = there - s->buckets[i].needed > wait ? there - s->buckets[i].needed : wait;
    }
    return wait;
}

static double wait_for_sums(const vlai_scaling_step *s, const vlai_scaling_net *net)
{
    double there = 0;
    for (size_t i = next(s, true, (size_t)-1), after; i < s->count; i = after) {
        after = next(s, true, i);
        double ready = after == s->count ? s->backward : s->buckets[i].ready;
        there = (there > ready ? there : ready) + reduction(s, net, &s->buckets[i]);
    }
    return there > s->backward ? there - s->backward : 0;
}

vlai_scaling vlai_scaling_model(const vlai_scaling_step *s, const vlai_scaling_net *net)
{
    vlai_scaling out = {.update = s->zero ? s->update / net->ranks : s->update};
    if (net->ranks > 1 && s->overlap) {
        out.forward_wait = s->zero ? wait_for_weights(s, net) : 0;
        out.backward_wait = wait_for_sums(s, net);
    }
    for (size_t i = 0; net->ranks > 1 && !s->overlap && i < s->count; i++)
        out.backward_wait += reduction(s, net, &s->buckets[i]) + (s->zero ? vlai_scaling_collective(net, s->buckets[i].weight, net->gather) : 0);
    if (net->ranks > 1 && s->zero)
        out.norm = 2 * vlai_scaling_collective(net, 0, net->reduce);
    out.exposed = out.forward_wait + out.backward_wait + out.norm;
    out.step = s->forward + s->backward + out.update + out.exposed;
    return out;
}
