/* A SwiGLU block whose inner width is kept padded in the store learns what the unpadded one learns, in every mode of
 * numerics, and its pads stay exact zeros: weights, gradients, moments and low bits. */
#include "test.h"

#include "exec/store.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 7, WIDTH = 6, INNER = 21, PADDED = 64, STEPS = 20, COUNT = 3 };

static const vla_adamw_options adamw = {sizeof(vla_adamw_options), 0.9, 0.95, 1e-8, 0.1, 0.5, 1};

static const struct {
    const char *name;
    int rank;
    int64_t shape[2], run, pitch;
} params[COUNT] = {
    {"gate_up.weight", 2, {2 * INNER, WIDTH}, INNER * WIDTH, PADDED * WIDTH},
    {"gate_up.bias", 1, {2 * INNER, 0}, INNER, PADDED},
    {"down.weight", 2, {WIDTH, INNER}, INNER, PADDED},
};

static float value(int64_t i)
{
    return (float)((i * 37 % 101) - 50) / 64.0f;
}

static vla_store *make_store(vla_numerics numerics, bool padded)
{
    vla_store *s;
    vla_error err;
    assert_ok(vla_store_create(&s, &err), err);
    for (int i = 0; i < COUNT; i++) {
        assert_ok(vla_store_add(s, params[i].name, VLA_COMPUTE, params[i].rank, params[i].shape, 0, &err), err);
        if (padded)
            assert_ok(vla_store_pad(s, params[i].name, params[i].run, params[i].pitch, &err), err);
    }
    assert_ok(vla_store_allocate(s, numerics, VLA_STORE_TRAIN, &err), err);
    for (size_t i = 0; i < COUNT; i++) {
        float x[2 * INNER * WIDTH];
        int64_t n = vla_store_tensor(s, VLA_STORE_WEIGHT, i).elements;
        for (int64_t k = 0; k < n; k++)
            x[k] = value(k + 7 * (int64_t)i);
        vla_store_set_float(s, i, 0, 5, x); /* in two pieces that end inside a run */
        vla_store_set_float(s, i, 5, n - 5, x + 5);
    }
    return s;
}

static vla_graph *make_graph(int64_t inner)
{
    vla_graph *g;
    vla_error err;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value x = vla_graph_input(g, "x", VLA_PRECISE, 2, (int64_t[]){ROWS, WIDTH});
    vla_value target = vla_graph_input(g, "target", VLA_PRECISE, 2, (int64_t[]){ROWS, WIDTH});
    vla_value mask = vla_fill(g, VLA_PRECISE, 2, (int64_t[]){ROWS, WIDTH}, 1);
    vla_value h = vla_linear(g, vla_cast(g, x, VLA_COMPUTE), vla_graph_param(g, "gate_up.weight", VLA_COMPUTE, 2, (int64_t[]){2 * inner, WIDTH}),
                             vla_graph_param(g, "gate_up.bias", VLA_COMPUTE, 1, (int64_t[]){2 * inner}));
    vla_value y = vla_linear(g, vla_swiglu(g, h), vla_graph_param(g, "down.weight", VLA_COMPUTE, 2, (int64_t[]){WIDTH, inner}), VLA_NONE);
    vla_value loss = vla_masked_mse(g, vla_cast(g, y, VLA_PRECISE), target, mask).loss;
    vla_graph_name(g, loss, "loss");
    assert_ok(vla_graph_backward(g, loss, 1.0, &err), err);
    return g;
}

typedef struct {
    vla_store *store;
    vla_plan *plans[2];
    vla_run *runs[2]; /* backward, update */
    vla_executor *ex;
    double loss, norm;
} training;

static training begin(vla_numerics numerics, bool padded)
{
    training t = {.store = make_store(numerics, padded)};
    vla_error err;
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    options.numerics = numerics;
    vla_gradient_status status[COUNT] = {0};
    vla_graph *g = make_graph(padded ? PADDED : INNER), *update;
    assert_ok(vla_graph_store_gradients(g, t.store, 0, status, &err), err);
    assert_ok(vla_plan_build(g, &options, &t.plans[0], &err), err);
    assert_ok(vla_graph_adamw(t.store, status, &adamw, &update, &err), err);
    assert_ok(vla_plan_build(update, &options, &t.plans[1], &err), err);
    assert_ok(vla_executor_create(1, &t.ex, &err), err);
    for (int k = 0; k < 2; k++)
        assert_ok(vla_executor_reserve(t.ex, t.plans[k], &err), err);
    for (int k = 0; k < 2; k++)
        assert_ok(vla_run_create(t.ex, t.plans[k], t.store, &t.runs[k], &err), err);
    return t;
}

static void step(training *t, int number)
{
    vla_error err;
    float *x = vla_run_data(t->runs[0], "x"), *target = vla_run_data(t->runs[0], "target");
    for (int i = 0; i < ROWS * WIDTH; i++) {
        x[i] = value(i);
        target[i] = value(3 * i + 1);
    }
    assert_ok(vla_run_execute(t->runs[0], &err), err);
    t->loss = (double)*(float *)vla_run_data(t->runs[0], "loss");
    double *hyper = vla_run_data(t->runs[1], "hyper");
    vla_hyper_fill(&adamw, 7, number, hyper);
    hyper[VLA_HYPER_RATES] = 0.01;
    *(float *)vla_run_data(t->runs[1], "guard") = 0;
    assert_ok(vla_run_execute(t->runs[1], &err), err);
    t->norm = *(double *)vla_run_data(t->runs[1], "clip");
}

static void end(training *t)
{
    for (int k = 0; k < 2; k++) {
        vla_run_destroy(t->runs[k]);
        vla_plan_destroy(t->plans[k]);
    }
    vla_executor_destroy(t->ex);
    vla_store_destroy(t->store);
}

