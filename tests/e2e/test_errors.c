/* What a user is told when the everyday faults happen, through the program: each row names the facts that its message must
 * hold. Data sets, pictures and numbers are damaged copies of one synthetic set. */
#include "tiny.h"

#include "ckpt/ckpt.h"

#include <jansson.h>

enum { PARTS = 8 };

/* Runs the program; the exit code and every part must be as said. */
static void expect(int code, const char *arguments, const char *const parts[PARTS])
{
    int got = tiny_run(NULL, arguments);
    char *text = tiny_read("log", NULL);
    if (got != code)
        fail_msg("vla %s: code %d, wanted %d\n...%s", arguments, got, code, strlen(text) > 700 ? text + strlen(text) - 700 : text);
    for (int i = 0; i < PARTS && parts[i]; i++)
        if (!strstr(text, parts[i]))
            fail_msg("vla %s: the message lacks '%s':\n...%s", arguments, parts[i], strlen(text) > 700 ? text + strlen(text) - 700 : text);
    vlai_free(text);
}
#define EXPECT(code, arguments, ...) expect(code, arguments, (const char *const[PARTS]){__VA_ARGS__})

static void shell(const char *command)
{
    char line[2048];
    snprintf(line, sizeof line, "cd '%s' && %s", root, command);
    if (system(line) != 0)
        fail_msg("%s", line);
}

static void put(const char *name, const char *data, size_t size)
{
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_write_file_atomic(at(name), data, size, &err), err);
}

/* `name` becomes the text of `from` with one part replaced. */
static void edit(const char *name, const char *from, const char *part, const char *by)
{
    size_t n;
    char *text = tiny_read(from, &n), *at = strstr(text, part), *fresh = malloc(n + strlen(by) + 1);
    if (!at)
        fail_msg("%s has no '%s'", from, part);
    size_t before = (size_t)(at - text);
    memcpy(fresh, text, before);
    size_t size = before + (size_t)sprintf(fresh + before, "%s%s", by, at + strlen(part));
    put(name, fresh, size);
    free(fresh);
    vlai_free(text);
}

static void a_copy(void)
{
    shell("rm -rf copy && cp -rL set copy");
}

static const char train_copy[] = "train --config tiny.yml --checkpoint.save_path=out --data.lerobot_config.repo_id=copy";
static const char video[] = "copy/videos/observation.images.image/chunk-000/file-000.mp4";
static const char data[] = "copy/data/chunk-000/file-000.parquet";

/* Unsupported data set: version found, versions read, file, what to do. */
static void unsupported_set(void **state)
{
    (void)state;
    a_copy();
    edit("copy/meta/info.json", "copy/meta/info.json", "\"v3.0\"", "\"v4.2\"");
    EXPECT(3, train_copy, "v4.2", "v2.0, v2.1 and v3.0", "copy/meta/info.json", "update vla");
    a_copy();
    put("copy/meta/info.json", "{", 1);
    EXPECT(3, train_copy, "copy", "meta/info.json", "not valid JSON");
}

/* Partial download: file, size found, episodes still usable, option to continue. */
static void partial_download(void **state)
{
    (void)state;
    char whole[64];
    size_t n;
    shell("rm -rf set21 && rm -rf out");
    tiny_must("synth set21 --version v2.1 --episodes 4 --length 8:11 --size 64x64 --state-dim 3 --action-dim 3");
    vlai_free(tiny_read("set21/data/chunk-000/episode_000002.parquet", &n));
    shell("truncate -s 700 set21/data/chunk-000/episode_000002.parquet");
    EXPECT(3, "train --config tiny.yml --checkpoint.save_path=out --data.lerobot_config.repo_id=set21", "episode_000002.parquet",
           "700 bytes", "footer is missing", "2 of 4 episodes", "--allow-partial");
    shell("rm set21/data/chunk-000/episode_000002.parquet");
    EXPECT(3, "train --config tiny.yml --checkpoint.save_path=out --data.lerobot_config.repo_id=set21", "episode_000002.parquet",
           "No such file", "2 of 4 episodes", "--allow-partial");
    EXPECT(0, "norm-stats --config tiny.yml --output_path alike.json", "alike.json");
    EXPECT(0, "norm-stats --train_config tiny.yml --data_root set21 --output_path part.json --allow-partial", "part.json");
    EXPECT(3, "preflight --config tiny.yml --data.lerobot_config.repo_id=set21", "episode_000002.parquet", "--allow-partial");
    EXPECT(0, "preflight --config tiny.yml --data.lerobot_config.repo_id=set21 --data.lerobot_config.allow_partial=true "
              "--data.train_test_split=0.5", "2 of 4 episodes", "8 training samples of 1 episodes, 8 validation samples of 1,");
    EXPECT(0, "train --config tiny.yml --checkpoint.save_path=out --data.lerobot_config.repo_id=set21 --allow-partial "
              "--data.train_test_split=0.5 --stop-at 1", "2 of 4 episodes", "8 training samples (1 episodes), 8 validation samples (1 episodes)");
    a_copy();
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    put(video, pointer, sizeof pointer - 1);
    snprintf(whole, sizeof whole, "%zu bytes", sizeof pointer - 1);
    EXPECT(3, train_copy, "file-000.mp4", "Git-LFS pointer", whole, "git lfs pull", "0 of 10 episodes");
    a_copy();
    shell("truncate -s 900 copy/data/chunk-000/file-000.parquet");
    EXPECT(3, train_copy, data + strlen("copy/"), "900 bytes", "footer is missing", "0 of 10 episodes");
    a_copy();
    shell("truncate -s 3000 copy/videos/observation.images.image/chunk-000/file-000.mp4");
    EXPECT(3, train_copy, "file-000.mp4", "camera observation.images.image", "3000", "0 of 10 episodes");
}

