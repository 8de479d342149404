/* The checks, in the order in which a run would meet them. Each writes lines; what later checks need stays in `look`. */
#include "train/preflight.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "ckpt/ckpt.h"
#include "data/feed.h"
#include "dist/comm.h"
#include "model/wallx_layout.h"
#include "train/contract_config.h"
#include "train/device.h"
#include "train/preflight_internal.h"
#include "train/resume.h"
#include "train/wallx_batch.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- lines ---- */

static void add_line(look *l, const char *name, vlai_verdict verdict, vla_status status, const char *text, const char *hint)
{
    vlai_preflight *p = l->out;
    if (l->status != VLA_OK)
        return;
    l->status = vlai_reserve((void **)&p->checks, &p->capacity, p->count, sizeof *p->checks, l->err);
    if (l->status != VLA_OK)
        return;
    vlai_check_line line = {name, verdict, status, vlai_strdup(text), hint && *hint ? vlai_strdup(hint) : NULL};
    p->checks[p->count++] = line;
    if (!line.text || (hint && *hint && !line.hint))
        l->status = vlai_nomem(l->err, strlen(text));
}

void vlai_look_say(look *l, const char *name, vlai_verdict verdict, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    add_line(l, name, verdict, VLA_OK, text, NULL);
}

bool vlai_look_judge(look *l, const char *name, vla_status status, const vla_error *error)
{
    if (status != VLA_OK)
        add_line(l, name, VLAI_CHECK_FAIL, status, error->message, error->hint);
    return status == VLA_OK;
}

static void say_notes(look *l, const char *name, const char *notes)
{
    while (notes && *notes) {
        size_t n = strcspn(notes, "\n");
        if (n)
            vlai_look_say(l, name, VLAI_CHECK_NOTE, "%.*s", (int)n, notes);
        notes += n + (notes[n] == '\n');
    }
}

/* ---- checks ---- */

static void check_config(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    const vlai_config *c = l->config;
    for (size_t i = 0; i < c->notice_count; i++)
        vlai_look_say(l, "config", VLAI_CHECK_NOTE, "%s", c->notices[i]);
    if (vlai_look_judge(l, "config", vlai_config_check_training(c, &e), &e))
        vlai_look_say(l, "config", VLAI_CHECK_OK, "%s: batch %" PRId64 " x %" PRId64 ", %" PRId64 " steps, seed %" PRId64, c->path,
                      c->hyperparams.batch_size_per_gpu, c->hyperparams.gradient_accumulation_steps, c->scheduler.num_training_steps,
                      c->hyperparams.seed);
}

static void check_architecture(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    vla_status status = l->config->model.config_path ? vlai_wallx_config_load(l->config->model.config_path, &l->model, &e)
                                                     : vlai_fail(&e, VLA_E_INVALID, "model.config_path is not given");
    if (status == VLA_OK)
        status = vlai_wallx_config_update(&l->model, l->config, false, &e);
    l->has_model = vlai_look_judge(l, "architecture", status, &e);
    if (l->has_model)
        vlai_look_say(l, "architecture", VLAI_CHECK_OK, "%" PRId64 " layers of %" PRId64 " and %" PRId64 ", vision tower %" PRId64
                      " of %" PRId64 ", actions %" PRId64 ", state %" PRId64, l->model.num_hidden_layers, l->model.hidden_size,
                      l->model.action_hidden_size, l->model.vision.depth, l->model.vision.hidden_size, l->model.action_dim,
                      l->model.propri_dim);
}

static void check_processor(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    vlai_prompt_tokens tokens;
    vla_status status = vlai_config_tokenizer(l->config, &l->tok, &e);
    if (status == VLA_OK)
        status = vlai_prompt_tokens_of(l->tok, &tokens, &e);
    if (vlai_look_judge(l, "processor", status, &e))
        vlai_look_say(l, "processor", VLAI_CHECK_OK, "%s: %" PRId64 " tokens", vlai_tokenizer_name(l->tok), vlai_tokenizer_size(l->tok));
}

