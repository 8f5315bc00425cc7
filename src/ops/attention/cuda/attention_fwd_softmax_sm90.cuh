/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_softmax_sm90.cuh: the forward on Hopper, between its two products: scores become P, against references.
 * attention_fwd_sm90.cuh has the whole in view. */
#ifndef COT_ATTENTION_FWD_SOFTMAX_SM90_CUH
#define COT_ATTENTION_FWD_SOFTMAX_SM90_CUH

#include "attention_fwd_load_sm90.cuh"
#include "attention_softcap.cuh"

#include "../../../cuda/device/activation.cuh"
#include "../../../cuda/device/mma.cuh"
#include "../../../cuda/device/quad.cuh"

/* What a row of queries knows of its scores; of this thread's two rows. */
struct row_state {
    float reference[2]; /* see above, or -inf */
    float sum[2];       /* of this thread's own P */
};

/* Scores that are not Q K^T alone: those of a negative scale, and those under softcap. */
template <class F, int N> static __device__ __forceinline__ void modify(const attention_fwd_call &c, float (&scores)[N])
{
    if (c.cap.scale != 0.0f) {
        attention_cap<N % 16 == 0 && F::GROUPS == 2 ? 16 : 8>(c.cap, scores);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        scores[i] = -scores[i]; /* a negative scale */
}

/* A thread's columns of a tile up to one: bit 2i + j is column 8i + j. */
static __device__ __forceinline__ uint32_t columns_below(int column)
{
    const int clamped = min(max(column, 0), 128), number = clamped / 8 * 2 + min(clamped % 8, 2);
    return (uint32_t)((1ull << number) - 1);
}

/* Of keys from `key` on, what a row does not see. A border crosses few of a tile's columns: those that a warp's rows see whole are
 * passed over. */
template <class F, int N>
static __device__ __forceinline__ void hide(const attention_tile &t, int key, int row, float (&scores)[N])
{
    uint32_t seen[2]; /* by this thread's two rows */
    const int column = key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = row + 8 * half;
        seen[half] = columns_below(min(t.last + own + 1, t.Tk) - column) & ~columns_below(t.first + own - column);
    }
    enum { TOGETHER = F::ALL ? 16 : 32 /* scores, of twice as many columns */, BITS = (1 << TOGETHER / 2) - 1 };
#pragma unroll
    for (int from = 0; from < N; from += TOGETHER) {
        if (__all_sync(0xffffffffu, (seen[0] & seen[1] & (uint32_t)BITS << from / 2) == (uint32_t)BITS << from / 2))
            continue;
#pragma unroll
        for (int i = from; i < N && i < from + TOGETHER; i++)
            if (!(seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1))
                scores[i] = __int_as_float(0xff800000);
    }
}

/* The least of three that are not negative: as integers, which are compared three at a time. */
static __device__ __forceinline__ float least_bits(float a, float b, float c)
{
    float d; /* not in C++: conversions to integers come before the wait for the product, which serialises it */
    asm("{\n    .reg .s32 x, y, z;\n    mov.b32 x, %1;\n    mov.b32 y, %2;\n    mov.b32 z, %3;\n    min.s32 x, x, y;\n"
        "    min.s32 x, x, z;\n    mov.b32 %0, x;\n}"
        : "=f"(d)
        : "f"(a), "f"(b), "f"(c));
    return d;
}

/* The largest of this thread's scores in each of its rows. */
template <int N> static __device__ __forceinline__ void find_largest(const float (&scores)[N], float (&most)[2])
{
    float top[8];
#pragma unroll
    for (int i = 0; i < N; i++)
        top[i % 8] = i < 8 ? scores[i] : fmaxf(top[i % 8], scores[i]);
#pragma unroll
    for (int half = 0; half < 2; half++)
        most[half] = fmaxf(fmaxf(top[2 * half], top[2 * half + 1]), fmaxf(top[2 * half + 4], top[2 * half + 5]));
}

/* Brings the references up to the largest of this thread's exponents, where that is 2^ROOM more: only then must the threads of a
 * row agree. base: what exponents are held against. Returns whether O must be multiplied by `factor`. */
template <class F, bool FIRST, int N>
static __device__ __forceinline__ bool refer(const attention_fwd_call &c, const float (&scores)[N], row_state &state,
                                             float (&base)[2], float (&factor)[2])
{
    float most[2];
    find_largest(scores, most);
    const float none = __int_as_float(0xff800000);
    bool rescale = FIRST;
    most[0] *= c.scale_log2, most[1] *= c.scale_log2;
    if (!FIRST) /* no number where no key has been seen: not so */
        rescale = __any_sync(0xffffffffu, most[0] - state.reference[0] > (float)F::ROOM ||
                                              most[1] - state.reference[1] > (float)F::ROOM);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = state.reference[half];
        if (rescale)
            state.reference[half] = FIRST ? cot_quad_max(most[half]) : fmaxf(cot_quad_max(most[half]), before);
        base[half] = state.reference[half] == none ? 0.0f : state.reference[half];
        if (!FIRST && rescale) {
            factor[half] = cot_ex2(before - base[half]);
            state.sum[half] *= factor[half];
        }
    }
    return rescale;
}

