/* vla launch and vla train as their users run them: CPU ranks on the tiny set, one or two launchers as machines, and everything that
 * can be wrong with one of them. */
#include "dist/ports.h"
#include "tiny.h"

#include "base/time.h"
#include "dist/supervise.h"

#define TRAIN "train --config tiny.yml --device cpu --training.threads=1 --hyperparams.batch_size_per_gpu=2 "

static void nap(double seconds)
{
    nanosleep(&(struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))}, NULL);
}

static char *read_or_empty(const char *name)
{
    vla_error err = VLA_ERROR_INIT;
    char *text;
    size_t n;
    return vlai_read_file(at(name), 0, &text, &n, &err) == VLA_OK ? text : vlai_strdup("");
}

/* The end of a file, for a message, which cmocka cuts. */
static const char *tail(const char *name)
{
    const char *text = read_or_empty(name);
    size_t n = strlen(text);
    return n > 700 ? text + n - 700 : text;
}

static bool holds(const char *log, const char *part)
{
    char *text = read_or_empty(log);
    bool found = strstr(text, part) != NULL;
    vlai_free(text);
    return found;
}

static void must_hold(const char *log, const char *part)
{
    if (!holds(log, part))
        fail_msg("%s lacks '%s':\n%s", log, part, tail(log));
}

static void must_end(pid_t child, int code, const char *log)
{
    int found = tiny_wait(child);
    if (found != code)
        fail_msg("code %d, wanted %d:\n%s", found, code, tail(log));
}

/* Until the file holds it; `child`, whose output is in `log`, must not end before. */
static void until_holds(const char *file, const char *part, pid_t child, const char *log)
{
    siginfo_t ended = {.si_pid = 0};
    for (double limit = vlai_now() + 240; !holds(file, part); nap(0.01)) { /* only a hang takes so long */
        waitid(P_PID, (id_t)child, &ended, WEXITED | WNOHANG | WNOWAIT);
        if (ended.si_pid || vlai_now() > limit)
            fail_msg("%s does not hold '%s', and the program %s:\n%s", file, part, ended.si_pid ? "has ended" : "goes on", tail(log));
    }
}

