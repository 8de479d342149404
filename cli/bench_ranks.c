/* Several ranks of vla bench. A row is measured by processes of its own, one per rank, which --nproc starts under the launcher's
 * supervision: what one of them runs out of, or dies of, is that row's result, and the next begins afresh. Rank 0 hands the row
 * over through a file in memory. Ranks that another launcher has started (vla launch bench, torchrun) print it themselves. */
#define _GNU_SOURCE /* memfd_create */
#include "bench_engine.h"

#include "command.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/pool.h"
#include "dist/supervise.h"
#include "exec/store.h"
#include "optim/settings.h"
#include "train/device.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { REASON = 512, OPTIONS = 8 };

/* ---- a rank ---- */

/* What each rank brings to the row. */
typedef struct own {
    double step, together, alone, held, used, arena, mhz, watts;
    vlai_comm_rates rates;
} own;

static own own_of(const bench_row *row)
{
    return (own){.step = row->step, .together = row->together, .alone = row->alone, .held = (double)row->held, .used = (double)row->now.used,
                 .arena = (double)row->host_bytes, .mhz = row->now.mhz, .watts = row->now.watts, .rates = row->rates};
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* A collective is over when its last rank is. */
static void slower(vlai_comm_rate *a, const vlai_comm_rate *b)
{
    if (b->seconds > a->seconds)
        *a = *b;
}

/* Of all ranks: the slowest, the fullest, the coolest clock, mean power. What a step takes longer than the same step without its
 * collectives, of the rank that is slowest then, is exposed communication; what that rank is behind the fastest is not. */
static void put_all(json_t *row, const own *all, int world)
{
    own s = all[0];
    double fastest = s.alone;
    for (int r = 1; r < world; r++) {
        s.step = larger(s.step, all[r].step);
        s.together = larger(s.together, all[r].together);
        s.alone = larger(s.alone, all[r].alone);
        fastest = all[r].alone < fastest ? all[r].alone : fastest;
        s.held = larger(s.held, all[r].held);
        s.used = larger(s.used, all[r].used);
        s.arena = larger(s.arena, all[r].arena);
        s.mhz = all[r].mhz < s.mhz ? all[r].mhz : s.mhz;
        s.watts += all[r].watts;
        slower(&s.rates.reduce_scatter, &all[r].rates.reduce_scatter);
        slower(&s.rates.all_gather, &all[r].rates.all_gather);
        slower(&s.rates.all_reduce, &all[r].rates.all_reduce);
    }
    bool device = json_object_get(row, "device_gb_own");
    bench_set(row, "device_gb_own", device ? s.held * 1e-9 : NAN);
    bench_set(row, "device_gb_used", device ? s.used * 1e-9 : NAN);
    bench_set(row, "arena_bytes", s.arena);
    bench_set(row, "mhz", s.mhz > 0 ? s.mhz : NAN);
    bench_set(row, "watts", s.mhz > 0 ? s.watts / world : NAN);
    if (world == 1)
        return;
    bench_set(row, "together_ms", s.together * 1e3);
    bench_set(row, "alone_ms", s.alone * 1e3);
    bench_set(row, "skew_ms", (s.alone - fastest) * 1e3);
    bench_set(row, "exposed_ms", (s.together - s.alone) * 1e3);
    bench_set(row, "exposed_share", (s.together - s.alone) / s.together);
    const struct {
        const char *name;
        const vlai_comm_rate *rate;
    } kinds[] = {{"reduce", &s.rates.reduce_scatter}, {"gather", &s.rates.all_gather}, {"all_reduce", &s.rates.all_reduce}};
    double bytes = 0, calls = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char key[32];
        const vlai_comm_rate *rate = kinds[i].rate;
        bytes += (double)rate->bytes;
        calls += (double)rate->calls;
        if (rate->calls == 0)
            continue;
        snprintf(key, sizeof key, "%s_bytes", kinds[i].name);
        bench_set(row, key, (double)rate->bytes);
        snprintf(key, sizeof key, "%s_ms", kinds[i].name);
        bench_set(row, key, rate->seconds > 0 ? rate->seconds * 1e3 : NAN);
        snprintf(key, sizeof key, "%s_gb_per_s", kinds[i].name);
        bench_set(row, key, rate->seconds > 0 ? rate->bus * 1e-9 : NAN);
    }
    bench_set(row, "collectives", calls);
    bench_set(row, "collective_bytes", bytes);
}

