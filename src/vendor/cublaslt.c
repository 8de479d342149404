#include "vendor/cublaslt.h"

#include "base/memory.h"
#include "kernels/device.h"

#include <cublasLt.h>
#include <stdbool.h>
#include <string.h>

enum { MOST = 32, ROUNDS = 3, FINALISTS = 6, LARGE_FINALISTS = 4 };

/* All algorithms run for FIRST_MS. Then, of products of LARGE_MS and more, the best LARGE_FINALISTS for LONG_MS each; of others the best
 * FINALISTS in ROUNDS turns of SHORT_MS. */
static const float FIRST_MS = 2, LARGE_MS = 0.07f, LONG_MS = 300, SHORT_MS = 1;

struct vlai_gemm {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t first, second, result; /* column-major: first is our b, second our a */
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace, most_workspace;
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

/* Fills `found` with up to `most` algorithms, best guess first. */
static cublasStatus_t candidates(const vlai_gemm *g, int most, cublasLtMatmulHeuristicResult_t *found, int *count)
{
    cublasLtMatmulPreference_t preference = NULL;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
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
    g->empty = s->m == 0 || s->n == 0;
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
    TRY(candidates(g, 1, &found, &count));
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
    return g->empty ? 0 : (int)launch(g, &g->algorithm, g->workspace, o, workspace, stream);
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

/* Launches back to back for about `wanted` milliseconds; -> milliseconds a launch, negative when it does not run. */
static float sustained(const timing *t, const cublasLtMatmulHeuristicResult_t *r, float one, float wanted)
{
    int launches = (int)(wanted / (one > 0.001f ? one : 0.001f)) + 1;
    float ms = -1;
    if (vlai_device_event_record(t->start, t->stream))
        return -1;
    for (int i = 0; i < launches; i++)
        if (launch(t->g, &r->algo, r->workspaceSize, t->o, t->workspace, t->stream) != CUBLAS_STATUS_SUCCESS)
            return -1;
    if (vlai_device_event_record(t->end, t->stream) || vlai_device_event_elapsed(t->start, t->end, &ms))
        return -1;
    return ms / (float)launches;
}

/* A few launches each; then the fastest, each for a while. In a training step a GPU runs at its power limit, where the algorithm
 * that needs the least energy wins, which a launch on a card with power to spare does not show: large products are therefore run
 * until the clock is the one that they leave (on an H200 choices made in 300 ms made the step of Wall-X 1.2 % shorter than those made
 * in three turns of 20 ms; three of 60 ms were worth nothing), and single launches choose nothing.
 * `known` (-1: none) is among the last in any case, and its time goes to known_ms. -1: none runs. */
static int best_of(const timing *t, const cublasLtMatmulHeuristicResult_t *found, int count, int known, float *ms, float *known_ms)
{
    int order[MOST + 1], running = 0, winner = -1;
    float first[MOST + 1], rounds[FINALISTS + 1][ROUNDS];
    for (int i = 0; i < count; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS || once(t, &found[i]) < 0) /* the first launch loads the kernel */
            continue;
        first[i] = sustained(t, &found[i], once(t, &found[i]), FIRST_MS);
        if (first[i] <= 0)
            continue;
        int at = running++;
        for (; at > 0 && first[i] < first[order[at - 1]]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    bool large = running > 1 && first[order[0]] >= LARGE_MS;
    int most = large ? LARGE_FINALISTS : FINALISTS, finalists = running < most ? running : most, turns = large ? 1 : ROUNDS;
    for (int i = finalists; i < running; i++)
        if (order[i] == known)
            order[finalists++] = known;
    for (int r = 0; r < turns; r++)
        for (int f = 0; f < finalists; f++)
            rounds[f][r] = sustained(t, &found[order[f]], first[order[f]], large ? LONG_MS : SHORT_MS);
    for (int f = 0; f < finalists; f++) {
        float m = median(rounds[f], turns);
        if (order[f] == known)
            *known_ms = m;
        if (m > 0 && (winner < 0 || m < *ms)) {
            winner = order[f];
            *ms = m;
        }
    }
    return winner;
}

/* A product for fewer multiprocessors is timed while the others are taken; every kernel has run once by then. */
static int hold_others(const timing *t, const cublasLtMatmulHeuristicResult_t *found, int count, void **hold)
{
    for (int i = 0; i < count; i++)
        launch(t->g, &found[i].algo, found[i].workspaceSize, t->o, t->workspace, t->stream);
    int code = vlai_device_synchronize(t->stream);
    return code ? code : vlai_device_hold_begin(t->g->multiprocessors, hold);
}

static int timed(timing *t, const cublasLtMatmulHeuristicResult_t *found, int count, int known, float *ms, float *known_ms)
{
    int winner = -1, code = 0;
    void *hold = NULL;
    if (t->g->multiprocessors)
        code = hold_others(t, found, count, &hold);
    if (!code && !vlai_device_event_create(&t->start) && !vlai_device_event_create(&t->end))
        winner = best_of(t, found, count, known, ms, known_ms);
    if (vlai_device_hold_end(hold))
        winner = -1;
    vlai_device_event_destroy(t->start);
    vlai_device_event_destroy(t->end);
    return winner;
}

int vlai_cublaslt_search(vlai_gemm *g, const vlai_gemm_operands *o, int most, void *workspace, void *stream, float *milliseconds)
{
    cublasLtMatmulHeuristicResult_t found[MOST];
    timing t = {.g = g, .o = o, .workspace = workspace, .stream = stream};
    int count = 0, winner = -1;
    float ms = 0;
    if (milliseconds)
        *milliseconds = 0;
    if (g->empty)
        return 0;
    cublasStatus_t code = candidates(g, most < MOST ? most : MOST, found, &count);
    if (code != CUBLAS_STATUS_SUCCESS)
        return (int)code;
    winner = timed(&t, found, count, -1, &ms, NULL);
    if (winner < 0)
        return (int)CUBLAS_STATUS_EXECUTION_FAILED;
    g->algorithm = found[winner].algo;
    g->workspace = found[winner].workspaceSize;
    if (milliseconds)
        *milliseconds = ms;
    return 0;
}

int vlai_cublaslt_compare(const vlai_gemm *g, const vlai_gemm_operands *o, int most, void *workspace, void *stream, float *taken, float *fastest)
{
    cublasLtMatmulHeuristicResult_t found[MOST + 1];
    timing t = {.g = g, .o = o, .workspace = workspace, .stream = stream};
    int count = 0, known = 0;
    *taken = *fastest = 0;
    if (g->empty)
        return 0;
    cublasStatus_t code = candidates(g, most < MOST ? most : MOST, found, &count);
    if (code != CUBLAS_STATUS_SUCCESS)
        return (int)code;
    while (known < count && memcmp(&found[known].algo, &g->algorithm, sizeof g->algorithm))
        known++;
    if (known == count)
        found[count++] = (cublasLtMatmulHeuristicResult_t){.algo = g->algorithm, .workspaceSize = g->workspace, .state = CUBLAS_STATUS_SUCCESS};
    return timed(&t, found, count, known, fastest, taken) < 0 || *taken <= 0 ? (int)CUBLAS_STATUS_EXECUTION_FAILED : 0;
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
