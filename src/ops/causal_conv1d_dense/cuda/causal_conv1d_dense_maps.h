/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_maps.h: the kernel parameters with the tensor maps of the operands of a product. Boxes are 64
 * x 64 elements. For C and CUDA. */
#ifndef COT_CAUSAL_CONV1D_DENSE_MAPS_H
#define COT_CAUSAL_CONV1D_DENSE_MAPS_H

#include "causal_conv1d_dense_cuda.h"

#include <cuda.h>

typedef struct conv1d_dense_mapped_call {
    CUtensorMap a, b;
    conv1d_dense_call call;
} conv1d_dense_mapped_call;

#endif
