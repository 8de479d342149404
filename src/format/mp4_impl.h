/* What mp4.c and mp4_fragments.c share: boxes, and what the header says of the track that fragments go on with. */
#ifndef VLAI_MP4_IMPL_H
#define VLAI_MP4_IMPL_H

#include "format/mp4.h"

#include <stddef.h>

VLA_BEGIN_DECLS

/* A box body, or any part of one. */
typedef struct vlai_span {
    const uint8_t *data;
    size_t size;
} vlai_span;

static inline uint32_t vlai_be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline uint64_t vlai_be64(const uint8_t *p)
{
    return (uint64_t)vlai_be32(p) << 32 | vlai_be32(p + 4);
}

/* Takes the next child box off `in`. False at the end or when the box does not fit. */
bool vlai_box_next(vlai_span *in, char type[5], vlai_span *body);
/* The first child of this type. */
bool vlai_box_find(vlai_span in, const char *type, vlai_span *body);

vla_status vlai_mp4_corrupt(const char *name, const char *what, vla_error *err);
vla_status vlai_mp4_past_end(const char *name, int64_t sample, uint64_t offset, uint32_t size, uint64_t file_size, vla_error *err);

typedef struct vlai_mp4_track {
    uint32_t id;
    int64_t start, delay, end; /* of the edit list, ticks of the track */
    bool fragmented;           /* the header announces fragments */
    uint32_t duration, size, flags; /* of a sample of which a fragment says nothing */
    int64_t time;              /* where the next fragment begins when it does not say so */
    uint64_t bytes;            /* of all samples: they share nothing, so that the file bounds their number */
    int64_t room;              /* samples that fit into out->samples */
} vlai_mp4_track;

/* Appends the samples that one moof box holds for the track. `moof`: its body; `at`: where the box begins in the file. */
vla_status vlai_mp4_fragment(vlai_span moof, uint64_t at, vlai_mp4_track *track, const char *name, vlai_mp4 *out,
                             vla_error *err);

VLA_END_DECLS

#endif
