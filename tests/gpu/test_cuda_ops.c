/* Every operation on the device against its CPU twin, at awkward shapes (tests/gpu/cuda_test.h says what is wanted).
 *
 *     test_cuda_ops [--list] [--short] [NAME[:I/N]...]      parts are families of operations, their cases can be shared out (gpu/parts.h)
 *
 * Prints "N passed, N failed"; exit code 0 when nothing failed. */
#include "gpu/cuda_test.h"

#include "base/time.h"
#include "vendor/cublaslt.h"

static const vla_dtype REAL[2] = {VLA_BF16, VLA_F32};
#define EACH_TYPE(t) for (int t##_ = 0; t##_ < 2; t##_++) for (vla_dtype t = REAL[t##_], *once_ = &t; once_; once_ = NULL)
#define EACH(type, name, ...)                                                                                          \
    for (const type *name##_ = (const type[]){__VA_ARGS__}, *name##_end_ = name##_ + sizeof((const type[]){__VA_ARGS__}) / sizeof(type); \
         name##_ < name##_end_; name##_++)                                                                             \
        for (type name = *name##_, *name##_once_ = &name; name##_once_; name##_once_ = NULL)

static const vlai_attrs none;

/* h or none, sums or none, over x or not. */
static void swiglu_backward(vlai_attrs a, tolerance within, vla_dtype t, int64_t rows, int64_t width)
{
    for (int mode = 0; mode < 4; mode++) {
        tensor results[3] = {result(t, SHAPE2(rows, 2 * width))};
        int n = 1, again = mode & 1, summed = mode >> 1;
        a.swiglu.again = again;
        a.swiglu.sums = summed ? t : VLA_DTYPE_NONE;
        if (again)
            results[n++] = result(t, SHAPE2(rows, width));
        if (summed)
            results[n++] = result(t, SHAPE1(2 * width));
        CHECK(swiglu_backward, a, within, OPERANDS(reals(t, SHAPE2(rows, width)), reals_of(t, 4, SHAPE2(rows, 2 * width))),
              .out = {results[0], results[1], results[2]}, .n_out = n, .over = 2, .summed = {0, summed && !again, summed && again});
    }
}

static void elementwise(void)
{
    EACH(int64_t, n, 0, 1, 7, 8, 4095, 4101, 100003) {
        EACH_TYPE(a) {
            vlai_attrs factor = {.fill = {.value = -1.7}}, value = {.fill = {.value = 0.3, .dtype = a, .rank = 1}};
            CHECK(scale, factor, exact, OPERANDS(reals(a, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))), .over = 1);
            CHECK(fill, value, exact, .n_in = 0, RESULTS(result(a, SHAPE1(n))));
            CHECK(stop_gradient, none, exact, OPERANDS(reals(a, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))));
            CHECK(reshape, none, exact, OPERANDS(reals(a, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))));
            CHECK(silu, none, relative(4e-6), OPERANDS(reals_of(a, 8, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))), .over = 1);
            CHECK(gelu, none, relative(4e-6), OPERANDS(reals_of(a, 3, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))), .over = 1);
            EACH_TYPE(b) {
                CHECK(cast, none, exact, OPERANDS(reals(a, SHAPE1(n))), RESULTS(result(b, SHAPE1(n))));
                CHECK(add, none, exact, OPERANDS(reals(a, SHAPE1(n)), reals(b, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))), .over = 3);
                CHECK(sub, none, exact, OPERANDS(reals(a, SHAPE1(n)), reals(b, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))), .over = 3);
                CHECK(mul, none, exact, OPERANDS(reals(a, SHAPE1(n)), reals(b, SHAPE1(n))), RESULTS(result(a, SHAPE1(n))), .over = 3);
                CHECK(silu_grad, none, relative(4e-6), OPERANDS(reals(a, SHAPE1(n)), reals_of(b, 8, SHAPE1(n))),
                      RESULTS(result(a, SHAPE1(n))), .over = 3);
                CHECK(gelu_grad, none, relative(4e-6), OPERANDS(reals(a, SHAPE1(n)), reals_of(b, 3, SHAPE1(n))),
                      RESULTS(result(a, SHAPE1(n))), .over = 3);
            }
        }
    }
    EACH_TYPE(b) { /* further out, where what is stored as bf16 comes of a polynomial */
        CHECK(gelu, none, relative(4e-6), OPERANDS(reals_of(b, 5, SHAPE1(4099))), RESULTS(result(VLA_BF16, SHAPE1(4099))));
        CHECK(gelu_grad, none, relative(4e-6), OPERANDS(reals(b, SHAPE1(4099)), reals_of(b, 5, SHAPE1(4099))), RESULTS(result(VLA_BF16, SHAPE1(4099))));
    }
    tolerance two = {.rel = 4e-6, .roundings = 2}; /* silu is rounded before the product */
    EACH(int64_t, rows, 0, 1, 3, 67)
        EACH(int64_t, width, 1, 6, 12, 40, 3420)
            EACH_TYPE(a) {
                CHECK(swiglu, none, two, OPERANDS(reals_of(a, 4, SHAPE2(rows, 2 * width))), RESULTS(result(a, SHAPE2(rows, width))));
                CHECK(swiglu_grad, none, two, OPERANDS(reals(a, SHAPE2(rows, width)), reals_of(a, 4, SHAPE2(rows, 2 * width))),
                      RESULTS(result(a, SHAPE2(rows, 2 * width))), .over = 2);
                swiglu_backward(none, two, a, rows, width);
            }
    EACH_TYPE(a) {
        swiglu_backward(none, two, a, 3001, 264); /* two strips, and many parts of the rows */
        swiglu_backward(none, two, a, 33, 8);
        swiglu_backward(none, two, a, 1201, 3456);
    }
}

/* A norm's gradient is the difference of r w dy and x r^3 mean(w dy x), each good to 16 roundings of fp32 (2^-24). Where the
 * two cancel, as with one column they nearly do, what is left is only as good as they are: the size of the first, which is
 * that of the second too. */
static double norm_floor(double rstd, double weight, double dy)
{
    return 0x1p-20 * rstd * weight * dy;
}

/* Likewise the weight's gradient: the terms dy x r of a column, whatever they sum to. The most of any column. */
static double weight_floor(const tensor *dy, const tensor *x, const tensor *rstd)
{
    int64_t rows = x->shape[0], cols = x->shape[1];
    double most = 0, *sum = case_alloc((size_t)cols * sizeof *sum);
    for (int64_t j = 0; j < cols; j++)
        sum[j] = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            sum[j] += fabs(get_real(dy->dtype, dy->data, i * cols + j) * get_real(x->dtype, x->data, i * cols + j) * get_real(rstd->dtype, rstd->data, i));
    for (int64_t j = 0; j < cols; j++)
        most = fmax(most, sum[j]);
    return 0x1p-20 * most;
}

