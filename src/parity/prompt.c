/* Golden cases of prompts and state strings: raw samples through the same contract and sampler that training uses. */
#include "parity/parity.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "data/sample.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ROWS = 256 };

/* State strings: options.groups[G].strings against g<G>.state and .mask. */

static vla_status state_string_group(vlai_parity_case *c, const vlai_safetensors *in, const json_t *options, vla_error *err)
{
    int64_t group, bins;
    VLA_TRY(vlai_json_need_int(options, "group", "case.json", &group, err));
    VLA_TRY(vlai_json_int(options, "bins", 256, "case.json", &bins, err));
    if (bins < 1 || bins > 1 << 20)
        return vlai_fail(err, VLA_E_INVALID, "case.json: %lld bins", (long long)bins);
    char name[64];
    snprintf(name, sizeof name, "g%lld.state", (long long)group);
    const vlai_tensor_view *states = vlai_safetensors_find(in, name);
    float *state = NULL, *mask = NULL;
    vla_status status = vlai_parity_rows(states, name, &state, err);
    snprintf(name, sizeof name, "g%lld.mask", (long long)group);
    const vlai_tensor_view *masks = vlai_safetensors_find(in, name);
    if (status == VLA_OK)
        status = vlai_parity_rows(masks, name, &mask, err);
    if (status == VLA_OK && masks->elements != states->elements)
        status = vlai_fail(err, VLA_E_SHAPE, "'%s' and the state differ in size", name);
    int64_t dims = status == VLA_OK ? states->shape[states->rank - 1] : 0;
    size_t i;
    json_t *want;
    if (status == VLA_OK)
        json_array_foreach(json_object_get(options, "strings"), i, want) {
            if ((int64_t)(i + 1) * dims > states->elements) {
                status = vlai_fail(err, VLA_E_SHAPE, "g%lld has fewer states than strings", (long long)group);
                break;
            }
            vlai_text got = {0};
            vlai_state_string(state + (int64_t)i * dims, mask + (int64_t)i * dims, dims, bins, &got);
            status = vlai_text_status(&got, err);
            bool same = json_is_string(want) && !strcmp(got.data ? got.data : "", json_string_value(want));
            vlai_text_fini(&got);
            if (status != VLA_OK)
                break;
            snprintf(name, sizeof name, "g%lld string %zu", (long long)group, i);
            vlai_parity_report(c, "strings", name, same ? 0 : 1, vlai_parity_bound(c, "strings"));
        }
    vlai_free(state);
    vlai_free(mask);
    return status;
}

vla_status vlai_parity_state_string(vlai_parity_case *c, vla_error *err)
{
    vlai_safetensors *in;
    VLA_TRY(vlai_parity_open(c, "inputs.safetensors", &in, err));
    vla_status status = VLA_OK;
    size_t i;
    json_t *options;
    json_array_foreach(json_object_get(json_object_get(c->meta, "options"), "groups"), i, options)
        if (status == VLA_OK)
            status = state_string_group(c, in, options, err);
    vlai_safetensors_close(in);
    return status;
}

/* Prompts. */

/* What one group needs. */
typedef struct prompt_group {
    int64_t number;
    const json_t *options;
    const vlai_safetensors *in, *want;
    const json_t *texts;               /* per sample {prompt, final}; NULL when the case has none */
    vlai_contract contract;
    vlai_tokenizer *tok;
    vlai_sampler *sampler;
    vlai_sample *samples[MAX_ROWS];
    size_t rows;
} prompt_group;

static const vlai_tensor_view *find(const vlai_safetensors *st, const prompt_group *g, const char *name)
{
    char full[256];
    snprintf(full, sizeof full, "g%lld.%s", (long long)g->number, name);
    return vlai_safetensors_find(st, full);
}

