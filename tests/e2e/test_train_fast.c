/* Training on discrete FAST action tokens, as a user runs it: it learns, resumes to the bit, refuses what does not go together, and
 * leaves what it does not train alone. */
#include "tiny.h"

#include "base/json.h"
#include "format/safetensors.h"

#include <math.h>

#define FAST "--data.use_fast_tokenizer=true --data.action_tokenizer_path=" VLA_TEST_ROOT "/tests/fast "
/* The embedding's rows of action tokens are drawn beside the weights of the others. */
#define DRAWN FAST "--checkpoint.resume_from=null --model.pretrained_path=start "

static void train(const char *name, const char *more)
{
    char arguments[2048];
    snprintf(arguments, sizeof arguments, "train --config tiny.yml --checkpoint.save_path=%s %s", name, more);
    tiny_must(arguments);
}

/* A number of the last line of a file. */
static double last(const char *file, const char *key)
{
    vla_error err = VLA_ERROR_INIT;
    size_t size;
    json_t *record;
    char *text = tiny_read(file, &size), *line = text + size - 1;
    while (line > text && line[-1] != '\n')
        line--;
    assert_ok(vlai_json_parse(line, strlen(line), file, &record, &err), err);
    json_t *value = json_object_get(record, key);
    double x = json_is_number(value) ? json_number_value(value) : NAN;
    json_decref(record);
    vlai_free(text);
    return x;
}

static double first_loss(const char *more)
{
    char arguments[1024];
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_remove_tree(at("one"), &err), err);
    snprintf(arguments, sizeof arguments, "--stop-at 1 %s", more);
    train("one", arguments);
    return last("one/metrics.jsonl", "loss");
}

static void learns(void **state)
{
    (void)state;
    train("learn", DRAWN "--hyperparams.scheduler.num_training_steps=300 --hyperparams.optimizer.learning_rate=5e-3 --data.num_workers=1 "
                         "--data.lerobot_config.episodes=[0,1,2]");
    double loss = last("learn/metrics.jsonl", "cross_entropy_loss");
    print_message("cross entropy after 300 steps: %.4f of %.4f for a guess\n", loss, log(720));
    assert_true(loss < 0.05 * log(720));
    assert_true(last("learn/metrics.jsonl", "loss") == loss);
    assert_true(isnan(last("learn/metrics.jsonl", "flow_loss")));
    assert_true(last("learn/validation.jsonl", "cross_entropy_loss") > 0);
    /* The action expert has no part in it. */
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *before, *after;
    assert_ok(vlai_safetensors_open(at("start/model.safetensors"), &before, &err), err);
    assert_ok(vlai_safetensors_open(at("learn/latest/model.safetensors"), &after, &err), err);
    int same = 0, moved = 0;
    for (size_t i = 0; i < vlai_safetensors_count(after); i++) {
        const vlai_tensor_view *a = vlai_safetensors_at(after, i), *b = vlai_safetensors_find(before, a->name);
        bool expert = strstr(a->name, "experts.1.") || strstr(a->name, "norms.1.") || strstr(a->name, "action_preprocessor");
        if (!b || a->elements != b->elements)
            continue;
        bool equal = !memcmp(a->data, b->data, (size_t)a->elements * sizeof(float));
        if (equal != expert)
            fail_msg("%s %s", a->name, equal ? "has not moved" : "has moved");
        same += equal;
        moved += !equal;
    }
    print_message("%d tensors as they were, %d moved\n", same, moved);
    assert_true(same >= 10 && moved >= 30);
    vlai_safetensors_close(before);
    vlai_safetensors_close(after);
}

static double number_in(const char *json, const char *section, const char *key)
{
    vla_error err = VLA_ERROR_INIT;
    json_t *all;
    char *text = tiny_read(json, NULL);
    assert_ok(vlai_json_parse(text, strlen(text), json, &all, &err), err);
    const json_t *value = json_object_get(section ? json_object_get(all, section) : all, key);
    assert_true(json_is_number(value));
    double x = json_number_value(value);
    json_decref(all);
    vlai_free(text);
    return x;
}

/* What has been learnt by heart is written token by token and read back: off by what the tokens round away. */
static void predicts(void **state)
{
    (void)state;
    tiny_must("predict learn --episodes 0-1 --stride 1");
    assert_true(number_in("learn/predict/summary.json", NULL, "unreadable") == 0);
    double error = number_in("learn/predict/summary.json", "half_ranges", "l1"), mean = number_in("learn/predict/summary.json", "half_ranges", "mean_action_l1");
    print_message("actions predicted from tokens: %.4f half ranges off, the mean action %.4f\n", error, mean);
    assert_true(error < 0.05 && error < 0.2 * mean);
    tiny_must("predict learn --episodes 0-1 --stride 1 --batch 1 --out alone");
    assert_true(tiny_equal("learn/predict/predictions.csv", "alone/predictions.csv"));
    /* A model that has learnt nothing writes no chunks, which is no error. */
    train("fresh", DRAWN "--stop-at 1");
    tiny_must("predict fresh --episodes 0 --stride 1");
    tiny_said("predictions stand for no chunk");
    assert_true(number_in("fresh/predict/summary.json", NULL, "unreadable") > 0);
    /* Vocabularies with action tokens that the flow was trained beside. */
    train("flow", "--stop-at 1 --model.action_tokenizer_type=fast --model.action_tokenizer_path=" VLA_TEST_ROOT "/tests/fast");
    tiny_must("predict flow --episodes 0");
    /* The processor that the checkpoint holds is what counts. */
    assert_int_equal(unlink(at("fresh/latest/fast_tokenizer.json")), 0);
    assert_int_equal(tiny_run(NULL, "predict fresh --episodes 0"), 3);
    tiny_said("fast_tokenizer.json");
}

