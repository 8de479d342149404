#include "format/image_impl.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"

#include <png.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <turbojpeg.h>

vla_status vlai_image_room(vlai_image *image, int64_t width, int64_t height, const char *name, vla_error *err)
{
    if (width < 1 || height < 1 || width > VLAI_IMAGE_SIDE_LIMIT || height > VLAI_IMAGE_SIDE_LIMIT ||
        width * height > VLAI_IMAGE_PIXEL_LIMIT)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: picture of %lld x %lld pixels is refused", name, (long long)width,
                         (long long)height);
    size_t wanted = (size_t)(width * height) * 3;
    if (wanted > image->capacity) {
        vlai_free(image->data);
        image->capacity = 0;
        image->data = vlai_alloc(wanted);
        if (!image->data)
            return vlai_nomem(err, wanted);
        image->capacity = wanted;
    }
    image->width = (int)width;
    image->height = (int)height;
    return VLA_OK;
}

/* --- PNG --- */

typedef struct png_input {
    const uint8_t *data;
    size_t left;
    char message[128];
    jmp_buf escape;
} png_input;

static void png_pull(png_structp png, png_bytep out, size_t n)
{
    png_input *in = png_get_io_ptr(png);
    if (n > in->left)
        png_error(png, "the data ends early");
    memcpy(out, in->data, n);
    in->data += n;
    in->left -= n;
}

static void png_stop(png_structp png, png_const_charp message)
{
    png_input *in = png_get_error_ptr(png);
    snprintf(in->message, sizeof in->message, "%s", message);
    longjmp(in->escape, 1);
}

static void png_quiet(png_structp png, png_const_charp message)
{
    (void)png;
    (void)message;
}

static void *png_take(png_structp png, png_alloc_size_t size)
{
    (void)png;
    return vlai_alloc(size);
}

static void png_give(png_structp png, void *ptr)
{
    (void)png;
    vlai_free(ptr);
}

static vla_status read_png(const uint8_t *bytes, size_t size, const char *name, vlai_image *image, vla_error *err)
{
    png_input in = {.data = bytes, .left = size};
    png_structp png =
        png_create_read_struct_2(PNG_LIBPNG_VER_STRING, &in, png_stop, png_quiet, NULL, png_take, png_give);
    png_infop info = png ? png_create_info_struct(png) : NULL;
    png_bytep *volatile rows = NULL;
    volatile vla_status status = VLA_OK;
    if (!info) {
        status = vlai_nomem(err, 1024);
        goto done;
    }
    if (setjmp(in.escape)) {
        status = strstr(in.message, "emory") ? vlai_fail(err, VLA_E_NOMEM, "%s: %s", name, in.message)
                                             : vlai_fail(err, VLA_E_CORRUPT, "%s: damaged PNG: %s", name, in.message);
        goto done;
    }
    png_set_read_fn(png, &in, png_pull);
    png_set_user_limits(png, VLAI_IMAGE_SIDE_LIMIT, VLAI_IMAGE_SIDE_LIMIT);
    png_read_info(png, info);
    int color = png_get_color_type(png, info), depth = png_get_bit_depth(png, info);
    if (color == PNG_COLOR_TYPE_GRAY && depth == 16) {
        status = vlai_fail_hint(err, VLA_E_UNSUPPORTED, "depth cameras are not inputs of these policies: leave it unmapped",
                                "%s: 16-bit grey picture (depth) where RGB is wanted", name);
        goto done;
    }
    /* Deflate shrinks by 1032 at most: a larger picture is only claimed. */
    if (png_get_rowbytes(png, info) > (size * 1100 + 65536) / (png_get_image_height(png, info) + 1)) {
        status = vlai_fail(err, VLA_E_CORRUPT, "%s: damaged PNG: %u x %u pixels in %zu bytes", name,
                           png_get_image_width(png, info), png_get_image_height(png, info), size);
        goto done;
    }
    status = vlai_image_room(image, png_get_image_width(png, info), png_get_image_height(png, info), name, err);
    if (status != VLA_OK)
        goto done;
    png_set_strip_16(png);
    png_set_packing(png);
    if (color == PNG_COLOR_TYPE_PALETTE)
        png_set_palette_to_rgb(png);
    if (color == PNG_COLOR_TYPE_GRAY || color == PNG_COLOR_TYPE_GRAY_ALPHA) {
        if (depth < 8)
            png_set_expand_gray_1_2_4_to_8(png);
        png_set_gray_to_rgb(png);
    }
    png_set_strip_alpha(png);
    png_set_interlace_handling(png);
    png_read_update_info(png, info);
    if (png_get_rowbytes(png, info) != (size_t)image->width * 3) {
        status = vlai_fail(err, VLA_E_UNSUPPORTED, "%s: PNG of colour type %d, depth %d", name, color, depth);
        goto done;
    }
    rows = vlai_array((size_t)image->height, sizeof *rows);
    if (!rows) {
        status = vlai_nomem(err, (size_t)image->height * sizeof *rows);
        goto done;
    }
    for (int y = 0; y < image->height; y++)
        rows[y] = image->data + (size_t)y * (size_t)image->width * 3;
    png_read_image(png, rows);
    png_read_end(png, NULL);
done:
    vlai_free((void *)rows);
    png_destroy_read_struct(&png, &info, NULL);
    return status;
}

