/* How a matrix product is cut: by its shape alone. Shared by the kernel and by the workspace table. */
#ifndef VLAI_CPU_GEMM_H
#define VLAI_CPU_GEMM_H

#include "vla/error.h"

typedef struct vlai_gemm_grid {
    int64_t rows, cols, depth;             /* of one tile; depth = K unless the sum is split */
    int64_t n_rows, n_cols, n_depth;       /* tiles */
} vlai_gemm_grid;

vlai_gemm_grid vlai_gemm_grid_of(int64_t m, int64_t n, int64_t k);
/* Whether the limit of the address space holds what BLAS maps for so many threads at once. */
vla_status vlai_blas_room(int threads, vla_error *err);
/* BLAS must not start threads of its own: the tiles are the parallelism. Called by every kernel that uses it. */
void vlai_blas_single_threaded(void);

#endif
