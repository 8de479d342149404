/* The control plane of a run with several ranks: the ranks meet, compare what must be equal, pass small messages, and learn
 * within seconds when one of them is lost. Host memory only; the data of training goes through collectives (comm.h).
 *
 *     environment -> vlai_ranks -> vlai_group -> comm -> executor
 *
 *     vlai_group *group = NULL;
 *     vlai_group_options options = VLAI_GROUP_OPTIONS_DEFAULT;
 *     options.lost = on_lost;                                              // prints the sentence, ends the process
 *     if (vlai_group_join(&ranks, &options, &group, &err) != VLA_OK) return report(&err);
 *     if (vlai_group_agree(group, "configuration", text, &err) != VLA_OK) goto failed;
 *     for (...) {
 *         vlai_group_progress(group, "step", step);
 *         if (... fails ...) goto failed;
 *         if (vlai_group_gather(group, "losses", losses, sizeof losses, all, &err) != VLA_OK) goto failed;
 *     }
 *     return vlai_group_leave(group, &err);
 *   failed:
 *     vlai_group_fail(group, &err);                                        // the others learn why; err names the root cause
 *     vlai_group_leave(group, NULL);
 *
 * How it works. Rank 0 listens at MASTER_ADDR:MASTER_PORT; every rank, 0 included, is a client of that server. Each process has a
 * thread that beats every second with the rank's phase and step, and rank 0 one more for the server. The server knows at once of a
 * connection that closed (a killed process), and after `silence_s` of one that says nothing (a stopped process, a dead host). Then
 * it tells all others, whose `lost` is called. When rank 0 itself is lost, every other rank notices it alone.
 *
 * One rank. vlai_group_join gives NULL for a world of 1, and every call below takes NULL for a group of one rank: rank 0, world 1,
 * barrier, agree and broadcast have nothing to do, gather copies, progress, fail and leave do nothing. Only set, get and forget want one.
 *
 * Errors. VLA_E_LOST: a rank was lost, failed, did not come in time or stands still; the message says which, on which host, in which
 * phase and step, and why. VLA_E_INVALID: ranks that differ (versions, agree, the kind of a collective), arguments out of range.
 * VLA_E_IO: the port, an address, a socket. After VLA_E_LOST every further call fails with the same sentence. No call waits without
 * limit: join, get, barrier, agree, broadcast and gather end within their time limit plus 10 seconds, fail within 5, leave within the
 * time limit. Only ranks in a phase of work (vlai_group_work) are waited for longer, as long as their work moves on.
 *
 * Collectives. barrier, agree, broadcast, gather and gather_all are called by every rank, in the same order, with the same `what` and
 * size; another call where rank 0 makes this one is an error on every rank that names both.
 *
 * Threads. One thread at a time makes collective calls; set, get, progress and status may be called from any. leave is
 * called when no other call runs, fail when no collective of this rank does. Ownership: the group copies what it is given. After a fork only the parent may use it. */
#ifndef VLAI_DIST_GROUP_H
#define VLAI_DIST_GROUP_H

#include "dist/ranks.h"

VLA_BEGIN_DECLS

enum {
    VLAI_GROUP_KEY = 255,              /* most bytes of a key or of `what` */
    VLAI_GROUP_PHASE = 31,             /* most bytes of a phase's name; longer ones are cut */
    VLAI_GROUP_MESSAGE = 64 << 20,     /* most bytes of a value, a text, a broadcast, and of all ranks' parts of a gather together */
};

typedef struct vlai_group vlai_group;

/* A rank other than this one is gone: `text` is the whole sentence, "rank 3 (host h) was lost in phase forward, step 12: connection
 * closed". Called once at most, by the thread that noticed, which as a rule is the group's own; by then every waiting call has been
 * woken with VLA_E_LOST and the same sentence, so that the main thread and this function may run at once: print in one of them. It
 * may _exit. It must not call into the group. Not called in a rank that is in vlai_group_fail, nor before vlai_group_join has returned VLA_OK. */
typedef void (*vlai_group_lost_fn)(void *user, const char *text);

typedef struct vlai_group_options {
    size_t size;          /* sizeof(vlai_group_options) */
    double timeout_s;     /* the time limit: for all ranks to meet, for waiting calls, for progress; 0: ranks->timeout_s, else 300 */
    double silence_s;     /* a connection that says nothing for so long is lost; 0: 8 */
    vlai_group_lost_fn lost; /* NULL: calls fail, and that is all */
    void *user;
    const char *version;  /* compared between ranks; NULL: this library's */
} vlai_group_options;

#define VLAI_GROUP_OPTIONS_DEFAULT {sizeof(vlai_group_options), 0, 0, NULL, NULL, NULL}

/* Meets the other ranks: returns when all are there (`*out`, to be given to vlai_group_leave; NULL for a world of 1), or with an error
 * that names the missing ones at the time limit, on every rank that came. Rank 0 binds ranks->port; a port in use is an error that
 * names it. The others try to connect until the limit, so the order of starting does not matter. Another version of vla, another
 * world, or a rank that is lost while they meet ends the meeting on every rank; a second process of the same rank, or one of another
 * job, is refused and the meeting goes on. Of several ranks the environment gets NCCL_GRAPH_REGISTER=0 where it says nothing of it: call
 * it while no other thread reads the environment. What is not a rank at all (a port scan, a browser) is dropped with a warning, at any time. */
