/* A stack machine for the opcodes that torch.save emits (pickle protocols 2 to 4). Values live in an arena until the
 * file has been read. Each opcode makes at most one value and moves what it consumes once, so time and memory grow
 * with the file alone. */
#include "format/pickle.h"

#include "base/fail.h"
#include "base/memory.h"
#include "format/zip.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* A state dict of a thousand tensors makes some thirty thousand values. */
enum { PICKLE_LIMIT = 64 << 20, VALUE_LIMIT = 1 << 21, VISIT_LIMIT = 1 << 20, DEPTH_LIMIT = 8, NAME_SIZE = 1024 };

typedef enum value_kind { NOTHING, NUMBER, TEXT, LIST, MAP, MARK, NAME, STORAGE, TENSOR, UNKNOWN } value_kind;

/* Names that mean something here. */
typedef enum known_name { NAME_OTHER, NAME_REBUILD, NAME_PARAMETER, NAME_ORDERED, NAME_STORAGE } known_name;

typedef struct value value;
struct value {
    value_kind kind;
    known_name name;
    vla_dtype dtype;      /* NAME_STORAGE, STORAGE, TENSOR */
    int64_t integer;      /* NUMBER (0 for a float); STORAGE: elements */
    const char *text;     /* TEXT: bytes of the pickle, `count` of them; STORAGE: key */
    value **items;        /* LIST, and MAP as key, value, key, value... */
    size_t count, capacity;
    const uint8_t *data; /* TENSOR */
    int rank;
    int64_t shape[VLAI_MAX_RANK];
    int64_t elements;
};

typedef struct machine {
    const char *file;
    vla_error *err;
    const uint8_t *at, *begin, *end;
    vlai_arena arena;
    const vlai_zip *zip;
    char prefix[NAME_SIZE]; /* of the entries: "archive/" */
    value **stack;
    size_t depth, capacity;
    value **memo;
    size_t memo_count, memo_capacity;
    size_t values; /* made so far */
    value *result;
} machine;

/* ---- primitives ---- */

static vla_status bad(machine *m, const char *what)
{
    return vlai_fail(m->err, VLA_E_CORRUPT, "%s: pickle, byte %zu: %s", m->file, (size_t)(m->at - m->begin), what);
}

static vla_status take(machine *m, size_t n, const uint8_t **out)
{
    *out = m->at;
    if ((size_t)(m->end - m->at) < n)
        return bad(m, "cut short");
    m->at += n;
    return VLA_OK;
}

static vla_status take_number(machine *m, int bytes, uint64_t *out)
{
    const uint8_t *p;
    VLA_TRY(take(m, (size_t)bytes, &p));
    *out = 0;
    for (int i = 0; i < bytes; i++)
        *out |= (uint64_t)p[i] << (8 * i);
    return VLA_OK;
}

static vla_status push(machine *m, value *v)
{
    VLA_TRY(vlai_reserve((void **)&m->stack, &m->capacity, m->depth, sizeof *m->stack, m->err));
    m->stack[m->depth++] = v;
    return VLA_OK;
}

static vla_status new_value(machine *m, value_kind kind, value **out)
{
    if (++m->values > VALUE_LIMIT)
        return bad(m, "more values than a state dict has");
    *out = vlai_arena_alloc(&m->arena, sizeof **out);
    if (!*out)
        return vlai_nomem(m->err, sizeof **out);
    (*out)->kind = kind;
    return VLA_OK;
}

static vla_status push_new(machine *m, value_kind kind, value **out)
{
    value *v;
    VLA_TRY(new_value(m, kind, &v));
    if (out)
        *out = v;
    return push(m, v);
}

static vla_status push_integer(machine *m, int64_t integer)
{
    value *v;
    VLA_TRY(push_new(m, NUMBER, &v));
    v->integer = integer;
    return VLA_OK;
}

static vla_status push_text(machine *m, size_t n)
{
    const uint8_t *p;
    value *v;
    VLA_TRY(take(m, n, &p));
    VLA_TRY(push_new(m, TEXT, &v));
    v->text = (const char *)p;
    v->count = n;
    return VLA_OK;
}

