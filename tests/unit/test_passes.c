/* The passes on graphs made up here: random ones for the memory plan, and a model of the build of Wall-X (vision tower,
 * two experts in every layer, action head) at any size, from a few rows to the full model at batch 26. */
#include "test.h"

#include "base/bf16.h"
#include "exec/plan.h"
#include "ops/op.h"
#include "pass/pass.h"
#include "vla/memory.h"
#include "vla/run.h"

#include <math.h>
#include <time.h>

/* --- a model of the build of Wall-X --- */

typedef struct sizes {
    int64_t batch, text, units, actions; /* per sample: text tokens, merged picture tokens, action tokens */
    int layers, hidden, inner, heads, kv_heads, head_dim, action_hidden, action_inner;
    int blocks, vision_hidden, vision_inner, vision_heads, vocab, channels;
    bool head_reads_text; /* a loss on stream 0 as well, so that nothing is dead */
} sizes;

static const sizes FULL = {26, 98, 162, 10, 36, 2048, 11008, 16, 2, 128, 1024, 2048, 32, 1280, 3420, 16, 151936, 26, false};
static const sizes SMALL = {2, 5, 4, 3, 3, 32, 48, 4, 2, 8, 16, 24, 2, 24, 20, 3, 50, 6, false};

typedef struct builder {
    vla_graph *g;
    const sizes *s;
    int64_t n0, n1, patches;
    vla_value map, at0, at1, qpos, rows, cols, vqpos, vrows, vcols;
    vla_rope_tables rope, vision_rope;
} builder;

static vla_value param(builder *b, const char *where, int layer, const char *name, int64_t rows, int64_t cols)
{
    char full[128];
    snprintf(full, sizeof full, "%s.%d.%s", where, layer, name);
    return vla_graph_param(b->g, full, VLA_COMPUTE, rows ? 2 : 1, rows ? (int64_t[]){rows, cols} : (int64_t[]){cols});
}

static vla_value mlp(builder *b, const char *where, int layer, const char *expert, vla_value x, int64_t width, int64_t inner)
{
    char name[64];
    snprintf(name, sizeof name, "%s.norm2", expert);
    vla_value n = vla_rms_norm(b->g, x, param(b, where, layer, name, 0, width), 1e-6);
    snprintf(name, sizeof name, "%s.gate_up", expert);
    vla_value u = vla_linear(b->g, n, param(b, where, layer, name, 2 * inner, width), VLA_NONE);
    snprintf(name, sizeof name, "%s.down", expert);
    return vla_add(b->g, x, vla_linear(b->g, vla_swiglu(b->g, u), param(b, where, layer, name, width, inner), VLA_NONE));
}

static vla_value vision(builder *b)
{
    vla_graph *g = b->g;
    const sizes *s = b->s;
    int64_t w = s->vision_hidden;
    int d = (int)(w / s->vision_heads);
    vla_value pixels = vla_graph_input(g, "pixels", VLA_U8, 1, (int64_t[]){b->patches * 14 * 14 * 3});
    vla_value table = vla_graph_input(g, "patches", VLA_I32, 2, (int64_t[]){b->patches, 3});
    vla_patchify_options o = {.patch = 14, .temporal = 2, .mean = {0.5f, 0.5f, 0.5f}, .std = {0.25f, 0.25f, 0.25f}, .dtype = VLA_COMPUTE};
    vla_value x = vla_linear(g, vla_patchify(g, pixels, table, &o), param(b, "visual", 0, "patch", w, 1176), VLA_NONE);
    for (int l = 0; l < s->blocks; l++) {
        vlai_graph_layer(g, l);
        vla_value part[3], n = vla_rms_norm(g, x, param(b, "visual", l, "norm1", 0, w), 1e-6);
        vla_value qkv = vla_linear(g, n, param(b, "visual", l, "qkv", 3 * w, w), param(b, "visual", l, "qkv.bias", 0, 3 * w));
        vla_split_cols(g, qkv, 3, (int64_t[]){w, w, w}, part);
        vla_attention_options a = {s->vision_heads, s->vision_heads, d, 1 / sqrt(d), b->patches * 4, VLA_MASK_COLUMNS, 0};
        vla_value out = vla_attention(g, vla_rope(g, part[0], b->vision_rope, d), vla_rope(g, part[1], b->vision_rope, d), part[2],
                                      b->vqpos, b->vrows, b->vcols, VLA_NONE, &a);
        x = vla_add(g, x, vla_linear(g, out, param(b, "visual", l, "proj", w, w), param(b, "visual", l, "proj.bias", 0, w)));
        x = mlp(b, "visual", l, "mlp", x, w, s->vision_inner);
    }
    vlai_graph_layer(g, -1);
    vla_value n = vla_rms_norm(g, x, param(b, "merger", 0, "norm", 0, w), 1e-6);
    n = vla_reshape(g, n, 2, (int64_t[]){b->patches / 4, 4 * w});
    n = vla_gelu(g, vla_linear(g, n, param(b, "merger", 0, "fc1", 4 * w, 4 * w), param(b, "merger", 0, "fc1.bias", 0, 4 * w)));
    return vla_linear(g, n, param(b, "merger", 0, "fc2", s->hidden, 4 * w), param(b, "merger", 0, "fc2.bias", 0, s->hidden));
}

