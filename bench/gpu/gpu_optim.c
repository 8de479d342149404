/* Times the update (sum_squares and adamw, in every mode of numerics) over 1.08 G parameters in the tensor sizes of Wall-X:
 * the embedding, eight layers of the language model and eight of the tower.
 *
 *     gpu_optim
 *
 * One line per case: time of one table of all tensors (kernels/optim.h), bytes moved (each operand once per direction), share
 * of the bandwidth of a copy kernel that this program measured first, the same for 4.15 G parameters, and the time of one
 * launch per tensor. About ten seconds and 18 GB of device memory. */
#include "base/bf16.h"
#include "base/memory.h"
#include "kernels/device.h"
#include "kernels/optim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 256, REPEATS = 10, PATTERN = 1 << 20 };

static void *stream;
static int multiprocessors;
static double copy_rate;
static int64_t sizes[MOST];
static int count;
static int64_t parameters;

static void must(int code, const char *what)
{
    if (code) {
        fprintf(stderr, "%s: %s\n", what, vlai_device_error(code));
        exit(1);
    }
}
#define MUST(call) must(call, #call)

static void copy(void *to, void *from, size_t bytes)
{
    vlai_node node = {.op = VLAI_OP_copy};
    vlai_cuda_tensor t = {.data = from, .dtype = VLA_F32, .rank = 1, .shape = {(int64_t)(bytes / 4)}, .elements = (int64_t)(bytes / 4)};
    vlai_cuda_call call = {.node = &node, .in = {t}, .out = {t}, .stream = stream, .multiprocessors = multiprocessors};
    call.out[0].data = to;
    MUST(vlai_cuda_copy(&call));
}

/* Device memory full of numbers of one scale: a pattern, copied on. v is positive. */
static void *arena(vla_dtype dtype, double scale, int positive, size_t bytes)
{
    static union {
        float whole[PATTERN];
        uint16_t half[2 * PATTERN];
    } host;
    uint32_t state = 1;
    int n = dtype == VLA_F32 ? PATTERN : 2 * PATTERN;
    for (int i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(scale * ((double)(state >> 8) / (1 << (positive ? 24 : 23)) - (positive ? 0 : 1)));
        if (dtype == VLA_F32)
            host.whole[i] = x;
        else
            host.half[i] = dtype == VLA_U16 ? (uint16_t)(state >> 17) : vlai_bf16_from_float(x);
    }
    void *memory;
    MUST(vlai_device_alloc(bytes, &memory));
    size_t done = bytes < sizeof host ? bytes : sizeof host;
    MUST(vlai_device_upload(memory, &host, done, stream));
    while (done < bytes) {
        size_t more = done < bytes - done ? done : (bytes - done) / 4 * 4;
        if (!more)
            break;
        copy((char *)memory + done, memory, more);
        done += more;
    }
    MUST(vlai_device_synchronize(stream));
    return memory;
}

static double timed(void (*run)(void *), void *context)
{
    void *start, *end;
    float ms;
    MUST(vlai_device_event_create(&start));
    MUST(vlai_device_event_create(&end));
    for (int i = 0; i < 3; i++)
        run(context);
    MUST(vlai_device_event_record(start, stream));
    for (int i = 0; i < REPEATS; i++)
        run(context);
    MUST(vlai_device_event_record(end, stream));
    MUST(vlai_device_event_elapsed(start, end, &ms));
    vlai_device_event_destroy(start);
    vlai_device_event_destroy(end);
    return (double)ms / REPEATS;
}

typedef struct bench {
    vlai_cuda_call calls[MOST];
    vlai_node nodes[MOST];
    void *table;
    vlai_optim_launch_plan plan;
} bench;

static void run_table(void *context)
{
    bench *b = context;
    MUST(vlai_optim_launch(b->table, &b->plan, stream));
}

