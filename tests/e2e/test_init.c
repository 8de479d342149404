/* vla init: what it writes can be loaded strictly, has the promised distribution and bytes, and is there whole or not. */
#include "program.h"

#include "base/io.h"
#include "base/memory.h"
#include "format/safetensors.h"
#include "model/wallx.h"
#include "model/wallx_init.h"
#include "model/wallx_layout.h"
#include "text/prompt.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

static vla_error err = VLA_ERROR_INIT;

static const char *const texts[] = {"<|im_start|>user\nmove to the red goal<|im_end|>\n", "<|im_start|>user\nmove to the blue goal<|im_end|>\n"};

static vlai_wallx_init_options demo(const char *out)
{
    vlai_wallx_init_options o = VLAI_WALLX_INIT_DEMO;
    o.out = out;
    o.texts = texts;
    o.text_count = 2;
    o.threads = 1;
    return o;
}

static void load(const char *dir, vlai_wallx_config *config, vla_store **store)
{
    vlai_safetensors *st;
    assert_ok(vlai_wallx_config_load(dir, config, &err), err);
    assert_ok(vlai_safetensors_open(dir, &st, &err), err);
    assert_ok(vlai_wallx_stored_sizes(st, &config->vocab_size, &config->action_dim, &config->propri_dim, &err), err);
    assert_ok(vla_store_create(store, &err), err);
    assert_ok(vlai_wallx_params(config, NULL, NULL, *store, &err), err);
    assert_ok(vla_store_allocate(*store, VLA_FP32, VLA_STORE_PREDICT, &err), err);
    assert_ok(vlai_wallx_load(config, st, *store, NULL, &err), err);
    vlai_safetensors_close(st);
}

static void loads_strictly_with_the_promised_numbers(void **state)
{
    (void)state;
    vlai_wallx_init_options o = demo(at("demo"));
    vlai_wallx_init_summary made;
    assert_ok(vlai_wallx_init(&o, &made, &err), err);
    vlai_wallx_config config;
    vla_store *store;
    load(o.out, &config, &store);
    assert_int_equal(config.action_dim, 7);
    assert_int_equal(config.propri_dim, 8);
    assert_true(made.parameters > 300000 && made.parameters < 550000);
    double sum = 0, squares = 0, fourth = 0;
    int64_t n = 0;
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        const float *w = t.data;
        bool bias = strstr(t.name, ".bias") != NULL;
        for (int64_t k = 0; k < t.elements; k++) {
            if (t.rank == 1) {
                assert_true(w[k] == (bias ? 0.0f : 1.0f));
                continue;
            }
            double x = w[k] / o.sizes.range;
            sum += x;
            squares += x * x;
            fourth += x * x * x * x;
            n++;
        }
    }
    /* Moments of a unit normal, within five standard errors: 1/sqrt(n), sqrt(2/n), sqrt(96/n). */
    double root = sqrt((double)n);
    assert_true(fabs(sum / (double)n) < 5 / root);
    assert_true(fabs(squares / (double)n - 1) < 5 * sqrt(2) / root);
    assert_true(fabs(fourth / (double)n - 3) < 5 * sqrt(96) / root);
    vla_store_destroy(store);
    /* The vocabulary is the embedding, and the architecture names its ids. */
    vlai_tokenizer *tok;
    assert_ok(vlai_tokenizer_open(o.out, &tok, &err), err);
    assert_ok(vlai_prompt_add_tokens(tok, 0, NULL, 0, &err), err);
    assert_int_equal(vlai_tokenizer_size(tok), made.vocab);
    assert_int_equal(config.vocab_size, made.vocab);
    assert_int_equal(config.image_token_id, vlai_tokenizer_id(tok, "<|image_pad|>"));
    assert_int_equal(config.vision_start_token_id, vlai_tokenizer_id(tok, "<|vision_start|>"));
    vlai_tokenizer_close(tok);
}

