/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_bwd_rows.c: dx = c * m * dy * act'(x + bias), and dbias[d] = sum_r dx[r,d] in the same pass.
 *
 * Items and chunks as in the forward. The dx of DROPOUT_ROW_BLOCK rows are summed in one buffer of the first-level cache,
 * the blocks of an item in another, and the items, from the workspace, in double: the order follows from the shape,
 * and rounding grows with the number of blocks, not of rows. */
#include "dropout_rows.h"

cot_status V_NAME(dropout_bwd_rows)(cot_queue *, const void *, void *);

/* One row of a chunk. */
typedef struct backward_row {
    int64_t n;
    const char *dy, *x;  /* x only with an activation */
    char *dx;            /* NULL: not wanted */
    const float *bias;   /* NULL: none */
    const uint8_t *bits; /* NULL: all are kept */
    float *sums;         /* += dx; NULL: not wanted. Room for whole vectors */
    float scale;
    bool stream;
} backward_row;

V_INLINE vf slope(vf z, cot_activation activation)
{
    switch (activation) {
    case COT_ACTIVATION_SILU: return v_silu_slope(z);
    case COT_ACTIVATION_GELU_TANH: return v_gelu_tanh_slope(z);
    case COT_ACTIVATION_GELU_ERF: return v_gelu_erf_slope(z);
    default: return v_set1(1);
    }
}

/* The mask comes last, so that a dropped element is 0 whatever dy and x hold. */
V_INLINE vf backward_vector(const backward_row *s, vf g, vf z, int64_t i, cot_activation activation)
{
    g = v_mul(g, v_set1(s->scale));
    if (activation == COT_ACTIVATION_RELU)
        g = v_keep(vm_above(z, v_zero()), g);
    else if (activation != COT_ACTIVATION_NONE)
        g = v_mul(g, slope(z, activation));
    return s->bits != NULL ? v_keep(vm_bits(s->bits, i), g) : g;
}

V_INLINE void backward_body(const backward_row *s, cot_activation activation, cot_dtype dtype)
{
    const backward_row row = *s;
    const int64_t size = dropout_size(dtype), n = row.n;
    const bool active = activation != COT_ACTIVATION_NONE;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf z = active ? v_load_as(row.x + i * size, dtype) : v_zero();
        if (active && row.bias != NULL)
            z = v_add(z, v_load(row.bias + i));
        const vf dx = backward_vector(&row, v_load_as(row.dy + i * size, dtype), z, i, activation);
        if (row.sums != NULL)
            v_store(row.sums + i, v_add(v_load(row.sums + i), dx));
        if (row.stream)
            v_stream_as(row.dx + i * size, dtype, dx);
        else if (row.dx != NULL)
            v_store_as(row.dx + i * size, dtype, dx);
    }
    if (i < n) {
        const int lanes = (int)(n - i);
        vf z = active ? v_load_n_as(row.x + i * size, dtype, lanes) : v_zero();
        if (active && row.bias != NULL)
            z = v_add(z, v_load_n(row.bias + i, lanes));
        const vf dx = backward_vector(&row, v_load_n_as(row.dy + i * size, dtype, lanes), z, i, activation);
        if (row.sums != NULL)
            v_store_n(row.sums + i, v_add(v_load_n(row.sums + i, lanes), dx), lanes);
        if (row.dx != NULL)
            v_store_n_as(row.dx + i * size, dtype, dx, lanes);
    }
}

