/* What the writer and the reader of checkpoints share: names, checksums, the list of checkpoints of a run folder, room on
 * the disk. store_io.c turns stores into tensors and back, writer.c writes, reader.c finds, verifies and restores. */
#ifndef VLAI_CKPT_H
#define VLAI_CKPT_H

#include "base/memory.h"
#include "base/text.h"
#include "format/safetensors.h"
#include "vla/checkpoint.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

enum { VLAI_CKPT_PATH = 4096, VLAI_CKPT_FORMAT = 1 };

#define VLAI_CKPT_MODEL "model.safetensors"
#define VLAI_CKPT_STATE "state.json"
#define VLAI_CKPT_OPTIMIZER "optimizer-" /* begins the names of the optimizer's files */
#define VLAI_CKPT_CHECKSUMS "checksums.json"
#define VLAI_CKPT_DONE "DONE"
#define VLAI_CKPT_LATEST "latest"
#define VLAI_CKPT_TEMPORARY ".tmp"      /* ending of a directory that is being written or deleted */
#define VLAI_CKPT_OLD ".old"             /* ending of one that belongs to a run before this one; never read */
#define VLAI_CKPT_REPLACED ".replaced"  /* ending of a whole one, for the moment in which a rewrite takes its place */

/* "optimizer-R-of-N.safetensors": what rank R of N keeps of the optimizer's state. */
enum { VLAI_CKPT_NAME = 64 };
void vlai_ckpt_optimizer_name(int rank, int world, char out[VLAI_CKPT_NAME]);
bool vlai_ckpt_parse_optimizer(const char *name, int *rank, int *world);

/* The weights (any numerics) and the optimizer's tensors of a store, as views for the safetensors writer. Released with
 * vlai_ckpt_views_fini. */
typedef struct vlai_ckpt_views {
    vlai_tensor_view *views; /* data NULL where the store has no host memory */
    struct {
        vla_store_kind kind;
        size_t index;
        int64_t first; /* element of the tensor that the view begins with */
    } *place; /* in the store, per view */
    size_t count;
    const char **metadata; /* of the file: key, value, ..., NULL */
    vlai_arena names;
} vlai_ckpt_views;
vla_status vlai_ckpt_weight_views(const vla_store *store, vlai_ckpt_views *out, vla_error *err);
/* With world > 1 a tensor is one row of the elements that this rank keeps, and "slice:NAME" in the file's metadata is the
 * first of them; a tensor of which it keeps none is not there. */
vla_status vlai_ckpt_optimizer_views(const vla_store *store, int world, vlai_ckpt_views *out, vla_error *err);
#define VLAI_CKPT_OWN "own" /* key of vla_checkpoint_content.own in the metadata */
/* One more entry of the file's metadata; the value is borrowed. */
void vlai_ckpt_views_note(vlai_ckpt_views *views, const char *key, const char *value);
void vlai_ckpt_views_fini(vlai_ckpt_views *views);
/* Writes the views' tensors of the store as one file, wherever the store lives. */
vla_status vlai_ckpt_write(const vla_store *store, const vlai_ckpt_views *views, const char *path, vla_error *err);
/* Shows a tensor's elements, as far as this rank keeps them, in the checkpoint's order and the stored type: in one piece where they stand so in host memory,
 * else piece by piece. */
vla_status vlai_ckpt_each_piece(const vla_store *store, vla_store_kind kind, size_t index,
                                vla_status (*piece)(void *user, int64_t first, int64_t n, const void *data, vla_error *err),
                                void *user, vla_error *err);
/* Bytes of the tensors of all files; of those that rank `rank` of a group writes. */
size_t vlai_ckpt_bytes(const vla_store *store);
size_t vlai_ckpt_share(const vla_store *store, int rank);
/* The same of all ranks of rank `rank`'s host together, as this rank's own slices are long; group: NULL = one rank. */
struct vlai_group;
size_t vlai_ckpt_host_share(const vla_store *store, const struct vlai_group *group, int rank);
/* The first value of weights (when asked for) or of the moments that this rank keeps that is NaN or infinite is an error that
 * names it. */
