#include "dist/supervise.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/text.h"
#include "base/time.h"
#include "dist/group.h"
#include "dist/status.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { LINE = 4096, HOST = 256, HEARD = 8, LOCAL_MOST = 1024 };

static const double usual_grace_s = 8, /* SIGTERM to SIGKILL */
    echo_s = 0.5,                      /* a second signal so soon is the first one again: `timeout` sends it to process and group */
    gather_s = 0.1,                    /* after the first failure: who else has failed by himself */
    wait_for_culprit_s = 3,            /* after a rank that ended because another was lost */
    last_words_s = 3,                  /* of several machines: rank 0 tells those that come just now why there is nobody to meet */
    report_s = 5;                      /* rank 0 of another machine may be starting */

typedef struct {
    int pipe; /* that it is read from; -1: it is the caller's, or at its end */
    size_t used;
    char line[LINE + 1];
} stream;

enum { OUT, ERR, STREAMS };

typedef struct {
    pid_t pid;
    int rank;
    stream streams[STREAMS];
    bool running;
    bool told; /* SIGTERM or SIGKILL was sent after a failure: its end is no news */
    int how;   /* of waitpid, once it has ended */
} child;

typedef struct {
    const vlai_supervise_options *o;
    child *children;
    vlai_status_pages pages;
    char host[HOST];
    double began;
    double failed_at;   /* a rank failed; 0: none yet */
    double lost_at;     /* a rank ended without a failure of its own and unsaved; 0: none yet */
    double asked_at;    /* a signal was passed on; 0: none yet */
    bool named;         /* the culprit */
    bool ended, killed; /* SIGTERM, SIGKILL were sent to the rest */
    int asked_by;       /* the first signal */
    int killed_by;      /* the second one */
    int culprit;        /* index; -1: none yet */
    vlai_ranks gone;    /* the culprit, for the ranks that wait for it */
    char how[160];
    pthread_t reporter;
    bool reported;
    struct {
        int rank;
        char line[LINE + 1];
    } heard[HEARD]; /* the last lines of ranks */
    int next_heard;
} launch;

/* ---- signals ---- */

/* Handlers may run in any thread, so that they write the signal's number into a pipe; that is the process' only one. */
static int signal_pipe[2] = {-1, -1};
static const int watched[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP};
enum { WATCHED = sizeof watched / sizeof *watched };

static void on_signal(int number)
{
    int kept = errno;
    unsigned char byte = (unsigned char)number;
    ssize_t written = write(signal_pipe[1], &byte, 1); /* a full pipe wakes the reader anyway */
    (void)written;
    errno = kept;
}

/* The terminal may go away without an end of what nohup has started. */
static bool is_by_nohup(int number)
{
    struct sigaction now;
    return number == SIGHUP && sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler == SIG_IGN;
}

static bool set_flags(int fd)
{
    return fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0;
}

static vla_status make_pipe(int ends[2], vla_error *err)
{
    if (pipe(ends) != 0)
        return vlai_fail(err, VLA_E_IO, "no pipe: %s", strerror(errno));
    if (!set_flags(ends[0]) || !set_flags(ends[1])) {
        int code = errno;
        close(ends[0]);
        close(ends[1]);
        return vlai_fail(err, VLA_E_IO, "a pipe cannot be set up: %s", strerror(code));
    }
    return VLA_OK;
}

/* ---- what is said ---- */

