/* Collectives over Gloo between forked processes: sums against a plain one in the order of ranks, odd sizes, plans, and what
 * happens when a rank is lost or does not come. */
#define _DEFAULT_SOURCE /* IFF_LOOPBACK */
#include "test.h"

#include "dist/comm_cases.h"
#include "dist/forked.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>
#include <stdbool.h>

static int differs(const void *a, const void *b, size_t bytes)
{
    return bytes && memcmp(a, b, bytes) != 0;
}

/* All three, of one type and size; every result to the bit. */
static int check_sums(vlai_comm *comm, vla_dtype dtype, int64_t n)
{
    int world = vlai_comm_world(comm), rank = vlai_comm_rank(comm), bad = 0;
    size_t size = vla_dtype_size(dtype);
    int64_t all = n * world;
    char *bucket = malloc((size_t)all * size + 1), *part = malloc((size_t)n * size + 1), *want = malloc((size_t)all * size + 1);
    void *scratch = malloc(2 * vlai_comm_scratch(all, dtype, world) + 1);
    if (!bucket || !part || !want || !scratch)
        return SAY("no memory");
    for (int64_t i = 0; i < all; i++)
        put(dtype, bucket, i, element(rank, i));
    for (int64_t i = 0; i < n; i++)
        put_sum(dtype, want, i, world, rank * n + i);
    if (vlai_comm_reduce_scatter(comm, bucket, part, n, dtype, scratch, NULL) != VLA_OK || differs(part, want, (size_t)n * size))
        bad = SAY("reduce_scatter of %lld %s", (long long)n, vla_dtype_name(dtype));
    for (int64_t i = 0; i < all; i++) {
        int from = (int)(i / (n ? n : 1));
        put(dtype, want, i, element(from, i));
        put(dtype, bucket, i, from == rank ? element(rank, i) : 77);
    }
    if (vlai_comm_all_gather(comm, bucket, n, dtype, NULL) != VLA_OK || differs(bucket, want, (size_t)all * size))
        bad = SAY("all_gather of %lld %s", (long long)n, vla_dtype_name(dtype));
    for (int64_t i = 0; i < n; i++) {
        put(dtype, part, i, element(rank, i));
        put_sum(dtype, want, i, world, i);
    }
    if (vlai_comm_all_reduce(comm, part, n, dtype, scratch, NULL) != VLA_OK || differs(part, want, (size_t)n * size))
        bad = SAY("all_reduce of %lld %s", (long long)n, vla_dtype_name(dtype));
    free(bucket), free(part), free(want), free(scratch);
    return bad;
}

static int sums_body(vlai_group *group, void *context)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 127, 1000, 4099, 65537};
    static const vla_dtype types[] = {VLA_BF16, VLA_F32, VLA_F64, VLA_I32, VLA_I64};
    (void)context;
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    int bad = 0;
    if (vlai_comm_open(group, "cpu", &comm, &err) != VLA_OK)
        return SAY("%s (%s)", err.message, err.hint);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            bad |= check_sums(comm, types[t], sizes[s]);
    vlai_comm_close(comm);
    return bad;
}

static void test_sums(void **state)
{
    (void)state;
    for (int world = 1; world <= 4; world++)
        assert_int_equal(forked_run(&(forked){world, 20, 60, sums_body, NULL}, NULL), 0);
}

/* ---- plans ---- */

static int plan_body(vlai_group *group, void *context)
{
    (void)context;
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    if (vlai_comm_open(group, "cpu", &comm, &err) != VLA_OK)
        return SAY("%s", err.message);
    int bad = check_plan(comm, "cpu", 37, VLA_FP32, 0, 0) | check_plan(comm, "cpu", 37, VLA_FP32, 0, 1) |
              check_plan(comm, "cpu", 37, VLA_BF16_MASTER, 0, 0) | check_plan(comm, "cpu", 37, VLA_FP64, 0, 0);
    vlai_comm_close(comm);
    return bad;
}

static void test_plans(void **state)
{
    (void)state;
    for (int world = 1; world <= 3; world++)
        assert_int_equal(forked_run(&(forked){world, 20, 60, plan_body, NULL}, NULL), 0);
}

/* ---- losses ---- */

/* Rank 2 dies in the middle of large sums: the others' call ends with an error that names it. */
static int killed_body(vlai_group *group, void *context)
{
    enum { N = 1 << 20 };
    (void)context;
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    if (vlai_comm_open(group, "cpu", &comm, &err) != VLA_OK)
        return SAY("%s", err.message);
    float *data = calloc(N, sizeof *data);
    void *scratch = malloc(2 * vlai_comm_scratch(N, VLA_F32, vlai_comm_world(comm)));
    if (!data || !scratch)
        return SAY("no memory");
    if (vlai_comm_rank(comm) == 2) {
        for (int i = 0; i < 5; i++)
            vlai_comm_all_reduce(comm, data, N, VLA_F32, scratch, NULL);
        alarm(1);
        signal(SIGALRM, SIG_DFL);
        for (;;) /* it is killed anywhere in here */
            vlai_comm_all_reduce(comm, data, N, VLA_F32, scratch, NULL);
    }
    while (vlai_comm_all_reduce(comm, data, N, VLA_F32, scratch, NULL) == VLA_OK)
        continue;
    /* The first to notice names rank 2; the other may see that one leave. */
    char why[512], other[32];
    snprintf(other, sizeof other, "rank %d", 1 - vlai_comm_rank(comm));
    if (!vlai_comm_error(comm, why, sizeof why) || (!strstr(why, "rank 2") && !strstr(why, other)))
        return SAY("not the right failure: %s", why);
    if (vlai_comm_all_gather(comm, data, 1, VLA_F32, NULL) != VLA_E_NCCL)
        return SAY("a communicator that failed goes on");
    vlai_comm_close(comm);
    free(data), free(scratch);
    vlai_group_leave(group, NULL);
    _exit(0);
}

