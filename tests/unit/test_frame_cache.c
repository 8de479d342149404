/* The cache of resized frames: what goes in comes out, from many threads, after reopening, and never after damage. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "base/pool.h"
#include "data/frame_cache.h"

#include <sys/stat.h>
#include <unistd.h>

static char dir[256];
static const int64_t sizes[2] = {5000, 1200};

static void fill(uint8_t *picture, int64_t row, int64_t camera)
{
    for (int64_t i = 0; i < sizes[camera]; i++)
        picture[i] = (uint8_t)(row * 31 + camera * 7 + i);
}

static vlai_frame_cache_options options(int64_t rows, uint64_t limit)
{
    return (vlai_frame_cache_options){
        .dir = dir, .digest = "d1", .transform = "fit", .rows = rows, .sizes = sizes, .cameras = 2, .limit = limit};
}

static void expect(vlai_frame_cache *cache, int64_t row, int64_t camera)
{
    uint8_t want[5000];
    const uint8_t *got = vlai_frame_cache_get(cache, row, camera);
    fill(want, row, camera);
    assert_non_null(got);
    assert_memory_equal(got, want, (size_t)sizes[camera]);
}

static void use_row(void *context, int64_t tile, int thread)
{
    (void)thread;
    vlai_frame_cache *cache = context;
    int64_t row = tile / 2 % 200, camera = tile % 2; /* every picture is asked for by several tiles */
    uint8_t picture[5000];
    fill(picture, row, camera);
    const uint8_t *got = vlai_frame_cache_get(cache, row, camera);
    if (!got)
        vlai_frame_cache_put(cache, row, camera, picture);
    else if (memcmp(got, picture, (size_t)sizes[camera]))
        abort();
}

static void threads_and_reopening(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_frame_cache_options o = options(200, 1 << 30);
    vlai_frame_cache *cache;
    vlai_pool *pool;
    assert_ok(vlai_frame_cache_open(&o, &cache, &err), err);
    assert_ok(vlai_pool_create(4, &pool, &err), err);
    assert_null(vlai_frame_cache_get(cache, 0, 0));
    vlai_pool_run(pool, 2000, use_row, cache);
    vlai_pool_destroy(pool);
    assert_int_equal(vlai_frame_cache_stats_get(cache).stored, 400);
    vlai_frame_cache_close(cache);
    assert_ok(vlai_frame_cache_open(&o, &cache, &err), err);
    for (int64_t row = 0; row < 200; row++)
        for (int64_t camera = 0; camera < 2; camera++)
            expect(cache, row, camera);
    assert_int_equal(vlai_frame_cache_stats_get(cache).stored, 0);
    vlai_frame_cache_close(cache);
    o.transform = "fit differently";
    assert_ok(vlai_frame_cache_open(&o, &cache, &err), err);
    assert_null(vlai_frame_cache_get(cache, 0, 0));
    vlai_frame_cache_close(cache);
}

static void bound(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_frame_cache_options o = options(1000, 100000);
    vlai_frame_cache *cache;
    o.digest = "d2";
    assert_ok(vlai_frame_cache_open(&o, &cache, &err), err);
    int64_t fit = vlai_frame_cache_stats_get(cache).rows;
    assert_int_equal(fit, (100000 - 4096) / (6200 + 16));
    uint8_t picture[5000];
    for (int64_t row = 0; row < 1000; row++) {
        fill(picture, row, 0);
        vlai_frame_cache_put(cache, row, 0, picture);
    }
    expect(cache, fit - 1, 0);
    assert_null(vlai_frame_cache_get(cache, fit, 0));
    assert_int_equal(vlai_frame_cache_stats_get(cache).stored, fit);
    vlai_frame_cache_close(cache);
    o.limit = 5000;
    assert_fails(vlai_frame_cache_open(&o, &cache, &err), VLA_E_INVALID, err, "frame_cache_gb");
}

/* A run with another limit begins another file; the run that has the first one open keeps it whole. Equal ones share theirs. */
static void other_limit(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_frame_cache_options large = options(100, 1 << 30), small = options(100, 20000);
    vlai_frame_cache *first, *second, *third;
    uint8_t picture[5000];
    large.digest = small.digest = "d4";
    assert_ok(vlai_frame_cache_open(&large, &first, &err), err);
    fill(picture, 99, 0);
    vlai_frame_cache_put(first, 99, 0, picture);
    assert_ok(vlai_frame_cache_open(&small, &second, &err), err);
    expect(first, 99, 0);
    assert_ok(vlai_frame_cache_open(&small, &third, &err), err);
    fill(picture, 1, 1);
    vlai_frame_cache_put(second, 1, 1, picture);
    expect(third, 1, 1);
    vlai_frame_cache_close(first);
    vlai_frame_cache_close(second);
    vlai_frame_cache_close(third);
}

