/* The reader maps each file once, checks its whole header before anything is handed out, and then answers by name from
 * a hash table. A file that shrinks while it is mapped is outside what can be checked here. */
#include "format/safetensors.h"

#include "base/bf16.h"
#include "base/fail.h"
#include "base/finite.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/text.h"
#include "format/pickle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* The same limit as the format's own library: no header of a real model comes near it. */
enum { HEADER_LIMIT = 100000000, PATH_SIZE = 4096 };

typedef struct file {
    char *path; /* in the arena */
    vlai_map map;
    bool borrowed; /* the memory is the caller's */
} file;

typedef struct pair {
    const char *key, *value;
} pair;

struct vlai_safetensors {
    vlai_arena arena; /* names, paths, metadata */
    file *files;
    size_t file_count, file_capacity;
    vlai_tensor_view *views;
    size_t view_count, view_capacity;
    pair *metadata;
    size_t metadata_count, metadata_capacity;
    uint32_t *slots; /* view index + 1, open addressing; 0 is empty */
    size_t slot_mask;
};

/* ---- names ---- */

static uint64_t hash_name(const char *name)
{
    return XXH3_64bits(name, strlen(name));
}

/* The slot that holds `name`, or the empty one where it would go. */
static size_t find_slot(const vlai_safetensors *st, const char *name)
{
    size_t i = (size_t)hash_name(name) & st->slot_mask;
    while (st->slots[i] && strcmp(st->views[st->slots[i] - 1].name, name))
        i = (i + 1) & st->slot_mask;
    return i;
}

static vla_status build_table(vlai_safetensors *st, vla_error *err)
{
    size_t size = 16;
    while (size < st->view_count * 2)
        size *= 2;
    st->slots = vlai_calloc(size, sizeof *st->slots);
    if (!st->slots)
        return vlai_nomem(err, size * sizeof *st->slots);
    st->slot_mask = size - 1;
    for (size_t i = 0; i < st->view_count; i++) {
        size_t slot = find_slot(st, st->views[i].name);
        if (st->slots[slot])
            return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s' stands already in %s", st->views[i].file,
                             st->views[i].name, st->views[st->slots[slot] - 1].file);
        st->slots[slot] = (uint32_t)i + 1;
    }
    return VLA_OK;
}

/* ---- one header ---- */

static vla_status read_dtype(const json_t *entry, vlai_tensor_view *view, vla_error *err)
{
    const char *text = json_string_value(json_object_get(entry, "dtype"));
    if (!text)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s' has no dtype string", view->file, view->name);
    for (int i = 1; i < VLA_DTYPE_COUNT; i++)
        if (!strcmp(text, vla_dtype_name((vla_dtype)i))) {
            view->dtype = (vla_dtype)i;
            return VLA_OK;
        }
    return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: tensor '%s' has dtype '%.32s', which is not read here", view->file,
                     view->name, text);
}

static vla_status read_shape(const json_t *entry, vlai_tensor_view *view, vla_error *err)
{
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape))
        return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s' has no shape list", view->file, view->name);
    size_t rank = json_array_size(shape);
    if (rank > VLAI_MAX_RANK)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: tensor '%s' has %zu dimensions, at most %d are read", view->file,
                         view->name, rank, VLAI_MAX_RANK);
    size_t elements = 1;
    for (size_t i = 0; i < rank; i++) {
        const json_t *dim = json_array_get(shape, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s': dimension %zu is not a non-negative integer",
                             view->file, view->name, i);
        view->shape[i] = json_integer_value(dim);
        if (!vlai_mul_size(elements, (size_t)view->shape[i], &elements) || elements > INT64_MAX)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s': the product of its shape overflows", view->file,
                             view->name);
    }
    view->rank = (int)rank;
    view->elements = (int64_t)elements;
    if (!vlai_mul_size(elements, vla_dtype_size(view->dtype), &view->bytes))
        return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s': its size in bytes overflows", view->file, view->name);
    return VLA_OK;
}