static void same_whatever_the_layout(void **state)
{
    (void)state;
    double loss = first_loss(DRAWN);
    assert_true(fabs(loss - log(720)) < 0.3);
    /* Pads behind the text, and the reference's <|endoftext|>, change nothing; pads before it are seen. */
    assert_true(first_loss(DRAWN "--data.padding=reference --data.padding_side=right") == loss);
    assert_true(first_loss(DRAWN "--data.padding=reference") != loss);
    assert_true(first_loss(DRAWN "--hyperparams.loss_normalization=global") == loss);
    assert_true(first_loss(DRAWN "--data.noise_scheduler.s=0.5") == loss); /* of the flow */
    /* A mean over all tokens of a step is not the mean of the micro-batches' means. */
    static const char two[] = DRAWN "--hyperparams.gradient_accumulation_steps=2 --hyperparams.batch_size_per_gpu=2";
    assert_true(first_loss(two) != loss);
    char global[512];
    snprintf(global, sizeof global, "%s --hyperparams.loss_normalization=global", two);
    assert_true(fabs(first_loss(global) - loss) < 1e-6 * loss);
}

static void resumes_to_the_bit(void **state)
{
    (void)state;
    train("through", DRAWN);
    train("parts", DRAWN "--stop-at 9");
    train("parts", DRAWN "--resume");
    assert_true(tiny_equal("through/latest/model.safetensors", "parts/latest/model.safetensors"));
    /* The processor is part of the contract. */
    char arguments[1024];
    snprintf(arguments, sizeof arguments, "cp -r %s/tests/fast %s && sed -i 's/\"scale\": 10/\"scale\": 11/' %s/processor_config.json", VLA_TEST_ROOT,
             at("other"), at("other"));
    assert_int_equal(system(arguments), 0);
    train("again", DRAWN "--stop-at 2");
    assert_int_equal(tiny_run(NULL, "train --config tiny.yml --checkpoint.save_path=again " DRAWN "--data.action_tokenizer_path=other --resume"), 2);
    tiny_said("contract.prompt.action_tokens.scale: 10.0 in the checkpoint, 11.0 now");
}

static void other_commands(void **state)
{
    (void)state;
    tiny_must("preflight --config tiny.yml " DRAWN);
    tiny_said("start/tokenizer.json: 720 tokens");
    tiny_said("action tokens, which stand for it within");
    tiny_said("720 rows");
    tiny_must("inspect batch --config tiny.yml " DRAWN);
    tiny_said("<|action_token_");
    assert_int_equal(tiny_run(NULL, "inspect plan --config tiny.yml " DRAWN), 2);
    tiny_said("`vla preflight` counts them");
}

static void keys_that_do_not_go_together(void **state)
{
    (void)state;
    static const struct {
        const char *options, *said;
        int code;
    } rows[] = {
        {"--data.use_fast_tokenizer=true", "needs a processor", 2},
        {"--model.action_tokenizer_type=fast", "needs a processor", 2},
        {"--model.action_tokenizer_type=spatialvla", "is refused", 2},
        {DRAWN "--model.action_tokenizer_path=start", "model and data have one action tokenizer", 2},
        {DRAWN "--data.action_tokenizer_path=start", "give the folder of a FAST processor", 3},
        {DRAWN "--hyperparams.optimizer.train_action_expert_only=true --hyperparams.optimizer.action_expert_learning_rate=1e-3", "freezes", 2},
        {DRAWN "--data.max_length=70", "the prompt has", 2},
        {FAST, "400 embedding rows, the tokenizer with its action tokens 720", 3},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char arguments[1024];
        snprintf(arguments, sizeof arguments, "train --config tiny.yml --checkpoint.save_path=refused --stop-at 1 %s", rows[i].options);
        assert_int_equal(tiny_run(NULL, arguments), rows[i].code);
        tiny_said(rows[i].said);
    }
    first_loss(DRAWN "--data.mask_padded_actions=true");
    tiny_said("data.mask_padded_actions has no effect");
    double flow = first_loss("");
    assert_true(first_loss("--data.action_tokenizer_path=start") == flow);
    tiny_said("data.action_tokenizer_path has no effect");
    assert_true(first_loss("--model.action_tokenizer_type=fast --model.action_tokenizer_path=" VLA_TEST_ROOT "/tests/fast") == flow);
    tiny_said("action tokens join the vocabulary, but the flow is trained");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(learns), cmocka_unit_test(predicts), cmocka_unit_test(same_whatever_the_layout), cmocka_unit_test(resumes_to_the_bit),
                                       cmocka_unit_test(other_commands), cmocka_unit_test(keys_that_do_not_go_together)};
    return cmocka_run_group_tests(tests, tiny_make, drop_root);
}