static void check_data(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    char root[4096];
    vla_status status = vlai_config_dataset(l->config, root, sizeof root, &e);
    if (status == VLA_OK)
        status = vlai_config_open_set(l->config, root, true, &l->set, &e);
    if (!vlai_look_judge(l, "data", status, &e))
        return;
    const vla_dataset_info *info = vla_dataset_info_get(l->set);
    vlai_look_say(l, "data", VLAI_CHECK_OK, "%s: LeRobot %s, %" PRId64 " of %" PRId64 " episodes, %" PRId64 " frames, %" PRId64 " cameras, %" PRId64
                  " instructions, %g frames/s", root, info->version, info->episodes, info->total_episodes, info->rows, info->cameras, info->tasks, info->fps);
    for (int64_t i = 0; i < info->warnings; i++)
        vlai_look_say(l, "data", VLAI_CHECK_NOTE, "%s", vla_dataset_warning(l->set, i));
}

static void check_keys(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    vlai_text notes = {0};
    if (!l->set || !l->tok) {
        vlai_look_say(l, "keys", VLAI_CHECK_SKIPPED, "needs the data set and the processor");
        return;
    }
    vla_status status = vlai_config_contract(l->config, l->tok, &l->contract, &e);
    l->has_contract = status == VLA_OK;
    if (status == VLA_OK)
        status = vlai_contract_check_set(&l->contract, l->set, &notes, &e);
    if (status == VLA_OK && l->has_model)
        status = vlai_wallx_check_pictures(&l->model, &l->contract.image, &e);
    if (vlai_look_judge(l, "keys", status, &e)) {
        l->keys_fit = true;
        vlai_look_say(l, "keys", VLAI_CHECK_OK, "%zu cameras, state '%s', actions '%s', %" PRId64 " actions a chunk", l->contract.camera_count,
                      l->contract.state_key, l->contract.action_key, l->contract.horizon);
    }
    say_notes(l, "statistics", notes.data);
    vlai_text_fini(&notes);
}

/* Share of values that q01 and q99 cut off, over all rows; statistics of another data set show here. */
static vla_status cut_share(look *l, const char *key, const vlai_norm *norm, double *share, int64_t *worst, vla_error *err)
{
    const float *values;
    int64_t dim, rows = vla_dataset_info_get(l->set)->rows;
    *share = 0;
    *worst = 0;
    VLA_TRY(vla_dataset_numbers(l->set, key, &values, &dim, err));
    for (int64_t i = 0; i < dim && i < norm->dims; i++) {
        int64_t outside = 0;
        double low = norm->q01[i], high = norm->q99[i];
        for (int64_t r = 0; r < rows; r++)
            outside += values[r * dim + i] < low - 1e-6 * fabs(low) || values[r * dim + i] > high + 1e-6 * fabs(high);
        if (rows && (double)outside / (double)rows > *share) {
            *share = (double)outside / (double)rows;
            *worst = i;
        }
    }
    return VLA_OK;
}

static void check_statistics(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    if (!l->keys_fit) {
        vlai_look_say(l, "statistics", VLAI_CHECK_SKIPPED, "needs keys that fit");
        return;
    }
    if (l->contract.dof.six || l->contract.pos.six || l->contract.dof.relative) {
        vlai_look_say(l, "statistics", VLAI_CHECK_OK, "%s; not compared with the values, which the layout rewrites", l->config->data.norm_stats_path);
        return;
    }
    const struct {
        const char *key;
        const vlai_norm *norm;
    } both[] = {{l->contract.state_key, &l->contract.state}, {l->contract.action_key, &l->contract.action}};
    for (int i = 0; i < 2; i++) {
        double share;
        int64_t worst;
        if (!vlai_look_judge(l, "statistics", cut_share(l, both[i].key, both[i].norm, &share, &worst, &e), &e))
            continue;
        vlai_look_say(l, "statistics", share > 0.1 ? VLAI_CHECK_NOTE : VLAI_CHECK_OK, "%s: at most %.2g %% of a dimension is cut off at q01 and q99 (dimension %" PRId64 ")%s",
                      both[i].key, 100 * share, worst, share > 0.1 ? "; 2 % are usual: are these the statistics of this data set?" : "");
    }
}

