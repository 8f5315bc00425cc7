/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_bwd_tiled.c: the gradients, on the products of simd/matmul.h, in four passes:
 *
 *     g       = dy, with SiLU dy * silu'(z + bias), z as in the forward; packed as G = [K-1 zeros, g, zeros] and as
 *               g^T. dbias: sums over PART tokens
 *     dxe     = G_0 W_{K-1}^T + .. + G_{K-1} W_0^T, G_j the rows from j on: row r of it is the gradient of row r of xe
 *     dweight = g^T xe_k for every tap k, the tokens in parts that are summed apart
 *     sums of the parts, in their order
 *
 * AMX's operands come in interleaved pairs of rows, so that a product begins at an even row: xe is packed for even and
 * for odd taps apart. g is rounded to an operand's type. */
#include "causal_conv1d_dense_products.h"

cot_status V_NAME(causal_conv1d_dense_bwd_tiled)(cot_queue *, const void *, void *);

typedef struct context {
    operands o; /* first */
    const conv1d_dense_backward_problem *p;
    conv1d_dense_wants want;
    mt *g;          /* [B] A form of G */
    mt *gt;         /* [B] A form of g^T: [Dout][T] */
    float *dbias;   /* [B][T/PART][Dout] */
    float *dweight; /* [parts][K] C of [Dout][Din] */
} context;

/* ---- g -------------------------------------------------------------------------------------------------- */

/* g of a part: `tile` is dy on entry. z may be NULL. Rows from `rows` on become 0, whatever z is there. */
static void gradient_tile(float *tile, const float *z, const float *bias, int64_t rows)
{
    for (int64_t at = 0; z != NULL && at < rows * PART; at += VW) {
        const vf slope = v_silu_slope(v_add(v_load(z + at), v_load(bias + at % PART)));
        v_store(tile + at, v_mul(v_load(tile + at), slope));
    }
}

static void sum_rows(float *to, const float *tile)
{
    for (int64_t c = 0; c < PART; c += VW) {
        vf even = v_zero(), odd = v_zero();
        for (int64_t r = 0; r < PART; r += 2) {
            even = v_add(even, v_load(tile + r * PART + c));
            odd = v_add(odd, v_load(tile + (r + 1) * PART + c));
        }
        v_store(to + c, v_add(even, odd));
    }
}

static void gradient_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const operands *o = &c->o;
    const conv1d_dense_sizes *z = o->z;
    const block k = block_at(o, o->l.Dout, item);
    product_buffers *const x = scratch;
    _Alignas(64) float tile[CELLS], bias[PART];
    _Alignas(64) mt packed[CELLS];
    if (c->want.z)
        multiply_z(o, &k, x);
    for (int64_t n = k.n; n < k.n + k.columns; n += PART) {
        load_bias(bias, o, n);
        for (int64_t t = k.t; t < k.t + k.rows; t += PART) {
            const int64_t rows = cot_min(z->T > t ? z->T - t : 0, PART);
            const mt_view dy = tokens_view(&c->p->args.dy, k.b, t, n);
            mt_load_tile(tile, &dy, rows, z->Dout - n);
            gradient_tile(tile, c->want.z ? x->product + mt_offset(ROWS, t - k.t, n - k.n) : NULL, bias, rows);
            if (c->want.dbias)
                sum_rows(c->dbias + (k.b * (o->l.T / PART) + t / PART) * o->l.Dout + n, tile);
            if (c->want.dx) {
                mt_pack_a(packed, tile);
                memcpy(c->g + k.b * o->l.g_rows * o->l.Dout + mt_offset(o->l.g_rows, z->K - 1 + t, n), packed,
                       sizeof packed);
            }
            if (c->want.dweight)
                mt_pack_a_transposed(c->gt + k.b * o->l.T * o->l.o_rows + mt_offset(o->l.o_rows, n, t), tile);
        }
    }
}

