#define _DEFAULT_SOURCE /* madvise */
/* Writing checkpoints: a snapshot of the store, then a thread that writes a directory under a temporary name, syncs it,
 * renames it, points `latest` to it and deletes old ones.
 *
 * The order of the steps is what makes a kill at any moment harmless. DONE is written after everything else, the rename
 * comes after DONE, deletion begins with a rename to a temporary name. So a directory with its final name is whole. */
#include "base/fail.h"
#include "base/io.h"
#include "base/log.h"
#include "base/memory.h"
#include "ckpt/ckpt.h"
#include "ckpt/fill.h"
#include "ckpt/together.h"
#include "exec/shard.h"
#include "exec/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const vla_store_kind saved_kinds[] = {VLA_STORE_WEIGHT, VLA_STORE_M, VLA_STORE_V, VLA_STORE_LOW};
enum {
    SAVED_KINDS = sizeof saved_kinds / sizeof *saved_kinds,
    LARGE = 2 << 20, /* a large page */
    FETCHERS = 8     /* threads that copy from the device: enough for its link and for the copy behind it */
};

struct vla_checkpoint_writer {
    char *run;
    int64_t keep_last;
    bool sync;
    /* the save in progress; the thread alone touches these until it is joined */
    pthread_t thread;
    bool busy;
    atomic_bool finished;
    vla_status status;
    vla_error error;
    const vla_store *source;
    int64_t epoch, step;
    char *state, *own;
    vla_checkpoint_file *files;
    size_t file_count;
    vlai_arena copies; /* names and bytes of `files` */
    /* several ranks */
    vlai_together together;
    vla_status early; /* of a rank that failed before its writing began: the others have to learn it */
    vla_error early_error;
    /* kept between saves */
    vla_store snapshot;
    vlai_fetch *fetch;
    pthread_t reserver; /* makes the snapshot's memory ready */
    bool reserving;
    size_t staging[VLA_STORE_KINDS];
    bool warned;
    char newest[VLAI_CKPT_PATH];
};

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

/* EPOCH_STEP with this ending, or `other` with it. */
static bool is_named(const char *name, const char *other, const char *ending)
{
    char stem[64];
    size_t n = strlen(name), end = strlen(ending);
    if (!ends_with(name, ending) || n - end >= sizeof stem)
        return false;
    memcpy(stem, name, n - end);
    stem[n - end] = 0;
    int64_t epoch, step;
    return vlai_ckpt_parse_name(stem, &epoch, &step) || (other && !strcmp(stem, other));
}

/* EPOCH_STEP.replaced where EPOCH_STEP stands complete: a kill came before it was removed. */
static bool is_replaced(const char *run, const char *name)
{
    char path[VLAI_CKPT_PATH];
    return is_named(name, NULL, VLAI_CKPT_REPLACED) &&
           snprintf(path, sizeof path, "%s/%.*s/" VLAI_CKPT_DONE, run, (int)(strlen(name) - strlen(VLAI_CKPT_REPLACED)), name) < (int)sizeof path &&
           vlai_is_file(path);
}

/* Leftovers: EPOCH_STEP.tmp and the like, never a name that a user could have chosen for something else. */
static bool is_leftover(const char *run, const char *name)
{
    return is_named(name, VLAI_CKPT_LATEST, VLAI_CKPT_TEMPORARY) || is_replaced(run, name);
}

static void remove_leftovers(const char *run)
{
    vla_error err = VLA_ERROR_INIT;
    char **names, path[VLAI_CKPT_PATH];
    size_t count;
    if (vlai_list_dir(run, &names, &count, &err) != VLA_OK)
        return;
    for (size_t i = 0; i < count; i++)
        if (is_leftover(run, names[i]) && vlai_path_join(path, sizeof path, run, names[i]) &&
            vlai_remove_tree(path, &err) != VLA_OK)
            vlai_warn("leftover of an interrupted save: %s", err.message);
    vlai_names_free(names, count);
}

