/* libyaml composes the document (aliases stay indices there); this file turns it into the tree of yaml.h. A node that
 * several aliases name is built once per use, under one budget of nodes, which bounds both cycles and explosions. */
#include "format/yaml.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

/* A training configuration has some hundred nodes, one with a list of all episodes some ten thousand. */
enum { DEPTH_LIMIT = 32, NODE_LIMIT = 1 << 20, SIZE_LIMIT = 16 << 20, TEXT_LIMIT = 1 << 16, NEST_LIMIT = 8 };

/* The root carries the arena in front of itself, so that one pointer owns the tree. */
typedef struct tree {
    vlai_yaml root;
    vlai_arena arena;
} tree;

typedef struct reader {
    yaml_document_t *document;
    vlai_arena *arena;
    const char *name;
    int flags;
    size_t nodes;
    vla_error *err;
} reader;

static vla_status build(reader *r, yaml_node_t *from, vlai_yaml *to, int depth);

static vla_status no_memory(reader *r)
{
    return vlai_fail(r->err, VLA_E_NOMEM, "%s: out of host memory while reading YAML", r->name);
}

/* ---- ${NAME} ---- */

static bool name_char(char c, bool first)
{
    return c == '_' || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (!first && c >= '0' && c <= '9');
}

/* The '}' that closes the text after "${", or NULL. Inner ${...} are skipped. */
static const char *closing_brace(const char *p)
{
    for (int depth = 0; *p; p++) {
        if (p[0] == '$' && p[1] == '{') {
            depth++;
            p++;
        } else if (*p == '}' && depth-- == 0) {
            return p;
        }
    }
    return NULL;
}

static vla_status expand(reader *r, int line, const char *from, size_t size, int nest, vlai_text *out)
{
    if (nest > NEST_LIMIT)
        return vlai_fail(r->err, VLA_E_INVALID, "%s:%d: ${...} nested more than %d deep", r->name, line, NEST_LIMIT);
    const char *end = from + size;
    for (const char *p = from; p < end;) {
        if (out->size > TEXT_LIMIT)
            return vlai_fail(r->err, VLA_E_INVALID, "%s:%d: a text grows beyond %d bytes when its variables are replaced",
                             r->name, line, TEXT_LIMIT);
        if (end - p > 2 && p[0] == '$' && p[1] == '$' && p[2] == '{') {
            vlai_text_puts(out, "${");
            p += 3;
            continue;
        }
        if (end - p < 2 || p[0] != '$' || p[1] != '{') {
            vlai_text_put(out, p++, 1);
            continue;
        }
        const char *name = p + 2, *stop = closing_brace(name), *q = name;
        while (q < end && name_char(*q, q == name))
            q++;
        bool has_default = stop && stop < end && q + 1 < stop && q[0] == ':' && q[1] == '-';
        if (!stop || stop >= end || q == name || (q != stop && !has_default))
            return vlai_fail_hint(r->err, VLA_E_INVALID, "write $${ for a literal ${",
                                  "%s:%d: '%.64s' is not of the form ${NAME} or ${NAME:-default}", r->name, line, p);
        char variable[256];
        snprintf(variable, sizeof variable, "%.*s", (int)(q - name < 255 ? q - name : 255), name);
        const char *value = getenv(variable);
        if (value && (*value || !has_default)) {
            vlai_text_puts(out, value);
        } else if (has_default) {
            VLA_TRY(expand(r, line, q + 2, (size_t)(stop - q - 2), nest + 1, out));
        } else {
            return vlai_fail_hint(r->err, VLA_E_INVALID, "set it, or write ${NAME:-default} in the file",
                                  "%s:%d: the environment variable %s is not set", r->name, line, variable);
        }
        p = stop + 1;
    }
    return VLA_OK;
}

/* ---- scalars ---- */

static bool one_of(const char *text, const char *const *words)
{
    for (; *words; words++)
        if (!strcmp(text, *words))
            return true;
    return false;
}

/* Copies without the underscores that YAML allows between digits; false when it cannot be a number. */
static bool plain_digits(const char *text, char *out, size_t size)
{
    size_t n = 0;
    for (const char *p = text; *p; p++) {
        if (*p == '_' && p > text)
            continue;
        if (!strchr("0123456789+-.eExXabcdfABCDF", *p) || n + 1 >= size)
            return false;
        out[n++] = *p;
    }
    out[n] = 0;
    return n > 0;
}

