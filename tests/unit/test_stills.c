/* Still pictures through libavcodec, and JPEG of inks: the same bytes as Pillow. */
#include "test.h"

#include "base/memory.h"
#include "format/image.h"

/* What Pillow 12 wrote, and what it reads again: 6 x 4 and 5 x 3 at quality 60, 5 x 3 with alpha without loss, 2 x 3 of inks
 * as JPEG at quality 30, two pictures of 2 x 2 in turn. */
static const uint8_t webp_even[] = {
    82, 73, 70, 70, 94, 0, 0, 0, 87, 69, 66, 80, 86, 80, 56, 32, 82, 0, 0, 0, 144, 2, 0, 157, 1, 42,
    6, 0, 4, 0, 2, 128, 66, 37, 176, 2, 116, 186, 1, 248, 0, 161, 0, 4, 163, 170, 63, 224, 128, 0, 254, 230,
    210, 203, 226, 151, 21, 90, 181, 201, 103, 30, 57, 163, 242, 174, 62, 91, 134, 51, 21, 255, 242, 164, 162, 154, 101, 183,
    76, 152, 120, 101, 74, 235, 167, 255, 149, 37, 201, 155, 124, 2, 162, 206, 209, 7, 194, 205, 79, 214, 160, 0};
static const uint8_t webp_even_rgb[] = {
    42, 12, 15, 20, 6, 0, 129, 146, 115, 0, 46, 0, 0, 65, 0, 126, 218, 69, 29, 42, 6, 2, 28, 0, 0, 45,
    0, 0, 49, 0, 92, 195, 51, 90, 206, 40, 85, 182, 65, 98, 205, 80, 79, 207, 66, 77, 221, 59, 72, 227, 41, 64,
    226, 28, 0, 75, 0, 82, 230, 64, 68, 234, 55, 56, 233, 39, 44, 226, 19, 55, 241, 26};
static const uint8_t webp_odd[] = {
    82, 73, 70, 70, 92, 0, 0, 0, 87, 69, 66, 80, 86, 80, 56, 32, 80, 0, 0, 0, 176, 2, 0, 157, 1, 42,
    5, 0, 3, 0, 2, 128, 66, 37, 176, 2, 116, 186, 1, 248, 0, 215, 0, 245, 255, 3, 113, 24, 95, 0, 0, 254,
    77, 57, 151, 147, 247, 78, 243, 142, 62, 129, 6, 235, 244, 63, 32, 193, 25, 178, 148, 255, 205, 150, 213, 211, 146, 197,
    173, 231, 225, 135, 245, 235, 255, 155, 120, 87, 105, 100, 26, 195, 75, 248, 116, 159, 156, 192, 0, 0};
static const uint8_t webp_odd_rgb[] = {
    0, 72, 0, 125, 198, 125, 0, 40, 0, 129, 190, 122, 0, 44, 0, 0, 59, 0, 0, 70, 0, 0, 48, 0, 99, 191,
    87, 115, 200, 96, 56, 224, 45, 54, 220, 41, 69, 230, 53, 66, 220, 45, 90, 237, 65};
static const uint8_t webp_lossless[] = {
    82, 73, 70, 70, 138, 0, 0, 0, 87, 69, 66, 80, 86, 80, 56, 76, 126, 0, 0, 0, 47, 4, 128, 0, 16, 119,
    160, 182, 145, 164, 230, 253, 67, 74, 255, 21, 18, 123, 223, 134, 226, 72, 146, 146, 187, 195, 157, 31, 249, 7, 68, 36,
    252, 93, 74, 113, 36, 73, 201, 9, 238, 68, 64, 254, 145, 241, 231, 229, 148, 218, 72, 182, 146, 248, 11, 21, 80, 6,
    197, 51, 212, 160, 153, 75, 102, 93, 16, 41, 231, 15, 234, 42, 88, 21, 138, 253, 250, 26, 144, 243, 255, 10, 38, 174,
    135, 221, 135, 96, 82, 238, 106, 159, 54, 237, 47, 35, 198, 220, 140, 8, 20, 175, 158, 7, 53, 141, 164, 64, 237, 29,
    191, 61, 90, 52, 224, 8, 31, 232, 140, 232, 127, 204, 162, 206, 190, 29};
