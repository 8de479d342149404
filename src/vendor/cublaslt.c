#include "vendor/cublaslt.h"

#include "base/memory.h"
#include "base/time.h"
#include "kernels/device.h"

#include <cublasLt.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    WIDE = 512,       /* settings beside the heuristic's proposals */
    OPTIONS = 8,      /* custom options that are tried */
    FINALISTS = 6, ROUNDS = 3,
    LARGE_FINALISTS = 9, PROPOSED = 3, LAST = 3
};

/* Each proposal runs for FIRST_MS. Of products that take less than LARGE_MS a launch or WORTH_MS a step, the best FINALISTS then run in
 * ROUNDS turns of SHORT_MS. Of others, settings beside the proposals are run a few times, and the best LARGE_FINALISTS of all and the
 * best PROPOSED of the proposals for LONG_SHARE times what the product takes in a step, within the bounds of LONG_MS (NEAR_MS where all
 * that is beside the proposals was chosen so before); of those the best LAST for LAST_TIMES as long, twice where that is the upper
 * bound. Of a long run only the last TIMED of its launches count: by then the clock is the one that the algorithm leaves. The shapes of
 * Wall-X at B = 26 take about 77 s on an H200. */
static const float FIRST_MS = 2, SHORT_MS = 1, LARGE_MS = 0.07f, WORTH_MS = 2;
static const float LONG_MS[2] = {40, 100}, NEAR_MS = 20, LONG_SHARE = 8, LAST_TIMES = 2.5f, WARM_TIMES = 1.5f, TIMED = 0.6f;

/* The heuristic proposes 8 settings of its kernels for Hopper where thousands run, and does not know of the power limit. These tiles
 * (rows and columns of the column-major result) are those that came first when a quarter of the space was run for 12 products of
 * Wall-X on an H200: by up to 7 %, on average 2 %, before the best proposal. */
static const cublasLtMatmulTile_t tiles[] = {
#define TILE(size) CUBLASLT_MATMUL_TILE_##size
    TILE(64x248),  TILE(64x264),  TILE(64x288),  TILE(96x192),  TILE(96x384),  TILE(128x104), TILE(128x120), TILE(128x128), TILE(128x136),
    TILE(128x144), TILE(128x152), TILE(128x160), TILE(128x168), TILE(128x176), TILE(128x184), TILE(128x192), TILE(128x208), TILE(128x216),
    TILE(128x256), TILE(128x272), TILE(128x280), TILE(128x288), TILE(128x296), TILE(128x304), TILE(128x312), TILE(128x344), TILE(128x352),
    TILE(136x256), TILE(144x128), TILE(152x128), TILE(160x128), TILE(160x256), TILE(168x256), TILE(176x128), TILE(176x256), TILE(192x96),
    TILE(192x104), TILE(192x112), TILE(192x128), TILE(192x192), TILE(256x80),  TILE(256x88),  TILE(256x96),  TILE(256x104), TILE(256x112),
    TILE(256x128), TILE(256x136), TILE(256x144), TILE(256x152), TILE(256x168), TILE(256x176), TILE(296x128), TILE(320x128), TILE(336x128),
    TILE(344x64),  TILE(344x128)
#undef TILE
};
static const uint16_t clusters[] = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1};

struct vlai_gemm {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t first, second, result; /* column-major: first is our b, second our a */
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace, most_workspace;
    size_t zeros; /* bytes of a result that is a sum of nothing */
    int empty, bias, residual, multiprocessors;
};

_Static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof ((vlai_gemm_choice *)0)->words, "an algorithm is 64 bytes");

int vlai_cublaslt_open(void **handle)
{
    return (int)cublasLtCreate((cublasLtHandle_t *)handle);
}

void vlai_cublaslt_close(void *handle)
{
    if (handle)
        cublasLtDestroy((cublasLtHandle_t)handle);
}

size_t vlai_cublaslt_version(void)
{
    return cublasLtGetVersion();
}

const char *vlai_cublaslt_error(int code)
{
    return cublasLtGetStatusString((cublasStatus_t)code);
}

static cudaDataType_t type_of(vla_dtype dtype)
{
    return dtype == VLA_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* Fills `found` with up to `most` algorithms, the best guess first. Parts of a sum over K are added in fp32: kept in the result's type,
 * which is a scheme too, they would be rounded to bf16 one by one. None of the kept choices is of that scheme. */
static cublasStatus_t proposals(const vlai_gemm *g, int most, cublasLtMatmulHeuristicResult_t *found, int *count)
{
    cublasLtMatmulPreference_t preference = NULL;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    *count = 0;
    cublasStatus_t code = cublasLtMatmulPreferenceCreate(&preference);
    if (code == CUBLAS_STATUS_SUCCESS)
        code = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &g->most_workspace, sizeof g->most_workspace);
    if (code == CUBLAS_STATUS_SUCCESS)
        code = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes);
    if (code == CUBLAS_STATUS_SUCCESS)
        code = cublasLtMatmulAlgoGetHeuristic(g->handle, g->operation, g->first, g->second, g->result, g->result, preference, most, found, count);
    if (preference)
        cublasLtMatmulPreferenceDestroy(preference);
    return code == CUBLAS_STATUS_SUCCESS && *count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : code;
}

/* Row-major c = op(a) op(b) is column-major c^T = op(b)^T op(a)^T: the memory of a row-major matrix [r,s] is that of a
 * column-major one [s,r]. Sums of op(a) over K are then the reduction of the second operand: the epilogue BGRADB. */
