#include "dist/server_state.h"

#include "base/fail.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/time.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { STRANGERS = 128, WARNINGS = 20, TICK_MS = 100 };

const char *vlai_server_where(const vlai_server *s, const member *m, char out[VLAI_PLACE])
{
    return vlai_place(s->met, m->phase, m->step, out);
}

static void warn(vlai_server *s, const char *peer, const char *why)
{
    if (s->warnings++ < WARNINGS)
        vlai_warn("port %d: a connection from %s was dropped: %s%s", s->ranks.port, peer, why,
                  s->warnings == WARNINGS ? " (further ones are dropped without a word)" : "");
}

/* --- ending --- */

void vlai_server_put_error(vlai_head *head, const vla_error *e)
{
    vlai_head_text(head, e->message);
    vlai_head_text(head, e->hint);
}

static void tell_abort(vlai_server *s, member *m)
{
    vlai_head head = {.size = 0};
    vlai_head_u32(&head, s->verdict.status);
    vlai_head_u32(&head, (uint32_t)s->culprit);
    vlai_server_put_error(&head, &s->verdict);
    if (!vlai_wire_put(&m->wire, FRAME_ABORT, 0, &head, NULL, 0))
        vlai_wire_fini(&m->wire); /* no memory for it: a connection that closes says the most important */
    else
        vlai_wire_flush(&m->wire);
}

void vlai_server_end(vlai_server *s, int culprit)
{
    s->culprit = culprit;
    s->verdict_at = vlai_now();
    for (int r = 1; r < s->ranks.world; r++)
        if (s->members[r].wire.fd >= 0)
            tell_abort(s, &s->members[r]);
}

void vlai_server_lose(vlai_server *s, int rank, const char *why)
{
    if (s->verdict_at)
        return;
    char place[VLAI_PLACE];
    s->lingers = !s->met;
    vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_lost_hint, "rank %d (host %s) was lost %s: %s", rank, s->members[rank].host,
                   vlai_server_where(s, &s->members[rank], place), why);
    vlai_server_end(s, rank);
}

void vlai_server_no_memory(vlai_server *s)
{
    if (s->verdict_at)
        return;
    vlai_fail(&s->verdict, VLA_E_LOST, "rank 0 (host %s) ran out of host memory for messages between ranks", s->members[0].host);
    vlai_server_end(s, 0);
}

/* --- meeting --- */

static void welcome(vlai_server *s)
{
    s->met = true;
    size_t bytes = 4;
    for (int r = 0; r < s->ranks.world; r++)
        bytes += 4 + strlen(s->members[r].host);
    for (int r = 0; r < s->ranks.world && !s->verdict_at; r++) {
        vlai_wire *w = &s->members[r].wire;
        vlai_head count = {.size = 0};
        vlai_head_u32(&count, (uint32_t)s->ranks.world);
        bool good = vlai_wire_start(w, FRAME_WELCOME, 0, bytes) && vlai_wire_append(w, count.data, count.size);
        for (int k = 0; k < s->ranks.world && good; k++) {
            vlai_head host = {.size = 0};
            vlai_head_text(&host, s->members[k].host);
            good = vlai_wire_append(w, host.data, host.size);
        }
        if (!good)
            vlai_server_no_memory(s);
    }
}

static void refuse(vlai_server *s, stranger *x, const vla_error *e)
{
    vlai_head head = {.size = 0};
    vlai_head_u32(&head, e->status);
    vlai_server_put_error(&head, e);
    warn(s, x->peer, e->message);
    if (!vlai_wire_put(&x->wire, FRAME_REFUSED, 0, &head, NULL, 0)) {
        vlai_wire_fini(&x->wire);
        return;
    }
    vlai_wire_flush(&x->wire);
    x->closing = true;
}

static void read_member(vlai_server *s, int rank, double now);

/* A rank of this run that cannot take part: the meeting is over for everybody. Afterwards it is one that came too late. */
static void unfit(vlai_server *s, stranger *x, const vla_error *e)
{
    refuse(s, x, e);
    if (s->met || s->verdict_at)
        return;
    s->verdict = *e;
    s->lingers = true;
    vlai_server_end(s, CULPRIT_NONE);
}

