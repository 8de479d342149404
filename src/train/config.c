/* Reading a configuration: the file's tree against the option table, then the overrides, then what follows from them
 * (config_finish.c). */
#include "train/config_internal.h"

#include "base/fail.h"
#include "base/io.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_SIZE = 256, WORDS_SIZE = 512 };

typedef struct loader {
    vlai_config *config;
    const char *source; /* the file, or the override as given */
    bool lines;         /* whether line numbers mean something in it */
    vla_error *err;
} loader;

static vlai_arena *arena_of(const loader *l)
{
    return &l->config->internal->arena;
}

static vla_status no_memory(loader *l)
{
    return vlai_fail(l->err, VLA_E_NOMEM, "%s: out of host memory while reading the configuration", l->source);
}

/* "file:12" or "--key=value", the beginning of every message. */
static const char *place(const loader *l, int line, char *buffer, size_t size)
{
    if (l->lines)
        snprintf(buffer, size, "%s:%d", l->source, line);
    else
        snprintf(buffer, size, "%s", l->source);
    return buffer;
}

static vla_status misfit(loader *l, const section *s, const option *o, const char *entry, const vlai_yaml *node)
{
    char where[WORDS_SIZE], key[KEY_SIZE], found[128], wanted[WORDS_SIZE];
    bool past = (node->type == VLAI_YAML_INT || node->type == VLAI_YAML_REAL) && node->real > o->high && o->high >= VLAI_BIG;
    return vlai_fail_hint(l->err, VLA_E_INVALID, vlai_config_explain(o), "%s: %s%s%s is %s, wanted %s%s",
                          place(l, node->line, where, sizeof where), vlai_config_key(s, o, key, sizeof key),
                          entry ? ": " : "", entry ? entry : "", vlai_yaml_describe(node, found, sizeof found),
                          vlai_config_wanted(o, wanted, sizeof wanted), past ? " and at most 1e15" : "");
}

/* ---- one value ---- */

static bool as_number(const vlai_yaml *node, const option *o, double *out)
{
    if (node->type != VLAI_YAML_INT && node->type != VLAI_YAML_REAL)
        return false;
    *out = node->real;
    return node->real >= o->low && node->real <= o->high;
}

static bool as_integer(const vlai_yaml *node, const option *o, int64_t *out)
{
    double value;
    if (!as_number(node, o, &value) || value != floor(value))
        return false;
    *out = (int64_t)value; /* exact: the table's bounds lie within 2^53 */
    return true;
}

/* A name that looks like a number stays the text that was written. */
static const char *as_text(const vlai_yaml *node)
{
    bool scalar = node->type == VLAI_YAML_TEXT || node->type == VLAI_YAML_INT || node->type == VLAI_YAML_REAL;
    return scalar ? node->text : NULL;
}

static vla_status copy_text(loader *l, const char *text, const char **out)
{
    *out = vlai_arena_strdup(arena_of(l), text);
    return *out ? VLA_OK : no_memory(l);
}

static vla_status read_choice(loader *l, const section *s, const option *o, const vlai_yaml *node, int *out)
{
    const char *text = as_text(node);
    char name[64], where[WORDS_SIZE], key[KEY_SIZE], wanted[WORDS_SIZE];
    bool refused;
    for (int i = 0; text && vlai_config_choice(o, i, name, sizeof name, &refused); i++) {
        if (strcmp(text, name))
            continue;
        if (refused)
            return vlai_fail_hint(l->err, VLA_E_UNSUPPORTED, vlai_config_explain(o),
                                  "%s: %s: '%s' is refused, wanted %s", place(l, node->line, where, sizeof where),
                                  vlai_config_key(s, o, key, sizeof key), name,
                                  vlai_config_wanted(o, wanted, sizeof wanted));
        *out = i;
        return VLA_OK;
    }
    return misfit(l, s, o, NULL, node);
}

