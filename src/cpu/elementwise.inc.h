/* Elementwise kernels: one value in, one value out, all in the order of memory. Inputs may share the output's memory. */

/* y[i] = expression of a[i], b[i] (operands of the output's size); `cost`: work of one element, 1 = an addition. */
#define ELEMENTWISE(name, cost, expression)                                                                   \
    VLAI_CLONES static void L(name##_tile)(void *context, int64_t tile, int thread)                           \
    {                                                                                                         \
        (void)thread;                                                                                         \
        const vlai_cpu_call *call = context;                                                                  \
        const real *a = call->in[0].data, *b = call->in[1].data;                                              \
        real *y = call->out[0].data;                                                                          \
        vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS / (cost), call->out[0].elements);              \
        (void)a, (void)b;                                                                                     \
        for (int64_t i = span.first; i < span.end; i++)                                                       \
            y[i] = (expression);                                                                              \
    }                                                                                                         \
    void FN(name)(const vlai_cpu_call *call)                                                                  \
    {                                                                                                         \
        if (call->out[0].data)                                                                                \
            vlai_run(call, vlai_tiles(call->out[0].elements, VLAI_TILE_ELEMENTS / (cost)), L(name##_tile));   \
    }

static inline real L(sigmoid)(real x)
{
    return 1 / (1 + EXP(-x));
}

/* d silu / dx = s (1 + x (1 - s)), s = sigmoid(x). */
static inline real L(silu_slope)(real x)
{
    real s = L(sigmoid)(x);
    return s * (1 + x * (1 - s));
}

/* Phi(x), the normal distribution function: erfc, as 1 + erf cancels where x is negative. */
static inline real L(phi)(real x)
{
    return (real)0.5 * erfc(-x * (real)0.70710678118654752440);
}

ELEMENTWISE(add, 1, a[i] + b[i])
ELEMENTWISE(sub, 1, a[i] - b[i])
ELEMENTWISE(mul, 1, a[i] * b[i])
ELEMENTWISE(scale, 1, a[i] * (real)call->node->attrs.fill.value)
ELEMENTWISE(silu, 4, a[i] / (1 + EXP(-a[i])))
ELEMENTWISE(silu_grad, 4, a[i] * L(silu_slope)(b[i]))
ELEMENTWISE(gelu, 16, a[i] * L(phi)(a[i]))
/* Phi(x) + x phi(x), phi the normal density: 0.39894228 = 1/sqrt(2 pi). */
ELEMENTWISE(gelu_grad, 32,
            a[i] * (L(phi)(b[i]) + b[i] * ((real)0.39894228040143267794 * EXP((real)-0.5 * b[i] * b[i]))))
ELEMENTWISE(fill, 1, (real)call->node->attrs.fill.value)

/* Conversion of element types is the executor's: here the value is only moved, or is already in place. */
static void L(move_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    const real *x = call->in[0].data;
    real *y = call->out[0].data;
    vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS, call->out[0].elements);
    memcpy(y + span.first, x + span.first, (size_t)(span.end - span.first) * sizeof(real));
}

static void L(move)(const vlai_cpu_call *call)
{
    if (call->out[0].data && call->out[0].data != call->in[0].data)
        vlai_run(call, vlai_tiles(call->out[0].elements, VLAI_TILE_ELEMENTS), L(move_tile));
}

void FN(cast)(const vlai_cpu_call *call)
{
    L(move)(call);
}

void FN(stop_gradient)(const vlai_cpu_call *call)
{
    L(move)(call);
}

void FN(reshape)(const vlai_cpu_call *call)
{
    L(move)(call);
}

/* swiglu: x [N, 2I] = gate | up -> silu(gate) up. When the stored values are bf16, silu(gate) is a stored value in the
 * reference too, and so is dy up in its backward pass; both are rounded here. */
VLAI_CLONES static void L(swiglu_rows)(const real *x, real *y, int64_t rows, int64_t width)
{
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = x + r * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i++)
            y[r * width + i] = gate[i] / (1 + EXP(-gate[i])) * up[i];
    }
}

static void L(swiglu_rows_bf16)(const real *x, real *y, int64_t rows, int64_t width)
{
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = x + r * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i++)
            y[r * width + i] = (real)vlai_round_bf16((float)(gate[i] / (1 + EXP(-gate[i])))) * up[i];
    }
}

static void L(swiglu_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t width = vlai_cols(&call->out[0]);
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(4 * width), vlai_rows(&call->out[0]));
    const real *x = (const real *)call->in[0].data + span.first * 2 * width;
    real *y = (real *)call->out[0].data + span.first * width;
    if (call->in[0].dtype == VLA_BF16)
        L(swiglu_rows_bf16)(x, y, span.end - span.first, width);
    else
        L(swiglu_rows)(x, y, span.end - span.first, width);
}

