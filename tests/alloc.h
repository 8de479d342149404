/* An allocator whose Nth allocation fails.
 *
 *     vla_status status = VLA_E_NOMEM;
 *     for (uint64_t n = 1; status != VLA_OK; n++) {
 *         failing_allocation(n);
 *         status = call_under_test(...);
 *         failing_allocation(0);               // back to the default
 *     }
 *
 * Objects made while it is on must be released while it is on: put both into the call, or keep it on between calls by a count that
 * nothing reaches, failing_allocation(UINT64_MAX). */
#ifndef VLA_TEST_ALLOC_H
#define VLA_TEST_ALLOC_H

#include "vla/memory.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

static _Atomic uint64_t alloc_count; /* of all threads */
static uint64_t alloc_fails_at;

static void *alloc_or_fail(size_t size, size_t align, void *user)
{
    (void)user;
    if (atomic_fetch_add(&alloc_count, 1) + 1 == alloc_fails_at)
        return NULL;
    void *p = NULL;
    return posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size ? size : 1) == 0 ? p : NULL;
}

static void alloc_release(void *p, void *user)
{
    (void)user;
    free(p);
}

static inline void failing_allocation(uint64_t nth)
{
    static const vla_allocator failing = {alloc_or_fail, alloc_release, NULL};
    alloc_count = 0;
    alloc_fails_at = nth;
    vla_allocator_set(nth ? &failing : NULL);
}

/* Whether the call that was to fail has come. */
static inline bool alloc_reached(void)
{
    return alloc_count >= alloc_fails_at;
}

#endif
