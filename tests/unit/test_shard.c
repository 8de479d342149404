/* A store sharded over ranks: buckets and slices cover everything once, state is kept where it belongs, and N ranks that
 * are stepped one after the other by their own plans get the bits of one rank that accumulates their micro-batches. */
#include "test.h"

#include "base/bf16.h"
#include "exec/executor.h"
#include "exec/shard.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 6, WIDTH = 20, INNER = 37, PADDED = 64, WORLDS = 5, MODES = 5 };

static const int worlds[WORLDS] = {1, 2, 3, 4, 8};
static const vla_numerics modes[MODES] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR, VLA_BF16_PLAIN, VLA_FP64};

/* Tensors of less than 128 elements and of many, padded ones, precise ones between, an empty one, one that no loss reaches and
 * one whose gradient is exactly zero. */
static const struct {
    const char *name;
    vla_dtype dtype;
    int rank;
    int64_t shape[2], run, pitch;
} params[] = {
    {"embed", VLA_COMPUTE, 2, {11, WIDTH}, 0, 0},
    {"norm.0", VLA_PRECISE, 1, {WIDTH, 0}, 0, 0},
    {"up.0", VLA_COMPUTE, 2, {2 * INNER, WIDTH}, INNER * WIDTH, PADDED * WIDTH},
    {"up.0.bias", VLA_COMPUTE, 1, {2 * INNER, 0}, INNER, PADDED},
    {"down.0", VLA_COMPUTE, 2, {WIDTH, INNER}, INNER, PADDED},
    {"empty", VLA_COMPUTE, 1, {0, 0}, 0, 0},
    {"unused", VLA_COMPUTE, 1, {150, 0}, 0, 0},
    {"norm.1", VLA_PRECISE, 1, {WIDTH, 0}, 0, 0},
    {"up.1", VLA_COMPUTE, 2, {2 * PADDED, WIDTH}, 0, 0},
    {"down.1", VLA_COMPUTE, 2, {WIDTH, PADDED}, 0, 0},
    {"touched", VLA_COMPUTE, 1, {77, 0}, 0, 0},
    {"head", VLA_PRECISE, 2, {3, WIDTH}, 0, 0},
    {"head.bias", VLA_PRECISE, 1, {3, 0}, 0, 0},
};
enum { COUNT = sizeof params / sizeof *params };

static vla_store *make_store(int rank, int world, int zero, size_t bucket_bytes)
{
    vla_store *s;
    vla_error err;
    assert_ok(vla_store_create(&s, &err), err);
    for (int i = 0; i < COUNT; i++) {
        assert_ok(vla_store_add(s, params[i].name, params[i].dtype, params[i].rank, params[i].shape, i % 2, &err), err);
        if (params[i].run)
            assert_ok(vla_store_pad(s, params[i].name, params[i].run, params[i].pitch, &err), err);
    }
    vla_shard_options o = {sizeof o, rank, world, bucket_bytes, zero};
    assert_ok(vla_store_shard(s, &o, &err), err);
    return s;
}

static float weight(size_t i, int64_t k)
{
    return (float)(((k + 1) * 7919 + (int64_t)i * 104729) % 2003 - 1001) * 0x1.23456p-11f;
}

static void set_weights(vla_store *s)
{
    for (size_t i = 0; i < COUNT; i++) {
        int64_t n = vla_store_tensor(s, VLA_STORE_WEIGHT, i).elements, cut = n / 3;
        float *x = malloc((size_t)n * sizeof *x + 1);
        assert_non_null(x);
        for (int64_t k = 0; k < n; k++)
            x[k] = weight(i, k);
        vla_store_set_float(s, i, 0, cut, x);
        vla_store_set_float(s, i, cut, n - cut, x + cut);
        free(x);
    }
}

/* ---- layout ---- */

static void check_buckets(const vla_store *s, size_t bucket_bytes)
{
    size_t seen[COUNT] = {0}, size[2] = {vla_dtype_size(s->params[0].dtype[VLA_STORE_WEIGHT]), vla_dtype_size(s->params[1].dtype[VLA_STORE_WEIGHT])};
    int64_t end[2] = {0, 0}, shards[2] = {0, 0};
    for (size_t b = 0; b < s->n_buckets; b++) {
        const vlai_store_bucket *k = &s->buckets[b];
        int c = k->symbolic == VLA_PRECISE;
        int64_t reached = k->first;
        assert_true(k->count > 0 && k->length > 0 && k->length % (128 * s->world) == 0);
        assert_int_equal(k->first, end[c]);
        assert_int_equal(k->shard, shards[c]);
        end[c] += k->length;
        shards[c] += k->length / s->world;
        for (size_t m = 0; m < k->count; m++) {
            const vlai_param *p = &s->params[k->members[m]];
            assert_int_equal(p->bucket, b);
            assert_true(p->symbolic == k->symbolic && p->position % 128 == 0 && p->position >= reached);
            reached = p->position + p->stored;
            seen[k->members[m]]++;
        }
        assert_true(reached <= k->first + k->length);
        assert_true(k->count == 1 || (size_t)(reached - k->first) * size[c] <= bucket_bytes);
        assert_int_equal(vlai_store_bucket_offset(s, VLA_STORE_WEIGHT, k) % 256, 0);
    }
    for (size_t i = 0; i < COUNT; i++)
        assert_int_equal(seen[i], s->params[i].elements > 0);
}

