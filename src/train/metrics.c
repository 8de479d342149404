#include "train/metrics.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"

#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE = 4096, PATH = 4096 };

struct vlai_metrics {
    vlai_appender steps, validations;
    bool steps_open, validations_open;
    char line[LINE];
    size_t used;
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

/* Rewrites the file without lines of steps after `step`, and without a last line that a kill cut short. A run that begins
 * at step 0 keeps the file of the run before it under another name. */
static vla_status keep_until(const char *path, int64_t step, vla_error *err)
{
    char *data, old[PATH];
    size_t size;
    if (!vlai_is_file(path))
        return VLA_OK;
    if (step == 0) {
        if (snprintf(old, sizeof old, "%s.old", path) >= (int)sizeof old)
            return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
        return vlai_publish(path, old, err);
    }
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

static vla_status open_one(const char *run, const char *name, int64_t step, vlai_appender *file, bool *open, vla_error *err)
{
    char path[PATH];
    if (!vlai_path_join(path, sizeof path, run, name))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", run, name);
    VLA_TRY(keep_until(path, step, err));
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
    vla_status status = vlai_mkdirs(run, err);
    if (status == VLA_OK)
        status = open_one(run, VLAI_METRICS_FILE, step, &m->steps, &m->steps_open, err);
    if (status == VLA_OK)
        status = open_one(run, VLAI_VALIDATION_FILE, step, &m->validations, &m->validations_open, err);
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
    vlai_free(m);
}

static void put(vlai_metrics *m, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(vlai_metrics *m, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(m->line + m->used, LINE - m->used, format, args);
    va_end(args);
    if (n > 0)
        m->used = m->used + (size_t)n < LINE ? m->used + (size_t)n : LINE - 1;
}

static void put_real(vlai_metrics *m, const char *key, double value)
{
    if (!isfinite(value)) {
        put(m, ", \"%s\": null", key);
        return;
    }
    char shortest[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(shortest, sizeof shortest, "%.*g", digits, value);
        if (strtod(shortest, NULL) == value)
            break;
    }
    put(m, ", \"%s\": %s", key, shortest);
}

vla_status vlai_metrics_put(vlai_metrics *m, const vla_record *r, vla_error *err)
{
    m->used = 0;
    put(m, "{\"step\": %lld, \"epoch\": %lld, \"samples\": %lld", (long long)r->step, (long long)r->epoch, (long long)r->samples);
    put_real(m, "loss", r->loss);
    for (int i = 0; i < r->parts; i++)
        put_real(m, r->part_name[i], r->part[i]);
    if (r->kind == VLA_RECORD_STEP) {
        put_real(m, "lr", r->rate);
        put_real(m, "grad_norm", r->grad_norm);
        put(m, ", \"skipped\": %d", r->skipped);
        put(m, ", \"step_ms\": %.3f, \"samples_per_s\": %.3f, \"stall_ms\": %.3f, \"tflops\": %.6g", 1e3 * r->step_seconds,
            r->samples_per_second, 1e3 * r->stall_seconds, r->teraflops);
        if (r->save_seconds > 0)
            put(m, ", \"save_stall_ms\": %.3f", 1e3 * r->save_seconds);
        put(m, ", \"rss\": %llu, \"device_memory\": %llu", (unsigned long long)r->resident, (unsigned long long)r->device);
    } else {
        put(m, ", \"seconds\": %.3f", r->step_seconds);
    }
    put(m, "}\n");
    return vlai_append(r->kind == VLA_RECORD_STEP ? &m->steps : &m->validations, m->line, m->used, err);
}

uint64_t vlai_resident_bytes(void)
{
    char text[128];
    unsigned long long total, resident = 0;
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    if (sscanf(text, "%llu %llu", &total, &resident) != 2)
        return 0;
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}