/* dy, x, rstd, weight, add, each of the last two or none; every `step`-th of the combinations. */
static void norm_backward(int64_t rows, int64_t cols, vla_dtype x, vla_dtype w, int step)
{
    tolerance within = {.rel = 1e-5, .row = 1e-5};
    for (int mode = step - 1; mode < 18; mode += step) { /* 6 to 8: again with the addend, the result over dy and not over it; then all with sums */
        int with_weight = mode % 3 > 0, again = mode % 3 == 2, with_add = mode / 3 % 3 > 0, summed = mode >= 9;
        int n = with_weight ? again ? 3 : 2 : 1;
        vlai_attrs a = {.norm = {.dtype = w, .again = again, .sums = summed ? x : VLA_DTYPE_NONE}};
        tensor rstd = result(VLA_F32, SHAPE1(rows)), weight = reals(w, SHAPE1(cols)), add = reals(x, SHAPE2(rows, cols));
        for (int64_t i = 0; i < rows; i++)
            set_real(&rstd, i, 0.6 + 0.1 * random_value());
        if (!with_weight)
            weight.data = NULL;
        if (!with_add)
            add.data = NULL;
        tensor results[4] = {result(x, SHAPE2(rows, cols)), result(w, SHAPE1(cols)), result(x, SHAPE2(rows, cols))};
        if (summed)
            results[n] = result(x, SHAPE1(cols));
        tensor dy = reals(x, SHAPE2(rows, cols)), x_ = reals(x, SHAPE2(rows, cols));
        CHECK(rms_norm_backward, a, within, OPERANDS(dy, x_, rstd, weight, add), .floors = {norm_floor(0.8, 2, 2) + (with_add ? 0x1p-20 * 2 : 0), weight_floor(&dy, &x_, &rstd)},
              .out = {results[0], results[1], results[2], results[3]}, .n_out = n + summed, .over = mode / 3 % 3 == 1 ? 16 : 1,
              .summed = {0, summed && n == 1, summed && n == 2, summed && n == 3});
    }
}

static void norm(void)
{
    vlai_attrs a = {.norm = {.eps = 1e-6}};
    tensor absent = {0};
    EACH(int64_t, rows, 0, 1, 5, 34)
        EACH(int64_t, cols, 1, 7, 64, 200, 512, 1280, 2048, 2056, 5120, 333)
            EACH_TYPE(x)
                EACH_TYPE(w) {
                    tensor weight = reals(w, SHAPE1(cols)), unwanted = result(VLA_F32, SHAPE1(rows));
                    CHECK(rms_norm, a, relative(1e-5), OPERANDS(reals(x, SHAPE2(rows, cols)), weight),
                          RESULTS(result(x, SHAPE2(rows, cols)), result(VLA_F32, SHAPE1(rows))));
                    absent = result(w, SHAPE1(cols));
                    absent.data = NULL;
                    unwanted = result(VLA_F32, SHAPE1(rows));
                    unwanted.data = NULL;
                    CHECK(rms_norm, a, relative(1e-5), OPERANDS(reals(x, SHAPE2(rows, cols)), absent),
                          RESULTS(result(x, SHAPE2(rows, cols)), unwanted));
                    tolerance within = {.row = 1e-5};
                    tensor rstd = result(VLA_F32, SHAPE1(rows));
                    for (int64_t i = 0; i < rows; i++)
                        set_real(&rstd, i, 0.6 + 0.1 * random_value());
                    CHECK(rms_norm_grad, a, within, OPERANDS(reals(x, SHAPE2(rows, cols)), reals(x, SHAPE2(rows, cols)), rstd,
                                                             reals(w, SHAPE1(cols))),
                          RESULTS(result(x, SHAPE2(rows, cols))), .over = 1, .floors = {norm_floor(0.8, 2, 2)});
                    rstd = reals(VLA_F32, SHAPE1(rows));
                    CHECK(rms_norm_grad, a, within, OPERANDS(reals(x, SHAPE2(rows, cols)), reals(x, SHAPE2(rows, cols)), rstd, absent),
                          RESULTS(result(x, SHAPE2(rows, cols))), .over = 1, .floors = {norm_floor(2, 1, 2)});
                    vlai_attrs to = {.norm = {.dtype = w}};
                    tensor dy = reals(x, SHAPE2(rows, cols)), x_ = reals(x, SHAPE2(rows, cols));
                    rstd = reals(VLA_F32, SHAPE1(rows));
                    CHECK(rms_norm_grad_weight, to, relative(1e-5), OPERANDS(dy, x_, rstd), RESULTS(result(w, SHAPE1(cols))),
                          .floors = {weight_floor(&dy, &x_, &rstd)});
                }
    EACH(int64_t, rows, 0, 1, 5, 35)
        EACH(int64_t, cols, 1, 7, 64, 200, 1280, 2048, 4104)
            EACH_TYPE(x)
                EACH_TYPE(w)
                    norm_backward(rows, cols, x, w, 1);
    EACH(int64_t, rows, 1, 35)
        EACH_TYPE(w)
            norm_backward(rows, 1024, VLA_BF16, w, 1);
    /* More rows than a block has under way, at each depth. 3168 are under way at once where each warp has its own. */
    norm_backward(3401, 1280, VLA_BF16, VLA_BF16, 6);
    norm_backward(6401, 1024, VLA_BF16, VLA_F32, 18);
    norm_backward(2001, 1536, VLA_BF16, VLA_BF16, 18);
    norm_backward(2002, 2048, VLA_BF16, VLA_F32, 6);
    norm_backward(3301, 2048, VLA_BF16, VLA_BF16, 1);
    norm_backward(661, 2048, VLA_BF16, VLA_F32, 1);
    norm_backward(1502, 2048, VLA_F32, VLA_F32, 6);
    norm_backward(1101, 4096, VLA_BF16, VLA_BF16, 6);
    norm_backward(301, 4096, VLA_F32, VLA_BF16, 6);
    CHECK(rms_norm_grad_weight, none, relative(1e-5),
          OPERANDS(reals(VLA_BF16, SHAPE2(3001, 768)), reals(VLA_BF16, SHAPE2(3001, 768)), reals(VLA_F32, SHAPE1(3001))),
          RESULTS(result(VLA_F32, SHAPE1(768))));
}

/* A merge of na and nb rows in random order; some places point outside when `bad`. */
static void route_of(int64_t na, int64_t nb, int bad, tensor *map, tensor *at_a, tensor *at_b)
{
    *map = ints(0, 1, SHAPE1(na + nb));
    *at_a = ints(0, 1, SHAPE1(na));
    *at_b = ints(0, 1, SHAPE1(nb));
    int64_t next[2] = {0, 0};
    for (int64_t i = 0; i < na + nb; i++) {
        int second = next[0] == na || (next[1] < nb && random_below(2));
        int64_t row = next[second]++;
        ((int32_t *)map->data)[i] = (int32_t)(second ? -1 - row : row);
        ((int32_t *)(second ? at_b : at_a)->data)[row] = (int32_t)i;
    }
    if (bad && na > 1 && nb > 1) {
        ((int32_t *)map->data)[0] = (int32_t)na;
        ((int32_t *)map->data)[1] = (int32_t)(-1 - nb);
        ((int32_t *)at_a->data)[1] = -1;
        ((int32_t *)at_b->data)[0] = (int32_t)(na + nb);
    }
}

