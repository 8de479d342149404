/* The store: every persistent tensor of a run, in one flat arena per kind, in checkpoint order. */
#include "exec/store.h"
#include "exec/executor.h"
#include "exec/shard.h"

#include "base/bf16.h"
#include "base/fail.h"
#include "base/memory.h"

#include <stdbool.h>
#include <string.h>

vla_status vla_store_create(vla_store **out, vla_error *err)
{
    *out = vlai_calloc(1, sizeof **out);
    return *out ? VLA_OK : vlai_nomem(err, sizeof **out);
}

void vla_store_destroy(vla_store *store)
{
    if (!store)
        return;
    for (int k = 0; k < VLA_STORE_KINDS; k++) {
        vlai_free(store->arena[k]);
        if (store->device[k])
            store->executor->backend->store_free(store->executor, store->device[k], store->bytes[k]);
    }
    vlai_free(store->params);
    vlai_free(store->table);
    vlai_free(store->buckets);
    vlai_free(store->members);
    vlai_arena_fini(&store->names);
    vlai_free(store);
}

uint64_t vlai_hash_name(const char *name)
{
    uint64_t h = 1469598103934665603u; /* FNV-1a */
    for (; *name; name++)
        h = (h ^ (unsigned char)*name) * 1099511628211u;
    return h;
}

static void index_names(vla_store *store)
{
    memset(store->table, 0xFF, store->table_size * sizeof *store->table);
    for (size_t i = 0; i < store->count; i++) {
        size_t slot = vlai_hash_name(store->params[i].name) & (store->table_size - 1);
        while (store->table[slot] >= 0)
            slot = (slot + 1) & (store->table_size - 1);
        store->table[slot] = (int32_t)i;
    }
}

int64_t vla_store_find(const vla_store *store, const char *name)
{
    if (!store->table)
        return -1;
    for (size_t slot = vlai_hash_name(name) & (store->table_size - 1);; slot = (slot + 1) & (store->table_size - 1)) {
        int32_t i = store->table[slot];
        if (i < 0)
            return -1;
        if (!strcmp(store->params[i].name, name))
            return i;
    }
}

vla_status vla_store_add(vla_store *store, const char *name, vla_dtype dtype, int rank, const int64_t *shape, int group,
                         vla_error *err)
{
    if (store->arena[VLA_STORE_WEIGHT] || store->device[VLA_STORE_WEIGHT])
        return vlai_fail(err, VLA_E_INVALID, "parameter '%s': the store is already allocated", name);
    if (dtype != VLA_COMPUTE && dtype != VLA_PRECISE)
        return vlai_fail(err, VLA_E_DTYPE, "parameter '%s': the type must be VLA_COMPUTE or VLA_PRECISE", name);
    if (vla_store_find(store, name) >= 0)
        return vlai_fail(err, VLA_E_INVALID, "parameter '%s' is added twice", name);
    if (rank < 0 || rank > 8)
        return vlai_fail(err, VLA_E_SHAPE, "parameter '%s': rank %d, at most 8", name, rank);
    VLA_TRY(vlai_reserve((void **)&store->params, &store->capacity, store->count, sizeof *store->params, err));
    vlai_param *p = &store->params[store->count];
    *p = (vlai_param){.symbolic = dtype, .rank = rank, .elements = 1, .group = group, .bucket = -1};
    for (int i = 0; i < rank; i++) {
        p->shape[i] = shape[i];
        if (shape[i] < 0 || __builtin_mul_overflow(p->elements, shape[i], &p->elements))
            return vlai_fail(err, VLA_E_SHAPE, "parameter '%s': dimension %d is %lld", name, i, (long long)shape[i]);
    }
    p->run = p->pitch = p->stored = p->count = p->elements;
    p->name = vlai_arena_strdup(&store->names, name);
    if (!p->name)
        return vlai_nomem(err, strlen(name));
    store->count++;
    if (store->count * 2 > store->table_size) {
        size_t size = store->table_size ? store->table_size * 2 : 64;
        int32_t *table = vlai_array(size, sizeof *table);
        if (!table) {
            store->count--;
            return vlai_nomem(err, size * sizeof *table);
        }
        vlai_free(store->table);
        store->table = table;
        store->table_size = size;
    }
    index_names(store);
    return VLA_OK;
}

