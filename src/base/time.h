#ifndef VLAI_TIME_H
#define VLAI_TIME_H
#include <time.h>
/* Seconds of the monotonic clock. */
static inline double vlai_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#endif
