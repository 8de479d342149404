/* The sample table of the first video track of an mp4 file: where each coded picture lies, when it is shown, whether
 * decoding may start there. Nothing is decoded. With the table at hand any frame is a few preads away.
 *
 *     vlai_mp4 mp4;
 *     VLA_TRY(vlai_mp4_read("videos/cam/chunk-000/file-000.mp4", &mp4, err));
 *     const vlai_mp4_sample *s = &mp4.samples[mp4.shown[ordinal]];       // the ordinal-th picture in time
 *     vlai_mp4_fini(&mp4);
 *
 * Format: ISO/IEC 14496-12. Edit lists are honoured as players do: pictures before the first edit are not shown, times
 * count from it. Fragments (moof) are read as well: then edits only shift times. Files are hostile: every box is bounded by its parent, every table by its
 * box, every sample by the file. Threads: read-only after reading. */
#ifndef VLAI_MP4_H
#define VLAI_MP4_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_mp4_sample {
    uint64_t offset;
    uint32_t size;
    uint32_t key;  /* 1: decoding may start here */
    int64_t pts;   /* ticks of the track, edit list applied */
} vlai_mp4_sample;

typedef struct vlai_mp4 {
    vlai_mp4_sample *samples; /* in decoding order */
    int64_t count;
    int32_t *shown; /* sample numbers in order of pts */
    int64_t shown_count;
    uint32_t timescale; /* ticks a second */
    char codec[5];      /* sample entry: "av01", "avc1", "hvc1", "mp4v", ... */
    int width, height;  /* as the sample entry claims */
    uint8_t *config;    /* decoder configuration as libavcodec takes it in extradata */
    size_t config_size;
    uint64_t file_size;
} vlai_mp4;

/* Errors: NOT_FOUND; FORMAT for empty, Git-LFS pointer, no moov (truncated), samples past the end (truncated); CORRUPT for
 * contradictions. Each names the file. */
vla_status vlai_mp4_read(const char *path, vlai_mp4 *out, vla_error *err);
/* The same from memory: `data` is a whole file; `name` stands in messages. */
vla_status vlai_mp4_parse(const uint8_t *data, size_t size, const char *name, vlai_mp4 *out, vla_error *err);
void vlai_mp4_fini(vlai_mp4 *mp4);

/* What every reader asks first: NULL when the file may be good, else "file-missing", "file-unreadable"
 * (no permission, or no regular file), "file-empty" or "lfs-pointer". */
const char *vlai_file_fault(const char *path);

VLA_END_DECLS

#endif
