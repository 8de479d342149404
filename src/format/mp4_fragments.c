/* Fragments of an mp4 file (ISO/IEC 14496-12, 8.8): each moof box lists the samples of the mdat behind it, in runs whose
 * times and places go on where the run before ended. A recorder that may be stopped at any moment writes such files. */
#include "format/mp4_impl.h"

#include "base/fail.h"
#include "base/memory.h"

#include <string.h>

enum { TFHD_BASE = 0x1, TFHD_DESCRIPTION = 0x2, TFHD_DURATION = 0x8, TFHD_SIZE = 0x10, TFHD_FLAGS = 0x20,
       TFHD_EMPTY = 0x10000, TFHD_BASE_IS_MOOF = 0x20000 };
enum { TRUN_OFFSET = 0x1, TRUN_FIRST_FLAGS = 0x4, TRUN_DURATION = 0x100, TRUN_SIZE = 0x200, TRUN_FLAGS = 0x400,
       TRUN_SHIFT = 0x800 };
/* Of a sample: it is no sync sample, it depends on others. Either keeps decoding from starting there. */
enum { NOT_SYNC = 0x10000, DEPENDS = 0x1000000 };

/* The next number of a box of optional numbers. */
static bool take(vlai_span *in, uint32_t *out)
{
    if (in->size < 4)
        return false;
    *out = vlai_be32(in->data);
    in->data += 4, in->size -= 4;
    return true;
}

static bool take_wide(vlai_span *in, uint64_t *out)
{
    uint32_t high, low;
    if (!take(in, &high) || !take(in, &low))
        return false;
    *out = (uint64_t)high << 32 | low;
    return true;
}

static vla_status make_room(vlai_mp4 *out, uint32_t more, vlai_mp4_track *track, const char *name, vla_error *err)
{
    if (more > (uint64_t)(INT32_MAX - out->count))
        return vlai_mp4_corrupt(name, "too many samples", err);
    int64_t wanted = out->count + more;
    if (wanted <= track->room)
        return VLA_OK;
    wanted += wanted / 2;
    vlai_mp4_sample *grown =
        vlai_grow(out->samples, (size_t)track->room * sizeof *grown, (size_t)wanted * sizeof *grown);
    if (!grown)
        return vlai_nomem(err, (size_t)wanted * sizeof *grown);
    out->samples = grown;
    track->room = wanted;
    return VLA_OK;
}

/* What a traf says once for its runs. */
typedef struct fragment {
    uint64_t base, offset; /* what offsets count from; where the next run begins when it does not say so */
    uint32_t duration, size, flags;
} fragment;

static vla_status read_run(vlai_span trun, fragment *f, vlai_mp4_track *track, const char *name, vlai_mp4 *out, vla_error *err)
{
    uint32_t head, count, word, first_flags = f->flags;
    if (!take(&trun, &head) || !take(&trun, &count))
        return vlai_mp4_corrupt(name, "run of samples (trun) too short", err);
    if (head & TRUN_OFFSET) {
        if (!take(&trun, &word))
            return vlai_mp4_corrupt(name, "run of samples (trun) too short", err);
        f->offset = f->base + (uint64_t)(int64_t)(int32_t)word;
    }
    if ((head & TRUN_FIRST_FLAGS) && !take(&trun, &first_flags))
        return vlai_mp4_corrupt(name, "run of samples (trun) too short", err);
    size_t entry = 0;
    for (uint32_t bit = TRUN_DURATION; bit <= TRUN_SHIFT; bit <<= 1)
        entry += head & bit ? 4 : 0;
    if (entry ? trun.size / entry < count : count && (f->size == 0 || count > out->file_size / f->size))
        return vlai_mp4_corrupt(name, "a run (trun) of more samples than the file can hold", err);
    VLA_TRY(make_room(out, count, track, name, err));
    for (uint32_t i = 0; i < count; i++) {
        uint32_t duration = f->duration, size = f->size, shift = 0,
                 flags = i == 0 && (head & TRUN_FIRST_FLAGS) ? first_flags : f->flags;
        if (head & TRUN_DURATION)
            take(&trun, &duration);
        if (head & TRUN_SIZE)
            take(&trun, &size);
        if (head & TRUN_FLAGS)
            take(&trun, &flags);
        if (head & TRUN_SHIFT) /* without a sign in version 0, but no writer shifts by 2^31 ticks */
            take(&trun, &shift);
        if (f->offset > out->file_size || size > out->file_size - f->offset)
            return vlai_mp4_past_end(name, out->count, f->offset, size, out->file_size, err);
        if ((track->bytes += size) > out->file_size)
            return vlai_mp4_corrupt(name, "samples of fragments lie over each other", err);
        if (track->time > INT64_MAX / 4)
            return vlai_mp4_corrupt(name, "times of fragments too large", err);
        out->samples[out->count++] = (vlai_mp4_sample){.offset = f->offset,
                                                       .size = size,
                                                       .key = !(flags & (NOT_SYNC | DEPENDS)),
                                                       .pts = track->time + (int32_t)shift};
        f->offset += size;
        track->time += duration;
    }
    return VLA_OK;
}

