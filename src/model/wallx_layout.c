/* Finding the tensors of the fused layout in a stored file, whatever its spelling, tensor by tensor. */
#include "model/wallx_layout.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/text.h"

#include <stdio.h>
#include <string.h>

enum { NAME_SIZE = 192 };

/* ---- spellings ---- */

/* Rewrites the first `from` in `name`; false when it does not occur. */
static bool rewrite(char *name, const char *from, const char *to)
{
    char *at = strstr(name, from);
    if (!at)
        return false;
    char rest[NAME_SIZE];
    snprintf(rest, sizeof rest, "%s", at + strlen(from));
    snprintf(at, NAME_SIZE - (size_t)(at - name), "%s%s", to, rest);
    return true;
}

/* The name that plain Qwen2.5-VL gives to a tensor of expert 0; unchanged for the tower and the embedding. */
static bool qwen_name(char *name)
{
    static const char *const rules[][2] = {
        {".moe.experts.0.", ".mlp."},
        {"_proj_experts.0.", "_proj."},
        {".input_layernorms.0.", ".input_layernorm."},
        {".post_attention_layernorms.0.", ".post_attention_layernorm."},
        {"model.norms.0.", "model.norm."},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rewrite(name, rules[i][0], rules[i][1]))
            return true;
    return false;
}

/* The prefixes of later transformers versions. */
static bool newer_prefix(char *name)
{
    char old[NAME_SIZE];
    snprintf(old, sizeof old, "%s", name);
    if (!strncmp(old, "model.", 6))
        snprintf(name, NAME_SIZE, "model.language_model.%.150s", old + 6);
    else if (!strncmp(old, "visual.", 7))
        snprintf(name, NAME_SIZE, "model.%.180s", old);
    else
        return false;
    return true;
}

/* Looks a wall name up in each of the four spellings. */
static const vlai_tensor_view *find_spelled(const vlai_safetensors *st, const char *wall, bool *renamed)
{
    for (int spelling = 0; spelling < 4; spelling++) {
        char name[NAME_SIZE];
        snprintf(name, sizeof name, "%s", wall);
        if (((spelling & 1) && !qwen_name(name)) || ((spelling & 2) && !newer_prefix(name)))
            continue;
        const vlai_tensor_view *view = vlai_safetensors_find(st, name);
        if (view) {
            *renamed = spelling != 0;
            return view;
        }
    }
    return NULL;
}

vla_status vlai_wallx_stored_sizes(const vlai_safetensors *st, int64_t *vocab, int64_t *action_dim, int64_t *propri_dim,
                                   vla_error *err)
{
    bool renamed;
    /* With proj_with_mask both projections read values and mask side by side; w1 shows it, as its values are the channels. */
    const vlai_tensor_view *in = find_spelled(st, "action_preprocessor.w1.weight", &renamed);
    const vlai_tensor_view *back = find_spelled(st, "action_preprocessor.action_proj_back.weight", &renamed);
    bool unmasked = in && back && in->rank == 2 && back->rank == 2 && in->shape[1] == back->shape[0];
    const struct {
        const char *name;
        int axis, divisor;
        int64_t *out;
    } rows[] = {
        {"model.embed_tokens.weight", 0, 1, vocab},
        {"action_preprocessor.action_proj_back.weight", 0, 1, action_dim},
        {"action_preprocessor.propri_proj.weight", 1, unmasked ? 1 : 2, propri_dim},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const vlai_tensor_view *view = rows[i].out ? find_spelled(st, rows[i].name, &renamed) : NULL;
        if (!view)
            continue;
        if (view->rank != 2 || view->shape[rows[i].axis] < rows[i].divisor || view->shape[rows[i].axis] > 1 << 28)
            return vlai_fail(err, VLA_E_SHAPE, "%s: tensor '%s' has rank %d and %lld rows, wanted a matrix", view->file,
                             view->name, view->rank, (long long)view->shape[0]);
        *rows[i].out = view->shape[rows[i].axis] / rows[i].divisor;
    }
    return VLA_OK;
}

/* ---- the report ---- */

static vla_status add_name(vlai_wallx_names *list, const char *name, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&list->names, &list->capacity, list->count, sizeof *list->names, err));
    list->names[list->count++] = name;
    return VLA_OK;
}

/* Adds a copy that the layout owns. */
static vla_status add_owned(vlai_wallx_layout *l, vlai_wallx_names *list, const char *text, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&l->owned, &l->owned_capacity, l->owned_count, sizeof *l->owned, err));
    char *copy = vlai_strdup(text);
    if (!copy)
        return vlai_nomem(err, strlen(text));
    l->owned[l->owned_count++] = copy;
    return add_name(list, copy, err);
}

