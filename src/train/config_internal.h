/* What the files of the configuration share: the option table as data. */
#ifndef VLAI_CONFIG_INTERNAL_H
#define VLAI_CONFIG_INTERNAL_H

#include "base/memory.h"
#include "base/text.h"
#include "format/yaml.h"
#include "train/config.h"

typedef enum option_kind {
    KIND_INT,
    KIND_REAL,
    KIND_BOOL,
    KIND_TEXT,
    KIND_PATH,
    KIND_CHOICE,
    KIND_DIMS,
    KIND_WORDS,
    KIND_WEIGHTS,
    KIND_NUMBERS,
    KIND_TEXTS,
    KIND_GROUPS,
    KIND_ANY,
} option_kind;

typedef enum option_status { STATUS_WORKS, STATUS_QUIET, STATUS_NOTED, STATUS_ONLY } option_status;

typedef struct option {
    const char *key;
    option_kind kind;
    size_t offset;            /* in the section's structure */
    double number;            /* default of INT, REAL, BOOL, CHOICE; NAN = null */
    const char *default_text; /* default of the others, or NULL */
    double low, high;
    option_status status;
    const char *text;
} option;

typedef struct section {
    const char *path;
    size_t offset; /* in vlai_config */
    const option *(*rows)(void);
    size_t count; /* of rows */
    size_t base;  /* number of the first row among those of all sections */
} section;

struct vlai_config_internal {
    vlai_arena arena;
    vlai_option_origin *origins; /* one per option */
    const char **notices;
    size_t notice_capacity;
};

/* All sections, in the order of the table; the array ends with a NULL path, whose base is the number of options. */
extern const section vlai_config_sections[];
const section *vlai_config_section(const char *path, size_t n); /* by the first n bytes of path; NULL: none */
/* The option of a full path such as "hyperparams.optimizer.eps", or NULL. */
const option *vlai_config_option(const char *path, const section **in);

static inline void *vlai_config_field(const vlai_config *config, const section *s, const option *o)
{
    return (char *)(uintptr_t)config + s->offset + o->offset;
}

/* "section.key", or "key" at the top. Returns `buffer`. */
const char *vlai_config_key(const section *s, const option *o, char *buffer, size_t size);
/* The alternatives of a CHOICE: i-th name without mark; NULL past the end. Returns `buffer`. */
const char *vlai_config_choice(const option *o, int i, char *buffer, size_t size, bool *refused);
/* What a value must be, in words: "an integer from 1 to 8". Returns `buffer`. */
const char *vlai_config_wanted(const option *o, char *buffer, size_t size);
/* The explanation of the row: of a CHOICE what stands behind its names. */
const char *vlai_config_explain(const option *o);

/* A text as JSON that reads back as itself: "${" is written "$${", because reading replaces variables. */
void vlai_config_put_text(vlai_text *out, const char *text);
vla_status vlai_config_notice(vlai_config *config, vla_error *err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* True when the value is that of the table. */
bool vlai_config_is_default(const vlai_config *config, const section *s, const option *o);
/* Derived values, old places of keys, and what must hold between keys. */
vla_status vlai_config_finish(vlai_config *config, vla_error *err);
vlai_option_origin *vlai_config_origin_of(const vlai_config *config, const char *key);

#endif
