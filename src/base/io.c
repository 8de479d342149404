#include "base/io.h"

#include "base/fail.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/work.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { WRITER_BUFFER = 1 << 20 };

static atomic_uint_fast64_t io_count, io_fail_at;

uint64_t vlai_io_fail_nth(uint64_t nth)
{
    uint64_t seen = atomic_exchange(&io_count, 0);
    atomic_store(&io_fail_at, nth);
    return seen;
}

/* True when this operation is the one that must fail; sets errno. */
static bool injected(void)
{
    uint64_t n = atomic_fetch_add(&io_count, 1) + 1;
    if (n != atomic_load(&io_fail_at))
        return false;
    errno = ENOSPC;
    return true;
}

static vla_status fail_errno(vla_error *err, const char *verb, const char *path)
{
    int code = errno;
    vla_status status = code == ENOENT ? VLA_E_NOT_FOUND : VLA_E_IO;
    vlai_fail(err, status, "%s: cannot %s: %s", path, verb, strerror(code));
    if (code == ENOSPC)
        vlai_hint(err, status, "the disk is full: free some space, or write elsewhere");
    return status;
}

static const char *not_a_file(const struct stat *st)
{
    return S_ISDIR(st->st_mode) ? "is a folder, wanted a file" : "is no regular file";
}

vla_status vlai_map_open(const char *path, vlai_map *out, vla_error *err)
{
    out->data = NULL;
    out->size = 0;
    vlai_work_add();
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe that nobody writes to is no reason to wait */
    if (fd < 0)
        return fail_errno(err, "open", path);
    struct stat st;
    vla_status status = VLA_OK;
    if (fstat(fd, &st) != 0) {
        status = fail_errno(err, "stat", path);
    } else if (!S_ISREG(st.st_mode)) {
        status = vlai_fail(err, VLA_E_IO, "%s: %s", path, not_a_file(&st));
    } else if (st.st_size > 0) {
        void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            status = fail_errno(err, "map", path);
        } else {
            out->data = data;
            out->size = (size_t)st.st_size;
        }
    }
    close(fd);
    return status;
}

void vlai_map_close(vlai_map *map)
{
    if (map->data)
        munmap((void *)(uintptr_t)map->data, map->size);
    map->data = NULL;
    map->size = 0;
}

vla_status vlai_read_file(const char *path, size_t limit, char **out, size_t *size, vla_error *err)
{
    *out = NULL;
    if (limit == 0)
        limit = (size_t)1 << 30;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe that nobody writes to is no reason to wait */
    if (fd < 0)
        return fail_errno(err, "open", path);
    vla_status status = VLA_OK;
    char *data = NULL;
    struct stat st;
    if (fstat(fd, &st) != 0) {
        status = fail_errno(err, "stat", path);
        goto done;
    }
    if (!S_ISREG(st.st_mode)) {
        status = vlai_fail(err, VLA_E_IO, "%s: %s", path, not_a_file(&st));
        goto done;
    }
    if ((uint64_t)st.st_size > limit) {
        status = vlai_fail(err, VLA_E_IO, "%s: the file has %lld bytes, at most %zu are read", path, (long long)st.st_size, limit);
        goto done;
    }
    data = vlai_alloc((size_t)st.st_size + 1);
    if (!data) {
        status = vlai_nomem(err, st.st_size + 1);
        goto done;
    }
    size_t got = 0;
    while (got < (size_t)st.st_size) {
        ssize_t n = read(fd, data + got, (size_t)st.st_size - got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            status = fail_errno(err, "read", path);
            goto done;
        }
        if (n == 0)
            break;
        vlai_work_add();
        got += (size_t)n;
    }
    data[got] = 0;
    *out = data;
    if (size)
        *size = got;
    data = NULL;
done:
    vlai_free(data);
    close(fd);
    return status;
}

static vla_status write_all(int fd, const char *path, const uint8_t *data, size_t size, vla_error *err)
{
    while (size) {
        if (injected())
            return fail_errno(err, "write", path);
        ssize_t n = write(fd, data, size < VLAI_WORK_PIECE ? size : VLAI_WORK_PIECE);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail_errno(err, "write", path);
        vlai_work_add();
        data += n;
        size -= (size_t)n;
    }
    return VLA_OK;
}