/* Of a step: the mean over the ranks' micro-batches. */
static vla_status mean_losses(const bench_setup *s, bench_row *row, vla_error *err)
{
    size_t steps = (size_t)s->steps, world = (size_t)s->ranks->ranks.world;
    double *all = s->ranks->ranks.rank == 0 ? vlai_array(world * steps, sizeof *all) : NULL;
    if (s->ranks->ranks.rank == 0 && !all)
        return vlai_nomem(err, world * steps * sizeof *all);
    vla_status status = vlai_group_gather(s->ranks->group, "losses", row->losses, steps * sizeof *all, all, err);
    for (size_t i = 0; all && status == VLA_OK && i < steps; i++) {
        double sum = 0;
        for (size_t r = 0; r < world; r++)
            sum += all[r * steps + i];
        row->losses[i] = sum / (double)world;
        for (int k = 0; k < BENCH_LOSSES; k++)
            if (bench_loss_at[k] == (int64_t)i)
                row->loss[k] = row->losses[i];
    }
    vlai_free(all);
    return status;
}

/* The row as rank 0 tells it; nothing in the others. */
static vla_status tell_row(const bench_setup *s, bench_row *row, const vlai_device_facts *facts, json_t **out, vla_error *err)
{
    int world = s->ranks->ranks.world, rank = s->ranks->ranks.rank;
    int64_t samples = row->batch * world * (s->accumulate > 1 ? s->accumulate : 1);
    own mine = own_of(row), *all = vlai_calloc((size_t)world, sizeof *all);
    *out = NULL;
    if (!all)
        return vlai_nomem(err, (size_t)world * sizeof *all);
    vla_status status = vlai_group_gather(s->ranks->group, "a row", &mine, sizeof mine, rank == 0 ? all : NULL, err);
    if (status == VLA_OK && !row->out_of_memory)
        status = mean_losses(s, row, err);
    if (status == VLA_OK && rank == 0) {
        json_t *o = *out = bench_row_json(row, facts);
        if (!o)
            status = vlai_nomem(err, sizeof *row);
        json_object_set_new(o, "kind", json_string("ranks"));
        json_object_set_new(o, "ranks", json_integer(world));
        json_object_set_new(o, "machines", json_integer(s->ranks->ranks.nodes));
        json_object_set_new(o, "global_batch", json_integer((json_int_t)samples));
        if (o && !row->out_of_memory) {
            bench_set(o, "samples_per_s", (double)samples / row->step);
            bench_set(o, "bucket_mb", (double)bench_bucket_bytes(s->train, &row->switches) * 1e-6);
            put_all(o, all, world);
            json_t *losses = json_array();
            for (int64_t i = 0; i < s->steps; i++)
                json_array_append_new(losses, json_real(row->losses[i]));
            json_object_set_new(o, "losses", losses);
        }
    }
    vlai_free(all);
    return status;
}

static vla_status measure(const bench_request *r, bench_setup *s, vla_numerics numerics, int64_t batch, const vlai_device_facts *facts, json_t **out, vla_error *err)
{
    bench_row row = bench_row_of(r, numerics, batch);
    vla_status status = bench_measure(s, &row, err);
    if (status == VLA_OK)
        status = tell_row(s, &row, facts, out, err);
    if (status == VLA_OK && s->ranks->ranks.world == 1 && !row.out_of_memory && s->accumulate < 2) {
        json_t *scaling = bench_scaling_json(s, &row, err);
        status = scaling ? VLA_OK : err->status;
        json_object_set_new(*out, "scaling", scaling);
    }
    if (status == VLA_OK && *out && !r->profile)
        json_object_del(*out, "profile");
    if (status == VLA_OK || s->ranks->ranks.world == 1)
        bench_row_fini(&row); /* of several ranks a failed one does not wait for what it has begun with the others */
    return status;
}

/* Rank 0 of a launcher's ranks prints what it measured. */
static void show(const bench_request *r, json_t *row, FILE *out, bool first)
{
    json_t *one = r->against ? bench_scaling_find(r->against, row) : NULL;
    bench_scaling_compare(row, one);
    bench_put(row, r->json, out);
    if (!r->json && first)
        bench_scaling_head();
    if (!r->json)
        bench_scaling_print(row);
    json_decref(one);
}

static vla_status facts_of(const bench_request *r, const bench_setup *s, vlai_device_facts *facts, vla_error *err)
{
    vla_executor *ex;
    VLA_TRY(vla_executor_create_on(s->device, (int)r->threads, &ex, err));
    vla_status status = vlai_device_facts_get(ex, facts, err);
    if (status == VLA_OK && s->ranks->ranks.world == 1 && s->accumulate == 0) /* by one rank alone, where speed is what is asked for */
        status = vlai_device_peaks_measure(ex, facts, err);
    vla_executor_destroy(ex);
    return status;
}

