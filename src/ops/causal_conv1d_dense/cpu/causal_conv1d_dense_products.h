/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_products.h: what the tiled kernels share: the operands, and z.
 *
 *     z = xe_0 W_0 + .. + xe_{K-1} W_{K-1},   xe_k the rows from k on of xe [K-1+T][Din], W_k [Din][Dout]
 *
 * im2col would write xe_0 .. xe_{K-1} beside each other; here they are the same memory, read from row k on. */
#ifndef COT_CAUSAL_CONV1D_DENSE_PRODUCTS_H
#define COT_CAUSAL_CONV1D_DENSE_PRODUCTS_H

#include "causal_conv1d_dense_tiling.h"
#include "simd/matmul_pack.h"

enum { PART = CONV1D_PART, ROWS = CONV1D_ROWS, COLUMNS = CONV1D_COLUMNS, CELLS = PART * PART };
_Static_assert((int)PART == (int)MT, "parts are what products take");

enum {
    FLOAT32 = MT_SAME_FORM || sizeof(mt) == 6, /* operands keep all of it */
    TERMS = MT_SAME_FORM ? CONV1D_TERMS
            : FLOAT32    ? CONV1D_SPLIT3_TERMS
                         : CONV1D_AMX_TERMS,
};

/* An item's buffers, in its thread's slice of scratch. */
typedef struct product_buffers {
    _Alignas(64) float product[ROWS * COLUMNS];
    _Alignas(64) float stretch[FLOAT32 ? ROWS * COLUMNS : 1]; /* of a sum, before it is added */
} product_buffers;

_Static_assert(sizeof(product_buffers) <= CONV1D_DENSE_SCRATCH(FLOAT32), "they lie in a slice");

typedef struct operands {
    const conv1d_dense_sizes *z;
    conv1d_dense_layout l;
    const cot_tensor *inputs, *initial_state, *weight, *bias;
    mt *x;              /* [B] A form of xe */
    mt *x_even, *x_odd; /* [B] B form of xe, from row 0 and from row 1 on: a part begins at an even row */
    mt *w, *wt;         /* B form of the W_k, and of their transposes in the other order */
} operands;

/* ---- xe ------------------------------------------------------------------------------------------------- */

/* Item: PART rows of the state, or of tokens, of a sequence. Rows past the last token are zeros, PART of them at least,
 * because whole parts are read. */
static int64_t input_strips(const operands *o)
{
    return cot_round_up(o->z->K - 1, PART) / PART + o->l.T / PART + 1;
}

static void pack_inputs_item(void *memory, int64_t item)
{
    const operands *o = memory;
    const conv1d_dense_sizes *z = o->z;
    const int64_t history = z->K - 1, b = item / input_strips(o), strip = item % input_strips(o);
    const int64_t before = cot_round_up(history, PART) / PART;
    const bool state = strip < before;
    const cot_tensor *from = state ? o->initial_state : o->inputs;
    const int64_t first = state ? strip * PART : (strip - before) * PART; /* column of `from` */
    const int64_t left = (state ? history : z->T) - first, row = state ? first : history + first;
    const int64_t rows = cot_is_present(from) && left > 0 ? cot_min(left, PART) : 0;
    const int64_t kept = state ? cot_min(left, PART) : PART; /* the tokens' first rows follow the state's last */
    for (int64_t i = 0; i < o->l.Din; i += PART) {
        _Alignas(64) float tile[CELLS];
        _Alignas(64) mt packed[CELLS];
        mt_view view = {NULL, from->dtype, from->stride[2], from->stride[1]};
        if (rows > 0)
            view.data = (char *)from->data + (b * from->stride[0] + i * from->stride[1] + first * from->stride[2]) *
                                                 mt_element_size(from->dtype);
        mt_load_tile(tile, &view, rows, rows > 0 ? z->Din - i : 0);
        mt_pack_a(packed, tile);
        memcpy(o->x + b * o->l.x_rows * o->l.Din + mt_offset(o->l.x_rows, row, i), packed,
               (size_t)(kept * PART) * sizeof(mt));
    }
}

