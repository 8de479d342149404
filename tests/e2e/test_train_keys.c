/* What keys of a configuration do to a run, seen from outside: the first loss, the weights that are saved, the notices. */
#include "tiny.h"

#include "format/safetensors.h"

#include <jansson.h>
#include <math.h>

/* One step with `options`; "loss" or another number of its record. */
static double first(const char *options, const char *key)
{
    char arguments[2048];
    snprintf(arguments, sizeof arguments, "train --config tiny.yml --checkpoint.save_path=one --stop-at 1 %s", options);
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_remove_tree(at("one"), &err), err);
    tiny_must(arguments);
    char *text = tiny_read("one/metrics.jsonl", NULL);
    json_t *record = json_loads(text, JSON_DISABLE_EOF_CHECK, NULL); /* one step, one line */
    assert_non_null(record);
    double value = json_number_value(json_object_get(record, key));
    json_decref(record);
    vlai_free(text);
    return value;
}

static void keys_that_change_the_first_loss(void **state)
{
    (void)state;
    double plain = first("", "loss");
    static const char *const changing[] = {
        "--hyperparams.seed=8", "--data.noise_scheduler.s=0.5", "--data.noise_scheduler.time_shift=3",
        "--data.noise_scheduler.beta_alpha=3", "--task.noise_scheduler.beta_beta=2", "--data.state_bins=64", "--state_bins=64",
        "--task.use_state_string_representation=false", "--data.use_state_string_representation=false",
        "--data.validation_split=frame", "--data.train_test_split=0.5", "--data.padding=reference",
        "--data.camera_name_mapping.face_view=front", "--data.mask_padded_actions=true", "--data.resolution.face_view=112",
        "--data.lerobot_config.episodes=[0,1,2,3,4]", "--hyperparams.batch_size_per_gpu=5",
    };
    for (size_t i = 0; i < sizeof changing / sizeof *changing; i++)
        if (first(changing[i], "loss") == plain)
            fail_msg("%s leaves the first loss as it is", changing[i]);
    /* These are other ways to the same samples. */
    static const char *const equal[] = {"--data.num_workers=0", "--data.picture_order=features", "--data.padding_side=right",
                                        "--data.padding=reference --data.padding_side=right", "--data.max_length=100"};
    for (size_t i = 0; i < sizeof equal / sizeof *equal; i++)
        if (first(equal[i], "loss") != plain)
            fail_msg("%s changes the first loss", equal[i]);
}

static void the_flow_loss_has_a_weight(void **state)
{
    (void)state;
    double flow = first("", "flow_loss"), norm = first("", "grad_norm");
    assert_true(first("--model.flow_loss_weight=2", "flow_loss") == flow);
    assert_true(first("--model.flow_loss_weight=2", "loss") == 2 * flow);
    assert_true(fabs(first("--model.flow_loss_weight=2", "grad_norm") - 2 * norm) < 1e-6 * norm);
}

static void keys_without_effect_say_so(void **state)
{
    (void)state;
    static const struct {
        const char *option, *said;
    } rows[] = {
        {"--task.action_horizon_flow=7", "task.action_horizon_flow = 7 has no effect: the model takes the 4 actions"},
        {"--data.max_pixels=1000000", "data.max_pixels has no effect"},
        {"--model.attn_implementation=sdpa", "the architecture file decides"},
        {"--data.use_state_string_representation=false", "wins over the same key of the task"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        first(rows[i].option, "loss");
        tiny_said(rows[i].said);
    }
    static const char *const refused[] = {"--model.use_ema=true", "--distributed.bf16=false",
                                          "--hyperparams.optimizer.optimizer_type=dmuon",
                                          "--hyperparams.scheduler.scheduler_type=step", "--model.action_tokenizer_config_dir=x"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "train --config tiny.yml %s", refused[i]);
        assert_int_equal(tiny_run(NULL, arguments), 2);
        tiny_said("is refused");
    }
}

/* A depth camera needs no view; a colour camera does. */
static void depth_cameras_stay_unmapped(void **state)
{
    (void)state;
    static const char one_camera[] = "train --config tiny.yml --stop-at 1 --checkpoint.save_path=depth "
                                     "--data.lerobot_config.repo_id=deep "
                                     "--data.key_mappings.camera={\"observation.images.image\":\"face_view\"}";
    tiny_must("synth deep --episodes 5 --length 8 --size 64x64 --state-dim 3 --action-dim 3 --storage image");
    assert_int_equal(tiny_run(NULL, one_camera), 2);
    tiny_said("not mapped: 'observation.images.wrist_image'");
    json_t *info = json_load_file(at("deep/meta/info.json"), 0, NULL);
    json_t *camera = json_object_get(json_object_get(info, "features"), "observation.images.wrist_image");
    assert_int_equal(json_object_set_new(camera, "info", json_pack("{s:b}", "is_depth_map", 1)), 0);
    assert_int_equal(json_dump_file(info, at("deep/meta/info.json"), JSON_INDENT(4)), 0);
    json_decref(info);
    tiny_must(one_camera);
}

