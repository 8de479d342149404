/* vla train: a training run of a configuration, from the first step or from a checkpoint. */
#include "args.h"
#include "command.h"
#include "together.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/pool.h"
#include "base/text.h"
#include "base/time.h"
#include "ckpt/ckpt.h"
#include "train/device.h"
#include "train/preflight.h"
#include "train/progress.h"
#include "train/report.h"
#include "train/switches.h"
#include "train/wallx_task.h"
#include "vla/log.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char help[] =
    "Usage: vla train --config FILE [--section.key=value ...] [options]\n\n"
    "Trains the policy of a configuration. Everything of the run is written to checkpoint.save_path: metrics.jsonl (one\n"
    "line per step), validation.jsonl, config.resolved.json, report.html, logs/, checkpoints EPOCH_STEP/ and a link `latest`.\n"
    "SIGTERM, SIGINT and SIGHUP save and end with code 75. `vla launch` starts several ranks; so do torchrun, accelerate, srun and mpirun.\n\n"
    "  --config FILE, --config_path FILE   YAML or JSON; `vla config` lists its keys\n"
    "  --section.key=value      overrides a key\n"
    "  --resume [auto|PATH]     go on from a checkpoint or run folder; auto (also without a value): from the newest whole\n"
    "                           checkpoint in save_path, or as the configuration says where there is none; where there are\n"
    "                           some and none can be read, it is an error\n"
    "  --allow-change A,B|all   values that may differ from the checkpoint's (the error names them)\n"
    "  --allow-partial          train on the whole episodes at the start of a damaged set\n"
    "  --stop-at STEP           save and end after this step; schedules stay those of the whole run\n"
    "  --device cpu|cuda|cuda:N|auto   the same as --training.device=\n"
    "  --numerics fp32|bf16|bf16-sr|bf16-plain   the same as --training.numerics=\n"
    "  --threads N              the same as --training.threads=\n"
    "  --frame-cache-gb N       the same as --data.frame_cache_gb=: keep resized frames on the disk\n"
    "  --debug                  log names `debug`, save_path ./ckpt/debug\n"
    "  --log_to_file            also write the output to save_path/training_log_DATE.log\n"
    "  --zero 0|1               the same as --dist.zero=: 0 keeps the whole optimizer state on every rank\n"
    "  --wandb_offline V, --fsdp_sharding_strategy S, --visualize   accepted, without effect\n\n"
    "Exit codes: 0 done; 2 usage or configuration; 3 data or file; 4 memory; 5 not finite; 6 another rank was lost;\n"
    "7 a collective of the ranks failed; 75 saved on a signal.\n\n"
    "Examples:\n"
    "  vla train --config configs/libero.yml --data.lerobot_config.repo_id=data/libero\n"
    "  vla train --config configs/demo.yml --resume            # after an interruption, or not: the same command\n"
    "  vla train --config configs/demo.yml --hyperparams.batch_size_per_gpu=8 --stop-at 100\n";

enum { OVERRIDES = ARGS_MOST + 16, NAMES = 64, LINE = 1024, PATH = 4096 };

typedef struct {
    const char *config, *resume;
    const char *overrides[OVERRIDES];
    size_t override_count;
    char made[16][4096 + 64]; /* overrides that options stand for */
    size_t made_count;
    char allow_text[4096];
    const char *allow[NAMES + 1];
    int64_t stop_at;
    bool log_to_file;
    char device[VLAI_DEVICE_NAME]; /* of this rank */
} request;

/* Where lines go: the terminal, the rank's log file in the run folder, and the file of --log_to_file. Ranks other than 0 write to
 * the terminal what is worse than a notice. */
typedef struct {
    int rank;
    bool terminal;
    pthread_mutex_t lock; /* one line at a time: the library's threads log too */
    int drawn; /* length of the status line that stands on the terminal */
    int64_t log_interval;
    double began;
    FILE *rank_log, *tee;
} view;

static volatile sig_atomic_t stop_requested;

/* The first signal asks for a save, a second one ends the process at once; so soon after the first that only a program can have
 * sent both (`timeout` sends it to the process and to its group) it is the same one. */