/* Offsets are relative to the data area, which is `data_size` bytes from `data`. */
static vla_status read_offsets(const json_t *entry, vlai_tensor_view *view, const uint8_t *data, size_t data_size,
                               vla_error *err)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s': data_offsets is not a pair of integers", view->file,
                         view->name);
    json_int_t begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s': data_offsets [%lld, %lld] are not a range", view->file,
                         view->name, (long long)begin, (long long)end);
    if ((uint64_t)end > data_size)
        return vlai_fail_hint(err, VLA_E_CORRUPT, "the file is cut short: copy or download it again",
                              "%s: tensor '%s' ends at byte %lld of the data, but the file has only %zu", view->file,
                              view->name, (long long)end, data_size);
    if ((uint64_t)(end - begin) != view->bytes)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%s' takes %lld bytes, its shape and dtype want %zu",
                         view->file, view->name, (long long)(end - begin), view->bytes);
    view->data = data + begin;
    return VLA_OK;
}

static vla_status read_metadata(vlai_safetensors *st, const char *path, json_t *object, vla_error *err)
{
    if (!json_is_object(object))
        return vlai_fail(err, VLA_E_CORRUPT, "%s: __metadata__ is not an object", path);
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) {
        if (!json_is_string(value))
            return vlai_fail(err, VLA_E_CORRUPT, "%s: __metadata__ entry '%.64s' is not a string", path, key);
        VLA_TRY(vlai_reserve((void **)&st->metadata, &st->metadata_capacity, st->metadata_count,
                             sizeof *st->metadata, err));
        pair *p = &st->metadata[st->metadata_count];
        p->key = vlai_arena_strdup(&st->arena, key);
        p->value = vlai_arena_strdup(&st->arena, json_string_value(value));
        if (!p->key || !p->value)
            return vlai_nomem(err, strlen(key) + json_string_length(value));
        st->metadata_count++;
    }
    return VLA_OK;
}

static int by_offset(const void *a, const void *b)
{
    const vlai_tensor_view *x = a, *y = b;
    if (x->data != y->data)
        return (uintptr_t)x->data < (uintptr_t)y->data ? -1 : 1;
    if (x->bytes != y->bytes) /* an empty tensor stands before the one that begins at the same byte */
        return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* After sorting, each tensor must begin where the one before ends and the last must end with the file. */
static vla_status check_layout(vlai_tensor_view *views, size_t count, const char *path, const uint8_t *data,
                               size_t data_size, vla_error *err)
{
    if (count)
        qsort(views, count, sizeof *views, by_offset);
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        size_t begin = (size_t)((const uint8_t *)views[i].data - data);
        if (begin < at)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: tensors '%s' and '%s' overlap", path, views[i - 1].name,
                             views[i].name);
        if (begin > at)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: %zu bytes before tensor '%s' belong to none", path, begin - at,
                             views[i].name);
        at = begin + views[i].bytes;
    }
    if (at != data_size)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: %zu bytes after the last tensor belong to none", path,
                         data_size - at);
    return VLA_OK;
}

static vla_status read_entries(vlai_safetensors *st, const char *path, json_t *header, const uint8_t *data,
                               size_t data_size, vla_error *err)
{
    size_t first = st->view_count;
    const char *name;
    json_t *entry;
    json_object_foreach(header, name, entry) {
        if (!strcmp(name, "__metadata__")) {
            VLA_TRY(read_metadata(st, path, entry, err));
            continue;
        }
        if (!json_is_object(entry))
            return vlai_fail(err, VLA_E_CORRUPT, "%s: the entry of tensor '%.256s' is not an object", path, name);
        if (st->view_count >= UINT32_MAX / 4)
            return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: more tensors than can be counted here", path);
        VLA_TRY(vlai_reserve((void **)&st->views, &st->view_capacity, st->view_count, sizeof *st->views, err));
        vlai_tensor_view *view = &st->views[st->view_count];
        *view = (vlai_tensor_view){.name = vlai_arena_strdup(&st->arena, name), .file = path};
        if (!view->name)
            return vlai_nomem(err, strlen(name));
        VLA_TRY(read_dtype(entry, view, err));
        VLA_TRY(read_shape(entry, view, err));
        VLA_TRY(read_offsets(entry, view, data, data_size, err));
        st->view_count++;
    }
    return check_layout(st->views ? st->views + first : NULL, st->view_count - first, path, data, data_size, err);
}

