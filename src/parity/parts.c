/* Golden cases of parts of Wall-X: the vision tower alone, rotary positions, mask builders. */
#include "base/bf16.h"
#include "base/fail.h"
#include "base/json.h"
#include "model/wallx_layout.h"
#include "model/wallx_mask.h"
#include "optim/settings.h"
#include "graph/graph.h"
#include "parity/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The larger distance; a NaN is the largest. */
static double farther(double worst, double distance)
{
    return isnan(distance) ? INFINITY : fmax(worst, distance);
}

static vla_status plan_and_run(vlai_parity_model *m, vla_graph *graph, vla_plan **plan, vla_run **run, vla_error *err)
{
    vla_plan_options options = vlai_parity_plan(m);
    VLA_TRY(vla_plan_build(graph, &options, plan, err));
    return vla_run_create(m->executor, *plan, m->store, run, err);
}

static vla_status compare(vlai_parity_case *c, vlai_arena *arena, const vlai_safetensors *st, const char *output,
                          const vla_run *run, const char *result, const char *quantity, double bound, vla_error *err)
{
    float *want, *got;
    int64_t n;
    const vlai_tensor_view *view;
    VLA_TRY(vlai_parity_floats(arena, st, output, &want, &view, err));
    if (!want)
        return VLA_OK;
    VLA_TRY(vlai_parity_result(arena, run, result, &got, &n, err));
    vlai_parity_report(c, quantity, output, got && n == view->elements ? vlai_parity_distance(c, quantity, output, got, want, n) : INFINITY, bound);
    return VLA_OK;
}

/* ---- Vision tower ----------------------------------------------------------------------------------------------- */

/* The integer tables that the tower reads, against the reference's. */
static vla_status compare_windows(vlai_parity_case *c, const vlai_parity_model *m, vlai_arena *arena, const vla_run *run, vla_error *err)
{
    float *want;
    const vlai_tensor_view *view;
    VLA_TRY(vlai_parity_floats(arena, m->outputs, "act.window_index", &want, &view, err));
    const int32_t *window = vla_run_data(run, "vision.window"), *rows = vla_run_data(run, "vision.rows.window"), *pos = vla_run_data(run, "vision.pos");
    double worst = want && view->elements == vla_run_tensor(run, "vision.window").elements ? 0 : INFINITY;
    for (int64_t i = 0; worst < INFINITY && i < view->elements; i++)
        worst = farther(worst, fabs(want[i] - (double)window[i]));
    if (want)
        vlai_parity_report(c, "windows", "act.window_index", worst, 0);
    VLA_TRY(vlai_parity_floats(arena, m->outputs, "act.cu_window_seqlens", &want, &view, err));
    int64_t patches = vla_run_tensor(run, "vision.qpos").elements, segments = 0;
    worst = 0;
    for (int64_t p = 0; want && p < patches; p = rows[2 * p + 1], segments++)
        worst = farther(worst, segments + 1 < view->elements ? fabs(want[segments] - (double)rows[2 * p]) + fabs(want[segments + 1] - (double)rows[2 * p + 1]) : INFINITY);
    if (want)
        vlai_parity_report(c, "windows", "act.cu_window_seqlens", segments + 1 == view->elements ? worst : INFINITY, 0);
    VLA_TRY(vlai_parity_floats(arena, m->outputs, "act.rot_angles", &want, &view, err));
    if (!want)
        return VLA_OK;
    /* Angles in picture order; ours stand in window order. */
    int64_t half = m->config.vision.head_dim / 4, width = 2 * half, group = m->config.vision.spatial_merge_size * m->config.vision.spatial_merge_size;
    worst = view->elements == patches * width ? 0 : INFINITY;
    for (int64_t p = 0; worst < INFINITY && p < patches; p++) {
        int64_t source = (int64_t)window[p / group] * group + p % group;
        for (int64_t j = 0; j < width; j++) {
            double angle = pos[(j >= half) * patches + p] * pow(m->config.vision.theta, -(double)(j % half) / (double)half);
            worst = farther(worst, fabs(angle - want[source * width + j]) / fmax(1, fabs(angle)));
        }
    }
    vlai_parity_report(c, "windows", "act.rot_angles", worst, 1e-6);
    return VLA_OK;
}

