/* The CUDA kernels: one launcher per operation, in plain C. Nothing here is CUDA to the eye of a C compiler: streams are
 * pointers, so that every C file may include it.
 *
 * A launcher checks nothing that its shape rule has checked; it launches on call->stream and returns 0, or the CUDA error
 * of the launch. It allocates nothing and never waits for the device. Operands are bf16, fp32 or int32 in any mixture that
 * the precision pass makes (bf16 x with fp32 weight, fp32 x to bf16 y); arithmetic is fp32, rounded once where a result is
 * stored, with the inner roundings that the CPU twin has (SwiGLU). fp64 operands: hyper, norms and clip of the update only.
 *
 * Reductions have a fixed order: two runs give the same bits. */
#ifndef VLAI_CUDA_H
#define VLAI_CUDA_H

#include "ops/op.h"
#include "vla/error.h"

VLA_BEGIN_DECLS

/* What a launcher of a collective returns when its communicator has failed: that says why (dist/comm.h). */
enum { VLAI_CUDA_COLLECTIVE = 200000 };

typedef struct vlai_cuda_tensor {
    void *data; /* device; NULL for an optional operand left out, and for a result that nobody wants */
    vla_dtype dtype;
    int rank;
    int64_t shape[VLA_MAX_RANK];
    int64_t elements;
} vlai_cuda_tensor;

typedef struct vlai_cuda_call {
    const vlai_node *node; /* attributes */
    vlai_cuda_tensor in[VLAI_MAX_INPUTS];
    vlai_cuda_tensor out[VLAI_MAX_OUTPUTS];
    void *stream;    /* cudaStream_t */
    void *workspace; /* device scratch of the stream, 256-byte aligned */
    size_t workspace_bytes;
    int multiprocessors;
    struct vlai_comm *comm; /* collectives of more than one rank */
    void *plan; /* what vlai_cuda_preparers made for this node when the run was bound, or NULL */
} vlai_cuda_call;

/* What preparing may use: handles of vendor libraries, and choices made before. */
typedef struct vlai_cuda_context {
    void *cublaslt;
    struct vlai_gemm_choices *choices; /* matrix products by shape */
    bool search;                       /* algorithms of shapes that have no choice yet are timed; else the heuristic's first is taken */
    const vlai_cuda_call *calls;       /* of the run that is bound, among which products are counted that are alike; NULL: none */
    size_t n_calls;
    int arch;                          /* of the device: 90 = 9.0 */
    int fast_attention;                /* also cuDNN's attention, whose backward may add in any order, where it is faster */
    struct vlai_cudnn **cudnn;         /* opened by the first attention that wants it; NULL: never */
} vlai_cuda_context;

/* Operations that are prepared when a run is bound, with operands in place: descriptors, algorithms. release takes what
 * prepare left in call->plan. Preparing may wait for the device; launching may not. */
typedef struct vlai_cuda_preparer {
    vla_status (*prepare)(const vlai_cuda_context *context, vlai_cuda_call *call, vla_error *err);
    void (*release)(vlai_cuda_call *call);
} vlai_cuda_preparer;
extern const vlai_cuda_preparer vlai_cuda_preparers[VLAI_OP_COUNT];
vla_status vlai_cuda_chain_prepare(const vlai_cuda_context *context, vlai_cuda_call *call, vla_error *err);
void vlai_cuda_chain_release(vlai_cuda_call *call);
vla_status vlai_cuda_matmul_prepare(const vlai_cuda_context *context, vlai_cuda_call *call, vla_error *err);
void vlai_cuda_matmul_release(vlai_cuda_call *call);
/* Whether binding the context's calls will time algorithms. */
bool vlai_cuda_matmul_will_search(const vlai_cuda_context *context);
/* Milliseconds of the product's algorithm and of the fastest that a search finds beside it, for a product that a step has `launches` times;
 * a result is lost, and the device is waited for. Without column sums, where a kernel of ours makes those. */
int vlai_cuda_matmul_compare(const vlai_cuda_call *call, int launches, float *taken, float *fastest);
/* Spends about `seconds` on a search of the whole space for the products of the context's calls, which are prepared: each gets the share that it has of
 * their time. Choices that are better are taken, kept and told in the log. Results are lost, and the device is waited for. */
vla_status vlai_cuda_matmul_explore(const vlai_cuda_context *context, double seconds, vla_error *err);
vla_status vlai_cuda_attention_prepare(const vlai_cuda_context *context, vlai_cuda_call *call, vla_error *err);
void vlai_cuda_attention_release(vlai_cuda_call *call);

typedef int (*vlai_cuda_fn)(const vlai_cuda_call *call);
typedef size_t (*vlai_cuda_workspace_fn)(const vla_graph *g, const vlai_node *node);

#define VLA_OP(name, lo, hi, outs, kind, writes)             \
    int vlai_cuda_##name(const vlai_cuda_call *call);        \
    size_t vlai_cuda_workspace_##name(const vla_graph *g, const vlai_node *node);
#include "ops/ops.def"
#undef VLA_OP

/* Launcher and scratch bytes of each operation. */
extern const vlai_cuda_fn vlai_cuda_launchers[VLAI_OP_COUNT];
extern const vlai_cuda_workspace_fn vlai_cuda_workspaces[VLAI_OP_COUNT];

VLA_END_DECLS

#endif