/* Frames of a video against the lengths: camera, file, expected, found, first episode affected. */
static void frame_count(void **state)
{
    (void)state;
    shell("rm -rf other");
    tiny_must("synth other --episodes 7 --length 8 --size 64x64 --state-dim 3 --action-dim 3");
    a_copy();
    shell("cp other/videos/observation.images.image/chunk-000/file-000.mp4 copy/videos/observation.images.image/chunk-000/");
    EXPECT(3, train_copy, "camera observation.images.image", "file-000.mp4", "the video has 56 frames", "add up to ",
           "is the first");
}

/* Constant and tiny dimensions: name, q01, q99, std, treatment. */
static void constant_dimension(void **state)
{
    (void)state;
    json_t *stats = json_load_file(at("norm_stats.json"), 0, NULL);
    json_t *action = json_object_get(json_object_get(stats, "norm_stats"), "action");
    assert_non_null(action);
    json_array_set_new(json_object_get(action, "q01"), 1, json_real(0.25));
    json_array_set_new(json_object_get(action, "q99"), 1, json_real(0.25));
    json_array_set_new(json_object_get(action, "std"), 1, json_real(0));
    json_array_set_new(json_object_get(action, "q01"), 2, json_real(0));
    json_array_set_new(json_object_get(action, "q99"), 2, json_real(1e-9));
    assert_int_equal(json_dump_file(stats, at("constant.json"), 0), 0);
    json_array_set_new(json_object_get(action, "q01"), 0, json_real(7.5));
    json_array_set_new(json_object_get(action, "q99"), 0, json_real(0.5));
    assert_int_equal(json_dump_file(stats, at("swapped.json"), 0), 0);
    json_decref(stats);
    EXPECT(0, "train --config tiny.yml --checkpoint.save_path=out --data.norm_stats_path=constant.json --stop-at 1",
           "'action' dim 1 (ee_position[1]", "has no range: q01 0.25, q99 0.25, std 0; it is scaled by 1 instead",
           "'action' dim 2 (gripper[0]", "has tiny range: q01 ", "it is scaled as it is");
    EXPECT(3, "train --config tiny.yml --checkpoint.save_path=out --data.norm_stats_path=swapped.json --stop-at 1", "swapped.json", "dim 0 has q01 7.5, q99 0.5",
           "the first not above the second", "vla norm-stats");
}

/* Cameras: both lists, suggested mapping line. */
static void cameras(void **state)
{
    (void)state;
    static const char both[] = "{observation.images.image: face_view, observation.images.wrist_image: right_wrist_view}";
    edit("one.yml", "tiny.yml", both, "{observation.images.image: face_view}");
    EXPECT(2, "train --config one.yml --checkpoint.save_path=out", "not mapped: 'observation.images.wrist_image'",
           "mapping: 'observation.images.image': face_view",
           "the set's cameras: 'observation.images.image', 'observation.images.wrist_image'",
           "data.key_mappings.camera: {observation.images.image: face_view, observation.images.wrist_image: right_wrist_view}");
    edit("wrong.yml", "tiny.yml", both,
         "{observation.images.top: face_view, observation.images.wrist_image: right_wrist_view}");
    EXPECT(2, "train --config wrong.yml --checkpoint.save_path=out", "not in the set: 'observation.images.top'",
           "not mapped: 'observation.images.image'",
           "the set's cameras: 'observation.images.image', 'observation.images.wrist_image'",
           "data.key_mappings.camera: {observation.images.image: ");
}

/* The processor of another model: which value, of both. */
static void another_processor(void **state)
{
    (void)state;
    shell("rm -rf foreign && cp -r start foreign");
    edit("foreign/preprocessor_config.json", "start/preprocessor_config.json", "\"patch_size\": 14", "\"patch_size\": 16");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=out --model.processor_path=foreign", "patch_size: the processor has 16",
           "vision_config 14", "model.processor_path and model.config_path");
    EXPECT(2, "preflight --config tiny.yml --model.processor_path=foreign", "FAIL keys", "patch_size: the processor has 16");
}

/* Dimensions and slots: the table, names of both sides. */
static void slots(void **state)
{
    (void)state;
    edit("slots.yml", "tiny.yml", "  dof_config: {ee_position: 2, gripper: 1}", "  dof_config: {ee_position: 2, action_padding: 1}");
    EXPECT(3, "train --config slots.yml --checkpoint.save_path=out", "column 'action' has 3 dimensions",
           "task.dof_config has slots for 2", "ee_position 2: ", "action_padding 1: no column", "no slot: ");
}

