/* The contract against a data set, and rows of the set to samples. */
#include "test.h"

#include "base/io.h"
#include "base/json.h"
#include "data/feed.h"
#include "data/synth.h"
#include "train/contract_config.h"

#include <unistd.h>

static char dir[] = "/tmp/vla-contract-XXXXXX";
static char set_path[64], processor[64], stats[64];
static vlai_tokenizer *tok;
static vla_dataset *set;

/* Two cameras of stored pictures, state 8, action 7, 3 episodes of 20 to 22 frames; statistics by hand, one of them
 * constant and one tiny. */
static int set_up(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    assert_non_null(mkdtemp(dir));
    snprintf(set_path, sizeof set_path, "%s/set", dir);
    snprintf(processor, sizeof processor, "%s/processor", dir);
    snprintf(stats, sizeof stats, "%s/norm_stats.json", dir);
    vlai_synth_options options = VLAI_SYNTH_DEFAULT;
    options.episodes = 3;
    options.task.length_max = 22;
    options.task.width = options.task.height = 56;
    options.storage[0] = options.storage[1] = VLAI_STORE_IMAGE;
    options.threads = 1;
    vlai_synth_summary summary;
    assert_ok(vlai_synth_write(set_path, &options, &summary, &err), err);
    static const char *const texts[] = {"move to the goal"};
    assert_ok(vlai_tokenizer_write(processor, texts, 1, 50, &err), err);
    json_t *json = json_pack("{s:{s:{s:[f,f,f,f,f,f,f,f], s:[f,f,f,f,f,f,f,f]}, s:{s:[f,f,f,f,f,f,f], s:[f,f,f,f,f,f,f],"
                             "s:[f,f,f,f,f,f,f], s:[f,f,f,f,f,f,f]}}}",
                             "norm_stats", "observation.state", "q01", -1., -1., -1., -1., -1., -1., -1., -1., "q99", 1., 1., 1.,
                             1., 1., 1., 1., 1., "action", "q01", -1., -1., -1., -1., -1., 0., 1., "q99", 1., 1., 1., 1., 1., 1e-9,
                             1., "std", 1., 1., 1., 1., 1., 1e-10, 0., "mean", 0., 0., 0., 0., 0., 0., 1.);
    assert_ok(vlai_json_save(json, stats, &err), err);
    json_decref(json);
    vla_dataset_options open = VLA_DATASET_OPTIONS_DEFAULT;
    open.flags = VLA_DATASET_NO_CACHE;
    assert_ok(vla_dataset_open(set_path, &open, &set, &err), err);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_tokenizer_close(tok);
    vla_dataset_close(set);
    return vlai_remove_tree(dir, &err) != VLA_OK;
}

static const char common[] = "model_type: qwen2_5\n"
                             "task: {action_horizon: 4, dof_config: {arm: 6, gripper: 1, action_padding: 19},\n"
                             "  agent_pos_config: {arm: 7, gripper: 1, action_padding: 18}}\n"
                             "data:\n  resolution: {face_view: 28, right_wrist_view: -1}\n"
                             "  key_mappings: {camera: {%s}, state: observation.state, action: action}\n";
static const char both[] = "observation.images.image: face_view, observation.images.wrist_image: right_wrist_view";

static void contract_of(const char *cameras, const char *more, vlai_contract *out)
{
    vla_error err = VLA_ERROR_INIT;
    char yaml[2048], lines[4][160];
    snprintf(yaml, sizeof yaml, common, cameras);
    snprintf(lines[0], sizeof lines[0], "model.processor_path=%s", processor);
    snprintf(lines[1], sizeof lines[1], "data.norm_stats_path=%s", stats);
    snprintf(lines[2], sizeof lines[2], "data.lerobot_config.repo_id=%s", set_path);
    snprintf(lines[3], sizeof lines[3], "%s", more ? more : "data.max_length=500");
    const char *overrides[] = {lines[0], lines[1], lines[2], lines[3]};
    vlai_config *config;
    assert_ok(vlai_config_parse(yaml, strlen(yaml), "test.yml", overrides, 4, &config, &err), err);
    if (!tok)
        assert_ok(vlai_config_tokenizer(config, &tok, &err), err);
    assert_ok(vlai_config_contract(config, tok, out, &err), err);
    vlai_config_destroy(config);
}

static void whole_set(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c;
    contract_of(both, NULL, &c);
    vlai_text notes = {0};
    assert_ok(vlai_contract_check_set(&c, set, &notes, &err), err);
    /* A constant and a tiny dimension: name, q01, q99, std and what is done with it. */
    assert_non_null(strstr(notes.data, "gripper[0]"));
    assert_non_null(strstr(notes.data, "has no range: q01 1, q99 1, std 0; it is scaled by 1"));
    assert_non_null(strstr(notes.data, "has tiny range: q01 0, q99 1e-09, std 1e-10; it is scaled as it is"));
    vlai_text_fini(&notes);
    vlai_contract_fini(&c);
}

static void cameras_that_do_not_fit(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c;
    contract_of("observation.images.image: face_view", NULL, &c);
    assert_fails(vlai_contract_check_set(&c, set, NULL, &err), VLA_E_INVALID, err,
                 "not mapped: 'observation.images.wrist_image'");
    assert_fails(vlai_contract_check_set(&c, set, NULL, &err), VLA_E_INVALID, err,
                 "camera: {observation.images.image: face_view, observation.images.wrist_image: right_wrist_view}");
    vlai_contract_fini(&c);
    contract_of("observation.images.faceImg: face_view, observation.images.image: left_wrist_view, "
                "observation.images.wrist_image: right_wrist_view", NULL, &c);
    assert_fails(vlai_contract_check_set(&c, set, NULL, &err), VLA_E_INVALID, err,
                 "not in the set: 'observation.images.faceImg'");
    assert_fails(vlai_contract_check_set(&c, set, NULL, &err), VLA_E_INVALID, err,
                 "the set's cameras: 'observation.images.image', 'observation.images.wrist_image'");
    vlai_contract_fini(&c);
}

