#include "dist/group.h"

#include "base/fail.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/time.h"
#include "base/work.h"
#include "dist/protocol.h"
#include "dist/sentences.h"
#include "dist/server.h"
#include "dist/status.h"
#include "dist/wire.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TIMEOUT_S = 300, SILENCE_S = 8, TICK_MS = 100 };

/* A call that waits for an answer; it lies on the stack of the thread that waits. */
typedef struct waiter {
    struct waiter *next;
    uint32_t id;
    bool done;
    vla_error error; /* of the answer */
    void *into;      /* where the answer's `size` bytes go, which must be as many; NULL: `data` is allocated for them */
    size_t size;
    void *data;
    bool keeps; /* wants data */
} waiter;

/* The group's thread reads, beats and watches; calls put their messages into the wire themselves. */
struct vlai_group {
    vlai_ranks ranks;
    double timeout_s, silence_s;
    vlai_group_lost_fn lost_fn;
    void *user;
    vlai_server *server; /* in rank 0 */
    int wake[2];         /* to the thread: there is more to send, or the end */
    pthread_t thread;
    bool threaded;
    double heard, looped, beaten; /* the thread's */
    uint64_t received;

    pthread_mutex_t lock; /* for everything below, and the sending half of the wire */
    pthread_cond_t changed;
    vlai_wire wire;
    bool taken, met, armed, failing, leaving, bye, stop;
    vla_error lost; /* status OK: nobody is */
    int culprit;
    waiter *waiters;
    uint32_t next_id, sequence;
    int open; /* gathers that this rank did not wait for */
    char phase[VLAI_GROUP_PHASE + 1];
    int64_t step;
    uint32_t moves, beaten_moves;
    double moved;
    bool works;      /* what the process works on counts as progress */
    uint64_t worked; /* so far */
    int awaits;      /* the rank whose word this one waits for; -1: none */
    int patient;     /* collectives beyond their limit that rank 0 lets wait for ranks that work */
    char zero_phase[VLAI_GROUP_PHASE + 1]; /* of rank 0 */
    int64_t zero_step;
    char missing[VLAI_LISTED];
    char (*hosts)[VLAI_RANKS_TEXT]; /* [world], once met */
};

/* --- the thread --- */

static uint32_t milliseconds(double seconds)
{
    return seconds >= 4e6 ? 4000000000u : seconds > 0 ? (uint32_t)(seconds * 1e3 + 0.5) : 0;
}

static void wake(vlai_group *g)
{
    ssize_t n = write(g->wake[1], "", 1); /* full: it will wake up anyway */
    (void)n;
}

/* Notes the end of the run, once, wakes all who wait, then tells the program. Any thread, without the lock. */
static void lose(vlai_group *g, const vla_error *e, int culprit)
{
    pthread_mutex_lock(&g->lock);
    bool first = g->lost.status == VLA_OK, tell = false;
    if (first) {
        g->lost = *e;
        g->culprit = culprit;
        tell = g->armed && !g->failing && !g->leaving && g->lost_fn;
        pthread_cond_broadcast(&g->changed);
    }
    pthread_mutex_unlock(&g->lock);
    if (tell)
        g->lost_fn(g->user, g->lost.message); /* written once, above */
}

/* This rank has lost rank 0, by its own observation. */
static void lose_zero(vlai_group *g, const char *why)
{
    char place[VLAI_PLACE];
    vla_error e = VLA_ERROR_INIT;
    pthread_mutex_lock(&g->lock);
    const char *host = g->hosts ? g->hosts[0] : g->ranks.address;
    vlai_place(g->met, g->zero_phase, g->zero_step, place);
    vlai_fail_hint(&e, VLA_E_LOST, vlai_lost_hint, "rank 0 (host %s) was lost %s: %s", host, place, why);
    pthread_mutex_unlock(&g->lock);
    lose(g, &e, 0);
}

static void cut_error(vlai_cut *cut, vla_status status, vla_error *out)
{
    *out = (vla_error){.status = status > VLA_OK && status < VLA_STATUS_COUNT ? status : VLA_E_INTERNAL};
    vlai_cut_text(cut, out->message, sizeof out->message);
    vlai_cut_text(cut, out->hint, sizeof out->hint);
}

