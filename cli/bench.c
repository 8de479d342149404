/* vla bench: what a training step takes on this machine, by batch and switch by switch, on made-up micro-batches of the
 * configuration's real shape. Needs no data set and no weights. */
#include "bench.h"

#include "args.h"
#include "command.h"

#include "base/fail.h"
#include "base/json.h"
#include "optim/settings.h"
#include "train/device.h"
#include "train/switches.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char help[] =
    "Usage: vla bench --config FILE [--section.key=value ...] [options]\n\n"
    "Times training steps (forward, backward, clip, AdamW) of the configured model with random weights on made-up\n"
    "micro-batches, one row per batch: median step of the second half of the steps, samples/s, model FLOPs, memory, clock and\n"
    "power at the end, losses at iterations 1, 5, 10, 20 and 29. On a GPU it first measures the copy bandwidth and a bf16\n"
    "product of 8192^3 on the warm device. A batch that memory does not hold is a row too.\n\n"
    "  --device cpu|cuda|cuda:N|auto  (training.device; auto: cuda where this build and machine have it)\n"
    "  --batches N,N,...|auto    samples per micro-batch (hyperparams.batch_size_per_gpu); the scan ends at the first that does\n"
    "                            not fit; auto: 4,8,16,20,26,32,48,64,72,80,96,128\n"
    "  --batch N                 the same for one\n"
    "  --numerics N,N,...|all    fp32, bf16, bf16-sr (training.numerics)\n"
    "  --switches                one row per switch, each added to those before it, instead of all switches on\n"
    "  --plain                   no switch on\n"
    "  --recompute none|cheap|layer   what the backward makes again (with WALLX_PERF_ALLOC cheap, and layer where that does not fit)\n"
    "  --memory-limit GB         the most device memory to take, as on a smaller card (10^9 bytes)\n"
    "  --steps N                 steps per row (30)\n"
    "  --text-tokens N           tokens of a sample that are neither picture nor action (98)\n"
    "  --side N                  pixels along a side of each picture, a multiple of patch*merge (252)\n"
    "  --pictures N              pictures per sample (the cameras of the configuration, else 2)\n"
    "  --vocab N                 rows of the embedding (the model's)\n"
    "  --threads N               CPU threads (all)\n"
    "  --nproc N,N,...           so many ranks (auto: one per GPU), each with --batch samples: one row per number, beside the row of 1\n"
    "                            where that is among them, and a model for 8, 16 and 64 GPUs. Collectives are timed within the step\n"
    "                            (what it takes beside the same step without them) and by themselves; --threads: of each rank\n"
    "  --against FILE            the row of 1 is read from there (what --out wrote), for ranks that another launcher starts\n"
    "  --accumulate N            steps of N micro-batches per rank, all with numbers of their own: N ranks with 1 have those of 1 with N\n"
    "  --first-choice            matrix products by the library's first algorithm, not by the fastest of several\n"
    "  --products X              before the steps, X seconds of a search of all settings of matrix products for those that are fastest at\n"
    "                            the power limit; what is found is kept in $VLA_CACHE_DIR (~/.cache/vla) for every later run. On a GPU\n"
    "  --profile                 time by operation and by kind of launch, with shares of the measured peaks\n"
    "  --loader                  instead: samples/s that the configuration's loader reads from its data set\n"
    "  --seconds X               how long (10)\n"
    "  --json                    one JSON object per row\n"
    "  --out FILE                appends those objects to FILE; `vla report RUN` shows RUN/bench.jsonl\n\n"
    "Examples:\n"
    "  vla bench --config configs/demo.yml --batch 32 --text-tokens 80 --side 56 --profile\n"
    "  vla bench --config configs/libero_local_perf.yml --batches auto --numerics bf16,bf16-sr --out run/bench.jsonl\n"
    "  vla bench --config configs/libero_local_perf.yml --batch 26 --switches --memory-limit 97.9\n"
    "  vla bench --config configs/libero_local_perf.yml --batch 26 --nproc 1,2,auto --out run/bench.jsonl\n";

typedef bench_request request;

