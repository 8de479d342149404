/* The fuse pass: which patterns it finds in a model of two streams with a tower in front, that results stay what they were,
 * and that it leaves alone what somebody else needs. */
#include "test.h"

#include "exec/plan.h"
#include "graph/graph.h"
#include "ops/op.h"
#include "vla/run.h"

#include <math.h>
#include <stdlib.h>

enum { ROUTE, QKV, STREAMS, NORM, RESIDUAL, SWIGLU, MADE, SUMS };

/* Rows of the streams; each layer attends over both in the order of `map`. */
enum { N0 = 13, N1 = 5, N = N0 + N1, WIDTH = 12, HEADS = 2, KV_HEADS = 1, DIM = 6, INNER = 7, LAYERS = 2, PACKED = (HEADS + 2 * KV_HEADS) * DIM };

typedef struct model {
    vla_graph *g;
    vla_rope_tables tables;
    vla_value map, at[2], qpos, rows, cols, segments;
    const char *name_of; /* names one value of layer 0: "attn", "gate_up", "q" */
} model;

static vla_value param(model *m, const char *format, int layer, int stream, int64_t rows, int64_t cols)
{
    char name[64];
    snprintf(name, sizeof name, format, layer, stream);
    return rows ? vla_graph_param(m->g, name, VLA_COMPUTE, 2, (int64_t[]){rows, cols}) : vla_graph_param(m->g, name, VLA_COMPUTE, 1, &cols);
}

static void name(model *m, int layer, const char *what, vla_value v)
{
    if (layer == 0 && m->name_of && !strcmp(m->name_of, what))
        vla_graph_name(m->g, v, what);
}

static vla_value attention(model *m, int layer, vla_value packed)
{
    vla_value part[3];
    vla_attention_options o = {HEADS, KV_HEADS, DIM, 0.4, N * (N + 1) / 2, VLA_MASK_CAUSAL, N};
    vla_split_cols(m->g, packed, 3, (int64_t[]){HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM}, part);
    vla_value q = vla_rope(m->g, part[0], m->tables, DIM), k = vla_rope(m->g, part[1], m->tables, DIM);
    name(m, layer, "q", q);
    return vla_attention(m->g, q, k, part[2], m->qpos, m->rows, m->cols, m->segments, &o);
}

static vla_value mlp(model *m, int layer, int stream, vla_value x, bool bias)
{
    vla_graph *g = m->g;
    vla_value n = vla_rms_norm(g, x, param(m, "norm2.%d.%d", layer, stream, 0, WIDTH), 1e-6);
    vla_value u = vla_linear(g, n, param(m, "gate_up.%d.%d", layer, stream, 2 * INNER, WIDTH), bias ? param(m, "gate_up_bias.%d.%d", layer, stream, 0, 2 * INNER) : VLA_NONE);
    name(m, layer, "gate_up", u);
    return vla_add(g, x, vla_linear(g, vla_swiglu(g, u), param(m, "down.%d.%d", layer, stream, WIDTH, INNER), bias ? param(m, "down_bias.%d.%d", layer, stream, 0, WIDTH) : VLA_NONE));
}

/* The tables of rows and the rotation. */
static void declare(model *m)
{
    vla_graph *g = m->g;
    vla_rope_options rope = {.base = 100, .half = DIM / 2, .axes = 1, .sections = {DIM / 2}, .dtype = VLA_COMPUTE};
    m->tables = vla_rope_table(g, vla_graph_input(g, "positions", VLA_I32, 2, (int64_t[]){1, N}), &rope);
    m->map = vla_graph_input(g, "map", VLA_I32, 1, (int64_t[]){N});
    m->at[0] = vla_graph_input(g, "at0", VLA_I32, 1, (int64_t[]){N0});
    m->at[1] = vla_graph_input(g, "at1", VLA_I32, 1, (int64_t[]){N1});
    m->qpos = vla_graph_input(g, "qpos", VLA_I32, 1, (int64_t[]){N});
    m->rows = vla_graph_input(g, "rows", VLA_I32, 2, (int64_t[]){N, 2});
    m->cols = vla_graph_input(g, "cols", VLA_I32, 2, (int64_t[]){N, 4});
    m->segments = vla_graph_input(g, "segments", VLA_I32, 1, (int64_t[]){3});
}

