#include "exec/device_facts.h"

#include "base/fail.h"
#include "exec/executor.h"

#include <stdio.h>
#include <string.h>

#ifdef VLA_CUDA
#include "base/bf16.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/time.h"
#include "exec/cuda_run.h"
#include "vendor/cublaslt.h"
#include "vendor/nvml.h"

/* Data sheets: dense bf16 with fp32 accumulation. */
static const struct {
    const char *name;
    double flops;
} nominal[] = {{"NVIDIA H200", 989e12}, {"NVIDIA H100 80GB HBM3", 989e12}, {"NVIDIA A100-SXM4-80GB", 312e12}, {"NVIDIA A100-SXM4-40GB", 312e12}};

static vlai_cuda_device *cuda_of(const vla_executor *ex)
{
    return ex->backend == &vlai_backend_cuda ? ex->state : NULL;
}

static void describe(const vlai_cuda_device *d, vlai_device_facts *out)
{
    vlai_nvml_reading r;
    vlai_nvml_read(d->info.bus, &r);
    snprintf(out->name, sizeof out->name, "%s", d->info.name);
    snprintf(out->driver, sizeof out->driver, "%s", r.driver);
    vlai_device_versions(&out->cuda_driver, &out->cuda_runtime);
    out->cublaslt = vlai_cublaslt_version();
    out->memory = d->info.memory;
    out->watts = r.limit;
    for (size_t i = 0; i < sizeof nominal / sizeof *nominal; i++)
        if (!strcmp(nominal[i].name, d->info.name))
            out->nominal_flops = nominal[i].flops;
}

enum { SIDE = 8192, POOL = 1 << 20, SEARCHED = 16, SCRATCH = 32 << 20 };
static const size_t matrix_bytes = (size_t)SIDE * SIDE * 2, copy_bytes = (size_t)512 << 20;
/* Readings of the product over 0.5 s differed by 2 % on one card within minutes. */
static const double warm_seconds = 1.5, copy_seconds = 0.5, product_seconds = 2;

/* What is measured: enqueues once, all on lane 0. */
typedef struct {
    const vlai_cuda_device *device;
    void *a, *b, *c, *scratch; /* matrices; copies go from the first half of `a` to the second */
    vlai_gemm *gemm;
} bench;

static int copy_once(const bench *b)
{
    return vlai_device_copy((char *)b->a + copy_bytes, b->a, copy_bytes, b->device->lanes[0]);
}

static int multiply_once(const bench *b)
{
    const vlai_gemm_operands o = {.a = b->a, .b = b->b, .c = b->c};
    return vlai_cublaslt_run(b->gemm, &o, b->scratch, b->device->lanes[0]);
}

/* Seconds of one, as the mean over `timed` seconds of them after `warm` seconds. */
static int time_of(const bench *b, int (*once)(const bench *), double warm, double timed, double *seconds)
{
    enum { BATCH = 16 };
    void *stream = b->device->lanes[0], *start = NULL, *end = NULL;
    int code = vlai_device_event_create(&start);
    if (!code)
        code = vlai_device_event_create(&end);
    double began = vlai_now(), mark = began, sum = 0;
    for (int64_t n = 0; !code && mark - began < warm + timed; mark = vlai_now()) {
        float ms = 0;
        code = vlai_device_event_record(start, stream);
        for (int i = 0; !code && i < BATCH; i++)
            code = once(b);
        if (code || (code = vlai_device_event_record(end, stream)) || (code = vlai_device_event_elapsed(start, end, &ms)))
            break;
        if (mark - began < warm)
            continue;
        sum += (double)ms * 1e-3 / BATCH;
        *seconds = sum / (double)++n;
    }
    vlai_device_event_destroy(start);
    vlai_device_event_destroy(end);
    return code;
}

/* Uniform numbers from [-1, 1), the first million over and over. */
static int randomize(const bench *b, void *matrix)
{
    uint16_t *pool = vlai_array(POOL, sizeof *pool);
    if (!pool)
        return 2; /* cudaErrorMemoryAllocation */
    const vlai_rng_key key = {.seed = 5, .stream = VLAI_RNG_SYNTH};
    for (uint32_t i = 0; i < POOL; i++)
        pool[i] = vlai_bf16_from_float(2 * vlai_rng_uniform(&key, i) - 1);
    int code = 0;
    for (size_t at = 0; !code && at < matrix_bytes; at += POOL * sizeof *pool)
        code = vlai_device_upload((char *)matrix + at, pool, POOL * sizeof *pool, b->device->lanes[0]);
    if (!code)
        code = vlai_device_synchronize(b->device->lanes[0]);
    vlai_free(pool);
    return code;
}

