/* Every differentiable operation, through the graph: the gradient that the backward pass computes in fp64 against central
 * differences of the loss.
 *
 * Each row of ops.def that is DIFF needs a function case_<op> here, or this file does not compile. A case builds a value
 * from parameters (what is differentiated), integer inputs and constant inputs, in one or more variants. The loss is the
 * sum of that value under fixed random weights. */
#include "kernel_test.h"

#include "ops/op.h"
#include "vla/run.h"

#include <math.h>

enum { MAX_PARAMS = 6, MAX_INPUTS = 8 };

typedef struct operand {
    char name[8];
    tensor t;
} operand;

typedef struct check {
    vla_graph *g;
    cases c;
    int variant, n_params, n_inputs;
    operand params[MAX_PARAMS], inputs[MAX_INPUTS];
} check;

/* What a case has to say when its variants are over. */
#define END_OF_VARIANTS ((vla_value)-2)

static vla_value param(check *k, int rank, const int64_t *shape)
{
    assert_true(k->n_params < MAX_PARAMS);
    operand *o = &k->params[k->n_params];
    snprintf(o->name, sizeof o->name, "p%d", k->n_params++);
    o->t = random_tensor(&k->c, rank, shape);
    return vla_graph_param(k->g, o->name, VLA_COMPUTE, rank, shape);
}

static operand *new_input(check *k)
{
    assert_true(k->n_inputs < MAX_INPUTS);
    operand *o = &k->inputs[k->n_inputs];
    snprintf(o->name, sizeof o->name, "i%d", k->n_inputs++);
    return o;
}

static vla_value constant(check *k, int rank, const int64_t *shape)
{
    operand *o = new_input(k);
    o->t = random_tensor(&k->c, rank, shape);
    return vla_graph_input(k->g, o->name, VLA_COMPUTE, rank, shape);
}

static vla_value integers(check *k, int rank, const int64_t *shape, const int32_t *values)
{
    operand *o = new_input(k);
    o->t = index_tensor(&k->c, rank, shape);
    memcpy(o->t.i, values, (size_t)o->t.n * sizeof *values);
    return vla_graph_input(k->g, o->name, VLA_I32, rank, shape);
}

#define VALUES(...) (int32_t[]){__VA_ARGS__}
#define CASE(name) static vla_value case_##name(check *k)
#define VARIANTS(n)             \
    do {                        \
        if (k->variant >= (n))  \
            return END_OF_VARIANTS; \
    } while (0)

CASE(matmul)
{
    VARIANTS(8);
    int ta = k->variant & 1, tb = k->variant >> 1 & 1;
    vla_value a = ta ? param(k, SHAPE2(4, 3)) : param(k, SHAPE2(3, 4)), b = tb ? param(k, SHAPE2(5, 4)) : param(k, SHAPE2(4, 5));
    return vla_matmul(k->g, a, b, ta, tb, k->variant & 4 ? param(k, SHAPE1(5)) : VLA_NONE);
}

CASE(add)
{
    VARIANTS(2);
    vla_value a = param(k, SHAPE2(3, 4));
    return vla_add(k->g, a, k->variant ? a : param(k, SHAPE2(3, 4)));
}

CASE(sub)
{
    VARIANTS(1);
    vla_value a = param(k, SHAPE2(3, 4));
    return vla_sub(k->g, a, param(k, SHAPE2(3, 4)));
}

CASE(mul)
{
    VARIANTS(2);
    vla_value a = param(k, SHAPE2(3, 4));
    return vla_mul(k->g, a, k->variant ? a : param(k, SHAPE2(3, 4)));
}

CASE(scale)
{
    VARIANTS(1);
    return vla_scale(k->g, param(k, SHAPE2(3, 4)), -0.75);
}

CASE(cast)
{
    VARIANTS(1);
    return vla_cast(k->g, param(k, SHAPE2(3, 4)), VLA_PRECISE);
}

CASE(silu)
{
    VARIANTS(1);
    return vla_silu(k->g, param(k, SHAPE2(5, 4)));
}

