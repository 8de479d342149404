/* Golden cases of pictures: sizes and resize, patches. */
#include "parity/parity.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "image/patchify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static vla_status need_picture(const vlai_tensor_view *t, const char *name, vla_error *err)
{
    if (!t)
        return vlai_fail(err, VLA_E_NOT_FOUND, "there is no tensor '%s'", name);
    if (t->dtype != VLA_U8 || t->rank != 3 || t->shape[2] != 3)
        return vlai_fail(err, VLA_E_SHAPE, "'%s' is not a (height, width, 3) picture of bytes", name);
    return VLA_OK;
}

/* Largest difference; infinite when the shapes differ. */
static double picture_error(const vlai_tensor_view *want, const uint8_t *got, int64_t width, int64_t height)
{
    if (want->rank != 3 || want->shape[0] != height || want->shape[1] != width || want->shape[2] != 3)
        return INFINITY;
    int worst = 0;
    for (int64_t i = 0; i < want->elements; i++) {
        int d = abs(got[i] - ((const uint8_t *)want->data)[i]);
        worst = d > worst ? d : worst;
    }
    return worst;
}

/* One row of sizes.json: w, h, target, w1, h1, w2, h2, or the name of an error in place of w2. */
static vla_status compare_size(vlai_parity_case *c, const vlai_image_rule *rule, size_t i, const json_t *row, vla_error *err)
{
    int64_t v[7] = {0};
    for (size_t k = 0; k < 7; k++)
        v[k] = json_integer_value(json_array_get(row, k));
    bool fails = json_is_string(json_array_get(row, 5));
    if (!json_is_array(row) || json_array_size(row) != (fails ? 6 : 7))
        return vlai_fail(err, VLA_E_FORMAT, "sizes.json: row %zu is not w, h, target, w1, h1, w2, h2", i);
    vlai_image_size size = {0};
    vla_error refused = VLA_ERROR_INIT;
    vla_status status = vlai_image_fit(v[0], v[1], v[2], rule, &size, &refused);
    double wrong = size.width1 != v[3] || size.height1 != v[4];
    if (fails)
        wrong += status != VLA_E_INVALID;
    else
        wrong += status != VLA_OK || size.width != v[5] || size.height != v[6];
    char name[160];
    snprintf(name, sizeof name, "row %zu: %lldx%lld target %lld", i, (long long)v[0], (long long)v[1], (long long)v[2]);
    vlai_parity_report(c, "sizes", name, wrong, vlai_parity_bound(c, "sizes"));
    return VLA_OK;
}

static vla_status compare_resize(vlai_parity_case *c, vlai_resizer *resizer, const vlai_image_rule *rule,
                                 const vlai_safetensors *in, const vlai_safetensors *want, const json_t *item,
                                 vla_error *err)
{
    int64_t number, target;
    VLA_TRY(vlai_json_need_int(item, "item", "case.json options.items", &number, err));
    VLA_TRY(vlai_json_need_int(item, "target", "case.json options.items", &target, err));
    char name[32];
    snprintf(name, sizeof name, "%03lld", (long long)number);
    const vlai_tensor_view *picture = vlai_safetensors_find(in, name), *expected = vlai_safetensors_find(want, name);
    VLA_TRY(need_picture(picture, name, err));
    VLA_TRY(need_picture(expected, name, err));
    vlai_image_size size;
    VLA_TRY(vlai_image_fit(picture->shape[1], picture->shape[0], target, rule, &size, err));
    uint8_t *out = vlai_array((size_t)(size.width * size.height), 3);
    if (!out)
        return vlai_nomem(err, (size_t)(size.width * size.height) * 3);
    vla_status status = vlai_resizer_fit(resizer, picture->data, picture->shape[1], picture->shape[0], &size, out, err);
    if (status == VLA_OK)
        vlai_parity_report(c, "pixels", name, picture_error(expected, out, size.width, size.height),
                           vlai_parity_bound(c, "NNN"));
    vlai_free(out);
    return status;
}

