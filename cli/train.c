/* vla train: a training run of a configuration, from the first step or from a checkpoint. */
#include "args.h"
#include "command.h"

#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"
#include "base/time.h"
#include "train/preflight.h"
#include "train/progress.h"
#include "train/report.h"
#include "train/switches.h"
#include "train/wallx_task.h"
#include "vla/log.h"

#include <inttypes.h>
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
    "SIGTERM and SIGINT save and end with code 75.\n\n"
    "  --config FILE, --config_path FILE   YAML or JSON; `vla config` lists its keys\n"
    "  --section.key=value      overrides a key\n"
    "  --resume [auto|PATH]     go on from a checkpoint or run folder; auto (also without a value): from the newest whole\n"
    "                           checkpoint in save_path, or as the configuration says where there is none\n"
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
    "Exit codes: 0 done; 2 usage or configuration; 3 data or file; 4 memory; 5 not finite; 75 saved on a signal.\n\n"
    "Examples:\n"
    "  vla train --config configs/libero.yml --data.lerobot_config.repo_id=data/libero\n"
    "  vla train --config demo.yml --resume            # after an interruption, or not: the same command\n"
    "  vla train --config demo.yml --hyperparams.batch_size_per_gpu=8 --stop-at 100\n";

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
} request;

/* Where lines go: the terminal, the run's log file, and the file of --log_to_file. */
typedef struct {
    bool terminal;
    int drawn; /* length of the status line that stands on the terminal */
    int64_t log_interval;
    double began;
    FILE *rank_log, *tee;
} view;

static volatile sig_atomic_t stop_requested;

static void on_signal(int number)
{
    (void)number;
    stop_requested = 1;
}

/* The first signal asks for a save, a second one ends the process at once. A reader of our output that goes away ends
 * nothing. */
static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void erase(view *v)
{
    if (v->drawn)
        printf("\r%*s\r", v->drawn, "");
    v->drawn = 0;
}

/* "2026-01-31 12:00:00,123 - [rank0] - INFO - text", the reference's form. */
static void print_line(view *v, const char *level, const char *text)
{
    struct timespec now;
    struct tm local;
    char stamp[64], line[LINE * 2];
    clock_gettime(CLOCK_REALTIME, &now);
    localtime_r(&now.tv_sec, &local);
    strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &local);
    snprintf(line, sizeof line, "%s,%03ld - [rank0] - %s - %s\n", stamp, now.tv_nsec / 1000000, level, text);
    erase(v);
    if (v->terminal)
        printf("%s%s\n", strcmp(level, "INFO") ? "warning: " : "", text);
    else
        fputs(line, stdout);
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        FILE *file = i ? v->tee : v->rank_log;
        if (file) {
            fputs(line, file);
            fflush(file);
        }
    }
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
        int n = (int)strlen(line);
        printf("\r%s%*s", line, v->drawn > n ? v->drawn - n : 0, "");
        fflush(stdout);
        v->drawn = n;
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

/* A, B and C of "A,B,C". */
static void split_names(request *q, const char *text)
{
    size_t n = 0;
    char *rest;
    snprintf(q->allow_text, sizeof q->allow_text, "%s", text);
    for (char *name = strtok_r(q->allow_text, ",", &rest); name && n < NAMES; name = strtok_r(NULL, ",", &rest))
        q->allow[n++] = name;
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
        {"--stop-at", ARG_COUNT, &q->stop_at},  {"--numerics", ARG_TEXT, &numerics},
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
    if (allow)
        split_names(q, allow);
    if (!room || !q->config) {
        fprintf(stderr, "vla train: %s\n  hint: vla train --help has examples\n",
                !room ? "too many or too long arguments" : "--config FILE is required");
        return EXIT_USAGE;
    }
    return -1;
}

/* ---- the run ---- */

static bool has_checkpoint(const char *run)
{
    vla_error err = VLA_ERROR_INIT;
    vla_checkpoint *c;
    if (!vlai_is_dir(run) || vla_checkpoint_open(run, &c, &err) != VLA_OK)
        return false;
    vla_checkpoint_close(c);
    return true;
}

/* The configuration, with --resume turned into checkpoint.resume_from. */
static vla_status load_config(request *q, vlai_config **out, vla_error *err)
{
    vla_status status = vlai_config_load(q->config, q->overrides, q->override_count, out, err);
    if (status != VLA_OK || !q->resume)
        return status;
    const char *from = q->resume;
    char *run = NULL;
    if (!strcmp(from, "auto")) {
        if (!has_checkpoint((*out)->checkpoint.save_path))
            return VLA_OK;
        from = run = vlai_strdup((*out)->checkpoint.save_path);
    }
    vlai_config_destroy(*out);
    *out = NULL;
    if (from)
        add_override(q, "checkpoint.resume_from", from);
    vlai_free(run);
    return vlai_config_load(q->config, q->overrides, q->override_count, out, err);
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
    v->rank_log = open_log(c->checkpoint.save_path, "logs", "rank_0.log");
    localtime_r(&now, &local);
    strftime(name, sizeof name, "training_log_%Y%m%d_%H%M%S.log", &local);
    if (q->log_to_file)
        v->tee = open_log(c->checkpoint.save_path, ".", name);
}

