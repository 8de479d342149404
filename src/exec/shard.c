/* Layouts of stores: what each kind takes, where every parameter stands, and how it is sharded over ranks. */
#include "exec/shard.h"

#include "base/fail.h"
#include "base/log.h"

#include <string.h>

/* What matrix units and vector loads of every device are content with. */
enum { BYTES = 256 };

enum { CLASSES = 2 };
static const vla_dtype class_type[CLASSES] = {VLA_COMPUTE, VLA_PRECISE};

vla_status vla_store_shard(vla_store *store, const vla_shard_options *options, vla_error *err)
{
    vla_shard_options given = {.size = sizeof given, .world = 1};
    const vla_shard_options *o = &given;
    memcpy(&given, options, options->size < sizeof given ? options->size : sizeof given);
    if (store->arena[VLA_STORE_WEIGHT] || store->device[VLA_STORE_WEIGHT])
        return vlai_fail(err, VLA_E_INVALID, "the store is already allocated: it is sharded over ranks before that");
    if (o->world < 1 || o->rank < 0 || o->rank >= o->world)
        return vlai_fail(err, VLA_E_INVALID, "a store of rank %d of %d: wanted a rank from 0 to %d", o->rank, o->world, o->world - 1);
    if (o->world > 1 && o->bucket_bytes == 0)
        return vlai_fail(err, VLA_E_INVALID, "a store of rank %d of %d: buckets of 0 bytes, wanted more", o->rank, o->world);
    store->rank = o->rank;
    store->world = o->world;
    store->zero = o->zero != 0;
    store->bucket_bytes = o->bucket_bytes;
    return VLA_OK;
}

/* The stored type of each kind: one row per numerics mode. Low bits exist for bf16 weights with fp32 masters only. */
static vla_dtype stored_type(vla_dtype symbolic, vla_store_kind kind, vla_numerics numerics, vla_store_use use)
{
    vla_dtype precise = numerics == VLA_FP64 ? VLA_F64 : VLA_F32;
    bool low_precision = numerics != VLA_FP32 && numerics != VLA_FP64 && symbolic == VLA_COMPUTE;
    switch (kind) {
    case VLA_STORE_WEIGHT: return low_precision ? VLA_BF16 : precise;
    case VLA_STORE_GRADIENT:
        return use == VLA_STORE_PREDICT || use == VLA_STORE_STEP ? VLA_DTYPE_NONE
               : use == VLA_STORE_ACCUMULATE || !low_precision ? precise : VLA_BF16;
    case VLA_STORE_M:
    case VLA_STORE_V:
        return use == VLA_STORE_PREDICT ? VLA_DTYPE_NONE
               : low_precision && numerics != VLA_BF16_MASTER ? VLA_BF16 : precise;
    case VLA_STORE_LOW:
        return use != VLA_STORE_PREDICT && low_precision && numerics == VLA_BF16_MASTER ? VLA_U16 : VLA_DTYPE_NONE;
    default: return VLA_DTYPE_NONE;
    }
}

static size_t padded(size_t bytes)
{
    return (bytes + BYTES - 1) & ~(size_t)(BYTES - 1);
}

