/* The lock of a folder: where directories have locks, and where, as on NFS, only files have that are open for writing. */
#define _GNU_SOURCE /* syscall */
#include "test.h"

#include "base/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

static char folder[] = "/tmp/vla-lock-XXXXXX";
static bool as_on_nfs;

/* In place of the C library's. */
int flock(int fd, int operation)
{
    if (as_on_nfs && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) {
        errno = EBADF;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}

static void held_once(const char *file)
{
    vla_error err = VLA_ERROR_INIT;
    int first, second;
    assert_ok(vlai_lock_dir(folder, file, &first, &err), err);
    assert_fails(vlai_lock_dir(folder, file, &second, &err), VLA_E_INVALID, err, "in use by another process");
    assert_int_equal(second, -1);
    vlai_unlock_dir(first);
    assert_ok(vlai_lock_dir(folder, file, &second, &err), err);
    vlai_unlock_dir(second);
}

static void a_directory(void **state)
{
    (void)state;
    as_on_nfs = false;
    held_once(".lock");
    char path[64];
    snprintf(path, sizeof path, "%s/.lock", folder);
    assert_false(vlai_is_file(path)); /* nothing is written where it need not be */
    held_once(NULL);
}

static void a_file_in_it(void **state)
{
    (void)state;
    as_on_nfs = true;
    held_once(".lock");
    vla_error err = VLA_ERROR_INIT;
    int first, second;
    assert_ok(vlai_lock_dir(folder, NULL, &first, &err), err);
    assert_ok(vlai_lock_dir(folder, NULL, &second, &err), err);
    vlai_unlock_dir(first);
    vlai_unlock_dir(second);
}

static int make(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int clear(void **state)
{
    (void)state;
    return vlai_remove_tree(folder, NULL) == VLA_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_directory), cmocka_unit_test(a_file_in_it)};
    return cmocka_run_group_tests(tests, make, clear);
}
