/* The architecture file: shipped values, recorded cases, and each constraint broken once. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "model/wallx_config.h"

static char *shipped;
static size_t shipped_size;

static void shipped_values(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_wallx_config c;
    assert_ok(vlai_wallx_config_load(VLA_TEST_ROOT "/configs/wall-oss-0.5", &c, &err), err);
    assert_int_equal(c.hidden_size, 2048);
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(c.num_hidden_layers, 36);
    assert_int_equal(c.mrope_section[2], 24);
    assert_int_equal(c.expert_hidden[1], 1024);
    assert_int_equal(c.expert_intermediate[0], 11008);
    assert_int_equal(c.expert_intermediate[1], 2048);
    assert_int_equal(c.pad_token_id, -1);
    assert_int_equal(c.attention, VLAI_WALLX_FLASH_MASK);
    assert_true(c.use_x_loss && c.causal_action_attention_mask && c.tie_word_embeddings && !c.use_adarms);
    assert_int_equal(c.vision.head_dim, 80);
    assert_int_equal(c.vision.tokens_per_second, 2);
    assert_true(c.rms_norm_eps == 1e-6 && c.noise.time_shift == 1 && c.noise.s == 0.999);
    for (int64_t block = 0; block < 32; block++)
        assert_int_equal(vlai_wallx_full_attention(&c, block), block % 8 == 7);
}

/* What a recorded case's own training options give under the two readings. */
static void two_readings(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const char *override[] = {"--task.use_state_string_representation=true"};
    vlai_config *train;
    vlai_wallx_config c;
    assert_ok(vlai_config_load(VLA_TEST_ROOT "/configs/libero.yml", override, 1, &train, &err), err);
    assert_ok(vlai_wallx_config_load(VLA_TEST_ROOT "/configs/wall-oss-0.5/config.json", &c, &err), err);
    assert_ok(vlai_wallx_config_update(&c, train, false, &err), err);
    assert_int_equal(c.action_dim, 26);
    assert_int_equal(c.propri_dim, 26);
    assert_true(c.use_state_string_representation && c.action_horizon_flow == 10 && c.ar_loss_weight == 0.01);
    assert_ok(vlai_wallx_config_update(&c, train, true, &err), err);
    assert_true(!c.use_state_string_representation && c.action_horizon_flow == 32);
    vlai_config_destroy(train);
    /* The reference reads the weight of the flow loss from nowhere; a run takes what is given. */
    const char *weighed[] = {"--model.flow_loss_weight=0.25"};
    assert_ok(vlai_config_load(VLA_TEST_ROOT "/configs/libero.yml", weighed, 1, &train, &err), err);
    assert_ok(vlai_wallx_config_update(&c, train, true, &err), err);
    assert_true(c.flow_loss_weight == 1);
    assert_ok(vlai_wallx_config_update(&c, train, false, &err), err);
    assert_true(c.flow_loss_weight == 0.25);
    vlai_config_destroy(train);
}

