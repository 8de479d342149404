/* Attention over packed rows, forward and backward, in blocks of scores that stay in cache.
 *
 * Queries are taken in groups of neighbours that see nearly the same keys (`rows`), so that many short segments cost what
 * the segments cost, not their square. Forward: one tile per block of queries and head, softmax rescaled as key blocks go
 * by. Backward: rows are cut into components that share no key; one tile per component and kv head goes through its
 * queries in order and owns their dq and the component's dk, dv: nothing is added by two tiles. */

typedef struct {
    const vlai_cpu_call *call;
    int64_t queries, keys;
    int heads, kv_heads, dim, group; /* group: query heads per kv head */
    int64_t q_stride, kv_stride;     /* of rows of q, and of k and v: more than their width where they lie side by side */
    const real *q, *k, *v, *lse;
    const vlai_cpu_tensor *dy[2], *o[2]; /* the second: stream b's, with a map; results where forward */
    const int32_t *map;                  /* where the rows of do and o lie, or NULL: in their order in the first */
    real *dq, *dk, *dv;
    real scale;
    const int32_t *qpos, *rows, *cols;
    const int32_t *component; /* backward: pairs (first query, first key), and a last one past the end */
} L(attention_job);

/* The tables stand from operand `first_index` on, q at operand `q`: alone with k and v behind it, or all three in it. */
static L(attention_job) L(attention_job_of)(const vlai_cpu_call *call, int q, int first_index, bool packed)
{
    const vla_attention_options *options = &call->node->attrs.attention;
    int64_t width = (int64_t)options->heads * options->head_dim, kv_width = (int64_t)options->kv_heads * options->head_dim;
    const real *first = call->in[q].data;
    return (L(attention_job)){
        .call = call,
        .q_stride = packed ? width + 2 * kv_width : width,
        .kv_stride = packed ? width + 2 * kv_width : kv_width,
        .q = first,
        .k = packed ? first + width : call->in[q + 1].data,
        .v = packed ? first + width + kv_width : call->in[q + 2].data,
        .queries = call->in[first_index].elements,
        .keys = vlai_rows(&call->in[first_index + 2]),
        .heads = options->heads,
        .kv_heads = options->kv_heads,
        .dim = options->head_dim,
        .group = options->heads / options->kv_heads,
        .scale = (real)options->scale,
        .qpos = call->in[first_index].data,
        .rows = call->in[first_index + 1].data,
        .cols = call->in[first_index + 2].data,
    };
}

/* Row `row` of do or o; NULL where nobody gave it, or wants it. */
static inline real *L(stream_row)(const L(attention_job) *job, const vlai_cpu_tensor *const streams[2], int64_t row)
{
    int64_t at = job->map ? job->map[row] : row;
    const vlai_cpu_tensor *stream = streams[at < 0];
    at = at < 0 ? -1 - at : at;
    return stream->data && at < vlai_rows(stream) ? (real *)stream->data + at * job->heads * job->dim : NULL;
}

/* The keys that query i may see at all; first = end when none. */
static inline vlai_span L(key_span)(const L(attention_job) *job, int64_t i)
{
    int64_t first = job->rows[2 * i], end = job->rows[2 * i + 1];
    first = first < 0 ? 0 : first;
    end = end > job->keys ? job->keys : end;
    return (vlai_span){first, end > first ? end : first};
}

/* Queries i.. (below `end`) that are worth one block: the keys that any of them may see number at most twice the average
 * that one may see, and a segment with other keys joins only a block that is still small. */
static int64_t L(group_end)(const L(attention_job) *job, int64_t i, int64_t end, vlai_span *keys)
{
    int64_t total = 0, at = i;
    *keys = (vlai_span){0, 0};
    for (; at < end; at++) {
        vlai_span one = L(key_span)(job, at), all = *keys;
        if (one.end > one.first) {
            if (at - i >= VLAI_ATTENTION_JOIN && all.end > all.first && (one.first >= all.end || one.end <= all.first))
                break;
            if (all.end == all.first)
                all = one;
            all.first = one.first < all.first ? one.first : all.first;
            all.end = one.end > all.end ? one.end : all.end;
        }
        total += one.end - one.first;
        if (at > i && (all.end - all.first) * (at - i + 1) > 2 * total)
            break;
        *keys = all;
    }
    return at;
}