vla_status vlai_pwrite(int fd, const char *path, const void *data, size_t size, uint64_t offset, vla_error *err)
{
    const uint8_t *p = data;
    while (size) {
        if (injected())
            return fail_errno(err, "write", path);
        ssize_t n = pwrite(fd, p, size, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail_errno(err, "write", path);
        p += n;
        size -= (size_t)n;
        offset += (uint64_t)n;
    }
    return VLA_OK;
}

vla_status vlai_writer_open(vlai_writer *writer, const char *path, vla_error *err)
{
    *writer = (vlai_writer){.fd = -1};
    writer->path = vlai_strdup(path);
    writer->buffer = vlai_alloc(WRITER_BUFFER);
    if (!writer->path || !writer->buffer) {
        vlai_writer_abort(writer);
        return vlai_nomem(err, WRITER_BUFFER);
    }
    writer->fd = injected() ? -1 : open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (writer->fd < 0) {
        vla_status status = fail_errno(err, "create", path);
        vlai_writer_abort(writer);
        return status;
    }
    return VLA_OK;
}

static vla_status writer_flush(vlai_writer *writer, vla_error *err)
{
    vla_status status = write_all(writer->fd, writer->path, writer->buffer, writer->used, err);
    writer->used = 0;
    return status;
}

vla_status vlai_writer_put(vlai_writer *writer, const void *data, size_t size, vla_error *err)
{
    const uint8_t *bytes = data;
    vla_status status = VLA_OK;
    writer->offset += size;
    if (size >= WRITER_BUFFER) {
        status = writer_flush(writer, err);
        if (status == VLA_OK)
            status = write_all(writer->fd, writer->path, bytes, size, err);
        size = 0;
    }
    while (status == VLA_OK && size) {
        size_t room = WRITER_BUFFER - writer->used, n = size < room ? size : room;
        memcpy(writer->buffer + writer->used, bytes, n);
        writer->used += n;
        bytes += n;
        size -= n;
        if (writer->used == WRITER_BUFFER)
            status = writer_flush(writer, err);
    }
    if (status != VLA_OK)
        vlai_writer_abort(writer);
    return status;
}

vla_status vlai_writer_close(vlai_writer *writer, vla_error *err)
{
    vla_status status = writer_flush(writer, err);
    if (status == VLA_OK && (injected() || fsync(writer->fd) != 0))
        status = fail_errno(err, "sync", writer->path);
    vlai_work_add();
    if (status != VLA_OK) {
        vlai_writer_abort(writer);
        return status;
    }
    close(writer->fd);
    vlai_free(writer->buffer);
    vlai_free(writer->path);
    *writer = (vlai_writer){.fd = -1};
    return VLA_OK;
}

void vlai_writer_abort(vlai_writer *writer)
{
    if (writer->fd >= 0) {
        close(writer->fd);
        unlink(writer->path);
    }
    vlai_free(writer->buffer);
    vlai_free(writer->path);
    *writer = (vlai_writer){.fd = -1};
}

vla_status vlai_append_open(vlai_appender *a, const char *path, vla_error *err)
{
    *a = (vlai_appender){.fd = -1, .path = vlai_strdup(path)};
    if (!a->path)
        return vlai_nomem(err, strlen(path));
    a->fd = injected() ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (a->fd < 0) {
        vla_status status = fail_errno(err, "open for appending", path);
        vlai_append_close(a);
        return status;
    }
    return VLA_OK;
}

vla_status vlai_append(vlai_appender *a, const void *data, size_t size, vla_error *err)
{
    return write_all(a->fd, a->path, data, size, err);
}

void vlai_append_close(vlai_appender *a)
{
    if (a->path && a->fd >= 0)
        close(a->fd);
    vlai_free(a->path);
    *a = (vlai_appender){.fd = -1};
}

vla_status vlai_sync_dir(const char *path, vla_error *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return fail_errno(err, "open directory", path);
    vla_status status = VLA_OK;
    if (injected() || fsync(fd) != 0)
        status = fail_errno(err, "sync directory", path);
    close(fd);
    return status;
}

vla_status vlai_lock_dir(const char *path, const char *file, int *fd, vla_error *err)
{
    char inside[4096];
    *fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0)
        return fail_errno(err, "open directory", path);
    errno = 0;
    bool held = flock(*fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!held && errno == EBADF && file && vlai_path_join(inside, sizeof inside, path, file)) {
        int other = open(inside, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (other < 0)
            return VLA_OK;
        close(*fd);
        *fd = other;
        held = flock(other, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    }
    if (!held)
        return VLA_OK;
    close(*fd);
    *fd = -1;
    return vlai_fail(err, VLA_E_INVALID, "%s: in use by another process", path);
}

void vlai_unlock_dir(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void parent_of(const char *path, char parent[4096])
{
    snprintf(parent, 4096, "%s", path);
    char *slash = strrchr(parent, '/');
    if (!slash)
        snprintf(parent, 4096, ".");
    else
        slash[slash == parent] = 0;
}

/* /dev/null, a pipe, and /dev/stdout, which is a link to an open file. */
static bool is_no_place(const char *path)
{
    static const char open_files[] = "/proc/";
    char link[sizeof open_files];
    struct stat st;
    if (lstat(path, &st) != 0 || S_ISREG(st.st_mode) || S_ISDIR(st.st_mode))
        return false;
    return !S_ISLNK(st.st_mode) ||
           (readlink(path, link, sizeof link) == (ssize_t)sizeof link && memcmp(link, open_files, sizeof open_files - 1) == 0);
}

vla_status vlai_publish(const char *temporary, const char *path, vla_error *err)
{
    if (is_no_place(path))
        return vlai_fail_hint(err, VLA_E_INVALID, "name a file", "%s: a device, a pipe or an open file, which a file would replace", path);
    if (injected() || rename(temporary, path) != 0)
        return fail_errno(err, "rename into place", path);
    char parent[4096];
    parent_of(path, parent);
    return vlai_sync_dir(parent, err);
}

bool vlai_temporary_file(const char *path, char *temporary, size_t size)
{
    int used = snprintf(temporary, size, "%s.tmp.%ld", path, (long)getpid());
    return used >= 0 && (size_t)used < size;
}

vla_status vlai_write_file_atomic(const char *path, const void *data, size_t size, vla_error *err)
{
    char temporary[4096];
    if (!vlai_temporary_file(path, temporary, sizeof temporary))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
    vlai_writer writer;
    VLA_TRY(vlai_writer_open(&writer, temporary, err));
    VLA_TRY(vlai_writer_put(&writer, data, size, err));
    VLA_TRY(vlai_writer_close(&writer, err));
    vla_status status = vlai_publish(temporary, path, err);
    if (status != VLA_OK)
        unlink(temporary);
    return status;
}

vla_status vlai_mkdirs(const char *path, vla_error *err)
{
    char part[4096];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part)
        return vlai_fail(err, VLA_E_INVALID, "'%s': not a usable directory name", path);
    memcpy(part, path, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (part[i] != '/' && part[i] != 0)
            continue;
        char saved = part[i];
        part[i] = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return fail_errno(err, "create directory", part);
        part[i] = saved;
    }
    return vlai_is_dir(path) ? VLA_OK : vlai_fail(err, VLA_E_IO, "%s: exists and is not a directory", path);
}

bool vlai_temporary_dir(const char *path, char *target, char *temporary, size_t size)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    int used = snprintf(target, size, "%.*s", (int)n, path);
    if (n == 0 || used < 0 || (size_t)used >= size)
        return false;
    used = snprintf(temporary, size, "%s.tmp-%ld", target, (long)getpid());
    return used >= 0 && (size_t)used < size;
}

/* Whether the process that was making this folder is gone: no process here has its number, and none elsewhere holds the lock. Where
 * the file system has no locks, one elsewhere may be at it. */
static bool is_left_over(const char *dir, const char *number)
{
    char *end;
    errno = 0;
    long pid = strtol(number, &end, 10);
    if (number[0] < '1' || number[0] > '9' || *end || errno || pid > INT_MAX || kill((pid_t)pid, 0) == 0 || errno != ESRCH)
        return false;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool locked = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;
    vlai_unlock_dir(fd);
    return locked;
}

static vla_status remove_leftovers(const char *target, vla_error *err)
{
    char parent[4096], dir[4096], **names;
    size_t count;
    const char *slash = strrchr(target, '/'), *base = slash ? slash + 1 : target;
    size_t n = strlen(base);
    vla_error inner = VLA_ERROR_INIT;
    parent_of(target, parent);
    vla_status status = vlai_list_dir(parent, &names, &count, &inner);
    if (status != VLA_OK) /* there is none yet, or it may not be read */
        return status == VLA_E_NOMEM ? vlai_fail(err, status, "%s", inner.message) : VLA_OK;
    for (size_t i = 0; i < count; i++) {
        static const char middle[] = ".tmp-";
        if (strncmp(names[i], base, n) != 0 || strncmp(names[i] + n, middle, sizeof middle - 1) != 0 ||
            !vlai_path_join(dir, sizeof dir, parent, names[i]) || !is_left_over(dir, names[i] + n + sizeof middle - 1))
            continue;
        if (vlai_remove_tree(dir, &inner) == VLA_OK)
            vlai_info("%s, which a process that is gone had left, was removed", dir);
        else
            vlai_warn("%s was left by a process that is gone: %s", dir, inner.message);
    }
    vlai_names_free(names, count);
    return VLA_OK;
}

static vla_status remove_content(const char *path, vla_error *err)
{
    char **names;
    size_t count;
    VLA_TRY(vlai_list_dir(path, &names, &count, err));
    vla_status status = VLA_OK;
    for (size_t i = 0; i < count && status == VLA_OK; i++) {
        char child[4096];
        if (!vlai_path_join(child, sizeof child, path, names[i]))
            status = vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", path, names[i]);
        else
            status = vlai_remove_tree(child, err);
    }
    vlai_names_free(names, count);
    return status;
}

vla_status vlai_temporary_begin(const char *target, const char *temporary, int *lock, vla_error *err)
{
    *lock = -1;
    VLA_TRY(remove_leftovers(target, err));
    VLA_TRY(vlai_mkdirs(temporary, err));
    VLA_TRY(vlai_lock_dir(temporary, NULL, lock, err)); /* a process of another container may have the number of this one */
    vla_status status = remove_content(temporary, err);
    if (status != VLA_OK) {
        vlai_remove_tree(temporary, NULL);
        vlai_unlock_dir(*lock);
        *lock = -1;
    }
    return status;
}

vla_status vlai_remove_tree(const char *path, vla_error *err)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return errno == ENOENT ? VLA_OK : fail_errno(err, "stat", path);
    if (!S_ISDIR(st.st_mode))
        return unlink(path) == 0 ? VLA_OK : fail_errno(err, "remove", path);
    VLA_TRY(remove_content(path, err));
    return rmdir(path) == 0 ? VLA_OK : fail_errno(err, "remove directory", path);
}

