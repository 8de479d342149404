#include "data/contract.h"

#include "base/fail.h"
#include "base/json.h"
#include "text/prompt.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CONTRACT_FORMAT = 1 };

vla_status vlai_contract_init(vlai_contract *c, vla_error *err)
{
    (void)err;
    *c = (vlai_contract){.state_key = "observation.state", .action_key = "action", .state_bins = 256, .pads_left = true};
    vlai_image_processor_default(&c->image);
    return VLA_OK;
}

void vlai_contract_fini(vlai_contract *c)
{
    vlai_layout_fini(&c->pos);
    vlai_layout_fini(&c->dof);
    vlai_norm_fini(&c->state);
    vlai_norm_fini(&c->action);
    vlai_fast_close(c->fast);
    vlai_free(c->cameras);
    vlai_free(c->tokens);
    vlai_arena_fini(&c->arena);
    *c = (vlai_contract){0};
}

static vla_status keep(vlai_contract *c, const char *text, const char **out, vla_error *err)
{
    *out = vlai_arena_strdup(&c->arena, text);
    return *out ? VLA_OK : vlai_nomem(err, strlen(text) + 1);
}

vla_status vlai_contract_add_camera(vlai_contract *c, const char *key, const char *view, const char *display,
                                    int64_t resolution, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&c->cameras, &c->camera_capacity, c->camera_count, sizeof *c->cameras, err));
    vlai_contract_camera *camera = &c->cameras[c->camera_count];
    camera->resolution = resolution;
    VLA_TRY(keep(c, key, &camera->key, err));
    VLA_TRY(keep(c, view, &camera->view, err));
    VLA_TRY(keep(c, display ? display : view, &camera->display, err));
    c->camera_count++;
    return VLA_OK;
}

vla_status vlai_contract_set_keys(vlai_contract *c, const char *state, const char *action, vla_error *err)
{
    VLA_TRY(keep(c, state, &c->state_key, err));
    return keep(c, action, &c->action_key, err);
}

/* q01 and q99 of Euler-width columns become those of the 6D form by converting them as if they were poses. That is what the
 * reference does; `vla norm-stats` avoids it by converting the samples before it takes quantiles. */
static vla_status to_six(const vlai_layout *layout, vlai_norm *norm, vla_error *err)
{
    if (!layout->six || norm->dims != layout->euler)
        return VLA_OK;
    size_t n = (size_t)layout->width;
    float *in = vlai_array((size_t)norm->dims, sizeof *in), *out = vlai_array(n, sizeof *out);
    double *wide[2] = {vlai_array(n, sizeof(double)), vlai_array(n, sizeof(double))};
    vla_status status = in && out && wide[0] && wide[1] ? VLA_OK : vlai_nomem(err, n * sizeof(double));
    for (int k = 0; status == VLA_OK && k < 2; k++) {
        const double *from = k ? norm->q99 : norm->q01;
        for (int64_t i = 0; i < norm->dims; i++)
            in[i] = (float)from[i];
        vlai_layout_to_six(layout, in, norm->dims, out);
        for (size_t i = 0; i < n; i++)
            wide[k][i] = out[i];
    }
    if (status == VLA_OK) {
        vlai_norm fresh;
        status = vlai_norm_make((int64_t)n, wide[0], wide[1], NULL, NULL, &fresh, err);
        if (status == VLA_OK) {
            vlai_norm_fini(norm);
            *norm = fresh;
        }
    }
    vlai_free(in);
    vlai_free(out);
    vlai_free(wide[0]);
    vlai_free(wide[1]);
    return status;
}

vla_status vlai_contract_read_stats(vlai_contract *c, const char *path, vla_error *err)
{
    vlai_norm_fini(&c->state);
    vlai_norm_fini(&c->action);
    VLA_TRY(vlai_norm_read(path, c->state_key, &c->state, err));
    VLA_TRY(vlai_norm_read(path, c->action_key, &c->action, err));
    VLA_TRY(to_six(&c->pos, &c->state, err));
    return to_six(&c->dof, &c->action, err);
}

static vla_status take_token(vlai_contract *c, const char *text, int32_t id, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&c->tokens, &c->token_capacity, c->token_count, sizeof *c->tokens, err));
    c->tokens[c->token_count].id = id;
    VLA_TRY(keep(c, text, &c->tokens[c->token_count].text, err));
    c->token_count++;
    return VLA_OK;
}

