/* Losses, their gradients, and pictures to patches. */
#include "kernel_test.h"

static void test_masked_mse(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {5, 7}, {0, 3}, {2000, 33}};
    for (int s = 0; s < 8; s++) {
        int64_t n = shapes[s / 2][0], cols = shapes[s / 2][1];
        bool masked_out = s & 1; /* nothing counted: 0/0 */
        cases c = {.state = (uint64_t)s};
        tensor p = random_tensor(&c, SHAPE2(n, cols)), t = random_tensor(&c, SHAPE2(n, cols)), mask = random_tensor(&c, SHAPE2(n, cols));
        tensor out[3] = {result_tensor(&c, SHAPE1(1)), result_tensor(&c, SHAPE2(n, cols)), result_tensor(&c, SHAPE1(1))};
        tensor dloss = random_tensor(&c, SHAPE1(1)), dp = result_tensor(&c, SHAPE2(n, cols));
        double sum = 0, count = 0;
        for (int64_t i = 0; i < p.n; i++) {
            mask.f[i] = !masked_out && random_below(&c, 3) ? 1 : 0;
            out[1].f[i] = mask.f[i] * (p.f[i] - t.f[i]) * (p.f[i] - t.f[i]);
            sum += out[1].f[i];
            count += mask.f[i];
        }
        if (!masked_out && p.n == 1)
            mask.f[0] = 1, out[1].f[0] = sum = (p.f[0] - t.f[0]) * (p.f[0] - t.f[0]), count = 1;
        out[0].f[0] = sum / count;
        out[2].f[0] = count;
        vlai_node node = {.op = VLAI_OP_masked_mse};
        tensor in[3] = {p, t, mask};
        CHECK_KERNEL(masked_mse, &node, in, 3, out, 3, 2e-7);
        out[1].f = out[2].f = NULL;
        CHECK_KERNEL(masked_mse, &node, in, 3, out, 3, 2e-7);
        tensor counted = result_tensor(&c, SHAPE1(1));
        counted.f[0] = count;
        for (int64_t i = 0; i < p.n; i++) /* inf * 0 is NaN without a counted element */
            dp.f[i] = dloss.f[0] * 2 / count * (mask.f[i] * (p.f[i] - t.f[i]));
        node.op = VLAI_OP_masked_mse_grad;
        CHECK_KERNEL(masked_mse_grad, &node, ((tensor[]){dloss, p, t, mask, counted}), 5, &dp, 1, 3e-7);
        vlai_arena_fini(&c.arena);
    }
}

static void test_cross_entropy(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {5, 7}, {0, 3}, {300, 130}, {3, 5000}};
    for (int s = 0; s < 10; s++) {
        int64_t n = shapes[s / 2][0], classes = shapes[s / 2][1];
        bool none = s & 1; /* no counted row: 0 */
        cases c = {.state = (uint64_t)s};
        tensor x = random_tensor(&c, SHAPE2(n, classes)), labels = index_tensor(&c, SHAPE1(n));
        tensor out[3] = {result_tensor(&c, SHAPE1(1)), result_tensor(&c, SHAPE1(n)), result_tensor(&c, SHAPE1(1))};
        tensor dloss = random_tensor(&c, SHAPE1(1)), dx = result_tensor(&c, SHAPE2(n, classes));
        for (int64_t i = 0; i < x.n; i++)
            x.f[i] *= 16;
        for (int64_t r = 0; r < n; r++) {
            labels.i[r] = none ? -100 : r == 1 ? (int32_t)classes : (int32_t)random_below(&c, classes);
            if (labels.i[r] < 0 || labels.i[r] >= classes)
                continue;
            double top = -INFINITY, sum = 0;
            for (int64_t k = 0; k < classes; k++)
                top = fmax(top, x.f[r * classes + k]);
            for (int64_t k = 0; k < classes; k++)
                sum += exp(x.f[r * classes + k] - top);
            out[1].f[r] = top + log(sum) - x.f[r * classes + labels.i[r]];
            for (int64_t k = 0; k < classes; k++)
                dx.f[r * classes + k] = exp(x.f[r * classes + k] - top) / sum - (k == labels.i[r]);
            out[0].f[0] += out[1].f[r];
            out[2].f[0] += 1;
        }
        tensor count = result_tensor(&c, SHAPE1(1));
        count.f[0] = out[2].f[0];
        out[0].f[0] = count.f[0] > 0 ? out[0].f[0] / count.f[0] : 0;
        for (int64_t i = 0; i < dx.n && count.f[0] > 0; i++)
            dx.f[i] *= dloss.f[0] / count.f[0];
        vlai_node node = {.op = VLAI_OP_cross_entropy};
        CHECK_KERNEL(cross_entropy, &node, ((tensor[]){x, labels}), 2, out, 3, 5e-7);
        node.op = VLAI_OP_cross_entropy_grad;
        /* x - lse up to 60 is rounded before exp: 2^-19 relative at worst. */
        CHECK_KERNEL(cross_entropy_grad, &node, ((tensor[]){dloss, x, labels, count}), 4, &dx, 1, 4e-6);
        vlai_arena_fini(&c.arena);
    }
}

static void test_patchify(void **state)
{
    (void)state;
    /* Two pictures, 8 x 12 and 4 x 4 pixels, in patches of 4; and one patch past the end. */
    enum { SIDE = 4, TEMPORAL = 2, PATCHES = 8, COLS = 3 * TEMPORAL * SIDE * SIDE, BYTES = 3 * (8 * 12 + 4 * 4) };
    cases c = {.state = 5};
    tensor pixels = empty_tensor(SHAPE1(BYTES)), patches = index_tensor(&c, SHAPE2(PATCHES, 3));
    tensor y = result_tensor(&c, SHAPE2(PATCHES, COLS));
    pixels.dtype = VLA_U8;
    pixels.u = case_alloc(&c, BYTES);
    for (int i = 0; i < BYTES; i++)
        pixels.u[i] = (uint8_t)random_bits(&c);
    vlai_node node = {.op = VLAI_OP_patchify,
                      .attrs.patchify = {SIDE, TEMPORAL, {0.48f, 0.45f, 0.5f}, {0.25f, 0.26f, 0.27f}, VLA_F32}};
    for (int p = 0; p < PATCHES; p++) {
        int first = p < 6 ? 3 * (p / 3 * SIDE * 12 + p % 3 * SIDE) : p == 6 ? 3 * 8 * 12 : BYTES - 4;
        int stride = p < 6 ? 3 * 12 : 3 * 4;
        memcpy(patches.i + 3 * p, (int32_t[]){first, stride, 0}, 12);
        for (int i = 0; i < COLS; i++) {
            int channel = i / (TEMPORAL * SIDE * SIDE), row = i / SIDE % SIDE, col = i % SIDE;
            double mean = (double)node.attrs.patchify.mean[channel], std = (double)node.attrs.patchify.std[channel];
            y.f[p * COLS + i] = p == 7 ? NAN : (pixels.u[first + row * stride + 3 * col + channel] - 255 * mean) / (255 * std);
        }
    }
    CHECK_KERNEL(patchify, &node, ((tensor[]){pixels, patches}), 2, &y, 1, 3e-7);
    vlai_arena_fini(&c.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_masked_mse),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_patchify),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