/* How far the chunk that the action tokens of a sample stand for is from the sample's own. */
static vla_status read_back(const vlai_contract *c, const vlai_sample *s, double *apart, bool *whole, vla_error *err)
{
    int64_t dims = 0, k = 0;
    for (int64_t d = 0; d < s->action_width; d++)
        dims += s->dof_mask[d] != 0;
    float *chunk = vlai_array((size_t)(s->horizon * dims), sizeof *chunk);
    if (!chunk)
        return vlai_nomem(err, (size_t)(s->horizon * dims) * sizeof *chunk);
    vla_status status = vlai_fast_decode(c->fast, s->action_tokens.data, s->action_tokens.count, s->horizon, dims, chunk, whole, err);
    *apart = 0;
    for (int64_t t = 0; t < s->horizon && status == VLA_OK; t++)
        for (int64_t d = 0; d < s->action_width; d++)
            if (s->dof_mask[d] != 0)
                *apart = fmax(*apart, fabs((double)chunk[k++] - (double)s->action[t * s->action_width + d]));
    vlai_free(chunk);
    return status;
}

static void check_action_tokens(look *l, const vlai_sample *s)
{
    vla_error e = VLA_ERROR_INIT;
    double apart;
    bool whole;
    if (!s->action_tokens.count || !vlai_look_judge(l, "samples", read_back(&l->contract, s, &apart, &whole, &e), &e))
        return;
    if (whole)
        vlai_look_say(l, "samples", VLAI_CHECK_OK, "a chunk in %zu action tokens, which stand for it within %.3g (of -1 to 1)", s->action_tokens.count, apart);
    else
        vlai_look_say(l, "samples", VLAI_CHECK_NOTE, "the action tokens of a chunk do not stand for it: the FAST processor lacks characters for these actions");
}

/* First, middle and last row: decoding, resizing, prompt. */
static void check_samples(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    vlai_feed *feed = NULL;
    vlai_sample sample = {0};
    if (!l->keys_fit) {
        vlai_look_say(l, "samples", VLAI_CHECK_SKIPPED, "needs keys that fit");
        return;
    }
    int64_t rows = vla_dataset_info_get(l->set)->rows, read = 0;
    vla_status status = vlai_feed_create(l->set, &l->contract, l->tok, &feed, &e);
    for (int k = 0; k < 3 && status == VLA_OK; k++, read++)
        status = vlai_feed_read(feed, k * (rows - 1) / 2, &sample, &e);
    if (vlai_look_judge(l, "samples", status, &e))
        vlai_look_say(l, "samples", VLAI_CHECK_OK, "%" PRId64 " read: %zu tokens, %" PRId64 " patches of %zu pictures", read, sample.ids.count,
                      sample.patches, sample.picture_count);
    if (status == VLA_OK)
        check_action_tokens(l, &sample);
    vlai_sample_fini(&sample);
    vlai_feed_destroy(feed);
}

/* Header of the weights against the architecture; no tensor is read. */
static vla_status read_header(look *l, const char *path, bool partial, vla_error *err)
{
    vlai_safetensors *st = NULL;
    vlai_wallx_weight *weights = NULL;
    vlai_wallx_layout *layout = NULL;
    vlai_wallx_config model = l->model;
    size_t count;
    vla_status status;
    VLA_TRY(vlai_safetensors_open(path, &st, err));
    VLA_TRY_GOTO(vlai_wallx_stored_sizes(st, &model.vocab_size, NULL, NULL, err), done);
    VLA_TRY_GOTO(vlai_wallx_weights(&model, &weights, &count, err), done);
    VLA_TRY_GOTO(vlai_wallx_layout_open(st, weights, count, &layout, err), done);
    if (!partial)
        VLA_TRY_GOTO(vlai_wallx_layout_require(layout, err), done);
    if (l->tok && model.vocab_size < vlai_tokenizer_size(l->tok) && !partial) {
        status = vlai_fail_hint(err, VLA_E_SHAPE, "model.processor_path must be that of the weights",
                                "%s: the embedding has %" PRId64 " rows, the processor %" PRId64 " tokens", path, model.vocab_size,
                                vlai_tokenizer_size(l->tok));
        goto done;
    }
    vlai_look_say(l, "weights", VLAI_CHECK_OK, "%s: %zu tensors, %" PRId64 " embedding rows%s", path, vlai_safetensors_count(st),
                  model.vocab_size, partial ? "; what it lacks is drawn" : ", all that the architecture has");
done:
    vlai_wallx_layout_close(layout);
    vlai_free(weights);
    vlai_safetensors_close(st);
    return status;
}

