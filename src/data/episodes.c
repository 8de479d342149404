/* The episode table: meta/episodes.jsonl (v2.x) or the Parquet files below meta/episodes (v3.0). Columns are looked up by
 * name, and only those needed are read: the statistics are the bulk of these files. */
#include "data/episodes.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "data/lines.h"
#include "format/parquet.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The longest episode that is believed: 10^9 frames are a year at 30 fps. */
#define LENGTH_LIMIT INT64_C(1000000000)

typedef struct table {
    vla_dataset *set;
    vlai_findings *findings;
    const char *file;
    vlai_episode_row *rows;
    size_t count, room;
    vlai_clip_place **places; /* per camera, grown beside rows */
    size_t place_room;
} table;

static vla_status add_row(table *t, const vlai_episode_row *row, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&t->rows, &t->room, t->count, sizeof *t->rows, err));
    for (int64_t c = 0; c < t->set->camera_count; c++) {
        size_t room = t->place_room;
        VLA_TRY(vlai_reserve((void **)&t->places[c], &room, t->count, sizeof **t->places, err));
        t->places[c][t->count] = (vlai_clip_place){.file = -1, .chunk_index = -1, .file_index = -1};
        if (c + 1 == t->set->camera_count)
            t->place_room = room;
    }
    t->rows[t->count] = *row;
    t->rows[t->count].source = t->file;
    t->rows[t->count].file = -1;
    t->count++;
    return VLA_OK;
}

/* --- v2.x --- */

static vla_status copy_tasks(vla_dataset *set, const json_t *list, vlai_episode_row *row, vla_error *err)
{
    size_t n = json_array_size(list);
    row->tasks = vlai_arena_alloc(&set->arena, (n + 1) * sizeof *row->tasks);
    if (!row->tasks)
        return vlai_nomem(err, n * sizeof *row->tasks);
    for (size_t i = 0; i < n; i++) {
        const char *text = json_string_value(json_array_get(list, i));
        if (!text)
            continue;
        row->tasks[row->task_count] = vlai_set_strdup(set, text);
        if (!row->tasks[row->task_count++])
            return vlai_nomem(err, 1);
    }
    return VLA_OK;
}

static vla_status add_line(const json_t *object, int64_t line, void *user, vla_error *err)
{
    table *t = user;
    const json_t *index = json_object_get(object, "episode_index"), *length = json_object_get(object, "length");
    vlai_episode_row row = {.index = json_integer_value(index), .length = json_integer_value(length)};
    if (!json_is_integer(index) || !json_is_integer(length) || row.index < 0 || row.length < 0 ||
        row.length > LENGTH_LIMIT) {
        vlai_finding f = vlai_finding_error("json", t->file);
        f.line = line;
        vlai_report(t->findings, &f, "episode_index and length (whole numbers, not negative) are needed");
        return VLA_OK;
    }
    VLA_TRY(copy_tasks(t->set, json_object_get(object, "tasks"), &row, err));
    return add_row(t, &row, err);
}

/* --- v3.0 --- */

/* One column of the table as numbers. A missing column or a null is reported; `*ok` tells. */
static vla_status read_numbers(table *t, vlai_parquet *file, const char *name, bool needed, vlai_parquet_type want,
                               vlai_parquet_values *out, bool *ok, vla_error *err)
{
    memset(out, 0, sizeof *out);
    *ok = false;
    const vlai_parquet_column *column = vlai_parquet_find(file, name);
    if (!column) {
        if (!needed)
            return VLA_OK;
        vlai_finding f = vlai_finding_error("column-missing", t->file);
        f.column = name;
        vlai_report(t->findings, &f, "the column '%s' is missing", name);
        return VLA_OK;
    }
    vla_error inner = VLA_ERROR_INIT;
    vla_status status = vlai_parquet_read(file, column, 0, vlai_parquet_rows(file), want, out, &inner);
    if (status == VLA_E_NOMEM)
        return vlai_fail(err, status, "%s", inner.message);
    if (status != VLA_OK) {
        vlai_finding f = vlai_finding_error(status == VLA_E_DTYPE ? "dtype" : "file-damaged", t->file);
        f.column = name;
        vlai_report(t->findings, &f, "%s", inner.message);
        return VLA_OK;
    }
    *ok = true;
    return VLA_OK;
}

