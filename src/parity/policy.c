/* Golden cases of the whole policy: one forward and backward with every activation, then the recorded optimiser steps by
 * the graph that training uses. */
#include "base/fail.h"
#include "base/json.h"
#include "base/order.h"
#include "exec/store.h"
#include "optim/settings.h"
#include "parity/model.h"
#include "pass/pass.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

double vlai_parity_bf16_bound(const vlai_parity_case *c, const char *what, const char *statistic)
{
    const json_t *v = json_object_get(json_object_get(c->meta, "bf16"), what);
    if (statistic)
        v = json_object_get(v, statistic);
    return 2 * json_number_value(v);
}

bool vlai_parity_no_bf16(vlai_parity_case *c, const vlai_parity_model *m)
{
    c->skipped = m->numerics != VLA_FP32 && !json_is_object(json_object_get(c->meta, "bf16"));
    if (c->skipped)
        snprintf(c->note, sizeof c->note, "case.json has no 'bf16': how far the reference's own bf16 run is from its fp32");
    return c->skipped;
}

static vla_status build_run(const vlai_parity_model *m, vla_graph *graph, vla_plan **plan, vla_run **run, vla_error *err)
{
    vla_plan_options options = vlai_parity_plan(m);
    VLA_TRY(vla_plan_build(graph, &options, plan, err));
    return vla_run_create(m->executor, *plan, m->store, run, err);
}

/* The reference's two bf16 paths: fp32 masters (FSDP), or bf16 weights in AdamW (DDP), which keeps the recorded losses and
 * weights of our modes without masters. */
static const char *recorded(const vlai_parity_model *m, const char *masters, const char *without)
{
    return m->numerics == VLA_BF16_MASTER ? masters : without;
}

/* Of a step's loss: twice the largest distance that the reference's own bf16 run kept over the recorded steps. One run is one
 * draw of its rounding errors, and may happen to lie near the exact loss; what no bf16 run can promise to undercut is
 *   2^-8                      a prediction rounded to bf16 is off by up to 2^-9 of itself, its square by twice that
 *   2 g |L0 - Lk| / Lk        steps go along gradients that may be off by twice the reference's own g (its worst tensor), and
 *                             with them what the loss has changed since step 0. */
static double bf16_step_bound(const vlai_parity_case *c, const vlai_parity_model *m, size_t step)
{
    const json_t *own = json_object_get(json_object_get(c->meta, "bf16"), recorded(m, "step_losses_fsdp", "step_losses_ddp")),
                 *steps = json_object_get(c->meta, "steps");
    double worst = vlai_parity_bf16_bound(c, "loss", NULL) / 2, first = 0, here = 0;
    for (size_t s = 0; s < json_array_size(own) && s < json_array_size(steps); s++) {
        double exact = json_number_value(json_object_get(json_array_get(steps, s), "loss"));
        worst = fmax(worst, fabs(json_number_value(json_array_get(own, s)) - exact) / fabs(exact));
        first = s == 0 ? exact : first;
        here = s == step ? exact : here;
    }
    double change = here > 0 || here < 0 ? fabs(first - here) / fabs(here) : 0;
    return fmax(2 * worst, ldexp(1, -8) + vlai_parity_bf16_bound(c, "grads", "worst") * change);
}

/* ---- Activations ------------------------------------------------------------------------------------------------ */

typedef struct {
    vlai_parity_case *c;
    const vlai_parity_model *m;
    const vlai_parity_micro *batch;
    const vla_run *run;
    vlai_arena *arena;
    uint8_t *ignored; /* [B*S] */
} comparison;

/* Rows of the two streams put back into [B*S, width]; columns beyond a stream's width are zero. */
static float *join_streams(const comparison *k, const float *e0, int64_t n0, const float *e1, int64_t n1, int64_t width)
{
    const vlai_wallx_batch *b = &k->batch->b;
    int64_t total = b->offset[b->samples], count[2] = {0, 0};
    float *out = vlai_arena_alloc(k->arena, (size_t)(total * width) * sizeof *out + 1);
    if (!out)
        return NULL;
    for (int64_t i = 0; i < total; i++) {
        int e = b->ids[i] == k->m->tokens.action;
        int64_t w = e ? (e1 && n1 ? k->m->config.action_hidden_size : 0) : width;
        const float *from = e ? e1 : e0;
        if (from && count[e] < (e ? n1 : n0))
            memcpy(out + i * width, from + count[e] * w, (size_t)w * sizeof *out);
        count[e]++;
    }
    return out;
}

/* Zeroes the rows that depend on the attention class, in both arrays. `stream`: -1 rows are tokens, else rows of a stream. */
static void drop_ignored(const comparison *k, float *got, float *want, int64_t rows, int64_t elements, int stream)
{
    const vlai_wallx_batch *b = &k->batch->b;
    int64_t total = b->offset[b->samples], row = 0, width = rows ? elements / rows : 0;
    for (int64_t i = 0; i < total; i++) {
        int e = b->ids[i] == k->m->tokens.action;
        if (stream >= 0 && e != stream)
            continue;
        if (k->ignored[i] && row < rows) {
            memset(got + row * width, 0, (size_t)width * sizeof *got);
            memset(want + row * width, 0, (size_t)width * sizeof *want);
        }
        row++;
    }
}

