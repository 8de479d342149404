/* The trainer on a small model: it learns, resumes to the bit whatever the workers and threads, survives what is not
 * finite, stops when asked, and fails cleanly at any write or allocation. */
#include "alloc.h"
#include "folder.h"
#include "toy.h"

#include "train/progress.h"
#include "train/resume.h"

#include "base/io.h"
#include "base/json.h"
#include "base/text.h"
#include "base/time.h"
#include "vla/log.h"

#include <unistd.h>

static vlai_text logged;

static void log_line(vla_log_level level, const char *text, void *user)
{
    (void)level;
    (void)user;
    vlai_text_puts(&logged, text);
    vlai_text_puts(&logged, "\n");
}

static int begin(void **state)
{
    vla_log_set(log_line, NULL, VLA_LOG_INFO);
    return make_root(state);
}

static int end(void **state)
{
    vlai_text_fini(&logged);
    return drop_root(state);
}

static toy plain = {.seed = 11, .fail_at = -1};

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

/* The whole text of a file of a run. */
static char *slurp(const char *run, const char *name, size_t *size)
{
    vla_error err = VLA_ERROR_INIT;
    char path[1024], *text;
    snprintf(path, sizeof path, "%s/%s", run, name);
    assert_ok(vlai_read_file(path, 0, &text, size, &err), err);
    return text;
}

static void assert_same_file(const char *a, const char *b, const char *name)
{
    size_t n, m;
    char *x = slurp(a, name, &n), *y = slurp(b, name, &m);
    if (n != m || memcmp(x, y, n) != 0)
        fail_msg("%s and %s differ in %s", a, b, name);
    vlai_free(x);
    vlai_free(y);
}

/* metrics.jsonl up to the fields that measure time and memory. */
static void assert_same_metrics(const char *a, const char *b, int64_t lines)
{
    size_t n, m;
    char *x = slurp(a, "metrics.jsonl", &n), *y = slurp(b, "metrics.jsonl", &m), *save_x, *save_y;
    char *p = strtok_r(x, "\n", &save_x), *q = strtok_r(y, "\n", &save_y);
    int64_t count = 0;
    for (; p && q; p = strtok_r(NULL, "\n", &save_x), q = strtok_r(NULL, "\n", &save_y), count++) {
        char *end_p = strstr(p, ", \"step_ms\""), *end_q = strstr(q, ", \"step_ms\"");
        assert_non_null(end_p);
        assert_non_null(end_q);
        *end_p = *end_q = 0;
        assert_string_equal(p, q);
        assert_non_null(strstr(p, "\"loss\": "));
    }
    assert_true(!p && !q);
    assert_int_equal(count, lines);
    vlai_free(x);
    vlai_free(y);
}

static void assert_same_checkpoint(const char *a, const char *b, const char *name)
{
    static const char *const files[] = {"model.safetensors", "optimizer-0-of-1.safetensors", "state.json"};
    char x[1024], y[1024];
    snprintf(x, sizeof x, "%s/%s", a, name);
    snprintf(y, sizeof y, "%s/%s", b, name);
    for (int i = 0; i < 3; i++)
        assert_same_file(x, y, files[i]);
}

static void set_variant(vla_trainer_options *o, int variant)
{
    o->accumulation = variant == 1 || variant == 3 ? 3 : 1;
    o->global_loss = variant == 3;
    o->numerics = variant == 2 ? VLA_BF16_MASTER : variant == 4 ? VLA_BF16_SR : VLA_FP32;
}

/* 20 steps = 10 + resume + 10, over an epoch's end, with other workers and threads, with and without accumulation. */
static void resume_is_exact(void **state)
{
    (void)state;
    for (int variant = 0; variant < 5; variant++) {
        vla_error err = VLA_ERROR_INIT;
        char whole[64], parts[64];
        snprintf(whole, sizeof whole, "whole%d", variant);
        snprintf(parts, sizeof parts, "parts%d", variant);
        toy slow = plain;
        slow.nanoseconds = 300000;
        vla_trainer_options o = toy_options(at(whole));
        set_variant(&o, variant);
        assert_ok(train(&plain, &o, &err), err);

        o.run = at(parts);
        o.stop_at = 10;
        o.workers = 5;
        o.threads = 3;
        assert_ok(train(&slow, &o, &err), err);
        o.stop_at = 0;
        o.workers = 0;
        o.threads = 2;
        o.resume = at(parts);
        assert_ok(train(&plain, &o, &err), err);
        const char *last = variant == 1 || variant == 3 ? "4_20" : "1_20";
        assert_same_checkpoint(at(whole), at(parts), last);
        assert_same_metrics(at(whole), at(parts), 20);
    }
}

static void same_seed_same_bits(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("again"));
    assert_ok(train(&plain, &o, &err), err);
    assert_same_checkpoint(at("whole0"), at("again"), "1_20");
    assert_same_metrics(at("whole0"), at("again"), 20);
}