static bool row_is_null(const vlai_parquet_values *v, int64_t row)
{
    return v->null[row] || v->offsets[row + 1] - v->offsets[row] != 1;
}

static int64_t number_at(const vlai_parquet_values *v, int64_t row)
{
    return v->i64[v->offsets[row]];
}

typedef enum { EPISODE_INDEX, LENGTH, FROM, TO, CHUNK, FILE_INDEX, NUMBERS } number_column;
static const char *const number_names[NUMBERS] = {"episode_index",    "length",           "dataset_from_index",
                                                  "dataset_to_index", "data/chunk_index", "data/file_index"};

static void report_null(table *t, const char *column, int64_t episode)
{
    vlai_finding f = vlai_finding_error("null", t->file);
    f.column = column;
    f.episode = episode;
    f.hint = "an interrupted recording leaves such rows: encode or drop that episode with LeRobot's tools";
    vlai_report(t->findings, &f, "column '%s' is null for episode %lld", column, (long long)episode);
}

static vla_status read_tasks(table *t, vlai_parquet *file, size_t first, vla_error *err)
{
    const vlai_parquet_column *column = vlai_parquet_find(file, "tasks");
    vlai_parquet_values v;
    vla_error inner = VLA_ERROR_INIT;
    if (!column)
        return VLA_OK;
    vla_status status = vlai_parquet_read(file, column, 0, vlai_parquet_rows(file), VLAI_PARQUET_TEXT, &v, &inner);
    if (status == VLA_E_NOMEM)
        return vlai_fail(err, status, "%s", inner.message);
    if (status != VLA_OK)
        return VLA_OK; /* the frames' task_index decides; this list is only a summary */
    for (int64_t r = 0; r < v.rows && status == VLA_OK && first + (size_t)r < t->count; r++) {
        vlai_episode_row *row = &t->rows[first + (size_t)r];
        int64_t n = v.offsets[r + 1] - v.offsets[r];
        row->tasks = vlai_arena_alloc(&t->set->arena, ((size_t)n + 1) * sizeof *row->tasks);
        if (!row->tasks)
            status = vlai_nomem(err, (size_t)n * sizeof *row->tasks);
        for (int64_t i = 0; i < n && status == VLA_OK; i++) {
            row->tasks[i] = vlai_set_strdup(t->set, (const char *)v.bytes[v.offsets[r] + i].data);
            if (!row->tasks[i])
                status = vlai_nomem(err, 1);
            row->task_count = i + 1;
        }
    }
    vlai_parquet_values_fini(&v);
    return status;
}

