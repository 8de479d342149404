#include "ckpt/fill.h"

#include "base/bf16.h"
#include "base/fail.h"
#include "base/memory.h"
#include "base/work.h"
#include "exec/executor.h"
#include "exec/store.h"
#ifdef VLA_CUDA
#include "kernels/device.h"
#endif

#include <pthread.h>
#include <string.h>

enum {
    TILE = 1 << 20,  /* elements: large enough that a copy to the device runs at full rate */
    PIECE = 16 << 20 /* bytes that are fetched at once */
};

const char vlai_fill_none[1];

static bool is_pinned(const vla_store *store)
{
#ifdef VLA_CUDA
    return store->executor && store->executor->backend == &vlai_backend_cuda;
#else
    (void)store;
    return false;
#endif
}

static void *staging_alloc(bool pinned, size_t bytes)
{
#ifdef VLA_CUDA
    void *memory;
    if (pinned)
        return vlai_device_pinned_alloc(bytes, &memory) ? NULL : memory;
#endif
    (void)pinned;
    return vlai_alloc_aligned(bytes, 64);
}

static void staging_free(bool pinned, void *memory)
{
#ifdef VLA_CUDA
    if (pinned) {
        vlai_device_pinned_free(memory);
        return;
    }
#endif
    (void)pinned;
    vlai_free(memory);
}

void *vlai_staging_alloc(const vla_store *store, size_t bytes)
{
    return staging_alloc(is_pinned(store), bytes);
}

void vlai_staging_free(const vla_store *store, void *memory)
{
    staging_free(is_pinned(store), memory);
}

typedef struct room {
    float *values;
    char *kept, *low; /* of the stored type, for stores on a device */
    char *raw;        /* the tile's room */
} room;

typedef struct job {
    vla_store *store;
    vla_store_kind kind;
    vlai_fill_fn fn;
    void *user;
    int64_t *first_tile; /* per tensor, and one beyond */
    room *rooms;         /* per thread */
    pthread_mutex_t lock;
    int64_t failed; /* first tile that failed; -1 */
    vla_status status;
    vla_error error;
} job;

/* Low bits of the fp32 master, whose bf16 value rounds ties up (see exec/store.c). */
static void split(const float *values, int64_t n, uint16_t *high, uint16_t *low)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        low[i] = (uint16_t)bits;
        high[i] = (uint16_t)((bits >> 16) + (low[i] >> 15));
    }
}

static void convert(const float *values, int64_t n, vla_dtype dtype, void *out)
{
    for (int64_t i = 0; i < n; i++)
        if (dtype == VLA_F64)
            ((double *)out)[i] = (double)values[i];
        else if (dtype == VLA_F32)
            ((float *)out)[i] = values[i];
        else
            ((uint16_t *)out)[i] = vlai_bf16_from_float(values[i]);
}

/* Where the tile's elements stand side by side in host memory; NULL when they do not, or not there. */
static char *place(const vla_store *s, vla_store_kind kind, const vlai_param *p, int64_t first)
{
    if (!s->arena[kind] || s->device[kind] || p->dtype[kind] == VLA_DTYPE_NONE || p->run != p->pitch || s->world > 1)
        return NULL;
    return (char *)s->arena[kind] + p->offset[kind] + (size_t)first * vla_dtype_size(p->dtype[kind]);
}

/* What this rank keeps of n elements from `first` on. */
static vla_status write_own(vla_store *s, vla_store_kind kind, size_t index, int64_t first, int64_t n, const char *data, vla_error *err)
{
    int64_t own, count;
    vla_store_slice(s, kind, index, &own, &count);
    int64_t low = first > own ? first : own, high = first + n < own + count ? first + n : own + count;
    size_t size = vla_dtype_size(s->params[index].dtype[kind]);
    return low < high ? vla_store_write(s, kind, index, low, high - low, data + (size_t)(low - first) * size, err) : VLA_OK;
}