static void packed_rope(vla_dtype t, vla_dtype table, int64_t na, int64_t nb, int dim, int heads, int64_t rest)
{
    vlai_attrs r = {.rope = {.head_dim = dim, .heads = heads}};
    tolerance within = {.row = 1e-6};
    int64_t cols = (int64_t)dim * heads + rest, n = na + nb;
    tensor map, at_a, at_b, absent = {0};
    CHECK(qkv_rope, r, within, OPERANDS(reals(t, SHAPE2(n, cols)), absent, absent, reals(table, SHAPE2(n, dim / 2)), reals(table, SHAPE2(n, dim / 2))),
          RESULTS(result(t, SHAPE2(n, cols))), .over = 1);
    CHECK(qkv_rope_grad, r, within, OPERANDS(reals(t, SHAPE2(n, cols)), reals(table, SHAPE2(n, dim / 2)), reals(table, SHAPE2(n, dim / 2))),
          RESULTS(result(t, SHAPE2(n, cols))), .over = 1);
    r.rope.sums[0] = t;
    CHECK(qkv_rope_grad, r, within, OPERANDS(reals(t, SHAPE2(n, cols)), reals(table, SHAPE2(n, dim / 2)), reals(table, SHAPE2(n, dim / 2))),
          RESULTS(result(t, SHAPE2(n, cols)), result(t, SHAPE1(cols))), .over = 1, .summed = {0, 1});
    for (int bad = 0; bad < 2; bad++) {
        route_of(na, nb, bad, &map, &at_a, &at_b);
        CHECK(qkv_rope, r, within,
              OPERANDS(reals(t, SHAPE2(na, cols)), reals(t, SHAPE2(nb, cols)), map, reals(table, SHAPE2(n, dim / 2)), reals(table, SHAPE2(n, dim / 2))),
              RESULTS(result(t, SHAPE2(n, cols))));
        for (int mode = 0; mode < 4; mode++) { /* sums of the first, of the second */
            tensor results[4] = {result(t, SHAPE2(na, cols)), result(t, SHAPE2(nb, cols))};
            int summed[4] = {0}, n_out = 2;
            for (int k = 0; k < 2; k++) {
                r.rope.sums[k] = mode >> k & 1 ? k ? VLA_F32 : t : VLA_DTYPE_NONE;
                if (mode >> k & 1) {
                    summed[n_out] = k + 1;
                    results[n_out++] = result(r.rope.sums[k], SHAPE1(cols));
                }
            }
            route_of(na, nb, bad, &map, &at_a, &at_b);
            CHECK(qkv_rope_grad, r, within,
                  OPERANDS(reals(t, SHAPE2(n, cols)), reals(table, SHAPE2(n, dim / 2)), reals(table, SHAPE2(n, dim / 2)), at_a, at_b),
                  .out = {results[0], results[1], results[2], results[3]}, .n_out = n_out, .summed = {0, 0, summed[2], summed[3]});
        }
    }
}

/* The gradient of bf16 with sums at the tower's and the decoder's widths: apart and in place, and picked rows of two streams (of the first
 * alone where the second is empty). */
static void rope_with_sums(vla_dtype table, int64_t na, int64_t nb, int dim, int heads, int64_t rest)
{
    const vla_dtype t = VLA_BF16;
    tolerance within = {.row = 1e-6};
    int64_t cols = (int64_t)dim * heads + rest, n = na + nb;
    tensor map, at_a, at_b;
    vlai_attrs one = {.rope = {.head_dim = dim, .heads = heads, .sums = {t}}}, two = {.rope = {.head_dim = dim, .heads = heads, .sums = {t, VLA_F32}}};
    CHECK(qkv_rope_grad, one, within, OPERANDS(reals(t, SHAPE2(n, cols)), reals(table, SHAPE2(n, dim / 2)), reals(table, SHAPE2(n, dim / 2))),
          RESULTS(result(t, SHAPE2(n, cols)), result(t, SHAPE1(cols))), .over = 1, .summed = {0, 1});
    for (int bad = 0; bad < 2; bad++) {
        route_of(na, nb, bad, &map, &at_a, &at_b);
        CHECK(qkv_rope_grad, two, within,
              OPERANDS(reals(t, SHAPE2(n, cols)), reals(table, SHAPE2(n, dim / 2)), reals(table, SHAPE2(n, dim / 2)), at_a, at_b),
              RESULTS(result(t, SHAPE2(na, cols)), result(t, SHAPE2(nb, cols)), result(t, SHAPE1(cols)), result(VLA_F32, SHAPE1(cols))),
              .summed = {0, 0, 1, 2});
    }
}

static void rope(void)
{
    EACH_TYPE(table) {
        EACH(int64_t, na, 0, 1, 37, 301)
            EACH(int64_t, nb, 0, 1, 43) {
                if (na + nb == 0)
                    continue;
                rope_with_sums(table, na, nb, 80, 32, 1280);
                rope_with_sums(table, na, nb, 128, 18, 256);
            }
    }
    /* More rows than a warp has under way, twice over: 1056 warps of 3 and of 4 rows. */
    rope_with_sums(VLA_F32, 6901, 0, 80, 32, 1280);
    rope_with_sums(VLA_BF16, 2900, 801, 80, 32, 1280);
    rope_with_sums(VLA_BF16, 9007, 260, 128, 18, 256);
    EACH_TYPE(t)
        EACH_TYPE(table)
            EACH(int, dim, 2, 20, 80, 128) {
                packed_rope(t, table, 37, 5, dim, 3, dim);
                packed_rope(t, table, 300, 41, dim, 2, 2 * dim + 3);
                packed_rope(t, table, 9, 0, dim, 1, 0);
                packed_rope(t, table, 0, 1, dim, 2, 8);
                packed_rope(t, table, 500, 70, dim, 6, 2 * dim); /* more than one strip, and many parts of the rows */
            }
    EACH(int64_t, n, 0, 1, 37, 300) {
        EACH_TYPE(t) {
            vlai_attrs plain = {.rope_table = {.base = 10000, .half = 20, .axes = 2, .restart = 1, .sections = {10, 10}, .dtype = t}};
            vlai_attrs three = {.rope_table = {.base = 1e6, .half = 64, .axes = 3, .sections = {16, 24, 24}, .dtype = t}};
            vlai_attrs wide = {.rope_table = {.base = 500, .half = 300, .axes = 3, .restart = 1, .sections = {0, 260, 40}, .dtype = t}};
            CHECK(rope_table, plain, relative(1e-6), OPERANDS(ints(0, 40, SHAPE2(2, n))),
                  RESULTS(result(t, SHAPE2(n, 20)), result(t, SHAPE2(n, 20))));
            CHECK(rope_table, three, relative(1e-6), OPERANDS(ints(0, 4000, SHAPE2(3, n))),
                  RESULTS(result(t, SHAPE2(n, 64)), result(t, SHAPE2(n, 64))));
            CHECK(rope_table, wide, relative(1e-6), OPERANDS(ints(-9, 4000, SHAPE2(3, n))),
                  RESULTS(result(t, SHAPE2(n, 300)), result(t, SHAPE2(n, 300))));
            EACH(int, dim, 4, 64, 512) {
                vlai_attrs s = {.sinusoid = {.dim = dim, .period = 10000}};
                CHECK(sinusoid, s, relative(1e-6), OPERANDS(reals_of(t, 500, SHAPE1(n))), RESULTS(result(t, SHAPE2(n, dim))));
            }
            EACH_TYPE(table)
                EACH(int, dim, 2, 20, 80, 128)
                    for (int inverse = 0; inverse < 2; inverse++) {
                        vlai_attrs r = {.rope = {.head_dim = dim, .inverse = inverse}};
                        tolerance within = {.row = 1e-6};
                        CHECK(rope, r, within, OPERANDS(reals(t, SHAPE2(n, 3 * dim)), reals(table, SHAPE2(n, dim / 2)),
                                                        reals(table, SHAPE2(n, dim / 2))),
                              RESULTS(result(t, SHAPE2(n, 3 * dim))), .over = 1);
                    }
        }
    }
}

