#include "cpu/workspace.h"

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/kernel.h"
#include "dist/comm.h"

static size_t round_64(int64_t bytes)
{
    return ((size_t)bytes + 63) / 64 * 64;
}

static const vlai_value_info *operand(const vla_graph *g, const vlai_node *node, int i)
{
    return &g->values[node->inputs[i]];
}

static int64_t cols_of(const vlai_value_info *value)
{
    return value->rank > 1 ? value->shape[1] : 1;
}

/* Partial sums over the rows of a matrix. */
static int64_t chunks_of(int64_t rows, int64_t cols)
{
    return vlai_tiles(rows, VLAI_CHUNK_ROWS) * cols * (int64_t)sizeof(double);
}

/* Each case restates what the kernel's comment says about its workspace. */
void vlai_cpu_workspace(const vla_graph *g, const vlai_node *node, size_t *shared, size_t *per_thread)
{
    const int64_t word = (int64_t)sizeof(double);
    const int64_t block = VLAI_ATTENTION_QUERIES * VLAI_ATTENTION_KEYS;
    int64_t all = 0, each = 0;
    switch (node->op) {
    case VLAI_OP_matmul: {
        const vlai_value_info *a = operand(g, node, 0), *b = operand(g, node, 1);
        int64_t m = a->shape[node->attrs.matmul.transpose_a ? 1 : 0], k = a->shape[node->attrs.matmul.transpose_a ? 0 : 1];
        int64_t n = b->shape[node->attrs.matmul.transpose_b ? 0 : 1];
        vlai_gemm_grid grid = vlai_gemm_grid_of(m, n, k);
        all = grid.n_depth > 1 ? grid.n_depth * m * n * word : 0;
        if (node->attrs.matmul.sums != VLA_DTYPE_NONE && node->attrs.matmul.transpose_a && chunks_of(k, m) > all)
            all = chunks_of(k, m);
        break;
    }
    case VLAI_OP_rms_norm_grad_weight:
    case VLAI_OP_rms_norm_backward:
        all = chunks_of(operand(g, node, 1)->shape[0], cols_of(operand(g, node, 1)));
        break;
    case VLAI_OP_swiglu_backward:
        if (node->attrs.swiglu.sums != VLA_DTYPE_NONE)
            all = chunks_of(operand(g, node, 1)->shape[0], cols_of(operand(g, node, 1)));
        break;
    case VLAI_OP_qkv_rope_grad:
        for (int k = 0; k < 2; k++) { /* the rows of da, and of db */
            bool routed = node->n_inputs > 3 + k && node->inputs[3 + k] != VLA_NONE;
            int64_t here = chunks_of(operand(g, node, routed ? 3 + k : 0)->shape[0], cols_of(operand(g, node, 0)));
            if (node->attrs.rope.sums[k] != VLA_DTYPE_NONE && here > all)
                all = here;
        }
        break;
    case VLAI_OP_col_sum:
        all = chunks_of(operand(g, node, 0)->shape[0], cols_of(operand(g, node, 0)));
        break;
    case VLAI_OP_rope_table:
        all = node->attrs.rope_table.half * (word + (int64_t)sizeof(int32_t));
        break;
    case VLAI_OP_attention:
    case VLAI_OP_attention_qkv:
        each = (2 * block + (int64_t)VLAI_ATTENTION_QUERIES * node->attrs.attention.head_dim) * word;
        break;
    case VLAI_OP_attention_grad:
    case VLAI_OP_attention_qkv_grad:
        all = (3 * g->values[node->inputs[node->op == VLAI_OP_attention_grad ? 6 : 4]].elements + 6) * (int64_t)sizeof(int32_t);
        each = (3 * block + (int64_t)VLAI_ATTENTION_QUERIES * node->attrs.attention.head_dim) * word;
        break;
    case VLAI_OP_masked_mse:
        all = vlai_tiles(operand(g, node, 0)->elements, VLAI_CHUNK_ELEMENTS) * 2 * word;
        break;
    case VLAI_OP_cross_entropy:
        all = operand(g, node, 0)->shape[0] * word;
        break;
    case VLAI_OP_sum_squares:
        all = vlai_tiles(operand(g, node, 0)->elements, VLAI_CHUNK_ELEMENTS) * word;
        break;
    case VLAI_OP_reduce_scatter:
        all = (int64_t)vlai_comm_scratch(operand(g, node, 0)->elements, operand(g, node, 0)->dtype, node->attrs.comm.world);
        break;
    case VLAI_OP_all_reduce:
        all = 2 * (int64_t)vlai_comm_scratch(operand(g, node, 0)->elements, operand(g, node, 0)->dtype, node->attrs.comm.world);
        break;
    default:
        break;
    }
    *shared = round_64(all);
    *per_thread = round_64(each);
}
