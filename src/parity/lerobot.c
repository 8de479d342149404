/* Golden stage lerobot-read: picks of a dataset as LeRobot's own reader returned them, all bit for bit. */
#include "parity/parity.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "data/frames.h"
#include "vla/dataset.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct run {
    vlai_parity_case *c;
    vla_dataset *set;
    vla_frame_reader *reader;
    vlai_safetensors *want;
    int64_t *rows; /* per pick */
    int64_t picks;
} run;

/* Worst difference of bytes, so that one wrong pixel fails. */
static double byte_difference(const uint8_t *a, const uint8_t *b, int64_t n)
{
    int worst = 0;
    for (int64_t i = 0; i < n; i++) {
        int d = a[i] > b[i] ? a[i] - b[i] : b[i] - a[i];
        worst = d > worst ? d : worst;
    }
    return worst;
}

/* `name` in the outputs against `got` of `bytes`; integers and floats must have the same bits. */
static void compare(run *r, const char *name, const void *got, size_t bytes)
{
    const vlai_tensor_view *view = vlai_safetensors_find(r->want, name);
    if (!view)
        return;
    double error = INFINITY;
    if (view->bytes == bytes)
        error = view->dtype == VLA_U8 ? byte_difference(got, view->data, (int64_t)bytes)
                                      : memcmp(got, view->data, bytes) != 0;
    char quantity[48];
    snprintf(quantity, sizeof quantity, "%.*s", (int)strcspn(name, "."), name);
    vlai_parity_report(r->c, quantity, name, error, vlai_parity_bound(r->c, name));
}

static int64_t clamp_row(const vla_episode *e, int64_t row, bool *outside)
{
    int64_t first = e->first_row, last = e->first_row + e->length - 1;
    *outside = row < first || row > last;
    return row < first ? first : row > last ? last : row;
}

/* The rows that a list of offsets reads from one pick; pads say which lay outside. */
static void window(const run *r, int64_t pick, const json_t *offsets, int64_t *rows, uint8_t *pads)
{
    const vla_episode *e = vla_dataset_episode(r->set, vla_dataset_episode_of(r->set, r->rows[pick]));
    for (size_t k = 0; k < json_array_size(offsets); k++) {
        bool outside;
        rows[k] = clamp_row(e, r->rows[pick] + json_integer_value(json_array_get(offsets, k)), &outside);
        pads[k] = outside;
    }
}

static vla_status compare_windows(run *r, const char *column, const char *name, const char *pad_name,
                                  const json_t *offsets, vla_error *err)
{
    const float *data;
    int64_t dim, n = (int64_t)json_array_size(offsets);
    VLA_TRY(vla_dataset_numbers(r->set, column, &data, &dim, err));
    float *got = vlai_array((size_t)(r->picks * n * dim), sizeof *got);
    uint8_t *pads = vlai_array((size_t)(r->picks * n), 1);
    int64_t *rows = vlai_array((size_t)n, sizeof *rows);
    vla_status status = VLA_OK;
    if (got && pads && rows) {
        for (int64_t p = 0; p < r->picks; p++) {
            window(r, p, offsets, rows, pads + p * n);
            for (int64_t k = 0; k < n; k++)
                memcpy(got + (p * n + k) * dim, data + rows[k] * dim, (size_t)dim * sizeof *got);
        }
        compare(r, name, got, (size_t)(r->picks * n * dim) * sizeof *got);
        compare(r, pad_name, pads, (size_t)(r->picks * n));
    } else {
        status = vlai_nomem(err, (size_t)(r->picks * n * dim) * sizeof *got);
    }
    vlai_free(got);
    vlai_free(pads);
    vlai_free(rows);
    return status;
}

static vla_status compare_column(run *r, const char *column, const char *name, bool whole, vla_error *err)
{
    const void *data;
    int64_t dim, rows = vla_dataset_info_get(r->set)->rows;
    const size_t width = whole ? sizeof(int64_t) : sizeof(float);
    if (whole)
        VLA_TRY(vla_dataset_integers(r->set, column, (const int64_t **)&data, &dim, err));
    else
        VLA_TRY(vla_dataset_numbers(r->set, column, (const float **)&data, &dim, err));
    char all[64];
    snprintf(all, sizeof all, "all.%s", name);
    compare(r, all, data, (size_t)(rows * dim) * width);
    uint8_t *picked = vlai_array((size_t)(r->picks * dim), width);
    if (!picked)
        return vlai_nomem(err, (size_t)(r->picks * dim) * width);
    for (int64_t p = 0; p < r->picks; p++)
        memcpy(picked + (size_t)(p * dim) * width, (const uint8_t *)data + (size_t)(r->rows[p] * dim) * width,
               (size_t)dim * width);
    if (strcmp(name, "action"))
        compare(r, name, picked, (size_t)(r->picks * dim) * width);
    vlai_free(picked);
    return VLA_OK;
}

