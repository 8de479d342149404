/* Finding, verifying and restoring checkpoints, and the questions about disk and memory that are asked before a save. */
#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/system.h"
#include "base/work.h"
#include "ckpt/ckpt.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <xxhash.h>

struct vla_checkpoint {
    char *path, *state;
    int64_t step;
};

static vla_status join(char *out, const char *dir, const char *name, vla_error *err)
{
    if (!vlai_path_join(out, VLAI_CKPT_PATH, dir, name))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", dir, name);
    return VLA_OK;
}

vla_status vlai_ckpt_hash_file(const char *path, uint64_t *hash, uint64_t *size, vla_error *err)
{
    vlai_map map;
    VLA_TRY(vlai_map_open(path, &map, err));
    XXH64_state_t *state = XXH64_createState();
    if (state) {
        XXH64_reset(state, 0);
        for (size_t at = 0; at < map.size; at += VLAI_WORK_PIECE) {
            XXH64_update(state, map.data + at, map.size - at < VLAI_WORK_PIECE ? map.size - at : VLAI_WORK_PIECE);
            vlai_work_add();
        }
        *hash = XXH64_digest(state);
        *size = map.size;
    }
    XXH64_freeState(state);
    vlai_map_close(&map);
    return state ? VLA_OK : vlai_fail(err, VLA_E_NOMEM, "%s: out of host memory while it is hashed", path);
}

static const char advice[] = "take an older checkpoint of the run, or copy this one again";

static vla_status damaged(vla_error *err, const char *dir, const char *name, const char *what)
{
    return vlai_fail_hint(err, VLA_E_CORRUPT, advice, "%s/%s: the checkpoint is damaged: %s", dir, name, what);
}

/* The same of a file whose text already says what is wrong with it. */
static vla_status advise(vla_error *err, vla_status status)
{
    if (status != VLA_OK && status != VLA_E_NOMEM)
        vlai_prefix(err, vlai_hint(err, status, "%s", advice), "the checkpoint is damaged");
    return status;
}

/* The optimizer's files are those of all ranks of one world. */
static vla_status check_optimizer(const char *dir, const json_t *list, vla_error *err)
{
    const char *name;
    json_t *entry;
    int rank, world, found = 0, all = 0;
    char wanted[VLAI_CKPT_NAME];
    json_object_foreach((json_t *)(uintptr_t)list, name, entry)
        if (vlai_ckpt_parse_optimizer(name, &rank, &world)) {
            if (found++ && world != all)
                return damaged(err, dir, name, "it is of another number of ranks than the other files of the optimizer");
            all = world;
        }
    for (int r = 0; r < (all ? all : 1); r++) {
        vlai_ckpt_optimizer_name(r, all ? all : 1, wanted);
        if (!json_object_get(list, wanted))
            return damaged(err, dir, wanted, "the list of checksums lacks it");
    }
    return VLA_OK;
}

static vla_status verify_listed(const char *dir, const json_t *list, bool hashes, vla_error *err)
{
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)(uintptr_t)list, name, entry) {
        char path[VLAI_CKPT_PATH], what[160];
        int64_t want_size;
        const char *want_hash;
        if (!*name || strchr(name, '/'))
            return damaged(err, dir, VLAI_CKPT_CHECKSUMS, "it lists a name that is none");
        VLA_TRY(join(path, dir, VLAI_CKPT_CHECKSUMS, err));
        VLA_TRY(vlai_json_need_int(entry, "size", path, &want_size, err));
        VLA_TRY(vlai_json_string(entry, "hash", "", path, &want_hash, err));
        VLA_TRY(join(path, dir, name, err));
        uint64_t hash, size;
        vlai_map map;
        vla_status status = vlai_map_open(path, &map, err);
        if (status == VLA_E_NOT_FOUND)
            return damaged(err, dir, name, "the file is missing");
        VLA_TRY(status);
        size = map.size;
        vlai_map_close(&map);
        if (size != (uint64_t)want_size) {
            snprintf(what, sizeof what, "%llu bytes, wanted %lld", (unsigned long long)size, (long long)want_size);
            return damaged(err, dir, name, what);
        }
        if (!hashes)
            continue;
        VLA_TRY(vlai_ckpt_hash_file(path, &hash, &size, err));
        if (hash != strtoull(want_hash, NULL, 16) || strlen(want_hash) != 16) {
            snprintf(what, sizeof what, "its XXH64 is %016llx, wanted %.16s", (unsigned long long)hash, want_hash);
            return damaged(err, dir, name, what);
        }
    }
    return VLA_OK;
}

