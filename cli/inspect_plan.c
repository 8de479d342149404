/* vla inspect plan, vla inspect graph: what a training step of a configuration takes, before any device is there.
 *
 * The model is built and planned at its real size without weights or data. Memory per rank and FLOPs per sample come from
 * the plan itself, model FLOPs from the formula of the architecture. */
#include "args.h"
#include "command.h"
#include "inspect.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/text.h"
#include "base/time.h"
#include "dist/ranks.h"
#include "exec/plan.h"
#include "exec/store.h"
#include "image/patchify.h"
#include "model/wallx_flops.h"
#include "model/wallx_plan.h"
#include "optim/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANK_LIMIT = 8 };

/* Scratch of one stream of an accelerator, fixed so that a plan made without a device has the memory of the real one. */
enum { DEVICE_WORKSPACE = 32 << 20 };

/* Text tokens of the training prompt with two cameras, a short instruction and eight state numbers. */
enum { TEXT_TOKENS = 98 };

static const char plan_help[] =
    "Usage: vla inspect plan --config FILE [--section.key=value ...] [options]\n\n"
    "Plans a training step of the model in the configuration at its real size, without weights, data or device, and prints\n"
    "what it takes: memory per rank with and without the memory plan, and FLOPs.\n\n"
    "  --batch N            samples per micro-batch (hyperparams.batch_size_per_gpu)\n"
    "  --device null|cpu    whose scratch memory counts: an accelerator's fixed 32 MiB, or the CPU kernels' (null)\n"
    "  --text-tokens N      tokens of a sample that are neither picture nor action (98)\n"
    "  --grid HxW[,HxW]     patches of each picture of a sample (from data.resolution, for square pictures)\n"
    "  --vocab N            rows of the embedding (from the architecture file)\n"
    "  --recompute none|cheap|layer   what the planned columns make again in the backward pass (memory.recompute, else cheap;\n"
    "                       memory.keep_gb of it are kept)\n"
    "  --numerics fp32|bf16|bf16-sr|bf16-plain   (training.numerics; auto: bf16, or fp32 with --device cpu)\n"
    "  --ranks N[,N]        numbers of ranks to plan for (1,4,8): each plan is that of rank 0, whose optimiser state is its shard\n"
    "                       (dist.zero); planned columns overlap buckets of perf.bucket MB, plain ones have 25 MB behind the backward\n"
    "  --step               planned columns are whole steps, the update in the plan, as with WALLX_PERF_COMPILE: gradients are then\n"
    "                       part of the activations\n"
    "  --fuse none|model|visual|all   where the planned columns join operations, and how often each kind was joined (none)\n"
    "  --text               the whole plan, one line per launch, instead\n"
    "  --json               the figures as one JSON object\n\n"
    "Examples:\n"
    "  vla inspect plan --config configs/libero_local_perf.yml --batch 26 --device null\n"
    "  vla inspect plan --config configs/libero_local_perf.yml --batch 26 --step --fuse all --ranks 1,2,4,8\n"
    "  vla inspect plan --config configs/libero.yml --grid 32x32,32x32,32x32 --text-tokens 141 --recompute layer\n"
    "  vla inspect plan --config configs/libero.yml --batch 1 --text | less\n";

static const char graph_help[] =
    "Usage: vla inspect graph --config FILE [--section.key=value ...] [options]\n\n"
    "Prints the model's graph as it is built: parameters and inputs, then one line per operation.\n\n"
    "  --batch N, --text-tokens N, --grid HxW[,HxW], --vocab N   as in vla inspect plan\n"
    "  --backward           with the backward pass, after unread rows were removed\n"
    "  --json               one JSON object that holds the lines\n\n"
    "Examples:\n"
    "  vla inspect graph --config configs/libero.yml --batch 1\n"
    "  vla inspect graph --config configs/libero.yml --batch 1 --backward | grep layers.35\n";