bool vlai_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool vlai_is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

bool vlai_cache_path(const char *name, char *path, size_t size)
{
    static const struct { const char *variable, *folder; } places[] = {{"VLA_CACHE_DIR", ""}, {"XDG_CACHE_HOME", "/vla"}, {"HOME", "/.cache/vla"}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const char *root = getenv(places[i].variable);
        if (!root || !*root)
            continue;
        int n = snprintf(path, size, "%s%s", root, places[i].folder);
        if (n < 0 || (size_t)n >= size || vlai_mkdirs(path, NULL) != VLA_OK)
            return false;
        size_t used = (size_t)n;
        n = snprintf(path + used, size - used, "/%s", name);
        return n >= 0 && (size_t)n < size - used;
    }
    return false;
}

bool vlai_cache_read(const char *path, void **data, size_t *size)
{
    char *read = NULL;
    XXH64_hash_t sum;
    *data = NULL;
    if (!vlai_is_file(path) || vlai_read_file(path, 0, &read, size, NULL) != VLA_OK)
        return false;
    if (*size >= sizeof sum) {
        *size -= sizeof sum;
        memcpy(&sum, read + *size, sizeof sum);
        if (sum == XXH64(read, *size, 0)) {
            *data = read;
            return true;
        }
    }
    vlai_free(read);
    return false;
}

