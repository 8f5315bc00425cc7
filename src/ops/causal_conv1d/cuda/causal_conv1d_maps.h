/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_maps.h: the parameters of the Hopper kernels for contiguous channels, with tensor maps of [B][T][D].
 * For C and CUDA. */
#ifndef COT_CAUSAL_CONV1D_MAPS_H
#define COT_CAUSAL_CONV1D_MAPS_H

#include "causal_conv1d_cuda.h"

#include <cuda.h>

typedef struct conv1d_mapped_call {
    CUtensorMap x, dy, dx;
    conv1d_call call;
} conv1d_mapped_call;

#endif