static void say(const launch *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(const launch *l, const char *format, ...)
{
    char line[LINE + 64];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (l->o->say)
        l->o->say(l->o->user, -1, line);
}

/* Ranks often say the same at the same time, above all when one of them is lost: once is enough. */
static bool is_echo(launch *l, int rank, const stream *s)
{
    for (int i = 0; i < HEARD; i++)
        if (l->heard[i].rank != rank && !strcmp(l->heard[i].line, s->line))
            return true;
    l->heard[l->next_heard].rank = rank;
    memcpy(l->heard[l->next_heard].line, s->line, s->used + 1);
    l->next_heard = (l->next_heard + 1) % HEARD;
    return false;
}

/* Of standard output: what libraries warn of there (NCCL does). */
static bool is_warning(const char *line)
{
    static const char *const words[] = {"warn", "error", "fail"};
    for (const char *c = line; *c; c++)
        for (size_t i = 0; i < sizeof words / sizeof *words; i++)
            if (!strncasecmp(c, words[i], strlen(words[i])))
                return true;
    return false;
}

static void flush_line(launch *l, child *c, int which)
{
    stream *s = &c->streams[which];
    s->line[s->used] = 0;
    if (s->used && l->o->say && (which == ERR || is_warning(s->line)) && !is_echo(l, c->rank, s))
        l->o->say(l->o->user, c->rank, s->line);
    s->used = 0;
}

static void close_stream(launch *l, child *c, int which)
{
    stream *s = &c->streams[which];
    flush_line(l, c, which);
    if (s->pipe >= 0)
        close(s->pipe);
    s->pipe = -1;
}

/* What stands in a rank's pipe, line by line; a line longer than the buffer comes in parts. */
static void read_pipe(launch *l, child *c, int which)
{
    stream *s = &c->streams[which];
    char data[LINE];
    ssize_t n;
    while (s->pipe >= 0 && (n = read(s->pipe, data, sizeof data)) != 0) {
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return;
        for (ssize_t i = 0; i < n; i++) {
            if (data[i] != '\n' && data[i] != '\r')
                s->line[s->used++] = data[i];
            if (data[i] == '\n' || data[i] == '\r' || s->used == LINE)
                flush_line(l, c, which);
        }
    }
    close_stream(l, c, which);
}

static void read_pipes(launch *l, child *c)
{
    for (int k = 0; k < STREAMS; k++)
        read_pipe(l, c, k);
}

static const char *signal_name(int number)
{
    static const struct {
        int number;
        const char *name;
    } names[] = {{SIGKILL, "SIGKILL"}, {SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGSEGV, "SIGSEGV"}, {SIGABRT, "SIGABRT"},
                 {SIGBUS, "SIGBUS"}, {SIGFPE, "SIGFPE"}, {SIGILL, "SIGILL"}, {SIGHUP, "SIGHUP"}, {SIGQUIT, "SIGQUIT"},
                 {SIGPIPE, "SIGPIPE"}, {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"}, {SIGUSR1, "SIGUSR1"}, {SIGUSR2, "SIGUSR2"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].number == number)
            return names[i].name;
    return "another one";
}

static int code_of(int how)
{
    return WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
}

/* Ranks of other machines that meet just now would wait for it until the time limit. By a thread, as an address may have to be looked
 * up. */
static void *report_main(void *arg)
{
    const launch *l = arg;
    vlai_group_report(&l->gone, l->how, report_s);
    return NULL;
}

static void name_culprit(launch *l)
{
    l->named = true;
    const child *c = &l->children[l->culprit];
    char phase[VLAI_STATUS_PHASE], end[128];
    int64_t step;
    vlai_status_get(&l->pages, l->culprit, phase, &step);
    const char *text = !WIFSIGNALED(c->how) && l->o->meaning ? l->o->meaning(WEXITSTATUS(c->how)) : NULL;
    if (WIFSIGNALED(c->how))
        snprintf(end, sizeof end, "signal %d (%s)", WTERMSIG(c->how), signal_name(WTERMSIG(c->how)));
    else
        snprintf(end, sizeof end, "code %d%s%s%s", WEXITSTATUS(c->how), text ? " (" : "", text ? text : "", text ? ")" : "");
    say(l, "rank %d (host %s, pid %ld) ended with %s in phase %s, step %" PRId64, c->rank, l->host, (long)c->pid, end, phase, step);
    l->gone.rank = c->rank;
    snprintf(l->how, sizeof l->how, "ended with %s", end);
    bool had_met = strcmp(phase, VLAI_STATUS_FIRST) != 0, no_server = l->o->first == 0 && !l->children[0].running;
    l->reported = l->o->nodes > 1 && !had_met && !no_server && pthread_create(&l->reporter, NULL, report_main, l) == 0;
}

/* ---- starting ---- */

static const char *const ours[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
                                   "MASTER_ADDR", "MASTER_PORT", VLAI_STATUS_VARIABLE, "TORCHELASTIC_USE_AGENT_STORE"};
enum { OURS = sizeof ours / sizeof *ours };

static bool replaced(const launch *l, const char *variable)
{
    size_t n = strcspn(variable, "=");
    for (int i = 0; i < OURS; i++)
        if (strlen(ours[i]) == n && !strncmp(variable, ours[i], n))
            return true;
    return l->o->time_limit_s > 0 && n == 16 && !strncmp(variable, "VLA_DIST_TIMEOUT", n);
}

/* The environment of one rank: the caller's, with our names replaced. One block: the pointers, then the texts. */
static char **make_environment(const launch *l, int index, int port, vla_error *err)
{
    const vlai_supervise_options *o = l->o;
    vlai_text text = {0};
    const char *address = o->address ? o->address : "127.0.0.1";
    vlai_text_printf(&text, "RANK=%d%cWORLD_SIZE=%d%cLOCAL_RANK=%d%cLOCAL_WORLD_SIZE=%d%cGROUP_RANK=%d%cGROUP_WORLD_SIZE=%d%c"
                     "MASTER_ADDR=%s%cMASTER_PORT=%d%c" VLAI_STATUS_VARIABLE "=%d:%d%c", o->first + index, 0, o->world, 0, index, 0,
                     o->ranks, 0, o->node, 0, o->nodes, 0, address, 0, port, 0, l->pages.fd, index, 0);
    if (o->nodes == 1 && !getenv("VLA_JOB_ID")) /* so that a rank of another run that finds this port is known for one */
        vlai_text_printf(&text, "VLA_JOB_ID=%ld-%.6f%c", (long)getpid(), l->began, 0);
    if (o->time_limit_s > 0)
        vlai_text_printf(&text, "VLA_DIST_TIMEOUT=%g%c", o->time_limit_s, 0);
    for (char **v = environ; *v; v++)
        if (!replaced(l, *v))
            vlai_text_put(&text, *v, strlen(*v) + 1);
    if (vlai_text_status(&text, err) != VLA_OK) {
        vlai_text_fini(&text);
        return NULL;
    }
    size_t count = 0;
    for (size_t i = 0; i < text.size; i++)
        count += !text.data[i];
    char **block = vlai_alloc((count + 1) * sizeof *block + text.size);
    if (!block)
        vlai_nomem(err, (count + 1) * sizeof *block + text.size);
    char *at = block ? (char *)(block + count + 1) : NULL;
    if (block)
        memcpy(at, text.data, text.size);
    for (size_t i = 0; block && i < count; at += strlen(at) + 1)
        block[i++] = at;
    if (block)
        block[count] = NULL;
    vlai_text_fini(&text);
    return block;
}

/* After the fork, until exec: functions that are safe in a signal handler, and no memory. */
static void become(const launch *l, char **environment, int ends[STREAMS][2], const sigset_t *mask, pid_t parent)
{
    static const char failed[] = "the program cannot be started\n";
    struct sigaction standard = {.sa_handler = SIG_DFL}, ignored = {.sa_handler = SIG_IGN};
    sigemptyset(&standard.sa_mask);
    sigemptyset(&ignored.sa_mask);
    for (int i = 0; i < WATCHED; i++)
        if (!is_by_nohup(watched[i]))
            sigaction(watched[i], &standard, NULL);
    sigaction(SIGTTOU, &ignored, NULL); /* a group in the background may write to the terminal, whatever stty says */
    setpgid(0, 0);                      /* a terminal's Ctrl-C is the launcher's to pass on */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) /* it died before */
        _exit(VLAI_CODE_NOT_STARTED);
    int nothing = open("/dev/null", O_RDONLY);
    if (nothing >= 0)
        dup2(nothing, STDIN_FILENO);
    for (int k = 0; k < STREAMS; k++)
        if (ends[k][1] >= 0)
            dup2(ends[k][1], k == OUT ? STDOUT_FILENO : STDERR_FILENO);
    if (nothing > STDERR_FILENO)
        close(nothing);
    pthread_sigmask(SIG_SETMASK, mask, NULL);
    execve(l->o->program ? l->o->program : "/proc/self/exe", l->o->argv, environment);
    ssize_t written = write(STDERR_FILENO, failed, sizeof failed - 1);
    (void)written;
    _exit(VLAI_CODE_NOT_STARTED);
}

static void close_all(int ends[STREAMS][2], int side)
{
    for (int k = 0; k < STREAMS; k++)
        if (ends[k][side] >= 0)
            close(ends[k][side]);
}

static vla_status start(launch *l, int index, int port, vla_error *err)
{
    child *c = &l->children[index];
    int ends[STREAMS][2] = {{-1, -1}, {-1, -1}};
    c->rank = l->o->first + index;
    char **environment = make_environment(l, index, port, err);
    if (!environment)
        return err ? err->status : VLA_E_NOMEM;
    vla_status status = VLA_OK;
    for (int k = 0; k < STREAMS && status == VLA_OK && c->rank > 0; k++) {
        status = make_pipe(ends[k], err);
        if (status == VLA_OK)
            fcntl(ends[k][1], F_SETFL, 0); /* the rank may wait for the launcher to read */
    }
    sigset_t all, mask;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mask);
    pid_t parent = getpid(), pid = status == VLA_OK ? fork() : -1;
    if (pid == 0)
        become(l, environment, ends, &mask, parent);
    int code = errno;
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    vlai_free(environment);
    close_all(ends, 1);
    if (pid < 0) {
        close_all(ends, 0);
        return status != VLA_OK ? status : vlai_fail(err, VLA_E_IO, "rank %d cannot be started: %s", c->rank, strerror(code));
    }
    setpgid(pid, pid); /* whichever of the two comes first; after exec it fails, and has been done */
    c->pid = pid;
    for (int k = 0; k < STREAMS; k++)
        c->streams[k].pipe = ends[k][0];
    c->running = true;
    return VLA_OK;
}

int vlai_free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &size) == 0)
        port = ntohs(address.sin_port);
    if (fd >= 0)
        close(fd);
    return port;
}