/* A map of names to integers, numbers or texts: `values` points to elements of 8 bytes each in all three cases. */
static vla_status read_map(loader *l, const section *s, const option *o, const vlai_yaml *node, size_t *count,
                           const char *const **names, const void **values)
{
    if (node->type != VLAI_YAML_MAP)
        return misfit(l, s, o, NULL, node);
    const char **keys = vlai_arena_alloc(arena_of(l), (node->count + 1) * sizeof *keys);
    union {
        int64_t integer;
        double real;
        const char *text;
    } *cells = vlai_arena_alloc(arena_of(l), (node->count + 1) * sizeof *cells);
    _Static_assert(sizeof *cells == 8, "the three element types share one layout");
    if (!keys || !cells)
        return no_memory(l);
    for (size_t i = 0; i < node->count; i++) {
        const vlai_yaml *item = node->items[i];
        VLA_TRY(copy_text(l, node->keys[i], &keys[i]));
        char where[WORDS_SIZE], key[KEY_SIZE];
        if (!*keys[i])
            return vlai_fail_hint(l->err, VLA_E_INVALID, vlai_config_explain(o), "%s: %s: an entry has an empty name",
                                  place(l, node->key_lines[i], where, sizeof where), vlai_config_key(s, o, key, sizeof key));
        bool fits = o->kind == KIND_DIMS      ? as_integer(item, o, &cells[i].integer)
                    : o->kind == KIND_WEIGHTS ? as_number(item, o, &cells[i].real)
                                              : as_text(item) != NULL;
        if (!fits)
            return misfit(l, s, o, node->keys[i], item);
        if (o->kind == KIND_WORDS)
            VLA_TRY(copy_text(l, as_text(item), &cells[i].text));
    }
    *count = node->count;
    *names = keys;
    *values = cells;
    return VLA_OK;
}

static vla_status read_numbers(loader *l, const section *s, const option *o, const vlai_yaml *node, vlai_numbers *out)
{
    if (node->type != VLAI_YAML_LIST)
        return misfit(l, s, o, NULL, node);
    double *values = vlai_arena_alloc(arena_of(l), (node->count + 1) * sizeof *values);
    if (!values)
        return no_memory(l);
    for (size_t i = 0; i < node->count; i++) {
        char entry[32];
        snprintf(entry, sizeof entry, "entry %zu", i);
        if (!as_number(node->items[i], o, &values[i]))
            return misfit(l, s, o, entry, node->items[i]);
    }
    *out = (vlai_numbers){node->count, values};
    return VLA_OK;
}

static vla_status read_texts(loader *l, const section *s, const option *o, const vlai_yaml *node, vlai_texts *out)
{
    if (node->type != VLAI_YAML_LIST)
        return misfit(l, s, o, NULL, node);
    const char **values = vlai_arena_alloc(arena_of(l), (node->count + 1) * sizeof *values);
    if (!values)
        return no_memory(l);
    for (size_t i = 0; i < node->count; i++) {
        if (!as_text(node->items[i]))
            return misfit(l, s, o, NULL, node->items[i]);
        VLA_TRY(copy_text(l, as_text(node->items[i]), &values[i]));
    }
    *out = (vlai_texts){node->count, values};
    return VLA_OK;
}

static vla_status read_group(loader *l, const section *s, const option *o, const vlai_yaml *node, vlai_lr_group *out)
{
    static const char *const known[] = {"name", "lr", "include", "fail_on_empty"};
    char where[WORDS_SIZE];
    if (node->type != VLAI_YAML_MAP)
        return misfit(l, s, o, NULL, node);
    out->fail_on_empty = true;
    bool has_lr = false;
    for (size_t i = 0; i < node->count; i++) {
        const vlai_yaml *item = node->items[i];
        const char *key = node->keys[i];
        if (!strcmp(key, "name") && as_text(item)) {
            VLA_TRY(copy_text(l, as_text(item), &out->name));
        } else if (!strcmp(key, "lr") && as_number(item, o, &out->lr)) {
            has_lr = true;
        } else if (!strcmp(key, "include") && item->type == VLAI_YAML_LIST) {
            VLA_TRY(read_texts(l, s, o, item, &out->include));
        } else if (!strcmp(key, "fail_on_empty") && item->type == VLAI_YAML_BOOL) {
            out->fail_on_empty = item->boolean;
        } else {
            const char *near = vlai_nearest(key, known, 4);
            vlai_fail(l->err, VLA_E_INVALID, "%s: an entry of lr_groups has %s '%.64s'",
                      place(l, node->key_lines[i], where, sizeof where),
                      near && !strcmp(near, key) ? "a value of the wrong type under" : "the unknown key", key);
            return vlai_hint(l->err, VLA_E_INVALID, "wanted name (text), lr (number), include (list of texts), "
                                                    "fail_on_empty (true or false)");
        }
    }
    if (!out->name || !has_lr || !out->include.count)
        return vlai_fail(l->err, VLA_E_INVALID, "%s: an entry of lr_groups lacks %s",
                         place(l, node->line, where, sizeof where),
                         !out->name ? "its name" : !has_lr ? "its lr" : "a part of a parameter name under include");
    return VLA_OK;
}

