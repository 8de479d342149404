#include "data/check.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- files that nothing refers to --- */

/* Paths of all files that the metadata names, sorted. */
typedef struct known_files {
    const char **paths;
    size_t count;
} known_files;

static int by_path(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static vla_status list_known(const vla_dataset *set, known_files *known, vla_error *err)
{
    size_t room = (size_t)set->file_count;
    for (int64_t c = 0; c < set->camera_count; c++)
        room += (size_t)set->cameras[c].file_count;
    known->count = 0;
    known->paths = vlai_array(room + 1, sizeof *known->paths);
    if (!known->paths)
        return vlai_nomem(err, room * sizeof *known->paths);
    for (int i = 0; i < set->file_count; i++)
        known->paths[known->count++] = set->files[i].path;
    for (int64_t c = 0; c < set->camera_count; c++)
        for (int64_t i = 0; i < set->cameras[c].file_count; i++)
            known->paths[known->count++] = set->cameras[c].files[i].path;
    qsort(known->paths, known->count, sizeof *known->paths, by_path);
    return VLA_OK;
}

static bool referenced(const known_files *known, const char *path)
{
    return bsearch(&path, known->paths, known->count, sizeof path, by_path) != NULL;
}

static bool ends_with(const char *name, const char *tail)
{
    size_t n = strlen(name), t = strlen(tail);
    return n > t && !strcmp(name + n - t, tail);
}

/* Below `folder` (relative), at most `depth` levels down: LeRobot's own trees have three. */
static vla_status look_for_strays(const vla_dataset *set, const known_files *known, const char *folder, const char *tail,
                                  int depth, int64_t *told, vlai_findings *findings, vla_error *err)
{
    char full[4096], **names = NULL;
    size_t count = 0;
    VLA_TRY(vlai_set_path(set, folder, full, sizeof full, err));
    if (!vlai_is_dir(full) || vlai_list_dir(full, &names, &count, NULL) != VLA_OK)
        return VLA_OK;
    vla_status status = VLA_OK;
    for (size_t i = 0; i < count && status == VLA_OK; i++) {
        char path[4096], child[4096];
        if (!vlai_path_join(path, sizeof path, folder, names[i]) || !vlai_path_join(child, sizeof child, full, names[i]))
            continue;
        if (vlai_is_dir(child)) {
            if (depth > 1)
                status = look_for_strays(set, known, path, tail, depth - 1, told, findings, err);
        } else if (ends_with(names[i], tail) && !referenced(known, path) && (*told)++ < 20) {
            vlai_finding f = vlai_finding_warning("file-unreferenced", path);
            vlai_report(findings, &f, "nothing in the metadata refers to this file");
        }
    }
    vlai_names_free(names, count);
    return status;
}

/* --- tasks --- */

static bool lists_task(const vlai_episode_row *row, const char *text)
{
    for (int64_t i = 0; i < row->task_count; i++)
        if (!strcmp(row->tasks[i], text))
            return true;
    return false;
}

static void look_at_tasks(const vla_dataset *set, vlai_findings *findings)
{
    int64_t told = 0;
    for (int64_t i = 0; i < set->episode_count && told < 10; i++) {
        const vlai_episode_row *row = &set->episodes[i];
        if (row->file < 0 || row->bad || !set->files[row->file].read)
            continue;
        int32_t last = -1;
        for (int64_t k = 0; k < row->found; k++) {
            int32_t task = set->task_of[set->files[row->file].first + row->file_row + k];
            const char *text = task == last ? NULL : vla_dataset_task_text(set, task);
            last = task;
            if (!text || lists_task(row, text))
                continue;
            vlai_finding f = vlai_finding_warning("episode-tasks", row->source);
            f.episode = row->index;
            f.frame = k;
            f.found = vlai_value_text(text);
            vlai_report(findings, &f, "its frames carry the task '%s', which its row of the table does not list", text);
            told++;
            break;
        }
    }
}

/* --- statistics files --- */

static void look_at_image_stats(const json_t *stats, const char *file, const char *name, vlai_findings *findings)
{
    const json_t *entry = json_object_get(stats, name);
    double values[3] = {0, 0, 0};
    static const char *const keys[3] = {"std", "min", "max"};
    for (int i = 0; i < 3; i++) {
        const json_t *v = json_object_get(entry, keys[i]);
        while (json_is_array(v))
            v = json_array_get(v, 0);
        if (!json_is_number(v))
            return;
        values[i] = json_number_value(v);
    }
    if (values[0] < 0.02 && values[2] - values[1] > 0.5) {
        vlai_finding f = vlai_finding_warning("stats-image-std", file);
        f.camera = name;
        f.found = vlai_value_real(values[0]);
        vlai_report(findings, &f, "camera %s: std %.3g with values from %.3g to %.3g is the result of an old overflow; image "
                                  "statistics are not used",
                    name, values[0], values[1], values[2]);
    }
}

static vla_status look_at_stats(const vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    const char *file = set->version == 21 ? "meta/episodes_stats.jsonl" : "meta/stats.json";
    char path[4096];
    VLA_TRY(vlai_set_path(set, file, path, sizeof path, err));
    if (vlai_file_fault(path)) {
        vlai_finding f = vlai_finding_warning("stats-missing", file);
        vlai_report(findings, &f, "no stored statistics: training computes its own (vla norm-stats)");
        return VLA_OK;
    }
    if (set->version == 21)
        return VLA_OK;
    json_t *stats;
    vla_error inner = VLA_ERROR_INIT;
    vla_status read = vlai_json_load(path, &stats, &inner);
    if (read == VLA_E_NOMEM)
        return vlai_fail(err, read, "%s", inner.message);
    if (read != VLA_OK) {
        vlai_finding f = vlai_finding_warning("json", file);
        f.hint = inner.hint[0] ? inner.hint : NULL;
        vlai_report(findings, &f, "%s", inner.message);
        return VLA_OK;
    }
    bool quantiles = true;
    for (int64_t i = 0; i < set->feature_count; i++) {
        const vla_feature *feature = &set->features[i];
        if (feature->kind == VLA_FEATURE_IMAGE || feature->kind == VLA_FEATURE_VIDEO)
            look_at_image_stats(stats, file, feature->name, findings);
        else if (feature->kind == VLA_FEATURE_NUMBER && json_object_get(stats, feature->name))
            quantiles = quantiles && json_object_get(json_object_get(stats, feature->name), "q01");
    }
    if (!quantiles && set->version == 30) {
        vlai_finding f = vlai_finding_warning("stats-quantiles", file);
        vlai_report(findings, &f, "no quantiles are stored: training computes its own (vla norm-stats)");
    }
    json_decref(stats);
    return VLA_OK;
}

/* --- together --- */

static void look_at_cameras(const vla_dataset *set, const vlai_check_options *options, vlai_findings *findings)
{
    for (size_t i = 0; i < options->camera_count; i++) {
        const vla_feature *camera;
        vla_error inner = VLA_ERROR_INIT;
        if (vla_dataset_need_camera(set, options->cameras[i], &camera, &inner) == VLA_OK)
            continue;
        vlai_finding f = vlai_finding_error("camera-unknown", "meta/info.json");
        f.camera = options->cameras[i];
        f.hint = inner.hint;
        vlai_report(findings, &f, "%s", inner.message);
    }
}

static void tell_prefix(const vla_dataset *set, vlai_findings *findings)
{
    if (findings->bound_errors == 0 || findings->errors > 0 || set->episode_count == 0)
        return;
    int64_t whole = vlai_set_safe_prefix(set);
    vlai_finding f = vlai_finding_warning("safe-prefix", "meta/info.json");
    f.expected = vlai_value_whole(set->episode_count);
    f.found = vlai_value_whole(whole);
    vlai_report(findings, &f, "the longest safe prefix is %lld of %lld episodes%s", (long long)whole,
                (long long)set->episode_count, whole ? "; train on it with --allow-partial" : "");
}

vla_status vlai_check(const char *root, const vlai_check_options *options, vlai_findings *findings, vla_error *err)
{
    vla_dataset *set;
    VLA_TRY(vlai_set_create(root, &set, err));
    known_files known = {NULL, 0};
    vlai_findings own = {.report = findings->report, .user = findings->user};
    vla_status status = vlai_set_load(set, &own, err);
    if (status == VLA_OK && set->version) {
        int64_t told = 0;
        VLA_TRY_GOTO(list_known(set, &known, err), done);
        VLA_TRY_GOTO(look_for_strays(set, &known, "videos", ".mp4", 3, &told, &own, err), done);
        if (set->version != 30)
            VLA_TRY_GOTO(look_for_strays(set, &known, "data", ".parquet", 2, &told, &own, err), done);
        look_at_tasks(set, &own);
        look_at_cameras(set, options, &own);
        VLA_TRY_GOTO(look_at_stats(set, &own, err), done);
        if (options->depth != VLAI_CHECK_QUICK) {
            VLA_TRY_GOTO(vlai_check_values(set, &own, err), done);
            VLA_TRY_GOTO(vlai_check_media(set, options->depth, &own, err), done);
        }
        tell_prefix(set, &own);
    }
done:
    findings->errors += own.errors;
    findings->bound_errors += own.bound_errors;
    findings->warnings += own.warnings;
    vlai_free(known.paths);
    vla_dataset_close(set);
    return status;
}
