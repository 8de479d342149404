/* Collectives over NCCL: one forked process per GPU that is there (one rank on one GPU), sums at odd sizes, plans with collectives
 * launched and replayed with and without a lane of their own, bandwidth, and what the others see when a rank is killed.
 *
 *     test_cuda_comm [--ranks N] [--hosts]
 *
 * --hosts makes every rank a host of its own to NCCL (NCCL_HOSTID), so that they talk over sockets. No process but the ranks opens a
 * GPU: what was opened before a fork is lost behind it. */
#include "dist/comm_cases.h"
#include "dist/forked.h"
#include "kernels/device.h"

#include <math.h>

enum { BUCKET = 100 << 20, SMALL = 4099, TIMED = 20 };

static bool hosts;

typedef struct rank {
    vlai_comm *comm;
    void *stream, *in, *out; /* BUCKET bytes each */
    char device[16];
} rank;

#define DEVICE(call)                                                              \
    do {                                                                          \
        int code_ = (call);                                                       \
        if (code_)                                                                \
            return SAY("%s: %s", #call, vlai_device_error(code_));                \
    } while (0)

static int open_rank(vlai_group *group, rank *r)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_comm *comm = NULL;
    vlai_device_info info;
    int number = vlai_group_rank(group);
    size_t before, after, total;
    char id[16];
    snprintf(r->device, sizeof r->device, "cuda:%d", number);
    snprintf(id, sizeof id, "host%d", number);
    if (hosts)
        setenv("NCCL_HOSTID", id, 1);
    DEVICE(vlai_device_select(number, &info));
    DEVICE(vlai_device_memory(&before, &total));
    double start = vlai_now();
    if (vlai_comm_open(group, r->device, &comm, &err) != VLA_OK)
        return fprintf(stderr, "rank %d: %s (%s)\n", number, err.message, err.hint), 1;
    r->comm = comm;
    DEVICE(vlai_device_memory(&after, &total));
    if (number == 0)
        fprintf(stderr, "%d ranks connected in %.1f s; that takes %.0f MB of device memory\n", vlai_comm_world(comm), vlai_now() - start,
                ((double)before - (double)after) * 1e-6);
    DEVICE(vlai_device_stream_create(&r->stream));
    DEVICE(vlai_device_alloc(BUCKET, &r->in));
    DEVICE(vlai_device_alloc(BUCKET, &r->out));
    return 0;
}

static void close_rank(rank *r)
{
    vlai_device_synchronize(r->stream);
    vlai_device_free(r->in);
    vlai_device_free(r->out);
    vlai_device_stream_destroy(r->stream);
    vlai_comm_close(r->comm);
}

/* ---- sums ---- */

static double read_one(vla_dtype dtype, const void *data, int64_t i)
{
    switch (dtype) {
    case VLA_F64: return ((const double *)data)[i];
    case VLA_F32: return ((const float *)data)[i];
    case VLA_BF16: return vlai_bf16_to_float(((const uint16_t *)data)[i]);
    case VLA_I64: return (double)((const int64_t *)data)[i];
    default: return ((const int32_t *)data)[i];
    }
}

/* Small whole numbers are exact in every type and order. Others are good to a rounding of each partial sum. */
static double brought(vla_dtype dtype, int whole, int from, int64_t i)
{
    return whole || dtype == VLA_I32 || dtype == VLA_I64 ? whole_number(from, i) : element(from, i);
}

static void put_exact(vla_dtype dtype, void *data, int64_t i, double x)
{
    if (dtype == VLA_I64)
        ((int64_t *)data)[i] = (int64_t)x;
    else if (dtype == VLA_I32)
        ((int32_t *)data)[i] = (int32_t)x;
    else
        put(dtype, data, i, x);
}

/* got[i] against the sum over ranks of their element first + i. */
static int check_sum(vlai_comm *comm, const char *what, vla_dtype dtype, int whole, const void *got, int64_t n, int64_t first)
{
    int world = vlai_comm_world(comm);
    double unit = dtype == VLA_BF16 ? 0x1p-8 : dtype == VLA_F32 ? 0x1p-24 : 0x1p-53;
    for (int64_t i = 0; i < n; i++) {
        double want = 0, size = 0;
        for (int r = 0; r < world; r++) {
            double x = brought(dtype, whole, r, first + i);
            x = dtype == VLA_BF16 ? (double)vlai_bf16_to_float(vlai_bf16_from_float((float)x)) : dtype == VLA_F32 ? (double)(float)x : x;
            want += x;
            size += fabs(x);
        }
        double error = fabs(read_one(dtype, got, i) - want);
        if (error > (whole || dtype == VLA_I32 || dtype == VLA_I64 ? 0 : world * unit * size))
            return SAY("%s of %lld %s: element %lld is %.9g, wanted %.9g", what, (long long)n, vla_dtype_name(dtype), (long long)i, read_one(dtype, got, i), want);
    }
    return 0;
}