static void on_signal(int number)
{
    static const double echo_s = 0.5;
    static _Atomic double first;
    double now = vlai_now();
    bool asked = __atomic_load_n(&stop_requested, __ATOMIC_RELAXED); /* the handler may run in any thread */
    if (asked && now - first > echo_s) {
        signal(number, SIG_DFL);
        raise(number);
    } else if (!asked) {
        first = now;
        __atomic_store_n(&stop_requested, 1, __ATOMIC_RELAXED);
    }
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    struct sigaction hangup; /* the terminal has gone; nohup lets it */
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
}

/* The status line, over the one that stands there; NULL leaves that one standing and goes on below it. */
static void draw(view *v, const char *line)
{
    pthread_mutex_lock(&v->lock);
    int n = line ? (int)strlen(line) : 0;
    if (line)
        printf("\r%s%*s", line, v->drawn > n ? v->drawn - n : 0, "");
    else if (v->drawn)
        puts("");
    fflush(stdout);
    v->drawn = n;
    pthread_mutex_unlock(&v->lock);
}

/* "2026-01-31 12:00:00,123 - [rank0] - INFO - text", the reference's form. */
static void print_line(view *v, const char *level, const char *text)
{
    struct timespec now;
    struct tm local;
    char stamp[64], line[LINE * 3]; /* longer than what is logged, so that the line has its end */
    clock_gettime(CLOCK_REALTIME, &now);
    localtime_r(&now.tv_sec, &local);
    strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &local);
    snprintf(line, sizeof line, "%s,%03ld - [rank%d] - %s - %s\n", stamp, now.tv_nsec / 1000000, v->rank, level, text);
    pthread_mutex_lock(&v->lock);
    if (v->drawn)
        printf("\r%*s\r", v->drawn, "");
    v->drawn = 0;
    if (v->rank > 0 && strcmp(level, "INFO") != 0)
        fprintf(stderr, "warning: %s\n", text);
    else if (v->terminal)
        printf("%s%s\n", strcmp(level, "INFO") ? "warning: " : "", text);
    else if (v->rank == 0)
        fputs(line, stdout);
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        FILE *file = i ? v->tee : v->rank_log;
        if (file) {
            fputs(line, file);
            fflush(file);
        }
    }
    pthread_mutex_unlock(&v->lock);
}

static void print_lines(view *v, const char *text)
{
    char line[LINE];
    while (*text) {
        size_t n = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)n, text);
        print_line(v, "INFO", line);
        text += n + (text[n] == '\n');
    }
}

static void on_log(vla_log_level level, const char *text, void *user)
{
    print_line(user, level <= VLA_LOG_ERROR ? "ERROR" : level == VLA_LOG_WARN ? "WARNING" : "INFO", text);
}

static void on_record(void *user, const vla_record *r)
{
    view *v = user;
    char line[LINE];
    if (r->kind == VLA_RECORD_STEP && v->terminal) {
        vlai_status_line(r, line, sizeof line);
        draw(v, line);
    } else if (r->kind == VLA_RECORD_STEP) {
        if ((r->step - 1) % v->log_interval != 0 && r->step != r->steps)
            return;
        vlai_step_line(r, line, sizeof line);
        print_line(v, "INFO", line);
    } else if (r->kind == VLA_RECORD_VALIDATION) {
        vlai_validation_line(r, line, sizeof line);
        print_line(v, "INFO", line);
    } else if (r->kind == VLA_RECORD_SAVED) {
        snprintf(line, sizeof line, "Saved checkpoint to %s", r->text);
        print_line(v, "INFO", line);
    }
}

/* ---- arguments ---- */

static int add_override(request *q, const char *key, const char *value)
{
    if (q->override_count == OVERRIDES || q->made_count == sizeof q->made / sizeof *q->made ||
        snprintf(q->made[q->made_count], sizeof *q->made, "%s=%s", key, value) >= (int)sizeof *q->made)
        return 0;
    q->overrides[q->override_count++] = q->made[q->made_count++];
    return 1;
}