vla_status vlai_ckpt_check_path(const char *run, const vla_checkpoint_file *files, size_t count, vla_error *err)
{
    /* As far as a run counts epochs and steps; of the names under which a checkpoint stands the longest; and a file in it. */
    static const char longest[] = "/1000000000_1000000000000000" VLAI_CKPT_REPLACED "/";
    size_t name = VLAI_CKPT_NAME - 1, length = strlen(run);
    for (size_t i = 0; i < count; i++)
        name = strlen(files[i].name) > name ? strlen(files[i].name) : name;
    size_t most = VLAI_CKPT_PATH - sizeof longest - name;
    if (length <= most)
        return VLA_OK;
    return vlai_fail_hint(err, VLA_E_INVALID, "choose a shorter checkpoint.save_path, which may be relative to the working directory",
                          "the path of the run folder has %zu bytes, wanted at most %zu: those of its checkpoints' files would be longer than the "
                          "%d that the system takes (%.64s...)", length, most, VLAI_CKPT_PATH - 1, run);
}

vla_status vla_checkpoint_writer_create(const char *run, const vla_checkpoint_writer_options *options,
                                        vla_checkpoint_writer **out, vla_error *err)
{
    vla_checkpoint_writer_options o = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
    *out = NULL;
    if (options)
        VLA_TRY(vlai_take_sized(&o, sizeof o, options, "vla_checkpoint_writer_options", err));
    VLA_TRY(vlai_ckpt_check_path(run, NULL, 0, err));
    VLA_TRY(vlai_mkdirs(run, err));
    vla_checkpoint_writer *w = vlai_calloc(1, sizeof *w);
    if (!w)
        return vlai_nomem(err, sizeof *w);
    w->run = vlai_strdup(run);
    if (!w->run) {
        vlai_free(w);
        return vlai_nomem(err, strlen(run));
    }
    w->keep_last = o.keep_last;
    w->sync = o.flags & VLA_CHECKPOINT_SYNC;
    w->together.world = 1;
    if (o.group && o.world > 1) {
        static atomic_int opened; /* another writer's words must not be taken for this one's */
        w->together.writer = atomic_fetch_add(&opened, 1);
        w->together.group = o.group;
        w->together.rank = o.rank;
        w->together.world = o.world;
    }
    if (w->together.rank == 0)
        remove_leftovers(run);
    *out = w;
    return VLA_OK;
}

static void release_content(vla_checkpoint_writer *w)
{
    vlai_free(w->state);
    vlai_free(w->own);
    vlai_free(w->files);
    vlai_arena_fini(&w->copies);
    w->state = w->own = NULL;
    w->files = NULL;
    w->file_count = 0;
}

static void *copy_bytes(vlai_arena *arena, const void *data, size_t size)
{
    void *copy = vlai_arena_alloc(arena, size ? size : 1);
    if (copy && size)
        memcpy(copy, data, size);
    return copy;
}

/* Names of the checkpoint's own files, which one of the caller's would overwrite; and such as no file can have. */
static bool is_taken(const char *name)
{
    static const char *const taken[] = {VLAI_CKPT_MODEL, VLAI_CKPT_STATE, VLAI_CKPT_CHECKSUMS, VLAI_CKPT_DONE, ".", "..", ""};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (!strcmp(name, taken[i]))
            return true;
    return strchr(name, '/') || !strncmp(name, VLAI_CKPT_OPTIMIZER, strlen(VLAI_CKPT_OPTIMIZER));
}

static vla_status take_content(vla_checkpoint_writer *w, const vla_checkpoint_content *c, vla_error *err)
{
    if (!c->state)
        return vlai_fail_hint(err, VLA_E_INVALID, "give a JSON object that has \"step\"", "the checkpoint of step %lld has no state", (long long)c->step);
    w->state = vlai_strdup(c->state);
    w->files = vlai_calloc(c->file_count ? c->file_count : 1, sizeof *w->files);
    w->own = c->own && *c->own ? vlai_strdup(c->own) : NULL;
    bool whole = w->state && w->files && (w->own || !c->own || !*c->own);
    for (size_t i = 0; whole && i < c->file_count; i++) {
        const vla_checkpoint_file *from = &c->files[i];
        vla_checkpoint_file *to = &w->files[w->file_count++];
        if (is_taken(from->name))
            return vlai_fail_hint(err, VLA_E_INVALID, "give it another name", "'%s' is not a name that a further file of a checkpoint can have", from->name);
        to->name = vlai_arena_strdup(&w->copies, from->name);
        to->source = from->source ? vlai_arena_strdup(&w->copies, from->source) : NULL;
        to->data = from->source ? NULL : copy_bytes(&w->copies, from->data, from->size);
        to->size = from->size;
        whole = to->name && (to->source || to->data);
    }
    return whole ? VLA_OK : vlai_fail(err, VLA_E_NOMEM, "out of host memory while a checkpoint is prepared");
}

