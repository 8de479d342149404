/* The update: copy, accumulate, sum_squares, clip_factor and adamw on every storage type that they take. */
#include "kernel_test.h"

#include "vla/run.h"

enum { N = 140001, MAX_THREADS = 3 }; /* more than two tiles, and odd */

static const vla_dtype STORED[] = {VLA_F32, VLA_F64, VLA_BF16};

static vlai_cpu_tensor stored(cases *c, vla_dtype dtype, int64_t n)
{
    return (vlai_cpu_tensor){case_alloc(c, (size_t)n * vla_dtype_size(dtype)), dtype, 1, {n}, n};
}

static double get(const vlai_cpu_tensor *t, int64_t i)
{
    return t->dtype == VLA_F64 ? ((double *)t->data)[i]
           : t->dtype == VLA_F32 ? (double)((float *)t->data)[i]
                                 : (double)vlai_bf16_to_float(((uint16_t *)t->data)[i]);
}

static void set(const vlai_cpu_tensor *t, int64_t i, double value)
{
    if (t->dtype == VLA_F64)
        ((double *)t->data)[i] = value;
    else if (t->dtype == VLA_F32)
        ((float *)t->data)[i] = (float)value;
    else
        ((uint16_t *)t->data)[i] = vlai_bf16_from_float((float)value);
}

/* Spacing of stored values, relative; fp64 is computed in fp32 where the kernel is the float one. */
static double unit(vla_dtype dtype)
{
    return dtype == VLA_BF16 ? 0x1p-7 : 0x1p-23;
}

static void test_copy_and_accumulate(void **state)
{
    (void)state;
    for (int from = 0; from < 3; from++)
        for (int to = 0; to < 3; to++) {
            cases c = {.state = (uint64_t)(from * 3 + to)};
            vlai_cpu_tensor x = stored(&c, STORED[from], N), y = stored(&c, STORED[to], N), acc = stored(&c, STORED[to], N);
            for (int64_t i = 0; i < N; i++) {
                set(&x, i, random_value(&c));
                set(&acc, i, random_value(&c));
            }
            vlai_node node = {.op = VLAI_OP_copy};
            vlai_cpu_call call = {.node = &node, .in[0] = x, .out[0] = y};
            vlai_cpu_copy_float(&call);
            double *before = case_alloc(&c, N * sizeof *before);
            for (int64_t i = 0; i < N; i++)
                before[i] = get(&acc, i);
            node.op = VLAI_OP_accumulate;
            call = (vlai_cpu_call){.node = &node, .in = {acc, x}};
            vlai_cpu_accumulate_float(&call);
            for (int64_t i = 0; i < N; i++) {
                double value = get(&x, i), sum = before[i] + value;
                assert_true(fabs(get(&y, i) - value) <= unit(STORED[to]) * fabs(value) * 0.5);
                assert_true(fabs(get(&acc, i) - sum) <= unit(STORED[to]) * fabs(sum) * 0.51 + 1e-7);
            }
            vlai_arena_fini(&c.arena);
        }
}

