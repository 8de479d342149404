/* The memory of a run: prompts of the data set, a batch as large as chance will bring, plans, and what else there is. */
#include "base/fail.h"
#include "base/memory.h"
#include "base/system.h"
#include "optim/settings.h"
#include "train/contract_config.h"
#include "train/device.h"
#include "train/loader.h"
#include "train/preflight_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 2000, WRITTEN_ROWS = 400 /* with the state in the prompt each row is tokenised */ };

/* Makes prompts of rows without decoding pictures: their sizes are declared, and their content does not matter. */
typedef struct prompts {
    vla_dataset *set;
    const vlai_contract *contract;
    vlai_tokenizer *tok;
    vlai_sampler *sampler;
    const float *states, *recorded;
    int64_t state_dims, action_dims;
    float *actions;   /* a chunk: zeros, or what stands at the row where it is written as tokens */
    uint8_t *pixels;  /* the same bytes for all cameras */
    vla_picture pictures[VLAI_MAX_CAMERAS];
    int64_t rows[ROWS], tokens[ROWS], count;
} prompts;

static void prompts_fini(prompts *p)
{
    vlai_sampler_destroy(p->sampler);
    vlai_tokenizer_close(p->tok);
    vlai_free(p->actions);
    vlai_free(p->pixels);
}

static vla_status prompts_open(prompts *p, const look *l, vla_error *err)
{
    const vlai_wallx_setup *s = vlai_wallx_task_setup(l->task);
    size_t most = 1;
    p->set = s->set;
    p->contract = s->contract;
    VLA_TRY(vlai_config_tokenizer(l->config, &p->tok, err));
    VLA_TRY(vlai_sampler_create(p->contract, p->tok, &p->sampler, err));
    VLA_TRY(vla_dataset_numbers(p->set, p->contract->state_key, &p->states, &p->state_dims, err));
    VLA_TRY(vla_dataset_numbers(p->set, p->contract->action_key, &p->recorded, &p->action_dims, err));
    for (size_t i = 0; i < p->contract->camera_count; i++) {
        const vla_feature *f;
        VLA_TRY(vla_dataset_need_camera(p->set, p->contract->cameras[i].key, &f, err));
        if (f->width < 1 || f->height < 1 || f->width > 1 << 15 || f->height > 1 << 15)
            return vlai_fail(err, VLA_E_FORMAT, "camera '%s' declares pictures of %" PRId64 " x %" PRId64, f->name, f->width, f->height);
        p->pictures[i] = (vla_picture){NULL, f->width, f->height};
        size_t bytes = (size_t)(f->width * f->height) * 3;
        most = bytes > most ? bytes : most;
    }
    p->pixels = vlai_calloc(most, 1);
    p->actions = vlai_calloc((size_t)(p->contract->horizon * p->action_dims), sizeof *p->actions);
    if (!p->pixels || !p->actions)
        return vlai_nomem(err, most);
    for (size_t i = 0; i < p->contract->camera_count; i++)
        p->pictures[i].data = p->pixels;
    return VLA_OK;
}

static vla_status prompt_of(prompts *p, int64_t row, vlai_sample *out, vla_error *err)
{
    const vla_episode *episode = vla_dataset_episode(p->set, vla_dataset_episode_of(p->set, row));
    int64_t last = episode->first_row + episode->length - 1;
    for (int64_t k = 0; k < p->contract->horizon && p->contract->discrete; k++)
        memcpy(p->actions + k * p->action_dims, p->recorded + (row + k < last ? row + k : last) * p->action_dims,
               (size_t)p->action_dims * sizeof *p->actions);
    vlai_sample_input in = {.state = p->states + row * p->state_dims, .state_dims = p->state_dims, .action = p->actions,
                            .action_dims = p->action_dims, .pictures = p->pictures, .task = vla_dataset_task(p->set, row), .row = row};
    return vlai_sampler_prepare(p->sampler, &in, out, err);
}

