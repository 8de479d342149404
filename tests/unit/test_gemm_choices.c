/* What a checkpoint keeps of the choices of matrix products: those that the run's plans use, in one order, and nothing else that is
 * known. */
#include "test.h"

#include "base/io.h"
#include "kernels/gemm_choices.h"

#include <stdlib.h>
#include <unistd.h>

static char folder[] = "/tmp/vla-choices-XXXXXX", path[64];

static vlai_gemm_choices *open_choices(const char *file)
{
    vla_error err;
    vlai_gemm_choices *c;
    assert_ok(vlai_gemm_choices_open(file, "gpu", NULL, &c, &err), err);
    return c;
}

static vlai_gemm_shape shape(int64_t m, int sums)
{
    return (vlai_gemm_shape){.m = m, .n = 7, .k = 5, .transpose_a = 1, .sums = sums, .operand = VLA_BF16, .result = VLA_F32, .bias_type = VLA_F32};
}

static void put(vlai_gemm_choices *c, int64_t m, int sums, uint64_t word)
{
    vla_error err;
    vlai_gemm_shape s = shape(m, sums);
    vlai_gemm_choice choice = {.words = {word, 1}, .workspace = 64, .milliseconds = 0.25f};
    assert_ok(vlai_gemm_choices_put(c, &s, &choice, &err), err);
}

static void use(vlai_gemm_choices *c, int64_t m, int sums)
{
    vlai_gemm_shape s = shape(m, sums);
    vlai_gemm_choices_use(c, &s);
}

static char *text_of(const vlai_gemm_choices *c)
{
    vlai_text out = {0};
    vlai_gemm_choices_text(c, &out);
    char *copy = strdup(out.data ? out.data : "");
    vlai_text_fini(&out);
    return copy;
}

static void must_say(const vlai_gemm_choices *c, const char *wanted)
{
    char *text = text_of(c);
    assert_string_equal(text, wanted);
    free(text);
}

#define LINE_2 "2 7 5 1 0 0 0 0 3 1 0 64 0.2500 20 1 0 0 0 0 0 0\n"
#define LINE_3 "3 7 5 1 0 0 0 0 3 1 0 64 0.2500 30 1 0 0 0 0 0 0\n"
#define LINE_3_SUMS "3 7 5 1 0 0 0 1 3 1 1 64 0.2500 31 1 0 0 0 0 0 0\n"
#define LINE_9 "9 7 5 1 0 0 0 0 3 1 0 64 0.2500 90 1 0 0 0 0 0 0\n"

/* A run that searches times more than it takes; one that finds the file, with lines of others too, says the same. */
static void test_used(void **state)
{
    (void)state;
    vla_error err;
    vlai_gemm_choices *c = open_choices(path);
    put(c, 9, 0, 0x90);
    put(c, 3, 1, 0x31);
    put(c, 3, 0, 0x30);
    put(c, 2, 0, 0x20);
    must_say(c, "");
    use(c, 9, 0);
    use(c, 3, 1);
    use(c, 4, 0); /* nothing is known of it */
    must_say(c, LINE_3_SUMS LINE_9);
    assert_ok(vlai_gemm_choices_save(c, &err), err);
    vlai_gemm_choices_close(c);

    c = open_choices(path);
    vlai_gemm_choice choice;
    vlai_gemm_shape other = shape(3, 0);
    assert_true(vlai_gemm_choices_find(c, &other, &choice));
    assert_int_equal(choice.words[0], 0x30);
    must_say(c, "");
    use(c, 3, 1);
    use(c, 9, 0);
    must_say(c, LINE_3_SUMS LINE_9);
    vlai_gemm_choices_close(c);
}