int vlai_cublaslt_prepare(void *handle, const vlai_gemm_shape *s, size_t workspace, vlai_gemm **out)
{
    vlai_gemm *g = vlai_calloc(1, sizeof *g);
    *out = g;
    if (!g)
        return (int)CUBLAS_STATUS_ALLOC_FAILED;
    g->handle = handle;
    g->bias = s->bias || s->sums;
    g->residual = s->residual;
    g->multiprocessors = s->multiprocessors;
    g->most_workspace = workspace;
    g->empty = s->m == 0 || s->n == 0 || (s->k == 0 && !s->bias && !s->residual && !s->sums);
    g->zeros = g->empty ? (size_t)(s->m * s->n) * vla_dtype_size(s->result) : 0;
    if (g->empty)
        return 0;
    if (s->k == 0 || (s->bias && s->sums))
        return (int)CUBLAS_STATUS_NOT_SUPPORTED;
    cublasOperation_t first = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t code = cublasLtMatmulDescCreate(&g->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    memset(&found, 0, sizeof found);
#define TRY(call)                           \
    do {                                    \
        if (code == CUBLAS_STATUS_SUCCESS)  \
            code = (call);                  \
    } while (0)
    TRY(cublasLtMatmulDescSetAttribute(g->operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    TRY(cublasLtMatmulDescSetAttribute(g->operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    if (s->multiprocessors > 0) {
        int32_t target = s->multiprocessors;
        TRY(cublasLtMatmulDescSetAttribute(g->operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &target, sizeof target));
    }
    if (g->bias) {
        cublasLtEpilogue_t epilogue = s->sums ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BIAS;
        cudaDataType_t bias_type = type_of(s->bias_type);
        TRY(cublasLtMatmulDescSetAttribute(g->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
        TRY(cublasLtMatmulDescSetAttribute(g->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof bias_type));
    }
    cudaDataType_t operand = type_of(s->operand);
    TRY(cublasLtMatrixLayoutCreate(&g->first, operand, (uint64_t)(s->transpose_b ? s->k : s->n), (uint64_t)(s->transpose_b ? s->n : s->k),
                                   s->transpose_b ? s->k : s->n));
    TRY(cublasLtMatrixLayoutCreate(&g->second, operand, (uint64_t)(s->transpose_a ? s->m : s->k), (uint64_t)(s->transpose_a ? s->k : s->m),
                                   s->transpose_a ? s->m : s->k));
    TRY(cublasLtMatrixLayoutCreate(&g->result, type_of(s->result), (uint64_t)s->n, (uint64_t)s->m, s->n));
    TRY(proposals(g, 1, &found, &count));
#undef TRY
    g->algorithm = found.algo;
    g->workspace = found.workspaceSize;
    return (int)code;
}

void vlai_cublaslt_release(vlai_gemm *g)
{
    if (!g)
        return;
    if (g->operation)
        cublasLtMatmulDescDestroy(g->operation);
    if (g->first)
        cublasLtMatrixLayoutDestroy(g->first);
    if (g->second)
        cublasLtMatrixLayoutDestroy(g->second);
    if (g->result)
        cublasLtMatrixLayoutDestroy(g->result);
    vlai_free(g);
}

static cublasStatus_t launch(const vlai_gemm *g, const cublasLtMatmulAlgo_t *algorithm, size_t bytes, const vlai_gemm_operands *o,
                             void *workspace, void *stream)
{
    static const float one = 1.0f, zero = 0.0f;
    if (g->bias) {
        cublasStatus_t code = cublasLtMatmulDescSetAttribute(g->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &o->bias, sizeof o->bias);
        if (code != CUBLAS_STATUS_SUCCESS)
            return code;
    }
    return cublasLtMatmul(g->handle, g->operation, &one, o->b, g->first, o->a, g->second, g->residual ? &one : &zero,
                          g->residual ? o->residual : o->c, g->result, o->c, g->result, algorithm, workspace, bytes, (cudaStream_t)stream);
}

int vlai_cublaslt_run(const vlai_gemm *g, const vlai_gemm_operands *o, void *workspace, void *stream)
{
    if (!g->empty)
        return (int)launch(g, &g->algorithm, g->workspace, o, workspace, stream);
    return g->zeros && vlai_device_zero(o->c, g->zeros, stream) ? (int)CUBLAS_STATUS_EXECUTION_FAILED : 0;
}

typedef struct {
    const vlai_gemm *g;
    const vlai_gemm_operands *o;
    void *workspace, *stream, *start, *end;
} timing;

/* Milliseconds of one launch; negative when the algorithm does not run. */
static float once(const timing *t, const cublasLtMatmulHeuristicResult_t *r)
{
    float ms = -1;
    if (vlai_device_event_record(t->start, t->stream) || launch(t->g, &r->algo, r->workspaceSize, t->o, t->workspace, t->stream) != CUBLAS_STATUS_SUCCESS ||
        vlai_device_event_record(t->end, t->stream) || vlai_device_event_elapsed(t->start, t->end, &ms))
        return -1;
    return ms;
}

static float median(float *x, int n)
{
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && x[j] < x[j - 1]; j--) {
            float swap = x[j];
            x[j] = x[j - 1];
            x[j - 1] = swap;
        }
    return x[n / 2];
}

/* Launches back to back for about `wanted` milliseconds; -> milliseconds a launch of the last share `counted` of them, negative when it
 * does not run. */
static float sustained(const timing *t, const cublasLtMatmulHeuristicResult_t *r, float one, float wanted, float counted)
{
    int launches = (int)(wanted / (one > 0.001f ? one : 0.001f)) + 1, first = (int)((1 - counted) * (float)launches);
    float ms = -1;
    for (int i = 0; i < launches; i++)
        if ((i == first && vlai_device_event_record(t->start, t->stream)) ||
            launch(t->g, &r->algo, r->workspaceSize, t->o, t->workspace, t->stream) != CUBLAS_STATUS_SUCCESS)
            return -1;
    if (vlai_device_event_record(t->end, t->stream) || vlai_device_event_elapsed(t->start, t->end, &ms))
        return -1;
    return ms / (float)(launches - first);
}

/* An algorithm among those that a search compares. */
typedef struct {
    cublasLtMatmulHeuristicResult_t r;
    float ms;      /* by the last way of timing it; negative: it does not run */
    bool proposed; /* by the heuristic */
} candidate;

static int faster(const void *a, const void *b)
{
    float x = ((const candidate *)a)->ms, y = ((const candidate *)b)->ms;
    if (x < 0 || y < 0)
        return (x < 0) - (y < 0);
    return (x > y) - (x < y);
}

static bool same(const cublasLtMatmulAlgo_t *a, const cublasLtMatmulAlgo_t *b)
{
    return !memcmp(a, b, sizeof *a);
}

static candidate *found(candidate *list, int count, const cublasLtMatmulAlgo_t *algorithm)
{
    for (int i = 0; i < count; i++)
        if (same(&list[i].r.algo, algorithm))
            return &list[i];
    return NULL;
}

/* Whether the setting runs for this product; then it is completed. */
static bool is_valid(const vlai_gemm *g, candidate *x)
{
    const cublasLtMatmulAlgo_t set = x->r.algo;
    if (cublasLtMatmulAlgoCheck(g->handle, g->operation, g->first, g->second, g->result, g->result, &set, &x->r) != CUBLAS_STATUS_SUCCESS ||
        x->r.workspaceSize > g->most_workspace)
        return false;
    x->r.algo = set;
    x->r.state = CUBLAS_STATUS_SUCCESS;
    return true;
}

/* Adds choices for the same product with other rows; -> how many there are then. */
static int add_near(const vlai_gemm *g, const vlai_gemm_effort *effort, candidate *list, int count, int room)
{
    for (int i = 0; i < effort->n_near && count < room; i++) {
        candidate *x = &list[count];
        *x = (candidate){0};
        memcpy(&x->r.algo, effort->near[i].words, sizeof x->r.algo);
        if (!found(list, count, &x->r.algo) && is_valid(g, x))
            count++;
    }
    return count;
}

/* What of an algorithm can be set. */
typedef struct {
    uint32_t tile, stages, option, swizzle;
    uint16_t cluster;
    int32_t parts; /* of K, which are added in fp32 and in order */
} setting;

enum { ATTRIBUTES = 7 };
typedef struct {
    cublasLtMatmulAlgoConfigAttributes_t attribute;
    void *value;
    size_t size;
} attribute;

static void attributes_of(setting *s, uint32_t *scheme, attribute out[ATTRIBUTES])
{
    const attribute all[ATTRIBUTES] = {
        {CUBLASLT_ALGO_CONFIG_TILE_ID, &s->tile, sizeof s->tile},          {CUBLASLT_ALGO_CONFIG_STAGES_ID, &s->stages, sizeof s->stages},
        {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &s->option, sizeof s->option}, {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, &s->swizzle, sizeof s->swizzle},
        {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &s->cluster, sizeof s->cluster}, {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &s->parts, sizeof s->parts},
        {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme, sizeof *scheme}};
    memcpy(out, all, sizeof all);
}

/* What an algorithm does not have is left 0. */
static setting setting_of(const cublasLtMatmulAlgo_t *a)
{
    setting s = {0};
    uint32_t scheme = 0;
    size_t written;
    attribute all[ATTRIBUTES];
    attributes_of(&s, &scheme, all);
    for (int i = 0; i < ATTRIBUTES; i++)
        if (cublasLtMatmulAlgoConfigGetAttribute(a, all[i].attribute, all[i].value, all[i].size, &written) != CUBLAS_STATUS_SUCCESS)
            memset(all[i].value, 0, all[i].size);
    return s;
}

/* Changes what is otherwise; false when the library does not take a value. */
static bool set(cublasLtMatmulAlgo_t *a, setting s)
{
    uint32_t scheme = s.parts > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE, now;
    size_t written;
    attribute all[ATTRIBUTES];
    attributes_of(&s, &scheme, all);
    for (int i = 0; i < ATTRIBUTES; i++) {
        if (cublasLtMatmulAlgoConfigGetAttribute(a, all[i].attribute, &now, all[i].size, &written) != CUBLAS_STATUS_SUCCESS)
            now = 0;
        if (memcmp(&now, all[i].value, all[i].size) && cublasLtMatmulAlgoConfigSetAttribute(a, all[i].attribute, all[i].value, all[i].size) != CUBLAS_STATUS_SUCCESS)
            return false;
    }
    return true;
}

/* Adds the settings of the table that the first proposal's kernel takes for this product; -> how many there are then. */
static int widen(const vlai_gemm *g, candidate *list, int count, int room)
{
    const cublasLtMatmulAlgo_t first = list[0].r.algo;
    setting s = setting_of(&first);
    int device, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess || major != 9)
        return count; /* the table was tried on Hopper alone */
    if (s.cluster == CUBLASLT_CLUSTER_SHAPE_AUTO)
        return count; /* a kernel of another kind */
    s.parts = 1;
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles; i++)
        for (size_t c = 0; c < sizeof clusters / sizeof *clusters; c++)
            for (s.option = 0; s.option < OPTIONS && count < room; s.option++) {
                candidate *x = &list[count];
                *x = (candidate){.r = {.algo = first}};
                s.tile = tiles[i];
                s.cluster = clusters[c];
                if (set(&x->r.algo, s) && !found(list, count, &x->r.algo) && is_valid(g, x))
                    count++;
            }
    return count;
}

/* Two or three launches after the one that loads the kernel; one that is far behind the best is not run again. */
static void time_briefly(const timing *t, candidate *x, float *best)
{
    x->ms = once(t, &x->r) < 0 ? -1 : once(t, &x->r);
    for (int again = 0; again < 2 && x->ms > 0 && x->ms < 1.12f * *best; again++) {
        float ms = once(t, &x->r);
        x->ms = ms > 0 && ms < x->ms ? ms : x->ms;
    }
    if (x->ms > 0 && x->ms < *best)
        *best = x->ms;
}

/* Those to be run for longer come first: the best `most`, the best `proposed` of the proposals, the one that is known. -> how many. */
static int finalists(candidate *list, int count, int most, int proposed, const cublasLtMatmulAlgo_t *known)
{
    int n = 0;
    qsort(list, (size_t)count, sizeof *list, faster);
    for (int i = 0; i < count && list[i].ms > 0; i++) {
        bool is_one = i < most || (list[i].proposed && proposed > 0) || (known && same(&list[i].r.algo, known));
        proposed -= list[i].proposed;
        if (!is_one)
            continue;
        candidate moved = list[i];
        memmove(list + n + 1, list + n, (size_t)(i - n) * sizeof *list);
        list[n++] = moved;
    }
    return n;
}

/* In a training step a GPU runs at its power limit, where the algorithm that needs the least energy wins, which a launch on a card with
 * power to spare does not show: large products are therefore run until the clock is the one that they leave, and single launches choose
 * nothing but who takes part in that. (On an H200, runs of 300 ms made the step of Wall-X 1.2 % shorter than three turns of 20 ms; three
 * of 60 ms were worth nothing.) */
static int time_large(const timing *t, candidate *list, int count, const cublasLtMatmulAlgo_t *known, float wanted, int turns)
{
    int n = finalists(list, count, LARGE_FINALISTS, PROPOSED, known);
    if (n > 0)
        sustained(t, &list[0].r, list[0].ms, WARM_TIMES * wanted, 1);
    for (int i = 0; i < n; i++)
        list[i].ms = sustained(t, &list[i].r, list[i].ms, wanted, TIMED);
    n = finalists(list, n, LAST, 0, known);
    float rounds[LAST + 1][2];
    for (int r = 0; r < turns; r++)
        for (int i = 0; i < n; i++)
            rounds[i][r] = sustained(t, &list[i].r, list[i].ms, LAST_TIMES * wanted, TIMED);
    for (int i = 0; i < n; i++)
        list[i].ms = turns == 2 && rounds[i][0] > 0 && rounds[i][1] > 0 ? (rounds[i][0] + rounds[i][1]) / 2 : rounds[i][0];
    return n;
}

static int time_small(const timing *t, candidate *list, int count, const cublasLtMatmulAlgo_t *known)
{
    int n = finalists(list, count, FINALISTS, 0, known);
    float rounds[FINALISTS + 1][ROUNDS];
    for (int r = 0; r < ROUNDS; r++)
        for (int i = 0; i < n; i++)
            rounds[i][r] = sustained(t, &list[i].r, list[i].ms, SHORT_MS, 1);
    for (int i = 0; i < n; i++)
        list[i].ms = median(rounds[i], ROUNDS);
    return n;
}

/* Leaves the fastest first; -> how many of the list were timed to the end, `known` (may be NULL) among them. */
static int best_of(const timing *t, const vlai_gemm_effort *effort, candidate *list, int count, int room, const cublasLtMatmulAlgo_t *known)
{
    float best = 1e9f;
    for (int i = 0; i < count; i++) {
        candidate *x = &list[i];
        x->ms = x->r.state != CUBLAS_STATUS_SUCCESS || once(t, &x->r) < 0 ? -1 : once(t, &x->r); /* the first launch loads the kernel */
        if (x->ms > 0)
            x->ms = sustained(t, &x->r, x->ms, FIRST_MS, 1);
        if (x->ms > 0 && x->ms < best)
            best = x->ms;
    }
    const float share = best * (float)effort->launches;
    const bool alone = effort->launches == 0; /* a yardstick's proposals: compared as thoroughly as can be */
    int n;
    if (best < LARGE_MS || (share < WORTH_MS && !alone)) {
        n = time_small(t, list, count, known);
    } else {
        float wanted = LONG_SHARE * share;
        wanted = alone || wanted > LONG_MS[1] ? LONG_MS[1] : wanted < LONG_MS[0] ? LONG_MS[0] : wanted;
        if (effort->n_near)
            wanted = NEAR_MS;
        int proposed = count;
        if (!alone && !t->g->multiprocessors) /* what holds those lets no kernel be loaded */
            count = effort->n_near ? add_near(t->g, effort, list, count, room) : widen(t->g, list, count, room);
        for (int i = proposed; i < count; i++)
            time_briefly(t, &list[i], &best);
        n = time_large(t, list, count, known, wanted, wanted < LONG_MS[1] ? 1 : 2);
    }
    qsort(list, (size_t)n, sizeof *list, faster);
    return n > 0 && list[0].ms > 0 ? n : 0;
}

/* A product for fewer multiprocessors is timed while the others are taken; every kernel has run once by then. */
static int hold_others(const timing *t, const candidate *list, int count, void **hold)
{
    for (int i = 0; i < count; i++)
        launch(t->g, &list[i].r.algo, list[i].r.workspaceSize, t->o, t->workspace, t->stream);
    int code = vlai_device_synchronize(t->stream);
    return code ? code : vlai_device_hold_begin(t->g->multiprocessors, hold);
}

static int timed(timing *t, const vlai_gemm_effort *effort, candidate *list, int count, int room, const cublasLtMatmulAlgo_t *known)
{
    int n = 0, code = 0;
    void *hold = NULL;
    if (t->g->multiprocessors)
        code = hold_others(t, list, count, &hold);
    if (!code && !vlai_device_event_create(&t->start) && !vlai_device_event_create(&t->end))
        n = best_of(t, effort, list, count, room, known);
    if (vlai_device_hold_end(hold))
        n = 0;
    vlai_device_event_destroy(t->start);
    vlai_device_event_destroy(t->end);
    return n;
}

/* A list of candidates as best_of leaves it, `known` (may be NULL) among them; the caller frees it. */
static cublasStatus_t compare(const vlai_gemm *g, const vlai_gemm_operands *o, const vlai_gemm_effort *effort, const cublasLtMatmulAlgo_t *known,
                              void *workspace, void *stream, candidate **list, int *n)
{
    cublasLtMatmulHeuristicResult_t proposed[VLAI_GEMM_PROPOSALS];
    timing t = {.g = g, .o = o, .workspace = workspace, .stream = stream};
    int count = 0;
    *n = 0;
    *list = vlai_array(VLAI_GEMM_PROPOSALS + WIDE + 1, sizeof **list);
    if (!*list)
        return CUBLAS_STATUS_ALLOC_FAILED;
    cublasStatus_t code = proposals(g, effort->proposals < VLAI_GEMM_PROPOSALS ? effort->proposals : VLAI_GEMM_PROPOSALS, proposed, &count);
    if (code != CUBLAS_STATUS_SUCCESS)
        return code;
    for (int i = 0; i < count; i++)
        (*list)[i] = (candidate){.r = proposed[i], .proposed = true};
    if (known && !found(*list, count, known))
        (*list)[count++] = (candidate){.r = {.algo = *known, .workspaceSize = g->workspace, .state = CUBLAS_STATUS_SUCCESS}};
    *n = timed(&t, effort, *list, count, VLAI_GEMM_PROPOSALS + WIDE + 1, known);
    return *n ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

int vlai_cublaslt_search(vlai_gemm *g, const vlai_gemm_operands *o, const vlai_gemm_effort *effort, void *workspace, void *stream, float *milliseconds)
{
    candidate *list = NULL;
    int n = 0;
    if (milliseconds)
        *milliseconds = 0;
    if (g->empty)
        return 0;
    cublasStatus_t code = compare(g, o, effort, NULL, workspace, stream, &list, &n);
    if (code == CUBLAS_STATUS_SUCCESS) {
        g->algorithm = list[0].r.algo;
        g->workspace = list[0].r.workspaceSize;
        if (milliseconds)
            *milliseconds = list[0].ms;
    }
    vlai_free(list);
    return (int)code;
}

int vlai_cublaslt_compare(const vlai_gemm *g, const vlai_gemm_operands *o, const vlai_gemm_effort *effort, void *workspace, void *stream, float *taken,
                          float *fastest)
{
    candidate *list = NULL;
    int n = 0;
    *taken = *fastest = 0;
    if (g->empty)
        return 0;
    cublasStatus_t code = compare(g, o, effort, &g->algorithm, workspace, stream, &list, &n);
    const candidate *own = code == CUBLAS_STATUS_SUCCESS ? found(list, n, &g->algorithm) : NULL;
    if (own && own->ms > 0) {
        *taken = own->ms;
        *fastest = list[0].ms;
    } else if (code == CUBLAS_STATUS_SUCCESS) {
        code = CUBLAS_STATUS_EXECUTION_FAILED;
    }
    vlai_free(list);
    return (int)code;
}

/* ---- the whole space, for a search that has minutes ---- */

/* All tiles that the library has a name for, of every kind of kernel that it proposes for the product (others may add in any order). Up to the
 * share SCREEN of a product's seconds they are launched two to four times each, with the clusters and options above, up to VARY the best VARIED
 * with further changes; the best SEMIFINALISTS then run for SEMIFINAL of what is left, and the best FINALISTS of them in turns for the rest.
 * Where the first setting of a tile is FAR_TILE times behind the best the others are left out, where that of a cluster of it is FAR_CLUSTER
 * times behind those. A product that takes 36 launches of a step of 266 ms has 27000 launches' time in 200 s; on Hopper some 2500 settings are valid. */
enum { EXPLORED = 16384, VARIED = 12, MOST_OPTIONS = 32, SEMIFINALISTS = 32, FEWEST = 8, TURNS = 3, PIECES = 64, PIECE = 16384 };
static const double SCREEN = 0.42, VARY = 0.52, SEMIFINAL = 0.35, SPARE = 0.88;
static const float FAR_TILE = 1.6f, FAR_CLUSTER = 1.3f, SEMIFINAL_MS = 90, SEMIFINAL_LEAST_MS = 40, FINAL_MS[2] = {80, 250}, LEAST_MS = 5, DOUBTFUL = 0.9f, KEPT = 0.998f;
static const uint16_t large_clusters[] = {CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1, CUBLASLT_CLUSTER_SHAPE_2x2x1, CUBLASLT_CLUSTER_SHAPE_4x2x1,
                                          CUBLASLT_CLUSTER_SHAPE_2x4x1};
static const uint32_t all_options[OPTIONS] = {1, 5, 3, 7, 0, 4, 2, 6}; /* most often the best first */

/* Pieces of the result, spread over it, as they are in memory. */
static bool fetch(const timing *t, const candidate *x, const vlai_gemm_shape *s, unsigned char *out)
{
    const size_t bytes = (size_t)(s->m * s->n) * vla_dtype_size(s->result), piece = bytes < PIECE ? bytes : PIECE;
    if (vlai_device_zero(t->o->c, bytes, t->stream) || launch(t->g, &x->r.algo, x->r.workspaceSize, t->o, t->workspace, t->stream) != CUBLAS_STATUS_SUCCESS)
        return false;
    for (size_t i = 0; i < PIECES; i++)
        if (vlai_device_download(out + i * PIECE, (const char *)t->o->c + (bytes - piece) / (PIECES - 1) * i / 4 * 4, piece, t->stream))
            return false;
    return vlai_device_synchronize(t->stream) == 0;
}

/* Whether a setting that the library does not propose gives the product that another gives, but for a rounding to bf16 (2^-7) in another direction:
 * to 2^-6 of an element, or of the root of their mean square where terms cancel. */
static bool agree(const timing *t, const candidate *a, const candidate *b, const vlai_gemm_shape *s)
{
    unsigned char *x = vlai_calloc(2 * PIECES, PIECE), *y = x + PIECES * PIECE;
    bool same = x && fetch(t, a, s, x) && fetch(t, b, s, y);
    const size_t size = vla_dtype_size(s->result), n = PIECES * PIECE / size;
    double squares = 0, counted = 0;
    for (int pass = 0; same && pass < 2; pass++) {
        const double size_of_all = counted > 0 ? sqrt(squares / counted) : 0;
        for (size_t i = 0; same && i < n; i++) {
            uint32_t bits[2] = {0, 0};
            float v[2];
            for (int k = 0; k < 2; k++) {
                memcpy((unsigned char *)&bits[k] + (sizeof *bits - size), (k ? y : x) + i * size, size); /* bf16 is the upper half of fp32 */
                memcpy(&v[k], &bits[k], sizeof *v);
            }
            if (pass == 0 && isfinite(v[0]) && v[0] != 0) {
                squares += (double)v[0] * (double)v[0];
                counted++;
            } else if (pass == 1) {
                same = isfinite(v[0]) ? fabs((double)v[0] - (double)v[1]) <= 0x1p-6 * fmax(fabs((double)v[0]), size_of_all) : !isfinite(v[1]);
            }
        }
    }
    vlai_free(x);
    return same;
}

typedef struct {
    const timing *t;
    const vlai_gemm_shape *shape;
    const candidate *own; /* the algorithm so far, whose result is the right one */
    candidate *list;
    int count, wrong;
    float best;
    double until; /* a time of vlai_now */
} exploration;

static bool is_over(const exploration *x)
{
    return x->count == EXPLORED || vlai_now() >= x->until;
}

/* Times a setting of the kind of kernel that `base` is; milliseconds, negative when there is none such. */
static float try_setting(exploration *x, const cublasLtMatmulAlgo_t *base, const setting *s)
{
    candidate *c = &x->list[x->count];
    if (is_over(x))
        return -1;
    *c = (candidate){.r = {.algo = *base}};
    if (!set(&c->r.algo, *s) || !is_valid(x->t->g, c))
        return -1;
    const candidate *known = found(x->list, x->count, &c->r.algo);
    if (known)
        return known->ms;
    const float best = x->best;
    time_briefly(x->t, c, &x->best);
    if (c->ms > 0 && c->ms < DOUBTFUL * best && !agree(x->t, x->own, c, x->shape)) { /* else all others would be far behind it */
        x->best = best;
        c->ms = -1;
        x->wrong++;
    }
    x->count += c->ms > 0;
    return c->ms;
}

static void screen_tile(exploration *x, const cublasLtMatmulAlgo_t *base, uint32_t tile)
{
    setting s = setting_of(base);
    const bool fixed = s.cluster == CUBLASLT_CLUSTER_SHAPE_AUTO; /* a kernel of a kind that has none to choose */
    s.parts = 1;
    s.tile = tile;
    for (size_t c = 0; c < (fixed ? 1 : sizeof clusters / sizeof *clusters); c++) {
        bool first = true;
        if (!fixed)
            s.cluster = clusters[c];
        for (int o = 0; o < OPTIONS; o++) {
            s.option = all_options[o];
            float ms = try_setting(x, base, &s);
            if (first && ms > FAR_TILE * x->best)
                return;
            if (first && ms > FAR_CLUSTER * x->best)
                break;
            first = first && ms <= 0;
        }
    }
}

/* The tiles of the table first, should the time not do. */
static void screen(exploration *x, const cublasLtMatmulAlgo_t *base)
{
    enum { TABLE = sizeof tiles / sizeof *tiles };
    for (uint32_t i = 0; i < TABLE && !is_over(x); i++)
        screen_tile(x, base, tiles[i]);
    for (uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED + 1; tile < CUBLASLT_MATMUL_TILE_END && !is_over(x); tile++) {
        bool done = false;
        for (uint32_t i = 0; i < TABLE && !done; i++)
            done = tiles[i] == tile;
        if (!done)
            screen_tile(x, base, tile);
    }
}

/* The values of a capability; the caller frees them. -> how many, 0 when it cannot be had. */
static size_t values_of(const cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoCapAttributes_t what, uint32_t **out)
{
    size_t bytes = 0, written = 0;
    *out = NULL;
    if (cublasLtMatmulAlgoCapGetAttribute(a, what, NULL, 0, &bytes) != CUBLAS_STATUS_SUCCESS || bytes == 0 || bytes % sizeof **out || !(*out = vlai_alloc(bytes)) ||
        cublasLtMatmulAlgoCapGetAttribute(a, what, *out, bytes, &written) != CUBLAS_STATUS_SUCCESS)
        return 0;
    return bytes / sizeof **out;
}

/* Of the best: the other order of blocks, parts of K, stages, large clusters, and options beyond the usual. */
static void vary(exploration *x)
{
    cublasLtMatmulAlgo_t best[VARIED];
    int n = x->count < VARIED ? x->count : VARIED;
    qsort(x->list, (size_t)x->count, sizeof *x->list, faster);
    for (int i = 0; i < n; i++)
        best[i] = x->list[i].r.algo;
    for (int i = 0; i < n && !is_over(x); i++) {
        const setting was = setting_of(&best[i]);
        uint32_t *stages, *most;
        setting s = was;
        s.swizzle = !was.swizzle;
        try_setting(x, &best[i], &s);
        for (s = was, s.parts = 1; s.parts <= 6; s.parts++)
            try_setting(x, &best[i], &s);
        size_t count = values_of(&best[i], CUBLASLT_ALGO_CAP_STAGES_IDS, &stages);
        s = was;
        for (size_t k = 0; k < count; k++) {
            s.stages = stages[k];
            try_setting(x, &best[i], &s);
        }
        vlai_free(stages);
        s = was;
        for (size_t c = 0; was.cluster != CUBLASLT_CLUSTER_SHAPE_AUTO && c < sizeof large_clusters / sizeof *large_clusters; c++)
            for (s.option = 0, s.cluster = large_clusters[c]; s.option < OPTIONS; s.option++)
                try_setting(x, &best[i], &s);
        count = values_of(&best[i], CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, &most);
        s = was;
        for (s.option = 0; count == 1 && s.option <= *most && s.option < MOST_OPTIONS; s.option++)
            try_setting(x, &best[i], &s);
        vlai_free(most);
    }
}

/* The first n in turns, each for `wanted` milliseconds of which the last share counts. */
static void alternate(const timing *t, candidate *list, int n, float wanted, int turns)
{
    float sums[SEMIFINALISTS + PROPOSED + 1] = {0};
    for (int turn = 0; turn < turns; turn++)
        for (int i = 0; i < n; i++) {
            float ms = list[i].ms > 0 ? sustained(t, &list[i].r, list[i].ms, wanted, TIMED) : -1;
            sums[i] += ms;
            list[i].ms = ms > 0 ? list[i].ms : -1;
        }
    for (int i = 0; i < n; i++)
        list[i].ms = list[i].ms > 0 ? sums[i] / (float)turns : -1;
}

static void explore(exploration *x, double seconds, const candidate *proposed, int count, vlai_gemm_found *out)
{
    const double start = vlai_now();
    const timing *t = x->t;
    const cublasLtMatmulAlgo_t *known = &x->own->r.algo;
    for (int i = 0; i < count; i++) {
        x->list[x->count] = proposed[i];
        time_briefly(t, &x->list[x->count], &x->best);
        x->count += x->list[x->count].ms > 0;
    }
    x->until = start + SCREEN * seconds;
    for (int i = 0; i < count; i++) {
        int32_t id[2] = {0, 0};
        size_t written;
        bool seen = false;
        cublasLtMatmulAlgoConfigGetAttribute(&proposed[i].r.algo, CUBLASLT_ALGO_CONFIG_ID, &id[0], sizeof *id, &written);
        for (int k = 0; k < i && !seen; k++) {
            cublasLtMatmulAlgoConfigGetAttribute(&proposed[k].r.algo, CUBLASLT_ALGO_CONFIG_ID, &id[1], sizeof *id, &written);
            seen = id[0] == id[1];
        }
        if (!seen)
            screen(x, &proposed[i].r.algo);
    }
    out->screened = !is_over(x);
    x->until = start + VARY * seconds;
    for (int before = -1; before != x->count && !is_over(x);) { /* changes add up: again from what is the best then */
        before = x->count;
        vary(x);
    }
    out->tried = x->count;

    double left = 1e3 * (start + SPARE * seconds - vlai_now());
    const double room = SEMIFINAL * left / (double)SEMIFINAL_LEAST_MS;
    int n = finalists(x->list, x->count, room < FEWEST ? FEWEST : room < SEMIFINALISTS ? (int)room : SEMIFINALISTS, PROPOSED, known);
    float each = fmaxf(fminf((float)(SEMIFINAL * left) / (float)(n + 3), SEMIFINAL_MS), LEAST_MS);
    if (n == 0)
        return;
    sustained(t, &x->list[0].r, x->list[0].ms, 3 * each, 1); /* the card is as hot as it gets */
    alternate(t, x->list, n, each, 1);
    n = finalists(x->list, n, FINALISTS, 0, known);
    left = 1e3 * (start + SPARE * seconds - vlai_now());
    int turns = TURNS;
    while (turns > 1 && left < (double)(FINAL_MS[0] * (float)(turns * n)))
        turns--;
    each = n > 0 ? fmaxf(fminf((float)left / (float)(turns * n), FINAL_MS[1]), LEAST_MS) : 0;
    alternate(t, x->list, n, each, turns);
    qsort(x->list, (size_t)n, sizeof *x->list, faster);
    const candidate *own = found(x->list, n, known);
    out->before = own && own->ms > 0 ? own->ms : 0;
    x->count = n;
}

int vlai_cublaslt_explore(vlai_gemm *g, const vlai_gemm_shape *s, const vlai_gemm_operands *o, double seconds, void *workspace, void *stream, vlai_gemm_found *out)
{
    cublasLtMatmulHeuristicResult_t proposed[VLAI_GEMM_PROPOSALS];
    candidate first[VLAI_GEMM_PROPOSALS + 1];
    timing t = {.g = g, .o = o, .workspace = workspace, .stream = stream};
    exploration x = {.t = &t, .shape = s, .best = 1e9f};
    int count = 0;
    *out = (vlai_gemm_found){0};
    if (g->empty || g->multiprocessors)
        return (int)CUBLAS_STATUS_NOT_SUPPORTED;
    cublasStatus_t code = proposals(g, VLAI_GEMM_PROPOSALS, proposed, &count);
    if (code != CUBLAS_STATUS_SUCCESS)
        return (int)code;
    for (int i = 0; i < count; i++)
        first[i] = (candidate){.r = proposed[i], .proposed = true};
    if (!found(first, count, &g->algorithm))
        first[count++] = (candidate){.r = {.algo = g->algorithm, .workspaceSize = g->workspace, .state = CUBLAS_STATUS_SUCCESS}};
    x.own = found(first, count, &g->algorithm);
    x.list = vlai_array(EXPLORED + 1, sizeof *x.list);
    if (x.list && !vlai_device_event_create(&t.start) && !vlai_device_event_create(&t.end))
        explore(&x, seconds, first, count, out);
    code = CUBLAS_STATUS_EXECUTION_FAILED;
    if (out->before > 0) { /* what is known stays, unless something is faster and right */
        out->after = out->before;
        code = CUBLAS_STATUS_SUCCESS;
        for (int i = 0; i < x.count && x.list[i].ms > 0 && x.list[i].ms < KEPT * out->before; i++) {
            if (!agree(&t, x.own, &x.list[i], s)) {
                x.wrong++;
                continue;
            }
            out->after = x.list[i].ms;
            g->algorithm = x.list[i].r.algo;
            g->workspace = x.list[i].r.workspaceSize;
            break;
        }
    }
    out->wrong = x.wrong;
    const setting now = setting_of(&g->algorithm);
    snprintf(out->settings, sizeof out->settings, "tile %u, cluster %u, option %u, stages %u, swizzle %u, %d parts", now.tile, (unsigned)now.cluster, now.option, now.stages,
             now.swizzle, now.parts);
    cudaGetLastError(); /* of a setting that could not be launched; what a kernel left behind is said below */
    if (vlai_device_synchronize(stream))
        code = CUBLAS_STATUS_EXECUTION_FAILED;
    vlai_device_event_destroy(t.start);
    vlai_device_event_destroy(t.end);
    vlai_free(x.list);
    return (int)code;
}

void vlai_cublaslt_choice_get(const vlai_gemm *g, vlai_gemm_choice *out)
{
    memcpy(out->words, &g->algorithm, sizeof out->words);
    out->workspace = g->workspace;
}

int vlai_cublaslt_choice_set(vlai_gemm *g, const vlai_gemm_choice *choice)
{
    cublasLtMatmulHeuristicResult_t result;
    cublasLtMatmulAlgo_t algorithm;
    if (g->empty)
        return 0;
    memcpy(&algorithm, choice->words, sizeof algorithm);
    cublasStatus_t code = cublasLtMatmulAlgoCheck(g->handle, g->operation, g->first, g->second, g->result, g->result, &algorithm, &result);
    if (code == CUBLAS_STATUS_SUCCESS && result.workspaceSize > g->most_workspace)
        code = CUBLAS_STATUS_NOT_SUPPORTED;
    if (code != CUBLAS_STATUS_SUCCESS)
        return (int)code;
    g->algorithm = algorithm;
    g->workspace = result.workspaceSize;
    return 0;
}
