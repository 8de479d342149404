/* The update: copies, accumulation, gradient norm, clipping and AdamW. These take operands as they are stored (F32, F64
 * or BF16), a block at a time: widened to `real`, computed, rounded back. */

enum { L(BLOCK) = 512 };

static void L(load)(const vlai_cpu_tensor *t, int64_t first, int64_t n, real *to)
{
    switch (t->dtype) {
    case VLA_F64:
        for (int64_t i = 0; i < n; i++)
            to[i] = (real)((const double *)t->data)[first + i];
        break;
    case VLA_BF16:
        for (int64_t i = 0; i < n; i++)
            to[i] = (real)vlai_bf16_to_float(((const uint16_t *)t->data)[first + i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            to[i] = (real)((const float *)t->data)[first + i];
    }
}

static void L(store)(const vlai_cpu_tensor *t, int64_t first, int64_t n, const real *from)
{
    switch (t->dtype) {
    case VLA_F64:
        for (int64_t i = 0; i < n; i++)
            ((double *)t->data)[first + i] = (double)from[i];
        break;
    case VLA_BF16:
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)t->data)[first + i] = vlai_bf16_from_float((float)from[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            ((float *)t->data)[first + i] = (float)from[i];
    }
}

static void L(store_copy_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS, call->out[0].elements);
    real block[L(BLOCK)];
    for (int64_t at = span.first; at < span.end; at += L(BLOCK)) {
        int64_t n = span.end - at < L(BLOCK) ? span.end - at : L(BLOCK);
        L(load)(&call->in[0], at, n, block);
        L(store)(&call->out[0], at, n, block);
    }
}

void FN(copy)(const vlai_cpu_call *call)
{
    if (!call->out[0].data || call->out[0].data == call->in[0].data)
        return;
    vlai_run(call, vlai_tiles(call->out[0].elements, VLAI_TILE_ELEMENTS), L(store_copy_tile));
}

void FN(bucket)(const vlai_cpu_call *call)
{
    (void)call;
}

void FN(part)(const vlai_cpu_call *call)
{
    size_t size = vla_dtype_size(call->in[0].dtype);
    const char *from = (const char *)call->in[0].data + (size_t)call->node->attrs.slice.first * size;
    if (call->out[0].data && call->out[0].data != from)
        memcpy(call->out[0].data, from, (size_t)call->out[0].elements * size);
}

/* acc += x */
VLAI_CLONES static void L(accumulate_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS, call->in[0].elements);
    real acc[L(BLOCK)], x[L(BLOCK)];
    for (int64_t at = span.first; at < span.end; at += L(BLOCK)) {
        int64_t n = span.end - at < L(BLOCK) ? span.end - at : L(BLOCK);
        L(load)(&call->in[0], at, n, acc);
        L(load)(&call->in[1], at, n, x);
        for (int64_t i = 0; i < n; i++)
            acc[i] += x[i];
        L(store)(&call->in[0], at, n, acc);
    }
}

void FN(accumulate)(const vlai_cpu_call *call)
{
    vlai_run(call, vlai_tiles(call->in[0].elements, VLAI_TILE_ELEMENTS), L(accumulate_tile));
}

/* norms[index] = sum of squares; workspace: one double per VLAI_CHUNK_ELEMENTS elements. */
VLAI_CLONES static void L(sum_squares_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    vlai_span span = vlai_span_of(tile, VLAI_CHUNK_ELEMENTS, call->in[0].elements);
    real x[L(BLOCK)];
    double total = 0;
    for (int64_t at = span.first; at < span.end; at += L(BLOCK)) {
        int64_t n = span.end - at < L(BLOCK) ? span.end - at : L(BLOCK);
        double sum;
        L(load)(&call->in[0], at, n, x);
        VLAI_SUM(sum, n, (double)x[i] * (double)x[i]);
        total += sum;
    }
    ((double *)call->workspace)[tile] = total;
}

void FN(sum_squares)(const vlai_cpu_call *call)
{
    int64_t tiles = vlai_tiles(call->in[0].elements, VLAI_CHUNK_ELEMENTS);
    vlai_run(call, tiles, L(sum_squares_tile));
    double sum = 0;
    for (int64_t k = 0; k < tiles; k++)
        sum += ((const double *)call->workspace)[k];
    ((double *)call->in[1].data)[call->node->attrs.clip.index] = sum;
}

/* norm = sqrt(sum of norms); factor = min(1, max_norm / (norm + 1e-6)), the constant of torch.nn.utils.clip_grad_norm_. */
void FN(clip_factor)(const vlai_cpu_call *call)
{
    double sum = 0, limit = call->node->attrs.clip.max_norm;
    for (int64_t i = 0; i < call->in[0].elements; i++)
        sum += ((const double *)call->in[0].data)[i];
    double norm = sqrt(sum), factor = 1;
    if (limit > 0 && limit / (norm + 1e-6) < 1)
        factor = limit / (norm + 1e-6);
    if (call->out[0].data)
        memcpy(call->out[0].data, (double[]){norm, factor, isfinite(norm) ? 1 : 0}, 3 * sizeof norm);
}

/* A master weight is a float whose upper half, rounded half up, is the bf16 parameter, and whose lower 16 bits are `low`.
 * The rounding can be undone: it carried exactly when low >= 0x8000. */
