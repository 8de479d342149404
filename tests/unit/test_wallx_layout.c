/* Names, shapes and spellings of a checkpoint's tensors. */
#include "alloc.h"
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "model/wallx_layout.h"

#include <math.h>
#include <unistd.h>

/* Elements of all tensors but lm_head, which is the embedding, and, unless asked for, propri_proj. */
static int64_t parameters(const vlai_wallx_weight *weights, size_t count, bool with_propri)
{
    int64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        if (!weights[i].optional || (with_propri && !strstr(weights[i].name, "lm_head")))
            sum += weights[i].elements;
    return sum;
}

/* The published size: 4,154,377,216 parameters at 151,936 rows in 837 tensors; 106,496 more with the state projection. */
static void published_size(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_wallx_config c;
    vlai_config *train;
    vlai_wallx_weight *weights;
    size_t count;
    assert_ok(vlai_wallx_config_load(VLA_TEST_ROOT "/configs/wall-oss-0.5", &c, &err), err);
    assert_ok(vlai_config_load(VLA_TEST_ROOT "/configs/libero_local_perf.yml", NULL, 0, &train, &err), err);
    assert_ok(vlai_wallx_config_update(&c, train, false, &err), err);
    vlai_config_destroy(train);
    assert_ok(vlai_wallx_weights(&c, &weights, &count, &err), err);
    assert_int_equal(count, 839);
    size_t optional = 0;
    int64_t tower = 0;
    for (size_t i = 0; i < count; i++) {
        optional += weights[i].optional;
        tower += strncmp(weights[i].name, "visual.", 7) ? 0 : weights[i].elements;
    }
    assert_int_equal(optional, 2);
    assert_int_equal(tower, 668684288);
    assert_true(parameters(weights, count, false) == 4154377216LL);
    assert_true(parameters(weights, count, true) == 4154377216LL + 106496);
    vlai_free(weights);
    c.vocab_size = 151667;
    assert_ok(vlai_wallx_weights(&c, &weights, &count, &err), err);
    assert_true(parameters(weights, count, false) == 4153826304LL);
    vlai_free(weights);
}

/* A small model whose tensors are numbered through, stored under a spelling of choice. */
typedef struct model {
    vlai_wallx_config config;
    vlai_wallx_weight *weights;
    size_t count;
    float *values; /* of all weights, one after the other */
    size_t *starts;
} model;

static const char small[] =
    "{\"vocab_size\": 11, \"hidden_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 2,"
    "\"num_key_value_heads\": 1, \"rope_scaling\": {\"mrope_section\": [1, 1, 0]}, \"tie_word_embeddings\": true,"
    "\"action_hidden_size\": 4, \"state_hidden_size\": 8, \"num_experts\": 2, \"dim_inputs\": [8, 4], \"experts\": ["
    "{\"hidden_size\": 8, \"intermediate_size\": 6}, {\"hidden_size\": 4, \"intermediate_size\": 3}],"
    "\"attention_moe\": true, \"mlp_moe\": true, \"norm_moe\": true, \"mot_opt\": true,"
    "\"vision_config\": {\"depth\": 1, \"hidden_size\": 8, \"intermediate_size\": 5, \"num_heads\": 2, \"patch_size\": 2,"
    "\"window_size\": 8, \"out_hidden_size\": 8, \"fullatt_block_indexes\": [0]}}";

static void make(model *m)
{
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_wallx_config_parse(small, strlen(small), "small", &m->config, &err), err);
    m->config.action_dim = 3;
    m->config.propri_dim = 5;
    assert_ok(vlai_wallx_weights(&m->config, &m->weights, &m->count, &err), err);
    m->starts = calloc(m->count + 1, sizeof *m->starts);
    for (size_t i = 0; i < m->count; i++)
        m->starts[i + 1] = m->starts[i] + (size_t)m->weights[i].elements;
    m->values = malloc(m->starts[m->count] * sizeof *m->values);
    for (size_t i = 0; i < m->starts[m->count]; i++)
        m->values[i] = (float)i;
}

static void unmake(model *m)
{
    vlai_free(m->weights);
    free(m->starts);
    free(m->values);
}

