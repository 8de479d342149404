/* Everything that is read at the start of a run, with each allocation failing in turn: configuration, tokenizer, data
 * sets of each version, samples. Weights: test_oom_step.c. */
#include "folder.h"
#include "oom.h"

#include "base/fail.h"
#include "data/feed.h"
#include "data/norm_stats.h"
#include "data/synth.h"
#include "train/contract_config.h"

static const char *kept(const char *name)
{
    static char path[4][1024];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], VLA_TEST_ROOT "/tests/golden/%s", name);
    return path[turn];
}

/* A set with two cameras of stored pictures, a processor and statistics, for samples. */
static int set_up(void **state)
{
    vla_error err = VLA_ERROR_INIT;
    assert_int_equal(make_root(state), 0);
    vlai_synth_options options = VLAI_SYNTH_DEFAULT;
    options.episodes = 3;
    options.task.length_max = 22;
    options.task.width = options.task.height = 56;
    options.storage[0] = options.storage[1] = VLAI_STORE_IMAGE;
    options.threads = 1;
    vlai_synth_summary summary;
    assert_ok(vlai_synth_write(at("set"), &options, &summary, &err), err);
    static const char *const texts[] = {"move to the goal"};
    assert_ok(vlai_tokenizer_write(at("processor"), texts, 1, 50, &err), err);
    static const char numbers[] = "{\"norm_stats\": {\"observation.state\": {\"q01\": [-1,-1,-1,-1,-1,-1,-1,-1], "
                                  "\"q99\": [1,1,1,1,1,1,1,1]}, \"action\": {\"q01\": [-1,-1,-1,-1,-1,-1,-1], "
                                  "\"q99\": [1,1,1,1,1,1,1]}}}";
    assert_ok(vlai_write_file_atomic(at("stats.json"), numbers, sizeof numbers - 1, &err), err);
    return oom_set_up(state);
}

static vla_status read_config(void *user, vla_error *err)
{
    (void)user;
    static const char *const overrides[] = {"--hyperparams.seed=7", "--data.num_workers=3"};
    vlai_config *config;
    char *text = NULL;
    VLA_TRY(vlai_config_load(VLA_TEST_ROOT "/workspace/example/libero.yml", overrides, 2, &config, err));
    vla_status status = vlai_config_dump(config, &text, err);
    if (status == VLA_OK)
        assert_non_null(strstr(text, "\"seed\": 7"));
    vlai_free(text);
    vlai_config_destroy(config);
    return status;
}

static void configuration(void **state)
{
    (void)state;
    oom_every("configuration", 150, read_config, NULL);
}

static vla_status encode(void *user, vla_error *err)
{
    static const char text[] = "<|im_start|>user\nObservation: <|vision_start|> \xc3\xa9t\xc3\xa9 12.5<|im_end|>\n";
    vlai_tokenizer *tok;
    VLA_TRY(vlai_tokenizer_open(user, &tok, err));
    vlai_ids ids = {0};
    vlai_text back = {0};
    int32_t id;
    vla_status status = vlai_tokenizer_add(tok, "<|action|>", &id, err);
    if (status == VLA_OK)
        status = vlai_tokenizer_encode(tok, text, sizeof text - 1, &ids, err);
    if (status == VLA_OK)
        status = vlai_tokenizer_decode(tok, ids.data, ids.count, false, &back, err);
    if (status == VLA_OK)
        status = vlai_text_status(&back, err);
    if (status == VLA_OK)
        assert_string_equal(back.data, text);
    vlai_text_fini(&back);
    vlai_ids_fini(&ids);
    vlai_tokenizer_close(tok);
    return status;
}

static void tokenizer(void **state)
{
    (void)state;
    oom_every("tokenizer", 150, encode, (void *)(uintptr_t)kept("assets/processor-small"));
}

static vla_status encode_actions(void *user, vla_error *err)
{
    static const float chunk[8] = {0.1f, -1, 0.2f, -1, 0.4f, 1, 0.7f, 1}, mask[2] = {1, 1};
    vlai_fast *fast;
    VLA_TRY(vlai_fast_open(user, &fast, err));
    vlai_ids ids = {0};
    float back[8];
    bool whole = false;
    vla_status status = vlai_fast_encode(fast, chunk, mask, 4, 2, &ids, err);
    if (status == VLA_OK)
        status = vlai_fast_decode(fast, ids.data, ids.count, 4, 2, back, &whole, err);
    if (status == VLA_OK)
        assert_true(whole);
    vlai_ids_fini(&ids);
    vlai_fast_close(fast);
    return status;
}

static void action_tokens(void **state)
{
    (void)state;
    static char folder[] = VLA_TEST_ROOT "/tests/fast";
    oom_every("action tokens", 150, encode_actions, folder);
}

