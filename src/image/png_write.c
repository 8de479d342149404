#include "image/png_write.h"

#include "base/fail.h"
#include "base/memory.h"

#include <png.h>

vla_status vlai_png_encode(const uint8_t *rgb, int width, int height, uint8_t **out, size_t *size, vla_error *err)
{
    *out = NULL;
    png_image image = {.version = PNG_IMAGE_VERSION, .width = (png_uint_32)width, .height = (png_uint_32)height,
                       .format = PNG_FORMAT_RGB};
    png_alloc_size_t bytes = PNG_IMAGE_PNG_SIZE_MAX(image);
    uint8_t *data = vlai_alloc(bytes);
    if (!data)
        return vlai_nomem(err, bytes);
    if (!png_image_write_to_memory(&image, data, &bytes, 0, rgb, 0, NULL)) {
        vla_status status = vlai_fail(err, VLA_E_IO, "PNG of %dx%d: %s", width, height, image.message);
        png_image_free(&image);
        vlai_free(data);
        return status;
    }
    *out = data;
    *size = bytes;
    return VLA_OK;
}