/* [-+]? then 0x.., 0b.., 0 followed by octal digits, or decimal digits. */
static bool read_integer(const char *digits, int64_t *out)
{
    const char *p = digits + (*digits == '-' || *digits == '+');
    int base = 10;
    if (p[0] == '0' && (p[1] == 'x' || p[1] == 'X'))
        base = 16, p += 2;
    else if (p[0] == '0' && (p[1] == 'b' || p[1] == 'B'))
        base = 2, p += 2;
    else if (p[0] == '0' && p[1])
        base = 8, p += 1;
    uint64_t value = 0, limit = (uint64_t)INT64_MAX + (*digits == '-');
    if (!*p)
        return false;
    for (; *p; p++) {
        int digit = *p >= '0' && *p <= '9'   ? *p - '0'
                    : *p >= 'a' && *p <= 'f' ? *p - 'a' + 10
                    : *p >= 'A' && *p <= 'F' ? *p - 'A' + 10
                                             : 99;
        if (digit >= base || value > (limit - (uint64_t)digit) / (uint64_t)base)
            return false;
        value = value * (uint64_t)base + (uint64_t)digit;
    }
    *out = *digits == '-' ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

static bool read_real(const char *digits, double *out)
{
    if (!strpbrk(digits, "0123456789") || strpbrk(digits, "xXabcdfABCDF"))
        return false;
    char *end;
    *out = strtod(digits, &end); /* the program never sets a locale, so the point is a point */
    return *end == 0 && isfinite(*out);
}

static void type_plain(vlai_yaml *node)
{
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const yes[] = {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", NULL};
    static const char *const no[] = {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", NULL};
    static const char *const inf[] = {".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF", NULL};
    static const char *const minus_inf[] = {"-.inf", "-.Inf", "-.INF", NULL};
    static const char *const nan[] = {".nan", ".NaN", ".NAN", NULL};
    char digits[64];
    const char *text = node->text;
    if (one_of(text, nulls)) {
        node->type = VLAI_YAML_NULL;
    } else if (one_of(text, yes) || one_of(text, no)) {
        node->type = VLAI_YAML_BOOL;
        node->boolean = one_of(text, yes);
    } else if (one_of(text, inf) || one_of(text, minus_inf) || one_of(text, nan)) {
        node->type = VLAI_YAML_REAL;
        node->real = one_of(text, nan) ? NAN : one_of(text, inf) ? INFINITY : -INFINITY;
    } else if (plain_digits(text, digits, sizeof digits)) {
        if (read_integer(digits, &node->integer)) {
            node->type = VLAI_YAML_INT;
            node->real = (double)node->integer;
        } else if (read_real(digits, &node->real)) {
            node->type = VLAI_YAML_REAL;
        }
    }
}

static vla_status read_text(reader *r, const yaml_node_t *from, int line, const char **out)
{
    const char *text = (const char *)from->data.scalar.value;
    size_t size = from->data.scalar.length;
    if (memchr(text, 0, size))
        return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: a text holds a zero byte", r->name, line);
    if (!(r->flags & VLAI_YAML_EXPAND) || !strstr(text, "${")) {
        *out = vlai_arena_strdup(r->arena, text);
        return *out ? VLA_OK : no_memory(r);
    }
    vlai_text expanded = {0};
    vla_status status = expand(r, line, text, size, 0, &expanded);
    if (status == VLA_OK && expanded.failed)
        status = no_memory(r);
    if (status == VLA_OK) {
        *out = vlai_arena_strdup(r->arena, expanded.data ? expanded.data : "");
        if (!*out)
            status = no_memory(r);
    }
    vlai_text_fini(&expanded);
    return status;
}

static vla_status build_scalar(reader *r, const yaml_node_t *from, vlai_yaml *to)
{
    to->type = VLAI_YAML_TEXT;
    VLA_TRY(read_text(r, from, to->line, &to->text));
    if (from->data.scalar.style == YAML_PLAIN_SCALAR_STYLE)
        type_plain(to);
    return VLA_OK;
}

/* ---- lists and maps ---- */

static vla_status new_node(reader *r, vlai_yaml **out)
{
    if (++r->nodes > NODE_LIMIT)
        return vlai_fail(r->err, VLA_E_FORMAT, "%s: more than %d YAML nodes (aliases counted at each use)", r->name,
                         NODE_LIMIT);
    *out = vlai_arena_alloc(r->arena, sizeof **out);
    return *out ? VLA_OK : no_memory(r);
}

static vla_status build_list(reader *r, const yaml_node_t *from, vlai_yaml *to, int depth)
{
    to->type = VLAI_YAML_LIST;
    const yaml_node_item_t *item = from->data.sequence.items.start, *top = from->data.sequence.items.top;
    size_t count = (size_t)(top - item);
    to->items = vlai_arena_alloc(r->arena, (count ? count : 1) * sizeof *to->items);
    if (!to->items)
        return no_memory(r);
    for (; item < top; item++) {
        VLA_TRY(new_node(r, &to->items[to->count]));
        VLA_TRY(build(r, yaml_document_get_node(r->document, *item), to->items[to->count], depth + 1));
        to->count++;
    }
    return VLA_OK;
}

static size_t find_key(const vlai_yaml *map, const char *key)
{
    size_t i = 0;
    while (i < map->count && strcmp(map->keys[i], key))
        i++;
    return i;
}

static bool is_merge(const yaml_node_t *key)
{
    return key->type == YAML_SCALAR_NODE && key->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           !strcmp((const char *)key->data.scalar.value, "<<");
}

/* The member is added at the end, or its value replaced where it stands. */
static void put_member(vlai_yaml *to, const char *key, int line, vlai_yaml *item)
{
    size_t i = find_key(to, key);
    to->keys[i] = key;
    to->key_lines[i] = line;
    to->items[i] = item;
    to->count += i == to->count;
}

/* Members that `<<` brings in: those of a map, or of each map of a list, the earlier one winning. The last map of a list
 * stands first, as in PyYAML. */
static vla_status merge_into(reader *r, vlai_yaml *to, const vlai_yaml *from)
{
    bool list = from->type == VLAI_YAML_LIST;
    for (size_t m = list ? from->count : 1; m > 0; m--) {
        const vlai_yaml *map = list ? from->items[m - 1] : from;
        if (map->type != VLAI_YAML_MAP)
            return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: '<<' takes a map or a list of maps", r->name, map->line);
        for (size_t i = 0; i < map->count; i++)
            put_member(to, map->keys[i], map->key_lines[i], map->items[i]);
    }
    return VLA_OK;
}

static size_t merged_count(const vlai_yaml *from)
{
    size_t count = from->type == VLAI_YAML_MAP ? from->count : 0;
    for (size_t i = 0; from->type == VLAI_YAML_LIST && i < from->count; i++)
        count += from->items[i]->type == VLAI_YAML_MAP ? from->items[i]->count : 0;
    return count;
}

/* Room for `capacity` members. */
static vla_status make_members(reader *r, vlai_yaml *map, size_t capacity)
{
    map->keys = vlai_arena_alloc(r->arena, (capacity + 1) * sizeof *map->keys);
    map->key_lines = vlai_arena_alloc(r->arena, (capacity + 1) * sizeof *map->key_lines);
    map->items = vlai_arena_alloc(r->arena, (capacity + 1) * sizeof *map->items);
    return map->keys && map->key_lines && map->items ? VLA_OK : no_memory(r);
}

/* Merged keys first, then own ones, which win where a merged one stands: the order of PyYAML, and a layout's order counts. */
static vla_status build_map(reader *r, const yaml_node_t *from, vlai_yaml *to, int depth)
{
    to->type = VLAI_YAML_MAP;
    const yaml_node_pair_t *start = from->data.mapping.pairs.start, *top = from->data.mapping.pairs.top;
    vlai_yaml *merged = NULL;
    size_t capacity = (size_t)(top - start);
    for (const yaml_node_pair_t *pair = start; pair < top; pair++) {
        if (!is_merge(yaml_document_get_node(r->document, pair->key)))
            continue;
        yaml_node_t *value = yaml_document_get_node(r->document, pair->value);
        if (merged)
            return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: '<<' stands twice in one map", r->name,
                             (int)value->start_mark.line + 1);
        VLA_TRY(new_node(r, &merged));
        VLA_TRY(build(r, value, merged, depth + 1));
        capacity += merged_count(merged);
    }
    if (capacity > NODE_LIMIT)
        return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: a map of %zu keys is too large", r->name, to->line, capacity);
    VLA_TRY(make_members(r, to, capacity));
    for (const yaml_node_pair_t *pair = start; pair < top; pair++) {
        yaml_node_t *key = yaml_document_get_node(r->document, pair->key);
        int line = (int)key->start_mark.line + 1;
        if (is_merge(key))
            continue;
        if (key->type != YAML_SCALAR_NODE || memchr(key->data.scalar.value, 0, key->data.scalar.length))
            return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: a key is not a plain text", r->name, line);
        const char *text = (const char *)key->data.scalar.value;
        size_t before = find_key(to, text);
        if (before < to->count)
            return vlai_fail_hint(r->err, VLA_E_FORMAT, "keep one of the two lines",
                                  "%s:%d: key '%.128s' stands already in line %d", r->name, line, text,
                                  to->key_lines[before]);
        to->keys[to->count] = vlai_arena_strdup(r->arena, text);
        if (!to->keys[to->count])
            return no_memory(r);
        to->key_lines[to->count] = line;
        VLA_TRY(new_node(r, &to->items[to->count]));
        VLA_TRY(build(r, yaml_document_get_node(r->document, pair->value), to->items[to->count], depth + 1));
        to->count++;
        if (to->count > 1 && to->count * to->count / 64 > NODE_LIMIT) /* the search above is linear */
            return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: a map of so many keys is too large", r->name, to->line);
    }
    if (!merged)
        return VLA_OK;
    const vlai_yaml own = *to;
    to->count = 0;
    VLA_TRY(make_members(r, to, capacity));
    VLA_TRY(merge_into(r, to, merged));
    for (size_t i = 0; i < own.count; i++)
        put_member(to, own.keys[i], own.key_lines[i], own.items[i]);
    return VLA_OK;
}

static vla_status build(reader *r, yaml_node_t *from, vlai_yaml *to, int depth)
{
    if (!from)
        return vlai_fail(r->err, VLA_E_INTERNAL, "%s: libyaml lost a node", r->name);
    to->line = (int)from->start_mark.line + 1;
    to->column = (int)from->start_mark.column + 1;
    if (depth > DEPTH_LIMIT)
        return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: more than %d levels deep (an alias that contains itself?)", r->name,
                         to->line, DEPTH_LIMIT);
    switch (from->type) {
    case YAML_SCALAR_NODE: return build_scalar(r, from, to);
    case YAML_SEQUENCE_NODE: return build_list(r, from, to, depth);
    case YAML_MAPPING_NODE: return build_map(r, from, to, depth);
    default: break;
    }
    return vlai_fail(r->err, VLA_E_FORMAT, "%s:%d: not a value", r->name, to->line);
}

/* libyaml's parser and composer recurse on flow collections, so depth is bounded before the document is composed. */
static vla_status check_depth(const char *data, size_t size, const char *name, vla_error *err)
{
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser))
        return vlai_fail(err, VLA_E_NOMEM, "%s: out of host memory while reading YAML", name);
    yaml_parser_set_input_string(&parser, (const unsigned char *)data, size);
    vla_status status = VLA_OK;
    size_t events = 0, documents = 0;
    for (int depth = 0, done = 0; !done && status == VLA_OK;) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event))
            break; /* composing meets the same error and words it */
        switch (event.type) {
        case YAML_SEQUENCE_START_EVENT:
        case YAML_MAPPING_START_EVENT: depth++; break;
        case YAML_SEQUENCE_END_EVENT:
        case YAML_MAPPING_END_EVENT: depth--; break;
        case YAML_DOCUMENT_START_EVENT: documents++; break;
        case YAML_STREAM_END_EVENT: done = 1; break;
        default: break;
        }
        if (documents > 1)
            status = vlai_fail(err, VLA_E_FORMAT, "%s:%d: a second document begins; one file holds one", name,
                               (int)event.start_mark.line + 1);
        if (depth > DEPTH_LIMIT || ++events > 2 * (size_t)NODE_LIMIT)
            status = vlai_fail(err, VLA_E_FORMAT, "%s:%d: %s", name, (int)event.start_mark.line + 1,
                               depth > DEPTH_LIMIT ? "more than 32 levels deep" : "too many YAML nodes");
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return status;
}