static const uint8_t webp_lossless_rgb[] = {
    16, 18, 28, 42, 252, 37, 35, 3, 26, 43, 250, 12, 56, 2, 20, 16, 18, 15, 23, 18, 11, 26, 6, 26, 25, 232,
    18, 64, 240, 35, 18, 242, 31, 48, 231, 4, 46, 236, 26, 33, 252, 24, 69, 244, 36};
static const uint8_t jpeg_ink[] = {
    255, 216, 255, 238, 0, 14, 65, 100, 111, 98, 101, 0, 100, 0, 0, 0, 0, 0, 255, 219, 0, 67, 0, 27, 18, 20,
    23, 20, 17, 27, 23, 22, 23, 30, 28, 27, 32, 40, 66, 43, 40, 37, 37, 40, 81, 58, 61, 48, 66, 96, 85, 101,
    100, 95, 85, 93, 91, 106, 120, 153, 129, 106, 113, 144, 115, 91, 93, 133, 181, 134, 144, 158, 163, 171, 173, 171, 103, 128,
    188, 201, 186, 166, 199, 153, 168, 171, 164, 255, 192, 0, 20, 8, 0, 3, 0, 2, 4, 67, 17, 0, 77, 17, 0, 89,
    17, 0, 75, 17, 0, 255, 196, 0, 21, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    5, 6, 255, 196, 0, 30, 16, 1, 0, 2, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2,
    3, 17, 113, 4, 18, 65, 97, 145, 255, 218, 0, 14, 4, 67, 0, 77, 0, 89, 0, 75, 0, 0, 63, 0, 26, 161,
    218, 113, 24, 122, 44, 35, 170, 185, 170, 120, 173, 115, 94, 161, 232, 7, 65, 0, 223, 31, 37, 52, 255, 217};
static const uint8_t jpeg_ink_rgb[] = {
    16, 26, 19, 35, 173, 19, 18, 216, 37, 37, 97, 37, 22, 255, 28, 42, 198, 28};
static const uint8_t webp_animated[] = {
    82, 73, 70, 70, 174, 0, 0, 0, 87, 69, 66, 80, 86, 80, 56, 88, 10, 0, 0, 0, 2, 0, 0, 0, 1, 0,
    0, 1, 0, 0, 65, 78, 73, 77, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 65, 78, 77, 70, 52, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 10, 0, 0, 2, 86, 80, 56, 32, 28, 0, 0, 0, 80, 1,
    0, 157, 1, 42, 2, 0, 2, 0, 1, 64, 38, 37, 156, 0, 4, 253, 128, 0, 254, 251, 255, 38, 72, 96, 0, 0,
    65, 78, 77, 70, 70, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 10, 0, 0, 0, 86, 80,
    56, 32, 46, 0, 0, 0, 84, 1, 0, 157, 1, 42, 2, 0, 2, 0, 0, 0, 38, 37, 156, 0, 4, 253, 128, 0,
    254, 252, 3, 166, 95, 214, 188, 171, 97, 47, 191, 20, 233, 78, 89, 47, 217, 159, 137, 185, 249, 133, 32, 0, 0, 0};

static void expect(const uint8_t *bytes, size_t size, int width, int height, const uint8_t *rgb)
{
    vlai_image image = {0};
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_image_read(bytes, size, "x", &image, &err), err);
    assert_int_equal(image.width, width);
    assert_int_equal(image.height, height);
    assert_memory_equal(image.data, rgb, (size_t)(width * height * 3));
    for (size_t cut = 0; cut < size; cut++) { /* any shorter prefix is refused; copied, so that reads beyond it are seen */
        uint8_t *part = malloc(cut ? cut : 1);
        assert_non_null(part);
        memcpy(part, bytes, cut);
        err = (vla_error)VLA_ERROR_INIT;
        assert_int_not_equal(vlai_image_read(part, cut, "x", &image, &err), VLA_OK);
        assert_true(err.status != VLA_E_INTERNAL && !strncmp(err.message, "x: ", 3));
        free(part);
    }
    vlai_image_fini(&image);
}

