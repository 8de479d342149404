/* Ranks that train together on CPUs over loopback: the losses and weights of one rank that accumulates, states that any number of
 * ranks goes on from, and the end of all when one is killed. This program itself, started as `test_ranks rank KEY=VALUE...`, is a
 * rank. */
#include "dist/compare.h"
#include "dist/ports.h"
#include "folder.h"
#include "toy.h"

#include "base/io.h"
#include "base/json.h"
#include "base/text.h"
#include "base/time.h"
#include "base/work.h"
#include "ckpt/ckpt.h"
#include "dist/group.h"
#include "vla/log.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 4, STEPS = 16, SAMPLES = 103, VALIDATION = 23, CODE_LOST = 6, CODE_SAVED = 75, CODE_FAILED = 9 };

/* ---- a rank ---- */

typedef struct {
    char run[512], resume[512], compare[512], die[32];
    int64_t accumulation, batch, zero, whole, overlap, ahead, numerics, steps, stop_at, save, nan, poison, seed, fail_write, term, bucket, keep, fail, bad, again, keys, slow, limit, plan, global;
} spec;

static spec wanted;
static int my_rank, my_world;
static volatile sig_atomic_t asked_to_end;

static void on_term(int number)
{
    (void)number;
    asked_to_end = 1;
}

static void on_lost(void *user, const char *text)
{
    (void)user;
    fprintf(stderr, "lost: %s\n", text);
    fflush(stderr);
    _exit(CODE_LOST);
}

/* "slow=30": whatever this rank syncs once it trains takes that many milliseconds more. */
static atomic_bool trains;

int fsync(int fd)
{
    for (double end = vlai_now() + 1e-3 * (double)wanted.slow; wanted.slow && atomic_load(&trains) && vlai_now() < end;)
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    return fdatasync(fd);
}

/* "die=step:7": this rank kills itself when it is there. */
static void die_at(const char *where, int64_t number)
{
    char text[32];
    snprintf(text, sizeof text, "%s:%lld", where, (long long)number);
    if (!strcmp(text, wanted.die))
        raise(SIGKILL);
}

static void on_record(void *user, const vla_record *r)
{
    (void)user;
    if (r->kind != VLA_RECORD_STEP)
        return;
    int64_t steps = SAMPLES / (wanted.batch * wanted.accumulation * my_world); /* of an epoch; micro-batches are counted rank by rank */
    if (!*wanted.resume && (r->iterations != steps * wanted.accumulation || r->iteration != ((r->step - 1) % steps + 1) * wanted.accumulation - 1))
        _exit(124);
    if (wanted.term && r->step == wanted.term)
        raise(SIGTERM);
    if (wanted.fail_write && r->step == 3)
        vlai_io_fail_nth((uint64_t)wanted.fail_write);
}

static vla_status fill_or_die(void *user, const void *shape, void *const *slots, int64_t count, vla_run *run, vla_error *err)
{
    static int64_t fills;
    die_at("step", ++fills);
    atomic_store(&trains, true);
    return toy_fill(user, shape, slots, count, run, err);
}

/* "plan=3000": making a plan takes that many milliseconds of work more; "plan=-3000": of standing still. */
static vla_status build_slowly(void *user, const void *shape, vla_graph **out, vla_error *err)
{
    for (double end = vlai_now() + 1e-3 * fabs((double)wanted.plan); vlai_now() < end; nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL))
        if (wanted.plan > 0)
            vlai_work_add();
    return toy_build(user, shape, out, err);
}

static vla_status init_or_die(void *user, vla_store *store, vla_error *err)
{
    die_at("start", 0);
    return toy_init(user, store, err);
}

/* What was loaded must be what the files say, element for element, as far as this rank keeps it. */
static vla_status compare_store(const vla_store *store, const char *dir, vla_error *err)
{
    static const struct {
        vla_store_kind kind;
        const char *suffix;
    } rows[] = {{VLA_STORE_WEIGHT, ""}, {VLA_STORE_M, ".exp_avg"}, {VLA_STORE_V, ".exp_avg_sq"}, {VLA_STORE_LOW, ".master_low"}};
    int64_t compared = 0;
    for (int world = 0; world <= MOST; world++)
        for (int r = 0; r < (world ? world : 1); r++) {
            char path[1024], name[VLAI_CKPT_NAME], key[256];
            vlai_safetensors *file;
            vla_error ignored = VLA_ERROR_INIT;
            if (world)
                vlai_ckpt_optimizer_name(r, world, name);
            snprintf(path, sizeof path, "%s/%s", dir, world ? name : VLAI_CKPT_MODEL);
            if (vlai_safetensors_open(path, &file, &ignored) != VLA_OK)
                continue;
            for (size_t i = 0; i < vla_store_count(store); i++)
                for (int k = world ? 1 : 0; k < (world ? 4 : 1); k++) {
                    vla_tensor t = vla_store_tensor(store, rows[k].kind, i);
                    snprintf(key, sizeof key, "slice:%s%s", t.name, rows[k].suffix);
                    const vlai_tensor_view *v = vlai_safetensors_find(file, key + strlen("slice:"));
                    if (!v)
                        continue;
                    const char *text = vlai_safetensors_metadata(file, key);
                    int64_t begin = text ? strtoll(text, NULL, 10) : 0, own, count;
                    vla_store_slice(store, rows[k].kind, i, &own, &count);
                    int64_t from = begin > own ? begin : own, end = begin + v->elements < own + count ? begin + v->elements : own + count;
                    if (from >= end)
                        continue;
                    char have[4096];
                    size_t size = vla_dtype_size(v->dtype), bytes = (size_t)(end - from) * size;
                    if (bytes > sizeof have)
                        return vlai_fail(err, VLA_E_INTERNAL, "%s is too large for this test", t.name);
                    VLA_TRY(vla_store_read(store, rows[k].kind, i, from, end - from, have, err));
                    if (memcmp(have, (const char *)v->data + (size_t)(from - begin) * size, bytes) != 0)
                        return vlai_fail(err, VLA_E_INTERNAL, "%s: not what %s has", key, path);
                    compared += end - from;
                }
            vlai_safetensors_close(file);
        }
    int64_t all = 0;
    for (size_t i = 0; i < vla_store_count(store); i++)
        for (int k = 0; k < 4; k++) {
            int64_t own, count;
            if (vla_store_tensor(store, rows[k].kind, i).dtype == VLA_DTYPE_NONE)
                continue;
            vla_store_slice(store, rows[k].kind, i, &own, &count);
            all += count;
        }
    return compared == all ? VLA_OK : vlai_fail(err, VLA_E_INTERNAL, "%lld elements compared of %lld", (long long)compared, (long long)all);
}