vla_status vlai_contract_take_tokens(vlai_contract *c, const vlai_tokenizer *tok, vla_error *err)
{
    static const char *const names[] = {"<|endoftext|>",  "<|im_start|>", "<|im_end|>", "<|vision_start|>",
                                        "<|vision_end|>", "<|image_pad|>", "<|propri|>", "<|action|>"};
    c->token_count = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int32_t id = vlai_tokenizer_id(tok, names[i]);
        if (id < 0)
            return vlai_fail_hint(err, VLA_E_NOT_FOUND, "model.processor_path must hold a Qwen2.5-VL tokenizer",
                                  "%s has no token '%s'", vlai_tokenizer_name(tok), names[i]);
        VLA_TRY(take_token(c, names[i], id, err));
    }
    int32_t first = vlai_tokenizer_id(tok, "<|action_token_0|>");
    if (first >= 0)
        VLA_TRY(take_token(c, "<|action_token_0|>", first, err));
    c->vocabulary = vlai_tokenizer_size(tok);
    return VLA_OK;
}

vla_status vlai_contract_check_tokens(const vlai_contract *c, const vlai_tokenizer *tok, vla_error *err)
{
    vlai_text list = {0};
    for (size_t i = 0; i < c->token_count; i++) {
        int32_t id = vlai_tokenizer_id(tok, c->tokens[i].text);
        if (id != c->tokens[i].id)
            vlai_text_printf(&list, "%s'%s' is %d, not %d", list.size ? "; " : "", c->tokens[i].text, id, c->tokens[i].id);
    }
    if (vlai_tokenizer_size(tok) != c->vocabulary)
        vlai_text_printf(&list, "%s%lld tokens, not %lld", list.size ? "; " : "", (long long)vlai_tokenizer_size(tok),
                         (long long)c->vocabulary);
    vla_status status = list.size ? vlai_fail_hint(err, VLA_E_INVALID, "use the processor that the model was trained with",
                                                   "%s differs from the model's contract: %s", vlai_tokenizer_name(tok),
                                                   list.data ? list.data : "")
                                  : VLA_OK;
    vlai_text_fini(&list);
    return status;
}

int64_t vlai_contract_state_width(const vlai_contract *c)
{
    return c->pos.total;
}

int64_t vlai_contract_action_width(const vlai_contract *c)
{
    return c->dof.total;
}

/* JSON. */

static json_t *numbers_json(const double values[3])
{
    return json_pack("[f,f,f]", values[0], values[1], values[2]);
}

json_t *vlai_contract_to_json(const vlai_contract *c)
{
    json_t *cameras = json_array(), *tokens = json_object();
    for (size_t i = 0; i < c->camera_count; i++)
        json_array_append_new(cameras, json_pack("{s:s, s:s, s:s, s:I}", "key", c->cameras[i].key, "view", c->cameras[i].view,
                                                 "name", c->cameras[i].display, "resolution",
                                                 (json_int_t)c->cameras[i].resolution));
    for (size_t i = 0; i < c->token_count; i++)
        json_object_set_new(tokens, c->tokens[i].text, json_integer(c->tokens[i].id));
    json_t *state = json_pack("{s:s, s:o, s:o}", "key", c->state_key, "layout", vlai_layout_to_json(&c->pos), "statistics",
                              vlai_norm_to_json(&c->state));
    json_t *action = json_pack("{s:s, s:I, s:b, s:o, s:o}", "key", c->action_key, "horizon", (json_int_t)c->horizon,
                               "mask_padded", c->mask_padded, "layout", vlai_layout_to_json(&c->dof), "statistics",
                               vlai_norm_to_json(&c->action));
    json_t *prompt = json_pack("{s:b, s:I, s:b, s:I, s:b, s:s, s:s}", "state_string", c->state_string, "state_bins",
                               (json_int_t)c->state_bins, "discrete_actions", c->discrete, "max_length",
                               (json_int_t)c->max_length, "truncate", c->truncate, "padding_side",
                               c->pads_left ? "left" : "right", "picture_order", c->feature_order ? "features" : "mapping");
    if (c->fast && json_object_set_new(prompt, "action_tokens", vlai_fast_to_json(c->fast))) {
        json_decref(prompt);
        prompt = NULL;
    }
    const vlai_image_processor *p = &c->image;
    json_t *image = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "resize", "bicubic, Pillow 12", "patch_size",
                              (json_int_t)p->patch, "temporal_patch_size", (json_int_t)p->temporal, "merge_size",
                              (json_int_t)p->merge, "min_pixels", (json_int_t)p->rule.min_pixels, "max_pixels",
                              (json_int_t)p->rule.max_pixels, "image_mean", numbers_json(p->mean), "image_std",
                              numbers_json(p->std));
    /* json_pack takes the references even when it fails; a NULL part makes the whole NULL. */
    return json_pack("{s:i, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:I}", "format", CONTRACT_FORMAT, "policy", "wallx", "cameras",
                     cameras, "state", state, "action", action, "prompt", prompt, "image", image, "tokens", tokens,
                     "vocabulary", (json_int_t)c->vocabulary);
}

