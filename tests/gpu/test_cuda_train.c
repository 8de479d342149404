/* The trainer on a device, with the small model of tests/toy.h: every order of its work gives the same bits, resumes are exact,
 * the snapshot is what the device holds, values that are not finite are skipped and named, steps cost nothing but work, and a
 * run that does not fit says so.
 *
 *     test_cuda_train [--device DEVICE] [--list] [--short | --few] [PART[:I/N]...]      all but cpu and limit can be shared out
 *                                                                                       (gpu/parts.h)
 *
 * Prints "N passed, N failed". Files go to a folder in /tmp. */
#include "toy.h"

#include "gpu/parts.h"

#include "base/bf16.h"
#include "base/io.h"
#include "base/text.h"
#include "kernels/device.h"
#include "vla/log.h"
#include "vla/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char root[] = "/tmp/vla-cuda-train-XXXXXX";
static const char *device = "cuda";
static vlai_text logged;
static int passed, failed;

static void check(bool ok, const char *what)
{
    if (!ok)
        printf("FAIL %s\n", what);
    passed += ok;
    failed += !ok;
}

static void log_line(vla_log_level level, const char *text, void *user)
{
    (void)level;
    (void)user;
    vlai_text_puts(&logged, text);
    vlai_text_puts(&logged, "\n");
}

static const char *at(const char *name)
{
    static char path[8][512];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[turn], "%s/%s", root, name);
    return path[turn];
}

static vla_trainer_options options(const char *run)
{
    vla_trainer_options o = toy_options(run);
    o.device = device;
    o.validation_interval = 4;
    o.save_interval = 9;
    o.keep_last = 0;
    return o;
}

static vla_status train(toy *t, const vla_trainer_options *o, vla_error *err)
{
    vla_model model = toy_model(t);
    vla_samples samples = toy_samples(t, 50), validation = toy_samples(t, 7);
    vla_trainer *trainer;
    VLA_TRY(vla_trainer_create(&model, &samples, &validation, o, &trainer, err));
    vla_status status = vla_trainer_run(trainer, err);
    vla_trainer_destroy(trainer);
    return status;
}

static bool must(vla_status status, const vla_error *err, const char *what)
{
    if (status != VLA_OK)
        printf("     %s: %s\n", what, err->message);
    check(status == VLA_OK, what);
    return status == VLA_OK;
}

static bool same_file(const char *a, const char *b, const char *name)
{
    vla_error err = VLA_ERROR_INIT;
    char path[2][1024], *text[2] = {NULL, NULL};
    size_t size[2] = {0, 0};
    bool same = true;
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s/%s", at(i ? b : a), name);
        same &= vlai_read_file(path[i], 0, &text[i], &size[i], &err) == VLA_OK;
    }
    same = same && size[0] == size[1] && memcmp(text[0], text[1], size[0]) == 0;
    if (!same)
        printf("     %s and %s differ (%zu and %zu bytes)\n", path[0], path[1], size[0], size[1]);
    vlai_free(text[0]);
    vlai_free(text[1]);
    return same;
}

static bool same_run(const char *a, const char *b)
{
    return same_file(a, b, "0_9/model.safetensors") && same_file(a, b, "0_9/optimizer-0-of-1.safetensors") &&
           same_file(a, b, "1_20/model.safetensors") && same_file(a, b, "1_20/optimizer-0-of-1.safetensors");
}

/* What the loss of a run's last step was, from its metrics. */
static double last_loss(const char *run)
{
    vla_error err = VLA_ERROR_INIT;
    char path[1024], *text, *line;
    snprintf(path, sizeof path, "%s/metrics.jsonl", at(run));
    if (vlai_read_file(path, 0, &text, NULL, &err) != VLA_OK)
        return NAN;
    line = strstr(text, "{\"step\": 20,");
    line = line ? strstr(line, "\"loss\": ") : NULL;
    double loss = line ? strtod(line + 8, NULL) : NAN;
    vlai_free(text);
    return loss;
}

static toy plain = {.seed = 11, .fail_at = -1};

/* Separate plans and one plan, waited for and ahead, launched and replayed, with a skipped step, over saves, validations, ends of
 * epochs and a resume. */
