/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_heads.c: the all-to-all exchange of a line. Before attention, each rank sends each column the heads of that
 * column for its own rows. Afterwards each rank sends each column that column's rows of the results.
 *
 * A message holds its tensors one after the other, each as a contiguous part. */
#include "attention_call.h"

#include "core/front.h"
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

head_exchange attention_take_exchange(const attention_call *c, cot_arena *memory, const head_field *fields, int count,
                                      bool to_heads)
{
    head_exchange x = {cot_arena_take(memory, c->C, sizeof(char *)), cot_arena_take(memory, c->C, sizeof(char *)),
                       cot_arena_take(memory, c->C, sizeof(size_t)), cot_arena_take(memory, c->C, sizeof(size_t))};
    for (int64_t m = 0; m < c->C; m++) {
        const size_t sent = message_bytes(c, fields, count, to_heads ? c->column : m);
        const size_t received = message_bytes(c, fields, count, to_heads ? m : c->column);
        char *const send = cot_arena_take(memory, (int64_t)sent, 1), *const receive =
                                                                         cot_arena_take(memory, (int64_t)received, 1);
        if (memory->base != NULL)
            x.send[m] = send, x.receive[m] = receive, x.send_bytes[m] = sent, x.receive_bytes[m] = received;
    }
    return x;
}

/* Copies between the rows of a line's tensor and the part that belongs to the rank in `column`. */
static void copy_rows(const attention_call *c, const head_field *f, int64_t column, const cot_tensor *part,
                      bool to_part)
{
    const cot_segments *rank = &(f->keys ? c->k_ranks : c->q_ranks)[column];
    const cot_segments *line = &(f->keys ? c->k_lines : c->q_lines)[c->line];
    const int axis = f->statistic ? 2 : 1;
    for (int64_t n = 0; n < rank->count; n++) {
        const cot_segment *s = &rank->list[n];
        const cot_tensor in_part = cot_slice(part, axis, s->row, s->rows);
        const cot_tensor in_line = cot_slice(&f->gathered, axis, cot_segments_find(line, s->begin), s->rows);
        cot_copy_tensor(to_part ? &in_part : &in_line, to_part ? &in_line : &in_part, false);
    }
}

static cot_status exchange(const attention_call *c, head_exchange *x)
{
    return cot_group_all_to_all(c->group, (int)(c->line * c->C), (int)c->C, (void *const *)x->send, x->send_bytes,
                                (void *const *)x->receive, x->receive_bytes);
}

cot_status attention_to_heads(const attention_call *c, head_exchange *x, const head_field *fields, int count)
{
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {x->send[m], 0};
        for (int n = 0; n < count; n++) {
            const head_field *f = &fields[n];
            const cot_tensor part = part_of(c, f, &message, c->column, f->gathered.dtype);
            const cot_tensor heads = cot_slice(&f->local, f->statistic ? 1 : 2, first_head(c, f, m), head_count(c, f));
            cot_copy_tensor(&part, &heads, false);
        }
    }
    CHECK(exchange(c, x));
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {x->receive[m], 0};
        for (int n = 0; n < count; n++) {
            const cot_tensor part = part_of(c, &fields[n], &message, m, fields[n].gathered.dtype);
            copy_rows(c, &fields[n], m, &part, false);
        }
    }
    return COT_OK;
}

cot_status attention_to_rows(const attention_call *c, head_exchange *x, const head_field *fields, int count)
{
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {x->send[m], 0};
        for (int n = 0; n < count; n++) {
            const cot_tensor part = part_of(c, &fields[n], &message, m, fields[n].gathered.dtype);
            copy_rows(c, &fields[n], m, &part, true);
        }
    }
    CHECK(exchange(c, x));
    for (int64_t m = 0; m < c->C; m++) {
        cot_arena message = {x->receive[m], 0};
        for (int n = 0; n < count; n++) {
            const head_field *f = &fields[n];
            const cot_tensor part = part_of(c, f, &message, c->column, f->gathered.dtype);
            const cot_tensor heads = cot_slice(&f->local, f->statistic ? 1 : 2, first_head(c, f, m), head_count(c, f));
            cot_copy_tensor(&heads, &part, f->add);
        }
    }
    return COT_OK;
}
