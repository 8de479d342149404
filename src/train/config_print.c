/* The configuration as JSON in the layout of its file, and the option table as text for readers. */
#include "train/config_internal.h"

#include "base/fail.h"
#include "base/io.h"

#include <stdio.h>
#include <string.h>

/* Keys whose values have been moved elsewhere by the time they could be printed. */
static bool is_alias(const vlai_config *c, const section *s, const option *o)
{
    char key[256];
    if (!strcmp(s->path, "task.noise_scheduler"))
        return true;
    vlai_config_key(s, o, key, sizeof key);
    bool second_place = !strcmp(key, "data.use_state_string_representation") || !strcmp(key, "data.action_horizon") ||
                        !strcmp(key, "data.action_horizon_flow");
    if (second_place)
        return !vlai_config_origin(c, key).file;
    bool top_itself = !strcmp(o->key, "model_type") || !strcmp(o->key, "eval_batch_size_per_gpu") ||
                      !strcmp(o->key, "dataset_path");
    return !*s->path && !top_itself;
}

void vlai_config_put_text(vlai_text *out, const char *text)
{
    if (!strstr(text, "${")) {
        vlai_text_json(out, text);
        return;
    }
    vlai_text escaped = {0};
    for (const char *c = text; *c; c++) {
        if (c[0] == '$' && c[1] == '{')
            vlai_text_put(&escaped, "$", 1);
        vlai_text_put(&escaped, c, 1);
    }
    if (escaped.failed)
        out->failed = true;
    else
        vlai_text_json(out, escaped.data);
    vlai_text_fini(&escaped);
}

static void put_map(vlai_text *t, size_t count, const char *const *names, const option *o, const void *values)
{
    vlai_text_puts(t, "{");
    for (size_t i = 0; i < count; i++) {
        vlai_text_puts(t, i ? ", " : "");
        vlai_text_json(t, names[i]);
        vlai_text_puts(t, ": ");
        if (o->kind == KIND_DIMS)
            vlai_text_printf(t, "%lld", (long long)((const int64_t *)values)[i]);
        else if (o->kind == KIND_WEIGHTS)
            vlai_text_real(t, ((const double *)values)[i]);
        else
            vlai_config_put_text(t, ((const char *const *)values)[i]);
    }
    vlai_text_puts(t, "}");
}

static void put_texts(vlai_text *t, const vlai_texts *texts)
{
    vlai_text_puts(t, "[");
    for (size_t i = 0; i < texts->count; i++) {
        vlai_text_puts(t, i ? ", " : "");
        vlai_config_put_text(t, texts->values[i]);
    }
    vlai_text_puts(t, "]");
}

static void put_text_or_null(vlai_text *t, const char *text)
{
    if (text)
        vlai_config_put_text(t, text);
    else
        vlai_text_puts(t, "null");
}

static void put_value(vlai_text *t, const option *o, const void *field)
{
    char name[64];
    switch (o->kind) {
    case KIND_INT: vlai_text_printf(t, "%lld", (long long)*(const int64_t *)field); break;
    case KIND_REAL:
        if (isnan(*(const double *)field))
            vlai_text_puts(t, "null");
        else
            vlai_text_real(t, *(const double *)field);
        break;
    case KIND_BOOL: vlai_text_puts(t, *(const bool *)field ? "true" : "false"); break;
    case KIND_TEXT:
    case KIND_PATH: put_text_or_null(t, *(const char *const *)field); break;
    case KIND_CHOICE: vlai_text_json(t, vlai_config_choice(o, *(const int *)field, name, sizeof name, NULL)); break;
    case KIND_DIMS: {
        const vlai_dims *d = field;
        put_map(t, d->count, d->names, o, d->values);
        break;
    }
    case KIND_WORDS: {
        const vlai_words *w = field;
        put_map(t, w->count, w->names, o, w->values);
        break;
    }
    case KIND_WEIGHTS: {
        const vlai_weights *w = field;
        put_map(t, w->count, w->names, o, w->values);
        break;
    }
    case KIND_NUMBERS: {
        const vlai_numbers *n = field;
        vlai_text_puts(t, "[");
        for (size_t i = 0; i < n->count; i++) {
            vlai_text_puts(t, i ? ", " : "");
            vlai_text_real(t, n->values[i]);
        }
        vlai_text_puts(t, "]");
        break;
    }
    case KIND_TEXTS: put_texts(t, field); break;
    case KIND_GROUPS: {
        const vlai_lr_groups *g = field;
        vlai_text_puts(t, "[");
        for (size_t i = 0; i < g->count; i++) {
            vlai_text_puts(t, i ? ", {\"name\": " : "{\"name\": ");
            vlai_config_put_text(t, g->groups[i].name);
            vlai_text_puts(t, ", \"lr\": ");
            vlai_text_real(t, g->groups[i].lr);
            vlai_text_puts(t, ", \"include\": ");
            put_texts(t, &g->groups[i].include);
            vlai_text_printf(t, ", \"fail_on_empty\": %s}", g->groups[i].fail_on_empty ? "true" : "false");
        }
        vlai_text_puts(t, "]");
        break;
    }
    case KIND_ANY: {
        const char *json = *(const char *const *)field;
        vlai_text_puts(t, json ? json : "null");
        break;
    }
    }
}