static int64_t pack_inputs_items(const operands *o)
{
    return o->x != NULL && o->l.Din > 0 ? o->z->B * input_strips(o) : 0;
}

/* ---- weights -------------------------------------------------------------------------------------------- */

enum { TAPS = 8 }; /* that are brought in at a time */

/* W[o0 + r, i0 + c, k0 + k] at [r][c*taps + k], zeros beyond the tensor. */
static void load_weights(float *to, const operands *o, int64_t o0, int64_t i0, int64_t k0, int64_t taps)
{
    const cot_tensor *w = o->weight;
    const int64_t rows = cot_min(o->z->Dout - o0, PART), columns = cot_min(o->z->Din - i0, PART);
    const bool run = w->stride[2] == 1 && w->stride[1] == o->z->K && taps == o->z->K;
    memset(to, 0, sizeof(float) * PART * PART * (size_t)taps);
    for (int64_t r = 0; r < rows; r++, to += PART * taps) {
        const int64_t at = (o0 + r) * w->stride[0] + i0 * w->stride[1] + k0 * w->stride[2];
        if (run) {
            const char *from = (const char *)w->data + at * mt_element_size(w->dtype);
            for (int64_t c = 0; c < columns * taps; c += VW) {
                const int n = (int)cot_min(columns * taps - c, VW);
                v_store_n(to + c, v_load_n_as(from + c * mt_element_size(w->dtype), w->dtype, n), n);
            }
            continue;
        }
        for (int64_t c = 0; c < columns; c++)
            for (int64_t k = 0; k < taps; k++)
                to[c * taps + k] = (float)cot_load_f64(w->data, w->dtype, at + c * w->stride[1] + k * w->stride[2]);
    }
}

/* A part's two rows of vectors from `columns` columns of `loaded`: a[r][..] = loaded[r*row + c*column]. */
static void pack_weight_part(mt *b, const float *loaded, int64_t row, int64_t column)
{
    for (int64_t r = 0; r < PART; r += 2)
        for (int64_t c = 0; c < PART; c += VW) {
            const float *from = loaded + r * row + c * column;
            mt_store_b(b, PART, r, c, v_gather(from, column, VW), v_gather(from + row, column, VW));
        }
}

/* Item: PART x PART channels, all taps. */
static void pack_weights_item(void *memory, int64_t item, void *scratch)
{
    const operands *o = memory;
    const int64_t K = o->z->K, in = o->l.Din / PART, out = o->l.Dout / PART, i = item % in, n = item / in;
    float *const loaded = scratch; /* [PART][PART][TAPS] */
    for (int64_t k0 = 0; k0 < K; k0 += TAPS) {
        const int64_t taps = cot_min(K - k0, TAPS);
        load_weights(loaded, o, n * PART, i * PART, k0, taps);
        for (int64_t k = 0; k < taps; k++) {
            if (o->w != NULL)
                pack_weight_part(o->w + ((n * in + i) * K + k0 + k) * CELLS, loaded + k, taps, PART * taps);
            if (o->wt != NULL)
                pack_weight_part(o->wt + ((i * out + n) * K + K - 1 - k0 - k) * CELLS, loaded + k, PART * taps, taps);
        }
    }
}

static int64_t pack_weights_items(const operands *o)
{
    return o->w != NULL || o->wt != NULL ? (o->l.Din / PART) * (o->l.Dout / PART) : 0;
}

/* ---- products ------------------------------------------------------------------------------------------- */

/* x->product [rows][columns], in panels of ROWS rows, = the sum over the taps of A's shifted rows times B: A of `k`
 * columns in panels of a_rows rows, B in panels of k*taps rows. TERMS at a time, of A's columns or of the taps. In
 * float32 these stretches are summed apart and then added: in one run, the sums of 40 taps were off by half more than
 * the scalar kernel's. (16 bits' outputs are rounded more coarsely than that.) */
