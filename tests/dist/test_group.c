/* The control plane between processes: meeting, small messages, losses. */
#include "ranks.h"

#include "base/memory.h"

#include <poll.h>
#include <stdbool.h>
#include <stdatomic.h>

/* What a good call may take at most on a loaded machine, and what ends a test that hangs. */
enum { GOOD_S = 40, END_S = 60 };

/* --- messages --- */

static void talk(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    int world = vlai_group_world(g);
    int good = (world == 1) == (g == NULL) && vlai_group_rank(g) == rank && world == world_size;
    good &= !g || (*vlai_group_host(g, world - 1) && !*vlai_group_host(g, world));
    vla_status status = vlai_group_barrier(g, "first", 0, &err);

    /* A key that the last rank sets and all read, some before it is there. */
    if (g && rank == world - 1) {
        doze(0.2);
        status |= vlai_group_set(g, "word", "old", 3, &err);
        status |= vlai_group_set(g, "nothing", NULL, 0, &err);
    }
    if (g) {
        void *data = NULL;
        size_t size = 0;
        status |= vlai_group_get(g, "word", 0, &data, &size, &err);
        good &= data && size == 3 && !strcmp(data, "old");
        vlai_free(data);
        status |= vlai_group_get(g, "nothing", 0, &data, &size, &err);
        good &= data && size == 0;
        vlai_free(data);
        status |= vlai_group_barrier(g, "read", 0, &err);
        status |= vlai_group_forget(g, "w", &err);
        good &= vlai_group_get(g, "word", -1, &data, &size, &err) == VLA_E_NOT_FOUND && vlai_group_get(g, "nothing", -1, &data, &size, &err) == VLA_OK;
        vlai_free(data);
        good &= vlai_group_get(g, "no such key", -1, &data, &size, &err) == VLA_E_NOT_FOUND && strstr(err.message, "no such key") && !data;
        good &= vlai_group_get(g, "no such key", 0.2, &data, &size, &err) == VLA_E_NOT_FOUND && strstr(err.message, "0.2 s");
    }
    status |= vlai_group_agree(g, "configuration", "a: 1\nb: 2\n", &err);

    size_t large = 3 << 20;
    uint32_t *block = calloc(large, 1);
    for (size_t i = 0; i < large / 4 && rank == 0; i++)
        block[i] = (uint32_t)i * 2654435761u;
    status |= vlai_group_broadcast(g, "block", block, large, &err);
    for (size_t i = 0; i < large / 4; i++)
        good &= block[i] == (uint32_t)i * 2654435761u;
    free(block);

    for (int64_t step = 0; step < 300; step++) {
        int64_t mine[2] = {rank, step}, all[2 * RANKS] = {0};
        vlai_group_progress(g, "step", step);
        status |= vlai_group_gather(g, "losses", mine, sizeof mine, rank == 0 ? all : NULL, &err);
        for (int r = 0; r < world && rank == 0; r++)
            good &= all[2 * r] == r && all[2 * r + 1] == step;
        if (step % 100)
            continue;
        status |= vlai_group_gather_all(g, "stop?", &mine[1], sizeof mine[1], all, &err);
        for (int r = 0; r < world; r++)
            good &= all[r] == step;
    }
    status |= vlai_group_status(g, &err);
    status |= vlai_group_leave(g, &err);
    note(rank, status, &err);
    seen[rank].value = good;
}

static void test_messages(void **state)
{
    (void)state;
    const int worlds[] = {1, 2, 4};
    for (int i = 0; i < 3; i++) {
        port = free_port();
        start(worlds[i], talk);
        finish(END_S);
        for (int r = 0; r < worlds[i]; r++) {
            if (seen[r].status != VLA_OK)
                fail_msg("rank %d of %d: %s", r, worlds[i], seen[r].message);
            assert_true(seen[r].value == 1);
            assert_int_equal(seen[r].lost_calls, 0);
        }
    }
}

static void test_addresses(void **state)
{
    (void)state;
    const char *names[] = {"localhost", "::1"};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    int count = fd >= 0 && bind(fd, (struct sockaddr *)&six, sizeof six) == 0 ? 2 : 1; /* without IPv6 the name alone */
    if (fd >= 0)
        close(fd);
    for (int i = 0; i < count; i++) {
        port = free_port();
        meeting = names[i];
        start(2, talk);
        finish(END_S);
        for (int r = 0; r < 2; r++)
            if (seen[r].status != VLA_OK || seen[r].value != 1)
                fail_msg("rank %d at %s: %s", r, meeting, seen[r].message);
    }
    meeting = "127.0.0.1";
    several_hosts = 1; /* rank 0 listens at every address */
    port = free_port();
    start(3, talk);
    finish(END_S);
    several_hosts = 0;
    for (int r = 0; r < 3; r++)
        if (seen[r].status != VLA_OK || seen[r].value != 1)
            fail_msg("rank %d, several hosts: %s", r, seen[r].message);
}

