/* Golden cases of sampling: the Euler path, with and without the prefix cache. */
#include "base/fail.h"
#include "base/json.h"
#include "parity/model.h"

#include <math.h>
#include <string.h>

/* Times are fp32 in both: a bf16 run is not held to less than the fp32 bound. */
static double bound_of(const vlai_parity_case *c, const vlai_parity_model *m, int result, const char *name)
{
    double fp32 = result ? m->bound.act : json_number_value(json_object_get(json_object_get(c->meta, "tolerance"), "predict_action"));
    return m->numerics == VLA_FP32 ? fp32 : fmax(fp32, vlai_parity_bf16_bound(c, result ? name : "predict_action", NULL));
}

vla_status vlai_parity_sample(vlai_parity_case *c, vla_error *err)
{
    vlai_parity_model m;
    vlai_parity_micro micro = {0};
    vlai_arena arena = {0};
    vlai_wallx_sampler *sampler = NULL;
    vla_status status;
    VLA_TRY_GOTO(vlai_parity_model_open(c, true, false, &m, err), done);
    VLA_TRY_GOTO(vlai_parity_micro_read(&m, "", &micro, err), done);
    int64_t steps = json_integer_value(json_object_get(c->meta, "euler_steps")), d = m.config.action_dim;
    int64_t n = micro.b.samples * micro.b.horizon * d;
    float *minimum, *delta;
    VLA_TRY_GOTO(vlai_parity_floats(&arena, m.inputs, "normalizer_min", &minimum, NULL, err), done);
    VLA_TRY_GOTO(vlai_parity_floats(&arena, m.inputs, "normalizer_delta", &delta, NULL, err), done);
    float *out = vlai_arena_alloc(&arena, (size_t)n * sizeof *out), *x = vlai_arena_alloc(&arena, (size_t)(n * steps) * sizeof *x);
    float *raw = vlai_arena_alloc(&arena, (size_t)(n * steps) * sizeof *raw), *times = vlai_arena_alloc(&arena, (size_t)steps * sizeof *times);
    float *padding = vlai_arena_alloc(&arena, (size_t)d * sizeof *padding);
    if (!out || !x || !raw || !times || !padding || !minimum || !delta || steps <= 0) {
        status = vlai_fail(err, VLA_E_NOT_FOUND, "euler_steps, normalizer_min or normalizer_delta is missing");
        goto done;
    }
    /* A masked channel is driven to the normalised value of a raw 0. */
    for (int64_t k = 0; k < d; k++)
        padding[k] = fminf(fmaxf(2 * (0 - minimum[k]) / delta[k] - 1, -1), 1);
    VLA_TRY_GOTO(vlai_wallx_sampler_create(&m.config, m.store, m.executor, &sampler, err), done);
    for (int cache = 1; cache >= 0 && status == VLA_OK; cache--) {
        vlai_wallx_sample_options o = {.steps = steps, .cache = cache, .padding_action = padding, .trace_x = x, .trace_out = raw, .times = times};
        VLA_TRY_GOTO(vlai_wallx_sample(sampler, &m.tokens, &micro.b, &o, out, err), done);
        for (int64_t i = 0; i < n; i++)
            out[i] = (out[i] + 1) / 2 * delta[i % d] + minimum[i % d];
        const struct { const char *name; const float *got; } results[] = {
            {cache ? "predict_action" : "predict_action.nocache", out}, {cache ? "act.x" : "", x}, {cache ? "act.out" : "", raw}, {cache ? "act.times" : "", times}};
        for (int r = 0; r < 4 && status == VLA_OK; r++) {
            float *want;
            const vlai_tensor_view *view;
            status = vlai_parity_floats(&arena, m.outputs, results[r].name, &want, &view, err);
            if (status == VLA_OK && want)
                vlai_parity_report(c, r ? "act" : "predict_action", results[r].name, vlai_parity_rel_l2(results[r].got, want, view->elements),
                                   bound_of(c, &m, r, results[r].name));
        }
    }
done:
    vlai_wallx_sampler_destroy(sampler);
    vlai_arena_fini(&micro.arena);
    vlai_arena_fini(&arena);
    vlai_parity_model_close(&m);
    return status;
}
