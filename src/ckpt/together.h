/* Ranks that write one checkpoint, outside of the steps' own order of calls: what one has to say is a value of the group's store,
 * and others wait for it in their writers' threads.
 *
 *     rank 0                                   rank R
 *     makes the folder; says "begin"           hears "begin"
 *     writes its files                         writes its file; says "part R"
 *     hears every part; completes or removes   .
 *     says "outcome"                           hears "outcome"
 */
#ifndef VLAI_CKPT_TOGETHER_H
#define VLAI_CKPT_TOGETHER_H

#include "ckpt/ckpt.h"

#include <stdatomic.h>

VLA_BEGIN_DECLS

struct vlai_group;

typedef struct vlai_together {
    struct vlai_group *group;
    int rank, world, writer; /* writer: its number; every rank makes the same writers */
    int64_t number; /* of the writer's save: every rank counts them alike */
    atomic_bool abandoned;
} vlai_together;

/* A file that a rank has written; of the outcome the name is the checkpoint's path. */
typedef struct vlai_ckpt_part {
    char name[VLAI_CKPT_PATH]; /* "": none */
    uint64_t size, hash;
} vlai_ckpt_part;

/* `status` and `failure` are how it went; `part` counts where it went well. */
vla_status vlai_together_say(vlai_together *t, const char *what, vla_status status, const vla_error *failure, const vlai_ckpt_part *part,
                             vla_error *err);
/* Waits for what rank `from` says, however long its own work takes: who waits for this writer does so in a phase of work
 * (vlai_group_work), where the rank that everybody waits for in the end must not stand still for longer than the group's limit. A rank
 * that is lost ends the wait. The failure that it reports is returned. */
vla_status vlai_together_hear(vlai_together *t, int from, const char *what, vlai_ckpt_part *part, vla_error *err);

VLA_END_DECLS

#endif
