/* vla inspect plan on the full model: memory, FLOPs, time and memory of the planning itself, and what it says to mistakes. */
#include "test.h"

#include <jansson.h>
#include <math.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define PLAN VLA_TEST_PROGRAM " inspect plan --config " VLA_TEST_ROOT "/configs/libero_local_perf.yml --model.config_path=" VLA_TEST_ROOT "/configs/wall-oss-0.5"

/* Runs a command, collects what it prints, and returns its exit code. */
static int capture(const char *command, char *out, size_t size)
{
    FILE *p = popen(command, "r");
    assert_non_null(p);
    size_t n = fread(out, 1, size - 1, p);
    out[n] = 0;
    while (fgetc(p) != EOF)
        ;
    int status = pclose(p);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static json_t *plan_json(const char *arguments)
{
    static char out[1 << 16];
    char command[2048];
    snprintf(command, sizeof command, PLAN " --json %s", arguments);
    int code = capture(command, out, sizeof out);
    if (code)
        fail_msg("%s: exit code %d", command, code);
    json_t *json = json_loads(out, 0, NULL);
    assert_non_null(json);
    return json;
}

static double number(const json_t *json, const char *a, const char *b, const char *c, const char *d)
{
    const char *const path[] = {a, b, c, d};
    for (int i = 0; i < 4 && path[i]; i++)
        json = json_object_get(json, path[i]);
    assert_non_null(json);
    return json_number_value(json);
}

static void near(double got, double want, double share)
{
    if (!(fabs(got - want) <= share * want))
        fail_msg("got %.6g, wanted %.6g within %g", got, want, share);
}

/* The tower's inner width is kept as 3456, not 3420: 32 blocks of three matrices of width 1280 and two biases. */
static const double PADS = 32 * 36 * (3 * 1280 + 2), STORED = 4154377216.0 + PADS;

static void test_full_model(void **state)
{
    (void)state;
    json_t *p = plan_json("--batch 26 --device null --text-tokens 98 --grid 18x18,18x18 --vocab 151936");
    assert_int_equal((int)number(p, "tokens_per_sample", NULL, NULL, NULL), 270);
    assert_true(number(p, "parameters", NULL, NULL, NULL) == 4154377216.0);
    near(number(p, "model_flops_per_sample", NULL, NULL, NULL), 3 * 2301.1e9, 1e-3);
    near(number(p, "executed_flops_per_sample", NULL, NULL, NULL), 3 * (2301.1e9 - 39.5e9 + 648 * 2 * 32 * 36 * 3 * 1280.0), 1e-3);
    assert_true(number(p, "activations", "none", NULL, NULL) <= 47e9);
    assert_true(number(p, "activations", "cheap", NULL, NULL) <= 33e9);
    assert_true(number(p, "activations", "layer", NULL, NULL) <= 8e9);
    /* bf16 weights and gradients, but for the few that stay fp32; two fp32 moments and 16 low bits of the master. */
    near(number(p, "planned", "ranks", "1", "weights"), 2 * STORED, 2e-3);
    near(number(p, "planned", "ranks", "1", "gradients"), 2 * STORED, 2e-3);
    double optimizer = number(p, "planned", "ranks", "1", "optimizer");
    near(optimizer, 10 * STORED, 1e-3);
    near(number(p, "planned", "ranks", "4", "optimizer"), optimizer / 4, 1e-3); /* and what rounds buckets up */
    near(number(p, "planned", "ranks", "8", "optimizer"), optimizer / 8, 1e-3);
    assert_true(number(p, "planned", "ranks", "1", "collectives") == 0 && number(p, "planned", "ranks", "8", "collectives") > 150);
    assert_true(number(p, "planned", "ranks", "1", "activations") == number(p, "activations", "cheap", NULL, NULL));
    assert_true(number(p, "plain", "ranks", "1", "activations") > number(p, "activations", "none", NULL, NULL));
    assert_true(number(p, "seconds", NULL, NULL, NULL) < (test_sanitized() ? 100 : 10));
    json_decref(p);
    struct rusage usage;
    getrusage(RUSAGE_CHILDREN, &usage);
    assert_true(usage.ru_maxrss < 2000000000 / 1024);
}

/* Sizes from the configuration are those given above; other sizes follow the formula. */
static void test_defaults_and_sizes(void **state)
{
    (void)state;
    json_t *given = plan_json("--batch 26 --text-tokens 98 --grid 18x18,18x18"), *derived = plan_json("");
    assert_true(json_object_del(given, "seconds") == 0 && json_object_del(derived, "seconds") == 0);
    assert_true(json_equal(given, derived));
    json_decref(given);
    json_decref(derived);
    json_t *p = plan_json("--batch 2 --text-tokens 141 --recompute layer --ranks 2 --numerics fp32");
    near(number(p, "model_flops_per_sample", NULL, NULL, NULL), 3 * 2543.4e9, 1e-3);
    near(number(p, "planned", "ranks", "2", "weights"), 4 * STORED, 1e-3);
    near(number(p, "planned", "ranks", "2", "optimizer"), 8 * STORED / 2, 1e-3);
    assert_null(json_object_get(json_object_get(json_object_get(p, "planned"), "ranks"), "1"));
    /* Recompute executes the forward of the layers twice, but for what only feeds the residual sum. */
    assert_true(number(p, "planned", "flops", NULL, NULL) > 1.15 * number(p, "plain", "flops", NULL, NULL));
    assert_true(number(p, "planned", "flops", NULL, NULL) < 1.34 * number(p, "plain", "flops", NULL, NULL));
    json_decref(p);
}

/* Steps of several ranks: the state is sharded, and gradients take no more room than they have where activations were. */
static void test_ranks(void **state)
{
    (void)state;
    json_t *p = plan_json("--batch 26 --step --fuse all --ranks 1,4,8");
    double alone = number(p, "planned", "ranks", "1", "activations"), embedding = 151936.0 * 2048 * 2;
    static const char *const ranks[] = {"4", "8"};
    static const double most[] = {65e9, 56e9};
    for (int i = 0; i < 2; i++) {
        assert_true(number(p, "planned", "ranks", ranks[i], "total") <= most[i]);
        assert_true(number(p, "planned", "ranks", ranks[i], "gradients") == 0);
        assert_true(number(p, "planned", "ranks", ranks[i], "activations") <= 1.01 * alone);
        near(number(p, "planned", "ranks", ranks[i], "shards"), 2 * STORED / atof(ranks[i]), 2e-3);
        double buckets = number(p, "planned", "ranks", ranks[i], "buckets");
        assert_true(buckets >= embedding && buckets <= 1.5 * embedding); /* one tensor that is a bucket of its own */
    }
    json_decref(p);
    p = plan_json("--batch 2 --ranks 2 --dist.zero=0 --perf.bucket=1000");
    near(number(p, "planned", "ranks", "2", "optimizer"), 10 * STORED, 1e-3);
    json_decref(p);
}

/* Of the whole model: 32 blocks of the tower with one stream, 36 layers with two, of which the last has no language rows
 * behind its attention. */
static void test_fused(void **state)
{
    (void)state;
    static const struct { const char *name; int blocks, layers; } patterns[] = {
        {"route", 0, 35},                /* gradients of the attention's rows; the last layer gathers none */
        {"attention qkv", 32, 35},       /* the last layer's queries come from one stream alone */
        {"rms_norm backward", 2 * 32, 4 * 36 - 1}, /* and the merger's and the last norm */
        {"swiglu backward", 32, 2 * 36 - 1},
        {"attention streams", 0, 35},    /* likewise */
    };
    json_t *plain = plan_json("--batch 2"), *fused = plan_json("--batch 2 --fuse all"), *model = plan_json("--batch 2 --fuse model");
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        int extra = i == 2 ? 2 : 0;
        assert_int_equal((int)number(plain, "fused", patterns[i].name, NULL, NULL), 0);
        assert_int_equal((int)number(fused, "fused", patterns[i].name, NULL, NULL), patterns[i].blocks + patterns[i].layers + extra);
        assert_int_equal((int)number(model, "fused", patterns[i].name, NULL, NULL), patterns[i].layers + extra / 2);
    }
    /* Joining costs no memory, and takes a third of the launches away. */
    static const char *const modes[] = {"none", "cheap", "layer"};
    for (int m = 0; m < 3; m++)
        assert_true(number(fused, "activations", modes[m], NULL, NULL) <= number(plain, "activations", modes[m], NULL, NULL));
    assert_true(number(fused, "planned", "launches", NULL, NULL) < 0.67 * number(plain, "planned", "launches", NULL, NULL));
    json_decref(plain);
    json_decref(fused);
    json_decref(model);
}