/* --- JPEG --- */

/* Four colours of ink, of which files hold the complements (Adobe's convention, which Pillow assumes of all), to RGB in
 * place of the first three: Pillow's rule, in which products of bytes are divided by 255 and rounded. */
static void ink_to_rgb(const uint8_t *ink, size_t pixels, uint8_t *rgb)
{
    for (size_t i = 0; i < pixels; i++, ink += 4, rgb += 3)
        for (int c = 0; c < 3; c++) {
            int product = (255 - ink[c]) * ink[3] + 128;
            rgb[c] = (uint8_t)(ink[3] - (((product >> 8) + product) >> 8));
        }
}

static bool jpeg_failed(tjhandle jpeg, int code)
{
    return code != 0 && (tjGetErrorCode(jpeg) != TJERR_WARNING || strstr(tjGetErrorStr2(jpeg), "Premature"));
}

static vla_status read_jpeg(const uint8_t *bytes, size_t size, const char *name, vlai_image *image, vla_error *err)
{
    tjhandle jpeg = tjInitDecompress();
    if (!jpeg)
        return vlai_nomem(err, 1024);
    int width = 0, height = 0, sampling = 0, space = 0;
    vla_status status = VLA_OK;
    uint8_t *ink = NULL;
    if (tjDecompressHeader3(jpeg, bytes, (unsigned long)size, &width, &height, &sampling, &space) != 0) {
        status = vlai_fail(err, VLA_E_CORRUPT, "%s: damaged JPEG: %s", name, tjGetErrorStr2(jpeg));
    } else if (width <= 0 || height <= 0) { /* the library takes a file that ends in its tables for a whole one */
        status = vlai_fail(err, VLA_E_CORRUPT, "%s: damaged JPEG: it ends before its picture", name);
    } else if ((status = vlai_image_room(image, width, height, name, err)) == VLA_OK) {
        bool inks = space == TJCS_CMYK || space == TJCS_YCCK;
        size_t pixels = (size_t)width * (size_t)height;
        if (inks && !(ink = vlai_array(pixels, 4)))
            status = vlai_nomem(err, pixels * 4);
        else if (jpeg_failed(jpeg, tjDecompress2(jpeg, bytes, (unsigned long)size, inks ? ink : image->data, width, 0, height,
                                                 inks ? TJPF_CMYK : TJPF_RGB, 0)))
            status = vlai_fail(err, VLA_E_CORRUPT, "%s: damaged JPEG: %s", name, tjGetErrorStr2(jpeg));
        else if (inks)
            ink_to_rgb(ink, pixels, image->data);
    }
    vlai_free(ink);
    tjDestroy(jpeg);
    return status;
}