/* A start opens its checkpoint several times, and hashing 25 GB takes a while: what this process has found whole is not hashed
 * again as long as no file has changed since. */
static struct {
    pthread_mutex_t lock;
    char dir[VLAI_CKPT_PATH];
    uint64_t files; /* names, sizes, times of all that are listed */
} whole = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t stamp_of(const char *dir, const json_t *list)
{
    uint64_t stamp = 0;
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)(uintptr_t)list, name, entry) {
        char path[VLAI_CKPT_PATH];
        struct stat s;
        if (!vlai_path_join(path, sizeof path, dir, name) || stat(path, &s) != 0)
            return 0;
        const int64_t facts[] = {(int64_t)s.st_size, (int64_t)s.st_ino, (int64_t)s.st_mtim.tv_sec, (int64_t)s.st_mtim.tv_nsec,
                                 (int64_t)s.st_ctim.tv_sec, (int64_t)s.st_ctim.tv_nsec};
        stamp = XXH64(facts, sizeof facts, XXH64(name, strlen(name), stamp));
        const char *hash = json_string_value(json_object_get(entry, "hash"));
        stamp = XXH64(hash ? hash : "", hash ? strlen(hash) : 0, stamp);
    }
    return stamp;
}

static bool is_known_whole(const char *dir, uint64_t stamp)
{
    pthread_mutex_lock(&whole.lock);
    bool known = stamp && stamp == whole.files && !strcmp(dir, whole.dir);
    pthread_mutex_unlock(&whole.lock);
    return known;
}

static void note_whole(const char *dir, uint64_t stamp)
{
    pthread_mutex_lock(&whole.lock);
    snprintf(whole.dir, sizeof whole.dir, "%s", dir);
    whole.files = stamp;
    pthread_mutex_unlock(&whole.lock);
}

vla_status vlai_ckpt_verify(const char *dir, bool hashes, vla_error *err)
{
    char path[VLAI_CKPT_PATH];
    VLA_TRY(join(path, dir, VLAI_CKPT_DONE, err));
    if (!vlai_is_file(path))
        return vlai_fail_hint(err, VLA_E_CORRUPT, "its writing was interrupted: take an older checkpoint of the run",
                              "%s: not a whole checkpoint: it has no %s file", dir, VLAI_CKPT_DONE);
    VLA_TRY(join(path, dir, VLAI_CKPT_CHECKSUMS, err));
    json_t *sums;
    vla_status status = vlai_json_load(path, &sums, err);
    if (status == VLA_E_NOT_FOUND)
        return damaged(err, dir, VLAI_CKPT_CHECKSUMS, "the file is missing");
    if (status == VLA_E_FORMAT || status == VLA_E_CORRUPT)
        return advise(err, status);
    VLA_TRY(status);
    int64_t format;
    json_t *list;
    status = advise(err, vlai_json_need_int(sums, "format", path, &format, err));
    if (status == VLA_OK && format != VLAI_CKPT_FORMAT)
        status = vlai_fail_hint(err, VLA_E_UNSUPPORTED, "a newer version of vla wrote it",
                                "%s: checkpoint format %lld, this build reads %d", path, (long long)format,
                                VLAI_CKPT_FORMAT);
    if (status == VLA_OK)
        status = advise(err, vlai_json_need(sums, "xxh64", JSON_OBJECT, path, &list, err));
    if (status == VLA_OK) {
        static const char *const needed[] = {VLAI_CKPT_MODEL, VLAI_CKPT_STATE};
        for (int i = 0; status == VLA_OK && i < 2; i++)
            if (!json_object_get(list, needed[i]))
                status = damaged(err, dir, needed[i], "the list of checksums lacks it");
    }
    if (status == VLA_OK)
        status = check_optimizer(dir, list, err);
    if (status == VLA_OK) {
        uint64_t stamp = stamp_of(dir, list);
        hashes = hashes && !is_known_whole(dir, stamp);
        status = verify_listed(dir, list, hashes, err);
        if (status == VLA_OK && hashes)
            note_whole(dir, stamp);
    }
    json_decref(sums);
    return status;
}

