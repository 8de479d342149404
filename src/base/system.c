#include "base/system.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PATH = 4096, LINE = PATH + 64 };

/* The number behind a name that begins a line of a file, as in "MemAvailable:  123 kB" and "inactive_file 123"; name "": the first. */
static bool read_number(const char *path, const char *name, unsigned long long *out)
{
    char line[256];
    size_t n = strlen(name);
    bool read = false;
    FILE *f = fopen(path, "re");
    while (!read && f && fgets(line, sizeof line, f))
        read = !strncmp(line, name, n) && sscanf(line + n, "%llu", out) == 1; /* "max" is no number */
    if (f)
        fclose(f);
    return read;
}

static size_t kilobytes(const char *path, const char *name)
{
    unsigned long long value = 0;
    return read_number(path, name, &value) ? (size_t)value * 1024 : 0;
}

uint64_t vlai_peak_resident_bytes(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_maxrss * 1024 : 0;
}

uint64_t vlai_resident_bytes(void)
{
    char text[128];
    unsigned long long total, resident = 0;
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC); /* a stream would allocate */
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    if (sscanf(text, "%llu %llu", &total, &resident) != 2)
        return 0;
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

size_t vlai_anonymous_bytes(void)
{
    return kilobytes("/proc/self/status", "RssAnon:");
}

/* ---- control groups ---- */

/* How the two versions name their files, and the keys of memory.stat that count pages of files. */
typedef struct version {
    const char *controller, *mount, *limit, *used, *files[2];
} version;

static const version versions[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file ", "active_file "}},
    {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file ", "total_active_file "}},
};

/* Whether a list such as "cpu,memory" has the name; the unified hierarchy's list is empty. */
static bool has_controller(const char *list, size_t size, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = list; at <= list + size; at += strcspn(at, ",:") + 1)
        if (strcspn(at, ",:") == n && !strncmp(at, name, n))
            return true;
    return false;
}

/* The path of this process' group in that hierarchy, out of lines "ID:CONTROLLERS:PATH"; "" for its root, or where it is not said. */
static void find_group(const char *root, const version *v, char out[PATH])
{
    char path[PATH], line[LINE];
    *out = 0;
    if (snprintf(path, sizeof path, "%s/proc/self/cgroup", root) >= (int)sizeof path)
        return;
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        const char *list = strchr(line, ':'), *group = list ? strchr(list + 1, ':') : NULL;
        if (!group || !has_controller(list + 1, (size_t)(group - list - 1), v->controller))
            continue;
        snprintf(out, PATH, "%.*s", (int)strcspn(group + 1, "\n"), group + 1);
        break;
    }
    if (f)
        fclose(f);
}

/* What one group leaves; SIZE_MAX where it has no limit, or is not to be seen from here. */
static size_t left_of(const char *root, const version *v, const char *group)
{
    char path[PATH];
    unsigned long long limit, used, files = 0, some;
    const char *const names[] = {v->limit, v->used, "memory.stat"};
    for (int i = 0; i < 3; i++) {
        if (snprintf(path, sizeof path, "%s%s%s/%s", root, v->mount, group, names[i]) >= (int)sizeof path)
            return SIZE_MAX;
        if (i < 2 && !read_number(path, "", i ? &used : &limit))
            return SIZE_MAX;
        for (int k = 0; i == 2 && k < 2; k++)
            files += read_number(path, v->files[k], &some) ? some : 0;
    }
    used -= files < used ? files : used;
    return limit > used ? (size_t)(limit - used) : 0;
}

size_t vlai_available_bytes_in(const char *root)
{
    char path[PATH], group[PATH];
    size_t available = snprintf(path, sizeof path, "%s/proc/meminfo", root) < (int)sizeof path ? kilobytes(path, "MemAvailable:") : 0;
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        find_group(root, &versions[i], group);
        for (char *end = group + strlen(group); end;) { /* the group, and those that it is in */
            while (end > group && end[-1] == '/')
                end--;
            *end = 0;
            size_t left = left_of(root, &versions[i], group);
            available = left < available ? left : available;
            end = strrchr(group, '/');
        }
    }
    return available;
}

size_t vlai_available_bytes(void)
{
    return vlai_available_bytes_in("");
}