/* Layer 0 is the tower's, over one stream; the others are over two. */
static vla_graph *build(const char *name_of)
{
    vla_error err;
    model m = {.name_of = name_of};
    assert_ok(vla_graph_create(&m.g, &err), err);
    vla_graph *g = m.g;
    declare(&m);
    vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH}), stream[2], packed[2];
    x = vla_linear(g, x, param(&m, "embed.%d.%d", 0, 0, WIDTH, WIDTH), VLA_NONE);
    vlai_graph_layer(g, 0);
    vla_value n = vla_rms_norm(g, x, param(&m, "norm1.%d.%d", 0, 0, 0, WIDTH), 1e-6);
    packed[0] = vla_linear(g, n, param(&m, "qkv.%d.%d", 0, 0, PACKED, WIDTH), param(&m, "qkv_bias.%d.%d", 0, 0, 0, PACKED));
    vla_value y = vla_linear(g, attention(&m, 0, packed[0]), param(&m, "o.%d.%d", 0, 0, WIDTH, HEADS * DIM), param(&m, "o_bias.%d.%d", 0, 0, 0, WIDTH));
    name(&m, 0, "attn", y);
    x = mlp(&m, 0, 0, vla_add(g, x, y), true);
    vlai_graph_layer(g, -1);
    for (int s = 0; s < 2; s++)
        stream[s] = vla_gather_rows(g, x, m.at[s], -1);
    for (int l = 1; l <= LAYERS; l++) {
        vlai_graph_layer(g, l);
        for (int s = 0; s < 2; s++) {
            n = vla_rms_norm(g, stream[s], param(&m, "norm1.%d.%d", l, s, 0, WIDTH), 1e-6);
            packed[s] = vla_linear(g, n, param(&m, "qkv.%d.%d", l, s, PACKED, WIDTH), param(&m, "qkv_bias.%d.%d", l, s, 0, PACKED));
        }
        vla_value joint = attention(&m, l, vla_merge_rows(g, packed[0], packed[1], m.map, m.at[0], m.at[1]));
        for (int s = 0; s < 2; s++) {
            vla_value o = vla_gather_rows(g, joint, m.at[s], -1);
            stream[s] = vla_add(g, stream[s], vla_linear(g, o, param(&m, "o.%d.%d", l, s, WIDTH, HEADS * DIM), VLA_NONE));
            stream[s] = mlp(&m, l, s, stream[s], false);
        }
    }
    vlai_graph_layer(g, -1);
    vla_value out = vla_merge_rows(g, stream[0], stream[1], m.map, m.at[0], m.at[1]);
    vla_value target = vla_graph_input(g, "target", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH});
    vla_value mask = vla_graph_input(g, "mask", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH});
    vla_graph_name(g, vla_masked_mse(g, out, target, mask).loss, "loss");
    assert_ok(vla_graph_check(g, &err), err);
    assert_ok(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, &err), err);
    return g;
}

static double next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(*seed >> 40) / (1 << 23) - 1;
}

static void *data(const vla_run *run, const char *what)
{
    void *p = vla_run_data(run, what);
    assert_non_null(p);
    return p;
}

