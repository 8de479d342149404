/* matmul: all transpositions, with and without bias, residual and sums, at shapes on both sides of every tile boundary. */
#include "kernel_test.h"

static void check_product(int64_t m, int64_t n, int64_t k, int ta, int tb, bool with_bias, bool with_residual, bool with_sums)
{
    cases c = {.state = (uint64_t)(m * 1000003 + n * 1009 + k * 4 + ta * 2 + tb)};
    tensor a = ta ? random_tensor(&c, SHAPE2(k, m)) : random_tensor(&c, SHAPE2(m, k));
    tensor b = tb ? random_tensor(&c, SHAPE2(n, k)) : random_tensor(&c, SHAPE2(k, n));
    tensor bias = with_bias ? random_tensor(&c, SHAPE1(n)) : (tensor){0}, y = result_tensor(&c, SHAPE2(m, n));
    tensor residual = with_residual ? random_tensor(&c, SHAPE2(m, n)) : (tensor){0}, sums = result_tensor(&c, SHAPE1(m));
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = (with_bias ? bias.f[j] : 0) + (with_residual ? residual.f[i * n + j] : 0);
            for (int64_t p = 0; p < k; p++)
                sum += (ta ? a.f[p * m + i] : a.f[i * k + p]) * (tb ? b.f[j * k + p] : b.f[p * n + j]);
            y.f[i * n + j] = sum;
        }
    for (int64_t i = 0; i < m; i++)
        for (int64_t p = 0; p < k; p++)
            sums.f[i] += ta ? a.f[p * m + i] : a.f[i * k + p];
    vlai_node node = {.op = VLAI_OP_matmul,
                      .attrs.matmul = {.transpose_a = ta, .transpose_b = tb, .sums = with_sums ? VLA_F32 : VLA_DTYPE_NONE}};
    tensor in[4] = {a, b, bias, residual}, out[2] = {y, sums};
    /* Rounding of a sum of k terms grows as sqrt(k) eps when signs are mixed. */
    CHECK_KERNEL(matmul, &node, in, with_residual ? 4 : 3, out, with_sums ? 2 : 1, 1e-6);
    vlai_arena_fini(&c.arena);
}

static void test_products(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {
        {1, 1, 1}, {3, 5, 7}, {0, 4, 3}, {4, 0, 3}, {4, 3, 0}, {65, 33, 17}, {1, 300, 129}, {300, 1, 129},
        {1030, 130, 65}, {700, 1100, 20}, {31, 64, 3001}, {128, 96, 1500},
    };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int mode = 0; mode < 32; mode++)
            check_product(shapes[s][0], shapes[s][1], shapes[s][2], mode & 1, mode >> 1 & 1, mode >> 2 & 1, mode >> 3 & 1, mode >> 4 & 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_products)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
