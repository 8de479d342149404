/* `vla bench --nproc` on CPU ranks: rows of 1 and 2 ranks with numbers that belong together, the model beside them, ranks that
 * another launcher starts, and ranks that fail. */
#include "bench_rows.h"
#include "tiny.h"

#include "dist/supervise.h"
#include "train/report_bench.h"

#include <jansson.h>
#include <math.h>

#define SMALL "bench --config tiny.yml --device cpu --text-tokens 12 --side 56 --numerics fp32 --batch 2 --steps 6 "

static void assert_near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-9 * fabs(want)))
        fail_msg("%.12g, wanted %.12g", got, want);
}

/* What every measured row holds. */
static void check_row(const json_t *row, int ranks)
{
    double ms = number(row, "step_ms"), batch = number(row, "batch");
    assert_int_equal((int)number(row, "ranks"), ranks);
    assert_int_equal((int)number(row, "global_batch"), ranks * (int)batch);
    assert_true(0 < number(row, "step_ms_least") && number(row, "step_ms_least") <= ms && ms <= number(row, "step_ms_most"));
    assert_near(number(row, "samples_per_s"), 1e3 * batch * ranks / ms);
    assert_int_equal(json_array_size(json_object_get(row, "losses")), 6);
    assert_true(number(row, "grad_norm") > 0);
}

/* Every rank has the same micro-batch, so that the mean over ranks is that of one, to a rounding of the sums. */
static void check_losses(const json_t *a, const json_t *b)
{
    for (size_t i = 0; i < 6; i++) {
        double x = json_number_value(json_array_get(json_object_get(a, "losses"), i)), y = json_number_value(json_array_get(json_object_get(b, "losses"), i));
        assert_true(x > 0 && fabs(x - y) <= 1e-6 * x);
    }
}

static void check_exchange(const json_t *row, const json_t *one)
{
    int ranks = (int)number(row, "ranks");
    double together = number(row, "together_ms"), exposed = number(row, "exposed_ms");
    assert_true(together > 0 && number(row, "alone_ms") > 0);
    assert_near(exposed, together - number(row, "alone_ms"));
    assert_near(number(row, "exposed_share"), exposed / together);
    assert_true(number(row, "skew_ms") >= 0);
    assert_true(number(row, "reduce_bytes") > 0 && number(row, "gather_bytes") > 0 && number(row, "collectives") >= 2);
    assert_near(number(row, "reduce_gb_per_s"), number(row, "reduce_bytes") * (ranks - 1) / ranks / number(row, "reduce_ms") * 1e-6);
    assert_near(number(row, "gather_gb_per_s"), number(row, "gather_bytes") * (ranks - 1) / ranks / number(row, "gather_ms") * 1e-6);
    assert_near(number(row, "efficiency"), number(row, "samples_per_s") / ranks / number(one, "samples_per_s"));
    const json_t *model = json_object_get(row, "model");
    assert_near(number(model, "difference"), number(model, "step_ms") / number(row, "step_ms") - 1);
    assert_true(number(model, "step_ms") > number(model, "exposed_ms") && number(model, "exposed_ms") > 0);
    assert_near(number(model, "efficiency"), number(one, "step_ms") / number(model, "step_ms"));
}

static void rows_of_ranks(void **state)
{
    (void)state;
    tiny_must(SMALL "--nproc 1,2 --out ranks.jsonl");
    tiny_said("model: step");
    json_t *rows = rows_of(false, "ranks.jsonl", "ranks"), *forecast = rows_of(false, "ranks.jsonl", "ranks_model"), *machine = rows_of(false, "ranks.jsonl", "machine");
    assert_int_equal(json_array_size(machine), 1);
    assert_int_equal(json_array_size(rows), 2);
    assert_int_equal(json_array_size(forecast), 7); /* 8; 16 and 64 over three links */
    const json_t *one = json_array_get(rows, 0), *two = json_array_get(rows, 1), *scaling = json_object_get(one, "scaling");
    check_row(one, 1);
    check_row(two, 2);
    check_losses(one, two);
    check_exchange(two, one);
    assert_near(number(one, "efficiency"), 1);
    assert_near(number(scaling, "forward_ms") + number(scaling, "backward_ms") + number(scaling, "update_ms"), number(one, "step_ms"));
    /* Buckets of the model: what two ranks exchange, ready and needed within the passes; the one whose weights are needed first
     * is ready last. How far apart these are is a matter of time, which other programs take at will; their order is not. */
    json_t *buckets = json_object_get(scaling, "buckets");
    double bytes = 0, latest = 0, earliest = INFINITY;
    size_t last = 0, first = 0;
    assert_true(json_array_size(buckets) > 1);
    for (size_t i = 0; i < json_array_size(buckets); i++) {
        const json_t *b = json_array_get(buckets, i);
        double needed = json_number_value(json_array_get(b, 2)), ready = json_number_value(json_array_get(b, 3));
        bytes += json_number_value(json_array_get(b, 0));
        first = needed < earliest ? i : first;
        last = ready > latest ? i : last;
        earliest = fmin(earliest, needed);
        latest = fmax(latest, ready);
        assert_true(needed >= 0 && needed <= number(scaling, "forward_ms") && ready > 0 && ready <= number(scaling, "backward_ms") * (1 + 1e-12));
    }
    assert_near(bytes, number(two, "reduce_bytes"));
    assert_int_equal(first, last);
    for (size_t i = 0; i < 7; i++) {
        const json_t *f = json_array_get(forecast, i);
        assert_int_equal((int)number(f, "machines"), (int)number(f, "ranks") / 8);
        assert_string_equal(json_string_value(json_object_get(f, "source")), "measured");
        assert_near(number(f, "efficiency"), number(one, "step_ms") / number(f, "step_ms"));
    }
    json_decref(machine);
    json_decref(forecast);
    json_decref(rows);
}

