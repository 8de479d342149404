/* Reading model cases: configuration, weights, batches. Next: parity/policy.c. */
#include "base/bf16.h"
#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "optim/settings.h"
#include "parity/model.h"

#include <stdio.h>
#include <string.h>

static double tolerance(const vlai_parity_case *c, const char *key, double fallback)
{
    const json_t *v = json_object_get(json_object_get(c->meta, "tolerance"), key);
    return json_is_number(v) ? json_number_value(v) : fallback;
}

static int64_t token(const vlai_parity_case *c, const char *name)
{
    const json_t *v = json_object_get(json_object_get(c->meta, "tokens"), name);
    return json_is_integer(v) ? json_integer_value(v) : -1;
}

static vla_status open_if_there(const vlai_parity_case *c, const char *file, vlai_safetensors **out, vla_error *err)
{
    char path[4096];
    VLA_TRY(vlai_parity_path(c, file, path, sizeof path, err));
    *out = NULL;
    return vlai_is_file(path) ? vlai_safetensors_open(path, out, err) : VLA_OK;
}

/* The weights stand in model.safetensors or in several files with an index; the other files of the case are not weights. */
vla_status vlai_parity_weights(const vlai_parity_case *c, vlai_safetensors **out, vla_error *err)
{
    VLA_TRY(open_if_there(c, "model.safetensors", out, err));
    return *out ? VLA_OK : vlai_parity_open(c, "model.safetensors.index.json", out, err);
}

/* Tensors of the inputs that nothing here reads are named, so that none is passed over in silence. */
static void note_others(vlai_parity_case *c, const vlai_parity_model *m)
{
    static const char *const known[] = {
        "input_ids", "attention_mask", "moe_token_types", "labels", "image_grid_thw", "pixel_values", "dof_mask", "action_chunk", "noise",
        "sample_time", "flow_loss_mask", "proprioception", "agent_pos_mask", "frame_index", "normalizer_min", "normalizer_delta",
        "positional_masks.padding_positions", "positional_masks.valid_flow_action_positions", "positional_masks.ar_predict_token_positions",
        "positional_masks.ar_action_mask", "positional_masks.ar_visible",
    };
    size_t others = 0;
    for (size_t i = 0; i < vlai_safetensors_count(m->inputs); i++) {
        const char *name = vlai_safetensors_at(m->inputs, i)->name;
        bool read = false;
        for (size_t k = 0; k < sizeof known / sizeof *known && !read; k++) {
            size_t n = strlen(name), length = strlen(known[k]);
            read = n >= length && !strcmp(name + n - length, known[k]) && (n == length || name[n - length - 1] == '.');
        }
        if (!read && others++ == 0)
            snprintf(c->note, sizeof c->note, "inputs.safetensors: '%.100s' is not read", name);
    }
    size_t used = strlen(c->note);
    if (others > 1)
        snprintf(c->note + used, sizeof c->note - used, ", nor are %zu others", others - 1);
}

vla_plan_options vlai_parity_plan(const vlai_parity_model *m)
{
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    options.numerics = m->numerics;
    if (m->fuse) {
        options.recompute = VLA_RECOMPUTE_CHEAP;
        options.fuse = VLA_FUSE_MODEL | VLA_FUSE_VISUAL;
        options.visual_layers = (int)m->config.vision.depth + 1;
    }
    return options;
}

