/* Stores to tensors of safetensors files, and back. */
#include "base/bf16.h"
#include "base/fail.h"
#include "base/memory.h"
#include "base/text.h"
#include "ckpt/ckpt.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CHUNK = 1 << 16, LISTED = 8 /* names that an error lists of each sort */ };

/* What the optimizer's file keeps of each parameter: suffix of the tensor's name. */
static const struct {
    vla_store_kind kind;
    const char *suffix;
} kept[] = {{VLA_STORE_M, ".exp_avg"}, {VLA_STORE_V, ".exp_avg_sq"}, {VLA_STORE_LOW, ".master_low"}};
enum { KEPT = sizeof kept / sizeof *kept };

static vlai_tensor_view view_of(vla_tensor t, const char *name)
{
    vlai_tensor_view v = {.name = name, .dtype = t.dtype, .rank = t.rank, .elements = t.elements, .data = t.data};
    memcpy(v.shape, t.shape, sizeof v.shape);
    v.bytes = (size_t)t.elements * vla_dtype_size(t.dtype);
    return v;
}

vla_status vlai_ckpt_weight_views(const vla_store *store, vlai_ckpt_views *out, vla_error *err)
{
    size_t n = vla_store_count(store);
    *out = (vlai_ckpt_views){.views = vlai_array(n ? n : 1, sizeof *out->views)};
    if (!out->views)
        return vlai_nomem(err, n * sizeof *out->views);
    for (size_t i = 0; i < n; i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        out->views[out->count++] = view_of(t, t.name);
    }
    return VLA_OK;
}

vla_status vlai_ckpt_optimizer_views(const vla_store *store, vlai_ckpt_views *out, vla_error *err)
{
    size_t n = vla_store_count(store);
    *out = (vlai_ckpt_views){.views = vlai_array(n * KEPT + 1, sizeof *out->views)};
    if (!out->views)
        return vlai_nomem(err, n * KEPT * sizeof *out->views);
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < KEPT; k++) {
            vla_tensor t = vla_store_tensor(store, kept[k].kind, i);
            if (!t.data)
                continue;
            size_t length = strlen(t.name), size = length + strlen(kept[k].suffix) + 1;
            char *name = vlai_arena_alloc(&out->names, size);
            if (!name) {
                vlai_ckpt_views_fini(out);
                return vlai_nomem(err, size);
            }
            memcpy(name, t.name, length);
            memcpy(name + length, kept[k].suffix, size - length);
            out->views[out->count++] = view_of(t, name);
        }
    return VLA_OK;
}

void vlai_ckpt_views_fini(vlai_ckpt_views *v)
{
    vlai_free(v->views);
    vlai_arena_fini(&v->names);
    *v = (vlai_ckpt_views){0};
}

size_t vlai_ckpt_bytes(const vla_store *store)
{
    size_t total = 0;
    static const vla_store_kind kinds[] = {VLA_STORE_WEIGHT, VLA_STORE_M, VLA_STORE_V, VLA_STORE_LOW};
    for (size_t i = 0; i < vla_store_count(store); i++)
        for (int k = 0; k < 4; k++) {
            vla_tensor t = vla_store_tensor(store, kinds[k], i);
            if (t.data)
                total += (size_t)t.elements * vla_dtype_size(t.dtype) + 160; /* and its entry in the header */
        }
    return total;
}

/* Index of the first value that is not finite, or -1. The exponent bits all set mean NaN or infinity. */
static int64_t first_bad(vla_tensor t)
{
    if (t.dtype == VLA_F32) {
        const uint32_t *p = t.data;
        for (int64_t i = 0; i < t.elements; i++)
            if ((p[i] & 0x7F800000u) == 0x7F800000u)
                return i;
    } else if (t.dtype == VLA_BF16) {
        const uint16_t *p = t.data;
        for (int64_t i = 0; i < t.elements; i++)
            if ((p[i] & 0x7F80u) == 0x7F80u)
                return i;
    } else if (t.dtype == VLA_F64) {
        const double *p = t.data;
        for (int64_t i = 0; i < t.elements; i++)
            if (!isfinite(p[i]))
                return i;
    }
    return -1;
}

