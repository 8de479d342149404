/* A dataset: an index over a LeRobot directory (v2.0, v2.1, v3.0), read as it lies on disk.
 *
 * It holds episodes, rows, features, task texts and, on request, whole numeric columns; no pixels. Pictures come from a
 * frame reader, one per thread. Frames of videos are addressed by their ordinal, never by time, so that joined files
 * whose times drift are read exactly.
 *
 *     vla_dataset *set;
 *     if (vla_dataset_open("path/to/set", NULL, &set, &err) != VLA_OK) return report(&err);
 *     const vla_dataset_info *info = vla_dataset_info_get(set);
 *     const float *state;
 *     int64_t dim;
 *     vla_dataset_numbers(set, "observation.state", &state, &dim, &err);      // rows x dim, row-major, loaded once
 *     vla_frame_reader *reader;
 *     vla_frame_reader_create(set, NULL, &reader, &err);                      // one per thread
 *     vla_picture picture;
 *     vla_frame_reader_read(reader, row, vla_dataset_camera(set, 0), &picture, &err);
 *     vla_frame_reader_destroy(reader);
 *     vla_dataset_close(set);
 *
 * Rows. A row is a place in this dataset's own table: the frames of the chosen episodes in file order, 0 .. rows-1. With
 * all episodes chosen it equals the column `index`. vla_episode.first_row maps from episodes; vla_dataset_episode_of
 * maps back.
 *
 * Ownership: strings, arrays and descriptions live until vla_dataset_close. Readers must be destroyed before. Threads:
 * an open dataset may be used from any thread (column loading locks); a reader belongs to one thread at a time. */
#ifndef VLA_DATASET_H
#define VLA_DATASET_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vla_dataset vla_dataset;
typedef struct vla_frame_reader vla_frame_reader;

typedef enum vla_feature_kind {
    VLA_FEATURE_NUMBER,   /* bool, integer or floating, scalar or vector */
    VLA_FEATURE_TEXT,
    VLA_FEATURE_IMAGE,    /* encoded pictures inside the Parquet files */
    VLA_FEATURE_VIDEO,    /* frames of mp4 files */
    VLA_FEATURE_LANGUAGE, /* nested annotation columns; named, not read */
} vla_feature_kind;

typedef struct vla_feature {
    const char *name;
    const char *dtype; /* as info.json spells it */
    vla_feature_kind kind;
    int rank;
    int64_t shape[8];
    int64_t dim;                     /* product of shape; 1 for scalars */
    const char *const *names;        /* of the dimensions, flattened; name_count may be 0 or differ from dim */
    int64_t name_count;
    int64_t height, width, channels; /* IMAGE and VIDEO, as declared; the decoded picture wins */
    int is_depth;
} vla_feature;

typedef struct vla_episode {
    int64_t index;     /* episode_index in the dataset */
    int64_t length;    /* frames */
    int64_t first_row; /* in this dataset's table */
    const char *const *tasks;
    int64_t task_count;
} vla_episode;

typedef struct vla_dataset_info {
    const char *root;    /* as given */
    const char *version; /* "v2.0", "v2.1", "v3.0" */
    const char *robot_type; /* "" when null */
    double fps;
    int64_t episodes, rows, features, cameras, tasks; /* of what was opened (episodes, rows: after the filter) */
    int64_t total_episodes, total_frames;             /* of the whole set */
    const char *digest; /* 32 hexadecimal digits over metadata, episode table, file sizes; the same on every machine */
    int64_t warnings;   /* vla_dataset_warning(set, 0 .. warnings-1) */
} vla_dataset_info;

enum {
    VLA_DATASET_SKIP_MISSING = 1,  /* episodes asked for that do not exist are left out instead of refused */
    VLA_DATASET_ALLOW_PARTIAL = 2, /* open the longest prefix of episodes whose files are all present and readable */
    VLA_DATASET_NO_CACHE = 4,      /* neither read nor write the sidecar cache */
};