/* Steps allocate nothing, in rank 0 with its server neither. */
static void steady(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    double mine[8] = {rank}, all[4 * 8];
    vla_status status = seen[rank].status;
    for (int i = 0; i < 64 && status == VLA_OK; i++)
        status = vlai_group_gather(g, "losses", mine, sizeof mine, all, &err);
    status |= vlai_group_barrier(g, "warm", 0, &err);
    uint64_t before = vla_memory_stats_get().allocations;
    double from = vlai_now();
    for (int i = 0; i < 500 && status == VLA_OK; i++) {
        vlai_group_progress(g, "step", i);
        status = vlai_group_gather_all(g, "losses", mine, sizeof mine, all, &err);
    }
    seen[rank].value = (vlai_now() - from) / 500;
    uint64_t after = vla_memory_stats_get().allocations;
    status |= vlai_group_leave(g, &err);
    note(rank, status, &err);
    seen[rank].place = (int)(after - before);
}

static void test_steady(void **state)
{
    (void)state;
    port = free_port();
    start(4, steady);
    finish(END_S);
    for (int r = 0; r < 4; r++) {
        if (seen[r].status != VLA_OK)
            fail_msg("rank %d: %s", r, seen[r].message);
        assert_int_equal(seen[r].place, 0);
    }
    print_message("a gather of 4 ranks to all: %.0f us\n", seen[0].value * 1e6);
}

static void disagree(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    note(rank, vlai_group_agree(g, "configuration", rank == 2 ? "a: 1\nbatch: 8\nc: 3\n" : "a: 1\nbatch: 16\nc: 3\n", &err), &err);
    vla_status shorter = vlai_group_agree(g, "data", rank == 1 ? "one\n" : "one\ntwo\n", &err);
    seen[rank].value = shorter == VLA_E_INVALID && strstr(err.message, "rank 1 ") && strstr(err.message, "in '(no line)'") &&
                       vlai_group_barrier(g, "still there", 0, &err) == VLA_OK && vlai_group_leave(g, &err) == VLA_OK;
}

static void test_disagree(void **state)
{
    (void)state;
    port = free_port();
    start(3, disagree);
    finish(END_S);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(seen[r].status, VLA_E_INVALID);
        assert_says(seen[r].message, "configuration: rank 2 (host ");
        assert_says(seen[r].message, "in 'batch: 8' where rank 0 has 'batch: 16'");
        assert_true(seen[r].value == 1);
    }
}

static void diverge(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vla_status status = rank == 1 ? vlai_group_agree(g, "order", "x", &err) : vlai_group_barrier(g, "the save", 0, &err);
    note(rank, status, &err);
    vlai_group_leave(g, NULL);
}

static void test_diverge(void **state)
{
    (void)state;
    port = free_port();
    start(3, diverge);
    finish(END_S);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(seen[r].status, VLA_E_INVALID);
        assert_says(seen[r].message, "agree 'order'");
        assert_says(seen[r].message, "barrier 'the save'");
    }
}

/* --- meeting --- */

static void meet_short(int rank)
{
    vlai_group *g = join(rank, 3);
    vlai_group_leave(g, NULL);
}

static void test_missing(void **state)
{
    (void)state;
    port = free_port();
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 8;
    const int here[] = {0, 2, 5};
    double from = vlai_now();
    for (int i = 0; i < 3; i++)
        start_one(here[i], meet_short);
    finish(END_S);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(seen[here[i]].status, VLA_E_LOST);
        assert_says(seen[here[i]].message, "ranks 1, 3, 4, 6 and 7 of 8 did not come");
        assert_says(seen[here[i]].message, "within 3 s");
        assert_true(seen[here[i]].at - from > 2.9);
        assert_int_equal(seen[here[i]].lost_calls, 0);
    }
    /* Without rank 0 there is nobody to ask. */
    memset(seen, 0, RANKS * sizeof *seen);
    start_one(1, meet_short);
    finish(END_S);
    assert_int_equal(seen[1].status, VLA_E_LOST);
    assert_says(seen[1].message, "rank 0 could not be reached at 127.0.0.1 port");
    assert_says(seen[1].message, "within 3 s");
}

