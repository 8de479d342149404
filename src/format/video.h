/* Reading video: frames of an mp4 by their ordinal, in any order, as RGB or as the decoder's own planes.
 *
 * A clip is one file: its sample table and codec configuration, immutable once open. A decoder belongs to one thread; it
 * keeps a bounded number of codec contexts open (least recently used goes first) and feeds them from the key frame at or
 * before the wanted one, or from where it stands when that is nearer.
 *
 *     vlai_clip *clip;
 *     vlai_decoder *decoder;
 *     VLA_TRY(vlai_clip_open("file-000.mp4", &clip, err));
 *     VLA_TRY(vlai_decoder_create(32, &decoder, err));
 *     vlai_frame frame;
 *     VLA_TRY(vlai_decoder_read(decoder, clip, ordinal, &frame, err));
 *     VLA_TRY(vlai_decoder_rgb(decoder, &frame, rgb, err));              // frame.width * frame.height * 3 bytes
 *     vlai_decoder_destroy(decoder);
 *     vlai_clip_close(clip);
 *
 * Colour: 4:2:0 limited range is converted by the integer rule of libswscale's x86 code, bit for bit (README of the
 * golden cases); the matrix is BT.601 whatever the stream says, as the reference's reader does. Other formats go
 * through libswscale with its default flags. Writing is in format/video_write.h. Threads: clips may be shared. */
#ifndef VLAI_VIDEO_H
#define VLAI_VIDEO_H

#include "format/mp4.h"

VLA_BEGIN_DECLS

typedef struct vlai_clip vlai_clip;
typedef struct vlai_decoder vlai_decoder;

vla_status vlai_clip_open(const char *path, vlai_clip **out, vla_error *err);
vlai_clip *vlai_clip_share(vlai_clip *clip); /* one more owner */
void vlai_clip_close(vlai_clip *clip);       /* the last owner frees it */

const char *vlai_clip_path(const vlai_clip *clip);
const char *vlai_clip_codec(const vlai_clip *clip); /* "av1", "h264", "hevc", "mpeg4", ...; the four letters when unknown */
int64_t vlai_clip_frames(const vlai_clip *clip);
int vlai_clip_width(const vlai_clip *clip); /* as the container says; the decoded frame wins */
int vlai_clip_height(const vlai_clip *clip);
double vlai_clip_time(const vlai_clip *clip, int64_t ordinal); /* seconds */
double vlai_clip_fps(const vlai_clip *clip);                   /* average; 0 for fewer than two frames */
int64_t vlai_clip_gop(const vlai_clip *clip);                  /* most frames to decode for one */
/* The frame whose time is nearest to `seconds`, -1 for an empty clip. */
int64_t vlai_clip_nearest(const vlai_clip *clip, double seconds);

typedef struct vlai_frame {
    int width, height;
    const uint8_t *planes[3];
    int strides[3];
    const char *pixel_format; /* "yuv420p", ... */
    const char *matrix;       /* tag of the stream: "bt709", "smpte170m", ...; NULL when untagged */
    void *picture;            /* internal */
} vlai_frame;

/* At most `capacity` codec contexts are kept open (0 = 32). */
vla_status vlai_decoder_create(int capacity, vlai_decoder **out, vla_error *err);
void vlai_decoder_destroy(vlai_decoder *decoder);
/* `out` is valid until the decoder's next call. */
vla_status vlai_decoder_read(vlai_decoder *decoder, vlai_clip *clip, int64_t ordinal, vlai_frame *out, vla_error *err);
vla_status vlai_decoder_rgb(vlai_decoder *decoder, const vlai_frame *frame, uint8_t *rgb, vla_error *err);
/* Sends fed and pictures received since creation: what random access costs. */
void vlai_decoder_counts(const vlai_decoder *decoder, int64_t *packets, int64_t *opened);

/* The conversion alone. Strides in bytes; `rgb` without gaps. */
void vlai_yuv420_to_rgb(const uint8_t *const planes[3], const int strides[3], int width, int height, uint8_t *rgb);

VLA_END_DECLS

#endif
