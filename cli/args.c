#include "args.h"

#include "command.h"
#include "train/config.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuse(const args *a, const char *option, const char *value, const char *wanted)
{
    fprintf(stderr, "vla %s: %s '%s': wanted %s\n  hint: vla %s --help\n", a->name, option, value, wanted, a->name);
    return EXIT_USAGE;
}

static int set(const args *a, const arg_row *row, const char *value)
{
    char *end, wanted[96];
    switch (row->kind) {
    case ARG_TEXT:
    case ARG_TEXTS:
        if (!*value)
            return refuse(a, row->name, value, "a value that is not empty");
        if (row->kind == ARG_TEXTS) {
            arg_texts *list = row->value;
            if (list->count == ARGS_MOST)
                return refuse(a, row->name, value, "no more of these");
            list->items[list->count++] = value;
            return -1;
        }
        *(const char **)row->value = value;
        return -1;
    case ARG_EMPTY:
    case ARG_MAYBE: *(const char **)row->value = value; return -1;
    case ARG_REAL: {
        double real = strtod(value, &end);
        if (end == value || *end || !isfinite(real))
            return refuse(a, row->name, value, "a number");
        *(double *)row->value = real;
        return -1;
    }
    default: {
        const int64_t least = row->kind == ARG_COUNT || row->kind == ARG_STEP;
        const int64_t most = row->kind == ARG_STEP || row->kind == ARG_SEED ? INT64_C(1000000000000000) : row->kind == ARG_THREADS ? 4096 : 1000000000;
        errno = 0;
        long long n = strtoll(value, &end, 10);
        if (end == value || *end || errno || n < least || n > most) {
            snprintf(wanted, sizeof wanted, "a whole number from %" PRId64 " to %" PRId64, least, most);
            return refuse(a, row->name, value, wanted);
        }
        *(int64_t *)row->value = n;
        return -1;
    }
    }
}

/* Dashes and underscores inside a name are alike: the references spell some options either way. */
static bool is_name(const char *name, const char *typed, size_t length)
{
    size_t i = 0;
    for (; name[i] && i < length; i++)
        if (name[i] != typed[i] && !(i > 1 && (name[i] == '-' || name[i] == '_') && (typed[i] == '-' || typed[i] == '_')))
            return false;
    return !name[i] && i == length;
}

size_t args_split(char *text, const char **names, size_t most)
{
    size_t n = 0;
    char *rest;
    for (char *name = strtok_r(text, ",", &rest); name; name = strtok_r(NULL, ",", &rest), n++)
        if (n < most)
            names[n] = name;
    names[n < most ? n : most] = NULL;
    return n;
}

bool args_match(const char *typed, const char *name, const char **value)
{
    size_t length = strcspn(typed, "=");
    *value = typed[length] ? typed + length + 1 : NULL;
    return is_name(name, typed, length);
}

int args_parse(args *a, int argc, char **argv)
{
    if (command_help(argc, argv, a->help))
        return EXIT_DONE;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        size_t length = strcspn(arg, "=");
        const arg_row *row = NULL;
        for (int r = 0; r < a->count && !row; r++)
            if (is_name(a->rows[r].name, arg, length))
                row = &a->rows[r];
        if (row && row->kind == ARG_FLAG && !arg[length]) {
            *(bool *)row->value = true;
        } else if (row && row->kind != ARG_FLAG) {
            bool bare = row->kind == ARG_MAYBE && (i + 1 == argc || argv[i + 1][0] == '-');
            const char *value = arg[length] ? arg + length + 1 : bare ? "" : i + 1 < argc ? argv[++i] : NULL;
            if (!value) {
                fprintf(stderr, "vla %s: %s needs a value\n  hint: vla %s --help says which\n", a->name, row->name, a->name);
                return EXIT_USAGE;
            }
            int code = set(a, row, value);
            if (code >= 0)
                return code;
        } else if (a->overrides && vlai_config_is_override(arg) && a->overrides_given < ARGS_MOST) {
            a->override[a->overrides_given++] = arg;
        } else if (a->positionals && !*arg) { /* else a path that is nowhere, or here */
            fprintf(stderr, "vla %s: an empty argument\n  hint: is a variable of the shell not set?\n", a->name);
            return EXIT_USAGE;
        } else if (a->positionals && arg[0] != '-' && a->positionals_given < ARGS_POSITIONALS) {
            a->positional[a->positionals_given++] = arg;
        } else {
            const char *known[64];
            int n = 0;
            for (; n < a->count && n < 64; n++)
                known[n] = a->rows[n].name;
            return command_unknown(a->name, arg, known, n);
        }
    }
    return -1;
}