/* A store of the tower's tensors, filled from the case's weights in whatever spelling; the file may hold the others too. */
static vla_status tower_store(const vlai_parity_case *c, vlai_parity_model *m, vlai_arena *arena, vla_error *err)
{
    vlai_wallx_weight *weights = NULL;
    vlai_wallx_layout *layout = NULL;
    size_t all, count = 0;
    vla_status status;
    VLA_TRY_GOTO(vlai_wallx_weights(&m->config, &weights, &all, err), done);
    for (size_t i = 0; i < all; i++)
        if (!strncmp(weights[i].name, "visual.", 7))
            weights[count++] = weights[i];
    VLA_TRY_GOTO(vlai_wallx_layout_open(m->weights, weights, count, &layout, err), done);
    if (layout->report.missing.count || layout->report.reshaped.count)
        VLA_TRY_GOTO(vlai_wallx_layout_require(layout, err), done);
    VLA_TRY_GOTO(vla_store_create(&m->store, err), done);
    for (size_t i = 0; i < count; i++) {
        VLA_TRY_GOTO(vla_store_add(m->store, weights[i].name, VLA_COMPUTE, weights[i].rank, weights[i].shape, 0, err), done);
        VLA_TRY_GOTO(vlai_wallx_pad(&m->config, m->store, weights[i].name, weights[i].rank, weights[i].shape, err), done);
    }
    VLA_TRY_GOTO(vla_store_allocate(m->store, m->numerics, VLA_STORE_TRAIN, err), done);
    for (size_t i = 0; i < count; i++) {
        float *w = vlai_arena_alloc(arena, (size_t)weights[i].elements * sizeof *w + 1);
        status = w ? vlai_wallx_layout_read(layout, i, 0, weights[i].elements, w, err) : vlai_nomem(err, (size_t)weights[i].elements * sizeof *w);
        if (status != VLA_OK)
            goto done;
        vla_store_set_float(m->store, i, 0, weights[i].elements, w);
    }
    VLA_TRY_GOTO(vlai_parity_move(c, m->store, err), done);
    status = vla_store_attach(m->store, m->executor, err);
done:
    vlai_wallx_layout_close(layout);
    vlai_free(weights);
    return status;
}