/* A run killed after lines that its last checkpoint does not cover: they are written once. */
static void metrics_have_no_duplicates(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("lines"));
    o.save_interval = 8;
    o.stop_at = 13;
    assert_ok(train(&plain, &o, &err), err);
    assert_ok(vlai_remove_tree(at("lines/1_13"), &err), err);
    char path[512];
    snprintf(path, sizeof path, "%s/metrics.jsonl", at("lines"));
    FILE *f = fopen(path, "a");
    fputs("{\"step\": 14, \"epo", f); /* cut by the kill */
    fclose(f);
    o.stop_at = 0;
    o.resume = o.run;
    assert_ok(train(&plain, &o, &err), err);
    assert_same_metrics(at("whole0"), at("lines"), 20);
    assert_same_checkpoint(at("whole0"), at("lines"), "1_20");
}

static void it_learns(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("learns"));
    o.steps = 400;
    o.batch = 8;
    toy t = plain;
    vla_model model = toy_model(&t);
    vla_samples samples = toy_samples(&t, 50), validation = toy_samples(&t, 7);
    vla_trainer *trainer;
    vla_record first, last, held;
    assert_ok(vla_trainer_create(&model, &samples, &validation, &o, &trainer, &err), err);
    assert_ok(vla_trainer_step(trainer, &first, &err), err);
    while (vla_trainer_steps_done(trainer) < 400)
        assert_ok(vla_trainer_step(trainer, &last, &err), err);
    assert_fails(vla_trainer_step(trainer, &last, &err), VLA_E_CANCELLED, err, "over after step 400");
    assert_ok(vla_trainer_validate(trainer, &held, &err), err);
    double again = held.loss;
    assert_ok(vla_trainer_validate(trainer, &held, &err), err);
    assert_true(held.loss == again);
    print_message("loss %g -> %g, held out %g\n", first.loss, last.loss, held.loss);
    assert_true(last.loss < 0.05 * first.loss);
    vla_trainer_destroy(trainer);
}

static void never(void *user, const vla_record *r)
{
    (void)user, (void)r;
    fail_msg("a function beyond the end of its struct was called");
}

/* Of a caller's structs the members that their size spans count alone; the others have their defaults. */
static void structs_of_other_sizes(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("sizes"));
    o.steps = 2;
    o.report = never;
    toy t = plain;
    vla_model model = toy_model(&t);
    vla_samples samples = toy_samples(&t, 50);
    vla_trainer *trainer;
    o.size = 0;
    assert_fails(vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err), VLA_E_INVALID, err, "vla_trainer_options: the member size is 0");
    o.size = offsetof(vla_trainer_options, report);
    model.size = 0;
    assert_fails(vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err), VLA_E_INVALID, err, "vla_model: the member size is 0");
    model.size = offsetof(vla_model, frozen);
    samples.size = offsetof(vla_samples, describe);
    assert_ok(vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err), err);
    assert_ok(vla_trainer_run(trainer, &err), err);
    assert_int_equal(vla_trainer_steps_done(trainer), 2);
    vla_trainer_destroy(trainer);
}

static double metric_of(const vla_record *r, const char *name)
{
    for (int i = 0; i < r->more_count; i++)
        if (!strcmp(r->more[i].name, name))
            return r->more[i].value;
    return NAN;
}

/* The norm of the weights whose names begin so, without the one of this name, in double. */
static double norm_of(const vla_store *store, const char *begin, const char *without)
{
    double squares = 0;
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor w = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        if (!strcmp(w.name, without))
            continue;
        for (int64_t k = 0; !strncmp(w.name, begin, strlen(begin)) && k < w.elements; k++)
            squares += (double)((const float *)w.data)[k] * (double)((const float *)w.data)[k];
    }
    return sqrt(squares);
}

