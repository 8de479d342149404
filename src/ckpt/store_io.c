/* Stores to tensors of safetensors files, and back. */
#include "base/fail.h"
#include "base/finite.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"
#include "base/work.h"
#include "base/pool.h"
#include "ckpt/ckpt.h"
#include "ckpt/fill.h"
#include "dist/group.h"
#include "exec/shard.h"
#include "exec/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LISTED = 8,      /* names that an error lists of each sort */
    PIECE = 4 << 20, /* elements that are read from a device at once */
    SHARED = 1 << 22 /* elements of a store whose reading is worth threads */
};

/* What the optimizer's file keeps of each parameter: suffix of the tensor's name. */
static const struct {
    vla_store_kind kind;
    const char *suffix;
} kept[] = {{VLA_STORE_M, ".exp_avg"}, {VLA_STORE_V, ".exp_avg_sq"}, {VLA_STORE_LOW, ".master_low"}};
enum { KEPT = sizeof kept / sizeof *kept };

void vlai_ckpt_optimizer_name(int rank, int world, char out[VLAI_CKPT_NAME])
{
    snprintf(out, VLAI_CKPT_NAME, VLAI_CKPT_OPTIMIZER "%d-of-%d.safetensors", rank, world);
}

bool vlai_ckpt_parse_optimizer(const char *name, int *rank, int *world)
{
    char same[VLAI_CKPT_NAME];
    if (sscanf(name, VLAI_CKPT_OPTIMIZER "%9d-of-%9d", rank, world) != 2 || *rank < 0 || *rank >= *world)
        return false;
    vlai_ckpt_optimizer_name(*rank, *world, same);
    return !strcmp(name, same);
}

static vla_status make_views(vlai_ckpt_views *out, size_t most, vla_error *err)
{
    enum { PLAIN = 5 }; /* the format, a note, the end */
    *out = (vlai_ckpt_views){.views = vlai_array(most + 1, sizeof *out->views), .place = vlai_array(most + 1, sizeof *out->place),
                             .metadata = vlai_array(2 * most + PLAIN, sizeof *out->metadata)};
    if (!out->views || !out->place || !out->metadata) {
        vlai_ckpt_views_fini(out);
        return vlai_nomem(err, most * (sizeof *out->views + sizeof *out->place + 2 * sizeof *out->metadata));
    }
    out->metadata[0] = "format";
    out->metadata[1] = "pt";
    out->metadata[2] = NULL;
    return VLA_OK;
}

static void add_view(vlai_ckpt_views *to, vla_store_kind kind, size_t index, vla_tensor t, const char *name)
{
    vlai_tensor_view v = {.name = name, .dtype = t.dtype, .rank = t.rank, .elements = t.elements, .data = t.data};
    memcpy(v.shape, t.shape, sizeof v.shape);
    v.bytes = (size_t)t.elements * vla_dtype_size(t.dtype);
    to->place[to->count].kind = kind;
    to->place[to->count].index = index;
    to->place[to->count].first = 0;
    to->views[to->count++] = v;
}

static const char *SLICE = "slice:";

/* The newest view becomes a row of n elements from `first` on. */
static bool cut_view(vlai_ckpt_views *to, int64_t first, int64_t n)
{
    vlai_tensor_view *v = &to->views[to->count - 1];
    char number[24];
    size_t size = strlen(SLICE) + strlen(v->name) + 1, at = 2 * to->count;
    char *key = vlai_arena_alloc(&to->names, size);
    snprintf(number, sizeof number, "%lld", (long long)first);
    if (!key || !(to->metadata[at + 1] = vlai_arena_strdup(&to->names, number)))
        return false;
    snprintf(key, size, "%s%s", SLICE, v->name);
    to->metadata[at] = key;
    to->metadata[at + 2] = NULL;
    to->place[to->count - 1].first = first;
    v->rank = 1;
    v->shape[0] = v->elements = n;
    v->bytes = (size_t)n * vla_dtype_size(v->dtype);
    return true;
}

vla_status vlai_ckpt_weight_views(const vla_store *store, vlai_ckpt_views *out, vla_error *err)
{
    size_t n = vla_store_count(store);
    VLA_TRY(make_views(out, n, err));
    for (size_t i = 0; i < n; i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        add_view(out, VLA_STORE_WEIGHT, i, t, t.name);
    }
    return VLA_OK;
}

