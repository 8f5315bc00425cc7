/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_bwd_rows.c: dx = c * m * dy * act'(x + bias), and dbias[d] = sum_r dx[r,d] in the same pass.
 *
 * An item is a rectangle of rows and columns (dropout_items.h), as in the forward. dbias is summed in three levels:
 *   1. `block`: DROPOUT_ROW_BLOCK rows of dx, in f32, in the L1 cache;
 *   2. `total`: the blocks of an item, in f32, in the L1 cache;
 *   3. the items, in double, from the workspace.
 * The order depends on the shape alone. The blocks keep the f32 sums short, so that rounding errors stay small. */
#include "dropout_rows.h"

cot_status V_NAME(dropout_bwd_rows)(cot_queue *, const void *, void *);

/* One row of an item. */
typedef struct backward_row {
    int64_t n;
    const char *dy, *x;                                 /* x: only with an activation */
    const char *prefetch_dy, *prefetch_x, *prefetch_dx; /* the row to prefetch */
    char *dx;
    const float *bias;
    uint8_t *bits;
    const v_philox *philox; /* NULL: `bits` is complete; else the bits are generated, beginning with group `group` */
    uint64_t group;
    float *sums; /* += dx */
    float scale;
    bool nontemporal; /* stores of dx bypass the caches */
} backward_row;

V_INLINE vf activation_slope(vf z, cot_activation activation)
{
    switch (activation) {
    case COT_ACTIVATION_SILU: return v_silu_slope(z);
    case COT_ACTIVATION_GELU_TANH: return v_gelu_tanh_slope(z);
    case COT_ACTIVATION_GELU_ERF: return v_gelu_erf_slope(z);
    default: return v_set1(1);
    }
}

/* The mask is applied last, so that a dropped element is 0 for any dy and x. */
V_INLINE vf backward_vector(vf g, vf z, vf scale, vm keep, cot_activation activation)
{
    g = v_mul(g, scale);
    if (activation == COT_ACTIVATION_RELU)
        g = v_maskz(vm_above(z, v_zero()), g);
    else if (activation != COT_ACTIVATION_NONE)
        g = v_mul(g, activation_slope(z, activation));
    return v_maskz(keep, g);
}

/* Returns dx of columns [i, i+lanes) and adds it to the sums. whole: lanes == VW, a full vector. */
V_INLINE vf backward_lanes(const backward_row *row, int64_t i, int lanes, bool whole, cot_activation activation,
                           cot_dtype dtype)
{
    const int64_t at = i * dropout_element_size(dtype);
    const vf dy = whole ? v_load_as(row->dy + at, dtype) : v_load_n_as(row->dy + at, dtype, lanes);
    vf z = v_zero();
    if (activation != COT_ACTIVATION_NONE && whole)
        z = v_add(v_load_as(row->x + at, dtype), v_load(row->bias + i));
    else if (activation != COT_ACTIVATION_NONE)
        z = v_add(v_load_n_as(row->x + at, dtype, lanes), v_load_n(row->bias + i, lanes));
    const vf dx = backward_vector(dy, z, v_set1(row->scale), vm_bits(row->bits, i), activation);
    if (whole)
        v_store(row->sums + i, v_add(v_load(row->sums + i), dx));
    else
        v_store_n(row->sums + i, v_add(v_load_n(row->sums + i, lanes), dx), lanes);
    return dx;
}

V_INLINE void backward_columns(const backward_row *row, int64_t i, int64_t end, cot_activation activation,
                               cot_dtype dtype, bool nontemporal)
{
    const int64_t size = dropout_element_size(dtype);
    for (; i + 2 * VW <= end; i += 2 * VW) {
        const vf a = backward_lanes(row, i, VW, true, activation, dtype);
        const vf b = backward_lanes(row, i + VW, VW, true, activation, dtype);
        if (nontemporal)
            v_stream2_as(row->dx + i * size, dtype, a, b);
        else
            v_store2_as(row->dx + i * size, dtype, a, b);
    }
    for (; i < end; i += VW) {
        const int lanes = (int)cot_clamp(end - i, 0, VW);
        v_store_n_as(row->dx + i * size, dtype, backward_lanes(row, i, lanes, false, activation, dtype), lanes);
    }
}