/* The process of one rank among the launcher's children; 0: it does not run (yet). */
static pid_t rank_of(pid_t launcher, int rank)
{
    char path[64], wanted[32], environment[65536], *rest;
    snprintf(path, sizeof path, "/proc/%ld/task/%ld/children", (long)launcher, (long)launcher);
    FILE *f = fopen(path, "r");
    char list[4096] = "";
    if (f) {
        size_t n = fread(list, 1, sizeof list - 1, f);
        list[n] = 0;
        fclose(f);
    }
    snprintf(wanted, sizeof wanted, "RANK=%d", rank);
    for (char *word = strtok_r(list, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        snprintf(path, sizeof path, "/proc/%.20s/environ", word);
        f = fopen(path, "r");
        size_t n = f ? fread(environment, 1, sizeof environment - 1, f) : 0;
        if (f)
            fclose(f);
        environment[n] = 0;
        for (char *v = environment; v < environment + n; v += strlen(v) + 1)
            if (!strcmp(v, wanted))
                return (pid_t)atol(word);
    }
    return 0;
}

static pid_t until_rank(pid_t launcher, int rank)
{
    pid_t pid = 0;
    for (double limit = vlai_now() + 60; !(pid = rank_of(launcher, rank)); nap(0.005))
        if (vlai_now() > limit)
            fail_msg("rank %d never ran:\n%s", rank, tail("log"));
    return pid;
}

static bool gone(pid_t pid)
{
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    FILE *f = fopen(path, "r");
    if (f) {
        if (fscanf(f, "%*d (%*[^)]) %c", &state) != 1)
            state = 'Z';
        fclose(f);
    }
    return state == 'Z';
}

/* Two launchers as two machines; `both`: arguments of each, `other`: more for the second. */
typedef struct {
    pid_t a, b;
} machines;

static machines start_two(const char *environment_a, const char *environment_b, const char *both, const char *other)
{
    char arguments[2048];
    int port = vlai_free_port();
    machines m;
    snprintf(arguments, sizeof arguments, "launch --nnodes 2 --node-rank 0 --master-port %d %s", port, both);
    m.a = tiny_start(environment_a, arguments, "log.a");
    snprintf(arguments, sizeof arguments, "launch --nnodes 2 --node-rank 1 --master-port %d %s %s", port, both, other);
    m.b = tiny_start(environment_b, arguments, "log.b");
    return m;
}

/* ---- ranks that differ are refused ---- */

static void refused(const char *what, machines m, const char *part, const char *a, const char *b)
{
    double began = vlai_now();
    int code_a = tiny_wait(m.a), code_b = tiny_wait(m.b);
    if (code_a != 2 || code_b != 2 || vlai_now() - began > 20)
        fail_msg("%s: codes %d and %d, wanted 2 and 2 within 20 s:\n%s\n%s", what, code_a, code_b, tail("log.a"), tail("log.b"));
    for (int i = 0; i < 2; i++) {
        const char *log = i ? "log.b" : "log.a";
        must_hold(log, "rank 1");
        must_hold(log, part);
        must_hold(log, a);
        must_hold(log, b);
    }
}

static void another_configuration(void **state)
{
    (void)state;
    refused("key", start_two(NULL, NULL, TRAIN "--checkpoint.save_path=differs --stop-at 1", "--hyperparams.optimizer.eps=1e-7"), "the configuration",
            "hyperparams.optimizer.eps: 1e-08", "hyperparams.optimizer.eps: 1e-07");
    refused("batch", start_two(NULL, NULL, TRAIN "--checkpoint.save_path=differs --stop-at 1", "--hyperparams.batch_size_per_gpu=3"), "the configuration",
            "hyperparams.batch_size_per_gpu: 2", "hyperparams.batch_size_per_gpu: 3");
    refused("switch", start_two(NULL, "WALLX_PERF_DDP=1", TRAIN "--checkpoint.save_path=differs --stop-at 1", ""), "the configuration",
            "WALLX_PERF_DDP: 0", "WALLX_PERF_DDP: 1");
    refused("argument", start_two(NULL, NULL, TRAIN "--checkpoint.save_path=differs", "--stop-at 1"), "the configuration", "--stop-at: 0",
            "--stop-at: 1");
    assert_false(vlai_is_dir(at("differs/0_1")));
}

static void another_data_set(void **state)
{
    (void)state;
    char home[2][600];
    tiny_must("synth home0/robot --episodes 10 --length 8:11 --size 64x64 --state-dim 3 --action-dim 3");
    tiny_must("synth home1/robot --episodes 10 --length 8:11 --size 64x64 --state-dim 3 --action-dim 3 --seed 9");
    for (int i = 0; i < 2; i++)
        snprintf(home[i], sizeof home[i], "HF_LEROBOT_HOME=%s/home%d", root, i);
    refused("data", start_two(home[0], home[1], TRAIN "--data.lerobot_config.repo_id=robot --checkpoint.save_path=differs --stop-at 1", ""),
            "the data set", "data set digest: ", "data set digest: ");
}

/* Two machines, told by the environment, of which the second has its own copies in the folder `other`. */
static void with_copies(const char *spoil, const char *save, const char *codes, const char *part)
{
    char command[2048];
    snprintf(command, sizeof command,
             "cd %s && rm -rf other && mkdir other && cp -r tiny.yml set norm_stats.json start other/ && (cd other && %s) && export NNODES=2 MASTER_PORT=%d && "
             "for r in 0 1; do (if [ $r = 1 ]; then cd other; fi; NODE_RANK=$r exec %s launch --time-limit 20 " TRAIN "--checkpoint.save_path=%s --stop-at 1) "
             ">log.$r 2>&1 & pids=\"$pids $!\"; done; for p in $pids; do wait $p; case $? in %s) ;; *) exit 1; esac; done",
             root, spoil, vlai_free_port(), VLA_TEST_PROGRAM, save, codes);
    if (system(command) != 0)
        fail_msg("%s\n%s\n%s", command, tail("log.0"), tail("log.1"));
    must_hold("log.0", part);
    must_hold("log.1", part);
}

static void other_files(void **state)
{
    (void)state;
    char save[600];
    snprintf(save, sizeof save, "%s/copies", root);
    with_copies("true", save, "0", "starting one CPU rank");
    with_copies("echo >> start/config.json", save, "2", "the files of the model: rank 1");
    must_hold("log.1", "start/config.json: ");
    with_copies("echo >> start/tokenizer.json", save, "2", "tokenizer.json: ");
    /* a run folder of its own, which rank 0 leaves as it was */
    with_copies("true", "mine", "3|6", "does not see the run folder of rank 0");
    assert_false(vlai_is_file(at("mine/.ranks")));
}

/* What the environment says of machines is checked as arguments are. */
static void wrong_machines(void **state)
{
    (void)state;
    assert_int_equal(tiny_run("NNODES=two", "launch " TRAIN), 2);
    tiny_said("NNODES is 'two', wanted a number of 1 to 4096");
    assert_int_equal(tiny_run("NNODES=2 NODE_RANK=2", "launch " TRAIN), 2);
    tiny_said("wanted 0 to 1");
    assert_int_equal(tiny_run("NNODES=2 MASTER_PORT=70000", "launch " TRAIN), 2);
    tiny_said("MASTER_PORT '70000'");
    assert_int_equal(tiny_run(NULL, "launch --time-limit 0 " TRAIN), 2);
    tiny_said("--time-limit");
}

/* An error of one rank ends the others, who say whose it was. */
static void an_error_of_one_rank(void **state)
{
    (void)state;
    char home[600];
    snprintf(home, sizeof home, "HF_LEROBOT_HOME=%s/home0", root);
    double began = vlai_now();
    machines m = start_two(home, "HF_LEROBOT_HOME=/nowhere", TRAIN "--data.lerobot_config.repo_id=robot --checkpoint.save_path=differs", "");
    must_end(m.b, 3, "log.b");
    must_hold("log.b", "no such LeRobot data set");
    must_hold("log.b", "ended with code 3 (data or file) in phase data, step 0");
    must_end(m.a, 6, "log.a");
    must_hold("log.a", "rank 1 (host ");
    must_hold("log.a", "no such LeRobot data set");
    must_hold("log.a", "no rank of this machine (host ");
    assert_true(vlai_now() - began < 20);
    /* also one that cannot even read its configuration */
    m = start_two(NULL, NULL, TRAIN "--checkpoint.save_path=differs", "--hyperparams.seed=many");
    must_end(m.b, 2, "log.b");
    must_hold("log.b", "hyperparams.seed");
    must_end(m.a, 6, "log.a");
    must_hold("log.a", "rank 1 (host ");
    must_hold("log.a", "hyperparams.seed");
}

/* A collective that fails while no rank is lost is somebody's own failure: the launcher names who met it first. */
static void a_collective_fails(void **state)
{
    (void)state;
    must_end(tiny_start("GLOO_SOCKET_IFNAME=nowhere0", "launch --nproc 2 " TRAIN "--checkpoint.save_path=differs", "log"), 7, "log");
    must_hold("log", "connecting the ranks: ");
    must_hold("log", "ended with code 7 (a collective of the ranks) in phase ");
}

static void a_missing_machine(void **state)
{
    (void)state;
    char arguments[512];
    for (int node = 0; node < 2; node++) {
        double began = vlai_now();
        int held, port = held_port(&held);
        if (node == 0) /* where rank 0 will listen */
            close(held);
        snprintf(arguments, sizeof arguments, "launch --nnodes 2 --node-rank %d --nproc 2 --master-port %d --time-limit 2 " TRAIN, node, port);
        must_end(tiny_start(NULL, arguments, "log"), 6, "log");
        if (node)
            close(held);
        assert_true(vlai_now() - began >= 2 && vlai_now() - began < 2 + 10);
        must_hold("log", node ? "rank 0" : "ranks 2 and 3 of 4");
    }
}

/* ---- training ---- */

static void two_machines_train(void **state)
{
    (void)state;
    tiny_must("launch --nproc 2 " TRAIN "--checkpoint.save_path=one --stop-at 6");
    machines m = start_two(NULL, NULL, TRAIN "--checkpoint.save_path=two --stop-at 6", "");
    must_end(m.a, 0, "log.a");
    must_end(m.b, 0, "log.b");
    assert_true(tiny_equal("one/0_6/model.safetensors", "two/0_6/model.safetensors"));
    /* rank 0 alone speaks, and every rank has its log */
    assert_false(holds("log.b", "step"));
    assert_true(vlai_is_file(at("two/logs/rank_1.log")));
    must_hold("two/logs/rank_0.log", "rank 0 of 2, local rank 0 of 1, machine 0 of 2");
    must_hold("two/logs/rank_0.log", "each of 2 ranks steps its share");
    assert_true(vlai_is_file(at("two/config.resolved.json")));
    assert_true(vlai_is_file(at("two/report.html")));
    /* the launchers' script, and going on */
    char command[2048];
    int port = vlai_free_port();
    snprintf(command, sizeof command,
             "cd %s && export CONFIG=tiny.yml BATCH=2 SAVE_PATH=two VLA=%s NNODES=2 MASTER_PORT=%d && for r in 0 1; do NODE_RANK=$r "
             "%s/run_wallx_baseline.sh --device cpu --training.threads=1 --resume --stop-at 8 >log.$r 2>&1 & pids=\"$pids $!\"; done; for p in $pids; do wait $p || exit 1; done",
             root, VLA_TEST_PROGRAM, port, VLA_TEST_ROOT);
    if (system(command) != 0)
        fail_msg("%s\n%s\n%s", command, tail("log.0"), tail("log.1"));
    must_hold("log.0", "global_step: 6");
    assert_true(vlai_is_dir(at("two/0_8")));
}

static void signals_save(void **state)
{
    (void)state;
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    for (int i = 0; i < 3; i++) {
        char arguments[512], run[32], metrics[64];
        snprintf(run, sizeof run, "stopped%d", i);
        snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", run);
        snprintf(arguments, sizeof arguments, "launch --nproc 2 " TRAIN "--hyperparams.scheduler.num_training_steps=100000 --hyperparams.num_epoch=100000 "
                 "--checkpoint.save_path=%s", run);
        pid_t launcher = tiny_start(NULL, arguments, "log");
        until_holds(metrics, "\"step\": 2,", launcher, "log");
        /* at the launcher, or at one rank, as a batch system may do */
        kill(i == 1 ? until_rank(launcher, 1) : launcher, numbers[i]);
        must_end(launcher, 75, "log");
        strcat(arguments, " --resume --stop-at 1");
        must_end(tiny_start(NULL, arguments, "log"), 0, "log");
        must_hold("log", "global_step:");
    }
}

/* SIGKILL of one rank: it is named, with its phase; the others end; the run goes on from the last checkpoint. */
static void killed(int rank, const char *run, const char *until, const char *more)
{
    char arguments[1024], metrics[64];
    snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", run);
    snprintf(arguments, sizeof arguments, "launch --nproc 3 " TRAIN "--hyperparams.scheduler.num_training_steps=100000 --hyperparams.num_epoch=100000 "
             "--checkpoint.save_path=%s --resume %s", run, more);
    pid_t launcher = tiny_start(NULL, arguments, "log");
    pid_t pid = until_rank(launcher, rank), others[3];
    if (until)
        until_holds(metrics, until, launcher, "log");
    for (int r = 0; r < 3; r++)
        others[r] = until_rank(launcher, r);
    double began = vlai_now();
    assert_int_equal(kill(pid, SIGKILL), 0);
    must_end(launcher, 128 + SIGKILL, "log");
    if (vlai_now() - began > 10)
        fail_msg("%.1f s:\n%s", vlai_now() - began, tail("log"));
    for (int r = 0; r < 3; r++)
        assert_true(gone(others[r]));
    char line[64];
    snprintf(line, sizeof line, "vla launch: rank %d (host ", rank);
    must_hold("log", line);
    must_hold("log", "ended with signal 9 (SIGKILL) in phase ");
}

static void a_killed_rank(void **state)
{
    (void)state;
    killed(1, "killed", NULL, "");                                                 /* at the start */
    killed(2, "killed", "\"step\": 3,", "--logging.save_interval=1");              /* while it steps and saves */
    killed(0, "killed", "\"step\": 6,", "--logging.save_interval=1");
    tiny_must("launch --nproc 3 " TRAIN "--hyperparams.scheduler.num_training_steps=100000 --hyperparams.num_epoch=100000 "
              "--checkpoint.save_path=killed --resume --stop-at 1");
    must_hold("log", "global_step: ");
    assert_false(holds("log", "global_step: 0"));
}

static void a_killed_launcher(void **state)
{
    (void)state;
    pid_t launcher = tiny_start(NULL, "launch --nproc 2 " TRAIN "--hyperparams.scheduler.num_training_steps=100000 --hyperparams.num_epoch=100000 "
                                "--checkpoint.save_path=orphans", "log");
    until_holds("orphans/metrics.jsonl", "\"step\": 1,", launcher, "log");
    pid_t ranks[2] = {until_rank(launcher, 0), until_rank(launcher, 1)};
    kill(launcher, SIGKILL);
    assert_int_equal(tiny_wait(launcher), 128 + SIGKILL);
    double began = vlai_now();
    while (!gone(ranks[0]) || !gone(ranks[1])) {
        assert_true(vlai_now() - began < 5);
        nap(0.02);
    }
}

/* A machine that fails as a whole: the other one ends, and its launcher says that the loss was elsewhere. */
static void a_lost_machine(void **state)
{
    (void)state;
    machines m = start_two(NULL, NULL, TRAIN "--hyperparams.scheduler.num_training_steps=100000 --hyperparams.num_epoch=100000 "
                           "--checkpoint.save_path=half", "");
    until_holds("half/metrics.jsonl", "\"step\": 2,", m.a, "log.a");
    double began = vlai_now();
    kill(m.b, SIGKILL);
    tiny_wait(m.b);
    must_end(m.a, 6, "log.a");
    assert_true(vlai_now() - began < 10);
    must_hold("log.a", "rank 1 (host ");
    must_hold("log.a", "connection closed");
    must_hold("log.a", "no rank of this machine (host ");
    /* at the start, perhaps before it has met anybody */
    m = start_two(NULL, NULL, TRAIN "--checkpoint.save_path=half", "");
    began = vlai_now();
    kill(until_rank(m.b, 1), SIGKILL);
    must_end(m.b, 128 + SIGKILL, "log.b");
    must_end(m.a, 6, "log.a");
    assert_true(vlai_now() - began < 12);
    must_hold("log.b", "vla launch: rank 1 (host ");
    must_hold("log.a", "rank 1 (host ");
}

/* A rank that stands still is lost too, a little later: in the long form only. */
static void a_stopped_rank(void **state)
{
    (void)state;
    if (!test_long())
        skip();
    pid_t launcher = tiny_start(NULL, "launch --nproc 3 " TRAIN "--hyperparams.scheduler.num_training_steps=100000 --hyperparams.num_epoch=100000 "
                                "--checkpoint.save_path=still", "log");
    until_holds("still/metrics.jsonl", "\"step\": 2,", launcher, "log");
    pid_t rank = until_rank(launcher, 1);
    double began = vlai_now();
    kill(rank, SIGSTOP);
    must_end(launcher, 6, "log");
    print_message("%.1f s after SIGSTOP\n", vlai_now() - began);
    assert_true(vlai_now() - began < 30 && gone(rank));
    must_hold("log", "rank 1 (host ");
    must_hold("log", "did not end within 8 s and is killed");
}

/* An address that no host has: the launcher ends with the name in it, and does not wait to tell a rank 0 that is nowhere. */
static void no_such_host(void **state)
{
    (void)state;
    double began = vlai_now();
    must_end(tiny_start(NULL, "launch --nnodes 2 --node-rank 1 --master-addr 256.256.256.256 " TRAIN "--checkpoint.save_path=nowhere --stop-at 1", "log"),
             2, "log");
    assert_true(vlai_now() - began < 10);
    must_hold("log", "no host has the name '256.256.256.256'");
}

/* Under another launcher: its variables are read by vla train itself. */
static void without_our_launcher(void **state)
{
    (void)state;
    pid_t ranks[2];
    int port = vlai_free_port();
    for (int r = 0; r < 2; r++) {
        char environment[512];
        snprintf(environment, sizeof environment, "RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d", r, r, port);
        ranks[r] = tiny_start(environment, TRAIN "--checkpoint.save_path=torchrun --stop-at 6", r ? "log.1" : "log.0");
    }
    must_end(ranks[0], 0, "log.0");
    must_end(ranks[1], 0, "log.1");
    assert_true(tiny_equal("one/0_6/model.safetensors", "torchrun/0_6/model.safetensors"));
}

int main(void)
{
    /* A rank that is ended does not join the threads that wait for others: that is no leak. */
    char options[512];
    const char *given = getenv("TSAN_OPTIONS");
    snprintf(options, sizeof options, "%.400s:report_thread_leaks=0", given ? given : "");
    setenv("TSAN_OPTIONS", options, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_configuration), cmocka_unit_test(another_data_set),   cmocka_unit_test(other_files),
        cmocka_unit_test(wrong_machines),        cmocka_unit_test(no_such_host),  cmocka_unit_test(an_error_of_one_rank),
        cmocka_unit_test(a_collective_fails),
        cmocka_unit_test(a_missing_machine),     cmocka_unit_test(two_machines_train), cmocka_unit_test(without_our_launcher),
        cmocka_unit_test(signals_save),          cmocka_unit_test(a_killed_rank),      cmocka_unit_test(a_killed_launcher),
        cmocka_unit_test(a_lost_machine),        cmocka_unit_test(a_stopped_rank),
    };
    return cmocka_run_group_tests(tests, tiny_make, drop_root);
}
