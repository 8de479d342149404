#include "test.h"

#include "data/flow_time.h"
#include "data/normalise.h"
#include "data/order.h"
#include "data/rotation.h"
#include "optim/schedule.h"

#include <math.h>

static void close_to(double got, double want, double bound)
{
    if (!(fabs(got - want) <= bound))
        fail_msg("got %.17g, wanted %.17g within %g", got, want, bound);
}

static void mersenne_twister(void **state)
{
    (void)state;
    static const uint32_t of42[] = {1608637542u, 3421126067u, 4083286876u, 787846414u, 3143890026u};
    static const uint32_t of10222[] = {2954347843u, 965723164u, 3608905322u};
    vlai_mt19937 mt;
    vlai_mt19937_seed(&mt, 42);
    for (int i = 0; i < 5; i++)
        assert_int_equal(vlai_mt19937_next(&mt), of42[i]);
    vlai_mt19937_seed(&mt, 10222);
    for (int i = 0; i < 3; i++)
        assert_int_equal(vlai_mt19937_next(&mt), of10222[i]);
}

static void permutations(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static const int64_t of42[] = {2, 6, 1, 8, 4, 5, 0, 9, 3, 7}, of10222[] = {7, 11, 4, 10, 9, 8, 6, 5, 1, 0, 3, 2};
    int64_t out[273], train;
    assert_ok(vlai_randperm(10, 42, out, &err), err);
    assert_memory_equal(out, of42, sizeof of42);
    assert_ok(vlai_randperm(12, 10222, out, &err), err);
    assert_memory_equal(out, of10222, sizeof of10222);
    assert_ok(vlai_randperm(12, 10222 + (1ull << 32), out, &err), err); /* seeds count modulo 2^32 */
    assert_memory_equal(out, of10222, sizeof of10222);
    assert_fails(vlai_randperm(214748364, 1, NULL, &err), VLA_E_UNSUPPORTED, err, "214748364 samples");

    assert_ok(vlai_order_split(40, 10222, out, &train, &err), err);
    assert_int_equal(train, 38);
    static const int64_t first[] = {3, 17, 28, 30, 37, 29};
    assert_memory_equal(out, first, sizeof first);
    assert_int_equal(out[38], 27);
    assert_int_equal(out[39], 14);
    assert_ok(vlai_order_split(273, 10222, out, &train, &err), err);
    assert_int_equal(train, 260);
    assert_ok(vlai_order_split(19, 1, out, &train, &err), err);
    assert_int_equal(train, 19); /* below 20 frames nothing validates */
}

static void rank_stripes(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_order *order;
    assert_ok(vlai_order_create(NULL, 11, 10222, true, &order, &err), err);
    static const int64_t want[2][2][5] = {{{7, 4, 10, 0, 6}, {5, 8, 9, 2, 3}}, {{10, 7, 6, 5, 1}, {9, 4, 3, 8, 0}}};
    assert_int_equal(vlai_order_per_rank(11, 2, true), 5);
    for (int64_t i = 4; i >= 0; i--) /* any sequence of questions gives the same answers */
        for (int64_t epoch = 0; epoch < 2; epoch++)
            for (int64_t rank = 0; rank < 2; rank++) {
                int64_t row;
                assert_ok(vlai_order_at(order, epoch, vlai_order_place(i, rank, 2), &row, &err), err);
                assert_int_equal(row, want[epoch][rank][i]);
            }
    vlai_order_destroy(order);
    assert_int_equal(vlai_order_per_rank(10, 4, false), 3); /* validation is padded by repetition */
    static const int64_t rank3[] = {3, 7, 1};
    for (int64_t i = 0; i < 3; i++)
        assert_int_equal(vlai_order_place(i, 3, 4) % 10, rank3[i]);
    assert_int_equal(vlai_order_per_rank(3, 8, true), 0);
    int64_t rows[3] = {30, 10, 20}, row;
    assert_ok(vlai_order_create(rows, 3, 1, false, &order, &err), err);
    assert_ok(vlai_order_at(order, 5, 4, &row, &err), err);
    assert_int_equal(row, 10);
    assert_fails(vlai_order_at(order, -1, 0, &row, &err), VLA_E_INVALID, err, "epoch -1");
    vlai_order_destroy(order);
}

