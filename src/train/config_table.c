/* The rows of options.h as data, and words about them. */
#include "train/config_internal.h"

#include <stdio.h>
#include <string.h>

#define DEFAULT_INT(d) .number = (double)(d)
#define DEFAULT_REAL(d) .number = (d)
#define DEFAULT_BOOL(d) .number = (d)
#define DEFAULT_CHOICE(d) .number = (d)
#define DEFAULT_TEXT(d) .default_text = (d)
#define DEFAULT_PATH(d) .default_text = (d)
#define DEFAULT_DIMS(d) .default_text = (d)
#define DEFAULT_WORDS(d) .default_text = (d)
#define DEFAULT_WEIGHTS(d) .default_text = (d)
#define DEFAULT_NUMBERS(d) .default_text = (d)
#define DEFAULT_TEXTS(d) .default_text = (d)
#define DEFAULT_GROUPS(d) .default_text = (d)
#define DEFAULT_ANY(d) .default_text = (d)

#define ROW(KIND, KEY, DEFAULT, LOW, HIGH, STATUS, TEXT)                                             \
    {.key = #KEY,                                                                                    \
     .kind = KIND_##KIND,                                                                            \
     .offset = offsetof(here, KEY),                                                                  \
     DEFAULT_##KIND(DEFAULT),                                                                        \
     .low = LOW,                                                                                     \
     .high = HIGH,                                                                                   \
     .status = STATUS_##STATUS,                                                                      \
     .text = TEXT},

/* One function per section, because its rows take their offsets from the section's own structure. */
#define SECTION(path, member, rows)                  \
    static const option *rows_of_##member(void)      \
    {                                                \
        typedef struct vlai_section_##member here;   \
        static const option table[] = {rows(ROW)};   \
        return table;                                \
    }
VLAI_SECTIONS(SECTION)
#undef SECTION

/* Running sums of row counts: each section's last row is one before the next section's base. */
#define COUNT_ROW(...) +1
enum {
#define BASE(path, member, rows) BASE_##member, LAST_##member = BASE_##member + (0 rows(COUNT_ROW)) - 1,
    VLAI_SECTIONS(BASE)
#undef BASE
    BASE_END
};

const section vlai_config_sections[] = {
#define SECTION(path, member, rows) {path, offsetof(vlai_config, member), rows_of_##member, 0 rows(COUNT_ROW), BASE_##member},
    VLAI_SECTIONS(SECTION)
#undef SECTION
    {NULL, 0, NULL, 0, BASE_END},
};

const section *vlai_config_section(const char *path, size_t n)
{
    for (const section *s = vlai_config_sections; s->path; s++)
        if (strlen(s->path) == n && !memcmp(s->path, path, n))
            return s;
    return NULL;
}

const option *vlai_config_option(const char *path, const section **in)
{
    const char *dot = strrchr(path, '.');
    const section *s = vlai_config_section(path, dot ? (size_t)(dot - path) : 0);
    if (in)
        *in = s;
    for (size_t i = 0; s && i < s->count; i++)
        if (!strcmp(s->rows()[i].key, dot ? dot + 1 : path))
            return &s->rows()[i];
    return NULL;
}

vlai_option_origin *vlai_config_origin_of(const vlai_config *config, const char *key)
{
    const section *s;
    const option *o = vlai_config_option(key, &s);
    return o ? &config->internal->origins[s->base + (size_t)(o - s->rows())] : NULL;
}

vlai_option_origin vlai_config_origin(const vlai_config *config, const char *key)
{
    const vlai_option_origin *origin = vlai_config_origin_of(config, key);
    return origin ? *origin : (vlai_option_origin){NULL, 0};
}

const char *vlai_config_where(const vlai_config *config, const char *key, char *buffer, size_t size)
{
    vlai_option_origin origin = vlai_config_origin(config, key);
    if (!origin.file)
        snprintf(buffer, size, "%s: %s", config->path, key);
    else if (origin.line)
        snprintf(buffer, size, "%s:%d: %s", origin.file, origin.line, key);
    else
        snprintf(buffer, size, "%s: %s", origin.file, key);
    return buffer;
}

const char *vlai_config_key(const section *s, const option *o, char *buffer, size_t size)
{
    snprintf(buffer, size, "%s%s%s", s->path, *s->path ? "." : "", o->key);
    return buffer;
}

const char *vlai_config_choice(const option *o, int i, char *buffer, size_t size, bool *refused)
{
    const char *p = o->text;
    for (;; i--) {
        size_t n = strcspn(p, "|;");
        if (i == 0) {
            bool mark = n && p[n - 1] == '!';
            if (refused)
                *refused = mark;
            snprintf(buffer, size, "%.*s", (int)(n - mark), p);
            return buffer;
        }
        if (p[n] != '|')
            return NULL;
        p += n + 1;
    }
}

const char *vlai_config_explain(const option *o)
{
    if (o->kind != KIND_CHOICE)
        return o->text;
    const char *text = strchr(o->text, ';');
    return text ? text + 2 : "";
}

/* " from 1 to 8", " above 0, at most 1", " of at least 0": the bounds of the row in words. */
static void describe_bounds(const option *o, char *out, size_t size)
{
    bool open_low = o->low == DBL_MIN, open_high = o->high == 1 - DBL_EPSILON, no_high = o->high >= VLAI_BIG;
    if (open_low && no_high)
        snprintf(out, size, " above 0");
    else if (open_low)
        snprintf(out, size, " above 0, at most %.15g", o->high);
    else if (open_high)
        snprintf(out, size, " from %.15g to below 1", o->low);
    else if (no_high)
        snprintf(out, size, " of at least %.15g", o->low);
    else
        snprintf(out, size, " from %.15g to %.15g", o->low, o->high);
}

const char *vlai_config_wanted(const option *o, char *buffer, size_t size)
{
    char bounds[96];
    describe_bounds(o, bounds, sizeof bounds);
    switch (o->kind) {
    case KIND_INT: snprintf(buffer, size, "an integer%s", bounds); break;
    case KIND_REAL: snprintf(buffer, size, "a number%s", bounds); break;
    case KIND_BOOL: snprintf(buffer, size, "true or false"); break;
    case KIND_TEXT: snprintf(buffer, size, "a text"); break;
    case KIND_PATH: snprintf(buffer, size, "a path"); break;
    case KIND_DIMS: snprintf(buffer, size, "a map of names to integers%s", bounds); break;
    case KIND_WORDS: snprintf(buffer, size, "a map of names to texts"); break;
    case KIND_WEIGHTS: snprintf(buffer, size, "a map of names to numbers%s", bounds); break;
    case KIND_NUMBERS: snprintf(buffer, size, "a list of numbers%s", bounds); break;
    case KIND_TEXTS: snprintf(buffer, size, "a list of texts"); break;
    case KIND_GROUPS: snprintf(buffer, size, "a list of {name, lr, include, fail_on_empty}"); break;
    case KIND_ANY: snprintf(buffer, size, "any value"); break;
    case KIND_CHOICE: {
        size_t used = (size_t)snprintf(buffer, size, "one of");
        char name[64];
        bool refused;
        for (int i = 0; vlai_config_choice(o, i, name, sizeof name, &refused) && used < size; i++)
            if (!refused)
                used += (size_t)snprintf(buffer + used, size - used, "%s%s", i ? ", " : " ", name);
        break;
    }
    }
    return buffer;
}
