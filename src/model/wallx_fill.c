/* From a micro-batch to the inputs of the Wall-X graph: shapes, positions, routing, mask columns, windows. All of it is
 * integer work on the host; nothing here depends on parameters. */
#include "base/fail.h"
#include "base/memory.h"
#include "model/wallx.h"
#include "model/wallx_mask.h"

#include <math.h>
#include <string.h>

void *vlai_wallx_find_in_run(void *run, const char *name)
{
    return vla_run_data(run, name);
}

static int64_t round_rows(int64_t rows, bool bucket)
{
    int64_t step = 1;
    while (bucket && step * 2 <= rows / 64)
        step *= 2;
    return (rows + step - 1) / step * step;
}

/* Labels are few and their number differs from batch to batch: coarser steps keep the number of plans down. */
static int64_t round_labels(int64_t labels, bool bucket)
{
    int64_t step = 1;
    while (bucket && step * 2 <= labels / 8)
        step *= 2;
    return (labels + step - 1) / step * step;
}

static int64_t pairs_of(int64_t samples, int64_t tokens)
{
    int64_t s = samples ? tokens / samples : 0;
    return samples * s * (s + 1) / 2;
}

static void picture_sizes(const vlai_wallx_config *c, int64_t images, const int32_t *grid, vlai_wallx_shape *s)
{
    int64_t merge = c->vision.spatial_merge_size, edge = c->vision.window_size / merge / c->vision.patch_size;
    for (int64_t i = 0; i < images; i++) {
        int64_t t = grid[3 * i], gh = grid[3 * i + 1] / merge, gw = grid[3 * i + 2] / merge;
        int64_t patches = grid[3 * i + 1] * (int64_t)grid[3 * i + 2];
        s->images += t;
        s->patches += t * patches;
        s->units += t * gh * gw;
        s->pairs_full += t * patches * patches;
        s->longest_picture = patches > s->longest_picture ? patches : s->longest_picture;
        for (int64_t y = 0; y < gh; y += edge)
            for (int64_t x = 0; x < gw; x += edge) {
                int64_t h = gh - y < edge ? gh - y : edge, w = gw - x < edge ? gw - x : edge;
                int64_t size = h * w * merge * merge;
                s->pairs_window += t * size * size;
                s->windows += t;
                s->longest_window = size > s->longest_window ? size : s->longest_window;
            }
    }
}

static vla_status check_grids(const vlai_wallx_config *c, const vlai_wallx_batch *b, vla_error *err)
{
    for (int64_t i = 0; i < b->images; i++) {
        const int32_t *g = b->grid + 3 * i;
        int64_t merge = c->vision.spatial_merge_size;
        if (g[0] <= 0 || g[1] <= 0 || g[2] <= 0 || g[1] % merge || g[2] % merge || g[0] > 4096 || g[1] > 4096 || g[2] > 4096)
            return vlai_fail(err, VLA_E_SHAPE, "picture %lld: grid %d x %d x %d, wanted frames x multiples of %lld, 1 to 4096 each",
                             (long long)i, g[0], g[1], g[2], (long long)merge);
        if (b->pixels && g[0] != 1)
            return vlai_fail(err, VLA_E_SHAPE, "picture %lld: %d frames of pixels, wanted 1", (long long)i, g[0]);
    }
    return VLA_OK;
}

/* Do the mask columns (model/wallx_mask.h) say that every query sees the keys of its sample up to its own? True for all
 * that the reference's public loader makes, when actions are causal. */
static bool is_causal(const vlai_wallx_config *c, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *b)
{
    const uint8_t *pads = b->padding_positions, *valid = b->valid_flow_action_positions;
    const uint8_t *predict = b->ar_predict_token_positions, *ar = b->ar_action_mask;
    if (c->attention == VLAI_WALLX_FLASH)
        return true;
    for (int64_t i = 0; i < b->offset[b->samples]; i++) {
        bool action = b->ids[i] == tokens->action;
        if ((pads && pads[i]) || (predict && predict[i]) || (ar && (ar[i] || action)) ||
            (action && (!c->causal_action_attention_mask || (valid && !valid[i]))))
            return false;
    }
    return true;
}

