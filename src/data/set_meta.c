/* Everything under meta/: episodes, tasks, statistics, and info.json as the last file of a set. */
#include "data/set_write_impl.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- meta/episodes of v3.0: a table of many columns, one row an episode ---- */

static vla_status add_column(vlai_set_writer *w, vlai_parquet_type type, int depth, int64_t dim, vla_error *err,
                             const char *format, ...) __attribute__((format(printf, 6, 7)));

/* depth 3 is what statistics of pictures have: (channels, 1, 1). */
static vla_status add_column(vlai_set_writer *w, vlai_parquet_type type, int depth, int64_t dim, vla_error *err,
                             const char *format, ...)
{
    char name[512];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    size_t capacity = (size_t)w->column_capacity;
    VLA_TRY(vlai_reserve((void **)&w->columns, &capacity, (size_t)w->column_count, sizeof *w->columns, err));
    w->column_capacity = (int)capacity;
    meta_column *c = &w->columns[w->column_count];
    size_t width = type == VLAI_PARQUET_TEXT ? sizeof(vlai_parquet_bytes) : 8;
    *c = (meta_column){.name = vlai_strdup(name), .type = type, .depth = depth, .dims = {dim, 1, 1},
                       .per_row = depth ? (size_t)dim : 1};
    c->values = vlai_calloc(EPISODES_PER_GROUP * c->per_row, width);
    w->column_count++;
    return c->name && c->values ? VLA_OK : vlai_nomem(err, EPISODES_PER_GROUP * c->per_row * width);
}

static vla_status make_columns(vlai_set_writer *w, vla_error *err)
{
    const vlai_set_layout *l = w->layout;
    VLA_TRY(add_column(w, VLAI_PARQUET_I64, 0, 1, err, "episode_index"));
    VLA_TRY(add_column(w, VLAI_PARQUET_TEXT, 1, 1, err, "tasks"));
    static const char *const ranges[] = {"length", "data/chunk_index", "data/file_index", "dataset_from_index",
                                         "dataset_to_index"};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        VLA_TRY(add_column(w, VLAI_PARQUET_I64, 0, 1, err, "%s", ranges[i]));
    for (int c = 0; c < l->camera_count; c++) {
        if (!l->cameras[c].video)
            continue;
        const char *key = l->cameras[c].key;
        VLA_TRY(add_column(w, VLAI_PARQUET_I64, 0, 1, err, "videos/%s/chunk_index", key));
        VLA_TRY(add_column(w, VLAI_PARQUET_I64, 0, 1, err, "videos/%s/file_index", key));
        VLA_TRY(add_column(w, VLAI_PARQUET_F64, 0, 1, err, "videos/%s/from_timestamp", key));
        VLA_TRY(add_column(w, VLAI_PARQUET_F64, 0, 1, err, "videos/%s/to_timestamp", key));
    }
    for (const feature *f = w->features; f < w->features + w->feature_count; f++) {
        for (int s = 0; s < VLAI_STAT_COUNT; s++)
            VLA_TRY(add_column(w, VLAI_PARQUET_F64, f->kind == CAMERA ? 3 : 1, f->dims, err, "stats/%s/%s", f->key,
                               vlai_stat_names[s]));
        VLA_TRY(add_column(w, VLAI_PARQUET_I64, 1, 1, err, "stats/%s/count", f->key));
    }
    VLA_TRY(add_column(w, VLAI_PARQUET_I64, 0, 1, err, "meta/episodes/chunk_index"));
    return add_column(w, VLAI_PARQUET_I64, 0, 1, err, "meta/episodes/file_index");
}

/* Fills a row from left to right, in the order of make_columns. */
static meta_column *put_i64(meta_column *c, int64_t row, int64_t value)
{
    ((int64_t *)c->values)[row] = value;
    return c + 1;
}

static meta_column *put_f64(meta_column *c, int64_t row, const double *values)
{
    memcpy((double *)c->values + (size_t)row * c->per_row, values, c->per_row * sizeof(double));
    return c + 1;
}

