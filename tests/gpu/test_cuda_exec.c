/* Executions on a device: every way of running a plan gives the bits of the plain way, and steps cost nothing but work.
 *
 *     test_cuda_exec [--list] [--short | --few] [PART[:I/N]...]      ways can be shared out (gpu/parts.h); --few: a smaller network too
 *
 * A two-lane network with norms, products, attention-free branches that meet, and its whole AdamW step. Compared bit for
 * bit after several steps: plain launches, lanes, replay, grouped update, all of them, and steps that were submitted ahead.
 * Then 100 pipelined steps (--short: 8) are counted: no device allocation, no synchronisation, no host allocation. Then choices of
 * algorithms: kept, adopted, and giving the same bits, those of a long search too; and the limit on device memory. Prints "N passed, N failed". */
#include "base/memory.h"
#include "base/time.h"
#include "exec/executor.h"
#include "exec/plan.h"
#include "gpu/parts.h"
#include "graph/graph.h"
#include "kernels/device.h"
#include "vla/memory.h"
#include "vla/run.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, STEPS = 6 };
static struct {
    int rows, small, width, inner, layers;
} net = {384, 40, 256, 512, LAYERS};

static int passed, failed;
static const vla_adamw_options adamw = {sizeof(vla_adamw_options), 0.9, 0.95, 1e-8, 0.1, 1.0, 1};

static void check(bool ok, const char *what)
{
    if (!ok)
        printf("FAIL %s\n", what);
    passed += ok;
    failed += !ok;
}

static void need(vla_status status, const vla_error *err, const char *what)
{
    if (status == VLA_OK)
        return;
    printf("FAIL %s: %s\n%d passed, %d failed\n", what, err->message, passed, failed + 1);
    exit(1);
}

static vla_value weight(vla_graph *g, const char *kind, int layer, vla_dtype dtype, int64_t rows, int64_t cols)
{
    char name[64];
    snprintf(name, sizeof name, "%s.%d", kind, layer);
    return cols ? vla_graph_param(g, name, dtype, 2, (int64_t[]){rows, cols}) : vla_graph_param(g, name, dtype, 1, &rows);
}

static vla_value block(vla_graph *g, const char *prefix, int layer, vla_value x)
{
    char name[32];
    snprintf(name, sizeof name, "%s.norm", prefix);
    vla_value y = vla_rms_norm(g, x, weight(g, name, layer, VLA_PRECISE, net.width, 0), 1e-6);
    snprintf(name, sizeof name, "%s.up", prefix);
    y = vla_swiglu(g, vla_linear(g, y, weight(g, name, layer, VLA_COMPUTE, 2 * net.inner, net.width), VLA_NONE));
    snprintf(name, sizeof name, "%s.down", prefix);
    return vla_add(g, x, vla_linear(g, y, weight(g, name, layer, VLA_COMPUTE, net.width, net.inner), VLA_NONE));
}

/* Two streams; in each layer the small one takes the first rows of the large one in. */
static vla_graph *network(void)
{
    vla_graph *g;
    vla_error err;
    need(vla_graph_create(&g, &err), &err, "graph");
    vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){net.rows, net.width});
    vla_value s = vla_graph_input(g, "s", VLA_COMPUTE, 2, (int64_t[]){net.small, net.width});
    for (int l = 0; l < net.layers; l++) {
        x = block(g, "large", l, x);
        vlai_graph_lane(g, 1);
        s = block(g, "small", l, vla_add(g, s, vla_slice_rows(g, x, l * net.small, net.small)));
        vlai_graph_lane(g, 0);
    }
    vla_value target = vla_graph_input(g, "target", VLA_PRECISE, 2, (int64_t[]){net.small, net.width});
    vla_value mask = vla_fill(g, VLA_PRECISE, 2, (int64_t[]){net.small, net.width}, 1);
    vla_value loss = vla_masked_mse(g, vla_cast(g, s, VLA_PRECISE), target, mask).loss;
    vla_graph_name(g, loss, "loss");
    need(vla_graph_backward(g, loss, 1.0, &err), &err, "backward");
    return g;
}

static float value(int64_t i)
{
    return (float)((i * 37 % 101) - 50) / 64.0f;
}

static uint16_t bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16);
}

static void add(vla_store *s, const char *kind, int layer, vla_dtype dtype, int64_t rows, int64_t cols)
{
    char name[64];
    vla_error err;
    snprintf(name, sizeof name, "%s.%d", kind, layer);
    need(cols ? vla_store_add(s, name, dtype, 2, (int64_t[]){rows, cols}, 0, &err) : vla_store_add(s, name, dtype, 1, &rows, 0, &err), &err, name);
}

