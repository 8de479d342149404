/* Sampling actions: explicit Euler over the flow from noise (t = 0) to t = s, as generate_flow_action of the reference.
 *
 * Evaluation 0 is a whole forward with the training mask; it keeps every layer's rotated keys and values of the prefix.
 * The others run the action rows alone against them. Prefix keys whose token is the pad are hidden then, which they were
 * not in evaluation 0; without pads the result is that of a whole forward every time. */
#include "base/fail.h"
#include "base/memory.h"
#include "exec/executor.h"
#include "model/wallx.h"
#include "pass/pass.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    vla_plan *plan;
    vla_executor *executor; /* an arena of its own: both graphs of a sample are alive at once */
    vla_run *run;
} stage;

struct vlai_wallx_sampler {
    vlai_wallx_config config;
    vla_store *store;
    int threads;
    char device[16];
    vlai_wallx_shape shape; /* of the stages below */
    bool cached;
    stage whole, step;
};

vla_status vlai_wallx_sampler_create(const vlai_wallx_config *config, vla_store *store, vla_executor *executor,
                                     vlai_wallx_sampler **out, vla_error *err)
{
    *out = vlai_calloc(1, sizeof **out);
    if (!*out)
        return vlai_nomem(err, sizeof **out);
    (*out)->config = *config;
    (*out)->store = store;
    (*out)->threads = executor ? vla_executor_threads(executor) : 0;
    snprintf((*out)->device, sizeof (*out)->device, "%s", executor ? executor->backend->name : "cpu");
    if (executor && executor->index > 0)
        snprintf((*out)->device, sizeof (*out)->device, "%s:%d", executor->backend->name, executor->index);
    return VLA_OK;
}

static void stage_fini(stage *s)
{
    vla_run_destroy(s->run);
    vla_executor_destroy(s->executor);
    vla_plan_destroy(s->plan);
    *s = (stage){0};
}

void vlai_wallx_sampler_destroy(vlai_wallx_sampler *sampler)
{
    if (!sampler)
        return;
    stage_fini(&sampler->whole);
    stage_fini(&sampler->step);
    vlai_free(sampler);
}

static vla_status stage_build(vlai_wallx_sampler *s, const vlai_wallx_options *options, stage *out, vla_error *err)
{
    vla_graph *g;
    vla_plan_options plan_options = VLA_PLAN_OPTIONS_DEFAULT;
    plan_options.numerics = vla_store_numerics(s->store);
    stage_fini(out);
    VLA_TRY(vlai_wallx_build(&s->config, &s->shape, options, &g, err));
    vla_status status = options->keep_prefix ? VLA_OK : vlai_pass_narrow(g, NULL, err);
    if (status != VLA_OK) {
        vla_graph_destroy(g);
        return status;
    }
    VLA_TRY(vla_plan_build(g, &plan_options, &out->plan, err));
    VLA_TRY(vla_executor_create_on(s->device, s->threads, &out->executor, err));
    return vla_run_create(out->executor, out->plan, s->store, &out->run, err);
}

static vla_status prepare(vlai_wallx_sampler *s, const vlai_wallx_shape *shape, bool cache, vla_error *err)
{
    if (s->whole.run && (s->step.run || !cache) && s->cached == cache && !memcmp(&s->shape, shape, sizeof *shape))
        return VLA_OK;
    s->shape = *shape;
    s->cached = cache;
    VLA_TRY(stage_build(s, &(vlai_wallx_options){.inference = true, .keep_prefix = cache}, &s->whole, err));
    return cache ? stage_build(s, &(vlai_wallx_options){.inference = true, .from_prefix = true}, &s->step, err) : VLA_OK;
}

static void set_time(const vla_run *run, const vlai_wallx_shape *shape, float t)
{
    float *all = vla_run_data(run, "t");
    for (int64_t s = 0; all && s < shape->samples; s++)
        all[s] = t;
}