/* ---- watching ---- */

static int running(const launch *l)
{
    int n = 0;
    for (int i = 0; i < l->o->ranks; i++)
        n += l->children[i].running;
    return n;
}

/* To the groups, so that what a rank has started goes with it. */
static void send_all(launch *l, int number, bool after_failure)
{
    for (int i = 0; i < l->o->ranks; i++) {
        child *c = &l->children[i];
        if (!c->running)
            continue;
        if (kill(-c->pid, number) != 0)
            kill(c->pid, number);
        c->told |= after_failure;
    }
}

static void reap(launch *l)
{
    for (int i = 0; i < l->o->ranks; i++) {
        child *c = &l->children[i];
        int how;
        if (!c->running || waitpid(c->pid, &how, WNOHANG) != c->pid)
            continue;
        c->running = false;
        c->how = how;
        read_pipes(l, c);
        for (int k = 0; k < STREAMS; k++)
            flush_line(l, c, k);
        int code = code_of(how);
        if (c->told || code == 0 || code == VLAI_CODE_SAVED)
            continue;
        double now = vlai_now();
        bool on_request = l->asked_at > 0 && WIFSIGNALED(how) && WTERMSIG(how) == SIGTERM; /* before it could save */
        if (code == VLAI_CODE_LOST || on_request) {
            l->lost_at = l->lost_at > 0 ? l->lost_at : now;
            continue;
        }
        l->failed_at = l->failed_at > 0 ? l->failed_at : now;
        /* Of those that failed at the same moment a signal is nearer to the cause than an error that may follow from it. */
        if (l->culprit < 0 || (!l->named && WIFSIGNALED(how) && !WIFSIGNALED(l->children[l->culprit].how)))
            l->culprit = i;
    }
}