/* Rates by group, a loss over all terms of the step, norms of the weights in steps 1, 8, 15: in the record and in metrics.jsonl. */
static void further_metrics(void **state)
{
    (void)state;
    static const vla_lr_group groups[] = {{"base", 0.02}, {"head", 0.05}};
    static const char *const files[] = {"more0", "more1"};
    double loss[2], channel[2];
    for (int global = 0; global < 2; global++) {
        vla_error err = VLA_ERROR_INIT;
        vla_trainer_options o = toy_options(at(files[global]));
        toy t = plain;
        vla_model model = toy_model(&t);
        vla_samples samples = toy_samples(&t, 50), validation = toy_samples(&t, 7);
        vla_trainer *trainer;
        vla_record r;
        o.groups = groups;
        o.group_count = 2;
        o.accumulation = 3;
        o.global_loss = global;
        o.norm_interval = 7;
        assert_ok(vla_trainer_create(&model, &samples, &validation, &o, &trainer, &err), err);
        for (int step = 1; step <= 9; step++) {
            assert_ok(vla_trainer_step(trainer, &r, &err), err);
            double expected = step <= 3 ? 0.05 / 4 + (0.05 - 0.05 / 4) * (step - 1) / 3 : NAN; /* warm-up over 3 steps */
            if (step <= 3) {
                assert_true(fabs(metric_of(&r, "lr_group/head") - expected) <= 1e-15);
                assert_true(metric_of(&r, "lr_group/base") == r.rate);
            }
            bool due = step % 7 == 1;
            const vla_store *store = vla_trainer_store(trainer);
            static const char *const names[][2] = {{"in_param_norm", "in."}, {"out_param_norm", "out."}, {"total_param_norm", ""}};
            for (int n = 0; n < 3; n++) {
                double value = metric_of(&r, names[n][0]), wanted = norm_of(store, names[n][1], "");
                assert_true(due ? fabs(value - wanted) <= 1e-6 * wanted : isnan(value)); /* squares are added in fp32 by eights */
            }
            assert_true(isnan(metric_of(&r, "none_param_norm")) && isnan(metric_of(&r, "never")));
            if (step == 1) {
                loss[global] = r.loss;
                channel[global] = metric_of(&r, "channel_loss_a \"toy\"");
            }
        }
        assert_ok(vla_trainer_validate(trainer, &r, &err), err);
        assert_true(metric_of(&r, "channel_loss_a \"toy\"") > 0);
        assert_true(isnan(metric_of(&r, "lr_group/head")));
        vla_trainer_destroy(trainer);
        size_t size;
        char *text = slurp(at(files[global]), "metrics.jsonl", &size);
        assert_non_null(strstr(text, "\"channel_loss_a \\\"toy\\\"\": "));
        assert_non_null(strstr(text, "\"lr_group/base\": 0.005, \"lr_group/head\": 0.0125, \"in_param_norm\": "));
        vlai_free(text);
    }
    /* Batches of the toy have 4 to 12 rows. The loss over all of a step is what global_loss trains. */
    assert_true(fabs(channel[0] - loss[1]) <= 1e-6 * loss[1]);
    assert_true(fabs(channel[0] - channel[1]) <= 1e-12);
    print_message("loss %.9g as a mean of means, %.9g over all terms\n", loss[0], loss[1]);
    assert_true(fabs(loss[0] - loss[1]) > 5e-5 * loss[1]);
}

static int one_is_frozen(void *user, const char *param)
{
    (void)user;
    return !strcmp(param, "in.bias");
}

static vla_status build_frozen(void *user, const void *shape, vla_graph **out, vla_error *err)
{
    VLA_TRY(toy_build(user, shape, out, err));
    vla_graph_freeze(*out, vla_graph_find(*out, "in.bias"));
    return VLA_OK;
}

/* What is not trained is no part of any norm. */
static void norms_of_what_is_trained(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("frozen"));
    toy t = plain;
    vla_model model = toy_model(&t);
    model.build = build_frozen;
    model.frozen = one_is_frozen;
    vla_samples samples = toy_samples(&t, 50);
    vla_trainer *trainer;
    vla_record r;
    o.norm_interval = 1;
    assert_ok(vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err), err);
    assert_ok(vla_trainer_step(trainer, &r, &err), err);
    static const char *const names[][2] = {{"in_param_norm", "in."}, {"out_param_norm", "out."}, {"total_param_norm", ""}};
    for (int n = 0; n < 3; n++) {
        double value = metric_of(&r, names[n][0]), wanted = norm_of(vla_trainer_store(trainer), names[n][1], "in.bias");
        assert_true(fabs(value - wanted) <= 1e-6 * wanted);
    }
    assert_true(norm_of(vla_trainer_store(trainer), "in.", "") > 1.01 * norm_of(vla_trainer_store(trainer), "in.", "in.bias"));
    vla_trainer_destroy(trainer);
}

static vla_record seen[16]; /* the records of steps, as they came */
static int seen_count;

static void see(void *user, const vla_record *r)
{
    (void)user;
    if (r->kind == VLA_RECORD_STEP && seen_count < 16)
        seen[seen_count++] = *r;
}

static vla_status build_parts(void *user, const void *shape, vla_graph **out, vla_error *err)
{
    VLA_TRY(toy_build(user, shape, out, err));
    vla_value loss = vla_graph_find(*out, "loss");
    if (((const toy_shape *)shape)->rows == 8)
        vla_graph_name(*out, vla_scale(*out, loss, 3), "some_loss");
    vla_graph_name(*out, vla_scale(*out, loss, 0.5), "half_loss");
    return vla_graph_check(*out, err);
}