CASE(gelu)
{
    VARIANTS(1);
    return vla_gelu(k->g, param(k, SHAPE2(5, 4)));
}

CASE(swiglu)
{
    VARIANTS(1);
    return vla_swiglu(k->g, param(k, SHAPE2(3, 10)));
}

CASE(rms_norm)
{
    VARIANTS(2);
    vla_value x = param(k, SHAPE2(4, 6));
    return vla_rms_norm(k->g, x, k->variant ? param(k, SHAPE1(6)) : VLA_NONE, 1e-3);
}

CASE(rope)
{
    VARIANTS(2);
    vla_rope_options o = {.base = 100, .half = 3, .axes = 2, .restart = 1, .sections = {2, 1}, .dtype = VLA_PRECISE};
    vla_rope_tables tables = vla_rope_table(k->g, integers(k, SHAPE2(2, 3), VALUES(0, 1, 7, 2, 0, 3)), &o);
    vla_value x = param(k, SHAPE2(3, 12));
    if (k->variant == 0)
        return vla_rope(k->g, x, tables, 6);
    return vlai_graph_op(k->g, VLAI_OP_rope, 3, (vla_value[]){x, tables.cos, tables.sin},
                         &(vlai_attrs){.rope = {.head_dim = 6, .inverse = 1}});
}

/* Two causal segments; then a mask with a hole, a query that sees nothing, and shared kv heads. */
CASE(attention)
{
    VARIANTS(2);
    bool holes = k->variant == 1;
    vla_attention_options o = {.heads = 4, .kv_heads = holes ? 2 : 4, .head_dim = 3, .scale = 0.5};
    vla_value q = param(k, SHAPE2(5, 12)), key = param(k, SHAPE2(5, 3 * o.kv_heads)), value = param(k, SHAPE2(5, 3 * o.kv_heads));
    vla_value qpos = integers(k, SHAPE1(5), VALUES(0, 1, 2, 3, 4));
    vla_value rows = holes ? integers(k, SHAPE2(5, 2), VALUES(0, 5, 0, 5, 1, 4, 0, 0, 2, 5))
                           : integers(k, SHAPE2(5, 2), VALUES(0, 2, 0, 2, 2, 5, 2, 5, 2, 5));
    vla_value cols = holes ? integers(k, SHAPE2(5, 4), VALUES(0, 9, 1, 2, 0, 9, 0, 0, 0, 3, 0, 0, 1, 9, 2, 4, 0, 9, 4, 5))
                           : integers(k, SHAPE2(5, 4), VALUES(0, 9, 0, 0, 1, 9, 0, 0, 2, 9, 0, 0, 3, 9, 0, 0, 4, 9, 0, 0));
    return vla_attention(k->g, q, key, value, qpos, rows, cols, VLA_NONE, &o);
}

CASE(gather_rows)
{
    VARIANTS(1);
    vla_value x = param(k, SHAPE2(4, 3));
    return vla_gather_rows(k->g, x, integers(k, SHAPE1(5), VALUES(2, 0, -1, 2, 3)), -1);
}

CASE(scatter_add_rows)
{
    VARIANTS(2);
    vla_value x = param(k, SHAPE2(5, 3));
    return vla_scatter_add_rows(k->g, x, integers(k, SHAPE1(5), VALUES(2, 0, -1, 2, 3)), 4, k->variant ? 2 : -1);
}

CASE(put_rows)
{
    VARIANTS(1);
    vla_value base = param(k, SHAPE2(4, 3));
    return vla_put_rows(k->g, base, integers(k, SHAPE1(3), VALUES(2, -1, 0)), param(k, SHAPE2(3, 3)));
}

CASE(zero_rows)
{
    VARIANTS(1);
    vla_value x = param(k, SHAPE2(4, 3)), index = integers(k, SHAPE1(3), VALUES(2, -1, 0));
    return vlai_graph_op(k->g, VLAI_OP_zero_rows, 2, (vla_value[]){x, index}, NULL);
}