/* Item: the zeros before and after g, of a panel. */
static void border_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_layout *l = &c->o.l;
    mt *panel = c->g + item * l->g_rows * PART;
    const int64_t first = c->o.z->K - 1 + l->T;
    memset(panel, 0, sizeof(mt) * (size_t)(c->o.z->K - 1) * PART);
    memset(panel + first * PART, 0, sizeof(mt) * (size_t)(l->g_rows - first) * PART);
}

/* ---- dx and dinitial_state --------------------------------------------------------------------------------- */

/* A part of dxe from row r on, `rows` of which are there, to column `column` of `to`. */
static void store_inputs(const context *c, const cot_tensor *to, int64_t b, int64_t r, int64_t column, int64_t n,
                         int64_t rows, float *tile)
{
    const conv1d_dense_sizes *z = c->o.z;
    const cot_tensor *last = &c->p->args.dfinal_state;
    const int64_t columns = cot_min(z->Din - n, PART);
    for (int64_t i = r < z->T ? z->T - r : 0; cot_is_present(last) && i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            tile[i * PART + j] +=
                (float)cot_load_f64(last->data, last->dtype,
                                    b * last->stride[0] + (n + j) * last->stride[1] + (r + i - z->T) * last->stride[2]);
    const mt_view view = tokens_view(to, b, column, n);
    mt_store_tile(&view, tile, rows, columns);
}

static void multiply_dx(const context *c, int64_t b, int64_t r, int64_t n, int64_t rows, int64_t columns,
                        product_buffers *x)
{
    const conv1d_dense_layout *l = &c->o.l;
    multiply(rows, columns, l->Dout, c->o.z->K, c->g + b * l->g_rows * l->Dout + mt_offset(l->g_rows, r, 0), l->g_rows,
             c->o.wt + n * l->Dout * c->o.z->K, x);
}

static void dx_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const conv1d_dense_sizes *z = c->o.z;
    const block k = block_at(&c->o, c->o.l.Din, item);
    product_buffers *const x = scratch;
    multiply_dx(c, k.b, z->K - 1 + k.t, k.n, k.rows, k.columns, x);
    for (int64_t n = 0; n < k.columns; n += PART)
        for (int64_t t = k.t; t < k.t + k.rows && t < z->T; t += PART)
            store_inputs(c, &c->p->args.dx, k.b, z->K - 1 + t, t, k.n + n, cot_min(z->T - t, PART),
                         x->product + mt_offset(ROWS, t - k.t, n));
}

/* Item: PART columns of a state's gradient, of PART channels. */
static void dstate_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const int64_t panels = c->o.l.Din / PART, history = c->o.z->K - 1, strips = cot_round_up(history, PART) / PART;
    const int64_t n = item % panels * PART, r = item / panels % strips * PART, b = item / panels / strips;
    product_buffers *const x = scratch;
    multiply_dx(c, b, r, n, PART, PART, x);
    store_inputs(c, &c->p->args.dinitial_state, b, r, r, n, cot_min(history - r, PART), x->product);
}

/* ---- dweight and dbias --------------------------------------------------------------------------------------- */

/* Item: a strip of PART rows of a panel of xe, in B form. */
static void pair_inputs_item(void *memory, int64_t item)
{
    const operands *o = memory;
    const int64_t rows = o->l.x_rows, strips = cot_round_up(rows, PART) / PART, r = item % strips * PART;
    const int64_t panel = item / strips * rows * PART, used = o->l.T + o->z->K - 1 + PART;
    for (int64_t i = r; i < r + PART && i + 2 < used; i += 2)
        for (int64_t c = 0; c < PART; c += VW) {
            const mt *row = o->x + panel + i * PART;
            const vf a = mt_load_a(row, c), b = mt_load_a(row + PART, c);
            mt_store_b(o->x_even + panel, rows, i, c, a, b);
            if (o->x_odd != NULL)
                mt_store_b(o->x_odd + panel, rows, i, c, b, mt_load_a(row + 2 * PART, c));
        }
}

static int64_t dweight_across(const context *c)
{
    return cot_round_up(c->o.l.Din, COLUMNS) / COLUMNS;
}

static int64_t dweight_down(const context *c)
{
    return cot_round_up(c->o.l.Dout, ROWS) / ROWS;
}

