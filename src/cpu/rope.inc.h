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

/* One row: the first `heads` heads rotated, the other columns copied. y may be x. */
VLAI_CLONES static void L(rotate_row)(const real *x, const real *c, const real *s, real *y, int64_t cols, int64_t dim, int64_t heads, real sign)
{
    int64_t half = dim / 2;
    for (int64_t head = 0; head < heads * dim; head += dim)
        for (int64_t i = 0; i < half; i++) {
            real a = x[head + i], b = x[head + i + half], sine = sign * s[i];
            y[head + i] = a * c[i] - b * sine;
            y[head + i + half] = b * c[i] + a * sine;
        }
    if (y != x)
        memcpy(y + heads * dim, x + heads * dim, (size_t)(cols - heads * dim) * sizeof(real));
}

static void L(qkv_rope_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]), dim = call->node->attrs.rope.head_dim, heads = call->node->attrs.rope.heads;
    int64_t rows_a = vlai_rows(&call->in[0]), rows_b = call->in[1].data ? vlai_rows(&call->in[1]) : 0;
    const real *a = call->in[0].data, *b = call->in[1].data, *c = call->in[3].data, *s = call->in[4].data;
    const int32_t *map = call->in[2].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(2 * cols), vlai_rows(&call->out[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        int64_t from_a = map ? map[row] : row, from_b = -1 - from_a;
        const real *x = from_a >= 0 && from_a < rows_a ? a + from_a * cols : from_b >= 0 && from_b < rows_b ? b + from_b * cols : NULL;
        real *y = (real *)call->out[0].data + row * cols;
        if (x)
            L(rotate_row)(x, c + row * (dim / 2), s + row * (dim / 2), y, cols, dim, heads, 1);
        else
            memset(y, 0, (size_t)cols * sizeof(real));
    }
}

void FN(qkv_rope)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(2 * vlai_cols(&call->out[0]))), L(qkv_rope_tile));
}

/* Rows of both results one after the other. */
static void L(qkv_rope_grad_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[0]), dim = call->node->attrs.rope.head_dim, rows = vlai_rows(&call->in[0]);
    int64_t rows_a = vlai_rows(&call->out[0]), rows_b = vlai_result(call, 1) ? vlai_rows(&call->out[1]) : 0;
    const real *c = call->in[1].data, *s = call->in[2].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(2 * cols), rows_a + rows_b);
    for (int64_t i = span.first; i < span.end; i++) {
        int which = i >= rows_a;
        int64_t at = which ? i - rows_a : i;
        const int32_t *index = call->in[3 + which].data;
        int64_t row = index ? index[at] : at;
        real *y = call->out[which].data;
        if (!y)
            continue;
        y += at * cols;
        if (row >= 0 && row < rows)
            L(rotate_row)((const real *)call->in[0].data + row * cols, c + row * (dim / 2), s + row * (dim / 2), y, cols, dim,
                          call->node->attrs.rope.heads, -1);
        else
            memset(y, 0, (size_t)cols * sizeof(real));
    }
}

void FN(qkv_rope_grad)(const vlai_cpu_call *call)
{
    int64_t rows = vlai_rows(&call->out[0]) + (vlai_result(call, 1) ? vlai_rows(&call->out[1]) : 0);
    vlai_run(call, vlai_tiles(rows, vlai_tile_rows(2 * vlai_cols(&call->in[0]))), L(qkv_rope_grad_tile));
    FN(result_sums)(call);
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