/* A tensor of a PyTorch file joins the others; its data stays in the map. */
static vla_status add_pickled(void *context, const vlai_tensor_view *view, vla_error *err)
{
    vlai_safetensors *st = context;
    VLA_TRY(vlai_reserve((void **)&st->views, &st->view_capacity, st->view_count, sizeof *st->views, err));
    vlai_tensor_view *copy = &st->views[st->view_count];
    *copy = *view;
    copy->name = vlai_arena_strdup(&st->arena, view->name);
    if (!copy->name)
        return vlai_nomem(err, strlen(view->name));
    st->view_count++;
    return VLA_OK;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

/* Whether the first 8 bytes are text, and that text with blanks for the ends of lines. */
static bool as_text(const uint8_t *bytes, char out[9])
{
    for (int i = 0; i < 8; i++) {
        if ((bytes[i] < ' ' && !strchr("\t\n\r", bytes[i])) || bytes[i] == 0 || bytes[i] > '~')
            return false;
        out[i] = bytes[i] < ' ' ? ' ' : (char)bytes[i];
    }
    out[8] = 0;
    return true;
}

/* Takes the file `name` in: from `memory`, or mapped when that is NULL. */
static vla_status add_contents(vlai_safetensors *st, const char *name, const vlai_map *memory, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&st->files, &st->file_capacity, st->file_count, sizeof *st->files, err));
    file *f = &st->files[st->file_count];
    *f = (file){.path = vlai_arena_strdup(&st->arena, name), .borrowed = memory != NULL};
    if (!f->path)
        return vlai_nomem(err, strlen(name));
    if (memory)
        f->map = *memory;
    else
        VLA_TRY(vlai_map_open(name, &f->map, err));
    st->file_count++;
    if (ends_with(name, ".pth") || ends_with(name, ".pt") || ends_with(name, ".bin"))
        return vlai_pickle_read(f->map.data, f->map.size, f->path, add_pickled, st, err);

    if (f->map.size < 8)
        return vlai_fail(err, VLA_E_FORMAT, "%s: %zu bytes are too few for a safetensors file", f->path, f->map.size);
    uint64_t length = 0;
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)f->map.data[i] << (8 * i);
    if (length > HEADER_LIMIT) {
        vla_status status = vlai_fail(err, VLA_E_FORMAT, "%s: the header claims %llu bytes, at most %d are read", f->path,
                                      (unsigned long long)length, HEADER_LIMIT);
        char begins[9];
        return as_text(f->map.data, begins)
                   ? vlai_hint(err, status, "it begins with the text '%s': give a safetensors file (a pointer of Git LFS and a saved web page are none)", begins)
                   : vlai_hint(err, status, "give a safetensors file: its first 8 bytes are the length of its header");
    }
    if (length > f->map.size - 8)
        return vlai_fail_hint(err, VLA_E_CORRUPT, "the file is cut short: copy or download it again",
                              "%s: the header claims %llu bytes, the file has only %zu after its length", f->path,
                              (unsigned long long)length, f->map.size - 8);
    const char *text = (const char *)f->map.data + 8;
    if (length == 0 || text[0] != '{')
        return vlai_fail(err, VLA_E_FORMAT, "%s: the header is not a JSON object", f->path);
    json_t *header;
    VLA_TRY(vlai_json_parse(text, (size_t)length, f->path, &header, err));
    vla_status status =
        read_entries(st, f->path, header, f->map.data + 8 + length, f->map.size - 8 - (size_t)length, err);
    json_decref(header);
    return status;
}

static vla_status add_file(vlai_safetensors *st, const char *name, vla_error *err)
{
    return add_contents(st, name, NULL, err);
}

/* ---- sets of files ---- */

static const file *find_file(const vlai_safetensors *st, const char *path)
{
    for (size_t i = 0; i < st->file_count; i++)
        if (!strcmp(st->files[i].path, path))
            return &st->files[i];
    return NULL;
}

/* Path of the shard `name` that an index in `dir` speaks of. A shard lies beside its index, nowhere else. */
static vla_status shard_path(char *out, const char *dir, const char *index, const char *name, vla_error *err)
{
    if (!name[0] || strchr(name, '/'))
        return vlai_fail(err, VLA_E_CORRUPT, "%s: '%.128s' is not the name of a file beside it", index, name);
    if (!vlai_path_join(out, PATH_SIZE, dir, name))
        return vlai_fail(err, VLA_E_INVALID, "%s/%.128s: path too long", dir, name);
    return VLA_OK;
}

