/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_products.h: common parts of the tiled kernels: packing of the operands, and the product for z.
 *
 *     z = xe_0 W_0 + .. + xe_{K-1} W_{K-1},   xe_k: rows k, k+1, .. of xe [K-1+T][Din]; W_k [Din][Dout]
 *
 * im2col would store xe_0 .. xe_{K-1} side by side. Here all are the same memory, loaded from row k on. */
#ifndef COT_CAUSAL_CONV1D_DENSE_PRODUCTS_H
#define COT_CAUSAL_CONV1D_DENSE_PRODUCTS_H

#include "causal_conv1d_dense_tiling.h"
#include "simd/matmul_pack.h"

enum {
    TILE = CONV1D_TILE,
    BLOCK_ROWS = CONV1D_BLOCK_ROWS,
    BLOCK_COLUMNS = CONV1D_BLOCK_COLUMNS,
    TILE_ELEMENTS = TILE * TILE
};
_Static_assert((int)TILE == (int)PANEL, "TILE must be the tile of simd/matmul.h");

enum {
    FLOAT32 = MT_SAME_FORM || sizeof(mt) == 6, /* operands keep the full precision of float32 */
    SUM_TERMS = MT_SAME_FORM ? CONV1D_SUM_TERMS
                : FLOAT32    ? CONV1D_SPLIT3_SUM_TERMS
                             : CONV1D_AMX_SUM_TERMS,
};

/* The buffers of an item, in the scratch memory of its thread. */
typedef struct product_buffers {
    _Alignas(64) float product[BLOCK_ROWS * BLOCK_COLUMNS];
    _Alignas(64) float partial[FLOAT32 ? BLOCK_ROWS * BLOCK_COLUMNS
                                       : 1]; /* sum of one block of terms, before it is added to product */
} product_buffers;

_Static_assert(sizeof(product_buffers) <= CONV1D_DENSE_SCRATCH(FLOAT32),
               "product_buffers must fit in the thread's scratch");

typedef struct operands {
    const conv1d_dense_sizes *sizes;
    conv1d_dense_layout l;
    const cot_tensor *inputs, *initial_state, *weight, *bias;
    mt *x;              /* [B] A form of xe */
    mt *x_even, *x_odd; /* [B] B form of xe from row 0 and from row 1 on: a tile begins at an even row */
    mt *w, *wt;         /* B form of W_0 .. W_{K-1}, and of W_{K-1}^T .. W_0^T */
} operands;

/* ---- xe ------------------------------------------------------------------------------------------------- */

/* Strips of TILE rows per sequence, one item each: of the state, of the tokens, and one of zeros. At least TILE rows
 * of zeros follow the last token, because whole tiles are loaded. */
static int64_t input_strip_count(const operands *o)
{
    return cot_round_up(o->sizes->K - 1, TILE) / TILE + o->l.T / TILE + 1;
}

static void pack_inputs_item(void *memory, int64_t item)
{
    const operands *o = memory;
    const conv1d_dense_sizes *sizes = o->sizes;
    const int64_t state_columns = sizes->K - 1, b = item / input_strip_count(o), strip = item % input_strip_count(o);
    const int64_t state_strips = cot_round_up(state_columns, TILE) / TILE;
    const bool state = strip < state_strips;
    const cot_tensor *source = state ? o->initial_state : o->inputs;
    const int64_t first = state ? strip * TILE : (strip - state_strips) * TILE; /* column of `source` */
    const int64_t remaining = (state ? state_columns : sizes->T) - first, row = state ? first : state_columns + first;
    const int64_t rows = cot_is_present(source) && remaining > 0 ? cot_min(remaining, TILE) : 0;
    const int64_t copied_rows =
        state ? cot_min(remaining, TILE) : TILE; /* the first token's row follows the last of the state */
    for (int64_t i = 0; i < o->l.Din; i += TILE) {
        _Alignas(64) float tile[TILE_ELEMENTS];
        _Alignas(64) mt packed[TILE_ELEMENTS];
        mt_view view = {NULL, source->dtype, source->stride[2], source->stride[1]};
        if (rows > 0)
            view.data =
                (char *)source->data + (b * source->stride[0] + i * source->stride[1] + first * source->stride[2]) *
                                           mt_element_size(source->dtype);
        mt_load_tile(tile, &view, rows, rows > 0 ? sizes->Din - i : 0);
        mt_pack_a(packed, tile);
        memcpy(o->x + b * o->l.x_rows * o->l.Din + mt_offset(o->l.x_rows, row, i), packed,
               (size_t)(copied_rows * TILE) * sizeof(mt));
    }
}

