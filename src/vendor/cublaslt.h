/* Matrix products by cuBLASLt: descriptors and the algorithm are chosen once, when a run is bound, and kept with the node.
 *
 * Row-major c [M,N] = op(a) op(b) (+ bias [N]) (+ residual [M,N]), and on demand sums [M] = sums of op(a) over K. Operands
 * bf16 or fp32 of one type, accumulation fp32 (no TF32), result bf16 or fp32; bias and residual are added before the one
 * rounding; c may not lie over the residual, because in place the library (13.1) rounds a bf16 product before the sum. No algorithm
 * that adds with atomics is taken, so that a choice gives the same bits each time. */
#ifndef VLAI_CUBLASLT_H
#define VLAI_CUBLASLT_H

#include "vla/dtype.h"

#include <stddef.h>

VLA_BEGIN_DECLS

typedef struct vlai_gemm_shape {
    int64_t m, n, k;
    int transpose_a, transpose_b, bias, residual, sums;
    vla_dtype operand, result, bias_type; /* bias_type: also of the sums */
    /* 0: all of them. Else how many a product can count on: algorithms that fix their number of blocks keep to so many, and a search
     * times all while the others are taken. */
    int multiprocessors;
} vlai_gemm_shape;

/* An algorithm as the library's opaque bytes; choices are kept on disk and in checkpoints. */
typedef struct vlai_gemm_choice {
    uint64_t words[8];
    uint64_t workspace; /* bytes that it needs */
    float milliseconds; /* its median time when it was chosen */
} vlai_gemm_choice;

typedef struct vlai_gemm vlai_gemm;

/* Pointers of one product. bias: read, or with `sums` written. */
typedef struct vlai_gemm_operands {
    const void *a, *b, *residual;
    void *bias, *c;
} vlai_gemm_operands;

int vlai_cublaslt_open(void **handle);
void vlai_cublaslt_close(void *handle);
size_t vlai_cublaslt_version(void);
/* Descriptors, with the heuristic's first algorithm that fits `workspace` bytes. 0, or the library's status;
 * CUBLAS_STATUS_NOT_SUPPORTED (15) when there is none, as for sums, a bias or a residual beside a product over no columns (k = 0), which
 * by itself is zeros. */
int vlai_cublaslt_prepare(void *handle, const vlai_gemm_shape *shape, size_t workspace, vlai_gemm **out);
void vlai_cublaslt_release(vlai_gemm *gemm);
int vlai_cublaslt_run(const vlai_gemm *gemm, const vlai_gemm_operands *operands, void *workspace, void *stream);

enum { VLAI_GEMM_PROPOSALS = 32 }; /* of the heuristic, which a search of a training's products times; no search times more */

/* How a search goes about it. */
typedef struct vlai_gemm_effort {
    int proposals; /* at most so many of the heuristic's */
    int launches;  /* of the product in a step, which say what its time is worth; 0: proposals alone are compared */
    /* Choices for the same product with another number of rows, which then take the place of other settings (NULL: none). */
    const struct vlai_gemm_choice *near;
    int n_near;
} vlai_gemm_effort;

/* Times algorithms on the operands (contents of c are lost; random data gives honest times) and takes the fastest: the heuristic's
 * proposals, and of a product that is worth it settings of the same kernels that the heuristic does not propose. milliseconds (may be
 * NULL): its time. Waits for the device. */
int vlai_cublaslt_search(vlai_gemm *gemm, const vlai_gemm_operands *operands, const vlai_gemm_effort *effort, void *workspace, void *stream,
                         float *milliseconds);
/* Times the algorithm that is taken against those that a search compares: milliseconds of it, and of the fastest, which may be
 * itself. Contents of c are lost. Waits for the device. */
int vlai_cublaslt_compare(const vlai_gemm *gemm, const vlai_gemm_operands *operands, const vlai_gemm_effort *effort, void *workspace, void *stream,
                          float *taken, float *fastest);

/* What a search of the whole space came to. */
typedef struct vlai_gemm_found {
    float before, after; /* milliseconds of a launch in long runs: the algorithm so far, the one that is taken now, which may be the same */
    int tried, wrong;    /* settings that ran; those that gave another product, which are passed over */
    int screened;        /* every tile, cluster and option was looked at within the time */
    char settings[128];  /* of the one that is taken, by the library's numbers (cublasLt.h) */
} vlai_gemm_found;

/* Times all settings of the kernels that the library proposes for this product, for about `seconds`, and takes the fastest in long runs if its result is
 * that of the algorithm so far. shape: the product's, with all multiprocessors (else 15, not supported). Contents of c are lost. Waits for the device. */
int vlai_cublaslt_explore(vlai_gemm *gemm, const vlai_gemm_shape *shape, const vlai_gemm_operands *operands, double seconds, void *workspace, void *stream,
                          vlai_gemm_found *out);
void vlai_cublaslt_choice_get(const vlai_gemm *gemm, vlai_gemm_choice *out);
/* Takes a choice made earlier for this shape; status when this library does not accept it. */
int vlai_cublaslt_choice_set(vlai_gemm *gemm, const vlai_gemm_choice *choice);
const char *vlai_cublaslt_error(int code);

VLA_END_DECLS

#endif