/* The M-RoPE tables of each axis over the whole half, both halves, as the reference keeps them. */
static vla_status rope_tables(const comparison *k, const int32_t *positions, int64_t n, float *cosines, float *sines, vla_error *err)
{
    const vlai_wallx_config *c = &k->m->config;
    int half = (int)c->head_dim / 2;
    for (int axis = 0; axis < 3; axis++) {
        vla_graph *g;
        vla_plan *plan = NULL;
        vla_run *run = NULL;
        VLA_TRY(vla_graph_create(&g, err));
        vla_rope_options o = {.base = c->rope_theta, .half = half, .axes = 1, .sections = {half}, .dtype = VLA_PRECISE};
        vla_rope_tables t = vla_rope_table(g, vla_graph_input(g, "p", VLA_I32, 2, (int64_t[]){1, n}), &o);
        vla_graph_name(g, t.cos, "cos");
        vla_graph_name(g, t.sin, "sin");
        vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
        vla_executor *ex = NULL;
        vla_status status = vla_plan_build(g, &options, &plan, err);
        if (status == VLA_OK)
            status = vla_executor_create(1, &ex, err);
        if (status == VLA_OK)
            status = vla_run_create(ex, plan, NULL, &run, err);
        if (status == VLA_OK) {
            memcpy(vla_run_data(run, "p"), positions + axis * n, (size_t)n * sizeof *positions);
            status = vla_run_execute(run, err);
        }
        for (int64_t i = 0; status == VLA_OK && i < n; i++)
            for (int h = 0; h < 2; h++) {
                memcpy(cosines + ((axis * n + i) * 2 + h) * half, (float *)vla_run_data(run, "cos") + i * half, (size_t)half * sizeof(float));
                memcpy(sines + ((axis * n + i) * 2 + h) * half, (float *)vla_run_data(run, "sin") + i * half, (size_t)half * sizeof(float));
            }
        vla_run_destroy(run);
        vla_executor_destroy(ex);
        vla_plan_destroy(plan);
        VLA_TRY(status);
    }
    return VLA_OK;
}

/* Does the model have an activation of that name, with or without a gradient? */
static bool named(const comparison *k, const char *activation)
{
    char name[160];
    snprintf(name, sizeof name, "act.%s", activation);
    if (!strcmp(activation, "embeds") || !strcmp(activation, "hidden"))
        return true;
    return vla_run_tensor(k->run, name).data != NULL;
}

/* What this program computed for an output of the case; NULL when it has nothing of that name and size. */
static vla_status find_result(const comparison *k, const char *name, int64_t elements, float **out, vla_error *err)
{
    int64_t got;
    VLA_TRY(vlai_parity_result(k->arena, k->run, name, out, &got, err));
    if (*out) {
        *out = got == elements ? *out : NULL;
        return VLA_OK;
    }
    const char *dot = strchr(name, '.') + 1;
    bool gradient = name[0] == 'd';
    if (!strcmp(dot, "embeds") || !strcmp(dot, "hidden")) {
        char part[96];
        float *e[2];
        int64_t n[2];
        for (int i = 0; i < 2; i++) {
            snprintf(part, sizeof part, "%s.e%d", name, i);
            VLA_TRY(vlai_parity_result(k->arena, k->run, part, &e[i], &n[i], err));
        }
        int64_t width = k->m->config.hidden_size;
        if (elements != width * k->batch->b.offset[k->batch->b.samples])
            return VLA_OK;
        *out = join_streams(k, e[0], n[0] / width, e[1], n[1] / k->m->config.action_hidden_size, width);
        return *out ? VLA_OK : vlai_nomem(err, (size_t)elements * sizeof **out);
    }
    bool error = !strcmp(dot, "flow_error") || !strcmp(dot, "ce_error"), positions = !strcmp(dot, "position_ids");
    if (!gradient && (error || positions)) {
        VLA_TRY(vlai_parity_result(k->arena, k->run, error ? dot : "positions", out, &got, err));
        *out = got == elements ? *out : NULL;
        return VLA_OK;
    }
    if (!gradient && (!strcmp(dot, "rope.cos") || !strcmp(dot, "rope.sin"))) {
        float *other = vlai_arena_alloc(k->arena, (size_t)elements * sizeof *other + 1);
        *out = vlai_arena_alloc(k->arena, (size_t)elements * sizeof **out + 1);
        if (!other || !*out)
            return vlai_nomem(err, (size_t)elements * sizeof *other);
        bool cosine = !strcmp(dot, "rope.cos");
        int64_t n = k->batch->b.offset[k->batch->b.samples];
        if (elements != 3 * n * k->m->config.head_dim) {
            *out = NULL;
            return VLA_OK;
        }
        return rope_tables(k, vla_run_data(k->run, "positions"), n, cosine ? *out : other, cosine ? other : *out, err);
    }
    if (gradient && named(k, name + 5)) { /* no path: the reference has zeros */
        *out = vlai_arena_alloc(k->arena, (size_t)elements * sizeof **out + 1);
        return *out ? VLA_OK : vlai_nomem(err, (size_t)elements * sizeof **out);
    }
    return VLA_OK;
}

