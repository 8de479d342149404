/* What matrix products and collectives take from each other: the large products of some layers' backward pass of Wall-X (batch 26,
 * 6784 rows) in two lanes as a plan has them, alone, beside reductions of their gradients, each begun when its bucket is full, and
 * beside gathers of as many bytes, begun at the start. By the ways there are to make room: fewer multiprocessors for products, fewer
 * blocks for NCCL, stream priorities, larger buckets, symmetric memory, copy engines (NCCL's policy of no blocks). One forked process
 * per GPU.
 *
 *     gpu_overlap [--ranks N] [--layers N] [--seconds N] [NAME...]      rows whose name begins with a NAME; 90 s
 *
 * On stdout one JSON object per row, medians of 12 with least and most, of the slowest rank, milliseconds; on stderr a table. A row
 * that this machine's NCCL cannot do says so. Rows that would begin after the time are left out.
 *
 * Copy engines gather by copies and have no sum: reductions are an exchange and an addition here. In NCCL 2.28 they want windows over
 * memory of ncclMemAlloc on all ranks, one node, and the policy in the communicator's configuration; otherwise the call runs its
 * kernels and says nothing of it. With NVLink multicast ranks would tell each other by it: it stays off (NCCL_NVLS_ENABLE=0). */
#include "base/bf16.h"
#include "base/order.h"
#include "dist/comm.h"
#include "dist/forked.h"
#include "kernels/cuda.h"
#include "kernels/device.h"
#include "vendor/cublaslt.h"

#include <dlfcn.h>
#include <nccl.h>
#include <stdbool.h>

enum { ROWS = 6784, HIDDEN = 2048, INNER = 11008, PACKED = 2560, LANES = 2, REPEATS = 12, UNCOUNTED = 2, MOST_LAYERS = 16, MOST_SETS = 8 };
enum { WORKSPACE = 32 << 20, LEAST_COPY_ENGINES = NCCL_VERSION(2, 28, 1) };
static const size_t OPERANDS = (size_t)4 << 30, RESULTS = (size_t)2 << 30, SENT = (size_t)800 << 20, RECEIVED = (size_t)400 << 20;

/* A layer's backward pass; of weights: dY^T X, which nobody waits for. */
typedef struct product {
    int64_t m, n, k;
    bool of_weights;
} product;
static const product layer[] = {
    {ROWS, INNER, HIDDEN, false},     {HIDDEN, INNER, ROWS, true},     /* down */
    {ROWS, HIDDEN, 2 * INNER, false}, {2 * INNER, HIDDEN, ROWS, true}, /* gate and up */
    {ROWS, HIDDEN, HIDDEN, false},    {HIDDEN, HIDDEN, ROWS, true},    /* behind the attention */
    {ROWS, HIDDEN, PACKED, false},    {PACKED, HIDDEN, ROWS, true},    /* q, k, v */
};
enum { PRODUCTS = sizeof layer / sizeof *layer };

/* program: as the program does it (dist/comm.h). The others have a communicator of their own. */
typedef enum way { PROGRAM, PLAIN, SYMMETRIC, COPY_ENGINES } way;

typedef struct variant {
    const char *name;
    bool searched;      /* algorithms by timing, as the program chooses them, with `free` taken; else the library's first */
    int free;           /* multiprocessors that algorithms are to leave */
    way way;
    int blocks;         /* most of NCCL's; 0: its own choice */
    int bucket;         /* MB */
    bool calm, pressed; /* collectives without priority; products with it */
    bool launched;      /* not captured and replayed */
} variant;