vla_status vlai_group_join(const vlai_ranks *ranks, const vlai_group_options *options, vlai_group **out, vla_error *err);

/* As they were given to join; lent until leave; NULL for NULL. */
const vlai_ranks *vlai_group_ranks(const vlai_group *group);
int vlai_group_rank(const vlai_group *group);
int vlai_group_world(const vlai_group *group);
/* The name of a rank's host as that host calls itself; lent until leave; "" for NULL or a rank out of range. */
const char *vlai_group_host(const vlai_group *group, int rank);
double vlai_group_timeout(const vlai_group *group); /* seconds; 300 for NULL */

/* A small store of values by key, in rank 0. set replaces and returns when the value is there. */
vla_status vlai_group_set(vlai_group *group, const char *key, const void *data, size_t size, vla_error *err);
/* Removes every key that begins with `prefix`, so that a long run does not fill the store (65536 keys, 256 MiB). */
vla_status vlai_group_forget(vlai_group *group, const char *prefix, vla_error *err);
/* Waits until the key is set, `timeout_s` seconds at most (0: the group's; below 0: does not wait), else VLA_E_NOT_FOUND. *data is
 * the caller's, released with vlai_free, followed by a zero byte that *size does not count. */
vla_status vlai_group_get(vlai_group *group, const char *key, double timeout_s, void **data, size_t *size, vla_error *err);

/* Returns when every rank has called it. `what` goes into messages ("the save of step 100"). timeout_s 0: the group's. */
vla_status vlai_group_barrier(vlai_group *group, const char *what, double timeout_s, vla_error *err);
/* Every rank's text must equal rank 0's; else VLA_E_INVALID on every rank, naming `what`, the first rank that differs, and its
 * first line that does on both. The group can still be used then. */
vla_status vlai_group_agree(vlai_group *group, const char *what, const char *text, vla_error *err);
/* Rank 0's `size` bytes of `data` into every rank's. Returns when every rank has called it. */
vla_status vlai_group_broadcast(vlai_group *group, const char *what, void *data, size_t size, vla_error *err);
/* Every rank's `size` bytes into rank 0's `all` [world][size], in rank order. Rank 0 waits for all; the others pass NULL and do not
 * wait, except that they may be at most eight gathers ahead of the slowest rank. */
vla_status vlai_group_gather(vlai_group *group, const char *what, const void *data, size_t size, void *all, vla_error *err);
/* The same, into every rank's `all`; every rank waits. */
vla_status vlai_group_gather_all(vlai_group *group, const char *what, const void *data, size_t size, void *all, vla_error *err);

/* Says where this rank is: named when it is lost, also by the launcher (status.h). Cheap, to be called at every change of phase and, in
 * phases that may take longer than the time limit, now and then with the same phase and step: each call counts as progress. From the
 * first call on, a rank that makes none for the time limit is an error that names it on every rank; time in a collective call of the
 * group does not count, that has its own limit. */
void vlai_group_progress(vlai_group *group, const char *phase, int64_t step);
/* The same for a phase of bulk work (loading, hashing, saving): until the next of these two calls every step of the process' work
 * (base/work.h) counts as progress, and collectives wait for this rank beyond their limit as long as it works on. */
void vlai_group_work(vlai_group *group, const char *phase, int64_t step);
/* The work in progress waits for a word of `rank`, by way of the store of keys; -1: for none any more. Whoever waits so in a phase of
 * work is not blamed for standing still: the rank that is waited for is. Any thread. */
void vlai_group_await(vlai_group *group, int rank);

/* VLA_OK, or VLA_E_LOST with the sentence once a rank is lost. Does not wait. */
vla_status vlai_group_status(vlai_group *group, vla_error *err);

/* This rank ends because of `err`: tells the others, which then end with VLA_E_LOST and "rank 2 (host h) failed in phase P, step S:
 * MESSAGE". Returns within 5 seconds, when rank 0 has decided whose loss it is: where another rank was lost first and this failure
 * only follows from it (a collective that broke), *err becomes VLA_E_LOST with that rank's sentence. Returns err's status. Once that is
 * decided a second call only repeats it. */
vla_status vlai_group_fail(vlai_group *group, vla_error *err);

/* After fail, for a program that ends and may have threads in calls of the group: closes the connection, and in rank 0 waits until the
 * others have heard, two seconds at most. Every call fails from then on; the group stays until leave. */
void vlai_group_hang_up(vlai_group *group);

/* Leaves in good order and releases the group, which is gone in any case. Rank 0 waits for all others to leave, until the time limit;
 * the others wait for rank 0's leave to be granted only. After vlai_group_fail or VLA_E_LOST it only releases. */
vla_status vlai_group_leave(vlai_group *group, vla_error *err);

/* For a launcher, which is no rank itself: rank who->rank has ended. Where it had not joined yet, those who wait for it learn that it
 * will not come, and `how` it ended ("ended with signal 9"); else rank 0 knows already. Returns within limit_s and what the
 * resolver takes; nothing is said where rank 0 cannot be reached. */
void vlai_group_report(const vlai_ranks *who, const char *how, double limit_s);

VLA_END_DECLS

#endif