/* The reference's action rows are as wide as the others, with zeros above their own columns. What reads those zeros gives them
 * a gradient, which goes nowhere. */
static void drop_above_width(const comparison *k, float *gradient, int64_t width)
{
    const vlai_wallx_batch *b = &k->batch->b;
    int64_t own = k->m->config.action_hidden_size;
    for (int64_t i = 0; i < b->offset[b->samples]; i++)
        if (b->ids[i] == k->m->tokens.action)
            memset(gradient + i * width + own, 0, (size_t)(width - own) * sizeof *gradient);
}

static bool token_rows(const char *name)
{
    const char *dot = strchr(name, '.') + 1;
    size_t n = strlen(dot);
    return !strcmp(dot, "hidden") || !strcmp(dot, "embeds") || (!strncmp(dot, "layer.", 6) && n > 2 && (!strcmp(dot + n - 2, ".q") || !strcmp(dot + n - 2, ".k")));
}

static vla_status compare_activation(const comparison *k, const vlai_tensor_view *view, vla_error *err)
{
    float *want, *got;
    bool gradient = view->name[0] == 'd';
    VLA_TRY(vlai_parity_floats(k->arena, k->m->outputs, view->name, &want, NULL, err));
    VLA_TRY(find_result(k, view->name, view->elements, &got, err));
    if (!got) {
        char text[160];
        snprintf(text, sizeof text, "%.100s: this model has none of %lld elements", view->name, (long long)view->elements);
        vlai_parity_report(k->c, gradient ? "dact" : "act", text, INFINITY, 0);
        return VLA_OK;
    }
    size_t n = strlen(view->name);
    if (gradient && !strcmp(view->name, "dact.hidden"))
        drop_above_width(k, want, k->m->config.hidden_size);
    if (token_rows(view->name))
        drop_ignored(k, got, want, k->batch->b.offset[k->batch->b.samples], view->elements, -1);
    else if (!strcmp(strchr(view->name, '.') + 1, "action.out"))
        drop_ignored(k, got, want, view->shape[0], view->elements, 1);
    else if (n > 3 && view->name[n - 3] == '.' && view->name[n - 2] == 'e')
        drop_ignored(k, got, want, view->shape[0], view->elements, view->name[n - 1] - '0');
    bool exact = view->dtype == VLA_I64;
    vlai_parity_report(k->c, gradient ? "dact" : exact ? "positions" : "act", view->name,
                       exact ? vlai_parity_max_abs(got, want, view->elements) : vlai_parity_rel_l2(got, want, view->elements),
                       exact ? 0 : gradient ? k->m->bound.dact : k->m->bound.act);
    return VLA_OK;
}

static double relative(double got, double want)
{
    return want != 0 ? fabs(got - want) / fabs(want) : fabs(got);
}

static vla_status compare_scalar(const comparison *k, const char *output, const char *result, vla_error *err)
{
    float *want, *got;
    int64_t n;
    VLA_TRY(vlai_parity_floats(k->arena, k->m->outputs, output, &want, NULL, err));
    if (!want)
        return VLA_OK;
    VLA_TRY(vlai_parity_result(k->arena, k->run, result, &got, &n, err));
    bool one = got && n == 1 && vlai_safetensors_find(k->m->outputs, output)->elements == 1;
    vlai_parity_report(k->c, "loss", output, one ? relative(got[0], want[0]) : INFINITY, k->m->bound.loss);
    return VLA_OK;
}

/* Sums and counts per data set, which the trainer logs: NAME of the cross-entropy, NAME_flow of the flow error. */
static vla_status compare_channels(const comparison *k, const json_t *names, vla_error *err)
{
    const vlai_wallx_batch *b = &k->batch->b;
    float *flow, *ce;
    int64_t nf, nc;
    VLA_TRY(vlai_parity_result(k->arena, k->run, "flow_error", &flow, &nf, err));
    VLA_TRY(vlai_parity_result(k->arena, k->run, "ce_error", &ce, &nc, err));
    int64_t d = k->m->config.action_dim, row = 0;
    for (int64_t s = 0; s < b->samples; s++)
        if (json_array_size(names) != (size_t)b->samples || !json_is_string(json_array_get(names, (size_t)s)))
            return vlai_fail(err, VLA_E_FORMAT, "case.json: dataset_names has %zu entries, wanted the names of %lld samples",
                             json_array_size(names), (long long)b->samples);
    for (size_t s = 0; s < json_array_size(names); s++) {
        const char *name = json_string_value(json_array_get(names, s));
        double sums[2] = {0, 0}, counts[2] = {0, 0};
        row = 0;
        for (int64_t o = 0; o < b->samples; o++) {
            bool mine = !strcmp(json_string_value(json_array_get(names, (size_t)o)), name);
            for (int64_t i = 0; flow && i < b->horizon * d; i++)
                if (mine) {
                    sums[1] += flow[o * b->horizon * d + i];
                    counts[1] += b->dof_mask[o * b->horizon * d + i] * (b->flow_loss_mask ? b->flow_loss_mask[o * b->horizon + i / d] : 1.0f);
                }
            for (int64_t i = b->offset[o] + 1; b->labels && i < b->offset[o + 1]; i++)
                if (b->labels[i] >= 0 && ce && row < nc) {
                    if (mine) {
                        sums[0] += ce[row];
                        counts[0]++;
                    }
                    row++;
                }
        }
        for (int kind = 0; kind < 2; kind++) {
            char output[160];
            float *want;
            const vlai_tensor_view *view;
            snprintf(output, sizeof output, "channel.%s%s.sum", name, kind ? "_flow" : "");
            VLA_TRY(vlai_parity_floats(k->arena, k->m->outputs, output, &want, &view, err));
            if (want)
                vlai_parity_report(k->c, "channels", output, view->elements == 1 ? relative(sums[kind], want[0]) : INFINITY, k->m->bound.act);
            snprintf(output, sizeof output, "channel.%s%s.count", name, kind ? "_flow" : "");
            VLA_TRY(vlai_parity_floats(k->arena, k->m->outputs, output, &want, &view, err));
            if (want)
                vlai_parity_report(k->c, "channels", output, view->elements == 1 ? relative(counts[kind], want[0]) : INFINITY,
                                   counts[kind] == round(counts[kind]) ? 0 : k->m->bound.act); /* weights between 0 and 1 add up in fp32 */
        }
    }
    return VLA_OK;
}

