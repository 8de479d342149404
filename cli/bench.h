/* The inside of vla bench: cli/bench.c reads the request and prints rows, bench_step.c measures one, bench_profile.c shows
 * where a step's time goes, bench_loader.c measures the loader. With --nproc, bench_ranks.c starts ranks for each row and is
 * what a rank does, bench_turns.c measures what collectives cost a step, bench_scaling.c has the table and the model. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "exec/comm_time.h"
#include "exec/device_facts.h"
#include "exec/profile.h"
#include "model/wallx_workload.h"
#include "train/config.h"

#include "args.h"
#include "together.h"

#include <jansson.h>
#include <stdbool.h>

/* What a row turns on; the names of the environment in cli/bench.c. */
typedef struct bench_switches {
    bool attention, alloc, optimizer, visual, compile, ahead;
} bench_switches;

enum { BENCH_LOSSES = 5 };
static const int bench_loss_at[BENCH_LOSSES] = {1, 5, 10, 20, 29}; /* iterations, from 0 */

/* What was asked for. */
typedef struct bench_request {
    int64_t batch, steps, text, side, pictures, threads, vocab, accumulate;
    int64_t row; /* of a rank that --nproc has started: the descriptor that its row goes to; else -1 */
    bool profile, json, switches, plain, loader, first_choice;
    double limit, seconds, products;
    const char *config, *device, *batches, *numerics, *recompute, *out, *nproc, *against;
} bench_request;

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
    double products;   /* seconds of a search of all settings of matrix products before the steps; 0: none */
    bool first_choice; /* products by the library's first algorithm, not by the fastest of several */
    int64_t accumulate; /* micro-batches of a step of one rank, with other numbers each; 0: one, the same on all ranks */
    together *ranks;    /* NULL: one rank, and no group */
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
    double *losses;       /* of every step; as many as setup.steps */
    double together, alone; /* seconds, several ranks: median of a step, and of one without its collectives, taken in turns */
    vlai_comm_rates rates;  /* of the step's collectives back to back */
    struct bench_engine *engine; /* what was measured, which the profile points into; NULL */
} bench_row;

enum { BENCH_MOST = 64 };
typedef struct bench_lists {
    int64_t batches[BENCH_MOST];
    vla_numerics numerics[BENCH_MOST];
    int batch_count, numerics_count;
} bench_lists;

vla_status bench_lists_read(const bench_request *request, const vlai_config *train, const char *device, bench_lists *out, vla_error *err);
/* The next item of a comma-separated list; false at its end. */
bool bench_next_item(const char **list, char item[32]);
vla_status bench_set_up(const bench_request *request, const vlai_config *train, bench_setup *out, vla_error *err);
/* A row that is still to be measured, with all switches on, or none. */
bench_row bench_row_of(const bench_request *request, vla_numerics numerics, int64_t batch);
json_t *bench_row_json(const bench_row *row, const vlai_device_facts *facts);
json_t *bench_machine_json(const vlai_device_facts *facts, const bench_request *request);
void bench_machine_print(const vlai_device_facts *facts, const bench_request *request);
/* One line of JSON to the terminal, where it is asked for, and to the file, where there is one. */
void bench_put(const json_t *object, bool to_stdout, FILE *out);
/* Closes the file, if there is one; an error where one of its rows could not be written, unless `status` is one already. */
vla_status bench_close(FILE *out, const char *path, vla_status status, vla_error *err);

/* Measures one row. Running out of device memory is a result, not an error. The row holds what it measured, so bench_row_fini
 * comes before the next. */
vla_status bench_measure(const bench_setup *setup, bench_row *row, vla_error *err);
void bench_row_fini(bench_row *row);
const vla_plan *bench_row_plan(const bench_row *row);

/* Several ranks: gradients are reduced under the backward pass and weights gathered under the forward pass. */
static inline bool bench_overlaps(const bench_switches *s)
{
    return s->compile;
}
/* Bytes of a bucket: WALLX_PERF_BUCKET or perf.bucket where they overlap, else as without WALLX_PERF_DDP. */
size_t bench_bucket_bytes(const vlai_config *config, const bench_switches *s);
/* One after the other `count` steps of the engine's plans, the first of them number `first`; times[count] in seconds. row: what
 * is noted of every step goes there, or NULL. */
vla_status bench_steps(const bench_setup *setup, struct bench_engine *engine, const bench_switches *switches, int64_t first, int64_t count, double *times,
                       bench_row *row, vla_error *err);

/* `facts` may be without peaks. The json variant adds to the row's object. */
void bench_profile_print(const bench_row *row, const vlai_device_facts *facts);
json_t *bench_profile_json(const bench_row *row);

/* ---- several ranks ---- */

/* The caller is a rank: started by --nproc, or by a launcher. Returns the exit code. */
int bench_as_rank(const bench_request *request, const args *a, together *ranks);
/* Starts ranks for every row, `argv` with what they are to measure behind it. Returns the exit code; errors have been said. */
int bench_start_ranks(const bench_request *request, const vlai_config *train, int argc, char **argv, FILE *out);

/* A number of a row; NAN where there is none, and then nothing is set. */
double bench_number(const json_t *row, const char *key);
void bench_set(json_t *row, const char *key, double value);
/* What the model of scaling is made of, of a row of one rank with a profile: forward, backward and update, and the buckets that
 * several ranks would have. New reference, NULL with an error. */
json_t *bench_scaling_json(const bench_setup *setup, const bench_row *row, vla_error *err);
/* Of a row of `ranks`: efficiency and what the model says, from the row of one rank (NULL: neither). */
void bench_scaling_compare(json_t *row, const json_t *one);
void bench_scaling_head(void);
void bench_scaling_print(const json_t *row);
/* The model for more GPUs than were measured. measured: the row whose bandwidth is that within a machine; NULL: as stated. */
void bench_scaling_forecast(const json_t *one, const json_t *measured, bool json, FILE *out);
/* The last row of one rank of that kind in a file of such rows; new reference, NULL: there is none. */
json_t *bench_scaling_find(const char *path, const json_t *like);

/* Samples per second that the configuration's loader reads from its data set. */
vla_status bench_loader(const vlai_config *config, double seconds, bool json, FILE *out, vla_error *err);

#endif
