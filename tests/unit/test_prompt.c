#include "test.h"

#include "base/io.h"
#include "data/sample.h"

#include <unistd.h>

static char dir[] = "/tmp/vla-prompt-XXXXXX";
static vlai_tokenizer *tok;

static int set_up(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static const char *const texts[] = {"pick up the bowl"};
    assert_non_null(mkdtemp(dir));
    assert_ok(vlai_tokenizer_write(dir, texts, 1, 20, &err), err);
    assert_ok(vlai_tokenizer_open(dir, &tok, &err), err);
    assert_ok(vlai_prompt_add_tokens(tok, 4, NULL, 0, &err), err);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_tokenizer_close(tok);
    return vlai_remove_tree(dir, &err) != VLA_OK;
}

static void points(void **state)
{
    (void)state;
    static const struct {
        const char *in, *out;
    } rows[] = {
        {"go to <point>[33, 41]</point> now", "go to <point>[66, 20]</point> now"},
        {"<point>99 999</point>", "<point>[198, 49]</point>"},
        {"<point>1,2,3,4</point> <point>0 0</point>", "<point>[2, 1, 6, 2]</point> <point>[0, 0]</point>"},
        {"<point>1 2 03</point>", "<point>[1, 2, 3]</point>"},
        {"<point>5, 5", "<point>5, 5"},
        {"<point>\n5 5</point>", "<point>\n5 5</point>"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) { /* x doubles, y halves (half to even), clamped to 200 x 50 */
        vlai_text out = {0};
        vlai_prompt_points(rows[i].in, 100, 100, 200, 50, &out);
        assert_string_equal(out.data, rows[i].out);
        vlai_text_fini(&out);
    }
}

static void bins(void **state)
{
    (void)state;
    static const float x[] = {-1, -0.9921875f, -0.5f, -1e-7f, 0, 0.3f, 0.99f, 1};
    static const float mask[] = {1, 1, 1, 1, 1, 1, 1, 1}, some[] = {0, 1, 0, 0, 0, 0, 0, 1};
    vlai_text out = {0};
    vlai_state_string(x, mask, 8, 256, &out);
    assert_string_equal(out.data, "0 1 64 127 128 166 254 255");
    out.size = 0;
    vlai_state_string(x, some, 8, 256, &out);
    assert_string_equal(out.data, "1 255");
    vlai_text_fini(&out);
}

static void templates(void **state)
{
    (void)state;
    static const char *const views[] = {"front", "wrist"};
    static const int64_t counts[] = {2, 1};
    vlai_text prompt = {0}, text = {0};
    vlai_prompt_template(views, 2, "lift", 2, &prompt);
    assert_string_equal(prompt.data,
                        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nObservation: front: "
                        "<|vision_start|><|image_pad|><|vision_end|> wrist: <|vision_start|><|image_pad|><|vision_end|>\n"
                        "Instruction: lift\nPredict the next action in robot action.\nProprioception: <|propri|>\n<|im_end|>\n"
                        "<|im_start|>assistant\n<|action_fast|><|im_end|>\n<|action|><|action|>");
    size_t used = 0, missing = 0;
    vlai_prompt_fill fill = {.state = "7 8", .image_tokens = counts, .image_count = 2};
    vlai_prompt_finish(prompt.data, &fill, &used, &missing, &text);
    assert_non_null(strstr(text.data, "front: <|vision_start|><|image_pad|><|image_pad|><|vision_end|> wrist: "
                                      "<|vision_start|><|image_pad|><|vision_end|>\n"));
    assert_non_null(strstr(text.data, "Proprioception: 7 8\n<|im_end|>\n<|im_start|>assistant\n<|action|><|action|>"));
    assert_int_equal(used, 2);
    assert_int_equal(missing, 0);
    text.size = used = 0;
    fill.image_count = 1;
    vlai_prompt_finish(prompt.data, &fill, &used, &missing, &text);
    assert_int_equal(missing, 1);
    vlai_text_fini(&prompt);
    vlai_text_fini(&text);
}

/* A contract with one camera, 3 state dims in 4 slots, 2 action dims in 3. */
static void make_contract(vlai_contract *c)
{
    vla_error err = VLA_ERROR_INIT;
    static const double low[3] = {-1, -1, -1}, high[3] = {1, 1, 1};
    json_t *pos = json_pack("{s:i, s:i}", "arm", 3, "action_padding", 1);
    json_t *dof = json_pack("{s:i, s:i}", "arm", 2, "action_padding", 1);
    assert_ok(vlai_contract_init(c, &err), err);
    assert_ok(vlai_contract_set_keys(c, "observation.state", "action", &err), err);
    assert_ok(vlai_contract_add_camera(c, "observation.images.top", "face_view", NULL, 56, &err), err);
    assert_ok(vlai_layout_parse(pos, "pos", &c->pos, &err), err);
    assert_ok(vlai_layout_parse(dof, "dof", &c->dof, &err), err);
    assert_ok(vlai_norm_make(3, low, high, NULL, NULL, &c->state, &err), err);
    assert_ok(vlai_norm_make(2, low, high, NULL, NULL, &c->action, &err), err);
    c->horizon = 2;
    c->state_string = true;
    c->max_length = 200;
    assert_ok(vlai_contract_take_tokens(c, tok, &err), err);
    json_decref(pos);
    json_decref(dof);
}

static void samples_and_batches(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c;
    make_contract(&c);
    vlai_sampler *sampler;
    assert_ok(vlai_sampler_create(&c, tok, &sampler, &err), err);
    static uint8_t rgb[64 * 48 * 3];
    vla_picture picture = {rgb, 64, 48};
    static const float values[5] = {0, 1, -1}, actions[4] = {0.5f, -0.5f, 2, 0};
    static const uint8_t is_pad[2] = {0, 1};
    vlai_sample_input in = {.state = values, .state_dims = 3, .action = actions, .action_dims = 2, .pictures = &picture,
                            .task = "pick up the bowl", .episode = 3, .frame = 9};
    vlai_sample a = {0}, b = {0};
    assert_ok(vlai_sampler_prepare(sampler, &in, &a, &err), err);
    assert_int_equal(a.pictures[0].width, 56);
    assert_int_equal(a.pictures[0].height, 56); /* 56x42, then 56x56: the nearest multiples of 28 */
    assert_int_equal(a.patches, 16);
    assert_non_null(strstr(a.text.data, "Proprioception: 128 255 0\n"));
    static const float want[6] = {0.5f, -0.5f, 0, 1, 0, 0};
    assert_memory_equal(a.action, want, sizeof want);
    in.action_is_pad = is_pad;
    in.task = "pick up";
    assert_ok(vlai_sampler_prepare(sampler, &in, &b, &err), err);
    assert_memory_equal(b.dof_mask, a.dof_mask, sizeof want);
    assert_true(a.loss_mask[0] == 1 && a.loss_mask[1] == 1 && b.loss_mask[0] == 1 && b.loss_mask[1] == 0);
    assert_true(b.ids.count < a.ids.count);

    const vlai_sample *both[2] = {&a, &b};
    vlai_token_batch batch;
    assert_ok(vlai_sampler_collate(sampler, both, 2, &batch, &err), err);
    assert_int_equal(batch.width, a.ids.count);
    assert_null(batch.labels); /* flow training labels nothing */
    int64_t pads = batch.width - (int64_t)b.ids.count;
    for (int64_t i = 0; i < batch.width; i++) {
        assert_int_equal(batch.attention_mask[batch.width + i], i >= pads);
        assert_int_equal(batch.input_ids[batch.width + i], i < pads ? vlai_sampler_tokens(sampler)->pad : b.ids.data[i - pads]);
        assert_int_equal(batch.moe_token_types[i], i >= batch.width - 2);
    }
    vlai_token_batch_fini(&batch);
    /* A prompt that does not fit is refused with the length needed, unless the reference's cut is asked for. */
    c.max_length = 40;
    char needed[32];
    snprintf(needed, sizeof needed, "%zu tokens", b.ids.count);
    assert_fails(vlai_sampler_prepare(sampler, &in, &b, &err), VLA_E_INVALID, err, needed);
    assert_fails(vlai_sampler_prepare(sampler, &in, &b, &err), VLA_E_INVALID, err, "data.max_length");
    assert_fails(vlai_sampler_prepare(sampler, &in, &b, &err), VLA_E_INVALID, err, "episode 3, frame 9");
    /* So is one of a picture that is much too large, before any of its pixels: 64x48 at 16384 is at most 12845056 pixels, 147 x 110
     * blocks of 28, where 56x56 has 4. */
    vlai_sample large = {0};
    c.cameras[0].resolution = 16384;
    snprintf(needed, sizeof needed, "the prompt has %zu tokens", b.ids.count - 4 + 147 * 110);
    assert_fails(vlai_sampler_prepare(sampler, &in, &large, &err), VLA_E_INVALID, err, needed);
    assert_null(large.pixels);
    c.cameras[0].resolution = 56;
    vlai_sample_fini(&large);
    c.truncate = true;
    assert_ok(vlai_sampler_prepare(sampler, &in, &b, &err), err);
    /* Placeholders in an instruction. */
    in.task = "pick <|action|>up<|action|>";
    assert_fails(vlai_sampler_prepare(sampler, &in, &b, &err), VLA_E_INVALID, err, "episode 3, frame 9: the instruction holds 2 <|action|> of its own: 'pick <|action|>up<|action|>'");
    c.state_string = false;
    in.task = "pick <|propri|>";
    assert_fails(vlai_sampler_prepare(sampler, &in, &b, &err), VLA_E_INVALID, err, "the instruction holds 1 <|propri|> of its own");
    c.state_string = true;
    in.task = "pick up";
    assert_ok(vlai_sampler_prepare(sampler, &in, &b, &err), err);
    assert_ok(vlai_sampler_collate(sampler, both, 2, &batch, &err), err);
    assert_int_equal(batch.width, 40);
    vlai_token_batch_fini(&batch);
    static const float five[5] = {0};
    in.state = five;
    in.state_dims = 5;
    assert_fails(vlai_sampler_prepare(sampler, &in, &b, &err), VLA_E_SHAPE, err, "agent_pos_config");
    vlai_sample_fini(&a);
    vlai_sample_fini(&b);
    vlai_sampler_destroy(sampler);
    vlai_contract_fini(&c);
}

static void discrete_labels(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c;
    make_contract(&c);
    c.discrete = true;
    vlai_sampler *sampler;
    assert_ok(vlai_sampler_create(&c, tok, &sampler, &err), err);
    static uint8_t rgb[28 * 28 * 3];
    vla_picture picture = {rgb, 28, 28};
    static const float zeros[4] = {0};
    static const int32_t one[] = {2}, three[] = {0, 3, 1};
    vlai_sample_input in = {.state = zeros, .state_dims = 3, .action = zeros, .action_dims = 2, .pictures = &picture,
                            .task = "pick up", .action_tokens = three, .action_token_count = 3};
    vlai_sample a = {0}, b = {0};
    assert_ok(vlai_sampler_prepare(sampler, &in, &a, &err), err);
    in.action_tokens = one;
    in.action_token_count = 1;
    assert_ok(vlai_sampler_prepare(sampler, &in, &b, &err), err);
    const vlai_sample *both[2] = {&a, &b};
    vlai_token_batch batch;
    assert_ok(vlai_sampler_collate(sampler, both, 2, &batch, &err), err);
    assert_non_null(batch.labels);
    const vlai_prompt_tokens *t = vlai_sampler_tokens(sampler);
    int64_t first = t->first_action_token, *last = batch.labels + batch.width - 5, *short_row = last + batch.width;
    assert_int_equal(last[0], first);
    assert_int_equal(last[1], first + 3);
    assert_int_equal(last[2], first + 1);
    assert_int_equal(last[3], t->end);
    assert_int_equal(last[-1], -100);
    assert_int_equal(short_row[0], first + 2); /* then <|im_end|>, newline and two <|endoftext|> that carry no label */
    assert_int_equal(short_row[1], t->end);
    assert_int_equal(short_row[3], -100);
    assert_int_equal(batch.input_ids[2 * batch.width - 1], t->end_of_text);
    assert_int_equal(batch.attention_mask[2 * batch.width - 1], 1);
    vlai_token_batch_fini(&batch);
    vlai_sample_fini(&a);
    vlai_sample_fini(&b);
    vlai_sampler_destroy(sampler);
    vlai_contract_fini(&c);
}

static void contract_round_trip(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_contract c, back;
    make_contract(&c);
    json_t *json = vlai_contract_to_json(&c);
    assert_non_null(json);
    assert_ok(vlai_contract_from_json(json, "state.json", &back, &err), err);
    json_t *again = vlai_contract_to_json(&back);
    assert_ok(vlai_contract_match(json, again, "a", "b", &err), err);
    assert_ok(vlai_contract_check_tokens(&back, tok, &err), err);
    back.state_bins = 512;
    back.tokens[0].id++;
    back.cameras[0].display = "top";
    json_t *other = vlai_contract_to_json(&back);
    assert_fails(vlai_contract_match(json, other, "checkpoint", "config", &err), VLA_E_INVALID, err,
                 "prompt.state_bins: 256 against 512");
    assert_fails(vlai_contract_match(json, other, "checkpoint", "config", &err), VLA_E_INVALID, err,
                 "cameras[0].name: \"face_view\" against \"top\"");
    assert_fails(vlai_contract_check_tokens(&back, tok, &err), VLA_E_INVALID, err, "<|endoftext|>");
    json_object_del(other, "cameras");
    vlai_contract bad;
    assert_fails(vlai_contract_from_json(other, "state.json", &bad, &err), VLA_E_FORMAT, err, "cameras");
    /* The order of a layout is part of the contract. */
    json_t *x = json_pack("{s:{s:i,s:i}}", "layout", "a", 1, "b", 2), *y = json_pack("{s:{s:i,s:i}}", "layout", "b", 2, "a", 1);
    assert_fails(vlai_contract_match(x, y, "a", "b", &err), VLA_E_INVALID, err, "layout: the same keys in another order");
    json_decref(x);
    json_decref(y);
    json_decref(json);
    json_decref(again);
    json_decref(other);
    vlai_contract_fini(&c);
    vlai_contract_fini(&back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(points),          cmocka_unit_test(bins),                cmocka_unit_test(templates),
        cmocka_unit_test(samples_and_batches), cmocka_unit_test(discrete_labels), cmocka_unit_test(contract_round_trip),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
