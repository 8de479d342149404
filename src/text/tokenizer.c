/* Reading tokenizer.json and looking tokens up. Encoding stands in tokenizer_encode.c, writing in tokenizer_write.c.
 * Facts of the format: huggingface/tokenizers, src/tokenizer/serialization.rs, added_vocabulary.rs, models/bpe. */
#include "text/tokenizer_impl.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "text/bytes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <utf8proc.h>
#include <xxhash.h>

vla_status vlai_ids_push(vlai_ids *ids, int32_t id, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&ids->data, &ids->capacity, ids->count, sizeof *ids->data, err));
    ids->data[ids->count++] = id;
    return VLA_OK;
}

void vlai_ids_fini(vlai_ids *ids)
{
    vlai_free(ids->data);
    *ids = (vlai_ids){0};
}

/* Tokens by text. */

static uint32_t *slot_of(const vlai_tokenizer *tok, const char *text, size_t size)
{
    size_t mask = tok->slot_count - 1;
    for (size_t i = XXH3_64bits(text, size) & mask;; i = (i + 1) & mask) {
        uint32_t entry = tok->slots[i];
        if (!entry)
            return &tok->slots[i];
        const tokenizer_token *token = &tok->tokens[entry - 1];
        if (token->size == size && !memcmp(token->text, text, size))
            return &tok->slots[i];
    }
}

int32_t vlai_tokenizer_find(const vlai_tokenizer *tok, const char *text, size_t size)
{
    if (!tok->slot_count)
        return -1;
    uint32_t entry = *slot_of(tok, text, size);
    return entry ? (int32_t)entry - 1 : -1;
}

int32_t vlai_tokenizer_id(const vlai_tokenizer *tok, const char *content)
{
    return vlai_tokenizer_find(tok, content, strlen(content));
}

/* Keeps the table at most half full, counting one more token. */
static vla_status grow_slots(vlai_tokenizer *tok, size_t tokens, vla_error *err)
{
    size_t wanted = 64;
    while (wanted < 2 * tokens)
        wanted *= 2;
    if (wanted <= tok->slot_count)
        return VLA_OK;
    uint32_t *fresh = vlai_calloc(wanted, sizeof *fresh);
    if (!fresh)
        return vlai_nomem(err, wanted * sizeof *fresh);
    vlai_free(tok->slots);
    tok->slots = fresh;
    tok->slot_count = wanted;
    for (size_t id = 0; id < tok->count; id++)
        if (tok->tokens[id].text)
            *slot_of(tok, tok->tokens[id].text, tok->tokens[id].size) = (uint32_t)id + 1;
    return VLA_OK;
}

static vla_status put_token(vlai_tokenizer *tok, int64_t id, const char *text, size_t size, vla_error *err)
{
    /* Ids stand close together in real files; a far-off one would make the table as large as the file claims. */
    if (id < 0 || (uint64_t)id > 4 * (uint64_t)tok->distinct + 400000)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: token '%.60s' has id %" PRId64 ", far beyond the %zu tokens before it",
                         tok->name, text, id, tok->distinct);
    if (size > 65535)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: the token with id %" PRId64 " is %zu bytes long, more than 65535",
                         tok->name, id, size);
    while (tok->count <= (size_t)id) {
        VLA_TRY(vlai_reserve((void **)&tok->tokens, &tok->capacity, tok->count, sizeof *tok->tokens, err));
        tok->tokens[tok->count++] = (tokenizer_token){0};
    }
    if (tok->tokens[id].text)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: tokens '%.60s' and '%.60s' have the same id %" PRId64, tok->name,
                         tok->tokens[id].text, text, id);
    VLA_TRY(grow_slots(tok, tok->distinct + 1, err));
    char *copy = vlai_arena_alloc(&tok->arena, size + 1);
    if (!copy)
        return vlai_nomem(err, size + 1);
    memcpy(copy, text, size);
    tok->tokens[id].text = copy;
    tok->tokens[id].size = (uint32_t)size;
    *slot_of(tok, copy, size) = (uint32_t)id + 1;
    tok->distinct++;
    return VLA_OK;
}

/* Added tokens. */

