#include "data/feed.h"

#include "base/fail.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

struct vlai_feed {
    vla_dataset *set;
    const vlai_contract *contract;
    vlai_sampler *sampler;
    vla_frame_reader *reader;
    const vla_feature *cameras[VLAI_MAX_CAMERAS];
    const float *states, *actions; /* (rows, dims), the data set's */
    int64_t state_dims, action_dims;
    float *chunk;         /* (horizon, action_dims) */
    uint8_t *repeated;    /* (horizon) */
    uint8_t *pixels;      /* pictures of one row, copied: a reader lends one at a time */
    size_t pixel_capacity;
    vlai_frame_cache *cache;
    const uint8_t *cached[VLAI_MAX_CAMERAS]; /* of the row in progress */
};

/* Cameras of the contract in the order of the data set's features. */
static void order_by_features(vlai_feed *f)
{
    size_t order[VLAI_MAX_CAMERAS], count = 0;
    for (int64_t i = 0; i < vla_dataset_info_get(f->set)->cameras; i++)
        for (size_t k = 0; k < f->contract->camera_count; k++)
            if (f->cameras[k] == vla_dataset_camera(f->set, i) && count < VLAI_MAX_CAMERAS)
                order[count++] = k;
    if (count == f->contract->camera_count)
        vlai_sampler_order(f->sampler, order);
}

vla_status vlai_feed_create(vla_dataset *set, const vlai_contract *contract, const vlai_tokenizer *tok, vlai_feed **out,
                            vla_error *err)
{
    *out = NULL;
    vlai_feed *f = vlai_calloc(1, sizeof *f);
    if (!f)
        return vlai_nomem(err, sizeof *f);
    f->set = set;
    f->contract = contract;
    vla_status status;
    VLA_TRY_GOTO(vlai_sampler_create(contract, tok, &f->sampler, err), fail);
    for (size_t i = 0; i < contract->camera_count; i++)
        VLA_TRY_GOTO(vla_dataset_need_camera(set, contract->cameras[i].key, &f->cameras[i], err), fail);
    if (contract->feature_order)
        order_by_features(f);
    VLA_TRY_GOTO(vla_dataset_numbers(set, contract->state_key, &f->states, &f->state_dims, err), fail);
    VLA_TRY_GOTO(vla_dataset_numbers(set, contract->action_key, &f->actions, &f->action_dims, err), fail);
    f->chunk = vlai_array((size_t)(contract->horizon * f->action_dims), sizeof *f->chunk);
    f->repeated = vlai_array((size_t)contract->horizon, 1);
    if (!f->chunk || !f->repeated) {
        status = vlai_nomem(err, (size_t)(contract->horizon * f->action_dims) * sizeof *f->chunk);
        goto fail;
    }
    VLA_TRY_GOTO(vla_frame_reader_create(set, NULL, &f->reader, err), fail);
    *out = f;
    return VLA_OK;
fail:
    vlai_feed_destroy(f);
    return status;
}

void vlai_feed_destroy(vlai_feed *f)
{
    if (!f)
        return;
    vla_frame_reader_destroy(f->reader);
    vlai_sampler_destroy(f->sampler);
    vlai_free(f->chunk);
    vlai_free(f->repeated);
    vlai_free(f->pixels);
    vlai_free(f);
}

const vlai_sampler *vlai_feed_sampler(const vlai_feed *f)
{
    return f->sampler;
}

/* Everything that pixels depend on besides the data set's files, and the bytes of each camera's picture. False when a camera
 * does not declare its size. */
