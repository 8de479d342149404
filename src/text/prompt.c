/* Facts: wall-x, wall_x/data/backends/lerobot/utils.py (template, collator) and wall_x/data/utils.py (points, labels). */
#include "text/prompt.h"

#include "base/fail.h"
#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char propri_token[] = "<|propri|>", action_token[] = "<|action|>", image_token[] = "<|image_pad|>";
static const char fast_slot[] = "<|action_fast|><|im_end|>\n", assistant_marker[] = "<|im_start|>assistant\n";
enum { MARKER_TOKENS = 3 }; /* <|im_start|>, assistant, newline */

vla_status vlai_prompt_add_tokens(vlai_tokenizer *tok, int64_t action_tokens, const char *const *special, size_t count,
                                  vla_error *err)
{
    if (action_tokens < 0 || action_tokens > 1 << 20)
        return vlai_fail(err, VLA_E_INVALID, "%" PRId64 " discrete action tokens; 0 to %d are taken", action_tokens, 1 << 20);
    VLA_TRY(vlai_tokenizer_add(tok, propri_token, NULL, err));
    VLA_TRY(vlai_tokenizer_add(tok, action_token, NULL, err));
    for (size_t i = 0; i < count; i++)
        VLA_TRY(vlai_tokenizer_add(tok, special[i], NULL, err));
    for (int64_t i = 0; i < action_tokens; i++) {
        char name[48];
        snprintf(name, sizeof name, "<|action_token_%" PRId64 "|>", i);
        VLA_TRY(vlai_tokenizer_add(tok, name, NULL, err));
    }
    return VLA_OK;
}

vla_status vlai_prompt_tokens_of(const vlai_tokenizer *tok, vlai_prompt_tokens *out, vla_error *err)
{
    const struct {
        const char *name;
        int32_t *id;
    } wanted[] = {
        {propri_token, &out->propri},          {action_token, &out->action},        {image_token, &out->image},
        {"<|im_end|>", &out->end},             {"<|endoftext|>", &out->end_of_text}, {"<|vision_start|>", &out->vision_start},
        {"<|vision_end|>", &out->vision_end},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].id = vlai_tokenizer_id(tok, wanted[i].name);
        if (*wanted[i].id < 0)
            return vlai_fail_hint(err, VLA_E_NOT_FOUND, "model.processor_path must hold a Qwen2.5-VL tokenizer",
                                  "%s has no token '%s'", vlai_tokenizer_name(tok), wanted[i].name);
    }
    out->pad = vlai_tokenizer_pad(tok);
    if (out->pad < 0)
        out->pad = out->end_of_text;
    out->first_action_token = vlai_tokenizer_id(tok, "<|action_token_0|>");
    return VLA_OK;
}

/* Points. */

/* One number of a point, scaled and clamped as Python does: round half to even, then 0 .. size - 1. */
static int64_t scaled(double x, double scale, int64_t size)
{
    double y = rint(x * scale), last = (double)(size - 1);
    return (int64_t)(y < last ? y : last);
}

static void put_point(const char *inside, const char *end, double scale_x, double scale_y, int64_t to_width,
                      int64_t to_height, vlai_text *out)
{
    const char *digits[4];
    size_t lengths[4], count = 0;
    for (int pass = 0; pass < 2; pass++) { /* count first: only points of 2 or 4 numbers are scaled */
        size_t seen = 0;
        for (const char *p = inside; p < end;) {
            if (*p < '0' || *p > '9') {
                p++;
                continue;
            }
            const char *start = p;
            while (p < end && *p >= '0' && *p <= '9')
                p++;
            while (start + 1 < p && *start == '0')
                start++;
            if (pass == 0 && seen < 4) {
                digits[seen] = start;
                lengths[seen] = (size_t)(p - start);
            }
            if (pass == 1 && count != 2 && count != 4) {
                if (seen)
                    vlai_text_puts(out, ", ");
                vlai_text_put(out, start, (size_t)(p - start));
            }
            seen++;
        }
        count = seen;
        if (pass == 0)
            vlai_text_puts(out, "<point>[");
    }
    if (count == 2 || count == 4)
        for (size_t i = 0; i < count; i++) {
            char number[32];
            snprintf(number, sizeof number, "%.*s", (int)(lengths[i] < 30 ? lengths[i] : 30), digits[i]);
            bool x = i % 2 == 0;
            vlai_text_printf(out, "%s%" PRId64, i ? ", " : "",
                             scaled(strtod(number, NULL), x ? scale_x : scale_y, x ? to_width : to_height));
        }
    vlai_text_puts(out, "]</point>");
}

