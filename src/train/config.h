/* The configuration of a training run: the YAML (or JSON) file of wall-x, typed and checked.
 *
 * options.h holds one row per key; the structures here expand from it, so `data.num_workers` of the file is
 * `config->data.num_workers`, and nested sections stand beside their parents: `hyperparams.optimizer.learning_rate` is
 * `config->optimizer.learning_rate`, `data.lerobot_config.repo_id` is `config->lerobot.repo_id`, `data.key_mappings` is
 * `config->keys`, `data.noise_scheduler` is `config->noise`.
 *
 *     vlai_config *config;
 *     const char *overrides[] = {"--hyperparams.seed=7"};
 *     VLA_TRY(vlai_config_load("configs/libero.yml", overrides, 1, &config, err));
 *     VLA_TRY(vlai_config_check_training(config, err));   // required keys, paths that exist
 *     for (size_t i = 0; i < config->notice_count; i++) vlai_warn("%s", config->notices[i]);
 *     vlai_config_save(config, "run/config.resolved.json", err);
 *     vlai_config_destroy(config);
 *
 * After loading, values are final: defaults filled in, old places of keys moved, `data.*` winning over `task.*`, min_lr
 * computed. Strings of the file expand ${NAME} and ${NAME:-default}; $${ writes ${. Relative paths are relative to the
 * directory of the process, as in the reference. Everything pointed to belongs to the configuration.
 * Threads: a loaded configuration is read-only and may be shared. */
#ifndef VLAI_CONFIG_H
#define VLAI_CONFIG_H

#include "train/options.h"
#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef struct vlai_dims { /* ordered map of name to integer */
    size_t count;
    const char *const *names;
    const int64_t *values;
} vlai_dims;

typedef struct vlai_words { /* ordered map of name to text */
    size_t count;
    const char *const *names;
    const char *const *values;
} vlai_words;

typedef struct vlai_weights { /* ordered map of name to number */
    size_t count;
    const char *const *names;
    const double *values;
} vlai_weights;

typedef struct vlai_numbers {
    size_t count;
    const double *values;
} vlai_numbers;

typedef struct vlai_texts {
    size_t count;
    const char *const *values;
} vlai_texts;

typedef struct vlai_lr_group {
    const char *name;
    double lr;
    vlai_texts include; /* parts of parameter names */
    bool fail_on_empty;
} vlai_lr_group;

typedef struct vlai_lr_groups {
    size_t count;
    const vlai_lr_group *groups;
} vlai_lr_groups;

/* Values of the CHOICE options, in the order of their names. */
enum { VLAI_PADDING_LEFT, VLAI_PADDING_RIGHT };                              /* data.padding_side */
enum { VLAI_PADDING_PACKED, VLAI_PADDING_REFERENCE };                        /* data.padding */
enum { VLAI_PICTURES_MAPPING, VLAI_PICTURES_FEATURES };                      /* data.picture_order */
enum { VLAI_SPLIT_EPISODE, VLAI_SPLIT_FRAME };                               /* data.validation_split */
enum { VLAI_LOSS_MICRO_BATCH, VLAI_LOSS_GLOBAL };                            /* hyperparams.loss_normalization */
enum { VLAI_OPTIMIZER_ADAMW };                                               /* hyperparams.optimizer.optimizer_type */
enum { VLAI_SCHEDULER_COSINE, VLAI_SCHEDULER_CONSTANT };                     /* hyperparams.scheduler.scheduler_type */
enum { VLAI_NUMERICS_AUTO, VLAI_NUMERICS_FP32, VLAI_NUMERICS_BF16, VLAI_NUMERICS_BF16_SR, VLAI_NUMERICS_BF16_PLAIN }; /* training.numerics */
enum { VLAI_REDUCE_BF16, VLAI_REDUCE_FP32, VLAI_REDUCE_FP16 };                               /* distributed.fsdp_reduce_dtype */
enum { VLAI_GRADIENTS_AUTO, VLAI_GRADIENTS_BF16, VLAI_GRADIENTS_FP32 };                 /* dist.gradient_dtype */
enum { VLAI_RECOMPUTE_NONE, VLAI_RECOMPUTE_CHEAP, VLAI_RECOMPUTE_LAYER, VLAI_RECOMPUTE_AUTO }; /* memory.recompute */