static const variant variants[] = {
    {"as now", true, 0, PROGRAM, 0, 100, false, false, false},
    {"buckets of 200 MB", true, 0, PROGRAM, 0, 200, false, false, false},
    {"buckets of 400 MB", true, 0, PROGRAM, 0, 400, false, false, false},
    {"first algorithms", false, 0, PROGRAM, 0, 100, false, false, false},
    {"first, 4 free", false, 4, PROGRAM, 0, 100, false, false, false},
    {"first, 8 free", false, 8, PROGRAM, 0, 100, false, false, false},
    {"first, 16 free", false, 16, PROGRAM, 0, 100, false, false, false},
    {"first, 24 free", false, 24, PROGRAM, 0, 100, false, false, false},
    {"first, 4 free, 4 blocks", false, 4, PLAIN, 4, 100, false, false, false},
    {"first, 8 free, 8 blocks", false, 8, PLAIN, 8, 100, false, false, false},
    {"first, 16 free, 16 blocks", false, 16, PLAIN, 16, 100, false, false, false},
    {"first, 24 free, 24 blocks", false, 24, PLAIN, 24, 100, false, false, false},
    {"16 free", true, 16, PROGRAM, 0, 100, false, false, false},
    {"16 free, 16 blocks", true, 16, PLAIN, 16, 100, false, false, false},
    {"no priority", true, 0, PROGRAM, 0, 100, true, false, false},
    {"priority for products", true, 0, PROGRAM, 0, 100, true, true, false},
    {"as now again", true, 0, PROGRAM, 0, 100, false, false, false},
    /* The newest parts of NCCL last: what hangs takes nothing with it but itself. */
    {"copy engines", true, 0, COPY_ENGINES, 0, 100, false, false, false},
    {"copy engines, launched", true, 0, COPY_ENGINES, 0, 100, false, false, true},
    {"symmetric memory", true, 0, SYMMETRIC, 0, 100, false, false, false},
    {"symmetric memory, 8 blocks", true, 0, SYMMETRIC, 8, 100, false, false, false},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

enum { ALONE, BESIDE_REDUCE, BESIDE_GATHER, REDUCE, GATHER, MEASURES };
static const char *const measure_names[] = {"alone", "beside_reduce", "beside_gather", "reduce", "gather"};

/* Functions of NCCL, found by name; the last row is of 2.28 and may be missing. */
#define FUNCTIONS(X) X(ncclGetVersion) X(ncclGetUniqueId) X(ncclCommInitRankConfig) X(ncclCommDestroy) X(ncclGetErrorString) X(ncclReduceScatter) X(ncclAllGather)
#define MORE(X) X(ncclMemAlloc) X(ncclMemFree) X(ncclCommWindowRegister) X(ncclCommWindowDeregister) X(ncclAlltoAll)
static struct {
    int version;
#define MEMBER(name) __typeof__(name) *name;
    FUNCTIONS(MEMBER) MORE(MEMBER)
#undef MEMBER
} nccl;

typedef struct algorithms {
    bool searched;
    int free;
    vlai_gemm *gemm[PRODUCTS];
} algorithms;

static struct {
    int rank, world, layers, multiprocessors;
    double until; /* by vlai_now: no row begins later */
    char **names;
    int name_count;
    vlai_group *group;
    vlai_comm *comm;
    void *cublaslt;
    void *calm[LANES], *pressed[LANES], *urgent, *common; /* streams of products and of collectives, without priority and with */
    void *workspace[LANES];
    void *fences[2 * MOST_LAYERS * PRODUCTS + 8], *starts[REPEATS], *ends[REPEATS];
    char *operands, *results, *sent[2], *received[2]; /* [1]: memory of ncclMemAlloc, or NULL */
    algorithms sets[MOST_SETS];
    int set_count;
    ncclComm_t own; /* of the row under way, with its windows */
    ncclWindow_t windows[2];
} s;

/* What ends the process: the other rank then learns from the group that this one is gone. */
static void must(int code, const char *what)
{
    if (code) {
        fprintf(stderr, "rank %d: %s: %s\n", s.rank, what, code >= 100000 ? vlai_cublaslt_error(code - 100000) : vlai_device_error(code));
        fflush(NULL);
        _exit(1);
    }
}
#define MUST(call) must(call, #call)

static void must_gemm(int code, const char *what)
{
    must(code ? 100000 + code : 0, what);
}

static void must_vla(vla_status status, const vla_error *err)
{
    if (status != VLA_OK) {
        fprintf(stderr, "rank %d: %s\n", s.rank, err->message);
        fflush(NULL);
        _exit(1);
    }
}

static void must_nccl(ncclResult_t code, const char *what)
{
    if (code != ncclSuccess) {
        fprintf(stderr, "rank %d: %s: %s\n", s.rank, what, nccl.ncclGetErrorString(code));
        fflush(NULL);
        _exit(1);
    }
}

static void barrier(void)
{
    vla_error err = VLA_ERROR_INIT;
    must_vla(vlai_group_barrier(s.group, "a measurement", 0, &err), &err);
}

/* ---- products ---- */

/* Operands of a product of a layer: elsewhere for each, so that none is found in a cache; 256 bytes aligned, inside their arenas. */
static vlai_gemm_operands operands_of(int number, int p)
{
    const product *x = &layer[p];
    size_t a = (size_t)(x->m * x->k) * 2, b = (size_t)(x->k * x->n) * 2, c = (size_t)(x->m * x->n) * 2;
    size_t at = ((size_t)(number * PRODUCTS + p) * ((size_t)331 << 20)) % (OPERANDS - a - b - 512), to = ((size_t)(number * PRODUCTS + p) * ((size_t)307 << 20)) % (RESULTS - c - 256);
    at &= ~(size_t)255;
    to &= ~(size_t)255;
    return (vlai_gemm_operands){.a = s.operands + at, .b = s.operands + at + ((a + 255) & ~(size_t)255), .c = s.results + to};
}

static const algorithms *algorithms_of(const variant *v)
{
    for (int i = 0; i < s.set_count; i++)
        if (s.sets[i].searched == v->searched && s.sets[i].free == v->free)
            return &s.sets[i];
    if (s.set_count == MOST_SETS)
        must(1, "too many kinds of algorithms");
    algorithms *set = &s.sets[s.set_count++];
    *set = (algorithms){.searched = v->searched, .free = v->free};
    for (int p = 0; p < PRODUCTS; p++) {
        const product *x = &layer[p];
        vlai_gemm_shape shape = {.m = x->m, .n = x->n, .k = x->k, .transpose_a = x->of_weights, .operand = VLA_BF16, .result = VLA_BF16,
                                 .multiprocessors = v->free ? s.multiprocessors - v->free : 0};
        vlai_gemm_operands o = operands_of(0, p);
        int code = vlai_cublaslt_prepare(s.cublaslt, &shape, WORKSPACE, &set->gemm[p]);
        if (!code && v->searched)
            code = vlai_cublaslt_search(set->gemm[p], &o, &(vlai_gemm_effort){.proposals = VLAI_GEMM_PROPOSALS}, s.workspace[0], s.calm[0], NULL);
        must_gemm(code, "algorithms of a product");
    }
    return set;
}

/* ---- collectives ---- */

static bool load(void)
{
    void *handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    bool whole = handle != NULL;
#define FIND(name) *(void **)&nccl.name = handle ? dlsym(handle, #name) : NULL;
    FUNCTIONS(FIND) MORE(FIND)
#undef FIND
#define WHOLE(name) whole = whole && nccl.name;
    FUNCTIONS(WHOLE)
#undef WHOLE
    return whole && nccl.ncclGetVersion(&nccl.version) == ncclSuccess;
}

static const char *cannot(const variant *v)
{
    bool more = true;
#define WHOLE(name) more = more && nccl.name;
    MORE(WHOLE)
#undef WHOLE
    if (v->way >= SYMMETRIC && (!more || nccl.version < LEAST_COPY_ENGINES))
        return "NCCL is older than 2.28";
    return NULL;
}

/* The communicator of a row, by all ranks together. A sentence when there is none; what is there is closed by close_own. */
static const char *open_own(const variant *v)
{
    vla_error err = VLA_ERROR_INIT;
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    s.own = NULL;
    s.windows[0] = s.windows[1] = NULL;
    if (v->way == PROGRAM)
        return NULL;
    config.blocking = 1;
    if (v->blocks)
        config.minCTAs = config.maxCTAs = v->blocks;
    if (v->way == COPY_ENGINES)
        config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    if (s.rank == 0)
        must_nccl(nccl.ncclGetUniqueId(&id), "ncclGetUniqueId");
    must_vla(vlai_group_broadcast(s.group, "the communicator of a row", &id, sizeof id, &err), &err);
    must_nccl(nccl.ncclCommInitRankConfig(&s.own, s.world, id, s.rank, &config), "ncclCommInitRankConfig");
    if (v->way < SYMMETRIC)
        return NULL;
    if (!s.sent[1] && (nccl.ncclMemAlloc((void **)&s.sent[1], SENT) != ncclSuccess || nccl.ncclMemAlloc((void **)&s.received[1], RECEIVED) != ncclSuccess))
        must(2, "ncclMemAlloc");
    ncclResult_t code = nccl.ncclCommWindowRegister(s.own, s.sent[1], SENT, &s.windows[0], NCCL_WIN_COLL_SYMMETRIC);
    if (code == ncclSuccess)
        code = nccl.ncclCommWindowRegister(s.own, s.received[1], RECEIVED, &s.windows[1], NCCL_WIN_COLL_SYMMETRIC);
    if (code != ncclSuccess)
        return nccl.ncclGetErrorString(code);
    return s.windows[0] && s.windows[1] ? NULL : "no symmetric memory between these GPUs";
}

static void close_own(void)
{
    for (int w = 0; w < 2; w++)
        if (s.windows[w])
            nccl.ncclCommWindowDeregister(s.own, s.windows[w]);
    if (s.own)
        must_nccl(nccl.ncclCommDestroy(s.own), "ncclCommDestroy");
    s.own = NULL;
}

/* out = sum of the parts that the ranks have sent. */
static void add_parts(const char *parts, char *out, int64_t n, void *stream)
{
    vlai_node node = {.op = VLAI_OP_add, .n_inputs = 2, .n_outputs = 1};
    vlai_cuda_tensor t = {.dtype = VLA_BF16, .rank = 1, .shape = {n}, .elements = n};
    for (int r = 1; r < s.world; r++) {
        vlai_cuda_call call = {.node = &node, .in = {t, t}, .out = {t}, .stream = stream, .multiprocessors = s.multiprocessors};
        call.in[0].data = r == 1 ? (void *)(uintptr_t)parts : out;
        call.in[1].data = (void *)(uintptr_t)(parts + 2 * n * r);
        call.out[0].data = out;
        MUST(vlai_cuda_add(&call));
    }
}

static void collective(const variant *v, bool gather, size_t at, int64_t n, void *stream)
{
    int own = v->way >= SYMMETRIC;
    char *in = s.sent[own] + at, *out = s.received[own];
    int64_t part = n / s.world;
    if (v->way == PROGRAM) {
        vla_status status = gather ? vlai_comm_all_gather(s.comm, in, part, VLA_BF16, stream) : vlai_comm_reduce_scatter(s.comm, in, out, part, VLA_BF16, NULL, stream);
        must(status == VLA_OK ? 0 : 1, "a collective of the program");
    } else if (gather) {
        must_nccl(nccl.ncclAllGather(in + 2 * part * s.rank, in, (size_t)part, ncclBfloat16, s.own, stream), "ncclAllGather");
    } else if (v->way == COPY_ENGINES) {
        must_nccl(nccl.ncclAlltoAll(in, out, (size_t)part, ncclBfloat16, s.own, stream), "ncclAlltoAll");
        add_parts(out, s.received[0], part, stream);
    } else {
        must_nccl(nccl.ncclReduceScatter(in, out, (size_t)part, ncclBfloat16, ncclSum, s.own, stream), "ncclReduceScatter");
    }
}

/* ---- a sequence ---- */

static void after(void *from, void *stream, int *used)
{
    void *fence = s.fences[(*used)++];
    MUST(vlai_device_event_record(fence, from));
    MUST(vlai_device_wait(stream, fence));
}

/* Everything of one measure, forked from lane 0 and joined to it. */
static void enqueue(const variant *v, const algorithms *set, int measure)
{
    void *const *lanes = v->pressed ? s.pressed : s.calm;
    void *side = v->calm ? s.common : s.urgent;
    bool products = measure <= BESIDE_GATHER, reduce = measure == BESIDE_REDUCE || measure == REDUCE, gather = measure == BESIDE_GATHER || measure == GATHER;
    const size_t bucket = (size_t)v->bucket * 1000000 / 512 * 512;
    size_t bytes = 0, at = 0;
    int used = 0;
    after(lanes[0], lanes[1], &used);
    after(lanes[0], side, &used);
    for (int l = 0; l < s.layers; l++)
        for (int p = 0; p < PRODUCTS; p++) {
            int lane = layer[p].of_weights;
            vlai_gemm_operands o = operands_of(l, p);
            if (products && lane)
                after(lanes[0], lanes[1], &used);
            if (products)
                must_gemm(vlai_cublaslt_run(set->gemm[p], &o, s.workspace[lane], lanes[lane]), "a product");
            bytes += lane ? (size_t)(layer[p].m * layer[p].n) * 2 : 0;
            for (; bytes >= bucket; bytes -= bucket) {
                if (reduce && products)
                    after(lanes[1], side, &used);
                if (reduce || gather)
                    collective(v, gather, at, (int64_t)(bucket / 2), side);
                at = at + 2 * bucket <= SENT ? at + bucket : 0;
            }
        }
    after(lanes[1], lanes[0], &used);
    after(side, lanes[0], &used);
}

typedef struct spread {
    double median, least, most;
} spread;

/* The first execution launches, so that every kernel is loaded; then a replay is captured, unless the row is for launches. */
static spread time_measure(const variant *v, const algorithms *set, int measure)
{
    void *first = v->pressed ? s.pressed[0] : s.calm[0], *graph = NULL;
    double times[REPEATS];
    barrier();
    enqueue(v, set, measure);
    MUST(vlai_device_synchronize(first));
    if (!v->launched) {
        MUST(vlai_device_capture_begin(first));
        enqueue(v, set, measure);
        MUST(vlai_device_capture_end(first, &graph));
    }
    barrier();
    for (int r = -UNCOUNTED; r < REPEATS; r++) {
        if (r >= 0)
            MUST(vlai_device_event_record(s.starts[r], first));
        if (graph)
            MUST(vlai_device_replay(graph, first));
        else
            enqueue(v, set, measure);
        if (r >= 0)
            MUST(vlai_device_event_record(s.ends[r], first));
    }
    for (int r = 0; r < REPEATS; r++) {
        float ms;
        MUST(vlai_device_event_elapsed(s.starts[r], s.ends[r], &ms));
        times[r] = (double)ms;
    }
    vlai_device_graph_destroy(graph);
    qsort(times, REPEATS, sizeof *times, vlai_by_value);
    return (spread){times[REPEATS / 2], times[0], times[REPEATS - 1]};
}

/* ---- rows ---- */

static bool wanted(const char *name)
{
    bool found = s.name_count == 0;
    for (int i = 0; i < s.name_count; i++)
        found = found || !strncmp(name, s.names[i], strlen(s.names[i]));
    return found;
}

/* Rank 0's word on whether there is time for another row. */
static bool go_on(void)
{
    vla_error err = VLA_ERROR_INIT;
    int go = vlai_now() < s.until;
    must_vla(vlai_group_broadcast(s.group, "whether there is time", &go, sizeof go, &err), &err);
    return go;
}

/* Whether no rank has a reason against it; `why` becomes the first that one has. */
static bool all_can(const char **why)
{
    enum { TEXT = 128, MOST = 64 };
    static char all[MOST][TEXT];
    char own[TEXT] = "";
    vla_error err = VLA_ERROR_INIT;
    snprintf(own, sizeof own, "%s", *why ? *why : "");
    must_vla(vlai_group_gather_all(s.group, "whether a row can be run", own, sizeof own, all, &err), &err);
    for (int r = 0; r < s.world; r++)
        if (*all[r]) {
            *why = all[r];
            return false;
        }
    return true;
}

/* Of the slowest rank, by its median. */
static void slowest(spread *all)
{
    enum { MOST = 64 };
    static spread ranks[MOST * MEASURES];
    vla_error err = VLA_ERROR_INIT;
    must_vla(vlai_group_gather_all(s.group, "the times of a row", all, MEASURES * sizeof *all, ranks, &err), &err);
    for (int r = 0; r < s.world; r++)
        for (int m = 0; m < MEASURES; m++)
            if (ranks[r * MEASURES + m].median > all[m].median)
                all[m] = ranks[r * MEASURES + m];
}

static void print_head(const variant *v)
{
    static const char *const ways[] = {"as the program", "own communicator", "symmetric memory", "copy engines"};
    printf("{\"kind\": \"overlap\", \"label\": \"%s\", \"ranks\": %d, \"layers\": %d, \"algorithms\": \"%s\", \"sms_free\": %d, \"collectives\": \"%s\", \"blocks\": %d, "
           "\"bucket_mb\": %d, \"collective_priority\": %s, \"product_priority\": %s, \"captured\": %s",
           v->name, s.world, s.layers, v->searched ? "searched" : "first", v->free, ways[v->way], v->blocks, v->bucket, v->calm ? "false" : "true",
           v->pressed ? "true" : "false", v->launched ? "false" : "true");
}

/* In the table what collectives beside cost, against products alone as in the first row, of what they take alone. */
static void print_row(const variant *v, const spread *all)
{
    static double first;
    first = first > 0 ? first : all[ALONE].median;
    print_head(v);
    for (int m = 0; m < MEASURES; m++)
        printf(", \"%s_ms\": %.4f, \"%s_least_ms\": %.4f, \"%s_most_ms\": %.4f", measure_names[m], all[m].median, measure_names[m], all[m].least, measure_names[m], all[m].most);
    printf("}\n");
    fflush(stdout);
    fprintf(stderr, "%-28s %8.2f (%.2f, %.2f)", v->name, all[ALONE].median, all[ALONE].least, all[ALONE].most);
    for (int k = 0; k < 2; k++) {
        double beside = all[k ? BESIDE_GATHER : BESIDE_REDUCE].median, own = all[k ? GATHER : REDUCE].median;
        fprintf(stderr, "  | %8.2f %+6.2f of %5.2f = %4.0f %%", beside, beside - first, own, 100 * (beside - first) / own);
    }
    fprintf(stderr, "\n");
}

static void run_row(const variant *v)
{
    spread all[MEASURES];
    const char *why = cannot(v);
    bool can = all_can(&why);
    if (can) {
        why = open_own(v);
        can = all_can(&why);
    }
    if (can) {
        const algorithms *set = algorithms_of(v);
        for (int m = 0; m < MEASURES; m++)
            all[m] = time_measure(v, set, m);
        slowest(all);
    }
    barrier();
    close_own();
    if (s.rank == 0 && can)
        print_row(v, all);
    if (s.rank == 0 && !can) {
        print_head(v);
        printf(", \"not_run\": \"%s\"}\n", why);
        fflush(stdout);
        fprintf(stderr, "%-28s not run: %s\n", v->name, why);
    }
}

/* ---- a rank ---- */

/* Random numbers in [-1, 1): zeros cost less energy, and a card at its limit would be faster with them. */
static void fill(char *arena, size_t bytes)
{
    enum { PATTERN = 4 << 20 };
    static uint16_t half[PATTERN];
    uint32_t state = 1;
    for (int i = 0; i < PATTERN; i++) {
        state = state * 1664525u + 1013904223u;
        half[i] = vlai_bf16_from_float((float)((double)(state >> 8) / (1 << 23) - 1));
    }
    MUST(vlai_device_upload(arena, half, sizeof half, s.calm[0]));
    for (size_t have = sizeof half; have < bytes; have *= 2)
        MUST(vlai_device_copy(arena + have, arena, have < bytes - have ? have : bytes - have, s.calm[0]));
    MUST(vlai_device_synchronize(s.calm[0]));
}

static void open_rank(vlai_group *group)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_device_info info;
    char device[16];
    s.group = group;
    s.rank = vlai_group_rank(group);
    s.world = vlai_group_world(group);
    snprintf(device, sizeof device, "cuda:%d", s.rank);
    MUST(vlai_device_select(s.rank, &info));
    s.multiprocessors = info.multiprocessors;
    must_vla(vlai_comm_open(group, device, &s.comm, &err), &err);
    if (!load())
        must(1, "libnccl.so.2");
    must_gemm(vlai_cublaslt_open(&s.cublaslt), "opening cuBLASLt");
    for (int l = 0; l < LANES; l++) {
        MUST(vlai_device_stream_create(&s.calm[l]));
        MUST(vlai_device_stream_create_urgent(&s.pressed[l]));
        MUST(vlai_device_alloc(WORKSPACE, &s.workspace[l]));
    }
    MUST(vlai_device_stream_create(&s.common));
    MUST(vlai_device_stream_create_urgent(&s.urgent));
    for (size_t i = 0; i < sizeof s.fences / sizeof *s.fences; i++)
        MUST(vlai_device_fence_create(&s.fences[i]));
    for (int r = 0; r < REPEATS; r++) {
        MUST(vlai_device_event_create(&s.starts[r]));
        MUST(vlai_device_event_create(&s.ends[r]));
    }
    MUST(vlai_device_alloc(OPERANDS, (void **)&s.operands));
    MUST(vlai_device_alloc(RESULTS, (void **)&s.results));
    MUST(vlai_device_alloc(SENT, (void **)&s.sent[0]));
    MUST(vlai_device_alloc(RECEIVED, (void **)&s.received[0]));
    fill(s.operands, OPERANDS);
    fill(s.sent[0], SENT);
    if (s.rank == 0) {
        double operations = 0;
        for (int p = 0; p < PRODUCTS; p++)
            operations += 2.0 * (double)layer[p].m * (double)layer[p].n * (double)layer[p].k * s.layers;
        printf("{\"kind\": \"overlap_machine\", \"device\": \"%s\", \"multiprocessors\": %d, \"nccl\": %d, \"cublaslt\": %zu, \"ranks\": %d, \"tflop\": %.3f}\n", info.name,
               info.multiprocessors, nccl.version, vlai_cublaslt_version(), s.world, operations * 1e-12);
        fprintf(stderr, "%d of %s, %d multiprocessors, NCCL %d, %.2f TFLOP; ms\n%-28s %-24s | beside reductions: total, more than products alone, of what they take | gathers\n", s.world,
                info.name, info.multiprocessors, nccl.version, operations * 1e-12, "", "alone (least, most)");
    }
}

