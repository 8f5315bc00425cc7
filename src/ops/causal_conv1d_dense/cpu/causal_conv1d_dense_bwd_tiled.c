/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_bwd_tiled.c: the backward, on the products of simd/matmul.h, in four passes: packing of x,
 * state and weights; g; dxe and dweight; the reduction of the partial sums.
 *
 *     g       = dy, with SiLU dy * silu'(z + bias), z as in the forward;
 *               packed as G = [K-1 zeros, g, zeros] and as g^T.
 *               dbias: partial sums over TILE tokens
 *     dxe     = G_0 W_{K-1}^T + .. + G_{K-1} W_0^T, G_j: rows j, j+1, .. of G;
 *               row r of dxe is the gradient of row r of xe
 *     dweight = g^T xe_k for every tap k. The tokens are split into ranges that are summed separately
 *     reduction of these partial sums, in a fixed order
 *
 * AMX operands have interleaved pairs of rows, so a product begins at an even row. Therefore xe is packed twice, for
 * even and for odd taps. g is rounded to the dtype of the operands. */
#include "causal_conv1d_dense_products.h"

cot_status V_NAME(causal_conv1d_dense_bwd_tiled)(cot_queue *, const void *, void *);

typedef struct context {
    operands o; /* first */
    const conv1d_dense_backward_problem *p;
    conv1d_dense_needs needs;
    mt *g;          /* [B] A form of G */
    mt *gt;         /* [B] A form of g^T: [Dout][T] */
    float *dbias;   /* [B][T/TILE][Dout] */
    float *dweight; /* [splits][K] C of [Dout][Din] */
} context;

/* ---- g -------------------------------------------------------------------------------------------------- */

/* Replaces dy in `tile` by g. z is NULL without SiLU. Rows from `rows` on are 0 on entry and stay 0. */
static void compute_g_tile(float *tile, const float *z, const float *bias, int64_t rows)
{
    for (int64_t offset = 0; z != NULL && offset < rows * TILE; offset += VW) {
        const vf slope = v_silu_slope(v_add(v_load(z + offset), v_load(bias + offset % TILE)));
        v_store(tile + offset, v_mul(v_load(tile + offset), slope));
    }
}

static void sum_rows(float *to, const float *tile)
{
    for (int64_t c = 0; c < TILE; c += VW) {
        vf even = v_zero(), odd = v_zero();
        for (int64_t r = 0; r < TILE; r += 2) {
            even = v_add(even, v_load(tile + r * TILE + c));
            odd = v_add(odd, v_load(tile + (r + 1) * TILE + c));
        }
        v_store(to + c, v_add(even, odd));
    }
}

static void g_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const operands *o = &c->o;
    const conv1d_dense_sizes *sizes = o->sizes;
    const output_block blk = block_at(o, o->l.Dout, item);
    product_buffers *const buffers = scratch;
    _Alignas(64) float tile[TILE_ELEMENTS], bias[TILE];
    _Alignas(64) mt packed[TILE_ELEMENTS];
    if (c->needs.z)
        multiply_z(o, &blk, buffers);
    for (int64_t n = blk.n; n < blk.n + blk.columns; n += TILE) {
        load_bias(bias, o, n);
        for (int64_t t = blk.t; t < blk.t + blk.rows; t += TILE) {
            const int64_t rows = cot_min(sizes->T > t ? sizes->T - t : 0, TILE);
            const mt_view dy = tokens_view(&c->p->args.dy, blk.b, t, n);
            mt_load_tile(tile, &dy, rows, sizes->Dout - n);
            compute_g_tile(tile, c->needs.z ? buffers->product + mt_offset(BLOCK_ROWS, t - blk.t, n - blk.n) : NULL,
                           bias, rows);
            if (c->needs.dbias)
                sum_rows(c->dbias + (blk.b * (o->l.T / TILE) + t / TILE) * o->l.Dout + n, tile);
            if (c->needs.dx) {
                mt_pack_a(packed, tile);
                memcpy(c->g + blk.b * o->l.g_rows * o->l.Dout + mt_offset(o->l.g_rows, sizes->K - 1 + t, n), packed,
                       sizeof packed);
            }
            if (c->needs.dweight)
                mt_pack_a_transposed(c->gt + blk.b * o->l.T * o->l.gt_rows + mt_offset(o->l.gt_rows, n, t), tile);
        }
    }
}

