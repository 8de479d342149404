/* Chains: element-wise operations of one shape that feed each other become one node, which keeps what stands between them
 * in registers. A member other than the last must be read once, by a member. Each step is rounded to its type as before, so
 * on the CPU a plan with chains has the bits of one without. Next: kernels/chain.c, which makes a kernel for each chain. */
#include "base/fail.h"
#include "base/memory.h"
#include "ops/op.h"
#include "pass/pass.h"

#include <string.h>

typedef struct {
    vla_graph *g;
    const vla_plan_options *options;
    int32_t *readers; /* per value */
    bool *gone;       /* per node */
} joining;

/* A chain in the making, from its last member backwards. */
typedef struct {
    vlai_node node;
    size_t members[VLAI_CHAIN_STEPS];
    int n_members, wanted; /* wanted: operands that the members so far read from outside, at most */
} building;

static bool is_elementwise(vlai_op op)
{
    switch (op) {
    case VLAI_OP_add:
    case VLAI_OP_sub:
    case VLAI_OP_mul:
    case VLAI_OP_scale:
    case VLAI_OP_cast:
    case VLAI_OP_silu:
    case VLAI_OP_silu_grad:
    case VLAI_OP_gelu:
    case VLAI_OP_gelu_grad:
    case VLAI_OP_mul_rows: return true;
    default: return false;
    }
}

static bool is_open(const joining *j, size_t n)
{
    const vlai_node *node = &j->g->nodes[n];
    unsigned region = node->layer >= 0 && node->layer < j->options->visual_layers ? VLA_FUSE_VISUAL : VLA_FUSE_MODEL;
    if (j->gone[n] || !is_elementwise(node->op)) /* others may have no result */
        return false;
    vla_dtype dtype = vlai_value(j->g, node->outputs[0])->dtype;
    return (j->options->fuse & region) && (dtype == VLA_BF16 || dtype == VLA_F32 || dtype == VLA_F64);
}

static bool same_shape(const vlai_value_info *a, const vlai_value_info *b)
{
    return a->rank == b->rank && !memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape);
}

/* May the maker of `v` join the chain? */
static bool joins(const joining *j, const building *b, vla_value v)
{
    const vlai_value_info *info = vlai_value(j->g, v);
    if (info->kind != VLAI_TEMP || info->producer < 0 || info->name || j->readers[v] != 1 || !is_open(j, (size_t)info->producer))
        return false;
    const vlai_node *maker = &j->g->nodes[info->producer];
    return maker->lane == b->node.lane && maker->backward == b->node.backward && b->n_members < VLAI_CHAIN_STEPS &&
           same_shape(info, vlai_value(j->g, b->node.outputs[0])) && b->wanted - 1 + maker->n_inputs <= VLAI_CHAIN_INPUTS;
}

static int input(building *b, vla_value v)
{
    for (int i = 0; i < b->node.n_inputs; i++)
        if (b->node.inputs[i] == v)
            return i;
    b->node.inputs[b->node.n_inputs] = v;
    return b->node.n_inputs++;
}

/* Adds node n and, before it, what joins; -> its place. */
static int8_t add(const joining *j, building *b, size_t n)
{
    const vlai_node *node = &j->g->nodes[n];
    vlai_chain_step s = {.op = (int16_t)node->op, .dtype = vlai_value(j->g, node->outputs[0])->dtype,
                         .value = node->op == VLAI_OP_scale ? node->attrs.fill.value : 0};
    int8_t at[2] = {0, 0};
    b->members[b->n_members++] = n;
    b->wanted += node->n_inputs - 1;
    for (int i = 0; i < node->n_inputs; i++) {
        vla_value v = node->inputs[i];
        bool per_row = node->op == VLAI_OP_mul_rows && i == 1;
        at[i] = !per_row && joins(j, b, v) ? add(j, b, (size_t)vlai_value(j->g, v)->producer) : (int8_t)input(b, v);
    }
    s.a = at[0];
    s.b = at[1];
    b->node.attrs.chain.steps[b->node.attrs.chain.n] = s;
    return (int8_t)(VLAI_CHAIN_INPUTS + b->node.attrs.chain.n++);
}

/* The shape rule starts from an operand of full shape, and the first step has one: a step reads earlier steps or inputs. */
static size_t join_at(joining *j, size_t n)
{
    building b = {.node = j->g->nodes[n], .wanted = 1};
    b.node.op = VLAI_OP_chain;
    b.node.n_inputs = 0;
    for (int i = 0; i < VLAI_MAX_INPUTS; i++)
        b.node.inputs[i] = VLA_NONE;
    memset(&b.node.attrs, 0, sizeof b.node.attrs);
    add(j, &b, n);
    if (b.n_members < 2)
        return 0;
    for (int i = 0; i < b.n_members; i++)
        j->gone[b.members[i]] = b.members[i] != n;
    j->g->nodes[n] = b.node;
    return (size_t)b.n_members;
}

vla_status vlai_pass_chain(vla_graph *g, const vla_plan_options *options, size_t *joined, vla_error *err)
{
    joining j = {.g = g, .options = options};
    vla_status status = VLA_OK;
    size_t count = 0;
    if (joined)
        *joined = 0;
    if (!options->fuse)
        return VLA_OK;
    j.readers = vlai_calloc(g->n_values + 1, sizeof *j.readers);
    j.gone = vlai_calloc(g->n_nodes + 1, sizeof *j.gone);
    if (!j.readers || !j.gone) {
        status = vlai_nomem(err, g->n_values * sizeof *j.readers);
        goto done;
    }
    for (size_t n = 0; n < g->n_nodes; n++)
        for (int i = 0; i < g->nodes[n].n_inputs; i++)
            if (g->nodes[n].inputs[i] != VLA_NONE)
                j.readers[g->nodes[n].inputs[i]]++;
    for (size_t v = 0; v < g->n_gradient; v++) /* results are read from outside */
        if (g->values[v].kind == VLAI_PARAM && g->gradient[v] != VLA_NONE)
            j.readers[g->gradient[v]]++;
    if (g->loss != VLA_NONE)
        j.readers[g->loss]++;
    for (size_t n = g->n_nodes; n-- > 0;)
        if (is_open(&j, n))
            count += join_at(&j, n);
    for (size_t n = 0; n < g->n_nodes; n++)
        j.gone[n] = !j.gone[n];
    vlai_graph_keep(g, j.gone);
    if (joined)
        *joined = count;
    status = vlai_graph_verify(g, "chain", err);
done:
    vlai_free(j.readers);
    vlai_free(j.gone);
    return status;
}