/* Layer l of the backbone, both streams. */
static void decoder(builder *b, int l, vla_value *x0, vla_value *x1)
{
    vla_graph *g = b->g;
    const sizes *s = b->s;
    int64_t q = (int64_t)s->heads * s->head_dim, kv = (int64_t)s->kv_heads * s->head_dim, w1 = s->action_hidden;
    vla_value part[3];
    vla_value a0 = vla_rms_norm(g, *x0, param(b, "layers", l, "norm1.0", 0, s->hidden), 1e-6);
    vla_value a1 = vla_rms_norm(g, *x1, param(b, "layers", l, "norm1.1", 0, w1), 1e-6);
    vla_value qkv0 = vla_linear(g, a0, param(b, "layers", l, "qkv.0", q + 2 * kv, s->hidden), param(b, "layers", l, "qkv.0.bias", 0, q + 2 * kv));
    vla_value qkv1 = vla_linear(g, a1, param(b, "layers", l, "qkv.1", q + 2 * kv, w1), param(b, "layers", l, "qkv.1.bias", 0, q + 2 * kv));
    vla_split_cols(g, vla_merge_rows(g, qkv0, qkv1, b->map, b->at0, b->at1), 3, (int64_t[]){q, kv, kv}, part);
    int64_t per = s->text + s->units + s->actions;
    vla_attention_options a = {s->heads, s->kv_heads, s->head_dim, 1 / sqrt(s->head_dim), s->batch * per * (per + 1) / 2, VLA_MASK_COLUMNS, 0};
    vla_value o = vla_attention(g, vla_rope(g, part[0], b->rope, s->head_dim), vla_rope(g, part[1], b->rope, s->head_dim), part[2],
                                b->qpos, b->rows, b->cols, VLA_NONE, &a);
    *x0 = vla_add(g, *x0, vla_linear(g, vla_gather_rows(g, o, b->at0, -1), param(b, "layers", l, "o.0", s->hidden, q), VLA_NONE));
    *x1 = vla_add(g, *x1, vla_linear(g, vla_gather_rows(g, o, b->at1, -1), param(b, "layers", l, "o.1", w1, q), VLA_NONE));
    *x0 = mlp(b, "layers", l, "0", *x0, s->hidden, s->inner);
    *x1 = mlp(b, "layers", l, "1", *x1, w1, s->action_inner);
}

/* The forward graph; its loss is named "loss". NULL only when there is no memory for the graph itself; ask
 * vla_graph_check for the rest. */
