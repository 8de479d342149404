/* The ranks of one command: which this one is, meeting the others, and how it ends when one of them is lost.
 *
 *     together t = {.name = "train"};
 *     VLA_TRY(together_read(&t, &err));                         // the environment
 *     status = vlai_config_load(...);
 *     status = together_meet(&t, limit, status, &err);          // also after a failure: the others are told
 *     status = together_agree(&t, "the configuration", text, &err);
 *     return together_end(&t, status, &err);                    // the exit code
 *
 * On one rank t.group is NULL, and all of it does nothing. */
#ifndef CLI_TOGETHER_H
#define CLI_TOGETHER_H

#include "dist/group.h"

#include <stdbool.h>
#include <stdio.h>

typedef struct together {
    const char *name; /* of the command */
    vlai_ranks ranks;
    vlai_group *group;
    bool differs;     /* the ranks differ, and all of them know */
    FILE *log;        /* where the loss of a rank is written too; may be NULL */
} together;

/* Fills in t->ranks. */
vla_status together_read(together *t, vla_error *err);
/* Meets the others; limit_s: how long they are waited for, where VLA_DIST_TIMEOUT does not say. From here on the loss of a rank ends
 * the process with code 6. With a `status` that is not VLA_OK, which `err` tells of, the others are told as soon as they are there, ten
 * seconds at most. Returns `status`, or what went wrong at the meeting. */
vla_status together_meet(together *t, double limit_s, vla_status status, vla_error *err);
/* vlai_group_agree: after a difference all ranks leave by themselves. */
vla_status together_agree(together *t, const char *what, const char *text, vla_error *err);
/* Rank 0's text becomes everybody's. */
vla_status together_share(together *t, const char *what, char *text, size_t size, vla_error *err);
/* After a failure, before anything that takes time: the others are told. Returns the cause, which `err` then tells of. */
vla_status together_tell(together *t, vla_status status, vla_error *err);
/* Ends the group: in order, or after a failure by telling the others. Returns the exit code; failures have been said. Does not return
 * after a failure of several ranks: what waits for a lost rank cannot be waited for. */
int together_end(together *t, vla_status status, vla_error *err);

#endif
