/* The training prompt of Wall-X: template, state string, placeholders, labels, and the padded batch.
 *
 *     VLA_TRY(vlai_prompt_add_tokens(tok, 0, NULL, 0, err));              // <|propri|>, <|action|>
 *     VLA_TRY(vlai_prompt_tokens_of(tok, &tokens, err));
 *     vlai_prompt_template(views, 2, "open the drawer", 10, &prompt);     // as the data set gives it
 *     vlai_state_string(state, mask, 26, 256, &words);
 *     vlai_prompt_fill fill = {.state = words.data, .image_tokens = counts, .image_count = 2};
 *     VLA_TRY(vlai_prompt_finish(prompt.data, &fill, &used, &text, err)); // what is tokenised
 *     VLA_TRY(vlai_collate(tok, &tokens, &options, rows, 4, &batch, err)); // padded, with labels
 *
 * Texts are appended to a vlai_text; check vlai_text_status once at the end. Threads: all functions are pure apart from
 * vlai_prompt_add_tokens, which changes the tokenizer. */
#ifndef VLAI_PROMPT_H
#define VLAI_PROMPT_H

#include "base/text.h"
#include "text/tokenizer.h"

VLA_BEGIN_DECLS

/* Adds <|propri|>, <|action|>, the given special tokens and <|action_token_0|> .. <|action_token_{n-1}|>, in this order. */
vla_status vlai_prompt_add_tokens(vlai_tokenizer *tok, int64_t action_tokens, const char *const *special, size_t count,
                                  vla_error *err);

typedef struct vlai_prompt_tokens {
    int32_t propri, action, image, end, end_of_text, pad; /* end = <|im_end|> */
    int32_t vision_start, vision_end;
    int32_t first_action_token; /* <|action_token_0|>; -1 without */
} vlai_prompt_tokens;

/* Errors name the token that the tokenizer lacks. */
vla_status vlai_prompt_tokens_of(const vlai_tokenizer *tok, vlai_prompt_tokens *out, vla_error *err);

/* Rewrites <point>..</point> from pixels of the camera's picture to pixels of the resized one. */
void vlai_prompt_points(const char *text, int64_t width, int64_t height, int64_t to_width, int64_t to_height,
                        vlai_text *out);

/* The prompt with one placeholder per picture, the state and the discrete actions still to be filled in. */
void vlai_prompt_template(const char *const *views, size_t count, const char *instruction, int64_t horizon,
                          vlai_text *out);

/* Bin numbers of the values whose mask is 1, joined by spaces: (number of edges k * (2 / bins) - 1 at or below x) - 1. */
void vlai_state_string(const float *state, const float *mask, int64_t n, int64_t bins, vlai_text *out);

typedef struct vlai_prompt_fill {
    const char *state;            /* replaces <|propri|>; NULL leaves it */
    bool discrete;                /* action tokens in place of the flow placeholders */
    bool open;                    /* and none yet: the text ends where they begin */
    const int32_t *action_tokens; /* numbers of <|action_token_i|> */
    size_t action_token_count;
    const int64_t *image_tokens;  /* tokens of each picture, in order */
    size_t image_count;
} vlai_prompt_fill;

/* `*used` counts the pictures consumed so far (a batch shares one list in the reference); placeholders beyond the list
 * stay single, and `*missing` counts them. */
void vlai_prompt_finish(const char *prompt, const vlai_prompt_fill *fill, size_t *used, size_t *missing, vlai_text *out);

/* Label of each of n ids: the id inside an assistant turn that ends with <|im_end|>, -100 elsewhere. *labelled is the number
 * of labels; `text` is what the ids were made from. */
vla_status vlai_prompt_labels(const vlai_tokenizer *tok, const vlai_prompt_tokens *tokens, const char *text, size_t size,
                              const int32_t *ids, size_t n, int64_t *labels, size_t *labelled, vla_error *err);

typedef struct vlai_collate_row {
    const char *text; /* zero-terminated; labels come from it */
    const int32_t *ids;
    size_t count;
    bool discrete;
    size_t action_token_count; /* rows with fewer than the longest are filled up with <|endoftext|> */
} vlai_collate_row;

typedef struct vlai_collate_options {
    bool left;          /* pads stand before the text */
    int64_t max_length; /* 0 = unlimited */
    bool truncate;      /* longer rows lose their right end, as in the reference; without it they are an error */
} vlai_collate_options;

/* (rows, width) each. */
typedef struct vlai_token_batch {
    int64_t rows, width;
    int64_t *input_ids, *attention_mask;
    int64_t *labels; /* NULL when nothing is labelled */
    uint8_t *moe_token_types; /* 1 at <|action|> */
} vlai_token_batch;

vla_status vlai_collate(const vlai_tokenizer *tok, const vlai_prompt_tokens *tokens, const vlai_collate_options *options,
                        const vlai_collate_row *rows, size_t count, vlai_token_batch *out, vla_error *err);
void vlai_token_batch_fini(vlai_token_batch *batch);

/* The error of a prompt that does not fit: names the length needed. */
vla_status vlai_prompt_too_long(size_t needed, int64_t max_length, const char *text, vla_error *err);

VLA_END_DECLS

#endif
