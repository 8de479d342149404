#include "train/progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

typedef struct {
    char *out;
    size_t size, used;
} line;

static void put(line *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(line *l, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(l->out + l->used, l->size - l->used, format, args);
    va_end(args);
    if (n > 0)
        l->used = l->used + (size_t)n < l->size ? l->used + (size_t)n : l->size - 1;
}

void vlai_step_line(const vla_record *r, char *out, size_t size)
{
    line l = {out, size, 0};
    put(&l, " epoch %3lld/%3lld | iter %6lld/%6lld | loss %.6f |", (long long)r->epoch, (long long)r->epochs,
        (long long)r->iteration, (long long)r->iterations, r->smooth_loss);
    for (int i = 0; i < r->parts; i++)
        put(&l, " %s %.6f |", r->part_name[i], r->smooth_part[i]);
    put(&l, " lr %.6f | time_current_backward_step %.6fs |", r->next_rate, r->step_seconds);
    if (r->skipped)
        put(&l, " skipped: not finite |");
}

static void put_duration(line *l, double seconds)
{
    long long s = isfinite(seconds) && seconds > 0 ? (long long)(seconds + 0.5) : 0;
    if (s >= 3600)
        put(l, "%lld h %02lld min", s / 3600, s / 60 % 60);
    else if (s >= 60)
        put(l, "%lld min %02lld s", s / 60, s % 60);
    else
        put(l, "%lld s", s);
}

void vlai_status_line(const vla_record *r, char *out, size_t size)
{
    line l = {out, size, 0};
    put(&l, "step %lld", (long long)r->step);
    if (r->steps > 0)
        put(&l, "/%lld", (long long)r->steps);
    put(&l, "  loss %.5f  lr %.3g  grad %.3g  %.1f samples/s  stall %.0f ms  %.0f MB", r->smooth_loss, r->rate, r->grad_norm,
        r->samples_per_second, 1e3 * r->stall_seconds, 1e-6 * (double)r->resident);
    if (r->device)
        put(&l, " + %.1f GB device", 1e-9 * (double)r->device);
    if (r->skips)
        put(&l, "  %lld skipped", (long long)r->skips);
    put(&l, "  ");
    put_duration(&l, r->eta_seconds);
    put(&l, " left");
}

void vlai_validation_line(const vla_record *r, char *out, size_t size)
{
    line l = {out, size, 0};
    put(&l, "[Validation] step %lld | val_loss %.4f", (long long)r->step, r->loss);
    for (int i = 0; i < r->parts; i++)
        put(&l, " | val_%s %.6f", r->part_name[i], r->part[i]);
}

void vlai_memory_table(const vla_trainer_memory *m, vlai_text *out)
{
    const struct {
        const char *name;
        size_t bytes;
    } rows[] = {{"weights", m->plan.weights},
                {"gradients", m->plan.gradients},
                {"optimizer", m->plan.optimizer},
                {"activations", m->plan.activations},
                {"inputs", m->plan.inputs},
                {"kernel scratch", m->executor > m->plan.inputs + m->plan.activations ? m->executor - m->plan.inputs - m->plan.activations : 0},
                {"checkpoint snapshot", m->snapshot}};
    size_t total = 0;
    vlai_text_puts(out, "memory of the first batch's plan, MB, as vla preflight counts, without the program's own and samples read ahead:\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        vlai_text_printf(out, "  %-20s %12.1f\n", rows[i].name, 1e-6 * (double)rows[i].bytes);
        total += rows[i].bytes;
    }
    vlai_text_printf(out, "  %-20s %12.1f\n", "together", 1e-6 * (double)total);
}
