/* Text to ids. The cutting of added tokens follows huggingface/tokenizers src/tokenizer/added_vocabulary.rs, the merging
 * models/bpe/word.rs: lowest rank first, leftmost among equals, and an entry of the queue is stale when its pair no longer
 * becomes the token that it was queued for. */
#include "text/tokenizer_impl.h"

#include "base/fail.h"
#include "text/bytes.h"

#include <limits.h>
#include <string.h>
#include <utf8proc.h>
#include <xxhash.h>

typedef struct symbol {
    int32_t id, previous, next; /* -1 = none; id -1 = merged away */
} symbol;

typedef struct candidate {
    uint32_t rank;
    int32_t at, id;
} candidate;

/* What encoding holds: buffers stay from call to call. */
typedef struct vlai_id_encoder {
    const vlai_tokenizer *tok;
    pcre2_match_data *matches[TOKENIZER_MAX_SPLITS];
    pcre2_match_context *limits;
    symbol *symbols;
    size_t symbol_capacity;
    candidate *heap;
    size_t heap_count, heap_capacity;
    vlai_ids *out;
    tokenizer_piece_fn piece; /* NULL: merge */
    void *user;
} encoder;

enum { SYMBOLS = 256 }; /* that there is room for from the start: few words are longer */

static bool is_ascii(const char *text, size_t size)
{
    uint8_t any = 0;
    for (size_t i = 0; i < size; i++)
        any |= (uint8_t)text[i];
    return any < 0x80;
}

vla_status vlai_tokenizer_normalize(const vlai_tokenizer *tok, const char *text, size_t size, vlai_text *buffer,
                                    vla_error *err)
{
    buffer->size = 0;
    if (!tok->normal_form || is_ascii(text, size)) {
        vlai_text_put(buffer, text, size);
        return vlai_text_status(buffer, err);
    }
    utf8proc_option_t options = (utf8proc_option_t)tok->normal_form;
    const utf8proc_uint8_t *bytes = (const utf8proc_uint8_t *)text;
    utf8proc_ssize_t n = utf8proc_decompose(bytes, (utf8proc_ssize_t)size, NULL, 0, options);
    if (n < 0)
        return vlai_fail(err, VLA_E_INVALID, "text cannot be normalised: %s", utf8proc_errmsg(n));
    utf8proc_int32_t *points = vlai_array((size_t)n + 1, sizeof *points);
    if (!points)
        return vlai_nomem(err, ((size_t)n + 1) * sizeof *points);
    n = utf8proc_decompose(bytes, (utf8proc_ssize_t)size, points, n, options);
    if (n >= 0)
        n = utf8proc_reencode(points, n, options);
    vla_status status = VLA_OK;
    if (n < 0)
        status = vlai_fail(err, VLA_E_INVALID, "text cannot be normalised: %s", utf8proc_errmsg(n));
    else
        vlai_text_put(buffer, (const char *)points, (size_t)n);
    vlai_free(points);
    return status == VLA_OK ? vlai_text_status(buffer, err) : status;
}

/* Unicode's White_Space. */
static bool is_white(utf8proc_int32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

static bool is_word(utf8proc_int32_t c)
{
    utf8proc_category_t k = utf8proc_category(c);
    return (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_NL) || k == UTF8PROC_CATEGORY_PC || c == 0x200C ||
           c == 0x200D;
}

static utf8proc_int32_t point_at(const char *text, size_t size, size_t at, size_t *length)
{
    utf8proc_int32_t c = 0;
    utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(size - at), &c);
    *length = n > 0 ? (size_t)n : 1;
    return c;
}

static size_t point_before(const char *text, size_t at)
{
    do
        at--;
    while (at > 0 && ((uint8_t)text[at] & 0xC0) == 0x80);
    return at;
}

/* The longest added token at the first place from `from` on where one stands; -1 when there is none. */
static int32_t next_added(const tokenizer_trie *trie, const char *text, size_t size, size_t from, size_t *start,
                          size_t *end)
{
    if (!trie->count)
        return -1;
    for (size_t i = from; i < size; i++) {
        int32_t node = trie->first[(uint8_t)text[i]], token = -1;
        for (size_t k = i + 1; node >= 0; k++) {
            if (trie->nodes[node].token >= 0) {
                token = trie->nodes[node].token;
                *end = k;
            }
            if (k == size)
                break;
            node = trie->nodes[node].child;
            while (node >= 0 && trie->nodes[node].byte != (uint8_t)text[k])
                node = trie->nodes[node].sibling;
        }
        if (token >= 0) {
            *start = i;
            return token;
        }
    }
    return -1;
}