typedef struct request {
    const char *config, *device, *numerics, *recompute, *fuse;
    const char *const *overrides;
    size_t override_count;
    int64_t batch; /* 0: not given */
    vlai_wallx_sizes sizes;
    int64_t ranks[RANK_LIMIT];
    int rank_count;
    bool text, json, backward, step;
} request;

typedef struct model {
    vlai_config *train;
    vlai_wallx_config config;
    vlai_wallx_shape shape;
    vla_numerics numerics;
    vla_recompute recompute;
    unsigned fuse;
    vla_store_use use;
} model;

static bool read_count(const char *text, int64_t most, int64_t *out, const char **end)
{
    char *stop;
    long long value = strtoll(text, &stop, 10);
    if (stop == text || value < 1 || value > most)
        return false;
    *out = value;
    *end = stop;
    return true;
}

static vla_status want_ranks(const char *text, request *r, vla_error *err)
{
    const char *p = text;
    for (r->rank_count = 0; r->rank_count < RANK_LIMIT && read_count(p, VLAI_RANKS_MOST, &r->ranks[r->rank_count], &p); p++) {
        r->rank_count++;
        if (!*p)
            return VLA_OK;
        if (*p != ',')
            break;
    }
    return vlai_fail(err, VLA_E_INVALID, "--ranks '%s': wanted at most %d counts of 1 to %d, as in 1,4,8", text, RANK_LIMIT, (int)VLAI_RANKS_MOST);
}