/* "again=2": that many more writers of the same group, one after the other, save what the run has saved last. The ranks are not at
 * the same place: a later one comes later, and takes what it hears for its own save's words. */
static vla_status save_again(vlai_group *group, int rank, int world, const vla_store *store, vla_error *err)
{
    vla_status status = VLA_OK;
    for (int64_t i = 1; i <= wanted.again && status == VLA_OK; i++) {
        char run[600];
        vla_checkpoint_writer *writer;
        vla_checkpoint_writer_options o = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
        vla_checkpoint_content c = {.size = sizeof c, .step = i, .state = "{}"};
        o.group = group;
        o.rank = rank;
        o.world = world;
        snprintf(run, sizeof run, "%s/again", wanted.run);
        VLA_TRY(vla_checkpoint_writer_create(run, &o, &writer, err));
        nanosleep(&(struct timespec){.tv_nsec = (world - 1 - rank) * 50000000}, NULL); /* rank 0 is the last to begin */
        status = vla_checkpoint_save(writer, store, &c, err);
        if (status == VLA_OK)
            status = vla_checkpoint_wait(writer, NULL, err);
        vla_checkpoint_writer_destroy(writer);
    }
    return status;
}

/* "keys=1": of all saves only the last two may still have words in the group's store. */
static vla_status count_keys(vlai_group *group, int world, vla_error *err)
{
    static const char *const whats[] = {"begin", "part", "outcome"};
    int found = 0, last = 0;
    for (int save = 1; save <= STEPS; save++)
        for (int i = 0; i < 3 * world; i++) {
            char key[64];
            void *data;
            size_t size;
            snprintf(key, sizeof key, "checkpoint/0/%d/%s/%d", save, whats[i % 3], i / 3);
            vla_status status = vlai_group_get(group, key, -1, &data, &size, err);
            if (status != VLA_OK && status != VLA_E_NOT_FOUND)
                return status;
            found += status == VLA_OK;
            last = status == VLA_OK ? save : last;
            vlai_free(data);
        }
    return found == 2 * (world + 1) && last > 3 ? VLA_OK : vlai_fail(err, VLA_E_INTERNAL, "%d words are kept, the last of save %d", found, last);
}

static vla_status train(vlai_group *group, int rank, int world, vla_error *err)
{
    toy t = {.seed = 31 + (uint64_t)(wanted.seed == rank + 1), .fail_at = wanted.fail ? wanted.fail : -1, .poison_at = wanted.poison};
    if (wanted.nan)
        t.nan_from = wanted.nan, t.nan_to = wanted.nan + 1;
    vla_model model = toy_model(&t);
    model.init = init_or_die;
    model.fill = fill_or_die;
    model.build = build_slowly;
    vla_samples samples = toy_samples(&t, SAMPLES), validation = toy_samples(&t, VALIDATION);
    vla_trainer_options o = toy_options(wanted.run);
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR};
    o.resume = *wanted.resume ? wanted.resume : NULL;
    o.group = group;
    o.rank = rank;
    o.world = world;
    o.batch = wanted.batch;
    o.accumulation = wanted.accumulation;
    o.global_loss = (int)wanted.global;
    o.zero = (int)wanted.zero;
    o.whole_step = (int)wanted.whole;
    o.overlap = (int)wanted.overlap;
    o.ahead = (int)wanted.ahead;
    o.bucket_bytes = (size_t)wanted.bucket;
    o.numerics = modes[wanted.numerics];
    o.steps = wanted.steps;
    o.stop_at = wanted.stop_at;
    o.save_interval = wanted.save;
    o.keep_last = wanted.keep;
    if (wanted.bad)
        o.max_bad_steps = wanted.bad;
    o.norm_interval = 7;
    o.validation_interval = 5;
    o.validation_batch = 3;
    o.stop = &asked_to_end;
    o.report = on_record;
    vla_trainer *trainer;
    VLA_TRY(vla_trainer_create(&model, &samples, &validation, &o, &trainer, err));
    vla_status status = *wanted.compare ? compare_store(vla_trainer_store(trainer), wanted.compare, err) : VLA_OK;
    if (status == VLA_OK)
        status = vla_trainer_run(trainer, err);
    if (status == VLA_OK && wanted.keys)
        status = count_keys(group, world, err);
    if (status == VLA_OK && wanted.keys) { /* all ranks are of this host, and their snapshots take its memory together */
        const vla_store *store = vla_trainer_store(trainer);
        size_t all = vlai_ckpt_host_share(store, group, rank), wants = vlai_ckpt_share(store, 0) + (size_t)(world - 1) * vlai_ckpt_share(store, 1);
        if (all != wants || all <= vlai_ckpt_share(store, rank))
            status = vlai_fail(err, VLA_E_INTERNAL, "%zu bytes of all ranks, wanted %zu", all, wants);
    }
    if (status == VLA_OK)
        status = save_again(group, rank, world, vla_trainer_store(trainer), err);
    if (!group || status == VLA_OK || status == VLA_E_CANCELLED) /* as `vla train` does: a failed rank of several only ends */
        vla_trainer_destroy(trainer);
    return status;
}

