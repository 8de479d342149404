#include "data/sample.h"

#include "base/fail.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

struct vlai_sampler {
    const vlai_contract *contract;
    const vlai_tokenizer *tok;
    vlai_prompt_tokens tokens;
    vlai_resizer *resizer;
    vlai_id_encoder *encoder;
    vlai_text instruction, state_text;
    const char *views[VLAI_MAX_CAMERAS];
    size_t order[VLAI_MAX_CAMERAS]; /* camera of each picture */
    float *six; /* state, then one action row, in the layout's form */
    size_t six_capacity;
};

vla_status vlai_sampler_create(const vlai_contract *contract, const vlai_tokenizer *tok, vlai_sampler **out,
                               vla_error *err)
{
    *out = NULL;
    if (contract->camera_count > VLAI_MAX_CAMERAS)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%zu cameras; at most %d are taken", contract->camera_count, VLAI_MAX_CAMERAS);
    vlai_sampler *s = vlai_calloc(1, sizeof *s);
    if (!s)
        return vlai_nomem(err, sizeof *s);
    s->contract = contract;
    s->tok = tok;
    for (size_t i = 0; i < contract->camera_count; i++) {
        s->views[i] = contract->cameras[i].display;
        s->order[i] = i;
    }
    vla_status status = vlai_prompt_tokens_of(tok, &s->tokens, err);
    if (status == VLA_OK)
        status = vlai_resizer_create(&s->resizer, err);
    if (status == VLA_OK)
        status = vlai_id_encoder_create(tok, &s->encoder, err);
    if (status != VLA_OK)
        return vlai_sampler_destroy(s), status;
    *out = s;
    return VLA_OK;
}

void vlai_sampler_destroy(vlai_sampler *s)
{
    if (!s)
        return;
    vlai_resizer_destroy(s->resizer);
    vlai_id_encoder_destroy(s->encoder);
    vlai_text_fini(&s->instruction);
    vlai_text_fini(&s->state_text);
    vlai_free(s->six);
    vlai_free(s);
}

const vlai_prompt_tokens *vlai_sampler_tokens(const vlai_sampler *s)
{
    return &s->tokens;
}

void vlai_sampler_order(vlai_sampler *s, const size_t *order)
{
    memcpy(s->order, order, s->contract->camera_count * sizeof *order);
}

void vlai_sample_fini(vlai_sample *sample)
{
    vlai_free(sample->state); /* the first of the five number arrays: one block */
    vlai_free(sample->pixels);
    vlai_text_fini(&sample->prompt);
    vlai_text_fini(&sample->text);
    vlai_ids_fini(&sample->ids);
    vlai_ids_fini(&sample->action_tokens);
    vlai_free(sample->labels);
    *sample = (vlai_sample){0};
}

/* A buffer is replaced only after the new one exists. */
static vla_status room(void **buffer, size_t *capacity, size_t wanted, vla_error *err)
{
    if (wanted <= *capacity)
        return VLA_OK;
    void *fresh = vlai_alloc(wanted);
    if (!fresh)
        return vlai_nomem(err, wanted);
    vlai_free(*buffer);
    *buffer = fresh;
    *capacity = wanted;
    return VLA_OK;
}

/* Numbers. */

static vla_status prepare_numbers(vlai_sampler *s, const vlai_sample_input *in, vlai_sample *out, vla_error *err)
{
    const vlai_contract *c = s->contract;
    if (in->state_dims < 1 || in->state_dims > 4096 || (in->action && (in->action_dims < 1 || in->action_dims > 4096)))
        return vlai_fail(err, VLA_E_SHAPE, "state of %" PRId64 " and action of %" PRId64 " dims; 1 to 4096 are taken",
                         in->state_dims, in->action_dims);
    int64_t action_dims = in->action ? in->action_dims : 0;
    size_t six = (size_t)(in->state_dims + c->pos.width + action_dims + c->dof.width);
    VLA_TRY(room((void **)&s->six, &s->six_capacity, six * sizeof *s->six, err));
    float *state = s->six, *row = s->six + in->state_dims + c->pos.width;
    int64_t dims = vlai_layout_to_six(&c->pos, in->state, in->state_dims, state);
    int64_t converted = in->action ? vlai_layout_to_six(&c->dof, in->action, action_dims, row) : 0;
    if (dims > c->pos.total)
        return vlai_fail(err, VLA_E_SHAPE, "the state has %" PRId64 " dims and task.agent_pos_config %" PRId64, dims, c->pos.total);
    if (converted > c->dof.total)
        return vlai_fail(err, VLA_E_SHAPE, "actions have %" PRId64 " dims and task.dof_config %" PRId64, converted, c->dof.total);
    out->state_width = c->pos.total;
    out->action_width = c->dof.total;
    out->horizon = c->horizon;
    size_t states = (size_t)out->state_width, actions = (size_t)(out->horizon * out->action_width);
    VLA_TRY(room((void **)&out->state, &out->number_capacity, (2 * (states + actions) + (size_t)out->horizon) * sizeof(float), err));
    out->state_mask = out->state + states;
    out->action = out->state_mask + states;
    out->dof_mask = out->action + actions;
    out->loss_mask = out->dof_mask + actions;
    vlai_normalise(&c->state, state, dims, out->state_width, out->state, out->state_mask);
    if (!in->action)
        memset(out->action, 0, 2 * actions * sizeof(float));
    for (int64_t k = 0; in->action && k < out->horizon; k++) {
        vlai_layout_to_six(&c->dof, in->action + k * action_dims, action_dims, row);
        VLA_TRY(vlai_layout_relative(&c->dof, row, converted, state, dims, err));
        vlai_normalise(&c->action, row, converted, out->action_width, out->action + k * out->action_width,
                       out->dof_mask + k * out->action_width);
    }
    for (int64_t k = 0; k < out->horizon; k++)
        out->loss_mask[k] = in->action_is_pad && in->action_is_pad[k] ? 0.0f : 1.0f;
    return VLA_OK;
}

