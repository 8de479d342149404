/* Host memory. Every host allocation of the library goes through one replaceable allocator: the seam for embedding, for
 * accounting, and for tests that make the Nth allocation fail.
 *
 * Set it before any other call; it must not change while objects of the library are alive. Threads: an allocator must be
 * callable from any thread. */
#ifndef VLA_MEMORY_H
#define VLA_MEMORY_H

#include "vla/api.h"

typedef struct vla_allocator {
    void *(*alloc)(size_t size, size_t align, void *user); /* NULL on failure; align is a power of two */
    void (*release)(void *ptr, void *user);                /* accepts NULL */
    void *user;
} vla_allocator;

typedef struct vla_memory_stats {
    uint64_t allocations; /* calls since the process started */
    uint64_t releases;
} vla_memory_stats;

VLA_BEGIN_DECLS

/* NULL restores the default (malloc). The struct is copied. */
VLA_API void vla_allocator_set(const vla_allocator *allocator);
VLA_API vla_memory_stats vla_memory_stats_get(void);

VLA_END_DECLS

#endif