static void parse(int argc, char **argv)
{
    const struct {
        const char *key;
        char *text;
        int64_t *number;
    } rows[] = {{"run", wanted.run, NULL}, {"resume", wanted.resume, NULL}, {"compare", wanted.compare, NULL}, {"die", wanted.die, NULL},
                {"acc", NULL, &wanted.accumulation}, {"batch", NULL, &wanted.batch}, {"zero", NULL, &wanted.zero}, {"whole", NULL, &wanted.whole},
                {"overlap", NULL, &wanted.overlap}, {"ahead", NULL, &wanted.ahead}, {"numerics", NULL, &wanted.numerics}, {"steps", NULL, &wanted.steps},
                {"stop_at", NULL, &wanted.stop_at}, {"save", NULL, &wanted.save}, {"nan", NULL, &wanted.nan}, {"poison", NULL, &wanted.poison},
                {"seed", NULL, &wanted.seed}, {"fail_write", NULL, &wanted.fail_write}, {"term", NULL, &wanted.term}, {"bucket", NULL, &wanted.bucket},
                {"keep", NULL, &wanted.keep}, {"fail", NULL, &wanted.fail}, {"bad", NULL, &wanted.bad}, {"again", NULL, &wanted.again},
                {"keys", NULL, &wanted.keys}, {"slow", NULL, &wanted.slow}, {"limit", NULL, &wanted.limit}, {"plan", NULL, &wanted.plan},
                {"global", NULL, &wanted.global}};
    wanted = (spec){.accumulation = 1, .batch = 4, .zero = 1, .steps = STEPS, .bucket = 400};
    for (int i = 2; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        bool found = false;
        for (size_t k = 0; value && k < sizeof rows / sizeof *rows; k++) {
            if (strncmp(argv[i], rows[k].key, strlen(rows[k].key)) != 0 || argv[i][strlen(rows[k].key)] != '=')
                continue;
            found = true;
            if (rows[k].text)
                strcpy(rows[k].text, value + 1);
            else
                *rows[k].number = strtoll(value + 1, NULL, 10);
        }
        if (!found)
            _exit(125);
    }
}

/* argv: rank KEY=VALUE...; where it belongs is in the environment. */
static int be_a_rank(int argc, char **argv)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_ranks ranks;
    vlai_group *group = NULL;
    vlai_group_options o = VLAI_GROUP_OPTIONS_DEFAULT;
    o.lost = on_lost;
    parse(argc, argv);
    o.timeout_s = (double)wanted.limit;
    signal(SIGTERM, on_term);
    vla_status status = vlai_ranks_read(&ranks, &err);
    if (status == VLA_OK)
        status = vlai_group_join(&ranks, &o, &group, &err);
    if (status == VLA_OK) {
        my_rank = ranks.rank;
        my_world = ranks.world;
        if (*wanted.die) { /* "die=2/step:7": of rank 2 alone */
            char *slash = strchr(wanted.die, '/');
            if (atoi(wanted.die) == my_rank)
                memmove(wanted.die, slash + 1, strlen(slash));
            else
                *wanted.die = 0;
        }
        wanted.fail_write = my_rank == 1 ? wanted.fail_write : 0;
        wanted.term = my_rank == ranks.world - 1 ? wanted.term : 0;
        status = train(group, ranks.rank, ranks.world, &err);
    }
    if (status == VLA_OK || status == VLA_E_CANCELLED) {
        vla_error late = VLA_ERROR_INIT;
        if (vlai_group_leave(group, &late) != VLA_OK)
            fprintf(stderr, "leaving: %s\n", late.message);
    } else {
        status = vlai_group_fail(group, &err);
    }
    if (status != VLA_OK)
        fprintf(stderr, "%s: %s\n", vla_status_name(status), err.message);
    fflush(stderr);
    _exit(status == VLA_OK ? 0 : status == VLA_E_CANCELLED ? CODE_SAVED : status == VLA_E_LOST ? CODE_LOST : CODE_FAILED);
}

/* ---- the test ---- */