void vlai_cache_write(const char *path, const void *data, size_t size)
{
    XXH64_hash_t sum = XXH64(data, size, 0);
    char *all = vlai_alloc(size + sizeof sum);
    if (!all)
        return;
    memcpy(all, data, size);
    memcpy(all + size, &sum, sizeof sum);
    (void)vlai_write_file_atomic(path, all, size + sizeof sum, NULL);
    vlai_free(all);
}

bool vlai_path_join(char *out, size_t size, const char *dir, const char *name)
{
    int n;
    if (name[0] == '/' || dir[0] == 0)
        n = snprintf(out, size, "%s", name);
    else
        n = snprintf(out, size, "%s%s%s", dir, dir[strlen(dir) - 1] == '/' ? "" : "/", name);
    return n >= 0 && (size_t)n < size;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

vla_status vlai_list_dir(const char *path, char ***names, size_t *count, vla_error *err)
{
    *names = NULL;
    *count = 0;
    DIR *dir = opendir(path);
    if (!dir)
        return fail_errno(err, "open directory", path);
    vla_status status = VLA_OK;
    size_t capacity = 0;
    for (struct dirent *entry; status == VLA_OK && (entry = readdir(dir));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        status = vlai_reserve((void **)names, &capacity, *count, sizeof **names, err);
        if (status != VLA_OK)
            break;
        (*names)[*count] = vlai_strdup(entry->d_name);
        if (!(*names)[*count])
            status = vlai_nomem(err, strlen(entry->d_name));
        else
            (*count)++;
    }
    closedir(dir);
    if (status != VLA_OK) {
        vlai_names_free(*names, *count);
        *names = NULL;
        *count = 0;
    } else if (*count) {
        qsort(*names, *count, sizeof **names, compare_names);
    }
    return status;
}

void vlai_names_free(char **names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        vlai_free(names[i]);
    vlai_free(names);
}