static vla_status pop(machine *m, value **out)
{
    if (!m->depth || m->stack[m->depth - 1]->kind == MARK)
        return bad(m, "a value is missing on the stack");
    *out = m->stack[--m->depth];
    return VLA_OK;
}

/* Counts the items above the last mark and takes both off; the items then begin at stack[depth], in the mark's place. */
static vla_status pop_to_mark(machine *m, size_t *count)
{
    size_t at = m->depth;
    while (at && m->stack[at - 1]->kind != MARK)
        at--;
    if (!at)
        return bad(m, "a mark is missing on the stack");
    *count = m->depth - at;
    m->depth = at - 1;
    memmove(m->stack + m->depth, m->stack + at, *count * sizeof *m->stack);
    return VLA_OK;
}

static vla_status append(machine *m, value *to, value *const *items, size_t count)
{
    if (to->count + count > to->capacity) {
        size_t capacity = to->capacity * 2 > to->count + count ? to->capacity * 2 : to->count + count;
        value **grown = vlai_arena_alloc(&m->arena, capacity * sizeof *grown);
        if (!grown)
            return vlai_nomem(m->err, capacity * sizeof *grown);
        if (to->count)
            memcpy(grown, to->items, to->count * sizeof *grown);
        to->items = grown;
        to->capacity = capacity;
    }
    if (count)
        memcpy(to->items + to->count, items, count * sizeof *items);
    to->count += count;
    return VLA_OK;
}

/* Makes a list of the last `count` values. */
static vla_status gather(machine *m, size_t count)
{
    value *list;
    value **items = m->stack + m->depth;
    for (size_t i = 0; i < count; i++)
        if (items[i]->kind == MARK)
            return bad(m, "a mark stands among values");
    VLA_TRY(new_value(m, LIST, &list));
    VLA_TRY(append(m, list, items, count));
    return push(m, list);
}

static bool is_text(const value *v, const char *text)
{
    return v->kind == TEXT && v->count == strlen(text) && !memcmp(v->text, text, v->count);
}

/* ---- names and what they rebuild ---- */

static void set_name(value *v, const char *module, size_t module_size, const char *name, size_t name_size)
{
    static const struct {
        const char *module, *name;
        known_name known;
        vla_dtype dtype;
    } table[] = {
        {"torch._utils", "_rebuild_tensor_v2", NAME_REBUILD, VLA_DTYPE_NONE},
        {"torch._utils", "_rebuild_parameter", NAME_PARAMETER, VLA_DTYPE_NONE},
        {"collections", "OrderedDict", NAME_ORDERED, VLA_DTYPE_NONE},
        {"torch", "FloatStorage", NAME_STORAGE, VLA_F32},
        {"torch", "DoubleStorage", NAME_STORAGE, VLA_F64},
        {"torch", "HalfStorage", NAME_STORAGE, VLA_F16},
        {"torch", "BFloat16Storage", NAME_STORAGE, VLA_BF16},
        {"torch", "LongStorage", NAME_STORAGE, VLA_I64},
        {"torch", "IntStorage", NAME_STORAGE, VLA_I32},
        {"torch", "ShortStorage", NAME_STORAGE, VLA_I16},
        {"torch", "CharStorage", NAME_STORAGE, VLA_I8},
        {"torch", "ByteStorage", NAME_STORAGE, VLA_U8},
        {"torch", "BoolStorage", NAME_STORAGE, VLA_BOOL},
    };
    v->kind = NAME;
    v->name = NAME_OTHER;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strlen(table[i].module) == module_size && !memcmp(table[i].module, module, module_size) &&
            strlen(table[i].name) == name_size && !memcmp(table[i].name, name, name_size)) {
            v->name = table[i].known;
            v->dtype = table[i].dtype;
        }
}

static vla_status take_line(machine *m, const char **line, size_t *n)
{
    const uint8_t *newline = memchr(m->at, '\n', (size_t)(m->end - m->at));
    *line = (const char *)m->at;
    *n = 0;
    if (!newline)
        return bad(m, "a name without end");
    *n = (size_t)(newline - m->at);
    m->at = newline + 1;
    return VLA_OK;
}