static int64_t pack_inputs_item_count(const operands *o)
{
    return o->x != NULL && o->l.Din > 0 ? o->sizes->B * input_strip_count(o) : 0;
}

/* ---- weights -------------------------------------------------------------------------------------------- */

enum { TAPS_PER_LOAD = 8 }; /* taps that load_weights loads at a time */

/* Loads W[o0 + r, i0 + c, k0 + k] to [r][c*taps + k], with zeros outside of the tensor. */
static void load_weights(float *to, const operands *o, int64_t o0, int64_t i0, int64_t k0, int64_t taps)
{
    const cot_tensor *w = o->weight;
    const int64_t rows = cot_min(o->sizes->Dout - o0, TILE), columns = cot_min(o->sizes->Din - i0, TILE);
    const bool contiguous = w->stride[2] == 1 && w->stride[1] == o->sizes->K && taps == o->sizes->K;
    memset(to, 0, sizeof(float) * TILE * TILE * (size_t)taps);
    for (int64_t r = 0; r < rows; r++, to += TILE * taps) {
        const int64_t offset = (o0 + r) * w->stride[0] + i0 * w->stride[1] + k0 * w->stride[2];
        if (contiguous) {
            const char *source = (const char *)w->data + offset * mt_element_size(w->dtype);
            for (int64_t c = 0; c < columns * taps; c += VW) {
                const int n = (int)cot_min(columns * taps - c, VW);
                v_store_n(to + c, v_load_n_as(source + c * mt_element_size(w->dtype), w->dtype, n), n);
            }
            continue;
        }
        for (int64_t c = 0; c < columns; c++)
            for (int64_t k = 0; k < taps; k++)
                to[c * taps + k] = (float)cot_load_f64(w->data, w->dtype, offset + c * w->stride[1] + k * w->stride[2]);
    }
}

/* Packs a tile in B form: element (r, c) is taps_in[r*row + c*column]. */
static void pack_weight_tile(mt *b, const float *taps_in, int64_t row, int64_t column)
{
    for (int64_t r = 0; r < TILE; r += 2)
        for (int64_t c = 0; c < TILE; c += VW) {
            const float *source = taps_in + r * row + c * column;
            mt_store_b(b, TILE, r, c, v_gather(source, column, VW), v_gather(source + row, column, VW));
        }
}

/* Item: TILE x TILE channels, all taps. */
static void pack_weights_item(void *memory, int64_t item, void *scratch)
{
    const operands *o = memory;
    const int64_t K = o->sizes->K, in = o->l.Din / TILE, out = o->l.Dout / TILE, i = item % in, n = item / in;
    float *const taps_in = scratch; /* [TILE][TILE][TAPS_PER_LOAD] */
    for (int64_t k0 = 0; k0 < K; k0 += TAPS_PER_LOAD) {
        const int64_t taps = cot_min(K - k0, TAPS_PER_LOAD);
        load_weights(taps_in, o, n * TILE, i * TILE, k0, taps);
        for (int64_t k = 0; k < taps; k++) {
            if (o->w != NULL)
                pack_weight_tile(o->w + ((n * in + i) * K + k0 + k) * TILE_ELEMENTS, taps_in + k, taps, TILE * taps);
            if (o->wt != NULL)
                pack_weight_tile(o->wt + ((i * out + n) * K + K - 1 - k0 - k) * TILE_ELEMENTS, taps_in + k, TILE * taps,
                                 taps);
        }
    }
}

static int64_t pack_weights_item_count(const operands *o)
{
    return o->w != NULL || o->wt != NULL ? (o->l.Din / TILE) * (o->l.Dout / TILE) : 0;
}

/* ---- products ------------------------------------------------------------------------------------------- */

/* Computes buffers->product [rows][columns], in panels of BLOCK_ROWS rows: the sum over the taps of A's rows,
 * shifted by the tap, times B. A has k columns in panels of a_rows rows, B has panels of k*taps rows. SUM_TERMS
 * terms are summed at a time, over columns of A and taps. With float32 operands, each such block is summed
 * separately and then added. As one sum, the errors with 40 taps were 50 % larger than those of the scalar kernel.
 * For 16-bit outputs this does not matter, because their rounding is coarser. */
