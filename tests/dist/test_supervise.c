/* The supervision of ranks with ranks that do as they are told: this program itself, started as `test_supervise do SCRIPT`. A script
 * has a part per rank, "exit:3;*:wait": rank 0 ends with code 3, all others wait. */
#include "folder.h"

#include "base/io.h"
#include "base/memory.h"
#include "base/time.h"
#include "dist/status.h"
#include "dist/supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the ranks ---- */

static void save_and_end(int number)
{
    (void)number;
    _exit(VLAI_CODE_SAVED);
}

static void nap(double seconds)
{
    struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&t, &t) != 0 && errno == EINTR)
        ;
}

static void write_environment(const char *dir)
{
    static const char *const names[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
                                        "MASTER_ADDR", "VLA_DIST_TIMEOUT", "SLURM_PROCID"};
    char path[600];
    snprintf(path, sizeof path, "%s/environment.%s", dir, getenv("RANK"));
    FILE *f = fopen(path, "w");
    for (size_t i = 0; f && i < sizeof names / sizeof *names; i++)
        fprintf(f, "%s=%s\n", names[i], getenv(names[i]) ? getenv(names[i]) : "-");
    if (f)
        fclose(f);
}

static int obey(char *script)
{
    char *part = script, *rest;
    for (int r = atoi(getenv("RANK")); r > 0 && *part != '*'; r--)
        part = strchr(part, ';') + 1;
    part += 2 * (*part == '*');
    part[strcspn(part, ";")] = 0;
    for (char *word = strtok_r(part, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        char *value = strchr(word, ':');
        if (value)
            *value++ = 0;
        if (!strcmp(word, "exit"))
            _exit(atoi(value));
        else if (!strcmp(word, "kill"))
            raise(atoi(value));
        else if (!strcmp(word, "sleep"))
            nap(strtod(value, NULL));
        else if (!strcmp(word, "err"))
            fprintf(stderr, "%s\n", value), fflush(stderr);
        else if (!strcmp(word, "out"))
            printf("%s\n", value), fflush(stdout);
        else if (!strcmp(word, "bare"))
            fprintf(stderr, "%s", value), fflush(stderr);
        else if (!strcmp(word, "phase"))
            vlai_status_put(value, 12);
        else if (!strcmp(word, "environment"))
            write_environment(value);
        else if (!strcmp(word, "ignore"))
            signal(SIGTERM, SIG_IGN);
        else if (!strcmp(word, "save"))
            signal(SIGTERM, save_and_end);
        else if (!strcmp(word, "wait"))
            for (;;)
                pause();
    }
    return 0;
}

/* ---- the launcher, in a process of its own ---- */

static const char *meaning(int code)
{
    return code == 3 ? "data or file" : NULL;
}

static void say(void *user, int rank, const char *line)
{
    (void)user;
    dprintf(STDERR_FILENO, rank < 0 ? "launcher: %s\n" : "[rank %2$d] %1$s\n", line, rank);
}

typedef struct {
    pid_t pid;
    int alive; /* reads the end of file when neither the launcher nor a rank runs any more */
    double began;
} started;

static int be_the_launcher(char *script, const char *settings)
{
    char address[64];
    char *argv[] = {"test_supervise", "do", script, NULL};
    vlai_supervise_options o = {.argv = argv, .address = address, .meaning = meaning, .say = say};
    if (sscanf(settings, "%d %d %d %d %d %63s %d %lf %lf", &o.ranks, &o.first, &o.world, &o.node, &o.nodes, address, &o.port, &o.time_limit_s,
               &o.grace_s) != 9)
        return 98;
    vlai_supervised end;
    vla_error err = VLA_ERROR_INIT;
    vla_status status = vlai_supervise(&o, &end, &err);
    if (status != VLA_OK)
        dprintf(STDERR_FILENO, "error: %s\n", err.message);
    dprintf(STDERR_FILENO, "culprit %d\n", end.culprit);
    return status == VLA_OK ? end.code : 99;
}

static started start(const char *script, vlai_supervise_options o)
{
    int ends[2];
    char copy[512], settings[256];
    snprintf(copy, sizeof copy, "%s", script);
    snprintf(settings, sizeof settings, "%d %d %d %d %d %s %d %g %g", o.ranks, o.first, o.world ? o.world : o.ranks, o.node, o.nodes ? o.nodes : 1,
             o.address ? o.address : "127.0.0.1", o.port, o.time_limit_s, o.grace_s);
    unlink(at("log"));
    assert_int_equal(pipe(ends), 0);
    started s = {.alive = ends[0], .began = vlai_now()};
    s.pid = fork();
    assert_true(s.pid >= 0);
    if (s.pid == 0) {
        close(ends[0]);
        int fd = open(at("log"), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
        execl("/proc/self/exe", "test_supervise", "launch", copy, settings, (char *)NULL);
        _exit(97);
    }
    close(ends[1]);
    return s;
}

static char *said(void)
{
    vla_error err = VLA_ERROR_INIT;
    char *text;
    size_t n;
    return vlai_read_file(at("log"), 0, &text, &n, &err) == VLA_OK ? text : vlai_strdup("");
}

static int times_said(const char *part)
{
    int n = 0;
    char *text = said();
    for (const char *p = text; (p = strstr(p, part)); p += strlen(part))
        n++;
    vlai_free(text);
    return n;
}

static void must_say(const char *part)
{
    if (!times_said(part))
        fail_msg("the output lacks '%s':\n%s", part, said());
}

/* Waits until `count` ranks have said that they are ready. */
static void until_ready(int count)
{
    double limit = vlai_now() + 60;
    for (int n = 0; n < count;) {
        n = 0;
        for (int r = 0; r < count; r++) {
            char line[32];
            snprintf(line, sizeof line, r ? "[rank %d] ready %d\n" : "ready 0\n", r, r);
            n += times_said(line);
        }
        if (vlai_now() > limit)
            fail_msg("%d of %d ranks are ready:\n%s", n, count, said());
        nap(0.01);
    }
}

/* Waits for the launcher; fails where a rank outlives it, or all takes longer than `limit` seconds. */
static int finish(started s, double limit)
{
    int how;
    struct pollfd p = {.fd = s.alive, .events = POLLIN};
    while (waitpid(s.pid, &how, 0) < 0 && errno == EINTR)
        ;
    assert_int_equal(poll(&p, 1, 2000), 1);
    close(s.alive);
    double seconds = vlai_now() - s.began;
    if (seconds > limit * (test_sanitized() ? 4 : 1)) /* processes start slowly then */
        fail_msg("%.1f s, wanted at most %.1f:\n%s", seconds, limit, said());
    return WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
}

static int play(const char *script, int ranks, double limit)
{
    return finish(start(script, (vlai_supervise_options){.ranks = ranks, .grace_s = 1}), limit);
}

/* ---- tests ---- */

static void all_is_well(void **state)
{
    (void)state;
    setenv("SLURM_PROCID", "7", 1); /* hidden by RANK, and left as it is */
    setenv("RANK", "9", 1);
    char script[256];
    snprintf(script, sizeof script, "*:environment:%s", root);
    vlai_supervise_options o = {.ranks = 2, .first = 2, .world = 4, .node = 1, .nodes = 2, .address = "10.1.2.3", .port = 4000,
                                .time_limit_s = 42};
    assert_int_equal(finish(start(script, o), 10), 0);
    must_say("culprit -1");
    for (int r = 2; r < 4; r++) {
        char name[32], wanted[512], *text;
        size_t n;
        vla_error err = VLA_ERROR_INIT;
        snprintf(name, sizeof name, "environment.%d", r);
        snprintf(wanted, sizeof wanted, "RANK=%d\nWORLD_SIZE=4\nLOCAL_RANK=%d\nLOCAL_WORLD_SIZE=2\nGROUP_RANK=1\nGROUP_WORLD_SIZE=2\n"
                 "MASTER_ADDR=10.1.2.3\nVLA_DIST_TIMEOUT=42\nSLURM_PROCID=7\n", r, r - 2);
        assert_ok(vlai_read_file(at(name), 0, &text, &n, &err), err);
        assert_string_equal(text, wanted);
        vlai_free(text);
    }
    unsetenv("SLURM_PROCID");
    unsetenv("RANK");
    o.first = 3;
    assert_int_equal(finish(start("*:exit:0", o), 10), 99);
    must_say("ranks 3 to 4 of 4 on machine 1 of 2 cannot be");
}

static void output(void **state)
{
    (void)state;
    assert_int_equal(play("out:zero,err:zero's,sleep:0.5;out:dropped,out:NCCL WARN taken,err:same,bare:no end;sleep:0.2,err:same,err:own", 3, 10), 0);
    must_say("zero\nzero's\n");
    must_say("] same\n"); /* of whichever was first */
    must_say("[rank 1] no end\n");
    must_say("[rank 2] own\n");
    must_say("[rank 1] NCCL WARN taken\n");
    assert_int_equal(times_said("dropped"), 0);
    assert_int_equal(times_said("same"), 1);
}

static void culprits(void **state)
{
    (void)state;
    char host[256] = "", line[512];
    gethostname(host, sizeof host - 1);
    assert_int_equal(play("wait;phase:data,exit:3;*:wait", 4, 5), 3);
    snprintf(line, sizeof line, "launcher: rank 1 (host %s, pid ", host);
    must_say(line);
    must_say(") ended with code 3 (data or file) in phase data, step 12\nculprit 1");
    assert_int_equal(play("wait;wait;sleep:0.3,phase:forward,kill:9", 3, 5), 128 + SIGKILL);
    must_say("rank 2 (host ");
    must_say(" ended with signal 9 (SIGKILL) in phase forward, step 12");
    assert_int_equal(play("kill:10;wait", 2, 5), 128 + SIGUSR1);
    must_say(" ended with signal 10 (SIGUSR1) in phase start-up, step 0");
    /* ranks that ended because of another are no culprits, also when they are the first to end */
    assert_int_equal(play("exit:6;wait;sleep:0.5,exit:5;exit:6", 4, 5), 5);
    must_say("culprit 2");
    /* what follows at once is not the cause */
    assert_int_equal(play("exit:3;kill:9", 2, 5), 128 + SIGKILL);
    must_say("culprit 1");
    /* the loss was elsewhere: those that do not notice are ended all the same */
    assert_int_equal(finish(start("exit:6;wait", (vlai_supervise_options){.ranks = 2, .world = 4, .nodes = 2, .port = 4000}), 6), 6);
    must_say("failed by itself: they ended because of what they say above\nculprit -1");
    /* a rank that does not end when it is asked to */
    assert_int_equal(play("ignore,wait;sleep:0.5,exit:4", 2, 4), 4);
    must_say("did not end within 1 s and is killed");
}

static void signals_reach_all(void **state)
{
    (void)state;
    static const vlai_supervise_options three = {.ranks = 3, .grace_s = 1};
    static const int numbers[] = {SIGTERM, SIGINT};
    for (int i = 0; i < 2; i++) {
        started s = start("save,err:ready 0,wait;save,err:ready 1,wait;save,err:ready 2,wait", three);
        until_ready(3);
        kill(s.pid, numbers[i]);
        kill(s.pid, numbers[i]); /* as `timeout` does */
        assert_int_equal(finish(s, 20), VLAI_CODE_SAVED);
        must_say(i ? "launcher: SIGINT: the ranks save and end" : "launcher: SIGTERM: the ranks save and end");
        must_say("culprit -1");
    }
    started s = start("ignore,err:ready 0,wait;ignore,err:ready 1,wait;ignore,err:ready 2,wait", three);
    until_ready(3);
    kill(s.pid, SIGTERM);
    nap(0.8);
    kill(s.pid, SIGINT);
    assert_int_equal(finish(s, 20), 128 + SIGINT);
    must_say("a second SIGINT: the ranks are killed");
    /* a rank that could not save yet ends, and then all do */
    s = start("err:ready 0,wait;err:ready 1,wait;save,err:ready 2,wait", three);
    until_ready(3);
    kill(s.pid, SIGTERM);
    assert_int_equal(finish(s, 20), 128 + SIGTERM);
    must_say("culprit -1");
}

static void the_launcher_is_killed(void **state)
{
    (void)state;
    started s = start("ignore,err:ready 0,wait;ignore,err:ready 1,wait;ignore,err:ready 2,wait", (vlai_supervise_options){.ranks = 3});
    until_ready(3);
    kill(s.pid, SIGKILL);
    assert_int_equal(finish(s, 20), 128 + SIGKILL); /* and no rank is left */
}

static void ports(void **state)
{
    (void)state;
    int a = vlai_free_port();
    assert_true(a > 0 && a < 65536);
    vlai_supervised end;
    vla_error err = VLA_ERROR_INIT;
    vlai_supervise_options o = {.ranks = 1, .world = 2, .nodes = 2};
    assert_int_equal(vlai_supervise(&o, &end, &err), VLA_E_INVALID);
    assert_non_null(strstr(err.message, "a port is needed"));
}

int main(int argc, char **argv)
{
    if (argc == 3)
        return obey(argv[2]);
    if (argc == 4)
        return be_the_launcher(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(all_is_well),       cmocka_unit_test(output),
                                       cmocka_unit_test(culprits),          cmocka_unit_test(signals_reach_all),
                                       cmocka_unit_test(the_launcher_is_killed), cmocka_unit_test(ports)};
    return cmocka_run_group_tests(tests, make_root, drop_root);
}
