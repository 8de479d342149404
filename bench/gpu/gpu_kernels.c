/* Times the CUDA kernels at the sizes of a Wall-X step (batch 26, 260 tokens, two pictures of 18 x 18 patches each).
 *
 *     gpu_kernels [NAME...]        only the operations named
 *
 * One line per case: time, bytes moved (every operand and result once), share of the copy bandwidth that this program measured
 * first; for attention TFLOP/s of the visible pairs, 4 D forward and 10 D backward. Each case has as many sets of buffers as
 * fill 512 MB and goes round them, so that nothing is found in L2 that a step would not find there. */
#include "base/bf16.h"
#include "base/memory.h"
#include "kernels/cuda.h"
#include "kernels/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SETS = 64, REPEATS = 20, SET_BYTES = 512 << 20 };

typedef struct shape {
    vla_dtype dtype;
    int64_t rows, cols; /* cols 0: a vector */
    const int32_t *ints; /* contents; NULL: random reals */
} shape;

typedef struct bench {
    const char *name, *note;
    vlai_op op;
    vlai_cuda_fn run;
    vlai_cuda_workspace_fn workspace;
    vlai_attrs attrs;
    shape in[VLAI_MAX_INPUTS], out[VLAI_MAX_OUTPUTS];
    int n_in, n_out;
    uint32_t writes; /* operands written: their bytes count twice */
    double flops;
} bench;

static void *stream;
static double copy_rate; /* bytes per second */
static int multiprocessors, argc_;
static char **argv_;

static void must(int code, const char *what)
{
    if (code) {
        fprintf(stderr, "%s: %s\n", what, vlai_device_error(code));
        exit(1);
    }
}
#define MUST(call) must(call, #call)

static int64_t elements_of(const shape *s)
{
    return s->rows * (s->cols ? s->cols : 1);
}

/* Random reals in [-1, 1), whose bits cost what a step's cost; made once and uploaded in pieces. */
static void fill(void *device, const shape *s)
{
    static uint16_t *half;
    static float *whole;
    enum { PIECE = 1 << 20 };
    size_t size = vla_dtype_size(s->dtype);
    int64_t n = elements_of(s);
    if (s->ints) {
        MUST(vlai_device_upload(device, s->ints, (size_t)n * size, stream));
        MUST(vlai_device_synchronize(stream));
        return;
    }
    if (!half) {
        uint32_t state = 1;
        half = malloc(PIECE * sizeof *half);
        whole = malloc(PIECE * sizeof *whole);
        if (!half || !whole)
            exit(1);
        for (int i = 0; i < PIECE; i++) {
            state = state * 1664525u + 1013904223u;
            whole[i] = (float)(state >> 8) / (1 << 23) - 1;
            half[i] = vlai_bf16_from_float(whole[i]);
        }
    }
    if (s->dtype == VLA_F64) { /* step numbers: ones */
        double ones[64];
        for (int i = 0; i < 64; i++)
            ones[i] = 1;
        MUST(vlai_device_upload(device, ones, (size_t)n * size, stream));
        MUST(vlai_device_synchronize(stream));
        return;
    }
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t count = n - at < PIECE ? n - at : PIECE;
        MUST(vlai_device_upload((char *)device + (size_t)at * size, size == 2 ? (void *)half : (void *)whole, (size_t)count * size, stream));
    }
    MUST(vlai_device_synchronize(stream));
}

static vlai_cuda_tensor tensor_of(const shape *s, double *bytes)
{
    vlai_cuda_tensor t = {.dtype = s->dtype, .rank = s->cols ? 2 : 1, .shape = {s->rows, s->cols}, .elements = elements_of(s)};
    if (s->dtype == VLA_DTYPE_NONE)
        return (vlai_cuda_tensor){0};
    size_t size = (size_t)t.elements * vla_dtype_size(s->dtype);
    MUST(vlai_device_alloc(size, &t.data));
    fill(t.data, s);
    *bytes += (double)size;
    return t;
}