/* What a resumed run adopts it passes on, with what it meets for the first time; what the file says otherwise does not matter. */
static void test_resume(void **state)
{
    (void)state;
    vla_error err;
    vlai_gemm_choices *c = open_choices(path);
    put(c, 9, 0, 0x91); /* another choice than the checkpoint's */
    assert_ok(vlai_gemm_choices_adopt(c, LINE_3_SUMS LINE_9, &err), err);
    must_say(c, LINE_3_SUMS LINE_9);
    use(c, 2, 0); /* known from the file */
    must_say(c, LINE_2 LINE_3_SUMS LINE_9);
    put(c, 3, 0, 0x30);
    use(c, 3, 0); /* timed now */
    must_say(c, LINE_2 LINE_3 LINE_3_SUMS LINE_9);
    use(c, 9, 0);
    must_say(c, LINE_2 LINE_3 LINE_3_SUMS LINE_9);

    char *text = text_of(c);
    vlai_gemm_choices *next = open_choices(NULL);
    assert_ok(vlai_gemm_choices_adopt(next, text, &err), err);
    must_say(next, text);
    free(text);
    vlai_gemm_choices_close(next);

    put(c, 3, 1, 0x32); /* the library refused what was adopted */
    must_say(c, LINE_2 LINE_3 "3 7 5 1 0 0 0 1 3 1 1 64 0.2500 32 1 0 0 0 0 0 0\n" LINE_9);
    assert_int_equal(vlai_gemm_choices_adopt(c, LINE_2 "nonsense\n", &err), VLA_E_INVALID);
    vlai_gemm_choices_close(c);
}

/* A file that lost some of its bytes: lines that are cut, or have more than they should, are no choices, those around them are. */
static void test_damaged(void **state)
{
    (void)state;
    static const char cut[] = "3 7 5 1 0 0 0 0 3 1 0 64 0.2500 30 1 0 0 0 0 0\n"; /* the next line's first number would be its last word */
    static const char *const bad[] = {cut, "3 7 5 1 0 0 0 0 3 1 0 64 0.2500 30 1 0 0 0 0 0 0 x\n", "3 7 5 1 0 0 0 0 3 1 0 64 0.2500 30 1 0 0 0 0 0 0 \n",
                                      "3 7 5 1 0 0 0 0 3 1 0 64 0.2500 30 1 0 0 0 0 0 0 -4\n", "3 7 5\n", "\x01\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        vla_error err;
        char text[512], file[128];
        vlai_gemm_choice choice;
        vlai_gemm_shape three = shape(3, 0), nine = shape(9, 0);
        snprintf(text, sizeof text, LINE_2 "%s" LINE_9, bad[i]);
        snprintf(file, sizeof file, "%s/damaged%zu", folder, i);
        assert_ok(vlai_write_file_atomic(file, text, strlen(text), &err), err);
        vlai_gemm_choices *c = open_choices(file);
        assert_false(vlai_gemm_choices_find(c, &three, &choice));
        assert_true(vlai_gemm_choices_find(c, &nine, &choice) && choice.words[0] == 0x90 && choice.words[7] == 0);
        assert_int_equal(vlai_gemm_choices_adopt(c, text, &err), VLA_E_INVALID);
        assert_non_null(strstr(err.message, "line 2"));
        vlai_gemm_choices_close(c);
    }
}

/* Where there is no place for the file, a save says so; the next one that has something new tries again. */
static void test_unwritable(void **state)
{
    (void)state;
    vla_error err;
    char file[128];
    snprintf(file, sizeof file, "%s/none/choices", folder);
    vlai_gemm_choices *c = open_choices(file);
    put(c, 2, 0, 0x20);
    assert_int_equal(vlai_gemm_choices_save(c, &err), VLA_E_NOT_FOUND);
    assert_ok(vlai_gemm_choices_save(c, &err), err);
    snprintf(file, sizeof file, "%s/none", folder);
    assert_ok(vlai_mkdirs(file, &err), err);
    put(c, 3, 0, 0x30);
    assert_ok(vlai_gemm_choices_save(c, &err), err);
    vlai_gemm_choices_close(c);
    snprintf(file, sizeof file, "%s/none/choices", folder);
    c = open_choices(file);
    use(c, 2, 0);
    use(c, 3, 0);
    must_say(c, LINE_2 LINE_3);
    vlai_gemm_choices_close(c);
}