static vla_status trie_node_new(tokenizer_trie *trie, uint8_t byte, int32_t *out, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&trie->nodes, &trie->capacity, trie->count, sizeof *trie->nodes, err));
    trie->nodes[trie->count] = (trie_node){.child = -1, .sibling = -1, .token = -1, .byte = byte};
    *out = (int32_t)trie->count++;
    return VLA_OK;
}

static vla_status trie_put(tokenizer_trie *trie, const char *text, size_t size, int32_t token, vla_error *err)
{
    int32_t at;
    if (!trie->count) {
        VLA_TRY(trie_node_new(trie, 0, &at, err));
        memset(trie->first, -1, sizeof trie->first);
    }
    at = 0;
    for (size_t i = 0; i < size; i++) {
        uint8_t byte = (uint8_t)text[i];
        int32_t child = trie->nodes[at].child;
        while (child >= 0 && trie->nodes[child].byte != byte)
            child = trie->nodes[child].sibling;
        if (child < 0) {
            VLA_TRY(trie_node_new(trie, byte, &child, err));
            trie->nodes[child].sibling = trie->nodes[at].child;
            trie->nodes[at].child = child;
            if (at == 0)
                trie->first[byte] = child;
        }
        at = child;
    }
    if (trie->nodes[at].token < 0)
        trie->nodes[at].token = token;
    return VLA_OK;
}

/* `flags.text` and `flags.size` are ignored. id < 0: the vocabulary's own id, or the next free one. */
static vla_status add_token(vlai_tokenizer *tok, const char *content, int64_t id, tokenizer_token flags, int32_t *out,
                            vla_error *err)
{
    size_t size = strlen(content);
    if (!size)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: an added token has an empty content", tok->name);
    if (vlai_utf8_check(content, size) != size)
        return vlai_fail(err, VLA_E_INVALID, "%s: added token '%.60s' is not valid UTF-8", tok->name, content);
    int32_t known = vlai_tokenizer_find(tok, content, size);
    if (known >= 0) {
        if (id >= 0 && id != known)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: added token '%.60s' has id %" PRId64 " here and %d before",
                             tok->name, content, id, known);
        id = known;
    } else {
        if (id < 0)
            id = (int64_t)tok->count;
        VLA_TRY(put_token(tok, id, content, size, err));
    }
    if (out)
        *out = (int32_t)id;
    tokenizer_token *token = &tok->tokens[id];
    if (token->added)
        return VLA_OK;
    token->added = true;
    token->special = flags.special;
    token->normalized = flags.normalized;
    token->single_word = flags.single_word;
    token->lstrip = flags.lstrip;
    token->rstrip = flags.rstrip;
    if (!flags.normalized)
        return trie_put(&tok->raw, content, size, (int32_t)id, err);
    vlai_text form = {0};
    vla_status status = vlai_tokenizer_normalize(tok, content, size, &form, err);
    if (status == VLA_OK && form.size)
        status = trie_put(&tok->normalized, form.data, form.size, (int32_t)id, err);
    vlai_text_fini(&form);
    return status;
}

vla_status vlai_tokenizer_add(vlai_tokenizer *tok, const char *content, int32_t *id, vla_error *err)
{
    return add_token(tok, content, -1, (tokenizer_token){.normalized = true}, id, err);
}

/* Sections of the file. */

static vla_status read_vocabulary(vlai_tokenizer *tok, const json_t *model, vla_error *err)
{
    json_t *vocabulary;
    VLA_TRY(vlai_json_need(model, "vocab", JSON_OBJECT, tok->name, &vocabulary, err));
    const char *text;
    json_t *id;
    json_object_foreach(vocabulary, text, id) {
        if (!json_is_integer(id))
            return vlai_fail(err, VLA_E_FORMAT, "%s: the id of token '%.60s' is not an integer", tok->name, text);
        VLA_TRY(put_token(tok, json_integer_value(id), text, strlen(text), err));
    }
    tok->vocabulary = tok->distinct;
    uint16_t character[256];
    int16_t byte_of[0x144];
    byte_alphabet(character, byte_of);
    for (int b = 0; b < 256; b++) {
        char utf8[2];
        tok->byte_id[b] = vlai_tokenizer_find(tok, utf8, (size_t)byte_utf8(character[b], utf8));
    }
    return VLA_OK;
}

