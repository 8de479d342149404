/* vla init: writes a model with random weights, its architecture and its processor. */
#include "args.h"
#include "command.h"
#include "interrupt.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"
#include "base/time.h"
#include "model/wallx_init.h"
#include "text/prompt.h"
#include "train/config.h"
#include "vla/dataset.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla init OUT [options]\n\n"
    "Writes the new folder OUT: config.json (the architecture), model.safetensors with random weights, and the processor\n"
    "(tokenizer.json, tokenizer_config.json, preprocessor_config.json). It serves as model.config_path,\n"
    "model.processor_path and checkpoint.resume_from of a training configuration. Matrices are drawn from\n"
    "normal(0, initializer_range), biases are 0, norm weights 1; the same options and seed give the same bytes.\n\n"
    "  --preset demo|full        sizes of a model that learns the data of vla synth in minutes on two cores (demo), or of\n"
    "                            wall-oss-0.5 with 4.15 billion parameters\n"
    "  --config FILE             sizes from an architecture file instead, or from a folder's config.json\n"
    "  --hidden N --layers N --heads N --kv-heads N --intermediate N     language expert\n"
    "  --action-hidden N --action-intermediate N                         action expert\n"
    "  --vision-hidden N --vision-depth N --vision-heads N --vision-intermediate N --vision-full-every N\n"
    "  --patch N --merge N --window N                                    pixels of a patch, patches merged, window\n"
    "  --rope-theta X                                                    base of the rotary frequencies\n"
    "                            each replaces one size of the preset\n"
    "  --train-config FILE       widths of actions and state (task.dof_config, task.agent_pos_config) and, for the\n"
    "                            vocabulary, camera names and the data set's instructions, as far as they can be read\n"
    "  --action-dim N --state-dim N    these widths (7, 8)\n"
    "  --processor DIR           copies the processor from there (for weights of Qwen's vocabulary)\n"
    "  --merges N                without --processor: tokens beside the single bytes (300)\n"
    "  --vocab N                 embedding rows (as the architecture says; demo: as many as the vocabulary has)\n"
    "  --initializer-range X     standard deviation of the weights\n"
    "  --dtype fp32|bf16         bf16 keeps norms and action head in fp32 (fp32)\n"
    "  --shard-gb X              several files of at most X GB and an index\n"
    "  --seed N                  (0)\n"
    "  --threads N               (0: all processors)\n"
    "  --dry-run                 lists tensors and bytes and writes nothing; OUT may be left out\n\n"
    "Examples:\n"
    "  vla init start --preset demo --train-config configs/demo.yml\n"
    "  vla init full --preset full --processor Qwen2.5-VL-3B-Instruct --dtype bf16 --shard-gb 5 --action-dim 26 --state-dim 26\n"
    "  vla init --preset full --dry-run\n"
    "  vla init mid --preset demo --hidden 512 --layers 8 --heads 8 --intermediate 2048 --action-hidden 256\n";

typedef enum kind { INTEGER, UNSIGNED, REAL, TEXT, FLAG, DTYPE, THREADS } kind;

typedef struct arguments {
    vlai_wallx_init_options o;
    const char *preset, *train;
    int64_t threads, merges;
    bool sized; /* a size was given */
} arguments;