/* Item: the zeros before and after g in one panel. */
static void zero_padding_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_layout *l = &c->o.l;
    mt *panel = c->g + item * l->g_rows * TILE;
    const int64_t first = c->o.sizes->K - 1 + l->T;
    memset(panel, 0, sizeof(mt) * (size_t)(c->o.sizes->K - 1) * TILE);
    memset(panel + first * TILE, 0, sizeof(mt) * (size_t)(l->g_rows - first) * TILE);
}

/* ---- dx and dinitial_state --------------------------------------------------------------------------------- */

/* Stores a tile of dxe, of `rows` valid rows from row r on, to `to` from column `column` on. Adds dfinal_state. */
static void store_dxe_tile(const context *c, const cot_tensor *to, int64_t b, int64_t r, int64_t column, int64_t n,
                           int64_t rows, float *tile)
{
    const conv1d_dense_sizes *sizes = c->o.sizes;
    const cot_tensor *dfinal_state = &c->p->args.dfinal_state;
    const int64_t columns = cot_min(sizes->Din - n, TILE);
    for (int64_t i = r < sizes->T ? sizes->T - r : 0; cot_is_present(dfinal_state) && i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            tile[i * TILE + j] += (float)cot_load_f64(dfinal_state->data, dfinal_state->dtype,
                                                      b * dfinal_state->stride[0] + (n + j) * dfinal_state->stride[1] +
                                                          (r + i - sizes->T) * dfinal_state->stride[2]);
    const mt_view view = tokens_view(to, b, column, n);
    mt_store_tile(&view, tile, rows, columns);
}

static void multiply_dxe(const context *c, int64_t b, int64_t r, int64_t n, int64_t rows, int64_t columns,
                         product_buffers *buffers)
{
    const conv1d_dense_layout *l = &c->o.l;
    multiply(rows, columns, l->Dout, c->o.sizes->K, c->g + b * l->g_rows * l->Dout + mt_offset(l->g_rows, r, 0),
             l->g_rows, c->o.wt + n * l->Dout * c->o.sizes->K, buffers);
}

static void dx_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const conv1d_dense_sizes *sizes = c->o.sizes;
    const output_block blk = block_at(&c->o, c->o.l.Din, item);
    product_buffers *const buffers = scratch;
    multiply_dxe(c, blk.b, sizes->K - 1 + blk.t, blk.n, blk.rows, blk.columns, buffers);
    for (int64_t n = 0; n < blk.columns; n += TILE)
        for (int64_t t = blk.t; t < blk.t + blk.rows && t < sizes->T; t += TILE)
            store_dxe_tile(c, &c->p->args.dx, blk.b, sizes->K - 1 + t, t, blk.n + n, cot_min(sizes->T - t, TILE),
                           buffers->product + mt_offset(BLOCK_ROWS, t - blk.t, n));
}

/* Item: TILE columns of dinitial_state, for TILE channels. */
static void dstate_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const int64_t panels = c->o.l.Din / TILE, state_columns = c->o.sizes->K - 1,
                  strips = cot_round_up(state_columns, TILE) / TILE;
    const int64_t n = item % panels * TILE, r = item / panels % strips * TILE, b = item / panels / strips;
    product_buffers *const buffers = scratch;
    multiply_dxe(c, b, r, n, TILE, TILE, buffers);
    store_dxe_tile(c, &c->p->args.dinitial_state, b, r, r, n, cot_min(state_columns - r, TILE), buffers->product);
}

/* ---- dweight and dbias --------------------------------------------------------------------------------------- */

/* Item: a strip of TILE rows of a panel of xe, in B form. */
static void interleave_inputs_item(void *memory, int64_t item)
{
    const operands *o = memory;
    const int64_t rows = o->l.x_rows, strips = cot_round_up(rows, TILE) / TILE, r = item % strips * TILE;
    const int64_t panel = item / strips * rows * TILE, used_rows = o->l.T + o->sizes->K - 1 + TILE;
    for (int64_t i = r; i < r + TILE && i + 2 < used_rows; i += 2)
        for (int64_t c = 0; c < TILE; c += VW) {
            const mt *row = o->x + panel + i * TILE;
            const vf a = mt_load_a(row, c), b = mt_load_a(row + TILE, c);
            mt_store_b(o->x_even + panel, rows, i, c, a, b);
            if (o->x_odd != NULL)
                mt_store_b(o->x_odd + panel, rows, i, c, b, mt_load_a(row + 2 * TILE, c));
        }
}

static int64_t dweight_column_blocks(const context *c)
{
    return cot_round_up(c->o.l.Din, BLOCK_COLUMNS) / BLOCK_COLUMNS;
}