/* Rows copied again come first: a read and a write, and a launch, for each byte kept. Then a byte for a byte. */
static void test_keep(void **state)
{
    (void)state;
    static const char *const keep[] = {"0", "1.1", "4.5", "30"};
    double memory[4], traffic[4], none = 0;
    for (int k = 0; k < 4; k++) {
        char arguments[128];
        snprintf(arguments, sizeof arguments, "--batch 26 --numerics bf16-sr --step --fuse all --ranks 1 --memory.keep_gb=%s", keep[k]);
        json_t *p = plan_json(arguments);
        memory[k] = number(p, "activations", "cheap", NULL, NULL);
        traffic[k] = number(p, "traffic", "cheap", NULL, NULL);
        none = number(p, "traffic", "none", NULL, NULL);
        json_decref(p);
    }
    assert_true(memory[1] - memory[0] < 1.2e9 && traffic[0] - traffic[1] > 2.5 * (memory[1] - memory[0]));
    assert_true(memory[2] - memory[0] < 4.6e9 && traffic[1] - traffic[2] > 0.9 * (memory[2] - memory[1]));
    near(traffic[3], none, 1e-3);
}

static void test_text(void **state)
{
    (void)state;
    static char out[1 << 20];
    assert_int_equal(capture(PLAN " --batch 1 --text", out, sizeof out), 0);
    assert_non_null(strstr(out, "visual.blocks.31.attn.qkv.weight"));
    assert_int_equal(capture(VLA_TEST_PROGRAM " inspect graph --batch 1 --config " VLA_TEST_ROOT "/configs/libero_local_perf.yml"
                             " --model.config_path=" VLA_TEST_ROOT "/configs/wall-oss-0.5", out, sizeof out), 0);
    assert_non_null(strstr(out, "param %"));
    static char json[1 << 21];
    assert_int_equal(capture(VLA_TEST_PROGRAM " inspect graph --json --batch=1 --config " VLA_TEST_ROOT "/configs/libero_local_perf.yml"
                             " --model.config_path=" VLA_TEST_ROOT "/configs/wall-oss-0.5", json, sizeof json), 0);
    json_t *object = json_loads(json, 0, NULL);
    assert_non_null(object);
    size_t lines = 0;
    for (const char *c = out; *c; c++)
        lines += *c == '\n';
    assert_int_equal(json_array_size(json_object_get(object, "lines")), lines);
    json_decref(object);
    assert_non_null(strstr(out, "attention"));
}

