/* vla inspect batch: the samples of a training batch as the model gets them, with their pictures. */
#include "args.h"
#include "command.h"
#include "inspect.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/text.h"
#include "format/image.h"
#include "train/wallx_task.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char help[] =
    "Usage: vla inspect batch --config FILE [--section.key=value ...] [options]\n\n"
    "Reads one batch as training reads it and shows each sample: where it comes from, its text as it is tokenised, tokens,\n"
    "flow time, normalised state and actions with their masks, pictures.\n\n"
    "  --step N       the batch of this step (1 = the first)\n"
    "  --validation   of the held-out samples instead\n"
    "  --out DIR      write the pictures, resized as the model sees them: DIR/SAMPLE_CAMERA.png\n"
    "  --json         one JSON object per sample\n\n"
    "Examples:\n"
    "  vla inspect batch --config configs/libero.yml --out /tmp/batch\n"
    "  vla inspect batch --config configs/demo.yml --step 100 --hyperparams.batch_size_per_gpu=2 --json | jq .text\n";

typedef struct {
    const char *config, *out;
    int64_t step;
    bool validation, json;
} request;

/* Runs of one picture's tokens are shown as one with a count. */
static void shorten(const char *text, vlai_text *out)
{
    static const char pad[] = "<|image_pad|>", action[] = "<|action|>";
    const char *const repeated[] = {pad, action};
    while (*text) {
        bool found = false;
        for (int k = 0; k < 2 && !found; k++) {
            size_t n = strlen(repeated[k]), count = 0;
            for (; !strncmp(text, repeated[k], n); text += n)
                count++;
            found = count > 0;
            if (count > 1)
                vlai_text_printf(out, "%s x %zu", repeated[k], count);
            else if (count)
                vlai_text_puts(out, repeated[k]);
        }
        if (!found)
            vlai_text_put(out, text++, 1);
    }
}

static void put_numbers(vlai_text *out, const float *values, const float *mask, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (mask[i] != 0)
            vlai_text_printf(out, " %.3f", (double)values[i]);
        else
            vlai_text_puts(out, " -");
}

/* Smallest, mean and largest action of a chunk where the mask is 1. */
static void put_range(vlai_text *out, const vlai_sample *s)
{
    double low = INFINITY, high = -INFINITY, sum = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < s->horizon * s->action_width; i++) {
        double v = (double)s->action[i];
        if (s->dof_mask[i] == 0)
            continue;
        low = v < low ? v : low;
        high = v > high ? v : high;
        sum += v;
        n++;
    }
    vlai_text_printf(out, "  actions   %lld x %lld, %lld with loss", (long long)s->horizon, (long long)s->action_width, (long long)n);
    if (n)
        vlai_text_printf(out, ", %.3f to %.3f, mean %.3f", low, high, sum / (double)n);
    vlai_text_puts(out, "\n");
}

static void put_sample(const vlai_wallx_setup *s, const vlai_wallx_slot *slot, int64_t i, vlai_text *out)
{
    const vlai_sample *sample = &slot->sample;
    vlai_text_printf(out, "sample %lld: episode %lld, frame %lld, row %lld, flow time %.4f, %zu tokens\n", (long long)i,
                     (long long)sample->episode, (long long)sample->frame, (long long)sample->row, (double)slot->time,
                     sample->ids.count);
    vlai_text_puts(out, "  text      ");
    vlai_text text = {0};
    shorten(sample->text.data ? sample->text.data : "", &text);
    for (const char *p = text.data ? text.data : ""; *p; p++)
        if (*p == '\n')
            vlai_text_puts(out, "\n            ");
        else
            vlai_text_put(out, p, 1);
    vlai_text_fini(&text);
    vlai_text_puts(out, "\n  state    ");
    put_numbers(out, sample->state, sample->state_mask, sample->state_width);
    vlai_text_puts(out, "\n");
    put_range(out, sample);
    vlai_text_puts(out, "  first    ");
    put_numbers(out, sample->action, sample->dof_mask, sample->action_width);
    vlai_text_puts(out, "\n");
    for (size_t k = 0; k < sample->picture_count; k++) {
        const vlai_sample_picture *p = &sample->pictures[k];
        vlai_text_printf(out, "  picture   %s as '%s': %lld x %lld, grid %lld x %lld\n", s->contract->cameras[p->camera].key,
                         s->contract->cameras[p->camera].display, (long long)p->width, (long long)p->height,
                         (long long)p->grid[1], (long long)p->grid[2]);
    }
}

static json_t *numbers(const float *values, int64_t n)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(list, json_real((double)values[i]));
    return list;
}