/* Fills the request; an exit code, or -1 to go on. The options of the graph stand first in the table. */
static int parse(int argc, char **argv, const char *name, bool graph, request *r)
{
    enum { SHARED = 6 };
    static args a; /* too large for a stack frame */
    const char *grid = NULL, *ranks = NULL;
    *r = (request){.device = "null", .ranks = {1, 4, 8}, .rank_count = 3};
    const arg_row options[] = {
        {"--config", ARG_TEXT, &r->config}, {"--batch", ARG_COUNT, &r->batch}, {"--text-tokens", ARG_COUNT, &r->sizes.text_tokens},
        {"--grid", ARG_TEXT, &grid},        {"--vocab", ARG_COUNT, &r->sizes.vocab}, {"--json", ARG_FLAG, &r->json},
        {"--device", ARG_TEXT, &r->device}, {"--recompute", ARG_TEXT, &r->recompute},
        {"--numerics", ARG_TEXT, &r->numerics}, {"--ranks", ARG_TEXT, &ranks}, {"--text", ARG_FLAG, &r->text}, {"--fuse", ARG_TEXT, &r->fuse},
        {"--step", ARG_FLAG, &r->step},
    };
    arg_row graphs[SHARED + 1];
    memcpy(graphs, options, SHARED * sizeof *graphs);
    graphs[SHARED] = (arg_row){"--backward", ARG_FLAG, &r->backward};
    a = (args){.name = name, .help = graph ? graph_help : plan_help, .rows = graph ? graphs : options,
               .count = graph ? SHARED + 1 : (int)(sizeof options / sizeof *options), .overrides = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    r->overrides = a.override;
    r->override_count = a.overrides_given;
    vla_error err = VLA_ERROR_INIT;
    if (r->text && r->json) {
        fprintf(stderr, "vla %s: --text and --json exclude each other\n", name);
        return EXIT_USAGE;
    }
    if ((grid && vlai_wallx_grids_parse(grid, &r->sizes, &err) != VLA_OK) || (ranks && want_ranks(ranks, r, &err) != VLA_OK))
        return command_fail(name, &err);
    if (!r->config) {
        fprintf(stderr, "vla %s: no configuration\n  hint: --config FILE, for example configs/libero.yml\n", name);
        return EXIT_USAGE;
    }
    return -1;
}

/* Pictures of a sample from the cameras and resolutions of the configuration, taken as square. */
static vla_status default_grids(const model *m, request *r, vla_error *err)
{
    const vlai_words *cameras = &m->train->keys.camera;
    vlai_image_processor p;
    vlai_image_processor_default(&p);
    for (size_t i = 0; i < cameras->count && r->sizes.images < VLAI_WALLX_PLAN_IMAGES; i++) {
        int64_t target = -1, grid[3];
        for (size_t k = 0; k < m->train->data.resolution.count; k++)
            if (!strcmp(m->train->data.resolution.names[k], cameras->values[i]))
                target = m->train->data.resolution.values[k];
        if (target <= 0)
            return vlai_fail_hint(err, VLA_E_INVALID, "give the patches of each picture: --grid 18x18,18x18",
                                  "data.resolution has no size for view '%s', so the picture keeps the camera's", cameras->values[i]);
        vlai_image_size size;
        VLA_TRY(vlai_image_fit(target, target, target, &p.rule, &size, err));
        vlai_image_grid(&p, size.width, size.height, grid);
        memcpy(&r->sizes.grid[3 * r->sizes.images++], (int32_t[]){1, (int32_t)grid[1], (int32_t)grid[2]}, 3 * sizeof(int32_t));
    }
    return VLA_OK;
}

static vla_status load(request *r, model *m, vla_error *err)
{
    *m = (model){0};
    VLA_TRY(vlai_config_load(r->config, r->overrides, r->override_count, &m->train, err));
    if (!m->train->model.config_path)
        return vlai_fail_hint(err, VLA_E_INVALID, "set model.config_path to a config.json", "%s: no architecture file", r->config);
    if (m->train->data.use_fast_tokenizer)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "`vla preflight` counts them and plans", "%s: the plan depends on the number of action tokens, "
                              "which the data set decides", m->train->path);
    VLA_TRY(vlai_wallx_config_load(m->train->model.config_path, &m->config, err));
    VLA_TRY(vlai_wallx_config_update(&m->config, m->train, false, err));
    if (strcmp(r->device, "null") && strcmp(r->device, "cpu"))
        return vlai_fail(err, VLA_E_INVALID, "--device '%s': wanted null or cpu", r->device);
    if (r->numerics) {
        if (!vlai_numerics_parse(r->numerics, &m->numerics) || m->numerics == VLA_FP64)
            return vlai_fail(err, VLA_E_INVALID, "--numerics '%s': wanted one of fp32, bf16, bf16-sr, bf16-plain", r->numerics);
    } else {
        m->numerics = vlai_settings_numerics(m->train, strcmp(r->device, "cpu"));
    }
    m->recompute = VLA_RECOMPUTE_CHEAP;
    if (r->recompute) {
        if (!vlai_recompute_parse(r->recompute, &m->recompute))
            return vlai_fail(err, VLA_E_INVALID, "--recompute '%s': wanted one of none, cheap, layer", r->recompute);
    } else if (m->train->memory.recompute != VLAI_RECOMPUTE_AUTO &&
               (vlai_config_origin(m->train, "memory.recompute").file || m->train->memory.recompute != VLAI_RECOMPUTE_NONE)) {
        m->recompute = (vla_recompute)m->train->memory.recompute; /* the same order */
    }
    static const char *const regions[] = {"none", "model", "visual", "all"}; /* bits of VLA_FUSE_MODEL, VLA_FUSE_VISUAL */
    while (r->fuse && m->fuse < 4 && strcmp(r->fuse, regions[m->fuse]) != 0)
        m->fuse++;
    if (m->fuse == 4)
        return vlai_fail(err, VLA_E_INVALID, "--fuse '%s': wanted one of none, model, visual, all", r->fuse);
    m->use = m->train->hyperparams.gradient_accumulation_steps > 1 ? VLA_STORE_ACCUMULATE : VLA_STORE_TRAIN;
    if (!r->batch)
        r->batch = m->train->hyperparams.batch_size_per_gpu;
    if (!r->sizes.text_tokens)
        r->sizes.text_tokens = TEXT_TOKENS;
    if (r->sizes.vocab)
        m->config.vocab_size = r->sizes.vocab;
    if (!r->sizes.images)
        VLA_TRY(default_grids(m, r, err));
    vla_status status = vlai_wallx_shape_plan(&m->config, r->batch, r->sizes.text_tokens, m->train->task.action_horizon, r->sizes.images, r->sizes.grid,
                                              &m->shape, err);
    if (status == VLA_E_SHAPE) /* the shapes are those of the arguments */
        status = err->status = VLA_E_INVALID;
    return status;
}