vla_status vlai_ckpt_check_finite(const vla_store *store, vla_error *err)
{
    static const struct {
        vla_store_kind kind;
        const char *what;
    } checked[] = {{VLA_STORE_WEIGHT, "weight"}, {VLA_STORE_M, "first moment of"}, {VLA_STORE_V, "second moment of"}};
    for (size_t i = 0; i < vla_store_count(store); i++)
        for (int k = 0; k < 3; k++) {
            vla_tensor t = vla_store_tensor(store, checked[k].kind, i);
            int64_t bad = t.data ? first_bad(t) : -1;
            if (bad >= 0)
                return vlai_fail_hint(err, VLA_E_NONFINITE,
                                      "go on from the checkpoint before it, with a smaller learning rate",
                                      "%s '%s' is not finite at element %lld: this state is not saved", checked[k].what,
                                      t.name, (long long)bad);
        }
    return VLA_OK;
}

/* Names of one sort for an error: at most LISTED, then how many more. */
typedef struct {
    vlai_text text;
    size_t count;
} names;

static void add_name(names *list, const char *name)
{
    if (list->count++ < LISTED)
        vlai_text_printf(&list->text, "%s%s", list->count > 1 ? ", " : "", name);
}

static void put_names(vlai_text *to, const char *title, const names *list)
{
    if (!list->count)
        return;
    vlai_text_printf(to, "%s%zu %s (%s%s)", to->size ? "; " : "", list->count, title, list->text.data ? list->text.data : "",
                     list->count > LISTED ? ", ..." : "");
}

static bool same_shape(const vlai_tensor_view *v, const vla_tensor *t)
{
    if (v->rank != t->rank)
        return false;
    for (int i = 0; i < t->rank; i++)
        if (v->shape[i] != t->shape[i])
            return false;
    return true;
}

static void shape_text(char *out, size_t size, int rank, const int64_t *shape)
{
    size_t n = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < rank && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%lld", i ? "," : "", (long long)shape[i]);
    if (n < size)
        snprintf(out + n, size - n, "]");
}

/* `view` into the tensor's storage, converted where the types differ. */
static vla_status copy_tensor(const vlai_tensor_view *view, vla_tensor t, vla_error *err)
{
    if (view->dtype == t.dtype) {
        if (view->bytes)
            memcpy(t.data, view->data, view->bytes);
        return VLA_OK;
    }
    float chunk[1024];
    for (int64_t at = 0; at < t.elements; at += 1024) {
        int64_t n = t.elements - at < 1024 ? t.elements - at : 1024;
        VLA_TRY(vlai_tensor_to_float(view, at, n, chunk, err));
        for (int64_t i = 0; i < n; i++)
            if (t.dtype == VLA_F32)
                ((float *)t.data)[at + i] = chunk[i];
            else if (t.dtype == VLA_F64)
                ((double *)t.data)[at + i] = (double)chunk[i];
            else
                ((uint16_t *)t.data)[at + i] = vlai_bf16_from_float(chunk[i]);
    }
    return VLA_OK;
}

/* One weight: raw where the types agree; through fp32 otherwise, so that a master gets the file's full precision. */
static vla_status copy_weight(const vlai_tensor_view *view, vla_store *store, size_t index, vla_error *err)
{
    vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, index);
    vla_tensor low = vla_store_tensor(store, VLA_STORE_LOW, index);
    if (view->dtype == t.dtype) {
        if (view->bytes)
            memcpy(t.data, view->data, view->bytes);
        if (low.data)
            memset(low.data, 0, (size_t)low.elements * sizeof(uint16_t));
        return VLA_OK;
    }
    float *chunk = vlai_array(CHUNK, sizeof *chunk);
    if (!chunk)
        return vlai_nomem(err, CHUNK * sizeof *chunk);
    vla_status status = VLA_OK;
    for (int64_t at = 0; status == VLA_OK && at < t.elements; at += CHUNK) {
        int64_t n = t.elements - at < CHUNK ? t.elements - at : CHUNK;
        status = vlai_tensor_to_float(view, at, n, chunk, err);
        if (status == VLA_OK)
            vla_store_set_float(store, index, at, n, chunk);
    }
    vlai_free(chunk);
    return status;
}

