/* Times the CPU kernels at the shapes of small models, with one thread and with all.
 *
 *     bench_cpu            matmul grids and attention; milliseconds and GFLOP/s, best of several runs
 */
#include "base/memory.h"
#include "base/pool.h"
#include "base/time.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include "cpu/workspace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORKERS = 256 };

typedef struct {
    vlai_cpu_call call;
    vlai_node node;
} bench;

static float *values(int64_t n)
{
    float *p = vlai_alloc_aligned((size_t)(n + 16) * sizeof *p, 64);
    if (!p)
        exit(1);
    for (int64_t i = 0; i < n; i++)
        p[i] = (float)(i % 17) / 17 - 0.5f;
    return p;
}

static vlai_cpu_tensor tensor2(int64_t rows, int64_t cols, void *data)
{
    return (vlai_cpu_tensor){data ? data : values(rows * cols), VLA_F32, 2, {rows, cols}, rows * cols};
}

/* Seconds of the best of enough runs to fill a quarter of a second. */
static double time_call(vlai_cpu_fn fn, bench *b, int n_in, vlai_pool *pool)
{
    vlai_value_info info[VLAI_MAX_INPUTS] = {0};
    b->node.n_inputs = (int8_t)n_in;
    for (int k = 0; k < n_in; k++) {
        info[k].rank = b->call.in[k].rank;
        info[k].elements = b->call.in[k].elements;
        memcpy(info[k].shape, b->call.in[k].shape, sizeof info[k].shape);
        b->node.inputs[k] = k;
    }
    vla_graph graph = {.values = info, .n_values = (size_t)n_in};
    size_t shared, each;
    vlai_cpu_workspace(&graph, &b->node, &shared, &each);
    b->call.node = &b->node;
    b->call.pool = pool;
    b->call.workspace = vlai_alloc_aligned(shared + 64, 64);
    b->call.thread_workspace = vlai_alloc_aligned(each * (size_t)vlai_pool_threads(pool) + 64, 64);
    b->call.workspace_per_thread = each;
    if (!b->call.workspace || !b->call.thread_workspace)
        exit(1);
    double best = 1e9, begin = vlai_now();
    for (int run = 0; run < 5 || vlai_now() - begin < 0.25; run++) {
        double t = vlai_now();
        fn(&b->call);
        t = vlai_now() - t;
        if (t < best)
            best = t;
    }
    vlai_free(b->call.workspace);
    vlai_free(b->call.thread_workspace);
    return best;
}

static void bench_matmul(int64_t m, int64_t n, int64_t k, int ta, int tb, vlai_pool *pool)
{
    bench b = {.node = {.op = VLAI_OP_matmul, .attrs.matmul = {.transpose_a = ta, .transpose_b = tb}}};
    b.call.in[0] = ta ? tensor2(k, m, NULL) : tensor2(m, k, NULL);
    b.call.in[1] = tb ? tensor2(n, k, NULL) : tensor2(k, n, NULL);
    b.call.out[0] = tensor2(m, n, NULL);
    vlai_gemm_grid grid = vlai_gemm_grid_of(m, n, k);
    double one = time_call(vlai_cpu_matmul_float, &b, 2, NULL), all = time_call(vlai_cpu_matmul_float, &b, 2, pool);
    double flops = 2.0 * (double)m * (double)n * (double)k;
    printf("matmul %5lld x %4lld x %5lld %c%c  %7.3f ms %6.1f GFLOP/s | %7.3f ms %6.1f GFLOP/s  tiles %lld x %lld x %lld\n",
           (long long)m, (long long)n, (long long)k, ta ? 'T' : 'N', tb ? 'T' : 'N', one * 1e3, flops / one * 1e-9,
           all * 1e3, flops / all * 1e-9, (long long)grid.n_rows, (long long)grid.n_cols, (long long)grid.n_depth);
    vlai_free(b.call.in[0].data);
    vlai_free(b.call.in[1].data);
    vlai_free(b.call.out[0].data);
}

