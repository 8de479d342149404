/* Kernels that move rows, columns and elements. Nothing is computed but sums, so most must be exact. */
#include "kernel_test.h"

/* rows of x, columns, length of the index */
static const int64_t SHAPES[][3] = {{1, 1, 1}, {5, 3, 9}, {7, 130, 40}, {0, 4, 3}, {6, 4, 0}, {300, 65, 700}, {9, 1, 20}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };
static const double EXACT = 1e-30;

static tensor random_index(cases *c, int64_t n, int64_t below)
{
    tensor t = index_tensor(c, SHAPE1(n));
    for (int64_t i = 0; i < n; i++) /* from -2 to one past the end: both sides of what is valid */
        t.i[i] = (int32_t)random_below(c, below + 3) - 2;
    return t;
}

static bool valid(int64_t index, int64_t rows)
{
    return index >= 0 && index < rows;
}

static void test_indexed(void **state)
{
    (void)state;
    for (int s = 0; s < N_SHAPES; s++) {
        int64_t rows = SHAPES[s][0], cols = SHAPES[s][1], n = SHAPES[s][2];
        cases c = {.state = (uint64_t)s};
        tensor x = random_tensor(&c, SHAPE2(rows, cols)), index = random_index(&c, n, rows), z = random_tensor(&c, SHAPE2(n, cols));
        tensor gathered = result_tensor(&c, SHAPE2(n, cols)), added = result_tensor(&c, SHAPE2(rows, cols));
        tensor skipped = result_tensor(&c, SHAPE2(rows, cols)), put = result_tensor(&c, SHAPE2(rows, cols));
        tensor zeroed = result_tensor(&c, SHAPE2(rows, cols));
        memcpy(put.f, x.f, (size_t)x.n * sizeof(double));
        memcpy(zeroed.f, x.f, (size_t)x.n * sizeof(double));
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < cols && valid(index.i[i], rows); k++) {
                int64_t at = index.i[i] * cols + k;
                gathered.f[i * cols + k] = x.f[at];
                added.f[at] += z.f[i * cols + k];
                skipped.f[at] += index.i[i] == 2 ? 0 : z.f[i * cols + k];
                put.f[at] = z.f[i * cols + k];
                zeroed.f[at] = 0;
            }
        vlai_node node = {.op = VLAI_OP_gather_rows, .attrs.rows = {.rows = rows, .skip = -1}};
        tensor table[3] = {x, index, z}, lines[2] = {z, index};
        CHECK_KERNEL(gather_rows, &node, table, 2, &gathered, 1, EXACT);
        node.op = VLAI_OP_put_rows;
        CHECK_KERNEL(put_rows, &node, table, 3, &put, 1, EXACT);
        node.op = VLAI_OP_zero_rows;
        CHECK_KERNEL(zero_rows, &node, table, 2, &zeroed, 1, EXACT);
        node.op = VLAI_OP_scatter_add_rows;
        CHECK_KERNEL(scatter_add_rows, &node, lines, 2, &added, 1, 1e-6);
        node.attrs.rows.skip = 2;
        CHECK_KERNEL(scatter_add_rows, &node, lines, 2, &skipped, 1, 1e-6);
        vlai_arena_fini(&c.arena);
    }
}

/* Integer tables are gathered too: positions as a vector, key ranges as pairs. */
static void test_gather_integers(void **state)
{
    (void)state;
    int32_t table[6] = {10, 11, 20, 21, 30, 31}, index[4] = {2, 0, -1, 1};
    for (int64_t cols = 1; cols <= 2; cols++)
        for (int wide = 0; wide < 2; wide++) {
            int32_t got[9] = {0};
            got[4 * cols] = 77;
            vlai_node node = {.op = VLAI_OP_gather_rows, .attrs.rows.skip = -1};
            vlai_cpu_call call = {.node = &node,
                                  .in = {{table, VLA_I32, (int)cols, {3, cols}, 3 * cols}, {index, VLA_I32, 1, {4}, 4}},
                                  .out[0] = {got, VLA_I32, (int)cols, {4, cols}, 4 * cols}};
            (wide ? vlai_cpu_gather_rows_double : vlai_cpu_gather_rows_float)(&call);
            for (int64_t i = 0; i < 4; i++)
                for (int64_t k = 0; k < cols; k++)
                    assert_int_equal(got[i * cols + k], index[i] < 0 ? 0 : table[index[i] * cols + k]);
            assert_int_equal(got[4 * cols], 77);
        }
}

static void test_merge(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{1, 0, 1}, {3, 4, 5}, {0, 2, 3}, {300, 200, 130}}; /* rows a, rows b, cols */
    for (int s = 0; s < 4; s++) {
        int64_t na = shapes[s][0], nb = shapes[s][1], cols = shapes[s][2], ia = 0, ib = 0;
        cases c = {.state = (uint64_t)s};
        tensor in[5] = {random_tensor(&c, SHAPE2(na, cols)), random_tensor(&c, SHAPE2(nb, cols)),
                        index_tensor(&c, SHAPE1(na + nb)), index_tensor(&c, SHAPE1(na)), index_tensor(&c, SHAPE1(nb))};
        tensor y = result_tensor(&c, SHAPE2(na + nb, cols));
        for (int64_t i = 0; i < na + nb; i++) {
            bool from_a = ia < na && (ib == nb || random_below(&c, 2));
            in[2].i[i] = (int32_t)(from_a ? ia : -1 - ib);
            if (from_a)
                in[3].i[ia] = (int32_t)i;
            else
                in[4].i[ib] = (int32_t)i;
            memcpy(y.f + i * cols, from_a ? in[0].f + ia * cols : in[1].f + ib * cols, (size_t)cols * sizeof(double));
            ia += from_a;
            ib += !from_a;
        }
        vlai_node node = {.op = VLAI_OP_merge_rows};
        CHECK_KERNEL(merge_rows, &node, in, 5, &y, 1, EXACT);
        vlai_arena_fini(&c.arena);
    }
}