typedef struct {
    int world;
    pid_t child[MOST];
    int code[MOST]; /* exit code, or 1000 + signal */
    double began, ended[MOST];
    char said[MOST][8192]; /* on stderr */
} outcome;

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* extra[r] (may be NULL): more words for rank r. */
static void start(outcome *o, int world, const char *words, const char *const *extra)
{
    int port = free_port();
    *o = (outcome){.world = world, .began = vlai_now()};
    assert_true(port > 0);
    for (int r = 0; r < world; r++) {
        o->child[r] = fork();
        assert_true(o->child[r] >= 0);
        if (o->child[r])
            continue;
        char line[4096], *argv[64] = {"test_ranks", "rank"}, *rest, log[600];
        int n = 2;
        snprintf(line, sizeof line, "%s %s", words, extra && extra[r] ? extra[r] : "");
        for (char *w = strtok_r(line, " ", &rest); w && n < 63; w = strtok_r(NULL, " ", &rest))
            argv[n++] = w;
        set_number("RANK", r);
        set_number("WORLD_SIZE", world);
        set_number("LOCAL_RANK", r);
        set_number("LOCAL_WORLD_SIZE", world);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        set_number("MASTER_PORT", port);
        setenv("VLA_DIST_TIMEOUT", "60", 1);
        setenv("OPENBLAS_NUM_THREADS", "1", 1);
        snprintf(log, sizeof log, "%s/said.%d", root, r);
        int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (fd < 0 || dup2(fd, 2) < 0)
            _exit(126);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
}

/* Waits for all, `limit` seconds at most. */
static void wait_all(outcome *o, double limit)
{
    int left = o->world;
    for (double began = vlai_now(); left > 0;) {
        for (int r = 0; r < o->world; r++) {
            int how;
            if (!o->child[r] || waitpid(o->child[r], &how, WNOHANG) != o->child[r])
                continue;
            o->code[r] = WIFEXITED(how) ? WEXITSTATUS(how) : 1000 + WTERMSIG(how);
            o->ended[r] = vlai_now();
            o->child[r] = 0;
            left--;
        }
        if (vlai_now() - began > limit)
            for (int r = 0; r < o->world; r++)
                if (o->child[r])
                    kill(o->child[r], SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    for (int r = 0; r < o->world; r++) {
        char name[16], *text;
        size_t size;
        vla_error err = VLA_ERROR_INIT;
        snprintf(name, sizeof name, "said.%d", r);
        assert_ok(vlai_read_file(at(name), 0, &text, &size, &err), err);
        snprintf(o->said[r], sizeof o->said[r], "%s", text);
        vlai_free(text);
    }
}

static void show(const outcome *o)
{
    for (int r = 0; r < o->world; r++)
        print_message("rank %d: code %d after %.1f s: %s\n", r, o->code[r], o->ended[r] - o->began, o->said[r]);
}

static void run_with(int world, int code, const char *words, const char *const *extra, outcome *o)
{
    static outcome own;
    o = o ? o : &own;
    start(o, world, words, extra);
    wait_all(o, 120);
    for (int r = 0; r < world; r++)
        if (o->code[r] != code && !(code == CODE_FAILED && o->code[r] == CODE_LOST)) { /* the first to fail tells the others */
            show(o);
            fail_msg("%d ranks of '%s': rank %d ended with %d, wanted %d", world, words, r, o->code[r], code);
        }
}

static const char *words(const char *format, ...) __attribute__((format(printf, 1, 2)));
static const char *words(const char *format, ...)
{
    static char text[4][2048];
    static int turn;
    turn = (turn + 1) % 4;
    va_list args;
    va_start(args, format);
    vsnprintf(text[turn], sizeof text[turn], format, args);
    va_end(args);
    return text[turn];
}

/* ---- what runs have left ---- */

/* A number of each line of a file of records, norms of weights where there are some; NaN for null. */
static int64_t read_numbers(const char *run, const char *name, const char *key, double *out, int64_t most)
{
    vla_error err = VLA_ERROR_INIT;
    char path[600], *text, *save;
    size_t size;
    int64_t n = 0;
    snprintf(path, sizeof path, "%s/%s", run, name);
    assert_ok(vlai_read_file(path, 0, &text, &size, &err), err);
    for (char *line = strtok_r(text, "\n", &save); line && n < most; line = strtok_r(NULL, "\n", &save)) {
        json_t *record;
        assert_ok(vlai_json_parse(line, strlen(line), path, &record, &err), err);
        json_t *value = json_object_get(record, key);
        assert_true(value || strstr(key, "param_norm"));
        if (value)
            out[n++] = json_is_number(value) ? json_number_value(value) : NAN;
        json_decref(record);
    }
    vlai_free(text);
    return n;
}

/* The largest relative difference of two runs' losses (and norms, and validations) from line `first` on. */
static double worst_loss(const char *a, const char *b, int64_t first)
{
    static const char *const keys[] = {"loss", "grad_norm", "lr", "samples", "epoch", "channel_loss_a \"toy\"", "out_param_norm", "total_param_norm"};
    enum { KEYS = sizeof keys / sizeof *keys };
    double x[512], y[512], worst = 0;
    for (int k = 0; k <= KEYS; k++) {
        const char *file = k == KEYS ? "validation.jsonl" : "metrics.jsonl", *key = k == KEYS ? "loss" : keys[k];
        int64_t n = read_numbers(a, file, key, x, 512), m = read_numbers(b, file, key, y, 512);
        assert_int_equal(n, m);
        assert_true(n > 0);
        for (int64_t i = k == KEYS || strstr(key, "param_norm") ? 0 : first; i < n; i++) {
            if (isnan(x[i]) && isnan(y[i]))
                continue;
            double d = fabs(x[i] - y[i]) / (fabs(x[i]) > 0 ? fabs(x[i]) : 1);
            worst = d > worst || isnan(d) ? d : worst;
        }
    }
    return worst;
}

/* The largest difference of a tensor's elements between two checkpoints' weights, relative to the tensor's largest element. */
static double worst_weight(const char *a, const char *b)
{
    char x[600], y[600];
    snprintf(x, sizeof x, "%s/%s", a, VLAI_CKPT_MODEL);
    snprintf(y, sizeof y, "%s/%s", b, VLAI_CKPT_MODEL);
    return weights_apart(x, y).element;
}

/* The run's newest checkpoint; its path lives until the next but seven. */
static const char *newest(const char *run)
{
    vla_error err = VLA_ERROR_INIT;
    vla_checkpoint *c;
    static char path[8][600];
    static int turn;
    turn = (turn + 1) % 8;
    assert_ok(vla_checkpoint_open(run, &c, &err), err);
    snprintf(path[turn], sizeof path[turn], "%s", vla_checkpoint_path(c));
    vla_checkpoint_close(c);
    return path[turn];
}

static bool same_file(const char *a, const char *b, const char *name)
{
    vla_error err = VLA_ERROR_INIT;
    char path[600], *x, *y;
    size_t n, m;
    snprintf(path, sizeof path, "%s/%s", a, name);
    assert_ok(vlai_read_file(path, 0, &x, &n, &err), err);
    snprintf(path, sizeof path, "%s/%s", b, name);
    assert_ok(vlai_read_file(path, 0, &y, &m, &err), err);
    bool same = n == m && !memcmp(x, y, n);
    vlai_free(x);
    vlai_free(y);
    return same;
}

static bool same_checkpoint(const char *a, const char *b, int world)
{
    bool same = same_file(a, b, VLAI_CKPT_MODEL) && same_file(a, b, VLAI_CKPT_STATE);
    for (int r = 0; r < world; r++) {
        char name[VLAI_CKPT_NAME];
        vlai_ckpt_optimizer_name(r, world, name);
        same = same && same_file(a, b, name);
    }
    return same;
}

/* ---- the tests ---- */

/* 1, 2 and 4 ranks on the same micro-batches, in every way of making the step. The order in which a sum over ranks is taken is that
 * of the ranks, so four ranks add what one rank adds, in its order; two ranks that accumulate add (1 + 3) + (2 + 4). */
static void ranks_are_one(void **state)
{
    (void)state;
    static const struct {
        const char *name, *how;
        int world;
    } ways[] = {{"plain", "zero=1", 4},          {"reduce", "zero=0", 4},
                {"whole", "zero=1 whole=1", 4},  {"whole-reduce", "zero=0 whole=1", 4},
                {"overlap", "zero=1 whole=1 overlap=1", 4}, {"ahead", "zero=1 whole=1 overlap=1 ahead=1", 4},
                {"two", "zero=1 acc=2", 2},      {"two-overlap", "zero=1 acc=2 overlap=1", 2}, {"two-whole", "zero=1 whole=1 overlap=1 batch=8", 2},
                {"terms", "global=1", 4},        {"terms-ahead", "global=1 whole=1 overlap=1 ahead=1", 4}, {"terms-two", "global=1 acc=2 ahead=1", 2}};
    run_with(1, 0, words("run=%s acc=4", at("one")), NULL, NULL);
    run_with(1, 0, words("run=%s acc=2 batch=8", at("one-of-8")), NULL, NULL);
    run_with(1, 0, words("run=%s acc=4 global=1", at("one-of-terms")), NULL, NULL);
    assert_true(worst_loss(at("one"), at("one-of-terms"), 0) > 1e-3); /* it is another loss */
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        run_with(ways[i].world, 0, words("run=%s %s", at(ways[i].name), ways[i].how), NULL, NULL);
        const char *one = strstr(ways[i].how, "batch=8") ? "one-of-8" : strstr(ways[i].how, "global=1") ? "one-of-terms" : "one";
        double loss = worst_loss(at(one), at(ways[i].name), 0), weight = worst_weight(newest(at(one)), newest(at(ways[i].name)));
        print_message("%s, %d ranks: losses differ by %.3g, weights by %.3g\n", ways[i].name, ways[i].world, loss, weight);
        assert_true(loss <= 1e-6);
        assert_true(weight <= 1e-6);
    }
}

/* Saved on 2 and on 4 ranks, loaded on 1, 2 and 4: the state is the saved one, bit for bit. On as many ranks the run goes on to the
 * bit; on others the sums have another order. */
static void any_number_goes_on(void **state)
{
    (void)state;
    static const char *const modes[] = {"numerics=0 whole=0", "numerics=0 whole=1 overlap=1", "numerics=1 whole=1", "numerics=2 overlap=1"};
    for (int mode = 0; mode < 4; mode++)
        for (int saved = 2; saved <= 4; saved += 2) {
            char whole[64], half[64], then[64], from[600];
            const char *how = saved == 2 && mode == 0 ? "acc=2" : "";
            snprintf(whole, sizeof whole, "whole-%d-%d", mode, saved);
            snprintf(half, sizeof half, "half-%d-%d", mode, saved);
            run_with(saved, 0, words("run=%s %s %s", at(whole), modes[mode], how), NULL, NULL);
            run_with(saved, 0, words("run=%s %s %s stop_at=6", at(half), modes[mode], how), NULL, NULL);
            snprintf(from, sizeof from, "%s", newest(at(half)));
            assert_int_equal(toy_newest_step(at(half)), 6);
            for (int now = 1; now <= 4; now *= 2) {
                outcome o;
                snprintf(then, sizeof then, "then-%d-%d-%d", mode, saved, now);
                bool fits = mode == 0 || now <= saved; /* four ranks of batch 4 are more than two that do not accumulate */
                run_with(now, fits ? 0 : CODE_FAILED, words("run=%s resume=%s compare=%s %s %s", at(then), from, from, modes[mode], now == saved ? how : ""),
                         NULL, &o);
                if (!fits) {
                    assert_non_null(strstr(o.said[0], "its steps have 8 samples (batch 4 x accumulation 1 x 2 ranks), and batch 4 x 4 ranks does not divide that"));
                    continue;
                }
                assert_int_equal(toy_newest_step(at(then)), STEPS);
                if (now == saved) {
                    assert_true(same_checkpoint(newest(at(whole)), newest(at(then)), now));
                    continue;
                }
                double x[STEPS], y[STEPS], worst = 0;
                assert_int_equal(read_numbers(at(whole), "metrics.jsonl", "loss", x, STEPS), STEPS);
                assert_int_equal(read_numbers(at(then), "metrics.jsonl", "loss", y, STEPS), STEPS - 6);
                for (int i = 6; i < STEPS; i++)
                    worst = fabs(x[i] - y[i - 6]) / x[i] > worst ? fabs(x[i] - y[i - 6]) / x[i] : worst;
                print_message("mode %d, saved on %d, on %d: the next %d losses differ by %.3g\n", mode, saved, now, STEPS - 6, worst);
                if (mode < 2) /* the others sum in bf16 on four ranks and in fp32 where one accumulates */
                    assert_true(worst <= 1e-5);
            }
        }
    /* Ranks that keep everything, and then their shares alone: the same numbers. */
    run_with(4, 0, words("run=%s zero=0 stop_at=6", at("kept")), NULL, NULL);
    assert_true(vlai_is_file(words("%s/optimizer-0-of-1.safetensors", newest(at("kept")))));
    run_with(4, 0, words("run=%s resume=%s compare=%s", at("kept"), at("kept"), newest(at("kept"))), NULL, NULL);
    assert_true(same_checkpoint(newest(at("whole-0-4")), newest(at("kept")), 4));
}

static int how_many(const char *text, const char *part)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, part)); p++)
        n++;
    return n;
}