static void webp(void **state)
{
    (void)state;
    expect(webp_even, sizeof webp_even, 6, 4, webp_even_rgb);
    expect(webp_odd, sizeof webp_odd, 5, 3, webp_odd_rgb);
    expect(webp_lossless, sizeof webp_lossless, 5, 3, webp_lossless_rgb);
    vlai_image image = {0};
    vla_error err = VLA_ERROR_INIT;
    assert_fails(vlai_image_read(webp_animated, sizeof webp_animated, "cam of row 3", &image, &err), VLA_E_UNSUPPORTED, err,
                 "a WebP animation");
    assert_non_null(strstr(err.message, "cam of row 3"));
    vlai_image_fini(&image);
}

/* A file of `width` x 2 pixels (bottom row first, or with `down` the top one) from rows of whole words. */
static size_t make_bmp(uint8_t *out, int width, int bits, int compression, int down, const uint8_t *between, size_t between_size,
                       const uint8_t *rows, size_t rows_size)
{
    size_t start = 54 + between_size, size = start + rows_size;
    memset(out, 0, 54);
    memcpy(out, "BM", 2);
    out[2] = (uint8_t)size;
    out[10] = (uint8_t)start;
    out[14] = 40;
    out[18] = (uint8_t)width;
    memcpy(out + 22, down ? "\xfe\xff\xff\xff" : "\2\0\0\0", 4);
    out[26] = 1;
    out[28] = (uint8_t)bits;
    out[30] = (uint8_t)compression;
    out[46] = bits <= 8 ? (uint8_t)(between_size / 4) : 0;
    memcpy(out + 54, between, between_size);
    memcpy(out + start, rows, rows_size);
    return size;
}

static void bmp(void **state)
{
    (void)state;
    uint8_t file[256];
    static const uint8_t colours[12] = {1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9}; /* blue, green, red, nothing */
    static const uint8_t lower[18] = {12, 11, 10, 15, 14, 13, 18, 17, 16, 3, 2, 1, 6, 5, 4, 9, 8, 7};
    uint8_t rows[24] = {0}, rgb[18];
    for (int row = 0; row < 2; row++)
        for (int i = 0; i < 9; i++)
            rows[12 * row + i] = lower[9 * row + i];
    for (int i = 0; i < 18; i++)
        rgb[i] = (uint8_t)(i + 1);
    expect(file, make_bmp(file, 3, 24, 0, 0, colours, 0, rows, 24), 3, 2, rgb);
    static const uint8_t both[24] = {3, 2, 1, 6, 5, 4, 9, 8, 7, 0, 0, 0, 12, 11, 10, 15, 14, 13, 18, 17, 16};
    expect(file, make_bmp(file, 3, 24, 0, 1, colours, 0, both, 24), 3, 2, rgb);
    /* a palette, four bits a pixel */
    static const uint8_t four[8] = {0x01, 0x20, 0, 0, 0x21, 0x00}, four_rgb[18] = {9, 8, 7, 6, 5, 4, 3, 2, 1, 3, 2, 1, 6, 5, 4, 9, 8, 7};
    expect(file, make_bmp(file, 3, 4, 0, 0, colours, 12, four, 8), 3, 2, four_rgb);
    /* 5, 6 and 5 bits: v * 255 / 31 and v * 255 / 63, rounded down */
    static const uint8_t masks[12] = {0, 0xf8, 0, 0, 0xe0, 7, 0, 0, 0x1f};
    static const uint8_t words[8] = {0, 8, 0x21, 0, 0xff, 0xff, 0xef, 0x7b};
    static const uint8_t words_rgb[12] = {255, 255, 255, 123, 125, 123, 8, 0, 0, 0, 4, 8};
    expect(file, make_bmp(file, 2, 16, 3, 0, masks, 12, words, 8), 2, 2, words_rgb);
    vlai_image image = {0};
    vla_error err = VLA_ERROR_INIT;
    size_t size = make_bmp(file, 2, 16, 3, 0, masks, 12, words, 8);
    file[20] = 0xff; /* wider than any picture */
    assert_fails(vlai_image_read(file, size, "x", &image, &err), VLA_E_CORRUPT, err, "damaged BMP");
    vlai_image_fini(&image);
}