/* The reference divides by the sum of the weights only where one of them is zero, and by their number where none is
 * (valid_mask.all() in compute_loss of vla_mixin.py). For masks of 0 and 1 that is the same. */
static double flow_scale(const vlai_wallx_config *c, const vlai_wallx_batch *b)
{
    int64_t d = c->action_dim, n = b->samples * b->horizon * d;
    double sum = 0;
    for (int64_t i = 0; b->dof_mask && i < n; i++) {
        float weight = b->dof_mask[i] * (b->flow_loss_mask ? b->flow_loss_mask[i / d] : 1.0f);
        if (weight == 0)
            return 1;
        sum += (double)weight;
    }
    return b->dof_mask && n > 0 ? sum / (double)n : 1;
}

vla_status vlai_wallx_shape_of(const vlai_wallx_config *c, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *b,
                               bool bucket, vlai_wallx_shape *out, vla_error *err)
{
    *out = (vlai_wallx_shape){.samples = b->samples, .horizon = b->horizon, .labels = b->labels ? 0 : -1};
    VLA_TRY(check_grids(c, b, err));
    picture_sizes(c, b->images, b->grid, out);
    int64_t zero = 0, placeholders = 0;
    for (int64_t s = 0; s < b->samples; s++) {
        int64_t actions = 0;
        for (int64_t i = b->offset[s]; i < b->offset[s + 1]; i++) {
            int32_t id = b->ids[i];
            if (id < 0 || id >= c->vocab_size)
                return vlai_fail_hint(err, VLA_E_INVALID, "the weights have fewer rows than the tokenizer has tokens: use the model's own processor",
                                      "sample %lld: token id %d, the embedding has %lld rows", (long long)s, id, (long long)c->vocab_size);
            actions += id == tokens->action;
            zero += id != tokens->action;
            placeholders += id == c->image_token_id;
            out->propri += id == tokens->propri;
            if (b->labels && i > b->offset[s] && b->labels[i] >= 0) {
                if (b->labels[i] >= c->vocab_size)
                    return vlai_fail(err, VLA_E_INVALID, "sample %lld: label %d, the embedding has %lld rows", (long long)s,
                                     b->labels[i], (long long)c->vocab_size);
                out->labels++;
                out->action_labels += b->ids[i - 1] == tokens->action;
            }
        }
        if (actions && actions != b->horizon)
            return vlai_fail(err, VLA_E_SHAPE, "sample %lld: %lld <|action|> tokens, wanted the action horizon %lld",
                             (long long)s, (long long)actions, (long long)b->horizon);
        out->tokens1 += actions;
        int64_t length = b->offset[s + 1] - b->offset[s];
        out->longest = length > out->longest ? length : out->longest;
    }
    if (out->tokens1 && out->tokens1 != b->samples * b->horizon)
        return vlai_fail(err, VLA_E_SHAPE, "%lld action tokens in %lld samples, wanted %lld in each", (long long)out->tokens1,
                         (long long)b->samples, (long long)b->horizon);
    if (placeholders != out->units)
        return vlai_fail(err, VLA_E_SHAPE, "%lld picture placeholders, but the %lld pictures have %lld merged tokens",
                         (long long)placeholders, (long long)b->images, (long long)out->units);
    if (!c->use_state_string_representation && b->state)
        out->state_rows = b->samples;
    if (out->propri && out->propri != b->samples)
        return vlai_fail(err, VLA_E_SHAPE, "%lld <|propri|> tokens in %lld samples, wanted one in each", (long long)out->propri, (long long)b->samples);
    if (out->propri && !out->state_rows)
        return vlai_fail(err, VLA_E_INVALID, "the prompt has <|propri|> but %s", b->state ? "the model takes the state as text" : "no state is given");
    out->tokens0 = round_rows(zero, bucket);
    if (out->labels > 0)
        out->labels = round_labels(out->labels, bucket);
    if (b->pixels) {
        out->pixel_bytes = out->patches * 3 * c->vision.patch_size * c->vision.patch_size;
        memcpy(out->mean, b->mean, sizeof out->mean);
        memcpy(out->std, b->std, sizeof out->std);
    }
    out->flow_scale = flow_scale(c, b);
    out->pairs = pairs_of(b->samples, out->tokens0 + out->tokens1);
    out->causal = is_causal(c, tokens, b);
    out->longest = bucket ? (out->longest + 127) / 128 * 128 : out->longest;
    return VLA_OK;
}

