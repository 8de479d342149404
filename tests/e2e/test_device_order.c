/* The trainer on a device that does everything as late as it may: what a GPU run relies on, in the bits of the CPU. */
#include "lazy_device.h"
#include "tiny.h"
#include "toy.h"

#include "base/text.h"
#include "train/device.h"
#include "train/run_memory.h"
#include "train/wallx_task.h"
#include "vla/log.h"

#include <jansson.h>

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
    lazy_install();
    return tiny_make(state);
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
    assert_int_equal(lazy_violations, 0);
    return status;
}

static void assert_same_file(const char *a, const char *b, const char *name)
{
    vla_error err = VLA_ERROR_INIT;
    char path[1024], *x, *y;
    size_t n, m;
    snprintf(path, sizeof path, "%s/%s", at(a), name);
    assert_ok(vlai_read_file(path, 0, &x, &n, &err), err);
    snprintf(path, sizeof path, "%s/%s", at(b), name);
    assert_ok(vlai_read_file(path, 0, &y, &m, &err), err);
    if (n != m || memcmp(x, y, n) != 0)
        fail_msg("%s and %s differ in %s", a, b, name);
    vlai_free(x);
    vlai_free(y);
}

static void assert_same_run(const char *a, const char *b, const char *const *checkpoints)
{
    for (; *checkpoints; checkpoints++)
        for (int i = 0; i < 2; i++) {
            char name[128];
            snprintf(name, sizeof name, "%s/%s", *checkpoints, i ? "optimizer-0-of-1.safetensors" : "model.safetensors");
            assert_same_file(a, b, name);
        }
}

static void the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const char *const checkpoints[] = {"0_9", "1_20", NULL};
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR};
    toy bad = plain;
    bad.nan_from = 25;
    bad.nan_to = 26; /* step 7 is skipped */
    for (int m = 0; m < 3; m++) {
        vla_error err = VLA_ERROR_INIT;
        char first[32];
        snprintf(first, sizeof first, "cpu%d", m);
        vla_trainer_options o = toy_options(at(first));
        o.numerics = modes[m];
        o.save_interval = 9;
        o.validation_interval = 4;
        o.keep_last = 0;
        assert_ok(train(&bad, &o, &err), err);
        for (int variant = 0; variant < 8; variant++) {
            char name[32];
            snprintf(name, sizeof name, "lazy%d%d", m, variant);
            o.run = at(name);
            o.device = "lazy";
            o.whole_step = variant & 1;
            o.ahead = (variant & 2) != 0;
            o.resume = NULL;
            lazy_ahead = 0;
            vlai_text_fini(&logged);
            if (variant & 4) {
                o.stop_at = 7;
                assert_ok(train(&bad, &o, &err), err);
                o.stop_at = 0;
                o.resume = o.run;
                *lazy_choices_kept = 0;
                assert_non_null(strstr(logged.data, "step 7: the loss is not finite with toy set, sample 25"));
            }
            assert_ok(train(&bad, &o, &err), err);
            assert_same_run(first, name, checkpoints);
            assert_int_equal(lazy_ahead, o.whole_step && o.ahead ? 2 : 1);
            if (variant & 4)
                assert_string_equal(lazy_choices_kept, "lazy 1\n");
            else
                assert_non_null(strstr(logged.data, "step 7: the loss is not finite with toy set, sample 25"));
        }
    }
}

static void micro_batches(void **state)
{
    (void)state;
    static const char *const checkpoints[] = {"4_20", NULL};
    for (int variant = 0; variant < 4; variant++) {
        vla_error err = VLA_ERROR_INIT;
        char first[32], name[32];
        snprintf(first, sizeof first, "mcpu%d", variant);
        snprintf(name, sizeof name, "mlazy%d", variant);
        vla_trainer_options o = toy_options(at(first));
        o.accumulation = 3;
        o.global_loss = variant & 1;
        o.numerics = VLA_BF16_MASTER;
        assert_ok(train(&plain, &o, &err), err);
        o.run = at(name);
        o.device = "lazy";
        o.ahead = (variant & 2) != 0;
        assert_ok(train(&plain, &o, &err), err);
        assert_same_run(first, name, checkpoints);
    }
}

/* Few plans are kept, so that runs come and go, and the arena grows, while steps are under way. */
static void plans_come_and_go(void **state)
{
    (void)state;
    static const char *const checkpoints[] = {"1_20", NULL};
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("few"));
    o.device = "lazy";
    o.whole_step = o.ahead = 1;
    o.most_plans = 2;
    assert_ok(train(&plain, &o, &err), err);
    o = toy_options(at("many"));
    assert_ok(train(&plain, &o, &err), err);
    assert_same_run("many", "few", checkpoints);
}

