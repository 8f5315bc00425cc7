/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_run.c: the steps of a call: the exchange of heads, attention by a ring or an all-gather, the gradients of
 * parameters, and the results of this rank's rows. */
#include "attention_call.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <math.h>

/* The transfers are in the frame of the caller. After an error they are taken back before that frame ends. */
static cot_status end_transfers(const attention_call *c, cot_status status)
{
    return status == COT_OK ? COT_OK : cot_group_fail(c->base.group, c->base.name, status);
}

/* Takes the tensors of the exchange that both directions have. */
static void take_inputs(attention_call *c, cot_arena *memory, head_field fields[3])
{
    const int64_t q_rows = c->q_lines[c->line].rows, k_rows = c->k_lines[c->line].rows;
    const cot_attention_backward_args *a = &c->a;
    c->q = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, q_rows, c->heads, c->d});
    c->k = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, k_rows, c->kv_heads, c->d});
    c->v = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, k_rows, c->kv_heads, c->d_v});
    fields[0] = (head_field){.local = a->q, .gathered = c->q};
    fields[1] = (head_field){.local = a->k, .gathered = c->k, .keys = true};
    fields[2] = (head_field){.local = a->v, .gathered = c->v, .keys = true};
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

static cot_status store_forward(const attention_call *c, const results *r, bool direct, const cot_messages *after,
                                const head_field *outputs, int output_count)
{
    cot_group *group = c->base.group;
    if (!direct && c->C > 1 && cot_is_present(&c->a.out))
        CHECK(cot_group_copy(group, &outputs[0].gathered, &r->out, false));
    if (c->C > 1)
        return attention_to_rows(c, after, outputs, output_count);
    if (direct)
        return COT_OK;
    CHECK(cot_group_copy(group, &c->a.out, &r->out, false));
    return cot_group_copy(group, &c->a.lse, &r->lse, false);
}

