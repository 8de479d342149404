/* The videos of a dataset: which mp4 of which camera holds which episode, from which ordinal on. Headers are read, nothing
 * is decoded: the number of frames must equal what the episodes add up to, then counting frames is exact whatever the
 * file's clock says. A file with more frames than that is addressed by time. */
#include "data/set.h"

#include "base/fail.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { CLIPS_HELD = 1024 }; /* sample tables kept in memory; an episode's is some 10 KB */

typedef struct user {
    int64_t chunk, file, episode; /* episode: place in the table */
    double from;
} user;

static int by_file(const void *a, const void *b)
{
    const user *x = a, *y = b;
    if (x->chunk != y->chunk)
        return x->chunk < y->chunk ? -1 : 1;
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    if (x->from != y->from)
        return x->from < y->from ? -1 : 1;
    return x->episode < y->episode ? -1 : x->episode > y->episode;
}

static const char *key_of(const vla_dataset *set, const vlai_camera *camera)
{
    return set->features[camera->feature].name;
}

/* Episodes that a fault of the file concerns, as a finding wants them. */
static int64_t list_users(const vla_dataset *set, const int64_t *users, int64_t count, int64_t *out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = set->episodes[users[i]].index;
    return count;
}

static void mark_bad(vla_dataset *set, const int64_t *users, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        set->episodes[users[i]].bad = true;
}

static void report_file(vla_dataset *set, const vlai_camera *camera, const char *path, const char *kind,
                        const vla_error *why, const int64_t *users, int64_t count, int64_t *list, vlai_findings *findings)
{
    vlai_finding f = vlai_finding_error(kind, path);
    f.bound = true;
    f.camera = key_of(set, camera);
    f.hint = why->hint[0] ? why->hint : "fetch the file again, or train on what is whole with --allow-partial";
    if (set->version == 30) {
        f.episodes = list;
        f.episode_count = list_users(set, users, count, list);
    } else {
        f.episode = set->episodes[users[0]].index;
    }
    mark_bad(set, users, count);
    vlai_report(findings, &f, "%s (camera %s, %lld episode%s from episode %lld)", why->message, f.camera, (long long)count,
                count == 1 ? "" : "s", (long long)set->episodes[users[0]].index);
}

static void compare_frames(vla_dataset *set, const vlai_camera *camera, vlai_clip_file *file, const int64_t *users,
                           int64_t count, int64_t *list, vlai_findings *findings)
{
    if (file->frames == file->lengths)
        return;
    int64_t first = 0; /* the first episode that is not wholly there */
    vlai_clip_place *places = camera->places;
    while (first < count && places[users[first]].base + set->episodes[users[first]].length <= file->frames)
        first++;
    bool more = file->frames > file->lengths;
    file->by_time = more && set->version == 30;
    vlai_finding f = more ? vlai_finding_warning("video-frames", file->path)
                          : vlai_finding_error("video-frames", file->path);
    f.bound = true;
    f.camera = key_of(set, camera);
    f.expected = vlai_value_whole(file->lengths);
    f.found = vlai_value_whole(file->frames);
    if (set->version != 30)
        f.episode = set->episodes[users[0]].index;
    if (more) {
        vlai_report(findings, &f, "camera %s: the video has %lld frames, its episodes add up to %lld%s", f.camera,
                    (long long)file->frames, (long long)file->lengths, file->by_time ? ": addressed by time" : "");
        return;
    }
    if (set->version == 30) {
        f.episodes = list;
        f.episode_count = list_users(set, users + first, count - first, list);
    }
    mark_bad(set, users + first, count - first);
    vlai_report(findings, &f, "camera %s: the video has %lld frames, its episodes add up to %lld; episode %lld is the first "
                              "affected",
                f.camera, (long long)file->frames, (long long)file->lengths,
                (long long)set->episodes[users[first < count ? first : 0]].index);
}

static void look_at_drift(const vla_dataset *set, const vlai_camera *camera, const vlai_clip_file *file,
                          const int64_t *users, int64_t count, vlai_findings *findings)
{
    for (int64_t i = 0; i < count && set->fps > 0 && !file->by_time; i++) {
        const vlai_clip_place *place = &camera->places[users[i]];
        double off = place->from * set->fps - (double)place->base;
        if (fabs(off) < 0.75)
            continue;
        vlai_finding f = vlai_finding_warning("video-drift", file->path);
        f.camera = key_of(set, camera);
        f.episode = set->episodes[users[i]].index;
        f.expected = vlai_value_whole(place->base);
        f.found = vlai_value_real(place->from * set->fps);
        vlai_report(findings, &f, "camera %s: from_timestamp of episode %lld is %.2f frames away from the frames before it; "
                                  "frames are counted",
                    f.camera, (long long)f.episode, off);
        return;
    }
}

