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

/* Statistics narrower than the actions: the reference pads them virtually when exactly the channels behind them are masked,
 * with 0 there before and after, and fails otherwise. */
static vla_status check_width(const vlai_wallx_batch *b, int64_t width, int64_t d, vla_error *err)
{
    if (width > d)
        return vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: normalizer_min has %lld elements, wanted the %lld channels",
                         (long long)width, (long long)d);
    for (int64_t i = 0; width < d && i < b->samples * b->horizon * d; i++)
        if ((b->dof_mask[i] != 0) != (i % d < width))
            return vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: normalizer_min has %lld elements for %lld channels, and "
                             "dof_mask does not mask exactly the others", (long long)width, (long long)d);
    return VLA_OK;
}

vla_status vlai_parity_sample(vlai_parity_case *c, vla_error *err)
{
    vlai_parity_model m;
    vlai_parity_micro micro = {0};
    vlai_arena arena = {0};
    vlai_wallx_sampler *sampler = NULL;
    vla_status status;
    VLA_TRY_GOTO(vlai_parity_model_open(c, true, false, &m, err), done);
    if (vlai_parity_no_bf16(c, &m))
        goto done;
    VLA_TRY_GOTO(vlai_parity_micro_read(&m, "", false, &micro, err), done);
    int64_t steps = json_integer_value(json_object_get(c->meta, "euler_steps")), d = m.config.action_dim;
    int64_t n = micro.b.samples * micro.b.horizon * d;
    float *minimum, *delta;
    const vlai_tensor_view *minimum_view, *delta_view;
    VLA_TRY_GOTO(vlai_parity_floats(&arena, m.inputs, "normalizer_min", &minimum, &minimum_view, err), done);
    VLA_TRY_GOTO(vlai_parity_floats(&arena, m.inputs, "normalizer_delta", &delta, &delta_view, err), done);
    if (!minimum || !delta || steps < 1 || steps > 10000 || minimum_view->elements != delta_view->elements) {
        status = vlai_fail(err, VLA_E_FORMAT, "wanted euler_steps from 1 to 10000 in case.json, and normalizer_min and "
                           "normalizer_delta of one size in inputs.safetensors");
        goto done;
    }
    int64_t width = minimum_view->elements;
    VLA_TRY_GOTO(check_width(&micro.b, width, d, err), done);
    float *out = vlai_arena_alloc(&arena, (size_t)n * sizeof *out), *x = vlai_arena_alloc(&arena, (size_t)(n * steps) * sizeof *x);
    float *raw = vlai_arena_alloc(&arena, (size_t)(n * steps) * sizeof *raw), *times = vlai_arena_alloc(&arena, (size_t)steps * sizeof *times);
    float *padding = vlai_arena_alloc(&arena, (size_t)d * sizeof *padding);
    if (!out || !x || !raw || !times || !padding) {
        status = vlai_nomem(err, (size_t)(n * steps) * sizeof *x);
        goto done;
    }
    /* A masked channel is driven to the normalised value of a raw 0. */
    for (int64_t k = 0; k < d; k++)
        padding[k] = k < width ? fminf(fmaxf(2 * (0 - minimum[k]) / delta[k] - 1, -1), 1) : 0;
    VLA_TRY_GOTO(vlai_wallx_sampler_create(&m.config, m.store, m.executor, &sampler, err), done);
    for (int cache = 1; cache >= 0 && status == VLA_OK; cache--) {
        vlai_wallx_sample_options o = {.steps = steps, .cache = cache, .padding_action = padding, .trace_x = x, .trace_out = raw, .times = times};
        VLA_TRY_GOTO(vlai_wallx_sample(sampler, &m.tokens, &micro.b, &o, out, err), done);
        for (int64_t i = 0; i < n; i++)
            out[i] = i % d < width ? (out[i] + 1) / 2 * delta[i % d] + minimum[i % d] : 0;
        const struct { const char *name; const float *got; } results[] = {
            {cache ? "predict_action" : "predict_action.nocache", out}, {cache ? "act.x" : "", x}, {cache ? "act.out" : "", raw}, {cache ? "act.times" : "", times}};
        for (int r = 0; r < 4 && status == VLA_OK; r++) {
            float *want;
            const vlai_tensor_view *view;
            const int64_t sizes[] = {n, n * steps, n * steps, steps};
            status = vlai_parity_floats(&arena, m.outputs, results[r].name, &want, &view, err);
            if (status == VLA_OK && cache && r == 0 && !want)
                status = vlai_fail(err, VLA_E_NOT_FOUND, "outputs.safetensors: no 'predict_action'");
            if (status == VLA_OK && want && view->elements != sizes[r])
                status = vlai_fail(err, VLA_E_SHAPE, "outputs.safetensors: '%s' has %lld elements, wanted %lld", results[r].name,
                                   (long long)view->elements, (long long)sizes[r]);
            if (status == VLA_OK && want)
                vlai_parity_report(c, r ? "act" : "predict_action", results[r].name,
                                   vlai_parity_distance(c, "sample", results[r].name, results[r].got, want, view->elements), bound_of(c, &m, r, results[r].name));
        }
    }
done:
    vlai_wallx_sampler_destroy(sampler);
    vlai_arena_fini(&micro.arena);
    vlai_arena_fini(&arena);
    vlai_parity_model_close(&m);
    return status;
}