CASE(merge_rows)
{
    VARIANTS(1);
    vla_value a = param(k, SHAPE2(3, 2)), b = param(k, SHAPE2(2, 2));
    return vla_merge_rows(k->g, a, b, integers(k, SHAPE1(5), VALUES(0, -1, 1, 2, -2)), integers(k, SHAPE1(3), VALUES(0, 2, 3)),
                          integers(k, SHAPE1(2), VALUES(1, 4)));
}

/* The middle piece is left unread. */
CASE(split_cols)
{
    VARIANTS(1);
    vla_value piece[3];
    vla_split_cols(k->g, param(k, SHAPE2(3, 6)), 3, (int64_t[]){3, 2, 1}, piece);
    return vla_concat_cols(k->g, 2, (vla_value[]){piece[2], piece[0]});
}

CASE(concat_cols)
{
    VARIANTS(1);
    vla_value a = param(k, SHAPE2(3, 2)), b = param(k, SHAPE2(3, 1));
    return vla_concat_cols(k->g, 4, (vla_value[]){a, b, a, constant(k, SHAPE2(3, 2))});
}

CASE(slice_rows)
{
    VARIANTS(2);
    vla_value x = k->variant ? param(k, SHAPE1(5)) : param(k, SHAPE2(5, 3));
    return vla_slice_rows(k->g, x, 1, 3);
}

CASE(pad_rows)
{
    VARIANTS(2);
    vla_value x = k->variant ? param(k, SHAPE1(3)) : param(k, SHAPE2(3, 2));
    return vla_pad_rows(k->g, x, 1, 6);
}

CASE(concat_rows)
{
    VARIANTS(1);
    vla_value a = param(k, SHAPE2(3, 2));
    return vla_concat_rows(k->g, a, param(k, SHAPE2(2, 2)));
}

CASE(reshape)
{
    VARIANTS(1);
    return vla_reshape(k->g, param(k, SHAPE2(3, 4)), 2, (int64_t[]){2, 6});
}

CASE(mul_rows)
{
    VARIANTS(1);
    vla_value x = param(k, SHAPE2(3, 4));
    return vla_mul_rows(k->g, x, param(k, SHAPE1(3)));
}

CASE(row_sum)
{
    VARIANTS(1);
    return vla_row_sum(k->g, param(k, SHAPE2(3, 4)));
}

CASE(col_sum)
{
    VARIANTS(1);
    return vla_col_sum(k->g, param(k, SHAPE2(3, 4)));
}

CASE(expand_cols)
{
    VARIANTS(1);
    return vla_expand_cols(k->g, param(k, SHAPE1(3)), 4);
}

CASE(expand_rows)
{
    VARIANTS(1);
    return vla_expand_rows(k->g, param(k, SHAPE1(3)), 4);
}

CASE(masked_mse)
{
    VARIANTS(1);
    vla_value p = param(k, SHAPE2(3, 4)), t = param(k, SHAPE2(3, 4)), mask = constant(k, SHAPE2(3, 4));
    tensor *m = &k->inputs[k->n_inputs - 1].t;
    for (int64_t i = 0; i < m->n; i++)
        m->f[i] = i % 3 != 1;
    return vla_masked_mse(k->g, p, t, mask).loss;
}

CASE(cross_entropy)
{
    VARIANTS(2);
    vla_value logits = param(k, SHAPE2(4, 5));
    vla_value labels = k->variant ? integers(k, SHAPE1(4), VALUES(-100, -100, -100, -100)) : integers(k, SHAPE1(4), VALUES(2, -100, 0, 4));
    return vla_cross_entropy(k->g, logits, labels).loss;
}

typedef vla_value (*case_fn)(check *k);

#define CASE_OF_DIFF(name) case_##name
#define CASE_OF_LEAF(name) NULL
#define CASE_OF_GRAD(name) NULL
#define CASE_OF_FUSED(name) NULL