tokenizer_merge *vlai_tokenizer_merge(const vlai_tokenizer *tok, int32_t left, int32_t right)
{
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right, mixed = pair * 0x9E3779B97F4A7C15u;
    size_t mask = tok->merge_slots - 1;
    for (size_t i = (size_t)(mixed >> 32) & mask;; i = (i + 1) & mask)
        if (tok->merges[i].pair == pair || tok->merges[i].pair == UINT64_MAX)
            return &tok->merges[i];
}

static vla_status read_merges(vlai_tokenizer *tok, const json_t *model, vla_error *err)
{
    json_t *list;
    VLA_TRY(vlai_json_need(model, "merges", JSON_ARRAY, tok->name, &list, err));
    size_t slots = 64;
    while (slots < 2 * json_array_size(list))
        slots *= 2;
    tok->merges = vlai_array(slots, sizeof *tok->merges);
    if (!tok->merges)
        return vlai_nomem(err, slots * sizeof *tok->merges);
    tok->merge_slots = slots;
    memset(tok->merges, 0xFF, slots * sizeof *tok->merges);
    vlai_text joined = {0};
    vla_status status = VLA_OK;
    size_t rank;
    json_t *entry;
    json_array_foreach(list, rank, entry) {
        const char *left = NULL, *right = NULL;
        size_t left_size = 0, right_size = 0;
        if (json_is_string(entry)) {
            left = json_string_value(entry);
            const char *space = strchr(left, ' ');
            if (space && !strchr(space + 1, ' ')) {
                left_size = (size_t)(space - left);
                right = space + 1;
                right_size = strlen(right);
            }
        } else if (json_is_array(entry) && json_array_size(entry) == 2) {
            left = json_string_value(json_array_get(entry, 0));
            right = json_string_value(json_array_get(entry, 1));
            left_size = left ? strlen(left) : 0;
            right_size = right ? strlen(right) : 0;
        }
        if (!left || !right) {
            status = vlai_fail(err, VLA_E_FORMAT, "%s: merge %zu is neither \"a b\" nor [\"a\", \"b\"]", tok->name, rank);
            break;
        }
        int32_t a = vlai_tokenizer_find(tok, left, left_size), b = vlai_tokenizer_find(tok, right, right_size), id;
        joined.size = 0;
        vlai_text_put(&joined, left, left_size);
        vlai_text_put(&joined, right, right_size);
        status = vlai_text_status(&joined, err);
        if (status != VLA_OK)
            break;
        id = vlai_tokenizer_find(tok, joined.data ? joined.data : "", joined.size);
        if (a < 0 || b < 0 || id < 0) {
            status = vlai_fail(err, VLA_E_CORRUPT, "%s: merge %zu ('%.40s' + '%.40s') names a token outside the vocabulary",
                               tok->name, rank, left, right);
            break;
        }
        tokenizer_merge *merge = vlai_tokenizer_merge(tok, a, b);
        *merge = (tokenizer_merge){.pair = (uint64_t)(uint32_t)a << 32 | (uint32_t)b, .rank = (uint32_t)rank, .id = id};
    }
    vlai_text_fini(&joined);
    return status;
}

static const char *type_of(const json_t *object)
{
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : json_is_null(object) || !object ? "null" : "?";
}

static vla_status read_model(vlai_tokenizer *tok, const json_t *root, vla_error *err)
{
    json_t *model;
    VLA_TRY(vlai_json_need(root, "model", JSON_OBJECT, tok->name, &model, err));
    const char *type = json_string_value(json_object_get(model, "type"));
    if (type && strcmp(type, "BPE")) /* old files have no type */
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: model type '%s'; byte-level 'BPE' is read", tok->name, type);
    static const char *const refused[] = {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const json_t *value = json_object_get(model, refused[i]);
        bool empty = !value || json_is_null(value) || (json_is_string(value) && !*json_string_value(value)) ||
                     (json_is_number(value) && json_number_value(value) == 0);
        if (!empty)
            return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: model.%s is set; byte-level BPE without it is read", tok->name,
                             refused[i]);
    }
    bool fallback;
    VLA_TRY(vlai_json_bool(model, "byte_fallback", false, tok->name, &fallback, err));
    if (fallback)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: model.byte_fallback is set; byte-level BPE is read", tok->name);
    VLA_TRY(vlai_json_bool(model, "ignore_merges", false, tok->name, &tok->ignore_merges, err));
    VLA_TRY(read_vocabulary(tok, model, err));
    return read_merges(tok, model, err);
}