static bool number(const char **at, int64_t *out)
{
    const char *p = *at;
    *out = 0;
    while (*p >= '0' && *p <= '9' && p - *at < 18)
        *out = *out * 10 + (*p++ - '0');
    bool any = p > *at;
    *at = p;
    return any;
}

bool vlai_ckpt_parse_name(const char *name, int64_t *epoch, int64_t *step)
{
    if (!number(&name, epoch) || *name++ != '_' || !number(&name, step))
        return false;
    return !*name || !strcmp(name, VLAI_CKPT_REPLACED);
}

/* Newest first; the one in place before the one it replaces. */
static int compare_entries(const void *a, const void *b)
{
    const vlai_ckpt_entry *x = a, *y = b;
    if (x->step != y->step)
        return x->step < y->step ? 1 : -1;
    if (x->epoch != y->epoch)
        return x->epoch < y->epoch ? 1 : -1;
    return strcmp(x->name, y->name);
}

vla_status vlai_ckpt_list(const char *run, vlai_ckpt_entry **out, size_t *count, vla_error *err)
{
    *out = NULL;
    *count = 0;
    char **names, path[VLAI_CKPT_PATH];
    size_t n, capacity = 0;
    VLA_TRY(vlai_list_dir(run, &names, &n, err));
    vla_status status = VLA_OK;
    for (size_t i = 0; status == VLA_OK && i < n; i++) {
        vlai_ckpt_entry entry = {0};
        struct stat st;
        if (!vlai_ckpt_parse_name(names[i], &entry.epoch, &entry.step) ||
            snprintf(path, sizeof path, "%s/%s/%s", run, names[i], VLAI_CKPT_DONE) >= (int)sizeof path)
            continue;
        if (stat(path, &st) != 0 && errno != ENOENT && errno != ENOTDIR) { /* one that cannot be looked at may be whole */
            status = vlai_fail_hint(err, VLA_E_IO, "make it readable, or rename the checkpoint", "%s: cannot stat: %s", path, strerror(errno));
            break;
        }
        if (!vlai_is_file(path))
            continue;
        entry.name = vlai_strdup(names[i]);
        status = entry.name ? vlai_reserve((void **)out, &capacity, *count, sizeof **out, err)
                            : vlai_nomem(err, strlen(names[i]));
        if (status == VLA_OK)
            (*out)[(*count)++] = entry;
        else
            vlai_free(entry.name);
    }
    vlai_names_free(names, n);
    if (status != VLA_OK) {
        vlai_ckpt_list_free(*out, *count);
        *out = NULL;
        *count = 0;
    } else if (*count) {
        qsort(*out, *count, sizeof **out, compare_entries);
    }
    return status;
}

void vlai_ckpt_list_free(vlai_ckpt_entry *entries, size_t count)
{
    for (size_t i = 0; i < count; i++)
        vlai_free(entries[i].name);
    vlai_free(entries);
}

static vla_status open_directory(const char *dir, bool hashes, vla_checkpoint **out, vla_error *err)
{
    char path[VLAI_CKPT_PATH];
    json_t *state = NULL;
    VLA_TRY(vlai_ckpt_verify(dir, hashes, err));
    VLA_TRY(join(path, dir, VLAI_CKPT_STATE, err));
    vla_checkpoint *c = vlai_calloc(1, sizeof *c);
    if (!c)
        return vlai_nomem(err, sizeof *c);
    size_t size;
    vla_status status = vlai_read_file(path, 0, &c->state, &size, err);
    if (status == VLA_OK)
        status = vlai_json_parse(c->state, size, path, &state, err);
    if (status == VLA_OK)
        status = vlai_json_need_int(state, "step", path, &c->step, err);
    json_decref(state);
    if (status == VLA_OK && !(c->path = vlai_strdup(dir)))
        status = vlai_nomem(err, strlen(dir));
    if (status != VLA_OK) {
        vla_checkpoint_close(c);
        return status;
    }
    *out = c;
    return VLA_OK;
}

bool vlai_ckpt_is_there(const char *dir)
{
    char path[VLAI_CKPT_PATH];
    return vlai_path_join(path, sizeof path, dir, VLAI_CKPT_DONE) && vlai_is_file(path);
}