/* Whether a ${ stands in this line. */
static bool has_variable(const char *data, size_t size, size_t line)
{
    size_t i = 0;
    for (; i < size && line > 0; i++)
        line -= data[i] == '\n';
    for (; i + 1 < size && data[i] != '\n'; i++)
        if (data[i] == '$' && data[i + 1] == '{')
            return true;
    return false;
}

static vla_status compose(const char *data, size_t size, const char *name, int flags, tree *t, vla_error *err)
{
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser))
        return vlai_fail(err, VLA_E_NOMEM, "%s: out of host memory while reading YAML", name);
    yaml_parser_set_input_string(&parser, (const unsigned char *)data, size);
    yaml_document_t document;
    vla_status status = VLA_OK;
    if (!yaml_parser_load(&parser, &document)) {
        bool memory = parser.error == YAML_MEMORY_ERROR;
        size_t line = parser.problem_mark.line ? parser.problem_mark.line : parser.context_mark.line, column = parser.problem_mark.column;
        if (parser.error == YAML_READER_ERROR) { /* bytes that are no characters have an offset alone */
            line = column = 0;
            for (size_t i = 0; i < parser.problem_offset && i < size; i++, column++)
                if (data[i] == '\n') {
                    line++;
                    column = (size_t)-1;
                }
        }
        status = vlai_fail(err, memory ? VLA_E_NOMEM : VLA_E_FORMAT, "%s:%zu:%zu: not valid YAML: %s%s%s", name, line + 1,
                           column + 1, parser.problem ? parser.problem : "out of memory",
                           parser.context ? ", " : "", parser.context ? parser.context : "");
        if (parser.error == YAML_READER_ERROR)
            vlai_hint(err, status, "save the file as UTF-8 text");
        else if (!memory && has_variable(data, size, line))
            vlai_hint(err, status, "inside { } and [ ] a ${NAME} must stand between quotation marks");
    } else {
        reader r = {&document, &t->arena, name, flags, 0, err};
        yaml_node_t *root = yaml_document_get_root_node(&document);
        if (root)
            status = build(&r, root, &t->root, 0);
        yaml_document_delete(&document);
    }
    yaml_parser_delete(&parser);
    return status;
}