/* Rows 0..10 and 11..17 are the two segments; every third row belongs to the second stream. */
static void fill(const vla_run *run)
{
    int32_t *map = data(run, "map"), *at[2] = {data(run, "at0"), data(run, "at1")}, *rows = data(run, "rows"), *cols = data(run, "cols");
    int32_t count[2] = {0, 0};
    memcpy(data(run, "segments"), (int32_t[]){0, 11, N}, 3 * sizeof(int32_t));
    for (int32_t i = 0; i < N; i++) {
        int s = i % 3 == 2 && count[1] < N1;
        map[i] = s ? -1 - count[1] : count[0];
        at[s][count[s]++] = i;
        ((int32_t *)data(run, "positions"))[i] = i;
        ((int32_t *)data(run, "qpos"))[i] = i;
        memcpy(rows + 2 * i, (int32_t[]){i < 11 ? 0 : 11, i + 1}, 2 * sizeof(int32_t));
        memcpy(cols + 4 * i, (int32_t[]){i, i < 11 ? 11 : N, 0, 0}, 4 * sizeof(int32_t));
    }
    assert_int_equal(count[0], N0);
    for (int s = 0; s < 2; s++) {
        void *other = vla_run_data(run, s ? "other1" : "other0");
        if (other)
            memcpy(other, at[s], (size_t)count[s] * sizeof(int32_t));
    }
    uint64_t seed = 5;
    static const char *const reals[] = {"x", "target", "mask"};
    for (int k = 0; k < 3; k++) {
        vla_tensor t = vla_run_tensor(run, reals[k]);
        for (int64_t i = 0; i < t.elements; i++) {
            double x = k == 2 ? 1 : next(&seed);
            if (t.dtype == VLA_F64)
                ((double *)t.data)[i] = x;
            else
                ((float *)t.data)[i] = (float)x;
        }
    }
}

typedef struct outcome {
    double loss, *gradient;
    size_t n, nodes, fused[VLAI_FUSE_COUNT];
    size_t arena;
} outcome;

static outcome compute_graph(vla_graph *g, const vla_plan_options *options)
{
    vla_error err;
    outcome result = {0};
    vla_store *store;
    assert_ok(vla_store_create(&store, &err), err);
    for (size_t v = 0; v < g->n_values; v++)
        if (g->values[v].kind == VLAI_PARAM)
            assert_ok(vla_store_add(store, g->values[v].name, VLA_COMPUTE, g->values[v].rank, g->values[v].shape, 0, &err), err);
    assert_ok(vla_store_allocate(store, options->numerics, VLA_STORE_TRAIN, &err), err);
    uint64_t seed = 77;
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        for (int64_t k = 0; k < t.elements; k++) {
            float x = (float)(strncmp(t.name, "norm", 4) ? 0.6 * next(&seed) : 1 + 0.2 * next(&seed));
            vla_store_set_float(store, i, k, 1, &x);
        }
    }
    vla_gradient_status *status = calloc(vla_store_count(store), sizeof *status);
    assert_non_null(status);
    assert_ok(vla_graph_store_gradients(g, store, 0, status, &err), err);
    vla_plan *plan;
    vla_executor *executor;
    vla_run *run;
    assert_ok(vla_plan_build(g, options, &plan, &err), err);
    assert_ok(vla_executor_create(2, &executor, &err), err);
    assert_ok(vla_run_create(executor, plan, store, &run, &err), err);
    for (int again = 0; again < 2; again++) { /* the second run finds the arena dirty */
        fill(run);
        assert_ok(vla_run_execute(run, &err), err);
    }
    vla_tensor loss = vla_run_tensor(run, "loss");
    result.loss = loss.dtype == VLA_F64 ? *(double *)loss.data : (double)*(float *)loss.data;
    result.nodes = vla_plan_nodes(plan);
    result.arena = plan->memory.arena_bytes;
    memcpy(result.fused, plan->fused, sizeof result.fused);
    for (size_t i = 0; i < vla_store_count(store); i++)
        result.n += (size_t)vla_store_tensor(store, VLA_STORE_GRADIENT, i).elements;
    result.gradient = malloc(result.n * sizeof *result.gradient);
    assert_non_null(result.gradient);
    for (size_t i = 0, at = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_GRADIENT, i);
        for (int64_t k = 0; k < t.elements; k++)
            result.gradient[at++] = t.dtype == VLA_F64 ? ((double *)t.data)[k] : (double)((float *)t.data)[k];
    }
    free(status);
    vla_run_destroy(run);
    vla_executor_destroy(executor);
    vla_plan_destroy(plan);
    vla_store_destroy(store);
    return result;
}

