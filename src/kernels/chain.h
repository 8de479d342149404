/* A kernel for each chain of element-wise operations: its source, and what a program in it costs. */
#ifndef VLAI_CHAIN_H
#define VLAI_CHAIN_H

#include "base/text.h"
#include "kernels/cuda.h"

VLA_BEGIN_DECLS

/* CUDA C of one kernel `chain(n, cols, in0.., out)` for the operands' types. A pure function of steps, types and which
 * operands hold one element a row. */
void vlai_chain_source(const vlai_cuda_call *call, vlai_text *out);
/* Interprets the chain instead, where nothing can be compiled: same bits, more instructions. */
int vlai_cuda_chain_interpret(const vlai_cuda_call *call);

VLA_END_DECLS

#endif
