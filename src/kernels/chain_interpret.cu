/* chain without a compiler: every thread goes through the steps for its elements. Sums are intrinsics, which are never joined with a
 * product: as in what is compiled at run time. */
#include "kernels/chain.h"
#include "kernels/common.cuh"

namespace {

struct operands {
    const void *data[VLAI_CHAIN_INPUTS];
    bool half[VLAI_CHAIN_INPUTS], per_row[VLAI_CHAIN_INPUTS];
    int n;
};

__device__ float phi(float x)
{
    return 0.5f * erfcf(-x * 0.70710678118654752440f);
}

__device__ float step(int op, float a, float b, float value)
{
    switch (op) {
    case VLAI_OP_add: return __fadd_rn(a, b);
    case VLAI_OP_sub: return __fsub_rn(a, b);
    case VLAI_OP_mul:
    case VLAI_OP_mul_rows: return __fmul_rn(a, b);
    case VLAI_OP_scale: return __fmul_rn(a, value);
    case VLAI_OP_silu: return a / __fadd_rn(1.0f, expf(-a));
    case VLAI_OP_silu_grad: {
        float s = 1.0f / __fadd_rn(1.0f, expf(-b));
        return __fmul_rn(a, __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(b, __fsub_rn(1.0f, s)))));
    }
    case VLAI_OP_gelu: return __fmul_rn(a, phi(a));
    case VLAI_OP_gelu_grad:
        return __fmul_rn(a, __fadd_rn(phi(b), __fmul_rn(b, __fmul_rn(0.39894228040143267794f, expf(-0.5f * b * b)))));
    default: return a;
    }
}

template <class Y> __global__ void __launch_bounds__(THREADS) chain_kernel(vlai_chain c, operands in, Y *y, int64_t n, int64_t cols)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n)
        return;
    float at[VLAI_CHAIN_INPUTS + VLAI_CHAIN_STEPS];
    for (int k = 0; k < in.n; k++) {
        int64_t from = in.per_row[k] ? i / cols : i;
        at[k] = in.half[k] ? to_float(((const bf16 *)in.data[k])[from]) : ((const float *)in.data[k])[from];
    }
    for (int k = 0; k < c.n; k++) {
        const vlai_chain_step &s = c.steps[k];
        float x = step(s.op, at[s.a], at[s.b], (float)s.value);
        at[VLAI_CHAIN_INPUTS + k] = s.dtype == VLA_BF16 ? to_float(from_float<bf16>(x)) : x;
    }
    y[i] = from_float<Y>(at[VLAI_CHAIN_INPUTS + c.n - 1]);
}

} // namespace

extern "C" int vlai_cuda_chain_interpret(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &y = call->out[0];
    operands in = {};
    in.n = call->node->n_inputs;
    for (int k = 0; k < in.n; k++) {
        in.data[k] = call->in[k].data;
        in.half[k] = call->in[k].dtype == VLA_BF16;
        in.per_row[k] = call->in[k].elements != y.elements;
    }
    int64_t cols = y.rank > 1 ? y.elements / y.shape[0] : 1;
    dim3 grid((unsigned)((y.elements + THREADS - 1) / THREADS));
    auto stream = (cudaStream_t)call->stream;
    if (y.dtype == VLA_BF16)
        chain_kernel<<<grid, THREADS, 0, stream>>>(call->node->attrs.chain, in, (bf16 *)y.data, y.elements, cols);
    else
        chain_kernel<<<grid, THREADS, 0, stream>>>(call->node->attrs.chain, in, (float *)y.data, y.elements, cols);
    return (int)cudaGetLastError();
}