/* Every loss that is printed is a mean over the window; a part that not every batch has, over the last steps that had it. */
static void printed_parts_are_smoothed(void **state)
{
    (void)state;
    enum { WINDOW = 3 };
    static const char *const parts[] = {"some_loss", "half_loss", NULL};
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("smooth"));
    toy t = plain;
    vla_model model = toy_model(&t);
    model.build = build_parts;
    model.parts = parts;
    vla_samples samples = toy_samples(&t, 50);
    vla_trainer *trainer;
    o.steps = 16;
    o.loss_smooth = WINDOW;
    o.report = see;
    seen_count = 0;
    assert_ok(vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err), err);
    assert_ok(vla_trainer_run(trainer, &err), err);
    vla_trainer_destroy(trainer);
    assert_int_equal(seen_count, 16);
    double last[2][16];
    int had[2] = {0, 0};
    for (int i = 0; i < seen_count; i++) {
        char line[512], wanted[128];
        vlai_step_line(&seen[i], line, sizeof line);
        for (int k = 0; k < seen[i].parts; k++) {
            int which = !strcmp(seen[i].part_name[k], "half_loss");
            last[which][had[which]++] = seen[i].part[k];
            double sum = 0;
            int n = had[which] < WINDOW ? had[which] : WINDOW;
            for (int j = 0; j < n; j++)
                sum += last[which][had[which] - 1 - j];
            assert_float_equal(seen[i].smooth_part[k], sum / n, 1e-12);
            snprintf(wanted, sizeof wanted, " %s %.6f |", seen[i].part_name[k], sum / n);
            assert_non_null(strstr(line, wanted));
        }
        assert_float_equal(seen[i].smooth_loss, 2 * seen[i].smooth_part[seen[i].parts - 1], 1e-6);
    }
    assert_true(had[1] == 16 && had[0] > WINDOW && had[0] < 16);
    size_t size; /* metrics.jsonl has each step's own */
    char *text = slurp(at("smooth"), "metrics.jsonl", &size), *line = text;
    for (int i = 1; i < 16; i++)
        line = strchr(line, '\n') + 1;
    json_t *record = json_loads(line, JSON_DISABLE_EOF_CHECK, NULL);
    assert_true(json_real_value(json_object_get(record, "half_loss")) == seen[15].part[seen[15].parts - 1]);
    json_decref(record);
    vlai_free(text);
}

/* The held-out loss after many small steps. */
static double held_out(vla_numerics numerics, const char *run, const vla_lr_group *group, int64_t steps)
{
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(run);
    o.steps = steps;
    o.batch = 8;
    o.groups = group;
    o.numerics = numerics;
    toy t = plain;
    vla_model model = toy_model(&t);
    vla_samples samples = toy_samples(&t, 200), validation = toy_samples(&t, 50);
    vla_trainer *trainer;
    vla_record r;
    assert_ok(vla_trainer_create(&model, &samples, &validation, &o, &trainer, &err), err);
    while (vla_trainer_steps_done(trainer) < steps)
        assert_ok(vla_trainer_step(trainer, &r, &err), err);
    assert_ok(vla_trainer_validate(trainer, &r, &err), err);
    vla_trainer_destroy(trainer);
    return r.loss;
}

/* Steps of about a thousandth of a weight are below half a bf16 unit: rounding to nearest loses most of them, stochastic
 * rounding reaches what fp32 reaches (within 5 %). */
static void stochastic_rounding_learns(void **state)
{
    (void)state;
    vla_lr_group fine = {"base", 5e-4};
    double fp32 = held_out(VLA_FP32, at("fine-fp32"), &fine, 2000), sr = held_out(VLA_BF16_SR, at("fine-sr"), &fine, 2000);
    double nearest = held_out(VLA_BF16_PLAIN, at("fine-plain"), &fine, 2000);
    print_message("held out: fp32 %g, bf16-sr %g, rounded to nearest %g\n", fp32, sr, nearest);
    assert_true(fabs(sr - fp32) <= 0.05 * fp32);
    assert_true(nearest > 3 * fp32);
}

/* A step allocates nothing once its plans exist. */
static void steps_allocate_nothing(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("still"));
    o.steps = 300;
    o.norm_interval = 7;
    toy t = plain;
    vla_model model = toy_model(&t);
    vla_samples samples = toy_samples(&t, 50);
    vla_trainer *trainer;
    vla_record r;
    assert_ok(vla_trainer_create(&model, &samples, NULL, &o, &trainer, &err), err);
    for (int i = 0; i < 100; i++)
        assert_ok(vla_trainer_step(trainer, &r, &err), err);
    vla_memory_stats before = vla_memory_stats_get();
    for (int i = 0; i < 100; i++)
        assert_ok(vla_trainer_step(trainer, &r, &err), err);
    vla_memory_stats after = vla_memory_stats_get();
    assert_int_equal(before.allocations, after.allocations);
    assert_int_equal(before.releases, after.releases);
    vla_trainer_destroy(trainer);
}

/* Bad samples: their steps are skipped and named, weights stay finite; too many in a row end the run unsaved. */
static void bad_values_are_skipped(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("bad"));
    o.epochs = 1;
    o.max_bad_steps = 3;
    o.steps = 0;
    o.schedule = VLA_LR_CONSTANT;
    toy t = plain;
    o.loss_smooth = 3;
    o.report = see;
    seen_count = 0;
    t.nan_from = 9;
    t.nan_to = 13;
    assert_ok(train(&t, &o, &err), err);
    assert_int_equal(seen_count, 12);
    assert_true(isnan(seen[2].loss) && isnan(seen[3].loss)); /* and are no part of the printed mean of three */
    assert_float_equal(seen[3].smooth_loss, seen[1].loss, 1e-12);
    assert_float_equal(seen[4].smooth_loss, seen[4].loss, 1e-12);
    assert_float_equal(seen[6].smooth_loss, (seen[4].loss + seen[5].loss + seen[6].loss) / 3, 1e-12);
    assert_non_null(strstr(logged.data, "step 3: the loss is not finite with toy set, sample 9"));
    size_t n;
    char *text = slurp(at("bad"), "metrics.jsonl", &n);
    assert_non_null(strstr(text, "\"step\": 3, \"epoch\": 0, \"samples\": 12, \"loss\": null"));
    int skipped = 0;
    for (char *p = text; (p = strstr(p, "\"skipped\": 1")); p++)
        skipped++;
    assert_int_equal(skipped, 2);
    vlai_free(text);
    text = slurp(at("bad/0_12"), "state.json", &n);
    assert_non_null(strstr(text, "\"updates\": 10"));
    assert_non_null(strstr(text, "\"skips\": 2"));
    vlai_free(text);

    o.run = at("worse");
    o.report = NULL;
    o.save_interval = 1;
    t.nan_to = 40;
    assert_fails(train(&t, &o, &err), VLA_E_NONFINITE, err, "3 steps in a row were not finite, the last of them step 5: 'loss' (nan)");
    assert_non_null(strstr(err.message, "last good checkpoint: "));
    assert_non_null(strstr(err.message, "worse/0_4"));
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_open(at("worse"), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 4); /* steps 3 and 4 were skipped: their state is that of step 2 */
    vla_checkpoint_close(c);
}

