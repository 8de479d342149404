/* The records of a run: metrics.jsonl with one line per step, validation.jsonl with one per validation, in the run folder.
 *
 *     vlai_metrics *m;
 *     VLA_TRY(vlai_metrics_open("run", 10, &m, err));   // resumed after step 10: lines of later steps are removed
 *     VLA_TRY(vlai_metrics_put(m, &record, err));       // formats into a buffer that it keeps
 *     vlai_metrics_close(m);
 *
 * A run that begins at step 0 where files of these names lie renames them to NAME.old; so does every run with `predict`, when that is of
 * a later step than the one it begins at. Where one of these has that name already, all get NAME.old2, and so on: none is replaced.
 *
 * Numbers are written so that they read back as the same double; what is not finite is null. */
#ifndef VLAI_METRICS_H
#define VLAI_METRICS_H

#include "vla/trainer.h"

VLA_BEGIN_DECLS

#define VLAI_METRICS_FILE "metrics.jsonl"
#define VLAI_VALIDATION_FILE "validation.jsonl"

typedef struct vlai_metrics vlai_metrics;

vla_status vlai_metrics_open(const char *run, int64_t step, vlai_metrics **out, vla_error *err);
vla_status vlai_metrics_put(vlai_metrics *metrics, const vla_record *record, vla_error *err); /* STEP or VALIDATION */
void vlai_metrics_close(vlai_metrics *metrics);

VLA_END_DECLS

#endif
