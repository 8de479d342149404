/* Kernels that move whole rows, columns or elements, and the ordered sum of rows by index. An index outside its table
 * counts as negative, so that a bad index never touches foreign memory.
 *
 *     gather_rows       x [R,C], index [N]          -> y[i] = x[index[i]], or 0
 *     put_rows          base [R,C], index, rows     -> base with rows over it; of equal indices the last stays
 *     zero_rows         x [R,C], index              -> x with those rows 0
 *     merge_rows        a, b, map                   -> y[i] = map[i] >= 0 ? a[map[i]] : b[-1 - map[i]]
 *     split_cols, concat_cols, slice_rows, pad_rows, concat_rows, expand_rows: copies of parts
 *     mul_rows          x [N,C], s [N]              -> x[i][j] s[i];   expand_cols s [N] -> [N,C]
 *     scatter_add_rows  x [N,C], index [N]          -> y [R,C]: sums in the order of the rows, in fp32, rounded once
 *
 * Copies go in the widest word (16 to 1 bytes) that divides a row and its addresses, four words in flight per thread: rows
 * read once, written once; expected 0.9 of copy bandwidth.
 *
 * scatter_add_rows needs the rows of each index in order: the place of a row is the number of rows whose (index, row) is less,
 * counted by comparing all with all, N^2 comparisons (5 us for 6784 rows). Then each element of the result is written once: the
 * sum of the rows of its index, from the place where they begin, or zero. R C elements, and N C. With R >= 4 N further
 * blocks clear the result while those rank, and then it is written where there is something: 151 us on an H200 for 2548 rows into
 * [151936,2048]; cleared first 162, written once 180. */
#include "kernels/common.cuh"

namespace {

enum { MOVE_UNROLL = 4, PIECES = 4 };

/* Calls f with a word type whose size divides every one of the bytes and addresses. */
template <class F> int with_word(size_t bits, F f)
{
    switch (bits & -bits) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    case 8: return f(uint2{});
    default: return f(uint4{});
    }
}

/* y row r = from(r), or zeros where that is NULL. */
template <class W, class FROM>
__global__ void __launch_bounds__(THREADS) move_rows_kernel(FROM from, W *y, int64_t total, int64_t words)
{
    int64_t first = (int64_t)blockIdx.x * (MOVE_UNROLL * THREADS) + threadIdx.x;
    W word[MOVE_UNROLL];
#pragma unroll
    for (int k = 0; k < MOVE_UNROLL; k++) {
        int64_t i = first + k * THREADS;
        word[k] = W{};
        if (i < total) {
            int64_t row = divide(i, words);
            const char *p = from(row);
            if (p)
                word[k] = reinterpret_cast<const W *>(p)[i - row * words];
        }
    }
#pragma unroll
    for (int k = 0; k < MOVE_UNROLL; k++)
        if (first + k * THREADS < total)
            y[first + k * THREADS] = word[k];
}

/* y [rows] of `bytes` each; `bits` holds, or-ed, whatever else must divide: addresses of the sources. */
template <class FROM>
int move_rows(const vlai_cuda_call *call, void *y, int64_t rows, int64_t bytes, size_t bits, FROM from)
{
    if (!y || rows <= 0 || bytes <= 0)
        return 0;
    return with_word(bits | (size_t)y | (size_t)bytes | 16, [&](auto w) {
        using W = decltype(w);
        int64_t words = bytes / (int64_t)sizeof(W), total = rows * words;
        move_rows_kernel<W><<<blocks_for(total, MOVE_UNROLL * THREADS), THREADS, 0, stream_of(call)>>>(from, (W *)y, total, words);
        return launched();
    });
}

struct from_index { /* x[index[r]] */
    const char *x;
    const int32_t *index;
    int64_t table, bytes;
    __device__ const char *operator()(int64_t row) const
    {
        int64_t i = index[row];
        return i >= 0 && i < table ? x + i * bytes : nullptr;
    }
};

struct from_owner { /* rows[owner[r]] where there is one, else base; no rows: zeros */
    const char *base, *rows;
    const int32_t *owner;
    int64_t bytes;
    __device__ const char *operator()(int64_t row) const
    {
        int64_t i = owner[row];
        return i < 0 ? base + row * bytes : rows ? rows + i * bytes : nullptr;
    }
};