static vlai_safetensors *open_weights(const char *name)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *st;
    assert_ok(vlai_safetensors_open(at(name), &st, &err), err);
    return st;
}

/* With rate 0 the checkpoint of a step holds what the run began with. */
static const char at_rest[] = "train --config tiny.yml --stop-at 1 --hyperparams.optimizer.learning_rate=0 --checkpoint.resume_from=null";

static void drawn_weights(void **state)
{
    (void)state;
    char arguments[1024];
    json_t *architecture = json_load_file(at("start/config.json"), 0, NULL);
    assert_non_null(architecture);
    assert_int_equal(json_object_set_new(architecture, "use_adarms", json_true()), 0);
    assert_int_equal(json_dump_file(architecture, at("adarms.json"), 0), 0);
    json_decref(architecture);
    snprintf(arguments, sizeof arguments, "%s --checkpoint.save_path=drawn --model.config_path=adarms.json", at_rest);
    tiny_must(arguments);
    vlai_safetensors *st = open_weights("drawn/0_1/model.safetensors");
    int norms = 0, biases = 0, matrices = 0;
    for (size_t i = 0; i < vlai_safetensors_count(st); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(st, i);
        const float *x = (const float *)v->data;
        double sum = 0, squares = 0;
        for (int64_t k = 0; k < v->elements; k++) {
            sum += (double)x[k];
            squares += (double)x[k] * (double)x[k];
        }
        if (v->rank > 1) { /* normal(0, 0.02): both within five deviations of their estimates */
            double m = (double)v->elements;
            assert_true(fabs(sum / m) < 5 * 0.02 / sqrt(m));
            assert_true(fabs(squares / m / 0.0004 - 1) < 5 * sqrt(2 / m));
            matrices++;
        } else {
            bool bias = strstr(v->name, ".bias") != NULL;
            if (sum != (bias ? 0.0 : (double)v->elements) || squares != sum)
                fail_msg("%s begins with sum %g of %lld values", v->name, sum, (long long)v->elements);
            norms += !bias;
            biases += bias;
        }
    }
    assert_true(norms > 5 && biases > 10 && matrices > 20);
    assert_non_null(vlai_safetensors_find(st, "visual.merger.ln_q.weight"));
    assert_non_null(vlai_safetensors_find(st, "model.norms.1.dense.bias"));
    vlai_safetensors_close(st);
}

/* A pretrained folder with more embedding rows than the tokenizer has tokens gives the first of them. */
static void pretrained_weights(void **state)
{
    (void)state;
    char arguments[1024];
    tiny_must("init wide --config start --train-config tiny.yml --vocab 500 --seed 3");
    tiny_must("convert wide qwen --to unfused");
    snprintf(arguments, sizeof arguments, "%s --checkpoint.save_path=pretrained --model.pretrained_path=qwen", at_rest);
    tiny_must(arguments);
    vlai_safetensors *from = open_weights("wide/model.safetensors"), *st = open_weights("pretrained/0_1/model.safetensors");
    for (size_t i = 0; i < vlai_safetensors_count(st); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(st, i), *old = vlai_safetensors_find(from, v->name);
        assert_non_null(old);
        bool table = !strcmp(v->name, "model.embed_tokens.weight");
        assert_true(table ? v->shape[0] < 500 && old->shape[0] == 500 : v->bytes == old->bytes);
        if (memcmp(v->data, old->data, v->bytes) != 0)
            fail_msg("%s is not that of the pretrained folder", v->name);
    }
    vlai_safetensors_close(from);
    vlai_safetensors_close(st);
}

/* The state is written as text, so that propri_proj does nothing: its bits pass through a run and a resume. */
static void an_unused_tensor_stays(void **state)
{
    (void)state;
    tiny_must("train --config tiny.yml --checkpoint.save_path=kept --stop-at 2");
    tiny_must("train --config tiny.yml --checkpoint.save_path=kept --stop-at 4 --resume");
    vlai_safetensors *from = open_weights("start/model.safetensors"), *st = open_weights("kept/0_4/model.safetensors");
    assert_int_equal(vlai_safetensors_count(st), vlai_safetensors_count(from));
    const vlai_tensor_view *a = vlai_safetensors_find(from, "action_preprocessor.propri_proj.weight"),
                           *b = vlai_safetensors_find(st, "action_preprocessor.propri_proj.weight");
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal(a->bytes, b->bytes);
    assert_memory_equal(a->data, b->data, a->bytes);
    vlai_safetensors_close(from);
    vlai_safetensors_close(st);
}

