/* Attention inside short segments on Hopper's wide products (kernels/attention_wide.cu). */
#ifndef VLAI_ATTENTION_WIDE_CUH
#define VLAI_ATTENTION_WIDE_CUH

#include "kernels/attention.cuh"

/* Whether it can do the call: full segments of at most 64 rows in bf16, as many kv heads as heads, of at most 80, on sm_90a. */
bool attention_wide_fits(const attention_task &task);
/* Both return a CUDA error code. lanes: that the heads are divided into, each a block's. */
int attention_wide_forward(const attention_task &task, int lanes);
int attention_wide_backward(const attention_task &task, int lanes);

/* The backward pass of full segments of any length, otherwise for the same calls; facts of queries and heads lie in the scratch. */
bool attention_long_fits(const attention_task &task);
int attention_long_backward(const attention_task &task);

#endif
