#include "data/norm_stats.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/pool.h"
#include "base/work.h"

#include <math.h>
#include <string.h>

enum { MEAN, STD, Q01, Q99, STATS };
static const char *const stat_names[STATS] = {"mean", "std", "q01", "q99"};

/* Statistics of one vector: values[stat * dim + column]. */
typedef struct table {
    double *values;
    int64_t dim;
} table;

/* --- selection --- */

static inline void swap(float *a, float *b)
{
    float t = *a;
    *a = *b;
    *b = t;
}

void vlai_select_pair(float *values, int64_t n, int64_t k, float *at, float *next)
{
    int64_t low = 0, high = n - 1;
    while (low < high) { /* Hoare's quickselect; the pivot is the median of three */
        int64_t middle = low + (high - low) / 2;
        if (values[middle] < values[low])
            swap(&values[middle], &values[low]);
        if (values[high] < values[low])
            swap(&values[high], &values[low]);
        if (values[high] < values[middle])
            swap(&values[high], &values[middle]);
        float pivot = values[middle];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] < pivot)
                i++;
            while (pivot < values[j])
                j--;
            if (i <= j)
                swap(&values[i++], &values[j--]);
        }
        if (k <= j)
            high = j;
        else if (k >= i)
            low = i;
        else
            break;
    }
    *at = values[k];
    *next = values[k];
    for (int64_t i = k + 1; i < n; i++) /* what follows is not smaller: its least is the next in order */
        if (i == k + 1 || values[i] < *next)
            *next = values[i];
}

static double quantile(float *values, int64_t n, double q)
{
    double v = (double)(n - 1) * q;
    int64_t i = (int64_t)v;
    double gamma = v - (double)i;
    float a, b;
    vlai_select_pair(values, n, i, &a, &b);
    double difference = (double)b - (double)a;
    return gamma < 0.5 ? (double)a + difference * gamma : (double)b - difference * (1 - gamma);
}

/* Reorders `values`. */
static void describe(float *values, int64_t n, table *t, int64_t column)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)values[i];
    double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++)
        squares += ((double)values[i] - mean) * ((double)values[i] - mean);
    t->values[MEAN * t->dim + column] = mean;
    t->values[STD * t->dim + column] = sqrt(squares / (double)n);
    t->values[Q01 * t->dim + column] = quantile(values, n, 0.01);
    t->values[Q99 * t->dim + column] = quantile(values, n, 0.99);
}

/* --- plain columns --- */

typedef struct job {
    const float *data; /* (rows, dim) */
    int64_t rows, stride, column;
    table *to;
    int64_t to_column;
} job;

typedef struct work {
    const job *jobs;
    float **scratch; /* one per thread, `rows` floats */
} work;

static void run_job(void *context, int64_t tile, int thread)
{
    const work *w = context;
    const job *j = &w->jobs[tile];
    float *values = w->scratch[thread];
    vlai_work_add();
    for (int64_t i = 0; i < j->rows; i++)
        values[i] = j->data[i * j->stride + j->column];
    describe(values, j->rows, j->to, j->to_column);
}

static vla_status run_jobs(vlai_pool *pool, const job *jobs, int64_t count, int64_t rows, vla_error *err)
{
    int threads = vlai_pool_threads(pool);
    work w = {.jobs = jobs, .scratch = vlai_calloc((size_t)threads, sizeof(float *))};
    vla_status status = w.scratch ? VLA_OK : vlai_nomem(err, (size_t)threads * sizeof(float *));
    for (int t = 0; t < threads && status == VLA_OK; t++) {
        w.scratch[t] = vlai_array((size_t)rows + 1, sizeof(float));
        if (!w.scratch[t])
            status = vlai_nomem(err, (size_t)rows * sizeof(float));
    }
    if (status == VLA_OK)
        vlai_pool_run(pool, count, run_job, &w);
    for (int t = 0; w.scratch && t < threads; t++)
        vlai_free(w.scratch[t]);
    vlai_free(w.scratch);
    return status;
}

/* --- relative keys --- */

static bool ends_relative(const char *name)
{
    size_t n = strlen(name);
    return n >= 9 && !strcmp(name + n - 9, "_relative");
}

/* Last row of the episode that a row lies in. */
static int64_t last_row(const vla_dataset *set, int64_t row)
{
    const vla_episode *e = vla_dataset_episode(set, vla_dataset_episode_of(set, row));
    return e->first_row + e->length - 1;
}

/* Samples of one relative part, (anchors * chunk, dim): a layout of that part alone does the arithmetic of training. */
static vla_status relative_part(vla_dataset *set, const vlai_norm_request *request, const vlai_layout_part *part, int64_t at,
                                const float *state, int64_t state_dim, const float *action, int64_t action_dim,
                                vlai_pool *pool, table *to, vla_error *err)
{
    int64_t dim = part->dim, chunk = request->chunk, rows = vla_dataset_info_get(set)->rows;
    int64_t anchors = request->within_episodes ? rows : rows - chunk;
    if (at + dim > state_dim || at + dim > action_dim)
        return vlai_fail(err, VLA_E_SHAPE, "'%s' takes columns %lld to %lld, but actions have %lld and states %lld columns",
                         part->name, (long long)at, (long long)(at + dim - 1), (long long)action_dim, (long long)state_dim);
    if (chunk < 1 || anchors < 1)
        return vlai_fail(err, VLA_E_INVALID, "relative statistics need more frames (%lld) than a chunk has (%lld)",
                         (long long)rows, (long long)chunk);
    vlai_layout_part copy = *part;
    vlai_layout alone = {.parts = &copy, .count = 1, .total = dim, .width = dim, .euler = dim, .relative = true};
    size_t samples, bytes;
    if (!vlai_mul_size((size_t)anchors, (size_t)chunk, &samples) || !vlai_mul_size(samples, (size_t)dim * sizeof(float), &bytes))
        return vlai_nomem(err, SIZE_MAX);
    float *values = vlai_alloc(bytes);
    job *jobs = vlai_array((size_t)dim, sizeof *jobs);
    vla_status status = values && jobs ? VLA_OK : vlai_nomem(err, bytes);
    for (int64_t a = 0; a < anchors && status == VLA_OK; a++) {
        int64_t last = request->within_episodes ? last_row(set, a) : rows - 1;
        for (int64_t o = 0; o < chunk && status == VLA_OK; o++) {
            float *row = values + (a * chunk + o) * dim;
            memcpy(row, action + (a + o < last ? a + o : last) * action_dim + at, (size_t)dim * sizeof *row);
            status = vlai_layout_relative(&alone, row, dim, state + a * state_dim + at, dim, err);
        }
    }
    for (int64_t d = 0; d < dim && status == VLA_OK; d++)
        jobs[d] = (job){values, (int64_t)samples, dim, d, to, at + d};
    if (status == VLA_OK)
        status = run_jobs(pool, jobs, dim, (int64_t)samples, err);
    vlai_free(values);
    vlai_free(jobs);
    return status;
}

