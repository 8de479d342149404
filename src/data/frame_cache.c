#include "data/frame_cache.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/log.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

/* File: a head of one page; a hash per picture (0 = none); the pictures of row 0, row 1, ... */
enum { HEAD_BYTES = 4096, NAME_BYTES = 1024 };

typedef struct head {
    char magic[8];
    uint64_t rows, cameras, row_bytes;
    char key[NAME_BYTES]; /* digest, transform and sizes as text */
} head;

static const char magic[8] = "vlafrm2";

/* Of a picture in this process. */
enum { UNKNOWN, WRITING, READY };

struct vlai_frame_cache {
    int fd;
    char path[4096];
    uint8_t *map;
    size_t map_size;
    int64_t rows, cameras;
    uint64_t row_bytes, index_bytes;
    uint64_t *offsets; /* of each camera inside a row, and the end */
    atomic_uchar *states;
    atomic_int full, cut; /* cut: the file is shorter than the map, of which nothing may be touched any more */
    atomic_llong hits, misses, stored;
};

static uint64_t data_offset(const vlai_frame_cache *c, int64_t row, int64_t camera)
{
    return HEAD_BYTES + c->index_bytes + (uint64_t)row * c->row_bytes + c->offsets[camera];
}

static uint64_t hash_of(const uint8_t *picture, uint64_t size)
{
    uint64_t h = XXH3_64bits(picture, size);
    return h ? h : 1;
}

static vla_status make_key(const vlai_frame_cache_options *o, char key[NAME_BYTES], vla_error *err)
{
    int n = snprintf(key, NAME_BYTES, "%s|%s|%lld", o->digest, o->transform, (long long)o->rows);
    for (int64_t c = 0; c < o->cameras && n >= 0 && n < NAME_BYTES; c++)
        n += snprintf(key + n, (size_t)(NAME_BYTES - n), "|%lld", (long long)o->sizes[c]);
    return n >= 0 && n < NAME_BYTES ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "frame cache: the transform's name is too long");
}

/* How many rows fit beside the head and the index. */
static vla_status plan_rows(vlai_frame_cache *c, const vlai_frame_cache_options *o, vla_error *err)
{
    c->cameras = o->cameras;
    c->offsets = vlai_calloc((size_t)o->cameras + 1, sizeof *c->offsets);
    if (!c->offsets)
        return vlai_nomem(err, (size_t)o->cameras * sizeof *c->offsets);
    for (int64_t i = 0; i < o->cameras; i++) {
        if (o->sizes[i] < 1 || o->sizes[i] > (INT64_C(1) << 32))
            return vlai_fail(err, VLA_E_INVALID, "frame cache: a picture of %lld bytes", (long long)o->sizes[i]);
        c->offsets[i + 1] = c->offsets[i] + (uint64_t)o->sizes[i];
    }
    c->row_bytes = c->offsets[o->cameras];
    uint64_t entry = c->row_bytes + (uint64_t)o->cameras * sizeof(uint64_t);
    uint64_t fit = o->limit > HEAD_BYTES ? (o->limit - HEAD_BYTES) / entry : 0;
    c->rows = fit < (uint64_t)o->rows ? (int64_t)fit : o->rows;
    if (c->rows < 1)
        return vlai_fail_hint(err, VLA_E_INVALID, "raise frame_cache_gb, or set it to 0",
                              "frame cache: %llu bytes do not hold the pictures of one row (%llu bytes)",
                              (unsigned long long)o->limit, (unsigned long long)entry);
    c->index_bytes = (uint64_t)c->rows * (uint64_t)o->cameras * sizeof(uint64_t);
    return VLA_OK;
}

static vla_status fail_file(const vlai_frame_cache *c, const char *what, vla_error *err)
{
    return vlai_fail(err, VLA_E_IO, "%s: cannot %s: %s", c->path, what, strerror(errno));
}

/* Opens the file. One that is not what the head describes goes, and another takes its name: runs that have mapped it keep it whole.
 * The lock is held while a file is looked at and begun, so that runs that start at once share one. */
static vla_status open_file(vlai_frame_cache *c, const head *want, vla_error *err)
{
    uint64_t size = HEAD_BYTES + c->index_bytes + (uint64_t)c->rows * c->row_bytes;
    head found;
    struct stat st, named;
    for (;;) {
        c->fd = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (c->fd < 0)
            return fail_file(c, "open", err);
        (void)flock(c->fd, LOCK_EX); /* not every file system has locks */
        if (fstat(c->fd, &st) != 0)
            return fail_file(c, "stat", err);
        if ((uint64_t)st.st_size == size && pread(c->fd, &found, sizeof found, 0) == sizeof found && !memcmp(&found, want, sizeof found))
            break;
        if (st.st_size == 0) {
            if (ftruncate(c->fd, (off_t)size) != 0)
                return vlai_fail(err, VLA_E_IO, "%s: cannot make a file of %llu bytes: %s", c->path, (unsigned long long)size,
                                 strerror(errno));
            VLA_TRY(vlai_pwrite(c->fd, c->path, want, sizeof *want, 0, err));
            break;
        }
        if (stat(c->path, &named) == 0 && named.st_ino == st.st_ino && named.st_dev == st.st_dev && unlink(c->path) != 0)
            return fail_file(c, "remove", err);
        close(c->fd);
    }
    (void)flock(c->fd, LOCK_UN);
    void *map = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, c->fd, 0);
    if (map == MAP_FAILED)
        return fail_file(c, "map", err);
    c->map = map;
    c->map_size = (size_t)size;
    return VLA_OK;
}

