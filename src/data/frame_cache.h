/* Resized pictures on a local disk, for datasets whose decoding cannot keep up: every picture is decoded and resized once,
 * then read from a memory-mapped file. One file per (dataset digest, transform); what does not fit into the bound is simply
 * not kept: with rows drawn at random, keeping the first rows gives as many hits as any replacement would.
 *
 *     vlai_frame_cache_options o = {.dir = dir, .digest = info->digest, .transform = "fit 256, factor 28", .rows = n,
 *                                   .sizes = bytes_per_camera, .cameras = 2, .limit = 10e9};
 *     VLA_TRY(vlai_frame_cache_open(&o, &cache, err));
 *     const uint8_t *picture = vlai_frame_cache_get(cache, row, camera);
 *     if (!picture) { ... decode and resize into `rgb` ...; vlai_frame_cache_put(cache, row, camera, rgb); }
 *     vlai_frame_cache_close(cache);
 *
 * Every picture carries a hash that is checked at its first use in a process, so that a file torn by a crash or a full disk
 * costs time, never a wrong picture. Pictures are written with pwrite, so that a full disk is an error code and not a signal;
 * the cache then stops taking more. When somebody cuts the file of a cache in use, it gives and takes nothing any more; only one who
 * does so while a picture is being copied out of the map ends the process, since pread instead of the map would cost each sample a third
 * more of a worker's time. Threads: any number may get and put; processes may share a file (pictures are a pure
 * function of row and camera). `get` borrows from the map until close. */
#ifndef VLAI_FRAME_CACHE_H
#define VLAI_FRAME_CACHE_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vlai_frame_cache vlai_frame_cache;

typedef struct vlai_frame_cache_options {
    const char *dir;       /* made when absent */
    const char *digest;    /* of the dataset */
    const char *transform; /* everything that the pixels depend on besides the dataset */
    int64_t rows;
    const int64_t *sizes;  /* bytes of a picture of each camera */
    int64_t cameras;
    uint64_t limit;        /* most bytes of the file */
} vlai_frame_cache_options;

typedef struct vlai_frame_cache_stats {
    int64_t rows;         /* that fit */
    int64_t hits, misses; /* of get */
    int64_t stored;       /* by put */
    int full;             /* a write failed, or the file was cut: no more is taken */
} vlai_frame_cache_stats;

vla_status vlai_frame_cache_open(const vlai_frame_cache_options *options, vlai_frame_cache **out, vla_error *err);
void vlai_frame_cache_close(vlai_frame_cache *cache); /* NULL is fine */

/* NULL: not there (yet). */
const uint8_t *vlai_frame_cache_get(vlai_frame_cache *cache, int64_t row, int64_t camera);
/* Keeps a copy when it fits. Never fails: a picture that cannot be written is decoded again next time. */
void vlai_frame_cache_put(vlai_frame_cache *cache, int64_t row, int64_t camera, const uint8_t *picture);
vlai_frame_cache_stats vlai_frame_cache_stats_get(const vlai_frame_cache *cache);

VLA_END_DECLS

#endif