/* --- figures --- */

typedef struct figures {
    vla_plan_memory memory; /* of one rank */
    size_t buckets, shards; /* of several: most bytes of gradient buckets at one time, and of what is reduced; in the arena */
    size_t collectives;
    size_t lower_bound;     /* of the arena */
    size_t nodes;
    double flops, traffic;  /* executed, of one micro-batch; bytes that it reads and writes */
    size_t fused[VLAI_FUSE_COUNT];
} figures;

/* The store of rank 0 of so many; never allocated. */
static vla_status make_store(const model *m, int64_t ranks, bool planned, vla_store **store, vla_error *err)
{
    vla_shard_options o = {sizeof o, 0, (int)ranks, planned ? (size_t)m->train->perf.bucket * 1000000 : 25000000, (int)m->train->dist.zero};
    VLA_TRY(vla_store_create(store, err));
    vla_status status = vlai_wallx_params(&m->config, NULL, NULL, *store, err);
    if (status == VLA_OK)
        status = vla_store_shard(*store, &o, err);
    if (status == VLA_OK)
        status = vlai_store_lay_out(*store, m->numerics, m->use, err);
    if (status != VLA_OK)
        vla_store_destroy(*store);
    return status;
}

static size_t bytes_of(const vla_graph *g, vla_value v)
{
    return (size_t)g->values[v].elements * vla_dtype_size(g->values[v].dtype);
}

/* Buckets are alive from their making to the last node that reads a value in their bytes. */
static vla_status measure_buckets(const vla_plan *plan, figures *out, vla_error *err)
{
    const vla_graph *g = plan->graph;
    int64_t *change = vlai_calloc(g->n_nodes + 2, sizeof *change), now = 0;
    int32_t *last = vlai_calloc(g->n_values + 1, sizeof *last);
    if (!change || !last) {
        vlai_free(change);
        vlai_free(last);
        return vlai_nomem(err, g->n_values * sizeof *last);
    }
    for (size_t n = 0; n < g->n_nodes; n++)
        for (int i = 0; i < g->nodes[n].n_inputs; i++)
            if (g->nodes[n].inputs[i] != VLA_NONE)
                last[plan->memory.root[g->nodes[n].inputs[i]]] = (int32_t)n;
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        if (node->op == VLAI_OP_reduce_scatter)
            out->shards += bytes_of(g, node->outputs[0]);
        if (node->op == VLAI_OP_bucket) {
            change[n] += (int64_t)bytes_of(g, node->outputs[0]);
            change[last[node->outputs[0]] + 1] -= (int64_t)bytes_of(g, node->outputs[0]);
        }
    }
    for (size_t n = 0; n < g->n_nodes; n++) {
        now += change[n];
        out->buckets = now > (int64_t)out->buckets ? (size_t)now : out->buckets;
    }
    out->collectives += plan->collectives;
    vlai_free(change);
    vlai_free(last);
    return VLA_OK;
}

/* What a step needs beside the plan of its batch: the update of several ranks has shards of its own. */
static vla_status add_update(const vla_store *store, const vla_gradient_status *gradients, const vla_adamw_options *adamw,
                             const vla_plan_options *o, figures *out, vla_error *err)
{
    vla_graph *g;
    vla_plan *plan;
    VLA_TRY(vla_graph_adamw(store, gradients, adamw, &g, err));
    VLA_TRY(vla_plan_build(g, o, &plan, err));
    vla_status status = measure_buckets(plan, out, err);
    size_t arena = vla_plan_memory_get(plan).activations;
    if (arena > out->memory.activations)
        out->memory.activations = arena;
    vla_plan_destroy(plan);
    return status;
}