/* Statistics stand as tensors, or as one number for all dimensions of the layout. */
static vla_status group_norm(const prompt_group *g, const char *what, int64_t dims, vlai_norm *out, vla_error *err)
{
    double *bounds[2] = {NULL, NULL};
    vla_status status = VLA_OK;
    for (int k = 0; status == VLA_OK && k < 2; k++) {
        char name[64];
        const char *key = k ? "q99" : "q01";
        snprintf(name, sizeof name, "%s.%s", what, key);
        const vlai_tensor_view *t = find(g->in, g, name);
        if (t)
            dims = t->elements;
        bounds[k] = vlai_array(dims ? (size_t)dims : 1, sizeof(double));
        if (!bounds[k]) {
            status = vlai_nomem(err, (size_t)dims * sizeof(double));
            break;
        }
        double all;
        status = vlai_json_real(g->options, key, k ? 1 : -1, "case.json", &all, err);
        for (int64_t i = 0; status == VLA_OK && i < dims; i++) {
            float value = (float)all;
            if (t)
                status = vlai_tensor_to_float(t, i, 1, &value, err);
            bounds[k][i] = value;
        }
    }
    if (status == VLA_OK)
        status = vlai_norm_make(dims, bounds[0], bounds[1], NULL, NULL, out, err);
    vlai_free(bounds[0]);
    vlai_free(bounds[1]);
    return status;
}

static vla_status one_part(const char *name, int64_t dim, vlai_layout *out, vla_error *err)
{
    json_t *object = json_pack("{s:I}", name, (json_int_t)dim);
    if (!object)
        return vlai_nomem(err, 64);
    vla_status status = vlai_layout_parse(object, "case.json", out, err);
    json_decref(object);
    return status;
}

static vla_status group_contract(const vlai_parity_case *c, prompt_group *g, vla_error *err)
{
    const json_t *o = g->options;
    vlai_contract *k = &g->contract;
    int64_t state_dim, action_dim, action_tokens;
    const char *folder, *side;
    char path[4096];
    VLA_TRY(vlai_contract_init(k, err));
    VLA_TRY(vlai_json_need_int(o, "state_dim", "case.json", &state_dim, err));
    VLA_TRY(vlai_json_need_int(o, "action_dim", "case.json", &action_dim, err));
    VLA_TRY(vlai_json_need_int(o, "horizon", "case.json", &k->horizon, err));
    VLA_TRY(vlai_json_bool(o, "state_string", false, "case.json", &k->state_string, err));
    VLA_TRY(vlai_json_int(o, "state_bins", 256, "case.json", &k->state_bins, err));
    VLA_TRY(vlai_json_int(o, "max_length", 768, "case.json", &k->max_length, err));
    VLA_TRY(vlai_json_int(o, "action_token_count", 0, "case.json", &action_tokens, err));
    VLA_TRY(vlai_json_string(o, "padding_side", "left", "case.json", &side, err));
    VLA_TRY(vlai_json_string(o, "processor", "", "case.json", &folder, err));
    k->truncate = true;
    k->discrete = json_object_get(o, "action_tokenizer_calls") != NULL;
    VLA_TRY(one_part("state", state_dim, &k->pos, err));
    VLA_TRY(one_part("action", action_dim, &k->dof, err));
    VLA_TRY(group_norm(g, "state", state_dim, &k->state, err));
    VLA_TRY(group_norm(g, "action", action_dim, &k->action, err));
    const char *key;
    json_t *view;
    json_object_foreach(json_object_get(o, "cameras"), key, view) {
        const char *name = json_string_value(view);
        int64_t resolution;
        if (!name)
            return vlai_fail(err, VLA_E_FORMAT, "case.json: camera '%s' has no view", key);
        VLA_TRY(vlai_json_int(json_object_get(o, "resolution"), name, -1, "case.json", &resolution, err));
        VLA_TRY(vlai_contract_add_camera(k, key, name,
                                         json_string_value(json_object_get(json_object_get(o, "camera_name_mapping"), name)),
                                         resolution, err));
    }
    VLA_TRY(vlai_parity_path(c, folder, path, sizeof path, err));
    VLA_TRY(vlai_image_processor_read(path, &k->image, err));
    VLA_TRY(vlai_tokenizer_open(path, &g->tok, err));
    VLA_TRY(vlai_prompt_add_tokens(g->tok, action_tokens, NULL, 0, err));
    VLA_TRY(vlai_contract_take_tokens(k, g->tok, err));
    k->pads_left = !strcmp(side, "left") || (strcmp(side, "right") && vlai_tokenizer_pads_left(g->tok));
    return vlai_sampler_create(k, g->tok, &g->sampler, err);
}

