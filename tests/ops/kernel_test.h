/* Runs a CPU kernel on a case and compares it with a plain reference in double.
 *
 *     cases c = {0};
 *     tensor x = random_tensor(&c, SHAPE2(3, 5)), y = result_tensor(&c, SHAPE2(3, 5));
 *     for (int64_t i = 0; i < x.n; i++) y.f[i] = 2 * x.f[i];
 *     vlai_node node = {.op = VLAI_OP_scale, .attrs.fill.value = 2};
 *     CHECK_KERNEL(scale, &node, &x, 1, &y, 1, 1e-6);
 *
 * Each case runs in float and in double, without a pool and with 1, 2 and 3 threads. The results must be within the
 * tolerance of the reference (relative to its largest value or 0.1; 1e-13 in double), equal to the bit for every thread count,
 * and nothing else may be written: not the bytes around the results, not the operands. */
#ifndef VLA_KERNEL_TEST_H
#define VLA_KERNEL_TEST_H

#include "test.h"

#include "base/bf16.h"
#include "base/memory.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "cpu/workspace.h"

#include <math.h>
#include <stdbool.h>

typedef struct cases {
    vlai_arena arena;
    uint64_t state;
} cases;

/* Exactly one of f, i, u is set, by dtype; none for an operand left out. Floating values are exact in float. */
typedef struct tensor {
    vla_dtype dtype;
    int rank;
    int64_t shape[VLA_MAX_RANK], n;
    double *f;
    int32_t *i;
    uint8_t *u;
} tensor;

#define SHAPE1(a) 1, (int64_t[]){a}
#define SHAPE2(a, b) 2, (int64_t[]){a, b}

