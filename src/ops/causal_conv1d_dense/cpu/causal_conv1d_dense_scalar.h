/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_scalar.h: the workspace of the scalar kernels. For kernels and front. */
#ifndef COT_CAUSAL_CONV1D_DENSE_SCALAR_H
#define COT_CAUSAL_CONV1D_DENSE_SCALAR_H

#include "ops/causal_conv1d_dense/causal_conv1d_dense_problem.h"

typedef struct conv1d_dense_scalar_layout {
    size_t xe, w, g, bytes;
} conv1d_dense_scalar_layout;

static inline conv1d_dense_scalar_layout conv1d_dense_scalar_layout_of(const conv1d_dense_sizes *z, bool backward,
                                                                       size_t size)
{
    conv1d_dense_scalar_layout l = {0};
    l.xe = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->K - 1 + z->T, z->Din), size);
    l.w = cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->Dout, z->K, z->Din), size);
    l.g = backward ? cot_workspace_reserve(&l.bytes, COT_PRODUCT(z->B, z->T, z->Dout), size) : 0;
    return l;
}

#endif