/* A launcher says that a rank has ended. */
static void gone(vlai_server *s, stranger *x, const vlai_frame *f)
{
    char host[VLAI_RANKS_TEXT], job[VLAI_RANKS_TEXT], how[VLAI_RANKS_TEXT];
    vlai_cut cut = {f->data, f->size, false};
    uint32_t protocol = vlai_cut_u32(&cut), rank = vlai_cut_u32(&cut), world = vlai_cut_u32(&cut);
    vlai_cut_text(&cut, host, sizeof host);
    vlai_cut_text(&cut, job, sizeof job);
    vlai_cut_text(&cut, how, sizeof how);
    vlai_wire_fini(&x->wire);
    if (cut.failed || protocol != PROTOCOL || world != (uint32_t)s->ranks.world || rank >= world || (*job && *s->ranks.job && strcmp(job, s->ranks.job) != 0)) {
        warn(s, x->peer, "what it says about a rank is not of this run");
        return;
    }
    if (s->members[rank].state != ABSENT || s->verdict_at)
        return;
    s->lingers = true;
    vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_lost_hint, "rank %u (host %s) was lost while the ranks met: it %s", rank, host, how);
    vlai_server_end(s, (int)rank);
}

static void hello(vlai_server *s, stranger *x, const vlai_frame *f, double now)
{
    char version[64], host[VLAI_RANKS_TEXT], job[VLAI_RANKS_TEXT];
    vlai_cut cut = {f->data, f->size, false};
    uint32_t protocol = vlai_cut_u32(&cut), rank = vlai_cut_u32(&cut), world = vlai_cut_u32(&cut);
    vlai_cut_u32(&cut); /* the local rank: for whoever reads the traffic */
    uint32_t pid = vlai_cut_u32(&cut);
    vlai_cut_text(&cut, version, sizeof version);
    vlai_cut_text(&cut, host, sizeof host);
    vlai_cut_text(&cut, job, sizeof job);
    if (f->type != FRAME_HELLO || cut.failed) {
        warn(s, x->peer, "its first message is no greeting");
        vlai_wire_fini(&x->wire);
        return;
    }
    const char *own = s->members[0].host;
    vla_error e = VLA_ERROR_INIT;
    if (*job && *s->ranks.job && strcmp(job, s->ranks.job) != 0) {
        vlai_fail_hint(&e, VLA_E_INVALID, "give each run a MASTER_PORT of its own", "rank %u (host %s) is of job '%.100s', but the run at port %d is job '%.100s'",
                       rank, host, job, s->ranks.port, s->ranks.job);
        refuse(s, x, &e);
    } else if (protocol != PROTOCOL || strcmp(version, s->version) != 0) {
        vlai_fail_hint(&e, VLA_E_INVALID, vlai_differ_hint, "rank %u (host %s) is vla %s (protocol %u), rank 0 (host %s) is vla %s (protocol %d)", rank, host, version,
                       protocol, own, s->version, PROTOCOL);
        unfit(s, x, &e);
    } else if (world != (uint32_t)s->ranks.world || rank >= world || rank == 0) {
        vlai_fail_hint(&e, VLA_E_INVALID, "start every rank of a run with the same number of ranks, and each with a number of its own",
                       "rank %u of %u (host %s) came to rank 0 of %d (host %s)", rank, world, host, s->ranks.world, own);
        unfit(s, x, &e);
    } else if (s->members[rank].state != ABSENT) {
        const member *m = &s->members[rank];
        vlai_fail_hint(&e, VLA_E_INVALID, "end the processes of an earlier run, or give each run a MASTER_PORT of its own",
                       "rank %u (host %s, process %u) is there already: host %s, process %u", rank, host, pid, m->host, m->pid);
        refuse(s, x, &e);
    } else if (s->verdict_at) { /* too late: it hears why */
        vlai_fail_hint(&e, VLA_E_LOST, s->verdict.hint, "%s", s->verdict.status == VLA_OK ? "the run at this port has ended" : s->verdict.message);
        refuse(s, x, &e);
        s->late++;
    } else {
        member *m = &s->members[rank];
        m->wire = x->wire;
        m->wire.limit = FRAME_MOST;
        x->wire = (vlai_wire){.fd = -1};
        m->state = HERE;
        m->pid = pid;
        m->heard = m->moved = now;
        memcpy(m->host, host, sizeof host);
        if (!vlai_wire_put(&m->wire, FRAME_TAKEN, 0, NULL, NULL, 0))
            vlai_server_no_memory(s);
        if (++s->here == s->ranks.world)
            welcome(s);
        read_member(s, (int)rank, now); /* what came right behind the greeting */
    }
}

/* --- members --- */

