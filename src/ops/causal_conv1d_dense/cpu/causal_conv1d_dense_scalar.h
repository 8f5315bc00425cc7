/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_scalar.h: workspace layout of the scalar kernels. For the kernels and the kernel table. */
#ifndef COT_CAUSAL_CONV1D_DENSE_SCALAR_H
#define COT_CAUSAL_CONV1D_DENSE_SCALAR_H

#include "ops/causal_conv1d_dense/causal_conv1d_dense_problem.h"

typedef struct conv1d_dense_scalar_layout {
    size_t xe, w, g, bytes;
} conv1d_dense_scalar_layout;

static inline conv1d_dense_scalar_layout conv1d_dense_scalar_layout_of(const conv1d_dense_sizes *sizes, bool backward,
                                                                       size_t element_size)
{
    conv1d_dense_scalar_layout l = {0};
    l.xe = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, sizes->K - 1 + sizes->T, sizes->Din), element_size);
    l.w = cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->Dout, sizes->K, sizes->Din), element_size);
    l.g = backward ? cot_workspace_reserve(&l.bytes, COT_PRODUCT(sizes->B, sizes->T, sizes->Dout), element_size) : 0;
    return l;
}

#endif