static void put_shape(vlai_text *text, const int64_t *shape, int rank)
{
    vlai_text_puts(text, "[");
    for (int d = 0; d < rank; d++)
        vlai_text_printf(text, "%s%lld", d ? ", " : "", (long long)shape[d]);
    vlai_text_puts(text, "]");
}

/* The stored tensor must have the weight's shape, with `rows` as its first dimension. */
static vla_status check_shape(vlai_wallx_layout *l, const vlai_wallx_weight *w, int64_t rows, const vlai_tensor_view *view,
                              bool *fits, vla_error *err)
{
    *fits = view->rank == w->rank && view->shape[0] == rows;
    for (int d = 1; d < w->rank && *fits; d++)
        *fits = view->shape[d] == w->shape[d];
    if (*fits)
        return VLA_OK;
    int64_t wanted[VLAI_MAX_RANK];
    memcpy(wanted, w->shape, sizeof wanted);
    wanted[0] = rows;
    vlai_text text = {0};
    vlai_text_printf(&text, "%s: stored ", view->name);
    put_shape(&text, view->shape, view->rank);
    vlai_text_puts(&text, ", wanted ");
    put_shape(&text, wanted, w->rank);
    vla_status status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = add_owned(l, &l->report.reshaped, text.data, err);
    vlai_text_fini(&text);
    return status;
}

static void mark(const vlai_safetensors *st, const vlai_tensor_view *view, uint8_t *used)
{
    used[view - vlai_safetensors_at(st, 0)] = 1; /* views stand in one array */
}

/* The parts of an unfused tensor. Any part makes the tensor present; the parts that lack are then missing by name. */
static vla_status find_parts(vlai_wallx_layout *l, size_t i, uint8_t *used, bool *found, vla_error *err)
{
    const vlai_wallx_weight *w = &l->weights[i];
    const vlai_tensor_view *parts[3] = {NULL};
    char name[NAME_SIZE];
    bool renamed = false, fits = true;
    int present = 0;
    for (int p = 0; p < w->part_count && w->part_count > 1; p++) {
        if (vlai_wallx_part_name(w, p, name, sizeof name))
            parts[p] = find_spelled(l->st, name, &renamed);
        present += parts[p] != NULL;
    }
    *found = present > 0;
    for (int p = 0; p < w->part_count && present; p++) {
        if (!parts[p]) {
            vlai_wallx_part_name(w, p, name, sizeof name);
            VLA_TRY(add_owned(l, &l->report.missing, name, err));
            continue;
        }
        bool part_fits;
        mark(l->st, parts[p], used);
        VLA_TRY(check_shape(l, w, w->part_rows[p], parts[p], &part_fits, err));
        fits = fits && part_fits;
    }
    if (present < w->part_count || !fits)
        return VLA_OK;
    l->sources[i].count = w->part_count;
    memcpy(l->sources[i].parts, parts, sizeof parts);
    l->report.joined++;
    l->report.renamed += renamed;
    return VLA_OK;
}

static vla_status find_weight(vlai_wallx_layout *l, size_t i, uint8_t *used, vla_error *err)
{
    const vlai_wallx_weight *w = &l->weights[i];
    bool renamed = false, fits, found;
    const vlai_tensor_view *view = find_spelled(l->st, w->name, &renamed);
    if (view) {
        mark(l->st, view, used);
        VLA_TRY(check_shape(l, w, w->shape[0], view, &fits, err));
        if (fits) {
            l->sources[i].parts[0] = view;
            l->sources[i].count = 1;
            l->report.renamed += renamed;
        }
        return VLA_OK;
    }
    VLA_TRY(find_parts(l, i, used, &found, err));
    if (found)
        return VLA_OK;
    return add_name(w->optional ? &l->report.absent : &l->report.missing, w->name, err);
}

static bool is_statistic(const char *name)
{
    return !strncmp(name, "action_preprocessor.normalizer", 30) || !strncmp(name, "action_processor.normalizer", 27);
}

static vla_status fill(vlai_wallx_layout *l, uint8_t *used, vla_error *err)
{
    for (size_t i = 0; i < l->count; i++)
        VLA_TRY(find_weight(l, i, used, err));
    for (size_t i = 0; i < vlai_safetensors_count(l->st); i++) {
        const char *name = vlai_safetensors_at(l->st, i)->name;
        if (!used[i])
            VLA_TRY(add_name(is_statistic(name) ? &l->report.statistics : &l->report.unexpected, name, err));
    }
    return VLA_OK;
}