/* Rows in ranks: handed over through the descriptor r->row, or printed. */
static vla_status rank_rows(const bench_request *r, bench_setup *s, const bench_lists *l, FILE *out, vla_error *err)
{
    vlai_device_facts facts;
    bool first = true;
    VLA_TRY(facts_of(r, s, &facts, err));
    for (int n = 0; n < l->numerics_count; n++)
        for (int b = 0; b < l->batch_count; b++) {
            json_t *row = NULL;
            VLA_TRY(measure(r, s, l->numerics[n], l->batches[b], &facts, &row, err));
            if (!row)
                continue;
            if (r->row >= 0) {
                json_object_set_new(row, "machine", bench_machine_json(&facts, r));
                if (json_dumpfd(row, (int)r->row, JSON_COMPACT) != 0)
                    return vlai_fail(err, VLA_E_IO, "the row cannot be handed over");
            } else {
                show(r, row, out, first);
            }
            first = false;
            json_decref(row);
        }
    return VLA_OK;
}

/* What ranks of another launcher may have been given differently. */
static vla_status agree(const bench_request *r, const bench_lists *l, together *t, vla_error *err)
{
    vlai_text text = {0};
    vlai_text_printf(&text, "steps: %lld of %lld, text %lld, side %lld, pictures %lld, vocabulary %lld, plain %d, recompute %s\n", (long long)r->steps, (long long)r->accumulate, (long long)r->text,
                     (long long)r->side, (long long)r->pictures, (long long)r->vocab, r->plain, r->recompute ? r->recompute : "auto");
    for (int i = 0; i < l->batch_count; i++)
        vlai_text_printf(&text, "batch: %lld\n", (long long)l->batches[i]);
    for (int i = 0; i < l->numerics_count; i++)
        vlai_text_printf(&text, "numerics: %s\n", vlai_numerics_name(l->numerics[i]));
    vla_status status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = vlai_group_agree(t->group, "what is measured", text.data, err);
    vlai_text_fini(&text);
    return status;
}

static vla_status as_rank(bench_request *r, const vlai_config *train, const char *device, together *t, FILE *out, vla_error *err)
{
    bench_setup setup;
    bench_lists lists;
    if (!strcmp(device, "cpu") && r->threads == 0)
        r->threads = vlai_pool_processors() > t->ranks.local_world ? vlai_pool_processors() / t->ranks.local_world : 1;
    VLA_TRY(bench_lists_read(r, train, device, &lists, err));
    VLA_TRY(bench_set_up(r, train, &setup, err));
    setup.device = device;
    setup.ranks = t;
    setup.profile = setup.profile || (t->ranks.world == 1 && r->accumulate < 2); /* the model is made of it */
    if (t->group)
        VLA_TRY(agree(r, &lists, t, err));
    return rank_rows(r, &setup, &lists, out, err);
}

int bench_as_rank(const bench_request *request, const args *a, together *t)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_config *train = NULL;
    bench_request r = *request;
    char device[VLAI_DEVICE_NAME] = "";
    FILE *out = NULL;
    vla_status status = vlai_config_load(r.config, a->override, a->overrides_given, &train, &err);
    if (status == VLA_OK)
        status = vlai_device_of_rank(r.device ? r.device : train->training.device, t->ranks.local_rank, t->ranks.local_world, device, &err);
    if (status == VLA_OK && r.out && t->ranks.rank == 0 && !(out = fopen(r.out, "a")))
        status = vlai_fail(&err, VLA_E_IO, "%s: cannot be opened for writing", r.out);
    status = together_meet(t, train ? (double)train->dist.timeout_s : 0, status, &err);
    if (status == VLA_OK)
        status = as_rank(&r, train, device, t, out, &err);
    status = bench_close(out, r.out, status, &err);
    if (status != VLA_OK && r.row >= 0 && t->ranks.rank == 0) {
        json_t *failure = json_pack("{s:o}", "error", vlai_json_text(err.message));
        json_dumpfd(failure, (int)r.row, JSON_COMPACT);
        json_decref(failure);
    }
    vlai_config_destroy(train);
    return together_end(t, status, &err);
}

/* ---- who starts them ---- */