static bool describe_transform(const vla_dataset *set, const vlai_contract *c, int64_t *sizes, vlai_text *text)
{
    vlai_text_printf(text, "bicubic as Pillow 12, factor %d, %" PRId64 " to %" PRId64 " pixels", (int)(c->image.patch * c->image.merge),
                     (int64_t)c->image.rule.min_pixels, (int64_t)c->image.rule.max_pixels);
    for (size_t i = 0; i < c->camera_count; i++) {
        vlai_image_size size;
        int64_t grid[3];
        const vla_feature *f = vla_dataset_find(set, c->cameras[i].key);
        if (!f || f->width < 1 || f->height < 1 || vlai_contract_picture(c, i, f->width, f->height, &size, grid, NULL) != VLA_OK)
            return false;
        sizes[i] = size.width * size.height * 3;
        vlai_text_printf(text, "; %s %" PRId64 "x%" PRId64 " to %" PRId64 "x%" PRId64 " by %" PRId64, c->cameras[i].key, f->width,
                         f->height, (int64_t)size.width, (int64_t)size.height, c->cameras[i].resolution);
    }
    /* A choice of episodes numbers its rows by itself. */
    const vla_dataset_info *info = vla_dataset_info_get(set);
    vlai_text_puts(text, info->episodes == info->total_episodes ? "" : "; episodes");
    for (int64_t e = 0; info->episodes != info->total_episodes && e < info->episodes; e++)
        vlai_text_printf(text, " %" PRId64, vla_dataset_episode(set, e)->index);
    return c->camera_count > 0;
}

vla_status vlai_feed_cache_open(const vla_dataset *set, const vlai_contract *contract, const char *dir, uint64_t limit,
                                vlai_frame_cache **out, vla_error *err)
{
    int64_t sizes[VLAI_MAX_CAMERAS];
    vlai_text transform = {0};
    *out = NULL;
    bool known = contract->camera_count <= VLAI_MAX_CAMERAS && describe_transform(set, contract, sizes, &transform);
    vla_status status = vlai_text_status(&transform, err);
    const vla_dataset_info *info = vla_dataset_info_get(set);
    vlai_frame_cache_options o = {.dir = dir, .digest = info->digest, .transform = transform.data, .rows = info->rows,
                                  .sizes = sizes, .cameras = (int64_t)contract->camera_count, .limit = limit};
    if (status == VLA_OK && known)
        status = vlai_frame_cache_open(&o, out, err);
    vlai_text_fini(&transform);
    return status;
}

void vlai_feed_use_cache(vlai_feed *f, vlai_frame_cache *cache)
{
    f->cache = cache;
}

/* A picture that the cache has: its original size is the declared one, since only such are put. */
static bool from_cache(vlai_feed *f, int64_t row, size_t i, vla_picture *out)
{
    f->cached[i] = f->cache ? vlai_frame_cache_get(f->cache, row, (int64_t)i) : NULL;
    *out = (vla_picture){NULL, f->cameras[i]->width, f->cameras[i]->height};
    return f->cached[i] != NULL;
}

static void keep_pictures(vlai_feed *f, int64_t row, const vla_picture *pictures, const vlai_sample *sample)
{
    for (size_t k = 0; f->cache && k < sample->picture_count; k++) {
        const vlai_sample_picture *p = &sample->pictures[k];
        const vla_picture *from = &pictures[p->camera];
        const vla_feature *declared = f->cameras[p->camera];
        if (!f->cached[p->camera] && from->width == declared->width && from->height == declared->height)
            vlai_frame_cache_put(f->cache, row, (int64_t)p->camera, sample->pixels + p->offset);
    }
}