static void orders(void)
{
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR};
    toy bad = plain;
    bad.nan_from = 25;
    bad.nan_to = 26;
    bool ran = false;
    for (int m = 0; m < 3; m++) {
        if (!in_share())
            continue;
        ran = true;
        for (int variant = 0; variant < 6; variant++) {
            if (test_parts.few && variant % 4)
                continue; /* the kernels of plain steps and of replayed ones */
            vla_error err = VLA_ERROR_INIT;
            char name[32], first[32], what[64];
            snprintf(name, sizeof name, "order%d%d", m, variant);
            snprintf(first, sizeof first, "order%d0", m);
            snprintf(what, sizeof what, "numerics %d, order %d", m, variant);
            vla_trainer_options o = options(at(name));
            o.numerics = modes[m];
            o.whole_step = variant == 1 || variant >= 3;
            o.ahead = variant >= 2;
            o.fast = variant >= 4 ? VLA_FAST_REPLAY | VLA_FAST_UPDATE | VLA_FAST_LANES : 0;
            if (variant == 5) {
                o.stop_at = 7;
                if (!must(train(&bad, &o, &err), &err, what))
                    continue;
                o.resume = o.run;
                o.stop_at = 0;
            }
            if (must(train(&bad, &o, &err), &err, what) && variant > 0)
                check(same_run(first, name), what);
        }
    }
    check(!ran || (logged.data && strstr(logged.data, "step 7: the loss is not finite with toy set, sample 25") != NULL), "the bad sample is named");
}

/* The device learns what the CPU learns: fp32 sums in another order, over 20 steps. */
static void beside_the_cpu(void)
{
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = options(at("cpu"));
    o.device = "cpu";
    if (!must(train(&plain, &o, &err), &err, "on the CPU"))
        return;
    o = options(at("gpu"));
    if (!must(train(&plain, &o, &err), &err, "on the device"))
        return;
    double a = last_loss("cpu"), b = last_loss("gpu");
    printf("loss after 20 steps: %.9g on the CPU, %.9g on the device\n", a, b);
    check(fabs(a - b) <= 1e-4 * a, "the device's losses are the CPU's");
}

static void accumulation(void)
{
    vla_error err = VLA_ERROR_INIT;
    for (int global = 0; global < 2; global++) {
        if (!in_share())
            continue;
        char a[32], b[32];
        for (int ahead = 0; ahead < 2; ahead++) {
            char *name = ahead ? b : a;
            snprintf(name, sizeof a, "micro%d%d", ahead, global);
            vla_trainer_options o = options(at(name));
            o.save_interval = 0;
            o.accumulation = 3;
            o.steps = test_parts.few ? 5 : o.steps;
            o.validation_interval = test_parts.few ? 0 : o.validation_interval;
            o.global_loss = global;
            o.ahead = ahead;
            must(train(&plain, &o, &err), &err, name);
        }
        char file[2][64];
        for (int i = 0; i < 2; i++) /* 50 samples: 4 steps of 12 an epoch */
            snprintf(file[i], sizeof file[i], "%s/%s", test_parts.few ? "1_5" : "4_20", i ? "optimizer-0-of-1.safetensors" : "model.safetensors");
        check(same_file(a, b, file[0]) && same_file(a, b, file[1]), "micro-batches prepared ahead");
    }
}

typedef struct counted {
    vla_memory_stats host;
    vlai_device_counts device;
    int64_t from, to;
    uint64_t allocations, device_allocations, synchronizations, waits;
    bool done;
} counted;

/* Counts between two steps of a run. */
static void on_record(void *user, const vla_record *r)
{
    counted *c = user;
    if (r->kind != VLA_RECORD_STEP)
        return;
    if (r->step == c->from) {
        c->host = vla_memory_stats_get();
        c->device = vlai_device_counts_get();
    } else if (r->step == c->to) {
        vlai_device_counts now = vlai_device_counts_get();
        c->allocations = vla_memory_stats_get().allocations - c->host.allocations;
        c->device_allocations = now.allocations - c->device.allocations;
        c->synchronizations = now.synchronizations - c->device.synchronizations;
        c->waits = now.waits - c->device.waits;
        c->done = true;
    }
}

/* --short: the steps alone, of which the first may cost something. */
static void steps_cost_nothing(void)
{
    static const struct {
        const char *what;
        int whole, ahead;
        unsigned fast;
        int64_t accumulation;
    } rows[] = {
        {"plain steps", 0, 0, 0, 1},
        {"whole steps ahead, replayed", 1, 1, VLA_FAST_REPLAY | VLA_FAST_UPDATE | VLA_FAST_LANES, 1},
        {"micro-batches ahead", 0, 1, VLA_FAST_REPLAY, 2},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        vla_error err = VLA_ERROR_INIT;
        if (!in_share())
            continue;
        bool brief = test_parts.brief;
        counted c = {.from = brief ? 20 : 60, .to = test_parts.few ? 0 : brief ? 30 : 160};
        vla_trainer_options o = options(at("count"));
        o.save_interval = o.validation_interval = 0;
        o.steps = c.to + 10;
        o.epochs = 1;
        o.numerics = VLA_BF16_MASTER;
        o.whole_step = rows[i].whole;
        o.ahead = rows[i].ahead;
        o.fast = rows[i].fast;
        o.accumulation = rows[i].accumulation;
        o.report = on_record;
        o.report_user = &c;
        vla_model model = toy_model(&plain);
        vla_samples samples = toy_samples(&plain, 170 * 4 * 2);
        vla_trainer *trainer;
        vla_status status = vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err);
        if (status == VLA_OK) {
            status = vla_trainer_run(trainer, &err);
            vla_trainer_destroy(trainer);
        }
        if (!must(status, &err, rows[i].what))
            continue;
        if (c.done)
            printf("%lld %s: %llu host allocations, %llu device allocations, %llu synchronisations, %llu waits for an event\n",
                   (long long)(c.to - c.from), rows[i].what, (unsigned long long)c.allocations, (unsigned long long)c.device_allocations,
                   (unsigned long long)c.synchronizations, (unsigned long long)c.waits);
        check(brief || (c.done && c.allocations == 0 && c.device_allocations == 0 && c.synchronizations == 0), rows[i].what);
    }
}

