/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_parameters.c: the sink of partial results, and the gradients of sink and bias. */
#include "attention_call.h"

#include "core/argument_checks.h"
#include "core/float16.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <math.h>

/* Adds the sink to row `row` of head h: lse becomes log(exp(lse) + exp(sink)), and out shrinks. */
static void add_sink(const attention_call *c, const results *r, int64_t b, int64_t row, int64_t h)
{
    const cot_tensor *lse = &r->lse, *out = &r->out;
    const int64_t at = b * lse->stride[0] + h * lse->stride[1] + row * lse->stride[2];
    const double before = cot_load_f64(lse->data, lse->dtype, at);
    const double sink = cot_load_f64(c->a.sink.data, c->a.sink.dtype, (c->column * c->heads + h) * c->a.sink.stride[0]);
    const double high = fmax(before, sink), low = fmin(before, sink);
    const double after = isnan(before) || isnan(sink) ? before + sink : high + log1p(exp(low - high));
    cot_store_f64(lse->data, lse->dtype, at, isinf(high) ? high : after);
    const double weight = before == -INFINITY ? 0 : exp(before - after);
    const int64_t first = b * out->stride[0] + row * out->stride[1] + h * out->stride[2];
    for (int64_t i = first; i < first + c->d_v; i++)
        cot_store_f64(out->data, out->dtype, i, weight * cot_load_f64(out->data, out->dtype, i));
}

/* The first `rows` rows of a range and batch, without the batch axis: [rows,H,*], or [H,rows] if statistic. */
static cot_tensor rows_of_range(const cot_tensor *t, bool statistic, int64_t b, int64_t row, int64_t rows)
{
    cot_tensor view = cot_slice(t, 0, b, 1);
    view = cot_slice(&view, statistic ? 2 : 1, row, rows);
    memmove(view.shape, view.shape + 1, (size_t)(view.rank - 1) * sizeof *view.shape);
    memmove(view.stride, view.stride + 1, (size_t)(view.rank - 1) * sizeof *view.stride);
    view.rank--;
    return view;
}

static cot_status add_sinks_on_device(const attention_call *c, const results *r, const row_range *q, int64_t b,
                                      int64_t rows)
{
    const cot_tensor out = rows_of_range(&r->out, false, b, q->row, rows);
    const cot_tensor lse = rows_of_range(&r->lse, true, b, q->row, rows);
    const cot_tensor sink = cot_slice(&c->a.sink, 0, c->column * c->heads, c->heads);
    return cot_gpu_add_sink(c->base.group->gpu, &out, &lse, &sink);
}

/* Rows beyond seqused and beyond the last sequence get no sink. */
cot_status attention_add_sinks(const attention_call *c, const results *r)
{
    const row_ranges *p = &c->q_ranges[c->line];
    if (c->base.group->dry)
        return COT_OK;
    for (int64_t n = 0; cot_is_present(&c->a.sink) && n < p->first[c->packed ? c->B : 1]; n++)
        for (int64_t b = 0; b < c->batches; b++) {
            const row_range *q = &p->list[n];
            const int64_t used = attention_used(c, false, c->packed ? q->b : b);
            if (c->base.group->on_device) {
                CHECK(add_sinks_on_device(c, r, q, b, cot_clamp(used - q->begin, 0, q->rows)));
                continue;
            }
            for (int64_t i = 0; i < q->rows && q->begin + i < used; i++)
                for (int64_t h = 0; h < c->heads; h++)
                    add_sink(c, r, b, q->row + i, h);
        }
    return COT_OK;
}

static cot_status sum_dsink_on_device(const attention_call *c, const cot_tensor *delta, double *sums)
{
    CHECK(cot_group_clear(c->base.group, sums, (size_t)c->H * sizeof *sums));
    for (int64_t n = 0; n < c->own.first[c->packed ? c->B : 1]; n++)
        for (int64_t b = 0; b < c->batches; b++) {
            const row_range *q = &c->own.list[n];
            const int64_t used = attention_used(c, false, c->packed ? q->b : b);
            const int64_t rows = cot_clamp(used - q->begin, 0, q->rows);
            const cot_tensor lse = rows_of_range(&c->a.lse, true, b, q->row, rows);
            const cot_tensor D = rows_of_range(delta, true, b, q->row, rows);
            CHECK(cot_gpu_sum_dsink(c->base.group->gpu, sums, &lse, &D, &c->a.sink));
        }
    return COT_OK;
}

