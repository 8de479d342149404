/* The masks of update_joint_attention_flash_mask and update_joint_attention_mask_2d, step by step in the reference's order:
 * where two of its rules meet, the later one decides. */
#include "model/wallx_mask.h"

#include <stddef.h>
#include <string.h>

typedef struct {
    int64_t first, end; /* first == end: no such token */
} block;

/* From the first to the last mark of one of two lists. */
static block block_of(const uint8_t *marks, const uint8_t *more, int64_t length)
{
    block b = {0, 0};
    for (int64_t i = 0; i < length; i++)
        if ((marks && marks[i]) || (more && more[i])) {
            if (b.end == 0)
                b.first = i;
            b.end = i + 1;
        }
    return b;
}

static bool marked(const uint8_t *marks, int64_t i)
{
    return marks && marks[i];
}

static bool invalid(const vlai_wallx_mask_sample *s, int64_t i)
{
    return s->valid_flow_action_positions && s->is_action[i] && !s->valid_flow_action_positions[i];
}

void vlai_wallx_mask_pairs(bool causal_actions, const vlai_wallx_mask_sample *s, int32_t *pairs)
{
    block flow = block_of(s->is_action, NULL, s->length), predict = block_of(s->ar_predict_token_positions, NULL, s->length);
    block ar = block_of(s->ar_action_mask, NULL, s->length), both = block_of(s->ar_action_mask, s->is_action, s->length);
    for (int64_t j = 0; j < s->length; j++) {
        int64_t lower = s->length, upper = j;
        bool in_flow = s->is_action[j], in_ar = marked(s->ar_action_mask, j);
        if (marked(s->padding_positions, j)) {
            lower = 0;
            upper = s->length;
        }
        if (marked(s->ar_predict_token_positions, j))
            lower = predict.end;
        if (!s->ar_action_mask && in_flow && !causal_actions)
            upper = flow.first;
        if (s->ar_action_mask && (in_flow || in_ar)) {
            block b = s->ar_visible ? both : in_ar ? ar : flow;
            upper = b.first;
            lower = b.end;
        }
        if (invalid(s, j)) {
            lower = 0;
            upper = s->length;
        }
        pairs[2 * j] = (int32_t)lower;
        pairs[2 * j + 1] = (int32_t)upper;
    }
}

/* Does query i see key j under the SDPA class's mask? */
static bool sees(bool causal_actions, const vlai_wallx_mask_sample *s, int64_t i, int64_t j)
{
    bool flow_i = s->is_action[i], flow_j = s->is_action[j], ar_i = marked(s->ar_action_mask, i), ar_j = marked(s->ar_action_mask, j);
    bool visible = j <= i && !marked(s->padding_positions, i) && !marked(s->padding_positions, j);
    if (flow_i && flow_j && !causal_actions)
        visible = true;
    if (flow_i && marked(s->ar_predict_token_positions, j))
        visible = false;
    if (invalid(s, i) || invalid(s, j))
        visible = false;
    if (s->ar_action_mask && (flow_i || ar_i) && (flow_j || ar_j))
        visible = s->ar_visible || (flow_i && flow_j) || (ar_i && ar_j);
    return visible;
}

void vlai_wallx_mask_dense(bool causal_actions, const vlai_wallx_mask_sample *s, uint8_t *mask)
{
    for (int64_t i = 0; i < s->length; i++)
        for (int64_t j = 0; j < s->length; j++)
            mask[i * s->length + j] = sees(causal_actions, s, i, j);
}

/* Column intervals of the pairs: the queries before key j from the upper number on, and those from j to the lower number. Two
 * numbers a column, widened to four from the back. */
static void pair_columns(bool causal, const vlai_wallx_mask_sample *s, int32_t *cols)
{
    vlai_wallx_mask_pairs(causal, s, cols);
    for (int64_t j = s->length; j-- > 0;) {
        int64_t lower = cols[2 * j], upper = cols[2 * j + 1], first = upper < j ? upper : j, end = lower > j ? lower : j;
        cols[4 * j] = first < end ? (int32_t)first : 0;
        cols[4 * j + 1] = first < end ? (int32_t)end : 0;
        cols[4 * j + 2] = cols[4 * j + 3] = 0;
    }
}

