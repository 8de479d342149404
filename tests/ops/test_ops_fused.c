/* The operations that the fuse pass makes, against the expressions that their rows name. Those of matmul and of attention
 * stand with the plain ones. */
#include "kernel_test.h"

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* The sums of x's columns, into y. */
static void column_sums(const tensor *x, tensor *y)
{
    for (int64_t i = 0; i < x->n; i++)
        y->f[i % y->n] += x->f[i];
}

static void test_swiglu_backward(void **state)
{
    (void)state;
    static const int64_t rows[] = {0, 1, 3, 70}, widths[] = {1, 7, 64, 1027};
    for (int r = 0; r < 4; r++)
        for (int w = 0; w < 4; w++) {
            cases c = {.state = (uint64_t)(r * 10 + w)};
            int64_t n = rows[r], width = widths[w];
            tensor dy = random_tensor(&c, SHAPE2(n, width)), x = random_tensor(&c, SHAPE2(n, 2 * width));
            tensor out[3] = {result_tensor(&c, SHAPE2(n, 2 * width)), result_tensor(&c, SHAPE2(n, width)), result_tensor(&c, SHAPE1(2 * width))};
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < width; j++) {
                    double gate = x.f[i * 2 * width + j], up = x.f[i * 2 * width + width + j], d = dy.f[i * width + j], s = sigmoid(gate);
                    out[0].f[i * 2 * width + j] = d * up * (s + gate * s * (1 - s));
                    out[0].f[i * 2 * width + width + j] = d * gate * s;
                    out[1].f[i * width + j] = gate * s * up;
                }
            column_sums(&out[0], &out[2]);
            tensor in[2] = {dy, x};
            for (int mode = 0; mode < 4; mode++) {
                vlai_node node = {.op = VLAI_OP_swiglu_backward, .attrs.swiglu = {.again = mode & 1, .sums = mode & 2 ? VLA_F32 : VLA_DTYPE_NONE}};
                tensor results[3];
                int n_out = 0;
                results[n_out++] = out[0];
                if (mode & 1)
                    results[n_out++] = out[1];
                if (mode & 2)
                    results[n_out++] = out[2];
                CHECK_KERNEL(swiglu_backward, &node, in, 2, results, n_out, 1e-6);
            }
            vlai_arena_fini(&c.arena);
        }
}

/* The sums of results that will be stored as bf16 are those of the stored values, as a col_sum reading them would make. */
static void test_sums_of_rounded(void **state)
{
    (void)state;
    enum { ROWS = 600, WIDTH = 3, COLS = 2 * WIDTH };
    static float dy[ROWS * WIDTH], x[ROWS * COLS], dx[ROWS * COLS], sums[COLS], want[COLS];
    static double partial[2 * COLS];
    cases c = {.state = 3};
    for (int i = 0; i < ROWS * COLS; i++) {
        x[i] = vlai_bf16_to_float(vlai_bf16_from_float((float)random_value(&c)));
        dy[i % (ROWS * WIDTH)] = vlai_bf16_to_float(vlai_bf16_from_float((float)random_value(&c)));
    }
    vlai_node node = {.op = VLAI_OP_swiglu_backward, .n_inputs = 2, .n_outputs = 2, .attrs.swiglu.sums = VLA_BF16};
    vlai_cpu_call call = {.node = &node, .in = {{dy, VLA_BF16, 2, {ROWS, WIDTH}, ROWS * WIDTH}, {x, VLA_BF16, 2, {ROWS, COLS}, ROWS * COLS}},
                          .out = {{dx, VLA_BF16, 2, {ROWS, COLS}, ROWS * COLS}, {sums, VLA_BF16, 1, {COLS}, COLS}}, .workspace = partial};
    vlai_cpu_swiglu_backward_float(&call);
    bool differs = false;
    for (int i = 0; i < ROWS * COLS; i++) {
        float rounded = vlai_bf16_to_float(vlai_bf16_from_float(dx[i]));
        differs = differs || rounded != dx[i];
        dx[i] = rounded;
    }
    vlai_cpu_call apart = {.node = &(vlai_node){.op = VLAI_OP_col_sum, .n_inputs = 1, .n_outputs = 1}, .in[0] = call.out[0],
                           .out[0] = {want, VLA_BF16, 1, {COLS}, COLS}, .workspace = partial};
    vlai_cpu_col_sum_float(&apart);
    assert_true(differs);
    assert_memory_equal(sums, want, sizeof want);
}