static vla_status fill_tile(const job *j, const vlai_fill_tile *t, room *r, vla_error *err)
{
    vla_store *s = j->store;
    const vlai_param *p = &s->params[t->index];
    const void *raw = NULL;
    bool has_low = j->kind == VLA_STORE_WEIGHT && p->dtype[VLA_STORE_LOW] != VLA_DTYPE_NONE;
    size_t bytes = (size_t)t->n * vla_dtype_size(t->dtype);
    VLA_TRY(j->fn(j->user, t, r->values, &raw, err));
    if (raw == vlai_fill_none)
        return VLA_OK;
    char *kept = place(s, j->kind, p, t->first), *low = has_low ? place(s, VLA_STORE_LOW, p, t->first) : NULL;
    bool direct = kept != NULL;
    kept = direct ? kept : r->kept;
    low = low ? low : r->low;
    if (raw)
        memcpy(kept, raw, bytes);
    else if (has_low)
        split(r->values, t->n, (uint16_t *)kept, (uint16_t *)low);
    else
        convert(r->values, t->n, t->dtype, kept);
    if (raw && has_low)
        memset(low, 0, (size_t)t->n * sizeof(uint16_t));
    if (direct)
        return VLA_OK;
    VLA_TRY(write_own(s, j->kind, t->index, t->first, t->n, kept, err));
    return has_low ? write_own(s, VLA_STORE_LOW, t->index, t->first, t->n, low, err) : VLA_OK;
}

