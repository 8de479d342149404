#include "exec/schedule.h"

#include "base/fail.h"
#include "base/memory.h"

#include <string.h>

/* Bytes with one history. Launches are named from 1, 0: none. */
struct vlai_schedule_piece {
    uintptr_t first, end;
    int32_t written[VLAI_LANES], read[VLAI_LANES];
};

static vla_status insert(vlai_schedule *s, size_t at, vlai_schedule_piece piece, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&s->pieces, &s->capacity_pieces, s->n_pieces, sizeof *s->pieces, err));
    memmove(&s->pieces[at + 1], &s->pieces[at], (s->n_pieces - at) * sizeof *s->pieces);
    s->pieces[at] = piece;
    s->n_pieces++;
    return VLA_OK;
}

/* The first piece that ends behind `address`. */
static size_t find(const vlai_schedule *s, uintptr_t address)
{
    size_t low = 0, high = s->n_pieces;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (s->pieces[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Cuts the piece around `address` in two, so that one begins there. */
static vla_status cut(vlai_schedule *s, uintptr_t address, vla_error *err)
{
    size_t at = find(s, address);
    if (at == s->n_pieces || s->pieces[at].first >= address)
        return VLA_OK;
    vlai_schedule_piece left = s->pieces[at];
    left.end = address;
    s->pieces[at].first = address;
    return insert(s, at, left, err);
}

/* Pieces that cover the span exactly, made where there were none; -> the first of them. */
static vla_status cover(vlai_schedule *s, const vlai_span *span, size_t *first, vla_error *err)
{
    VLA_TRY(cut(s, span->first, err));
    VLA_TRY(cut(s, span->end, err));
    *first = find(s, span->first);
    uintptr_t at = span->first;
    for (size_t i = *first; at < span->end; i++) {
        if (i == s->n_pieces || s->pieces[i].first > at) {
            uintptr_t end = i == s->n_pieces || s->pieces[i].first > span->end ? span->end : s->pieces[i].first;
            VLA_TRY(insert(s, i, (vlai_schedule_piece){.first = at, .end = end}, err));
        }
        at = s->pieces[i].end;
    }
    return VLA_OK;
}

static int32_t later(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

vla_status vlai_schedule_add(vlai_schedule *s, int lane, const vlai_span *spans, int n, vla_error *err)
{
    int32_t name = (int32_t)s->count + 1, wait[VLAI_LANES] = {0};
    VLA_TRY(vlai_reserve((void **)&s->waits, &s->capacity_waits, s->count, sizeof *s->waits, err));
    VLA_TRY(vlai_reserve((void **)&s->signals, &s->capacity_signals, s->count, sizeof *s->signals, err));
    VLA_TRY(vlai_reserve((void **)&s->lanes, &s->capacity_lanes, s->count, sizeof *s->lanes, err));
    for (int i = 0; i < n; i++) {
        size_t at;
        if (spans[i].first >= spans[i].end)
            continue;
        VLA_TRY(cover(s, &spans[i], &at, err));
        for (; at < s->n_pieces && s->pieces[at].first < spans[i].end; at++) {
            vlai_schedule_piece *p = &s->pieces[at];
            for (int l = 0; l < VLAI_LANES; l++) {
                wait[l] = later(wait[l], p->written[l]);
                if (spans[i].write)
                    wait[l] = later(wait[l], p->read[l]);
            }
            *(spans[i].write ? &p->written[lane] : &p->read[lane]) = name;
        }
    }
    for (int l = 0; l < VLAI_LANES; l++) {
        bool needed = l != lane && wait[l] > s->seen[lane][l];
        if (needed) {
            s->seen[lane][l] = wait[l];
            s->signals[wait[l] - 1] = true;
        }
        s->waits[s->count][l] = needed ? wait[l] - 1 : -1;
    }
    s->signals[s->count] = false;
    s->lanes[s->count] = (int8_t)lane;
    s->count++;
    return VLA_OK;
}

void vlai_schedule_fini(vlai_schedule *s)
{
    vlai_free(s->waits);
    vlai_free(s->signals);
    vlai_free(s->lanes);
    vlai_free(s->pieces);
    *s = (vlai_schedule){0};
}
