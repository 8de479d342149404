/* One training sample: raw state, action chunk, pictures and task text become what a batch is made of.
 *
 *     vlai_sampler *sampler;                                               // one per worker thread
 *     VLA_TRY(vlai_sampler_create(&contract, tok, &sampler, err));
 *     vlai_sample_input in = {.state = s, .state_dims = 8, .action = a, .action_dims = 7, .pictures = p, .task = text};
 *     vlai_sample sample = {0};                                            // reused from call to call
 *     VLA_TRY(vlai_sampler_prepare(sampler, &in, &sample, err));
 *     vlai_sample_fini(&sample);
 *     vlai_sampler_destroy(sampler);
 *
 * Ownership: the sampler borrows contract and tokenizer; a sample owns its buffers, which grow to their high-water mark.
 * Threads: a sampler and a sample belong to one thread at a time. */
#ifndef VLAI_SAMPLE_H
#define VLAI_SAMPLE_H

#include "data/contract.h"
#include "text/prompt.h"

VLA_BEGIN_DECLS

enum { VLAI_MAX_CAMERAS = 16 };

typedef struct vlai_sample_input {
    const float *state;      /* (state_dims) as in the data set */
    int64_t state_dims;
    const float *action;     /* (contract horizon, action_dims); NULL for a prediction, whose text ends where action tokens begin */
    int64_t action_dims;
    const uint8_t *action_is_pad; /* (contract horizon), 1 = repeated past the episode's end: carries no loss. NULL = none */
    const vla_picture *pictures; /* in the order of the contract's cameras */
    const uint8_t *const *resized; /* per camera: the picture at its final size, or NULL to resize it; NULL = none. The
                                      entry of `pictures` then gives the original size only */
    const char *task;
    const int32_t *action_tokens; /* discrete actions; NULL: written by the contract's FAST processor */
    size_t action_token_count;
    int64_t row, episode, frame; /* copied to the sample; named in errors */
} vlai_sample_input;

typedef struct vlai_sample_picture {
    size_t camera; /* of the contract */
    size_t offset; /* of its bytes in pixels */
    int64_t width, height;
    int64_t grid[3];
} vlai_sample_picture;

typedef struct vlai_sample {
    float *state, *state_mask; /* (state_width) normalised, padded with 0 */
    float *action, *dof_mask;  /* (horizon, action_width); zeros for a prediction */
    float *loss_mask;          /* (horizon) 0 where action_is_pad is 1; the model does not see it, unlike dof_mask */
    int64_t state_width, action_width, horizon;
    uint8_t *pixels;           /* resized pictures (H, W, 3) one after the other */
    size_t pixel_bytes;
    vlai_sample_picture pictures[VLAI_MAX_CAMERAS];
    size_t picture_count;
    int64_t patches;           /* of all pictures */
    vlai_text prompt, text;    /* as the data set gives it; as it is tokenised */
    vlai_ids ids;              /* without pads */
    bool discrete;
    vlai_ids action_tokens;    /* numbers of <|action_token_i|>, where the sampler wrote them */
    size_t action_token_count;
    int64_t *labels;           /* of ids, -100 = none; of discrete samples alone */
    size_t labelled;           /* how many there are */
    int64_t row, episode, frame;
    size_t number_capacity, pixel_capacity, label_capacity;
} vlai_sample;

typedef struct vlai_sampler vlai_sampler;

vla_status vlai_sampler_create(const vlai_contract *contract, const vlai_tokenizer *tok, vlai_sampler **out,
                               vla_error *err);
void vlai_sampler_destroy(vlai_sampler *sampler);
const vlai_prompt_tokens *vlai_sampler_tokens(const vlai_sampler *sampler);
/* Picture p of a sample becomes that of camera order[p]; the prompt's names keep the contract's order. */
void vlai_sampler_order(vlai_sampler *sampler, const size_t *order);

vla_status vlai_sampler_prepare(vlai_sampler *sampler, const vlai_sample_input *in, vlai_sample *out, vla_error *err);
void vlai_sample_fini(vlai_sample *sample);

/* The padded layout of several samples, as the reference collates them. */
vla_status vlai_sampler_collate(const vlai_sampler *sampler, const vlai_sample *const *samples, size_t count,
                                vlai_token_batch *out, vla_error *err);

/* The final size and grid of a picture of the camera; no pixels are touched. */
vla_status vlai_contract_picture(const vlai_contract *c, size_t camera, int64_t width, int64_t height,
                                 vlai_image_size *size, int64_t grid[3], vla_error *err);

VLA_END_DECLS

#endif
