/* Scaling of states and actions by dataset statistics, and the way back.
 *
 *     vlai_norm n;
 *     VLA_TRY(vlai_norm_read("norm_stats.json", "observation.state", &n, err));
 *     vlai_normalise(&n, state, 8, 26, out, mask);       // y = clamp(2 (x - q01) / (q99 - q01) - 1, -1, 1), padded to 26
 *     vlai_unnormalise(&n, prediction, 26, out);         // model side: (y + 1) / 2 * delta + min, no clamp
 *     vlai_norm_fini(&n);
 *
 * Two rules differ on purpose, as in the reference. The data side replaces a delta of 0 by 1, fits statistics to the data's
 * width (missing ones are min 0, delta 1) and pads with zeros afterwards. The model side has no zero guard: 0/0 is NaN.
 * A `vlai_norm` is read-only after it is made: any thread may use it. */
#ifndef VLAI_NORMALISE_H
#define VLAI_NORMALISE_H

#include "vla/error.h"

#include <jansson.h>
#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_norm {
    int64_t dims;
    float *min, *delta;                /* float32(q01), float32(q99) - float32(q01) */
    double *mean, *std, *q01, *q99;    /* as in the file; mean and std are NaN where it has none */
} vlai_norm;

/* From {"norm_stats": {KEY: {"mean", "std", "q01", "q99"}}}. */
vla_status vlai_norm_read(const char *path, const char *key, vlai_norm *out, vla_error *err);
vla_status vlai_norm_parse(const json_t *stats, const char *key, const char *where, vlai_norm *out, vla_error *err);
/* From arrays; mean and std may be NULL. */
vla_status vlai_norm_make(int64_t dims, const double *q01, const double *q99, const double *mean, const double *std,
                          vlai_norm *out, vla_error *err);
vla_status vlai_norm_copy(const vlai_norm *from, vlai_norm *out, vla_error *err);
void vlai_norm_fini(vlai_norm *n);
/* {"mean": [...], "std": [...], "q01": [...], "q99": [...]}; NULL when memory runs out. */
json_t *vlai_norm_to_json(const vlai_norm *n);

/* Data side, one row. `out` and `mask` get max(dims, total) values: NaN inputs count as 0 and have mask 0; columns beyond
 * `dims` are 0 with mask 0. */
void vlai_normalise(const vlai_norm *n, const float *in, int64_t dims, int64_t total, float *out, float *mask);

/* Model side, one row of `width` values. Statistics of `width` dims are used as they are; columns beyond them, the "virtual
 * tail", become 0 when `tail` is set and use min 0, delta 1 (padded statistics) otherwise. */
void vlai_model_normalise(const vlai_norm *n, const float *in, int64_t width, bool tail, float *out);
void vlai_model_unnormalise(const vlai_norm *n, const float *in, int64_t width, bool tail, float *out);

/* What is odd about one dimension: "constant" (q01 = q99), "reversed" (q99 < q01), "tiny range" (q99 - q01 below 1e-4 of
 * the largest in the vector and below 1e-6 absolute), "not finite"; NULL when nothing is. */
const char *vlai_norm_oddity(const vlai_norm *n, int64_t dim);

VLA_END_DECLS

#endif