static void check_norm(int64_t n, int64_t cols, bool with_weight, bool with_add)
{
    cases c = {.state = (uint64_t)(n * 10000 + cols)};
    tensor dy = random_tensor(&c, SHAPE2(n, cols)), x = random_tensor(&c, SHAPE2(n, cols)), rstd = random_tensor(&c, SHAPE1(n));
    tensor w = random_tensor(&c, SHAPE1(cols)), add = random_tensor(&c, SHAPE2(n, cols));
    tensor out[3] = {result_tensor(&c, SHAPE2(n, cols)), result_tensor(&c, SHAPE1(cols)), result_tensor(&c, SHAPE2(n, cols))}, sums = result_tensor(&c, SHAPE1(cols));
    for (int64_t i = 0; i < n; i++) {
        double sum = 0, r = rstd.f[i];
        for (int64_t j = 0; j < cols; j++)
            sum += (with_weight ? w.f[j] : 1) * dy.f[i * cols + j] * x.f[i * cols + j];
        for (int64_t j = 0; j < cols; j++) {
            int64_t at = i * cols + j;
            out[0].f[at] = r * (with_weight ? w.f[j] : 1) * dy.f[at] - x.f[at] * r * r * r * sum / (double)cols + (with_add ? add.f[at] : 0);
            out[1].f[j] += dy.f[at] * x.f[at] * r;
            out[2].f[at] = x.f[at] * r * w.f[j];
        }
    }
    if (!with_weight)
        w.f = NULL;
    if (!with_add)
        add.f = NULL;
    vlai_node node = {.op = VLAI_OP_rms_norm_backward};
    tensor in[5] = {dy, x, rstd, w, add};
    column_sums(&out[0], &sums);
    for (int again = 0; again <= with_weight; again++)
        for (int with_sums = 0; with_sums < 2; with_sums++) {
            tensor results[4] = {out[0], out[1], out[2], sums};
            int n_out = with_weight ? 2 + again : 1;
            node.attrs.norm.again = again;
            node.attrs.norm.sums = with_sums ? VLA_F32 : VLA_DTYPE_NONE;
            results[n_out] = sums;
            CHECK_KERNEL(rms_norm_backward, &node, in, with_add ? 5 : 4, results, n_out + with_sums, 2e-6);
        }
    vlai_arena_fini(&c.arena);
}

static void test_norm_backward(void **state)
{
    (void)state;
    static const int64_t rows[] = {0, 1, 5, 1100}, widths[] = {1, 7, 64, 200};
    for (int r = 0; r < 4; r++)
        for (int w = 0; w < 4; w++)
            for (int mode = 0; mode < 4; mode++)
                check_norm(rows[r], widths[w], mode & 1, mode >> 1);
}

/* y = x with the first heads of a row rotated by its angle, back where sign is -1; none: zeros. */
static void rotated(const double *x, const double *c, const double *s, double *y, int64_t cols, int dim, int heads, int sign)
{
    for (int64_t j = 0; x && j < cols; j++) {
        int64_t half = dim / 2, in = j % dim;
        if (j >= (int64_t)heads * dim)
            y[j] = x[j];
        else
            y[j] = in < half ? x[j] * c[in] - sign * x[j + half] * s[in] : x[j] * c[in - half] + sign * x[j - half] * s[in - half];
    }
}