static void say_start(view *v, const vlai_config *c, const vlai_wallx_setup *s)
{
    const vla_dataset_info *info = vla_dataset_info_get(s->set);
    vlai_text text = {0};
    vlai_text_printf(&text, "vla %s, configuration %s, run folder %s\n", VLA_VERSION, c->path, c->checkpoint.save_path);
    vlai_text_printf(&text, "seed %" PRId64 "\n", c->hyperparams.seed);
    vlai_text_printf(&text, "LeRobot Data Loading Configuration: %s (%s, digest %s), %" PRId64 " of %" PRId64
                     " episodes, %" PRId64 " training samples (%" PRId64 " episodes), %" PRId64 " validation samples (%" PRId64
                     " episodes), batch %" PRId64 " x accumulation %" PRId64 ", %" PRId64 " workers\n",
                     info->root, info->version, info->digest, info->episodes, info->total_episodes, s->samples.count,
                     s->train_episodes, s->validation.count, s->validation_episodes, s->options.batch,
                     s->options.accumulation, s->options.workers);
    vlai_text_printf(&text, "processor vocab size: %" PRId64 ", embedding rows: %" PRId64 "\n", s->contract->vocabulary,
                     s->config->vocab_size);
    vlai_switches_describe(c, strcmp(s->options.device, "cpu") ? "cuda" : "cpu", s->options.world, &text);
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
static void say_short(view *v, const vlai_config *config)
{
    vlai_preflight p;
    vla_error inner = VLA_ERROR_INIT;
    vlai_text text = {0};
    if (vlai_preflight_run(config, &p, &inner) != VLA_OK)
        return;
    vlai_preflight_memory(&p, &text);
    if (text.data)
        print_lines(v, text.data);
    vlai_text_fini(&text);
    vlai_preflight_fini(&p);
}

static vla_status train(view *v, const request *q, const vlai_config *config, vla_error *err)
{
    vlai_wallx_task *task;
    vla_trainer *trainer = NULL;
    double began = vlai_now();
    vla_status status = vlai_wallx_task_open(config, &task, err);
    if (status != VLA_OK)
        return status;
    const vlai_wallx_setup *s = vlai_wallx_task_setup(task);
    say_start(v, config, s);
    vla_trainer_options o = s->options;
    if (o.timing) {
        char line[64];
        snprintf(line, sizeof line, "start: %.2f s data set and configuration", vlai_now() - began);
        print_line(v, "INFO", line);
    }
    o.allow_change = q->allow[0] ? q->allow : NULL;
    o.stop_at = q->stop_at;
    o.stop = &stop_requested;
    o.report = on_record;
    o.report_user = v;
    status = vla_trainer_create(&s->model, &s->samples, &s->validation, &o, &trainer, err);
    char path[PATH];
    if (status == VLA_OK && vlai_path_join(path, sizeof path, o.run, "config.resolved.json"))
        status = vlai_config_save(config, path, err);
    if (status == VLA_OK && (o.steps == 0 || vla_trainer_steps_done(trainer) < o.steps))
        status = say_memory(v, trainer, err);
    if (status == VLA_OK)
        status = vla_trainer_run(trainer, err);
    if (v->drawn)
        puts(""); /* the last status line stays */
    v->drawn = 0;
    vla_trainer_destroy(trainer);
    vlai_wallx_task_close(task);
    if (status == VLA_E_DEVICE_NOMEM)
        say_short(v, config);
    if (status == VLA_OK || status == VLA_E_CANCELLED || status == VLA_E_NONFINITE)
        write_report(v, o.run);
    return status;
}

int command_train(int argc, char **argv)
{
    static request q; /* too large for a stack frame */
    view v = {.terminal = isatty(STDOUT_FILENO)};
    vla_error err = VLA_ERROR_INIT;
    vlai_config *config = NULL;
    q = (request){0};
    int code = parse(argc, argv, &q);
    if (code >= 0)
        return code;
    const char *world = getenv("WORLD_SIZE");
    if (world && atoi(world) > 1) {
        fprintf(stderr, "vla train: WORLD_SIZE is %s: one rank trains, and each of these would train alone\n"
                        "  hint: start one process without WORLD_SIZE\n", world);
        return EXIT_USAGE;
    }
    catch_signals();
    vla_status status = load_config(&q, &config, &err);
    if (status == VLA_OK) {
        v.log_interval = config->logging.log_interval;
        open_logs(&v, &q, config);
        vla_log_set(on_log, &v, VLA_LOG_INFO);
        for (size_t i = 0; i < config->notice_count; i++)
            print_line(&v, "INFO", config->notices[i]);
        status = train(&v, &q, config, &err);
        if (status != VLA_OK && status != VLA_E_CANCELLED) {
            char line[LINE * 2];
            snprintf(line, sizeof line, "Training failed with error: %.1000s", err.message);
            print_line(&v, "ERROR", line);
        }
        vla_log_set(NULL, NULL, VLA_LOG_INFO);
    }
    vlai_config_destroy(config);
    if (v.rank_log)
        fclose(v.rank_log);
    if (v.tee)
        fclose(v.tee);
    return status == VLA_OK ? EXIT_DONE : command_fail("train", &err);
}
