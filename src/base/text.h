/* A growing byte string. Appending never reports errors one by one: the first failed allocation marks the string, and
 * vlai_text_status says so at the end. */
#ifndef VLAI_TEXT_H
#define VLAI_TEXT_H

#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>

VLA_BEGIN_DECLS

typedef struct vlai_text {
    char *data; /* zero-terminated once anything was appended; NULL before */
    size_t size, capacity;
    bool failed;
} vlai_text;

void vlai_text_put(vlai_text *text, const char *data, size_t size);
void vlai_text_puts(vlai_text *text, const char *string);
void vlai_text_printf(vlai_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The string in quotation marks, escaped as JSON wants it. */
void vlai_text_json(vlai_text *text, const char *string);
/* The shortest decimal form that reads back as the same double. */
void vlai_text_real(vlai_text *text, double value);
vla_status vlai_text_status(const vlai_text *text, vla_error *err);
void vlai_text_fini(vlai_text *text);

/* Byte offset of the first invalid UTF-8 sequence; `size` when there is none. */
size_t vlai_utf8_check(const char *text, size_t size);

/* The candidate nearest to `word` by edit distance, or NULL when none is near (distance above a third of its length). */
const char *vlai_nearest(const char *word, const char *const *candidates, size_t count);

VLA_END_DECLS

#endif
