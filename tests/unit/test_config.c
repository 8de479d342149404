/* The training configuration: what the shipped files mean, every kind of error with its sentence, overrides, variables. */
#include "alloc.h"
#include "test.h"

#include "train/config_internal.h"

#include "base/io.h"
#include "base/memory.h"
#include "optim/settings.h"
#include "train/config.h"
#include "train/switches.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static vlai_config *parse(const char *text, const char *const *overrides, size_t count)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_config *config = NULL;
    assert_ok(vlai_config_parse(text, strlen(text), "t.yml", overrides, count, &config, &err), err);
    return config;
}

static bool has_notice(const vlai_config *c, const char *part)
{
    for (size_t i = 0; i < c->notice_count; i++)
        if (strstr(c->notices[i], part))
            return true;
    return false;
}

static void shipped_libero(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_config *c;
    assert_ok(vlai_config_load(VLA_TEST_ROOT "/workspace/example/libero.yml", NULL, 0, &c, &err), err);
    assert_int_equal(c->action_dim, 26);
    assert_int_equal(c->propri_dim, 26);
    assert_string_equal(c->task.dof_config.names[2], "master_right_gripper");
    assert_int_equal(c->task.dof_config.values[3], 19);
    assert_true(c->task.action_horizon == 10 && c->task.action_horizon_flow == 10);
    assert_true(c->task.use_state_string_representation && !c->reference_model.use_state_string_representation);
    assert_int_equal(c->reference_model.action_horizon_flow, 32);
    assert_true(c->optimizer.learning_rate == 5e-5 && c->optimizer.betas.values[1] == 0.95);
    assert_true(c->optimizer.eps == 1e-8 && c->optimizer.weight_decay == 1e-8 && c->optimizer.max_grad_norm == 1);
    assert_true(c->scheduler.min_lr == 1e-6 && c->scheduler.num_warmup_steps == 1000);
    assert_true(c->scheduler.num_training_steps == 200000 && c->scheduler.scheduler_type == VLAI_SCHEDULER_COSINE);
    assert_true(c->hyperparams.batch_size_per_gpu == 4 && c->hyperparams.gradient_accumulation_steps == 4);
    assert_true(c->hyperparams.seed == 10222 && c->top.eval_batch_size_per_gpu == 4);
    assert_string_equal(c->keys.camera.names[1], "observation.images.rightImg");
    assert_string_equal(c->keys.camera.values[1], "right_wrist_view");
    assert_true(c->data.resolution.count == 2 && c->data.max_length == 1024 && c->data.state_bins == 256);
    assert_true(c->model.ar_loss_weight == 0.01 && c->model.flow_loss_weight == 1 && c->model.attn_deterministic);
    assert_int_equal(c->notice_count, 0);
    vlai_config_destroy(c);

    assert_ok(vlai_config_load(VLA_TEST_ROOT "/configs/libero_local_perf.yml", NULL, 0, &c, &err), err);
    assert_true(c->hyperparams.batch_size_per_gpu == 26 && c->data.num_workers == 16);
    assert_true(c->hyperparams.gradient_accumulation_steps == 1 && !c->distributed.use_fsdp);
    assert_true(c->scheduler.num_training_steps == 30 && c->scheduler.num_warmup_steps == 15);
    vlai_config_destroy(c);
}

/* Defaults where the reference has the key. */
static void defaults(void **state)
{
    (void)state;
    vlai_config *c = parse("model_type: qwen2_5\ntask:\nmodel: ~\ndata: {}\n", NULL, 0);
    assert_true(c->task.action_horizon == 32 && c->task.action_horizon_flow == 32);
    assert_true(c->optimizer.learning_rate == 1e-4 && c->scheduler.min_lr == 0.1 * 1e-4);
    assert_true(c->optimizer.betas.count == 2 && c->optimizer.betas.values[0] == 0.9 && c->optimizer.betas.values[1] == 0.98);
    assert_true(c->data.train_test_split == 0.95 && c->data.num_workers == 4 && c->data.max_length == 768);
    assert_true(c->data.resolution.count == 3 && c->data.resolution.values[2] == 256);
    assert_true(c->hyperparams.seed == 42 && c->logging.save_interval == 1000 && c->logging.val_interval == 4000);
    assert_string_equal(c->checkpoint.save_path, "./ckpt");
    assert_true(c->noise.beta_alpha == 1.5 && c->noise.s == 0.999 && c->noise.time_shift == 1);
    assert_true(c->data.padding == VLAI_PADDING_PACKED && c->data.validation_split == VLAI_SPLIT_EPISODE);
    assert_true(c->memory.recompute == VLAI_RECOMPUTE_NONE && c->training.numerics == VLAI_NUMERICS_AUTO);
    assert_null(c->data.priority_order.names);
    assert_string_equal(c->base_group, "base");
    vlai_config_destroy(c);
}

static void refused_line(const char *text, vla_status status, const char *part, const char *hint)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_config *config;
    char whole[4096];
    snprintf(whole, sizeof whole, "model_type: qwen2_5\n%s", text);
    assert_fails(vlai_config_parse(whole, strlen(whole), "t.yml", NULL, 0, &config, &err), status, err, part);
    assert_null(config);
    if (hint && !strstr(err.hint, hint))
        fail_msg("hint '%s' lacks '%s'", err.hint, hint);
}