/* Disk: need per checkpoint, free space, keep_last that fits. (The trainer asks before the first step.) */
static void disk(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    uint64_t room;
    char needed[64];
    assert_ok(vlai_ckpt_free_bytes(root, &room, &err), err);
    uint64_t each = room / 7 * 2; /* three and a half fit: others may write to this disk meanwhile */
    assert_fails(vlai_ckpt_check_room(root, each, 9, -1, &err), VLA_E_IO, err, "checkpoint.keep_last=2 fits");
    snprintf(needed, sizeof needed, "%.6g GB each, 10 of them", 1e-9 * (double)each);
    assert_non_null(strstr(err.message, needed));
    assert_non_null(strstr(err.message, " GB free"));
}

/* A full disk behind the output, and a limit on the size of files, are errors with a message. */
static void output_that_does_not_fit(void **state)
{
    (void)state;
    shell("{ " VLA_TEST_PROGRAM " config >/dev/full 2>log; [ $? = 3 ]; } && grep -q 'the output could not be written' log");
    shell("{ (ulimit -f 100; " VLA_TEST_PROGRAM " train --config tiny.yml --checkpoint.save_path=limit >log 2>&1); [ $? = 3 ]; } && "
          "grep -q 'limit/.*: cannot write: File too large' log");
}

/* An instruction that is no UTF-8 is found with the set, before a prompt is made of it. */
static void instruction_bytes(void **state)
{
    (void)state;
    a_copy();
    shell("LC_ALL=C sed -i 's/move to the/m\\xffve to the/g' copy/meta/tasks.parquet");
    EXPECT(3, "check --quick copy", "task-text", "meta/tasks.parquet", "byte 1 of its text is 0xff");
    EXPECT(3, train_copy, "meta/tasks.parquet", "byte 1 of its text is 0xff");
}

/* An episode listed twice is held out once, which may leave nothing to train on. */
static void episodes_listed_twice(void **state)
{
    (void)state;
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=out --data.lerobot_config.episodes=[1,1]",
           "data.lerobot_config.episodes", "of the 2 listed none is left to train on");
}

/* Resuming with other data or settings: each differing field, old and new, name of the override. */
static void resume_with_changes(void **state)
{
    (void)state;
    shell("rm -rf run2");
    tiny_must("train --config tiny.yml --checkpoint.save_path=run2 --stop-at 2");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=run2 --resume --hyperparams.seed=8 --hyperparams.batch_size_per_gpu=2",
           "seed: 7 in the checkpoint, 8 now", "batch: 4 in the checkpoint, 2 now", "--allow-change");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=run2 --resume --task.dof_config={\"gripper\":1,\"ee_position\":2}",
           "contract.action.layout: {\"ee_position\":2,\"gripper\":1} in the checkpoint, {\"gripper\":1,\"ee_position\":2} now");
    edit("other.json", "start/config.json", "\"use_x_loss\": true", "\"use_x_loss\": false");
    edit("narrow.json", "start/config.json", "\"window_size\": 112", "\"window_size\": 56");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=run2 --resume --model.config_path=other.json",
           "model.use_x_loss: true in the checkpoint, false now", "--allow-change");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=run2 --resume --model.config_path=narrow.json",
           "model.vision_config.window_size: 112 in the checkpoint, 56 now", "--allow-change");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=run2 --resume --hyperparams.optimizer.train_action_expert_only=true "
           "--hyperparams.optimizer.action_expert_learning_rate=1.0e-3",
           "model.train_action_expert_only: false in the checkpoint, true now");
    shell("rm -rf more");
    tiny_must("synth more --episodes 12 --length 8:11 --size 64x64 --state-dim 3 --action-dim 3");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=run2 --resume --data.lerobot_config.repo_id=more",
           " in the checkpoint, ", " now", "digest", "--allow-change");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=run2 --resume --allow-change sead --hyperparams.seed=8 --stop-at 3",
           "--allow-change: a state has no 'sead'; it has contract, data, flow, layout, model, seed, numerics, batch, ", "contract.image");
    EXPECT(0, "train --config tiny.yml --checkpoint.save_path=run2 --resume --allow-change seed --hyperparams.seed=8 --stop-at 3",
           "resume: seed: 7 in the checkpoint, 8 now");
}

/* Not finite: tensor, step, samples, last good checkpoint. */
static void not_finite(void **state)
{
    (void)state;
    shell("rm -rf nan");
    /* rate x decay = 10^6: weights grow so much in each step */
    tiny_must("train --config tiny.yml --checkpoint.save_path=nan --stop-at 2 --hyperparams.optimizer.weight_decay=1000");
    EXPECT(5, "train --config tiny.yml --checkpoint.save_path=nan --resume --checkpoint.max_bad_steps=3 "
              "--hyperparams.optimizer.weight_decay=1000 --hyperparams.optimizer.learning_rate=1.0e+3 "
              "--hyperparams.scheduler.num_warmup_steps=0",
           ": in it ", "episode ", "frame ", "3 steps in a row were not finite, the last of them step ",
           "the gradient of 'visual.patch_embed.proj.weight' (nan at element 0)", "last good checkpoint: nan/0_2");
}