/* ---- the snapshot ---- */

static bool is_remote(const vla_store *store)
{
    return store->device[VLA_STORE_WEIGHT] && !store->arena[VLA_STORE_WEIGHT];
}

/* Memory for one kind. Large pages make its first use, and every later one, cheaper. */
static vla_status reserve_kind(vla_checkpoint_writer *w, const vla_store *store, int k, vla_error *err)
{
    size_t bytes = store->bytes[k] ? store->bytes[k] : 1;
    if (w->staging[k] == bytes)
        return VLA_OK;
    vlai_free(w->snapshot.arena[k]);
    w->staging[k] = 0;
    w->snapshot.arena[k] = vlai_alloc_aligned(bytes, bytes >= LARGE ? LARGE : 64);
    if (!w->snapshot.arena[k])
        return vlai_nomem(err, bytes);
    if (bytes >= LARGE)
        (void)madvise(w->snapshot.arena[k], bytes / LARGE * LARGE, MADV_HUGEPAGE); /* a wish */
    w->staging[k] = bytes;
    return VLA_OK;
}

/* Whether this rank writes tensors of the kind: rank 0 the weights, and of the optimizer's state each its own part. */
static bool is_kept(const vla_checkpoint_writer *w, const vla_store *store, int k)
{
    bool mine = w->together.rank == 0 || (k != VLA_STORE_WEIGHT && vlai_kind_is_sliced(store, (vla_store_kind)k));
    return mine && store->bytes[k] > 0 && (store->arena[k] || store->device[k]);
}

static void *reserve_thread(void *argument)
{
    vla_checkpoint_writer *w = argument;
    vla_error ignored = VLA_ERROR_INIT;
    for (int i = 0; i < SAVED_KINDS; i++) {
        int k = saved_kinds[i];
        if (!is_kept(w, w->source, k) || reserve_kind(w, w->source, k, &ignored) != VLA_OK)
            continue; /* the save meets this again, and says so */
        for (size_t at = 0; at < w->staging[k]; at += 4096)
            ((volatile char *)w->snapshot.arena[k])[at] = 0;
    }
    return NULL;
}

void vlai_checkpoint_reserve(vla_checkpoint_writer *w, const vla_store *store)
{
    if (w->sync || w->busy || w->reserving || w->fetch || !is_remote(store) || vlai_ckpt_share(store, w->together.rank) == 0 ||
        vlai_ckpt_staging(vlai_ckpt_host_share(store, w->together.group, w->together.rank)) == 0)
        return;
    vla_error ignored = VLA_ERROR_INIT;
    (void)vlai_fetch_create(store, FETCHERS, &w->fetch, &ignored); /* the save meets a failure again */
    w->source = store;
    w->reserving = pthread_create(&w->reserver, NULL, reserve_thread, w) == 0;
}

static void finish_reserving(vla_checkpoint_writer *w)
{
    if (w->reserving)
        pthread_join(w->reserver, NULL);
    w->reserving = false;
}

/* Copies the arenas of the store that a checkpoint holds; the copy keeps its memory for the next save. */
static vla_status take_snapshot(vla_checkpoint_writer *w, const vla_store *store, vla_error *err)
{
    void *arena[VLA_STORE_KINDS];
    memcpy(arena, w->snapshot.arena, sizeof arena);
    w->snapshot = *store;
    memcpy(w->snapshot.arena, arena, sizeof arena);
    memset(w->snapshot.device, 0, sizeof w->snapshot.device);
    w->snapshot.executor = NULL;
    if (is_remote(store) && !w->fetch)
        VLA_TRY(vlai_fetch_create(store, FETCHERS, &w->fetch, err));
    for (int i = 0; i < SAVED_KINDS; i++) {
        int k = saved_kinds[i];
        if (!is_kept(w, store, k))
            continue;
        VLA_TRY(reserve_kind(w, store, k, err));
        if (store->arena[k])
            memcpy(w->snapshot.arena[k], store->arena[k], store->bytes[k]);
        else
            VLA_TRY(vlai_fetch_kind(w->fetch, store, (vla_store_kind)k, w->snapshot.arena[k], err));
    }
    return VLA_OK;
}