/* Lengths at rows spread over the set. A prompt without state and actions depends on the instruction alone and is made once for it. */
static vla_status measure_prompts(prompts *p, vla_error *err)
{
    bool written = p->contract->state_string || p->contract->discrete;
    int64_t rows = vla_dataset_info_get(p->set)->rows, wanted = written ? WRITTEN_ROWS : ROWS;
    vlai_sample sample = {0};
    vla_status status = VLA_OK;
    p->count = rows < wanted ? rows : wanted;
    for (int64_t k = 0; k < p->count && status == VLA_OK; k++) {
        p->rows[k] = k * rows / p->count;
        const char *task = vla_dataset_task(p->set, p->rows[k]);
        p->tokens[k] = -1;
        for (int64_t i = k - 1; i >= 0 && p->tokens[k] < 0 && !written; i--)
            if (vla_dataset_task(p->set, p->rows[i]) == task || !strcmp(vla_dataset_task(p->set, p->rows[i]), task))
                p->tokens[k] = p->tokens[i];
        if (p->tokens[k] >= 0)
            continue;
        status = prompt_of(p, p->rows[k], &sample, err);
        p->tokens[k] = (int64_t)sample.ids.count;
    }
    vlai_sample_fini(&sample);
    return status;
}

/* Tokens of the largest batch that chance will bring: three deviations above the mean of a sum, never more than all longest. */
static int64_t batch_tokens(const prompts *p, int64_t batch, int64_t *longest)
{
    double sum = 0, squares = 0, n = (double)p->count;
    *longest = 0;
    for (int64_t k = 0; k < p->count; k++) {
        sum += (double)p->tokens[k];
        squares += (double)p->tokens[k] * (double)p->tokens[k];
        *longest = p->tokens[k] > *longest ? p->tokens[k] : *longest;
    }
    double mean = sum / n, deviation = sqrt(fmax(0, squares / n - mean * mean));
    double most = (double)batch * mean + 3 * deviation * sqrt((double)batch);
    return (int64_t)ceil(fmin(most, (double)(batch * *longest)));
}

/* The measured row whose prompt is nearest to `tokens`. */
static int64_t nearest_row(const prompts *p, int64_t tokens)
{
    int64_t best = 0;
    for (int64_t k = 1; k < p->count; k++)
        if (llabs(p->tokens[k] - tokens) < llabs(p->tokens[best] - tokens))
            best = k;
    return best;
}

typedef struct slots {
    const vla_samples *samples;
    const vla_model *model; /* that plans are made of */
    void **items;
    int64_t count;
} slots;

static void slots_fini(slots *s)
{
    for (int64_t i = 0; i < s->count; i++)
        s->samples->slot_destroy(s->samples->user, s->items[i]);
    vlai_free(s->items);
}

/* Fills as many slots as the larger batch needs, so that any leading part of them has its share of the tokens. */
static vla_status fill_slots(prompts *p, const vla_samples *samples, int64_t count, int64_t total, slots *out, vla_error *err)
{
    out->samples = samples;
    out->items = vlai_calloc((size_t)count, sizeof *out->items);
    if (!out->items)
        return vlai_nomem(err, (size_t)count * sizeof *out->items);
    int64_t given = 0;
    for (; out->count < count; out->count++) {
        VLA_TRY(samples->slot_create(samples->user, &out->items[out->count], err));
        int64_t due = (int64_t)ceil((double)total * (double)(out->count + 1) / (double)count) - given;
        int64_t k = nearest_row(p, due);
        vlai_wallx_slot *slot = out->items[out->count];
        vla_status status = prompt_of(p, p->rows[k], &slot->sample, err);
        if (status != VLA_OK) {
            out->count++; /* it was made, and is released with the others */
            return status;
        }
        given += p->tokens[k];
    }
    return VLA_OK;
}

static size_t slot_bytes(const vlai_wallx_slot *s)
{
    const vlai_sample *m = &s->sample;
    return sizeof *s + m->pixel_capacity + m->number_capacity + m->prompt.capacity + m->text.capacity +
           (m->ids.capacity + m->action_tokens.capacity) * sizeof *m->ids.data + m->label_capacity +
           (size_t)(m->horizon * m->action_width) * sizeof(float);
}