/* Applies the token's flags; false when a single-word token touches a word. `floor` is where the last token ended. */
static bool stretch(const tokenizer_token *token, const char *text, size_t size, size_t floor, size_t *start, size_t *end)
{
    size_t length;
    if (token->single_word) {
        if (*start > 0 && is_word(point_at(text, size, point_before(text, *start), &length)))
            return false;
        if (*end < size && is_word(point_at(text, size, *end, &length)))
            return false;
    }
    while (token->lstrip && *start > floor) {
        size_t before = point_before(text, *start);
        if (before < floor || !is_white(point_at(text, size, before, &length)))
            break;
        *start = before;
    }
    while (token->rstrip && *end < size && is_white(point_at(text, size, *end, &length)))
        *end += length;
    return true;
}

/* Merging. */

static bool before(candidate a, candidate b)
{
    return a.rank != b.rank ? a.rank < b.rank : a.at < b.at;
}

static vla_status heap_push(encoder *e, candidate c, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&e->heap, &e->heap_capacity, e->heap_count, sizeof *e->heap, err));
    size_t i = e->heap_count++;
    for (; i > 0 && before(c, e->heap[(i - 1) / 2]); i = (i - 1) / 2)
        e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = c;
    return VLA_OK;
}

static candidate heap_pop(encoder *e)
{
    candidate top = e->heap[0], last = e->heap[--e->heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < e->heap_count; i = child) {
        if (child + 1 < e->heap_count && before(e->heap[child + 1], e->heap[child]))
            child++;
        if (!before(e->heap[child], last))
            break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

static vla_status propose(encoder *e, int32_t left, int32_t right, vla_error *err)
{
    if (left < 0 || right < 0)
        return VLA_OK;
    const tokenizer_merge *m = vlai_tokenizer_merge(e->tok, e->symbols[left].id, e->symbols[right].id);
    if (m->pair == UINT64_MAX)
        return VLA_OK;
    return heap_push(e, (candidate){.rank = m->rank, .at = left, .id = m->id}, err);
}

static vla_status merge_piece(encoder *e, const char *text, size_t size, vla_error *err)
{
    const vlai_tokenizer *tok = e->tok;
    if (size > (size_t)INT_MAX)
        return vlai_fail(err, VLA_E_INVALID, "a word of %zu bytes is too long to tokenise", size);
    if (size > e->symbol_capacity) {
        vlai_free(e->symbols);
        e->symbol_capacity = 0;
        e->symbols = vlai_array(size, sizeof *e->symbols);
        if (!e->symbols)
            return vlai_nomem(err, size * sizeof *e->symbols);
        e->symbol_capacity = size;
    }
    int32_t count = 0;
    for (size_t i = 0; i < size; i++) {
        int32_t id = tok->byte_id[(uint8_t)text[i]];
        if (id < 0)
            continue; /* as the reference without an unknown token */
        e->symbols[count] = (symbol){.id = id, .previous = count - 1, .next = count + 1};
        count++;
    }
    if (!count)
        return VLA_OK;
    e->symbols[count - 1].next = -1;
    e->heap_count = 0;
    for (int32_t i = 0; i + 1 < count; i++)
        VLA_TRY(propose(e, i, i + 1, err));
    while (e->heap_count) {
        candidate top = heap_pop(e);
        symbol *left = &e->symbols[top.at];
        if (left->id < 0 || left->next < 0)
            continue;
        symbol *right = &e->symbols[left->next];
        const tokenizer_merge *m = vlai_tokenizer_merge(tok, left->id, right->id);
        if (m->pair == UINT64_MAX || m->id != top.id)
            continue;
        left->id = top.id;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0)
            e->symbols[left->next].previous = top.at;
        VLA_TRY(propose(e, left->previous, top.at, err));
        VLA_TRY(propose(e, top.at, left->next, err));
    }
    for (int32_t i = 0; i >= 0; i = e->symbols[i].next)
        VLA_TRY(vlai_ids_push(e->out, e->symbols[i].id, err));
    return VLA_OK;
}

/* A vocabulary that holds the whole piece gives it without merging, where the file asks for that. */
static vla_status whole_piece(encoder *e, const char *text, size_t size, bool *found, vla_error *err)
{
    uint16_t character[256];
    int16_t byte_of[0x144];
    byte_alphabet(character, byte_of);
    vlai_text spelled = {0};
    for (size_t i = 0; i < size; i++) {
        char utf8[2];
        vlai_text_put(&spelled, utf8, (size_t)byte_utf8(character[(uint8_t)text[i]], utf8));
    }
    vla_status status = vlai_text_status(&spelled, err);
    int32_t id = status == VLA_OK ? vlai_tokenizer_find(e->tok, spelled.data, spelled.size) : -1;
    vlai_text_fini(&spelled);
    VLA_TRY(status);
    *found = id >= 0;
    return *found ? vlai_ids_push(e->out, id, err) : VLA_OK;
}

static vla_status encode_piece(encoder *e, const char *text, size_t size, vla_error *err)
{
    const vlai_tokenizer *tok = e->tok;
    if (e->piece)
        return e->piece(e->user, text, size, err);
    if (size == 1 && tok->byte_id[(uint8_t)*text] >= 0)
        return vlai_ids_push(e->out, tok->byte_id[(uint8_t)*text], err);
    uint64_t hash = 0;
    tokenizer_cached *cached = NULL;
    pthread_mutex_t *lock = NULL;
    if (size <= TOKENIZER_CACHE_BYTES) {
        hash = XXH3_64bits(text, size);
        cached = &tok->cache[hash % tok->cache_slots];
        lock = (pthread_mutex_t *)&tok->locks[hash % TOKENIZER_CACHE_LOCKS];
        int32_t ids[TOKENIZER_CACHE_IDS];
        int count = -1;
        pthread_mutex_lock(lock);
        if (cached->size == size && !memcmp(cached->text, text, size)) {
            count = cached->count;
            memcpy(ids, cached->ids, sizeof ids);
        }
        pthread_mutex_unlock(lock);
        for (int i = 0; i < count; i++)
            VLA_TRY(vlai_ids_push(e->out, ids[i], err));
        if (count >= 0)
            return VLA_OK;
    }
    size_t first = e->out->count;
    bool found = false;
    if (tok->ignore_merges)
        VLA_TRY(whole_piece(e, text, size, &found, err));
    if (!found)
        VLA_TRY(merge_piece(e, text, size, err));
    size_t count = e->out->count - first;
    if (cached && count <= TOKENIZER_CACHE_IDS) {
        pthread_mutex_lock(lock);
        cached->size = (uint8_t)size;
        cached->count = (uint8_t)count;
        memcpy(cached->text, text, size);
        if (count)
            memcpy(cached->ids, e->out->data + first, count * sizeof *cached->ids);
        pthread_mutex_unlock(lock);
    }
    return VLA_OK;
}

/* Splits by pattern number `level`; matches and what lies between them are pieces ("Isolated"). */
static vla_status split(encoder *e, int level, const char *text, size_t size, vla_error *err)
{
    if (!size)
        return VLA_OK;
    if (level == e->tok->split_count)
        return encode_piece(e, text, size, err);
    pcre2_match_data *match = e->matches[level];
    size_t done = 0, from = 0;
    while (from < size) {
        int found = pcre2_match(e->tok->splits[level], (PCRE2_SPTR)text, size, from, PCRE2_NO_UTF_CHECK, match, e->limits);
        if (found == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter's stack is the heap */
            found = pcre2_match(e->tok->splits[level], (PCRE2_SPTR)text, size, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                                match, e->limits);
        if (found == PCRE2_ERROR_NOMATCH)
            break;
        if (found < 0) {
            char reason[128];
            pcre2_get_error_message(found, (PCRE2_UCHAR *)reason, sizeof reason);
            return vlai_fail(err, found == PCRE2_ERROR_NOMEMORY ? VLA_E_NOMEM : VLA_E_INVALID,
                             "%s: the split pattern gives up on a text of %zu bytes: %s", e->tok->name, size, reason);
        }
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match);
        size_t start = range[0], end = range[1];
        if (end <= start || start < from) { /* an empty match splits nothing */
            size_t length;
            point_at(text, size, from, &length);
            from += length;
            continue;
        }
        VLA_TRY(split(e, level + 1, text + done, start - done, err));
        VLA_TRY(split(e, level + 1, text + start, end - start, err));
        done = from = end;
    }
    return split(e, level + 1, text + done, size - done, err);
}

/* Cuts the tokens of one trie out of the text and hands on what lies between. */
static vla_status cut(encoder *e, bool raw, const char *text, size_t size, vla_error *err);

static vla_status between(encoder *e, bool raw, const char *text, size_t size, vla_error *err)
{
    if (!size)
        return VLA_OK;
    if (!raw)
        return split(e, 0, text, size, err);
    if (!e->tok->normal_form || is_ascii(text, size))
        return cut(e, false, text, size, err);
    vlai_text form = {0};
    vla_status status = vlai_tokenizer_normalize(e->tok, text, size, &form, err);
    if (status == VLA_OK && form.size)
        status = cut(e, false, form.data, form.size, err);
    vlai_text_fini(&form);
    return status;
}

static vla_status cut(encoder *e, bool raw, const char *text, size_t size, vla_error *err)
{
    const tokenizer_trie *trie = raw ? &e->tok->raw : &e->tok->normalized;
    size_t done = 0, from = 0, start, end;
    int32_t token;
    while ((token = next_added(trie, text, size, from, &start, &end)) >= 0) {
        from = end;
        if (!stretch(&e->tok->tokens[token], text, size, done, &start, &end))
            continue;
        VLA_TRY(between(e, raw, text + done, start - done, err));
        VLA_TRY(vlai_ids_push(e->out, token, err));
        done = from = end;
    }
    return between(e, raw, text + done, size - done, err);
}

static vla_status run(encoder *e, const char *text, size_t size, vla_error *err)
{
    size_t valid = vlai_utf8_check(text, size);
    if (valid != size)
        return vlai_fail(err, VLA_E_INVALID, "text to tokenise is not valid UTF-8 at byte %zu (0x%02x): '%.*s...'", valid,
                         (uint8_t)text[valid], (int)(valid < 60 ? valid : 60), text);
    /* A sound pattern backtracks at most a few times per byte; a pattern that takes exponential time ends in an error. */
    pcre2_set_match_limit(e->limits, (uint32_t)(size < 1u << 26 ? 10000 + 16 * size : UINT32_MAX));
    return cut(e, true, text, size, err);
}

static void encoder_fini(encoder *e)
{
    pcre2_match_context_free(e->limits);
    for (int i = 0; i < e->tok->split_count; i++)
        pcre2_match_data_free(e->matches[i]);
    vlai_free(e->symbols);
    vlai_free(e->heap);
}

/* The buffers of the search; on failure encoder_fini releases what there is. */
static vla_status encoder_init(encoder *e, const vlai_tokenizer *tok, vla_error *err)
{
    *e = (encoder){.tok = tok};
    e->limits = pcre2_match_context_create(tok->general);
    bool whole = e->limits != NULL;
    for (int i = 0; i < tok->split_count && whole; i++)
        whole = (e->matches[i] = pcre2_match_data_create(1, tok->general)) != NULL;
    return whole ? VLA_OK : vlai_nomem(err, 64);
}

vla_status vlai_id_encoder_create(const vlai_tokenizer *tok, vlai_id_encoder **out, vla_error *err)
{
    *out = NULL;
    encoder *e = vlai_alloc(sizeof *e);
    if (!e)
        return vlai_nomem(err, sizeof *e);
    vla_status status = encoder_init(e, tok, err);
    e->symbols = vlai_array(SYMBOLS, sizeof *e->symbols);
    e->heap = vlai_array(2 * SYMBOLS, sizeof *e->heap);
    if (status == VLA_OK && (!e->symbols || !e->heap))
        status = vlai_nomem(err, SYMBOLS * sizeof *e->symbols);
    e->symbol_capacity = SYMBOLS;
    e->heap_capacity = 2 * SYMBOLS;
    if (status != VLA_OK) {
        vlai_id_encoder_destroy(e);
        return status;
    }
    *out = e;
    return VLA_OK;
}

void vlai_id_encoder_destroy(vlai_id_encoder *e)
{
    if (!e)
        return;
    encoder_fini(e);
    vlai_free(e);
}

vla_status vlai_id_encoder_run(vlai_id_encoder *e, const char *text, size_t size, vlai_ids *out, vla_error *err)
{
    e->out = out;
    return run(e, text, size, err);
}

vla_status vlai_tokenizer_encode(const vlai_tokenizer *tok, const char *text, size_t size, vlai_ids *out, vla_error *err)
{
    encoder e;
    vla_status status = encoder_init(&e, tok, err);
    e.out = out;
    if (status == VLA_OK)
        status = run(&e, text, size, err);
    encoder_fini(&e);
    return status;
}

vla_status vlai_tokenizer_pieces(const vlai_tokenizer *tok, const char *text, size_t size, tokenizer_piece_fn piece,
                                 void *user, vla_error *err)
{
    vlai_ids ids = {0}; /* of added tokens, not wanted here */
    encoder e;
    vla_status status = encoder_init(&e, tok, err);
    e.out = &ids;
    e.piece = piece;
    e.user = user;
    if (status == VLA_OK)
        status = run(&e, text, size, err);
    encoder_fini(&e);
    vlai_ids_fini(&ids);
    return status;
}