vla_status vlai_ckpt_optimizer_views(const vla_store *store, int world, vlai_ckpt_views *out, vla_error *err)
{
    size_t n = vla_store_count(store);
    VLA_TRY(make_views(out, n * KEPT, err));
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < KEPT; k++) {
            vla_tensor t = vla_store_tensor(store, kept[k].kind, i);
            int64_t first, elements;
            if (t.dtype == VLA_DTYPE_NONE)
                continue;
            vla_store_slice(store, kept[k].kind, i, &first, &elements);
            if (elements == 0 && world > 1)
                continue;
            size_t length = strlen(t.name), size = length + strlen(kept[k].suffix) + 1;
            char *name = vlai_arena_alloc(&out->names, size);
            if (!name) {
                vlai_ckpt_views_fini(out);
                return vlai_nomem(err, size);
            }
            memcpy(name, t.name, length);
            memcpy(name + length, kept[k].suffix, size - length);
            add_view(out, kept[k].kind, i, t, name);
            if (world > 1 && !cut_view(out, first, elements)) {
                vlai_ckpt_views_fini(out);
                return vlai_nomem(err, size);
            }
        }
    return VLA_OK;
}

void vlai_ckpt_views_note(vlai_ckpt_views *v, const char *key, const char *value)
{
    size_t at = 0;
    while (v->metadata[at])
        at += 2;
    v->metadata[at] = key;
    v->metadata[at + 1] = value;
    v->metadata[at + 2] = NULL;
}

void vlai_ckpt_views_fini(vlai_ckpt_views *v)
{
    vlai_free(v->views);
    vlai_free(v->place);
    vlai_free(v->metadata);
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
            if (t.dtype != VLA_DTYPE_NONE)
                total += (size_t)t.elements * vla_dtype_size(t.dtype) + 160; /* and its entry in the header */
        }
    return total;
}

size_t vlai_ckpt_share(const vla_store *store, int rank)
{
    size_t total = 0;
    static const vla_store_kind kinds[] = {VLA_STORE_WEIGHT, VLA_STORE_M, VLA_STORE_V, VLA_STORE_LOW};
    for (size_t i = 0; i < vla_store_count(store); i++)
        for (int k = rank == 0 ? 0 : 1; k < 4 && (rank == 0 || vlai_kind_is_sliced(store, VLA_STORE_M)); k++) {
            int64_t first, n;
            vla_store_slice(store, kinds[k], i, &first, &n);
            total += (size_t)n * vla_dtype_size(vla_store_tensor(store, kinds[k], i).dtype);
        }
    return total;
}

size_t vlai_ckpt_host_share(const vla_store *store, const struct vlai_group *group, int rank)
{
    size_t total = 0;
    for (int r = 0; r < vlai_group_world(group); r++)
        if (!strcmp(vlai_group_host(group, r), vlai_group_host(group, rank)))
            total += vlai_ckpt_share(store, r);
    return total;
}

vla_status vlai_ckpt_each_piece(const vla_store *store, vla_store_kind kind, size_t index,
                                vla_status (*piece)(void *user, int64_t first, int64_t n, const void *data, vla_error *err),
                                void *user, vla_error *err)
{
    vla_tensor t = vla_store_tensor(store, kind, index);
    int64_t first, elements;
    vla_store_slice(store, kind, index, &first, &elements);
    if (t.dtype == VLA_DTYPE_NONE || elements == 0)
        return VLA_OK;
    if (t.data && elements == t.elements && store->params[index].run == store->params[index].pitch)
        return piece(user, 0, t.elements, t.data, err);
    int64_t most = elements < PIECE ? elements : PIECE;
    void *staging = vlai_staging_alloc(store, (size_t)most * vla_dtype_size(t.dtype));
    if (!staging)
        return vlai_nomem(err, (size_t)most * vla_dtype_size(t.dtype));
    vla_status status = VLA_OK;
    for (int64_t at = first; status == VLA_OK && at < first + elements; at += most) {
        int64_t n = first + elements - at < most ? first + elements - at : most;
        status = vla_store_read(store, kind, index, at, n, staging, err);
        if (status == VLA_OK)
            status = piece(user, at, n, staging, err);
    }
    vlai_staging_free(store, staging);
    return status;
}

typedef struct checked {
    const char *what;
    vla_tensor tensor;
} checked;

static vla_status check_piece(void *user, int64_t first, int64_t n, const void *data, vla_error *err)
{
    const checked *c = user;
    vlai_work_add();
    int64_t bad = vlai_first_not_finite(c->tensor.dtype, data, n);
    return bad < 0 ? VLA_OK
                   : vlai_fail_hint(err, VLA_E_NONFINITE, "go on from the checkpoint before it, with a smaller learning rate; where none was saved yet, the weights that the run began with may be damaged",
                                    "%s '%s' is not finite at element %lld: this state is not saved", c->what, c->tensor.name,
                                    (long long)(first + bad));
}

