/* vla parity: runs golden case folders and prints PASS or FAIL with the worst error of each quantity. */
#include "args.h"
#include "command.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "optim/settings.h"
#include "parity/parity.h"
#include "train/device.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char help[] =
    "Usage: vla parity [--json] [--verbose] [--numerics fp32|bf16|bf16-sr|bf16-plain] [--device cpu|cuda|cuda:N|auto] [--fuse]\n"
    "                  [--draws N] DIR...\n\n"
    "Runs golden cases: folders with a case.json that says what to compute and what the reference computed. A DIR that\n"
    "holds case folders runs all of them. Exit code 0 if every case passed, 3 if one did not.\n\n"
    "  --verbose    one line per tensor\n"
    "  --numerics   of model cases (fp32)\n"
    "  --device     where model cases run (cpu)\n"
    "  --fuse       model cases with fused operations, and with recompute: cheap, which more of them need\n"
    "  --draws N    bf16 model cases: N times more with every weight moved by 2 %, held to fp32 of the same weights; how far off\n"
    "               they are on average, and how many are beyond the bound. The case passes by itself, as ever\n"
    "  --json       one JSON object per case and line: case, pass, quantities with error, bound and worst tensor\n\n"
    "Examples:\n"
    "  vla parity tests/golden\n"
    "  vla parity --verbose tests/golden/wallx-flow-xloss\n";

typedef struct {
    bool json, verbose, fuse;
    int64_t draws, drawn;
    const char *numerics, *device;
    int passed, failed, skipped;
} options;

/* A quantity's errors over the draws. */
typedef struct {
    double sum, squares;
    int n, beyond;
} spread;

enum { QUANTITIES = sizeof ((vlai_parity_case *)0)->quantities / sizeof *((vlai_parity_case *)0)->quantities };

static double mean_of(const spread *s)
{
    return s->sum / s->n;
}

static double deviation_of(const spread *s)
{
    return s->n > 1 ? sqrt(fmax(0, (s->squares - s->sum * s->sum / s->n) / (s->n - 1))) : 0;
}

/* Of quantities with a bound; the others are counts and zeros. */
static bool is_drawn(const vlai_parity_case *c, int i, const spread *of)
{
    return of[i].n > 0 && c->quantities[i].bound > 0;
}

static void print_text(const vlai_parity_case *c, const spread *of, bool pass)
{
    printf("%s %s\n", c->skipped ? "SKIP" : pass ? "PASS" : "FAIL", c->name);
    if (c->note[0])
        printf("    %s\n", c->note);
    for (int i = 0; i < c->count; i++) {
        const vlai_parity_quantity *q = &c->quantities[i];
        printf("    %-4s %-16s worst %.3g of %.3g  (%s, %lld compared)\n", q->pass ? "ok" : "FAIL", q->name, q->error,
               q->bound, q->tensor, (long long)q->tensors);
        if (is_drawn(c, i, of))
            printf("         %d draw%s: %.3g on average, deviation %.2g, %d beyond the bound\n", of[i].n, of[i].n == 1 ? "" : "s", mean_of(&of[i]), deviation_of(&of[i]), of[i].beyond);
    }
}

static json_t *number(double x)
{
    return isfinite(x) ? json_real(x) : json_string(isnan(x) ? "nan" : "inf");
}