static vla_status group_sample(vlai_parity_case *c, prompt_group *g, size_t i, vla_error *err)
{
    char name[192];
    float *state = NULL, *action = NULL;
    int32_t *tokens = NULL;
    vla_picture pictures[VLAI_MAX_CAMERAS];
    vla_status status;
    snprintf(name, sizeof name, "s%zu.state", i);
    const vlai_tensor_view *s = find(g->in, g, name);
    VLA_TRY_GOTO(vlai_parity_rows(s, name, &state, err), done);
    snprintf(name, sizeof name, "s%zu.action", i);
    const vlai_tensor_view *a = find(g->in, g, name);
    VLA_TRY_GOTO(vlai_parity_rows(a, name, &action, err), done);
    if (a->rank != 2 || a->shape[0] != g->contract.horizon) {
        status = vlai_fail(err, VLA_E_SHAPE, "'%s' is not (%lld, dims)", name, (long long)g->contract.horizon);
        goto done;
    }
    for (size_t k = 0; k < g->contract.camera_count; k++) {
        snprintf(name, sizeof name, "s%zu.image.%s", i, g->contract.cameras[k].key);
        const vlai_tensor_view *p = find(g->in, g, name);
        if (!p || p->rank != 3 || p->dtype != VLA_U8 || p->shape[2] != 3) {
            status = vlai_fail(err, VLA_E_SHAPE, "'%s' is not a (height, width, 3) picture of bytes", name);
            goto done;
        }
        pictures[k] = (vla_picture){.data = p->data, .width = p->shape[1], .height = p->shape[0]};
    }
    const json_t *call = json_array_get(json_object_get(g->options, "action_tokenizer_calls"), i);
    const json_t *ids = json_object_get(call, "ids");
    size_t count = json_array_size(ids);
    tokens = vlai_array(count ? count : 1, sizeof *tokens);
    if (!tokens) {
        status = vlai_nomem(err, count * sizeof *tokens);
        goto done;
    }
    for (size_t k = 0; k < count; k++)
        tokens[k] = (int32_t)json_integer_value(json_array_get(ids, k));
    const char *task = json_string_value(json_array_get(json_object_get(g->options, "tasks"), i));
    vlai_sample_input in = {
        .state = state,
        .state_dims = s->elements,
        .action = action,
        .action_dims = a->shape[1],
        .pictures = pictures,
        .task = task ? task : "",
        .action_tokens = tokens,
        .action_token_count = count,
        .frame = json_integer_value(json_array_get(json_object_get(g->options, "frame_index"), i)),
    };
    g->samples[i] = vlai_calloc(1, sizeof *g->samples[i]);
    if (!g->samples[i]) {
        status = vlai_nomem(err, sizeof *g->samples[i]);
        goto done;
    }
    VLA_TRY_GOTO(vlai_sampler_prepare(g->sampler, &in, g->samples[i], err), done);
    if (call) { /* the action tokenizer is handed the columns whose mask is 1 */
        int64_t columns = 0;
        for (int64_t k = 0; k < g->samples[i]->action_width; k++)
            columns += g->samples[i]->dof_mask[k] == 1;
        const json_t *shape = json_object_get(call, "shape");
        snprintf(name, sizeof name, "g%lld.s%zu", (long long)g->number, i);
        vlai_parity_report(c, "action_tokenizer_calls", name,
                           json_integer_value(json_array_get(shape, 0)) == g->contract.horizon &&
                                   json_integer_value(json_array_get(shape, 1)) == columns
                               ? 0
                               : 1,
                           0);
    }
done:
    vlai_free(state);
    vlai_free(action);
    vlai_free(tokens);
    return status;
}