static bool take_result(vlai_group *g, const vlai_frame *f)
{
    vlai_cut cut = {f->data, f->size, false};
    vla_status status = (vla_status)vlai_cut_u32(&cut);
    if (cut.failed)
        return false;
    waiter **link = &g->waiters;
    while (*link && (*link)->id != f->id)
        link = &(*link)->next;
    waiter *w = *link;
    if (!w) { /* of a gather that this rank did not wait for */
        g->open -= g->open > 0;
        return true;
    }
    *link = w->next;
    w->done = true;
    if (status != VLA_OK) {
        cut_error(&cut, status, &w->error);
    } else if (w->into) {
        if (cut.size != w->size)
            vlai_fail(&w->error, VLA_E_INTERNAL, "an answer of %zu bytes came, wanted %zu", cut.size, w->size);
        else
            memcpy(w->into, cut.data, cut.size);
    } else if (w->keeps) {
        w->data = vlai_alloc(cut.size + 1);
        w->size = cut.size;
        if (!w->data) {
            vlai_nomem(&w->error, cut.size + 1);
        } else {
            memcpy(w->data, cut.data, cut.size);
            ((char *)w->data)[cut.size] = 0;
        }
    }
    return !cut.failed;
}

static bool take_welcome(vlai_group *g, const vlai_frame *f)
{
    vlai_cut cut = {f->data, f->size, false};
    uint32_t world = vlai_cut_u32(&cut);
    if (world != (uint32_t)g->ranks.world || g->hosts)
        return false;
    char(*hosts)[VLAI_RANKS_TEXT] = vlai_calloc(world, sizeof *hosts);
    for (uint32_t r = 0; r < world && hosts; r++)
        vlai_cut_text(&cut, hosts[r], VLAI_RANKS_TEXT);
    if (!hosts || cut.failed) {
        vlai_free(hosts);
        return false;
    }
    g->hosts = hosts;
    g->met = true;
    return true;
}

/* A frame of the server, under the lock; false when it is not understood. */
static bool take(vlai_group *g, const vlai_frame *f)
{
    vlai_cut cut = {f->data, f->size, false};
    switch (f->type) {
    case FRAME_TAKEN: g->taken = true; return true;
    case FRAME_WELCOME: return take_welcome(g, f);
    case FRAME_RESULT: return take_result(g, f);
    case FRAME_BYE: g->bye = true; return true;
    case FRAME_PULSE:
        vlai_cut_text(&cut, g->zero_phase, sizeof g->zero_phase);
        g->zero_step = vlai_cut_i64(&cut);
        vlai_cut_text(&cut, g->missing, sizeof g->missing);
        g->patient = (int)vlai_cut_u32(&cut);
        return !cut.failed;
    default: return false;
    }
}

/* Everything that has come; false when the run has ended. */
static bool take_all(vlai_group *g, bool alive)
{
    vlai_frame f;
    int more;
    while ((more = vlai_wire_next(&g->wire, &f)) > 0) {
        if (f.type == FRAME_ABORT) {
            vlai_cut cut = {f.data, f.size, false};
            vla_error e;
            vla_status status = (vla_status)vlai_cut_u32(&cut);
            int culprit = (int)vlai_cut_u32(&cut);
            cut_error(&cut, status, &e);
            lose(g, &e, culprit);
            return false;
        }
        pthread_mutex_lock(&g->lock);
        bool good = take(g, &f);
        pthread_cond_broadcast(&g->changed);
        pthread_mutex_unlock(&g->lock);
        if (!good) {
            lose_zero(g, "a message of it is not understood");
            return false;
        }
    }
    if (alive && more == 0)
        return true;
    pthread_mutex_lock(&g->lock);
    bool over = g->bye;
    pthread_mutex_unlock(&g->lock);
    if (!over)
        lose_zero(g, g->wire.why);
    return false;
}

static void move(vlai_group *g, double now)
{
    g->moved = now;
    if (++g->moves == 0) /* 0 means never */
        g->moves = 1;
}

/* Sends the beat when it is due, and what waits; the events to poll for. Under the lock, which a move may have held last: so
 * the time is asked for here, and is not before that move. */
static short send_all(vlai_group *g)
{
    double now = vlai_now();
    uint64_t worked = vlai_work_done();
    if (g->works && worked != g->worked)
        move(g, now);
    g->worked = worked;
    if (now - g->beaten >= (g->moves != g->beaten_moves ? BEAT_CHANGED(g->ranks.world) : BEAT_EVERY)) {
        vlai_head head = {.size = 0};
        vlai_head_text(&head, g->phase);
        vlai_head_i64(&head, g->step);
        vlai_head_u32(&head, g->moves);
        vlai_head_u32(&head, milliseconds(now - g->moved));
        vlai_head_u32(&head, (uint32_t)(!g->works ? 0 : 2 + g->awaits));
        if (vlai_wire_put(&g->wire, FRAME_BEAT, 0, &head, NULL, 0)) { /* no memory: the next one may have some */
            g->beaten = now;
            g->beaten_moves = g->moves;
        }
    }
    return vlai_wire_flush(&g->wire) ? POLLIN : POLLIN | POLLOUT;
}

