/* vla bench: what a training step takes on this machine, switch by switch, on made-up micro-batches of the configuration's
 * real shape. Needs no data set and no weights. */
#include "args.h"
#include "command.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/time.h"
#include "exec/profile.h"
#include "model/wallx.h"
#include "model/wallx_flops.h"
#include "model/wallx_plan.h"
#include "optim/settings.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla bench --config FILE [--section.key=value ...] [options]\n\n"
    "Times training steps (forward, backward) of the configured model with random weights on made-up micro-batches, and\n"
    "prints one row per variant: median step, samples/s, GFLOP/s, memory. `--profile` adds the time by operation and the\n"
    "share of the step that its matrix products alone would take on the same threads.\n\n"
    "  --batch N         samples per micro-batch (hyperparams.batch_size_per_gpu)\n"
    "  --steps N         steps per variant; the median is of the last half (10)\n"
    "  --text-tokens N   tokens of a sample that are neither picture nor action (98)\n"
    "  --side N          pixels along a side of each picture, a multiple of patch*merge (252)\n"
    "  --pictures N      pictures per sample (the cameras of the configuration, else 2)\n"
    "  --threads N       threads (all)\n"
    "  --profile         time by operation\n"
    "  --json            one JSON object per row\n\n"
    "Examples:\n"
    "  vla bench --config configs/demo.yml --batch 32 --text-tokens 80 --side 56 --profile\n";

typedef struct {
    int64_t batch, steps, text, side, pictures, threads;
    bool profile, json;
    const char *config;
} request;

typedef struct {
    vlai_wallx_config config;
    vlai_wallx_tokens tokens;
    vlai_wallx_batch batch;
    vlai_wallx_shape shape;
    vlai_arena arena;
} workload;

static float *uniform(workload *w, int64_t n, uint32_t site, float low, float high)
{
    float *out = vlai_arena_alloc(&w->arena, (size_t)n * sizeof *out + 1);
    vlai_rng_key key = {.seed = 1, .stream = VLAI_RNG_SYNTH, .site = site};
    for (int64_t i = 0; out && i < n; i++)
        out[i] = low + (high - low) * vlai_rng_uniform(&key, (uint32_t)i);
    return out;
}

/* Equal samples: text, pictures, text, actions. */
static vla_status make_batch(workload *w, const request *r, int64_t horizon, vla_error *err)
{
    const vlai_wallx_config *c = &w->config;
    int64_t unit = c->vision.patch_size * c->vision.spatial_merge_size, side = r->side / unit * unit;
    int64_t patches = side / c->vision.patch_size, units = patches / c->vision.spatial_merge_size;
    if (side <= 0)
        return vlai_fail(err, VLA_E_INVALID, "--side %lld: wanted at least %lld", (long long)r->side, (long long)unit);
    int64_t length = r->text + r->pictures * units * units + horizon, images = r->batch * r->pictures;
    int64_t *offset = vlai_arena_alloc(&w->arena, (size_t)(r->batch + 1) * sizeof *offset);
    int32_t *ids = vlai_arena_alloc(&w->arena, (size_t)(r->batch * length) * sizeof *ids), *grid = vlai_arena_alloc(&w->arena, (size_t)images * 12 + 12);
    const uint8_t **pixels = vlai_arena_alloc(&w->arena, (size_t)images * sizeof *pixels + 8);
    uint8_t *picture = vlai_arena_alloc(&w->arena, (size_t)(side * side * 3));
    static const float mean[3] = {0.48145466f, 0.4578275f, 0.40821073f}, std[3] = {0.26862954f, 0.26130258f, 0.27577711f};
    int64_t rows = r->batch * horizon * c->action_dim, states = r->batch * c->propri_dim;
    w->batch = (vlai_wallx_batch){.samples = r->batch, .horizon = horizon, .images = images, .offset = offset, .ids = ids, .grid = grid,
                                  .pixels = pixels, .mean = mean, .std = std,
                                  .action = uniform(w, rows, 1, -1, 1), .dof_mask = uniform(w, rows, 2, 1, 1), .noise = uniform(w, rows, 3, -1, 1),
                                  .time = uniform(w, r->batch, 4, 0, 1), .state = uniform(w, states, 5, -1, 1), .state_mask = uniform(w, states, 6, 1, 1)};
    if (!offset || !ids || !grid || !pixels || !picture || !w->batch.state_mask)
        return vlai_nomem(err, (size_t)(r->batch * length) * sizeof *ids);
    vlai_rng_key key = {.seed = 2, .stream = VLAI_RNG_SYNTH};
    for (int64_t i = 0; i < side * side * 3; i++)
        picture[i] = (uint8_t)vlai_rng_u32(&key, (uint32_t)i);
    int64_t at = 0;
    for (int64_t s = 0; s < r->batch; s++) {
        offset[s] = at;
        for (int64_t i = 0; i < r->text; i++) {
            int32_t id = (int32_t)(vlai_rng_u32(&key, (uint32_t)(at + i)) % (uint32_t)(c->vocab_size > 8 ? c->vocab_size / 2 : 1));
            ids[at + i] = id == c->image_token_id ? id + 1 : id;
        }
        at += r->text;
        for (int64_t i = 0; i < r->pictures * units * units; i++)
            ids[at++] = (int32_t)c->image_token_id;
        for (int64_t i = 0; i < horizon; i++)
            ids[at++] = (int32_t)w->tokens.action;
    }
    offset[r->batch] = at;
    for (int64_t i = 0; i < images; i++) {
        grid[3 * i] = 1;
        grid[3 * i + 1] = grid[3 * i + 2] = (int32_t)patches;
        pixels[i] = picture;
    }
    return vlai_wallx_shape_of(c, &w->tokens, &w->batch, true, &w->shape, err);
}

