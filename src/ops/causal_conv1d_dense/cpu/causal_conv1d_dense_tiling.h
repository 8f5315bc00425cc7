/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_tiling.h: blocks, items and workspace layout of the tiled kernels. They depend on the shape
 * alone. For the kernels and the kernel table.
 *
 * Operands have the forms of simd/matmul.h. Their sizes are rounded up to whole 32 x 32 tiles, and padded with
 * zeros. The number of rows of a panel is chosen so that a row of tiles is spread over the sets of the cache. With
 * 4096 rows, all these tiles would be in a few sets. */
#ifndef COT_CAUSAL_CONV1D_DENSE_TILING_H
#define COT_CAUSAL_CONV1D_DENSE_TILING_H

#include "ops/causal_conv1d_dense/causal_conv1d_dense_problem.h"

enum {
    CONV1D_TILE = 32,              /* PANEL of simd/matmul.h */
    CONV1D_BLOCK_ROWS = 256,       /* of an item's C */
    CONV1D_BLOCK_COLUMNS = 128,    /* of an item's C */
    CONV1D_SUM_TERMS = 256,        /* of a sum at a time: a panel of B stays in the L1 cache */
    CONV1D_AMX_SUM_TERMS = 2048,   /* with AMX, loads and stores of C cost more */
    CONV1D_SPLIT3_SUM_TERMS = 512, /* a compromise between that and rounding: longer sums round too often */
    CONV1D_CHUNK_TOKENS = 512,     /* a chunk: tokens of one product of dweight */
    CONV1D_MIN_ITEMS = 64,         /* with fewer items of dweight, the sums over the tokens are split */
    CONV1D_MAX_SPLITS = 8
};

/* Rounds the rows of a panel up to 34 more than a multiple of 64. This is even, as interleaved pairs of rows need. */
static inline int64_t conv1d_dense_panel_rows(int64_t rows)
{
    return cot_round_up(rows < 34 ? 0 : rows - 34, 64) + 34;
}

/* Bytes of an item's product_buffers. separate_sums: blocks of SUM_TERMS terms are summed separately and then added. */
#define CONV1D_DENSE_SCRATCH(separate_sums) \
    (4 * CONV1D_BLOCK_ROWS * CONV1D_BLOCK_COLUMNS * ((separate_sums) ? 2 : 1) + 64)

/* Sizes in elements, offsets in bytes. An operand that a kernel does not need has offset 0. */
typedef struct conv1d_dense_layout {
    int64_t Din, Dout, T;                  /* rounded up to whole tiles; T to at least one */
    int64_t x_rows, g_rows, gt_rows;       /* rows of the panels of x, g and g^T */
    int64_t splits;                        /* of the sums over the tokens, as in split-K */
    int64_t chunks;                        /* of CONV1D_CHUNK_TOKENS tokens, over all sequences */
    size_t x, x_even, x_odd, w, wt, g, gt; /* offsets */
    size_t dbias, dweight, bytes;
} conv1d_dense_layout;

/* The results that a call needs. */
typedef struct conv1d_dense_needs {
    bool z, dx, dweight, dbias; /* z: the product of the forward */
} conv1d_dense_needs;

static inline conv1d_dense_needs conv1d_dense_backward_needs(const conv1d_dense_backward_problem *p)
{
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    return (conv1d_dense_needs){a->activation == COT_ACTIVATION_SILU,
                                cot_is_present(&a->dx) || (cot_is_present(&a->dinitial_state) && p->sizes.K > 1),
                                cot_is_present(&a->dweight), cot_is_present(&a->dbias)};
}

/* element_size: bytes of an element of an operand. same_form: A and B forms are the same. */
static inline conv1d_dense_layout conv1d_dense_layout_of(const conv1d_dense_sizes *sizes, conv1d_dense_needs needs,
                                                         size_t element_size, bool same_form)
{
    conv1d_dense_layout l = {.Din = cot_round_up(sizes->Din, CONV1D_TILE),
                             .Dout = cot_round_up(sizes->Dout, CONV1D_TILE),
                             .T = cot_round_up(sizes->T > 0 ? sizes->T : 1, CONV1D_TILE)};
    const bool gradient = needs.dx || needs.dweight || needs.dbias;
    l.x_rows = conv1d_dense_panel_rows(l.T + sizes->K - 1 + CONV1D_TILE);
    l.g_rows = conv1d_dense_panel_rows(l.T + 2 * (sizes->K - 1) + CONV1D_TILE);
    l.gt_rows = conv1d_dense_panel_rows(l.Dout);
    l.chunks = cot_mul(sizes->B, cot_ceil_div(l.T, CONV1D_CHUNK_TOKENS));
    const double items = (double)sizes->K * (double)cot_round_up(l.Dout, CONV1D_BLOCK_ROWS) *
                         (double)cot_round_up(l.Din, CONV1D_BLOCK_COLUMNS) / (CONV1D_BLOCK_ROWS * CONV1D_BLOCK_COLUMNS);
    l.splits = items > 0 && items < CONV1D_MIN_ITEMS ? (int64_t)(CONV1D_MIN_ITEMS / items) : 1;
    l.splits = cot_min(l.splits, cot_min(l.chunks, CONV1D_MAX_SPLITS));
    if (needs.z || needs.dweight)
        l.x = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, l.x_rows, l.Din), element_size);
    if (needs.dweight && !same_form) {
        l.x_even = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, l.x_rows, l.Din), element_size);
        l.x_odd = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, l.x_rows, l.Din, sizes->K > 1), element_size);
    }
    if (needs.z)
        l.w = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.Dout, l.Din, sizes->K), element_size);
    if (needs.dx) {
        l.wt = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.Dout, l.Din, sizes->K), element_size);
        l.g = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, l.g_rows, l.Dout), element_size);
    }
    if (needs.dweight) {
        l.gt = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, l.T, l.gt_rows), element_size);
        l.dweight = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.splits, sizes->K, l.gt_rows, l.Din), sizeof(float));
    }
    if (gradient)
        l.dbias = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, l.T / CONV1D_TILE, l.Dout), sizeof(float));
    return l;
}

#endif
