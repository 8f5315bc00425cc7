/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_softmax_sm90.cuh: the forward on Hopper between its two products: masks, and P from scores with
 * row_max. attention_fwd_sm90.cuh describes the whole kernel. */
#ifndef COT_ATTENTION_FWD_SOFTMAX_SM90_CUH
#define COT_ATTENTION_FWD_SOFTMAX_SM90_CUH

#include "attention_fwd_load_sm90.cuh"
#include "attention_softcap.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/quad.cuh"

/* Softmax state of this thread's two rows. */
struct softmax_state {
    /* A maximum of the row's scores, times softmax_scale_log2, which may be stale, or -inf: see
     * attention_fwd_sm90.cuh. */
    float row_max[2];
    float row_sum[2]; /* of this thread's own P */
};

/* Modifies scores: softcap, or the sign of a negative scale. */
template <class F, int N>
static __device__ __forceinline__ void modify_scores(const attention_fwd_call &c, float (&scores)[N])
{
    if (c.cap.scale != 0.0f) {
        attention_cap<N % 16 == 0 && F::CONSUMERS == 2 ? 16 : 8>(c.cap, scores);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        scores[i] = -scores[i];
}

/* Bit mask of this thread's columns below `column`: bit 2i + j stands for column 8i + j. */
static __device__ __forceinline__ uint32_t columns_below(int column)
{
    const int clamped = min(max(column, 0), 128), number = clamped / 8 * 2 + min(clamped % 8, 2);
    return (uint32_t)((1ull << number) - 1);
}

/* Masks the scores of keys that the row may not attend to; column 0 is key `key`. Columns that every row of the warp
 * attends to are skipped, because a mask edge crosses few of a tile's columns. */
template <class F, int N>
static __device__ __forceinline__ void apply_mask(const attention_tile &t, int key, int row, float (&scores)[N])
{
    uint32_t visible[2]; /* columns of this thread's two rows */
    const int column = key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int tile_row = row + 8 * half;
        visible[half] = columns_below(min(t.last_visible_offset + tile_row + 1, t.Tk) - column) &
                        ~columns_below(t.first_visible_offset + tile_row - column);
    }
    enum { CHUNK = F::SOFTCAP ? 16 : 32 /* scores; twice as many columns */, CHUNK_BITS = (1 << CHUNK / 2) - 1 };
#pragma unroll
    for (int from = 0; from < N; from += CHUNK) {
        const uint32_t chunk_bits = (uint32_t)CHUNK_BITS << (from / 2);
        /* Every row of the warp attends to all columns of the chunk, so no score is masked. */
        if (__all_sync(0xffffffffu, (visible[0] & visible[1] & chunk_bits) == chunk_bits))
            continue;
#pragma unroll
        for (int i = from; i < N && i < from + CHUNK; i++)
            if (!(visible[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1))
                scores[i] = __int_as_float(0xff800000);
    }
}

/* The smallest of three non-negative floats, compared as integers, because the GPU compares three integers at a
 * time. */
static __device__ __forceinline__ float min_bits(float a, float b, float c)
{
    /* asm: in C++, the compiler puts the conversions to integers before the wait for wgmma, which serialises it. */
    float d;
    asm("{\n    .reg .s32 x, y, z;\n    mov.b32 x, %1;\n    mov.b32 y, %2;\n    mov.b32 z, %3;\n    min.s32 x, x, y;\n"
        "    min.s32 x, x, z;\n    mov.b32 %0, x;\n}"
        : "=f"(d)
        : "f"(a), "f"(b), "f"(c));
    return d;
}

/* The largest of this thread's scores in each of its two rows. */
template <int N> static __device__ __forceinline__ void find_thread_max(const float (&scores)[N], float (&max_score)[2])
{
    float partial_max[8];
#pragma unroll
    for (int i = 0; i < N; i++)
        partial_max[i % 8] = i < 8 ? scores[i] : fmaxf(partial_max[i % 8], scores[i]);
#pragma unroll
    for (int half = 0; half < 2; half++)
        max_score[half] = fmaxf(fmaxf(partial_max[2 * half], partial_max[2 * half + 1]),
                                fmaxf(partial_max[2 * half + 4], partial_max[2 * half + 5]));
}

/* Raises row_max of the warp's rows to their maxima if an exponent exceeds its row_max by more than MAX_P_LOG2. Only
 * then do the threads of a row exchange maxima. base: row_max, or 0 where it is -inf. Returns whether O must be
 * multiplied by `factor`. */
template <class F, bool FIRST, int N>
static __device__ __forceinline__ bool update_row_max(const attention_fwd_call &c, const float (&scores)[N],
                                                      softmax_state &state, float (&base)[2], float (&factor)[2])
{
    float max_score[2];
    find_thread_max(scores, max_score);
    const float minus_infinity = __int_as_float(0xff800000);
    bool rescale = FIRST;
    max_score[0] *= c.softmax_scale_log2, max_score[1] *= c.softmax_scale_log2;
    if (!FIRST) /* -inf - -inf is NaN where no key has been visible, and the comparison is false */
        rescale = __any_sync(0xffffffffu, max_score[0] - state.row_max[0] > (float)F::MAX_P_LOG2 ||
                                              max_score[1] - state.row_max[1] > (float)F::MAX_P_LOG2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float old_max = state.row_max[half];
        if (rescale)
            state.row_max[half] = FIRST ? cot_quad_max(max_score[half]) : fmaxf(cot_quad_max(max_score[half]), old_max);
        base[half] = state.row_max[half] == minus_infinity ? 0.0f : state.row_max[half];
        if (!FIRST && rescale) {
            factor[half] = cot_ex2(old_max - base[half]);
            state.row_sum[half] *= factor[half];
        }
    }
    return rescale;
}

/* Turns scores into P. */
template <bool FIRST, int N>
static __device__ __forceinline__ void exponentiate(const attention_fwd_call &c, const float (&base)[2],
                                                    float (&scores)[N], softmax_state &state)
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; i++) {
        scores[i] = cot_ex2(fmaf(scores[i], c.softmax_scale_log2, -base[i / 2 % 2]));
        sum[i % 4] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        state.row_sum[half] = (FIRST ? 0.0f : state.row_sum[half]) + (sum[2 * half] + sum[2 * half + 1]);
}

