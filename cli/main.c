/* The program `vla`: finds the command and maps a status to an exit code, in one place. */
#include "command.h"
#include "interrupt.h"

#include "base/fail.h"
#include "base/text.h"
#include "cpu/gemm.h"
#include "vla/api.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static const struct {
    const char *name, *text;
    command_fn run;
} commands[] = {
#define X(name, text) {#name, text, command_##name},
    COMMANDS(X)
#undef X
};
enum { COMMAND_COUNT = sizeof commands / sizeof *commands, STACK_LEAST = 256 * 1024 };

/* Command names carry dashes where C names carry underscores. */
static int same_name(const char *name, const char *typed)
{
    for (; *name && *typed; name++, typed++)
        if (*name != *typed && !(*name == '_' && *typed == '-'))
            return 0;
    return *name == *typed;
}

int command_exit_code(vla_status status)
{
    switch (status) {
    case VLA_OK: return EXIT_DONE;
    case VLA_E_INVALID:
    case VLA_E_UNSUPPORTED: return EXIT_USAGE;
    case VLA_E_NOMEM:
    case VLA_E_DEVICE_NOMEM: return EXIT_MEMORY;
    case VLA_E_NONFINITE: return EXIT_NONFINITE;
    case VLA_E_NCCL: return EXIT_COLLECTIVE; /* where another rank was the cause, the group has made it VLA_E_LOST */
    case VLA_E_LOST: return EXIT_RANK;
    case VLA_E_CANCELLED: return EXIT_SAVED;
    default: return EXIT_DATA;
    }
}

int command_fail(const char *name, const vla_error *err)
{
    interrupt_yield();
    fprintf(stderr, "vla%s%s: %s\n", *name ? " " : "", name, err->message);
    if (err->hint[0])
        fprintf(stderr, "  hint: %s\n", err->hint);
    return command_exit_code(err->status);
}

int command_help(int argc, char **argv, const char *text)
{
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
            return fputs(text, stdout), 1;
    return 0;
}

int command_unknown(const char *name, const char *argument, const char *const *known, int count)
{
    const char *near = vlai_nearest(argument, known, (size_t)count);
    fprintf(stderr, "vla %s: unknown argument '%s'", name, argument);
    if (near)
        fprintf(stderr, "; did you mean '%s'?", near);
    fprintf(stderr, "\n  hint: vla %s --help lists what it takes\n", name);
    return EXIT_USAGE;
}

static void usage(FILE *to)
{
    fprintf(to, "vla %s: trains vision-language-action robot policies\n\nUsage: vla COMMAND [arguments]\n\n", VLA_VERSION);
    for (int i = 0; i < COMMAND_COUNT; i++) {
        fputs("  ", to);
        int n = 0;
        for (const char *c = commands[i].name; *c; c++, n++)
            fputc(*c == '_' ? '-' : *c, to);
        fprintf(to, "%*s %s\n", n < 12 ? 12 - n : 0, "", commands[i].text);
    }
    fputs("\nFrom check to report these are the steps of a run, in order; launch is train on several GPUs. init and synth make a model and\n"
          "data to try them with. vla COMMAND --help explains one, with examples; in names of options - and _ are alike.\n\n"
          "Exit codes: 0 done; 2 usage or configuration; 3 data or file; 4 memory; 5 not finite; 6 another rank was lost;\n"
          "7 a collective of the ranks failed; 75 saved on a signal.\n", to);
}

/* Output that a full disk cut short must not pass for whole. A command that ignores SIGPIPE goes on without a reader: what it
 * prints stands in its log too. */
static int finish(int code)
{
    struct sigaction pipe;
    interrupt_yield();
    errno = 0;
    bool failed = ferror(stdout) != 0;
    if ((fflush(stdout) == 0 && !failed) || (sigaction(SIGPIPE, NULL, &pipe) == 0 && pipe.sa_handler == SIG_IGN))
        return code;
    fprintf(stderr, "vla: the output could not be written%s%s\n", errno ? ": " : "", errno ? strerror(errno) : "");
    return code == EXIT_DONE ? EXIT_DATA : code;
}

/* A descriptor of the terminal that the parent has closed would go to the next file that is opened, and what is printed would go
 * into it. It gets one that takes no output, so that writing fails as it does on a closed one. */
static void hold_descriptors(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
            (void)!open("/dev/null", O_RDONLY); /* takes the lowest number that is free */
}

/* Limits of memory under which nothing would run. Worker threads take the limit of the stack too: below it calls end in SIGSEGV. */
static vla_status check_limits(vla_error *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < STACK_LEAST)
        return vlai_fail_hint(err, VLA_E_NOMEM, "ulimit -s 8192, or unlimited", "the stack is limited to %llu kB, wanted %d kB",
                              (unsigned long long)limit.rlim_cur / 1024, STACK_LEAST / 1024);
    return vlai_blas_room(1, err);
}

int main(int argc, char **argv)
{
    hold_descriptors();
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of the write, with a message */
    vla_error err = VLA_ERROR_INIT;
    if (check_limits(&err) != VLA_OK) {
        command_fail("", &err);
        _exit(EXIT_MEMORY); /* the end of a library might wait for memory too */
    }
    bool help = argc > 1 && !strcmp(argv[1], "help");
    if (help && argc > 2) { /* vla help COMMAND */
        argv[1] = argv[2];
        argv[2] = "--help";
    } else if (argc < 2 || help || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        usage(argc < 2 ? stderr : stdout);
        return argc < 2 ? EXIT_USAGE : finish(EXIT_DONE);
    }
    if (!strcmp(argv[1], "--version")) {
        printf("vla %s; reads LeRobot v2.0, v2.1, v3.0\n", VLA_VERSION);
        return finish(EXIT_DONE);
    }
    const char *names[COMMAND_COUNT];
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (same_name(commands[i].name, argv[1]))
            return finish(commands[i].run(argc - 1, argv + 1));
        names[i] = commands[i].name;
    }
    const char *near = vlai_nearest(argv[1], names, COMMAND_COUNT);
    fprintf(stderr, "vla: unknown command '%s'%s%s%s\n  hint: vla --help lists them\n", argv[1], near ? "; did you mean '" : "",
            near ? near : "", near ? "'?" : "");
    return EXIT_USAGE;
}
