/* A small processor folder of our own: a byte-level vocabulary with merges learned from given texts, in the published file
 * forms. So a model can be made and trained where no vocabulary file is at hand. */
#include "text/tokenizer_impl.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "image/patchify.h"
#include "text/bytes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Qwen2.5-VL's named tokens, in its order. */
static const struct {
    const char *text;
    bool special;
} named[] = {
    {"<|endoftext|>", true},      {"<|im_start|>", true},     {"<|im_end|>", true},      {"<|object_ref_start|>", true},
    {"<|object_ref_end|>", true}, {"<|box_start|>", true},    {"<|box_end|>", true},     {"<|quad_start|>", true},
    {"<|quad_end|>", true},       {"<|vision_start|>", true}, {"<|vision_end|>", true},  {"<|vision_pad|>", true},
    {"<|image_pad|>", true},      {"<|video_pad|>", true},    {"<tool_call>", false},    {"</tool_call>", false},
    {"<|fim_prefix|>", false},    {"<|fim_middle|>", false},  {"<|fim_suffix|>", false}, {"<|fim_pad|>", false},
    {"<|repo_name|>", false},     {"<|file_sep|>", false},
};
enum { NAMED = sizeof named / sizeof *named };

static const char split_pattern[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
                                    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* Tokens by id: characters of the byte alphabet, as UTF-8. */
typedef struct vocabulary {
    char **tokens;
    size_t count, capacity;
    json_t *merges; /* list of "a b" */
} vocabulary;

static vla_status put_token(vocabulary *v, const char *text, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&v->tokens, &v->capacity, v->count, sizeof *v->tokens, err));
    v->tokens[v->count] = vlai_strdup(text);
    if (!v->tokens[v->count])
        return vlai_nomem(err, strlen(text) + 1);
    v->count++;
    return VLA_OK;
}

/* The alphabet in the order of its characters, so that printable bytes come first. */
static vla_status put_alphabet(vocabulary *v, vla_error *err)
{
    for (uint16_t c = 0; c < 0x144; c++) {
        if (c < 0x100 && !byte_is_printable(c))
            continue;
        char text[3] = {0};
        byte_utf8(c, text);
        VLA_TRY(put_token(v, text, err));
    }
    return VLA_OK;
}

static void vocabulary_fini(vocabulary *v)
{
    for (size_t i = 0; i < v->count; i++)
        vlai_free(v->tokens[i]);
    vlai_free(v->tokens);
    json_decref(v->merges);
}

/* Learning. A word is a piece of text as a list of token ids. */

typedef struct words {
    const int32_t *byte_id; /* of the alphabet */
    int32_t *ids;           /* all words, one after the other, each ended by -1 */
    size_t count, capacity;
} words;

static vla_status put_id(words *w, int32_t id, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&w->ids, &w->capacity, w->count, sizeof *w->ids, err));
    w->ids[w->count++] = id;
    return VLA_OK;
}

static vla_status collect(void *user, const char *text, size_t size, vla_error *err)
{
    words *w = user;
    for (size_t i = 0; i < size; i++)
        VLA_TRY(put_id(w, w->byte_id[(uint8_t)text[i]], err));
    return put_id(w, -1, err);
}

static int compare_pairs(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The most frequent pair of neighbours, the smallest among equals; 0 when none stands twice. */
static size_t best_pair(const words *w, uint64_t *pairs, uint64_t *best)
{
    size_t n = 0, most = 0;
    for (size_t i = 0; i + 1 < w->count; i++)
        if (w->ids[i] >= 0 && w->ids[i + 1] >= 0)
            pairs[n++] = (uint64_t)(uint32_t)w->ids[i] << 32 | (uint32_t)w->ids[i + 1];
    qsort(pairs, n, sizeof *pairs, compare_pairs);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && pairs[end] == pairs[i];)
            end++;
        if (end - i > most) {
            most = end - i;
            *best = pairs[i];
        }
    }
    return most >= 2 ? most : 0;
}