static const char *twin_version;
static int twin_world;
static char twin_job[32], other_job[32];

static void meet_then_leave(int rank)
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

/* A second process that says it is rank 1; its outcome goes to seen[RANKS - 1]. */
static void twin(int unused)
{
    (void)unused;
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = NULL;
    vlai_group_options o = VLAI_GROUP_OPTIONS_DEFAULT;
    o.timeout_s = GOOD_S;
    o.version = twin_version;
    vlai_ranks r = ranks_of(1, twin_world);
    snprintf(r.job, sizeof r.job, "%s", twin_job);
    note(RANKS - 1, vlai_group_join(&r, &o, &g, &err), &err);
}

static void go(void)
{
    for (int r = 0; r < world_size; r++)
        seen[r].go = 1;
}

static void all_left_well(void)
{
    for (int r = 0; r < world_size; r++) {
        if (seen[r].status != VLA_OK)
            fail_msg("rank %d: %s", r, seen[r].message);
        assert_int_equal(seen[r].lost_calls, 0);
    }
}

/* While the ranks meet (rank 2 is not there yet), and once they have. */
static void test_duplicate(void **state)
{
    (void)state;
    twin_version = NULL;
    twin_world = 3;
    for (int met = 0; met < 2; met++) {
        port = free_port();
        memset(seen, 0, RANKS * sizeof *seen);
        world_size = 3;
        start_one(0, meet_then_leave);
        start_one(1, meet_then_leave);
        while (seen[1].place < 1)
            doze(0.01);
        doze(1); /* so that rank 1 is the first of the two; else its place is taken and the test says so */
        if (met) {
            start_one(2, meet_then_leave);
            await_place(0, 2);
        }
        start_one(RANKS - 1, twin);
        double end = vlai_now() + GOOD_S;
        while (!*seen[RANKS - 1].message && vlai_now() < end)
            doze(0.01);
        if (!met)
            start_one(2, meet_then_leave);
        go();
        finish(END_S);
        assert_int_equal(seen[RANKS - 1].status, VLA_E_INVALID);
        assert_says(seen[RANKS - 1].message, "rank 1 (host ");
        assert_says(seen[RANKS - 1].message, "is there already");
        all_left_well();
    }
}

static void test_version(void **state)
{
    (void)state;
    port = free_port();
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 3;
    twin_version = "9.8.7";
    twin_world = 3;
    start_one(0, meet_then_leave);
    start_one(2, meet_then_leave);
    await_place(2, 1);
    doze(0.5);
    start_one(RANKS - 1, twin);
    finish(END_S);
    twin_version = NULL;
    const int here[] = {0, 2, RANKS - 1};
    for (int i = 0; i < 3; i++) {
        assert_says(seen[here[i]].message, "rank 1 (host ");
        assert_says(seen[here[i]].message, "9.8.7");
        assert_says(seen[here[i]].message, VLA_VERSION);
        assert_int_equal(seen[here[i]].status, VLA_E_INVALID);
    }
}

static void test_world_differs(void **state)
{
    (void)state;
    port = free_port();
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 3;
    twin_world = 2;
    start_one(0, meet_then_leave);
    start_one(RANKS - 1, twin);
    finish(END_S);
    assert_says(seen[0].message, "rank 1 of 2 (host ");
    assert_says(seen[0].message, "rank 0 of 3");
    assert_says(seen[RANKS - 1].message, "rank 0 of 3");
}

/* A rank of another run that was given the same port does not end this one. */
static void test_other_job(void **state)
{
    (void)state;
    port = free_port();
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 2;
    twin_world = 2;
    strcpy(other_job, "77.0");
    strcpy(twin_job, "78.0");
    start_one(0, meet_then_leave);
    start_one(RANKS - 1, twin);
    double end = vlai_now() + GOOD_S;
    while (!*seen[RANKS - 1].message && vlai_now() < end)
        doze(0.01);
    start_one(1, meet_then_leave);
    go();
    finish(END_S);
    *other_job = *twin_job = 0;
    assert_says(seen[RANKS - 1].message, "78.0");
    assert_says(seen[RANKS - 1].message, "77.0");
    all_left_well();
}

static int call_in(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    for (double end = vlai_now() + GOOD_S; vlai_now() < end; doze(0.01)) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
            return fd;
        close(fd);
    }
    fail_msg("nobody listens at port %d", port);
    return -1;
}