/* Turns scores into P with row_max as it is, without looking for the maximum first. Only for tiles without
 * masked scores. Softcap uses its short series. Afterwards the row's sum, which has no negative terms, shows whether
 * P was too large. The series increases with the score everywhere, so the smallest P and the sum show whether all
 * scores were in its range. (The largest square of the scores would show that too, but ptxas then places all FMAs
 * before all exponentials.) Returns whether P is usable. If not, the scores are lost, and try_fast says whether to try
 * this for the next tile. */
template <class F, int N>
static __device__ __forceinline__ bool softmax_step_fast(const attention_fwd_call &c, float (&scores)[N],
                                                         softmax_state &state, bool &try_fast)
{
    float sum[2] = {0.0f, 0.0f}, min_p[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const int half = i / 2 % 2;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float &score = scores[i + j];
            float factor = c.softmax_scale_log2;
            if (F::SOFTCAP) {
                const float square = score * score;
                factor =
                    fmaf(fmaf(square, c.cap.short_series[2], c.cap.short_series[1]), square, c.cap.short_series[0]);
            }
            score = cot_ex2(fmaf(score, factor, -state.row_max[half]));
        }
        if (F::SOFTCAP)
            min_p[half] = min_bits(min_p[half], scores[i], scores[i + 1]);
        sum[half] += scores[i] + scores[i + 1];
    }
    /* False for NaN, and where row_max is -inf. */
    bool scores_small = true, valid = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (F::SOFTCAP) {
            const float unit = cot_ex2(-state.row_max[half]);
            scores_small =
                scores_small && sum[half] <= unit * c.cap.short_max_exp2 && min_p[half] >= unit * c.cap.short_min_exp2;
        }
        valid = valid && scores_small && sum[half] <= (float)(1 << F::MAX_P_LOG2);
    }
    valid = __all_sync(0xffffffffu, valid);
    /* Not in a branch, because the compiler would move the additions above into it. */
#pragma unroll
    for (int half = 0; half < 2; half++)
        state.row_sum[half] += valid ? sum[half] : 0.0f;
    if (F::SOFTCAP && !valid)
        try_fast = __all_sync(0xffffffffu, scores_small);
    return valid;
}

/* Recomputes a warp's scores with mma.sync after softmax_step_fast failed. The other warps of the warpgroup are not
 * involved. Each group of 16 keys has its own loop. Otherwise the compiler places all loads first, for which the large
 * sizes have no registers. */
template <class F>
static __device__ __forceinline__ void recompute_scores(float (&scores)[F::KEYS / 2], const unsigned char *q,
                                                        const unsigned char *k)
{
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    const uint32_t q_address = cot_shared_address(q) + (warp * 16 + lane % 16) * ROW_BYTES,
                   q_unit = SWIZZLED_OFFSET(lane, lane / 16);
    const uint32_t k_address = cot_shared_address(k) + (lane % 8 + lane / 16 * 8) * ROW_BYTES,
                   k_unit = SWIZZLED_OFFSET(lane, lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < F::KEYS / 16; n++) {
        float acc[2][4] = {};
#pragma unroll 1
        for (int i = 0; i < F::D / 16; i++) {
            uint32_t q_fragment[4], k_fragment[4];
            cot_ldmatrix_x4(q_fragment, q_address + i / 4 * (F::QUERIES * ROW_BYTES) + (q_unit ^ (i % 4 * 32)));
            cot_ldmatrix_x4(k_fragment,
                            k_address + n * (16 * ROW_BYTES) + i / 4 * (F::KEYS * ROW_BYTES) + (k_unit ^ (i % 4 * 32)));
#pragma unroll
            for (int j = 0; j < 2; j++)
                if constexpr (cot_is_f16<typename F::E>)
                    cot_mma_f16(acc[j], q_fragment[0], q_fragment[1], q_fragment[2], q_fragment[3], k_fragment[2 * j],
                                k_fragment[2 * j + 1]);
                else
                    cot_mma_bf16(acc[j], q_fragment[0], q_fragment[1], q_fragment[2], q_fragment[3], k_fragment[2 * j],
                                 k_fragment[2 * j + 1]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            scores[8 * n + i] = acc[i / 4][i % 4];
    }
}

/* Turns scores into P in float32. Column 0 is key `key`. masked: the mask cuts this tile. Returns whether O must be
 * multiplied by `factor`. */
template <class F, bool FIRST, int N>
static __device__ __forceinline__ bool softmax_step(const attention_fwd_call &c, const attention_tile &t, int key,
                                                    int row, bool masked, float (&scores)[N], softmax_state &state,
                                                    float (&factor)[2])
{
    if (F::SOFTCAP)
        modify_scores<F>(c, scores);
    if (masked)
        apply_mask<F>(t, key, row, scores);
    float base[2];
    const bool rescale = update_row_max<F, FIRST>(c, scores, state, base, factor);
    exponentiate<FIRST>(c, base, scores, state);
    return rescale;
}

template <class F, int N> static __device__ __forceinline__ void pack(uint32_t *p, const float (&scores)[N])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        p[i] = cot_pack_pair<typename F::E>(scores[2 * i], scores[2 * i + 1]);
}

#endif
