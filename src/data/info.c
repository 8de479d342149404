/* meta/info.json: version, rates, path templates, features. What other writers do differently (third-party spellings,
 * nested names, floats for integers) is survived and reported as a warning of kind "info". */
#include "data/episodes.h"

#include "base/fail.h"
#include "base/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char file[] = "meta/info.json";

enum { DIM_LIMIT = 1 << 30 };

#define odd(findings, ...)                                                  \
    do {                                                                    \
        vlai_finding odd_ = vlai_finding_warning("info", file);             \
        vlai_report(findings, &odd_, __VA_ARGS__);                          \
    } while (0)

static vla_status load_json(vla_dataset *set, vlai_findings *findings, json_t **out, vla_error *err)
{
    char path[4096];
    *out = NULL;
    VLA_TRY(vlai_set_path(set, file, path, sizeof path, err));
    const char *fault = vlai_file_fault(path);
    vla_error inner = VLA_ERROR_INIT;
    if (fault) {
        vlai_finding f = vlai_finding_error(fault, file);
        f.hint = !strcmp(fault, "file-unreadable") ? "look at the rights of the file and of the folders above it"
                                                   : "a dataset is a folder with meta/info.json; download it again if this one should have it";
        vlai_report(findings, &f, "the file is %s: the folder cannot be read as a LeRobot dataset", vlai_fault_words(fault));
    } else if (vlai_json_load(path, out, &inner) != VLA_OK) {
        if (inner.status == VLA_E_NOMEM)
            return vlai_fail(err, VLA_E_NOMEM, "%s", inner.message);
        vlai_finding f = vlai_finding_error("json", file);
        f.hint = inner.hint[0] ? inner.hint : NULL;
        vlai_report(findings, &f, "%s", inner.message);
    } else if (!json_is_object(*out)) {
        json_decref(*out);
        *out = NULL;
        vlai_finding f = vlai_finding_error("json", file);
        vlai_report(findings, &f, "the top level is not an object");
    }
    return VLA_OK;
}

/* --- scalars --- */

static void read_version(vla_dataset *set, const json_t *info, vlai_findings *findings)
{
    const char *text = json_string_value(json_object_get(info, "codebase_version"));
    int major = -1, minor = -1;
    if (text)
        (void)!sscanf(text, "v%d.%d", &major, &minor);
    if (major == 3 && minor >= 0)
        set->version = 30;
    else if (major == 2 && minor >= 0)
        set->version = minor == 0 ? 20 : 21;
    if ((major == 3 && minor > 0) || (major == 2 && minor > 1)) {
        vlai_finding f = vlai_finding_warning("version", file);
        f.found = vlai_value_text(text);
        vlai_report(findings, &f, "version %s is newer than v%d.%d: read as that", text, major, major == 3 ? 0 : 1);
    }
    if (set->version)
        return;
    vlai_finding f = vlai_finding_error("version", file);
    f.found = vlai_value_text(text ? text : "none");
    f.hint = major >= 4 ? "update vla, or convert the set to v3.0 with LeRobot's own tools"
                        : "convert the set to v2.1 or v3.0 with LeRobot's own tools";
    vlai_report(findings, &f, "unsupported dataset version: found codebase_version %s%s%s, this program reads v2.0, v2.1 "
                              "and v3.0",
                text ? "'" : "", text ? text : "missing", text ? "'" : "");
}

/* A whole number >= low; absent gives the default. */
static int64_t whole(const json_t *info, const char *key, int64_t fallback, int64_t low, vlai_findings *findings)
{
    const json_t *value = json_object_get(info, key);
    double number = json_number_value(value);
    int64_t got = json_is_integer(value) ? json_integer_value(value) : 0;
    if (!value || json_is_null(value))
        return fallback;
    if (json_is_real(value) && number == floor(number) && fabs(number) < 9e15) {
        odd(findings, "%s is written as the float %g", key, number);
        got = (int64_t)number;
    } else if (!json_is_integer(value)) {
        vlai_finding f = vlai_finding_error("value", file);
        f.key = key;
        const char *text = json_string_value(value);
        if (text)
            f.found = vlai_value_text(text);
        else if (json_is_number(value))
            f.found = vlai_value_real(number);
        if (json_is_number(value))
            vlai_report(findings, &f, "%s is %g, wanted a whole number", key, number);
        else
            vlai_report(findings, &f, "%s is %s%s%s, wanted a whole number", key, text ? "'" : "", text ? text : "no number", text ? "'" : "");
        return fallback;
    }
    if (got < low) {
        vlai_finding f = vlai_finding_error("value", file);
        f.key = key;
        f.found = vlai_value_whole(got);
        vlai_report(findings, &f, "%s is %lld, at least %lld is needed", key, (long long)got, (long long)low);
        return fallback;
    }
    return got;
}

