/* The inside of a dataset, shared by the files of this folder that fill it: info.c (meta/info.json), tasks.c, episodes.c
 * (the episode table), rows.c (data files), clips.c (videos), columns.c (numeric columns), frames.c (pictures),
 * sidecar.c (what a second open may skip). dataset.c ties them together; read it first. */
#ifndef VLAI_SET_H
#define VLAI_SET_H

#include "base/memory.h"
#include "data/finding.h"
#include "format/video.h"
#include "vla/dataset.h"

#include <pthread.h>
#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_task {
    int64_t index;
    const char *text;
} vlai_task;

/* One row of the episode table. */
typedef struct vlai_episode_row {
    int64_t index, length;
    int64_t from, to;               /* dataset_from_index, dataset_to_index; running sums for v2.x */
    int64_t data_chunk, data_file;  /* as the table claims */
    const char **tasks;
    int64_t task_count;
    const char *source;             /* relative path of the metadata file that holds this row */
    int file;                       /* data file that really holds its rows, -1 = not found */
    int64_t file_row, found;        /* first row there; how many there are */
    bool bad;                       /* some file of it is missing or damaged */
} vlai_episode_row;

typedef struct vlai_data_file {
    const char *path; /* relative */
    int64_t rows;
    int64_t first;    /* rows of the files before it */
    uint64_t size;
    int64_t mtime;
    bool read;        /* opened and scanned without an error that hides its rows */
    int64_t episode;  /* v2.x: place in the episode table; -1 for v3.0 */
} vlai_data_file;

/* One mp4 of one camera. */
typedef struct vlai_clip_file {
    const char *path; /* relative */
    uint64_t size;
    int64_t mtime;
    int64_t first, count; /* its episodes: camera.order[first .. first+count-1] */
    int64_t lengths;  /* frames that the episodes in it add up to */
    int64_t frames;   /* frames that it has, -1 = unknown */
    bool by_time;     /* more frames than lengths: addressed by time */
    vlai_clip *clip;  /* opened at first use, under clip_lock */
} vlai_clip_file;

/* Where the frames of an episode lie, for one camera. */
typedef struct vlai_clip_place {
    int32_t file;      /* in the camera's list, -1 = none */
    int64_t chunk_index, file_index;
    int64_t base;      /* ordinal of frame 0 */
    double from, to;   /* from_timestamp, to_timestamp; NaN where the table does not say */
} vlai_clip_place;

typedef struct vlai_camera {
    int64_t feature;
    bool video;
    vlai_clip_file *files; /* videos only */
    int64_t file_count;
    vlai_clip_place *places; /* one per episode row */
    int64_t *order;          /* episode rows by file, then by time */
} vlai_camera;

typedef struct vlai_column {
    const char *name;
    int kind; /* vlai_parquet_type */
    int64_t dim;
    void *data;
    void *mapping; /* a sidecar file holds it */
    size_t mapping_size;
    struct vlai_column *next;
} vlai_column;

struct vla_dataset {
    vlai_arena arena; /* strings and descriptions */
    char *root;
    vla_dataset_info info;
    uint32_t flags;
    int version; /* 20, 21, 30 */
    double fps;
    int64_t chunks_size, total_episodes, total_frames, total_tasks;
    const char *data_path, *video_path; /* NULL when refused or absent */
    vla_feature *features;
    int64_t feature_count;
    vlai_camera *cameras;
    int64_t camera_count;
    vlai_task *tasks; /* ascending by index */
    int64_t task_count;
    bool tasks_read;
    vlai_episode_row *episodes; /* all of the set, ascending by index */
    int64_t episode_count;
    bool episodes_read;
    vlai_data_file *files;
    int file_count;
    int64_t scanned_rows; /* of all files */
    bool undeclared_told; /* columns that meta/info.json lacks were reported */
    int32_t *task_of;     /* task_index of every row, in file order; -1 = the data has no such column */
    size_t task_room;
    vla_episode *chosen; /* what the caller sees */
    int64_t *chosen_row; /* their places in `episodes` */
    int64_t chosen_count, rows;
    char **warnings;
    size_t warning_count, warning_room, warnings_before_scan;
    char digest[33];
    char cache_dir[3800]; /* "" = none; folder of this very state of the set */
    vlai_column *columns;
    pthread_mutex_t column_lock, clip_lock;
    struct vlai_clip_file **open_clips; /* ring of the clips held, oldest replaced first */
    int64_t open_clip_next;
};