struct from_map {
    const char *a, *b;
    const int32_t *map;
    int64_t rows_a, rows_b, bytes;
    __device__ const char *operator()(int64_t row) const
    {
        int64_t i = map[row], j = -1 - i;
        return i >= 0 ? (i < rows_a ? a + i * bytes : nullptr) : j < rows_b ? b + j * bytes : nullptr;
    }
};

struct from_same { /* one row for all */
    const char *x;
    __device__ const char *operator()(int64_t) const { return x; }
};

/* owner[index[i]] = the last such i. */
__global__ void owner_kernel(const int32_t *index, int32_t *owner, int64_t n, int64_t rows)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && index[i] >= 0 && index[i] < rows)
        atomicMax(owner + index[i], (int32_t)i);
}

int put(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &base = call->in[0], &index = call->in[1], &rows = call->in[2], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    bool puts = call->node->op == VLAI_OP_put_rows;
    if (base.dtype != y.dtype || (puts && rows.dtype != y.dtype))
        return (int)cudaErrorInvalidValue;
    int32_t *owner = (int32_t *)call->workspace;
    int64_t n = index.elements, r = rows_of(y), bytes = cols_of(y) * (int64_t)vla_dtype_size(y.dtype);
    cudaError_t status = cudaMemsetAsync(owner, 0xFF, (size_t)r * sizeof *owner, stream_of(call));
    if (status != cudaSuccess)
        return (int)status;
    if (n)
        owner_kernel<<<blocks_for(n, THREADS), THREADS, 0, stream_of(call)>>>((const int32_t *)index.data, owner, n, r);
    from_owner from = {(const char *)base.data, puts ? (const char *)rows.data : nullptr, owner, bytes};
    return move_rows(call, y.data, r, bytes, (size_t)base.data | (puts ? (size_t)rows.data : 0), from);
}

/* The pieces of a row of `words`, side by side. */
template <class W> struct pieces {
    W *p[PIECES];
    int64_t first[PIECES + 1];
    int n;
};

template <class W, bool SPLIT>
__global__ void __launch_bounds__(THREADS) columns_kernel(__grid_constant__ const pieces<W> parts, W *whole, int64_t total, int64_t words)
{
    int64_t first = (int64_t)blockIdx.x * (MOVE_UNROLL * THREADS) + threadIdx.x;
    W word[MOVE_UNROLL];
    W *to[MOVE_UNROLL];
#pragma unroll
    for (int k = 0; k < MOVE_UNROLL; k++) {
        int64_t i = first + k * THREADS;
        to[k] = nullptr;
        if (i >= total)
            continue;
        int64_t row = divide(i, words), col = i - row * words, begin = 0, width = parts.first[1];
        W *part = parts.p[0];
#pragma unroll
        for (int j = 1; j < PIECES; j++)
            if (j < parts.n && col >= parts.first[j]) {
                part = parts.p[j];
                begin = parts.first[j];
                width = parts.first[j + 1] - begin;
            }
        if (!part)
            continue;
        W *piece = part + row * width + (col - begin);
        word[k] = SPLIT ? whole[i] : *piece;
        to[k] = SPLIT ? piece : whole + i;
    }
#pragma unroll
    for (int k = 0; k < MOVE_UNROLL; k++)
        if (to[k])
            *to[k] = word[k];
}

template <bool SPLIT>
int columns(const vlai_cuda_call *call, const vlai_cuda_tensor &whole, const vlai_cuda_tensor *part, int n)
{
    if (!whole.data || !whole.elements)
        return 0;
    int64_t size = (int64_t)vla_dtype_size(whole.dtype), rows = rows_of(whole), bytes = cols_of(whole) * size;
    size_t bits = (size_t)whole.data | (size_t)bytes | 16;
    for (int k = 0; k < n; k++) {
        if (part[k].data && part[k].dtype != whole.dtype)
            return (int)cudaErrorInvalidValue;
        bits |= (size_t)part[k].data | (size_t)(cols_of(part[k]) * size);
    }
    return with_word(bits, [&](auto w) {
        using W = decltype(w);
        pieces<W> parts = {};
        parts.n = n;
        for (int k = 0; k < n; k++) {
            parts.p[k] = (W *)part[k].data;
            parts.first[k + 1] = parts.first[k] + cols_of(part[k]) * size / (int64_t)sizeof(W);
        }
        int64_t words = bytes / (int64_t)sizeof(W), total = rows * words;
        columns_kernel<W, SPLIT><<<blocks_for(total, MOVE_UNROLL * THREADS), THREADS, 0, stream_of(call)>>>(parts, (W *)whole.data, total, words);
        return launched();
    });
}