vla_status vlai_parity_model_open(vlai_parity_case *c, bool with_weights, bool accumulate, vlai_parity_model *m, vla_error *err)
{
    char path[4096];
    *m = (vlai_parity_model){.fuse = c->fuse};
    if (!vlai_numerics_parse(c->numerics, &m->numerics))
        return vlai_fail(err, VLA_E_INVALID, "numerics '%s'", c->numerics);
    m->bound.loss = tolerance(c, "loss", 1e-6);
    m->bound.act = tolerance(c, "act", 1e-5);
    m->bound.dact = tolerance(c, "dact", 1e-4);
    m->bound.grads = tolerance(c, "grads", 1e-4);
    m->bound.after = tolerance(c, "after", 1e-5);
    m->bound.after_median = tolerance(c, "after_median", 0);
    m->bound.step_loss = tolerance(c, "step_loss", 1e-5);
    m->bound.grad_norm = tolerance(c, "grad_norm", 1e-5);
    m->tokens = (vlai_wallx_tokens){token(c, "action"), token(c, "propri"), token(c, "pad")};
    VLA_TRY(vlai_parity_path(c, "config.json", path, sizeof path, err));
    VLA_TRY(vlai_wallx_config_load(path, &m->config, err));
    VLA_TRY(vlai_parity_path(c, "train.json", path, sizeof path, err));
    if (vlai_is_file(path)) {
        VLA_TRY(vlai_config_load(path, NULL, 0, &m->train, err));
        VLA_TRY(vlai_wallx_config_update(&m->config, m->train, true, err));
    } else if (with_weights) {
        return vlai_fail(err, VLA_E_NOT_FOUND, "%s: cannot open, wanted the options of the training step", path);
    }
    VLA_TRY(vlai_parity_open(c, "inputs.safetensors", &m->inputs, err));
    VLA_TRY(vlai_parity_open(c, "outputs.safetensors", &m->outputs, err));
    VLA_TRY(vla_executor_create_on(c->device, 0, &m->executor, err));
    if (!with_weights)
        return VLA_OK;
    note_others(c, m);
    VLA_TRY(vlai_parity_weights(c, &m->weights, err));
    const vlai_tensor_view *table = vlai_safetensors_find(m->weights, "model.embed_tokens.weight");
    if (table)
        m->config.vocab_size = table->shape[0];
    VLA_TRY(vla_store_create(&m->store, err));
    VLA_TRY(vlai_wallx_params(&m->config, vlai_settings_group, m->train, m->store, err));
    VLA_TRY(vla_store_allocate(m->store, m->numerics, accumulate ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN, err));
    VLA_TRY(vlai_wallx_load(&m->config, m->weights, m->store, NULL, err));
    VLA_TRY(vlai_parity_move(c, m->store, err));
    return vla_store_attach(m->store, m->executor, err);
}

void vlai_parity_model_close(vlai_parity_model *m)
{
    vla_store_destroy(m->store);
    vla_executor_destroy(m->executor);
    vlai_safetensors_close(m->weights);
    vlai_safetensors_close(m->outputs);
    vlai_safetensors_close(m->inputs);
    vlai_config_destroy(m->train);
}

vla_status vlai_parity_floats(vlai_arena *arena, const vlai_safetensors *st, const char *name, float **out,
                              const vlai_tensor_view **view, vla_error *err)
{
    const vlai_tensor_view *v = st ? vlai_safetensors_find(st, name) : NULL;
    *out = NULL;
    if (view)
        *view = v;
    if (!v)
        return VLA_OK;
    *out = vlai_arena_alloc(arena, (size_t)v->elements * sizeof **out + 1);
    if (!*out)
        return vlai_nomem(err, (size_t)v->elements * sizeof **out);
    return vlai_tensor_to_float(v, 0, v->elements, *out, err);
}

vla_status vlai_parity_result(vlai_arena *arena, const vla_run *run, const char *name, float **out, int64_t *elements,
                              vla_error *err)
{
    vla_tensor t = vla_run_tensor(run, name);
    *out = NULL;
    *elements = t.elements;
    if (!t.data)
        return VLA_OK;
    *out = vlai_arena_alloc(arena, (size_t)t.elements * sizeof **out + 1);
    if (!*out)
        return vlai_nomem(err, (size_t)t.elements * sizeof **out);
    for (int64_t i = 0; i < t.elements; i++)
        (*out)[i] = t.dtype == VLA_F32    ? ((const float *)t.data)[i]
                    : t.dtype == VLA_F64  ? (float)((const double *)t.data)[i]
                    : t.dtype == VLA_BF16 ? vlai_bf16_to_float(((const uint16_t *)t.data)[i])
                                          : (float)((const int32_t *)t.data)[i];
    return VLA_OK;
}

/* ---- Batches --------------------------------------------------------------------------------------------------- */

typedef struct {
    const vlai_parity_model *m;
    const char *prefix;
    vlai_arena *arena;
    vla_error *err;
    vla_status status;
} reader;

static const vlai_tensor_view *look(const reader *r, const char *name)
{
    char full[160];
    snprintf(full, sizeof full, "%s%s", r->prefix, name);
    return vlai_safetensors_find(r->m->inputs, full);
}

/* The tensor, when it is there and has that many elements in rows of the batch (its first dimension); otherwise NULL, with an
 * error when it has another shape, or is needed and missing. */