static vla_status flush_rows(vlai_set_writer *w, vla_error *err)
{
    if (w->buffered == 0)
        return VLA_OK;
    if (w->meta && (double)vlai_parquet_writer_bytes(w->meta) >= w->layout->data_mb * 1e6) {
        vlai_parquet_writer *done = w->meta;
        w->meta = NULL;
        VLA_TRY(vlai_parquet_writer_close(done, err));
        w->meta_at = place_next(w->meta_at, w->layout->chunks_size);
    }
    vla_status status = VLA_OK;
    vlai_parquet_field *fields = vlai_calloc((size_t)w->column_count, sizeof *fields);
    vlai_parquet_cells *cells = vlai_calloc((size_t)w->column_count, sizeof *cells);
    if (!fields || !cells)
        VLA_TRY_GOTO(vlai_nomem(err, (size_t)w->column_count * sizeof *fields), done);
    for (int i = 0; i < w->column_count; i++) {
        const meta_column *c = &w->columns[i];
        fields[i] = (vlai_parquet_field){c->name, c->type, c->depth, {c->dims[0], c->dims[1], c->dims[2]}};
        cells[i].values = c->values;
    }
    for (int64_t row = 0; row < w->buffered; row++) {
        meta_column *last = &w->columns[w->column_count - 2];
        put_i64(put_i64(last, row, w->meta_at.chunk), row, w->meta_at.file);
    }
    if (!w->meta) {
        char path[SET_PATH];
        VLA_TRY_GOTO(set_path(w, path, err, "meta/episodes/chunk-%03lld/file-%03lld.parquet", (long long)w->meta_at.chunk,
                              (long long)w->meta_at.file), done);
        VLA_TRY_GOTO(vlai_parquet_writer_open(path, fields, w->column_count, NULL, &w->meta, err), done);
    }
    status = vlai_parquet_writer_append(w->meta, w->buffered, cells, err);
    w->buffered = 0;
done:
    vlai_free(fields);
    vlai_free(cells);
    return status;
}

static vla_status add_row(vlai_set_writer *w, int64_t length, const char *task, vla_error *err)
{
    const vlai_set_layout *l = w->layout;
    int64_t row = w->buffered;
    /* The text is read when the rows are flushed, so it must be the writer's own copy. */
    const char *kept = NULL;
    for (size_t i = 0; i < w->task_count; i++)
        if (!strcmp(w->tasks[i], task))
            kept = w->tasks[i];
    meta_column *c = put_i64(w->columns, row, w->episodes);
    ((vlai_parquet_bytes *)c->values)[row] = (vlai_parquet_bytes){(const uint8_t *)kept, strlen(kept)};
    c++;
    c = put_i64(c, row, length);
    c = put_i64(c, row, w->data_at.chunk);
    c = put_i64(c, row, w->data_at.file);
    c = put_i64(c, row, w->frames);
    c = put_i64(c, row, w->frames + length);
    for (int i = 0; i < l->camera_count; i++) {
        if (!l->cameras[i].video)
            continue;
        double from = (double)w->cameras[i].from / l->fps, to = (double)(w->cameras[i].from + length) / l->fps;
        c = put_i64(c, row, w->cameras[i].at.chunk);
        c = put_i64(c, row, w->cameras[i].at.file);
        c = put_f64(c, row, &from);
        c = put_f64(c, row, &to);
    }
    for (const feature *f = w->features; f < w->features + w->feature_count; f++) {
        for (int s = 0; s < VLAI_STAT_COUNT; s++)
            c = put_f64(c, row, f->stats + s * f->dims);
        c = put_i64(c, row, f->count);
    }
    return ++w->buffered == EPISODES_PER_GROUP ? flush_rows(w, err) : VLA_OK;
}

/* ---- JSON ---- */

/* One statistic: a list of numbers; for pictures [[[r]], [[g]], [[b]]]. */
static json_t *stat_json(const feature *f, const double *values)
{
    json_t *list = json_array();
    for (int d = 0; d < f->dims; d++) {
        json_t *number = json_real(values[d]);
        json_array_append_new(list, f->kind == CAMERA ? json_pack("[[o]]", number) : number);
    }
    return list;
}

/* v2.0 has four numbers and no count, v2.1 adds the count, v3.0 the quantiles. */
static json_t *stats_json(const vlai_set_writer *w, const feature *f, const double *stats, int64_t count)
{
    json_t *object = json_object();
    int last = w->layout->version == VLAI_SET_V30 ? VLAI_STAT_COUNT : VLAI_STAT_std + 1;
    for (int s = 0; s < last; s++)
        json_object_set_new(object, vlai_stat_names[s], stat_json(f, stats + s * f->dims));
    if (w->layout->version != VLAI_SET_V20)
        json_object_set_new(object, "count", json_pack("[I]", (json_int_t)count));
    return object;
}