/* Every stored element and every element of the checkpoint belongs to one rank; slices of a kind do not meet in memory. */
static void check_slices(vla_store *const *ranks, int world, int zero)
{
    for (size_t i = 0; i < COUNT; i++) {
        int64_t stored = 0, elements = 0;
        for (int r = 0; r < world; r++) {
            const vlai_param *p = &ranks[r]->params[i];
            int64_t first, count;
            vla_store_slice(ranks[r], VLA_STORE_M, i, &first, &count);
            if (world == 1 || !zero) {
                assert_true(p->first == 0 && p->count == p->stored && first == 0 && count == p->elements);
                continue;
            }
            if (p->count)
                assert_int_equal(p->first, stored);
            if (count)
                assert_int_equal(first, elements);
            assert_true(p->first % 128 == 0);
            stored += p->count;
            elements += count;
            vla_store_slice(ranks[r], VLA_STORE_WEIGHT, i, &first, &count);
            assert_true(first == 0 && count == p->elements);
        }
        assert_true(world == 1 || !zero || (stored == ranks[0]->params[i].stored && elements == ranks[0]->params[i].elements));
    }
    for (int r = 0; r < world; r++)
        for (int k = 0; k < VLA_STORE_KINDS; k++)
            for (size_t i = 0; i < COUNT; i++)
                for (size_t j = 0; j < COUNT; j++) {
                    const vlai_param *p = &ranks[r]->params[i], *q = &ranks[r]->params[j];
                    size_t n = (size_t)vlai_param_kept(p, k) * vla_dtype_size(p->dtype[k]), m = (size_t)vlai_param_kept(q, k) * vla_dtype_size(q->dtype[k]);
                    assert_true(n == 0 || p->offset[k] + n <= ranks[r]->bytes[k]);
                    assert_true(n == 0 || p->offset[k] % 256 == 0);
                    assert_true(i == j || n == 0 || m == 0 || p->offset[k] + n <= q->offset[k] || q->offset[k] + m <= p->offset[k]);
                }
}

static void test_layout(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 6000, 1 << 30};
    static const vla_store_use uses[] = {VLA_STORE_TRAIN, VLA_STORE_ACCUMULATE, VLA_STORE_STEP};
    for (int w = 0; w < WORLDS; w++)
        for (int zero = 0; zero < 2; zero++)
            for (int m = 0; m < MODES; m++)
                for (int b = 0; b < 3; b++) {
                    vla_store *ranks[8];
                    vla_error err;
                    for (int r = 0; r < worlds[w]; r++) {
                        ranks[r] = make_store(r, worlds[w], zero, sizes[b]);
                        size_t before[VLA_STORE_KINDS];
                        for (int k = 0; k < VLA_STORE_KINDS; k++)
                            before[k] = vla_store_bytes(ranks[r], k, modes[m], uses[(m + b) % 3]);
                        assert_ok(vla_store_allocate(ranks[r], modes[m], uses[(m + b) % 3], &err), err);
                        for (int k = 0; k < VLA_STORE_KINDS; k++)
                            assert_int_equal(ranks[r]->bytes[k], before[k]);
                        if (worlds[w] > 1)
                            check_buckets(ranks[r], sizes[b]);
                        assert_int_equal(ranks[r]->bytes[VLA_STORE_M], ranks[0]->bytes[VLA_STORE_M]);
                    }
                    check_slices(ranks, worlds[w], zero);
                    if (zero && worlds[w] > 1 && modes[m] == VLA_FP32) /* moments as the weights, but a part of each bucket */
                        assert_int_equal(ranks[0]->bytes[VLA_STORE_M] * (size_t)worlds[w], ranks[0]->bytes[VLA_STORE_WEIGHT]);
                    for (int r = 0; r < worlds[w]; r++)
                        vla_store_destroy(ranks[r]);
                }
}