static double time_of(const bench *b, double *bytes)
{
    vlai_value_info values[VLAI_MAX_INPUTS] = {0};
    vlai_node node = {.op = b->op, .n_inputs = (int8_t)b->n_in, .n_outputs = (int8_t)b->n_out, .attrs = b->attrs};
    vla_graph graph = {.values = values, .n_values = (size_t)b->n_in};
    double set = 0;
    for (int k = 0; k < b->n_in; k++) {
        values[k] = (vlai_value_info){.dtype = b->in[k].dtype, .rank = b->in[k].cols ? 2 : 1, .shape = {b->in[k].rows, b->in[k].cols},
                                      .elements = elements_of(&b->in[k])};
        node.inputs[k] = k;
        set += (double)elements_of(&b->in[k]) * (double)vla_dtype_size(b->in[k].dtype);
    }
    for (int k = 0; k < b->n_out; k++)
        set += (double)elements_of(&b->out[k]) * (double)vla_dtype_size(b->out[k].dtype);
    int sets = (int)(SET_BYTES / (set + 1)) + 1;
    sets = sets < SETS ? sets : SETS;
    static vlai_cuda_call calls[SETS];
    void *workspace;
    size_t wanted = b->workspace(&graph, &node);
    MUST(vlai_device_alloc(wanted, &workspace));
    *bytes = 0;
    for (int s = 0; s < sets; s++) {
        calls[s] = (vlai_cuda_call){.node = &node, .stream = stream, .workspace = workspace, .workspace_bytes = wanted,
                                    .multiprocessors = multiprocessors};
        *bytes = 0;
        for (int k = 0; k < b->n_in; k++) {
            double one = 0;
            calls[s].in[k] = tensor_of(&b->in[k], &one);
            *bytes += one * (b->writes >> k & 1 ? 2 : 1);
        }
        for (int k = 0; k < b->n_out; k++)
            calls[s].out[k] = tensor_of(&b->out[k], bytes);
    }
    void *start, *end;
    MUST(vlai_device_event_create(&start));
    MUST(vlai_device_event_create(&end));
    for (int i = 0; i < 3; i++)
        MUST(b->run(&calls[i % sets]));
    MUST(vlai_device_event_record(start, stream));
    int repeats = REPEATS > sets ? REPEATS : sets;
    for (int i = 0; i < repeats; i++)
        MUST(b->run(&calls[i % sets]));
    MUST(vlai_device_event_record(end, stream));
    float ms = 0;
    MUST(vlai_device_event_elapsed(start, end, &ms));
    vlai_device_event_destroy(start);
    vlai_device_event_destroy(end);
    for (int s = 0; s < sets; s++) {
        for (int k = 0; k < b->n_in; k++)
            vlai_device_free(calls[s].in[k].data);
        for (int k = 0; k < b->n_out; k++)
            vlai_device_free(calls[s].out[k].data);
    }
    vlai_device_free(workspace);
    return (double)ms * 1e-3 / repeats;
}

static void run(bench b)
{
    int wanted = argc_ < 2;
    for (int i = 1; i < argc_; i++)
        wanted |= !strcmp(argv_[i], b.name);
    if (!wanted)
        return;
    double bytes, seconds = time_of(&b, &bytes);
    printf("%-21s %-34s %9.1f us %8.1f MB %7.0f GB/s", b.name, b.note, seconds * 1e6, bytes / 1e6, bytes / seconds / 1e9);
    if (copy_rate > 0)
        printf("  %.2f of copy", bytes / seconds / copy_rate);
    if (b.flops > 0)
        printf("  %.0f TFLOP/s", b.flops / seconds / 1e12);
    printf("\n");
    fflush(stdout);
}

