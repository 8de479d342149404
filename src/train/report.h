/* One page for a run: a self-contained HTML file with curves, throughput, memory, configuration and predictions.
 *
 *     vlai_report_summary s;
 *     VLA_TRY(vlai_report_write("run", NULL, &s, err));   // run/report.html
 *
 * It is made from what the run folder holds: metrics.jsonl, validation.jsonl, config.resolved.json, the checkpoints, the
 * results of `vla predict` in predict/ and of `vla bench` in bench.jsonl. What is absent is left out. The page needs no
 * network, no script and no other file, and follows the reader's light or dark setting. A last line that a killed run left
 * half written is passed over; a file beside metrics.jsonl that cannot be read is left out and named. */
#ifndef VLAI_REPORT_H
#define VLAI_REPORT_H

#include "vla/error.h"

VLA_BEGIN_DECLS

enum { VLAI_REPORT_FILES = 16 }; /* as many are named */

typedef struct vlai_report_summary {
    char path[4096]; /* of the page */
    int64_t steps, validations, pictures, checkpoints;
    int64_t bad_lines; /* of the metrics that were no JSON objects */
    size_t bytes;
    vla_error damaged[VLAI_REPORT_FILES]; /* why files that are there were left out, the first `damaged_count` */
    int damaged_count;
} vlai_report_summary;

/* `out`: the file; NULL = report.html in the run folder. */
vla_status vlai_report_write(const char *run, const char *out, vlai_report_summary *summary, vla_error *err);

VLA_END_DECLS

#endif
