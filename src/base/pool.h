/* A fixed pool of threads that share out tiles. The grid of tiles is chosen by the caller from the problem's shape
 * alone, never from the number of threads, so that results do not depend on it. */
#ifndef VLAI_POOL_H
#define VLAI_POOL_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vlai_pool vlai_pool;
typedef void (*vlai_tile_fn)(void *context, int64_t tile, int thread);

/* `threads` counts the caller, which works too; 0 = all processors that this process may use. */
vla_status vlai_pool_create(int threads, vlai_pool **out, vla_error *err);
int vlai_pool_processors(void); /* that this process may use, at least 1 */
void vlai_pool_destroy(vlai_pool *pool);
int vlai_pool_threads(const vlai_pool *pool); /* 1 for NULL */

/* Runs fn for tiles 0..n-1, each once, and returns when all are done. NULL pool: on this thread. One caller at a time. */
void vlai_pool_run(vlai_pool *pool, int64_t tiles, vlai_tile_fn fn, void *context);

VLA_END_DECLS

#endif
