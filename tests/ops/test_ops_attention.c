/* Attention, forward and backward, against the definition written out over all pairs. */
#include "kernel_test.h"

typedef struct {
    int64_t queries, keys;
    int heads, kv_heads, dim;
} problem;

typedef struct {
    tensor q, k, v, qpos, rows, cols, o, lse, d_o, dq, dk, dv;
    vlai_node node;
} attention;

static bool sees(const attention *a, int64_t i, int64_t j)
{
    const int32_t *c = a->cols.i + 4 * j, q = a->qpos.i[i];
    return j >= a->rows.i[2 * i] && j < a->rows.i[2 * i + 1] && c[0] <= q && q < c[1] && !(c[2] <= q && q < c[3]);
}

static attention make(cases *c, const problem *p)
{
    attention a = {.node.attrs.attention = {.heads = p->heads, .kv_heads = p->kv_heads, .head_dim = p->dim, .scale = 1 / sqrt(p->dim)}};
    int64_t wide = p->heads * p->dim, narrow = p->kv_heads * p->dim;
    a.q = random_tensor(c, SHAPE2(p->queries, wide));
    a.k = random_tensor(c, SHAPE2(p->keys, narrow));
    a.v = random_tensor(c, SHAPE2(p->keys, narrow));
    a.d_o = random_tensor(c, SHAPE2(p->queries, wide));
    a.qpos = index_tensor(c, SHAPE1(p->queries));
    a.rows = index_tensor(c, SHAPE2(p->queries, 2));
    a.cols = index_tensor(c, SHAPE2(p->keys, 4));
    a.o = result_tensor(c, SHAPE2(p->queries, wide));
    a.lse = result_tensor(c, SHAPE2(p->queries, p->heads));
    a.dq = result_tensor(c, SHAPE2(p->queries, wide));
    a.dk = result_tensor(c, SHAPE2(p->keys, narrow));
    a.dv = result_tensor(c, SHAPE2(p->keys, narrow));
    return a;
}

/* Fills the results from the operands. The backward pass is given o and lse exact in float, so its reference uses
 * those. */
static void solve(attention *a, const problem *p)
{
    int64_t dim = p->dim, wide = p->heads * dim, narrow = p->kv_heads * dim;
    double scale = a->node.attrs.attention.scale, *score = malloc((size_t)(p->keys + 1) * sizeof *score);
    assert_non_null(score);
    for (int64_t i = 0; i < p->queries; i++)
        for (int h = 0; h < p->heads; h++) {
            int64_t kv = h / (p->heads / p->kv_heads) * dim, at = i * wide + h * dim;
            double top = -INFINITY, sum = 0;
            for (int64_t j = 0; j < p->keys; j++) {
                score[j] = -INFINITY;
                if (!sees(a, i, j))
                    continue;
                score[j] = 0;
                for (int64_t e = 0; e < dim; e++)
                    score[j] += scale * a->q.f[at + e] * a->k.f[j * narrow + kv + e];
                top = fmax(top, score[j]);
            }
            for (int64_t j = 0; j < p->keys; j++)
                sum += score[j] > -INFINITY ? exp(score[j] - top) : 0;
            double lse = top + log(sum);
            a->lse.f[i * p->heads + h] = sum > 0 ? lse : -INFINITY;
            if (!(sum > 0))
                continue;
            for (int64_t j = 0; j < p->keys; j++)
                for (int64_t e = 0; e < dim && score[j] > -INFINITY; e++)
                    a->o.f[at + e] += exp(score[j] - lse) * a->v.f[j * narrow + kv + e];
            double delta = 0, kept = (double)(float)lse;
            for (int64_t e = 0; e < dim; e++)
                delta += a->d_o.f[at + e] * (double)(float)a->o.f[at + e];
            for (int64_t j = 0; j < p->keys; j++) {
                if (!(score[j] > -INFINITY))
                    continue;
                double prob = exp(score[j] - kept), dp = 0;
                for (int64_t e = 0; e < dim; e++)
                    dp += a->d_o.f[at + e] * a->v.f[j * narrow + kv + e];
                double ds = scale * prob * (dp - delta);
                for (int64_t e = 0; e < dim; e++) {
                    a->dq.f[at + e] += ds * a->k.f[j * narrow + kv + e];
                    a->dk.f[j * narrow + kv + e] += ds * a->q.f[at + e];
                    a->dv.f[j * narrow + kv + e] += prob * a->d_o.f[at + e];
                }
            }
        }
    free(score);
}

/* q | k | v side by side in one matrix. */
static tensor packed(cases *c, const problem *p, const tensor *q, const tensor *k, const tensor *v)
{
    int64_t wide = p->heads * p->dim, narrow = p->kv_heads * p->dim, all = wide + 2 * narrow;
    tensor x = result_tensor(c, SHAPE2(p->queries, all));
    for (int64_t i = 0; i < p->queries; i++) {
        memcpy(x.f + i * all, q->f + i * wide, (size_t)wide * sizeof *x.f);
        memcpy(x.f + i * all + wide, k->f + i * narrow, (size_t)narrow * sizeof *x.f);
        memcpy(x.f + i * all + wide + narrow, v->f + i * narrow, (size_t)narrow * sizeof *x.f);
    }
    return x;
}