static const struct {
    const char *name;
    kind kind;
    size_t offset;
} rows[] = {
#define AT(field) offsetof(arguments, field)
    {"--hidden", INTEGER, AT(o.sizes.hidden)},
    {"--layers", INTEGER, AT(o.sizes.layers)},
    {"--heads", INTEGER, AT(o.sizes.heads)},
    {"--kv-heads", INTEGER, AT(o.sizes.kv_heads)},
    {"--intermediate", INTEGER, AT(o.sizes.intermediate)},
    {"--action-hidden", INTEGER, AT(o.sizes.action_hidden)},
    {"--action-intermediate", INTEGER, AT(o.sizes.action_intermediate)},
    {"--vision-hidden", INTEGER, AT(o.sizes.vision_hidden)},
    {"--vision-depth", INTEGER, AT(o.sizes.vision_depth)},
    {"--vision-heads", INTEGER, AT(o.sizes.vision_heads)},
    {"--vision-intermediate", INTEGER, AT(o.sizes.vision_intermediate)},
    {"--vision-full-every", INTEGER, AT(o.sizes.vision_full_every)},
    {"--patch", INTEGER, AT(o.sizes.patch)},
    {"--merge", INTEGER, AT(o.sizes.merge)},
    {"--window", INTEGER, AT(o.sizes.window)},
    {"--rope-theta", REAL, AT(o.sizes.theta)},
    {"--action-dim", INTEGER, AT(o.action_dim)},
    {"--state-dim", INTEGER, AT(o.state_dim)},
    {"--vocab", INTEGER, AT(o.vocab)},
    {"--merges", INTEGER, AT(merges)},
    {"--threads", INTEGER, AT(threads)},
    {"--seed", UNSIGNED, AT(o.seed)},
    {"--initializer-range", REAL, AT(o.range)},
    {"--shard-gb", REAL, AT(o.shard_gb)},
    {"--preset", TEXT, AT(preset)},
    {"--config", TEXT, AT(o.config)},
    {"--train-config", TEXT, AT(train)},
    {"--processor", TEXT, AT(o.processor)},
    {"--dtype", DTYPE, AT(o.dtype)},
    {"--dry-run", FLAG, AT(o.dry)},
#undef AT
};
enum { ROWS = sizeof rows / sizeof *rows };

static vla_status set(arguments *a, int row, const char *value, vla_error *err)
{
    size_t offset = rows[row].offset, first = offsetof(arguments, o.sizes);
    void *to = (char *)a + offset;
    char *end = NULL;
    errno = 0;
    a->sized |= offset >= first && offset < first + sizeof a->o.sizes;
    switch (rows[row].kind) {
    case INTEGER:
        *(int64_t *)to = strtoll(value, &end, 10);
        break;
    case UNSIGNED:
        *(uint64_t *)to = strtoull(value, &end, 10);
        if (strchr(value, '-')) /* which strtoull takes, and wraps around */
            end = NULL;
        break;
    case REAL:
        *(double *)to = strtod(value, &end);
        if (!isfinite(*(double *)to) || *(double *)to <= 0)
            end = NULL;
        break;
    case DTYPE:
        a->o.dtype = !strcmp(value, "bf16") ? VLA_BF16 : VLA_F32;
        if (strcmp(value, "bf16") != 0 && strcmp(value, "fp32") != 0)
            return vlai_fail(err, VLA_E_INVALID, "--dtype: '%s' is not fp32 or bf16", value);
        return VLA_OK;
    default:
        if (!*value)
            return vlai_fail(err, VLA_E_INVALID, "%s: wanted a value that is not empty", rows[row].name);
        *(const char **)to = value;
        return VLA_OK;
    }
    if (!end || end == value || *end || errno)
        return vlai_fail(err, VLA_E_INVALID, "%s: '%s' is not a %s", rows[row].name, value,
                         rows[row].kind == REAL ? "number above 0" : "whole number");
    return VLA_OK;
}

/* The sizes that the preset gives, before the options replace some of them. */
static vla_status preset(arguments *a, int argc, char **argv, vla_error *err)
{
    static const vlai_wallx_sizes demo = VLAI_WALLX_SIZES_DEMO, full = VLAI_WALLX_SIZES_FULL;
    const char *value;
    for (int i = 1; i < argc; i++)
        if (args_match(argv[i], "--preset", &value) && (value || i + 1 < argc))
            a->preset = value ? value : argv[i + 1];
    if (a->preset && strcmp(a->preset, "demo") != 0 && strcmp(a->preset, "full") != 0)
        return vlai_fail(err, VLA_E_INVALID, "--preset: '%s' is not demo or full", a->preset);
    bool is_full = a->preset && !strcmp(a->preset, "full");
    a->o.sizes = is_full ? full : demo;
    if (is_full) /* the layout that wall-oss-0.5 was trained with */
        a->o.action_dim = a->o.state_dim = 26;
    return VLA_OK;
}

