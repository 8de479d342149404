#include "ckpt/together.h"

#include "base/fail.h"
#include "base/memory.h"
#include "dist/group.h"

#include <stdio.h>
#include <string.h>

/* As it travels: all ranks run one version (the group has compared it). */
typedef struct said {
    vla_error error;
    vlai_ckpt_part part;
} said;

static void key_of(const vlai_together *t, int from, const char *what, char *out, size_t size)
{
    snprintf(out, size, "checkpoint/%lld/%s/%d", (long long)t->number, what, from);
}

vla_status vlai_together_say(vlai_together *t, const char *what, vla_status status, const vla_error *failure, const vlai_ckpt_part *part,
                             vla_error *err)
{
    char key[128];
    said s;
    memset(&s, 0, sizeof s);
    if (status != VLA_OK)
        s.error = *failure;
    s.error.status = status;
    s.error.source = NULL;
    if (part)
        s.part = *part;
    /* Whoever takes part in this save has heard all of the last but one. */
    if (t->rank == 0 && t->number >= 2 && !strcmp(what, "begin")) {
        snprintf(key, sizeof key, "checkpoint/%lld/", (long long)t->number - 2);
        VLA_TRY(vlai_group_forget(t->group, key, err));
    }
    key_of(t, t->rank, what, key, sizeof key);
    return vlai_group_set(t->group, key, &s, sizeof s, err);
}

vla_status vlai_together_hear(vlai_together *t, int from, const char *what, vlai_ckpt_part *part, vla_error *err)
{
    enum { LOOK = 1 /* second */ };
    char key[128];
    void *data = NULL;
    size_t size;
    key_of(t, from, what, key, sizeof key);
    vla_status status = VLA_E_NOT_FOUND;
    while (status == VLA_E_NOT_FOUND) {
        if (atomic_load(&t->abandoned))
            return vlai_fail(err, VLA_E_CANCELLED, "given up: this rank has failed");
        status = vlai_group_get(t->group, key, LOOK, &data, &size, err);
    }
    VLA_TRY(status);
    said s;
    if (size != sizeof s) {
        vlai_free(data);
        return vlai_fail(err, VLA_E_INTERNAL, "%s: %zu bytes, wanted %zu", key, size, sizeof s);
    }
    memcpy(&s, data, sizeof s);
    vlai_free(data);
    if (part)
        *part = s.part;
    if (s.error.status == VLA_OK)
        return VLA_OK;
    if (err)
        *err = s.error;
    return s.error.status;
}
