/* Kernels that move whole rows, columns or elements. An index outside its table counts as negative, so that a bad index
 * can never touch foreign memory. */

typedef struct {
    const vlai_cpu_call *call;
    const real *from;
    real *to;
    int64_t rows, cols;
} L(row_job);

static inline void L(copy_row)(real *to, const real *from, int64_t cols)
{
    memcpy(to, from, (size_t)cols * sizeof(real));
}

/* to[0..n) = from[0..n), or zeros for from = NULL. */
static void L(copy_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const L(row_job) *job = context;
    vlai_span span = vlai_span_of(tile, VLAI_TILE_ELEMENTS, job->rows);
    size_t bytes = (size_t)(span.end - span.first) * sizeof(real);
    if (job->from)
        memcpy(job->to + span.first, job->from + span.first, bytes);
    else
        memset(job->to + span.first, 0, bytes);
}

static void L(copy_elements)(const vlai_cpu_call *call, real *to, const real *from, int64_t n)
{
    if (n > 0 && to != from)
        vlai_pool_run(call->pool, vlai_tiles(n, VLAI_TILE_ELEMENTS), L(copy_tile), &(L(row_job)){call, from, to, n, 1});
}

/* Rows of reals, or of int32 (index tables). */
/* Also for integers: gathered positions and masks. */
static void L(gather_rows_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]), table = vlai_rows(&call->in[0]);
    int64_t bytes = cols * (int64_t)(call->in[0].dtype == VLA_I32 ? sizeof(int32_t) : sizeof(real));
    const char *x = call->in[0].data;
    const int32_t *index = call->in[1].data;
    char *y = call->out[0].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->out[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        if (index[row] >= 0 && index[row] < table)
            memcpy(y + row * bytes, x + index[row] * bytes, (size_t)bytes);
        else
            memset(y + row * bytes, 0, (size_t)bytes);
    }
}

void FN(gather_rows)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(vlai_cols(&call->out[0]))),
                 L(gather_rows_tile));
}

/* Indexed writes go through all indices in order, each tile for its own columns: repeated indices cannot race, and the
 * order of the sums is that of the rows. */
enum { L(TILE_COLS) = 64 };

VLAI_CLONES static void L(scatter_add_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]), rows = vlai_rows(&call->out[0]), skip = call->node->attrs.rows.skip;
    const int32_t *index = call->in[1].data;
    vlai_span span = vlai_span_of(tile, L(TILE_COLS), cols);
    for (int64_t row = 0; row < vlai_rows(&call->in[0]); row++) {
        if (index[row] < 0 || index[row] >= rows || index[row] == skip)
            continue;
        const real *x = (const real *)call->in[0].data + row * cols;
        real *y = (real *)call->out[0].data + index[row] * cols;
        for (int64_t i = span.first; i < span.end; i++)
            y[i] += x[i];
    }
}

void FN(scatter_add_rows)(const vlai_cpu_call *call)
{
    if (!call->out[0].data)
        return;
    L(copy_elements)(call, call->out[0].data, NULL, call->out[0].elements);
    vlai_run(call, vlai_tiles(vlai_cols(&call->out[0]), L(TILE_COLS)), L(scatter_add_tile));
}

/* put_rows and zero_rows: the base, then the indexed rows over it. */
static void L(put_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]), rows = vlai_rows(&call->out[0]);
    const int32_t *index = call->in[1].data;
    const real *from = call->node->op == VLAI_OP_put_rows ? call->in[2].data : NULL;
    vlai_span span = vlai_span_of(tile, L(TILE_COLS), cols);
    for (int64_t row = 0; row < call->in[1].elements; row++) {
        if (index[row] < 0 || index[row] >= rows)
            continue;
        real *y = (real *)call->out[0].data + index[row] * cols + span.first;
        if (from)
            L(copy_row)(y, from + row * cols + span.first, span.end - span.first);
        else
            memset(y, 0, (size_t)(span.end - span.first) * sizeof(real));
    }
}

static void L(put)(const vlai_cpu_call *call)
{
    if (!call->out[0].data)
        return;
    L(copy_elements)(call, call->out[0].data, call->in[0].data, call->out[0].elements);
    vlai_run(call, vlai_tiles(vlai_cols(&call->out[0]), L(TILE_COLS)), L(put_tile));
}

void FN(put_rows)(const vlai_cpu_call *call)
{
    L(put)(call);
}

void FN(zero_rows)(const vlai_cpu_call *call)
{
    L(put)(call);
}