/* `f` comes with where a fragment begins that does not say so, which is unknown behind one of another track (`behind`); it
 * takes what the header says. False: of another track. */
static bool read_head(vlai_span tfhd, uint64_t at, bool behind, const vlai_mp4_track *track, fragment *f, bool *damaged)
{
    uint32_t head, id, word;
    *damaged = !take(&tfhd, &head) || !take(&tfhd, &id);
    if (*damaged || id != track->id || (head & TFHD_EMPTY))
        return false;
    f->duration = track->duration, f->size = track->size, f->flags = track->flags;
    if (head & TFHD_BASE_IS_MOOF)
        f->base = at;
    *damaged = (behind && !(head & (TFHD_BASE | TFHD_BASE_IS_MOOF))) || ((head & TFHD_BASE) && !take_wide(&tfhd, &f->base)) || ((head & TFHD_DESCRIPTION) && !take(&tfhd, &word)) ||
               ((head & TFHD_DURATION) && !take(&tfhd, &f->duration)) || ((head & TFHD_SIZE) && !take(&tfhd, &f->size)) ||
               ((head & TFHD_FLAGS) && !take(&tfhd, &f->flags));
    f->offset = f->base;
    return !*damaged;
}

vla_status vlai_mp4_fragment(vlai_span moof, uint64_t at, vlai_mp4_track *track, const char *name, vlai_mp4 *out,
                             vla_error *err)
{
    fragment f = {.base = at, .offset = at};
    vlai_span traf, box;
    char type[5];
    bool behind = false;
    while (vlai_box_next(&moof, type, &traf)) {
        if (strcmp(type, "traf"))
            continue;
        bool damaged = !vlai_box_find(traf, "tfhd", &box);
        bool ours = !damaged && read_head(box, at, behind, track, &f, &damaged);
        if (damaged)
            return vlai_mp4_corrupt(name, "header of a fragment (tfhd)", err);
        behind = !ours;
        if (!ours)
            continue;
        if (vlai_box_find(traf, "tfdt", &box)) {
            bool wide = box.size >= 12 && box.data[0] == 1;
            uint64_t time = wide ? vlai_be64(box.data + 4) : box.size >= 8 ? vlai_be32(box.data + 4) : UINT64_MAX;
            if (time > INT64_MAX / 4)
                return vlai_mp4_corrupt(name, "time of a fragment (tfdt)", err);
            track->time = (int64_t)time;
        }
        while (vlai_box_next(&traf, type, &box))
            if (!strcmp(type, "trun"))
                VLA_TRY(read_run(box, &f, track, name, out, err));
        f.base = f.offset; /* of the track's next part in this fragment, where that does not say so */
    }
    return VLA_OK;
}