/* `name` becomes the weights file `from` with one element all ones, which is NaN in every type. */
static void poison(const char *name, const char *from, const char *tensor, size_t element)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *file;
    size_t size;
    char *data = tiny_read(from, &size);
    assert_ok(vlai_safetensors_open_memory(data, size, from, &file, &err), err);
    const vlai_tensor_view *v = vlai_safetensors_find(file, tensor);
    assert_non_null(v);
    size_t each = vla_dtype_size(v->dtype), place = (size_t)((const char *)v->data - data) + element * each;
    vlai_safetensors_close(file);
    memset(data + place, 0xFF, each);
    put(name, data, size);
    vlai_free(data);
}

/* Weights that are not finite end the load, before a step is taken: file, tensor, element, value. A conversion copies them. */
static void weights_that_are_not_finite(void **state)
{
    (void)state;
    static const char said[] = "start/model.safetensors: tensor 'visual.patch_embed.proj.weight' is nan at element 5, wanted a finite number";
    char file[128];
    shell("rm -rf bad fine && mkdir bad && cp -r start bad/start");
    poison("bad/start/model.safetensors", "start/model.safetensors", "visual.patch_embed.proj.weight", 5);
    snprintf(file, sizeof file, "bad/%s", said);
    EXPECT(5, "train --config tiny.yml --checkpoint.save_path=bad/run --checkpoint.resume_from=bad/start/model.safetensors", file,
           "take another file or an older checkpoint");
    EXPECT(5, "train --config tiny.yml --checkpoint.save_path=bad/run --checkpoint.resume_from=null --model.pretrained_path=bad/start", file,
           "take another file");
    shell("! grep -q 'is not finite with' log && ! ls -d bad/run/*_*");
    tiny_must("train --config tiny.yml --checkpoint.save_path=fine --stop-at 1");
    EXPECT(5, "predict fine --weights bad/start/model.safetensors", file, "take another file");
    tiny_must("convert bad/start bad/made");
    EXPECT(5, "train --config tiny.yml --checkpoint.save_path=bad/run --checkpoint.resume_from=bad/made/model.safetensors",
           "bad/made/model.safetensors: tensor 'visual.patch_embed.proj.weight' is nan at element 5");
}

/* Numbers past what a 64-bit integer holds, that are none, or that nothing can be made of; options that contradict each other.
 * Each is refused before anything is read or written, with the option, the value and what was wanted. */