typedef struct vla_dataset_options {
    size_t size; /* sizeof(vla_dataset_options) */
    const int64_t *episodes; /* NULL: all. Rows keep file order whatever the order of this list. */
    size_t episode_count;
    uint32_t flags;
    const char *cache_dir; /* NULL: $VLA_CACHE_DIR, else $XDG_CACHE_HOME/vla, else ~/.cache/vla */
} vla_dataset_options;

#define VLA_DATASET_OPTIONS_DEFAULT {sizeof(vla_dataset_options), 0, 0, 0, 0}

/* options: NULL = defaults. Refuses a set that training could not trust (missing or damaged files, wrong counts,
 * lengths, indices); what can be survived becomes a warning. `vla check` lists everything. */
VLA_API vla_status vla_dataset_open(const char *root, const vla_dataset_options *options, vla_dataset **out,
                                    vla_error *err);
VLA_API void vla_dataset_close(vla_dataset *set);

VLA_API const vla_dataset_info *vla_dataset_info_get(const vla_dataset *set);
VLA_API const char *vla_dataset_warning(const vla_dataset *set, int64_t i);

VLA_API const vla_feature *vla_dataset_feature(const vla_dataset *set, int64_t i); /* in info.json order */
VLA_API const vla_feature *vla_dataset_find(const vla_dataset *set, const char *name); /* NULL when absent */
VLA_API const vla_feature *vla_dataset_camera(const vla_dataset *set, int64_t i); /* IMAGE and VIDEO, in that order */
/* The same with an error that lists the cameras that exist and the nearest name. */
VLA_API vla_status vla_dataset_need_camera(const vla_dataset *set, const char *name, const vla_feature **out,
                                           vla_error *err);

VLA_API const vla_episode *vla_dataset_episode(const vla_dataset *set, int64_t i); /* i-th chosen, ascending index */
VLA_API int64_t vla_dataset_episode_of(const vla_dataset *set, int64_t row);       /* i of the episode that holds row */
VLA_API const char *vla_dataset_task(const vla_dataset *set, int64_t row);         /* text of the row's task_index */
VLA_API const char *vla_dataset_task_text(const vla_dataset *set, int64_t task_index); /* NULL when out of range */

/* A numeric column of all rows, row-major rows x dim, loaded at the first call and kept. NaN, infinity, a null or a list
 * of another length is an error that names file, episode, frame and dimension. */
VLA_API vla_status vla_dataset_numbers(vla_dataset *set, const char *name, const float **out, int64_t *dim,
                                       vla_error *err);
/* The same in double, and for whole numbers (task_index, frame_index, episode_index, index, ...). */
VLA_API vla_status vla_dataset_doubles(vla_dataset *set, const char *name, const double **out, int64_t *dim,
                                       vla_error *err);
VLA_API vla_status vla_dataset_integers(vla_dataset *set, const char *name, const int64_t **out, int64_t *dim,
                                        vla_error *err);

/* --- pictures --- */

typedef struct vla_picture {
    const uint8_t *data; /* (height, width, 3) RGB, row-major without gaps; valid until the reader's next call */
    int64_t width, height;
} vla_picture;

typedef struct vla_frame_reader_options {
    size_t size;
    int decoders; /* open decoders kept, least recently used closed first; 0 = 32 */
} vla_frame_reader_options;

#define VLA_FRAME_READER_OPTIONS_DEFAULT {sizeof(vla_frame_reader_options), 0}

VLA_API vla_status vla_frame_reader_create(vla_dataset *set, const vla_frame_reader_options *options,
                                           vla_frame_reader **out, vla_error *err);
VLA_API void vla_frame_reader_destroy(vla_frame_reader *reader);
/* The picture of `row` from `camera`. Rows in ascending order inside an episode decode fastest. */
VLA_API vla_status vla_frame_reader_read(vla_frame_reader *reader, int64_t row, const vla_feature *camera,
                                         vla_picture *out, vla_error *err);

/* Roots of all datasets at or below `dir`: directories that hold meta/info.json; links followed; sorted. Released with
 * vla_dataset_roots_free. */
VLA_API vla_status vla_dataset_discover(const char *dir, char ***roots, size_t *count, vla_error *err);
VLA_API void vla_dataset_roots_free(char **roots, size_t count);

VLA_END_DECLS

#endif
