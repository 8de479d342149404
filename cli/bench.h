/* The inside of vla bench: cli/bench.c reads the request and prints rows, bench_step.c measures one, bench_profile.c shows
 * where a step's time goes, bench_loader.c measures the loader. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "exec/device_facts.h"
#include "exec/profile.h"
#include "model/wallx_workload.h"
#include "train/config.h"

#include <jansson.h>
#include <stdbool.h>

/* What a row turns on; the names of the environment in cli/bench.c. */
typedef struct bench_switches {
    bool attention, alloc, optimizer, visual, compile, ahead;
} bench_switches;

enum { BENCH_LOSSES = 5 };
static const int bench_loss_at[BENCH_LOSSES] = {1, 5, 10, 20, 29}; /* iterations, from 0 */

typedef struct bench_setup {
    const vlai_config *train;
    vlai_wallx_config model;
    vlai_wallx_workload_options work; /* samples: of the row */
    const char *device;
    int threads;
    int64_t steps;
    size_t limit;     /* bytes of device memory; 0: all of it */
    int recompute;    /* vla_recompute; -1: with `alloc` the least that fits, else none */
    bool profile;
} bench_setup;

typedef struct bench_row {
    const char *variant;
    bench_switches switches;
    vla_numerics numerics;
    int64_t batch;
    bool out_of_memory;
    char reason[1024]; /* of running out */
    vla_recompute recompute;
    double step, fastest, slowest; /* seconds: median and ends of the second half of the steps */
    int measured;                  /* steps of that half */
    double loss[BENCH_LOSSES];     /* NAN: that iteration was not run */
    double grad_norm;              /* before the clip, last step */
    double flops, executed;        /* of a step: model FLOPs, and what the plan executes */
    size_t held, host_bytes;       /* device memory of this program's own; arena of a CPU run */
    vlai_device_now now;           /* at the end of the loop */
    uint64_t allocations, synchronizations; /* of the device, in the second half of the steps */
    double plan_seconds, bind_seconds, weights_seconds;
    size_t nodes;
    int threads;
    vlai_profile profile; /* with setup.profile */
    struct bench_engine *engine; /* what was measured, which the profile points into; NULL */
} bench_row;

/* Measures one row. Running out of device memory is a result, not an error. The row holds what it measured, so bench_row_fini
 * comes before the next. */
vla_status bench_measure(const bench_setup *setup, bench_row *row, vla_error *err);
void bench_row_fini(bench_row *row);
const vla_plan *bench_row_plan(const bench_row *row);

/* `facts` may be without peaks. The json variant adds to the row's object. */
void bench_profile_print(const bench_row *row, const vlai_device_facts *facts);
json_t *bench_profile_json(const bench_row *row);

/* Samples per second that the configuration's loader reads from its data set. */
vla_status bench_loader(const vlai_config *config, double seconds, bool json, FILE *out, vla_error *err);

#endif
