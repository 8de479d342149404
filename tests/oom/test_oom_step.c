/* Loading of Wall-X's weights, and a training step with each allocation failing in turn: graph, backward, plan, arena, run, update. Then the step
 * itself, which must not allocate at all. */
#include "oom.h"

#include "base/fail.h"
#include "base/json.h"
#include "exec/plan.h"
#include "model/wallx_plan.h"
#include "optim/settings.h"
#include "parity/model.h"
#include "parity/parity.h"

static vlai_parity_case wallx;
static vlai_parity_model model;
static vlai_parity_micro batch;

static int open_model(void **state)
{
    vla_error err = VLA_ERROR_INIT;
    oom_set_up(state);
    snprintf(wallx.dir, sizeof wallx.dir, VLA_TEST_ROOT "/tests/golden/wallx-flow-xloss");
    snprintf(wallx.golden, sizeof wallx.golden, VLA_TEST_ROOT "/tests/golden");
    wallx.numerics = "fp32";
    wallx.device = "cpu";
    assert_ok(vlai_parity_json(&wallx, "case.json", &wallx.meta, &err), err);
    assert_ok(vlai_parity_model_open(&wallx, true, false, &model, &err), err);
    const json_t *first = json_array_get(json_object_get(wallx.meta, "batches"), 0);
    assert_ok(vlai_parity_micro_read(&model, json_string_value(json_object_get(first, "prefix")), true, &batch, &err), err);
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    vlai_arena_fini(&batch.arena);
    vlai_parity_model_close(&model);
    json_decref(wallx.meta);
    return 0;
}

/* What a step needs: the plan that computes gradients and the one that applies them. */
typedef struct {
    vla_executor *executor;
    vla_plan *plan, *update_plan;
    vla_run *run, *update;
    vla_gradient_status *status;
    vlai_wallx_shape shape;
} step;

static void step_fini(step *s)
{
    vla_run_destroy(s->update);
    vla_run_destroy(s->run);
    vla_plan_destroy(s->update_plan);
    vla_plan_destroy(s->plan);
    vla_executor_destroy(s->executor);
    vlai_free(s->status);
}

/* Takes the graph. */
static vla_status plan_of(vla_graph *graph, vla_recompute recompute, vla_plan **out, vla_error *err)
{
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    options.recompute = recompute;
    return vla_plan_build(graph, &options, out, err);
}

static vla_status build_gradients(vla_gradient_status *status, const vlai_wallx_shape *shape, vla_graph **out, vla_error *err)
{
    vlai_wallx_options options = {.activations = false};
    vla_graph *g = NULL;
    VLA_TRY(vlai_wallx_build(&model.config, shape, &options, &g, err));
    vla_status result = vlai_pass_narrow(g, NULL, err);
    if (result == VLA_OK)
        result = vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, err);
    if (result == VLA_OK)
        result = vla_graph_store_gradients(g, model.store, 0, status, err);
    if (result != VLA_OK)
        vla_graph_destroy(g);
    else
        *out = g;
    return result;
}

static vla_status step_init(step *s, vla_recompute recompute, vla_error *err)
{
    vla_graph *g;
    vla_adamw_options adamw = vlai_settings_adamw(model.train);
    s->status = vlai_calloc(vla_store_count(model.store), sizeof *s->status);
    if (!s->status)
        return vlai_nomem(err, vla_store_count(model.store));
    VLA_TRY(vla_executor_create(2, &s->executor, err));
    VLA_TRY(vlai_wallx_shape_of(&model.config, &model.tokens, &batch.b, true, &s->shape, err));
    VLA_TRY(build_gradients(s->status, &s->shape, &g, err));
    VLA_TRY(plan_of(g, recompute, &s->plan, err));
    VLA_TRY(vla_graph_adamw(model.store, s->status, &adamw, &g, err));
    VLA_TRY(plan_of(g, VLA_RECOMPUTE_NONE, &s->update_plan, err));
    VLA_TRY(vla_executor_reserve(s->executor, s->plan, err));
    VLA_TRY(vla_executor_reserve(s->executor, s->update_plan, err));
    VLA_TRY(vla_run_create(s->executor, s->plan, model.store, &s->run, err));
    return vla_run_create(s->executor, s->update_plan, model.store, &s->update, err);
}

static vla_status step_execute(step *s, int64_t number, vla_error *err)
{
    VLA_TRY(vla_run_execute(s->run, err));
    vlai_settings_hyper(model.train, number, number, vla_run_data(s->update, "hyper"));
    *(float *)vla_run_data(s->update, "guard") = 0;
    return vla_run_execute(s->update, err);
}