static vla_store *make_store(vla_executor *ex)
{
    vla_store *s;
    vla_error err;
    need(vla_store_create(&s, &err), &err, "store");
    for (int l = 0; l < net.layers; l++) {
        add(s, "large.norm", l, VLA_PRECISE, net.width, 0), add(s, "large.up", l, VLA_COMPUTE, 2 * net.inner, net.width), add(s, "large.down", l, VLA_COMPUTE, net.width, net.inner);
        add(s, "small.norm", l, VLA_PRECISE, net.width, 0), add(s, "small.up", l, VLA_COMPUTE, 2 * net.inner, net.width), add(s, "small.down", l, VLA_COMPUTE, net.width, net.inner);
    }
    need(vla_store_allocate_on(s, ex, VLA_BF16_MASTER, VLA_STORE_STEP, 0, &err), &err, "store on the device");
    for (size_t i = 0; i < vla_store_count(s); i++) {
        vla_tensor t = vla_store_tensor(s, VLA_STORE_WEIGHT, i);
        for (int64_t k = 0; k < t.elements; k += 4096) {
            float f[4096];
            uint16_t h[4096];
            int64_t n = t.elements - k < 4096 ? t.elements - k : 4096;
            for (int64_t j = 0; j < n; j++) {
                f[j] = t.rank == 1 ? 1 : 0.1f * value(k + j + 13 * (int64_t)i);
                h[j] = bf16(f[j]);
            }
            need(vla_store_write(s, VLA_STORE_WEIGHT, i, k, n, t.dtype == VLA_F32 ? (void *)f : (void *)h, &err), &err, "weights");
        }
    }
    return s;
}

static void fill(vla_run *run, int step)
{
    uint16_t *x = vla_run_data(run, "x"), *s = vla_run_data(run, "s");
    float *target = vla_run_data(run, "target");
    double *hyper = vla_run_data(run, "hyper");
    for (int i = 0; i < net.rows * net.width; i++)
        x[i] = bf16(value(i + step * 11));
    for (int i = 0; i < net.small * net.width; i++) {
        s[i] = bf16(value(5 * i + step));
        target[i] = value(3 * i + step);
    }
    vla_hyper_fill(&adamw, 7, step, hyper);
    hyper[VLA_HYPER_RATES] = 1e-3;
}

/* Load, capture and replay take three. */
static int n_steps(void)
{
    return test_parts.brief ? 3 : STEPS;
}

/* Zeros where fewer steps were made. */
typedef struct outcome {
    float loss[STEPS];
    double norm[STEPS];
    uint64_t state; /* a digest of weights, low bits and moments */
} outcome;

static uint64_t digest(const vla_store *s)
{
    uint64_t h = 1469598103934665603u;
    for (int kind = VLA_STORE_WEIGHT; kind < VLA_STORE_KINDS; kind++)
        for (size_t i = 0; i < vla_store_count(s); i++) {
            vla_tensor t = vla_store_tensor(s, (vla_store_kind)kind, i);
            if (t.dtype == VLA_DTYPE_NONE)
                continue;
            size_t bytes = (size_t)t.elements * vla_dtype_size(t.dtype);
            unsigned char *data = malloc(bytes);
            vla_error err;
            need(vla_store_read(s, (vla_store_kind)kind, i, 0, t.elements, data, &err), &err, "reading the state");
            for (size_t k = 0; k < bytes; k++)
                h = (h ^ data[k]) * 1099511628211u;
            free(data);
        }
    return h;
}

typedef struct setup {
    vla_executor *ex;
    vla_store *store;
    vla_plan *plan;
    vla_run *run;
} setup;

/* free: multiprocessors that every product leaves, as those do which run beside collectives. explore: seconds of a long search. */
static setup open_with(unsigned fast, const char *adopted, int free, double explore)
{
    setup u = {0};
    vla_error err;
    vla_gradient_status status[6 * LAYERS] = {0};
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.numerics = VLA_BF16_MASTER;
    o.fast = fast;
    need(vla_executor_create_on("cuda", 1, &u.ex, &err), &err, "executor");
    if (adopted)
        need(vla_executor_adopt(u.ex, adopted, &err), &err, "adopting choices");
    u.store = make_store(u.ex);
    vla_graph *g = network();
    need(vla_graph_step(g, u.store, status, &adamw, &err), &err, "step");
    need(vla_plan_build(g, &o, &u.plan, &err), &err, "plan");
    for (size_t n = 0; n < u.plan->graph->n_nodes; n++)
        u.plan->graph->nodes[n].sms_free = (int8_t)(u.plan->graph->nodes[n].op == VLAI_OP_matmul ? free : 0);
    u.ex->explore = explore;
    need(vla_run_create(u.ex, u.plan, u.store, &u.run, &err), &err, "run");
    check(u.ex->explore == 0, "one run is searched for");
    return u;
}

