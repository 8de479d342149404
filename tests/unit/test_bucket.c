/* Plans of a run under a limit: the least is made again that lets a plan fit, and with room to spare less than that. */
#include "alloc.h"
#include "test.h"

#include "base/fail.h"
#include "exec/plan.h"
#include "train/bucket.h"
#include "train/device.h"
#include "train/run_memory.h"

#include <stdlib.h>

enum { ROWS = 512, WIDTH = 32, INNER = 128, LAYERS = 6 };

static vla_status build(void *user, const void *shape, vla_graph **out, vla_error *err)
{
    (void)user;
    (void)shape;
    VLA_TRY(vla_graph_create(out, err));
    vla_graph *g = *out;
    vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){ROWS, WIDTH}), y = vla_graph_input(g, "y", VLA_COMPUTE, 2, (int64_t[]){ROWS, WIDTH});
    for (int l = 0; l < LAYERS; l++) {
        char up[16], down[16];
        snprintf(up, sizeof up, "up.%d", l);
        snprintf(down, sizeof down, "down.%d", l);
        vlai_graph_layer(g, l);
        vla_value u = vla_linear(g, x, vla_graph_param(g, up, VLA_COMPUTE, 2, (int64_t[]){2 * INNER, WIDTH}), VLA_NONE);
        x = vla_add(g, x, vla_linear(g, vla_swiglu(g, u), vla_graph_param(g, down, VLA_COMPUTE, 2, (int64_t[]){WIDTH, INNER}), VLA_NONE));
    }
    vlai_graph_layer(g, -1);
    vla_graph_name(g, vla_masked_mse(g, x, y, y).loss, "loss");
    return vla_graph_check(g, err);
}

typedef struct outcome {
    vla_recompute recompute;
    size_t need, keep; /* need: parameters and plan */
} outcome;

static vla_status add_all(vla_store *store, vla_error *err)
{
    for (int l = 0; l < LAYERS; l++) {
        char name[16];
        snprintf(name, sizeof name, "up.%d", l);
        VLA_TRY(vla_store_add(store, name, VLA_COMPUTE, 2, (int64_t[]){2 * INNER, WIDTH}, 0, err));
        snprintf(name, sizeof name, "down.%d", l);
        VLA_TRY(vla_store_add(store, name, VLA_COMPUTE, 2, (int64_t[]){WIDTH, INNER}, 0, err));
    }
    return VLA_OK;
}

static vla_status params(void *user, vla_store *store, vla_error *err)
{
    (void)user;
    return add_all(store, err);
}

static vla_status shape_of(void *user, void *const *slots, int64_t count, void *shape, vla_error *err)
{
    (void)user;
    (void)slots;
    (void)err;
    *(int64_t *)shape = count;
    return VLA_OK;
}

/* What preflight says of the same run; limit 0: none, and `fixed` decides. */
static outcome forecast(vla_numerics numerics, size_t limit, vla_recompute fixed)
{
    vla_error err = VLA_ERROR_INIT;
    vla_model model = {.size = sizeof model, .shape_size = sizeof(int64_t), .build = build, .params = params, .shape = shape_of};
    vla_adamw_options adamw = {sizeof adamw, 0.9, 0.95, 1e-8, 1e-8, 1.0, 1};
    vlai_run_settings settings = {.batch = 1, .accumulation = 1, .validation_batch = -1, .numerics = numerics, .recompute = fixed, .automatic = limit > 0, .limit = limit,
                                  .layout = VLA_MEMORY_LIFETIMES, .threads = 1};
    vlai_run_memory m = {0};
    void *slots[1] = {NULL};
    assert_ok(vlai_run_memory_plan(&model, &adamw, slots, &settings, 0, &m, &err), err);
    return (outcome){m.recompute, m.weights + m.gradients + m.optimizer + m.inputs + m.activations + m.workspace, 0};
}

