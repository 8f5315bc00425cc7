/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_mma.cu: 16-bit instances of attention_bwd_mma.cuh, for compute capability 8.0 and later. */
#include "attention_bwd_mma.cuh"

#define KERNEL(name)                                                       \
    extern "C" __global__ void __launch_bounds__(32 * ATTENTION_MMA_WARPS) \
        attention_##name(const __grid_constant__ attention_mma_call c)

#define DQ(dtype, element, name, dk, dv, slabs, columns, stages, all)                     \
    KERNEL(dq_mma_##dtype##_##name)                                                       \
    {                                                                                     \
        backward_q<element, dk, dv, slabs, columns, stages, ATTENTION_MMA_WARPS, all>(c); \
    }
#define DKV(stem, dtype, element, name, dk, dv, slabs, columns, stages, all, with_k, with_v)               \
    KERNEL(stem##_mma_##dtype##_##name)                                                                    \
    {                                                                                                      \
        backward_kv<element, dk, dv, slabs, columns, stages, ATTENTION_MMA_WARPS, all, with_k, with_v>(c); \
    }

/* clang-format off */
#define BOTH_DQ(name, k, v, m, n, st, all) \
    DQ(bf16, __nv_bfloat16, name, k, v, m, n, st, all) DQ(f16, __half, name, k, v, m, n, st, all)
#define BOTH_DKV(stem, name, k, v, m, n, st, all, with_k, with_v) \
    DKV(stem, bf16, __nv_bfloat16, name, k, v, m, n, st, all, with_k, with_v) \
    DKV(stem, f16, __half, name, k, v, m, n, st, all, with_k, with_v)

#define DQ_PLAIN(name, k, v, m, n, st) BOTH_DQ(name, k, v, m, n, st, false)
#define DQ_GENERAL(name, k, v, m, n, st) BOTH_DQ(name, k, v, m, n, st, true)
#define DKV_PLAIN(name, k, v, m, n, st) BOTH_DKV(dkv, name, k, v, m, n, st, false, true, true)
#define DK_PLAIN(name, k, v, m, n, st) BOTH_DKV(dk, name, k, v, m, n, st, false, true, false)
#define DK_GENERAL(name, k, v, m, n, st) BOTH_DKV(dk, name, k, v, m, n, st, true, true, false)
#define DV_PLAIN(name, k, v, m, n, st) BOTH_DKV(dv, name, k, v, m, n, st, false, false, true)
#define DV_GENERAL(name, k, v, m, n, st) BOTH_DKV(dv, name, k, v, m, n, st, true, false, true)
/* clang-format on */

ATTENTION_DQ_TILES(DQ_PLAIN)
ATTENTION_DQ_TILES_GENERAL(DQ_GENERAL)
ATTENTION_DKV_TILES(DKV_PLAIN)
ATTENTION_DK_TILES(DK_PLAIN)
ATTENTION_DK_TILES_GENERAL(DK_GENERAL)
ATTENTION_DV_TILES(DV_PLAIN)
ATTENTION_DV_TILES_GENERAL(DV_GENERAL)