static void assert_pads_are_zero(const vla_store *s)
{
    for (size_t i = 0; i < COUNT; i++)
        for (int k = 0; k < VLA_STORE_KINDS; k++) {
            const vlai_param *p = &s->params[i];
            vla_tensor t = vla_store_tensor(s, (vla_store_kind)k, i);
            size_t size = vla_dtype_size(t.dtype), pads = 0;
            for (int64_t e = 0; t.data && e < p->stored; e++) {
                if (e % p->pitch < p->run)
                    continue;
                pads++;
                for (size_t b = 0; b < size; b++)
                    assert_int_equal(((unsigned char *)t.data)[(size_t)e * size + b], 0);
            }
            assert_true(!t.data || pads == (size_t)(p->stored - p->elements));
        }
}

static void learns_the_same(void **state)
{
    (void)state;
    /* Sums over the inner width may be taken in another order; bf16: a few roundings, stochastic ones drawn elsewhere. */
    static const struct {
        vla_numerics numerics;
        double bound, after;
    } modes[] = {{VLA_FP32, 1e-6, 1e-4}, {VLA_BF16_MASTER, 2e-2, 5e-2}, {VLA_BF16_SR, 2e-2, 5e-2}, {VLA_BF16_PLAIN, 2e-2, 5e-2}};
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
        training plain = begin(modes[m].numerics, false), padded = begin(modes[m].numerics, true);
        double first = 0;
        for (int k = 0; k < STEPS; k++) {
            step(&plain, k);
            step(&padded, k);
            double bound = k ? modes[m].after : modes[m].bound;
            assert_true(fabs(plain.loss - padded.loss) <= bound * plain.loss);
            assert_true(fabs(plain.norm - padded.norm) <= bound * plain.norm);
            assert_pads_are_zero(padded.store);
            first = k ? first : plain.loss;
        }
        assert_true(plain.loss < 0.7 * first && padded.loss < 0.7 * first);
        for (size_t i = 0; i < COUNT; i++) {
            float a[2 * INNER * WIDTH], b[2 * INNER * WIDTH];
            int64_t n = vla_store_tensor(plain.store, VLA_STORE_WEIGHT, i).elements;
            assert_int_equal(n, vla_store_tensor(padded.store, VLA_STORE_WEIGHT, i).elements);
            vla_store_get_float(plain.store, i, 0, n, a);
            vla_store_get_float(padded.store, i, 0, n, b);
            double distance = 0, length = 0;
            for (int64_t e = 0; e < n; e++) {
                distance += ((double)a[e] - b[e]) * ((double)a[e] - b[e]);
                length += (double)a[e] * a[e];
            }
            assert_true(sqrt(distance) <= modes[m].after * sqrt(length));
        }
        end(&plain);
        end(&padded);
    }
}

static void elements_keep_their_order(void **state)
{
    (void)state;
    vla_error err;
    vla_store *s = make_store(VLA_BF16_MASTER, true), *plain = make_store(VLA_BF16_MASTER, false);
    for (size_t i = 0; i < COUNT; i++) {
        int64_t n = vla_store_tensor(s, VLA_STORE_WEIGHT, i).elements;
        uint16_t a[2 * INNER * WIDTH], b[2 * INNER * WIDTH];
        for (int64_t first = 0; first < n; first += 11)
            for (int64_t count = 1; first + count <= n; count += 13) {
                assert_ok(vla_store_read(s, VLA_STORE_WEIGHT, i, first, count, a, &err), err);
                assert_ok(vla_store_read(plain, VLA_STORE_WEIGHT, i, first, count, b, &err), err);
                assert_memory_equal(a, b, (size_t)count * 2);
            }
        for (int64_t e = 0; e < n; e++)
            a[e] = (uint16_t)(3 * e);
        assert_ok(vla_store_write(s, VLA_STORE_LOW, i, 3, n - 3, a, &err), err);
        assert_ok(vla_store_read(s, VLA_STORE_LOW, i, 3, n - 3, b, &err), err);
        assert_memory_equal(a, b, (size_t)(n - 3) * 2);
        assert_int_equal(vla_store_read(s, VLA_STORE_WEIGHT, i, n - 1, 2, b, &err), VLA_E_INVALID);
    }
    assert_pads_are_zero(s);
    assert_true(vla_store_bytes(s, VLA_STORE_WEIGHT, VLA_FP32, VLA_STORE_TRAIN) > vla_store_bytes(plain, VLA_STORE_WEIGHT, VLA_FP32, VLA_STORE_TRAIN));
    vla_store_destroy(s);
    vla_store_destroy(plain);
}

static void refusals(void **state)
{
    (void)state;
    vla_error err;
    vla_store *s;
    assert_ok(vla_store_create(&s, &err), err);
    assert_ok(vla_store_add(s, "w", VLA_COMPUTE, 2, (int64_t[]){4, 6}, 0, &err), err);
    assert_fails(vla_store_pad(s, "v", 6, 8, &err), VLA_E_NOT_FOUND, err, "'v'");
    assert_fails(vla_store_pad(s, "w", 5, 8, &err), VLA_E_SHAPE, err, "runs of 5");
    assert_fails(vla_store_pad(s, "w", 6, 5, &err), VLA_E_SHAPE, err, "5 apart");
    assert_fails(vla_store_pad(s, "w", 0, 5, &err), VLA_E_SHAPE, err, "runs of 0");
    assert_ok(vla_store_allocate(s, VLA_FP32, VLA_STORE_PREDICT, &err), err);
    assert_fails(vla_store_pad(s, "w", 6, 8, &err), VLA_E_INVALID, err, "allocated");
    vla_store_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(learns_the_same),
        cmocka_unit_test(elements_keep_their_order),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