/* mask[i][j] = 0 where query `first + i` sees key `key + j`, else -inf. False when none sees any. */
VLAI_CLONES static bool L(attention_mask)(const L(attention_job) *job, int64_t first, int64_t n, int64_t key, int64_t width,
                                          real *mask)
{
    int32_t lo[VLAI_ATTENTION_KEYS], hi[VLAI_ATTENTION_KEYS], hole_lo[VLAI_ATTENTION_KEYS], hole_hi[VLAI_ATTENTION_KEYS];
    for (int64_t j = 0; j < width; j++) {
        const int32_t *cols = job->cols + 4 * (key + j);
        lo[j] = cols[0];
        hi[j] = cols[1];
        hole_lo[j] = cols[2];
        hole_hi[j] = cols[3];
    }
    int32_t any = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t q = job->qpos[first + i];
        vlai_span span = L(key_span)(job, first + i);
        int32_t from = (int32_t)(span.first - key < 0 ? 0 : span.first - key < width ? span.first - key : width);
        int32_t to = (int32_t)(span.end - key < 0 ? 0 : span.end - key < width ? span.end - key : width);
        real *row = mask + i * VLAI_ATTENTION_KEYS;
        for (int32_t j = 0; j < (int32_t)width; j++) {
            int32_t seen = (q >= lo[j]) & (q < hi[j]) & !((q >= hole_lo[j]) & (q < hole_hi[j])) & (j >= from) & (j < to);
            any |= seen;
            row[j] = seen ? 0 : (real)-INFINITY;
        }
    }
    return any;
}

/* out [m, n] = factor op(a) op(b) + keep out, of row strides la, lb, lo. */
static inline void L(block_gemm)(bool ta, bool tb, int64_t m, int64_t n, int64_t k, real factor, const real *a, int64_t la,
                                 const real *b, int64_t lb, real keep, real *out, int64_t lo)
{
    GEMM(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, (blasint)m, (blasint)n, (blasint)k,
         factor, a, (blasint)la, b, (blasint)lb, keep, out, (blasint)lo);
}

/* One row of a block: s += mask, then s = exp(s - top), where top = max(*top, largest s). Returns the sum, and writes the
 * new top; -inf when nothing is visible so far, and then the row is 0. */
VLAI_CLONES static real L(softmax_row)(real *s, const real *mask, int64_t width, real *top)
{
    real lane[8], best = *top;
    for (int l = 0; l < 8; l++)
        lane[l] = *top;
    int64_t j = 0;
    for (; j + 8 <= width; j += 8)
        for (int l = 0; l < 8; l++) {
            s[j + l] += mask[j + l];
            lane[l] = s[j + l] > lane[l] ? s[j + l] : lane[l];
        }
    for (; j < width; j++) {
        s[j] += mask[j];
        best = s[j] > best ? s[j] : best;
    }
    for (int l = 0; l < 8; l++)
        best = lane[l] > best ? lane[l] : best;
    *top = best;
    if (best == (real)-INFINITY) {
        memset(s, 0, (size_t)width * sizeof(real));
        return 0;
    }
    for (j = 0; j < width; j++)
        s[j] = EXP(s[j] - best);
    real sum;
    VLAI_SUM_AS(real, sum, width, s[i]);
    return sum;
}

/* Queries first..first+n-1, which may see `keys`, of one head. Scratch: mask, scores [queries block, keys block], and the
 * running output [queries block, dim]. */
static void L(attention_group)(const L(attention_job) *job, int64_t first, int64_t n, vlai_span keys, int head, real *scratch)
{
    enum { QUERIES = VLAI_ATTENTION_QUERIES, KEYS = VLAI_ATTENTION_KEYS };
    const vlai_cpu_call *call = job->call;
    int64_t dim = job->dim, q_stride = job->q_stride, kv_stride = job->kv_stride, kv = head / job->group * dim;
    const real *q = job->q + first * q_stride + head * dim, *k = job->k + kv, *v = job->v + kv;
    real *mask = scratch, *s = mask + QUERIES * KEYS, *acc = s + QUERIES * KEYS;
    real top[QUERIES], sum[QUERIES];
    bool begun = false;
    for (int64_t i = 0; i < n; i++) {
        top[i] = (real)-INFINITY;
        sum[i] = 0;
    }
    for (int64_t key = keys.first; key < keys.end; key += KEYS) {
        int64_t width = keys.end - key < KEYS ? keys.end - key : KEYS;
        if (!L(attention_mask)(job, first, n, key, width, mask))
            continue;
        L(block_gemm)(false, true, n, width, dim, job->scale, q, q_stride, k + key * kv_stride, kv_stride, 0, s, KEYS);
        for (int64_t i = 0; i < n; i++) {
            real before = top[i], added = L(softmax_row)(s + i * KEYS, mask + i * KEYS, width, &top[i]);
            real shrink = before == top[i] ? 1 : EXP(before - top[i]);
            sum[i] = sum[i] * shrink + added;
            if (begun && shrink != 1)
                for (int64_t c = 0; c < dim; c++)
                    acc[i * dim + c] *= shrink;
        }
        L(block_gemm)(false, false, n, dim, width, 1, s, KEYS, v + key * kv_stride, kv_stride, begun, acc, dim);
        begun = true;
    }
    for (int64_t i = 0; i < n; i++) {
        bool sees = begun && sum[i] > 0;
        real *o = L(stream_row)(job, job->o, first + i);
        for (int64_t c = 0; o && c < dim; c++)
            o[head * dim + c] = sees ? acc[i * dim + c] / sum[i] : 0;
        if (call->out[1].data)
            ((real *)call->out[1].data)[(first + i) * job->heads + head] = sees ? top[i] + log(sum[i]) : (real)-INFINITY;
    }
}

