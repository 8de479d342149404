#include "test.h"

#include "image/patchify.h"

#include <math.h>

/* Columns of 1 to 3 pixels: nothing beyond the picture is read (seen by sanitizers), rows stay their own. */
static void narrow_pictures(void **state)
{
    (void)state;
    enum { ROWS = 5, TO = 28 };
    vla_error err = VLA_ERROR_INIT;
    vlai_resizer *r;
    uint8_t out[ROWS * TO * 3];
    assert_ok(vlai_resizer_create(&r, &err), err);
    for (int64_t from = 1; from <= 3; from++) {
        uint8_t *in = malloc((size_t)(ROWS * from * 3));
        for (int64_t i = 0; i < ROWS * from * 3; i++)
            in[i] = (uint8_t)(40 * (i / (from * 3)) + i % 3);
        assert_ok(vlai_resizer_run(r, in, from, ROWS, TO, ROWS, out, &err), err);
        for (int i = 0; i < ROWS * TO * 3; i++)
            assert_int_equal(out[i], 40 * (i / (TO * 3)) + i % 3);
        free(in);
    }
    vlai_resizer_destroy(r);
}

/* Sizes of spec section 2.5: step 1, step 2, patches, tokens. */
static void sizes(void **state)
{
    (void)state;
    static const struct {
        int64_t w, h, target, w1, h1, w2, h2, patches, tokens;
    } rows[] = {
        {256, 256, 256, 256, 256, 252, 252, 324, 81},  {640, 480, 256, 256, 192, 252, 196, 252, 63},
        {640, 480, 448, 448, 336, 448, 336, 768, 192}, {1280, 720, 448, 448, 252, 448, 252, 576, 144},
        {640, 480, -1, 640, 480, 644, 476, 1564, 391}, {128, 128, 128, 128, 128, 140, 140, 100, 25},
        {224, 224, -1, 224, 224, 224, 224, 256, 64},   {480, 640, 256, 192, 256, 196, 252, 252, 63},
    };
    vlai_image_processor p;
    vlai_image_processor_default(&p);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        vla_error err = VLA_ERROR_INIT;
        vlai_image_size size;
        int64_t grid[3];
        assert_ok(vlai_image_fit(rows[i].w, rows[i].h, rows[i].target, &p.rule, &size, &err), err);
        assert_int_equal(size.width1, rows[i].w1);
        assert_int_equal(size.height1, rows[i].h1);
        assert_int_equal(size.width, rows[i].w2);
        assert_int_equal(size.height, rows[i].h2);
        assert_int_equal(vlai_image_grid(&p, size.width, size.height, grid), rows[i].patches);
        assert_int_equal(vlai_image_tokens(&p, grid), rows[i].tokens);
    }
    vla_error err = VLA_ERROR_INIT;
    vlai_image_size size;
    assert_fails(vlai_image_fit(3763, 26, 56, &p.rule, &size, &err), VLA_E_INVALID, err, "56x0");
    assert_fails(vlai_image_fit(7, 2824, -1, &p.rule, &size, &err), VLA_E_INVALID, err, "ratio above 200");
    assert_fails(vlai_image_fit(0, 5, -1, &p.rule, &size, &err), VLA_E_INVALID, err, "0x5");
    assert_fails(vlai_image_fit(64, 64, 0, &p.rule, &size, &err), VLA_E_INVALID, err, "resolution 0");
}

/* The picture of spec section 9 and what Pillow makes of it. */
static void bicubic(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_resizer *r;
    assert_ok(vlai_resizer_create(&r, &err), err);
    uint8_t in[16 * 16 * 3], out[28 * 20 * 3];
    for (int y = 0; y < 16; y++)
        for (int x = 0; x < 16; x++)
            for (int c = 0; c < 3; c++)
                in[(y * 16 + x) * 3 + c] = (uint8_t)((37 * x + 91 * y + 53 * c + 11 * ((x * y) % 17)) % 256);
    assert_ok(vlai_resizer_run(r, in, 16, 16, 14, 14, out, &err), err);
    static const uint8_t first[9] = {10, 64, 125, 54, 115, 158, 106, 144, 172}, last[3] = {166, 219, 36};
    assert_memory_equal(out, first, 9);
    assert_memory_equal(out + (13 * 14 + 13) * 3, last, 3);
    long sum = 0;
    for (int i = 0; i < 14 * 14 * 3; i++)
        sum += out[i];
    assert_int_equal(sum, 76383);
    assert_ok(vlai_resizer_run(r, in, 16, 16, 28, 20, out, &err), err);
    static const uint8_t middle[3] = {31, 81, 144};
    assert_memory_equal(out + (10 * 28 + 13) * 3, middle, 3);
    sum = 0;
    for (int i = 0; i < 28 * 20 * 3; i++)
        sum += out[i];
    assert_int_equal(sum, 218215);
    assert_ok(vlai_resizer_run(r, in, 16, 16, 16, 16, out, &err), err);
    assert_memory_equal(in, out, sizeof in);
    assert_fails(vlai_resizer_run(r, in, 16, 16, 0, 16, out, &err), VLA_E_INVALID, err, "0x16");
    vlai_resizer_destroy(r);
}