/* Values go to and come from the slices alone, and the weights of all ranks are those of a whole store. */
static void test_values(void **state)
{
    (void)state;
    vla_error err;
    for (int m = 0; m < MODES; m++)
        for (int world = 2; world <= 3; world++)
            for (int r = 0; r < world; r++) {
                vla_store *whole = make_store(0, 1, 1, 1), *s = make_store(r, world, 1, 6000);
                assert_ok(vla_store_allocate(whole, modes[m], VLA_STORE_STEP, &err), err);
                assert_ok(vla_store_allocate(s, modes[m], VLA_STORE_STEP, &err), err);
                set_weights(whole);
                set_weights(s);
                for (size_t i = 0; i < COUNT; i++) {
                    vla_tensor t = vla_store_tensor(s, VLA_STORE_WEIGHT, i), all = vla_store_tensor(whole, VLA_STORE_WEIGHT, i);
                    int64_t first, count, n = t.elements;
                    size_t size = vla_dtype_size(t.dtype), moment = vla_dtype_size(s->params[i].dtype[VLA_STORE_M]);
                    assert_memory_equal(t.data, all.data, (size_t)s->params[i].stored * size);
                    vla_store_slice(s, VLA_STORE_V, i, &first, &count);
                    assert_true(count == n || !vla_store_tensor(s, VLA_STORE_V, i).data);
                    char *in = malloc((size_t)n * 8 + 8), *out = calloc((size_t)n + 1, 8);
                    assert_true(in && out);
                    for (size_t k = 0; k < (size_t)n * moment; k++)
                        in[k] = (char)(k * 31 + i);
                    assert_ok(vla_store_write(s, VLA_STORE_V, i, first, count, in + (size_t)first * moment, &err), err);
                    assert_ok(vla_store_read(s, VLA_STORE_V, i, first, count, out, &err), err);
                    assert_memory_equal(out, in + (size_t)first * moment, (size_t)count * moment);
                    if (first > 0)
                        assert_fails(vla_store_read(s, VLA_STORE_V, i, first - 1, 1, out, &err), VLA_E_INVALID, err, "keeps");
                    if (first + count < n)
                        assert_fails(vla_store_write(s, VLA_STORE_V, i, first + count, 1, in, &err), VLA_E_INVALID, err, "keeps");
                    float *x = malloc((size_t)n * sizeof *x + 4), *y = malloc((size_t)n * sizeof *y + 4);
                    assert_true(x && y);
                    vla_store_get_float(s, i, 0, n, x);
                    vla_store_get_float(whole, i, 0, n, y);
                    for (int64_t k = 0; k < n; k++) {
                        bool own = k >= first && k < first + count;
                        assert_true(own || modes[m] != VLA_BF16_MASTER ? x[k] == y[k] : fabsf(x[k] - y[k]) <= 0x1p-8f * fabsf(y[k]));
                    }
                    free(in), free(out), free(x), free(y);
                }
                vla_store_destroy(whole);
                vla_store_destroy(s);
            }
}

static void test_refusals(void **state)
{
    (void)state;
    vla_error err;
    vla_store *s = make_store(0, 1, 1, 0);
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 2, 2, 1, 1}, &err), VLA_E_INVALID, err, "rank 2 of 2");
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 0, 0, 1, 1}, &err), VLA_E_INVALID, err, "of 0");
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 1, 2, 0, 1}, &err), VLA_E_INVALID, err, "0 bytes");
    assert_ok(vla_store_allocate(s, VLA_FP32, VLA_STORE_TRAIN, &err), err);
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 1, 2, 1, 1}, &err), VLA_E_INVALID, err, "already allocated");
    vla_store_destroy(s);
}

/* ---- plans ---- */

static vla_value block(vla_graph *g, vla_value x, int layer, int64_t inner, bool bias)
{
    char name[4][24];
    static const char *const form[] = {"norm.%d", "up.%d", "up.%d.bias", "down.%d"};
    for (int i = 0; i < 4; i++)
        snprintf(name[i], sizeof name[i], form[i], layer);
    vlai_graph_layer(g, layer);
    vla_value h = vla_rms_norm(g, x, vla_graph_param(g, name[0], VLA_PRECISE, 1, (int64_t[]){WIDTH}), 1e-6);
    h = vla_linear(g, h, vla_graph_param(g, name[1], VLA_COMPUTE, 2, (int64_t[]){2 * inner, WIDTH}),
                   bias ? vla_graph_param(g, name[2], VLA_COMPUTE, 1, (int64_t[]){2 * inner}) : VLA_NONE);
    x = vla_add(g, x, vla_linear(g, vla_swiglu(g, h), vla_graph_param(g, name[3], VLA_COMPUTE, 2, (int64_t[]){WIDTH, inner}), VLA_NONE));
    vlai_graph_layer(g, -1);
    return x;
}

/* Two blocks between an embedding that is read twice and a head in fp32. */
static vla_graph *make_graph(double scale)
{
    vla_graph *g;
    vla_error err;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value index = vla_graph_input(g, "index", VLA_I32, 1, (int64_t[]){ROWS}), other = vla_graph_input(g, "other", VLA_I32, 1, (int64_t[]){ROWS});
    vla_value target = vla_graph_input(g, "target", VLA_PRECISE, 2, (int64_t[]){ROWS, 3}), mask = vla_fill(g, VLA_PRECISE, 2, (int64_t[]){ROWS, 3}, 1);
    vla_value embed = vla_graph_param(g, "embed", VLA_COMPUTE, 2, (int64_t[]){11, WIDTH});
    vlai_graph_touch(g, vla_graph_param(g, "touched", VLA_COMPUTE, 1, (int64_t[]){77}));
    vla_value x = vla_add(g, vla_gather_rows(g, embed, index, -1), vla_gather_rows(g, embed, other, -1));
    x = block(g, block(g, x, 0, PADDED, true), 1, PADDED, false);
    x = vla_linear(g, vla_cast(g, x, VLA_PRECISE), vla_graph_param(g, "head", VLA_PRECISE, 2, (int64_t[]){3, WIDTH}),
                   vla_graph_param(g, "head.bias", VLA_PRECISE, 1, (int64_t[]){3}));
    vla_value loss = vla_masked_mse(g, x, target, mask).loss;
    vla_graph_name(g, loss, "loss");
    assert_ok(vla_graph_backward(g, loss, scale, &err), err);
    return g;
}

