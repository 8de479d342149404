#include "kernels/cuda.h"

const vlai_cuda_fn vlai_cuda_launchers[VLAI_OP_COUNT] = {
#define VLA_OP(name, ...) [VLAI_OP_##name] = vlai_cuda_##name,
#include "ops/ops.def"
#undef VLA_OP
};

const vlai_cuda_preparer vlai_cuda_preparers[VLAI_OP_COUNT] = {
    [VLAI_OP_chain] = {vlai_cuda_chain_prepare, vlai_cuda_chain_release},
    [VLAI_OP_matmul] = {vlai_cuda_matmul_prepare, vlai_cuda_matmul_release},
};

const vlai_cuda_workspace_fn vlai_cuda_workspaces[VLAI_OP_COUNT] = {
#define VLA_OP(name, ...) [VLAI_OP_##name] = vlai_cuda_workspace_##name,
#include "ops/ops.def"
#undef VLA_OP
};
