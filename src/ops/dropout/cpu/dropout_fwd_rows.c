/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_fwd_rows.c: y = c * m * act(x + bias) + residual, and m as bytes or bits, in one pass.
 *
 * One item is `rows` x `columns` (dropout_tiling.h), walked by chunks (dropout_rows.h): first the chunk's mask as bits
 * in the first-level cache, then its rows, straight from and to the tensors, or by way of f32 buffers where a row is
 * not contiguous. */
#include "dropout_rows.h"

cot_status V_NAME(dropout_fwd_rows)(cot_queue *, const void *, void *);

/* One row of a chunk. */
typedef struct forward_row {
    int64_t n;
    const char *x, *residual; /* residual NULL: none */
    char *y;
    const float *bias;   /* NULL: none */
    const uint8_t *bits; /* NULL: all are kept */
    float scale;
    bool stream;
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

/* The mask comes after the activation, so that a dropped inf or NaN is 0. */
V_INLINE vf forward_vector(const forward_row *s, vf z, vf bias, vf residual, int64_t i, cot_activation activation)
{
    if (s->bias != NULL)
        z = v_add(z, bias);
    z = activate(z, activation);
    if (s->bits != NULL)
        z = v_keep(vm_bits(s->bits, i), z);
    return s->residual != NULL ? v_fma(z, v_set1(s->scale), residual) : v_mul(z, v_set1(s->scale));
}

V_INLINE void forward_body(const forward_row *s, cot_activation activation, cot_dtype dtype)
{
    const forward_row row = *s;
    const int64_t size = dropout_size(dtype), n = row.n;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf bias = row.bias != NULL ? v_load(row.bias + i) : v_zero();
        const vf residual = row.residual != NULL ? v_load_as(row.residual + i * size, dtype) : v_zero();
        const vf y = forward_vector(&row, v_load_as(row.x + i * size, dtype), bias, residual, i, activation);
        if (row.stream)
            v_stream_as(row.y + i * size, dtype, y);
        else
            v_store_as(row.y + i * size, dtype, y);
    }
    if (i < n) {
        const int lanes = (int)(n - i);
        const vf bias = row.bias != NULL ? v_load_n(row.bias + i, lanes) : v_zero();
        const vf residual = row.residual != NULL ? v_load_n_as(row.residual + i * size, dtype, lanes) : v_zero();
        const vf y = forward_vector(&row, v_load_n_as(row.x + i * size, dtype, lanes), bias, residual, i, activation);
        v_store_n_as(row.y + i * size, dtype, y, lanes);
    }
}