/* What a worker takes, by making two and reading a sample with each: the first also loads what all share. */
static vla_status measure_worker(const vlai_wallx_setup *s, size_t *bytes, vla_error *err)
{
    void *workers[2] = {NULL, NULL}, *slot = NULL;
    size_t before = 0;
    vla_status status = s->samples.slot_create(s->samples.user, &slot, err);
    for (int i = 0; i < 2 && status == VLA_OK; i++) {
        before = vlai_anonymous_bytes();
        status = s->samples.worker_create(s->samples.user, &workers[i], err);
        for (int64_t k = 0; k < 4 && status == VLA_OK; k++) { /* rows of several files */
            vla_sample_key key = {.place = k * (s->samples.count - 1) / 3, .stream = VLA_SAMPLES_TRAIN};
            key.position = (uint64_t)key.place;
            status = s->samples.read(s->samples.user, workers[i], &key, slot, err);
        }
    }
    size_t after = vlai_anonymous_bytes();
    *bytes = after > before ? after - before : 0;
    for (int i = 0; i < 2; i++)
        if (workers[i])
            s->samples.worker_destroy(s->samples.user, workers[i]);
    if (slot)
        s->samples.slot_destroy(s->samples.user, slot);
    return status;
}

/* ---- samples of other sizes ---- */

/* A model whose batches have the sizes that were asked for, whatever the slots hold. */
typedef struct assumed {
    const vlai_wallx_setup *setup;
    int64_t labels; /* of a sample with action tokens */
    vlai_wallx_sizes sizes;
    vla_model model;
} assumed;

static vla_status assumed_params(void *user, vla_store *store, vla_error *err)
{
    const vla_model *m = &((const assumed *)user)->setup->model;
    return m->params(m->user, store, err);
}

/* Discrete actions are text. */
static int64_t flow_tokens(const assumed *a)
{
    return a->setup->contract->discrete ? 0 : a->setup->contract->horizon;
}

static vla_status assumed_shape(void *user, void *const *slots, int64_t count, void *shape, vla_error *err)
{
    const assumed *a = user;
    vlai_wallx_shape *out = shape;
    (void)slots;
    VLA_TRY(vlai_wallx_shape_plan(a->setup->config, count, a->sizes.text_tokens, flow_tokens(a), a->sizes.images, a->sizes.grid, out, err));
    if (a->setup->contract->discrete)
        out->labels = count * a->labels;
    return VLA_OK;
}

static vla_status assumed_build(void *user, const void *shape, vla_graph **out, vla_error *err)
{
    const vla_model *m = &((const assumed *)user)->setup->model;
    return m->build(m->user, shape, out, err);
}

/* Tokens of a sample besides its text. */
static int64_t other_tokens(const assumed *a)
{
    int64_t tokens = flow_tokens(a);
    for (int64_t i = 0; i < a->sizes.images; i++) {
        const int32_t *g = &a->sizes.grid[3 * i];
        tokens += vlai_image_tokens(&a->setup->contract->image, (int64_t[]){g[0], g[1], g[2]});
    }
    return tokens;
}

/* What was not asked for is what the data set has. */
static void assume(look *l, const slots *made, assumed *a)
{
    const vlai_wallx_sizes *wanted = l->sizes;
    const vlai_sample *sample = &((const vlai_wallx_slot *)made->items[0])->sample;
    for (size_t i = 0; i < sample->picture_count && i < VLAI_WALLX_PLAN_IMAGES; i++)
        for (int d = 0; d < 3; d++)
            a->sizes.grid[3 * i + (size_t)d] = (int32_t)sample->pictures[i].grid[d];
    a->labels = (int64_t)sample->labelled;
    a->sizes.images = (int64_t)sample->picture_count;
    a->sizes.vocab = a->setup->config->vocab_size;
    a->sizes.text_tokens = l->out->tokens_longest - other_tokens(a);
    if (wanted->text_tokens)
        a->sizes.text_tokens = wanted->text_tokens;
    if (wanted->images) {
        a->sizes.images = wanted->images;
        memcpy(a->sizes.grid, wanted->grid, sizeof wanted->grid);
    }
    char pictures[512] = "no pictures";
    for (int64_t i = 0, at = 0; i < a->sizes.images && at < (int64_t)sizeof pictures; i++)
        at += snprintf(pictures + at, sizeof pictures - (size_t)at, "%s%dx%d", i ? ", " : "pictures of ", a->sizes.grid[3 * i + 1], a->sizes.grid[3 * i + 2]);
    vlai_look_say(l, "sizes", VLAI_CHECK_OK, "a sample has %" PRId64 " text tokens%s and %s patches, the embedding %" PRId64 " rows", a->sizes.text_tokens,
                  wanted->text_tokens ? "" : " at most", pictures, a->sizes.vocab);
    if (!wanted->text_tokens && !wanted->images)
        return;
    l->out->tokens_longest = a->sizes.text_tokens + other_tokens(a);
    l->out->tokens_batch = l->out->tokens_longest * a->setup->options.batch;
    a->model = a->setup->model;
    a->model.user = a;
    a->model.params = assumed_params;
    a->model.shape = assumed_shape;
    a->model.build = assumed_build;
}