/* Options that stand for keys count after the keys themselves. */
static int parse(int argc, char **argv, request *q)
{
    static args a; /* too large for a stack frame */
    bool debug = false, partial = false, ignored;
    const char *allow = NULL, *offline = NULL, *zero = NULL, *numerics = NULL, *threads = NULL, *cache = NULL, *strategy = NULL,
               *device = NULL;
    const arg_row rows[] = {
        {"--config", ARG_TEXT, &q->config},     {"--config_path", ARG_TEXT, &q->config},
        {"--resume", ARG_MAYBE, &q->resume},    {"--allow-change", ARG_TEXT, &allow},
        {"--stop-at", ARG_STEP,  &q->stop_at},  {"--numerics", ARG_TEXT, &numerics},
        {"--device", ARG_TEXT, &device},
        {"--threads", ARG_TEXT, &threads},      {"--frame-cache-gb", ARG_TEXT, &cache},
        {"--allow-partial", ARG_FLAG, &partial}, {"--debug", ARG_FLAG, &debug},
        {"--log_to_file", ARG_FLAG, &q->log_to_file}, {"--wandb_offline", ARG_TEXT, &offline},
        {"--fsdp_sharding_strategy", ARG_TEXT, &strategy}, {"--visualize", ARG_FLAG, &ignored}, {"--zero", ARG_TEXT, &zero},
    };
    a = (args){.name = "train", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .overrides = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    for (size_t i = 0; i < a.overrides_given; i++)
        q->overrides[q->override_count++] = a.override[i];
    const struct {
        const char *key, *value;
    } made[] = {
        {"logging.log_name", debug ? "debug" : NULL},
        {"logging.log_project", debug ? "debug" : NULL},
        {"checkpoint.save_path", debug ? "./ckpt/debug" : NULL},
        {"data.lerobot_config.allow_partial", partial ? "true" : NULL},
        {"training.device", device},
        {"training.numerics", numerics},
        {"training.threads", threads},
        {"data.frame_cache_gb", cache},
        {"dist.zero", zero},
        {"distributed.fsdp_sharding_strategy", strategy},
        {"logging.wandb_offline", !offline ? NULL : !strcmp(offline, "true") || !strcmp(offline, "True") || !strcmp(offline, "1") ? "true" : "false"},
    };
    bool room = true;
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i].value)
            room &= add_override(q, made[i].key, made[i].value) != 0;
    if (q->resume && !*q->resume)
        q->resume = "auto";
    if (allow) {
        snprintf(q->allow_text, sizeof q->allow_text, "%s", allow);
        args_split(q->allow_text, q->allow, NAMES);
    }
    if (!room || !q->config) {
        fprintf(stderr, "vla train: %s\n  hint: vla train --help has examples\n",
                !room ? "too many or too long arguments" : "--config FILE is required");
        return EXIT_USAGE;
    }
    return -1;
}

/* ---- the run ---- */

/* Path of the newest whole checkpoint of a run, or of the one that is named; "" where there is none. Where there are some and none
 * can be read, a run that begins anew would pass for one that goes on. */
static vla_status find_checkpoint(const char *run, char out[PATH], vla_error *err)
{
    vla_checkpoint *c;
    *out = 0;
    if (!vlai_is_dir(run))
        return VLA_OK;
    vla_status status = vla_checkpoint_open(run, &c, err);
    if (status == VLA_E_NOT_FOUND)
        return VLA_OK;
    if (status != VLA_OK)
        return vlai_hint(err, status, "no checkpoint in %s can be resumed: copy this one again, or rename it, so that the run begins as the "
                         "configuration says", run);
    snprintf(out, PATH, "%s", vla_checkpoint_path(c));
    vla_checkpoint_close(c);
    return VLA_OK;
}

static vla_status reload_config(request *q, const char *resume_from, vlai_config **config, vla_error *err)
{
    vlai_config_destroy(*config);
    *config = NULL;
    if (!add_override(q, "checkpoint.resume_from", resume_from))
        return vlai_fail(err, VLA_E_INVALID, "--resume '%.200s': path too long", resume_from);
    return vlai_config_load(q->config, q->overrides, q->override_count, config, err);
}