static vla_graph *build(const sizes *s)
{
    builder b = {.s = s, .n0 = s->batch * (s->text + s->units), .n1 = s->batch * s->actions, .patches = s->batch * s->units * 4};
    if (vla_graph_create(&b.g, NULL) != VLA_OK)
        return NULL;
    vla_graph *g = b.g;
    int64_t n = b.n0 + b.n1;
    b.map = vla_graph_input(g, "map", VLA_I32, 1, &n);
    b.at0 = vla_graph_input(g, "at0", VLA_I32, 1, &b.n0);
    b.at1 = vla_graph_input(g, "at1", VLA_I32, 1, &b.n1);
    b.qpos = vla_graph_input(g, "qpos", VLA_I32, 1, &n);
    b.rows = vla_graph_input(g, "rows", VLA_I32, 2, (int64_t[]){n, 2});
    b.cols = vla_graph_input(g, "cols", VLA_I32, 2, (int64_t[]){n, 4});
    b.vqpos = vla_graph_input(g, "vision.qpos", VLA_I32, 1, &b.patches);
    b.vrows = vla_graph_input(g, "vision.rows", VLA_I32, 2, (int64_t[]){b.patches, 2});
    b.vcols = vla_graph_input(g, "vision.cols", VLA_I32, 2, (int64_t[]){b.patches, 4});
    vla_value positions = vla_graph_input(g, "positions", VLA_I32, 2, (int64_t[]){1, n});
    vla_value places = vla_graph_input(g, "vision.positions", VLA_I32, 2, (int64_t[]){1, b.patches});
    int half = s->head_dim / 2, vhalf = s->vision_hidden / s->vision_heads / 2;
    b.rope = vla_rope_table(g, positions, &(vla_rope_options){1e6, half, 1, 0, {half}, VLA_COMPUTE});
    b.vision_rope = vla_rope_table(g, places, &(vla_rope_options){1e4, vhalf, 1, 0, {vhalf}, VLA_PRECISE});
    vla_value ids = vla_graph_input(g, "ids", VLA_I32, 1, &b.n0);
    int64_t pictures = s->batch * s->units;
    vla_value at_picture = vla_graph_input(g, "at_picture", VLA_I32, 1, &pictures);
    vla_value x0 = vla_gather_rows(g, param(&b, "embed", 0, "weight", s->vocab, s->hidden), ids, -1);
    x0 = vla_put_rows(g, x0, at_picture, vision(&b));
    vla_value noisy = vla_graph_input(g, "noisy", VLA_COMPUTE, 2, (int64_t[]){b.n1, s->channels});
    vla_value x1 = vla_linear(g, noisy, param(&b, "action", 0, "in", s->action_hidden, s->channels), VLA_NONE);
    for (int l = 0; l < s->layers; l++) {
        vlai_graph_layer(g, 100 + l);
        decoder(&b, l, &x0, &x1);
    }
    vlai_graph_layer(g, -1);
    x0 = vla_rms_norm(g, x0, param(&b, "final", 0, "norm.0", 0, s->hidden), 1e-6);
    x1 = vla_rms_norm(g, x1, param(&b, "final", 0, "norm.1", 0, s->action_hidden), 1e-6);
    vla_value v = vla_linear(g, x1, param(&b, "action", 0, "out", s->channels, s->action_hidden), VLA_NONE);
    vla_value target = vla_graph_input(g, "target", VLA_COMPUTE, 2, (int64_t[]){b.n1, s->channels});
    vla_value mask = vla_graph_input(g, "mask", VLA_COMPUTE, 2, (int64_t[]){b.n1, s->channels});
    vla_value loss = vla_masked_mse(g, v, target, mask).loss;
    if (s->head_reads_text) {
        vla_value logits = vla_linear(g, x0, param(&b, "embed", 0, "weight", s->vocab, s->hidden), VLA_NONE);
        vla_value labels = vla_graph_input(g, "labels", VLA_I32, 1, &b.n0);
        loss = vla_add(g, loss, vla_cross_entropy(g, logits, labels).loss);
    }
    vla_graph_name(g, loss, "loss");
    return g;
}

static vla_graph *wallx_like(const sizes *s)
{
    vla_error err;
    vla_graph *g = build(s);
    assert_non_null(g);
    assert_ok(vla_graph_check(g, &err), err);
    return g;
}