static vla_status read_groups(loader *l, const section *s, const option *o, const vlai_yaml *node, vlai_lr_groups *out)
{
    if (node->type != VLAI_YAML_LIST)
        return misfit(l, s, o, NULL, node);
    vlai_lr_group *groups = vlai_arena_alloc(arena_of(l), (node->count + 1) * sizeof *groups);
    if (!groups)
        return no_memory(l);
    for (size_t i = 0; i < node->count; i++)
        VLA_TRY(read_group(l, s, o, node->items[i], &groups[i]));
    *out = (vlai_lr_groups){node->count, groups};
    return VLA_OK;
}

static void put_json(vlai_text *text, const vlai_yaml *node)
{
    switch (node->type) {
    case VLAI_YAML_NULL: vlai_text_puts(text, "null"); break;
    case VLAI_YAML_BOOL: vlai_text_puts(text, node->boolean ? "true" : "false"); break;
    case VLAI_YAML_INT: vlai_text_printf(text, "%lld", (long long)node->integer); break;
    case VLAI_YAML_REAL:
        if (isfinite(node->real))
            vlai_text_real(text, node->real);
        else
            vlai_text_puts(text, node->text);
        break;
    case VLAI_YAML_TEXT: vlai_config_put_text(text, node->text); break;
    case VLAI_YAML_LIST:
    case VLAI_YAML_MAP:
        vlai_text_puts(text, node->type == VLAI_YAML_MAP ? "{" : "[");
        for (size_t i = 0; i < node->count; i++) {
            vlai_text_puts(text, i ? ", " : "");
            if (node->type == VLAI_YAML_MAP) {
                vlai_text_json(text, node->keys[i]);
                vlai_text_puts(text, ": ");
            }
            put_json(text, node->items[i]);
        }
        vlai_text_puts(text, node->type == VLAI_YAML_MAP ? "}" : "]");
        break;
    }
}

static vla_status read_any(loader *l, const vlai_yaml *node, const char **out)
{
    vlai_text text = {0};
    put_json(&text, node);
    vla_status status = text.failed ? no_memory(l) : copy_text(l, text.data, out);
    vlai_text_fini(&text);
    return status;
}

static vla_status read_value(loader *l, const section *s, const option *o, const vlai_yaml *node, void *field)
{
    const void *values;
    switch (o->kind) {
    case KIND_INT: return as_integer(node, o, field) ? VLA_OK : misfit(l, s, o, NULL, node);
    case KIND_REAL: return as_number(node, o, field) ? VLA_OK : misfit(l, s, o, NULL, node);
    case KIND_BOOL:
        if (node->type != VLAI_YAML_BOOL)
            return misfit(l, s, o, NULL, node);
        *(bool *)field = node->boolean;
        return VLA_OK;
    case KIND_TEXT:
    case KIND_PATH: return as_text(node) ? copy_text(l, as_text(node), field) : misfit(l, s, o, NULL, node);
    case KIND_CHOICE: return read_choice(l, s, o, node, field);
    case KIND_DIMS: {
        vlai_dims *d = field;
        VLA_TRY(read_map(l, s, o, node, &d->count, &d->names, &values));
        d->values = values;
        return VLA_OK;
    }
    case KIND_WORDS: {
        vlai_words *w = field;
        VLA_TRY(read_map(l, s, o, node, &w->count, &w->names, &values));
        w->values = values;
        return VLA_OK;
    }
    case KIND_WEIGHTS: {
        vlai_weights *w = field;
        VLA_TRY(read_map(l, s, o, node, &w->count, &w->names, &values));
        w->values = values;
        return VLA_OK;
    }
    case KIND_NUMBERS: return read_numbers(l, s, o, node, field);
    case KIND_TEXTS: return read_texts(l, s, o, node, field);
    case KIND_GROUPS: return read_groups(l, s, o, node, field);
    case KIND_ANY: return read_any(l, node, field);
    }
    return VLA_OK;
}