/* The rows of x in two streams, as `map` says. */
static void divide(cases *c, const tensor *x, const tensor *map, const int64_t rows[2], tensor part[2])
{
    int64_t cols = x->shape[1];
    for (int s = 0; s < 2; s++)
        part[s] = result_tensor(c, SHAPE2(rows[s], cols));
    for (int64_t i = 0; i < map->n; i++) {
        int32_t at = map->i[i];
        memcpy(at < 0 ? part[1].f + (-1 - at) * cols : part[0].f + at * cols, x->f + i * cols, (size_t)cols * sizeof *x->f);
    }
}

/* o and do in two streams: rows by turns in either, the second's in the opposite order, or all in one. */
static void check_streams(attention *a, bool forward, const tensor *qkv, const tensor *dqkv)
{
    for (int kind = 0; kind < 3; kind++) {
        cases own = {.state = (uint64_t)kind}, *c = &own;
        int64_t n = a->qpos.n, rows[2] = {0, 0};
        tensor map = index_tensor(c, SHAPE1(n)), o[2], d_o[2], none = {0};
        for (int64_t i = n; i-- > 0;)
            if (kind == 2 || (kind == 0 && random_below(c, 3) == 0))
                map.i[i] = (int32_t)(-1 - rows[1]++);
        for (int64_t i = 0; i < n; i++)
            if (map.i[i] >= 0)
                map.i[i] = (int32_t)rows[0]++;
        tensor at_a = index_tensor(c, SHAPE1(rows[0]));
        for (int64_t i = 0; i < n; i++)
            if (map.i[i] >= 0)
                at_a.i[map.i[i]] = (int32_t)i;
        divide(c, &a->o, &map, rows, o);
        divide(c, &a->d_o, &map, rows, d_o);
        tensor in[7] = {*qkv, a->qpos, a->rows, a->cols, none, map, at_a}, out[3] = {o[0], a->lse, o[1]};
        tensor grad_in[11] = {d_o[0], *qkv, o[0], a->lse, a->qpos, a->rows, a->cols, none, map, d_o[1], o[1]};
        if (forward) {
            CHECK_KERNEL(attention_qkv, &a->node, in, 7, out, 3, 3e-6);
            for (int unwanted = 0; unwanted < 3; unwanted++) {
                tensor some[3] = {out[0], out[1], out[2]};
                some[unwanted].f = NULL;
                CHECK_KERNEL(attention_qkv, &a->node, in, 7, some, 3, 3e-6);
            }
        } else {
            CHECK_KERNEL(attention_qkv_grad, &a->node, grad_in, 11, dqkv, 1, 1e-5);
        }
        vlai_arena_fini(&own.arena);
    }
}

/* Backward: o and lse are exact in float. */
static void check_packed(attention *a, const problem *p, bool forward)
{
    cases own = {0}, *c = &own;
    if (p->queries != p->keys)
        return;
    tensor qkv = packed(c, p, &a->q, &a->k, &a->v), dqkv = packed(c, p, &a->dq, &a->dk, &a->dv), out[2] = {a->o, a->lse};
    tensor in[4] = {qkv, a->qpos, a->rows, a->cols}, grad_in[7] = {a->d_o, qkv, a->o, a->lse, a->qpos, a->rows, a->cols};
    if (forward) {
        a->node.op = VLAI_OP_attention_qkv;
        CHECK_KERNEL(attention_qkv, &a->node, in, 4, out, 2, 3e-6);
    } else {
        a->node.op = VLAI_OP_attention_qkv_grad;
        CHECK_KERNEL(attention_qkv_grad, &a->node, grad_in, 7, &dqkv, 1, 1e-5);
    }
    check_streams(a, forward, &qkv, &dqkv);
    vlai_arena_fini(&own.arena);
}

static void check(attention *a, const problem *p)
{
    solve(a, p);
    tensor in[6] = {a->q, a->k, a->v, a->qpos, a->rows, a->cols}, out[2] = {a->o, a->lse};
    a->node.op = VLAI_OP_attention;
    CHECK_KERNEL(attention, &a->node, in, 6, out, 2, 3e-6);
    check_packed(a, p, true);
    tensor o = a->o, lse = a->lse;
    for (int64_t i = 0; i < o.n; i++)
        o.f[i] = (double)(float)o.f[i];
    for (int64_t i = 0; i < lse.n; i++)
        lse.f[i] = (double)(float)lse.f[i];
    tensor grad_in[9] = {a->d_o, a->q, a->k, a->v, o, lse, a->qpos, a->rows, a->cols};
    tensor grad_out[3] = {a->dq, a->dk, a->dv};
    a->node.op = VLAI_OP_attention_grad;
    CHECK_KERNEL(attention_grad, &a->node, grad_in, 9, grad_out, 3, 1e-5);
    for (int unwanted = 0; unwanted < 3; unwanted++) {
        tensor some[3] = {a->dq, a->dk, a->dv};
        some[unwanted].f = NULL;
        CHECK_KERNEL(attention_grad, &a->node, grad_in, 9, some, 3, 1e-5);
    }
    check_packed(a, p, false);
}