static void check_weights(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    const char *from = l->config->checkpoint.resume_from, *pretrained = l->config->model.pretrained_path;
    vlai_resume_kind kind = vlai_resume_kind_of(from);
    if (!l->has_model) {
        vlai_look_say(l, "weights", VLAI_CHECK_SKIPPED, "needs the architecture");
    } else if (kind == VLAI_RESUME_WEIGHTS) {
        vlai_look_judge(l, "weights", read_header(l, from, false, &e), &e);
    } else if (kind == VLAI_RESUME_RUN) {
        vla_checkpoint *c;
        if (vlai_look_judge(l, "weights", vla_checkpoint_open(from, &c, &e), &e)) {
            vlai_look_say(l, "weights", VLAI_CHECK_OK, "%s: checkpoint of step %" PRId64, vla_checkpoint_path(c), vla_checkpoint_step(c));
            vla_checkpoint_close(c);
        }
    } else if (pretrained) {
        vlai_look_judge(l, "weights", read_header(l, pretrained, true, &e), &e);
    } else {
        vlai_look_say(l, "weights", VLAI_CHECK_NOTE, "none are given: all are drawn from the seed");
    }
}

/* What vla train does first: split, order, options; with a checkpoint, whether it may go on from it. */
static void check_run(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    for (size_t i = 0; i < l->out->count; i++)
        if (l->out->checks[i].verdict == VLAI_CHECK_FAIL) {
            vlai_look_say(l, "run", VLAI_CHECK_SKIPPED, "needs all of the above");
            return;
        }
    if (!vlai_look_judge(l, "run", vlai_wallx_task_open(l->config, &l->task, &e), &e))
        return;
    const vlai_wallx_setup *s = vlai_wallx_task_setup(l->task);
    vla_trainer_options *o = &l->options;
    *o = s->options;
    o->world = l->ranks;
    o->allow_change = l->allow_change;
    vla_checkpoint *c = NULL;
    vla_status status = o->resume ? vla_checkpoint_open(o->resume, &c, &e) : VLA_OK;
    if (status == VLA_OK && c)
        status = vlai_state_follow(vla_checkpoint_state(c), vla_checkpoint_path(c), o, &e);
    if (status == VLA_OK)
        status = vlai_state_check_allowed(c ? vla_checkpoint_state(c) : NULL, c ? vla_checkpoint_path(c) : "", o, s->samples.count, &e);
    const int64_t step = o->batch * o->accumulation * l->ranks;
    if (status == VLA_OK && s->samples.count < step)
        status = vlai_fail_hint(&e, VLA_E_INVALID, "lower hyperparams.batch_size_per_gpu or gradient_accumulation_steps, or add data",
                                "the training split has %" PRId64 " samples, a step takes %" PRId64 " x %" PRId64 " x %d rank%s", s->samples.count,
                                o->batch, o->accumulation, l->ranks, l->ranks == 1 ? "" : "s");
    vlai_progress progress;
    if (status == VLA_OK && c)
        status = vlai_state_read(vla_checkpoint_state(c), vla_checkpoint_path(c), o, s->samples.count, &progress, &e);
    vla_checkpoint_close(c);
    if (!vlai_look_judge(l, "run", status, &e))
        return;
    vlai_look_say(l, "run", VLAI_CHECK_OK, "%" PRId64 " training samples of %" PRId64 " episodes, %" PRId64 " validation samples of %" PRId64
                  ", %" PRId64 " steps an epoch", s->samples.count, s->train_episodes, s->validation.count, s->validation_episodes,
                  s->samples.count / step);
}

