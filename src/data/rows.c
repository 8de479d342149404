/* The data files: which row of which file is which frame of which episode. Every file's index columns are read once and
 * held against the episode table, so that the place of an episode is what the data says, not what the table claims. */
#include "data/set.h"

#include "base/fail.h"
#include "base/io.h"
#include "format/parquet.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { REPORT_LIMIT = 10 }; /* findings of one kind in one file; the last says how many more there are */

/* --- which files there are --- */

static vla_status add_file(vla_dataset *set, size_t *room, const char *path, int64_t episode, vla_error *err)
{
    char full[4096];
    struct stat st;
    VLA_TRY(vlai_set_path(set, path, full, sizeof full, err));
    VLA_TRY(vlai_reserve((void **)&set->files, room, (size_t)set->file_count, sizeof *set->files, err));
    vlai_data_file *file = &set->files[set->file_count];
    *file = (vlai_data_file){.path = vlai_set_strdup(set, path), .episode = episode};
    if (!file->path)
        return vlai_nomem(err, strlen(path));
    if (stat(full, &st) == 0) {
        file->size = (uint64_t)st.st_size;
        file->mtime = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    }
    set->file_count++;
    return VLA_OK;
}

static vla_status episode_files(vla_dataset *set, vla_error *err)
{
    size_t room = 0;
    for (int64_t i = 0; i < set->episode_count; i++) {
        char path[2048];
        vlai_template_fields fields = {.episode_chunk = set->episodes[i].index / set->chunks_size,
                                       .episode_index = set->episodes[i].index};
        VLA_TRY(vlai_template_fill(set->data_path, &fields, path, sizeof path, err));
        VLA_TRY(add_file(set, &room, path, i, err));
    }
    return VLA_OK;
}

static bool is_parquet(const char *name)
{
    size_t n = strlen(name);
    return n > 8 && !strcmp(name + n - 8, ".parquet");
}

/* The folder at the start of the template, one level of folders below it. */
static vla_status listed_files(vla_dataset *set, vla_error *err)
{
    char top[512], folder[4096];
    size_t room = 0, n = strcspn(set->data_path, "/");
    if (n >= sizeof top || memchr(set->data_path, '{', n) || !set->data_path[n])
        snprintf(top, sizeof top, "data");
    else
        snprintf(top, sizeof top, "%.*s", (int)n, set->data_path);
    VLA_TRY(vlai_set_path(set, top, folder, sizeof folder, err));
    if (!vlai_is_dir(folder))
        return VLA_OK;
    char **names = NULL;
    size_t count = 0;
    vla_status status = vlai_list_dir(folder, &names, &count, err);
    for (size_t i = 0; i < count && status == VLA_OK; i++) {
        char sub[4096], path[2048], **inner = NULL;
        size_t inner_count = 0;
        if (is_parquet(names[i])) {
            snprintf(path, sizeof path, "%s/%s", top, names[i]);
            status = add_file(set, &room, path, -1, err);
        } else if (vlai_path_join(sub, sizeof sub, folder, names[i]) && vlai_is_dir(sub)) {
            status = vlai_list_dir(sub, &inner, &inner_count, err);
            for (size_t k = 0; k < inner_count && status == VLA_OK; k++)
                if (is_parquet(inner[k])) {
                    snprintf(path, sizeof path, "%s/%s/%s", top, names[i], inner[k]);
                    status = add_file(set, &room, path, -1, err);
                }
            vlai_names_free(inner, inner_count);
        }
    }
    vlai_names_free(names, count);
    return status;
}

/* --- what stands in them --- */

typedef enum { EPISODE, INDEX, FRAME, TASK, TIME, COLUMNS } default_column;
static const char *const default_names[COLUMNS] = {"episode_index", "index", "frame_index", "task_index", "timestamp"};

typedef struct scan {
    vla_dataset *set;
    vlai_findings *findings;
    vlai_data_file *file;
    int number;
    vlai_parquet_values v[COLUMNS];
    bool have[COLUMNS];
    int64_t expected_index; /* of the next row; -1 = take what comes */
    int64_t told[8];        /* findings so far, by kind */
} scan;

typedef enum { TELL_FRAME, TELL_INDEX, TELL_TASK, TELL_TIME, TELL_BACK, TELL_UNKNOWN, TELL_SPLIT, TELL_NULL } told_kind;

static bool may_tell(scan *s, told_kind kind)
{
    return s->told[kind]++ < REPORT_LIMIT;
}

