/* Collectives beside what they should give, for tests on the CPU (tests/dist) and on GPUs (tests/gpu): values to bring, sums to
 * find, and a plan with all three collectives. Results 0: as wanted; else it has been said on stderr. */
#ifndef VLA_TEST_COMM_CASES_H
#define VLA_TEST_COMM_CASES_H

#include "base/bf16.h"
#include "base/fail.h"
#include "dist/comm.h"
#include "graph/graph.h"
#include "vla/run.h"

#include <stdio.h>
#include <string.h>

#define SAY(...) (fprintf(stderr, "rank %d: ", vlai_comm_rank(comm)), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), 1)

/* Element i of what a rank brings: of both signs and all sizes, so that the order of adding shows. */
static inline double element(int rank, int64_t i)
{
    uint64_t x = (uint64_t)(rank + 1) * 0x9E3779B97F4A7C15u + (uint64_t)i * 0xBF58476D1CE4E5B9u;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBu;
    x ^= x >> 32;
    double size = (double)(1u << (x >> 58 & 15)) / 256, sign = x & 1 ? -1 : 1;
    return sign * size * (1 + (double)(x >> 8 & 0xFFFFF) * 0x1p-20);
}

static inline void put(vla_dtype dtype, void *data, int64_t i, double x)
{
    switch (dtype) {
    case VLA_F64: ((double *)data)[i] = x; break;
    case VLA_F32: ((float *)data)[i] = (float)x; break;
    case VLA_BF16: ((uint16_t *)data)[i] = vlai_bf16_from_float((float)x); break;
    case VLA_I64: ((int64_t *)data)[i] = (int64_t)(x * 1e6); break;
    default: ((int32_t *)data)[i] = (int32_t)(x * 1000); break;
    }
}

/* Element i of the sum over ranks, put into `to`. */
static inline void put_sum(vla_dtype dtype, void *to, int64_t at, int world, int64_t i)
{
    double wide = 0;
    float narrow = 0;
    int64_t whole = 0;
    for (int r = 0; r < world; r++) {
        double x = element(r, i);
        float f = dtype == VLA_BF16 ? vlai_bf16_to_float(vlai_bf16_from_float((float)x)) : (float)x;
        wide = r ? wide + x : x;
        narrow = r ? narrow + f : f;
        whole += dtype == VLA_I64 ? (int64_t)(x * 1e6) : (int32_t)(x * 1000);
    }
    switch (dtype) {
    case VLA_F64: ((double *)to)[at] = wide; break;
    case VLA_F32: ((float *)to)[at] = narrow; break;
    case VLA_BF16: ((uint16_t *)to)[at] = vlai_bf16_from_float(narrow); break;
    case VLA_I64: ((int64_t *)to)[at] = whole; break;
    default: ((int32_t *)to)[at] = (int32_t)whole; break;
    }
}

static inline vla_status plan_of_collectives(int rank, int world, int64_t part, vla_numerics numerics, unsigned fast, int overlap, vla_plan **plan, vla_error *err)
{
    vla_graph *g = NULL;
    VLA_TRY(vla_graph_create(&g, err));
    vla_value bucket = vla_graph_input(g, "bucket", VLA_COMPUTE, 1, (int64_t[]){part * world});
    vla_value whole = vla_graph_input(g, "whole", VLA_COMPUTE, 1, (int64_t[]){part * world});
    vla_value shard = vlai_reduce_scatter(g, bucket, rank, world, 0);
    vla_graph_name(g, vla_scale(g, shard, 2), "twice");
    vlai_all_gather(g, whole, rank, world, 1);
    vla_graph_name(g, vla_scale(g, whole, 2), "gathered");
    vlai_all_reduce(g, shard, rank, world, 2);
    vla_graph_name(g, vla_scale(g, shard, 4), "total");
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.numerics = numerics;
    o.fast = fast;
    o.overlap = overlap;
    return vla_plan_build(g, &o, plan, err);
}

static inline double real(const vla_tensor *t, int64_t i)
{
    return t->dtype == VLA_F64 ? ((const double *)t->data)[i] : t->dtype == VLA_BF16 ? (double)vlai_bf16_to_float(((const uint16_t *)t->data)[i]) : (double)((const float *)t->data)[i];
}

/* Small integers: every sum is exact, whatever the type. */
static inline double whole_number(int rank, int64_t i)
{
    return (double)((i * 7 + rank * 3) % 11 - 5);
}

static inline int check_plan(vlai_comm *comm, const char *device, int64_t part, vla_numerics numerics, unsigned fast, int overlap)
{
    int world = vlai_comm_world(comm), rank = vlai_comm_rank(comm), bad = 0;
    vla_error err = VLA_ERROR_INIT;
    vla_plan *plan = NULL;
    vla_executor *ex = NULL;
    vla_run *run = NULL;
    if (plan_of_collectives(rank, world, part, numerics, fast, overlap, &plan, &err) != VLA_OK || vla_executor_create_on(device, 1, &ex, &err) != VLA_OK)
        return SAY("%s", err.message);
    if (world > 1 && vla_run_create(ex, plan, NULL, &run, &err) == VLA_OK)
        return SAY("a plan of %d ranks runs without a communicator", world);
    if (world > 1 && !strstr(err.message, "rank 0 of 1"))
        return SAY("message: %s", err.message);
    vlai_executor_set_comm(ex, comm);
    if (vla_run_create(ex, plan, NULL, &run, &err) != VLA_OK)
        return SAY("%s", err.message);
    vla_tensor bucket = vla_run_tensor(run, "bucket"), all = vla_run_tensor(run, "whole");
    for (int repeat = 0; repeat < 4; repeat++) {
        for (int64_t i = 0; i < bucket.elements; i++) {
            put(bucket.dtype, bucket.data, i, whole_number(rank, i + repeat));
            put(all.dtype, all.data, i, i / part == rank ? whole_number(rank, i + repeat) : 99);
        }
        if (vla_run_execute(run, &err) != VLA_OK)
            return SAY("%s", err.message);
        vla_tensor twice = vla_run_tensor(run, "twice"), gathered = vla_run_tensor(run, "gathered"), total = vla_run_tensor(run, "total");
        for (int64_t i = 0; i < part * world; i++)
            if (real(&gathered, i) != 2 * whole_number((int)(i / part), i + repeat))
                bad = SAY("gathered[%lld] is %g", (long long)i, real(&gathered, i));
        for (int64_t i = 0; i < part; i++) {
            double own = 0, every = 0;
            for (int r = 0; r < world; r++)
                for (int to = 0; to < world; to++) {
                    every += whole_number(r, to * part + i + repeat);
                    own += to == rank ? whole_number(r, to * part + i + repeat) : 0;
                }
            if (real(&twice, i) != 2 * own || real(&total, i) != 4 * every)
                bad = SAY("element %lld: %g and %g, wanted %g and %g", (long long)i, real(&twice, i), real(&total, i), 2 * own, 4 * every);
        }
    }
    vla_run_destroy(run);
    vla_executor_destroy(ex);
    vla_plan_destroy(plan);
    return bad;
}

#endif
