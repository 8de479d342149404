/* Picture to normalised patches, as the Qwen2-VL image processor makes them; and that processor's parameters.
 *
 *     vlai_image_processor p;
 *     VLA_TRY(vlai_image_processor_read("processor", &p, err));          // preprocessor_config.json
 *     int64_t rows = vlai_image_grid(&p, width, height, grid);           // grid = 1, H/14, W/14
 *     vlai_patchify(&p, rgb, width, height, patches);                    // (rows, vlai_patch_width(&p)) float
 *
 * Rows are ordered by (block row, block column, row in block, column in block), a block being merge x merge patches; each
 * row by (channel, temporal, y, x); the one frame stands in every temporal slice. Values are (x - 255 mean) / (255 std) in
 * float32, looked up per byte. Threads: all functions are pure. */
#ifndef VLAI_PATCHIFY_H
#define VLAI_PATCHIFY_H

#include "image/resize.h"
#include "vla/error.h"

#include <jansson.h>

VLA_BEGIN_DECLS

typedef struct vlai_image_processor {
    int64_t patch, temporal, merge;
    vlai_image_rule rule;
    double mean[3], std[3];
    float table[3][256]; /* channel, byte -> normalised value */
} vlai_image_processor;

/* Qwen2.5-VL's values, in effect where the file is silent. */
void vlai_image_processor_default(vlai_image_processor *out);
/* `path`: the processor folder or the preprocessor_config.json itself. */
vla_status vlai_image_processor_read(const char *path, vlai_image_processor *out, vla_error *err);
vla_status vlai_image_processor_parse(const json_t *object, const char *where, vlai_image_processor *out, vla_error *err);

/* Patches of a picture whose sides are multiples of patch * merge; 0 when they are not. */
int64_t vlai_image_grid(const vlai_image_processor *p, int64_t width, int64_t height, int64_t grid[3]);
/* Tokens that a picture takes in the text: patches / merge^2. */
int64_t vlai_image_tokens(const vlai_image_processor *p, const int64_t grid[3]);
int64_t vlai_patch_width(const vlai_image_processor *p); /* 3 * temporal * patch * patch */

void vlai_patchify(const vlai_image_processor *p, const uint8_t *rgb, int64_t width, int64_t height, float *out);

VLA_END_DECLS

#endif