vla_status vlai_parity_vision(vlai_parity_case *c, vla_error *err)
{
    vlai_parity_model m;
    vlai_arena arena = {0};
    vla_graph *g = NULL;
    vla_plan *plan = NULL;
    vla_run *run = NULL;
    vlai_safetensors *grads = NULL;
    const vlai_tensor_view *view;
    vla_gradient_status *gradients = NULL;
    vlai_wallx_shape shape;
    vlai_wallx_batch batch = {0};
    float *d_out;
    vla_status status = VLA_OK;
    VLA_TRY_GOTO(vlai_parity_model_open(c, false, false, &m, err), done);
    if (vlai_parity_no_bf16(c, &m))
        goto done;
    VLA_TRY_GOTO(vlai_parity_weights(c, &m.weights, err), done);
    batch.pixel_values = vlai_parity_pixels(&m, &arena, "", &batch.images, &batch.grid, &status, err);
    if (status == VLA_OK && !batch.images)
        status = vlai_fail(err, VLA_E_NOT_FOUND, "inputs.safetensors: no image_grid_thw");
    if (status != VLA_OK)
        goto done;
    VLA_TRY_GOTO(vlai_parity_floats(&arena, m.inputs, "d_out", &d_out, &view, err), done);
    VLA_TRY_GOTO(vlai_wallx_shape_plan(&m.config, 1, 0, 1, batch.images, batch.grid, &shape, err), done);
    if (!d_out || view->elements != shape.units * m.config.vision.out_hidden_size) {
        status = vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: 'd_out' has %lld elements, wanted %lld merged tokens x %lld",
                           d_out ? (long long)view->elements : 0LL, (long long)shape.units, (long long)m.config.vision.out_hidden_size);
        goto done;
    }
    shape.pixel_bytes = 0;
    VLA_TRY_GOTO(vlai_wallx_build_vision(&m.config, &shape, &g, err), done);
    VLA_TRY_GOTO(tower_store(c, &m, &arena, err), done);
    VLA_TRY_GOTO(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, err), done);
    for (size_t v = 0, n = g->n_gradient; v < n; v++)
        if (g->values[v].name && !strncmp(g->values[v].name, "act.", 4) && g->gradient[v] != VLA_NONE) {
            char name[128];
            snprintf(name, sizeof name, "d%s", g->values[v].name);
            vla_graph_name(g, vla_scale(g, g->gradient[v], 1.0), name);
        }
    gradients = vlai_calloc(vla_store_count(m.store) + 1, sizeof *gradients);
    if (!gradients) {
        status = vlai_nomem(err, vla_store_count(m.store) * sizeof *gradients);
        goto done;
    }
    VLA_TRY_GOTO(vla_graph_store_gradients(g, m.store, 0, gradients, err), done);
    vla_graph *taken = g;
    g = NULL;
    VLA_TRY_GOTO(plan_and_run(&m, taken, &plan, &run, err), done);
    vlai_wallx_fill_vision(&m.config, &shape, &batch, vlai_wallx_find_in_run, run);
    memcpy(vla_run_data(run, "d_out"), d_out, (size_t)vla_run_tensor(run, "d_out").elements * sizeof *d_out);
    VLA_TRY_GOTO(vla_run_execute(run, err), done);
    VLA_TRY_GOTO(compare_windows(c, &m, &arena, run, err), done);
    bool bf16 = m.numerics != VLA_FP32; /* of activations the reference noted the bf16 error of the last one only */
    /* The loss is linear in the tower's output, a sum of terms of both signs: it is off as far as the output is, relative to
     * its own typical size, and one draw of the reference may happen to lie nearer. */
    double bf16_loss = fmax(vlai_parity_bf16_bound(c, "loss", NULL), vlai_parity_bf16_bound(c, "out", NULL));
    if (!vlai_safetensors_find(m.outputs, "loss")) {
        status = vlai_fail(err, VLA_E_NOT_FOUND, "outputs.safetensors: no 'loss'");
        goto done;
    }
    VLA_TRY_GOTO(compare(c, &arena, m.outputs, "loss", run, "loss", "loss", bf16 ? bf16_loss : m.bound.loss, err), done);
    for (size_t i = 0; i < vlai_safetensors_count(m.outputs) && status == VLA_OK; i++) {
        const char *name = vlai_safetensors_at(m.outputs, i)->name;
        bool out = !strcmp(name, "act.vision.out");
        if (strstr(name, "act.vision.") && (!bf16 || out))
            status = compare(c, &arena, m.outputs, name, run, name, name[0] == 'd' ? "dact" : "act",
                             bf16 ? vlai_parity_bf16_bound(c, "out", NULL) : name[0] == 'd' ? m.bound.dact : m.bound.act, err);
    }
    if (status == VLA_OK)
        status = vlai_parity_open(c, "grads.safetensors", &grads, err);
    if (status == VLA_OK)
        status = vlai_parity_check_complete(&m, grads, "grads.safetensors", gradients, NULL, err);
    if (status == VLA_OK)
        status = vlai_parity_compare_store(c, &m, grads, VLA_STORE_GRADIENT, err);
done:
    vlai_safetensors_close(grads);
    vla_run_destroy(run);
    vla_plan_destroy(plan);
    vla_graph_destroy(g);
    vlai_free(gradients);
    vlai_arena_fini(&arena);
    vlai_parity_model_close(&m);
    return status;
}

/* ---- Rotary positions ------------------------------------------------------------------------------------------- */

/* One ulp of bf16, in at most one entry of a thousand: where a library's cosine differs in the last bit. */
static double bf16_distance(const float *got, const float *want, int64_t n)
{
    int64_t off = 0;
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i]) {
            if (!(fabs((double)got[i] - want[i]) <= fabs(want[i]) / 128))
                return INFINITY;
            off++;
        }
    return (double)off / (double)(n ? n : 1);
}

