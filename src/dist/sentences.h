/* Parts of what is said about ranks, by the server and by the clients of a group alike. */
#ifndef VLAI_DIST_SENTENCES_H
#define VLAI_DIST_SENTENCES_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

enum {
    VLAI_LISTED = 384, /* bytes of a list of ranks */
    VLAI_PLACE = 96,
};

extern const char vlai_lost_hint[], vlai_late_hint[], vlai_differ_hint[];

/* "rank 3", "ranks 1, 3-7 and 9": the ranks for which `listed` holds; "... and others" where they are too many. */
void vlai_list_ranks(int world, bool (*listed)(const void *context, int rank), const void *context, char out[VLAI_LISTED]);

/* "while the ranks met", "in start-up" (no phase yet), "in phase save" (step below 0), "in phase forward, step 12". Returns out. */
const char *vlai_place(bool met, const char *phase, int64_t step, char out[VLAI_PLACE]);

typedef struct vlai_lines { /* a text without a final zero; data may be NULL when size is 0 */
    const uint8_t *data;
    size_t size;
} vlai_lines;

/* "'batch: 8' where rank 0 has 'batch: 16'": the first line that differs, cut and made printable; false when the texts are equal. */
bool vlai_first_difference(vlai_lines text, vlai_lines of_rank_0, char out[VLAI_LISTED]);

VLA_END_DECLS

#endif