/* Keys of the reference that say the same as ours. */
static void keys_of_the_reference_act(void **state)
{
    (void)state;
    static const struct {
        const char *overrides[3];
        int attention, bucket, gradients;
    } rows[] = {{{NULL}, 0, 25, VLAI_GRADIENTS_AUTO},
                {{"model.attn_deterministic=false"}, 1, 25, VLAI_GRADIENTS_AUTO},
                {{"distributed.bucket_cap_mb=50"}, 0, 50, VLAI_GRADIENTS_AUTO},
                {{"distributed.bucket_cap_mb=50", "perf.ddp=true"}, 0, 100, VLAI_GRADIENTS_AUTO},
                {{"distributed.bucket_cap_mb=50", "perf.ddp=true", "perf.bucket=7"}, 0, 7, VLAI_GRADIENTS_AUTO},
                {{"distributed.fsdp_reduce_dtype=fp32"}, 0, 25, VLAI_GRADIENTS_AUTO}, /* it belongs to use_fsdp */
                {{"distributed.fsdp_reduce_dtype=fp32", "distributed.use_fsdp=true"}, 0, 25, VLAI_GRADIENTS_FP32},
                {{"distributed.fsdp_reduce_dtype=fp32", "distributed.use_fsdp=true", "dist.gradient_dtype=bf16"}, 0, 25, VLAI_GRADIENTS_BF16}};
    static const char *const variables[] = {"WALLX_PERF_ATTN", "ATTENTION_BACKEND", "WALLX_PERF_DDP", "WALLX_PERF_BUCKET"};
    for (int i = 0; i < 4; i++)
        unsetenv(variables[i]);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t n = 0;
        vlai_switches s;
        while (n < 3 && rows[i].overrides[n])
            n++;
        vlai_config *c = parse("model_type: qwen2_5\n", rows[i].overrides, n);
        vlai_switches_read(c, &s);
        assert_int_equal(s.attention, rows[i].attention);
        assert_int_equal(s.bucket_mb, rows[i].bucket);
        assert_int_equal(c->dist.gradient_dtype, rows[i].gradients);
        vlai_config_destroy(c);
    }
    /* a switch that needs another one says so */
    setenv("WALLX_PERF_LOG", "1", 1);
    setenv("WALLX_PERF_BUCKET", "50", 1);
    for (int ddp = 0; ddp < 2; ddp++) {
        vlai_text text = {0};
        setenv("WALLX_PERF_DDP", ddp ? "1" : "0", 1);
        vlai_switches_describe(NULL, "cuda", 2, &text);
        assert_non_null(strstr(text.data, ddp ? "[WALLX_PERF] WALLX_PERF_BUCKET=50: MB of a gradient bucket" : "[WALLX_PERF] WALLX_PERF_BUCKET=50: no effect without WALLX_PERF_DDP"));
        vlai_text_fini(&text);
    }
    for (int i = 0; i < 4; i++)
        unsetenv(variables[i]);
    /* the log's own switch is one like the others: its variable wins where it is set, and it has no line */
    static const struct {
        const char *variable, *key;
        bool log;
    } logs[] = {{NULL, "false", false}, {NULL, "true", true}, {"", "true", true}, {"0", "true", false}, {"1", "false", true}};
    for (size_t i = 0; i < sizeof logs / sizeof *logs; i++) {
        char override[64];
        const char *overrides[] = {override};
        vlai_switches s;
        vlai_text text = {0};
        vla_error err = VLA_ERROR_INIT;
        snprintf(override, sizeof override, "perf.log=%s", logs[i].key);
        if (logs[i].variable)
            setenv("WALLX_PERF_LOG", logs[i].variable, 1);
        else
            unsetenv("WALLX_PERF_LOG");
        vlai_config *c = parse("model_type: qwen2_5\n", overrides, 1);
        vlai_switches_read(c, &s);
        assert_int_equal(s.log, logs[i].log);
        vlai_switches_describe(c, "cpu", 1, &text);
        assert_int_equal(text.size, 0);
        vlai_text_fini(&text);
        assert_ok(vlai_switches_check(&err), err);
        vlai_config_destroy(c);
    }
    vla_error err = VLA_ERROR_INIT;
    setenv("WALLX_PERF_LOG", "2", 1);
    assert_fails(vlai_switches_check(&err), VLA_E_INVALID, err, "WALLX_PERF_LOG is '2', wanted 1 (on) or 0 (off)");
    unsetenv("WALLX_PERF_LOG");
}