/* A launcher tells of a rank that ended before it came. */
static void test_reported(void **state)
{
    (void)state;
    port = free_port();
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 3;
    start_one(0, meet_then_leave);
    start_one(1, meet_then_leave);
    close(call_in()); /* rank 0 listens */
    doze(0.5);
    vlai_ranks who = ranks_of(2, 3), other = ranks_of(2, 4);
    vlai_group_report(&other, "ended well", 5); /* not of this run */
    double from = vlai_now();
    vlai_group_report(&who, "ended with signal 9 (SIGKILL)", 5);
    finish(END_S);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(seen[r].status, VLA_E_LOST);
        assert_says(seen[r].message, "rank 2 (host ");
        assert_says(seen[r].message, "was lost while the ranks met: it ended with signal 9 (SIGKILL)");
        assert_true(seen[r].at - from < 10);
    }
    vlai_group_report(&who, "ended", 1); /* nobody listens */
}

static void test_port_in_use(void **state)
{
    (void)state;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    assert_true(bind(fd, (struct sockaddr *)&a, n) == 0 && listen(fd, 1) == 0 && getsockname(fd, (struct sockaddr *)&a, &n) == 0);
    port = ntohs(a.sin_port);
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 2;
    start_one(0, meet_short);
    finish(END_S);
    char text[32];
    snprintf(text, sizeof text, "port %d", port);
    assert_int_equal(seen[0].status, VLA_E_IO);
    assert_says(seen[0].message, text);
    assert_says(seen[0].message, "in use");
    close(fd);
}

/* --- strangers --- */

/* Whether the server hangs up within ten seconds. */
static int hung_up(int fd)
{
    char some[256];
    for (double end = vlai_now() + 10; vlai_now() < end;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, 100) > 0 && recv(fd, some, sizeof some, MSG_DONTWAIT) <= 0)
            return 1;
    }
    return 0;
}

static void test_strangers(void **state)
{
    (void)state;
    port = free_port();
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 2;
    start_one(0, meet_then_leave);
    static const char http[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    static const char huge[] = "VLAG\1\0\0\0\0\0\0\0\377\377\377\377";       /* a greeting of 4 GB */
    static const char empty[] = "VLAG\1\0\0\0\0\0\0\0\0\0\0\0";             /* one of nothing */
    static const char lying[] = "VLAG\1\0\0\0\0\0\0\0\24\0\0\0aaaabbbbccccdddd\377\377\377\377"; /* a text longer than all */
    static const char early[] = "VLAG\5\0\0\0\0\0\0\0\0\0\0\0";             /* a collective without a greeting */
    const struct { const char *bytes; size_t size; } cases[] = {
        {http, sizeof http - 1}, {huge, 16}, {empty, 16}, {lying, 36}, {early, 16}, {"VLAGxx", 6}, {"", 0},
    };
    enum { CASES = sizeof cases / sizeof *cases };
    int fd[CASES];
    for (int i = 0; i < CASES; i++) {
        fd[i] = call_in();
        if (cases[i].size)
            assert_int_equal(send(fd[i], cases[i].bytes, cases[i].size, MSG_NOSIGNAL), cases[i].size);
    }
    for (int i = 0; i < 5; i++)
        if (!hung_up(fd[i]))
            fail_msg("case %d was not dropped", i);
    assert_true(hung_up(fd[5]) && hung_up(fd[6])); /* half a greeting, none at all: after five seconds */
    for (int i = 0; i < CASES; i++)
        close(fd[i]);
    close(call_in()); /* a port scan */
    uint64_t random = 88172645463325252u; /* xorshift64 */
    for (int i = 0; i < 100; i++) {
        uint8_t bytes[512];
        for (size_t k = 0; k < sizeof bytes; k++) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            bytes[k] = (uint8_t)random;
        }
        if (i % 2) { /* greetings whose content is random */
            memcpy(bytes, "VLAG\1\0\0\0\0\0\0\0", 12);
            bytes[12] = (uint8_t)(random >> 8), bytes[13] = (uint8_t)(i % 3), bytes[14] = bytes[15] = 0;
        }
        int one = call_in();
        send(one, bytes, sizeof bytes, MSG_NOSIGNAL);
        close(one);
    }
    start_one(1, meet_then_leave);
    await_place(0, 2);
    int late = call_in();
    send(late, http, sizeof http - 1, MSG_NOSIGNAL);
    assert_true(hung_up(late));
    close(late);
    go();
    finish(END_S);
    all_left_well();
    assert_in_range(seen[0].warnings, 8, 20);
}