/* Different numbers below n in random order. */
static tensor some_of(int64_t count, int64_t n)
{
    tensor all = ints(0, 1, SHAPE1(n)), some = ints(0, 1, SHAPE1(count));
    int32_t *p = all.data;
    for (int64_t i = 0; i < n; i++)
        p[i] = (int32_t)i;
    for (int64_t i = 0; i < count; i++) {
        int64_t j = i + random_below(n - i);
        int32_t swap = p[i];
        p[i] = p[j];
        p[j] = swap;
        ((int32_t *)some.data)[i] = p[i];
    }
    return some;
}

static void rows(void)
{
    EACH(int64_t, cols, 1, 7, 12, 64, 264)
        EACH_TYPE(t) {
            EACH(int64_t, n, 0, 1, 33, 1200) {
                vlai_attrs table = {.rows = {.rows = 50, .skip = -1, .dtype = t}}, skipping = {.rows = {.rows = 50, .skip = 3, .dtype = t}};
                CHECK(gather_rows, table, exact, OPERANDS(reals(t, SHAPE2(50, cols)), ints(-3, 55, SHAPE1(n))), RESULTS(result(t, SHAPE2(n, cols))));
                CHECK(scatter_add_rows, table, exact, OPERANDS(reals(t, SHAPE2(n, cols)), ints(-3, 55, SHAPE1(n))),
                      RESULTS(result(t, SHAPE2(50, cols))));
                CHECK(scatter_add_rows, skipping, exact, OPERANDS(reals(t, SHAPE2(n, cols)), ints(-3, 9, SHAPE1(n))),
                      RESULTS(result(t, SHAPE2(50, cols))));
                CHECK(put_rows, none, exact, OPERANDS(reals(t, SHAPE2(80, cols)), ints(-3, 90, SHAPE1(n)), reals(t, SHAPE2(n, cols))),
                      RESULTS(result(t, SHAPE2(80, cols))), .over = 1);
                CHECK(zero_rows, none, exact, OPERANDS(reals(t, SHAPE2(80, cols)), ints(-3, 90, SHAPE1(n))),
                      RESULTS(result(t, SHAPE2(80, cols))), .over = 1);
                CHECK(merge_rows, none, exact,
                      OPERANDS(reals(t, SHAPE2(n, cols)), reals(t, SHAPE2(5, cols)), ints(-8, n + 3, SHAPE1(n + 5)),
                               ints(0, n + 5, SHAPE1(n)), ints(0, n + 5, SHAPE1(5))),
                      RESULTS(result(t, SHAPE2(n + 5, cols))));
                vlai_attrs split = {.split = {.n = 3, .widths = {cols, 2 * cols, 3}}};
                tensor unread = result(t, SHAPE2(n, 2 * cols));
                unread.data = NULL;
                CHECK(split_cols, split, exact, OPERANDS(reals(t, SHAPE2(n, 3 * cols + 3))),
                      RESULTS(result(t, SHAPE2(n, cols)), unread, result(t, SHAPE2(n, 3))));
                vlai_attrs even = {.split = {.n = 3, .widths = {cols, cols, 2 * cols}}};
                CHECK(split_cols, even, exact, OPERANDS(reals(t, SHAPE2(n, 4 * cols))),
                      RESULTS(result(t, SHAPE2(n, cols)), result(t, SHAPE2(n, cols)), result(t, SHAPE2(n, 2 * cols))));
                CHECK(concat_cols, none, exact, OPERANDS(reals(t, SHAPE2(n, cols)), reals(t, SHAPE2(n, 1)), reals(t, SHAPE2(n, 3 * cols)), reals(t, SHAPE2(n, 2))),
                      RESULTS(result(t, SHAPE2(n, 4 * cols + 3))));
                vlai_attrs slice = {.slice = {.first = n / 3, .count = n / 2}}, pad = {.slice = {.first = 4, .count = n + 9}};
                vlai_attrs count = {.slice = {.count = n}}, wide = {.slice = {.count = cols}};
                CHECK(slice_rows, slice, exact, OPERANDS(reals(t, SHAPE2(n, cols))), RESULTS(result(t, SHAPE2(n / 2, cols))));
                CHECK(slice_rows, slice, exact, OPERANDS(reals(t, SHAPE1(n))), RESULTS(result(t, SHAPE1(n / 2))));
                CHECK(pad_rows, pad, exact, OPERANDS(reals(t, SHAPE2(n, cols))), RESULTS(result(t, SHAPE2(n + 9, cols))));
                CHECK(concat_rows, none, exact, OPERANDS(reals(t, SHAPE2(n, cols)), reals(t, SHAPE2(3, cols))), RESULTS(result(t, SHAPE2(n + 3, cols))));
                CHECK(expand_rows, count, exact, OPERANDS(reals(t, SHAPE1(cols))), RESULTS(result(t, SHAPE2(n, cols))));
                CHECK(expand_cols, wide, exact, OPERANDS(reals(t, SHAPE1(n))), RESULTS(result(t, SHAPE2(n, cols))));
                EACH_TYPE(s)
                    CHECK(mul_rows, none, exact, OPERANDS(reals(t, SHAPE2(n, cols)), reals(s, SHAPE1(n))), RESULTS(result(t, SHAPE2(n, cols))), .over = 1);
            }
            vlai_attrs each = {.rows = {.rows = 700, .skip = -1, .dtype = VLA_F32}};
            CHECK(scatter_add_rows, each, exact, OPERANDS(reals(t, SHAPE2(600, cols)), some_of(600, 700)), RESULTS(result(VLA_F32, SHAPE2(700, cols))));
        }
    vlai_attrs big = {.rows = {.rows = 5000, .skip = 17, .dtype = VLA_BF16}};
    CHECK(scatter_add_rows, big, exact, OPERANDS(reals(VLA_BF16, SHAPE2(6761, 136)), ints(0, 900, SHAPE1(6761))), RESULTS(result(VLA_BF16, SHAPE2(5000, 136))));
    vlai_attrs few = {.rows = {.rows = 40, .skip = -1, .dtype = VLA_F32}}; /* long runs of one index */
    CHECK(scatter_add_rows, few, exact, OPERANDS(reals(VLA_BF16, SHAPE2(9001, 24)), ints(-2, 43, SHAPE1(9001))), RESULTS(result(VLA_F32, SHAPE2(40, 24))));
    vlai_attrs sparse = {.rows = {.rows = 3000, .skip = 7}}, wide = {.rows = {.rows = 300, .skip = 7}}; /* most of the result gets nothing */
    EACH_TYPE(t) {
        sparse.rows.dtype = wide.rows.dtype = t;
        EACH(int64_t, cols, 7, 136) {
            CHECK(scatter_add_rows, sparse, exact, OPERANDS(reals(t, SHAPE2(700, cols)), ints(-3, 3005, SHAPE1(700))), RESULTS(result(t, SHAPE2(3000, cols))));
            CHECK(scatter_add_rows, sparse, exact, OPERANDS(reals(t, SHAPE2(700, cols)), ints(-3, 25, SHAPE1(700))), RESULTS(result(t, SHAPE2(3000, cols))));
        }
        CHECK(scatter_add_rows, wide, exact, OPERANDS(reals(t, SHAPE2(67, 2056)), ints(-3, 25, SHAPE1(67))), RESULTS(result(t, SHAPE2(300, 2056))));
    }
    CHECK(gather_rows, big, exact, OPERANDS(ints(-99, 99, SHAPE1(77)), ints(-2, 80, SHAPE1(500))), RESULTS(result(VLA_I32, SHAPE1(500))));
    CHECK(gather_rows, big, exact, OPERANDS(ints(-99, 99, SHAPE2(77, 2)), ints(-2, 80, SHAPE1(500))), RESULTS(result(VLA_I32, SHAPE2(500, 2))));
}

