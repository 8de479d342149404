/* Collections: a folder of many datasets, such as RoboTwin's tasks. */
#include "base/fail.h"
#include "base/io.h"
#include "base/log.h"
#include "base/memory.h"
#include "vla/dataset.h"

#include <stdio.h>
#include <string.h>

enum { DEPTH_LIMIT = 8 }; /* links are followed, so a loop must end */

static vla_status walk(const char *dir, int depth, char ***roots, size_t *room, size_t *count, vla_error *err)
{
    char info[4096], **names = NULL;
    size_t n = 0;
    if (vlai_path_join(info, sizeof info, dir, "meta/info.json") && vlai_is_file(info)) {
        VLA_TRY(vlai_reserve((void **)roots, room, *count, sizeof **roots, err));
        (*roots)[*count] = vlai_strdup(dir);
        if (!(*roots)[*count])
            return vlai_nomem(err, strlen(dir));
        (*count)++;
        return VLA_OK;
    }
    vla_error why = VLA_ERROR_INIT;
    vla_status status = depth == 0 ? VLA_OK : vlai_list_dir(dir, &names, &n, &why);
    if (status == VLA_E_IO) /* sets may lie there */
        vlai_warn("%s: no data set is looked for there", why.message);
    if (depth == 0 || status != VLA_OK)
        return VLA_OK;
    for (size_t i = 0; i < n && status == VLA_OK; i++) {
        char child[4096];
        if (names[i][0] != '.' && vlai_path_join(child, sizeof child, dir, names[i]) && vlai_is_dir(child))
            status = walk(child, depth - 1, roots, room, count, err);
    }
    vlai_names_free(names, n);
    return status;
}

vla_status vla_dataset_discover(const char *dir, char ***roots, size_t *count, vla_error *err)
{
    *roots = NULL;
    *count = 0;
    size_t room = 0;
    vla_status status = walk(dir, DEPTH_LIMIT, roots, &room, count, err);
    if (status != VLA_OK) {
        vla_dataset_roots_free(*roots, *count);
        *roots = NULL;
        *count = 0;
    }
    return status; /* folders were listed in sorted order, so the roots are sorted */
}

void vla_dataset_roots_free(char **roots, size_t count)
{
    vlai_names_free(roots, count);
}
