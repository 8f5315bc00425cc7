/* SPDX-License-Identifier: Apache-2.0
 * mhc_rows.h: helpers of the vector kernels: rows of D elements of any dtype, and the coefficients of a block of
 * tokens. */
#ifndef COT_MHC_ROWS_H
#define COT_MHC_ROWS_H

#include "mhc_tiling.h"
#include "simd/simd.h"

/* clang-format off */
#define MHC_FOR_EACH_DTYPE(instance) instance(F32) instance(F16) instance(BF16)
#define MHC_FOR_EACH_N(instance) \
    instance(1) instance(2) instance(3) instance(4) instance(5) instance(6) instance(7) instance(8)
/* clang-format on */

/* Columns that one run sums: 32 terms a lane. Their rounding error is below that of the scalar kernel's blocks. */
enum { MHC_RUN = 32 * VW };

/* ---- rows of D ---------------------------------------------------------------------------------------- */

/* Address of element [token, stream i, column d] of [B,T,n,D], or of [token, d] of [B,T,D] with i = 0. */
static inline char *mhc_row(const cot_tensor *tensor, int64_t token, int64_t i, int64_t d)
{
    const int64_t stream = tensor->rank == 4 ? i * tensor->stride[2] : 0;
    return (char *)tensor->data +
           (mhc_token_offset(tensor, token) + stream + d) * (int64_t)cot_dtype_size(tensor->dtype);
}

V_INLINE int64_t mhc_element_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

/* Loads at most VW of the n remaining elements; other lanes are 0. n may be 0 or negative. */
V_INLINE vf mhc_load_partial(const char *p, cot_dtype dtype, int64_t n)
{
    return n >= VW ? v_load_as(p, dtype) : n > 0 ? v_load_n_as(p, dtype, (int)n) : v_zero();
}

V_INLINE void mhc_store_partial(char *p, cot_dtype dtype, vf a, int64_t n, bool stream)
{
    if (n >= VW && stream)
        v_stream_as(p, dtype, a);
    else if (n >= VW)
        v_store_as(p, dtype, a);
    else if (n > 0)
        v_store_n_as(p, dtype, a, (int)n);
}

/* Stores the first n elements of a and b, a at p and b directly after it. */
V_INLINE void mhc_store_pair(char *p, cot_dtype dtype, vf a, vf b, int64_t n, bool stream)
{
    if (n >= 2 * VW && stream)
        v_stream2_as(p, dtype, a, b);
    else if (n >= 2 * VW)
        v_store2_as(p, dtype, a, b);
    else {
        mhc_store_partial(p, dtype, a, n, stream);
        mhc_store_partial(p + VW * mhc_element_size(dtype), dtype, b, n - VW, stream);
    }
}

/* Outputs bypass the caches if x has at least this many bytes and the output's rows are whole cache lines. */
enum { MHC_STREAM_BYTES = 8 << 20 };

static inline bool mhc_should_stream(const cot_tensor *out, const mhc_sizes *sizes)
{
    if (!cot_is_present(out) || (uintptr_t)out->data % COT_ALIGNMENT != 0)
        return false;
    const int64_t size = (int64_t)cot_dtype_size(out->dtype);
    bool whole_lines = sizes->D * size % COT_ALIGNMENT == 0;
    for (int axis = 0; axis < out->rank - 1; axis++)
        whole_lines = whole_lines && out->stride[axis] * size % COT_ALIGNMENT == 0;
    return whole_lines &&
           (double)sizes->tokens * (double)sizes->n * (double)sizes->D * (double)size >= MHC_STREAM_BYTES;
}

/* ---- coefficients[e][ld]: element e of up to ld tokens --------------------------------------------------- */

/* Offset of element e in a token's coefficients, which are a scalar, a vector or a matrix. */
static inline int64_t mhc_coefficient_offset(const cot_tensor *tensor, int64_t e)
{
    if (tensor->rank == 4)
        return e / tensor->shape[3] * tensor->stride[2] + e % tensor->shape[3] * tensor->stride[3];
    return tensor->rank == 3 ? e * tensor->stride[2] : 0;
}

/* Offsets of all elements. With the divisions repeated for every token, pre's forward took 0.5 cycles more for 16
 * elements of x. */
static inline void mhc_coefficient_offsets(int64_t offsets[MHC_MAX_M], const cot_tensor *tensor, int64_t elements)
{
    for (int64_t e = 0; cot_is_present(tensor) && e < elements; e++)
        offsets[e] = mhc_coefficient_offset(tensor, e);
}

/* Loads the coefficients of tokens [token, token+count) from an f32 tensor. The columns from `count` on are set to 0.
 * If the tensor is absent, all columns are set to 0. */
static inline void mhc_load_coefficients(float *coefficients, int64_t ld, const cot_tensor *tensor, int64_t token,
                                         int64_t count, int64_t elements)
{
    int64_t offsets[MHC_MAX_M];
    memset(coefficients, 0, (size_t)(ld * elements) * sizeof *coefficients);
    mhc_coefficient_offsets(offsets, tensor, elements);
    for (int64_t t = 0; cot_is_present(tensor) && t < count; t++) {
        const float *row = (const float *)tensor->data + mhc_token_offset(tensor, token + t);
        for (int64_t e = 0; e < elements; e++)
            coefficients[e * ld + t] = row[offsets[e]];
    }
}

/* Stores the coefficients of tokens [token, token+count) in an f32 tensor. Does nothing if the tensor is absent. */
static inline void mhc_store_coefficients(const float *coefficients, int64_t ld, const cot_tensor *tensor,
                                          int64_t token, int64_t count, int64_t elements)
{
    int64_t offsets[MHC_MAX_M];
    mhc_coefficient_offsets(offsets, tensor, elements);
    for (int64_t t = 0; cot_is_present(tensor) && t < count; t++) {
        float *row = (float *)tensor->data + mhc_token_offset(tensor, token + t);
        for (int64_t e = 0; e < elements; e++)
            row[offsets[e]] = coefficients[e * ld + t];
    }
}

/* sigmoid(z) = e / (1 + e). This form keeps relative accuracy down to subnormals: post_scale * sigmoid(-100) is not
 * 0. */
V_INLINE vf mhc_sigmoid(vf z)
{
    const vf e = v_exp(v_min(v_set1(80), z)); /* sigmoid(z) is 1 beyond 17 */
    return v_div(e, v_add(v_set1(1), e));
}

/* Element j of a parameter with one axis. */
static inline float mhc_parameter(const cot_tensor *tensor, int64_t j)
{
    return ((const float *)tensor->data)[j * tensor->stride[0]];
}

#endif
