/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_im2col.h: the workspace of the im2col kernel, for kernel and front. */
#ifndef COT_CAUSAL_CONV1D_IM2COL_H
#define COT_CAUSAL_CONV1D_IM2COL_H

#include "ops/causal_conv1d/causal_conv1d_problem.h"

enum {
    CONV1D_IM2COL_PART = 32,  /* MT of simd/matmul.h: sizes are rounded up to it */
    CONV1D_IM2COL_ROWS = 256, /* of an item's product */
    CONV1D_IM2COL_COLUMNS = 128,
    CONV1D_IM2COL_MAX_D = 1024,
    CONV1D_IM2COL_MAX_K = 8
};

typedef struct conv1d_im2col_layout {
    int64_t D, T; /* rounded up */
    size_t columns, expanded, bytes;
} conv1d_im2col_layout;

/* `size` is that of an operand's element. */
static inline conv1d_im2col_layout conv1d_im2col_layout_of(const conv1d_sizes *z, size_t size)
{
    conv1d_im2col_layout l = {.D = cot_round_up(z->D, CONV1D_IM2COL_PART), .T = cot_round_up(z->T, CONV1D_IM2COL_PART)};
    l.columns = cot_take(&l.bytes, COT_PRODUCT(z->B, l.T, l.D, z->K), size);
    l.expanded = cot_take(&l.bytes, COT_PRODUCT(l.D, z->K, l.D), size);
    return l;
}

#endif
