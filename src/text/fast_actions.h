/* Action chunks as discrete tokens, as the public FAST processor makes them: a DCT over time, rounded, as a string of
 * characters, merged by BPE. Facts: huggingface.co/physical-intelligence/fast, processing_action_tokenizer.py.
 *
 *     vlai_fast *fast;
 *     VLA_TRY(vlai_fast_open("fast", &fast, err));   // processor_config.json and tokenizer.json (or bpe_tokenizer/tokenizer.json)
 *     VLA_TRY(vlai_fast_encode(fast, chunk, mask, 10, 26, &ids, err)); // i of <|action_token_i|>
 *     VLA_TRY(vlai_fast_decode(fast, ids.data, ids.count, 10, 7, out, &whole, err));
 *     vlai_fast_close(fast);
 *
 * Coefficients are sums in double, narrowed to float32 and scaled there; the reference's sums are float32 too, so that one which
 * lies on a half but for their rounding may be rounded the other way. Threads: everything but open and close may be called from any thread. */
#ifndef VLAI_FAST_ACTIONS_H
#define VLAI_FAST_ACTIONS_H

#include "base/json.h"
#include "text/tokenizer.h"

VLA_BEGIN_DECLS

typedef struct vlai_fast vlai_fast;

/* Errors name the file and what in it is missing, unreadable or of another kind. */
vla_status vlai_fast_open(const char *dir, vlai_fast **out, vla_error *err);
vla_status vlai_fast_open_files(const char *config, const char *tokenizer, vlai_fast **out, vla_error *err);
/* Where the two files of a folder are. */
vla_status vlai_fast_find(const char *dir, char config[4096], char tokenizer[4096], vla_error *err);
void vlai_fast_close(vlai_fast *fast); /* accepts NULL */

int64_t vlai_fast_vocabulary(const vlai_fast *fast); /* how many <|action_token_i|> there are */
/* What ids depend on, for a contract: vocab_size, scale, min_token and a digest of the tokenizer. NULL: out of memory. */
json_t *vlai_fast_to_json(const vlai_fast *fast);

/* Appends the ids of a normalised chunk (horizon, width): its columns whose entry of `mask` (width) is not 0. */
vla_status vlai_fast_encode(const vlai_fast *fast, const float *chunk, const float *mask, int64_t horizon, int64_t width, vlai_ids *out,
                            vla_error *err);
/* The chunk (horizon, dims) that the ids stand for, still normalised. *whole is false, and the chunk zeros, where they stand for
 * another number of values or for no text at all: a model may write anything. */
vla_status vlai_fast_decode(const vlai_fast *fast, const int32_t *ids, size_t count, int64_t horizon, int64_t dims, float *chunk, bool *whole,
                            vla_error *err);

VLA_END_DECLS

#endif
