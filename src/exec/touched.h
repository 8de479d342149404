/* Pages of a host's arena that plans use. The arena is reserved as a whole, but the system gives no memory for pages that no value lies
 * on: there are such where values of several lifetimes leave gaps.
 *
 *     vlai_touched t = {0};
 *     VLA_TRY(vlai_touched_add(&t, plan, err));   // each plan that shares the arena
 *     size_t bytes = vlai_touched_bytes(&t);
 *     vlai_touched_fini(&t); */
#ifndef VLAI_TOUCHED_H
#define VLAI_TOUCHED_H

#include "vla/run.h"

VLA_BEGIN_DECLS

typedef struct vlai_touched {
    struct vlai_touched_span {
        size_t first, end; /* in pages */
    } *spans;
    size_t count, capacity;
} vlai_touched;

vla_status vlai_touched_add(vlai_touched *touched, const vla_plan *plan, vla_error *err);
size_t vlai_touched_bytes(vlai_touched *touched);
void vlai_touched_fini(vlai_touched *touched); /* empty and usable again */

VLA_END_DECLS

#endif