static const case_fn CASES[] = {
#define VLA_OP(name, lo, hi, outs, kind, writes) CASE_OF_##kind(name),
#include "ops/ops.def"
#undef VLA_OP
};
_Static_assert(sizeof CASES / sizeof *CASES == VLAI_OP_COUNT, "one row per op, and a case for each differentiable one");

/* loss = sum of y under weights. */
static vla_value weighted_sum(check *k, vla_value y)
{
    int64_t elements = vlai_value(k->g, y)->elements;
    vla_value flat = vla_reshape(k->g, vla_cast(k->g, y, VLA_COMPUTE), 2, (int64_t[]){1, elements});
    return vla_row_sum(k->g, vla_mul(k->g, flat, constant(k, SHAPE2(1, elements))));
}

static double evaluate(check *k, vla_run *run)
{
    vla_error err;
    for (int i = 0; i < k->n_inputs; i++) {
        void *to = vla_run_data(run, k->inputs[i].name); /* NULL: nothing reads it */
        if (to)
            to_memory(&k->inputs[i].t, to, sizeof(double));
    }
    assert_ok(vla_run_execute(run, &err), err);
    return *(double *)vla_run_data(run, "loss");
}

static void check_gradients(check *k, vla_run *run, vla_store *store, const char *what)
{
    (void)evaluate(k, run);
    double *gradient[MAX_PARAMS];
    for (int p = 0; p < k->n_params; p++) { /* copied: the differences run the plan again */
        char name[8];
        snprintf(name, sizeof name, "d%d", p);
        const double *d = vla_run_data(run, name);
        assert_non_null(d);
        gradient[p] = case_alloc(&k->c, (size_t)k->params[p].t.n * sizeof(double));
        memcpy(gradient[p], d, (size_t)k->params[p].t.n * sizeof(double));
    }
    for (int p = 0; p < k->n_params; p++) {
        double *value = vla_store_tensor(store, VLA_STORE_WEIGHT, (size_t)vla_store_find(store, k->params[p].name)).data;
        double largest = 0.1; /* the loss is of order 1 */
        for (int64_t i = 0; i < k->params[p].t.n; i++)
            largest = fmax(largest, fabs(gradient[p][i]));
        for (int64_t i = 0; i < k->params[p].t.n; i++) {
            /* h = 2^-16: the difference errs by h^2 f'''/6 = 4e-11 and by rounding 1e-15/h = 1e-10. */
            double kept = value[i], h = 0x1p-16;
            value[i] = kept + h;
            double above = evaluate(k, run);
            value[i] = kept - h;
            double below = evaluate(k, run);
            value[i] = kept;
            double slope = (above - below) / (2 * h);
            if (!(fabs(slope - gradient[p][i]) <= 1e-7 * largest))
                fail_msg("%s, variant %d: d loss / d %s[%lld] is %.12g, differences give %.12g", what, k->variant,
                         k->params[p].name, (long long)i, gradient[p][i], slope);
        }
    }
}

