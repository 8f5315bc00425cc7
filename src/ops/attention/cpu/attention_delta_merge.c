/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_delta_merge.c: delta and merge, which read every row once:
 *
 *     delta[b,h,i] = sum_c dout[b,i,h,c] out[b,i,h,c] - dlse[b,h,i]
 *     lse = log(exp(lse_a) + exp(lse_b) + exp(sink));  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
 *
 * Both are bound by memory bandwidth. An item is ROWS rows of all heads of a sequence: in most layouts the heads of a
 * row are adjacent, and so are the statistics of a head along the rows. */
#include "ops/attention/attention_problem.h"
#include "simd/simd.h"

#include <float.h>
#include <math.h>

cot_status V_NAME(attention_delta_rows)(cot_queue *, const void *, void *);
cot_status V_NAME(attention_merge_rows)(cot_queue *, const void *, void *);

enum { ROWS = 32 };
_Static_assert(ROWS % VW == 0, "whole vectors of statistics");

/* Rows i .. i+count of sequence b. */
typedef struct row_range {
    int64_t b, i, count;
} row_range;

static row_range row_range_of(const attention_sizes *sizes, int64_t item)
{
    const int64_t ranges = cot_ceil_div(sizes->Tq, ROWS), i = item % ranges * ROWS;
    return (row_range){item / ranges, i, cot_clamp(sizes->Tq - i, 0, ROWS)};
}

static int64_t item_count(const attention_sizes *sizes)
{
    return cot_mul(sizes->B, cot_ceil_div(sizes->Tq, ROWS));
}

V_INLINE const void *element_pointer(const cot_tensor *t, cot_dtype dtype, int64_t offset)
{
    return (const char *)t->data + offset * (dtype == COT_F32 ? 4 : 2);
}

static float load_statistic(const cot_tensor *t, int64_t b, int64_t h, int64_t i)
{
    return ((const float *)t->data)[attention_lse_offset(t, b, h, i)];
}

/* ---- delta ------------------------------------------------------------------------------------------------ */

V_INLINE float dot_as(const void *x, cot_dtype x_dtype, const void *y, cot_dtype y_dtype, int64_t columns)
{
    const int64_t x_size = x_dtype == COT_F32 ? 4 : 2, y_size = y_dtype == COT_F32 ? 4 : 2;
    vf even = v_zero(), odd = v_zero();
    int64_t c = 0;
    for (; c + 2 * VW <= columns; c += 2 * VW) {
        const char *p = (const char *)x + c * x_size, *q = (const char *)y + c * y_size;
        even = v_fma(v_load_as(p, x_dtype), v_load_as(q, y_dtype), even);
        odd = v_fma(v_load_as(p + VW * x_size, x_dtype), v_load_as(q + VW * y_size, y_dtype), odd);
    }
    for (; c < columns; c += VW) {
        const int n = columns - c < VW ? (int)(columns - c) : VW;
        even = v_fma(v_load_n_as((const char *)x + c * x_size, x_dtype, n),
                     v_load_n_as((const char *)y + c * y_size, y_dtype, n), even);
    }
    return v_sum(v_add(even, odd));
}

V_INLINE void delta_rows_as(const attention_delta_problem *p, row_range s, cot_dtype out, cot_dtype dout)
{
    const cot_attention_delta_args *a = &p->args;
    for (int64_t i = s.i; i < s.i + s.count; i++)
        for (int64_t h = 0; h < p->sizes.H; h++) {
            float delta =
                dot_as(element_pointer(&a->dout, dout, attention_row_offset(&a->dout, s.b, i, h)), dout,
                       element_pointer(&a->out, out, attention_row_offset(&a->out, s.b, i, h)), out, p->sizes.d_v);
            if (cot_is_present(&a->dlse))
                delta -= load_statistic(&a->dlse, s.b, h, i);
            ((float *)a->delta.data)[attention_lse_offset(&a->delta, s.b, h, i)] = delta;
        }
}

/* For the common dtypes of out and dout the loops are compiled with constant dtypes, so that there is no branch per
 * vector. */
static void delta_item(void *argument, int64_t item)
{
    const attention_delta_problem *p = argument;
    const cot_dtype out = p->args.out.dtype, dout = p->args.dout.dtype;
    const row_range s = row_range_of(&p->sizes, item);
    if (out == COT_BF16 && dout == COT_BF16)
        delta_rows_as(p, s, COT_BF16, COT_BF16);
    else if (out == COT_F16 && dout == COT_F16)
        delta_rows_as(p, s, COT_F16, COT_F16);
    else if (out == COT_F32 && dout == COT_F32)
        delta_rows_as(p, s, COT_F32, COT_F32);
    else
        delta_rows_as(p, s, out, dout);
}

cot_status V_NAME(attention_delta_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    cot_run_items(queue, item_count(problem), delta_item, (void *)problem);
    return COT_OK;
}

/* ---- merge ------------------------------------------------------------------------------------------------ */

/* The factors and lse of `count` rows of a head. A row without a visible key has sum 0 and factors 0. */
typedef struct weights {
    _Alignas(64) float a[ROWS], b[ROWS], sum[ROWS], lse[ROWS];
} weights;

