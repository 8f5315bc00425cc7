/* SPDX-License-Identifier: Apache-2.0
 * mhc_rows.h: what the vector kernels share: rows of D elements of any dtype, and coefficients with tokens in lanes. */
#ifndef COT_MHC_ROWS_H
#define COT_MHC_ROWS_H

#include "mhc_tiling.h"
#include "simd/simd.h"

/* clang-format off */
#define MHC_EACH_DTYPE(instance) instance(F32) instance(F16) instance(BF16)
#define MHC_EACH_N(instance) \
    instance(1) instance(2) instance(3) instance(4) instance(5) instance(6) instance(7) instance(8)
/* clang-format on */

/* Columns that a lane adds up in one run: 32 terms, whose rounding is below that of the scalar kernel's blocks. */
enum { MHC_RUN = 32 * VW };

/* ---- rows of D ---------------------------------------------------------------------------------------- */

/* The address of element [token, stream i, column d] of [B,T,n,D], or of [token, d] of [B,T,D] with i = 0. */
static inline char *mhc_row(const cot_tensor *tensor, int64_t token, int64_t i, int64_t d)
{
    const int64_t stream = tensor->rank == 4 ? i * tensor->stride[2] : 0;
    return (char *)tensor->data + (mhc_token(tensor, token) + stream + d) * (int64_t)cot_dtype_size(tensor->dtype);
}

V_INLINE int64_t mhc_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

/* As many of VW elements as there are, n of any value; the rest is 0. */
V_INLINE vf mhc_load_some(const char *p, cot_dtype dtype, int64_t n)
{
    return n >= VW ? v_load_as(p, dtype) : n > 0 ? v_load_n_as(p, dtype, (int)n) : v_zero();
}

V_INLINE void mhc_store_some(char *p, cot_dtype dtype, vf a, int64_t n, bool stream)
{
    if (n >= VW && stream)
        v_stream_as(p, dtype, a);
    else if (n >= VW)
        v_store_as(p, dtype, a);
    else if (n > 0)
        v_store_n_as(p, dtype, a, (int)n);
}

/* Outputs beyond this footprint (bytes of x) bypass the caches, if their rows are whole cache lines. */
enum { MHC_STREAM_BYTES = 8 << 20 };

static inline bool mhc_streams(const cot_tensor *out, const mhc_sizes *sizes)
{
    if (!cot_present(out) || (uintptr_t)out->data % COT_ALIGNMENT != 0)
        return false;
    const int64_t size = (int64_t)cot_dtype_size(out->dtype);
    bool whole = sizes->D * size % COT_ALIGNMENT == 0;
    for (int axis = 0; axis < out->rank - 1; axis++)
        whole = whole && out->stride[axis] * size % COT_ALIGNMENT == 0;
    return whole && (double)sizes->tokens * (double)sizes->n * (double)sizes->D * (double)size >= MHC_STREAM_BYTES;
}

/* ---- coefficients: tile[e][ld] has element e of up to ld tokens ----------------------------------------- */

/* The offset of element e of a token's row of coefficients, which may be a number, a vector or a matrix. */
static inline int64_t mhc_coefficient(const cot_tensor *tensor, int64_t e)
{
    if (tensor->rank == 4)
        return e / tensor->shape[3] * tensor->stride[2] + e % tensor->shape[3] * tensor->stride[3];
    return tensor->rank == 3 ? e * tensor->stride[2] : 0;
}

/* Of all elements: divisions for every token, too, took pre's forward half a cycle for 16 elements of x. */
static inline void mhc_coefficients(int64_t offsets[MHC_MAX_M], const cot_tensor *tensor, int64_t elements)
{
    for (int64_t e = 0; cot_present(tensor) && e < elements; e++)
        offsets[e] = mhc_coefficient(tensor, e);
}

/* Tokens [token, token+count) of an f32 tensor; 0 for the rest of the tile, and all of it where the tensor is absent. */
static inline void mhc_load_tile(float *tile, int64_t ld, const cot_tensor *tensor, int64_t token, int64_t count,
                                 int64_t elements)
{
    int64_t offsets[MHC_MAX_M];
    memset(tile, 0, (size_t)(ld * elements) * sizeof *tile);
    mhc_coefficients(offsets, tensor, elements);
    for (int64_t t = 0; cot_present(tensor) && t < count; t++) {
        const float *row = (const float *)tensor->data + mhc_token(tensor, token + t);
        for (int64_t e = 0; e < elements; e++)
            tile[e * ld + t] = row[offsets[e]];
    }
}

static inline void mhc_store_tile(const float *tile, int64_t ld, const cot_tensor *tensor, int64_t token, int64_t count,
                                  int64_t elements)
{
    int64_t offsets[MHC_MAX_M];
    mhc_coefficients(offsets, tensor, elements);
    for (int64_t t = 0; cot_present(tensor) && t < count; t++) {
        float *row = (float *)tensor->data + mhc_token(tensor, token + t);
        for (int64_t e = 0; e < elements; e++)
            row[offsets[e]] = tile[e * ld + t];
    }
}

/* sigmoid(z) = e / (1 + e), which keeps its relative accuracy down to subnormals: post_scale * sigmoid(-100) counts. */
V_INLINE vf mhc_sigmoid(vf z)
{
    const vf e = v_exp(v_min(v_set1(80), z)); /* beyond 17 it is 1 */
    return v_div(e, v_add(v_set1(1), e));
}

/* Parameters of one element each. */
static inline float mhc_parameter(const cot_tensor *tensor, int64_t j)
{
    return ((const float *)tensor->data)[j * tensor->stride[0]];
}

#endif
