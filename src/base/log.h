#ifndef VLAI_LOG_H
#define VLAI_LOG_H

#include "vla/log.h"

VLA_BEGIN_DECLS
void vlai_log(vla_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
VLA_END_DECLS

#define vlai_warn(...) vlai_log(VLA_LOG_WARN, __VA_ARGS__)
#define vlai_info(...) vlai_log(VLA_LOG_INFO, __VA_ARGS__)
#define vlai_debug(...) vlai_log(VLA_LOG_DEBUG, __VA_ARGS__)

#endif
