/* A tiny Wall-X on several CPU ranks, as a user runs it: `vla launch` on the micro-batches that one rank accumulates, and a run that
 * other numbers of ranks go on with. */
#include "dist/compare.h"
#include "tiny.h"

#include "base/json.h"

#include <math.h>

static const char common[] = "--training.numerics=fp32 --hyperparams.batch_size_per_gpu=2 --training.threads=1 --data.num_workers=1 --device cpu "
                             "--logging.val_interval=5 --logging.save_interval=5 --hyperparams.scheduler.num_training_steps=10";

static void run(int ranks, const char *name, const char *environment, const char *more)
{
    char variables[256], arguments[1024], from[64] = "train";
    snprintf(variables, sizeof variables, "SAVE_PATH=%s OPENBLAS_NUM_THREADS=1%s%s", name, environment ? " " : "", environment ? environment : "");
    if (ranks > 1)
        snprintf(from, sizeof from, "launch --nproc %d train", ranks);
    snprintf(arguments, sizeof arguments, "%s --config tiny.yml %s %s", from, common, more);
    int code = tiny_run(variables, arguments);
    if (code != 0) {
        char *text = tiny_read("log", NULL);
        fail_msg("vla %.200s: code %d\n%s", arguments, code, tiny_end(text));
    }
}

static int64_t losses(const char *name, const char *file, double *out, int64_t most)
{
    char path[128], *save;
    int64_t n = 0;
    vla_error err = VLA_ERROR_INIT;
    snprintf(path, sizeof path, "%s/%s", name, file);
    char *text = tiny_read(path, NULL);
    for (char *line = strtok_r(text, "\n", &save); line && n < most; line = strtok_r(NULL, "\n", &save)) {
        json_t *record;
        assert_ok(vlai_json_parse(line, strlen(line), path, &record, &err), err);
        out[n++] = json_number_value(json_object_get(record, "loss"));
        json_decref(record);
    }
    vlai_free(text);
    return n;
}

/* The largest relative difference of losses, from step `first` of `a` on. */
static double worst_loss(const char *a, const char *b, int64_t first)
{
    double x[64], y[64], worst = 0;
    static const char *const files[] = {"metrics.jsonl", "validation.jsonl"};
    for (int f = 0; f < (first ? 1 : 2); f++) {
        int64_t n = losses(a, files[f], x, 64), m = losses(b, files[f], y, 64);
        assert_true(n > 0);
        assert_int_equal(n, m);
        for (int64_t i = first; i < n; i++)
            worst = fabs(x[i] - y[i]) / fabs(x[i]) > worst ? fabs(x[i] - y[i]) / fabs(x[i]) : worst;
    }
    return worst;
}

/* The largest distance of a tensor in the weights of two runs after 5 steps, in L2 and relative to its size. */
static double worst_weight(const char *a, const char *b)
{
    char x[128], y[128];
    snprintf(x, sizeof x, "%s/0_5/model.safetensors", a);
    snprintf(y, sizeof y, "%s/0_5/model.safetensors", b);
    return weights_apart(at(x), at(y)).size;
}

static void ranks_are_one(void **state)
{
    (void)state;
    static const struct {
        const char *name, *environment, *more;
        int ranks;
    } ways[] = {{"two", NULL, "--hyperparams.gradient_accumulation_steps=2", 2},
                {"four", NULL, "", 4},
                {"four-reduce", NULL, "--zero 0", 4},
                {"four-fast", "WALLX_PERF_DDP=1 WALLX_PERF_BUCKET=1 WALLX_PERF_COMPILE=1 WALLX_PERF_ALLOC=1 WALLX_PERF_NO_TIMER_BARRIER=1", "", 4}};
    run(1, "one", NULL, "--hyperparams.gradient_accumulation_steps=4");
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        run(ways[i].ranks, ways[i].name, ways[i].environment, ways[i].more);
        double loss = worst_loss("one", ways[i].name, 0), weight = worst_weight("one", ways[i].name);
        print_message("%s: losses differ by %.3g, weights by %.3g\n", ways[i].name, loss, weight);
        assert_true(loss <= 1e-6); /* two ranks add in another order: (1 + 3) + (2 + 4) */
        assert_true(weight <= (ways[i].ranks == 4 ? 1e-6 : 1e-5));
    }
}

/* Losses of action tokens: ranks with unlike numbers of them. */
static void action_tokens(void **state)
{
    (void)state;
    static const char fast[] = "--data.use_fast_tokenizer=true --data.action_tokenizer_path=" VLA_TEST_ROOT "/tests/fast --checkpoint.resume_from=null "
                               "--model.pretrained_path=start";
    static const char *const means[] = {"", "--hyperparams.loss_normalization=global"};
    static const char *const environments[] = {NULL, "WALLX_PERF_DDP=1 WALLX_PERF_BUCKET=1 WALLX_PERF_COMPILE=1 WALLX_PERF_ALLOC=1"};
    for (int i = 0; i < 2; i++) {
        char one[512], two[512], name[2][32];
        snprintf(one, sizeof one, "%s %s --hyperparams.gradient_accumulation_steps=2", fast, means[i]);
        snprintf(two, sizeof two, "%s %s", fast, means[i]);
        snprintf(name[0], sizeof name[0], "tokens-one-%d", i);
        snprintf(name[1], sizeof name[1], "tokens-two-%d", i);
        run(1, name[0], NULL, one);
        run(2, name[1], environments[i], two);
        double loss = worst_loss(name[0], name[1], 0), weight = worst_weight(name[0], name[1]);
        print_message("action tokens on 2 ranks: losses differ by %.3g, weights by %.3g\n", loss, weight);
        assert_true(loss <= 1e-6 && weight <= 1e-5);
    }
}

static void others_go_on(void **state)
{
    (void)state;
    run(4, "saved", NULL, "--stop-at 4");
    tiny_must("inspect checkpoint saved/latest");
    tiny_said("written by 4 ranks");
    tiny_said("optimizer-3-of-4.safetensors");
    tiny_must("predict saved --episodes 8");
    tiny_must("convert saved/latest unfused --to unfused");
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        char name[32], copy[256];
        snprintf(name, sizeof name, "on-%d", ranks);
        snprintf(copy, sizeof copy, "cp -r %s %s", at("saved"), at(name));
        assert_int_equal(system(copy), 0);
        run(ranks, name, NULL, "--resume --stop-at 7"); /* with the accumulation of four ranks: it follows */
        run(ranks, name, NULL, "--resume");             /* and goes on following */
        double loss = worst_loss("four", name, 4);
        print_message("saved on 4, on %d: losses differ by %.3g\n", ranks, loss);
        assert_true(ranks == 4 ? loss == 0 : loss <= 1e-5);
    }
}

int main(void)
{
    tell_sanitizer();
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranks_are_one), cmocka_unit_test(others_go_on), cmocka_unit_test(action_tokens)};
    return cmocka_run_group_tests(tests, tiny_make, drop_root);
}