/* Reads every camera's picture. The first ones are copied aside, because the reader keeps only the newest. */
static vla_status read_pictures(vlai_feed *f, int64_t row, vla_picture *out, vla_error *err)
{
    size_t used = 0, count = f->contract->camera_count;
    for (size_t i = 0; i < count; i++) {
        if (from_cache(f, row, i, &out[i]))
            continue;
        VLA_TRY(vla_frame_reader_read(f->reader, row, f->cameras[i], &out[i], err));
        if (i + 1 == count)
            break;
        size_t bytes = (size_t)(out[i].width * out[i].height) * 3;
        if (used + bytes > f->pixel_capacity) {
            size_t wanted = (used + bytes) * (count - i); /* cameras are mostly of one size: grow once */
            uint8_t *fresh = vlai_grow(f->pixels, f->pixel_capacity, wanted);
            if (!fresh)
                return vlai_nomem(err, wanted);
            for (size_t k = 0, at = 0; k < i; k++) {
                if (f->cached[k])
                    continue;
                out[k].data = fresh + at;
                at += (size_t)(out[k].width * out[k].height) * 3;
            }
            f->pixels = fresh;
            f->pixel_capacity = wanted;
        }
        memcpy(f->pixels + used, out[i].data, bytes);
        out[i].data = f->pixels + used;
        used += bytes;
    }
    return VLA_OK;
}

static vla_status check_row(const vlai_feed *f, int64_t row, vla_error *err)
{
    const vla_dataset_info *info = vla_dataset_info_get(f->set);
    if (row < 0 || row >= info->rows)
        return vlai_fail(err, VLA_E_INVALID, "%s has no row %" PRId64 " (%" PRId64 " rows)", info->root, row, info->rows);
    return VLA_OK;
}

/* With `observe` no actions are given. */
static vla_status prepare(vlai_feed *f, int64_t row, int64_t picture_row, int64_t task_row, bool observe, vlai_sample *out,
                          vla_error *err)
{
    const vla_episode *episode = vla_dataset_episode(f->set, vla_dataset_episode_of(f->set, row));
    vla_picture pictures[VLAI_MAX_CAMERAS];
    VLA_TRY(read_pictures(f, picture_row, pictures, err));
    vlai_sample_input in = {
        .state = f->states + row * f->state_dims,
        .state_dims = f->state_dims,
        .action = observe ? NULL : f->chunk,
        .action_dims = f->action_dims,
        .action_is_pad = f->contract->mask_padded ? f->repeated : NULL,
        .pictures = pictures,
        .resized = f->cached,
        .task = vla_dataset_task(f->set, task_row),
        .row = row,
        .episode = episode->index,
        .frame = row - episode->first_row,
    };
    vla_status status = vlai_sampler_prepare(f->sampler, &in, out, err);
    if (status != VLA_OK)
        return vlai_prefix(err, status, "%s", vla_dataset_info_get(f->set)->root);
    keep_pictures(f, picture_row, pictures, out);
    return VLA_OK;
}

vla_status vlai_feed_read(vlai_feed *f, int64_t row, vlai_sample *out, vla_error *err)
{
    VLA_TRY(check_row(f, row, err));
    const vla_episode *episode = vla_dataset_episode(f->set, vla_dataset_episode_of(f->set, row));
    int64_t last = episode->first_row + episode->length - 1;
    for (int64_t k = 0; k < f->contract->horizon; k++) {
        int64_t from = row + k < last ? row + k : last;
        f->repeated[k] = row + k > last;
        memcpy(f->chunk + k * f->action_dims, f->actions + from * f->action_dims, (size_t)f->action_dims * sizeof *f->chunk);
    }
    return prepare(f, row, row, row, false, out, err);
}

vla_status vlai_feed_observe(vlai_feed *f, int64_t row, int64_t picture_row, int64_t task_row, vlai_sample *out, vla_error *err)
{
    VLA_TRY(check_row(f, row, err));
    VLA_TRY(check_row(f, picture_row, err));
    VLA_TRY(check_row(f, task_row, err));
    VLA_TRY(prepare(f, row, picture_row, task_row, true, out, err));
    const vlai_layout *dof = &f->contract->dof;
    int64_t columns = dof->six && f->action_dims == dof->euler ? dof->width : f->action_dims;
    for (int64_t k = 0; k < out->horizon; k++)
        for (int64_t i = 0; i < out->action_width; i++)
            out->dof_mask[k * out->action_width + i] = i < columns ? 1.0f : 0.0f;
    return VLA_OK;
}