static void declared_columns(scan *s, const vlai_parquet *parquet)
{
    for (int64_t i = 0; i < s->set->feature_count; i++) {
        const vla_feature *feature = &s->set->features[i];
        if (feature->kind == VLA_FEATURE_VIDEO || vlai_parquet_find(parquet, feature->name))
            continue;
        vlai_finding f = vlai_finding_error("column-missing", s->file->path);
        f.column = feature->name;
        vlai_report(s->findings, &f, "the column '%s' is declared in meta/info.json and missing here", feature->name);
    }
    bool told = s->set->undeclared_told; /* later files have them too */
    for (int i = 0; i < vlai_parquet_column_count(parquet) && !told; i++) {
        const vlai_parquet_column *column = vlai_parquet_column_at(parquet, i);
        bool known = false;
        for (int64_t k = 0; k < s->set->feature_count && !known; k++)
            known = !strcmp(s->set->features[k].name, column->name);
        for (int k = 0; k < COLUMNS && !known; k++)
            known = !strcmp(default_names[k], column->name);
        if (known)
            continue;
        vlai_finding f = vlai_finding_warning("column-undeclared", s->file->path);
        f.column = column->name;
        vlai_report(s->findings, &f, "the column '%s' is not declared in meta/info.json: LeRobot itself refuses such a file, here "
                                     "the column is not read", column->name);
        s->set->undeclared_told = true;
    }
}

static vla_status read_columns(scan *s, vlai_parquet *parquet, vla_error *err)
{
    for (int i = 0; i < COLUMNS; i++) {
        const vlai_parquet_column *column = vlai_parquet_find(parquet, default_names[i]);
        vla_error inner = VLA_ERROR_INIT;
        s->have[i] = false;
        if (!column) /* reported by declared_columns; undeclared and absent is survived */
            continue;
        vla_status status = vlai_parquet_read(parquet, column, 0, s->file->rows,
                                              i == TIME ? VLAI_PARQUET_F64 : VLAI_PARQUET_I64, &s->v[i], &inner);
        if (status == VLA_E_NOMEM)
            return vlai_fail(err, status, "%s", inner.message);
        if (status != VLA_OK) {
            vlai_finding f = vlai_finding_error(status == VLA_E_DTYPE ? "dtype" : "file-damaged", s->file->path);
            f.column = default_names[i];
            vlai_report(s->findings, &f, "%s", inner.message);
            continue;
        }
        s->have[i] = true;
        for (int64_t r = 0; r < s->v[i].rows; r++)
            if (s->v[i].null[r] || s->v[i].offsets[r + 1] - s->v[i].offsets[r] != 1) {
                vlai_finding f = vlai_finding_error(s->v[i].null[r] ? "null" : "list-length", s->file->path);
                f.column = default_names[i];
                vlai_report(s->findings, &f, "column '%s' has no single value in row %lld", default_names[i], (long long)r);
                s->have[i] = false;
                break;
            }
    }
    return VLA_OK;
}

static vlai_finding at_frame(scan *s, char level, const char *kind, int64_t episode, int64_t frame)
{
    vlai_finding f = level == 'E' ? vlai_finding_error(kind, s->file->path) : vlai_finding_warning(kind, s->file->path);
    f.episode = episode;
    f.frame = frame;
    return f;
}

