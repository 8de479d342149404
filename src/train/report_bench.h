/* The report's section on what `vla bench --out RUN/bench.jsonl` measured. */
#ifndef VLAI_REPORT_BENCH_H
#define VLAI_REPORT_BENCH_H

#include "base/text.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

#define VLAI_BENCH_FILE "bench.jsonl"

/* Adds nothing where the run folder has no such file. Lines that are no rows of vla bench are passed over. */
vla_status vlai_report_bench(const char *run, vlai_text *html, vla_error *err);
bool vlai_report_has_bench(const char *run);

VLA_END_DECLS

#endif
