/* A run that is killed by SIGKILL at random moments, while it does little else than save, always resumes from a whole
 * checkpoint, and in the end has the bits of a run that was never killed. Ten kills, or fifty in the long form. */
#include "folder.h"
#include "toy.h"

#include "base/io.h"
#include "vla/log.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static toy plain = {.seed = 21, .fail_at = -1};

static vla_status train(const char *run, const char *resume, int64_t stop_at, int64_t save_interval, vla_error *err)
{
    vla_model model = toy_model(&plain);
    vla_samples samples = toy_samples(&plain, 50);
    vla_trainer_options o = toy_options(run);
    o.resume = resume;
    o.steps = 1000000;
    o.epochs = 1000000;
    o.stop_at = stop_at;
    o.save_interval = save_interval;
    vla_trainer *t;
    VLA_TRY(vla_trainer_create(&model, &samples, NULL, &o, &t, err));
    vla_status status = vla_trainer_run(t, err);
    vla_trainer_destroy(t);
    return status;
}

/* The child, a fresh process of this program, resumes where it can and saves after every step until it is killed. */
static pid_t start(const char *run, bool resume)
{
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "test_kill", run, resume ? run : "", (char *)NULL);
        _exit(127);
    }
    return child;
}

static int be_the_child(const char *run, const char *resume)
{
    vla_error err = VLA_ERROR_INIT;
    vla_log_set(NULL, NULL, VLA_LOG_ERROR);
    vla_status status = train(run, *resume ? resume : NULL, 0, 1, &err);
    fprintf(stderr, "the run ended by itself: %s\n", err.message);
    return status == VLA_OK ? 1 : 2;
}

static void killed_at_any_moment(void **state)
{
    (void)state;
    char run[256], whole[256];
    vla_error err = VLA_ERROR_INIT;
    int kills = test_long() ? 50 : test_sanitized() ? 4 : 10;
    snprintf(run, sizeof run, "%s/run", root);
    snprintf(whole, sizeof whole, "%s/whole", root);
    vla_log_set(NULL, NULL, VLA_LOG_ERROR);
    int64_t step = -1;
    for (int i = 0; i < kills; i++) {
        pid_t child = start(run, step >= 0);
        assert_true(child > 0);
        /* Beyond the start, the moment is random: a save takes a few milliseconds. */
        vlai_rng_key rng = {.seed = 77, .position = (uint64_t)i};
        uint32_t draw = vlai_rng_u32(&rng, 0);
        int64_t waited = 0;
        while (toy_newest_step(run) <= step && waited < 20000 && waitpid(child, NULL, WNOHANG) == 0) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            waited++;
        }
        nanosleep(&(struct timespec){.tv_nsec = draw % 30000000}, NULL);
        kill(child, SIGKILL);
        int how;
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
        int64_t now = toy_newest_step(run);
        if (now <= step)
            fail_msg("after kill %d the newest whole checkpoint is of step %lld, before it was %lld", i, (long long)now, (long long)step);
        step = now;
    }
    print_message("%d kills, the last whole checkpoint is of step %lld\n", kills, (long long)step);
    assert_ok(train(run, run, step + 1, 1, &err), err);
    assert_ok(train(whole, NULL, step + 1, 1000000, &err), err);
    char name[64], a[512], b[512], *x, *y;
    size_t n, m;
    snprintf(name, sizeof name, "%lld_%lld", (long long)(step / 12), (long long)(step + 1));
    static const char *const files[] = {"model.safetensors", "optimizer-0-of-1.safetensors", "state.json"};
    for (int i = 0; i < 3; i++) {
        snprintf(a, sizeof a, "%s/%s/%s", run, name, files[i]);
        snprintf(b, sizeof b, "%s/%s/%s", whole, name, files[i]);
        assert_ok(vlai_read_file(a, 0, &x, &n, &err), err);
        assert_ok(vlai_read_file(b, 0, &y, &m, &err), err);
        assert_int_equal(n, m);
        assert_memory_equal(x, y, n);
        vlai_free(x);
        vlai_free(y);
    }
    /* Nothing is left of the interrupted saves. */
    char **names;
    size_t count;
    assert_ok(vlai_list_dir(run, &names, &count, &err), err);
    for (size_t i = 0; i < count; i++)
        assert_null(strstr(names[i], ".tmp"));
    vlai_names_free(names, count);
}

int main(int argc, char **argv)
{
    if (argc == 3)
        return be_the_child(argv[1], argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed_at_any_moment)};
    return cmocka_run_group_tests(tests, make_root, drop_root);
}