static void read_rate(vla_dataset *set, const json_t *info, vlai_findings *findings)
{
    const json_t *value = json_object_get(info, "fps");
    set->fps = json_number_value(value);
    if (json_is_real(value))
        odd(findings, "fps is written as the float %g", set->fps);
    if (json_is_number(value) && set->fps > 0 && set->fps < 1e6)
        return;
    vlai_finding f = vlai_finding_error("fps", file);
    f.key = "fps";
    if (json_is_number(value))
        f.found = vlai_value_real(set->fps);
    char found[64];
    if (json_is_number(value))
        snprintf(found, sizeof found, "%g", set->fps);
    else if (json_is_string(value))
        snprintf(found, sizeof found, "the text '%.40s'", json_string_value(value));
    else
        snprintf(found, sizeof found, "%s", value ? "no number" : "missing");
    vlai_report(findings, &f, "fps is %s: a frame rate above 0 is needed", found);
    set->fps = 0;
}

static vla_status read_template(vla_dataset *set, const json_t *info, const char *key, const char *fallback,
                                const char **out, vlai_findings *findings, vla_error *err)
{
    const json_t *value = json_object_get(info, key);
    const char *text = json_is_string(value) ? json_string_value(value) : fallback;
    char unknown[64];
    *out = NULL;
    if (!text)
        return VLA_OK;
    if (vlai_path_escapes(text)) {
        vlai_finding f = vlai_finding_error("path-escapes", file);
        f.key = key;
        f.found = vlai_value_text(text);
        vlai_report(findings, &f, "%s '%s' leads out of the dataset: refused", key, text);
        return VLA_OK;
    }
    if (vlai_template_unknown(text, unknown)) {
        vlai_finding f = vlai_finding_error("template", file);
        f.key = key;
        f.found = vlai_value_text(unknown);
        vlai_report(findings, &f, "%s '%s' uses the unknown field '%s'", key, text, unknown);
        return VLA_OK;
    }
    *out = vlai_set_strdup(set, text);
    return *out ? VLA_OK : vlai_nomem(err, strlen(text));
}

/* --- features --- */

static const struct {
    const char *dtype;
    vla_feature_kind kind;
} dtypes[] = {
    {"float32", VLA_FEATURE_NUMBER}, {"float64", VLA_FEATURE_NUMBER}, {"float16", VLA_FEATURE_NUMBER},
    {"int8", VLA_FEATURE_NUMBER},    {"int16", VLA_FEATURE_NUMBER},   {"int32", VLA_FEATURE_NUMBER},
    {"int64", VLA_FEATURE_NUMBER},   {"uint8", VLA_FEATURE_NUMBER},   {"uint16", VLA_FEATURE_NUMBER},
    {"uint32", VLA_FEATURE_NUMBER},  {"uint64", VLA_FEATURE_NUMBER},  {"bool", VLA_FEATURE_NUMBER},
    {"string", VLA_FEATURE_TEXT},    {"image", VLA_FEATURE_IMAGE},    {"video", VLA_FEATURE_VIDEO},
    {"language", VLA_FEATURE_LANGUAGE},
};

