/* Stochastic rounding: the mean is exact within the statistical error, draws are uniform and unrelated. Everything is a
 * pure function of fixed keys, so a bound of 5 standard deviations is met always or never. */
#include "test.h"

#include "base/bf16.h"
#include "optim/rounding.h"

#include <math.h>

enum { DRAWS = 1 << 18 };

static double field(vlai_rounding_bits b, int f)
{
    return (f == 0 ? b.weight : f == 1 ? b.m : b.v) / 65536.0;
}

/* The mean of DRAWS roundings of x, over elements of one update or over updates of one element. */
static void check_mean(float x, int over_updates, int f)
{
    double sum = 0;
    uint16_t low = UINT16_MAX, high = 0;
    for (uint32_t k = 0; k < DRAWS; k++) {
        vlai_rounding r = vlai_rounding_of(7, over_updates ? k + 1 : 3, 12345, 0);
        vlai_rounding_bits b = vlai_rounding_draw(r, over_updates ? 77 : k);
        uint16_t y = vlai_bf16_stochastic(x, f == 0 ? b.weight : f == 1 ? b.m : b.v);
        low = y < low ? y : low;
        high = y > high ? y : high;
        sum += (double)vlai_bf16_to_float(y);
    }
    double a = (double)vlai_bf16_to_float(low), b = (double)vlai_bf16_to_float(high), part = high == low ? 0 : ((double)x - a) / (b - a);
    assert_true(high - low <= 1);
    assert_true(fmin(a, b) <= (double)x && (double)x <= fmax(a, b));
    double error = sum / DRAWS - (double)x, deviation = fabs(b - a) * sqrt(part * (1 - part) / DRAWS);
    if (fabs(error) > 5 * deviation)
        fail_msg("%.9g rounds to %.9g in the mean: %.3g deviations off", (double)x, sum / DRAWS, error / deviation);
}

static void the_mean_is_exact(void **state)
{
    (void)state;
    const float x[] = {1.001f, -1.0039f, 3.14159f, 1e-3f, -2.7e-20f, 65535.3f, 1.99999f, 1e-39f, -3e-40f};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        for (int f = 0; f < 3; f++) {
            check_mean(x[i], 0, f);
            check_mean(x[i], 1, f);
        }
}

static void exact_values_stay(void **state)
{
    (void)state;
    const float x[] = {0.0f, -0.0f, 1.0f, -1.5f, INFINITY, -INFINITY, 0x1p-133f};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        for (uint32_t bits = 0; bits <= 0xFFFF; bits += 0xFFF)
            assert_int_equal(vlai_bf16_stochastic(x[i], bits), vlai_bf16_from_float(x[i]));
    uint32_t u = 0x7FFFFFFF;
    float nan;
    memcpy(&nan, &u, 4);
    assert_true(isnan(vlai_bf16_to_float(vlai_bf16_stochastic(nan, 0xFFFF))));
}

/* Mean 1/2, variance 1/12, 256 equally full bins; no relation between fields, neighbours, updates and keys. */
static void draws_are_uniform_and_unrelated(void **state)
{
    (void)state;
    for (int way = 0; way < 3; way++) { /* along elements, updates, keys */
        double sum[3] = {0}, with_next[3] = {0}, between[3] = {0}, previous[3] = {0};
        int bins[3][256] = {{0}};
        for (uint32_t k = 0; k < DRAWS; k++) {
            vlai_rounding r = vlai_rounding_of(10222, way == 1 ? k : 5, way == 2 ? k : 99, 0);
            vlai_rounding_bits b = vlai_rounding_draw(r, way == 0 ? k : 4096);
            for (int f = 0; f < 3; f++) {
                double x = field(b, f) - 0.5, y = field(b, (f + 1) % 3) - 0.5;
                sum[f] += x;
                with_next[f] += x * previous[f];
                between[f] += x * y;
                previous[f] = x;
                bins[f][(int)(field(b, f) * 256)]++;
            }
        }
        for (int f = 0; f < 3; f++) {
            double chi = 0, each = DRAWS / 256.0, deviation = sqrt(1.0 / 12 / DRAWS);
            for (int i = 0; i < 256; i++)
                chi += (bins[f][i] - each) * (bins[f][i] - each) / each;
            assert_true(fabs(sum[f] / DRAWS) < 5 * deviation);
            assert_true(fabs(with_next[f] / DRAWS) < 5 / 12.0 / sqrt(DRAWS));
            assert_true(fabs(between[f] / DRAWS) < 5 / 12.0 / sqrt(DRAWS));
            if (fabs(chi - 255) > 5 * sqrt(2 * 255))
                fail_msg("way %d, field %d: chi square %.1f of 255 degrees", way, f, chi);
        }
    }
}

static void every_key_counts(void **state)
{
    (void)state;
    const vlai_rounding r[] = {vlai_rounding_of(1, 2, 3, 0), vlai_rounding_of(2, 2, 3, 0), vlai_rounding_of(1, 3, 3, 0),
                               vlai_rounding_of(1, 2, 4, 0), vlai_rounding_of(1, 2, 3, 1), vlai_rounding_of(2, 1, 3, 0)};
    for (size_t i = 0; i < sizeof r / sizeof *r; i++)
        for (size_t j = 0; j < i; j++)
            assert_true(r[i].a != r[j].a && r[i].b != r[j].b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mean_is_exact),
        cmocka_unit_test(exact_values_stay),
        cmocka_unit_test(draws_are_uniform_and_unrelated),
        cmocka_unit_test(every_key_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