static void rotations(void **state)
{
    (void)state;
    static const double rpy[3] = {0.1, -0.2, 0.3}, target[3] = {0.4, 0.5, -0.6};
    static const double want[9] = {0.936293364, -0.312991826, -0.159345079, 0.289629478, 0.944702486,
                                   -0.153791998, 0.198669331, 0.097843395,  0.975170327};
    double m[9], t[9], r[9], back[3];
    vlai_rotation_from_euler(rpy, m);
    for (int i = 0; i < 9; i++)
        close_to(m[i], want[i], 1e-9);
    vlai_rotation_from_euler(target, t);
    vlai_rotation_relative(t, m, r);
    vlai_rotation_to_euler(r, back);
    close_to(back[0], 0.081974215, 1e-9);
    close_to(back[1], 0.754118789, 1e-9);
    close_to(back[2], -0.915599096, 1e-9);
    double again[9];
    vlai_rotation_compose(r, m, again);
    for (int i = 0; i < 9; i++)
        close_to(again[i], t[i], 1e-15);
    double wild[3] = {7, 2, -4}, same[9];
    vlai_rotation_from_euler(wild, m);
    vlai_rotation_canonical(wild);
    assert_true(fabs(wild[1]) <= 1.5707963267948966);
    vlai_rotation_from_euler(wild, same);
    for (int i = 0; i < 9; i++)
        close_to(same[i], m[i], 1e-14);
}

static void layouts(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    json_t *object = json_pack("{s:i, s:i, s:i, s:i}", "pos_relative", 3, "rotation_6D_relative", 6, "gripper", 1,
                               "action_padding", 16);
    vlai_layout layout;
    assert_ok(vlai_layout_parse(object, "file", &layout, &err), err);
    assert_int_equal(layout.total, 26);
    assert_int_equal(layout.width, 10);
    assert_int_equal(layout.euler, 7);
    float raw[7] = {1, 2, 3, 0.1f, -0.2f, 0.3f, 1}, action[10], before[10];
    assert_int_equal(vlai_layout_to_six(&layout, raw, 7, action), 10);
    assert_true(action[9] == 1 && fabsf(action[3] - 0.936293364f) < 1e-6f);
    memcpy(before, action, sizeof action);
    assert_ok(vlai_layout_relative(&layout, action, 10, before, 10, &err), err);
    static const float identity[10] = {0, 0, 0, 1, 0, 0, 0, 1, 0, 1};
    for (int i = 0; i < 10; i++)
        close_to(action[i], identity[i], 1e-6);
    assert_fails(vlai_layout_relative(&layout, action, 10, before, 5, &err), VLA_E_SHAPE, err, "rotation_6D_relative");
    int64_t within;
    assert_string_equal(vlai_layout_name(&layout, 4, &within), "rotation_6D_relative");
    assert_int_equal(within, 1);
    vlai_layout_fini(&layout);
    json_object_set_new(object, "gripper", json_string("one"));
    assert_fails(vlai_layout_parse(object, "file", &layout, &err), VLA_E_INVALID, err, "'gripper'");
    json_decref(object);
}

static void normalising(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static const double q01[3] = {-1, 2, 0}, q99[3] = {3, 2, 0.5};
    vlai_norm n;
    assert_ok(vlai_norm_make(3, q01, q99, NULL, NULL, &n, &err), err);
    float in[4] = {1, 2.25f, NAN, 0.75f}, out[6], mask[6], back[6];
    vlai_normalise(&n, in, 4, 6, out, mask);
    static const float want[6] = {0, -0.5f, -1, 0.5f, 0, 0}, seen[6] = {1, 1, 0, 1, 0, 0};
    assert_memory_equal(out, want, sizeof want); /* a constant dim is scaled by 1, a missing one counts as 0 */
    assert_memory_equal(mask, seen, sizeof seen);
    vlai_model_unnormalise(&n, (float[6]){0, 0.5f, 1, 0.2f, 0.2f, 0.2f}, 6, true, back);
    static const float physical[6] = {1, 2, 0.5f, 0, 0, 0};
    assert_memory_equal(back, physical, sizeof physical);
    vlai_model_unnormalise(&n, (float[6]){0, 0, 0, 0, 0, 0}, 6, false, back);
    assert_true(back[5] == 0.5f);
    vlai_model_normalise(&n, (float[6]){1, 2, 9, 0, 0, 0}, 3, false, back);
    assert_true(back[0] == 0 && isnan(back[1]) && back[2] == 1);
    assert_string_equal(vlai_norm_oddity(&n, 1), "constant");
    assert_null(vlai_norm_oddity(&n, 0));
    vlai_norm_fini(&n);
    json_t *stats = json_pack("{s:{s:[f,f], s:[f]}}", "action", "q01", 0.0, 1.0, "q99", 1.0);
    assert_fails(vlai_norm_parse(stats, "action", "file", &n, &err), VLA_E_SHAPE, err, "'q99'");
    assert_fails(vlai_norm_parse(stats, "actions", "file", &n, &err), VLA_E_NOT_FOUND, err, "'action'");
    json_decref(stats);
}