static void *attend(void *arg)
{
    vlai_group *g = arg;
    g->looped = g->heard = vlai_now();
    bool alive = true;
    while (take_all(g, alive)) {
        double now = vlai_now();
        if (g->wire.received != g->received || now - g->looped > STALL) { /* whoever did not run has not listened */
            g->received = g->wire.received;
            g->heard = now;
        }
        g->looped = now;
        if (now - g->heard > g->silence_s) {
            char why[64];
            snprintf(why, sizeof why, "no sign of life for %g s", g->silence_s);
            lose_zero(g, why);
            break;
        }
        pthread_mutex_lock(&g->lock);
        bool stop = g->stop;
        struct pollfd p[2] = {{.fd = g->wire.fd, .events = send_all(g)}, {.fd = g->wake[0], .events = POLLIN}};
        pthread_mutex_unlock(&g->lock);
        if (stop)
            break;
        if (poll(p, 2, TICK_MS) <= 0)
            continue;
        char some[64];
        while (p[1].revents && read(g->wake[0], some, sizeof some) == (ssize_t)sizeof some) {
        }
        if (p[0].revents)
            alive = vlai_wire_fill(&g->wire);
    }
    return NULL;
}

/* --- calls --- */

/* Waits for a change until `deadline`; false when it has passed. Under the lock. */
static bool wait_until(vlai_group *g, double deadline)
{
    return vlai_cond_wait(&g->changed, &g->lock, deadline);
}

/* The same; a collective is waited for beyond that as long as rank 0 lets it wait for ranks that work. */
static bool wait_for_server(vlai_group *g, frame_type type, double *deadline)
{
    if (wait_until(g, *deadline))
        return true;
    if (type != FRAME_COLLECT || !g->patient)
        return false;
    *deadline = vlai_now() + 2 * GRACE;
    return true;
}

static vla_status copy_lost(const vlai_group *g, vla_error *err)
{
    if (err)
        *err = g->lost;
    return g->lost.status;
}

/* Sends a frame, and with a waiter waits for the answer until limit_s and what the server may need beyond it. */
static vla_status request(vlai_group *g, frame_type type, const vlai_head *head, const void *data, size_t size, waiter *w, double limit_s, vla_error *err)
{
    double deadline = vlai_now() + limit_s + 2 * GRACE;
    bool late = false;
    pthread_mutex_lock(&g->lock);
    while (!w && type == FRAME_COLLECT && g->open >= AHEAD_MOST && g->lost.status == VLA_OK && !late)
        late = !wait_for_server(g, type, &deadline);
    vla_status status = g->lost.status;
    if (status == VLA_OK && !late) {
        uint32_t id = ++g->next_id;
        if (!vlai_wire_put(&g->wire, type, id, head, data, size)) {
            status = vlai_nomem(err, size);
            pthread_mutex_unlock(&g->lock);
            return status;
        }
        if (type == FRAME_COLLECT)
            g->sequence++;
        if (w) {
            w->id = id;
            w->next = g->waiters;
            g->waiters = w;
        } else if (type == FRAME_COLLECT) {
            g->open++;
        }
        if (!vlai_wire_flush(&g->wire))
            wake(g);
        while (w && !w->done && g->lost.status == VLA_OK && !late)
            late = !wait_for_server(g, type, &deadline);
        if (w && !w->done) {
            waiter **link = &g->waiters;
            while (*link != w)
                link = &(*link)->next;
            *link = w->next;
        }
    }
    late = late && g->lost.status == VLA_OK && !(w && w->done);
    pthread_mutex_unlock(&g->lock);
    if (late) {
        char why[64];
        snprintf(why, sizeof why, "no answer for %g s", limit_s + 2 * GRACE);
        lose_zero(g, why);
    }
    if (w && w->done) {
        if (err && w->error.status != VLA_OK)
            *err = w->error;
        return w->error.status;
    }
    pthread_mutex_lock(&g->lock);
    status = copy_lost(g, err);
    pthread_mutex_unlock(&g->lock);
    return status;
}