/* ---- defaults ---- */

static vla_status set_default(loader *l, const section *s, const option *o)
{
    void *field = vlai_config_field(l->config, s, o);
    switch (o->kind) {
    case KIND_INT: *(int64_t *)field = (int64_t)o->number; return VLA_OK;
    case KIND_REAL: *(double *)field = o->number; return VLA_OK;
    case KIND_BOOL: *(bool *)field = o->number != 0; return VLA_OK;
    case KIND_CHOICE: *(int *)field = (int)o->number; return VLA_OK;
    case KIND_TEXT:
    case KIND_PATH:
    case KIND_ANY: *(const char **)field = o->default_text; return VLA_OK;
    default: break;
    }
    if (!o->default_text) {
        size_t size = o->kind == KIND_NUMBERS  ? sizeof(vlai_numbers)
                      : o->kind == KIND_TEXTS  ? sizeof(vlai_texts)
                      : o->kind == KIND_GROUPS ? sizeof(vlai_lr_groups)
                                               : sizeof(vlai_dims); /* the three maps have one layout */
        memset(field, 0, size);
        return VLA_OK;
    }
    vlai_yaml *node;
    VLA_TRY(vlai_yaml_parse(o->default_text, strlen(o->default_text), o->key, 0, &node, l->err));
    vla_status status = read_value(l, s, o, node, field);
    vlai_yaml_destroy(node);
    return status;
}

bool vlai_config_is_default(const vlai_config *config, const section *s, const option *o)
{
    const void *field = vlai_config_field(config, s, o);
    const char *text;
    double number;
    switch (o->kind) {
    case KIND_INT: return (double)*(const int64_t *)field == o->number;
    case KIND_REAL: number = *(const double *)field; return number == o->number || (isnan(number) && isnan(o->number));
    case KIND_BOOL: return *(const bool *)field == (o->number != 0);
    case KIND_CHOICE: return *(const int *)field == (int)o->number;
    case KIND_TEXT:
    case KIND_PATH:
    case KIND_ANY:
        text = *(const char *const *)field;
        return text == o->default_text || (text && o->default_text && !strcmp(text, o->default_text));
    default: break;
    }
    /* Maps and lists begin with their count; those with another default than an empty one are all in use. */
    return *(const size_t *)field == 0;
}

/* ---- sections ---- */

/* A key of another section with the very same name is the likeliest slip: it is then named with its section. */
static vla_status unknown_key(loader *l, const section *s, const char *key, int line)
{
    const char *candidates[160];
    size_t count = 0;
    char where[WORDS_SIZE], full[KEY_SIZE], prefix[KEY_SIZE];
    size_t depth = strlen(s->path);
    snprintf(prefix, sizeof prefix, "%s%s", s->path, *s->path ? "." : "");
    for (size_t i = 0; i < s->count && count < 120; i++)
        candidates[count++] = s->rows()[i].key;
    for (const section *child = vlai_config_sections; child->path; child++)
        if (child != s && !strncmp(child->path, prefix, strlen(prefix)) &&
            !strchr(child->path + depth + (depth > 0), '.') && count < 160)
            candidates[count++] = child->path + depth + (depth > 0);
    vlai_fail(l->err, VLA_E_INVALID, "%s: unknown key '%s%.64s'", place(l, line, where, sizeof where), prefix, key);
    for (const section *other = vlai_config_sections; other->path; other++) {
        for (size_t i = 0; i < other->count; i++)
            if (!strcmp(other->rows()[i].key, key))
                return vlai_hint(l->err, VLA_E_INVALID, "this key belongs into another section: %s",
                                 vlai_config_key(other, &other->rows()[i], full, sizeof full));
    }
    const char *near = vlai_nearest(key, candidates, count);
    if (near)
        return vlai_hint(l->err, VLA_E_INVALID, "did you mean '%s%s'?", prefix, near);
    return vlai_hint(l->err, VLA_E_INVALID, "vla config lists every key");
}