static bool beat(vlai_server *s, int rank, const vlai_frame *f, double now)
{
    member *m = &s->members[rank];
    vlai_cut cut = {f->data, f->size, false};
    char phase[VLAI_GROUP_PHASE + 1];
    vlai_cut_text(&cut, phase, sizeof phase);
    int64_t step = vlai_cut_i64(&cut);
    uint32_t moves = vlai_cut_u32(&cut);
    double age = vlai_cut_u32(&cut) / 1e3;
    uint32_t work = vlai_cut_u32(&cut);
    if (cut.failed || work >= 2 + (uint32_t)s->ranks.world)
        return false;
    m->works = work > 0;
    m->awaits = work < 2 ? -1 : (int)work - 2;
    if (moves != m->moves)
        m->moved = now - age;
    m->moves = moves;
    m->step = step;
    memcpy(m->phase, phase, sizeof phase);
    return true;
}

static bool failed(vlai_server *s, int rank, const vlai_frame *f, double now)
{
    member *m = &s->members[rank];
    vlai_cut cut = {f->data, f->size, false};
    char message[sizeof s->failure.message], place[VLAI_PLACE];
    uint32_t status = vlai_cut_u32(&cut);
    vlai_cut_text(&cut, message, sizeof message);
    if (cut.failed || status == VLA_OK || status >= VLA_STATUS_COUNT)
        return false;
    bool first = s->failure.status == VLA_OK, broken = status == VLA_E_NCCL;
    if (!first && (broken || s->failure.status != VLA_E_NCCL))
        return true; /* the first one stays, unless it was a collective that broke and this one is not */
    double at = now + (broken ? SETTLE_COLLECTIVE : SETTLE);
    s->failure_at = first || at < s->failure_at ? at : s->failure_at;
    vlai_fail_hint(&s->failure, VLA_E_LOST, vlai_lost_hint, "rank %d (host %s) failed %s: %s", rank, m->host, vlai_server_where(s, m, place), message);
    s->failure.status = (vla_status)status; /* its own for now: the order of causes goes by it */
    s->failed_rank = rank;
    return true;
}

static void leave(vlai_server *s, int rank, double now)
{
    member *m = &s->members[rank];
    if (m->state == LEFT)
        return;
    m->state = LEFT;
    s->left++;
    if (rank == 0)
        s->left_at = now;
    if (rank > 0 && !vlai_wire_put(&m->wire, FRAME_BYE, 0, NULL, NULL, 0))
        vlai_server_no_memory(s);
    if (s->left == s->ranks.world && s->members[0].state == LEFT && !vlai_wire_put(&s->members[0].wire, FRAME_BYE, 0, NULL, NULL, 0))
        vlai_server_no_memory(s);
    for (int i = 0; i < SLOTS; i++)
        vlai_server_check_left(s, &s->slots[i]);
}

static bool handle(vlai_server *s, int rank, const vlai_frame *f, double now)
{
    switch (f->type) {
    case FRAME_BEAT: return beat(s, rank, f, now);
    case FRAME_SET: return vlai_server_set_key(s, rank, f);
    case FRAME_GET: return vlai_server_get_key(s, rank, f, now);
    case FRAME_FORGET: return vlai_server_forget_keys(s, rank, f);
    case FRAME_COLLECT: return vlai_server_collect(s, rank, f, now);
    case FRAME_FAIL: return failed(s, rank, f, now);
    case FRAME_LEAVE: leave(s, rank, now); return true;
    default: return false;
    }
}

static void read_member(vlai_server *s, int rank, double now)
{
    member *m = &s->members[rank];
    vlai_frame f;
    bool alive = vlai_wire_fill(&m->wire);
    if (m->wire.received != m->received) {
        m->received = m->wire.received;
        m->heard = now;
    }
    int more;
    while ((more = vlai_wire_next(&m->wire, &f)) > 0)
        if (!s->verdict_at && !handle(s, rank, &f, now)) {
            vlai_server_lose(s, rank, "a message of it is not understood");
            alive = false;
            break;
        }
    if (alive && more == 0)
        return;
    char why[VLAI_WIRE_WHY];
    snprintf(why, sizeof why, "%s", m->wire.why);
    vlai_wire_fini(&m->wire);
    bool announced = m->state == LEFT || (s->failure.status != VLA_OK && s->failed_rank == rank);
    if (rank == 0 && !s->verdict_at && s->left == s->ranks.world)
        s->verdict_at = now; /* all have left: nothing to say, only to end */
    else if (!announced || rank == 0)
        vlai_server_lose(s, rank, why);
}

