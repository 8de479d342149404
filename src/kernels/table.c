#include "kernels/cuda.h"

const vlai_cuda_fn vlai_cuda_launchers[VLAI_OP_COUNT] = {
#define VLA_OP(name, ...) [VLAI_OP_##name] = vlai_cuda_##name,
#include "ops/ops.def"
#undef VLA_OP
};

const vlai_cuda_preparer vlai_cuda_preparers[VLAI_OP_COUNT] = {
    [VLAI_OP_chain] = {vlai_cuda_chain_prepare, vlai_cuda_chain_release},
    [VLAI_OP_matmul] = {vlai_cuda_matmul_prepare, vlai_cuda_matmul_release},
    [VLAI_OP_attention] = {vlai_cuda_attention_prepare, vlai_cuda_attention_release},
    [VLAI_OP_attention_grad] = {vlai_cuda_attention_prepare, vlai_cuda_attention_release},
    [VLAI_OP_attention_qkv] = {vlai_cuda_attention_prepare, vlai_cuda_attention_release},
    [VLAI_OP_attention_qkv_grad] = {vlai_cuda_attention_prepare, vlai_cuda_attention_release},
};

const vlai_cuda_workspace_fn vlai_cuda_workspaces[VLAI_OP_COUNT] = {
#define VLA_OP(name, ...) [VLAI_OP_##name] = vlai_cuda_workspace_##name,
#include "ops/ops.def"
#undef VLA_OP
};