static int64_t dweight_row_blocks(const context *c)
{
    return cot_round_up(c->o.l.Dout, BLOCK_ROWS) / BLOCK_ROWS;
}

/* Item: BLOCK_ROWS output channels by BLOCK_COLUMNS input channels of one tap, summed over one split of the tokens. */
static void dweight_item(void *memory, int64_t item)
{
    const context *c = memory;
    const operands *o = &c->o;
    const conv1d_dense_layout *l = &o->l;
    const int64_t column_blocks = dweight_column_blocks(c), row_blocks = dweight_row_blocks(c), K = o->sizes->K;
    const int64_t n = item % column_blocks * BLOCK_COLUMNS, m = item / column_blocks % row_blocks * BLOCK_ROWS,
                  k = item / column_blocks / row_blocks % K;
    const int64_t split = item / column_blocks / row_blocks / K,
                  chunks_per_sequence = cot_round_up(l->T, CONV1D_CHUNK_TOKENS) / CONV1D_CHUNK_TOKENS;
    const int64_t rows = cot_min(l->Dout - m, BLOCK_ROWS), columns = cot_min(l->Din - n, BLOCK_COLUMNS);
    const int64_t first = split * l->chunks / l->splits, end = (split + 1) * l->chunks / l->splits;
    const mt *inputs = MT_SAME_FORM ? o->x : k % 2 == 0 ? o->x_even : o->x_odd;
    float *sum = c->dweight + (split * K + k) * l->gt_rows * l->Din + mt_offset(l->gt_rows, m, n);
    mt_state saved;
    mt_begin(&saved);
    for (int64_t chunk = first; chunk < end; chunk++) {
        const int64_t b = chunk / chunks_per_sequence, t = chunk % chunks_per_sequence * CONV1D_CHUNK_TOKENS;
        mt_product(rows, columns, cot_min(l->T - t, CONV1D_CHUNK_TOKENS),
                   c->gt + b * l->T * l->gt_rows + mt_offset(l->gt_rows, m, t), l->gt_rows,
                   inputs + b * l->x_rows * l->Din + mt_offset(l->x_rows, t + (MT_SAME_FORM ? k : k - k % 2), n),
                   l->x_rows, sum, l->gt_rows, chunk > first, NULL);
    }
    mt_end(&saved);
}

/* Item: TILE input channels of one output channel, all taps. */
static void reduce_dweight_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_layout *l = &c->o.l;
    const conv1d_dense_sizes *sizes = c->o.sizes;
    const cot_tensor *to = &c->p->args.dweight;
    const int64_t n = item % (l->Din / TILE) * TILE, m = item / (l->Din / TILE);
    const int64_t columns = cot_min(sizes->Din - n, TILE), size = mt_element_size(to->dtype);
    const bool contiguous = to->stride[2] == 1 && to->stride[1] == sizes->K && sizes->K <= TAPS_PER_LOAD;
    char *data = (char *)to->data + (m * to->stride[0] + n * to->stride[1]) * size;
    _Alignas(64) float out[TILE * TAPS_PER_LOAD], sums[TILE];
    for (int64_t k = 0; k < sizes->K; k++) {
        for (int64_t i = 0; i < TILE; i += VW) {
            vf total = v_zero();
            for (int64_t split = 0; l->splits > 0 && split < l->splits; split++)
                total = v_add(total, v_load(c->dweight + (split * sizes->K + k) * l->gt_rows * l->Din +
                                            mt_offset(l->gt_rows, m, n) + i));
            v_store(sums + i, total);
        }
        for (int64_t i = 0; contiguous && i < TILE; i++)
            out[i * sizes->K + k] = sums[i];
        for (int64_t i = 0; !contiguous && i < columns; i++) {
            const int64_t offset = i * to->stride[1] + k * to->stride[2];
            const double old = c->p->args.accumulate ? cot_load_f64(data, to->dtype, offset) : 0;
            cot_store_f64(data, to->dtype, offset, (float)old + sums[i]);
        }
    }
    for (int64_t i = 0; contiguous && i < columns * sizes->K; i += VW) {
        const int count = (int)cot_min(columns * sizes->K - i, VW);
        vf value = v_load(out + i);
        if (c->p->args.accumulate)
            value = v_add(v_load_n_as(data + i * size, to->dtype, count), value);
        v_store_n_as(data + i * size, to->dtype, value, count);
    }
}

