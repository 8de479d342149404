/* JSON through jansson, with errors that name the file and the key. Objects keep the order of their keys. */
#ifndef VLAI_JSON_H
#define VLAI_JSON_H

#include "vla/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

VLA_BEGIN_DECLS

/* Parses a whole file; duplicate keys and a byte-order mark are errors. `*out` is released with json_decref. */
vla_status vlai_json_load(const char *path, json_t **out, vla_error *err);
vla_status vlai_json_parse(const char *data, size_t size, const char *name, json_t **out, vla_error *err);
/* Writes with 2-space indent and a final newline, whole or not at all. */
vla_status vlai_json_save(const json_t *value, const char *path, vla_error *err);

/* A string of any text: bytes that are no UTF-8, as in names of files and in messages that were cut, become U+FFFD each, where jansson
 * would refuse the whole. NULL without memory. */
json_t *vlai_json_text(const char *text);

/* Members of `object`, which stands in file `where`. A missing member or null gives the default; without a default (the
 * _need forms) it is an error. A member of another type is always an error. Integers accept 10.0. */
vla_status vlai_json_int(const json_t *object, const char *key, int64_t fallback, const char *where, int64_t *out,
                         vla_error *err);
vla_status vlai_json_real(const json_t *object, const char *key, double fallback, const char *where, double *out,
                          vla_error *err);
vla_status vlai_json_bool(const json_t *object, const char *key, bool fallback, const char *where, bool *out,
                          vla_error *err);
vla_status vlai_json_string(const json_t *object, const char *key, const char *fallback, const char *where,
                            const char **out, vla_error *err);
vla_status vlai_json_need_int(const json_t *object, const char *key, const char *where, int64_t *out, vla_error *err);
vla_status vlai_json_need(const json_t *object, const char *key, json_type type, const char *where, json_t **out,
                          vla_error *err);

VLA_END_DECLS

#endif