static setup open_setup(unsigned fast, const char *adopted)
{
    return open_with(fast, adopted, 0, 0);
}

static void close_setup(setup *u)
{
    vla_run_destroy(u->run);
    vla_plan_destroy(u->plan);
    vla_store_destroy(u->store);
    vla_executor_destroy(u->ex);
}

static outcome steps(setup *u)
{
    outcome out = {0};
    vla_error err;
    for (int s = 0; s < n_steps(); s++) {
        fill(u->run, s);
        need(vla_run_execute(u->run, &err), &err, "execute");
        out.loss[s] = *(float *)vla_run_data(u->run, "loss");
        out.norm[s] = *(double *)vla_run_data(u->run, "clip");
    }
    out.state = digest(u->store);
    return out;
}

/* Two executions under way at a time. */
static outcome pipelined(setup *u)
{
    outcome out = {0};
    vla_error err;
    fill(u->run, 0);
    need(vla_run_submit(u->run, &err), &err, "submit");
    for (int s = 0; s < n_steps(); s++) {
        if (s + 1 < n_steps()) {
            need(vla_run_other_inputs(u->run, &err), &err, "other inputs");
            fill(u->run, s + 1);
            need(vla_run_submit(u->run, &err), &err, "submit");
        }
        need(vla_run_wait(u->run, &err), &err, "wait");
        out.loss[s] = *(float *)vla_run_data(u->run, "loss");
        out.norm[s] = *(double *)vla_run_data(u->run, "clip");
    }
    out.state = digest(u->store);
    return out;
}

static bool same(const outcome *a, const outcome *b)
{
    return !memcmp(a->loss, b->loss, sizeof a->loss) && !memcmp(a->norm, b->norm, sizeof a->norm) && a->state == b->state;
}

static void ways(void)
{
    static const struct { const char *name; unsigned fast; } rows[] = {
        {"plain again", 0}, {"lanes", VLA_FAST_LANES}, {"replay", VLA_FAST_REPLAY}, {"grouped update", VLA_FAST_UPDATE},
        {"lanes and replay", VLA_FAST_LANES | VLA_FAST_REPLAY}, {"all but search", VLA_FAST_ALL & ~(unsigned)VLA_FAST_SEARCH}};
    setup plain = open_setup(0, NULL);
    outcome want = steps(&plain);
    close_setup(&plain);
    check(want.norm[0] > 0 && (test_parts.brief || want.loss[STEPS - 1] < want.loss[0]), "the plain way learns");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char what[96];
        if (!in_share())
            continue;
        for (int ahead = 0; ahead < 2; ahead++) {
            setup u = open_setup(rows[i].fast, NULL);
            outcome got = ahead ? pipelined(&u) : steps(&u);
            snprintf(what, sizeof what, "%s%s: bits of the plain way", rows[i].name, ahead ? ", submitted ahead" : "");
            check(same(&want, &got), what);
            close_setup(&u);
        }
    }
}

static void nothing_but_work(void)
{
    setup u = open_setup(VLA_FAST_ALL, NULL);
    vla_error err;
    for (int s = 0; s < 3; s++) { /* loading, capture */
        fill(u.run, s);
        need(vla_run_execute(u.run, &err), &err, "execute");
    }
    vlai_device_counts before = vlai_device_counts_get();
    uint64_t host = vla_memory_stats_get().allocations;
    fill(u.run, 3);
    need(vla_run_submit(u.run, &err), &err, "submit");
    float last = 0;
    for (int s = 4; s < (test_parts.brief ? 11 : 103); s++) {
        need(vla_run_other_inputs(u.run, &err), &err, "other inputs");
        fill(u.run, s);
        need(vla_run_submit(u.run, &err), &err, "submit");
        need(vla_run_wait(u.run, &err), &err, "wait");
        last = *(float *)vla_run_data(u.run, "loss");
    }
    need(vla_run_wait(u.run, &err), &err, "wait");
    vlai_device_counts after = vlai_device_counts_get();
    check(after.allocations == before.allocations, "counted steps: no device or pinned allocation");
    check(after.synchronizations == before.synchronizations, "counted steps: no synchronisation of host and stream");
    check(vla_memory_stats_get().allocations == host, "counted steps: no host allocation");
    check(last > 0, "counted steps: a loss");
    close_setup(&u);
}