/* --resume becomes checkpoint.resume_from. */
static vla_status resume_one(request *q, vlai_config **config, vla_error *err)
{
    char found[PATH];
    const char *run = (*config)->checkpoint.save_path, *from = q->resume;
    if (!from)
        return VLA_OK;
    char *kept = vlai_strdup(run); /* it goes with the configuration */
    if (!kept)
        return vlai_nomem(err, strlen(run));
    bool automatic = !strcmp(from, "auto");
    vla_status status = automatic ? find_checkpoint(run, found, err) : VLA_OK;
    if (status == VLA_OK && (!automatic || *found))
        status = reload_config(q, automatic ? kept : from, config, err);
    vlai_free(kept);
    return status;
}

/* The same for several ranks: rank 0 chooses, down to the very checkpoint, and all see that they have it. */
static vla_status resume_together(request *q, together *t, vlai_config **config, vla_error *err)
{
    char choice[PATH] = "", found[PATH] = "";
    const char *from = q->resume && strcmp(q->resume, "auto") != 0 ? q->resume : (*config)->checkpoint.resume_from;
    if (t->ranks.rank == 0) {
        if (q->resume && !strcmp(q->resume, "auto"))
            VLA_TRY(find_checkpoint((*config)->checkpoint.save_path, found, err));
        if (!*found && from && vlai_resume_kind_of(from) == VLAI_RESUME_RUN)
            VLA_TRY(find_checkpoint(from, found, err));
        snprintf(choice, sizeof choice, "%s", *found ? found : from ? from : "");
    }
    VLA_TRY(together_share(t, "what is resumed", choice, sizeof choice, err));
    if (!*choice)
        return VLA_OK;
    VLA_TRY(reload_config(q, choice, config, err));
    if (vlai_resume_kind_of(choice) != VLAI_RESUME_RUN)
        return together_agree(t, "what is resumed", "weights", err);
    vla_checkpoint *c;
    vla_status status = t->ranks.rank == 0 ? vla_checkpoint_open(choice, &c, err) : vlai_checkpoint_open_known(choice, &c, err);
    if (status != VLA_OK)
        return status;
    status = together_agree(t, "the checkpoint that is resumed", vla_checkpoint_state(c), err);
    vla_checkpoint_close(c);
    return status;
}

/* What must be equal on all ranks before anything is read: the configuration, the switches, the arguments that are no keys. */
static vla_status agree_config(const request *q, together *t, const vlai_config *config, vla_error *err)
{
    char *text;
    VLA_TRY(vlai_config_common(config, &text, err));
    vlai_text all = {0};
    vlai_text_puts(&all, text);
    vlai_free(text);
    vlai_switches_common(config, &all);
    vlai_text_printf(&all, "--stop-at: %" PRId64 "\n--allow-change:", q->stop_at);
    for (size_t i = 0; q->allow[i]; i++)
        vlai_text_printf(&all, " %s", q->allow[i]);
    vlai_text_puts(&all, *q->device ? strcmp(q->device, "cpu") ? "\ndevice: GPU\n" : "\ndevice: CPU\n" : "\n");
    vla_status status = vlai_text_status(&all, err);
    if (status == VLA_OK)
        status = together_agree(t, "the configuration", all.data, err);
    vlai_text_fini(&all);
    return status;
}

/* What the model and its processor are read from: copies on several machines must be the same. */
static vla_status agree_files(together *t, const vlai_wallx_setup *s, vla_error *err)
{
    vlai_text all = {0};
    vla_status status = VLA_OK;
    for (size_t i = 0; i < s->options.file_count && status == VLA_OK; i++) {
        uint64_t hash, size;
        const vla_checkpoint_file *f = &s->options.files[i];
        if (!f->source) /* the configuration, which is compared key by key */
            continue;
        status = vlai_ckpt_hash_file(f->source, &hash, &size, err);
        vlai_text_printf(&all, "%s: %" PRIu64 " bytes, XXH64 %016" PRIx64 "\n", f->source, size, hash);
    }
    if (status == VLA_OK)
        status = vlai_text_status(&all, err);
    if (status == VLA_OK)
        status = together_agree(t, "the files of the model", all.data ? all.data : "", err);
    vlai_text_fini(&all);
    return status;
}

