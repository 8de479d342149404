/* The order of launches over lanes that run side by side (streams of a GPU). A launch waits for what it needs: found from
 * the bytes that launches read and write, so that buffers which share memory are as safe as those that share data.
 *
 *     vlai_schedule s = {0};
 *     for each launch, in plan order: vlai_schedule_add(&s, lane, spans, n, &err);
 *     s.waits[i][l] launch of lane l that launch i has to wait for, or -1
 *     s.signals[i]  some launch waits for i
 *
 * Within a lane the order is that of adding. Waits that an earlier one implies are left out. */
#ifndef VLAI_SCHEDULE_H
#define VLAI_SCHEDULE_H

#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

/* The last lane is for collectives alone; they need no scratch. */
enum { VLAI_LANES = 4, VLAI_LANE_COMM = VLAI_LANES - 1 };

typedef struct vlai_span {
    uintptr_t first, end; /* bytes first .. end - 1; an empty span is nothing */
    bool write;
} vlai_span;

typedef struct vlai_schedule_piece vlai_schedule_piece;

typedef struct vlai_schedule {
    int32_t (*waits)[VLAI_LANES];
    bool *signals;
    int8_t *lanes;
    size_t count, capacity_waits, capacity_signals, capacity_lanes;
    vlai_schedule_piece *pieces;            /* bytes by address: who touched them last */
    size_t n_pieces, capacity_pieces;
    int32_t seen[VLAI_LANES][VLAI_LANES];   /* seen[a][b]: the latest launch (from 1) of lane b that lane a has waited for */
} vlai_schedule;

vla_status vlai_schedule_add(vlai_schedule *s, int lane, const vlai_span *spans, int n, vla_error *err);
void vlai_schedule_fini(vlai_schedule *s);

VLA_END_DECLS

#endif
