/* The program, run in the folder of a test (folder.h), where DEMO names that folder. Needs VLA_TEST_PROGRAM. */
#ifndef VLA_TEST_PROGRAM_H
#define VLA_TEST_PROGRAM_H

#include "folder.h"

#include "base/memory.h"

#include <sys/wait.h>

/* vla with these arguments, as a shell reads them; its output is then in out.txt. Returns its exit code. */
__attribute__((format(printf, 1, 2))) static inline int run(const char *format, ...)
{
    char command[4096];
    int n = snprintf(command, sizeof command, "cd '%s' && DEMO='%s' '%s' ", root, root, VLA_TEST_PROGRAM);
    va_list args;
    va_start(args, format);
    n += vsnprintf(command + n, sizeof command - (size_t)n, format, args);
    va_end(args);
    snprintf(command + n, sizeof command - (size_t)n, " >out.txt 2>&1");
    return WEXITSTATUS(system(command));
}

static inline bool output_has(const char *part)
{
    vla_error err = VLA_ERROR_INIT;
    char *text;
    assert_ok(vlai_read_file(at("out.txt"), 0, &text, NULL, &err), err);
    bool found = strstr(text, part) != NULL;
    if (!found)
        print_error("'%s' lacks '%s'\n", text, part);
    vlai_free(text);
    return found;
}

#endif