static void choices(void)
{
    vla_error err;
    char *text = NULL, *again = NULL;
    setup u = open_setup(VLA_FAST_ALL, NULL);
    outcome first = steps(&u);
    need(vla_executor_choices(u.ex, &text, &err), &err, "choices");
    close_setup(&u);
    check(text && strlen(text) > 100, "a searched run has choices");
    u = open_setup(VLA_FAST_ALL, text);
    outcome second = steps(&u);
    need(vla_executor_choices(u.ex, &again, &err), &err, "choices");
    close_setup(&u);
    check(same(&first, &second), "adopted choices give the same bits");
    check(again && !strcmp(text, again), "adopted choices are those of the run");
    need(vla_executor_create_on("cuda", 1, &u.ex, &err), &err, "executor");
    check(vla_executor_adopt(u.ex, "8 8 8 what\n", &err) == VLA_E_INVALID && strstr(err.message, "line 1"), "a damaged line is named");
    vla_executor_destroy(u.ex);
    free(text);
    free(again);
}

static bool near(const outcome *a, const outcome *b)
{
    bool all = true;
    for (int s = 0; s < n_steps(); s++) /* another order of sums, rounded to bf16 a few times */
        all = all && a->loss[s] > b->loss[s] * (1 - 0x1p-6f) && a->loss[s] < b->loss[s] * (1 + 0x1p-6f);
    return all;
}

/* A search of all settings computes the same, in time; what it found is kept and gives the same bits to a run that takes it over. */
static void long_search(void)
{
    const double seconds = 6;
    vla_error err;
    char *text = NULL, *again = NULL;
    if (test_parts.brief)
        return; /* a tool would report every setting that the library cannot launch */
    setup u = open_setup(0, NULL);
    outcome plain = steps(&u);
    close_setup(&u);
    u = open_setup(VLA_FAST_ALL, NULL); /* choices that the search begins with */
    close_setup(&u);
    double start = vlai_now();
    u = open_with(VLA_FAST_ALL, NULL, 0, seconds);
    check(vlai_now() - start < seconds + 3, "a long search ends in time");
    outcome first = steps(&u);
    need(vla_executor_choices(u.ex, &text, &err), &err, "choices");
    close_setup(&u);
    check(near(&first, &plain), "a long search: losses of the plain way");
    u = open_setup(VLA_FAST_ALL, text);
    outcome second = steps(&u);
    need(vla_executor_choices(u.ex, &again, &err), &err, "choices");
    close_setup(&u);
    check(same(&first, &second) && text && again && !strcmp(text, again), "a long search: adopted choices give the same bits");
    free(text);
    free(again);
}

/* Products that leave multiprocessors: their algorithms are kept apart, and compute the same. */
static void fewer_multiprocessors(void)
{
    enum { FREE = 16 };
    vla_error err;
    char *text = NULL, *again = NULL, end[16];
    vlai_device_info info;
    void *hold = NULL;
    setup u = open_setup(0, NULL);
    outcome plain = steps(&u);
    close_setup(&u);
    u = open_with(VLA_FAST_ALL, NULL, FREE, 0);
    outcome first = steps(&u);
    need(vla_executor_choices(u.ex, &text, &err), &err, "choices");
    close_setup(&u);
    check(vlai_device_describe(0, &info) == 0 && snprintf(end, sizeof end, " %d\n", info.multiprocessors - FREE) > 2, "the GPU is described");
    size_t lines = 0, marked = 0;
    for (const char *p = text; p && (p = strchr(p, '\n')); p++)
        lines++;
    for (const char *p = text; p && (p = strstr(p, end)); p++)
        marked++;
    check(lines > 0 && lines == marked, "choices say for how many multiprocessors they are");
    check(near(&first, &plain), "fewer multiprocessors: losses of the plain way");
    u = open_with(VLA_FAST_ALL, text, FREE, 0);
    outcome second = steps(&u);
    need(vla_executor_choices(u.ex, &again, &err), &err, "choices");
    check(same(&first, &second) && again && !strcmp(text, again), "fewer multiprocessors: adopted choices give the same bits");
    check(vlai_device_hold_begin(info.multiprocessors - FREE, &hold) == 0, "multiprocessors are taken");
    if (!test_parts.brief) /* a tool that lets one kernel run at a time would wait for the one that holds them */
        second = steps(&u);
    check(vlai_device_hold_end(hold) == 0, "and given back");
    close_setup(&u);
    u = open_with(VLA_FAST_REPLAY, NULL, FREE, 0);
    first = steps(&u);
    close_setup(&u);
    check(near(&first, &plain), "fewer multiprocessors, first algorithms: losses of the plain way");
    free(text);
    free(again);
}

