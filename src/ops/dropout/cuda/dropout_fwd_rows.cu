/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_fwd_rows.cu: y = c * m * act(x + bias) + residual, and the mask where it is wanted. A thread loads all its rows
 * before it uses one, and draws their masks while they come. */
#include "dropout_tile.cuh"

constexpr int LANES = DROPOUT_FWD_LANES, APART = DROPOUT_THREADS / LANES;

/* The rows that a thread has in registers at once. */
template <typename E> constexpr int batch = sizeof(E) == 4 ? 2 : 4;

template <int ACCESS>
static __device__ __forceinline__ void export_mask(const dropout_call &c, const place &p, int first, int i,
                                                   uint32_t keep)
{
    const int columns = ACCESS == SHIFTED && p.lane == 0 ? 0 : group_columns(c, p);
    if (columns == 0)
        return;
    keep &= (1u << columns) - 1;
    if (c.mask_bits_out.data != nullptr)
        mask_row_of<ACCESS, LANES>(c, p, c.mask_bits_out, first, i)[p.group * c.mask_bits_out.step] = (uint8_t)keep;
    if (c.mask_out.data == nullptr)
        return;
    uint8_t *to =
        mask_row_of<ACCESS, LANES>(c, p, c.mask_out, first, i) + (int64_t)COT_DROPOUT_GROUP * p.group * c.mask_out.step;
    const cot_words<2> bytes = {(keep & 15u) * 0x00204081u & 0x01010101u, (keep >> 4) * 0x00204081u & 0x01010101u};
    if (ACCESS == PLAIN) {
        cot_store_words<2>(to, bytes);
    } else {
#pragma unroll 1
        for (int j = 0; j < columns; j++)
            to[j * c.mask_out.step] = (uint8_t)(keep >> j & 1u);
    }
}

template <typename E, int ACTIVATION> static __device__ __forceinline__ float activate(float z)
{
    constexpr bool PRECISE = sizeof(E) == 4;
    switch (ACTIVATION) {
    case COT_ACTIVATION_SILU: return cot_silu<PRECISE>(z);
    case COT_ACTIVATION_RELU: return cot_max_nan(z, 0.0f);
    case COT_ACTIVATION_GELU_TANH: return cot_gelu_tanh<PRECISE>(z);
    case COT_ACTIVATION_GELU_ERF: return cot_gelu_erf<PRECISE>(z);
    default: return z;
    }
}

/* Turns a batch of x into y, and writes what it can write as a whole. */
template <int ACCESS, int ACTIVATION, typename E, int BATCH>
static __device__ __forceinline__ void finish(const dropout_call &c, const place &p, const walk &y, int first,
                                              elements<E> (&x)[BATCH], const elements<E> (&residual)[BATCH],
                                              const float (&bias)[COT_DROPOUT_GROUP], const uint32_t (&keep)[BATCH])
{
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float values[COT_DROPOUT_GROUP], added[COT_DROPOUT_GROUP];
        unpack(x[i], values);
        if (c.residual.data != nullptr) {
            unpack(residual[i], added);
        } else {
#pragma unroll
            for (int j = 0; j < COT_DROPOUT_GROUP; j++)
                added[j] = -0.0f;
        }
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++) {
            const float value = activate<E, ACTIVATION>(values[j] + bias[j]);
            values[j] = fmaf(keep[i] >> j & 1u ? value : 0.0f, c.scale, added[j]);
        }
        pack(x[i], values);
        store<E, ACCESS, LANES>(p, y, first, i, x[i]);
    }
}

struct walks {
    walk x, residual, y;
};

template <typename E, int ACCESS>
static __device__ __forceinline__ void take_batch(const dropout_call &c, const place &p, const draws &from,
                                                  const walks &w, int first, const float (&bias)[COT_DROPOUT_GROUP])
{
    constexpr int BATCH = batch<E>;
    elements<E> x[BATCH], residual[BATCH];
    uint32_t keep[BATCH];
    load<E, ACCESS, LANES>(c, p, c.x, w.x, first, c.y.data != nullptr, x);
    load<E, ACCESS, LANES>(c, p, c.residual, w.residual, first, c.residual.data != nullptr, residual);
    find_keep<ACCESS, LANES, true>(c, p, from, first, keep);
    if (c.mask_out.data != nullptr || c.mask_bits_out.data != nullptr) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i * APART < p.left)
                export_mask<ACCESS>(c, p, first, i, keep[i]);
    }
    if (c.y.data == nullptr)
        return;
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        keep[i] = keep_of_elements<E, ACCESS, LANES>(c, p, first, i, keep[i]);
    switch (c.activation) {
    case COT_ACTIVATION_SILU: finish<ACCESS, COT_ACTIVATION_SILU>(c, p, w.y, first, x, residual, bias, keep); break;
    case COT_ACTIVATION_RELU: finish<ACCESS, COT_ACTIVATION_RELU>(c, p, w.y, first, x, residual, bias, keep); break;
    case COT_ACTIVATION_GELU_TANH:
        finish<ACCESS, COT_ACTIVATION_GELU_TANH>(c, p, w.y, first, x, residual, bias, keep);
        break;
    case COT_ACTIVATION_GELU_ERF:
        finish<ACCESS, COT_ACTIVATION_GELU_ERF>(c, p, w.y, first, x, residual, bias, keep);
        break;
    default: finish<ACCESS, COT_ACTIVATION_NONE>(c, p, w.y, first, x, residual, bias, keep);
    }
    store_parts<E, ACCESS, LANES>(c, p, c.y, w.y, first, x);
}

template <typename E, int ACCESS> static __device__ __forceinline__ void forward(const dropout_call &c)
{
    constexpr int BATCH = batch<E>;
    const place p = find_place<E, ACCESS, LANES>(c, c.x, DROPOUT_FWD_ROWS);
    float bias[COT_DROPOUT_GROUP];
    load_bias<E, ACCESS, LANES>(c, p, bias);
    const draws from = find_draws(c);
    walks w = {begin_walk<ACCESS, LANES>(p, c.x, sizeof(E)), begin_walk<ACCESS, LANES>(p, c.residual, sizeof(E)),
               begin_walk<ACCESS, LANES>(p, c.y, sizeof(E))};
#pragma unroll 1
    for (int i = 0; i < DROPOUT_FWD_ROWS; i += BATCH) {
        take_batch<E, ACCESS>(c, p, from, w, i * APART, bias);
        w.x.at += BATCH * w.x.apart;
        w.residual.at += BATCH * w.residual.apart;
        w.y.at += BATCH * w.y.apart;
    }
}

/* clang-format off */
#define KERNELS(dtype, E) \
    DROPOUT_KERNEL(dropout_fwd_rows_##dtype, 3, (forward<E, PLAIN>)) \
    DROPOUT_KERNEL(dropout_fwd_rows_##dtype##_shifted, (sizeof(E) == 4 ? 2 : 3), (forward<E, SHIFTED>)) \
    DROPOUT_KERNEL(dropout_fwd_rows_##dtype##_strided, 1, (forward<E, STRIDED>))
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KERNELS(f32, float)
/* clang-format on */
