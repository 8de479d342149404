/* Everything that would stop a run later, looked at before it starts: configuration, architecture, processor, data set, keys,
 * statistics, samples, weights, memory, disk.
 *
 *     vlai_preflight p;
 *     VLA_TRY(vlai_preflight_run(config, NULL, &p, err));  // err: only what keeps it from looking (no memory)
 *     for (size_t i = 0; i < p.count; i++) puts(p.checks[i].text);
 *     vlai_preflight_fini(&p);
 *
 * Each check is made even if others fail, unless it rests on one that failed. The run's plans are made at its real shapes:
 * prompts are those of the data set, batches as large as the longest that chance will bring. Nothing is trained or written.
 * Threads: one caller. */
#ifndef VLAI_PREFLIGHT_H
#define VLAI_PREFLIGHT_H

#include "base/text.h"
#include "model/wallx_plan.h"
#include "train/config.h"
#include "train/run_memory.h"

#include <jansson.h>

VLA_BEGIN_DECLS

typedef enum vlai_verdict { VLAI_CHECK_OK, VLAI_CHECK_NOTE, VLAI_CHECK_FAIL, VLAI_CHECK_SKIPPED } vlai_verdict;

typedef struct vlai_check_line {
    const char *name;
    vlai_verdict verdict;
    vla_status status; /* of a failure */
    char *text, *hint; /* hint: NULL or what to do */
} vlai_check_line;

enum { VLAI_PREFLIGHT_FITS = 3 };

typedef struct vlai_preflight {
    vlai_check_line *checks; /* several lines may have one name */
    size_t count, capacity;
    bool planned;           /* memory, available and what follows are set */
    vlai_run_memory memory;
    size_t available;
    int64_t tokens_longest, tokens_batch; /* of a prompt; of the batch that was planned */
    struct {
        char text[160]; /* how to set it */
        size_t total;
    } fits[VLAI_PREFLIGHT_FITS]; /* when the run does not fit: settings that would */
    size_t fit_count;
    uint64_t checkpoint_bytes, disk_free;
    int64_t keep_fits; /* keep_last that the disk has room for */
} vlai_preflight;

typedef struct vlai_preflight_options {
    int ranks;              /* that will train together (0: one); memory is then that of one of them */
    const char *const *allow_change; /* as vla_trainer_options' */
    vlai_wallx_sizes sizes; /* that plans are made for instead of what data and weights have */
} vlai_preflight_options;

/* options: NULL = one rank, and what there is. */
vla_status vlai_preflight_run(const vlai_config *config, const vlai_preflight_options *options, vlai_preflight *out, vla_error *err);
void vlai_preflight_fini(vlai_preflight *p);
/* The first failure's status; VLA_OK when there is none. */
vla_status vlai_preflight_status(const vlai_preflight *p);
/* The memory tables, and the settings that would fit. */
void vlai_preflight_memory(const vlai_preflight *p, vlai_text *out);
void vlai_preflight_print(const vlai_preflight *p, vlai_text *out);
json_t *vlai_preflight_json(const vlai_preflight *p); /* NULL when memory runs out */

VLA_END_DECLS

#endif
