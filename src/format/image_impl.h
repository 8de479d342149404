/* What the readers of still pictures share: image.c (PNG, JPEG), image_av.c (BMP, WebP through libavcodec),
 * image_turn.c. */
#ifndef VLAI_IMAGE_IMPL_H
#define VLAI_IMAGE_IMPL_H

#include "format/image.h"

VLA_BEGIN_DECLS

/* No picture is larger, whatever its header says. */
enum { VLAI_IMAGE_SIDE_LIMIT = 1 << 15, VLAI_IMAGE_PIXEL_LIMIT = 1 << 26 };

/* Room for width x height pixels in `image`, whose size they become; an error when that is no size of a picture. */
vla_status vlai_image_room(vlai_image *image, int64_t width, int64_t height, const char *name, vla_error *err);

typedef enum vlai_still { VLAI_STILL_BMP, VLAI_STILL_WEBP } vlai_still;
vla_status vlai_image_av(vlai_still kind, const uint8_t *bytes, size_t size, const char *name, vlai_image *image,
                         vla_error *err);
/* The planes of a lossy WebP picture as libwebp converts them. */
void vlai_webp_rgb(const uint8_t *const planes[3], const int strides[3], int width, int height, uint8_t *rgb);

/* image_turn.c: what the EXIF data of an encoded picture asks for, 1 (nothing) to 8; and doing it. */
int vlai_image_orientation(const uint8_t *bytes, size_t size);
vla_status vlai_image_turn(vlai_image *image, int orientation, vla_error *err);

VLA_END_DECLS

#endif
