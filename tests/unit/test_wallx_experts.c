/* Which expert a step moves: one of nothing but action tokens leaves the first alone, whatever the weight decay, as the reference does. */
#include "test.h"

#include "base/json.h"
#include "model/wallx_plan.h"
#include "parity/model.h"
#include "parity/parity.h"

#include <stdlib.h>
#include <string.h>

enum { SAMPLES = 2, TOKENS = 64 };

static vlai_parity_case wallx;
static vlai_parity_model model;

static int open_model(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    snprintf(wallx.dir, sizeof wallx.dir, VLA_TEST_ROOT "/tests/golden/wallx-flow-xloss");
    snprintf(wallx.golden, sizeof wallx.golden, VLA_TEST_ROOT "/tests/golden");
    wallx.numerics = "fp32";
    wallx.device = "cpu";
    assert_ok(vlai_parity_json(&wallx, "case.json", &wallx.meta, &err), err);
    assert_ok(vlai_parity_model_open(&wallx, true, false, &model, &err), err);
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    vlai_parity_model_close(&model);
    json_decref(wallx.meta);
    return 0;
}

static bool is_of_first(const char *name)
{
    static const char *const parts[] = {"input_layernorms.0", "post_attention_layernorms.0", "qkv_proj_experts.0", "o_proj_experts.0", "moe.experts.0.",
                                        "model.norms.0"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(name, parts[i]))
            return true;
    return false;
}

/* One step, with much decay, of samples of `text` tokens and the actions behind them. status: per parameter. */
static void step(int text, vla_gradient_status *status, bool *moved)
{
    static float reals[4096];
    static int32_t ids[SAMPLES * TOKENS];
    int64_t horizon = 4, offset[SAMPLES + 1] = {0};
    vla_error err = VLA_ERROR_INIT;
    vla_plan *plan;
    vla_run *run;
    vlai_wallx_shape shape;
    for (int s = 0; s < SAMPLES; s++) {
        offset[s + 1] = offset[s] + text + horizon;
        for (int64_t i = offset[s]; i < offset[s + 1]; i++)
            ids[i] = i < offset[s] + text ? 1 + (int)i : (int32_t)model.tokens.action;
    }
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++)
        reals[i] = 0.1f + 0.001f * (float)(i % 97);
    vlai_wallx_batch b = {.samples = SAMPLES, .offset = offset, .ids = ids, .horizon = horizon, .action = reals + 1000, .dof_mask = reals + 5,
                          .noise = reals + 11, .time = reals + 3, .state = reals, .state_mask = reals};
    assert_ok(vlai_wallx_shape_of(&model.config, &model.tokens, &b, true, &shape, &err), err);
    assert_int_equal(shape.tokens0 == 0, text == 0);
    vla_adamw_options adamw = {sizeof adamw, 0.9, 0.95, 1e-8, 0.5, 1.0, 1};
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    assert_ok(vlai_wallx_plan_step(&model.config, &shape, model.store, &adamw, &options, status, &plan, &err), err);
    assert_ok(vla_executor_reserve(model.executor, plan, &err), err);
    assert_ok(vla_run_create(model.executor, plan, model.store, &run, &err), err);
    assert_ok(vlai_wallx_fill(&model.config, &model.tokens, &shape, &b, vlai_wallx_find_in_run, run, &err), err);
    double *hyper = vla_run_data(run, "hyper");
    vla_hyper_fill(&adamw, 1, 0, hyper);
    hyper[VLA_HYPER_RATES] = 1e-2;
    size_t count = vla_store_count(model.store);
    void **before = calloc(count, sizeof *before);
    for (size_t i = 0; i < count; i++) {
        vla_tensor w = vla_store_tensor(model.store, VLA_STORE_WEIGHT, i);
        before[i] = malloc((size_t)w.elements * sizeof(float));
        memcpy(before[i], w.data, (size_t)w.elements * sizeof(float));
    }
    assert_ok(vla_run_execute(run, &err), err);
    for (size_t i = 0; i < count; i++) {
        vla_tensor w = vla_store_tensor(model.store, VLA_STORE_WEIGHT, i);
        moved[i] = memcmp(before[i], w.data, (size_t)w.elements * sizeof(float)) != 0;
        free(before[i]);
    }
    free(before);
    vla_run_destroy(run);
    vla_plan_destroy(plan);
}

static void actions_alone(void **state)
{
    (void)state;
    size_t count = vla_store_count(model.store);
    for (int text = 0; text <= 3; text += 3) {
        vla_gradient_status *status = calloc(count, sizeof *status);
        bool *moved = calloc(count, sizeof *moved);
        int first = 0, second = 0;
        step(text, status, moved);
        for (size_t i = 0; i < count; i++) {
            const char *name = vla_store_tensor(model.store, VLA_STORE_WEIGHT, i).name;
            bool expected = is_of_first(name) ? text > 0 : !strncmp(name, "model.", 6);
            first += is_of_first(name);
            second += !is_of_first(name) && expected;
            if (!is_of_first(name) && !expected) /* the tower, the head: not what this is about */
                continue;
            if (moved[i] != expected || (status[i] != VLA_GRADIENT_NONE) != expected)
                fail_msg("%d text tokens: '%s' %s, its gradient has status %d", text, name, moved[i] ? "moves" : "stays", (int)status[i]);
        }
        assert_true(first > 5 && second > 5);
        free(moved);
        free(status);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(actions_alone)};
    return cmocka_run_group_tests(tests, open_model, close_model);
}
