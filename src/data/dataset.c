/* Opening a dataset: the steps of loading in order, the choice of episodes, and the simple questions. */
#include "data/set.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

char *vlai_set_strdup(vla_dataset *set, const char *text)
{
    return vlai_arena_strdup(&set->arena, text);
}

char *vlai_set_printf(vla_dataset *set, const char *format, ...)
{
    char text[4096];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return n < 0 ? NULL : vlai_set_strdup(set, text);
}

vla_status vlai_set_path(const vla_dataset *set, const char *relative, char *out, size_t size, vla_error *err)
{
    if (relative[0] == '/' || !vlai_path_join(out, size, set->root, relative))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: unusable path", set->root, relative);
    return VLA_OK;
}

const char *vlai_fault_kind(const char *path, vla_status status)
{
    const char *fault = vlai_file_fault(path);
    if (fault)
        return fault;
    return status == VLA_E_FORMAT ? "file-truncated" : status == VLA_E_UNSUPPORTED ? "unsupported" : "file-damaged";
}

const char *vlai_fault_words(const char *fault)
{
    return !strcmp(fault, "file-missing")      ? "missing"
           : !strcmp(fault, "file-unreadable") ? "not readable (no permission, or no regular file)"
           : !strcmp(fault, "file-empty")      ? "empty"
                                               : "a Git-LFS pointer";
}

vla_status vlai_set_create(const char *root, vla_dataset **out, vla_error *err)
{
    *out = NULL;
    vla_dataset *set = vlai_calloc(1, sizeof *set);
    if (!set)
        return vlai_nomem(err, sizeof *set);
    pthread_mutex_init(&set->column_lock, NULL);
    pthread_mutex_init(&set->clip_lock, NULL);
    set->root = vlai_strdup(root);
    if (!set->root) {
        vla_dataset_close(set);
        return vlai_nomem(err, strlen(root));
    }
    size_t n = strlen(set->root);
    while (n > 1 && set->root[n - 1] == '/')
        set->root[--n] = 0;
    *out = set;
    return VLA_OK;
}

static void hash_text(XXH3_state_t *state, const char *text)
{
    XXH3_128bits_update(state, text, strlen(text) + 1);
}

/* Metadata, episode table, names and sizes of the files: equal on every machine that holds the same set. */
static vla_status make_digest(vla_dataset *set, vla_error *err)
{
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return vlai_nomem(err, 576);
    XXH3_128bits_reset(state);
    char path[4096], *text = NULL;
    size_t size = 0;
    vla_status status = vlai_set_path(set, "meta/info.json", path, sizeof path, err);
    if (status == VLA_OK)
        status = vlai_read_file(path, 0, &text, &size, err);
    if (status == VLA_OK) {
        XXH3_128bits_update(state, text, size);
        for (int64_t i = 0; i < set->task_count; i++) {
            XXH3_128bits_update(state, &set->tasks[i].index, sizeof set->tasks[i].index);
            hash_text(state, set->tasks[i].text);
        }
        for (int64_t i = 0; i < set->episode_count; i++) {
            int64_t row[4] = {set->episodes[i].index, set->episodes[i].length, set->episodes[i].file,
                              set->episodes[i].file_row};
            XXH3_128bits_update(state, row, sizeof row);
        }
        for (int i = 0; i < set->file_count; i++) {
            hash_text(state, set->files[i].path);
            XXH3_128bits_update(state, &set->files[i].size, sizeof set->files[i].size);
        }
        for (int64_t c = 0; c < set->camera_count; c++)
            for (int64_t i = 0; i < set->cameras[c].file_count; i++) {
                hash_text(state, set->cameras[c].files[i].path);
                XXH3_128bits_update(state, &set->cameras[c].files[i].size, sizeof set->cameras[c].files[i].size);
            }
        XXH128_hash_t hash = XXH3_128bits_digest(state);
        snprintf(set->digest, sizeof set->digest, "%016llx%016llx", (unsigned long long)hash.high64,
                 (unsigned long long)hash.low64);
    }
    XXH3_freeState(state);
    vlai_free(text);
    return status;
}

vla_status vlai_set_load(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    VLA_TRY(vlai_load_info(set, findings, err));
    if (set->version == 0)
        return VLA_OK;
    VLA_TRY(vlai_load_tasks(set, findings, err));
    VLA_TRY(vlai_load_episodes(set, findings, err));
    VLA_TRY(vlai_list_data(set, err));
    VLA_TRY(vlai_list_clips(set, err));
    VLA_TRY(vlai_load_rows(set, findings, err));
    VLA_TRY(vlai_load_clips(set, findings, err));
    return make_digest(set, err);
}