/* The queries that see key j as one interval with at most one hole; queries that see nothing may count either way.
 * False when it takes more. */
static bool dense_column(bool causal, const vlai_wallx_mask_sample *s, const int32_t *rows, int64_t j, int32_t col[4])
{
    int64_t first = -1, end = 0, hole = -1, hole_end = 0, last_hidden = -1;
    for (int64_t i = 0; i < s->length; i++) {
        if (rows[2 * i + 1] == 0)
            continue;
        if (!sees(causal, s, i, j)) {
            last_hidden = i;
            if (first >= 0 && hole < 0)
                hole = i;
            continue;
        }
        if (first < 0) {
            first = i;
        } else if (hole >= 0 && hole_end == 0) {
            hole_end = last_hidden + 1;
        } else if (hole_end > 0 && last_hidden >= hole_end) {
            return false;
        }
        end = i + 1;
    }
    bool cut = hole >= 0 && hole_end > 0; /* otherwise what follows the interval */
    col[0] = first < 0 ? 0 : (int32_t)first;
    col[1] = (int32_t)end;
    col[2] = cut ? (int32_t)hole : 0;
    col[3] = cut ? (int32_t)hole_end : 0;
    return true;
}

bool vlai_wallx_mask(const vlai_wallx_config *config, const vlai_wallx_mask_sample *s, int32_t *cols, int32_t *rows)
{
    bool causal = config->causal_action_attention_mask, fits = true;
    bool pairs = config->attention == VLAI_WALLX_FLASH_MASK || config->attention == VLAI_WALLX_FLASH_MASK_KI;
    vlai_wallx_mask_sample plain = {.length = s->length, .is_action = s->is_action};
    if (config->attention == VLAI_WALLX_FLASH) { /* passes causal alone to its kernel */
        s = &plain;
        causal = true;
    }
    bool marks = s->padding_positions || s->valid_flow_action_positions || s->ar_predict_token_positions || s->ar_action_mask;
    for (int64_t i = 0; i < s->length; i++) { /* rows: 1 for now where a query sees anything */
        bool any = pairs || !marks;
        for (int64_t j = 0; j < s->length && !any; j++)
            any = sees(causal, s, i, j);
        rows[2 * i] = 0;
        rows[2 * i + 1] = any;
    }
    /* Without marks both classes say the same, as long as the actions are one block. */
    block flow = block_of(s->is_action, NULL, s->length);
    bool one = true;
    for (int64_t i = flow.first; i < flow.end; i++)
        one = one && s->is_action[i];
    if (pairs || (!marks && (causal || one)))
        pair_columns(causal, s, cols);
    else
        for (int64_t j = 0; j < s->length; j++)
            fits = dense_column(causal, s, rows, j, cols + 4 * j) && fits;
    int64_t last_ahead = 0; /* end of the keys that an earlier query may see */
    for (int64_t j = 0; j < s->length; j++)
        if (cols[4 * j] < j && cols[4 * j + 1] > 0)
            last_ahead = j + 1;
    for (int64_t i = 0; i < s->length; i++)
        if (rows[2 * i + 1])
            rows[2 * i + 1] = (int32_t)(i + 1 > last_ahead ? i + 1 : last_ahead);
    return fits;
}

void vlai_wallx_shift_positions(const uint8_t *is_action, const uint8_t *discrete, int64_t length, int32_t *pos, int64_t stride)
{
    block flow = block_of(is_action, NULL, length), predict = block_of(discrete, NULL, length);
    if (!predict.end)
        return;
    int64_t first = flow.end ? flow.first : length - 1; /* index -1 of the reference's list is its last token */
    for (int axis = 0; axis < 3; axis++) {
        int32_t shift = pos[axis * stride + first] - pos[axis * stride + predict.first];
        for (int64_t i = first; i < length; i++)
            pos[axis * stride + i] -= shift;
    }
}
