/* Still pictures: bytes of PNG, JPEG, BMP or WebP to RGB, RGB to PNG.
 *
 * Reading gives what Pillow's Image.open(...).convert("RGB") gives: palettes are looked up, grey is spread over three
 * channels, alpha and transparency are dropped, 16-bit colour keeps its upper byte, inks become light, and the turn that
 * EXIF data asks for is done. Depth (16-bit grey, TIFF) is refused with the reason.
 *
 *     vlai_image image = {0};
 *     VLA_TRY(vlai_image_read(bytes, size, "cam of row 12", &image, err));   // image.data: height x width x 3
 *     vlai_image_fini(&image);
 *
 * The storage of `image` is kept and grown by further reads. Bytes are hostile: sizes are bounded before anything is
 * allocated. Threads: any. */
#ifndef VLAI_IMAGE_H
#define VLAI_IMAGE_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vlai_image {
    uint8_t *data; /* (height, width, 3) */
    size_t capacity;
    int width, height;
} vlai_image;

/* `name` stands in messages. */
vla_status vlai_image_read(const uint8_t *bytes, size_t size, const char *name, vlai_image *image, vla_error *err);
void vlai_image_fini(vlai_image *image);

/* Compressed PNG of an RGB picture in `*out` (vlai_free). level: 0 (none) .. 9, 6 is usual. */
vla_status vlai_png_encode(const uint8_t *rgb, int width, int height, int level, uint8_t **out, size_t *size,
                           vla_error *err);
/* The same written to a file, whole or not at all. */
vla_status vlai_png_write(const char *path, const uint8_t *rgb, int width, int height, vla_error *err);

VLA_END_DECLS

#endif