static void check_disk(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    if (!l->out->planned) {
        vlai_look_say(l, "disk", VLAI_CHECK_SKIPPED, "needs the plan");
        return;
    }
    const vla_trainer_options *o = &l->options;
    uint64_t bytes = l->out->memory.files, room;
    l->out->checkpoint_bytes = bytes;
    if (!vlai_look_judge(l, "disk", vlai_ckpt_free_bytes(o->run, &room, &e), &e))
        return;
    l->out->disk_free = room;
    l->out->keep_fits = bytes && room / bytes > 1 ? (int64_t)(room / bytes) - 1 : 0;
    int64_t saves = 1 + (o->save_interval > 0 && o->steps > 0 ? o->steps / o->save_interval : 0);
    if (!vlai_look_judge(l, "disk", vlai_ckpt_check_room(o->run, bytes, o->keep_last, o->steps > 0 ? saves : -1, &e), &e))
        return;
    bool all_kept = o->keep_last == 0 && o->steps > 0 && (uint64_t)saves > room / (bytes ? bytes : 1);
    vlai_look_say(l, "disk", all_kept ? VLAI_CHECK_NOTE : VLAI_CHECK_OK, "%.3f GB a checkpoint, %.1f GB free at %s, keep_last up to %" PRId64
                  " fits%s", 1e-9 * (double)bytes, 1e-9 * (double)room, o->run, l->out->keep_fits,
                  all_kept ? "; the run keeps all its checkpoints, and they do not all fit" : "");
}

/* The GPU of a run that wants one. It is opened, so that what remains of its memory is known. */
static void check_device(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    char device[VLAI_DEVICE_NAME];
    vla_status status = vlai_device_choose(l->config->training.device, device, &e);
    bool cpu = status == VLA_OK && !strcmp(device, "cpu");
    if (status == VLA_OK && !cpu)
        status = vla_executor_create_on(device, 0, &l->executor, &e);
    if (!vlai_look_judge(l, "device", status, &e))
        return;
    if (cpu)
        vlai_look_say(l, "device", VLAI_CHECK_OK, "cpu");
    else
        vlai_look_say(l, "device", VLAI_CHECK_OK, "%s: %.3f GB free", device, 1e-9 * (double)vlai_device_room(l->executor, 0, 0));
}

/* Whether the ranks could be connected, and how many machines they take: they themselves meet when the run starts. */
static void check_collectives(look *l)
{
    vla_error e = VLA_ERROR_INIT;
    char device[VLAI_DEVICE_NAME], by[64];
    if (l->ranks == 1) {
        vlai_look_say(l, "collectives", VLAI_CHECK_SKIPPED, "one rank: there is nothing to connect");
        return;
    }
    if (vlai_device_choose(l->config->training.device, device, &e) != VLA_OK) {
        vlai_look_say(l, "collectives", VLAI_CHECK_SKIPPED, "needs the device");
        return;
    }
    if (!vlai_look_judge(l, "collectives", vlai_comm_available(device, by, sizeof by, &e), &e))
        return;
    int gpus = vlai_gpu_count();
    if (!strcmp(device, "cpu"))
        vlai_look_say(l, "collectives", VLAI_CHECK_OK, "%s, %d ranks on CPUs; memory is that of one of them", by, l->ranks);
    else if (l->ranks > gpus)
        vlai_look_say(l, "collectives", VLAI_CHECK_NOTE, "%s, %d ranks; this machine shows %d GPU%s, so that they take %d such machines; "
                      "memory is that of one rank", by, l->ranks, gpus, gpus == 1 ? "" : "s", (l->ranks + gpus - 1) / gpus);
    else
        vlai_look_say(l, "collectives", VLAI_CHECK_OK, "%s, %d ranks, %d GPU%s on this machine; memory is that of one rank", by, l->ranks, gpus,
                      gpus == 1 ? "" : "s");
}

static void close_first_part(look *l)
{
    vla_dataset_close(l->set);
    if (l->has_contract)
        vlai_contract_fini(&l->contract);
    vlai_tokenizer_close(l->tok);
    l->set = NULL;
    l->tok = NULL;
    l->has_contract = false;
}

