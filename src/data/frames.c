/* Pictures of a dataset: one reader per thread, with its own decoders and its own open Parquet files. */
#include "data/frames.h"

#include "base/fail.h"
#include "base/io.h"
#include "format/image.h"
#include "format/parquet.h"

#include <stdio.h>
#include <string.h>

enum { PARQUET_HELD = 16 };

struct vla_frame_reader {
    vla_dataset *set;
    vlai_decoder *decoder;
    uint8_t *rgb;
    size_t rgb_size;
    vlai_image image;
    struct {
        int number; /* data file, -1 = free */
        vlai_parquet *file;
        uint64_t used;
    } held[PARQUET_HELD];
    uint64_t clock;
};

vla_status vla_frame_reader_create(vla_dataset *set, const vla_frame_reader_options *options, vla_frame_reader **out,
                                   vla_error *err)
{
    vla_frame_reader_options o = VLA_FRAME_READER_OPTIONS_DEFAULT;
    *out = NULL;
    if (options)
        VLA_TRY(vlai_take_sized(&o, sizeof o, options, "vla_frame_reader_options", err));
    vla_frame_reader *reader = vlai_calloc(1, sizeof *reader);
    if (!reader)
        return vlai_nomem(err, sizeof *reader);
    reader->set = set;
    for (int i = 0; i < PARQUET_HELD; i++)
        reader->held[i].number = -1;
    vla_status status = vlai_decoder_create(o.decoders, &reader->decoder, err);
    if (status != VLA_OK)
        vla_frame_reader_destroy(reader);
    else
        *out = reader;
    return status;
}

void vla_frame_reader_destroy(vla_frame_reader *reader)
{
    if (!reader)
        return;
    vlai_decoder_destroy(reader->decoder);
    for (int i = 0; i < PARQUET_HELD; i++)
        vlai_parquet_close(reader->held[i].file);
    vlai_image_fini(&reader->image);
    vlai_free(reader->rgb);
    vlai_free(reader);
}

/* Where row and camera lead: episode row and frame in it. */
static vla_status find(const vla_dataset *set, int64_t row, const vla_feature *feature, const vlai_camera **camera,
                       int64_t *episode, int64_t *frame, vla_error *err)
{
    int64_t chosen = vla_dataset_episode_of(set, row);
    if (chosen < 0)
        return vlai_fail(err, VLA_E_INVALID, "%s: row %lld asked, the table has %lld", set->root, (long long)row,
                         (long long)set->rows);
    *camera = NULL;
    for (int64_t c = 0; c < set->camera_count; c++)
        if (&set->features[set->cameras[c].feature] == feature)
            *camera = &set->cameras[c];
    if (!*camera)
        return vlai_fail(err, VLA_E_INVALID, "%s: '%s' is no camera of this dataset", set->root, feature->name);
    *episode = set->chosen_row[chosen];
    *frame = row - set->chosen[chosen].first_row;
    return VLA_OK;
}

vla_status vlai_frame_place(vla_dataset *set, int64_t row, const vla_feature *feature, const char **file, int64_t *ordinal,
                            double *seconds, vla_error *err)
{
    const vlai_camera *camera;
    int64_t episode, frame;
    VLA_TRY(find(set, row, feature, &camera, &episode, &frame, err));
    int32_t number = camera->video ? camera->places[episode].file : -1;
    if (number < 0)
        return vlai_fail(err, VLA_E_NOT_FOUND, "%s: camera '%s' has no video for row %lld", set->root, feature->name,
                         (long long)row);
    vlai_clip *clip;
    VLA_TRY(vlai_set_clip(set, camera, number, &clip, err));
    *file = camera->files[number].path;
    *ordinal = vlai_clip_ordinal(set, camera, episode, frame, clip);
    *seconds = *ordinal >= 0 && *ordinal < vlai_clip_frames(clip) ? vlai_clip_time(clip, *ordinal) : -1;
    vlai_clip_close(clip);
    return VLA_OK;
}

vla_status vlai_frame_decode(vla_frame_reader *reader, int64_t row, const vla_feature *feature, vlai_frame *out,
                             vla_error *err)
{
    vla_dataset *set = reader->set;
    const vlai_camera *camera;
    int64_t episode, frame;
    VLA_TRY(find(set, row, feature, &camera, &episode, &frame, err));
    int32_t number = camera->video ? camera->places[episode].file : -1;
    if (number < 0)
        return vlai_fail(err, VLA_E_NOT_FOUND, "%s: camera '%s' has no video for episode %lld", set->root, feature->name,
                         (long long)set->episodes[episode].index);
    vlai_clip *clip;
    VLA_TRY(vlai_set_clip(set, camera, number, &clip, err));
    int64_t ordinal = vlai_clip_ordinal(set, camera, episode, frame, clip);
    vla_status status;
    if (ordinal < 0)
        status = vlai_fail(err, VLA_E_CORRUPT, "%s: no frame within half a frame of %.4f s", vlai_clip_path(clip),
                           camera->places[episode].from + (double)frame / set->fps);
    else
        status = vlai_decoder_read(reader->decoder, clip, ordinal, out, err);
    vlai_clip_close(clip);
    if (status != VLA_OK)
        vlai_prefix(err, status, "camera '%s', episode %lld, frame %lld", feature->name,
                    (long long)set->episodes[episode].index, (long long)frame);
    return status;
}