/* train_action_expert_only: parameters that no group of learning rates takes have no gradient and are not stepped. */
static void freeze_base(const vlai_parity_model *m, vla_graph *g)
{
    for (size_t i = 0; m->train->optimizer.train_action_expert_only && i < vla_store_count(m->store); i++) {
        const char *name = vla_store_tensor(m->store, VLA_STORE_WEIGHT, i).name;
        vla_value v = vlai_settings_group(name, m->train) == 0 ? vla_graph_find(g, name) : VLA_NONE;
        if (v != VLA_NONE)
            vla_graph_freeze(g, v);
    }
}

/* Gradients of named activations get the name dact.X. */
static void name_gradients(vla_graph *g)
{
    size_t values = g->n_gradient;
    for (size_t v = 0; v < values; v++) {
        const char *name = g->values[v].name;
        vla_value dv = g->gradient[v];
        if (!name || strncmp(name, "act.", 4) || dv == VLA_NONE)
            continue;
        char text[128];
        snprintf(text, sizeof text, "d%s", name);
        vla_graph_name(g, vla_scale(g, dv, 1.0), text);
    }
}

static vla_status compare_activations(vlai_parity_case *c, const vlai_parity_model *m, const vlai_parity_micro *batch,
                                      const json_t *names, vla_error *err)
{
    vlai_arena arena = {0};
    vla_graph *g = NULL;
    vla_plan *plan = NULL;
    vla_run *run = NULL;
    vlai_wallx_shape shape;
    vlai_wallx_options options = {.activations = true};
    vla_status status;
    comparison k = {c, m, batch, NULL, &arena, vlai_calloc((size_t)batch->b.offset[batch->b.samples] + 1, 1)};
    if (!k.ignored)
        return vlai_nomem(err, (size_t)batch->length);
    size_t index;
    json_t *entry;
    json_array_foreach(json_object_get(c->meta, "ignore_rows"), index, entry) {
        int64_t sample = json_integer_value(json_array_get(entry, 0)), token = json_integer_value(json_array_get(entry, 1));
        if (json_array_size(entry) != 2 || sample < 0 || sample >= batch->b.samples || token < 0 || token >= batch->length) {
            status = vlai_fail(err, VLA_E_FORMAT, "case.json: ignore_rows[%zu] is not a sample below %lld and a token below %lld", index,
                               (long long)batch->b.samples, (long long)batch->length);
            goto done;
        }
        k.ignored[sample * batch->length + token] = 1;
    }
    VLA_TRY_GOTO(vlai_wallx_shape_of(&m->config, &m->tokens, &batch->b, false, &shape, err), done);
    VLA_TRY_GOTO(vlai_wallx_build(&m->config, &shape, &options, &g, err), done);
    freeze_base(m, g);
    VLA_TRY_GOTO(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, err), done);
    name_gradients(g);
    vla_graph *taken = g;
    g = NULL;
    VLA_TRY_GOTO(build_run(m, taken, &plan, &run, err), done);
    VLA_TRY_GOTO(vlai_wallx_fill(&m->config, &m->tokens, &shape, &batch->b, vlai_wallx_find_in_run, run, err), done);
    VLA_TRY_GOTO(vla_run_execute(run, err), done);
    k.run = run;
    if (!vlai_safetensors_find(m->outputs, "loss")) {
        status = vlai_fail(err, VLA_E_NOT_FOUND, "outputs.safetensors: no 'loss'");
        goto done;
    }
    VLA_TRY_GOTO(compare_scalar(&k, "loss", "loss", err), done);
    VLA_TRY_GOTO(compare_scalar(&k, "flow_loss", "flow_loss", err), done);
    VLA_TRY_GOTO(compare_scalar(&k, "cross_entropy_loss", "cross_entropy_loss", err), done);
    VLA_TRY_GOTO(compare_channels(&k, names, err), done);
    for (size_t i = 0; i < vlai_safetensors_count(m->outputs) && status == VLA_OK; i++) {
        const vlai_tensor_view *view = vlai_safetensors_at(m->outputs, i);
        if (!strncmp(view->name, "act.", 4) || !strncmp(view->name, "dact.", 5))
            status = compare_activation(&k, view, err);
    }
