#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

static void to_stderr(vla_log_level level, const char *text, void *user)
{
    (void)user;
    const char *tag = level == VLA_LOG_ERROR ? "error: " : level == VLA_LOG_WARN ? "warning: " : "";
    fprintf(stderr, "vla: %s%s\n", tag, text);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static vla_log_fn sink = to_stderr;
static void *sink_user;
static vla_log_level threshold = VLA_LOG_INFO;

void vla_log_set(vla_log_fn fn, void *user, vla_log_level level)
{
    pthread_mutex_lock(&lock);
    sink = fn ? fn : to_stderr;
    sink_user = user;
    threshold = level;
    pthread_mutex_unlock(&lock);
}

void vlai_log(vla_log_level level, const char *format, ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    if (level <= threshold)
        sink(level, text, sink_user);
    pthread_mutex_unlock(&lock);
}
