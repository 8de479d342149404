/* vla convert: rewrites a Wall-X or Qwen2.5-VL checkpoint in the fused or the unfused layout. */
#include "args.h"
#include "command.h"
#include "interrupt.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "ckpt/ckpt.h"
#include "format/safetensors.h"
#include "model/wallx_layout.h"
#include "vla/checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const char help[] =
    "Usage: vla convert SOURCE TARGET [--to fused|unfused] [--config FILE] [--partial]\n\n"
    "Rewrites the weights of SOURCE (a safetensors file, an index, a folder, or a run folder: its newest whole\n"
    "checkpoint) as TARGET: a file if it ends in .safetensors, else a folder with model.safetensors and config.json,\n"
    "which replace what lies there. Each tensor is taken in whatever spelling it has: fused or not, names of wall-x or of\n"
    "Qwen2.5-VL. Normaliser statistics are carried over.\n\n"
    "  --to fused     q, k and v in one tensor, gate and up in one, as wall-x saves them (default)\n"
    "  --to unfused   each in its own\n"
    "  --config FILE  architecture; default: config.json beside the weights\n"
    "  --partial      write what is there even if tensors are missing, as they are in a Qwen2.5-VL checkpoint\n\n"
    "Examples:\n"
    "  vla convert wall-oss-0.5 fused --to fused\n"
    "  vla convert Qwen2.5-VL-3B-Instruct start.safetensors --config configs/wall-oss-0.5/config.json --partial\n";

typedef struct options {
    const char *source, *target, *config;
    bool unfused, partial;
} options;

/* A tensor of the target and the stored pieces that it is made of, row by row. */
typedef struct piece {
    const uint8_t *data;
    size_t bytes;
} piece;

typedef struct output {
    char name[192];
    piece pieces[3];
    int piece_count;
} output;

typedef struct job {
    vlai_tensor_view *views;
    output *outputs;
    size_t count, view_capacity, output_capacity;
} job;

static vla_status add_output(job *j, const char *name, vla_dtype dtype, int rank, const int64_t *shape, vla_error *err)
{
    VLA_TRY(vlai_reserve((void **)&j->views, &j->view_capacity, j->count, sizeof *j->views, err));
    VLA_TRY(vlai_reserve((void **)&j->outputs, &j->output_capacity, j->count, sizeof *j->outputs, err));
    vlai_tensor_view *v = &j->views[j->count];
    output *o = &j->outputs[j->count];
    *v = (vlai_tensor_view){.dtype = dtype, .rank = rank, .elements = 1};
    *o = (output){.piece_count = 0};
    snprintf(o->name, sizeof o->name, "%s", name);
    memcpy(v->shape, shape, sizeof v->shape);
    j->count++;
    return VLA_OK;
}

static void add_piece(job *j, const void *data, size_t bytes)
{
    output *o = &j->outputs[j->count - 1];
    o->pieces[o->piece_count++] = (piece){data, bytes};
    j->views[j->count - 1].bytes += bytes;
}

static vla_status plan_weight(job *j, const vlai_wallx_weight *w, const vlai_wallx_source *s, bool unfused, vla_error *err)
{
    const vlai_tensor_view *first = s->parts[0];
    for (int p = 1; p < s->count; p++)
        if (s->parts[p]->dtype != first->dtype)
            return vlai_fail(err, VLA_E_DTYPE, "%s: tensors '%s' (%s) and '%s' (%s) belong together and differ in type",
                             first->file, first->name, vla_dtype_name(first->dtype), s->parts[p]->name,
                             vla_dtype_name(s->parts[p]->dtype));
    if (!unfused || w->part_count == 1) {
        VLA_TRY(add_output(j, w->name, first->dtype, w->rank, w->shape, err));
        for (int p = 0; p < s->count; p++)
            add_piece(j, s->parts[p]->data, s->parts[p]->bytes);
        return VLA_OK;
    }
    size_t row = first->bytes / (size_t)first->shape[0]; /* no weight has zero rows */
    const uint8_t *data = first->data;
    for (int p = 0; p < w->part_count; p++) {
        char name[192];
        int64_t shape[VLAI_MAX_RANK];
        memcpy(shape, w->shape, sizeof shape);
        shape[0] = w->part_rows[p];
        vlai_wallx_part_name(w, p, name, sizeof name);
        VLA_TRY(add_output(j, name, first->dtype, w->rank, shape, err));
        add_piece(j, s->count > 1 ? s->parts[p]->data : data, row * (size_t)shape[0]);
        data += row * (size_t)shape[0];
    }
    return VLA_OK;
}