vla_status vla_store_pad(vla_store *store, const char *name, int64_t run, int64_t pitch, vla_error *err)
{
    int64_t index = vla_store_find(store, name), stored;
    if (index < 0)
        return vlai_fail(err, VLA_E_NOT_FOUND, "parameter '%s' is not in the store", name);
    vlai_param *p = &store->params[index];
    if (store->arena[VLA_STORE_WEIGHT])
        return vlai_fail(err, VLA_E_INVALID, "parameter '%s': the store is already allocated", name);
    if (run <= 0 || pitch < run || p->elements % run != 0 || __builtin_mul_overflow(p->elements / run, pitch, &stored))
        return vlai_fail(err, VLA_E_SHAPE, "parameter '%s' of %lld elements in runs of %lld, %lld apart", name, (long long)p->elements,
                         (long long)run, (long long)pitch);
    p->run = run;
    p->pitch = pitch;
    p->stored = p->count = stored;
    return VLA_OK;
}

vla_status vla_store_allocate(vla_store *store, vla_numerics numerics, vla_store_use use, vla_error *err)
{
    VLA_TRY(vlai_store_lay_out(store, numerics, use, err));
    for (int k = 0; k < VLA_STORE_KINDS; k++) {
        size_t total = vla_store_bytes(store, k, numerics, use);
        if (total == 0 && k != VLA_STORE_WEIGHT)
            continue;
        store->arena[k] = vlai_alloc_aligned(total ? total : 1, 4096);
        if (!store->arena[k])
            return vlai_nomem(err, total);
        memset(store->arena[k], 0, total);
        store->bytes[k] = total;
    }
    vlai_store_tell(store);
    return VLA_OK;
}

vla_status vla_store_allocate_on(vla_store *store, vla_executor *ex, vla_numerics numerics, vla_store_use use,
                                 unsigned host_kinds, vla_error *err)
{
    if (!ex->backend->store_alloc)
        return vla_store_allocate(store, numerics, use, err);
    VLA_TRY(vlai_store_lay_out(store, numerics, use, err));
    store->executor = ex;
    for (int k = 0; k < VLA_STORE_KINDS; k++) {
        store->bytes[k] = vla_store_bytes(store, (vla_store_kind)k, numerics, use);
        if (store->bytes[k] == 0 && k != VLA_STORE_WEIGHT)
            continue;
        VLA_TRY(ex->backend->store_alloc(ex, store->bytes[k], k == VLA_STORE_WEIGHT && store->world > 1 && store->zero, &store->device[k], err));
        VLA_TRY(ex->backend->store_zero(ex, store->device[k], store->bytes[k], err));
        if (!(host_kinds >> k & 1))
            continue;
        store->arena[k] = vlai_alloc_aligned(store->bytes[k] ? store->bytes[k] : 1, 4096);
        if (!store->arena[k])
            return vlai_nomem(err, store->bytes[k]);
        memset(store->arena[k], 0, store->bytes[k]);
    }
    vlai_store_tell(store);
    return VLA_OK;
}

/* Bytes into a kind's arena at which an element of the slice stands. */
static size_t offset_of(const vlai_param *p, vla_store_kind kind, int64_t element)
{
    return p->offset[kind] + (size_t)(vlai_param_at(p, element) - vlai_param_origin(p, kind)) * vla_dtype_size(p->dtype[kind]);
}

/* Host memory of an element, or NULL: also where another rank keeps it. */
static void *place_of(const vla_store *store, vla_store_kind kind, const vlai_param *p, int64_t element)
{
    int64_t at = vlai_param_at(p, element) - vlai_param_origin(p, kind);
    if (!store->arena[kind] || p->dtype[kind] == VLA_DTYPE_NONE || at < 0 || at >= vlai_param_kept(p, kind))
        return NULL;
    return (char *)store->arena[kind] + offset_of(p, kind, element);
}

void vlai_param_copy(const vlai_param *p, size_t size, int64_t first, int64_t n, void *range, void *packed, int pack)
{
    int64_t base = vlai_param_at(p, first);
    for (int64_t done = 0, m; done < n; done += m) {
        m = vlai_param_span(p, first + done, n - done);
        char *stored = (char *)range + (size_t)(vlai_param_at(p, first + done) - base) * size, *plain = (char *)packed + (size_t)done * size;
        memcpy(pack ? plain : stored, pack ? stored : plain, (size_t)m * size);
    }
}

