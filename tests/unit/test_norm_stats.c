/* Normalisation statistics: selection against sorting, and whole tables against the plain formula. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "base/rng.h"
#include "data/norm_stats.h"

#include <math.h>
#include <unistd.h>

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void selection(void **state)
{
    (void)state;
    enum { MOST = 700 };
    float values[MOST], sorted[MOST];
    for (uint64_t round = 0; round < 3000; round++) {
        const vlai_rng_key key = {.seed = 5, .stream = VLAI_RNG_SYNTH, .position = round};
        int64_t n = 1 + (int64_t)(vlai_rng_u32(&key, 0) % MOST), k = (int64_t)(vlai_rng_u32(&key, 1) % (uint64_t)n);
        uint32_t kinds = 1 + vlai_rng_u32(&key, 2) % 40; /* few different values: many ties */
        for (int64_t i = 0; i < n; i++) {
            uint32_t u = vlai_rng_u32(&key, (uint32_t)(i + 3));
            values[i] = round % 4 == 0 ? (float)i : round % 4 == 1 ? (float)(n - i) : (float)(u % kinds) - 3;
        }
        memcpy(sorted, values, (size_t)n * sizeof *sorted);
        qsort(sorted, (size_t)n, sizeof *sorted, ascending);
        float at, next;
        vlai_select_pair(values, n, k, &at, &next);
        assert_float_equal(at, sorted[k], 0);
        assert_float_equal(next, sorted[k + 1 < n ? k + 1 : k], 0);
    }
}

static double quantile(const float *sorted, int64_t n, double q)
{
    double v = (double)(n - 1) * q;
    int64_t i = (int64_t)v;
    double g = v - (double)i, a = sorted[i], b = sorted[i + 1 < n ? i + 1 : i];
    return g < 0.5 ? a + (b - a) * g : b - (b - a) * (1 - g);
}

/* Golden cases compare with the reference; this compares every number with the formula written out, for several threads. */
static void whole_table(void **state)
{
    (void)state;
    char root[4096];
    snprintf(root, sizeof root, "%s/assets/datasets/v30-av1", golden_dir());
    if (!vlai_is_dir(root)) {
        skip();
        return;
    }
    vla_dataset *set;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vla_dataset_open(root, NULL, &set, &err), err);
    json_t *first = NULL;
    for (int threads = 1; threads <= 3; threads += 2) {
        const vlai_norm_request request = {.state_key = "observation.state", .action_key = "action", .threads = threads};
        json_t *stats;
        assert_ok(vlai_norm_stats(set, &request, &stats, &err), err);
        if (first)
            assert_true(json_equal(first, stats));
        json_decref(first);
        first = stats;
    }
    static const char *const keys[2] = {"observation.state", "action"};
    int64_t rows = vla_dataset_info_get(set)->rows;
    float *column = malloc((size_t)rows * sizeof *column);
    for (int k = 0; k < 2; k++) {
        const float *data;
        int64_t dim;
        assert_ok(vla_dataset_numbers(set, keys[k], &data, &dim, &err), err);
        const json_t *entry = json_object_get(json_object_get(first, "norm_stats"), keys[k]);
        for (int64_t d = 0; d < dim; d++) {
            double sum = 0, squares = 0;
            for (int64_t r = 0; r < rows; r++)
                sum += column[r] = data[r * dim + d];
            for (int64_t r = 0; r < rows; r++)
                squares += pow(column[r] - sum / (double)rows, 2);
            qsort(column, (size_t)rows, sizeof *column, ascending);
            const double want[] = {sum / (double)rows, sqrt(squares / (double)rows), quantile(column, rows, 0.01),
                                   quantile(column, rows, 0.99)};
            static const char *const names[] = {"mean", "std", "q01", "q99"};
            for (int s = 0; s < 4; s++)
                assert_float_equal(json_number_value(json_array_get(json_object_get(entry, names[s]), (size_t)d)), want[s],
                                   1e-12);
        }
    }
    free(column);
    json_decref(first);
    vla_dataset_close(set);
}

int main(void)
{
    char cache[64];
    snprintf(cache, sizeof cache, "/tmp/vla-test-norm-stats-%d", (int)getpid());
    setenv("VLA_CACHE_DIR", cache, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selection),
        cmocka_unit_test(whole_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