/* The spelling of plain Qwen for expert 0 and its neighbours; written out here independently of the library. */
static const char *spell(const char *name, int qwen, char *out)
{
    static const char *const pairs[][2] = {{"moe.experts.0", "mlp"},
                                           {"_proj_experts.0", "_proj"},
                                           {"input_layernorms.0", "input_layernorm"},
                                           {"post_attention_layernorms.0", "post_attention_layernorm"},
                                           {"norms.0.weight", "norm.weight"}};
    strcpy(out, name);
    for (size_t i = 0; qwen && i < 5; i++) {
        char *at = strstr(out, pairs[i][0]);
        if (at && (i < 4 || !strncmp(name, "model.norms", 11))) {
            char rest[128];
            strcpy(rest, at + strlen(pairs[i][0]));
            sprintf(at, "%s%s", pairs[i][1], rest);
        }
    }
    if (qwen == 2 && (!strncmp(out, "model.", 6) || !strncmp(out, "visual.", 7))) {
        char copy[200];
        strcpy(copy, out);
        sprintf(out, "model.%s%s", copy[0] == 'm' ? "language_model." : "", copy + (copy[0] == 'm' ? 6 : 0));
    }
    return out;
}

/* Stores the model with every `unfused`-th fusable tensor in parts (0 = none). `skip` and `extra` name one tensor. */
static void store(const model *m, const char *path, int unfused, int qwen, const char *skip, const char *extra)
{
    static vlai_tensor_view views[512];
    static char names[512][200];
    size_t n = 0, fusable = 0;
    for (size_t i = 0; i < m->count; i++) {
        const vlai_wallx_weight *w = &m->weights[i];
        const float *data = m->values + m->starts[i];
        bool split = w->part_count > 1 && unfused && ++fusable % (size_t)unfused == 0;
        for (int p = 0; p < (split ? w->part_count : 1); p++) {
            char part[200];
            if (split)
                assert_true(vlai_wallx_part_name(w, p, part, sizeof part));
            const char *wall = split ? part : w->name;
            vlai_tensor_view v = {.dtype = VLA_F32, .rank = w->rank};
            memcpy(v.shape, w->shape, sizeof v.shape);
            if (split)
                v.shape[0] = w->part_rows[p];
            v.elements = 1;
            for (int d = 0; d < v.rank; d++)
                v.elements *= v.shape[d];
            v.bytes = (size_t)v.elements * 4;
            v.data = data;
            data += v.elements;
            if (skip && !strcmp(skip, wall))
                continue;
            v.name = spell(wall, qwen, names[n]);
            views[n++] = v;
        }
    }
    if (extra)
        views[n++] = (vlai_tensor_view){.name = extra, .dtype = VLA_F32, .rank = 1, .shape = {1}, .elements = 1, .bytes = 4,
                                        .data = m->values};
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_safetensors_write(path, views, n, NULL, &err), err);
}

static const char path[] = "test_wallx_layout.safetensors";

static void every_spelling_reads_the_same(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    model m;
    make(&m);
    for (int qwen = 0; qwen < 3; qwen++)
        for (int unfused = 0; unfused < 4; unfused++) { /* none, all, every second, every third tensor in parts */
            store(&m, path, unfused, qwen, NULL, NULL);
            vlai_safetensors *st;
            vlai_wallx_layout *l;
            assert_ok(vlai_safetensors_open(path, &st, &err), err);
            int64_t vocab = 0, action = 0, propri = 0;
            assert_ok(vlai_wallx_stored_sizes(st, &vocab, &action, &propri, &err), err);
            assert_true(vocab == 11 && action == 3 && propri == 5);
            assert_ok(vlai_wallx_layout_open(st, m.weights, m.count, &l, &err), err);
            assert_ok(vlai_wallx_layout_require(l, &err), err);
            assert_true((l->report.joined > 0) == (unfused > 0));
            assert_true((l->report.renamed > 0) == (qwen > 0));
            for (size_t i = 0; i < m.count; i++) {
                float values[1024];
                assert_true(vlai_wallx_layout_has(l, i) && m.weights[i].elements <= 1024);
                assert_ok(vlai_wallx_layout_read(l, i, 0, m.weights[i].elements, values, &err), err);
                assert_memory_equal(values, m.values + m.starts[i], (size_t)m.weights[i].elements * 4);
                /* A range across the border of two parts. */
                int64_t first = m.weights[i].elements / 3, n = m.weights[i].elements / 2;
                assert_ok(vlai_wallx_layout_read(l, i, first, n, values, &err), err);
                assert_memory_equal(values, m.values + m.starts[i] + first, (size_t)n * 4);
            }
            assert_fails(vlai_wallx_layout_read(l, 0, 1, m.weights[0].elements, NULL, &err), VLA_E_INVALID, err, "asked for");
            vlai_wallx_layout_close(l);
            vlai_safetensors_close(st);
        }
    unlink(path);
    unmake(&m);
}

