/* Sums over columns and over rows, in double, in a fixed order. */

VLAI_CLONES static void L(row_sum_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[0]);
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->in[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        const real *x = (const real *)call->in[0].data + row * cols;
        double sum;
        VLAI_SUM(sum, cols, x[i]);
        ((real *)call->out[0].data)[row] = (real)sum;
    }
}

void FN(row_sum)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->in[0]), vlai_tile_rows(vlai_cols(&call->in[0]))), L(row_sum_tile));
}

/* Partial sums of VLAI_CHUNK_ROWS rows each, then the partials in order. Workspace: chunks x cols doubles. */
VLAI_CLONES static void L(col_sum_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[0]);
    vlai_span span = vlai_span_of(tile, VLAI_CHUNK_ROWS, vlai_rows(&call->in[0]));
    double *partial = (double *)call->workspace + tile * cols;
    memset(partial, 0, (size_t)cols * sizeof *partial);
    for (int64_t row = span.first; row < span.end; row++) {
        const real *x = (const real *)call->in[0].data + row * cols;
        for (int64_t i = 0; i < cols; i++)
            partial[i] += (double)x[i];
    }
}

void FN(col_sum)(const vlai_cpu_call *call)
{
    real *y = call->out[0].data;
    if (!y)
        return;
    int64_t cols = vlai_cols(&call->in[0]), chunks = vlai_tiles(vlai_rows(&call->in[0]), VLAI_CHUNK_ROWS);
    vlai_run(call, chunks, L(col_sum_tile));
    for (int64_t i = 0; i < cols; i++) {
        double sum = 0;
        for (int64_t c = 0; c < chunks; c++)
            sum += ((const double *)call->workspace)[c * cols + i];
        y[i] = (real)sum;
    }
}
