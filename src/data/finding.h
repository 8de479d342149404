/* What is wrong with a dataset, one fact at a time. The reader and the validator share the same code: it reports
 * findings, and either the first error becomes the vla_error of vla_dataset_open, or all of them are printed.
 *
 *     vlai_finding f = vlai_finding_error("frame-index", "data/chunk-000/file-000.parquet");
 *     f.episode = 2, f.frame = 20;
 *     vlai_report(findings, &f, "frame_index is %lld, expected %lld", got, want);
 *
 * Strings are borrowed for the duration of the call. */
#ifndef VLAI_FINDING_H
#define VLAI_FINDING_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

typedef struct vlai_value {
    enum { VLAI_VALUE_NONE, VLAI_VALUE_WHOLE, VLAI_VALUE_REAL, VLAI_VALUE_TEXT } kind;
    int64_t whole;
    double real;
    const char *text;
} vlai_value;

typedef struct vlai_finding {
    char level;       /* 'E': training must not go on; 'W': it may */
    bool bound;       /* the error concerns only the episodes named: a partial open may leave them out */
    const char *kind; /* "file-missing", "episode-length", ... */
    const char *file; /* relative to the set */
    const char *column, *camera, *key;           /* NULL: does not apply */
    int64_t episode, frame, dim, line;           /* -1: does not apply */
    const int64_t *episodes;                     /* several at once */
    int64_t episode_count;
    vlai_value expected, found;
    const char *hint;
    const char *message; /* filled by vlai_report */
} vlai_finding;

typedef struct vlai_findings {
    void (*report)(const vlai_finding *finding, void *user);
    void *user;
    int64_t errors, bound_errors, warnings;
} vlai_findings;

vlai_finding vlai_finding_error(const char *kind, const char *file);
vlai_finding vlai_finding_warning(const char *kind, const char *file);
vlai_value vlai_value_whole(int64_t whole);
vlai_value vlai_value_real(double real); /* whole numbers print as such */
vlai_value vlai_value_text(const char *text);

void vlai_report(vlai_findings *findings, vlai_finding *finding, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A sentence of the form "FILE: MESSAGE", with episode, frame, dim and line between them where the message does not say them. */
void vlai_finding_text(const vlai_finding *finding, char *out, size_t size);

VLA_END_DECLS

#endif