static vla_status copy_file(const char *source, const char *target, vla_error *err)
{
    vlai_map map;
    VLA_TRY(vlai_map_open(source, &map, err));
    vlai_writer out;
    vla_status status = vlai_writer_open(&out, target, err);
    if (status == VLA_OK && map.size)
        status = vlai_writer_put(&out, map.data, map.size, err);
    if (status == VLA_OK)
        status = vlai_writer_close(&out, err);
    vlai_map_close(&map);
    return status;
}

/* A file that belongs to a directory still invisible: no rename of its own. */
static vla_status write_plain(const char *path, const void *data, size_t size, vla_error *err)
{
    vlai_writer out;
    VLA_TRY(vlai_writer_open(&out, path, err));
    if (size)
        VLA_TRY(vlai_writer_put(&out, data, size, err));
    return vlai_writer_close(&out, err);
}

static vla_status join(char *out, const char *dir, const char *name, vla_error *err)
{
    if (!vlai_path_join(out, VLAI_CKPT_PATH, dir, name))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", dir, name);
    return VLA_OK;
}

static vla_status write_tensors(const vla_store *store, const char *dir, const char *name, vlai_ckpt_views *views, vla_error *err)
{
    char path[VLAI_CKPT_PATH];
    vla_status status = join(path, dir, name, err);
    if (status == VLA_OK)
        status = vlai_ckpt_write(store, views, path, err);
    vlai_ckpt_views_fini(views);
    return status;
}

/* What another rank wrote is not read again, but it must stand here as it was written. A network's file system may show that
 * late. */
