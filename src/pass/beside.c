/* Products that run beside collectives leave some multiprocessors free (vla_plan_options.product_sms_free), so that those need not
 * wait for them, nor they for those.
 *
 * A collective is taken to run beside the products that follow it in the order of nodes, until these have done as much arithmetic
 * as fits into its time on the wire. What the wire is and what the arithmetic takes is of the machine; their ratio, which alone
 * counts, is that of two H200 joined by NVLink: products of a training step do 600 TFLOP/s while collectives move 0.22 TB/s, 2700
 * operations a byte. Twice that, because a collective has to wait until the products under way have ended. */
#include "ops/op.h"
#include "pass/pass.h"

static const double OPERATIONS = 5500; /* of products, beside a byte on the wire */

/* Bytes that a rank sends. */
static double wire(const vla_graph *g, const vlai_node *node)
{
    const vlai_value_info *v = vlai_value(g, node->inputs[0]);
    double bytes = (double)v->elements * (double)vla_dtype_size(v->dtype), world = node->attrs.comm.world;
    return bytes * (world - 1) / world * (node->op == VLAI_OP_all_reduce ? 2 : 1);
}

void vlai_pass_beside(vla_graph *g, const vla_plan_options *options)
{
    double ahead = 0; /* operations that fit beside what has been begun */
    for (size_t n = 0; options->overlap && options->product_sms_free > 0 && n < g->n_nodes; n++) {
        vlai_node *node = &g->nodes[n];
        if (vlai_op_is_collective(node->op))
            ahead += OPERATIONS * wire(g, node);
        if (node->op != VLAI_OP_matmul || ahead <= 0)
            continue;
        vlai_cost cost = {0};
        vlai_ops[node->op].cost(g, node, &cost);
        node->sms_free = (int8_t)options->product_sms_free;
        ahead -= cost.flops;
    }
}
