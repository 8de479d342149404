/* Layouts there and back: what training makes of an action, a prediction undoes. */
#include "test.h"

#include "base/rng.h"
#include "data/rotation.h"

#include <math.h>

static vlai_layout parse(const char *json)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_layout layout;
    json_t *object = json_loads(json, 0, NULL);
    assert_ok(vlai_layout_parse(object, "layout", &layout, &err), err);
    json_decref(object);
    return layout;
}

/* Angles of a rotation are unique for pitch inside (-pi/2, pi/2): roll and yaw in (-pi, pi). */
static void random_rows(uint64_t round, float *action, float *state, int64_t n)
{
    const vlai_rng_key key = {.seed = 3, .stream = VLAI_RNG_SYNTH, .position = round};
    for (int64_t i = 0; i < n; i++) {
        float span = i % 3 == 1 ? 1.5f : 3.1f; /* columns 3.. are roll, pitch, yaw */
        action[i] = span * (2 * vlai_rng_uniform(&key, (uint32_t)i) - 1);
        state[i] = span * (2 * vlai_rng_uniform(&key, (uint32_t)(n + i)) - 1);
    }
}

static void there_and_back(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "{\"p\": 3, \"rotation\": 3, \"g\": 1, \"action_padding\": 4}",
        "{\"p_relative\": 3, \"rotation_relative\": 3, \"g\": 1}",
        "{\"p\": 3, \"rotation_6D\": 6, \"g\": 1}",
        "{\"p_relative\": 3, \"rotation_6D_relative\": 6, \"g\": 1, \"action_padding\": 2}",
    };
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        vlai_layout layout = parse(layouts[l]);
        for (uint64_t round = 0; round < 500; round++) {
            vla_error err = VLA_ERROR_INIT;
            float action[7], where[7], wide[16], wide_state[16], back[16];
            random_rows(round, action, where, 7);
            int64_t n = vlai_layout_to_six(&layout, action, 7, wide), m = vlai_layout_to_six(&layout, where, 7, wide_state);
            assert_int_equal(n, layout.width);
            assert_ok(vlai_layout_relative(&layout, wide, n, wide_state, m, &err), err);
            assert_ok(vlai_layout_absolute(&layout, wide, n, wide_state, m, &err), err);
            assert_int_equal(vlai_layout_from_six(&layout, wide, n, back), 7);
            /* float32 rows of a matrix, each 6e-8 off; the angle between pitches of 1.5 and pi/2 amplifies by 1/cos = 14,
             * twice on the way. */
            for (int i = 0; i < 7; i++)
                assert_float_equal(back[i], action[i], 14 * 14 * 6e-7);
        }
        vlai_layout_fini(&layout);
    }
}

/* One case by hand: a quarter turn about z on top of a quarter turn is half a turn. */
static void by_hand(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const float quarter = 1.5707963f;
    vlai_layout layout = parse("{\"p_relative\": 1, \"rotation_relative\": 3}");
    float action[4] = {0.25f, 0, 0, quarter};
    const float where[4] = {1, 0, 0, quarter - 0.1f};
    assert_ok(vlai_layout_absolute(&layout, action, 4, where, 4, &err), err);
    assert_float_equal(action[0], 1.25f, 0);
    assert_float_equal(action[3], 2 * quarter - 0.1f, 1e-6);
    assert_fails(vlai_layout_absolute(&layout, action, 3, where, 4, &err), VLA_E_SHAPE, err, "'rotation_relative' takes columns 1 to 3");
    vlai_layout_fini(&layout);
    /* Two rows that are no rotation: the nearest by Gram-Schmidt, here the identity. */
    layout = parse("{\"rotation_6D\": 6}");
    const float skew[6] = {2, 0, 0, 5, 3, 0};
    float rpy[6];
    assert_int_equal(vlai_layout_from_six(&layout, skew, 6, rpy), 3);
    for (int i = 0; i < 3; i++)
        assert_float_equal(rpy[i], 0, 1e-7);
    vlai_layout_fini(&layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(there_and_back), cmocka_unit_test(by_hand)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