/* Planes of one frame, Y then U then V without gaps. */
static void copy_planes(const vlai_frame *f, uint8_t *out)
{
    for (int i = 0; i < 3; i++) {
        int w = i ? (f->width + 1) / 2 : f->width, h = i ? (f->height + 1) / 2 : f->height;
        for (int y = 0; y < h; y++, out += w)
            memcpy(out, f->planes[i] + (int64_t)y * f->strides[i], (size_t)w);
    }
}

static vla_status compare_planes(run *r, const vla_feature *camera, vla_error *err)
{
    char name[400];
    snprintf(name, sizeof name, "yuv.%s", camera->name);
    const vlai_tensor_view *view = vlai_safetensors_find(r->want, name);
    if (!view)
        return VLA_OK;
    if (view->rank != 3 || view->shape[0] != r->picks)
        return vlai_fail(err, VLA_E_SHAPE, "%s: rank %d", name, view->rank);
    size_t one = (size_t)(view->shape[1] * view->shape[2]);
    uint8_t *got = vlai_calloc((size_t)r->picks, one);
    if (!got)
        return vlai_nomem(err, (size_t)r->picks * one);
    vla_status status = VLA_OK;
    for (int64_t p = 0; p < r->picks && status == VLA_OK; p++) {
        vlai_frame frame;
        status = vlai_frame_decode(r->reader, r->rows[p], camera, &frame, err);
        size_t luma = status == VLA_OK ? (size_t)frame.width * (size_t)frame.height : 0;
        if (status == VLA_OK && luma + 2 * (size_t)((frame.width + 1) / 2) * (size_t)((frame.height + 1) / 2) == one)
            copy_planes(&frame, got + (size_t)p * one);
    }
    if (status == VLA_OK)
        compare(r, name, got, (size_t)r->picks * one);
    vlai_free(got);
    return status;
}

/* image.KEY (one picture a pick) or window.KEY with is_pad.KEY (several). */
static vla_status compare_pictures(run *r, const vla_feature *camera, const char *prefix, const json_t *offsets,
                                   vla_error *err)
{
    char name[400], pad_name[400];
    snprintf(name, sizeof name, "%s.%s", prefix, camera->name);
    snprintf(pad_name, sizeof pad_name, "is_pad.%s", camera->name);
    const vlai_tensor_view *view = vlai_safetensors_find(r->want, name);
    if (!view)
        return VLA_OK;
    int64_t n = offsets ? (int64_t)json_array_size(offsets) : 1;
    if (n < 1)
        return vlai_fail(err, VLA_E_FORMAT, "case.json: options.picture_offsets is empty, but outputs.safetensors has '%s'", name);
    size_t one = view->bytes / (size_t)(r->picks * n);
    uint8_t *got = vlai_calloc((size_t)(r->picks * n), one), *pads = vlai_calloc((size_t)r->picks, (size_t)n);
    int64_t *rows = vlai_array((size_t)n, sizeof *rows);
    vla_status status = got && pads && rows ? VLA_OK : vlai_nomem(err, view->bytes);
    for (int64_t p = 0; p < r->picks && status == VLA_OK; p++) {
        rows[0] = r->rows[p];
        if (offsets)
            window(r, p, offsets, rows, pads + p * n);
        for (int64_t k = 0; k < n && status == VLA_OK; k++) {
            vla_picture picture;
            status = vla_frame_reader_read(r->reader, rows[k], camera, &picture, err);
            if (status == VLA_OK && (size_t)(picture.width * picture.height * 3) != one)
                status = vlai_fail(err, VLA_E_SHAPE, "%s: picture of %lld x %lld, expected %zu bytes", name,
                                   (long long)picture.width, (long long)picture.height, one);
            if (status == VLA_OK)
                memcpy(got + (size_t)(p * n + k) * one, picture.data, one);
        }
    }
    if (status == VLA_OK) {
        compare(r, name, got, (size_t)(r->picks * n) * one);
        if (offsets)
            compare(r, pad_name, pads, (size_t)(r->picks * n));
    }
    vlai_free(got);
    vlai_free(pads);
    vlai_free(rows);
    return status;
}

/* Task text, and file, ordinal and time of each camera's frame as case.json lists them. */
static vla_status compare_picks(run *r, const json_t *picks, vla_error *err)
{
    for (int64_t p = 0; p < r->picks; p++) {
        const json_t *pick = json_array_get(picks, (size_t)p);
        const char *task = vla_dataset_task(r->set, r->rows[p]), *want = json_string_value(json_object_get(pick, "task"));
        vlai_parity_report(r->c, "task", want ? want : "", !task || !want || strcmp(task, want), 0);
        const char *key;
        json_t *video;
        json_object_foreach(json_object_get(pick, "video"), key, video) {
            const vla_feature *camera;
            VLA_TRY(vla_dataset_need_camera(r->set, key, &camera, err));
            const char *file;
            int64_t ordinal;
            double seconds;
            VLA_TRY(vlai_frame_place(r->set, r->rows[p], camera, &file, &ordinal, &seconds, err));
            const char *want_file = json_string_value(json_object_get(video, "file"));
            vlai_parity_report(r->c, "video.file", key, !want_file || strcmp(file, want_file), 0);
            vlai_parity_report(r->c, "video.frame", key,
                               ordinal != json_integer_value(json_object_get(video, "frame")), 0);
            vlai_parity_report(r->c, "video.pts", key,
                               fabs(seconds - json_number_value(json_object_get(video, "pts"))), 1e-9);
        }
    }
    return VLA_OK;
}