static void close_rank(void)
{
    for (int i = 0; i < s.set_count; i++)
        for (int p = 0; p < PRODUCTS; p++)
            vlai_cublaslt_release(s.sets[i].gemm[p]);
    if (s.sent[1]) {
        nccl.ncclMemFree(s.sent[1]);
        nccl.ncclMemFree(s.received[1]);
    }
    vlai_device_free(s.operands);
    vlai_device_free(s.results);
    vlai_device_free(s.sent[0]);
    vlai_device_free(s.received[0]);
    vlai_cublaslt_close(s.cublaslt);
    vlai_comm_close(s.comm);
}

static int body(vlai_group *group, void *context)
{
    const double *seconds = context;
    double start = vlai_now();
    s.until = start + *seconds;
    open_rank(group);
    for (int i = 0; i < VARIANTS; i++) {
        if (!wanted(variants[i].name))
            continue;
        if (!go_on()) {
            if (s.rank == 0)
                fprintf(stderr, "not begun, the time is over: %s and what follows\n", variants[i].name);
            break;
        }
        run_row(&variants[i]);
    }
    close_rank();
    if (s.rank == 0)
        fprintf(stderr, "%.0f s\n", vlai_now() - start);
    return 0;
}

/* In a process of its own: what was opened before a fork is lost behind it. */
static int count_body(vlai_group *group, void *context)
{
    int n = 0;
    (void)group, (void)context;
    return vlai_device_count(&n) ? 0 : n > 8 ? 8 : n;
}

int main(int argc, char **argv)
{
    int world = 0;
    double seconds = 90;
    s.layers = 8;
    s.names = argv;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (!strcmp(argv[i], "--ranks"))
            world = atoi(value), i++;
        else if (!strcmp(argv[i], "--layers"))
            s.layers = atoi(value), i++;
        else if (!strcmp(argv[i], "--seconds"))
            seconds = atof(value), i++;
        else
            s.names[s.name_count++] = argv[i];
    }
    if (!world)
        forked_run(&(forked){1, 60, 60, count_body, NULL}, &world);
    if (world < 2 || world > 8 || s.layers < 1 || s.layers > MOST_LAYERS || seconds <= 0) {
        fprintf(stderr, "gpu_overlap: %d GPUs, %d layers, %g s: wanted 2 to 8, 1 to %d, and some time\n", world, s.layers, seconds, MOST_LAYERS);
        return 2;
    }
    return forked_run(&(forked){world, 60, seconds + 60, body, &seconds}, NULL) != 0;
}