/* A value that is not finite on one rank: no rank steps, and the state is that of one rank that met it. */
static void bad_values_skip_on_all(void **state)
{
    (void)state;
    static const char *const hows[] = {"", "whole=1", "zero=0", "whole=1 overlap=1 ahead=1"};
    run_with(1, 0, words("run=%s acc=4 nan=42", at("bad-one")), NULL, NULL);
    for (int i = 0; i < 4; i++) {
        outcome o;
        char name[32];
        double skipped[STEPS];
        snprintf(name, sizeof name, "bad-%d", i);
        run_with(4, 0, words("run=%s nan=42 %s", at(name), hows[i]), NULL, &o);
        assert_int_equal(read_numbers(at(name), "metrics.jsonl", "skipped", skipped, STEPS), STEPS);
        for (int s = 0; s < STEPS; s++)
            assert_true(skipped[s] == (s == 2)); /* sample 42 is in batch 10, of rank 2 in step 3 */
        assert_non_null(strstr(o.said[2], "rank 2: step 3: the loss is not finite with toy set, sample 42"));
        assert_int_equal(how_many(o.said[1], "not finite"), 0);
        assert_true(worst_loss(at("bad-one"), at(name), 0) <= 1e-6);
        assert_true(worst_weight(newest(at("bad-one")), newest(at(name))) <= 1e-6);
    }
    /* A gradient: sample 42's rank spoils its own accumulated gradient. */
    outcome o;
    double skipped[STEPS];
    run_with(2, 0, words("run=%s acc=2 poison=42", at("poisoned")), NULL, &o);
    assert_int_equal(read_numbers(at("poisoned"), "metrics.jsonl", "skipped", skipped, STEPS), STEPS);
    for (int s = 0; s < STEPS; s++)
        assert_true(skipped[s] == (s == 2));
    assert_non_null(strstr(o.said[0], "rank 0: step 3: the gradient of 'out.weight' (inf at element 7) is not finite"));
}

