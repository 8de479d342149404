/* vla convert on recorded checkpoints: into the other layout and back, nothing may change but names. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "format/safetensors.h"

#include <sys/wait.h>
#include <unistd.h>

static int run(const char *format, const char *a, const char *b)
{
    char command[8192];
    int n = snprintf(command, sizeof command, "'%s' convert ", VLA_TEST_PROGRAM);
    n += snprintf(command + n, sizeof command - (size_t)n, format, a, b);
    snprintf(command + n, sizeof command - (size_t)n, " >test_convert.out 2>&1");
    return WEXITSTATUS(system(command));
}

static bool output_has(const char *part)
{
    vla_error err = VLA_ERROR_INIT;
    char *text;
    assert_ok(vlai_read_file("test_convert.out", 0, &text, NULL, &err), err);
    bool found = strstr(text, part) != NULL;
    if (!found)
        print_error("'%s' lacks '%s'\n", text, part);
    vlai_free(text);
    return found;
}

/* The folder of a recorded case, or NULL when it is not here. */
static const char *recorded(const char *name)
{
    static char path[2048];
    snprintf(path, sizeof path, "%s/%s", golden_dir(), name);
    return vlai_is_dir(path) ? path : NULL;
}

/* Source, other layout, layout of the source: every tensor must come back. */
static void there_and_back(const char *source, const char *away, const char *back)
{
    vla_error err = VLA_ERROR_INIT;
    char options[256];
    snprintf(options, sizeof options, "test_convert.other --to %s", away);
    assert_int_equal(run("'%s' %s", source, options), 0);
    assert_true(vlai_is_file("test_convert.other/config.json"));
    assert_int_equal(run("%s %s", "test_convert.other test_convert.safetensors --config test_convert.other/config.json --to",
                         back), 0);
    vlai_safetensors *a, *b, *other;
    assert_ok(vlai_safetensors_open(source, &a, &err), err);
    assert_ok(vlai_safetensors_open("test_convert.safetensors", &b, &err), err);
    assert_ok(vlai_safetensors_open("test_convert.other", &other, &err), err);
    assert_int_equal(vlai_safetensors_count(a), vlai_safetensors_count(b));
    for (size_t i = 0; i < vlai_safetensors_count(a); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(a, i), *w = vlai_safetensors_find(b, v->name);
        assert_non_null(w);
        assert_int_equal(v->bytes, w->bytes);
        assert_memory_equal(v->data, w->data, v->bytes);
    }
    /* in the fused tensor the rows of k follow those of q */
    bool fuses = !strcmp(away, "fused");
    const vlai_safetensors *fused = fuses ? other : a, *unfused = fuses ? a : other;
    const vlai_tensor_view *qkv = vlai_safetensors_find(fused, "model.layers.1.self_attn.qkv_proj_experts.1.weight");
    const vlai_tensor_view *q = vlai_safetensors_find(unfused, "model.layers.1.self_attn.q_proj_experts.1.weight");
    const vlai_tensor_view *k = vlai_safetensors_find(unfused, "model.layers.1.self_attn.k_proj_experts.1.weight");
    assert_true(qkv && q && k);
    assert_memory_equal((const char *)qkv->data + q->bytes, k->data, k->bytes);
    vlai_safetensors_close(a);
    vlai_safetensors_close(b);
    vlai_safetensors_close(other);
    assert_ok(vlai_remove_tree("test_convert.other", &err), err);
    unlink("test_convert.safetensors");
}

static void fused_case(void **state)
{
    (void)state;
    const char *source = recorded("wallx-flow-xloss");
    assert_non_null(source);
    there_and_back(source, "unfused", "fused");
    /* A file where a folder is wanted, and a checkpoint that a training wrote, stay as they are. */
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_write_file_atomic("test_convert.bin", "x", 1, &err), err);
    assert_int_equal(run("'%s' %s", source, "test_convert.bin"), 3);
    assert_true(output_has("test_convert.bin: exists and is not a directory"));
    assert_true(vlai_is_file("test_convert.bin"));
    unlink("test_convert.bin");
    assert_ok(vlai_mkdirs("test_convert.saved", &err), err);
    assert_ok(vlai_write_file_atomic("test_convert.saved/DONE", "", 0, &err), err);
    assert_int_equal(run("'%s' %s", source, "test_convert.saved"), 2);
    assert_true(output_has("test_convert.saved: a checkpoint of a training lies there"));
    assert_int_equal(run("'%s' %s", source, "test_convert.saved/model.safetensors"), 2);
    assert_false(vlai_is_file("test_convert.saved/model.safetensors"));
    assert_ok(vlai_remove_tree("test_convert.saved", &err), err);
}

static void sharded_unfused_case(void **state)
{
    (void)state;
    const char *source = recorded("wallx-unfused");
    if (!source)
        skip();
    there_and_back(source, "fused", "unfused");
}

