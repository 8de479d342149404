#include "data/exact_stats.h"

#include "base/order.h"

#include <math.h>
#include <stdlib.h>

const char *const vlai_stat_names[VLAI_STAT_COUNT] = {
#define X(name) #name,
    VLAI_STAT_MAP(X)
#undef X
};
static const double quantiles[] = {0.01, 0.10, 0.50, 0.90, 0.99};
enum { QUANTILES = sizeof quantiles / sizeof *quantiles };

void vlai_stats_column(const double *rows, int64_t n, int dims, int dim, double *scratch, double *out)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        sum += scratch[i] = rows[i * dims + dim];
    double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++)
        squares += (scratch[i] - mean) * (scratch[i] - mean);
    qsort(scratch, (size_t)n, sizeof *scratch, vlai_by_value);
    out[VLAI_STAT_min * dims + dim] = scratch[0];
    out[VLAI_STAT_max * dims + dim] = scratch[n - 1];
    out[VLAI_STAT_mean * dims + dim] = mean;
    out[VLAI_STAT_std * dims + dim] = sqrt(squares / (double)n);
    for (int q = 0; q < QUANTILES; q++) {
        double at = quantiles[q] * (double)(n - 1);
        int64_t low = (int64_t)at, high = low + 1 < n ? low + 1 : low;
        out[(VLAI_STAT_q01 + q) * dims + dim] = scratch[low] + (at - (double)low) * (scratch[high] - scratch[low]);
    }
}

void vlai_stats_count_picture(const uint8_t *rgb, size_t pixels, uint64_t times, uint64_t histogram[VLAI_HISTOGRAM])
{
    for (size_t i = 0; i < pixels; i++)
        for (size_t c = 0; c < 3; c++)
            histogram[c * VLAI_LEVELS + rgb[i * 3 + c]] += times;
}

/* The level of the pixel that stands at `rank` (from 0) when all are sorted. */
static int level_at(const uint64_t *levels, uint64_t rank)
{
    uint64_t seen = 0;
    for (int v = 0; v < VLAI_LEVELS; v++) {
        seen += levels[v];
        if (seen > rank)
            return v;
    }
    return VLAI_LEVELS - 1;
}

void vlai_stats_picture(const uint64_t histogram[VLAI_HISTOGRAM], double out[VLAI_STAT_COUNT * 3])
{
    for (int c = 0; c < 3; c++) {
        const uint64_t *levels = histogram + c * VLAI_LEVELS;
        uint64_t n = 0;
        double sum = 0, squares = 0;
        for (int v = 0; v < VLAI_LEVELS; v++) {
            n += levels[v];
            sum += (double)levels[v] * v;
        }
        double mean = sum / (double)n;
        for (int v = 0; v < VLAI_LEVELS; v++)
            squares += (double)levels[v] * (v - mean) * (v - mean);
        out[VLAI_STAT_min * 3 + c] = level_at(levels, 0) / 255.0;
        out[VLAI_STAT_max * 3 + c] = level_at(levels, n - 1) / 255.0;
        out[VLAI_STAT_mean * 3 + c] = mean / 255;
        out[VLAI_STAT_std * 3 + c] = sqrt(squares / (double)n) / 255;
        for (int q = 0; q < QUANTILES; q++) {
            double at = quantiles[q] * (double)(n - 1);
            uint64_t low = (uint64_t)at;
            int a = level_at(levels, low), b = level_at(levels, low + 1 < n ? low + 1 : low);
            out[(VLAI_STAT_q01 + q) * 3 + c] = (a + (at - (double)low) * (b - a)) / 255;
        }
    }
}