/* Scores become P. */
template <bool FIRST, int N>
static __device__ __forceinline__ void exponentiate(const attention_fwd_call &c, const float (&base)[2],
                                                    float (&scores)[N], row_state &state)
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; i++) {
        scores[i] = cot_ex2(fmaf(scores[i], c.scale_log2, -base[i / 2 % 2]));
        sum[i % 4] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        state.sum[half] = (FIRST ? 0.0f : state.sum[half]) + (sum[2 * half] + sum[2 * half + 1]);
}

/* Scores of which a warp's rows see all become P against the references as they are, softcap as its short series, without a look
 * at them before. A row's sum, of nothing that is negative, tells whether P was too large. The series grows with the score
 * wherever it is, so that the least P and the sum tell whether it was right: the scores' own largest squares would, too, but
 * ptxas then puts all FMA before all exponentials. Returns whether P will do; if not, the scores are gone, and small says whether
 * there is hope for the next ones. */
template <class F, int N>
static __device__ __forceinline__ bool weigh_at_once(const attention_fwd_call &c, float (&scores)[N], row_state &state,
                                                     bool &small)
{
    float sum[2] = {0.0f, 0.0f}, least[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const int half = i / 2 % 2;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float &score = scores[i + j];
            float factor = c.scale_log2;
            if (F::ALL) {
                const float square = score * score;
                factor = fmaf(fmaf(square, c.cap.brief[2], c.cap.brief[1]), square, c.cap.brief[0]);
            }
            score = cot_ex2(fmaf(score, factor, -state.reference[half]));
        }
        if (F::ALL)
            least[half] = least_bits(least[half], scores[i], scores[i + 1]);
        sum[half] += scores[i] + scores[i + 1];
    }
    /* Not where there is no number, or no reference. */
    bool near = true, right = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (F::ALL) {
            const float unit = cot_ex2(-state.reference[half]);
            near = near && sum[half] <= unit * c.cap.above && least[half] >= unit * c.cap.below;
        }
        right = right && near && sum[half] <= (float)(1 << F::ROOM);
    }
    right = __all_sync(0xffffffffu, right);
#pragma unroll
    for (int half = 0; half < 2; half++)
        state.sum[half] += right ? sum[half] : 0.0f; /* sums under a branch would be left for it to make */
    if (F::ALL && !right)
        small = __all_sync(0xffffffffu, near);
    return right;
}

/* A warp's scores once more, where weigh_at_once was wrong: the other warps of the group need not know. Sixteen keys in each
 * loop, or all loads come first, for which large sizes have no registers. */
template <class F>
static __device__ __forceinline__ void score_again(float (&scores)[F::KEYS / 2], const unsigned char *q,
                                                   const unsigned char *k)
{
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP / WARP;
    const uint32_t x = cot_shared_address(q) + (warp * 16 + lane % 16) * ROW, x_unit = (lane / 16 ^ lane % 8) * 16;
    const uint32_t y = cot_shared_address(k) + (lane % 8 + lane / 16 * 8) * ROW,
                   y_unit = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
    for (int n = 0; n < F::KEYS / 16; n++) {
        float product[2][4] = {};
#pragma unroll 1
        for (int i = 0; i < F::D / 16; i++) {
            uint32_t rows[4], columns[4];
            cot_ldmatrix_x4(rows, x + i / 4 * (F::QUERIES * ROW) + (x_unit ^ i % 4 * 32));
            cot_ldmatrix_x4(columns, y + n * (16 * ROW) + i / 4 * (F::KEYS * ROW) + (y_unit ^ i % 4 * 32));
#pragma unroll
            for (int j = 0; j < 2; j++)
                if constexpr (cot_is_f16<typename F::E>)
                    cot_mma_f16(product[j], rows[0], rows[1], rows[2], rows[3], columns[2 * j], columns[2 * j + 1]);
                else
                    cot_mma_bf16(product[j], rows[0], rows[1], rows[2], rows[3], columns[2 * j], columns[2 * j + 1]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            scores[8 * n + i] = product[i / 4][i % 4];
    }
}

/* Scores of keys from `key` on become P in float32. ragged: some must not be seen. Returns whether O must be multiplied by
 * `factor`. */
template <class F, bool FIRST, int N>
static __device__ __forceinline__ bool weigh(const attention_fwd_call &c, const attention_tile &t, int key, int row,
                                             bool ragged, float (&scores)[N], row_state &state, float (&factor)[2])
{
    if (F::ALL)
        modify<F>(c, scores);
    if (ragged)
        hide<F>(t, key, row, scores);
    float base[2];
    const bool rescale = refer<F, FIRST>(c, scores, state, base, factor);
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
