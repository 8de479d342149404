/* The two losses and their gradients. Sums in double: partial sums per tile in the workspace, then the partials in
 * order. */

/* error = mask (p - t)^2; workspace: two doubles per tile, sum of errors and sum of mask. */
VLAI_CLONES static void L(masked_mse_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    const real *p = call->in[0].data, *t = call->in[1].data, *mask = call->in[2].data;
    real *error = call->out[1].data;
    vlai_span span = vlai_span_of(tile, VLAI_CHUNK_ELEMENTS, call->in[0].elements);
    p += span.first, t += span.first, mask += span.first;
    int64_t n = span.end - span.first;
    double *partial = (double *)call->workspace + 2 * tile;
    VLAI_SUM(partial[0], n, mask[i] * ((p[i] - t[i]) * (p[i] - t[i])));
    VLAI_SUM(partial[1], n, mask[i]);
    if (error)
        for (int64_t i = 0; i < n; i++)
            error[span.first + i] = mask[i] * ((p[i] - t[i]) * (p[i] - t[i]));
}

/* A mask of zeros gives 0/0, as in the reference. */
void FN(masked_mse)(const vlai_cpu_call *call)
{
    int64_t tiles = vlai_tiles(call->in[0].elements, VLAI_CHUNK_ELEMENTS);
    vlai_run(call, tiles, L(masked_mse_tile));
    double sum = 0, count = 0;
    for (int64_t k = 0; k < tiles; k++) {
        sum += ((const double *)call->workspace)[2 * k];
        count += ((const double *)call->workspace)[2 * k + 1];
    }
    if (call->out[0].data)
        *(real *)call->out[0].data = (real)(sum / count);
    if (call->out[2].data)
        *(real *)call->out[2].data = (real)count;
}

/* dp = dloss 2 mask (p - t) / count. */
VLAI_CLONES static void L(masked_mse_grad_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    const real *p = call->in[1].data, *t = call->in[2].data, *mask = call->in[3].data;
    real *dp = call->out[0].data;
    real factor = 2 * *(const real *)call->in[0].data / *(const real *)call->in[4].data;
    vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS, call->in[1].elements);
    for (int64_t i = span.first; i < span.end; i++)
        dp[i] = factor * (mask[i] * (p[i] - t[i]));
}

void FN(masked_mse_grad)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(call->in[1].elements, VLAI_TILE_ELEMENTS), L(masked_mse_grad_tile));
}

/* log of sum exp(x), about the largest x. */
VLAI_CLONES static double L(log_sum_exp)(const real *x, int64_t n)
{
    real top = x[0];
    for (int64_t i = 1; i < n; i++)
        top = x[i] > top ? x[i] : top;
    double sum;
    VLAI_SUM(sum, n, EXP(x[i] - top));
    return (double)top + log(sum);
}

static inline bool L(counted)(const vlai_cpu_tensor *labels, int64_t row, int64_t classes)
{
    int32_t label = ((const int32_t *)labels->data)[row];
    return label >= 0 && label < classes;
}

/* Workspace: N doubles, the error of each row. */
static void L(cross_entropy_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t classes = vlai_cols(&call->in[0]);
    double *error = call->workspace;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(4 * classes), vlai_rows(&call->in[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        error[row] = 0;
        if (!L(counted)(&call->in[1], row, classes))
            continue;
        const real *x = (const real *)call->in[0].data + row * classes;
        error[row] = L(log_sum_exp)(x, classes) - (double)x[((const int32_t *)call->in[1].data)[row]];
    }
}

void FN(cross_entropy)(const vlai_cpu_call *call)
{
    int64_t rows = vlai_rows(&call->in[0]), classes = vlai_cols(&call->in[0]), count = 0;
    const double *error = call->workspace;
    vlai_run(call, vlai_tiles(rows, vlai_tile_rows(4 * classes)), L(cross_entropy_tile));
    double sum = 0;
    for (int64_t row = 0; row < rows; row++) {
        count += L(counted)(&call->in[1], row, classes);
        sum += error[row];
        if (call->out[1].data)
            ((real *)call->out[1].data)[row] = (real)error[row];
    }
    if (call->out[0].data)
        *(real *)call->out[0].data = count ? (real)(sum / (double)count) : 0;
    if (call->out[2].data)
        *(real *)call->out[2].data = (real)count;
}

/* dlogits = dloss (softmax - onehot) / count on counted rows, else 0. */
VLAI_CLONES static void L(cross_entropy_grad_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t classes = vlai_cols(&call->in[1]);
    real factor = *(const real *)call->in[0].data / *(const real *)call->in[3].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(4 * classes), vlai_rows(&call->in[1]));
    for (int64_t row = span.first; row < span.end; row++) {
        const real *x = (const real *)call->in[1].data + row * classes;
        real *dx = (real *)call->out[0].data + row * classes;
        if (!L(counted)(&call->in[2], row, classes)) {
            memset(dx, 0, (size_t)classes * sizeof(real));
            continue;
        }
        real lse = (real)L(log_sum_exp)(x, classes);
        for (int64_t i = 0; i < classes; i++)
            dx[i] = factor * EXP(x[i] - lse);
        dx[((const int32_t *)call->in[2].data)[row]] -= factor;
    }
}

void FN(cross_entropy_grad)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->in[1]), vlai_tile_rows(4 * vlai_cols(&call->in[1]))),
                 L(cross_entropy_grad_tile));
}