cot_status attention_run_forward(attention_call *c, cot_arena *memory)
{
    const bool all_gather = c->options.all_gather;
    /* Whether the core writes the results in their own dtypes and with the sink. */
    const bool direct = all_gather && !(attention_has_positions(c) && cot_is_present(&c->a.sink));
    ring_forward ring = {0};
    key_gather gather = {0};
    results r = {c->a.out, c->a.lse};
    head_field inputs[3], outputs[2];
    cot_messages before = {0}, after = {0};
    int output_count = 0;
    const int64_t rows = c->q_lines[c->line].rows;
    const int64_t out[] = {c->batches, rows, c->heads, c->d_v}, lse[] = {c->batches, c->heads, rows};
    c->q = c->a.q, c->k = c->a.k, c->v = c->a.v;
    attention_take_used(c, memory);
    if (c->C > 1) {
        take_inputs(c, memory, inputs);
        before = attention_take_exchange(c, memory, inputs, 3, true);
    }
    if (!direct || (c->C > 1 && cot_is_present(&c->a.out)))
        r.out = attention_take(memory, direct ? c->a.out.dtype : c->sum, 4, out);
    if (!direct || (c->C > 1 && cot_is_present(&c->a.lse)))
        r.lse = attention_take(memory, c->sum, 3, lse);
    if (all_gather)
        attention_take_gather(c, memory, &gather);
    else
        attention_take_ring_forward(c, memory, &r, &ring);
    if (c->C > 1) { /* the results go back to the rows in their own dtypes */
        if (cot_is_present(&c->a.out))
            outputs[output_count++] = (head_field){
                .local = c->a.out, .gathered = direct ? r.out : attention_take(memory, c->a.out.dtype, 4, out)};
        if (cot_is_present(&c->a.lse))
            outputs[output_count++] = (head_field){.local = c->a.lse, .gathered = r.lse, .statistic = true};
        after = attention_take_exchange(c, memory, outputs, output_count, false);
    }
    if (memory->counting)
        return COT_OK;

    CHECK(attention_fill_used(c));
    if (c->C > 1)
        CHECK(attention_to_heads(c, &before, inputs, 3));
    CHECK(end_transfers(c, all_gather ? attention_gather_forward(c, &gather, &r) : attention_ring_forward(c, &ring)));
    if (!direct)
        CHECK(attention_add_sinks(c, &r));
    return store_forward(c, &r, direct, &after, outputs, output_count);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

/* D of this rank's rows. */
static cot_status find_delta(const attention_call *c, const cot_tensor *delta)
{
    cot_attention_delta_args x;
    if (cot_is_present(&c->a.delta) || c->base.group->dry)
        return COT_OK;
    COT_INIT(&x);
    x.out = c->a.out, x.dout = c->a.dout, x.dlse = c->a.dlse, x.delta = *delta;
    return cot_attention_delta(c->base.queue, &x);
}

/* The gradients of q, k and v, on their way back to the rows: with C > 1 they are summed over heads in f32 first. */
typedef struct gradient_fields {
    head_field fields[3];
    int count;
    cot_messages exchange;
    cot_tensor dk, dv; /* of this rank's rows, all heads */
} gradient_fields;

static void take_fields(const attention_call *c, const gradients *line, cot_arena *memory, gradient_fields *g)
{
    const cot_attention_backward_args *a = &c->a;
    memset(g, 0, sizeof *g);
    if (cot_is_present(&a->dq))
        g->fields[g->count++] = (head_field){.local = a->dq, .gathered = line->dq, .add = a->accumulate};
    if (cot_is_present(&a->dk)) {
        g->dk = attention_take(memory, c->sum, 4, a->dk.shape);
        g->fields[g->count++] = (head_field){.local = g->dk, .gathered = line->dk, .keys = true, .add = true};
    }
    if (cot_is_present(&a->dv)) {
        g->dv = attention_take(memory, c->sum, 4, a->dv.shape);
        g->fields[g->count++] = (head_field){.local = g->dv, .gathered = line->dv, .keys = true, .add = true};
    }
    g->exchange = attention_take_exchange(c, memory, g->fields, g->count, false);
}

static cot_status store_gradients(const attention_call *c, const gradients *line, gradient_fields *g)
{
    const cot_attention_backward_args *a = &c->a;
    cot_group *group = c->base.group;
    if (c->C == 1 && c->options.all_gather)
        return COT_OK;
    if (c->C == 1) {
        CHECK(cot_group_copy(group, &a->dq, &line->dq, a->accumulate));
        CHECK(cot_group_copy(group, &a->dk, &line->dk, a->accumulate));
        return cot_group_copy(group, &a->dv, &line->dv, a->accumulate);
    }
    CHECK(cot_group_fill(group, &g->dk, 0));
    CHECK(cot_group_fill(group, &g->dv, 0));
    CHECK(attention_to_rows(c, &g->exchange, g->fields, g->count));
    CHECK(cot_group_copy(group, &a->dk, &g->dk, a->accumulate));
    return cot_group_copy(group, &a->dv, &g->dv, a->accumulate);
}

/* The gradients of the line. An all-gather without an exchange of heads writes the caller's dq, dk and dv. */
static gradients take_line(const attention_call *c, cot_arena *memory, block *sums)
{
    const cot_attention_backward_args *a = &c->a;
    gradients line = {a->dq, a->dk, a->dv, {0}, a->accumulate};
    if (c->C > 1 || !c->options.all_gather) {
        *sums = attention_take_block(c, memory, c->line, c->sum, cot_is_present(&a->dk), cot_is_present(&a->dv));
        line = (gradients){.dk = sums->k, .dv = sums->v};
        if (cot_is_present(&a->dq))
            line.dq = attention_take(memory, c->sum, 4,
                                     (const int64_t[]){c->batches, c->q_lines[c->line].rows, c->heads, c->d});
    }
    if (cot_is_present(&a->dbias))
        line.dbias = attention_take(memory, c->sum, 4, a->dbias.shape);
    return line;
}

cot_status attention_run_backward(attention_call *c, cot_arena *memory)
{
    const bool all_gather = c->options.all_gather;
    ring_backward ring = {0};
    key_gather gather = {0};
    block sums = {0};
    const cot_attention_backward_args *a = &c->a;
    head_field inputs[6];
    cot_messages before = {0};
    gradient_fields fields = {0};
    const int64_t rows = c->q_lines[c->line].rows;
    const int64_t own_rows = c->q_ranks[c->column].rows;
    cot_tensor delta = a->delta;
    if (!cot_is_present(&delta))
        delta = attention_take(memory, c->sum, 3, (const int64_t[]){c->batches, c->H, own_rows});
    attention_take_used(c, memory);
    c->q = a->q, c->k = a->k, c->v = a->v, c->lse = a->lse, c->delta = delta, c->dout = a->dout;
    if (c->C > 1) {
        const int64_t statistic[] = {c->batches, c->heads, rows};
        take_inputs(c, memory, inputs);
        c->dout = attention_take(memory, c->dtype, 4, (const int64_t[]){c->batches, rows, c->heads, c->d_v});
        c->lse = attention_take(memory, c->sum, 3, statistic), c->delta = attention_take(memory, c->sum, 3, statistic);
        inputs[3] = (head_field){.local = a->dout, .gathered = c->dout};
        inputs[4] = (head_field){.local = a->lse, .gathered = c->lse, .statistic = true};
        inputs[5] = (head_field){.local = delta, .gathered = c->delta, .statistic = true};
        before = attention_take_exchange(c, memory, inputs, 6, true);
    }
    const gradients line = take_line(c, memory, &sums);
    if (all_gather)
        attention_take_gather(c, memory, &gather);
    else
        attention_take_ring_backward(c, memory, &line, &sums, &ring);
    if (c->C > 1)
        take_fields(c, &line, memory, &fields);
    const parameter_sums parameters = attention_take_parameters(c, memory);
    if (memory->counting)
        return COT_OK;

    CHECK(attention_fill_used(c));
    CHECK(find_delta(c, &delta));
    if (c->C > 1)
        CHECK(attention_to_heads(c, &before, inputs, 6));
    CHECK(end_transfers(c,
                        all_gather ? attention_gather_backward(c, &gather, &line) : attention_ring_backward(c, &ring)));
    CHECK(attention_sum_parameters(c, &parameters, &delta, &line.dbias));
    return store_gradients(c, &line, &fields);
}

/* ---- the calls ------------------------------------------------------------------------------------------------ */

static cot_status run_with_memory(void *call, cot_arena *memory)
{
    attention_call *c = call;
    return c->backward ? attention_run_backward(c, memory) : attention_run_forward(c, memory);
}

static cot_status run_call(attention_call *c)
{
    return cot_group_run(&c->base, attention_check, attention_words, run_with_memory, attention_free);
}

cot_status cot_parallel_attention_forward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                          const cot_attention_forward_args *args)
{
    attention_call c = {
        .base = {.name = "parallel_attention_forward", .group = group, .queue = queue}, .given = options, .args = args};
    return run_call(&c);
}

cot_status cot_parallel_attention_backward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                           const cot_attention_backward_args *args)
{
    attention_call c = {.base = {.name = "parallel_attention_backward", .group = group, .queue = queue},
                        .given = options,
                        .args = args,
                        .backward = true};
    return run_call(&c);
}