/* The data set and all that training takes from it, one value a line. */
static vla_status agree_data(together *t, const vlai_wallx_setup *s, vla_error *err)
{
    const vla_dataset_info *info = vla_dataset_info_get(s->set);
    vlai_text all = {0};
    vlai_text_printf(&all, "data set digest: %s\nrows: %" PRId64 "\nepisodes: %" PRId64 "\ntraining samples: %" PRId64
                     "\nvalidation samples: %" PRId64 "\n", info->digest, info->rows, info->episodes, s->samples.count,
                     s->validation.count);
    for (const char *c = s->options.contract; c && *c; c++) {
        vlai_text_put(&all, c, 1);
        if (*c == ',' || *c == '{')
            vlai_text_puts(&all, "\n");
    }
    vla_status status = vlai_text_status(&all, err);
    if (status == VLA_OK)
        status = together_agree(t, "the data set", all.data, err);
    vlai_text_fini(&all);
    return status;
}

static FILE *open_log(const char *run, const char *folder, const char *name)
{
    char dir[PATH], path[PATH];
    vla_error err = VLA_ERROR_INIT;
    if (!vlai_path_join(dir, sizeof dir, run, folder) || vlai_mkdirs(dir, &err) != VLA_OK ||
        !vlai_path_join(path, sizeof path, dir, name))
        return NULL;
    return fopen(path, "ae");
}

static void open_logs(view *v, const request *q, const vlai_config *c)
{
    char name[64];
    time_t now = time(NULL);
    struct tm local;
    snprintf(name, sizeof name, "rank_%d.log", v->rank);
    v->rank_log = open_log(c->checkpoint.save_path, "logs", name);
    localtime_r(&now, &local);
    strftime(name, sizeof name, "training_log_%Y%m%d_%H%M%S.log", &local);
    if (q->log_to_file && v->rank == 0)
        v->tee = open_log(c->checkpoint.save_path, ".", name);
    if (!v->rank_log || (q->log_to_file && v->rank == 0 && !v->tee)) {
        char line[LINE];
        snprintf(line, sizeof line, "%.900s: a log cannot be written there: %s", c->checkpoint.save_path, strerror(errno));
        print_line(v, "WARNING", line);
    }
}

static void say_start(view *v, const together *t, const vlai_config *c, const vlai_wallx_setup *s)
{
    const vla_dataset_info *info = vla_dataset_info_get(s->set);
    vlai_text text = {0};
    vlai_text_printf(&text, "vla %s, configuration %s, run folder %s\n", VLA_VERSION, c->path, c->checkpoint.save_path);
    vlai_text_printf(&text, "seed %" PRId64 "\n", c->hyperparams.seed);
    if (t->ranks.world > 1)
        vlai_text_printf(&text, "rank %d of %d, local rank %d of %d, machine %d of %d, meeting at %s:%d\n", t->ranks.rank, t->ranks.world,
                         t->ranks.local_rank, t->ranks.local_world, t->ranks.node, t->ranks.nodes, t->ranks.address, t->ranks.port);
    vlai_text_printf(&text, "LeRobot Data Loading Configuration: %s (%s, digest %s), %" PRId64 " of %" PRId64
                     " episodes, %" PRId64 " training samples (%" PRId64 " episodes), %" PRId64 " validation samples (%" PRId64
                     " episodes), batch %" PRId64 " x accumulation %" PRId64 " x %d rank%s, %" PRId64 " workers\n",
                     info->root, info->version, info->digest, info->episodes, info->total_episodes, s->samples.count,
                     s->train_episodes, s->validation.count, s->validation_episodes, s->options.batch,
                     s->options.accumulation, t->ranks.world, t->ranks.world == 1 ? "" : "s", s->options.workers);
    vlai_text_printf(&text, "processor vocab size: %" PRId64 ", embedding rows: %" PRId64 "\n", s->contract->vocabulary,
                     s->config->vocab_size);
    vlai_switches_describe(c, strcmp(s->options.device, "cpu") ? "cuda" : "cpu", t->ranks.world, &text);
    if (text.data)
        print_lines(v, text.data);
    vlai_text_fini(&text);
    print_lines(v, s->notes);
}