static vla_status plan_of(const request *r, const model *m, const vla_store *store, const vla_plan_options *o, bool whole, figures *out,
                          char **text, vla_error *err)
{
    vla_adamw_options adamw = vlai_settings_adamw(m->train);
    vla_plan *plan = NULL;
    vla_gradient_status *gradients = vlai_calloc(vla_store_count(store) + 1, sizeof *gradients);
    if (!gradients)
        return vlai_nomem(err, vla_store_count(store) * sizeof *gradients);
    vla_status status = whole ? vlai_wallx_plan_step(&m->config, &m->shape, store, &adamw, o, gradients, &plan, err)
                              : vlai_wallx_plan_training(&m->config, &m->shape, store, m->train->hyperparams.gradient_accumulation_steps, o, gradients, &plan, err);
    if (status == VLA_OK) {
        long processors = sysconf(_SC_NPROCESSORS_ONLN);
        size_t threads = processors > 0 ? (size_t)processors : 1;
        out->memory = vla_plan_memory_get(plan);
        out->memory.workspace = !strcmp(r->device, "cpu") ? plan->workspace + plan->widen + threads * plan->workspace_per_thread : DEVICE_WORKSPACE;
        out->lower_bound = plan->memory.peak_bytes > out->memory.inputs ? plan->memory.peak_bytes - out->memory.inputs : 0;
        out->nodes = vla_plan_nodes(plan);
        memcpy(out->fused, plan->fused, sizeof out->fused);
        out->flops = vla_plan_flops(plan);
        out->traffic = plan->traffic;
        status = measure_buckets(plan, out, err);
    }
    if (status == VLA_OK && !whole && store->world > 1)
        status = add_update(store, gradients, &adamw, o, out, err);
    if (status == VLA_OK && text)
        status = vla_plan_print(plan, text, err);
    vla_plan_destroy(plan);
    vlai_free(gradients);
    return status;
}

static vla_status make_plan(const request *r, const model *m, int64_t ranks, vla_memory_layout layout, vla_recompute recompute, figures *out,
                            char **text, vla_error *err)
{
    bool planned = layout == VLA_MEMORY_LIFETIMES, whole = planned && r->step;
    vla_store *store;
    *out = (figures){0};
    VLA_TRY(make_store(m, ranks, planned, &store, err));
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.numerics = m->numerics;
    o.layout = layout;
    o.recompute = recompute;
    o.keep = planned ? (size_t)(1e9 * m->train->memory.keep_gb) : 0;
    o.fuse = planned ? m->fuse : 0;
    o.visual_layers = (int)m->config.vision.depth + 1;
    o.store = store;
    o.overlap = planned;
    o.product_sms_free = (int)m->train->dist.product_sms_free;
    vla_store_use use = whole ? VLA_STORE_STEP : m->use;
    vla_status status = plan_of(r, m, store, &o, whole, out, text, err);
    out->memory.weights = vla_store_bytes(store, VLA_STORE_WEIGHT, m->numerics, use);
    out->memory.gradients = vla_store_bytes(store, VLA_STORE_GRADIENT, m->numerics, use);
    out->memory.optimizer = vla_store_bytes(store, VLA_STORE_M, m->numerics, use) + vla_store_bytes(store, VLA_STORE_V, m->numerics, use) +
                            vla_store_bytes(store, VLA_STORE_LOW, m->numerics, use);
    vla_store_destroy(store);
    return status;
}

static const struct {
    const char *name;
    size_t offset;
} rows[] = {
    {"weights", offsetof(vla_plan_memory, weights)},         {"gradients", offsetof(vla_plan_memory, gradients)},
    {"optimizer", offsetof(vla_plan_memory, optimizer)},     {"activations", offsetof(vla_plan_memory, activations)},
    {"inputs", offsetof(vla_plan_memory, inputs)},           {"workspace", offsetof(vla_plan_memory, workspace)},
};
enum { ROWS = sizeof rows / sizeof *rows };

static size_t row_bytes(const figures *f, int row)
{
    size_t bytes;
    memcpy(&bytes, (const char *)&f->memory + rows[row].offset, sizeof bytes);
    return bytes;
}

