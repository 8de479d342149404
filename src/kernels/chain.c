/* chain: one compiled kernel per chain. The source is written from the chain's steps, compiled by NVRTC when a run is bound
 * and kept on disk; where there is no NVRTC, kernels/chain_interpret.cu does the steps one by one. Arithmetic is that of the
 * kernels it stands for, in fp32 and each step rounded to its type, but that no product is joined with a sum. */
#include "kernels/chain.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "kernels/device.h"
#include "vendor/nvrtc.h"

#include <inttypes.h>
#include <stdio.h>
#include <xxhash.h>

enum { PACK = 8, BLOCK = 256, PATH = 4096 };

typedef struct {
    void *library, *kernel;
    int64_t n, cols;
    void *data[VLAI_CHAIN_INPUTS + 1];
    void *arguments[VLAI_CHAIN_INPUTS + 3];
} compiled;

static const char *const prelude =
    "typedef unsigned short bf16;\n"
    "typedef long long i64;\n"
    "template <class T> struct pack;\n"
    "template <> struct alignas(16) pack<bf16> { bf16 x[8]; };\n"
    "template <> struct alignas(16) pack<float> { float x[8]; };\n"
    "__device__ inline float get(bf16 h) { return __uint_as_float((unsigned)h << 16); }\n"
    "__device__ inline float get(float x) { return x; }\n"
    "__device__ inline bf16 half_of(float x) { bf16 h; asm(\"cvt.rn.bf16.f32 %0, %1;\" : \"=h\"(h) : \"f\"(x)); return h; }\n"
    "__device__ inline void set(bf16 &h, float x) { h = half_of(x); }\n"
    "__device__ inline void set(float &y, float x) { y = x; }\n"
    "__device__ inline float round16(float x) { return get(half_of(x)); }\n"
    "__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }\n"
    "__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }\n"
    "__device__ inline float silu_slope(float x) { float s = sigmoid(x); return s * (1.0f + x * (1.0f - s)); }\n"
    "__device__ inline float phi(float x) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }\n"
    "__device__ inline float gelu_slope(float x) { return phi(x) + x * (0.39894228040143267794f * expf(-0.5f * x * x)); }\n";

static const char *type_name(vla_dtype dtype)
{
    return dtype == VLA_BF16 ? "bf16" : "float";
}

static bool per_row(const vlai_cuda_call *call, int i)
{
    return call->in[i].elements != call->out[0].elements;
}

static void put_step(const vlai_chain *c, int k, vlai_text *out)
{
    const vlai_chain_step *s = &c->steps[k];
    vlai_text_printf(out, "    float s%d = %s", VLAI_CHAIN_INPUTS + k, s->dtype == VLA_BF16 ? "round16(" : "(");
    switch ((vlai_op)s->op) {
    case VLAI_OP_add: vlai_text_printf(out, "s%d + s%d", s->a, s->b); break;
    case VLAI_OP_sub: vlai_text_printf(out, "s%d - s%d", s->a, s->b); break;
    case VLAI_OP_mul:
    case VLAI_OP_mul_rows: vlai_text_printf(out, "s%d * s%d", s->a, s->b); break;
    case VLAI_OP_scale: vlai_text_printf(out, "s%d * %.9ef", s->a, (double)(float)s->value); break; /* all digits that a float has */
    case VLAI_OP_silu: vlai_text_printf(out, "silu(s%d)", s->a); break;
    case VLAI_OP_silu_grad: vlai_text_printf(out, "s%d * silu_slope(s%d)", s->a, s->b); break;
    case VLAI_OP_gelu: vlai_text_printf(out, "s%d * phi(s%d)", s->a, s->a); break;
    case VLAI_OP_gelu_grad: vlai_text_printf(out, "s%d * gelu_slope(s%d)", s->a, s->b); break;
    default: vlai_text_printf(out, "s%d", s->a); break; /* cast */
    }
    vlai_text_puts(out, ");\n");
}

/* The operands of `steps` at element `at`; `packed`: from the packs that were loaded, element k. */
static void put_values(const vlai_cuda_call *call, const char *at, bool packed, vlai_text *out)
{
    for (int i = 0; i < call->node->n_inputs; i++) {
        vlai_text_puts(out, i ? ", " : "");
        if (per_row(call, i))
            vlai_text_printf(out, "get(x%d[(%s) / cols])", i, at);
        else if (packed)
            vlai_text_printf(out, "get(p%d.x[k])", i);
        else
            vlai_text_printf(out, "get(x%d[%s])", i, at);
    }
}