static void test_mistakes(void **state)
{
    (void)state;
    static const struct { const char *command, *says; int code; } cases[] = {
        {PLAN " --grid 18", "--grid '18'", 2},
        {PLAN " --grid 17x18", "grid 1 x 17 x 18", 2},
        {PLAN " --batch 0", "--batch '0'", 2},
        {PLAN " --ranks 1,,2", "--ranks", 2},
        {PLAN " --device gpu", "wanted null or cpu", 2},
        {PLAN " --recompute all", "none, cheap, layer", 2},
        {PLAN " --bach 3", "--batch", 2},
        {PLAN " --batch", "--batch needs a value", 2},
        {VLA_TEST_PROGRAM " inspect plan", "--config FILE", 2},
        {VLA_TEST_PROGRAM " inspect plane", "did you mean 'plan'", 2},
    };
    static char out[1 << 16];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[2048];
        snprintf(command, sizeof command, "%s 2>&1", cases[i].command);
        int code = capture(command, out, sizeof out);
        if (code != cases[i].code || !strstr(out, cases[i].says))
            fail_msg("%s: exit code %d, wanted %d; said: %s", cases[i].command, code, cases[i].code, out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_full_model), cmocka_unit_test(test_defaults_and_sizes),
                                       cmocka_unit_test(test_text), cmocka_unit_test(test_ranks), cmocka_unit_test(test_fused), cmocka_unit_test(test_keep),
                                       cmocka_unit_test(test_mistakes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