/* A copy in the dataset's arena; NULL when out of memory. */
char *vlai_set_strdup(vla_dataset *set, const char *text);
char *vlai_set_printf(vla_dataset *set, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* root/relative into `out`; an error when too long. */
vla_status vlai_set_path(const vla_dataset *set, const char *relative, char *out, size_t size, vla_error *err);

/* Fills a template such as "data/chunk-{chunk_index:03d}/..." from fields name=value; camera = {video_key}. */
typedef struct vlai_template_fields {
    int64_t episode_chunk, episode_index, chunk_index, file_index;
    const char *video_key;
} vlai_template_fields;
vla_status vlai_template_fill(const char *text, const vlai_template_fields *fields, char *out, size_t size,
                              vla_error *err);
/* NULL when every field of `text` is known, else the name of one that is not (written to `unknown`). */
const char *vlai_template_unknown(const char *text, char unknown[64]);
/* True when a relative path or template leaves its folder: absolute, or with a ".." part. */
bool vlai_path_escapes(const char *text);

/* The steps of loading, in this order. Each reports findings, and fails only when it cannot go on at all (memory, or
 * nothing left to read). */
vla_status vlai_load_info(vla_dataset *set, vlai_findings *findings, vla_error *err);
vla_status vlai_load_tasks(vla_dataset *set, vlai_findings *findings, vla_error *err);
vla_status vlai_load_episodes(vla_dataset *set, vlai_findings *findings, vla_error *err);
/* Names, sizes and times of all files; nothing is opened. */
vla_status vlai_list_data(vla_dataset *set, vla_error *err);
vla_status vlai_list_clips(vla_dataset *set, vla_error *err);
vla_status vlai_load_rows(vla_dataset *set, vlai_findings *findings, vla_error *err);
vla_status vlai_load_clips(vla_dataset *set, vlai_findings *findings, vla_error *err);
/* All of them; digest and places set. Used by open and by the validator. */
vla_status vlai_set_load(vla_dataset *set, vlai_findings *findings, vla_error *err);
vla_status vlai_set_create(const char *root, vla_dataset **out, vla_error *err);
/* How many leading episodes (in table order) have all their files. */
int64_t vlai_set_safe_prefix(const vla_dataset *set);

/* The ordinal in `clip` of frame `frame` of an episode; -1 when no frame of the clip is near its time. */
int64_t vlai_clip_ordinal(const vla_dataset *set, const vlai_camera *camera, int64_t episode_row, int64_t frame,
                          const vlai_clip *clip);
/* The clip of a file, opened at first use. The caller closes its share. */
vla_status vlai_set_clip(vla_dataset *set, const vlai_camera *camera, int64_t file, vlai_clip **out, vla_error *err);

/* sidecar.c: _place chooses the folder for this very state of the set (files listed, not yet opened); _load takes what
 * the last complete load found there, true when it did. Failures are silent: a cache is never needed. */
void vlai_sidecar_place(vla_dataset *set, const char *cache_dir);
bool vlai_sidecar_load(vla_dataset *set);
void vlai_sidecar_save(const vla_dataset *set);
bool vlai_sidecar_column_load(vla_dataset *set, vlai_column *column);
void vlai_sidecar_column_save(vla_dataset *set, const vlai_column *column);

/* The data file of the set with this relative path, -1 when absent. */
int vlai_set_data_file(const vla_dataset *set, const char *path);
/* The place of episode `index` in set->episodes, -1 when absent. */
int64_t vlai_set_episode(const vla_dataset *set, int64_t index);
/* The episode row whose frames include row `row` of data file `file`; -1 when none; *frame = its frame there. */
int64_t vlai_set_locate(const vla_dataset *set, int file, int64_t row, int64_t *frame);

void vlai_columns_free(vla_dataset *set);

/* What kind of finding an error of opening a file is: "file-truncated", "file-damaged", ... */
const char *vlai_fault_kind(const char *path, vla_status status);
/* What vlai_file_fault found, as a sentence says it of a file: it is "missing", "not readable (...)", "empty",
 * "a Git-LFS pointer". */
const char *vlai_fault_words(const char *fault);

VLA_END_DECLS

#endif