static vla_status op_global(machine *m)
{
    const char *module, *name;
    size_t module_size, name_size;
    value *v;
    VLA_TRY(take_line(m, &module, &module_size));
    VLA_TRY(take_line(m, &name, &name_size));
    VLA_TRY(push_new(m, NAME, &v));
    set_name(v, module, module_size, name, name_size);
    return VLA_OK;
}

static vla_status op_stack_global(machine *m)
{
    value *name, *module, *v;
    VLA_TRY(pop(m, &name));
    VLA_TRY(pop(m, &module));
    if (name->kind != TEXT || module->kind != TEXT)
        return bad(m, "a name is not a text");
    VLA_TRY(push_new(m, NAME, &v));
    set_name(v, module->text, module->count, name->text, name->count);
    return VLA_OK;
}

/* ('storage', type, key, location, elements) */
static vla_status op_persistent(machine *m)
{
    value *id, *v;
    VLA_TRY(pop(m, &id));
    if (id->kind != LIST || id->count < 5 || !is_text(id->items[0], "storage") || id->items[2]->kind != TEXT ||
        id->items[4]->kind != NUMBER)
        return bad(m, "not the reference to a storage");
    VLA_TRY(push_new(m, STORAGE, &v));
    v->dtype = id->items[1]->kind == NAME ? id->items[1]->dtype : VLA_DTYPE_NONE;
    v->text = id->items[2]->text;
    v->count = id->items[2]->count;
    v->integer = id->items[4]->integer;
    return VLA_OK;
}

static vla_status find_storage(machine *m, const value *storage, const vlai_zip_entry **out)
{
    char name[NAME_SIZE];
    int n = snprintf(name, sizeof name, "%sdata/%.*s", m->prefix, (int)(storage->count < 64 ? storage->count : 64),
                     storage->text);
    *out = n > 0 && n < NAME_SIZE && !memchr(storage->text, 0, storage->count) ? vlai_zip_find(m->zip, name) : NULL;
    if (!*out)
        return bad(m, "a storage has no entry in the archive");
    if (!(*out)->data)
        return vlai_fail(m->err, VLA_E_UNSUPPORTED, "%s: entry '%s' is compressed or encrypted", m->file, name);
    return VLA_OK;
}

/* (storage, offset, shape, strides, ...): a row-major piece of its storage, or refused. */
static vla_status rebuild_tensor(machine *m, const value *args)
{
    if (args->count < 4 || args->items[0]->kind != STORAGE || args->items[1]->kind != NUMBER ||
        args->items[2]->kind != LIST || args->items[3]->kind != LIST || args->items[2]->count != args->items[3]->count)
        return bad(m, "a tensor is not described as expected");
    const value *storage = args->items[0], *shape = args->items[2], *strides = args->items[3];
    size_t bytes = vla_dtype_size(storage->dtype), total, elements = 1, stride = 1;
    if (!bytes)
        return vlai_fail(m->err, VLA_E_UNSUPPORTED, "%s: a tensor has an element type that is not read here", m->file);
    if (shape->count > VLAI_MAX_RANK)
        return vlai_fail(m->err, VLA_E_UNSUPPORTED, "%s: a tensor has %zu dimensions, at most %d are read", m->file,
                         shape->count, VLAI_MAX_RANK);
    value *t;
    VLA_TRY(push_new(m, TENSOR, &t));
    t->dtype = storage->dtype;
    t->rank = (int)shape->count;
    for (int d = t->rank - 1; d >= 0; d--) {
        t->shape[d] = shape->items[d]->integer;
        if (shape->items[d]->kind != NUMBER || strides->items[d]->kind != NUMBER || t->shape[d] < 0)
            return bad(m, "a dimension is not a size");
        if (t->shape[d] > 1 && strides->items[d]->integer != (int64_t)stride)
            return vlai_fail_hint(m->err, VLA_E_UNSUPPORTED, "save it again with .contiguous()",
                                  "%s: a tensor is not stored row-major (dimension %d of size %lld has stride %lld)",
                                  m->file, d, (long long)t->shape[d], (long long)strides->items[d]->integer);
        /* PyTorch counts a dimension of size 0 as 1 in the strides before it. */
        if (!vlai_mul_size(stride, t->shape[d] ? (size_t)t->shape[d] : 1, &stride) || stride > INT64_MAX)
            return bad(m, "the product of a shape overflows");
        elements *= (size_t)t->shape[d];
    }
    t->elements = (int64_t)elements;
    const vlai_zip_entry *entry;
    VLA_TRY(find_storage(m, storage, &entry));
    int64_t offset = args->items[1]->integer, held = storage->integer;
    if (held < 0 || !vlai_mul_size((size_t)held, bytes, &total) || total > entry->size)
        return bad(m, "a storage claims more than its entry holds");
    if (offset < 0 || offset > held || t->elements > held - offset)
        return bad(m, "a tensor reaches beyond its storage");
    t->data = entry->data + (size_t)offset * bytes;
    return VLA_OK;
}

