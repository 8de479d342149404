#include "exec/touched.h"

#include "base/fail.h"
#include "base/memory.h"
#include "exec/plan.h"

#include <stdlib.h>

enum { PAGE = 4096 };

typedef struct vlai_touched_span span;

vla_status vlai_touched_add(vlai_touched *t, const vla_plan *plan, vla_error *err)
{
    for (size_t v = 0; v < plan->memory.n_values; v++) {
        const vlai_value_info *info = vlai_value(plan->graph, (vla_value)v);
        size_t bytes = (size_t)info->elements * vla_dtype_size(info->dtype);
        if (plan->memory.offset[v] < 0 || !bytes)
            continue;
        VLA_TRY(vlai_reserve((void **)&t->spans, &t->capacity, t->count, sizeof *t->spans, err));
        size_t first = (size_t)plan->memory.offset[v];
        t->spans[t->count++] = (span){first / PAGE, (first + bytes + PAGE - 1) / PAGE};
    }
    return VLA_OK;
}

static int by_first(const void *a, const void *b)
{
    size_t x = ((const span *)a)->first, y = ((const span *)b)->first;
    return (x > y) - (x < y);
}

size_t vlai_touched_bytes(vlai_touched *t)
{
    size_t pages = 0, reached = 0;
    if (t->count)
        qsort(t->spans, t->count, sizeof *t->spans, by_first);
    for (size_t i = 0; i < t->count; i++) {
        size_t first = t->spans[i].first > reached ? t->spans[i].first : reached;
        if (t->spans[i].end > first) {
            pages += t->spans[i].end - first;
            reached = t->spans[i].end;
        }
    }
    return pages * PAGE;
}

void vlai_touched_fini(vlai_touched *t)
{
    vlai_free(t->spans);
    *t = (vlai_touched){0};
}
