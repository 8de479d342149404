/* Attention on one packed matrix q | k | v, by way of the kernels for three: the columns are copied apart and together.
 *
 *     attention_qkv       qkv [N, W] -> o [N, heads D], lse [N, heads]
 *     attention_qkv_grad  do, qkv, o, lse -> dqkv [N, W]
 *
 * Bytes: 2 N W elements more than the attention's own, each way. */
#include "kernels/common.cuh"

namespace {

struct packed {
    vlai_node split;
    vlai_cuda_tensor part[3]; /* q, k, v */
    size_t bytes;             /* of the three, each rounded up to 256 */
};

packed unpacked(const vlai_node *node, vla_dtype dtype, int64_t rows, char *at)
{
    packed p = {};
    int64_t dim = node->attrs.attention.head_dim, q = node->attrs.attention.heads * dim, kv = node->attrs.attention.kv_heads * dim;
    p.split.op = VLAI_OP_split_cols;
    p.split.n_inputs = 3;
    p.split.n_outputs = 3;
    p.split.attrs.split.n = 3;
    for (int i = 0; i < 3; i++) {
        p.split.attrs.split.widths[i] = i ? kv : q;
        vlai_cuda_tensor &t = p.part[i];
        t.data = at ? at + p.bytes : nullptr;
        t.dtype = dtype;
        t.rank = 2;
        t.shape[0] = rows;
        t.shape[1] = i ? kv : q;
        t.elements = rows * t.shape[1];
        p.bytes += round_256((size_t)t.elements * vla_dtype_size(dtype));
    }
    return p;
}

int split(const vlai_cuda_call *call, const vlai_cuda_tensor &qkv, packed &p)
{
    vlai_cuda_call sub = *call;
    sub.node = &p.split;
    sub.in[0] = qkv;
    for (int i = 0; i < 3; i++)
        sub.out[i] = p.part[i];
    return vlai_cuda_split_cols(&sub);
}

size_t unpacked_bytes(const vla_graph *g, const vlai_node *node, int operand)
{
    const vlai_value_info &x = operand_of(g, node, operand);
    return unpacked(node, x.dtype, x.shape[0], nullptr).bytes;
}

} // namespace

extern "C" size_t vlai_cuda_workspace_attention_qkv(const vla_graph *g, const vlai_node *node)
{
    return unpacked_bytes(g, node, 0);
}

extern "C" int vlai_cuda_attention_qkv(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &qkv = call->in[0];
    packed p = unpacked(call->node, qkv.dtype, rows_of(qkv), (char *)call->workspace);
    int status = split(call, qkv, p);
    if (status)
        return status;
    vlai_cuda_call sub = *call;
    for (int i = 0; i < 3; i++)
        sub.in[i] = p.part[i];
    for (int i = 0; i < 4; i++)
        sub.in[3 + i] = call->in[1 + i];
    sub.workspace = (char *)call->workspace + p.bytes;
    sub.workspace_bytes = call->workspace_bytes - p.bytes;
    return vlai_cuda_attention(&sub);
}

/* q, k, v; dq, dk, dv; then what attention_grad wants: delta [N, heads] fp32 and 32 bytes for every 32 queries. */
extern "C" size_t vlai_cuda_workspace_attention_qkv_grad(const vla_graph *g, const vlai_node *node)
{
    vlai_node grad = *node;
    grad.op = VLAI_OP_attention_grad;
    grad.inputs[1] = node->inputs[1]; /* as many rows as q */
    return 2 * unpacked_bytes(g, node, 1) + vlai_cuda_workspace_attention_grad(g, &grad);
}

extern "C" int vlai_cuda_attention_qkv_grad(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &qkv = call->in[1];
    if (!call->out[0].data || !call->out[0].elements)
        return 0;
    packed p = unpacked(call->node, qkv.dtype, rows_of(qkv), (char *)call->workspace);
    packed d = unpacked(call->node, qkv.dtype, rows_of(qkv), (char *)call->workspace + p.bytes);
    int status = split(call, qkv, p);
    if (status)
        return status;
    vlai_cuda_call sub = *call;
    sub.in[0] = call->in[0];
    for (int i = 0; i < 3; i++) {
        sub.in[1 + i] = p.part[i];
        sub.out[i] = d.part[i];
    }
    for (int i = 0; i < 6; i++)
        sub.in[4 + i] = call->in[2 + i];
    sub.workspace = (char *)call->workspace + p.bytes + d.bytes;
    sub.workspace_bytes = call->workspace_bytes - p.bytes - d.bytes;
    status = vlai_cuda_attention_grad(&sub);
    if (status)
        return status;
    vlai_cuda_call join = *call;
    join.node = &d.split;
    for (int i = 0; i < 3; i++)
        join.in[i] = d.part[i];
    return vlai_cuda_concat_cols(&join);
}