static vla_status op_reduce(machine *m)
{
    value *args, *function;
    VLA_TRY(pop(m, &args));
    VLA_TRY(pop(m, &function));
    if (args->kind != LIST)
        return bad(m, "arguments are not a tuple");
    known_name name = function->kind == NAME ? function->name : NAME_OTHER;
    if (name == NAME_REBUILD)
        return rebuild_tensor(m, args);
    if (name == NAME_PARAMETER && args->count && args->items[0]->kind == TENSOR)
        return push(m, args->items[0]);
    if (name == NAME_ORDERED && args->count == 0)
        return push_new(m, MAP, NULL);
    return push_new(m, UNKNOWN, NULL);
}

/* ---- containers ---- */

static vla_status op_set_items(machine *m, size_t count)
{
    value **items = m->stack + m->depth;
    if (!m->depth || count % 2)
        return bad(m, "keys and values do not pair up");
    value *map = m->stack[m->depth - 1];
    if (map->kind != MAP && map->kind != UNKNOWN)
        return bad(m, "items are set in what is not a map");
    return append(m, map, items, count);
}

static vla_status op_append(machine *m, size_t count)
{
    value **items = m->stack + m->depth;
    if (!m->depth)
        return bad(m, "a list is missing on the stack");
    value *list = m->stack[m->depth - 1];
    if (list->kind != LIST && list->kind != UNKNOWN)
        return bad(m, "items are appended to what is not a list");
    return append(m, list, items, count);
}

static vla_status op_put(machine *m, uint64_t index)
{
    if (!m->depth || m->stack[m->depth - 1]->kind == MARK)
        return bad(m, "nothing to remember");
    if (index > m->memo_count) /* picklers number their values through */
        return bad(m, "a memo number is out of order");
    if (index == m->memo_count) {
        VLA_TRY(vlai_reserve((void **)&m->memo, &m->memo_capacity, m->memo_count, sizeof *m->memo, m->err));
        m->memo_count++;
    }
    m->memo[index] = m->stack[m->depth - 1];
    return VLA_OK;
}

static vla_status op_get(machine *m, uint64_t index)
{
    return index < m->memo_count ? push(m, m->memo[index]) : bad(m, "a memo number that was never set");
}

static vla_status op_tuple(machine *m, size_t count)
{
    if (m->depth < count)
        return bad(m, "a value is missing on the stack");
    m->depth -= count;
    return gather(m, count);
}

static vla_status op_long(machine *m)
{
    uint64_t n, integer;
    VLA_TRY(take_number(m, 1, &n));
    if (n > 8)
        return bad(m, "an integer of more than 8 bytes");
    VLA_TRY(take_number(m, (int)n, &integer));
    if (n && n < 8 && (integer >> (8 * n - 1) & 1))
        integer |= ~(uint64_t)0 << (8 * n);
    return push_integer(m, (int64_t)integer);
}

