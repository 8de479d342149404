/* Ranks as forked processes of a test on loopback, and what each of them saw.
 *
 *     port = free_port();
 *     start(4, body, NULL);           // body(rank) runs in four processes
 *     finish(30);                     // waits, seconds at most; kills and fails what is left then
 *     assert_int_equal(seen[2].status, VLA_OK);
 *
 * Times are of the monotonic clock, which all processes of a host share. */
#ifndef VLA_TEST_RANKS_H
#define VLA_TEST_RANKS_H

#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */

#include "dist/ports.h"

#include "base/time.h"
#include "dist/group.h"
#include "vla/log.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 64 };

/* What a good call may take at most on a loaded machine, and what ends a test that hangs. */
enum { GOOD_S = 40, END_S = 60 };

typedef struct seen_by_rank {
    vla_status status; /* of the call that the test is about */
    char message[1024], lost[1024];
    atomic_int lost_calls; /* after lost and lost_at are written */
    double at, lost_at, started;
    atomic_int place; /* how far the body is */
    atomic_int go;    /* set by the test */
    double value;
    atomic_int warnings;
} seen_by_rank;

static seen_by_rank *seen; /* [RANKS], shared */
static pid_t process[RANKS];
static int world_size, port;
static const char *meeting = "127.0.0.1";
static int several_hosts; /* each rank says that it is alone on its host */

static inline int set_up(void **state)
{
    (void)state;
    seen = mmap(NULL, RANKS * sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return seen == MAP_FAILED;
}

static inline vlai_ranks ranks_of(int rank, int world)
{
    vlai_ranks r = {.rank = rank, .world = world, .local_rank = rank, .local_world = world, .nodes = 1, .port = port, .source = "test"};
    if (several_hosts)
        r.local_rank = 0, r.local_world = 1, r.node = rank, r.nodes = world;
    snprintf(r.address, sizeof r.address, "%s", meeting);
    return r;
}

static inline void note(int rank, vla_status status, const vla_error *err)
{
    seen[rank].status = status;
    seen[rank].at = vlai_now();
    snprintf(seen[rank].message, sizeof seen[rank].message, "%s", status == VLA_OK ? "" : err->message);
}

static inline void on_lost(void *user, const char *text)
{
    seen_by_rank *s = user;
    snprintf(s->lost, sizeof s->lost, "%s", text);
    s->lost_at = vlai_now();
    s->lost_calls++;
}

/* Warnings are counted and not printed. */
static inline void on_log(vla_log_level level, const char *text, void *user)
{
    (void)text;
    ((seen_by_rank *)user)->warnings += level == VLA_LOG_WARN;
}

/* Joins with the callback above; notes the outcome, which ends the process when it is an error. */
static inline vlai_group *join_with(int rank, int world, vlai_group_options o)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_ranks r = ranks_of(rank, world);
    vlai_group *g = NULL;
    o.lost = on_lost;
    o.user = &seen[rank];
    vla_log_set(on_log, &seen[rank], VLA_LOG_WARN);
    seen[rank].started = vlai_now();
    note(rank, vlai_group_join(&r, &o, &g, &err), &err);
    if (seen[rank].status != VLA_OK)
        _exit(0);
    return g;
}

static inline vlai_group *join(int rank, double timeout_s)
{
    vlai_group_options o = VLAI_GROUP_OPTIONS_DEFAULT;
    o.timeout_s = timeout_s;
    return join_with(rank, world_size, o);
}

static inline void start_one(int rank, void (*body)(int rank))
{
    process[rank] = fork();
    assert_true(process[rank] >= 0);
    if (process[rank] == 0) {
        body(rank);
        _exit(0);
    }
}

static inline void start(int world, void (*body)(int rank))
{
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = world;
    for (int r = 0; r < world; r++)
        start_one(r, body);
}

static inline void doze(double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

/* Until every rank of first..world-1 has come to the place in its body. */
static inline void await_place(int first, int place)
{
    double end = vlai_now() + 60;
    for (int r = first; r < world_size; r++)
        while (seen[r].place < place) {
            if (vlai_now() > end)
                fail_msg("rank %d is at place %d after 60 s, wanted %d: %s %s", r, seen[r].place, place, seen[r].message, seen[r].lost);
            doze(0.002);
        }
}

/* The child's side of it: until the test says go, for 60 s at most. */
static inline void await_go(int rank)
{
    for (double end = vlai_now() + 60; !seen[rank].go && vlai_now() < end;)
        doze(0.002);
}

/* Waits for the processes; those that are left after `limit_s` are killed, and the test fails. Killed ones count as ended. */
static inline void finish(double limit_s)
{
    double end = vlai_now() + limit_s;
    int left = 0, crashed = -1, crash = 0;
    for (int r = 0; r < RANKS; r++) {
        if (process[r] <= 0)
            continue;
        int state = 0;
        pid_t done;
        while ((done = waitpid(process[r], &state, WNOHANG)) == 0 && vlai_now() < end)
            doze(0.005);
        if (done == 0) {
            left++;
            kill(process[r], SIGKILL);
            waitpid(process[r], &state, 0);
        } else if ((WIFSIGNALED(state) && WTERMSIG(state) != SIGKILL) || (WIFEXITED(state) && WEXITSTATUS(state) != 0)) {
            crashed = r;
            crash = state;
        }
        process[r] = 0;
    }
    if (left || crashed >= 0)
        fail_msg("%d processes had not ended after %g s; rank %d ended with wait status 0x%x (-1: none)", left, limit_s, crashed, crash);
}

static char other_job[32]; /* of those that meet_then_leave */

static inline void meet_then_leave(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = NULL;
    vlai_group_options o = VLAI_GROUP_OPTIONS_DEFAULT;
    o.timeout_s = GOOD_S;
    o.lost = on_lost;
    o.user = &seen[rank];
    vlai_ranks r = ranks_of(rank, world_size);
    snprintf(r.job, sizeof r.job, "%s", other_job);
    vla_log_set(on_log, &seen[rank], VLA_LOG_WARN);
    seen[rank].place = 1;
    vla_status status = vlai_group_join(&r, &o, &g, &err);
    seen[rank].place = 2;
    if (status == VLA_OK) {
        await_go(rank);
        status = vlai_group_barrier(g, "end", 0, &err);
        status |= vlai_group_leave(g, &err);
    }
    note(rank, status, &err);
}

static inline void go(void)
{
    for (int r = 0; r < world_size; r++)
        seen[r].go = 1;
}

static inline void all_left_well(void)
{
    for (int r = 0; r < world_size; r++) {
        if (seen[r].status != VLA_OK)
            fail_msg("rank %d: %s", r, seen[r].message);
        assert_int_equal(seen[r].lost_calls, 0);
    }
}

#define assert_says(text, part)                                          \
    do {                                                                 \
        if (!strstr(text, part))                                         \
            fail_msg("%s: '%s' lacks '%s'", #text, text, part);          \
    } while (0)

#endif