static void reduce(void)
{
    EACH(int64_t, n, 0, 1, 5, 100, 2000)
        EACH(int64_t, cols, 1, 7, 64, 300, 1288)
            EACH_TYPE(x)
                EACH_TYPE(y) {
                    vlai_attrs to = {.matmul = {.dtype = y}};
                    CHECK(row_sum, none, relative(1e-5), OPERANDS(reals(x, SHAPE2(n, cols))), RESULTS(result(y, SHAPE1(n))));
                    CHECK(col_sum, to, relative(1e-5), OPERANDS(reals(x, SHAPE2(n, cols))), RESULTS(result(y, SHAPE1(cols))));
                }
}

static void loss(void)
{
    EACH_TYPE(t) {
        EACH(int64_t, n, 1, 33, 900)
            EACH(int64_t, cols, 1, 7, 32) {
                tensor mask = reals(t, SHAPE2(n, cols));
                for (int64_t i = 0; i < mask.n; i++)
                    set_real(&mask, i, i == 0 || random_below(3) > 0);
                CHECK(masked_mse, none, relative(1e-5), OPERANDS(reals(t, SHAPE2(n, cols)), reals(t, SHAPE2(n, cols)), mask),
                      RESULTS(result(VLA_F32, SHAPE1(1)), result(t, SHAPE2(n, cols)), result(VLA_F32, SHAPE1(1))));
                mask = reals(t, SHAPE2(n, cols));
                tensor count = result(VLA_F32, SHAPE1(1));
                set_real(&count, 0, 5);
                CHECK(masked_mse_grad, none, relative(1e-5),
                      OPERANDS(reals(VLA_F32, SHAPE1(1)), reals(t, SHAPE2(n, cols)), reals(t, SHAPE2(n, cols)), mask, count),
                      RESULTS(result(t, SHAPE2(n, cols))));
            }
        EACH(int64_t, n, 1, 9, 300)
            EACH(int64_t, classes, 1, 5, 512, 4099, 5120) {
                for (int kind = 0; kind < 2; kind++) { /* kind 1: nothing counts */
                    int64_t low = kind ? -9 : -1, high = kind ? 0 : classes + 1;
                    CHECK(cross_entropy, none, relative(1e-5), OPERANDS(reals_of(t, 6, SHAPE2(n, classes)), ints(low, high, SHAPE1(n))),
                          RESULTS(result(VLA_F32, SHAPE1(1)), result(VLA_F32, SHAPE1(n)), result(VLA_F32, SHAPE1(1))));
                    tensor count = result(VLA_F32, SHAPE1(1));
                    set_real(&count, 0, 3);
                    CHECK(cross_entropy_grad, none, relative(1e-5),
                          OPERANDS(reals(VLA_F32, SHAPE1(1)), reals_of(t, 6, SHAPE2(n, classes)), ints(low, high, SHAPE1(n)), count),
                          RESULTS(result(t, SHAPE2(n, classes))));
                }
            }
    }
    CHECK(cross_entropy, none, relative(1e-5), OPERANDS(reals_of(VLA_F32, 20, SHAPE2(5, 151936)), ints(-1, 151936, SHAPE1(5))),
          RESULTS(result(VLA_F32, SHAPE1(1)), result(VLA_F32, SHAPE1(5)), result(VLA_F32, SHAPE1(1))));
}

static void image(void)
{
    EACH_TYPE(t)
        EACH(int, side, 1, 5, 8, 14)
            EACH(int, temporal, 1, 2) {
                int64_t count = side == 14 && temporal == 2 ? 9001 : 40; /* more than there are warps at once */
                int64_t width = 6 * side, bytes = 3 * width * width;
                tensor pixels = result(VLA_U8, SHAPE1(bytes)), patches = ints(0, 1, SHAPE2(count, 3));
                for (int64_t i = 0; i < bytes; i++)
                    ((uint8_t *)pixels.data)[i] = (uint8_t)random_bits();
                for (int64_t p = 0; p < count; p++) {
                    int32_t *patch = (int32_t *)patches.data + 3 * p;
                    patch[0] = (int32_t)(3 * (random_below(6 * side) * width + random_below(5 * side + 1))); /* some stick out below */
                    patch[1] = (int32_t)(3 * width);
                    patch[2] = 0;
                    if (p == count - 1)
                        patch[0] = -5;
                }
                vlai_attrs a = {.patchify = {.patch = side, .temporal = temporal, .mean = {0.48f, 0.45f, 0.4f}, .std = {0.27f, 0.26f, 0.28f}, .dtype = t}};
                CHECK(patchify, a, exact, OPERANDS(pixels, patches), RESULTS(result(t, SHAPE2(count, 3 * temporal * side * side))));
            }
}

static tensor doubles(int64_t n, const double *x)
{
    tensor t = result(VLA_F64, SHAPE1(n));
    memcpy(t.data, x, (size_t)n * sizeof *x);
    return t;
}

static tensor moments(vla_dtype dtype, int64_t n) /* not negative */
{
    tensor t = result(dtype, SHAPE1(n));
    for (int64_t i = 0; i < n; i++)
        set_real(&t, i, fabs(random_value()) * 1e-3);
    return t;
}

/* Of masters: below a zero, 0x8000 and more would stand for no number. */
static tensor low_bits(const tensor *high)
{
    tensor t = result(VLA_U16, SHAPE1(high->n));
    for (int64_t i = 0; i < high->n; i++)
        ((uint16_t *)t.data)[i] = (uint16_t)(random_bits() & (((uint16_t *)high->data)[i] & 0x7FFF ? 0xFFFF : 0x7FFF));
    return t;
}

