/* Pictures: what the headers of videos say against meta/info.json, drift of their clocks, and whether sample frames (or
 * all of them) decode. */
#include "base/fail.h"
#include "base/json.h"
#include "data/check.h"
#include "data/frames.h"

#include <math.h>
#include <stdio.h>
#include <string.h>


/* info (or video_info) of a camera as info.json has it. */
static const json_t *declared_info(const json_t *root, const char *camera)
{
    const json_t *entry = json_object_get(json_object_get(root, "features"), camera);
    const json_t *info = json_object_get(entry, "info");
    return json_is_object(info) ? info : json_object_get(entry, "video_info");
}

static void compare_text(const char *kind, const char *file, const char *camera, const json_t *info, const char *key,
                         const char *found, vlai_findings *findings)
{
    const char *want = json_string_value(json_object_get(info, key));
    if (!want || !found || !strcmp(want, found))
        return;
    vlai_finding f = vlai_finding_warning(kind, file);
    f.camera = camera;
    f.expected = vlai_value_text(want);
    f.found = vlai_value_text(found);
    vlai_report(findings, &f, "camera %s: %s is declared '%s', the video has '%s'", camera, key, want, found);
}

static void look_at_clock(const vla_dataset *set, const vlai_camera *camera, const vlai_clip_file *file,
                          const vlai_clip *clip, vlai_findings *findings)
{
    double worst = 0;
    int64_t first = -1, frames = vlai_clip_frames(clip);
    for (int64_t u = 0; u < file->count && !file->by_time; u++) {
        int64_t episode = camera->order[file->first + u];
        const vlai_clip_place *place = &camera->places[episode];
        for (int64_t k = 0; k < set->episodes[episode].length && place->base + k < frames; k++) {
            double off = fabs(vlai_clip_time(clip, place->base + k) - place->from - (double)k / set->fps);
            if (off > 1e-3 && first < 0)
                first = episode;
            worst = off > worst ? off : worst;
        }
    }
    if (first < 0)
        return;
    vlai_finding f = vlai_finding_warning("video-drift", file->path);
    f.camera = set->features[camera->feature].name;
    f.episode = set->episodes[first].index;
    f.found = vlai_value_real(worst);
    vlai_report(findings, &f, "camera %s: frame times are up to %.2f ms away from the metadata, first in episode %lld; frames "
                              "are counted, so this is survived",
                f.camera, worst * 1e3, (long long)f.episode);
}

static vla_status decode_frames(vlai_decoder *decoder, vlai_clip *clip, const char *camera, const char *path,
                                const json_t *info, const vla_feature *feature, vlai_check_depth depth,
                                vlai_findings *findings, vla_error *err)
{
    int64_t n = vlai_clip_frames(clip), step = depth == VLAI_CHECK_FULL ? 1 : n > 4 ? (n - 1) / 4 : 1;
    for (int64_t i = 0; i < n; i += step) {
        int64_t at = i + step < n || depth == VLAI_CHECK_FULL ? i : n - 1; /* the last frame is always tried */
        vlai_frame frame;
        vla_error inner = VLA_ERROR_INIT;
        vla_status status = vlai_decoder_read(decoder, clip, at, &frame, &inner);
        if (status == VLA_E_NOMEM)
            return vlai_fail(err, status, "%s", inner.message);
        if (status != VLA_OK) {
            vlai_finding f = vlai_finding_error(status == VLA_E_UNSUPPORTED ? "decoder-missing" : "video-decode", path);
            f.camera = camera;
            f.frame = at;
            f.hint = inner.hint[0] ? inner.hint : NULL;
            vlai_report(findings, &f, "camera %s: %s", camera, inner.message);
            return VLA_OK;
        }
        if (i > 0)
            continue;
        compare_text("video-pix-fmt", path, camera, info, "video.pix_fmt", frame.pixel_format, findings);
        if (feature->height && (frame.height != feature->height || frame.width != feature->width)) {
            vlai_finding f = vlai_finding_warning("video-size", path);
            f.camera = camera;
            vlai_report(findings, &f, "camera %s: declared %lld x %lld (width x height), the pictures have %d x %d: they win",
                        camera, (long long)feature->width, (long long)feature->height, frame.width, frame.height);
        }
        if (frame.matrix && strcmp(frame.matrix, "smpte170m") && strcmp(frame.matrix, "bt470bg") &&
            strcmp(frame.matrix, "fcc")) {
            vlai_finding f = vlai_finding_warning("video-matrix", path);
            f.camera = camera;
            f.found = vlai_value_text(frame.matrix);
            vlai_report(findings, &f, "camera %s: tagged with the colour matrix %s; decoded as BT.601, as the reference does",
                        camera, frame.matrix);
        }
    }
    return VLA_OK;
}

