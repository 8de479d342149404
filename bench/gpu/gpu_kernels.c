/* Times the CUDA kernels at the sizes of a Wall-X step (batch 26, 260 tokens, rows rounded up to 64, two pictures of
 * 18 x 18 patches each).
 *
 *     gpu_kernels [NAME...]        only the operations named
 *
 * One line per case: time of a launch in a captured replay, median of 20; bytes moved (every operand and result once); the
 * share of two copies that this program measures in the same way: the fastest copy of 1 GiB, and a copy of as many bytes as
 * the case moves (a short kernel cannot reach what a long one does). For attention TFLOP/s of the visible pairs, 4 D forward
 * and 10 D backward. Each case has as many sets of buffers as fill 512 MB, ten times the L2, and goes round them. */
#include "base/bf16.h"
#include "base/memory.h"
#include "base/order.h"
#include "kernels/cuda.h"
#include "kernels/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SETS = 64, REPEATS = 20, SET_BYTES = 512 << 20 };

/* Device memory of a case: taken from the start again for the next one. */
#define POOL_BYTES ((size_t)5 << 30)

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
    int in_place;    /* the result lies over operand 0, which is then not counted as read where `untouched` says */
    double untouched; /* bytes of operand 0 and result that stay where they are */
    double flops;
} bench;

static void *stream;
static double copy_rate; /* bytes per second */
static char *pool;
static size_t pool_used;
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

/* Random reals in [-1, 1), whose bits cost what a step's cost. */
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
    for (int64_t at = 0; at < n; at += PIECE) { /* one piece from the host, the others from it */
        int64_t count = n - at < PIECE ? n - at : PIECE;
        void *to = (char *)device + (size_t)at * size;
        if (at == 0)
            MUST(vlai_device_upload(to, size == 2 ? (void *)half : (void *)whole, (size_t)count * size, stream));
        else
            MUST(vlai_device_copy(to, device, (size_t)count * size, stream));
    }
    MUST(vlai_device_synchronize(stream));
}

static void *take(size_t bytes)
{
    void *p = pool + pool_used;
    pool_used += (bytes + 511) & ~(size_t)255; /* and a gap, so that sets do not fall on the same channels */
    if (pool_used > POOL_BYTES) {
        fprintf(stderr, "a case wants more than %zu bytes\n", POOL_BYTES);
        exit(1);
    }
    return p;
}

/* `like`: the same tensor of the first set, whose contents are copied; NULL: filled. */
static vlai_cuda_tensor tensor_of(const shape *s, const vlai_cuda_tensor *like, double *bytes)
{
    vlai_cuda_tensor t = {.dtype = s->dtype, .rank = s->cols ? 2 : 1, .shape = {s->rows, s->cols}, .elements = elements_of(s)};
    if (s->dtype == VLA_DTYPE_NONE)
        return (vlai_cuda_tensor){0};
    size_t size = (size_t)t.elements * vla_dtype_size(s->dtype);
    t.data = take(size);
    if (like)
        MUST(vlai_device_copy(t.data, like->data, size, stream));
    else
        fill(t.data, s);
    *bytes += (double)size;
    return t;
}

