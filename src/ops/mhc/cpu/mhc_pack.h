/* SPDX-License-Identifier: Apache-2.0
 * mhc_pack.h: packs phi * gamma and converts x, in chunks of columns of one stream (mhc_tiling.h), for pre's two
 * kernels. Rows of phi and of x are n*D elements apart, usually a power of two. Unpacked rows would share a few sets of
 * the L1 cache. */
#ifndef COT_MHC_PACK_H
#define COT_MHC_PACK_H

#include "mhc_rows.h"

typedef struct mhc_packing {
    const mhc_sizes *sizes;
    const cot_tensor *phi, *gamma;
    mhc_chunks chunks;
    void *weights;
} mhc_packing;

/* Row j of a chunk of W, with zeros up to a multiple of 4 vectors or the chunk's width. */
static void mhc_pack_row(float *out, const mhc_packing *p, int64_t chunk, int64_t j)
{
    const int64_t i = chunk / p->chunks.per_stream, begin = chunk % p->chunks.per_stream * p->chunks.width;
    const int64_t columns = cot_clamp(p->sizes->D - begin, 0, p->chunks.width);
    const int64_t phi_stride = p->phi->stride[1], gamma_stride = p->gamma->stride[1];
    const float *phi = (const float *)p->phi->data + j * p->phi->stride[0] + (i * p->sizes->D + begin) * phi_stride;
    const float *gamma = (const float *)p->gamma->data;
    for (int64_t d = 0; d < columns; d++)
        out[d] = phi[d * phi_stride];
    if (cot_is_present(p->gamma))
        for (int64_t d = 0; d < columns; d++)
            out[d] *= gamma[i * p->gamma->stride[0] + (begin + d) * gamma_stride];
    for (int64_t d = columns; d < cot_round_up(columns, 4 * VW) && d < p->chunks.width; d++)
        out[d] = 0;
}

/* Converts a row of a chunk of x to f32, with zeros up to a multiple of 4 vectors. */
V_INLINE void mhc_convert_row(float *out, const char *source, cot_dtype dtype, int64_t columns)
{
    for (int64_t d = 0; d < cot_round_up(columns, 4 * VW); d += VW)
        v_store(out + d, mhc_load_partial(source + d * mhc_element_size(dtype), dtype, columns - d));
}

#endif
