#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "text/prompt.h"
#include "text/tokenizer.h"

#include <pthread.h>
#include <unistd.h>

/* A small tokenizer in the published form: 6 letters, merges in list form, tokens with every flag. */
static const char small[] =
    "{\"added_tokens\":["
    "{\"id\":20,\"content\":\"<s>\",\"special\":true,\"normalized\":false},"
    "{\"id\":21,\"content\":\"<word>\",\"single_word\":true,\"normalized\":false},"
    "{\"id\":22,\"content\":\"<strip>\",\"lstrip\":true,\"rstrip\":true,\"normalized\":false},"
    "{\"id\":23,\"content\":\"<s>>\",\"normalized\":false}],"
    "\"normalizer\":{\"type\":\"NFC\"},"
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{L}+|\\\\s+|.\"},\"behavior\":\"Isolated\",\"invert\":false},"
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},"
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"bc\":4,\"abc\":5,\"\\u0120\":6,\"\\u00c3\":7,"
    "\"\\u00a9\":8,\"e\":9,\"<\":10,\">\":11},"
    "\"merges\":[[\"b\",\"c\"],\"a b\",[\"a\",\"bc\"],[\"ab\",\"c\"]]}}";

static vlai_tokenizer *open_small(void)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_tokenizer *tok;
    assert_ok(vlai_tokenizer_parse(small, sizeof small - 1, NULL, 0, "small", &tok, &err), err);
    return tok;
}

static void expect(const vlai_tokenizer *tok, const char *text, const int32_t *want, size_t count)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_ids ids = {0};
    assert_ok(vlai_tokenizer_encode(tok, text, strlen(text), &ids, &err), err);
    assert_int_equal(ids.count, count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(ids.data[i], want[i]);
    vlai_ids_fini(&ids);
}
#define EXPECT(tok, text, ...) expect(tok, text, (int32_t[]){__VA_ARGS__}, sizeof((int32_t[]){__VA_ARGS__}) / 4)

static void merges_by_rank(void **state)
{
    (void)state;
    vlai_tokenizer *tok = open_small();
    EXPECT(tok, "abc", 5);         /* b+c first, then a+bc */
    EXPECT(tok, "ababc", 3, 5);
    EXPECT(tok, "bcb", 4, 1);
    EXPECT(tok, "ab c", 3, 6, 2);  /* pieces do not merge across the split */
    EXPECT(tok, "abc", 5);         /* from the cache */
    EXPECT(tok, "e\xCC\x81", 7, 8); /* NFC: e + acute is one character of two bytes */
    expect(tok, "", NULL, 0);
    expect(tok, "xyz", NULL, 0); /* bytes without a token are dropped, as in the reference */
    vlai_tokenizer_close(tok);
}

static void added_tokens(void **state)
{
    (void)state;
    vlai_tokenizer *tok = open_small();
    EXPECT(tok, "a<s>b", 0, 20, 1);
    EXPECT(tok, "a<s>>b", 0, 23, 1);                 /* the longest at the leftmost place */
    EXPECT(tok, "<word>", 21);
    EXPECT(tok, "a<word> ", 0, 10, 11, 6);            /* touches a word: no token; w, o, r, d have no id */
    EXPECT(tok, "a  <strip> \n b", 0, 22, 1);        /* takes the space around it */
    vla_error err = VLA_ERROR_INIT;
    int32_t id, again;
    assert_int_equal(vlai_tokenizer_size(tok), 16);
    assert_ok(vlai_tokenizer_add(tok, "<p>", &id, &err), err);
    assert_ok(vlai_tokenizer_add(tok, "<p>", &again, &err), err);
    assert_int_equal(id, 24);
    assert_int_equal(again, 24);
    assert_int_equal(vlai_tokenizer_size(tok), 17);
    EXPECT(tok, "a<p>b", 0, 24, 1);
    expect(tok, "<p>\xCC\xB8", (int32_t[]){10}, 1); /* ordinary tokens match after NFC, which joins > with the stroke */
    EXPECT(tok, "<s>\xCC\xB8", 20);                 /* others match the raw text; the stroke has no id */
    vlai_tokenizer_close(tok);
}

static void refusals(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_tokenizer *tok = open_small();
    vlai_ids ids = {0};
    assert_fails(vlai_tokenizer_encode(tok, "a\xFF", 2, &ids, &err), VLA_E_INVALID, err, "byte 1");
    int32_t bad = 99;
    vlai_text text = {0};
    assert_fails(vlai_tokenizer_decode(tok, &bad, 1, false, &text, &err), VLA_E_INVALID, err, "no token has id 99");
    vlai_text_fini(&text);
    vlai_ids_fini(&ids);
    vlai_tokenizer_close(tok);
    static const struct {
        const char *json, *part;
        vla_status status;
    } cases[] = {
        {"{", "not valid JSON", VLA_E_FORMAT},
        {"{\"model\":{\"type\":\"WordPiece\"}}", "WordPiece", VLA_E_UNSUPPORTED},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", "the same id 0", VLA_E_CORRUPT},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":4000000000},\"merges\":[]}}", "far beyond", VLA_E_CORRUPT},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}", "outside the vocabulary", VLA_E_CORRUPT},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"ab\"]}}", "neither", VLA_E_FORMAT},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]},\"pre_tokenizer\":{\"type\":\"Metaspace\"}}", "Metaspace",
         VLA_E_UNSUPPORTED},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]},\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":"
         "\"Isolated\",\"pattern\":{\"Regex\":\"(\"}}}",
         "split pattern", VLA_E_FORMAT},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]},\"normalizer\":{\"type\":\"Lowercase\"}}", "Lowercase",
         VLA_E_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_fails(vlai_tokenizer_parse(cases[i].json, strlen(cases[i].json), NULL, 0, "case", &tok, &err), cases[i].status,
                     err, cases[i].part);
    assert_fails(vlai_tokenizer_open("/nowhere", &tok, &err), VLA_E_NOT_FOUND, err, "/nowhere");
}