static vla_status put_output(void *context, size_t i, vlai_writer *writer, vla_error *err)
{
    const output *o = &((const job *)context)->outputs[i];
    for (int p = 0; p < o->piece_count; p++)
        VLA_TRY(vlai_writer_put(writer, o->pieces[p].data, o->pieces[p].bytes, err));
    return VLA_OK;
}

static vla_status plan(job *j, const vlai_wallx_layout *l, bool unfused, vla_error *err)
{
    for (size_t i = 0; i < l->count; i++)
        if (vlai_wallx_layout_has(l, i))
            VLA_TRY(plan_weight(j, &l->weights[i], &l->sources[i], unfused, err));
    for (size_t i = 0; i < l->report.statistics.count; i++) {
        const vlai_tensor_view *v = vlai_safetensors_find(l->st, l->report.statistics.names[i]);
        VLA_TRY(add_output(j, v->name, v->dtype, v->rank, v->shape, err));
        add_piece(j, v->data, v->bytes);
    }
    for (size_t i = 0; i < j->count; i++) /* the array has stopped moving */
        j->views[i].name = j->outputs[i].name;
    return j->count ? VLA_OK : vlai_fail(err, VLA_E_NOT_FOUND, "the source holds no tensor of this architecture");
}

/* config.json beside the weights, unless one was named. */
static vla_status find_config(const options *o, char *out, size_t size, vla_error *err)
{
    char dir[4096];
    if (o->config)
        return snprintf(out, size, "%s", o->config) < (int)size
                   ? VLA_OK
                   : vlai_fail(err, VLA_E_INVALID, "%s: path too long", o->config);
    snprintf(dir, sizeof dir, "%s", o->source);
    if (!vlai_is_dir(dir)) {
        char *slash = strrchr(dir, '/');
        snprintf(slash ? slash : dir, 3, slash ? "/" : ".");
    }
    if (!vlai_path_join(out, size, dir, "config.json") || !vlai_is_file(out))
        return vlai_fail_hint(err, VLA_E_NOT_FOUND, "name one with --config", "%s: no config.json beside the weights", o->source);
    return VLA_OK;
}

static void print_names(const char *what, const vlai_wallx_names *list)
{
    for (size_t i = 0; i < list->count; i++)
        printf("%s %s\n", what, list->names[i]);
}

/* What is written under another name until it is whole goes with a signal, unless the folder around it does. */
static vla_status write_weights(const char *path, bool in_made, job *j, vla_error *err)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    char temporary[4096];
    if (!in_made && vlai_temporary_file(path, temporary, sizeof temporary))
        interrupt_removes(temporary);
    return vlai_safetensors_stream(path, j->views, j->count, metadata, put_output, j, err);
}

/* The files of a training's checkpoint are listed with their checksums: another one in their place makes it one that cannot be resumed. */
static vla_status spare_checkpoint(const char *target, bool is_file, vla_error *err)
{
    char dir[4096], done[4096];
    snprintf(dir, sizeof dir, "%s", target);
    char *slash = strrchr(dir, '/');
    if (is_file && slash)
        *slash = 0;
    else if (is_file)
        snprintf(dir, sizeof dir, ".");
    if (vlai_path_join(done, sizeof done, dir, VLAI_CKPT_DONE) && vlai_is_file(done))
        return vlai_fail_hint(err, VLA_E_INVALID, "write to another folder, and keep the checkpoint to resume from",
                              "%s: a checkpoint of a training lies there, which would be damaged", target);
    return VLA_OK;
}

static vla_status write_target(const options *o, job *j, const char *config, vla_error *err)
{
    char path[4096], copy[4096], *text;
    size_t n = strlen(o->target), size;
    bool is_file = n > 12 && !strcmp(o->target + n - 12, ".safetensors");
    VLA_TRY(spare_checkpoint(o->target, is_file, err));
    if (is_file)
        return write_weights(o->target, false, j, err);
    if (!vlai_path_join(path, sizeof path, o->target, "model.safetensors") ||
        !vlai_path_join(copy, sizeof copy, o->target, "config.json"))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", o->target);
    VLA_TRY(vlai_read_file(config, 0, &text, &size, err)); /* before anything is written: it may lie in the target */
    struct stat there;
    bool made = lstat(o->target, &there) != 0 && errno == ENOENT;
    if (made)
        interrupt_removes(o->target); /* before it is made, so that no signal finds it between the two */
    interrupt_yield();
    vla_status status = vlai_mkdirs(o->target, err);
    if (status != VLA_OK) { /* what is there in its place stays */
        interrupt_keeps();
        vlai_free(text);
        return status;
    }
    status = write_weights(path, made, j, err);
    if (status == VLA_OK)
        status = vlai_write_file_atomic(copy, text, size, err);
    vlai_free(text);
    interrupt_keeps();
    if (status != VLA_OK && made)
        vlai_remove_tree(o->target, NULL);
    return status;
}