static void L(merge_rows_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]), rows_a = vlai_rows(&call->in[0]), rows_b = vlai_rows(&call->in[1]);
    const real *a = call->in[0].data, *b = call->in[1].data;
    const int32_t *map = call->in[2].data;
    real *y = call->out[0].data;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->out[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        int64_t from_a = map[row], from_b = -1 - (int64_t)map[row];
        if (from_a >= 0 && from_a < rows_a)
            L(copy_row)(y + row * cols, a + from_a * cols, cols);
        else if (from_b >= 0 && from_b < rows_b)
            L(copy_row)(y + row * cols, b + from_b * cols, cols);
        else
            memset(y + row * cols, 0, (size_t)cols * sizeof(real));
    }
}

void FN(merge_rows)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(vlai_cols(&call->out[0]))),
                 L(merge_rows_tile));
}

static void L(split_cols_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->in[0]), first = 0;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->in[0]));
    for (int k = 0; k < call->node->attrs.split.n; k++) {
        int64_t width = call->node->attrs.split.widths[k];
        real *y = call->out[k].data;
        const real *x = (const real *)call->in[0].data + first;
        for (int64_t row = span.first; y && row < span.end; row++)
            L(copy_row)(y + row * width, x + row * cols, width);
        first += width;
    }
}

void FN(split_cols)(const vlai_cpu_call *call)
{
    vlai_run(call, vlai_tiles(vlai_rows(&call->in[0]), vlai_tile_rows(vlai_cols(&call->in[0]))), L(split_cols_tile));
}

static void L(concat_cols_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]), first = 0;
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->out[0]));
    for (int k = 0; k < call->node->n_inputs; k++) {
        int64_t width = vlai_cols(&call->in[k]);
        const real *x = call->in[k].data;
        real *y = (real *)call->out[0].data + first;
        for (int64_t row = span.first; row < span.end; row++)
            L(copy_row)(y + row * cols, x + row * width, width);
        first += width;
    }
}

void FN(concat_cols)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(vlai_cols(&call->out[0]))),
                 L(concat_cols_tile));
}

/* Row ranges are ranges of elements; a row of a rank 1 operand is an element. */
void FN(slice_rows)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        L(copy_elements)(call, call->out[0].data,
                         (const real *)call->in[0].data + call->node->attrs.slice.first * vlai_cols(&call->in[0]),
                         call->out[0].elements);
}

void FN(pad_rows)(const vlai_cpu_call *call)
{
    real *y = call->out[0].data;
    if (!y)
        return;
    int64_t first = call->node->attrs.slice.first * vlai_cols(&call->in[0]), n = call->in[0].elements;
    L(copy_elements)(call, y, NULL, first);
    L(copy_elements)(call, y + first, call->in[0].data, n);
    L(copy_elements)(call, y + first + n, NULL, call->out[0].elements - first - n);
}

void FN(concat_rows)(const vlai_cpu_call *call)
{
    real *y = call->out[0].data;
    if (!y)
        return;
    L(copy_elements)(call, y, call->in[0].data, call->in[0].elements);
    L(copy_elements)(call, y + call->in[0].elements, call->in[1].data, call->in[1].elements);
}

VLAI_CLONES static void L(mul_rows_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]);
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->out[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        const real *x = (const real *)call->in[0].data + row * cols;
        real *y = (real *)call->out[0].data + row * cols, s = ((const real *)call->in[1].data)[row];
        for (int64_t i = 0; i < cols; i++)
            y[i] = x[i] * s;
    }
}

void FN(mul_rows)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(vlai_cols(&call->out[0]))),
                 L(mul_rows_tile));
}

static void L(expand_cols_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]);
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->out[0]));
    for (int64_t row = span.first; row < span.end; row++)
        for (int64_t i = 0; i < cols; i++)
            ((real *)call->out[0].data)[row * cols + i] = ((const real *)call->in[0].data)[row];
}

void FN(expand_cols)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(vlai_cols(&call->out[0]))),
                 L(expand_cols_tile));
}

static void L(expand_rows_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    int64_t cols = vlai_cols(&call->out[0]);
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(cols), vlai_rows(&call->out[0]));
    for (int64_t row = span.first; row < span.end; row++)
        L(copy_row)((real *)call->out[0].data + row * cols, call->in[0].data, cols);
}

void FN(expand_rows)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(vlai_cols(&call->out[0]))),
                 L(expand_rows_tile));
}