static void replace_pair(words *w, int32_t left, int32_t right, int32_t id)
{
    size_t to = 0;
    for (size_t i = 0; i < w->count; i++)
        if (w->ids[i] == left && i + 1 < w->count && w->ids[i + 1] == right) {
            w->ids[to++] = id;
            i++;
        } else {
            w->ids[to++] = w->ids[i];
        }
    w->count = to;
}

static vla_status learn(vocabulary *v, words *w, size_t merges, vla_error *err)
{
    uint64_t *pairs = vlai_array(w->count ? w->count : 1, sizeof *pairs), best = 0;
    if (!pairs)
        return vlai_nomem(err, w->count * sizeof *pairs);
    vla_status status = VLA_OK;
    for (size_t m = 0; status == VLA_OK && m < merges && best_pair(w, pairs, &best); m++) {
        int32_t left = (int32_t)(best >> 32), right = (int32_t)(uint32_t)best, id = -1;
        vlai_text joined = {0}, line = {0};
        vlai_text_printf(&joined, "%s%s", v->tokens[left], v->tokens[right]);
        vlai_text_printf(&line, "%s %s", v->tokens[left], v->tokens[right]);
        status = joined.failed || line.failed ? vlai_nomem(err, 64) : VLA_OK;
        for (size_t i = 0; status == VLA_OK && i < v->count && id < 0; i++) /* another pair may have made it before */
            if (!strcmp(v->tokens[i], joined.data))
                id = (int32_t)i;
        if (status == VLA_OK && id < 0) {
            id = (int32_t)v->count;
            status = put_token(v, joined.data, err);
        }
        if (status == VLA_OK && json_array_append_new(v->merges, json_string(line.data)))
            status = vlai_nomem(err, line.size);
        vlai_text_fini(&joined);
        vlai_text_fini(&line);
        if (status == VLA_OK)
            replace_pair(w, left, right, id);
    }
    vlai_free(pairs);
    return status;
}

/* Files. */

static json_t *tokenizer_json(const vocabulary *v)
{
    json_t *vocab = json_object(), *added = json_array();
    for (size_t i = 0; i < v->count; i++)
        json_object_set_new(vocab, v->tokens[i], json_integer((json_int_t)i));
    for (size_t i = 0; i < NAMED; i++)
        json_array_append_new(added, json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)(v->count + i), "content",
                                               named[i].text, "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0,
                                               "special", named[i].special));
    json_t *split = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", split_pattern, "behavior",
                              "Isolated", "invert", 0);
    json_t *bytes = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0);
    json_t *model = json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:O}", "type", "BPE", "dropout", "unk_token",
                              "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
                              "ignore_merges", 0, "vocab", vocab, "merges", v->merges);
    return json_pack("{s:s, s:n, s:n, s:o, s:{s:s}, s:{s:s, s:[o,o]}, s:{s:s, s:b, s:b, s:b}, s:{s:s, s:b, s:b, s:b}, s:o}",
                     "version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer", "type", "NFC",
                     "pre_tokenizer", "type", "Sequence", "pretokenizers", split, bytes, "post_processor", "type", "ByteLevel",
                     "add_prefix_space", 1, "trim_offsets", 0, "use_regex", 1, "decoder", "type", "ByteLevel",
                     "add_prefix_space", 1, "trim_offsets", 1, "use_regex", 1, "model", model);
}

static json_t *config_json(const vocabulary *v)
{
    json_t *decoder = json_object(), *additional = json_array();
    for (size_t i = 0; i < NAMED; i++) {
        char id[32];
        snprintf(id, sizeof id, "%zu", v->count + i);
        json_object_set_new(decoder, id, json_pack("{s:s, s:b, s:b, s:b, s:b, s:b}", "content", named[i].text, "lstrip", 0,
                                                   "normalized", 0, "rstrip", 0, "single_word", 0, "special", named[i].special));
        if (i > 0 && named[i].special)
            json_array_append_new(additional, json_string(named[i].text));
    }
    return json_pack("{s:b, s:b, s:o, s:o, s:n, s:b, s:s, s:s, s:i, s:s, s:b, s:s, s:n}", "add_bos_token", 0, "add_prefix_space",
                     0, "added_tokens_decoder", decoder, "additional_special_tokens", additional, "bos_token",
                     "clean_up_tokenization_spaces", 0, "eos_token", "<|im_end|>", "errors", "replace", "model_max_length",
                     131072, "pad_token", "<|endoftext|>", "split_special_tokens", 0, "tokenizer_class", "Qwen2Tokenizer",
                     "unk_token");
}