static void learning_rates(void **state)
{
    (void)state;
    static const struct {
        int64_t warmup, steps, t;
        double want;
    } rows[] = {
        {15, 30, 0, 3.125e-6},  {15, 30, 1, 6.25e-6},          {15, 30, 14, 4.6875e-5},      {15, 30, 15, 5e-5},
        {15, 30, 30, 1e-6},     {15, 30, 16, 4.946461622e-5},  {15, 30, 22, 2.806094735e-5}, {15, 30, 29, 1.535383782e-6},
        {1000, 200000, 500, 2.502497502e-5}, {1000, 200000, 100500, 2.55e-5}, {1000, 200000, 200001, 1e-6},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        vlai_schedule s = {.peak = 5e-5, .min = 1e-6, .warmup = rows[i].warmup, .steps = rows[i].steps};
        close_to(vlai_schedule_rate(&s, rows[i].t, 5e-5), rows[i].want, 1e-9 * rows[i].want);
        close_to(vlai_schedule_rate(&s, rows[i].t, 5e-6), rows[i].want / 10, 1e-9 * rows[i].want);
    }
    vla_error err = VLA_ERROR_INIT;
    vlai_schedule none = {.peak = 1};
    assert_fails(vlai_schedule_check(&none, &err), VLA_E_INVALID, err, "num_training_steps must be > 0");
    none.kind = VLAI_SCHEDULE_CONSTANT;
    assert_ok(vlai_schedule_check(&none, &err), err);
    close_to(vlai_schedule_rate(&none, 1000, 3), 3, 0);
}

/* The mean of Beta(a, b) is a / (a + b), its variance a b / ((a + b)^2 (a + b + 1)); bounds are 5 standard errors of the
 * mean of N draws, and of the variance taken as normal. */
static void flow_times(void **state)
{
    (void)state;
    static const double shapes[][2] = {{1.5, 1}, {1.5, 1.5}, {2, 1.5}, {0.5, 0.7}, {1, 3}};
    enum { N = 20000 };
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        vlai_flow_time rule = VLAI_FLOW_TIME_DEFAULT;
        rule.alpha = shapes[k][0];
        rule.beta = shapes[k][1];
        double sum = 0, square = 0;
        for (int i = 0; i < N; i++) {
            vlai_rng_key key = {.seed = 9, .position = (uint64_t)i};
            double u = vlai_flow_time_draw(&rule, &key);
            assert_true(u >= 0 && u <= 1);
            assert_true(u == (double)vlai_flow_time_draw(&rule, &key));
            sum += u;
            square += u * u;
        }
        double a = rule.alpha, b = rule.beta, mean = sum / N, variance = square / N - mean * mean;
        double want = a * b / ((a + b) * (a + b) * (a + b + 1));
        close_to(mean, a / (a + b), 5 * sqrt(want / N));
        close_to(variance, want, 5 * want * sqrt(2.0 / N));
    }
    vlai_flow_time rule = VLAI_FLOW_TIME_DEFAULT;
    assert_true(vlai_flow_time_map(&rule, 0) == 0.999f && vlai_flow_time_map(&rule, 1) == 0);
    rule = (vlai_flow_time){1.5, 1.5, 1, 3};
    close_to(vlai_flow_time_map(&rule, 0.5f), 0.75, 1e-7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mersenne_twister), cmocka_unit_test(permutations), cmocka_unit_test(rank_stripes),
        cmocka_unit_test(rotations),        cmocka_unit_test(layouts),      cmocka_unit_test(normalising),
        cmocka_unit_test(learning_rates),   cmocka_unit_test(flow_times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