/* Item: ROWS output channels by COLUMNS input channels of a tap, over a part of the tokens. */
static void dweight_item(void *memory, int64_t item)
{
    const context *c = memory;
    const operands *o = &c->o;
    const conv1d_dense_layout *l = &o->l;
    const int64_t across = dweight_across(c), down = dweight_down(c), K = o->z->K;
    const int64_t n = item % across * COLUMNS, m = item / across % down * ROWS, k = item / across / down % K;
    const int64_t part = item / across / down / K, per_sequence = cot_round_up(l->T, CONV1D_TOKENS) / CONV1D_TOKENS;
    const int64_t rows = cot_min(l->Dout - m, ROWS), columns = cot_min(l->Din - n, COLUMNS);
    const int64_t first = part * l->chunks / l->parts, end = (part + 1) * l->chunks / l->parts;
    const mt *inputs = MT_SAME_FORM ? o->x : k % 2 == 0 ? o->x_even : o->x_odd;
    float *sum = c->dweight + (part * K + k) * l->o_rows * l->Din + mt_offset(l->o_rows, m, n);
    mt_state host;
    mt_begin(&host);
    for (int64_t chunk = first; chunk < end; chunk++) {
        const int64_t b = chunk / per_sequence, t = chunk % per_sequence * CONV1D_TOKENS;
        mt_product(rows, columns, cot_min(l->T - t, CONV1D_TOKENS),
                   c->gt + b * l->T * l->o_rows + mt_offset(l->o_rows, m, t), l->o_rows,
                   inputs + b * l->x_rows * l->Din + mt_offset(l->x_rows, t + (MT_SAME_FORM ? k : k - k % 2), n),
                   l->x_rows, sum, l->o_rows, chunk > first, NULL);
    }
    mt_end(&host);
}

/* Item: PART input channels of an output channel, all taps. */
static void dweight_sum_item(void *memory, int64_t item)
{
    const context *c = memory;
    const conv1d_dense_layout *l = &c->o.l;
    const conv1d_dense_sizes *z = c->o.z;
    const cot_tensor *to = &c->p->args.dweight;
    const int64_t n = item % (l->Din / PART) * PART, m = item / (l->Din / PART);
    const int64_t columns = cot_min(z->Din - n, PART), size = mt_element_size(to->dtype);
    const bool run = to->stride[2] == 1 && to->stride[1] == z->K && z->K <= TAPS;
    char *at = (char *)to->data + (m * to->stride[0] + n * to->stride[1]) * size;
    _Alignas(64) float out[PART * TAPS], sums[PART];
    for (int64_t k = 0; k < z->K; k++) {
        for (int64_t i = 0; i < PART; i += VW) {
            vf total = v_zero();
            for (int64_t part = 0; l->parts > 0 && part < l->parts; part++)
                total = v_add(total, v_load(c->dweight + (part * z->K + k) * l->o_rows * l->Din +
                                            mt_offset(l->o_rows, m, n) + i));
            v_store(sums + i, total);
        }
        for (int64_t i = 0; run && i < PART; i++)
            out[i * z->K + k] = sums[i];
        for (int64_t i = 0; !run && i < columns; i++) {
            const int64_t cell = i * to->stride[1] + k * to->stride[2];
            const double before = c->p->args.accumulate ? cot_load_f64(at, to->dtype, cell) : 0;
            cot_store_f64(at, to->dtype, cell, (float)before + sums[i]);
        }
    }
    for (int64_t i = 0; run && i < columns * z->K; i += VW) {
        const int count = (int)cot_min(columns * z->K - i, VW);
        vf value = v_load(out + i);
        if (c->p->args.accumulate)
            value = v_add(v_load_n_as(at + i * size, to->dtype, count), value);
        v_store_n_as(at + i * size, to->dtype, value, count);
    }
}