int copy_bytes(const vlai_cuda_call *call, void *to, const void *from, int64_t bytes)
{
    if (bytes <= 0 || to == from)
        return 0;
    return (int)(from ? cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, stream_of(call))
                      : cudaMemsetAsync(to, 0, (size_t)bytes, stream_of(call)));
}

/* y[i][j] = x[i][j] s[i], or s[i] alone. Packs of V columns; per_row of them in a row. */
template <class X, class S, class Y, int V>
__global__ void __launch_bounds__(THREADS) scale_rows_kernel(const X *x, const S *s, Y *y, int64_t packs, int64_t per_row)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs)
        return;
    float v[V], factor = to_float(s[divide(i, per_row)]);
    if (x) {
        pack<X, V> p;
        p.load(x + i * V);
        p.get(v);
    }
#pragma unroll
    for (int k = 0; k < V; k++)
        v[k] = x ? v[k] * factor : factor;
    pack<Y, V> p;
    p.set(v);
    p.store(y + i * V);
}

int scale_rows(const vlai_cuda_call *call, const vlai_cuda_tensor *x, const vlai_cuda_tensor &s)
{
    const vlai_cuda_tensor &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    int64_t cols = cols_of(y);
    bool vector = cols % 8 == 0 && aligned(y.data) && (!x || aligned(x->data));
    return with_types(x ? x->dtype : y.dtype, s.dtype, y.dtype, [&](auto tx, auto ts, auto ty) {
        using X = typename decltype(tx)::is;
        using S = typename decltype(ts)::is;
        using Y = typename decltype(ty)::is;
        auto launch = [&](auto v) {
            constexpr int V = decltype(v)::value;
            int64_t packs = y.elements / V;
            scale_rows_kernel<X, S, Y, V><<<blocks_for(packs, THREADS), THREADS, 0, stream_of(call)>>>(
                x ? (const X *)x->data : nullptr, (const S *)s.data, (Y *)y.data, packs, cols / V);
            return launched();
        };
        return vector ? launch(std::integral_constant<int, 8>{}) : launch(std::integral_constant<int, 1>{});
    });
}

/* What scatter_add_rows keeps in the workspace: rows and their indices, sorted by index and then by row; and of each row of the
 * result the place where its rows begin, or a number past all places. */
struct scatter_space {
    int32_t *key, *row, *begin;
};

size_t scatter_bytes(int64_t n, int64_t rows)
{
    return 2 * round_256((size_t)n * sizeof(int32_t)) + round_256((size_t)rows * sizeof(int32_t));
}

scatter_space scatter_of(void *workspace, int64_t n)
{
    size_t each = round_256((size_t)n * sizeof(int32_t));
    char *p = (char *)workspace;
    return {(int32_t *)p, (int32_t *)(p + each), (int32_t *)(p + 2 * each)};
}

/* Rows that are dropped sort to the end, as index `rows`. */
__device__ inline int32_t key_of(int32_t index, int32_t rows, int64_t skip)
{
    return index < 0 || index >= rows || index == skip ? rows : index;
}

enum { FEW = 4 /* rows of the result for each of x: most stay zero */, RANKED = 32, PARTS = THREADS / RANKED, RANK_TILE = 4096, RANK_LOADS = RANK_TILE / THREADS };
enum { CLEARED = 8 /* words */ };

/* How many of the keys [begin, end), multiples of 4, are less than `key`. */
__device__ inline int32_t count_less(const int32_t *keys, int32_t begin, int32_t end, int32_t key)
{
    int32_t less = 0;
#pragma unroll 4
    for (int32_t i = begin; i < end; i += 4) {
        int4 k = *(const int4 *)(keys + i);
        less += (k.x < key) + (k.y < key) + (k.z < key) + (k.w < key);
    }
    return less;
}

/* The place of each row is the number of rows that come before it: a block counts for 32 rows, a warp over an eighth of the others:
 * those before the block's rows count if their index is not greater, those behind them if it is less. Blocks from `ranking` on clear
 * y meanwhile, CLEARED words a thread. */
