/* The WALLX_PERF_* switches of the environment: what is set, and what each does in this run. Unset or 0 is off. */
#ifndef VLAI_SWITCHES_H
#define VLAI_SWITCHES_H

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>

VLA_BEGIN_DECLS

bool vlai_switch_is_on(const char *name);
/* The number that a switch is set to, or `fallback` when it is unset, 0 or no number. */
int64_t vlai_switch_number(const char *name, int64_t fallback);
/* With WALLX_PERF_LOG: "[WALLX_PERF] NAME=value: what was done", one line per switch that is on. Nothing without it. */
void vlai_switches_describe(vlai_text *out);

VLA_END_DECLS

#endif
