/* `vla train` as a user runs it: a tiny Wall-X on a synthetic set with AV1 video, through the program. */
#include "tiny.h"

#include "format/safetensors.h"

#include <jansson.h>
#include <math.h>

/* metrics.jsonl without the fields that measure. */
static char *metrics(const char *run)
{
    char name[256];
    snprintf(name, sizeof name, "%s/metrics.jsonl", run);
    char *text = tiny_read(name, NULL), *to = text;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        char *timed = strstr(line, ", \"step_ms\"");
        assert_non_null(timed);
        size_t n = (size_t)(timed - line);
        memmove(to, line, n);
        to += n;
        *to++ = '\n';
    }
    *to = 0;
    return text;
}

static void assert_same_run(const char *a, const char *b, const char *checkpoint)
{
    static const char *const files[] = {"model.safetensors", "optimizer-0-of-1.safetensors", "state.json"};
    char x[256], y[256];
    for (int i = 0; i < 3; i++) {
        snprintf(x, sizeof x, "%s/%s/%s", a, checkpoint, files[i]);
        snprintf(y, sizeof y, "%s/%s/%s", b, checkpoint, files[i]);
        if (!tiny_equal(x, y))
            fail_msg("%s and %s differ", x, y);
    }
    char *m = metrics(a), *n = metrics(b);
    assert_string_equal(m, n);
    vlai_free(m);
    vlai_free(n);
}

static void a_run_and_its_folder(void **state)
{
    (void)state;
    tiny_must("train --config tiny.yml --logging.log_interval=5");
    tiny_said("weights from start/model.safetensors");
    tiny_said("- [rank0] - INFO -  epoch   0/100 | iter      0/    ");
    tiny_said("| lr 0.00");
    tiny_said("| time_current_backward_step 0.");
    tiny_said("[Validation] step 20 | val_loss ");
    tiny_said("Saved checkpoint to run/1_20");
    static const char *const files[] = {"metrics.jsonl", "validation.jsonl", "config.resolved.json", "logs/rank_0.log",
                                        "1_20/model.safetensors", "1_20/optimizer-0-of-1.safetensors", "1_20/state.json",
                                        "1_20/config.json", "1_20/config.yml", "1_20/norm_stats.json", "1_20/tokenizer.json",
                                        "1_20/preprocessor_config.json", "1_20/checksums.json", "1_20/DONE",
                                        "latest/model.safetensors",
                                        "report.html"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char name[256];
        snprintf(name, sizeof name, "run/%s", files[i]);
        if (!vlai_is_file(at(name)))
            fail_msg("%s is missing", name);
    }
    char *text = tiny_read("run/metrics.jsonl", NULL), *rest;
    int64_t step = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        static const char *const keys[] = {"step", "epoch", "samples", "loss", "flow_loss", "lr", "grad_norm", "skipped",
                                           "step_ms", "samples_per_s", "stall_ms", "tflops", "rss", "device_memory"};
        json_t *record = json_loads(line, 0, NULL);
        assert_non_null(record);
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            if (!json_is_number(json_object_get(record, keys[k])))
                fail_msg("'%s' is no number in %s", keys[k], line);
        assert_int_equal(json_integer_value(json_object_get(record, "step")), ++step);
        assert_int_equal(json_integer_value(json_object_get(record, "samples")), 4 * step);
        /* one micro-batch: the mean over its terms is its loss */
        double channel = json_real_value(json_object_get(record, "channel_loss_set_flow"));
        assert_true(fabs(channel - json_real_value(json_object_get(record, "flow_loss"))) <= 1e-12);
        double all = json_real_value(json_object_get(record, "total_param_norm")), squares = 0;
        static const char *const norms[] = {"visual_param_norm", "action_expert_param_norm", "org_vlm_param_norm"};
        for (int k = 0; k < 3; k++)
            squares += pow(json_real_value(json_object_get(record, norms[k])), 2);
        assert_true(step == 1 ? all > 1 && fabs(squares - all * all) <= 1e-12 * squares : all == 0 && squares == 0);
        json_decref(record);
    }
    assert_int_equal(step, 20);
    vlai_free(text);
}