static int check_sums(const rank *r, vla_dtype dtype, int whole, int64_t n)
{
    vlai_comm *comm = r->comm;
    int world = vlai_comm_world(comm), own = vlai_comm_rank(comm), bad = 0;
    size_t size = vla_dtype_size(dtype), bytes = (size_t)(n * world) * size;
    char *host = malloc(bytes + 1);
    if (!host)
        return SAY("no memory");
    for (int64_t i = 0; i < n * world; i++)
        put_exact(dtype, host, i, brought(dtype, whole, own, i));
    DEVICE(vlai_device_upload(r->in, host, bytes, r->stream));
    if (world > 1) {
        if (vlai_comm_reduce_scatter(comm, r->in, r->out, n, dtype, NULL, r->stream) != VLA_OK)
            return SAY("reduce_scatter is refused");
        DEVICE(vlai_device_download(host, r->out, (size_t)n * size, r->stream));
        DEVICE(vlai_device_synchronize(r->stream));
        bad |= check_sum(comm, "reduce_scatter", dtype, whole, host, n, own * n);
    }
    if (vlai_comm_all_reduce(comm, r->in, n, dtype, NULL, r->stream) != VLA_OK)
        return SAY("all_reduce is refused");
    DEVICE(vlai_device_download(host, r->in, (size_t)n * size, r->stream));
    DEVICE(vlai_device_synchronize(r->stream));
    bad |= check_sum(comm, "all_reduce", dtype, whole, host, n, 0);
    for (int64_t i = 0; i < n * world; i++)
        put_exact(dtype, host, i, i / n == own ? whole_number(own, i) : 77);
    DEVICE(vlai_device_upload(r->in, host, bytes, r->stream));
    if (vlai_comm_all_gather(comm, r->in, n, dtype, r->stream) != VLA_OK)
        return SAY("all_gather is refused");
    DEVICE(vlai_device_download(host, r->in, bytes, r->stream));
    DEVICE(vlai_device_synchronize(r->stream));
    for (int64_t i = 0; i < n * world && !bad; i++)
        if (read_one(dtype, host, i) != whole_number((int)(i / n), i))
            bad = SAY("all_gather of %lld %s: element %lld is %g", (long long)n, vla_dtype_name(dtype), (long long)i, read_one(dtype, host, i));
    free(host);
    return bad;
}

static int sums_body(vlai_group *group, void *context)
{
    static const int64_t sizes[] = {1, 2, 3, 127, 1000, SMALL, 65537, 1 << 20};
    static const vla_dtype types[] = {VLA_BF16, VLA_F32, VLA_F64, VLA_I32, VLA_I64};
    rank r = {0};
    (void)context;
    int bad = open_rank(group, &r);
    for (size_t t = 0; !bad && t < sizeof types / sizeof *types; t++)
        for (size_t s = 0; !bad && s < sizeof sizes / sizeof *sizes; s++)
            bad = check_sums(&r, types[t], 1, sizes[s]) || check_sums(&r, types[t], 0, sizes[s]);
    if (r.comm)
        close_rank(&r);
    return bad;
}

/* ---- plans ---- */

static int plans_body(vlai_group *group, void *context)
{
    static const unsigned fast[] = {0, VLA_FAST_REPLAY, VLA_FAST_LANES, VLA_FAST_REPLAY | VLA_FAST_LANES};
    static const int64_t parts[] = {37, 103933, 3145729};
    rank r = {0};
    (void)context;
    int bad = open_rank(group, &r);
    for (size_t f = 0; !bad && f < sizeof fast / sizeof *fast; f++)
        for (int overlap = 0; !bad && overlap < 2; overlap++)
            bad = check_plan(r.comm, r.device, 37, VLA_FP32, fast[f], overlap) ||
                  check_plan(r.comm, r.device, 37, VLA_BF16_MASTER, fast[f], overlap);
    /* Ranks of which some replay what others launch. */
    for (size_t p = 0; !bad && p < sizeof parts / sizeof *parts; p++)
        bad = check_plan(r.comm, r.device, parts[p], VLA_FP32, vlai_comm_rank(r.comm) % 2 ? VLA_FAST_LANES : VLA_FAST_REPLAY | VLA_FAST_LANES, 1);
    if (r.comm)
        close_rank(&r);
    return bad;
}