static void read_stranger(vlai_server *s, stranger *x, double now)
{
    vlai_frame f;
    bool alive = vlai_wire_fill(&x->wire);
    if (x->closing) {
        if (!alive)
            vlai_wire_fini(&x->wire);
        x->wire.in_first = x->wire.in_size; /* whatever it still says */
        return;
    }
    int more = vlai_wire_next(&x->wire, &f);
    if (more > 0 && f.type == FRAME_GONE) {
        gone(s, x, &f);
    } else if (more > 0) {
        hello(s, x, &f, now);
    } else if (more < 0 || !alive) {
        warn(s, x->peer, x->wire.why);
        vlai_wire_fini(&x->wire);
    }
}

static void accept_all(vlai_server *s, double now)
{
    char peer[64];
    for (int k = 0; k < STRANGERS; k++) {
        int fd = vlai_wire_accept(s->listener, peer, sizeof peer);
        if (fd < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                s->deaf_until = now + 1;
            return;
        }
        stranger *oldest = &s->strangers[0], *x = NULL;
        for (int i = 0; i < STRANGERS && !x; i++) {
            if (s->strangers[i].wire.fd < 0)
                x = &s->strangers[i];
            else if (s->strangers[i].since < oldest->since)
                oldest = &s->strangers[i];
        }
        if (!x) {
            x = oldest;
            warn(s, x->peer, "too many connections that have not greeted");
            vlai_wire_fini(&x->wire);
        }
        x->since = now;
        x->closing = false;
        memcpy(x->peer, peer, sizeof peer);
        vlai_wire_init(&x->wire, fd, HELLO_MOST);
    }
}

/* --- the thread --- */

static void tick(vlai_server *s, double now)
{
    /* Whoever did not run itself (a stopped process, a machine that slept) has not listened either. */
    if (now - s->looped > STALL)
        for (int r = 0; r < s->ranks.world; r++)
            s->members[r].heard = now;
    s->looped = now;
    for (int i = 0; i < STRANGERS; i++) {
        stranger *x = &s->strangers[i];
        if (x->wire.fd < 0 || now - x->since < HELLO_WITHIN)
            continue;
        if (!x->closing)
            warn(s, x->peer, "it did not greet");
        vlai_wire_fini(&x->wire);
    }
    if (!s->verdict_at && s->failure.status != VLA_OK && now >= s->failure_at) {
        s->verdict = s->failure;
        s->verdict.status = VLA_E_LOST;
        vlai_server_end(s, s->failed_rank);
    }
    vlai_server_watch(s, now);
}

/* Sends what waits; true when every connection has taken all of it. `own` is rank 0's. */
static bool flush(vlai_server *s, bool own)
{
    bool done = true;
    for (int r = own ? 0 : 1; r < (own ? 1 : s->ranks.world); r++)
        if (s->members[r].wire.fd >= 0)
            done &= vlai_wire_flush(&s->members[r].wire);
    for (int i = 0; i < STRANGERS && !own; i++)
        if (s->strangers[i].wire.fd >= 0)
            done &= vlai_wire_flush(&s->strangers[i].wire);
    return done;
}

static void polled(struct pollfd *p, const vlai_wire *w)
{
    *p = (struct pollfd){.fd = w->fd, .events = (short)(POLLIN | (w->out_first < w->out_size ? POLLOUT : 0))};
}

/* After a verdict: the others first, then this process, and out once everybody has hung up or it has lasted long enough. */
static bool ended(vlai_server *s, bool flushed, double now)
{
    if (!s->verdict_at)
        return false;
    member *own = &s->members[0];
    double since = now - s->verdict_at;
    if (!s->own_told && s->verdict.status != VLA_OK && own->wire.fd >= 0 && (flushed || since > LAST_WORDS / 2)) {
        s->own_told = true;
        tell_abort(s, own);
    }
    bool open = s->lingers && s->here + s->late < s->ranks.world;
    for (int r = 0; r < s->ranks.world; r++)
        open |= s->members[r].wire.fd >= 0;
    return !open || since > LAST_WORDS;
}