/* Steps in parts, everything whole on every rank, ranks of another launcher beside the row in the file; and what is shown of it. */
static void other_forms(void **state)
{
    (void)state;
    json_t *rows;
    tiny_must(SMALL "--nproc 1,2 --plain --json");
    rows = rows_of(false, "log", "ranks");
    assert_int_equal(json_array_size(rows), 2);
    check_row(json_array_get(rows, 1), 2);
    check_losses(json_array_get(rows, 0), json_array_get(rows, 1));
    check_exchange(json_array_get(rows, 1), json_array_get(rows, 0));
    json_decref(rows);
    tiny_must(SMALL "--nproc 2 --dist.zero=0 --json --against ranks.jsonl");
    rows = rows_of(false, "log", "ranks");
    check_row(json_array_get(rows, 0), 2);
    assert_true(number(json_array_get(rows, 0), "all_reduce_gb_per_s") > 0 && number(json_array_get(rows, 0), "efficiency") > 0);
    json_decref(rows);
    tiny_must("launch --nproc 2 " SMALL "--against ranks.jsonl --out ranks.jsonl");
    tiny_said("model: step");
    rows = rows_of(false, "ranks.jsonl", "ranks");
    assert_int_equal(json_array_size(rows), 3);
    check_row(json_array_get(rows, 2), 2);
    check_exchange(json_array_get(rows, 2), json_array_get(rows, 0));
    json_decref(rows);
}

/* Two commands of the launcher, as on two machines. */
static void two_machines(void **state)
{
    (void)state;
    pid_t nodes[2];
    int port = vlai_free_port();
    for (int n = 0; n < 2; n++) {
        char arguments[512], log[16];
        snprintf(arguments, sizeof arguments, "launch --nproc 1 --nnodes 2 --node-rank %d --master-addr 127.0.0.1 --master-port %d " SMALL "--json --against ranks.jsonl", n, port);
        snprintf(log, sizeof log, "node-%d", n);
        nodes[n] = tiny_start(NULL, arguments, log);
    }
    assert_int_equal(tiny_wait(nodes[0]), 0);
    assert_int_equal(tiny_wait(nodes[1]), 0);
    json_t *rows = rows_of(false, "node-0", "ranks"), *others = rows_of(false, "node-1", "ranks"), *measured = rows_of(false, "ranks.jsonl", "ranks");
    assert_int_equal(json_array_size(rows), 1);
    assert_int_equal(json_array_size(others), 0); /* rank 0 tells */
    check_row(json_array_get(rows, 0), 2);
    assert_int_equal((int)number(json_array_get(rows, 0), "machines"), 2);
    check_exchange(json_array_get(rows, 0), json_array_get(measured, 0));
    json_decref(rows);
    json_decref(others);
    json_decref(measured);
}

/* Two ranks have the micro-batches of one that accumulates two, with numbers of their own. */
static void micro_batches(void **state)
{
    (void)state;
    json_t *one, *two;
    tiny_must(SMALL "--nproc 1 --accumulate 2 --json");
    one = rows_of(false, "log", "ranks");
    tiny_must(SMALL "--nproc 2 --accumulate 1 --json");
    two = rows_of(false, "log", "ranks");
    assert_int_equal((int)number(json_array_get(one, 0), "global_batch"), 4);
    assert_int_equal((int)number(json_array_get(two, 0), "global_batch"), 4);
    check_losses(json_array_get(one, 0), json_array_get(two, 0));
    json_decref(one);
    one = rows_of(false, "ranks.jsonl", "ranks"); /* whose micro-batches are the same */
    assert_true(fabs(number(json_object_get(json_array_get(one, 1), "loss"), "1") / number(json_object_get(json_array_get(two, 0), "loss"), "1") - 1) > 1e-3);
    json_decref(one);
    json_decref(two);
    assert_int_equal(tiny_run(NULL, SMALL "--accumulate 2"), 2);
    tiny_said("--accumulate goes with --nproc");
}