static void check_rope(int64_t rows_a, int64_t rows_b, int dim, int heads, int64_t rest, bool routed)
{
    cases c = {.state = (uint64_t)(rows_a * 1000 + rows_b * 10 + dim)};
    int64_t n = rows_a + rows_b, cols = (int64_t)heads * dim + rest, half = dim / 2;
    tensor a = random_tensor(&c, SHAPE2(rows_a, cols)), b = random_tensor(&c, SHAPE2(rows_b, cols)), y = result_tensor(&c, SHAPE2(n, cols));
    tensor map = index_tensor(&c, SHAPE1(n)), at_a = index_tensor(&c, SHAPE1(rows_a)), at_b = index_tensor(&c, SHAPE1(rows_b));
    tensor cosine = random_tensor(&c, SHAPE2(n, half)), sine = random_tensor(&c, SHAPE2(n, half));
    int64_t next[2] = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        bool second = routed && (next[0] == rows_a || (next[1] < rows_b && random_below(&c, 2)));
        int64_t row = next[second]++;
        map.i[i] = (int32_t)(second ? -1 - row : row);
        (second ? at_b : at_a).i[row] = (int32_t)i;
    }
    if (routed && n > 2) {
        map.i[1] = (int32_t)(rows_a + 5); /* outside: counts as none */
        if (rows_a)
            at_a.i[0] = -3;
    }
    vlai_node node = {.op = VLAI_OP_qkv_rope, .attrs.rope = {.head_dim = dim, .heads = heads}};
    tensor in[5] = {a, b, map, cosine, sine};
    for (int64_t i = 0; i < n; i++) {
        int64_t row = map.i[i], other = -1 - row;
        const double *x = row >= 0 ? (row < rows_a ? a.f + row * cols : NULL) : other < rows_b ? b.f + other * cols : NULL;
        rotated(x, cosine.f + i * half, sine.f + i * half, y.f + i * cols, cols, dim, heads, 1);
    }
    if (!routed) {
        in[1] = in[2] = (tensor){0};
    }
    CHECK_KERNEL(qkv_rope, &node, in, 5, &y, 1, 1e-6);

    tensor d = random_tensor(&c, SHAPE2(n, cols)), out[2] = {result_tensor(&c, SHAPE2(rows_a, cols)), result_tensor(&c, SHAPE2(rows_b, cols))};
    for (int64_t i = 0; i < n; i++) {
        bool second = i >= rows_a;
        int64_t at = second ? i - rows_a : i, row = routed ? (second ? at_b : at_a).i[at] : i;
        if (row >= 0 && row < n)
            rotated(d.f + row * cols, cosine.f + row * half, sine.f + row * half, out[second].f + at * cols, cols, dim, heads, -1);
    }
    node.op = VLAI_OP_qkv_rope_grad;
    tensor grad_in[5] = {d, cosine, sine, at_a, at_b};
    tensor sums[2] = {result_tensor(&c, SHAPE1(cols)), result_tensor(&c, SHAPE1(cols))};
    for (int k = 0; k < 2; k++)
        column_sums(&out[k], &sums[k]);
    for (int mode = 0; mode < (routed ? 4 : 2); mode++) { /* sums of the first, of the second */
        tensor results[4] = {out[0], out[1]};
        int n_out = routed ? 2 : 1;
        for (int k = 0; k < 2; k++) {
            node.attrs.rope.sums[k] = mode >> k & 1 ? VLA_F32 : VLA_DTYPE_NONE;
            if (mode >> k & 1)
                results[n_out++] = sums[k];
        }
        CHECK_KERNEL(qkv_rope_grad, &node, grad_in, routed ? 5 : 3, results, n_out, 1e-6);
    }
    vlai_arena_fini(&c.arena);
}

static void test_rope(void **state)
{
    (void)state;
    static const int dims[] = {2, 10, 80, 128};
    for (int d = 0; d < 4; d++) {
        check_rope(37, 0, dims[d], 3, dims[d], false);
        check_rope(1, 0, dims[d], 1, 0, false);
        check_rope(0, 0, dims[d], 2, 5, false);
        check_rope(33, 9, dims[d], 3, dims[d], true);
        check_rope(0, 7, dims[d], 2, 3, true);
        check_rope(300, 40, dims[d], 2, 1, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_swiglu_backward), cmocka_unit_test(test_sums_of_rounded),
                                       cmocka_unit_test(test_norm_backward), cmocka_unit_test(test_rope)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