static vla_status relative_keys(vla_dataset *set, const vlai_norm_request *request, const float *state, int64_t state_dim,
                                const float *action, vlai_pool *pool, table *to, vla_error *err)
{
    int64_t at = 0;
    for (int i = 0; request->action_layout && i < request->action_layout->count; i++) {
        const vlai_layout_part *part = &request->action_layout->parts[i];
        if (part->skipped)
            continue;
        if (ends_relative(part->name))
            VLA_TRY(relative_part(set, request, part, at, state, state_dim, action, to->dim, pool, to, err));
        at += part->dim;
    }
    return VLA_OK;
}

/* --- 6D rotations --- */

/* The columns in the layout's form: *wide is a new table (rows, width), or NULL when the data set's columns serve. */
static vla_status widen(const vlai_layout *layout, const float *data, int64_t rows, int64_t *dim, float **wide, vla_error *err)
{
    *wide = NULL;
    if (!layout || !layout->six || *dim != layout->euler)
        return VLA_OK;
    size_t values, bytes;
    if (!vlai_mul_size((size_t)rows, (size_t)layout->width, &values) || !vlai_mul_size(values, sizeof **wide, &bytes))
        return vlai_nomem(err, SIZE_MAX);
    *wide = vlai_alloc(bytes ? bytes : 1);
    if (!*wide)
        return vlai_nomem(err, bytes);
    for (int64_t r = 0; r < rows; r++)
        vlai_layout_to_six(layout, data + r * *dim, *dim, *wide + r * layout->width);
    *dim = layout->width;
    return VLA_OK;
}

/* --- together --- */

static json_t *table_to_json(const table *t)
{
    json_t *object = json_object();
    for (int s = 0; s < STATS; s++) {
        json_t *list = json_array();
        for (int64_t d = 0; d < t->dim; d++)
            json_array_append_new(list, json_real(t->values[s * t->dim + d]));
        json_object_set_new(object, stat_names[s], list);
    }
    return object;
}

vla_status vlai_norm_stats(vla_dataset *set, const vlai_norm_request *request, json_t **out, vla_error *err)
{
    *out = NULL;
    table tables[2] = {{NULL, 0}, {NULL, 0}};
    const float *data[2];
    float *wide[2] = {NULL, NULL};
    const char *const keys[2] = {request->state_key, request->action_key};
    const vlai_layout *const layouts[2] = {request->state_layout, request->action_layout};
    int64_t rows = vla_dataset_info_get(set)->rows, count = 0;
    for (int i = 0; i < 2; i++)
        VLA_TRY(vla_dataset_numbers(set, keys[i], &data[i], &tables[i].dim, err));
    vlai_pool *pool = NULL;
    job *jobs = NULL;
    vla_status status = VLA_OK;
    for (int i = 0; i < 2 && status == VLA_OK; i++) {
        status = widen(layouts[i], data[i], rows, &tables[i].dim, &wide[i], err);
        data[i] = wide[i] ? wide[i] : data[i];
    }
    if (status == VLA_OK) {
        jobs = vlai_array((size_t)(tables[0].dim + tables[1].dim), sizeof *jobs);
        status = jobs ? vlai_pool_create(request->threads, &pool, err) : vlai_nomem(err, sizeof *jobs);
    }
    for (int i = 0; i < 2 && status == VLA_OK; i++) {
        tables[i].values = vlai_array((size_t)tables[i].dim * STATS, sizeof(double));
        if (!tables[i].values)
            status = vlai_nomem(err, (size_t)tables[i].dim * STATS * sizeof(double));
        for (int64_t d = 0; d < tables[i].dim && status == VLA_OK; d++)
            jobs[count++] = (job){data[i], rows, tables[i].dim, d, &tables[i], d};
    }
    if (status == VLA_OK)
        status = run_jobs(pool, jobs, count, rows, err);
    if (status == VLA_OK)
        status = relative_keys(set, request, data[0], tables[0].dim, data[1], pool, &tables[1], err);
    if (status == VLA_OK) {
        json_t *stats = json_object();
        for (int i = 0; i < 2; i++)
            json_object_set_new(stats, keys[i], table_to_json(&tables[i]));
        *out = json_pack("{s:o}", "norm_stats", stats);
        if (!*out)
            status = vlai_nomem(err, 1);
    }
    vlai_free(tables[0].values);
    vlai_free(tables[1].values);
    vlai_free(wide[0]);
    vlai_free(wide[1]);
    vlai_free(jobs);
    vlai_pool_destroy(pool);
    return status;
}
