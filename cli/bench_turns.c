/* What collectives cost a step of several ranks: steps of the same plan with and without them, in turns, so that the clock of a
 * warm device is the same for both; and the same collectives back to back, with nothing beside them. Without them every rank
 * steps its own sums: the numbers are no training any more, the work is the same. */
#include "bench_engine.h"

#include "base/fail.h"
#include "base/order.h"

#include <stdlib.h>

enum { TURNS = 3, UNCOUNTED = 2 /* steps of a turn: the first launches, the second captures */, REPEATS = 5 };

static void swap_runs(bench_engine *e, vla_run **run, vla_run **update)
{
    vla_run *r = e->run, *u = e->update;
    e->run = *run;
    e->update = *update;
    *run = r;
    *update = u;
}

static vla_status take_turns(const bench_setup *s, bench_engine *e, bench_row *row, int64_t counted, double *times, vla_run **run, vla_run **update, vla_error *err)
{
    int64_t step = s->steps, length = counted + UNCOUNTED;
    double *sorted[2] = {times, times + TURNS * counted}, *own = times + 2 * TURNS * counted;
    for (int turn = 0; turn < TURNS; turn++)
        for (int alone = 0; alone < 2; alone++, step += length) {
            VLA_TRY(vlai_group_barrier(s->ranks->group, "the turns of a measurement", 0, err));
            vlai_comm_pause(e->comm, alone);
            if (alone)
                swap_runs(e, run, update);
            vla_status status = bench_steps(s, e, &row->switches, step, length, own, NULL, err);
            if (alone)
                swap_runs(e, run, update);
            vlai_comm_pause(e->comm, false);
            VLA_TRY(status);
            for (int64_t i = 0; i < counted; i++)
                sorted[alone][turn * counted + i] = own[UNCOUNTED + i];
        }
    for (int alone = 0; alone < 2; alone++)
        qsort(sorted[alone], (size_t)(TURNS * counted), sizeof *times, vlai_by_value);
    row->together = sorted[0][TURNS * counted / 2];
    row->alone = sorted[1][TURNS * counted / 2];
    return VLA_OK;
}

static void add(vlai_comm_rate *to, const vlai_comm_rate *from)
{
    if (from->calls && !to->calls)
        *to = *from;
}

vla_status bench_turns(const bench_setup *s, bench_engine *e, bench_row *row, vla_error *err)
{
    int64_t counted = s->steps / 6 > 1 ? s->steps / 6 : 1;
    double *times = vlai_array((size_t)((2 * TURNS + 1) * counted + UNCOUNTED), sizeof *times);
    vla_run *run = NULL, *update = NULL;
    vlai_comm_rates own = {0};
    vla_status status = times ? vla_run_create(e->executor, e->plan, e->store, &run, err) : vlai_nomem(err, (size_t)counted * sizeof *times);
    if (status == VLA_OK && e->update_plan)
        status = vla_run_create(e->executor, e->update_plan, e->store, &update, err);
    if (status == VLA_OK)
        status = take_turns(s, e, row, counted, times, &run, &update, err);
    vla_run_destroy(update);
    vla_run_destroy(run);
    vlai_free(times);
    VLA_TRY(status);
    VLA_TRY(vlai_group_barrier(s->ranks->group, "collectives by themselves", 0, err));
    VLA_TRY(vlai_comm_rates_measure(e->run, REPEATS, &row->rates, err));
    if (!e->update)
        return VLA_OK;
    VLA_TRY(vlai_comm_rates_measure(e->update, REPEATS, &own, err));
    add(&row->rates.reduce_scatter, &own.reduce_scatter);
    add(&row->rates.all_gather, &own.all_gather);
    add(&row->rates.all_reduce, &own.all_reduce);
    return VLA_OK;
}