static void senseless_arguments(void **state)
{
    (void)state;
    static const struct {
        const char *arguments;
        const char *parts[PARTS];
    } rows[] = {
        {"train --config tiny.yml --stop-at 99999999999999999999", {"--stop-at '99999999999999999999'", "from 1 to 1000000000000000"}},
        {"train --config=", {"--config ''", "not empty"}},
        {"synth none --cameras ..", {"--cameras: '..' cannot name a feature"}},
        {"train --config tiny.yml --checkpoint.save_path=none --data.key_mappings=null", {"--data.key_mappings=null: data.key_mappings is a section of keys", "of a single key"}},
        {"train --config tiny.yml --checkpoint.save_path=none --hyperparams.seed=[", {"--hyperparams.seed=[: the value is not valid YAML", "quote the value"}},
        {"train --config tiny.yml --checkpoint.save_path=none --hyperparams.optimizer.eps=0", {"hyperparams.optimizer.eps is the number 0", "above 0"}},
        {"train --config tiny.yml --checkpoint.save_path=none --hyperparams.batch_size_per_gpu=", {"--hyperparams.batch_size_per_gpu=: an empty value", "null"}},
        {"train --config tiny.yml --checkpoint.save_path=none --task.dof_config={\"\":3}", {"task.dof_config: an entry has an empty name"}},
        {"train --config tiny.yml --checkpoint.save_path=none --data.lerobot_config.episodes=[]", {"data.lerobot_config.episodes", "an empty list", "null takes all"}},
        {"train --config tiny.yml --checkpoint.save_path=none --logging.save_interval=2000000000000000", {"of at least 1 and at most 1e15"}},
        {"preflight --config=tiny.yml --ranks=4097", {"--ranks 4097", "1 to 4096"}},
        {"norm-stats --data_root set --hyperparams.seed=5", {"'--hyperparams.seed=5'", "--train_config"}},
        {"norm-stats --train_config tiny.yml --task.dof_config=", {"task.dof_config is required and missing", "a map of names to widths"}},
        {"norm-stats --train_config tiny.yml --threads 4097", {"--threads '4097'", "from 0 to 4096"}},
        {"config --hyperparams.seed=5", {"'--hyperparams.seed=5'", "vla config --config FILE"}},
        {"config nothing", {"'nothing' is not a section"}},
        {"launch --time-limit nan train --config tiny.yml", {"--time-limit 'nan'", "a number"}},
        {"launch --nnodes 4097 train --config tiny.yml", {"--nnodes 4097", "1 to 4096"}},
        {"launch --nproc 2 --gpus 3 train --config tiny.yml", {"--nproc '2' and --gpus '3'"}},
        {"predict run --steps 100001", {"steps: 100001", "0 to 100000"}},
        {"predict run --batch 4097", {"batch: 4097", "1 to 4096"}},
        {"predict run run", {"2 checkpoints or run folders were named"}},
        {"parity --device tpu none", {"--device 'tpu'", "cpu, cuda"}},
        {"parity", {"no folder was named"}},
        {"parity --draws 2 none", {"--draws", "--numerics bf16"}},
        {"inspect plan --config tiny.yml --grid 3x5", {"grid 1 x 3 x 5", "multiples of 2"}},
        {"inspect plan --config tiny.yml --ranks 4097", {"--ranks '4097'", "1 to 4096"}},
        {"inspect plan --config tiny.yml --text --json", {"--text and --json exclude each other"}},
        {"inspect batch --config tiny.yml --validation --step 1000", {"--step 1000", "held-out samples make"}},
        {"inspect batch --config tiny.yml --step 1000000000000001", {"from 1 to 1000000000000000"}},
        {"bench --config tiny.yml --plain --switches", {"--plain and --switches exclude each other"}},
        {"bench --config tiny.yml --batch 1 --batches 2", {"--batch and --batches exclude each other"}},
        {"bench --config tiny.yml --loader --batch 2", {"--loader and --batch exclude each other"}},
        {"bench --config tiny.yml --seconds 0", {"--seconds 0", "above 0"}},
        {"bench --config tiny.yml --memory-limit -1", {"--memory-limit -1", "0 to 10^6"}},
        {"bench --config tiny.yml --text-tokens 1000001", {"--text-tokens 1000001", "at most 1000000"}},
        {"bench --config tiny.yml --against none", {"--against goes with --nproc"}},
        {"init none --preset demo --threads 4097", {"--threads: 4097", "0 to 4096"}},
        {"init none --preset demo --seed -1", {"--seed: '-1' is not a whole number"}},
        {"init none --preset demo --dry-run=1", {"--dry-run takes no value"}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect(2, rows[i].arguments, rows[i].parts);
    assert_false(vlai_is_dir(at("none")));
    EXPECT(0, "parity --draws 2 --numerics bf16 " VLA_TEST_ROOT "/tests/golden/wallx-lr", "1 passed", "--draws: nothing was drawn");
    EXPECT(0, "help synth", "Usage: vla synth OUT");
    EXPECT(0, "help", "Usage: vla COMMAND");
}

/* A variable of the shell that is not set leaves an empty argument, not the name of a folder. */
static void empty_arguments(void **state)
{
    (void)state;
    static const char *const commands[] = {"check", "check set", "predict", "report", "convert start", "inspect dataset", "parity"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char line[512];
        snprintf(line, sizeof line, "{ " VLA_TEST_PROGRAM " %s \"$NO_SUCH_VARIABLE\" >log 2>&1; [ $? = 2 ]; } && grep -q 'an empty argument' log", commands[i]);
        shell(line);
    }
}

/* One episode of one frame: everything runs, and what cannot be had is '-' instead of a number. */
static void the_smallest_set(void **state)
{
    (void)state;
    shell("rm -rf small smallest.json");
    tiny_must("synth small --episodes 1 --length 1 --size 64x64 --state-dim 3 --action-dim 3");
    tiny_must("check --full small");
    tiny_must("norm-stats --train_config tiny.yml --data.lerobot_config.repo_id=small --output_path smallest.json");
    tiny_must("train --config tiny.yml --data.lerobot_config.repo_id=small --data.norm_stats_path=smallest.json --data.train_test_split=1 "
              "--hyperparams.batch_size_per_gpu=1 --checkpoint.save_path=smallest --stop-at 2");
    tiny_must("predict smallest");
    tiny_said("of the mean action 0 (over 1 training frames): - of it");
    shell("! grep -qw nan log && grep -q '^  step 3 of the horizon  *-  *-  *-  *-  *-$' log");
    tiny_must("report smallest");
}

/* A switch of performance that is neither 0 nor 1, and a number that is none. */
static void senseless_environment(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"WALLX_PERF_COMPILE=false", "WALLX_PERF_COMPILE is 'false'", "wanted 1 (on) or 0 (off)"},
        {"WALLX_PERF_LOG=2", "WALLX_PERF_LOG is '2'", "wanted 1 (on) or 0 (off)"},
        {"WALLX_PERF_BUCKET=many", "WALLX_PERF_BUCKET is 'many'", "from 1 to 1000000"},
        {"WALLX_PERF_COMPILE_RECOMP_LIMIT=1", "WALLX_PERF_COMPILE_RECOMP_LIMIT is '1'", "from 2 to 1000000"},
    };
    static const char *const commands[] = {"train --config tiny.yml --checkpoint.save_path=none", "preflight --config tiny.yml",
                                           "bench --config tiny.yml --batch 1 --steps 1 --side 56"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int c = 0; c < 3; c++) {
            assert_int_equal(tiny_run(rows[i][0], commands[c]), 2);
            tiny_said(rows[i][1]);
            tiny_said(rows[i][2]);
        }
    assert_int_equal(tiny_run("WALLX_PERF_COMPILE=0 WALLX_PERF_BUCKET=0 OPTIMIZER_FUSED=", "preflight --config tiny.yml"), 0);
    char *text = tiny_read("log", NULL);
    assert_null(strstr(text, "is no switch"));
    vlai_free(text);
    assert_int_equal(tiny_run("WALLX_PERF_COMPIL=1 WALLX_PERF_QUANTUM=1", "train --config tiny.yml --checkpoint.save_path=switched --stop-at 1"), 0);
    tiny_said("environment: WALLX_PERF_COMPIL is no switch and has no effect: did you mean WALLX_PERF_COMPILE?");
    tiny_said("environment: WALLX_PERF_QUANTUM is no switch and has no effect");
}