static void run_single(void *context)
{
    bench *b = context;
    for (int i = 0; i < count; i++)
        MUST(b->nodes[i].op == VLAI_OP_adamw ? vlai_cuda_adamw(&b->calls[i]) : vlai_cuda_sum_squares(&b->calls[i]));
}

static void report(const char *name, bench *b, double bytes)
{
    vla_error err;
    size_t size = vlai_optim_table_bytes(b->calls, (size_t)count);
    void *host = malloc(size);
    if (!host || vlai_optim_table_fill(b->calls, (size_t)count, host, size, &b->plan, &err) != VLA_OK) {
        fprintf(stderr, "%s: %s\n", name, host ? err.message : "out of memory");
        exit(1);
    }
    MUST(vlai_device_alloc(size, &b->table));
    MUST(vlai_device_upload(b->table, host, size, stream));
    MUST(vlai_device_synchronize(stream));
    double ms = timed(run_table, b), single = timed(run_single, b), rate = bytes / (1e-3 * ms);
    printf("%-34s %8.3f ms %7.0f GB/s %5.2f of copy, 4.15 G parameters %6.2f ms; one launch per tensor %8.3f ms\n", name, ms, 1e-9 * rate,
           rate / copy_rate, ms * 4.15e9 / (double)parameters, single);
    fflush(stdout);
    vlai_device_free(b->table);
    free(host);
}

static size_t padded(int64_t n, vla_dtype dtype)
{
    return ((size_t)n * vla_dtype_size(dtype) + 63) / 64 * 64;
}

typedef struct mode {
    const char *name;
    vla_dtype weight, gradient, moment;
    int masters, stochastic;
} mode;

static void measure(const mode *m)
{
    static bench b;
    const vla_dtype types[] = {m->weight, m->gradient, m->moment, m->moment, m->masters ? VLA_U16 : VLA_DTYPE_NONE};
    static const double scales[] = {0.05, 1e-3, 1e-4, 1e-7, 0};
    void *arenas[5] = {0};
    size_t at[5] = {0};
    double update = 0, norm = 0;
    for (int k = 0; k < 5; k++) {
        size_t bytes = 0;
        for (int i = 0; i < count; i++)
            bytes += types[k] ? padded(sizes[i], types[k]) : 0;
        if (bytes)
            arenas[k] = arena(types[k], scales[k], k == 3, bytes);
        double each = (double)parameters * (double)(types[k] ? vla_dtype_size(types[k]) : 0);
        update += k == 1 ? each : 2 * each;
        norm += k == 1 ? each : 0;
    }
    const double numbers[] = {0.271, 0.1426, 3, 17, 1e-5}, clip[] = {4.1, 0.24, 1};
    void *hyper, *device_clip, *norms, *workspace;
    MUST(vlai_device_alloc(sizeof numbers, &hyper));
    MUST(vlai_device_alloc(sizeof clip, &device_clip));
    MUST(vlai_device_alloc(MOST * sizeof(double), &norms));
    MUST(vlai_device_alloc(1 << 20, &workspace));
    MUST(vlai_device_upload(hyper, numbers, sizeof numbers, stream));
    MUST(vlai_device_upload(device_clip, clip, sizeof clip, stream));
    MUST(vlai_device_synchronize(stream));
    for (int pass = 0; pass < 2; pass++) {
        memset(at, 0, sizeof at);
        for (int i = 0; i < count; i++) {
            vlai_cuda_tensor t[5];
            for (int k = 0; k < 5; k++) {
                t[k] = (vlai_cuda_tensor){.data = arenas[k] ? (char *)arenas[k] + at[k] : NULL, .dtype = types[k], .rank = 1, .shape = {sizes[i]},
                                          .elements = sizes[i]};
                at[k] += types[k] ? padded(sizes[i], types[k]) : 0;
            }
            b.calls[i] = (vlai_cuda_call){.node = &b.nodes[i], .stream = stream, .multiprocessors = multiprocessors, .workspace = workspace,
                                          .workspace_bytes = 1 << 20};
            if (pass == 0) {
                b.nodes[i] = (vlai_node){.op = VLAI_OP_sum_squares, .attrs.clip.index = i};
                b.calls[i].in[0] = t[1];
                b.calls[i].in[1] = (vlai_cuda_tensor){.data = norms, .dtype = VLA_F64, .rank = 1, .shape = {count}, .elements = count};
                continue;
            }
            b.nodes[i] = (vlai_node){.op = VLAI_OP_adamw, .attrs.adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1,
                                                                          .key = (uint64_t)i, .stochastic = m->stochastic}};
            memcpy(b.calls[i].in, t, 4 * sizeof *t);
            b.calls[i].in[4] = (vlai_cuda_tensor){.data = hyper, .dtype = VLA_F64, .rank = 1, .shape = {5}, .elements = 5};
            b.calls[i].in[5] = (vlai_cuda_tensor){.data = device_clip, .dtype = VLA_F64, .rank = 1, .shape = {3}, .elements = 3};
            b.calls[i].in[6] = t[4];
        }
        char name[64];
        snprintf(name, sizeof name, "%s, %s", pass ? "adamw" : "norm", m->name);
        report(name, &b, pass ? update : norm);
    }
    for (int k = 0; k < 5; k++)
        vlai_device_free(arenas[k]);
    vlai_device_free(hyper);
    vlai_device_free(device_clip);
    vlai_device_free(norms);
    vlai_device_free(workspace);
}

