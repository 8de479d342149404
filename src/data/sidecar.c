/* What a second open of the same set may skip: the scan of thousands of small files. Kept in a folder of the user's cache
 * that is named by the set's path and by size and time of each of its files, so that any change makes a new folder. Never
 * written inside the dataset. Every failure here is silent: the scan is done again. */
#define _XOPEN_SOURCE 700 /* realpath */
#include "data/set.h"

#include "base/io.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { MANY_FILES = 16, MANY_ROWS = 1000000 };

/* Head of both kinds of file. */
typedef struct head {
    char magic[8];
    uint64_t a, b, c, d; /* counts */
    uint64_t check;      /* XXH64 of the body */
    uint64_t bytes;      /* of the body */
    uint64_t spare;
} head;

static const char rows_magic[8] = "vlarow1";
static const char column_magic[8] = "vlacol1";

void vlai_sidecar_place(vla_dataset *set, const char *cache_dir)
{
    set->cache_dir[0] = 0;
    char top[2048], real[4096];
    const char *env;
    if (cache_dir && *cache_dir)
        snprintf(top, sizeof top, "%s", cache_dir);
    else if ((env = getenv("VLA_CACHE_DIR")) && *env)
        snprintf(top, sizeof top, "%s", env);
    else if ((env = getenv("XDG_CACHE_HOME")) && *env)
        snprintf(top, sizeof top, "%s/vla", env);
    else if ((env = getenv("HOME")) && *env)
        snprintf(top, sizeof top, "%s/.cache/vla", env);
    else
        return;
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return;
    XXH3_128bits_reset(state);
    char *resolved = realpath(set->root, NULL);
    snprintf(real, sizeof real, "%s", resolved ? resolved : set->root);
    free(resolved);
    XXH3_128bits_update(state, real, strlen(real) + 1);
    static const char *const metadata[] = {"meta/info.json", "meta/tasks.jsonl", "meta/tasks.parquet",
                                           "meta/episodes.jsonl"};
    for (size_t i = 0; i < sizeof metadata / sizeof *metadata; i++) {
        struct stat st;
        if (!vlai_path_join(real, sizeof real, set->root, metadata[i]) || stat(real, &st) != 0)
            continue;
        int64_t facts[3] = {st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec};
        XXH3_128bits_update(state, facts, sizeof facts);
    }
    for (int64_t i = 0; i < set->episode_count; i++) {
        int64_t facts[4] = {set->episodes[i].index, set->episodes[i].length, set->episodes[i].data_chunk,
                            set->episodes[i].data_file};
        XXH3_128bits_update(state, facts, sizeof facts);
    }
    for (int i = 0; i < set->file_count; i++) {
        XXH3_128bits_update(state, set->files[i].path, strlen(set->files[i].path));
        XXH3_128bits_update(state, &set->files[i].size, sizeof set->files[i].size);
        XXH3_128bits_update(state, &set->files[i].mtime, sizeof set->files[i].mtime);
    }
    for (int64_t c = 0; c < set->camera_count; c++)
        for (int64_t i = 0; i < set->cameras[c].file_count; i++) {
            const vlai_clip_file *f = &set->cameras[c].files[i];
            XXH3_128bits_update(state, f->path, strlen(f->path));
            XXH3_128bits_update(state, &f->size, sizeof f->size);
            XXH3_128bits_update(state, &f->mtime, sizeof f->mtime);
            XXH3_128bits_update(state, &f->lengths, sizeof f->lengths);
            for (int64_t k = f->first; k < f->first + f->count; k++) {
                const vlai_clip_place *place = &set->cameras[c].places[set->cameras[c].order[k]];
                double times[2] = {place->from, place->to}; /* what was reported of them */
                XXH3_128bits_update(state, times, sizeof times);
            }
        }
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    XXH3_freeState(state);
    snprintf(set->cache_dir, sizeof set->cache_dir, "%s/%016llx%016llx", top, (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
}

/* Maps a whole sidecar file; NULL when it is absent or not of this kind. */
static void *map_file(const char *path, const char magic[8], size_t *size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return NULL;
    struct stat st;
    void *data = MAP_FAILED;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= (off_t)sizeof(head))
        data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (data == MAP_FAILED)
        return NULL;
    *size = (size_t)st.st_size;
    const head *h = data;
    if (memcmp(h->magic, magic, 8) || h->bytes != *size - sizeof *h) {
        munmap(data, *size);
        return NULL;
    }
    return data;
}

static bool worthwhile(const vla_dataset *set)
{
    return set->cache_dir[0] && (set->file_count >= MANY_FILES || set->scanned_rows >= MANY_ROWS);
}

static uint64_t clip_count(const vla_dataset *set)
{
    uint64_t n = 0;
    for (int64_t c = 0; c < set->camera_count; c++)
        n += (uint64_t)set->cameras[c].file_count;
    return n;
}

/* Body of the rows file: per episode file, file_row, found; per data file rows; per clip frames, by_time; per row
 * task_index; the warnings, zero-terminated. */
bool vlai_sidecar_load(vla_dataset *set)
{
    char path[4096];
    size_t size;
    if (!set->cache_dir[0] || !vlai_path_join(path, sizeof path, set->cache_dir, "rows"))
        return false;
    void *data = map_file(path, rows_magic, &size);
    if (!data)
        return false;
    const head *h = data;
    const int64_t *at = (const int64_t *)(h + 1);
    uint64_t clips = clip_count(set), episodes = (uint64_t)set->episode_count, files = (uint64_t)set->file_count;
    bool good = h->a == episodes && h->b == files && h->c < h->bytes && h->d == clips &&
                h->bytes >= (episodes * 3 + files + clips * 2) * 8 + h->c * 4 &&
                h->check == XXH3_64bits(h + 1, (size_t)h->bytes);
    if (good) {
        set->task_of = vlai_array((size_t)h->c + 1, sizeof *set->task_of);
        good = set->task_of != NULL;
    }
    if (good) {
        for (int64_t i = 0; i < set->episode_count; i++, at += 3) {
            set->episodes[i].file = (int)at[0];
            set->episodes[i].file_row = at[1];
            set->episodes[i].found = at[2];
        }
        for (int i = 0; i < set->file_count; i++) {
            set->files[i].rows = *at++;
            set->files[i].first = set->scanned_rows;
            set->files[i].read = true;
            set->scanned_rows += set->files[i].rows;
        }
        for (int64_t c = 0; c < set->camera_count; c++)
            for (int64_t i = 0; i < set->cameras[c].file_count; i++, at += 2) {
                set->cameras[c].files[i].frames = at[0];
                set->cameras[c].files[i].by_time = at[1] != 0;
            }
        memcpy(set->task_of, at, (size_t)h->c * 4);
        const char *text = (const char *)at + h->c * 4, *end = (const char *)data + size;
        while (text < end && memchr(text, 0, (size_t)(end - text))) {
            if (vlai_reserve((void **)&set->warnings, &set->warning_room, set->warning_count, sizeof *set->warnings, NULL) ==
                    VLA_OK &&
                (set->warnings[set->warning_count] = vlai_set_strdup(set, text)))
                set->warning_count++;
            text += strlen(text) + 1;
        }
    }
    munmap(data, size);
    return good;
}

static void write_file(const vla_dataset *set, const char *name, head *h, const void *body, size_t bytes)
{
    char path[4096];
    if (!vlai_path_join(path, sizeof path, set->cache_dir, name) || vlai_mkdirs(set->cache_dir, NULL) != VLA_OK)
        return;
    h->bytes = bytes;
    h->check = XXH3_64bits(body, bytes);
    uint8_t *whole = vlai_alloc(sizeof *h + bytes);
    if (!whole)
        return;
    memcpy(whole, h, sizeof *h);
    memcpy(whole + sizeof *h, body, bytes);
    (void)vlai_write_file_atomic(path, whole, sizeof *h + bytes, NULL);
    vlai_free(whole);
}

void vlai_sidecar_save(const vla_dataset *set)
{
    if (!worthwhile(set))
        return;
    uint64_t clips = clip_count(set);
    size_t texts = 0, bytes;
    for (size_t i = set->warnings_before_scan; i < set->warning_count; i++)
        texts += strlen(set->warnings[i]) + 1;
    bytes = ((size_t)set->episode_count * 3 + (size_t)set->file_count + clips * 2) * 8 + (size_t)set->scanned_rows * 4 + texts;
    int64_t *body = vlai_alloc(bytes + 8), *at = body;
    if (!body)
        return;
    for (int64_t i = 0; i < set->episode_count; i++) {
        *at++ = set->episodes[i].file;
        *at++ = set->episodes[i].file_row;
        *at++ = set->episodes[i].found;
    }
    for (int i = 0; i < set->file_count; i++)
        *at++ = set->files[i].rows;
    for (int64_t c = 0; c < set->camera_count; c++)
        for (int64_t i = 0; i < set->cameras[c].file_count; i++) {
            *at++ = set->cameras[c].files[i].frames;
            *at++ = set->cameras[c].files[i].by_time;
        }
    memcpy(at, set->task_of, (size_t)set->scanned_rows * 4);
    char *text = (char *)at + (size_t)set->scanned_rows * 4;
    for (size_t i = set->warnings_before_scan; i < set->warning_count; i++) {
        size_t n = strlen(set->warnings[i]) + 1;
        memcpy(text, set->warnings[i], n);
        text += n;
    }
    head h = {.a = (uint64_t)set->episode_count, .b = (uint64_t)set->file_count, .c = (uint64_t)set->scanned_rows, .d = clips};
    memcpy(h.magic, rows_magic, 8);
    write_file(set, "rows", &h, body, bytes);
    vlai_free(body);
}

/* --- columns --- */

static void column_name(const vla_dataset *set, const vlai_column *column, char out[64])
{
    uint64_t name = XXH3_64bits(column->name, strlen(column->name));
    uint64_t chosen = XXH3_64bits(set->chosen_row, (size_t)set->chosen_count * sizeof *set->chosen_row);
    snprintf(out, 64, "column-%016llx-%016llx-%d", (unsigned long long)name, (unsigned long long)chosen, column->kind);
}

static size_t value_size(const vlai_column *column)
{
    return column->kind == 0 /* VLAI_PARQUET_F32 */ ? 4 : 8;
}

bool vlai_sidecar_column_load(vla_dataset *set, vlai_column *column)
{
    char name[64], path[4096];
    size_t size;
    if (!worthwhile(set))
        return false;
    column_name(set, column, name);
    if (!vlai_path_join(path, sizeof path, set->cache_dir, name))
        return false;
    void *data = map_file(path, column_magic, &size);
    if (!data)
        return false;
    const head *h = data;
    size_t bytes = 0;
    bool good = h->a == (uint64_t)set->rows && h->b >= 1 && h->b < (1u << 30) &&
                (column->dim == 0 || (int64_t)h->b == column->dim) &&
                vlai_mul_size((size_t)set->rows, (size_t)h->b * value_size(column), &bytes) && bytes == h->bytes &&
                h->check == XXH3_64bits(h + 1, bytes);
    if (!good) {
        munmap(data, size);
        return false;
    }
    column->dim = (int64_t)h->b;
    column->data = (void *)(uintptr_t)(h + 1);
    column->mapping = data;
    column->mapping_size = size;
    return true;
}

void vlai_sidecar_column_save(vla_dataset *set, const vlai_column *column)
{
    if (!worthwhile(set))
        return;
    char name[64];
    column_name(set, column, name);
    head h = {.a = (uint64_t)set->rows, .b = (uint64_t)column->dim};
    memcpy(h.magic, column_magic, 8);
    write_file(set, name, &h, column->data, (size_t)set->rows * (size_t)column->dim * value_size(column));
}
