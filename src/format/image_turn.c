/* The turn that a picture's EXIF data asks for (tag Orientation), which the reference's reader of picture columns carries
 * out. EXIF data is a TIFF file of tags; JPEG holds it in an APP1 segment, PNG in an eXIf chunk, WebP in an EXIF chunk.
 * Whatever of it cannot be read asks for nothing. */
#include "format/image_impl.h"

#include "base/fail.h"
#include "base/memory.h"

#include <stdbool.h>
#include <string.h>

static uint32_t number(const uint8_t *p, int bytes, bool big)
{
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint32_t)p[i] << 8 * (big ? bytes - 1 - i : i);
    return value;
}

static int orientation_in(const uint8_t *exif, size_t size)
{
    enum { ORIENTATION = 0x112, SHORT = 3, LONG = 4, HEAD = 8, ENTRY = 12 };
    if (size >= 6 && !memcmp(exif, "Exif\0\0", 6))
        exif += 6, size -= 6;
    if (size < HEAD || (memcmp(exif, "II*\0", 4) && memcmp(exif, "MM\0*", 4)))
        return 1;
    bool big = exif[0] == 'M';
    size_t at = number(exif + 4, 4, big);
    if (at > size - 2)
        return 1;
    size_t count = number(exif + at, 2, big);
    at += 2;
    for (size_t i = 0; i < count && at + ENTRY <= size; i++, at += ENTRY) {
        uint32_t type = number(exif + at + 2, 2, big);
        if (number(exif + at, 2, big) != ORIENTATION || (type != SHORT && type != LONG))
            continue;
        uint32_t value = number(exif + at + 8, type == SHORT ? 2 : 4, big);
        return value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

static int of_jpeg(const uint8_t *data, size_t size)
{
    enum { APP1 = 0xe1, SCAN = 0xda };
    for (size_t at = 2; at + 4 <= size && data[at] == 0xff && data[at + 1] != SCAN;) {
        size_t length = number(data + at + 2, 2, true);
        if (length < 2 || length > size - at - 2)
            return 1;
        if (data[at + 1] == APP1 && length >= 8 && !memcmp(data + at + 4, "Exif\0\0", 6))
            return orientation_in(data + at + 4, length - 2);
        at += 2 + length;
    }
    return 1;
}

/* PNG: big-endian length, type, body, check; RIFF: type, little-endian length, body, to even lengths. */
static int of_chunks(const uint8_t *data, size_t size, bool png)
{
    size_t at = png ? 8 : 12;
    while (at + 8 <= size) {
        size_t length = number(data + at + (png ? 0 : 4), 4, png);
        if (length > size - at - 8)
            return 1;
        if (!memcmp(data + at + (png ? 4 : 0), png ? "eXIf" : "EXIF", 4))
            return orientation_in(data + at + 8, length);
        at += 8 + length + (png ? 4 : length % 2);
    }
    return 1;
}

int vlai_image_orientation(const uint8_t *bytes, size_t size)
{
    if (size >= 8 && !memcmp(bytes, "\x89PNG", 4))
        return of_chunks(bytes, size, true);
    if (size >= 12 && !memcmp(bytes, "RIFF", 4))
        return of_chunks(bytes, size, false);
    return size >= 2 && !memcmp(bytes, "\xff\xd8", 2) ? of_jpeg(bytes, size) : 1;
}

vla_status vlai_image_turn(vlai_image *image, int orientation, vla_error *err)
{
    if (orientation <= 1)
        return VLA_OK;
    /* 2 to 4 mirror; 5 to 8 exchange the axes, mirrored in turn. */
    bool exchange = orientation >= 5;
    bool mirror_x = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    bool mirror_y = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
    int from_width = image->width, from_height = image->height;
    int width = exchange ? from_height : from_width, height = exchange ? from_width : from_height;
    size_t bytes = (size_t)width * (size_t)height * 3;
    uint8_t *turned = vlai_alloc(bytes), *out = turned;
    if (!turned)
        return vlai_nomem(err, bytes);
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++, out += 3) {
            int from_x = exchange ? y : x, from_y = exchange ? x : y;
            from_x = mirror_x ? from_width - 1 - from_x : from_x;
            from_y = mirror_y ? from_height - 1 - from_y : from_y;
            memcpy(out, image->data + ((size_t)from_y * (size_t)from_width + (size_t)from_x) * 3, 3);
        }
    vlai_free(image->data);
    *image = (vlai_image){.data = turned, .capacity = bytes, .width = width, .height = height};
    return VLA_OK;
}