/* In whatever order shapes came, and whatever type a bias that is not there would have. */
static void test_order(void **state)
{
    (void)state;
    static const int64_t orders[][3] = {{2, 3, 9}, {9, 3, 2}, {3, 9, 2}};
    for (int o = 0; o < 3; o++) {
        vlai_gemm_choices *c = open_choices(NULL);
        for (int i = 0; i < 3; i++) {
            put(c, orders[o][i], 0, (uint64_t)orders[o][i] << 4);
            vlai_gemm_shape s = shape(orders[o][i], 0);
            s.bias_type = VLA_BF16;
            vlai_gemm_choices_use(c, &s);
        }
        must_say(c, LINE_2 LINE_3 LINE_9);
        vlai_gemm_choices_close(c);
    }
}

/* The same product with fewer multiprocessors is another one; without, lines are as they were before there was a difference. */
static void test_multiprocessors(void **state)
{
    (void)state;
    vla_error err;
    vlai_gemm_choices *c = open_choices(NULL), *next = open_choices(NULL);
    vlai_gemm_choice choice;
    vlai_gemm_shape fewer = shape(3, 0), others = shape(3, 0);
    fewer.multiprocessors = 116;
    others.multiprocessors = 124;
    put(c, 3, 0, 0x30);
    use(c, 3, 0);
    assert_false(vlai_gemm_choices_find(c, &fewer, &choice));
    assert_ok(vlai_gemm_choices_put(c, &fewer, &(vlai_gemm_choice){.words = {0x33, 1}, .workspace = 64, .milliseconds = 0.25f}, &err), err);
    must_say(c, LINE_3);
    vlai_gemm_choices_use(c, &fewer);
    put(c, 9, 0, 0x90);
    use(c, 9, 0);
    static const char all[] = LINE_3 "3 7 5 1 0 0 0 0 3 1 0 64 0.2500 33 1 0 0 0 0 0 0 116\n" LINE_9;
    must_say(c, all);
    assert_ok(vlai_gemm_choices_adopt(next, all, &err), err);
    must_say(next, all);
    assert_true(vlai_gemm_choices_find(next, &fewer, &choice) && choice.words[0] == 0x33);
    fewer.multiprocessors = 0;
    assert_true(vlai_gemm_choices_find(next, &fewer, &choice) && choice.words[0] == 0x30);
    assert_false(vlai_gemm_choices_find(next, &others, &choice));
    vlai_gemm_choices_close(next);
    vlai_gemm_choices_close(c);
}

/* What is known before comes first, a file goes before it, and it is no reason to write one. */
static void test_known(void **state)
{
    (void)state;
    vla_error err;
    char file[128], kept[160];
    vlai_gemm_choices *c;
    vlai_gemm_choice choice;
    vlai_gemm_shape two = shape(2, 0), three = shape(3, 0), nine = shape(9, 0);
    snprintf(file, sizeof file, "%s/known", folder);
    snprintf(kept, sizeof kept, "%s.gpu", file);
    assert_ok(vlai_gemm_choices_open(file, "gpu", LINE_3 "3 7 5 x\n" LINE_9, &c, &err), err);
    assert_ok(vlai_gemm_choices_save(c, &err), err);
    assert_false(vlai_is_file(kept) || vlai_is_file(file));
    put(c, 2, 0, 0x20);
    put(c, 3, 0, 0x33);
    use(c, 9, 0);
    must_say(c, LINE_9);
    assert_ok(vlai_gemm_choices_save(c, &err), err);
    vlai_gemm_choices_close(c);
    assert_ok(vlai_gemm_choices_open(file, "gpu", LINE_3, &c, &err), err);
    assert_true(vlai_gemm_choices_find(c, &two, &choice) && choice.words[0] == 0x20);
    assert_true(vlai_gemm_choices_find(c, &three, &choice) && choice.words[0] == 0x33);
    assert_true(vlai_gemm_choices_find(c, &nine, &choice) && choice.words[0] == 0x90);
    vlai_gemm_choices_close(c);
    assert_ok(vlai_gemm_choices_open(NULL, "gpu", LINE_3, &c, &err), err);
    assert_true(vlai_gemm_choices_find(c, &three, &choice) && choice.words[0] == 0x30);
    vlai_gemm_choices_close(c);
}