static void resume_is_exact(void **state)
{
    (void)state;
    tiny_must("train --config tiny.yml --checkpoint.save_path=parts --stop-at 10 --data.num_workers=5 --threads 1");
    tiny_must("train --config tiny.yml --checkpoint.save_path=parts --resume --data.num_workers=0 --threads 3");
    tiny_said("global_step: 10, start_epoch: 0 from parts/0_10");
    assert_same_run("run", "parts", "1_20");
    if (test_sanitized())
        return;
    tiny_must("train --config tiny.yml --checkpoint.save_path=again");
    assert_same_run("run", "again", "1_20");
    /* auto without a checkpoint starts as the configuration says */
    tiny_must("train --config tiny.yml --checkpoint.save_path=fresh --resume auto");
    assert_same_run("run", "fresh", "1_20");
    /* and a finished run has nothing to do */
    tiny_must("train --config tiny.yml --checkpoint.save_path=fresh --resume auto");
    tiny_said("nothing to train: step 20 of 20 is done, epoch 1 of 100; more of hyperparams.scheduler.num_training_steps");
    assert_same_run("run", "fresh", "1_20");
}

static void other_ways_to_the_same_bits(void **state)
{
    (void)state;
    assert_int_equal(tiny_run("WALLX_PERF_ALLOC=1 WALLX_PERF_LOG=1", "train --config tiny.yml --checkpoint.save_path=alloc"), 0);
    tiny_said("[WALLX_PERF] WALLX_PERF_ALLOC=1: buffers at offsets planned by lifetime");
    assert_same_run("run", "alloc", "1_20");
    tiny_must("train --config tiny.yml --checkpoint.save_path=layer --memory.recompute=layer");
    assert_same_run("run", "layer", "1_20");
    if (test_sanitized())
        return;
    assert_int_equal(tiny_run("WALLX_PERF_COMPILE_RECOMP_LIMIT=2", "train --config tiny.yml --checkpoint.save_path=few"), 0);
    assert_same_run("run", "few", "1_20");
    /* cold, warm, and with room for a part only */
    tiny_must("train --config tiny.yml --checkpoint.save_path=cold --data.frame_cache_gb=1 --data.frame_cache_dir=frames");
    assert_same_run("run", "cold", "1_20");
    tiny_must("train --config tiny.yml --checkpoint.save_path=warm --data.frame_cache_gb=1 --data.frame_cache_dir=frames");
    assert_same_run("run", "warm", "1_20");
    tiny_must("train --config tiny.yml --checkpoint.save_path=part --data.frame_cache_gb=0.0005");
    assert_same_run("run", "part", "1_20");
}

static void variants_train(void **state)
{
    (void)state;
    static const char *const variants[] = {
        "--hyperparams.gradient_accumulation_steps=2", "--numerics bf16", "--numerics bf16-sr", "--data.padding=reference", "--data.validation_split=frame",
        "--hyperparams.gradient_accumulation_steps=2 --hyperparams.loss_normalization=global",
        "--data.mask_padded_actions=true --hyperparams.optimizer.train_action_expert_only=true "
        "--hyperparams.optimizer.action_expert_learning_rate=1.0e-3"};
    size_t count = test_sanitized() ? 2 : sizeof variants / sizeof *variants;
    for (size_t i = 0; i < count; i++) {
        char first[1024], second[1024], a[64], b[64];
        snprintf(a, sizeof a, "v%zu", i);
        snprintf(b, sizeof b, "w%zu", i);
        snprintf(first, sizeof first, "train --config tiny.yml --checkpoint.save_path=%s %s", a, variants[i]);
        tiny_must(first);
        snprintf(second, sizeof second, "train --config tiny.yml --checkpoint.save_path=%s %s --stop-at 7", b, variants[i]);
        tiny_must(second);
        snprintf(second, sizeof second, "train --config tiny.yml --checkpoint.save_path=%s %s --resume", b, variants[i]);
        tiny_must(second);
        bool accumulates = strstr(variants[i], "accumulation");
        assert_same_run(a, b, accumulates ? "2_20" : "1_20");
    }
}

