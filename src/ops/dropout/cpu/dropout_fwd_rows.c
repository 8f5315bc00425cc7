/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_fwd_rows.c: y = c * m * act(x + bias) + residual, and m as bytes or bits, in one pass.
 *
 * An item is a rectangle of rows and columns (dropout_items.h). The loops access contiguous rows in the tensors
 * directly, and other rows through f32 buffers. */
#include "dropout_rows.h"

cot_status V_NAME(dropout_fwd_rows)(cot_queue *, const void *, void *);

/* One row of an item. */
typedef struct forward_row {
    int64_t n;
    const char *x, *residual;                                /* residual NULL: there is none */
    const char *prefetch_x, *prefetch_residual, *prefetch_y; /* the row to prefetch */
    char *y;
    const float *bias;
    uint8_t *bits;
    const v_philox *philox; /* NULL: `bits` is complete; else the bits are generated, beginning with group `group` */
    uint64_t group;
    float scale;
    bool nontemporal; /* stores of y bypass the caches */
} forward_row;

V_INLINE vf activate(vf z, cot_activation activation)
{
    switch (activation) {
    case COT_ACTIVATION_SILU: return v_silu(z);
    case COT_ACTIVATION_RELU: return v_max(v_zero(), z);
    case COT_ACTIVATION_GELU_TANH: return v_gelu_tanh(z);
    case COT_ACTIVATION_GELU_ERF: return v_gelu_erf(z);
    default: return z;
    }
}

/* The mask is applied after the activation, so that a dropped inf or NaN becomes 0. */
V_INLINE vf forward_vector(vf x, vf bias, vm keep, cot_activation activation)
{
    return v_maskz(keep, activate(v_add(x, bias), activation));
}

/* y of columns [i, i+lanes). whole: lanes == VW. */
V_INLINE vf forward_lanes(const forward_row *row, int64_t i, int lanes, bool whole, cot_activation activation,
                          cot_dtype dtype)
{
    const int64_t at = i * dropout_element_size(dtype);
    const vf x = whole ? v_load_as(row->x + at, dtype) : v_load_n_as(row->x + at, dtype, lanes);
    const vf bias = whole ? v_load(row->bias + i) : v_load_n(row->bias + i, lanes);
    const vf kept = forward_vector(x, bias, vm_bits(row->bits, i), activation), scale = v_set1(row->scale);
    if (row->residual == NULL)
        return v_mul(kept, scale);
    return v_fma(kept, scale,
                 whole ? v_load_as(row->residual + at, dtype) : v_load_n_as(row->residual + at, dtype, lanes));
}

V_INLINE void forward_columns(const forward_row *row, int64_t i, int64_t end, cot_activation activation,
                              cot_dtype dtype, bool nontemporal)
{
    const int64_t size = dropout_element_size(dtype);
    for (; i + 2 * VW <= end; i += 2 * VW) {
        const vf a = forward_lanes(row, i, VW, true, activation, dtype);
        const vf b = forward_lanes(row, i + VW, VW, true, activation, dtype);
        if (nontemporal)
            v_stream2_as(row->y + i * size, dtype, a, b);
        else
            v_store2_as(row->y + i * size, dtype, a, b);
    }
    for (; i < end; i += VW) {
        const int lanes = (int)cot_clamp(end - i, 0, VW);
        v_store_n_as(row->y + i * size, dtype, forward_lanes(row, i, lanes, false, activation, dtype), lanes);
    }
}

V_INLINE void forward_row_body(const forward_row *original, cot_activation activation, cot_dtype dtype,
                               bool nontemporal)
{
    const forward_row copy = *original, *row = &copy; /* no store can change a local copy, so it stays in registers */
    for (int64_t i = 0; i < row->n; i += DROPOUT_GENERATED_COLUMNS) {
        if (row->philox != NULL)
            dropout_generate_ahead(row->bits, row->philox, row->group, i, row->n);
        dropout_prefetch_columns(row->prefetch_x, i, dtype);
        if (row->residual != NULL)
            dropout_prefetch_columns(row->prefetch_residual, i, dtype);
        dropout_prefetch_page(row->prefetch_y, i, dtype);
        forward_columns(row, i, i + DROPOUT_GENERATED_COLUMNS < row->n ? i + DROPOUT_GENERATED_COLUMNS : row->n,
                        activation, dtype, nontemporal);
    }
}

