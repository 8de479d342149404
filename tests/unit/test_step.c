/* One plan with the update in it (vla_graph_step) gives the bits of a backward plan and an update plan. */
#include "test.h"

#include "pass/pass.h"
#include "vla/run.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 6, IN = 8, MID = 16, OUT = 4, STEPS = 3 };

static const vla_adamw_options adamw = {sizeof(vla_adamw_options), 0.9, 0.95, 1e-8, 0.1, 0.5, 1};

static float value(int64_t i)
{
    return (float)((i * 37 % 101) - 50) / 64.0f;
}

static vla_store *make_store(vla_numerics numerics, vla_store_use use)
{
    vla_store *s;
    vla_error err;
    assert_ok(vla_store_create(&s, &err), err);
    assert_ok(vla_store_add(s, "a", VLA_COMPUTE, 2, (int64_t[]){MID, IN}, 0, &err), err);
    assert_ok(vla_store_add(s, "scale", VLA_PRECISE, 1, (int64_t[]){MID}, 0, &err), err);
    assert_ok(vla_store_add(s, "b", VLA_COMPUTE, 2, (int64_t[]){OUT, MID}, 0, &err), err);
    assert_ok(vla_store_allocate(s, numerics, use, &err), err);
    for (size_t i = 0; i < vla_store_count(s); i++)
        for (int64_t k = 0; k < vla_store_tensor(s, VLA_STORE_WEIGHT, i).elements; k++) {
            float x = value(k + 7 * (int64_t)i);
            vla_store_set_float(s, i, k, 1, &x);
        }
    return s;
}

static vla_graph *make_graph(void)
{
    vla_graph *g;
    vla_error err;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){ROWS, IN});
    vla_value target = vla_graph_input(g, "target", VLA_PRECISE, 2, (int64_t[]){ROWS, OUT});
    vla_value mask = vla_fill(g, VLA_PRECISE, 2, (int64_t[]){ROWS, OUT}, 1);
    vla_value h = vla_linear(g, x, vla_graph_param(g, "a", VLA_COMPUTE, 2, (int64_t[]){MID, IN}), VLA_NONE);
    h = vla_gelu(g, vla_rms_norm(g, h, vla_graph_param(g, "scale", VLA_PRECISE, 1, (int64_t[]){MID}), 1e-6));
    vla_value y = vla_linear(g, h, vla_graph_param(g, "b", VLA_COMPUTE, 2, (int64_t[]){OUT, MID}), VLA_NONE);
    vla_value loss = vla_masked_mse(g, vla_cast(g, y, VLA_PRECISE), target, mask).loss;
    vla_graph_name(g, loss, "loss");
    assert_ok(vla_graph_backward(g, loss, 1.0, &err), err);
    return g;
}

static void fill(vla_run *run, vla_numerics numerics, int step)
{
    void *x = vla_run_data(run, "x");
    float *target = vla_run_data(run, "target");
    for (int i = 0; i < ROWS * IN; i++) {
        float f = value(i + step * 11);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        if (numerics == VLA_FP32)
            ((float *)x)[i] = f;
        else
            ((uint16_t *)x)[i] = (uint16_t)(bits >> 16); /* exact: seven significant bits */
    }
    for (int i = 0; i < ROWS * OUT; i++)
        target[i] = value(3 * i + step);
}

static void set_hyper(vla_run *run, int step)
{
    double *hyper = vla_run_data(run, "hyper");
    vla_hyper_fill(&adamw, 7, step, hyper);
    hyper[VLA_HYPER_RATES] = 0.01;
    float *guard = vla_run_data(run, "guard"); /* of an update alone */
    if (guard)
        *guard = 0;
}

static void assert_same_bits(const vla_store *a, const vla_store *b, vla_store_kind kind)
{
    for (size_t i = 0; i < vla_store_count(a); i++) {
        vla_tensor x = vla_store_tensor(a, kind, i), y = vla_store_tensor(b, kind, i);
        assert_int_equal(x.dtype, y.dtype);
        if (x.data)
            assert_memory_equal(x.data, y.data, (size_t)x.elements * vla_dtype_size(x.dtype));
    }
}

