#include "train/switches.h"

#include <stdlib.h>
#include <string.h>

/* What a switch does on one CPU rank. */
static const struct {
    const char *name, *effect;
} switches[] = {
    {"WALLX_PERF_ATTN", "no effect on a CPU rank: its attention is deterministic and has one form"},
    {"WALLX_PERF_ALLOC", "buffers at offsets planned by lifetime; norms, SwiGLU products and rotations are made again in the backward pass"},
    {"WALLX_PERF_DDP", "no effect on one rank: there is nothing to reduce"},
    {"WALLX_PERF_BUCKET", "no effect on one rank: there is nothing to reduce"},
    {"WALLX_PERF_COMPILE", "no effect on a CPU rank: its kernels are the reference and stay one per operation"},
    {"WALLX_PERF_COMPILE_VISUAL", "no effect on a CPU rank: its kernels are the reference and stay one per operation"},
    {"WALLX_PERF_COMPILE_RECOMP_LIMIT", "most plans kept at once, one per shape of batch"},
    {"WALLX_PERF_NO_TIMER_BARRIER", "no effect on one rank: its timers wait for nobody"},
};

bool vlai_switch_is_on(const char *name)
{
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

int64_t vlai_switch_number(const char *name, int64_t fallback)
{
    const char *value = getenv(name);
    char *end;
    long long n = value ? strtoll(value, &end, 10) : 0;
    return n > 0 && !*end ? n : fallback;
}

void vlai_switches_describe(vlai_text *out)
{
    if (!vlai_switch_is_on("WALLX_PERF_LOG"))
        return;
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++)
        if (vlai_switch_is_on(switches[i].name))
            vlai_text_printf(out, "[WALLX_PERF] %s=%s: %s\n", switches[i].name, getenv(switches[i].name), switches[i].effect);
}
