/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_sm80.cu: 16-bit instances of attention_bwd_sm80.cuh, for compute capability 8.0 and later. */
#include "attention_bwd_sm80.cuh"

#define KERNEL(name)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * ATTENTION_SM80_WARPS) \
        attention_bwd_##name(const __grid_constant__ attention_sm80_call c)

#define DQ(dtype, element, name, d_qk, d_v, slabs, columns, stages, score_mods)                      \
    KERNEL(dtype##_sm80_dq_##name)                                                                   \
    {                                                                                                \
        backward_q<element, d_qk, d_v, slabs, columns, stages, ATTENTION_SM80_WARPS, score_mods>(c); \
    }
#define DKV(stem, dtype, element, name, d_qk, d_v, slabs, columns, stages, score_mods, with_k, with_v)                \
    KERNEL(dtype##_sm80_##stem##_##name)                                                                              \
    {                                                                                                                 \
        backward_kv<element, d_qk, d_v, slabs, columns, stages, ATTENTION_SM80_WARPS, score_mods, with_k, with_v>(c); \
    }

/* clang-format off */
#define BOTH_DQ(name, k, v, m, n, st, score_mods) \
    DQ(bf16, __nv_bfloat16, name, k, v, m, n, st, score_mods) DQ(f16, __half, name, k, v, m, n, st, score_mods)
#define BOTH_DKV(stem, name, k, v, m, n, st, score_mods, with_k, with_v) \
    DKV(stem, bf16, __nv_bfloat16, name, k, v, m, n, st, score_mods, with_k, with_v) \
    DKV(stem, f16, __half, name, k, v, m, n, st, score_mods, with_k, with_v)

#define DQ_PLAIN(name, k, v, m, n, st) BOTH_DQ(name, k, v, m, n, st, false)
#define DQ_SCORE_MODS(name, k, v, m, n, st) BOTH_DQ(name, k, v, m, n, st, true)
#define DKV_PLAIN(name, k, v, m, n, st) BOTH_DKV(dkv, name, k, v, m, n, st, false, true, true)
#define DK_PLAIN(name, k, v, m, n, st) BOTH_DKV(dk, name, k, v, m, n, st, false, true, false)
#define DK_SCORE_MODS(name, k, v, m, n, st) BOTH_DKV(dk, name, k, v, m, n, st, true, true, false)
#define DV_PLAIN(name, k, v, m, n, st) BOTH_DKV(dv, name, k, v, m, n, st, false, false, true)
#define DV_SCORE_MODS(name, k, v, m, n, st) BOTH_DKV(dv, name, k, v, m, n, st, true, false, true)
/* clang-format on */

ATTENTION_DQ_TILES(DQ_PLAIN)
ATTENTION_DQ_TILES_SCORE_MODS(DQ_SCORE_MODS)
ATTENTION_DKV_TILES(DKV_PLAIN)
ATTENTION_DK_TILES(DK_PLAIN)
ATTENTION_DK_TILES_SCORE_MODS(DK_SCORE_MODS)
ATTENTION_DV_TILES(DV_PLAIN)
ATTENTION_DV_TILES_SCORE_MODS(DV_SCORE_MODS)