vla_status vlai_ckpt_check_finite(const vla_store *store, bool weights, vla_error *err);

/* Tensors of files into a store. The optimizer's come from the files of all ranks that wrote it, and of each the elements
 * that this rank keeps are taken. */
vla_status vlai_ckpt_read_weights(vla_store *store, const vlai_safetensors *file, const char *path, vla_error *err);
vla_status vlai_ckpt_read_optimizer(vla_store *store, vlai_safetensors *const *files, size_t count, const char *path, vla_error *err);

/* XXH64 (seed 0) and size of a file. */
vla_status vlai_ckpt_hash_file(const char *path, uint64_t *hash, uint64_t *size, vla_error *err);
/* Every file that checksums.json lists is there with its size and, with `hashes`, its hash; DONE is there. */
vla_status vlai_ckpt_verify(const char *dir, bool hashes, vla_error *err);

/* Whether this is a checkpoint, and has not been deleted, which begins with a rename. */
bool vlai_ckpt_is_there(const char *dir);

/* A checkpoint whose files another rank has verified. */
vla_status vlai_checkpoint_open_known(const char *dir, vla_checkpoint **out, vla_error *err);

/* Checkpoints of a run folder that have DONE, newest step first. `name` is the directory's. */
typedef struct vlai_ckpt_entry {
    char *name;
    int64_t epoch, step;
} vlai_ckpt_entry;
vla_status vlai_ckpt_list(const char *run, vlai_ckpt_entry **out, size_t *count, vla_error *err);
void vlai_ckpt_list_free(vlai_ckpt_entry *entries, size_t count);
/* "EPOCH_STEP", possibly with VLAI_CKPT_REPLACED behind it. */
bool vlai_ckpt_parse_name(const char *name, int64_t *epoch, int64_t *step);

/* Renames checkpoints of a run folder whose step is above `step` to NAME.old, so that a run which starts over, or goes back, does
 * not meet them as its own future. Where one of that ending is there already, all get NAME.old2, and so on: none is replaced. */
vla_status vlai_ckpt_set_aside(const char *run, int64_t step, vla_error *err);
/* True when no save is in progress: vla_checkpoint_wait will not wait. */
bool vlai_checkpoint_finished(vla_checkpoint_writer *writer);
bool vlai_checkpoint_pending(const vla_checkpoint_writer *writer); /* a save whose outcome nobody has asked for */

/* This rank of several has failed, and the others may never come: the save in progress waits for them no more. What it writes itself
 * is waited for by vla_checkpoint_wait and the writer's end alone. Accepts NULL. */
void vlai_checkpoint_abandon(vla_checkpoint_writer *writer);

/* Bytes that an unprivileged process may still write in the file system of `path` (or of its nearest existing parent). */
vla_status vlai_ckpt_free_bytes(const char *path, uint64_t *out, vla_error *err);
/* Before a run: whether every file of its checkpoints can have a name, which the system bounds to VLAI_CKPT_PATH - 1 bytes. files: what
 * they take along. The error has the length of `run` and the longest that is possible. */
vla_status vlai_ckpt_check_path(const char *run, const vla_checkpoint_file *files, size_t count, vla_error *err);
/* Before a run: room for the checkpoints that keep_last keeps plus the one being written (keep_last 0: for one), of `bytes`
 * each, when `planned` saves are to come. The error names need, room, and the keep_last that fits. */
vla_status vlai_ckpt_check_room(const char *run, uint64_t bytes, int64_t keep_last, int64_t planned, vla_error *err);
/* Memory for snapshots of this size, of all ranks of the host: all of it, or 0 when the host has neither eight times
 * as much nor 16 GB more to spare, and the save then stops the steps for as long as it writes. */
size_t vlai_ckpt_staging(size_t bytes);
bool vlai_ckpt_has_room(size_t available, size_t bytes);
/* Makes ready the memory for snapshots of a store that lives on a device, in a thread of its own, so that the first save finds
 * it. Nothing happens where the host has no room for it, and for stores in host memory. */
void vlai_checkpoint_reserve(vla_checkpoint_writer *writer, const vla_store *store);

VLA_END_DECLS

#endif