/* One opcode. The letters are those of Python's pickle.py. */
static vla_status step(machine *m, bool *done)
{
    uint64_t n;
    size_t count;
    value *a;
    const uint8_t *skipped;
    VLA_TRY(take_number(m, 1, &n));
    switch (n) {
    case 0x80: /* PROTO */ return take(m, 1, &skipped);
    case 0x95: /* FRAME */ return take(m, 8, &skipped);
    case '.': /* STOP */ *done = true; return pop(m, &m->result);
    case '(': /* MARK */ return push_new(m, MARK, NULL);
    case '}': /* EMPTY_DICT */ return push_new(m, MAP, NULL);
    case ']': /* EMPTY_LIST */
    case ')': /* EMPTY_TUPLE */ return push_new(m, LIST, NULL);
    case 'N': /* NONE */ return push_new(m, NOTHING, NULL);
    case 0x88: /* NEWTRUE */ return push_integer(m, 1);
    case 0x89: /* NEWFALSE */ return push_integer(m, 0);
    case 'G': /* BINFLOAT */ VLA_TRY(take(m, 8, &skipped)); return push_integer(m, 0);
    case 'K': /* BININT1 */ VLA_TRY(take_number(m, 1, &n)); return push_integer(m, (int64_t)n);
    case 'M': /* BININT2 */ VLA_TRY(take_number(m, 2, &n)); return push_integer(m, (int64_t)n);
    case 'J': /* BININT */ VLA_TRY(take_number(m, 4, &n)); return push_integer(m, (int32_t)(uint32_t)n);
    case 0x8A: /* LONG1 */ return op_long(m);
    case 'X': /* BINUNICODE */ VLA_TRY(take_number(m, 4, &n)); return push_text(m, (size_t)n);
    case 0x8C: /* SHORT_BINUNICODE */ VLA_TRY(take_number(m, 1, &n)); return push_text(m, (size_t)n);
    case 'c': /* GLOBAL */ return op_global(m);
    case 0x93: /* STACK_GLOBAL */ return op_stack_global(m);
    case 'Q': /* BINPERSID */ return op_persistent(m);
    case 'R': /* REDUCE */ return op_reduce(m);
    case 'b': /* BUILD: state of an object, which nothing here needs */ return pop(m, &a);
    case 'q': /* BINPUT */ VLA_TRY(take_number(m, 1, &n)); return op_put(m, n);
    case 'r': /* LONG_BINPUT */ VLA_TRY(take_number(m, 4, &n)); return op_put(m, n);
    case 0x94: /* MEMOIZE */ return op_put(m, m->memo_count);
    case 'h': /* BINGET */ VLA_TRY(take_number(m, 1, &n)); return op_get(m, n);
    case 'j': /* LONG_BINGET */ VLA_TRY(take_number(m, 4, &n)); return op_get(m, n);
    case 't': /* TUPLE */
        VLA_TRY(pop_to_mark(m, &count));
        return gather(m, count);
    case 0x85: /* TUPLE1 */ return op_tuple(m, 1);
    case 0x86: /* TUPLE2 */ return op_tuple(m, 2);
    case 0x87: /* TUPLE3 */ return op_tuple(m, 3);
    case 'u': /* SETITEMS */
    case 'e': /* APPENDS */
        VLA_TRY(pop_to_mark(m, &count));
        return n == 'u' ? op_set_items(m, count) : op_append(m, count);
    case 's': /* SETITEM */
    case 'a': /* APPEND */
        count = n == 's' ? 2 : 1;
        if (m->depth < count)
            return bad(m, "a value is missing on the stack");
        m->depth -= count;
        for (size_t i = 0; i < count; i++)
            if (m->stack[m->depth + i]->kind == MARK)
                return bad(m, "a mark stands among values");
        return n == 's' ? op_set_items(m, 2) : op_append(m, 1);
    default: break;
    }
    m->at--;
    return vlai_fail(m->err, VLA_E_UNSUPPORTED, "%s: pickle, byte %zu: opcode 0x%02x is not read here", m->file,
                     (size_t)(m->at - m->begin), (unsigned)n);
}

/* ---- the archive ---- */

typedef struct walk {
    machine *m;
    vlai_pickle_tensor on_tensor;
    void *context;
    size_t visits, tensors;
    char name[NAME_SIZE];
} walk;