/* `end`: when the last frame of the file ends, in seconds. Half a frame is what finding a frame by its time allows. */
static void look_at_end(const vla_dataset *set, const vlai_camera *camera, const vlai_clip_file *file, const int64_t *users,
                        int64_t count, double end, vlai_findings *findings)
{
    int64_t beyond = 0, first = -1;
    for (int64_t i = 0; i < count; i++)
        if (camera->places[users[i]].to > end + 0.5 / set->fps && beyond++ == 0)
            first = users[i];
    if (first < 0)
        return;
    vlai_finding f = vlai_finding_warning("video-end", file->path);
    f.camera = key_of(set, camera);
    f.episode = set->episodes[first].index;
    f.expected = vlai_value_real(camera->places[first].to);
    f.found = vlai_value_real(end);
    vlai_report(findings, &f, "camera %s: to_timestamp of episode %lld is %.4f s, the video ends at %.4f s (%lld of its %lld "
                              "episodes end beyond it)",
                f.camera, (long long)f.episode, camera->places[first].to, end, (long long)beyond, (long long)count);
}

/* One file of one camera: its header against its episodes. */
static vla_status look_at_file(vla_dataset *set, vlai_camera *camera, vlai_clip_file *file, int64_t *list,
                               vlai_findings *findings, vla_error *err)
{
    const int64_t *users = camera->order + file->first;
    char full[4096];
    VLA_TRY(vlai_set_path(set, file->path, full, sizeof full, err));
    vlai_mp4 mp4;
    vla_error inner = VLA_ERROR_INIT;
    vla_status status = vlai_mp4_read(full, &mp4, &inner);
    if (status == VLA_E_NOMEM)
        return vlai_fail(err, status, "%s", inner.message);
    if (status != VLA_OK) {
        report_file(set, camera, file->path, vlai_fault_kind(full, status), &inner, users, file->count, list, findings);
        return VLA_OK;
    }
    file->frames = mp4.shown_count;
    double span = mp4.shown_count < 2 ? 0
                                      : (double)(mp4.samples[mp4.shown[mp4.shown_count - 1]].pts -
                                                 mp4.samples[mp4.shown[0]].pts) /
                                            mp4.timescale;
    double last = mp4.shown_count ? (double)mp4.samples[mp4.shown[mp4.shown_count - 1]].pts / mp4.timescale : 0;
    vlai_mp4_fini(&mp4);
    double fps = span > 0 ? (double)(file->frames - 1) / span : 0;
    if (fps > 0 && set->fps > 0 && fabs(fps / set->fps - 1) > 0.05) {
        vlai_finding f = vlai_finding_error("fps", file->path);
        f.camera = key_of(set, camera);
        f.expected = vlai_value_real(set->fps);
        f.found = vlai_value_real(round(fps * 1000) / 1000);
        vlai_report(findings, &f, "meta/info.json says %g frames a second, the video has %.4g", set->fps, fps);
    }
    compare_frames(set, camera, file, users, file->count, list, findings);
    if (set->version == 30)
        look_at_drift(set, camera, file, users, file->count, findings);
    if (set->version == 30 && set->fps > 0)
        look_at_end(set, camera, file, users, file->count, file->frames ? last + 1 / (fps > 0 ? fps : set->fps) : 0, findings);
    return VLA_OK;
}

static vla_status add_file(vla_dataset *set, vlai_camera *camera, const user *users, int64_t first, int64_t count,
                           vla_error *err)
{
    char path[2048], full[4096];
    int64_t index = set->episodes[users[first].episode].index;
    vlai_template_fields fields = {.episode_chunk = index / set->chunks_size,
                                   .episode_index = index,
                                   .chunk_index = users[first].chunk,
                                   .file_index = users[first].file,
                                   .video_key = key_of(set, camera)};
    VLA_TRY(vlai_template_fill(set->video_path, &fields, path, sizeof path, err));
    if (vlai_path_escapes(path))
        return vlai_fail(err, VLA_E_FORMAT, "video path '%s' leads out of the dataset", path);
    vlai_clip_file *file = &camera->files[camera->file_count];
    *file = (vlai_clip_file){.path = vlai_set_strdup(set, path), .frames = -1, .first = first, .count = count};
    if (!file->path)
        return vlai_nomem(err, strlen(path));
    for (int64_t i = first; i < first + count; i++) {
        camera->places[users[i].episode].file = (int32_t)camera->file_count;
        camera->places[users[i].episode].base = file->lengths;
        file->lengths += set->episodes[users[i].episode].length;
    }
    camera->file_count++;
    VLA_TRY(vlai_set_path(set, path, full, sizeof full, err));
    struct stat st;
    if (stat(full, &st) == 0) {
        file->size = (uint64_t)st.st_size;
        file->mtime = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    }
    return VLA_OK;
}

