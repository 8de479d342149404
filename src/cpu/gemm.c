#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "cpu/gemm.h"

#include "base/fail.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define FAMILY "cpu/gemm.inc.h"
#include "cpu/instantiate.h"

static void set_single_threaded(void)
{
    openblas_set_num_threads(1);
}

void vlai_blas_single_threaded(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_single_threaded);
}

/* OpenBLAS maps a buffer for each thread that is in a product, and for each of those that it has started itself when it was loaded;
 * where the limit of the address space does not hold one it tries again for ever (0.3.21, memory.c), so that even the end of the
 * process waits. That is found out before. */
vla_status vlai_blas_room(int threads, vla_error *err)
{
    enum { BUFFER = 128 << 20, OTHER = 256 << 20, MOST = 128 }; /* OTHER: stacks and arenas */
    static _Atomic int found; /* threads that there was room for */
    struct rlimit limit, written;
    int own = openblas_get_num_threads();
    threads = threads > own ? threads : own;
    threads = threads < MOST ? threads : MOST;
    if (threads <= found || getrlimit(RLIMIT_AS, &limit) != 0 || getrlimit(RLIMIT_DATA, &written) != 0)
        return VLA_OK;
    if (written.rlim_cur < limit.rlim_cur)
        limit = written;
    if (limit.rlim_cur == RLIM_INFINITY)
        return VLA_OK;
    size_t bytes = (size_t)threads * BUFFER + OTHER;
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return vlai_fail_hint(err, VLA_E_NOMEM, "raise the limit (ulimit -v unlimited; ulimit -d unlimited), or let fewer threads compute (OPENBLAS_NUM_THREADS=1, --threads)",
                              "the address space is limited to %llu MB, which leaves no %zu MB for the buffers of products on %d threads",
                              (unsigned long long)limit.rlim_cur >> 20, bytes >> 20, threads);
    munmap(room, bytes);
    found = threads;
    return VLA_OK;
}

static int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Tiles are wide (BLAS packs the right-hand matrix once per tile) and tall enough for TILE_WORK multiply-adds. A product
 * with few results and a long sum, such as a weight gradient, is cut along the sum instead; its partial results are added
 * in order. */
vlai_gemm_grid vlai_gemm_grid_of(int64_t m, int64_t n, int64_t k)
{
    enum { TILE_WORK = 1 << 21, MAX_COLS = 1024, MAX_ROWS = 512, MIN_ROWS = 96, ROW_UNIT = 32, MIN_DEPTH = 256, MAX_PARTS = 16 };
    vlai_gemm_grid grid = {.rows = m, .cols = n, .depth = k};
    if ((double)m * (double)n * (double)k > TILE_WORK) {
        grid.cols = n < MAX_COLS ? n : MAX_COLS;
        double rows = (double)TILE_WORK / ((double)grid.cols * (double)k);
        grid.rows = rows < MAX_ROWS ? round_up((int64_t)rows + 1, ROW_UNIT) : MAX_ROWS;
        if (grid.rows < MIN_ROWS && m >= 4 * MIN_ROWS)
            grid.rows = MIN_ROWS; /* packing the right-hand matrix costs as much as 30 rows or so */
        if (grid.rows > m)
            grid.rows = m;
        if (vlai_tiles(m, grid.rows) * vlai_tiles(n, grid.cols) <= 4 && m * n <= 1 << 18 && k >= 2 * MIN_DEPTH &&
            k >= m && k >= n) {
            grid.rows = m;
            grid.cols = n;
            double depth = (double)TILE_WORK / ((double)m * (double)n);
            grid.depth = depth > MIN_DEPTH ? round_up((int64_t)depth, 64) : MIN_DEPTH;
            if (vlai_tiles(k, grid.depth) > MAX_PARTS)
                grid.depth = round_up(vlai_tiles(k, MAX_PARTS), 64);
        }
    }
    grid.n_rows = m > 0 ? vlai_tiles(m, grid.rows) : 0;
    grid.n_cols = n > 0 ? vlai_tiles(n, grid.cols) : 0;
    grid.n_depth = k > 0 ? vlai_tiles(k, grid.depth) : 1;
    return grid;
}