/* The graph of one axis's full tables, and of q and k rotated by the sections; `round`: tables in bf16. */
static vla_status rope_case(vlai_parity_case *c, vlai_parity_model *m, vlai_arena *arena, const int32_t *positions, int64_t n, bool round, vla_error *err)
{
    const vlai_wallx_config *cfg = &m->config;
    int half = (int)cfg->head_dim / 2;
    static const char *const tensors[] = {"q", "k"};
    vla_dtype type = round ? VLA_BF16 : VLA_PRECISE;
    vla_graph *g;
    VLA_TRY(vla_graph_create(&g, err));
    vla_value p = vla_graph_input(g, "positions", VLA_I32, 2, (int64_t[]){3, n});
    vla_rope_options o = {.base = cfg->rope_theta, .half = half, .axes = 3,
                          .sections = {cfg->mrope_section[0], cfg->mrope_section[1], cfg->mrope_section[2]}, .dtype = type};
    vla_rope_tables t = vla_rope_table(g, p, &o);
    if (round)
        t = (vla_rope_tables){vla_cast(g, t.cos, VLA_PRECISE), vla_cast(g, t.sin, VLA_PRECISE)};
    for (int i = 0; i < 2; i++) {
        int64_t heads = i ? cfg->num_key_value_heads : cfg->num_attention_heads;
        vla_value x = vla_graph_input(g, tensors[i], VLA_PRECISE, 2, (int64_t[]){n, heads * cfg->head_dim});
        vla_graph_name(g, vla_rope(g, x, t, (int)cfg->head_dim), i ? "k.out" : "q.out");
    }
    for (int axis = 0; axis < 3; axis++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", axis);
        vla_rope_options one = {.base = cfg->rope_theta, .half = half, .axes = 1, .sections = {half}, .dtype = type};
        vla_rope_tables full = vla_rope_table(g, vla_graph_input(g, name, VLA_I32, 2, (int64_t[]){1, n}), &one);
        snprintf(name, sizeof name, "cos%d", axis);
        vla_graph_name(g, full.cos, name);
        snprintf(name, sizeof name, "sin%d", axis);
        vla_graph_name(g, full.sin, name);
    }
    vla_plan *plan = NULL;
    vla_run *run = NULL;
    /* bf16 values need the widening executor, which the mixed mode has. */
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    options.numerics = round ? VLA_BF16_MASTER : VLA_FP32;
    vla_status status = vla_plan_build(g, &options, &plan, err);
    if (status == VLA_OK)
        status = vla_run_create(m->executor, plan, NULL, &run, err);
    float *x[2] = {NULL, NULL};
    for (int i = 0; i < 2 && status == VLA_OK; i++) {
        const vlai_tensor_view *view;
        int64_t wanted = vla_run_tensor(run, tensors[i]).elements;
        status = vlai_parity_floats(arena, m->inputs, tensors[i], &x[i], &view, err);
        if (status == VLA_OK && (!x[i] || view->elements != wanted))
            status = vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: '%s' has %lld elements, wanted %lld: tokens x heads x %lld", tensors[i],
                               x[i] ? (long long)view->elements : 0LL, (long long)wanted, (long long)cfg->head_dim);
    }
    if (status == VLA_OK) {
        memcpy(vla_run_data(run, "positions"), positions, (size_t)(3 * n) * sizeof *positions);
        for (int i = 0; i < 2; i++)
            if (x[i])
                memcpy(vla_run_data(run, tensors[i]), x[i], (size_t)vla_run_tensor(run, tensors[i]).elements * sizeof(float));
        for (int axis = 0; axis < 3; axis++) {
            char name[16];
            snprintf(name, sizeof name, "p%d", axis);
            memcpy(vla_run_data(run, name), positions + axis * n, (size_t)n * sizeof *positions);
        }
        status = vla_run_execute(run, err);
    }
    double bound = m->bound.act;
    for (int i = 0; i < 2 && status == VLA_OK; i++) {
        char output[32];
        snprintf(output, sizeof output, "act.%s%s", tensors[i], round ? ".bf16" : "");
        /* With one table entry an ulp off, one rotated row may be off by as much. */
        status = compare(c, arena, m->outputs, output, run, i ? "k.out" : "q.out", round ? "rotated_bf16" : "act", round ? 1e-3 : bound, err);
    }
    for (int s = 0; s < 2 && status == VLA_OK; s++) {
        char output[32];
        float *want = NULL, *got, *full = vlai_arena_alloc(arena, (size_t)(3 * n * cfg->head_dim) * sizeof *full);
        const vlai_tensor_view *view = NULL;
        int64_t elements;
        snprintf(output, sizeof output, "act.rope.%s%s", s ? "sin" : "cos", round ? ".bf16" : "");
        status = full ? vlai_parity_floats(arena, m->outputs, output, &want, &view, err) : vlai_nomem(err, (size_t)n);
        if (status == VLA_OK && want && view->elements != 3 * n * cfg->head_dim)
            status = vlai_fail(err, VLA_E_SHAPE, "outputs.safetensors: '%s' has %lld elements, wanted %lld", output, (long long)view->elements,
                               (long long)(3 * n * cfg->head_dim));
        for (int axis = 0; axis < 3 && status == VLA_OK; axis++) {
            char name[16];
            snprintf(name, sizeof name, "%s%d", s ? "sin" : "cos", axis);
            status = vlai_parity_result(arena, run, name, &got, &elements, err);
            for (int64_t i = 0; status == VLA_OK && i < n; i++)
                for (int h = 0; h < 2; h++)
                    memcpy(full + ((axis * n + i) * 2 + h) * half, got + i * half, (size_t)half * sizeof *full);
        }
        if (status == VLA_OK && want && round)
            vlai_parity_report(c, "tables_bf16", output, bf16_distance(full, want, 3 * n * cfg->head_dim), 1e-3);
        else if (status == VLA_OK && want)
            vlai_parity_report(c, "act", output, vlai_parity_rel_l2(full, want, 3 * n * cfg->head_dim), bound);
    }
    vla_run_destroy(run);
    vla_plan_destroy(plan);
    return status;
}

