/* Checkpoints: directories that are complete or absent, and weights as single files.
 *
 *     vla_checkpoint_writer *w;                          // one per run folder
 *     vla_checkpoint_writer_create("run", NULL, &w, &err);
 *     vla_checkpoint_content c = {.size = sizeof c, .epoch = 0, .step = 100, .state = "{\"step\": 100}"};
 *     vla_checkpoint_save(w, store, &c, &err);           // takes a snapshot, writes run/0_100 in a thread
 *     vla_checkpoint_wait(w, NULL, &err);                // the outcome of the newest save
 *     vla_checkpoint_writer_destroy(w);
 *
 *     vla_checkpoint *k;
 *     vla_checkpoint_open("run", &k, &err);              // a checkpoint, or a run folder: its newest whole one
 *     vla_checkpoint_restore(k, store, &err);            // weights and optimizer state, bit for bit
 *     vla_checkpoint_close(k);
 *
 * A directory holds model.safetensors (weights, in the reference's names and the type that computes), the files that the
 * caller adds (configuration, statistics, tokenizer), optimizer-R-of-N.safetensors (moments and low bits of the masters, by
 * rank R of N ranks, as far as it keeps them), state.json, checksums.json (size and XXH64 of every file) and DONE. It is written under a temporary name, synced and
 * renamed; `latest` in the run folder points to the newest. docs/checkpoint-format.md has the details.
 *
 * Ownership: a writer keeps its snapshot memory until it is destroyed; content is copied by the call. Threads: one caller
 * at a time per object. */
#ifndef VLA_CHECKPOINT_H
#define VLA_CHECKPOINT_H

#include "vla/run.h"

struct vlai_group; /* of several ranks: opaque here */
typedef struct vla_checkpoint vla_checkpoint;
typedef struct vla_checkpoint_writer vla_checkpoint_writer;

/* One more file of a checkpoint: the bytes given, or a copy of the file at `source`. */
typedef struct vla_checkpoint_file {
    const char *name;   /* inside the checkpoint: without a slash, and none of the names above, nor one that begins with "optimizer-" */
    const char *source; /* NULL: `data` counts */
    const void *data;
    size_t size;
} vla_checkpoint_file;

typedef struct vla_checkpoint_content {
    size_t size;        /* of this struct */
    int64_t epoch;      /* name of the directory: EPOCH_STEP */
    int64_t step;
    const char *state;  /* state.json: a JSON object that has "step"; of several ranks rank 0's counts */
    const vla_checkpoint_file *files; /* of several ranks rank 0's count */
    size_t file_count;
    const char *own;    /* of several ranks: text for this rank alone, kept with its part of the optimizer's state; NULL = none */
} vla_checkpoint_content;

enum {
    VLA_CHECKPOINT_SYNC = 1, /* write from the store itself while the caller waits: no snapshot memory */
};

typedef struct vla_checkpoint_writer_options {
    size_t size;
    int64_t keep_last; /* checkpoints kept, older ones are deleted; 0 = all */
    uint32_t flags;
    /* Several ranks that write one checkpoint: each makes the same calls, at any time, and learns the same outcome. */
    struct vlai_group *group; /* theirs; borrowed; NULL = one rank */
    int rank, world; /* 0 of 1 where there is no group */
} vla_checkpoint_writer_options;

#define VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT {sizeof(vla_checkpoint_writer_options), 0, 0, NULL, 0, 1}

VLA_BEGIN_DECLS

/* Weights alone, as a file that other frameworks read; it is written whole or not at all. Loading is strict: every parameter of the
 * store with its shape, and no other tensor; the error (SHAPE) names what is missing, unexpected and reshaped. A value that is NaN or
 * infinite is an error (NONFINITE) with file, tensor and element. */
VLA_API vla_status vla_store_save(const vla_store *store, const char *path, vla_error *err);
VLA_API vla_status vla_store_load(vla_store *store, const char *path, vla_error *err);

/* Makes the run folder and removes what interrupted saves have left in it. options: NULL = defaults. */
VLA_API vla_status vla_checkpoint_writer_create(const char *run, const vla_checkpoint_writer_options *options,
                                                vla_checkpoint_writer **out, vla_error *err);
/* Waits for the save in progress; its failure has been logged if nobody has asked for it. */
VLA_API void vla_checkpoint_writer_destroy(vla_checkpoint_writer *writer);
/* Begins a save. One save runs at a time: a second call waits for the first and returns its error, if it had one, without
 * beginning its own. Refuses when the disk has no room, and when a weight or moment is not finite. Of several ranks each
 * writes its part, and a part that fails fails the save on all of them, with its rank and sentence, and leaves nothing. The store
 * stays until the save has ended; the next save may be of another one. */
VLA_API vla_status vla_checkpoint_save(vla_checkpoint_writer *writer, const vla_store *store,
                                       const vla_checkpoint_content *content, vla_error *err);
/* Waits for the save in progress and returns its outcome. `path` (may be NULL): the directory of the newest complete
 * save of this writer, "" before the first. */
VLA_API vla_status vla_checkpoint_wait(vla_checkpoint_writer *writer, const char **path, vla_error *err);

/* `path`: a checkpoint, or a run folder, of which the newest whole checkpoint is taken. A half-written or damaged checkpoint
 * is refused when it is named, and skipped with a warning in a run folder. Errors: NOT_FOUND (also: no whole one in the run), CORRUPT
 * and FORMAT of damage, UNSUPPORTED of a newer format. Closed with vla_checkpoint_close; the texts of path and state live until then. */
VLA_API vla_status vla_checkpoint_open(const char *path, vla_checkpoint **out, vla_error *err);
VLA_API void vla_checkpoint_close(vla_checkpoint *checkpoint);
VLA_API const char *vla_checkpoint_path(const vla_checkpoint *checkpoint);
VLA_API int64_t vla_checkpoint_step(const vla_checkpoint *checkpoint);
VLA_API const char *vla_checkpoint_state(const vla_checkpoint *checkpoint); /* text of state.json */
/* What rank `rank` of `world` has left for itself: to be released with free() of the C library; NULL where another number of ranks has written the checkpoint, or
 * it left nothing. */
VLA_API vla_status vla_checkpoint_own(const vla_checkpoint *checkpoint, int rank, int world, char **text, vla_error *err);
/* Weights and, where the store trains, moments and low bits. Strict as vla_store_load. Tensors of the store's own types
 * are restored bit for bit, others are converted. */
VLA_API vla_status vla_checkpoint_restore(const vla_checkpoint *checkpoint, vla_store *store, vla_error *err);

VLA_END_DECLS

#endif