static vla_status need_string(const json_t *object, const char *key, const char *where, const char **out, vla_error *err)
{
    json_t *value;
    VLA_TRY(vlai_json_need(object, key, JSON_STRING, where, &value, err));
    *out = json_string_value(value);
    return VLA_OK;
}

static vla_status read_vector(vlai_contract *c, const json_t *object, const char *where, const char **key,
                              vlai_layout *layout, vlai_norm *norm, vla_error *err)
{
    const char *name;
    json_t *part, *statistics;
    VLA_TRY(need_string(object, "key", where, &name, err));
    VLA_TRY(keep(c, name, key, err));
    VLA_TRY(vlai_json_need(object, "layout", JSON_OBJECT, where, &part, err));
    VLA_TRY(vlai_layout_parse(part, where, layout, err));
    VLA_TRY(vlai_json_need(object, "statistics", JSON_OBJECT, where, &statistics, err));
    json_t *wrapped = json_pack("{s:O}", name, statistics);
    if (!wrapped)
        return vlai_nomem(err, 64);
    vla_status status = vlai_norm_parse(wrapped, name, where, norm, err);
    json_decref(wrapped);
    return status;
}

static vla_status read_contract(const json_t *object, const char *where, vlai_contract *c, vla_error *err)
{
    int64_t format;
    VLA_TRY(vlai_json_need_int(object, "format", where, &format, err));
    if (format != CONTRACT_FORMAT)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: contract format %lld; this program reads %d", where,
                         (long long)format, CONTRACT_FORMAT);
    json_t *cameras, *state, *action, *prompt, *image, *tokens, *entry;
    VLA_TRY(vlai_json_need(object, "cameras", JSON_ARRAY, where, &cameras, err));
    VLA_TRY(vlai_json_need(object, "state", JSON_OBJECT, where, &state, err));
    VLA_TRY(vlai_json_need(object, "action", JSON_OBJECT, where, &action, err));
    VLA_TRY(vlai_json_need(object, "prompt", JSON_OBJECT, where, &prompt, err));
    VLA_TRY(vlai_json_need(object, "image", JSON_OBJECT, where, &image, err));
    VLA_TRY(vlai_json_need(object, "tokens", JSON_OBJECT, where, &tokens, err));
    size_t i;
    json_array_foreach(cameras, i, entry) {
        const char *key, *view, *name;
        int64_t resolution;
        VLA_TRY(need_string(entry, "key", where, &key, err));
        VLA_TRY(need_string(entry, "view", where, &view, err));
        VLA_TRY(need_string(entry, "name", where, &name, err));
        VLA_TRY(vlai_json_need_int(entry, "resolution", where, &resolution, err));
        VLA_TRY(vlai_contract_add_camera(c, key, view, name, resolution, err));
    }
    VLA_TRY(read_vector(c, state, where, &c->state_key, &c->pos, &c->state, err));
    VLA_TRY(read_vector(c, action, where, &c->action_key, &c->dof, &c->action, err));
    VLA_TRY(vlai_json_need_int(action, "horizon", where, &c->horizon, err));
    VLA_TRY(vlai_json_bool(action, "mask_padded", false, where, &c->mask_padded, err));
    const char *side, *order;
    VLA_TRY(vlai_json_bool(prompt, "state_string", false, where, &c->state_string, err));
    VLA_TRY(vlai_json_need_int(prompt, "state_bins", where, &c->state_bins, err));
    VLA_TRY(vlai_json_bool(prompt, "discrete_actions", false, where, &c->discrete, err));
    VLA_TRY(vlai_json_need_int(prompt, "max_length", where, &c->max_length, err));
    VLA_TRY(vlai_json_bool(prompt, "truncate", false, where, &c->truncate, err));
    VLA_TRY(vlai_json_string(prompt, "padding_side", "left", where, &side, err));
    c->pads_left = strcmp(side, "right") != 0;
    VLA_TRY(vlai_json_string(prompt, "picture_order", "mapping", where, &order, err));
    c->feature_order = !strcmp(order, "features");
    VLA_TRY(vlai_image_processor_parse(image, where, &c->image, err));
    const char *text;
    json_object_foreach(tokens, text, entry) {
        int64_t id = json_integer_value(entry);
        if (!json_is_integer(entry) || id < 0 || id > INT32_MAX)
            return vlai_fail(err, VLA_E_FORMAT, "%s: token '%.60s' has no id", where, text);
        VLA_TRY(take_token(c, text, (int32_t)id, err));
    }
    VLA_TRY(vlai_json_need_int(object, "vocabulary", where, &c->vocabulary, err));
    if (c->horizon < 1 || c->horizon > 4096 || c->state_bins < 1 || c->state_bins > 65536)
        return vlai_fail(err, VLA_E_INVALID, "%s: horizon %lld (1 to 4096), state_bins %lld (1 to 65536)", where,
                         (long long)c->horizon, (long long)c->state_bins);
    return VLA_OK;
}