/* False when the op has no such variant. */
static bool run_case(vlai_op op, int variant)
{
    vla_error err;
    check k = {.variant = variant, .c.state = (uint64_t)op * 100 + (uint64_t)variant};
    assert_ok(vla_graph_create(&k.g, &err), err);
    vla_value y = CASES[op](&k);
    if (y == END_OF_VARIANTS) {
        vla_graph_destroy(k.g);
        vlai_arena_fini(&k.c.arena);
        return false;
    }
    assert_ok(vla_graph_check(k.g, &err), err);
    bool used = false;
    for (size_t n = 0; n < k.g->n_nodes; n++)
        used = used || k.g->nodes[n].op == op;
    if (!used)
        fail_msg("the case of %s does not use it", vlai_ops[op].name);

    vla_value loss = weighted_sum(&k, y);
    vla_graph_name(k.g, loss, "loss");
    assert_ok(vla_graph_backward(k.g, loss, 1, &err), err);
    vla_store *store;
    assert_ok(vla_store_create(&store, &err), err);
    for (int p = 0; p < k.n_params; p++) {
        vla_value d = vla_graph_gradient(k.g, vla_graph_find(k.g, k.params[p].name));
        if (d == VLA_NONE)
            fail_msg("%s, variant %d: operand %s has no gradient", vlai_ops[op].name, variant, k.params[p].name);
        char name[8];
        snprintf(name, sizeof name, "d%d", p);
        vla_graph_name(k.g, vla_scale(k.g, d, 1), name); /* a value of its own: two operands may share theirs */
        assert_ok(vla_store_add(store, k.params[p].name, VLA_COMPUTE, k.params[p].t.rank, k.params[p].t.shape, 0, &err), err);
    }
    assert_ok(vla_store_allocate(store, VLA_FP64, VLA_STORE_PREDICT, &err), err);
    for (int p = 0; p < k.n_params; p++)
        to_memory(&k.params[p].t, vla_store_tensor(store, VLA_STORE_WEIGHT, (size_t)p).data, sizeof(double));

    vla_plan *plan;
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    options.numerics = VLA_FP64;
    assert_ok(vla_plan_build(k.g, &options, &plan, &err), err);
    vla_executor *executor;
    assert_ok(vla_executor_create(1, &executor, &err), err);
    vla_run *run;
    assert_ok(vla_run_create(executor, plan, store, &run, &err), err);
    check_gradients(&k, run, store, vlai_ops[op].name);
    vla_run_destroy(run);
    vla_executor_destroy(executor);
    vla_plan_destroy(plan);
    vla_store_destroy(store);
    vlai_arena_fini(&k.c.arena);
    return true;
}

static void test_gradients(void **state)
{
    (void)state;
    for (int op = 0; op < VLAI_OP_COUNT; op++) {
        if (!CASES[op])
            continue;
        int variants = 0;
        while (run_case((vlai_op)op, variants))
            variants++;
        assert_true(variants > 0);
    }
}

/* Rows that the forward pass reads but whose gradient is asked to be dropped: image and action tokens of an embedding. */
static void test_gather_skip(void **state)
{
    (void)state;
    vla_error err;
    check k = {0};
    assert_ok(vla_graph_create(&k.g, &err), err);
    vla_value x = param(&k, SHAPE2(3, 2)), y = vla_gather_rows(k.g, x, integers(&k, SHAPE1(4), VALUES(1, 2, 1, 0)), 1);
    vla_value loss = weighted_sum(&k, y);
    assert_ok(vla_graph_backward(k.g, loss, 1, &err), err);
    vla_graph_name(k.g, vla_graph_gradient(k.g, x), "dx");
    vla_store *store;
    assert_ok(vla_store_create(&store, &err), err);
    assert_ok(vla_store_add(store, "p0", VLA_COMPUTE, 2, (int64_t[]){3, 2}, 0, &err), err);
    assert_ok(vla_store_allocate(store, VLA_FP64, VLA_STORE_PREDICT, &err), err);
    vla_plan *plan;
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    options.numerics = VLA_FP64;
    vla_graph_name(k.g, loss, "loss");
    assert_ok(vla_plan_build(k.g, &options, &plan, &err), err);
    vla_executor *executor;
    assert_ok(vla_executor_create(1, &executor, &err), err);
    vla_run *run;
    assert_ok(vla_run_create(executor, plan, store, &run, &err), err);
    (void)evaluate(&k, run);
    const double *dx = vla_run_data(run, "dx"), *w = k.inputs[1].t.f;
    assert_true(dx[2] == 0 && dx[3] == 0);                                   /* row 1 is skipped */
    assert_true(dx[0] == w[6] && dx[1] == w[7] && dx[4] == w[2] && dx[5] == w[3]); /* rows 0 and 2 were read once */
    vla_run_destroy(run);
    vla_executor_destroy(executor);
    vla_plan_destroy(plan);
    vla_store_destroy(store);
    vlai_arena_fini(&k.c.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gradients), cmocka_unit_test(test_gather_skip)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