/* --- memory --- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* Chains, views, shared operands, named values and unread results over matrices of mixed sizes. */
static vla_graph *random_graph(uint64_t seed, int nodes)
{
    vla_error err;
    vla_graph *g;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value pool[64];
    int64_t shapes[8][2] = {{1, 4}, {3, 8}, {16, 16}, {40, 32}, {64, 64}, {7, 2}, {128, 4}, {1, 1}};
    for (int i = 0; i < 64; i++) {
        char name[16];
        snprintf(name, sizeof name, "x%d", i);
        pool[i] = i % 2 ? vla_graph_input(g, name, VLA_F32, 2, shapes[i % 8]) : vla_graph_param(g, name, VLA_F32, 2, shapes[i % 8]);
    }
    for (int n = 0; n < nodes; n++) {
        int place = (int)(next(&seed) % 64);
        vla_value a = pool[place], b = pool[(place + 8 * (next(&seed) % 8)) % 64], y;
        int64_t rows = vla_value_dim(g, a, 0), cols = vla_value_dim(g, a, 1);
        switch (next(&seed) % 8) {
        case 0: y = vla_add(g, a, b); break;
        case 1: y = vla_scale(g, a, 2); break;
        case 2: y = vla_stop_gradient(g, a); break;
        case 3: y = vla_reshape(g, vla_reshape(g, a, 1, (int64_t[]){rows * cols}), 2, (int64_t[]){rows, cols}); break;
        case 4: y = vla_rms_norm(g, a, VLA_NONE, 1e-6); break;
        case 5: y = vla_matmul(g, a, b, 0, 1, VLA_NONE), y = vla_matmul(g, y, b, 0, 0, VLA_NONE); break;
        case 6: y = vla_mul(g, a, a); break;
        default: y = vla_gelu(g, a); break;
        }
        if (next(&seed) % 40 == 0) {
            char name[24];
            snprintf(name, sizeof name, "named%d", n);
            vla_graph_name(g, y, name);
        }
        pool[place] = y;
    }
    assert_ok(vla_graph_check(g, &err), err);
    return g;
}

static void test_memory_random(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        vla_graph *g = random_graph(seed, seed <= 50 ? (int)(seed * 7) : 1000);
        for (int layout = VLA_MEMORY_FREE_LISTS; layout <= VLA_MEMORY_LIFETIMES; layout++) {
            vla_error err;
            vlai_memory m;
            assert_ok(vlai_pass_memory(g, (vla_memory_layout)layout, &m, &err), err); /* verifies */
            assert_true(m.arena_bytes >= m.peak_bytes);
            if (layout == VLA_MEMORY_LIFETIMES && (double)m.arena_bytes > 1.2 * (double)m.peak_bytes)
                fail_msg("seed %d: arena %zu, lower bound %zu", (int)seed, m.arena_bytes, m.peak_bytes);
            vlai_memory_fini(&m);
        }
        vla_graph_destroy(g);
    }
}

/* The verifier must see a layout that is wrong: two values alive at once on the same bytes, a value out of the arena. */
static void test_memory_verify_sees(void **state)
{
    (void)state;
    vla_error err;
    vla_graph *g;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value x = vla_graph_input(g, "x", VLA_F32, 2, (int64_t[]){4, 16});
    vla_value a = vla_scale(g, x, 2), b = vla_scale(g, x, 3), c = vla_add(g, a, b), d = vla_add(g, c, a);
    vla_graph_name(g, d, "d");
    vlai_memory m;
    assert_ok(vlai_pass_memory(g, VLA_MEMORY_LIFETIMES, &m, &err), err);
    /* x 256 bytes for the whole run, a until d, b until c: d takes over a (or c), c takes over b. */
    assert_int_equal(m.peak_bytes, 3 * 256);
    assert_int_equal(m.arena_bytes, 3 * 256);
    assert_int_equal(m.root[c], b);
    int64_t right = m.offset[b];
    m.offset[b] = m.offset[a];
    assert_fails(vlai_memory_verify(g, &m, &err), VLA_E_INTERNAL, err, "overlap");
    m.offset[b] = (int64_t)m.arena_bytes;
    assert_fails(vlai_memory_verify(g, &m, &err), VLA_E_INTERNAL, err, "arena of");
    m.offset[b] = right;
    assert_ok(vlai_memory_verify(g, &m, &err), err);
    /* The same bytes for an operand that is read again later. */
    m.root[c] = m.root[a];
    m.offset[c] = m.offset[a];
    assert_fails(vlai_memory_verify(g, &m, &err), VLA_E_INTERNAL, err, "overlap");
    vlai_memory_fini(&m);
    vla_graph_destroy(g);
}

/* Free lists are power-of-two classes, last freed first reused. */
static void test_memory_free_lists(void **state)
{
    (void)state;
    vla_error err;
    vla_graph *g;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value x = vla_graph_input(g, "x", VLA_F32, 1, (int64_t[]){100}); /* 400 bytes: class 512 */
    vla_value a = vla_scale(g, x, 2), b = vla_scale(g, a, 3), c = vla_scale(g, b, 4);
    vla_graph_name(g, c, "c");
    vlai_memory m;
    assert_ok(vlai_pass_memory(g, VLA_MEMORY_FREE_LISTS, &m, &err), err);
    assert_int_equal(m.offset[x], 0);
    assert_int_equal(m.offset[a], 512);
    assert_int_equal(m.offset[b], 1024);
    assert_int_equal(m.offset[c], 512);
    assert_int_equal(m.arena_bytes, 1536);
    vlai_memory_fini(&m);
    vla_graph_destroy(g);
}

