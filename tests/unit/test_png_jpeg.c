/* PNG and JPEG reading, PNG writing. */
#include "test.h"

#include "base/memory.h"
#include "format/image.h"

#include <png.h>
#include <turbojpeg.h>

static void fill(uint8_t *rgb, int width, int height)
{
    for (int i = 0; i < width * height * 3; i++)
        rgb[i] = (uint8_t)(i * 37 + i / 7);
}

static void png_round_trip(void **state)
{
    (void)state;
    static const int sizes[][2] = {{1, 1}, {7, 3}, {64, 48}, {1, 200}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int w = sizes[i][0], h = sizes[i][1];
        uint8_t rgb[64 * 48 * 3], *png;
        size_t size;
        vla_error err = VLA_ERROR_INIT;
        fill(rgb, w, h);
        assert_ok(vlai_png_encode(rgb, w, h, 6, &png, &size, &err), err);
        vlai_image image = {0};
        assert_ok(vlai_image_read(png, size, "x", &image, &err), err);
        assert_int_equal(image.width, w);
        assert_int_equal(image.height, h);
        assert_memory_equal(image.data, rgb, (size_t)(w * h * 3));
        for (size_t cut = 0; cut < size; cut += 5) /* any shorter prefix is refused */
            assert_int_not_equal(vlai_image_read(png, cut, "x", &image, &err), VLA_OK);
        vlai_image_fini(&image);
        vlai_free(png);
    }
}

/* Grey, grey with alpha, RGBA, palette and 16 bit become RGB; libpng's simplified writer makes them. */
static void png_kinds(void **state)
{
    (void)state;
    static const uint8_t grey[4] = {0, 85, 170, 255}, rgba[16] = {1, 2, 3, 0, 4, 5, 6, 128, 7, 8, 9, 255, 250, 251, 252, 7};
    static const uint8_t colours[6] = {10, 20, 30, 200, 100, 50}, indices[4] = {0, 1, 1, 0};
    struct {
        png_uint_32 format;
        const void *pixels;
        uint8_t want[12];
    } cases[] = {
        {PNG_FORMAT_GRAY, grey, {0, 0, 0, 85, 85, 85, 170, 170, 170, 255, 255, 255}},
        {PNG_FORMAT_RGBA, rgba, {1, 2, 3, 4, 5, 6, 7, 8, 9, 250, 251, 252}},
        {PNG_FORMAT_RGB_COLORMAP, indices, {10, 20, 30, 200, 100, 50, 200, 100, 50, 10, 20, 30}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        png_image simple = {.version = PNG_IMAGE_VERSION, .width = 2, .height = 2, .format = cases[i].format};
        simple.colormap_entries = 2;
        uint8_t data[4096];
        png_alloc_size_t size = sizeof data;
        assert_true(png_image_write_to_memory(&simple, data, &size, 0, cases[i].pixels, 0, colours));
        vla_error err = VLA_ERROR_INIT;
        vlai_image image = {0};
        assert_ok(vlai_image_read(data, size, "x", &image, &err), err);
        assert_memory_equal(image.data, cases[i].want, 12);
        vlai_image_fini(&image);
    }
    static const uint16_t depth[4] = {0, 1000, 40000, 65535};
    png_image simple = {.version = PNG_IMAGE_VERSION, .width = 2, .height = 2, .format = PNG_FORMAT_LINEAR_Y};
    uint8_t data[4096];
    png_alloc_size_t size = sizeof data;
    assert_true(png_image_write_to_memory(&simple, data, &size, 0, depth, 0, NULL));
    vla_error err = VLA_ERROR_INIT;
    vlai_image image = {0};
    assert_fails(vlai_image_read(data, size, "cam of row 3", &image, &err), VLA_E_UNSUPPORTED, err, "cam of row 3");
    vlai_image_fini(&image);
}

static void jpeg(void **state)
{
    (void)state;
    uint8_t rgb[32 * 16 * 3];
    for (int i = 0; i < 32 * 16; i++) {
        rgb[3 * i] = (uint8_t)(i % 32 * 8);
        rgb[3 * i + 1] = (uint8_t)(i / 32 * 16);
        rgb[3 * i + 2] = 90;
    }
    tjhandle writer = tjInitCompress();
    unsigned char *data = NULL;
    unsigned long size = 0;
    assert_int_equal(tjCompress2(writer, rgb, 32, 0, 16, TJPF_RGB, &data, &size, TJSAMP_444, 98, 0), 0);
    vla_error err = VLA_ERROR_INIT;
    vlai_image image = {0};
    assert_ok(vlai_image_read(data, size, "x", &image, &err), err);
    assert_int_equal(image.width, 32);
    for (int i = 0; i < 32 * 16 * 3; i++)
        assert_in_range(image.data[i] - rgb[i] + 16, 8, 24); /* quality 98 on a ramp: a few levels */
    assert_fails(vlai_image_read(data, 20, "x", &image, &err), VLA_E_CORRUPT, err, "x: ");
    assert_fails(vlai_image_read(data, size - 20, "x", &image, &err), VLA_E_CORRUPT, err, "Premature end");
    vlai_image_fini(&image);
    tjFree(data);
    tjDestroy(writer);
    assert_fails(vlai_image_read((const uint8_t *)"II*\0abcd", 8, "x", &image, &err), VLA_E_UNSUPPORTED, err, "TIFF");
    assert_fails(vlai_image_read((const uint8_t *)"GIF89a", 6, "x", &image, &err), VLA_E_CORRUPT, err, "neither PNG, JPEG, BMP nor WebP");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(png_round_trip),
        cmocka_unit_test(png_kinds),
        cmocka_unit_test(jpeg),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