V_INLINE void backward_row_body(const backward_row *original, cot_activation activation, cot_dtype dtype,
                                bool nontemporal)
{
    const backward_row copy = *original, *row = &copy; /* no store can change a local copy, so it stays in registers */
    for (int64_t i = 0; i < row->n; i += DROPOUT_GENERATED_COLUMNS) {
        if (row->philox != NULL)
            dropout_generate_ahead(row->bits, row->philox, row->group, i, row->n);
        dropout_prefetch_columns(row->prefetch_dy, i, dtype);
        if (activation != COT_ACTIVATION_NONE)
            dropout_prefetch_columns(row->prefetch_x, i, dtype);
        dropout_prefetch_page(row->prefetch_dx, i, dtype);
        backward_columns(row, i, i + DROPOUT_GENERATED_COLUMNS < row->n ? i + DROPOUT_GENERATED_COLUMNS : row->n,
                         activation, dtype, nontemporal);
    }
}

#define ROW(activation, dtype)                                                       \
    static void row_##activation##_##dtype(const backward_row *row)                  \
    {                                                                                \
        if (row->nontemporal)                                                        \
            backward_row_body(row, COT_ACTIVATION_##activation, COT_##dtype, true);  \
        else                                                                         \
            backward_row_body(row, COT_ACTIVATION_##activation, COT_##dtype, false); \
    }
DROPOUT_EACH_INSTANCE(ROW)

#define ROWS(activation) \
    [COT_ACTIVATION_##activation] = {row_##activation##_F32, row_##activation##_F16, row_##activation##_BF16}
static void (*const row_functions[5][3])(const backward_row *) = {
    ROWS(NONE), ROWS(SILU), ROWS(RELU), ROWS(GELU_TANH), ROWS(GELU_ERF),
};

/* ---- items -------------------------------------------------------------------------------------------------- */

typedef struct backward_context {
    const dropout_backward_problem *problem;
    dropout_mask_reader reader;
    dropout_item_grid item_grid;
    int64_t rows_per_batch;
    bool direct, nontemporal; /* direct: rows are contiguous, so they need no staging buffers */
    float *partial_sums;      /* [row_items][D]; NULL: no dbias */
} backward_context;

static void run_row(const backward_context *c, backward_row *row, int64_t r, int64_t d)
{
    enum { DY, X, DX };
    const cot_dropout_backward_args *a = &c->problem->args;
    if (c->direct) {
        row->dy = dropout_address(&a->dy, r, d);
        row->x = cot_is_present(&a->x) ? dropout_address(&a->x, r, d) : NULL;
        row->dx = dropout_address(&a->dx, r, d);
        const int64_t next = dropout_prefetch_row(&c->problem->sizes, r);
        row->prefetch_dy = dropout_address(&a->dy, next, d);
        row->prefetch_x = cot_is_present(&a->x) ? dropout_address(&a->x, next, d) : NULL;
        row->prefetch_dx = dropout_address(&a->dx, next, d);
        row_functions[a->activation][c->problem->sizes.dtype - COT_F32](row);
        return;
    }
    float staged[3][DROPOUT_MAX_COLUMNS];
    dropout_gather(staged[DY], &a->dy, r, d, row->n);
    if (cot_is_present(&a->x))
        dropout_gather(staged[X], &a->x, r, d, row->n);
    row->dy = row->prefetch_dy = (const char *)staged[DY];
    row->x = row->prefetch_x = (const char *)staged[X];
    row->dx = (char *)staged[DX];
    row->prefetch_dx = row->dx;
    row_functions[a->activation][0](row);
    if (cot_is_present(&a->dx))
        dropout_scatter(&a->dx, r, d, staged[DX], row->n);
}

static void backward_item(void *context, int64_t number)
{
    const backward_context *c = context;
    const cot_dropout_backward_args *a = &c->problem->args;
    const dropout_sizes *sizes = &c->problem->sizes;
    const dropout_item item = dropout_item_at(&c->item_grid, sizes, number);
    const int64_t d = item.d_begin;
    uint8_t bits[DROPOUT_BITS_BYTES + DROPOUT_BITS_PADDING];
    _Alignas(64) float bias[DROPOUT_MAX_COLUMNS], block[DROPOUT_MAX_COLUMNS] = {0}, total[DROPOUT_MAX_COLUMNS] = {0};
    backward_row row = {.n = item.d_end - d,
                        .bias = bias,
                        .sums = block,
                        .scale = (float)c->problem->mask.scale,
                        .nontemporal = c->nontemporal};
    const bool generate_in_loop = c->reader.mask->source == DROPOUT_GENERATED && c->rows_per_batch == 1;
    dropout_stage_bias(bias, &a->bias, d, row.n);
    for (int64_t r = item.r_begin; r < item.r_end; r += c->rows_per_batch) {
        const int64_t count = cot_clamp(c->rows_per_batch, 1, item.r_end - r);
        if (!generate_in_loop)
            dropout_keep_bits(bits, &c->reader, r, count, d, row.n);
        if (row.scale == 0) /* drops every element: 0 * inf would be NaN */
            memset(bits, 0, sizeof bits);
        for (int64_t k = 0; k < count; k++) {
            row.bits = bits + k * sizes->groups;
            row.philox = generate_in_loop ? &c->reader.philox : NULL;
            row.group = (uint64_t)(r * sizes->groups + d / 8);
            run_row(c, &row, r + k, d);
            const int64_t end = r + k + 1;
            if ((end - item.r_begin) % DROPOUT_ROW_BLOCK != 0 && end < item.r_end)
                continue;
            for (int64_t i = 0; i < row.n; i++) {
                total[i] += block[i];
                block[i] = 0;
            }
        }
    }
    if (c->partial_sums != NULL)
        memcpy(c->partial_sums + item.row_item * sizes->D + d, total, (size_t)row.n * sizeof *total);
    if (c->nontemporal)
        v_fence();
}

/* ---- dbias -------------------------------------------------------------------------------------------------- */

enum { REDUCE_COLUMNS = 64 };

static void reduce_item(void *context, int64_t number)
{
    const backward_context *c = context;
    const cot_tensor *out = &c->problem->args.dbias;
    const int64_t D = c->problem->sizes.D, begin = number * REDUCE_COLUMNS;
    const int64_t n = cot_clamp(REDUCE_COLUMNS, 1, D - begin);
    double sums[REDUCE_COLUMNS] = {0};
    for (int64_t item = 0; item < c->item_grid.row_items; item++)
        for (int64_t i = 0; i < n; i++)
            sums[i] += (double)c->partial_sums[item * D + begin + i];
    for (int64_t i = 0; i < n; i++) {
        const int64_t index = (begin + i) * out->stride[0];
        const double before = c->problem->args.accumulate ? cot_load_f64(out->data, out->dtype, index) : 0;
        cot_store_f64(out->data, out->dtype, index, (float)(before + sums[i]));
    }
}

cot_status V_NAME(dropout_bwd_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    const dropout_backward_problem *p = problem;
    const cot_dropout_backward_args *a = &p->args;
    if (p->sizes.D == 0)
        return COT_OK;
    backward_context context = {
        .problem = p,
        .reader = dropout_make_mask_reader(&p->mask, &p->sizes),
        .item_grid = ((const dropout_items_plan *)queue->plan)->item_grid,
        .rows_per_batch = dropout_rows_per_batch(&p->sizes),
        .direct = dropout_is_contiguous(&a->dy) && dropout_is_contiguous(&a->x) && cot_is_present(&a->dx) &&
                  dropout_is_contiguous(&a->dx),
        .partial_sums = cot_is_present(&a->dbias) ? workspace : NULL,
    };
    context.nontemporal = context.direct && a->dx.data != a->dy.data && a->dx.data != a->x.data &&
                          dropout_bypasses_caches(&a->dx, &p->sizes, cot_is_present(&a->x) ? 3 : 2);
    cot_run_items(queue, context.item_grid.row_items * context.item_grid.column_items, backward_item, &context);
    if (cot_is_present(&a->dbias))
        cot_run_items(queue, cot_ceil_div(p->sizes.D, REDUCE_COLUMNS), reduce_item, &context);
    return COT_OK;
}
