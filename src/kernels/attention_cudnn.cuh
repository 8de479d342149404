/* The row of cuDNN in the table of attention implementations (kernels/attention.cu). */
#ifndef VLAI_ATTENTION_CUDNN_CUH
#define VLAI_ATTENTION_CUDNN_CUH

#include "kernels/attention.cuh"

struct vlai_cudnn;

/* Scratch that a plan wants: indices of segments and, backward, dq in fp32, a sum per row and, when there are fewer kv heads,
 * dk and dv by query head in bf16, all padded to the longest segment (cuDNN 9.19: 124 MB for 26 segments of 290 rows, 16 query
 * and 2 kv heads of 128). */
size_t attention_cudnn_workspace(int64_t segments, int64_t longest, int heads, int kv_heads, int dim, bool backward);
bool attention_cudnn_fits(const attention_task &task);
/* The plan; NULL when there is none, why: vlai_cudnn_sdpa. */
const void *attention_cudnn_plan(const attention_task &task, bool backward, vlai_cudnn *cudnn, char *why, size_t why_bytes);
int attention_cudnn_run(const attention_task &task, bool backward);

#endif