/* A finite loss with a gradient that is not: the parameter, the step and its samples are named, and nothing is saved of it. */
static void bad_gradients_are_skipped(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("gradient"));
    o.accumulation = 3;
    o.max_bad_steps = 1;
    toy t = plain;
    t.poison_at = 17; /* in the second of step 2's micro-batches 12..15, 16..19, 20..23 */
    assert_fails(train(&t, &o, &err), VLA_E_NONFINITE, err,
                 "1 steps in a row were not finite, the last of them step 2: the gradient of 'out.weight' (inf at element 7)");
    assert_non_null(strstr(err.message, "last good checkpoint: none was saved yet"));
    assert_non_null(strstr(logged.data, "step 2: the gradient of 'out.weight' (inf at element 7) is not finite (norm inf), samples "
                                        "12 to 23 of the order"));
    assert_non_null(strstr(logged.data, "step 2: in it toy set, sample 20"));
}

/* The update inside the step's plan, and steps that are begun before the one before is ended, change no bit: not over saves
 * and epochs' ends, not after a skipped step, not after a resume. */
static void orders_give_the_same_bits(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    toy bad = plain;
    bad.nan_from = 25;
    bad.nan_to = 26; /* step 7 is skipped; steps 6 and 8 touch other samples */
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER};
    for (int variant = 0; variant < 8; variant++) {
        char name[32], first[32];
        snprintf(name, sizeof name, "order%d", variant);
        snprintf(first, sizeof first, "order%d", variant / 4 * 4);
        vla_trainer_options o = toy_options(at(name));
        o.numerics = modes[variant / 4];
        o.whole_step = variant & 1;
        o.ahead = variant & 2;
        o.save_interval = 9;
        o.validation_interval = 4;
        o.keep_last = 0;
        if (variant % 4 == 3) {
            o.stop_at = 7; /* the skipped one is the newest before the resume */
            assert_ok(train(&bad, &o, &err), err);
            o.resume = o.run;
            o.stop_at = 0;
        }
        assert_ok(train(&bad, &o, &err), err);
        assert_same_checkpoint(at(first), at(name), "0_9");
        assert_same_checkpoint(at(first), at(name), "1_20");
        assert_same_metrics(at(first), at(name), 20);
    }
    assert_non_null(strstr(logged.data, "step 7: the loss is not finite with toy set, sample 25"));
}

/* A sample that cannot be read ends the run after the step before it, also when its batch was fetched early. */
static void ahead_ends_at_the_same_step(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    toy t = plain;
    t.fail_at = 30;
    vla_trainer_options o = toy_options(at("early"));
    o.whole_step = o.ahead = 1;
    assert_fails(train(&t, &o, &err), VLA_E_CORRUPT, err, "frame 30, camera top: broken");
    assert_true(vlai_is_file(at("early/0_7/DONE")));
    size_t n;
    char *text = slurp(at("early"), "metrics.jsonl", &n);
    assert_non_null(strstr(text, "\"step\": 7,"));
    assert_null(strstr(text, "\"step\": 8,"));
    vlai_free(text);
    o.run = at("odd");
    o.accumulation = 2;
    assert_fails(train(&plain, &o, &err), VLA_E_INVALID, err, "one micro-batch, not 2");
}

static vla_status slow_fill(void *user, const void *shape, void *const *slots, int64_t count, vla_run *run, vla_error *err)
{
    nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    return toy_fill(user, shape, slots, count, run, err);
}

/* A CPU does the work of a step when it is begun: that, and not the moment at which it is reported, is its time, and all of
 * them together are no more than the run's. */