static vla_status name_fits(const char *what, const char *name, bool empty, vla_error *err)
{
    size_t n = name ? strlen(name) : 0;
    if (n <= VLAI_GROUP_KEY && (n || empty))
        return VLA_OK;
    return vlai_fail(err, VLA_E_INVALID, "%s '%.64s' has %zu bytes, wanted %d to %d", what, name ? name : "", n, !empty, (int)VLAI_GROUP_KEY);
}

vla_status vlai_group_set(vlai_group *g, const char *key, const void *data, size_t size, vla_error *err)
{
    VLA_TRY(name_fits("key", key, false, err));
    if (!g)
        return vlai_fail(err, VLA_E_INVALID, "key '%s': a group of one rank keeps no keys", key);
    if (size > VLAI_GROUP_MESSAGE)
        return vlai_fail(err, VLA_E_INVALID, "key '%s': a value of %zu bytes, wanted at most %d", key, size, (int)VLAI_GROUP_MESSAGE);
    vlai_head head = {.size = 0};
    vlai_head_text(&head, key);
    waiter w = {.keeps = false};
    return request(g, FRAME_SET, &head, data, size, &w, g->timeout_s, err);
}

vla_status vlai_group_forget(vlai_group *g, const char *prefix, vla_error *err)
{
    VLA_TRY(name_fits("prefix", prefix, false, err));
    if (!g)
        return vlai_fail(err, VLA_E_INVALID, "keys '%s...': a group of one rank keeps no keys", prefix);
    vlai_head head = {.size = 0};
    vlai_head_text(&head, prefix);
    waiter w = {.keeps = false};
    return request(g, FRAME_FORGET, &head, NULL, 0, &w, g->timeout_s, err);
}

vla_status vlai_group_get(vlai_group *g, const char *key, double timeout_s, void **data, size_t *size, vla_error *err)
{
    *data = NULL;
    *size = 0;
    VLA_TRY(name_fits("key", key, false, err));
    if (!g)
        return vlai_fail(err, VLA_E_INVALID, "key '%s': a group of one rank keeps no keys", key);
    double limit_s = timeout_s == 0 ? g->timeout_s : timeout_s < 0 ? 0 : timeout_s;
    vlai_head head = {.size = 0};
    vlai_head_text(&head, key);
    vlai_head_u32(&head, milliseconds(limit_s));
    waiter w = {.keeps = true};
    VLA_TRY(request(g, FRAME_GET, &head, NULL, 0, &w, limit_s + g->timeout_s * (limit_s == 0), err));
    *data = w.data;
    *size = w.size;
    return VLA_OK;
}

/* `into`: where `expected` bytes of result go; NULL: none are expected. `early`: does not wait. */
static vla_status collect(vlai_group *g, collect_kind kind, const char *what, double timeout_s, size_t size, const void *data, size_t bytes, void *into,
                          size_t expected, bool early, vla_error *err)
{
    VLA_TRY(name_fits("the name of a collective", what, true, err));
    double limit_s = timeout_s > 0 ? timeout_s : g->timeout_s;
    vlai_head head = {.size = 0};
    vlai_head_u32(&head, g->sequence); /* only the one thread that makes collective calls changes it */
    vlai_head_u32(&head, kind);
    vlai_head_u32(&head, milliseconds(limit_s));
    vlai_head_u32(&head, (uint32_t)size);
    vlai_head_text(&head, what);
    waiter w = {.into = into, .size = expected};
    return request(g, FRAME_COLLECT, &head, data, bytes, early ? NULL : &w, limit_s, err);
}

static vla_status size_fits(const char *what, size_t size, size_t times, vla_error *err)
{
    if (size <= VLAI_GROUP_MESSAGE / times)
        return VLA_OK;
    return vlai_fail(err, VLA_E_INVALID, "'%s': %zu bytes of %zu ranks, wanted at most %d together", what ? what : "", size, times, (int)VLAI_GROUP_MESSAGE);
}

vla_status vlai_group_barrier(vlai_group *g, const char *what, double timeout_s, vla_error *err)
{
    return g ? collect(g, COLLECT_BARRIER, what, timeout_s, 0, NULL, 0, NULL, 0, false, err) : VLA_OK;
}

vla_status vlai_group_agree(vlai_group *g, const char *what, const char *text, vla_error *err)
{
    if (!g)
        return VLA_OK;
    size_t size = strlen(text);
    VLA_TRY(size_fits(what, size, 1, err));
    return collect(g, COLLECT_AGREE, what, 0, size, text, size, NULL, 0, false, err);
}