/* The newest checkpoint of a run folder that is whole. *gone: one that was listed is not there any more. */
static vla_status try_newest(const char *run, vla_checkpoint **out, bool *gone, vla_error *err)
{
    vlai_ckpt_entry *entries;
    size_t count;
    VLA_TRY(vlai_ckpt_list(run, &entries, &count, err));
    vla_status status = vlai_fail_hint(err, VLA_E_NOT_FOUND,
                                       "name a checkpoint (EPOCH_STEP, with a DONE file), a run folder that holds one, or "
                                       "a weights file ending in .safetensors",
                                       "%s: no whole checkpoint in it", run);
    for (size_t i = 0; i < count; i++) {
        char path[VLAI_CKPT_PATH];
        status = join(path, run, entries[i].name, err);
        if (status == VLA_OK)
            status = open_directory(path, true, out, err);
        *gone = status != VLA_OK && !vlai_ckpt_is_there(path);
        if (*gone || (status != VLA_E_CORRUPT && status != VLA_E_FORMAT))
            break;
        if (i + 1 < count && err)
            vlai_warn("%s; the next older checkpoint is tried", err->message);
    }
    vlai_ckpt_list_free(entries, count);
    return status;
}

/* Its training may delete a checkpoint of a run while this looks at it, once it has written newer ones: these are looked for then. */
static vla_status open_newest(const char *run, vla_checkpoint **out, vla_error *err)
{
    enum { TRIES = 3 };
    vla_status status = VLA_OK;
    bool gone = true;
    for (int i = 0; gone && i < TRIES; i++) {
        gone = false;
        status = try_newest(run, out, &gone, err);
    }
    return status;
}

vla_status vlai_checkpoint_open_known(const char *dir, vla_checkpoint **out, vla_error *err)
{
    *out = NULL;
    return open_directory(dir, false, out, err);
}

vla_status vla_checkpoint_open(const char *path, vla_checkpoint **out, vla_error *err)
{
    *out = NULL;
    if (!vlai_is_dir(path))
        return vlai_fail_hint(err, VLA_E_NOT_FOUND, "name a checkpoint folder or a run folder",
                              vlai_is_file(path) ? "%s: is a file, wanted a checkpoint folder" : "%s: no such checkpoint folder", path);
    char file[VLAI_CKPT_PATH];
    static const char *const marks[] = {VLAI_CKPT_DONE, VLAI_CKPT_CHECKSUMS, VLAI_CKPT_STATE, VLAI_CKPT_MODEL};
    for (int i = 0; i < 4; i++) {
        VLA_TRY(join(file, path, marks[i], err));
        if (vlai_is_file(file))
            return open_directory(path, true, out, err);
    }
    return open_newest(path, out, err);
}

void vla_checkpoint_close(vla_checkpoint *c)
{
    if (!c)
        return;
    vlai_free(c->path);
    vlai_free(c->state);
    vlai_free(c);
}

const char *vla_checkpoint_path(const vla_checkpoint *c)
{
    return c->path;
}

int64_t vla_checkpoint_step(const vla_checkpoint *c)
{
    return c->step;
}

const char *vla_checkpoint_state(const vla_checkpoint *c)
{
    return c->state;
}

/* How many ranks' files hold the optimizer's state. */
static vla_status optimizer_files(const char *dir, int *out, vla_error *err)
{
    char **names;
    size_t count;
    int rank;
    *out = 0;
    VLA_TRY(vlai_list_dir(dir, &names, &count, err));
    for (size_t i = 0; i < count && !*out; i++)
        if (!vlai_ckpt_parse_optimizer(names[i], &rank, out))
            *out = 0;
    vlai_names_free(names, count);
    return *out ? VLA_OK : vlai_fail(err, VLA_E_NOT_FOUND, "%s: there is no state of the optimizer in it", dir);
}

vla_status vla_checkpoint_own(const vla_checkpoint *c, int rank, int world, char **text, vla_error *err)
{
    int files;
    char path[VLAI_CKPT_PATH], name[VLAI_CKPT_NAME];
    vlai_safetensors *file;
    *text = NULL;
    VLA_TRY(optimizer_files(c->path, &files, err));
    if (files != world || rank < 0 || rank >= world)
        return VLA_OK;
    vlai_ckpt_optimizer_name(rank, world, name);
    VLA_TRY(join(path, c->path, name, err));
    VLA_TRY(vlai_safetensors_open(path, &file, err));
    const char *own = vlai_safetensors_metadata(file, VLAI_CKPT_OWN);
    *text = own ? strdup(own) : NULL;
    vla_status status = own && !*text ? vlai_nomem(err, strlen(own)) : VLA_OK;
    vlai_safetensors_close(file);
    return status;
}