static vla_status read_places(table *t, vlai_parquet *file, size_t first, vla_error *err)
{
    for (int64_t c = 0; c < t->set->camera_count; c++) {
        if (!t->set->cameras[c].video)
            continue;
        const char *key = t->set->features[t->set->cameras[c].feature].name;
        char names[4][400];
        static const char *const tails[4] = {"chunk_index", "file_index", "from_timestamp", "to_timestamp"};
        vlai_parquet_values v[4] = {{0}, {0}, {0}, {0}};
        bool ok[4] = {false};
        vla_status status = VLA_OK;
        for (int i = 0; i < 4; i++) {
            snprintf(names[i], sizeof names[i], "videos/%s/%s", key, tails[i]);
            if (status == VLA_OK)
                status = read_numbers(t, file, names[i], i < 3, i < 2 ? VLAI_PARQUET_I64 : VLAI_PARQUET_F64, &v[i], &ok[i], err);
        }
        for (int64_t r = 0; status == VLA_OK && ok[0] && ok[1] && ok[2] && r < v[0].rows; r++) {
            bool whole = true;
            if (first + (size_t)r >= t->count)
                break;
            for (int i = 0; i < 3; i++)
                if (row_is_null(&v[i], r)) {
                    const char *name = vlai_set_strdup(t->set, names[i]);
                    report_null(t, name ? name : tails[i], t->rows[first + (size_t)r].index);
                    whole = false;
                    break;
                }
            double from = whole ? v[2].f64[v[2].offsets[r]] : 0;
            if (whole && !(isfinite(from) && fabs(from) < 1e9)) {
                vlai_finding f = vlai_finding_error("value", t->file);
                f.episode = t->rows[first + (size_t)r].index;
                f.camera = key;
                vlai_report(t->findings, &f, "from_timestamp is %g", from);
                whole = false;
            }
            double to = ok[3] && !row_is_null(&v[3], r) ? v[3].f64[v[3].offsets[r]] : NAN; /* nothing is found by it */
            if (whole)
                t->places[c][first + (size_t)r] = (vlai_clip_place){
                    .file = -1, .chunk_index = number_at(&v[0], r), .file_index = number_at(&v[1], r), .from = from, .to = to};
        }
        for (int i = 0; i < 4; i++)
            vlai_parquet_values_fini(&v[i]);
        VLA_TRY(status);
    }
    return VLA_OK;
}

static vla_status read_table(table *t, const char *path, vla_error *err)
{
    vlai_parquet *file = NULL;
    vlai_parquet_values v[NUMBERS];
    bool ok[NUMBERS] = {false};
    memset(v, 0, sizeof v);
    size_t first = t->count;
    vla_error inner = VLA_ERROR_INIT;
    vla_status status = vlai_parquet_open(path, &file, &inner);
    if (status != VLA_OK) {
        if (status == VLA_E_NOMEM)
            return vlai_fail(err, status, "%s", inner.message);
        vlai_finding f = vlai_finding_error(vlai_fault_kind(path, status), t->file);
        f.hint = inner.hint[0] ? inner.hint : NULL;
        vlai_report(t->findings, &f, "%s", inner.message);
        return VLA_OK;
    }
    for (int i = 0; i < NUMBERS && status == VLA_OK; i++)
        status = read_numbers(t, file, number_names[i], i <= LENGTH, VLAI_PARQUET_I64, &v[i], &ok[i], err);
    for (int64_t r = 0; status == VLA_OK && ok[EPISODE_INDEX] && ok[LENGTH] && r < v[0].rows; r++) {
        vlai_episode_row row = {.index = r, .from = -1, .to = -1, .data_chunk = -1, .data_file = -1};
        int64_t *const fields[NUMBERS] = {&row.index, &row.length, &row.from, &row.to, &row.data_chunk, &row.data_file};
        for (int i = 0; i < NUMBERS; i++)
            if (ok[i] && !row_is_null(&v[i], r))
                *fields[i] = number_at(&v[i], r);
            else if (i <= LENGTH)
                report_null(t, number_names[i], row.index);
        if (row.index < 0 || row.length < 0 || row.length > LENGTH_LIMIT) {
            vlai_finding f = vlai_finding_error("value", t->file);
            f.episode = row.index;
            vlai_report(t->findings, &f, "episode_index %lld with length %lld", (long long)row.index, (long long)row.length);
            row.length = 0;
        }
        status = add_row(t, &row, err);
    }
    if (status == VLA_OK && t->count > first)
        status = read_tasks(t, file, first, err);
    if (status == VLA_OK && t->count > first)
        status = read_places(t, file, first, err);
    for (int i = 0; i < NUMBERS; i++)
        vlai_parquet_values_fini(&v[i]);
    vlai_parquet_close(file);
    return status;
}