static inline __attribute__((unused)) void multiply(int64_t rows, int64_t columns, int64_t k, int64_t taps, const mt *a,
                                                    int64_t a_rows, const mt *b, product_buffers *x)
{
    const int64_t parts = TERMS / PART; /* of A's columns and taps at a time */
    const int64_t step = taps < parts ? parts / taps * PART : PART;
    float *const c = x->product, *const stretch = x->stretch;
    mt_state host;
    if (k == 0)
        memset(c, 0, sizeof(float) * ROWS * COLUMNS);
    mt_begin(&host);
    for (int64_t p = 0; p < k; p += step)
        for (int64_t tap = 0; tap < taps; tap += parts) {
            const bool apart = FLOAT32 && p + tap > 0;
            mt_product_taps(rows, columns, cot_min(step, k - p), cot_min(parts, taps - tap),
                            a + mt_offset(a_rows, tap, p), a_rows, b + (p * taps + tap * PART) * MT, k * taps,
                            apart ? stretch : c, ROWS, !FLOAT32 && p + tap > 0, NULL);
            for (int64_t n = 0; apart && n < columns; n += PART)
                for (int64_t i = 0; i < rows * PART; i += VW) {
                    float *sum = c + mt_offset(ROWS, 0, n) + i;
                    v_store(sum, v_add(v_load(sum), v_load(stretch + mt_offset(ROWS, 0, n) + i)));
                }
        }
    mt_end(&host);
}

/* ---- blocks of tokens by channels ------------------------------------------------------------------------ */

/* Rows [t, t+rows) by columns [n, n+columns), whole parts, of sequence b. */
typedef struct block {
    int64_t b, t, n, rows, columns;
} block;

static inline int64_t block_count(const operands *o, int64_t channels)
{
    return o->z->B * (cot_round_up(o->l.T, ROWS) / ROWS) * (cot_round_up(channels, COLUMNS) / COLUMNS);
}

/* The blocks of channels of one block of rows follow one another. */
static inline block block_at(const operands *o, int64_t channels, int64_t item)
{
    const int64_t across = cot_round_up(channels, COLUMNS) / COLUMNS, down = cot_round_up(o->l.T, ROWS) / ROWS;
    block k = {.b = item / across / down, .t = item / across % down * ROWS, .n = item % across * COLUMNS};
    k.rows = cot_min(o->l.T - k.t, ROWS);
    k.columns = cot_min(channels - k.n, COLUMNS);
    return k;
}

/* z without bias, of tokens and output channels. */
static inline __attribute__((unused)) void multiply_z(const operands *o, const block *k, product_buffers *x)
{
    const int64_t rows = o->l.x_rows, terms = o->l.Din * o->z->K;
    multiply(k->rows, k->columns, o->l.Din, o->z->K, o->x + k->b * rows * o->l.Din + mt_offset(rows, k->t, 0), rows,
             o->w + k->n * terms, x);
}

/* bias [n, n+PART) as float32, zeros beyond it. */
static inline __attribute__((unused)) void load_bias(float *to, const operands *o, int64_t n)
{
    for (int64_t c = 0; c < PART; c++)
        to[c] = cot_is_present(o->bias) && n + c < o->z->Dout
                    ? (float)cot_load_f64(o->bias->data, o->bias->dtype, (n + c) * o->bias->stride[0])
                    : 0;
}

/* The part of a [B,channels,T] tensor from token t and channel n on. */
static inline __attribute__((unused)) mt_view tokens_view(const cot_tensor *tensor, int64_t b, int64_t t, int64_t n)
{
    return (mt_view){(char *)tensor->data + (b * tensor->stride[0] + n * tensor->stride[1] + t * tensor->stride[2]) *
                                                mt_element_size(tensor->dtype),
                     tensor->dtype, tensor->stride[2], tensor->stride[1]};
}

#endif