static void one_plan_or_two(void **state)
{
    (void)state;
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_PLAIN, VLA_BF16_SR};
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
        vla_error err;
        vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
        options.numerics = modes[m];
        vla_store *two = make_store(modes[m], VLA_STORE_TRAIN), *one = make_store(modes[m], VLA_STORE_STEP);
        vla_gradient_status status_two[3] = {0}, status_one[3] = {0};
        vla_graph *g = make_graph(), *update, *whole = make_graph();
        vla_plan *backward_plan, *update_plan, *whole_plan;
        assert_ok(vla_graph_store_gradients(g, two, 0, status_two, &err), err);
        assert_ok(vla_plan_build(g, &options, &backward_plan, &err), err);
        assert_ok(vla_graph_adamw(two, status_two, &adamw, &update, &err), err);
        assert_ok(vla_plan_build(update, &options, &update_plan, &err), err);
        assert_ok(vla_graph_step(whole, one, status_one, &adamw, &err), err);
        assert_ok(vla_plan_build(whole, &options, &whole_plan, &err), err);
        assert_memory_equal(status_one, status_two, sizeof status_one);
        vla_executor *ex;
        vla_run *backward_run, *update_run, *whole_run;
        assert_ok(vla_executor_create(1, &ex, &err), err);
        assert_ok(vla_executor_reserve(ex, backward_plan, &err), err);
        assert_ok(vla_executor_reserve(ex, update_plan, &err), err);
        assert_ok(vla_executor_reserve(ex, whole_plan, &err), err);
        assert_ok(vla_run_create(ex, backward_plan, two, &backward_run, &err), err);
        assert_ok(vla_run_create(ex, update_plan, two, &update_run, &err), err);
        assert_ok(vla_run_create(ex, whole_plan, one, &whole_run, &err), err);
        for (int step = 0; step < STEPS; step++) {
            fill(backward_run, modes[m], step);
            assert_ok(vla_run_execute(backward_run, &err), err);
            float loss = *(float *)vla_run_data(backward_run, "loss");
            set_hyper(update_run, step);
            assert_ok(vla_run_execute(update_run, &err), err);
            double norm = *(double *)vla_run_data(update_run, "clip");
            fill(whole_run, modes[m], step);
            set_hyper(whole_run, step);
            assert_ok(vla_run_submit(whole_run, &err), err);
            assert_ok(vla_run_wait(whole_run, &err), err);
            assert_true(loss > 0 && norm > 0);
            assert_memory_equal(&loss, vla_run_data(whole_run, "loss"), sizeof loss);
            assert_memory_equal(&norm, vla_run_data(whole_run, "clip"), sizeof norm);
        }
        assert_same_bits(one, two, VLA_STORE_WEIGHT);
        assert_same_bits(one, two, VLA_STORE_M);
        assert_same_bits(one, two, VLA_STORE_V);
        assert_same_bits(one, two, VLA_STORE_LOW);
        float before = value(0), after;
        vla_store_get_float(one, 0, 0, 1, &after);
        assert_true(before < after || before > after); /* it did step */
        vla_run_destroy(backward_run);
        vla_run_destroy(update_run);
        vla_run_destroy(whole_run);
        vla_executor_destroy(ex);
        vla_plan_destroy(backward_plan);
        vla_plan_destroy(update_plan);
        vla_plan_destroy(whole_plan);
        vla_store_destroy(one);
        vla_store_destroy(two);
    }
}

/* Pieces of tensors in their stored type. */
static void read_and_write(void **state)
{
    (void)state;
    vla_error err;
    vla_store *s = make_store(VLA_BF16_MASTER, VLA_STORE_TRAIN);
    uint16_t in[3] = {0x3F80, 0xBF80, 0x4000}, out[3];
    float f;
    assert_ok(vla_store_write(s, VLA_STORE_WEIGHT, 0, 5, 3, in, &err), err);
    assert_ok(vla_store_read(s, VLA_STORE_WEIGHT, 0, 5, 3, out, &err), err);
    assert_memory_equal(in, out, sizeof in);
    vla_store_get_float(s, 0, 7, 1, &f);
    assert_true(f >= 2.0f && f <= 2.0f);
    assert_int_equal(vla_store_read(s, VLA_STORE_WEIGHT, 0, MID * IN - 2, 3, out, &err), VLA_E_INVALID);
    assert_int_equal(vla_store_read(s, VLA_STORE_LOW, 1, 0, 1, out, &err), VLA_E_INVALID); /* an fp32 weight has none */
    vla_store_destroy(s);
}

static void eps_keeps_zeros_finite(void **state)
{
    (void)state;
    vla_error err;
    vla_store *s = make_store(VLA_FP32, VLA_STORE_TRAIN);
    vla_adamw_options options = adamw;
    options.eps = 0;
    vla_graph *g;
    assert_fails(vla_graph_adamw(s, (vla_gradient_status[3]){VLA_GRADIENT_ZERO}, &options, &g, &err), VLA_E_INVALID, err, "eps is 0");
    vla_store_destroy(s);
}

/* Options of a caller that was built with another version are taken by their size; one that was not set is refused. */
static void options_by_their_size(void **state)
{
    (void)state;
    vla_error err;
    vla_store *s = make_store(VLA_FP32, VLA_STORE_TRAIN);
    vla_adamw_options options = adamw;
    vla_plan_options older = VLA_PLAN_OPTIONS_DEFAULT;
    vla_graph *g;
    vla_plan *plan;
    options.size = 0;
    assert_fails(vla_graph_adamw(s, (vla_gradient_status[3]){VLA_GRADIENT_ZERO}, &options, &g, &err), VLA_E_INVALID, err, "vla_adamw_options: the member size is 0");
    older.size = 0;
    assert_ok(vla_graph_create(&g, &err), err);
    assert_fails(vla_plan_build(g, &older, &plan, &err), VLA_E_INVALID, err, "vla_plan_options: the member size is 0");
    assert_null(plan);
    older.size = offsetof(vla_plan_options, layout); /* what lies behind it is none of the caller's */
    older.layout = (vla_memory_layout)99;
    assert_ok(vla_graph_adamw(s, (vla_gradient_status[3]){VLA_GRADIENT_ZERO}, &adamw, &g, &err), err);
    assert_ok(vla_plan_build(g, &older, &plan, &err), err);
    vla_plan_destroy(plan);
    vla_store_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_plan_or_two), cmocka_unit_test(read_and_write), cmocka_unit_test(eps_keeps_zeros_finite), cmocka_unit_test(options_by_their_size)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