static void test_norm(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++)
        for (int64_t n = 0; n <= N; n += N) {
            cases c = {.state = (uint64_t)d};
            vlai_cpu_tensor x = stored(&c, STORED[d], n), norms = stored(&c, VLA_F64, 3), clip = stored(&c, VLA_F64, 3);
            long double exact = 0; /* squares of short fractions: a plain double sum errs to one side */
            double first = 0;
            for (int64_t i = 0; i < n; i++) {
                set(&x, i, random_value(&c));
                exact += (long double)get(&x, i) * get(&x, i);
            }
            double sum = (double)exact;
            set(&norms, 0, 2);
            set(&norms, 2, 3);
            vlai_node node = {.op = VLAI_OP_sum_squares, .attrs.clip.index = 1};
            for (int threads = 1; threads <= MAX_THREADS; threads++) {
                vla_error err;
                vlai_pool *pool;
                assert_ok(vlai_pool_create(threads, &pool, &err), err);
                vlai_cpu_call call = {.node = &node, .in = {x, norms}, .pool = pool, .workspace = case_alloc(&c, 64)};
                vlai_cpu_sum_squares_float(&call);
                vlai_pool_destroy(pool);
                if (threads == 1)
                    first = get(&norms, 1);
                assert_true(get(&norms, 1) == first);
                assert_true(fabs(first - sum) <= 1e-12 * sum);
            }
            assert_true(get(&norms, 0) == 2 && get(&norms, 2) == 3);

            double norm = sqrt(sum + 5);
            static const double limits[] = {0, 1, 1e9};
            for (int l = 0; l < 3; l++) {
                double wanted = limits[l] > 0 ? fmin(1, limits[l] / (norm + 1e-6)) : 1;
                node = (vlai_node){.op = VLAI_OP_clip_factor, .attrs.clip.max_norm = limits[l]};
                vlai_cpu_call call = {.node = &node, .in[0] = norms, .out[0] = clip};
                vlai_cpu_clip_factor_float(&call);
                assert_true(fabs(get(&clip, 0) - norm) <= 1e-12 * norm);
                assert_true(fabs(get(&clip, 1) - wanted) <= 1e-12 * wanted);
                assert_true(get(&clip, 2) == 1);
            }
            set(&norms, 0, d ? INFINITY : NAN);
            vlai_cpu_call call = {.node = &node, .in[0] = norms, .out[0] = clip};
            vlai_cpu_clip_factor_float(&call);
            assert_true(get(&clip, 2) == 0);
            vlai_arena_fini(&c.arena);
        }
}

typedef struct {
    vlai_cpu_tensor p, g, m, v, hyper, clip, low;
} update;

static const double BETA1 = 0.9, BETA2 = 0.95, EPS = 1e-8, DECAY = 0.1;

static update make_update(cases *c, vla_dtype param, vla_dtype grad, vla_dtype moments, bool with_low, double finite)
{
    update u = {stored(c, param, N), stored(c, grad, N),      stored(c, moments, N),          stored(c, moments, N),
                stored(c, VLA_F64, 6), stored(c, VLA_F64, 3), {NULL, VLA_U16, 1, {N}, N}};
    if (with_low)
        u.low.data = case_alloc(c, N * sizeof(uint16_t));
    for (int64_t i = 0; i < N; i++) {
        set(&u.p, i, random_value(c));
        set(&u.g, i, random_value(c));
        set(&u.m, i, random_value(c) * 0.1);
        set(&u.v, i, fabs(random_value(c)) * 0.1);
        if (with_low)
            ((uint16_t *)u.low.data)[i] = (uint16_t)random_bits(c);
    }
    set(&u.hyper, VLA_HYPER_BIAS1, 1 - pow(BETA1, 3));
    set(&u.hyper, VLA_HYPER_BIAS2, 1 - pow(BETA2, 3));
    set(&u.hyper, VLA_HYPER_UPDATE, 3);
    set(&u.hyper, VLA_HYPER_SEED, 7);
    set(&u.hyper, VLA_HYPER_RATES, 1e9); /* another group's */
    set(&u.hyper, VLA_HYPER_RATES + 1, 1e-2);
    set(&u.clip, 0, 4);
    set(&u.clip, 1, 0.25);
    set(&u.clip, 2, finite);
    return u;
}

/* The float whose halves are the bf16 parameter and its low bits. */
static double master(const update *u, int64_t i)
{
    if (!u->low.data)
        return get(&u->p, i);
    uint16_t low = ((uint16_t *)u->low.data)[i];
    uint32_t bits = ((uint32_t)((uint16_t *)u->p.data)[i] << 16) - (low >= 0x8000 ? 0x10000u : 0) + low;
    float value;
    memcpy(&value, &bits, 4);
    return (double)value;
}

static void run_node(const update *u, const vlai_node *node, bool wide, int threads)
{
    vla_error err;
    vlai_pool *pool;
    assert_ok(vlai_pool_create(threads, &pool, &err), err);
    vlai_cpu_call call = {.node = node, .pool = pool, .in = {u->p, u->g, u->m, u->v, u->hyper, u->clip, u->low}};
    (wide ? vlai_cpu_adamw_double : vlai_cpu_adamw_float)(&call);
    vlai_pool_destroy(pool);
}

