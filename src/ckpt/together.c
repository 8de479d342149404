#include "ckpt/together.h"

#include "base/fail.h"
#include "base/memory.h"
#include "dist/group.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* As it travels, no longer than its texts (name, message and hint, one behind the other): values stay in the group's store. All
 * ranks run one version, which the group has compared. */
typedef struct said {
    uint64_t size, hash;
    vla_status status;
    char texts[sizeof ((vlai_ckpt_part *)0)->name + sizeof ((vla_error *)0)->message + sizeof ((vla_error *)0)->hint];
} said;

static void key_of(const vlai_together *t, int from, const char *what, char *out, size_t size)
{
    snprintf(out, size, "checkpoint/%d/%lld/%s/%d", t->writer, (long long)t->number, what, from);
}

vla_status vlai_together_say(vlai_together *t, const char *what, vla_status status, const vla_error *failure, const vlai_ckpt_part *part,
                             vla_error *err)
{
    char key[128];
    said s;
    memset(&s, 0, sizeof s);
    s.status = status;
    size_t at = 0;
    if (part) {
        s.size = part->size;
        s.hash = part->hash;
    }
    const char *texts[] = {part ? part->name : "", status != VLA_OK ? failure->message : "", status != VLA_OK ? failure->hint : ""};
    for (int i = 0; i < 3; i++) {
        memcpy(s.texts + at, texts[i], strlen(texts[i]) + 1);
        at += strlen(texts[i]) + 1;
    }
    /* Whoever takes part in this save has heard all of the last but one. */
    if (t->rank == 0 && t->number >= 2 && !strcmp(what, "begin")) {
        snprintf(key, sizeof key, "checkpoint/%d/%lld/", t->writer, (long long)t->number - 2);
        VLA_TRY(vlai_group_forget(t->group, key, err));
    }
    key_of(t, t->rank, what, key, sizeof key);
    return vlai_group_set(t->group, key, &s, offsetof(said, texts) + at, err);
}

/* The next of the texts, into `out`; the one after it is returned. */
static const char *take_text(const char *from, const char *end, char *out, size_t room)
{
    size_t n = strnlen(from, (size_t)(end - from));
    snprintf(out, room, "%.*s", (int)n, from);
    return from + n < end ? from + n + 1 : end;
}

vla_status vlai_together_hear(vlai_together *t, int from, const char *what, vlai_ckpt_part *part, vla_error *err)
{
    enum { LOOK = 1 /* second */ };
    char key[128];
    void *data = NULL;
    size_t size;
    key_of(t, from, what, key, sizeof key);
    vla_status status = VLA_E_NOT_FOUND;
    vlai_group_await(t->group, from);
    while (status == VLA_E_NOT_FOUND)
        status = atomic_load(&t->abandoned) ? vlai_fail(err, VLA_E_CANCELLED, "given up: this rank has failed")
                                            : vlai_group_get(t->group, key, LOOK, &data, &size, err);
    vlai_group_await(t->group, -1);
    VLA_TRY(status);
    said s;
    if (size < offsetof(said, texts) || size > sizeof s) {
        vlai_free(data);
        return vlai_fail(err, VLA_E_INTERNAL, "%s: %zu bytes, wanted %zu to %zu", key, size, offsetof(said, texts), sizeof s);
    }
    memset(&s, 0, sizeof s);
    memcpy(&s, data, size);
    vlai_free(data);
    vlai_ckpt_part heard = {.size = s.size, .hash = s.hash};
    vla_error failure = VLA_ERROR_INIT;
    const char *end = (const char *)&s + size, *text = take_text(s.texts, end, heard.name, sizeof heard.name);
    text = take_text(text, end, failure.message, sizeof failure.message);
    take_text(text, end, failure.hint, sizeof failure.hint);
    failure.status = s.status;
    if (part)
        *part = heard;
    if (s.status != VLA_OK && err)
        *err = failure;
    return s.status;
}
