#include "image/patchify.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"

#include <stdio.h>
#include <string.h>

static void fill_table(vlai_image_processor *p)
{
    for (int c = 0; c < 3; c++) {
        /* Mean and deviation are scaled in float32 first, as the reference does on its tensors. */
        float mean = (float)p->mean[c] * 255.0f, std = (float)p->std[c] * 255.0f;
        for (int v = 0; v < 256; v++)
            p->table[c][v] = ((float)v - mean) / std;
    }
}

void vlai_image_processor_default(vlai_image_processor *out)
{
    *out = (vlai_image_processor){
        .patch = 14,
        .temporal = 2,
        .merge = 2,
        .rule = VLAI_IMAGE_RULE_DEFAULT,
        .mean = {0.48145466, 0.4578275, 0.40821073},
        .std = {0.26862954, 0.26130258, 0.27577711},
    };
    fill_table(out);
}

static vla_status read_channels(const json_t *object, const char *key, const char *where, double out[3], vla_error *err)
{
    const json_t *list = json_object_get(object, key);
    if (!list || json_is_null(list))
        return VLA_OK;
    if (json_array_size(list) != 3)
        return vlai_fail(err, VLA_E_FORMAT, "%s: %s is not a list of 3 numbers", where, key);
    for (size_t c = 0; c < 3; c++) {
        const json_t *value = json_array_get(list, c);
        if (!json_is_number(value))
            return vlai_fail(err, VLA_E_FORMAT, "%s: %s[%zu] is not a number", where, key, c);
        out[c] = json_number_value(value);
    }
    return VLA_OK;
}

vla_status vlai_image_processor_parse(const json_t *object, const char *where, vlai_image_processor *out, vla_error *err)
{
    vlai_image_processor_default(out);
    VLA_TRY(vlai_json_int(object, "patch_size", out->patch, where, &out->patch, err));
    VLA_TRY(vlai_json_int(object, "temporal_patch_size", out->temporal, where, &out->temporal, err));
    VLA_TRY(vlai_json_int(object, "merge_size", out->merge, where, &out->merge, err));
    if (out->patch < 1 || out->patch > 256 || out->temporal < 1 || out->temporal > 16 || out->merge < 1 || out->merge > 16)
        return vlai_fail(err, VLA_E_UNSUPPORTED,
                         "%s: patch_size %lld, temporal_patch_size %lld, merge_size %lld; 1 to 256, 16 and 16 are taken",
                         where, (long long)out->patch, (long long)out->temporal, (long long)out->merge);
    out->rule.factor = out->patch * out->merge;
    VLA_TRY(vlai_json_int(object, "min_pixels", out->rule.min_pixels, where, &out->rule.min_pixels, err));
    VLA_TRY(vlai_json_int(object, "max_pixels", out->rule.max_pixels, where, &out->rule.max_pixels, err));
    if (out->rule.min_pixels < 0 || out->rule.max_pixels < out->rule.factor * out->rule.factor)
        return vlai_fail(err, VLA_E_INVALID, "%s: min_pixels %lld, max_pixels %lld do not fit one block of %lld pixels",
                         where, (long long)out->rule.min_pixels, (long long)out->rule.max_pixels,
                         (long long)(out->rule.factor * out->rule.factor));
    VLA_TRY(read_channels(object, "image_mean", where, out->mean, err));
    VLA_TRY(read_channels(object, "image_std", where, out->std, err));
    for (int c = 0; c < 3; c++)
        if (!(out->std[c] > 0))
            return vlai_fail(err, VLA_E_INVALID, "%s: image_std[%d] is %g; it must be above 0", where, c, out->std[c]);
    fill_table(out);
    return VLA_OK;
}

vla_status vlai_image_processor_read(const char *path, vlai_image_processor *out, vla_error *err)
{
    char file[4096];
    if (!vlai_is_dir(path))
        snprintf(file, sizeof file, "%s", path);
    else if (!vlai_path_join(file, sizeof file, path, "preprocessor_config.json"))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
    json_t *object;
    VLA_TRY(vlai_json_load(file, &object, err));
    vla_status status = vlai_image_processor_parse(object, file, out, err);
    json_decref(object);
    return status;
}

int64_t vlai_image_grid(const vlai_image_processor *p, int64_t width, int64_t height, int64_t grid[3])
{
    int64_t block = p->patch * p->merge;
    if (width <= 0 || height <= 0 || width % block || height % block)
        return 0;
    grid[0] = 1;
    grid[1] = height / p->patch;
    grid[2] = width / p->patch;
    return grid[1] * grid[2];
}

int64_t vlai_image_tokens(const vlai_image_processor *p, const int64_t grid[3])
{
    return grid[0] * grid[1] * grid[2] / (p->merge * p->merge);
}

int64_t vlai_patch_width(const vlai_image_processor *p)
{
    return 3 * p->temporal * p->patch * p->patch;
}

void vlai_patchify(const vlai_image_processor *p, const uint8_t *rgb, int64_t width, int64_t height, float *out)
{
    int64_t rows = height / p->patch, columns = width / p->patch, area = p->patch * p->patch;
    for (int64_t block_y = 0; block_y < rows / p->merge; block_y++)
        for (int64_t block_x = 0; block_x < columns / p->merge; block_x++)
            for (int64_t in_y = 0; in_y < p->merge; in_y++)
                for (int64_t in_x = 0; in_x < p->merge; in_x++) {
                    int64_t py = (block_y * p->merge + in_y) * p->patch, px = (block_x * p->merge + in_x) * p->patch;
                    for (int c = 0; c < 3; c++) {
                        const float *table = p->table[c];
                        float *slice = out + c * p->temporal * area;
                        for (int64_t y = 0; y < p->patch; y++) {
                            const uint8_t *from = rgb + ((py + y) * width + px) * 3 + c;
                            for (int64_t x = 0; x < p->patch; x++)
                                slice[y * p->patch + x] = table[from[3 * x]];
                        }
                        for (int64_t t = 1; t < p->temporal; t++)
                            memcpy(slice + t * area, slice, (size_t)area * sizeof *slice);
                    }
                    out += 3 * p->temporal * area;
                }
}
