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
static vla_status open_weights(const vlai_parity_case *c, vlai_safetensors **out, vla_error *err)
{
    VLA_TRY(open_if_there(c, "model.safetensors", out, err));
    return *out ? VLA_OK : vlai_parity_open(c, "model.safetensors.index.json", out, err);
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
    }
    VLA_TRY(open_if_there(c, "inputs.safetensors", &m->inputs, err));
    VLA_TRY(open_if_there(c, "outputs.safetensors", &m->outputs, err));
    VLA_TRY(vla_executor_create_on(c->device, 0, &m->executor, err));
    if (!with_weights)
        return VLA_OK;
    VLA_TRY(open_weights(c, &m->weights, err));
    const vlai_tensor_view *table = vlai_safetensors_find(m->weights, "model.embed_tokens.weight");
    if (table)
        m->config.vocab_size = table->shape[0];
    VLA_TRY(vla_store_create(&m->store, err));
    VLA_TRY(vlai_wallx_params(&m->config, vlai_settings_group, m->train, m->store, err));
    VLA_TRY(vla_store_allocate(m->store, m->numerics, accumulate ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN, err));
    VLA_TRY(vlai_wallx_load(&m->config, m->weights, m->store, NULL, err));
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

void *vlai_parity_find(void *run, const char *name)
{
    return vla_run_data(run, name);
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

static const float *floats(reader *r, const char *name)
{
    char full[160];
    float *out = NULL;
    snprintf(full, sizeof full, "%s%s", r->prefix, name);
    if (r->status == VLA_OK)
        r->status = vlai_parity_floats(r->arena, r->m->inputs, full, &out, NULL, r->err);
    return out;
}

static const int32_t *int32s(reader *r, const char *name)
{
    const vlai_tensor_view *v = look(r, name);
    if (!v || r->status != VLA_OK)
        return NULL;
    int64_t *wide = vlai_arena_alloc(r->arena, (size_t)v->elements * sizeof *wide + 1);
    int32_t *out = vlai_arena_alloc(r->arena, (size_t)v->elements * sizeof *out + 1);
    if (!wide || !out) {
        r->status = vlai_nomem(r->err, (size_t)v->elements * sizeof *wide);
        return NULL;
    }
    r->status = vlai_tensor_to_int64(v, 0, v->elements, wide, r->err);
    for (int64_t i = 0; i < v->elements; i++)
        out[i] = (int32_t)wide[i];
    return out;
}

static const uint8_t *flags(reader *r, const char *name)
{
    const vlai_tensor_view *v = look(r, name);
    const int32_t *ints = int32s(r, name);
    if (!ints)
        return NULL;
    uint8_t *out = vlai_arena_alloc(r->arena, (size_t)v->elements + 1);
    if (!out) {
        r->status = vlai_nomem(r->err, (size_t)v->elements);
        return NULL;
    }
    for (int64_t i = 0; i < v->elements; i++)
        out[i] = ints[i] != 0;
    return out;
}

vla_status vlai_parity_micro_read(const vlai_parity_model *m, const char *prefix, vlai_parity_micro *out, vla_error *err)
{
    *out = (vlai_parity_micro){0};
    reader r = {m, prefix, &out->arena, err, VLA_OK};
    vlai_wallx_batch *b = &out->b;
    const vlai_tensor_view *ids = look(&r, "input_ids"), *grid = look(&r, "image_grid_thw"), *mask = look(&r, "dof_mask");
    if (!ids || ids->rank != 2)
        return vlai_fail(err, VLA_E_NOT_FOUND, "inputs.safetensors: no '%sinput_ids' of rank 2", prefix);
    if (!mask || mask->rank != 3)
        return vlai_fail(err, VLA_E_NOT_FOUND, "inputs.safetensors: no '%sdof_mask' of rank 3", prefix);
    b->samples = ids->shape[0];
    out->length = ids->shape[1];
    int64_t *offset = vlai_arena_alloc(&out->arena, (size_t)(b->samples + 1) * sizeof *offset);
    if (!offset)
        return vlai_nomem(err, (size_t)b->samples * sizeof *offset);
    for (int64_t s = 0; s <= b->samples; s++)
        offset[s] = s * out->length;
    b->offset = offset;
    b->ids = int32s(&r, "input_ids");
    b->real = flags(&r, "attention_mask");
    b->labels = int32s(&r, "labels");
    b->images = grid ? grid->shape[0] : 0;
    b->grid = int32s(&r, "image_grid_thw");
    b->pixel_values = floats(&r, "pixel_values");
    b->horizon = mask->shape[1];
    b->action = floats(&r, "action_chunk");
    b->dof_mask = floats(&r, "dof_mask");
    b->noise = floats(&r, "noise");
    b->time = floats(&r, "sample_time");
    b->flow_loss_mask = floats(&r, "flow_loss_mask");
    b->state = floats(&r, "proprioception");
    b->state_mask = floats(&r, "agent_pos_mask");
    b->padding_positions = flags(&r, "positional_masks.padding_positions");
    b->valid_flow_action_positions = flags(&r, "positional_masks.valid_flow_action_positions");
    b->ar_predict_token_positions = flags(&r, "positional_masks.ar_predict_token_positions");
    b->ar_action_mask = flags(&r, "positional_masks.ar_action_mask");
    const uint8_t *visible = flags(&r, "positional_masks.ar_visible");
    b->ar_visible = !visible || *visible; /* the reference's default */
    if (r.status != VLA_OK)
        vlai_arena_fini(&out->arena);
    return r.status;
}
