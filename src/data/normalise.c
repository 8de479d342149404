#include "data/normalise.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/text.h"

#include <math.h>
#include <string.h>

static vla_status norm_alloc(int64_t dims, vlai_norm *out, vla_error *err)
{
    *out = (vlai_norm){.dims = dims};
    size_t n = dims > 0 ? (size_t)dims : 1;
    out->min = vlai_calloc(n, sizeof(float));
    out->delta = vlai_calloc(n, sizeof(float));
    double **wide[] = {&out->mean, &out->std, &out->q01, &out->q99};
    bool failed = !out->min || !out->delta;
    for (int i = 0; i < 4; i++)
        failed |= !(*wide[i] = vlai_calloc(n, sizeof(double)));
    if (!failed)
        return VLA_OK;
    vlai_norm_fini(out);
    return vlai_nomem(err, n * sizeof(double));
}

vla_status vlai_norm_make(int64_t dims, const double *q01, const double *q99, const double *mean, const double *std,
                          vlai_norm *out, vla_error *err)
{
    VLA_TRY(norm_alloc(dims, out, err));
    for (int64_t i = 0; i < dims; i++) {
        out->q01[i] = q01[i];
        out->q99[i] = q99[i];
        out->mean[i] = mean ? mean[i] : NAN;
        out->std[i] = std ? std[i] : NAN;
        out->min[i] = (float)q01[i];
        out->delta[i] = (float)q99[i] - (float)q01[i];
    }
    return VLA_OK;
}

vla_status vlai_norm_copy(const vlai_norm *from, vlai_norm *out, vla_error *err)
{
    return vlai_norm_make(from->dims, from->q01, from->q99, from->mean, from->std, out, err);
}

void vlai_norm_fini(vlai_norm *n)
{
    vlai_free(n->min);
    vlai_free(n->delta);
    vlai_free(n->mean);
    vlai_free(n->std);
    vlai_free(n->q01);
    vlai_free(n->q99);
    *n = (vlai_norm){0};
}

/* One list of numbers; nested lists are not taken. A missing list gives NULL unless it is needed. */
static vla_status read_list(const json_t *object, const char *name, const char *key, bool needed, const char *where,
                            double **out, int64_t *count, vla_error *err)
{
    *out = NULL;
    const json_t *list = json_object_get(object, name);
    if (!list && !needed)
        return VLA_OK;
    if (!json_is_array(list))
        return vlai_fail_hint(err, VLA_E_FORMAT, "write the file with `vla norm-stats`", "%s: '%s' has no list '%s'", where,
                              key, name);
    size_t n = json_array_size(list);
    if (*count >= 0 && n != (size_t)*count)
        return vlai_fail(err, VLA_E_SHAPE, "%s: '%s' has %zu values in '%s' and %lld in 'q01'", where, key, n, name,
                         (long long)*count);
    double *values = vlai_array(n ? n : 1, sizeof *values);
    if (!values)
        return vlai_nomem(err, n * sizeof *values);
    for (size_t i = 0; i < n; i++) {
        const json_t *value = json_array_get(list, i);
        if (!json_is_number(value)) {
            vlai_free(values);
            return vlai_fail(err, VLA_E_FORMAT, "%s: '%s'.%s[%zu] is not a number", where, key, name, i);
        }
        values[i] = json_number_value(value);
    }
    *count = (int64_t)n;
    *out = values;
    return VLA_OK;
}

vla_status vlai_norm_parse(const json_t *stats, const char *key, const char *where, vlai_norm *out, vla_error *err)
{
    *out = (vlai_norm){0};
    const json_t *entry = json_object_get(stats, key);
    if (!json_is_object(entry)) {
        vlai_text known = {0};
        const char *name;
        json_t *value;
        json_object_foreach((json_t *)stats, name, value)
            vlai_text_printf(&known, "%s'%s'", known.size ? ", " : "", name);
        vla_status status = vlai_fail_hint(err, VLA_E_NOT_FOUND,
                                           "recompute the statistics with `vla norm-stats`, or correct data.key_mappings",
                                           "%s: no statistics of '%s'; there are: %s", where, key,
                                           known.data ? known.data : "none");
        vlai_text_fini(&known);
        return status;
    }
    int64_t dims = -1;
    double *q01 = NULL, *q99 = NULL, *mean = NULL, *std = NULL;
    vla_status status;
    VLA_TRY_GOTO(read_list(entry, "q01", key, true, where, &q01, &dims, err), done);
    VLA_TRY_GOTO(read_list(entry, "q99", key, true, where, &q99, &dims, err), done);
    VLA_TRY_GOTO(read_list(entry, "mean", key, false, where, &mean, &dims, err), done);
    VLA_TRY_GOTO(read_list(entry, "std", key, false, where, &std, &dims, err), done);
    for (int64_t i = 0; i < dims; i++)
        if (!isfinite((float)q01[i]) || !isfinite((float)q99[i]) || q01[i] > q99[i]) {
            status = vlai_fail_hint(err, VLA_E_FORMAT, "write the file with `vla norm-stats`",
                                    "%s: '%s' dim %lld has q01 %g, q99 %g, wanted finite numbers, the first not above the second", where, key,
                                    (long long)i, q01[i], q99[i]);
            goto done;
        }
    status = vlai_norm_make(dims, q01, q99, mean, std, out, err);
done:
    vlai_free(q01);
    vlai_free(q99);
    vlai_free(mean);
    vlai_free(std);
    return status;
}