vla_status vlai_wallx_shape_plan(const vlai_wallx_config *c, int64_t samples, int64_t text_tokens, int64_t horizon,
                                 int64_t images, const int32_t *grid, vlai_wallx_shape *out, vla_error *err)
{
    *out = (vlai_wallx_shape){.samples = samples, .horizon = horizon, .labels = -1, .flow_scale = 1};
    vlai_wallx_batch one = {.images = images, .grid = grid};
    VLA_TRY(check_grids(c, &one, err));
    picture_sizes(c, images, grid, out);
    out->tokens0 = samples * (text_tokens + out->units);
    out->tokens1 = samples * horizon;
    out->images *= samples;
    out->patches *= samples;
    out->units *= samples;
    out->pairs_full *= samples;
    out->pairs_window *= samples;
    out->windows *= samples;
    out->causal = c->attention == VLAI_WALLX_FLASH || c->causal_action_attention_mask;
    out->longest = text_tokens + out->units / samples + horizon;
    out->state_rows = c->use_state_string_representation ? 0 : samples;
    out->pixel_bytes = out->patches * 3 * c->vision.patch_size * c->vision.patch_size;
    for (int i = 0; i < 3; i++)
        out->std[i] = 1;
    out->pairs = pairs_of(samples, out->tokens0 + out->tokens1);
    return VLA_OK;
}

/* ---- Vision tables ------------------------------------------------------------------------------------------- */

typedef struct {
    vlai_wallx_find find;
    void *user;
} target;

static void *at(const target *t, const char *name)
{
    return t->find(t->user, name);
}

/* Every key of [first, end) sees and is seen by every query of it. */
static void segment(int32_t *rows, int32_t *cols, int64_t first, int64_t end)
{
    for (int64_t i = first; i < end; i++) {
        if (rows) {
            rows[2 * i] = (int32_t)first;
            rows[2 * i + 1] = (int32_t)end;
        }
        if (cols) {
            cols[4 * i] = (int32_t)first;
            cols[4 * i + 1] = (int32_t)end;
            cols[4 * i + 2] = cols[4 * i + 3] = 0;
        }
    }
}