/* With train_action_expert_only the other weights keep the bits of the file, and the action expert moves. */
static void frozen_weights_stay(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    tiny_must("train --config tiny.yml --checkpoint.save_path=frozen --stop-at 3 "
              "--hyperparams.optimizer.train_action_expert_only=true "
              "--hyperparams.optimizer.action_expert_learning_rate=1.0e-3");
    vlai_safetensors *before, *after;
    assert_ok(vlai_safetensors_open(at("start/model.safetensors"), &before, &err), err);
    assert_ok(vlai_safetensors_open(at("frozen/0_3/model.safetensors"), &after, &err), err);
    int stayed = 0, moved = 0;
    for (size_t i = 0; i < vlai_safetensors_count(after); i++) {
        const vlai_tensor_view *new = vlai_safetensors_at(after, i), *old = vlai_safetensors_find(before, new->name);
        assert_non_null(old);
        assert_int_equal(old->bytes, new->bytes);
        bool same = memcmp(old->data, new->data, new->bytes) == 0;
        bool expert = strstr(new->name, "action_preprocessor") || strstr(new->name, "experts.1") || strstr(new->name, "norms.1");
        if (!expert && !same)
            fail_msg("%s has moved", new->name);
        stayed += !expert;
        moved += !same;
    }
    assert_true(stayed > 20);
    assert_true(moved > 10);
    vlai_safetensors_close(before);
    vlai_safetensors_close(after);
}

static void a_signal_saves(void **state)
{
    (void)state;
    int signals[] = {SIGTERM, SIGINT, SIGHUP};
    for (int i = 0; i < 3; i++) {
        char run[32], arguments[512], name[64];
        snprintf(run, sizeof run, "signal%d", i);
        snprintf(arguments, sizeof arguments, "train --config tiny.yml --checkpoint.save_path=%s "
                 "--hyperparams.scheduler.num_training_steps=100000 --hyperparams.num_epoch=100000 --logging.val_interval=100000", run);
        pid_t child = tiny_start(NULL, arguments, "log");
        snprintf(name, sizeof name, "%s/metrics.jsonl", run);
        for (int waited = 0; waited < 20000; waited++) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            if (!vlai_is_file(at(name)))
                continue;
            size_t n;
            char *text = tiny_read(name, &n);
            vlai_free(text);
            if (n > 600)
                break;
        }
        kill(child, signals[i]);
        assert_int_equal(tiny_wait(child), 75);
        tiny_said("stopped on request after step");
        strcat(arguments, " --resume --stop-at 3");
        tiny_must(arguments);
        tiny_said("global_step:");
    }
}

static void errors_and_their_codes(void **state)
{
    (void)state;
    assert_int_equal(tiny_run(NULL, "train"), 2);
    tiny_said("--config FILE is required");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --resum"), 2);
    tiny_said("did you mean '--resume'");
    assert_int_equal(tiny_run(NULL, "train --config=tiny.yml --stop-at=soon"), 2);
    tiny_said("--stop-at 'soon': wanted a whole number from 1 to 1000000000000000");
    assert_int_equal(tiny_run("WORLD_SIZE=2", "train --config tiny.yml"), 2);
    tiny_said("RANK is not set");
    assert_int_equal(tiny_run(NULL, "train --config nowhere.yml"), 3);
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --data.lerobot_config.repo_id=nowhere"), 3);
    tiny_said("no such LeRobot data set");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --hyperparams.batch_size_per_gpu=200"), 2);
    tiny_said("a step takes 200 x 1");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --resume run --hyperparams.seed=8 --task.action_horizon=5"), 2);
    tiny_said("seed: 7 in the checkpoint, 8 now");
    tiny_said("contract.action.horizon: 4 in the checkpoint, 5 now");
    tiny_said("--allow-change");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --checkpoint.save_path=nan --checkpoint.max_bad_steps=3 "
                              "--hyperparams.optimizer.learning_rate=1.0e+3 --hyperparams.scheduler.num_warmup_steps=0 "
                              "--hyperparams.optimizer.enable_grad_clip=false"), 5);
    tiny_said("not finite");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --data.key_mappings.state=observation.sate"), 3);
    tiny_said("observation.state");
}