static volatile sig_atomic_t stop;

static void stop_at_step_7(void *user, const vla_record *r)
{
    (void)user;
    if (r->kind == VLA_RECORD_STEP && r->step == 7)
        stop = 1;
}

/* A stop saves what was done, the step that was under way with it, and a resume gives the bits of a run without a stop. */
static void stops_and_failures(void **state)
{
    (void)state;
    static const char *const checkpoints[] = {"1_20", NULL};
    vla_error err = VLA_ERROR_INIT;
    vla_trainer_options o = toy_options(at("stopped"));
    o.device = "lazy";
    o.whole_step = o.ahead = 1;
    o.stop = &stop;
    o.report = stop_at_step_7;
    assert_fails(train(&plain, &o, &err), VLA_E_CANCELLED, err, "after step 8 of 20");
    assert_true(vlai_is_file(at("stopped/0_8/DONE")));
    stop = 0;
    o.report = NULL;
    o.resume = o.run;
    assert_ok(train(&plain, &o, &err), err);
    assert_same_run("many", "stopped", checkpoints);

    toy broken = plain;
    broken.fail_at = 30;
    o = toy_options(at("broken"));
    o.device = "lazy";
    o.whole_step = o.ahead = 1;
    assert_fails(train(&broken, &o, &err), VLA_E_CORRUPT, err, "frame 30");
    assert_true(vlai_is_file(at("broken/0_7/DONE")));

    toy bad = plain;
    bad.nan_from = 9;
    bad.nan_to = 40;
    o.run = at("worse");
    o.max_bad_steps = 3;
    assert_fails(train(&bad, &o, &err), VLA_E_NONFINITE, err, "3 steps in a row were not finite, the last of them step 5");

    o = toy_options(at("large"));
    o.device = "lazy";
    o.memory_limit = 10000;
    assert_fails(train(&plain, &o, &err), VLA_E_DEVICE_NOMEM, err, "limit of 10000");
}

/* The whole pipeline of Wall-X: weights through staging, batches of several shapes, blame, snapshot, resume. */
static void wallx_on_a_device(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    assert_int_equal(chdir(root), 0);
    for (int device = 0; device < 3; device++) {
        const char *overrides[] = {device == 0 ? "checkpoint.save_path=on_cpu" : "checkpoint.save_path=on_lazy",
                                   "training.numerics=bf16", device == 2 ? "checkpoint.resume_from=on_lazy" : "checkpoint.resume_from=start/model.safetensors"};
        vlai_config *config;
        vlai_wallx_task *task;
        vla_trainer *trainer;
        assert_ok(vlai_config_load("tiny.yml", overrides, 3, &config, &err), err);
        assert_ok(vlai_wallx_task_open(config, &task, &err), err);
        const vlai_wallx_setup *s = vlai_wallx_task_setup(task);
        vla_trainer_options o = s->options;
        o.device = device ? "lazy" : "cpu";
        o.whole_step = o.ahead = device > 0;
        o.stop_at = device == 1 ? 7 : 0;
        assert_ok(vla_trainer_create(&s->model, &s->samples, &s->validation, &o, &trainer, &err), err);
        assert_ok(vla_trainer_run(trainer, &err), err);
        vla_trainer_destroy(trainer);
        vlai_wallx_task_close(task);
        vlai_config_destroy(config);
    }
    assert_true(tiny_equal("on_cpu/latest/model.safetensors", "on_lazy/latest/model.safetensors"));
    assert_true(tiny_equal("on_cpu/latest/optimizer-0-of-1.safetensors", "on_lazy/latest/optimizer-0-of-1.safetensors"));
    assert_int_equal(lazy_violations, 0);
}

/* The forecast of preflight: parameters and plans on the device, the least recompute that fits a limit, and what a trainer then
 * really plans. */