static vla_status say_memory(view *v, vla_trainer *trainer, vla_error *err)
{
    vla_trainer_memory memory;
    vla_status status = vla_trainer_prepare(trainer, &memory, err);
    if (status != VLA_OK)
        return status;
    vlai_text text = {0};
    vlai_memory_table(&memory, &text);
    size_t parameters = 0;
    vla_store *store = vla_trainer_store(trainer);
    for (size_t i = 0; i < vla_store_count(store); i++)
        parameters += (size_t)vla_store_tensor(store, VLA_STORE_WEIGHT, i).elements;
    vlai_text_printf(&text, "%zu parameters in %zu tensors\n", parameters, vla_store_count(store));
    if (text.data)
        print_lines(v, text.data);
    vlai_text_fini(&text);
    return VLA_OK;
}

/* The run has ended; a page that cannot be written is no failure of it. */
static void write_report(view *v, const char *run)
{
    char line[LINE];
    vla_error inner = VLA_ERROR_INIT;
    vlai_report_summary summary;
    if (vlai_report_write(run, NULL, &summary, &inner) == VLA_OK)
        snprintf(line, sizeof line, "report: %.1000s", summary.path);
    else
        snprintf(line, sizeof line, "no report was written: %.900s", inner.message);
    print_line(v, "INFO", line);
}

/* The device had no room for the run: what it needs, and settings that need less. */
static void say_short(view *v, const vlai_config *config, int ranks)
{
    vlai_preflight p;
    vla_error inner = VLA_ERROR_INIT;
    vlai_text text = {0};
    if (vlai_preflight_run(config, &(vlai_preflight_options){.ranks = ranks}, &p, &inner) != VLA_OK)
        return;
    vlai_preflight_memory(&p, &text);
    if (text.data)
        print_lines(v, text.data);
    vlai_text_fini(&text);
    vlai_preflight_fini(&p);
}

/* The options of this rank. */
static vla_trainer_options own_options(view *v, const request *q, const together *t, const vlai_wallx_setup *s)
{
    vla_trainer_options o = s->options;
    if (t->ranks.world > 1) {
        o.device = q->device;
        if (!strcmp(q->device, "cpu") && o.threads == 0)
            o.threads = vlai_pool_processors() > t->ranks.local_world ? vlai_pool_processors() / t->ranks.local_world : 1;
    }
    o.group = t->group;
    o.rank = t->ranks.rank;
    o.world = t->ranks.world;
    o.allow_change = q->allow[0] ? q->allow : NULL;
    o.stop_at = q->stop_at;
    o.stop = &stop_requested;
    o.report = on_record;
    o.report_user = v;
    return o;
}

static vla_status run(view *v, const request *q, together *t, const vlai_config *config, const vlai_wallx_setup *s,
                      vla_trainer **trainer, vla_error *err)
{
    vla_trainer_options o = own_options(v, q, t, s);
    char path[PATH];
    VLA_TRY(vla_trainer_create(&s->model, &s->samples, &s->validation, &o, trainer, err));
    if (v->rank == 0 && vlai_path_join(path, sizeof path, o.run, "config.resolved.json"))
        VLA_TRY(vlai_config_save(config, path, err));
    if (o.steps == 0 || vla_trainer_steps_done(*trainer) < o.steps)
        VLA_TRY(say_memory(v, *trainer, err));
    return vla_trainer_run(*trainer, err);
}