static vla_status read_any(const uint8_t *bytes, size_t size, const char *name, vlai_image *image, vla_error *err)
{
    if (size >= 8 && !memcmp(bytes, "\x89PNG\r\n\x1a\n", 8))
        return read_png(bytes, size, name, image, err);
    if (size >= 3 && !memcmp(bytes, "\xff\xd8\xff", 3))
        return read_jpeg(bytes, size, name, image, err);
    if (size >= 14 && !memcmp(bytes, "BM", 2))
        return vlai_image_av(VLAI_STILL_BMP, bytes, size, name, image, err);
    if (size >= 12 && !memcmp(bytes, "RIFF", 4) && !memcmp(bytes + 8, "WEBP", 4))
        return vlai_image_av(VLAI_STILL_WEBP, bytes, size, name, image, err);
    if (size >= 4 && (!memcmp(bytes, "II*\0", 4) || !memcmp(bytes, "MM\0*", 4)))
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED,
                              "depth cameras are not inputs of these policies: leave it unmapped; write colour pictures as PNG",
                              "%s: a TIFF picture, which LeRobot uses for depth, where PNG, JPEG, BMP or WebP is wanted", name);
    return vlai_fail(err, VLA_E_CORRUPT, "%s: neither PNG, JPEG, BMP nor WebP (%zu bytes)", name, size);
}

vla_status vlai_image_read(const uint8_t *bytes, size_t size, const char *name, vlai_image *image, vla_error *err)
{
    VLA_TRY(read_any(bytes, size, name, image, err));
    return vlai_image_turn(image, vlai_image_orientation(bytes, size), err);
}

void vlai_image_fini(vlai_image *image)
{
    vlai_free(image->data);
    *image = (vlai_image){0};
}

/* --- writing --- */

typedef struct png_output {
    uint8_t *data;
    size_t size, capacity;
    png_input in; /* message and escape */
} png_output;

static void png_push(png_structp png, png_bytep data, size_t n)
{
    png_output *out = png_get_io_ptr(png);
    if (n > out->capacity - out->size) {
        size_t wanted = out->capacity * 2 + n;
        uint8_t *grown = vlai_grow(out->data, out->capacity, wanted);
        if (!grown)
            png_error(png, "out of host memory");
        out->data = grown;
        out->capacity = wanted;
    }
    memcpy(out->data + out->size, data, n);
    out->size += n;
}

static void png_flush_nothing(png_structp png)
{
    (void)png;
}

vla_status vlai_png_encode(const uint8_t *rgb, int width, int height, int level, uint8_t **out, size_t *size,
                           vla_error *err)
{
    *out = NULL;
    *size = 0;
    png_output to = {0};
    png_structp png =
        png_create_write_struct_2(PNG_LIBPNG_VER_STRING, &to.in, png_stop, png_quiet, NULL, png_take, png_give);
    png_infop info = png ? png_create_info_struct(png) : NULL;
    volatile vla_status status = VLA_OK;
    if (!info) {
        status = vlai_nomem(err, 1024);
        goto done;
    }
    if (setjmp(to.in.escape)) {
        status = vlai_fail(err, strstr(to.in.message, "emory") ? VLA_E_NOMEM : VLA_E_INVALID,
                           "PNG of %d x %d cannot be written: %s", width, height, to.in.message);
        goto done;
    }
    png_set_write_fn(png, &to, png_push, png_flush_nothing);
    png_set_compression_level(png, level);
    png_set_IHDR(png, info, (png_uint_32)width, (png_uint_32)height, 8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
                 PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    png_write_info(png, info);
    for (int y = 0; y < height; y++)
        png_write_row(png, rgb + (size_t)y * (size_t)width * 3);
    png_write_end(png, NULL);
done:
    png_destroy_write_struct(&png, &info);
    if (status == VLA_OK) {
        *out = to.data;
        *size = to.size;
    } else {
        vlai_free(to.data);
    }
    return status;
}

vla_status vlai_png_write(const char *path, const uint8_t *rgb, int width, int height, vla_error *err)
{
    uint8_t *data;
    size_t size;
    VLA_TRY(vlai_png_encode(rgb, width, height, 6, &data, &size, err));
    vla_status status = vlai_write_file_atomic(path, data, size, err);
    vlai_free(data);
    return status;
}