static void errors_name_file_line_and_key(void **state)
{
    (void)state;
    const vla_status bad = VLA_E_INVALID, no = VLA_E_UNSUPPORTED, format = VLA_E_FORMAT;
    static const struct {
        const char *text;
        int status; /* 0 invalid, 1 unsupported, 2 format */
        const char *part, *hint;
    } cases[] = {
        {"hyperparams:\n  sed: 3\n", 0, "t.yml:3: unknown key 'hyperparams.sed'", "did you mean 'hyperparams.seed'?"},
        {"hyperparms:\n  seed: 3\n", 0, "t.yml:2: unknown key 'hyperparms'", "did you mean 'hyperparams'?"},
        {"hyperparams:\n  optimiser: {}\n", 0, "t.yml:3: unknown key 'hyperparams.optimiser'", "'hyperparams.optimizer'?"},
        {"batch_size_per_gpu: 3\n", 0, "t.yml:2: unknown key 'batch_size_per_gpu'", "hyperparams.batch_size_per_gpu"},
        {"data:\n  learning_rate: 3\n", 0, "unknown key 'data.learning_rate'", "hyperparams.optimizer.learning_rate"},
        {"data:\n  num_workers: many\n", 0, "t.yml:3: data.num_workers is the text 'many', wanted an integer from 0 to 1024",
         "decoding threads"},
        {"data:\n  num_workers: 2.5\n", 0, "data.num_workers is the number 2.5, wanted an integer", NULL},
        {"data:\n  num_workers: -1\n", 0, "data.num_workers is the number -1, wanted an integer from 0", NULL},
        {"data:\n  num_workers: '4'\n", 0, "data.num_workers is the text '4', wanted an integer", NULL},
        {"data:\n  num_workers: [4]\n", 0, "data.num_workers is a list of 1, wanted", NULL},
        {"data:\n  num_workers: .nan\n", 0, "data.num_workers is the number .nan, wanted", NULL},
        {"data: 3\n", 0, "t.yml:2: data is the number 3, wanted a map of keys", NULL},
        {"[]\n", 2, "not valid YAML", NULL},
        {"data:\n  train_test_split: 1.5\n", 0, "data.train_test_split is the number 1.5, wanted a number above 0, at most 1",
         NULL},
        {"hyperparams:\n  optimizer:\n    fused: 1\n", 0, "t.yml:4: hyperparams.optimizer.fused is the number 1, wanted true "
                                                          "or false", NULL},
        {"hyperparams:\n  optimizer:\n    betas: [0.9]\n", 0, "t.yml:4: hyperparams.optimizer.betas has 1 numbers, wanted 2",
         NULL},
        {"hyperparams:\n  optimizer:\n    betas: [0.9, 1.0]\n", 0, "betas: entry 1 is the number 1.0, wanted a list of "
                                                                   "numbers from 0 to below 1", NULL},
        {"hyperparams:\n  optimizer: {optimizer_type: dmuon}\n", 1, "optimizer_type: 'dmuon' is refused, wanted one of adamw",
         "Muon"},
        {"hyperparams:\n  optimizer: {optimizer_type: sgd}\n", 0, "optimizer_type is the text 'sgd', wanted one of adamw",
         NULL},
        {"hyperparams:\n  scheduler: {scheduler_type: step}\n", 1, "scheduler_type: 'step' is refused", "cosine or constant"},
        {"task:\n  dof_config: {a: 0}\n", 0, "task.dof_config: a is the number 0, wanted a map of names to integers from 1",
         NULL},
        {"task:\n  dof_config: [7]\n", 0, "task.dof_config is a list of 1, wanted a map of names", NULL},
        {"task:\n  dof_config: {a: 4096, b: 1}\n", 0, "task.dof_config: the widths sum to 4097", NULL},
        {"data:\n  key_mappings:\n    camera: {cam: [x]}\n", 0, "data.key_mappings.camera: cam is a list of 1", NULL},
        {"data:\n  resolution: {face_view: 0}\n", 0, "data.resolution: face_view is 0", NULL},
        {"data:\n  lerobot_config: {episodes: [0, 1.5]}\n", 0, "entry 1 is 1.5, wanted an integer", NULL},
        {"data:\n  dataset_type: x2robot\n", 0, "data.dataset_type is the text 'x2robot', wanted one of lerobot", NULL},
        {"data:\n  use_fast_tokenizer: true\n", 0, "t.yml:3: data.use_fast_tokenizer needs a processor", "data.action_tokenizer_path"},
        {"model:\n  action_tokenizer_type: spatialvla\n", 1, "model.action_tokenizer_type: 'spatialvla' is refused", "null, or fast"},
        {"model:\n  action_tokenizer_config_dir: x\n", 1, "action_tokenizer_config_dir: the text 'x' is refused: it belongs to spatialvla", NULL},
        {"model:\n  use_ema: true\n", 1, "model.use_ema: true is refused", "leave the key out"},
        {"model:\n  new_special_tokens: ['<x>']\n", 1, "new_special_tokens: a list of 1 is refused", NULL},
        {"distributed:\n  bf16: false\n", 1, "distributed.bf16: false is refused: fp16", NULL},
        {"distributed:\n  use_amp: true\n", 1, "distributed.use_amp: true is refused", NULL},
        {"distributed:\n  fsdp_cpu_offload: yes\n", 1, "fsdp_cpu_offload: true is refused", NULL},
        {"seed: 1\nseed: 2\n", 2, "t.yml:3: key 'seed' stands already in line 2", "keep one"},
        {"data:\n  num_workers: 1\n  num_workers: 2\n", 2, "t.yml:4: key 'num_workers' stands already in line 3", NULL},
        {"data: {\n", 2, "not valid YAML", NULL},
        {"---\nmodel_type: qwen2_5\n", 2, "t.yml:2: a second document begins", NULL},
        {"data: *nowhere\n", 2, "not valid YAML", NULL},
        {"data:\n  lerobot_config: {repo_id: ${NAME}}\n", 2, "t.yml:3:30: not valid YAML", "a ${NAME} must stand between quotation marks"},
        {"data: {\n# a caf\xe9\n", 2, "t.yml:3:8: not valid YAML", "save the file as UTF-8"},
        {"data: &a\n  lerobot_config: *a\n", 2, "levels deep", NULL},
        {"checkpoint:\n  save_path: ${VLA_TEST_UNSET}\n", 0, "t.yml:3: the environment variable VLA_TEST_UNSET is not set",
         "${NAME:-default}"},
        {"checkpoint:\n  save_path: ${VLA TEST}\n", 0, "is not of the form ${NAME} or ${NAME:-default}", "$${"},
        {"checkpoint:\n  save_path: a${VLA_TEST\n", 0, "is not of the form", NULL},
        {"hyperparams:\n  optimizer:\n    lr_groups:\n      - {name: a, lr: 1.0e-4, includes: [x]}\n", 0,
         "t.yml:5: an entry of lr_groups has the unknown key 'includes'", "include (list of texts)"},
        {"hyperparams:\n  optimizer:\n    lr_groups:\n      - {name: a, lr: fast, include: [x]}\n", 0,
         "a value of the wrong type under 'lr'", NULL},
        {"hyperparams:\n  optimizer:\n    lr_groups:\n      - {name: a, include: [x]}\n", 0, "lacks its lr", NULL},
        {"hyperparams:\n  optimizer:\n    lr_groups:\n      - {name: a, lr: 1}\n", 0, "lacks a part of a parameter name", NULL},
        {"hyperparams:\n  optimizer:\n    lr_groups:\n    - {name: base, lr: 1, include: [x]}\n", 0,
         "'base' cannot name a group", NULL},
        {"hyperparams:\n  optimizer:\n    lr_groups:\n    - {name: a/b, lr: 1, include: [x]}\n", 0,
         "'a/b' cannot name a group", NULL},
        {"hyperparams:\n  optimizer:\n    lr_groups: [{name: a, lr: 1, include: [x]}, {name: a, lr: 2, include: [y]}]\n", 0,
         "two groups are named 'a'", NULL},
        {"hyperparams:\n  optimizer:\n    action_expert_learning_rate: 1.0e-3\n"
         "    lr_groups: [{name: a, lr: 1, include: [x]}]\n", 0, "stands beside lr_groups", NULL},
        {"hyperparams:\n  optimizer:\n    train_action_expert_only: true\n", 0, "everything would be frozen", NULL},
        {"hyperparams:\n  optimizer:\n    action_lr_keywords: [x]\n", 0, "needs action_expert_learning_rate", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused_line(cases[i].text, cases[i].status == 0 ? bad : cases[i].status == 1 ? no : format, cases[i].part,
                     cases[i].hint);
    vla_error err = VLA_ERROR_INIT;
    vlai_config *c;
    assert_fails(vlai_config_parse("# nothing\n", 10, "t.yml", NULL, 0, &c, &err), bad, err, "Config file is empty: t.yml");
    assert_fails(vlai_config_parse("task: {}\n", 9, "t.yml", NULL, 0, &c, &err), bad, err,
                 "Missing required field 'model_type' in t.yml");
    assert_fails(vlai_config_parse("- 3\n", 4, "t.yml", NULL, 0, &c, &err), bad, err, "t.yml:1: the file is a list of 1");
    assert_fails(vlai_config_load("/nonexistent/t.yml", NULL, 0, &c, &err), VLA_E_NOT_FOUND, err, "/nonexistent/t.yml");
}

/* A short trial of a long run's configuration: the reference trains it, all of it in the warm-up. */
static void warm_up_beyond_the_end(void **state)
{
    (void)state;
    vlai_config *c = parse("model_type: qwen2_5\nhyperparams:\n  scheduler: {num_warmup_steps: 9, num_training_steps: 8}\n", NULL, 0);
    assert_true(has_notice(c, "t.yml:3: hyperparams.scheduler.num_warmup_steps is 9, more than num_training_steps 8"));
    vlai_schedule s = vlai_settings_schedule(c);
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_schedule_check(&s, &err), err);
    for (int t = 0; t < 8; t++) /* i + (peak - i) t / W with i = peak / (W + 1) */
        assert_float_equal(vlai_schedule_factor(&s, t), 0.1 + 0.9 * t / 9, 1e-15);
    vlai_config_destroy(c);
}

/* Slips in names of views, which the maps of views let through: what is without an entry beside one that is not used. */
static void names_of_views(void **state)
{
    (void)state;
    static const struct {
        const char *data, *notice; /* NULL: none */
    } cases[] = {
        {"  resolution: {face_view: 56, left_wrist_view: 56, right_wrist_view: 56}\n  key_mappings: {camera: {a: face_view}}\n", NULL},
        {"  resolution: {face_view: 56}\n  key_mappings: {camera: {a: face_view, b: right_wrist_view}}\n", NULL},
        {"  resolution: {face_view: 56, rigth_wrist_view: 56}\n  key_mappings: {camera: {a: face_view, b: right_wrist_view}}\n",
         "t.yml:3: data.resolution: no camera of data.key_mappings.camera is 'rigth_wrist_view', and 'right_wrist_view' has no entry: its pictures keep"},
        {"  camera_name_mapping: {face: front view}\n  key_mappings: {camera: {a: face_view}}\n",
         "t.yml:3: data.camera_name_mapping: no camera of data.key_mappings.camera is 'face', and 'face_view' has no entry: it has its own name"},
        {"  key_mappings: {camera: {a: top_view}}\n", NULL}, /* not in the map that nobody wrote */
        {"  key_mappings: {camera: {a: face_view, b: face_view}}\n", "t.yml:3: data.key_mappings.camera: more than one camera is 'face_view'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        snprintf(text, sizeof text, "model_type: qwen2_5\ndata:\n%s", cases[i].data);
        vlai_config *c = parse(text, NULL, 0);
        assert_int_equal(c->notice_count, cases[i].notice ? 1 : 0);
        if (cases[i].notice && !has_notice(c, cases[i].notice))
            fail_msg("'%s' lacks '%s'", c->notices[0], cases[i].notice);
        vlai_config_destroy(c);
    }
}

static void yaml_forms(void **state)
{
    (void)state;
    setenv("VLA_TEST_NAME", "seven", 1);
    setenv("VLA_TEST_WORKERS", "7", 1);
    setenv("VLA_TEST_EMPTY", "", 1);
    unsetenv("VLA_TEST_UNSET");
    vlai_config *c;
    c = parse("model_type: qwen2_5\n"
              "hyperparams:\n"
              "  seed: 1e3\n"
              "  batch_size_per_gpu: ${VLA_TEST_WORKERS}\n"
              "  optimizer: &opt\n"
              "    learning_rate: 5e-5\n"
              "    eps: 1.0e-8\n"
              "    max_grad_norm: 1.0e8\n"
              "    betas: !!python/tuple [0.8, 0.9]\n"
              "data:\n"
              "  num_workers: 0x10\n"
              "  max_length: 1_024\n"
              "  mask_padded_actions: on\n"
              "  norm_stats_path: ~\n"
              "  train_test_split: .5\n"
              "  lerobot_config: {repo_id: \"${VLA_TEST_UNSET:-a/${VLA_TEST_NAME}}/b\", root: }\n"
              "  resolution: {face_view: -1}\n"
              "checkpoint:\n"
              "  save_path: ${VLA_TEST_EMPTY:-./x}/$${VLA_TEST_NAME}/$5\n"
              "logging:\n"
              "  log_name: 2024\n"
              "  use_wandb: yes\n",
              NULL, 0);
    assert_true(c->hyperparams.seed == 1000 && c->hyperparams.batch_size_per_gpu == 7);
    assert_true(c->optimizer.learning_rate == 5e-5 && c->optimizer.eps == 1e-8 && c->optimizer.max_grad_norm == 1e8);
    assert_true(c->optimizer.betas.values[0] == 0.8 && c->data.num_workers == 16 && c->data.max_length == 1024);
    assert_true(c->data.mask_padded_actions && !c->data.norm_stats_path && c->data.train_test_split == 0.5);
    assert_string_equal(c->lerobot.repo_id, "a/seven/b");
    assert_null(c->lerobot.root);
    assert_int_equal(c->data.resolution.values[0], -1);
    assert_string_equal(c->checkpoint.save_path, "./x/${VLA_TEST_NAME}/$5");
    assert_string_equal(c->logging.log_name, "2024");
    assert_true(has_notice(c, "t.yml:22: logging.use_wandb: nothing is sent to wandb; metrics.jsonl"));
    vlai_config_destroy(c);
    c = parse("\xef\xbb\xbfmodel_type: qwen2_5\nhyperparams: {seed: 3}\n", NULL, 0); /* a byte-order mark, as PyYAML */
    assert_true(c->hyperparams.seed == 3);
    vlai_config_destroy(c);

    /* anchors, aliases and merges, and the same as JSON with its escapes */
    c = parse("model_type: qwen2_5\n"
              "task:\n"
              "  dof_config: &layout {arm: 6, grip: 1}\n"
              "  agent_pos_config:\n"
              "    <<: *layout\n"
              "    grip: 2\n"
              "  ar_dof_config:\n"
              "    lift: 3\n"
              "    <<: [*layout, {head: 2, arm: 5}]\n",
              NULL, 0);
    assert_true(c->action_dim == 7 && c->propri_dim == 8 && c->task.ar_dof_config.count == 4);
    /* as PyYAML has it: {'arm': 6, 'grip': 2} and {'head': 2, 'arm': 6, 'grip': 1, 'lift': 3} */
    static const char *const order[] = {"head", "arm", "grip", "lift"};
    static const int64_t widths[] = {2, 6, 1, 3};
    assert_string_equal(c->task.agent_pos_config.names[0], "arm");
    assert_int_equal(c->task.agent_pos_config.values[1], 2);
    for (int i = 0; i < 4; i++) {
        assert_string_equal(c->task.ar_dof_config.names[i], order[i]);
        assert_int_equal(c->task.ar_dof_config.values[i], widths[i]);
    }
    vlai_config_destroy(c);
    c = parse("{\"model_type\": \"qwen2_5\", \"data\": {\"num_workers\": 3, \"frame_cache_dir\": \"a\\/b \\u00e9\"},\n"
              "\t\"hyperparams\": {\"optimizer\": {\"eps\": 1e-08}}}", NULL, 0);
    assert_true(c->data.num_workers == 3 && c->optimizer.eps == 1e-8);
    assert_string_equal(c->data.frame_cache_dir, "a/b \xC3\xA9");
    vlai_config_destroy(c);
}

static void two_places_and_old_places(void **state)
{
    (void)state;
    vlai_config *c = parse("model_type: qwen2_5\n"
                           "norm_stats_path: old.json\nstate_bins: 512\nsave_path: out\nprocessor_path: p\n"
                           "eval_batch_size_per_gpu: 3\n"
                           "_raw_data: {anything: 1}\n_raw_yaml: [1]\n"
                           "task: {action_horizon: 10, use_state_string_representation: true,"
                           " noise_scheduler: {s: 0.9, beta_alpha: 2}}\n"
                           "model: {processor_path: q, attn_implementation: sdpa}\n"
                           "data: {action_horizon: 12, use_state_string_representation: false, noise_scheduler: {s: 0.8}}\n"
                           "hyperparams: {optimizer: {action_expert_learning_rate: 3.0e-3}}\n"
                           "distributed: {use_gradient_checkpointing: true}\n",
                           NULL, 0);
    assert_string_equal(c->data.norm_stats_path, "old.json");
    assert_string_equal(c->checkpoint.save_path, "out");
    assert_string_equal(c->model.processor_path, "q");
    assert_true(has_notice(c, "t.yml:5: processor_path = 'p' is not used: model.processor_path = 'q'"));
    assert_true(c->data.state_bins == 512 && c->top.eval_batch_size_per_gpu == 3);
    assert_true(c->task.action_horizon == 12 && c->data.action_horizon == 12 && c->task.action_horizon_flow == 12);
    assert_true(has_notice(c, "data.action_horizon = 12 wins over task.action_horizon = 10"));
    assert_true(!c->task.use_state_string_representation);
    assert_true(has_notice(c, "data.use_state_string_representation = false wins"));
    assert_true(c->noise.s == 0.8 && c->noise.beta_alpha == 2);
    assert_true(has_notice(c, "data.noise_scheduler.s wins"));
    assert_true(has_notice(c, "model.attn_implementation has no effect"));
    assert_int_equal(c->optimizer.lr_groups.count, 1);
    assert_string_equal(c->optimizer.lr_groups.groups[0].name, "action_lr_group");
    assert_true(c->optimizer.lr_groups.groups[0].lr == 3e-3 && c->optimizer.lr_groups.groups[0].include.count == 7);
    assert_string_equal(c->base_group, "base_lr_group");
    assert_int_equal(c->memory.recompute, VLAI_RECOMPUTE_LAYER);
    char where[256];
    assert_string_equal(vlai_config_where(c, "data.norm_stats_path", where, sizeof where), "t.yml:2: data.norm_stats_path");
    vlai_config_destroy(c);
}

static void overrides(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const char *good[] = {"--hyperparams.seed=7", "hyperparams.optimizer.betas=[0.5, 0.6]", "--data.resolution={a: 64}",
                          "--hyperparams.scheduler={scheduler_type: constant, num_training_steps: 5}",
                          "--checkpoint.resume_from=", "--data.padding=reference", "--data.num_workers=~",
                          "--data.resolution.a=128", "--data.resolution.b=-1",
                          "--data.key_mappings.camera.observation.images.top=face_view"};
    vlai_config *c = parse("model_type: qwen2_5\ndata: {num_workers: 9}\ncheckpoint: {resume_from: x}\n", good, 10);
    assert_true(c->data.resolution.count == 2 && c->data.resolution.values[0] == 128 && c->data.resolution.values[1] == -1);
    assert_string_equal(c->keys.camera.names[0], "observation.images.top");
    assert_string_equal(c->keys.camera.values[0], "face_view");
    assert_true(c->hyperparams.seed == 7 && c->optimizer.betas.values[0] == 0.5);
    assert_string_equal(c->data.resolution.names[0], "a");
    assert_true(c->scheduler.scheduler_type == VLAI_SCHEDULER_CONSTANT && c->scheduler.num_training_steps == 5);
    assert_null(c->checkpoint.resume_from);
    assert_true(c->data.padding == VLAI_PADDING_REFERENCE && c->data.num_workers == 4);
    char where[256];
    assert_string_equal(vlai_config_where(c, "hyperparams.seed", where, sizeof where),
                        "--hyperparams.seed=7: hyperparams.seed");
    vlai_config_destroy(c);
    static const struct {
        const char *text, *part;
    } bad[] = {
        {"--hyperparams.sed=7", "--hyperparams.sed=7: unknown key 'hyperparams.sed'"},
        {"--data.num_workers=x", "--data.num_workers=x: data.num_workers is the text 'x', wanted an integer"},
        {"--data.num_workers", "not of the form --section.key=value"},
        {"--=3", "not of the form --section.key=value"},
        {"--a.b.c=3", "unknown key 'a.b.c'"},
        {"--data.resolution.a=big", "data.resolution: a is the text 'big', wanted a map of names to integers"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_fails(vlai_config_parse("model_type: qwen2_5\n", 20, "t.yml", &bad[i].text, 1, &c, &err), VLA_E_INVALID, err,
                     bad[i].part);
    assert_true(vlai_config_is_override("--data.num_workers=3") && vlai_config_is_override("--memory.recompute=layer"));
    assert_true(vlai_config_is_override("--state_bins=64") && vlai_config_is_override("--save_path=run"));
    assert_false(vlai_config_is_override("--config=a.yml"));
    assert_false(vlai_config_is_override("--batch"));
    assert_false(vlai_config_is_override("--out=x.y"));
}

/* What is printed reads back to the same values, and prints the same again. */
static void dump_is_a_configuration(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static const char *const files[] = {"configs/libero.yml", "configs/libero_local_perf.yml"};
    const char *more[] = {"--hyperparams.optimizer.action_expert_learning_rate=0.003", "--data.priority_order={a: 0.25}",
                          "--data.lerobot_config.episodes=[3, 0]", "--data.camera_name_mapping={face_view: \"front \\\"x\\\"\"}",
                          "--dataset_path={a: [1, null, .5, yes, .inf, '$${x}']}", "--hyperparams.optimizer.learning_rate=0.1", "--logging.log_name=$$$${y"};
    for (size_t i = 0; i < 2; i++) {
        vlai_config *a, *b;
        char *first, *second, path[4096];
        snprintf(path, sizeof path, VLA_TEST_ROOT "/%s", files[i]);
        assert_ok(vlai_config_load(path, more, 7, &a, &err), err);
        assert_ok(vlai_config_dump(a, &first, &err), err);
        assert_non_null(strstr(first, "\"learning_rate\": 0.1,"));
        assert_ok(vlai_config_save(a, "test_config.json", &err), err);
        assert_ok(vlai_config_load("test_config.json", NULL, 0, &b, &err), err);
        unlink("test_config.json");
        assert_ok(vlai_config_dump(b, &second, &err), err);
        assert_string_equal(first, second);
        assert_int_equal(b->notice_count, 0);
        assert_string_equal(b->data.camera_name_mapping.values[0], "front \"x\"");
        assert_string_equal(b->logging.log_name, "$$${y");
        assert_string_equal(b->top.dataset_path, "{\"a\": [1, null, 0.5, true, .inf, \"$${x}\"]}");
        vlai_free(first);
        vlai_free(second);
        vlai_config_destroy(a);
        vlai_config_destroy(b);
    }
    char *help;
    assert_ok(vlai_config_help(NULL, &help, &err), err);
    assert_non_null(strstr(help, "max_bad_steps: 10\n"));
    assert_non_null(strstr(help, "an integer from 0 to 1024"));
    vlai_free(help);
    assert_fails(vlai_config_help("nothing", &help, &err), VLA_E_INVALID, err, "'nothing' is not a section");
}

/* docs/differences.md promises options: every `section.key` in it is one, and every `section.key: value` of a single word
 * is a value that is taken. */
static void documented_keys_exist(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char *text;
    assert_ok(vlai_read_file(VLA_TEST_ROOT "/docs/differences.md", 0, &text, NULL, &err), err);
    static const char *const sections[] = {"task.", "model.", "data.", "hyperparams.", "distributed.", "logging.", "checkpoint.",
                                           "debug.", "training.", "memory."};
    int keys = 0, values = 0;
    for (char *at = text; (at = strchr(at, '`'));) {
        char word[128], override[160];
        size_t n = strcspn(++at, "`");
        snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word - 1), at);
        at += n + (at[n] == '`');
        bool ours = false;
        for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
            ours |= !strncmp(word, sections[i], strlen(sections[i]));
        char *value = strstr(word, ": ");
        if (value) {
            *value = 0;
            value += 2;
        }
        if (!ours || strstr(word, ".safetensors") || strstr(word, "\xE2\x80\xA6") || vlai_config_section(word, strlen(word))) /* an ellipsis is a whole family */
            continue;
        keys++;
        if (!vlai_config_option(word, NULL))
            fail_msg("docs/differences.md names '%s', which is no key", word);
        if (!value || strpbrk(value, " {"))
            continue;
        snprintf(override, sizeof override, "--%s=%s", word, value);
        const char *overrides[] = {override};
        vlai_config *c;
        vla_status status = vlai_config_parse("model_type: qwen2_5\n", 20, "t.yml", overrides, 1, &c, &err);
        if (status != VLA_OK)
            fail_msg("docs/differences.md says '%s: %s': %s", word, value, err.message);
        vlai_config_destroy(c);
        values++;
    }
    assert_true(keys > 20 && values >= 8);
    vlai_free(text);
}

static void before_training(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static const char whole[] =
        "model_type: qwen2_5\n"
        "task: {dof_config: {a: 7}, agent_pos_config: {b: 8}}\n"
        "model: {config_path: /, processor_path: /}\n"
        "hyperparams: {scheduler: {num_training_steps: 3}}\n"
        "data: {norm_stats_path: /, lerobot_config: {repo_id: test_config_set},"
        " key_mappings: {camera: {c: v}, state: s, action: a}}\n";
    vlai_config *c = parse(whole, NULL, 0);
    char folder[256];
    unsetenv("HF_LEROBOT_HOME");
    unsetenv("HF_HOME");
    assert_fails(vlai_config_check_training(c, &err), VLA_E_NOT_FOUND, err,
                 "t.yml:5: data.lerobot_config.repo_id = 'test_config_set': no such LeRobot data set");
    assert_ok(vlai_mkdirs("test_config_home/lerobot/test_config_set/meta", &err), err);
    assert_ok(vlai_write_file_atomic("test_config_home/lerobot/test_config_set/meta/info.json", "{}", 2, &err), err);
    static const char *const homes[][2] = {{"HF_HOME", "test_config_home"}, {"HF_LEROBOT_HOME", "test_config_home/lerobot"}};
    for (int i = 0; i < 2; i++) { /* of both the second counts */
        setenv(homes[i][0], homes[i][1], 1);
        assert_ok(vlai_config_dataset(c, folder, sizeof folder, &err), err);
        assert_string_equal(folder, "test_config_home/lerobot/test_config_set");
        setenv("HF_HOME", "/none", 1);
    }
    unsetenv("HF_LEROBOT_HOME");
    unsetenv("HF_HOME");
    assert_ok(vlai_remove_tree("test_config_home", &err), err);
    assert_ok(vlai_mkdirs("test_config_set/meta", &err), err);
    assert_ok(vlai_write_file_atomic("test_config_set/meta/info.json", "{}", 2, &err), err);
    assert_ok(vlai_config_check_training(c, &err), err);
    assert_ok(vlai_config_dataset(c, folder, sizeof folder, &err), err);
    assert_string_equal(folder, "test_config_set");
    vlai_config_destroy(c);
    static const struct {
        const char *override, *part;
        vla_status status;
    } cases[] = {
        {"--task.dof_config=", "task.dof_config is required and missing", VLA_E_INVALID},
        {"--task.agent_pos_config=", "task.agent_pos_config is required and missing", VLA_E_INVALID},
        {"--model.config_path=", "model.config_path is required and missing", VLA_E_INVALID},
        {"--model.processor_path=/none/x", "model.processor_path: '/none/x' does not exist", VLA_E_NOT_FOUND},
        {"--data.norm_stats_path=/none/y", "data.norm_stats_path: '/none/y' does not exist", VLA_E_NOT_FOUND},
        {"--checkpoint.resume_from=/none/z", "checkpoint.resume_from: '/none/z' does not exist", VLA_E_NOT_FOUND},
        {"--data.key_mappings.camera=", "data.key_mappings.camera is required", VLA_E_INVALID},
        {"--data.key_mappings.state=", "data.key_mappings.state is required", VLA_E_INVALID},
        {"--data.lerobot_config.repo_id=", "lerobot requires data.lerobot_config.repo_id to be set", VLA_E_INVALID},
        {"--hyperparams.scheduler.num_training_steps=null", "num_training_steps must be > 0 for cosine scheduler.", VLA_E_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c = parse(whole, &cases[i].override, 1);
        assert_fails(vlai_config_check_training(c, &err), cases[i].status, err, cases[i].part);
        vlai_config_destroy(c);
    }
    assert_ok(vlai_remove_tree("test_config_set", &err), err);
}

static void every_failing_allocation_is_an_error(void **state)
{
    (void)state;
    const char *override[] = {"--hyperparams.optimizer.action_expert_learning_rate=0.003"};
    vla_error err = VLA_ERROR_INIT;
    vla_status status = VLA_E_NOMEM;
    uint64_t n = 0;
    while (status != VLA_OK) {
        vlai_config *c;
        failing_allocation(++n);
        status = vlai_config_load(VLA_TEST_ROOT "/configs/libero.yml", override, 1, &c, &err);
        if (status != VLA_OK) {
            assert_int_equal(status, VLA_E_NOMEM);
            assert_null(c);
        } else {
            vlai_config_destroy(c);
        }
    }
    failing_allocation(0);
    assert_true(n > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped_libero),
        cmocka_unit_test(defaults),
        cmocka_unit_test(keys_of_the_reference_act),
        cmocka_unit_test(errors_name_file_line_and_key),
        cmocka_unit_test(warm_up_beyond_the_end),
        cmocka_unit_test(names_of_views),
        cmocka_unit_test(yaml_forms),
        cmocka_unit_test(two_places_and_old_places),
        cmocka_unit_test(overrides),
        cmocka_unit_test(dump_is_a_configuration),
        cmocka_unit_test(documented_keys_exist),
        cmocka_unit_test(before_training),
        cmocka_unit_test(every_failing_allocation_is_an_error),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
