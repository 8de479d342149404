/* The program's commands. One row per command in COMMANDS (cli/main.c); each has its own file. */
#ifndef CLI_COMMAND_H
#define CLI_COMMAND_H

#include "vla/error.h"

/* Exit codes of the program. */
enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,     /* usage or configuration */
    EXIT_DATA = 3,      /* data or file */
    EXIT_MEMORY = 4,
    EXIT_NONFINITE = 5,
    EXIT_RANK = 6,       /* another rank was lost or failed */
    EXIT_COLLECTIVE = 7, /* a collective failed, and no other rank is to blame */
    EXIT_SAVED = 75,    /* saved on SIGTERM, SIGINT or SIGHUP */
};

/* argv[0] is the command's own name. Returns an exit code. */
typedef int (*command_fn)(int argc, char **argv);

/* Prints "vla NAME: message" and the hint to stderr; returns the exit code that belongs to the status. */
int command_fail(const char *name, const vla_error *err);
int command_exit_code(vla_status status);
/* Prints the text when argv holds --help or -h; true when it did. */
int command_help(int argc, char **argv, const char *text);
/* Says that an argument is not understood, naming the nearest known one. Returns EXIT_USAGE. */
int command_unknown(const char *name, const char *argument, const char *const *known, int count);

/* In the order in which a user meets them, as the help shows them. */
#define COMMANDS(X)                                                         \
    X(check, "validate datasets")                                           \
    X(norm_stats, "statistics that normalise state and action")             \
    X(preflight, "check everything that a training run will need")          \
    X(train, "train, or go on from a checkpoint")                           \
    X(launch, "start the ranks of a training run")                          \
    X(predict, "open-loop evaluation of a checkpoint on held-out episodes") \
    X(report, "one HTML page for a run; compare two")                       \
    X(convert, "rewrite a checkpoint fused or unfused")                     \
    X(inspect, "show a dataset, a batch, a graph, a plan or a checkpoint")  \
    X(config, "list the keys of a training configuration, or check one")    \
    X(init, "write a model with random weights")                            \
    X(synth, "write a synthetic LeRobot dataset")                           \
    X(bench, "time training steps, switch by switch")                       \
    X(parity, "compare with recorded results of the reference")

#define X(name, text) int command_##name(int argc, char **argv);
COMMANDS(X)
#undef X

#endif