static vla_status set_option(loader *l, const section *s, const option *o, const vlai_yaml *node)
{
    char where[WORDS_SIZE], key[KEY_SIZE], found[128];
    vlai_option_origin *origin = &l->config->internal->origins[s->base + (size_t)(o - s->rows())];
    if (node->type == VLAI_YAML_NULL) {
        *origin = (vlai_option_origin){NULL, 0};
        return set_default(l, s, o);
    }
    VLA_TRY(read_value(l, s, o, node, vlai_config_field(l->config, s, o)));
    *origin = (vlai_option_origin){l->source, l->lines ? node->line : 0};
    if (o->status == STATUS_ONLY && !vlai_config_is_default(l->config, s, o))
        return vlai_fail_hint(l->err, VLA_E_UNSUPPORTED, "leave the key out, or give it its default",
                              "%s: %s: %s is refused: %s", place(l, node->line, where, sizeof where),
                              vlai_config_key(s, o, key, sizeof key), vlai_yaml_describe(node, found, sizeof found),
                              o->text);
    if (o->status == STATUS_NOTED && !vlai_config_is_default(l->config, s, o))
        return vlai_config_notice(l->config, l->err, "%s: %s has no effect: %s",
                                  place(l, node->line, where, sizeof where), vlai_config_key(s, o, key, sizeof key),
                                  o->text);
    return VLA_OK;
}

static vla_status read_section(loader *l, const section *s, const vlai_yaml *map)
{
    char where[WORDS_SIZE], path[KEY_SIZE], found[128];
    if (map->type == VLAI_YAML_NULL)
        return VLA_OK;
    if (map->type != VLAI_YAML_MAP)
        return vlai_fail(l->err, VLA_E_INVALID, "%s: %s is %s, wanted a map of keys",
                         place(l, map->line, where, sizeof where), *s->path ? s->path : "the file",
                         vlai_yaml_describe(map, found, sizeof found));
    for (size_t i = 0; i < map->count; i++) {
        const char *key = map->keys[i];
        /* A configuration that the reference saved in a checkpoint repeats its input under these two names. */
        if (!*s->path && (!strcmp(key, "_raw_data") || !strcmp(key, "_raw_yaml")))
            continue;
        const option *o = NULL;
        for (size_t j = 0; j < s->count && !o; j++)
            if (!strcmp(s->rows()[j].key, key))
                o = &s->rows()[j];
        if (o) {
            VLA_TRY(set_option(l, s, o, map->items[i]));
            continue;
        }
        int n = snprintf(path, sizeof path, "%s%s%s", s->path, *s->path ? "." : "", key);
        const section *child =
            n > 0 && (size_t)n < sizeof path && !strchr(key, '.') && *key ? vlai_config_section(path, (size_t)n) : NULL;
        if (!child)
            return unknown_key(l, s, key, map->key_lines[i]);
        VLA_TRY(read_section(l, child, map->items[i]));
    }
    return VLA_OK;
}

/* ---- overrides ---- */

bool vlai_config_is_override(const char *argument)
{
    if (argument[0] != '-' || argument[1] != '-')
        return false;
    const char *equals = strchr(argument, '='), *dot = strchr(argument, '.');
    if (!equals)
        return false;
    size_t word = strcspn(argument + 2, ".=");
    char key[64];
    snprintf(key, sizeof key, "%.*s", (int)(word < 63 ? word : 63), argument + 2);
    return vlai_config_section(argument + 2, word) || (dot && dot < equals) || vlai_config_option(key, NULL);
}

