/* Action chunks as FAST tokens against recorded values of scipy and tokenizers (tests/fast), damaged processors, and samples with
 * such tokens. */
#include "folder.h"

#include "base/json.h"
#include "base/memory.h"
#include "data/sample.h"

#include <math.h>

#define FAST VLA_TEST_ROOT "/tests/fast"

static void read_floats(const json_t *list, float *out)
{
    size_t i;
    json_t *value;
    json_array_foreach(list, i, value)
        out[i] = (float)json_number_value(value);
}

static void recorded_chunks(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_fast *fast;
    json_t *file, *one;
    size_t c;
    int nothing = 0;
    assert_ok(vlai_fast_open(FAST, &fast, &err), err);
    assert_int_equal(vlai_fast_vocabulary(fast), 320);
    assert_ok(vlai_json_load(FAST "/cases.json", &file, &err), err);
    json_array_foreach(json_object_get(file, "cases"), c, one) {
        int64_t horizon = json_integer_value(json_object_get(one, "horizon")), width = json_integer_value(json_object_get(one, "width"));
        float chunk[256], mask[16], want[256], got[256];
        const json_t *back = json_object_get(one, "back"), *wanted = json_object_get(one, "ids");
        assert_true(horizon * width <= 256 && width <= 16);
        read_floats(json_object_get(one, "chunk"), chunk);
        read_floats(json_object_get(one, "mask"), mask);
        read_floats(back, want);
        int64_t dims = 0;
        for (int64_t d = 0; d < width; d++)
            dims += mask[d] != 0;
        vlai_ids ids = {0};
        assert_ok(vlai_fast_encode(fast, chunk, mask, horizon, width, &ids, &err), err);
        assert_int_equal(ids.count, json_array_size(wanted));
        for (size_t i = 0; i < ids.count; i++)
            assert_int_equal(ids.data[i], json_integer_value(json_array_get(wanted, i)));
        bool whole;
        assert_ok(vlai_fast_decode(fast, ids.data, ids.count, horizon, dims, got, &whole, &err), err);
        assert_int_equal(whole, !json_is_null(back));
        nothing += !whole;
        for (int64_t i = 0; i < horizon * dims; i++)
            assert_true(whole ? fabsf(got[i] - want[i]) <= 2e-7f * fmaxf(1, fabsf(want[i])) : got[i] == 0);
        vlai_ids_fini(&ids);
    }
    assert_true(c >= 9 && nothing == 2);
    json_decref(file);
    /* A model may write anything: too few tokens, or a byte that begins no character. */
    float got[8];
    bool whole = true;
    assert_ok(vlai_fast_decode(fast, (int32_t[]){200}, 1, 4, 2, got, &whole, &err), err);
    assert_false(whole);
    assert_ok(vlai_fast_decode(fast, NULL, 0, 4, 2, got, &whole, &err), err);
    assert_false(whole);
    assert_ok(vlai_fast_decode(fast, (int32_t[]){320}, 1, 4, 2, got, &whole, &err), err);
    assert_false(whole);
    vlai_ids ids = {0};
    static const float chunk[2] = {0.5f, 0.5f}, none[2] = {0, 0};
    assert_fails(vlai_fast_encode(fast, chunk, none, 1, 2, &ids, &err), VLA_E_INVALID, err, "nothing to write");
    vlai_ids_fini(&ids);
    vlai_fast_close(fast);
}

static void copy(const char *name, const char *to)
{
    vla_error err = VLA_ERROR_INIT;
    char path[512], *data;
    size_t size;
    snprintf(path, sizeof path, "%s/%s", FAST, name);
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    assert_ok(vlai_write_file_atomic(at(to), data, size, &err), err);
    vlai_free(data);
}

static void damaged_folders(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_fast *fast;
    assert_ok(vlai_mkdirs(at("p"), &err), err);
    assert_fails(vlai_fast_open(at("p"), &fast, &err), VLA_E_NOT_FOUND, err, "give the folder of a FAST processor");
    copy("processor_config.json", "p/processor_config.json");
    assert_fails(vlai_fast_open(at("p"), &fast, &err), VLA_E_NOT_FOUND, err, "p/tokenizer.json");
    assert_ok(vlai_mkdirs(at("p/bpe_tokenizer"), &err), err);
    copy("tokenizer.json", "p/bpe_tokenizer/tokenizer.json");
    assert_ok(vlai_fast_open(at("p"), &fast, &err), err);
    vlai_fast_close(fast);
    static const struct {
        const char *config, *said;
        vla_status status;
    } rows[] = {
        {"{\"processor_class\": \"Qwen2_5_VLProcessor\"}", "processor_class 'Qwen2_5_VLProcessor', wanted UniversalActionProcessor", VLA_E_UNSUPPORTED},
        {"{\"scale\": 0}", "scale 0 (above 0", VLA_E_INVALID},
        {"{\"min_token\": 0.5}", "min_token 0.5 (an integer", VLA_E_INVALID},
        {"{\"vocab_size\": 0}", "vocab_size 0 (1 to", VLA_E_INVALID},
        {"{\"vocab_size\": 300}", "has 320 tokens, its processor_config.json says vocab_size 300", VLA_E_INVALID},
        {"{\"vocab_size\": \"many\"}", "vocab_size", VLA_E_FORMAT},
        {"[", "processor_config.json", VLA_E_FORMAT},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_ok(vlai_write_file_atomic(at("p/processor_config.json"), rows[i].config, strlen(rows[i].config), &err), err);
        assert_fails(vlai_fast_open(at("p"), &fast, &err), rows[i].status, err, rows[i].said);
    }
    /* A coefficient outside of all characters. */
    static const char wide[] = "{\"scale\": 1000000, \"min_token\": -1000000, \"vocab_size\": 320}";
    assert_ok(vlai_write_file_atomic(at("p/processor_config.json"), wide, sizeof wide - 1, &err), err);
    assert_ok(vlai_fast_open(at("p"), &fast, &err), err);
    static const float ones[1] = {1};
    vlai_ids ids = {0};
    assert_fails(vlai_fast_encode(fast, ones, ones, 1, 1, &ids, &err), VLA_E_INVALID, err, "becomes character 2000000, which is none");
    vlai_ids_fini(&ids);
    vlai_fast_close(fast);
}