/* Tokens of a case without actions: ids, who of them are real, pictures. */
static vla_status rope_batch(const vlai_parity_model *m, vlai_arena *arena, vlai_wallx_batch *batch, int64_t *length, vla_error *err)
{
    const vlai_tensor_view *ids_view, *real_view;
    float *ids, *real;
    vla_status status = VLA_OK;
    VLA_TRY(vlai_parity_floats(arena, m->inputs, "input_ids", &ids, &ids_view, err));
    VLA_TRY(vlai_parity_floats(arena, m->inputs, "attention_mask", &real, &real_view, err));
    if (!ids || ids_view->rank != 2 || (real && real_view->elements != ids_view->elements))
        return vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: no input_ids of rank 2 with an attention_mask of the same size");
    int64_t n = ids_view->elements, units = 0, placeholders = 0, merge = m->config.vision.spatial_merge_size;
    int32_t *tokens = vlai_arena_alloc(arena, (size_t)n * sizeof *tokens + 1);
    uint8_t *mask = vlai_arena_alloc(arena, (size_t)n + 1);
    if (!tokens || !mask)
        return vlai_nomem(err, (size_t)n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)fminf(fmaxf(ids[i], -1), 1 << 30);
        mask[i] = !real || real[i] != 0;
        placeholders += mask[i] && tokens[i] == m->config.image_token_id;
    }
    *batch = (vlai_wallx_batch){.samples = ids_view->shape[0], .ids = tokens, .real = mask};
    *length = ids_view->shape[1];
    const vlai_tensor_view *view = vlai_safetensors_find(m->inputs, "image_grid_thw");
    float *values;
    VLA_TRY(vlai_parity_floats(arena, m->inputs, "image_grid_thw", &values, NULL, err));
    batch->images = values && view->rank > 0 ? view->shape[0] : 0;
    int32_t *grid = vlai_arena_alloc(arena, (size_t)(3 * batch->images + 1) * sizeof *grid);
    if (!grid)
        return vlai_nomem(err, (size_t)batch->images * 3 * sizeof *grid);
    for (int64_t i = 0; i < batch->images; i++) {
        bool good = view->elements == 3 * batch->images;
        for (int k = 0; k < 3 && good; k++) {
            good = values[3 * i + k] >= 1 && values[3 * i + k] <= 4096 && (k == 0 || (int64_t)values[3 * i + k] % merge == 0);
            grid[3 * i + k] = good ? (int32_t)values[3 * i + k] : 0;
        }
        if (!good)
            return vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: image_grid_thw[%lld] is not frames x multiples of %lld, 1 to 4096 each",
                             (long long)i, (long long)merge);
        units += (int64_t)grid[3 * i] * (grid[3 * i + 1] / merge) * (grid[3 * i + 2] / merge);
    }
    batch->grid = grid;
    if (units != placeholders)
        status = vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: %lld picture placeholders, but the %lld pictures have %lld merged tokens",
                           (long long)placeholders, (long long)batch->images, (long long)units);
    return status;
}