static vla_status one_step(void *user, vla_error *err)
{
    step s = {0};
    vla_status status = step_init(&s, *(vla_recompute *)user, err);
    if (status == VLA_OK)
        status = vlai_wallx_fill(&model.config, &model.tokens, &s.shape, &batch.b, vlai_wallx_find_in_run, s.run, err);
    if (status == VLA_OK)
        status = step_execute(&s, 0, err);
    step_fini(&s);
    return status;
}

static void a_step(void **state)
{
    (void)state;
    vla_recompute none = VLA_RECOMPUTE_NONE, layer = VLA_RECOMPUTE_LAYER;
    oom_every("step, recompute none", 120, one_step, &none);
    oom_every("step, recompute layer", 40, one_step, &layer);
}

/* The store and the plans of one rank of several, collectives and all. */
static vla_status plan_a_rank(void *user, vla_error *err)
{
    const vla_shard_options *share = user;
    vla_store *store = NULL;
    vla_plan *plan = NULL;
    vla_graph *gather = NULL;
    vla_adamw_options adamw = vlai_settings_adamw(model.train);
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    vlai_wallx_shape shape;
    vla_gradient_status *gradients = vlai_calloc(vla_store_count(model.store), sizeof *gradients);
    vla_status status = gradients ? VLA_OK : vlai_nomem(err, vla_store_count(model.store));
    options.overlap = 1;
    if (status == VLA_OK)
        status = vla_store_create(&store, err);
    options.store = store;
    if (status == VLA_OK)
        status = vlai_wallx_params(&model.config, NULL, NULL, store, err);
    if (status == VLA_OK)
        status = vla_store_shard(store, share, err);
    if (status == VLA_OK)
        status = vla_store_allocate(store, VLA_FP32, VLA_STORE_STEP, err);
    if (status == VLA_OK)
        status = vlai_wallx_shape_of(&model.config, &model.tokens, &batch.b, true, &shape, err);
    if (status == VLA_OK)
        status = vlai_wallx_plan_step(&model.config, &shape, store, &adamw, &options, gradients, &plan, err);
    if (status == VLA_OK)
        status = vlai_graph_gather(store, &plan->order, &gather, err);
    vla_graph_destroy(gather);
    vla_plan_destroy(plan);
    vla_store_destroy(store);
    vlai_free(gradients);
    return status;
}

static void a_rank(void **state)
{
    (void)state;
    vla_shard_options share = {sizeof share, 1, 3, 50000, 1};
    oom_every("plan of a rank", 120, plan_a_rank, &share);
    share.zero = 0;
    oom_every("plan of a rank that keeps all", 40, plan_a_rank, &share);
}

/* Configuration, weights file, store, loading. */
static vla_status load_weights(void *user, vla_error *err)
{
    (void)user;
    vlai_parity_model loaded;
    vla_status status = vlai_parity_model_open(&wallx, true, false, &loaded, err);
    vlai_parity_model_close(&loaded);
    return status;
}

static void weights(void **state)
{
    (void)state;
    oom_every("weights", 150, load_weights, NULL);
}

static vla_status read_batch(void *user, vla_error *err)
{
    vlai_parity_micro micro;
    vla_status status = vlai_parity_micro_read(&model, user, true, &micro, err);
    if (status == VLA_OK)
        vlai_arena_fini(&micro.arena);
    return status;
}

static void a_recorded_batch(void **state)
{
    (void)state;
    const json_t *first = json_array_get(json_object_get(wallx.meta, "batches"), 0);
    oom_every("recorded batch", 60, read_batch, (void *)(uintptr_t)json_string_value(json_object_get(first, "prefix")));
}

/* A hundred runs of both plans leave the allocator untouched. (They share an arena, so the batch is written each time;
 * that is outside of what is counted.) */
static void a_step_allocates_nothing(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    step s = {0};
    assert_ok(step_init(&s, VLA_RECOMPUTE_NONE, &err), err);
    float first = 0, loss = 0;
    int steps = test_sanitized() ? 20 : 100;
    vla_memory_stats before, after;
    for (int i = 0; i < steps; i++) {
        assert_ok(vlai_wallx_fill(&model.config, &model.tokens, &s.shape, &batch.b, vlai_wallx_find_in_run, s.run, &err), err);
        before = vla_memory_stats_get();
        assert_ok(step_execute(&s, i, &err), err);
        loss = *(float *)vla_run_data(s.run, "loss");
        if (i == 0)
            first = loss;
        after = vla_memory_stats_get();
        assert_int_equal(after.allocations, before.allocations);
        assert_int_equal(after.releases, before.releases);
    }
    print_message("loss %g -> %g in %d steps\n", (double)first, (double)loss, steps);
    assert_true(loss != first); /* they did step */
    step_fini(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights),
        cmocka_unit_test(a_step),
        cmocka_unit_test(a_rank),
        cmocka_unit_test(a_recorded_batch),
        cmocka_unit_test(a_step_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