static void bench_attention(int64_t segments, int64_t length, int heads, int kv_heads, int dim, int causal, vlai_pool *pool)
{
    int64_t n = segments * length;
    bench b = {.node = {.attrs.attention = {.heads = heads, .kv_heads = kv_heads, .head_dim = dim, .scale = 0.2}}};
    int32_t *qpos = vlai_array((size_t)n, 4), *rows = vlai_array((size_t)n, 8), *cols = vlai_array((size_t)n, 16);
    if (!qpos || !rows || !cols)
        exit(1);
    for (int64_t i = 0; i < n; i++) {
        int64_t first = i / length * length;
        qpos[i] = (int32_t)i;
        memcpy(rows + 2 * i, (int32_t[]){(int32_t)first, (int32_t)(first + length)}, 8);
        memcpy(cols + 4 * i, (int32_t[]){causal ? (int32_t)i : 0, INT32_MAX, 0, 0}, 16);
    }
    vlai_cpu_tensor index[3] = {{qpos, VLA_I32, 1, {n}, n}, tensor2(n, 2, rows), tensor2(n, 4, cols)};
    vlai_cpu_tensor q = tensor2(n, heads * dim, NULL), k = tensor2(n, kv_heads * dim, NULL), v = tensor2(n, kv_heads * dim, NULL);
    vlai_cpu_tensor o = tensor2(n, heads * dim, NULL), lse = tensor2(n, heads, NULL);
    double flops = 4.0 * (double)n * (double)length * heads * dim;
    for (int backward = 0; backward < 2; backward++) {
        vlai_cpu_fn fn = backward ? vlai_cpu_attention_grad_float : vlai_cpu_attention_float;
        if (!backward) {
            b.node.op = VLAI_OP_attention;
            memcpy(b.call.in, (vlai_cpu_tensor[]){q, k, v, index[0], index[1], index[2]}, 6 * sizeof q);
            b.call.out[0] = o;
            b.call.out[1] = lse;
        } else {
            b.node.op = VLAI_OP_attention_grad;
            memcpy(b.call.in, (vlai_cpu_tensor[]){o, q, k, v, o, lse, index[0], index[1], index[2]}, 9 * sizeof q);
            b.call.out[0] = tensor2(n, heads * dim, NULL);
            b.call.out[1] = tensor2(n, kv_heads * dim, NULL);
            b.call.out[2] = tensor2(n, kv_heads * dim, NULL);
        }
        double one = time_call(fn, &b, backward ? 9 : 6, NULL), all = time_call(fn, &b, backward ? 9 : 6, pool);
        double work = backward ? 2.5 * flops : flops;
        printf("attention%s %lld x %lld rows, %d/%d heads of %d%s  %7.3f ms %6.1f GFLOP/s | %7.3f ms %6.1f GFLOP/s\n",
               backward ? "_grad" : "     ", (long long)segments, (long long)length, heads, kv_heads, dim,
               causal ? ", causal" : "", one * 1e3, work / one * 1e-9, all * 1e3, work / all * 1e-9);
    }
    for (int i = 0; i < 3; i++)
        vlai_free(b.call.out[i].data);
    vlai_free(q.data), vlai_free(k.data), vlai_free(v.data), vlai_free(o.data), vlai_free(lse.data);
    vlai_free(qpos), vlai_free(rows), vlai_free(cols);
}

static void bench_simple(const char *name, vlai_op op, vlai_cpu_fn fn, int64_t rows, int64_t in_cols, int64_t out_cols, int n_in,
                         vlai_pool *pool)
{
    bench b = {.node.op = op};
    for (int k = 0; k < n_in; k++)
        b.call.in[k] = tensor2(rows, in_cols, NULL);
    b.call.out[0] = tensor2(rows, out_cols, NULL);
    b.node.attrs.norm.eps = 1e-6;
    double one = time_call(fn, &b, n_in, NULL), all = time_call(fn, &b, n_in, pool);
    double elements = (double)(rows * out_cols);
    printf("%-14s %5lld x %4lld  %7.3f ms %6.2f ns/element | %7.3f ms\n", name, (long long)rows, (long long)out_cols, one * 1e3,
           one * 1e9 / elements, all * 1e3);
    for (int k = 0; k < n_in; k++)
        vlai_free(b.call.in[k].data);
    vlai_free(b.call.out[0].data);
}

int main(void)
{
    vla_error err;
    vlai_pool *pool;
    if (vlai_pool_create(0, &pool, &err) != VLA_OK) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    printf("one thread | %d threads\n", vlai_pool_threads(pool));
    static const int64_t widths[][2] = {{64, 64}, {128, 128}, {256, 128}, {512, 128}, {128, 512}, {1000, 128}};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        bench_matmul(3000, widths[w][0], widths[w][1], 0, 1, pool); /* y = x w^T */
        bench_matmul(3000, widths[w][1], widths[w][0], 0, 0, pool); /* dx = dy w */
        bench_matmul(widths[w][0], widths[w][1], 3000, 1, 0, pool); /* dw = dy^T x */
    }
    bench_matmul(1024, 1024, 1024, 0, 1, pool);
    bench_attention(32, 100, 4, 2, 32, 1, pool);
    bench_attention(32, 80, 4, 2, 16, 1, pool);
    bench_attention(64, 16, 2, 2, 16, 0, pool);
    bench_attention(64, 32, 4, 4, 16, 0, pool);
    bench_attention(256, 4, 2, 2, 16, 0, pool);
    bench_attention(2, 300, 16, 2, 128, 1, pool);
    bench_simple("add", VLAI_OP_add, vlai_cpu_add_float, 3000, 128, 128, 2, pool);
    bench_simple("silu", VLAI_OP_silu, vlai_cpu_silu_float, 3000, 128, 128, 1, pool);
    bench_simple("silu_grad", VLAI_OP_silu_grad, vlai_cpu_silu_grad_float, 3000, 128, 128, 2, pool);
    bench_simple("gelu", VLAI_OP_gelu, vlai_cpu_gelu_float, 3000, 128, 128, 1, pool);
    bench_simple("gelu_grad", VLAI_OP_gelu_grad, vlai_cpu_gelu_grad_float, 3000, 128, 128, 2, pool);
    bench_simple("swiglu", VLAI_OP_swiglu, vlai_cpu_swiglu_float, 3000, 512, 256, 1, pool);
    bench_simple("rms_norm", VLAI_OP_rms_norm, vlai_cpu_rms_norm_float, 3000, 128, 128, 1, pool);
    bench_simple("rms_norm_grad", VLAI_OP_rms_norm_grad, vlai_cpu_rms_norm_grad_float, 3000, 128, 128, 3, pool);
    bench_simple("grad_weight", VLAI_OP_rms_norm_grad_weight, vlai_cpu_rms_norm_grad_weight_float, 3000, 128, 128, 3, pool);
    vlai_pool_destroy(pool);
    return 0;
}