vla_status vlai_group_broadcast(vlai_group *g, const char *what, void *data, size_t size, vla_error *err)
{
    if (!g)
        return VLA_OK;
    VLA_TRY(size_fits(what, size, 1, err));
    bool root = g->ranks.rank == 0;
    return collect(g, COLLECT_BROADCAST, what, 0, size, data, root ? size : 0, root || !size ? NULL : data, size, false, err);
}

static vla_status gather(vlai_group *g, collect_kind kind, const char *what, const void *data, size_t size, void *all, vla_error *err)
{
    if (!g) {
        if (size)
            memmove(all, data, size);
        return VLA_OK;
    }
    size_t world = (size_t)g->ranks.world;
    VLA_TRY(size_fits(what, size, world, err));
    bool early = kind == COLLECT_GATHER && g->ranks.rank > 0;
    return collect(g, kind, what, 0, size, data, size, early || !size ? NULL : all, size * world, early, err);
}

vla_status vlai_group_gather(vlai_group *g, const char *what, const void *data, size_t size, void *all, vla_error *err)
{
    return gather(g, COLLECT_GATHER, what, data, size, all, err);
}

vla_status vlai_group_gather_all(vlai_group *g, const char *what, const void *data, size_t size, void *all, vla_error *err)
{
    return gather(g, COLLECT_GATHER_ALL, what, data, size, all, err);
}

const vlai_ranks *vlai_group_ranks(const vlai_group *g)
{
    return g ? &g->ranks : NULL;
}

int vlai_group_rank(const vlai_group *g)
{
    return g ? g->ranks.rank : 0;
}

int vlai_group_world(const vlai_group *g)
{
    return g ? g->ranks.world : 1;
}

double vlai_group_timeout(const vlai_group *g)
{
    return g ? g->timeout_s : TIMEOUT_S;
}

const char *vlai_group_host(const vlai_group *g, int rank)
{
    return g && g->hosts && rank >= 0 && rank < g->ranks.world ? g->hosts[rank] : "";
}

static void enter(vlai_group *g, const char *phase, int64_t step, bool works)
{
    if (!g)
        return;
    double now = vlai_now();
    vlai_status_put(phase, step);
    pthread_mutex_lock(&g->lock);
    snprintf(g->phase, sizeof g->phase, "%s", phase);
    g->step = step;
    g->works = works;
    g->worked = vlai_work_done();
    move(g, now);
    pthread_mutex_unlock(&g->lock);
}

void vlai_group_progress(vlai_group *g, const char *phase, int64_t step)
{
    enter(g, phase, step, false);
}

void vlai_group_work(vlai_group *g, const char *phase, int64_t step)
{
    enter(g, phase, step, true);
}

void vlai_group_await(vlai_group *g, int rank)
{
    if (!g)
        return;
    pthread_mutex_lock(&g->lock);
    g->awaits = rank;
    if (g->works)
        move(g, vlai_now());
    pthread_mutex_unlock(&g->lock);
}

vla_status vlai_group_status(vlai_group *g, vla_error *err)
{
    if (!g)
        return VLA_OK;
    pthread_mutex_lock(&g->lock);
    vla_status status = g->lost.status;
    if (status != VLA_OK)
        copy_lost(g, err);
    pthread_mutex_unlock(&g->lock);
    return status;
}

/* --- meeting --- */

