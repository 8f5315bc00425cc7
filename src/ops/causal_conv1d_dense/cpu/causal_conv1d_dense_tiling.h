/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_tiling.h: where the tiled kernels' blocks and items begin and end, by the shape alone, and how
 * their workspace is laid out. For kernels and front.
 *
 * Operands are in the forms of simd/matmul.h, their sizes rounded up to whole parts of 32 with zeros. A panel's rows
 * are a number that spreads the panels over a cache's sets: of 4096 rows, a column of parts would lie in a few of
 * them. */
#ifndef COT_CAUSAL_CONV1D_DENSE_TILING_H
#define COT_CAUSAL_CONV1D_DENSE_TILING_H

#include "ops/causal_conv1d_dense/causal_conv1d_dense_problem.h"

enum {
    CONV1D_PART = 32,          /* MT of simd/matmul.h */
    CONV1D_ROWS = 256,         /* of an item's C */
    CONV1D_COLUMNS = 128,      /* of an item's C */
    CONV1D_TERMS = 256,        /* of a sum at a time: a panel of B stays in the first-level cache */
    CONV1D_AMX_TERMS = 2048,   /* where C's way through memory counts more */
    CONV1D_SPLIT3_TERMS = 512, /* between that and rounding: in one run long sums would round too often */
    CONV1D_TOKENS = 512,       /* that an item of dweight sums before the next ones */
    CONV1D_ITEMS = 64,         /* the sums over the tokens are cut into parts where there are fewer items */
    CONV1D_MAX_PARTS = 8
};

/* The rows of a panel of at least `rows`: even, as interleaved pairs want it, and 34 beyond a multiple of 64. */
static inline int64_t conv1d_dense_panel(int64_t rows)
{
    return cot_round_up(rows < 34 ? 0 : rows - 34, 64) + 34;
}

/* Bytes of an item's product_buffers. `apart`: stretches of a sum are products of their own. */
#define CONV1D_DENSE_SCRATCH(apart) (4 * CONV1D_ROWS * CONV1D_COLUMNS * ((apart) ? 2 : 1) + 64)

/* Elements unless said otherwise; a 0 where a kernel needs no such operand. */
typedef struct conv1d_dense_layout {
    int64_t Din, Dout, T;                  /* rounded up to whole parts, T to one at least */
    int64_t x_rows, g_rows, o_rows;        /* of the panels of x, g, and of g^T */
    int64_t parts;                         /* of the sums over the tokens */
    int64_t chunks;                        /* of CONV1D_TOKENS tokens, over all sequences */
    size_t x, x_even, x_odd, w, wt, g, gt; /* where they begin, in bytes */
    size_t dbias, dweight, bytes;
} conv1d_dense_layout;

/* What a direction needs of it. */
typedef struct conv1d_dense_wants {
    bool z, dx, dweight, dbias; /* z: the forward's product */
} conv1d_dense_wants;

static inline conv1d_dense_wants conv1d_dense_wants_of(const conv1d_dense_backward_problem *p)
{
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    return (conv1d_dense_wants){a->activation == COT_ACTIVATION_SILU,
                                cot_is_present(&a->dx) || (cot_is_present(&a->dinitial_state) && p->sizes.K > 1),
                                cot_is_present(&a->dweight), cot_is_present(&a->dbias)};
}

/* `size` is that of an operand's element; `one_form`: A and B forms are the same. */
static inline conv1d_dense_layout conv1d_dense_layout_of(const conv1d_dense_sizes *z, conv1d_dense_wants want,
                                                         size_t size, bool one_form)
{
    conv1d_dense_layout l = {.Din = cot_round_up(z->Din, CONV1D_PART),
                             .Dout = cot_round_up(z->Dout, CONV1D_PART),
                             .T = cot_round_up(z->T > 0 ? z->T : 1, CONV1D_PART)};
    const bool gradient = want.dx || want.dweight || want.dbias;
    l.x_rows = conv1d_dense_panel(l.T + z->K - 1 + CONV1D_PART);
    l.g_rows = conv1d_dense_panel(l.T + 2 * (z->K - 1) + CONV1D_PART);
    l.o_rows = conv1d_dense_panel(l.Dout);
    l.chunks = cot_mul(z->B, cot_ceil_div(l.T, CONV1D_TOKENS));
    const double items = (double)z->K * (double)cot_round_up(l.Dout, CONV1D_ROWS) *
                         (double)cot_round_up(l.Din, CONV1D_COLUMNS) / (CONV1D_ROWS * CONV1D_COLUMNS);
    l.parts = items > 0 && items < CONV1D_ITEMS ? (int64_t)(CONV1D_ITEMS / items) : 1;
    l.parts = cot_min(l.parts, cot_min(l.chunks, CONV1D_MAX_PARTS));
    if (want.z || want.dweight)
        l.x = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, l.x_rows, l.Din), size);
    if (want.dweight && !one_form) {
        l.x_even = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, l.x_rows, l.Din), size);
        l.x_odd = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, l.x_rows, l.Din, z->K > 1), size);
    }
    if (want.z)
        l.w = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.Dout, l.Din, z->K), size);
    if (want.dx) {
        l.wt = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.Dout, l.Din, z->K), size);
        l.g = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, l.g_rows, l.Dout), size);
    }
    if (want.dweight) {
        l.gt = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, l.T, l.o_rows), size);
        l.dweight = cot_workspace_reserve(&l.bytes, COT_PRODUCT(l.parts, z->K, l.o_rows, l.Din), sizeof(float));
    }
    if (gradient)
        l.dbias = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, l.T / CONV1D_PART, l.Dout), sizeof(float));
    return l;
}

#endif
