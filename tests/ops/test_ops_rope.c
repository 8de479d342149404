/* Rotary tables, rotation and the sinusoid. */
#include "kernel_test.h"

/* The tables in single precision must round where PyTorch's expression rounds: each step is a float here. */
static void table_row(const vla_rope_options *o, const int32_t *position, int64_t n, int64_t row, bool narrow, double *c,
                      double *s)
{
    int pair = 0;
    for (int a = 0; a < o->axes; a++)
        for (int k = 0; k < o->sections[a]; k++, pair++) {
            int j = o->restart ? k : pair, span = o->restart ? o->sections[a] : o->half;
            double angle;
            if (narrow) {
                float exponent = (float)(2 * j) / (float)(2 * span), power = (float)pow(o->base, (double)exponent);
                float frequency = 1.0f / power;
                angle = (double)((float)position[a * n + row] * frequency);
            } else {
                angle = position[a * n + row] * pow(o->base, -(double)j / span);
            }
            c[row * o->half + pair] = cos(angle);
            s[row * o->half + pair] = sin(angle);
        }
}

static void test_tables(void **state)
{
    (void)state;
    static const vla_rope_options options[] = {
        {.base = 1e6, .half = 64, .axes = 3, .sections = {16, 24, 24}},
        {.base = 1e4, .half = 40, .axes = 2, .restart = 1, .sections = {20, 20}},
        {.base = 1e4, .half = 1, .axes = 1, .sections = {1}},
    };
    static const int64_t lengths[] = {1, 0, 77, 1000};
    for (int r = 0; r < 3; r++)
        for (int l = 0; l < 4; l++) {
            const vla_rope_options *o = &options[r];
            int64_t n = lengths[l];
            cases c = {.state = (uint64_t)(r * 10 + l)};
            tensor position = index_tensor(&c, SHAPE2(o->axes, n));
            for (int64_t i = 0; i < position.n; i++)
                position.i[i] = (int32_t)random_below(&c, 300);
            tensor out[2] = {result_tensor(&c, SHAPE2(n, o->half)), result_tensor(&c, SHAPE2(n, o->half))};
            vlai_node node = {.op = VLAI_OP_rope_table, .attrs.rope_table = *o};
            /* The float tables: 1 ulp of values up to 1. Angles reach 300, so that a wrong rounding of them shows as up
             * to 300 * 2^-24 = 2e-5. */
            vlai_cpu_fn only_float[2] = {vlai_cpu_rope_table_float, vlai_cpu_rope_table_double};
            for (int64_t row = 0; row < n; row++)
                table_row(o, position.i, n, row, false, out[0].f, out[1].f);
            check_kernel("rope_table", only_float, &node, &position, 1, out, 2, 3e-5);
            float *cosine = case_alloc(&c, (size_t)out[0].n * 4), *sine = case_alloc(&c, (size_t)out[0].n * 4);
            for (int64_t row = 0; row < n; row++)
                table_row(o, position.i, n, row, true, out[0].f, out[1].f);
            vlai_cpu_call call = {.node = &node,
                                  .in[0] = {position.i, VLA_I32, 2, {o->axes, n}, position.n},
                                  .out = {{cosine, VLA_F32, 2, {n, o->half}, out[0].n}, {sine, VLA_F32, 2, {n, o->half}, out[1].n}},
                                  .workspace = case_alloc(&c, 64 * 16)};
            vlai_cpu_rope_table_float(&call);
            for (int64_t i = 0; i < out[0].n; i++) {
                assert_true(fabs((double)cosine[i] - out[0].f[i]) <= 6e-8);
                assert_true(fabs((double)sine[i] - out[1].f[i]) <= 6e-8);
            }
            vlai_arena_fini(&c.arena);
        }
}

static void test_rotation(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{1, 1, 2}, {5, 3, 16}, {0, 2, 8}, {130, 4, 80}, {1000, 2, 6}}; /* rows, heads, dim */
    for (int s = 0; s < 10; s++) {
        int64_t n = shapes[s / 2][0], heads = shapes[s / 2][1], dim = shapes[s / 2][2], half = dim / 2;
        int inverse = s & 1;
        cases c = {.state = (uint64_t)s};
        tensor in[3] = {random_tensor(&c, SHAPE2(n, heads * dim)), random_tensor(&c, SHAPE2(n, half)),
                        random_tensor(&c, SHAPE2(n, half))};
        tensor y = result_tensor(&c, SHAPE2(n, heads * dim));
        for (int64_t r = 0; r < n; r++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t i = 0; i < half; i++) {
                    int64_t at = r * heads * dim + h * dim + i;
                    double cosine = in[1].f[r * half + i], sine = (inverse ? -1 : 1) * in[2].f[r * half + i];
                    y.f[at] = in[0].f[at] * cosine - in[0].f[at + half] * sine;
                    y.f[at + half] = in[0].f[at + half] * cosine + in[0].f[at] * sine;
                }
        vlai_node node = {.op = VLAI_OP_rope, .attrs.rope = {.head_dim = (int)dim, .inverse = inverse}};
        CHECK_KERNEL(rope, &node, in, 3, &y, 1, 2e-7);
        vlai_arena_fini(&c.arena);
    }
}

static void test_sinusoid(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 2}, {3, 64}, {0, 8}, {100, 1024}};
    for (int s = 0; s < 4; s++) {
        int64_t n = shapes[s][0], half = shapes[s][1] / 2;
        cases c = {.state = (uint64_t)s};
        tensor t = random_tensor(&c, SHAPE1(n)), y = result_tensor(&c, SHAPE2(n, 2 * half));
        for (int64_t r = 0; r < n; r++)
            for (int64_t k = 0; k < half; k++) {
                double f = half > 1 ? pow(1e4, -(double)k / (double)(half - 1)) : 1;
                y.f[r * 2 * half + k] = sin(t.f[r] * f);
                y.f[r * 2 * half + half + k] = cos(t.f[r] * f);
            }
        vlai_node node = {.op = VLAI_OP_sinusoid, .attrs.sinusoid = {.dim = (int)(2 * half), .period = 1e4}};
        CHECK_KERNEL(sinusoid, &node, &t, 1, &y, 1, 1e-6);
        vlai_arena_fini(&c.arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_rotation),
        cmocka_unit_test(test_sinusoid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