static void slots_that_do_not_fit(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c;
    contract_of(both, "task.dof_config={arm: 6, action_padding: 20}", &c);
    assert_fails(vlai_contract_check_set(&c, set, NULL, &err), VLA_E_SHAPE, err,
                 "column 'action' has 7 dimensions and task.dof_config has slots for 6:");
    assert_non_null(strstr(err.message, "action_padding 20: no column"));
    assert_non_null(strstr(err.message, "no slot: "));
    vlai_contract_fini(&c);
}

/* Statistics under a key that the file does not have are refused before the set is looked at. */
static void unknown_columns(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c;
    contract_of(both, NULL, &c);
    assert_ok(vlai_contract_set_keys(&c, "observation.stat", "action", &err), err);
    assert_fails(vlai_contract_check_set(&c, set, NULL, &err), VLA_E_NOT_FOUND, err, "'observation.state' (8)");
    assert_fails(vlai_contract_read_stats(&c, stats, &err), VLA_E_NOT_FOUND, err, "'observation.state', 'action'");
    vlai_contract_fini(&c);
}

static void rows_to_samples(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c;
    contract_of(both, "data.mask_padded_actions=true", &c);
    vlai_feed *feed;
    assert_ok(vlai_feed_create(set, &c, tok, &feed, &err), err);
    const vla_episode *episode = vla_dataset_episode(set, 1);
    int64_t row = episode->first_row + episode->length - 2, dims;
    const float *actions;
    assert_ok(vla_dataset_numbers(set, "action", &actions, &dims, &err), err);
    vlai_sample s = {0}, again = {0};
    assert_ok(vlai_feed_read(feed, row, &s, &err), err);
    assert_int_equal(s.episode, 1);
    assert_int_equal(s.frame, episode->length - 2);
    for (int64_t k = 0; k < 4; k++) { /* the last action stands again, without loss */
        const float *want = actions + (row + (k < 1 ? 0 : 1)) * dims;
        float x = want[0] < -1 ? -1 : want[0] > 1 ? 1 : want[0];
        assert_true(s.action[k * 26] == 2 * (x + 1) / 2 - 1);
        assert_true(s.loss_mask[k] == (k < 2) && s.dof_mask[k * 26] == 1);
        assert_true(s.dof_mask[k * 26 + 7] == 0);
    }
    assert_int_equal(s.pictures[0].width, 56); /* 28, then at least 3136 pixels */
    assert_int_equal(s.pictures[1].width, 56);
    assert_non_null(strstr(s.prompt.data, vla_dataset_task(set, row)));
    /* Nothing of the row before stays in the buffers. */
    assert_ok(vlai_feed_read(feed, 0, &again, &err), err);
    assert_ok(vlai_feed_read(feed, row, &again, &err), err);
    assert_int_equal(again.ids.count, s.ids.count);
    assert_memory_equal(again.ids.data, s.ids.data, s.ids.count * 4);
    assert_memory_equal(again.pixels, s.pixels, s.pixel_bytes);
    assert_memory_equal(again.state, s.state, 2 * (26 + 4 * 26) * sizeof(float));
    assert_fails(vlai_feed_read(feed, -1, &again, &err), VLA_E_INVALID, err, "no row -1");
    vlai_sample_fini(&s);
    vlai_sample_fini(&again);
    vlai_feed_destroy(feed);
    vlai_contract_fini(&c);
}

/* A mapping in another order than the set's features: pictures follow their names, unless the reference's way is asked. */
static void order_of_pictures(void **state)
{
    (void)state;
    static const char swapped[] = "observation.images.wrist_image: right_wrist_view, observation.images.image: face_view";
    static const char *const more[] = {"data.picture_order=mapping", "data.picture_order=features"};
    vla_error err = VLA_ERROR_INIT;
    vlai_sample samples[3] = {{0}};
    for (int i = 0; i < 3; i++) {
        vlai_contract c;
        contract_of(i < 2 ? swapped : both, i < 2 ? more[i] : NULL, &c);
        vlai_feed *feed;
        assert_ok(vlai_feed_create(set, &c, tok, &feed, &err), err);
        assert_ok(vlai_feed_read(feed, 3, &samples[i], &err), err);
        vlai_feed_destroy(feed);
        vlai_contract_fini(&c);
    }
    size_t half = samples[0].pixel_bytes / 2;
    assert_non_null(strstr(samples[0].prompt.data, "Observation: right_wrist_view: "));
    assert_non_null(strstr(samples[1].prompt.data, "Observation: right_wrist_view: "));
    assert_memory_not_equal(samples[0].pixels, samples[0].pixels + half, half);
    assert_memory_equal(samples[0].pixels, samples[2].pixels + half, half); /* the wrist's picture first, as named */
    assert_memory_equal(samples[1].pixels, samples[2].pixels, 2 * half);    /* the set's order under swapped names */
    for (int i = 0; i < 3; i++)
        vlai_sample_fini(&samples[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_set),       cmocka_unit_test(cameras_that_do_not_fit), cmocka_unit_test(slots_that_do_not_fit),
        cmocka_unit_test(unknown_columns), cmocka_unit_test(rows_to_samples),         cmocka_unit_test(order_of_pictures),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
