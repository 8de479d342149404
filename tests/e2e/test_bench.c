/* `vla bench` on the CPU: rows by batch and numerics, switch by switch, its JSON, the loader's rate, and what it refuses. */
#include "bench_rows.h"
#include "tiny.h"

#include <jansson.h>
#include <math.h>

#define SMALL "bench --config tiny.yml --device cpu --text-tokens 12 --side 56 "

/* Rows that a full disk does not take are no success. */
static void lost_rows(void **state)
{
    (void)state;
    assert_int_equal(tiny_run(NULL, SMALL "--batch 1 --numerics fp32 --steps 2 --out /dev/full"), 3);
    tiny_said("/dev/full: not all rows could be written");
}

static void rows_by_batch_and_numerics(void **state)
{
    (void)state;
    tiny_must(SMALL "--batches 1,3 --numerics fp32,bf16,bf16-sr --steps 6 --out out.jsonl");
    tiny_said("bf16-sr         3");
    json_t *steps = rows_of(true, "out.jsonl", "step"), *machine = rows_of(true, "out.jsonl", "machine");
    assert_int_equal(json_array_size(machine), 1);
    assert_int_equal(json_array_size(steps), 6);
    static const char *const modes[] = {"fp32", "fp32", "bf16", "bf16", "bf16-sr", "bf16-sr"};
    for (size_t i = 0; i < 6; i++) {
        const json_t *row = json_array_get(steps, i), *loss = json_object_get(row, "loss");
        assert_string_equal(json_string_value(json_object_get(row, "numerics")), modes[i]);
        assert_int_equal((int)number(row, "batch"), i % 2 ? 3 : 1);
        assert_int_equal((int)number(row, "steps_measured"), 3);
        double ms = number(row, "step_ms"), least = number(row, "step_ms_least"), most = number(row, "step_ms_most");
        assert_true(0 < least && least <= ms && ms <= most);
        assert_true(fabs(number(row, "samples_per_s") - 1e3 * number(row, "batch") / ms) < 1e-6 * number(row, "samples_per_s"));
        assert_int_equal(json_object_size(loss), 2); /* iterations 1 and 5 of 6 */
        assert_true(number(loss, "1") > 0 && number(loss, "5") > 0);
        assert_true(number(row, "grad_norm") > 0);
        assert_false(json_is_true(json_object_get(row, "oom")));
    }
    /* bf16 computes the same thing to about 3 digits. */
    double full = number(json_object_get(json_array_get(steps, 1), "loss"), "1"), half = number(json_object_get(json_array_get(steps, 3), "loss"), "1");
    assert_true(fabs(full - half) < 0.05 * full);
    json_decref(steps);
    json_decref(machine);
    tiny_must(SMALL "--batch 2 --numerics fp32 --steps 2 --out out.jsonl"); /* is added */
    steps = rows_of(true, "out.jsonl", "step");
    assert_int_equal(json_array_size(steps), 7);
    json_decref(steps);
}

/* On the CPU every switch leaves the bits alone. */
static void switch_by_switch(void **state)
{
    (void)state;
    tiny_must(SMALL "--batch 2 --numerics fp32 --steps 6 --switches --json --out switches.jsonl");
    json_t *printed = rows_of(true, "log", "step"), *rows = rows_of(true, "switches.jsonl", "step");
    assert_true(json_equal(printed, rows));
    assert_int_equal(json_array_size(rows), 7);
    assert_string_equal(json_string_value(json_object_get(json_array_get(rows, 0), "variant")), "none");
    for (size_t i = 0; i < 7; i++)
        assert_true(json_equal(json_object_get(json_array_get(rows, i), "loss"), json_object_get(json_array_get(rows, 0), "loss")));
    assert_true(number(json_array_get(rows, 2), "arena_bytes") < number(json_array_get(rows, 1), "arena_bytes")); /* WALLX_PERF_ALLOC */
    json_decref(printed);
    json_decref(rows);
    tiny_must(SMALL "--batch 2 --numerics fp32 --steps 2 --plain --profile --json");
    rows = rows_of(true, "log", "step");
    const json_t *profile = json_object_get(json_array_get(rows, 0), "profile");
    assert_true(number(json_object_get(json_object_get(profile, "ops"), "matmul"), "ms") > 0);
    assert_true(number(profile, "step_ms") > 0);
    json_decref(rows);
}

static void rate_of_the_loader(void **state)
{
    (void)state;
    tiny_must("bench --config tiny.yml --loader --seconds 0.2 --json");
    json_t *rows = rows_of(true, "log", "loader");
    assert_int_equal(json_array_size(rows), 1);
    assert_int_equal((int)number(json_array_get(rows, 0), "workers"), 2);
    assert_true(number(json_array_get(rows, 0), "samples_per_s") > 0);
    assert_true(number(json_array_get(rows, 0), "seconds") >= 0.2);
    json_decref(rows);
}

static void refuses(void **state)
{
    (void)state;
    static const struct {
        const char *arguments, *said;
    } cases[] = {
        {"bench", "no configuration"},
        {SMALL "--batches 4,x", "--batches '4,x'"},
        {SMALL "--batches 0", "--batches '0'"},
        {SMALL "--batches 4,9223372036854775807", "wanted numbers of 1 to 1000000"},
        {SMALL "--numerics fp64", "--numerics 'fp64'"},
        {SMALL "--numerics fp8", "--numerics 'fp8'"},
        {SMALL "--recompute all", "--recompute 'all'"},
        {SMALL "--side 20 --batch 1", "pictures of 20 pixels"},
        {SMALL "--memory-limit -1", "--memory-limit"},
        {SMALL "--products 5", "--products: algorithms of matrix products are those of a GPU"},
        {SMALL "--products -1", "--products -1: wanted seconds"},
        {SMALL "--products 5 --plain", "--products and --plain exclude each other"},
        {SMALL "--device tpu", "tpu"},
        {SMALL "--model.config_path=null", "tiny.yml: no architecture file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(tiny_run(NULL, cases[i].arguments), 2);
        tiny_said(cases[i].said);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lost_rows),
        cmocka_unit_test(rows_by_batch_and_numerics), cmocka_unit_test(switch_by_switch),
                                       cmocka_unit_test(rate_of_the_loader), cmocka_unit_test(refuses)};
    return cmocka_run_group_tests_name("bench", tests, tiny_make, drop_root);
}