static void test_killed(void **state)
{
    (void)state;
    int codes[3];
    double start = vlai_now();
    forked_run(&(forked){3, 60, 30, killed_body, NULL}, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], 0);
    assert_int_equal(codes[2], 128 + SIGALRM);
    assert_true(vlai_now() - start < 10);
}

/* Rank 1 never makes the call that rank 0 makes. */
static int absent_body(vlai_group *group, void *context)
{
    (void)context;
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    float x = 1, scratch[32];
    if (vlai_comm_open(group, "cpu", &comm, &err) != VLA_OK)
        return SAY("%s", err.message);
    if (vlai_comm_rank(comm) == 0) {
        char why[512] = "";
        double start = vlai_now();
        if (vlai_comm_all_reduce(comm, &x, 1, VLA_F32, scratch, NULL) != VLA_E_NCCL || !vlai_comm_error(comm, why, sizeof why))
            return SAY("no error");
        if (!strstr(why, "all_reduce") || !strstr(why, "within 5 s") || vlai_now() - start > 8) /* 3 s after the time limit */
            return SAY("%s, after %g s", why, vlai_now() - start);
    } else {
        nanosleep(&(struct timespec){6, 0}, NULL);
    }
    vlai_comm_close(comm);
    return 0;
}

static void test_absent(void **state)
{
    (void)state;
    assert_int_equal(forked_run(&(forked){2, 2, 30, absent_body, NULL}, NULL), 0);
}

/* What another thread ends returns. */
static void *end_soon(void *comm)
{
    nanosleep(&(struct timespec){0, 300000000}, NULL);
    vlai_comm_abort(comm, "the test wants it so");
    return NULL;
}

static int abort_body(vlai_group *group, void *context)
{
    (void)context;
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    pthread_t thread;
    float x = 1, scratch[32];
    char why[512] = "";
    if (vlai_comm_open(group, "cpu", &comm, &err) != VLA_OK)
        return SAY("%s", err.message);
    if (vlai_comm_rank(comm) == 0) {
        double start = vlai_now();
        if (pthread_create(&thread, NULL, end_soon, comm))
            return SAY("no thread");
        vla_status status = vlai_comm_all_reduce(comm, &x, 1, VLA_F32, scratch, NULL);
        pthread_join(thread, NULL);
        if (status != VLA_E_NCCL || !vlai_comm_error(comm, why, sizeof why) || strcmp(why, "the test wants it so") || vlai_now() - start > 5)
            return SAY("%s, after %g s", why, vlai_now() - start);
    } else {
        nanosleep(&(struct timespec){1, 0}, NULL);
    }
    vlai_comm_close(comm);
    return 0;
}

static void test_abort(void **state)
{
    (void)state;
    assert_int_equal(forked_run(&(forked){2, 20, 30, abort_body, NULL}, NULL), 0);
}

/* Connections of this process to an IPv4 loopback address, or to another. */
static int connected(bool loopback)
{
    int n = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_storage peer;
        socklen_t size = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &size) == 0 && peer.ss_family == AF_INET)
            n += (ntohl(((struct sockaddr_in *)&peer)->sin_addr.s_addr) >> 24 == 127) == loopback;
    }
    return n;
}

static int hosts_body(vlai_group *group, void *context)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    const bool *loopback = context;
    if (vlai_comm_open(group, "cpu", &comm, &err) != VLA_OK)
        return SAY("%s", err.message);
    float x = 1, scratch[32];
    if (vlai_comm_all_reduce(comm, &x, 1, VLA_F32, scratch, NULL) != VLA_OK || x != 2)
        return SAY("the sum is %g", x);
    if (connected(!*loopback) || !connected(*loopback))
        return SAY("%d connections over the loopback, %d others", connected(true), connected(false));
    vlai_comm_close(comm);
    return 0;
}

/* Two machines may have one name: whether ranks share one is what the environment says. */
static void test_hosts(void **state)
{
    (void)state;
    bool loopback = true;
    char own[INET_ADDRSTRLEN] = "";
    struct ifaddrs *all;
    assert_int_equal(forked_run(&(forked){2, 20, 30, hosts_body, &loopback}, NULL), 0);
    assert_int_equal(getifaddrs(&all), 0);
    for (struct ifaddrs *a = all; a && !*own; a = a->ifa_next)
        if (a->ifa_addr && a->ifa_addr->sa_family == AF_INET && !(a->ifa_flags & IFF_LOOPBACK))
            inet_ntop(AF_INET, &((struct sockaddr_in *)a->ifa_addr)->sin_addr, own, sizeof own);
    freeifaddrs(all);
    if (!*own) {
        print_message("this machine has no address but the loopback's\n");
        skip();
    }
    loopback = false;
    forked_address = own;
    int bad = forked_run(&(forked){2, 20, 30, hosts_body, &loopback}, NULL);
    forked_address = NULL;
    assert_int_equal(bad, 0);
}

static void test_devices(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    assert_fails(vlai_comm_open(NULL, "tpu", &comm, &err), VLA_E_INVALID, err, "wanted cpu");
    assert_ok(vlai_comm_open(NULL, "cpu", &comm, &err), err);
    assert_int_equal(vlai_comm_world(comm), 1);
    assert_int_equal(vlai_comm_world(NULL), 1);
    vlai_comm_close(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_devices), cmocka_unit_test(test_sums),   cmocka_unit_test(test_plans),
                                       cmocka_unit_test(test_killed),  cmocka_unit_test(test_absent), cmocka_unit_test(test_abort),
                                       cmocka_unit_test(test_hosts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