static vla_status parse(arguments *a, int argc, char **argv, int *unknown, vla_error *err)
{
    VLA_TRY(preset(a, argc, argv, err));
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') {
            if (a->o.out)
                return vlai_fail(err, VLA_E_INVALID, "'%s' and '%s': wanted one folder", a->o.out, argv[i]);
            a->o.out = argv[i];
            continue;
        }
        int row = 0;
        const char *value = NULL;
        while (row < ROWS && !args_match(argv[i], rows[row].name, &value))
            row++;
        if (row == ROWS) {
            *unknown = i;
            return VLA_OK;
        }
        if (rows[row].kind == FLAG) {
            if (value)
                return vlai_fail(err, VLA_E_INVALID, "%s takes no value, and '%s' was given", rows[row].name, value);
            a->o.dry = true;
            continue;
        }
        if (!value && i + 1 == argc)
            return vlai_fail(err, VLA_E_INVALID, "%s needs a value", argv[i]);
        VLA_TRY(set(a, row, value ? value : argv[++i], err));
    }
    if (a->o.config && (a->preset || a->sized))
        return vlai_fail(err, VLA_E_INVALID, "--config gives all sizes; --preset and single sizes go without it");
    if (!a->o.config && !a->preset && !a->sized)
        return vlai_fail_hint(err, VLA_E_INVALID, "vla init OUT --preset demo, or --config FILE", "no architecture was chosen");
    if (!a->o.out && !a->o.dry)
        return vlai_fail_hint(err, VLA_E_INVALID, "vla init OUT [options]", "no folder to write to");
    const struct {
        const char *name;
        int64_t value, most;
    } counts[] = {{"--merges", a->merges, 100000}, {"--threads", a->threads, 4096}, {"--vocab", a->o.vocab, 1 << 28}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].value < 0 || counts[i].value > counts[i].most)
            return vlai_fail(err, VLA_E_INVALID, "%s: %" PRId64 ", wanted 0 to %" PRId64, counts[i].name, counts[i].value, counts[i].most);
    a->o.merges = (size_t)a->merges;
    a->o.threads = (int)a->threads;
    if (!a->o.out)
        a->o.out = "/tmp/vla-init"; /* its temporary twin holds the processor while sizes are counted */
    return VLA_OK;
}

/* ---- texts for the vocabulary ---- */

static const char *const default_tasks[] = {"move to the red goal", "move to the green goal", "move to the blue goal",
                                            "pick up the object and place it", "open the drawer"};
static const char *const default_views[] = {"face view", "left wrist view", "right wrist view"};

typedef struct texts {
    vlai_text *items;
    const char **pointers;
    size_t count; /* of items; there are twice as many pointers */
} texts;

static void texts_fini(texts *t)
{
    for (size_t i = 0; i < t->count; i++)
        vlai_text_fini(&t->items[i]);
    vlai_free(t->items);
    vlai_free(t->pointers);
}

/* One prompt per instruction, each given twice: a pair of letters is merged when it stands at least twice, and a word that
 * only one instruction has should become one token too. */
static vla_status make_texts(const char *const *views, size_t view_count, const char *const *tasks, size_t count, int64_t horizon,
                             texts *t, vla_error *err)
{
    t->items = vlai_calloc(count, sizeof *t->items);
    t->pointers = vlai_calloc(2 * count, sizeof *t->pointers);
    if (!t->items || !t->pointers)
        return vlai_nomem(err, count * sizeof *t->items);
    for (t->count = 0; t->count < count; t->count++) {
        vlai_text *text = &t->items[t->count];
        vlai_prompt_template(views, view_count, tasks[t->count], horizon, text);
        vla_status status = vlai_text_status(text, err);
        if (status != VLA_OK) {
            vlai_text_fini(text);
            return status;
        }
        t->pointers[2 * t->count] = t->pointers[2 * t->count + 1] = text->data;
    }
    return VLA_OK;
}

enum { MOST_TASKS = 2000, MOST_VIEWS = 16 };