/* Pictures. */

vla_status vlai_contract_picture(const vlai_contract *c, size_t camera, int64_t width, int64_t height,
                                 vlai_image_size *size, int64_t grid[3], vla_error *err)
{
    vla_status status = vlai_image_fit(width, height, c->cameras[camera].resolution, &c->image.rule, size, err);
    if (status != VLA_OK)
        return vlai_prefix(err, status, "camera '%s'", c->cameras[camera].key);
    if (!vlai_image_grid(&c->image, size->width, size->height, grid))
        return vlai_fail(err, VLA_E_INTERNAL, "%" PRId64 "x%" PRId64 " is no multiple of the patch blocks", size->width,
                         size->height);
    return VLA_OK;
}

/* Sizes, grids and places of the pictures: all that the text needs of them. */
static vla_status place_pictures(const vlai_sampler *s, const vlai_sample_input *in, vlai_image_size *sizes, vlai_sample *out, vla_error *err)
{
    const vlai_contract *c = s->contract;
    out->patches = 0;
    out->pixel_bytes = 0;
    out->picture_count = c->camera_count;
    for (size_t i = 0; i < c->camera_count; i++) {
        vlai_sample_picture *p = &out->pictures[i];
        const vla_picture *from = &in->pictures[s->order[i]];
        VLA_TRY(vlai_contract_picture(c, s->order[i], from->width, from->height, &sizes[i], p->grid, err));
        p->camera = s->order[i];
        p->offset = out->pixel_bytes;
        p->width = sizes[i].width;
        p->height = sizes[i].height;
        out->pixel_bytes += (size_t)(p->width * p->height) * 3;
        out->patches += p->grid[0] * p->grid[1] * p->grid[2];
    }
    return VLA_OK;
}

static vla_status resize_pictures(vlai_sampler *s, const vlai_sample_input *in, const vlai_image_size *sizes, vlai_sample *out, vla_error *err)
{
    VLA_TRY(room((void **)&out->pixels, &out->pixel_capacity, out->pixel_bytes, err));
    for (size_t i = 0; i < out->picture_count; i++) {
        const vla_picture *from = &in->pictures[s->order[i]];
        const uint8_t *resized = in->resized ? in->resized[s->order[i]] : NULL;
        if (resized) {
            memcpy(out->pixels + out->pictures[i].offset, resized, (size_t)(sizes[i].width * sizes[i].height) * 3);
            continue;
        }
        VLA_TRY(vlai_resizer_fit(s->resizer, from->data, from->width, from->height, &sizes[i],
                                 out->pixels + out->pictures[i].offset, err));
    }
    return VLA_OK;
}

/* Text. */

/* Tokens of actions and of the state that the instruction brings along would be taken for the prompt's own. */
static vla_status check_placeholders(const vlai_sampler *s, const vlai_sample_input *in, const vlai_sample *out, vla_error *err)
{
    const vlai_contract *c = s->contract;
    const struct {
        const char *name;
        int32_t id;
        int64_t wanted;
    } rows[] = {{"<|action|>", s->tokens.action, c->discrete ? 0 : c->horizon}, {"<|propri|>", s->tokens.propri, c->state_string ? 0 : 1}};
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        int64_t found = 0;
        for (size_t i = 0; i < out->ids.count; i++)
            found += out->ids.data[i] == rows[k].id;
        if (found > rows[k].wanted)
            return vlai_fail_hint(err, VLA_E_INVALID, "take it out of the task's text in the data set", "the instruction holds %lld %s of its own: '%s'",
                                  (long long)(found - rows[k].wanted), rows[k].name, in->task);
    }
    return VLA_OK;
}

/* The chunk as discrete tokens, unless the caller brings them. A prediction has none. */
static vla_status write_actions(const vlai_sampler *s, const vlai_sample_input *in, vlai_sample *out, vla_error *err)
{
    const vlai_contract *c = s->contract;
    out->action_tokens.count = 0;
    out->action_token_count = in->action_token_count;
    if (!c->discrete || !c->fast || in->action_tokens || !in->action)
        return VLA_OK;
    VLA_TRY(vlai_fast_encode(c->fast, out->action, out->dof_mask, out->horizon, out->action_width, &out->action_tokens, err));
    out->action_token_count = out->action_tokens.count;
    return VLA_OK;
}

