/* Times every implementation of attention at the sizes of a Wall-X step (batch 26), forward and backward, on packed q|k|v.
 *
 *     gpu_attention [NAME...]      only the implementations named: wide windows long groups cudnn segments tiles plain
 *
 * Median of 25 runs of 8 launches on a warm card, which follow each other as in a step; buffers are taken in turn, so many sets
 * that nothing is found in L2 that a step would not find there. TFLOP/s count visible pairs, 4 D forward and 10 D backward. The
 * floor is every operand read once and every result written once at the copy bandwidth that is measured first. "fixed" = adds
 * in a fixed order. "off": norm of the difference of o, or of the gradients, from the first implementation's, of its norm. "streams": the
 * decoder as a step has it, o and do of a segment's last 10 rows apart from the others'. */
#include "base/bf16.h"
#include "base/memory.h"
#include "kernels/attention.h"
#include "kernels/device.h"
#include "vendor/cudnn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SETS = 4, RUN = 8, WARM = 5, TIMED = 25, PIECE = 1 << 20, MOST = 1024 };

typedef struct problem {
    const char *name;
    int heads, kv_heads, dim;
    vla_attention_mask mask;
    int segments;
    int64_t apart; /* last rows of each segment whose o and do are a stream of their own; 0: one stream */
    int64_t length[MOST];
} problem;

static void *stream;
static struct vlai_cudnn *cudnn;
static double copy_rate; /* bytes per second, read and written */
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

static int wanted(const char *name)
{
    for (int i = 1; i < argc_; i++)
        if (strcmp(argv_[i], name) == 0)
            return 1;
    return argc_ < 2;
}

static void *device_copy(const void *host, size_t bytes)
{
    void *p;
    MUST(vlai_device_alloc(bytes, &p));
    MUST(vlai_device_upload(p, host, bytes, stream));
    MUST(vlai_device_synchronize(stream));
    return p;
}

/* n random bf16 numbers, about normal, of deviation 1. */
static void *device_random(int64_t n)
{
    static uint16_t *half;
    void *p;
    if (!half) {
        uint32_t state = 1;
        if (!(half = malloc(PIECE * sizeof *half)))
            exit(1);
        for (int i = 0; i < PIECE; i++) {
            float sum = 0;
            for (int k = 0; k < 4; k++) {
                state = state * 1664525u + 1013904223u;
                sum += (float)(state >> 8) / (1 << 24) - 0.5f;
            }
            half[i] = vlai_bf16_from_float(sum * 1.7f);
        }
    }
    MUST(vlai_device_alloc((size_t)n * 2, &p));
    for (int64_t at = 0; at < n; at += PIECE)
        MUST(vlai_device_upload((char *)p + at * 2, half, (size_t)(n - at < PIECE ? n - at : PIECE) * 2, stream));
    MUST(vlai_device_synchronize(stream));
    return p;
}

static void *device_memory(size_t bytes)
{
    void *p;
    MUST(vlai_device_alloc(bytes, &p));
    MUST(vlai_device_zero(p, bytes, stream));
    return p;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Milliseconds of a launch(i, context): the median over runs of RUN launches. */
static double median_of(int (*launch)(int i, void *context), void *context)
{
    float ms[TIMED];
    void *start, *end;
    MUST(vlai_device_event_create(&start));
    MUST(vlai_device_event_create(&end));
    for (int i = 0; i < WARM + TIMED; i++) {
        MUST(vlai_device_event_record(start, stream));
        for (int k = 0; k < RUN; k++)
            MUST(launch(k, context));
        MUST(vlai_device_event_record(end, stream));
        MUST(vlai_device_synchronize(stream));
        if (i >= WARM)
            MUST(vlai_device_event_elapsed(start, end, &ms[i - WARM]));
    }
    vlai_device_event_destroy(start);
    vlai_device_event_destroy(end);
    qsort(ms, TIMED, sizeof *ms, by_value);
    return (double)ms[TIMED / 2] / RUN;
}

typedef struct timed {
    const vlai_cuda_call *calls;
    int by;
} timed;

static int launch_attention(int i, void *context)
{
    const timed *t = context;
    return vlai_cuda_attention_by(t->by, &t->calls[i % SETS]);
}

static int launch_copy(int i, void *context)
{
    (void)i;
    return vlai_cuda_copy(context);
}

static vlai_cuda_tensor tensor(vla_dtype dtype, int rank, int64_t rows, int64_t cols, void *data)
{
    return (vlai_cuda_tensor){.dtype = dtype, .rank = rank, .shape = {rows, cols}, .elements = rows * (rank > 1 ? cols : 1), .data = data};
}

static void measure_copy(void)
{
    int64_t n = 1 << 28;
    vlai_node node = {.op = VLAI_OP_copy, .n_inputs = 1, .n_outputs = 1};
    vlai_cuda_call call = {.node = &node, .stream = stream, .multiprocessors = multiprocessors};
    call.in[0] = tensor(VLA_BF16, 1, n, 0, device_random(n));
    call.out[0] = tensor(VLA_BF16, 1, n, 0, device_memory((size_t)n * 2));
    copy_rate = (double)n * 4 / (median_of(launch_copy, &call) * 1e-3);
    vlai_device_free(call.in[0].data);
    vlai_device_free(call.out[0].data);
}

static float from_bf16(uint16_t x)
{
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)x << 16};
    return u.value;
}