/* Whether one more attempt may help is *again. */
static vla_status greet(vlai_group *g, const char *version, const char *host, double deadline, bool *again, vla_error *err)
{
    vlai_head head = {.size = 0};
    vlai_head_u32(&head, PROTOCOL);
    vlai_head_u32(&head, (uint32_t)g->ranks.rank);
    vlai_head_u32(&head, (uint32_t)g->ranks.world);
    vlai_head_u32(&head, (uint32_t)g->ranks.local_rank);
    vlai_head_u32(&head, (uint32_t)getpid());
    vlai_head_text(&head, version);
    vlai_head_text(&head, host);
    vlai_head_text(&head, g->ranks.job);
    if (!vlai_wire_put(&g->wire, FRAME_HELLO, 0, &head, NULL, 0))
        return vlai_nomem(err, head.size);
    double end = vlai_now() + 2 * HELLO_WITHIN;
    if (end > deadline)
        end = deadline;
    vlai_frame f;
    for (int more = 0;;) {
        short events = vlai_wire_flush(&g->wire) ? POLLIN : POLLIN | POLLOUT;
        struct pollfd p = {.fd = g->wire.fd, .events = events};
        double left = end - vlai_now();
        if (left <= 0) {
            *again = true;
            return vlai_fail(err, VLA_E_LOST, "no answer");
        }
        if (poll(&p, 1, (int)(left * 1e3) + 1) <= 0)
            continue;
        bool alive = vlai_wire_fill(&g->wire);
        more = vlai_wire_next(&g->wire, &f);
        if (more > 0)
            break;
        if (more < 0)
            return vlai_fail_hint(err, VLA_E_IO, "set MASTER_PORT to a free port on every rank", "rank %d: what listens at %s port %d is no rank 0 of a vla run: %s",
                                  g->ranks.rank, g->ranks.address, g->ranks.port, g->wire.why);
        if (!alive) {
            *again = true;
            return vlai_fail(err, VLA_E_LOST, "%s", g->wire.why);
        }
    }
    vlai_cut cut = {f.data, f.size, false};
    if (f.type == FRAME_TAKEN) {
        g->taken = true;
        return VLA_OK;
    }
    vla_error e;
    cut_error(&cut, (vla_status)vlai_cut_u32(&cut), &e);
    if (f.type != FRAME_REFUSED || cut.failed)
        return vlai_fail(err, VLA_E_IO, "rank %d: what listens at %s port %d does not answer as rank 0 of this version does", g->ranks.rank, g->ranks.address,
                         g->ranks.port);
    if (err)
        *err = e;
    return e.status;
}

void vlai_group_report(const vlai_ranks *who, const char *how, double limit_s)
{
    double end = vlai_now() + limit_s;
    char why[VLAI_WIRE_WHY], host[VLAI_RANKS_TEXT] = "?";
    if (who->world == 1 || who->port < 1 || who->port > 65535 || vlai_wire_is_nowhere(who->address))
        return;
    gethostname(host, sizeof host - 1);
    vlai_head head = {.size = 0};
    vlai_head_u32(&head, PROTOCOL);
    vlai_head_u32(&head, (uint32_t)who->rank);
    vlai_head_u32(&head, (uint32_t)who->world);
    vlai_head_text(&head, host);
    vlai_head_text(&head, who->job);
    vlai_head_text(&head, how);
    int fd = vlai_wire_connect(who->address, who->port, end, why, sizeof why);
    while (fd < 0 && vlai_now() < end) { /* rank 0 may be starting */
        poll(NULL, 0, 100);
        fd = vlai_wire_connect(who->address, who->port, end, why, sizeof why);
    }
    if (fd < 0)
        return;
    vlai_wire wire;
    vlai_wire_init(&wire, fd, HELLO_MOST);
    double left = limit_s;
    bool more = vlai_wire_put(&wire, FRAME_GONE, 0, &head, NULL, 0);
    while (more && (left = end - vlai_now()) > 0) { /* until the server hangs up: then it has read */
        struct pollfd p = {.fd = fd, .events = vlai_wire_flush(&wire) ? POLLIN : POLLIN | POLLOUT};
        if (poll(&p, 1, (int)(left * 1e3) + 1) > 0 && (p.revents & ~POLLOUT))
            more = vlai_wire_fill(&wire);
    }
    vlai_wire_fini(&wire);
}

static vla_status reach(vlai_group *g, const char *version, const char *host, double deadline, vla_error *err)
{
    char why[VLAI_WIRE_WHY] = "";
    for (int pause = 20;; pause = pause < 400 ? 2 * pause : 500) {
        bool again = false;
        int fd = vlai_wire_connect(g->ranks.address, g->ranks.port, deadline, why, sizeof why);
        if (fd >= 0) {
            vla_error e = VLA_ERROR_INIT;
            vlai_wire_init(&g->wire, fd, FRAME_MOST);
            vla_status status = greet(g, version, host, deadline, &again, &e);
            if (status == VLA_OK)
                return VLA_OK;
            vlai_wire_fini(&g->wire);
            if (!again) {
                if (err)
                    *err = e;
                return status;
            }
            snprintf(why, sizeof why, "%.*s", (int)sizeof why - 1, e.message);
        }
        if (vlai_now() >= deadline)
            return vlai_fail_hint(err, VLA_E_LOST,
                                  "see whether rank 0 runs, whether MASTER_ADDR and MASTER_PORT are the same on every rank, and whether a firewall stands between",
                                  "rank %d: rank 0 could not be reached at %s port %d within %g s: %s", g->ranks.rank, g->ranks.address, g->ranks.port,
                                  g->timeout_s, why);
        poll(NULL, 0, pause);
    }
}