/* Item: PART output channels, summed over all strips of tokens in blocks of PART of them. */
static void dbias_item(void *memory, int64_t item)
{
    const context *c = memory;
    const cot_tensor *to = &c->p->args.dbias;
    const int64_t strips = c->o.z->B * (c->o.l.T / PART), n = item * PART;
    _Alignas(64) float total[PART] = {0};
    for (int64_t first = 0; first < strips; first += PART)
        for (int64_t i = 0; i < PART; i += VW) {
            vf sum = v_zero();
            for (int64_t s = first; s < first + PART && s < strips; s++)
                sum = v_add(sum, v_load(c->dbias + s * c->o.l.Dout + n + i));
            v_store(total + i, v_add(v_load(total + i), sum));
        }
    for (int64_t i = 0; i < PART && n + i < c->o.z->Dout; i++) {
        const int64_t cell = (n + i) * to->stride[0];
        const double before = c->p->args.accumulate ? cot_load_f64(to->data, to->dtype, cell) : 0;
        cot_store_f64(to->data, to->dtype, cell, (float)before + total[i]);
    }
}

/* ---- the call --------------------------------------------------------------------------------------------------- */

static void run(cot_queue *queue, context *c)
{
    const conv1d_dense_sizes *z = c->o.z;
    const conv1d_dense_layout *l = &c->o.l;
    const cot_causal_conv1d_dense_backward_args *a = &c->p->args;
    const int64_t across = l->Din / PART, states = cot_round_up(z->K - 1, PART) / PART;
    const bool dweight = c->want.dweight && z->Din > 0, pairs = dweight && !MT_SAME_FORM;
    const conv1d_dense_job pack[] = {{pack_inputs_items(&c->o), pack_inputs_item, NULL},
                                     {pack_weights_items(&c->o), NULL, pack_weights_item},
                                     {c->want.dx ? z->B * (l->Dout / PART) : 0, border_item, NULL}};
    const conv1d_dense_job gradients[] = {
        {block_count(&c->o, l->Dout), NULL, gradient_item},
        {pairs ? z->B * across * (cot_round_up(l->x_rows, PART) / PART) : 0, pair_inputs_item, NULL}};
    const conv1d_dense_job products[] = {
        {cot_is_present(&a->dx) && z->Din > 0 ? block_count(&c->o, l->Din) : 0, NULL, dx_item},
        {dweight ? l->parts * z->K * dweight_down(c) * dweight_across(c) : 0, dweight_item, NULL},
        {cot_is_present(&a->dinitial_state) && z->Din > 0 ? z->B * states * across : 0, NULL, dstate_item}};
    const conv1d_dense_job sums[] = {{dweight ? z->Dout * across : 0, dweight_sum_item, NULL},
                                     {c->want.dbias ? l->Dout / PART : 0, dbias_item, NULL}};
    conv1d_dense_run(queue, c, pack, 3);
    conv1d_dense_run(queue, c, gradients, 2);
    conv1d_dense_run(queue, c, products, 3);
    conv1d_dense_run(queue, c, sums, 2);
}

cot_status V_NAME(causal_conv1d_dense_bwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const cot_causal_conv1d_dense_backward_args *a = &c.p->args;
    char *memory = workspace;
    c.want = conv1d_dense_wants_of(c.p);
    c.o = (operands){.z = &c.p->sizes,
                     .l = conv1d_dense_layout_of(&c.p->sizes, c.want, sizeof(mt), MT_SAME_FORM),
                     .inputs = &a->x,
                     .initial_state = &a->initial_state,
                     .weight = &a->weight,
                     .bias = &a->bias};
    const conv1d_dense_layout *l = &c.o.l;
    c.o.x = c.want.z || c.want.dweight ? (mt *)(memory + l->x) : NULL;
    c.o.x_even = (mt *)(memory + l->x_even);
    c.o.x_odd = c.p->sizes.K > 1 ? (mt *)(memory + l->x_odd) : NULL;
    c.o.w = c.want.z ? (mt *)(memory + l->w) : NULL;
    c.o.wt = c.want.dx ? (mt *)(memory + l->wt) : NULL;
    c.g = (mt *)(memory + l->g);
    c.gt = (mt *)(memory + l->gt);
    c.dbias = (float *)(memory + l->dbias);
    c.dweight = (float *)(memory + l->dweight);
    run(queue, &c);
    return COT_OK;
}