static void run_update(const update *u, bool wide, int threads)
{
    vlai_node node = {.op = VLAI_OP_adamw,
                      .attrs.adamw = {.beta1 = BETA1, .beta2 = BETA2, .eps = EPS, .weight_decay = DECAY, .group = 1}};
    run_node(u, &node, wide, threads);
}

static void check_update(vla_dtype param, vla_dtype grad, vla_dtype moments, bool with_low, bool with_grad)
{
    bool wide = param == VLA_F64;
    unsigned char *first = NULL;
    size_t bytes = N * vla_dtype_size(param);
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        cases c = {.state = (uint64_t)param * 100 + (uint64_t)moments};
        update u = make_update(&c, param, grad, moments, with_low, 1);
        double *p = case_alloc(&c, N * sizeof *p), *m = case_alloc(&c, N * sizeof *m), *v = case_alloc(&c, N * sizeof *v);
        if (!with_grad)
            u.g.data = NULL;
        for (int64_t i = 0; i < N; i++) {
            double g = with_grad ? 0.25 * get(&u.g, i) : 0;
            m[i] = BETA1 * get(&u.m, i) + (1 - BETA1) * g;
            v[i] = BETA2 * get(&u.v, i) + (1 - BETA2) * g * g;
            p[i] = master(&u, i) * (1 - 1e-2 * DECAY) -
                   1e-2 / (1 - pow(BETA1, 3)) * m[i] / (sqrt(v[i]) / sqrt(1 - pow(BETA2, 3)) + EPS);
        }
        run_update(&u, wide, threads);
        /* Values of up to 2 in float: a few roundings of 1.2e-7; in double a few of 2e-16; then one of storage. */
        double slack = wide ? 2e-15 : 6e-7;
        for (int64_t i = 0; i < N; i++) {
            double stored_p = with_low || param != VLA_BF16 ? 0 : unit(param) / 2, stored_m = moments == VLA_BF16 ? unit(moments) / 2 : 0;
            double moved = 1e-2 * fabs(m[i]) / sqrt(v[i]); /* large where v is small */
            assert_true(fabs(master(&u, i) - p[i]) <= slack * (1 + moved) + stored_p * fabs(p[i]) * 1.01);
            assert_true(fabs(get(&u.m, i) - m[i]) <= slack + stored_m * fabs(m[i]) * 1.01);
            assert_true(fabs(get(&u.v, i) - v[i]) <= slack + stored_m * fabs(v[i]) * 1.01);
            if (with_low) /* the compute copy is the master, rounded */
                assert_true(fabs(get(&u.p, i) - master(&u, i)) <= unit(VLA_BF16) / 2 * fabs(master(&u, i)) * 1.0001);
        }
        if (!first) {
            first = malloc(bytes);
            assert_non_null(first);
            memcpy(first, u.p.data, bytes);
        }
        assert_memory_equal(first, u.p.data, bytes);
        vlai_arena_fini(&c.arena);
    }
    free(first);
}

static void test_adamw(void **state)
{
    (void)state;
    check_update(VLA_F32, VLA_F32, VLA_F32, false, true);
    check_update(VLA_F32, VLA_F32, VLA_F32, false, false);
    check_update(VLA_F64, VLA_F64, VLA_F64, false, true);
    check_update(VLA_BF16, VLA_BF16, VLA_F32, true, true);
    check_update(VLA_BF16, VLA_F32, VLA_F32, true, true);
    check_update(VLA_BF16, VLA_BF16, VLA_F32, true, false);
    check_update(VLA_BF16, VLA_BF16, VLA_BF16, false, true);
}