static vla_status add_shards(vlai_safetensors *st, const char *index, const json_t *map, vla_error *err)
{
    char dir[PATH_SIZE], path[PATH_SIZE];
    if (snprintf(dir, sizeof dir, "%s", index) >= (int)sizeof dir)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", index);
    char *slash = strrchr(dir, '/');
    if (slash)
        slash[1] = 0;
    else
        snprintf(dir, sizeof dir, ".");
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)map, name, value) {
        if (!json_is_string(value))
            return vlai_fail(err, VLA_E_CORRUPT, "%s: the file of tensor '%.256s' is not a string", index, name);
        VLA_TRY(shard_path(path, dir, index, json_string_value(value), err));
        if (find_file(st, path))
            continue;
        vla_status status = add_file(st, path, err);
        if (status == VLA_E_NOT_FOUND)
            vlai_hint(err, status, "%s names it as the file of '%s': download the whole checkpoint", index, name);
        VLA_TRY(status);
    }
    VLA_TRY(build_table(st, err));
    json_object_foreach((json_t *)(uintptr_t)map, name, value) {
        VLA_TRY(shard_path(path, dir, index, json_string_value(value), err));
        const vlai_tensor_view *view = vlai_safetensors_find(st, name);
        if (!view || strcmp(view->file, path))
            return vlai_fail(err, VLA_E_CORRUPT, "%s: tensor '%.256s' should be in '%s' and is not there", index, name,
                             json_string_value(value));
    }
    return VLA_OK;
}

static vla_status add_index(vlai_safetensors *st, const char *index, vla_error *err)
{
    json_t *root, *map;
    VLA_TRY(vlai_json_load(index, &root, err));
    vla_status status = vlai_json_need(root, "weight_map", JSON_OBJECT, index, &map, err);
    if (status == VLA_OK)
        status = add_shards(st, index, map, err);
    json_decref(root);
    return status;
}

/* model.safetensors, else an index, else every *.safetensors by name. */
static vla_status add_directory(vlai_safetensors *st, const char *dir, vla_error *err)
{
    char path[PATH_SIZE];
    if (vlai_path_join(path, sizeof path, dir, "model.safetensors") && vlai_is_file(path))
        return add_file(st, path, err);
    if (vlai_path_join(path, sizeof path, dir, "model.safetensors.index.json") && vlai_is_file(path))
        return add_index(st, path, err);
    char **names;
    size_t count;
    VLA_TRY(vlai_list_dir(dir, &names, &count, err));
    vla_status status = VLA_OK;
    bool found = false;
    for (int pass = 0; pass < 2 && status == VLA_OK && !found; pass++)
        for (size_t i = 0; i < count && status == VLA_OK && (pass || !found); i++) {
            if (!ends_with(names[i], pass ? ".safetensors" : ".safetensors.index.json"))
                continue;
            found = true;
            if (!vlai_path_join(path, sizeof path, dir, names[i]))
                status = vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", dir, names[i]);
            else
                status = pass ? add_file(st, path, err) : add_index(st, path, err);
        }
    vlai_names_free(names, count);
    if (status == VLA_OK && !found)
        return vlai_fail_hint(err, VLA_E_NOT_FOUND, "name the folder that holds model.safetensors or its shards",
                              "%s: no *.safetensors file in this folder", dir);
    return status;
}

static vla_status finish(vlai_safetensors *st, vla_status status, vlai_safetensors **out, vla_error *err)
{
    if (status == VLA_OK && !st->slots)
        status = build_table(st, err);
    if (status != VLA_OK) {
        vlai_safetensors_close(st);
        return status;
    }
    *out = st;
    return VLA_OK;
}

vla_status vlai_safetensors_open(const char *path, vlai_safetensors **out, vla_error *err)
{
    *out = NULL;
    vlai_safetensors *st = vlai_calloc(1, sizeof *st);
    if (!st)
        return vlai_nomem(err, sizeof *st);
    vla_status status;
    if (vlai_is_dir(path))
        status = add_directory(st, path, err);
    else if (ends_with(path, ".index.json"))
        status = add_index(st, path, err);
    else
        status = add_file(st, path, err);
    return finish(st, status, out, err);
}

