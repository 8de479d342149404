/* Ranks of a test as processes of one host: forked, joined over the loopback, waited for with a time limit. */
#ifndef VLA_TEST_FORKED_H
#define VLA_TEST_FORKED_H

#include "base/time.h"
#include "dist/group.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Returns 0 when all is well, after it has said on stderr what is not. group is NULL for a world of 1. */
typedef int (*forked_fn)(vlai_group *group, void *context);

typedef struct forked {
    int world;
    double timeout_s; /* of the group */
    double limit_s;   /* ranks that run longer are killed and have failed */
    forked_fn body;
    void *context;
} forked;

/* Where rank 0 is when every rank says that it has a host of its own; NULL: all are on one, at the loopback. */
static const char *forked_address;

static inline int forked_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
    if (fd >= 0 && !bind(fd, (struct sockaddr *)&a, size) && !getsockname(fd, (struct sockaddr *)&a, &size))
        port = ntohs(a.sin_port);
    if (fd >= 0)
        close(fd);
    return port;
}

static inline int forked_rank(const forked *f, int rank, int port)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_ranks ranks = {.rank = rank, .world = f->world, .local_rank = rank, .local_world = f->world, .nodes = 1, .port = port, .source = "RANK"};
    if (forked_address)
        ranks.local_rank = 0, ranks.local_world = 1, ranks.node = rank, ranks.nodes = f->world;
    snprintf(ranks.address, sizeof ranks.address, "%s", forked_address ? forked_address : "127.0.0.1");
    vlai_group_options options = VLAI_GROUP_OPTIONS_DEFAULT;
    options.timeout_s = f->timeout_s;
    vlai_group *group = NULL;
    if (vlai_group_join(&ranks, &options, &group, &err) != VLA_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, err.message);
        return 1;
    }
    int bad = f->body(group, f->context);
    if (!bad && vlai_group_leave(group, &err) != VLA_OK) {
        fprintf(stderr, "rank %d leaves: %s\n", rank, err.message);
        bad = 1;
    }
    return bad;
}

/* Exit codes of the ranks, 128 + signal for those that were killed; returns how many are not 0. codes: [world], or NULL: those that
 * are not 0 are said on stderr. */
static inline int forked_run(const forked *f, int *codes)
{
    enum { MOST = 64 };
    pid_t pids[MOST] = {0};
    int port = forked_port(), bad = 0;
    double start = vlai_now();
    fflush(NULL);
    for (int r = 0; r < f->world && r < MOST; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            int code = forked_rank(f, r, port);
            fflush(NULL);
            _exit(code);
        }
    }
    for (int left = f->world; left;) {
        for (int r = 0; r < f->world; r++) {
            int status = 0;
            if (pids[r] <= 0 || waitpid(pids[r], &status, WNOHANG) != pids[r])
                continue;
            int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            pids[r] = 0;
            left--;
            bad += code != 0;
            if (codes)
                codes[r] = code;
            else if (WIFSIGNALED(status))
                fprintf(stderr, "rank %d was ended by signal %d\n", r, WTERMSIG(status));
            else if (code)
                fprintf(stderr, "rank %d ended with exit code %d\n", r, code);
        }
        if (left && vlai_now() - start > f->limit_s)
            for (int r = 0; r < f->world; r++)
                if (pids[r] > 0) {
                    fprintf(stderr, "rank %d does not end within %g s\n", r, f->limit_s);
                    kill(pids[r], SIGKILL);
                    waitpid(pids[r], NULL, 0);
                    pids[r] = 0;
                    left--;
                    bad++;
                    if (codes)
                        codes[r] = 128 + SIGKILL;
                }
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    }
    return bad;
}

#endif