static void take_signal(launch *l, int number)
{
    double now = vlai_now();
    if (l->asked_at > 0 && now - l->asked_at < echo_s)
        return;
    if (l->asked_at > 0) {
        l->killed_by = number;
        say(l, "a second %s: the ranks are killed", signal_name(number));
        send_all(l, SIGKILL, true);
        return;
    }
    l->asked_at = now;
    l->asked_by = number;
    if (l->o->nothing_to_save)
        say(l, "ended by %s", signal_name(number));
    else
        say(l, "%s: the ranks save and end; a second one kills them", signal_name(number));
    send_all(l, SIGTERM, false);
}

static void take_signals(launch *l)
{
    unsigned char bytes[64];
    ssize_t n;
    while ((n = read(signal_pipe[0], bytes, sizeof bytes)) > 0 || (n < 0 && errno == EINTR))
        for (ssize_t i = 0; i < n; i++)
            if (bytes[i] != SIGCHLD)
                take_signal(l, bytes[i]);
}

/* What is due after a failure; returns the milliseconds until the next thing is, -1 for never. */
static int act(launch *l)
{
    double now = vlai_now(), grace = l->o->grace_s > 0 ? l->o->grace_s : usual_grace_s;
    double name_at = l->failed_at + gather_s;
    double end_at = l->failed_at > 0 ? l->failed_at + (l->o->nodes > 1 ? last_words_s : gather_s) : l->lost_at > 0 ? l->lost_at + wait_for_culprit_s : 0;
    if (end_at == 0)
        return -1;
    double kill_at = (l->failed_at > 0 && (l->lost_at == 0 || l->failed_at < l->lost_at) ? l->failed_at : l->lost_at) + grace;
    if (l->culprit >= 0 && !l->named && now >= name_at)
        name_culprit(l);
    if (!l->ended && now >= end_at) {
        l->ended = true;
        send_all(l, SIGTERM, true);
    }
    if (!l->killed && now >= kill_at) {
        l->killed = true;
        for (int i = 0; i < l->o->ranks; i++)
            if (l->children[i].running)
                say(l, "rank %d (pid %ld) did not end within %g s and is killed", l->children[i].rank, (long)l->children[i].pid, grace);
        send_all(l, SIGKILL, true);
    }
    double next = l->culprit >= 0 && !l->named ? name_at : !l->ended ? end_at : !l->killed ? kill_at : now + 3600;
    return next > now ? (int)(1000 * (next - now)) + 1 : 0;
}