static void compare_text(vlai_parity_case *c, const prompt_group *g, size_t i, size_t longest)
{
    const json_t *want = json_array_get(g->texts, i);
    const vlai_sample *s = g->samples[i];
    char name[64];
    const char *prompt = json_string_value(json_object_get(want, "prompt"));
    const char *final = json_string_value(json_object_get(want, "final"));
    snprintf(name, sizeof name, "g%lld.s%zu.prompt", (long long)g->number, i);
    if (prompt)
        vlai_parity_report(c, "text", name, strcmp(prompt, s->prompt.data) ? 1 : 0, vlai_parity_bound(c, "text"));
    if (!final)
        return;
    vlai_text got = {0};
    vlai_text_puts(&got, s->text.data);
    for (size_t k = s->action_token_count; s->discrete && k < longest; k++)
        vlai_text_puts(&got, "<|endoftext|>");
    snprintf(name, sizeof name, "g%lld.s%zu.final", (long long)g->number, i);
    vlai_parity_report(c, "text", name, got.data && !strcmp(final, got.data) ? 0 : 1, vlai_parity_bound(c, "text"));
    vlai_text_fini(&got);
}

static vla_status compare_integers(vlai_parity_case *c, const prompt_group *g, const char *name, const int64_t *got, int64_t n, vla_error *err)
{
    char full[96];
    snprintf(full, sizeof full, "g%lld.%s", (long long)g->number, name);
    return vlai_parity_integers(c, name, full, find(g->want, g, name), got, n, strcmp(name, "labels") != 0, err);
}

/* One float array of every sample, stacked. */
static vla_status compare_floats(vlai_parity_case *c, const prompt_group *g, const char *name,
                                 const float *(*of)(const vlai_sample *, int64_t *), vla_error *err)
{
    const vlai_tensor_view *t = find(g->want, g, name);
    if (!t)
        return VLA_OK;
    float *want;
    VLA_TRY(vlai_parity_rows(t, name, &want, err));
    double worst = 0;
    int64_t at = 0;
    for (size_t i = 0; i < g->rows; i++) {
        int64_t n;
        const float *got = of(g->samples[i], &n);
        double error = at + n <= t->elements ? vlai_parity_max_abs(got, want + at, n) : INFINITY;
        worst = error > worst ? error : worst;
        at += n;
    }
    vlai_free(want);
    vlai_parity_report(c, name, t->name, at == t->elements ? worst : INFINITY, vlai_parity_bound(c, name));
    return VLA_OK;
}

static const float *state_of(const vlai_sample *s, int64_t *n)
{
    *n = s->state_width;
    return s->state;
}

static const float *state_mask_of(const vlai_sample *s, int64_t *n)
{
    *n = s->state_width;
    return s->state_mask;
}

static const float *action_of(const vlai_sample *s, int64_t *n)
{
    *n = s->horizon * s->action_width;
    return s->action;
}

static const float *dof_mask_of(const vlai_sample *s, int64_t *n)
{
    *n = s->horizon * s->action_width;
    return s->dof_mask;
}

