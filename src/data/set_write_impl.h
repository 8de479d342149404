/* Shared by set_write.c (rows and pictures) and set_meta.c (everything under meta/). */
#ifndef VLAI_SET_WRITE_IMPL_H
#define VLAI_SET_WRITE_IMPL_H

#include "base/io.h"
#include "data/set_write.h"

enum { SET_PATH = 4096, EPISODES_PER_GROUP = 10 };

typedef enum feature_kind { VECTOR, CAMERA, TIMESTAMP, FRAME_INDEX, EPISODE_INDEX, INDEX, TASK_INDEX } feature_kind;

typedef struct feature {
    feature_kind kind;
    int which; /* vector or camera */
    const char *key;
    int dims; /* 3 for cameras */
    double *kept; /* rows of this episode, after those of the episodes before when global statistics are wanted */
    size_t capacity; /* bytes */
    uint64_t histogram[VLAI_HISTOGRAM]; /* cameras: all episodes */
    uint64_t pictures;
    double *stats; /* of this episode: VLAI_STAT_COUNT x dims */
    int64_t count;
} feature;

typedef struct place { /* of a file among chunk folders */
    int64_t chunk, file;
} place;

typedef struct camera_state {
    vlai_video *video;
    place at;
    int64_t from; /* first frame of this episode in the file */
} camera_state;

/* A column of meta/episodes, buffered for one row group. */
typedef struct meta_column {
    char *name;
    vlai_parquet_type type;
    int depth;
    int64_t dims[3];
    size_t per_row; /* values */
    void *values;
} meta_column;

struct vlai_set_writer {
    char dir[SET_PATH];
    const vlai_set_layout *layout;
    vlai_pool *pool;
    bool keep_all; /* rows are kept for global statistics */
    feature *features;
    int feature_count;
    int64_t episodes, frames;
    char **tasks;
    size_t task_count, task_capacity;
    /* data */
    vlai_parquet_field *fields;
    vlai_parquet_cells *cells;
    int field_count;
    vlai_parquet_writer *data;
    place data_at;
    int64_t data_frames;
    camera_state *cameras;
    /* meta/episodes of v3.0 */
    meta_column *columns;
    int column_count, column_capacity;
    int64_t buffered; /* rows */
    vlai_parquet_writer *meta;
    place meta_at;
    /* meta of v2.x */
    vlai_writer episodes_file, stats_file;
};

/* "DIR/" + the rest, with its folders made. */
vla_status set_path(vlai_set_writer *w, char out[SET_PATH], vla_error *err, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
place place_next(place at, int64_t chunks_size);

vla_status set_meta_open(vlai_set_writer *w, vla_error *err);
/* One episode, its statistics and places having been set. */
vla_status set_meta_episode(vlai_set_writer *w, int64_t length, const char *task, vla_error *err);
vla_status set_meta_close(vlai_set_writer *w, vla_error *err);
void set_meta_destroy(vlai_set_writer *w);

#endif
