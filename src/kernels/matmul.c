/* matmul: cuBLASLt does the work; its descriptors were made when the run was bound (call->plan). */
#include "kernels/cuda.h"
#include "vendor/cublaslt.h"

int vlai_cuda_matmul(const vlai_cuda_call *call)
{
    const void *bias = call->node->n_inputs > 2 ? call->in[2].data : NULL;
    int code = vlai_cublaslt_run(call->plan, call->in[0].data, call->in[1].data, bias, call->out[0].data, call->workspace, call->stream);
    return code ? 100000 + code : 0; /* told apart from CUDA's own numbers */
}

size_t vlai_cuda_workspace_matmul(const vla_graph *g, const vlai_node *node)
{
    (void)g;
    (void)node;
    return (size_t)32 << 20;
}