static const vlai_tensor_view *take(reader *r, const char *name, bool needed, int64_t rows, int64_t elements)
{
    const vlai_tensor_view *v = r->status == VLA_OK ? look(r, name) : NULL;
    if (r->status == VLA_OK && !v && needed)
        r->status = vlai_fail(r->err, VLA_E_NOT_FOUND, "inputs.safetensors: no tensor '%s%s'", r->prefix, name);
    if (v && (v->rank < 1 || v->shape[0] != rows || v->elements != elements)) {
        r->status = vlai_fail(r->err, VLA_E_SHAPE, "inputs.safetensors: '%s%s' has %lld elements in %lld rows, wanted %lld in %lld",
                              r->prefix, name, (long long)v->elements, v->rank ? (long long)v->shape[0] : 0LL, (long long)elements, (long long)rows);
        return NULL;
    }
    return v;
}

static const float *floats(reader *r, const char *name, bool needed, int64_t rows, int64_t elements)
{
    const vlai_tensor_view *v = take(r, name, needed, rows, elements);
    float *out = NULL;
    if (v)
        r->status = vlai_prefix(r->err, vlai_parity_floats(r->arena, r->m->inputs, v->name, &out, NULL, r->err), "inputs.safetensors");
    return out;
}

static const int32_t *int32s(reader *r, const char *name, bool needed, int64_t rows, int64_t elements)
{
    const vlai_tensor_view *v = take(r, name, needed, rows, elements);
    if (!v)
        return NULL;
    int64_t *wide = vlai_arena_alloc(r->arena, (size_t)v->elements * sizeof *wide + 1);
    int32_t *out = vlai_arena_alloc(r->arena, (size_t)v->elements * sizeof *out + 1);
    if (!wide || !out) {
        r->status = vlai_nomem(r->err, (size_t)v->elements * sizeof *wide);
        return NULL;
    }
    r->status = vlai_prefix(r->err, vlai_tensor_to_int64(v, 0, v->elements, wide, r->err), "inputs.safetensors: '%s'", v->name);
    for (int64_t i = 0; i < v->elements && r->status == VLA_OK; i++) {
        out[i] = (int32_t)wide[i];
        if (out[i] != wide[i])
            r->status = vlai_fail(r->err, VLA_E_INVALID, "inputs.safetensors: '%s' holds %lld at %lld, wanted 32 bits", v->name,
                                  (long long)wide[i], (long long)i);
    }
    return r->status == VLA_OK ? out : NULL;
}

static const uint8_t *flags(reader *r, const char *name, int64_t rows, int64_t elements)
{
    const int32_t *ints = int32s(r, name, false, rows, elements);
    if (!ints)
        return NULL;
    uint8_t *out = vlai_arena_alloc(r->arena, (size_t)elements + 1);
    if (!out) {
        r->status = vlai_nomem(r->err, (size_t)elements);
        return NULL;
    }
    for (int64_t i = 0; i < elements; i++)
        out[i] = ints[i] != 0;
    return out;
}

const float *vlai_parity_pixels(const vlai_parity_model *m, vlai_arena *arena, const char *prefix, int64_t *images, const int32_t **grid,
                                vla_status *status, vla_error *err)
{
    reader r = {m, prefix, arena, err, *status};
    const vlai_tensor_view *view = look(&r, "image_grid_thw");
    int64_t patches = 0, p = m->config.vision.patch_size;
    *images = view && view->rank > 0 ? view->shape[0] : 0;
    *grid = int32s(&r, "image_grid_thw", false, *images, 3 * *images);
    for (int64_t i = 0; *grid && i < *images; i++) {
        const int32_t *g = *grid + 3 * i;
        if (r.status == VLA_OK && (g[0] < 1 || g[1] < 1 || g[2] < 1 || g[0] > 4096 || g[1] > 4096 || g[2] > 4096))
            r.status = vlai_fail(err, VLA_E_INVALID, "inputs.safetensors: %simage_grid_thw[%lld] is %d x %d x %d, wanted 1 to 4096 each",
                                 prefix, (long long)i, g[0], g[1], g[2]);
        patches += (int64_t)g[0] * g[1] * g[2];
    }
    const float *values = floats(&r, "pixel_values", *images > 0, patches, patches * m->config.vision.in_channels * m->config.vision.temporal_patch_size * p * p);
    *status = r.status;
    return values;
}

