#include "train/switches.h"

#include "base/fail.h"
#include "base/log.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ; /* unistd.h has it only with GNU's extensions */

typedef enum field_kind { FLAG, NUMBER, WORD } field_kind;

#define NONE ((size_t)-1)
#define KEY(member) offsetof(struct vlai_section_perf, member)

#define DDP "gradients lie in buckets and are reduced while the backward pass runs; weights are gathered under the next forward pass"
#define BUCKET "MB of a gradient bucket, together with WALLX_PERF_DDP"

/* One row per switch: variable, key of section "perf", what it does on a CPU rank and on a GPU. */
static const struct {
    const char *name;
    field_kind kind;
    size_t key;       /* offset in the section; NONE: the environment alone */
    const char *spelled; /* of the key */
    const char *cpu, *gpu; /* NULL: no line of its own */
} switches[] = {
    {"WALLX_PERF_ATTN", FLAG, KEY(attn), "perf.attn", "no effect on a CPU rank: its attention is deterministic and has one form",
     "cuDNN's attention, whose backward adds in any order, where none of the faster own kernels fits; on Hopper they fit all of Wall-X's, and nothing changes"},
    {"ATTENTION_BACKEND", WORD, NONE, NULL, "no effect on a CPU rank: its attention is deterministic and has one form",
     "sdpa: as WALLX_PERF_ATTN; other values: own kernels alone, which are deterministic"},
    {"WALLX_PERF_ALLOC", FLAG, KEY(alloc), "perf.alloc",
     "buffers at offsets planned by lifetime; norms, SwiGLU products and rotations are made again in the backward pass",
     "buffers at offsets planned by lifetime; norms, SwiGLU products and rotations are made again in the backward pass, whole layers where that does not fit"},
    {"WALLX_PERF_DDP", FLAG, KEY(ddp), "perf.ddp", DDP, DDP},
    {"WALLX_PERF_BUCKET", NUMBER, KEY(bucket), "perf.bucket", BUCKET, BUCKET},
    {"WALLX_PERF_COMPILE", FLAG, KEY(compile), "perf.compile",
     "the update is part of the step's plan; a CPU rank's kernels are the reference and stay one per operation",
     "fused kernels and timed choice of matrix products, decoder; the update is part of the step, and the step is captured once and replayed"},
    {"WALLX_PERF_COMPILE_VISUAL", FLAG, KEY(compile_visual), "perf.compile_visual",
     "no effect on a CPU rank: its kernels are the reference and stay one per operation",
     "fused kernels and timed choice of matrix products, vision tower; inner widths rounded up to what tensor cores load"},
    {"WALLX_PERF_COMPILE_RECOMP_LIMIT", NUMBER, KEY(compile_recomp_limit), "perf.compile_recomp_limit", "most plans kept at once, one per shape of batch",
     "most plans kept at once, one per shape of batch"},
    {"OPTIMIZER_FUSED", FLAG, KEY(optimizer_fused), "perf.optimizer_fused", "no effect on a CPU rank: it steps one tensor after the other",
     "one pass over all parameters instead of one kernel per tensor"},
    {"WALLX_PERF_NO_TIMER_BARRIER", FLAG, KEY(no_timer_barrier), "perf.no_timer_barrier",
     "the next batch is taken before the times of this step are read",
     "the next step is handed to the GPU before the times of this one are read"},
    {"WALLX_PERF_LOG", FLAG, KEY(log), "perf.log", NULL, NULL},
};
enum { SWITCHES = sizeof switches / sizeof *switches, NUMBER_MOST = 1000000 };

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

static bool key_of(const vlai_config *config, int row)
{
    return config && switches[row].key != NONE && switches[row].kind == FLAG && *(const bool *)((const char *)&config->perf + switches[row].key);
}

static int64_t number_of(const vlai_config *config, int row)
{
    return *(const int64_t *)((const char *)&config->perf + switches[row].key);
}

/* The variable where it is set, also to 0; else the key. */
static bool is_on(const vlai_config *config, const char *name)
{
    const char *value = getenv(name);
    if (value && *value)
        return vlai_switch_is_on(name);
    for (int i = 0; i < SWITCHES; i++)
        if (!strcmp(switches[i].name, name))
            return key_of(config, i);
    return false;
}

