/* The store of a group's server: values by key, and who waits for a key that is not there yet. One thread. */
#ifndef VLAI_DIST_KEYS_H
#define VLAI_DIST_KEYS_H

#include "vla/error.h"

VLA_BEGIN_DECLS

enum {
    VLAI_KEYS_NAME = 256,         /* bytes of a key with its final zero */
    VLAI_KEYS_MOST = 1 << 16,     /* keys, and calls that wait */
    VLAI_KEYS_BYTES = 256 << 20,  /* of all values together */
};

typedef struct vlai_key {
    uint64_t hash;
    char *name;
    void *data; /* NULL for an empty value */
    size_t size;
} vlai_key;

typedef struct vlai_key_waiter {
    int rank;
    uint32_t id;
    double deadline, limit_s;
    char key[VLAI_KEYS_NAME];
} vlai_key_waiter;

typedef struct vlai_keys {
    vlai_key *list;
    size_t count, capacity, bytes;
    vlai_key_waiter *waiters;
    size_t waiter_count, waiter_capacity;
} vlai_keys;

/* Copies; replaces. VLA_E_INVALID above the limits, VLA_E_NOMEM; the store is then as before. */
vla_status vlai_keys_set(vlai_keys *keys, const char *name, const void *data, size_t size, vla_error *err);
void vlai_keys_forget(vlai_keys *keys, const char *prefix); /* all that begin with it */
const vlai_key *vlai_keys_find(const vlai_keys *keys, const char *name); /* NULL: not set */
vla_status vlai_keys_wait(vlai_keys *keys, const vlai_key_waiter *waiter);
void vlai_keys_drop_waiter(vlai_keys *keys, size_t i); /* the last one takes its place */
void vlai_keys_fini(vlai_keys *keys);

VLA_END_DECLS

#endif