static vla_adamw_options adamw = {sizeof(vla_adamw_options), 0.9, 0.95, 1e-8, 0.1, 0, 2};

typedef struct setting {
    vla_numerics numerics;
    int world, zero, overlap, whole; /* whole: one plan a step */
    size_t bucket_bytes;
    vla_dtype gradients;
    vla_recompute recompute;
    unsigned fuse;
    vla_memory_layout layout;
} setting;

typedef struct rank {
    vla_store *store;
    vla_executor *ex;
    vla_plan *plan[3]; /* batch, update, gather */
    vla_run *run[3];
    size_t at;
} rank;

/* Collectives are done by this test between nodes, so that runs need no communicator. */
static void bind(rank *r, int which)
{
    vla_error err;
    vla_graph *g = r->plan[which]->graph;
    for (size_t n = 0; n < g->n_nodes; n++)
        if (vlai_op_is_collective(g->nodes[n].op)) {
            assert_int_equal(g->nodes[n].attrs.comm.world, r->store->world);
            assert_int_equal(g->nodes[n].attrs.comm.rank, r->store->rank);
            g->nodes[n].attrs.comm.world = 1;
            g->nodes[n].attrs.comm.rank = 0;
        }
    assert_ok(vla_run_create(r->ex, r->plan[which], r->store, &r->run[which], &err), err);
}

static rank open_rank(const setting *s, int number)
{
    rank r = {.store = make_store(number, s->world, s->zero, s->bucket_bytes)};
    vla_error err;
    vla_graph *update, *g = make_graph(1.0 / s->world);
    vla_gradient_status status[COUNT] = {VLA_GRADIENT_NONE};
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.numerics = s->numerics;
    o.store = r.store;
    o.overlap = s->overlap;
    o.gradient_dtype = s->gradients;
    o.recompute = s->recompute;
    o.fuse = s->fuse;
    o.layout = s->layout;
    assert_ok(vla_store_allocate(r.store, s->numerics, s->whole ? VLA_STORE_STEP : VLA_STORE_TRAIN, &err), err);
    set_weights(r.store);
    assert_ok(vla_executor_create(1, &r.ex, &err), err);
    if (s->whole)
        assert_ok(vla_graph_step(g, r.store, status, &adamw, &err), err);
    else
        assert_ok(vla_graph_store_gradients(g, r.store, 0, status, &err), err);
    assert_int_equal(status[vla_store_find(r.store, "unused")], VLA_GRADIENT_NONE);
    assert_int_equal(status[vla_store_find(r.store, "touched")], VLA_GRADIENT_SOME);
    assert_ok(vla_plan_build(g, &o, &r.plan[0], &err), err);
    if (!s->whole) {
        assert_ok(vla_graph_adamw(r.store, status, &adamw, &update, &err), err);
        assert_ok(vla_plan_build(update, &o, &r.plan[1], &err), err);
    }
    assert_ok(vlai_graph_gather(r.store, &r.plan[!s->whole]->order, &update, &err), err);
    assert_ok(vla_plan_build(update, &o, &r.plan[2], &err), err);
    for (int k = 0; k < 3; k++)
        if (r.plan[k])
            assert_ok(vla_executor_reserve(r.ex, r.plan[k], &err), err);
    memset(r.ex->arena, 0xFF, r.ex->arena_bytes); /* what nobody has made is no number */
    for (int k = 0; k < 3; k++)
        if (r.plan[k])
            bind(&r, k);
    return r;
}

static void close_rank(rank *r)
{
    for (int k = 0; k < 3; k++) {
        vla_run_destroy(r->run[k]);
        vla_plan_destroy(r->plan[k]);
    }
    vla_executor_destroy(r->ex);
    vla_store_destroy(r->store);
}

static void fill(vla_run *run, int64_t micro)
{
    int32_t *index = vla_run_data(run, "index"), *other = vla_run_data(run, "other");
    float *target = vla_run_data(run, "target");
    bool wide = vla_run_tensor(run, "target").dtype == VLA_F64;
    for (int64_t i = 0; i < ROWS; i++) {
        index[i] = (int32_t)((i * 7 + micro * 3) % 11);
        other[i] = (int32_t)((i * 5 + micro) % 11);
    }
    for (int64_t i = 0; i < ROWS * 3; i++)
        if (wide)
            ((double *)(void *)target)[i] = (double)weight(5, i + micro * 17);
        else
            target[i] = weight(5, i + micro * 17);
}

static void set_update(vla_run *run, int step, float guard)
{
    double *hyper = vla_run_data(run, "hyper");
    vla_hyper_fill(&adamw, 7, step, hyper);
    hyper[VLA_HYPER_RATES] = 0.01;
    hyper[VLA_HYPER_RATES + 1] = 0.003;
    if (vla_run_data(run, "guard"))
        *(float *)vla_run_data(run, "guard") = guard;
}