done:
    vla_run_destroy(run);
    vla_plan_destroy(plan);
    vla_graph_destroy(g);
    vlai_free(k.ignored);
    vlai_arena_fini(&arena);
    return status;
}

/* ---- Steps ------------------------------------------------------------------------------------------------------ */

/* The store's place of a tensor of the file; -1 for one that stands in files only: a statistic, a tied head, an unused projection. */
static vla_status place_of(const vlai_parity_model *m, const vlai_tensor_view *view, int64_t *out, vla_error *err)
{
    static const char *const others[] = {"action_preprocessor.normalizer", "lm_head.weight", "action_preprocessor.propri_proj.weight"};
    *out = vla_store_find(m->store, view->name);
    for (int i = 0; i < 3 && *out < 0; i++)
        if (!strncmp(view->name, others[i], strlen(others[i])))
            return VLA_OK;
    if (*out < 0)
        return vlai_fail(err, VLA_E_NOT_FOUND, "%s: the model has no tensor '%s'", view->file, view->name);
    int64_t wanted = vla_store_tensor(m->store, VLA_STORE_WEIGHT, (size_t)*out).elements;
    if (wanted != view->elements)
        return vlai_fail(err, VLA_E_SHAPE, "%s: '%s' has %lld elements, wanted %lld", view->file, view->name, (long long)view->elements,
                         (long long)wanted);
    return VLA_OK;
}

vla_status vlai_parity_check_complete(const vlai_parity_model *m, const vlai_safetensors *st, const char *file,
                                      const vla_gradient_status *status, const int64_t *updates, vla_error *err)
{
    for (size_t i = 0; i < vla_store_count(m->store); i++) {
        const char *name = vla_store_tensor(m->store, VLA_STORE_WEIGHT, i).name;
        bool needed = status ? status[i] == VLA_GRADIENT_SOME : !updates || updates[i] > 0;
        if (needed && !vlai_safetensors_find(st, name))
            return vlai_fail(err, VLA_E_NOT_FOUND, "%s: no tensor '%s', which the model trains", file, name);
    }
    return VLA_OK;
}

vla_status vlai_parity_compare_store(vlai_parity_case *c, const vlai_parity_model *m, const vlai_safetensors *st, vla_store_kind kind, vla_error *err)
{
    vlai_arena arena = {0};
    bool gradients = kind == VLA_STORE_GRADIENT, bf16 = m->numerics != VLA_FP32;
    size_t count = vlai_safetensors_count(st), compared = 0;
    double largest = 0, *errors = vlai_arena_alloc(&arena, (count + 1) * sizeof *errors);
    vla_status status = errors ? vla_store_pull(m->store, kind, err) : vlai_nomem(err, count * sizeof *errors);
    if (status == VLA_OK && !gradients)
        status = vla_store_pull(m->store, VLA_STORE_LOW, err);
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < count && status == VLA_OK; i++) {
            const vlai_tensor_view *view = vlai_safetensors_at(st, i);
            vlai_arena one = {0};
            float *want = NULL;
            int64_t index = -1;
            double norm = 0;
            status = place_of(m, view, &index, err);
            if (status == VLA_OK)
                status = vlai_parity_floats(&one, st, view->name, &want, NULL, err);
            for (int64_t e = 0; status == VLA_OK && e < view->elements; e++)
                norm += (double)want[e] * want[e];
            norm = sqrt(norm);
            largest = pass == 0 && norm > largest ? norm : largest;
            float *got = pass == 1 && status == VLA_OK && index >= 0 ? vlai_arena_alloc(&one, (size_t)view->elements * sizeof *got + 1) : NULL;
            if (!got) {
                status = pass == 1 && status == VLA_OK && index >= 0 ? vlai_nomem(err, (size_t)view->elements * sizeof *got) : status;
                vlai_arena_fini(&one);
                continue;
            }
            if (!gradients)
                vla_store_get_float(m->store, (size_t)index, 0, view->elements, got);
            else
                vlai_store_floats(m->store, kind, (size_t)index, 0, view->elements, got);
            double error = vlai_parity_distance(c, gradients ? "grads" : "after", view->name, got, want, view->elements);
            double bound = gradients ? m->bound.grads : m->bound.after;
            if (gradients && norm < 1e-7 * largest) { /* too small for a relative measure */
                double difference = 0;
                for (int64_t e = 0; e < view->elements; e++)
                    difference += ((double)got[e] - want[e]) * ((double)got[e] - want[e]);
                error = largest > 0 ? sqrt(difference) / largest : sqrt(difference);
                bound = 1e-8;
            }
            if (bf16)
                bound = vlai_parity_bf16_bound(c, gradients ? "grads" : recorded(m, "after_fsdp", "after_ddp"), "worst");
            errors[compared++] = error;
            vlai_parity_report(c, gradients ? "grads" : "after", view->name, error, bound);
            vlai_arena_fini(&one);
        }
    if (status == VLA_OK && compared) {
        qsort(errors, compared, sizeof *errors, vlai_by_value);
        double median = errors[compared / 2];
        if (bf16)
            vlai_parity_report(c, gradients ? "grads_median" : "after_median", "median over tensors", median,
                               vlai_parity_bf16_bound(c, gradients ? "grads" : recorded(m, "after_fsdp", "after_ddp"), "median"));
        else if (!gradients && m->bound.after_median > 0)
            vlai_parity_report(c, "after_median", "median over tensors", median, m->bound.after_median);
    }
    vlai_arena_fini(&arena);
    return status;
}