static void times_are_those_of_the_steps(void **state)
{
    (void)state;
    for (int ahead = 0; ahead < 2; ahead++) {
        vla_error err = VLA_ERROR_INIT;
        vla_model model = toy_model(&plain);
        vla_samples samples = toy_samples(&plain, 50);
        vla_trainer_options o = toy_options(at(ahead ? "times1" : "times0"));
        vla_trainer *t;
        model.fill = slow_fill;
        o.steps = 7;
        o.whole_step = o.ahead = ahead;
        o.report = see;
        seen_count = 0;
        assert_ok(vla_trainer_create(&model, &samples, NULL, &o, &t, &err), err);
        double began = vlai_now(), sum = 0;
        assert_ok(vla_trainer_run(t, &err), err);
        double whole = vlai_now() - began;
        vla_trainer_destroy(t);
        assert_int_equal(seen_count, 7);
        for (int i = 0; i < 7; i++) {
            sum += seen[i].step_seconds;
            if (!(seen[i].step_seconds >= 0.003))
                fail_msg("ahead %d: step %d is said to have taken %g s, its batch alone takes 0.003", ahead, i + 1, seen[i].step_seconds);
        }
        assert_true(sum <= whole);
    }
}

static volatile sig_atomic_t stop;

static void stop_at_step_7(void *user, const vla_record *r)
{
    (void)user;
    if (r->kind == VLA_RECORD_STEP && r->step == 7)
        stop = 1;
}

static void stops_on_request(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("stop"));
    o.stop = &stop;
    o.report = stop_at_step_7;
    assert_fails(train(&plain, &o, &err), VLA_E_CANCELLED, err, "stopped on request after step 7 of 20");
    stop = 0;
    o.report = NULL;
    o.resume = o.run;
    assert_ok(train(&plain, &o, &err), err);
    assert_same_checkpoint(at("whole0"), at("stop"), "1_20");
    assert_same_metrics(at("whole0"), at("stop"), 20);
}

/* A step that lies behind is no reason to train on. */
static void a_stop_behind_trains_nothing(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("behind"));
    o.stop_at = 5;
    assert_ok(train(&plain, &o, &err), err);
    o.resume = o.run;
    for (o.stop_at = 5; o.stop_at > 2; o.stop_at -= 2)
        assert_ok(train(&plain, &o, &err), err);
    assert_same_metrics(at("behind"), at("behind"), 5);
}

static void one_training_per_folder(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("shared"));
    vla_model model = toy_model(&plain);
    vla_samples samples = toy_samples(&plain, 50);
    vla_trainer *first, *second;
    assert_ok(vla_trainer_create(&model, &samples, NULL, &o, &first, &err), err);
    assert_fails(vla_trainer_create(&model, &samples, NULL, &o, &second, &err), VLA_E_INVALID, err, "in use by another process");
    assert_non_null(strstr(err.hint, "checkpoint.save_path"));
    vla_trainer_destroy(first);
    assert_ok(vla_trainer_create(&model, &samples, NULL, &o, &second, &err), err);
    vla_trainer_destroy(second);
}

static void other_settings_are_refused(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("other"));
    o.stop_at = 5;
    o.contract = "{\"contract\": {\"cameras\": [\"top\"], \"horizon\": 10}}";
    assert_ok(train(&plain, &o, &err), err);
    o.stop_at = 0;
    o.resume = at("other");
    o.seed = 43;
    o.batch = 5;
    o.contract = "{\"contract\": {\"cameras\": [\"front\"], \"horizon\": 10}}";
    assert_fails(train(&plain, &o, &err), VLA_E_INVALID, err, "seed: 42 in the checkpoint, 43 now");
    assert_non_null(strstr(err.message, "batch: 4 in the checkpoint, 5 now"));
    assert_non_null(strstr(err.message, "contract.cameras: [\"top\"] in the checkpoint, [\"front\"] now"));
    assert_null(strstr(err.message, "horizon"));
    assert_non_null(strstr(err.hint, "--allow-change contract.cameras,seed,batch"));
    const char *wrong[] = {"seed", "batch", "contracts", NULL};
    o.allow_change = wrong;
    assert_fails(train(&plain, &o, &err), VLA_E_INVALID, err, "--allow-change: a state has no 'contracts'; it has contract, seed, ");
    const char *allow[] = {"seed", "batch", "contract", NULL};
    o.allow_change = allow;
    assert_ok(train(&plain, &o, &err), err);
}

/* Counters that no run can have come to are a damaged state, whatever its checksum. */
static void counters_that_cannot_be(void **state)
{
    (void)state;
    static const struct {
        const char *part, *by, *message;
        vla_status status;
    } rows[] = {
        {"\"step\": 5", "\"step\": -5", "'step' is -5, wanted 0 to 1000000000000000", VLA_E_CORRUPT},
        {"\"step\": 5", "\"step\": 9007199254740993", "'step' is 9007199254740993, wanted 0 to 1000000000000000", VLA_E_CORRUPT},
        {"\"step\": 5", "\"step\": 6", "5 updates and 0 skipped steps do not make 6 steps", VLA_E_CORRUPT},
        {"\"updates\": 5", "\"updates\": 4", "4 updates and 0 skipped steps do not make 5 steps", VLA_E_CORRUPT},
        {"\"epoch\": 0", "\"epoch\": 9223372036854775807", "'epoch' is 9223372036854775807, wanted 0 to 1000000000", VLA_E_CORRUPT},
        {"\"format\": 1", "\"format\": 2", "state of format 2, this build reads 1", VLA_E_UNSUPPORTED},
        {"\"format\": 1", "\"form\": 2", NULL, VLA_OK},
    };
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("counters"));
    vlai_progress p = {.step = 5, .updates = 5, .place = 20, .samples = 20};
    vlai_text text = {0};
    assert_ok(vlai_state_text(&o, 50, &p, NULL, &text, &err), err);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *found = strstr(text.data, rows[i].part);
        assert_non_null(found);
        vlai_text edited = {0};
        vlai_text_put(&edited, text.data, (size_t)(found - text.data));
        vlai_text_printf(&edited, "%s%s", rows[i].by, found + strlen(rows[i].part));
        vlai_progress read;
        vla_status status = vlai_state_read(edited.data, "here", &o, 50, &read, &err);
        if (status != rows[i].status || (rows[i].message && !strstr(err.message, rows[i].message)))
            fail_msg("%s: %s: %s", rows[i].by, vla_status_name(status), err.message);
        vlai_text_fini(&edited);
    }
    vlai_text_fini(&text);
}

