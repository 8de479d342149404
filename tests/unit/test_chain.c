/* Chains of element-wise operations: joined where they may be, with the bits of the operations one by one. */
#include "test.h"

#include "exec/plan.h"
#include "ops/op.h"
#include "vla/run.h"

#include <string.h>

enum { ROWS = 7, COLS = 13 };

/* n (1 + s) + t, gated, activated, times a factor a row; the sum in between is also a result in the second form. */
static vla_graph *make(bool named)
{
    vla_graph *g;
    vla_error err;
    int64_t shape[2] = {ROWS, COLS};
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value n = vla_graph_input(g, "n", VLA_COMPUTE, 2, shape), s = vla_graph_input(g, "s", VLA_COMPUTE, 2, shape);
    vla_value t = vla_graph_input(g, "t", VLA_PRECISE, 2, shape), f = vla_graph_input(g, "f", VLA_PRECISE, 1, shape);
    vla_value y = vla_add(g, vla_add(g, n, vla_mul(g, n, s)), vla_cast(g, t, VLA_COMPUTE));
    if (named)
        vla_graph_name(g, y, "between");
    y = vla_mul(g, vla_silu(g, y), vla_gelu(g, s));
    y = vla_scale(g, vla_mul_rows(g, vla_cast(g, vla_sub(g, y, n), VLA_PRECISE), f), 0.75);
    vla_graph_name(g, y, "y");
    assert_ok(vla_graph_check(g, &err), err);
    return g;
}

static size_t count_op(const vla_plan *plan, vlai_op op)
{
    size_t count = 0;
    for (size_t n = 0; n < plan->graph->n_nodes; n++)
        count += plan->graph->nodes[n].op == op;
    return count;
}

static void run(bool named, vla_numerics numerics, unsigned fuse, float *y, float *between, size_t *nodes, size_t *chains)
{
    vla_error err;
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    vla_plan *plan;
    vla_executor *ex;
    vla_run *r;
    o.numerics = numerics;
    o.fuse = fuse;
    assert_ok(vla_plan_build(make(named), &o, &plan, &err), err);
    assert_ok(vla_executor_create(1, &ex, &err), err);
    assert_ok(vla_run_create(ex, plan, NULL, &r, &err), err);
    for (int i = 0; i < ROWS * COLS; i++) {
        float values[3] = {(float)(i % 17 - 8) / 3, (float)(i % 11 - 5) / 7, (float)(i % 23 - 11) / 5};
        for (int k = 0; k < 2; k++) {
            uint32_t bits;
            memcpy(&bits, &values[k], 4);
            void *to = vla_run_data(r, k ? "s" : "n");
            if (numerics == VLA_FP32)
                ((float *)to)[i] = values[k];
            else
                ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
        }
        ((float *)vla_run_data(r, "t"))[i] = values[2];
        if (i < ROWS)
            ((float *)vla_run_data(r, "f"))[i] = 0.5f + (float)i;
    }
    assert_ok(vla_run_execute(r, &err), err);
    memcpy(y, vla_run_data(r, "y"), ROWS * COLS * sizeof *y);
    if (named)
        memcpy(between, vla_run_data(r, "between"), ROWS * COLS * vla_dtype_size(numerics == VLA_FP32 ? VLA_F32 : VLA_BF16));
    *nodes = vla_plan_nodes(plan);
    *chains = count_op(plan, VLAI_OP_chain);
    vla_run_destroy(r);
    vla_executor_destroy(ex);
    vla_plan_destroy(plan);
}

static void same_bits(void **state)
{
    (void)state;
    for (int named = 0; named < 2; named++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            vla_numerics numerics = bf16 ? VLA_BF16_MASTER : VLA_FP32;
            float y[2][ROWS * COLS], between[2][ROWS * COLS] = {{0}};
            size_t nodes[2], chains[2];
            run(named, numerics, 0, y[0], between[0], &nodes[0], &chains[0]);
            run(named, numerics, VLA_FUSE_MODEL, y[1], between[1], &nodes[1], &chains[1]);
            assert_int_equal(chains[0], 0);
            assert_int_equal(chains[1], named ? 2 : 1); /* a result in between ends a chain */
            assert_int_equal(nodes[1], chains[1]);
            assert_true(y[0][5] < 0 || y[0][5] > 0);
            assert_memory_equal(y[0], y[1], sizeof y[0]);
            assert_memory_equal(between[0], between[1], sizeof between[0]);
        }
}

/* Thirteen steps do not fit into one chain, and a value read twice stays. */
static void limits(void **state)
{
    (void)state;
    vla_error err;
    vla_graph *g;
    vla_plan *plan;
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.fuse = VLA_FUSE_MODEL;
    assert_ok(vla_graph_create(&g, &err), err);
    vla_value x = vla_graph_input(g, "x", VLA_PRECISE, 1, (int64_t[]){5});
    for (int i = 0; i < VLAI_CHAIN_STEPS + 1; i++)
        x = vla_scale(g, x, 1.5);
    vla_value twice = vla_silu(g, x);
    vla_graph_name(g, vla_mul(g, twice, vla_gelu(g, twice)), "y");
    assert_ok(vla_plan_build(g, &o, &plan, &err), err);
    for (size_t n = 0; n < plan->graph->n_nodes; n++)
        if (plan->graph->nodes[n].op == VLAI_OP_chain)
            assert_in_range(plan->graph->nodes[n].attrs.chain.n, 2, VLAI_CHAIN_STEPS);
    assert_true(count_op(plan, VLAI_OP_chain) >= 2 && vla_plan_nodes(plan) < VLAI_CHAIN_STEPS + 4);
    vla_plan_destroy(plan);
}

/* A factor a row that dies in a chain is not what the result is written over, however many bytes both have; a matrix is. */
static void in_place(void **state)
{
    (void)state;
    for (int64_t cols = 1; cols < 5; cols++)
        for (int matrix = 0; matrix < 2; matrix++) {
            vla_error err;
            vla_graph *g;
            vla_plan *plan;
            vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
            o.numerics = VLA_BF16_MASTER;
            o.fuse = VLA_FUSE_MODEL;
            o.layout = VLA_MEMORY_LIFETIMES;
            assert_ok(vla_graph_create(&g, &err), err);
            vla_value n = vla_graph_input(g, "n", VLA_COMPUTE, 2, (int64_t[]){ROWS, cols}), f = vla_graph_input(g, "f", VLA_PRECISE, 2, (int64_t[]){ROWS, 3});
            vla_value x = matrix ? vla_concat_rows(g, vla_slice_rows(g, n, 3, 4), vla_slice_rows(g, n, 0, 3)) : n;
            vla_graph_name(g, vla_scale(g, vla_mul_rows(g, x, vla_row_sum(g, f)), 0.75), "y");
            assert_ok(vla_plan_build(g, &o, &plan, &err), err);
            const vla_graph *made = plan->graph;
            const vlai_node *chain = &made->nodes[made->n_nodes - 1];
            assert_int_equal(chain->op, VLAI_OP_chain);
            assert_int_equal(vlai_value(made, chain->inputs[1])->elements, ROWS);
            assert_int_equal(vlai_value(made, chain->inputs[1])->dtype, VLA_F32);
            int32_t root = plan->memory.root[chain->outputs[0]];
            assert_true(root != plan->memory.root[chain->inputs[1]]);
            assert_int_equal(root == plan->memory.root[chain->inputs[0]], matrix);
            vla_plan_destroy(plan);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits), cmocka_unit_test(limits), cmocka_unit_test(in_place)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
