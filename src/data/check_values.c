/* Every number of every numeric column: nulls, lengths, NaN, infinity; then what the distribution says (dimensions that
 * never move, outliers, stored statistics that do not fit). */
#include "base/fail.h"
#include "base/json.h"
#include "data/check.h"
#include "format/parquet.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REPORT_LIMIT = 10, SAMPLE_ROWS = 100000 };

/* Running moments of one dimension (Welford), and a sample of its values for quantiles. */
typedef struct dimension {
    double mean, squares, low, high;
    int64_t count;
} dimension;

typedef struct column {
    const vla_feature *feature;
    dimension *dims;
    float *sample; /* (sampled, dim) */
    int64_t sampled, stride;
    int64_t nulls, lengths, infinite; /* reported so far */
    bool dtype_told, ready;
    vlai_angles angles;
} column;

static vlai_finding at_row(const vla_dataset *set, char level, const char *kind, const column *c, int file, int64_t row)
{
    const char *path = set->files[file].path;
    vlai_finding f = level == 'E' ? vlai_finding_error(kind, path) : vlai_finding_warning(kind, path);
    int64_t frame = -1, episode = vlai_set_locate(set, file, row, &frame);
    f.column = c->feature->name;
    f.episode = episode >= 0 ? set->episodes[episode].index : -1;
    f.frame = episode >= 0 ? frame : row;
    return f;
}

static const char *dim_name(const vla_feature *feature, int64_t d)
{
    return feature->names && feature->name_count == feature->dim ? feature->names[d] : "";
}

static void take_value(dimension *d, double x)
{
    d->low = d->count && d->low < x ? d->low : x;
    d->high = d->count && d->high > x ? d->high : x;
    d->count++;
    double step = x - d->mean;
    d->mean += step / (double)d->count;
    d->squares += step * (x - d->mean);
}

/* Value row r of a read that began at row `first` of the file. */
static void look_at_row(const vla_dataset *set, column *c, const vlai_parquet_values *v, int file, int64_t first, int64_t r,
                        vlai_findings *findings)
{
    int64_t n = v->offsets[r + 1] - v->offsets[r], dim = c->feature->dim;
    if (v->null[r]) {
        if (c->nulls++ < REPORT_LIMIT) {
            vlai_finding f = at_row(set, 'E', "null", c, file, first + r);
            vlai_report(findings, &f, "column '%s' %s", c->feature->name, v->null[r] == 1 ? "is null" : "holds a null");
        }
        return;
    }
    if (n != dim) {
        if (c->lengths++ < REPORT_LIMIT) {
            vlai_finding f = at_row(set, 'E', "list-length", c, file, first + r);
            f.expected = vlai_value_whole(dim);
            f.found = vlai_value_whole(n);
            vlai_report(findings, &f, "column '%s' has %lld values, expected %lld", c->feature->name, (long long)n,
                        (long long)dim);
        }
        return;
    }
    const double *x = v->f64 + v->offsets[r];
    for (int64_t d = 0; d < dim; d++)
        if (!isfinite(x[d])) {
            if (c->infinite++ < REPORT_LIMIT) {
                vlai_finding f = at_row(set, 'E', "not-finite", c, file, first + r);
                f.dim = d;
                f.found = vlai_value_text(isnan(x[d]) ? "nan" : x[d] > 0 ? "inf" : "-inf");
                vlai_report(findings, &f, "column '%s' is %g", c->feature->name, x[d]);
            }
            return;
        }
    if (!c->ready)
        return;
    for (int64_t d = 0; d < dim; d++)
        take_value(&c->dims[d], x[d]);
    if (c->angles.any || c->angles.quaternions) {
        vlai_finding f = at_row(set, 'W', "angle-jump", c, file, first + r);
        vlai_angles_look(&c->angles, c->feature, x, set->files[file].first + first + r, f.frame, f, findings);
    }
    if ((set->files[file].first + first + r) % c->stride == 0 && c->sampled < SAMPLE_ROWS) {
        for (int64_t d = 0; d < dim; d++)
            c->sample[c->sampled * dim + d] = (float)x[d];
        c->sampled++;
    }
}