#define COUNT(...) (int)(sizeof((shape[]){__VA_ARGS__}) / sizeof(shape))
#define IN(...) .in = {__VA_ARGS__}, .n_in = COUNT(__VA_ARGS__)
#define OUT(...) .out = {__VA_ARGS__}, .n_out = COUNT(__VA_ARGS__)
#define RUN(op_, note_, ...) \
    run((bench){.name = #op_, .note = note_, .op = VLAI_OP_##op_, .run = vlai_cuda_##op_, .workspace = vlai_cuda_workspace_##op_, __VA_ARGS__})
#define H(rows, cols) {VLA_BF16, rows, cols, NULL}
#define F(rows, cols) {VLA_F32, rows, cols, NULL}
#define I(rows, cols, data) {VLA_I32, rows, cols, data}

/* `n` segments of `length` rows; causal, or each whole. Returns visible pairs. */
static double attention_tables(int64_t n, int64_t length, int causal, int32_t **qpos, int32_t **rows, int32_t **cols)
{
    int64_t all = n * length;
    *qpos = vlai_array((size_t)all, sizeof(int32_t));
    *rows = vlai_array((size_t)all, 2 * sizeof(int32_t));
    *cols = vlai_array((size_t)all, 4 * sizeof(int32_t));
    if (!*qpos || !*rows || !*cols)
        exit(1);
    double pairs = 0;
    for (int64_t i = 0; i < all; i++) {
        int64_t first = i / length * length;
        (*qpos)[i] = (int32_t)i;
        (*rows)[2 * i] = (int32_t)first;
        (*rows)[2 * i + 1] = (int32_t)(causal ? i + 1 : first + length);
        (*cols)[4 * i] = (int32_t)(causal ? i : first);
        (*cols)[4 * i + 1] = (int32_t)(first + length);
        (*cols)[4 * i + 2] = (*cols)[4 * i + 3] = 0;
        pairs += (double)((*rows)[2 * i + 1] - first);
    }
    return pairs;
}

static void attention(const char *note, int64_t n, int64_t length, int causal, int heads, int kv_heads, int dim)
{
    int32_t *qpos, *rows, *cols;
    int64_t all = n * length;
    double pairs = attention_tables(n, length, causal, &qpos, &rows, &cols);
    vlai_attrs a = {.attention = {.heads = heads, .kv_heads = kv_heads, .head_dim = dim, .scale = 1 / sqrt(dim)}};
    RUN(attention, note, .attrs = a, .flops = 4.0 * dim * heads * pairs,
        IN(H(all, heads * dim), H(all, kv_heads * dim), H(all, kv_heads * dim), I(all, 0, qpos), I(all, 2, rows), I(all, 4, cols)),
        OUT(H(all, heads * dim), F(all, heads)));
    RUN(attention_grad, note, .attrs = a, .flops = 10.0 * dim * heads * pairs,
        IN(H(all, heads * dim), H(all, heads * dim), H(all, kv_heads * dim), H(all, kv_heads * dim), H(all, heads * dim), F(all, heads),
           I(all, 0, qpos), I(all, 2, rows), I(all, 4, cols)),
        OUT(H(all, heads * dim), H(all, kv_heads * dim), H(all, kv_heads * dim)));
    vlai_free(qpos);
    vlai_free(rows);
    vlai_free(cols);
}

enum { TOKENS = 6760, WIDTH = 2048, GATES = 22016, PATCHES = 16848, VISION = 1280, VOCABULARY = 151936, LABELS = 400 };

int main(int argc, char **argv)
{
    vlai_device_info info = {0};
    argc_ = argc;
    argv_ = argv;
    MUST(vlai_device_select(0, &info));
    MUST(vlai_device_stream_create(&stream));
    multiprocessors = info.multiprocessors;
    bench copy = {.name = "copy", .op = VLAI_OP_copy, .run = vlai_cuda_copy, .workspace = vlai_cuda_workspace_copy, IN(F(1 << 28, 0)), OUT(F(1 << 28, 0))};
    double bytes, seconds = time_of(&copy, &bytes);
    copy_rate = bytes / seconds;
    printf("%s: copy of 1 GiB at %.0f GB/s read and written\n", info.name, copy_rate / 1e9);

    int32_t *index = vlai_array(PATCHES, sizeof *index), *labels = vlai_array(LABELS, sizeof *labels), *positions = vlai_array(3 * TOKENS, sizeof *index);
    if (!index || !labels || !positions)
        return 1;
    for (int i = 0; i < PATCHES; i++)
        index[i] = (int32_t)((i * 7919L) % TOKENS);
    for (int i = 0; i < LABELS; i++)
        labels[i] = i * 379;
    for (int i = 0; i < 3 * TOKENS; i++)
        positions[i] = i % 260;

    RUN(add, "[6760,2048] bf16", IN(H(TOKENS, WIDTH), H(TOKENS, WIDTH)), OUT(H(TOKENS, WIDTH)));
    RUN(mul, "[6760,22016] bf16", IN(H(TOKENS, GATES), H(TOKENS, GATES)), OUT(H(TOKENS, GATES)));
    RUN(scale, "[6760,22016] bf16", IN(H(TOKENS, GATES)), OUT(H(TOKENS, GATES)));
    RUN(cast, "[6760,2048] bf16 to fp32", IN(H(TOKENS, WIDTH)), OUT(F(TOKENS, WIDTH)));
    RUN(gelu, "[4212,5120] bf16", IN(H(4212, 5120)), OUT(H(4212, 5120)));
    RUN(gelu_grad, "[4212,5120] bf16", IN(H(4212, 5120), H(4212, 5120)), OUT(H(4212, 5120)));
    RUN(swiglu, "[6760,22016] bf16", IN(H(TOKENS, GATES)), OUT(H(TOKENS, GATES / 2)));
    RUN(swiglu_grad, "[6760,22016] bf16", IN(H(TOKENS, GATES / 2), H(TOKENS, GATES)), OUT(H(TOKENS, GATES)));
    RUN(swiglu, "[16848,6840] bf16", IN(H(PATCHES, 6840)), OUT(H(PATCHES, 3420)));
    RUN(swiglu_grad, "[16848,6840] bf16", IN(H(PATCHES, 3420), H(PATCHES, 6840)), OUT(H(PATCHES, 6840)));
    vlai_attrs norm = {.norm = {.eps = 1e-6, .dtype = VLA_BF16}};
    RUN(rms_norm, "[6760,2048] bf16", .attrs = norm, IN(H(TOKENS, WIDTH), H(WIDTH, 0)), OUT(H(TOKENS, WIDTH), F(TOKENS, 0)));
    RUN(rms_norm, "[16848,1280] bf16", .attrs = norm, IN(H(PATCHES, VISION), H(VISION, 0)), OUT(H(PATCHES, VISION), F(PATCHES, 0)));
    RUN(rms_norm_grad, "[6760,2048] bf16", .attrs = norm, IN(H(TOKENS, WIDTH), H(TOKENS, WIDTH), F(TOKENS, 0), H(WIDTH, 0)), OUT(H(TOKENS, WIDTH)));
    RUN(rms_norm_grad, "[16848,1280] bf16", .attrs = norm, IN(H(PATCHES, VISION), H(PATCHES, VISION), F(PATCHES, 0), H(VISION, 0)), OUT(H(PATCHES, VISION)));
    RUN(rms_norm_grad_weight, "[6760,2048] bf16", .attrs = norm, IN(H(TOKENS, WIDTH), H(TOKENS, WIDTH), F(TOKENS, 0)), OUT(H(WIDTH, 0)));
    RUN(rms_norm_grad_weight, "[16848,1280] bf16", .attrs = norm, IN(H(PATCHES, VISION), H(PATCHES, VISION), F(PATCHES, 0)), OUT(H(VISION, 0)));
    vlai_attrs bias = {.matmul = {.dtype = VLA_BF16}};
    RUN(col_sum, "[16848,3840] bf16", .attrs = bias, IN(H(PATCHES, 3840)), OUT(H(3840, 0)));
    RUN(col_sum, "[6760,2560] bf16", .attrs = bias, IN(H(TOKENS, 2560)), OUT(H(2560, 0)));
    RUN(row_sum, "[6760,2048] bf16", IN(H(TOKENS, WIDTH)), OUT(H(TOKENS, 0)));
    vlai_attrs table = {.rope_table = {.base = 1e6, .half = 64, .axes = 3, .sections = {16, 24, 24}, .dtype = VLA_BF16}};
    vlai_attrs rope = {.rope = {.head_dim = 128}}, rope80 = {.rope = {.head_dim = 80}};
    RUN(rope_table, "[6760,64] bf16", .attrs = table, IN(I(3, TOKENS, positions)), OUT(H(TOKENS, 64), H(TOKENS, 64)));
    RUN(rope, "[6760,2048] bf16", .attrs = rope, IN(H(TOKENS, WIDTH), H(TOKENS, 64), H(TOKENS, 64)), OUT(H(TOKENS, WIDTH)));
    RUN(rope, "[16848,1280] bf16, fp32 tables", .attrs = rope80, IN(H(PATCHES, VISION), F(PATCHES, 40), F(PATCHES, 40)), OUT(H(PATCHES, VISION)));
    vlai_attrs qkv = {.split = {.n = 3, .widths = {2048, 256, 256}}}, thirds = {.split = {.n = 3, .widths = {1280, 1280, 1280}}};
    RUN(split_cols, "[6760,2560] bf16", .attrs = qkv, IN(H(TOKENS, 2560)), OUT(H(TOKENS, 2048), H(TOKENS, 256), H(TOKENS, 256)));
    RUN(split_cols, "[16848,3840] bf16", .attrs = thirds, IN(H(PATCHES, 3840)), OUT(H(PATCHES, 1280), H(PATCHES, 1280), H(PATCHES, 1280)));
    RUN(concat_cols, "[6760,2560] bf16", IN(H(TOKENS, 2048), H(TOKENS, 256), H(TOKENS, 256)), OUT(H(TOKENS, 2560)));
    RUN(gather_rows, "[6760,2048] bf16", IN(H(TOKENS, WIDTH), I(TOKENS, 0, index)), OUT(H(TOKENS, WIDTH)));
    vlai_attrs embedding = {.rows = {.rows = VOCABULARY, .skip = -1, .dtype = VLA_BF16}};
    RUN(scatter_add_rows, "6760 into [151936,2048] bf16", .attrs = embedding, IN(H(TOKENS, WIDTH), I(TOKENS, 0, index)), OUT(H(VOCABULARY, WIDTH)));
    RUN(put_rows, "4212 into [6760,2048] bf16", IN(H(TOKENS, WIDTH), I(4212, 0, index), H(4212, WIDTH)), OUT(H(TOKENS, WIDTH)));
    RUN(cross_entropy, "[400,151936] fp32", IN(F(LABELS, VOCABULARY), I(LABELS, 0, labels)), OUT(F(1, 0), F(LABELS, 0), F(1, 0)));
    RUN(cross_entropy_grad, "[400,151936] fp32", IN(F(1, 0), F(LABELS, VOCABULARY), I(LABELS, 0, labels), F(1, 0)), OUT(F(LABELS, VOCABULARY)));
    vlai_attrs adamw = {.adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}};
    int64_t n = (int64_t)GATES * WIDTH;
    RUN(sum_squares, "[22016,2048] bf16", IN(H(n, 0), {VLA_F64, 4, 0, NULL}));
    RUN(accumulate, "[22016,2048] fp32 += bf16", .writes = 1, IN(F(n, 0), H(n, 0)));
    RUN(adamw, "[22016,2048] split, fp32 moments", .attrs = adamw, .writes = 0x4D,
        IN(H(n, 0), H(n, 0), F(n, 0), F(n, 0), {VLA_F64, 3, 0, NULL}, {VLA_F64, 3, 0, NULL}, {VLA_U16, n, 0, NULL}));
    RUN(adamw, "[22016,2048] all bf16", .attrs = adamw, .writes = 0xD,
        IN(H(n, 0), H(n, 0), H(n, 0), H(n, 0), {VLA_F64, 3, 0, NULL}, {VLA_F64, 3, 0, NULL}, {VLA_DTYPE_NONE, 0, 0, NULL}));
    attention("26 x 260, 16/2 heads, 128, causal", 26, 260, 1, 16, 2, 128);
    attention("52 x 324, 16 heads, 80, full", 52, 324, 0, 16, 16, 80);
    attention("264 windows of 64, 16 heads, 80", 264, 64, 0, 16, 16, 80);
    attention("1053 windows of 16, 16 heads, 80", 1053, 16, 0, 16, 16, 80);
    vlai_device_stream_destroy(stream);
    return 0;
}
