#include "vendor/cublaslt.h"

#include "base/memory.h"

#include <cublasLt.h>
#include <string.h>

struct vlai_gemm {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t first, second, result; /* column-major: first is our b, second our a */
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
    int empty, bias;
};

int vlai_cublaslt_open(void **handle)
{
    return (int)cublasLtCreate((cublasLtHandle_t *)handle);
}

void vlai_cublaslt_close(void *handle)
{
    if (handle)
        cublasLtDestroy((cublasLtHandle_t)handle);
}

const char *vlai_cublaslt_error(int code)
{
    return cublasLtGetStatusString((cublasStatus_t)code);
}

static cudaDataType_t type_of(vla_dtype dtype)
{
    return dtype == VLA_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* Row-major c = op(a) op(b) is column-major c^T = op(b)^T op(a)^T: the memory of a row-major matrix [r,s] is that of a
 * column-major one [s,r]. */
int vlai_cublaslt_prepare(void *handle, const vlai_gemm_shape *s, size_t workspace, vlai_gemm **out)
{
    vlai_gemm *g = vlai_calloc(1, sizeof *g);
    *out = g;
    if (!g)
        return (int)CUBLAS_STATUS_ALLOC_FAILED;
    g->handle = handle;
    g->bias = s->bias;
    g->empty = s->m == 0 || s->n == 0;
    if (g->empty)
        return 0;
    if (s->k == 0)
        return (int)CUBLAS_STATUS_NOT_SUPPORTED;
    cublasOperation_t first = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t code = cublasLtMatmulDescCreate(&g->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulPreference_t preference = NULL;
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
    if (s->bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
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
    TRY(cublasLtMatmulPreferenceCreate(&preference));
    TRY(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    TRY(cublasLtMatmulAlgoGetHeuristic(g->handle, g->operation, g->first, g->second, g->result, g->result, preference, 1, &found, &count));
#undef TRY
    if (preference)
        cublasLtMatmulPreferenceDestroy(preference);
    if (code == CUBLAS_STATUS_SUCCESS && count == 0)
        code = CUBLAS_STATUS_NOT_SUPPORTED;
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

int vlai_cublaslt_run(const vlai_gemm *g, const void *a, const void *b, const void *bias, void *c, void *workspace, void *stream)
{
    static const float one = 1.0f, zero = 0.0f;
    if (g->empty)
        return 0;
    if (g->bias) {
        cublasStatus_t code = cublasLtMatmulDescSetAttribute(g->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
        if (code != CUBLAS_STATUS_SUCCESS)
            return (int)code;
    }
    return (int)cublasLtMatmul(g->handle, g->operation, &one, b, g->first, a, g->second, &zero, c, g->result, c, g->result, &g->algorithm,
                               workspace, g->workspace, (cudaStream_t)stream);
}