vla_status vlai_preflight_run(const vlai_config *config, const vlai_preflight_options *options, vlai_preflight *out, vla_error *err)
{
    static const vlai_preflight_options one = {.ranks = 1};
    const vlai_preflight_options *o = options ? options : &one;
    *out = (vlai_preflight){0};
    look l = {.config = config, .ranks = o->ranks > 1 ? o->ranks : 1, .allow_change = o->allow_change, .sizes = &o->sizes, .out = out, .err = err};
    check_config(&l);
    check_architecture(&l);
    check_processor(&l);
    check_data(&l);
    check_keys(&l);
    check_statistics(&l);
    check_samples(&l);
    check_weights(&l);
    check_device(&l);
    close_first_part(&l); /* the task opens them anew, and memory is measured as it holds them */
    check_run(&l);
    if (l.status == VLA_OK)
        vlai_look_memory(&l);
    check_disk(&l);
    check_collectives(&l);
    vlai_wallx_task_close(l.task);
    vla_executor_destroy(l.executor);
    if (l.status != VLA_OK)
        vlai_preflight_fini(out);
    return l.status;
}

void vlai_preflight_fini(vlai_preflight *p)
{
    for (size_t i = 0; i < p->count; i++) {
        vlai_free(p->checks[i].text);
        vlai_free(p->checks[i].hint);
    }
    vlai_free(p->checks);
    *p = (vlai_preflight){0};
}

vla_status vlai_preflight_status(const vlai_preflight *p)
{
    for (size_t i = 0; i < p->count; i++)
        if (p->checks[i].verdict == VLAI_CHECK_FAIL)
            return p->checks[i].status;
    return VLA_OK;
}

/* ---- output ---- */

static const char *const verdicts[] = {"ok", "note", "FAIL", "-"}, *const verdict_names[] = {"ok", "note", "fail", "skipped"};

static const struct {
    const char *name, *key;
    size_t offset;
} memory_rows[] = {
#define ROW(field, text) {text, #field, offsetof(vlai_run_memory, field)},
    ROW(weights, "weights") ROW(gradients, "gradients") ROW(optimizer, "optimizer") ROW(activations, "activations")
    ROW(inputs, "inputs") ROW(workspace, "kernel scratch") ROW(snapshot, "checkpoint snapshot") ROW(loader, "samples read ahead")
    ROW(process, "program, tables, texts") ROW(total, "peak")
#undef ROW
};
enum { MEMORY_ROWS = sizeof memory_rows / sizeof *memory_rows };

static const struct {
    const char *name, *key;
    size_t offset;
} device_rows[] = {
#define ROW(field, text) {text, #field, offsetof(vlai_run_device, field)},
    ROW(weights, "weights") ROW(gradients, "gradients") ROW(optimizer, "optimizer") ROW(activations, "activations")
    ROW(inputs, "inputs") ROW(workspace, "kernel scratch, staging") ROW(driver, "driver, captured steps")
    ROW(collectives, "NCCL's buffers") ROW(total, "peak") ROW(available, "available now")
#undef ROW
};
enum { DEVICE_ROWS = sizeof device_rows / sizeof *device_rows };

static size_t device_of(const vlai_preflight *p, int row)
{
    size_t value;
    memcpy(&value, (const char *)&p->memory.device + device_rows[row].offset, sizeof value);
    return value;
}

static size_t memory_of(const vlai_preflight *p, int row)
{
    size_t value;
    memcpy(&value, (const char *)&p->memory + memory_rows[row].offset, sizeof value);
    return value;
}

enum { SMALL = 1000000000 /* bytes of a run below which what is not counted may be more than 2 % of it */ };