static void optim(void)
{
    EACH(int64_t, n, 0, 1, 7, 2048, 20003, 200001) {
        EACH_TYPE(a) {
            EACH_TYPE(b) {
                CHECK(copy, none, exact, OPERANDS(reals(a, SHAPE1(n))), RESULTS(result(b, SHAPE1(n))));
                CHECK(accumulate, none, exact, OPERANDS(reals(a, SHAPE1(n)), reals(b, SHAPE1(n))), .writes = 1);
            }
            vlai_attrs third = {.clip = {.index = 2}};
            CHECK(sum_squares, third, relative(1e-6), OPERANDS(reals(a, SHAPE1(n)), doubles(4, (double[]){1, 2, 3, 4})), .writes = 2);
        }
        if (n)
            for (int skip = 0; skip < 2; skip++)
                EACH_TYPE(g)
                    EACH_TYPE(m)
                        for (int kind = 0; kind < 4; kind++) { /* split master, bf16, fp32, split master without gradient */
                            vla_dtype p = kind == 2 ? VLA_F32 : VLA_BF16;
                            vlai_attrs a = {.adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .group = 1}};
                            tensor weight = reals(p, SHAPE1(n)), gradient = reals(g, SHAPE1(n)), low = {.dtype = VLA_U16, .rank = 1, .shape = {n}, .n = n};
                            gradient.data = kind == 3 ? NULL : gradient.data;
                            if (kind == 0 || kind == 3)
                                low = low_bits(&weight);
                            CHECK(adamw, a, exact, OPERANDS(weight, gradient, reals_of(m, 1e-2, SHAPE1(n)), moments(m, n),
                                                            doubles(6, (double[]){0.271, 0.1426, 3, 17, 1e-3, 3e-4}),
                                                            doubles(3, (double[]){4.1, 0.24, skip ? 0 : 1}), low),
                                  .writes = 0x4D);
                        }
    }
    vlai_attrs clip = {.clip = {.max_norm = 1}}, free_ = none;
    CHECK(clip_factor, clip, relative(1e-12), OPERANDS(doubles(3, (double[]){1, 2, 3})), RESULTS(result(VLA_F64, SHAPE1(3))));
    CHECK(clip_factor, clip, relative(1e-12), OPERANDS(doubles(3, (double[]){1e-3, 2e-4, 3e-2})), RESULTS(result(VLA_F64, SHAPE1(3))));
    CHECK(clip_factor, free_, relative(1e-12), OPERANDS(doubles(3, (double[]){1, 2, 300})), RESULTS(result(VLA_F64, SHAPE1(3))));
    CHECK(clip_factor, clip, relative(1e-12), OPERANDS(doubles(2, (double[]){1, INFINITY})), RESULTS(result(VLA_F64, SHAPE1(3))));
}

typedef enum mask_kind { CAUSAL, FULL, MIXED } mask_kind;

typedef struct mask {
    int64_t keys;
    tensor qpos, rows, cols;
} mask;

/* Segments one after another. MIXED: the last quarter of a segment sees itself whole; keys of the first quarter have a hole
 * over the first half of that block; every 7th key and every 11th query is hidden. */
static mask masks(mask_kind kind, int n, const int64_t *lengths)
{
    mask m = {0};
    for (int s = 0; s < n; s++)
        m.keys += lengths[s];
    m.qpos = ints(0, 1, SHAPE1(m.keys));
    m.rows = ints(0, 1, SHAPE2(m.keys, 2));
    m.cols = ints(0, 1, SHAPE2(m.keys, 4));
    int64_t first = 0;
    for (int s = 0; s < n; first += lengths[s++]) {
        int64_t end = first + lengths[s], block = first + lengths[s] * 3 / 4;
        for (int64_t i = first; i < end; i++) {
            int32_t *row = (int32_t *)m.rows.data + 2 * i, *col = (int32_t *)m.cols.data + 4 * i;
            ((int32_t *)m.qpos.data)[i] = (int32_t)i;
            row[0] = (int32_t)first;
            row[1] = (int32_t)(kind == CAUSAL ? i + 1 : end);
            col[0] = (int32_t)(kind == FULL ? first : kind == MIXED && i >= block ? block : i);
            col[1] = (int32_t)end;
            if (kind == MIXED && i < first + lengths[s] / 4) {
                col[2] = (int32_t)block;
                col[3] = (int32_t)((block + end) / 2);
            }
            if (kind == MIXED && i % 7 == 3)
                memset(col, 0, 4 * sizeof *col);
            if (kind == MIXED && i % 11 == 5)
                row[0] = row[1] = 0;
        }
    }
    return m;
}

/* Every third query, in order. */
static void thin(mask *m)
{
    int64_t n = (m->keys + 2) / 3;
    tensor qpos = ints(0, 1, SHAPE1(n)), rows = ints(0, 1, SHAPE2(n, 2));
    for (int64_t i = 0; i < n; i++) {
        ((int32_t *)qpos.data)[i] = ((int32_t *)m->qpos.data)[3 * i];
        memcpy((int32_t *)rows.data + 2 * i, (int32_t *)m->rows.data + 6 * i, 2 * sizeof(int32_t));
    }
    m->qpos = qpos;
    m->rows = rows;
}

static mask make_mask(mask_kind kind, int thinned, int n, const int64_t *lengths)
{
    mask m = masks(kind, n, lengths);
    if (thinned)
        thin(&m);
    return m;
}

/* Packed operands, o and do in two streams: about a third of the rows in the second, which has them in the opposite order. */
static void streams_case(vla_dtype t, vlai_attrs a, tolerance within, int backward, mask m, tensor segments)
{
    int64_t wide = (int64_t)a.attention.heads * a.attention.head_dim, all = wide + 2 * (int64_t)a.attention.kv_heads * a.attention.head_dim;
    int64_t rows[2] = {0, 0};
    tensor map = ints(0, 3, SHAPE1(m.keys)), qkv = reals(t, SHAPE2(m.keys, all)), lse = result(VLA_F32, SHAPE2(m.keys, a.attention.heads)), o[2];
    int32_t *place = map.data;
    for (int64_t i = m.keys; i-- > 0;)
        place[i] = place[i] ? 0 : (int32_t)(-1 - rows[1]++);
    for (int64_t i = 0; i < m.keys; i++)
        place[i] = place[i] ? place[i] : (int32_t)rows[0]++;
    tensor at_a = ints(0, 1, SHAPE1(rows[0]));
    for (int64_t i = 0; i < m.keys; i++)
        if (place[i] >= 0)
            ((int32_t *)at_a.data)[place[i]] = (int32_t)i;
    for (int k = 0; k < 2; k++)
        o[k] = result(t, SHAPE2(rows[k], wide));
    if (!backward) {
        CHECK(attention_qkv, a, within, OPERANDS(qkv, m.qpos, m.rows, m.cols, segments, map, at_a), RESULTS(o[0], lse, o[1]),
              .aligned_only = segments.data != NULL);
        return;
    }
    op_case forward = {.op = VLAI_OP_attention_qkv, .cpu = vlai_cpu_attention_qkv_float, .node = {.attrs = a},
                       OPERANDS(qkv, m.qpos, m.rows, m.cols, segments, map, at_a), RESULTS(o[0], lse, o[1])};
    void *out[VLAI_MAX_OUTPUTS] = {0}, *written[VLAI_MAX_INPUTS] = {0};
    fill_graph(&forward);
    run_twin(&forward, out, written);
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < o[k].n; i++)
            set_real(&o[k], i, (double)((float *)out[2 * k])[i]);
    memcpy(lse.data, out[1], bytes_of(&lse));
    CHECK(attention_qkv_grad, a, within, OPERANDS(reals(t, SHAPE2(rows[0], wide)), qkv, o[0], lse, m.qpos, m.rows, m.cols, segments, map,
                                                  reals(t, SHAPE2(rows[1], wide)), o[1]),
          RESULTS(result(t, SHAPE2(m.keys, all))));
}