static void L(attention_tile)(void *context, int64_t tile, int thread)
{
    const L(attention_job) *job = context;
    int head = (int)(tile % job->heads);
    vlai_span span = vlai_span_of(tile / job->heads, VLAI_ATTENTION_QUERIES, job->queries);
    for (int64_t i = span.first, next; i < span.end; i = next) {
        vlai_span keys;
        next = L(group_end)(job, i, span.end, &keys);
        L(attention_group)(job, i, next - i, keys, head, vlai_thread_scratch(job->call, thread));
    }
}

static void L(attend)(L(attention_job) *job)
{
    const vlai_cpu_tensor *out = job->call->out;
    job->o[0] = &out[0];
    job->o[1] = &out[2];
    if (!out[0].data && !out[1].data && !(job->map && out[2].data))
        return;
    vlai_blas_single_threaded();
    vlai_pool_run(job->call->pool, vlai_tiles(job->queries, VLAI_ATTENTION_QUERIES) * job->heads, L(attention_tile), job);
}

void FN(attention)(const vlai_cpu_call *call)
{
    L(attention_job) job = L(attention_job_of)(call, 0, 3, false);
    L(attend)(&job);
}

void FN(attention_qkv)(const vlai_cpu_call *call)
{
    L(attention_job) job = L(attention_job_of)(call, 0, 1, true);
    job.map = call->in[5].data;
    L(attend)(&job);
}

/* p = exp(s + mask - lse); ds = p (dp - delta), written over dp. */
VLAI_CLONES static void L(attention_grad_row)(real *s, const real *mask, real *dp, int64_t width, real lse, real delta)
{
    if (lse == (real)-INFINITY) {
        memset(s, 0, (size_t)width * sizeof(real));
        memset(dp, 0, (size_t)width * sizeof(real));
        return;
    }
    for (int64_t j = 0; j < width; j++) {
        s[j] = EXP(s[j] + mask[j] - lse);
        dp[j] = s[j] * (dp[j] - delta);
    }
}

VLAI_CLONES static real L(dot)(const real *a, const real *b, int64_t n)
{
    real sum;
    VLAI_SUM_AS(real, sum, n, a[i] * b[i]);
    return sum;
}

/* Scratch: mask, scores and their gradients [queries block, keys block], and do [queries block, dim]. */
static void L(attention_grad_group)(const L(attention_job) *job, int64_t first, int64_t n, vlai_span keys, int head,
                                    real *scratch)
{
    enum { QUERIES = VLAI_ATTENTION_QUERIES, KEYS = VLAI_ATTENTION_KEYS };
    int64_t dim = job->dim, q_stride = job->q_stride, kv_stride = job->kv_stride, kv = head / job->group * dim;
    int64_t at = first * q_stride + head * dim;
    const real *q = job->q + at, *k = job->k + kv, *v = job->v + kv, *lse = job->lse + first * job->heads + head;
    real *dq = job->dq, *dk = job->dk, *dv = job->dv;
    real *mask = scratch, *s = mask + QUERIES * KEYS, *dp = s + QUERIES * KEYS, *dy = dp + QUERIES * KEYS;
    real delta[QUERIES];
    for (int64_t i = 0; i < n; i++) {
        const real *mine = L(stream_row)(job, job->dy, first + i), *o = L(stream_row)(job, job->o, first + i);
        for (int64_t c = 0; c < dim; c++)
            dy[i * dim + c] = mine ? mine[head * dim + c] : 0;
        delta[i] = o ? L(dot)(dy + i * dim, o + head * dim, dim) : 0;
        if (dq)
            memset(dq + at + i * q_stride, 0, (size_t)dim * sizeof(real));
    }
    for (int64_t key = keys.first; key < keys.end; key += KEYS) {
        int64_t width = keys.end - key < KEYS ? keys.end - key : KEYS, kv_at = key * kv_stride;
        if (!L(attention_mask)(job, first, n, key, width, mask))
            continue;
        L(block_gemm)(false, true, n, width, dim, job->scale, q, q_stride, k + kv_at, kv_stride, 0, s, KEYS);
        L(block_gemm)(false, true, n, width, dim, 1, dy, dim, v + kv_at, kv_stride, 0, dp, KEYS);
        for (int64_t i = 0; i < n; i++)
            L(attention_grad_row)(s + i * KEYS, mask + i * KEYS, dp + i * KEYS, width, lse[i * job->heads], delta[i]);
        if (dq)
            L(block_gemm)(false, false, n, dim, width, job->scale, dp, KEYS, k + kv_at, kv_stride, 1, dq + at, q_stride);
        if (dk)
            L(block_gemm)(true, false, width, dim, n, job->scale, dp, KEYS, q, q_stride, 1, dk + kv + kv_at, kv_stride);
        if (dv)
            L(block_gemm)(true, false, width, dim, n, 1, s, KEYS, dy, dim, 1, dv + kv + kv_at, kv_stride);
    }
}