/* ---- gathers by copy engines ---- */

static int gather_and_check(const rank *r, float *memory, float *host, int64_t n, void *graph, float salt)
{
    vlai_comm *comm = r->comm;
    int world = vlai_comm_world(comm), own = vlai_comm_rank(comm);
    for (int64_t i = 0; i < n * world; i++)
        host[i] = i / n == own ? salt + (float)whole_number(own, i) : -1;
    DEVICE(vlai_device_upload(memory, host, (size_t)(n * world) * sizeof *host, r->stream));
    if (graph)
        DEVICE(vlai_device_replay(graph, r->stream));
    else if (vlai_comm_all_gather(comm, memory, n, VLA_F32, r->stream) != VLA_OK)
        return SAY("all_gather is refused");
    DEVICE(vlai_device_download(host, memory, (size_t)(n * world) * sizeof *host, r->stream));
    DEVICE(vlai_device_synchronize(r->stream));
    for (int64_t i = 0; i < n * world; i++)
        if (host[i] != salt + (float)whole_number((int)(i / n), i))
            return SAY("all_gather of %lld: element %lld is %g", (long long)n, (long long)i, (double)host[i]);
    return 0;
}

/* Launched, and captured and replayed, in turns: what one leaves behind must not mislead the other. */
static int copies_of(const rank *r, void *memory, int64_t n)
{
    vlai_comm *comm = r->comm;
    float *host = malloc((size_t)(n * vlai_comm_world(comm)) * sizeof *host);
    void *graph = NULL;
    int bad = host == NULL || gather_and_check(r, memory, host, n, NULL, 1);
    if (!bad) {
        DEVICE(vlai_device_capture_begin(r->stream));
        vla_status status = vlai_comm_all_gather(comm, memory, n, VLA_F32, r->stream);
        DEVICE(vlai_device_capture_end(r->stream, &graph));
        bad = status != VLA_OK && SAY("all_gather is refused in a capture");
    }
    for (int turn = 0; !bad && turn < 6; turn++)
        bad = gather_and_check(r, memory, host, n, turn % 3 < 2 ? graph : NULL, (float)(2 + turn));
    vlai_device_graph_destroy(graph);
    free(host);
    return bad;
}

static int copies_body(vlai_group *group, void *context)
{
    static const int64_t parts[] = {1, 3, 1000, 65537, 3145729};
    vla_error err = VLA_ERROR_INIT;
    void *memory = NULL;
    rank r = {0};
    (void)context;
    setenv("NCCL_CTA_POLICY", "2", 1);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    int bad = open_rank(group, &r);
    vlai_comm *comm = r.comm;
    if (!bad && vlai_comm_memory_alloc(comm, BUCKET, &memory, &err) != VLA_OK)
        bad = SAY("%s", err.message);
    if (!bad && !memory)
        fprintf(stderr, "no gathers by copy engines with this NCCL\n");
    for (size_t p = 0; !bad && memory && p < sizeof parts / sizeof *parts; p++)
        bad = copies_of(&r, memory, parts[p]);
    if (!bad && memory && (vlai_comm_memory_free(comm, r.in) || !vlai_comm_memory_free(comm, memory)))
        bad = SAY("memory is not told apart");
    if (r.comm)
        close_rank(&r);
    return bad;
}

/* ---- bandwidth ---- */

static vla_status one(const rank *r, int kind, int64_t n)
{
    switch (kind) {
    case 0: return vlai_comm_reduce_scatter(r->comm, r->in, r->out, n, VLA_BF16, NULL, r->stream);
    case 1: return vlai_comm_all_gather(r->comm, r->in, n, VLA_BF16, r->stream);
    default: return vlai_comm_all_reduce(r->comm, r->in, n * vlai_comm_world(r->comm), VLA_BF16, NULL, r->stream);
    }
}

