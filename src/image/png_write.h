/* RGB pictures as PNG files in memory. */
#ifndef VLAI_PNG_WRITE_H
#define VLAI_PNG_WRITE_H

#include "vla/error.h"

VLA_BEGIN_DECLS

/* rgb: (height, width, 3) uint8. *out is released with vlai_free. */
vla_status vlai_png_encode(const uint8_t *rgb, int width, int height, uint8_t **out, size_t *size, vla_error *err);

VLA_END_DECLS

#endif