typedef struct summary {
    figures planned[RANK_LIMIT], plain[RANK_LIMIT]; /* per number of ranks */
    figures modes[3], alone;                        /* one rank, planned by recompute, and plain */
    vlai_wallx_flops model_flops;
    int64_t parameters;
    double seconds;
} summary;

static void print_table(const request *r, const summary *s)
{
    static const char *const column[] = {"planned", "plain"};
    printf("\nmemory of a rank, GB (10^9 bytes)\n%-12s", "");
    for (int c = 0; c < 2; c++)
        for (int i = 0; i < r->rank_count; i++) {
            char head[48];
            snprintf(head, sizeof head, "%s/%lld", column[c], (long long)r->ranks[i]);
            printf(" %11s", head);
        }
    for (int row = 0; row <= ROWS; row++) {
        printf("\n%-12s", row < ROWS ? rows[row].name : "total");
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < r->rank_count; i++) {
                const figures *f = c ? &s->plain[i] : &s->planned[i];
                size_t bytes = 0;
                for (int k = row < ROWS ? row : 0; k < (row < ROWS ? row + 1 : ROWS); k++)
                    bytes += row_bytes(f, k);
                printf(" %11.3f", (double)bytes * 1e-9);
            }
    }
    printf("\n");
    for (int i = 0; i < r->rank_count; i++) {
        const figures *f = &s->planned[i];
        if (f->collectives)
            printf("%lld ranks: %zu collectives; of the activations at most %.3f GB gradient buckets at one time, %.3f GB reduced shards\n",
                   (long long)r->ranks[i], f->collectives, (double)f->buckets * 1e-9, (double)f->shards * 1e-9);
    }
}

static void print_summary(const request *r, const model *m, const summary *s)
{
    const vlai_wallx_shape *shape = &m->shape;
    int64_t tokens = (shape->tokens0 + shape->tokens1) / shape->samples;
    printf("%s: batch %lld, %s, device %s, %lld parameters, embedding of %lld rows\n", r->config, (long long)r->batch,
           vlai_numerics_name(m->numerics), r->device, (long long)s->parameters, (long long)m->config.vocab_size);
    printf("a sample: %lld tokens = %lld text + %lld picture + %lld action;", (long long)tokens, (long long)r->sizes.text_tokens,
           (long long)(shape->units / shape->samples), (long long)shape->horizon);
    for (int64_t i = 0; i < r->sizes.images; i++)
        printf("%s %dx%d", i ? "," : " pictures of", r->sizes.grid[3 * i + 1], r->sizes.grid[3 * i + 2]);
    printf("%s patches\n", r->sizes.images ? "" : " no");
    printf("planned: offsets by lifetime, recompute %s, %zu launches; plain: free lists, recompute none, %zu launches\n",
           vlai_recompute_name(m->recompute), s->planned[0].nodes, s->plain[0].nodes);
    for (int p = 0; m->fuse && p < VLAI_FUSE_COUNT; p++)
        printf("%s %zu %s (saves %s)", p ? ",\n      " : "fused:", s->planned[0].fused[p], vlai_fuse_name(p), vlai_fuse_saves(p));
    printf("%s", m->fuse ? "\n" : "");
    print_table(r, s);
    printf("\nplanned activations by recompute, GB:");
    for (int i = 0; i < 3; i++)
        printf("%s %s %.3f (lower bound %.3f)", i ? "," : "", vlai_recompute_name(i), (double)s->modes[i].memory.activations * 1e-9,
               (double)s->modes[i].lower_bound * 1e-9);
    printf("\nread and written by the planned launches, GB:");
    for (int i = 0; i < 3; i++)
        printf("%s %s %.1f", i ? "," : "", vlai_recompute_name(i), s->modes[i].traffic * 1e-9);
    double samples = (double)shape->samples;
    printf("\n\nmodel FLOPs per sample     %8.4f T  training = 3 x forward (vision %.1f + %.1f attention, language %.1f + %.1f, head %.2f G)\n",
           s->model_flops.training * 1e-12, s->model_flops.vision_linear * 1e-9, s->model_flops.vision_attention * 1e-9,
           s->model_flops.language_linear * 1e-9, s->model_flops.language_attention * 1e-9, s->model_flops.action_head * 1e-9);
    printf("executed FLOPs per sample  %8.4f T  recompute none: what no result needs is left out\n", s->alone.flops / samples * 1e-12);
    if (m->recompute != VLA_RECOMPUTE_NONE)
        printf("                           %8.4f T  recompute %s\n", s->modes[m->recompute].flops / samples * 1e-12, vlai_recompute_name(m->recompute));
    printf("planned in %.2f s\n", s->seconds);
}