static vla_status check_part(const char *dir, const vlai_ckpt_part *part, vla_error *err)
{
    enum { TRIES = 500 /* of 20 ms */ };
    char path[VLAI_CKPT_PATH];
    uint64_t size = 0;
    vla_status status = VLA_OK;
    VLA_TRY(join(path, dir, part->name, err));
    for (int i = 0; i < TRIES; i++) {
        vlai_map map;
        status = vlai_map_open(path, &map, err);
        if (status == VLA_OK) {
            size = map.size;
            vlai_map_close(&map);
            if (size == part->size)
                return VLA_OK;
        } else if (status != VLA_E_NOT_FOUND) {
            return status;
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    return status != VLA_OK ? status
                            : vlai_fail(err, VLA_E_IO, "%s: %llu bytes, its rank has written %llu", path, (unsigned long long)size,
                                        (unsigned long long)part->size);
}

static void put_sum(vlai_text *text, bool first, const char *name, uint64_t size, uint64_t hash)
{
    vlai_text_puts(text, first ? "\n    " : ",\n    ");
    vlai_text_json(text, name);
    vlai_text_printf(text, ": {\"size\": %llu, \"hash\": \"%016llx\"}", (unsigned long long)size, (unsigned long long)hash);
}

/* Our own files are those that a listing shows; what it shows of other ranks' may be old. */
static vla_status put_own_sums(const char *dir, bool alone, vlai_text *text, vla_error *err)
{
    char **names, path[VLAI_CKPT_PATH];
    size_t count;
    bool first = true;
    int rank, world;
    VLA_TRY(vlai_list_dir(dir, &names, &count, err));
    vla_status status = VLA_OK;
    for (size_t i = 0; status == VLA_OK && i < count; i++) {
        uint64_t hash = 0, size = 0;
        bool optimizer = !strncmp(names[i], VLAI_CKPT_OPTIMIZER, strlen(VLAI_CKPT_OPTIMIZER));
        if (!alone && optimizer && !(vlai_ckpt_parse_optimizer(names[i], &rank, &world) && rank == 0))
            continue;
        status = join(path, dir, names[i], err);
        if (status == VLA_OK)
            status = vlai_ckpt_hash_file(path, &hash, &size, err);
        put_sum(text, first, names[i], size, hash);
        first = false;
    }
    vlai_names_free(names, count);
    return status;
}

/* {"xxh64": {"NAME": {"size": N, "hash": "16 digits"}}} of all files of `dir`, then DONE. parts: of other ranks. */
static vla_status write_checksums(const char *dir, const vlai_ckpt_part *parts, int part_count, vla_error *err)
{
    char path[VLAI_CKPT_PATH];
    vlai_text text = {0};
    vlai_text_printf(&text, "{\n  \"format\": %d,\n  \"xxh64\": {", VLAI_CKPT_FORMAT);
    vla_status status = put_own_sums(dir, part_count == 0, &text, err);
    for (int i = 0; status == VLA_OK && i < part_count; i++) {
        if (!*parts[i].name)
            continue;
        status = check_part(dir, &parts[i], err);
        put_sum(&text, false, parts[i].name, parts[i].size, parts[i].hash);
    }
    vlai_text_puts(&text, "\n  }\n}\n");
    if (status == VLA_OK)
        status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = join(path, dir, VLAI_CKPT_CHECKSUMS, err);
    if (status == VLA_OK)
        status = write_plain(path, text.data, text.size, err);
    vlai_text_fini(&text);
    VLA_TRY(status);
    VLA_TRY(join(path, dir, VLAI_CKPT_DONE, err));
    VLA_TRY(write_plain(path, "done\n", 5, err));
    return vlai_sync_dir(dir, err);
}

/* This rank's part of the optimizer's state; of ranks that all keep everything rank 0 writes it. */
static vla_status write_optimizer(vla_checkpoint_writer *w, const char *dir, char name[VLAI_CKPT_NAME], vla_error *err)
{
    vlai_ckpt_views views;
    int world = vlai_kind_is_sliced(w->source, VLA_STORE_M) ? w->together.world : 1;
    *name = 0;
    if (w->together.rank >= world)
        return VLA_OK;
    vlai_ckpt_optimizer_name(w->together.rank, world, name);
    VLA_TRY(vlai_ckpt_optimizer_views(w->source, world, &views, err));
    if (w->own)
        vlai_ckpt_views_note(&views, VLAI_CKPT_OWN, w->own);
    return write_tensors(w->source, dir, name, &views, err);
}

/* All that rank 0 writes, but for the checksums. */
static vla_status write_files(vla_checkpoint_writer *w, const char *dir, vla_error *err)
{
    char path[VLAI_CKPT_PATH], name[VLAI_CKPT_NAME];
    vlai_ckpt_views views;
    VLA_TRY(vlai_ckpt_weight_views(w->source, &views, err));
    VLA_TRY(write_tensors(w->source, dir, VLAI_CKPT_MODEL, &views, err));
    VLA_TRY(write_optimizer(w, dir, name, err));
    for (size_t i = 0; i < w->file_count; i++) {
        const vla_checkpoint_file *f = &w->files[i];
        VLA_TRY(join(path, dir, f->name, err));
        VLA_TRY(f->source ? copy_file(f->source, path, err) : write_plain(path, f->data, f->size, err));
    }
    VLA_TRY(join(path, dir, VLAI_CKPT_STATE, err));
    return write_plain(path, w->state, strlen(w->state), err);
}

static vla_status begin_directory(vla_checkpoint_writer *w, const char *dir, vla_error *err)
{
    if (w->early != VLA_OK) {
        *err = w->early_error;
        return w->early;
    }
    VLA_TRY(vlai_ckpt_check_finite(w->source, true, err));
    VLA_TRY(vlai_remove_tree(dir, err));
    return vlai_mkdirs(dir, err);
}

/* Renames `temporary` to `final`. One that stands there already (a run that went back to an older checkpoint) steps aside
 * under a name that is still found, until the new one is in place. */
static vla_status put_in_place(const char *temporary, const char *final, vla_error *err)
{
    char aside[VLAI_CKPT_PATH];
    if (snprintf(aside, sizeof aside, "%s%s", final, VLAI_CKPT_REPLACED) >= (int)sizeof aside)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", final);
    if (vlai_is_dir(final)) { /* else one may stand aside alone: a kill came before its successor was in place */
        VLA_TRY(vlai_remove_tree(aside, err));
        VLA_TRY(vlai_publish(final, aside, err));
    }
    VLA_TRY(vlai_publish(temporary, final, err));
    vla_error ignored = VLA_ERROR_INIT;
    if (vlai_remove_tree(aside, &ignored) != VLA_OK)
        vlai_warn("%s", ignored.message);
    return VLA_OK;
}

/* `latest` is a convenience: resuming from the run folder does not read it. So its failure is a warning. */
static void point_latest(const char *run, const char *name)
{
    char link[VLAI_CKPT_PATH], temporary[VLAI_CKPT_PATH];
    if (!vlai_path_join(link, sizeof link, run, VLAI_CKPT_LATEST) ||
        !vlai_path_join(temporary, sizeof temporary, run, VLAI_CKPT_LATEST VLAI_CKPT_TEMPORARY))
        return;
    unlink(temporary);
    vla_error err = VLA_ERROR_INIT;
    if (symlink(name, temporary) != 0)
        vlai_warn("%s: cannot link to %s: %s", link, name, strerror(errno));
    else if (vlai_publish(temporary, link, &err) != VLA_OK) {
        unlink(temporary);
        vlai_warn("%s", err.message);
    }
}

/* Deletes all but the newest keep_last. Deleting never fails a run. */
static void prune(const char *run, int64_t keep_last)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_ckpt_entry *entries;
    size_t count;
    if (keep_last <= 0)
        return;
    if (vlai_ckpt_list(run, &entries, &count, &err) != VLA_OK) {
        vlai_warn("old checkpoints are kept: %s", err.message);
        return;
    }
    for (size_t i = (size_t)keep_last; i < count; i++) {
        char path[VLAI_CKPT_PATH], dying[VLAI_CKPT_PATH];
        if (!vlai_path_join(path, sizeof path, run, entries[i].name) ||
            snprintf(dying, sizeof dying, "%s%s", path, VLAI_CKPT_TEMPORARY) >= (int)sizeof dying)
            continue;
        if (vlai_remove_tree(dying, &err) != VLA_OK || vlai_publish(path, dying, &err) != VLA_OK ||
            vlai_remove_tree(dying, &err) != VLA_OK)
            vlai_warn("old checkpoint is kept: %s", err.message);
    }
    vlai_ckpt_list_free(entries, count);
}

enum { ENDING = 16 };

/* .old, or the first of .old2, .old3, ... that no checkpoint of the folder has. */
static vla_status choose_ending(const char *run, char ending[ENDING], vla_error *err)
{
    char **names;
    size_t count;
    VLA_TRY(vlai_list_dir(run, &names, &count, err));
    bool taken = true;
    for (int n = 1; taken; n++) {
        snprintf(ending, ENDING, n == 1 ? VLAI_CKPT_OLD : VLAI_CKPT_OLD "%d", n);
        taken = false;
        for (size_t i = 0; i < count && !taken; i++)
            taken = is_named(names[i], NULL, ending);
    }
    vlai_names_free(names, count);
    return VLA_OK;
}

vla_status vlai_ckpt_set_aside(const char *run, int64_t step, vla_error *err)
{
    vlai_ckpt_entry *entries;
    size_t count;
    char ending[ENDING];
    if (!vlai_is_dir(run))
        return VLA_OK;
    VLA_TRY(vlai_ckpt_list(run, &entries, &count, err));
    vla_status status = choose_ending(run, ending, err);
    for (size_t i = 0; status == VLA_OK && i < count && entries[i].step > step; i++) {
        char path[VLAI_CKPT_PATH], old[VLAI_CKPT_PATH];
        status = join(path, run, entries[i].name, err);
        if (status == VLA_OK && snprintf(old, sizeof old, "%s%s", path, ending) >= (int)sizeof old)
            status = vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
        if (status == VLA_OK)
            status = vlai_publish(path, old, err);
        if (status == VLA_OK)
            vlai_info("%s belongs to a run before this one: renamed to %s%s", path, entries[i].name, ending);
    }
    vlai_ckpt_list_free(entries, count);
    return status;
}

/* Hears what the others have written, all of them, so that nobody writes any more when this returns; then the first failure
 * counts. */
static vla_status hear_parts(vla_checkpoint_writer *w, vlai_ckpt_part *parts, vla_status status, vla_error *err)
{
    for (int r = 1; r < w->together.world; r++) {
        vla_error failure = VLA_ERROR_INIT;
        vla_status heard = vlai_together_hear(&w->together, r, "part", &parts[r - 1], &failure);
        if (heard != VLA_OK && status == VLA_OK) {
            *err = failure;
            status = vlai_prefix(err, heard, "rank %d", r);
        }
    }
    return status;
}

/* Rank 0, or the only one: the whole checkpoint, under its temporary name until it is complete. */
static vla_status write_whole(vla_checkpoint_writer *w, const char *temporary, const char *final, vla_error *err)
{
    int others = w->together.world - 1;
    vlai_ckpt_part *parts = vlai_calloc((size_t)others + 1, sizeof *parts);
    vla_status status = parts ? begin_directory(w, temporary, err) : vlai_nomem(err, (size_t)others * sizeof *parts);
    vla_status begun = status, said = VLA_OK;
    if (others)
        said = vlai_together_say(&w->together, "begin", begun, err, NULL, err);
    status = status == VLA_OK ? said : status;
    if (status == VLA_OK)
        status = write_files(w, temporary, err);
    if (others && begun == VLA_OK && said == VLA_OK)
        status = hear_parts(w, parts, status, err);
    if (status == VLA_OK)
        status = write_checksums(temporary, parts, others, err);
    if (status == VLA_OK)
        status = put_in_place(temporary, final, err);
    vlai_free(parts);
    if (status == VLA_OK)
        return VLA_OK;
    vla_error ignored = VLA_ERROR_INIT;
    vlai_remove_tree(temporary, &ignored);
    return status;
}

/* Another rank's part. */
static vla_status write_part(vla_checkpoint_writer *w, const char *dir, vlai_ckpt_part *part, vla_error *err)
{
    char path[VLAI_CKPT_PATH], name[VLAI_CKPT_NAME];
    if (w->early != VLA_OK) {
        *err = w->early_error;
        return w->early;
    }
    VLA_TRY(vlai_ckpt_check_finite(w->source, false, err));
    VLA_TRY(write_optimizer(w, dir, name, err));
    if (!*name)
        return VLA_OK;
    snprintf(part->name, sizeof part->name, "%s", name);
    VLA_TRY(join(path, dir, name, err));
    return vlai_ckpt_hash_file(path, &part->hash, &part->size, err);
}

static vla_status add_part(vla_checkpoint_writer *w, const char *temporary, vla_error *err)
{
    vlai_ckpt_part part = {0}, outcome;
    vla_error failure = VLA_ERROR_INIT;
    if (vlai_together_hear(&w->together, 0, "begin", NULL, &failure) == VLA_OK) {
        vla_status status = write_part(w, temporary, &part, &failure);
        VLA_TRY(vlai_together_say(&w->together, "part", status, &failure, &part, err));
    }
    VLA_TRY(vlai_together_hear(&w->together, 0, "outcome", &outcome, err));
    snprintf(w->newest, sizeof w->newest, "%s", outcome.name);
    return VLA_OK;
}

static vla_status write_all(vla_checkpoint_writer *w, vla_error *err)
{
    char name[64], final[VLAI_CKPT_PATH], temporary[VLAI_CKPT_PATH];
    snprintf(name, sizeof name, "%lld_%lld", (long long)w->epoch, (long long)w->step);
    VLA_TRY(join(final, w->run, name, err));
    if (snprintf(temporary, sizeof temporary, "%s%s", final, VLAI_CKPT_TEMPORARY) >= (int)sizeof temporary)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", final);
    if (w->together.rank > 0)
        return add_part(w, temporary, err);
    vla_status status = write_whole(w, temporary, final, err);
    if (status != VLA_OK)
        vlai_prefix(err, status, "checkpoint %s", name);
    if (w->together.world > 1) {
        vlai_ckpt_part outcome = {0};
        vla_error failure = VLA_ERROR_INIT;
        snprintf(outcome.name, sizeof outcome.name, "%s", final);
        vla_status said = vlai_together_say(&w->together, "outcome", status, err, &outcome, &failure);
        if (said != VLA_OK)
            vlai_warn("checkpoint %s: the other ranks do not learn how it ended: %s", name, failure.message);
    }
    VLA_TRY(status);
    snprintf(w->newest, sizeof w->newest, "%s", final);
    point_latest(w->run, name);
    prune(w->run, w->keep_last);
    return VLA_OK;
}

static void *writer_thread(void *argument)
{
    vla_checkpoint_writer *w = argument;
    w->status = write_all(w, &w->error);
    atomic_store(&w->finished, true);
    return NULL;
}

bool vlai_checkpoint_finished(vla_checkpoint_writer *w)
{
    return !w->busy || atomic_load(&w->finished);
}

bool vlai_checkpoint_pending(const vla_checkpoint_writer *w)
{
    return w->busy;
}

vla_status vla_checkpoint_wait(vla_checkpoint_writer *w, const char **path, vla_error *err)
{
    if (w->busy) {
        pthread_join(w->thread, NULL);
        w->busy = false;
        release_content(w);
    }
    vla_status status = w->status;
    w->status = VLA_OK;
    if (status != VLA_OK && err)
        *err = w->error;
    if (path)
        *path = w->newest;
    return status;
}

/* Rank 0 asks for room for all ranks' files. */
static vla_status check_disk(const vla_checkpoint_writer *w, const vla_store *store, int64_t step, vla_error *err)
{
    size_t bytes = vlai_ckpt_bytes(store);
    uint64_t room;
    if (w->together.rank > 0)
        return VLA_OK;
    VLA_TRY(vlai_ckpt_free_bytes(w->run, &room, err));
    return room >= bytes ? VLA_OK
                         : vlai_fail_hint(err, VLA_E_IO, "free some space, or keep fewer checkpoints with checkpoint.keep_last",
                                          "%s: no room for the checkpoint of step %lld: it takes %.6g GB, %.6g GB are free", w->run,
                                          (long long)step, 1e-9 * (double)bytes, 1e-9 * (double)room);
}

/* Everything that a save needs before its writing begins. *sync: it is written from the store itself. */
static vla_status prepare_save(vla_checkpoint_writer *w, const vla_store *store, const vla_checkpoint_content *content, bool *sync, vla_error *err)
{
    size_t share = vlai_ckpt_share(store, w->together.rank);
    vla_store_kind first = w->together.rank == 0 ? VLA_STORE_WEIGHT : VLA_STORE_M;
    *sync = w->sync || share == 0;
    VLA_TRY(check_disk(w, store, content->step, err));
    VLA_TRY(take_content(w, content, err));
    w->source = store;
    if (!*sync && w->staging[first] == 0 && vlai_ckpt_staging(vlai_ckpt_host_share(store, w->together.group, w->together.rank)) == 0) {
        if (!w->warned)
            vlai_info("too little memory for a snapshot of %.3f GB: steps wait while a checkpoint is written", 1e-9 * (double)share);
        w->warned = *sync = true;
    }
    if (*sync)
        return VLA_OK;
    VLA_TRY(take_snapshot(w, store, err));
    w->source = &w->snapshot;
    return VLA_OK;
}

vla_status vla_checkpoint_save(vla_checkpoint_writer *w, const vla_store *store, const vla_checkpoint_content *content,
                               vla_error *err)
{
    vla_checkpoint_content c = {0};
    VLA_TRY(vlai_take_sized(&c, sizeof c, content, "vla_checkpoint_content", err));
    VLA_TRY(vla_checkpoint_wait(w, NULL, err));
    finish_reserving(w);
    w->error = w->early_error = (vla_error)VLA_ERROR_INIT;
    w->together.number++;
    w->epoch = c.epoch;
    w->step = c.step;
    bool sync = false;
    w->early = prepare_save(w, store, &c, &sync, &w->early_error);
    if (w->early != VLA_OK && w->together.world == 1) {
        release_content(w);
        if (err)
            *err = w->early_error;
        return w->early;
    }
    atomic_store(&w->finished, false);
    /* A rank that has nothing to write need not wait for the others. */
    bool waits = sync && (w->together.world == 1 || vlai_ckpt_share(store, w->together.rank) > 0);
    if (!waits && pthread_create(&w->thread, NULL, writer_thread, w) == 0) {
        w->busy = true;
        return VLA_OK;
    }
    vla_error failure = VLA_ERROR_INIT;
    vla_status status = write_all(w, err ? err : &failure); /* also where no thread could be made */
    release_content(w);
    return status;
}

void vlai_checkpoint_abandon(vla_checkpoint_writer *w)
{
    if (w)
        atomic_store(&w->together.abandoned, true);
}

void vla_checkpoint_writer_destroy(vla_checkpoint_writer *w)
{
    if (!w)
        return;
    if (w->busy) {
        vla_error err = VLA_ERROR_INIT;
        if (vla_checkpoint_wait(w, NULL, &err) != VLA_OK)
            vlai_warn("%s", err.message);
    }
    finish_reserving(w);
    release_content(w);
    vlai_fetch_destroy(w->fetch);
    for (int i = 0; i < SAVED_KINDS; i++)
        vlai_free(w->snapshot.arena[saved_kinds[i]]);
    vlai_free(w->run);
    vlai_free(w);
}
