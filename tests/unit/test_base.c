#include "test.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/pool.h"
#include "base/rng.h"
#include "base/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Known answers of Random123's kat_vectors for philox4x32-10. */
static void philox_known_answers(void **state)
{
    (void)state;
    uint32_t zero[4] = {0}, key0[2] = {0}, out[4];
    vlai_philox(zero, key0, out);
    assert_int_equal(out[0], 0x6627e8d5u);
    assert_int_equal(out[1], 0xe169c58du);
    assert_int_equal(out[2], 0xbc57ac4cu);
    assert_int_equal(out[3], 0x9b00dbd8u);
    uint32_t ones[4] = {~0u, ~0u, ~0u, ~0u}, key1[2] = {~0u, ~0u};
    vlai_philox(ones, key1, out);
    assert_int_equal(out[0], 0x408f276du);
    assert_int_equal(out[1], 0x41c83b0eu);
    assert_int_equal(out[2], 0xa20bc7c6u);
    assert_int_equal(out[3], 0x6d5451fdu);
}

static void normal_moments_and_splits(void **state)
{
    (void)state;
    enum { N = 20000 };
    static float a[N], b[N];
    vlai_rng_key key = {.seed = 7, .stream = VLAI_RNG_TRAIN, .position = 3, .site = 1};
    vlai_rng_normal(&key, 0, N, a);
    vlai_rng_normal(&key, 0, 7, b);
    vlai_rng_normal(&key, 7, N - 7, b + 7);
    assert_memory_equal(a, b, sizeof a);
    double sum = 0, square = 0;
    for (int i = 0; i < N; i++) {
        sum += a[i];
        square += (double)a[i] * a[i];
    }
    assert_true(fabs(sum / N) < 4 / sqrt(N));
    assert_true(fabs(square / N - 1) < 4 * sqrt(2.0 / N));
}

static void count_tile(void *context, int64_t tile, int thread)
{
    (void)thread;
    ((int *)context)[tile]++;
}

static void pool_runs_each_tile_once(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_pool *pool;
    assert_ok(vlai_pool_create(4, &pool, &err), err);
    int seen[1000] = {0};
    for (int round = 1; round <= 50; round++) {
        vlai_pool_run(pool, 1000, count_tile, seen);
        for (int i = 0; i < 1000; i++)
            assert_int_equal(seen[i], round);
    }
    vlai_pool_destroy(pool);
}

/* The place goes before a failure's message; where there is none, nothing is touched. */
static void prefixes(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    memset(err.message, 'x', sizeof err.message);
    assert_int_equal(vlai_prefix(&err, VLA_OK, "node %d", 3), VLA_OK);
    assert_true(err.message[0] == 'x' && err.message[sizeof err.message - 1] == 'x');
    assert_int_equal(vlai_prefix(&err, vlai_fail(&err, VLA_E_SHAPE, "too wide"), "node %d", 3), VLA_E_SHAPE);
    assert_string_equal(err.message, "node 3: too wide");
    assert_int_equal(vlai_prefix(NULL, VLA_E_SHAPE, "node %d", 3), VLA_E_SHAPE);
}

/* What was written comes back; a file that is cut, longer, or another in one bit is as good as not there. */
static void cached_files(void **state)
{
    (void)state;
    char folder[] = "/tmp/vla-cached-XXXXXX", path[64];
    vla_error err;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/none/file", folder);
    vlai_cache_write(path, "abc", 3); /* there is no such folder */
    snprintf(path, sizeof path, "%s/file", folder);
    void *data;
    size_t size;
    assert_false(vlai_cache_read(path, &data, &size));
    for (size_t length = 0; length < 20; length = length ? length * 19 : 1) {
        char *whole;
        size_t bytes;
        vlai_cache_write(path, "abcdefghijklmnopqrst", length);
        assert_true(vlai_cache_read(path, &data, &size));
        assert_int_equal(size, length);
        assert_memory_equal(data, "abcdefghijklmnopqrst", length);
        vlai_free(data);
        assert_ok(vlai_read_file(path, 0, &whole, &bytes, &err), err);
        for (size_t cut = 0; cut < bytes; cut++) {
            assert_ok(vlai_write_file_atomic(path, whole, cut, &err), err);
            assert_false(vlai_cache_read(path, &data, &size));
            whole[cut] ^= 4;
            assert_ok(vlai_write_file_atomic(path, whole, bytes, &err), err);
            assert_false(vlai_cache_read(path, &data, &size));
            whole[cut] ^= 4;
        }
        char *longer = vlai_alloc(bytes + 1);
        memcpy(longer, whole, bytes);
        longer[bytes] = 0;
        assert_ok(vlai_write_file_atomic(path, longer, bytes + 1, &err), err);
        assert_false(vlai_cache_read(path, &data, &size));
        vlai_free(longer);
        vlai_free(whole);
    }
    assert_ok(vlai_remove_tree(folder, &err), err);
}

static void nearest_word(void **state)
{
    (void)state;
    const char *known[] = {"learning_rate", "weight_decay", "seed"};
    assert_string_equal(vlai_nearest("learnign_rate", known, 3), "learning_rate");
    assert_null(vlai_nearest("zzzzzzzz", known, 3));
}

/* Bytes that are no UTF-8 become U+FFFD each; the rest stays. */
static void json_of_any_text(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"", ""},
        {"m\xc3\xbcsli", "m\xc3\xbcsli"},
        {"a\xe9" "b", "a\xef\xbf\xbd" "b"},
        {"cut \xe4\xb8", "cut \xef\xbf\xbd\xef\xbf\xbd"},
        {"\xff", "\xef\xbf\xbd"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        json_t *value = vlai_json_text(rows[i][0]);
        assert_non_null(value);
        assert_string_equal(json_string_value(value), rows[i][1]);
        json_decref(value);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(normal_moments_and_splits),
        cmocka_unit_test(pool_runs_each_tile_once),
        cmocka_unit_test(nearest_word),
        cmocka_unit_test(cached_files),
        cmocka_unit_test(prefixes),
        cmocka_unit_test(json_of_any_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
