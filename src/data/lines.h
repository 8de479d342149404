/* Files of one JSON object a line: the .jsonl files below meta/ of v2.x. */
#ifndef VLAI_LINES_H
#define VLAI_LINES_H

#include "data/finding.h"

#include <jansson.h>

VLA_BEGIN_DECLS

/* Called with each object; line counts from 1. An error stops. */
typedef vla_status (*vlai_line_fn)(const json_t *object, int64_t line, void *user, vla_error *err);

/* `file` names it in findings: a line that is no JSON object is reported (kind "json") and skipped. A UTF-8 byte-order mark
 * before a line is left out. */
vla_status vlai_lines_parse(const char *data, size_t size, const char *file, vlai_line_fn fn, void *user,
                            vlai_findings *findings, vla_error *err);
vla_status vlai_lines_read(const char *path, const char *file, vlai_line_fn fn, void *user, vlai_findings *findings,
                           vla_error *err);

VLA_END_DECLS

#endif