static outcome compute(const vla_plan_options *options, const char *name_of)
{
    return compute_graph(build(name_of), options);
}

static vla_plan_options options_of(vla_numerics numerics, vla_recompute recompute, unsigned fuse)
{
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.numerics = numerics;
    o.recompute = recompute;
    o.fuse = fuse;
    o.visual_layers = 1;
    return o;
}

/* In fp64 nothing but the order of a few sums differs. */
static void test_results_stay(void **state)
{
    (void)state;
    for (int recompute = 0; recompute < 3; recompute++)
        for (int layout = 0; layout < 2; layout++) {
            vla_plan_options plain = options_of(VLA_FP64, (vla_recompute)recompute, 0), fused = options_of(VLA_FP64, (vla_recompute)recompute, 3);
            plain.layout = fused.layout = (vla_memory_layout)layout;
            outcome a = compute(&plain, NULL), b = compute(&fused, NULL);
            double worst = 0, largest = 0;
            assert_int_equal(a.n, b.n);
            for (size_t i = 0; i < a.n; i++) {
                worst = fmax(worst, fabs(a.gradient[i] - b.gradient[i]));
                largest = fmax(largest, fabs(a.gradient[i]));
            }
            assert_true(fabs(a.loss - b.loss) <= 1e-13 * fabs(a.loss));
            assert_true(largest > 0 && worst <= 1e-12 * largest);
            assert_true(b.nodes < a.nodes);
            if (layout == VLA_MEMORY_LIFETIMES)
                assert_true(b.arena <= a.arena);
            free(a.gradient);
            free(b.gradient);
        }
}

/* One attention, two norms, two residual sums and one product in the tower; twice that for two streams in each layer. Biases:
 * four in the tower, of which the last one's dy is made by nobody who sums; one a stream of the other layers. */
static void test_counts(void **state)
{
    (void)state;
    static const struct { unsigned fuse; size_t count[VLAI_FUSE_COUNT]; } cases[] = {
        {0, {0}},
        {VLA_FUSE_VISUAL, {[QKV] = 1, [NORM] = 2, [RESIDUAL] = 2, [SWIGLU] = 1, [MADE] = 3, [SUMS] = 1}},
        {VLA_FUSE_MODEL, {[ROUTE] = LAYERS + 1, [QKV] = LAYERS, [STREAMS] = LAYERS, [NORM] = 4 * LAYERS, [RESIDUAL] = 4 * LAYERS, [SWIGLU] = 2 * LAYERS, [MADE] = 2 * LAYERS}},
        {VLA_FUSE_MODEL | VLA_FUSE_VISUAL,
         {[ROUTE] = LAYERS + 1, [QKV] = LAYERS + 1, [STREAMS] = LAYERS, [NORM] = 4 * LAYERS + 2, [RESIDUAL] = 4 * LAYERS + 2, [SWIGLU] = 2 * LAYERS + 1, [MADE] = 2 * LAYERS + 3, [SUMS] = 1}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        vla_plan_options o = options_of(VLA_FP32, VLA_RECOMPUTE_CHEAP, cases[c].fuse);
        outcome got = compute(&o, NULL);
        for (int p = 0; p < VLAI_FUSE_COUNT; p++)
            if (got.fused[p] != cases[c].count[p])
                fail_msg("fuse %u: %zu of '%s', wanted %zu", cases[c].fuse, got.fused[p], vlai_fuse_name(p), cases[c].count[p]);
        free(got.gradient);
    }
}

/* A value with a name is a result: what would leave it out does not happen, in its layer alone. */
static void test_named_values_stay(void **state)
{
    (void)state;
    static const struct { const char *name; int pattern; } cases[] = {{"attn", RESIDUAL}, {"q", QKV}};
    vla_plan_options o = options_of(VLA_FP32, VLA_RECOMPUTE_CHEAP, VLA_FUSE_MODEL | VLA_FUSE_VISUAL);
    outcome all = compute(&o, NULL);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        outcome got = compute(&o, cases[c].name);
        assert_int_equal(got.fused[cases[c].pattern], all.fused[cases[c].pattern] - 1);
        assert_true(fabs(got.loss - all.loss) <= 1e-6 * fabs(all.loss));
        free(got.gradient);
    }
    free(all.gradient);
}