static void forecast_of_a_device(void **state)
{
    (void)state;
    enum { BATCH = 16 };
    vla_error err = VLA_ERROR_INIT;
    const char *overrides[] = {"checkpoint.save_path=forecast", "hyperparams.batch_size_per_gpu=16", "training.numerics=bf16"};
    vlai_config *config;
    vlai_wallx_task *task;
    vla_executor *ex;
    assert_int_equal(chdir(root), 0);
    assert_ok(vla_executor_create_on("lazy", 1, &ex, &err), err);
    assert_ok(vlai_config_load("tiny.yml", overrides, 3, &config, &err), err);
    assert_ok(vlai_wallx_task_open(config, &task, &err), err);
    const vlai_wallx_setup *s = vlai_wallx_task_setup(task);
    void *slots[BATCH], *worker;
    assert_ok(s->samples.worker_create(s->samples.user, &worker, &err), err);
    for (int i = 0; i < BATCH; i++) {
        vla_sample_key key = {.place = i, .position = (uint64_t)i, .stream = VLA_SAMPLES_TRAIN};
        assert_ok(s->samples.slot_create(s->samples.user, &slots[i], &err), err);
        assert_ok(s->samples.read(s->samples.user, worker, &key, slots[i], &err), err);
    }
    vlai_run_settings settings = {.batch = BATCH, .accumulation = 1, .validation_batch = -1, .numerics = VLA_BF16_MASTER,
                                  .layout = VLA_MEMORY_LIFETIMES, .whole_step = true, .automatic = true, .executor = ex, .threads = 1};
    vlai_run_memory m = {0}, less = {0};
    assert_ok(vlai_run_memory_plan(&s->model, &s->options.adamw, slots, &settings, 0, &m, &err), err);
    const vlai_run_device *d = &m.device;
    assert_int_equal(m.recompute, VLA_RECOMPUTE_NONE);
    assert_true(d->weights > 0 && d->gradients == 0 && d->optimizer > 3 * d->weights && d->activations > 0 && d->inputs > 0);
    assert_int_equal(d->total, d->weights + d->gradients + d->optimizer + d->activations + d->inputs + d->workspace + d->driver);
    assert_int_equal(d->collectives, 0);
    assert_true(m.weights == 0 && m.optimizer == 0 && m.activations == 0 && m.inputs == 2 * d->inputs);
    settings.limit = d->total - d->driver - 1; /* one byte too few for the plan that keeps everything */
    assert_ok(vlai_run_memory_plan(&s->model, &s->options.adamw, slots, &settings, 0, &less, &err), err);
    assert_int_equal(less.recompute, VLA_RECOMPUTE_CHEAP);
    assert_int_equal(less.device.available, settings.limit + less.device.driver);
    assert_true(less.device.total <= less.device.available && less.device.total < d->total);
    settings.limit++;
    assert_ok(vlai_run_memory_plan(&s->model, &s->options.adamw, slots, &settings, 0, &less, &err), err);
    assert_int_equal(less.recompute, VLA_RECOMPUTE_NONE);
    settings.shard = (vla_shard_options){sizeof settings.shard, 0, 2, 1000000, 1};
    assert_ok(vlai_run_memory_plan(&s->model, &s->options.adamw, slots, &settings, 0, &less, &err), err);
    assert_int_equal(less.device.collectives, VLAI_DEVICE_COLLECTIVES);
    assert_int_equal(less.device.available, settings.limit + less.device.driver + less.device.collectives); /* the limit is the program's own */
    assert_true(less.device.total > less.device.driver + less.device.collectives && less.device.total <= less.device.available);

    vla_trainer *trainer;
    vla_trainer_memory really;
    vla_trainer_options o = s->options;
    o.device = "lazy";
    o.threads = 1;
    o.whole_step = o.ahead = 1;
    o.layout = VLA_MEMORY_LIFETIMES;
    assert_ok(vla_trainer_create(&s->model, &s->samples, NULL, &o, &trainer, &err), err);
    assert_ok(vla_trainer_prepare(trainer, &really, &err), err);
    assert_int_equal(really.plan.weights, d->weights);
    assert_int_equal(really.plan.optimizer, d->optimizer);
    assert_true(really.plan.activations > d->activations / 100 * 95 && really.plan.activations < d->activations / 100 * 105);
    vla_trainer_destroy(trainer);
    for (int i = 0; i < BATCH; i++)
        s->samples.slot_destroy(s->samples.user, slots[i]);
    s->samples.worker_destroy(s->samples.user, worker);
    vlai_wallx_task_close(task);
    vlai_config_destroy(config);
    vla_executor_destroy(ex);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bits_of_the_cpu), cmocka_unit_test(micro_batches),      cmocka_unit_test(plans_come_and_go),
        cmocka_unit_test(stops_and_failures),  cmocka_unit_test(wallx_on_a_device),
        cmocka_unit_test(forecast_of_a_device),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