/* The distance of a result from `first`, of which it becomes a copy where there is none yet. */
static double distance(const vlai_cuda_tensor *t, uint16_t **first)
{
    size_t bytes = (size_t)t->elements * 2;
    uint16_t *got = malloc(bytes);
    double off = 0, norm = 0;
    if (!got)
        exit(1);
    MUST(vlai_device_download(got, t->data, bytes, stream));
    MUST(vlai_device_synchronize(stream));
    if (!*first)
        *first = got;
    for (int64_t i = 0; i < t->elements; i++) {
        double x = (double)from_bf16(got[i]), y = (double)from_bf16((*first)[i]);
        off += (x - y) * (x - y);
        norm += y * y;
    }
    if (got != *first)
        free(got);
    return sqrt(off / norm);
}

/* Scratch as a plan would reserve it for the two ops. */
static size_t scratch_of(const vlai_node *node, const vlai_cuda_call *call, vlai_cuda_workspace_fn of)
{
    vlai_value_info values[VLAI_MAX_INPUTS] = {0};
    vla_graph graph = {.values = values, .n_values = VLAI_MAX_INPUTS};
    for (int k = 0; k < node->n_inputs; k++) {
        values[k] = (vlai_value_info){.dtype = call->in[k].dtype, .rank = call->in[k].rank, .elements = call->in[k].elements};
        memcpy(values[k].shape, call->in[k].shape, sizeof values[k].shape);
    }
    return of(&graph, node);
}