static bool read_kind(vla_feature *feature, vlai_findings *findings)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (!strcmp(dtypes[i].dtype, feature->dtype)) {
            feature->kind = dtypes[i].kind;
            return true;
        }
    if (!strcmp(feature->dtype, "float") || !strcmp(feature->dtype, "double") || !strcmp(feature->dtype, "int")) {
        odd(findings, "feature '%s' has the dtype '%s', spelled as no LeRobot version does", feature->name, feature->dtype);
        feature->kind = VLA_FEATURE_NUMBER;
        return true;
    }
    vlai_finding f = vlai_finding_error("dtype", file);
    f.column = feature->name;
    f.found = vlai_value_text(feature->dtype);
    vlai_report(findings, &f, "feature '%s' has the unknown dtype '%s'", feature->name, feature->dtype);
    return false;
}

static bool read_shape(vla_feature *feature, const json_t *shape, vlai_findings *findings)
{
    feature->dim = 1;
    size_t rank = json_array_size(shape);
    bool good = json_is_array(shape) && rank <= 8;
    if (good && rank == 0)
        odd(findings, "feature '%s' has an empty shape: read as [1]", feature->name);
    for (size_t i = 0; good && i < rank; i++) {
        const json_t *side = json_array_get(shape, i);
        double real = json_number_value(side);
        good = json_is_number(side) && real >= 1 && real <= DIM_LIMIT && real == floor(real);
        feature->shape[i] = good ? (int64_t)real : 0;
        good = good && feature->dim <= DIM_LIMIT / feature->shape[i];
        if (good)
            feature->dim *= feature->shape[i];
    }
    feature->rank = good ? (int)rank : 0;
    if (good)
        return true;
    vlai_finding f = vlai_finding_error("shape", file);
    f.column = feature->name;
    vlai_report(findings, &f, "feature '%s': its shape is not a list of up to 8 positive sizes with a product below %d",
                feature->name, DIM_LIMIT);
    return false;
}

/* Collects the strings of ["a","b"], [["a","b"]] or {"motors": ["a","b"]}. */
static vla_status collect_names(vla_dataset *set, const json_t *value, const char **out, int64_t limit, int64_t *count,
                                int depth, vla_error *err)
{
    if (json_is_string(value) && *count < limit) {
        out[*count] = vlai_set_strdup(set, json_string_value(value));
        if (!out[*count])
            return vlai_nomem(err, 1);
        (*count)++;
    }
    if (depth > 3)
        return VLA_OK;
    const char *key;
    json_t *item;
    size_t i;
    json_array_foreach((json_t *)value, i, item)
        VLA_TRY(collect_names(set, item, out, limit, count, depth + 1, err));
    json_object_foreach((json_t *)value, key, item)
        VLA_TRY(collect_names(set, item, out, limit, count, depth + 1, err));
    return VLA_OK;
}

static vla_status read_names(vla_dataset *set, vla_feature *feature, const json_t *names, vlai_findings *findings,
                             vla_error *err)
{
    enum { NAME_LIMIT = 4096 };
    if (!names || json_is_null(names)) {
        if (!names)
            odd(findings, "feature '%s' has no names", feature->name);
        return VLA_OK;
    }
    if (!json_is_array(names) || (json_array_size(names) > 0 && !json_is_string(json_array_get(names, 0))))
        odd(findings, "feature '%s' has names that are not a flat list", feature->name);
    const char **list = vlai_arena_alloc(&set->arena, NAME_LIMIT * sizeof *list);
    if (!list)
        return vlai_nomem(err, NAME_LIMIT * sizeof *list);
    VLA_TRY(collect_names(set, names, list, NAME_LIMIT, &feature->name_count, 0, err));
    feature->names = list;
    bool picture = feature->kind == VLA_FEATURE_IMAGE || feature->kind == VLA_FEATURE_VIDEO;
    int64_t wanted = picture ? feature->rank : feature->dim;
    if (feature->name_count && feature->name_count != wanted)
        odd(findings, "feature '%s' has %lld names for %lld %s", feature->name, (long long)feature->name_count,
            (long long)wanted, picture ? "axes" : "dimensions");
    return VLA_OK;
}

static bool channel_name(const char *name)
{
    return !strcmp(name, "channel") || !strcmp(name, "channels") || !strcmp(name, "rgb");
}

static bool channel_count(int64_t n)
{
    return n == 1 || n == 3 || n == 4;
}

