/* Whole numeric columns of the chosen rows, read once. Every value is checked on the way: training never meets a NaN, a
 * null or a short vector. */
#include "data/set.h"

#include "base/fail.h"
#include "base/text.h"
#include "format/parquet.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static size_t value_size(int kind)
{
    return kind == VLAI_PARQUET_F32 ? sizeof(float) : sizeof(double); /* int64_t is as wide as double */
}

static vla_status no_column(const vla_dataset *set, const char *name, vla_error *err)
{
    const char *names[256] = {NULL};
    char list[600] = "";
    size_t count = 0, used = 0;
    for (int64_t i = 0; i < set->feature_count && count < 256; i++) {
        if (set->features[i].kind != VLA_FEATURE_NUMBER)
            continue;
        names[count++] = set->features[i].name;
        int n = snprintf(list + used, sizeof list - used, "%s'%s'", used ? ", " : "", set->features[i].name);
        used = n < 0 || (size_t)n >= sizeof list - used ? sizeof list - 1 : used + (size_t)n;
    }
    const char *near = vlai_nearest(name, names, count);
    vla_status status = vlai_fail(err, VLA_E_NOT_FOUND, "%s: no numeric column '%s'; the dataset has %s", set->root, name,
                                  list);
    return near ? vlai_hint(err, status, "did you mean '%s'?", near) : status;
}

/* One row of a file, into row `row` of the column. */
static vla_status take_row(const vla_dataset *set, vlai_column *column, const vlai_parquet_values *v, int64_t r,
                           int64_t row, const char *path, const vlai_episode_row *episode, int64_t frame, vla_error *err)
{
    int64_t n = v->offsets[r + 1] - v->offsets[r], dim = column->dim;
    if (v->null[r])
        return vlai_fail(err, VLA_E_CORRUPT, "%s/%s: column '%s' is null in episode %lld, frame %lld", set->root, path,
                         column->name, (long long)episode->index, (long long)frame);
    if (n != dim)
        return vlai_fail(err, VLA_E_SHAPE, "%s/%s: column '%s' has %lld values in episode %lld, frame %lld; expected %lld",
                         set->root, path, column->name, (long long)n, (long long)episode->index, (long long)frame,
                         (long long)dim);
    const int64_t at = v->offsets[r];
    switch (column->kind) {
    case VLAI_PARQUET_F32:
        for (int64_t d = 0; d < dim; d++)
            if (!isfinite(v->f32[at + d]))
                return vlai_fail_hint(err, VLA_E_NONFINITE, "repair or leave out that episode (vla check lists them all)",
                                      "%s/%s: column '%s' is %g in episode %lld, frame %lld, dim %lld", set->root, path,
                                      column->name, (double)v->f32[at + d], (long long)episode->index, (long long)frame,
                                      (long long)d);
        memcpy((float *)column->data + row * dim, v->f32 + at, (size_t)dim * sizeof(float));
        break;
    case VLAI_PARQUET_F64:
        for (int64_t d = 0; d < dim; d++)
            if (!isfinite(v->f64[at + d]))
                return vlai_fail(err, VLA_E_NONFINITE, "%s/%s: column '%s' is %g in episode %lld, frame %lld, dim %lld",
                                 set->root, path, column->name, v->f64[at + d], (long long)episode->index,
                                 (long long)frame, (long long)d);
        memcpy((double *)column->data + row * dim, v->f64 + at, (size_t)dim * sizeof(double));
        break;
    default: memcpy((int64_t *)column->data + row * dim, v->i64 + at, (size_t)dim * sizeof(int64_t));
    }
    return VLA_OK;
}

