/* Command-line arguments from a table: one row per option.
 *
 *     int64_t batch = 0; bool json = false; const char *config = NULL;
 *     const arg_row rows[] = {{"--config", ARG_TEXT, &config}, {"--batch", ARG_COUNT, &batch}, {"--json", ARG_FLAG, &json}};
 *     args a = {.name = "bench", .help = help, .rows = rows, .count = 3, .overrides = true};
 *     int code = args_parse(&a, argc, argv);
 *     if (code >= 0) return code;                 // help was printed, or the arguments are wrong
 *
 * Values come as `--batch 4` or `--batch=4`; dashes and underscores in names are alike. With `overrides`, --section.key=value is collected for vlai_config_load. */
#ifndef CLI_ARGS_H
#define CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum arg_kind {
    ARG_FLAG,  /* bool */
    ARG_TEXT,  /* const char *, not empty */
    ARG_EMPTY, /* const char *, may be empty: what a script passes on of a variable */
    ARG_MAYBE, /* const char *: "" when another option or nothing follows */
    ARG_TEXTS, /* arg_texts: may be given several times */
    ARG_COUNT, /* int64_t from 1 to 10^9 */
    ARG_INT,   /* int64_t from 0 to 10^9 */
    ARG_STEP,  /* int64_t from 1 to 10^15, as far as the configuration counts steps */
    ARG_SEED,  /* int64_t from 0 to 10^15 */
    ARG_THREADS, /* int64_t from 0 to 4096 */
    ARG_REAL,  /* double, finite */
} arg_kind;

typedef struct arg_row {
    const char *name;
    arg_kind kind;
    void *value;
} arg_row;

enum { ARGS_MOST = 256, ARGS_POSITIONALS = 4096 };

typedef struct arg_texts {
    const char *items[ARGS_MOST];
    size_t count;
} arg_texts;

typedef struct args {
    const char *name, *help;
    const arg_row *rows;
    int count;
    bool overrides;   /* take --section.key=value */
    bool positionals; /* take arguments without dashes */
    const char *override[ARGS_MOST];
    size_t overrides_given;
    const char *positional[ARGS_POSITIONALS];
    size_t positionals_given;
} args;

/* -1: go on; else the exit code, everything said. */
int args_parse(args *a, int argc, char **argv);

/* The names of "A,B,C", which become strings of `text` itself, into names[], ended by NULL: most of them at most. How many there were. */
size_t args_split(char *text, const char **names, size_t most);

/* For commands with tables of their own: whether `typed` is `name` or `name=value`; *value is what follows the '=', or NULL. */
bool args_match(const char *typed, const char *name, const char **value);

#endif