#define ROW(activation, dtype)                                      \
    static void row_##activation##_##dtype(const backward_row *s)   \
    {                                                               \
        backward_body(s, COT_ACTIVATION_##activation, COT_##dtype); \
    }
DROPOUT_EACH_INSTANCE(ROW)

#define ROWS(activation) \
    [COT_ACTIVATION_##activation] = {row_##activation##_F32, row_##activation##_F16, row_##activation##_BF16}
static void (*const rows[5][3])(const backward_row *) = {
    ROWS(NONE), ROWS(SILU), ROWS(RELU), ROWS(GELU_TANH), ROWS(GELU_ERF),
};

/* ---- items -------------------------------------------------------------------------------------------------- */

typedef struct backward_context {
    const dropout_backward_problem *problem;
    dropout_drawer drawer;
    dropout_tiling tiling;
    int64_t chunk_rows;
    bool direct, stream;
    float *partials; /* [parts][D], NULL: dbias is not wanted */
} backward_context;

static void run_row(const backward_context *c, backward_row *row, int64_t r, int64_t d)
{
    enum { DY, X, DX };
    const cot_dropout_backward_args *a = &c->problem->args;
    if (c->direct) {
        row->dy = dropout_at(&a->dy, r, d);
        row->x = cot_present(&a->x) ? dropout_at(&a->x, r, d) : NULL;
        row->dx = cot_present(&a->dx) ? dropout_at(&a->dx, r, d) : NULL;
        rows[a->activation][c->problem->sizes.dtype - COT_F32](row);
        return;
    }
    float staged[3][DROPOUT_CHUNK];
    dropout_gather(staged[DY], &a->dy, r, d, row->n);
    if (cot_present(&a->x))
        dropout_gather(staged[X], &a->x, r, d, row->n);
    row->dy = (const char *)staged[DY];
    row->x = (const char *)staged[X];
    row->dx = (char *)staged[DX];
    rows[a->activation][0](row);
    if (cot_present(&a->dx))
        dropout_scatter(&a->dx, r, d, staged[DX], row->n);
}

static void backward_item(void *context, int64_t number)
{
    const backward_context *c = context;
    const cot_dropout_backward_args *a = &c->problem->args;
    const dropout_sizes *sizes = &c->problem->sizes;
    const dropout_item item = dropout_item_at(&c->tiling, sizes, number);
    const int64_t columns = item.d_end - item.d_begin;
    uint8_t bits[DROPOUT_BITS_SIZE];
    float bias[DROPOUT_MAX_COLUMNS], block[DROPOUT_MAX_COLUMNS] = {0}, total[DROPOUT_MAX_COLUMNS] = {0};
    if (cot_present(&a->bias))
        dropout_stage_bias(bias, &a->bias, item.d_begin, columns);
    for (int64_t r = item.r_begin; r < item.r_end; r += c->chunk_rows) {
        const int64_t count = dropout_clamp(c->chunk_rows, 1, item.r_end - r);
        for (int64_t d = item.d_begin; d < item.d_end; d += DROPOUT_CHUNK) {
            const int64_t column = d - item.d_begin;
            backward_row row = {.n = dropout_clamp(DROPOUT_CHUNK, 1, item.d_end - d),
                                .bias = cot_present(&a->bias) ? bias + column : NULL,
                                .sums = c->partials != NULL ? block + column : NULL,
                                .scale = (float)c->problem->mask.scale,
                                .stream = c->stream};
            dropout_keep_bits(bits, &c->drawer, r, count, d, row.n);
            if (row.scale == 0) /* nothing gets through, not even 0 * inf */
                memset(bits, 0, sizeof bits);
            const bool masked = c->drawer.mask->source != DROPOUT_KEEP_ALL || row.scale == 0;
            for (int64_t k = 0; k < count; k++) {
                row.bits = masked ? bits + k * sizes->groups : NULL;
                run_row(c, &row, r + k, d);
                if ((r + k + 1 - item.r_begin) % DROPOUT_ROW_BLOCK != 0 && r + k + 1 < item.r_end)
                    continue;
                for (int64_t i = column; c->partials != NULL && i < column + row.n; i++) {
                    total[i] += block[i];
                    block[i] = 0;
                }
            }
        }
    }
    if (c->partials != NULL)
        memcpy(c->partials + item.part * sizes->D + item.d_begin, total, (size_t)columns * sizeof *total);
    if (c->stream)
        v_fence();
}

/* ---- dbias -------------------------------------------------------------------------------------------------- */

enum { REDUCE_COLUMNS = 64 };

static void reduce_item(void *context, int64_t number)
{
    const backward_context *c = context;
    const cot_tensor *out = &c->problem->args.dbias;
    const int64_t D = c->problem->sizes.D, begin = number * REDUCE_COLUMNS;
    const int64_t n = dropout_clamp(REDUCE_COLUMNS, 1, D - begin);
    double sums[REDUCE_COLUMNS] = {0};
    for (int64_t part = 0; part < c->tiling.parts; part++)
        for (int64_t i = 0; i < n; i++)
            sums[i] += (double)c->partials[part * D + begin + i];
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
        .drawer = dropout_make_drawer(&p->mask, &p->sizes),
        .tiling = dropout_tile(&p->sizes),
        .direct = dropout_contiguous(&a->dy) && dropout_contiguous(&a->x) && dropout_contiguous(&a->dx),
        .partials = cot_present(&a->dbias) ? workspace : NULL,
    };
    context.chunk_rows = dropout_rows_of_chunk(&p->sizes, &context.tiling);
    context.stream = context.direct && cot_present(&a->dx) && a->dx.data != a->dy.data && a->dx.data != a->x.data &&
                     dropout_streams(&a->dx, &p->sizes, cot_present(&a->x) ? 3 : 2);
    cot_parallel(queue, context.tiling.parts * context.tiling.blocks, backward_item, &context);
    if (cot_present(&a->dbias))
        cot_parallel(queue, dropout_quotient_up(p->sizes.D, REDUCE_COLUMNS), reduce_item, &context);
    return COT_OK;
}