static void same_bytes(const char *a, const char *b)
{
    char *x, *y;
    size_t n, m;
    assert_ok(vlai_read_file(a, 0, &x, &n, &err), err);
    assert_ok(vlai_read_file(b, 0, &y, &m, &err), err);
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n);
    vlai_free(x);
    vlai_free(y);
}

/* Threads and files of another size change nothing but where tensors stand; another seed changes every matrix. */
static void one_seed_one_model(void **state)
{
    (void)state;
    vlai_wallx_init_options a = demo(at("a")), b = demo(at("b")), c = demo(at("c"));
    vlai_wallx_init_summary made;
    b.threads = 3;
    c.shard_gb = 0.0003;
    assert_ok(vlai_wallx_init(&a, &made, &err), err);
    assert_ok(vlai_wallx_init(&b, &made, &err), err);
    assert_int_equal(made.files, 1);
    assert_ok(vlai_wallx_init(&c, &made, &err), err);
    assert_true(made.files > 5);
    same_bytes(at("a/model.safetensors"), at("b/model.safetensors"));
    same_bytes(at("a/tokenizer.json"), at("c/tokenizer.json"));
    assert_true(vlai_is_file(at("c/model.safetensors.index.json")));
    vlai_safetensors *whole, *parts, *other;
    assert_ok(vlai_safetensors_open(at("a"), &whole, &err), err);
    assert_ok(vlai_safetensors_open(at("c"), &parts, &err), err);
    vlai_wallx_init_options d = demo(at("d"));
    d.seed = 1;
    assert_ok(vlai_wallx_init(&d, &made, &err), err);
    assert_ok(vlai_safetensors_open(at("d"), &other, &err), err);
    assert_int_equal(vlai_safetensors_count(whole), vlai_safetensors_count(parts));
    for (size_t i = 0; i < vlai_safetensors_count(whole); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(whole, i), *w = vlai_safetensors_find(parts, v->name);
        const vlai_tensor_view *u = vlai_safetensors_find(other, v->name);
        assert_true(w && u);
        assert_memory_equal(v->data, w->data, v->bytes);
        assert_int_equal(memcmp(v->data, u->data, v->bytes) == 0, v->rank == 1);
    }
    vlai_safetensors_close(whole);
    vlai_safetensors_close(parts);
    vlai_safetensors_close(other);
}

static void bf16_is_the_rounded_model(void **state)
{
    (void)state;
    vlai_wallx_init_options a = demo(at("f32")), b = demo(at("bf16"));
    vlai_wallx_init_summary made;
    b.dtype = VLA_BF16;
    assert_ok(vlai_wallx_init(&a, &made, &err), err);
    assert_ok(vlai_wallx_init(&b, &made, &err), err);
    vlai_safetensors *x, *y;
    assert_ok(vlai_safetensors_open(a.out, &x, &err), err);
    assert_ok(vlai_safetensors_open(b.out, &y, &err), err);
    for (size_t i = 0; i < vlai_safetensors_count(x); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(x, i), *w = vlai_safetensors_find(y, v->name);
        assert_non_null(w);
        bool head = strstr(v->name, "action_preprocessor") != NULL;
        assert_true(!head || w->dtype == VLA_F32);
        if (!strncmp(v->name, "model.embed_tokens", 18))
            assert_int_equal(w->dtype, VLA_BF16);
        float p[64], q[64];
        int64_t n = v->elements < 64 ? v->elements : 64;
        assert_ok(vlai_tensor_to_float(v, 0, n, p, &err), err);
        assert_ok(vlai_tensor_to_float(w, 0, n, q, &err), err);
        for (int64_t k = 0; k < n; k++) /* half a unit in the last of 8 bits */
            assert_true(fabsf(p[k] - q[k]) <= (w->dtype == VLA_BF16 ? fabsf(p[k]) / 256 : 0));
    }
    vlai_safetensors_close(x);
    vlai_safetensors_close(y);
}