static vla_status compare_group(vlai_parity_case *c, prompt_group *g, vla_error *err)
{
    vlai_token_batch batch = {0};
    int64_t grids[MAX_ROWS * VLAI_MAX_CAMERAS * 3], frames[MAX_ROWS], *types = NULL;
    size_t grid_count = 0, longest = 0;
    vla_status status = vlai_sampler_collate(g->sampler, (const vlai_sample *const *)g->samples, g->rows, &batch, err);
    if (status != VLA_OK)
        return status;
    int64_t n = batch.rows * batch.width;
    types = vlai_array((size_t)n + 1, sizeof *types);
    if (!types) {
        status = vlai_nomem(err, (size_t)n * sizeof *types);
        goto done;
    }
    for (int64_t i = 0; i < n; i++)
        types[i] = batch.moe_token_types[i];
    for (size_t i = 0; i < g->rows; i++) {
        frames[i] = g->samples[i]->frame;
        longest = g->samples[i]->action_token_count > longest ? g->samples[i]->action_token_count : longest;
        for (size_t k = 0; k < g->samples[i]->picture_count; k++)
            for (int d = 0; d < 3; d++)
                grids[grid_count++] = g->samples[i]->pictures[k].grid[d];
    }
    for (size_t i = 0; i < g->rows; i++)
        compare_text(c, g, i, longest);
    VLA_TRY_GOTO(compare_integers(c, g, "input_ids", batch.input_ids, n, err), done);
    VLA_TRY_GOTO(compare_integers(c, g, "attention_mask", batch.attention_mask, n, err), done);
    VLA_TRY_GOTO(compare_integers(c, g, "labels", batch.labels, n, err), done);
    VLA_TRY_GOTO(compare_integers(c, g, "moe_token_types", types, n, err), done);
    VLA_TRY_GOTO(compare_integers(c, g, "image_grid_thw", grids, (int64_t)grid_count, err), done);
    VLA_TRY_GOTO(compare_integers(c, g, "frame_index", frames, (int64_t)g->rows, err), done);
    VLA_TRY_GOTO(compare_floats(c, g, "proprioception", state_of, err), done);
    VLA_TRY_GOTO(compare_floats(c, g, "agent_pos_mask", state_mask_of, err), done);
    VLA_TRY_GOTO(compare_floats(c, g, "action_chunk", action_of, err), done);
    VLA_TRY_GOTO(compare_floats(c, g, "dof_mask", dof_mask_of, err), done);
    const json_t *first = json_object_get(g->options, "first_action_token_id");
    if (first)
        vlai_parity_report(c, "first_action_token_id", "id",
                           vlai_sampler_tokens(g->sampler)->first_action_token == json_integer_value(first) ? 0 : 1, 0);
done:
    vlai_free(types);
    vlai_token_batch_fini(&batch);
    return status;
}

static vla_status run_group(vlai_parity_case *c, prompt_group *g, vla_error *err)
{
    VLA_TRY(group_contract(c, g, err));
    g->rows = json_array_size(json_object_get(g->options, "tasks"));
    if (g->rows > MAX_ROWS)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "a group of %zu samples; at most %d are compared", g->rows, MAX_ROWS);
    for (size_t i = 0; i < g->rows; i++)
        VLA_TRY(group_sample(c, g, i, err));
    return compare_group(c, g, err);
}

vla_status vlai_parity_prompt(vlai_parity_case *c, vla_error *err)
{
    vlai_safetensors *in = NULL, *want = NULL;
    json_t *texts = NULL, *options;
    size_t i;
    vla_status status;
    VLA_TRY_GOTO(vlai_parity_open(c, "inputs.safetensors", &in, err), done);
    VLA_TRY_GOTO(vlai_parity_open(c, "outputs.safetensors", &want, err), done);
    if (json_object_get(json_object_get(c->meta, "outputs"), "texts.json"))
        VLA_TRY_GOTO(vlai_parity_json(c, "texts.json", &texts, err), done);
    json_array_foreach(json_object_get(json_object_get(c->meta, "options"), "groups"), i, options) {
        prompt_group *g = vlai_calloc(1, sizeof *g);
        if (!g) {
            status = vlai_nomem(err, sizeof *g);
            break;
        }
        g->options = options;
        g->in = in;
        g->want = want;
        g->texts = json_array_get(texts, i);
        status = vlai_json_need_int(options, "group", "case.json", &g->number, err);
        if (status == VLA_OK)
            status = run_group(c, g, err);
        for (size_t k = 0; k < g->rows && k < MAX_ROWS; k++) {
            if (g->samples[k])
                vlai_sample_fini(g->samples[k]);
            vlai_free(g->samples[k]);
        }
        vlai_sampler_destroy(g->sampler);
        vlai_tokenizer_close(g->tok);
        vlai_contract_fini(&g->contract);
        vlai_free(g);
        if (status != VLA_OK)
            break;
    }
done:
    json_decref(texts);
    vlai_safetensors_close(in);
    vlai_safetensors_close(want);
    return status;
}