/* A frame cache on a full file system in memory: training goes on without it, with the same numbers. */
static void full_cache(void **state)
{
    (void)state;
    shell("rm -rf cache && mkdir cache");
    if (system("unshare -Urm sh -c 'mount -t tmpfs -o size=8k tmpfs /tmp' >/dev/null 2>&1") != 0) {
        print_message("a small file system cannot be had\n");
        skip();
    }
    tiny_must("train --config tiny.yml --checkpoint.save_path=uncached --stop-at 3");
    shell("unshare -Urm sh -c 'mount -t tmpfs -o size=4k tmpfs cache && exec " VLA_TEST_PROGRAM " train --config tiny.yml --checkpoint.save_path=cached --stop-at 3 "
          "--data.frame_cache_gb=1 --data.frame_cache_dir=cache' >log 2>&1");
    EXPECT(0, "report cached --against uncached --rtol 0", "PASS: 3 steps");
    /* What is free and what is needed are told apart at any size. */
    shell("{ unshare -Urm sh -c 'mount -t tmpfs -o size=1200k tmpfs cache && exec " VLA_TEST_PROGRAM " train --config tiny.yml --checkpoint.save_path=cache/run --stop-at 3' "
          ">log 2>&1; [ $? = 3 ]; } && grep -q 'no room for the checkpoints: 0.00[0-9]* GB each' log && ! grep -Eq '(0|0.00[01]) GB (each|free)' log");
}

/* A folder or a device where a file is wanted, and the other way round. */
static void kinds_of_files(void **state)
{
    (void)state;
    EXPECT(3, "train --config set", "set: is a folder, wanted a file");
    EXPECT(3, "train --config /dev/null", "/dev/null: is no regular file");
    shell("rm -f pipe && mkfifo pipe");
    EXPECT(3, "train --config pipe", "pipe: is no regular file"); /* and not: waits for a writer */
    static const char *const pieces[] = {"data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet",
                                         "videos/observation.images.image/chunk-000/file-000.mp4"};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        char command[256], place[128];
        snprintf(command, sizeof command, "rm -rf piped && cp -r set piped && rm piped/%s && mkfifo piped/%s", pieces[i], pieces[i]);
        shell(command);
        snprintf(place, sizeof place, "piped/%s: not a regular file", pieces[i]);
        EXPECT(3, "norm-stats --data_root piped --output_path none.json", place);
        EXPECT(3, "check piped", "not a regular file");
    }
    shell("mkdir -p unlogged && touch unlogged/logs");
    EXPECT(0, "train --config tiny.yml --checkpoint.save_path=unlogged --stop-at 1", "unlogged: a log cannot be written there");
    EXPECT(3, "predict start/model.safetensors", "start/model.safetensors: is a file, wanted a checkpoint folder");
    tiny_must("train --config tiny.yml --checkpoint.save_path=kinds --stop-at 1");
    EXPECT(3, "predict kinds --out tiny.yml", "tiny.yml: exists and is not a directory");
    char *text = tiny_read("log", NULL);
    assert_null(strstr(text, "mean L1 error")); /* found out before the work */
    vlai_free(text);
    EXPECT(3, "inspect batch --config tiny.yml --out tiny.yml", "tiny.yml: exists and is not a directory");
    EXPECT(3, "parity " VLA_TEST_ROOT "/tests/golden/wallx-order set", "set: no case.json in it"); /* whatever stands beside it */
}

/* A name that is no UTF-8: JSON is written all the same, with U+FFFD for the bytes that it cannot hold. */
static void names_of_any_bytes(void **state)
{
    (void)state;
    shell("rm -rf caf\xe9 && cp -rL set caf\xe9");
    EXPECT(0, "inspect dataset --json caf\xe9", "caf\xef\xbf\xbd\"", "\"episodes\"");
    shell("rm caf\xe9/meta/info.json");
    EXPECT(3, "check --json caf\xe9", "{\"set\":\"caf\\uFFFD\"", "the file is missing");
    shell("rm -r caf\xe9");
}

/* Folders and files that may not be looked at are not taken for absent: a run does not begin anew, a set is not "no such". Root may
 * look at all, so that the program runs as another user then; where it cannot, the test says so and is skipped. */