vla_status vlai_parity_rope(vlai_parity_case *c, vla_error *err)
{
    vlai_parity_model m;
    vlai_arena arena = {0};
    vla_status status;
    const vlai_tensor_view *view;
    float *want;
    vlai_wallx_batch batch;
    int64_t length = 0;
    VLA_TRY_GOTO(vlai_parity_model_open(c, false, false, &m, err), done);
    VLA_TRY_GOTO(rope_batch(&m, &arena, &batch, &length, err), done);
    int64_t samples = batch.samples, n = samples * length;
    int32_t *positions = vlai_arena_alloc(&arena, (size_t)(3 * n) * sizeof *positions + 1);
    if (!positions) {
        status = vlai_nomem(err, (size_t)n * 3 * sizeof *positions);
        goto done;
    }
    int64_t image = 0;
    for (int64_t s = 0; s < samples; s++)
        vlai_wallx_positions(&m.config, &batch, s * length, (s + 1) * length, &image, positions, n);
    VLA_TRY_GOTO(vlai_parity_floats(&arena, m.outputs, "act.position_ids", &want, &view, err), done);
    double worst = want && view->elements == 3 * n ? 0 : INFINITY;
    for (int64_t i = 0; worst < INFINITY && i < 3 * n; i++)
        worst = farther(worst, fabs(want[i] - (double)positions[i]));
    if (want)
        vlai_parity_report(c, "position_ids", "act.position_ids", worst, 0);
    VLA_TRY_GOTO(vlai_parity_floats(&arena, m.outputs, "act.rope_deltas", &want, &view, err), done);
    worst = want && view->elements == samples ? 0 : INFINITY;
    for (int64_t s = 0; worst < INFINITY && s < samples; s++) {
        int32_t top = 0;
        for (int axis = 0; axis < 3; axis++)
            for (int64_t i = s * length; i < (s + 1) * length; i++)
                if (batch.real[i] && positions[axis * n + i] > top)
                    top = positions[axis * n + i];
        worst = farther(worst, fabs(want[s] - (double)(top + 1 - length)));
    }
    if (want)
        vlai_parity_report(c, "rope_deltas", "act.rope_deltas", worst, 0);
    VLA_TRY_GOTO(rope_case(c, &m, &arena, positions, n, false, err), done);
    status = rope_case(c, &m, &arena, positions, n, true, err);
done:
    vlai_arena_fini(&arena);
    vlai_parity_model_close(&m);
    return status;
}

/* ---- Mask builders ---------------------------------------------------------------------------------------------- */

typedef struct {
    vlai_arena *arena;
    const vlai_safetensors *inputs;
    const char *prefix;
    vla_status status;
    vla_error *err;
    int64_t tokens; /* of the batch; 0 before the first list has said so */
} mask_reader;

static const uint8_t *marks(mask_reader *r, const char *name, const vlai_tensor_view **view)
{
    char full[128];
    float *values = NULL;
    const vlai_tensor_view *v = NULL;
    snprintf(full, sizeof full, "%s%s", r->prefix, name);
    if (r->status == VLA_OK)
        r->status = vlai_parity_floats(r->arena, r->inputs, full, &values, &v, r->err);
    if (view)
        *view = v;
    if (r->status == VLA_OK && v && r->tokens && v->elements != r->tokens)
        r->status = vlai_fail(r->err, VLA_E_SHAPE, "inputs.safetensors: '%s' has %lld elements, wanted %lld", full, (long long)v->elements, (long long)r->tokens);
    if (r->status != VLA_OK)
        return NULL;
    uint8_t *out = values ? vlai_arena_alloc(r->arena, (size_t)v->elements + 1) : NULL;
    for (int64_t i = 0; out && i < v->elements; i++)
        out[i] = values[i] != 0;
    return out;
}

