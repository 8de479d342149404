/* How far this process has come with reading, hashing, checking and writing bulk data, and with making ready what a device will run: a
 * count that moves on at least once for some tens of megabytes or for each product that is timed, so that whoever looks at it (vlai_group_work) can tell slow work from work that stands still. Any thread. */
#ifndef VLAI_WORK_H
#define VLAI_WORK_H

#include "vla/error.h"

#include <stdint.h>

VLA_BEGIN_DECLS

enum { VLAI_WORK_PIECE = 32 << 20 }; /* bytes that are worked on between two steps of the count */

void vlai_work_add(void);
uint64_t vlai_work_done(void);

VLA_END_DECLS

#endif