/* Without recompute the product is kept, and only dx is made in the backward. */
static void test_kept_products(void **state)
{
    (void)state;
    vla_plan_options o = options_of(VLA_FP32, VLA_RECOMPUTE_NONE, VLA_FUSE_MODEL | VLA_FUSE_VISUAL);
    outcome got = compute(&o, NULL);
    assert_int_equal(got.fused[SWIGLU], 0);
    assert_int_equal(got.fused[QKV], LAYERS + 1);
    free(got.gradient);
}

/* One attention over two streams, in ways of which all but the first leave somebody who needs o whole, or do not say where its
 * rows lie. */
typedef enum way { AS_WANTED, NAMED, READ_WHOLE, ONE_STREAM, OTHER_INDEX, WAYS } way;

static vla_graph *one_attention(way how)
{
    vla_error err;
    model m = {0};
    assert_ok(vla_graph_create(&m.g, &err), err);
    vla_graph *g = m.g;
    declare(&m);
    vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH}), stream[2], packed[2], at[2] = {m.at[0], m.at[1]};
    if (how == OTHER_INDEX) {
        at[0] = vla_graph_input(g, "other0", VLA_I32, 1, (int64_t[]){N0});
        at[1] = vla_graph_input(g, "other1", VLA_I32, 1, (int64_t[]){N1});
    }
    for (int s = 0; s < 2; s++)
        packed[s] = vla_linear(g, vla_gather_rows(g, x, m.at[s], -1), param(&m, "qkv.%d.%d", 0, s, PACKED, WIDTH), VLA_NONE);
    vla_value joint = attention(&m, 1, vla_merge_rows(g, packed[0], packed[1], m.map, m.at[0], m.at[1]));
    if (how == NAMED)
        vla_graph_name(g, joint, "joint");
    for (int s = 0; s < 2; s++)
        stream[s] = vla_linear(g, vla_gather_rows(g, s && how == ONE_STREAM ? x : joint, at[s], -1), param(&m, "o.%d.%d", 0, s, WIDTH, HEADS * DIM), VLA_NONE);
    vla_value out = vla_merge_rows(g, stream[0], stream[1], m.map, m.at[0], m.at[1]);
    if (how == READ_WHOLE)
        out = vla_add(g, out, joint);
    vla_value target = vla_graph_input(g, "target", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH}), mask = vla_graph_input(g, "mask", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH});
    vla_graph_name(g, vla_masked_mse(g, out, target, mask).loss, "loss");
    assert_ok(vla_graph_check(g, &err), err);
    assert_ok(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, &err), err);
    return g;
}

static void test_streams(void **state)
{
    (void)state;
    for (int how = 0; how < WAYS; how++) {
        vla_plan_options plain = options_of(VLA_FP64, VLA_RECOMPUTE_CHEAP, 0), fused = options_of(VLA_FP64, VLA_RECOMPUTE_CHEAP, VLA_FUSE_MODEL);
        outcome a = compute_graph(one_attention((way)how), &plain), b = compute_graph(one_attention((way)how), &fused);
        assert_int_equal(b.fused[QKV], 1);
        assert_int_equal(b.fused[STREAMS], how == AS_WANTED);
        assert_int_equal(a.n, b.n);
        double largest = 0;
        for (size_t i = 0; i < a.n; i++)
            largest = fmax(largest, fabs(a.gradient[i]));
        assert_true(largest > 0 && fabs(a.loss - b.loss) <= 1e-13 * fabs(a.loss));
        for (size_t i = 0; i < a.n; i++)
            assert_true(fabs(a.gradient[i] - b.gradient[i]) <= 1e-12 * largest);
        free(a.gradient);
        free(b.gradient);
    }
}