static vla_status mask_case(vlai_parity_case *c, const json_t *entry, const vlai_safetensors *inputs, const vlai_safetensors *outputs, vla_error *err)
{
    vlai_arena arena = {0};
    const char *prefix = json_string_value(json_object_get(entry, "prefix"));
    if (!prefix)
        return vlai_fail(err, VLA_E_FORMAT, "case.json: an entry of 'cases' has no prefix");
    bool causal = json_is_true(json_object_get(entry, "causal_action_attention_mask"));
    mask_reader r = {&arena, inputs, prefix, VLA_OK, err, 0};
    const vlai_tensor_view *view;
    const uint8_t *actions = marks(&r, "moe_token_types", &view);
    r.tokens = actions ? view->elements : 0;
    const uint8_t *pads = marks(&r, "positional_masks.padding_positions", NULL);
    const uint8_t *valid = marks(&r, "positional_masks.valid_flow_action_positions", NULL);
    const uint8_t *predict = marks(&r, "positional_masks.ar_predict_token_positions", NULL), *ar = marks(&r, "positional_masks.ar_action_mask", NULL);
    if (r.status == VLA_OK && (!actions || view->rank != 2))
        r.status = vlai_fail(err, VLA_E_NOT_FOUND, "inputs.safetensors: no '%smoe_token_types' of rank 2", prefix);
    char name[128];
    float *want_pairs = NULL, *want_mask = NULL, *want_positions = NULL, *in_positions = NULL;
    const char *const wanted[] = {"startend_row_indices", "mask", "position_ids"};
    float **into[] = {&want_pairs, &want_mask, &want_positions};
    int64_t samples = r.status == VLA_OK ? view->shape[0] : 0, length = r.status == VLA_OK ? view->shape[1] : 0, n = samples * length;
    const int64_t sizes[] = {2 * n, n * length, 3 * n, 3 * n};
    for (int i = 0; i < 4 && r.status == VLA_OK; i++) { /* the last one: positions of the inputs */
        const vlai_tensor_view *v;
        snprintf(name, sizeof name, "%s%s", prefix, wanted[i < 3 ? i : 2]);
        r.status = vlai_parity_floats(&arena, i < 3 ? outputs : inputs, name, i < 3 ? into[i] : &in_positions, &v, err);
        if (r.status == VLA_OK && v && v->elements != sizes[i])
            r.status = vlai_fail(err, VLA_E_SHAPE, "%s: '%s' has %lld elements, wanted %lld", v->file, name, (long long)v->elements, (long long)sizes[i]);
    }
    int32_t *pairs = vlai_arena_alloc(&arena, (size_t)length * 2 * sizeof *pairs + 1), *positions = vlai_arena_alloc(&arena, (size_t)n * 3 * sizeof *positions + 1);
    uint8_t *dense = vlai_arena_alloc(&arena, (size_t)(length * length) + 1);
    if (r.status == VLA_OK && (!pairs || !dense || !positions))
        r.status = vlai_nomem(err, (size_t)(length * length));
    double off[3] = {0, 0, 0};
    for (int64_t i = 0; r.status == VLA_OK && in_positions && i < 3 * n; i++)
        positions[i] = (int32_t)in_positions[i];
    for (int64_t s = 0; s < samples && r.status == VLA_OK; s++) {
        int64_t at = s * length;
        vlai_wallx_mask_sample sample = {length, actions + at, pads ? pads + at : NULL, valid ? valid + at : NULL,
                                         predict ? predict + at : NULL, ar ? ar + at : NULL,
                                         !json_is_false(json_object_get(entry, "ar_visible"))};
        vlai_wallx_mask_pairs(causal, &sample, pairs);
        vlai_wallx_mask_dense(causal, &sample, dense);
        for (int64_t i = 0; want_pairs && i < 2 * length; i++)
            off[0] = farther(off[0], fabs(want_pairs[at * 2 + i] - (double)pairs[i]));
        for (int64_t i = 0; want_mask && i < length * length; i++)
            off[1] = farther(off[1], fabs((want_mask[at * length + i] != 0) - (double)dense[i]));
        if (predict)
            vlai_wallx_shift_positions(actions + at, predict + at, length, positions + at, n);
    }
    for (int64_t i = 0; r.status == VLA_OK && want_positions && i < 3 * n; i++)
        off[2] = farther(off[2], fabs(want_positions[i] - (double)positions[i]));
    float *const present[] = {want_pairs, want_mask, want_positions};
    if (r.status == VLA_OK && !want_pairs && !want_mask)
        r.status = vlai_fail(err, VLA_E_NOT_FOUND, "outputs.safetensors: neither '%sstartend_row_indices' nor '%smask'", prefix, prefix);
    for (int i = 0; i < 3 && r.status == VLA_OK; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, wanted[i]);
        if (present[i])
            vlai_parity_report(c, wanted[i], name, off[i], 0);
    }
    vlai_arena_fini(&arena);
    return r.status;
}

vla_status vlai_parity_attention_mask(vlai_parity_case *c, vla_error *err)
{
    vlai_safetensors *inputs = NULL, *outputs = NULL;
    vla_status status = vlai_parity_open(c, "inputs.safetensors", &inputs, err);
    if (status == VLA_OK)
        status = vlai_parity_open(c, "outputs.safetensors", &outputs, err);
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(c->meta, "cases"), i, entry)
        if (status == VLA_OK)
            status = mask_case(c, entry, inputs, outputs, err);
    vlai_safetensors_close(inputs);
    vlai_safetensors_close(outputs);
    return status;
}
