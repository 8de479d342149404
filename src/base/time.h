/* The clock that nobody sets: for times that passed, and for waits that end. */
#ifndef VLAI_TIME_H
#define VLAI_TIME_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

/* Seconds of the monotonic clock. */
static inline double vlai_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A condition that is waited for by that clock; 0, or an error number. Ended by pthread_cond_destroy. */
static inline int vlai_cond_init(pthread_cond_t *condition)
{
    pthread_condattr_t monotonic;
    int failed = pthread_condattr_init(&monotonic);
    if (failed)
        return failed;
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    failed = pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return failed;
}

/* Waits for a signal until `deadline`, a time of vlai_now; false when it has passed. Under the lock. */
static inline bool vlai_cond_wait(pthread_cond_t *condition, pthread_mutex_t *lock, double deadline)
{
    struct timespec t = {(time_t)deadline, (long)((deadline - (double)(time_t)deadline) * 1e9)};
    return pthread_cond_timedwait(condition, lock, &t) != ETIMEDOUT;
}

#endif