vla_status vlai_norm_read(const char *path, const char *key, vlai_norm *out, vla_error *err)
{
    *out = (vlai_norm){0};
    json_t *root, *stats;
    VLA_TRY(vlai_json_load(path, &root, err));
    vla_status status = vlai_json_need(root, "norm_stats", JSON_OBJECT, path, &stats, err);
    if (status != VLA_OK)
        vlai_hint(err, status, "give a file that `vla norm-stats` has written");
    else
        status = vlai_norm_parse(stats, key, path, out, err);
    json_decref(root);
    return status;
}

json_t *vlai_norm_to_json(const vlai_norm *n)
{
    json_t *object = json_object();
    const struct {
        const char *name;
        const double *values;
    } lists[] = {{"mean", n->mean}, {"std", n->std}, {"q01", n->q01}, {"q99", n->q99}};
    for (size_t k = 0; k < 4; k++) {
        if (k < 2 && n->dims > 0 && isnan(lists[k].values[0]))
            continue;
        json_t *list = json_array();
        for (int64_t i = 0; i < n->dims; i++)
            if (json_array_append_new(list, json_real(lists[k].values[i]))) {
                json_decref(list);
                json_decref(object);
                return NULL;
            }
        if (json_object_set_new(object, lists[k].name, list)) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

static float clamp1(float y)
{
    return y < -1 ? -1 : y > 1 ? 1 : y; /* NaN stays NaN */
}

void vlai_normalise(const vlai_norm *n, const float *in, int64_t dims, int64_t total, float *out, float *mask)
{
    for (int64_t i = 0; i < dims; i++) {
        bool missing = isnan(in[i]);
        float x = missing ? 0 : in[i];
        float min = i < n->dims ? n->min[i] : 0, delta = i < n->dims ? n->delta[i] : 1;
        if (delta == 0)
            delta = 1;
        out[i] = clamp1(2 * (x - min) / delta - 1);
        mask[i] = missing ? 0 : 1;
    }
    for (int64_t i = dims; i < total; i++)
        out[i] = mask[i] = 0;
}

void vlai_model_normalise(const vlai_norm *n, const float *in, int64_t width, bool tail, float *out)
{
    for (int64_t i = 0; i < width; i++) {
        float min = i < n->dims ? n->min[i] : 0, delta = i < n->dims ? n->delta[i] : 1;
        out[i] = i >= n->dims && tail ? 0 : clamp1(2 * (in[i] - min) / delta - 1);
    }
}

void vlai_model_unnormalise(const vlai_norm *n, const float *in, int64_t width, bool tail, float *out)
{
    for (int64_t i = 0; i < width; i++) {
        float min = i < n->dims ? n->min[i] : 0, delta = i < n->dims ? n->delta[i] : 1;
        out[i] = i >= n->dims && tail ? 0 : (in[i] + 1) / 2 * delta + min;
    }
}

const char *vlai_norm_oddity(const vlai_norm *n, int64_t dim)
{
    if (!isfinite(n->q01[dim]) || !isfinite(n->q99[dim]))
        return "not finite";
    float delta = n->delta[dim], largest = 0;
    if (delta == 0)
        return "constant";
    if (delta < 0)
        return "reversed";
    for (int64_t i = 0; i < n->dims; i++)
        largest = n->delta[i] > largest ? n->delta[i] : largest;
    return delta < 1e-4f * largest && delta < 1e-6f ? "tiny range" : NULL;
}