typedef struct {
    vla_gradient_status *status;
    double loss;
} micro_result;

static vla_status run_micro(const vlai_parity_model *m, const char *prefix, int64_t micros, micro_result *out, vla_error *err)
{
    vlai_parity_micro batch;
    VLA_TRY(vlai_parity_micro_read(m, prefix, true, &batch, err));
    vla_graph *g = NULL;
    vla_plan *plan = NULL;
    vla_run *run = NULL;
    vlai_wallx_shape shape;
    vlai_wallx_options options = {.activations = false};
    vla_status status;
    VLA_TRY_GOTO(vlai_wallx_shape_of(&m->config, &m->tokens, &batch.b, false, &shape, err), done);
    VLA_TRY_GOTO(vlai_wallx_build(&m->config, &shape, &options, &g, err), done);
    freeze_base(m, g);
    VLA_TRY_GOTO(vlai_pass_narrow(g, NULL, err), done);
    VLA_TRY_GOTO(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0 / (double)micros, err), done);
    VLA_TRY_GOTO(vla_graph_store_gradients(g, m->store, micros > 1, out->status, err), done);
    vla_graph *taken = g;
    g = NULL;
    VLA_TRY_GOTO(build_run(m, taken, &plan, &run, err), done);
    VLA_TRY_GOTO(vlai_wallx_fill(&m->config, &m->tokens, &shape, &batch.b, vlai_wallx_find_in_run, run, err), done);
    VLA_TRY_GOTO(vla_run_execute(run, err), done);
    out->loss = *(float *)vla_run_data(run, "loss");
done:
    vla_run_destroy(run);
    vla_plan_destroy(plan);
    vla_graph_destroy(g);
    vlai_arena_fini(&batch.arena);
    return status;
}

/* Clips by max_norm (0: not at all) and steps what has a status; `applied`: updates of those parameters before this one. */
static vla_status step_graph(const vlai_parity_model *m, const vla_gradient_status *gradients, double max_norm, int64_t step,
                             int64_t applied, double *norm, vla_error *err)
{
    vla_adamw_options options = vlai_settings_adamw(m->train);
    options.max_norm = max_norm;
    vla_graph *g;
    vla_plan *plan = NULL;
    vla_run *run = NULL;
    VLA_TRY(vla_graph_adamw(m->store, gradients, &options, &g, err));
    vla_status status = build_run(m, g, &plan, &run, err);
    double *hyper = status == VLA_OK ? vla_run_data(run, "hyper") : NULL;
    *norm = 0;
    if (hyper) { /* else no parameter has a gradient */
        vlai_settings_hyper(m->train, step, applied, hyper);
        *(float *)vla_run_data(run, "guard") = 0;
        status = vla_run_execute(run, err);
        *norm = *(double *)vla_run_data(run, "clip");
    }
    vla_run_destroy(run);
    vla_plan_destroy(plan);
    return status;
}

static vla_status gradient_norm(const vlai_parity_model *m, const vla_gradient_status *gradients, double *norm, vla_error *err)
{
    double sum = 0;
    VLA_TRY(vla_store_pull(m->store, VLA_STORE_GRADIENT, err));
    for (size_t i = 0; i < vla_store_count(m->store); i++) {
        vlai_arena arena = {0};
        int64_t n = vla_store_tensor(m->store, VLA_STORE_GRADIENT, i).elements;
        float *values = gradients[i] == VLA_GRADIENT_SOME ? vlai_arena_alloc(&arena, (size_t)n * sizeof *values + 1) : NULL;
        if (gradients[i] == VLA_GRADIENT_SOME && !values)
            return vlai_nomem(err, (size_t)n * sizeof *values);
        if (values)
            vlai_store_floats(m->store, VLA_STORE_GRADIENT, i, 0, n, values);
        for (int64_t e = 0; values && e < n; e++)
            sum += (double)values[e] * values[e];
        vlai_arena_fini(&arena);
    }
    *norm = sqrt(sum);
    return VLA_OK;
}

/* The reference leaves a parameter without a gradient alone, and its bias correction follows the parameter's own updates. A
 * graph knows one count, which is enough for training, where every step has the same gradients. Here a step may lack pictures
 * or actions: parameters of each count get a graph of their own, with the limit under which it finds the factor of the whole. */