static void whole_or_absent(void **state)
{
    (void)state;
    vlai_wallx_init_options o = demo(at("failing"));
    vlai_wallx_init_summary made;
    vlai_io_fail_nth(0);
    assert_ok(vlai_wallx_init(&o, &made, &err), err);
    uint64_t writes = vlai_io_fail_nth(0);
    assert_true(writes > 10);
    assert_fails(vlai_wallx_init(&o, &made, &err), VLA_E_INVALID, err, "exists already");
    assert_ok(vlai_remove_tree(o.out, &err), err);
    for (uint64_t n = 1; n <= writes; n++) {
        vlai_io_fail_nth(n);
        vla_status status = vlai_wallx_init(&o, &made, &err);
        vlai_io_fail_nth(0);
        if (n < writes) { /* the last is the sync of the parent, after the rename */
            assert_int_equal(status, VLA_E_IO);
            assert_false(vlai_is_dir(o.out));
        }
        assert_ok(vlai_remove_tree(o.out, &err), err);
    }
    char **names;
    size_t count;
    assert_ok(vlai_list_dir(root, &names, &count, &err), err);
    for (size_t i = 0; i < count; i++)
        assert_null(strstr(names[i], "tmp-"));
    vlai_names_free(names, count);
}

static void full_size_from_the_command_line(void **state)
{
    (void)state;
    assert_int_equal(run("init --preset full --dry-run"), 0);
    assert_true(output_has("838 tensors, 4154483712 parameters, 16617934848 bytes")); /* 4,154,377,216 and propri_proj */
    assert_true(output_has("model.layers.35.moe.experts.0.gate_up_proj.weight"));
    assert_int_equal(run("init --config " VLA_TEST_ROOT "/configs/wall-oss-0.5 --action-dim 26 --state-dim 26 --dry-run"), 0);
    assert_true(output_has("838 tensors, 4154483712 parameters, 16617934848 bytes"));
    assert_int_equal(run("init --train-config " VLA_TEST_ROOT "/configs/libero_local_perf.yml small --preset demo"), 0);
    vlai_safetensors *st;
    int64_t action = 0, state_dim = 0;
    assert_ok(vlai_safetensors_open(at("small"), &st, &err), err);
    assert_ok(vlai_wallx_stored_sizes(st, NULL, &action, &state_dim, &err), err);
    assert_int_equal(action, 26);
    assert_int_equal(state_dim, 26);
    vlai_safetensors_close(st);
    /* The processor of one model serves another. */
    assert_int_equal(run("init next --preset demo --hidden 96 --heads 6 --layers 2 --processor small"), 0);
    same_bytes(at("small/tokenizer.json"), at("next/tokenizer.json"));
}

static void says_what_is_wrong(void **state)
{
    (void)state;
    assert_int_equal(run("init"), 2);
    assert_int_equal(run("init x"), 2);
    assert_true(output_has("no architecture was chosen"));
    assert_int_equal(run("init x --preset big"), 2);
    assert_true(output_has("'big' is not demo or full"));
    assert_int_equal(run("init x --preset demo --layer 3"), 2);
    assert_true(output_has("did you mean '--layers'"));
    assert_int_equal(run("init x --preset demo --heads 3"), 2);
    assert_true(output_has("the chosen sizes: hidden_size 64 is not a multiple of num_attention_heads 3"));
    assert_int_equal(run("init x --preset demo --heads 0"), 2);
    assert_true(output_has("heads is 0, wanted 1 to 1024"));
    assert_int_equal(run("init x --preset demo --vocab 20"), 3);
    assert_true(output_has("the embedding 20 rows"));
    assert_int_equal(run("init x --preset demo --processor nowhere"), 3);
    assert_true(output_has("nowhere/tokenizer.json: no such file"));
    assert_int_equal(run("init x --config y --hidden 8"), 2);
    assert_false(vlai_is_dir(at("x")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loads_strictly_with_the_promised_numbers),
        cmocka_unit_test(one_seed_one_model),
        cmocka_unit_test(bf16_is_the_rounded_model),
        cmocka_unit_test(whole_or_absent),
        cmocka_unit_test(full_size_from_the_command_line),
        cmocka_unit_test(says_what_is_wrong),
    };
    return cmocka_run_group_tests_name("init", tests, make_root, drop_root);
}