/* Hands out the tensors of a map; `used` bytes of the name are the path to it. */
static vla_status walk_map(walk *w, const value *map, size_t used, int depth)
{
    for (size_t i = 0; i + 1 < map->count; i += 2) {
        const value *key = map->items[i], *v = map->items[i + 1];
        if (++w->visits > VISIT_LIMIT)
            return bad(w->m, "more than a million entries");
        if (key->kind != TEXT || (v->kind != TENSOR && v->kind != MAP))
            continue;
        if (used + key->count + 2 > NAME_SIZE || memchr(key->text, 0, key->count))
            return bad(w->m, "a tensor's name is too long or holds a zero byte");
        memcpy(w->name + used, key->text, key->count);
        size_t n = used + key->count;
        w->name[n] = 0;
        if (v->kind == MAP) {
            w->name[n++] = '.';
            if (depth < DEPTH_LIMIT)
                VLA_TRY(walk_map(w, v, n, depth + 1));
            continue;
        }
        vlai_tensor_view view = {.name = w->name, .dtype = v->dtype, .rank = v->rank, .elements = v->elements, .data = v->data,
                                 .bytes = (size_t)v->elements * vla_dtype_size(v->dtype), .file = w->m->file};
        memcpy(view.shape, v->shape, sizeof view.shape);
        w->tensors++;
        VLA_TRY(w->on_tensor(w->context, &view, w->m->err));
    }
    return VLA_OK;
}

static const value *choose_map(const value *root)
{
    static const char *const wrappers[] = {"model_state_dict", "state_dict", "model_state", "backbone_state_dict", "model",
                                           "module"};
    for (size_t k = 0; k < sizeof wrappers / sizeof *wrappers; k++)
        for (size_t i = 0; i + 1 < root->count; i += 2)
            if (is_text(root->items[i], wrappers[k]) && root->items[i + 1]->kind == MAP)
                return root->items[i + 1];
    return root;
}

/* Finds the pickle; the folder it stands in is the prefix of all entries. */
static vla_status find_pickle(machine *m)
{
    for (size_t i = 0; i < m->zip->count; i++) {
        const vlai_zip_entry *e = &m->zip->entries[i];
        if (e->name_size < 8 || memcmp(e->name + e->name_size - 8, "data.pkl", 8))
            continue;
        size_t prefix = e->name_size - 8;
        if ((prefix && e->name[prefix - 1] != '/') || prefix >= NAME_SIZE - 80)
            continue;
        if (!e->data || e->size > PICKLE_LIMIT)
            return vlai_fail(m->err, VLA_E_UNSUPPORTED, "%s: its pickle is compressed or larger than %d bytes", m->file,
                             PICKLE_LIMIT);
        memcpy(m->prefix, e->name, prefix);
        m->prefix[prefix] = 0;
        m->at = m->begin = e->data;
        m->end = e->data + e->size;
        char name[NAME_SIZE];
        snprintf(name, sizeof name, "%.*sbyteorder", (int)prefix, e->name);
        const vlai_zip_entry *order = vlai_zip_find(m->zip, name);
        if (order && (!order->data || order->size != 6 || memcmp(order->data, "little", 6)))
            return vlai_fail(m->err, VLA_E_UNSUPPORTED, "%s: its byte order is not little", m->file);
        return VLA_OK;
    }
    return vlai_fail(m->err, VLA_E_FORMAT, "%s: a zip archive without data.pkl, not one of torch.save", m->file);
}

static vla_status read_archive(machine *m, vlai_pickle_tensor on_tensor, void *context)
{
    VLA_TRY(find_pickle(m));
    for (bool done = false; !done;)
        VLA_TRY(step(m, &done));
    if (m->result->kind != MAP)
        return bad(m, "the file does not hold a map of tensors");
    walk w = {.m = m, .on_tensor = on_tensor, .context = context};
    VLA_TRY(walk_map(&w, choose_map(m->result), 0, 0));
    return w.tensors ? VLA_OK : vlai_fail(m->err, VLA_E_NOT_FOUND, "%s: no tensor under a name in this file", m->file);
}

vla_status vlai_pickle_read(const uint8_t *data, size_t size, const char *name, vlai_pickle_tensor on_tensor,
                            void *context, vla_error *err)
{
    vlai_zip zip;
    VLA_TRY(vlai_zip_open(data, size, name, &zip, err));
    machine m = {.file = name, .err = err, .zip = &zip};
    vla_status status = read_archive(&m, on_tensor, context);
    vlai_free(m.stack);
    vlai_free(m.memo);
    vlai_arena_fini(&m.arena);
    vlai_zip_close(&zip);
    return status;
}
