/* What the clients (group.c) and the server in rank 0 (server.c) say to each other. Every frame's payload begins with the head that
 * its row names; a number is 32 bits unless it says 64, a text is its length and its bytes. Numbers that answer carry the asking
 * frame's id. HELLO, REFUSED and their heads stay as they are for ever, so that versions can tell each other apart. */
#ifndef VLAI_DIST_PROTOCOL_H
#define VLAI_DIST_PROTOCOL_H

enum {
    PROTOCOL = 2,

    HELLO_MOST = 2048,          /* bytes of the payload that a stranger may send */
    FRAME_MOST = (64 << 20) + 4096, /* VLAI_GROUP_MESSAGE and a head */
    AHEAD_MOST = 8,             /* gathers that a rank may be ahead of the slowest */
    SLOTS = 16,                 /* collectives under way at a time: more than AHEAD_MOST + the one that waits */
    CULPRIT_NONE = -1,
};

typedef enum {
    /* client to server */
    FRAME_HELLO = 1, /* protocol, rank, world, local rank, pid, version (text), host (text), job (text) */
    FRAME_BEAT,      /* phase (text), step (64), moves, milliseconds since the last move; 0, 1 in a phase of work, 2 + R where that waits for rank R */
    FRAME_SET,       /* key (text); then the value */
    FRAME_GET,       /* key (text), milliseconds to wait */
    FRAME_COLLECT,   /* sequence number, collective, milliseconds to wait, size, what (text); then this rank's part */
    FRAME_FAIL,      /* status, message (text) */
    FRAME_LEAVE,     /* */
    FRAME_FORGET,    /* prefix (text) */
    FRAME_GONE,      /* of a launcher, instead of HELLO: protocol, rank, world, host (text), job (text), how it ended (text) */
    /* server to client */
    FRAME_REFUSED = 64, /* status, message (text), hint (text): the connection ends */
    FRAME_TAKEN,        /* hello is accepted */
    FRAME_WELCOME,      /* all are here: world; per rank its host (text) */
    FRAME_PULSE,        /* phase (text), step (64) of rank 0, who is missing (text; empty once all are here), collectives that wait beyond their limit */
    FRAME_RESULT,       /* status; then the data, or message (text) and hint (text) */
    FRAME_ABORT,        /* status, culprit, message (text), hint (text): the run ends */
    FRAME_BYE,          /* leave is granted */
} frame_type;

typedef enum { COLLECT_BARRIER, COLLECT_AGREE, COLLECT_BROADCAST, COLLECT_GATHER, COLLECT_GATHER_ALL, COLLECT_COUNT } collect_kind;

/* Seconds. */
#define BEAT_EVERY 1.0    /* of a connection on which nothing changes */
/* At most so often when the phase or step changed; less often the more ranks there are, as one server hears all. */
#define BEAT_CHANGED(world) (0.1 * (1 + (world) / 128))
#define HELLO_WITHIN 5.0  /* a stranger's whole hello */
#define STALL 4.0         /* a thread that did not run for so long blames nobody's silence */
#define GRACE 3.0         /* what a client waits beyond a limit for the server's word on it */
#define LAST_WORDS 2.0    /* to deliver an abort before the connections are closed */
/* A failure is held back for so long, as its cause may be a lost rank that is noticed a moment later: a collective that broke
 * has a cause elsewhere as a rule. */
#define SETTLE 0.3
#define SETTLE_COLLECTIVE 2.0

#endif
