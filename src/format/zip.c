/* Layout (PKWARE's APPNOTE): entries, then the central directory, then its end record, which is found from the back. All
 * numbers are little-endian; zip64 fields replace those that are all ones. */
#include "format/zip.h"

#include "base/fail.h"
#include "base/memory.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum {
    END_SIZE = 22,
    LOCATOR_SIZE = 20,
    END64_SIZE = 56,
    CENTRAL_SIZE = 46,
    LOCAL_SIZE = 30,
    ENTRY_LIMIT = 1 << 20,
};

typedef struct archive {
    const uint8_t *data;
    size_t size;
    const char *name;
    vla_error *err;
} archive;

static uint64_t number(const uint8_t *p, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)p[i] << (8 * i);
    return value;
}

static vla_status damaged(const archive *a, const char *what)
{
    return vlai_fail(a->err, VLA_E_CORRUPT, "%s: damaged zip archive: %s", a->name, what);
}

static bool inside(const archive *a, uint64_t offset, uint64_t size)
{
    return offset <= a->size && size <= a->size - offset;
}

/* Offset and count of the central directory. */
static vla_status find_directory(const archive *a, uint64_t *offset, uint64_t *count)
{
    const uint8_t *end = NULL;
    *offset = *count = 0;
    for (size_t back = END_SIZE; back <= a->size && back <= END_SIZE + 65535 && !end; back++) {
        const uint8_t *p = a->data + a->size - back;
        if (!memcmp(p, "PK\5\6", 4) && number(p + 20, 2) == back - END_SIZE)
            end = p;
    }
    if (!end)
        return vlai_fail_hint(a->err, VLA_E_FORMAT, "a file of PyTorch before 1.6 must be saved again with a newer one",
                              "%s: not a zip archive, as torch.save writes it", a->name);
    *count = number(end + 10, 2);
    *offset = number(end + 16, 4);
    size_t at = (size_t)(end - a->data);
    if ((*count != 0xFFFF && *offset != 0xFFFFFFFF) || at < LOCATOR_SIZE || memcmp(end - LOCATOR_SIZE, "PK\6\7", 4))
        return VLA_OK;
    uint64_t where = number(end - LOCATOR_SIZE + 8, 8);
    if (!inside(a, where, END64_SIZE) || memcmp(a->data + where, "PK\6\6", 4))
        return damaged(a, "its 64-bit end record is not where it should be");
    *count = number(a->data + where + 32, 8);
    *offset = number(a->data + where + 48, 8);
    return VLA_OK;
}

/* Replaces those of size, stored size and offset that are all ones by the fields of the zip64 extra. */
static bool read_zip64(const uint8_t *extra, size_t size, uint64_t *fields[3])
{
    while (size >= 4) {
        uint64_t id = number(extra, 2), length = number(extra + 2, 2);
        if (length > size - 4)
            return false;
        const uint8_t *p = extra + 4, *end = p + length;
        for (int i = 0; i < 3 && id == 1; i++) {
            if (*fields[i] != 0xFFFFFFFF)
                continue;
            if (end - p < 8)
                return false;
            *fields[i] = number(p, 8);
            p += 8;
        }
        if (id == 1)
            return true;
        extra = end;
        size -= 4 + (size_t)length;
    }
    return true;
}

/* One record of the directory at `*offset`, which moves to the next. */
static vla_status read_entry(const archive *a, uint64_t *offset, vlai_zip_entry *out)
{
    if (!inside(a, *offset, CENTRAL_SIZE) || memcmp(a->data + *offset, "PK\1\2", 4))
        return damaged(a, "its directory is cut short");
    const uint8_t *p = a->data + *offset;
    uint64_t flags = number(p + 8, 2), method = number(p + 10, 2);
    uint64_t stored = number(p + 20, 4), size = number(p + 24, 4), local = number(p + 42, 4);
    size_t name_size = (size_t)number(p + 28, 2), extra_size = (size_t)number(p + 30, 2);
    size_t comment_size = (size_t)number(p + 32, 2);
    if (!inside(a, *offset + CENTRAL_SIZE, name_size + extra_size + comment_size))
        return damaged(a, "its directory is cut short");
    uint64_t *fields[] = {&size, &stored, &local};
    if (!read_zip64(p + CENTRAL_SIZE + name_size, extra_size, fields))
        return damaged(a, "a 64-bit field is cut short");
    *out = (vlai_zip_entry){(const char *)p + CENTRAL_SIZE, name_size, NULL, (size_t)size};
    *offset += CENTRAL_SIZE + name_size + extra_size + comment_size;
    if (method != 0 || (flags & 1))
        return VLA_OK;
    if (!inside(a, local, LOCAL_SIZE) || memcmp(a->data + local, "PK\3\4", 4))
        return damaged(a, "an entry does not begin where its directory says");
    uint64_t begin = local + LOCAL_SIZE + number(a->data + local + 26, 2) + number(a->data + local + 28, 2);
    if (stored != size || !inside(a, begin, size))
        return damaged(a, "an entry reaches beyond the file");
    out->data = a->data + begin;
    return VLA_OK;
}

static int compare(const char *a, size_t a_size, const char *b, size_t b_size)
{
    size_t n = a_size < b_size ? a_size : b_size;
    int order = n ? memcmp(a, b, n) : 0;
    return order ? order : (a_size > b_size) - (a_size < b_size);
}

static int by_name(const void *a, const void *b)
{
    const vlai_zip_entry *x = a, *y = b;
    return compare(x->name, x->name_size, y->name, y->name_size);
}

vla_status vlai_zip_open(const uint8_t *data, size_t size, const char *name, vlai_zip *out, vla_error *err)
{
    *out = (vlai_zip){NULL, 0};
    archive a = {data, size, name, err};
    uint64_t offset, count;
    VLA_TRY(find_directory(&a, &offset, &count));
    if (count > ENTRY_LIMIT || !inside(&a, offset, count * CENTRAL_SIZE))
        return damaged(&a, "it claims more entries than it can hold");
    out->entries = vlai_array((size_t)count + 1, sizeof *out->entries);
    if (!out->entries)
        return vlai_nomem(err, (size_t)count * sizeof *out->entries);
    vla_status status = VLA_OK;
    for (uint64_t i = 0; i < count && status == VLA_OK; i++)
        status = read_entry(&a, &offset, &out->entries[out->count++]);
    if (status != VLA_OK) {
        vlai_zip_close(out);
        return status;
    }
    if (out->count)
        qsort(out->entries, out->count, sizeof *out->entries, by_name);
    for (size_t i = 1; i < out->count; i++)
        if (!by_name(&out->entries[i - 1], &out->entries[i])) {
            vlai_zip_close(out);
            return damaged(&a, "two entries have one name");
        }
    return VLA_OK;
}

void vlai_zip_close(vlai_zip *zip)
{
    vlai_free(zip->entries);
    *zip = (vlai_zip){NULL, 0};
}

const vlai_zip_entry *vlai_zip_find(const vlai_zip *zip, const char *name)
{
    size_t low = 0, high = zip->count, n = strlen(name);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = compare(zip->entries[middle].name, zip->entries[middle].name_size, name, n);
        if (order == 0)
            return &zip->entries[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}
