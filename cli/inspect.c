/* vla inspect: finds the subject. */
#include "inspect.h"

#include "command.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *text;
    command_fn run;
} subjects[] = {
#define X(name, text) {#name, text, inspect_##name},
    INSPECTS(X)
#undef X
};
enum { SUBJECTS = sizeof subjects / sizeof *subjects };

int command_inspect(int argc, char **argv)
{
    const char *names[SUBJECTS];
    for (int i = 0; i < SUBJECTS; i++) {
        if (argc > 1 && !strcmp(argv[1], subjects[i].name))
            return subjects[i].run(argc - 1, argv + 1);
        names[i] = subjects[i].name;
    }
    if (argc > 1 && strcmp(argv[1], "--help") && strcmp(argv[1], "-h"))
        return command_unknown("inspect", argv[1], names, SUBJECTS);
    FILE *to = argc > 1 ? stdout : stderr;
    fputs("Usage: vla inspect SUBJECT [arguments]\n\n", to);
    for (int i = 0; i < SUBJECTS; i++)
        fprintf(to, "  %-12s %s\n", subjects[i].name, subjects[i].text);
    fputs("\nExamples:\n  vla inspect plan --config configs/libero_local_perf.yml --batch 26\n  vla inspect plan --help\n", to);
    return argc > 1 ? EXIT_DONE : EXIT_USAGE;
}