/* --- losses --- */

/* Works until it is told to stop or somebody is lost. */
static void work(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vlai_group_progress(g, "forward", 12);
    vla_status status = vlai_group_barrier(g, "start", 0, &err);
    doze(0.3); /* a beat with the phase */
    seen[rank].place = 1;
    if (status == VLA_OK)
        status = vlai_group_barrier(g, "never", 0, &err); /* all but the one that is lost */
    note(rank, status, &err);
    double end = vlai_now() + 5; /* the callback may come a moment after */
    while (!seen[rank].lost_calls && vlai_now() < end)
        doze(0.01);
    vla_error after = VLA_ERROR_INIT;
    seen[rank].value = vlai_group_barrier(g, "after", 0, &after) == VLA_E_LOST && vlai_group_status(g, &after) == VLA_E_LOST &&
                       vlai_group_leave(g, &after) == VLA_E_LOST && !strcmp(after.message, err.message);
}

/* Waits idly instead, to be killed or stopped. */
static int victim;
static void work_or_wait(int rank)
{
    if (rank != victim) {
        work(rank);
        return;
    }
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vlai_group_progress(g, "forward", 12);
    vlai_group_barrier(g, "start", 0, &err);
    doze(0.3);
    seen[rank].place = 1;
    await_go(rank);
    vlai_group_leave(g, NULL);
}

static double loses(int world, int lost, int signal, double within, const char *why)
{
    char wanted[64];
    snprintf(wanted, sizeof wanted, "rank %d (host ", lost);
    victim = lost;
    port = free_port();
    start(world, work_or_wait);
    await_place(0, 1);
    double from = vlai_now(), latest = 0;
    kill(process[lost], signal);
    for (int r = 0; r < world; r++) {
        double end = from + 30;
        while (r != lost && !seen[r].lost_calls && vlai_now() < end)
            doze(0.005);
    }
    double over = vlai_now();
    kill(process[lost], SIGKILL);
    finish(END_S);
    for (int r = 0; r < world; r++) {
        if (r == lost)
            continue;
        assert_int_equal(seen[r].status, VLA_E_LOST);
        assert_says(seen[r].message, wanted);
        assert_says(seen[r].message, "was lost in phase forward, step 12: ");
        assert_says(seen[r].message, why);
        assert_string_equal(seen[r].message, seen[r].lost);
        assert_int_equal(seen[r].lost_calls, 1);
        assert_true(seen[r].value == 1);
        double took = seen[r].lost_at - from;
        latest = took > latest ? took : latest;
    }
    if (latest >= within)
        fail_msg("the loss of rank %d was noticed after %.2f s (waited %.2f), wanted %.2f", lost, latest, over - from, within);
    return latest;
}

static void test_killed(void **state)
{
    (void)state;
    double one = loses(4, 2, SIGKILL, 2, "connection closed"), zero = loses(4, 0, SIGKILL, 2, "connection closed");
    print_message("kill -9 of rank 2 noticed after %.3f s, of rank 0 after %.3f s\n", one, zero);
}

static void test_stopped(void **state)
{
    (void)state;
    double one = loses(3, 1, SIGSTOP, 10, "no sign of life for 8 s"), zero = loses(3, 0, SIGSTOP, 10, "no sign of life for 8 s");
    print_message("kill -STOP of rank 1 noticed after %.2f s, of rank 0 after %.2f s\n", one, zero);
}

/* A rank that was stopped for less than that goes on, rank 0 too. */
static void test_paused(void **state)
{
    (void)state;
    port = free_port();
    memset(seen, 0, RANKS * sizeof *seen);
    world_size = 3;
    for (int r = 0; r < 3; r++)
        start_one(r, meet_then_leave);
    await_place(0, 2);
    kill(process[0], SIGSTOP);
    kill(process[1], SIGSTOP);
    doze(5);
    kill(process[0], SIGCONT);
    kill(process[1], SIGCONT);
    doze(0.5);
    go();
    finish(END_S);
    all_left_well();
}