static void print_memory(const vlai_preflight *p, vlai_text *out)
{
    vlai_text_puts(out, "\nmemory of the run, anonymous, decimal MB\n");
    for (int i = 0; i < MEMORY_ROWS; i++)
        if (!p->memory.device.total || memory_of(p, i))
            vlai_text_printf(out, "  %-24s %12.1f\n", memory_rows[i].name, 1e-6 * (double)memory_of(p, i));
    vlai_text_printf(out, "  %-24s %12.1f\n", "available now", 1e-6 * (double)p->available);
    if (p->memory.total < SMALL)
        vlai_text_puts(out, "  (threads and plans keep 3 to 15 MB of their own beside these)\n");
    if (!p->memory.device.total)
        return;
    vlai_text_puts(out, "\ndevice memory of the run, decimal MB\n");
    for (int i = 0; i < DEVICE_ROWS; i++)
        vlai_text_printf(out, "  %-24s %12.1f\n", device_rows[i].name, 1e-6 * (double)device_of(p, i));
}

void vlai_preflight_memory(const vlai_preflight *p, vlai_text *out)
{
    if (p->planned)
        print_memory(p, out);
    for (size_t i = 0; i < p->fit_count; i++)
        vlai_text_printf(out, "%s %s: %.3f GB\n", i ? "   or" : "fits:", p->fits[i].text, 1e-9 * (double)p->fits[i].total);
}

void vlai_preflight_print(const vlai_preflight *p, vlai_text *out)
{
    for (size_t i = 0; i < p->count; i++) {
        const vlai_check_line *c = &p->checks[i];
        vlai_text_printf(out, "%-4s %-12s %s\n", verdicts[c->verdict], c->name, c->text);
        if (c->hint)
            vlai_text_printf(out, "     %-12s hint: %s\n", "", c->hint);
    }
    vlai_preflight_memory(p, out);
    int count[4] = {0};
    for (size_t i = 0; i < p->count; i++)
        count[p->checks[i].verdict]++;
    vlai_text_printf(out, "\n%d ok, %d notes, %d failed, %d skipped\n", count[0], count[1], count[2], count[3]);
}

json_t *vlai_preflight_json(const vlai_preflight *p)
{
    json_t *all = json_object(), *checks = json_array();
    json_object_set_new(all, "checks", checks);
    for (size_t i = 0; i < p->count; i++) {
        const vlai_check_line *c = &p->checks[i];
        json_t *line = json_pack("{s:s, s:s, s:o}", "name", c->name, "verdict", verdict_names[c->verdict], "text", vlai_json_text(c->text));
        if (c->hint)
            json_object_set_new(line, "hint", vlai_json_text(c->hint));
        if (c->verdict == VLAI_CHECK_FAIL)
            json_object_set_new(line, "status", json_string(vla_status_name(c->status)));
        json_array_append_new(checks, line);
    }
    if (!p->planned)
        return all;
    json_t *memory = json_object(), *fits = json_array();
    for (int i = 0; i < MEMORY_ROWS; i++)
        json_object_set_new(memory, memory_rows[i].key, json_integer((json_int_t)memory_of(p, i)));
    json_object_set_new(memory, "arena", json_integer((json_int_t)p->memory.arena));
    json_object_set_new(memory, "available", json_integer((json_int_t)p->available));
    json_t *device = p->memory.device.total ? json_object() : NULL;
    for (int i = 0; device && i < DEVICE_ROWS; i++)
        json_object_set_new(device, device_rows[i].key, json_integer((json_int_t)device_of(p, i)));
    if (device)
        json_object_set_new(all, "device_memory", device);
    for (size_t i = 0; i < p->fit_count; i++)
        json_array_append_new(fits, json_pack("{s:s, s:I}", "settings", p->fits[i].text, "peak", (json_int_t)p->fits[i].total));
    json_object_set_new(all, "memory", memory);
    json_object_set_new(all, "fits", fits);
    json_object_set_new(all, "tokens", json_pack("{s:I, s:I}", "longest", (json_int_t)p->tokens_longest, "batch", (json_int_t)p->tokens_batch));
    json_object_set_new(all, "disk", json_pack("{s:I, s:I, s:I}", "checkpoint", (json_int_t)p->checkpoint_bytes, "free",
                                               (json_int_t)p->disk_free, "keep_last_that_fits", (json_int_t)p->keep_fits));
    return all;
}