static void keep_total(void *user, const vla_record *r)
{
    for (int i = 0; r->kind == VLA_RECORD_STEP && i < r->more_count; i++)
        if (!strcmp(r->more[i].name, "total_param_norm"))
            *(double *)user = r->more[i].value;
}

/* The norm of what the store holds, in double. */
static double norm_of(const vla_store *store, vla_error *err)
{
    double squares = 0;
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor w = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        union {
            float f[TOY_HIDDEN * TOY_IN];
            uint16_t h[TOY_HIDDEN * TOY_IN];
        } data;
        if (vla_store_read(store, VLA_STORE_WEIGHT, i, 0, w.elements, &data, err) != VLA_OK)
            return NAN;
        for (int64_t k = 0; k < w.elements; k++) {
            double x = w.dtype == VLA_F32 ? (double)data.f[k] : (double)vlai_bf16_to_float(data.h[k]);
            squares += x * x;
        }
    }
    return sqrt(squares);
}

/* Norms of the weights after steps 1, 8 and 15, the last, are those of what the store holds then. */
static void norms_of_weights(void)
{
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR};
    for (int i = 0; i < 6; i++) {
        if ((test_parts.few && i % 2) || !in_share()) /* few: fp32 and bf16-sr by plain steps, bf16-master by a whole one */
            continue;
        vla_error err = VLA_ERROR_INIT;
        double said = NAN, is = NAN;
        vla_trainer_options o = options(at("norms"));
        o.save_interval = o.validation_interval = 0;
        o.steps = 15;
        o.norm_interval = 7;
        o.numerics = modes[i % 3];
        o.whole_step = o.ahead = i / 3;
        o.fast = i / 3 ? VLA_FAST_REPLAY | VLA_FAST_UPDATE | VLA_FAST_LANES : 0;
        o.report = keep_total;
        o.report_user = &said;
        vla_model model = toy_model(&plain);
        vla_samples samples = toy_samples(&plain, 50);
        vla_trainer *trainer;
        vla_status status = vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err);
        if (status == VLA_OK) {
            status = vla_trainer_run(trainer, &err);
            is = norm_of(vla_trainer_store(trainer), &err);
            vla_trainer_destroy(trainer);
        }
        if (must(status, &err, "norms of weights"))
            check(fabs(said - is) <= 1e-6 * is, "norms of weights");
    }
}

static void a_run_that_does_not_fit(void)
{
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = options(at("large"));
    o.memory_limit = 20000;
    vla_status status = train(&plain, &o, &err);
    if (status != VLA_E_DEVICE_NOMEM)
        printf("     %s: %s\n", vla_status_name(status), err.message);
    check(status == VLA_E_DEVICE_NOMEM && strstr(err.message, "more than the limit of 20000"), "a limit on device memory");
}

int main(int argc, char **argv)
{
    static const test_part list[] = {{"cpu", beside_the_cpu},         {"orders", orders},          {"micro", accumulation},
                                {"nothing", steps_cost_nothing}, {"norms", norms_of_weights}, {"limit", a_run_that_does_not_fit}};
    vla_error err = VLA_ERROR_INIT;
    int code;
    if (argc > 2 && !strcmp(argv[1], "--device")) {
        device = argv[2];
        argc -= 2;
        argv += 2;
    }
    if (!parts_begin(argc, argv, list, sizeof list / sizeof *list, &code))
        return code;
    if (!mkdtemp(root))
        return 1;
    vla_log_set(log_line, NULL, VLA_LOG_INFO);
    parts_run(argc, argv, list, sizeof list / sizeof *list, NULL);
    vlai_text_fini(&logged);
    vlai_remove_tree(root, &err);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