static void limit(void)
{
    vla_error err;
    vla_executor *ex;
    vla_store *s;
    need(vla_executor_create_on("cuda", 1, &ex, &err), &err, "executor");
    vla_executor_limit(ex, 1 << 20);
    need(vla_store_create(&s, &err), &err, "store");
    need(vla_store_add(s, "big", VLA_COMPUTE, 2, (int64_t[]){1024, 1024}, 0, &err), &err, "big");
    check(vla_store_allocate_on(s, ex, VLA_FP32, VLA_STORE_TRAIN, 0, &err) == VLA_E_DEVICE_NOMEM && strstr(err.message, "limit"), "the limit holds");
    vla_store_destroy(s);
    check(vla_executor_held(ex) == 0, "what was refused is not held");
    vla_executor_destroy(ex);
}

/* A result that is too large to be fetched every time is there while nothing writes over it; small ones are those of the execution that
 * was waited for. */
static void large_results(void)
{
    enum { LONG = 512, WIDE = 1024 }; /* 2 MB */
    vla_error err;
    vla_graph *g;
    vla_plan *plan;
    vla_executor *ex;
    vla_run *run;
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    need(vla_graph_create(&g, &err), &err, "graph");
    vla_value y = vla_scale(g, vla_graph_input(g, "x", VLA_PRECISE, 2, (int64_t[]){LONG, WIDE}), 2);
    vla_graph_name(g, y, "y");
    vla_graph_name(g, vla_row_sum(g, y), "z");
    need(vla_plan_build(g, &o, &plan, &err), &err, "plan");
    need(vla_executor_create_on("cuda", 1, &ex, &err), &err, "executor");
    need(vla_run_create(ex, plan, NULL, &run, &err), &err, "run");
    for (int k = 1; k <= 2; k++) {
        if (k == 2)
            need(vla_run_other_inputs(run, &err), &err, "other inputs");
        float *x = vla_run_data(run, "x");
        for (int i = 0; i < LONG * WIDE; i++)
            x[i] = (float)k;
        need(vla_run_submit(run, &err), &err, "submit");
    }
    for (int k = 1; k <= 2; k++) {
        need(vla_run_wait(run, &err), &err, "wait");
        const float *large = vla_run_data(run, "y"), *small = vla_run_data(run, "z");
        check(small && small[LONG - 1] == (float)(2 * k * WIDE), "a small result is that of the execution that was waited for");
        check(k == 1 ? !large : large && large[LONG * WIDE - 1] == (float)(2 * k), "a large result is there once nothing is under way");
    }
    vla_run_destroy(run);
    vla_executor_destroy(ex);
    vla_plan_destroy(plan);
}

/* Three executions under way, a wait for nothing: said, not undefined. */
static void misuse(void)
{
    setup u = open_setup(0, NULL);
    vla_error err;
    check(vla_run_wait(u.run, &err) == VLA_E_INVALID, "a wait for nothing is refused");
    fill(u.run, 0);
    need(vla_run_submit(u.run, &err), &err, "submit");
    need(vla_run_submit(u.run, &err), &err, "submit");
    check(vla_run_submit(u.run, &err) == VLA_E_INVALID, "a third execution is refused");
    need(vla_run_wait(u.run, &err), &err, "wait");
    need(vla_run_wait(u.run, &err), &err, "wait");
    close_setup(&u);
}

int main(int argc, char **argv)
{
    static const test_part list[] = {{"ways", ways},   {"work", nothing_but_work}, {"choices", choices}, {"search", long_search}, {"fewer", fewer_multiprocessors},
                                {"limit", limit}, {"large", large_results},    {"misuse", misuse}};
    int code;
    if (!parts_begin(argc, argv, list, sizeof list / sizeof *list, &code))
        return code;
    if (test_parts.few) {
        net.rows = 96;
        net.width = 64;
        net.inner = 128;
        net.layers = 1;
    }
    parts_run(argc, argv, list, sizeof list / sizeof *list, NULL);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
