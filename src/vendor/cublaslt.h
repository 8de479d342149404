/* Matrix products by cuBLASLt: descriptors and the algorithm are chosen once, at plan build, and kept with the node.
 *
 * Row-major c [M,N] = op(a) op(b) (+ bias [N]). Operands bf16 or fp32 of one type, accumulation fp32 (no TF32), result bf16
 * or fp32; the bias is added before the one rounding. */
#ifndef VLAI_CUBLASLT_H
#define VLAI_CUBLASLT_H

#include "vla/dtype.h"

VLA_BEGIN_DECLS

typedef struct vlai_gemm_shape {
    int64_t m, n, k;
    int transpose_a, transpose_b, bias;
    vla_dtype operand, result, bias_type;
} vlai_gemm_shape;

typedef struct vlai_gemm vlai_gemm;

int vlai_cublaslt_open(void **handle);
void vlai_cublaslt_close(void *handle);
/* The heuristic's first algorithm that fits `workspace` bytes. 0, or the library's status. */
int vlai_cublaslt_prepare(void *handle, const vlai_gemm_shape *shape, size_t workspace, vlai_gemm **out);
void vlai_cublaslt_release(vlai_gemm *gemm);
int vlai_cublaslt_run(const vlai_gemm *gemm, const void *a, const void *b, const void *bias, void *c, void *workspace, void *stream);
const char *vlai_cublaslt_error(int code);

VLA_END_DECLS

#endif