void vlai_switches_read(const vlai_config *config, vlai_switches *out)
{
    const char *backend = getenv("ATTENTION_BACKEND");
    *out = (vlai_switches){
        .attention = is_on(config, "WALLX_PERF_ATTN") || (backend && !strcmp(backend, "sdpa")) || (config && !config->model.attn_deterministic),
        .alloc = is_on(config, "WALLX_PERF_ALLOC"),
        .ddp = is_on(config, "WALLX_PERF_DDP"),
        .compile = is_on(config, "WALLX_PERF_COMPILE"),
        .compile_visual = is_on(config, "WALLX_PERF_COMPILE_VISUAL"),
        .no_barrier = is_on(config, "WALLX_PERF_NO_TIMER_BARRIER"),
        .log = is_on(config, "WALLX_PERF_LOG"),
        .most_plans = vlai_switch_number("WALLX_PERF_COMPILE_RECOMP_LIMIT", config ? config->perf.compile_recomp_limit : 64),
    };
    out->bucket_mb = out->ddp ? vlai_switch_number("WALLX_PERF_BUCKET", config ? config->perf.bucket : 100)
                              : config ? config->distributed.bucket_cap_mb : 25;
    out->fused_optimizer = out->compile || is_on(config, "OPTIMIZER_FUSED");
}

/* A switch that is written wrongly would change nothing and say nothing. */
static void warn_of_unknown(void)
{
    const char *names[SWITCHES];
    for (int i = 0; i < SWITCHES; i++)
        names[i] = switches[i].name;
    for (char **e = environ; e && *e; e++) {
        char name[64];
        size_t n = strcspn(*e, "=");
        bool known = strncmp(*e, "WALLX_PERF_", 11) || n >= sizeof name;
        snprintf(name, sizeof name, "%.*s", (int)n, *e);
        for (int i = 0; i < SWITCHES; i++)
            known |= !strcmp(name, names[i]);
        const char *near = known ? NULL : vlai_nearest(name, names, SWITCHES);
        if (!known)
            vlai_warn("environment: %s is no switch and has no effect%s%s%s", name, near ? ": did you mean " : "", near ? near : "", near ? "?" : "");
    }
}

vla_status vlai_switches_check(vla_error *err)
{
    warn_of_unknown();
    for (int i = 0; i < SWITCHES; i++) {
        const char *name = switches[i].name, *value = getenv(name);
        field_kind kind = switches[i].kind;
        char *end;
        if (!value || !*value || kind == WORD)
            continue;
        if (kind == FLAG && strcmp(value, "0") != 0 && strcmp(value, "1") != 0)
            return vlai_fail(err, VLA_E_INVALID, "environment: %s is '%.64s', wanted 1 (on) or 0 (off)", name, value);
        long long n = kind == NUMBER ? strtoll(value, &end, 10) : 0;
        bool plans = switches[i].key == KEY(compile_recomp_limit);
        if (kind == NUMBER && (*end || *value < '0' || *value > '9' || n > NUMBER_MOST || (plans && n == 1)))
            return vlai_fail(err, VLA_E_INVALID, "environment: %s is '%.64s', wanted a whole number from %d to %d, or 0 for the usual one", name, value,
                             plans ? 2 : 1, NUMBER_MOST);
    }
    return VLA_OK;
}

void vlai_switches_common(const vlai_config *config, vlai_text *out)
{
    vlai_switches now;
    vlai_switches_read(config, &now);
    vlai_text_printf(out, "WALLX_PERF_ATTN: %d\nWALLX_PERF_ALLOC: %d\nWALLX_PERF_DDP: %d\nWALLX_PERF_BUCKET: %lld\nWALLX_PERF_COMPILE: %d\n"
                     "WALLX_PERF_COMPILE_VISUAL: %d\nWALLX_PERF_COMPILE_RECOMP_LIMIT: %lld\nOPTIMIZER_FUSED: %d\n"
                     "WALLX_PERF_NO_TIMER_BARRIER: %d\n", now.attention, now.alloc, now.ddp, (long long)now.bucket_mb, now.compile,
                     now.compile_visual, (long long)now.most_plans, now.fused_optimizer, now.no_barrier);
}

void vlai_switches_describe(const vlai_config *config, const char *device, int world, vlai_text *out)
{
    vlai_switches now;
    vlai_switches_read(config, &now);
    for (int i = 0; i < SWITCHES && now.log; i++) {
        const char *effect = strcmp(device, "cpu") ? switches[i].gpu : switches[i].cpu, *value = getenv(switches[i].name);
        if (!effect)
            continue;
        if (world < 2 && (switches[i].key == KEY(ddp) || switches[i].key == KEY(bucket)))
            effect = "no effect on one rank: there is nothing to reduce";
        else if (!now.ddp && switches[i].key == KEY(bucket))
            effect = "no effect without WALLX_PERF_DDP: distributed.bucket_cap_mb counts";
        if (vlai_switch_is_on(switches[i].name))
            vlai_text_printf(out, "[WALLX_PERF] %s=%s: %s\n", switches[i].name, value, effect);
        else if (!(value && *value) && key_of(config, i))
            vlai_text_printf(out, "[WALLX_PERF] %s=true: %s\n", switches[i].spelled, effect);
        else if (!(value && *value) && config && switches[i].kind == NUMBER && vlai_config_origin(config, switches[i].spelled).file)
            vlai_text_printf(out, "[WALLX_PERF] %s=%lld: %s\n", switches[i].spelled, (long long)number_of(config, i), effect);
    }
}
