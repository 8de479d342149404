/* A tiny Wall-X run for tests of the program: data set, model, statistics and configuration in one temporary folder, all
 * made by `vla` itself. Needs VLA_TEST_PROGRAM. */
#ifndef TINY_H
#define TINY_H

#include "folder.h"

#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Starts the program in the temporary folder with its output in `log`. Arguments are split at spaces. `environment`:
 * "A=1 B=2" or NULL. */
static inline pid_t tiny_start(const char *environment, const char *arguments, const char *log)
{
    pid_t child = fork();
    if (child != 0)
        return child;
    char command[8192], *words[256], *rest;
    int n = 0;
    snprintf(command, sizeof command, "%s %s", VLA_TEST_PROGRAM, arguments);
    for (char *w = strtok_r(command, " ", &rest); w && n < 255; w = strtok_r(NULL, " ", &rest))
        words[n++] = w;
    words[n] = NULL;
    char variables[1024] = "";
    if (environment)
        snprintf(variables, sizeof variables, "%s", environment);
    for (char *w = strtok_r(variables, " ", &rest); w; w = strtok_r(NULL, " ", &rest)) {
        char *equals = strchr(w, '=');
        if (!equals)
            _exit(125);
        *equals = 0;
        setenv(w, equals + 1, 1);
    }
    int fd = open(at(log), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0 || chdir(root) != 0)
        _exit(126);
    signal(SIGHUP, SIG_DFL); /* whatever the tests were started by */
    execv(words[0], words);
    _exit(127);
}

static inline int tiny_wait(pid_t child)
{
    int how;
    while (waitpid(child, &how, 0) < 0 && errno == EINTR)
        ;
    return WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
}

static inline int tiny_run(const char *environment, const char *arguments)
{
    return tiny_wait(tiny_start(environment, arguments, "log"));
}

static inline char *tiny_read(const char *name, size_t *size)
{
    vla_error err = VLA_ERROR_INIT;
    char *text;
    size_t n;
    assert_ok(vlai_read_file(at(name), 0, &text, &n, &err), err);
    if (size)
        *size = n;
    return text;
}

/* The end of a text, as much as a message of cmocka has room for. */
static inline const char *tiny_end(const char *text)
{
    size_t n = strlen(text);
    return n > 700 ? text + n - 700 : text;
}

/* The output of the last tiny_run holds `part`. */
static inline void tiny_said(const char *part)
{
    char *text = tiny_read("log", NULL);
    if (!strstr(text, part))
        fail_msg("the output lacks '%s':\n%s", part, tiny_end(text));
    vlai_free(text);
}

static inline void tiny_must(const char *arguments)
{
    int code = tiny_run(NULL, arguments);
    if (code != 0) {
        char *text = tiny_read("log", NULL);
        fail_msg("vla %s: code %d\n%s", arguments, code, tiny_end(text));
    }
}

static inline bool tiny_equal(const char *a, const char *b)
{
    size_t n, m;
    char *x = tiny_read(a, &n), *y = tiny_read(b, &m);
    bool same = n == m && memcmp(x, y, n) == 0;
    vlai_free(x);
    vlai_free(y);
    return same;
}

static const char tiny_yaml[] =
    "model_type: qwen2_5\n"
    "task:\n"
    "  dof_config: {ee_position: 2, gripper: 1}\n"
    "  agent_pos_config: {ee_position: 2, gripper: 1}\n"
    "  action_horizon: 4\n"
    "  use_state_string_representation: true\n"
    "model:\n"
    "  config_path: start/config.json\n"
    "  processor_path: start\n"
    "data:\n"
    "  lerobot_config: {repo_id: set}\n"
    "  key_mappings:\n"
    "    camera: {observation.images.image: face_view, observation.images.wrist_image: right_wrist_view}\n"
    "    state: observation.state\n"
    "    action: action\n"
    "  norm_stats_path: norm_stats.json\n"
    "  train_test_split: 0.8\n"
    "  num_workers: 2\n"
    "  resolution: {face_view: 56, right_wrist_view: 56}\n"
    "hyperparams:\n"
    "  num_epoch: 100\n"
    "  batch_size_per_gpu: 4\n"
    "  seed: 7\n"
    "  optimizer: {learning_rate: 1.0e-3, betas: [0.9, 0.95]}\n"
    "  scheduler: {num_warmup_steps: 3, num_training_steps: 20}\n"
    "logging: {use_wandb: false, save_interval: 1000, val_interval: 10, epoch_save_interval: 1000}\n"
    "training: {threads: 2}\n"
    "checkpoint:\n"
    "  save_path: ${SAVE_PATH:-run}\n"
    "  resume_from: start/model.safetensors\n";

static inline int tiny_make(void **state)
{
    vla_error err = VLA_ERROR_INIT;
    if (make_root(state) != 0)
        return -1;
    if (vlai_write_file_atomic(at("tiny.yml"), tiny_yaml, sizeof tiny_yaml - 1, &err) != VLA_OK)
        return -1;
    static const char *const steps[] = {
        "synth set --episodes 10 --length 8:11 --size 64x64 --state-dim 3 --action-dim 3",
        "norm-stats --train_config tiny.yml",
        "init start --preset demo --train-config tiny.yml --hidden 32 --layers 2 --intermediate 48 --action-hidden 16 "
        "--action-intermediate 24 --vision-hidden 32 --vision-intermediate 48",
    };
    for (int i = 0; i < 3; i++)
        if (tiny_run(NULL, steps[i]) != 0) {
            char *text = tiny_read("log", NULL);
            fprintf(stderr, "vla %s:\n%s\n", steps[i], text);
            vlai_free(text);
            return -1;
        }
    return 0;
}

#endif