vla_status vlai_ckpt_check_finite(const vla_store *store, bool weights, vla_error *err)
{
    static const struct {
        vla_store_kind kind;
        const char *what;
    } rows[] = {{VLA_STORE_WEIGHT, "weight"}, {VLA_STORE_M, "first moment of"}, {VLA_STORE_V, "second moment of"}};
    for (size_t i = 0; i < vla_store_count(store); i++)
        for (int k = weights ? 0 : 1; k < 3; k++) {
            checked c = {rows[k].what, vla_store_tensor(store, rows[k].kind, i)};
            VLA_TRY(vlai_ckpt_each_piece(store, rows[k].kind, i, check_piece, &c, err));
        }
    return VLA_OK;
}

/* ---- writing ---- */

typedef struct source {
    const vla_store *store;
    const vlai_ckpt_views *views;
    struct vlai_writer *writer; /* of the tensor in progress */
    vla_dtype dtype;
} source;

static vla_status put_piece(void *user, int64_t first, int64_t n, const void *data, vla_error *err)
{
    const source *s = user;
    (void)first;
    return vlai_writer_put(s->writer, data, (size_t)n * vla_dtype_size(s->dtype), err);
}

static vla_status put_tensor(void *user, size_t i, struct vlai_writer *writer, vla_error *err)
{
    source *s = user;
    s->writer = writer;
    s->dtype = s->views->views[i].dtype;
    return vlai_ckpt_each_piece(s->store, s->views->place[i].kind, s->views->place[i].index, put_piece, s, err);
}

vla_status vlai_ckpt_write(const vla_store *store, const vlai_ckpt_views *views, const char *path, vla_error *err)
{
    source s = {.store = store, .views = views};
    return vlai_safetensors_stream(path, views->views, views->count, views->metadata, put_tensor, &s, err);
}

/* ---- reading ---- */

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

/* Elements of a tensor that a file holds. */
typedef struct part {
    const vlai_tensor_view *view;
    int64_t first; /* in the tensor */
} part;

/* Parts of the store's tensors, those of tensor i from begin[i] on, in their order; none where the files have none and need
 * none. */
typedef struct found {
    part *parts;
    size_t *begin, count;
} found;

static vla_status make_found(found *f, size_t tensors, size_t files, vla_error *err)
{
    *f = (found){.parts = vlai_array(tensors * files + 1, sizeof *f->parts), .begin = vlai_calloc(tensors + 1, sizeof *f->begin)};
    return f->parts && f->begin ? VLA_OK : vlai_nomem(err, tensors * files * sizeof *f->parts);
}

static void free_found(found *f)
{
    vlai_free(f->parts);
    vlai_free(f->begin);
}

static vla_status read_tile(void *user, const vlai_fill_tile *t, float *values, const void **raw, vla_error *err)
{
    const found *f = user;
    size_t begin = f->begin[t->index], end = f->begin[t->index + 1], size = vla_dtype_size(t->dtype);
    bool same = true;
    *raw = begin == end ? vlai_fill_none : NULL;
    for (size_t i = begin; i < end; i++)
        same &= f->parts[i].view->dtype == t->dtype;
    for (size_t i = begin; i < end; i++) {
        const part *p = &f->parts[i];
        int64_t from = p->first > t->first ? p->first : t->first, to = p->first + p->view->elements;
        to = to < t->first + t->n ? to : t->first + t->n;
        if (from >= to)
            continue;
        VLA_TRY(vlai_tensor_check_finite(p->view, from - p->first, to - from, err));
        const char *data = (const char *)p->view->data + (size_t)(from - p->first) * size;
        if (!same) {
            VLA_TRY(vlai_tensor_to_float(p->view, from - p->first, to - from, values + (from - t->first), err));
        } else if (to - from == t->n) {
            *raw = data;
        } else {
            memcpy((char *)t->room + (size_t)(from - t->first) * size, data, (size_t)(to - from) * size);
            *raw = t->room;
        }
    }
    return VLA_OK;
}