int64_t vlai_set_safe_prefix(const vla_dataset *set)
{
    int64_t n = 0;
    while (n < set->episode_count && !set->episodes[n].bad)
        n++;
    return n;
}

/* --- opening --- */

/* Keeps the first error as a sentence and the warnings as a list. */
typedef struct collector {
    vla_dataset *set;
    char error[sizeof((vla_error *)0)->message], hint[sizeof((vla_error *)0)->hint];
    vla_status status;
    bool bound_only; /* what is kept concerns single episodes; an error of the whole set replaces it */
    bool failed;     /* out of memory while keeping a warning */
} collector;

static void collect(const vlai_finding *finding, void *user)
{
    collector *c = user;
    char text[1024];
    vlai_finding_text(finding, text, sizeof text);
    if (finding->level == 'W') {
        if (vlai_reserve((void **)&c->set->warnings, &c->set->warning_room, c->set->warning_count,
                         sizeof *c->set->warnings, NULL) != VLA_OK ||
            !(c->set->warnings[c->set->warning_count] = vlai_set_strdup(c->set, text)))
            c->failed = true;
        else
            c->set->warning_count++;
        return;
    }
    if (c->error[0] && !(c->bound_only && !finding->bound))
        return;
    snprintf(c->error, sizeof c->error, "%s", text);
    snprintf(c->hint, sizeof c->hint, "%s", finding->hint ? finding->hint : "");
    c->bound_only = finding->bound;
    c->status = !strcmp(finding->kind, "file-missing") ? VLA_E_NOT_FOUND
                : !strcmp(finding->kind, "version") || !strncmp(finding->kind, "file-", 5) ||
                        !strcmp(finding->kind, "lfs-pointer") || !strcmp(finding->kind, "json")
                    ? VLA_E_FORMAT
                    : VLA_E_CORRUPT;
}

static vla_status refuse(const vla_dataset *set, const collector *c, const vlai_findings *findings, vla_error *err)
{
    int64_t more = findings->errors + findings->bound_errors - 1, prefix = vlai_set_safe_prefix(set);
    char tail[128] = "";
    if (more > 0)
        snprintf(tail, sizeof tail, " (and %lld more error%s)", (long long)more, more > 1 ? "s" : "");
    vla_status status = vlai_fail(err, c->status, "%s/%s%s", set->root, c->error, tail);
    if (findings->errors == 0)
        return vlai_hint(err, status, "%lld of %lld episodes from the start are whole%s; list the faults: vla check %s%s%s",
                         (long long)prefix, (long long)set->episode_count,
                         prefix > 0 ? ": train on them with --allow-partial" : "", set->root, c->hint[0] ? "; " : "", c->hint);
    return vlai_hint(err, status, "%s%svla check %s lists all findings", c->hint, c->hint[0] ? "; " : "", set->root);
}