vla_status vlai_contract_from_json(const json_t *object, const char *where, vlai_contract *out, vla_error *err)
{
    VLA_TRY(vlai_contract_init(out, err));
    vla_status status = read_contract(object, where, out, err);
    if (status != VLA_OK)
        vlai_contract_fini(out);
    return status;
}

/* Comparison. */

static void put_value(const json_t *value, vlai_text *out)
{
    if (!value) {
        vlai_text_puts(out, "nothing");
        return;
    }
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9));
    if (text && strlen(text) > 80)
        vlai_text_printf(out, "%.77s...", text);
    else
        vlai_text_puts(out, text ? text : "?");
    void (*release)(void *) = NULL; /* jansson's own, which may have been replaced */
    json_get_alloc_funcs(NULL, &release);
    release(text);
}

static bool same_order(const json_t *a, const json_t *b)
{
    void *i = json_object_iter((json_t *)a), *k = json_object_iter((json_t *)b);
    for (; i && k; i = json_object_iter_next((json_t *)a, i), k = json_object_iter_next((json_t *)b, k))
        if (strcmp(json_object_iter_key(i), json_object_iter_key(k)))
            return false;
    return !i && !k;
}

static void differences(const json_t *a, const json_t *b, const char *path, int depth, vlai_text *out)
{
    char inner[512];
    if (depth < 8 && json_is_object(a) && json_is_object(b)) {
        const char *key;
        json_t *value;
        size_t before = out->size;
        json_object_foreach((json_t *)a, key, value) {
            snprintf(inner, sizeof inner, "%s%s%s", path, *path ? "." : "", key);
            differences(value, json_object_get(b, key), inner, depth + 1, out);
        }
        json_object_foreach((json_t *)b, key, value) {
            snprintf(inner, sizeof inner, "%s%s%s", path, *path ? "." : "", key);
            if (!json_object_get(a, key))
                differences(NULL, value, inner, depth + 1, out);
        }
        if (before == out->size && !same_order(a, b))
            vlai_text_printf(out, "\n%s: the same keys in another order", path);
        return;
    }
    if (depth < 8 && json_is_array(a) && json_is_array(b) && json_array_size(a) == json_array_size(b)) {
        for (size_t i = 0; i < json_array_size(a); i++) {
            snprintf(inner, sizeof inner, "%s[%zu]", path, i);
            differences(json_array_get(a, i), json_array_get(b, i), inner, depth + 1, out);
        }
        return;
    }
    if (a && b && (json_equal(a, b) || (json_is_number(a) && json_is_number(b) && json_number_value(a) == json_number_value(b))))
        return;
    vlai_text_printf(out, "\n%s: ", path);
    put_value(a, out);
    vlai_text_puts(out, " against ");
    put_value(b, out);
}

vla_status vlai_contract_match(const json_t *a, const json_t *b, const char *a_name, const char *b_name, vla_error *err)
{
    vlai_text list = {0};
    differences(a, b, "", 0, &list);
    vla_status status = vlai_text_status(&list, err);
    if (status == VLA_OK && list.size)
        status = vlai_fail_hint(err, VLA_E_INVALID, "use the settings the model was trained with, or train with these",
                                "the contracts of %s and %s differ:%s", a_name, b_name, list.data);
    vlai_text_fini(&list);
    return status;
}