/* Killed at any moment from the first connection on: the others end, whatever they were doing. */
static void busy(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    seen[rank].place = 1;
    vlai_group *g = join(rank, 3);
    vla_status status = seen[rank].status;
    char *block = calloc(1 << 20, 1);
    for (int i = 0; status == VLA_OK; i++) {
        double mine = i, all[4];
        vlai_group_progress(g, "forward", i);
        status = vlai_group_gather(g, "losses", &mine, sizeof mine, all, &err);
        if (status == VLA_OK && i % 3 == 0)
            status = vlai_group_broadcast(g, "block", block, 1 << 20, &err);
        if (status == VLA_OK && i % 5 == 0)
            status = vlai_group_set(g, "key", block, 100000, &err);
    }
    free(block);
    note(rank, status, &err);
    vlai_group_leave(g, NULL);
}

static void test_killed_any_time(void **state)
{
    (void)state;
    int rounds = test_long() ? 200 : 12;
    double worst = 0;
    for (int i = 0; i < rounds; i++) {
        int lost = i % 3;
        port = free_port();
        start(3, busy);
        await_place(0, 1);
        doze(0.003 * (i * 7 % 23));
        double from = vlai_now();
        kill(process[lost], SIGKILL);
        finish(END_S);
        for (int r = 0; r < 3; r++) {
            if (r == lost)
                continue;
            assert_int_equal(seen[r].status, VLA_E_LOST);
            worst = seen[r].at - from > worst ? seen[r].at - from : worst;
        }
    }
    print_message("killed at %d moments: the others ended within %.2f s\n", rounds, worst);
}

static void fail_one(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vlai_group_progress(g, "data", 7);
    vlai_group_barrier(g, "start", 0, &err);
    doze(0.3);
    if (rank == victim) {
        err = (vla_error){VLA_E_CORRUPT, "episode 3 of set x is\ndamaged", "", NULL, 0};
        seen[rank].started = vlai_now();
        vla_status status = vlai_group_fail(g, &err);
        note(rank, status, &err);
        seen[rank].value = vlai_now() - seen[rank].started;
    } else {
        note(rank, vlai_group_barrier(g, "never", 0, &err), &err);
        doze(0.2);
    }
    vlai_group_leave(g, NULL);
}

static void test_failure(void **state)
{
    (void)state;
    for (victim = 0; victim < 3; victim += 2) {
        port = free_port();
        start(3, fail_one);
        finish(END_S);
        char wanted[64];
        snprintf(wanted, sizeof wanted, "rank %d (host ", victim);
        for (int r = 0; r < 3; r++) {
            assert_says(seen[r].message, "episode 3 of set x is");
            assert_int_equal(seen[r].status, r == victim ? VLA_E_CORRUPT : VLA_E_LOST);
            assert_int_equal(seen[r].lost_calls, r != victim);
            if (r == victim) {
                assert_true(seen[r].value < 5);
                continue;
            }
            assert_says(seen[r].message, wanted);
            assert_says(seen[r].message, ") failed in phase data, step 7: episode 3 of set x is?damaged");
        }
    }
}

/* Rank 2 is killed, and rank 1 tells of a collective that broke, maybe before rank 0 has noticed: the loss of rank 2 is the cause. */
static void broken(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vlai_group_barrier(g, "start", 0, &err);
    seen[rank].place = 1;
    if (rank == 1) {
        await_go(rank);
        err = (vla_error){VLA_E_NCCL, "connection closed by peer", "", NULL, 0};
        note(rank, vlai_group_fail(g, &err), &err);
    } else if (rank == 2) {
        await_go(rank);
        doze(0.2); /* after rank 1 has spoken */
        kill(getpid(), SIGKILL);
    } else {
        note(rank, vlai_group_barrier(g, "never", 0, &err), &err);
    }
    vlai_group_leave(g, NULL);
}

static void test_root_cause(void **state)
{
    (void)state;
    port = free_port();
    start(3, broken);
    await_place(0, 1);
    go();
    finish(END_S);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(seen[r].status, VLA_E_LOST);
        assert_says(seen[r].message, "rank 2 (host ");
        assert_says(seen[r].message, "was lost in start-up: connection closed");
    }
}

static void stand_still(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, 2);
    vlai_group_barrier(g, "start", 0, &err);
    double end = vlai_now() + GOOD_S;
    vla_status status = VLA_OK;
    for (int i = 0; status == VLA_OK && vlai_now() < end; i++) {
        vlai_group_progress(g, rank == 1 && i >= 5 ? "data" : "forward", rank == 1 && i >= 5 ? 5 : i);
        while (rank == 1 && i == 5 && (status = vlai_group_status(g, &err)) == VLA_OK && vlai_now() < end)
            doze(0.02);
        doze(0.02);
        status = vlai_group_status(g, &err);
    }
    note(rank, status, &err);
    vlai_group_leave(g, NULL);
}