static vla_status restore_optimizer(const vla_checkpoint *c, vla_store *store, vla_error *err)
{
    int world, opened = 0;
    char path[VLAI_CKPT_PATH], name[VLAI_CKPT_NAME];
    VLA_TRY(optimizer_files(c->path, &world, err));
    vlai_safetensors **files = vlai_calloc((size_t)world, sizeof *files);
    vla_status status = files ? VLA_OK : vlai_nomem(err, (size_t)world * sizeof *files);
    for (int r = 0; status == VLA_OK && r < world; r++) {
        vlai_ckpt_optimizer_name(r, world, name);
        status = join(path, c->path, name, err);
        if (status == VLA_OK)
            status = vlai_safetensors_open(path, &files[r], err);
        opened += status == VLA_OK;
    }
    if (status == VLA_OK)
        status = vlai_ckpt_read_optimizer(store, files, (size_t)world, world == 1 ? path : c->path, err);
    for (int r = 0; r < opened; r++)
        vlai_safetensors_close(files[r]);
    vlai_free(files);
    return status;
}

vla_status vla_checkpoint_restore(const vla_checkpoint *c, vla_store *store, vla_error *err)
{
    char path[VLAI_CKPT_PATH];
    vlai_safetensors *file;
    VLA_TRY(join(path, c->path, VLAI_CKPT_MODEL, err));
    VLA_TRY(vlai_safetensors_open(path, &file, err));
    vla_status status = vlai_ckpt_read_weights(store, file, path, err);
    vlai_safetensors_close(file);
    VLA_TRY(status);
    return restore_optimizer(c, store, err);
}

vla_status vlai_ckpt_free_bytes(const char *path, uint64_t *out, vla_error *err)
{
    char part[VLAI_CKPT_PATH];
    if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
    struct statvfs s;
    while (statvfs(part, &s) != 0) {
        char *slash = strrchr(part, '/');
        if (errno != ENOENT || !strcmp(part, ".") || !strcmp(part, "/"))
            return vlai_fail(err, VLA_E_IO, "%s: cannot tell the free space: %s", path, strerror(errno));
        if (!slash)
            snprintf(part, sizeof part, ".");
        else
            slash[slash == part] = 0;
    }
    *out = (uint64_t)s.f_bavail * s.f_frsize;
    return VLA_OK;
}

vla_status vlai_ckpt_check_room(const char *run, uint64_t bytes, int64_t keep_last, int64_t planned, vla_error *err)
{
    uint64_t room;
    VLA_TRY(vlai_ckpt_free_bytes(run, &room, err));
    uint64_t wanted = keep_last > 0 ? (uint64_t)keep_last + 1 : 1; /* kept ones, and the one being written */
    if (planned >= 0 && wanted > (uint64_t)planned)
        wanted = (uint64_t)planned;
    uint64_t fits = bytes ? room / bytes : wanted;
    if (fits >= wanted)
        return VLA_OK;
    char hint[256];
    if (fits >= 2)
        snprintf(hint, sizeof hint, "checkpoint.keep_last=%llu fits; or free some space, or set checkpoint.save_path elsewhere",
                 (unsigned long long)(fits - 1));
    else
        snprintf(hint, sizeof hint, "free some space, or set checkpoint.save_path to another disk");
    return vlai_fail_hint(err, VLA_E_IO, hint,
                          "%s: no room for the checkpoints: %.6g GB each, %llu of them at once (keep_last %lld), %.6g GB free",
                          run, 1e-9 * (double)bytes, (unsigned long long)wanted, (long long)keep_last, 1e-9 * (double)room);
}

bool vlai_ckpt_has_room(size_t available, size_t bytes)
{
    return available / 8 >= bytes || (available > (size_t)16 << 30 && available - ((size_t)16 << 30) >= bytes);
}

size_t vlai_ckpt_staging(size_t bytes)
{
    return vlai_ckpt_has_room(vlai_available_bytes(), bytes) ? bytes : 0;
}