/* ---- settings that fit ---- */

/* What is scarce: device memory on a GPU, else host memory, where the snapshot gives way by itself. */
static size_t scarce(const vlai_run_memory *m)
{
    return m->device.total ? m->device.total : m->total - m->snapshot;
}

static size_t peak_of(const vlai_wallx_setup *s, const slots *slots, const vlai_run_settings *settings, size_t available,
                      const vlai_run_memory *base)
{
    vlai_run_memory m = {.loader = base->loader, .process = base->process};
    vla_error ignored = VLA_ERROR_INIT;
    vla_status status = vlai_run_memory_plan(slots->model, &s->options.adamw, slots->items, settings, available, &m, &ignored);
    return status == VLA_OK ? scarce(&m) : SIZE_MAX;
}

static void offer(vlai_preflight *out, size_t total, size_t limit, const char *text)
{
    if (total > limit || out->fit_count == VLAI_PREFLIGHT_FITS)
        return;
    snprintf(out->fits[out->fit_count].text, sizeof out->fits->text, "%s", text);
    out->fits[out->fit_count++].total = total;
}

/* The largest batch that fits with these settings, 0 when none does. Memory grows with the batch. */
static int64_t largest_batch(const vlai_wallx_setup *s, const slots *slots, vlai_run_settings settings, size_t limit, size_t available,
                             const vlai_run_memory *base)
{
    int64_t fits = 0, too_much = settings.batch, all = settings.batch * settings.accumulation;
    while (too_much - fits > 1 + too_much / 16) { /* near enough */
        settings.batch = fits + (too_much - fits) / 2;
        settings.accumulation = (all + settings.batch - 1) / settings.batch;
        if (peak_of(s, slots, &settings, available, base) <= limit)
            fits = settings.batch;
        else
            too_much = settings.batch;
    }
    return fits;
}

/* Micro-batches of at most `most` samples, as even as they can be, that make up a step of `all`. */
static void offer_batch(const vlai_wallx_setup *s, const slots *slots, const vlai_run_settings *base, int64_t all, int64_t most, size_t limit,
                        const char *with, vlai_preflight *out)
{
    vlai_run_settings even = *base;
    char text[160];
    even.accumulation = (all + most - 1) / most;
    even.batch = (all + even.accumulation - 1) / even.accumulation;
    snprintf(text, sizeof text, "%s--hyperparams.batch_size_per_gpu=%" PRId64 " --hyperparams.gradient_accumulation_steps=%" PRId64, with, even.batch,
             even.accumulation);
    offer(out, peak_of(s, slots, &even, out->available, &out->memory), limit, text);
}