/* Item: TILE output channels. The sums of the strips of tokens are added in blocks of TILE strips. */
static void reduce_dbias_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_tensor *to = &c->p->args.dbias;
    const int64_t strips = c->o.sizes->B * (c->o.l.T / TILE), n = item * TILE;
    _Alignas(64) float total[TILE] = {0};
    for (int64_t first = 0; first < strips; first += TILE)
        for (int64_t i = 0; i < TILE; i += VW) {
            vf sum = v_zero();
            for (int64_t s = first; s < first + TILE && s < strips; s++)
                sum = v_add(sum, v_load(c->dbias + s * c->o.l.Dout + n + i));
            v_store(total + i, v_add(v_load(total + i), sum));
        }
    for (int64_t i = 0; i < TILE && n + i < c->o.sizes->Dout; i++) {
        const int64_t offset = (n + i) * to->stride[0];
        const double old = c->p->args.accumulate ? cot_load_f64(to->data, to->dtype, offset) : 0;
        cot_store_f64(to->data, to->dtype, offset, (float)old + total[i]);
    }
}

/* ---- the call --------------------------------------------------------------------------------------------------- */

static void run(cot_queue *queue, context *c)
{
    const conv1d_dense_sizes *sizes = c->o.sizes;
    const conv1d_dense_layout *l = &c->o.l;
    const cot_causal_conv1d_dense_backward_args *a = &c->p->args;
    const int64_t column_blocks = l->Din / TILE, state_tiles = cot_round_up(sizes->K - 1, TILE) / TILE;
    const bool dweight = c->needs.dweight && sizes->Din > 0, interleaved = dweight && !MT_SAME_FORM;
    const conv1d_dense_job pack_jobs[] = {{pack_inputs_item_count(&c->o), pack_inputs_item, NULL},
                                          {pack_weights_item_count(&c->o), NULL, pack_weights_item},
                                          {c->needs.dx ? sizes->B * (l->Dout / TILE) : 0, zero_padding_item, NULL}};
    const conv1d_dense_job g_jobs[] = {
        {block_count(&c->o, l->Dout), NULL, g_item},
        {interleaved ? sizes->B * column_blocks * (cot_round_up(l->x_rows, TILE) / TILE) : 0, interleave_inputs_item,
         NULL}};
    const conv1d_dense_job product_jobs[] = {
        {cot_is_present(&a->dx) && sizes->Din > 0 ? block_count(&c->o, l->Din) : 0, NULL, dx_item},
        {dweight ? l->splits * sizes->K * dweight_row_blocks(c) * dweight_column_blocks(c) : 0, dweight_item, NULL},
        {cot_is_present(&a->dinitial_state) && sizes->Din > 0 ? sizes->B * state_tiles * column_blocks : 0, NULL,
         dstate_item}};
    const conv1d_dense_job sum_jobs[] = {{dweight ? sizes->Dout * column_blocks : 0, reduce_dweight_item, NULL},
                                         {c->needs.dbias ? l->Dout / TILE : 0, reduce_dbias_item, NULL}};
    conv1d_dense_run_jobs(queue, c, pack_jobs, 3);
    conv1d_dense_run_jobs(queue, c, g_jobs, 2);
    conv1d_dense_run_jobs(queue, c, product_jobs, 3);
    conv1d_dense_run_jobs(queue, c, sum_jobs, 2);
}

cot_status V_NAME(causal_conv1d_dense_bwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const cot_causal_conv1d_dense_backward_args *a = &c.p->args;
    char *memory = workspace;
    c.needs = conv1d_dense_backward_needs(c.p);
    c.o = (operands){.sizes = &c.p->sizes,
                     .l = *(const conv1d_dense_layout *)queue->plan,
                     .inputs = &a->x,
                     .initial_state = &a->initial_state,
                     .weight = &a->weight,
                     .bias = &a->bias};
    const conv1d_dense_layout *l = &c.o.l;
    c.o.x = c.needs.z || c.needs.dweight ? (mt *)(memory + l->x) : NULL;
    c.o.x_even = (mt *)(memory + l->x_even);
    c.o.x_odd = c.p->sizes.K > 1 ? (mt *)(memory + l->x_odd) : NULL;
    c.o.w = c.needs.z ? (mt *)(memory + l->w) : NULL;
    c.o.wt = c.needs.dx ? (mt *)(memory + l->wt) : NULL;
    c.g = (mt *)(memory + l->g);
    c.gt = (mt *)(memory + l->gt);
    c.dbias = (float *)(memory + l->dbias);
    c.dweight = (float *)(memory + l->dweight);
    run(queue, &c);
    return COT_OK;
}