static vla_status read_picture(vla_dataset *set, vla_error *err)
{
    vla_frame_reader *reader;
    vla_picture picture;
    VLA_TRY(vla_frame_reader_create(set, NULL, &reader, err));
    vla_status status = VLA_OK;
    for (int64_t c = 0; c < vla_dataset_info_get(set)->cameras && status == VLA_OK; c++)
        status = vla_frame_reader_read(reader, 3, vla_dataset_camera(set, c), &picture, err);
    vla_frame_reader_destroy(reader);
    return status;
}

/* Opened without a sidecar, numbers and pictures read; then with one that is written, and with one that is read. */
static vla_status read_set(void *user, vla_error *err)
{
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    options.flags = VLA_DATASET_NO_CACHE;
    vla_dataset *set;
    VLA_TRY(vla_dataset_open(user, &options, &set, err));
    const float *numbers;
    const int64_t *whole;
    int64_t dim;
    vla_status status = vla_dataset_numbers(set, "observation.state", &numbers, &dim, err);
    if (status == VLA_OK)
        status = vla_dataset_integers(set, "task_index", &whole, &dim, err);
    if (status == VLA_OK)
        status = read_picture(set, err);
    vla_dataset_close(set);
    vla_error ignored = VLA_ERROR_INIT;
    options.flags = 0;
    options.cache_dir = at("cache");
    if (vlai_remove_tree(at("cache"), &ignored) != VLA_OK && status == VLA_OK)
        status = (*err = ignored).status;
    for (int i = 0; i < 2 && status == VLA_OK; i++) {
        status = vla_dataset_open(user, &options, &set, err);
        if (status == VLA_OK)
            vla_dataset_close(set);
    }
    return status;
}

static void sets(void **state)
{
    (void)state;
    static const char *const names[] = {"v20-av1", "v21-image", "v30-av1", "v30-h264-30fps"};
    for (int i = 0; i < 4; i++) {
        char path[64];
        snprintf(path, sizeof path, "assets/datasets/%s", names[i]);
        oom_every(names[i], 60, read_set, (void *)(uintptr_t)kept(path));
    }
}

static vla_status read_sample(void *user, vla_error *err)
{
    (void)user;
    static const char yaml[] = "model_type: qwen2_5\n"
                               "task: {action_horizon: 4, dof_config: {arm: 6, gripper: 1, action_padding: 19},\n"
                               "  agent_pos_config: {arm: 7, gripper: 1, action_padding: 18}}\n"
                               "data:\n  resolution: {face_view: 28, right_wrist_view: -1}\n"
                               "  key_mappings: {camera: {observation.images.image: face_view,\n"
                               "    observation.images.wrist_image: right_wrist_view}, state: observation.state, action: action}\n";
    char lines[3][600];
    snprintf(lines[0], sizeof lines[0], "model.processor_path=%s", at("processor"));
    snprintf(lines[1], sizeof lines[1], "data.norm_stats_path=%s", at("stats.json"));
    snprintf(lines[2], sizeof lines[2], "data.lerobot_config.repo_id=%s", at("set"));
    const char *overrides[] = {lines[0], lines[1], lines[2]};
    vlai_config *config;
    vlai_tokenizer *tok = NULL;
    vla_dataset *set = NULL;
    vlai_feed *feed = NULL;
    vlai_contract contract;
    vlai_sample sample = {0};
    vlai_text notes = {0};
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    options.flags = VLA_DATASET_NO_CACHE;
    VLA_TRY(vlai_config_parse(yaml, sizeof yaml - 1, "test.yml", overrides, 3, &config, err));
    vla_status status = vlai_config_tokenizer(config, &tok, err);
    if (status == VLA_OK)
        status = vla_dataset_open(at("set"), &options, &set, err);
    if (status == VLA_OK) {
        status = vlai_config_contract(config, tok, &contract, err);
        if (status == VLA_OK) {
            status = vlai_contract_check_set(&contract, set, &notes, err);
            if (status == VLA_OK)
                status = vlai_feed_create(set, &contract, tok, &feed, err);
            if (status == VLA_OK)
                status = vlai_feed_read(feed, 5, &sample, err);
            vlai_sample_fini(&sample);
            vlai_feed_destroy(feed);
            vlai_contract_fini(&contract);
        }
    }
    vlai_text_fini(&notes);
    vla_dataset_close(set);
    vlai_tokenizer_close(tok);
    vlai_config_destroy(config);
    return status;
}

static void samples(void **state)
{
    (void)state;
    oom_every("sample", 150, read_sample, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(configuration), cmocka_unit_test(tokenizer), cmocka_unit_test(action_tokens), cmocka_unit_test(sets),
        cmocka_unit_test(samples),
    };
    return cmocka_run_group_tests(tests, set_up, drop_root);
}