/* --- the full model --- */

static vla_graph *with_backward(const sizes *s)
{
    vla_error err;
    vla_graph *g = wallx_like(s);
    assert_ok(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, &err), err);
    /* As in training: parameter gradients lie in the store. */
    for (size_t v = 0; v < g->n_gradient; v++)
        if (g->values[v].kind == VLAI_PARAM && g->gradient[v] != VLA_NONE)
            g->values[g->gradient[v]].kind = VLAI_STATE;
    return g;
}

static void test_full_size(void **state)
{
    (void)state;
    static const struct { vla_recompute mode; double most; } cases[] = {
        {VLA_RECOMPUTE_NONE, 47e9}, {VLA_RECOMPUTE_CHEAP, 33e9}, {VLA_RECOMPUTE_LAYER, 8e9}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int layout = VLA_MEMORY_FREE_LISTS; layout <= VLA_MEMORY_LIFETIMES; layout++) {
            vla_error err;
            vla_graph *g = with_backward(&FULL);
            double start = seconds();
            assert_ok(vlai_pass_dead(g, NULL, &err), err);
            assert_ok(vlai_pass_precision(g, VLA_BF16_MASTER, &err), err);
            assert_ok(vlai_pass_recompute(g, cases[c].mode, 0, &err), err);
            vlai_memory m;
            assert_ok(vlai_pass_memory(g, (vla_memory_layout)layout, &m, &err), err);
            double took = seconds() - start, gb = (double)m.arena_bytes * 1e-9;
            print_message("recompute %d layout %d: %.2f GB, lower bound %.2f GB, %zu nodes, %.2f s\n", (int)cases[c].mode, layout, gb,
                          (double)m.peak_bytes * 1e-9, g->n_nodes, took);
            if (layout == VLA_MEMORY_LIFETIMES) {
                assert_true((double)m.arena_bytes <= cases[c].most);
                assert_true((double)m.arena_bytes <= 1.03 * (double)m.peak_bytes);
            }
            vlai_memory_fini(&m);
            vla_graph_destroy(g);
        }
}

/* --- numbers --- */

static float uniform(uint64_t *seed)
{
    return (float)next(seed) / 2147483648.0f - 0.5f;
}

static void put_floats(vla_run *run, const char *name, uint64_t seed, bool ones)
{
    vla_tensor t = vla_run_tensor(run, name);
    for (int64_t i = 0; t.data && i < t.elements; i++) {
        float x = ones ? 1 : uniform(&seed);
        if (t.dtype == VLA_BF16)
            ((uint16_t *)t.data)[i] = vlai_bf16_from_float(x);
        else if (t.dtype == VLA_F64)
            ((double *)t.data)[i] = x;
        else
            ((float *)t.data)[i] = x;
    }
}

/* Element i of an integer input, by the layout of the model's streams. */
static int32_t *ints(vla_run *run, const char *name)
{
    static int32_t nowhere[4096];
    int32_t *data = vla_run_data(run, name);
    return data ? data : nowhere;
}