/* Bus bandwidth: what a link carries, (N - 1) / N of the bucket, twice for an all_reduce. */
static int time_one(const rank *r, int kind, size_t bytes)
{
    static const char *const names[] = {"reduce_scatter", "all_gather", "all_reduce"};
    vlai_comm *comm = r->comm;
    int world = vlai_comm_world(comm);
    int64_t n = (int64_t)(bytes / sizeof(uint16_t)) / world;
    void *start, *end;
    float ms = 0;
    DEVICE(vlai_device_event_create(&start));
    DEVICE(vlai_device_event_create(&end));
    for (int i = -5; i < TIMED; i++) {
        if (i == 0)
            DEVICE(vlai_device_event_record(start, r->stream));
        if (one(r, kind, n) != VLA_OK)
            return SAY("%s is refused", names[kind]);
    }
    DEVICE(vlai_device_event_record(end, r->stream));
    DEVICE(vlai_device_event_elapsed(start, end, &ms));
    double seconds = ms * 1e-3 / TIMED, moved = (double)bytes * (world - 1) / world * (kind == 2 ? 2 : 1);
    if (vlai_comm_rank(comm) == 0)
        fprintf(stderr, "%-14s %8.3f MB in %8.1f us, bus %6.1f GB/s\n", names[kind], (double)bytes * 1e-6, seconds * 1e6, moved / seconds * 1e-9);
    vlai_device_event_destroy(start);
    vlai_device_event_destroy(end);
    return 0;
}

static int bandwidth_body(vlai_group *group, void *context)
{
    static const size_t sizes[] = {16384, 1 << 20, 25 << 20, BUCKET};
    rank r = {0};
    (void)context;
    int bad = open_rank(group, &r);
    if (!bad && vlai_device_zero(r.in, BUCKET, r.stream))
        bad = 1;
    for (size_t s = 0; !bad && s < sizeof sizes / sizeof *sizes; s++)
        for (int kind = 0; !bad && kind < 3; kind++)
            bad = time_one(&r, kind, sizes[s]);
    if (r.comm)
        close_rank(&r);
    return bad;
}

/* ---- a rank is killed ---- */

static int killed_body(vlai_group *group, void *context)
{
    rank r = {0};
    (void)context;
    if (open_rank(group, &r))
        return 1;
    vlai_comm *comm = r.comm;
    int last = vlai_comm_world(comm) - 1;
    char why[512] = "", name[32];
    snprintf(name, sizeof name, "rank %d", last);
    double start = vlai_now();
    for (int64_t i = 0; vlai_comm_all_reduce(comm, r.in, 1 << 20, VLA_F32, NULL, r.stream) == VLA_OK; i++) {
        if (vlai_comm_rank(comm) == last && i == 50)
            raise(SIGKILL);
        int code = vlai_device_synchronize(r.stream);
        if (code || vlai_comm_error(comm, why, sizeof why))
            break;
        if (i == 49)
            start = vlai_now();
    }
    while (!vlai_comm_error(comm, why, sizeof why) && vlai_now() - start < 15) /* the GPU may notice first */
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    double took = vlai_now() - start;
    if (!vlai_comm_error(comm, why, sizeof why) || !strstr(why, name) || took > 10)
        return SAY("after %.1f s: %s", took, *why ? why : "no failure");
    if (vlai_comm_rank(comm) == 0)
        fprintf(stderr, "%.1f s after the last sum: %s\n", took, why);
    fflush(NULL);
    _exit(0);
}

/* ---- all ---- */

static int passed, failed;

static void report(const char *name, int good, double seconds)
{
    *(good ? &passed : &failed) += 1;
    fprintf(stderr, "%s  %s (%.1f s)\n", good ? "ok  " : "FAIL", name, seconds);
}

/* Counted in a process of its own. */
static int count_body(vlai_group *group, void *context)
{
    int n = 0;
    (void)group, (void)context;
    return vlai_device_count(&n) ? 0 : n > 8 ? 8 : n;
}

static void run(const char *name, int world, forked_fn body, int survivors)
{
    int codes[64], bad = 0;
    double start = vlai_now();
    forked_run(&(forked){world, 60, 120, body, NULL}, codes);
    for (int r = 0; r < survivors; r++)
        bad += codes[r] != 0;
    for (int r = survivors; r < world; r++)
        bad += codes[r] != 128 + SIGKILL;
    report(name, !bad, vlai_now() - start);
}

int main(int argc, char **argv)
{
    int world = 0;
    for (int i = 1; i < argc; i++) {
        hosts = hosts || !strcmp(argv[i], "--hosts");
        if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
            world = atoi(argv[++i]);
    }
    if (!world)
        forked_run(&(forked){1, 60, 60, count_body, NULL}, &world);
    if (world < 1 || world > 64) {
        fprintf(stderr, "no GPU\n0 passed, 1 failed\n");
        return 1;
    }
    fprintf(stderr, "%d rank%s\n", world, world == 1 ? ", on one GPU: nothing is sent" : "s");
    run("sums", world, sums_body, world);
    run("plans", world, plans_body, world);
    if (world > 1) {
        run("gathers by copy engines", world, copies_body, world);
        run("bandwidth", world, bandwidth_body, world);
        run("a rank is killed", world, killed_body, world - 1);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