/* Bytes bent on the disk, and a file cut short, also while it is in use, are misses. */
static void damage(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_frame_cache_options o = options(10, 1 << 20);
    vlai_frame_cache *cache;
    o.digest = "d3";
    assert_ok(vlai_frame_cache_open(&o, &cache, &err), err);
    uint8_t picture[5000];
    for (int64_t row = 0; row < 10; row++) {
        fill(picture, row, 1);
        vlai_frame_cache_put(cache, row, 1, picture);
    }
    vlai_frame_cache_close(cache);
    char **names, path[4096] = "";
    size_t count;
    uint64_t newest = 0;
    assert_ok(vlai_list_dir(dir, &names, &count, &err), err);
    for (size_t i = 0; i < count; i++) { /* the file of this test is the one of its size */
        char *data, full[4096];
        size_t size;
        assert_true(vlai_path_join(full, sizeof full, dir, names[i]));
        assert_ok(vlai_read_file(full, 0, &data, &size, &err), err);
        if (size == 4096 + 10 * 16 + 10 * 6200)
            snprintf(path, sizeof path, "%s", full), newest = size;
        vlai_free(data);
    }
    vlai_names_free(names, count);
    assert_true(newest > 0);
    FILE *f = fopen(path, "r+b");
    fseek(f, 4096 + 10 * 16 + 3 * 6200 + 5000 + 17, SEEK_SET);
    fputc(0xee, f);
    fclose(f);
    assert_ok(vlai_frame_cache_open(&o, &cache, &err), err);
    expect(cache, 2, 1);
    assert_null(vlai_frame_cache_get(cache, 3, 1));
    fill(picture, 3, 1);
    vlai_frame_cache_put(cache, 3, 1, picture);
    expect(cache, 3, 1);
    /* Cut while it is in use: nothing comes from it or goes into it any more, so that gaps never pass for pictures. */
    assert_int_equal(truncate(path, 9000), 0);
    for (int64_t row = 0; row < 10; row++) {
        assert_null(vlai_frame_cache_get(cache, row, 1));
        vlai_frame_cache_put(cache, row, 1, picture);
        assert_null(vlai_frame_cache_get(cache, row, 1));
    }
    assert_true(vlai_frame_cache_stats_get(cache).full);
    vlai_frame_cache_close(cache);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 9000);
    assert_ok(vlai_frame_cache_open(&o, &cache, &err), err);
    assert_null(vlai_frame_cache_get(cache, 2, 1));
    vlai_frame_cache_close(cache);
}

static void full_disk(void **state)
{
    (void)state;
    uint8_t picture[5000];
    for (uint64_t n = 1; n < 8; n++) {
        vla_error err = VLA_ERROR_INIT;
        vlai_frame_cache_options o = options(10, 1 << 20);
        vlai_frame_cache *cache = NULL;
        char digest[16];
        snprintf(digest, sizeof digest, "full%d", (int)n);
        o.digest = digest;
        vlai_io_fail_nth(n);
        vla_status status = vlai_frame_cache_open(&o, &cache, &err);
        if (n == 1) { /* the head */
            assert_int_equal(status, VLA_E_IO);
            continue;
        }
        assert_ok(status, err);
        for (int64_t row = 0; row < 4; row++) {
            fill(picture, row, 0);
            vlai_frame_cache_put(cache, row, 0, picture);
        }
        assert_true(vlai_frame_cache_stats_get(cache).full);
        int64_t stored = vlai_frame_cache_stats_get(cache).stored;
        assert_int_equal(stored, ((int64_t)n - 2) / 2); /* two writes a picture after the head */
        for (int64_t row = 0; row < stored; row++)
            expect(cache, row, 0);
        assert_null(vlai_frame_cache_get(cache, stored, 0));
        vlai_frame_cache_close(cache);
    }
    vlai_io_fail_nth(0);
}

static int remove_dir(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    return vlai_remove_tree(dir, &err) != VLA_OK;
}

int main(void)
{
    snprintf(dir, sizeof dir, "/tmp/vla-test-frame-cache-%d", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_and_reopening),
        cmocka_unit_test(bound),
        cmocka_unit_test(other_limit),
        cmocka_unit_test(damage),
        cmocka_unit_test(full_disk),
    };
    return cmocka_run_group_tests(tests, NULL, remove_dir);
}