__global__ void __launch_bounds__(THREADS)
    rank_kernel(const int32_t *index, scatter_space to, int32_t n, int32_t rows, int64_t skip, uint32_t ranking, uint4 *y, int64_t words)
{
    if (blockIdx.x >= ranking) {
        int64_t word = (int64_t)(blockIdx.x - ranking) * (CLEARED * THREADS) + threadIdx.x;
#pragma unroll
        for (int k = 0; k < CLEARED; k++, word += THREADS)
            if (word < words)
                y[word] = make_uint4(0, 0, 0, 0);
        return;
    }
    __shared__ __align__(16) int32_t keys[RANK_TILE];
    __shared__ int32_t before[PARTS][RANKED];
    int32_t lane = threadIdx.x % RANKED, part = threadIdx.x / RANKED, base = (int32_t)(blockIdx.x * RANKED), mine = base + lane;
    int32_t key = mine < n ? key_of(index[mine], rows, skip) : rows, place = 0;
    for (int32_t first = 0; first < n; first += RANK_TILE) {
        int32_t tile[RANK_LOADS];
#pragma unroll
        for (int k = 0; k < RANK_LOADS; k++) { /* all under way at once; past the last a key that is greater than any */
            int32_t i = first + k * THREADS + (int32_t)threadIdx.x;
            tile[k] = i < n ? key_of(index[i], rows, skip) : INT32_MAX;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < RANK_LOADS; k++)
            keys[k * THREADS + threadIdx.x] = tile[k];
        __syncthreads();
        int32_t count = n - first < RANK_TILE ? n - first : (int32_t)RANK_TILE, each = (count + 4 * PARTS - 1) / (4 * PARTS) * 4;
        int32_t begin = part * each, end = begin + each; /* at most RANK_TILE: 4 PARTS divides it */
        int32_t low = base - first < begin ? begin : base - first < end ? base - first : end;
        int32_t high = base + RANKED - first < begin ? begin : base + RANKED - first < end ? base + RANKED - first : end;
        place += count_less(keys, begin, low, key + 1);
        for (int32_t i = low; i < high; i++)
            place += keys[i] < key + (first + i < mine);
        place += count_less(keys, high, end, key);
    }
    before[part][lane] = place;
    __syncthreads();
    if (part || mine >= n)
        return;
    place = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        place += before[p][lane];
    to.key[place] = key;
    to.row[place] = mine;
    if (to.begin && key < rows)
        atomicMin(to.begin + key, place);
}

/* sum += the rows of x whose index is `key`, from place p on, AHEAD of them on their way at once: V columns from `col`. */
template <int AHEAD, class X, int V>
__device__ inline void add_places(const X *x, scatter_space from, int32_t p, int32_t n, int32_t key, int64_t cols, int32_t col, float (&sum)[V])
{
    for (bool more = true; more; p += AHEAD) {
        pack<X, V> part[AHEAD];
        bool there[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            there[k] = p + k < n && from.key[p + k] == key;
            if (there[k])
                part[k].load(x + from.row[p + k] * cols + col);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (there[k]) {
                float v[V];
                part[k].get(v);
#pragma unroll
                for (int c = 0; c < V; c++)
                    sum[c] += v[c];
            }
        more = there[AHEAD - 1];
    }
}

/* Into a result of zeros, of which few rows get any: a block for each place where an index begins. */
template <class X, class Y, int V>
__global__ void __launch_bounds__(THREADS) scatter_few_kernel(const X *x, scatter_space from, Y *y, int32_t n, int32_t rows, int64_t cols)
{
    int32_t p = (int32_t)blockIdx.x, key = from.key[p];
    if (key >= rows || (p && from.key[p - 1] == key))
        return;
    for (int32_t col = (int32_t)threadIdx.x * V; col < cols; col += THREADS * V) {
        float sum[V] = {0};
        add_places<8>(x, from, p, n, key, cols, col, sum);
        pack<Y, V> result;
        result.set(sum);
        result.store(y + key * cols + col);
    }
}

/* A thread takes V neighbouring columns of a few rows of the result. Most have no row or one: the first of each is on its way
 * before any is used. Packs of a row: per_row. */
template <class X, class Y, int V>
__global__ void __launch_bounds__(THREADS) scatter_kernel(const X *x, scatter_space from, Y *y, int32_t n, int64_t packs, int64_t per_row)
{
    int64_t first = (int64_t)blockIdx.x * (MOVE_UNROLL * THREADS) + threadIdx.x;
    int32_t row[MOVE_UNROLL], col[MOVE_UNROLL], begin[MOVE_UNROLL];
    pack<X, V> one[MOVE_UNROLL];
    bool more[MOVE_UNROLL];
#pragma unroll
    for (int u = 0; u < MOVE_UNROLL; u++) {
        int64_t i = first + u * THREADS;
        row[u] = (int32_t)divide(i, per_row);
        col[u] = (int32_t)(i - row[u] * per_row) * V;
        begin[u] = i < packs ? from.begin[row[u]] : n;
    }
#pragma unroll
    for (int u = 0; u < MOVE_UNROLL; u++) {
        more[u] = begin[u] < n - 1 && from.key[begin[u] + 1] == row[u];
        if (begin[u] < n)
            one[u].load(x + from.row[begin[u]] * (per_row * V) + col[u]);
    }
#pragma unroll
    for (int u = 0; u < MOVE_UNROLL; u++) {
        float sum[V] = {0};
        if (first + u * THREADS >= packs)
            return;
        if (begin[u] < n) {
            float v[V];
            one[u].get(v);
#pragma unroll
            for (int c = 0; c < V; c++)
                sum[c] += v[c];
        }
        if (more[u])
            add_places<4>(x, from, begin[u] + 1, n, row[u], per_row * V, col[u], sum);
        pack<Y, V> result;
        result.set(sum);
        result.store(y + (first + u * THREADS) * V);
    }
}

} // namespace