static void L(attention_grad_tile)(void *context, int64_t tile, int thread)
{
    const L(attention_job) *job = context;
    const int32_t *component = job->component + 2 * (tile / job->kv_heads);
    int kv_head = (int)(tile % job->kv_heads);
    for (int result = 0; result < 2; result++) {
        real *dkv = result ? job->dv : job->dk;
        for (int64_t key = component[1]; dkv && key < component[3]; key++)
            memset(dkv + key * job->kv_stride + (int64_t)kv_head * job->dim, 0, (size_t)job->dim * sizeof(real));
    }
    for (int64_t i = component[0], next; i < component[2]; i = next) {
        int64_t end = component[2] - i < VLAI_ATTENTION_QUERIES ? component[2] : i + VLAI_ATTENTION_QUERIES;
        vlai_span keys;
        next = L(group_end)(job, i, end, &keys);
        for (int head = kv_head * job->group; head < (kv_head + 1) * job->group; head++)
            L(attention_grad_group)(job, i, next - i, keys, head, vlai_thread_scratch(job->call, thread));
    }
}

/* Cuts queries and keys between i - 1 and i where no earlier query may see a key that i or a later one may see. Writes
 * pairs (first query, first key); returns how many, not counting the closing pair. `least` [queries + 1]: scratch. */
static int64_t L(find_components)(const L(attention_job) *job, int32_t *component, int32_t *least)
{
    int64_t n = 0, reached = 0;
    least[job->queries] = (int32_t)job->keys;
    for (int64_t i = job->queries; i-- > 0;) {
        vlai_span span = L(key_span)(job, i);
        least[i] = span.end > span.first && span.first < least[i + 1] ? (int32_t)span.first : least[i + 1];
    }
    for (int64_t i = 0; i < job->queries; i++) {
        if (i == 0 || reached <= least[i]) {
            component[2 * n] = (int32_t)i;
            component[2 * n + 1] = i == 0 ? 0 : least[i];
            n++;
        }
        vlai_span span = L(key_span)(job, i);
        if (span.end > span.first && span.end > reached)
            reached = span.end;
    }
    if (n == 0) {
        component[0] = component[1] = 0;
        n = 1;
    }
    component[2 * n] = (int32_t)job->queries;
    component[2 * n + 1] = (int32_t)job->keys;
    return n;
}

/* Workspace: 3 queries + 6 int32. */
static void L(attend_backward)(L(attention_job) *job)
{
    vlai_blas_single_threaded();
    int32_t *component = job->call->workspace;
    int64_t n = L(find_components)(job, component, component + 2 * (job->queries + 2));
    job->component = component;
    vlai_pool_run(job->call->pool, n * job->kv_heads, L(attention_grad_tile), job);
}

void FN(attention_grad)(const vlai_cpu_call *call)
{
    L(attention_job) job = L(attention_job_of)(call, 1, 6, false);
    job.dy[0] = &call->in[0];
    job.o[0] = &call->in[4];
    job.lse = call->in[5].data;
    job.dq = call->out[0].data;
    job.dk = call->out[1].data;
    job.dv = call->out[2].data;
    L(attend_backward)(&job);
}

void FN(attention_qkv_grad)(const vlai_cpu_call *call)
{
    L(attention_job) job = L(attention_job_of)(call, 1, 4, true);
    job.map = call->in[8].data;
    job.dy[0] = &call->in[0];
    job.dy[1] = &call->in[9];
    job.o[0] = &call->in[2];
    job.o[1] = &call->in[10];
    job.lse = call->in[3].data;
    job.dq = call->out[0].data;
    if (!job.dq)
        return;
    job.dk = job.dq + (int64_t)job.heads * job.dim;
    job.dv = job.dk + (int64_t)job.kv_heads * job.dim;
    L(attend_backward)(&job);
}