static vla_status put_line(vlai_writer *file, json_t *object, vla_error *err)
{
    char *text = object ? json_dumps(object, JSON_REAL_PRECISION(17) | JSON_COMPACT) : NULL;
    json_decref(object);
    if (!text)
        return vlai_fail(err, VLA_E_NOMEM, "out of host memory while writing JSON");
    vla_status status = vlai_writer_put(file, text, strlen(text), err);
    if (status == VLA_OK)
        status = vlai_writer_put(file, "\n", 1, err);
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
    return status;
}

static vla_status add_lines(vlai_set_writer *w, int64_t length, const char *task, vla_error *err)
{
    VLA_TRY(put_line(&w->episodes_file,
                     json_pack("{s:I, s:[s], s:I}", "episode_index", (json_int_t)w->episodes, "tasks", task, "length",
                               (json_int_t)length), err));
    if (w->layout->version == VLAI_SET_V20)
        return VLA_OK;
    json_t *stats = json_object();
    for (const feature *f = w->features; f < w->features + w->feature_count; f++)
        json_object_set_new(stats, f->key, stats_json(w, f, f->stats, f->count));
    return put_line(&w->stats_file,
                    json_pack("{s:I, s:o}", "episode_index", (json_int_t)w->episodes, "stats", stats), err);
}

/* ---- at the end ---- */

typedef struct {
    const vlai_set_writer *w;
    const feature **feature; /* of each column */
    int *dim;
    double **out;
    bool *failed;
} column_job;

static void global_column(void *context, int64_t tile, int thread)
{
    (void)thread;
    column_job *job = context;
    const feature *f = job->feature[tile];
    double *scratch = vlai_array((size_t)job->w->frames, sizeof *scratch);
    job->failed[tile] = !scratch;
    if (scratch)
        vlai_stats_column(f->kept, job->w->frames, f->dims, job->dim[tile], scratch, job->out[tile]);
    vlai_free(scratch);
}

/* meta/stats.json: statistics over all frames, column by column on all threads. */
static vla_status write_stats(vlai_set_writer *w, vla_error *err)
{
    int columns = 0;
    for (const feature *f = w->features; f < w->features + w->feature_count; f++)
        columns += f->kind == CAMERA ? 0 : f->dims;
    size_t n = (size_t)columns;
    column_job job = {w, vlai_calloc(n, sizeof *job.feature), vlai_calloc(n, sizeof *job.dim),
                      vlai_calloc(n, sizeof *job.out), vlai_calloc(n, sizeof *job.failed)};
    json_t *all = json_object();
    vla_status status = VLA_OK;
    if (!job.feature || !job.dim || !job.out || !job.failed || !all)
        VLA_TRY_GOTO(vlai_nomem(err, n * sizeof *job.out), done);
    int column = 0;
    for (const feature *f = w->features; f < w->features + w->feature_count; f++) {
        if (f->kind == CAMERA)
            vlai_stats_picture(f->histogram, f->stats);
        for (int d = 0; f->kind != CAMERA && d < f->dims; d++, column++) {
            job.feature[column] = f;
            job.dim[column] = d;
            job.out[column] = f->stats;
        }
    }
    vlai_pool_run(w->pool, columns, global_column, &job);
    for (column = 0; column < columns; column++)
        if (job.failed[column])
            VLA_TRY_GOTO(vlai_nomem(err, (size_t)w->frames * sizeof(double)), done);
    for (const feature *f = w->features; f < w->features + w->feature_count; f++)
        json_object_set_new(all, f->key,
                            stats_json(w, f, f->stats, f->kind == CAMERA ? (int64_t)f->pictures : w->frames));
    char path[SET_PATH];
    VLA_TRY_GOTO(set_path(w, path, err, "meta/stats.json"), done);
    status = vlai_json_save(all, path, err);
done:
    json_decref(all);
    vlai_free(job.feature);
    vlai_free(job.dim);
    vlai_free(job.out);
    vlai_free(job.failed);
    return status;
}

