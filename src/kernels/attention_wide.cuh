/* Attention inside short segments, and gradients of long ones, on Hopper's wide products (kernels/attention_wide.cu). */
#ifndef VLAI_ATTENTION_WIDE_CUH
#define VLAI_ATTENTION_WIDE_CUH

#include "kernels/attention.cuh"

/* Whether it can do the call: full segments of at most 64 rows in bf16, as many kv heads as heads, of at most 80, on sm_90a. */
bool attention_wide_fits(const attention_task &task);
/* Both return a CUDA error code. */
int attention_wide_forward(const attention_task &task);
int attention_wide_backward(const attention_task &task);

/* The backward pass of full segments of any length, otherwise for the same calls. */
bool attention_long_fits(const attention_task &task);
/* Its scratch in bytes. */
size_t attention_long_workspace(int64_t queries, int heads);
int attention_long_backward(const attention_task &task);

#endif