/* One frame: row r of the file, frame k of the episode. */
static void look_at_frame(scan *s, int64_t episode, int64_t r, int64_t k)
{
    vla_dataset *set = s->set;
    if (s->have[INDEX]) {
        int64_t got = s->v[INDEX].i64[r];
        if (s->expected_index >= 0 && got != s->expected_index && may_tell(s, TELL_INDEX)) {
            vlai_finding f = at_frame(s, 'E', "index-gap", episode, k);
            f.column = "index";
            f.expected = vlai_value_whole(s->expected_index);
            f.found = vlai_value_whole(got);
            vlai_report(s->findings, &f, "index is %lld, expected %lld: the global frame number must count without gaps",
                        (long long)got, (long long)s->expected_index);
        }
        s->expected_index = got >= 0 && got < INT64_MAX ? got + 1 : -1;
    }
    if (s->have[FRAME] && s->v[FRAME].i64[r] != k &&
        (k == 0 || s->v[FRAME].i64[r] != s->v[FRAME].i64[r - 1] + 1) && may_tell(s, TELL_FRAME)) {
        vlai_finding f = at_frame(s, 'E', "frame-index", episode, k);
        f.column = "frame_index";
        f.expected = vlai_value_whole(k);
        f.found = vlai_value_whole(s->v[FRAME].i64[r]);
        vlai_report(s->findings, &f, "frame_index is %lld, expected %lld", (long long)s->v[FRAME].i64[r], (long long)k);
    }
    int64_t task = s->have[TASK] ? s->v[TASK].i64[r] : -1;
    bool known = vla_dataset_task_text(set, task) != NULL;
    if (s->have[TASK] && set->tasks_read && !known && may_tell(s, TELL_TASK)) {
        vlai_finding f = at_frame(s, 'E', "task-index", episode, k);
        f.column = "task_index";
        f.found = vlai_value_whole(task);
        vlai_report(s->findings, &f, "task_index %lld has no entry in the %lld tasks", (long long)task,
                    (long long)set->task_count);
    }
    set->task_of[s->file->first + r] = known ? (int32_t)task : -1;
    if (!s->have[TIME] || set->fps <= 0)
        return;
    double time = s->v[TIME].f64[r], want = (double)k / set->fps, tolerance = 1e-4 + 1.2e-7 * want; /* float32 spacing */
    if (k > 0 && !(time > s->v[TIME].f64[r - 1]) && may_tell(s, TELL_BACK)) {
        vlai_finding f = at_frame(s, 'E', "timestamp", episode, k);
        f.column = "timestamp";
        f.found = vlai_value_real(time);
        vlai_report(s->findings, &f, "timestamp %.6g does not increase (%.6g before)", time, s->v[TIME].f64[r - 1]);
    } else if (!(fabs(time - want) <= tolerance) && may_tell(s, TELL_TIME)) {
        vlai_finding f = at_frame(s, 'W', "timestamp", episode, k);
        f.column = "timestamp";
        f.expected = vlai_value_real(want);
        f.found = vlai_value_real(time);
        vlai_report(s->findings, &f, "timestamp is %.6g, frame_index / fps is %.6g: frames are counted, so this is survived",
                    time, want);
    }
}

/* A run of rows that carry one episode_index. */
static void look_at_run(scan *s, int64_t index, int64_t first, int64_t end)
{
    vla_dataset *set = s->set;
    int64_t place = s->file->episode >= 0 ? s->file->episode : vlai_set_episode(set, index);
    if (s->file->episode >= 0 && s->have[EPISODE] && index != set->episodes[place].index && may_tell(s, TELL_UNKNOWN)) {
        vlai_finding f = at_frame(s, 'E', "episode-index", set->episodes[place].index, first);
        f.expected = vlai_value_whole(set->episodes[place].index);
        f.found = vlai_value_whole(index);
        vlai_report(s->findings, &f, "episode_index is %lld in the file of episode %lld", (long long)index,
                    (long long)set->episodes[place].index);
    }
    if (place < 0) {
        if (may_tell(s, TELL_UNKNOWN)) {
            vlai_finding f = at_frame(s, 'E', "episode-unknown", index, 0);
            vlai_report(s->findings, &f, "%lld rows carry episode_index %lld, which the episode table does not list",
                        (long long)(end - first), (long long)index);
        }
    } else {
        vlai_episode_row *row = &set->episodes[place];
        bool follows = row->found > 0 && row->file == s->number && row->file_row + row->found == first;
        if (row->found == 0) {
            row->file = s->number;
            row->file_row = first;
        } else if (!follows && may_tell(s, TELL_SPLIT)) {
            vlai_finding f = at_frame(s, 'E', "episode-split", index, row->found);
            vlai_report(s->findings, &f, "episode %lld goes on here after rows elsewhere: its frames must be together",
                        (long long)index);
        }
        row->found += end - first;
    }
    int64_t start = place >= 0 && set->episodes[place].file == s->number ? first - set->episodes[place].file_row : 0;
    for (int64_t r = first; r < end; r++)
        look_at_frame(s, index, r, start + r - first);
}

static vla_status scan_rows(scan *s, vla_error *err)
{
    vla_dataset *set = s->set;
    int64_t n = s->file->rows;
    if (n > INT64_MAX - s->file->first || (uint64_t)(s->file->first + n) > SIZE_MAX / sizeof(int32_t))
        return vlai_nomem(err, SIZE_MAX);
    size_t wanted = (size_t)(s->file->first + n);
    if (wanted > set->task_room) {
        size_t room = wanted + wanted / 2;
        int32_t *grown = vlai_grow(set->task_of, set->task_room * sizeof *grown, room * sizeof *grown);
        if (!grown)
            return vlai_nomem(err, room * sizeof *grown);
        set->task_of = grown;
        set->task_room = room;
    }
    for (int64_t r = 0; r < n; r++)
        set->task_of[s->file->first + r] = -1;
    int64_t fixed = s->file->episode >= 0 ? set->episodes[s->file->episode].index : -1;
    for (int64_t first = 0, end; first < n; first = end) {
        int64_t index = s->have[EPISODE] ? s->v[EPISODE].i64[first] : fixed;
        for (end = first + 1; end < n && (!s->have[EPISODE] || s->v[EPISODE].i64[end] == index); end++) {
        }
        look_at_run(s, index, first, end);
    }
    static const char *const kinds[] = {"frame-index", "index-gap",       "task-index",    "timestamp",
                                        "timestamp",   "episode-unknown", "episode-split", "null"};
    for (int k = 0; k < 8; k++)
        if (s->told[k] > REPORT_LIMIT) {
            vlai_finding f = k == TELL_TIME ? vlai_finding_warning(kinds[k], s->file->path)
                                            : vlai_finding_error(kinds[k], s->file->path);
            vlai_report(s->findings, &f, "%lld more of this kind in this file", (long long)(s->told[k] - REPORT_LIMIT));
        }
    return VLA_OK;
}

