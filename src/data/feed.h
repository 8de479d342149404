/* Rows of an open data set to samples: what a loader's worker does.
 *
 *     vlai_feed *feed;                                            // one per worker thread
 *     VLA_TRY(vlai_feed_create(set, &contract, tok, &feed, err));
 *     VLA_TRY(vlai_feed_read(feed, row, &sample, err));
 *     vlai_feed_destroy(feed);
 *
 * The action chunk of a row is the action column at row, row + 1, ... horizon rows; past the episode's end its last action
 * stands again. Ownership: a feed borrows set, contract and tokenizer. Threads: one at a time per feed. */
#ifndef VLAI_FEED_H
#define VLAI_FEED_H

#include "data/frame_cache.h"
#include "data/sample.h"
#include "vla/dataset.h"

VLA_BEGIN_DECLS

typedef struct vlai_feed vlai_feed;

vla_status vlai_feed_create(vla_dataset *set, const vlai_contract *contract, const vlai_tokenizer *tok, vlai_feed **out,
                            vla_error *err);
void vlai_feed_destroy(vlai_feed *feed);
vla_status vlai_feed_read(vlai_feed *feed, int64_t row, vlai_sample *out, vla_error *err);
/* What a policy would see at `row`: no actions, and a mask that is 1 for every action column of the data set. Pictures and
 * instruction may be those of other rows. */
vla_status vlai_feed_observe(vlai_feed *feed, int64_t row, int64_t picture_row, int64_t task_row, vlai_sample *out, vla_error *err);
/* A cache of resized pictures for the rows of a set under a contract, of at most `limit` bytes, in `dir`. *out is NULL when
 * there are no cameras or one does not declare its size. */
vla_status vlai_feed_cache_open(const vla_dataset *set, const vlai_contract *contract, const char *dir, uint64_t limit,
                                vlai_frame_cache **out, vla_error *err);
/* From now on pictures come from the cache where it has them, and go into it. It is borrowed; feeds may share one. */
void vlai_feed_use_cache(vlai_feed *feed, vlai_frame_cache *cache);
const vlai_sampler *vlai_feed_sampler(const vlai_feed *feed); /* for collation */

VLA_END_DECLS

#endif