static int by_number(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* Which rows of the episode table are taken, in file order. */
static vla_status choose(vla_dataset *set, const vla_dataset_options *options, int64_t limit, vla_error *err)
{
    size_t wanted = options->episodes ? options->episode_count : (size_t)limit;
    set->chosen_row = vlai_arena_alloc(&set->arena, (wanted + 1) * sizeof *set->chosen_row);
    set->chosen = vlai_arena_alloc(&set->arena, (wanted + 1) * sizeof *set->chosen);
    if (!set->chosen_row || !set->chosen)
        return vlai_nomem(err, wanted * sizeof *set->chosen);
    int64_t n = 0;
    for (size_t i = 0; i < wanted; i++) {
        int64_t row = options->episodes ? vlai_set_episode(set, options->episodes[i]) : (int64_t)i;
        if (row >= 0 && row < limit)
            set->chosen_row[n++] = row;
        else if (!(options->flags & VLA_DATASET_SKIP_MISSING))
            return vlai_fail_hint(err, VLA_E_INVALID, "check the list of episodes, or leave missing ones out with "
                                                      "data.lerobot_config.skip_missing: true",
                                  "%s: episode %lld was asked for; the set has %lld episodes (%lld..%lld)%s", set->root,
                                  (long long)options->episodes[i], (long long)set->episode_count,
                                  (long long)(set->episode_count ? set->episodes[0].index : 0),
                                  (long long)(set->episode_count ? set->episodes[set->episode_count - 1].index : 0),
                                  row >= 0 ? ", this one is not whole" : "");
    }
    qsort(set->chosen_row, (size_t)n, sizeof *set->chosen_row, by_number);
    int64_t unique = 0;
    for (int64_t i = 0; i < n; i++)
        if (unique == 0 || set->chosen_row[unique - 1] != set->chosen_row[i])
            set->chosen_row[unique++] = set->chosen_row[i];
    /* Files hold ascending episodes as LeRobot writes them; other orders are kept as they lie. */
    for (int64_t i = 1; i < unique; i++) {
        int64_t row = set->chosen_row[i], k = i;
        const vlai_episode_row *e = &set->episodes[row];
        for (; k > 0; k--) {
            const vlai_episode_row *p = &set->episodes[set->chosen_row[k - 1]];
            if (p->file < e->file || (p->file == e->file && p->file_row <= e->file_row))
                break;
            set->chosen_row[k] = set->chosen_row[k - 1];
        }
        set->chosen_row[k] = row;
    }
    for (int64_t i = 0; i < unique; i++) {
        const vlai_episode_row *e = &set->episodes[set->chosen_row[i]];
        set->chosen[i] = (vla_episode){.index = e->index, .length = e->length, .first_row = set->rows, .tasks = e->tasks,
                                       .task_count = e->task_count};
        set->rows += e->length;
    }
    set->chosen_count = unique;
    if (unique == 0)
        return vlai_fail(err, VLA_E_INVALID, "%s: no episode is left", set->root);
    return VLA_OK;
}

vla_status vla_dataset_open(const char *root, const vla_dataset_options *options, vla_dataset **out, vla_error *err)
{
    vla_dataset_options o = VLA_DATASET_OPTIONS_DEFAULT;
    *out = NULL;
    if (options)
        VLA_TRY(vlai_take_sized(&o, sizeof o, options, "vla_dataset_options", err));
    options = &o;
    vla_dataset *set;
    VLA_TRY(vlai_set_create(root, &set, err));
    collector c = {.set = set};
    vlai_findings findings = {.report = collect, .user = &c};
    set->flags = options->flags;
    vla_status status = vlai_load_info(set, &findings, err);
    if (status == VLA_OK && set->version)
        status = vlai_load_tasks(set, &findings, err);
    if (status == VLA_OK && set->version)
        status = vlai_load_episodes(set, &findings, err);
    if (status == VLA_OK && set->version)
        status = vlai_list_data(set, err);
    if (status == VLA_OK && set->version)
        status = vlai_list_clips(set, err);
    if (status != VLA_OK)
        goto fail;
    bool whole = set->version && findings.errors + findings.bound_errors == 0;
    if (whole && !(options->flags & VLA_DATASET_NO_CACHE))
        vlai_sidecar_place(set, options->cache_dir);
    set->warnings_before_scan = set->warning_count;
    if (set->version && !(whole && vlai_sidecar_load(set))) {
        VLA_TRY_GOTO(vlai_load_rows(set, &findings, err), fail);
        VLA_TRY_GOTO(vlai_load_clips(set, &findings, err), fail);
        if (findings.errors + findings.bound_errors == 0 && !c.failed)
            vlai_sidecar_save(set);
    }
    int64_t limit = set->episode_count;
    if (findings.errors || findings.bound_errors) {
        limit = vlai_set_safe_prefix(set);
        if (findings.errors || !(options->flags & VLA_DATASET_ALLOW_PARTIAL) || limit == 0) {
            status = refuse(set, &c, &findings, err);
            goto fail;
        }
    }
    if (set->episode_count == 0) {
        status = vlai_fail(err, VLA_E_CORRUPT, "%s: the dataset has no episodes", set->root);
        goto fail;
    }
    if (c.failed) {
        status = vlai_nomem(err, 1);
        goto fail;
    }
    VLA_TRY_GOTO(choose(set, options, limit, err), fail);
    VLA_TRY_GOTO(make_digest(set, err), fail);
    set->info.root = set->root;
    set->info.fps = set->fps;
    set->info.episodes = set->chosen_count;
    set->info.rows = set->rows;
    set->info.features = set->feature_count;
    set->info.cameras = set->camera_count;
    set->info.tasks = set->task_count;
    set->info.total_episodes = set->episode_count;
    set->info.total_frames = set->scanned_rows;
    set->info.digest = set->digest;
    set->info.warnings = (int64_t)set->warning_count;
    *out = set;
    return VLA_OK;
fail:
    vla_dataset_close(set);
    return status;
}

void vla_dataset_close(vla_dataset *set)
{
    if (!set)
        return;
    for (int64_t c = 0; c < set->camera_count; c++)
        for (int64_t i = 0; i < set->cameras[c].file_count; i++)
            vlai_clip_close(set->cameras[c].files[i].clip);
    vlai_columns_free(set);
    vlai_free(set->open_clips);
    vlai_free(set->files);
    vlai_free(set->task_of);
    vlai_free(set->warnings);
    vlai_free(set->root);
    vlai_arena_fini(&set->arena);
    pthread_mutex_destroy(&set->column_lock);
    pthread_mutex_destroy(&set->clip_lock);
    vlai_free(set);
}

/* --- questions --- */

const vla_dataset_info *vla_dataset_info_get(const vla_dataset *set)
{
    return &set->info;
}

const char *vla_dataset_warning(const vla_dataset *set, int64_t i)
{
    return i >= 0 && (size_t)i < set->warning_count ? set->warnings[i] : NULL;
}

const vla_feature *vla_dataset_feature(const vla_dataset *set, int64_t i)
{
    return i >= 0 && i < set->feature_count ? &set->features[i] : NULL;
}

const vla_feature *vla_dataset_find(const vla_dataset *set, const char *name)
{
    for (int64_t i = 0; i < set->feature_count; i++)
        if (!strcmp(set->features[i].name, name))
            return &set->features[i];
    return NULL;
}

const vla_feature *vla_dataset_camera(const vla_dataset *set, int64_t i)
{
    return i >= 0 && i < set->camera_count ? &set->features[set->cameras[i].feature] : NULL;
}

vla_status vla_dataset_need_camera(const vla_dataset *set, const char *name, const vla_feature **out, vla_error *err)
{
    const char *names[64] = {NULL}, *near;
    char list[600] = "";
    size_t count = 0, used = 0;
    for (int64_t i = 0; i < set->camera_count; i++) {
        const vla_feature *camera = vla_dataset_camera(set, i);
        if (!strcmp(camera->name, name)) {
            *out = camera;
            return VLA_OK;
        }
        if (count < 64)
            names[count++] = camera->name;
        int n = snprintf(list + used, sizeof list - used, "%s'%s'", used ? ", " : "", camera->name);
        used = n < 0 || (size_t)n >= sizeof list - used ? sizeof list - 1 : used + (size_t)n;
    }
    *out = NULL;
    near = vlai_nearest(name, names, count);
    vla_status status = vlai_fail(err, VLA_E_NOT_FOUND, "%s: no camera '%s'; the dataset has %s", set->root, name,
                                  count ? list : "no cameras");
    if (near)
        return vlai_hint(err, status, "did you mean '%s'? In the configuration: key_mappings.camera: {%s: ...}", near, near);
    return vlai_hint(err, status, "key_mappings.camera maps the dataset's camera names to view names");
}

const vla_episode *vla_dataset_episode(const vla_dataset *set, int64_t i)
{
    return i >= 0 && i < set->chosen_count ? &set->chosen[i] : NULL;
}

int64_t vla_dataset_episode_of(const vla_dataset *set, int64_t row)
{
    if (row < 0 || row >= set->rows)
        return -1;
    int64_t low = 0, high = set->chosen_count - 1;
    while (low < high) { /* the last episode that starts at or before the row and is not empty */
        int64_t middle = low + (high - low + 1) / 2;
        if (set->chosen[middle].first_row <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

const char *vla_dataset_task_text(const vla_dataset *set, int64_t task_index)
{
    if (task_index >= 0 && task_index < set->task_count && set->tasks[task_index].index == task_index)
        return set->tasks[task_index].text;
    for (int64_t low = 0, high = set->task_count; low < high;) {
        int64_t middle = low + (high - low) / 2;
        if (set->tasks[middle].index == task_index)
            return set->tasks[middle].text;
        if (set->tasks[middle].index < task_index)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

const char *vla_dataset_task(const vla_dataset *set, int64_t row)
{
    int64_t i = vla_dataset_episode_of(set, row);
    if (i < 0)
        return NULL;
    const vlai_episode_row *e = &set->episodes[set->chosen_row[i]];
    int64_t at = set->files[e->file].first + e->file_row + row - set->chosen[i].first_row;
    const char *text = vla_dataset_task_text(set, set->task_of[at]);
    return !text && e->task_count ? e->tasks[0] : text; /* data without task_index: the episode's own list */
}