/* Each row adds a switch to those above it. */
static const struct {
    const char *name;
    bench_switches set;
} steps_of_switches[] = {
    {"none", {0}},
    {"+WALLX_PERF_ATTN", {.attention = true}},
    {"+WALLX_PERF_ALLOC", {.attention = true, .alloc = true}},
    {"+OPTIMIZER_FUSED", {.attention = true, .alloc = true, .optimizer = true}},
    {"+WALLX_PERF_COMPILE_VISUAL", {.attention = true, .alloc = true, .optimizer = true, .visual = true}},
    {"+WALLX_PERF_COMPILE", {.attention = true, .alloc = true, .optimizer = true, .visual = true, .compile = true}},
    {"+WALLX_PERF_NO_TIMER_BARRIER", {.attention = true, .alloc = true, .optimizer = true, .visual = true, .compile = true, .ahead = true}},
};
enum { VARIANTS = sizeof steps_of_switches / sizeof *steps_of_switches };

bool bench_next_item(const char **list, char item[32])
{
    size_t n = strcspn(*list, ",");
    if (!**list)
        return false;
    snprintf(item, 32, "%.*s", (int)(n < 31 ? n : 31), *list);
    *list += n + ((*list)[n] == ',');
    return true;
}

enum { BATCH_MOST = 1000000 };

static vla_status parse_batches(const char *text, int64_t *out, int *count, vla_error *err)
{
    char item[32], *end;
    const char *rest = !strcmp(text, "auto") ? "4,8,16,20,26,32,48,64,72,80,96,128" : text;
    for (*count = 0; bench_next_item(&rest, item) && *count < BENCH_MOST; (*count)++) {
        out[*count] = strtoll(item, &end, 10);
        if (end == item || *end || out[*count] < 1 || out[*count] > BATCH_MOST)
            return vlai_fail(err, VLA_E_INVALID, "--batches '%s': wanted numbers of 1 to %d, separated by commas, or auto", text, BATCH_MOST);
    }
    return *count ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "--batches '%s': no number", text);
}

static vla_status parse_numerics(const char *text, vla_numerics *out, int *count, vla_error *err)
{
    char item[32];
    const char *rest = !strcmp(text, "all") ? "fp32,bf16,bf16-sr" : text;
    for (*count = 0; bench_next_item(&rest, item) && *count < BENCH_MOST; (*count)++) {
        if (!vlai_numerics_parse(item, &out[*count]) || out[*count] == VLA_FP64)
            return vlai_fail(err, VLA_E_INVALID, "--numerics '%s': wanted fp32, bf16, bf16-sr, bf16-plain or all", item);
    }
    return *count ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "--numerics '%s': no name", text);
}

/* ---- output ---- */

void bench_put(const json_t *object, bool to_stdout, FILE *out)
{
    FILE *files[] = {to_stdout ? stdout : NULL, out};
    for (int i = 0; object && i < 2; i++)
        if (files[i]) {
            json_dumpf(object, files[i], JSON_COMPACT);
            fputc('\n', files[i]);
            fflush(files[i]);
        }
}

vla_status bench_close(FILE *out, const char *path, vla_status status, vla_error *err)
{
    bool lost = out && ferror(out); /* a row that failed is gone from the buffer: closing alone does not tell */
    lost |= out && fclose(out) != 0;
    return lost && status == VLA_OK ? vlai_fail_hint(err, VLA_E_IO, "free some space, or choose another file", "%s: not all rows could be written", path) : status;
}