static void fill_inputs(const sizes *s, vla_run *run)
{
    int64_t own = s->text + s->units, per = own + s->actions;
    uint64_t seed = 3;
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t j = 0; j < per; j++) {
            int64_t i = b * per + j;
            ints(run, "positions")[i] = (int32_t)j;
            ints(run, "qpos")[i] = (int32_t)i;
            ints(run, "map")[i] = (int32_t)(j < own ? b * own + j : -1 - (b * s->actions + j - own));
            if (j < own)
                ints(run, "at0")[b * own + j] = (int32_t)i;
            else
                ints(run, "at1")[b * s->actions + j - own] = (int32_t)i;
            ints(run, "rows")[2 * i] = (int32_t)(b * per);
            ints(run, "rows")[2 * i + 1] = (int32_t)((b + 1) * per);
            memcpy(&ints(run, "cols")[4 * i], (int32_t[]){(int32_t)i, (int32_t)((b + 1) * per), 0, 0}, 16);
        }
    for (int64_t i = 0; i < s->batch * own; i++) {
        ints(run, "ids")[i] = (int32_t)(next(&seed) % (uint32_t)s->vocab);
        ints(run, "labels")[i] = i % 3 ? -1 : (int32_t)(next(&seed) % (uint32_t)s->vocab);
    }
    for (int64_t i = 0; i < s->batch * s->units; i++)
        ints(run, "at_picture")[i] = (int32_t)(i / s->units * own + 2 + i % s->units);
    uint8_t *pixels = vla_run_data(run, "pixels");
    for (int64_t p = 0; p < s->batch * s->units * 4; p++) {
        memcpy(&ints(run, "patches")[3 * p], (int32_t[]){(int32_t)(p * 588), 42, 0}, 12);
        ints(run, "vision.positions")[p] = (int32_t)(p % 7);
        ints(run, "vision.qpos")[p] = (int32_t)p;
        memcpy(&ints(run, "vision.rows")[2 * p], (int32_t[]){(int32_t)(p / 4 * 4), (int32_t)(p / 4 * 4 + 4)}, 8);
        memcpy(&ints(run, "vision.cols")[4 * p], (int32_t[]){(int32_t)(p / 4 * 4), (int32_t)(p / 4 * 4 + 4), 0, 0}, 16);
        for (int i = 0; pixels && i < 588; i++)
            pixels[p * 588 + i] = (uint8_t)next(&seed);
    }
    put_floats(run, "noisy", 11, false);
    put_floats(run, "target", 12, false);
    put_floats(run, "mask", 13, true);
}

/* What a training pass gives: the loss and all gradients, in the order of the parameters of the graph that was built. */
typedef struct outcome {
    double loss;
    double *gradient;
    size_t n;
    size_t nodes;
    double flops;
} outcome;

static outcome compute(const sizes *s, bool narrow, vla_plan_options options)
{
    vla_error err;
    outcome result = {0};
    vla_graph *g = wallx_like(s);
    if (narrow)
        assert_ok(vlai_pass_narrow(g, NULL, &err), err);
    assert_ok(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, &err), err);
    vla_store *store;
    assert_ok(vla_store_create(&store, &err), err);
    for (size_t v = 0; v < g->n_values; v++)
        if (g->values[v].kind == VLAI_PARAM)
            assert_ok(vla_store_add(store, g->values[v].name, VLA_COMPUTE, g->values[v].rank, g->values[v].shape, 0, &err), err);
    assert_ok(vla_store_allocate(store, options.numerics, VLA_STORE_TRAIN, &err), err);
    uint64_t seed = 77;
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        for (int64_t k = 0; k < t.elements; k++) {
            float x = t.rank == 1 && !strstr(t.name, "bias") ? 1 + 0.2f * uniform(&seed) : 0.4f * uniform(&seed);
            vla_store_set_float(store, i, k, 1, &x);
        }
    }
    vla_gradient_status *status = calloc(vla_store_count(store), sizeof *status);
    assert_ok(vla_graph_store_gradients(g, store, 0, status, &err), err);
    vla_plan *plan;
    assert_ok(vla_plan_build(g, &options, &plan, &err), err);
    vla_executor *executor;
    assert_ok(vla_executor_create(2, &executor, &err), err);
    vla_run *run;
    assert_ok(vla_run_create(executor, plan, store, &run, &err), err);
    for (int again = 0; again < 2; again++) { /* twice: the second run finds the arena dirty */
        fill_inputs(s, run);
        assert_ok(vla_run_execute(run, &err), err);
    }
    vla_tensor loss = vla_run_tensor(run, "loss");
    result.loss = loss.dtype == VLA_F64 ? *(double *)loss.data : *(float *)loss.data;
    result.nodes = vla_plan_nodes(plan);
    result.flops = vla_plan_flops(plan);
    for (size_t i = 0; i < vla_store_count(store); i++)
        result.n += (size_t)vla_store_tensor(store, VLA_STORE_GRADIENT, i).elements;
    result.gradient = malloc(result.n * sizeof(double));
    for (size_t i = 0, at = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_GRADIENT, i);
        for (int64_t k = 0; k < t.elements; k++)
            result.gradient[at++] = t.dtype == VLA_F64    ? ((double *)t.data)[k]
                                    : t.dtype == VLA_BF16 ? vlai_bf16_to_float(((uint16_t *)t.data)[k])
                                                          : ((float *)t.data)[k];
    }
    free(status);
    vla_run_destroy(run);
    vla_executor_destroy(executor);
    vla_plan_destroy(plan);
    vla_store_destroy(store);
    return result;
}