static vla_status convert_layout(const options *o, const vlai_wallx_layout *l, const char *config, vla_error *err)
{
    print_names("missing", &l->report.missing);
    print_names("absent (optional)", &l->report.absent);
    print_names("unexpected", &l->report.unexpected);
    print_names("of another shape", &l->report.reshaped);
    if (!o->partial || l->report.reshaped.count || l->report.unexpected.count)
        VLA_TRY(vlai_wallx_layout_require(l, err));
    job j = {0};
    vla_status status = plan(&j, l, o->unfused, err);
    if (status == VLA_OK)
        status = write_target(o, &j, config, err);
    if (status == VLA_OK)
        printf("%zu tensors read (%zu renamed, %zu joined from parts), %zu written to %s, %s\n",
               vlai_safetensors_count(l->st), l->report.renamed, l->report.joined, j.count, o->target,
               o->unfused ? "unfused" : "fused");
    vlai_free(j.views);
    vlai_free(j.outputs);
    return status;
}

/* A run folder holds no weights itself: those of its newest whole checkpoint are meant. */
static vla_status find_source(options *o, char *out, size_t size, vla_error *err)
{
    char path[4096];
    vla_checkpoint *c;
    if (!vlai_is_dir(o->source) || !vlai_path_join(path, sizeof path, o->source, "metrics.jsonl") || !vlai_is_file(path))
        return VLA_OK;
    VLA_TRY(vla_checkpoint_open(o->source, &c, err));
    bool fits = snprintf(out, size, "%s", vla_checkpoint_path(c)) < (int)size;
    vla_checkpoint_close(c);
    if (!fits)
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", o->source);
    printf("source: %s\n", out);
    o->source = out;
    return VLA_OK;
}

static vla_status convert(options *o, vla_error *err)
{
    char newest[4096];
    if (!vlai_is_dir(o->source) && !vlai_is_file(o->source))
        return vlai_fail_hint(err, VLA_E_NOT_FOUND, "SOURCE is a safetensors file, an index, or a folder that holds one", "%s: no such file or folder",
                              o->source);
    VLA_TRY(find_source(o, newest, sizeof newest, err));
    char path[4096];
    vlai_wallx_config config;
    vlai_safetensors *st = NULL;
    vlai_wallx_weight *weights = NULL;
    vlai_wallx_layout *layout = NULL;
    size_t count;
    vla_status status;
    VLA_TRY(find_config(o, path, sizeof path, err));
    VLA_TRY(vlai_wallx_config_load(path, &config, err));
    VLA_TRY(vlai_safetensors_open(o->source, &st, err));
    config.action_dim = config.propri_dim = 1; /* for a file without an action head; else as stored */
    VLA_TRY_GOTO(vlai_wallx_stored_sizes(st, &config.vocab_size, &config.action_dim, &config.propri_dim, err), done);
    VLA_TRY_GOTO(vlai_wallx_weights(&config, &weights, &count, err), done);
    VLA_TRY_GOTO(vlai_wallx_layout_open(st, weights, count, &layout, err), done);
    status = convert_layout(o, layout, path, err);
done:
    vlai_wallx_layout_close(layout);
    vlai_free(weights);
    vlai_safetensors_close(st);
    return status;
}

int command_convert(int argc, char **argv)
{
    options o = {0};
    const char *to = "fused";
    const arg_row rows[] = {{"--to", ARG_TEXT, &to}, {"--config", ARG_TEXT, &o.config}, {"--partial", ARG_FLAG, &o.partial}};
    args a = {.name = "convert", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .positionals = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    o.unfused = !strcmp(to, "unfused");
    if (!o.unfused && strcmp(to, "fused")) {
        fprintf(stderr, "vla convert: --to '%s': wanted fused or unfused\n", to);
        return EXIT_USAGE;
    }
    if (a.positionals_given != 2) {
        if (a.positionals_given == 0)
            fputs(help, stderr);
        else
            fprintf(stderr, "vla convert: %zu path%s given, wanted two\n  hint: vla convert SOURCE TARGET\n", a.positionals_given,
                    a.positionals_given == 1 ? " was" : "s were");
        return EXIT_USAGE;
    }
    o.source = a.positional[0];
    o.target = a.positional[1];
    vla_error err = VLA_ERROR_INIT;
    return convert(&o, &err) == VLA_OK ? EXIT_DONE : command_fail("convert", &err);
}