/* The range of a padded tensor that holds elements first..first+n-1, through memory of its own. */
static vla_status transfer_padded(const vla_store *store, vla_store_kind kind, const vlai_param *p, int64_t first, int64_t n, char *data,
                                  int to_store, vla_error *err)
{
    enum { PART = 1 << 20 };
    size_t size = vla_dtype_size(p->dtype[kind]), room = (size_t)vlai_param_range(p, PART < n ? PART : n) * size;
    char *range = vlai_calloc(room + 1, 1);
    if (!range)
        return vlai_nomem(err, room);
    vla_status status = VLA_OK;
    for (int64_t done = 0, m; status == VLA_OK && done < n; done += m) {
        m = n - done < PART ? n - done : PART;
        int64_t base = vlai_param_at(p, first + done), end = vlai_param_at(p, first + done + m - 1) + 1;
        void *home = (char *)store->device[kind] + offset_of(p, kind, first + done);
        if (to_store) {
            memset(range, 0, (size_t)(end - base) * size);
            vlai_param_copy(p, size, first + done, m, range, data + (size_t)done * size, 0);
        }
        status = store->executor->backend->store_copy(store->executor, home, range, (size_t)(end - base) * size, to_store, err);
        if (!to_store)
            vlai_param_copy(p, size, first + done, m, range, data + (size_t)done * size, 1);
    }
    vlai_free(range);
    return status;
}

/* Copies raw elements between the caller's memory and where the store's truth is: the device when it has a home there. */
static vla_status transfer(const vla_store *store, vla_store_kind kind, size_t index, int64_t first, int64_t n, void *data,
                           int to_store, vla_error *err)
{
    const vlai_param *p = &store->params[index];
    size_t size = vla_dtype_size(p->dtype[kind]);
    if (p->dtype[kind] == VLA_DTYPE_NONE || first < 0 || n < 0 || first + n > p->elements)
        return vlai_fail(err, VLA_E_INVALID, "parameter '%s': elements %lld to %lld of a tensor of %lld", p->name, (long long)first,
                         (long long)(first + n), (long long)(p->dtype[kind] == VLA_DTYPE_NONE ? 0 : p->elements));
    if (n == 0)
        return VLA_OK;
    int64_t own, count;
    vla_store_slice(store, kind, index, &own, &count);
    if (first < own || first + n > own + count)
        return vlai_fail(err, VLA_E_INVALID, "parameter '%s': elements %lld to %lld of its optimizer state, rank %d of %d keeps %lld to %lld", p->name,
                         (long long)first, (long long)(first + n), store->rank, store->world, (long long)own, (long long)(own + count));
    if (!store->device[kind])
        vlai_param_copy(p, size, first, n, place_of(store, kind, p, first), data, !to_store);
    else if (vlai_param_span(p, first, n) < n)
        return transfer_padded(store, kind, p, first, n, data, to_store, err);
    else
        return store->executor->backend->store_copy(store->executor, (char *)store->device[kind] + offset_of(p, kind, first), data, (size_t)n * size,
                                                    to_store, err);
    return VLA_OK;
}

vla_status vla_store_write(vla_store *store, vla_store_kind kind, size_t index, int64_t first, int64_t n, const void *data,
                           vla_error *err)
{
    return transfer(store, kind, index, first, n, (void *)(uintptr_t)data, 1, err);
}

vla_status vla_store_read(const vla_store *store, vla_store_kind kind, size_t index, int64_t first, int64_t n, void *data,
                          vla_error *err)
{
    return transfer(store, kind, index, first, n, data, 0, err);
}

vla_numerics vla_store_numerics(const vla_store *store)
{
    return store->numerics;
}

size_t vla_store_count(const vla_store *store)
{
    return store->count;
}

vla_tensor vla_store_tensor(const vla_store *store, vla_store_kind kind, size_t index)
{
    const vlai_param *p = &store->params[index];
    vla_tensor t = {.name = p->name, .dtype = p->dtype[kind], .rank = p->rank, .elements = p->elements};
    memcpy(t.shape, p->shape, sizeof p->shape);
    if (store->arena[kind] && p->dtype[kind] != VLA_DTYPE_NONE && vlai_param_kept(p, kind) == p->stored)
        t.data = (char *)store->arena[kind] + p->offset[kind];
    return t;
}