static double element(vla_dtype dtype, const void *data, int64_t i)
{
    return dtype == VLA_F64 ? ((const double *)data)[i] : dtype == VLA_F32 ? (double)((const float *)data)[i]
                                                                          : (double)vlai_bf16_to_float(((const uint16_t *)data)[i]);
}

/* Sums in the order of ranks, in fp32 unless the type is fp64, rounded once. */
static void put_sum(vla_dtype dtype, void *to, int64_t i, void *const *from, int64_t j, int n)
{
    double wide = 0;
    float sum = 0;
    for (int r = 0; r < n; r++) {
        wide += element(dtype, from[r], j);
        sum = r ? sum + (float)element(dtype, from[r], j) : (float)element(dtype, from[r], j);
    }
    if (dtype == VLA_F64)
        ((double *)to)[i] = wide;
    else if (dtype == VLA_F32)
        ((float *)to)[i] = sum;
    else
        ((uint16_t *)to)[i] = vlai_bf16_from_float(sum);
}

static void collective(rank *ranks, int n, int which)
{
    void *in[8];
    const vlai_node *node = &ranks[0].plan[which]->graph->nodes[ranks[0].at];
    const vlai_value_info *v = vlai_value(ranks[0].plan[which]->graph, node->inputs[0]);
    for (int r = 0; r < n; r++) {
        const vlai_node *own = &ranks[r].plan[which]->graph->nodes[ranks[r].at];
        const vlai_value_info *x = vlai_value(ranks[r].plan[which]->graph, own->inputs[0]);
        assert_true(own->op == node->op && own->attrs.comm.order == node->attrs.comm.order && own->attrs.comm.bucket == node->attrs.comm.bucket);
        assert_true(x->elements == v->elements && x->dtype == v->dtype);
        in[r] = ranks[r].run[which]->data[own->inputs[0]];
    }
    int64_t part = v->elements / n;
    size_t bytes = (size_t)part * vla_dtype_size(v->dtype);
    if (node->op == VLAI_OP_all_gather) {
        for (int r = 0; r < n; r++)
            for (int q = 0; q < n; q++)
                if (q != r)
                    memcpy((char *)in[r] + (size_t)q * bytes, (char *)in[q] + (size_t)q * bytes, bytes);
    } else if (node->op == VLAI_OP_reduce_scatter) {
        for (int r = 0; r < n; r++) {
            const vlai_node *own = &ranks[r].plan[which]->graph->nodes[ranks[r].at];
            for (int64_t i = 0; i < part; i++)
                put_sum(v->dtype, ranks[r].run[which]->data[own->outputs[0]], i, in, part * r + i, n);
        }
    } else {
        void *sum = malloc((size_t)v->elements * 8 + 8);
        assert_non_null(sum);
        for (int64_t i = 0; i < v->elements; i++)
            put_sum(v->dtype, sum, i, in, i, n);
        for (int r = 0; r < n; r++)
            memcpy(in[r], sum, (size_t)v->elements * vla_dtype_size(v->dtype));
        free(sum);
    }
}

/* Runs the plans of all ranks side by side, from collective to collective. */
static void run_all(rank *ranks, int n, int which)
{
    for (int r = 0; r < n; r++)
        ranks[r].at = 0;
    for (;;) {
        int ended = 0;
        for (int r = 0; r < n; r++) {
            const vla_graph *g = ranks[r].plan[which]->graph;
            while (ranks[r].at < g->n_nodes && !vlai_op_is_collective(g->nodes[ranks[r].at].op))
                vlai_cpu_run_node(ranks[r].run[which], ranks[r].at++);
            ended += ranks[r].at == g->n_nodes;
        }
        if (ended) {
            assert_int_equal(ended, n);
            return;
        }
        collective(ranks, n, which);
        for (int r = 0; r < n; r++)
            ranks[r].at++;
    }
}

enum { STEPS = 3 };

/* One rank that accumulates the micro-batches of all. */
static vla_store *reference(vla_numerics numerics, int world, double *norms)
{
    vla_store *store = make_store(0, 1, 1, 1);
    vla_error err;
    vla_executor *ex;
    vla_plan *plan[2];
    vla_run *run[2];
    vla_graph *update, *g = make_graph(1.0 / world);
    vla_gradient_status status[COUNT] = {VLA_GRADIENT_NONE};
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.numerics = numerics;
    assert_ok(vla_store_allocate(store, numerics, VLA_STORE_ACCUMULATE, &err), err);
    set_weights(store);
    assert_ok(vla_executor_create(1, &ex, &err), err);
    assert_ok(vla_graph_store_gradients(g, store, 1, status, &err), err);
    assert_ok(vla_plan_build(g, &o, &plan[0], &err), err);
    assert_ok(vla_graph_adamw(store, status, &adamw, &update, &err), err);
    assert_ok(vla_plan_build(update, &o, &plan[1], &err), err);
    for (int k = 0; k < 2; k++)
        assert_ok(vla_executor_reserve(ex, plan[k], &err), err);
    for (int k = 0; k < 2; k++)
        assert_ok(vla_run_create(ex, plan[k], store, &run[k], &err), err);
    for (int step = 0; step < STEPS; step++) {
        vla_store_zero_gradients(store);
        for (int m = 0; m < world; m++) {
            fill(run[0], step * world + m);
            assert_ok(vla_run_execute(run[0], &err), err);
        }
        set_update(run[1], step, 0);
        assert_ok(vla_run_execute(run[1], &err), err);
        norms[step] = *(double *)vla_run_data(run[1], "clip");
    }
    for (int k = 0; k < 2; k++) {
        vla_run_destroy(run[k]);
        vla_plan_destroy(plan[k]);
    }
    vla_executor_destroy(ex);
    return store;
}

