/* The temporary folder of a test program, and names in it. make_root and drop_root are for cmocka_run_group_tests. */
#ifndef VLA_TEST_FOLDER_H
#define VLA_TEST_FOLDER_H

#include "test.h"

#include "base/io.h"

static char root[] = "/tmp/vla-test-XXXXXX";

static inline int make_root(void **state)
{
    (void)state;
    return mkdtemp(root) ? 0 : -1;
}

static inline int drop_root(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    return vlai_remove_tree(root, &err);
}

/* Good until the eighth call after this one. */
static inline const char *at(const char *name)
{
    static char path[8][512];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[turn], "%s/%s", root, name);
    return path[turn];
}

#endif
