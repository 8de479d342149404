/* What a node costs: FLOPs, bytes moved and the scratch of its CPU kernel. The device-independent figures are printed by
 * `vla inspect plan`; model FLOPs, the denominator of MFU, are a formula of the model's own (model/wallx_flops.h).
 *
 * FLOPs count useful products and sums, multiply-add as 2, as the literature does: an element-wise op or a reduction
 * counts 0, attention counts its visible (query, key) pairs alone, and what a kernel computes a second time inside itself
 * (the probabilities, in the attention backward) is not counted. A training step of matmuls and attention is therefore
 * 3 times its forward. Work that the recompute pass repeats consists of nodes of its own and counts in full. */
#include "cpu/workspace.h"
#include "ops/op.h"

static int64_t dim(const vla_graph *g, vla_value v, int axis)
{
    return vlai_value(g, v)->shape[axis];
}

/* [M,K] [K,N]: M N K multiply-adds. The bias is an element-wise sum. */
static double matmul_flops(const vla_graph *g, const vlai_node *node)
{
    int64_t inner = dim(g, node->inputs[0], node->attrs.matmul.transpose_a ? 0 : 1);
    return 2.0 * (double)vlai_value(g, node->outputs[0])->elements * (double)inner;
}

/* One product of the attention: a multiply-add per pair, head and channel. Forward: q k^T and p v. Backward: dv, dp, dq
 * and dk; that p is made again from lse is the kernel's own affair. */
static double attention_flops(const vlai_node *node, int products)
{
    const vla_attention_options *o = &node->attrs.attention;
    return 2.0 * products * o->heads * o->head_dim * (double)o->pairs;
}

static double flops(const vla_graph *g, const vlai_node *node)
{
    switch (node->op) {
    case VLAI_OP_matmul: return matmul_flops(g, node);
    case VLAI_OP_attention:
    case VLAI_OP_attention_qkv: return attention_flops(node, 2);
    case VLAI_OP_attention_grad:
    case VLAI_OP_attention_qkv_grad: return attention_flops(node, 4);
    default: return 0;
    }
}

/* Symbolic types, before the precision pass, count as their fp32 meaning. */
static double bytes_of(const vlai_value_info *v)
{
    size_t size = v->dtype == VLA_COMPUTE || v->dtype == VLA_PRECISE ? 4 : vla_dtype_size(v->dtype);
    return (double)v->elements * (double)size;
}

static double bytes(const vla_graph *g, const vlai_node *node)
{
    double sum = 0;
    for (int i = 0; i < node->n_inputs; i++)
        if (node->inputs[i] != VLA_NONE)
            sum += bytes_of(vlai_value(g, node->inputs[i])) * (vlai_ops[node->op].writes >> i & 1 ? 2 : 1);
    for (int i = 0; i < node->n_outputs; i++)
        sum += bytes_of(vlai_value(g, node->outputs[i]));
    return sum;
}

#define VLA_OP(name, ...)                                                               \
    void vlai_cost_##name(const vla_graph *g, const vlai_node *node, vlai_cost *cost)   \
    {                                                                                   \
        *cost = (vlai_cost){.flops = flops(g, node), .bytes = bytes(g, node)};          \
        vlai_cpu_workspace(g, node, &cost->workspace, &cost->workspace_per_thread);     \
    }
#include "ops/ops.def"
#undef VLA_OP