static const char *stored_as(const char *dtype)
{
    static const char *const pairs[][2] = {{"float32", "FLOAT"}, {"float64", "DOUBLE"},  {"float16", "FLOAT16"}, {"int64", "INT64"},
                                           {"int32", "INT32"},   {"int16", "INT32"},    {"int8", "INT32"},
                                           {"uint8", "INT32"},   {"uint16", "INT32"},   {"bool", "BOOLEAN"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (!strcmp(pairs[i][0], dtype))
            return pairs[i][1];
    return NULL;
}

static vla_status look_at_column(const vla_dataset *set, column *c, vlai_parquet *parquet,
                                 const vlai_parquet_column *stored, int file, vlai_findings *findings, vla_error *err)
{
    enum { WIDE = 256 }; /* arrays such as depth pictures are read by row groups, all else at once */
    bool wide = c->feature->dim > WIDE;
    int steps = wide ? vlai_parquet_group_count(parquet) : 1;
    for (int g = 0; g < steps; g++) {
        int64_t first = wide ? vlai_parquet_group_first(parquet, g) : 0;
        int64_t rows = wide ? vlai_parquet_group_rows(parquet, g) : vlai_parquet_rows(parquet);
        vlai_parquet_values v;
        vla_error inner = VLA_ERROR_INIT;
        vla_status status = vlai_parquet_read(parquet, stored, first, rows, VLAI_PARQUET_F64, &v, &inner);
        if (status == VLA_E_NOMEM)
            return vlai_fail(err, status, "%s", inner.message);
        if (status != VLA_OK) {
            vlai_finding f = vlai_finding_error(status == VLA_E_DTYPE ? "dtype" : "file-damaged", set->files[file].path);
            f.column = c->feature->name;
            vlai_report(findings, &f, "%s", inner.message);
            return VLA_OK;
        }
        for (int64_t r = 0; r < v.rows; r++)
            look_at_row(set, c, &v, file, first, r, findings);
        vlai_parquet_values_fini(&v);
    }
    return VLA_OK;
}

static vla_status look_at_file(const vla_dataset *set, column *columns, int64_t count, int file, vlai_findings *findings,
                               vla_error *err)
{
    char path[4096];
    VLA_TRY(vlai_set_path(set, set->files[file].path, path, sizeof path, err));
    vlai_parquet *parquet;
    vla_error inner = VLA_ERROR_INIT;
    vla_status status = vlai_parquet_open(path, &parquet, &inner);
    if (status != VLA_OK) /* reported when it was scanned */
        return status == VLA_E_NOMEM ? vlai_fail(err, status, "%s", inner.message) : VLA_OK;
    for (int64_t i = 0; i < count && status == VLA_OK; i++) {
        column *c = &columns[i];
        const vlai_parquet_column *stored = vlai_parquet_find(parquet, c->feature->name);
        if (!stored)
            continue;
        const char *want = stored_as(c->feature->dtype);
        if (want && strcmp(want, stored->stored) && !c->dtype_told) {
            vlai_finding f = vlai_finding_warning("dtype", set->files[file].path);
            f.column = c->feature->name;
            f.expected = vlai_value_text(c->feature->dtype);
            f.found = vlai_value_text(stored->stored);
            vlai_report(findings, &f, "column '%s' is declared %s and stored as %s", c->feature->name, c->feature->dtype,
                        stored->stored);
            c->dtype_told = true;
        }
        status = look_at_column(set, c, parquet, stored, file, findings, err);
    }
    vlai_parquet_close(parquet);
    return status;
}

/* --- distributions --- */

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void look_at_dim(const vla_dataset *set, const column *c, int64_t d, float *scratch, vlai_findings *findings)
{
    const dimension *m = &c->dims[d];
    const char *name = dim_name(c->feature, d), *file = set->files[0].path;
    if (m->count < 2)
        return;
    double std = sqrt(m->squares / (double)m->count);
    for (int64_t i = 0; i < c->sampled; i++)
        scratch[i] = c->sample[i * c->feature->dim + d];
    qsort(scratch, (size_t)c->sampled, sizeof *scratch, by_value);
    double q01 = c->sampled ? scratch[c->sampled / 100] : m->low, q99 = c->sampled ? scratch[c->sampled - 1 - c->sampled / 100] : m->high;
    if (std < 1e-6) {
        vlai_finding f = vlai_finding_warning("constant-dim", file);
        f.column = c->feature->name;
        f.dim = d;
        f.found = vlai_value_real(m->mean);
        vlai_report(findings, &f, "column '%s' %s is constant (%.6g; q01 %.6g, q99 %.6g, std %.3g): normalisation maps it to -1",
                    c->feature->name, name, m->mean, q01, q99, std);
    } else if (c->sampled >= 100 && q99 > q01 && (m->low < q01 - 10 * (q99 - q01) || m->high > q99 + 10 * (q99 - q01))) {
        vlai_finding f = vlai_finding_warning("outlier", file);
        f.column = c->feature->name;
        f.dim = d;
        f.found = vlai_value_real(m->low < q01 - 10 * (q99 - q01) ? m->low : m->high);
        vlai_report(findings, &f, "column '%s' %s reaches %.6g..%.6g, while 98 %% lies in %.6g..%.6g", c->feature->name, name,
                    m->low, m->high, q01, q99);
    }
}

/* Stored against recomputed: off by more than one part in a hundred of the dimension's own scale. */
static void compare_stats(const column *c, const json_t *entry, vlai_findings *findings)
{
    static const char *const keys[] = {"mean", "std", "min", "max"};
    for (int k = 0; k < 4; k++) {
        const json_t *stored = json_object_get(entry, keys[k]);
        for (int64_t d = 0; d < c->feature->dim; d++) {
            const json_t *v = json_is_array(stored) ? json_array_get(stored, (size_t)d) : c->feature->dim == 1 ? stored : NULL;
            const dimension *m = &c->dims[d];
            double std = sqrt(m->squares / (double)m->count);
            const double own[] = {m->mean, std, m->low, m->high};
            double scale = fmax(fabs(own[k]), m->high - m->low);
            if (!json_is_number(v) || fabs(json_number_value(v) - own[k]) <= 0.01 * scale + 1e-6)
                continue;
            vlai_finding f = vlai_finding_warning("stats-off", "meta/stats.json");
            f.column = c->feature->name;
            f.key = keys[k];
            f.dim = d;
            f.expected = vlai_value_real(own[k]);
            f.found = vlai_value_real(json_number_value(v));
            vlai_report(findings, &f, "the stored %s of '%s' dim %lld is %.6g, the data give %.6g: stored statistics are not "
                                      "used for training",
                        keys[k], c->feature->name, (long long)d, json_number_value(v), own[k]);
            break;
        }
    }
}

static void look_at_action(const column *columns, int64_t count, vlai_findings *findings, const char *file)
{
    const column *state = NULL, *action = NULL;
    for (int64_t i = 0; i < count; i++) {
        const char *name = columns[i].feature->name;
        if (!strcmp(name, "observation.state") || !strcmp(name, "state"))
            state = &columns[i];
        if (!strcmp(name, "action") || !strcmp(name, "actions"))
            action = &columns[i];
    }
    if (!action || action->sampled < 2 || !action->ready)
        return;
    int64_t n = action->sampled * action->feature->dim, zero = 0;
    while (zero < n && action->sample[zero] == 0)
        zero++;
    if (zero == n) {
        vlai_finding f = vlai_finding_warning("action-zero", file);
        f.column = action->feature->name;
        vlai_report(findings, &f, "every action is zero");
        return;
    }
    if (!state || !state->ready || state->feature->dim != action->feature->dim || state->stride != 1 ||
        state->sampled != action->sampled)
        return;
    int64_t equal = 0, dim = action->feature->dim;
    for (int64_t r = 0; r + 1 < action->sampled; r++)
        equal += !memcmp(action->sample + r * dim, state->sample + (r + 1) * dim, (size_t)dim * sizeof(float));
    if (equal > (action->sampled - 1) * 9 / 10) {
        vlai_finding f = vlai_finding_warning("action-is-next-state", file);
        f.column = action->feature->name;
        vlai_report(findings, &f, "the action is exactly the next state in %lld of %lld frames: the set may hold observations "
                                  "where commands are wanted",
                    (long long)equal, (long long)(action->sampled - 1));
    }
}

static bool is_default(const char *name)
{
    return !strcmp(name, "timestamp") || !strcmp(name, "frame_index") || !strcmp(name, "episode_index") ||
           !strcmp(name, "index") || !strcmp(name, "task_index");
}

vla_status vlai_check_values(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    column *columns = vlai_calloc((size_t)set->feature_count + 1, sizeof *columns);
    if (!columns)
        return vlai_nomem(err, (size_t)set->feature_count * sizeof *columns);
    vla_status status = VLA_OK;
    int64_t count = 0;
    float *scratch = NULL;
    json_t *stats = NULL;
    char path[4096];
    int64_t stride = set->scanned_rows / SAMPLE_ROWS + 1, sample = set->scanned_rows < SAMPLE_ROWS ? set->scanned_rows : SAMPLE_ROWS;
    for (int64_t i = 0; i < set->feature_count; i++) {
        const vla_feature *feature = &set->features[i];
        if (feature->kind != VLA_FEATURE_NUMBER || is_default(feature->name))
            continue;
        column *c = &columns[count++];
        c->feature = feature;
        c->stride = stride;
        if (feature->dim > 4096) /* pictures as numbers: only nulls, lengths and NaN are looked for */
            continue;
        c->dims = vlai_calloc((size_t)feature->dim, sizeof *c->dims);
        c->sample = vlai_array((size_t)(sample + 1) * (size_t)feature->dim, sizeof *c->sample);
        if (!c->dims || !c->sample) {
            status = vlai_nomem(err, (size_t)sample * (size_t)feature->dim * sizeof *c->sample);
            goto done;
        }
        status = vlai_angles_make(feature, &c->angles, err);
        if (status != VLA_OK)
            goto done;
        c->ready = true;
    }
    for (int i = 0; i < set->file_count && status == VLA_OK; i++)
        if (set->files[i].read)
            status = look_at_file(set, columns, count, i, findings, err);
    if (status != VLA_OK || set->file_count == 0)
        goto done;
    scratch = vlai_array((size_t)sample + 1, sizeof *scratch);
    if (!scratch) {
        status = vlai_nomem(err, (size_t)sample * sizeof *scratch);
        goto done;
    }
    VLA_TRY_GOTO(vlai_set_path(set, "meta/stats.json", path, sizeof path, err), done);
    if (!vlai_file_fault(path)) { /* its faults are reported elsewhere */
        vla_error inner = VLA_ERROR_INIT;
        if (vlai_json_load(path, &stats, &inner) == VLA_E_NOMEM) {
            status = vlai_fail(err, VLA_E_NOMEM, "%s", inner.message);
            goto done;
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const column *c = &columns[i];
        if (!c->ready || c->dims[0].count == 0 || c->infinite || c->nulls || c->lengths)
            continue;
        for (int64_t d = 0; d < c->feature->dim && c->feature->rank <= 1; d++)
            look_at_dim(set, c, d, scratch, findings);
        if (json_is_object(stats) && json_object_get(stats, c->feature->name))
            compare_stats(c, json_object_get(stats, c->feature->name), findings);
    }
    look_at_action(columns, count, findings, set->files[0].path);
done:
    for (int64_t i = 0; i < count; i++) {
        vlai_free(columns[i].dims);
        vlai_free(columns[i].sample);
        vlai_angles_fini(&columns[i].angles);
    }
    vlai_free(columns);
    vlai_free(scratch);
    json_decref(stats);
    return status;
}