static vla_status scan_file(vla_dataset *set, int number, int64_t *expected_index, vlai_findings *findings, vla_error *err)
{
    scan s = {.set = set, .findings = findings, .file = &set->files[number], .number = number,
              .expected_index = *expected_index};
    vlai_data_file *file = s.file;
    file->first = set->scanned_rows;
    char path[4096];
    VLA_TRY(vlai_set_path(set, file->path, path, sizeof path, err));
    vla_error inner = VLA_ERROR_INIT;
    vlai_parquet *parquet = NULL;
    vla_status status = vlai_parquet_open(path, &parquet, &inner);
    if (status == VLA_E_NOMEM)
        return vlai_fail(err, status, "%s", inner.message);
    if (status != VLA_OK) {
        vlai_finding f = vlai_finding_error(vlai_fault_kind(path, status), file->path);
        f.bound = true;
        f.hint = inner.hint[0] ? inner.hint : NULL;
        if (file->episode >= 0) {
            f.episode = set->episodes[file->episode].index;
            set->episodes[file->episode].bad = true;
        }
        vlai_report(findings, &f, "%s", inner.message);
        *expected_index = -1;
        return VLA_OK;
    }
    file->rows = vlai_parquet_rows(parquet);
    declared_columns(&s, parquet);
    status = read_columns(&s, parquet, err);
    bool placed = s.have[EPISODE] || file->episode >= 0;
    if (status == VLA_OK && placed && (s.have[INDEX] || s.have[FRAME] || s.have[EPISODE])) {
        if (file->episode >= 0 && set->episodes[file->episode].from >= 0 && *expected_index < 0)
            s.expected_index = set->episodes[file->episode].from;
        status = scan_rows(&s, err);
        if (status == VLA_OK) {
            file->read = true;
            set->scanned_rows += file->rows;
            *expected_index = s.expected_index;
        }
    }
    for (int i = 0; i < COLUMNS; i++)
        vlai_parquet_values_fini(&s.v[i]);
    vlai_parquet_close(parquet);
    return status;
}

/* --- against the episode table --- */

/* The file that the table names for an episode. */
static vla_status claimed_path(const vla_dataset *set, const vlai_episode_row *row, char *out, size_t size, vla_error *err)
{
    vlai_template_fields fields = {.chunk_index = row->data_chunk, .file_index = row->data_file};
    return vlai_template_fill(set->data_path, &fields, out, size, err);
}

/* v3.0: episodes without rows. Those whose file is absent are one finding a file. */
static vla_status missing_files(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    int64_t *list = vlai_array((size_t)set->episode_count + 1, sizeof *list);
    if (!list)
        return vlai_nomem(err, (size_t)set->episode_count * sizeof *list);
    bool stale = false;
    vla_status status = VLA_OK;
    for (int64_t i = 0; i < set->episode_count && status == VLA_OK; i++) {
        vlai_episode_row *row = &set->episodes[i];
        char path[2048];
        if (row->data_chunk < 0 || row->bad)
            continue;
        status = claimed_path(set, row, path, sizeof path, err);
        if (status != VLA_OK)
            break;
        int number = vlai_set_data_file(set, path);
        if (row->found > 0) {
            if (number != row->file && !stale) {
                vlai_finding f = vlai_finding_warning("data-file-index", row->source);
                f.episode = row->index;
                f.expected = vlai_value_text(set->files[row->file].path);
                f.found = vlai_value_text(path);
                vlai_report(findings, &f, "the table says that the rows of episode %lld are in %s; they are in %s", (long long)row->index,
                            path, set->files[row->file].path);
                stale = true;
            }
            continue;
        }
        if (number >= 0 && set->files[number].read)
            continue; /* an empty or misnumbered episode: reported by its length */
        int64_t n = 0;
        for (int64_t k = i; k < set->episode_count; k++)
            if (set->episodes[k].found == 0 && set->episodes[k].data_chunk == row->data_chunk &&
                set->episodes[k].data_file == row->data_file) {
                set->episodes[k].bad = true;
                list[n++] = set->episodes[k].index;
            }
        if (number >= 0) /* present and unreadable: reported when it was opened */
            continue;
        vlai_finding f = vlai_finding_error("file-missing", path);
        f.bound = true;
        f.episodes = list;
        f.episode_count = n;
        f.hint = "the download is incomplete: fetch the file, or train on what is whole with --allow-partial";
        vlai_report(findings, &f, "the data file of %lld episodes (from episode %lld) is missing", (long long)n,
                    (long long)row->index);
    }
    vlai_free(list);
    return status;
}

