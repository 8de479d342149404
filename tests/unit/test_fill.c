/* Filling a store in parallel: the bits of vla_store_set_float whatever the threads, the home and the padding; raw values as they
 * are; the first tile's error. */
#include "lazy_device.h"
#include "test.h"

#include "base/rng.h"
#include "ckpt/ckpt.h"
#include "ckpt/fill.h"

#include <math.h>

enum { LARGE_ROWS = 1700, LARGE_COLUMNS = 1500, SMALL = 37 };

static vla_store *make_store(const char *device, vla_executor **ex, vla_numerics numerics, bool padded)
{
    vla_store *s;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vla_executor_create_on(device, 1, ex, &err), err);
    assert_ok(vla_store_create(&s, &err), err);
    assert_ok(vla_store_add(s, "small", VLA_PRECISE, 1, (int64_t[]){SMALL}, 0, &err), err);
    assert_ok(vla_store_add(s, "empty", VLA_COMPUTE, 1, (int64_t[]){0}, 0, &err), err);
    assert_ok(vla_store_add(s, "large", VLA_COMPUTE, 2, (int64_t[]){LARGE_ROWS, LARGE_COLUMNS}, 0, &err), err);
    if (padded)
        assert_ok(vla_store_pad(s, "large", LARGE_COLUMNS, LARGE_COLUMNS + 36, &err), err);
    assert_ok(vla_store_allocate_on(s, *ex, numerics, VLA_STORE_TRAIN, 0, &err), err);
    return s;
}

static float value(size_t index, int64_t element)
{
    return (float)sin((double)element * 0.37 + (double)index) * 3.0f;
}

static vla_status draw(void *user, const vlai_fill_tile *t, float *values, const void **raw, vla_error *err)
{
    (void)raw;
    if (user && t->first > 0)
        return vlai_fail(err, VLA_E_CORRUPT, "tile at %lld", (long long)t->first);
    for (int64_t i = 0; i < t->n; i++)
        values[i] = value(t->index, t->first + i);
    return VLA_OK;
}

/* Moments: the element's number as stored bits. */
static vla_status number(void *user, const vlai_fill_tile *t, float *values, const void **raw, vla_error *err)
{
    (void)user;
    (void)err;
    if (t->index == 0) {
        *raw = vlai_fill_none;
        return VLA_OK;
    }
    uint32_t *bits = (uint32_t *)values;
    for (int64_t i = 0; i < t->n; i++)
        bits[i] = (uint32_t)(t->first + i) | 0x7FC00000u; /* NaNs of all kinds stay what they are */
    *raw = bits;
    return VLA_OK;
}

static void the_same_bits(void **state)
{
    (void)state;
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR, VLA_FP64};
    float *wanted = malloc(sizeof(float) * LARGE_ROWS * LARGE_COLUMNS), *got = malloc(sizeof(float) * LARGE_ROWS * LARGE_COLUMNS);
    for (int variant = 0; variant < 16; variant++) {
        vla_error err = VLA_ERROR_INIT;
        vla_executor *ex, *plain;
        vlai_pool *pool = NULL;
        vla_numerics numerics = modes[variant % 4];
        vla_store *s = make_store(variant & 4 ? "lazy" : "cpu", &ex, numerics, variant & 8), *simple = make_store("cpu", &plain, numerics, false);
        assert_ok(vlai_pool_create(1 + variant % 3, &pool, &err), err);
        assert_ok(vlai_store_fill(s, VLA_STORE_WEIGHT, pool, draw, NULL, &err), err);
        for (size_t i = 0; i < 3; i++) {
            int64_t n = vla_store_tensor(s, VLA_STORE_WEIGHT, i).elements;
            for (int64_t k = 0; k < n; k++)
                got[k] = value(i, k);
            vla_store_set_float(simple, i, 0, n, got);
            vla_store_get_float(simple, i, 0, n, wanted);
            vla_store_get_float(s, i, 0, n, got);
            if (n)
                assert_memory_equal(got, wanted, (size_t)n * sizeof *got);
        }
        if (numerics == VLA_FP32 || numerics == VLA_BF16_MASTER) {
            assert_ok(vlai_store_fill(s, VLA_STORE_M, pool, number, NULL, &err), err);
            uint32_t *bits = (uint32_t *)got;
            assert_ok(vla_store_read(s, VLA_STORE_M, 2, 0, LARGE_ROWS * LARGE_COLUMNS, bits, &err), err);
            for (int64_t k = 0; k < LARGE_ROWS * LARGE_COLUMNS; k++)
                assert_int_equal(bits[k], (uint32_t)k | 0x7FC00000u);
            assert_ok(vla_store_read(s, VLA_STORE_M, 0, 0, SMALL, bits, &err), err);
            assert_int_equal(bits[3], 0); /* left alone */
        }
        /* a copy of everything, as a snapshot takes it */
        vlai_fetch *fetch;
        vla_executor *other_ex;
        vla_store *other = make_store(variant & 4 ? "lazy" : "cpu", &other_ex, modes[(variant + 1) % 4], variant & 8);
        assert_ok(vlai_fetch_create(other, 3, &fetch, &err), err);
        vla_store_destroy(other); /* as a run that saves goes on with another store */
        vla_executor_destroy(other_ex);
        char *copy = malloc(s->bytes[VLA_STORE_WEIGHT]);
        assert_ok(vlai_fetch_kind(fetch, s, VLA_STORE_WEIGHT, copy, &err), err);
        const char *home = s->device[VLA_STORE_WEIGHT] ? s->device[VLA_STORE_WEIGHT] : s->arena[VLA_STORE_WEIGHT];
        assert_memory_equal(copy, home, s->bytes[VLA_STORE_WEIGHT]);
        free(copy);
        vlai_fetch_destroy(fetch);
        assert_fails(vlai_store_fill(s, VLA_STORE_WEIGHT, pool, draw, s, &err), VLA_E_CORRUPT, err, "tile at 1048576");
        vlai_pool_destroy(pool);
        vla_store_destroy(s);
        vla_store_destroy(simple);
        vla_executor_destroy(ex);
        vla_executor_destroy(plain);
    }
    free(wanted);
    free(got);
    assert_int_equal(lazy_violations, 0);
}