/* limit 0: none, and `fixed` decides. */
static vla_status try_plan(vla_numerics numerics, size_t limit, vla_recompute fixed, size_t keep, outcome *got, vla_error *err)
{
    vla_store *store = NULL;
    vla_executor *executor = NULL;
    vlai_plans *plans = NULL;
    vlai_bucket *bucket;
    vla_model model = {.size = sizeof model, .shape_size = sizeof(int64_t), .build = build};
    vlai_plans_options options = {.plan = VLA_PLAN_OPTIONS_DEFAULT, .accumulation = 1, .most = 2, .automatic = limit > 0, .limit = limit};
    vla_status status;
    options.plan.recompute = fixed;
    options.plan.numerics = numerics;
    options.plan.keep = keep;
    VLA_TRY_GOTO(vla_store_create(&store, err), done);
    VLA_TRY_GOTO(add_all(store, err), done);
    VLA_TRY_GOTO(vla_store_allocate(store, numerics, VLA_STORE_TRAIN, err), done);
    VLA_TRY_GOTO(vla_executor_create(1, &executor, err), done);
    VLA_TRY_GOTO(vlai_plans_create(&model, store, executor, &options, &plans, err), done);
    VLA_TRY_GOTO(vlai_plans_get(plans, &(int64_t){1}, true, &bucket, err), done);
    vlai_plan_need own = vlai_plan_needs(executor, bucket->plan);
    *got = (outcome){bucket->plan->options.recompute, vlai_store_held(store) + own.arena + own.scratch, bucket->plan->options.keep};
done:
    vlai_plans_destroy(plans);
    vla_executor_destroy(executor);
    vla_store_destroy(store);
    return status;
}

static outcome plan_of(vla_numerics numerics, size_t limit, vla_recompute fixed, size_t keep)
{
    vla_error err = VLA_ERROR_INIT;
    outcome got;
    assert_ok(try_plan(numerics, limit, fixed, keep, &got, &err), err);
    return got;
}

static outcome plan(size_t limit, vla_recompute fixed)
{
    return plan_of(VLA_FP32, limit, fixed, 0);
}

static void test_limits(void **state)
{
    (void)state;
    outcome none = plan(0, VLA_RECOMPUTE_NONE), cheap = plan(0, VLA_RECOMPUTE_CHEAP);
    assert_true(cheap.need < none.need);
    outcome all = plan(none.need, VLA_RECOMPUTE_NONE), least = plan(cheap.need, VLA_RECOMPUTE_NONE);
    assert_int_equal(all.recompute, VLA_RECOMPUTE_NONE);
    assert_int_equal(least.recompute, VLA_RECOMPUTE_CHEAP);
    assert_int_equal(least.keep, 0);
    assert_int_equal(least.need, cheap.need);
    /* One byte too few for everything: part of it is kept, and the plan stays below the limit. */
    outcome some = plan(none.need - 1, VLA_RECOMPUTE_NONE);
    assert_int_equal(some.recompute, VLA_RECOMPUTE_CHEAP);
    assert_true(some.keep > 0);
    assert_true(some.need > cheap.need && some.need < none.need);
}

/* A mode without masters leaves room free, unless it is told how much it may take; that bounds the others too. */
static void test_wanted(void **state)
{
    (void)state;
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_SR};
    for (int m = 0; m < 2; m++) {
        outcome none = plan_of(modes[m], 0, VLA_RECOMPUTE_NONE, 0), cheap = plan_of(modes[m], 0, VLA_RECOMPUTE_CHEAP, 0);
        size_t limit = none.need - 1, most = (none.need - cheap.need) / 2;
        outcome free = plan_of(modes[m], limit, VLA_RECOMPUTE_CHEAP, 0), some = plan_of(modes[m], limit, VLA_RECOMPUTE_CHEAP, most);
        outcome fixed = plan_of(modes[m], 0, VLA_RECOMPUTE_CHEAP, most), tight = plan_of(modes[m], cheap.need, VLA_RECOMPUTE_CHEAP, most);
        assert_true((free.need > cheap.need) == (modes[m] == VLA_FP32));
        assert_int_equal(some.recompute, VLA_RECOMPUTE_CHEAP);
        assert_int_equal(some.keep, most);
        assert_true(some.need > cheap.need && some.need < none.need);
        assert_int_equal(fixed.need, some.need);
        assert_int_equal(tight.keep, 0);
        assert_int_equal(tight.need, cheap.need);
    }
}