static void fill_vision(const vlai_wallx_config *c, const vlai_wallx_shape *shape, const vlai_wallx_batch *b, const target *t)
{
    int64_t merge = c->vision.spatial_merge_size, group = merge * merge, p = c->vision.patch_size;
    int64_t edge = c->vision.window_size / merge / p, P = shape->patches;
    int32_t *pos = at(t, "vision.pos"), *window = at(t, "vision.window"), *unwindow = at(t, "vision.unwindow");
    int32_t *qpos = at(t, "vision.qpos"), *patches = at(t, "patches");
    int32_t *window_rows = at(t, "vision.rows.window"), *window_cols = at(t, "vision.cols.window");
    int32_t *full_rows = at(t, "vision.rows.full"), *full_cols = at(t, "vision.cols.full");
    int32_t *windows = at(t, "vision.segments.window"), *pictures = at(t, "vision.segments.full");
    uint8_t *pixels = at(t, "pixels");
    int64_t unit = 0, first_unit = 0, pixel = 0, n_windows = 0;
    for (int64_t i = 0; i < P && qpos; i++)
        qpos[i] = (int32_t)i;
    for (int64_t n = 0, image = 0, frame = 0; image < b->images; n++) {
        int64_t h = b->grid[3 * image + 1], w = b->grid[3 * image + 2], gh = h / merge, gw = w / merge;
        segment(full_rows, full_cols, first_unit * group, (first_unit + gh * gw) * group);
        if (pictures) {
            pictures[n] = (int32_t)(first_unit * group);
            pictures[n + 1] = (int32_t)((first_unit + gh * gw) * group);
        }
        for (int64_t y0 = 0; y0 < gh; y0 += edge)
            for (int64_t x0 = 0; x0 < gw; x0 += edge) {
                int64_t start = unit;
                for (int64_t y = y0; y < gh && y < y0 + edge; y++)
                    for (int64_t x = x0; x < gw && x < x0 + edge; x++, unit++) {
                        int64_t source = first_unit + y * gw + x;
                        if (window)
                            window[unit] = (int32_t)source;
                        if (unwindow)
                            unwindow[source] = (int32_t)unit;
                        for (int64_t k = 0; pos && k < group; k++) {
                            pos[unit * group + k] = (int32_t)(y * merge + k / merge);
                            pos[P + unit * group + k] = (int32_t)(x * merge + k % merge);
                        }
                    }
                segment(window_rows, window_cols, start * group, unit * group);
                if (windows) {
                    windows[n_windows++] = (int32_t)(start * group);
                    windows[n_windows] = (int32_t)(unit * group);
                }
            }
        if (pixels && b->pixels) {
            int64_t stride = w * p * 3;
            memcpy(pixels + pixel, b->pixels[image], (size_t)(h * p * stride));
            for (int64_t k = 0; patches && k < h * w; k++) { /* merge-block order */
                int64_t block = k / group, in = k % group;
                int64_t y = block / gw * merge + in / merge, x = block % gw * merge + in % merge;
                int32_t *row = patches + 3 * (first_unit * group + k);
                row[0] = (int32_t)(pixel + y * p * stride + x * p * 3);
                row[1] = (int32_t)stride;
                row[2] = 0;
            }
            pixel += h * p * stride;
        }
        first_unit += gh * gw;
        if (++frame == b->grid[3 * image]) {
            frame = 0;
            image++;
        }
    }
    float *values = at(t, "pixel_values");
    if (values && b->pixel_values)
        memcpy(values, b->pixel_values,
               (size_t)(P * c->vision.in_channels * c->vision.temporal_patch_size * p * p) * sizeof *values);
}

/* ---- Token tables --------------------------------------------------------------------------------------------- */

void vlai_wallx_positions(const vlai_wallx_config *c, const vlai_wallx_batch *b, int64_t first, int64_t end,
                          int64_t *image, int32_t *pos, int64_t n)
{
    int64_t next = 0, left = 0, start = 0, gw = 1, area = 1, done = 0, advance = 0;
    for (int64_t i = first; i < end; i++) {
        if (b->real && !b->real[i]) {
            pos[i] = pos[n + i] = pos[2 * n + i] = 1;
            continue;
        }
        if (b->ids[i] == c->image_token_id) {
            if (left == 0) {
                const int32_t *g = b->grid + 3 * (*image)++;
                int64_t gh = g[1] / c->vision.spatial_merge_size;
                gw = g[2] / c->vision.spatial_merge_size;
                area = gh * gw;
                left = g[0] * area;
                done = 0;
                start = next;
                advance = gh > gw ? gh : gw;
            }
            pos[i] = (int32_t)start;
            pos[n + i] = (int32_t)(start + done % area / gw); /* frames of one picture share their positions */
            pos[2 * n + i] = (int32_t)(start + done % gw);
            done++;
            if (--left == 0)
                next = start + advance;
            continue;
        }
        pos[i] = pos[n + i] = pos[2 * n + i] = (int32_t)next++;
    }
}

static const uint8_t *part(const uint8_t *mask, int64_t first)
{
    return mask ? mask + first : NULL;
}