static void L(load_master)(const uint16_t *high, const uint16_t *low, int64_t n, real *to)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = ((uint32_t)(uint16_t)(high[i] - (low[i] >> 15)) << 16) | low[i];
        float value;
        memcpy(&value, &bits, 4);
        to[i] = (real)value;
    }
}

static void L(store_master)(uint16_t *high, uint16_t *low, int64_t n, const real *from)
{
    for (int64_t i = 0; i < n; i++) {
        float value = (float)from[i];
        uint32_t bits;
        memcpy(&bits, &value, 4);
        high[i] = (uint16_t)((bits + 0x8000u) >> 16);
        low[i] = (uint16_t)bits;
    }
}

/* AdamW with decoupled decay, in the order of PyTorch's: p *= 1 - lr wd; m += (1-b1)(g - m); v = b2 v + (1-b2) g^2;
 * p -= lr/bc1 m / (sqrt(v) (1/sqrt(bc2)) + eps). hyper: see VLA_HYPER_BIAS1 and on. A left-out gradient is zero.
 *
 * Stochastic: the step is computed from the fp32 m and v, then all three are rounded stochastically. Weights, because a step
 * is mostly below half a bf16 unit (2^-9 of the weight) and would be lost whole by rounding to nearest. v, because with
 * beta2 = 0.999 it decays by 1/1000 a step, less than half a unit (1/512 to 1/256): rounded to nearest it never falls again
 * after a large gradient. m, because the same holds for beta1 near 1, and its mean is then right for every beta. */
VLAI_CLONES static void L(adamw_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    const double *hyper = call->in[4].data;
    double rate = hyper[VLA_HYPER_RATES + call->node->attrs.adamw.group];
    real b1 = (real)(1 - call->node->attrs.adamw.beta1), b2 = (real)call->node->attrs.adamw.beta2;
    real c2 = (real)(1 - call->node->attrs.adamw.beta2), decay = (real)(1 - rate * call->node->attrs.adamw.weight_decay);
    real step = (real)(rate / hyper[VLA_HYPER_BIAS1]), root = (real)(1 / sqrt(hyper[VLA_HYPER_BIAS2])), eps = (real)call->node->attrs.adamw.eps;
    real clip[3];
    L(load)(&call->in[5], 0, 3, clip);
    bool split = call->in[0].dtype == VLA_BF16 && call->in[6].data;
    uint16_t *high = call->in[0].data, *low = call->in[6].data;
    real p[L(BLOCK)], g[L(BLOCK)], m[L(BLOCK)], v[L(BLOCK)];
    vlai_span span = vlai_span_of(tile, VLAI_TILE_UPDATE, call->in[0].elements);
    for (int64_t at = span.first, n; at < span.end; at += n) {
        int64_t index = call->node->attrs.adamw.first + at, same = ((int64_t)1 << 32) - (index & 0xFFFFFFFF);
        n = span.end - at < L(BLOCK) ? span.end - at : L(BLOCK);
        n = n < same ? n : same; /* a block crosses no 2^32, where the key of rounding changes */
        if (split)
            L(load_master)(high + at, low + at, n, p);
        else
            L(load)(&call->in[0], at, n, p);
        if (call->in[1].data)
            L(load)(&call->in[1], at, n, g);
        else
            memset(g, 0, sizeof g);
        L(load)(&call->in[2], at, n, m);
        L(load)(&call->in[3], at, n, v);
        for (int64_t i = 0; i < n; i++) {
            real gradient = g[i] * clip[1];
            m[i] = m[i] + b1 * (gradient - m[i]);
            v[i] = v[i] * b2 + c2 * (gradient * gradient);
            p[i] = p[i] * decay - step * (m[i] / (sqrt(v[i]) * root + eps));
        }
        if (!call->node->attrs.adamw.stochastic) {
            if (split)
                L(store_master)(high + at, low + at, n, p);
            else
                L(store)(&call->in[0], at, n, p);
            L(store)(&call->in[2], at, n, m);
            L(store)(&call->in[3], at, n, v);
            continue;
        }
        vlai_rounding rounding = vlai_rounding_of((uint64_t)hyper[VLA_HYPER_SEED], (uint64_t)hyper[VLA_HYPER_UPDATE],
                                                  call->node->attrs.adamw.key, (uint32_t)(index >> 32));
        for (int64_t i = 0; i < n; i++) {
            vlai_rounding_bits bits = vlai_rounding_draw(rounding, (uint32_t)(index + i));
            high[at + i] = vlai_bf16_stochastic((float)p[i], bits.weight);
            ((uint16_t *)call->in[2].data)[at + i] = vlai_bf16_stochastic((float)m[i], bits.m);
            ((uint16_t *)call->in[3].data)[at + i] = vlai_bf16_stochastic((float)v[i], bits.v);
        }
    }
}

/* A gradient that is not finite skips the whole update. */
void FN(adamw)(const vlai_cpu_call *call)
{
    real clip[3];
    L(load)(&call->in[5], 0, 3, clip);
    if (clip[2] != 0)
        vlai_run(call, vlai_tiles(call->in[0].elements, VLAI_TILE_UPDATE), L(adamw_tile));
}