#define AS_NOBODY "setpriv --reuid=65534 --regid=65534 --clear-groups "
static void forbidden(void **state)
{
    (void)state;
    bool root = geteuid() == 0;
    char line[1024];
    if (root && system(AS_NOBODY VLA_TEST_PROGRAM " --version >/dev/null 2>&1") != 0) {
        print_message("another user cannot be had, or not reach " VLA_TEST_PROGRAM "\n");
        skip();
    }
    shell("rm -rf closed && mkdir closed && cp -rL set start tiny.yml norm_stats.json closed && chmod 755 .");
    if (root)
        shell("chown -R 65534 closed");
    snprintf(line, sizeof line, "cd closed && %s" VLA_TEST_PROGRAM " train --config tiny.yml --stop-at 2 >../log 2>&1", root ? AS_NOBODY : "");
    shell(line);
    snprintf(line, sizeof line, "chmod 000 closed/run/0_2 && cd closed && { %s" VLA_TEST_PROGRAM " train --config tiny.yml --resume >../log 2>&1; [ $? = 3 ]; }; "
             "c=$?; chmod 755 run/0_2; exit $c", root ? AS_NOBODY : "");
    shell(line);
    tiny_said("run/0_2/DONE: cannot stat: Permission denied");
    tiny_said("no checkpoint in run can be resumed");
    snprintf(line, sizeof line, "chmod 000 closed/set && cd closed && { %s" VLA_TEST_PROGRAM " train --config tiny.yml >../log 2>&1; [ $? = 3 ]; }; "
             "c=$?; chmod 755 set; exit $c", root ? AS_NOBODY : "");
    shell(line);
    tiny_said("set/meta/info.json: cannot open: Permission denied");
    /* Nor is what may not be looked at said to be missing, or passed over in silence. */
    static const struct {
        const char *closed, *command;
        int code;
        const char *part;
    } rows[] = {
        {"set/meta", "check set", 3, "meta/info.json: the file is not readable (no permission, or no regular file)"},
        {"set/meta/info.json", "check set", 3, "look at the rights of the file"},
        {"set/meta/tasks.parquet", "check set", 3, "meta/tasks.parquet: the file is not readable (no permission"},
        {"set/videos", "check set", 3, "cannot open: Permission denied"},
        {"set/data", "check set", 3, "Permission denied"},
        {"sets/hidden", "check sets", 0, "sets/hidden: cannot open directory: Permission denied: no data set is looked for there"},
        {"run", "report run", 3, "run: cannot open: Permission denied"},
    };
    shell("mkdir -p closed/sets/hidden && cp -r closed/set closed/sets/open");
    if (root)
        shell("chown -R 65534 closed/sets");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(line, sizeof line, "cd closed && mode=$(stat -c %%a %s) && chmod 000 %s && { %s" VLA_TEST_PROGRAM " %s >../log 2>&1; [ $? = %d ]; }; "
                 "c=$?; chmod $mode %s; exit $c", rows[i].closed, rows[i].closed, root ? AS_NOBODY : "", rows[i].command, rows[i].code, rows[i].closed);
        shell(line);
        tiny_said(rows[i].part);
    }
}

/* What resuming may pass over is one of what it compares, with a checkpoint or without. */
static void allowed_names(void **state)
{
    (void)state;
    shell("rm -rf names");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=names --stop-at 1 --allow-change sed", "--allow-change: a state has no 'sed'", "seed", "batch",
           "contract", "or all");
    tiny_must("train --config tiny.yml --checkpoint.save_path=names --stop-at 1 --allow-change seed,data,contract.action");
    EXPECT(2, "train --config tiny.yml --checkpoint.save_path=names --resume --stop-at 2 --allow-change seed,nothing", "--allow-change: a state has no 'nothing'");
    tiny_must("train --config tiny.yml --checkpoint.save_path=names --resume --stop-at 2 --allow-change seed,data.digest");
}

/* Where no checkpoint of a run can be read, --resume does not begin anew; a path that is too long is not passed over either. */
static void resume_of_what_is_damaged(void **state)
{
    (void)state;
    char line[8192], name[201];
    shell("rm -rf hurt");
    tiny_must("train --config tiny.yml --checkpoint.save_path=hurt --stop-at 2");
    shell("cp -r hurt hurt2 && truncate -s 10 hurt/0_2/model.safetensors && truncate -s 10 hurt2/0_2/checksums.json");
    EXPECT(3, "train --config tiny.yml --checkpoint.save_path=hurt --resume", "hurt/0_2/model.safetensors", "10 bytes", "no checkpoint in hurt can be resumed",
           "rename it");
    EXPECT(3, "train --config tiny.yml --checkpoint.save_path=hurt2 --resume=hurt2/0_2", "hurt2/0_2/checksums.json", "the checkpoint is damaged",
           "take an older checkpoint");
    assert_true(vlai_is_dir(at("hurt/0_2")));
    shell("mv hurt/0_2 hurt/broken");
    tiny_must("train --config tiny.yml --checkpoint.save_path=hurt --resume --stop-at 1");
    memset(name, 'd', sizeof name - 1);
    name[sizeof name - 1] = 0;
    int at = snprintf(line, sizeof line, "train --config tiny.yml --checkpoint.save_path=hurt --resume ");
    for (int i = 0; i < 25; i++)
        at += snprintf(line + at, sizeof line - (size_t)at, "%s/", name);
    EXPECT(2, line, "path too long");
}

/* Descriptors that the parent has closed do not go to files of the run, and what cannot be printed is an error. */
static void closed_descriptors(void **state)
{
    (void)state;
    shell(VLA_TEST_PROGRAM " train --config tiny.yml --checkpoint.save_path=shut --stop-at 2 <&- >&- 2>&-");
    EXPECT(0, "inspect checkpoint shut", "0_2: whole; step 2");
    shell("head -c 10 shut/metrics.jsonl | grep -q '^{\"step\": 1'");
    shell("[ \"$(wc -l <shut/metrics.jsonl)\" = 2 ]");
    shell("{ " VLA_TEST_PROGRAM " config >&- 2>log; [ $? = 3 ]; } && grep -q 'the output could not be written' log");
}

