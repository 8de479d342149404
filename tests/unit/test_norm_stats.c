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

/* Opens v30-av1 and parses both layouts: position 3, rotation, gripper. */
static vla_dataset *rotations(const char *dof_json, const char *pos_json, vlai_layout *dof, vlai_layout *pos)
{
    char root[4096];
    vla_error err = VLA_ERROR_INIT;
    vla_dataset *set;
    snprintf(root, sizeof root, "%s/assets/datasets/v30-av1", golden_dir());
    if (!vlai_is_dir(root))
        return NULL;
    assert_ok(vla_dataset_open(root, NULL, &set, &err), err);
    json_t *d = json_loads(dof_json, 0, NULL), *p = json_loads(pos_json, 0, NULL);
    assert_ok(vlai_layout_parse(d, "dof", dof, &err), err);
    assert_ok(vlai_layout_parse(p, "pos", pos, &err), err);
    json_decref(d);
    json_decref(p);
    return set;
}

static double number(const json_t *stats, const char *key, const char *stat, size_t i)
{
    return json_number_value(json_array_get(json_object_get(json_object_get(json_object_get(stats, "norm_stats"), key), stat), i));
}

/* Angles under a 6D rotation: the statistics are those of the converted samples, and the columns after them keep theirs. */
static void six(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_layout dof, pos;
    vla_dataset *set = rotations("{\"p\": 3, \"rotation_6D\": 6, \"gripper\": 1, \"action_padding\": 16}",
                                 "{\"p\": 3, \"rotation\": 3, \"gripper\": 2}", &dof, &pos);
    if (!set) {
        skip();
        return;
    }
    const vlai_norm_request plain = {.state_key = "observation.state", .action_key = "action"};
    vlai_norm_request request = plain;
    request.state_layout = &pos;
    request.action_layout = &dof;
    json_t *raw, *stats;
    assert_ok(vlai_norm_stats(set, &plain, &raw, &err), err);
    assert_ok(vlai_norm_stats(set, &request, &stats, &err), err);
    assert_int_equal(json_array_size(json_object_get(json_object_get(json_object_get(stats, "norm_stats"), "action"), "q01")), 10);
    const float *actions;
    int64_t dim, rows = vla_dataset_info_get(set)->rows;
    assert_ok(vla_dataset_numbers(set, "action", &actions, &dim, &err), err);
    assert_int_equal(dim, 7);
    double mean[6] = {0}, low[6], high[6];
    for (int64_t r = 0; r < rows; r++) {
        const double roll = actions[r * dim + 3], pitch = actions[r * dim + 4], yaw = actions[r * dim + 5];
        const double m[6] = {cos(yaw) * cos(pitch), cos(yaw) * sin(pitch) * sin(roll) - sin(yaw) * cos(roll),
                             cos(yaw) * sin(pitch) * cos(roll) + sin(yaw) * sin(roll), sin(yaw) * cos(pitch),
                             sin(yaw) * sin(pitch) * sin(roll) + cos(yaw) * cos(roll),
                             sin(yaw) * sin(pitch) * cos(roll) - cos(yaw) * sin(roll)};
        for (int k = 0; k < 6; k++) {
            mean[k] += m[k] / (double)rows;
            low[k] = r && low[k] < m[k] ? low[k] : m[k];
            high[k] = r && high[k] > m[k] ? high[k] : m[k];
        }
    }
    for (size_t k = 0; k < 6; k++) { /* float32 samples: 6e-8 each */
        assert_float_equal(number(stats, "action", "mean", 3 + k), mean[k], 1e-7);
        double q01 = number(stats, "action", "q01", 3 + k), q99 = number(stats, "action", "q99", 3 + k);
        assert_true(q01 < q99 && q01 >= low[k] - 1e-7 && q99 <= high[k] + 1e-7);
    }
    for (size_t k = 0; k < 3; k++)
        assert_true(number(stats, "action", "q99", k) == number(raw, "action", "q99", k));
    assert_true(number(stats, "action", "q01", 9) == number(raw, "action", "q01", 6));
    for (size_t k = 0; k < 8; k++) /* the state's layout asks for no conversion */
        assert_true(number(stats, "observation.state", "std", k) == number(raw, "observation.state", "std", k));
    json_decref(raw);
    json_decref(stats);
    vlai_layout_fini(&dof);
    vlai_layout_fini(&pos);
    vla_dataset_close(set);
}

/* Relative keys: over the whole set as the reference does, or over the chunks of training. */
static void relative_anchors(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_layout dof, pos;
    enum { CHUNK = 5 };
    vla_dataset *set = rotations("{\"p_relative\": 3, \"rotation\": 3, \"gripper\": 1}", "{\"p\": 3, \"r\": 3, \"g\": 2}", &dof, &pos);
    if (!set) {
        skip();
        return;
    }
    const float *actions, *states;
    int64_t dim, state_dim, rows = vla_dataset_info_get(set)->rows;
    assert_ok(vla_dataset_numbers(set, "action", &actions, &dim, &err), err);
    assert_ok(vla_dataset_numbers(set, "observation.state", &states, &state_dim, &err), err);
    for (int within = 0; within < 2; within++) {
        const vlai_norm_request request = {.state_key = "observation.state", .action_key = "action", .state_layout = &pos,
                                           .action_layout = &dof, .chunk = CHUNK, .within_episodes = within};
        json_t *stats;
        assert_ok(vlai_norm_stats(set, &request, &stats, &err), err);
        double sum = 0, count = 0;
        for (int64_t a = 0; a < (within ? rows : rows - CHUNK); a++)
            for (int64_t o = 0; o < CHUNK; o++) {
                const vla_episode *e = vla_dataset_episode(set, vla_dataset_episode_of(set, a));
                int64_t last = e->first_row + e->length - 1, row = within && a + o > last ? last : a + o;
                sum += (double)(actions[row * dim + 1] - states[a * state_dim + 1]);
                count++;
            }
        assert_float_equal(number(stats, "action", "mean", 1), sum / count, 1e-12);
        json_decref(stats);
    }
    vlai_layout_fini(&dof);
    vlai_layout_fini(&pos);
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
        cmocka_unit_test(six),
        cmocka_unit_test(relative_anchors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
