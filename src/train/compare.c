#include "train/compare.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "train/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH = 4096, VALUES = 3 };

/* What is compared. */
static const char *const keys[VALUES] = {"loss", "grad_norm", "skipped"};

typedef struct line {
    int64_t step;
    double value[VALUES]; /* NaN: null or absent */
} line;

typedef struct lines {
    line *items;
    size_t count, capacity;
} lines;

static int by_step(const void *a, const void *b)
{
    int64_t x = ((const line *)a)->step, y = ((const line *)b)->step;
    return (x > y) - (x < y);
}

static vla_status add_line(lines *l, const json_t *record, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&l->items, &l->capacity, l->count, sizeof *l->items, err));
    line *to = &l->items[l->count++];
    to->step = (int64_t)json_integer_value(json_object_get(record, "step"));
    for (int k = 0; k < VALUES; k++) {
        const json_t *v = json_object_get(record, keys[k]);
        to->value[k] = json_is_number(v) ? json_number_value(v) : NAN;
    }
    return VLA_OK;
}

/* The last line may have been cut by a kill; any other that is no record is damage. */
static vla_status read_lines(const char *run, lines *out, vla_error *err)
{
    char path[PATH], *data;
    size_t size;
    if (!vlai_is_dir(run))
        snprintf(path, sizeof path, "%s", run);
    else if (!vlai_path_join(path, sizeof path, run, VLAI_METRICS_FILE))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", run);
    VLA_TRY(vlai_read_file(path, 0, &data, &size, err));
    vla_status status = VLA_OK;
    int64_t number = 1;
    for (const char *at = data, *end; at < data + size && status == VLA_OK; number++, at = end + 1) {
        const char *ended = memchr(at, '\n', size - (size_t)(at - data));
        end = ended ? ended : data + size;
        size_t n = (size_t)(end - at);
        json_t *record = json_loadb(at, n, 0, NULL);
        if (json_is_integer(json_object_get(record, "step")))
            status = add_line(out, record, err);
        else if (n && ended)
            status = vlai_fail(err, VLA_E_FORMAT, "%s:%" PRId64 ": no record of a step", path, number);
        json_decref(record);
    }
    vlai_free(data);
    if (status == VLA_OK && out->count)
        qsort(out->items, out->count, sizeof *out->items, by_step);
    return status;
}

/* The value of a step that differs; -1: none. Notes the largest difference. */
static int differs(const line *x, const line *y, double rtol, double *worst, double *apart)
{
    int found = -1;
    for (int k = 0; k < VALUES; k++) {
        double a = x->value[k], b = y->value[k], d = a == b || (!isfinite(a) && !isfinite(b)) ? 0 : fabs(a - b) / fabs(a);
        if (isfinite(a) && isfinite(b) && d > *worst)
            *worst = d;
        if (found < 0 && !(d <= (k < 2 ? rtol : 0))) { /* also NaN */
            found = k;
            *apart = d;
        }
    }
    return found;
}

static void compare(const lines *a, const lines *b, double rtol, vlai_comparison *out)
{
    char why[256] = "";
    for (size_t i = 0, j = 0; i < a->count || j < b->count;) {
        const line *x = i < a->count ? &a->items[i] : NULL, *y = j < b->count ? &b->items[j] : NULL;
        if (!y || (x && x->step < y->step)) {
            out->alone[0]++;
            i++;
        } else if (!x || y->step < x->step) {
            out->alone[1]++;
            j++;
        } else {
            double apart = 0;
            int k = differs(x, y, rtol, &out->worst, &apart);
            if (k >= 0 && !*why) {
                out->first = x->step;
                snprintf(why, sizeof why, "step %" PRId64 ": %s %.9g and %.9g, %.3g apart", x->step, keys[k], x->value[k], y->value[k], apart);
            }
            out->steps++;
            i++;
            j++;
        }
    }
    out->same = !*why;
    size_t at;
    if (out->same)
        at = (size_t)snprintf(out->text, sizeof out->text, "PASS: %" PRId64 " step%s, loss and grad_norm within %g (at most %.3g apart)", out->steps, out->steps == 1 ? "" : "s", rtol, out->worst);
    else
        at = (size_t)snprintf(out->text, sizeof out->text, "FAIL: %s, where %g is allowed; the first of %" PRId64 " step%s that differs", why, rtol, out->steps, out->steps == 1 ? "" : "s");
    for (int side = 0; side < 2; side++)
        if (out->alone[side] && at < sizeof out->text)
            at += (size_t)snprintf(out->text + at, sizeof out->text - at, "; not compared: %" PRId64 " step%s of the %s", out->alone[side],
                                   out->alone[side] == 1 ? "" : "s", side ? "second" : "first");
}

vla_status vlai_compare_runs(const char *a, const char *b, double rtol, vlai_comparison *out, vla_error *err)
{
    lines x = {0}, y = {0};
    *out = (vlai_comparison){0};
    vla_status status = read_lines(a, &x, err);
    if (status == VLA_OK)
        status = read_lines(b, &y, err);
    if (status == VLA_OK)
        compare(&x, &y, rtol, out);
    if (status == VLA_OK && out->steps == 0)
        status = vlai_fail(err, VLA_E_INVALID, "%s and %s have no step in common: %zu and %zu are recorded", a, b, x.count, y.count);
    vlai_free(x.items);
    vlai_free(y.items);
    return status;
}