/* Routing follows the ids; a batch that routes otherwise is none of this model's. */
static void check_routing(reader *r, const int32_t *ids, int64_t rows, int64_t tokens)
{
    const uint8_t *types = flags(r, "moe_token_types", rows, tokens);
    for (int64_t i = 0; types && ids && i < tokens && r->status == VLA_OK; i++)
        if (types[i] != (ids[i] == r->m->tokens.action))
            r->status = vlai_fail(r->err, VLA_E_INVALID, "inputs.safetensors: %smoe_token_types is %d at token %lld, whose id %d is%s tokens.action %lld",
                                  r->prefix, types[i], (long long)i, ids[i], types[i] ? " not" : "", (long long)r->m->tokens.action);
}

vla_status vlai_parity_micro_read(const vlai_parity_model *m, const char *prefix, bool training, vlai_parity_micro *out, vla_error *err)
{
    *out = (vlai_parity_micro){0};
    if (!prefix)
        return vlai_fail(err, VLA_E_FORMAT, "case.json: a batch has no prefix");
    reader r = {m, prefix, &out->arena, err, VLA_OK};
    vlai_wallx_batch *b = &out->b;
    const vlai_tensor_view *ids = look(&r, "input_ids"), *mask = look(&r, "dof_mask");
    if (!ids || ids->rank != 2 || ids->elements < 1)
        return vlai_fail(err, VLA_E_NOT_FOUND, "inputs.safetensors: no '%sinput_ids' of rank 2", prefix);
    bool actions_given = mask || look(&r, "action_chunk") || look(&r, "noise"); /* the reference may have received None */
    if (actions_given && (!mask || mask->rank != 3))
        return vlai_fail(err, VLA_E_NOT_FOUND, "inputs.safetensors: no '%sdof_mask' of rank 3", prefix);
    int64_t rows = ids->shape[0], tokens = ids->elements, d = m->config.action_dim;
    b->samples = rows;
    out->length = ids->shape[1];
    int64_t *offset = vlai_arena_alloc(&out->arena, (size_t)(b->samples + 1) * sizeof *offset);
    if (!offset)
        return vlai_nomem(err, (size_t)b->samples * sizeof *offset);
    for (int64_t s = 0; s <= b->samples; s++)
        offset[s] = s * out->length;
    b->offset = offset;
    b->ids = int32s(&r, "input_ids", true, rows, tokens);
    b->real = flags(&r, "attention_mask", rows, tokens);
    check_routing(&r, b->ids, rows, tokens);
    b->labels = int32s(&r, "labels", false, rows, tokens);
    b->pixel_values = vlai_parity_pixels(m, &out->arena, prefix, &b->images, &b->grid, &r.status, err);
    b->horizon = mask ? mask->shape[1] : 0;
    int64_t actions = rows * b->horizon, states = rows * m->config.propri_dim;
    b->dof_mask = floats(&r, "dof_mask", actions_given, rows, actions * d);
    b->action = floats(&r, "action_chunk", actions_given && training, rows, actions * d);
    b->noise = floats(&r, "noise", actions_given, rows, actions * d);
    b->time = floats(&r, "sample_time", actions_given && training, rows, rows);
    b->flow_loss_mask = floats(&r, "flow_loss_mask", false, rows, actions);
    b->state = floats(&r, "proprioception", false, rows, states);
    b->state_mask = floats(&r, "agent_pos_mask", b->state != NULL, rows, states);
    b->padding_positions = flags(&r, "positional_masks.padding_positions", rows, tokens);
    b->valid_flow_action_positions = flags(&r, "positional_masks.valid_flow_action_positions", rows, tokens);
    b->ar_predict_token_positions = flags(&r, "positional_masks.ar_predict_token_positions", rows, tokens);
    b->ar_action_mask = flags(&r, "positional_masks.ar_action_mask", rows, tokens);
    const vlai_tensor_view *visible = look(&r, "positional_masks.ar_visible");
    int64_t shown = 1; /* the reference's default */
    if (visible && r.status == VLA_OK)
        r.status = visible->elements == 1 ? vlai_tensor_to_int64(visible, 0, 1, &shown, err)
                                          : vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: '%s' is not one flag", visible->name);
    b->ar_visible = shown != 0;
    if (r.status != VLA_OK)
        vlai_arena_fini(&out->arena);
    return r.status;
}
