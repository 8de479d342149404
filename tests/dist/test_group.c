/* The control plane between processes: meeting and small messages. Next: test_group_lost.c. */
#include "ranks.h"

#include "base/memory.h"

#include <poll.h>
#include <stdbool.h>
#include <stdatomic.h>

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

/* A rank may move at the very moment at which its beat is made: that is no standing still. */
static void move_always(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vla_status status = VLA_OK;
    int64_t step = 0;
    for (double end = vlai_now() + 2; status == VLA_OK && vlai_now() < end; step++) {
        vlai_group_progress(g, "step", step);
        status = vlai_group_status(g, &err);
    }
    if (status == VLA_OK)
        status = vlai_group_leave(g, &err);
    note(rank, status, &err);
    seen[rank].value = step > 100;
}

static void test_moves(void **state)
{
    (void)state;
    port = free_port();
    start(RANKS, move_always);
    finish(END_S);
    for (int r = 0; r < RANKS; r++) {
        if (seen[r].status != VLA_OK)
            fail_msg("rank %d: %s", r, seen[r].message);
        assert_true(seen[r].value == 1);
    }
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
    int held;
    port = held_port(&held);
    start_one(1, meet_short);
    finish(END_S);
    close(held);
    assert_int_equal(seen[1].status, VLA_E_LOST);
    assert_says(seen[1].message, "rank 0 could not be reached at 127.0.0.1 port");
    assert_says(seen[1].message, "within 3 s");
}

/* An address that no host has is refused by name at once; rank 0, whom others may know by it, waits. */
static void test_nowhere(void **state)
{
    (void)state;
    port = free_port();
    meeting = "256.256.256.256"; /* no resolver is asked for it */
    several_hosts = 1;
    world_size = 2;
    double from = vlai_now();
    memset(seen, 0, RANKS * sizeof *seen);
    start_one(1, talk);
    finish(END_S);
    assert_int_equal(seen[1].status, VLA_E_INVALID);
    assert_says(seen[1].message, "rank 1: no host has the name '256.256.256.256'");
    assert_true(seen[1].at - from < 3);
    start_one(0, meet_short);
    finish(END_S);
    assert_int_equal(seen[0].status, VLA_E_LOST);
    assert_says(seen[0].message, "rank 1 of 2 did not come");
    meeting = "127.0.0.1";
    several_hosts = 0;
}

static const char *twin_version;
static int twin_world;
static char twin_job[32];

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
        cmocka_unit_test(test_messages), cmocka_unit_test(test_moves),  cmocka_unit_test(test_addresses), cmocka_unit_test(test_steady),    cmocka_unit_test(test_disagree),
        cmocka_unit_test(test_diverge),   cmocka_unit_test(test_missing),   cmocka_unit_test(test_nowhere),   cmocka_unit_test(test_duplicate), cmocka_unit_test(test_version),
        cmocka_unit_test(test_world_differs), cmocka_unit_test(test_other_job), cmocka_unit_test(test_port_in_use),
        cmocka_unit_test(test_strangers), cmocka_unit_test(test_many),      cmocka_unit_test(test_reported),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
