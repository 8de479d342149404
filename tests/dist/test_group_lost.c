/* The control plane between processes when something is wrong: ranks that are lost, fail, stand still or leave, and host memory that
 * runs out. */
#include "ranks.h"

#include "base/memory.h"
#include "base/work.h"

#include <stdatomic.h>
#include <stdbool.h>

/* --- losses --- */

/* Works until it is told to stop or somebody is lost. */
static void work(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, GOOD_S);
    vlai_group_progress(g, "forward", 12);
    vla_status status = vlai_group_barrier(g, "start", 0, &err);
    doze(1.5); /* a beat with the phase, on a busy machine too */
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
    doze(1.5);
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
    doze(1.5);
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

/* Rank 1 works for several times the limit before it comes, and then does not come a second time. The others go ahead: rank 2 by as
 * many gathers as it may, and waits then as one that waits for an answer. */
static void work_on(int rank)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, 2);
    if (rank == 1) {
        vlai_group_work(g, "hash", 7);
        for (double end = vlai_now() + 10; vlai_now() < end; doze(0.05))
            vlai_work_add();
    }
    double own = rank, all[3];
    vla_status status = VLA_OK;
    for (int i = 0; i < 12 && status == VLA_OK; i++)
        status = vlai_group_gather(g, "ahead", &own, sizeof own, rank == 0 ? all : NULL, &err);
    if (status == VLA_OK)
        status = vlai_group_barrier(g, "first", 0, &err);
    if (status == VLA_OK)
        seen[rank].value = 1;
    if (status == VLA_OK && rank != 1)
        status = vlai_group_barrier(g, "second", 0, &err);
    for (double end = vlai_now() + GOOD_S; rank == 1 && (status = vlai_group_status(g, &err)) == VLA_OK && vlai_now() < end;)
        doze(0.02);
    note(rank, status, &err);
    vlai_group_leave(g, NULL);
}

/* Rank 0 and 2 wait for the word of a rank that stands still: that one is named, and where two wait for each other one of them. */
static void await_each_other(int rank)
{
    static const int of[] = {2, -1, 1}; /* 0 waits for 2, which waits for 1 */
    vla_error err = VLA_ERROR_INIT;
    vlai_group *g = join(rank, 1);
    bool circle = world_size == 4;
    vlai_group_work(g, "save", 3);
    vlai_group_await(g, circle ? (rank + 1) % 4 : of[rank]);
    vla_status status = VLA_OK;
    for (double end = vlai_now() + GOOD_S; (status = vlai_group_status(g, &err)) == VLA_OK && vlai_now() < end;)
        doze(0.02);
    note(rank, status, &err);
    vlai_group_leave(g, NULL);
}

static void test_work(void **state)
{
    (void)state;
    port = free_port();
    start(3, work_on);
    finish(END_S);
    for (int r = 0; r < 3; r++) {
        assert_says(seen[r].message, "barrier 'second': rank 1 did not come within 2 s; rank 1 (host ");
        assert_true(seen[r].value == 1);
    }
    for (int world = 3; world <= 4; world++) {
        port = free_port();
        start(world, await_each_other);
        finish(END_S);
        for (int r = 0; r < world; r++)
            assert_says(seen[r].message, world == 3 ? "rank 1 (host " : "has made progress for 1 s: all of them are in phase save, step 3");
    }
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),          cmocka_unit_test(test_stopped),    cmocka_unit_test(test_paused),
        cmocka_unit_test(test_killed_any_time), cmocka_unit_test(test_failure),    cmocka_unit_test(test_root_cause),
        cmocka_unit_test(test_no_progress), cmocka_unit_test(test_work),     cmocka_unit_test(test_late),       cmocka_unit_test(test_leave),
        cmocka_unit_test(test_leave_too_early), cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
