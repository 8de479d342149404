#include "data/finding.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static vlai_finding make(char level, const char *kind, const char *file)
{
    return (vlai_finding){
        .level = level, .kind = kind, .file = file, .episode = -1, .frame = -1, .dim = -1, .line = -1};
}

vlai_finding vlai_finding_error(const char *kind, const char *file)
{
    return make('E', kind, file);
}

vlai_finding vlai_finding_warning(const char *kind, const char *file)
{
    return make('W', kind, file);
}

vlai_value vlai_value_whole(int64_t whole)
{
    return (vlai_value){.kind = VLAI_VALUE_WHOLE, .whole = whole};
}

vlai_value vlai_value_real(double real)
{
    if (real == floor(real) && fabs(real) < 9e15)
        return vlai_value_whole((int64_t)real);
    return (vlai_value){.kind = VLAI_VALUE_REAL, .real = real};
}

vlai_value vlai_value_text(const char *text)
{
    return (vlai_value){.kind = VLAI_VALUE_TEXT, .text = text};
}

void vlai_report(vlai_findings *findings, vlai_finding *finding, const char *format, ...)
{
    char message[900];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    finding->message = message;
    if (finding->level == 'W')
        findings->warnings++;
    else if (finding->bound)
        findings->bound_errors++;
    else
        findings->errors++;
    findings->report(finding, findings->user);
    finding->message = NULL;
}

/* Messages of the file readers begin with the file's path, which the sentence already has. */
static const char *without_path(const vlai_finding *f)
{
    const char *at = f->file && f->message ? strstr(f->message, f->file) : NULL;
    size_t n = f->file ? strlen(f->file) : 0;
    bool leads = at && n && (at == f->message || at[-1] == '/') && at[n] == ':' && at[n + 1] && at[n + 2];
    return !leads ? f->message : at + n + (at[n + 1] == ' ' ? 2 : 1); /* or a line and a column follow */
}

/* Whether the message has the number itself: "episode 3 has no frames". */
static bool says(const vlai_finding *f, const char *part)
{
    const char *at = f->message ? strstr(f->message, part) : NULL;
    char after = at ? at[strlen(part)] : '0';
    return after < '0' || after > '9';
}

void vlai_finding_text(const vlai_finding *f, char *out, size_t size)
{
    int n = snprintf(out, size, "%s", f->file ? f->file : "");
    char *end = out + size;
    char *at = out + (n < 0 ? 0 : (size_t)n < size ? (size_t)n : size - 1);
    static const char *const names[] = {"episode", "frame", "dim", "line"};
    const int64_t numbers[] = {f->episode, f->frame, f->dim, f->line};
    const char *between = ": ";
    for (int i = 0; i < 4; i++) {
        char part[64];
        snprintf(part, sizeof part, "%s %lld", names[i], (long long)numbers[i]);
        if (numbers[i] < 0 || end - at <= 1 || says(f, part))
            continue;
        n = snprintf(at, (size_t)(end - at), "%s%s", between, part);
        at += n < 0 ? 0 : n < end - at ? n : end - at - 1;
        between = ", ";
    }
    if (end - at > 1)
        snprintf(at, (size_t)(end - at), ": %s", f->message ? without_path(f) : f->kind);
}
