/* Raising errors inside the library. Inner code raises once with vlai_fail; outer code may prefix its context.
 *
 *     return vlai_fail(err, VLA_E_SHAPE, "%s: tensor '%s' has %lld rows, wanted %lld", path, name, got, want);
 *     return vlai_fail_hint(err, VLA_E_NOT_FOUND, "check data.norm_stats_path", "%s: no such file", path);
 */
#ifndef VLAI_FAIL_H
#define VLAI_FAIL_H

#include "vla/error.h"

#include <stdarg.h>

VLA_BEGIN_DECLS

vla_status vlai_fail_at(vla_error *err, const char *source, int line, vla_status status, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Sets the hint of an error that has just been raised. Returns err's status, so that it can end a return statement. */
vla_status vlai_hint(vla_error *err, vla_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Puts "context: " before the message. Returns `status` unchanged. */
vla_status vlai_prefix(vla_error *err, vla_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Lays a caller's struct, which begins with its own size, over the defaults in `to`: a caller built with another version may have fewer
 * members than this library, which keep their defaults, or more, which are left out. INVALID when the size was not set. */
vla_status vlai_take_sized(void *to, size_t size, const void *from, const char *type, vla_error *err);

VLA_END_DECLS

#define vlai_fail(err, status, ...) vlai_fail_at((err), __FILE__, __LINE__, (status), __VA_ARGS__)
#define vlai_fail_hint(err, status, hint, ...) \
    vlai_hint((err), vlai_fail_at((err), __FILE__, __LINE__, (status), __VA_ARGS__), "%s", (hint))
#define vlai_nomem(err, bytes) \
    vlai_fail((err), VLA_E_NOMEM, "out of host memory (wanted %zu bytes)", (size_t)(bytes))

/* For functions that hold no resource. */
#define VLA_TRY(call)                      \
    do {                                   \
        vla_status vla_try_ = (call);      \
        if (vla_try_ != VLA_OK)            \
            return vla_try_;               \
    } while (0)

/* For functions with a cleanup ladder: sets `status` (a local) and jumps. */
#define VLA_TRY_GOTO(call, label)          \
    do {                                   \
        status = (call);                   \
        if (status != VLA_OK)              \
            goto label;                    \
    } while (0)

#endif