typedef struct starter {
    const bench_request *r;
    FILE *out;
    char **argv; /* of a rank; the last OPTIONS * 2 are ours */
    int argc;
    int threads;        /* of a CPU rank; 0: as many as there are */
    char said[REASON];  /* the first line of the supervision, or of a rank that has failed */
    bool by_rank, machine, stopped;
    int code;
} starter;

static void hear(void *user, int rank, const char *line)
{
    starter *s = user;
    static const char own_name[] = "vla bench: ";
    bool failure = rank >= 0 && !strncmp(line, own_name, sizeof own_name - 1);
    if (rank < 0)
        fprintf(stderr, "vla bench: %s\n", line);
    else
        fprintf(stderr, "[rank %d] %s\n", rank, line);
    if ((failure && !s->by_rank) || (rank < 0 && !*s->said)) {
        snprintf(s->said, sizeof s->said, "%s", failure ? line + sizeof own_name - 1 : line);
        s->by_rank = failure;
    }
}

static json_t *failed_row(const starter *s, int ranks, vla_numerics numerics, int64_t batch, const json_t *from, int code)
{
    char text[64];
    const char *told = json_string_value(json_object_get(from, "error"));
    snprintf(text, sizeof text, "the ranks ended with code %d", code);
    return json_pack("{s:s, s:s, s:s, s:i, s:I, s:I, s:b, s:o}", "kind", "ranks", "variant", s->r->plain ? "no switch" : "all switches", "numerics", vlai_numerics_name(numerics), "ranks",
                     ranks, "batch", (json_int_t)batch, "global_batch", (json_int_t)(batch * ranks), "oom", 0, "error", vlai_json_text(*s->said ? s->said : told ? told : text));
}

/* One row by so many processes. New reference. */
static vla_status row_of(starter *s, int ranks, vla_numerics numerics, int64_t batch, json_t **out, vla_error *err)
{
    char descriptor[16], threads[16], samples[32];
    *out = NULL;
    int fd = memfd_create("row", 0); /* the ranks inherit it */
    if (fd < 0)
        return vlai_fail(err, VLA_E_IO, "no file in memory for a row");
    snprintf(descriptor, sizeof descriptor, "%d", fd);
    snprintf(threads, sizeof threads, "%d", s->threads);
    snprintf(samples, sizeof samples, "%lld", (long long)batch);
    const char *const options[] = {"--row", descriptor, "--batch", samples, "--numerics", vlai_numerics_name(numerics), s->threads ? "--threads" : NULL, threads, NULL};
    for (int i = 0; i == 0 || options[i - 1]; i++)
        s->argv[s->argc + i] = (char *)(uintptr_t)options[i];
    vlai_supervised end = {0};
    vlai_supervise_options o = {.argv = s->argv, .ranks = ranks, .world = ranks, .nodes = 1, .nothing_to_save = true, .say = hear, .user = s};
    s->said[0] = 0;
    s->by_rank = false;
    vla_status status = vlai_supervise(&o, &end, err);
    json_t *row = NULL;
    if (status == VLA_OK && lseek(fd, 0, SEEK_SET) == 0)
        row = json_loadfd(fd, 0, NULL);
    close(fd);
    VLA_TRY(status);
    s->stopped = end.signal != 0;
    if (s->stopped) /* whatever a rank says of another that ended a little before it */
        snprintf(s->said, sizeof s->said, "ended by %s", end.signal == SIGINT ? "SIGINT" : end.signal == SIGHUP ? "SIGHUP" : "SIGTERM");
    if (!row || end.code != 0 || json_object_get(row, "error")) {
        s->code = end.code ? end.code : EXIT_RANK;
        *out = failed_row(s, ranks, numerics, batch, row, end.code);
        json_decref(row);
    } else {
        *out = row;
    }
    return *out ? VLA_OK : vlai_nomem(err, sizeof *s);
}

/* Once, before the first row. */
static void put_machine(starter *s, json_t *row)
{
    json_t *machine = json_object_get(row, "machine");
    if (!machine)
        return;
    if (!s->machine) {
        bench_put(machine, s->r->json, s->out);
        if (!s->r->json)
            printf("%s%s", json_string_value(json_object_get(machine, "device")), bench_number(machine, "gemm_tflops") > 0 ? ", " : "\n\n");
        if (!s->r->json && bench_number(machine, "gemm_tflops") > 0)
            printf("copy %.0f GB/s, product 8192^3 of bf16 %.0f TFLOP/s on the warm device\n\n", bench_number(machine, "copy_gb_per_s"), bench_number(machine, "gemm_tflops"));
        if (!s->r->json)
            bench_scaling_head();
    }
    s->machine = true;
    json_object_del(row, "machine");
}