vla_status vlai_parity_resize(vlai_parity_case *c, vla_error *err)
{
    const json_t *options = json_object_get(c->meta, "options");
    vlai_image_rule rule = VLAI_IMAGE_RULE_DEFAULT;
    VLA_TRY(vlai_json_int(options, "factor", rule.factor, "case.json options", &rule.factor, err));
    VLA_TRY(vlai_json_int(options, "min_pixels", rule.min_pixels, "case.json options", &rule.min_pixels, err));
    VLA_TRY(vlai_json_int(options, "max_pixels", rule.max_pixels, "case.json options", &rule.max_pixels, err));
    vlai_safetensors *in = NULL, *want = NULL;
    vlai_resizer *resizer = NULL;
    json_t *sizes = NULL, *row;
    size_t i;
    vla_status status;
    VLA_TRY_GOTO(vlai_parity_open(c, "inputs.safetensors", &in, err), done);
    VLA_TRY_GOTO(vlai_parity_open(c, "outputs.safetensors", &want, err), done);
    VLA_TRY_GOTO(vlai_resizer_create(&resizer, err), done);
    json_array_foreach(json_object_get(options, "items"), i, row)
        VLA_TRY_GOTO(compare_resize(c, resizer, &rule, in, want, row, err), done);
    if (json_object_get(json_object_get(c->meta, "outputs"), "sizes.json")) {
        VLA_TRY_GOTO(vlai_parity_json(c, "sizes.json", &sizes, err), done);
        json_array_foreach(sizes, i, row)
            VLA_TRY_GOTO(compare_size(c, &rule, i, row, err), done);
    }
done:
    json_decref(sizes);
    vlai_resizer_destroy(resizer);
    vlai_safetensors_close(in);
    vlai_safetensors_close(want);
    return status;
}

static vla_status compare_patches(vlai_parity_case *c, const vlai_image_processor *p, const vlai_tensor_view *picture,
                                  const vlai_safetensors *want, vla_error *err)
{
    VLA_TRY(need_picture(picture, picture->name, err));
    const vlai_tensor_view *expected = vlai_safetensors_find(want, picture->name);
    char name[200];
    snprintf(name, sizeof name, "%s.grid", picture->name);
    const vlai_tensor_view *grid_view = vlai_safetensors_find(want, name);
    if (!expected)
        return vlai_fail(err, VLA_E_NOT_FOUND, "outputs.safetensors has no '%s'", picture->name);
    int64_t grid[3] = {0}, wanted[3] = {0}, rows = vlai_image_grid(p, picture->shape[1], picture->shape[0], grid);
    if (grid_view && grid_view->elements == 3) {
        VLA_TRY(vlai_tensor_to_int64(grid_view, 0, 3, wanted, err));
        vlai_parity_report(c, "grid", name, memcmp(grid, wanted, sizeof grid) ? 1 : 0, vlai_parity_bound(c, "grid"));
    }
    int64_t n = rows * vlai_patch_width(p);
    double error = INFINITY;
    if (n > 0 && n == expected->elements) {
        float *got = vlai_array((size_t)n, sizeof *got), *values = vlai_array((size_t)n, sizeof *values);
        vla_status status = got && values ? vlai_tensor_to_float(expected, 0, n, values, err)
                                          : vlai_nomem(err, (size_t)n * sizeof *got);
        if (status == VLA_OK) {
            vlai_patchify(p, picture->data, picture->shape[1], picture->shape[0], got);
            error = vlai_parity_max_abs(got, values, n);
        }
        vlai_free(got);
        vlai_free(values);
        VLA_TRY(status);
    }
    vlai_parity_report(c, "patches", picture->name, error, vlai_parity_bound(c, "NNN"));
    return VLA_OK;
}

vla_status vlai_parity_image_processor(vlai_parity_case *c, vla_error *err)
{
    const char *folder;
    char path[4096];
    VLA_TRY(vlai_json_string(json_object_get(c->meta, "options"), "processor", "", "case.json options", &folder, err));
    VLA_TRY(vlai_parity_path(c, folder, path, sizeof path, err));
    vlai_image_processor p;
    VLA_TRY(vlai_image_processor_read(path, &p, err));
    vlai_safetensors *in = NULL, *want = NULL;
    vla_status status;
    VLA_TRY_GOTO(vlai_parity_open(c, "inputs.safetensors", &in, err), done);
    VLA_TRY_GOTO(vlai_parity_open(c, "outputs.safetensors", &want, err), done);
    for (size_t i = 0; i < vlai_safetensors_count(in); i++)
        VLA_TRY_GOTO(compare_patches(c, &p, vlai_safetensors_at(in, i), want, err), done);
done:
    vlai_safetensors_close(in);
    vlai_safetensors_close(want);
    return status;
}
