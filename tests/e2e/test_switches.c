/* What is chosen for a run, seen from outside: switches and their lines, recompute by itself, the times of a start; and that
 * steps of the whole pipeline allocate nothing. */
#include "tiny.h"

#include "train/wallx_task.h"

#include <unistd.h>

static int count_lines(const char *part)
{
    char *text = tiny_read("log", NULL);
    int n = 0;
    for (const char *p = text; (p = strstr(p, part)); p += strlen(part))
        n++;
    vlai_free(text);
    return n;
}

static bool same_weights(const char *a, const char *b)
{
    char x[256], y[256];
    snprintf(x, sizeof x, "%s/latest/model.safetensors", a);
    snprintf(y, sizeof y, "%s/latest/model.safetensors", b);
    return tiny_equal(x, y);
}

static void one_line_per_switch(void **state)
{
    (void)state;
    static const char eight[] = "WALLX_PERF_ATTN=1 WALLX_PERF_ALLOC=1 WALLX_PERF_DDP=1 WALLX_PERF_BUCKET=100 WALLX_PERF_COMPILE=1 "
                                "WALLX_PERF_COMPILE_VISUAL=1 WALLX_PERF_COMPILE_RECOMP_LIMIT=64 WALLX_PERF_NO_TIMER_BARRIER=1 WALLX_PERF_LOG=1";
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --checkpoint.save_path=plain --stop-at 8"), 0);
    assert_int_equal(count_lines("[WALLX_PERF]"), 0);
    assert_int_equal(count_lines("start: "), 0);
    assert_int_equal(tiny_run(eight, "train --config tiny.yml --checkpoint.save_path=eight --stop-at 8"), 0);
    assert_int_equal(count_lines("[WALLX_PERF] "), 8);
    assert_int_equal(count_lines(" GB of the host at the peak; arena of 0."), 1);
    for (const char *p = eight; *p; p += strcspn(p, " "), p += *p == ' ') {
        char line[128];
        snprintf(line, sizeof line, "[WALLX_PERF] %.*s: ", (int)strcspn(p, " "), p);
        if (!strstr(line, "WALLX_PERF_LOG"))
            assert_int_equal(count_lines(line), 1);
    }
    static const char *const parts[] = {"device", "memory of parameters", "weights", "first batch", "plan", "first step"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char line[64];
        snprintf(line, sizeof line, " s %s\n", parts[i]);
        assert_int_equal(count_lines(line), 1);
    }
    /* on a CPU no switch changes a bit */
    assert_true(same_weights("plain", "eight"));
    /* the same from the configuration; a variable that is set wins, also with 0 */
    assert_int_equal(tiny_run("WALLX_PERF_ATTN=0 WALLX_PERF_LOG=1",
                              "train --config tiny.yml --checkpoint.save_path=keys --stop-at 8 --perf.alloc=true --perf.attn=true "
                              "--perf.compile=true --perf.no_timer_barrier=true --perf.compile_recomp_limit=8"), 0);
    assert_int_equal(count_lines("[WALLX_PERF] "), 4);
    assert_int_equal(count_lines("[WALLX_PERF] perf.alloc=true: "), 1);
    assert_int_equal(count_lines("[WALLX_PERF] perf.compile_recomp_limit=8: "), 1);
    assert_int_equal(count_lines("attn"), 0);
    assert_true(same_weights("plain", "keys"));
}

/* GB that the run's message names for a level of recompute; negative when it names none. */
static double needs(const char *level)
{
    char *text = tiny_read("log", NULL), part[64];
    snprintf(part, sizeof part, "%s needs ", level);
    const char *p = strstr(text, part);
    double gb = p ? strtod(p + strlen(part), NULL) : -1;
    vlai_free(text);
    return gb;
}

static void train_within(double gb, const char *run)
{
    char arguments[512];
    snprintf(arguments, sizeof arguments, "train --config tiny.yml --hyperparams.batch_size_per_gpu=32 "
             "--memory.recompute=auto --memory.device_gb=%.6f --stop-at 3 --checkpoint.save_path=%s", gb, run);
    assert_int_equal(tiny_run("WALLX_PERF_ALLOC=1", arguments), 0);
}

static void recompute_by_itself(void **state)
{
    (void)state;
    train_within(0, "free");
    assert_int_equal(count_lines("memory.recompute auto: "), 1);
    tiny_said("GB: none\n");
    train_within(1e-6, "least");
    double none = needs("none"), cheap = needs("cheap"), layer = needs("layer");
    tiny_said("0.000 GB are there: layer\n");
    assert_true(none > cheap && cheap >= layer && layer > 0);
    train_within(none + 0.0006, "enough"); /* the message rounds to 0.001 */
    tiny_said("are there: none\n");
    train_within((none + cheap) / 2, "between");
    tiny_said("are there: cheap\n");
    assert_true(needs("layer") < 0); /* it was not even planned */
    /* none of it changes a bit */
    assert_true(same_weights("free", "least"));
    assert_true(same_weights("free", "between"));
}

static void devices(void **state)
{
    (void)state;
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --checkpoint.save_path=none --device tpu"), 2);
    tiny_said("training.device is 'tpu', wanted cpu, cuda, cuda:N or auto");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --checkpoint.save_path=none --device cuda:x"), 2);
    tiny_must("train --config tiny.yml --checkpoint.save_path=cpu --device cpu --stop-at 1");
    tiny_must("predict cpu --device cpu --max-frames 1 --steps 2 --plots 0");
    tiny_must("preflight --config tiny.yml --device cpu");
    tiny_said("ok   device       cpu");
#ifndef VLA_CUDA
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --checkpoint.save_path=none --device cuda"), 2);
    tiny_said("this build has no CUDA part");
    assert_int_equal(tiny_run(NULL, "preflight --config tiny.yml --device cuda"), 2);
    tiny_said("FAIL device");
#endif
}

/* Reading, assembling, filling and stepping, with workers, plans made and buffers at their size. */
static void steps_allocate_nothing(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    assert_int_equal(chdir(root), 0);
    for (int whole = 0; whole < 2; whole++) {
        const char *overrides[] = {"checkpoint.save_path=quiet", "hyperparams.scheduler.num_training_steps=400"};
        vlai_config *config;
        vlai_wallx_task *task;
        vla_trainer *trainer;
        vla_record r;
        assert_ok(vlai_config_load("tiny.yml", overrides, 2, &config, &err), err);
        assert_ok(vlai_wallx_task_open(config, &task, &err), err);
        const vlai_wallx_setup *s = vlai_wallx_task_setup(task);
        vla_trainer_options o = s->options;
        o.whole_step = o.ahead = whole;
        assert_ok(vla_trainer_create(&s->model, &s->samples, NULL, &o, &trainer, &err), err);
        for (int i = 0; i < 60; i++)
            assert_ok(vla_trainer_step(trainer, &r, &err), err);
        vla_memory_stats before = vla_memory_stats_get();
        for (int i = 0; i < 100; i++)
            assert_ok(vla_trainer_step(trainer, &r, &err), err);
        vla_memory_stats after = vla_memory_stats_get();
        print_message("%llu allocations in 100 steps\n", (unsigned long long)(after.allocations - before.allocations));
        assert_int_equal(after.allocations, before.allocations);
        assert_int_equal(after.releases, before.releases);
        vla_trainer_destroy(trainer);
        vlai_wallx_task_close(task);
        vlai_config_destroy(config);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_line_per_switch), cmocka_unit_test(recompute_by_itself), cmocka_unit_test(devices),
        cmocka_unit_test(steps_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, tiny_make, drop_root);
}
