/* The server of a group, a thread of rank 0's process: takes the ranks' connections, keeps the keys, joins the parts of
 * collectives, watches over everybody, and when a rank is lost tells the others. Only group.c uses it.
 *
 * One thread owns all of its state; the process's own client talks to it through a pair of sockets, as the others do through TCP. */
#ifndef VLAI_DIST_SERVER_H
#define VLAI_DIST_SERVER_H

#include "dist/ranks.h"

VLA_BEGIN_DECLS

typedef struct vlai_server vlai_server;

typedef struct vlai_server_options {
    double timeout_s, silence_s;
    const char *version; /* copied */
    const char *host;    /* of this process; copied */
} vlai_server_options;

/* Listens and starts the thread. *own is rank 0's end of the pair, the caller's to close. */
vla_status vlai_server_start(const vlai_ranks *ranks, const vlai_server_options *options, int *own, vlai_server **out, vla_error *err);
/* Waits for the thread and releases the server. The thread ends by itself within LAST_WORDS and a little after `own` was closed. NULL: nothing. */
void vlai_server_join(vlai_server *server);

VLA_END_DECLS

#endif