vla_status vlai_safetensors_open_memory(const void *data, size_t size, const char *name, vlai_safetensors **out,
                                        vla_error *err)
{
    *out = NULL;
    vlai_safetensors *st = vlai_calloc(1, sizeof *st);
    if (!st)
        return vlai_nomem(err, sizeof *st);
    const vlai_map memory = {data, size};
    return finish(st, add_contents(st, name, &memory, err), out, err);
}

void vlai_safetensors_close(vlai_safetensors *st)
{
    if (!st)
        return;
    for (size_t i = 0; i < st->file_count; i++)
        if (!st->files[i].borrowed)
            vlai_map_close(&st->files[i].map);
    vlai_free(st->files);
    vlai_free(st->views);
    vlai_free(st->metadata);
    vlai_free(st->slots);
    vlai_arena_fini(&st->arena);
    vlai_free(st);
}

size_t vlai_safetensors_count(const vlai_safetensors *st)
{
    return st->view_count;
}

const vlai_tensor_view *vlai_safetensors_at(const vlai_safetensors *st, size_t i)
{
    return i < st->view_count ? &st->views[i] : NULL;
}

const vlai_tensor_view *vlai_safetensors_find(const vlai_safetensors *st, const char *name)
{
    uint32_t index = st->slots[find_slot(st, name)];
    return index ? &st->views[index - 1] : NULL;
}

const char *vlai_safetensors_metadata(const vlai_safetensors *st, const char *key)
{
    for (size_t i = 0; i < st->metadata_count; i++)
        if (!strcmp(st->metadata[i].key, key))
            return st->metadata[i].value;
    return NULL;
}

/* ---- values ---- */

/* IEEE binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits. */
static float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FFu, bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000u | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        float value = (float)mantissa * 0x1p-24f; /* exact: subnormals are multiples of 2^-24 */
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static vla_status check_range(const vlai_tensor_view *view, int64_t first, int64_t n, vla_error *err)
{
    if (first < 0 || n < 0 || first > view->elements || n > view->elements - first)
        return vlai_fail(err, VLA_E_INVALID, "%s: tensor '%s': elements %lld to %lld asked for, it has %lld",
                         view->file, view->name, (long long)first, (long long)first + n, (long long)view->elements);
    return VLA_OK;
}

/* The source need not be aligned, hence the copy of each element. */
#define CONVERT(type, expression)                                   \
    for (int64_t i = 0; i < n; i++) {                               \
        type v;                                                     \
        memcpy(&v, from + (size_t)i * sizeof v, sizeof v);          \
        out[i] = (expression);                                      \
    }                                                               \
    return VLA_OK

vla_status vlai_tensor_to_float(const vlai_tensor_view *view, int64_t first, int64_t n, float *out, vla_error *err)
{
    VLA_TRY(check_range(view, first, n, err));
    const uint8_t *from = (const uint8_t *)view->data + (size_t)first * vla_dtype_size(view->dtype);
    switch (view->dtype) {
    case VLA_F32:
        if (n)
            memcpy(out, from, (size_t)n * sizeof *out);
        return VLA_OK;
    case VLA_F64: CONVERT(double, (float)v);
    case VLA_BF16: CONVERT(uint16_t, vlai_bf16_to_float(v));
    case VLA_F16: CONVERT(uint16_t, half_to_float(v));
    case VLA_I64: CONVERT(int64_t, (float)v);
    case VLA_I32: CONVERT(int32_t, (float)v);
    case VLA_I16: CONVERT(int16_t, (float)v);
    case VLA_I8: CONVERT(int8_t, (float)v);
    case VLA_U8: CONVERT(uint8_t, (float)v);
    case VLA_BOOL: CONVERT(uint8_t, v ? 1.0f : 0.0f);
    case VLA_U16: CONVERT(uint16_t, (float)v);
    case VLA_U32: CONVERT(uint32_t, (float)v);
    case VLA_U64: CONVERT(uint64_t, (float)v);
    default: break;
    }
    return vlai_fail(err, VLA_E_INTERNAL, "tensor '%s': dtype %d has no conversion", view->name, (int)view->dtype);
}

