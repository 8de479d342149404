/* Files: whole-file reads, read-only maps, and writes that are complete or absent.
 *
 * A directory or file that must never be seen half written is made under a temporary name in the same parent, synced,
 * and renamed by vlai_publish; the parent directory is synced after. All writes go through vlai_io_write, so that a
 * test can make the Nth one fail (vlai_io_fail_nth). */
#ifndef VLAI_IO_H
#define VLAI_IO_H

#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef struct vlai_map {
    const uint8_t *data; /* NULL for an empty file */
    size_t size;
} vlai_map;

vla_status vlai_map_open(const char *path, vlai_map *out, vla_error *err);
void vlai_map_close(vlai_map *map);

/* Reads a whole file of at most `limit` bytes (0 = 1 GiB) into a zero-terminated buffer released with vlai_free. */
vla_status vlai_read_file(const char *path, size_t limit, char **out, size_t *size, vla_error *err);

/* Buffered writer of one file. On any error the file is closed and unlinked. */
typedef struct vlai_writer {
    int fd;
    uint64_t offset; /* bytes accepted so far */
    uint8_t *buffer;
    size_t used;
    char *path;
} vlai_writer;

vla_status vlai_writer_open(vlai_writer *writer, const char *path, vla_error *err);
vla_status vlai_writer_put(vlai_writer *writer, const void *data, size_t size, vla_error *err);
vla_status vlai_writer_close(vlai_writer *writer, vla_error *err); /* flush, fsync, close */
void vlai_writer_abort(vlai_writer *writer);                       /* close and unlink; accepts a closed writer */

/* Appends to a file that others may read meanwhile; what stands in it stays, also after an error. */
typedef struct vlai_appender {
    int fd;
    char *path;
} vlai_appender;

vla_status vlai_append_open(vlai_appender *appender, const char *path, vla_error *err);
vla_status vlai_append(vlai_appender *appender, const void *data, size_t size, vla_error *err); /* in one write */
void vlai_append_close(vlai_appender *appender); /* accepts a closed one */

/* Writes at a place of an open file, without moving its position; `path` stands in messages. */
vla_status vlai_pwrite(int fd, const char *path, const void *data, size_t size, uint64_t offset, vla_error *err);

/* Writes `path` whole or not at all: temporary name, fsync, rename, fsync of the directory. */
vla_status vlai_write_file_atomic(const char *path, const void *data, size_t size, vla_error *err);
/* Renames a synced temporary file or directory to its final name and syncs the parent directory. */
vla_status vlai_publish(const char *temporary, const char *path, vla_error *err);

vla_status vlai_mkdirs(const char *path, vla_error *err);
vla_status vlai_sync_dir(const char *path, vla_error *err);
/* Locks a directory against other users of this function until `*fd` is closed or the process ends. `file`: a name in it that is made
 * and locked where directories have no locks, as on NFS; NULL: nothing is written. VLA_E_INVALID where another holds it; on file
 * systems without any locks `*fd` is open and nothing is locked. */
vla_status vlai_lock_dir(const char *path, const char *file, int *fd, vla_error *err);
void vlai_unlock_dir(int fd); /* accepts -1 */
/* Under which name this process makes the file that is renamed to `path` when it is whole; false where it does not fit into `size`. */
bool vlai_temporary_file(const char *path, char *temporary, size_t size);
/* The path without slashes at its end, and the folder beside it in which this process makes what is renamed to it when it is whole;
 * false where `path` is empty or they do not fit into `size`. */
bool vlai_temporary_dir(const char *path, char *target, char *temporary, size_t size);
/* Makes that folder, empty, and locks it until vlai_unlock_dir(*lock). What processes that are gone have left of making `target` is
 * removed first, with a line in the log for each. On an error *lock is -1 and nothing of this process is left; VLA_E_INVALID where
 * a process of another container, which has the number of this one, is making it. */
vla_status vlai_temporary_begin(const char *target, const char *temporary, int *lock, vla_error *err);
vla_status vlai_remove_tree(const char *path, vla_error *err); /* absent is fine */
bool vlai_is_dir(const char *path);
bool vlai_is_file(const char *path);
/* Path of a file among what may be made again: in $VLA_CACHE_DIR, else $XDG_CACHE_HOME/vla, else ~/.cache/vla. Makes the
 * folder; false when there is no such place or the path does not fit. */
bool vlai_cache_path(const char *name, char *path, size_t size);
/* A file there, with a checksum behind its bytes. false: it is not there, or not as it was written. *data is released with
 * vlai_free. A file that cannot be written is no error: it is made again. */
bool vlai_cache_read(const char *path, void **data, size_t *size);
void vlai_cache_write(const char *path, const void *data, size_t size);
/* Joins with one slash into `out` (at most `size` bytes); false when it does not fit. An absolute `name` wins. */
bool vlai_path_join(char *out, size_t size, const char *dir, const char *name);

/* Names in a directory without "." and "..", sorted bytewise. Released with vlai_free of each and of the array. */
vla_status vlai_list_dir(const char *path, char ***names, size_t *count, vla_error *err);
void vlai_names_free(char **names, size_t count);

/* Test seam: the Nth write, fsync or rename from now on fails with ENOSPC (1 = the next). 0 switches it off. Returns
 * how many such operations have been counted since the last call. */
uint64_t vlai_io_fail_nth(uint64_t nth);

VLA_END_DECLS

#endif
