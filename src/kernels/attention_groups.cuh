/* Attention of whole segments on Hopper's wide products, all query heads of a kv head together (kernels/attention_groups.cu). */
#ifndef VLAI_ATTENTION_GROUPS_CUH
#define VLAI_ATTENTION_GROUPS_CUH

#include "kernels/attention.cuh"

/* Whether it can do the call: causal or full segments in bf16, a power of 2 of at most 64 heads to a kv head, on sm_90a. */
bool attention_groups_fits(const attention_task &task);
/* Whether it reads and writes two streams; calls without a map it does anyway. */
bool attention_groups_streams(const attention_task &task);
/* Scratch of the backward pass in bytes. */
size_t attention_groups_workspace(int64_t queries, int heads);
/* Both return a CUDA error code. */
int attention_groups_forward(const attention_task &task);
int attention_groups_backward(const attention_task &task);

#endif
