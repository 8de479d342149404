/* Writing video: pictures in, constant-rate mp4 out, the same bytes each time.
 *
 * Each episode is encoded by an encoder of its own into a segment (its compressed frames); a file is a row of segments of
 * one format. So every episode starts with a key frame whatever the codec library thinks of forced key frames, segments
 * may be encoded on several threads in any order, and the file depends on the order of vlai_video_append alone. Frame k
 * of a file has pts k in 1/fps: nothing drifts. A file is made in memory and written by vlai_video_close, index first.
 *
 *     vlai_video_format format = VLAI_VIDEO_FORMAT_DEFAULT;
 *     format.width = format.height = 256, format.fps = 10;
 *     vlai_encoder_open(&format, &encoder, err);
 *     for (int i = 0; i < frames; i++) vlai_encoder_put(encoder, rgb[i], err);
 *     vlai_encoder_finish(encoder, &segment, err);
 *     vlai_video_create(&format, &video, err);
 *     vlai_video_append(video, &segment, err);
 *     vlai_video_close(video, "file-000.mp4", err);
 *
 * Ownership: segments are the caller's (vlai_segment_fini); appending copies. Threads: one caller per object; different
 * encoders may run at once. Reading is in format/video.h. */
#ifndef VLAI_VIDEO_WRITE_H
#define VLAI_VIDEO_WRITE_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

typedef enum vlai_codec { VLAI_CODEC_AV1, VLAI_CODEC_H264 } vlai_codec;

typedef struct vlai_video_format {
    vlai_codec codec;
    int width, height; /* even, because of 4:2:0; AV1 by SVT takes 64 at least */
    int fps;
    int gop;    /* a key frame every `gop` frames, counted from the start of each segment */
    int crf;    /* quality: 0 best; up to 63 (AV1) or 51 (H.264) */
    int preset; /* SVT-AV1: 0 slowest ... 13 fastest; ignored by the others */
} vlai_video_format;

/* What LeRobot records with: AV1, key frame every second frame, CRF 30, preset 12. */
#define VLAI_VIDEO_FORMAT_DEFAULT {VLAI_CODEC_AV1, 0, 0, 0, 2, 30, 12}

typedef struct vlai_segment {
    uint8_t *data; /* the packets, one after the other */
    size_t size, capacity;
    size_t *ends; /* ends[k]: end of packet k in data */
    bool *keys;   /* keys[k]: packet k can be decoded alone */
    size_t frames, end_capacity, key_capacity;
    uint8_t *header; /* codec configuration record; NULL when the codec carries it in its packets */
    size_t header_size;
} vlai_segment;

typedef struct vlai_encoder vlai_encoder;
typedef struct vlai_video vlai_video;

/* The library that encodes this codec here ("libsvtav1", "libaom-av1", "libx264"), or NULL when there is none. */
const char *vlai_encoder_name(vlai_codec codec);
/* "av1" or "h264": as info.json spells it. */
const char *vlai_codec_name(vlai_codec codec);
/* Everything about a format that can be wrong, checked before work is done. */
vla_status vlai_video_format_check(const vlai_video_format *format, vla_error *err);

vla_status vlai_encoder_open(const vlai_video_format *format, vlai_encoder **out, vla_error *err);
/* rgb: (height, width, 3) uint8, rows without gaps. */
vla_status vlai_encoder_put(vlai_encoder *encoder, const uint8_t *rgb, vla_error *err);
/* Drains and destroys the encoder, also on failure. */
vla_status vlai_encoder_finish(vlai_encoder *encoder, vlai_segment *out, vla_error *err);
void vlai_encoder_destroy(vlai_encoder *encoder);
void vlai_segment_fini(vlai_segment *segment);

vla_status vlai_video_create(const vlai_video_format *format, vlai_video **out, vla_error *err);
vla_status vlai_video_append(vlai_video *video, const vlai_segment *segment, vla_error *err);
int64_t vlai_video_frames(const vlai_video *video);
size_t vlai_video_bytes(const vlai_video *video); /* compressed bytes so far, without the index */
/* Writes the file (synced, not renamed) and destroys the video, also on failure, when no file is left. */
vla_status vlai_video_close(vlai_video *video, const char *path, vla_error *err);
void vlai_video_destroy(vlai_video *video);

VLA_END_DECLS

#endif