/* The elements of a kind that a rank keeps are those of the whole store: bits, or (tolerance > 0) values. */
static void compare(const vla_store *whole, const vla_store *s, double tolerance)
{
    vla_error err;
    for (size_t i = 0; i < COUNT; i++)
        for (int k = 0; k < VLA_STORE_KINDS; k++) {
            vla_dtype dtype = s->params[i].dtype[k];
            int64_t first, count;
            if (k == VLA_STORE_GRADIENT || dtype == VLA_DTYPE_NONE)
                continue;
            vla_store_slice(s, k, i, &first, &count);
            size_t bytes = (size_t)count * vla_dtype_size(dtype);
            char *got = malloc(bytes + 1), *want = malloc(bytes + 1);
            assert_true(got && want);
            assert_ok(vla_store_read(s, k, i, first, count, got, &err), err);
            assert_ok(vla_store_read(whole, k, i, first, count, want, &err), err);
            if (tolerance == 0 && memcmp(got, want, bytes) != 0)
                fail_msg("rank %d of %d: kind %d of '%s' is not that of one rank", s->rank, s->world, k, params[i].name);
            for (int64_t e = 0; tolerance > 0 && dtype != VLA_U16 && e < count; e++)
                assert_true(fabs(element(dtype, got, e) - element(dtype, want, e)) <= tolerance * (1 + fabs(element(dtype, want, e))));
            free(got), free(want);
        }
}

static size_t count_op(const vla_plan *plan, vlai_op op)
{
    size_t n = 0;
    for (size_t i = 0; i < plan->graph->n_nodes; i++)
        n += plan->graph->nodes[i].op == op;
    return n;
}

/* Where collectives stand, and that gradients are made in their buckets. */
static void check_plan(const setting *s, const rank *r)
{
    const vla_plan *plan = r->plan[!s->whole];
    const vla_graph *g = plan->graph;
    size_t reduced = count_op(plan, s->zero ? VLAI_OP_reduce_scatter : VLAI_OP_all_reduce), gathered = count_op(plan, VLAI_OP_all_gather);
    assert_int_equal(reduced, plan->order.n_reduce + !s->zero); /* and the guard */
    assert_int_equal(count_op(plan, VLAI_OP_all_reduce), s->zero ? 1 : reduced);
    assert_int_equal(gathered, s->zero ? plan->order.n_gather : 0);
    int order = 0;
    size_t last_backward = 0, first_reduce = g->n_nodes;
    for (size_t n = 0; n < g->n_nodes; n++) {
        if (vlai_op_is_collective(g->nodes[n].op)) {
            assert_int_equal(g->nodes[n].attrs.comm.order, order);
            order++;
            if (g->nodes[n].attrs.comm.bucket >= 0 && g->nodes[n].op != VLAI_OP_all_gather && n < first_reduce)
                first_reduce = n;
        } else if (g->nodes[n].op == VLAI_OP_matmul) {
            last_backward = n;
        }
        if (s->zero && s->whole && (int)n < (int)gathered)
            assert_int_equal(g->nodes[n].op == VLAI_OP_all_gather, s->overlap);
    }
    if (s->whole && s->bucket_bytes < 100000)
        assert_int_equal(first_reduce < last_backward, s->overlap);
    if (s->whole && s->gradients == VLA_DTYPE_NONE)
        assert_int_equal(count_op(plan, VLAI_OP_copy), 0);
}

static void train(const setting *s, const vla_store *whole, const double *norms, double tolerance)
{
    rank ranks[8];
    vla_error err;
    for (int r = 0; r < s->world; r++)
        ranks[r] = open_rank(s, r);
    check_plan(s, &ranks[0]);
    for (int step = 0; step < STEPS; step++) {
        for (int r = 0; r < s->world; r++) {
            fill(ranks[r].run[0], step * s->world + r);
            if (s->whole)
                set_update(ranks[r].run[0], step, 0);
            else
                assert_ok(vla_run_execute(ranks[r].run[0], &err), err);
        }
        for (int r = 0; r < s->world && !s->whole; r++)
            set_update(ranks[r].run[1], step, 0);
        run_all(ranks, s->world, !s->whole);
        for (int r = 0; r < s->world; r++) {
            const double *clip = vla_run_data(ranks[r].run[!s->whole], "clip");
            assert_true(clip[2] == 1);
            assert_true(norms == NULL || fabs(clip[0] - norms[step]) <= 1e-6 * norms[step]);
            assert_true(clip[0] == *(double *)vla_run_data(ranks[0].run[!s->whole], "clip"));
        }
    }
    run_all(ranks, s->world, 2);
    for (int r = 0; r < s->world; r++) {
        compare(whole, ranks[r].store, tolerance);
        assert_memory_equal(ranks[r].store->arena[VLA_STORE_WEIGHT], ranks[0].store->arena[VLA_STORE_WEIGHT], ranks[0].store->bytes[VLA_STORE_WEIGHT]);
    }
    for (int r = 0; r < s->world; r++)
        close_rank(&ranks[r]);
}