static int64_t rounded(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* ---- buckets ---- */

/* Where the walk over a class stands. */
typedef struct walk {
    int64_t first, end; /* positions of the bucket in progress */
    bool open;
    int64_t shard;      /* of all buckets so far */
} walk;

/* Ends the bucket in progress; `bucket` may be NULL. */
static void end_bucket(walk *w, int world, vlai_store_bucket *bucket)
{
    int64_t length = rounded(w->end - w->first, (int64_t)VLAI_SHARD_ALIGN * world);
    if (bucket) {
        bucket->first = w->first;
        bucket->length = length;
        bucket->shard = w->shard;
    }
    w->first = w->end = w->first + length;
    w->shard += length / world;
    w->open = false;
}

/* Gives every parameter of a class its position and bucket (numbered from *n on) and counts positions; with `to` NULL it only
 * counts. */
static int64_t walk_class(const vla_store *store, int c, vla_numerics numerics, vla_store *to, size_t *n)
{
    walk w = {0};
    size_t size = vla_dtype_size(stored_type(class_type[c], VLA_STORE_WEIGHT, numerics, VLA_STORE_PREDICT));
    for (size_t i = 0; i < store->count; i++) {
        const vlai_param *p = &store->params[i];
        if (p->symbolic != class_type[c] || p->stored == 0)
            continue;
        int64_t start = rounded(w.end, VLAI_SHARD_ALIGN);
        if (w.open && (size_t)(start + p->stored - w.first) > store->bucket_bytes / size) {
            end_bucket(&w, store->world, to ? &to->buckets[*n] : NULL);
            ++*n;
            start = w.first;
        }
        w.open = true;
        w.end = start + p->stored;
        if (!to)
            continue;
        to->params[i].position = start;
        to->params[i].bucket = (int32_t)*n;
        to->buckets[*n].symbolic = class_type[c];
        to->buckets[*n].count++;
    }
    if (w.open) {
        end_bucket(&w, store->world, to ? &to->buckets[*n] : NULL);
        ++*n;
    }
    return w.first;
}

/* Positions of a class that a kind keeps. */
static int64_t kept_positions(const vla_store *store, vla_store_kind kind, int64_t positions)
{
    return vlai_kind_is_sliced(store, kind) ? positions / store->world : positions; /* every bucket divides */
}

static vla_status make_buckets(vla_store *store, vla_numerics numerics, int64_t positions[CLASSES], vla_error *err)
{
    size_t most = store->count + 1, n = 0;
    vlai_free(store->buckets);
    vlai_free(store->members);
    store->buckets = vlai_calloc(most, sizeof *store->buckets);
    store->members = vlai_array(most, sizeof *store->members);
    if (!store->buckets || !store->members)
        return vlai_nomem(err, most * sizeof *store->buckets);
    for (int c = 0; c < CLASSES; c++)
        positions[c] = walk_class(store, c, numerics, store, &n);
    store->n_buckets = n;
    int32_t *place = store->members;
    for (size_t b = 0; b < n; b++) {
        store->buckets[b].members = place;
        place += store->buckets[b].count;
        store->buckets[b].count = 0;
    }
    for (size_t i = 0; i < store->count; i++)
        if (store->params[i].bucket >= 0) {
            vlai_store_bucket *b = &store->buckets[store->params[i].bucket];
            store->members[b->members - store->members + (ptrdiff_t)b->count++] = (int32_t)i;
        }
    return VLA_OK;
}

/* The part of a parameter that lies in the shard of this rank. */
static void set_slice(const vla_store *store, vlai_param *p)
{
    p->first = 0;
    p->count = p->stored;
    if (p->bucket < 0 || !store->zero)
        return;
    const vlai_store_bucket *b = &store->buckets[p->bucket];
    int64_t own = b->length / store->world, first = b->first + own * store->rank, end = first + own;
    int64_t low = first > p->position ? first : p->position, high = end < p->position + p->stored ? end : p->position + p->stored;
    p->first = low < high ? low - p->position : 0;
    p->count = low < high ? high - low : 0;
}

/* ---- layouts ---- */

static int class_of(const vlai_param *p)
{
    return p->symbolic == VLA_PRECISE;
}

/* One tensor after the other, each at a multiple of BYTES. */
static void lay_out_whole(vla_store *store, vla_numerics numerics, vla_store_use use)
{
    for (int k = 0; k < VLA_STORE_KINDS; k++) {
        size_t offset = 0;
        for (size_t i = 0; i < store->count; i++) {
            vlai_param *p = &store->params[i];
            p->dtype[k] = stored_type(p->symbolic, k, numerics, use);
            p->offset[k] = offset;
            offset += padded((size_t)p->stored * vla_dtype_size(p->dtype[k]));
        }
    }
}

static void lay_out_positions(vla_store *store, vla_numerics numerics, vla_store_use use, const int64_t positions[CLASSES])
{
    for (int k = 0; k < VLA_STORE_KINDS; k++) {
        size_t offset = 0;
        for (int c = 0; c < CLASSES; c++) {
            store->base[k][c] = offset;
            offset += padded((size_t)kept_positions(store, k, positions[c]) * vla_dtype_size(stored_type(class_type[c], k, numerics, use)));
        }
        for (size_t i = 0; i < store->count; i++) {
            vlai_param *p = &store->params[i];
            int64_t at = p->position;
            if (vlai_kind_is_sliced(store, k) && p->bucket >= 0) {
                const vlai_store_bucket *b = &store->buckets[p->bucket];
                at = b->shard + (p->count ? p->position + p->first - b->first - b->length / store->world * store->rank : 0);
            }
            p->dtype[k] = stored_type(p->symbolic, k, numerics, use);
            p->offset[k] = store->base[k][class_of(p)] + (size_t)at * vla_dtype_size(p->dtype[k]);
        }
    }
}

vla_status vlai_store_lay_out(vla_store *store, vla_numerics numerics, vla_store_use use, vla_error *err)
{
    int64_t positions[CLASSES];
    store->numerics = numerics;
    store->use = use;
    for (size_t i = 0; i < store->count; i++) {
        store->params[i].position = 0;
        store->params[i].bucket = -1;
    }
    if (vlai_store_is_sharded(store))
        VLA_TRY(make_buckets(store, numerics, positions, err));
    for (size_t i = 0; i < store->count; i++)
        set_slice(store, &store->params[i]);
    if (vlai_store_is_sharded(store))
        lay_out_positions(store, numerics, use, positions);
    else
        lay_out_whole(store, numerics, use);
    return VLA_OK;
}

size_t vla_store_bytes(const vla_store *store, vla_store_kind kind, vla_numerics numerics, vla_store_use use)
{
    size_t total = 0, n = 0;
    for (int c = 0; vlai_store_is_sharded(store) && c < CLASSES; c++)
        total += padded((size_t)kept_positions(store, kind, walk_class(store, c, numerics, NULL, &n)) *
                        vla_dtype_size(stored_type(class_type[c], kind, numerics, use)));
    for (size_t i = 0; !vlai_store_is_sharded(store) && i < store->count; i++)
        total += padded((size_t)store->params[i].stored * vla_dtype_size(stored_type(store->params[i].symbolic, kind, numerics, use)));
    return total;
}

size_t vlai_store_bucket_offset(const vla_store *store, vla_store_kind kind, const vlai_store_bucket *bucket)
{
    return store->base[kind][bucket->symbolic == VLA_PRECISE] + (size_t)bucket->first * vla_dtype_size(vlai_store_bucket_dtype(store, kind, bucket));
}

vla_dtype vlai_store_bucket_dtype(const vla_store *store, vla_store_kind kind, const vlai_store_bucket *bucket)
{
    return stored_type(bucket->symbolic, kind, store->numerics, store->use);
}

void vlai_store_tell(const vla_store *store)
{
    if (!vlai_store_is_sharded(store) || store->rank > 0)
        return;
    size_t total = 0, most = 0;
    for (size_t b = 0; b < store->n_buckets; b++) {
        size_t bytes = (size_t)store->buckets[b].length * vla_dtype_size(vlai_store_bucket_dtype(store, VLA_STORE_WEIGHT, &store->buckets[b]));
        total += bytes;
        most = bytes > most ? bytes : most;
    }
    vlai_info("gradients: %zu buckets of at most %.3g MB (%.3g MB asked for), %.4g GB together in the weights' types; each of %d ranks steps %s",
              store->n_buckets, 1e-6 * (double)most, 1e-6 * (double)store->bucket_bytes, 1e-9 * (double)total, store->world,
              store->zero ? "its share" : "all");
}

/* ---- slices in the checkpoint's order ---- */

/* How many elements of the checkpoint stand before the stored element `at`. */
static int64_t elements_before(const vlai_param *p, int64_t at)
{
    int64_t rest = at % p->pitch;
    return p->run == p->pitch ? at : at / p->pitch * p->run + (rest < p->run ? rest : p->run);
}

void vla_store_slice(const vla_store *store, vla_store_kind kind, size_t index, int64_t *first, int64_t *count)
{
    const vlai_param *p = &store->params[index];
    *first = 0;
    *count = p->elements;
    if (!vlai_kind_is_sliced(store, kind) || p->bucket < 0)
        return;
    *first = elements_before(p, p->first);
    *count = elements_before(p, p->first + p->count) - *first;
}