static json_t *figures_json(const figures *f, const request *r)
{
    json_t *ranks = json_object();
    for (int i = 0; i < r->rank_count; i++) {
        json_t *one = json_object();
        size_t total = 0;
        for (int row = 0; row < ROWS; row++) {
            json_object_set_new(one, rows[row].name, json_integer((json_int_t)row_bytes(&f[i], row)));
            total += row_bytes(&f[i], row);
        }
        json_object_set_new(one, "total", json_integer((json_int_t)total));
        json_object_set_new(one, "buckets", json_integer((json_int_t)f[i].buckets));
        json_object_set_new(one, "shards", json_integer((json_int_t)f[i].shards));
        json_object_set_new(one, "collectives", json_integer((json_int_t)f[i].collectives));
        char name[32];
        snprintf(name, sizeof name, "%lld", (long long)r->ranks[i]);
        json_object_set_new(ranks, name, one);
    }
    return json_pack("{s:o, s:I, s:I, s:f}", "ranks", ranks, "lower_bound", (json_int_t)f->lower_bound, "launches",
                     (json_int_t)f->nodes, "flops", f->flops);
}

static vla_status print_json(const request *r, const model *m, const summary *s, vla_error *err)
{
    double samples = (double)m->shape.samples;
    json_t *modes = json_object(), *traffic = json_object();
    for (int i = 0; i < 3; i++) {
        json_object_set_new(modes, vlai_recompute_name(i), json_integer((json_int_t)s->modes[i].memory.activations));
        json_object_set_new(traffic, vlai_recompute_name(i), json_real(s->modes[i].traffic));
    }
    json_t *out = json_pack("{s:I, s:I, s:I, s:I, s:s, s:o, s:o, s:o, s:o, s:f, s:f, s:f}", "batch", (json_int_t)r->batch, "tokens_per_sample",
                            (json_int_t)((m->shape.tokens0 + m->shape.tokens1) / m->shape.samples), "vocab",
                            (json_int_t)m->config.vocab_size, "parameters", (json_int_t)s->parameters, "recompute",
                            vlai_recompute_name(m->recompute), "planned", figures_json(s->planned, r), "plain", figures_json(s->plain, r),
                            "activations", modes, "traffic", traffic, "model_flops_per_sample", s->model_flops.training, "executed_flops_per_sample",
                            s->alone.flops / samples, "seconds", s->seconds);
    json_t *fused = json_object();
    for (int p = 0; p < VLAI_FUSE_COUNT; p++)
        json_object_set_new(fused, vlai_fuse_name(p), json_integer((json_int_t)s->planned[0].fused[p]));
    json_object_set_new(out, "fused", fused);
    char *text = out ? json_dumps(out, JSON_INDENT(2)) : NULL;
    json_decref(out);
    if (!text)
        return vlai_nomem(err, 1 << 16);
    puts(text);
    free(text);
    return VLA_OK;
}