static void ranks_that_fail(void **state)
{
    (void)state;
    json_t *rows;
    assert_int_equal(tiny_run(NULL, "bench --config tiny.yml --device cpu --side 20 --batch 1 --numerics fp32 --nproc 2 --json"), 2);
    rows = rows_of(false, "log", "ranks");
    assert_int_equal(json_array_size(rows), 1);
    assert_non_null(strstr(json_string_value(json_object_get(json_array_get(rows, 0), "error")), "pictures of 20 pixels"));
    json_decref(rows);
    static const char *const refused[] = {"--nproc 2,x", "--nproc 0", "--nproc 2 --switches", "--nproc 2 --loader"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char arguments[512];
        snprintf(arguments, sizeof arguments, "%s%s", SMALL, refused[i]);
        assert_int_equal(tiny_run(NULL, arguments), 2);
        tiny_said(strstr(refused[i], "--s") || strstr(refused[i], "--l") ? "several ranks measure" : "wanted numbers");
    }
}

/* The newest child of a process; 0: none. */
static pid_t child_of(pid_t parent)
{
    char path[64], text[64] = "";
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)parent, (int)parent);
    FILE *file = fopen(path, "r");
    pid_t last = 0;
    while (file && fscanf(file, "%63s", text) == 1)
        last = (pid_t)atoi(text);
    if (file)
        fclose(file);
    return last;
}

/* When a bench and its ranks run. */
static pid_t wait_for_ranks(pid_t bench)
{
    pid_t child = 0;
    for (int i = 0; i < 2000 && !child; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        child = child_of(bench);
    }
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    return child_of(bench); /* the last of the two to be started */
}

/* What ends the whole bench is the reason of its row, and there is no further row. */
static void a_bench_is_ended(void **state)
{
    (void)state;
    static const int signals[] = {SIGTERM, SIGINT};
    for (int i = 0; i < 2; i++) {
        pid_t bench = tiny_start(NULL, SMALL "--steps 100000 --nproc 2,1 --json", "log");
        assert_true(wait_for_ranks(bench) > 0);
        kill(bench, signals[i]);
        assert_int_equal(tiny_wait(bench), 128 + SIGTERM); /* which is what the ranks get */
        json_t *rows = rows_of(false, "log", "ranks");
        assert_int_equal(json_array_size(rows), 1);
        assert_string_equal(json_string_value(json_object_get(json_array_get(rows, 0), "error")), i ? "ended by SIGINT" : "ended by SIGTERM");
        json_decref(rows);
        char *log = tiny_read("log", NULL);
        assert_null(strstr(log, "save"));
        vlai_free(log);
    }
}

/* A rank that is killed is a row, and the next number of ranks is measured all the same. */
static void a_rank_is_killed(void **state)
{
    (void)state;
    pid_t bench = tiny_start(NULL, SMALL "--steps 1000 --nproc 2,1 --json", "log"), victim = wait_for_ranks(bench);
    assert_true(victim > 0);
    kill(victim, SIGKILL);
    assert_int_equal(tiny_wait(bench), 128 + SIGKILL);
    json_t *rows = rows_of(false, "log", "ranks");
    assert_int_equal(json_array_size(rows), 2);
    assert_non_null(strstr(json_string_value(json_object_get(json_array_get(rows, 0), "error")), "SIGKILL"));
    assert_true(number(json_array_get(rows, 1), "step_ms") > 0);
    json_decref(rows);
}

/* The page of a run shows what was measured in its folder. */
static void shown(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_text html = {0};
    assert_ok(vlai_mkdirs(at("shown"), &err), err);
    char from[512], to[512], copy[1100];
    snprintf(from, sizeof from, "%s", at("ranks.jsonl"));
    snprintf(to, sizeof to, "%s", at("shown/bench.jsonl"));
    snprintf(copy, sizeof copy, "cp %s %s", from, to);
    assert_int_equal(system(copy), 0);
    assert_ok(vlai_report_bench(at("shown"), &html, &err), err);
    assert_non_null(strstr(html.data, "<th>GPUs</th>"));
    assert_non_null(strstr(html.data, "Model of scaling"));
    assert_non_null(strstr(html.data, "100 Gb/s"));
    vlai_text_fini(&html);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_of_ranks), cmocka_unit_test(other_forms), cmocka_unit_test(two_machines), cmocka_unit_test(micro_batches), cmocka_unit_test(ranks_that_fail),
                                       cmocka_unit_test(a_rank_is_killed), cmocka_unit_test(a_bench_is_ended), cmocka_unit_test(shown)};
    return cmocka_run_group_tests_name("bench_ranks", tests, tiny_make, drop_root);
}
