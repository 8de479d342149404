/* Byte-level BPE from a Hugging Face processor folder: text to token ids and back, as the `tokenizers` package does it.
 *
 *     vlai_tokenizer *tok;
 *     VLA_TRY(vlai_tokenizer_open("processor", &tok, err));          // tokenizer.json and, if there, tokenizer_config.json
 *     VLA_TRY(vlai_tokenizer_add(tok, "<|action|>", &action, err));  // before the first encode
 *     vlai_ids ids = {0};
 *     VLA_TRY(vlai_tokenizer_encode(tok, text, strlen(text), &ids, err));   // appends
 *     vlai_ids_fini(&ids);
 *     vlai_tokenizer_close(tok);
 *
 * Order of work on a text: added tokens with `normalized` false are cut out of the raw text; the rest is normalised (NFC);
 * added tokens with `normalized` true are cut out of that; what is left is split by the file's pattern, turned into bytes
 * and merged. Both spellings of merges ("a b" and ["a", "b"]) are read.
 *
 * Threads: encode, decode and the look-ups may be called from any thread once the last token has been added. */
#ifndef VLAI_TOKENIZER_H
#define VLAI_TOKENIZER_H

#include "base/text.h"
#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_ids {
    int32_t *data;
    size_t count, capacity; /* capacity in elements */
} vlai_ids;

vla_status vlai_ids_push(vlai_ids *ids, int32_t id, vla_error *err);
void vlai_ids_fini(vlai_ids *ids);

typedef struct vlai_tokenizer vlai_tokenizer;

/* `path`: the folder, or the tokenizer.json itself. */
vla_status vlai_tokenizer_open(const char *path, vlai_tokenizer **out, vla_error *err);
/* From memory; `config` (the text of tokenizer_config.json) may be NULL, `name` stands in error messages. */
vla_status vlai_tokenizer_parse(const char *json, size_t size, const char *config, size_t config_size, const char *name,
                                vlai_tokenizer **out, vla_error *err);
void vlai_tokenizer_close(vlai_tokenizer *tok); /* accepts NULL */

/* Adds an ordinary token (matched on normalised text). One that exists keeps its id; a new one gets the next free id. */
vla_status vlai_tokenizer_add(vlai_tokenizer *tok, const char *content, int32_t *id, vla_error *err);

int64_t vlai_tokenizer_size(const vlai_tokenizer *tok); /* different tokens, added ones included */
int32_t vlai_tokenizer_id(const vlai_tokenizer *tok, const char *content); /* -1 when there is no such token */
int32_t vlai_tokenizer_pad(const vlai_tokenizer *tok);  /* of tokenizer_config.json; -1 without one */
bool vlai_tokenizer_pads_left(const vlai_tokenizer *tok); /* padding_side of tokenizer_config.json; default right */
const char *vlai_tokenizer_name(const vlai_tokenizer *tok); /* the file, for messages */

/* Appends the ids of `text`, which must be valid UTF-8. */
vla_status vlai_tokenizer_encode(const vlai_tokenizer *tok, const char *text, size_t size, vlai_ids *out, vla_error *err);
/* The same with buffers that are kept between calls, so that encoding text after text allocates nothing in the end. Borrows
 * the tokenizer, to which nothing may be added meanwhile. Threads: one caller at a time. */
typedef struct vlai_id_encoder vlai_id_encoder;
vla_status vlai_id_encoder_create(const vlai_tokenizer *tok, vlai_id_encoder **out, vla_error *err);
void vlai_id_encoder_destroy(vlai_id_encoder *encoder); /* accepts NULL */
vla_status vlai_id_encoder_run(vlai_id_encoder *encoder, const char *text, size_t size, vlai_ids *out, vla_error *err);
/* Appends the bytes that the ids stand for; `skip_special` leaves out tokens marked special. */
vla_status vlai_tokenizer_decode(const vlai_tokenizer *tok, const int32_t *ids, size_t count, bool skip_special,
                                 vlai_text *out, vla_error *err);

/* Writes a processor folder of its own: tokenizer.json (256 bytes, the word "assistant", up to `merges` merges learned
 * from `texts`, the named tokens of Qwen2.5-VL), tokenizer_config.json and preprocessor_config.json. Deterministic. */
vla_status vlai_tokenizer_write(const char *dir, const char *const *texts, size_t count, size_t merges, vla_error *err);

VLA_END_DECLS

#endif