static void look_at_lengths(vla_dataset *set, vlai_findings *findings)
{
    int64_t told = 0;
    bool hidden = false;
    for (int i = 0; i < set->file_count; i++)
        hidden = hidden || !set->files[i].read;
    for (int64_t i = 0; i < set->episode_count; i++) {
        vlai_episode_row *row = &set->episodes[i];
        if (row->bad || row->found == row->length)
            continue;
        row->bad = true;
        if (told++ >= REPORT_LIMIT || (hidden && row->found == 0 && set->version == 30))
            continue;
        vlai_finding f = vlai_finding_error("episode-length", row->source);
        f.bound = true;
        f.episode = row->index;
        f.expected = vlai_value_whole(row->length);
        f.found = vlai_value_whole(row->found);
        vlai_report(findings, &f, "episode %lld: the table says %lld frames, the data files hold %lld", (long long)row->index,
                    (long long)row->length, (long long)row->found);
    }
    if (!hidden && set->total_frames >= 0 && set->total_frames != set->scanned_rows) {
        vlai_finding f = vlai_finding_error("count", "meta/info.json");
        f.key = "total_frames";
        f.expected = vlai_value_whole(set->total_frames);
        f.found = vlai_value_whole(set->scanned_rows);
        vlai_report(findings, &f, "total_frames is %lld, the data files hold %lld rows", (long long)set->total_frames,
                    (long long)set->scanned_rows);
    }
    /* Claimed ranges are only compared: the rows were found by their own episode_index. */
    int64_t at = 0;
    for (int64_t i = 0; set->version == 30 && i < set->episode_count; i++) {
        const vlai_episode_row *row = &set->episodes[i];
        if (row->to >= 0 && (row->from != at || row->to - row->from != row->length)) {
            vlai_finding f = vlai_finding_error("episode-range", row->source);
            f.bound = row->bad;
            f.episode = row->index;
            f.expected = vlai_value_whole(at);
            f.found = vlai_value_whole(row->from);
            vlai_report(findings, &f, "dataset_from_index..dataset_to_index is %lld..%lld, expected %lld..%lld",
                        (long long)row->from, (long long)row->to, (long long)at, (long long)(at + row->length));
            break;
        }
        at += row->length;
    }
}

vla_status vlai_list_data(vla_dataset *set, vla_error *err)
{
    if (!set->data_path)
        return VLA_OK;
    return set->version == 30 ? listed_files(set, err) : episode_files(set, err);
}

vla_status vlai_load_rows(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    if (!set->data_path)
        return VLA_OK;
    if (set->file_count == 0 && set->episode_count == 0)
        return VLA_OK;
    int64_t expected_index = 0;
    for (int i = 0; i < set->file_count; i++)
        VLA_TRY(scan_file(set, i, &expected_index, findings, err));
    if (set->version == 30)
        VLA_TRY(missing_files(set, findings, err));
    look_at_lengths(set, findings);
    return VLA_OK;
}

int vlai_set_data_file(const vla_dataset *set, const char *path)
{
    for (int i = 0; i < set->file_count; i++)
        if (!strcmp(set->files[i].path, path))
            return i;
    return -1;
}

int64_t vlai_set_episode(const vla_dataset *set, int64_t index)
{
    int64_t low = 0, high = set->episode_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (set->episodes[middle].index < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low < set->episode_count && set->episodes[low].index == index ? low : -1;
}

int64_t vlai_set_locate(const vla_dataset *set, int file, int64_t row, int64_t *frame)
{
    for (int64_t i = 0; i < set->episode_count; i++) {
        const vlai_episode_row *e = &set->episodes[i];
        if (e->file == file && row >= e->file_row && row < e->file_row + e->found) {
            *frame = row - e->file_row;
            return i;
        }
    }
    return -1;
}
