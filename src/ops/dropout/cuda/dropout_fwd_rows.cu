/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_fwd_rows.cu: y = c * m * act(x + bias) + residual, and optionally the mask. A thread issues the loads of a
 * batch of rows before it uses the first one, and generates their masks during the loads. */
#include "dropout_tile.cuh"

constexpr int THREADS_PER_ROW = DROPOUT_FWD_THREADS_PER_ROW, ROWS_PER_PASS = DROPOUT_THREADS / THREADS_PER_ROW;

/* The rows that a thread holds in registers at once. */
template <typename E> constexpr int batch_rows = sizeof(E) == 4 ? 2 : 4;

template <int ACCESS>
static __device__ __forceinline__ void store_mask(const dropout_call &c, const thread_tile &t, int batch_row, int i,
                                                  uint32_t keep)
{
    const int columns = ACCESS == SHIFTED && t.thread_in_row == 0 ? 0 : group_columns(c, t);
    if (columns == 0)
        return;
    keep &= (1u << columns) - 1;
    if (c.mask_bits_out.data != nullptr)
        mask_row_pointer<ACCESS, THREADS_PER_ROW>(c, t, c.mask_bits_out, batch_row,
                                                  i)[t.group * c.mask_bits_out.column_stride] = (uint8_t)keep;
    if (c.mask_out.data == nullptr)
        return;
    uint8_t *to = mask_row_pointer<ACCESS, THREADS_PER_ROW>(c, t, c.mask_out, batch_row, i) +
                  (int64_t)COT_DROPOUT_GROUP * t.group * c.mask_out.column_stride;
    /* The product spreads 4 bits to the lowest bits of 4 bytes. */
    const cot_words<2> bytes = {(keep & 15u) * 0x00204081u & 0x01010101u, (keep >> 4) * 0x00204081u & 0x01010101u};
    if (ACCESS == PLAIN) {
        cot_store_words<2>(to, bytes);
    } else {
#pragma unroll 1
        for (int j = 0; j < columns; j++)
            to[j * c.mask_out.column_stride] = (uint8_t)(keep >> j & 1u);
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

/* Replaces a batch of x by y, and stores the chunks that lie within the row. */
template <int ACCESS, int ACTIVATION, typename E, int BATCH>
static __device__ __forceinline__ void compute_y(const dropout_call &c, const thread_tile &t, const row_cursor &y,
                                                 int batch_row, fragment<E> (&x)[BATCH],
                                                 const fragment<E> (&residual)[BATCH],
                                                 const float (&bias)[COT_DROPOUT_GROUP], const uint32_t (&keep)[BATCH])
{
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float values[COT_DROPOUT_GROUP], residual_values[COT_DROPOUT_GROUP];
        unpack(x[i], values);
        if (c.residual.data != nullptr) {
            unpack(residual[i], residual_values);
        } else {
#pragma unroll
            for (int j = 0; j < COT_DROPOUT_GROUP; j++)
                residual_values[j] = -0.0f; /* keeps the sign of a zero */
        }
#pragma unroll
        for (int j = 0; j < COT_DROPOUT_GROUP; j++) {
            const float value = activate<E, ACTIVATION>(values[j] + bias[j]);
            values[j] = fmaf(keep[i] >> j & 1u ? value : 0.0f, c.scale, residual_values[j]);
        }
        pack(x[i], values);
        store_whole_chunks<E, ACCESS, THREADS_PER_ROW>(t, y, batch_row, i, x[i]);
    }
}

struct row_cursors {
    row_cursor x, residual, y;
};

template <typename E, int ACCESS>
static __device__ __forceinline__ void process_batch(const dropout_call &c, const thread_tile &t,
                                                     const philox_state &philox, const row_cursors &cursors,
                                                     int batch_row, const float (&bias)[COT_DROPOUT_GROUP])
{
    constexpr int BATCH = batch_rows<E>;
    fragment<E> x[BATCH], residual[BATCH];
    uint32_t keep[BATCH];
    load_rows<E, ACCESS, THREADS_PER_ROW>(c, t, c.x, cursors.x, batch_row, c.y.data != nullptr, x);
    load_rows<E, ACCESS, THREADS_PER_ROW>(c, t, c.residual, cursors.residual, batch_row, c.residual.data != nullptr,
                                          residual);
    group_keep_bits<ACCESS, THREADS_PER_ROW, true>(c, t, philox, batch_row, keep);
    if (c.mask_out.data != nullptr || c.mask_bits_out.data != nullptr) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (batch_row + i * ROWS_PER_PASS < t.rows_left)
                store_mask<ACCESS>(c, t, batch_row, i, keep[i]);
    }
    if (c.y.data == nullptr)
        return;
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        keep[i] = element_keep_bits<E, ACCESS, THREADS_PER_ROW>(c, t, batch_row, i, keep[i]);
    switch (c.activation) {
    case COT_ACTIVATION_SILU:
        compute_y<ACCESS, COT_ACTIVATION_SILU>(c, t, cursors.y, batch_row, x, residual, bias, keep);
        break;
    case COT_ACTIVATION_RELU:
        compute_y<ACCESS, COT_ACTIVATION_RELU>(c, t, cursors.y, batch_row, x, residual, bias, keep);
        break;
    case COT_ACTIVATION_GELU_TANH:
        compute_y<ACCESS, COT_ACTIVATION_GELU_TANH>(c, t, cursors.y, batch_row, x, residual, bias, keep);
        break;
    case COT_ACTIVATION_GELU_ERF:
        compute_y<ACCESS, COT_ACTIVATION_GELU_ERF>(c, t, cursors.y, batch_row, x, residual, bias, keep);
        break;
    default: compute_y<ACCESS, COT_ACTIVATION_NONE>(c, t, cursors.y, batch_row, x, residual, bias, keep);
    }
    store_partial_chunks<E, ACCESS, THREADS_PER_ROW>(c, t, c.y, cursors.y, batch_row, x);
}

