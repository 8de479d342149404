#include "test.h"

#include "train/progress.h"
#include "train/switches.h"

#include <math.h>

/* The example of the reference's own log. */
static void step_line_is_the_references(void **state)
{
    (void)state;
    char line[512];
    vla_record r = {.epochs = 100, .iteration = 3, .iterations = 16238, .smooth_loss = 0.301234, .parts = 1,
                    .part_name = {"flow_loss"}, .part = {0.5}, .smooth_part = {0.301234}, .next_rate = 3.125e-6, .step_seconds = 0.859};
    vlai_step_line(&r, line, sizeof line);
    assert_string_equal(line, " epoch   0/100 | iter      3/ 16238 | loss 0.301234 | flow_loss 0.301234 | lr 0.000003 | "
                              "time_current_backward_step 0.859000s |");
    r.epochs = 5; /* both numbers take three places, those of iterations six */
    vlai_step_line(&r, line, sizeof line);
    assert_memory_equal(line, " epoch   0/  5 | iter      3/ 16238 | ", 38);
    char cut[20];
    vlai_step_line(&r, cut, sizeof cut);
    assert_memory_equal(cut, line, 19);
    assert_int_equal(cut[19], 0);
}

static void status_line(void **state)
{
    (void)state;
    char line[512];
    vla_record r = {.step = 41, .steps = 600, .smooth_loss = 0.1234567, .rate = 5e-5, .grad_norm = 1.5, .samples_per_second = 242.1,
                    .stall_seconds = 0.012, .resident = 750000000, .skips = 2, .eta_seconds = 3725};
    vlai_status_line(&r, line, sizeof line);
    assert_string_equal(line, "step 41/600  loss 0.12346  lr 5e-05  grad 1.5  242.1 samples/s  stall 12 ms  750 MB  2 skipped  "
                              "1 h 02 min left");
    r.kind = VLA_RECORD_VALIDATION;
    r.loss = 0.5;
    r.parts = 1;
    r.part_name[0] = "flow_loss";
    r.part[0] = 0.25;
    vlai_validation_line(&r, line, sizeof line);
    assert_string_equal(line, "[Validation] step 41 | val_loss 0.5000 | val_flow_loss 0.250000");
}

static void switches_speak_only_when_asked(void **state)
{
    (void)state;
    vlai_text text = {0};
    setenv("WALLX_PERF_ALLOC", "1", 1);
    setenv("WALLX_PERF_ATTN", "0", 1);
    setenv("WALLX_PERF_COMPILE_RECOMP_LIMIT", "8", 1);
    unsetenv("WALLX_PERF_LOG");
    vlai_switches_describe(NULL, "cpu", 1, &text);
    assert_int_equal(text.size, 0);
    setenv("WALLX_PERF_LOG", "1", 1);
    vlai_switches_describe(NULL, "cpu", 1, &text);
    assert_non_null(strstr(text.data, "[WALLX_PERF] WALLX_PERF_ALLOC=1: "));
    assert_non_null(strstr(text.data, "[WALLX_PERF] WALLX_PERF_COMPILE_RECOMP_LIMIT=8: "));
    assert_null(strstr(text.data, "ATTN"));
    assert_int_equal(vlai_switch_number("WALLX_PERF_COMPILE_RECOMP_LIMIT", 64), 8);
    assert_int_equal(vlai_switch_number("WALLX_PERF_BUCKET_NOT_SET", 64), 64);
    setenv("WALLX_PERF_COMPILE_RECOMP_LIMIT", "many", 1);
    assert_int_equal(vlai_switch_number("WALLX_PERF_COMPILE_RECOMP_LIMIT", 64), 64);
    vlai_text_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(step_line_is_the_references), cmocka_unit_test(status_line),
                                       cmocka_unit_test(switches_speak_only_when_asked)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
