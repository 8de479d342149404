/* Exact statistics of columns and of pictures, as LeRobot's metadata lists them: min, max, mean, population standard
 * deviation and five quantiles (linear between order statistics, as numpy's default). Means and deviations take two
 * passes in double. Meant for what we write; statistics of sets that we read come from the training episodes. */
#ifndef VLAI_EXACT_STATS_H
#define VLAI_EXACT_STATS_H

#include "vla/error.h"

VLA_BEGIN_DECLS

#define VLAI_STAT_MAP(X) X(min) X(max) X(mean) X(std) X(q01) X(q10) X(q50) X(q90) X(q99)
enum {
#define X(name) VLAI_STAT_##name,
    VLAI_STAT_MAP(X)
#undef X
    VLAI_STAT_COUNT
};
extern const char *const vlai_stat_names[VLAI_STAT_COUNT];

/* rows: n >= 1 rows of `dims` doubles; column `dim` of them. scratch: n doubles, overwritten. Statistic s goes to
 * out[s * dims + dim]. */
void vlai_stats_column(const double *rows, int64_t n, int dims, int dim, double *scratch, double *out);

/* Levels of the three channels, counted; values come out divided by 255. out: VLAI_STAT_COUNT x 3. */
enum { VLAI_LEVELS = 256, VLAI_HISTOGRAM = 3 * VLAI_LEVELS };
void vlai_stats_count_picture(const uint8_t *rgb, size_t pixels, uint64_t times, uint64_t histogram[VLAI_HISTOGRAM]);
void vlai_stats_picture(const uint64_t histogram[VLAI_HISTOGRAM], double out[VLAI_STAT_COUNT * 3]);

VLA_END_DECLS

#endif
