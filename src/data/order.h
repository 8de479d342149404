/* Which sample comes when: the reference's frame split, per-epoch shuffle and rank stripes, as functions of (seed, epoch).
 *
 *     vlai_order *order;
 *     VLA_TRY(vlai_order_create(rows, n, seed, true, &order, err));
 *     VLA_TRY(vlai_order_at(order, epoch, position, &row, err));    // any epoch, any position, in any sequence
 *     vlai_order_destroy(order);
 *
 * The permutation is torch.randperm's (MT19937, one draw per place) with seed + epoch. The two newest epochs are kept, so
 * that workers running ahead over an epoch's end do not make it twice. Threads: vlai_order_at may be called from any. */
#ifndef VLAI_ORDER_H
#define VLAI_ORDER_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_mt19937 {
    uint32_t state[624];
    int next;
} vlai_mt19937;

void vlai_mt19937_seed(vlai_mt19937 *mt, uint32_t seed);
uint32_t vlai_mt19937_next(vlai_mt19937 *mt);

/* torch.randperm(n) of a generator seeded with `seed`. n is below 2^32 / 20: larger ones take another algorithm there. */
vla_status vlai_randperm(int64_t n, uint64_t seed, int64_t *out, vla_error *err);

/* The frame split of the reference: rows 0..n-1 permuted; the first *train of them train, the rest validate (0.95 : 0.05,
 * remainder to train first). `out` holds n. */
vla_status vlai_order_split(int64_t n, uint64_t seed, int64_t *out, int64_t *train, vla_error *err);

/* Samples that each of `world` ranks sees per epoch: shuffled and dropped (train), or padded by repetition (validation). */
int64_t vlai_order_per_rank(int64_t n, int64_t world, bool drop);
/* Place in the epoch's order of the i-th sample of a rank. */
int64_t vlai_order_place(int64_t i, int64_t rank, int64_t world);

typedef struct vlai_order vlai_order;

/* `rows`: what positions stand for (copied), or NULL for 0..n-1. Without `shuffle` each epoch is in the given order. */
vla_status vlai_order_create(const int64_t *rows, int64_t n, uint64_t seed, bool shuffle, vlai_order **out, vla_error *err);
void vlai_order_destroy(vlai_order *order);
int64_t vlai_order_count(const vlai_order *order);
/* Positions wrap round at the end of the epoch's order, as the reference pads validation. */
vla_status vlai_order_at(vlai_order *order, int64_t epoch, int64_t position, int64_t *row, vla_error *err);

VLA_END_DECLS

#endif