/* Without the pandas description LeRobot takes the row number for the text. */
static const char pandas[] =
    "{\"index_columns\": [\"task\"], \"column_indexes\": [], \"columns\": [{\"name\": \"task_index\", \"field_name\": "
    "\"task_index\", \"pandas_type\": \"int64\", \"numpy_type\": \"int64\", \"metadata\": null}, {\"name\": \"task\", "
    "\"field_name\": \"task\", \"pandas_type\": \"unicode\", \"numpy_type\": \"object\", \"metadata\": null}]}";

static vla_status write_tasks_parquet(vlai_set_writer *w, vla_error *err)
{
    static const vlai_parquet_field fields[2] = {{"task_index", VLAI_PARQUET_I64, 0, {1}},
                                                 {"task", VLAI_PARQUET_TEXT, 0, {1}}};
    static const char *const metadata[] = {"pandas", pandas, NULL};
    char path[SET_PATH];
    VLA_TRY(set_path(w, path, err, "meta/tasks.parquet"));
    vla_status status = VLA_OK;
    int64_t *rows = vlai_array(w->task_count, sizeof *rows);
    vlai_parquet_bytes *texts = vlai_array(w->task_count, sizeof *texts);
    vlai_parquet_writer *file = NULL;
    if (!rows || !texts)
        VLA_TRY_GOTO(vlai_nomem(err, w->task_count * sizeof *texts), done);
    for (size_t i = 0; i < w->task_count; i++) {
        rows[i] = (int64_t)i;
        texts[i] = (vlai_parquet_bytes){(const uint8_t *)w->tasks[i], strlen(w->tasks[i])};
    }
    const vlai_parquet_cells cells[2] = {{.values = rows}, {.values = texts}};
    VLA_TRY_GOTO(vlai_parquet_writer_open(path, fields, 2, metadata, &file, err), done);
    status = vlai_parquet_writer_append(file, (int64_t)w->task_count, cells, err);
    if (status == VLA_OK)
        status = vlai_parquet_writer_close(file, err);
    else
        vlai_parquet_writer_abort(file);
done:
    vlai_free(rows);
    vlai_free(texts);
    return status;
}

static vla_status write_tasks_jsonl(vlai_set_writer *w, vla_error *err)
{
    char path[SET_PATH];
    VLA_TRY(set_path(w, path, err, "meta/tasks.jsonl"));
    vlai_writer file;
    VLA_TRY(vlai_writer_open(&file, path, err));
    vla_status status = VLA_OK;
    for (size_t i = 0; status == VLA_OK && i < w->task_count; i++)
        status = put_line(&file, json_pack("{s:I, s:s}", "task_index", (json_int_t)i, "task", w->tasks[i]), err);
    if (status == VLA_OK)
        status = vlai_writer_close(&file, err);
    else
        vlai_writer_abort(&file);
    return status;
}

static json_t *camera_json(const vlai_set_camera *c)
{
    json_t *object = json_pack("{s:s, s:[i,i,i], s:[s,s,s]}", "dtype", c->video ? "video" : "image", "shape",
                               c->format.height, c->format.width, 3, "names", "height", "width", "channel");
    if (c->video)
        json_object_set_new(object, "info",
                            json_pack("{s:i, s:i, s:s, s:s, s:b, s:i, s:i, s:b}", "video.height", c->format.height,
                                      "video.width", c->format.width, "video.codec", vlai_codec_name(c->format.codec),
                                      "video.pix_fmt", "yuv420p", "video.is_depth_map", 0, "video.fps", c->format.fps,
                                      "video.channels", 3, "has_audio", 0));
    return object;
}

static json_t *feature_json(const vlai_set_writer *w, const feature *f)
{
    if (f->kind == CAMERA)
        return camera_json(&w->layout->cameras[f->which]);
    json_t *object = json_pack("{s:s, s:[i], s:n}", "dtype",
                               f->kind == VECTOR || f->kind == TIMESTAMP ? "float32" : "int64", "shape", f->dims, "names");
    if (f->kind == VECTOR) {
        json_t *names = json_array();
        for (int d = 0; d < f->dims; d++)
            json_array_append_new(names, json_string(w->layout->vectors[f->which].names[d]));
        json_object_set_new(object, "names", names);
    }
    return object;
}

