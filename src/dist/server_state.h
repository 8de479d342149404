/* What the server's files share: its state, and what one of them does for another. server.c takes connections and messages and
 * runs the thread, server_collect.c joins collectives and keeps keys, server_watch.c judges who is late, silent or standing still.
 * Everything runs on the server's one thread. */
#ifndef VLAI_DIST_SERVER_STATE_H
#define VLAI_DIST_SERVER_STATE_H

#include "dist/group.h"
#include "dist/keys.h"
#include "dist/protocol.h"
#include "dist/sentences.h"
#include "dist/server.h"
#include "dist/wire.h"

#include <poll.h>
#include <pthread.h>

VLA_BEGIN_DECLS

typedef enum { ABSENT, HERE, LEFT } member_state;

typedef struct member {
    member_state state;
    vlai_wire wire;          /* fd -1: none, or closed */
    char host[VLAI_RANKS_TEXT];
    unsigned pid;
    char phase[VLAI_GROUP_PHASE + 1];
    int64_t step;
    uint32_t moves;          /* calls of vlai_group_progress; 0: not watched */
    double moved;            /* when the last was, or the last wait ended */
    bool works;              /* in a phase of work */
    int awaits;              /* the rank that this work waits for; -1: none */
    double heard;            /* when bytes came last */
    uint64_t received;
    int waiting;             /* its collectives that wait for others: no standing still of its own */
    double waited;           /* when the last of these ended */
} member;

typedef struct stranger {
    vlai_wire wire;
    double since;
    bool closing; /* refused: closed once its answer is out, or by the time limit of a hello */
    char peer[64];
} stranger;

typedef struct part {
    uint8_t *data;
    size_t size, capacity;
    uint32_t id; /* of the asking frame */
    bool here;
} part;

/* A collective under way. Slot = sequence number modulo SLOTS. */
typedef struct slot {
    bool used;
    uint32_t kind, size;
    char what[VLAI_GROUP_KEY + 1];
    double deadline, limit_s;
    int opener, arrived;
    part *parts; /* [world] */
} slot;

struct vlai_server {
    vlai_ranks ranks;
    double timeout_s, silence_s;
    char version[64];
    int listener;
    member *members;     /* [world] */
    int here, left;      /* members that ever came; that have left */
    bool met;
    stranger *strangers; /* [STRANGERS], fd -1 where free */
    struct pollfd *polled;
    vlai_keys keys;
    slot slots[SLOTS];
    uint32_t first; /* the oldest collective that is not complete */
    double started, looped, told_missing;
    double left_at;     /* when rank 0 left */
    double deaf_until;  /* no connection can be accepted: no descriptors */
    double pulsed;
    int warnings;
    int patient;        /* collectives that wait beyond their limit for ranks that work */
    uint32_t pulsed_moves;
    vla_error failure;   /* held back until it settles; status OK: none */
    int failed_rank;
    double failure_at;
    vla_error verdict;   /* what the run ended of; status OK: it has not */
    int culprit;
    bool own_told;
    int late;            /* ranks that came after the verdict and were told */
    bool lingers;        /* the meeting has failed early: ranks that are starting at this moment hear of it too */
    double verdict_at;   /* 0: none, and the server is not ending either */
    pthread_t thread;
    bool threaded;
};

/* server.c */

/* The rank's phase and step in words, or that the ranks have not met. */
const char *vlai_server_where(const vlai_server *s, const member *m, char out[VLAI_PLACE]);
void vlai_server_put_error(vlai_head *head, const vla_error *e);
/* The run ends with s->verdict, which the caller has set: all members but this process are told, it hears last, since it may
 * end at once. */
void vlai_server_end(vlai_server *s, int culprit);
/* The run ends because the rank was lost; nothing when it has ended already. So does the next one. */
void vlai_server_lose(vlai_server *s, int rank, const char *why);
void vlai_server_no_memory(vlai_server *s);

/* server_collect.c: false where the message is not understood */

extern const char *const vlai_server_kinds[COLLECT_COUNT];
bool vlai_server_collect(vlai_server *s, int rank, const vlai_frame *f, double now);
bool vlai_server_set_key(vlai_server *s, int rank, const vlai_frame *f);
bool vlai_server_get_key(vlai_server *s, int rank, const vlai_frame *f, double now);
bool vlai_server_forget_keys(vlai_server *s, int rank, const vlai_frame *f);
/* The answer to a call that waited limit_s (0: not at all) for a key. */
void vlai_server_key_late(vlai_server *s, int rank, uint32_t id, const char *key, double limit_s);
/* A rank that has left will never come to a collective: the run ends where one waits for it. */
void vlai_server_check_left(vlai_server *s, const slot *c);

/* server_watch.c */

/* Judges the meeting, then collectives, keys and ranks by the time, and tells every member that the server lives. */
void vlai_server_watch(vlai_server *s, double now);

VLA_END_DECLS

#endif