static void launch_starts_one_cpu_rank(void **state)
{
    (void)state;
    tiny_must("launch --gpus= --master-port= train --config tiny.yml --checkpoint.save_path=launched --stop-at 2");
    tiny_said("starting one CPU rank");
    assert_int_equal(tiny_run("WORLD_SIZE=4 RANK=1", "launch train --config tiny.yml"), 2);
    tiny_said("WORLD_SIZE is 4 and RANK 1: another launcher has started this process");
    assert_int_equal(tiny_run(NULL, "launch --nnodes 2 --node-rank 2 train --config tiny.yml"), 2);
    tiny_said("--node-rank 2 with --nnodes 2: wanted 0 to 1");
    assert_int_equal(tiny_run(NULL, "launch --nproc two train --config tiny.yml"), 2);
    tiny_said("--nproc 'two': wanted auto or a number of ranks");
    assert_int_equal(tiny_run(NULL, "launch --nproc 2"), 2);
    tiny_said("no command to launch");
}

/* The launchers of the root, on the tiny run. */
/* A launcher's lines without comments and switches. */
static char *bare_launcher(const char *kind)
{
    vla_error err = VLA_ERROR_INIT;
    char path[1024], *text, *to;
    size_t size;
    snprintf(path, sizeof path, "%s/run_wallx_%s.sh", VLA_TEST_ROOT, kind);
    assert_ok(vlai_read_file(path, 0, &text, &size, &err), err);
    to = text;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        if (*line == '#' || strstr(line, "WALLX_PERF"))
            continue;
        size_t n = (size_t)(end - line);
        memmove(to, line, n);
        to += n;
        *to++ = '\n';
    }
    *to = 0;
    return text;
}

static void launchers_differ_by_switches(void **state)
{
    (void)state;
    char *a = bare_launcher("optimized"), *b = bare_launcher("baseline");
    assert_string_equal(a, b);
    assert_non_null(strstr(a, "exec \"$program\" launch"));
    vlai_free(a);
    vlai_free(b);
}

static void launchers_run(void **state)
{
    (void)state;
    static const char *const kinds[] = {"optimized", "baseline"};
    for (int i = 0; i < 2; i++) {
        char command[2048], run[64];
        snprintf(run, sizeof run, "by_%s", kinds[i]);
        snprintf(command, sizeof command,
                 "cd %s && WALLX_PERF_COMPILE=1 WALLX_PERF_LOG=1 CONFIG=tiny.yml BATCH=4 SAVE_PATH=%s VLA=%s "
                 "%s/run_wallx_%s.sh --stop-at 10 >log 2>&1 && CONFIG=tiny.yml BATCH=4 SAVE_PATH=%s VLA=%s "
                 "%s/run_wallx_%s.sh --resume >>log 2>&1",
                 root, run, VLA_TEST_PROGRAM, VLA_TEST_ROOT, kinds[i], run, VLA_TEST_PROGRAM, VLA_TEST_ROOT, kinds[i]);
        if (system(command) != 0)
            fail_msg("%s\n%s", command, tiny_read("log", NULL));
        tiny_said("no GPU that this build can use: starting one CPU rank");
        char *text = tiny_read("log", NULL);
        assert_int_equal(strstr(text, "[WALLX_PERF] WALLX_PERF_ALLOC=1") != NULL, i == 0);
        assert_int_equal(strstr(text, "[WALLX_PERF]") != NULL, i == 0);
        vlai_free(text);
        assert_same_run("run", run, "1_20");
        snprintf(command, sizeof command, "cd %s && VLA=./absent %s/run_wallx_%s.sh >log 2>&1", root, VLA_TEST_ROOT, kinds[i]);
        assert_int_equal(WEXITSTATUS(system(command)), 2); /* another than the one that was named is not taken */
        tiny_said("./absent is not there");
    }
}