/* Widths are needed, instructions help: a data set that cannot be read yet leaves the built-in ones. */
static vla_status use_train_config(arguments *a, texts *t, vla_error *err)
{
    vlai_config *config;
    VLA_TRY(vlai_config_load(a->train, NULL, 0, &config, err));
    vla_status status = VLA_OK;
    char root[4096];
    vla_dataset *set = NULL;
    vla_error quiet = VLA_ERROR_INIT;
    const char *views[MOST_VIEWS];
    size_t view_count = 0;
    if (!config->action_dim || !config->propri_dim)
        status = vlai_fail(err, VLA_E_INVALID, "%s: task.%s is required (cannot be empty)", a->train,
                           config->action_dim ? "agent_pos_config" : "dof_config");
    a->o.action_dim = config->action_dim;
    a->o.state_dim = config->propri_dim;
    for (; view_count < config->keys.camera.count && view_count < MOST_VIEWS; view_count++) {
        views[view_count] = config->keys.camera.values[view_count];
        for (size_t i = 0; i < config->data.camera_name_mapping.count; i++)
            if (!strcmp(config->data.camera_name_mapping.names[i], views[view_count]))
                views[view_count] = config->data.camera_name_mapping.values[i];
    }
    bool read = vlai_config_dataset(config, root, sizeof root, &quiet) == VLA_OK &&
                vla_dataset_open(root, NULL, &set, &quiet) == VLA_OK && vla_dataset_info_get(set)->tasks > 0;
    if (read && status == VLA_OK) {
        const char *tasks[MOST_TASKS];
        size_t count = 0;
        for (int64_t i = 0; i < vla_dataset_info_get(set)->tasks && count < MOST_TASKS; i++)
            if (vla_dataset_task_text(set, i)) /* numbers may be missing */
                tasks[count++] = vla_dataset_task_text(set, i);
        status = make_texts(views, view_count, tasks, count, config->task.action_horizon, t, err);
    } else if (status == VLA_OK) {
        status = make_texts(views, view_count, default_tasks, sizeof default_tasks / sizeof *default_tasks,
                            config->task.action_horizon, t, err);
    }
    vla_dataset_close(set);
    vlai_config_destroy(config);
    return status;
}

static void print_tensor(void *user, const char *name, vla_dtype dtype, int rank, const int64_t *shape, size_t bytes)
{
    (void)user;
    char text[64];
    snprintf(text, sizeof text, rank == 1 ? "[%" PRId64 "]" : "[%" PRId64 ", %" PRId64 "]", shape[0], shape[1]);
    printf("%-72s %-4s %-18s %14zu\n", name, vla_dtype_name(dtype), text, bytes);
}

int command_init(int argc, char **argv)
{
    if (argc < 2 || command_help(argc, argv, help))
        return argc < 2 ? fputs(help, stderr), EXIT_USAGE : EXIT_DONE;
    arguments a = {.o = VLAI_WALLX_INIT_DEMO, .merges = 300};
    vla_error err = VLA_ERROR_INIT;
    texts t = {0};
    int unknown = 0;
    vla_status status = parse(&a, argc, argv, &unknown, &err);
    if (unknown) {
        const char *names[ROWS];
        for (int i = 0; i < ROWS; i++)
            names[i] = rows[i].name;
        return command_unknown("init", argv[unknown], names, ROWS);
    }
    if (status == VLA_OK)
        status = a.train ? use_train_config(&a, &t, &err)
                         : make_texts(default_views, 3, default_tasks, sizeof default_tasks / sizeof *default_tasks, 10, &t, &err);
    double start = vlai_now();
    vlai_wallx_init_summary made;
    a.o.texts = t.pointers;
    a.o.text_count = 2 * t.count;
    if (a.o.dry)
        a.o.each = print_tensor;
    char target[4096], temporary[4096];
    if (status == VLA_OK && vlai_temporary_dir(a.o.out, target, temporary, sizeof target))
        interrupt_removes(temporary);
    if (status == VLA_OK)
        status = vlai_wallx_init(&a.o, &made, &err);
    texts_fini(&t);
    if (status != VLA_OK)
        return command_fail("init", &err);
    char where[64] = "nothing written";
    if (!a.o.dry)
        snprintf(where, sizeof where, "written in %.1f s", vlai_now() - start);
    printf("%s%s%zu tensors, %" PRId64 " parameters, %" PRIu64 " bytes in %zu file%s, vocabulary %" PRId64 ", %s\n",
           a.o.dry ? "" : a.o.out, a.o.dry ? "" : ": ", made.tensors, made.parameters, made.bytes, made.files,
           made.files == 1 ? "" : "s", made.vocab, where);
    return EXIT_DONE;
}