/* One rank fails alone, or all end for what one has met: who knows why says it, and the others repeat it. */
static void a_failure_ends_all(void **state)
{
    (void)state;
    static const struct {
        const char *words, *why;
        int rank; /* that fails */
    } rows[] = {{"fail=42 save=1", "toy set, episode 1, frame 42, camera top: broken", 2},
                {"fail=42 whole=1 overlap=1 ahead=1 save=1", "toy set, episode 1, frame 42, camera top: broken", 2},
                {"nan=42 bad=1 save=1", "1 steps in a row were not finite, the last of them step 3: 'loss' (nan) on rank 2; nothing of them was applied", 0},
                {"nan=42 bad=1 save=2 whole=1 overlap=1 ahead=1", "on rank 2; nothing of them was applied; last good checkpoint: ", 0}};
    for (int i = 0; i < 4; i++) {
        outcome o;
        char name[32], who[64];
        snprintf(name, sizeof name, "failed-%d", i);
        snprintf(who, sizeof who, "rank %d (host", rows[i].rank);
        start(&o, 4, words("run=%s %s", at(name), rows[i].words), NULL);
        wait_all(&o, 60);
        for (int r = 0; r < 4; r++) {
            bool failed = r == rows[i].rank;
            if (o.code[r] != (failed ? CODE_FAILED : CODE_LOST) || !strstr(o.said[r], rows[i].why) || (!failed && !strstr(o.said[r], who)) || o.ended[r] - o.ended[rows[i].rank] > 10) {
                show(&o);
                fail_msg("'%s': rank %d", rows[i].words, r);
            }
        }
        assert_true(toy_newest_step(at(name)) >= (i < 2 ? 1 : 2)); /* a rank that fails alone gives up a save that is under way */
        run_with(4, 0, words("run=%s resume=%s", at(name), at(name)), NULL, NULL);
    }
}

/* SIGTERM of the last rank: all save the same step, the same few steps later, and go on from it to the same bits. */
static void all_stop_together(void **state)
{
    (void)state;
    static const char *const hows[] = {"whole=0", "whole=1 overlap=1 ahead=1"};
    for (int i = 0; i < 2; i++) {
        char name[32], whole[32];
        outcome o;
        snprintf(name, sizeof name, "stop-%d", i);
        snprintf(whole, sizeof whole, "unstopped-%d", i);
        run_with(3, CODE_SAVED, words("run=%s term=5 %s", at(name), hows[i]), NULL, &o);
        int64_t step = toy_newest_step(at(name));
        print_message("asked to end in step 5: saved after step %lld\n", (long long)step);
        assert_true(step >= 5 && step <= 9);
        run_with(3, 0, words("run=%s resume=%s %s", at(name), at(name), hows[i]), NULL, NULL);
        run_with(3, 0, words("run=%s %s", at(whole), hows[i]), NULL, NULL);
        assert_true(same_checkpoint(newest(at(name)), newest(at(whole)), 3));
        assert_true(worst_loss(at(name), at(whole), 0) == 0);
    }
}

