/* vla preflight: all findings at once, and a forecast of memory that a real run keeps. */
#include "program.h"

#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/system.h"

#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static vla_error err = VLA_ERROR_INIT;

#define DEMO_CONFIG VLA_TEST_ROOT "/tests/e2e/small.yml"

static json_t *result(void)
{
    json_t *all;
    assert_ok(vlai_json_load(at("out.txt"), &all, &err), err);
    return all;
}

static double number(const json_t *all, const char *section, const char *key)
{
    const json_t *value = json_object_get(json_object_get(all, section), key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static int make_inputs(void **state)
{
    if (make_root(state))
        return 1;
    return run("synth data --episodes 140 --size 56x56 --cameras observation.images.image --storage image --state-dim 3 --action-dim 3") ||
           run("norm-stats --train_config " DEMO_CONFIG) || run("init start --preset demo --train-config " DEMO_CONFIG);
}

static void all_is_well(void **state)
{
    (void)state;
    assert_int_equal(run("preflight --config " DEMO_CONFIG), 0);
    static const char *const names[] = {"config", "architecture", "processor", "data", "keys", "statistics", "samples", "weights", "run", "memory", "disk"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char line[64];
        snprintf(line, sizeof line, "ok   %-12s ", names[i]);
        assert_true(output_has(line));
    }
    assert_true(output_has("0 failed"));
    assert_int_equal(run("preflight --json --config " DEMO_CONFIG), 0);
    json_t *all = result();
    assert_true(json_array_size(json_object_get(all, "checks")) >= 11);
    const json_t *memory = json_object_get(all, "memory");
    double sum = 0;
    static const char *const parts[] = {"weights", "gradients", "optimizer", "activations", "inputs", "workspace", "snapshot", "loader", "process"};
    for (int i = 0; i < 9; i++)
        sum += json_number_value(json_object_get(memory, parts[i]));
    assert_true(sum == json_number_value(json_object_get(memory, "total")));
    /* weights, gradients and both moments of the same parameters in fp32 */
    assert_true(number(all, "memory", "gradients") == number(all, "memory", "weights"));
    assert_true(number(all, "memory", "optimizer") == 2 * number(all, "memory", "weights"));
    double thrice = 3 * number(all, "memory", "weights"), files = number(all, "disk", "checkpoint");
    assert_true(files > thrice && files < 1.02 * thrice); /* and the headers */
    /* the three instructions have one length, and the batch 32 of them */
    assert_true(number(all, "tokens", "longest") > 20);
    assert_true(number(all, "tokens", "batch") <= 32 * number(all, "tokens", "longest"));
    json_decref(all);
    assert_false(vlai_is_dir(at("run"))); /* nothing is written */
}

/* Of several ranks each keeps its share of the moments, and all of them unless that is asked for. */
static void ranks_share_the_state(void **state)
{
    (void)state;
    assert_int_equal(run("preflight --json --ranks 4 --config " DEMO_CONFIG), 0);
    json_t *all = result();
    assert_true(number(all, "memory", "gradients") == number(all, "memory", "weights"));
    assert_true(number(all, "memory", "optimizer") == number(all, "memory", "weights") / 2);
    assert_true(number(all, "disk", "checkpoint") > 3 * number(all, "memory", "weights")); /* that of all ranks */
    json_decref(all);
    assert_int_equal(run("preflight --json --ranks 4 --dist.zero=0 --config " DEMO_CONFIG), 0);
    all = result();
    assert_true(number(all, "memory", "optimizer") == 2 * number(all, "memory", "weights"));
    json_decref(all);
    if (run("preflight --ranks 4 --device cpu --config " DEMO_CONFIG) == 0)
        assert_true(output_has("Gloo, 4 ranks on CPUs"));
    else
        assert_true(output_has("FAIL collectives") && output_has("made without Gloo"));
    assert_int_equal(run("preflight --ranks none --config " DEMO_CONFIG), 2);
    assert_true(output_has("--ranks 'none'"));
    assert_true(run("preflight --ranks 4096 --config " DEMO_CONFIG) != 0);
    assert_true(output_has(" x 4096 ranks"));
}

/* A run of one rank goes on with two: a step keeps its samples, and what does not divide them is said before the run. */
static void ranks_go_on(void **state)
{
    (void)state;
    static const char sizes[] = "--config " DEMO_CONFIG " --hyperparams.batch_size_per_gpu=8 --hyperparams.gradient_accumulation_steps=4";
    assert_int_equal(run("train %s --stop-at 1 --checkpoint.save_path=saved", sizes), 0);
    assert_int_equal(run("preflight %s --ranks 2 --checkpoint.resume_from=saved", sizes), 0);
    assert_true(output_has("accumulation is 2 instead of 4"));
    assert_int_equal(run("preflight %s --ranks 3 --checkpoint.resume_from=saved", sizes), 2);
    assert_true(output_has("batch 8 x 3 ranks does not divide that"));
    assert_int_equal(run("preflight %s --ranks 3 --checkpoint.resume_from=saved --allow-change accumulation", sizes), 0);
    assert_int_equal(run("preflight %s --ranks 2 --checkpoint.resume_from=saved --hyperparams.seed=77", sizes), 2);
    assert_true(output_has("--allow-change seed"));
    assert_int_equal(run("preflight %s --ranks 2 --checkpoint.resume_from=saved --hyperparams.seed=77 --allow-change seed,batch", sizes), 0);
    assert_int_equal(run("preflight %s --checkpoint.resume_from=saved --allow-change sed", sizes), 2);
    assert_true(output_has("--allow-change: a state has no 'sed'"));
}

enum { HORIZON = 4 }; /* of DEMO_CONFIG */

/* Columns of the embedding. */
static double hidden(void)
{
    json_t *c;
    assert_ok(vlai_json_load(at("start/config.json"), &c, &err), err);
    double n = json_number_value(json_object_get(c, "hidden_size"));
    json_decref(c);
    return n;
}

/* Samples of other sizes than the data set's, and another embedding: plans are made for those. */
static void other_sizes(void **state)
{
    (void)state;
    assert_int_equal(run("preflight --json --config " DEMO_CONFIG), 0);
    json_t *all = result();
    double weights = number(all, "memory", "weights"), activations = number(all, "memory", "activations"), longest = number(all, "tokens", "longest");
    json_decref(all);
    assert_int_equal(run("preflight --config " DEMO_CONFIG), 0);
    char *text;
    long own, rows;
    int height, width;
    assert_ok(vlai_read_file(at("out.txt"), 0, &text, NULL, &err), err);
    const char *line = strstr(text, "ok   sizes ");
    assert_non_null(line);
    assert_int_equal(sscanf(strstr(line, "a sample"), "a sample has %ld text tokens at most and pictures of %dx%d patches, the embedding %ld rows", &own, &height, &width, &rows), 4);
    assert_true(longest == (double)own + height * width / 4 + HORIZON);
    vlai_free(text);
    assert_int_equal(run("preflight --json --text-tokens 300 --config " DEMO_CONFIG), 0);
    all = result();
    assert_true(number(all, "tokens", "longest") == longest - (double)own + 300);
    assert_true(number(all, "tokens", "batch") == 32 * number(all, "tokens", "longest"));
    assert_true(number(all, "memory", "activations") > activations && number(all, "memory", "weights") == weights);
    json_decref(all);
    /* 8 x 12 patches are 24 tokens, and the vocabulary's rows are weights in fp32 */
    assert_int_equal(run("preflight --json --text-tokens 300 --grid 8x12 --vocab 50000 --config " DEMO_CONFIG), 0);
    all = result();
    assert_true(number(all, "tokens", "longest") == 300 + 24 + HORIZON);
    double grown = number(all, "memory", "weights") - weights, wanted = 4.0 * (double)(50000 - rows) * hidden();
    assert_true(fabs(grown - wanted) <= 256); /* tensors begin at round offsets */
    json_decref(all);
    assert_int_equal(run("preflight --grid 8by12 --config " DEMO_CONFIG), 2);
    assert_true(output_has("--grid '8by12': wanted HEIGHTxWIDTH"));
    assert_int_equal(run("preflight --vocab none --config " DEMO_CONFIG), 2);
}

/* One call shows what is wrong in configuration, data, keys and weights together. */
static void all_findings_at_once(void **state)
{
    (void)state;
    char *text;
    assert_ok(vlai_read_file(at("start/model.safetensors"), 0, &text, NULL, &err), err);
    assert_ok(vlai_write_file_atomic(at("cut.safetensors"), text, 100000, &err), err);
    vlai_free(text);
    assert_int_equal(run("preflight --config " DEMO_CONFIG " --hyperparams.scheduler.num_training_steps=0 --checkpoint.resume_from=cut.safetensors"
                         " --data.key_mappings.state=observation.pose"),
                     2);
    assert_true(output_has("FAIL config"));
    assert_true(output_has("num_training_steps must be > 0"));
    assert_true(output_has("FAIL keys"));
    assert_true(output_has("observation.pose"));
    assert_true(output_has("FAIL weights"));
    assert_true(output_has("cut.safetensors"));
    assert_true(output_has("ok   data"));
    assert_true(output_has("needs all of the above"));
    assert_true(output_has("3 failed"));
    /* a save path that is too long for checkpoints, by both programs */
    char path[4061] = "";
    for (size_t i = 0; i + 1 < sizeof path; i++)
        path[i] = i % 200 == 199 ? '/' : 'p';
    setenv("LONG_PATH", path, 1);
    assert_int_equal(run("preflight --config " DEMO_CONFIG " --checkpoint.save_path='${LONG_PATH}'"), 2);
    assert_true(output_has("FAIL config") && output_has("the path of the run folder has 4060 bytes, wanted at most 3994"));
    assert_int_equal(run("train --config " DEMO_CONFIG " --checkpoint.save_path='${LONG_PATH}'"), 2);
    assert_true(output_has("the path of the run folder has 4060 bytes, wanted at most 3994") && output_has("choose a shorter checkpoint.save_path"));
    *strchr(path, '/') = 0;
    assert_false(vlai_is_dir(at(path))); /* nothing was made there */
    /* the first failure's class decides the code */
    assert_int_equal(run("preflight --config " DEMO_CONFIG " --checkpoint.resume_from=cut.safetensors"), 3);
    assert_int_equal(run("preflight --config " DEMO_CONFIG " --hyperparams.batch_size_per_gpu=100000"), 2);
    assert_true(output_has("a step takes 100000"));
    assert_int_equal(run("preflight --config nowhere.yml"), 3);
    assert_int_equal(run("preflight"), 2);
    assert_int_equal(run("preflight --config " DEMO_CONFIG " --jsn"), 2);
    assert_true(output_has("did you mean '--json'"));
}

/* Statistics of another data set: the share of values that they cut off gives them away. */
static void statistics_of_another_set(void **state)
{
    (void)state;
    static const char other[] = "{\"norm_stats\": {\"observation.state\": {\"mean\": [0,0,0], \"std\": [1,1,1], \"q01\": [-0.1,-1,0], "
                                "\"q99\": [0.1,1,1]}, \"action\": {\"mean\": [0,0,0], \"std\": [1,1,1], \"q01\": [-1,-1,-1], \"q99\": [1,1,1]}}}";
    assert_ok(vlai_write_file_atomic(at("other.json"), other, sizeof other - 1, &err), err);
    assert_int_equal(run("preflight --config " DEMO_CONFIG " --data.norm_stats_path=other.json"), 0);
    assert_true(output_has("are these the statistics of this data set?"));
}

/* The largest RssAnon of a run of the program, sampled every few milliseconds. */
static double measured_peak(char *const arguments[])
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (chdir(root) != 0 || setenv("DEMO", root, 1) != 0 || !freopen("out.txt", "w", stdout) || !freopen("err.txt", "w", stderr))
            _exit(99);
        execv(VLA_TEST_PROGRAM, arguments);
        _exit(99);
    }
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/status", (int)child);
    double peak = 0;
    int status;
    while (waitpid(child, &status, WNOHANG) == 0) {
        unsigned long long kilobytes = 0;
        FILE *f = fopen(path, "re");
        while (f && fgets(line, sizeof line, f))
            if (sscanf(line, "RssAnon: %llu kB", &kilobytes) == 1)
                peak = fmax(peak, 1024.0 * (double)kilobytes);
        if (f)
            fclose(f);
        nanosleep(&(struct timespec){.tv_nsec = 4000000}, NULL);
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return peak;
}

/* A run of more than 2 GB stays within 5 % of the forecast. Sanitizers keep memory of their own. */
static void forecast_is_kept(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip();
#endif
    if (vlai_available_bytes() < (size_t)4 << 30)
        skip();
#define BIG "--hyperparams.batch_size_per_gpu=2300", "--hyperparams.scheduler.num_training_steps=2", "--hyperparams.scheduler.num_warmup_steps=1", "--data.num_workers=1"
    static const char *const big[] = {BIG};
    assert_int_equal(run("preflight --json --config " DEMO_CONFIG " %s %s %s %s", big[0], big[1], big[2], big[3]), 0);
    json_t *all = result();
    double forecast = number(all, "memory", "total"), activations = number(all, "memory", "activations"), logged;
    json_decref(all);
    assert_true(forecast > 2e9);
    const char *const arguments[] = {"vla", "train", "--config", DEMO_CONFIG, BIG, NULL};
    double peak = measured_peak((char *const *)(uintptr_t)arguments);
    print_message("forecast %.1f MB, measured %.1f MB: %+.2f %%\n", 1e-6 * forecast, 1e-6 * peak, 100 * (peak / forecast - 1));
    assert_true(fabs(peak / forecast - 1) < 0.05);
    /* The training's own table counts what preflight does: not gaps of the arena, which the system gives no memory for. */
    char *text;
    assert_ok(vlai_read_file(at("out.txt"), 0, &text, NULL, &err), err);
    char *row = strstr(text, "  activations ");
    assert_true(row && sscanf(row, " activations %lf", &logged) == 1);
    print_message("activations: %.1f MB by preflight, %.1f MB in the log\n", 1e-6 * activations, logged);
    assert_true(fabs(1e6 * logged / activations - 1) < 0.02);
    vlai_free(text);
}

/* Sixty layers at this batch keep about 45 GB: settings that fit are named, and do fit by the program's own word. */
static void settings_that_fit(void **state)
{
    (void)state;
    if (vlai_available_bytes() > (size_t)40 << 30)
        skip();
    char command[4096];
    snprintf(command, sizeof command, "sed 's/\"num_hidden_layers\": 3/\"num_hidden_layers\": 60/' '%s' > '%s'", at("start/config.json"), at("deep.json"));
    assert_int_equal(system(command), 0);
    static const char deep[] = "--config " DEMO_CONFIG " --model.config_path=deep.json --checkpoint.resume_from=null --hyperparams.batch_size_per_gpu=2300 --hyperparams.gradient_accumulation_steps=1";
    assert_int_equal(run("preflight %s", deep), 4);
    assert_true(output_has("FAIL memory"));
    assert_true(output_has("does not fit in memory"));
    assert_true(output_has("weights 0."));
    assert_true(output_has("gradients 0."));
    assert_true(output_has("optimizer 0."));
    assert_true(output_has("activations "));
    assert_true(output_has("would fit: "));
    assert_int_equal(run("preflight --json %s", deep), 4);
    json_t *all = result();
    const json_t *fits = json_object_get(all, "fits");
    assert_int_equal(json_array_size(fits), 3);
    for (size_t i = 0; i < 3; i++) {
        double peak = json_number_value(json_object_get(json_array_get(fits, i), "peak"));
        assert_true(peak > 0 && peak < number(all, "memory", "available") + number(all, "memory", "process"));
    }
    /* a smaller batch is among them; take it */
    char batch[160] = "";
    double promised = 0;
    for (size_t i = 0; i < 3; i++) {
        const char *text = json_string_value(json_object_get(json_array_get(fits, i), "settings"));
        if (!strncmp(text, "--hyperparams", 13)) {
            snprintf(batch, sizeof batch, "%s", text);
            promised = json_number_value(json_object_get(json_array_get(fits, i), "peak"));
        }
    }
    json_decref(all);
    assert_true(*batch);
    int code = run("preflight --json %s %s", deep, batch);
    all = result();
    double total = number(all, "memory", "total"), room = number(all, "memory", "available") + number(all, "memory", "process");
    json_decref(all);
    assert_true(fabs(total / promised - 1) < 0.01);
    assert_true(code == 0 || total > room); /* other processes may have taken memory meanwhile */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_is_well),      cmocka_unit_test(all_findings_at_once), cmocka_unit_test(statistics_of_another_set),
        cmocka_unit_test(settings_that_fit), cmocka_unit_test(forecast_is_kept),     cmocka_unit_test(ranks_share_the_state), cmocka_unit_test(ranks_go_on),
        cmocka_unit_test(other_sizes),
    };
    return cmocka_run_group_tests_name("preflight", tests, make_inputs, drop_root);
}