static void attention_case(vla_dtype t, mask_kind kind, int thinned, int n, const int64_t *lengths, int heads, int kv_heads, int dim)
{
    vlai_attrs a = {.attention = {.heads = heads, .kv_heads = kv_heads, .head_dim = dim, .scale = 1 / sqrt(dim)}};
    /* bf16: scores and their gradients are rounded to bf16 (2^-9) between the two products of each. */
    tolerance within = {.row = t == VLA_BF16 ? 0x1p-7 : 2e-5}, grad = {.row = t == VLA_BF16 ? 0x1p-6 : 5e-5};
    /* ds = p (dp - delta): both sums have dim products of at most 4, in fp32; ds is multiplied by q or k, at most 2. With one
     * key they are equal, and what is left of them is rounding. */
    grad.floor = 0x1p-22 * 2 * 4 * dim * 2 * a.attention.scale;
    mask m = make_mask(kind, thinned, n, lengths);
    int64_t queries = m.qpos.n;
    tensor q = reals(t, SHAPE2(queries, heads * dim)), k = reals(t, SHAPE2(m.keys, kv_heads * dim)), v = reals(t, SHAPE2(m.keys, kv_heads * dim));
    CHECK(attention, a, within, OPERANDS(q, k, v, m.qpos, m.rows, m.cols), RESULTS(result(t, SHAPE2(queries, heads * dim)), result(VLA_F32, SHAPE2(queries, heads))));

    m = make_mask(kind, thinned, n, lengths);
    q = reals(t, SHAPE2(queries, heads * dim));
    k = reals(t, SHAPE2(m.keys, kv_heads * dim));
    v = reals(t, SHAPE2(m.keys, kv_heads * dim));
    tensor o = result(t, SHAPE2(queries, heads * dim)), lse = result(VLA_F32, SHAPE2(queries, heads));
    op_case forward = {.op = VLAI_OP_attention, .cpu = vlai_cpu_attention_float, .node = {.attrs = a},
                       OPERANDS(q, k, v, m.qpos, m.rows, m.cols), RESULTS(o, lse)};
    void *out[VLAI_MAX_OUTPUTS] = {0}, *written[VLAI_MAX_INPUTS] = {0};
    fill_graph(&forward);
    run_twin(&forward, out, written);
    for (int64_t i = 0; i < o.n; i++)
        set_real(&o, i, (double)((float *)out[0])[i]);
    if (lse.n)
        memcpy(lse.data, out[1], bytes_of(&lse));
    CHECK(attention_grad, a, grad, OPERANDS(reals(t, SHAPE2(queries, heads * dim)), q, k, v, o, lse, m.qpos, m.rows, m.cols),
          RESULTS(result(t, SHAPE2(queries, heads * dim)), result(t, SHAPE2(m.keys, kv_heads * dim)), result(t, SHAPE2(m.keys, kv_heads * dim))));
    for (int backward = 0; !thinned && backward < 2; backward++)
        streams_case(t, a, backward ? grad : within, backward, make_mask(kind, 0, n, lengths), (tensor){0});
}

/* Whole segments of at most 64 rows, whose kernels want o in one piece. */
static void short_streams(vla_dtype t)
{
    static const int64_t lengths[] = {64, 3, 17, 40};
    vlai_attrs a = {.attention = {.heads = 2, .kv_heads = 2, .head_dim = 64, .scale = 0.125, .mask = VLA_MASK_FULL, .longest = 64}};
    tolerance within = {.row = t == VLA_BF16 ? 0x1p-7 : 2e-5};
    mask m = make_mask(FULL, 0, 4, lengths);
    tensor cut = ints(0, 1, SHAPE1(5));
    for (int s = 0; s < 4; s++)
        ((int32_t *)cut.data)[s + 1] = ((int32_t *)cut.data)[s] + (int32_t)lengths[s];
    streams_case(t, a, within, 0, m, cut);
}

static void attention(void)
{
    EACH_TYPE(t) {
        EACH(int, dim, 16, 20, 32, 64, 72, 80, 96, 128)
            EACH(mask_kind, kind, CAUSAL, FULL, MIXED) {
                attention_case(t, kind, 0, 1, (int64_t[]){1}, 1, 1, dim);
                attention_case(t, kind, 0, 3, (int64_t[]){5, 70, 133}, 4, 2, dim);
                attention_case(t, kind, 1, 3, (int64_t[]){64, 70, 201}, 2, 1, dim);
            }
        attention_case(t, FULL, 0, 7, (int64_t[]){64, 16, 4, 64, 8, 32, 64}, 3, 3, 80); /* windows */
        short_streams(t);
        attention_case(t, CAUSAL, 0, 4, (int64_t[]){270, 270, 270, 270}, 8, 1, 128);
        attention_case(t, MIXED, 0, 3, (int64_t[]){270, 511, 64}, 4, 1, 128);
        attention_case(t, MIXED, 0, 2, (int64_t[]){40, 90}, 2, 1, 144); /* plain kernels only */
        attention_case(t, CAUSAL, 0, 40, (int64_t[]){150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3,
                                                     150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3, 150, 3},
                       2, 2, 32);
        attention_case(t, FULL, 0, 1, (int64_t[]){4500}, 2, 1, 16); /* more than one round of query tiles */
    }
}

/* A compiled chain and an interpreted one give the same bits. */
static void same_chain(const vlai_cuda_context *context, vlai_attrs a, vla_dtype first, vla_dtype second, int64_t n)
{
    op_case c = {.op = VLAI_OP_chain, .cuda = vlai_cuda_chain, .workspace = vlai_cuda_workspace_chain, .node = {.attrs = a},
                 OPERANDS(reals_of(first, 8, SHAPE2(n, 3)), reals_of(second, 8, SHAPE2(n, 3))), RESULTS(result(VLA_F32, SHAPE2(n, 3)))};
    void *out[2][VLAI_MAX_OUTPUTS] = {{0}}, *written[VLAI_MAX_INPUTS] = {0};
    snprintf(test_state.what, sizeof test_state.what, "chain, compiled beside interpreted, operation %d", a.chain.steps[0].op);
    int good = 1;
    fill_graph(&c);
    for (int compiled = 0; good && compiled < 2; compiled++) {
        c.context = compiled ? context : NULL;
        good = run_device(&c, 0, -1, out[compiled], written);
    }
    if (good && memcmp(out[0][0], out[1][0], bytes_of(&c.out[0])))
        good = 0, fail("other bits");
    *(good ? &test_state.passed : &test_state.failed) += 1;
    vlai_arena_fini(&test_state.arena);
    test_state.arena = (vlai_arena){0};
}