static vla_status start_thread(vlai_group *g, vla_error *err)
{
    VLA_TRY(vlai_wire_pair(g->wake, err));
    sigset_t all, before; /* signals are the program's threads' business */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&g->thread, NULL, attend, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return vlai_fail(err, VLA_E_NOMEM, "no thread for the group of ranks (error %d)", failed);
    g->threaded = true;
    return VLA_OK;
}

/* Until the server says that all are here, or that the meeting is over. */
static vla_status await_welcome(vlai_group *g, double deadline, vla_error *err)
{
    bool late = false;
    pthread_mutex_lock(&g->lock);
    while (!g->met && g->lost.status == VLA_OK && !late)
        late = !wait_until(g, deadline + GRACE);
    vla_status status = VLA_OK;
    if (g->lost.status != VLA_OK)
        status = copy_lost(g, err);
    else if (!g->met)
        status = vlai_fail_hint(err, VLA_E_LOST, vlai_late_hint, "%s of %d did not come to %s port %d within %g s",
                                *g->missing ? g->missing : "some ranks", g->ranks.world, g->ranks.address, g->ranks.port, g->timeout_s);
    else
        g->armed = true;
    pthread_mutex_unlock(&g->lock);
    return status;
}

void vlai_group_hang_up(vlai_group *g)
{
    if (!g)
        return;
    if (g->threaded) {
        pthread_mutex_lock(&g->lock);
        g->stop = true;
        pthread_mutex_unlock(&g->lock);
        wake(g);
        pthread_join(g->thread, NULL);
        g->threaded = false;
    }
    pthread_mutex_lock(&g->lock);
    if (g->lost.status == VLA_OK) {
        vlai_fail(&g->lost, VLA_E_LOST, "rank %d has left the others", g->ranks.rank);
        g->culprit = g->ranks.rank;
        pthread_cond_broadcast(&g->changed);
    }
    vlai_wire_fini(&g->wire);
    pthread_mutex_unlock(&g->lock);
    vlai_server_join(g->server);
    g->server = NULL;
}

static void release(vlai_group *g)
{
    vlai_group_hang_up(g);
    for (int i = 0; i < 2; i++)
        if (g->wake[i] >= 0)
            close(g->wake[i]);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    vlai_free(g->hosts);
    vlai_free(g);
}

static vla_status make(const vlai_ranks *ranks, const vlai_group_options *o, vlai_group **out, vla_error *err)
{
    vlai_group *g = vlai_calloc(1, sizeof *g);
    if (!g)
        return vlai_nomem(err, sizeof *g);
    g->ranks = *ranks;
    g->timeout_s = o->timeout_s > 0 ? o->timeout_s : ranks->timeout_s > 0 ? ranks->timeout_s : TIMEOUT_S;
    g->silence_s = o->silence_s > 0 ? o->silence_s : SILENCE_S;
    g->lost_fn = o->lost;
    g->user = o->user;
    g->wire.fd = g->wake[0] = g->wake[1] = -1;
    g->moved = vlai_now();
    g->step = g->awaits = -1;
    int failed = vlai_cond_init(&g->changed);
    if (failed || pthread_mutex_init(&g->lock, NULL) != 0) {
        if (!failed)
            pthread_cond_destroy(&g->changed);
        vlai_free(g);
        return vlai_nomem(err, sizeof *g);
    }
    *out = g;
    return VLA_OK;
}