/* Seconds of one launch: `launches` of them captured, replayed, and divided. */
static double replayed(const bench *b, const vlai_cuda_call *calls, int sets)
{
    int launches = sets > 8 ? sets : 8;
    void *graph, *start, *end;
    double seconds[REPEATS];
    MUST(b->run(&calls[0]));
    MUST(vlai_device_synchronize(stream));
    MUST(vlai_device_capture_begin(stream));
    for (int i = 0; i < launches; i++)
        MUST(b->run(&calls[i % sets]));
    MUST(vlai_device_capture_end(stream, &graph));
    MUST(vlai_device_event_create(&start));
    MUST(vlai_device_event_create(&end));
    for (int i = -2; i < REPEATS; i++) {
        float ms = 0;
        MUST(vlai_device_event_record(start, stream));
        MUST(vlai_device_replay(graph, stream));
        MUST(vlai_device_event_record(end, stream));
        MUST(vlai_device_event_elapsed(start, end, &ms));
        if (i >= 0)
            seconds[i] = (double)ms * 1e-3 / launches;
    }
    vlai_device_event_destroy(start);
    vlai_device_event_destroy(end);
    vlai_device_graph_destroy(graph);
    qsort(seconds, REPEATS, sizeof *seconds, vlai_by_value);
    return seconds[REPEATS / 2];
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
    pool_used = 0;
    size_t wanted = b->workspace(&graph, &node);
    void *workspace = take(wanted);
    for (int s = 0; s < sets; s++) {
        calls[s] = (vlai_cuda_call){.node = &node, .stream = stream, .workspace = workspace, .workspace_bytes = wanted,
                                    .multiprocessors = multiprocessors};
        *bytes = -b->untouched;
        for (int k = 0; k < b->n_in; k++) {
            double one = 0;
            calls[s].in[k] = tensor_of(&b->in[k], s ? &calls[0].in[k] : NULL, &one);
            *bytes += one * (b->writes >> k & 1 ? 2 : 1);
        }
        for (int k = 0; k < b->n_out; k++)
            calls[s].out[k] = tensor_of(&b->out[k], s ? &calls[0].out[k] : NULL, bytes);
        if (b->in_place)
            calls[s].out[0].data = calls[s].in[0].data;
    }
    return replayed(b, calls, sets);
}