vla_status vlai_ckpt_read_weights(vla_store *store, const vlai_safetensors *file, const char *path, vla_error *err)
{
    names missing = {0}, reshaped = {0}, unexpected = {0};
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        const vlai_tensor_view *v = vlai_safetensors_find(file, t.name);
        if (!v) {
            add_name(&missing, t.name);
        } else if (!same_shape(v, &t)) {
            char line[512], have[128], want[128];
            shape_text(have, sizeof have, v->rank, v->shape);
            shape_text(want, sizeof want, t.rank, t.shape);
            snprintf(line, sizeof line, "%.200s is %s, wanted %s", t.name, have, want);
            add_name(&reshaped, line);
        }
    }
    for (size_t i = 0; i < vlai_safetensors_count(file); i++)
        if (vla_store_find(store, vlai_safetensors_at(file, i)->name) < 0)
            add_name(&unexpected, vlai_safetensors_at(file, i)->name);
    vla_status status = VLA_OK;
    if (missing.count || reshaped.count || unexpected.count) {
        vlai_text report = {0};
        put_names(&report, "missing", &missing);
        put_names(&report, "of another shape", &reshaped);
        put_names(&report, "unexpected", &unexpected);
        status = vlai_text_status(&report, err);
        if (status == VLA_OK)
            status = vlai_fail_hint(err, VLA_E_SHAPE, "the file must come from the same architecture as the model",
                                    "%s does not fit the model: %s", path, report.data);
        vlai_text_fini(&report);
    }
    vlai_text_fini(&missing.text);
    vlai_text_fini(&reshaped.text);
    vlai_text_fini(&unexpected.text);
    for (size_t i = 0; status == VLA_OK && i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        status = copy_weight(vlai_safetensors_find(file, t.name), store, i, err);
    }
    return status == VLA_OK ? status : vlai_prefix(err, status, "loading weights");
}

vla_status vlai_ckpt_read_optimizer(vla_store *store, const vlai_safetensors *file, const char *path, vla_error *err)
{
    vlai_ckpt_views wanted;
    VLA_TRY(vlai_ckpt_optimizer_views(store, &wanted, err));
    vla_status status = VLA_OK;
    size_t next = 0;
    for (size_t i = 0; status == VLA_OK && i < vla_store_count(store); i++)
        for (int k = 0; status == VLA_OK && k < KEPT; k++) {
            vla_tensor t = vla_store_tensor(store, kept[k].kind, i);
            if (!t.data)
                continue;
            const char *name = wanted.views[next++].name;
            const vlai_tensor_view *v = vlai_safetensors_find(file, name);
            if (!v && kept[k].kind == VLA_STORE_LOW)
                continue; /* saved in fp32: the weights themselves gave the low bits */
            if (!v)
                status = vlai_fail(err, VLA_E_NOT_FOUND, "%s: tensor '%s' is missing", path, name);
            else if (!same_shape(v, &t))
                status = vlai_fail(err, VLA_E_SHAPE, "%s: tensor '%s' has %lld elements, wanted %lld", path, name,
                                   (long long)v->elements, (long long)t.elements);
            else
                status = copy_tensor(v, t, err);
        }
    vlai_ckpt_views_fini(&wanted);
    return status == VLA_OK ? status : vlai_prefix(err, status, "loading optimizer state");
}

vla_status vla_store_save(const vla_store *store, const char *path, vla_error *err)
{
    vlai_ckpt_views weights;
    VLA_TRY(vlai_ckpt_weight_views(store, &weights, err));
    vla_status status = vlai_safetensors_write(path, weights.views, weights.count, (const char *[]){"format", "pt", NULL}, err);
    vlai_ckpt_views_fini(&weights);
    return status;
}

vla_status vla_store_load(vla_store *store, const char *path, vla_error *err)
{
    vlai_safetensors *file;
    VLA_TRY(vlai_safetensors_open(path, &file, err));
    vla_status status = vlai_ckpt_read_weights(store, file, path, err);
    vlai_safetensors_close(file);
    return status;
}
