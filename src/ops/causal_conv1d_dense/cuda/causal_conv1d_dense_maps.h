/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_maps.h: a call with the tensor maps of a product's operands, boxes of 64 by 64 elements. For C and
 * CUDA. */
#ifndef COT_CAUSAL_CONV1D_DENSE_MAPS_H
#define COT_CAUSAL_CONV1D_DENSE_MAPS_H

#include "causal_conv1d_dense_cuda.h"

#include <cuda.h>

typedef struct conv1d_dense_mapped {
    CUtensorMap a, b;
    conv1d_dense_call call;
} conv1d_dense_mapped;

#endif