static vla_status list_camera(vla_dataset *set, vlai_camera *camera, vla_error *err)
{
    int64_t n = 0;
    vla_status status = VLA_OK;
    size_t room = (size_t)set->episode_count + 1;
    user *users = vlai_array(room, sizeof *users);
    camera->order = vlai_arena_alloc(&set->arena, room * sizeof *camera->order);
    camera->files = vlai_arena_alloc(&set->arena, room * sizeof *camera->files);
    if (!users || !camera->order || !camera->files) {
        status = vlai_nomem(err, room * sizeof *users);
        goto done;
    }
    for (int64_t i = 0; i < set->episode_count; i++) {
        vlai_clip_place *place = &camera->places[i];
        if (set->version != 30)
            *place = (vlai_clip_place){.file = -1, .chunk_index = i, .to = NAN};
        if (set->version == 30 && place->chunk_index < 0) /* null columns: reported when the table was read */
            set->episodes[i].bad = true;
        else
            users[n++] = (user){place->chunk_index, place->file_index, i, place->from};
    }
    qsort(users, (size_t)n, sizeof *users, by_file);
    for (int64_t i = 0; i < n; i++)
        camera->order[i] = users[i].episode;
    for (int64_t first = 0, end; first < n && status == VLA_OK; first = end) {
        for (end = first + 1; end < n && users[end].chunk == users[first].chunk && users[end].file == users[first].file; end++) {
        }
        status = add_file(set, camera, users, first, end - first, err);
    }
done:
    vlai_free(users);
    return status;
}

vla_status vlai_list_clips(vla_dataset *set, vla_error *err)
{
    for (int64_t c = 0; c < set->camera_count; c++)
        if (set->cameras[c].video && set->video_path)
            VLA_TRY(list_camera(set, &set->cameras[c], err));
    return VLA_OK;
}

vla_status vlai_load_clips(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    int64_t *list = vlai_array((size_t)set->episode_count + 1, sizeof *list);
    if (!list)
        return vlai_nomem(err, (size_t)set->episode_count * sizeof *list);
    vla_status status = VLA_OK;
    for (int64_t c = 0; c < set->camera_count; c++)
        for (int64_t i = 0; i < set->cameras[c].file_count && status == VLA_OK; i++)
            status = look_at_file(set, &set->cameras[c], &set->cameras[c].files[i], list, findings, err);
    vlai_free(list);
    return status;
}

int64_t vlai_clip_ordinal(const vla_dataset *set, const vlai_camera *camera, int64_t episode_row, int64_t frame,
                          const vlai_clip *clip)
{
    const vlai_clip_place *place = &camera->places[episode_row];
    if (place->file < 0)
        return -1;
    if (!camera->files[place->file].by_time)
        return place->base + frame;
    double want = place->from + (double)frame / set->fps;
    int64_t nearest = vlai_clip_nearest(clip, want);
    return nearest >= 0 && fabs(vlai_clip_time(clip, nearest) - want) <= 0.5 / set->fps ? nearest : -1;
}

vla_status vlai_set_clip(vla_dataset *set, const vlai_camera *camera, int64_t file, vlai_clip **out, vla_error *err)
{
    vlai_clip_file *f = &camera->files[file];
    vla_status status = VLA_OK;
    pthread_mutex_lock(&set->clip_lock);
    if (!set->open_clips) {
        set->open_clips = vlai_calloc(CLIPS_HELD, sizeof *set->open_clips);
        if (!set->open_clips)
            status = vlai_nomem(err, CLIPS_HELD * sizeof *set->open_clips);
    }
    if (status == VLA_OK && !f->clip) {
        char path[4096];
        status = vlai_set_path(set, f->path, path, sizeof path, err);
        if (status == VLA_OK)
            status = vlai_clip_open(path, &f->clip, err);
        if (status == VLA_OK) {
            vlai_clip_file **slot = &set->open_clips[set->open_clip_next++ % CLIPS_HELD];
            if (*slot && *slot != f) {
                vlai_clip_close((*slot)->clip);
                (*slot)->clip = NULL;
            }
            *slot = f;
        }
    }
    *out = status == VLA_OK ? vlai_clip_share(f->clip) : NULL;
    pthread_mutex_unlock(&set->clip_lock);
    return status;
}