/* x w and y w where y is made from x w: the sum of both cannot be a residual of the first. */
static void test_no_circle(void **state)
{
    (void)state;
    vla_error err;
    vla_graph *g;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value x = vla_graph_input(g, "x", VLA_F32, 2, (int64_t[]){4, 4}), w = vla_graph_param(g, "w", VLA_F32, 2, (int64_t[]){4, 4});
    vla_value a = vla_matmul(g, x, w, 0, 0, VLA_NONE), b = vla_matmul(g, vla_silu(g, a), w, 0, 0, VLA_NONE);
    vla_graph_name(g, vla_add(g, a, b), "twice"); /* a has two readers: only b can take the other as its residual */
    vla_value c = vla_matmul(g, x, w, 1, 0, VLA_NONE), d = vla_scale(g, x, 2);
    vla_graph_name(g, vla_add(g, c, d), "once");
    vla_plan_options o = options_of(VLA_FP32, VLA_RECOMPUTE_NONE, VLA_FUSE_MODEL);
    vla_plan *plan;
    assert_ok(vla_plan_build(g, &o, &plan, &err), err);
    assert_int_equal(plan->fused[RESIDUAL], 2);
    assert_int_equal(vla_plan_nodes(plan), 5);
    vla_plan_destroy(plan);
}

/* A graph of random operations over random values that are there, some of them read twice, named or in another layer: what
 * the patterns look like is then mostly broken in some way, and never to be joined wrongly. */
static vla_graph *random_graph(uint64_t seed)
{
    enum { STEPS = 24, POOL = 2 + STEPS };
    vla_error err;
    model m = {0};
    assert_ok(vla_graph_create(&m.g, &err), err);
    vla_graph *g = m.g;
    declare(&m);
    vla_value pool[POOL]; /* all [N, WIDTH] */
    int n = 0, number = 0;
    pool[n++] = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH});
    pool[n] = vla_linear(g, pool[0], param(&m, "in.%d.%d", 0, 0, WIDTH, WIDTH), VLA_NONE);
    n++;