/* A step that was not finite changes nothing. */
static void test_adamw_skips(void **state)
{
    (void)state;
    cases c = {0}, again = {0};
    update u = make_update(&c, VLA_BF16, VLA_BF16, VLA_F32, true, 0), same = make_update(&again, VLA_BF16, VLA_BF16, VLA_F32, true, 0);
    set(&u.g, 7, NAN);
    run_update(&u, false, 2);
    assert_memory_equal(u.p.data, same.p.data, N * 2);
    assert_memory_equal(u.low.data, same.low.data, N * 2);
    assert_memory_equal(u.m.data, same.m.data, N * 4);
    assert_memory_equal(u.v.data, same.v.data, N * 4);
    vlai_arena_fini(&c.arena);
    vlai_arena_fini(&again.arena);
}

/* Of each element the fp32 result or a neighbour in bf16, right in the mean over the updates; zeros stay zeros. */
static void test_adamw_stochastic(void **state)
{
    (void)state;
    enum { UPDATES = 300, ZEROS = 5 };
    vlai_node node = {.op = VLAI_OP_adamw, .attrs.adamw = {.beta1 = BETA1, .beta2 = BETA2, .eps = EPS, .weight_decay = DECAY, .group = 1, .key = 5}};
    static double want[3][N], mean[3][N];
    double sum[3] = {0}, weight[3] = {0};
    cases c = {.state = 4};
    update exact = make_update(&c, VLA_F32, VLA_F32, VLA_F32, false, 1), start = make_update(&c, VLA_BF16, VLA_BF16, VLA_BF16, false, 1);
    const vlai_cpu_tensor *from[4] = {&start.p, &start.g, &start.m, &start.v};
    vlai_cpu_tensor *to[4] = {&exact.p, &exact.g, &exact.m, &exact.v};
    for (int k = 0; k < 4; k++)
        for (int64_t i = 0; i < N; i++) {
            if (i < ZEROS)
                set(&(vlai_cpu_tensor){from[k]->data, VLA_BF16, 1, {N}, N}, i, 0);
            set(to[k], i, get(from[k], i));
        }
    run_update(&exact, false, 1);
    node.attrs.adamw.stochastic = 1;
    for (int u = 0; u < UPDATES; u++) {
        cases fresh = {.state = 4};
        update one = start, two = start;
        vlai_cpu_tensor *a[3] = {&one.p, &one.m, &one.v}, *b[3] = {&two.p, &two.m, &two.v};
        set(&one.hyper, VLA_HYPER_UPDATE, u + 1);
        for (int k = 0; k < 3; k++) {
            a[k]->data = memcpy(case_alloc(&fresh, N * 2), a[k]->data, N * 2);
            b[k]->data = memcpy(case_alloc(&fresh, N * 2), b[k]->data, N * 2);
        }
        run_node(&one, &node, false, 1);
        if (u < 3) {
            run_node(&two, &node, false, MAX_THREADS);
            for (int k = 0; k < 3; k++)
                assert_memory_equal(a[k]->data, b[k]->data, N * 2);
        }
        for (int k = 0; k < 3; k++)
            for (int64_t i = 0; i < N; i++) {
                want[k][i] = get(k == 0 ? &exact.p : k == 1 ? &exact.m : &exact.v, i);
                assert_true(fabs(get(a[k], i) - want[k][i]) <= 0x1p-7 * fabs(want[k][i])); /* less than a unit */
                mean[k][i] += get(a[k], i) / UPDATES;
            }
        vlai_arena_fini(&fresh.arena);
    }
    for (int k = 0; k < 3; k++) {
        for (int64_t i = 0; i < N; i++) {
            double unit_here = 0x1p-7 * fabs(want[k][i]) + 1e-300; /* at least the distance of the neighbours */
            if (i < ZEROS)
                assert_true(want[k][i] == 0 && mean[k][i] == 0);
            assert_true(fabs(mean[k][i] - want[k][i]) <= 5 * unit_here * 0.5 / sqrt(UPDATES));
            sum[k] += (mean[k][i] - want[k][i]) / unit_here;
            weight[k] += 0.25 / UPDATES;
        }
        assert_true(fabs(sum[k]) <= 5 * sqrt(weight[k])); /* nor is there a bias that single elements hide */
    }
    vlai_arena_fini(&c.arena);
}