/* Where the rule of cheap does not fit for all layers, it holds for as many of the last ones as do, in every mode; so preflight says, too. */
static void test_some_layers(void **state)
{
    (void)state;
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_SR};
    for (int m = 0; m < 2; m++) {
        outcome cheap = plan_of(modes[m], 0, VLA_RECOMPUTE_CHEAP, 0), layer = plan_of(modes[m], 0, VLA_RECOMPUTE_LAYER, 0);
        assert_true(layer.need < cheap.need);
        size_t step = (cheap.need - layer.need) / 4, before = layer.need;
        for (int k = 0; k < 4; k++) {
            size_t limit = cheap.need - 1 - (size_t)(3 - k) * step;
            outcome some = plan_of(modes[m], limit, VLA_RECOMPUTE_CHEAP, 0);
            assert_int_equal(some.recompute, VLA_RECOMPUTE_LAYER);
            assert_true(some.need >= before && some.need <= limit);
            before = some.need;
        }
        assert_true(before > layer.need + 2 * step);
        outcome all = forecast(modes[m], 0, VLA_RECOMPUTE_CHEAP), none = forecast(modes[m], 0, VLA_RECOMPUTE_LAYER);
        outcome some = forecast(modes[m], all.need - 1, VLA_RECOMPUTE_CHEAP);
        assert_int_equal(some.recompute, VLA_RECOMPUTE_LAYER);
        assert_true(some.need < all.need && some.need > none.need + (all.need - none.need) / 2);
    }
}

/* Whatever allocation fails while modes are tried one after the other, nothing is left behind. */
static void test_no_memory(void **state)
{
    (void)state;
    outcome got, cheap = plan(0, VLA_RECOMPUTE_CHEAP);
    uint64_t n = 1;
    for (bool failed = true; failed; n++) {
        vla_error err = VLA_ERROR_INIT;
        vla_memory_stats before = vla_memory_stats_get();
        failing_allocation(n);
        vla_status status = try_plan(VLA_FP32, cheap.need, VLA_RECOMPUTE_NONE, 0, &got, &err);
        failed = alloc_reached();
        failing_allocation(0);
        vla_memory_stats after = vla_memory_stats_get();
        assert_int_equal(after.allocations - before.allocations - failed, after.releases - before.releases);
        assert_true(status == VLA_OK || (failed && status == VLA_E_NOMEM)); /* a line of the log may lack */
    }
    assert_int_equal(got.need, cheap.need);
    assert_true(n > 100);
}

static void test_device_keep(void **state)
{
    (void)state;
    const size_t room = 6400, need = 3200, arena = 1600, spare = room - need - arena / 16 - room / 64;
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_MASTER, 0, room, need, arena), spare);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_MASTER, 50, room, need, arena), 50);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_MASTER, 2 * spare, room, need, arena), spare);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_SR, 0, room, need, arena), 0);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_SR, 50, room, need, arena), 50);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_SR, 50, need, need, arena), 0);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_MASTER, 0, SIZE_MAX, need, arena), 0);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_CHEAP, VLA_BF16_SR, 50, SIZE_MAX, need, arena), 50);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_LAYER, VLA_BF16_SR, 0, room, need, arena), spare);
    assert_int_equal(vlai_device_keep(VLA_RECOMPUTE_NONE, VLA_BF16_MASTER, 50, room, need, arena), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_limits), cmocka_unit_test(test_wanted), cmocka_unit_test(test_some_layers), cmocka_unit_test(test_no_memory), cmocka_unit_test(test_device_keep)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
