/* What a row of vla bench runs: a store, plans, and the runs of them. */
#ifndef CLI_BENCH_ENGINE_H
#define CLI_BENCH_ENGINE_H

#include "bench.h"

#include "dist/comm.h"
#include "model/wallx_workload.h"

/* Without `compile` gradients go to the store and a second plan steps them, as the trainer does it. */
typedef struct bench_engine {
    vlai_wallx_config model;
    vlai_wallx_workload work, *more; /* more: micro-batches of the step behind the first */
    int64_t n_more;
    vla_store *store;
    vla_executor *executor;
    vlai_comm *comm; /* NULL: one rank */
    vla_plan *plan, *update_plan;
    vla_run *run, *update;
    vla_gradient_status *gradients;
    bool device;
} bench_engine;

/* Several ranks, after the row's steps: what collectives cost a step, and what they take by themselves. */
vla_status bench_turns(const bench_setup *setup, bench_engine *engine, bench_row *row, vla_error *err);

#endif
