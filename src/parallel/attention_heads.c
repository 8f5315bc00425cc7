/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_heads.c: the all-to-all exchange of a line. Before attention, each rank sends each column the heads of that
 * column for its own rows. Afterwards each rank sends each column that column's rows of the results.
 *
 * A message holds its tensors one after the other, each as a contiguous part. */
#include "attention_call.h"

#include "core/argument_checks.h"
#include "core/integers.h"

/* The heads of a tensor that a column computes. With C > Hkv several columns share a key-value head. */
static int64_t first_head(const attention_call *c, const head_field *f, int64_t column)
{
    return f->keys ? (c->Hkv >= c->C ? column * c->kv_heads : column / (c->C / c->Hkv)) : column * c->heads;
}

static int64_t head_count(const attention_call *c, const head_field *f)
{
    return f->keys ? c->kv_heads : c->heads;
}

/* The next tensor of a message: the rows of the rank in `column`, for the heads of one column. */
static cot_tensor part_of(const attention_call *c, const head_field *f, cot_arena *message, int64_t column,
                          cot_dtype dtype)
{
    const int64_t rows = (f->keys ? c->k_ranks : c->q_ranks)[column].rows, heads = head_count(c, f);
    if (f->statistic)
        return attention_take(message, dtype, 3, (const int64_t[]){c->batches, heads, rows});
    return attention_take(message, dtype, 4, (const int64_t[]){c->batches, rows, heads, f->local.shape[3]});
}

static size_t message_bytes(const attention_call *c, const head_field *fields, int count, int64_t column)
{
    cot_arena message = {0};
    for (int n = 0; n < count; n++)
        part_of(c, &fields[n], &message, column, fields[n].gathered.dtype);
    return message.used;
}

typedef struct exchange_sizes {
    const attention_call *c;
    const head_field *fields;
    int count;
    bool to_heads;
} exchange_sizes;

static void sizes_of(void *context, int64_t column, size_t *sent, size_t *received)
{
    const exchange_sizes *s = context;
    *sent = message_bytes(s->c, s->fields, s->count, s->to_heads ? s->c->column : column);
    *received = message_bytes(s->c, s->fields, s->count, s->to_heads ? column : s->c->column);
}

cot_messages attention_take_exchange(const attention_call *c, cot_arena *memory, const head_field *fields, int count,
                                     bool to_heads)
{
    exchange_sizes sizes = {c, fields, count, to_heads};
    return cot_messages_take(memory, c->C, sizes_of, &sizes);
}

/* Copies between the rows of a line's tensor and the part that belongs to the rank in `column`. */
static cot_status copy_rows(const attention_call *c, const head_field *f, int64_t column, const cot_tensor *part,
                            bool to_part)
{
    const cot_segments *rank = &(f->keys ? c->k_ranks : c->q_ranks)[column];
    const cot_segments *line = &(f->keys ? c->k_lines : c->q_lines)[c->line];
    const int axis = f->statistic ? 2 : 1;
    for (int64_t n = 0; n < rank->count; n++) {
        const cot_segment *s = &rank->list[n];
        const cot_tensor in_part = cot_slice(part, axis, s->row, s->rows);
        const cot_tensor in_line = cot_slice(&f->gathered, axis, cot_segments_find(line, s->begin), s->rows);
        CHECK(cot_group_copy(c->base.group, to_part ? &in_part : &in_line, to_part ? &in_line : &in_part, false));
    }
    return COT_OK;
}

static cot_status exchange(const attention_call *c, const cot_messages *x)
{
    return cot_messages_exchange(c->base.group, (int)(c->line * c->C), (int)c->C, x);
}

cot_status attention_to_heads(const attention_call *c, const cot_messages *x, const head_field *fields, int count)
{
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {.base = x->send[m]};
        for (int n = 0; n < count; n++) {
            const head_field *f = &fields[n];
            const cot_tensor part = part_of(c, f, &message, c->column, f->gathered.dtype);
            const cot_tensor heads = cot_slice(&f->local, f->statistic ? 1 : 2, first_head(c, f, m), head_count(c, f));
            CHECK(cot_group_copy(c->base.group, &part, &heads, false));
        }
    }
    CHECK(exchange(c, x));
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {.base = x->receive[m]};
        for (int n = 0; n < count; n++) {
            const cot_tensor part = part_of(c, &fields[n], &message, m, fields[n].gathered.dtype);
            CHECK(copy_rows(c, &fields[n], m, &part, false));
        }
    }
    return COT_OK;
}

cot_status attention_to_rows(const attention_call *c, const cot_messages *x, const head_field *fields, int count)
{
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {.base = x->send[m]};
        for (int n = 0; n < count; n++) {
            const cot_tensor part = part_of(c, &fields[n], &message, m, fields[n].gathered.dtype);
            CHECK(copy_rows(c, &fields[n], m, &part, true));
        }
    }
    CHECK(exchange(c, x));
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {.base = x->receive[m]};
        for (int n = 0; n < count; n++) {
            const head_field *f = &fields[n];
            const cot_tensor part = part_of(c, f, &message, c->column, f->gathered.dtype);
            const cot_tensor heads = cot_slice(&f->local, f->statistic ? 1 : 2, first_head(c, f, m), head_count(c, f));
            CHECK(cot_group_copy(c->base.group, &heads, &part, f->add));
        }
    }
    return COT_OK;
}