vla_status vlai_tensor_check_finite(const vlai_tensor_view *view, int64_t first, int64_t n, vla_error *err)
{
    VLA_TRY(check_range(view, first, n, err));
    int64_t bad = vlai_first_not_finite(view->dtype, (const char *)view->data + (size_t)first * vla_dtype_size(view->dtype), n);
    if (bad < 0)
        return VLA_OK;
    float value;
    VLA_TRY(vlai_tensor_to_float(view, first + bad, 1, &value, err));
    return vlai_fail_hint(err, VLA_E_NONFINITE,
                          "take another file or an older checkpoint: this one was damaged, or the training that wrote it had diverged",
                          "%s: tensor '%s' is %s at element %lld, wanted a finite number", view->file, view->name,
                          isnan(value) ? "nan" : value < 0 ? "-inf" : "inf", (long long)(first + bad));
}

vla_status vlai_tensor_to_int64(const vlai_tensor_view *view, int64_t first, int64_t n, int64_t *out, vla_error *err)
{
    VLA_TRY(check_range(view, first, n, err));
    const uint8_t *from = (const uint8_t *)view->data + (size_t)first * vla_dtype_size(view->dtype);
    switch (view->dtype) {
    case VLA_I64: CONVERT(int64_t, v);
    case VLA_I32: CONVERT(int32_t, v);
    case VLA_I16: CONVERT(int16_t, v);
    case VLA_I8: CONVERT(int8_t, v);
    case VLA_U8: CONVERT(uint8_t, v);
    case VLA_BOOL: CONVERT(uint8_t, v != 0);
    case VLA_U16: CONVERT(uint16_t, v);
    case VLA_U32: CONVERT(uint32_t, v);
    case VLA_U64:
        for (int64_t i = 0; i < n; i++) {
            uint64_t v;
            memcpy(&v, from + (size_t)i * sizeof v, sizeof v);
            if (v > INT64_MAX)
                return vlai_fail(err, VLA_E_DTYPE, "%s: tensor '%s': element %lld does not fit into int64", view->file,
                                 view->name, (long long)(first + i));
            out[i] = (int64_t)v;
        }
        return VLA_OK;
    default: break;
    }
    return vlai_fail(err, VLA_E_DTYPE, "%s: tensor '%s' has dtype %s, wanted integers", view->file, view->name,
                     vla_dtype_name(view->dtype));
}

/* ---- writing ---- */

static vla_status check_tensor(const char *path, const vlai_tensor_view *t, vla_error *err)
{
    size_t bytes = vla_dtype_size(t->dtype);
    if (!t->name || !t->name[0] || !strcmp(t->name, "__metadata__"))
        return vlai_fail(err, VLA_E_INVALID, "%s: '%s' cannot be the name of a tensor", path, t->name ? t->name : "");
    if (!bytes || t->rank < 0 || t->rank > VLAI_MAX_RANK)
        return vlai_fail(err, VLA_E_INVALID, "%s: tensor '%s': dtype %d or rank %d is out of range", path, t->name,
                         (int)t->dtype, t->rank);
    for (int i = 0; i < t->rank; i++)
        if (t->shape[i] < 0 || !vlai_mul_size(bytes, (size_t)t->shape[i], &bytes))
            return vlai_fail(err, VLA_E_SHAPE, "%s: tensor '%s': dimension %d (%lld) is negative or too large", path,
                             t->name, i, (long long)t->shape[i]);
    if (bytes != t->bytes)
        return vlai_fail(err, VLA_E_SHAPE, "%s: tensor '%s' brings %zu bytes, its shape and dtype want %zu", path,
                         t->name, t->bytes, bytes);
    return VLA_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static vla_status check_names(const char *path, const vlai_tensor_view *tensors, size_t count, vla_error *err)
{
    const char **names = vlai_array(count ? count : 1, sizeof *names);
    if (!names)
        return vlai_nomem(err, count * sizeof *names);
    for (size_t i = 0; i < count; i++)
        names[i] = tensors[i].name;
    vla_status status = VLA_OK;
    if (count)
        qsort(names, count, sizeof *names, by_name);
    for (size_t i = 1; i < count && status == VLA_OK; i++)
        if (!strcmp(names[i - 1], names[i]))
            status = vlai_fail(err, VLA_E_INVALID, "%s: tensor '%s' is given twice", path, names[i]);
    vlai_free(names);
    return status;
}

static vla_status build_header(const char *path, const vlai_tensor_view *tensors, size_t count,
                               const char *const *metadata, vlai_text *text, vla_error *err)
{
    vlai_text_puts(text, "{");
    if (metadata) {
        vlai_text_puts(text, "\"__metadata__\":{");
        for (size_t i = 0; metadata[i] && metadata[i + 1]; i += 2) {
            vlai_text_puts(text, i ? "," : "");
            vlai_text_json(text, metadata[i]);
            vlai_text_puts(text, ":");
            vlai_text_json(text, metadata[i + 1]);
        }
        vlai_text_puts(text, "}");
    }
    size_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        const vlai_tensor_view *t = &tensors[i];
        VLA_TRY(check_tensor(path, t, err));
        size_t end;
        if (!vlai_add_size(offset, t->bytes, &end))
            return vlai_fail(err, VLA_E_SHAPE, "%s: the tensors together overflow", path);
        vlai_text_puts(text, i || metadata ? "," : "");
        vlai_text_json(text, t->name);
        vlai_text_printf(text, ":{\"dtype\":\"%s\",\"shape\":[", vla_dtype_name(t->dtype));
        for (int d = 0; d < t->rank; d++)
            vlai_text_printf(text, "%s%lld", d ? "," : "", (long long)t->shape[d]);
        vlai_text_printf(text, "],\"data_offsets\":[%zu,%zu]}", offset, end);
        offset = end;
    }
    vlai_text_puts(text, "}");
    while (text->size % 8 && !text->failed) /* the data begins at a multiple of 8 */
        vlai_text_puts(text, " ");
    VLA_TRY(vlai_text_status(text, err));
    if (text->size > HEADER_LIMIT)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: a header of %zu bytes is more than the format's %d", path,
                         text->size, HEADER_LIMIT);
    return check_names(path, tensors, count, err);
}

