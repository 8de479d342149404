/* Logging: one callback, five levels. Leaf code returns errors and does not log; the trainer and the tools log. */
#ifndef VLA_LOG_H
#define VLA_LOG_H

#include "vla/api.h"

typedef enum vla_log_level { VLA_LOG_ERROR, VLA_LOG_WARN, VLA_LOG_INFO, VLA_LOG_DEBUG, VLA_LOG_TRACE } vla_log_level;

/* `text` is one line without newline. Called from any thread, one call at a time. */
typedef void (*vla_log_fn)(vla_log_level level, const char *text, void *user);

VLA_BEGIN_DECLS

/* NULL restores the default: "vla: [warning|error:] text" to stderr. Lines above `level` are dropped. */
VLA_API void vla_log_set(vla_log_fn fn, void *user, vla_log_level level);

VLA_END_DECLS

#endif
