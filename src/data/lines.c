#include "data/lines.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"

#include <string.h>

vla_status vlai_lines_parse(const char *data, size_t size, const char *file, vlai_line_fn fn, void *user,
                            vlai_findings *findings, vla_error *err)
{
    int64_t line = 0, faults = 0;
    for (size_t at = 0; at < size;) {
        const char *end = memchr(data + at, '\n', size - at);
        size_t n = end ? (size_t)(end - data) - at : size - at;
        line++;
        size_t blank = 0;
        if (n >= 3 && !memcmp(data + at, "\xef\xbb\xbf", 3)) { /* a byte-order mark: the reference's jsonlines skips one a line */
            at += 3;
            n -= 3;
        }
        while (blank < n && strchr(" \t\r", data[at + blank]) && data[at + blank])
            blank++;
        if (blank < n) {
            json_t *object = NULL;
            vla_error inner = VLA_ERROR_INIT;
            vla_status status = vlai_json_parse(data + at, n, file, &object, &inner);
            if (status == VLA_E_NOMEM)
                return vlai_fail(err, status, "%s", inner.message);
            if (status != VLA_OK || !json_is_object(object)) {
                vlai_finding f = vlai_finding_error("json", file);
                f.line = line;
                const char *what = status == VLA_OK ? "not an object" : strstr(inner.message, "not valid JSON"); /* behind a place within the line */
                if (faults++ < 10)
                    vlai_report(findings, &f, "%s", what ? what : inner.message);
            } else {
                status = fn(object, line, user, err);
            }
            json_decref(object);
            if (status != VLA_OK && inner.status == VLA_OK)
                return status;
        }
        at += n + 1;
    }
    return VLA_OK;
}

vla_status vlai_lines_read(const char *path, const char *file, vlai_line_fn fn, void *user, vlai_findings *findings,
                           vla_error *err)
{
    char *data;
    size_t size;
    VLA_TRY(vlai_read_file(path, 0, &data, &size, err));
    vla_status status = vlai_lines_parse(data, size, file, fn, user, findings, err);
    vlai_free(data);
    return status;
}