static json_t *preprocessor_json(void)
{
    vlai_image_processor p;
    vlai_image_processor_default(&p);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:[f,f,f], s:[f,f,f], s:s, s:s}", "min_pixels", (json_int_t)p.rule.min_pixels,
                     "max_pixels", (json_int_t)p.rule.max_pixels, "patch_size", (json_int_t)p.patch, "temporal_patch_size",
                     (json_int_t)p.temporal, "merge_size", (json_int_t)p.merge, "image_mean", p.mean[0], p.mean[1], p.mean[2],
                     "image_std", p.std[0], p.std[1], p.std[2], "image_processor_type", "Qwen2VLImageProcessor",
                     "processor_class", "Qwen2_5_VLProcessor");
}

/* Takes `value`. */
static vla_status save(json_t *value, const char *dir, const char *name, vla_error *err)
{
    char path[4096];
    vla_status status;
    if (!value)
        status = vlai_nomem(err, 4096);
    else if (!vlai_path_join(path, sizeof path, dir, name))
        status = vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", dir, name);
    else
        status = vlai_json_save(value, path, err);
    json_decref(value);
    return status;
}

/* Splits the texts as the finished tokenizer will: by one with the alphabet and the named tokens alone. */
static vla_status collect_words(const vocabulary *v, const char *const *texts, size_t count, words *w, vla_error *err)
{
    json_t *json = tokenizer_json(v);
    char *plain = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    if (!plain)
        return vlai_nomem(err, 4096);
    vlai_tokenizer *tok = NULL;
    vla_status status = vlai_tokenizer_parse(plain, strlen(plain), NULL, 0, "the byte vocabulary", &tok, err);
    void (*release)(void *) = NULL;
    json_get_alloc_funcs(NULL, &release);
    release(plain);
    if (status != VLA_OK)
        return status;
    w->byte_id = tok->byte_id;
    for (size_t i = 0; status == VLA_OK && i < count; i++)
        status = vlai_tokenizer_pieces(tok, texts[i], strlen(texts[i]), collect, w, err);
    vlai_tokenizer_close(tok);
    w->byte_id = NULL;
    return status;
}

vla_status vlai_tokenizer_write(const char *dir, const char *const *texts, size_t count, size_t merges, vla_error *err)
{
    vocabulary v = {.merges = json_array()};
    words w = {0};
    vla_status status = v.merges ? VLA_OK : vlai_nomem(err, 64);
    if (status != VLA_OK)
        return status;
    VLA_TRY_GOTO(put_alphabet(&v, err), done);
    /* Label regions are found by counting <|im_start|>, assistant and newline as one token each: see text/prompt.c. */
    static const char *const turn[] = {"assistant\nassistant"};
    VLA_TRY_GOTO(collect_words(&v, turn, 1, &w, err), done);
    VLA_TRY_GOTO(learn(&v, &w, SIZE_MAX, err), done);
    w.count = 0;
    VLA_TRY_GOTO(collect_words(&v, texts, count, &w, err), done);
    VLA_TRY_GOTO(learn(&v, &w, merges, err), done);
    VLA_TRY_GOTO(vlai_mkdirs(dir, err), done);
    VLA_TRY_GOTO(save(tokenizer_json(&v), dir, "tokenizer.json", err), done);
    VLA_TRY_GOTO(save(config_json(&v), dir, "tokenizer_config.json", err), done);
    status = save(preprocessor_json(), dir, "preprocessor_config.json", err);
done:
    vocabulary_fini(&v);
    vlai_free(w.ids);
    return status;
}