static void print_json(const vlai_parity_case *c, const spread *of, bool pass, const char *error)
{
    json_t *quantities = json_object();
    for (int i = 0; i < c->count; i++) {
        const vlai_parity_quantity *q = &c->quantities[i];
        json_object_set_new(quantities, q->name,
                            json_pack("{s:b, s:o, s:o, s:o, s:I}", "pass", q->pass, "error", number(q->error), "bound",
                                      number(q->bound), "tensor", vlai_json_text(q->tensor), "compared", (json_int_t)q->tensors));
        if (is_drawn(c, i, of))
            json_object_set_new(json_object_get(quantities, q->name), "draws",
                                json_pack("{s:i, s:o, s:o, s:i}", "n", of[i].n, "mean", number(mean_of(&of[i])), "deviation",
                                          number(deviation_of(&of[i])), "beyond", of[i].beyond));
    }
    json_t *object = json_pack("{s:o, s:b, s:o}", "case", vlai_json_text(c->name), "pass", pass, "quantities", quantities);
    if (c->skipped)
        json_object_set_new(object, "skipped", vlai_json_text(c->note));
    else if (c->note[0])
        json_object_set_new(object, "note", vlai_json_text(c->note));
    if (error)
        json_object_set_new(object, "error", vlai_json_text(error));
    json_dumpf(object, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(object);
}

/* One draw: the moved weights in fp32, then in the numerics asked for. */
static vla_status run_draw(const char *dir, const options *o, int64_t draw, const vlai_parity_case *c, spread *of, vla_error *err)
{
    vlai_parity_tape tape = {0};
    vla_status status = VLA_OK;
    vlai_parity_case *one = vlai_calloc(1, sizeof *one);
    if (!one)
        return vlai_nomem(err, sizeof *one);
    for (int pass = 0; pass < 2 && status == VLA_OK; pass++) {
        *one = (vlai_parity_case){.numerics = pass ? o->numerics : "fp32", .device = o->device, .fuse = o->fuse, .draw = (uint64_t)draw, .tape = &tape};
        tape.replay = pass > 0;
        status = vlai_parity_run(dir, one, err);
        for (int k = 0; pass && k < one->count; k++)
            for (int i = 0; i < c->count; i++)
                if (!strcmp(c->quantities[i].name, one->quantities[k].name)) {
                    double e = one->quantities[k].error;
                    of[i].sum += e;
                    of[i].squares += e * e;
                    of[i].n++;
                    of[i].beyond += !one->quantities[k].pass;
                }
        vlai_parity_case_fini(one);
    }
    vlai_arena_fini(&tape.arena);
    vlai_free(one);
    return status;
}

static void run_case(const char *dir, options *o)
{
    vla_error err = VLA_ERROR_INIT;
    spread of[QUANTITIES] = {0};
    vlai_parity_case *c = vlai_calloc(1, sizeof *c);
    if (!c) {
        o->failed++;
        return;
    }
    c->verbose = o->verbose && !o->json;
    c->numerics = o->numerics;
    c->device = o->device;
    c->fuse = o->fuse;
    vla_status status = vlai_parity_run(dir, c, &err);
    bool pass = status == VLA_OK && (c->count > 0 || c->skipped);
    for (int i = 0; i < c->count; i++)
        pass = pass && c->quantities[i].pass;
    const char *kind = json_string_value(json_object_get(c->meta, "kind"));
    for (int64_t d = 1; d <= o->draws && kind && !strcmp(kind, "model") && status == VLA_OK && !c->skipped; d++) {
        status = run_draw(dir, o, d, c, of, &err);
        o->drawn++;
        pass = pass && status == VLA_OK;
    }
    if (!c->name[0])
        snprintf(c->name, sizeof c->name, "%s", dir);
    if (o->json)
        print_json(c, of, pass, status == VLA_OK ? NULL : err.message);
    else
        print_text(c, of, pass);
    if (status == VLA_OK && c->count == 0 && !c->skipped)
        fprintf(stderr, "vla parity: %s: nothing was compared: case.json lists no items, or outputs hold none of them\n", c->name);
    if (status != VLA_OK) {
        fprintf(stderr, "vla parity: %s\n", err.message);
        if (err.hint[0])
            fprintf(stderr, "  hint: %s\n", err.hint);
    }
    fflush(stdout);
    o->passed += pass && !c->skipped;
    o->skipped += pass && c->skipped;
    o->failed += !pass;
    vlai_parity_case_fini(c);
    vlai_free(c);
}

static vla_status run_folder(const char *dir, options *o, vla_error *err)
{
    char path[4096];
    if (vlai_path_join(path, sizeof path, dir, "case.json") && vlai_is_file(path)) {
        run_case(dir, o);
        return VLA_OK;
    }
    char **names;
    size_t count;
    int before = o->passed + o->failed + o->skipped;
    vla_status status = vlai_list_dir(dir, &names, &count, err);
    for (size_t i = 0; i < count; i++) {
        char sub[4096];
        if (vlai_path_join(sub, sizeof sub, dir, names[i]) && vlai_path_join(path, sizeof path, sub, "case.json") &&
            vlai_is_file(path))
            run_case(sub, o);
    }
    vlai_names_free(names, count);
    if (status == VLA_OK && o->passed + o->failed + o->skipped == before)
        return vlai_fail_hint(err, VLA_E_NOT_FOUND, "name a folder with a case.json, or a folder of such folders", "%s: no case.json in it, nor in a folder of it", dir);
    return status;
}

int command_parity(int argc, char **argv)
{
    options o = {.numerics = "fp32", .device = "cpu"};
    const arg_row rows[] = {{"--json", ARG_FLAG, &o.json}, {"--verbose", ARG_FLAG, &o.verbose},
                            {"--numerics", ARG_TEXT, &o.numerics}, {"--device", ARG_TEXT, &o.device}, {"--fuse", ARG_FLAG, &o.fuse},
                            {"--draws", ARG_INT, &o.draws}};
    args a = {.name = "parity", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .positionals = true};
    vla_error err = VLA_ERROR_INIT;
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    if (a.positionals_given == 0) {
        fputs("vla parity: no folder was named\n  hint: name a folder with a case.json, or a folder of such folders\n", stderr);
        return EXIT_USAGE;
    }
    vla_numerics numerics;
    if (!vlai_numerics_parse(o.numerics, &numerics) || numerics == VLA_FP64) {
        fprintf(stderr, "vla parity: --numerics '%s': wanted fp32, bf16, bf16-sr or bf16-plain\n", o.numerics);
        return EXIT_USAGE;
    }
    if (o.draws && numerics == VLA_FP32) {
        fputs("vla parity: --draws looks at the rounding of bf16\n  hint: name one of --numerics bf16, bf16-sr and bf16-plain\n", stderr);
        return EXIT_USAGE;
    }
    char device[VLAI_DEVICE_NAME];
    if (vlai_device_choose(o.device, device, &err) != VLA_OK) {
        fprintf(stderr, "vla parity: --device '%s': wanted cpu, cuda, cuda:N or auto\n", o.device);
        return EXIT_USAGE;
    }
    o.device = device;
    for (size_t i = 0; i < a.positionals_given; i++)
        if (run_folder(a.positional[i], &o, &err) != VLA_OK)
            return command_fail("parity", &err);
    if (o.draws && !o.drawn && !o.failed)
        fputs("vla parity: --draws: nothing was drawn, as no case that ran is a model's\n", stderr);
    if (!o.json)
        printf("%d passed, %d failed, %d skipped\n", o.passed, o.failed, o.skipped);
    return o.failed ? EXIT_DATA : EXIT_DONE;
}
