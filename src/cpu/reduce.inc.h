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

typedef struct L(column_job) {
    const vlai_cpu_call *call;
    const vlai_cpu_tensor *x;
} L(column_job);

/* Partial sums of VLAI_CHUNK_ROWS rows each, then the partials in order. Workspace: chunks x cols doubles. */
VLAI_CLONES static void L(column_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const L(column_job) *job = context;
    int64_t cols = vlai_cols(job->x);
    vlai_span span = vlai_span_of(tile, VLAI_CHUNK_ROWS, vlai_rows(job->x));
    double *partial = (double *)job->call->workspace + tile * cols;
    memset(partial, 0, (size_t)cols * sizeof *partial);
    for (int64_t row = span.first; row < span.end; row++) {
        const real *x = (const real *)job->x->data + row * cols;
        if (job->x->dtype == VLA_BF16)
            for (int64_t i = 0; i < cols; i++)
                partial[i] += (double)vlai_round_bf16((float)x[i]);
        else
            for (int64_t i = 0; i < cols; i++)
                partial[i] += (double)x[i];
    }
}

void FN(column_sums)(const vlai_cpu_call *call, const vlai_cpu_tensor *x, void *sums)
{
    L(column_job) job = {call, x};
    int64_t cols = vlai_cols(x), chunks = vlai_tiles(vlai_rows(x), VLAI_CHUNK_ROWS);
    vlai_pool_run(call->pool, chunks, L(column_tile), &job);
    for (int64_t i = 0; i < cols; i++) {
        double sum = 0;
        for (int64_t c = 0; c < chunks; c++)
            sum += ((const double *)call->workspace)[c * cols + i];
        ((real *)sums)[i] = (real)sum;
    }
}

void FN(col_sum)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        FN(column_sums)(call, &call->in[0], call->out[0].data);
}

void FN(result_sums)(const vlai_cpu_call *call)
{
    for (int k = 0; k < 2; k++) {
        int at = vlai_sums_at(call->node, k);
        if (at >= 0 && call->out[at].data && call->out[k].data)
            FN(column_sums)(call, &call->out[k], call->out[at].data);
    }
}
