#include "data/set_write_impl.h"

#include "base/fail.h"
#include "base/memory.h"

#include <stdio.h>
#include <string.h>

const char *const vlai_set_version_names[VLAI_SET_VERSIONS] = {"v2.0", "v2.1", "v3.0"};

enum { DEFAULT_FEATURES = 5 };
static const struct {
    const char *key;
    feature_kind kind;
} defaults[DEFAULT_FEATURES] = {{"timestamp", TIMESTAMP},
                                {"frame_index", FRAME_INDEX},
                                {"episode_index", EPISODE_INDEX},
                                {"index", INDEX},
                                {"task_index", TASK_INDEX}};

vla_status set_path(vlai_set_writer *w, char out[SET_PATH], vla_error *err, const char *format, ...)
{
    char name[SET_PATH];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(name, sizeof name, format, args);
    va_end(args);
    if (n < 0 || n >= (int)sizeof name || !vlai_path_join(out, SET_PATH, w->dir, name))
        return vlai_fail(err, VLA_E_INVALID, "%s: path of a file in it is too long", w->dir);
    char *slash = strrchr(out, '/');
    *slash = 0;
    vla_status status = vlai_mkdirs(out, err);
    *slash = '/';
    return status;
}

place place_next(place at, int64_t chunks_size)
{
    return at.file >= chunks_size - 1 ? (place){at.chunk + 1, 0} : (place){at.chunk, at.file + 1};
}

/* ---- opening ---- */

static vla_status make_features(vlai_set_writer *w, vla_error *err)
{
    const vlai_set_layout *l = w->layout;
    w->feature_count = l->vector_count + l->camera_count + DEFAULT_FEATURES;
    w->features = vlai_calloc((size_t)w->feature_count, sizeof *w->features);
    w->fields = vlai_calloc((size_t)w->feature_count, sizeof *w->fields);
    w->cells = vlai_calloc((size_t)w->feature_count, sizeof *w->cells);
    w->cameras = vlai_calloc((size_t)l->camera_count + 1, sizeof *w->cameras);
    if (!w->features || !w->fields || !w->cells || !w->cameras)
        return vlai_nomem(err, (size_t)w->feature_count * sizeof *w->features);
    feature *f = w->features;
    for (int i = 0; i < l->vector_count; i++)
        *f++ = (feature){.kind = VECTOR, .which = i, .key = l->vectors[i].key, .dims = l->vectors[i].dims};
    for (int i = 0; i < l->camera_count; i++)
        *f++ = (feature){.kind = CAMERA, .which = i, .key = l->cameras[i].key, .dims = 3};
    for (int i = 0; i < DEFAULT_FEATURES; i++)
        *f++ = (feature){.kind = defaults[i].kind, .key = defaults[i].key, .dims = 1};
    for (f = w->features; f < w->features + w->feature_count; f++) {
        f->stats = vlai_calloc((size_t)f->dims * VLAI_STAT_COUNT, sizeof *f->stats);
        if (!f->stats)
            return vlai_nomem(err, (size_t)f->dims * VLAI_STAT_COUNT * sizeof *f->stats);
        if (f->kind == CAMERA && l->cameras[f->which].video)
            continue; /* no column */
        vlai_parquet_field *field = &w->fields[w->field_count++];
        field->name = f->key;
        field->type = f->kind == CAMERA ? VLAI_PARQUET_IMAGE
                      : f->kind == VECTOR || f->kind == TIMESTAMP ? VLAI_PARQUET_F32
                                                                  : VLAI_PARQUET_I64;
        field->depth = f->kind == VECTOR && f->dims > 1;
        field->dims[0] = f->dims;
    }
    return VLA_OK;
}