static vla_status one_table(starter *s, const int *counts, int n, vla_numerics numerics, int64_t batch, vla_error *err)
{
    json_t *one = NULL, *widest = NULL;
    vla_status status = VLA_OK;
    for (int i = 0; i < n && status == VLA_OK && !s->stopped; i++) {
        json_t *row;
        status = row_of(s, counts[i], numerics, batch, &row, err);
        if (status != VLA_OK)
            break;
        put_machine(s, row);
        if (counts[i] == 1 && !one && bench_number(row, "step_ms") > 0)
            one = json_incref(row);
        if (!one && s->r->against)
            one = bench_scaling_find(s->r->against, row);
        bench_scaling_compare(row, one);
        bench_put(row, s->r->json, s->out);
        if (!s->r->json)
            bench_scaling_print(row);
        if (counts[i] > 1 && bench_number(row, "step_ms") > 0) {
            json_decref(widest);
            widest = json_incref(row);
        }
        json_decref(row);
    }
    if (status == VLA_OK && one)
        bench_scaling_forecast(one, widest, s->r->json, s->out);
    json_decref(one);
    json_decref(widest);
    return status;
}

static vla_status parse_counts(const char *text, int gpus, int *counts, int *n, int *most, vla_error *err)
{
    char item[32], *end;
    const char *rest = text;
    *most = 1;
    for (*n = 0; bench_next_item(&rest, item) && *n < BENCH_MOST; (*n)++) {
        long value = !strcmp(item, "auto") ? gpus > 0 ? gpus : 1 : strtol(item, &end, 10);
        if (strcmp(item, "auto") != 0 && (end == item || *end || value < 1 || value > 1024))
            return vlai_fail(err, VLA_E_INVALID, "--nproc '%s': wanted numbers of 1 to 1024, separated by commas, or auto", text);
        if (gpus > 0 && value > gpus)
            return vlai_fail_hint(err, VLA_E_INVALID, "one rank takes one GPU; CUDA_VISIBLE_DEVICES hides some; --device cpu measures without",
                                  "--nproc %ld: this machine shows %d GPU%s", value, gpus, gpus == 1 ? "" : "s");
        counts[*n] = (int)value;
        *most = (int)value > *most ? (int)value : *most;
    }
    return *n ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "--nproc '%s': no number", text);
}

static vla_status start_ranks(starter *s, const vlai_config *train, vla_error *err)
{
    char device[VLAI_DEVICE_NAME];
    int counts[BENCH_MOST], n, most;
    bench_lists lists;
    VLA_TRY(vlai_device_choose(s->r->device ? s->r->device : train->training.device, device, err));
    bool cpu = !strcmp(device, "cpu");
    VLA_TRY(parse_counts(s->r->nproc, cpu ? 0 : vlai_gpu_count(), counts, &n, &most, err));
    VLA_TRY(bench_lists_read(s->r, train, device, &lists, err));
    if (cpu && !s->r->threads) /* the same for every row */
        s->threads = vlai_pool_processors() > most ? vlai_pool_processors() / most : 1;
    if (cpu && !s->r->json)
        printf("CPU ranks, %d thread%s each\n", s->threads ? s->threads : (int)s->r->threads, (s->threads ? s->threads : s->r->threads) == 1 ? "" : "s");
    fflush(stdout);
    for (int i = 0; i < lists.numerics_count; i++)
        for (int b = 0; b < lists.batch_count && !s->stopped; b++)
            VLA_TRY(one_table(s, counts, n, lists.numerics[i], lists.batches[b], err));
    return VLA_OK;
}

int bench_start_ranks(const bench_request *r, const vlai_config *train, int argc, char **argv, FILE *out)
{
    vla_error err = VLA_ERROR_INIT;
    starter s = {.r = r, .out = out, .argc = argc + 1, .argv = vlai_calloc((size_t)argc + 2 + 2 * OPTIONS, sizeof *s.argv)};
    if (!s.argv) {
        vlai_nomem(&err, (size_t)argc * sizeof *s.argv);
        return command_fail("bench", &err);
    }
    s.argv[0] = (char *)(uintptr_t) "vla";
    memcpy(s.argv + 1, argv, (size_t)argc * sizeof *argv);
    vla_status status = start_ranks(&s, train, &err);
    vlai_free(s.argv);
    return status == VLA_OK ? s.code : command_fail("bench", &err);
}
