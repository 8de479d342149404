/* Where each rank of this machine is, in memory that the launcher shares with them: what it names when one of them ends, also by
 * SIGKILL.
 *
 *     launcher                                     rank
 *     vlai_status_make(ranks, &pages, err)         vlai_status_put("forward", 12)
 *     ... starts ranks, with VLA_STATUS=FD:SLOT
 *     vlai_status_get(&pages, slot, phase, &step)
 *     vlai_status_drop(&pages) */
#ifndef VLAI_DIST_STATUS_H
#define VLAI_DIST_STATUS_H

#include "vla/error.h"

#include <stdint.h>

VLA_BEGIN_DECLS

#define VLAI_STATUS_VARIABLE "VLA_STATUS"

#define VLAI_STATUS_FIRST "start-up" /* until the rank has met the others and says where it is */

enum { VLAI_STATUS_PHASE = 32 }; /* bytes of a phase's name, with the final zero; longer ones are cut */

/* Of the rank: says where it is. Does nothing in a process that no launcher started. Any thread; the last one to write counts. */
void vlai_status_put(const char *phase, int64_t step);

typedef struct vlai_status_pages {
    int fd; /* inherited by the ranks */
    int slots;
    void *map;
} vlai_status_pages;

/* Of the launcher. A slot that was never written has the phase VLAI_STATUS_FIRST and step 0. */
vla_status vlai_status_make(int slots, vlai_status_pages *out, vla_error *err);
void vlai_status_get(const vlai_status_pages *pages, int slot, char phase[VLAI_STATUS_PHASE], int64_t *step);
void vlai_status_drop(vlai_status_pages *pages); /* accepts a zeroed one */

VLA_END_DECLS

#endif
