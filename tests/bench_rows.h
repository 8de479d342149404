/* What tests of `vla bench` read from its files of JSON lines. */
#ifndef BENCH_ROWS_H
#define BENCH_ROWS_H

#include "tiny.h"

#include <jansson.h>

/* The rows of one kind in a file; `strict`: every line must be an object. */
static inline json_t *rows_of(bool strict, const char *name, const char *kind)
{
    char *text = tiny_read(name, NULL), *rest;
    json_t *rows = json_array();
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *object = json_loads(line, 0, NULL);
        const char *own = json_string_value(json_object_get(object, "kind"));
        if (strict && !own)
            fail_msg("no object with a kind: %s", line);
        if (own && !strcmp(own, kind))
            json_array_append(rows, object);
        json_decref(object);
    }
    vlai_free(text);
    return rows;
}

static inline double number(const json_t *row, const char *key)
{
    const json_t *value = json_object_get(row, key);
    if (!json_is_number(value))
        fail_msg("'%s' is no number", key);
    return json_number_value(value);
}

#endif