static vla_status update(const vlai_parity_model *m, const vla_gradient_status *gradients, int64_t step, int64_t *updates, double *norm, vla_error *err)
{
    size_t count = vla_store_count(m->store);
    int64_t low = INT64_MAX, high = 0;
    double limit = vlai_settings_adamw(m->train).max_norm, factor = 0, own = 0;
    for (size_t i = 0; i < count; i++)
        if (gradients[i] != VLA_GRADIENT_NONE) {
            low = updates[i] < low ? updates[i] : low;
            high = updates[i] > high ? updates[i] : high;
        }
    vla_status status = VLA_OK;
    if (low >= high) {
        status = step_graph(m, gradients, limit, step, high, norm, err);
    } else {
        VLA_TRY(gradient_norm(m, gradients, norm, err));
        factor = limit > 0 && limit / (*norm + 1e-6) < 1 ? limit / (*norm + 1e-6) : 0;
        vla_gradient_status *part = vlai_calloc(count, sizeof *part);
        if (!part)
            return vlai_nomem(err, count * sizeof *part);
        for (int64_t k = low; k <= high && status == VLA_OK; k++) {
            bool any = false;
            for (size_t i = 0; i < count; i++) {
                part[i] = gradients[i] != VLA_GRADIENT_NONE && updates[i] == k ? gradients[i] : VLA_GRADIENT_NONE;
                any = any || part[i] != VLA_GRADIENT_NONE;
            }
            if (any)
                status = gradient_norm(m, part, &own, err);
            if (any && status == VLA_OK)
                status = step_graph(m, part, factor * (own + 1e-6), step, k, &own, err);
        }
        vlai_free(part);
    }
    for (size_t i = 0; i < count; i++)
        updates[i] += gradients[i] != VLA_GRADIENT_NONE;
    return status;
}

/* Tensors without a gradient must be known as such, and the exactly zero ones too. */
static vla_status compare_statuses(vlai_parity_case *c, const vlai_parity_model *m, const vla_gradient_status *status, vla_error *err)
{
    static const struct { const char *key; vla_gradient_status wanted; } lists[] = {{"no_grad", VLA_GRADIENT_NONE}, {"zero_grad", VLA_GRADIENT_ZERO}};
    for (int l = 0; l < 2; l++) {
        size_t i;
        json_t *name;
        json_array_foreach(json_object_get(c->meta, lists[l].key), i, name) {
            if (!json_is_string(name))
                return vlai_fail(err, VLA_E_FORMAT, "case.json: %s[%zu] is not the name of a tensor", lists[l].key, i);
            int64_t index = vla_store_find(m->store, json_string_value(name));
            if (index < 0)
                continue;
            /* A computed gradient of exact zeros is as good as a declared one. */
            bool good = status[index] == lists[l].wanted || (l == 1 && status[index] == VLA_GRADIENT_SOME);
            vlai_parity_report(c, lists[l].key, json_string_value(name), good ? 0 : 1, 0);
        }
    }
    return VLA_OK;
}

static vla_status compare_gradients(vlai_parity_case *c, const vlai_parity_model *m, const vla_gradient_status *status, vla_error *err)
{
    vlai_safetensors *grads;
    VLA_TRY(vlai_parity_open(c, "grads.safetensors", &grads, err));
    vla_status result = vlai_parity_check_complete(m, grads, "grads.safetensors", status, NULL, err);
    if (result == VLA_OK)
        result = vlai_parity_compare_store(c, m, grads, VLA_STORE_GRADIENT, err);
    vlai_safetensors_close(grads);
    return result == VLA_OK ? compare_statuses(c, m, status, err) : result;
}

static double loss_distance(vlai_parity_case *c, const char *label, double got, double want)
{
    float pair[2] = {(float)got, (float)want};
    return c->tape ? vlai_parity_distance(c, "step_loss", label, &pair[0], &pair[1], 1) : relative(got, want);
}

/* A case without optimiser steps: loss and gradients of its first batch. */
static vla_status run_backward(vlai_parity_case *c, vlai_parity_model *m, vla_gradient_status *status, vla_error *err)
{
    const json_t *batch = json_array_get(json_object_get(c->meta, "batches"), 0);
    vlai_arena arena = {0};
    micro_result micro = {.status = status};
    float *loss = NULL;
    vla_status result = run_micro(m, json_string_value(json_object_get(batch, "prefix")), 1, &micro, err);
    if (result == VLA_OK)
        result = vlai_parity_floats(&arena, m->outputs, "loss", &loss, NULL, err);
    if (loss)
        vlai_parity_report(c, "loss", "loss", loss_distance(c, "loss", micro.loss, (double)loss[0]),
                           m->numerics != VLA_FP32 ? bf16_step_bound(c, m, 0) : m->bound.loss);
    vlai_arena_fini(&arena);
    return result == VLA_OK ? compare_gradients(c, m, status, err) : result;
}

static vla_status need_number(const json_t *object, const char *key, const char *where, double *out, vla_error *err)
{
    const json_t *v = json_object_get(object, key);
    *out = json_number_value(v);
    return json_is_number(v) ? VLA_OK : vlai_fail(err, VLA_E_FORMAT, "%s: '%s' is not a number", where, key);
}

