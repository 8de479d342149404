#include "format/page_header.h"

#include <string.h>

typedef struct cursor {
    const uint8_t *at, *end;
} cursor;

enum { STOP, TRUE_, FALSE_, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT };

static bool varint(cursor *c, uint64_t *out)
{
    *out = 0;
    for (int shift = 0; shift < 64 && c->at < c->end; shift += 7) {
        uint8_t b = *c->at++;
        *out |= (uint64_t)(b & 0x7f) << shift;
        if (!(b & 0x80))
            return true;
    }
    return false;
}

static bool number(cursor *c, int32_t *out)
{
    uint64_t u;
    if (!varint(c, &u))
        return false;
    *out = (int32_t)((u >> 1) ^ (~(u & 1) + 1)); /* zigzag */
    return true;
}

static bool skip_bytes(cursor *c, uint64_t n)
{
    if (n > (uint64_t)(c->end - c->at))
        return false;
    c->at += n;
    return true;
}

/* The type of the next field and its number, which counts from *id. */
static bool field(cursor *c, int *type, int32_t *id)
{
    if (c->at == c->end)
        return false;
    uint8_t b = *c->at++;
    *type = b & 15;
    if (*type == STOP)
        return true;
    if (b >> 4)
        *id += b >> 4;
    else
        return number(c, id);
    return true;
}

static bool skip_value(cursor *c, int type, int depth)
{
    uint64_t n;
    int32_t ignored;
    if (depth > 16)
        return false;
    switch (type) {
    case TRUE_:
    case FALSE_: return true;
    case BYTE: return skip_bytes(c, 1);
    case I16:
    case I32:
    case I64: return varint(c, &n);
    case DOUBLE: return skip_bytes(c, 8);
    case BINARY: return varint(c, &n) && skip_bytes(c, n);
    case LIST:
    case SET: {
        if (c->at == c->end)
            return false;
        uint8_t b = *c->at++;
        int element = b & 15;
        n = b >> 4;
        if (n == 15 && !varint(c, &n))
            return false;
        for (; n; n--) {
            bool flag = element == TRUE_ || element == FALSE_; /* a byte each inside lists */
            if (c->at == c->end || !(flag ? skip_bytes(c, 1) : skip_value(c, element, depth + 1)))
                return false;
        }
        return true;
    }
    case STRUCT:
        for (ignored = 0;;) {
            int inner;
            if (!field(c, &inner, &ignored))
                return false;
            if (inner == STOP)
                return true;
            if (!skip_value(c, inner, depth + 1))
                return false;
        }
    default: return false;
    }
}

/* DataPageHeader: 1 values, 2 encoding. DataPageHeaderV2: 1 values, 4 encoding. */
static bool data_header(cursor *c, int32_t encoding_field, vlai_page_header *out)
{
    for (int32_t id = 0;;) {
        int type;
        if (!field(c, &type, &id))
            return false;
        if (type == STOP)
            return true;
        if (type == I32 && (id == 1 || id == encoding_field)) {
            if (!number(c, id == 1 ? &out->values : &out->encoding))
                return false;
        } else if (!skip_value(c, type, 0)) {
            return false;
        }
    }
}

bool vlai_page_header_parse(const uint8_t *data, size_t size, vlai_page_header *out)
{
    cursor c = {data, data + size};
    *out = (vlai_page_header){.type = -1, .compressed = -1};
    for (int32_t id = 0;;) {
        int type;
        if (!field(&c, &type, &id))
            return false;
        if (type == STOP)
            break;
        bool good;
        if (type == I32 && id == 1)
            good = number(&c, &out->type);
        else if (type == I32 && id == 3)
            good = number(&c, &out->compressed);
        else if (type == STRUCT && (id == 5 || id == 8))
            good = data_header(&c, id == 5 ? 2 : 4, out);
        else
            good = skip_value(&c, type, 0);
        if (!good)
            return false;
    }
    out->length = (size_t)(c.at - data);
    return out->type >= 0 && out->compressed >= 0 && out->values >= 0;
}
