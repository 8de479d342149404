/* Attention masks of Wall-X as column intervals (vla_attention): which queries see a key.
 *
 * Two readings of the reference's positional masks exist, one per attention class; they agree for everything that its
 * public loader makes (wall_x/model/core/attention/mask.py). Positions here are inside one sample. */
#ifndef VLAI_WALLX_MASK_H
#define VLAI_WALLX_MASK_H

#include "model/wallx_config.h"

/* One sample: `length` tokens, is_action marks <|action|>. Masks are [length] or NULL. */
typedef struct vlai_wallx_mask_sample {
    int64_t length;
    const uint8_t *is_action;
    const uint8_t *padding_positions, *valid_flow_action_positions, *ar_predict_token_positions, *ar_action_mask;
    bool ar_visible; /* of ar_action_mask: discrete and flow actions see each other; the reference's default is true */
} vlai_wallx_mask_sample;

/* Writes cols [length,4] (first, end, hole first, hole end: query positions), and rows [length,2] (first, end of the keys
 * that a query may see; empty for a query that sees nothing). False when the marks hide a key from queries in a way that one
 * interval with one hole cannot say, as marks with gaps may under the SDPA class. */
bool vlai_wallx_mask(const vlai_wallx_config *config, const vlai_wallx_mask_sample *sample, int32_t *cols, int32_t *rows);

/* The FlashMask encoding itself, [length,2] per key: first hidden row of the lower triangle, first visible row of the
 * upper one (golden cases of component "attention-mask"). */
void vlai_wallx_mask_pairs(bool causal_actions, const vlai_wallx_mask_sample *sample, int32_t *pairs);
/* The boolean mask of the SDPA class, [length,length], 1 = visible. */
void vlai_wallx_mask_dense(bool causal_actions, const vlai_wallx_mask_sample *sample, uint8_t *mask);

/* With a discrete-action block, everything from the flow block of a sample on is moved so that the flow block starts at that
 * block's position; without a flow block the last token takes its place, as there. pos: axis k at pos + k*stride, `length`
 * entries. */
void vlai_wallx_shift_positions(const uint8_t *is_action, const uint8_t *discrete, int64_t length, int32_t *pos,
                                int64_t stride);

#endif