static void everything_visible(attention *a, int64_t i, int64_t j)
{
    a->rows.i[2 * i] = 0;
    a->rows.i[2 * i + 1] = (int32_t)a->k.shape[0];
    memcpy(a->cols.i + 4 * j, (int32_t[]){0, INT32_MAX, 0, 0}, 16);
}

/* Rows packed in segments of the given lengths; causal or full inside, each padded key (`hide` every n-th) invisible. */
static void pack(attention *a, const int64_t *lengths, int n, bool causal, int hide)
{
    int64_t first = 0;
    for (int s = 0; s < n; s++) {
        for (int64_t r = first; r < first + lengths[s]; r++) {
            a->qpos.i[r] = (int32_t)r;
            a->rows.i[2 * r] = (int32_t)first;
            a->rows.i[2 * r + 1] = (int32_t)(first + lengths[s]);
            bool hidden = hide && r % hide == 0;
            memcpy(a->cols.i + 4 * r, (int32_t[]){causal ? (int32_t)r : 0, hidden ? 0 : INT32_MAX, 0, 0}, 16);
        }
        first += lengths[s];
    }
    assert_int_equal(first, a->q.shape[0]);
}

static void test_segments(void **state)
{
    (void)state;
    static const int64_t many[] = {4, 4, 4, 16, 1, 4, 64, 30, 3, 1, 1, 70, 5, 33}, two[] = {140, 129}, one[] = {1};
    struct {
        const int64_t *lengths;
        int n;
        problem p;
    } rows[] = {
        {many, 14, {240, 240, 4, 2, 16}}, {many, 14, {240, 240, 3, 1, 10}}, {two, 2, {269, 269, 2, 2, 32}},
        {two, 2, {269, 269, 4, 1, 80}},   {one, 1, {1, 1, 2, 1, 2}},
    };
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (int mode = 0; mode < 4; mode++) {
            cases c = {.state = r * 10 + (size_t)mode};
            attention a = make(&c, &rows[r].p);
            pack(&a, rows[r].lengths, rows[r].n, mode & 1, mode & 2 ? 3 : 0);
            check(&a, &rows[r].p);
            vlai_arena_fini(&c.arena);
        }
}

/* Other numbers of keys than queries, holes in the middle of what a key shows, ranges given per query in any order, and
 * some queries that see nothing. */
static void test_any_mask(void **state)
{
    (void)state;
    static const problem problems[] = {{37, 150, 4, 2, 8}, {150, 37, 2, 1, 16}, {5, 300, 1, 1, 64}, {130, 1, 2, 2, 4}};
    for (size_t r = 0; r < sizeof problems / sizeof *problems; r++)
        for (int seed = 0; seed < 3; seed++) {
            const problem *p = &problems[r];
            cases c = {.state = r * 10 + (size_t)seed};
            attention a = make(&c, p);
            for (int64_t i = 0; i < p->queries; i++) {
                a.qpos.i[i] = (int32_t)random_below(&c, 20);
                a.rows.i[2 * i] = (int32_t)random_below(&c, p->keys + 1) - (seed == 2);
                a.rows.i[2 * i + 1] = a.rows.i[2 * i] + (int32_t)random_below(&c, p->keys + 1);
            }
            for (int64_t j = 0; j < p->keys; j++) {
                int32_t lo = (int32_t)random_below(&c, 10), hole = (int32_t)random_below(&c, 20);
                memcpy(a.cols.i + 4 * j, (int32_t[]){lo, lo + 12, hole, hole + (int32_t)random_below(&c, 5)}, 16);
            }
            check(&a, p);
            vlai_arena_fini(&c.arena);
        }
}

/* Nothing there, and one long row that spans several key blocks. */
static void test_limits(void **state)
{
    (void)state;
    static const problem problems[] = {{0, 0, 2, 1, 4}, {0, 9, 2, 1, 4}, {3, 0, 2, 1, 4}, {1, 1000, 1, 1, 8}};
    for (size_t r = 0; r < sizeof problems / sizeof *problems; r++) {
        const problem *p = &problems[r];
        cases c = {.state = r};
        attention a = make(&c, p);
        for (int64_t i = 0; i < p->queries; i++)
            for (int64_t j = 0; j < p->keys; j++)
                everything_visible(&a, i, j);
        check(&a, p);
        vlai_arena_fini(&c.arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_segments),
        cmocka_unit_test(test_any_mask),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