static void find_settings(look *l, const vlai_wallx_setup *s, const slots *slots, const vlai_run_settings *now, size_t limit)
{
    vlai_preflight *out = l->out;
    char text[160];
    vlai_run_settings less = *now;
    less.layout = VLA_MEMORY_LIFETIMES;
    less.automatic = false; /* settings are named that say what they do */
    if (now->recompute == VLA_RECOMPUTE_NONE) {
        less.recompute = VLA_RECOMPUTE_CHEAP;
        offer(out, peak_of(s, slots, &less, out->available, &out->memory), limit, "WALLX_PERF_ALLOC=1 in the environment");
    }
    if (now->recompute != VLA_RECOMPUTE_LAYER || now->layout != VLA_MEMORY_LIFETIMES) {
        less.recompute = VLA_RECOMPUTE_LAYER;
        offer(out, peak_of(s, slots, &less, out->available, &out->memory), limit,
              "WALLX_PERF_ALLOC=1 in the environment and --memory.recompute=layer");
    }
    int64_t all = now->batch * now->accumulation, batch = largest_batch(s, slots, *now, limit, out->available, &out->memory);
    if (batch)
        offer_batch(s, slots, now, all, batch, limit, "", out);
    if (out->fit_count < VLAI_PREFLIGHT_FITS) {
        int64_t more = largest_batch(s, slots, less, limit, out->available, &out->memory);
        if (more && more != batch)
            offer_batch(s, slots, &less, all, more, limit, "WALLX_PERF_ALLOC=1, --memory.recompute=layer and ", out);
    }
    bool fp32 = now->numerics == VLA_FP32;
    if ((fp32 || now->numerics == VLA_BF16_MASTER) && out->fit_count < VLAI_PREFLIGHT_FITS) {
        vlai_run_settings narrow = less;
        narrow.numerics = fp32 ? VLA_BF16_MASTER : VLA_BF16_SR;
        snprintf(text, sizeof text, "--training.numerics=%s with WALLX_PERF_ALLOC=1 and --memory.recompute=layer", fp32 ? "bf16" : "bf16-sr");
        offer(out, peak_of(s, slots, &narrow, out->available, &out->memory), limit, text);
    }
    for (int64_t half = batch / 2; half >= 1 && out->fit_count < VLAI_PREFLIGHT_FITS; half /= 2)
        offer_batch(s, slots, now, all, half, limit, "", out);
}

/* ---- the check ---- */

static vla_status say_short(const vlai_preflight *p, size_t peak, size_t limit, vla_error *err)
{
    const vlai_run_memory *m = &p->memory;
    const vlai_run_device *d = &m->device;
    bool on_device = d->total > 0;
    char hint[512];
    snprintf(hint, sizeof hint, "the weights, gradients and optimizer alone need more than there is: take a %s with more memory",
             on_device ? "GPU" : "machine");
    for (size_t i = 0, at = 0; i < p->fit_count && at < sizeof hint; i++)
        at += (size_t)snprintf(hint + at, sizeof hint - at, "%s%s (%.2f GB)", i ? "; or " : "would fit: ", p->fits[i].text,
                               1e-9 * (double)p->fits[i].total);
    return vlai_fail_hint(err, on_device ? VLA_E_DEVICE_NOMEM : VLA_E_NOMEM, hint,
                          "the run does not fit in %smemory: it needs %.3f GB, %.3f GB are available (weights %.3f, gradients %.3f, "
                          "optimizer %.3f, activations %.3f, inputs %.3f, scratch %.3f, the rest %.3f GB)",
                          on_device ? "device " : "", 1e-9 * (double)peak, 1e-9 * (double)limit,
                          1e-9 * (double)(on_device ? d->weights : m->weights), 1e-9 * (double)(on_device ? d->gradients : m->gradients),
                          1e-9 * (double)(on_device ? d->optimizer : m->optimizer), 1e-9 * (double)(on_device ? d->activations : m->activations),
                          1e-9 * (double)(on_device ? d->inputs : m->inputs), 1e-9 * (double)(on_device ? d->workspace : m->workspace),
                          1e-9 * (double)(on_device ? d->driver + d->collectives : m->loader + m->process));
}