static void run_tile(void *context, int64_t tile, int thread)
{
    job *j = context;
    size_t low = 0, high = j->store->count; /* the tensor with first_tile <= tile */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (j->first_tile[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    int64_t begin, count, at = (tile - j->first_tile[low]) * TILE;
    vla_store_slice(j->store, j->kind, low, &begin, &count);
    vlai_fill_tile t = {.index = low, .dtype = j->store->params[low].dtype[j->kind], .first = begin + at, .room = j->rooms[thread].raw};
    t.n = count - at < TILE ? count - at : TILE;
    vla_error error = VLA_ERROR_INIT;
    vla_status status = fill_tile(j, &t, &j->rooms[thread], &error);
    vlai_work_add();
    if (status == VLA_OK)
        return;
    pthread_mutex_lock(&j->lock);
    if (j->failed < 0 || tile < j->failed) {
        j->failed = tile;
        j->status = status;
        j->error = error;
    }
    pthread_mutex_unlock(&j->lock);
}

static vla_status make_rooms(job *j, int threads, vla_error *err)
{
    const vla_store *s = j->store;
    int64_t most = 0;
    for (size_t i = 0; i < s->count; i++)
        most = s->params[i].elements > most ? s->params[i].elements : most;
    size_t n = (size_t)(most < TILE ? most : TILE) + 1;
    bool staged = s->device[j->kind] != NULL || s->world > 1;
    for (size_t i = 0; i < s->count; i++)
        staged |= s->params[i].run != s->params[i].pitch;
    bool low = staged && j->kind == VLA_STORE_WEIGHT;
    size_t size = 1; /* of the largest stored type */
    for (size_t i = 0; i < s->count; i++)
        size = vla_dtype_size(s->params[i].dtype[j->kind]) > size ? vla_dtype_size(s->params[i].dtype[j->kind]) : size;
    j->rooms = vlai_calloc((size_t)threads, sizeof *j->rooms);
    if (!j->rooms)
        return vlai_nomem(err, (size_t)threads * sizeof *j->rooms);
    for (int i = 0; i < threads; i++) {
        room *r = &j->rooms[i];
        r->values = vlai_array(n, sizeof *r->values);
        r->raw = vlai_alloc_aligned(n * size, 64);
        r->kept = staged ? vlai_staging_alloc(s, n * size) : NULL;
        r->low = low ? vlai_staging_alloc(s, n * sizeof(uint16_t)) : NULL;
        if (!r->values || !r->raw || (staged && !r->kept) || (low && !r->low))
            return vlai_nomem(err, n * (sizeof *r->values + sizeof(double)));
    }
    return VLA_OK;
}

vla_status vlai_store_fill(vla_store *store, vla_store_kind kind, vlai_pool *pool, vlai_fill_fn fn, void *user, vla_error *err)
{
    job j = {.store = store, .kind = kind, .fn = fn, .user = user, .failed = -1};
    int threads = vlai_pool_threads(pool);
    j.first_tile = vlai_array(store->count + 1, sizeof *j.first_tile);
    vla_status status = j.first_tile ? make_rooms(&j, threads, err) : vlai_nomem(err, store->count * sizeof *j.first_tile);
    if (status == VLA_OK) {
        int64_t tiles = 0;
        for (size_t i = 0; i < store->count; i++) {
            const vlai_param *p = &store->params[i];
            j.first_tile[i] = tiles;
            int64_t begin, kept;
            vla_store_slice(store, kind, i, &begin, &kept);
            tiles += p->dtype[kind] == VLA_DTYPE_NONE ? 0 : (kept + TILE - 1) / TILE;
        }
        j.first_tile[store->count] = tiles;
        pthread_mutex_init(&j.lock, NULL);
        vlai_pool_run(pool, tiles, run_tile, &j);
        pthread_mutex_destroy(&j.lock);
        status = j.status;
        if (status != VLA_OK && err)
            *err = j.error;
    }
    for (int i = 0; j.rooms && i < threads; i++) {
        vlai_free(j.rooms[i].values);
        vlai_free(j.rooms[i].raw);
        vlai_staging_free(store, j.rooms[i].kept);
        vlai_staging_free(store, j.rooms[i].low);
    }
    vlai_free(j.rooms);
    vlai_free(j.first_tile);
    return status;
}

/* ---- out of the store ---- */

struct vlai_fetch {
    vlai_pool *pool;
    void **staging; /* per thread */
    int threads;
    bool pinned;
    const vla_store *store; /* of the call in progress */
    vla_store_kind kind;
    char *out;
    pthread_mutex_t lock;
    vla_status status;
    vla_error error;
};

vla_status vlai_fetch_create(const vla_store *store, int threads, vlai_fetch **out, vla_error *err)
{
    *out = NULL;
    vlai_fetch *f = vlai_calloc(1, sizeof *f);
    if (!f)
        return vlai_nomem(err, sizeof *f);
    f->pinned = is_pinned(store);
    pthread_mutex_init(&f->lock, NULL);
    vla_status status = vlai_pool_create(threads, &f->pool, err);
    f->threads = vlai_pool_threads(f->pool);
    f->staging = vlai_calloc((size_t)f->threads, sizeof *f->staging);
    if (status == VLA_OK && !f->staging)
        status = vlai_nomem(err, (size_t)f->threads * sizeof *f->staging);
    for (int i = 0; status == VLA_OK && i < f->threads; i++)
        if (!(f->staging[i] = staging_alloc(f->pinned, PIECE)))
            status = vlai_nomem(err, PIECE);
    if (status != VLA_OK) {
        vlai_fetch_destroy(f);
        return status;
    }
    *out = f;
    return VLA_OK;
}

void vlai_fetch_destroy(vlai_fetch *f)
{
    if (!f)
        return;
    for (int i = 0; f->staging && i < f->threads; i++)
        staging_free(f->pinned, f->staging[i]);
    vlai_free(f->staging);
    vlai_pool_destroy(f->pool);
    pthread_mutex_destroy(&f->lock);
    vlai_free(f);
}

static void fetch_piece(void *context, int64_t piece, int thread)
{
    vlai_fetch *f = context;
    const vla_store *s = f->store;
    size_t at = (size_t)piece * PIECE, n = s->bytes[f->kind] - at < PIECE ? s->bytes[f->kind] - at : PIECE;
    vla_error error = VLA_ERROR_INIT;
    vla_status status = VLA_OK;
    if (s->device[f->kind]) {
        status = s->executor->backend->store_copy(s->executor, (char *)s->device[f->kind] + at, f->staging[thread], n, 0, &error);
        if (status == VLA_OK)
            memcpy(f->out + at, f->staging[thread], n);
    } else {
        memcpy(f->out + at, (const char *)s->arena[f->kind] + at, n);
    }
    vlai_work_add();
    if (status == VLA_OK)
        return;
    pthread_mutex_lock(&f->lock);
    f->status = status;
    f->error = error;
    pthread_mutex_unlock(&f->lock);
}

vla_status vlai_fetch_kind(vlai_fetch *f, const vla_store *store, vla_store_kind kind, void *out, vla_error *err)
{
    f->store = store;
    f->kind = kind;
    f->out = out;
    f->status = VLA_OK;
    vlai_pool_run(f->pool, (int64_t)((store->bytes[kind] + PIECE - 1) / PIECE), fetch_piece, f);
    if (f->status != VLA_OK && err)
        *err = f->error;
    return f->status;
}
