/* Test programs in parts, for tools under which the whole of one takes too long (tools/gpu-test, stage sanitizer):
 *
 *     PROGRAM --list                        names of the parts, one a line; wants no GPU
 *     PROGRAM [--short | --few] [NAME[:I/N]...]     these parts alone, of NAME the I-th of N shares (1 to N); --short: fewer rounds of
 *                                                   the same code; --few: besides, of every kind of problem one, as small as shows
 *                                                   all that its kernels do: racecheck takes about a tenth of a second a launch
 *
 * A part that can be shared out asks `in_share()` before each of its pieces. */
#ifndef VLA_PARTS_H
#define VLA_PARTS_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

typedef struct test_part {
    const char *name;
    void (*run)(void);
} test_part;

static struct {
    bool brief; /* --short, --few */
    bool few;
    int share, of;
    long asked;
} test_parts = {.share = 1, .of = 1};

/* --short, --few: is the argument one of them? Sets what it asks for. */
static inline bool parts_option(const char *argument)
{
    bool few = !strcmp(argument, "--few"), is = few || !strcmp(argument, "--short");
    test_parts.brief |= is;
    test_parts.few |= few;
    return is;
}

/* "I/N"; false, and nothing changes, where it is something else. */
static inline bool parts_share(const char *text)
{
    int share, of;
    char more;
    if (sscanf(text, "%9d/%9d%c", &share, &of, &more) != 2 || share < 1 || share > of)
        return false;
    test_parts.share = share;
    test_parts.of = of;
    test_parts.asked = 0;
    return true;
}

static inline bool in_share(void)
{
    return test_parts.asked++ % test_parts.of == test_parts.share - 1;
}

/* The part that an argument names, its share set; NULL: none. */
static inline const test_part *parts_find(const test_part *list, size_t n, const char *argument)
{
    const char *colon = strchr(argument, ':');
    size_t length = colon ? (size_t)(colon - argument) : strlen(argument);
    if (!parts_share(colon ? colon + 1 : "1/1"))
        return NULL;
    for (size_t i = 0; i < n; i++)
        if (strlen(list[i].name) == length && !strncmp(list[i].name, argument, length))
            return &list[i];
    return NULL;
}

/* Before a GPU is looked for: *code is what the program ends with where false comes back. */
static inline bool parts_begin(int argc, char **argv, const test_part *list, size_t n, int *code)
{
    *code = 0;
    for (int i = 1; i < argc; i++) {
        bool lists = !strcmp(argv[i], "--list");
        for (size_t k = 0; lists && k < n; k++)
            printf("%s\n", list[k].name);
        if (lists)
            return false;
        if (!parts_option(argv[i]) && !parts_find(list, n, argv[i])) {
            printf("'%s' is no part of this program: --list names them, NAME:I/N is a share\n0 passed, 1 failed\n", argv[i]);
            *code = 2;
            return false;
        }
    }
    return true;
}

/* All parts, or those that are named; after(name) behind each, unless NULL. */
static inline void parts_run(int argc, char **argv, const test_part *list, size_t n, void (*after)(const char *name))
{
    int named = 0;
    for (int i = 1; i < argc; i++) {
        if (parts_option(argv[i]))
            continue;
        const test_part *p = parts_find(list, n, argv[i]);
        named++;
        p->run();
        if (after)
            after(argv[i]);
    }
    parts_share("1/1");
    for (size_t k = 0; !named && k < n; k++) {
        list[k].run();
        if (after)
            after(list[k].name);
    }
}

#endif