static inline __attribute__((unused)) void multiply(int64_t rows, int64_t columns, int64_t k, int64_t taps, const mt *a,
                                                    int64_t a_rows, const mt *b, product_buffers *buffers)
{
    const int64_t tiles_per_sum = SUM_TERMS / TILE; /* tiles of A's columns, times taps, at a time */
    const int64_t channel_step = taps < tiles_per_sum ? tiles_per_sum / taps * TILE : TILE;
    float *const c = buffers->product, *const partial = buffers->partial;
    mt_state saved;
    if (k == 0)
        memset(c, 0, sizeof(float) * BLOCK_ROWS * BLOCK_COLUMNS);
    mt_begin(&saved);
    for (int64_t p = 0; p < k; p += channel_step)
        for (int64_t tap = 0; tap < taps; tap += tiles_per_sum) {
            const bool separate = FLOAT32 && p + tap > 0;
            mt_product_taps(rows, columns, cot_min(channel_step, k - p), cot_min(tiles_per_sum, taps - tap),
                            a + mt_offset(a_rows, tap, p), a_rows, b + (p * taps + tap * TILE) * PANEL, k * taps,
                            separate ? partial : c, BLOCK_ROWS, !FLOAT32 && p + tap > 0, NULL);
            for (int64_t n = 0; separate && n < columns; n += TILE)
                for (int64_t i = 0; i < rows * TILE; i += VW) {
                    float *sum = c + mt_offset(BLOCK_ROWS, 0, n) + i;
                    v_store(sum, v_add(v_load(sum), v_load(partial + mt_offset(BLOCK_ROWS, 0, n) + i)));
                }
        }
    mt_end(&saved);
}

/* ---- blocks of tokens by channels ------------------------------------------------------------------------ */

/* Rows [t, t+rows) by columns [n, n+columns) of sequence b, in whole tiles. */
typedef struct output_block {
    int64_t b, t, n, rows, columns;
} output_block;

static inline int64_t block_count(const operands *o, int64_t channels)
{
    return o->sizes->B * (cot_round_up(o->l.T, BLOCK_ROWS) / BLOCK_ROWS) *
           (cot_round_up(channels, BLOCK_COLUMNS) / BLOCK_COLUMNS);
}

/* Consecutive items have the same rows and consecutive blocks of channels. */
static inline output_block block_at(const operands *o, int64_t channels, int64_t item)
{
    const int64_t column_blocks = cot_round_up(channels, BLOCK_COLUMNS) / BLOCK_COLUMNS,
                  row_blocks = cot_round_up(o->l.T, BLOCK_ROWS) / BLOCK_ROWS;
    output_block blk = {.b = item / column_blocks / row_blocks,
                        .t = item / column_blocks % row_blocks * BLOCK_ROWS,
                        .n = item % column_blocks * BLOCK_COLUMNS};
    blk.rows = cot_min(o->l.T - blk.t, BLOCK_ROWS);
    blk.columns = cot_min(channels - blk.n, BLOCK_COLUMNS);
    return blk;
}

/* Computes z without bias, for a block of tokens and output channels. */
static inline __attribute__((unused)) void multiply_z(const operands *o, const output_block *blk,
                                                      product_buffers *buffers)
{
    const int64_t rows = o->l.x_rows, terms = o->l.Din * o->sizes->K;
    multiply(blk->rows, blk->columns, o->l.Din, o->sizes->K,
             o->x + blk->b * rows * o->l.Din + mt_offset(rows, blk->t, 0), rows, o->w + blk->n * terms, buffers);
}

/* Loads bias [n, n+TILE) as float32, with zeros outside of the tensor. */
static inline __attribute__((unused)) void load_bias(float *to, const operands *o, int64_t n)
{
    for (int64_t c = 0; c < TILE; c++)
        to[c] = cot_is_present(o->bias) && n + c < o->sizes->Dout
                    ? (float)cot_load_f64(o->bias->data, o->bias->dtype, (n + c) * o->bias->stride[0])
                    : 0;
}

/* The view of a [B,channels,T] tensor from token t and channel n on. */
static inline __attribute__((unused)) mt_view tokens_view(const cot_tensor *tensor, int64_t b, int64_t t, int64_t n)
{
    return (mt_view){(char *)tensor->data + (b * tensor->stride[0] + n * tensor->stride[1] + t * tensor->stride[2]) *
                                                mt_element_size(tensor->dtype),
                     tensor->dtype, tensor->stride[2], tensor->stride[1]};
}

#endif