static void read_picture(vla_feature *feature, const json_t *entry, vlai_findings *findings)
{
    const int64_t *shape = feature->shape;
    if (feature->rank == 2) {
        odd(findings, "camera '%s' has a shape without channels", feature->name);
        feature->height = shape[0], feature->width = shape[1], feature->channels = 1;
    } else if (feature->rank == 3) {
        bool last = feature->name_count == 3 && channel_name(feature->names[2]);
        bool first = feature->name_count == 3 && channel_name(feature->names[0]);
        if (!last && !first) {
            first = channel_count(shape[0]) && !channel_count(shape[2]);
            last = !first;
        }
        if (last)
            feature->height = shape[0], feature->width = shape[1], feature->channels = shape[2];
        else
            feature->channels = shape[0], feature->height = shape[1], feature->width = shape[2];
        if (!last)
            odd(findings, "camera '%s' is declared channels first", feature->name);
    } else {
        odd(findings, "camera '%s' has a shape of %d axes", feature->name, feature->rank);
    }
    const json_t *info = json_object_get(entry, "info"), *old = json_object_get(entry, "video_info");
    if (info && !json_is_object(info) && !json_is_null(info))
        odd(findings, "camera '%s': info is not an object", feature->name);
    if (old)
        odd(findings, "camera '%s' carries video_info instead of info", feature->name);
    feature->is_depth = json_is_true(json_object_get(info, "is_depth_map")) ||
                        json_is_true(json_object_get(info, "video.is_depth_map")) ||
                        json_is_true(json_object_get(old, "video.is_depth_map"));
}

static vla_status read_features(vla_dataset *set, const json_t *info, vlai_findings *findings, vla_error *err)
{
    json_t *features = json_object_get(info, "features");
    if (!json_is_object(features) || json_object_size(features) == 0) {
        vlai_finding f = vlai_finding_error("features", file);
        f.key = "features";
        vlai_report(findings, &f, "no features are declared");
        return VLA_OK;
    }
    size_t count = json_object_size(features);
    set->features = vlai_arena_alloc(&set->arena, count * sizeof *set->features);
    set->cameras = vlai_arena_alloc(&set->arena, count * sizeof *set->cameras);
    if (!set->features || !set->cameras)
        return vlai_nomem(err, count * sizeof *set->features);
    const char *name;
    json_t *entry;
    json_object_foreach(features, name, entry) {
        vla_feature feature = {0};
        const char *dtype = json_string_value(json_object_get(entry, "dtype"));
        feature.name = vlai_set_strdup(set, name);
        feature.dtype = vlai_set_strdup(set, dtype ? dtype : "missing");
        if (!feature.name || !feature.dtype)
            return vlai_nomem(err, 1);
        bool good = read_kind(&feature, findings);
        bool picture = feature.kind == VLA_FEATURE_IMAGE || feature.kind == VLA_FEATURE_VIDEO;
        if (strchr(name, '/') || !name[0]) {
            vlai_finding f = vlai_finding_error(good && picture ? "path-escapes" : "feature-name", file);
            if (good && picture)
                f.camera = feature.name;
            else
                f.column = feature.name;
            vlai_report(findings, &f, "the feature name '%s' is refused: names must not contain '/'", name);
            continue;
        }
        if (good && picture && vlai_path_escapes(name)) {
            vlai_finding f = vlai_finding_error("path-escapes", file);
            f.camera = feature.name;
            vlai_report(findings, &f, "the camera name '%s' leads out of the dataset", name);
            continue;
        }
        if (!good || !read_shape(&feature, json_object_get(entry, "shape"), findings))
            continue;
        VLA_TRY(read_names(set, &feature, json_object_get(entry, "names"), findings, err));
        if (picture) {
            read_picture(&feature, entry, findings);
            set->cameras[set->camera_count++] =
                (vlai_camera){.feature = set->feature_count, .video = feature.kind == VLA_FEATURE_VIDEO};
        }
        set->features[set->feature_count++] = feature;
    }
    static const char *const defaults[] = {"timestamp", "frame_index", "episode_index", "index", "task_index"};
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        if (!vla_dataset_find(set, defaults[i]))
            odd(findings, "the default feature '%s' is not declared", defaults[i]);
        else if (i == 0 && strcmp(vla_dataset_find(set, "timestamp")->dtype, "float32"))
            odd(findings, "timestamp is declared %s instead of float32", vla_dataset_find(set, "timestamp")->dtype);
    return VLA_OK;
}

