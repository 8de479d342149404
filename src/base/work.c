#include "base/work.h"

#include <stdatomic.h>

static atomic_uint_fast64_t done;

void vlai_work_add(void)
{
    atomic_fetch_add_explicit(&done, 1, memory_order_relaxed);
}

uint64_t vlai_work_done(void)
{
    return atomic_load_explicit(&done, memory_order_relaxed);
}