template <typename E, int ACCESS> static __device__ __forceinline__ void forward(const dropout_call &c)
{
    constexpr int BATCH = batch_rows<E>;
    const thread_tile t = make_thread_tile<E, ACCESS, THREADS_PER_ROW>(c, c.x, DROPOUT_FWD_ROWS_PER_THREAD);
    float bias[COT_DROPOUT_GROUP];
    load_bias<E, ACCESS, THREADS_PER_ROW>(c, t, bias);
    const philox_state philox = load_philox(c);
    row_cursors cursors = {make_cursor<ACCESS, THREADS_PER_ROW>(t, c.x, sizeof(E)),
                           make_cursor<ACCESS, THREADS_PER_ROW>(t, c.residual, sizeof(E)),
                           make_cursor<ACCESS, THREADS_PER_ROW>(t, c.y, sizeof(E))};
#pragma unroll 1
    for (int i = 0; i < DROPOUT_FWD_ROWS_PER_THREAD; i += BATCH) {
        process_batch<E, ACCESS>(c, t, philox, cursors, i * ROWS_PER_PASS, bias);
        cursors.x.data += BATCH * cursors.x.pass_bytes;
        cursors.residual.data += BATCH * cursors.residual.pass_bytes;
        cursors.y.data += BATCH * cursors.y.pass_bytes;
    }
}

/* clang-format off */
#define KERNELS(dtype, E) \
    DROPOUT_KERNEL(dropout_fwd_rows, dtype, 3, (forward<E, PLAIN>)) \
    DROPOUT_KERNEL(dropout_fwd_rows, dtype##_shifted, (sizeof(E) == 4 ? 2 : 3), (forward<E, SHIFTED>)) \
    DROPOUT_KERNEL(dropout_fwd_rows, dtype##_strided, 1, (forward<E, STRIDED>))
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KERNELS(f32, float)
/* clang-format on */