/* Recompute and layout move work and bytes about; they change no bit of what is computed. */
static void test_recompute_keeps_bits(void **state)
{
    (void)state;
    static const vla_numerics numerics[] = {VLA_FP32, VLA_BF16_MASTER, VLA_FP64};
    sizes s = SMALL;
    s.head_reads_text = true;
    for (size_t i = 0; i < 3; i++) {
        vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
        o.numerics = numerics[i];
        o.layout = VLA_MEMORY_FREE_LISTS;
        outcome plain = compute(&s, false, o);
        assert_true(isfinite(plain.loss) && plain.loss > 0);
        size_t live = 0;
        for (size_t k = 0; k < plain.n; k++)
            live += plain.gradient[k] != 0;
        assert_true(live > plain.n / 2);
        o.layout = VLA_MEMORY_LIFETIMES;
        for (int mode = VLA_RECOMPUTE_NONE; mode <= VLA_RECOMPUTE_LAYER; mode++) {
            o.recompute = (vla_recompute)mode;
            outcome other = compute(&s, false, o);
            assert_true(other.nodes > plain.nodes || mode == VLA_RECOMPUTE_NONE);
            assert_int_equal(other.n, plain.n);
            assert_memory_equal(&other.loss, &plain.loss, sizeof plain.loss);
            assert_memory_equal(other.gradient, plain.gradient, plain.n * sizeof(double));
            free(other.gradient);
        }
        /* With room to spare less is made again, and nothing when there is room for all. */
        static const size_t rooms[] = {0, 1 << 12, 1 << 15, SIZE_MAX / 2};
        size_t least = plain.nodes;
        for (int mode = VLA_RECOMPUTE_CHEAP; mode <= VLA_RECOMPUTE_LAYER; mode++) {
            size_t before = SIZE_MAX, cheap = 0;
            o.recompute = (vla_recompute)mode;
            for (size_t k = 0; k < sizeof rooms / sizeof *rooms; k++) {
                o.keep = rooms[k];
                outcome other = compute(&s, false, o);
                assert_true(other.nodes <= before);
                assert_true((other.nodes == least) == (rooms[k] == SIZE_MAX / 2));
                assert_memory_equal(other.gradient, plain.gradient, plain.n * sizeof(double));
                before = other.nodes;
                cheap = k ? cheap : other.nodes;
                free(other.gradient);
            }
            least = cheap; /* of layers, none but cheap's values are made again then */
        }
        free(plain.gradient);
    }
}

/* Flow loss alone: in the last layer the queries of stream 0, its output, its MLP and its norm are unread. */
static void test_narrow(void **state)
{
    (void)state;
    static const struct { vla_numerics numerics; double bound; } cases[] = {{VLA_FP32, 2e-6}, {VLA_FP64, 1e-14}, {VLA_BF16_MASTER, 2e-2}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
        o.numerics = cases[c].numerics;
        outcome whole = compute(&SMALL, false, o), narrow = compute(&SMALL, true, o);
        double difference = 0, norm = 0;
        for (size_t i = 0; i < whole.n; i++) {
            difference += (whole.gradient[i] - narrow.gradient[i]) * (whole.gradient[i] - narrow.gradient[i]);
            norm += whole.gradient[i] * whole.gradient[i];
        }
        print_message("narrow: loss %.9g and %.9g, gradients differ by %.3g, %.6g -> %.6g MFLOP\n", whole.loss, narrow.loss,
                      sqrt(difference / norm), whole.flops * 1e-6, narrow.flops * 1e-6);
        assert_true(fabs(whole.loss - narrow.loss) <= cases[c].bound * whole.loss);
        assert_true(difference <= cases[c].bound * cases[c].bound * norm);
        /* Saved, three times each for forward and backward: the columns of q for stream 0, and its queries' pairs (by
         * share of rows). Output and MLP of stream 0 are dead in both. */
        const sizes *s = &SMALL;
        double n0 = (double)(s->batch * (s->text + s->units)), per = (double)(s->text + s->units + s->actions), q = s->heads * s->head_dim;
        double pairs = (double)s->batch * per * (per + 1) / 2 * (1 - (double)s->actions / per);
        double saved = 3 * (2 * n0 * (double)s->hidden * q + 4 * q * pairs);
        assert_true(fabs(whole.flops - narrow.flops - saved) < 1);
        free(whole.gradient);
        free(narrow.gradient);
    }
}

