#include "train/metrics.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/text.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH = 4096, ENDING = 16, USUAL = 16384 /* bytes of a line for which room is made at the start, so that steps allocate nothing */ };

#define PREDICTIONS "predict" /* the folder of `vla predict` */

struct vlai_metrics {
    vlai_appender steps, validations;
    bool steps_open, validations_open;
    vlai_text line; /* kept from one record to the next */
};

/* Step of a line that this file has written: {"step": N, ... */
static bool line_step(const char *line, size_t size, int64_t *step)
{
    static const char head[] = "{\"step\": ";
    if (size < sizeof head || memcmp(line, head, sizeof head - 1) != 0)
        return false;
    char *end;
    *step = strtoll(line + sizeof head - 1, &end, 10);
    return *end == ',' || *end == '}';
}

/* The ending of the names that files of a run before this one get: .old, or the first of .old2, .old3, ... that none of them has. */
static vla_status choose_ending(const char *run, char ending[ENDING], vla_error *err)
{
    static const char *const names[] = {VLAI_METRICS_FILE, VLAI_VALIDATION_FILE, PREDICTIONS};
    bool taken = true;
    for (int n = 1; taken; n++) {
        snprintf(ending, ENDING, n == 1 ? ".old" : ".old%d", n);
        taken = false;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            char path[PATH];
            if (snprintf(path, sizeof path, "%s/%s%s", run, names[i], ending) >= (int)sizeof path)
                return vlai_fail(err, VLA_E_INVALID, "%s: path too long", run);
            taken |= access(path, F_OK) == 0;
        }
    }
    return VLA_OK;
}

static vla_status set_aside(const char *path, const char *ending, vla_error *err)
{
    char old[PATH];
    if (snprintf(old, sizeof old, "%s%s", path, ending) >= (int)sizeof old)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
    return vlai_publish(path, old, err);
}

/* Rewrites the file without lines of steps after `step`, and without a last line that a kill cut short. A run that begins
 * at step 0 keeps the file of the run before it under another name, if that run got as far as a line. */
static vla_status keep_until(const char *path, int64_t step, const char *ending, vla_error *err)
{
    char *data;
    size_t size;
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size == 0)
        return VLA_OK;
    if (step == 0)
        return set_aside(path, ending, err);
    VLA_TRY(vlai_read_file(path, SIZE_MAX / 2, &data, &size, err));
    size_t kept = 0;
    for (char *at = data, *end; (end = memchr(at, '\n', size - (size_t)(at - data))); at = end + 1) {
        int64_t of;
        size_t length = (size_t)(end + 1 - at);
        if (!line_step(at, length, &of) || of > step)
            continue;
        memmove(data + kept, at, length);
        kept += length;
    }
    vla_status status = kept == size ? VLA_OK : vlai_write_file_atomic(path, data, kept, err);
    vlai_free(data);
    return status;
}

/* Predictions of a checkpoint later than `step` belong to a run before this one, as that checkpoint does: they become predict.old. */
static vla_status set_predictions_aside(const char *run, int64_t step, const char *ending, vla_error *err)
{
    char path[PATH], summary[PATH];
    json_t *all;
    vla_error unread = VLA_ERROR_INIT;
    if (!vlai_path_join(path, sizeof path, run, PREDICTIONS) || !vlai_path_join(summary, sizeof summary, path, "summary.json"))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", run, PREDICTIONS);
    if (!vlai_is_file(summary) || vlai_json_load(summary, &all, &unread) != VLA_OK)
        return VLA_OK;
    int64_t of = json_integer_value(json_object_get(all, "step"));
    json_decref(all);
    return of <= step ? VLA_OK : set_aside(path, ending, err);
}

static vla_status open_one(const char *run, const char *name, int64_t step, const char *ending, vlai_appender *file, bool *open, vla_error *err)
{
    char path[PATH];
    if (!vlai_path_join(path, sizeof path, run, name))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", run, name);
    VLA_TRY(keep_until(path, step, ending, err));
    VLA_TRY(vlai_append_open(file, path, err));
    *open = true;
    return VLA_OK;
}

vla_status vlai_metrics_open(const char *run, int64_t step, vlai_metrics **out, vla_error *err)
{
    *out = NULL;
    vlai_metrics *m = vlai_calloc(1, sizeof *m);
    if (!m)
        return vlai_nomem(err, sizeof *m);
    char ending[ENDING];
    vlai_text_printf(&m->line, "%*s", USUAL, "");
    vla_status status = vlai_text_status(&m->line, err);
    if (status == VLA_OK)
        status = vlai_mkdirs(run, err);
    if (status == VLA_OK)
        status = choose_ending(run, ending, err);
    if (status == VLA_OK)
        status = set_predictions_aside(run, step, ending, err);
    if (status == VLA_OK)
        status = open_one(run, VLAI_METRICS_FILE, step, ending, &m->steps, &m->steps_open, err);
    if (status == VLA_OK)
        status = open_one(run, VLAI_VALIDATION_FILE, step, ending, &m->validations, &m->validations_open, err);
    if (status != VLA_OK) {
        vlai_metrics_close(m);
        return status;
    }
    *out = m;
    return VLA_OK;
}