/* dsink[h] = -sum_{b,i} exp(sink[h] - lse[i]) * delta[i], over the rows of this rank. */
static cot_status sum_dsink(const attention_call *c, const cot_tensor *delta, double *sums)
{
    const cot_tensor *lse = &c->a.lse, *sink = &c->a.sink;
    if (c->base.group->dry)
        return COT_OK;
    if (c->base.group->on_device)
        return sum_dsink_on_device(c, delta, sums);
    for (int64_t h = 0; h < c->H; h++) {
        const double s = cot_load_f64(sink->data, sink->dtype, h * sink->stride[0]);
        sums[h] = 0;
        for (int64_t n = 0; n < c->own.first[c->packed ? c->B : 1]; n++)
            for (int64_t b = 0; b < c->batches; b++) {
                const row_range *q = &c->own.list[n];
                const int64_t used = attention_used(c, false, c->packed ? q->b : b);
                for (int64_t i = 0; i < q->rows && q->begin + i < used; i++) {
                    const int64_t row = q->row + i;
                    const double l = cot_load_f64(lse->data, lse->dtype,
                                                  b * lse->stride[0] + h * lse->stride[1] + row * lse->stride[2]);
                    const double D = cot_load_f64(delta->data, delta->dtype,
                                                  b * delta->stride[0] + h * delta->stride[1] + row * delta->stride[2]);
                    if (l != -INFINITY)
                        sums[h] -= exp(s - l) * D;
                }
            }
    }
    return COT_OK;
}

static bool shares_dbias(const attention_call *c)
{
    return cot_is_present(&c->a.dbias) && (c->packed || c->a.dbias.shape[2] == 1);
}

parameter_sums attention_take_parameters(const attention_call *c, cot_arena *memory)
{
    parameter_sums p = {.dbias_count = shares_dbias(c) ? cot_elements(&c->a.dbias) : 0};
    const int64_t heads = cot_is_present(&c->a.dsink) ? c->H : 0;
    p.dsink = attention_take(memory, COT_F64, 1, &heads).data;
    p.dbias = attention_take(memory, COT_F64, 1, &p.dbias_count).data;
    const int64_t bytes = (int64_t)cot_group_sum_bytes(c->base.group, COT_F64, cot_max(heads, p.dbias_count));
    p.memory = attention_take(memory, COT_U8, 1, &bytes).data;
    return p;
}

cot_status attention_sum_parameters(const attention_call *c, const parameter_sums *p, const cot_tensor *delta,
                                    const cot_tensor *dbias)
{
    const cot_attention_backward_args *a = &c->a;
    if (cot_is_present(&a->dsink)) {
        CHECK(sum_dsink(c, delta, p->dsink));
        CHECK(cot_group_sum(c->base.group, COT_F64, p->dsink, c->H, p->memory));
        const cot_tensor sums = cot_tensor_contiguous(p->dsink, COT_F64, 1, &c->H);
        CHECK(cot_group_copy(c->base.group, &a->dsink, &sums, a->accumulate));
    }
    if (!cot_is_present(&a->dbias))
        return COT_OK;
    cot_tensor sums = *dbias;
    if (shares_dbias(c)) {
        sums = cot_tensor_contiguous(p->dbias, COT_F64, 4, dbias->shape);
        CHECK(cot_group_copy(c->base.group, &sums, dbias, false));
        CHECK(cot_group_sum(c->base.group, COT_F64, p->dbias, p->dbias_count, p->memory));
    }
    return cot_group_copy(c->base.group, &a->dbias, &sums, a->accumulate);
}
