/* RMSNorm: y = x r w, r = 1/sqrt(mean(x^2) + eps), statistics in double, rounded once to `real`. */

VLAI_CLONES static void L(rms_norm_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[0]), rows = vlai_rows(&call->in[0]);
    const real *w = call->in[1].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(2 * cols), rows);
    for (int64_t row = span.first; row < span.end; row++) {
        const real *x = (const real *)call->in[0].data + row * cols;
        double sum;
        VLAI_SUM(sum, cols, (double)x[i] * (double)x[i]);
        real r = (real)(1 / sqrt(sum / (double)cols + call->node->attrs.norm.eps));
        if (call->out[1].data)
            ((real *)call->out[1].data)[row] = r;
        real *y = call->out[0].data;
        if (!y)
            continue;
        y += row * cols;
        if (w)
            for (int64_t i = 0; i < cols; i++)
                y[i] = x[i] * r * w[i];
        else
            for (int64_t i = 0; i < cols; i++)
                y[i] = x[i] * r;
    }
}

void FN(rms_norm)(const vlai_cpu_call *call)
{
    vlai_run(call, vlai_tiles(vlai_rows(&call->in[0]), vlai_tile_rows(2 * vlai_cols(&call->in[0]))), L(rms_norm_tile));
}

/* dx = r (w dy) - x r^3 mean(w dy x) + add, and y = x r w where it is wanted once more. dx may lie over dy or over add. */
VLAI_CLONES static void L(rms_norm_grad_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[1]), rows = vlai_rows(&call->in[1]);
    const real *w = call->in[3].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(2 * cols), rows);
    for (int64_t row = span.first; row < span.end; row++) {
        const real *dy = (const real *)call->in[0].data + row * cols, *x = (const real *)call->in[1].data + row * cols;
        const real *add = call->in[4].data ? (const real *)call->in[4].data + row * cols : NULL;
        real *dx = (real *)call->out[0].data + row * cols;
        double r = (double)((const real *)call->in[2].data)[row], sum;
        if (w)
            VLAI_SUM(sum, cols, (double)w[i] * (double)dy[i] * (double)x[i]);
        else
            VLAI_SUM(sum, cols, (double)dy[i] * (double)x[i]);
        real a = (real)r, b = (real)(r * r * r * (sum / (double)cols));
        real *y = vlai_result(call, 2);
        y = y ? y + row * cols : NULL;
        for (int64_t i = 0; y && w && i < cols; i++)
            y[i] = x[i] * a * w[i];
        if (w && add)
            for (int64_t i = 0; i < cols; i++)
                dx[i] = a * (w[i] * dy[i]) - x[i] * b + add[i];
        else if (add)
            for (int64_t i = 0; i < cols; i++)
                dx[i] = a * dy[i] - x[i] * b + add[i];
        else if (w)
            for (int64_t i = 0; i < cols; i++)
                dx[i] = a * (w[i] * dy[i]) - x[i] * b;
        else
            for (int64_t i = 0; i < cols; i++)
                dx[i] = a * dy[i] - x[i] * b;
    }
}

void FN(rms_norm_grad)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->in[1]), vlai_tile_rows(2 * vlai_cols(&call->in[1]))),
                 L(rms_norm_grad_tile));
}

/* dw = sum over rows of dy x r: partial sums of VLAI_CHUNK_ROWS rows each, then the partials in order. Workspace:
 * chunks x cols doubles. */
VLAI_CLONES static void L(rms_norm_grad_weight_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[1]);
    vlai_span span = vlai_span_of(tile, VLAI_CHUNK_ROWS, vlai_rows(&call->in[1]));
    double *partial = (double *)call->workspace + tile * cols;
    memset(partial, 0, (size_t)cols * sizeof *partial);
    for (int64_t row = span.first; row < span.end; row++) {
        const real *dy = (const real *)call->in[0].data + row * cols, *x = (const real *)call->in[1].data + row * cols;
        double r = (double)((const real *)call->in[2].data)[row];
        for (int64_t i = 0; i < cols; i++)
            partial[i] += (double)dy[i] * ((double)x[i] * r);
    }
}

static void L(norm_weight)(const vlai_cpu_call *call, real *dw)
{
    if (!dw)
        return;
    int64_t cols = vlai_cols(&call->in[1]), chunks = vlai_tiles(vlai_rows(&call->in[1]), VLAI_CHUNK_ROWS);
    vlai_run(call, chunks, L(rms_norm_grad_weight_tile));
    for (int64_t i = 0; i < cols; i++) {
        double sum = 0;
        for (int64_t c = 0; c < chunks; c++)
            sum += ((const double *)call->workspace)[c * cols + i];
        dw[i] = (real)sum;
    }
}

void FN(rms_norm_grad_weight)(const vlai_cpu_call *call)
{
    L(norm_weight)(call, call->out[0].data);
}

/* The weight's gradient first: dx may lie over dy. */
void FN(rms_norm_backward)(const vlai_cpu_call *call)
{
    L(norm_weight)(call, vlai_result(call, 1));
    FN(rms_norm_grad)(call);
    FN(result_sums)(call);
}