static inline uint64_t random_bits(cases *c)
{
    c->state += 0x9E3779B97F4A7C15u; /* splitmix64 */
    uint64_t z = c->state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform in [-2, 2), a multiple of 2^-18. */
static inline double random_value(cases *c)
{
    return (double)((int64_t)(random_bits(c) >> 44) - (1 << 19)) / (1 << 18);
}

static inline int64_t random_below(cases *c, int64_t n)
{
    return (int64_t)(random_bits(c) >> 1) % n;
}

static inline tensor empty_tensor(int rank, const int64_t *shape)
{
    tensor t = {.dtype = VLA_F32, .rank = rank, .n = 1};
    for (int k = 0; k < rank; k++) {
        t.shape[k] = shape[k];
        t.n *= shape[k];
    }
    return t;
}

static inline void *case_alloc(cases *c, size_t bytes)
{
    void *p = vlai_arena_alloc(&c->arena, bytes + 64);
    assert_non_null(p);
    return p;
}

static inline tensor result_tensor(cases *c, int rank, const int64_t *shape)
{
    tensor t = empty_tensor(rank, shape);
    t.f = case_alloc(c, (size_t)t.n * sizeof(double));
    return t;
}

static inline tensor random_tensor(cases *c, int rank, const int64_t *shape)
{
    tensor t = result_tensor(c, rank, shape);
    for (int64_t k = 0; k < t.n; k++)
        t.f[k] = random_value(c);
    return t;
}

static inline tensor index_tensor(cases *c, int rank, const int64_t *shape)
{
    tensor t = empty_tensor(rank, shape);
    t.dtype = VLA_I32;
    t.i = case_alloc(c, (size_t)t.n * sizeof(int32_t));
    return t;
}

static inline size_t element_size(const tensor *t, size_t real_size)
{
    return t->i ? 4 : t->u ? 1 : real_size;
}

static inline void to_memory(const tensor *t, void *to, size_t real_size)
{
    if (t->i)
        memcpy(to, t->i, (size_t)t->n * 4);
    else if (t->u)
        memcpy(to, t->u, (size_t)t->n);
    else
        for (int64_t k = 0; k < t->n; k++) {
            if (real_size == 4)
                ((float *)to)[k] = (float)t->f[k];
            else
                ((double *)to)[k] = t->f[k];
        }
}

/* The kernel's scratch needs, from a graph that holds the operands' shapes. */
static inline void workspace_of(const vlai_node *node, const tensor *in, int n_in, size_t *shared, size_t *per_thread)
{
    vlai_value_info values[VLAI_MAX_INPUTS] = {0};
    vlai_node copy = *node;
    copy.n_inputs = (int8_t)n_in;
    for (int k = 0; k < n_in; k++) {
        values[k].dtype = in[k].dtype;
        values[k].rank = in[k].rank;
        values[k].elements = in[k].n;
        memcpy(values[k].shape, in[k].shape, sizeof values[k].shape);
        copy.inputs[k] = k;
    }
    vla_graph graph = {.values = values, .n_values = (size_t)n_in};
    vlai_cpu_workspace(&graph, &copy, shared, per_thread);
}

enum { GUARD = 64 };

static inline void check_kernel(const char *what, vlai_cpu_fn fn[2], const vlai_node *node, const tensor *in, int n_in,
                                const tensor *out, int n_out, double tolerance)
{
    for (int wide = 0; wide < 2; wide++) {
        size_t size = wide ? 8 : 4;
        unsigned char *first_result[VLAI_MAX_OUTPUTS] = {0};
        for (int threads = 0; threads <= 3; threads++) {
            cases c = {0};
            vla_error err;
            vlai_pool *pool = NULL;
            if (threads)
                assert_ok(vlai_pool_create(threads, &pool, &err), err);
            vlai_node named = *node;
            named.n_inputs = (int8_t)n_in;
            named.n_outputs = (int8_t)n_out;
            vlai_cpu_call call = {.node = &named, .pool = pool};
            void *copies[VLAI_MAX_INPUTS];
            for (int k = 0; k < n_in; k++) {
                bool there = in[k].f || in[k].i || in[k].u;
                size_t bytes = (size_t)in[k].n * element_size(&in[k], size);
                call.in[k] = (vlai_cpu_tensor){.dtype = in[k].dtype, .rank = in[k].rank, .elements = in[k].n};
                memcpy(call.in[k].shape, in[k].shape, sizeof in[k].shape);
                call.in[k].data = there ? case_alloc(&c, bytes) : NULL;
                copies[k] = case_alloc(&c, bytes);
                if (there) {
                    to_memory(&in[k], call.in[k].data, size);
                    memcpy(copies[k], call.in[k].data, bytes);
                }
            }
            unsigned char *memory[VLAI_MAX_OUTPUTS];
            for (int k = 0; k < n_out; k++) {
                size_t bytes = (size_t)out[k].n * size;
                memory[k] = case_alloc(&c, bytes + 2 * GUARD);
                memset(memory[k], 0xFE, bytes + 2 * GUARD); /* far from any result */
                call.out[k] = (vlai_cpu_tensor){.dtype = out[k].dtype, .rank = out[k].rank, .elements = out[k].n};
                memcpy(call.out[k].shape, out[k].shape, sizeof out[k].shape);
                call.out[k].data = out[k].f ? memory[k] + GUARD : NULL;
            }
            size_t shared, each;
            workspace_of(node, in, n_in, &shared, &each);
            unsigned char *scratch = case_alloc(&c, shared + GUARD), *mine = case_alloc(&c, 3 * each + GUARD);
            memset(scratch, 0xFE, shared + GUARD);
            memset(mine, 0xFE, 3 * each + GUARD);
            call.workspace = scratch;
            call.thread_workspace = mine;
            call.workspace_per_thread = each;

            fn[wide](&call);

            for (int k = 0; k < GUARD; k++)
                if (scratch[shared + (size_t)k] != 0xFE || mine[3 * each + (size_t)k] != 0xFE)
                    fail_msg("%s: writes past its workspace", what);
            for (int k = 0; k < n_in; k++)
                if (call.in[k].data && memcmp(call.in[k].data, copies[k], (size_t)in[k].n * element_size(&in[k], size)))
                    fail_msg("%s: operand %d was written", what, k);
            for (int k = 0; k < n_out; k++) {
                size_t bytes = (size_t)out[k].n * size;
                for (size_t at = 0; at < GUARD; at++)
                    if (memory[k][at] != 0xFE || memory[k][GUARD + bytes + at] != 0xFE)
                        fail_msg("%s: writes outside result %d", what, k);
                if (!out[k].f)
                    continue;
                if (threads == 0) {
                    double largest = 0;
                    for (int64_t e = 0; e < out[k].n; e++)
                        if (isfinite(out[k].f[e]))
                            largest = fmax(largest, fabs(out[k].f[e]));
                    double allowed = (wide ? 1e-13 : tolerance) * fmax(largest, 0.1);
                    for (int64_t e = 0; e < out[k].n; e++) {
                        double got = wide ? ((double *)call.out[k].data)[e] : (double)((float *)call.out[k].data)[e];
                        double want = out[k].f[e];
                        bool same = isfinite(want) ? fabs(got - want) <= allowed
                                                   : isnan(want) ? isnan(got) : got == want;
                        if (!same)
                            fail_msg("%s in %s: result %d element %lld is %.17g, wanted %.17g within %g", what,
                                     wide ? "double" : "float", k, (long long)e, got, want, allowed);
                    }
                    first_result[k] = malloc(bytes + 1);
                    assert_non_null(first_result[k]);
                    memcpy(first_result[k], call.out[k].data, bytes);
                } else if (memcmp(first_result[k], call.out[k].data, bytes) != 0) {
                    fail_msg("%s in %s: result %d changes with %d threads", what, wide ? "double" : "float", k, threads);
                }
            }
            vlai_pool_destroy(pool);
            vlai_arena_fini(&c.arena);
        }
        for (int k = 0; k < n_out; k++)
            free(first_result[k]);
    }
}

#define CHECK_KERNEL(op, node, in, n_in, out, n_out, tolerance)                                                  \
    check_kernel(#op, (vlai_cpu_fn[]){vlai_cpu_##op##_float, vlai_cpu_##op##_double}, node, in, n_in, out, n_out, \
                 tolerance)

#endif
