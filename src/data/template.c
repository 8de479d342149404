/* Path templates of info.json: literal text, {name}, {name:0Nd}, {{ and }}. */
#include "data/set.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const known[] = {"episode_chunk", "episode_index", "chunk_index", "file_index", "video_key"};
enum { KNOWN = sizeof known / sizeof *known };

/* One piece of a template: a literal character, or a field. False at a malformed piece. */
static bool next_piece(const char **text, char *literal, char name[64], int *width)
{
    const char *t = *text;
    *width = -1; /* -1: literal; 0..: field */
    if ((t[0] == '{' && t[1] == '{') || (t[0] == '}' && t[1] == '}')) {
        *literal = t[0];
        *text = t + 2;
        return true;
    }
    if (t[0] == '}')
        return false;
    if (t[0] != '{') {
        *literal = t[0];
        *text = t + 1;
        return true;
    }
    size_t n = strcspn(++t, ":}");
    if (n == 0 || n >= 64 || !t[n])
        return false;
    memcpy(name, t, n);
    name[n] = 0;
    t += n;
    *width = 0;
    if (*t == ':') {
        char *end;
        t++;
        long w = strtol(t, &end, 10);
        if (end == t && *t != 'd')
            return false;
        if (*end != 'd' || end[1] != '}' || w < 0 || w > 20)
            return false;
        *width = (int)w;
        t = end + 1;
    }
    *text = t + 1;
    return true;
}

const char *vlai_template_unknown(const char *text, char unknown[64])
{
    while (*text) {
        char literal = 0;
        int width;
        const char *at = text;
        if (!next_piece(&text, &literal, unknown, &width)) {
            snprintf(unknown, 64, "%s", at);
            return unknown;
        }
        if (width < 0)
            continue;
        int k = 0;
        while (k < KNOWN && strcmp(known[k], unknown))
            k++;
        if (k == KNOWN)
            return unknown;
    }
    return NULL;
}

vla_status vlai_template_fill(const char *text, const vlai_template_fields *fields, char *out, size_t size,
                              vla_error *err)
{
    const char *whole = text;
    const int64_t values[] = {fields->episode_chunk, fields->episode_index, fields->chunk_index, fields->file_index};
    size_t used = 0;
    while (*text) {
        char literal = 0, name[64];
        int width, n;
        if (!next_piece(&text, &literal, name, &width))
            return vlai_fail(err, VLA_E_FORMAT, "path template '%s' is malformed", whole);
        size_t left = size - used;
        if (width < 0) {
            n = snprintf(out + used, left, "%c", literal);
        } else if (!strcmp(name, "video_key") && fields->video_key) {
            n = snprintf(out + used, left, "%s", fields->video_key);
        } else {
            int k = 0;
            while (k < 4 && strcmp(known[k], name))
                k++;
            if (k == 4)
                return vlai_fail(err, VLA_E_FORMAT, "path template '%s' uses the unknown field '%s'", whole, name);
            n = snprintf(out + used, left, "%0*lld", width, (long long)values[k]);
        }
        if (n < 0 || (size_t)n >= left)
            return vlai_fail(err, VLA_E_FORMAT, "path template '%s' makes a path that is too long", whole);
        used += (size_t)n;
    }
    out[used] = 0;
    return VLA_OK;
}

bool vlai_path_escapes(const char *text)
{
    if (text[0] == '/')
        return true;
    for (const char *t = text; *t;) {
        size_t n = strcspn(t, "/");
        if (n == 2 && t[0] == '.' && t[1] == '.')
            return true;
        t += n;
        t += *t == '/';
    }
    return false;
}