static void compute_weights(weights *w, const cot_attention_merge_args *a, const row_range *s, int64_t h)
{
    const float sink =
        cot_is_present(&a->sink) ? (float)cot_load_f64(a->sink.data, a->sink.dtype, h * a->sink.stride[0]) : -INFINITY;
    for (int64_t r = 0; r < ROWS; r++) {
        w->a[r] = r < s->count ? load_statistic(&a->lse_a, s->b, h, s->i + r) : 0;
        w->b[r] = r < s->count ? load_statistic(&a->lse_b, s->b, h, s->i + r) : 0;
    }
    for (int64_t r = 0; r < ROWS; r += VW) {
        const vf x = v_load(w->a + r), y = v_load(w->b + r), z = v_set1(sink);
        /* -FLT_MAX instead of -inf, so that no difference is NaN. */
        const vf max_lse = v_max(v_max(v_max(v_set1(-FLT_MAX), x), y), z);
        const vf ex = v_exp_flush(v_sub(x, max_lse)), ey = v_exp_flush(v_sub(y, max_lse));
        const vf sum = v_add(v_add(ex, ey), v_exp_flush(v_sub(z, max_lse)));
        const vf divisor = v_max(v_set1(FLT_MIN), sum); /* the sum is 0 without a visible key, otherwise at least 1 */
        float max_lses[VW];
        v_store(w->a + r, v_div(ex, divisor));
        v_store(w->b + r, v_div(ey, divisor));
        v_store(w->sum + r, sum);
        v_store(max_lses, max_lse);
        for (int64_t n = 0; cot_is_present(&a->lse) && n < VW; n++)
            w->lse[r + n] = w->sum[r + n] == 0 ? -INFINITY : max_lses[n] + logf(w->sum[r + n]);
    }
}

V_INLINE void merge_row_as(void *out, cot_dtype out_dtype, const void *x, cot_dtype x_dtype, const void *y,
                           cot_dtype y_dtype, int64_t columns, vf a, vf b)
{
    const int64_t x_size = x_dtype == COT_F32 ? 4 : 2, y_size = y_dtype == COT_F32 ? 4 : 2,
                  out_size = out_dtype == COT_F32 ? 4 : 2;
    int64_t c = 0;
    for (; c + VW <= columns; c += VW)
        v_store_as((char *)out + c * out_size, out_dtype,
                   v_fma(a, v_load_as((const char *)x + c * x_size, x_dtype),
                         v_mul(b, v_load_as((const char *)y + c * y_size, y_dtype))));
    const int n = (int)(columns - c);
    if (n > 0)
        v_store_n_as((char *)out + c * out_size, out_dtype,
                     v_fma(a, v_load_n_as((const char *)x + c * x_size, x_dtype, n),
                           v_mul(b, v_load_n_as((const char *)y + c * y_size, y_dtype, n))),
                     n);
}

/* Constant dtypes for the common cases, as in delta_item. */
static void merge_row(void *out, cot_dtype out_dtype, const void *x, cot_dtype x_dtype, const void *y,
                      cot_dtype y_dtype, int64_t columns, vf a, vf b)
{
    if (out_dtype == COT_BF16 && x_dtype == COT_BF16 && y_dtype == COT_BF16)
        merge_row_as(out, COT_BF16, x, COT_BF16, y, COT_BF16, columns, a, b);
    else if (out_dtype == COT_F16 && x_dtype == COT_F16 && y_dtype == COT_F16)
        merge_row_as(out, COT_F16, x, COT_F16, y, COT_F16, columns, a, b);
    else if (out_dtype == COT_F32 && x_dtype == COT_F32 && y_dtype == COT_F32)
        merge_row_as(out, COT_F32, x, COT_F32, y, COT_F32, columns, a, b);
    else
        merge_row_as(out, out_dtype, x, x_dtype, y, y_dtype, columns, a, b);
}

static void merge_item(void *argument, int64_t item)
{
    const attention_merge_problem *p = argument;
    const cot_attention_merge_args *a = &p->args;
    const row_range s = row_range_of(&p->sizes, item);
    const cot_tensor *x = &a->out_a, *y = &a->out_b, *out = &a->out;
    for (int64_t h = 0; h < p->sizes.H; h++) {
        weights w;
        compute_weights(&w, a, &s, h);
        for (int64_t r = 0; cot_is_present(out) && r < s.count; r++) {
            void *row = (void *)element_pointer(out, out->dtype, attention_row_offset(out, s.b, s.i + r, h));
            if (w.sum[r] == 0) /* out_a and out_b may hold anything */
                memset(row, 0, (size_t)p->sizes.d_v * cot_dtype_size(out->dtype));
            else
                merge_row(row, out->dtype, element_pointer(x, x->dtype, attention_row_offset(x, s.b, s.i + r, h)),
                          x->dtype, element_pointer(y, y->dtype, attention_row_offset(y, s.b, s.i + r, h)), y->dtype,
                          p->sizes.d_v, v_set1(w.a[r]), v_set1(w.b[r]));
        }
        for (int64_t r = 0; cot_is_present(&a->lse) && r < s.count; r++)
            ((float *)a->lse.data)[attention_lse_offset(&a->lse, s.b, h, s.i + r)] = w.lse[r];
    }
}

cot_status V_NAME(attention_merge_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    cot_run_items(queue, item_count(problem), merge_item, (void *)problem);
    return COT_OK;
}