static void *copied[2];

static void run_copy(void *context)
{
    copy(copied[1], copied[0], *(size_t *)context);
}

static void add(int64_t n, int times)
{
    for (int i = 0; i < times && count < MOST; i++) {
        sizes[count++] = n;
        parameters += n;
    }
}

int main(void)
{
    int devices = 0;
    vlai_device_info info = {0};
    int code = vlai_device_count(&devices);
    if (code || !devices) {
        printf("no CUDA device: %s\n", code ? vlai_device_error(code) : "none found");
        return 77;
    }
    MUST(vlai_device_select(0, &info));
    multiprocessors = info.multiprocessors;
    MUST(vlai_device_stream_create(&stream));
    add(151936LL * 2048, 1);
    for (int layer = 0; layer < 8; layer++) {
        add(2560 * 2048, 1), add(2560, 1), add(2048 * 2048, 1), add(2 * 11008 * 2048, 1), add(11008 * 2048, 1), add(2048, 2);
        add(3840 * 1280, 1), add(3840, 1), add(1280 * 1280, 1), add(1280, 4), add(2 * 3456 * 1280, 1), add(2 * 3456, 1), add(3456 * 1280, 1);
    }
    size_t bytes = (size_t)2 << 30;
    copied[0] = arena(VLA_F32, 1, 0, bytes);
    copied[1] = arena(VLA_F32, 1, 0, bytes);
    copy_rate = 2 * (double)bytes / (1e-3 * timed(run_copy, &bytes));
    vlai_device_free(copied[0]);
    vlai_device_free(copied[1]);
    printf("%s, %d tensors, %.3f G parameters, copy %.0f GB/s\n", info.name, count, 1e-9 * (double)parameters, 1e-9 * copy_rate);
    static const mode modes[] = {
        {"bf16 (masters)", VLA_BF16, VLA_BF16, VLA_F32, 1, 0},     {"bf16, fp32 gradient", VLA_BF16, VLA_F32, VLA_F32, 1, 0},
        {"bf16-sr", VLA_BF16, VLA_BF16, VLA_BF16, 0, 1},           {"bf16-sr, fp32 gradient", VLA_BF16, VLA_F32, VLA_BF16, 0, 1},
        {"bf16-plain", VLA_BF16, VLA_BF16, VLA_BF16, 0, 0},        {"fp32", VLA_F32, VLA_F32, VLA_F32, 0, 0},
    };
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++)
        measure(&modes[m]);
    vlai_device_stream_destroy(stream);
    return 0;
}