/* One entry of a map, such as data.resolution.face_view: the entry is replaced, or added at the end. The three kinds of map
 * have one layout (a count, names, values of 8 bytes), so that one copy serves them all. */
static vla_status set_entry(loader *l, const section *s, const option *o, const char *name, const vlai_yaml *value)
{
    void *field = vlai_config_field(l->config, s, o);
    vlai_words now, one = {0};
    memcpy(&now, field, sizeof now);
    const char *keys[] = {name};
    vlai_yaml item = *value, *items[] = {&item};
    vlai_yaml map = {.type = VLAI_YAML_MAP, .count = 1, .keys = keys, .items = items};
    size_t n = now.count, at = 0;
    const void *values;
    VLA_TRY(read_map(l, s, o, &map, &one.count, &one.names, &values));
    while (at < n && strcmp(now.names[at], name))
        at++;
    const char **names = vlai_arena_alloc(arena_of(l), (n + 1) * sizeof *names);
    char *cells = vlai_arena_alloc(arena_of(l), (n + 1) * 8);
    if (!names || !cells)
        return no_memory(l);
    if (n) {
        memcpy(names, now.names, n * sizeof *names);
        memcpy(cells, now.values, n * 8);
    }
    names[at] = one.names[0];
    memcpy(cells + at * 8, values, 8);
    now = (vlai_words){at < n ? n : n + 1, names, (const char *const *)(const void *)cells};
    memcpy(field, &now, sizeof now);
    l->config->internal->origins[s->base + (size_t)(o - s->rows())] = (vlai_option_origin){l->source, 0};
    return VLA_OK;
}

static vla_status apply_path(loader *l, const char *path, const vlai_yaml *value)
{
    const section *s;
    const option *o = vlai_config_option(path, &s);
    if (o)
        return set_option(l, s, o, value);
    const section *whole = vlai_config_section(path, strlen(path));
    if (whole && *path && value->type == VLAI_YAML_NULL) /* in a file an empty section; here it would change nothing and say nothing */
        return vlai_fail_hint(l->err, VLA_E_INVALID, "null takes the default of a single key", "%s: %s is a section of keys, wanted a map of them", l->source, path);
    if (whole && *path)
        return read_section(l, whole, value);
    /* The longest prefix that is a map or a section tells where the rest begins. */
    for (size_t n = strlen(path); n > 0; n--) {
        if (path[n] != '.')
            continue;
        char prefix[KEY_SIZE];
        snprintf(prefix, sizeof prefix, "%.*s", (int)n, path);
        o = vlai_config_option(prefix, &s);
        if (o && (o->kind == KIND_DIMS || o->kind == KIND_WORDS || o->kind == KIND_WEIGHTS))
            return set_entry(l, s, o, path + n + 1, value);
        s = vlai_config_section(path, n);
        if (s)
            return unknown_key(l, s, path + n + 1, 0);
    }
    return unknown_key(l, &vlai_config_sections[0], path, 0);
}

static vla_status apply_override(loader *l, const char *text)
{
    const char *name = text + strspn(text, "-"), *equals = strchr(name, '=');
    const char *copy = vlai_arena_strdup(arena_of(l), text);
    if (!copy)
        return no_memory(l);
    l->source = copy;
    l->lines = false;
    if (!equals || equals == name || equals - name >= KEY_SIZE)
        return vlai_fail(l->err, VLA_E_INVALID, "'%.128s' is not of the form --section.key=value", text);
    char path[KEY_SIZE];
    snprintf(path, sizeof path, "%.*s", (int)(equals - name), name);
    const option *o = vlai_config_option(path, NULL);
    bool scalar = o && (o->kind == KIND_INT || o->kind == KIND_REAL || o->kind == KIND_BOOL || o->kind == KIND_CHOICE);
    if (scalar && !equals[1 + strspn(equals + 1, " ")]) /* a variable of the shell that is not set, not a wish for the default */
        return vlai_fail_hint(l->err, VLA_E_INVALID, "null takes the default", "%s: an empty value", l->source);
    vlai_yaml *value;
    vla_status status = vlai_yaml_parse(equals + 1, strlen(equals + 1), l->source, VLAI_YAML_EXPAND, &value, l->err);
    if (status == VLA_E_FORMAT) /* of a file it would be the file's fault, here it is the command line's */
        return vlai_fail_hint(l->err, VLA_E_INVALID, "quote the value for the shell, as in '--key=[1, 2]'", "%s: the value is not valid YAML", l->source);
    VLA_TRY(status);
    status = apply_path(l, path, value);
    vlai_yaml_destroy(value);
    return status;
}