static void *find(void *run, const char *name)
{
    return vla_run_data(run, name);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_profile(const vlai_profile *p, bool json)
{
    if (json) {
        json_t *ops = json_object();
        for (int op = 0; op < VLAI_OP_COUNT; op++)
            if (p->calls[op])
                json_object_set_new(ops, vlai_ops[op].name, json_pack("{s:I, s:f}", "calls", (json_int_t)p->calls[op], "ms", p->seconds[op] * 1e3));
        json_t *all = json_pack("{s:o, s:f, s:f, s:f}", "ops", ops, "step_ms", p->total * 1e3, "matmul_alone_ms", p->matmul_alone * 1e3, "matmul_share", p->matmul_alone / p->total);
        json_dumpf(all, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(all);
        return;
    }
    double sum = 0;
    for (int op = 0; op < VLAI_OP_COUNT; op++)
        sum += p->seconds[op];
    printf("\n  operation              calls       ms   share\n");
    for (;;) { /* by falling time: the table is short */
        static bool shown[VLAI_OP_COUNT];
        int best = -1;
        for (int op = 0; op < VLAI_OP_COUNT; op++)
            if (!shown[op] && p->calls[op] && (best < 0 || p->seconds[op] > p->seconds[best]))
                best = op;
        if (best < 0)
            break;
        shown[best] = true;
        printf("  %-20s %7lld %8.2f  %5.1f %%\n", vlai_ops[best].name, (long long)p->calls[best], p->seconds[best] * 1e3, 100 * p->seconds[best] / sum);
    }
    printf("  matrix products alone: %.2f ms of a step of %.2f ms = %.0f %%, %.1f GFLOP/s\n", p->matmul_alone * 1e3, p->total * 1e3,
           100 * p->matmul_alone / p->total, p->flops_matmul / p->matmul_alone * 1e-9);
}

static vla_status bench_variant(const workload *w, vla_store *store, const request *r, const vla_plan_options *options, const char *label, bool profile, vla_error *err)
{
    vla_executor *ex = NULL;
    vla_plan *plan = NULL;
    vla_run *run = NULL;
    double *times = vlai_calloc((size_t)r->steps + 1, sizeof *times);
    vla_gradient_status *gradients = vlai_calloc(vla_store_count(store) + 1, sizeof *gradients);
    vla_status status = times && gradients ? VLA_OK : vlai_nomem(err, (size_t)r->steps * sizeof *times);
    if (status == VLA_OK)
        status = vlai_wallx_plan_training(&w->config, &w->shape, store, false, options, gradients, &plan, err);
    if (status == VLA_OK)
        status = vla_executor_create((int)r->threads, &ex, err);
    if (status == VLA_OK)
        status = vla_run_create(ex, plan, store, &run, err);
    for (int64_t s = 0; s < r->steps && status == VLA_OK; s++) {
        double start = vlai_now();
        status = vlai_wallx_fill(&w->config, &w->tokens, &w->shape, &w->batch, find, run, err);
        if (status == VLA_OK)
            status = vla_run_execute(run, err);
        times[s] = vlai_now() - start;
    }
    if (status == VLA_OK) {
        int64_t late = r->steps - r->steps / 2;
        qsort(times + r->steps - late, (size_t)late, sizeof *times, by_value);
        double median = times[r->steps - late + late / 2];
        double bytes = (double)vla_executor_bytes(ex);
        if (r->json)
            printf("{\"variant\":\"%s\",\"batch\":%lld,\"threads\":%d,\"step_ms\":%.3f,\"samples_per_s\":%.3f,\"gflops\":%.3f,\"arena_bytes\":%.0f,\"loss\":%.9g}\n", label,
                   (long long)r->batch, vla_executor_threads(ex), median * 1e3, (double)r->batch / median, vla_plan_flops(plan) / median * 1e-9, bytes,
                   *(float *)vla_run_data(run, "loss"));
        else
            printf("%-34s %6lld %10.2f %11.2f %9.2f %10.1f  %.6f\n", label, (long long)r->batch, median * 1e3, (double)r->batch / median,
                   vla_plan_flops(plan) / median * 1e-9, bytes * 1e-6, *(float *)vla_run_data(run, "loss"));
        if (profile) {
            vlai_profile p;
            status = vlai_wallx_fill(&w->config, &w->tokens, &w->shape, &w->batch, find, run, err);
            if (status == VLA_OK)
                status = vlai_run_profile(run, (int)(r->steps < 5 ? 5 : r->steps), &p, err);
            if (status == VLA_OK)
                print_profile(&p, r->json);
        }
    }
    vla_run_destroy(run);
    vla_plan_destroy(plan);
    vla_executor_destroy(ex);
    vlai_free(times);
    vlai_free(gradients);
    return status;
}

static void random_weights(vla_store *store)
{
    enum { CHUNK = 4096 };
    float values[CHUNK];
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        vlai_rng_key key = {.seed = 3, .stream = VLAI_RNG_INIT, .position = i};
        for (int64_t first = 0; first < t.elements; first += CHUNK) {
            int64_t n = t.elements - first < CHUNK ? t.elements - first : CHUNK;
            vlai_rng_normal(&key, (uint32_t)first, (size_t)n, values);
            for (int64_t k = 0; k < n; k++)
                values[k] = t.rank == 1 ? 1.0f : 0.02f * values[k];
            vla_store_set_float(store, i, first, n, values);
        }
    }
}

int command_bench(int argc, char **argv)
{
    request r = {.steps = 10, .text = 98, .side = 252};
    const arg_row rows[] = {{"--config", ARG_TEXT, &r.config}, {"--batch", ARG_COUNT, &r.batch}, {"--steps", ARG_COUNT, &r.steps},
                            {"--text-tokens", ARG_INT, &r.text}, {"--side", ARG_COUNT, &r.side}, {"--pictures", ARG_COUNT, &r.pictures},
                            {"--threads", ARG_COUNT, &r.threads}, {"--profile", ARG_FLAG, &r.profile}, {"--json", ARG_FLAG, &r.json}};
    args a = {.name = "bench", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .overrides = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    vla_error err = VLA_ERROR_INIT;
    if (!r.config) {
        fputs("vla bench: no configuration\n  hint: --config FILE\n", stderr);
        return EXIT_USAGE;
    }
    vlai_config *train = NULL;
    vla_store *store = NULL;
    workload w = {0};
    vla_status status;
    VLA_TRY_GOTO(vlai_config_load(r.config, a.override, a.overrides_given, &train, &err), done);
    VLA_TRY_GOTO(vlai_wallx_config_load(train->model.config_path, &w.config, &err), done);
    VLA_TRY_GOTO(vlai_wallx_config_update(&w.config, train, false, &err), done);
    if (!r.batch)
        r.batch = train->hyperparams.batch_size_per_gpu;
    if (!r.pictures)
        r.pictures = train->keys.camera.count ? (int64_t)train->keys.camera.count : 2;
    w.tokens = (vlai_wallx_tokens){w.config.vocab_size - 1, w.config.vocab_size - 2, -1};
    VLA_TRY_GOTO(make_batch(&w, &r, train->task.action_horizon, &err), done);
    VLA_TRY_GOTO(vla_store_create(&store, &err), done);
    VLA_TRY_GOTO(vlai_wallx_params(&w.config, NULL, NULL, store, &err), done);
    vla_numerics numerics = vlai_settings_numerics(train, false);
    VLA_TRY_GOTO(vla_store_allocate(store, numerics, VLA_STORE_TRAIN, &err), done);
    random_weights(store);
    if (!r.json)
        printf("%-34s %6s %10s %11s %9s %10s  %s\n", "variant", "batch", "step ms", "samples/s", "GFLOP/s", "arena MB", "loss");
    static const struct { const char *label; vla_memory_layout layout; vla_recompute recompute; } variants[] = {
        {"plain (free lists, nothing again)", VLA_MEMORY_FREE_LISTS, VLA_RECOMPUTE_NONE},
        {"planned memory", VLA_MEMORY_LIFETIMES, VLA_RECOMPUTE_NONE},
        {"planned memory, cheap recompute", VLA_MEMORY_LIFETIMES, VLA_RECOMPUTE_CHEAP},
        {"planned memory, layer recompute", VLA_MEMORY_LIFETIMES, VLA_RECOMPUTE_LAYER},
    };
    for (size_t v = 0; v < sizeof variants / sizeof *variants && status == VLA_OK; v++) {
        vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
        options.numerics = numerics;
        options.layout = variants[v].layout;
        options.recompute = variants[v].recompute;
        status = bench_variant(&w, store, &r, &options, variants[v].label, r.profile && v == 0, &err);
    }
done:
    vla_store_destroy(store);
    vlai_arena_fini(&w.arena);
    vlai_config_destroy(train);
    return status == VLA_OK ? EXIT_DONE : command_fail("bench", &err);
}
