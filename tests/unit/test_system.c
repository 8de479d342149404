/* What memory a process can still use: as the system says, and as its control groups leave it. */
#include "folder.h"

#include "base/system.h"

#include <stdlib.h>

static void put(const char *name, const char *text)
{
    vla_error err = VLA_ERROR_INIT;
    char path[1024];
    snprintf(path, sizeof path, "%s", at(name));
    char *slash = strrchr(path, '/');
    *slash = 0;
    assert_ok(vlai_mkdirs(path, &err), err);
    *slash = '/';
    assert_ok(vlai_write_file_atomic(path, text, strlen(text), &err), err);
}

/* Without control groups, or with such as set no limit. */
static void all_of_it(void **state)
{
    (void)state;
    put("plain/proc/meminfo", "MemTotal:       64 kB\nMemFree:        8 kB\nMemAvailable:   50 kB\n");
    assert_int_equal(vlai_available_bytes_in(at("plain")), 50 * 1024);
    put("plain/proc/self/cgroup", "0::/job\n");
    put("plain/sys/fs/cgroup/job/memory.max", "max\n");
    put("plain/sys/fs/cgroup/job/memory.current", "40000\n");
    assert_int_equal(vlai_available_bytes_in(at("plain")), 50 * 1024);
    assert_int_equal(vlai_available_bytes_in(at("nowhere")), 0);
}

/* The group's own limit, those of the groups that it is in, and that of a container, which sees its own as the root. Pages of files
 * make way, so that what was read from a disk does not count. */
static void what_groups_leave(void **state)
{
    (void)state;
    put("two/proc/meminfo", "MemAvailable:   1000 kB\n");
    put("two/proc/self/cgroup", "1:name=systemd:/x\n0::/batch/job/step\n");
    put("two/sys/fs/cgroup/batch/job/memory.max", "600000\n");
    put("two/sys/fs/cgroup/batch/job/memory.current", "500000\n");
    assert_int_equal(vlai_available_bytes_in(at("two")), 100000);
    put("two/sys/fs/cgroup/batch/job/memory.stat", "anon 100000\nfile 390000\ninactive_file 300000\nactive_file 90000\nslab 10\n");
    assert_int_equal(vlai_available_bytes_in(at("two")), 490000);
    put("two/sys/fs/cgroup/batch/job/step/memory.max", "70000\n");
    put("two/sys/fs/cgroup/batch/job/step/memory.current", "50000\n");
    assert_int_equal(vlai_available_bytes_in(at("two")), 20000);
    put("two/sys/fs/cgroup/memory.max", "15000\n");
    put("two/sys/fs/cgroup/memory.current", "5000\n");
    assert_int_equal(vlai_available_bytes_in(at("two")), 10000);
    put("two/sys/fs/cgroup/memory.current", "20000\n");
    assert_int_equal(vlai_available_bytes_in(at("two")), 0);

    put("one/proc/meminfo", "MemAvailable:   1000 kB\n");
    put("one/proc/self/cgroup", "5:cpu,cpuacct:/\n4:hugetlb,memory:/docker/f00\n0::/\n");
    put("one/sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n"); /* of the container: its path is not to be seen in it */
    put("one/sys/fs/cgroup/memory/memory.usage_in_bytes", "250000\n");
    put("one/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 30000\ntotal_active_file 10000\n");
    assert_int_equal(vlai_available_bytes_in(at("one")), 90000);
}

static void of_this_process(void **state)
{
    (void)state;
    enum { MORE = 32 << 20 };
    const uint64_t most = (test_sanitized() ? 8 : 2) * (uint64_t)MORE; /* a sanitizer has several bytes of its own for each */
    size_t anonymous = vlai_anonymous_bytes();
    uint64_t resident = vlai_resident_bytes();
    volatile char *more = malloc(MORE);
    for (size_t i = 0; i < MORE; i += 4096)
        more[i] = 1;
    assert_in_range(vlai_anonymous_bytes() - anonymous, MORE / 2, most);
    assert_in_range(vlai_resident_bytes() - resident, MORE / 2, most);
    assert_true(vlai_peak_resident_bytes() >= resident + MORE / 2);
    assert_true(vlai_available_bytes() > 0);
    free((void *)(uintptr_t)more);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(all_of_it), cmocka_unit_test(what_groups_leave), cmocka_unit_test(of_this_process)};
    return cmocka_run_group_tests(tests, make_root, drop_root);
}