static vla_status label(const vlai_sampler *s, vlai_sample *out, vla_error *err)
{
    out->labelled = 0;
    if (!out->discrete)
        return VLA_OK;
    VLA_TRY(room((void **)&out->labels, &out->label_capacity, out->ids.capacity * sizeof *out->labels, err));
    return vlai_prompt_labels(s->tok, &s->tokens, out->text.data, out->text.size, out->ids.data, out->ids.count, out->labels, &out->labelled,
                              err);
}

static vla_status prepare_text(vlai_sampler *s, const vlai_sample_input *in, vlai_sample *out, vla_error *err)
{
    const vlai_contract *c = s->contract;
    s->instruction.size = s->state_text.size = out->prompt.size = out->text.size = out->ids.count = 0;
    /* An empty text has no data. */
    vlai_text_puts(&s->state_text, "");
    if (c->camera_count) { /* points are in pixels of the last picture */
        const vla_picture *from = &in->pictures[s->order[c->camera_count - 1]];
        const vlai_sample_picture *to = &out->pictures[c->camera_count - 1];
        vlai_prompt_points(in->task, from->width, from->height, to->width, to->height, &s->instruction);
    } else {
        vlai_text_puts(&s->instruction, in->task);
    }
    VLA_TRY(vlai_text_status(&s->instruction, err));
    vlai_prompt_template(s->views, c->camera_count, s->instruction.data ? s->instruction.data : "", c->horizon, &out->prompt);
    VLA_TRY(vlai_text_status(&out->prompt, err));
    if (c->state_string) {
        vlai_state_string(out->state, out->state_mask, out->state_width, c->state_bins, &s->state_text);
        VLA_TRY(vlai_text_status(&s->state_text, err));
    }
    VLA_TRY(write_actions(s, in, out, err));
    int64_t counts[VLAI_MAX_CAMERAS];
    for (size_t i = 0; i < c->camera_count; i++)
        counts[i] = vlai_image_tokens(&c->image, out->pictures[i].grid);
    vlai_prompt_fill fill = {
        .state = c->state_string ? s->state_text.data ? s->state_text.data : "" : NULL,
        .discrete = c->discrete,
        .open = !in->action && !in->action_tokens,
        .action_tokens = in->action_tokens ? in->action_tokens : out->action_tokens.data,
        .action_token_count = out->action_token_count,
        .image_tokens = counts,
        .image_count = c->camera_count,
    };
    size_t used = 0, missing = 0;
    vlai_prompt_finish(out->prompt.data, &fill, &used, &missing, &out->text);
    VLA_TRY(vlai_text_status(&out->text, err));
    if (missing)
        return vlai_fail(err, VLA_E_INVALID, "the instruction holds %zu picture placeholders of its own: '%s'", missing, in->task);
    out->discrete = c->discrete;
    VLA_TRY(vlai_id_encoder_run(s->encoder, out->text.data, out->text.size, &out->ids, err));
    if (!c->truncate && c->max_length > 0 && out->ids.count > (size_t)c->max_length)
        return vlai_prompt_too_long(out->ids.count, c->max_length, out->text.data, err);
    VLA_TRY(label(s, out, err));
    return check_placeholders(s, in, out, err);
}

vla_status vlai_sampler_prepare(vlai_sampler *s, const vlai_sample_input *in, vlai_sample *out, vla_error *err)
{
    out->row = in->row;
    out->episode = in->episode;
    out->frame = in->frame;
    vlai_image_size sizes[VLAI_MAX_CAMERAS];
    vla_status status = prepare_numbers(s, in, out, err);
    if (status == VLA_OK)
        status = place_pictures(s, in, sizes, out, err);
    if (status == VLA_OK)
        status = prepare_text(s, in, out, err);
    if (status == VLA_OK) /* last: a prompt that is too long for its pictures is refused before they are made */
        status = resize_pictures(s, in, sizes, out, err);
    if (status != VLA_OK)
        return vlai_prefix(err, status, "episode %" PRId64 ", frame %" PRId64, in->episode, in->frame);
    return VLA_OK;
}

vla_status vlai_sampler_collate(const vlai_sampler *s, const vlai_sample *const *samples, size_t count,
                                vlai_token_batch *out, vla_error *err)
{
    vlai_collate_row *rows = vlai_calloc(count ? count : 1, sizeof *rows);
    if (!rows)
        return vlai_nomem(err, count * sizeof *rows);
    for (size_t i = 0; i < count; i++)
        rows[i] = (vlai_collate_row){
            .text = samples[i]->text.data,
            .ids = samples[i]->ids.data,
            .count = samples[i]->ids.count,
            .discrete = samples[i]->discrete,
            .action_token_count = samples[i]->action_token_count,
        };
    vlai_collate_options options = {
        .left = s->contract->pads_left, .max_length = s->contract->max_length, .truncate = s->contract->truncate};
    vla_status status = vlai_collate(s->tok, &s->tokens, &options, rows, count, out, err);
    vlai_free(rows);
    return status;
}