/* n (1 + s) + t, activated, times a factor a row: compiled, and interpreted. */
static void chain(void)
{
    vlai_device_info info;
    if (vlai_device_select(0, &info)) {
        fail("no device");
        test_state.failed++;
        return;
    }
    vlai_cuda_context context = {.arch = info.major * 10 + info.minor};
    EACH_TYPE(a)
        EACH_TYPE(b)
            EACH(int64_t, rows, 1, 5, 260)
                EACH(int64_t, cols, 1, 7, 1024)
                    for (int compiled = 0; compiled < 2; compiled++) {
                        vlai_attrs c = {.chain = {.n = 8, .steps = {{VLAI_OP_mul, 0, 1, a, 0},        {VLAI_OP_add, 0, 8, a, 0},  {VLAI_OP_add, 9, 2, b, 0},
                                                                    {VLAI_OP_silu, 10, 0, VLA_F32, 0}, {VLAI_OP_gelu, 1, 0, b, 0}, {VLAI_OP_sub, 11, 12, b, 0},
                                                                    {VLAI_OP_mul_rows, 13, 3, a, 0},   {VLAI_OP_scale, 14, 0, b, -1.7}}}};
                        /* The activations are good to 4e-6; each of the eight steps may round to bf16 once. A step in the
                         * middle that is stored as bf16 may fall on the other side of the edge between two of its numbers:
                         * the result, whatever its type, is then off by one of their distances at the row's largest, 2^-8. */
                        tolerance within = {.row = 4e-6 + (a == VLA_BF16 || b == VLA_BF16 ? 0x1p-8 : 0), .rel = 4e-6, .roundings = 8};
                        CHECK(chain, c, within, OPERANDS(reals(a, SHAPE2(rows, cols)), reals(a, SHAPE2(rows, cols)), reals(b, SHAPE2(rows, cols)), reals(VLA_F32, SHAPE1(rows))),
                              RESULTS(result(b, SHAPE2(rows, cols))), .context = compiled ? &context : NULL);
                    }
    EACH(vlai_op, op, VLAI_OP_silu, VLAI_OP_silu_grad, VLAI_OP_gelu, VLAI_OP_gelu_grad, VLAI_OP_mul, VLAI_OP_scale)
        EACH_TYPE(a)
            same_chain(&context, (vlai_attrs){.chain = {.n = 2, .steps = {{(int16_t)op, 0, 1, VLA_F32, 1 / 3.0}, {VLAI_OP_add, 8, 1, VLA_F32, 0}}}}, a, VLA_F32, 4099);
}

/* op(x) op(y), with a bias, a residual and column sums where asked for. */
static void product(const vlai_cuda_context *context, vla_dtype t, int ta, int tb, int64_t m, int64_t n, int64_t k, int bias, int residual, int sums)
{
    vlai_attrs a = {.matmul = {.transpose_a = ta, .transpose_b = tb, .dtype = t, .sums = sums ? t : VLA_DTYPE_NONE}};
    tolerance within = {.row = 1e-5};
    tensor x = reals(t, 2, ta ? (int64_t[]){k, m} : (int64_t[]){m, k}), y = reals(t, 2, tb ? (int64_t[]){n, k} : (int64_t[]){k, n}), absent = {0};
    CHECK(matmul, a, within, OPERANDS(x, y, bias ? reals(t, SHAPE1(n)) : absent, residual ? reals(t, SHAPE2(m, n)) : absent),
          .out = {result(t, SHAPE2(m, n)), result(t, SHAPE1(m))}, .n_out = sums ? 2 : 1, .context = context, .aligned_only = 1);
}

static void matmul(void)
{
    vlai_cuda_context context = {0};
    int code = vlai_cublaslt_open(&context.cublaslt);
    if (code) {
        fail("cuBLASLt: %s", vlai_cublaslt_error(code));
        test_state.failed++;
        return;
    }
    EACH_TYPE(t)
        for (int ta = 0; ta < 2; ta++)
            for (int tb = 0; tb < 2; tb++)
                EACH(int64_t, m, 8, 40, 264)
                    EACH(int64_t, k, 16, 72, 512) {
                        for (int mode = 0; mode < 4; mode++)
                            product(&context, t, ta, tb, m, 136, k, mode & 1, mode >> 1, 0);
                        if (ta)
                            product(&context, t, ta, tb, m, 136, k, 0, 0, 1);
                    }
    static const int64_t nothing[][3] = {{0, 136, 16}, {8, 0, 16}, {8, 136, 0}, {0, 0, 0}};
    EACH_TYPE(t)
        for (int ta = 0; ta < 2; ta++)
            for (int tb = 0; tb < 2; tb++)
                for (size_t i = 0; i < sizeof nothing / sizeof *nothing; i++)
                    for (int sums = 0; sums <= ta; sums++)
                        product(&context, t, ta, tb, nothing[i][0], nothing[i][1], nothing[i][2], 0, 0, sums);
    vlai_cublaslt_close(context.cublaslt);
}

static struct {
    long passed, failed;
    double began;
} family;

static void tell_family(const char *name)
{
    printf("%-12s %5ld passed, %ld failed, %.1f s\n", name, test_state.passed - family.passed, test_state.failed - family.failed,
           vlai_now() - family.began);
    fflush(stdout);
    family.passed = test_state.passed;
    family.failed = test_state.failed;
    family.began = vlai_now();
}

int main(int argc, char **argv)
{
    static const test_part families[] = {{"elementwise", elementwise}, {"norm", norm},   {"rope", rope},   {"rows", rows},           {"reduce", reduce},
                    {"loss", loss},               {"image", image}, {"optim", optim}, {"attention", attention}, {"matmul", matmul}, {"chain", chain}};
    enum { FAMILIES = sizeof families / sizeof *families };
    int count = 0, code;
    vlai_device_info info = {0};
    if (!parts_begin(argc, argv, families, FAMILIES, &code))
        return code;
    code = vlai_device_count(&count);
    if (!code && count)
        code = vlai_device_select(0, &info);
    if (code || !count) {
        printf("no CUDA device: %s\n", code ? vlai_device_error(code) : "none found");
        return 77;
    }
    test_state.multiprocessors = info.multiprocessors;
    if (!DEVICE(vlai_device_stream_create(&test_state.stream)))
        return 2;
    printf("%s, compute capability %d.%d\n", info.name, info.major, info.minor);
    family.began = vlai_now();
    parts_run(argc, argv, families, FAMILIES, tell_family);
    vlai_device_stream_destroy(test_state.stream);
    printf("%ld passed, %ld failed\n", test_state.passed, test_state.failed);
    return test_state.failed > 0;
}