void FN(swiglu)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(4 * vlai_cols(&call->out[0]))),
                 L(swiglu_tile));
}

/* h (may be NULL): silu(gate) up once more. dx may lie over x. */
VLAI_CLONES static void L(swiglu_grad_rows)(const real *dy, const real *x, real *dx, real *h, int64_t rows, int64_t width)
{
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = x + r * 2 * width, *up = gate + width;
        real *dgate = dx + r * 2 * width, *dup = dgate + width;
        for (int64_t i = 0; i < width; i++) {
            real d = dy[r * width + i], g = gate[i], u = up[i], s = L(sigmoid)(g);
            dgate[i] = d * u * (s * (1 + g * (1 - s)));
            dup[i] = d * (g * s);
            if (h)
                h[r * width + i] = g / (1 + EXP(-g)) * u;
        }
    }
}

static void L(swiglu_grad_rows_bf16)(const real *dy, const real *x, real *dx, real *h, int64_t rows, int64_t width)
{
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = x + r * 2 * width, *up = gate + width;
        real *dgate = dx + r * 2 * width, *dup = dgate + width;
        for (int64_t i = 0; i < width; i++) {
            real d = dy[r * width + i], g = gate[i], u = up[i];
            real silu = (real)vlai_round_bf16((float)(g / (1 + EXP(-g))));
            dgate[i] = (real)vlai_round_bf16((float)(d * u)) * L(silu_slope)(g);
            dup[i] = d * silu;
            if (h)
                h[r * width + i] = silu * u;
        }
    }
}

static void L(swiglu_grad_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t width = vlai_cols(&call->in[0]);
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(4 * width), vlai_rows(&call->in[0]));
    const real *dy = (const real *)call->in[0].data + span.first * width;
    const real *x = (const real *)call->in[1].data + span.first * 2 * width;
    real *dx = (real *)call->out[0].data + span.first * 2 * width;
    real *h = vlai_result(call, 1);
    h = h ? h + span.first * width : NULL;
    if (call->in[1].dtype == VLA_BF16)
        L(swiglu_grad_rows_bf16)(dy, x, dx, h, span.end - span.first, width);
    else
        L(swiglu_grad_rows)(dy, x, dx, h, span.end - span.first, width);
}

void FN(swiglu_grad)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->in[0]), vlai_tile_rows(4 * vlai_cols(&call->in[0]))),
                 L(swiglu_grad_tile));
}

/* Made where at least dx is wanted: the fuse pass joins nodes whose results are all read. */
void FN(swiglu_backward)(const vlai_cpu_call *call)
{
    FN(swiglu_grad)(call);
    FN(result_sums)(call);
}

static inline real L(chain_step)(vlai_op op, real a, real b, real value)
{
    switch (op) {
    case VLAI_OP_add: return a + b;
    case VLAI_OP_sub: return a - b;
    case VLAI_OP_mul:
    case VLAI_OP_mul_rows: return a * b;
    case VLAI_OP_scale: return a * value;
    case VLAI_OP_silu: return a / (1 + EXP(-a));
    case VLAI_OP_silu_grad: return a * L(silu_slope)(b);
    case VLAI_OP_gelu: return a * L(phi)(a);
    case VLAI_OP_gelu_grad:
        return a * (L(phi)(b) + b * ((real)0.39894228040143267794 * EXP((real)-0.5 * b * b)));
    default: return a; /* cast */
    }
}

/* Element by element, every step rounded to its own type. */
static void L(chain_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    const vlai_chain *c = &call->node->attrs.chain;
    vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS / 32, call->out[0].elements);
    int64_t cols = vlai_cols(&call->out[0]);
    for (int64_t i = span.first; i < span.end; i++) {
        real at[VLAI_CHAIN_INPUTS + VLAI_CHAIN_STEPS] = {0};
        for (int k = 0; k < call->node->n_inputs; k++)
            at[k] = ((const real *)call->in[k].data)[call->in[k].elements == call->out[0].elements ? i : i / cols];
        for (int k = 0; k < c->n; k++) {
            const vlai_chain_step *s = &c->steps[k];
            real y = L(chain_step)((vlai_op)s->op, at[s->a], at[s->b], (real)s->value);
            at[VLAI_CHAIN_INPUTS + k] = s->dtype == VLA_BF16 ? (real)vlai_round_bf16((float)y) : y;
        }
        ((real *)call->out[0].data)[i] = at[VLAI_CHAIN_INPUTS + c->n - 1];
    }
}

void FN(chain)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(call->out[0].elements, VLAI_TILE_ELEMENTS / 32), L(chain_tile));
}

#undef ELEMENTWISE