/* Of a weight that is stored in parts, the part and the element in it are named, for ranges that hold it and no others. */
static void what_is_not_finite_is_found_in_its_part(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    model m;
    make(&m);
    size_t i = 0;
    while (m.weights[i].part_count < 2)
        assert_true(++i < m.count);
    const vlai_wallx_weight *w = &m.weights[i];
    int64_t border = w->elements / w->shape[0] * w->part_rows[0], bad = border + 2;
    char part[200], wanted[300];
    assert_true(vlai_wallx_part_name(w, 1, part, sizeof part) && bad + 1 < w->elements);
    for (int unfused = 0; unfused < 2; unfused++) {
        m.values[m.starts[i] + (size_t)bad] = INFINITY;
        store(&m, path, unfused, 0, NULL, NULL);
        vlai_safetensors *st;
        vlai_wallx_layout *l;
        assert_ok(vlai_safetensors_open(path, &st, &err), err);
        assert_ok(vlai_wallx_layout_open(st, m.weights, m.count, &l, &err), err);
        snprintf(wanted, sizeof wanted, "%s: tensor '%s' is inf at element %lld, wanted", path, unfused ? part : w->name, (long long)(unfused ? 2 : bad));
        for (int64_t first = 0; first <= bad; first++) {
            assert_fails(vlai_wallx_layout_check(l, i, first, w->elements - first, &err), VLA_E_NONFINITE, err, wanted);
            assert_fails(vlai_wallx_layout_check(l, i, first, bad + 1 - first, &err), VLA_E_NONFINITE, err, wanted);
            assert_ok(vlai_wallx_layout_check(l, i, first, bad - first, &err), err);
        }
        assert_ok(vlai_wallx_layout_check(l, i, bad + 1, w->elements - bad - 1, &err), err);
        vlai_wallx_layout_close(l);
        vlai_safetensors_close(st);
    }
    unlink(path);
    unmake(&m);
}

static void refused(const model *m, int unfused, const char *skip, const char *extra, const char *part)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *st;
    vlai_wallx_layout *l;
    store(m, path, unfused, 0, skip, extra);
    assert_ok(vlai_safetensors_open(path, &st, &err), err);
    assert_ok(vlai_wallx_layout_open(st, m->weights, m->count, &l, &err), err);
    if (part)
        assert_fails(vlai_wallx_layout_require(l, &err), VLA_E_SHAPE, err, part);
    else
        assert_ok(vlai_wallx_layout_require(l, &err), err);
    vlai_wallx_layout_close(l);
    vlai_safetensors_close(st);
    unlink(path);
}

static void strict_report(void **state)
{
    (void)state;
    model m;
    make(&m);
    refused(&m, 0, "model.norms.1.weight", NULL, "1 missing (model.norms.1.weight)");
    refused(&m, 1, "model.layers.1.self_attn.v_proj_experts.1.bias", NULL,
            "1 missing (model.layers.1.self_attn.v_proj_experts.1.bias)");
    refused(&m, 0, NULL, "model.layers.2.input_layernorms.0.weight", "1 unexpected (model.layers.2.input");
    refused(&m, 0, "lm_head.weight", NULL, NULL);
    refused(&m, 0, "action_preprocessor.propri_proj.weight", NULL, NULL);
    refused(&m, 0, NULL, "action_preprocessor.normalizer_action.min.libero", NULL);
    vla_error err = VLA_ERROR_INIT;
    store(&m, path, 0, 0, NULL, NULL);
    m.config.action_dim = 4;
    vlai_free(m.weights);
    assert_ok(vlai_wallx_weights(&m.config, &m.weights, &m.count, &err), err);
    vlai_safetensors *st;
    vlai_wallx_layout *l;
    assert_ok(vlai_safetensors_open(path, &st, &err), err);
    assert_ok(vlai_wallx_layout_open(st, m.weights, m.count, &l, &err), err);
    assert_fails(vlai_wallx_layout_require(l, &err), VLA_E_SHAPE, err,
                 "2 of another shape (action_preprocessor.w1.weight: stored [4, 6], wanted [4, 8]");
    vlai_wallx_layout_close(l);
    vlai_safetensors_close(st);
    unlink(path);
    unmake(&m);
}