#define PICK(k) ((int)((next(&seed) + 1) / 2 * (k)) % (k))
#define ONE pool[n - 1 - PICK(n < 4 ? n : 4)]
    for (int step = 0; step < STEPS; step++, number++) {
        vlai_graph_layer(g, PICK(3) - 1);
        vla_value x = ONE, y = VLA_NONE, bias = PICK(2) ? param(&m, "b.%d.%d", number, 0, 0, WIDTH) : VLA_NONE, stream[2];
        switch (PICK(7)) {
        case 0: y = vla_add(g, x, vla_linear(g, ONE, param(&m, "w.%d.%d", number, 0, WIDTH, WIDTH), bias)); break;
        case 1: y = vla_rms_norm(g, x, PICK(3) ? param(&m, "norm.%d.%d", number, 0, 0, WIDTH) : VLA_NONE, 1e-3); break;
        case 2: y = vla_linear(g, vla_swiglu(g, vla_linear(g, x, param(&m, "u.%d.%d", number, 0, 2 * WIDTH, WIDTH), PICK(2) ? param(&m, "c.%d.%d", number, 0, 0, 2 * WIDTH) : VLA_NONE)), param(&m, "d.%d.%d", number, 0, WIDTH, WIDTH), bias); break;
        case 3:
            x = bias == VLA_NONE ? x : vla_linear(g, x, param(&m, "w.%d.%d", number, 0, WIDTH, WIDTH), bias);
            y = vla_add(g, vla_rms_norm(g, x, param(&m, "norm.%d.%d", number, 0, 0, WIDTH), 1e-3), PICK(2) ? x : ONE);
            break;
        case 4:
            for (int s = 0; s < 2; s++)
                stream[s] = vla_gather_rows(g, s && PICK(2) ? ONE : x, m.at[s], -1);
            y = vla_merge_rows(g, stream[0], PICK(2) ? stream[1] : vla_scale(g, stream[1], 0.5), m.map, m.at[0], m.at[1]);
            break;
        case 5:
            y = vla_linear(g, x, param(&m, "qkv.%d.%d", number, 0, PACKED, WIDTH), PICK(2) ? param(&m, "a.%d.%d", number, 0, 0, PACKED) : VLA_NONE);
            y = attention(&m, 1, PICK(2) ? y : vla_merge_rows(g, vla_gather_rows(g, y, m.at[0], -1), vla_gather_rows(g, y, m.at[1], -1), m.map, m.at[0], m.at[1]));
            if (PICK(3)) { /* to two streams, and often for nobody else */
                for (int s = 0; s < 2; s++)
                    stream[s] = vla_scale(g, vla_gather_rows(g, y, m.at[s], -1), 0.5 + s);
                vla_value both = vla_merge_rows(g, stream[0], stream[1], m.map, m.at[0], m.at[1]);
                y = PICK(3) ? both : vla_add(g, both, y);
            }
            break;
        default: y = vla_mul(g, vla_silu(g, x), ONE); break;
        }
        if (PICK(6) == 0) {
            char text[16];
            snprintf(text, sizeof text, "named.%d", number);
            vla_graph_name(g, y, text);
        }
        pool[n++] = vla_rms_norm(g, y, VLA_NONE, 1e-2); /* keeps numbers near 1 through many steps */
        if (PICK(2))
            pool[n - 1] = vla_add(g, pool[n - 1], x);
    }
    vlai_graph_layer(g, -1);
    vla_value target = vla_graph_input(g, "target", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH}), mask = vla_graph_input(g, "mask", VLA_COMPUTE, 2, (int64_t[]){N, WIDTH});
    vla_graph_name(g, vla_masked_mse(g, pool[n - 1], target, mask).loss, "loss");
    assert_ok(vla_graph_check(g, &err), err);
    assert_ok(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, &err), err);
    return g;
}

static void test_random_graphs(void **state)
{
    (void)state;
    size_t total[VLAI_FUSE_COUNT] = {0};
    for (uint64_t seed = 1; seed <= 120; seed++) {
        vla_recompute recompute = (vla_recompute)(seed % 3);
        vla_plan_options plain = options_of(VLA_FP64, VLA_RECOMPUTE_NONE, 0), fused = options_of(VLA_FP64, recompute, 1 + (unsigned)(seed / 3 % 3));
        outcome a = compute_graph(random_graph(seed), &plain), b = compute_graph(random_graph(seed), &fused);
        double worst = 0, largest = 0;
        assert_int_equal(a.n, b.n);
        for (size_t i = 0; i < a.n; i++) {
            worst = fmax(worst, fabs(a.gradient[i] - b.gradient[i]));
            largest = fmax(largest, fabs(a.gradient[i]));
        }
        if (!(fabs(a.loss - b.loss) <= 1e-12 * fabs(a.loss) && worst <= 1e-11 * largest))
            fail_msg("graph %d: loss %.17g and fused %.17g, gradients differ by %g of %g", (int)seed, a.loss, b.loss, worst, largest);
        for (int p = 0; p < VLAI_FUSE_COUNT; p++)
            total[p] += b.fused[p];
        free(a.gradient);
        free(b.gradient);
    }
    for (int p = 0; p < VLAI_FUSE_COUNT; p++) /* the graphs hold what the patterns want */
        if (total[p] < 10)
            fail_msg("%zu of '%s' in all graphs", total[p], vlai_fuse_name(p));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_graphs), cmocka_unit_test(test_results_stay),     cmocka_unit_test(test_counts), cmocka_unit_test(test_named_values_stay),
                                       cmocka_unit_test(test_kept_products), cmocka_unit_test(test_streams),          cmocka_unit_test(test_no_circle)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