static vla_status look_at_video(const vla_dataset *set, const vlai_camera *camera, const vlai_clip_file *file,
                                vlai_decoder *decoder, const json_t *info, vlai_check_depth depth, vlai_findings *findings,
                                vla_error *err)
{
    const vla_feature *feature = &set->features[camera->feature];
    char path[4096];
    vlai_clip *clip;
    vla_error inner = VLA_ERROR_INIT;
    VLA_TRY(vlai_set_path(set, file->path, path, sizeof path, err));
    vla_status status = vlai_clip_open(path, &clip, &inner);
    if (status != VLA_OK) /* reported when its header was read */
        return status == VLA_E_NOMEM ? vlai_fail(err, status, "%s", inner.message) : VLA_OK;
    compare_text("video-codec", file->path, feature->name, info, "video.codec", vlai_clip_codec(clip), findings);
    const json_t *rate = json_object_get(info, "video.fps");
    double fps = vlai_clip_fps(clip);
    if (json_is_number(rate) && fps > 0 && fabs(json_number_value(rate) / fps - 1) > 0.02) {
        vlai_finding f = vlai_finding_warning("video-fps", file->path);
        f.camera = feature->name;
        f.expected = vlai_value_real(json_number_value(rate));
        f.found = vlai_value_real(fps);
        vlai_report(findings, &f, "camera %s: video.fps is declared %g, the video has %.4g", feature->name,
                    json_number_value(rate), fps);
    }
    if (vlai_clip_gop(clip) > 16) {
        vlai_finding f = vlai_finding_warning("video-gop", file->path);
        f.camera = feature->name;
        f.found = vlai_value_whole(vlai_clip_gop(clip));
        f.hint = "use --frame-cache-gb, or re-encode with a key frame every second frame";
        vlai_report(findings, &f, "camera %s: up to %lld frames must be decoded for one: random access is slow", feature->name,
                    (long long)vlai_clip_gop(clip));
    }
    if (set->fps > 0 && set->version == 30)
        look_at_clock(set, camera, file, clip, findings);
    if (!feature->is_depth)
        status = decode_frames(decoder, clip, feature->name, file->path, info, feature, depth, findings, err);
    vlai_clip_close(clip);
    return status;
}

/* First, middle and last picture of a file (or all), one by one. */
static vla_status look_at_images(const vla_dataset *set, const vlai_camera *camera, int number, vlai_check_depth depth,
                                 vlai_findings *findings, vla_error *err)
{
    const vla_feature *feature = &set->features[camera->feature];
    const vlai_data_file *file = &set->files[number];
    char path[4096];
    VLA_TRY(vlai_set_path(set, file->path, path, sizeof path, err));
    vlai_parquet *parquet;
    vla_error unread = VLA_ERROR_INIT;
    vla_status opened = vlai_parquet_open(path, &parquet, &unread);
    if (opened != VLA_OK) /* reported when it was scanned */
        return opened == VLA_E_NOMEM ? vlai_fail(err, opened, "%s", unread.message) : VLA_OK;
    const vlai_parquet_column *column = vlai_parquet_find(parquet, feature->name);
    vlai_image image = {0};
    int64_t n = vlai_parquet_rows(parquet), told = 0;
    for (int64_t i = 0; column && i < n && told < 5; i++) {
        if (depth != VLAI_CHECK_FULL && i != 0 && i != n / 2 && i != n - 1)
            continue;
        vlai_parquet_values v;
        vla_error inner = VLA_ERROR_INIT;
        bool bare = column->type == VLAI_PARQUET_TEXT;
        vla_status status = vlai_parquet_read(parquet, column, i, 1, bare ? VLAI_PARQUET_TEXT : VLAI_PARQUET_IMAGE, &v, &inner);
        if (status == VLA_OK) {
            status = vlai_frame_cell(set, &v, feature->name, &image, &inner);
            vlai_parquet_values_fini(&v);
        }
        if (status == VLA_E_NOMEM) {
            opened = vlai_fail(err, status, "%s", inner.message);
            break;
        }
        if (status != VLA_OK && !feature->is_depth) {
            int64_t frame = -1, episode = vlai_set_locate(set, number, i, &frame);
            vlai_finding f = vlai_finding_error("image-decode", file->path);
            f.camera = feature->name;
            f.episode = episode >= 0 ? set->episodes[episode].index : -1;
            f.frame = episode >= 0 ? frame : i;
            vlai_report(findings, &f, "camera %s: %s", feature->name, inner.message);
            told++;
        } else if (status == VLA_OK && i == 0 && feature->height &&
                   (image.height != feature->height || image.width != feature->width)) {
            vlai_finding f = vlai_finding_warning("video-size", file->path);
            f.camera = feature->name;
            vlai_report(findings, &f, "camera %s: declared %lld x %lld (width x height), the pictures have %d x %d: they win",
                        feature->name, (long long)feature->width, (long long)feature->height, image.width, image.height);
        }
    }
    vlai_image_fini(&image);
    vlai_parquet_close(parquet);
    return opened;
}

vla_status vlai_check_media(vla_dataset *set, vlai_check_depth depth, vlai_findings *findings, vla_error *err)
{
    vlai_decoder *decoder;
    json_t *root = NULL;
    char path[4096];
    VLA_TRY(vlai_decoder_create(1, &decoder, err));
    vla_status status = vlai_set_path(set, "meta/info.json", path, sizeof path, err);
    vla_error inner = VLA_ERROR_INIT;
    if (status == VLA_OK && vlai_json_load(path, &root, &inner) == VLA_E_NOMEM)
        status = vlai_fail(err, VLA_E_NOMEM, "%s", inner.message);
    for (int64_t c = 0; c < set->camera_count && status == VLA_OK; c++) {
        vlai_camera *camera = &set->cameras[c];
        const json_t *info = declared_info(root, set->features[camera->feature].name);
        if (camera->video) {
            for (int64_t i = 0; i < camera->file_count && status == VLA_OK; i++)
                if (camera->files[i].frames >= 0)
                    status = look_at_video(set, camera, &camera->files[i], decoder, info, depth, findings, err);
        } else {
            for (int i = 0; i < set->file_count && status == VLA_OK; i++)
                if (set->files[i].read)
                    status = look_at_images(set, camera, i, depth, findings, err);
        }
    }
    json_decref(root);
    vlai_decoder_destroy(decoder);
    return status;
}