/* With a loss on stream 0 everything is read, and nothing may change. */
static void test_narrow_leaves_what_is_read(void **state)
{
    (void)state;
    vla_error err;
    sizes s = SMALL;
    s.head_reads_text = true;
    vla_graph *g = wallx_like(&s);
    size_t rewritten = 99, nodes = g->n_nodes;
    assert_ok(vlai_pass_narrow(g, &rewritten, &err), err);
    assert_int_equal(rewritten, 0);
    assert_int_equal(g->n_nodes, nodes);
    assert_ok(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, &err), err);
    assert_fails(vlai_pass_narrow(g, NULL, &err), VLA_E_INVALID, err, "before the backward");
    vla_graph_destroy(g);
    /* In the narrowed graph the last layer's weights of stream 0, but for keys and values, are out of use. */
    g = wallx_like(&SMALL);
    assert_ok(vlai_pass_narrow(g, &rewritten, &err), err);
    assert_int_equal(rewritten, 2);
    assert_ok(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, &err), err);
    static const char *const dead[] = {"layers.2.o.0", "layers.2.0.norm2", "layers.2.0.gate_up", "layers.2.0.down", "final.0.norm.0"};
    for (size_t i = 0; i < sizeof dead / sizeof *dead; i++)
        assert_int_equal(vla_graph_gradient(g, vla_graph_find(g, dead[i])), VLA_NONE);
    static const char *const used[] = {"layers.2.qkv.0", "layers.2.qkv.0.bias", "layers.2.o.1", "layers.1.o.0", "layers.2.norm1.0"};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        assert_int_not_equal(vla_graph_gradient(g, vla_graph_find(g, used[i])), VLA_NONE);
    vla_graph_destroy(g);
}

/* --- no memory --- */

typedef struct counter {
    long left;  /* allocations until one fails; negative: none does */
    long alive; /* blocks not released */
} counter;

static void *counted_alloc(size_t size, size_t align, void *user)
{
    counter *c = user;
    if (c->left == 0)
        return NULL;
    c->left--;
    c->alive++;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void counted_release(void *block, void *user)
{
    if (block)
        ((counter *)user)->alive--;
    free(block);
}

static vla_status all_passes(vla_recompute mode, vla_plan **plan, vla_error *err)
{
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.recompute = mode;
    *plan = NULL;
    vla_graph *g = build(&SMALL);
    if (!g)
        return VLA_E_NOMEM;
    vla_status status = vla_graph_check(g, err);
    if (status == VLA_OK)
        status = vlai_pass_narrow(g, NULL, err);
    if (status == VLA_OK)
        status = vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, err);
    if (status == VLA_OK)
        return vla_plan_build(g, &o, plan, err);
    vla_graph_destroy(g);
    return status;
}

/* Every allocation of the way from nothing to a plan fails once: an error each time, and nothing is left behind. */
static void test_no_memory(void **state)
{
    (void)state;
    static const vla_recompute modes[] = {VLA_RECOMPUTE_CHEAP, VLA_RECOMPUTE_LAYER};
    for (size_t m = 0; m < 2; m++) {
        long tried = 0;
        for (vla_status status = VLA_E_NOMEM; status != VLA_OK; tried++) {
            counter c = {tried, 0};
            vla_error err = VLA_ERROR_INIT;
            vla_plan *plan;
            vla_allocator_set(&(vla_allocator){counted_alloc, counted_release, &c});
            status = all_passes(modes[m], &plan, &err);
            vla_plan_destroy(plan);
            vla_allocator_set(NULL);
            if (status != VLA_OK && status != VLA_E_NOMEM)
                fail_msg("allocation %ld: %s: %s", tried, vla_status_name(status), err.message);
            if (c.alive)
                fail_msg("allocation %ld: %ld blocks are left", tried, c.alive);
        }
        assert_true(tried > 50);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_random),
        cmocka_unit_test(test_memory_verify_sees),
        cmocka_unit_test(test_memory_free_lists),
        cmocka_unit_test(test_full_size),
        cmocka_unit_test(test_recompute_keeps_bits),
        cmocka_unit_test(test_narrow),
        cmocka_unit_test(test_narrow_leaves_what_is_read),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