/* Without proj_with_mask the state projection reads the state alone, and an untied head must be there. */
static void other_heads(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    model m;
    make(&m);
    unmake(&m);
    m.config.proj_with_mask = false;
    m.config.tie_word_embeddings = false;
    assert_ok(vlai_wallx_weights(&m.config, &m.weights, &m.count, &err), err);
    m.starts = calloc(m.count + 1, sizeof *m.starts);
    for (size_t i = 0; i < m.count; i++)
        m.starts[i + 1] = m.starts[i] + (size_t)m.weights[i].elements;
    m.values = calloc(m.starts[m.count], sizeof *m.values);
    assert_int_equal(m.weights[m.count - 1].shape[1], 5);
    refused(&m, 0, "lm_head.weight", NULL, "1 missing (lm_head.weight)");
    store(&m, path, 0, 0, NULL, NULL);
    vlai_safetensors *st;
    int64_t vocab = 0, action = 0, propri = 0;
    assert_ok(vlai_safetensors_open(path, &st, &err), err);
    assert_ok(vlai_wallx_stored_sizes(st, &vocab, &action, &propri, &err), err);
    assert_true(vocab == 11 && action == 3 && propri == 5);
    vlai_safetensors_close(st);
    unlink(path);
    unmake(&m);
}

static void failing_allocations(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    model m;
    make(&m);
    store(&m, path, 2, 1, "model.norms.1.weight", "extra");
    vlai_safetensors *st;
    assert_ok(vlai_safetensors_open(path, &st, &err), err);
    uint64_t n = 0;
    for (vla_status status = VLA_E_NOMEM; status == VLA_E_NOMEM;) {
        vlai_wallx_weight *weights = NULL;
        vlai_wallx_layout *l = NULL;
        size_t count;
        failing_allocation(++n);
        status = vlai_wallx_weights(&m.config, &weights, &count, &err);
        if (status == VLA_OK)
            status = vlai_wallx_layout_open(st, weights, count, &l, &err);
        if (status == VLA_OK)
            status = vlai_wallx_layout_require(l, &err); /* fails for the missing tensor once memory suffices */
        if (status != VLA_E_NOMEM && status != VLA_E_SHAPE)
            fail_msg("allocation %d: %s", (int)n, err.message);
        vlai_wallx_layout_close(l);
        vlai_free(weights);
    }
    failing_allocation(0);
    assert_true(n > 5);
    vlai_safetensors_close(st);
    unlink(path);
    unmake(&m);
}

/* Every recorded case: the file fits its configuration, whatever its spelling. */
static void recorded_cases_fit(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char **names;
    size_t count, checked = 0, joined = 0;
    if (vlai_list_dir(golden_dir(), &names, &count, &err) != VLA_OK)
        skip();
    for (size_t i = 0; i < count; i++) {
        char dir[2048], train_path[4096];
        snprintf(dir, sizeof dir, "%s/%s", golden_dir(), names[i]);
        snprintf(train_path, sizeof train_path, "%s/train.json", dir);
        vlai_safetensors *st;
        vlai_config *train;
        vlai_wallx_config c;
        if (strncmp(names[i], "wallx-", 6) || !strcmp(names[i], "wallx-vision") || !vlai_is_file(train_path))
            continue;
        /* A folder whose weights are not split: name the file, since others lie beside it. */
        char file[4096];
        snprintf(file, sizeof file, "%s/model.safetensors", dir);
        if (!vlai_is_file(file))
            snprintf(file, sizeof file, "%s/model.safetensors.index.json", dir);
        assert_ok(vlai_wallx_config_load(dir, &c, &err), err);
        assert_ok(vlai_config_load(train_path, NULL, 0, &train, &err), err);
        assert_ok(vlai_wallx_config_update(&c, train, true, &err), err);
        assert_ok(vlai_safetensors_open(file, &st, &err), err);
        vlai_wallx_weight *weights;
        vlai_wallx_layout *l;
        size_t n;
        assert_ok(vlai_wallx_weights(&c, &weights, &n, &err), err);
        assert_ok(vlai_wallx_layout_open(st, weights, n, &l, &err), err);
        assert_ok(vlai_wallx_layout_require(l, &err), err);
        joined += l->report.joined;
        checked++;
        vlai_wallx_layout_close(l);
        vlai_free(weights);
        vlai_safetensors_close(st);
        vlai_config_destroy(train);
    }
    vlai_names_free(names, count);
    if (!checked)
        skip();
    print_message("%zu recorded cases fit, %zu tensors joined\n", checked, joined);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_size),
        cmocka_unit_test(every_spelling_reads_the_same), cmocka_unit_test(what_is_not_finite_is_found_in_its_part),
        cmocka_unit_test(strict_report),
        cmocka_unit_test(other_heads),
        cmocka_unit_test(failing_allocations),
        cmocka_unit_test(recorded_cases_fit),
    };
    return cmocka_run_group_tests_name("wallx_layout", tests, NULL, NULL);
}