static vla_status read_video(vla_frame_reader *reader, int64_t row, const vla_feature *feature, vla_picture *out,
                             vla_error *err)
{
    vlai_frame frame;
    VLA_TRY(vlai_frame_decode(reader, row, feature, &frame, err));
    size_t bytes = (size_t)frame.width * (size_t)frame.height * 3;
    if (bytes > reader->rgb_size) {
        vlai_free(reader->rgb);
        reader->rgb_size = 0;
        reader->rgb = vlai_alloc(bytes);
        if (!reader->rgb)
            return vlai_nomem(err, bytes);
        reader->rgb_size = bytes;
    }
    VLA_TRY(vlai_decoder_rgb(reader->decoder, &frame, reader->rgb, err));
    *out = (vla_picture){reader->rgb, frame.width, frame.height};
    return VLA_OK;
}

static vla_status hold_file(vla_frame_reader *reader, int number, vlai_parquet **out, vla_error *err)
{
    int oldest = 0;
    for (int i = 0; i < PARQUET_HELD; i++) {
        if (reader->held[i].number == number) {
            reader->held[i].used = ++reader->clock;
            *out = reader->held[i].file;
            return VLA_OK;
        }
        if (reader->held[i].used < reader->held[oldest].used)
            oldest = i;
    }
    char path[4096];
    VLA_TRY(vlai_set_path(reader->set, reader->set->files[number].path, path, sizeof path, err));
    vlai_parquet_close(reader->held[oldest].file);
    reader->held[oldest].file = NULL;
    reader->held[oldest].number = -1;
    VLA_TRY(vlai_parquet_open(path, &reader->held[oldest].file, err));
    reader->held[oldest].number = number;
    reader->held[oldest].used = ++reader->clock;
    *out = reader->held[oldest].file;
    return VLA_OK;
}

/* A picture that was never embedded: its path, relative to the set, if that stays inside. */
static vla_status read_outside(const vla_dataset *set, const vlai_parquet_bytes *path, const char *name, vlai_image *out,
                               vla_error *err)
{
    char full[4096];
    const char *text = (const char *)path->data;
    if (!text || vlai_path_escapes(text) || !vlai_path_join(full, sizeof full, set->root, text))
        return vlai_fail(err, VLA_E_CORRUPT, "%s: the picture is not embedded%s", name,
                         text ? " and its path leads out of the dataset" : "");
    char *data;
    size_t size;
    VLA_TRY(vlai_prefix(err, vlai_read_file(full, 0, &data, &size, err), "%s: not embedded", name));
    vla_status status = vlai_image_read((const uint8_t *)data, size, name, out, err);
    vlai_free(data);
    return status;
}

vla_status vlai_frame_cell(const vla_dataset *set, const vlai_parquet_values *cell, const char *name, vlai_image *out,
                           vla_error *err)
{
    if (cell->count == 1)
        return vlai_image_read(cell->bytes[0].data, cell->bytes[0].size, name, out, err);
    if (cell->paths)
        return read_outside(set, &cell->paths[0], name, out, err);
    return vlai_fail(err, VLA_E_CORRUPT, "%s: the picture is null", name);
}

static vla_status read_image(vla_frame_reader *reader, int64_t row, const vla_feature *feature, vla_picture *out,
                             vla_error *err)
{
    vla_dataset *set = reader->set;
    const vlai_camera *camera;
    int64_t episode, frame;
    VLA_TRY(find(set, row, feature, &camera, &episode, &frame, err));
    const vlai_episode_row *e = &set->episodes[episode];
    vlai_parquet *file;
    VLA_TRY(hold_file(reader, e->file, &file, err));
    const vlai_parquet_column *column = vlai_parquet_find(file, feature->name);
    if (!column)
        return vlai_fail(err, VLA_E_CORRUPT, "%s/%s: the column '%s' is missing", set->root, set->files[e->file].path,
                         feature->name);
    vlai_parquet_values v;
    bool bare = column->type == VLAI_PARQUET_TEXT; /* plain bytes, as some converters write */
    VLA_TRY(vlai_parquet_read(file, column, e->file_row + frame, 1, bare ? VLAI_PARQUET_TEXT : VLAI_PARQUET_IMAGE, &v, err));
    char name[600];
    snprintf(name, sizeof name, "%s/%s: camera '%s', episode %lld, frame %lld", set->root, set->files[e->file].path,
             feature->name, (long long)e->index, (long long)frame);
    vla_status status = vlai_frame_cell(set, &v, name, &reader->image, err);
    vlai_parquet_values_fini(&v);
    if (status == VLA_OK)
        *out = (vla_picture){reader->image.data, reader->image.width, reader->image.height};
    return status;
}

vla_status vla_frame_reader_read(vla_frame_reader *reader, int64_t row, const vla_feature *camera, vla_picture *out,
                                 vla_error *err)
{
    *out = (vla_picture){0};
    return camera->kind == VLA_FEATURE_IMAGE ? read_image(reader, row, camera, out, err)
                                             : read_video(reader, row, camera, out, err);
}