/* A list of full-attention blocks may be that of a deeper tower, and the head need not be the embedding. */
static void accepted(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const char *const changes[][2] = {{"[7, 15, 23, 31]", "[3, 32, 99]"}, {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"},
                                      {"\"type\": \"mrope\"", "\"rope_type\": \"default\""}};
    for (int i = 0; i < 3; i++) {
        const char *at = strstr(shipped, changes[i][0]);
        assert_non_null(at);
        char *text = malloc(shipped_size + 64);
        sprintf(text, "%.*s%s%s", (int)(at - shipped), shipped, changes[i][1], at + strlen(changes[i][0]));
        vlai_wallx_config c;
        assert_ok(vlai_wallx_config_parse(text, strlen(text), "arch.json", &c, &err), err);
        for (int64_t block = 0; i == 0 && block < 32; block++)
            assert_int_equal(vlai_wallx_full_attention(&c, block), block == 3);
        assert_true(c.tie_word_embeddings == (i != 1));
        free(text);
    }
}

static void recorded_cases_load(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char **names;
    size_t count, loaded = 0;
    if (vlai_list_dir(golden_dir(), &names, &count, &err) != VLA_OK)
        skip();
    for (size_t i = 0; i < count; i++) {
        char path[4096], train_path[4096];
        snprintf(path, sizeof path, "%s/%s/config.json", golden_dir(), names[i]);
        snprintf(train_path, sizeof train_path, "%s/%s/train.json", golden_dir(), names[i]);
        if (strncmp(names[i], "wallx-", 6) || !vlai_is_file(path) || !vlai_is_file(train_path))
            continue;
        vlai_wallx_config c;
        vlai_config *train;
        assert_ok(vlai_wallx_config_load(path, &c, &err), err);
        assert_ok(vlai_config_load(train_path, NULL, 0, &train, &err), err);
        assert_ok(vlai_wallx_config_update(&c, train, true, &err), err);
        assert_int_equal(c.head_dim * c.num_attention_heads, c.hidden_size);
        vlai_config_destroy(train);
        loaded++;
    }
    vlai_names_free(names, count);
    if (!loaded)
        skip();
}

/* Replaces the first `from` of the shipped file by `to`; the result must fail with `part`. */
static void broken(const char *from, const char *to, vla_status status, const char *part)
{
    vla_error err = VLA_ERROR_INIT;
    const char *at = strstr(shipped, from);
    if (!at)
        fail_msg("'%s' is not in the shipped file", from);
    char *text = malloc(shipped_size + strlen(to) + 1);
    size_t head = (size_t)(at - shipped);
    memcpy(text, shipped, head);
    strcpy(text + head, to);
    strcat(text, at + strlen(from));
    vlai_wallx_config c;
    assert_fails(vlai_wallx_config_parse(text, strlen(text), "arch.json", &c, &err), status, err, part);
    assert_non_null(strstr(err.message, "arch.json"));
    free(text);
}

static void constraints(void **state)
{
    (void)state;
    const vla_status bad = VLA_E_INVALID, shape = VLA_E_SHAPE, no = VLA_E_UNSUPPORTED;
    broken("\"hidden_size\": 2048", "\"hidden_size\": 2050", shape, "not a multiple of num_attention_heads 16");
    broken("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", shape, "not a multiple of num_key_value_heads 3");
    broken("\"num_attention_heads\": 16", "\"num_attention_heads\": 0", bad, "num_attention_heads is 0, wanted 1 to");
    broken("[16, 24, 24]", "[16, 24, 23]", shape, "mrope_section sums to 63, wanted 64");
    broken("[16, 24, 24]", "[16, 24]", bad, "mrope_section is not a list of 3");
    broken("\"rope_scaling\": {", "\"rope_scaling_\": {", bad, "rope_scaling is missing");
    broken("[2048, 1024]", "[2048, 512]", shape, "dim_inputs[1] is 512");
    broken("\"num_experts\": 2", "\"num_experts\": 3", no, "num_experts is 3");
    broken("\"norm_moe\": true", "\"norm_moe\": false", no, "norm_moe is false");
    broken("\"action_hidden_size\": 1024", "\"action_hidden_size\": 4096", shape, "action_hidden_size is 4096");
    broken("\"out_hidden_size\": 2048", "\"out_hidden_size\": 1024", shape, "out_hidden_size is 1024");
    broken("[7, 15, 23, 31]", "[7, -1]", bad, "entry 1 is not a block number");
    broken("\"type\": \"mrope\"", "\"type\": \"yarn\"", no, "rope_scaling is of type 'yarn', wanted mrope");
    broken("\"num_heads\": 16", "\"num_heads\": 128", shape, "not a multiple of 4");
    broken("\"window_size\": 112", "\"window_size\": 27", shape, "holds no merged patch of 28");
    broken("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", no, "hidden_act is 'gelu'");
    broken("\"flash_mask\"", "\"flash\"", bad, "_attn_implementation is 'flash'");
    broken("\"model_type\": \"qwen2_5_vl\"", "\"model_type\": \"llama\"", no, "model_type is 'llama'");
    broken("\"vocab_size\": 151936", "\"vocab_size\": \"many\"", VLA_E_FORMAT, "'vocab_size' is string, wanted an integer");
    broken("\"depth\": 32", "\"depth\": 1000000000000", bad, "vision_config.depth is 1000000000000");
    broken("\"depth\": 32,", "\"depth\": 32, \"depth\": 32,", VLA_E_FORMAT, "duplicate");
    broken("\"attention_dropout\": 0.0", "\"attention_dropout\": 0.1", no, "attention_dropout 0.1");
    broken("\"use_adarms\": false", "\"use_adarms\": 1", VLA_E_FORMAT, "'use_adarms' is integer, wanted true or false");
}

int main(void)
{
    vla_error err = VLA_ERROR_INIT;
    if (vlai_read_file(VLA_TEST_ROOT "/configs/wall-oss-0.5/config.json", 0, &shipped, &shipped_size, &err) != VLA_OK)
        return fprintf(stderr, "%s\n", err.message), 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped_values),
        cmocka_unit_test(two_readings),
        cmocka_unit_test(accepted),
        cmocka_unit_test(recorded_cases_load),
        cmocka_unit_test(constraints),
    };
    int failed = cmocka_run_group_tests_name("wallx_config", tests, NULL, NULL);
    vlai_free(shipped);
    return failed;
}