static vla_status write_parts(const char *temporary, const vlai_text *header, const vlai_tensor_view *tensors,
                              size_t count, vlai_tensor_put put, void *context, vla_error *err)
{
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)((uint64_t)header->size >> (8 * i));
    vlai_writer writer;
    VLA_TRY(vlai_writer_open(&writer, temporary, err));
    vla_status status = vlai_writer_put(&writer, length, sizeof length, err);
    if (status == VLA_OK)
        status = vlai_writer_put(&writer, header->data, header->size, err);
    for (size_t i = 0; i < count && status == VLA_OK; i++) {
        uint64_t before = writer.offset;
        status = put(context, i, &writer, err);
        if (status == VLA_OK && writer.offset - before != tensors[i].bytes)
            status = vlai_fail(err, VLA_E_INTERNAL, "%s: tensor '%s': %llu bytes were written, wanted %zu", temporary,
                               tensors[i].name, (unsigned long long)(writer.offset - before), tensors[i].bytes);
    }
    if (status != VLA_OK) {
        vlai_writer_abort(&writer); /* closed already after a failed write; both are fine */
        return status;
    }
    return vlai_writer_close(&writer, err);
}

vla_status vlai_safetensors_stream(const char *path, const vlai_tensor_view *tensors, size_t count,
                                   const char *const *metadata, vlai_tensor_put put, void *context, vla_error *err)
{
    char temporary[PATH_SIZE];
    if (!vlai_temporary_file(path, temporary, sizeof temporary))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
    vlai_text header = {0};
    vla_status status = build_header(path, tensors, count, metadata, &header, err);
    if (status == VLA_OK)
        status = write_parts(temporary, &header, tensors, count, put, context, err);
    if (status == VLA_OK) {
        status = vlai_publish(temporary, path, err);
        if (status != VLA_OK)
            unlink(temporary);
    }
    vlai_text_fini(&header);
    return status;
}

static vla_status put_whole(void *context, size_t i, vlai_writer *writer, vla_error *err)
{
    const vlai_tensor_view *t = (const vlai_tensor_view *)context + i;
    return t->bytes ? vlai_writer_put(writer, t->data, t->bytes, err) : VLA_OK;
}

vla_status vlai_safetensors_write(const char *path, const vlai_tensor_view *tensors, size_t count,
                                  const char *const *metadata, vla_error *err)
{
    return vlai_safetensors_stream(path, tensors, count, metadata, put_whole, (void *)(uintptr_t)tensors, err);
}