static void watch(launch *l, struct pollfd *fds)
{
    for (;;) {
        reap(l);
        if (!running(l))
            break;
        int wait = act(l), n = 1;
        fds[0] = (struct pollfd){.fd = signal_pipe[0], .events = POLLIN};
        for (int i = 0; i < l->o->ranks; i++)
            for (int k = 0; k < STREAMS; k++)
                if (l->children[i].streams[k].pipe >= 0)
                    fds[n++] = (struct pollfd){.fd = l->children[i].streams[k].pipe, .events = POLLIN};
        if (poll(fds, (nfds_t)n, wait) <= 0)
            continue;
        for (int i = 0; i < l->o->ranks; i++)
            read_pipes(l, &l->children[i]);
        take_signals(l);
    }
    for (int i = 0; i < l->o->ranks; i++) /* something that a rank has started may hold its pipe open */
        for (int k = 0; k < STREAMS; k++)
            close_stream(l, &l->children[i], k);
}

static int outcome(launch *l)
{
    if (l->culprit >= 0 && !l->named)
        name_culprit(l);
    if (l->killed_by && l->culprit < 0)
        return 128 + l->killed_by;
    if (l->culprit >= 0)
        return code_of(l->children[l->culprit].how);
    if (l->lost_at > 0 && l->asked_at == 0) {
        if (l->o->nodes > 1)
            say(l, "no rank of this machine (host %s) failed by itself: they ended because of what they say above", l->host);
        return VLAI_CODE_LOST;
    }
    int code = 0;
    for (int i = 0; i < l->o->ranks; i++)
        code = code_of(l->children[i].how) > code ? code_of(l->children[i].how) : code;
    return code;
}