static vla_status write_info(vlai_set_writer *w, vla_error *err)
{
    const vlai_set_layout *l = w->layout;
    bool v3 = l->version == VLAI_SET_V30;
    int videos = 0;
    for (int c = 0; c < l->camera_count; c++)
        videos += l->cameras[c].video;
    json_t *features = json_object();
    for (const feature *f = w->features; f < w->features + w->feature_count; f++)
        json_object_set_new(features, f->key, feature_json(w, f));
    char split[64];
    snprintf(split, sizeof split, "0:%lld", (long long)w->episodes);
    json_t *info = json_pack("{s:s, s:s, s:I, s:I, s:I}", "codebase_version", vlai_set_version_names[l->version],
                             "robot_type", l->robot, "total_episodes", (json_int_t)w->episodes, "total_frames",
                             (json_int_t)w->frames, "total_tasks", (json_int_t)w->task_count);
    if (!v3) {
        json_object_set_new(info, "total_videos", json_integer((json_int_t)videos * w->episodes));
        json_object_set_new(info, "total_chunks", json_integer((w->episodes - 1) / l->chunks_size + 1));
    }
    json_object_set_new(info, "chunks_size", json_integer(l->chunks_size));
    if (v3) { /* whole numbers, at least 1 */
        json_object_set_new(info, "data_files_size_in_mb", json_integer((json_int_t)fmax(1, ceil(l->data_mb))));
        json_object_set_new(info, "video_files_size_in_mb", json_integer((json_int_t)fmax(1, ceil(l->video_mb))));
    }
    json_object_set_new(info, "fps", json_integer(l->fps));
    json_object_set_new(info, "splits", json_pack("{s:s}", "train", split));
    json_object_set_new(info, "data_path",
                        json_string(v3 ? "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
                                       : "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"));
    json_object_set_new(info, "video_path",
                        !videos ? json_null()
                                : json_string(v3 ? "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
                                                 : "videos/chunk-{episode_chunk:03d}/{video_key}/"
                                                   "episode_{episode_index:06d}.mp4"));
    json_object_set_new(info, "features", features);
    char path[SET_PATH];
    vla_status status = info ? set_path(w, path, err, "meta/info.json") : vlai_nomem(err, 1);
    if (status == VLA_OK)
        status = vlai_json_save(info, path, err);
    json_decref(info);
    return status;
}

/* ---- as set_write.c calls it ---- */

vla_status set_meta_open(vlai_set_writer *w, vla_error *err)
{
    if (w->layout->version == VLAI_SET_V30)
        return make_columns(w, err);
    char path[SET_PATH];
    VLA_TRY(set_path(w, path, err, "meta/episodes.jsonl"));
    VLA_TRY(vlai_writer_open(&w->episodes_file, path, err));
    if (w->layout->version == VLAI_SET_V20)
        return VLA_OK;
    VLA_TRY(set_path(w, path, err, "meta/episodes_stats.jsonl"));
    return vlai_writer_open(&w->stats_file, path, err);
}

vla_status set_meta_episode(vlai_set_writer *w, int64_t length, const char *task, vla_error *err)
{
    return w->layout->version == VLAI_SET_V30 ? add_row(w, length, task, err) : add_lines(w, length, task, err);
}

vla_status set_meta_close(vlai_set_writer *w, vla_error *err)
{
    if (w->layout->version == VLAI_SET_V30) {
        VLA_TRY(flush_rows(w, err));
        vlai_parquet_writer *done = w->meta;
        w->meta = NULL;
        if (done)
            VLA_TRY(vlai_parquet_writer_close(done, err));
        VLA_TRY(write_tasks_parquet(w, err));
    } else {
        VLA_TRY(vlai_writer_close(&w->episodes_file, err));
        if (w->layout->version == VLAI_SET_V21)
            VLA_TRY(vlai_writer_close(&w->stats_file, err));
        VLA_TRY(write_tasks_jsonl(w, err));
    }
    if (w->keep_all)
        VLA_TRY(write_stats(w, err));
    return write_info(w, err);
}

void set_meta_destroy(vlai_set_writer *w)
{
    vlai_parquet_writer_abort(w->meta);
    vlai_writer_abort(&w->episodes_file);
    vlai_writer_abort(&w->stats_file);
    for (int i = 0; i < w->column_count; i++) {
        vlai_free(w->columns[i].name);
        vlai_free(w->columns[i].values);
    }
    vlai_free(w->columns);
}