void vlai_chain_source(const vlai_cuda_call *call, vlai_text *out)
{
    const vlai_chain *c = &call->node->attrs.chain;
    int inputs = call->node->n_inputs;
    vlai_text_puts(out, prelude);
    vlai_text_puts(out, "__device__ inline float steps(");
    for (int i = 0; i < inputs; i++)
        vlai_text_printf(out, "%sfloat s%d", i ? ", " : "", i);
    vlai_text_puts(out, ")\n{\n");
    for (int k = 0; k < c->n; k++)
        put_step(c, k, out);
    vlai_text_printf(out, "    return s%d;\n}\n", VLAI_CHAIN_INPUTS + c->n - 1);
    vlai_text_puts(out, "extern \"C\" __global__ void __launch_bounds__(256) chain(i64 n, i64 cols");
    for (int i = 0; i < inputs; i++)
        vlai_text_printf(out, ", const %s *x%d", type_name(call->in[i].dtype), i);
    vlai_text_printf(out, ", %s *y)\n{\n    i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;\n    bool whole = at + 8 <= n && ((i64)y", type_name(call->out[0].dtype));
    for (int i = 0; i < inputs; i++)
        if (!per_row(call, i))
            vlai_text_printf(out, " | (i64)x%d", i);
    vlai_text_puts(out, ") % 16 == 0;\n    if (whole) {\n");
    for (int i = 0; i < inputs; i++)
        if (!per_row(call, i))
            vlai_text_printf(out, "        pack<%s> p%d = *(const pack<%s> *)(x%d + at);\n", type_name(call->in[i].dtype), i, type_name(call->in[i].dtype), i);
    vlai_text_printf(out, "        pack<%s> r;\n#pragma unroll\n        for (int k = 0; k < 8; k++)\n            set(r.x[k], steps(", type_name(call->out[0].dtype));
    put_values(call, "at + k", true, out);
    vlai_text_printf(out, "));\n        *(pack<%s> *)(y + at) = r;\n        return;\n    }\n    for (i64 i = at; i < n && i < at + 8; i++)\n        set(y[i], steps(", type_name(call->out[0].dtype));
    put_values(call, "i", false, out);
    vlai_text_puts(out, "));\n}\n");
}

/* Machine code of the source, from disk or from the compiler. */
static vla_status code_of(const vlai_text *source, int arch, void **code, size_t *size, vla_error *err)
{
    char name[64], path[PATH];
    snprintf(name, sizeof name, "chain-%016" PRIx64 "-sm%d-%d.cubin", (uint64_t)XXH64(source->data, source->size, 0), arch, vlai_nvrtc_version());
    bool kept = vlai_cache_path(name, path, sizeof path);
    if (kept && vlai_cache_read(path, code, size))
        return VLA_OK; /* the driver is told no size, and goes where the bytes lead it */
    VLA_TRY(vlai_nvrtc_compile(source->data, arch, code, size, err));
    if (kept)
        vlai_cache_write(path, *code, *size);
    return VLA_OK;
}

vla_status vlai_cuda_chain_prepare(const vlai_cuda_context *context, vlai_cuda_call *call, vla_error *err)
{
    vlai_text source = {0};
    void *code = NULL;
    size_t size = 0;
    if (!call->out[0].data || !call->out[0].elements || !vlai_nvrtc_available())
        return VLA_OK; /* interpreted */
    compiled *c = vlai_calloc(1, sizeof *c);
    call->plan = c;
    if (!c)
        return vlai_nomem(err, sizeof *c);
    vlai_chain_source(call, &source);
    vla_status status = vlai_text_status(&source, err);
    if (status == VLA_OK)
        status = code_of(&source, context->arch, &code, &size, err);
    int failed = status == VLA_OK ? vlai_device_kernel_load(code, "chain", &c->library, &c->kernel) : 0;
    if (failed)
        status = vlai_fail(err, VLA_E_CUDA, "loading a compiled chain: %s", vlai_device_error(failed));
    vlai_text_fini(&source);
    vlai_free(code);
    int inputs = call->node->n_inputs, last = call->out[0].rank - 1;
    c->n = call->out[0].elements;
    c->cols = last >= 0 && call->out[0].rank > 1 ? call->out[0].elements / call->out[0].shape[0] : 1;
    c->arguments[0] = &c->n;
    c->arguments[1] = &c->cols;
    for (int i = 0; i <= inputs; i++) {
        c->data[i] = i < inputs ? call->in[i].data : call->out[0].data;
        c->arguments[2 + i] = &c->data[i];
    }
    return status;
}

void vlai_cuda_chain_release(vlai_cuda_call *call)
{
    compiled *c = call->plan;
    if (c)
        vlai_device_kernel_unload(c->library);
    vlai_free(c);
    call->plan = NULL;
}

int vlai_cuda_chain(const vlai_cuda_call *call)
{
    compiled *c = call->plan;
    if (!call->out[0].data || !call->out[0].elements)
        return 0;
    if (!c)
        return vlai_cuda_chain_interpret(call);
    int64_t per_block = (int64_t)BLOCK * PACK;
    return vlai_device_kernel_launch(c->kernel, (unsigned)((c->n + per_block - 1) / per_block), BLOCK, c->arguments, call->stream);
}

size_t vlai_cuda_workspace_chain(const vla_graph *g, const vlai_node *node)
{
    (void)g;
    (void)node;
    return 0;
}
