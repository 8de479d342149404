#include "base/fail.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *text;
} status_table[VLA_STATUS_COUNT] = {
#define VLA_X(name, text) {#name, text},
    VLA_STATUS_MAP(VLA_X)
#undef VLA_X
};

const char *vla_status_name(vla_status status)
{
    return (unsigned)status < VLA_STATUS_COUNT ? status_table[status].name : "UNKNOWN";
}

const char *vla_status_text(vla_status status)
{
    return (unsigned)status < VLA_STATUS_COUNT ? status_table[status].text : "unknown status";
}

vla_status vlai_fail_at(vla_error *err, const char *source, int line, vla_status status, const char *format, ...)
{
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
        err->status = status;
        err->hint[0] = 0;
        err->source = source;
        err->line = line;
    }
    return status;
}

vla_status vlai_hint(vla_error *err, vla_status status, const char *format, ...)
{
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->hint, sizeof err->hint, format, args);
        va_end(args);
    }
    return status;
}

vla_status vlai_prefix(vla_error *err, vla_status status, const char *format, ...)
{
    if (err && status != VLA_OK) { /* else nobody has written a message */
        char old[sizeof err->message];
        memcpy(old, err->message, sizeof old);
        va_list args;
        va_start(args, format);
        int n = vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
        if (n >= 0 && (size_t)n < sizeof err->message)
            snprintf(err->message + n, sizeof err->message - (size_t)n, ": %s", old);
    }
    return status;
}

vla_status vlai_take_sized(void *to, size_t size, const void *from, const char *type, vla_error *err)
{
    size_t given = *(const size_t *)from;
    if (given < sizeof given)
        return vlai_fail_hint(err, VLA_E_INVALID, "set it to the size of the struct, as its initialiser does where there is one",
                              "%s: the member size is %zu", type, given);
    memcpy(to, from, given < size ? given : size);
    return VLA_OK;
}