/* A copy of as many bytes, half of them read: by the copy engine's kernel or by ours, whichever is faster. */
static double copy_seconds(double bytes)
{
    int64_t n = (int64_t)(bytes / 8) + 1;
    bench ways[2] = {{.op = VLAI_OP_copy, .run = vlai_cuda_copy, .workspace = vlai_cuda_workspace_copy},
                     {.op = VLAI_OP_scale, .run = vlai_cuda_scale, .workspace = vlai_cuda_workspace_scale, .attrs = {.fill = {.value = 1}}}};
    double best = 1e30, moved;
    for (int i = 0; i < 2; i++) {
        ways[i].in[0] = ways[i].out[0] = (shape){VLA_F32, n, 0, NULL};
        ways[i].n_in = ways[i].n_out = 1;
        double seconds = time_of(&ways[i], &moved);
        best = seconds < best ? seconds : best;
    }
    return best;
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
    printf("  %.2f of copy, %.2f of a copy of its size", bytes / seconds / copy_rate, copy_seconds(bytes) / seconds);
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

enum { TOKENS = 6784, EXPERT = 260, ROWS = TOKENS + EXPERT, WIDTH = 2048, GATES = 22016, PATCHES = 16848, VISION = 1280, VOCABULARY = 151936, LABELS = 400 };

int main(int argc, char **argv)
{
    vlai_device_info info = {0};
    argc_ = argc;
    argv_ = argv;
    MUST(vlai_device_select(0, &info));
    MUST(vlai_device_stream_create(&stream));
    multiprocessors = info.multiprocessors;
    MUST(vlai_device_alloc(POOL_BYTES, (void **)&pool));
    copy_rate = (double)(2u << 30) / copy_seconds((double)(2u << 30));
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

    RUN(add, "[6784,2048] bf16", IN(H(TOKENS, WIDTH), H(TOKENS, WIDTH)), OUT(H(TOKENS, WIDTH)));
    RUN(mul, "[6784,22016] bf16", IN(H(TOKENS, GATES), H(TOKENS, GATES)), OUT(H(TOKENS, GATES)));
    RUN(scale, "[6784,22016] bf16", IN(H(TOKENS, GATES)), OUT(H(TOKENS, GATES)));
    RUN(cast, "[6784,2048] bf16 to fp32", IN(H(TOKENS, WIDTH)), OUT(F(TOKENS, WIDTH)));
    RUN(gelu, "[4212,5120] bf16", IN(H(4212, 5120)), OUT(H(4212, 5120)));
    RUN(gelu_grad, "[4212,5120] bf16", IN(H(4212, 5120), H(4212, 5120)), OUT(H(4212, 5120)));
    RUN(swiglu, "[6784,22016] bf16", IN(H(TOKENS, GATES)), OUT(H(TOKENS, GATES / 2)));
    RUN(swiglu_grad, "[6784,22016] bf16", IN(H(TOKENS, GATES / 2), H(TOKENS, GATES)), OUT(H(TOKENS, GATES)));
    vlai_attrs twice = {.swiglu = {.again = 1}}, twice_summed = {.swiglu = {.again = 1, .sums = VLA_BF16}}, summed = {.swiglu = {.sums = VLA_BF16}};
    RUN(swiglu_backward, "[6784,22016] bf16", .attrs = twice, IN(H(TOKENS, GATES / 2), H(TOKENS, GATES)), OUT(H(TOKENS, GATES), H(TOKENS, GATES / 2)));
    RUN(swiglu_backward, "[16848,6912] bf16", .attrs = twice, IN(H(PATCHES, 3456), H(PATCHES, 6912)), OUT(H(PATCHES, 6912), H(PATCHES, 3456)));
    RUN(swiglu_backward, "[16848,6912] and sums, bf16", .attrs = twice_summed, IN(H(PATCHES, 3456), H(PATCHES, 6912)), OUT(H(PATCHES, 6912), H(PATCHES, 3456), H(6912, 0)));
    RUN(swiglu_backward, "[16848,6912] sums, no h, bf16", .attrs = summed, IN(H(PATCHES, 3456), H(PATCHES, 6912)), OUT(H(PATCHES, 6912), H(6912, 0)));
    RUN(swiglu, "[16848,6912] bf16", IN(H(PATCHES, 6912)), OUT(H(PATCHES, 3456)));
    RUN(swiglu_backward, "[16848,6840] bf16", .attrs = twice, IN(H(PATCHES, 3420), H(PATCHES, 6840)), OUT(H(PATCHES, 6840), H(PATCHES, 3420)));
    RUN(swiglu_backward, "[260,4096] bf16", .attrs = twice, IN(H(EXPERT, 2048), H(EXPERT, 4096)), OUT(H(EXPERT, 4096), H(EXPERT, 2048)));
    RUN(swiglu, "[16848,6840] bf16", IN(H(PATCHES, 6840)), OUT(H(PATCHES, 3420)));
    RUN(swiglu_grad, "[16848,6840] bf16", IN(H(PATCHES, 3420), H(PATCHES, 6840)), OUT(H(PATCHES, 6840)));
    vlai_attrs norm = {.norm = {.eps = 1e-6, .dtype = VLA_BF16}};
    RUN(rms_norm, "[6784,2048] bf16", .attrs = norm, IN(H(TOKENS, WIDTH), H(WIDTH, 0)), OUT(H(TOKENS, WIDTH), F(TOKENS, 0)));
    RUN(rms_norm, "[6784,2048] bf16, fp32 w", .attrs = norm, IN(H(TOKENS, WIDTH), F(WIDTH, 0)), OUT(H(TOKENS, WIDTH), F(TOKENS, 0)));
    RUN(rms_norm, "[16848,1280] bf16", .attrs = norm, IN(H(PATCHES, VISION), H(VISION, 0)), OUT(H(PATCHES, VISION), F(PATCHES, 0)));
    RUN(rms_norm_grad, "[6784,2048] bf16", .attrs = norm, IN(H(TOKENS, WIDTH), H(TOKENS, WIDTH), F(TOKENS, 0), H(WIDTH, 0)), OUT(H(TOKENS, WIDTH)));
    RUN(rms_norm_grad, "[16848,1280] bf16", .attrs = norm, IN(H(PATCHES, VISION), H(PATCHES, VISION), F(PATCHES, 0), H(VISION, 0)), OUT(H(PATCHES, VISION)));
    RUN(rms_norm_grad_weight, "[6784,2048] bf16", .attrs = norm, IN(H(TOKENS, WIDTH), H(TOKENS, WIDTH), F(TOKENS, 0)), OUT(H(WIDTH, 0)));
    RUN(rms_norm_grad_weight, "[16848,1280] bf16", .attrs = norm, IN(H(PATCHES, VISION), H(PATCHES, VISION), F(PATCHES, 0)), OUT(H(VISION, 0)));
    vlai_attrs again = {.norm = {.eps = 1e-6, .dtype = VLA_BF16, .again = 1}};
#define NORM_BACKWARD(note, attrs_, rows, cols, weight, ...)                                                                                       \
    RUN(rms_norm_backward, note, .attrs = attrs_, IN(H(rows, cols), H(rows, cols), F(rows, 0), weight(cols, 0), H(rows, cols)), OUT(H(rows, cols), \
                                                                                                                                  weight(cols, 0), __VA_ARGS__))
    NORM_BACKWARD("[6784,2048] and y, bf16, fp32 w", again, TOKENS, WIDTH, F, H(TOKENS, WIDTH));
    NORM_BACKWARD("[16848,1280] and y, bf16", again, PATCHES, VISION, H, H(PATCHES, VISION));
    vlai_attrs again_summed = {.norm = {.eps = 1e-6, .dtype = VLA_BF16, .sums = VLA_BF16, .again = 1}};
    NORM_BACKWARD("[16848,1280], y and sums, bf16", again_summed, PATCHES, VISION, H, H(PATCHES, VISION), H(VISION, 0));
    vlai_attrs norm_summed = {.norm = {.eps = 1e-6, .dtype = VLA_BF16, .sums = VLA_BF16}};
    RUN(rms_norm_backward, "[16848,1280] and sums, bf16", .attrs = norm_summed, IN(H(PATCHES, VISION), H(PATCHES, VISION), F(PATCHES, 0), H(VISION, 0), H(PATCHES, VISION)),
        OUT(H(PATCHES, VISION), H(VISION, 0), H(VISION, 0)));
    RUN(rms_norm_backward, "[260,1024] bf16, fp32 w", .attrs = norm, IN(H(EXPERT, 1024), H(EXPERT, 1024), F(EXPERT, 0), F(1024, 0), H(EXPERT, 1024)),
        OUT(H(EXPERT, 1024), F(1024, 0)));
    NORM_BACKWARD("[260,1024] and y, bf16, fp32 w", again, EXPERT, 1024, F, H(EXPERT, 1024));
    RUN(rms_norm_backward, "[6784,2048] bf16, fp32 w", .attrs = norm, IN(H(TOKENS, WIDTH), H(TOKENS, WIDTH), F(TOKENS, 0), F(WIDTH, 0), H(TOKENS, WIDTH)),
        OUT(H(TOKENS, WIDTH), F(WIDTH, 0)));
    vlai_attrs bias = {.matmul = {.dtype = VLA_BF16}};
    RUN(col_sum, "[16848,3840] bf16", .attrs = bias, IN(H(PATCHES, 3840)), OUT(H(3840, 0)));
    RUN(col_sum, "[6784,2560] bf16", .attrs = bias, IN(H(TOKENS, 2560)), OUT(H(2560, 0)));
    RUN(row_sum, "[6784,2048] bf16", IN(H(TOKENS, WIDTH)), OUT(H(TOKENS, 0)));
    vlai_attrs table = {.rope_table = {.base = 1e6, .half = 64, .axes = 3, .sections = {16, 24, 24}, .dtype = VLA_BF16}};
    vlai_attrs rope = {.rope = {.head_dim = 128}}, rope80 = {.rope = {.head_dim = 80}};
    RUN(rope_table, "[6784,64] bf16", .attrs = table, IN(I(3, TOKENS, positions)), OUT(H(TOKENS, 64), H(TOKENS, 64)));
    RUN(rope, "[6784,2048] bf16", .attrs = rope, IN(H(TOKENS, WIDTH), H(TOKENS, 64), H(TOKENS, 64)), OUT(H(TOKENS, WIDTH)));
    RUN(rope, "[16848,1280] bf16, fp32 tables", .attrs = rope80, IN(H(PATCHES, VISION), F(PATCHES, 40), F(PATCHES, 40)), OUT(H(PATCHES, VISION)));
    int32_t *map = vlai_array(ROWS, sizeof *map), *at_a = vlai_array(TOKENS, sizeof *at_a), *at_b = vlai_array(EXPERT, sizeof *at_b);
    if (!map || !at_a || !at_b)
        return 1;
    int32_t from[2] = {0, 0};
    for (int i = 0; i < ROWS; i++) { /* samples of 270 rows: the last 10 are the action expert's */
        int second = i % 270 >= 260;
        (second ? at_b : at_a)[from[second]] = i;
        map[i] = second ? -1 - from[1] : from[0];
        from[second]++;
    }
    vlai_attrs pack = {.rope = {.head_dim = 128, .heads = 18}}, pack80 = {.rope = {.head_dim = 80, .heads = 32}};
    RUN(qkv_rope, "[6784+260,2560] bf16", .attrs = pack, IN(H(TOKENS, 2560), H(EXPERT, 2560), I(ROWS, 0, map), H(ROWS, 64), H(ROWS, 64)), OUT(H(ROWS, 2560)));
    RUN(qkv_rope_grad, "[7044,2560] bf16", .attrs = pack, IN(H(ROWS, 2560), H(ROWS, 64), H(ROWS, 64), I(TOKENS, 0, at_a), I(EXPERT, 0, at_b)),
        OUT(H(TOKENS, 2560), H(EXPERT, 2560)));
    vlai_attrs pack_sums = {.rope = {.head_dim = 128, .heads = 18, .sums = {VLA_BF16, VLA_BF16}}}, pack80_sums = {.rope = {.head_dim = 80, .heads = 32, .sums = {VLA_BF16}}};
    RUN(qkv_rope_grad, "[7044,2560] and sums, bf16", .attrs = pack_sums, IN(H(ROWS, 2560), H(ROWS, 64), H(ROWS, 64), I(TOKENS, 0, at_a), I(EXPERT, 0, at_b)),
        OUT(H(TOKENS, 2560), H(EXPERT, 2560), H(2560, 0), H(2560, 0)));
    RUN(qkv_rope, "[16848,3840] bf16, in place", .attrs = pack80, .in_place = 1, .untouched = 2.0 * 2 * PATCHES * 1280,
        IN(H(PATCHES, 3840), {0}, {0}, F(PATCHES, 40), F(PATCHES, 40)), OUT(H(PATCHES, 3840)));
    RUN(qkv_rope_grad, "[16848,3840] bf16, in place", .attrs = pack80, .in_place = 1, .untouched = 2.0 * 2 * PATCHES * 1280,
        IN(H(PATCHES, 3840), F(PATCHES, 40), F(PATCHES, 40)), OUT(H(PATCHES, 3840)));
    RUN(qkv_rope_grad, "[16848,3840] and sums, in place", .attrs = pack80_sums, .in_place = 1, .untouched = 2.0 * PATCHES * 1280,
        IN(H(PATCHES, 3840), F(PATCHES, 40), F(PATCHES, 40)), OUT(H(PATCHES, 3840), H(3840, 0)));
    RUN(gather_rows, "6784 of [7044,2048] bf16", .untouched = 2.0 * EXPERT * WIDTH, IN(H(ROWS, WIDTH), I(TOKENS, 0, at_a)), OUT(H(TOKENS, WIDTH)));
    RUN(merge_rows, "[6784+260,2048] bf16", IN(H(TOKENS, WIDTH), H(EXPERT, WIDTH), I(ROWS, 0, map), I(TOKENS, 0, at_a), I(EXPERT, 0, at_b)), OUT(H(ROWS, WIDTH)));
    vlai_attrs qkv = {.split = {.n = 3, .widths = {2048, 256, 256}}}, thirds = {.split = {.n = 3, .widths = {1280, 1280, 1280}}};
    RUN(split_cols, "[6784,2560] bf16", .attrs = qkv, IN(H(TOKENS, 2560)), OUT(H(TOKENS, 2048), H(TOKENS, 256), H(TOKENS, 256)));
    RUN(split_cols, "[16848,3840] bf16", .attrs = thirds, IN(H(PATCHES, 3840)), OUT(H(PATCHES, 1280), H(PATCHES, 1280), H(PATCHES, 1280)));
    RUN(concat_cols, "[6784,2560] bf16", IN(H(TOKENS, 2048), H(TOKENS, 256), H(TOKENS, 256)), OUT(H(TOKENS, 2560)));
    RUN(gather_rows, "[6784,2048] bf16", IN(H(TOKENS, WIDTH), I(TOKENS, 0, index)), OUT(H(TOKENS, WIDTH)));
    int32_t *ids = vlai_array(TOKENS, sizeof *ids); /* 162 pictures' rows of each sample have none; 98 words, most in every sample */
    if (!ids)
        return 1;
    for (int i = 0; i < TOKENS; i++)
        ids[i] = i % 260 < 162 ? -1 : i % 260 < 250 ? i % 260 * 331 : i * 17;
    vlai_attrs embedding = {.rows = {.rows = VOCABULARY, .skip = -1, .dtype = VLA_BF16}};
    RUN(scatter_add_rows, "2548 into [151936,2048] bf16", .attrs = embedding, .untouched = 2.0 * (TOKENS - 2548) * WIDTH, IN(H(TOKENS, WIDTH), I(TOKENS, 0, ids)), OUT(H(VOCABULARY, WIDTH)));
    vlai_attrs turned = {.rows = {.rows = 4212, .skip = -1, .dtype = VLA_BF16}};
    int32_t *turn = vlai_array(4212, sizeof *turn); /* a permutation */
    if (!turn)
        return 1;
    for (int i = 0; i < 4212; i++)
        turn[i] = (int32_t)(i * 1201L % 4212);
    RUN(scatter_add_rows, "4212 into [4212,5120] bf16", .attrs = turned, IN(H(4212, 5120), I(4212, 0, turn)), OUT(H(4212, 5120)));
    RUN(scatter_add_rows, "4212 into [4212,2048] bf16", .attrs = turned, IN(H(4212, 2048), I(4212, 0, turn)), OUT(H(4212, 2048)));
    RUN(put_rows, "4212 into [6784,2048] bf16", IN(H(TOKENS, WIDTH), I(4212, 0, index), H(4212, WIDTH)), OUT(H(TOKENS, WIDTH)));
    vlai_attrs patches = {.patchify = {.patch = 14, .temporal = 2, .mean = {0.48f, 0.46f, 0.41f}, .std = {0.27f, 0.26f, 0.28f}}};
    int32_t *corners = vlai_array(PATCHES, 3 * sizeof *corners); /* of 52 pictures of 252 x 252 */
    if (!corners)
        return 1;
    for (int i = 0; i < PATCHES; i++) {
        corners[3 * i] = i / 324 * 252 * 252 * 3 + i % 324 / 18 * 14 * 756 + i % 18 * 42;
        corners[3 * i + 1] = 756;
        corners[3 * i + 2] = 0;
    }
    RUN(patchify, "[16848,1176] bf16", .attrs = patches, IN({VLA_U8, 52 * 252 * 252 * 3, 0, NULL}, I(PATCHES, 3, corners)), OUT(H(PATCHES, 1176)));
    RUN(cross_entropy, "[400,151936] fp32", IN(F(LABELS, VOCABULARY), I(LABELS, 0, labels)), OUT(F(1, 0), F(LABELS, 0), F(1, 0)));
    RUN(cross_entropy_grad, "[400,151936] fp32", IN(F(1, 0), F(LABELS, VOCABULARY), I(LABELS, 0, labels), F(1, 0)), OUT(F(LABELS, VOCABULARY)));
    vlai_attrs adamw = {.adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}};
    int64_t n = (int64_t)GATES * WIDTH;
    RUN(sum_squares, "[22016,2048] bf16", IN(H(n, 0), {VLA_F64, 4, 0, NULL}));
    RUN(accumulate, "[22016,2048] fp32 += bf16", .writes = 1, IN(F(n, 0), H(n, 0)));
    RUN(adamw, "[22016,2048] split, fp32 moments", .attrs = adamw, .writes = 0x4D,
        IN(H(n, 0), H(n, 0), F(n, 0), F(n, 0), {VLA_F64, 5, 0, NULL}, {VLA_F64, 3, 0, NULL}, {VLA_U16, n, 0, NULL}));
    RUN(adamw, "[22016,2048] all bf16", .attrs = adamw, .writes = 0xD,
        IN(H(n, 0), H(n, 0), H(n, 0), H(n, 0), {VLA_F64, 5, 0, NULL}, {VLA_F64, 3, 0, NULL}, {VLA_DTYPE_NONE, 0, 0, NULL}));
    attention("26 x 260, 16/2 heads, 128, causal", 26, 260, 1, 16, 2, 128);
    attention("52 x 324, 16 heads, 80, full", 52, 324, 0, 16, 16, 80);
    attention("264 windows of 64, 16 heads, 80", 264, 64, 0, 16, 16, 80);
    attention("1053 windows of 16, 16 heads, 80", 1053, 16, 0, 16, 16, 80);
    vlai_device_stream_destroy(stream);
    return 0;
}