static void measure(const problem *p)
{
    int64_t n = 0, longest = 0, wide = (int64_t)p->heads * p->dim, width = wide + 2 * (int64_t)p->kv_heads * p->dim;
    double pairs = 0;
    for (int s = 0; s < p->segments; s++) {
        n += p->length[s];
        longest = p->length[s] > longest ? p->length[s] : longest;
        pairs += (double)p->length[s] * (double)(p->mask == VLA_MASK_CAUSAL ? p->length[s] + 1 : 2 * p->length[s]) / 2;
    }
    int32_t *ints = vlai_array((size_t)n * 9 + MOST + 1, sizeof *ints);
    if (!ints)
        exit(1);
    int32_t *qpos = ints, *rows = qpos + n, *cols = rows + 2 * n, *cut = cols + 4 * n;
    int64_t first = 0;
    for (int s = 0; s < p->segments; first += p->length[s++])
        for (int64_t i = first; i < first + p->length[s]; i++) {
            int causal = p->mask == VLA_MASK_CAUSAL;
            qpos[i] = (int32_t)i;
            rows[2 * i] = (int32_t)first;
            rows[2 * i + 1] = (int32_t)(causal ? i + 1 : first + p->length[s]);
            cols[4 * i] = (int32_t)(causal ? i : first);
            cols[4 * i + 1] = (int32_t)(first + p->length[s]);
            cols[4 * i + 2] = cols[4 * i + 3] = 0;
            cut[s] = (int32_t)first;
        }
    cut[p->segments] = (int32_t)n;
    int32_t *map = cut + p->segments + 1, *at_a = map + n;
    int64_t in_stream[2] = {0, 0};
    for (int s = 0; s < p->segments; s++)
        for (int32_t i = cut[s]; i < cut[s + 1]; i++) {
            int b = i >= cut[s + 1] - p->apart;
            map[i] = b ? (int32_t)(-1 - in_stream[1]) : (int32_t)in_stream[0];
            if (!b)
                at_a[in_stream[0]] = i;
            in_stream[b]++;
        }
    const vlai_cuda_tensor routes[2] = {tensor(VLA_I32, 1, n, 0, device_copy(map, (size_t)n * 4)),
                                        tensor(VLA_I32, 1, in_stream[0], 0, device_copy(at_a, (size_t)in_stream[0] * 4))};
    const vlai_cuda_tensor tables[4] = {tensor(VLA_I32, 1, n, 0, device_copy(qpos, (size_t)n * 4)), tensor(VLA_I32, 2, n, 2, device_copy(rows, (size_t)n * 8)),
                                        tensor(VLA_I32, 2, n, 4, device_copy(cols, (size_t)n * 16)),
                                        tensor(VLA_I32, 1, p->segments + 1, 0, device_copy(cut, (size_t)(p->segments + 1) * 4))};
    vlai_free(ints);
    vlai_attrs a = {.attention = {.heads = p->heads, .kv_heads = p->kv_heads, .head_dim = p->dim, .scale = 1 / sqrt((double)p->dim),
                                  .mask = p->mask, .longest = longest}};
    vlai_node nodes[2] = {{.op = VLAI_OP_attention_qkv, .n_inputs = 5, .n_outputs = 2, .attrs = a},
                          {.op = VLAI_OP_attention_qkv_grad, .n_inputs = 8, .n_outputs = 1, .attrs = a}};
    for (int k = 0; k < VLAI_MAX_INPUTS; k++)
        nodes[0].inputs[k] = nodes[1].inputs[k] = k;
    if (p->apart) {
        nodes[0].n_inputs += 2;
        nodes[0].n_outputs++;
        nodes[1].n_inputs += 3;
    }
    vlai_cuda_call calls[2][SETS];
    for (int s = 0; s < SETS; s++) {
        vlai_cuda_tensor qkv = tensor(VLA_BF16, 2, n, width, device_random(n * width));
        vlai_cuda_tensor o = tensor(VLA_BF16, 2, in_stream[0], wide, device_memory((size_t)(in_stream[0] * wide) * 2));
        vlai_cuda_tensor lse = tensor(VLA_F32, 2, n, p->heads, device_memory((size_t)(n * p->heads) * 4));
        for (int b = 0; b < 2; b++)
            calls[b][s] = (vlai_cuda_call){.node = &nodes[b], .stream = stream, .multiprocessors = multiprocessors};
        vlai_cuda_call *f = &calls[0][s], *g = &calls[1][s];
        f->in[0] = g->in[1] = qkv;
        f->out[0] = g->in[2] = o;
        f->out[1] = g->in[3] = lse;
        g->in[0] = tensor(VLA_BF16, 2, in_stream[0], wide, device_random(in_stream[0] * wide));
        if (p->apart) {
            f->in[5] = g->in[8] = routes[0];
            f->in[6] = routes[1];
            f->out[2] = g->in[10] = tensor(VLA_BF16, 2, in_stream[1], wide, device_memory((size_t)(in_stream[1] * wide) * 2));
            g->in[9] = tensor(VLA_BF16, 2, in_stream[1], wide, device_random(in_stream[1] * wide));
        }
        g->out[0] = tensor(VLA_BF16, 2, n, width, device_memory((size_t)(n * width) * 2));
        for (int k = 0; k < 4; k++)
            f->in[1 + k] = g->in[4 + k] = tables[k];
    }
    size_t scratch = scratch_of(&nodes[0], &calls[0][0], vlai_cuda_workspace_attention_qkv);
    size_t more = scratch_of(&nodes[1], &calls[1][0], vlai_cuda_workspace_attention_qkv_grad);
    scratch = scratch > more ? scratch : more;
    if (p->apart) /* for kernels that want o and do in one piece */
        scratch += 2 * ((size_t)(n * wide) * 2 + 512);
    void *workspace = device_memory(scratch);
    printf("%s: %d segments, %lld rows, heads %d/%d of %d, %.0f MB of scratch\n", p->name, p->segments, (long long)n, p->heads, p->kv_heads, p->dim,
           (double)scratch / 1e6);
    uint16_t *results[2] = {NULL, NULL};
    for (int by = 0; vlai_cuda_attention_name(by); by++) {
        const char *name = vlai_cuda_attention_name(by);
        int fast = strcmp(name, "cudnn") == 0;
        double both = 0;
        if (!wanted(name))
            continue;
        for (int b = 0; b < 2; b++) {
            vlai_cuda_context context = {.fast_attention = fast, .cudnn = &cudnn};
            vla_error err;
            for (int s = 0; s < SETS; s++) {
                calls[b][s].workspace = workspace;
                calls[b][s].workspace_bytes = scratch;
                if (vlai_cuda_attention_prepare(&context, &calls[b][s], &err) != VLA_OK)
                    exit(1);
            }
            int code = vlai_cuda_attention_by(by, &calls[b][0]);
            if (code != -1) {
                MUST(code);
                /* The backward pass needs o and lse of every set. */
                for (int s = 0; b == 0 && s < SETS; s++)
                    MUST(vlai_cuda_attention_by(by, &calls[b][s]));
                double ms = median_of(launch_attention, &(timed){calls[b], by});
                double flops = (b ? 10.0 : 4.0) * p->dim * p->heads * pairs;
                double bytes = (double)n * 2 * (double)(b ? 2 * width + 2 * wide : width + wide) + (double)n * p->heads * 4;
                both += ms;
                printf("  %-8s %-8s %8.4f ms %7.1f TFLOP/s %7.0f GB/s %6.2f x floor, off %.1e %s\n", name, b ? "backward" : "forward", ms,
                       flops / ms * 1e-9, bytes / ms * 1e-6, ms * 1e-3 / (bytes / copy_rate), distance(&calls[b][0].out[0], &results[b]),
                       fast ? "" : "fixed");
                if (b)
                    printf("  %-8s both     %8.4f ms\n", name, both);
                fflush(stdout);
            }
            for (int s = 0; s < SETS; s++)
                vlai_cuda_attention_release(&calls[b][s]);
        }
    }
    free(results[0]);
    free(results[1]);
    for (int s = 0; s < SETS; s++) {
        vlai_device_free(calls[0][s].in[0].data);
        vlai_device_free(calls[0][s].out[0].data);
        vlai_device_free(calls[0][s].out[1].data);
        vlai_device_free(calls[0][s].out[2].data);
        vlai_device_free(calls[1][s].in[0].data);
        vlai_device_free(calls[1][s].in[9].data);
        vlai_device_free(calls[1][s].out[0].data);
    }
    for (int k = 0; k < 4; k++)
        vlai_device_free(tables[k].data);
    for (int k = 0; k < 2; k++)
        vlai_device_free(routes[k].data);
    vlai_device_free(workspace);
}

