#include "data/synth.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"
#include "format/image.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const char *const vlai_storage_names[VLAI_STORES] = {"av1", "h264", "image"};

enum { NAME = 24, PATH = 4096 };

/* ---- options ---- */

static vla_status in_range(const char *option, int64_t value, int64_t low, int64_t high, vla_error *err)
{
    if (value >= low && value <= high)
        return VLA_OK;
    return vlai_fail(err, VLA_E_INVALID, "%s: %lld, wanted %lld to %lld", option, (long long)value, (long long)low,
                     (long long)high);
}

/* Names of cameras are names of folders too. */
static vla_status check_key(const char *option, const char *key, vla_error *err)
{
    bool odd = !strcmp(key, ".") || !strcmp(key, "..");
    for (const char *p = key; *p; p++)
        odd |= (unsigned char)*p < ' ';
    if (odd || !*key || strchr(key, '/') || strlen(key) > 200 || vlai_utf8_check(key, strlen(key)) != strlen(key))
        return vlai_fail_hint(err, VLA_E_INVALID, "LeRobot keeps '/' for itself; a usual name is observation.images.front",
                              "%s: '%s' cannot name a feature: wanted 1 to 200 bytes of UTF-8 without '/', ends of lines, and not '.' or '..'", option, key);
    static const char *const taken[] = {"timestamp", "frame_index", "episode_index", "index", "task_index"};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (!strcmp(key, taken[i]))
            return vlai_fail(err, VLA_E_INVALID, "%s: '%s' is a feature that every dataset has", option, key);
    return VLA_OK;
}

static vlai_video_format video_format(const vlai_synth_options *o, int camera)
{
    return (vlai_video_format){o->storage[camera] == VLAI_STORE_H264 ? VLAI_CODEC_H264 : VLAI_CODEC_AV1,
                               o->task.width, o->task.height, o->fps, o->gop, o->crf, o->preset};
}

vla_status vlai_synth_check(const vlai_synth_options *o, vla_error *err)
{
    const vlai_synth_task *t = &o->task;
    VLA_TRY(in_range("--episodes", o->episodes, 1, 100000000, err));
    VLA_TRY(in_range("--fps", o->fps, 1, 1000, err));
    VLA_TRY(in_range("--length", t->length_min, 1, 10000000, err));
    VLA_TRY(in_range("--length", t->length_max, t->length_min, 10000000, err));
    VLA_TRY(in_range("--state-dim", t->state_dim, 1, VLAI_SYNTH_DIMS, err));
    VLA_TRY(in_range("--action-dim", t->action_dim, 1, VLAI_SYNTH_DIMS, err));
    VLA_TRY(in_range("--goals-min", t->goals_min, 1, VLAI_SYNTH_GOALS, err));
    VLA_TRY(in_range("--phrasings", t->phrasings, 1, VLAI_SYNTH_PHRASINGS, err));
    VLA_TRY(in_range("--noise", t->noise, 0, 127, err));
    VLA_TRY(in_range("--size", t->width, 8, 8192, err));
    VLA_TRY(in_range("--size", t->height, 8, 8192, err));
    VLA_TRY(in_range("--cameras", o->camera_count, 0, VLAI_SYNTH_CAMERAS, err));
    VLA_TRY(in_range("--chunks-size", o->chunks_size, 1, 1000000, err));
    VLA_TRY(in_range("--threads", o->threads, 0, 4096, err));
    VLA_TRY(in_range("--gop", o->gop, 1, 100000, err));
    VLA_TRY(in_range("--crf", o->crf, 0, 63, err));
    VLA_TRY(in_range("--preset", o->preset, 0, 13, err));
    if (!*o->robot || strlen(o->robot) > 200 || vlai_utf8_check(o->robot, strlen(o->robot)) != strlen(o->robot))
        return vlai_fail(err, VLA_E_INVALID, "--robot: '%.200s', wanted a name of 1 to 200 bytes of UTF-8", o->robot);
    if (!(t->jitter >= 0 && t->jitter <= 0.1))
        return vlai_fail(err, VLA_E_INVALID, "--jitter: %g, wanted 0 to 0.1", t->jitter);
    if (!(o->data_mb > 0 && o->data_mb <= 1e6))
        return vlai_fail(err, VLA_E_INVALID, "--data-mb: %g, wanted above 0 and at most 1000000", o->data_mb);
    if (!(o->video_mb > 0 && o->video_mb <= 1e6))
        return vlai_fail(err, VLA_E_INVALID, "--video-mb: %g, wanted above 0 and at most 1000000", o->video_mb);
    VLA_TRY(check_key("--state-key", o->state_key, err));
    VLA_TRY(check_key("--action-key", o->action_key, err));
    if (!strcmp(o->state_key, o->action_key))
        return vlai_fail(err, VLA_E_INVALID, "--action-key: '%s' is the state's key already", o->action_key);
    for (int i = 0; i < o->camera_count; i++) {
        VLA_TRY(check_key("--cameras", o->cameras[i], err));
        for (int k = 0; k < i; k++)
            if (!strcmp(o->cameras[i], o->cameras[k]))
                return vlai_fail(err, VLA_E_INVALID, "--cameras: '%s' is named twice", o->cameras[i]);
        if (!strcmp(o->cameras[i], o->state_key) || !strcmp(o->cameras[i], o->action_key))
            return vlai_fail(err, VLA_E_INVALID, "--cameras: '%s' is the key of a vector already", o->cameras[i]);
        vlai_video_format format = video_format(o, i);
        if (o->storage[i] != VLAI_STORE_IMAGE)
            VLA_TRY(vlai_prefix(err, vlai_video_format_check(&format, err), "camera '%s'", o->cameras[i]));
    }
    return VLA_OK;
}