/* All meta/episodes/CHUNK/FILE.parquet, sorted by name. */
static vla_status read_tables(table *t, vla_error *err)
{
    char path[4096];
    VLA_TRY(vlai_set_path(t->set, "meta/episodes", path, sizeof path, err));
    char **chunks = NULL;
    size_t chunk_count = 0, tables = 0;
    if (!vlai_is_dir(path)) {
        vlai_finding f = vlai_finding_error("file-missing", "meta/episodes/chunk-000/file-000.parquet");
        vlai_report(t->findings, &f, "the folder meta/episodes is missing: the download is incomplete");
        return VLA_OK;
    }
    vla_status status = vlai_list_dir(path, &chunks, &chunk_count, err);
    for (size_t c = 0; c < chunk_count && status == VLA_OK; c++) {
        char folder[4096], **names = NULL;
        size_t count = 0;
        if (!vlai_path_join(folder, sizeof folder, path, chunks[c]) || !vlai_is_dir(folder))
            continue;
        status = vlai_list_dir(folder, &names, &count, err);
        for (size_t i = 0; i < count && status == VLA_OK; i++) {
            char full[4096];
            size_t n = strlen(names[i]);
            if (n < 8 || strcmp(names[i] + n - 8, ".parquet") || !vlai_path_join(full, sizeof full, folder, names[i]))
                continue;
            t->file = vlai_set_printf(t->set, "meta/episodes/%s/%s", chunks[c], names[i]);
            status = t->file ? read_table(t, full, err) : vlai_nomem(err, n);
            tables++;
        }
        vlai_names_free(names, count);
    }
    vlai_names_free(chunks, chunk_count);
    if (status == VLA_OK && tables == 0) {
        vlai_finding f = vlai_finding_error("file-missing", "meta/episodes/chunk-000/file-000.parquet");
        vlai_report(t->findings, &f, "no episode table was found below meta/episodes");
    }
    return status;
}

/* --- both --- */

typedef struct order_entry {
    int64_t index;
    size_t row;
} order_entry;

static int by_index(const void *a, const void *b)
{
    const order_entry *x = a, *y = b;
    return x->index != y->index ? (x->index < y->index ? -1 : 1) : x->row < y->row ? -1 : x->row > y->row;
}

/* Sorts by episode_index into the arena; the second row of a pair is dropped and both facts are reported. */
static vla_status settle(table *t, vla_error *err)
{
    vla_dataset *set = t->set;
    set->episodes_read = t->count > 0;
    order_entry *order = vlai_array(t->count + 1, sizeof *order);
    set->episodes = vlai_arena_alloc(&set->arena, (t->count + 1) * sizeof *set->episodes);
    if (!order || !set->episodes)
        goto nomem;
    for (size_t i = 0; i < t->count; i++)
        order[i] = (order_entry){t->rows[i].index, i};
    qsort(order, t->count, sizeof *order, by_index);
    for (int64_t c = 0; c < set->camera_count; c++) {
        set->cameras[c].places = vlai_arena_alloc(&set->arena, (t->count + 1) * sizeof *set->cameras[c].places);
        if (!set->cameras[c].places)
            goto nomem;
    }
    int64_t n = 0, sum = 0;
    for (size_t i = 0; i < t->count; i++) {
        vlai_episode_row *row = &t->rows[order[i].row];
        if (n > 0 && set->episodes[n - 1].index == row->index) {
            vlai_finding f = vlai_finding_error("episode-duplicate", row->source);
            f.episode = row->index;
            vlai_report(t->findings, &f, "episode %lld stands twice in the table", (long long)row->index);
            continue;
        }
        for (int64_t c = 0; c < set->camera_count; c++)
            set->cameras[c].places[n] = t->places[c][order[i].row];
        set->episodes[n] = *row;
        set->episodes[n].from = set->version == 30 && row->from >= 0 ? row->from : sum;
        sum += row->length; /* at most 2^31 rows of 10^9 */
        n++;
    }
    set->episode_count = n;
    vlai_free(order);
    return VLA_OK;
nomem:
    vlai_free(order);
    return vlai_nomem(err, t->count * sizeof *set->episodes);
}