void vlai_prompt_points(const char *text, int64_t width, int64_t height, int64_t to_width, int64_t to_height,
                        vlai_text *out)
{
    static const char open[] = "<point>", close[] = "</point>";
    double scale_x = (double)to_width / (double)width, scale_y = (double)to_height / (double)height;
    for (;;) {
        const char *start = strstr(text, open), *inside = start ? start + sizeof open - 1 : NULL;
        const char *end = inside ? strstr(inside, close) : NULL;
        if (!end)
            break;
        if (memchr(inside, '\n', (size_t)(end - inside))) { /* a point stands on one line */
            vlai_text_put(out, text, (size_t)(inside - text));
            text = inside;
            continue;
        }
        vlai_text_put(out, text, (size_t)(start - text));
        put_point(inside, end, scale_x, scale_y, to_width, to_height, out);
        text = end + sizeof close - 1;
    }
    vlai_text_puts(out, text);
}

void vlai_prompt_template(const char *const *views, size_t count, const char *instruction, int64_t horizon,
                          vlai_text *out)
{
    vlai_text_puts(out, "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nObservation:");
    for (size_t i = 0; i < count; i++)
        vlai_text_printf(out, " %s: <|vision_start|><|image_pad|><|vision_end|>", views[i]);
    vlai_text_puts(out, "\nInstruction: ");
    vlai_text_puts(out, instruction);
    vlai_text_puts(out, "\nPredict the next action in robot action.\nProprioception: <|propri|>\n<|im_end|>\n");
    vlai_text_puts(out, assistant_marker);
    vlai_text_puts(out, fast_slot);
    for (int64_t i = 0; i < horizon; i++)
        vlai_text_puts(out, action_token);
}

void vlai_state_string(const float *state, const float *mask, int64_t n, int64_t bins, vlai_text *out)
{
    double step = 2.0 / (double)bins;
    bool first = true;
    for (int64_t i = 0; i < n; i++) {
        if (mask[i] != 1)
            continue;
        /* Start near the answer; the edges as they are computed decide. */
        double x = state[i], guess = floor((x + 1) / step);
        int64_t bin = guess < 0 ? 0 : guess >= (double)bins ? bins - 1 : (int64_t)guess;
        while (bin + 1 < bins && (double)(bin + 1) * step - 1 <= x)
            bin++;
        while (bin >= 0 && !((double)bin * step - 1 <= x))
            bin--;
        vlai_text_printf(out, "%s%" PRId64, first ? "" : " ", bin);
        first = false;
    }
}

/* Placeholders. Each pass of the reference replaces all of one string; one walk does the same, because no replacement makes
 * or breaks another placeholder. */
void vlai_prompt_finish(const char *prompt, const vlai_prompt_fill *fill, size_t *used, size_t *missing, vlai_text *out)
{
    const size_t image_size = sizeof image_token - 1, action_size = sizeof action_token - 1,
                 propri_size = sizeof propri_token - 1, slot_size = sizeof fast_slot - 1;
    for (const char *p = prompt; *p;) {
        if (*p != '<') {
            size_t plain = strcspn(p, "<");
            vlai_text_put(out, p, plain);
            p += plain;
        } else if (!strncmp(p, image_token, image_size)) {
            int64_t copies = 1;
            if (*used < fill->image_count)
                copies = fill->image_tokens[(*used)++];
            else
                (*missing)++;
            for (int64_t i = 0; i < copies; i++)
                vlai_text_put(out, image_token, image_size);
            p += image_size;
        } else if (fill->state && !strncmp(p, propri_token, propri_size)) {
            vlai_text_puts(out, fill->state);
            p += propri_size;
        } else if (!strncmp(p, fast_slot, slot_size)) {
            if (fill->discrete && !fill->open) {
                for (size_t i = 0; i < fill->action_token_count; i++)
                    vlai_text_printf(out, "<|action_token_%d|>", fill->action_tokens[i]);
                vlai_text_puts(out, "<|im_end|>\n");
            }
            p += slot_size;
        } else if (fill->discrete && !strncmp(p, action_token, action_size)) {
            p += action_size;
        } else {
            vlai_text_put(out, p++, 1);
        }
    }
}

/* Labels. */

static vla_status count_tokens(const vlai_tokenizer *tok, const char *text, size_t size, size_t *count, vla_error *err)
{
    vlai_ids ids = {0};
    vla_status status = vlai_tokenizer_encode(tok, text, size, &ids, err);
    *count = ids.count;
    vlai_ids_fini(&ids);
    return status;
}

vla_status vlai_prompt_labels(const vlai_tokenizer *tok, const vlai_prompt_tokens *tokens, const char *text, size_t size,
                              const int32_t *ids, size_t n, int64_t *labels, size_t *labelled, vla_error *err)
{
    const size_t marker = sizeof assistant_marker - 1;
    *labelled = 0;
    for (size_t i = 0; i < n; i++)
        labels[i] = -100;
    const char *end = text + size, *part = strstr(text, assistant_marker);
    if (!part || !strstr(part, "<|im_end|>"))
        return VLA_OK; /* no turn ends: the usual case of flow training, without tokenising parts */
    size_t at = 0, length;
    VLA_TRY(count_tokens(tok, text, (size_t)(part - text), &length, err));
    while (at < n && ids[at] == tokens->pad)
        at++;
    at += length;
    while (part) {
        const char *content = part + marker, *next = strstr(content, assistant_marker);
        size_t stop = at;
        while (stop < n && ids[stop] != tokens->end)
            stop++;
        if (stop < n)
            for (size_t i = at + MARKER_TOKENS; i < stop + 2 && i < n; i++)
                labels[i] = ids[i];
        VLA_TRY(count_tokens(tok, content, (size_t)((next ? next : end) - content), &length, err));
        at += length + MARKER_TOKENS;
        part = next;
    }
    for (size_t i = 0; i < n; i++) {
        if (labels[i] == tokens->action || labels[i] == tokens->propri || labels[i] == tokens->pad)
            labels[i] = -100;
        *labelled += labels[i] != -100;
    }
    return VLA_OK;
}