vla_status vlai_set_writer_open(const char *dir, const vlai_set_layout *layout, vlai_pool *pool, vlai_set_writer **out,
                                vla_error *err)
{
    *out = NULL;
    vlai_set_writer *w = vlai_calloc(1, sizeof *w);
    if (!w)
        return vlai_nomem(err, sizeof *w);
    w->layout = layout;
    w->pool = pool;
    w->keep_all = layout->version != VLAI_SET_V21;
    w->episodes_file.fd = w->stats_file.fd = -1;
    snprintf(w->dir, sizeof w->dir, "%s", dir);
    vla_status status = make_features(w, err);
    if (status == VLA_OK)
        status = set_meta_open(w, err);
    if (status != VLA_OK) {
        vlai_set_writer_destroy(w);
        return status;
    }
    *out = w;
    return VLA_OK;
}

/* ---- one episode ---- */

static vla_status task_index(vlai_set_writer *w, const char *text, int64_t *out, vla_error *err)
{
    for (size_t i = 0; i < w->task_count; i++)
        if (!strcmp(w->tasks[i], text)) {
            *out = (int64_t)i;
            return VLA_OK;
        }
    VLA_TRY(vlai_reserve((void **)&w->tasks, &w->task_capacity, w->task_count, sizeof *w->tasks, err));
    w->tasks[w->task_count] = vlai_strdup(text);
    if (!w->tasks[w->task_count])
        return vlai_nomem(err, strlen(text));
    *out = (int64_t)w->task_count++;
    return VLA_OK;
}

/* The value of a feature that the writer fills in itself. */
static double default_value(const vlai_set_writer *w, feature_kind kind, int64_t frame, int64_t task)
{
    switch (kind) {
    case TIMESTAMP: return (float)((double)frame / w->layout->fps);
    case FRAME_INDEX: return (double)frame;
    case EPISODE_INDEX: return (double)w->episodes;
    case INDEX: return (double)(w->frames + frame);
    default: return (double)task;
    }
}

/* Where this episode's rows begin in `kept`. */
static double *episode_rows(const vlai_set_writer *w, const feature *f)
{
    return f->kept + (w->keep_all ? (size_t)w->frames * (size_t)f->dims : 0);
}

static vla_status keep_rows(vlai_set_writer *w, feature *f, const vlai_set_episode *e, int64_t task, vla_error *err)
{
    size_t rows = (size_t)e->length + (w->keep_all ? (size_t)w->frames : 0), bytes = rows * (size_t)f->dims * sizeof(double);
    if (bytes > f->capacity) {
        size_t wanted = bytes + bytes / 2;
        double *grown = vlai_grow(f->kept, f->capacity, wanted);
        if (!grown)
            return vlai_nomem(err, wanted);
        f->kept = grown;
        f->capacity = wanted;
    }
    double *to = episode_rows(w, f);
    for (int64_t i = 0; i < e->length * f->dims; i++)
        to[i] = f->kind == VECTOR ? e->vectors[f->which][i] : default_value(w, f->kind, i, task);
    return VLA_OK;
}

static vla_status episode_stats(vlai_set_writer *w, const vlai_set_episode *e, int64_t task, vla_error *err)
{
    double *scratch = vlai_array((size_t)e->length, sizeof *scratch);
    if (!scratch)
        return vlai_nomem(err, (size_t)e->length * sizeof *scratch);
    vla_status status = VLA_OK;
    for (feature *f = w->features; status == VLA_OK && f < w->features + w->feature_count; f++) {
        if (f->kind == CAMERA) {
            const vlai_set_view *view = &e->views[f->which];
            vlai_stats_picture(view->histogram, f->stats);
            for (int i = 0; i < VLAI_HISTOGRAM; i++)
                f->histogram[i] += view->histogram[i];
            f->pictures += view->frames;
            f->count = (int64_t)view->frames;
            continue;
        }
        status = keep_rows(w, f, e, task, err);
        for (int d = 0; status == VLA_OK && d < f->dims; d++)
            vlai_stats_column(episode_rows(w, f), e->length, f->dims, d, scratch, f->stats);
        f->count = e->length;
    }
    vlai_free(scratch);
    return status;
}