/* Two values that are alike for longer than a message shows are shown from where they differ. */
static void long_values_that_differ(void **state)
{
    (void)state;
    char contract[512];
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("long"));
    vlai_progress p = {.step = 5, .updates = 5, .place = 20, .samples = 20};
    vlai_text text = {0};
    o.contract = contract;
    snprintf(contract, sizeof contract, "{\"contract\": {\"cameras\": [\"%0100d\", 56]}}", 0);
    assert_ok(vlai_state_text(&o, 50, &p, NULL, &text, &err), err);
    snprintf(contract, sizeof contract, "{\"contract\": {\"cameras\": [\"%0100d\", 28]}}", 0);
    assert_fails(vlai_state_read(text.data, "here", &o, 50, &p, &err), VLA_E_INVALID, err, "0\",56] in the checkpoint, ...00000");
    assert_non_null(strstr(err.message, "0\",28] now"));
    vlai_text_fini(&text);
}

static void a_broken_sample_ends_the_run_saved(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("broken"));
    toy t = plain;
    t.fail_at = 30;
    assert_fails(train(&t, &o, &err), VLA_E_CORRUPT, err, "episode 1, frame 30, camera top");
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_open(at("broken"), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 7);
    vla_checkpoint_close(c);
}

/* The same of a sample of the validation, which no step has read before. */
static void a_broken_validation_ends_the_run_saved(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("unheld"));
    toy t = plain, held = plain;
    held.fail_at = 3;
    o.save_interval = 0;
    o.validation_interval = 5;
    vla_model model = toy_model(&t);
    vla_samples samples = toy_samples(&t, 50), validation = toy_samples(&held, 7);
    vla_trainer *trainer;
    assert_ok(vla_trainer_create(&model, &samples, &validation, &o, &trainer, &err), err);
    assert_fails(vla_trainer_run(trainer, &err), VLA_E_CORRUPT, err, "episode 1, frame 3, camera top");
    vla_trainer_destroy(trainer);
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_open(at("unheld"), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 5);
    vla_checkpoint_close(c);
}

/* A fresh run in a used folder does not meet the other run's future. */
static void old_checkpoints_step_aside(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char folder[512];
    snprintf(folder, sizeof folder, "%s", at("used"));
    vla_trainer_options o = toy_options(folder);
    assert_ok(train(&plain, &o, &err), err);
    assert_ok(vlai_mkdirs(at("used/predict"), &err), err);
    assert_ok(vlai_write_file_atomic(at("used/predict/summary.json"), "{\"step\": 20}", 12, &err), err);
    o.stop_at = 6;
    assert_ok(train(&plain, &o, &err), err);
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_open(at("used"), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 6);
    vla_checkpoint_close(c);
    assert_true(vlai_is_dir(at("used/1_20.old")));
    assert_same_metrics(at("used"), at("used"), 6);
    assert_true(vlai_is_file(at("used/metrics.jsonl.old")));
    assert_false(vlai_is_dir(at("used/predict")));
    assert_true(vlai_is_file(at("used/predict.old/summary.json")));

    assert_ok(vlai_mkdirs(at("used/predict"), &err), err);
    assert_ok(vlai_write_file_atomic(at("used/predict/summary.json"), "{\"step\": 6}", 11, &err), err);
    o.stop_at = 8;
    o.resume = folder;
    assert_ok(train(&plain, &o, &err), err);
    assert_true(vlai_is_file(at("used/predict/summary.json"))); /* of a checkpoint that this run went on from */

    /* A third run and a fourth keep what the first and second left; a run that made no step has left nothing. */
    char *first, *now;
    size_t first_size, now_size;
    assert_ok(vlai_read_file(at("used/metrics.jsonl.old"), 0, &first, &first_size, &err), err);
    o.resume = NULL;
    o.stop_at = 1;
    assert_ok(train(&plain, &o, &err), err);
    assert_true(vlai_is_file(at("used/metrics.jsonl.old2")));
    assert_true(vlai_is_file(at("used/predict.old2/summary.json")));
    assert_true(vlai_is_dir(at("used/1_20.old")) && vlai_is_dir(at("used/0_8.old2")));
    assert_ok(vlai_write_file_atomic(at("used/metrics.jsonl"), "", 0, &err), err);
    assert_ok(train(&plain, &o, &err), err);
    assert_false(vlai_is_file(at("used/metrics.jsonl.old3")));
    assert_ok(train(&plain, &o, &err), err);
    assert_true(vlai_is_file(at("used/metrics.jsonl.old3")));
    assert_ok(vlai_read_file(at("used/metrics.jsonl.old"), 0, &now, &now_size, &err), err);
    assert_int_equal(now_size, first_size);
    assert_memory_equal(now, first, first_size);
    vlai_free(first);
    vlai_free(now);
    assert_ok(vlai_read_file(at("used/metrics.jsonl.old2"), 0, &now, &now_size, &err), err);
    int steps = 0;
    for (const char *c = now; (c = strchr(c, '\n')); c++)
        steps++;
    assert_int_equal(steps, 8);
    vlai_free(now);
}