NO_WORKSPACE(gather_rows)
NO_WORKSPACE(merge_rows)
NO_WORKSPACE(split_cols)
NO_WORKSPACE(concat_cols)
NO_WORKSPACE(slice_rows)
NO_WORKSPACE(pad_rows)
NO_WORKSPACE(concat_rows)
NO_WORKSPACE(mul_rows)
NO_WORKSPACE(expand_cols)
NO_WORKSPACE(expand_rows)

extern "C" int vlai_cuda_gather_rows(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &index = call->in[1], &y = call->out[0];
    if (x.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    int64_t bytes = cols_of(y) * (int64_t)vla_dtype_size(y.dtype);
    from_index from = {(const char *)x.data, (const int32_t *)index.data, rows_of(x), bytes};
    return move_rows(call, y.data, rows_of(y), bytes, (size_t)x.data, from);
}

extern "C" size_t vlai_cuda_workspace_put_rows(const vla_graph *g, const vlai_node *node)
{
    return round_256((size_t)operand_of(g, node, 0).shape[0] * sizeof(int32_t));
}

extern "C" size_t vlai_cuda_workspace_zero_rows(const vla_graph *g, const vlai_node *node)
{
    return vlai_cuda_workspace_put_rows(g, node);
}

extern "C" int vlai_cuda_put_rows(const vlai_cuda_call *call)
{
    return put(call);
}

extern "C" int vlai_cuda_zero_rows(const vlai_cuda_call *call)
{
    return put(call);
}

extern "C" int vlai_cuda_merge_rows(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &a = call->in[0], &b = call->in[1], &map = call->in[2], &y = call->out[0];
    if (a.dtype != y.dtype || b.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    int64_t bytes = cols_of(y) * (int64_t)vla_dtype_size(y.dtype);
    from_map from = {(const char *)a.data, (const char *)b.data, (const int32_t *)map.data, rows_of(a), rows_of(b), bytes};
    return move_rows(call, y.data, rows_of(y), bytes, (size_t)a.data | (size_t)b.data, from);
}

extern "C" int vlai_cuda_split_cols(const vlai_cuda_call *call)
{
    vlai_cuda_tensor part[PIECES];
    int n = call->node->attrs.split.n;
    for (int k = 0; k < n; k++) {
        part[k] = call->out[k];
        part[k].rank = 2; /* the width counts also where the result is unread */
        part[k].shape[1] = call->node->attrs.split.widths[k];
    }
    return columns<true>(call, call->in[0], part, n);
}

extern "C" int vlai_cuda_concat_cols(const vlai_cuda_call *call)
{
    return columns<false>(call, call->out[0], call->in, call->node->n_inputs);
}

extern "C" int vlai_cuda_slice_rows(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    if (x.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    int64_t size = (int64_t)vla_dtype_size(y.dtype);
    return copy_bytes(call, y.data, (const char *)x.data + call->node->attrs.slice.first * cols_of(x) * size, y.elements * size);
}

extern "C" int vlai_cuda_pad_rows(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    if (x.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    int64_t size = (int64_t)vla_dtype_size(y.dtype), first = call->node->attrs.slice.first * cols_of(x) * size;
    int64_t bytes = x.elements * size;
    char *to = (char *)y.data;
    int status = copy_bytes(call, to, nullptr, first);
    if (!status)
        status = copy_bytes(call, to + first, x.data, bytes);
    return status ? status : copy_bytes(call, to + first + bytes, nullptr, y.elements * size - first - bytes);
}

extern "C" int vlai_cuda_concat_rows(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &a = call->in[0], &b = call->in[1], &y = call->out[0];
    if (!y.data)
        return 0;
    if (a.dtype != y.dtype || b.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    int64_t size = (int64_t)vla_dtype_size(y.dtype);
    int status = copy_bytes(call, y.data, a.data, a.elements * size);
    return status ? status : copy_bytes(call, (char *)y.data + a.elements * size, b.data, b.elements * size);
}

extern "C" int vlai_cuda_expand_rows(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &y = call->out[0];
    if (x.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    return move_rows(call, y.data, rows_of(y), cols_of(y) * (int64_t)vla_dtype_size(y.dtype), (size_t)x.data,
                     from_same{(const char *)x.data});
}

extern "C" int vlai_cuda_mul_rows(const vlai_cuda_call *call)
{
    return scale_rows(call, &call->in[0], call->in[1]);
}

extern "C" int vlai_cuda_expand_cols(const vlai_cuda_call *call)
{
    return scale_rows(call, nullptr, call->in[0]);
}

extern "C" size_t vlai_cuda_workspace_scatter_add_rows(const vla_graph *g, const vlai_node *node)
{
    return scatter_bytes(operand_of(g, node, 0).shape[0], node->attrs.rows.rows);
}

extern "C" int vlai_cuda_scatter_add_rows(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &index = call->in[1], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    int64_t n = rows_of(x), rows = rows_of(y), cols = cols_of(y), skip = call->node->attrs.rows.skip;
    cudaStream_t stream = stream_of(call);
    if (n == 0)
        return copy_bytes(call, y.data, nullptr, y.elements * (int64_t)vla_dtype_size(y.dtype));
    if (n > INT32_MAX / 2 || rows > INT32_MAX - 1)
        return (int)cudaErrorInvalidValue;
    scatter_space space = scatter_of(call->workspace, n);
    int64_t bytes = y.elements * (int64_t)vla_dtype_size(y.dtype), words = bytes / (int64_t)sizeof(uint4);
    bool few = n * FEW <= rows && bytes % (int64_t)sizeof(uint4) == 0 && aligned(y.data);
    unsigned ranking = blocks_for(n, RANKED), clearing = few ? blocks_for(words, CLEARED * THREADS) : 0;
    if (few)
        space.begin = nullptr;
    else if (cudaError_t status = cudaMemsetAsync(space.begin, 0x7F, (size_t)rows * sizeof *space.begin, stream))
        return (int)status;
    rank_kernel<<<ranking + clearing, THREADS, 0, stream>>>((const int32_t *)index.data, space, (int32_t)n, (int32_t)rows, skip, ranking,
                                                            (uint4 *)y.data, words);
    bool vector = cols % 8 == 0 && aligned(x.data) && aligned(y.data);
    return with_types(x.dtype, y.dtype, [&](auto tx, auto ty) {
        using X = typename decltype(tx)::is;
        using Y = typename decltype(ty)::is;
        auto launch = [&](auto v) {
            constexpr int V = decltype(v)::value;
            int64_t packs = y.elements / V;
            if (few) {
                scatter_few_kernel<X, Y, V><<<(unsigned)n, THREADS, 0, stream>>>((const X *)x.data, space, (Y *)y.data, (int32_t)n, (int32_t)rows, cols);
                return launched();
            }
            scatter_kernel<X, Y, V><<<blocks_for(packs, MOVE_UNROLL * THREADS), THREADS, 0, stream>>>((const X *)x.data, space, (Y *)y.data, (int32_t)n,
                                                                                                      packs, cols / V);
            return launched();
        };
        return vector ? launch(std::integral_constant<int, 8>{}) : launch(std::integral_constant<int, 1>{});
    });
}