/* A sample whose actions the sampler writes itself: text, labels of the turn alone, and the contract's record of the processor. */
static void samples(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_tokenizer *tok;
    vlai_contract c;
    vlai_sampler *sampler;
    vlai_sample s = {0};
    static const char *const texts[] = {"pick up the bowl"};
    static const double low[3] = {-1, -1, -1}, high[3] = {1, 1, 1};
    assert_ok(vlai_tokenizer_write(at("text"), texts, 1, 20, &err), err);
    assert_ok(vlai_tokenizer_open(at("text"), &tok, &err), err);
    assert_ok(vlai_contract_init(&c, &err), err);
    assert_ok(vlai_fast_open(FAST, &c.fast, &err), err);
    assert_ok(vlai_prompt_add_tokens(tok, vlai_fast_vocabulary(c.fast), NULL, 0, &err), err);
    json_t *layout = json_pack("{s:i, s:i}", "arm", 2, "gripper", 1), *padded = json_pack("{s:i, s:i, s:i}", "arm", 2, "gripper", 1, "action_padding", 2);
    assert_ok(vlai_layout_parse(layout, "test", &c.pos, &err), err);
    assert_ok(vlai_layout_parse(padded, "test", &c.dof, &err), err);
    json_decref(layout);
    json_decref(padded);
    assert_ok(vlai_norm_make(3, low, high, NULL, NULL, &c.state, &err), err);
    assert_ok(vlai_norm_make(3, low, high, NULL, NULL, &c.action, &err), err);
    c.horizon = 4;
    c.discrete = c.state_string = true;
    assert_ok(vlai_contract_take_tokens(&c, tok, &err), err);
    assert_ok(vlai_sampler_create(&c, tok, &sampler, &err), err);
    static const float zeros[3] = {0}, actions[12] = {0.12f, -0.53f, 1, 0.2f, -0.4f, 1, 0.3f, -0.2f, -1, 0.3f, 0, -1}, mask[3] = {1, 1, 1};
    vlai_sample_input in = {.state = zeros, .state_dims = 3, .action = actions, .action_dims = 3, .task = "pick up"};
    assert_ok(vlai_sampler_prepare(sampler, &in, &s, &err), err);
    vlai_ids ids = {0};
    assert_ok(vlai_fast_encode(c.fast, actions, mask, 4, 3, &ids, &err), err); /* the two columns of padding are left out */
    assert_true(ids.count > 2 && ids.count == s.action_token_count);
    assert_null(strstr(s.text.data, "<|action|>"));
    const vlai_prompt_tokens *t = vlai_sampler_tokens(sampler);
    size_t first = s.ids.count - ids.count - 2; /* then <|im_end|> and a newline */
    assert_int_equal(s.labelled, ids.count + 2);
    for (size_t i = 0; i < s.ids.count; i++)
        assert_int_equal(s.labels[i], i < first ? -100 : s.ids.data[i]);
    for (size_t i = 0; i < ids.count; i++)
        assert_int_equal(s.ids.data[first + i], t->first_action_token + ids.data[i]);
    assert_int_equal(s.ids.data[s.ids.count - 2], t->end);
    vlai_ids_fini(&ids);
    json_t *json = vlai_contract_to_json(&c), *kept = json_object_get(json_object_get(json, "prompt"), "action_tokens");
    assert_int_equal(json_integer_value(json_object_get(kept, "vocab_size")), 320);
    json_t *other = json_deep_copy(json);
    json_object_set_new(json_object_get(json_object_get(other, "prompt"), "action_tokens"), "scale", json_real(20));
    assert_fails(vlai_contract_match(json, other, "checkpoint", "config", &err), VLA_E_INVALID, err, "prompt.action_tokens.scale: 10.0 against 20.0");
    json_decref(other);
    json_decref(json);
    vlai_sample_fini(&s);
    vlai_sampler_destroy(sampler);
    vlai_contract_fini(&c);
    vlai_tokenizer_close(tok);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(recorded_chunks), cmocka_unit_test(damaged_folders), cmocka_unit_test(samples)};
    return cmocka_run_group_tests(tests, make_root, drop_root);
}