/* Opens the data file that takes `length` more rows, ending the one before when it would grow past the limit. */
static vla_status data_file(vlai_set_writer *w, int64_t length, vla_error *err)
{
    const vlai_set_layout *l = w->layout;
    char path[SET_PATH];
    if (l->version != VLAI_SET_V30) {
        VLA_TRY(set_path(w, path, err, "data/chunk-%03lld/episode_%06lld.parquet", (long long)(w->episodes / l->chunks_size),
                         (long long)w->episodes));
        return vlai_parquet_writer_open(path, w->fields, w->field_count, NULL, &w->data, err);
    }
    if (w->data) {
        double size = (double)vlai_parquet_writer_bytes(w->data);
        if (size + size / (double)w->data_frames * (double)length < l->data_mb * 1e6)
            return VLA_OK;
        vlai_parquet_writer *done = w->data;
        w->data = NULL;
        VLA_TRY(vlai_parquet_writer_close(done, err));
        w->data_at = place_next(w->data_at, l->chunks_size);
        w->data_frames = 0;
    }
    VLA_TRY(set_path(w, path, err, "data/chunk-%03lld/file-%03lld.parquet", (long long)w->data_at.chunk,
                     (long long)w->data_at.file));
    return vlai_parquet_writer_open(path, w->fields, w->field_count, NULL, &w->data, err);
}

/* Names of image cells: what LeRobot calls the file that a picture was before it was embedded. */
static vla_status image_names(const vlai_set_writer *w, int64_t length, char **text, vlai_parquet_bytes **out,
                              vla_error *err)
{
    enum { NAME = 32 };
    *text = vlai_array((size_t)length, NAME);
    *out = vlai_array((size_t)length, sizeof **out);
    if (!*text || !*out)
        return vlai_nomem(err, (size_t)length * NAME);
    for (int64_t i = 0; i < length; i++) {
        char *name = *text + i * NAME;
        int n = snprintf(name, NAME, w->layout->version == VLAI_SET_V30 ? "frame-%06lld.png" : "frame_%06lld.png",
                         (long long)i);
        (*out)[i] = (vlai_parquet_bytes){(const uint8_t *)name, (size_t)n};
    }
    return VLA_OK;
}

static vla_status write_rows(vlai_set_writer *w, const vlai_set_episode *e, vla_error *err)
{
    VLA_TRY(data_file(w, e->length, err));
    size_t n = (size_t)e->length;
    char *text = NULL;
    vlai_parquet_bytes *names = NULL;
    vla_status status = VLA_OK;
    int64_t *integers = vlai_array(n * DEFAULT_FEATURES, sizeof *integers);
    float *times = vlai_array(n, sizeof *times);
    if (!integers || !times)
        status = vlai_nomem(err, n * DEFAULT_FEATURES * sizeof *integers);
    if (status == VLA_OK)
        status = image_names(w, e->length, &text, &names, err);
    int field = 0, column = 0;
    for (const feature *f = w->features; status == VLA_OK && f < w->features + w->feature_count; f++) {
        vlai_parquet_cells *cells = &w->cells[field];
        *cells = (vlai_parquet_cells){0};
        if (f->kind == CAMERA) {
            if (w->layout->cameras[f->which].video)
                continue;
            cells->values = e->views[f->which].images;
            cells->paths = names;
        } else if (f->kind == VECTOR) {
            cells->values = e->vectors[f->which];
        } else if (f->kind == TIMESTAMP) {
            for (size_t i = 0; i < n; i++)
                times[i] = (float)episode_rows(w, f)[i];
            cells->values = times;
        } else {
            int64_t *to = integers + n * (size_t)column++;
            for (size_t i = 0; i < n; i++)
                to[i] = (int64_t)episode_rows(w, f)[i];
            cells->values = to;
        }
        field++;
    }
    if (status == VLA_OK)
        status = vlai_parquet_writer_append(w->data, e->length, w->cells, err);
    w->data_frames += e->length;
    vlai_free(integers);
    vlai_free(times);
    vlai_free(text);
    vlai_free(names);
    if (status == VLA_OK && w->layout->version != VLAI_SET_V30) {
        vlai_parquet_writer *done = w->data;
        w->data = NULL;
        status = vlai_parquet_writer_close(done, err);
    }
    return status;
}