void vla_store_zero_gradients(vla_store *store)
{
    if (store->arena[VLA_STORE_GRADIENT])
        memset(store->arena[VLA_STORE_GRADIENT], 0, store->bytes[VLA_STORE_GRADIENT]);
    if (store->device[VLA_STORE_GRADIENT])
        store->executor->backend->store_zero(store->executor, store->device[VLA_STORE_GRADIENT], store->bytes[VLA_STORE_GRADIENT], NULL);
}

void *vlai_store_arena(const vla_store *store, const vla_executor *ex, vla_store_kind kind)
{
    if (ex->backend->store_alloc && (!store->executor || store->executor->backend != ex->backend || store->executor->index != ex->index))
        return NULL;
    return ex->backend->store_alloc ? store->device[kind] : store->arena[kind];
}

void *vlai_store_place(const vla_store *store, const vla_executor *ex, vla_store_kind kind, size_t index)
{
    char *arena = vlai_store_arena(store, ex, kind);
    return arena ? arena + store->params[index].offset[kind] : NULL;
}

vla_status vla_store_attach(vla_store *store, vla_executor *ex, vla_error *err)
{
    if (!ex->backend->store_alloc || store->executor == ex)
        return VLA_OK;
    if (store->executor)
        return vlai_fail(err, VLA_E_INVALID, "the store already has a home on a device");
    store->executor = ex;
    for (int k = 0; k < VLA_STORE_KINDS; k++) {
        if (!store->arena[k] || store->bytes[k] == 0)
            continue;
        VLA_TRY(ex->backend->store_alloc(ex, store->bytes[k], false, &store->device[k], err));
        VLA_TRY(vla_store_push(store, (vla_store_kind)k, err));
    }
    return VLA_OK;
}

vla_status vla_store_pull(vla_store *store, vla_store_kind kind, vla_error *err)
{
    vla_executor *ex = store->executor;
    return ex && store->device[kind] && store->arena[kind]
               ? ex->backend->store_copy(ex, store->device[kind], store->arena[kind], store->bytes[kind], 0, err) : VLA_OK;
}

vla_status vla_store_push(vla_store *store, vla_store_kind kind, vla_error *err)
{
    vla_executor *ex = store->executor;
    return ex && store->device[kind] && store->arena[kind]
               ? ex->backend->store_copy(ex, store->device[kind], store->arena[kind], store->bytes[kind], 1, err) : VLA_OK;
}

/* Master = bf16 weight, ties rounded up so that it can be undone, plus the 16 low bits. */
static float join_master(uint16_t high, uint16_t low)
{
    uint32_t bits = ((uint32_t)(uint16_t)(high - (low >> 15)) << 16) | low;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static void split_master(float f, uint16_t *high, uint16_t *low)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    *low = (uint16_t)bits;
    *high = (uint16_t)((bits >> 16) + (*low >> 15));
}

/* ---- elements in the checkpoint's order ---- */

static void floats_of(vla_dtype dtype, const void *from, const uint16_t *low, int64_t n, float *out)
{
    const uint16_t *half = from;
    if (dtype == VLA_F32)
        memcpy(out, from, (size_t)n * sizeof *out);
    else if (dtype == VLA_F64)
        for (int64_t i = 0; i < n; i++)
            out[i] = (float)((const double *)from)[i];
    else if (low)
        for (int64_t i = 0; i < n; i++)
            out[i] = join_master(half[i], low[i]);
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = vlai_bf16_to_float(half[i]);
}

void vlai_store_floats(const vla_store *store, vla_store_kind kind, size_t index, int64_t first, int64_t n, float *out)
{
    const vlai_param *p = &store->params[index];
    for (int64_t done = 0, m; done < n; done += m) {
        m = vlai_param_span(p, first + done, n - done);
        floats_of(p->dtype[kind], place_of(store, kind, p, first + done), NULL, m, out + done);
    }
}

/* Weights without host memory go through the stored types in parts. A device that fails here fails the next call that can
 * say so. */
enum { REMOTE = 1024 };

static bool is_remote(const vla_store *store)
{
    return store->device[VLA_STORE_WEIGHT] && !store->arena[VLA_STORE_WEIGHT];
}