void vlai_metrics_close(vlai_metrics *m)
{
    if (!m)
        return;
    if (m->steps_open)
        vlai_append_close(&m->steps);
    if (m->validations_open)
        vlai_append_close(&m->validations);
    vlai_text_fini(&m->line);
    vlai_free(m);
}

static void put_real(vlai_text *line, double value)
{
    if (isfinite(value))
        vlai_text_real(line, value);
    else
        vlai_text_puts(line, "null");
}

static void put_key(vlai_text *line, const char *key)
{
    vlai_text_puts(line, line->size > 1 ? ", " : "");
    vlai_text_json(line, key);
    vlai_text_puts(line, ": ");
}

static void put_named(vlai_text *line, const char *name, double value)
{
    put_key(line, name);
    put_real(line, value);
}

/* How a field is written. PARTS, MORE: all of these, under their own names. */
typedef enum form { COUNT, FLAG, BYTES, REAL, MILLISECONDS, THOUSANDTHS, SIX_DIGITS, PARTS, MORE } form;
/* In which records. SAVED: of a step before which the run stood still. */
typedef enum lines { ALL, STEPS, VALIDATIONS, SAVED } lines;

/* A line's keys in their order. */
static const struct {
    const char *key;
    form form;
    lines lines;
    size_t field; /* of vla_record */
} rows[] = {
    {"step", COUNT, ALL, offsetof(vla_record, step)},
    {"epoch", COUNT, ALL, offsetof(vla_record, epoch)},
    {"samples", COUNT, ALL, offsetof(vla_record, samples)},
    {"loss", REAL, ALL, offsetof(vla_record, loss)},
    {NULL, PARTS, ALL, 0},
    {"lr", REAL, STEPS, offsetof(vla_record, rate)},
    {"grad_norm", REAL, STEPS, offsetof(vla_record, grad_norm)},
    {"skipped", FLAG, STEPS, offsetof(vla_record, skipped)},
    {NULL, MORE, ALL, 0},
    {"step_ms", MILLISECONDS, STEPS, offsetof(vla_record, step_seconds)},
    {"samples_per_s", THOUSANDTHS, STEPS, offsetof(vla_record, samples_per_second)},
    {"stall_ms", MILLISECONDS, STEPS, offsetof(vla_record, stall_seconds)},
    {"tflops", SIX_DIGITS, STEPS, offsetof(vla_record, teraflops)},
    {"save_stall_ms", MILLISECONDS, SAVED, offsetof(vla_record, save_seconds)},
    {"rss", BYTES, STEPS, offsetof(vla_record, resident)},
    {"device_memory", BYTES, STEPS, offsetof(vla_record, device)},
    {"seconds", THOUSANDTHS, VALIDATIONS, offsetof(vla_record, step_seconds)},
};

static bool belongs(lines which, const vla_record *r)
{
    bool step = r->kind == VLA_RECORD_STEP;
    return which == ALL || (which == VALIDATIONS ? !step : step && (which == STEPS || r->save_seconds > 0));
}

vla_status vlai_metrics_put(vlai_metrics *m, const vla_record *r, vla_error *err)
{
    vlai_text *line = &m->line;
    line->size = 0;
    vlai_text_puts(line, "{");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const void *field = (const char *)r + rows[i].field;
        if (!belongs(rows[i].lines, r))
            continue;
        if (rows[i].key)
            put_key(line, rows[i].key);
        switch (rows[i].form) {
        case COUNT: vlai_text_printf(line, "%lld", (long long)*(const int64_t *)field); break;
        case FLAG: vlai_text_printf(line, "%d", *(const int *)field); break;
        case BYTES: vlai_text_printf(line, "%llu", (unsigned long long)*(const uint64_t *)field); break;
        case REAL: put_real(line, *(const double *)field); break;
        case MILLISECONDS: vlai_text_printf(line, "%.3f", 1e3 * *(const double *)field); break;
        case THOUSANDTHS: vlai_text_printf(line, "%.3f", *(const double *)field); break;
        case SIX_DIGITS: vlai_text_printf(line, "%.6g", *(const double *)field); break;
        case PARTS:
            for (int k = 0; k < r->parts; k++)
                put_named(line, r->part_name[k], r->part[k]);
            break;
        case MORE:
            for (int k = 0; k < r->more_count; k++)
                put_named(line, r->more[k].name, r->more[k].value);
            break;
        }
    }
    vlai_text_puts(line, "}\n");
    VLA_TRY(vlai_text_status(line, err));
    return vlai_append(r->kind == VLA_RECORD_STEP ? &m->steps : &m->validations, line->data, line->size, err);
}
