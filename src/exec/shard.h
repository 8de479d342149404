/* How a store is sharded over ranks: flat positions, gradient buckets, slices.
 *
 * Parameters of one symbolic type are a class. A class is a row of positions, one per element, in checkpoint order; every
 * tensor begins at a multiple of VLAI_SHARD_ALIGN. All kinds of a class use the same positions, so that a range of them is
 * one piece of memory of each kind. A bucket is such a range, cut at tensors and as large as options.bucket_bytes allows; its
 * length is a multiple of VLAI_SHARD_ALIGN * world, and rank r owns the r-th part of it, its shard. The slice of a parameter
 * is what lies in the shard of this rank: vlai_param.first and .count. With `zero` the optimizer's kinds keep the shards
 * alone, one behind the other. */
#ifndef VLAI_SHARD_H
#define VLAI_SHARD_H

#include "exec/store.h"

enum { VLAI_SHARD_ALIGN = 128 };

typedef struct vlai_store_bucket {
    vla_dtype symbolic;      /* of the class */
    int64_t first, length;   /* positions */
    int64_t shard;           /* where its shard stands among the shards of the class */
    const int32_t *members;  /* parameters, in checkpoint order */
    size_t count;
} vlai_store_bucket;

static inline bool vlai_store_is_sharded(const vla_store *store)
{
    return store->world > 1;
}

/* Kinds of which a rank keeps its slices. */
static inline bool vlai_kind_is_sliced(const vla_store *store, vla_store_kind kind)
{
    return store->world > 1 && store->zero && kind != VLA_STORE_WEIGHT && kind != VLA_STORE_GRADIENT;
}

/* Elements of memory that a kind keeps of a parameter, and the stored element that the first of them is. */
static inline int64_t vlai_param_kept(const vlai_param *p, vla_store_kind kind)
{
    return kind == VLA_STORE_WEIGHT || kind == VLA_STORE_GRADIENT ? p->stored : p->count;
}
static inline int64_t vlai_param_origin(const vlai_param *p, vla_store_kind kind)
{
    return kind == VLA_STORE_WEIGHT || kind == VLA_STORE_GRADIENT ? 0 : p->first;
}

/* Bytes into the arena of WEIGHT or GRADIENT at which the bucket begins, and its elements' type there. */
size_t vlai_store_bucket_offset(const vla_store *store, vla_store_kind kind, const vlai_store_bucket *bucket);
vla_dtype vlai_store_bucket_dtype(const vla_store *store, vla_store_kind kind, const vlai_store_bucket *bucket);

/* Rank 0 of several logs how many buckets there are, and how large. */
void vlai_store_tell(const vla_store *store);

#endif
