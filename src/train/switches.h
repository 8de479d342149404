/* The switches of performance: WALLX_PERF_* of the environment, their keys in the configuration's section "perf", and what
 * each does in this run. A variable that is set wins over its key; unset, empty or 0 is off. No switch is the plain path: one
 * kernel per operation, everything in order, each step waited for. */
#ifndef VLAI_SWITCHES_H
#define VLAI_SWITCHES_H

#include "base/text.h"
#include "train/config.h"

#include <stdbool.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef struct vlai_switches {
    bool attention;       /* WALLX_PERF_ATTN, ATTENTION_BACKEND=sdpa, model.attn_deterministic: false: cuDNN where it is faster than own kernels */
    bool alloc;           /* WALLX_PERF_ALLOC: offsets by lifetime, cheap recompute */
    bool ddp;             /* WALLX_PERF_DDP: gradients reduced while the backward runs */
    bool compile;         /* WALLX_PERF_COMPILE: fusion of the decoder, replay, grouped optimizer */
    bool compile_visual;  /* WALLX_PERF_COMPILE_VISUAL: fusion of the tower */
    bool fused_optimizer; /* OPTIMIZER_FUSED, or WALLX_PERF_COMPILE */
    bool no_barrier;      /* WALLX_PERF_NO_TIMER_BARRIER: the host runs ahead of the device */
    bool log;             /* WALLX_PERF_LOG */
    int64_t bucket_mb;    /* WALLX_PERF_BUCKET with ddp, distributed.bucket_cap_mb without */
    int64_t most_plans;   /* WALLX_PERF_COMPILE_RECOMP_LIMIT */
} vlai_switches;

/* config: NULL = the environment alone. */
void vlai_switches_read(const vlai_config *config, vlai_switches *out);

/* What all switches come to, one line "NAME: value" each: equal on all ranks that train together. */
void vlai_switches_common(const vlai_config *config, vlai_text *out);

/* Whether every variable that is set has a value that means something: 0 or 1 of a switch, a whole number of the others. */
vla_status vlai_switches_check(vla_error *err);

bool vlai_switch_is_on(const char *name);
/* The number that a switch is set to, or `fallback` when it is unset, 0 or no number. */
int64_t vlai_switch_number(const char *name, int64_t fallback);
/* With WALLX_PERF_LOG: "[WALLX_PERF] NAME=value: what is done", one line per switch that is on. Nothing without it.
 * device: "cpu" or "cuda", as vla_executor_device says. world: ranks that train together. */
void vlai_switches_describe(const vlai_config *config, const char *device, int world, vlai_text *out);

VLA_END_DECLS

#endif