static vla_status run_plan(request *r, model *m, vla_error *err)
{
    double start = vlai_now();
    VLA_TRY(load(r, m, err));
    summary s = {0};
    if (r->text) {
        char *text = NULL;
        vla_status status = make_plan(r, m, r->ranks[0], VLA_MEMORY_LIFETIMES, m->recompute, &s.planned[0], &text, err);
        if (status == VLA_OK)
            fputs(text, stdout);
        free(text);
        return status;
    }
    for (int mode = VLA_RECOMPUTE_NONE; mode <= VLA_RECOMPUTE_LAYER; mode++)
        VLA_TRY(make_plan(r, m, 1, VLA_MEMORY_LIFETIMES, (vla_recompute)mode, &s.modes[mode], NULL, err));
    VLA_TRY(make_plan(r, m, 1, VLA_MEMORY_FREE_LISTS, VLA_RECOMPUTE_NONE, &s.alone, NULL, err));
    for (int i = 0; i < r->rank_count; i++) {
        s.planned[i] = s.modes[m->recompute];
        s.plain[i] = s.alone;
        if (r->ranks[i] == 1)
            continue;
        VLA_TRY(make_plan(r, m, r->ranks[i], VLA_MEMORY_LIFETIMES, m->recompute, &s.planned[i], NULL, err));
        VLA_TRY(make_plan(r, m, r->ranks[i], VLA_MEMORY_FREE_LISTS, VLA_RECOMPUTE_NONE, &s.plain[i], NULL, err));
    }
    vla_store *store;
    VLA_TRY(make_store(m, 1, true, &store, err));
    for (size_t i = 0; i < vla_store_count(store); i++)
        s.parameters += vla_store_tensor(store, VLA_STORE_WEIGHT, i).elements;
    vla_store_destroy(store);
    vlai_wallx_flops_of(&m->config, r->sizes.text_tokens, m->shape.horizon, 0, r->sizes.images, r->sizes.grid, &s.model_flops);
    s.seconds = vlai_now() - start;
    if (r->json)
        return print_json(r, m, &s, err);
    print_summary(r, m, &s);
    return VLA_OK;
}

/* {"lines": [...]}: the text of a graph, line by line. */
static vla_status print_lines(char *text, vla_error *err)
{
    char *rest;
    json_t *lines = json_array(), *out = json_pack("{s:o}", "lines", lines);
    int failed = !out;
    for (char *line = strtok_r(text, "\n", &rest); line && !failed; line = strtok_r(NULL, "\n", &rest))
        failed = json_array_append_new(lines, json_string(line));
    failed = failed || json_dumpf(out, stdout, JSON_INDENT(1));
    putchar('\n');
    json_decref(out);
    return failed ? vlai_nomem(err, 1 << 16) : VLA_OK;
}

static vla_status run_graph(request *r, model *m, vla_error *err)
{
    VLA_TRY(load(r, m, err));
    vla_graph *g;
    VLA_TRY(vlai_wallx_build(&m->config, &m->shape, &(vlai_wallx_options){0}, &g, err));
    vlai_text text = {0};
    vla_status status = VLA_OK;
    if (r->backward) {
        VLA_TRY_GOTO(vlai_pass_narrow(g, NULL, err), done);
        VLA_TRY_GOTO(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, err), done);
        VLA_TRY_GOTO(vlai_pass_dead(g, NULL, err), done);
    }
    vlai_graph_print(g, &text);
    VLA_TRY_GOTO(vlai_text_status(&text, err), done);
    if (r->json)
        status = print_lines(text.data, err);
    else
        fwrite(text.data, 1, text.size, stdout);
done:
    vlai_text_fini(&text);
    vla_graph_destroy(g);
    return status;
}

static int run(int argc, char **argv, const char *name, bool graph)
{
    request r;
    model m = {0};
    vla_error err = VLA_ERROR_INIT;
    int code = parse(argc, argv, name, graph, &r);
    if (code >= 0)
        return code;
    vla_status status = graph ? run_graph(&r, &m, &err) : run_plan(&r, &m, &err);
    vlai_config_destroy(m.train);
    return status == VLA_OK ? EXIT_DONE : command_fail(name, &err);
}

int inspect_plan(int argc, char **argv)
{
    return run(argc, argv, "inspect plan", false);
}

int inspect_graph(int argc, char **argv)
{
    return run(argc, argv, "inspect graph", true);
}