#define ROW(activation, dtype)                                                      \
    static void row_##activation##_##dtype(const forward_row *row)                  \
    {                                                                               \
        if (row->nontemporal)                                                       \
            forward_row_body(row, COT_ACTIVATION_##activation, COT_##dtype, true);  \
        else                                                                        \
            forward_row_body(row, COT_ACTIVATION_##activation, COT_##dtype, false); \
    }
DROPOUT_EACH_INSTANCE(ROW)

#define ROWS(activation) \
    [COT_ACTIVATION_##activation] = {row_##activation##_F32, row_##activation##_F16, row_##activation##_BF16}
static void (*const row_functions[5][3])(const forward_row *) = {
    ROWS(NONE), ROWS(SILU), ROWS(RELU), ROWS(GELU_TANH), ROWS(GELU_ERF),
};

/* ---- items -------------------------------------------------------------------------------------------------- */

typedef struct forward_context {
    const dropout_forward_problem *problem;
    dropout_mask_reader reader;
    dropout_item_grid item_grid;
    int64_t rows_per_batch;
    bool direct, nontemporal; /* direct: rows are contiguous, so they need no staging buffers */
} forward_context;

static void store_mask(const cot_dropout_forward_args *a, const uint8_t *bits, int64_t r, int64_t d, int64_t n)
{
    if (cot_is_present(&a->mask_out))
        dropout_unpack_bits((uint8_t *)dropout_address(&a->mask_out, r, d), a->mask_out.stride[a->mask_out.rank - 1],
                            bits, n);
    for (int64_t g = 0; cot_is_present(&a->mask_bits_out) && 8 * g < n; g++) {
        const int used = n - 8 * g < 8 ? (int)(n - 8 * g) : 8;
        *(uint8_t *)dropout_address(&a->mask_bits_out, r, d / 8 + g) = (uint8_t)(bits[g] & ((1 << used) - 1));
    }
}

static void run_row(const forward_context *c, forward_row *row, int64_t r, int64_t d)
{
    enum { X, RESIDUAL, Y };
    const cot_dropout_forward_args *a = &c->problem->args;
    if (c->direct) {
        row->x = dropout_address(&a->x, r, d);
        row->residual = cot_is_present(&a->residual) ? dropout_address(&a->residual, r, d) : NULL;
        row->y = dropout_address(&a->y, r, d);
        const int64_t next = dropout_prefetch_row(&c->problem->sizes, r);
        row->prefetch_x = dropout_address(&a->x, next, d);
        row->prefetch_residual = cot_is_present(&a->residual) ? dropout_address(&a->residual, next, d) : NULL;
        row->prefetch_y = dropout_address(&a->y, next, d);
        row_functions[a->activation][c->problem->sizes.dtype - COT_F32](row);
        return;
    }
    float staged[3][DROPOUT_MAX_COLUMNS];
    dropout_gather(staged[X], &a->x, r, d, row->n);
    if (cot_is_present(&a->residual))
        dropout_gather(staged[RESIDUAL], &a->residual, r, d, row->n);
    row->x = row->prefetch_x = (const char *)staged[X];
    row->residual = row->prefetch_residual = cot_is_present(&a->residual) ? (const char *)staged[RESIDUAL] : NULL;
    row->y = (char *)staged[Y];
    row->prefetch_y = row->y;
    row_functions[a->activation][0](row);
    dropout_scatter(&a->y, r, d, staged[Y], row->n);
}

static void forward_item(void *context, int64_t number)
{
    const forward_context *c = context;
    const cot_dropout_forward_args *a = &c->problem->args;
    const dropout_sizes *sizes = &c->problem->sizes;
    const dropout_item item = dropout_item_at(&c->item_grid, sizes, number);
    const int64_t d = item.d_begin;
    uint8_t bits[DROPOUT_BITS_BYTES + DROPOUT_BITS_PADDING];
    _Alignas(64) float bias[DROPOUT_MAX_COLUMNS];
    forward_row row = {
        .n = item.d_end - d, .bias = bias, .scale = (float)c->problem->mask.scale, .nontemporal = c->nontemporal};
    const bool generate_in_loop =
        c->reader.mask->source == DROPOUT_GENERATED && c->rows_per_batch == 1 && cot_is_present(&a->y);
    dropout_stage_bias(bias, &a->bias, d, row.n);
    for (int64_t r = item.r_begin; r < item.r_end; r += c->rows_per_batch) {
        const int64_t count = cot_clamp(c->rows_per_batch, 1, item.r_end - r);
        if (!generate_in_loop)
            dropout_keep_bits(bits, &c->reader, r, count, d, row.n);
        for (int64_t k = 0; k < count; k++) {
            row.bits = bits + k * sizes->groups;
            row.philox = generate_in_loop ? &c->reader.philox : NULL;
            row.group = (uint64_t)(r * sizes->groups + d / 8);
            /* A mask that is generated in the row loop is complete only after run_row. Any other mask is stored first,
             * because a scale of 0 clears its bits. */
            if (generate_in_loop)
                run_row(c, &row, r, d);
            store_mask(a, row.bits, r + k, d, row.n);
            if (row.scale == 0) /* drops every element: 0 * inf would be NaN */
                memset(row.bits, 0, (size_t)(row.n + 7) / 8);
            if (!generate_in_loop && cot_is_present(&a->y))
                run_row(c, &row, r + k, d);
        }
    }
    if (c->nontemporal)
        v_fence();
}

cot_status V_NAME(dropout_fwd_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const dropout_forward_problem *p = problem;
    const cot_dropout_forward_args *a = &p->args;
    if (p->sizes.R == 0 || p->sizes.D == 0)
        return COT_OK;
    forward_context context = {
        .problem = p,
        .reader = dropout_make_mask_reader(&p->mask, &p->sizes),
        .item_grid = dropout_item_grid_of(&p->sizes),
        .rows_per_batch = dropout_rows_per_batch(&p->sizes),
        .direct = dropout_is_contiguous(&a->x) && dropout_is_contiguous(&a->residual) && dropout_is_contiguous(&a->y),
    };
    context.nontemporal = context.direct && cot_is_present(&a->y) && a->y.data != a->x.data &&
                          a->y.data != a->residual.data &&
                          dropout_bypasses_caches(&a->y, &p->sizes, cot_is_present(&a->residual) ? 3 : 2);
    cot_run_items(queue, context.item_grid.row_items * context.item_grid.column_items, forward_item, &context);
    return COT_OK;
}