int main(int argc, char **argv)
{
    static problem decoder = {.name = "decoder", .heads = 16, .kv_heads = 2, .dim = 128, .mask = VLA_MASK_CAUSAL, .segments = 26};
    static problem windows = {.name = "tower, windows", .heads = 16, .kv_heads = 16, .dim = 80, .mask = VLA_MASK_FULL, .segments = 52 * 9};
    static problem whole = {.name = "tower, whole pictures", .heads = 16, .kv_heads = 16, .dim = 80, .mask = VLA_MASK_FULL, .segments = 52};
    static const int64_t picture[9] = {64, 64, 16, 64, 64, 16, 16, 16, 4}, around[26] = {0,  -20, 20, 5,  -5, 11, -11, 17, -17, 3,  -3, 14, -14,
                                                                                     8, -8,  1,  -1, 19, -19, 6,  -6, 12, -12, 9, -9, 0};
    vlai_device_info info = {0};
    argc_ = argc;
    argv_ = argv;
    MUST(vlai_device_select(0, &info));
    MUST(vlai_device_stream_create(&stream));
    multiprocessors = info.multiprocessors;
    for (int s = 0; s < decoder.segments; s++)
        decoder.length[s] = 270 + around[s];
    for (int s = 0; s < windows.segments; s++)
        windows.length[s] = picture[s % 9];
    for (int s = 0; s < whole.segments; s++)
        whole.length[s] = 324;
    measure_copy();
    printf("%s: copies at %.0f GB/s read and written\n", info.name, copy_rate * 1e-9);
    measure(&decoder);
    decoder.name = "decoder, streams";
    decoder.apart = 10;
    measure(&decoder);
    measure(&windows);
    measure(&whole);
    printf("cuDNN %d\n", vlai_cudnn_version());
    vlai_cudnn_close(cudnn);
    vlai_device_stream_destroy(stream);
    return 0;
}