vla_status vlai_group_join(const vlai_ranks *ranks, const vlai_group_options *options, vlai_group **out, vla_error *err)
{
    vlai_group_options o = VLAI_GROUP_OPTIONS_DEFAULT;
    if (options)
        memcpy(&o, options, options->size < sizeof o ? options->size : sizeof o);
    *out = NULL;
    if (ranks->world == 1)
        return VLA_OK;
    if (ranks->world < 1 || ranks->world > VLAI_RANKS_MOST || ranks->rank < 0 || ranks->rank >= ranks->world || ranks->port < 1 || ranks->port > 65535 ||
        !*ranks->address)
        return vlai_fail(err, VLA_E_INVALID, "rank %d of %d at '%s' port %d, wanted a rank of at most %d and a place to meet", ranks->rank, ranks->world,
                         ranks->address, ranks->port, (int)VLAI_RANKS_MOST);
    if (vlai_wire_is_nowhere(ranks->address)) {
        if (ranks->rank > 0)
            return vlai_fail_hint(err, VLA_E_INVALID, "set MASTER_ADDR (--master-addr) to the name or number of rank 0's host, the same on every rank",
                                  "rank %d: no host has the name '%s', at which rank 0 is to be met", ranks->rank, ranks->address);
        vlai_warn("no host has the name '%s', which MASTER_ADDR gives this one: rank 0 waits for ranks that know it", ranks->address);
    }
    /* NCCL may register buffers that it meets in a capture, and then wants every rank to have captured the same call; here one rank
     * may replay while another meets a shape for the first time. Whoever has set it keeps it. Here, as no other place is before all
     * threads of the group and of NCCL. */
    setenv("NCCL_GRAPH_REGISTER", "0", 0);
    vlai_group *g = NULL;
    VLA_TRY(make(ranks, &o, &g, err));
    const char *version = o.version ? o.version : VLA_VERSION;
    char host[VLAI_RANKS_TEXT];
    if (gethostname(host, sizeof host) != 0)
        snprintf(host, sizeof host, "?");
    host[sizeof host - 1] = 0;
    double deadline = vlai_now() + g->timeout_s;
    vla_status status;
    if (ranks->rank == 0) {
        vlai_server_options server = {g->timeout_s, g->silence_s, version, host};
        int own;
        VLA_TRY_GOTO(vlai_server_start(ranks, &server, &own, &g->server, err), fail);
        vlai_wire_init(&g->wire, own, FRAME_MOST);
    } else {
        VLA_TRY_GOTO(reach(g, version, host, deadline, err), fail);
    }
    VLA_TRY_GOTO(start_thread(g, err), fail);
    VLA_TRY_GOTO(await_welcome(g, deadline, err), fail);
    *out = g;
    return VLA_OK;
fail:
    release(g);
    return status;
}

/* --- ending --- */

vla_status vlai_group_fail(vlai_group *g, vla_error *err)
{
    vla_error mine = err && err->status != VLA_OK ? *err : (vla_error){VLA_E_INTERNAL, "no reason was given", "", NULL, 0};
    if (!g)
        return mine.status;
    vlai_head head = {.size = 0};
    vlai_head_u32(&head, mine.status);
    vlai_head_text(&head, mine.message);
    double deadline = vlai_now() + SETTLE_COLLECTIVE + LAST_WORDS;
    pthread_mutex_lock(&g->lock);
    g->failing = true;
    bool good = g->lost.status != VLA_OK || vlai_wire_put(&g->wire, FRAME_FAIL, 0, &head, NULL, 0);
    if (good && g->lost.status == VLA_OK && !vlai_wire_flush(&g->wire))
        wake(g);
    while (good && g->lost.status == VLA_OK)
        good = wait_until(g, deadline);
    if (g->lost.status != VLA_OK && g->culprit != g->ranks.rank)
        mine = g->lost;
    pthread_mutex_unlock(&g->lock);
    if (err)
        *err = mine;
    return mine.status;
}

vla_status vlai_group_leave(vlai_group *g, vla_error *err)
{
    if (!g)
        return VLA_OK;
    /* Rank 0's leave is granted when all others have left; theirs at once. */
    double deadline = vlai_now() + 2 * GRACE + (g->ranks.rank == 0 ? g->timeout_s : 0);
    bool late = false;
    vla_status status = VLA_OK;
    pthread_mutex_lock(&g->lock);
    g->leaving = true;
    if (!g->failing && g->lost.status == VLA_OK) {
        if (!vlai_wire_put(&g->wire, FRAME_LEAVE, 0, NULL, NULL, 0))
            status = vlai_nomem(err, VLAI_WIRE_HEADER);
        else if (!vlai_wire_flush(&g->wire))
            wake(g);
        while (status == VLA_OK && !g->bye && g->lost.status == VLA_OK && !late)
            late = !wait_until(g, deadline);
    }
    if (!g->failing && !g->bye && g->lost.status != VLA_OK)
        status = copy_lost(g, err);
    else if (!g->failing && late && !g->bye)
        status = vlai_fail(err, VLA_E_LOST, "rank %d: rank 0 did not answer when this rank left", g->ranks.rank);
    pthread_mutex_unlock(&g->lock);
    release(g);
    return status;
}
