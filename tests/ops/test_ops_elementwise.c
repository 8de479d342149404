/* Elementwise kernels, norms and plain sums against the formulas of vla/graph.h. */
#include "kernel_test.h"

static const int64_t SHAPES[][2] = {{1, 1}, {3, 5}, {0, 4}, {7, 33}, {257, 130}, {600, 64}, {5, 40000}, {2, 150000}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double phi(double x)
{
    return 0.5 * erfc(-x / sqrt(2.0));
}

static double f_add(double a, double b) { return a + b; }
static double f_sub(double a, double b) { return a - b; }
static double f_mul(double a, double b) { return a * b; }
static double f_scale(double a, double b) { return (void)b, a * -1.5; }
static double f_same(double a, double b) { return (void)b, a; }
static double f_silu(double a, double b) { return (void)b, a * sigmoid(a); }
static double f_silu_grad(double a, double b) { return a * (sigmoid(b) + b * sigmoid(b) * (1 - sigmoid(b))); }
static double f_gelu(double a, double b) { return (void)b, a * phi(a); }
static double f_gelu_grad(double a, double b) { return a * (phi(b) + b * exp(-b * b / 2) / sqrt(2 * acos(-1.0))); }
static double f_fill(double a, double b) { return (void)a, (void)b, -1.5; }

#define ROW(op, operands) {#op, VLAI_OP_##op, {vlai_cpu_##op##_float, vlai_cpu_##op##_double}, operands, f_##op}
#define ROW_AS(op, operands, f) {#op, VLAI_OP_##op, {vlai_cpu_##op##_float, vlai_cpu_##op##_double}, operands, f}

static void test_elementwise(void **state)
{
    (void)state;
    struct {
        const char *name;
        vlai_op op;
        vlai_cpu_fn fn[2];
        int operands;
        double (*f)(double, double);
    } rows[] = {
        ROW(add, 2), ROW(sub, 2), ROW(mul, 2), ROW(scale, 1), ROW_AS(cast, 1, f_same), ROW_AS(stop_gradient, 1, f_same),
        ROW_AS(reshape, 1, f_same), ROW(silu, 1), ROW(silu_grad, 2), ROW(gelu, 1), ROW(gelu_grad, 2), ROW(fill, 0),
    };
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (int s = 0; s < N_SHAPES; s++) {
            cases c = {.state = r * 100 + (uint64_t)s};
            tensor in[2] = {random_tensor(&c, 2, SHAPES[s]), random_tensor(&c, 2, SHAPES[s])};
            tensor y = result_tensor(&c, 2, SHAPES[s]);
            for (int64_t i = 0; i < y.n; i++) {
                in[0].f[i] *= 8; /* reaches the tails of the activations */
                in[1].f[i] *= 8;
                y.f[i] = rows[r].f(in[0].f[i], in[1].f[i]);
            }
            vlai_node node = {.op = rows[r].op, .attrs.fill.value = -1.5};
            check_kernel(rows[r].name, rows[r].fn, &node, in, rows[r].operands, &y, 1, 2e-6); /* x (1 - s): 16 roundings of 1 - s */
            vlai_arena_fini(&c.arena);
        }
}

/* Values at which exp overflows, vanishes or is undefined. */
static void test_extremes(void **state)
{
    (void)state;
    float x[6] = {-INFINITY, -100, -88, 89, 1e30f, NAN}, y[6];
    vlai_node node = {.op = VLAI_OP_silu};
    vlai_cpu_call call = {.node = &node,
                          .in[0] = {x, VLA_F32, 1, {6}, 6},
                          .out[0] = {y, VLA_F32, 1, {6}, 6}};
    vlai_cpu_silu_float(&call);
    assert_true(isnan(y[0])); /* -inf / inf, as in the reference */
    assert_true(fabsf(y[1]) < 1e-35f && fabsf(y[2]) < 1e-35f);
    assert_true(y[3] == 89 && y[4] == 1e30f);
    assert_true(isnan(y[5]));
}

/* GELU's formula is x Phi(x), its slope Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi): where they overflow, vanish or are undefined. */
static void test_extremes_of_gelu(void **state)
{
    (void)state;
    enum { N = 10 };
    static const double at[N] = {-INFINITY, INFINITY, NAN, -1e30, 1e30, -40, 40, 1e-40, -0.0, 0.0};
    static const double value[N] = {NAN, INFINITY, NAN, -0.0, 1e30, -0.0, 40, 5e-41, -0.0, 0.0};
    static const double slope[N] = {NAN, NAN, NAN, 0, 1, 0, 1, 0.5, 0.5, 0.5};
    float x[N], one[N], y[2][N];
    double wide[N], wide_one[N], wide_y[2][N];
    for (int i = 0; i < N; i++) {
        wide[i] = at[i];
        x[i] = (float)at[i];
        wide_one[i] = one[i] = 1;
    }
    vlai_node node[2] = {{.op = VLAI_OP_gelu}, {.op = VLAI_OP_gelu_grad}};
    vlai_cpu_call calls[4];
    for (int i = 0; i < 4; i++) {
        const int grad = i & 1, is_wide = i > 1;
        void *from = is_wide ? (void *)wide : x, *dy = is_wide ? (void *)wide_one : one;
        vla_dtype type = is_wide ? VLA_F64 : VLA_F32;
        calls[i] = (vlai_cpu_call){.node = &node[grad], .in[0] = {grad ? dy : from, type, 1, {N}, N}, .in[1] = {from, type, 1, {N}, N},
                                   .out[0] = {is_wide ? (void *)wide_y[grad] : y[grad], type, 1, {N}, N}};
    }
    vlai_cpu_gelu_float(&calls[0]);
    vlai_cpu_gelu_grad_float(&calls[1]);
    vlai_cpu_gelu_double(&calls[2]);
    vlai_cpu_gelu_grad_double(&calls[3]);
    for (int i = 0; i < 4 * N; i++) {
        const int grad = i / N & 1, k = i % N;
        double want = grad ? slope[k] : value[k], got = i / N > 1 ? wide_y[grad][k] : (double)y[grad][k];
        want = i / N > 1 ? want : (double)(float)want;
        /* 2^-149: a denormal of fp32 is off by half of it, and -40 Phi(-40) = -1e-348 rounds to 0 in fp64 too */
        if (isnan(want) ? !isnan(got) : !(got == want || fabs(got - want) <= 0x1p-149) || (want == 0 && !grad && !signbit(got) != !signbit(want)))
            fail_msg("%s of %g: %g, wanted %g", grad ? "slope" : "gelu", at[k], got, want);
    }
}

/* Where 1 + erf cancels: an error of the argument of 2^-24 is 2 z^2 = x^2 times that in erfc. */
static void test_tail_of_gelu(void **state)
{
    (void)state;
    float x[3] = {-1, -4.71875f, -8}, y[3];
    vlai_node node = {.op = VLAI_OP_gelu};
    vlai_cpu_call call = {.node = &node, .in[0] = {x, VLA_F32, 1, {3}, 3}, .out[0] = {y, VLA_F32, 1, {3}, 3}};
    vlai_cpu_gelu_float(&call);
    for (int i = 0; i < 3; i++)
        assert_true(fabs((double)y[i] / ((double)x[i] * phi((double)x[i])) - 1) <= 0x1p-24 * (double)(x[i] * x[i] + 8));
}

static void test_swiglu(void **state)
{
    (void)state;
    for (int s = 0; s < N_SHAPES; s++) {
        int64_t n = SHAPES[s][0], width = SHAPES[s][1];
        cases c = {.state = (uint64_t)s};
        tensor dy = random_tensor(&c, SHAPE2(n, width)), x = random_tensor(&c, SHAPE2(n, 2 * width));
        tensor y = result_tensor(&c, SHAPE2(n, width)), dx = result_tensor(&c, SHAPE2(n, 2 * width));
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < width; i++) {
                double gate = x.f[r * 2 * width + i], up = x.f[r * 2 * width + width + i], d = dy.f[r * width + i];
                y.f[r * width + i] = f_silu(gate, 0) * up;
                dx.f[r * 2 * width + i] = f_silu_grad(d * up, gate);
                dx.f[r * 2 * width + width + i] = d * f_silu(gate, 0);
            }
        vlai_node node = {.op = VLAI_OP_swiglu};
        CHECK_KERNEL(swiglu, &node, &x, 1, &y, 1, 5e-7);
        tensor in[2] = {dy, x};
        node.op = VLAI_OP_swiglu_grad;
        CHECK_KERNEL(swiglu_grad, &node, in, 2, &dx, 1, 1e-6);
        vlai_arena_fini(&c.arena);
    }
}