static vla_status end_video(vlai_set_writer *w, int camera, vla_error *err)
{
    const char *key = w->layout->cameras[camera].key;
    camera_state *c = &w->cameras[camera];
    char path[SET_PATH];
    if (w->layout->version == VLAI_SET_V30)
        VLA_TRY(set_path(w, path, err, "videos/%s/chunk-%03lld/file-%03lld.mp4", key, (long long)c->at.chunk,
                         (long long)c->at.file));
    else
        VLA_TRY(set_path(w, path, err, "videos/chunk-%03lld/%s/episode_%06lld.mp4",
                         (long long)(w->episodes / w->layout->chunks_size), key, (long long)w->episodes));
    vlai_video *done = c->video;
    c->video = NULL;
    return vlai_video_close(done, path, err);
}

static vla_status write_video(vlai_set_writer *w, int camera, const vlai_segment *segment, vla_error *err)
{
    const vlai_set_layout *l = w->layout;
    camera_state *c = &w->cameras[camera];
    if (c->video && (double)vlai_video_bytes(c->video) + (double)segment->size >= l->video_mb * 1e6) {
        VLA_TRY(end_video(w, camera, err));
        c->at = place_next(c->at, l->chunks_size);
    }
    if (!c->video)
        VLA_TRY(vlai_video_create(&l->cameras[camera].format, &c->video, err));
    c->from = vlai_video_frames(c->video);
    VLA_TRY(vlai_video_append(c->video, segment, err));
    return l->version == VLAI_SET_V30 ? VLA_OK : end_video(w, camera, err);
}

vla_status vlai_set_writer_add(vlai_set_writer *w, const vlai_set_episode *e, vla_error *err)
{
    int64_t task = 0;
    VLA_TRY(task_index(w, e->task, &task, err));
    VLA_TRY(episode_stats(w, e, task, err));
    VLA_TRY(write_rows(w, e, err));
    for (int c = 0; c < w->layout->camera_count; c++)
        if (w->layout->cameras[c].video)
            VLA_TRY(write_video(w, c, &e->views[c].segment, err));
    VLA_TRY(set_meta_episode(w, e->length, e->task, err));
    w->episodes++;
    w->frames += e->length;
    return VLA_OK;
}

vla_status vlai_set_writer_close(vlai_set_writer *w, vla_error *err)
{
    vla_status status = VLA_OK;
    if (w->data) {
        vlai_parquet_writer *done = w->data;
        w->data = NULL;
        status = vlai_parquet_writer_close(done, err);
    }
    for (int c = 0; status == VLA_OK && c < w->layout->camera_count; c++)
        if (w->cameras[c].video)
            status = end_video(w, c, err);
    if (status == VLA_OK)
        status = set_meta_close(w, err);
    vlai_set_writer_destroy(w);
    return status;
}

void vlai_set_writer_destroy(vlai_set_writer *w)
{
    if (!w)
        return;
    vlai_parquet_writer_abort(w->data);
    for (int c = 0; w->cameras && c < w->layout->camera_count; c++)
        vlai_video_destroy(w->cameras[c].video);
    for (int i = 0; w->features && i < w->feature_count; i++) {
        vlai_free(w->features[i].kept);
        vlai_free(w->features[i].stats);
    }
    for (size_t i = 0; i < w->task_count; i++)
        vlai_free(w->tasks[i]);
    set_meta_destroy(w);
    vlai_free(w->tasks);
    vlai_free(w->features);
    vlai_free(w->fields);
    vlai_free(w->cells);
    vlai_free(w->cameras);
    vlai_free(w);
}