/* One kind from the views; several threads where that is worth it. */
static vla_status read_kind(vla_store *store, vla_store_kind kind, found *f, vla_error *err)
{
    vlai_pool *pool = NULL;
    int64_t elements = 0;
    for (size_t i = 0; i < vla_store_count(store); i++)
        elements += vla_store_tensor(store, kind, i).elements;
    if (elements > SHARED)
        VLA_TRY(vlai_pool_create(0, &pool, err));
    vla_status status = vlai_store_fill(store, kind, pool, read_tile, f, err);
    vlai_pool_destroy(pool);
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
    found f = {0};
    if (status == VLA_OK)
        status = make_found(&f, vla_store_count(store), 1, err);
    for (size_t i = 0; status == VLA_OK && i < vla_store_count(store); i++) {
        f.parts[i] = (part){vlai_safetensors_find(file, vla_store_tensor(store, VLA_STORE_WEIGHT, i).name), 0};
        f.begin[i + 1] = i + 1;
    }
    if (status == VLA_OK)
        status = read_kind(store, VLA_STORE_WEIGHT, &f, err);
    free_found(&f);
    return status == VLA_OK ? status : vlai_prefix(err, status, "loading weights");
}

/* Where the tensor's part of this file begins: 0 for a whole one, as one rank writes it. */
static vla_status part_of(const vlai_safetensors *file, const vlai_tensor_view *v, const vla_tensor *t, const char *path, int64_t *first, vla_error *err)
{
    char key[1100];
    snprintf(key, sizeof key, "%s%s", SLICE, v->name);
    const char *value = vlai_safetensors_metadata(file, key);
    char *end = NULL;
    *first = value ? strtoll(value, &end, 10) : 0;
    if (!value && same_shape(v, t))
        return VLA_OK;
    if (!value || *end || end == value || v->rank != 1 || *first < 0 || v->elements > t->elements - *first)
        return vlai_fail(err, VLA_E_SHAPE, "%s: tensor '%s' has %lld elements from %s on, wanted %lld in all", path, v->name,
                         (long long)v->elements, value ? value : "0", (long long)t->elements);
    return VLA_OK;
}

/* The parts of one tensor, in order and without gaps. */
static vla_status find_parts(vlai_safetensors *const *files, size_t count, const char *name, const vla_tensor *t, bool may_lack, const char *path,
                             found *f, vla_error *err)
{
    size_t begin = f->count;
    for (size_t i = 0; i < count; i++) {
        const vlai_tensor_view *v = vlai_safetensors_find(files[i], name);
        if (!v)
            continue;
        part p = {.view = v};
        VLA_TRY(part_of(files[i], v, t, path, &p.first, err));
        size_t at = f->count++;
        for (; at > begin && f->parts[at - 1].first > p.first; at--)
            f->parts[at] = f->parts[at - 1];
        f->parts[at] = p;
    }
    if (f->count == begin && (may_lack || t->elements == 0))
        return VLA_OK;
    if (f->count == begin)
        return vlai_fail(err, VLA_E_NOT_FOUND, "%s: tensor '%s' is missing", path, name);
    int64_t covered = 0;
    for (size_t i = begin; i < f->count && f->parts[i].first == covered; i++)
        covered += f->parts[i].view->elements;
    return covered == t->elements ? VLA_OK
                                  : vlai_fail(err, VLA_E_CORRUPT, "%s: the parts of tensor '%s' do not join at element %lld of %lld", path, name,
                                              (long long)covered, (long long)t->elements);
}

vla_status vlai_ckpt_read_optimizer(vla_store *store, vlai_safetensors *const *files, size_t count, const char *path, vla_error *err)
{
    size_t n = vla_store_count(store);
    found f;
    vla_status status = make_found(&f, n, count, err);
    for (int k = 0; status == VLA_OK && k < KEPT; k++) {
        f.count = 0;
        for (size_t i = 0; status == VLA_OK && i < n; i++) {
            char name[1024];
            vla_tensor t = vla_store_tensor(store, kept[k].kind, i);
            snprintf(name, sizeof name, "%s%s", t.name, kept[k].suffix);
            /* Of a state saved in fp32 the weights themselves gave the low bits. */
            if (t.dtype != VLA_DTYPE_NONE)
                status = find_parts(files, count, name, &t, kept[k].kind == VLA_STORE_LOW, path, &f, err);
            f.begin[i + 1] = f.count;
        }
        if (status == VLA_OK)
            status = read_kind(store, kept[k].kind, &f, err);
    }
    free_found(&f);
    return status == VLA_OK ? status : vlai_prefix(err, status, "loading optimizer state");
}

vla_status vla_store_save(const vla_store *store, const char *path, vla_error *err)
{
    vlai_ckpt_views weights;
    VLA_TRY(vlai_ckpt_weight_views(store, &weights, err));
    vla_status status = vlai_ckpt_write(store, &weights, path, err);
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