/* In fp32, and in low precision with sums in fp32, ranks are one rank that accumulates, to the bit. */
static void test_bits(void **state)
{
    (void)state;
    static const int sizes[] = {2, 3, 4};
    static const vla_numerics numerics[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR};
    for (int w = 0; w < 3; w++)
        for (int m = 0; m < 3; m++) {
            double norms[STEPS];
            vla_store *whole = reference(numerics[m], sizes[w], norms);
            for (int kind = 0; kind < 24; kind++) {
                setting s = {.numerics = numerics[m], .world = sizes[w], .zero = kind & 1, .overlap = kind >> 1 & 1, .whole = kind >> 2 & 1,
                             .bucket_bytes = (size_t[]){3000, 12000, 1 << 30}[kind >> 3], .gradients = VLA_F32,
                             .recompute = (vla_recompute)(kind % 3),
                             .layout = kind % 5 == 0 ? VLA_MEMORY_FREE_LISTS : VLA_MEMORY_LIFETIMES};
                if (numerics[m] == VLA_FP32) { /* where joined nodes round as single ones do */
                    s.gradients = VLA_DTYPE_NONE;
                    s.fuse = kind % 2 ? VLA_FUSE_MODEL : 0;
                }
                train(&s, whole, norms, 0);
            }
            vla_store_destroy(whole);
        }
}

/* Sums in bf16 lose bits; every way to lay the work out loses the same ones. With a clip, norms are sums in another order. */
static void test_low_precision(void **state)
{
    (void)state;
    static const vla_numerics numerics[] = {VLA_BF16_MASTER, VLA_BF16_SR, VLA_BF16_PLAIN};
    for (int m = 0; m < 3; m++) {
        double norms[STEPS];
        vla_store *whole = reference(numerics[m], 3, norms);
        for (int kind = 0; kind < 8; kind++) {
            setting s = {.numerics = numerics[m], .world = 3, .zero = kind & 1, .overlap = kind >> 1 & 1, .whole = kind >> 2, .bucket_bytes = 6000};
            train(&s, whole, NULL, 0.05); /* a step is at most 0.01 an element, in bf16 of values up to one */
        }
        vla_store_destroy(whole);
    }
    adamw.max_norm = 0.01;
    double norms[STEPS];
    vla_store *whole = reference(VLA_FP64, 4, norms);
    for (int kind = 0; kind < 8; kind++) {
        setting s = {.numerics = VLA_FP64, .world = 4, .zero = kind & 1, .overlap = kind >> 1 & 1, .whole = kind >> 2, .bucket_bytes = 6000};
        train(&s, whole, norms, 1e-12);
    }
    adamw.max_norm = 0;
    vla_store_destroy(whole);
}

/* A rank whose loss or guard is not finite stops the step of all. */
static void test_guard(void **state)
{
    (void)state;
    vla_error err;
    for (int kind = 0; kind < 8; kind++) {
        setting s = {.numerics = VLA_FP32, .world = 3, .zero = kind & 1, .overlap = kind >> 1 & 1, .whole = kind >> 2, .bucket_bytes = 6000};
        rank ranks[3];
        vla_store *before = make_store(0, 1, 1, 1);
        assert_ok(vla_store_allocate(before, VLA_FP32, VLA_STORE_STEP, &err), err);
        set_weights(before);
        for (int r = 0; r < 3; r++)
            ranks[r] = open_rank(&s, r);
        for (int r = 0; r < 3; r++) {
            fill(ranks[r].run[0], r);
            if (s.whole && r == 1)
                ((float *)vla_run_data(ranks[r].run[0], "target"))[2] = INFINITY;
            if (!s.whole)
                assert_ok(vla_run_execute(ranks[r].run[0], &err), err);
        }
        for (int r = 0; r < 3; r++)
            set_update(ranks[r].run[!s.whole], 0, r == 1 ? NAN : 0);
        run_all(ranks, 3, !s.whole);
        for (int r = 0; r < 3; r++) {
            assert_true(((double *)vla_run_data(ranks[r].run[!s.whole], "clip"))[2] == 0);
            compare(before, ranks[r].store, 0);
            close_rank(&ranks[r]);
        }
        vla_store_destroy(before);
    }
}