/* The split is never used; it is only looked at because public files carry frames instead of episodes. */
static void look_at_splits(const vla_dataset *set, const json_t *info, vlai_findings *findings)
{
    const char *train = json_string_value(json_object_get(json_object_get(info, "splits"), "train"));
    long long first, end;
    if (train && set->total_episodes >= 0 && sscanf(train, "%lld:%lld", &first, &end) == 2 && (first < 0 || end < first || end > set->total_episodes))
        odd(findings, "splits.train '%s' is not a range of the %lld episodes", train, (long long)set->total_episodes);
}

static vla_status take_info(vla_dataset *set, json_t *info, vlai_findings *findings, vla_error *err)
{
    read_version(set, info, findings);
    if (set->version == 0)
        return VLA_OK;
    set->total_episodes = whole(info, "total_episodes", -1, 0, findings);
    set->total_frames = whole(info, "total_frames", -1, 0, findings);
    set->total_tasks = whole(info, "total_tasks", -1, 0, findings);
    set->chunks_size = whole(info, "chunks_size", 1000, 1, findings);
    (void)whole(info, "data_files_size_in_mb", 100, 1, findings);
    (void)whole(info, "video_files_size_in_mb", 200, 1, findings);
    read_rate(set, info, findings);
    look_at_splits(set, info, findings);
    const char *robot = json_string_value(json_object_get(info, "robot_type"));
    set->info.robot_type = vlai_set_strdup(set, robot ? robot : "");
    set->info.version = set->version == 30 ? "v3.0" : set->version == 21 ? "v2.1" : "v2.0";
    if (!set->info.robot_type)
        return vlai_nomem(err, 1);
    bool v3 = set->version == 30;
    VLA_TRY(read_template(set, info, "data_path",
                          v3 ? "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
                             : "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
                          &set->data_path, findings, err));
    VLA_TRY(read_template(set, info, "video_path",
                          v3 ? "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
                             : "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
                          &set->video_path, findings, err));
    VLA_TRY(read_features(set, info, findings, err));
    static const char *const keys[] = {
        "codebase_version", "robot_type",  "total_episodes",        "total_frames",           "total_tasks",
        "total_videos",     "total_chunks", "chunks_size",          "data_files_size_in_mb",  "video_files_size_in_mb",
        "fps",              "splits",       "data_path",            "video_path",             "features",
        "tools",
    };
    const char *key;
    json_t *value;
    json_object_foreach(info, key, value) {
        size_t k = 0;
        while (k < sizeof keys / sizeof *keys && strcmp(keys[k], key))
            k++;
        if (k == sizeof keys / sizeof *keys)
            odd(findings, "the unknown key '%s' is ignored", key);
    }
    bool videos = false;
    for (int64_t c = 0; c < set->camera_count; c++)
        videos = videos || set->cameras[c].video;
    if (!videos && json_is_string(json_object_get(info, "video_path")) && v3)
        odd(findings, "video_path is set although no feature is a video");
    return VLA_OK;
}

vla_status vlai_load_info(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    json_t *info;
    VLA_TRY(load_json(set, findings, &info, err));
    vla_status status = info ? take_info(set, info, findings, err) : VLA_OK;
    json_decref(info);
    return status;
}

vla_status vlai_info_parse(vla_dataset *set, const char *data, size_t size, vlai_findings *findings, vla_error *err)
{
    json_t *info;
    VLA_TRY(vlai_json_parse(data, size, file, &info, err));
    vla_status status = json_is_object(info) ? take_info(set, info, findings, err)
                                             : vlai_fail(err, VLA_E_FORMAT, "%s: the top level is not an object", file);
    json_decref(info);
    return status;
}
