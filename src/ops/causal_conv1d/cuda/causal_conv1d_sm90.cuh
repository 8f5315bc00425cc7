/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_sm90.cuh: common parts of the Hopper kernels: K up to 4, whole aligned vectors, no packing. A block
 * processes one tile. TMA loads the tile and its halo into shared memory while the block loads weight and bias. Blocks
 * have little work: see the comment above CONV1D_WARPS.
 *
 *   barrier   arrivals          phase ends when          who waits
 *   full      1, by thread 0    the tile has arrived     every thread, once */
#ifndef COT_CAUSAL_CONV1D_SM90_CUH
#define COT_CAUSAL_CONV1D_SM90_CUH

#include "causal_conv1d_common.cuh"

#include "../../../cuda/device/ptx.cuh"

#define CONV1D_INSTANCES_SM90(stem, body, parameter, blocks)                  \
    CONV1D_INSTANCE_SM90(stem##_bf16, body, parameter, blocks, __nv_bfloat16) \
    CONV1D_INSTANCE_SM90(stem##_f16, body, parameter, blocks, __half)         \
    CONV1D_INSTANCE_SM90(stem##_f32, body, parameter, blocks, float)
#define CONV1D_INSTANCE_SM90(name, body, parameter, blocks, element)                      \
    extern "C" __global__ void __launch_bounds__(CONV1D_SM90_WARPS *CONV1D_LANES, blocks) \
        name(const __grid_constant__ parameter c)                                         \
    {                                                                                     \
        body<element>(c);                                                                 \
    }

extern __shared__ __align__(128) unsigned char conv1d_tile[];

#endif