static void copy_input(const vla_run *run, const char *name, const void *data)
{
    vla_tensor t = vla_run_tensor(run, name);
    if (t.data && data)
        memcpy(t.data, data, (size_t)t.elements * vla_dtype_size(t.dtype));
}

/* Tables of the action rows against the prefix: queries are action rows, keys the prefix rows, then the action rows. */
static void fill_step(const vlai_wallx_sampler *s, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *b,
                            const int32_t *positions)
{
    const vla_run *run = s->step.run;
    const vlai_wallx_shape *shape = &s->shape;
    int64_t n0 = shape->tokens0, n1 = shape->tokens1, n = n0 + n1, row[2] = {0, 0};
    int32_t *qpos = vla_run_data(run, "qpos"), *rows = vla_run_data(run, "rows"), *cols = vla_run_data(run, "cols");
    int32_t *pos = vla_run_data(run, "positions"), *sample = vla_run_data(run, "sample_of_row");
    /* Pads are hidden from the actions, but not from one row alone: attention of a single query drops the mask in the
     * reference (model/core/attention/joint.py, JointQwen2VLAttention.forward). */
    bool alone = shape->horizon == 1;
    for (int64_t o = 0; o < b->samples; o++)
        alone = alone && b->ids[b->offset[o + 1] - 1] == tokens->action;
    memset(cols, 0, (size_t)n * 4 * sizeof *cols);
    for (int64_t o = 0; o < b->samples; o++) {
        int64_t start = row[0], queries = o * shape->horizon, end = queries + shape->horizon;
        for (int64_t i = b->offset[o]; i < b->offset[o + 1]; i++) {
            if (b->ids[i] != tokens->action) {
                bool hidden = (b->ids[i] == tokens->pad && !alone) || row[1] == end; /* actions do not look ahead to what follows them */
                int32_t *col = cols + 4 * row[0]++;
                col[0] = hidden ? 0 : (int32_t)queries;
                col[1] = hidden ? 0 : (int32_t)(queries + shape->horizon);
                continue;
            }
            int64_t q = row[1]++;
            int32_t *col = cols + 4 * (n0 + q);
            col[0] = (int32_t)(s->config.causal_action_attention_mask ? q : queries);
            col[1] = (int32_t)(queries + shape->horizon);
            qpos[q] = (int32_t)q;
            rows[2 * q] = (int32_t)start;
            rows[2 * q + 1] = (int32_t)(n0 + queries + shape->horizon);
            for (int axis = 0; axis < 3; axis++)
                pos[axis * n1 + q] = positions[axis * n + i];
            if (sample)
                sample[q] = (int32_t)o;
        }
    }
}

/* Text after the actions sees them, and bidirectional actions see it: it would have to be evaluated anew with them. */
static vla_status check_order(const vlai_wallx_config *c, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *b, vla_error *err)
{
    for (int64_t o = 0; o < b->samples && !c->causal_action_attention_mask; o++) {
        bool actions = false;
        for (int64_t i = b->offset[o]; i < b->offset[o + 1]; i++) {
            actions = actions || b->ids[i] == tokens->action;
            if (actions && b->ids[i] != tokens->action && b->ids[i] != tokens->pad)
                return vlai_fail(err, VLA_E_UNSUPPORTED, "sampling: sample %lld has token %d after its actions, which "
                                 "causal_action_attention_mask: false lets them see", (long long)o, b->ids[i]);
        }
    }
    return VLA_OK;
}

static void copy_cache(const vlai_wallx_sampler *s)
{
    for (int64_t l = 0; l < s->config.num_hidden_layers; l++)
        for (int i = 0; i < 2; i++) {
            char name[64];
            snprintf(name, sizeof name, "cache.%s.%lld", i ? "v" : "k", (long long)l);
            copy_input(s->step.run, name, vla_run_data(s->whole.run, name));
        }
}

