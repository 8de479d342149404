#include "base/text.h"

#include "base/fail.h"
#include "base/memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

static bool make_room(vlai_text *text, size_t extra)
{
    if (text->failed || extra > SIZE_MAX / 4)
        return text->failed = true, false;
    size_t need = text->size + extra + 1;
    if (need <= text->capacity)
        return true;
    size_t capacity = text->capacity ? text->capacity * 2 : 64;
    if (capacity < need)
        capacity = need;
    char *grown = vlai_grow(text->data, text->size, capacity);
    if (!grown)
        return text->failed = true, false;
    text->data = grown;
    text->capacity = capacity;
    return true;
}

void vlai_text_put(vlai_text *text, const char *data, size_t size)
{
    if (!make_room(text, size))
        return;
    if (size)
        memcpy(text->data + text->size, data, size);
    text->size += size;
    text->data[text->size] = 0;
}

void vlai_text_puts(vlai_text *text, const char *string)
{
    vlai_text_put(text, string, strlen(string));
}

void vlai_text_printf(vlai_text *text, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n >= 0 && make_room(text, (size_t)n)) {
        vsnprintf(text->data + text->size, (size_t)n + 1, format, again);
        text->size += (size_t)n;
    }
    va_end(again);
}

void vlai_text_json(vlai_text *text, const char *string)
{
    vlai_text_puts(text, "\"");
    for (const char *c = string; *c; c++) {
        if (*c == '"' || *c == '\\')
            vlai_text_put(text, "\\", 1);
        if ((unsigned char)*c < 0x20)
            vlai_text_printf(text, "\\u%04x", (unsigned char)*c);
        else
            vlai_text_put(text, c, 1);
    }
    vlai_text_puts(text, "\"");
}

void vlai_text_real(vlai_text *text, double value)
{
    char buffer[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(buffer, sizeof buffer, "%.*g", digits, value);
        if (strtod(buffer, NULL) == value)
            break;
    }
    vlai_text_puts(text, buffer);
}

vla_status vlai_text_status(const vlai_text *text, vla_error *err)
{
    return text->failed ? vlai_nomem(err, text->capacity * 2) : VLA_OK;
}

void vlai_text_fini(vlai_text *text)
{
    vlai_free(text->data);
    *text = (vlai_text){0};
}

static size_t distance(const char *a, const char *b)
{
    enum { LIMIT = 96 };
    size_t n = strlen(a), m = strlen(b);
    if (n >= LIMIT || m >= LIMIT)
        return LIMIT;
    size_t row[LIMIT + 1];
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[m];
}

const char *vlai_nearest(const char *word, const char *const *candidates, size_t count)
{
    const char *best = NULL;
    size_t best_distance = strlen(word) / 3 + 2;
    for (size_t i = 0; i < count; i++) {
        size_t d = distance(word, candidates[i]);
        if (d < best_distance) {
            best_distance = d;
            best = candidates[i];
        }
    }
    return best;
}

size_t vlai_utf8_check(const char *text, size_t size)
{
    size_t i = 0;
    while (i < size) {
        if (!((uint8_t)text[i] & 0x80)) {
            i++;
            continue;
        }
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(size - i), &c);
        if (n <= 0)
            return i;
        i += (size_t)n;
    }
    return size;
}
