#include "dist/group.h"

#include "base/fail.h"

#include <string.h>

struct vlai_group {
    int rank, world;
};

vla_status vlai_group_join(const vlai_ranks *ranks, const vlai_group_options *options, vlai_group **out, vla_error *err)
{
    (void)options;
    *out = NULL;
    if (ranks->world > 1)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%d ranks: this build runs one", ranks->world);
    return VLA_OK;
}

int vlai_group_rank(const vlai_group *group) { return group ? group->rank : 0; }
int vlai_group_world(const vlai_group *group) { return group ? group->world : 1; }
double vlai_group_timeout(const vlai_group *group) { (void)group; return 300; }

const char *vlai_group_host(const vlai_group *group, int rank)
{
    (void)group;
    (void)rank;
    return "";
}

static vla_status alone(const char *what, vla_error *err)
{
    return vlai_fail(err, VLA_E_INVALID, "%s: one rank has no store of keys", what);
}

vla_status vlai_group_set(vlai_group *group, const char *key, const void *data, size_t size, vla_error *err)
{
    (void)group, (void)data, (void)size;
    return alone(key, err);
}

vla_status vlai_group_get(vlai_group *group, const char *key, double timeout_s, void **data, size_t *size, vla_error *err)
{
    (void)group, (void)timeout_s;
    *data = NULL;
    *size = 0;
    return alone(key, err);
}

vla_status vlai_group_barrier(vlai_group *group, const char *what, double timeout_s, vla_error *err)
{
    (void)group, (void)what, (void)timeout_s, (void)err;
    return VLA_OK;
}

vla_status vlai_group_agree(vlai_group *group, const char *what, const char *text, vla_error *err)
{
    (void)group, (void)what, (void)text, (void)err;
    return VLA_OK;
}

vla_status vlai_group_broadcast(vlai_group *group, const char *what, void *data, size_t size, vla_error *err)
{
    (void)group, (void)what, (void)data, (void)size, (void)err;
    return VLA_OK;
}

vla_status vlai_group_gather(vlai_group *group, const char *what, const void *data, size_t size, void *all, vla_error *err)
{
    (void)group, (void)what, (void)err;
    memmove(all, data, size);
    return VLA_OK;
}

vla_status vlai_group_gather_all(vlai_group *group, const char *what, const void *data, size_t size, void *all, vla_error *err)
{
    return vlai_group_gather(group, what, data, size, all, err);
}

void vlai_group_progress(vlai_group *group, const char *phase, int64_t step) { (void)group, (void)phase, (void)step; }
vla_status vlai_group_status(vlai_group *group, vla_error *err) { (void)group, (void)err; return VLA_OK; }
vla_status vlai_group_fail(vlai_group *group, vla_error *err) { (void)group; return err ? err->status : VLA_OK; }
vla_status vlai_group_leave(vlai_group *group, vla_error *err) { (void)group, (void)err; return VLA_OK; }
