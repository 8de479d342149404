/* Rotary tables and rotation, and the sinusoid of the flow time. In single precision each step of the tables is rounded
 * as PyTorch's float32 expression rounds it: exponent 2j/(2 span), power, reciprocal, angle, then cos and sin. */

/* Workspace: `half` reals, then `half` int32: frequency and axis of each pair. */
static void L(rope_table_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t half = vlai_cols(&call->out[0]), n = call->in[0].shape[1];
    const real *frequency = call->workspace;
    const int32_t *axis = (const int32_t *)(frequency + half), *position = call->in[0].data;
    real *c = call->out[0].data, *s = call->out[1].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(16 * half), n);
    for (int64_t row = span.first; row < span.end; row++)
        for (int64_t i = 0; i < half; i++) {
            real angle = (real)position[axis[i] * n + row] * frequency[i];
            if (c)
                c[row * half + i] = (real)cos((double)angle);
            if (s)
                s[row * half + i] = (real)sin((double)angle);
        }
}

void FN(rope_table)(const vlai_cpu_call *call)
{
    const vla_rope_options *options = &call->node->attrs.rope_table;
    int half = options->half;
    real *frequency = call->workspace;
    int32_t *axis = (int32_t *)(frequency + half);
    int i = 0;
    for (int a = 0; a < options->axes; a++)
        for (int k = 0; k < options->sections[a] && i < half; k++, i++) {
            int j = options->restart ? k : i, span = options->restart ? options->sections[a] : half;
            real exponent = (real)(2 * j) / (real)(2 * span);
            frequency[i] = 1 / (real)pow((double)(real)options->base, (double)exponent);
            axis[i] = a;
        }
    vlai_run(call, vlai_tiles(call->in[0].shape[1], vlai_tile_rows(16 * half)), L(rope_table_tile));
}

/* y_i = x_i c - x_{i+half} s, y_{i+half} = x_{i+half} c + x_i s; the inverse has -s. */
VLAI_CLONES static void L(rope_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[0]), dim = call->node->attrs.rope.head_dim, half = dim / 2;
    real sign = call->node->attrs.rope.inverse ? -1 : 1;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(2 * cols), vlai_rows(&call->in[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        const real *c = (const real *)call->in[1].data + row * half, *s = (const real *)call->in[2].data + row * half;
        for (int64_t head = 0; head < cols; head += dim) {
            const real *x = (const real *)call->in[0].data + row * cols + head;
            real *y = (real *)call->out[0].data + row * cols + head;
            for (int64_t i = 0; i < half; i++) {
                real a = x[i], b = x[i + half], sine = sign * s[i];
                y[i] = a * c[i] - b * sine;
                y[i + half] = b * c[i] + a * sine;
            }
        }
    }
}

void FN(rope)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->in[0]), vlai_tile_rows(2 * vlai_cols(&call->in[0]))), L(rope_tile));
}

/* t [N] -> [N, dim] = sin(t f_k) | cos(t f_k), f_k = exp(-k ln(period) / (half - 1)). */
static void L(sinusoid_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t dim = vlai_cols(&call->out[0]), half = dim / 2;
    real slope = half > 1 ? (real)-(log(call->node->attrs.sinusoid.period) / (double)(half - 1)) : 0;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(32 * dim), vlai_rows(&call->out[0]));
    for (int64_t k = 0; k < half; k++) {
        real frequency = (real)exp((double)((real)k * slope));
        for (int64_t row = span.first; row < span.end; row++) {
            real *y = (real *)call->out[0].data + row * dim;
            double angle = (double)(((const real *)call->in[0].data)[row] * frequency);
            y[k] = (real)sin(angle);
            y[half + k] = (real)cos(angle);
        }
    }
}

void FN(sinusoid)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(32 * vlai_cols(&call->out[0]))),
                 L(sinusoid_tile));
}