/* ---- episodes ---- */

/* One episode in the making. A round of them is drawn and encoded on all threads, then written in order. */
typedef struct {
    vlai_synth_scene scene;
    float *state, *action;
    vlai_set_view views[VLAI_SYNTH_CAMERAS];
    uint8_t *pngs[VLAI_SYNTH_CAMERAS]; /* bytes that the cells point into */
    vla_status status[VLAI_SYNTH_CAMERAS];
    vla_error errors[VLAI_SYNTH_CAMERAS];
} episode;

typedef struct {
    const vlai_synth_options *options;
    episode *episodes;
} round_work;

static vla_status film(const vlai_synth_options *o, const episode *e, int camera, vlai_set_view *view, uint8_t *rgb,
                       vla_error *err)
{
    vlai_video_format format = video_format(o, camera);
    vlai_encoder *encoder = NULL;
    VLA_TRY(vlai_encoder_open(&format, &encoder, err));
    size_t pixels = (size_t)o->task.width * (size_t)o->task.height;
    bool still = vlai_synth_still(&o->task);
    for (int64_t k = 0; k < e->scene.length; k++) {
        if (k == 0 || !still) {
            vlai_synth_draw(&o->task, &e->scene, camera, k, rgb);
            vlai_stats_count_picture(rgb, pixels, still ? (uint64_t)e->scene.length : 1, view->histogram);
        }
        vla_status status = vlai_encoder_put(encoder, rgb, err);
        if (status != VLA_OK) {
            vlai_encoder_destroy(encoder);
            return status;
        }
    }
    return vlai_encoder_finish(encoder, &view->segment, err);
}

/* PNG cells, all in one buffer. Frames of a still episode share one picture. */
static vla_status photograph(const vlai_synth_options *o, episode *e, int camera, vlai_set_view *view, uint8_t *rgb,
                             vla_error *err)
{
    size_t pixels = (size_t)o->task.width * (size_t)o->task.height, used = 0, capacity = 0, n = (size_t)e->scene.length;
    bool still = vlai_synth_still(&o->task);
    view->images = vlai_calloc(n, sizeof *view->images);
    if (!view->images)
        return vlai_nomem(err, n * sizeof *view->images);
    for (size_t k = 0; k < n; k++) {
        if (still && k > 0) {
            view->images[k] = view->images[0];
            continue;
        }
        vlai_synth_draw(&o->task, &e->scene, camera, (int64_t)k, rgb);
        vlai_stats_count_picture(rgb, pixels, still ? n : 1, view->histogram);
        uint8_t *png = NULL;
        size_t size = 0;
        VLA_TRY(vlai_png_encode(rgb, o->task.width, o->task.height, 6, &png, &size, err));
        if (used + size > capacity) {
            size_t wanted = (used + size) * 2;
            uint8_t *grown = vlai_grow(e->pngs[camera], capacity, wanted);
            if (!grown) {
                vlai_free(png);
                return vlai_nomem(err, wanted);
            }
            e->pngs[camera] = grown;
            capacity = wanted;
        }
        memcpy(e->pngs[camera] + used, png, size);
        vlai_free(png);
        view->images[k] = (vlai_parquet_bytes){NULL, size}; /* addresses when the buffer moves no more */
        used += size;
    }
    const uint8_t *at = e->pngs[camera];
    for (size_t k = 0; k < n; k++) {
        view->images[k].data = at;
        at += still ? 0 : view->images[k].size;
    }
    return VLA_OK;
}