static vla_status read_normalizer(vlai_tokenizer *tok, const json_t *object, vla_error *err)
{
    static const struct {
        const char *name;
        int options;
    } forms[] = {
        {"NFC", UTF8PROC_STABLE | UTF8PROC_COMPOSE},
        {"NFD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
        {"NFKC", UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
        {"NFKD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT},
    };
    const char *type = type_of(object);
    if (!strcmp(type, "null"))
        return VLA_OK;
    const json_t *list = json_object_get(object, "normalizers");
    if (!strcmp(type, "Sequence") && json_array_size(list) <= 1)
        return json_array_size(list) ? read_normalizer(tok, json_array_get(list, 0), err) : VLA_OK;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (!strcmp(forms[i].name, type)) {
            tok->normal_form = forms[i].options;
            return VLA_OK;
        }
    return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: normalizer '%s'; NFC, NFD, NFKC, NFKD or none are read", tok->name, type);
}

/* \s of the file's regular expressions is Unicode's White_Space, spelled out here because PCRE2's own \s also takes
 * U+180E. \S inside a class cannot be spelled so and stays. */
static vla_status spell_white_space(const char *pattern, vlai_text *out, vla_error *err)
{
    static const char white[] = "\\t-\\r \\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}";
    bool in_class = false;
    for (const char *p = pattern; *p; p++) {
        if (p[0] == '\\' && p[1]) {
            if (in_class && p[1] == 's')
                vlai_text_puts(out, white);
            else if (!in_class && (p[1] == 's' || p[1] == 'S'))
                vlai_text_printf(out, "[%s%s]", p[1] == 'S' ? "^" : "", white);
            else
                vlai_text_put(out, p, 2);
            p++;
            continue;
        }
        if (*p == '[')
            in_class = true;
        else if (*p == ']')
            in_class = false;
        vlai_text_put(out, p, 1);
    }
    return vlai_text_status(out, err);
}

static vla_status add_split(vlai_tokenizer *tok, const char *pattern, bool literal, vla_error *err)
{
    if (tok->split_count == TOKENIZER_MAX_SPLITS)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: more than %d split patterns", tok->name, TOKENIZER_MAX_SPLITS);
    vlai_text spelled = {0};
    vla_status status = VLA_OK;
    pcre2_compile_context *context = pcre2_compile_context_create(tok->general);
    if (!context) {
        status = vlai_nomem(err, 64);
        goto done;
    }
    if (literal)
        vlai_text_puts(&spelled, pattern);
    else
        VLA_TRY_GOTO(spell_white_space(pattern, &spelled, err), done);
    VLA_TRY_GOTO(vlai_text_status(&spelled, err), done);
    int code;
    PCRE2_SIZE offset;
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
    pcre2_code *split =
        pcre2_compile((PCRE2_SPTR)(spelled.data ? spelled.data : ""), spelled.size, options, &code, &offset, context);
    if (!split) {
        char reason[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)reason, sizeof reason);
        status = code == PCRE2_ERROR_HEAP_FAILED || code == PCRE2_ERROR_NOMEMORY
                     ? vlai_nomem(err, spelled.size)
                     : vlai_fail(err, VLA_E_FORMAT, "%s: split pattern '%.200s': %s at offset %zu", tok->name, pattern,
                                 reason, offset);
        goto done;
    }
    pcre2_jit_compile(split, PCRE2_JIT_COMPLETE); /* without it the same matches take longer */
    tok->splits[tok->split_count++] = split;
done:
    pcre2_compile_context_free(context);
    vlai_text_fini(&spelled);
    return status;
}

static vla_status read_pre_tokenizer(vlai_tokenizer *tok, const json_t *object, int depth, vla_error *err)
{
    /* The pattern that a ByteLevel stage uses when use_regex is set. */
    static const char byte_level[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    const char *type = type_of(object);
    if (!strcmp(type, "Sequence") && depth < 4) {
        json_t *list, *stage;
        VLA_TRY(vlai_json_need(object, "pretokenizers", JSON_ARRAY, tok->name, &list, err));
        size_t i;
        json_array_foreach(list, i, stage)
            VLA_TRY(read_pre_tokenizer(tok, stage, depth + 1, err));
        return VLA_OK;
    }
    if (!strcmp(type, "ByteLevel")) {
        bool space, regex;
        VLA_TRY(vlai_json_bool(object, "add_prefix_space", true, tok->name, &space, err));
        VLA_TRY(vlai_json_bool(object, "use_regex", true, tok->name, &regex, err));
        if (space)
            return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: pre_tokenizer ByteLevel with add_prefix_space", tok->name);
        return regex ? add_split(tok, byte_level, false, err) : VLA_OK;
    }
    if (!strcmp(type, "Split")) {
        const char *behavior, *pattern;
        bool invert;
        VLA_TRY(vlai_json_string(object, "behavior", "?", tok->name, &behavior, err));
        VLA_TRY(vlai_json_bool(object, "invert", false, tok->name, &invert, err));
        json_t *form;
        VLA_TRY(vlai_json_need(object, "pattern", JSON_OBJECT, tok->name, &form, err));
        if (strcmp(behavior, "Isolated") || invert)
            return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: pre_tokenizer Split with behavior '%s'%s; 'Isolated' is read",
                             tok->name, behavior, invert ? " inverted" : "");
        bool literal = json_object_get(form, "String") != NULL;
        VLA_TRY(vlai_json_string(form, literal ? "String" : "Regex", NULL, tok->name, &pattern, err));
        if (!pattern || !*pattern)
            return vlai_fail(err, VLA_E_FORMAT, "%s: pre_tokenizer Split without a pattern", tok->name);
        return add_split(tok, pattern, literal, err);
    }
    return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: pre_tokenizer '%s'; Split and ByteLevel are read", tok->name, type);
}

static vla_status check_post_processor(vlai_tokenizer *tok, const json_t *object, vla_error *err)
{
    const char *type = type_of(object);
    const json_t *list = json_object_get(object, "processors"), *stage;
    if (!strcmp(type, "Sequence") && list) {
        size_t i;
        json_array_foreach(list, i, stage)
            if (strcmp(type_of(stage), "ByteLevel"))
                type = type_of(stage);
        if (!strcmp(type, "Sequence"))
            return VLA_OK;
    }
    if (!strcmp(type, "null") || !strcmp(type, "ByteLevel")) /* these change no id */
        return VLA_OK;
    return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: post_processor '%s' would add tokens; ByteLevel or none are read",
                     tok->name, type);
}

static vla_status read_flags(const json_t *object, const char *where, tokenizer_token *flags, vla_error *err)
{
    VLA_TRY(vlai_json_bool(object, "special", false, where, &flags->special, err));
    VLA_TRY(vlai_json_bool(object, "normalized", !flags->special, where, &flags->normalized, err));
    VLA_TRY(vlai_json_bool(object, "single_word", false, where, &flags->single_word, err));
    VLA_TRY(vlai_json_bool(object, "lstrip", false, where, &flags->lstrip, err));
    return vlai_json_bool(object, "rstrip", false, where, &flags->rstrip, err);
}

static vla_status read_added(vlai_tokenizer *tok, const json_t *root, vla_error *err)
{
    const json_t *list = json_object_get(root, "added_tokens");
    if (list && !json_is_null(list) && !json_is_array(list))
        return vlai_fail(err, VLA_E_FORMAT, "%s: added_tokens is not a list", tok->name);
    size_t i;
    json_t *entry;
    json_array_foreach(list, i, entry) {
        tokenizer_token flags = {0};
        const char *content;
        int64_t id;
        VLA_TRY(vlai_json_string(entry, "content", "", tok->name, &content, err));
        VLA_TRY(vlai_json_need_int(entry, "id", tok->name, &id, err));
        if (id < 0)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: added token '%.60s' has id %" PRId64, tok->name, content, id);
        VLA_TRY(read_flags(entry, tok->name, &flags, err));
        VLA_TRY(add_token(tok, content, id, flags, NULL, err));
    }
    return VLA_OK;
}

/* A token name in tokenizer_config.json is a string or an object with its content. */
static int32_t named_token(const vlai_tokenizer *tok, const json_t *config, const char *key)
{
    const json_t *value = json_object_get(config, key);
    if (json_is_object(value))
        value = json_object_get(value, "content");
    return json_is_string(value) ? vlai_tokenizer_id(tok, json_string_value(value)) : -1;
}

static vla_status read_config(vlai_tokenizer *tok, const char *text, size_t size, vla_error *err)
{
    json_t *config;
    char name[300];
    snprintf(name, sizeof name, "tokenizer_config.json beside %.250s", tok->name);
    VLA_TRY(vlai_json_parse(text, size, name, &config, err));
    vla_status status = VLA_OK;
    const char *side;
    VLA_TRY_GOTO(vlai_json_string(config, "padding_side", "right", name, &side, err), done);
    tok->pads_left = !strcmp(side, "left");
    /* Tokens that only this file names join in its order, as in transformers. */
    const char *key;
    json_t *entry;
    json_object_foreach(json_object_get(config, "added_tokens_decoder"), key, entry) {
        tokenizer_token flags = {0};
        const char *content;
        VLA_TRY_GOTO(vlai_json_string(entry, "content", "", name, &content, err), done);
        if (vlai_tokenizer_id(tok, content) >= 0)
            continue;
        VLA_TRY_GOTO(read_flags(entry, name, &flags, err), done);
        VLA_TRY_GOTO(add_token(tok, content, -1, flags, NULL, err), done);
    }
    tok->pad = named_token(tok, config, "pad_token");
    tok->eos = named_token(tok, config, "eos_token");
done:
    json_decref(config);
    return status;
}

static void *pcre_alloc(size_t size, void *user)
{
    (void)user;
    return vlai_alloc(size);
}

static void pcre_free(void *ptr, void *user)
{
    (void)user;
    vlai_free(ptr);
}

static vla_status parse_into(vlai_tokenizer *tok, const json_t *root, vla_error *err)
{
    tok->pad = tok->eos = -1;
    tok->general = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
    if (!tok->general)
        return vlai_nomem(err, 64);
    for (; tok->lock_count < TOKENIZER_CACHE_LOCKS; tok->lock_count++)
        if (pthread_mutex_init(&tok->locks[tok->lock_count], NULL))
            return vlai_nomem(err, sizeof tok->locks);
    VLA_TRY(read_model(tok, root, err));
    tok->cache_slots = 64;
    while (tok->cache_slots < tok->vocabulary && tok->cache_slots < TOKENIZER_CACHE_SLOTS)
        tok->cache_slots *= 2;
    tok->cache = vlai_calloc(tok->cache_slots, sizeof *tok->cache);
    if (!tok->cache)
        return vlai_nomem(err, tok->cache_slots * sizeof *tok->cache);
    VLA_TRY(read_normalizer(tok, json_object_get(root, "normalizer"), err));
    VLA_TRY(read_pre_tokenizer(tok, json_object_get(root, "pre_tokenizer"), 0, err));
    VLA_TRY(check_post_processor(tok, json_object_get(root, "post_processor"), err));
    return read_added(tok, root, err);
}

vla_status vlai_tokenizer_parse(const char *json, size_t size, const char *config, size_t config_size, const char *name,
                                vlai_tokenizer **out, vla_error *err)
{
    *out = NULL;
    json_t *root;
    VLA_TRY(vlai_json_parse(json, size, name, &root, err));
    vla_status status = VLA_OK;
    vlai_tokenizer *tok = vlai_calloc(1, sizeof *tok);
    if (!tok || !(tok->name = vlai_strdup(name))) {
        status = vlai_nomem(err, sizeof *tok);
        goto fail;
    }
    VLA_TRY_GOTO(parse_into(tok, root, err), fail);
    if (config)
        VLA_TRY_GOTO(read_config(tok, config, config_size, err), fail);
    json_decref(root);
    *out = tok;
    return VLA_OK;
fail:
    json_decref(root);
    vlai_tokenizer_close(tok);
    return status;
}

vla_status vlai_tokenizer_open(const char *path, vlai_tokenizer **out, vla_error *err)
{
    *out = NULL;
    char file[4096], beside[4096];
    bool folder = vlai_is_dir(path);
    if (!vlai_path_join(file, sizeof file, folder ? path : "", folder ? "tokenizer.json" : path))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
    if (!folder)
        snprintf(file, sizeof file, "%s", path);
    const char *slash = strrchr(file, '/');
    snprintf(beside, sizeof beside, "%.*stokenizer_config.json", slash ? (int)(slash - file + 1) : 0, file);
    char *json = NULL, *config = NULL;
    size_t size = 0, config_size = 0;
    vla_status status = vlai_read_file(file, (size_t)256 << 20, &json, &size, err);
    if (status != VLA_OK)
        return vlai_hint(err, status, "a processor folder holds tokenizer.json; `vla init` writes one");
    if (vlai_is_file(beside))
        VLA_TRY_GOTO(vlai_read_file(beside, (size_t)64 << 20, &config, &config_size, err), done);
    status = vlai_tokenizer_parse(json, size, config, config_size, file, out, err);
done:
    vlai_free(json);
    vlai_free(config);
    return status;
}

void vlai_tokenizer_close(vlai_tokenizer *tok)
{
    if (!tok)
        return;
    for (int i = 0; i < tok->split_count; i++)
        pcre2_code_free(tok->splits[i]);
    pcre2_general_context_free(tok->general);
    for (int i = 0; i < tok->lock_count; i++)
        pthread_mutex_destroy(&tok->locks[i]);
    vlai_free(tok->cache);
    vlai_free(tok->raw.nodes);
    vlai_free(tok->normalized.nodes);
    vlai_free(tok->merges);
    vlai_free(tok->slots);
    vlai_free(tok->tokens);
    vlai_free(tok->name);
    vlai_arena_fini(&tok->arena);
    vlai_free(tok);
}

int64_t vlai_tokenizer_size(const vlai_tokenizer *tok)
{
    return (int64_t)tok->distinct;
}

int32_t vlai_tokenizer_pad(const vlai_tokenizer *tok)
{
    return tok->pad;
}

bool vlai_tokenizer_pads_left(const vlai_tokenizer *tok)
{
    return tok->pads_left;
}

const char *vlai_tokenizer_name(const vlai_tokenizer *tok)
{
    return tok->name;
}

vla_status vlai_tokenizer_decode(const vlai_tokenizer *tok, const int32_t *ids, size_t count, bool skip_special,
                                 vlai_text *out, vla_error *err)
{
    uint16_t character[256];
    int16_t byte_of[0x144];
    byte_alphabet(character, byte_of);
    for (size_t i = 0; i < count; i++) {
        if (ids[i] < 0 || (size_t)ids[i] >= tok->count || !tok->tokens[ids[i]].text)
            return vlai_fail(err, VLA_E_INVALID, "%s: no token has id %d (%zu tokens)", tok->name, ids[i], tok->distinct);
        const tokenizer_token *token = &tok->tokens[ids[i]];
        if (token->added) {
            if (!(skip_special && token->special))
                vlai_text_put(out, token->text, token->size);
            continue;
        }
        for (size_t k = 0; k < token->size;) {
            utf8proc_int32_t c;
            utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)token->text + k,
                                                  (utf8proc_ssize_t)(token->size - k), &c);
            if (n <= 0)
                n = 1, c = 0x7FFFFFFF;
            char byte = c < 0x144 && byte_of[c] >= 0 ? (char)byte_of[c] : 0;
            if (c < 0x144 && byte_of[c] >= 0)
                vlai_text_put(out, &byte, 1);
            else
                vlai_text_put(out, token->text + k, (size_t)n);
            k += (size_t)n;
        }
    }
    return vlai_text_status(out, err);
}
