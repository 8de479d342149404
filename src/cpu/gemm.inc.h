/* op(a) op(b) + bias + residual by BLAS, one call per tile of the result, which may lie over the residual. */

typedef struct {
    const vlai_cpu_call *call;
    vlai_gemm_grid grid;
    int64_t m, n, k;
} L(gemm_job);

static void L(add_bias)(real *c, const real *bias, int64_t rows, int64_t cols, int64_t stride)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            c[i * stride + j] += bias[j];
}

static void L(gemm_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const L(gemm_job) *job = context;
    const vlai_cpu_call *call = job->call;
    const vlai_gemm_grid *grid = &job->grid;
    bool ta = call->node->attrs.matmul.transpose_a, tb = call->node->attrs.matmul.transpose_b;
    int64_t part = tile % grid->n_depth, at = tile / grid->n_depth;
    vlai_span rows = vlai_span_of(at / grid->n_cols, grid->rows, job->m);
    vlai_span cols = vlai_span_of(at % grid->n_cols, grid->cols, job->n);
    vlai_span depth = vlai_span_of(part, grid->depth, job->k);
    int64_t lda = vlai_cols(&call->in[0]), ldb = vlai_cols(&call->in[1]);
    const real *a = (const real *)call->in[0].data + (ta ? depth.first * lda + rows.first : rows.first * lda + depth.first);
    const real *b = (const real *)call->in[1].data + (tb ? cols.first * ldb + depth.first : depth.first * ldb + cols.first);
    real *c = grid->n_depth > 1 ? (real *)call->workspace + part * job->m * job->n : call->out[0].data;
    c += rows.first * job->n + cols.first;
    int64_t height = rows.end - rows.first, width = cols.end - cols.first;
    const real *residual = grid->n_depth > 1 ? NULL : call->in[3].data;
    for (int64_t i = 0; i < height && (residual || job->k == 0); i++) {
        real *row = c + i * job->n;
        if (!residual)
            memset(row, 0, (size_t)width * sizeof(real));
        else if (call->in[3].data != call->out[0].data)
            memcpy(row, residual + (rows.first + i) * job->n + cols.first, (size_t)width * sizeof(real));
    }
    if (job->k > 0)
        GEMM(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, (blasint)height,
             (blasint)width, (blasint)(depth.end - depth.first), 1, a, (blasint)lda, b, (blasint)ldb, residual ? 1 : 0, c,
             (blasint)job->n);
    if (call->in[2].data && grid->n_depth == 1)
        L(add_bias)(c, (const real *)call->in[2].data + cols.first, height, width, job->n);
}

/* Adds the partial results of a split sum, in order, then the residual. */
VLAI_CLONES static void L(gemm_sum_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const L(gemm_job) *job = context;
    int64_t size = job->m * job->n;
    vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS, size);
    const real *part = job->call->workspace;
    real *c = job->call->out[0].data;
    const real *residual = job->call->in[3].data;
    real sum[256];
    for (int64_t first = span.first; first < span.end; first += 256) {
        int64_t n = span.end - first < 256 ? span.end - first : 256;
        memcpy(sum, part + first, (size_t)n * sizeof(real));
        for (int64_t p = 1; p < job->grid.n_depth; p++)
            for (int64_t i = 0; i < n; i++)
                sum[i] += part[p * size + first + i];
        for (int64_t i = 0; residual && i < n; i++)
            sum[i] += residual[first + i];
        memcpy(c + first, sum, (size_t)n * sizeof(real));
    }
}

VLAI_CLONES static void L(row_sums_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[0]);
    const real *a = call->in[0].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->in[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        double sum;
        VLAI_SUM(sum, cols, a[row * cols + i]);
        ((real *)call->out[1].data)[row] = (real)sum;
    }
}

/* Row sums of op(a): sums [M]. */
static void L(sums)(const vlai_cpu_call *call)
{
    if (call->node->attrs.matmul.transpose_a)
        FN(column_sums)(call, &call->in[0], call->out[1].data);
    else
        vlai_run(call, vlai_tiles(vlai_rows(&call->in[0]), vlai_tile_rows(vlai_cols(&call->in[0]))), L(row_sums_tile));
}

/* Workspace: the partial results of a split sum, then those of the column sums in the same place. */
void FN(matmul)(const vlai_cpu_call *call)
{
    if (call->out[1].data)
        L(sums)(call);
    if (!call->out[0].data || !call->out[0].elements)
        return;
    vlai_blas_single_threaded();
    L(gemm_job) job = {.call = call, .m = vlai_rows(&call->out[0]), .n = vlai_cols(&call->out[0])};
    job.k = call->node->attrs.matmul.transpose_a ? vlai_rows(&call->in[0]) : vlai_cols(&call->in[0]);
    job.grid = vlai_gemm_grid_of(job.m, job.n, job.k);
    vlai_pool_run(call->pool, job.grid.n_rows * job.grid.n_cols * job.grid.n_depth, L(gemm_tile), &job);
    if (job.grid.n_depth > 1) {
        vlai_pool_run(call->pool, vlai_tiles(job.m * job.n, VLAI_TILE_ELEMENTS), L(gemm_sum_tile), &job);
        if (call->in[2].data)
            L(add_bias)(call->out[0].data, call->in[2].data, job.m, job.n, job.n);
    }
}