#define ROW(activation, dtype)                                     \
    static void row_##activation##_##dtype(const forward_row *s)   \
    {                                                              \
        forward_body(s, COT_ACTIVATION_##activation, COT_##dtype); \
    }
DROPOUT_EACH_INSTANCE(ROW)

#define ROWS(activation) \
    [COT_ACTIVATION_##activation] = {row_##activation##_F32, row_##activation##_F16, row_##activation##_BF16}
static void (*const rows[5][3])(const forward_row *) = {
    ROWS(NONE), ROWS(SILU), ROWS(RELU), ROWS(GELU_TANH), ROWS(GELU_ERF),
};

/* ---- items -------------------------------------------------------------------------------------------------- */

typedef struct forward_context {
    const dropout_forward_problem *problem;
    dropout_drawer drawer;
    dropout_tiling tiling;
    int64_t chunk_rows;
    bool direct, stream;
} forward_context;

static void export_mask(const cot_dropout_forward_args *a, const uint8_t *bits, int64_t r, int64_t d, int64_t n)
{
    if (cot_present(&a->mask_out))
        dropout_unpack_row((uint8_t *)dropout_at(&a->mask_out, r, d), a->mask_out.stride[a->mask_out.rank - 1], bits,
                           n);
    for (int64_t g = 0; cot_present(&a->mask_bits_out) && 8 * g < n; g++) {
        const int used = n - 8 * g < 8 ? (int)(n - 8 * g) : 8;
        *(uint8_t *)dropout_at(&a->mask_bits_out, r, d / 8 + g) = (uint8_t)(bits[g] & ((1 << used) - 1));
    }
}

static void run_row(const forward_context *c, forward_row *row, int64_t r, int64_t d)
{
    enum { X, RESIDUAL, Y };
    const cot_dropout_forward_args *a = &c->problem->args;
    if (c->direct) {
        row->x = dropout_at(&a->x, r, d);
        row->residual = cot_present(&a->residual) ? dropout_at(&a->residual, r, d) : NULL;
        row->y = dropout_at(&a->y, r, d);
        rows[a->activation][c->problem->sizes.dtype - COT_F32](row);
        return;
    }
    float staged[3][DROPOUT_CHUNK];
    dropout_gather(staged[X], &a->x, r, d, row->n);
    if (cot_present(&a->residual))
        dropout_gather(staged[RESIDUAL], &a->residual, r, d, row->n);
    row->x = (const char *)staged[X];
    row->residual = cot_present(&a->residual) ? (const char *)staged[RESIDUAL] : NULL;
    row->y = (char *)staged[Y];
    rows[a->activation][0](row);
    dropout_scatter(&a->y, r, d, staged[Y], row->n);
}

static void forward_item(void *context, int64_t number)
{
    const forward_context *c = context;
    const cot_dropout_forward_args *a = &c->problem->args;
    const dropout_sizes *sizes = &c->problem->sizes;
    const dropout_item item = dropout_item_at(&c->tiling, sizes, number);
    uint8_t bits[DROPOUT_BITS_SIZE];
    float bias[DROPOUT_MAX_COLUMNS];
    if (cot_present(&a->bias))
        dropout_stage_bias(bias, &a->bias, item.d_begin, item.d_end - item.d_begin);
    for (int64_t r = item.r_begin; r < item.r_end; r += c->chunk_rows) {
        const int64_t count = dropout_clamp(c->chunk_rows, 1, item.r_end - r);
        for (int64_t d = item.d_begin; d < item.d_end; d += DROPOUT_CHUNK) {
            forward_row row = {.n = dropout_clamp(DROPOUT_CHUNK, 1, item.d_end - d),
                               .bias = cot_present(&a->bias) ? bias + (d - item.d_begin) : NULL,
                               .scale = (float)c->problem->mask.scale,
                               .stream = c->stream};
            dropout_keep_bits(bits, &c->drawer, r, count, d, row.n);
            for (int64_t k = 0; k < count; k++) {
                uint8_t *own = bits + k * sizes->groups;
                export_mask(a, own, r + k, d, row.n);
                if (row.scale == 0) /* nothing gets through, not even 0 * inf */
                    memset(own, 0, (size_t)(row.n + 7) / 8);
                row.bits = c->drawer.mask->source == DROPOUT_KEEP_ALL && row.scale != 0 ? NULL : own;
                if (cot_present(&a->y))
                    run_row(c, &row, r + k, d);
            }
        }
    }
    if (c->stream)
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
        .drawer = dropout_make_drawer(&p->mask, &p->sizes),
        .tiling = dropout_tile(&p->sizes),
        .direct = dropout_contiguous(&a->x) && dropout_contiguous(&a->residual) && dropout_contiguous(&a->y),
    };
    context.chunk_rows = dropout_rows_of_chunk(&p->sizes, &context.tiling);
    context.stream = context.direct && cot_present(&a->y) && a->y.data != a->x.data && a->y.data != a->residual.data &&
                     dropout_streams(&a->y, &p->sizes, cot_present(&a->residual) ? 3 : 2);
    cot_parallel(queue, context.tiling.parts * context.tiling.blocks, forward_item, &context);
    return COT_OK;
}
