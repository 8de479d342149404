/* Attention by cuDNN: softmax(scale q k^T + mask) v over packed rows cut into segments, forward and backward.
 *
 * The library is loaded when it is first wanted, so that a program runs on machines without it; a build without its headers
 * or those of its C++ front end never finds it. Plans are made once per shape and kept with the handle. Lengths of segments
 * are read on the device: one plan serves every batch of a shape, and a captured graph may replay it.
 *
 *     vlai_cudnn *cudnn = vlai_cudnn_open();
 *     const vlai_sdpa *plan = vlai_cudnn_sdpa(cudnn, &shape, why, sizeof why);
 *     if (plan)
 *         vlai_cudnn_sdpa_run(plan, &data, workspace, stream);   enqueues
 *     else if (*why) ...own kernels, and say why: it is said once per reason...
 *
 * One thread at a time per handle. */
#ifndef VLAI_CUDNN_H
#define VLAI_CUDNN_H

#include "vla/api.h"

#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

/* bf16 operands; row strides in elements. */
typedef struct vlai_sdpa_shape {
    int backward, causal;
    int heads, kv_heads, head_dim;
    int64_t segments, longest; /* no segment has more rows */
    int64_t q_stride, kv_stride, o_stride, dq_stride, dkv_stride;
    float scale;
} vlai_sdpa_shape;

/* Device memory. Forward writes o and lse, backward reads them and writes dq, dk, dv; rows outside the segments are left as
 * they are. */
typedef struct vlai_sdpa_data {
    const void *dy, *q, *k, *v;
    void *o, *dq, *dk, *dv;
    float *lse;             /* [rows, heads]: log of the sum of exponentials, natural */
    const int32_t *lengths; /* [segments] rows of each */
    /* [segments + 1] elements from the start of the operand to the first row of each segment, and the end */
    const int32_t *q_offsets, *kv_offsets, *o_offsets, *lse_offsets, *dq_offsets, *dkv_offsets;
} vlai_sdpa_data;

typedef struct vlai_cudnn vlai_cudnn;
typedef struct vlai_sdpa vlai_sdpa;

/* NULL only without memory; a handle of a library that is not there has no plans. */
vlai_cudnn *vlai_cudnn_open(void);
void vlai_cudnn_close(vlai_cudnn *cudnn);
int vlai_cudnn_version(void); /* 91900 for 9.19.0; 0: not loaded */

/* The plan of a shape, made on the first call, in one or two seconds: the library compiles. NULL when there is none, and
 * `why` is then a sentence the first time, and empty again. Plans live as long as the handle. */
const vlai_sdpa *vlai_cudnn_sdpa(vlai_cudnn *cudnn, const vlai_sdpa_shape *shape, char *why, size_t why_bytes);
size_t vlai_cudnn_sdpa_workspace(const vlai_sdpa *plan);
/* 0, or the library's status. */
int vlai_cudnn_sdpa_run(const vlai_sdpa *plan, const vlai_sdpa_data *data, void *workspace, void *stream);

VLA_END_DECLS

#endif