vla_status vlai_yaml_parse(const char *data, size_t size, const char *name, int flags, vlai_yaml **out, vla_error *err)
{
    *out = NULL;
    if (size > SIZE_LIMIT)
        return vlai_fail(err, VLA_E_FORMAT, "%s: %zu bytes of YAML, at most %d are read", name, size, SIZE_LIMIT);
    VLA_TRY(check_depth(data, size, name, err));
    tree *t = vlai_calloc(1, sizeof *t);
    if (!t)
        return vlai_nomem(err, sizeof *t);
    vla_status status = compose(data, size, name, flags, t, err);
    if (status != VLA_OK) {
        vlai_yaml_destroy(&t->root);
        return status;
    }
    *out = &t->root;
    return VLA_OK;
}

vla_status vlai_yaml_load(const char *path, int flags, vlai_yaml **out, vla_error *err)
{
    *out = NULL;
    char *data;
    size_t size;
    VLA_TRY(vlai_read_file(path, SIZE_LIMIT, &data, &size, err));
    vla_status status = vlai_yaml_parse(data, size, path, flags, out, err);
    vlai_free(data);
    return status;
}

void vlai_yaml_destroy(vlai_yaml *root)
{
    if (!root)
        return;
    tree *t = (tree *)root; /* the root is the tree's first member */
    vlai_arena_fini(&t->arena);
    vlai_free(t);
}

const vlai_yaml *vlai_yaml_get(const vlai_yaml *map, const char *key)
{
    if (!map || map->type != VLAI_YAML_MAP)
        return NULL;
    size_t i = find_key(map, key);
    return i < map->count ? map->items[i] : NULL;
}

const char *vlai_yaml_describe(const vlai_yaml *node, char *buffer, size_t size)
{
    switch (node->type) {
    case VLAI_YAML_NULL: snprintf(buffer, size, "null"); break;
    case VLAI_YAML_BOOL: snprintf(buffer, size, "%s", node->boolean ? "true" : "false"); break;
    case VLAI_YAML_INT:
    case VLAI_YAML_REAL: snprintf(buffer, size, "the number %.40s", node->text); break;
    case VLAI_YAML_TEXT: snprintf(buffer, size, "the text '%.60s'", node->text); break;
    case VLAI_YAML_LIST: snprintf(buffer, size, "a list of %zu", node->count); break;
    case VLAI_YAML_MAP: snprintf(buffer, size, "a map of %zu keys", node->count); break;
    }
    return buffer;
}
