/* Writes a LeRobot dataset, v2.0, v2.1 or v3.0, episode by episode.
 *
 *     vlai_set_writer_open("set.tmp", &layout, pool, &writer, err);
 *     for each episode: vlai_set_writer_add(writer, &episode, err);
 *     vlai_set_writer_close(writer, err);     last of all, it writes meta/info.json
 *
 * v3.0: many episodes a file, one row group per episode, files rolled over by size; v2.x: a Parquet file and one mp4 per
 * camera for each episode. Frame times are exact multiples of 1/fps, `from_timestamp` counts frames of the file. An
 * episode has one task. Statistics are true numbers: what LeRobot's recorders approximate is computed exactly here.
 *
 * The folder is the caller's: make it under a temporary name and rename it when closed. After an error only
 * vlai_set_writer_destroy may be called.
 * Ownership: the layout and what it points to must outlive the writer; episodes are borrowed for the call.
 * Threads: one caller. The format is described by huggingface/lerobot, src/lerobot/datasets. */
#ifndef VLAI_SET_WRITE_H
#define VLAI_SET_WRITE_H

#include "base/pool.h"
#include "data/exact_stats.h"
#include "format/parquet.h"
#include "format/video_write.h"

VLA_BEGIN_DECLS

typedef enum vlai_set_version { VLAI_SET_V20, VLAI_SET_V21, VLAI_SET_V30, VLAI_SET_VERSIONS } vlai_set_version;
extern const char *const vlai_set_version_names[VLAI_SET_VERSIONS]; /* "v2.0" ... */

typedef struct vlai_set_vector { /* a float32 feature */
    const char *key;
    int dims;
    const char *const *names; /* dims */
} vlai_set_vector;

typedef struct vlai_set_camera {
    const char *key;
    bool video;              /* else PNG in the Parquet rows */
    vlai_video_format format; /* of images: width and height only */
} vlai_set_camera;

typedef struct vlai_set_layout {
    vlai_set_version version;
    const char *robot;
    int fps;
    const vlai_set_vector *vectors;
    int vector_count;
    const vlai_set_camera *cameras;
    int camera_count;
    int64_t chunks_size;    /* v3.0: files per chunk folder; v2.x: episodes */
    double data_mb, video_mb; /* v3.0: a file that would grow past this is ended */
} vlai_set_layout;

typedef struct vlai_set_view { /* one camera's part of an episode */
    vlai_segment segment;       /* video */
    vlai_parquet_bytes *images; /* images: one cell per frame */
    uint64_t histogram[VLAI_HISTOGRAM];
    uint64_t frames; /* that the histogram counts */
} vlai_set_view;

typedef struct vlai_set_episode {
    int64_t length;
    const char *task;
    const float *const *vectors; /* [vector]: length x dims */
    const vlai_set_view *views;  /* [camera] */
} vlai_set_episode;

typedef struct vlai_set_writer vlai_set_writer;

vla_status vlai_set_writer_open(const char *dir, const vlai_set_layout *layout, vlai_pool *pool, vlai_set_writer **out,
                                vla_error *err);
vla_status vlai_set_writer_add(vlai_set_writer *writer, const vlai_set_episode *episode, vla_error *err);
/* Ends all files; destroys the writer, also on failure. */
vla_status vlai_set_writer_close(vlai_set_writer *writer, vla_error *err);
void vlai_set_writer_destroy(vlai_set_writer *writer);

VLA_END_DECLS

#endif