/* Every rank hangs at the same place, as in a collective that never ends. */
static void all_stand_still(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, 2);
    vlai_group_barrier(g, "start", 0, &err);
    vlai_group_progress(g, "forward", 3);
    vla_status status = VLA_OK;
    for (double end = vlai_now() + GOOD_S; (status = vlai_group_status(g, &err)) == VLA_OK && vlai_now() < end;)
        doze(0.02);
    note(rank, status, &err);
    vlai_group_leave(g, NULL);
}

static void test_no_progress(void **state)
{
    (void)state;
    port = free_port();
    start(3, stand_still);
    finish(END_S);
    for (int r = 0; r < 3; r++) {
        assert_says(seen[r].message, "rank 1 (host ");
        assert_says(seen[r].message, "has made no progress for 2 s: it is in phase data, step 5");
    }
    port = free_port();
    start(2, all_stand_still);
    finish(END_S);
    for (int r = 0; r < 2; r++)
        assert_says(seen[r].message, "no rank has made progress for 2 s: all of them are in phase forward, step 3");
}

static void come_late(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vlai_group_progress(g, "save", 9);
    vlai_group_barrier(g, "start", 0, &err);
    vla_status status = VLA_OK;
    if (rank != 2)
        status = vlai_group_barrier(g, "the save of step 9", 1, &err);
    for (double end = vlai_now() + GOOD_S; rank == 2 && (status = vlai_group_status(g, &err)) == VLA_OK && vlai_now() < end;)
        doze(0.02);
    note(rank, status, &err);
    vlai_group_leave(g, NULL);
}

static void test_late(void **state)
{
    (void)state;
    port = free_port();
    start(3, come_late);
    finish(END_S);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(seen[r].status, VLA_E_LOST);
        assert_says(seen[r].message, "barrier 'the save of step 9': rank 2 did not come within 1 s");
        assert_says(seen[r].message, "in phase save, step 9");
    }
}

/* --- leaving --- */

static void leave_one_by_one(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vla_status status = vlai_group_barrier(g, "end", 0, &err);
    doze(0.3 * rank);
    double from = vlai_now();
    status |= vlai_group_leave(g, &err);
    seen[rank].value = vlai_now() - from;
    note(rank, status, &err);
    seen[rank].place = 1;
}

static void test_leave(void **state)
{
    (void)state;
    port = free_port();
    start(4, leave_one_by_one);
    finish(END_S);
    all_left_well();
    assert_true(seen[0].at >= seen[3].started + 0.8); /* it has waited for the last */
}

static void leave_too_early(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vlai_group_barrier(g, "start", 0, &err);
    if (rank == 1) {
        note(rank, vlai_group_leave(g, &err), &err);
        return;
    }
    doze(0.2);
    note(rank, vlai_group_barrier(g, "one more", 0, &err), &err);
    vlai_group_leave(g, NULL);
}

static void test_leave_too_early(void **state)
{
    (void)state;
    port = free_port();
    start(3, leave_too_early);
    finish(END_S);
    assert_int_equal(seen[1].status, VLA_OK);
    for (int r = 0; r < 3; r += 2) {
        assert_int_equal(seen[r].status, VLA_E_LOST);
        assert_says(seen[r].message, "rank 1 (host ");
        assert_says(seen[r].message, "has left");
        assert_says(seen[r].message, "one more");
    }
}

/* --- memory --- */

static atomic_uint_fast64_t allocations;
static uint64_t fails_at;

static void *alloc_or_fail(size_t size, size_t align, void *user)
{
    (void)user;
    void *p = NULL;
    if (atomic_fetch_add(&allocations, 1) + 1 == fails_at)
        return NULL;
    return posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size ? size : 1) == 0 ? p : NULL;
}

static void alloc_release(void *p, void *user)
{
    (void)user;
    free(p);
}