/* Extreme taps must not leave 32 bits, and one-pixel sides must not be read past: white stays white, black black. */
static void flat_pictures(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_resizer *r;
    assert_ok(vlai_resizer_create(&r, &err), err);
    for (int from = 1; from <= 40; from += 3)
        for (int to = 1; to <= 40; to += 3) {
            uint8_t *in = malloc((size_t)(from * from * 3)), *out = malloc((size_t)(to * to * 3));
            for (int value = 0; value < 256; value += 255) {
                memset(in, value, (size_t)(from * from * 3));
                assert_ok(vlai_resizer_run(r, in, from, from, to, to, out, &err), err);
                for (int i = 0; i < to * to * 3; i++)
                    assert_int_equal(out[i], value);
            }
            free(in);
            free(out);
        }
    vlai_resizer_destroy(r);
}

static void patches(void **state)
{
    (void)state;
    vlai_image_processor p;
    vlai_image_processor_default(&p);
    static const float ends[3][2] = {{-1.7922624f, 1.9303362f}, {-1.7520971f, 2.0748838f}, {-1.4802197f, 2.1458969f}};
    for (int c = 0; c < 3; c++) /* one unit in the last place near 2 */
        assert_true(fabsf(p.table[c][0] - ends[c][0]) <= 2.4e-7f && fabsf(p.table[c][255] - ends[c][1]) <= 2.4e-7f);
    enum { W = 56, H = 84, COLUMNS = W / 14, ROWS = H / 14 };
    static uint8_t rgb[W * H * 3];
    static float out[ROWS * COLUMNS * 1176];
    for (int i = 0; i < W * H * 3; i++)
        rgb[i] = (uint8_t)(i * 7 + i / 251);
    vlai_patchify(&p, rgb, W, H, out);
    assert_int_equal(vlai_patch_width(&p), 1176);
    for (int py = 0; py < ROWS; py++)
        for (int px = 0; px < COLUMNS; px++) {
            int row = ((py / 2) * (COLUMNS / 2) + px / 2) * 4 + (py % 2) * 2 + px % 2;
            for (int c = 0; c < 3; c++)
                for (int t = 0; t < 2; t++)
                    for (int y = 0; y < 14; y++)
                        for (int x = 0; x < 14; x++) {
                            float got = out[row * 1176 + ((c * 2 + t) * 14 + y) * 14 + x];
                            float want = p.table[c][rgb[((py * 14 + y) * W + px * 14 + x) * 3 + c]];
                            assert_true(got == want);
                        }
        }
    int64_t grid[3];
    assert_int_equal(vlai_image_grid(&p, 57, 84, grid), 0);
}

static void processor_file(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_image_processor p;
    json_t *object = json_pack("{s:i, s:i, s:i, s:[f,f,f]}", "patch_size", 16, "merge_size", 1, "temporal_patch_size", 1,
                               "image_std", 0.5, 0.5, 0.5);
    assert_ok(vlai_image_processor_parse(object, "file", &p, &err), err);
    assert_int_equal(p.rule.factor, 16);
    assert_int_equal(vlai_patch_width(&p), 768);
    json_object_set_new(object, "image_std", json_pack("[f,f,f]", 0.5, 0.0, 0.5));
    assert_fails(vlai_image_processor_parse(object, "file", &p, &err), VLA_E_INVALID, err, "image_std[1]");
    json_object_set_new(object, "patch_size", json_integer(0));
    assert_fails(vlai_image_processor_parse(object, "file", &p, &err), VLA_E_UNSUPPORTED, err, "patch_size 0");
    json_decref(object);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),   cmocka_unit_test(bicubic),        cmocka_unit_test(flat_pictures), cmocka_unit_test(narrow_pictures),
        cmocka_unit_test(patches), cmocka_unit_test(processor_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