/* Maps and lists that are absent (null) print as null: an empty episode list would mean no episode. */
static bool is_absent(const option *o, const void *field)
{
    return o->kind >= KIND_DIMS && o->kind <= KIND_GROUPS && *(const size_t *)field == 0;
}

static void put_indent(vlai_text *t, int depth)
{
    vlai_text_printf(t, "%*s", 2 * depth, "");
}

/* The section and those below it; `depth` is that of its members. */
static void put_section(vlai_text *t, const vlai_config *c, const section *s, int depth)
{
    const char *separator = "\n";
    vlai_text_puts(t, "{");
    for (size_t i = 0; i < s->count; i++) {
        const option *o = &s->rows()[i];
        if (is_alias(c, s, o))
            continue;
        const void *field = vlai_config_field(c, s, o);
        vlai_text_puts(t, separator);
        put_indent(t, depth);
        vlai_text_printf(t, "\"%s\": ", o->key);
        if (is_absent(o, field))
            vlai_text_puts(t, "null");
        else
            put_value(t, o, field);
        separator = ",\n";
    }
    size_t n = strlen(s->path);
    for (const section *child = vlai_config_sections; child->path; child++) {
        const char *name = n ? child->path + n + 1 : child->path;
        if (child == s || strncmp(child->path, s->path, n) || (n && child->path[n] != '.') || strchr(name, '.') ||
            !strcmp(child->path, "task.noise_scheduler"))
            continue;
        vlai_text_puts(t, separator);
        put_indent(t, depth);
        vlai_text_printf(t, "\"%s\": ", name);
        put_section(t, c, child, depth + 1);
        separator = ",\n";
    }
    vlai_text_puts(t, "\n");
    put_indent(t, depth - 1);
    vlai_text_puts(t, "}");
}

static vla_status take(vlai_text *t, char **out, vla_error *err)
{
    *out = NULL;
    vla_status status = vlai_text_status(t, err);
    if (status == VLA_OK)
        *out = t->data;
    else
        vlai_text_fini(t);
    return status;
}

vla_status vlai_config_dump(const vlai_config *config, char **out, vla_error *err)
{
    vlai_text t = {0};
    put_section(&t, config, &vlai_config_sections[0], 1);
    vlai_text_puts(&t, "\n");
    return take(&t, out, err);
}

vla_status vlai_config_common(const vlai_config *config, char **out, vla_error *err)
{
    static const char *const own[] = {"training.device", "training.threads", "data.num_workers", "data.frame_cache_dir"};
    static const char follows[] = "eval_batch_size_per_gpu"; /* another key where it is not given, which is to be named first */
    vlai_text t = {0};
    for (const section *s = vlai_config_sections; s->path; s++)
        for (size_t i = 0; i < s->count; i++) {
            const option *o = &s->rows()[i];
            char key[256];
            bool skipped = is_alias(config, s, o);
            vlai_config_key(s, o, key, sizeof key);
            skipped |= !strcmp(key, follows);
            for (size_t k = 0; k < sizeof own / sizeof *own; k++)
                skipped |= !strcmp(key, own[k]);
            if (skipped)
                continue;
            vlai_text_printf(&t, "%s: ", key);
            put_value(&t, o, vlai_config_field(config, s, o));
            vlai_text_puts(&t, "\n");
        }
    vlai_text_printf(&t, "%s: %lld\n", follows, (long long)config->top.eval_batch_size_per_gpu);
    return take(&t, out, err);
}

vla_status vlai_config_save(const vlai_config *config, const char *path, vla_error *err)
{
    char *text;
    VLA_TRY(vlai_config_dump(config, &text, err));
    vla_status status = vlai_write_file_atomic(path, text, strlen(text), err);
    vlai_free(text);
    return status;
}

static void put_default(vlai_text *t, const option *o)
{
    char name[64];
    switch (o->kind) {
    case KIND_INT:
    case KIND_REAL: isnan(o->number) ? vlai_text_puts(t, "null") : vlai_text_real(t, o->number); break;
    case KIND_BOOL: vlai_text_puts(t, o->number != 0 ? "true" : "false"); break;
    case KIND_CHOICE: vlai_text_puts(t, vlai_config_choice(o, (int)o->number, name, sizeof name, NULL)); break;
    default: vlai_text_puts(t, o->default_text ? o->default_text : "null"); break;
    }
}

vla_status vlai_config_help(const char *section_path, char **out, vla_error *err)
{
    static const char *const words[] = {"", "no effect here; ", "no effect here; ", "only the default; "};
    char wanted[512];
    vlai_text t = {0};
    const section *only = section_path ? vlai_config_section(section_path, strlen(section_path)) : NULL;
    if (section_path && !only)
        return vlai_fail_hint(err, VLA_E_INVALID, "vla config lists all sections, with their keys", "'%s' is not a section of the configuration", section_path);
    for (const section *s = vlai_config_sections; s->path; s++) {
        if (only && s != only)
            continue;
        vlai_text_printf(&t, "%s%s\n", t.size ? "\n" : "", *s->path ? s->path : "(top level)");
        for (size_t i = 0; i < s->count; i++) {
            const option *o = &s->rows()[i];
            vlai_text_printf(&t, "  %s: ", o->key);
            put_default(&t, o);
            vlai_text_printf(&t, "\n      %s%s (%s)\n", words[o->status], vlai_config_explain(o),
                             vlai_config_wanted(o, wanted, sizeof wanted));
        }
    }
    return take(&t, out, err);
}