static void inks(void **state)
{
    (void)state;
    vlai_image image = {0};
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_image_read(jpeg_ink, sizeof jpeg_ink, "x", &image, &err), err);
    assert_true(image.width == 2 && image.height == 3);
    assert_memory_equal(image.data, jpeg_ink_rgb, sizeof jpeg_ink_rgb);
    vlai_image_fini(&image);
}

/* `what` put into `bytes` behind the first `at`. */
static size_t insert(uint8_t *out, const uint8_t *bytes, size_t size, size_t at, const uint8_t *what, size_t length)
{
    memcpy(out, bytes, at);
    memcpy(out + at, what, length);
    memcpy(out + at + length, bytes + at, size - at);
    return size + length;
}

/* Every turn that EXIF data may ask for, of a JPEG (little end first) and of a PNG (big end first): rows of what comes out,
 * as Pillow's exif_transpose has them, with pixels numbered from 0 in rows of two. */
static void turns(void **state)
{
    (void)state;
    static const struct {
        int orientation, width;
        uint8_t pixels[6];
    } cases[] = {{0, 2, {0, 1, 2, 3, 4, 5}}, {1, 2, {0, 1, 2, 3, 4, 5}}, {2, 2, {1, 0, 3, 2, 5, 4}}, {3, 2, {5, 4, 3, 2, 1, 0}},
                 {4, 2, {4, 5, 2, 3, 0, 1}}, {5, 3, {0, 2, 4, 1, 3, 5}}, {6, 3, {4, 2, 0, 5, 3, 1}}, {7, 3, {5, 3, 1, 4, 2, 0}},
                 {8, 3, {1, 3, 5, 0, 2, 4}}, {9, 2, {0, 1, 2, 3, 4, 5}}};
    uint8_t app1[] = {0xff, 0xe1, 0, 34, 'E', 'x', 'i', 'f', 0, 0, 'I', 'I', '*', 0, 8, 0, 0, 0, 1, 0, 0x12, 1, 3, 0,
                      1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    uint8_t chunk[] = {0, 0, 0, 26, 'e', 'X', 'I', 'f', 'M', 'M', 0, '*', 0, 0, 0, 8, 0, 1, 1, 0x12, 0, 3,
                       0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    enum { BEHIND_START = 2, BEHIND_HEADER = 33, JPEG_VALUE = 28, PNG_VALUE = 27 };
    uint8_t *png, file[1024];
    size_t png_size;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_png_encode(jpeg_ink_rgb, 2, 3, 6, &png, &png_size, &err), err);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int as_png = 0; as_png < 2; as_png++) {
            app1[JPEG_VALUE] = chunk[PNG_VALUE] = (uint8_t)cases[i].orientation;
            size_t size = as_png ? insert(file, png, png_size, BEHIND_HEADER, chunk, sizeof chunk)
                                 : insert(file, jpeg_ink, sizeof jpeg_ink, BEHIND_START, app1, sizeof app1);
            vlai_image image = {0};
            assert_ok(vlai_image_read(file, size, "x", &image, &err), err);
            assert_int_equal(image.width, cases[i].width);
            assert_int_equal(image.height, 6 / cases[i].width);
            for (int k = 0; k < 6; k++)
                assert_memory_equal(image.data + 3 * k, jpeg_ink_rgb + 3 * cases[i].pixels[k], 3);
            vlai_image_fini(&image);
        }
    /* A table of tags that reaches beyond its data asks for nothing. */
    app1[18] = 200, app1[20] = 0;
    size_t size = insert(file, jpeg_ink, sizeof jpeg_ink, BEHIND_START, app1, sizeof app1);
    vlai_image image = {0};
    assert_ok(vlai_image_read(file, size, "x", &image, &err), err);
    assert_memory_equal(image.data, jpeg_ink_rgb, sizeof jpeg_ink_rgb);
    vlai_image_fini(&image);
    vlai_free(png);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(webp),
        cmocka_unit_test(bmp),
        cmocka_unit_test(inks),
        cmocka_unit_test(turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
