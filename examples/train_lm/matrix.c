/* SPDX-License-Identifier: Apache-2.0 */
#include "matrix.h"

/* Tiles are large, so that packing the operands is cheap compared with the product, but small enough for several tiles
 * per core. */
enum { TILE_ROWS = 128, TILE_COLUMNS = 512 };

/* c [m,n] = op(a) op(b) + beta*c. All matrices are row-major, each with its own leading dimension. */
typedef struct product {
    int64_t m, n, k;
    const real *a, *b;
    real *c;
    int64_t lda, ldb, ldc;
    CBLAS_TRANSPOSE op_a, op_b;
    matrix_store store;
} product;

void matrix_use_one_thread_per_call(void)
{
    openblas_set_num_threads(1);
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void multiply_tile(const product *p, int64_t row, int64_t column)
{
    const real *a = p->a + (p->op_a == CblasNoTrans ? row * p->lda : row);
    const real *b = p->b + (p->op_b == CblasNoTrans ? column : column * p->ldb);
    const int64_t m = min_i64(TILE_ROWS, p->m - row), n = min_i64(TILE_COLUMNS, p->n - column);
    real_gemm(CblasRowMajor, p->op_a, p->op_b, (blasint)m, (blasint)n, (blasint)p->k, 1, a, (blasint)p->lda, b,
              (blasint)p->ldb, p->store == MATRIX_ADD ? 1 : 0, p->c + row * p->ldc + column, (blasint)p->ldc);
}

/* Divides a product's tiles among the threads of a parallel region, without a barrier at the end. */
static void multiply(const product *p)
{
#pragma omp for collapse(2) schedule(dynamic) nowait
    for (int64_t row = 0; row < p->m; row += TILE_ROWS)
        for (int64_t column = 0; column < p->n; column += TILE_COLUMNS)
            multiply_tile(p, row, column);
}

void linear_forward(linear_shape shape, const real *x, const real *w, real *y, matrix_store store)
{
    const product forward = {.m = shape.rows,
                             .n = shape.out,
                             .k = shape.in,
                             .a = x,
                             .lda = shape.in,
                             .op_a = CblasNoTrans,
                             .b = w,
                             .ldb = shape.in,
                             .op_b = CblasTrans,
                             .c = y,
                             .ldc = shape.out,
                             .store = store};
#pragma omp parallel
    multiply(&forward);
}

/* One parallel region for both products: threads without a tile of dw continue with the many tiles of dx. */
void linear_backward(linear_shape shape, const real *x, const real *w, const real *dy, real *dx, real *dw,
                     matrix_store store)
{
    const product weight = {.m = shape.out,
                            .n = shape.in,
                            .k = shape.rows,
                            .a = dy,
                            .lda = shape.out,
                            .op_a = CblasTrans,
                            .b = x,
                            .ldb = shape.in,
                            .op_b = CblasNoTrans,
                            .c = dw,
                            .ldc = shape.in,
                            .store = store};
    const product input = {.m = shape.rows,
                           .n = shape.in,
                           .k = shape.out,
                           .a = dy,
                           .lda = shape.out,
                           .op_a = CblasNoTrans,
                           .b = w,
                           .ldb = shape.in,
                           .op_b = CblasNoTrans,
                           .c = dx,
                           .ldc = shape.in,
                           .store = MATRIX_SET};
#pragma omp parallel
    {
        multiply(&weight);
        multiply(&input);
    }
}