/* A later plan takes the order of the first, whatever its own would be, and refuses another set of buckets. */
static void test_order(void **state)
{
    (void)state;
    vla_error err;
    vla_store *store = make_store(1, 2, 1, 3000);
    assert_ok(vla_store_allocate(store, VLA_FP32, VLA_STORE_STEP, &err), err);
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.store = store;
    o.overlap = 1;
    vla_plan *first, *second;
    vla_gradient_status status[COUNT] = {VLA_GRADIENT_NONE};
    vla_graph *g = make_graph(0.5);
    assert_ok(vla_graph_step(g, store, status, &adamw, &err), err);
    assert_ok(vla_plan_build(g, &o, &first, &err), err);
    vlai_comm_order order;
    assert_true(first->order.n_reduce > 3);
    assert_ok(vlai_comm_order_copy(&first->order, &order, &err), err);
    int32_t swapped = order.reduce[0];
    order.reduce[0] = order.reduce[2];
    order.reduce[2] = swapped;
    o.order = &order;
    g = make_graph(0.5);
    assert_ok(vla_graph_step(g, store, status, &adamw, &err), err);
    assert_ok(vla_plan_build(g, &o, &second, &err), err);
    size_t seen = 0;
    for (size_t n = 0; n < second->graph->n_nodes; n++)
        if (second->graph->nodes[n].op == VLAI_OP_reduce_scatter)
            assert_int_equal(second->graph->nodes[n].attrs.comm.bucket, order.reduce[seen++]);
    assert_int_equal(seen, order.n_reduce);
    vla_plan_destroy(second);
    order.n_reduce--;
    g = make_graph(0.5);
    assert_ok(vla_graph_step(g, store, status, &adamw, &err), err);
    assert_fails(vla_plan_build(g, &o, &second, &err), VLA_E_INTERNAL, err, "buckets");
    vlai_comm_order_fini(&order);
    vla_plan_destroy(first);
    vla_store_destroy(store);
}

static size_t marked(const vla_plan *plan, int free, size_t *products)
{
    size_t count = 0;
    *products = 0;
    for (size_t n = 0; n < plan->graph->n_nodes; n++) {
        const vlai_node *node = &plan->graph->nodes[n];
        assert_true(node->sms_free == 0 || (node->op == VLAI_OP_matmul && node->sms_free == free));
        *products += node->op == VLAI_OP_matmul;
        count += node->sms_free != 0;
    }
    return count;
}

/* Products leave multiprocessors free behind a collective, until they have done as much as fits beside it; and nowhere else. */
static void test_beside(void **state)
{
    (void)state;
    enum { SIDE = 100, BEFORE = 2, BEHIND = 20, FREE = 16 };
    vla_error err;
    vla_graph *g;
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value x = vla_graph_input(g, "x", VLA_F32, 2, (int64_t[]){SIDE, SIDE}), w = vla_graph_param(g, "w", VLA_F32, 2, (int64_t[]){SIDE, SIDE});
    for (int i = 0; i < BEFORE; i++)
        x = vla_linear(g, x, w, VLA_NONE);
    /* Of 4 ranks each sends 2 * 3/4 of 4 bytes: 1200 * 5500 operations, three products of 2 * SIDE^3, and a part of a fourth. */
    vla_value sums = vla_graph_input(g, "sums", VLA_F32, 1, (int64_t[]){200});
    vlai_graph_add(g, VLAI_OP_all_reduce, 1, &sums, &(vlai_attrs){.comm = {.world = 4}}, NULL);
    for (int i = 0; i < BEHIND; i++)
        x = vla_linear(g, x, w, VLA_NONE);
    assert_ok(vla_graph_check(g, &err), err);
    for (int form = 0; form < 4; form++) {
        o.overlap = form & 1;
        o.product_sms_free = form & 2 ? FREE : 0;
        vlai_pass_beside(g, &o);
        for (size_t n = 0, products = 0; n < g->n_nodes; n++) {
            bool beside = form == 3 && g->nodes[n].op == VLAI_OP_matmul && products >= BEFORE && products < BEFORE + 4;
            assert_int_equal(g->nodes[n].sms_free, beside ? FREE : 0);
            products += g->nodes[n].op == VLAI_OP_matmul;
        }
    }
    vla_graph_destroy(g);
    /* In plans: of several ranks, where they overlap. */
    for (int kind = 0; kind < 8; kind++) {
        vla_gradient_status status[COUNT] = {VLA_GRADIENT_NONE};
        vla_store *store = make_store(0, kind & 1 ? 2 : 1, 1, 3000);
        vla_plan *plan;
        size_t products;
        assert_ok(vla_store_allocate(store, VLA_FP32, VLA_STORE_STEP, &err), err);
        o.store = store;
        o.overlap = kind & 2;
        o.product_sms_free = kind & 4 ? FREE : 0;
        g = make_graph(0.5);
        assert_ok(vla_graph_step(g, store, status, &adamw, &err), err);
        assert_ok(vla_plan_build(g, &o, &plan, &err), err);
        size_t count = marked(plan, FREE, &products);
        assert_true(kind == 7 ? count > 0 && count <= products : count == 0);
        char *text;
        assert_ok(vla_plan_print(plan, &text, &err), err);
        assert_true((strstr(text, "16 multiprocessors free") != NULL) == (kind == 7));
        free(text);
        vla_plan_destroy(plan);
        vla_store_destroy(store);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_low_precision),
        cmocka_unit_test(test_guard),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_beside),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