vla_status vlai_frame_cache_open(const vlai_frame_cache_options *o, vlai_frame_cache **out, vla_error *err)
{
    *out = NULL;
    head want;
    memset(&want, 0, sizeof want); /* compared whole, gaps included */
    memcpy(want.magic, magic, sizeof magic);
    VLA_TRY(make_key(o, want.key, err));
    vlai_frame_cache *c = vlai_calloc(1, sizeof *c);
    if (!c)
        return vlai_nomem(err, sizeof *c);
    c->fd = -1;
    vla_status status = plan_rows(c, o, err);
    if (status != VLA_OK)
        goto fail;
    want.rows = (uint64_t)c->rows;
    want.cameras = (uint64_t)c->cameras;
    want.row_bytes = c->row_bytes;
    c->states = vlai_calloc((size_t)c->rows * (size_t)c->cameras, sizeof *c->states);
    if (!c->states) {
        status = vlai_nomem(err, (size_t)c->rows * (size_t)c->cameras);
        goto fail;
    }
    char name[64];
    snprintf(name, sizeof name, "frames-%016llx.cache", (unsigned long long)XXH3_64bits(want.key, strlen(want.key)));
    if (!vlai_path_join(c->path, sizeof c->path, o->dir, name)) {
        status = vlai_fail(err, VLA_E_INVALID, "%s: path too long", o->dir);
        goto fail;
    }
    VLA_TRY_GOTO(vlai_mkdirs(o->dir, err), fail);
    VLA_TRY_GOTO(open_file(c, &want, err), fail);
    *out = c;
    return VLA_OK;
fail:
    vlai_frame_cache_close(c);
    return status;
}

void vlai_frame_cache_close(vlai_frame_cache *c)
{
    if (!c)
        return;
    if (c->map)
        munmap(c->map, c->map_size);
    if (c->fd >= 0)
        close(c->fd);
    vlai_free(c->offsets);
    vlai_free(c->states);
    vlai_free(c);
}

/* Whether the file is as long as the map. Nobody makes one longer again that was cut: its gaps would pass for pictures. */
static bool is_whole(vlai_frame_cache *c)
{
    struct stat st;
    if (atomic_load(&c->cut))
        return false;
    if (fstat(c->fd, &st) == 0 && (uint64_t)st.st_size >= c->map_size)
        return true;
    atomic_store(&c->full, 1);
    if (!atomic_exchange(&c->cut, 1))
        vlai_warn("%s: the frame cache was cut by another program: pictures are decoded again from here on", c->path);
    return false;
}

const uint8_t *vlai_frame_cache_get(vlai_frame_cache *c, int64_t row, int64_t camera)
{
    if (row < 0 || row >= c->rows || !is_whole(c)) {
        atomic_fetch_add(&c->misses, 1);
        return NULL;
    }
    int64_t entry = row * c->cameras + camera;
    const uint8_t *picture = c->map + data_offset(c, row, camera);
    unsigned char state = atomic_load(&c->states[entry]);
    if (state == UNKNOWN) { /* perhaps of an earlier run or another process */
        /* Through the map, a gap of the index would take room on a file system in memory, and end the process where there is none. */
        uint64_t hash = 0;
        if (pread(c->fd, &hash, sizeof hash, (off_t)(HEAD_BYTES + (uint64_t)entry * sizeof hash)) == sizeof hash && hash && hash == hash_of(picture, c->offsets[camera + 1] - c->offsets[camera]) &&
            atomic_compare_exchange_strong(&c->states[entry], &state, READY))
            state = READY;
    }
    atomic_fetch_add(state == READY ? &c->hits : &c->misses, 1);
    return state == READY ? picture : NULL;
}

void vlai_frame_cache_put(vlai_frame_cache *c, int64_t row, int64_t camera, const uint8_t *picture)
{
    if (row < 0 || row >= c->rows || atomic_load(&c->full) || !is_whole(c))
        return;
    int64_t entry = row * c->cameras + camera;
    unsigned char unknown = UNKNOWN;
    if (!atomic_compare_exchange_strong(&c->states[entry], &unknown, WRITING))
        return; /* there, or on its way */
    uint64_t size = c->offsets[camera + 1] - c->offsets[camera], hash = hash_of(picture, size);
    vla_status status = vlai_pwrite(c->fd, c->path, picture, (size_t)size, data_offset(c, row, camera), NULL);
    if (status == VLA_OK)
        status = vlai_pwrite(c->fd, c->path, &hash, sizeof hash, HEAD_BYTES + (uint64_t)entry * sizeof hash, NULL);
    if (status == VLA_OK)
        atomic_fetch_add(&c->stored, 1);
    else
        atomic_store(&c->full, 1);
    atomic_store(&c->states[entry], (unsigned char)(status == VLA_OK ? READY : UNKNOWN));
}

vlai_frame_cache_stats vlai_frame_cache_stats_get(const vlai_frame_cache *c)
{
    vlai_frame_cache *m = (vlai_frame_cache *)(uintptr_t)c; /* atomics are read through a plain pointer */
    return (vlai_frame_cache_stats){.rows = c->rows,
                                    .hits = atomic_load(&m->hits),
                                    .misses = atomic_load(&m->misses),
                                    .stored = atomic_load(&m->stored),
                                    .full = atomic_load(&m->full)};
}