static void make_view(void *context, int64_t tile, int thread)
{
    (void)thread;
    round_work *work = context;
    const vlai_synth_options *o = work->options;
    episode *e = &work->episodes[tile / o->camera_count];
    int camera = (int)(tile % o->camera_count);
    vlai_set_view *view = &e->views[camera];
    vla_error *err = &e->errors[camera];
    view->frames = (uint64_t)e->scene.length;
    uint8_t *rgb = vlai_array((size_t)o->task.width * (size_t)o->task.height, 3);
    if (!rgb)
        e->status[camera] = vlai_nomem(err, (size_t)o->task.width * (size_t)o->task.height * 3);
    else if (o->storage[camera] == VLAI_STORE_IMAGE)
        e->status[camera] = photograph(o, e, camera, view, rgb, err);
    else
        e->status[camera] = film(o, e, camera, view, rgb, err);
    vlai_free(rgb);
}

static vla_status make_numbers(const vlai_synth_options *o, int64_t index, episode *e, vla_error *err)
{
    vlai_synth_scene_make(&o->task, index, &e->scene);
    size_t n = (size_t)e->scene.length, s = (size_t)o->task.state_dim, a = (size_t)o->task.action_dim;
    e->state = vlai_array(n, s * sizeof(float));
    e->action = vlai_array(n, a * sizeof(float));
    if (!e->state || !e->action)
        return vlai_nomem(err, n * (s + a) * sizeof(float));
    for (size_t k = 0; k < n; k++)
        vlai_synth_frame(&o->task, &e->scene, (int64_t)k, e->state + k * s, e->action + k * a);
    return VLA_OK;
}

static void episode_fini(episode *e)
{
    vlai_free(e->state);
    vlai_free(e->action);
    for (int c = 0; c < VLAI_SYNTH_CAMERAS; c++) {
        vlai_segment_fini(&e->views[c].segment);
        vlai_free(e->views[c].images);
        vlai_free(e->pngs[c]);
    }
    memset(e, 0, sizeof *e);
}

static vla_status write_episode(vlai_set_writer *writer, const episode *e, vla_error *err)
{
    const float *vectors[2] = {e->state, e->action};
    const vlai_set_episode row = {e->scene.length, vlai_synth_text(e->scene.meant, e->scene.phrasing), vectors, e->views};
    return vlai_set_writer_add(writer, &row, err);
}

static vla_status write_episodes(const vlai_synth_options *o, vlai_pool *pool, vlai_set_writer *writer,
                                 vlai_synth_summary *summary, vla_error *err)
{
    /* Two views a thread keep all threads busy and the memory small. */
    int64_t batch = 2 * vlai_pool_threads(pool);
    round_work work = {o, vlai_calloc((size_t)batch, sizeof *work.episodes)};
    if (!work.episodes)
        return vlai_nomem(err, (size_t)batch * sizeof *work.episodes);
    vla_status status = VLA_OK;
    for (int64_t first = 0; status == VLA_OK && first < o->episodes; first += batch) {
        int64_t n = o->episodes - first < batch ? o->episodes - first : batch;
        for (int64_t i = 0; status == VLA_OK && i < n; i++)
            status = make_numbers(o, first + i, &work.episodes[i], err);
        if (status == VLA_OK && o->camera_count)
            vlai_pool_run(pool, n * o->camera_count, make_view, &work);
        for (int64_t i = 0; status == VLA_OK && i < n; i++) {
            episode *e = &work.episodes[i];
            for (int c = 0; status == VLA_OK && c < o->camera_count; c++)
                if (e->status[c] != VLA_OK) {
                    status = e->status[c];
                    if (err)
                        *err = e->errors[c];
                    vlai_prefix(err, status, "episode %lld, camera '%s'", (long long)(first + i), o->cameras[c]);
                }
            if (status == VLA_OK)
                status = write_episode(writer, e, err);
            summary->episodes++;
            summary->frames += e->scene.length;
        }
        for (int64_t i = 0; i < n; i++)
            episode_fini(&work.episodes[i]);
    }
    vlai_free(work.episodes);
    return status;
}