/* The chosen episodes of one file, from one read. `first` and `end` are places in the list of chosen episodes. */
static vla_status take_file(vla_dataset *set, vlai_column *column, int64_t first, int64_t end, vla_error *err)
{
    const vlai_episode_row *a = &set->episodes[set->chosen_row[first]], *b = &set->episodes[set->chosen_row[end - 1]];
    const char *path = set->files[a->file].path;
    char full[4096];
    VLA_TRY(vlai_set_path(set, path, full, sizeof full, err));
    vlai_parquet *parquet = NULL;
    vlai_parquet_values v = {0};
    vla_status status = vlai_parquet_open(full, &parquet, err);
    if (status != VLA_OK)
        return status;
    const vlai_parquet_column *stored = vlai_parquet_find(parquet, column->name);
    if (!stored) {
        status = vla_dataset_find(set, column->name)
                     ? vlai_fail(err, VLA_E_CORRUPT, "%s: the column '%s' is missing", full, column->name)
                     : no_column(set, column->name, err);
        goto done;
    }
    if (!column->data) { /* the first row confirms the width before anything is sized by it */
        VLA_TRY_GOTO(vlai_parquet_read(parquet, stored, a->file_row, 1, column->kind, &v, err), done);
        if (!vla_dataset_find(set, column->name))
            column->dim = v.count;
        vlai_column probe = *column;
        char one[8]; /* only the checks of the row matter here */
        probe.data = one;
        if (v.count != column->dim || v.nulls)
            VLA_TRY_GOTO(take_row(set, &probe, &v, 0, 0, path, a, 0, err), done);
        vlai_parquet_values_fini(&v);
        size_t bytes;
        if (column->dim < 1 || !vlai_mul_size((size_t)set->rows, (size_t)column->dim, &bytes) ||
            !vlai_mul_size(bytes, value_size(column->kind), &bytes)) {
            status = vlai_fail(err, VLA_E_SHAPE, "%s: column '%s' has %lld values a row", full, column->name,
                               (long long)column->dim);
            goto done;
        }
        column->data = vlai_alloc(bytes);
        if (!column->data) {
            status = vlai_nomem(err, bytes);
            goto done;
        }
    }
    int64_t low = a->file_row, rows = b->file_row + b->length - low;
    VLA_TRY_GOTO(vlai_parquet_read(parquet, stored, low, rows, column->kind, &v, err), done);
    for (int64_t i = first; i < end && status == VLA_OK; i++) {
        const vlai_episode_row *e = &set->episodes[set->chosen_row[i]];
        for (int64_t k = 0; k < e->length && status == VLA_OK; k++)
            status = take_row(set, column, &v, e->file_row - low + k, set->chosen[i].first_row + k, path, e, k, err);
    }
done:
    vlai_parquet_values_fini(&v);
    vlai_parquet_close(parquet);
    return status;
}

static void free_column(vlai_column *column)
{
    if (column->mapping)
        munmap(column->mapping, column->mapping_size);
    else
        vlai_free(column->data);
    vlai_free(column);
}

void vlai_columns_free(vla_dataset *set)
{
    while (set->columns) {
        vlai_column *next = set->columns->next;
        free_column(set->columns);
        set->columns = next;
    }
}

static vla_status load_column(vla_dataset *set, vlai_column *column, vla_error *err)
{
    if (vlai_sidecar_column_load(set, column))
        return VLA_OK;
    for (int64_t first = 0, end; first < set->chosen_count; first = end) {
        const vlai_episode_row *e = &set->episodes[set->chosen_row[first]];
        for (end = first + 1; end < set->chosen_count && set->episodes[set->chosen_row[end]].file == e->file; end++) {
        }
        if (e->file >= 0 && e->length > 0)
            VLA_TRY(take_file(set, column, first, end, err));
    }
    if (!column->data)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: column '%s': no rows", set->root, column->name);
    vlai_sidecar_column_save(set, column);
    return VLA_OK;
}

static vla_status get_column(vla_dataset *set, const char *name, int kind, const void **out, int64_t *dim, vla_error *err)
{
    vla_status status = VLA_OK;
    pthread_mutex_lock(&set->column_lock);
    vlai_column *column = set->columns;
    while (column && (column->kind != kind || strcmp(column->name, name)))
        column = column->next;
    if (!column) {
        const vla_feature *feature = vla_dataset_find(set, name);
        column = vlai_calloc(1, sizeof *column);
        if (!column || !(column->name = vlai_set_strdup(set, name))) {
            vlai_free(column);
            column = NULL;
            status = vlai_nomem(err, sizeof *column);
        } else if (feature && feature->kind != VLA_FEATURE_NUMBER) {
            status = no_column(set, name, err);
        } else {
            column->kind = kind;
            column->dim = feature ? feature->dim : 0;
            status = load_column(set, column, err);
        }
        if (status == VLA_OK) {
            column->next = set->columns;
            set->columns = column;
        } else if (column) {
            free_column(column);
        }
    }
    if (status == VLA_OK) {
        *out = column->data;
        if (dim)
            *dim = column->dim;
    }
    pthread_mutex_unlock(&set->column_lock);
    return status;
}

vla_status vla_dataset_numbers(vla_dataset *set, const char *name, const float **out, int64_t *dim, vla_error *err)
{
    const void *data = NULL;
    vla_status status = get_column(set, name, VLAI_PARQUET_F32, &data, dim, err);
    *out = data;
    return status;
}

vla_status vla_dataset_doubles(vla_dataset *set, const char *name, const double **out, int64_t *dim, vla_error *err)
{
    const void *data = NULL;
    vla_status status = get_column(set, name, VLAI_PARQUET_F64, &data, dim, err);
    *out = data;
    return status;
}

vla_status vla_dataset_integers(vla_dataset *set, const char *name, const int64_t **out, int64_t *dim, vla_error *err)
{
    const void *data = NULL;
    vla_status status = get_column(set, name, VLAI_PARQUET_I64, &data, dim, err);
    *out = data;
    return status;
}