static void small_splits_are_refused(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("small"));
    o.batch = 26;
    o.accumulation = 2;
    assert_fails(train(&plain, &o, &err), VLA_E_INVALID, err, "has 50 samples, a step takes 26 x 2");
}

/* Writes: the Nth one of a whole short run fails. Saves that fail are tried again; the run may still succeed. */
static void every_failing_write(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    int failures = 0;
    for (uint64_t n = 1;; n++) {
        vlai_remove_tree(at("writes"), &err);
        vla_trainer_options o = toy_options(at("writes"));
        o.steps = 4;
        o.save_interval = 2;
        vlai_io_fail_nth(n);
        vla_status status = train(&plain, &o, &err);
        bool reached = vlai_io_fail_nth(0) >= n;
        failures += status != VLA_OK;
        if (status == VLA_OK) {
            vla_checkpoint *c;
            assert_ok(vla_checkpoint_open(at("writes"), &c, &err), err);
            assert_int_equal(vla_checkpoint_step(c), 4);
            vla_checkpoint_close(c);
        } else {
            assert_non_null(strstr(err.message, "No space left"));
        }
        if (!reached) {
            assert_int_equal(status, VLA_OK);
            break;
        }
    }
    assert_true(failures >= 3); /* the files of records; a save has a second chance */
}

/* Allocations: the Nth one of a run with a resume fails, for N in steps that a short test can take (every one in the
 * long form). */
static void every_failing_allocation(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    long stride = test_long() ? 1 : test_sanitized() ? 31 : 7;
    vlai_text_fini(&logged);
    vla_log_set(NULL, NULL, VLA_LOG_ERROR);
    failing_allocation(UINT64_MAX);
    int failures = 0;
    for (long n = 1;; n += stride) {
        vlai_remove_tree(at("allocs"), &err);
        vla_trainer_options o = toy_options(at("allocs"));
        o.steps = 3;
        o.save_interval = 2;
        failing_allocation((uint64_t)n);
        vla_status status = train(&plain, &o, &err);
        if (status == VLA_OK) {
            o.steps = 4;
            o.resume = o.run;
            status = train(&plain, &o, &err);
        }
        bool reached = alloc_reached();
        failing_allocation(UINT64_MAX);
        failures += status != VLA_OK;
        if (!reached) {
            assert_int_equal(status, VLA_OK);
            break;
        }
    }
    print_message("%d runs failed cleanly\n", failures);
    assert_true(failures > (stride > 7 ? 5 : 20));
    failing_allocation(0);
    vla_log_set(log_line, NULL, VLA_LOG_INFO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(resume_is_exact),
        cmocka_unit_test(same_seed_same_bits),
        cmocka_unit_test(metrics_have_no_duplicates),
        cmocka_unit_test(it_learns), cmocka_unit_test(structs_of_other_sizes),
        cmocka_unit_test(further_metrics),
        cmocka_unit_test(norms_of_what_is_trained),
        cmocka_unit_test(printed_parts_are_smoothed),
        cmocka_unit_test(stochastic_rounding_learns),
        cmocka_unit_test(steps_allocate_nothing),
        cmocka_unit_test(bad_values_are_skipped),
        cmocka_unit_test(bad_gradients_are_skipped),
        cmocka_unit_test(orders_give_the_same_bits),
        cmocka_unit_test(ahead_ends_at_the_same_step),
        cmocka_unit_test(times_are_those_of_the_steps),
        cmocka_unit_test(stops_on_request),
        cmocka_unit_test(a_stop_behind_trains_nothing),
        cmocka_unit_test(one_training_per_folder),
        cmocka_unit_test(other_settings_are_refused), cmocka_unit_test(counters_that_cannot_be),
        cmocka_unit_test(long_values_that_differ),
        cmocka_unit_test(a_broken_sample_ends_the_run_saved),
        cmocka_unit_test(a_broken_validation_ends_the_run_saved),
        cmocka_unit_test(old_checkpoints_step_aside),
        cmocka_unit_test(small_splits_are_refused),
        cmocka_unit_test(every_failing_write),
        cmocka_unit_test(every_failing_allocation),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