/* ---- the whole ---- */

vla_status vlai_config_notice(vlai_config *config, vla_error *err, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    vlai_config_internal *in = config->internal;
    VLA_TRY(vlai_reserve((void **)&in->notices, &in->notice_capacity, config->notice_count, sizeof *in->notices, err));
    in->notices[config->notice_count] = vlai_arena_strdup(&in->arena, text);
    if (!in->notices[config->notice_count])
        return vlai_nomem(err, strlen(text));
    config->notice_count++;
    config->notices = in->notices;
    return VLA_OK;
}

static vla_status fill(loader *l, const vlai_yaml *root, const char *const *overrides, size_t count)
{
    const section *all = vlai_config_sections;
    size_t options = 0;
    for (const section *s = all; s->path; s++)
        options = s->base + s->count;
    vlai_config_internal *in = l->config->internal;
    in->origins = vlai_arena_alloc(&in->arena, options * sizeof *in->origins);
    l->config->path = vlai_arena_strdup(&in->arena, l->source);
    if (!in->origins || !l->config->path)
        return no_memory(l);
    l->source = l->config->path;
    for (const section *s = all; s->path; s++)
        for (size_t i = 0; i < s->count; i++)
            VLA_TRY(set_default(l, s, &s->rows()[i]));
    if (root->type == VLAI_YAML_NULL)
        return vlai_fail(l->err, VLA_E_INVALID, "Config file is empty: %s", l->source);
    l->lines = true;
    VLA_TRY(read_section(l, &all[0], root));
    for (size_t i = 0; i < count; i++)
        VLA_TRY(apply_override(l, overrides[i]));
    return vlai_config_finish(l->config, l->err);
}

vla_status vlai_config_parse(const char *data, size_t size, const char *name, const char *const *overrides,
                             size_t count, vlai_config **out, vla_error *err)
{
    *out = NULL;
    vlai_yaml *root;
    VLA_TRY(vlai_yaml_parse(data, size, name, VLAI_YAML_EXPAND, &root, err));
    vlai_config *config = vlai_calloc(1, sizeof *config);
    vlai_config_internal *in = vlai_calloc(1, sizeof *in);
    if (!config || !in) {
        vlai_free(config);
        vlai_free(in);
        vlai_yaml_destroy(root);
        return vlai_nomem(err, sizeof *config + sizeof *in);
    }
    config->internal = in;
    loader l = {config, name, false, err};
    vla_status status = fill(&l, root, overrides, count);
    vlai_yaml_destroy(root);
    if (status != VLA_OK) {
        vlai_config_destroy(config);
        return status;
    }
    *out = config;
    return VLA_OK;
}

vla_status vlai_config_load(const char *path, const char *const *overrides, size_t count, vlai_config **out,
                            vla_error *err)
{
    *out = NULL;
    char *data;
    size_t size;
    VLA_TRY(vlai_read_file(path, 0, &data, &size, err));
    vla_status status = vlai_config_parse(data, size, path, overrides, count, out, err);
    vlai_free(data);
    return status;
}

void vlai_config_destroy(vlai_config *config)
{
    if (!config)
        return;
    vlai_free(config->internal->notices);
    vlai_arena_fini(&config->internal->arena);
    vlai_free(config->internal);
    vlai_free(config);
}