/* What is written from a device is read into host memory and back, padded or not. */
static void files_do_not_know_the_home(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_executor *ex[3];
    vla_store *s[3] = {make_store("cpu", &ex[0], VLA_BF16_MASTER, false), make_store("lazy", &ex[1], VLA_BF16_MASTER, true),
                       make_store("cpu", &ex[2], VLA_BF16_MASTER, true)};
    char path[] = "/tmp/vla-fill-XXXXXX", file[64];
    assert_non_null(mkdtemp(path));
    snprintf(file, sizeof file, "%s/w.safetensors", path);
    assert_ok(vlai_store_fill(s[0], VLA_STORE_WEIGHT, NULL, draw, NULL, &err), err);
    float *wanted = malloc(sizeof(float) * LARGE_ROWS * LARGE_COLUMNS), *got = malloc(sizeof(float) * LARGE_ROWS * LARGE_COLUMNS);
    for (int i = 0; i < 3; i++) {
        assert_ok(vla_store_save(s[i], file, &err), err);
        assert_ok(vla_store_load(s[(i + 1) % 3], file, &err), err);
    }
    /* low bits of masters are not in the file of weights: after the round all have the stored weights alone */
    vla_store_get_float(s[0], 2, 0, LARGE_ROWS * LARGE_COLUMNS, wanted);
    for (int i = 1; i < 3; i++) {
        vla_store_get_float(s[i], 2, 0, LARGE_ROWS * LARGE_COLUMNS, got);
        assert_memory_equal(got, wanted, sizeof(float) * LARGE_ROWS * LARGE_COLUMNS);
    }
    assert_true(fabsf(wanted[5] - value(2, 5)) < 0.02f);
    remove(file);
    remove(path);
    free(wanted);
    free(got);
    for (int i = 0; i < 3; i++) {
        vla_store_destroy(s[i]);
        vla_executor_destroy(ex[i]);
    }
}

static void names_of_devices(void **state)
{
    (void)state;
    static const struct { const char *name; int gpu; } names[] = {
        {"cpu", -1}, {"cuda", 0}, {"cuda:0", 0}, {"cuda:7", 7}, {"cuda:12", 12}, {"", -2}, {"CPU", -2}, {"cpu:0", -2}, {"cuda:", -2}, {"cuda:x", -2},
        {"cuda:1x", -2}, {"cuda:-1", -2}, {"cuda: 1", -2}, {"cuda1", -2}, {"cudas", -2}, {"cuda:12345", -2}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        assert_int_equal(vlai_gpu_of(names[i].name), names[i].gpu);
        vla_executor *ex;
        vla_error err = VLA_ERROR_INIT;
        if (names[i].gpu == -2)
            assert_int_equal(vla_executor_create_on(names[i].name, 1, &ex, &err), VLA_E_INVALID);
    }
}

static int install(void **state)
{
    (void)state;
    lazy_install();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_same_bits), cmocka_unit_test(files_do_not_know_the_home), cmocka_unit_test(names_of_devices)};
    return cmocka_run_group_tests(tests, install, NULL);
}