/* Limits of memory under which libraries crash or hang are said instead, by every command. Below 300 MB libraries are not even
 * loaded, and a sanitizer's program runs under none: both end with codes of their own. */
static void limits_of_memory(void **state)
{
    (void)state;
    shell("(ulimit -s 128; " VLA_TEST_PROGRAM " check set >log 2>&1; [ $? = 4 ]) && grep -q 'the stack is limited to 128 kB, wanted 256 kB' log");
    shell("for kb in $(seq 100000 50000 600000); do (ulimit -v $kb; timeout -s KILL 60 " VLA_TEST_PROGRAM " --version >log 2>&1; c=$?; "
          "[ $c != 137 ] && { [ $c != 4 ] || grep -q 'the address space is limited to' log; }) || exit 1; done");
    shell("(ulimit -v 400000; timeout -s KILL 60 " VLA_TEST_PROGRAM " train --config tiny.yml --checkpoint.save_path=tight >log 2>&1; [ $? != 0 ] && [ $? != 137 ])");
}

/* A signal while a set, a model or a file of weights is written leaves nothing of it behind, or, when it comes last, all. */
static void signals_leave_nothing(void **state)
{
    (void)state;
    static const char *const commands[] = {
        "synth gone --episodes 2000 --length 20 --size 128x128 --storage image",
        "init gone/ --preset demo --hidden 1024 --heads 4 --layers 8 --intermediate 4096",
        "convert big gone",
        "convert big gone.safetensors",
    };
    shell("mkdir -p alone");
    tiny_must("init alone/big --preset demo --hidden 1024 --heads 4 --layers 4 --intermediate 4096");
    for (size_t c = 0; c < sizeof commands / sizeof *commands; c++)
        for (int ms = 20; ms < 700; ms = ms * 7 / 4) {
            char line[1024];
            snprintf(line, sizeof line,
                     "cd alone && { timeout --preserve-status -s %s 0.%03d " VLA_TEST_PROGRAM " %s >../log 2>&1; c=$?; "
                     "[ $c = 0 ] || { [ $c = %d ] && [ -z \"$(find . -name '*tmp*')\" ] && "
                     "{ [ \"$(ls -A)\" = big ] || [ -f gone.safetensors ] || [ -f gone/config.json ] || [ -f gone/meta/info.json ]; }; } || "
                     "{ echo code $c; ls -lAR; tail -n 5 ../log; exit 1; }; } && rm -rf gone*",
                     ms % 2 ? "INT" : "TERM", ms, commands[c], ms % 2 ? 130 : 143);
            shell(line);
        }
    shell("rm -rf alone");
}

/* A full disk behind it leaves no folder that was made for the weights; a run folder stands for its newest checkpoint. */
static void conversions(void **state)
{
    (void)state;
    shell("rm -rf made && { (ulimit -f 100; " VLA_TEST_PROGRAM " convert start made >log 2>&1); [ $? = 3 ]; } && grep -q 'cannot write: File too large' log && "
          "! [ -e made ]");
    shell("mkdir made && cp tiny.yml made && { (ulimit -f 100; " VLA_TEST_PROGRAM " convert start made >log 2>&1); [ $? = 3 ]; } && [ \"$(ls -A made)\" = tiny.yml ]");
    tiny_must("train --config tiny.yml --checkpoint.save_path=newest --stop-at 2");
    EXPECT(0, "convert newest made", "source: newest/0_2\n", "62 written to made");
    EXPECT(0, "inspect checkpoint newest", "0_2: whole");
    shell("cmp made/config.json newest/0_2/config.json");
    shell("cp -r newest emptied && rm -r emptied/0_2");
    EXPECT(3, "convert emptied made", "emptied: no whole checkpoint in it");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(senseless_arguments), cmocka_unit_test(empty_arguments), cmocka_unit_test(full_cache), cmocka_unit_test(the_smallest_set), cmocka_unit_test(senseless_environment), cmocka_unit_test(kinds_of_files), cmocka_unit_test(names_of_any_bytes),
        cmocka_unit_test(forbidden),
        cmocka_unit_test(allowed_names), cmocka_unit_test(resume_of_what_is_damaged), cmocka_unit_test(closed_descriptors),
        cmocka_unit_test(limits_of_memory), cmocka_unit_test(signals_leave_nothing), cmocka_unit_test(conversions),
        cmocka_unit_test(unsupported_set), cmocka_unit_test(partial_download), cmocka_unit_test(frame_count),
        cmocka_unit_test(constant_dimension), cmocka_unit_test(cameras), cmocka_unit_test(slots), cmocka_unit_test(another_processor), cmocka_unit_test(disk),
        cmocka_unit_test(output_that_does_not_fit), cmocka_unit_test(episodes_listed_twice), cmocka_unit_test(instruction_bytes),
        cmocka_unit_test(resume_with_changes), cmocka_unit_test(not_finite), cmocka_unit_test(weights_that_are_not_finite),
    };
    return cmocka_run_group_tests(tests, tiny_make, drop_root);
}