static void look_at_counts(const vla_dataset *set, const table *t)
{
    /* v3.0: row i is episode i. v2.x tables may have gaps where episodes were deleted. */
    int64_t next = 0, missing = 0;
    for (int64_t i = 0; set->version == 30 && i < set->episode_count; i++) {
        for (; next < set->episodes[i].index && missing < 10; next++, missing++) {
            vlai_finding f = vlai_finding_error("episode-missing", set->episodes[i].source);
            f.episode = next;
            vlai_report(t->findings, &f, "episode %lld is missing from the table", (long long)next);
        }
        next = set->episodes[i].index + 1;
    }
    int64_t frames = 0;
    for (int64_t i = 0; i < set->episode_count; i++)
        frames += set->episodes[i].length;
    const struct {
        const char *key;
        int64_t claimed, found;
    } totals[] = {{"total_episodes", set->total_episodes, (int64_t)t->count}, {"total_frames", set->total_frames, frames}};
    for (int i = 0; i < 2; i++) {
        if (totals[i].claimed < 0 || totals[i].claimed == totals[i].found)
            continue;
        vlai_finding f = vlai_finding_error("count", "meta/info.json");
        f.key = totals[i].key;
        f.expected = vlai_value_whole(totals[i].claimed);
        f.found = vlai_value_whole(totals[i].found);
        vlai_report(t->findings, &f, "%s is %lld, the episode table adds up to %lld", totals[i].key,
                    (long long)totals[i].claimed, (long long)totals[i].found);
    }
    for (int64_t i = 0; i < set->episode_count; i++)
        if (set->episodes[i].length == 0) {
            vlai_finding f = vlai_finding_warning("episode-empty", set->episodes[i].source);
            f.episode = set->episodes[i].index;
            vlai_report(t->findings, &f, "episode %lld has no frames", (long long)set->episodes[i].index);
        }
}

static vla_status finish(table *t, vla_status status, vla_error *err)
{
    if (status == VLA_OK)
        status = settle(t, err);
    if (status == VLA_OK && t->set->episodes_read)
        look_at_counts(t->set, t);
    for (int64_t c = 0; t->places && c < t->set->camera_count; c++)
        vlai_free(t->places[c]);
    vlai_free(t->places);
    vlai_free(t->rows);
    return status;
}

static vla_status begin(table *t, vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    *t = (table){.set = set, .findings = findings, .file = "meta/episodes.jsonl"};
    t->places = vlai_calloc((size_t)set->camera_count + 1, sizeof *t->places);
    return t->places ? VLA_OK : vlai_nomem(err, sizeof *t->places);
}

vla_status vlai_episodes_parse(vla_dataset *set, const char *data, size_t size, vlai_findings *findings, vla_error *err)
{
    table t;
    VLA_TRY(begin(&t, set, findings, err));
    return finish(&t, vlai_lines_parse(data, size, t.file, add_line, &t, findings, err), err);
}

vla_status vlai_load_episodes(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    table t;
    VLA_TRY(begin(&t, set, findings, err));
    vla_status status = VLA_OK;
    if (set->version == 30) {
        status = read_tables(&t, err);
    } else {
        char path[4096];
        status = vlai_set_path(set, t.file, path, sizeof path, err);
        const char *fault = status == VLA_OK ? vlai_file_fault(path) : NULL;
        if (fault) {
            vlai_finding f = vlai_finding_error(fault, t.file);
            vlai_report(findings, &f, "the file is %s: the episodes cannot be listed", vlai_fault_words(fault));
        } else if (status == VLA_OK) {
            status = vlai_lines_read(path, t.file, add_line, &t, findings, err);
        }
    }
    return finish(&t, status, err);
}
