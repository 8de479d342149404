/* Beyond vla_frame_reader_read: the decoder's own planes, and where a frame lies. For parity and the validator. */
#ifndef VLAI_FRAMES_H
#define VLAI_FRAMES_H

#include "data/set.h"
#include "format/image.h"
#include "format/parquet.h"

VLA_BEGIN_DECLS

/* File (relative), ordinal in it and time of the frame of a video camera. */
vla_status vlai_frame_place(vla_dataset *set, int64_t row, const vla_feature *camera, const char **file, int64_t *ordinal,
                            double *seconds, vla_error *err);
/* Valid until the reader's next call. */
vla_status vlai_frame_decode(vla_frame_reader *reader, int64_t row, const vla_feature *camera, vlai_frame *out,
                             vla_error *err);
/* The picture of an image column's cell (a read of one row): embedded, or a file of the set that the cell names. */
vla_status vlai_frame_cell(const vla_dataset *set, const vlai_parquet_values *cell, const char *name, vlai_image *out,
                           vla_error *err);

VLA_END_DECLS

#endif
