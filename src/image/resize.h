/* Camera picture to model size: which size, and Pillow's 8-bit bicubic resize to it, bit for bit.
 *
 *     vlai_resizer *r;
 *     VLA_TRY(vlai_resizer_create(&r, err));                           // one per worker thread
 *     VLA_TRY(vlai_image_fit(w, h, 256, &rule, &size, err));          // 256x256 -> 256x256 -> 252x252
 *     VLA_TRY(vlai_resizer_fit(r, rgb, w, h, &size, out, err));       // both steps
 *     vlai_resizer_destroy(r);
 *
 * Pictures are (H, W, 3) uint8, RGB, rows without gaps. The pass order is that of Pillow before 13: horizontal, rounded to
 * 8 bits, then vertical. Coefficient tables are kept per (from, to) length.
 * Threads: a resizer belongs to one thread at a time; the size functions are pure. */
#ifndef VLAI_RESIZE_H
#define VLAI_RESIZE_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vlai_image_rule {
    int64_t factor;                 /* patch size times merge size: sides become multiples of it */
    int64_t min_pixels, max_pixels; /* area after the second step */
} vlai_image_rule;

#define VLAI_IMAGE_RULE_DEFAULT {28, 3136, 12845056}

typedef struct vlai_image_size {
    int64_t width1, height1; /* longest side brought to the target */
    int64_t width, height;   /* multiples of the factor */
} vlai_image_size;

/* Step 1: longest side to `target` (-1: unchanged), the other side truncated. */
void vlai_image_longest_side(int64_t width, int64_t height, int64_t target, int64_t *out_width, int64_t *out_height);
/* Step 2, "smart resize". A side of 0 or sides in a ratio above 200 are errors. */
vla_status vlai_image_smart_size(int64_t width, int64_t height, const vlai_image_rule *rule, int64_t *out_width,
                                 int64_t *out_height, vla_error *err);
/* Both steps. */
vla_status vlai_image_fit(int64_t width, int64_t height, int64_t target, const vlai_image_rule *rule,
                          vlai_image_size *out, vla_error *err);

typedef struct vlai_resizer vlai_resizer;

vla_status vlai_resizer_create(vlai_resizer **out, vla_error *err);
void vlai_resizer_destroy(vlai_resizer *resizer);

/* `out` holds to_width * to_height * 3 bytes and does not overlap `in`. The same size is a copy. */
vla_status vlai_resizer_run(vlai_resizer *resizer, const uint8_t *in, int64_t width, int64_t height, int64_t to_width,
                            int64_t to_height, uint8_t *out, vla_error *err);
/* Through width1 x height1 to width x height. */
vla_status vlai_resizer_fit(vlai_resizer *resizer, const uint8_t *in, int64_t width, int64_t height,
                            const vlai_image_size *size, uint8_t *out, vla_error *err);

VLA_END_DECLS

#endif