/* Of several ranks a failed one does not wait for what it has begun with the others: together_end ends it. */
static vla_status train(view *v, const request *q, together *t, const vlai_config *config, vla_error *err)
{
    vlai_wallx_task *task;
    vla_trainer *trainer = NULL;
    double began = vlai_now();
    vlai_group_work(t->group, "data", 0);
    vla_status status = vlai_wallx_task_open(config, &task, err);
    if (status != VLA_OK)
        return status;
    const vlai_wallx_setup *s = vlai_wallx_task_setup(task);
    say_start(v, t, config, s);
    if (s->options.timing) {
        char line[64];
        snprintf(line, sizeof line, "start: %.2f s data set and configuration", vlai_now() - began);
        print_line(v, "INFO", line);
    }
    if (t->group)
        status = agree_files(t, s, err);
    if (t->group && status == VLA_OK)
        status = agree_data(t, s, err);
    if (status == VLA_OK)
        status = run(v, q, t, config, s, &trainer, err);
    status = together_tell(t, status, err);
    draw(v, NULL); /* the last status line stays */
    bool in_order = status == VLA_OK || status == VLA_E_CANCELLED;
    if (status == VLA_E_DEVICE_NOMEM)
        say_short(v, config, t->ranks.world);
    if (!t->group || in_order) {
        vla_trainer_destroy(trainer);
        vlai_wallx_task_close(task);
    }
    if (v->rank == 0 && (in_order || status == VLA_E_NONFINITE))
        write_report(v, config->checkpoint.save_path);
    return status;
}

/* The configuration as all ranks have it. */
static vla_status prepare(request *q, together *t, vlai_config **config, vla_error *err)
{
    vla_status status = vlai_config_load(q->config, q->overrides, q->override_count, config, err);
    if (status == VLA_OK) /* before logs are written there */
        status = vlai_ckpt_check_path((*config)->checkpoint.save_path, NULL, 0, err);
    if (t->ranks.world == 1)
        return status == VLA_OK ? resume_one(q, config, err) : status;
    if (status == VLA_OK)
        status = vlai_device_of_rank((*config)->training.device, t->ranks.local_rank, t->ranks.local_world, q->device, err);
    VLA_TRY(together_meet(t, *config ? (double)(*config)->dist.timeout_s : 0, status, err));
    VLA_TRY(agree_config(q, t, *config, err));
    return resume_together(q, t, config, err);
}

int command_train(int argc, char **argv)
{
    static request q; /* too large for a stack frame */
    static together t;
    view v = {.terminal = isatty(STDOUT_FILENO), .lock = PTHREAD_MUTEX_INITIALIZER};
    vla_error err = VLA_ERROR_INIT;
    vlai_config *config = NULL;
    q = (request){0};
    t = (together){.name = "train"};
    int code = parse(argc, argv, &q);
    if (code >= 0)
        return code;
    signal(SIGPIPE, SIG_IGN); /* a reader of our output that goes away ends nothing */
    if (together_read(&t, &err) != VLA_OK)
        return command_fail("train", &err);
    v.rank = t.ranks.rank;
    v.terminal &= v.rank == 0;
    if (t.ranks.world == 1)
        catch_signals();
    vla_status status = prepare(&q, &t, &config, &err);
    if (t.ranks.world > 1)
        catch_signals(); /* before, there was nothing to save */
    if (status == VLA_OK) {
        v.log_interval = config->logging.log_interval;
        open_logs(&v, &q, config);
        t.log = v.rank_log;
        vla_log_set(on_log, &v, VLA_LOG_INFO);
        for (size_t i = 0; i < config->notice_count; i++)
            print_line(&v, "INFO", config->notices[i]);
        status = train(&v, &q, &t, config, &err);
        if (status != VLA_OK && status != VLA_E_CANCELLED && v.rank == 0) {
            char line[LINE * 2];
            snprintf(line, sizeof line, "Training failed with error: %.1000s", err.message);
            print_line(&v, "ERROR", line);
        }
        vla_log_set(NULL, NULL, VLA_LOG_INFO);
    }
    code = together_end(&t, status, &err); /* of several ranks one that has failed ends here: its loader reads the configuration */
    vlai_config_destroy(config);
    t.log = NULL;
    if (v.rank_log)
        fclose(v.rank_log);
    if (v.tee)
        fclose(v.tee);
    return code;
}