json_t *bench_machine_json(const vlai_device_facts *f, const request *r)
{
    char date[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    json_t *object = json_pack("{s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:f, s:f, s:f, s:f, s:f}", "kind", "machine", "date", date, "device", f->name[0] ? f->name : "cpu",
                               "cuda_driver", f->cuda_driver, "cuda_runtime", f->cuda_runtime, "cublaslt", (json_int_t)f->cublaslt, "memory",
                               (json_int_t)f->memory, "power_limit_w", f->watts, "nominal_tflops", f->nominal_flops * 1e-12, "copy_gb_per_s", f->copy_bytes * 1e-9,
                               "gemm_tflops", f->gemm_flops * 1e-12, "memory_limit_gb", r->limit);
    if (object && f->driver[0])
        json_object_set_new(object, "driver", json_string(f->driver));
    return object;
}

void bench_machine_print(const vlai_device_facts *f, const request *r)
{
    if (f->name[0])
        printf("%s, %.1f GB, driver %s, CUDA %d.%d, cuBLASLt %zu\ncopy %.0f GB/s (read and written), product 8192^3 of bf16 %.0f TFLOP/s on the warm device%s\n\n", f->name,
               (double)f->memory * 1e-9, f->driver[0] ? f->driver : "?", f->cuda_runtime / 1000, f->cuda_runtime % 1000 / 10, f->cublaslt, f->copy_bytes * 1e-9,
               f->gemm_flops * 1e-12, r->limit > 0 ? "; memory limited" : "");
}

static const char head[] = "numerics    batch    step ms  (least, most)        samples/s  TFLOP/s     MFU of GEMM   own GB  all GB   MHz     W  recompute  loss at 1, 5, 10, 20, 29";

static void print_percent(double share)
{
    if (share > 0)
        printf(" %5.1f %%", 100 * share);
    else
        printf(" %7s", "-");
}

static void print_row(const bench_row *row, const vlai_device_facts *f, const bench_row *first)
{
    printf("%-10s %6lld ", vlai_numerics_name(row->numerics), (long long)row->batch);
    if (row->out_of_memory) {
        printf("   out of memory: %s\n", row->reason);
        return;
    }
    double rate = row->flops / row->step;
    printf("%10.2f  (%.2f, %.2f) %*s%9.2f %8.4g", row->step * 1e3, row->fastest * 1e3, row->slowest * 1e3,
           row->slowest >= 1 ? 0 : row->slowest >= 0.1 ? 2 : 4, "", (double)row->batch / row->step, rate * 1e-12);
    print_percent(f->nominal_flops > 0 ? rate / f->nominal_flops : 0);
    print_percent(f->gemm_flops > 0 ? rate / f->gemm_flops : 0);
    if (f->name[0])
        printf(" %8.2f %7.2f", (double)row->held * 1e-9, (double)row->now.used * 1e-9);
    else
        printf(" %8.3f %7s", (double)row->host_bytes * 1e-9, "-");
    if (row->now.mhz)
        printf(" %5d %5.0f", row->now.mhz, row->now.watts);
    else
        printf(" %5s %5s", "-", "-");
    printf("  %-9s", vlai_recompute_name(row->recompute));
    for (int i = 0; i < BENCH_LOSSES; i++)
        if (!isnan(row->loss[i]))
            printf(" %.6g", row->loss[i]);
    if (first != row && !first->out_of_memory && first->batch == row->batch)
        printf("  (%.3f x)", first->step / row->step);
    printf("  %s\n", row->variant);
    if (row->allocations || row->synchronizations)
        printf("  note: %llu allocations and %llu synchronizations of the device in the measured steps\n", (unsigned long long)row->allocations,
               (unsigned long long)row->synchronizations);
}

json_t *bench_row_json(const bench_row *row, const vlai_device_facts *f)
{
    json_t *o = json_pack("{s:s, s:s, s:s, s:I, s:I, s:b}", "kind", "step", "variant", row->variant, "numerics", vlai_numerics_name(row->numerics), "batch",
                          (json_int_t)row->batch, "global_batch", (json_int_t)row->batch, "oom", row->out_of_memory);
    if (!o || row->out_of_memory) {
        if (o)
            json_object_set_new(o, "reason", vlai_json_text(row->reason));
        return o;
    }
    double rate = row->flops / row->step;
    const struct {
        const char *name;
        double value;
    } numbers[] = {
        {"step_ms", row->step * 1e3},
        {"step_ms_least", row->fastest * 1e3},
        {"step_ms_most", row->slowest * 1e3},
        {"steps_measured", row->measured},
        {"samples_per_s", (double)row->batch / row->step},
        {"tflops", rate * 1e-12},
        {"mfu", f->nominal_flops > 0 ? rate / f->nominal_flops : NAN},
        {"gemm_share", f->gemm_flops > 0 ? rate / f->gemm_flops : NAN},
        {"executed_tflop_per_step", row->executed * 1e-12},
        {"device_gb_own", f->name[0] ? (double)row->held * 1e-9 : NAN},
        {"device_gb_used", f->name[0] ? (double)row->now.used * 1e-9 : NAN},
        {"arena_bytes", (double)row->host_bytes},
        {"threads", row->threads},
        {"mhz", row->now.mhz ? row->now.mhz : NAN},
        {"watts", row->now.mhz ? row->now.watts : NAN},
        {"celsius", row->now.mhz ? row->now.celsius : NAN},
        {"grad_norm", row->grad_norm},
        {"allocations", (double)row->allocations},
        {"synchronizations", (double)row->synchronizations},
        {"weights_s", row->weights_seconds},
        {"plan_s", row->plan_seconds},
        {"bind_s", row->bind_seconds},
        {"nodes", (double)row->nodes},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (isfinite(numbers[i].value))
            json_object_set_new(o, numbers[i].name, json_real(numbers[i].value));
    json_object_set_new(o, "recompute", json_string(vlai_recompute_name(row->recompute)));
    json_t *losses = json_object();
    for (int i = 0; i < BENCH_LOSSES; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", bench_loss_at[i]);
        if (!isnan(row->loss[i]))
            json_object_set_new(losses, key, json_real(row->loss[i]));
    }
    json_object_set_new(o, "loss", losses);
    if (row->engine && row->profile.total > 0)
        json_object_set_new(o, "profile", bench_profile_json(row));
    return o;
}

/* ---- rows ---- */

typedef struct {
    const request *r;
    const bench_setup *setup;
    const vlai_device_facts *facts;
    FILE *out;
    bench_row first; /* of a breakdown */
} table;

bench_row bench_row_of(const request *r, vla_numerics numerics, int64_t batch)
{
    return (bench_row){.variant = r->plain ? "no switch" : "all switches", .switches = steps_of_switches[r->plain ? 0 : VARIANTS - 1].set,
                       .numerics = numerics, .batch = batch};
}

static vla_status one_row(table *t, int variant, vla_numerics numerics, int64_t batch, bool *out_of_memory, vla_error *err)
{
    bench_row row = {.variant = steps_of_switches[variant].name, .switches = steps_of_switches[variant].set, .numerics = numerics, .batch = batch};
    if (!t->r->switches)
        row = bench_row_of(t->r, numerics, batch);
    vla_status status = bench_measure(t->setup, &row, err);
    if (status == VLA_OK) {
        json_t *object = bench_row_json(&row, t->facts);
        if (!t->r->json) {
            if (t->r->switches && variant == 0)
                t->first = row;
            print_row(&row, t->facts, t->r->switches && variant ? &t->first : &row);
            if (t->r->profile && !row.out_of_memory)
                bench_profile_print(&row, t->facts);
            fflush(stdout);
        }
        bench_put(object, t->r->json, t->out);
        json_decref(object);
        *out_of_memory = row.out_of_memory;
    }
    bench_row_fini(&row);
    return status;
}

static vla_status all_rows(table *t, const bench_lists *l, vla_error *err)
{
    for (int n = 0; n < l->numerics_count; n++)
        for (int b = 0; b < l->batch_count; b++) {
            bool full = false;
            int first = t->r->switches || t->r->plain ? 0 : VARIANTS - 1, last = t->r->plain ? 0 : VARIANTS - 1;
            for (int v = first; v <= last; v++)
                VLA_TRY(one_row(t, v, l->numerics[n], l->batches[b], &full, err));
            if (full)
                break;
        }
    return VLA_OK;
}

vla_status bench_lists_read(const request *r, const vlai_config *train, const char *device, bench_lists *l, vla_error *err)
{
    *l = (bench_lists){.batches = {r->batch ? r->batch : train->hyperparams.batch_size_per_gpu}, .batch_count = 1, .numerics_count = 1};
    l->numerics[0] = vlai_settings_numerics(train, strcmp(device, "cpu") != 0);
    if (r->batches)
        VLA_TRY(parse_batches(r->batches, l->batches, &l->batch_count, err));
    return r->numerics ? parse_numerics(r->numerics, l->numerics, &l->numerics_count, err) : VLA_OK;
}

vla_status bench_set_up(const request *r, const vlai_config *train, bench_setup *s, vla_error *err)
{
    *s = (bench_setup){.train = train, .threads = (int)r->threads, .steps = r->steps, .limit = (size_t)(r->limit * 1e9), .recompute = -1, .profile = r->profile,
                       .products = r->products, .first_choice = r->first_choice, .accumulate = r->accumulate};
    if (!train->model.config_path)
        return vlai_fail_hint(err, VLA_E_INVALID, "set model.config_path to a config.json", "%s: no architecture file", train->path);
    VLA_TRY(vlai_wallx_config_load(train->model.config_path, &s->model, err));
    VLA_TRY(vlai_wallx_config_update(&s->model, train, false, err));
    if (r->vocab)
        s->model.vocab_size = r->vocab;
    int64_t cameras = (int64_t)train->keys.camera.count;
    s->work = (vlai_wallx_workload_options){.text = r->text, .horizon = train->task.action_horizon, .side = r->side,
                                            .pictures = r->pictures ? r->pictures : cameras ? cameras : 2};
    vla_recompute level;
    if (!r->recompute)
        return VLA_OK;
    if (!vlai_recompute_parse(r->recompute, &level))
        return vlai_fail(err, VLA_E_INVALID, "--recompute '%s': wanted none, cheap or layer", r->recompute);
    s->recompute = (int)level;
    return VLA_OK;
}

static vla_status bench(const request *r, const vlai_config *train, FILE *out, vla_error *err)
{
    bench_setup setup;
    bench_lists lists;
    vlai_device_facts facts;
    char device[VLAI_DEVICE_NAME];
    vla_executor *ex;
    if (r->loader)
        return bench_loader(train, r->seconds, r->json, out, err);
    VLA_TRY(bench_lists_read(r, train, "cpu", &lists, err)); /* before a device is opened */
    VLA_TRY(bench_set_up(r, train, &setup, err));
    VLA_TRY(vlai_device_choose(r->device ? r->device : train->training.device, device, err));
    setup.device = device;
    if (r->products > 0 && !strcmp(device, "cpu"))
        return vlai_fail(err, VLA_E_INVALID, "--products: algorithms of matrix products are those of a GPU, and the device is cpu");
    VLA_TRY(vla_executor_create_on(device, (int)r->threads, &ex, err));
    VLA_TRY(bench_lists_read(r, train, device, &lists, err));
    vla_status status = vlai_device_facts_get(ex, &facts, err);
    if (status == VLA_OK)
        status = vlai_device_peaks_measure(ex, &facts, err);
    vla_executor_destroy(ex);
    VLA_TRY(status);
    json_t *machine = bench_machine_json(&facts, r);
    bench_put(machine, r->json, out);
    json_decref(machine);
    if (!r->json) {
        bench_machine_print(&facts, r);
        puts(head);
    }
    table t = {.r = r, .setup = &setup, .facts = &facts, .out = out};
    return all_rows(&t, &lists, err);
}

/* Values out of range, and options of which one would be ignored. */
static bool fits_together(const request *r)
{
    const struct {
        const char *name;
        int64_t value, most;
    } counts[] = {{"--batch", r->batch, BATCH_MOST}, {"--steps", r->steps, 10000000}, {"--text-tokens", r->text, 1000000}, {"--side", r->side, 16384},
                  {"--pictures", r->pictures, 64}, {"--vocab", r->vocab, 1 << 28}, {"--accumulate", r->accumulate, 1000000}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].value > counts[i].most) {
            fprintf(stderr, "vla bench: %s %" PRId64 ": wanted at most %" PRId64 "\n", counts[i].name, counts[i].value, counts[i].most);
            return false;
        }
    if (!(r->limit >= 0 && r->limit < 1e6) || !(r->seconds > 0 && r->seconds < 1e6)) {
        bool limit = r->seconds > 0 && r->seconds < 1e6;
        fprintf(stderr, limit ? "vla bench: --memory-limit %g: wanted GB, 0 to 10^6\n" : "vla bench: --seconds %g: wanted above 0, at most 10^6\n",
                limit ? r->limit : r->seconds);
        return false;
    }
    if (!(r->products >= 0 && r->products <= 1e6)) {
        fprintf(stderr, "vla bench: --products %g: wanted seconds, 0 to 10^6\n", r->products);
        return false;
    }
    const struct {
        const char *name, *other;
        bool both;
    } pairs[] = {{"--batch", "--batches", r->batch && r->batches}, {"--plain", "--switches", r->plain && r->switches},
                 {"--loader", "--profile", r->loader && r->profile}, {"--loader", "--batch", r->loader && (r->batch || r->batches)},
                 {"--loader", "--numerics", r->loader && r->numerics},
                 {"--products", "--loader", r->products > 0 && r->loader}, {"--products", "--plain", r->products > 0 && r->plain},
                 {"--products", "--switches", r->products > 0 && r->switches}, {"--products", "--first-choice", r->products > 0 && r->first_choice},
                 {"--products", "--nproc", r->products > 0 && r->nproc}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (pairs[i].both && r->row < 0) { /* a row of several is measured with arguments of its own behind the user's */
            fprintf(stderr, "vla bench: %s and %s exclude each other\n", pairs[i].name, pairs[i].other);
            return false;
        }
    return true;
}

int command_bench(int argc, char **argv)
{
    request r = {.steps = 30, .text = 98, .side = 252, .seconds = 10, .row = -1};
    const arg_row rows[] = {
        {"--config", ARG_TEXT, &r.config}, {"--device", ARG_TEXT, &r.device}, {"--batches", ARG_TEXT, &r.batches}, {"--batch", ARG_COUNT, &r.batch},
        {"--numerics", ARG_TEXT, &r.numerics}, {"--switches", ARG_FLAG, &r.switches}, {"--plain", ARG_FLAG, &r.plain}, {"--recompute", ARG_TEXT, &r.recompute},
        {"--memory-limit", ARG_REAL, &r.limit}, {"--steps", ARG_COUNT, &r.steps}, {"--text-tokens", ARG_INT, &r.text}, {"--side", ARG_COUNT, &r.side},
        {"--pictures", ARG_COUNT, &r.pictures}, {"--vocab", ARG_COUNT, &r.vocab}, {"--threads", ARG_THREADS, &r.threads}, {"--profile", ARG_FLAG, &r.profile},
        {"--products", ARG_REAL, &r.products}, {"--loader", ARG_FLAG, &r.loader}, {"--seconds", ARG_REAL, &r.seconds}, {"--json", ARG_FLAG, &r.json}, {"--out", ARG_TEXT, &r.out},
        {"--nproc", ARG_TEXT, &r.nproc}, {"--against", ARG_TEXT, &r.against}, {"--first-choice", ARG_FLAG, &r.first_choice}, {"--accumulate", ARG_COUNT, &r.accumulate}, {"--row", ARG_INT, &r.row}};
    static together ranks;
    static args a; /* too large for a stack frame */
    ranks = (together){.name = "bench"};
    a = (args){.name = "bench", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .overrides = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    vla_error err = VLA_ERROR_INIT;
    if (!r.config) {
        fputs("vla bench: no configuration\n  hint: --config FILE\n", stderr);
        return EXIT_USAGE;
    }
    if (together_read(&ranks, &err) != VLA_OK)
        return command_fail("bench", &err);
    if (r.accumulate && !r.nproc && r.row < 0 && ranks.ranks.world == 1) {
        fputs("vla bench: --accumulate goes with --nproc\n  hint: --nproc 1 measures one rank\n", stderr);
        return EXIT_USAGE;
    }
    if (r.against && !r.nproc && r.row < 0 && ranks.ranks.world == 1) {
        fputs("vla bench: --against goes with --nproc, or with ranks that another launcher has started\n", stderr);
        return EXIT_USAGE;
    }
    if ((r.nproc || r.row >= 0 || ranks.ranks.world > 1) && (r.switches || r.loader || (r.nproc && r.row < 0 && ranks.ranks.world > 1))) {
        fputs(r.switches || r.loader ? "vla bench: several ranks measure all switches, or none with --plain: without --switches and --loader\n"
                                     : "vla bench: --nproc starts ranks, and this is one of several ranks already\n", stderr);
        return EXIT_USAGE;
    }
    if (!fits_together(&r))
        return EXIT_USAGE;
    if (r.row >= 0) { /* one row of those that were asked for */
        r.nproc = r.out = r.batches = r.against = NULL;
        r.json = false;
    }
    if (r.row >= 0 || ranks.ranks.world > 1)
        return bench_as_rank(&r, &a, &ranks);
    vlai_config *train = NULL;
    FILE *out = NULL;
    int code_of_ranks = EXIT_DONE;
    vla_status status = vlai_config_load(r.config, a.override, a.overrides_given, &train, &err);
    if (status == VLA_OK)
        status = vlai_switches_check(&err);
    if (status == VLA_OK && r.out && !(out = fopen(r.out, "a")))
        status = vlai_fail(&err, VLA_E_IO, "%s: cannot be opened for writing: %s", r.out, strerror(errno));
    if (status == VLA_OK && r.nproc)
        code_of_ranks = bench_start_ranks(&r, train, argc, argv, out);
    else if (status == VLA_OK)
        status = bench(&r, train, out, &err);
    status = bench_close(out, r.out, status, &err);
    vlai_config_destroy(train);
    return status == VLA_OK ? code_of_ranks : command_fail("bench", &err);
}