/* In bf16, silu(gate) is rounded before the product: 1.0 * silu(2.0) is silu(2.0) to 8 bits. */
static void test_swiglu_bf16(void **state)
{
    (void)state;
    float x[2] = {2, 1}, y, dy = 1, dx[2];
    vlai_node node = {.op = VLAI_OP_swiglu};
    vlai_cpu_call call = {.node = &node, .in[0] = {x, VLA_BF16, 2, {1, 2}, 2}, .out[0] = {&y, VLA_BF16, 2, {1, 1}, 1}};
    vlai_cpu_swiglu_float(&call);
    float rounded = vlai_bf16_to_float(vlai_bf16_from_float((float)f_silu(2, 0)));
    assert_true(y == rounded && fabs((double)rounded - f_silu(2, 0)) > 1e-4);
    call = (vlai_cpu_call){.node = &node,
                           .in = {{&dy, VLA_BF16, 2, {1, 1}, 1}, {x, VLA_BF16, 2, {1, 2}, 2}},
                           .out[0] = {dx, VLA_BF16, 2, {1, 2}, 2}};
    vlai_cpu_swiglu_grad_float(&call);
    assert_true(dx[1] == rounded);
}

static void test_rms_norm(void **state)
{
    (void)state;
    for (int s = 0; s < 2 * N_SHAPES; s++) {
        int64_t n = SHAPES[s / 2][0], cols = SHAPES[s / 2][1];
        bool weighted = s & 1;
        double eps = 1e-3;
        cases c = {.state = (uint64_t)s};
        tensor dy = random_tensor(&c, SHAPE2(n, cols)), x = random_tensor(&c, SHAPE2(n, cols));
        tensor w = weighted ? random_tensor(&c, SHAPE1(cols)) : (tensor){0};
        tensor y = result_tensor(&c, SHAPE2(n, cols)), rstd = result_tensor(&c, SHAPE1(n));
        tensor dx = result_tensor(&c, SHAPE2(n, cols)), dw = result_tensor(&c, SHAPE1(cols));
        for (int64_t r = 0; r < n; r++) {
            const double *xr = x.f + r * cols, *dyr = dy.f + r * cols;
            long double square = 0, dot = 0; /* long sums of products of short fractions err to one side in double */
            for (int64_t i = 0; i < cols; i++)
                square += (long double)xr[i] * xr[i];
            double q = 1 / sqrt((double)square / (double)cols + eps);
            /* The gradient kernels are given rstd as stored; one that is exact in float keeps both instances equal. */
            rstd.f[r] = q;
            double kept = (double)(float)q;
            for (int64_t i = 0; i < cols; i++)
                dot += (long double)dyr[i] * (weighted ? w.f[i] : 1) * xr[i];
            for (int64_t i = 0; i < cols; i++) {
                y.f[r * cols + i] = xr[i] * q * (weighted ? w.f[i] : 1);
                dx.f[r * cols + i] = kept * dyr[i] * (weighted ? w.f[i] : 1) - xr[i] * kept * kept * kept * (double)dot / (double)cols;
                dw.f[i] += dyr[i] * xr[i] * kept;
            }
        }
        vlai_node node = {.op = VLAI_OP_rms_norm, .attrs.norm.eps = eps};
        tensor in[2] = {x, w}, out[2] = {y, rstd};
        CHECK_KERNEL(rms_norm, &node, in, 2, out, 2, 5e-7);
        for (int64_t r = 0; r < n; r++)
            rstd.f[r] = (double)(float)rstd.f[r];
        tensor grad_in[4] = {dy, x, rstd, w};
        node.op = VLAI_OP_rms_norm_grad;
        /* One column: the two terms cancel to eps / x^2 of themselves. */
        CHECK_KERNEL(rms_norm_grad, &node, grad_in, 4, &dx, 1, cols == 1 ? 1e-5 : 1e-6);
        node.op = VLAI_OP_rms_norm_grad_weight;
        CHECK_KERNEL(rms_norm_grad_weight, &node, grad_in, 3, &dw, 1, 5e-7);
        vlai_arena_fini(&c.arena);
    }
}

static void test_sums(void **state)
{
    (void)state;
    for (int s = 0; s < N_SHAPES; s++) {
        int64_t n = SHAPES[s][0], cols = SHAPES[s][1];
        cases c = {.state = (uint64_t)s};
        tensor x = random_tensor(&c, SHAPE2(n, cols)), over_cols = result_tensor(&c, SHAPE1(n));
        tensor over_rows = result_tensor(&c, SHAPE1(cols));
        for (int64_t i = 0; i < x.n; i++) {
            over_cols.f[i / cols] += x.f[i];
            over_rows.f[i % cols] += x.f[i];
        }
        vlai_node node = {.op = VLAI_OP_row_sum};
        CHECK_KERNEL(row_sum, &node, &x, 1, &over_cols, 1, 2e-7);
        node.op = VLAI_OP_col_sum;
        CHECK_KERNEL(col_sum, &node, &x, 1, &over_rows, 1, 2e-7);
        vlai_arena_fini(&c.arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_elementwise), cmocka_unit_test(test_extremes), cmocka_unit_test(test_extremes_of_gelu), cmocka_unit_test(test_tail_of_gelu), cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_swiglu_bf16), cmocka_unit_test(test_rms_norm), cmocka_unit_test(test_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