/* What is written is read back, learns what stands often, and every text survives encode and decode. */
static void written_folder(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char dir[] = "/tmp/vla-tokenizer-XXXXXX";
    assert_non_null(mkdtemp(dir));
    static const char *const texts[] = {"push the red block to the goal", "push the blue block to the goal",
                                        "Predict the next action in robot action."};
    assert_ok(vlai_tokenizer_write(dir, texts, 3, 60, &err), err);
    vlai_tokenizer *tok;
    assert_ok(vlai_tokenizer_open(dir, &tok, &err), err);
    assert_int_equal(vlai_tokenizer_pad(tok), vlai_tokenizer_id(tok, "<|endoftext|>"));
    assert_ok(vlai_prompt_add_tokens(tok, 0, NULL, 0, &err), err);
    vlai_prompt_tokens tokens;
    assert_ok(vlai_prompt_tokens_of(tok, &tokens, &err), err);
    assert_int_equal(tokens.action, vlai_tokenizer_size(tok) - 1);
    assert_int_equal(tokens.propri, vlai_tokenizer_size(tok) - 2);
    vlai_ids ids = {0};
    assert_ok(vlai_tokenizer_encode(tok, texts[0], strlen(texts[0]), &ids, &err), err);
    assert_true(ids.count <= 8); /* seven words, all learned or nearly */
    static const char *const wild[] = {"", "\xE6\x8A\x8A\xE7\xA2\x97 \xF0\x9F\x8D\x8E", "don't\r\n\t  stop ",
                                       "<|im_start|>user\nx<|im_end|>", "1234.5e-7"};
    for (size_t i = 0; i < sizeof wild / sizeof *wild; i++) {
        ids.count = 0;
        vlai_text back = {0};
        assert_ok(vlai_tokenizer_encode(tok, wild[i], strlen(wild[i]), &ids, &err), err);
        assert_ok(vlai_tokenizer_decode(tok, ids.data, ids.count, false, &back, &err), err);
        assert_string_equal(back.data ? back.data : "", wild[i]);
        vlai_text_fini(&back);
    }
    vlai_ids_fini(&ids);
    vlai_tokenizer_close(tok);
    assert_ok(vlai_remove_tree(dir, &err), err);
}

static void *encode_many(void *user)
{
    const vlai_tokenizer *tok = user;
    vla_error err = VLA_ERROR_INIT;
    for (int i = 0; i < 2000; i++) {
        vlai_ids ids = {0};
        char text[64];
        snprintf(text, sizeof text, "abc ab bc c%s<s>", i % 3 ? "ab" : "");
        if (vlai_tokenizer_encode(tok, text, strlen(text), &ids, &err) != VLA_OK || ids.data[0] != 5 || ids.data[2] != 3)
            return (void *)1;
        vlai_ids_fini(&ids);
    }
    return NULL;
}

static void threads_share_one(void **state)
{
    (void)state;
    vlai_tokenizer *tok = open_small();
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_many, tok), 0);
    for (int i = 0; i < 4; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    vlai_tokenizer_close(tok);
}

/* Every allocation of a parse and an encode may fail: an error, nothing leaked (the address sanitizer sees). */
static int fail_in;
static void *failing_alloc(size_t size, size_t align, void *user)
{
    (void)user;
    if (fail_in > 0 && --fail_in == 0)
        return NULL;
    void *p = NULL;
    return posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size ? size : 1) ? NULL : p;
}

static void failing_release(void *ptr, void *user)
{
    (void)user;
    free(ptr);
}

static void allocation_failures(void **state)
{
    (void)state;
    vla_allocator allocator = {failing_alloc, failing_release, NULL};
    vla_allocator_set(&allocator);
    int n = 1;
    for (;; n++) {
        vla_error err = VLA_ERROR_INIT;
        vlai_tokenizer *tok = NULL;
        vlai_ids ids = {0};
        fail_in = n;
        vla_status status = vlai_tokenizer_parse(small, sizeof small - 1, NULL, 0, "small", &tok, &err);
        if (status == VLA_OK)
            status = vlai_tokenizer_add(tok, "<p>", NULL, &err);
        if (status == VLA_OK)
            status = vlai_tokenizer_encode(tok, "abcab e\xCC\x81 <p> abcabcabc", 24, &ids, &err);
        bool untouched = fail_in > 0;
        fail_in = 0;
        vlai_ids_fini(&ids);
        vlai_tokenizer_close(tok);
        if (untouched) {
            assert_int_equal(status, VLA_OK);
            break;
        }
        if (status != VLA_OK)
            assert_int_equal(status, VLA_E_NOMEM);
    }
    vla_allocator_set(NULL);
    assert_true(n > 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_by_rank),    cmocka_unit_test(added_tokens),      cmocka_unit_test(refusals),
        cmocka_unit_test(written_folder),    cmocka_unit_test(threads_share_one), cmocka_unit_test(allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