vla_status vlai_wallx_layout_open(const vlai_safetensors *st, const vlai_wallx_weight *weights, size_t count,
                                  vlai_wallx_layout **out, vla_error *err)
{
    *out = NULL;
    size_t stored = vlai_safetensors_count(st);
    vlai_wallx_layout *l = vlai_calloc(1, sizeof *l);
    uint8_t *used = vlai_calloc(stored + 1, 1);
    vla_status status = VLA_OK;
    if (l) {
        l->st = st;
        l->weights = weights;
        l->count = count;
        l->sources = vlai_calloc(count + 1, sizeof *l->sources);
    }
    if (!l || !used || !l->sources)
        status = vlai_nomem(err, stored + count * sizeof *l->sources);
    else
        status = fill(l, used, err);
    vlai_free(used);
    if (status != VLA_OK) {
        vlai_wallx_layout_close(l);
        return status;
    }
    *out = l;
    return VLA_OK;
}

void vlai_wallx_layout_close(vlai_wallx_layout *l)
{
    if (!l)
        return;
    for (size_t i = 0; i < l->owned_count; i++)
        vlai_free(l->owned[i]);
    vlai_free(l->owned);
    vlai_free(l->sources);
    vlai_free(l->report.missing.names);
    vlai_free(l->report.absent.names);
    vlai_free(l->report.unexpected.names);
    vlai_free(l->report.reshaped.names);
    vlai_free(l->report.statistics.names);
    vlai_free(l);
}

/* "3 missing (a, b, c)"; at most three names, so that the sentence stays one. */
static void put_list(vlai_text *text, const vlai_wallx_names *list, const char *what)
{
    if (!list->count)
        return;
    vlai_text_printf(text, "%s%zu %s (", text->size ? "; " : "", list->count, what);
    for (size_t i = 0; i < list->count && i < 3; i++)
        vlai_text_printf(text, "%s%s", i ? ", " : "", list->names[i]);
    vlai_text_puts(text, list->count > 3 ? ", ...)" : ")");
}

vla_status vlai_wallx_layout_require(const vlai_wallx_layout *l, vla_error *err)
{
    if (!l->report.missing.count && !l->report.unexpected.count && !l->report.reshaped.count)
        return VLA_OK;
    vlai_text text = {0};
    put_list(&text, &l->report.missing, "missing");
    put_list(&text, &l->report.unexpected, "unexpected");
    put_list(&text, &l->report.reshaped, "of another shape");
    vla_status status = vlai_text_status(&text, err);
    const vlai_tensor_view *first = vlai_safetensors_at(l->st, 0);
    if (status == VLA_OK)
        status = vlai_fail_hint(err, VLA_E_SHAPE,
                                "the weights and the architecture (model.config_path, task.dof_config) do not belong together; "
                                "vla inspect checkpoint lists every tensor",
                                "%s: tensors do not fit the model: %s", first ? first->file : "the weights file", text.data);
    vlai_text_fini(&text);
    return status;
}

const void *vlai_wallx_layout_raw(const vlai_wallx_layout *l, size_t i, int64_t first, int64_t n, vla_dtype dtype)
{
    for (int p = 0; p < l->sources[i].count; p++) {
        const vlai_tensor_view *part = l->sources[i].parts[p];
        if (first < part->elements)
            return part->dtype == dtype && n <= part->elements - first ? (const char *)part->data + (size_t)first * vla_dtype_size(dtype) : NULL;
        first -= part->elements;
    }
    return NULL;
}

vla_status vlai_wallx_layout_check(const vlai_wallx_layout *l, size_t i, int64_t first, int64_t n, vla_error *err)
{
    for (int p = 0; p < l->sources[i].count; p++) {
        const vlai_tensor_view *part = l->sources[i].parts[p];
        int64_t from = first > 0 ? first : 0, to = first + n < part->elements ? first + n : part->elements;
        if (from < to)
            VLA_TRY(vlai_tensor_check_finite(part, from, to - from, err));
        first -= part->elements;
    }
    return VLA_OK;
}

vla_status vlai_wallx_layout_read(const vlai_wallx_layout *l, size_t i, int64_t first, int64_t n, float *out, vla_error *err)
{
    const vlai_wallx_weight *w = &l->weights[i];
    if (i >= l->count || !l->sources[i].count)
        return vlai_fail(err, VLA_E_NOT_FOUND, "tensor '%s' is not stored", i < l->count ? w->name : "?");
    if (first < 0 || n < 0 || n > w->elements || first > w->elements - n)
        return vlai_fail(err, VLA_E_INVALID, "tensor '%s': elements %lld to %lld asked for, it has %lld", w->name,
                         (long long)first, (long long)first + n, (long long)w->elements);
    for (int p = 0; p < l->sources[i].count && n > 0; p++) {
        const vlai_tensor_view *part = l->sources[i].parts[p];
        if (first >= part->elements) {
            first -= part->elements;
            continue;
        }
        int64_t here = n < part->elements - first ? n : part->elements - first;
        VLA_TRY(vlai_tensor_to_float(part, first, here, out, err));
        out += here;
        n -= here;
        first = 0;
    }
    return VLA_OK;
}