static int measure(bench *b, vlai_device_facts *out)
{
    const vlai_gemm_shape shape = {.m = SIDE, .n = SIDE, .k = SIDE, .operand = VLA_BF16, .result = VLA_BF16};
    double seconds = 0;
    int code;
    if ((code = vlai_device_alloc(2 * copy_bytes, &b->a)) || (code = vlai_device_alloc(matrix_bytes, &b->b)) ||
        (code = vlai_device_alloc(matrix_bytes, &b->c)) || (code = vlai_device_alloc(SCRATCH, &b->scratch)) ||
        (code = randomize(b, b->a)) || (code = randomize(b, b->b)) || (code = time_of(b, copy_once, 0.1, copy_seconds, &seconds)))
        return code;
    out->copy_bytes = 2 * (double)copy_bytes / seconds;
    const vlai_gemm_operands o = {.a = b->a, .b = b->b, .c = b->c};
    const vlai_gemm_effort effort = {.proposals = SEARCHED};
    if ((code = vlai_cublaslt_prepare(b->device->context.cublaslt, &shape, SCRATCH, &b->gemm)) ||
        (code = vlai_cublaslt_search(b->gemm, &o, &effort, b->scratch, b->device->lanes[0], NULL)))
        return 100000 + code;
    if ((code = time_of(b, multiply_once, warm_seconds, product_seconds, &seconds)))
        return code;
    out->gemm_flops = 2.0 * SIDE * SIDE * SIDE / seconds;
    return 0;
}
#endif

vla_status vlai_device_facts_get(const vla_executor *ex, vlai_device_facts *out, vla_error *err)
{
    (void)ex;
    (void)err;
    *out = (vlai_device_facts){0};
#ifdef VLA_CUDA
    if (cuda_of(ex))
        describe(cuda_of(ex), out);
#endif
    return VLA_OK;
}

vla_status vlai_device_peaks_measure(const vla_executor *ex, vlai_device_facts *out, vla_error *err)
{
    (void)ex;
    (void)out;
    (void)err;
#ifdef VLA_CUDA
    if (!cuda_of(ex))
        return VLA_OK;
    bench b = {.device = cuda_of(ex)};
    int code = measure(&b, out);
    if (b.gemm)
        vlai_cublaslt_release(b.gemm);
    vlai_device_free(b.a);
    vlai_device_free(b.b);
    vlai_device_free(b.c);
    vlai_device_free(b.scratch);
    if (code)
        return vlai_cuda_failed(err, code, "measuring copy bandwidth and products");
#endif
    return VLA_OK;
}

vlai_device_now vlai_device_now_get(const vla_executor *ex)
{
    vlai_device_now now = {0};
    (void)ex;
#ifdef VLA_CUDA
    if (!cuda_of(ex))
        return now;
    vlai_nvml_reading r;
    size_t free = 0, total = 0;
    vlai_nvml_read(cuda_of(ex)->info.bus, &r);
    vlai_device_memory(&free, &total);
    vlai_device_counts counts = vlai_device_counts_get();
    now = (vlai_device_now){.mhz = r.mhz, .celsius = r.celsius, .watts = r.watts, .used = total - free,
                            .allocations = counts.allocations, .synchronizations = counts.synchronizations};
#endif
    return now;
}

void vlai_device_list(vlai_text *out)
{
    (void)out;
#ifdef VLA_CUDA
    int count;
    vlai_device_info info;
    if (vlai_device_count(&count) || count == 0)
        return;
    vlai_text_printf(out, "%d GPU%s:", count, count == 1 ? "" : "s");
    for (int i = 0; i < count; i++)
        if (!vlai_device_describe(i, &info))
            vlai_text_printf(out, "%s %s (%.1f GB)", i ? "," : "", info.name, (double)info.memory * 1e-9);
#endif
}