#define OPTIMIZER "--hyperparams.optimizer."

static void groups_that_do_not_fit(void **state)
{
    (void)state;
    static const struct {
        const char *options, *said;
    } rows[] = {
        {OPTIMIZER "lr_groups=[{\"name\":\"a\",\"lr\":1e-3,\"include\":[\"visual\"]},{\"name\":\"b\",\"lr\":1e-3,\"include\":[\"merger\"]}]",
         "parameter 'visual.merger.ln_q.weight' matches both 'a' and 'b'"},
        {OPTIMIZER "lr_groups=[{\"name\":\"a\",\"lr\":1e-3,\"include\":[\"nothing\"]}]", "group 'a' matches no parameter"},
        {OPTIMIZER "lr_groups=[{\"name\":\"a\",\"lr\":1e-3,\"include\":[\"nothing\"],\"fail_on_empty\":false}] " OPTIMIZER
                   "train_action_expert_only=true", "train_action_expert_only: no group matches a parameter"},
        {OPTIMIZER "train_action_expert_only=true", "train_action_expert_only needs a group"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char arguments[1024];
        snprintf(arguments, sizeof arguments, "train --config tiny.yml --checkpoint.save_path=groups %s", rows[i].options);
        assert_int_equal(tiny_run(NULL, arguments), 2);
        tiny_said(rows[i].said);
    }
}

/* The reference's keywords pick the action expert; what they do not pick keeps its bits, whatever the decay. */
static void the_action_expert_alone(void **state)
{
    (void)state;
    static const char *const words[] = {"action_preprocessor", "moe.experts.1", "qkv_proj_experts.1", "o_proj_experts.1",
                                        "input_layernorms.1", "post_attention_layernorms.1", "model.norms.1"};
    tiny_must("train --config tiny.yml --checkpoint.save_path=expert --stop-at 2 " OPTIMIZER "train_action_expert_only=true "
              OPTIMIZER "action_expert_learning_rate=1e-3 " OPTIMIZER "weight_decay=0.1");
    vlai_safetensors *from = open_weights("start/model.safetensors"), *st = open_weights("expert/0_2/model.safetensors");
    int moved = 0, still = 0;
    for (size_t i = 0; i < vlai_safetensors_count(st); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(st, i), *old = vlai_safetensors_find(from, v->name);
        bool expert = false, same = memcmp(v->data, old->data, v->bytes) == 0;
        for (size_t k = 0; k < sizeof words / sizeof *words; k++)
            expert |= strstr(v->name, words[k]) != NULL;
        if (same == expert && !strstr(v->name, "propri_proj")) /* the state is text: it is not used */
            fail_msg("%s %s", v->name, same ? "stays" : "moves");
        moved += !same;
        still += same;
    }
    assert_true(moved > 10 && still > 20);
    vlai_safetensors_close(from);
    vlai_safetensors_close(st);
    /* The reference measures what is trained: no tensor of the tower is, and the language model's are the second expert's. */
    tiny_must("train --config tiny.yml --checkpoint.save_path=whole --stop-at 1");
    char *alone = tiny_read("expert/metrics.jsonl", NULL), *whole = tiny_read("whole/metrics.jsonl", NULL);
    json_t *a = json_loads(alone, JSON_DISABLE_EOF_CHECK, NULL), *w = json_loads(whole, JSON_DISABLE_EOF_CHECK, NULL);
    assert_true(json_is_number(json_object_get(w, "visual_param_norm")) && !json_object_get(a, "visual_param_norm"));
    double part = json_real_value(json_object_get(a, "org_vlm_param_norm")), head = json_real_value(json_object_get(a, "action_expert_param_norm"));
    assert_true(part > 0 && part < 0.9 * json_real_value(json_object_get(w, "org_vlm_param_norm")));
    assert_float_equal(json_real_value(json_object_get(a, "total_param_norm")), sqrt(part * part + head * head), 1e-6);
    json_decref(a);
    json_decref(w);
    vlai_free(alone);
    vlai_free(whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_that_change_the_first_loss), cmocka_unit_test(the_flow_loss_has_a_weight),
        cmocka_unit_test(keys_without_effect_say_so),      cmocka_unit_test(depth_cameras_stay_unmapped), cmocka_unit_test(drawn_weights),
        cmocka_unit_test(pretrained_weights),              cmocka_unit_test(an_unused_tensor_stays),
        cmocka_unit_test(groups_that_do_not_fit),          cmocka_unit_test(the_action_expert_alone),
    };
    return cmocka_run_group_tests(tests, tiny_make, drop_root);
}
