/* SPDX-License-Identifier: Apache-2.0
 *
 * mfma_probe.cu: one kernel per MFMA instruction, for test_emulator_amd.c. A wave loads the registers of A, B and C and
 * stores those of D: element n of lane l is at [l][n]. */
#include "mfma_probe.h"

typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef short short4 __attribute__((ext_vector_type(4)));
typedef float float16 __attribute__((ext_vector_type(16)));
typedef float accumulators4 __attribute__((ext_vector_type(4)));

#define PROBE(name, input, result, builtin)                                                    \
    extern "C" __global__ void __launch_bounds__(64) name(const __grid_constant__ mfma_call c) \
    {                                                                                          \
        const int lane = (int)threadIdx.x;                                                     \
        const input a = ((const input *)c.a)[lane], b = ((const input *)c.b)[lane];            \
        result *const d = (result *)c.d + lane;                                                \
        *d = builtin(a, b, ((const result *)c.c)[lane], 0, 0, 0);                              \
    }
PROBE(mfma_32_f16, half4, float16, __builtin_amdgcn_mfma_f32_32x32x8f16)
PROBE(mfma_32_bf16, short4, float16, __builtin_amdgcn_mfma_f32_32x32x8bf16_1k)
PROBE(mfma_32_f32, float, float16, __builtin_amdgcn_mfma_f32_32x32x2f32)
PROBE(mfma_16_f16, half4, accumulators4, __builtin_amdgcn_mfma_f32_16x16x16f16)
PROBE(mfma_16_bf16, short4, accumulators4, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k)
PROBE(mfma_16_f32, float, accumulators4, __builtin_amdgcn_mfma_f32_16x16x4f32)
