/* A choice of the implementation of attention, for tests and timings.
 *
 * Implementations are the rows of a table in kernels/attention.cu, best first, each with what it is for: wide (segments of at most
 * 64 rows, on sm_90a), windows (the same), long (full segments, backward, on sm_90a), groups (whole or causal segments, on sm_90a),
 * cuDNN (the same, fast attention), segments (the same), tiles (any mask, bf16) and plain (any mask, fp32 arithmetic). All but
 * cuDNN add in a fixed order. cuDNN is taken where none before it fits and vlai_cuda_attention_prepare left its plan in
 * call->plan: with context->fast_attention, where the library is there and has one; otherwise the log says why, once per reason. */
#ifndef VLAI_ATTENTION_H
#define VLAI_ATTENTION_H

#include "kernels/cuda.h"

VLA_BEGIN_DECLS

/* The name of implementation i; NULL past the last. */
const char *vlai_cuda_attention_name(int i);
/* Runs the call by implementation i; -1 when it is not for such calls. */
int vlai_cuda_attention_by(int i, const vlai_cuda_call *call);

VLA_END_DECLS

#endif