static vla_status find_rows(run *r, const json_t *picks, vla_error *err)
{
    r->picks = (int64_t)json_array_size(picks);
    if (r->picks < 1)
        return vlai_fail(err, VLA_E_FORMAT, "case.json: 'picks' is not a list of episodes and frames");
    r->rows = vlai_array((size_t)r->picks + 1, sizeof *r->rows);
    if (!r->rows)
        return vlai_nomem(err, (size_t)r->picks * sizeof *r->rows);
    const vla_dataset_info *info = vla_dataset_info_get(r->set);
    for (int64_t p = 0; p < r->picks; p++) {
        const json_t *pick = json_array_get(picks, (size_t)p);
        int64_t episode, frame;
        VLA_TRY(vlai_json_need_int(pick, "episode", "case.json", &episode, err));
        VLA_TRY(vlai_json_need_int(pick, "frame", "case.json", &frame, err));
        r->rows[p] = -1;
        for (int64_t e = 0; e < info->episodes; e++)
            if (vla_dataset_episode(r->set, e)->index == episode && frame >= 0 && frame < vla_dataset_episode(r->set, e)->length)
                r->rows[p] = vla_dataset_episode(r->set, e)->first_row + frame;
        if (r->rows[p] < 0)
            return vlai_fail(err, VLA_E_NOT_FOUND, "pick %lld: no episode %lld with frame %lld", (long long)p,
                             (long long)episode, (long long)frame);
    }
    return VLA_OK;
}

static const char *first_of(const vla_dataset *set, const char *a, const char *b)
{
    return vla_dataset_find(set, a) ? a : b;
}

vla_status vlai_parity_lerobot_read(vlai_parity_case *c, vla_error *err)
{
    run r = {.c = c};
    const char *dataset;
    char path[4096];
    const json_t *options = json_object_get(c->meta, "options"), *picks = json_object_get(c->meta, "picks");
    VLA_TRY(vlai_json_string(c->meta, "dataset", NULL, "case.json", &dataset, err));
    VLA_TRY(vlai_parity_path(c, dataset ? dataset : "", path, sizeof path, err));
    VLA_TRY(vlai_parity_open(c, "outputs.safetensors", &r.want, err));
    vla_dataset_options open = VLA_DATASET_OPTIONS_DEFAULT;
    open.flags = VLA_DATASET_NO_CACHE;
    vla_status status = vla_dataset_open(path, &open, &r.set, err);
    if (status == VLA_OK)
        status = vla_frame_reader_create(r.set, NULL, &r.reader, err);
    if (status == VLA_OK)
        status = find_rows(&r, picks, err);
    if (status != VLA_OK)
        goto done;
    const char *state = first_of(r.set, "observation.state", "state"), *action = first_of(r.set, "action", "actions");
    VLA_TRY_GOTO(compare_column(&r, state, "state", false, err), done);
    VLA_TRY_GOTO(compare_column(&r, action, "action", false, err), done);
    VLA_TRY_GOTO(compare_column(&r, "timestamp", "timestamp", false, err), done);
    static const char *const whole[] = {"index", "episode_index", "frame_index", "task_index"};
    for (int i = 0; i < 4; i++)
        VLA_TRY_GOTO(compare_column(&r, whole[i], whole[i], true, err), done);
    VLA_TRY_GOTO(compare_windows(&r, state, "state_window", "state_is_pad", json_object_get(options, "state_offsets"), err),
                 done);
    VLA_TRY_GOTO(compare_windows(&r, action, "action", "action_is_pad", json_object_get(options, "action_offsets"), err),
                 done);
    for (int64_t i = 0; i < vla_dataset_info_get(r.set)->cameras; i++) {
        const vla_feature *camera = vla_dataset_camera(r.set, i);
        VLA_TRY_GOTO(compare_pictures(&r, camera, "image", NULL, err), done);
        VLA_TRY_GOTO(compare_pictures(&r, camera, "window", json_object_get(options, "picture_offsets"), err), done);
        VLA_TRY_GOTO(compare_planes(&r, camera, err), done);
    }
    VLA_TRY_GOTO(compare_picks(&r, picks, err), done);
    /* Every output must have been looked at. */
    for (size_t i = 0; i < vlai_safetensors_count(r.want); i++) {
        const char *name = vlai_safetensors_at(r.want, i)->name;
        char quantity[48];
        snprintf(quantity, sizeof quantity, "%.*s", (int)strcspn(name, "."), name);
        bool seen = false;
        for (int q = 0; q < c->count; q++)
            seen = seen || !strcmp(c->quantities[q].name, quantity);
        if (!seen)
            vlai_parity_report(c, quantity, name, INFINITY, 0);
    }
done:
    vla_frame_reader_destroy(r.reader);
    vla_dataset_close(r.set);
    vlai_safetensors_close(r.want);
    vlai_free(r.rows);
    return status;
}