/* Handlers in place, ranks started, watched, handlers as before. */
static vla_status run(launch *l, struct pollfd *fds, int port, vla_error *err)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before[WATCHED];
    sigemptyset(&action.sa_mask);
    VLA_TRY(make_pipe(signal_pipe, err));
    for (int i = 0; i < WATCHED; i++)
        sigaction(watched[i], is_by_nohup(watched[i]) ? NULL : &action, &before[i]);
    vla_status status = VLA_OK;
    for (int i = 0; i < l->o->ranks && status == VLA_OK; i++)
        status = start(l, i, port, err);
    if (status != VLA_OK)
        send_all(l, SIGKILL, true);
    l->gone = (vlai_ranks){.world = l->o->world, .port = port};
    snprintf(l->gone.address, sizeof l->gone.address, "%s", l->o->address ? l->o->address : "127.0.0.1");
    snprintf(l->gone.job, sizeof l->gone.job, "%s", getenv("VLA_JOB_ID") ? getenv("VLA_JOB_ID") : "");
    watch(l, fds);
    for (int i = 0; i < WATCHED; i++)
        sigaction(watched[i], &before[i], NULL);
    close(signal_pipe[0]);
    close(signal_pipe[1]);
    return status;
}

vla_status vlai_supervise(const vlai_supervise_options *o, vlai_supervised *out, vla_error *err)
{
    *out = (vlai_supervised){.culprit = -1};
    if (o->ranks < 1 || o->first < 0 || o->first + o->ranks > o->world || o->node < 0 || o->node >= o->nodes)
        return vlai_fail(err, VLA_E_INVALID, "ranks %d to %d of %d on machine %d of %d cannot be", o->first, o->first + o->ranks - 1,
                         o->world, o->node, o->nodes);
    if (o->ranks > LOCAL_MOST)
        return vlai_fail(err, VLA_E_INVALID, "%d ranks on one machine, wanted at most %d", o->ranks, LOCAL_MOST);
    int port = o->port > 0 ? o->port : o->nodes == 1 ? vlai_free_port() : 0;
    if (port == 0)
        return vlai_fail(err, VLA_E_INVALID, o->nodes > 1 ? "a port is needed that all machines know" : "this machine has no free port");
    static launch l; /* too large for a stack frame */
    l = (launch){.o = o, .culprit = -1, .began = vlai_now()};
    if (gethostname(l.host, sizeof l.host) != 0)
        snprintf(l.host, sizeof l.host, "unknown");
    l.host[sizeof l.host - 1] = 0;
    struct pollfd *fds = vlai_calloc(STREAMS * (size_t)o->ranks + 1, sizeof *fds);
    l.children = vlai_calloc((size_t)o->ranks, sizeof *l.children);
    vla_status status = fds && l.children ? vlai_status_make(o->ranks, &l.pages, err) : vlai_nomem(err, (size_t)o->ranks * sizeof(child));
    if (status == VLA_OK) {
        for (int i = 0; i < o->ranks; i++)
            l.children[i].streams[OUT].pipe = l.children[i].streams[ERR].pipe = -1;
        status = run(&l, fds, port, err);
    }
    if (status == VLA_OK)
        *out = (vlai_supervised){.code = outcome(&l), .culprit = l.culprit < 0 ? -1 : o->first + l.culprit, .signal = l.asked_by};
    if (l.reported)
        pthread_join(l.reporter, NULL);
    vlai_status_drop(&l.pages);
    vlai_free(l.children);
    vlai_free(fds);
    return status;
}