/* The recorded weights of the tower and expert 0 under their Qwen2.5-VL names: written as they are, the rest missing. */
static void plain_qwen_starts_a_model(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {{".moe.experts.0.", ".mlp."},
                                           {"_proj_experts.0.", "_proj."},
                                           {".input_layernorms.0.", ".input_layernorm."},
                                           {".post_attention_layernorms.0.", ".post_attention_layernorm."},
                                           {"model.norms.0.", "model.norm."}};
    vla_error err = VLA_ERROR_INIT;
    char config[2112];
    const char *source = recorded("wallx-flow-xloss");
    assert_non_null(source);
    snprintf(config, sizeof config, "%s/config.json", source);
    assert_int_equal(run("'%s' %s", source, "test_convert_unfused.safetensors --to unfused"), 0);
    vlai_safetensors *st;
    assert_ok(vlai_safetensors_open("test_convert_unfused.safetensors", &st, &err), err);
    static vlai_tensor_view views[512];
    static char names[512][200];
    size_t n = 0;
    for (size_t i = 0; i < vlai_safetensors_count(st) && n < 512; i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(st, i);
        if (strstr(v->name, "experts.1.") || strstr(v->name, "norms.1.") || !strncmp(v->name, "action_", 7))
            continue;
        snprintf(names[n], sizeof names[n], "%s", v->name);
        for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) {
            const char *at = strstr(v->name, pairs[p][0]);
            if (at)
                snprintf(names[n], sizeof names[n], "%.*s%s%s", (int)(at - v->name), v->name, pairs[p][1],
                         at + strlen(pairs[p][0]));
        }
        views[n] = *v;
        views[n].name = names[n];
        n++;
    }
    assert_ok(vlai_safetensors_write("test_convert_qwen.safetensors", views, n, NULL, &err), err);
    char options[2400];
    snprintf(options, sizeof options, "test_convert_qwen.safetensors test_convert_start.safetensors --config '%s'", config);
    assert_int_equal(run("%s%s", options, ""), 3);
    assert_true(output_has("tensors do not fit the model") && output_has("missing model.norms.1.weight"));
    assert_int_equal(run("%s%s", options, " --partial"), 0);
    vlai_safetensors *start;
    assert_ok(vlai_safetensors_open("test_convert_start.safetensors", &start, &err), err);
    const vlai_tensor_view *up = vlai_safetensors_find(st, "model.layers.0.moe.experts.0.up_proj.weight");
    const vlai_tensor_view *gate_up = vlai_safetensors_find(start, "model.layers.0.moe.experts.0.gate_up_proj.weight");
    assert_non_null(gate_up);
    assert_memory_equal((const char *)gate_up->data + up->bytes, up->data, up->bytes);
    assert_non_null(vlai_safetensors_find(start, "model.norms.0.weight"));
    assert_null(vlai_safetensors_find(start, "model.norms.1.weight"));
    vlai_safetensors_close(start);
    vlai_safetensors_close(st);
    unlink("test_convert_unfused.safetensors");
    unlink("test_convert_qwen.safetensors");
    unlink("test_convert_start.safetensors");
}

static void says_what_is_wrong(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const float one = 1;
    const vlai_tensor_view t = {.name = "model.norm.weight", .dtype = VLA_F32, .rank = 1, .shape = {1}, .data = &one, .bytes = 4};
    assert_ok(vlai_safetensors_write("test_convert_one.safetensors", &t, 1, NULL, &err), err);
    assert_int_equal(run("%s %s", "", ""), 2);
    assert_int_equal(run("%s %s", "a", ""), 2);
    assert_true(output_has("1 path was given, wanted two"));
    assert_int_equal(run("%s %s", "test_convert.nowhere", "b"), 3);
    assert_true(output_has("test_convert.nowhere: no such file or folder"));
    assert_int_equal(run("%s %s --to wide", "a", "b"), 2);
    assert_true(output_has("--to 'wide': wanted fused or unfused"));
    assert_int_equal(run("%s %s", "test_convert_one.safetensors", "test_convert.out2"), 3);
    assert_true(output_has("no config.json beside the weights"));
    assert_int_equal(run("%s %s --config " VLA_TEST_ROOT "/configs/wall-oss-0.5/config.json --partial",
                         "test_convert_one.safetensors", "test_convert.out2"), 3);
    assert_true(output_has("model.norm.weight: stored [1], wanted [2048]"));
    assert_false(vlai_is_dir("test_convert.out2"));
    unlink("test_convert_one.safetensors");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fused_case),
        cmocka_unit_test(sharded_unfused_case),
        cmocka_unit_test(plain_qwen_starts_a_model),
        cmocka_unit_test(says_what_is_wrong),
    };
    int failed = cmocka_run_group_tests_name("convert", tests, NULL, NULL);
    unlink("test_convert.out");
    return failed;
}