/* ---- the set ---- */

/* Names of the dimensions: a robot arm's for the usual 8 and 7, numbered joints otherwise. */
static void name_dims(const vlai_synth_options *o, char (*text)[NAME], const char **names)
{
    static const char *const arm[8] = {"x", "y", "z", "roll", "pitch", "yaw", "gripper_left", "gripper_right"};
    static const char *const moves[7] = {"dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"};
    int s = o->task.state_dim, a = o->task.action_dim, joints = a > 1 ? a - 1 : 1;
    bool usual = s == 8 && a == 7;
    for (int i = 0; i < s; i++) {
        snprintf(text[i], NAME, i < joints ? "joint_%d" : "finger_%d", i < joints ? i : i - joints);
        names[i] = usual ? arm[i] : text[i];
    }
    for (int i = 0; i < a; i++) {
        snprintf(text[s + i], NAME, i < joints ? "joint_%d" : "gripper", i);
        names[s + i] = usual ? moves[i] : text[s + i];
    }
}

static vla_status write_set(const char *dir, const vlai_synth_options *o, vlai_synth_summary *summary, vla_error *err)
{
    char text[2 * VLAI_SYNTH_DIMS][NAME];
    const char *names[2 * VLAI_SYNTH_DIMS];
    name_dims(o, text, names);
    const vlai_set_vector vectors[2] = {{o->state_key, o->task.state_dim, names},
                                        {o->action_key, o->task.action_dim, names + o->task.state_dim}};
    vlai_set_camera cameras[VLAI_SYNTH_CAMERAS];
    for (int i = 0; i < o->camera_count; i++)
        cameras[i] = (vlai_set_camera){o->cameras[i], o->storage[i] != VLAI_STORE_IMAGE, video_format(o, i)};
    const vlai_set_layout layout = {.version = o->version, .robot = o->robot, .fps = o->fps, .vectors = vectors,
                                    .vector_count = 2, .cameras = cameras, .camera_count = o->camera_count,
                                    .chunks_size = o->chunks_size, .data_mb = o->data_mb, .video_mb = o->video_mb};
    vlai_pool *pool = NULL;
    vlai_set_writer *writer = NULL;
    VLA_TRY(vlai_pool_create(o->threads, &pool, err));
    vla_status status = vlai_set_writer_open(dir, &layout, pool, &writer, err);
    if (status == VLA_OK) {
        status = write_episodes(o, pool, writer, summary, err);
        if (status == VLA_OK)
            status = vlai_set_writer_close(writer, err);
        else
            vlai_set_writer_destroy(writer);
    }
    vlai_pool_destroy(pool);
    return status;
}

vla_status vlai_synth_write(const char *path, const vlai_synth_options *o, vlai_synth_summary *summary, vla_error *err)
{
    vlai_synth_summary unused;
    if (!summary)
        summary = &unused;
    *summary = (vlai_synth_summary){0};
    VLA_TRY(vlai_synth_check(o, err));
    char target[PATH], temporary[PATH];
    if (!vlai_temporary_dir(path, target, temporary, PATH))
        return vlai_fail(err, VLA_E_INVALID, "the path of the dataset is %s", *path ? "too long" : "empty");
    struct stat st;
    if (lstat(target, &st) == 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "name a folder that does not exist, or remove this one yourself",
                              "%s: exists already; nothing was written", target);
    int lock;
    VLA_TRY(vlai_temporary_begin(target, temporary, &lock, err));
    vla_status status = write_set(temporary, o, summary, err);
    if (status == VLA_OK) {
        status = vlai_publish(temporary, target, err);
        /* Renamed, but the folder above could not be synced: it may not last, so it must not stay. */
        if (status != VLA_OK && !vlai_is_dir(temporary))
            vlai_remove_tree(target, NULL);
    }
    if (status != VLA_OK)
        vlai_remove_tree(temporary, NULL);
    vlai_unlock_dir(lock);
    return status;
}
