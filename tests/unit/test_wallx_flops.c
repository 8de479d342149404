/* Model FLOPs against the table of the full model worked out by hand: two 18x18 pictures, 98 text and 10 action tokens. */
#include "test.h"

#include "model/wallx_flops.h"

#include <math.h>

static vlai_wallx_config full;

static int load(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_config *train;
    assert_ok(vlai_config_load(VLA_TEST_ROOT "/configs/libero.yml", NULL, 0, &train, &err), err);
    assert_ok(vlai_wallx_config_load(VLA_TEST_ROOT "/configs/wall-oss-0.5", &full, &err), err);
    assert_ok(vlai_wallx_config_update(&full, train, false, &err), err);
    vlai_config_destroy(train);
    return 0;
}

/* To the precision that the table is printed with. */
static void check(double got, double want_giga, double step_giga)
{
    if (!(fabs(got * 1e-9 - want_giga) <= 0.5001 * step_giga))
        fail_msg("got %.4f GFLOP, wanted %.4f", got * 1e-9, want_giga);
}

static void test_two_cameras(void **state)
{
    (void)state;
    vlai_wallx_flops f;
    static const int32_t grid[] = {1, 18, 18, 1, 18, 18};
    vlai_wallx_flops_of(&full, 98, 10, 0, 2, grid, &f);
    check(f.vision_linear, 816.4 + 2.0 + 11.9, 0.15);
    check(f.vision_attention, 4.3 + 5.0, 0.1);
    check(f.language_linear, 1442.8 + 7.9, 0.1);
    check(f.language_attention, 10.8, 0.1);
    check(f.action_head, 2e-9 * 3225600 * 10, 1e-9);
    check(f.forward, 2301.1, 0.1);
    check(f.training, 6903.3, 0.3);
    vlai_wallx_flops_of(&full, 141, 10, 0, 2, grid, &f); /* S = 313 */
    check(f.forward, 2543.4, 0.1);
    check(f.training, 7630, 10);
    vlai_wallx_flops_of(&full, 98, 10, 7, 2, grid, &f);
    check(f.lm_head, 7 * 0.622, 7 * 0.001);
}

/* Windows of a grid that they do not divide: 10 x 6 patches are 5 x 3 units, cut in 4+1 and 3. */
static void test_windows(void **state)
{
    (void)state;
    vlai_wallx_flops one, two;
    vlai_wallx_flops_of(&full, 0, 0, 0, 1, (int32_t[]){1, 10, 6}, &one);
    double windows = 48.0 * 48 + 12.0 * 12, all = 60.0 * 60;
    assert_true(fabs(one.vision_attention - 4 * 1280 * (4 * all + 28 * windows)) < 1);
    assert_true(one.action_head == 0);
    vlai_wallx_flops_of(&full, 0, 0, 0, 1, (int32_t[]){2, 10, 6}, &two);
    assert_true(fabs(two.vision_attention - 2 * one.vision_attention) < 1);
    assert_true(fabs(two.vision_linear - 2 * one.vision_linear) < 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_two_cameras), cmocka_unit_test(test_windows)};
    return cmocka_run_group_tests(tests, load, NULL);
}
