/* YAML (and JSON, which is YAML) as a tree whose nodes know their lines, read through libyaml.
 *
 *     vlai_yaml *root;
 *     VLA_TRY(vlai_yaml_load("configs/libero.yml", 0, &root, err));
 *     const vlai_yaml *task = vlai_yaml_get(root, "task");
 *     vlai_yaml_destroy(root);
 *
 * Scalars follow YAML 1.1 as PyYAML reads it, except that 5e-5 and 1.0e8 are numbers. ${NAME} and ${NAME:-default} in
 * scalars are replaced by environment variables on request; an unquoted scalar is typed after that, so that
 * `workers: ${WORKERS:-4}` is a number. `$${` stands for `${`. Anchors, aliases and `<<` work; duplicate keys are
 * errors. Depth, size and the work that aliases can multiply are bounded. */
#ifndef VLAI_YAML_H
#define VLAI_YAML_H

#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef enum vlai_yaml_type {
    VLAI_YAML_NULL,
    VLAI_YAML_BOOL,
    VLAI_YAML_INT,
    VLAI_YAML_REAL,
    VLAI_YAML_TEXT,
    VLAI_YAML_LIST,
    VLAI_YAML_MAP,
} vlai_yaml_type;

typedef struct vlai_yaml vlai_yaml;
struct vlai_yaml {
    vlai_yaml_type type;
    int line, column;    /* from 1 */
    const char *text;    /* scalars: as written, variables replaced */
    bool boolean;        /* BOOL */
    int64_t integer;     /* INT */
    double real;         /* INT and REAL */
    size_t count;        /* LIST, MAP */
    const char **keys;   /* MAP */
    int *key_lines;      /* MAP */
    vlai_yaml **items;   /* LIST, MAP: values */
};

enum { VLAI_YAML_EXPAND = 1 }; /* replace ${NAME} */

vla_status vlai_yaml_load(const char *path, int flags, vlai_yaml **out, vla_error *err);
/* `name` stands for the file in messages. An empty document gives a null node. */
vla_status vlai_yaml_parse(const char *data, size_t size, const char *name, int flags, vlai_yaml **out, vla_error *err);
void vlai_yaml_destroy(vlai_yaml *root);

const vlai_yaml *vlai_yaml_get(const vlai_yaml *map, const char *key); /* NULL when absent or not a map */
/* "the text 'abc'", "a list of 3", … for messages about a value that does not fit. Returns `buffer`. */
const char *vlai_yaml_describe(const vlai_yaml *node, char *buffer, size_t size);

VLA_END_DECLS

#endif