static vla_status fill_tokens(const vlai_wallx_config *c, const vlai_wallx_tokens *tokens, const vlai_wallx_shape *shape,
                              const vlai_wallx_batch *b, const target *t, vla_error *err)
{
    int64_t total = b->offset[b->samples], n = shape->tokens0 + shape->tokens1;
    int32_t *ids = at(t, "ids"), *map = at(t, "map"), *at0 = at(t, "at0"), *at1 = at(t, "at1");
    int32_t *qpos = at(t, "qpos"), *rows = at(t, "rows"), *cols = at(t, "cols"), *positions = at(t, "positions");
    int32_t *image_at = at(t, "image_at"), *propri_at = at(t, "propri_at");
    int32_t *label_rows = at(t, "label_rows"), *label_ids = at(t, "label_ids"), *segments = at(t, "segments");
    int32_t *qpos_of[2] = {at(t, "qpos0"), at(t, "qpos1")}, *rows_of[2] = {at(t, "rows0"), at(t, "rows1")};
    int64_t count[2] = {0, 0}, image_rows = 0, propri_rows = 0, labels = 0, image = 0;
    vlai_wallx_scratch own = {0}, *memory = b->scratch ? b->scratch : &own;
    size_t wanted = ((size_t)n * 9 + 9) * sizeof(int32_t) + (size_t)total + 1;
    if (memory->capacity < wanted) {
        vlai_free(memory->data);
        memory->capacity = 0;
        memory->data = vlai_alloc(wanted + wanted / 4); /* lengths vary from batch to batch */
        if (!memory->data)
            return vlai_nomem(err, wanted + wanted / 4);
        memory->capacity = wanted + wanted / 4;
    }
    int32_t *scratch = memory->data;
    uint8_t *is_action = (uint8_t *)(scratch + n * 9 + 9);
    memset(is_action, 0, (size_t)total + 1);
    int32_t *my_cols = scratch, *my_rows = scratch + 4 * n, *my_pos = scratch + 6 * n;
    memset(scratch, 0, (size_t)n * 9 * sizeof *scratch);
    for (int64_t s = 0; s < b->samples; s++) {
        int64_t first = b->offset[s], end = b->offset[s + 1];
        if (segments) {
            segments[s] = (int32_t)first;
            segments[s + 1] = (int32_t)end;
        }
        for (int64_t i = first; i < end; i++)
            is_action[i] = b->ids[i] == tokens->action;
        vlai_wallx_positions(c, b, first, end, &image, my_pos, n);
        if (b->ar_predict_token_positions && c->attention != VLAI_WALLX_FLASH)
            vlai_wallx_shift_positions(is_action + first, b->ar_predict_token_positions + first, end - first, my_pos + first, n);
        vlai_wallx_mask_sample sample = {end - first, is_action + first, part(b->padding_positions, first),
                                         part(b->valid_flow_action_positions, first),
                                         part(b->ar_predict_token_positions, first), part(b->ar_action_mask, first), b->ar_visible};
        if (!vlai_wallx_mask(c, &sample, my_cols + 4 * first, my_rows + 2 * first)) {
            vlai_free(own.data);
            return vlai_fail(err, VLA_E_UNSUPPORTED, "sample %lld: the positional masks hide a key from queries in more than two stretches",
                             (long long)s);
        }
        for (int64_t i = first; i < end; i++) {
            bool none = my_cols[4 * i] == my_cols[4 * i + 1];
            for (int k = 0; k < 4; k++)
                my_cols[4 * i + k] += none ? 0 : (int32_t)first;
            my_rows[2 * i] += (int32_t)first;
            my_rows[2 * i + 1] += (int32_t)first;
            int e = is_action[i];
            int64_t row = count[e]++;
            if (map)
                map[i] = e ? (int32_t)(-1 - row) : (int32_t)row;
            if (e ? at1 != NULL : at0 != NULL)
                (e ? at1 : at0)[row] = (int32_t)i;
            if (qpos_of[e]) {
                qpos_of[e][row] = (int32_t)i;
                memcpy(rows_of[e] + 2 * row, my_rows + 2 * i, 2 * sizeof(int32_t));
            }
            /* The row predicts the next token of its sample. Rows of stream 1 stand behind those of stream 0. */
            if (label_rows && b->labels && i + 1 < end && b->labels[i + 1] >= 0) {
                label_rows[labels] = (int32_t)(e ? shape->tokens0 + row : row);
                if (label_ids) /* of a loss */
                    label_ids[labels] = b->labels[i + 1];
                labels++;
            }
            if (e)
                continue;
            /* Rows that a picture or a state is written over need no embedding, and give it no gradient. */
            bool over = (image_at && b->ids[i] == c->image_token_id) || (propri_at && b->ids[i] == tokens->propri);
            if (ids)
                ids[row] = over ? -1 : b->ids[i];
            if (image_at && b->ids[i] == c->image_token_id)
                image_at[image_rows++] = (int32_t)row;
            if (propri_at && b->ids[i] == tokens->propri)
                propri_at[propri_rows++] = (int32_t)row;
        }
    }
    /* The tail of stream 0: no token, no key, no loss. */
    for (int64_t i = total; i < n; i++) {
        int64_t row = count[0]++;
        if (ids)
            ids[row] = -1;
        if (map)
            map[i] = (int32_t)row;
        if (at0)
            at0[row] = (int32_t)i;
        if (qpos_of[0]) {
            qpos_of[0][row] = (int32_t)i;
            rows_of[0][2 * row] = rows_of[0][2 * row + 1] = 0;
        }
    }
    for (; label_rows && labels < shape->labels; labels++) {
        label_rows[labels] = -1;
        if (label_ids)
            label_ids[labels] = -1;
    }
    for (int64_t i = 0; qpos && i < n; i++)
        qpos[i] = (int32_t)i;
    if (rows)
        memcpy(rows, my_rows, (size_t)n * 2 * sizeof *rows);
    if (cols)
        memcpy(cols, my_cols, (size_t)n * 4 * sizeof *cols);
    if (positions)
        memcpy(positions, my_pos, (size_t)n * 3 * sizeof *positions);
    vlai_free(own.data);
    return VLA_OK;
}