/* How many of the n weights from `first` on lie side by side and have their low bits all here (*low), or all elsewhere. */
static int64_t weight_span(const vla_store *store, size_t index, int64_t first, int64_t n, bool *low)
{
    const vlai_param *p = &store->params[index];
    int64_t own, count;
    vla_store_slice(store, VLA_STORE_LOW, index, &own, &count);
    *low = p->dtype[VLA_STORE_LOW] != VLA_DTYPE_NONE && first >= own && first < own + count;
    int64_t left = first < own ? own - first : first < own + count ? own + count - first : n;
    return vlai_param_span(p, first, n < left ? n : left);
}

static void get_remote(const vla_store *store, size_t index, int64_t first, int64_t n, float *out)
{
    const vlai_param *p = &store->params[index];
    double kept[REMOTE];
    uint16_t low[REMOTE];
    bool split;
    for (int64_t done = 0, m; done < n; done += m) {
        m = weight_span(store, index, first + done, n - done < REMOTE ? n - done : REMOTE, &split);
        memset(kept, 0, sizeof kept);
        memset(low, 0, sizeof low);
        (void)vla_store_read(store, VLA_STORE_WEIGHT, index, first + done, m, kept, NULL);
        if (split)
            (void)vla_store_read(store, VLA_STORE_LOW, index, first + done, m, low, NULL);
        floats_of(p->dtype[VLA_STORE_WEIGHT], kept, split ? low : NULL, m, out + done);
    }
}

/* split: the weight is the upper half of a master, whose low bits go to `low`, or (NULL) are kept by another rank. */
static void put_floats(vla_dtype dtype, const float *from, int64_t n, void *to, bool split, uint16_t *low)
{
    uint16_t *half = to, lost;
    if (dtype == VLA_F32)
        memcpy(to, from, (size_t)n * sizeof *from);
    else if (dtype == VLA_F64)
        for (int64_t i = 0; i < n; i++)
            ((double *)to)[i] = (double)from[i];
    else if (split)
        for (int64_t i = 0; i < n; i++)
            split_master(from[i], &half[i], low ? &low[i] : &lost);
    else
        for (int64_t i = 0; i < n; i++)
            half[i] = vlai_bf16_from_float(from[i]);
}

static void set_remote(vla_store *store, size_t index, int64_t first, int64_t n, const float *values)
{
    const vlai_param *p = &store->params[index];
    double kept[REMOTE];
    uint16_t low[REMOTE];
    bool own;
    for (int64_t done = 0, m; done < n; done += m) {
        m = weight_span(store, index, first + done, n - done < REMOTE ? n - done : REMOTE, &own);
        put_floats(p->dtype[VLA_STORE_WEIGHT], values + done, m, kept, p->dtype[VLA_STORE_LOW] != VLA_DTYPE_NONE, low);
        (void)vla_store_write(store, VLA_STORE_WEIGHT, index, first + done, m, kept, NULL);
        if (own)
            (void)vla_store_write(store, VLA_STORE_LOW, index, first + done, m, low, NULL);
    }
}

void vla_store_get_float(const vla_store *store, size_t index, int64_t first, int64_t n, float *out)
{
    const vlai_param *p = &store->params[index];
    bool own;
    if (is_remote(store)) {
        get_remote(store, index, first, n, out);
        return;
    }
    for (int64_t done = 0, m; done < n; done += m) {
        m = weight_span(store, index, first + done, n - done, &own);
        floats_of(p->dtype[VLA_STORE_WEIGHT], place_of(store, VLA_STORE_WEIGHT, p, first + done), place_of(store, VLA_STORE_LOW, p, first + done), m,
                  out + done);
    }
}

void vla_store_set_float(vla_store *store, size_t index, int64_t first, int64_t n, const float *values)
{
    const vlai_param *p = &store->params[index];
    bool own;
    if (is_remote(store)) {
        set_remote(store, index, first, n, values);
        return;
    }
    for (int64_t done = 0, m; done < n; done += m) {
        m = weight_span(store, index, first + done, n - done, &own);
        put_floats(p->dtype[VLA_STORE_WEIGHT], values + done, m, place_of(store, VLA_STORE_WEIGHT, p, first + done),
                   p->dtype[VLA_STORE_LOW] != VLA_DTYPE_NONE, place_of(store, VLA_STORE_LOW, p, first + done));
    }
}