static vla_status plan_run(look *l, prompts *p, slots *made, assumed *a, vlai_run_settings *settings, vla_error *err)
{
    const vlai_wallx_setup *s = vlai_wallx_task_setup(l->task);
    const vla_trainer_options *o = &l->options;
    vlai_preflight *out = l->out;
    size_t worker;
    VLA_TRY(measure_worker(s, &worker, err));
    out->memory.process = vlai_anonymous_bytes();
    out->available = vlai_available_bytes();
    VLA_TRY(prompts_open(p, l, err));
    VLA_TRY(measure_prompts(p, err));
    int64_t validation = o->validation_batch ? o->validation_batch : o->batch;
    if (validation > s->validation.count)
        validation = s->validation.count ? s->validation.count : -1;
    int64_t count = validation > o->batch ? validation : o->batch;
    out->tokens_batch = batch_tokens(p, o->batch, &out->tokens_longest);
    VLA_TRY(fill_slots(p, &s->samples, count, (int64_t)ceil((double)out->tokens_batch * (double)count / (double)o->batch), made, err));
    a->setup = s;
    assume(l, made, a);
    made->model = a->model.build ? &a->model : &s->model;
    vlai_loader_options loader = vlai_loader_of(o);
    int64_t workers = o->workers > 0 ? o->workers : 1;
    out->memory.loader = (size_t)vlai_loader_slots(&loader) * slot_bytes(made->items[0]) + (size_t)workers * worker;
    bool cpu = !l->executor;
    int gpus = vlai_gpu_count(), here = cpu || gpus < 1 || l->ranks < gpus ? l->ranks : gpus; /* CPU ranks are taken to be on this machine */
    *settings = (vlai_run_settings){.batch = o->batch, .accumulation = o->accumulation, .validation_batch = validation,
                                    .numerics = o->numerics, .recompute = o->recompute, .layout = o->layout, .threads = o->threads, .fuse = o->fuse,
                                    .whole_step = o->whole_step || (l->ranks > 1 && o->overlap && o->accumulation == 1),
                                    .fast = o->fast, .visual_layers = o->visual_layers, .fast_attention = o->fast_attention,
                                    .automatic = o->recompute_auto, .limit = o->memory_limit, .keep = o->memory_keep, .executor = l->executor,
                                    .shard = {sizeof(vla_shard_options), 0, l->ranks, o->bucket_bytes, o->zero}, .ranks_here = here, .overlap = o->overlap,
                                    .gradient_dtype = o->gradient_dtype};
    return vlai_run_memory_plan(made->model, &o->adamw, made->items, settings, out->available, &out->memory, err);
}

void vlai_look_memory(look *l)
{
    vlai_preflight *out = l->out;
    vla_error e = VLA_ERROR_INIT;
    prompts *p = NULL;
    slots made = {0};
    assumed a = {0};
    vlai_run_settings settings;
    if (!l->task) {
        vlai_look_say(l, "memory", VLAI_CHECK_SKIPPED, "needs a run that can start");
        return;
    }
    const vlai_wallx_setup *s = vlai_wallx_task_setup(l->task);
    if (s->options.batch > s->samples.count && !l->sizes->text_tokens && !l->sizes->images && !l->sizes->vocab) {
        vlai_look_say(l, "memory", VLAI_CHECK_SKIPPED, "needs a batch that the training samples fill");
        return;
    }
    if (l->sizes->vocab)
        vlai_wallx_task_rows(l->task, l->sizes->vocab);
    p = vlai_calloc(1, sizeof *p);
    vla_status status = p ? plan_run(l, p, &made, &a, &settings, &e) : vlai_nomem(&e, sizeof *p);
    if (vlai_look_judge(l, "memory", status, &e)) {
        out->planned = true;
        const vlai_run_device *d = &out->memory.device;
        /* `process` is held by this program now, and will be by the one that trains */
        size_t here = settings.ranks_here > 1 ? (size_t)settings.ranks_here : 1, host = out->available + out->memory.process;
        size_t limit = d->total ? d->available : host / here, peak = scarce(&out->memory);
        if (peak > limit) {
            /* what is available comes and goes: settings are named that leave a tenth of it, on a GPU a fiftieth */
            find_settings(l, vlai_wallx_task_setup(l->task), &made, &settings, d->total ? limit / 50 * 49 : limit / 10 * 9);
            vlai_look_judge(l, "memory", say_short(out, peak, limit, &e), &e);
        } else {
            vlai_look_say(l, "memory", VLAI_CHECK_OK, "%.3f GB at the peak, %.3f GB available%s; a batch of %" PRId64 " has at most about %" PRId64
                          " tokens, a prompt %" PRId64 "%s%s", 1e-9 * (double)(d->total ? peak : out->memory.total), 1e-9 * (double)limit,
                          here > 1 && !d->total ? " to each rank of this machine" : "",
                          settings.batch, out->tokens_batch, out->tokens_longest, settings.automatic ? "; recompute " : "",
                          settings.automatic ? vlai_recompute_name(out->memory.recompute) : "");
        }
    }
    if (made.samples)
        slots_fini(&made);
    if (p)
        prompts_fini(p);
    vlai_free(p);
}