static vla_status run_steps(vlai_parity_case *c, vlai_parity_model *m, vla_error *err)
{
    const json_t *steps = json_object_get(c->meta, "steps"), *batches = json_object_get(c->meta, "batches");
    vla_gradient_status *status = vlai_calloc(vla_store_count(m->store) + 1, sizeof *status);
    int64_t *updates = vlai_calloc(vla_store_count(m->store) + 1, sizeof *updates);
    if (!status || !updates) {
        vlai_free(status);
        vlai_free(updates);
        return vlai_nomem(err, vla_store_count(m->store) * sizeof *updates);
    }
    vla_status result = json_array_size(steps) ? VLA_OK : run_backward(c, m, status, err);
    for (size_t s = 0; s < json_array_size(steps) && result == VLA_OK; s++) {
        const json_t *step = json_array_get(steps, s), *micros = json_object_get(step, "batches");
        int64_t n = (int64_t)json_array_size(micros);
        const json_t *wanted_norm = json_object_get(step, "grad_norm");
        double loss = 0, norm = 0, wanted_loss;
        char label[48], where[48];
        snprintf(where, sizeof where, "case.json: steps[%zu]", s);
        vla_store_zero_gradients(m->store);
        memset(status, 0, vla_store_count(m->store) * sizeof *status);
        result = need_number(step, "loss", where, &wanted_loss, err);
        if (result == VLA_OK && n == 0)
            result = vlai_fail(err, VLA_E_FORMAT, "%s: 'batches' is not a list of micro-batches", where);
        for (int64_t k = 0; k < n && result == VLA_OK; k++) {
            const json_t *entry = json_array_get(micros, (size_t)k);
            json_int_t number = json_integer_value(entry);
            if (!json_is_integer(entry) || number < 0 || number >= (json_int_t)json_array_size(batches)) {
                result = vlai_fail(err, VLA_E_FORMAT, "%s: batches[%lld] is not a number below %zu", where, (long long)k, json_array_size(batches));
                break;
            }
            micro_result micro = {.status = status};
            result = run_micro(m, json_string_value(json_object_get(json_array_get(batches, (size_t)number), "prefix")), n, &micro, err);
            loss += micro.loss / (double)n;
        }
        if (result == VLA_OK && s == 0)
            result = compare_gradients(c, m, status, err);
        if (result == VLA_OK)
            result = update(m, status, (int64_t)s, updates, &norm, err);
        if (result != VLA_OK)
            break;
        snprintf(label, sizeof label, "step %zu", s);
        bool bf16 = m->numerics != VLA_FP32;
        vlai_parity_report(c, "step_loss", label, loss_distance(c, label, loss, wanted_loss), bf16 ? bf16_step_bound(c, m, s) : m->bound.step_loss);
        /* Without a clip the reference computes no norm, and logs 0. */
        if (!bf16 && json_is_number(wanted_norm) && (m->train->optimizer.enable_grad_clip || json_number_value(wanted_norm) > 0))
            vlai_parity_report(c, "grad_norm", label, relative(norm, json_number_value(wanted_norm)), m->bound.grad_norm);
    }
    /* The reference's bf16 run may have been recorded without its weights. */
    bool weights = m->numerics == VLA_FP32 || json_object_get(json_object_get(c->meta, "bf16"), recorded(m, "after_fsdp", "after_ddp"));
    vlai_safetensors *after = NULL;
    if (result == VLA_OK && json_array_size(steps) && weights) {
        result = vlai_parity_open(c, "after.safetensors", &after, err);
        if (result == VLA_OK)
            result = vlai_parity_check_complete(m, after, "after.safetensors", NULL, updates, err);
        if (result == VLA_OK)
            result = vlai_parity_compare_store(c, m, after, VLA_STORE_WEIGHT, err);
    }
    vlai_safetensors_close(after);
    vlai_free(updates);
    vlai_free(status);
    return result;
}

vla_status vlai_parity_policy(vlai_parity_case *c, vla_error *err)
{
    const json_t *batches = json_object_get(c->meta, "batches"), *first = json_array_get(batches, 0);
    bool accumulate = false;
    size_t i;
    json_t *step;
    json_array_foreach(json_object_get(c->meta, "steps"), i, step)
        accumulate = accumulate || json_array_size(json_object_get(step, "batches")) > 1;
    vlai_parity_model m;
    vlai_parity_micro batch = {0};
    if (!first)
        return vlai_fail(err, VLA_E_FORMAT, "case.json: no batches");
    static const char *const lists[] = {"steps", "no_grad", "zero_grad", "ignore_rows"};
    for (int l = 0; l < 4; l++) {
        const json_t *list = json_object_get(c->meta, lists[l]);
        if (list && !json_is_array(list))
            return vlai_fail(err, VLA_E_FORMAT, "case.json: %s is not a list", lists[l]);
    }
    vla_status status = vlai_parity_model_open(c, true, accumulate, &m, err);
    if (status == VLA_OK && vlai_parity_no_bf16(c, &m)) {
        vlai_parity_model_close(&m);
        return VLA_OK;
    }
    if (status == VLA_OK)
        status = vlai_parity_micro_read(&m, json_string_value(json_object_get(first, "prefix")), true, &batch, err);
    if (status == VLA_OK && m.numerics == VLA_FP32)
        status = compare_activations(c, &m, &batch, json_object_get(first, "dataset_names"), err);
    if (status == VLA_OK)
        status = run_steps(c, &m, err);
    vlai_arena_fini(&batch.arena);
    vlai_parity_model_close(&m);
    return status;
}