/* A rank that is killed in the start, in a step or while it writes its part of a checkpoint ends all within seconds, with a message
 * that names it; then the run goes on from what is whole. */
static void killed_ranks(void **state)
{
    (void)state;
    static const struct {
        const char *words, *who;
        int64_t least;
        bool resumes;
    } rows[] = {{"die=1/start:0", "rank 1", -1, false}, {"die=2/step:6 save=2", "rank 2", 2, true}, {"die=0/step:6 save=2", "rank 0", 2, true}};
    for (int i = 0; i < 3; i++) {
        char name[32];
        outcome o;
        int victim = rows[i].words[4] - '0';
        snprintf(name, sizeof name, "killed-%d", i);
        start(&o, 3, words("run=%s %s", at(name), rows[i].words), NULL);
        wait_all(&o, 60);
        for (int r = 0; r < 3; r++) {
            bool right = r == victim ? o.code[r] == 1000 + SIGKILL : o.code[r] == CODE_LOST && strstr(o.said[r], rows[i].who) && strstr(o.said[r], "lost");
            if (!right || o.ended[r] - o.ended[victim] > 10) {
                show(&o);
                fail_msg("'%s': rank %d", rows[i].words, r);
            }
        }
        if (!rows[i].resumes)
            continue;
        int64_t step = toy_newest_step(at(name));
        assert_true(step >= rows[i].least);
        run_with(3, 0, words("run=%s resume=%s", at(name), at(name)), NULL, NULL);
        assert_int_equal(toy_newest_step(at(name)), STEPS);
    }
    assert_true(worst_loss(at("killed-1"), at("killed-2"), 0) == 0);
}

/* Like tests/e2e/test_kill: ranks that save after every step are killed at random moments, one of them each time. */
static void killed_while_they_save(void **state)
{
    (void)state;
    int kills = test_long() ? 20 : test_sanitized() ? 2 : 5;
    int64_t step = -1;
    for (int i = 0; i < kills; i++) {
        outcome o;
        vlai_rng_key rng = {.seed = 5, .position = (uint64_t)i};
        uint32_t draw = vlai_rng_u32(&rng, 0);
        int victim = i % 3;
        start(&o, 3, words("run=%s save=1 keep=2 steps=1000000 %s%s", at("saving"), step >= 0 ? "resume=" : "", step >= 0 ? at("saving") : ""), NULL);
        for (int waited = 0; toy_newest_step(at("saving")) <= step && waited < 3000; waited++)
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        nanosleep(&(struct timespec){.tv_nsec = draw % 30000000}, NULL);
        kill(o.child[victim], SIGKILL);
        wait_all(&o, 60);
        for (int r = 0; r < 3; r++)
            if ((r == victim) != (o.code[r] == 1000 + SIGKILL) || (r != victim && o.code[r] != CODE_LOST) || o.ended[r] - o.ended[victim] > 10) {
                show(&o);
                fail_msg("kill %d, of rank %d: rank %d ended with %d", i, victim, r, o.code[r]);
            }
        int64_t now = toy_newest_step(at("saving"));
        assert_true(now > step);
        step = now;
    }
    print_message("%d kills, the last whole checkpoint is of step %lld\n", kills, (long long)step);
    run_with(3, 0, words("run=%s resume=%s stop_at=%lld steps=1000000", at("saving"), at("saving"), (long long)step + 1), NULL, NULL);
    run_with(3, 0, words("run=%s stop_at=%lld steps=1000000", at("unkilled"), (long long)step + 1), NULL, NULL);
    assert_true(same_checkpoint(newest(at("saving")), newest(at("unkilled")), 3));
    char **names;
    size_t count;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_list_dir(at("saving"), &names, &count, &err), err);
    for (size_t i = 0; i < count; i++)
        assert_null(strstr(names[i], ".tmp"));
    vlai_names_free(names, count);
}

/* A write of one rank fails: the save fails on all, with its rank and reason, leaves nothing, and the next one works. */
static void a_failing_part(void **state)
{
    (void)state;
    static const int nth[] = {1, 2};
    for (int i = 0; i < 2; i++) {
        char name[32];
        outcome o;
        snprintf(name, sizeof name, "part-%d", i);
        run_with(3, 0, words("run=%s save=4 fail_write=%d", at(name), nth[i]), NULL, &o);
        for (int r = 0; r < 3; r++)
            if (!strstr(o.said[r], "checkpoint 0_4: rank 1: ") || !strstr(o.said[r], "training goes on")) {
                show(&o);
                fail_msg("rank %d does not name the failed part", r);
            }
        assert_false(vlai_is_dir(at(words("%s/0_4", name))));
        assert_false(vlai_is_dir(at(words("%s/0_4.tmp", name))));
        assert_true(vlai_is_file(at(words("%s/0_8/optimizer-1-of-3.safetensors", name))));
        assert_int_equal(toy_newest_step(at(name)), STEPS);
    }
}

/* A failing rank tells the others at once, whatever its save still writes. */
static void a_failure_does_not_wait_for_a_save(void **state)
{
    (void)state;
    outcome o;
    start(&o, 3, words("run=%s save=2 fail=42", at("slow")), (const char *const[]){NULL, NULL, "slow=40000"});
    wait_all(&o, 60);
    bool one = false;
    for (int r = 0; r < 3; r++) {
        one |= o.code[r] == CODE_FAILED;
        if (o.ended[r] - o.began > 30 || (o.code[r] != CODE_FAILED && o.code[r] != CODE_LOST) || !strstr(o.said[r], "frame 42")) {
            show(&o);
            fail_msg("rank %d", r);
        }
    }
    assert_true(one);
    assert_true(toy_newest_step(at("slow")) < 0); /* the save was under way */
}