/* Batches. */

vla_status vlai_prompt_too_long(size_t needed, int64_t max_length, const char *text, vla_error *err)
{
    const char *task = strstr(text, "Instruction: ");
    task = task ? task + 13 : text;
    char hint[96];
    snprintf(hint, sizeof hint, "set data.max_length to %zu or more, or lower data.resolution", needed);
    return vlai_fail_hint(err, VLA_E_INVALID, hint,
                          "the prompt has %zu tokens and data.max_length is %" PRId64
                          ": cutting its end would remove action tokens (instruction: '%.*s')",
                          needed, max_length, (int)strcspn(task, "\n"), task);
}

static vla_status put_row(const vlai_tokenizer *tok, const vlai_prompt_tokens *tokens, const vlai_collate_options *options,
                          const vlai_collate_row *row, size_t length, size_t real, int64_t at, vlai_token_batch *out,
                          size_t *labelled, vla_error *err)
{
    int64_t start = options->left ? out->width - (int64_t)length : 0;
    int64_t *ids = out->input_ids + at * out->width, *mask = out->attention_mask + at * out->width;
    int32_t *own = vlai_array(length ? length : 1, sizeof *own);
    if (!own)
        return vlai_nomem(err, length * sizeof *own);
    for (size_t i = 0; i < length; i++)
        own[i] = i < real ? row->ids[i] : tokens->end_of_text;
    for (int64_t i = 0; i < out->width; i++) {
        bool inside = i >= start && i < start + (int64_t)length;
        ids[i] = inside ? own[i - start] : tokens->pad;
        mask[i] = inside;
        out->moe_token_types[at * out->width + i] = ids[i] == tokens->action;
    }
    int64_t *labels = out->labels + at * out->width;
    for (int64_t i = 0; i < out->width; i++)
        labels[i] = -100;
    size_t count;
    vla_status status = vlai_prompt_labels(tok, tokens, row->text, strlen(row->text), own, length, labels + start, &count, err);
    *labelled += count;
    vlai_free(own);
    return status;
}

vla_status vlai_collate(const vlai_tokenizer *tok, const vlai_prompt_tokens *tokens, const vlai_collate_options *options,
                        const vlai_collate_row *rows, size_t count, vlai_token_batch *out, vla_error *err)
{
    *out = (vlai_token_batch){.rows = (int64_t)count};
    size_t longest_actions = 0, labelled = 0;
    for (size_t i = 0; i < count; i++)
        if (rows[i].discrete && rows[i].action_token_count > longest_actions)
            longest_actions = rows[i].action_token_count;
    for (int pass = 0; pass < 2; pass++) { /* lengths first, then the rows */
        for (size_t i = 0; i < count; i++) {
            size_t length = rows[i].count + (rows[i].discrete ? longest_actions - rows[i].action_token_count : 0);
            if (options->max_length > 0 && length > (size_t)options->max_length) {
                if (!options->truncate)
                    return vlai_token_batch_fini(out), vlai_prompt_too_long(length, options->max_length, rows[i].text, err);
                length = (size_t)options->max_length;
            }
            size_t real = rows[i].count < length ? rows[i].count : length;
            if (pass == 0) {
                out->width = (int64_t)length > out->width ? (int64_t)length : out->width;
                continue;
            }
            vla_status status = put_row(tok, tokens, options, &rows[i], length, real, (int64_t)i, out, &labelled, err);
            if (status != VLA_OK)
                return vlai_token_batch_fini(out), status;
        }
        if (pass == 0) {
            size_t n = count * (size_t)out->width;
            n = n ? n : 1;
            out->input_ids = vlai_array(n, sizeof(int64_t));
            out->attention_mask = vlai_array(n, sizeof(int64_t));
            out->labels = vlai_array(n, sizeof(int64_t));
            out->moe_token_types = vlai_array(n, 1);
            if (!out->input_ids || !out->attention_mask || !out->labels || !out->moe_token_types)
                return vlai_token_batch_fini(out), vlai_nomem(err, n * 25);
        }
    }
    if (!labelled) {
        vlai_free(out->labels);
        out->labels = NULL;
    }
    return VLA_OK;
}

void vlai_token_batch_fini(vlai_token_batch *batch)
{
    vlai_free(batch->input_ids);
    vlai_free(batch->attention_mask);
    vlai_free(batch->labels);
    vlai_free(batch->moe_token_types);
    *batch = (vlai_token_batch){0};
}