static void *serve(void *arg)
{
    vlai_server *s = arg;
    int world = s->ranks.world;
    s->started = s->looped = vlai_now();
    s->told_missing = s->started + 5;
    for (bool done = false; !done;) {
        nfds_t n = 0;
        s->polled[n++] = (struct pollfd){.fd = s->looped < s->deaf_until ? -1 : s->listener, .events = POLLIN};
        for (int r = 0; r < world; r++)
            polled(&s->polled[n++], &s->members[r].wire);
        for (int i = 0; i < STRANGERS; i++)
            polled(&s->polled[n++], &s->strangers[i].wire);
        if (poll(s->polled, n, TICK_MS) < 0 && errno != EINTR) { /* more places than RLIMIT_NOFILE allows: looked at one by one */
            poll(NULL, 0, TICK_MS / 20);
            for (nfds_t i = 0; i < n; i++)
                s->polled[i].revents = s->polled[i].fd >= 0 ? POLLIN : 0;
        }
        double now = vlai_now();
        for (int r = 0; r < world; r++)
            if (s->polled[1 + r].revents && s->members[r].wire.fd >= 0)
                read_member(s, r, now);
        for (int i = 0; i < STRANGERS; i++)
            if (s->polled[1 + world + i].revents && s->strangers[i].wire.fd >= 0)
                read_stranger(s, &s->strangers[i], now);
        if (s->polled[0].revents & POLLIN)
            accept_all(s, now);
        tick(s, now);
        bool flushed = flush(s, false);
        flush(s, true);
        done = ended(s, flushed, now);
    }
    close(s->listener);
    s->listener = -1;
    for (int r = 0; r < world; r++)
        vlai_wire_fini(&s->members[r].wire);
    for (int i = 0; i < STRANGERS; i++)
        vlai_wire_fini(&s->strangers[i].wire);
    return NULL;
}

/* --- life --- */

static void release(vlai_server *s)
{
    if (!s)
        return;
    if (s->listener >= 0)
        close(s->listener);
    for (int r = 0; r < s->ranks.world && s->members; r++)
        vlai_wire_fini(&s->members[r].wire);
    for (int i = 0; i < SLOTS; i++) {
        for (int r = 0; r < s->ranks.world && s->slots[i].parts; r++)
            vlai_free(s->slots[i].parts[r].data);
        vlai_free(s->slots[i].parts);
    }
    vlai_keys_fini(&s->keys);
    vlai_free(s->polled);
    vlai_free(s->strangers);
    vlai_free(s->members);
    vlai_free(s);
}

vla_status vlai_server_start(const vlai_ranks *ranks, const vlai_server_options *options, int *own, vlai_server **out, vla_error *err)
{
    *out = NULL;
    *own = -1;
    size_t world = (size_t)ranks->world;
    vlai_server *s = vlai_calloc(1, sizeof *s);
    if (!s)
        return vlai_nomem(err, sizeof *s);
    s->listener = -1;
    s->ranks = *ranks;
    s->timeout_s = options->timeout_s;
    s->silence_s = options->silence_s;
    snprintf(s->version, sizeof s->version, "%s", options->version);
    vla_status status = VLA_OK;
    s->members = vlai_calloc(world, sizeof *s->members);
    s->strangers = vlai_calloc(STRANGERS, sizeof *s->strangers);
    s->polled = vlai_calloc(1 + world + STRANGERS, sizeof *s->polled);
    bool good = s->members && s->strangers && s->polled;
    for (size_t r = 0; r < world && s->members; r++)
        s->members[r].wire.fd = s->members[r].awaits = -1;
    for (int i = 0; i < STRANGERS && s->strangers; i++)
        s->strangers[i].wire.fd = -1;
    for (int i = 0; i < SLOTS && good; i++)
        good = (s->slots[i].parts = vlai_calloc(world, sizeof(part))) != NULL;
    if (!good) {
        status = vlai_nomem(err, world * (sizeof(member) + SLOTS * sizeof(part)));
        goto fail;
    }
    bool local = ranks->local_world == ranks->world;
    VLA_TRY_GOTO(vlai_wire_listen(ranks->address, ranks->port, local, &s->listener, err), fail);
    int pair[2];
    VLA_TRY_GOTO(vlai_wire_pair(pair, err), fail);
    member *m = &s->members[0];
    vlai_wire_init(&m->wire, pair[0], FRAME_MOST);
    m->state = HERE;
    m->pid = (unsigned)getpid();
    m->heard = m->moved = vlai_now();
    snprintf(m->host, sizeof m->host, "%s", options->host);
    s->here = 1;

    sigset_t all, before; /* signals are the program's threads' business */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed_to = pthread_create(&s->thread, NULL, serve, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed_to) {
        close(pair[1]);
        status = vlai_fail(err, VLA_E_NOMEM, "no thread for the server of rank 0 (error %d)", failed_to);
        goto fail;
    }
    s->threaded = true;
    *own = pair[1];
    *out = s;
    return VLA_OK;
fail:
    release(s);
    return status;
}

void vlai_server_join(vlai_server *s)
{
    if (s && s->threaded)
        pthread_join(s->thread, NULL);
    release(s);
}