static vlai_cpu_tensor part(vlai_cpu_tensor t, int64_t first, int64_t n)
{
    if (t.data)
        t.data = (char *)t.data + (size_t)first * vla_dtype_size(t.dtype);
    t.elements = t.shape[0] = n;
    return t;
}

/* Slices stepped one by one give the bits of the whole tensor, stochastic rounding among them; so do slices of a tensor that
 * begins elsewhere when that changes no key, and others when it crosses 2^32. */
static void test_adamw_slices(void **state)
{
    (void)state;
    static const struct {
        vla_dtype param, grad, moments;
        bool low, stochastic, wide;
    } rows[] = {{VLA_F32, VLA_F32, VLA_F32, false, false, false},  {VLA_F64, VLA_F64, VLA_F64, false, false, true},
                {VLA_BF16, VLA_BF16, VLA_F32, true, false, false}, {VLA_BF16, VLA_F32, VLA_F32, true, false, false},
                {VLA_BF16, VLA_BF16, VLA_BF16, false, false, false}, {VLA_BF16, VLA_BF16, VLA_BF16, false, true, false}};
    static const int64_t cuts[][2] = {{1, 77}, {128, 65536}, {40001, 40001}, {0, N - 1}};
    static const int64_t origins[] = {0, ((int64_t)1 << 32) - 70001};
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++)
            for (int o = 0; o < 2; o++) {
                cases a = {.state = r + 3}, b = {.state = r + 3};
                update whole = make_update(&a, rows[r].param, rows[r].grad, rows[r].moments, rows[r].low, 1);
                update cut = make_update(&b, rows[r].param, rows[r].grad, rows[r].moments, rows[r].low, 1);
                vlai_node node = {.op = VLAI_OP_adamw, .attrs.adamw = {.beta1 = BETA1, .beta2 = BETA2, .eps = EPS, .weight_decay = DECAY, .group = 1,
                                                                       .key = 5, .stochastic = rows[r].stochastic, .first = origins[o]}};
                run_node(&whole, &node, rows[r].wide, 2);
                const int64_t ends[4] = {0, cuts[k][0], cuts[k][1], N};
                for (int s = 2; s >= 0; s--) { /* in any order */
                    int64_t n = ends[s + 1] - ends[s];
                    update one = {part(cut.p, ends[s], n), part(cut.g, ends[s], n), part(cut.m, ends[s], n), part(cut.v, ends[s], n),
                                  cut.hyper, cut.clip, part(cut.low, ends[s], n)};
                    node.attrs.adamw.first = origins[o] + ends[s];
                    run_node(&one, &node, rows[r].wide, 1 + s);
                }
                assert_memory_equal(whole.p.data, cut.p.data, N * vla_dtype_size(rows[r].param));
                assert_memory_equal(whole.m.data, cut.m.data, N * vla_dtype_size(rows[r].moments));
                assert_memory_equal(whole.v.data, cut.v.data, N * vla_dtype_size(rows[r].moments));
                if (rows[r].low)
                    assert_memory_equal(whole.low.data, cut.low.data, N * sizeof(uint16_t));
                vlai_arena_fini(&a.arena);
                vlai_arena_fini(&b.arena);
            }
    /* The place of a slice is part of the key: the same elements elsewhere are rounded otherwise. */
    cases a = {.state = 1}, b = {.state = 1};
    update here = make_update(&a, VLA_BF16, VLA_BF16, VLA_BF16, false, 1), there = make_update(&b, VLA_BF16, VLA_BF16, VLA_BF16, false, 1);
    vlai_node node = {.op = VLAI_OP_adamw, .attrs.adamw = {.beta1 = BETA1, .beta2 = BETA2, .eps = EPS, .group = 1, .key = 5, .stochastic = 1}};
    run_node(&here, &node, false, 1);
    node.attrs.adamw.first = (int64_t)1 << 32;
    run_node(&there, &node, false, 1);
    assert_memory_not_equal(here.p.data, there.p.data, N * 2);
    vlai_arena_fini(&a.arena);
    vlai_arena_fini(&b.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copy_and_accumulate),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_adamw_skips),
        cmocka_unit_test(test_adamw_stochastic),
        cmocka_unit_test(test_adamw_slices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
