#include "model/wallx_mask.h"

#include <stddef.h>

typedef struct {
    int64_t first, end; /* first == end: no such token */
} block;

static block block_of(const uint8_t *marks, int64_t length)
{
    block b = {0, 0};
    for (int64_t i = 0; marks && i < length; i++)
        if (marks[i]) {
            if (b.end == 0)
                b.first = i;
            b.end = i + 1;
        }
    return b;
}

static bool inside(block b, int64_t i)
{
    return i >= b.first && i < b.end;
}

static bool hidden(const vlai_wallx_mask_sample *s, int64_t i)
{
    return (s->padding_positions && s->padding_positions[i]) ||
           (s->valid_flow_action_positions && s->is_action[i] && !s->valid_flow_action_positions[i]);
}

/* The discrete-action block: from ar_action_mask where it is given (it then decides alone), else from
 * ar_predict_token_positions. Tokens of the flow block do not count. */
static block discrete_block(const vlai_wallx_mask_sample *s)
{
    const uint8_t *marks = s->ar_action_mask ? s->ar_action_mask : s->ar_predict_token_positions;
    block b = {0, 0};
    for (int64_t i = 0; marks && i < s->length; i++)
        if (marks[i] && !s->is_action[i]) {
            if (b.end == 0)
                b.first = i;
            b.end = i + 1;
        }
    return b;
}

void vlai_wallx_mask_pairs(bool causal_actions, const vlai_wallx_mask_sample *s, int32_t *pairs)
{
    block flow = block_of(s->is_action, s->length), discrete = discrete_block(s);
    for (int64_t j = 0; j < s->length; j++) {
        int64_t lower = s->length, upper = j;
        if (inside(flow, j) && !causal_actions)
            upper = flow.first;
        if (s->ar_action_mask && discrete.end) {
            if (inside(discrete, j) || inside(flow, j))
                upper = s->ar_visible ? discrete.first : inside(flow, j) ? flow.first : discrete.first;
            if (inside(discrete, j) && !s->ar_visible)
                lower = discrete.end;
        } else if (inside(discrete, j)) {
            lower = discrete.end;
        }
        if (hidden(s, j)) {
            lower = 0;
            upper = s->length;
        }
        pairs[2 * j] = (int32_t)lower;
        pairs[2 * j + 1] = (int32_t)upper;
    }
}

/* Column intervals of the SDPA class: [first, end) without a hole, query positions. */
static void dense_column(bool causal_actions, const vlai_wallx_mask_sample *s, block flow, block discrete, int64_t j,
                         int32_t col[4])
{
    int64_t first = j, end = s->length, hole = 0, hole_end = 0;
    if (inside(flow, j) && !causal_actions)
        first = flow.first;
    if (s->ar_action_mask && discrete.end) {
        if (s->ar_visible && inside(discrete, j)) {
            first = discrete.first;
        } else if (s->ar_visible && inside(flow, j)) {
            first = discrete.first; /* the tokens between the two blocks do not look ahead */
            hole = discrete.end;
            hole_end = flow.first;
        } else if (inside(discrete, j)) {
            first = discrete.first;
            hole = flow.first;
            hole_end = flow.end;
        } else if (inside(flow, j)) {
            first = flow.first;
        }
    } else if (inside(discrete, j)) {
        hole = flow.first;
        hole_end = flow.end;
    }
    if (hidden(s, j))
        first = end = hole = hole_end = 0;
    col[0] = (int32_t)first;
    col[1] = (int32_t)end;
    col[2] = (int32_t)hole;
    col[3] = (int32_t)hole_end;
}

void vlai_wallx_mask_dense(bool causal_actions, const vlai_wallx_mask_sample *s, uint8_t *mask)
{
    block flow = block_of(s->is_action, s->length), discrete = discrete_block(s);
    for (int64_t j = 0; j < s->length; j++) {
        int32_t col[4];
        dense_column(causal_actions, s, flow, discrete, j, col);
        for (int64_t i = 0; i < s->length; i++)
            mask[i * s->length + j] = !hidden(s, i) && i >= col[0] && i < col[1] && !(i >= col[2] && i < col[3]);
    }
}

void vlai_wallx_mask(const vlai_wallx_config *config, const vlai_wallx_mask_sample *s, int32_t *cols, int32_t *rows)
{
    bool causal = config->causal_action_attention_mask;
    bool pairs = config->attention == VLAI_WALLX_FLASH_MASK || config->attention == VLAI_WALLX_FLASH_MASK_KI;
    vlai_wallx_mask_sample plain = {.length = s->length, .is_action = s->is_action};
    if (config->attention == VLAI_WALLX_FLASH) { /* passes causal alone to its kernel */
        s = &plain;
        causal = true;
    }
    block flow = block_of(s->is_action, s->length), discrete = discrete_block(s);
    if (pairs) {
        vlai_wallx_mask_pairs(causal, s, cols); /* two numbers a column, then widened to four from the back */
        for (int64_t j = s->length; j-- > 0;) {
            int32_t lower = cols[2 * j], upper = cols[2 * j + 1];
            bool any = lower > j && upper <= j;
            cols[4 * j] = any ? upper : 0;
            cols[4 * j + 1] = any ? lower : 0;
            cols[4 * j + 2] = cols[4 * j + 3] = 0;
        }
    } else {
        for (int64_t j = 0; j < s->length; j++)
            dense_column(causal, s, flow, discrete, j, cols + 4 * j);
    }
    int64_t last_ahead = 0; /* end of the keys that an earlier query may see */
    for (int64_t j = 0; j < s->length; j++)
        if (cols[4 * j] < j && cols[4 * j + 1] > 0)
            last_ahead = j + 1;
    for (int64_t i = 0; i < s->length; i++) {
        bool off = !pairs && hidden(s, i);
        rows[2 * i] = 0;
        rows[2 * i + 1] = off ? 0 : (int32_t)(i + 1 > last_ahead ? i + 1 : last_ahead);
    }
}
