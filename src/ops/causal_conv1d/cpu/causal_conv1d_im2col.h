/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_im2col.h: the workspace layout of the im2col kernel, for the kernel and the kernel table. */
#ifndef COT_CAUSAL_CONV1D_IM2COL_H
#define COT_CAUSAL_CONV1D_IM2COL_H

#include "ops/causal_conv1d/causal_conv1d_problem.h"

enum {
    CONV1D_IM2COL_TILE = 32,         /* PANEL of simd/matmul.h: T and D are rounded up to multiples of it */
    CONV1D_IM2COL_ITEM_TOKENS = 256, /* tokens of the product of one item */
    CONV1D_IM2COL_ITEM_CHANNELS = 128,
    CONV1D_IM2COL_MAX_D = 1024,
    CONV1D_IM2COL_MAX_K = 8
};

typedef struct conv1d_im2col_layout {
    int64_t D, T; /* D and T of the call, rounded up to tiles */
    size_t patches, expanded, bytes;
} conv1d_im2col_layout;

/* Layout for operands with elements of `element_size` bytes. */
static inline conv1d_im2col_layout conv1d_im2col_layout_of(const conv1d_sizes *sizes, size_t element_size)
{
    conv1d_im2col_layout layout = {.D = cot_round_up(sizes->D, CONV1D_IM2COL_TILE),
                                   .T = cot_round_up(sizes->T, CONV1D_IM2COL_TILE)};
    layout.patches =
        cot_workspace_reserve(&layout.bytes, COT_PRODUCT(sizes->B, layout.T, layout.D, sizes->K), element_size);
    layout.expanded = cot_workspace_reserve(&layout.bytes, COT_PRODUCT(layout.D, sizes->K, layout.D), element_size);
    return layout;
}

#endif
