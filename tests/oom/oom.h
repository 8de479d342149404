/* Makes the Nth allocation fail, for N = 1, 2, 3 ... until an attempt meets none: each attempt must end in an error of its
 * own or succeed, and must give back every block that it took.
 *
 *     static vla_status open_it(void *user, vla_error *err) { ... }
 *     oom_every("tokenizer", open_it, NULL);
 *
 * The short form takes so many N, spread over all of them; the long form ($VLA_LONG) takes every N. What jansson, Arrow and
 * the codecs allocate for themselves is not among them: jansson 2.14 writes past its buffer when growing it fails. An
 * attempt must do the same work each time. */
#ifndef OOM_H
#define OOM_H

#include "test.h"

#include "base/memory.h"
#include "vla/log.h"
#include "vla/memory.h"

#include <stdatomic.h>

static atomic_long oom_countdown; /* the allocation that brings it to 0 fails */
static atomic_long oom_taken;     /* allocations so far */
static atomic_long oom_live;      /* blocks that are held */

static inline void *oom_alloc(size_t size, size_t align, void *user)
{
    (void)user;
    atomic_fetch_add(&oom_taken, 1);
    if (atomic_fetch_sub(&oom_countdown, 1) == 1)
        return NULL;
    void *block = align <= 16 ? malloc(size) : aligned_alloc(align, (size + align - 1) & ~(align - 1));
    if (block)
        atomic_fetch_add(&oom_live, 1);
    return block;
}

static inline void oom_release(void *block, void *user)
{
    (void)user;
    if (block)
        atomic_fetch_sub(&oom_live, 1);
    free(block);
}

static inline int oom_set_up(void **state)
{
    static const vla_allocator failing = {oom_alloc, oom_release, NULL};
    (void)state;
    vla_allocator_set(&failing);
    vla_log_set(NULL, NULL, VLA_LOG_ERROR);
    return 0;
}

typedef vla_status (*oom_attempt)(void *user, vla_error *err);

/* `most`: attempts of the short form; a sanitized build takes a fifth of them. */
static inline void oom_every(const char *what, long most, oom_attempt attempt, void *user)
{
    vla_error err = VLA_ERROR_INIT;
    atomic_store(&oom_countdown, 0);
    assert_ok(attempt(user, &err), err); /* what is made once per process (locale, seeds, codecs) is made here */
    long live = atomic_load(&oom_live);
    atomic_store(&oom_taken, 0);
    assert_ok(attempt(user, &err), err);
    long all = atomic_load(&oom_taken), failures = 0, attempts = 0;
    if (test_sanitized())
        most = most / 5 + 1;
    long stride = test_long() || all <= most ? 1 : (all + most - 1) / most;
    for (long n = 1;; n += stride, attempts++) {
        err = (vla_error)VLA_ERROR_INIT;
        atomic_store(&oom_countdown, n);
        vla_status status = attempt(user, &err);
        int reached = atomic_load(&oom_countdown) <= 0;
        atomic_store(&oom_countdown, 0);
        if (atomic_load(&oom_live) != live)
            fail_msg("%s: allocation %ld of %ld fails: %ld blocks are lost (%s)", what, n, all,
                     atomic_load(&oom_live) - live, err.message);
        if (status != VLA_OK && (err.status != status || !err.message[0]))
            fail_msg("%s: allocation %ld of %ld fails: status %s, but the error says %s '%s'", what, n, all,
                     vla_status_name(status), vla_status_name(err.status), err.message);
        failures += status != VLA_OK;
        if (!reached) {
            if (status != VLA_OK)
                fail_msg("%s: no allocation failed, and yet: %s", what, err.message);
            break;
        }
    }
    print_message("%s: %ld allocations, every %ld. failed in turn: %ld errors in %ld attempts\n", what, all, stride, failures, attempts);
    assert_true(failures > 0);
}

#endif