/* Velocity of one element from the network's output. */
static float velocity(const vlai_wallx_config *c, float out, float x, float t)
{
    return c->use_x_pred ? (out - x) / fmaxf(1.0f - t, 0.05f) : out;
}

static vla_status evaluate(vlai_wallx_sampler *s, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *batch, bool whole,
                           const int32_t *positions, const float *x, float t, const float **out, vla_error *err)
{
    const vla_run *run = whole ? s->whole.run : s->step.run;
    /* Inputs lie in the arena, which a run may overwrite: they are written before every run. */
    if (whole) {
        VLA_TRY(vlai_wallx_fill(&s->config, tokens, &s->shape, batch, vlai_wallx_find_in_run, s->whole.run, err));
    } else {
        fill_step(s, tokens, batch, positions);
        copy_cache(s);
        copy_input(run, "dof_mask", batch->dof_mask);
    }
    copy_input(run, "x_t", x);
    set_time(run, &s->shape, t);
    VLA_TRY(vla_run_execute(whole ? s->whole.run : s->step.run, err));
    *out = vla_run_data(run, "action.out");
    return VLA_OK;
}

vla_status vlai_wallx_sample(vlai_wallx_sampler *s, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *batch,
                             const vlai_wallx_sample_options *o, float *out, vla_error *err)
{
    vlai_wallx_shape shape;
    VLA_TRY(vlai_wallx_shape_of(&s->config, tokens, batch, false, &shape, err));
    if (shape.tokens1 == 0)
        return vlai_fail(err, VLA_E_INVALID, "sampling: the prompt has no <|action|> tokens");
    if (o->cache)
        VLA_TRY(check_order(&s->config, tokens, batch, err));
    VLA_TRY(prepare(s, &shape, o->cache, err));
    int64_t n = shape.samples * shape.horizon * s->config.action_dim, tokens_all = shape.tokens0 + shape.tokens1;
    float *x = vlai_array((size_t)n, sizeof *x);
    int32_t *positions = vlai_array((size_t)tokens_all * 3, sizeof *positions);
    vla_status status = x && positions ? VLA_OK : vlai_nomem(err, (size_t)n * sizeof *x);
    if (status == VLA_OK) {
        int64_t image = 0;
        memcpy(x, batch->noise, (size_t)n * sizeof *x);
        for (int64_t k = 0; k < shape.samples; k++)
            vlai_wallx_positions(&s->config, batch, batch->offset[k], batch->offset[k + 1], &image, positions, tokens_all);
    }
    double shift = s->config.noise.time_shift, scale = s->config.noise.s;
    for (int64_t k = 0; k < o->steps && status == VLA_OK; k++) {
        double u[2] = {(double)k / (double)o->steps, (double)(k + 1) / (double)o->steps};
        for (int i = 0; i < 2; i++)
            u[i] = (shift == 1 ? u[i] : shift * u[i] / (1 + (shift - 1) * u[i])) * scale;
        float t = (float)u[0], dt = (float)u[1] - t;
        const float *result;
        status = evaluate(s, tokens, batch, k == 0 || !o->cache, positions, x, t, &result, err);
        if (status != VLA_OK)
            break;
        if (o->times)
            o->times[k] = t;
        if (o->trace_x)
            memcpy(o->trace_x + k * n, x, (size_t)n * sizeof *x);
        if (o->trace_out)
            memcpy(o->trace_out + k * n, result, (size_t)n * sizeof *x);
        for (int64_t i = 0; i < n; i++) {
            float v = velocity(&s->config, result[i], x[i], t);
            if (o->padding_action && batch->dof_mask[i] == 0)
                v = o->padding_action[i % s->config.action_dim] - batch->noise[i];
            x[i] += dt * v;
        }
    }
    if (status == VLA_OK)
        memcpy(out, x, (size_t)n * sizeof *x);
    vlai_free(x);
    vlai_free(positions);
    return status;
}