/* Weights with more rows of vocabulary than the tokenizer has tokens, in several files: the rows come from the tensor, at
 * the cold start and when the run goes on. */
static void vocabulary_of_the_weights(void **state)
{
    (void)state;
    tiny_must("init wide --preset demo --train-config tiny.yml --hidden 32 --layers 2 --intermediate 48 --action-hidden 16 "
              "--action-intermediate 24 --vision-hidden 32 --vision-intermediate 48 --vocab 900 --shard-gb 0.0001");
    const char *from[] = {"wide", "wide/model.safetensors.index.json"};
    for (int i = 0; i < 2; i++) {
        char arguments[512];
        snprintf(arguments, sizeof arguments, "train --config tiny.yml --checkpoint.save_path=rows%d --checkpoint.resume_from=%s "
                 "--stop-at 4", i, from[i]);
        tiny_must(arguments);
        tiny_said("embedding rows: 900");
        snprintf(arguments, sizeof arguments, "train --config tiny.yml --checkpoint.save_path=rows%d --resume --stop-at 8", i);
        tiny_must(arguments);
        tiny_said("embedding rows: 900");
        tiny_said("global_step: 4");
    }
    assert_same_run("rows0", "rows1", "0_8");
    tiny_must("inspect checkpoint rows0/0_8 --tensors");
    tiny_said("model.embed_tokens.weight                                                F32 [900, 32]");
    /* and another layout of actions than theirs is an error that says how wide they are */
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --task.dof_config={a:5}"), 2);
}

static void inspection(void **state)
{
    (void)state;
    tiny_must("inspect batch --config tiny.yml --step 2 --out pictures");
    tiny_said("<|vision_start|><|image_pad|> x 4<|vision_end|>");
    tiny_said("Instruction: move to the ");
    tiny_said("picture   observation.images.wrist_image as 'right_wrist_view': 56 x 56");
    assert_true(vlai_is_file(at("pictures/3_face_view.png")));
    tiny_must("inspect checkpoint run");
    tiny_said("run/1_20: whole; step 20, epoch 1, 80 samples, 20 updates, 0 skipped");
    tiny_must("train --config tiny.yml --checkpoint.save_path=damaged --stop-at 1");
    assert_int_equal(truncate(at("damaged/0_1/model.safetensors"), 1000), 0);
    assert_int_equal(tiny_run(NULL, "inspect checkpoint damaged"), 3);
    tiny_said("model.safetensors: the checkpoint is damaged: 1000 bytes, wanted");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --resume damaged/0_1"), 3);
    tiny_said("the checkpoint is damaged");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_and_its_folder), cmocka_unit_test(resume_is_exact), cmocka_unit_test(other_ways_to_the_same_bits),
        cmocka_unit_test(variants_train),       cmocka_unit_test(frozen_weights_stay), cmocka_unit_test(a_signal_saves),
        cmocka_unit_test(errors_and_their_codes), cmocka_unit_test(launch_starts_one_cpu_rank), cmocka_unit_test(launchers_run),
        cmocka_unit_test(launchers_differ_by_switches),
        cmocka_unit_test(vocabulary_of_the_weights), cmocka_unit_test(inspection),
    };
    return cmocka_run_group_tests(tests, tiny_make, drop_root);
}
