/* The ranks of one machine as processes: started, listened to, and brought to a common end.
 *
 *     vlai_supervise_options o = {.argv = argv, .ranks = 4, .world = 4, .nodes = 1, .say = print_line};
 *     vlai_supervised end;
 *     if (vlai_supervise(&o, &end, &err) != VLA_OK) return report(&err);   // could not start
 *     return end.code;
 *
 * Each rank is a process of its own group with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE,
 * MASTER_ADDR and MASTER_PORT set, and dies with the caller. Rank 0 of the world writes where the caller writes; of the others
 * standard error and what standard output warns of come line by line through `say`, without what another rank has just said.
 *
 * The first rank that ends otherwise than with 0, 75 or 6 is the culprit: it is named with host, process, signal or code, and the phase
 * and step that it last put into its status page (status.h). The others get SIGTERM then, and SIGKILL `grace_s` later. Code 6 says
 * that another rank was lost, or that they did not come together: whoever ends with it is no culprit, and there may be none here.
 *
 * SIGINT, SIGTERM and, where it is not ignored, SIGHUP are passed on to all ranks once, as SIGTERM, so that they can save; a second
 * one, from half a second on, kills them.
 *
 * Threads: one call at a time in a process; it is the only reader of SIGCHLD and of these signals meanwhile. */
#ifndef VLAI_DIST_SUPERVISE_H
#define VLAI_DIST_SUPERVISE_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

/* Exit codes of ranks that are no failure of their own: another rank was lost; saved on a signal. */
enum { VLAI_CODE_LOST = 6, VLAI_CODE_SAVED = 75, VLAI_CODE_NOT_STARTED = 127 };

typedef struct vlai_supervise_options {
    const char *program;     /* path of what is run; NULL: this program */
    char *const *argv;       /* its arguments, [0] included, ended by NULL */
    int ranks;               /* of this machine */
    int first, world;        /* they are first .. first + ranks - 1 of world */
    int node, nodes;         /* this machine is `node` of `nodes` */
    const char *address;     /* where rank 0 listens; NULL: 127.0.0.1 */
    int port;                /* 0: one that is free, on one machine only */
    double time_limit_s;     /* VLA_DIST_TIMEOUT of the ranks; 0: as it is */
    bool nothing_to_save;    /* on a signal the ranks just end */
    double grace_s;          /* from SIGTERM to SIGKILL after a failure; 0: 8 */
    const char *(*meaning)(int code); /* what an exit code says, or NULL for nothing; may be NULL */
    /* A line, without newline: of a rank that is not rank 0, or (-1) of the supervision itself. From the calling thread. */
    void (*say)(void *user, int rank, const char *line);
    void *user;
} vlai_supervise_options;

typedef struct vlai_supervised {
    int code;     /* that the caller ends with: the culprit's, 128 + n for signal n; 75; 6; 0 */
    int culprit;  /* rank in the world; -1: none */
    int signal;   /* the one of them that came first; 0: none */
} vlai_supervised;

/* Returns when all ranks have ended. An error only where they could not be started: then none runs any more. */
vla_status vlai_supervise(const vlai_supervise_options *options, vlai_supervised *out, vla_error *err);

/* A TCP port that nothing listens on at the moment; 0 when there is none. */
int vlai_free_port(void);

VLA_END_DECLS

#endif
