/* Values into a store and out of it, in parallel, wherever the store lives: tiles of each tensor are made by the threads of a pool and go
 * straight into host memory, or through pinned staging to the device while the next ones are made.
 *
 *     static vla_status draw(void *user, const vlai_fill_tile *t, float *values, const void **raw, vla_error *err);
 *     VLA_TRY(vlai_store_fill(store, VLA_STORE_WEIGHT, pool, draw, &mine, err));
 *
 * Tiles follow from the tensors alone, so that bits do not depend on the number of threads. */
#ifndef VLAI_FILL_H
#define VLAI_FILL_H

#include "base/pool.h"
#include "vla/run.h"

VLA_BEGIN_DECLS

typedef struct vlai_fill_tile {
    size_t index;     /* of the tensor in the store */
    vla_dtype dtype;  /* stored type */
    int64_t first, n; /* elements */
    void *room;       /* n elements of the stored type, for who has to put raw ones together */
} vlai_fill_tile;

/* Gives the tile's values: as `values` (n of them), rounded to the stored type as vla_store_set_float does; or as n elements
 * of the stored type at *raw, which are copied bit for bit; or, with *raw = vlai_fill_none, nothing: the tile stays as it
 * is. Called from several threads at once. */
typedef vla_status (*vlai_fill_fn)(void *user, const vlai_fill_tile *tile, float *values, const void **raw, vla_error *err);

extern const char vlai_fill_none[];

/* Fills every tensor of the kind that the store keeps, of a sharded kind this rank's slices alone. Weights with fp32 masters get them from `values`, and zero low bits
 * with raw ones. pool: NULL = this thread. The error is that of the first tile in order. */
vla_status vlai_store_fill(vla_store *store, vla_store_kind kind, vlai_pool *pool, vlai_fill_fn fn, void *user, vla_error *err);

/* Copies all bytes of a kind, as they lie in the store's arena (store->bytes[kind] of them), to host memory; out of stores that live where
 * the first one does, which need not outlive it. */
typedef struct vlai_fetch vlai_fetch;
vla_status vlai_fetch_create(const vla_store *store, int threads, vlai_fetch **out, vla_error *err);
vla_status vlai_fetch_kind(vlai_fetch *fetch, const vla_store *store, vla_store_kind kind, void *out, vla_error *err);
void vlai_fetch_destroy(vlai_fetch *fetch); /* accepts NULL */

/* Memory that the device reads without a copy of its own, where the store lives on one; plain memory otherwise. */
void *vlai_staging_alloc(const vla_store *store, size_t bytes);
void vlai_staging_free(const vla_store *store, void *memory);

VLA_END_DECLS

#endif
