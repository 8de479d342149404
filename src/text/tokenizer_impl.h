/* The inside of a tokenizer, shared by the files that read, encode and write. Not for other folders. */
#ifndef VLAI_TOKENIZER_IMPL_H
#define VLAI_TOKENIZER_IMPL_H

#include "base/memory.h"
#include "text/tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <pthread.h>
#include <stdint.h>

enum {
    TOKENIZER_MAX_SPLITS = 4,
    TOKENIZER_CACHE_SLOTS = 8192, /* most pieces remembered; a power of two */
    TOKENIZER_CACHE_LOCKS = 64,
    TOKENIZER_CACHE_BYTES = 22, /* longest piece remembered: longer ones are rare words */
    TOKENIZER_CACHE_IDS = 8,
};

typedef struct tokenizer_token {
    const char *text; /* as in the file; NULL for an id that no token has */
    uint32_t size;
    bool added, special, normalized, single_word, lstrip, rstrip;
} tokenizer_token;

typedef struct tokenizer_merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX = free slot */
    uint32_t rank;
    int32_t id; /* what the pair becomes */
} tokenizer_merge;

/* Added tokens as a byte trie; node 0 is the root. */
typedef struct trie_node {
    int32_t child, sibling, token; /* -1 = none */
    uint8_t byte;
} trie_node;

typedef struct tokenizer_trie {
    trie_node *nodes;
    size_t count, capacity;
    int32_t first[256]; /* child of the root by byte, -1 = none */
} tokenizer_trie;

typedef struct tokenizer_cached {
    uint8_t size, count; /* size 0 = free */
    char text[TOKENIZER_CACHE_BYTES];
    int32_t ids[TOKENIZER_CACHE_IDS];
} tokenizer_cached;

struct vlai_tokenizer {
    vlai_arena arena;
    char *name;

    tokenizer_token *tokens; /* by id */
    size_t count, capacity;  /* largest id + 1 */
    size_t distinct;         /* ids that have a token */
    size_t vocabulary;       /* entries of the model's own vocabulary */
    uint32_t *slots;         /* hash of the text -> id + 1, 0 = free; open addressing */
    size_t slot_count;

    tokenizer_merge *merges;
    size_t merge_slots;
    int32_t byte_id[256]; /* -1: the vocabulary has no such byte */
    bool ignore_merges;

    int normal_form; /* options of utf8proc_decompose; 0 = none */
    pcre2_code *splits[TOKENIZER_MAX_SPLITS];
    int split_count;
    pcre2_general_context *general;

    tokenizer_trie raw, normalized;

    int32_t pad, eos;
    bool pads_left;

    tokenizer_cached *cache;
    size_t cache_slots;
    pthread_mutex_t locks[TOKENIZER_CACHE_LOCKS];
    int lock_count;
};

/* -1 when absent. */
int32_t vlai_tokenizer_find(const vlai_tokenizer *tok, const char *text, size_t size);
/* Puts text, in the tokenizer's normal form, into `buffer` (count = 0 before is not needed). */
vla_status vlai_tokenizer_normalize(const vlai_tokenizer *tok, const char *text, size_t size, vlai_text *buffer,
                                    vla_error *err);
/* Calls `piece` for every stretch of text that merging works on, instead of merging it. */
typedef vla_status (*tokenizer_piece_fn)(void *user, const char *text, size_t size, vla_error *err);
vla_status vlai_tokenizer_pieces(const vlai_tokenizer *tok, const char *text, size_t size, tokenizer_piece_fn piece,
                                 void *user, vla_error *err);
/* The slot of a pair: its own, or the free one where it would go. */
tokenizer_merge *vlai_tokenizer_merge(const vlai_tokenizer *tok, int32_t left, int32_t right);

#endif