/* ---- Action tensors ------------------------------------------------------------------------------------------- */

static void copy(const target *t, const char *name, const float *source, int64_t n)
{
    float *to = at(t, name);
    if (to && source)
        memcpy(to, source, (size_t)n * sizeof *to);
}

static void fill_actions(const vlai_wallx_config *c, const vlai_wallx_shape *shape, const vlai_wallx_batch *b, const target *t)
{
    int64_t d = c->action_dim, rows = shape->samples * shape->horizon;
    copy(t, "action", b->action, rows * d);
    copy(t, "dof_mask", b->dof_mask, rows * d);
    copy(t, "noise", b->noise, rows * d);
    copy(t, "t", b->time, shape->samples);
    float *t_rows = at(t, "t_rows"), *rest = at(t, "one_minus_t"), *inverse = at(t, "x_inverse"), *mask = at(t, "loss_mask");
    int32_t *sample = at(t, "sample_of_row");
    for (int64_t r = 0; r < rows; r++) {
        float time = b->time ? b->time[r / shape->horizon] : 0.0f;
        if (t_rows)
            t_rows[r] = time;
        if (rest)
            rest[r] = 1.0f - time;
        if (inverse)
            inverse[r] = 1.0f / fmaxf(1.0f - time, 0.05f);
        if (sample)
            sample[r] = (int32_t)(r / shape->horizon);
        for (int64_t k = 0; mask && k < d; k++)
            mask[r * d + k] = b->dof_mask[r * d + k] * (b->flow_loss_mask ? b->flow_loss_mask[r] : 1.0f);
    }
    float *state = at(t, "state");
    for (int64_t s = 0; state && b->state && s < shape->state_rows; s++) {
        float *row = state + s * vlai_wallx_state_columns(c);
        memcpy(row, b->state + s * c->propri_dim, (size_t)c->propri_dim * sizeof *state);
        if (c->proj_with_mask)
            memcpy(row + c->propri_dim, b->state_mask + s * c->propri_dim, (size_t)c->propri_dim * sizeof *state);
    }
}

void vlai_wallx_fill_vision(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vlai_wallx_batch *batch,
                            vlai_wallx_find find, void *user)
{
    target t = {find, user};
    fill_vision(config, shape, batch, &t);
}

vla_status vlai_wallx_fill(const vlai_wallx_config *config, const vlai_wallx_tokens *tokens, const vlai_wallx_shape *shape,
                           const vlai_wallx_batch *batch, vlai_wallx_find find, void *user, vla_error *err)
{
    target t = {find, user};
    if (shape->patches)
        fill_vision(config, shape, batch, &t);
    fill_actions(config, shape, batch, &t);
    return fill_tokens(config, tokens, shape, batch, &t, err);
}
