/* The store's inside, shared with the executor and the update. */
#ifndef VLAI_STORE_H
#define VLAI_STORE_H

#include "base/memory.h"
#include "vla/run.h"

#include <stdbool.h>

typedef struct vlai_param {
    const char *name;
    vla_dtype symbolic; /* VLA_COMPUTE or VLA_PRECISE */
    int rank;
    int64_t shape[8], elements; /* of the checkpoint */
    int64_t run, pitch, stored; /* in memory: runs of `run` elements, `pitch` apart, `stored` in all; zeros between */
    int group;
    vla_dtype dtype[VLA_STORE_KINDS]; /* VLA_DTYPE_NONE: not kept */
    size_t offset[VLA_STORE_KINDS];
    int32_t bucket;       /* of a sharded store, else -1; also -1 where there are no elements */
    int64_t position;     /* in its class, see exec/shard.h */
    int64_t first, count; /* stored elements that this rank steps: 0 and all unless the optimizer's state is sharded */
} vlai_param;

struct vla_store {
    vlai_param *params;
    size_t count, capacity;
    int32_t *table; /* open addressing by name; table_size a power of two */
    size_t table_size;
    vlai_arena names;
    vla_numerics numerics;
    vla_store_use use;
    void *arena[VLA_STORE_KINDS];
    size_t bytes[VLA_STORE_KINDS];
    vla_executor *executor; /* of the second home, or NULL */
    void *device[VLA_STORE_KINDS];
    int rank, world; /* world 0 or 1: the store is whole */
    bool zero;       /* M, V and LOW keep slices */
    size_t bucket_bytes;
    struct vlai_store_bucket *buckets;
    int32_t *members; /* of all buckets */
    size_t n_buckets;
    size_t base[VLA_STORE_KINDS][2]; /* bytes at which the classes begin: VLA_COMPUTE, VLA_PRECISE */
};

/* Where element e of the checkpoint's order stands. */
static inline int64_t vlai_param_at(const vlai_param *p, int64_t e)
{
    return p->run == p->pitch ? e : e / p->run * p->pitch + e % p->run;
}
/* How many of the n elements from `first` on lie side by side. */
static inline int64_t vlai_param_span(const vlai_param *p, int64_t first, int64_t n)
{
    int64_t left = p->run == p->pitch ? n : p->run - first % p->run;
    return n < left ? n : left;
}

/* The most elements of memory that n neighbours of the checkpoint can span. */
static inline int64_t vlai_param_range(const vlai_param *p, int64_t n)
{
    return p->run == p->pitch ? n : n + ((n - 1) / p->run + 1) * (p->pitch - p->run);
}
/* Elements first..first+n-1 of `size` bytes between memory (`range`: where element `first` stands) and their plain order
 * (`packed`). pack: from memory; otherwise into it, and what lies between is left alone. */
void vlai_param_copy(const vlai_param *p, size_t size, int64_t first, int64_t n, void *range, void *packed, int pack);

/* Any kind that is kept in host memory, as float; a weight without its master's low bits. */
void vlai_store_floats(const vla_store *store, vla_store_kind kind, size_t index, int64_t first, int64_t n, float *out);
/* FNV-1a. The same name has the same hash everywhere: it is also the key of stochastic rounding. */
uint64_t vlai_hash_name(const char *name);
/* Types and offsets without memory, for plans of runs that will not be started (exec/shard.c). */
vla_status vlai_store_lay_out(vla_store *store, vla_numerics numerics, vla_store_use use, vla_error *err);

#endif
