/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_sm80.cu: 16-bit instances of attention_fwd_sm80.cuh, for compute capability 8.0 and later. */
#include "attention_fwd_sm80.cuh"

#define KERNEL(dtype, element, name, d_qk, d_v, slabs, columns, score_mods)                \
    extern "C" __global__ void __launch_bounds__(32 * ATTENTION_SM80_WARPS)                \
        attention_fwd_##dtype##_sm80_##name(const __grid_constant__ attention_sm80_call c) \
    {                                                                                      \
        forward<element, d_qk, d_v, slabs, columns, ATTENTION_SM80_WARPS, score_mods>(c);  \
    }
#define PLAIN(name, d_qk, d_v, slabs, columns, stages)                  \
    KERNEL(bf16, __nv_bfloat16, name, d_qk, d_v, slabs, columns, false) \
    KERNEL(f16, __half, name, d_qk, d_v, slabs, columns, false)
#define SCORE_MODS(name, d_qk, d_v, slabs, columns, stages)            \
    KERNEL(bf16, __nv_bfloat16, name, d_qk, d_v, slabs, columns, true) \
    KERNEL(f16, __half, name, d_qk, d_v, slabs, columns, true)
ATTENTION_FWD_TILES(PLAIN)
ATTENTION_FWD_TILES_SCORE_MODS(SCORE_MODS)