#define VLAI_TYPE_INT int64_t
#define VLAI_TYPE_REAL double
#define VLAI_TYPE_BOOL bool
#define VLAI_TYPE_TEXT const char *
#define VLAI_TYPE_PATH const char *
#define VLAI_TYPE_CHOICE int
#define VLAI_TYPE_DIMS vlai_dims
#define VLAI_TYPE_WORDS vlai_words
#define VLAI_TYPE_WEIGHTS vlai_weights
#define VLAI_TYPE_NUMBERS vlai_numbers
#define VLAI_TYPE_TEXTS vlai_texts
#define VLAI_TYPE_GROUPS vlai_lr_groups
#define VLAI_TYPE_ANY const char *

typedef struct vlai_option_origin {
    const char *file; /* "--key=value" of an override; NULL when the default stands */
    int line;         /* 0 for an override */
} vlai_option_origin;

typedef struct vlai_config_internal vlai_config_internal;

typedef struct vlai_config {
#define VLAI_FIELD(kind, key, ...) VLAI_TYPE_##kind key;
#define VLAI_SECTION(path, member, rows) \
    struct vlai_section_##member {       \
        rows(VLAI_FIELD)                 \
    } member;
    VLAI_SECTIONS(VLAI_SECTION)
#undef VLAI_SECTION
#undef VLAI_FIELD

    /* Computed. */
    int64_t action_dim; /* sum of task.dof_config */
    int64_t propri_dim; /* sum of task.agent_pos_config */
    /* What the reference's model takes from the raw `data` section (default: false, 32), where its data pipeline takes
     * the task's. Here one value counts, task.*; comparisons with recorded results choose these. */
    struct {
        bool use_state_string_representation;
        int64_t action_horizon_flow;
    } reference_model;

    const char *base_group;     /* name of the parameters that no group of lr_groups takes */
    const char *path;           /* the file */
    const char *const *notices; /* one sentence each, for the log */
    size_t notice_count;
    vlai_config_internal *internal;
} vlai_config;

/* `overrides`: "section.key=value", leading dashes allowed; the value is YAML. "section.map.entry=value" sets one entry. */
vla_status vlai_config_load(const char *path, const char *const *overrides, size_t count, vlai_config **out,
                            vla_error *err);
/* The same from memory; `name` stands for the file in messages. */
vla_status vlai_config_parse(const char *data, size_t size, const char *name, const char *const *overrides,
                             size_t count, vlai_config **out, vla_error *err);
void vlai_config_destroy(vlai_config *config);

/* Folder of the data set: `root`, `root`/`repo_id`, `repo_id` itself, or `repo_id` below $HF_LEROBOT_HOME, else
 * $HF_HOME/lerobot, else ~/.cache/huggingface/lerobot; the first of these that holds meta/info.json. */
vla_status vlai_config_dataset(const vlai_config *config, char *out, size_t size, vla_error *err);

/* What training needs beyond a readable file: required keys present, input paths that exist. */
vla_status vlai_config_check_training(const vlai_config *config, vla_error *err);

/* Where a key was set. `key` is its full path; an unknown one gives {NULL, 0}. */
vlai_option_origin vlai_config_origin(const vlai_config *config, const char *key);
/* "file:line: key" for messages about a value, or just the key when its default stands. Returns `buffer`. */
const char *vlai_config_where(const vlai_config *config, const char *key, char *buffer, size_t size);

/* All values as they count, as JSON text in the layout of the YAML file (so that it can be loaded again). Released with
 * vlai_free. */
vla_status vlai_config_dump(const vlai_config *config, char **out, vla_error *err);
/* The same as lines "section.key: value", without the keys that may differ between ranks that train together: the place to
 * compute on, threads, and where frames are cached. Released with vlai_free. */
vla_status vlai_config_common(const vlai_config *config, char **out, vla_error *err);
vla_status vlai_config_save(const vlai_config *config, const char *path, vla_error *err);
/* Text that lists every key with type, default and meaning. `section` limits it (NULL = all). Released with vlai_free. */
vla_status vlai_config_help(const char *section, char **out, vla_error *err);
/* True when an argument has the form of an override: --section.key=value. */
bool vlai_config_is_override(const char *argument);

VLA_END_DECLS

#endif