/* Every line of what the program has is understood, and says the same again. */
static void test_texts(void **state)
{
    (void)state;
    vla_error err;
    assert_non_null(vlai_gemm_product_texts[0].name);
    for (const vlai_gemm_product_text *t = vlai_gemm_product_texts; t->name; t++) {
        vlai_gemm_choices *c = open_choices(NULL);
        assert_true(!strncmp(t->name, "gemm-", 5) && strstr(t->name, ".txt") == t->name + strlen(t->name) - 4);
        assert_true(vlai_gemm_choices_known(t->name) == t->text);
        assert_ok(vlai_gemm_choices_adopt(c, t->text, &err), err);
        must_say(c, t->text);
        vlai_gemm_choices_close(c);
    }
    assert_null(vlai_gemm_choices_known("gemm-NVIDIA-H200"));
}

static int make(void **state)
{
    (void)state;
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/choices", folder);
    return 0;
}

static int clear(void **state)
{
    (void)state;
    vla_error err;
    return vlai_remove_tree(folder, &err) == VLA_OK ? 0 : -1;
}

/* Choices of the same product with up to half or twice as many rows: m, or k where a gradient of weights adds over rows. */
static void test_near(void **state)
{
    (void)state;
    vla_error err;
    vlai_gemm_choices *c = open_choices(NULL);
    const struct {
        vlai_gemm_shape shape;
        uint64_t word;
        float milliseconds;
    } known[] = {
        {{.m = 100, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 1, 1},
        {{.m = 101, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 1, 1},                   /* the algorithm of 100 */
        {{.m = 50, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 2, 1},
        {{.m = 49, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 3, 1},                    /* less than half of 99 */
        {{.m = 198, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 4, 1},
        {{.m = 199, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 5, 1},                   /* more than twice 99 */
        {{.m = 99, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 6, 1},                    /* itself */
        {{.m = 100, .n = 8, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 7, 1},
        {{.m = 100, .n = 7, .k = 6, .operand = VLA_BF16, .result = VLA_BF16}, 8, 1},
        {{.m = 100, .n = 7, .k = 5, .residual = 1, .operand = VLA_BF16, .result = VLA_BF16}, 9, 1},
        {{.m = 98, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16}, 10, -1},                  /* no algorithm of its own */
        {{.m = 4, .n = 3, .k = 60, .transpose_a = 1, .operand = VLA_BF16, .result = VLA_BF16}, 11, 1},
        {{.m = 5, .n = 3, .k = 61, .transpose_a = 1, .operand = VLA_BF16, .result = VLA_BF16}, 12, 1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        assert_ok(vlai_gemm_choices_put(c, &known[i].shape, &(vlai_gemm_choice){.words = {known[i].word}, .milliseconds = known[i].milliseconds}, &err), err);
    vlai_gemm_choice near[8];
    const vlai_gemm_shape rows = {.m = 99, .n = 7, .k = 5, .operand = VLA_BF16, .result = VLA_BF16};
    const vlai_gemm_shape sums_over_rows = {.m = 4, .n = 3, .k = 61, .transpose_a = 1, .operand = VLA_BF16, .result = VLA_BF16};
    assert_int_equal(vlai_gemm_choices_near(c, &rows, near, 8), 3);
    assert_int_equal(near[0].words[0], 2);
    assert_int_equal(near[1].words[0], 1);
    assert_int_equal(near[2].words[0], 4);
    assert_int_equal(vlai_gemm_choices_near(c, &rows, near, 2), 2);
    assert_int_equal(vlai_gemm_choices_near(c, &sums_over_rows, near, 8), 1);
    assert_int_equal(near[0].words[0], 11);
    vlai_gemm_choices_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_used), cmocka_unit_test(test_resume), cmocka_unit_test(test_order),
        cmocka_unit_test(test_multiprocessors), cmocka_unit_test(test_known), cmocka_unit_test(test_texts),
        cmocka_unit_test(test_near), cmocka_unit_test(test_damaged), cmocka_unit_test(test_unwritable)};
    return cmocka_run_group_tests(tests, make, clear);
}
