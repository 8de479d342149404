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
    int64_t shape[8], elements;
    int group;
    vla_dtype dtype[VLA_STORE_KINDS]; /* VLA_DTYPE_NONE: not kept */
    size_t offset[VLA_STORE_KINDS];
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
};

/* FNV-1a. The same name has the same hash everywhere: it is also the key of stochastic rounding. */
uint64_t vlai_hash_name(const char *name);
/* Types and offsets without memory, for plans of runs that will not be started. */
void vlai_store_lay_out(vla_store *store, vla_numerics numerics, vla_store_use use);

#endif
