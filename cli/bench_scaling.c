/* Rows of several ranks: the table, efficiency against one rank, and beside each measured row, and for more GPUs than were
 * there, what the model of train/scaling.h says. */
#include "bench_engine.h"

#include "base/fail.h"
#include "exec/plan.h"
#include "exec/shard.h"
#include "train/scaling.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PER_NODE = 8, ENOUGH = 2 /* ranks of the store whose buckets are taken: others differ in padding alone */ };

/* NVLink of an H100 or H200: 900 GB/s in both directions together, of its data sheet. */
static const double stated_nvlink = 450e9;
static const int forecast_ranks[] = {8, 16, 64};
static const double links_gbit[] = {400, 100, 25}; /* between machines */

double bench_number(const json_t *row, const char *key)
{
    const json_t *value = json_object_get(row, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

void bench_set(json_t *row, const char *key, double value)
{
    if (isfinite(value))
        json_object_set_new(row, key, json_real(value));
}

/* ---- what the model is made of ---- */

static bool is_update(vlai_op op)
{
    return op == VLAI_OP_sum_squares || op == VLAI_OP_clip_factor || op == VLAI_OP_adamw;
}

/* Where each bucket's gradients come from and its weights go to, in seconds of the passes that stand before. */
typedef struct clocks {
    const vla_graph *g;
    const double *seconds; /* per node */
    double *until;         /* per node: of its pass, with it */
    double forward, backward, update;
} clocks;

static void run_clocks(clocks *c)
{
    for (size_t n = 0; n < c->g->n_nodes; n++) {
        const vlai_node *node = &c->g->nodes[n];
        double *pass = is_update(node->op) ? &c->update : node->backward ? &c->backward : &c->forward;
        *pass += c->seconds[n];
        c->until[n] = *pass;
    }
}

/* The node that makes a gradient: behind views. -1: none of this graph's. */
static int64_t maker(const vla_graph *g, vla_value v)
{
    while (v != VLA_NONE && g->values[v].kind == VLAI_TEMP) {
        int64_t n = g->values[v].producer;
        if (n < 0 || (g->nodes[n].op != VLAI_OP_reshape && g->nodes[n].op != VLAI_OP_stop_gradient))
            return n;
        v = g->nodes[n].inputs[0];
    }
    return -1;
}

static int32_t bucket_of(const vla_store *store, const char *name)
{
    int64_t i = name ? vla_store_find(store, name) : -1;
    return i < 0 ? -1 : store->params[i].bucket;
}

static void look(const clocks *c, const vla_store *store, vlai_scaling_bucket *buckets)
{
    for (size_t n = c->g->n_nodes; n-- > 0;) {
        const vlai_node *node = &c->g->nodes[n];
        for (int i = 0; i < node->n_inputs && !node->backward; i++) {
            const vlai_value_info *v = node->inputs[i] == VLA_NONE ? NULL : &c->g->values[node->inputs[i]];
            int32_t b = v && v->kind == VLAI_PARAM ? bucket_of(store, v->name) : -1;
            if (b >= 0)
                buckets[b].needed = c->until[n] - c->seconds[n];
        }
        if (node->op != VLAI_OP_adamw)
            continue;
        const char *name = c->g->values[node->inputs[0]].name;
        int32_t b = name && strlen(name) > 2 ? bucket_of(store, name + 2) : -1;
        int64_t from = maker(c->g, node->inputs[1]);
        if (b >= 0 && from >= 0 && c->g->nodes[from].backward && c->until[from] > buckets[b].ready)
            buckets[b].ready = c->until[from];
    }
}

/* A store of one of several ranks, never allocated. */
static vla_status laid_out(const bench_setup *s, const bench_row *row, vla_store **store, vla_error *err)
{
    const bench_engine *e = row->engine;
    vla_shard_options share = {sizeof share, 0, ENOUGH, bench_bucket_bytes(s->train, &row->switches), (int)s->train->dist.zero};
    VLA_TRY(vla_store_create(store, err));
    vla_status status = vlai_wallx_params(&e->model, NULL, NULL, *store, err);
    if (status == VLA_OK)
        status = vla_store_shard(*store, &share, err);
    return status == VLA_OK ? vlai_store_lay_out(*store, row->numerics, row->switches.compile ? VLA_STORE_STEP : VLA_STORE_TRAIN, err) : status;
}

/* Of one launch after the other; scaled to what the step takes, in which some run side by side. */
static json_t *pack(const bench_setup *s, const bench_row *row, const clocks *c, const vla_store *store, const vlai_scaling_bucket *buckets)
{
    double sum = c->forward + c->backward + c->update, scale = sum > 0 ? row->step / sum * 1e3 : 0;
    json_t *list = json_array();
    for (size_t b = 0; b < store->n_buckets; b++)
        json_array_append_new(list, json_pack("[f,f,f,f]", buckets[b].gradient, buckets[b].weight, buckets[b].needed * scale, buckets[b].ready * scale));
    return json_pack("{s:f, s:f, s:f, s:b, s:b, s:o}", "forward_ms", c->forward * scale, "backward_ms", c->backward * scale, "update_ms", c->update * scale,
                     "overlap", bench_overlaps(&row->switches), "zero", s->train->dist.zero != 0, "buckets", list);
}

static void size_buckets(const bench_setup *s, const bench_row *row, const vla_store *store, vlai_scaling_bucket *buckets)
{
    bool exact = row->numerics == VLA_FP32 || row->numerics == VLA_FP64, wide = s->train->dist.gradient_dtype == VLAI_GRADIENTS_FP32;
    for (size_t b = 0; b < store->n_buckets; b++) {
        const vlai_store_bucket *k = &store->buckets[b];
        vla_dtype weight = vlai_store_bucket_dtype(store, VLA_STORE_WEIGHT, k);
        buckets[b].weight = (double)k->length * (double)vla_dtype_size(weight);
        buckets[b].gradient = wide && !exact && weight == VLA_BF16 ? 2 * buckets[b].weight : buckets[b].weight;
    }
}

json_t *bench_scaling_json(const bench_setup *s, const bench_row *row, vla_error *err)
{
    const bench_engine *e = row->engine;
    vla_store *store = NULL;
    vlai_profile update = {0};
    clocks c = {.g = e->plan->graph, .seconds = row->profile.nodes, .until = vlai_calloc(e->plan->graph->n_nodes + 1, sizeof *c.until)};
    vla_status status = c.until ? laid_out(s, row, &store, err) : vlai_nomem(err, e->plan->graph->n_nodes * sizeof *c.until);
    vlai_scaling_bucket *buckets = status == VLA_OK ? vlai_calloc(store->n_buckets + 1, sizeof *buckets) : NULL;
    if (status == VLA_OK && !buckets)
        status = vlai_nomem(err, store->n_buckets * sizeof *buckets);
    if (status == VLA_OK && e->update)
        status = vlai_run_profile(e->update, 3, &update, err);
    json_t *out = NULL;
    if (status == VLA_OK) {
        run_clocks(&c);
        c.update += update.total;
        size_buckets(s, row, store, buckets);
        if (bench_overlaps(&row->switches))
            look(&c, store, buckets);
        if (!(out = pack(s, row, &c, store, buckets)))
            vlai_nomem(err, store->n_buckets * sizeof *buckets);
    }
    vlai_profile_fini(&update);
    vlai_free(buckets);
    vlai_free(c.until);
    vla_store_destroy(store);
    return out;
}

/* The model's step out of a row; false where it has none. The caller frees the buckets. */
static bool unpack(const json_t *one, vlai_scaling_step *out, vlai_scaling_bucket **buckets)
{
    const json_t *s = json_object_get(one, "scaling"), *list = json_object_get(s, "buckets");
    size_t count = json_array_size(list);
    *buckets = NULL;
    if (!json_is_object(s) || !(bench_number(one, "step_ms") > 0) || !(*buckets = vlai_calloc(count + 1, sizeof **buckets)))
        return false;
    for (size_t i = 0; i < count; i++) {
        const json_t *b = json_array_get(list, i);
        double v[4];
        for (size_t k = 0; k < 4; k++)
            v[k] = json_number_value(json_array_get(b, k));
        (*buckets)[i] = (vlai_scaling_bucket){v[0], v[1], v[2] * 1e-3, v[3] * 1e-3};
    }
    *out = (vlai_scaling_step){.forward = bench_number(s, "forward_ms") * 1e-3, .backward = bench_number(s, "backward_ms") * 1e-3, .update = bench_number(s, "update_ms") * 1e-3,
                               .buckets = *buckets, .count = count, .overlap = json_is_true(json_object_get(s, "overlap")), .zero = json_is_true(json_object_get(s, "zero"))};
    return true;
}

/* ---- measured rows ---- */

/* The bus bandwidths that a row has measured, in bytes per second; 0: it has not. */
static void measured_rates(const json_t *row, double *reduce, double *gather)
{
    double r = bench_number(row, "reduce_gb_per_s"), g = bench_number(row, "gather_gb_per_s"), all = bench_number(row, "all_reduce_gb_per_s");
    *reduce = 1e9 * (r > 0 ? r : all > 0 ? all : 0);
    *gather = 1e9 * (g > 0 ? g : all > 0 ? all : 0);
}

static json_t *model_of(const json_t *row, const json_t *one)
{
    vlai_scaling_step step;
    vlai_scaling_bucket *buckets;
    int ranks = (int)bench_number(row, "ranks"), machines = (int)bench_number(row, "machines");
    vlai_scaling_net net = vlai_scaling_cluster(ranks, machines > 0 ? (ranks + machines - 1) / machines : ranks, stated_nvlink, stated_nvlink);
    double reduce, gather;
    json_t *out = NULL;
    measured_rates(row, &reduce, &gather);
    if (reduce > 0 && gather > 0 && unpack(one, &step, &buckets)) {
        net.reduce = reduce;
        net.gather = gather;
        vlai_scaling m = vlai_scaling_model(&step, &net);
        out = json_pack("{s:f, s:f, s:f, s:f}", "step_ms", m.step * 1e3, "exposed_ms", m.exposed * 1e3, "efficiency", bench_number(one, "step_ms") / (m.step * 1e3), "difference",
                        m.step * 1e3 / bench_number(row, "step_ms") - 1);
        vlai_free(buckets);
    }
    return out;
}

void bench_scaling_compare(json_t *row, const json_t *one)
{
    double ranks = bench_number(row, "ranks"), speed = bench_number(row, "samples_per_s"), alone = bench_number(one, "samples_per_s");
    if (!one || !(speed > 0) || !(alone > 0) || bench_number(row, "batch") != bench_number(one, "batch"))
        return;
    bench_set(row, "efficiency", speed / (ranks * alone));
    json_t *model = ranks > 1 ? model_of(row, one) : NULL;
    if (model)
        json_object_set_new(row, "model", model);
}

/* A row of one rank that was measured as `like` was. */
static bool is_like(const json_t *row, const json_t *like)
{
    static const char *const equal[] = {"kind", "numerics", "batch", "variant"};
    for (size_t i = 0; i < sizeof equal / sizeof *equal; i++)
        if (!json_equal(json_object_get(row, equal[i]), json_object_get(like, equal[i])))
            return false;
    return json_integer_value(json_object_get(row, "ranks")) == 1 && bench_number(row, "step_ms") > 0;
}

json_t *bench_scaling_find(const char *path, const json_t *like)
{
    FILE *file = fopen(path, "r");
    json_t *found = NULL;
    char *line = NULL;
    size_t room = 0;
    while (file && getline(&line, &room, file) > 0) { /* lines of others are passed over */
        json_t *row = json_loads(line, 0, NULL);
        bool fits = is_like(row, like);
        json_decref(fits ? found : row);
        found = fits ? row : found;
    }
    free(line);
    if (file)
        fclose(file);
    return found;
}

/* ---- the table ---- */

static void cell(const char *format, double value, int width)
{
    char text[64] = "-";
    if (isfinite(value))
        snprintf(text, sizeof text, format, value);
    printf(" %*s", width, text);
}

void bench_scaling_head(void)
{
    puts("ranks numerics    batch global    step ms (least, most)         samples/s  efficiency  exposed ms  share    own GB  all GB "
         "  GB/step  reduce GB/s  gather GB/s   MHz     W  loss at 1, 5, 10, 20, 29");
}

void bench_scaling_print(const json_t *row)
{
    const char *key, *error = json_string_value(json_object_get(row, "error")), *numerics = json_string_value(json_object_get(row, "numerics"));
    json_t *loss;
    printf("%5d %-10s %6.0f", (int)bench_number(row, "ranks"), numerics ? numerics : "", bench_number(row, "batch"));
    if (error || json_is_true(json_object_get(row, "oom"))) {
        const char *reason = json_string_value(json_object_get(row, "reason"));
        printf("  %s%s\n", error ? "failed: " : "out of memory: ", error ? error : reason ? reason : "");
        fflush(stdout);
        return;
    }
    char ends[64];
    snprintf(ends, sizeof ends, "(%.2f, %.2f)", bench_number(row, "step_ms_least"), bench_number(row, "step_ms_most"));
    printf(" %6.0f %10.2f %-20s", bench_number(row, "global_batch"), bench_number(row, "step_ms"), ends);
    cell("%.2f", bench_number(row, "samples_per_s"), 9);
    cell("%.4f", bench_number(row, "efficiency"), 11);
    cell("%.2f", bench_number(row, "exposed_ms"), 11);
    cell("%.2f %%", 100 * bench_number(row, "exposed_share"), 8);
    double own = bench_number(row, "device_gb_own"); /* a CPU has its arena */
    cell("%.3f", isfinite(own) ? own : bench_number(row, "arena_bytes") * 1e-9, 7);
    cell("%.2f", bench_number(row, "device_gb_used"), 7);
    cell("%.3f", bench_number(row, "collective_bytes") * 1e-9, 9);
    cell("%.2f", isfinite(bench_number(row, "reduce_gb_per_s")) ? bench_number(row, "reduce_gb_per_s") : bench_number(row, "all_reduce_gb_per_s"), 12);
    cell("%.2f", bench_number(row, "gather_gb_per_s"), 12);
    cell("%.0f", bench_number(row, "mhz"), 5);
    cell("%.0f", bench_number(row, "watts"), 5);
    putchar(' ');
    json_object_foreach(json_object_get(row, "loss"), key, loss)
        printf(" %.6g", json_number_value(loss));
    putchar('\n');
    const json_t *model = json_object_get(row, "model");
    if (model)
        printf("      model: step %.2f ms (%+.2f %% of the measured), efficiency %.4f, exposed %.2f ms\n", bench_number(model, "step_ms"), 100 * bench_number(model, "difference"),
               bench_number(model, "efficiency"), bench_number(model, "exposed_ms"));
    fflush(stdout);
}

/* ---- more GPUs than were measured ---- */

static void one_forecast(const vlai_scaling_step *step, const json_t *one, int ranks, double inside, const char *source, double gbit, bool json, FILE *out)
{
    vlai_scaling_net net = vlai_scaling_cluster(ranks, PER_NODE, inside, gbit * 1e9 / 8);
    vlai_scaling m = vlai_scaling_model(step, &net);
    double ms = bench_number(one, "step_ms"), batch = bench_number(one, "batch");
    json_t *row = json_pack("{s:s, s:s, s:f, s:i, s:i, s:f, s:s, s:f, s:f, s:f, s:f}", "kind", "ranks_model", "numerics", json_string_value(json_object_get(one, "numerics")),
                            "batch", batch, "ranks", ranks, "machines", net.nodes, "gb_per_s", net.reduce * 1e-9, "source", source, "step_ms", m.step * 1e3, "efficiency",
                            ms / (m.step * 1e3), "exposed_ms", m.exposed * 1e3, "samples_per_s", batch * ranks / m.step);
    if (row && net.nodes > 1)
        bench_set(row, "gbit_per_s", gbit);
    bench_put(row, json, out);
    char link[64] = "one machine";
    if (net.nodes > 1)
        snprintf(link, sizeof link, "%d machines, %.0f Gb/s each", net.nodes, gbit);
    if (!json)
        printf("%5d  %-26s %9.1f GB/s %10.2f %10.2f %11.4f %11.1f\n", ranks, link, net.reduce * 1e-9, m.step * 1e3, m.exposed * 1e3, ms / (m.step * 1e3), batch * ranks / m.step);
    json_decref(row);
}

void bench_scaling_forecast(const json_t *one, const json_t *measured, bool json, FILE *out)
{
    vlai_scaling_step step;
    vlai_scaling_bucket *buckets;
    double reduce = 0, gather = 0;
    if (measured)
        measured_rates(measured, &reduce, &gather);
    bool device = json_object_get(one, "device_gb_own"); /* CPUs have no NVLink */
    if ((!device && !(reduce > 0 && gather > 0)) || !unpack(one, &step, &buckets))
        return;
    double slower = reduce < gather ? reduce : gather, inside = slower > 0 ? slower : stated_nvlink;
    const char *source = slower > 0 ? "measured" : "stated";
    if (!json)
        printf("\nmodel, %s, %.0f samples per GPU: forward %.1f ms, backward %.1f ms, update of everything %.1f ms, %zu buckets; %.1f GB/s within a machine of %d GPUs, %s\n"
               "ranks  links                      slowest link    step ms exposed ms  efficiency   samples/s\n",
               json_string_value(json_object_get(one, "numerics")), bench_number(one, "batch"), step.forward * 1e3, step.backward * 1e3, step.update * 1e3, step.count, inside * 1e-9,
               PER_NODE, source);
    for (size_t i = 0; i < sizeof forecast_ranks / sizeof *forecast_ranks; i++) {
        size_t links = forecast_ranks[i] > PER_NODE ? sizeof links_gbit / sizeof *links_gbit : 1;
        for (size_t l = 0; l < links; l++)
            one_forecast(&step, one, forecast_ranks[i], inside, source, links_gbit[l], json, out);
    }
    if (!json)
        putchar('\n');
    fflush(stdout);
    vlai_free(buckets);
}