/* A save in which one rank stands still ends all at the limit, and names it: the last save, and one that the next save waits for. */
static void a_save_that_hangs(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        outcome o;
        char name[32], who[32];
        const char *extra[3] = {NULL, NULL, NULL};
        int victim = i % 3;
        extra[victim] = "slow=1000000";
        snprintf(name, sizeof name, "hangs-%d", i);
        snprintf(who, sizeof who, "rank %d (host ", victim);
        start(&o, 3, words("run=%s limit=5 %s", at(name), i == 3 ? "save=4" : ""), extra);
        wait_all(&o, 60);
        for (int r = 0; r < 3; r++)
            if (o.code[r] != CODE_LOST || !strstr(o.said[r], who) || !strstr(o.said[r], "has made no progress for 5 s: it is in phase save") || o.ended[r] - o.began > 30) {
                show(&o);
                fail_msg("'%s': rank %d", name, r);
            }
    }
}

/* One that goes on is waited for, however long it takes: here several times the limit. */
static void a_save_that_is_slow(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        outcome o;
        char name[32];
        snprintf(name, sizeof name, "slowly-%d", i);
        run_with(2, 0, words("run=%s limit=4 save=%d", at(name), i ? 8 : 0), (const char *const[]){"slow=1500", "slow=2500"}, &o);
        assert_int_equal(toy_newest_step(at(name)), STEPS);
        assert_true(o.ended[1] - o.began > 2 * 4 + 2);
    }
}

/* A rank that is at work on its first plan is waited for beyond the limit; one that stands still there is named. */
static void a_plan_that_is_slow(void **state)
{
    (void)state;
    outcome o;
    run_with(2, 0, words("run=%s limit=3 steps=1 whole=1", at("slow-plan")), (const char *const[]){"", "plan=8000"}, &o);
    assert_true(o.ended[1] - o.began > 8);
    start(&o, 2, words("run=%s limit=3 steps=1 whole=1", at("no-plan")), (const char *const[]){"", "plan=-1000000"});
    wait_all(&o, 60);
    for (int r = 0; r < 2; r++)
        if (o.code[r] != CODE_LOST || !strstr(o.said[r], "rank 1 did not come within 3 s; rank 1 (host ") || !strstr(o.said[r], "is in phase plan, step 0")) {
            show(&o);
            fail_msg("rank %d", r);
        }
}

/* What the writers say to each other does not pile up. */
static void words_are_forgotten(void **state)
{
    (void)state;
    run_with(3, 0, words("run=%s save=2 keys=1", at("keys")), NULL, NULL);
}

/* Every writer of a group has words of its own, also for its first save. */
static void writers_of_one_group(void **state)
{
    (void)state;
    for (int world = 2; world <= 4; world += 2) {
        char name[32];
        snprintf(name, sizeof name, "writers-%d", world);
        run_with(world, 0, words("run=%s steps=4 save=2 again=3", at(name)), NULL, NULL);
        for (int i = 1; i <= 3; i++) {
            const char *last = at(words("%s/0_4", name)), *again = at(words("%s/again/0_%d", name, i));
            assert_true(same_file(last, again, VLAI_CKPT_MODEL));
            for (int r = 0; r < world; r++) {
                char part[VLAI_CKPT_NAME];
                vlai_ckpt_optimizer_name(r, world, part);
                assert_true(same_file(last, again, part));
            }
        }
    }
}

/* Ranks that are not of one run are refused, and told why. */
static void differences_are_refused(void **state)
{
    (void)state;
    outcome o;
    char elsewhere[600];
    run_with(2, CODE_FAILED, words("run=%s", at("differ")), (const char *const[]){NULL, "steps=17"}, &o);
    assert_non_null(strstr(o.said[0], "the settings"));
    assert_non_null(strstr(o.said[0], "rank 1"));
    snprintf(elsewhere, sizeof elsewhere, "run=%s", at("elsewhere"));
    start(&o, 2, words("run=%s", at("here")), (const char *const[]){NULL, elsewhere});
    wait_all(&o, 60);
    if (o.code[0] == 0 || o.code[1] == 0 || !strstr(o.said[1], "does not see the run folder of rank 0")) {
        show(&o);
        fail_msg("another run folder is not refused");
    }
    run_with(2, CODE_FAILED, words("run=%s seed=2", at("weights")), NULL, &o);
    assert_non_null(strstr(o.said[1], "the weights at the start"));
    assert_non_null(strstr(o.said[1], "in.weight"));
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "rank"))
        return be_a_rank(argc, argv);
    tell_sanitizer();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_are_one),      cmocka_unit_test(any_number_goes_on),      cmocka_unit_test(bad_values_skip_on_all),
        cmocka_unit_test(a_failure_ends_all), cmocka_unit_test(all_stop_together),  cmocka_unit_test(killed_ranks),            cmocka_unit_test(killed_while_they_save),
        cmocka_unit_test(a_failing_part),     cmocka_unit_test(writers_of_one_group),     cmocka_unit_test(differences_are_refused),
        cmocka_unit_test(a_failure_does_not_wait_for_a_save), cmocka_unit_test(words_are_forgotten),
        cmocka_unit_test(a_save_that_hangs), cmocka_unit_test(a_save_that_is_slow), cmocka_unit_test(a_plan_that_is_slow),
    };
    return cmocka_run_group_tests(tests, make_root, drop_root);
}