static void test_columns(void **state)
{
    (void)state;
    static const int64_t widths[4] = {3, 1, 130, 8}, heights[] = {1, 0, 5, 700};
    for (int h = 0; h < 4; h++)
        for (int n = 1; n <= 4; n++) {
            int64_t rows = heights[h], cols = 0, first = 0;
            cases c = {.state = (uint64_t)(h * 10 + n)};
            vlai_node node = {.op = VLAI_OP_split_cols, .attrs.split.n = n};
            for (int k = 0; k < n; k++)
                cols += node.attrs.split.widths[k] = widths[k];
            tensor whole = random_tensor(&c, SHAPE2(rows, cols)), part[4];
            for (int k = 0; k < n; first += widths[k], k++) {
                part[k] = result_tensor(&c, SHAPE2(rows, widths[k]));
                for (int64_t i = 0; i < part[k].n; i++)
                    part[k].f[i] = whole.f[i / widths[k] * cols + first + i % widths[k]];
            }
            CHECK_KERNEL(split_cols, &node, &whole, 1, part, n, EXACT);
            node.op = VLAI_OP_concat_cols;
            CHECK_KERNEL(concat_cols, &node, part, n, &whole, 1, EXACT);
            part[n - 1].f = NULL; /* nobody wants the last piece */
            node.op = VLAI_OP_split_cols;
            CHECK_KERNEL(split_cols, &node, &whole, 1, part, n, EXACT);
            vlai_arena_fini(&c.arena);
        }
}

static void test_ranges(void **state)
{
    (void)state;
    static const int64_t shapes[][4] = {{1, 1, 0, 1}, {9, 3, 2, 4}, {9, 3, 9, 0}, {2000, 40, 100, 1800}}; /* rows, cols, first, count */
    for (int s = 0; s < 8; s++) {
        int64_t rows = shapes[s / 2][0], cols = shapes[s / 2][1], first = shapes[s / 2][2], count = shapes[s / 2][3];
        int rank = s % 2 + 1; /* rank 1: elements */
        if (rank == 1)
            cols = 1;
        cases c = {.state = (uint64_t)s};
        tensor x = random_tensor(&c, rank, (int64_t[]){rows, cols}), piece = random_tensor(&c, rank, (int64_t[]){count, cols});
        tensor slice = result_tensor(&c, rank, (int64_t[]){count, cols}), pad = result_tensor(&c, rank, (int64_t[]){rows, cols});
        tensor joined = result_tensor(&c, rank, (int64_t[]){rows + count, cols});
        memcpy(slice.f, x.f + first * cols, (size_t)slice.n * sizeof(double));
        memcpy(pad.f + first * cols, piece.f, (size_t)piece.n * sizeof(double));
        memcpy(joined.f, x.f, (size_t)x.n * sizeof(double));
        memcpy(joined.f + x.n, piece.f, (size_t)piece.n * sizeof(double));
        vlai_node node = {.op = VLAI_OP_slice_rows, .attrs.slice = {first, count}};
        CHECK_KERNEL(slice_rows, &node, &x, 1, &slice, 1, EXACT);
        node = (vlai_node){.op = VLAI_OP_pad_rows, .attrs.slice = {first, rows}};
        CHECK_KERNEL(pad_rows, &node, &piece, 1, &pad, 1, EXACT);
        node = (vlai_node){.op = VLAI_OP_concat_rows};
        CHECK_KERNEL(concat_rows, &node, ((tensor[]){x, piece}), 2, &joined, 1, EXACT);
        vlai_arena_fini(&c.arena);
    }
}

static void test_expand(void **state)
{
    (void)state;
    for (int s = 0; s < N_SHAPES; s++) {
        int64_t rows = SHAPES[s][0], cols = SHAPES[s][1];
        cases c = {.state = (uint64_t)s};
        tensor x = random_tensor(&c, SHAPE2(rows, cols)), by_row = random_tensor(&c, SHAPE1(rows));
        tensor by_col = random_tensor(&c, SHAPE1(cols)), y[3];
        for (int k = 0; k < 3; k++)
            y[k] = result_tensor(&c, SHAPE2(rows, cols));
        for (int64_t i = 0; i < x.n; i++) {
            y[0].f[i] = x.f[i] * by_row.f[i / cols];
            y[1].f[i] = by_row.f[i / cols];
            y[2].f[i] = by_col.f[i % cols];
        }
        vlai_node node = {.op = VLAI_OP_mul_rows};
        CHECK_KERNEL(mul_rows, &node, ((tensor[]){x, by_row}), 2, &y[0], 1, 1e-7);
        node = (vlai_node){.op = VLAI_OP_expand_cols, .attrs.slice.count = cols};
        CHECK_KERNEL(expand_cols, &node, &by_row, 1, &y[1], 1, EXACT);
        node = (vlai_node){.op = VLAI_OP_expand_rows, .attrs.slice.count = rows};
        CHECK_KERNEL(expand_rows, &node, &by_col, 1, &y[2], 1, EXACT);
        vlai_arena_fini(&c.arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_indexed), cmocka_unit_test(test_gather_integers), cmocka_unit_test(test_merge),
        cmocka_unit_test(test_columns), cmocka_unit_test(test_ranges),          cmocka_unit_test(test_expand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