/* Process number 2 k + r is rank r of the k-th run of two. */
static void without_memory(int index)
{
    static const vla_allocator failing = {alloc_or_fail, alloc_release, NULL};
    int rank = index % 2;
    if (rank == victim)
        vla_allocator_set(&failing);
    vla_error err = VLA_ERROR_INIT;
    vlai_ranks r = ranks_of(rank, 2);
    vlai_group_options o = VLAI_GROUP_OPTIONS_DEFAULT;
    o.timeout_s = 8;
    vlai_group *g = NULL;
    vla_log_set(on_log, &seen[index], VLA_LOG_WARN);
    vla_status status = vlai_group_join(&r, &o, &g, &err);
    if (status == VLA_OK) {
        char block[40000] = {0}, all[2 * sizeof block];
        void *data = NULL;
        size_t size;
        status = vlai_group_set(g, rank ? "one" : "zero", block, sizeof block, &err);
        if (status == VLA_OK)
            status = vlai_group_get(g, rank ? "zero" : "one", 0, &data, &size, &err);
        vlai_free(data);
        if (status == VLA_OK)
            status = vlai_group_agree(g, "text", "same", &err);
        if (status == VLA_OK)
            status = vlai_group_gather_all(g, "blocks", block, sizeof block, all, &err);
        if (status != VLA_OK)
            vlai_group_fail(g, &err);
        vla_status left = vlai_group_leave(g, &err);
        status = status != VLA_OK ? status : left;
    }
    note(index, status, &err);
    seen[index].place = 1 + (rank == victim && atomic_load(&allocations) >= fails_at);
}

/* Every single allocation of a rank fails once: it ends, and so does the other. Many runs at a time, as some end at a time limit. */
static void test_memory(void **state)
{
    (void)state;
    for (victim = 0; victim < 2; victim++) {
        uint64_t n = 1;
        for (bool more = true; more && n < 300;) {
            uint64_t first = n;
            memset(seen, 0, RANKS * sizeof *seen);
            world_size = 2;
            for (int k = 0; k < RANKS / 2; k++, n++) {
                fails_at = n;
                port = free_port();
                start_one(2 * k, without_memory);
                start_one(2 * k + 1, without_memory);
            }
            finish(END_S);
            for (int k = 0; k < RANKS / 2; k++) {
                if (seen[2 * k + victim].place == 2)
                    continue;
                more = false; /* fewer allocations than its number: nothing failed */
                for (int r = 0; r < 2; r++)
                    if (seen[2 * k + r].status != VLA_OK)
                        fail_msg("run %d, rank %d without a failure: %s", (int)first + k, r, seen[2 * k + r].message);
                if (first + (uint64_t)k < 8)
                    fail_msg("rank %d makes no more than %d allocations", victim, (int)first + k);
            }
        }
        assert_in_range(n, 8, 299);
    }
}

/* --- many --- */

static void many(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    double mine[4] = {rank}, all[4 * RANKS], worst = 0, sum = 0;
    vla_status status = seen[rank].status | vlai_group_barrier(g, "start", 0, &err);
    for (int i = 0; i < 40 && status == VLA_OK; i++) {
        vlai_group_progress(g, "step", i);
        doze(0.05);
        double from = vlai_now();
        status = vlai_group_gather(g, "losses", mine, sizeof mine, all, &err);
        double took = vlai_now() - from;
        worst = took > worst ? took : worst;
        sum += took;
    }
    status |= vlai_group_leave(g, &err);
    note(rank, status, &err);
    seen[rank].value = sum / 40;
    seen[rank].lost_at = worst;
}

static void test_many(void **state)
{
    (void)state;
    port = free_port();
    start(RANKS, many);
    finish(END_S);
    double others = 0;
    for (int r = 0; r < RANKS; r++) {
        if (seen[r].status != VLA_OK)
            fail_msg("rank %d: %s", r, seen[r].message);
        if (r)
            others += seen[r].value / (RANKS - 1);
    }
    print_message("a gather per 50 ms of 64 ranks: rank 0 waits %.2f ms, the others are held up %.0f us\n", seen[0].value * 1e3, others * 1e6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages),      cmocka_unit_test(test_addresses),   cmocka_unit_test(test_steady),
        cmocka_unit_test(test_disagree),      cmocka_unit_test(test_diverge),     cmocka_unit_test(test_missing),
        cmocka_unit_test(test_duplicate),     cmocka_unit_test(test_version),     cmocka_unit_test(test_world_differs),
        cmocka_unit_test(test_other_job),     cmocka_unit_test(test_port_in_use), cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_killed),        cmocka_unit_test(test_stopped),     cmocka_unit_test(test_paused),
        cmocka_unit_test(test_killed_any_time),
        cmocka_unit_test(test_failure),       cmocka_unit_test(test_root_cause),  cmocka_unit_test(test_no_progress),
        cmocka_unit_test(test_late),          cmocka_unit_test(test_leave),       cmocka_unit_test(test_leave_too_early),
        cmocka_unit_test(test_memory),        cmocka_unit_test(test_many),        cmocka_unit_test(test_reported),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