static void put_json(const vlai_wallx_setup *s, const vlai_wallx_slot *slot, vlai_text *out)
{
    const vlai_sample *sample = &slot->sample;
    json_t *ids = json_array(), *pictures = json_array();
    for (size_t i = 0; i < sample->ids.count; i++)
        json_array_append_new(ids, json_integer(sample->ids.data[i]));
    for (size_t k = 0; k < sample->picture_count; k++) {
        const vlai_sample_picture *p = &sample->pictures[k];
        json_array_append_new(pictures, json_pack("{s:s, s:I, s:I}", "camera", s->contract->cameras[p->camera].key, "width",
                                                  (json_int_t)p->width, "height", (json_int_t)p->height));
    }
    int64_t chunk = sample->horizon * sample->action_width;
    json_t *object = json_pack(
        "{s:I, s:I, s:I, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "episode", (json_int_t)sample->episode, "frame",
        (json_int_t)sample->frame, "row", (json_int_t)sample->row, "time", (double)slot->time, "text",
        vlai_json_text(sample->text.data ? sample->text.data : ""), "ids", ids, "state", numbers(sample->state, sample->state_width),
        "state_mask", numbers(sample->state_mask, sample->state_width), "action", numbers(sample->action, chunk), "dof_mask",
        numbers(sample->dof_mask, chunk), "pictures", pictures);
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    vlai_text_puts(out, text ? text : "{}");
    vlai_text_puts(out, "\n");
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
}

static vla_status write_pictures(const vlai_wallx_setup *s, const vlai_wallx_slot *slot, int64_t i, const char *dir, vla_error *err)
{
    vla_status status = VLA_OK;
    for (size_t k = 0; status == VLA_OK && k < slot->sample.picture_count; k++) {
        const vlai_sample_picture *p = &slot->sample.pictures[k];
        char name[256], path[4096];
        snprintf(name, sizeof name, "%lld_%.200s.png", (long long)i, s->contract->cameras[p->camera].view);
        if (!vlai_path_join(path, sizeof path, dir, name))
            return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", dir, name);
        status = vlai_png_write(path, slot->sample.pixels + p->offset, (int)p->width, (int)p->height, err);
    }
    return status;
}

static vla_status show(const request *q, const vlai_wallx_setup *s, vla_error *err)
{
    const vla_samples *from = q->validation ? &s->validation : &s->samples;
    int64_t step_samples = s->options.batch * s->options.accumulation, epoch = from->count / step_samples * step_samples;
    if (q->validation)
        epoch = from->count;
    if (epoch < 1)
        return vlai_fail(err, VLA_E_INVALID, "there is no whole batch of %lld samples", (long long)step_samples);
    int64_t first, most = (from->count + step_samples - 1) / step_samples;
    if (q->validation && q->step > most)
        return vlai_fail(err, VLA_E_INVALID, "--validation --step %lld: the %lld held-out samples make %lld batches", (long long)q->step,
                         (long long)from->count, (long long)most);
    if (__builtin_mul_overflow(q->step, step_samples, &first))
        return vlai_fail(err, VLA_E_INVALID, "--step %lld: steps of %lld samples are counted up to %lld", (long long)q->step, (long long)step_samples,
                         (long long)(INT64_MAX / step_samples));
    if (q->out)
        VLA_TRY(vlai_mkdirs(q->out, err));
    void *slot = NULL, *worker = NULL;
    vlai_text out = {0};
    vla_status status = from->slot_create(from->user, &slot, err);
    if (status == VLA_OK)
        status = from->worker_create(from->user, &worker, err);
    for (int64_t i = 0; status == VLA_OK && i < step_samples; i++) {
        int64_t index = (q->step - 1) * step_samples + i;
        vla_sample_key key = {.epoch = index / epoch, .place = index % epoch,
                              .stream = q->validation ? VLA_SAMPLES_VALIDATION : VLA_SAMPLES_TRAIN};
        if (q->validation && key.epoch > 0)
            break;
        key.position = (uint64_t)(key.epoch * from->count + key.place);
        status = from->read(from->user, worker, &key, slot, err);
        if (status == VLA_OK && q->json)
            put_json(s, slot, &out);
        else if (status == VLA_OK)
            put_sample(s, slot, i, &out);
        if (status == VLA_OK && q->out)
            status = write_pictures(s, slot, i, q->out, err);
    }
    if (status == VLA_OK)
        status = vlai_text_status(&out, err);
    if (out.data)
        fputs(out.data, stdout);
    vlai_text_fini(&out);
    if (worker)
        from->worker_destroy(from->user, worker);
    if (slot)
        from->slot_destroy(from->user, slot);
    return status;
}

int inspect_batch(int argc, char **argv)
{
    request q = {.step = 1};
    const arg_row rows[] = {{"--config", ARG_TEXT, &q.config}, {"--out", ARG_TEXT, &q.out}, {"--step", ARG_STEP, &q.step},
                            {"--validation", ARG_FLAG, &q.validation}, {"--json", ARG_FLAG, &q.json}};
    static args a;
    a = (args){.name = "inspect batch", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .overrides = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    if (!q.config) {
        fprintf(stderr, "vla inspect batch: --config FILE is required\n");
        return EXIT_USAGE;
    }
    vla_error err = VLA_ERROR_INIT;
    vlai_config *config = NULL;
    vlai_wallx_task *task = NULL;
    vla_status status = vlai_config_load(q.config, a.override, a.overrides_given, &config, &err);
    if (status == VLA_OK)
        status = vlai_wallx_task_open(config, &task, &err);
    if (status == VLA_OK)
        status = show(&q, vlai_wallx_task_setup(task), &err);
    vlai_wallx_task_close(task);
    vlai_config_destroy(config);
    return status == VLA_OK ? EXIT_DONE : command_fail("inspect batch", &err);
}
