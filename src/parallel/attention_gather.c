/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_gather.c: every line gathers the keys and values that its queries attend to, in the order of the sequence.
 * One call of the core per range of queries then attends to all of them, so that no partial results are merged. In the
 * backward a line computes dk and dv of all these keys, in the dtype of sums. The line that holds a key adds the parts of
 * all lines, in the order of the lines.
 *
 * Runs are rows of keys that one line attends to and another line holds without a gap. A row of `keys` and of `parts` has
 * all batches and begins at a multiple of COT_ALIGNMENT, so that a run is one message, which is sent from where it is and
 * arrives where it is needed.
 *
 * If all ranks read each other's memory, nothing is sent. All lines copy their keys to the memory of line 0 and attend to
 * them there, and each line adds the parts from where they are. */
#include "attention_call.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/tensor.h"

#include <math.h>

/* ---- rows ------------------------------------------------------------------------------------------------------ */

static row_span span_of(const row_spans *spans)
{
    return spans->count > 0 ? (row_span){spans->list[0].begin, spans->list[spans->count - 1].end} : (row_span){0, 0};
}

/* From the first to the last row that the line holds or attends to. */
static row_span rows_of_line(const attention_call *c)
{
    const cot_segments *own = &c->k_lines[c->line];
    const row_span seen = span_of(&c->seen[c->line]);
    if (own->count == 0)
        return seen;
    const cot_segment *last = &own->list[own->count - 1];
    const row_span held = {own->list[0].begin, last->begin + last->rows};
    return seen.begin == seen.end ? held : (row_span){cot_min(held.begin, seen.begin), cot_max(held.end, seen.end)};
}

/* [B,rows,Hkv,size] */
static cot_tensor take_rows(const attention_call *c, cot_arena *memory, cot_dtype dtype, int64_t rows, int64_t size)
{
    const int64_t unit = COT_ALIGNMENT / (int64_t)cot_dtype_size(dtype);
    const int64_t row = cot_round_up(COT_PRODUCT(c->batches, c->kv_heads, size), unit);
    const int64_t shape[] = {c->batches, rows, c->kv_heads, size};
    void *data = cot_arena_take(memory, cot_mul(rows, row), cot_dtype_size(dtype));
    cot_tensor t = cot_tensor_contiguous(data, dtype, 4, shape);
    t.stride[0] = c->kv_heads * size, t.stride[1] = row;
    return t;
}

static block take_part(const attention_call *c, cot_arena *memory, int64_t rows)
{
    block b = {0};
    if (cot_is_present(&c->a.dk))
        b.k = take_rows(c, memory, c->sum, rows, c->d);
    if (cot_is_present(&c->a.dv))
        b.v = take_rows(c, memory, c->sum, rows, c->d_v);
    return b;
}

/* The bytes of consecutive rows. */
static char *bytes_of_rows(const cot_tensor *t, int64_t first, int64_t rows, size_t *bytes)
{
    const int64_t row = t->stride[1] * (int64_t)cot_dtype_size(t->dtype);
    *bytes = (size_t)(rows * row);
    return (char *)t->data + first * row;
}

static block rows_of_block(const block *b, int64_t first, int64_t rows)
{
    return (block){.k = cot_slice(&b->k, 1, first, rows), .v = cot_slice(&b->v, 1, first, rows)};
}

/* Calls body for every run of keys that line `attending` attends to and line `holding` holds. row: among the rows that the
 * line holds. */
typedef cot_status run_body(void *context, row_span run, int64_t row);

static cot_status each_run(const attention_call *c, int64_t attending, int64_t holding, run_body *body, void *context)
{
    const row_spans *spans = &c->seen[attending];
    const cot_segments *segments = &c->k_lines[holding];
    for (int64_t n = 0, m = 0; n < spans->count && m < segments->count;) {
        const row_span *span = &spans->list[n];
        const cot_segment *segment = &segments->list[m];
        const int64_t segment_end = segment->begin + segment->rows;
        const row_span run = {cot_max(span->begin, segment->begin), cot_min(span->end, segment_end)};
        if (run.begin < run.end)
            CHECK(body(context, run, segment->row + run.begin - segment->begin));
        if (span->end < segment_end)
            n++;
        else
            m++;
    }
    return COT_OK;
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

static cot_status count_run(void *context, row_span run, int64_t row)
{
    (void)run, (void)row;
    *(int64_t *)context += 2; /* k and v */
    return COT_OK;
}

static cot_transfer *take_transfers(cot_arena *memory, int64_t count)
{
    return cot_arena_take_host(memory, count, sizeof(cot_transfer));
}

void attention_take_gather(const attention_call *c, cot_arena *memory, key_gather *g)
{
    cot_group *group = c->base.group;
    const bool gathers_for_all = c->line == 0 && group->engine->shares_memory != NULL;
    int64_t in = c->R, out = 2 * c->R; /* of lends and borrows, up to two with each line */
    for (int64_t line = 0; line < c->R; line++)
        if (line != c->line) {
            each_run(c, c->line, line, count_run, &in);
            each_run(c, line, c->line, count_run, &out);
        }
    /* Before the first agreement a rank may not know whether it will share memory. It then counts enough for both. */
    g->shared = cot_group_shares_memory(group);
    g->rows = gathers_for_all && (g->shared || memory->counting) ? (row_span){0, c->Tk} : rows_of_line(c);
    if (!g->shared || c->line == 0) {
        g->keys.k = take_rows(c, memory, c->dtype, g->rows.end - g->rows.begin, c->d);
        g->keys.v = take_rows(c, memory, c->dtype, g->rows.end - g->rows.begin, c->d_v);
    }
    g->receives = take_transfers(memory, in), g->sends = take_transfers(memory, out);
    if (!c->backward || !attention_has_key_gradients(c))
        return;
    g->part_rows = span_of(&c->seen[c->line]);
    g->parts = take_part(c, memory, g->part_rows.end - g->part_rows.begin);
    g->part_receives = take_transfers(memory, out), g->part_sends = take_transfers(memory, in);
    g->received = cot_arena_take_host(memory, c->R, sizeof *g->received);
    for (int64_t line = 0; line < c->R && !g->shared; line++) {
        const block part = line != c->line ? take_part(c, memory, c->k_lines[c->line].rows) : (block){0};
        if (g->received != NULL)
            g->received[line] = part;
    }
    const int64_t ranges = c->q_ranges[c->line].first[c->packed ? c->B : 1];
    g->written.list = cot_arena_take_host(memory, ranges + 1, sizeof *g->written.list);
}

/* ---- transfers of runs ------------------------------------------------------------------------------------------ */

/* The runs of one line that are sent or received. */
typedef struct run_transfers {
    cot_group *group;
    const block *rows;
    int64_t first; /* the row of all keys where `rows` begins; -1: it has the rows that a line holds */
    int peer, tag;
    bool receive;
    cot_transfer *list;
    int *count;
} run_transfers;

static cot_status transfer_run(void *context, row_span run, int64_t row)
{
    const run_transfers *t = context;
    const cot_tensor *const tensors[] = {&t->rows->k, &t->rows->v};
    for (int n = 0; n < 2; n++) {
        size_t bytes;
        if (!cot_is_present(tensors[n]))
            continue;
        char *data = bytes_of_rows(tensors[n], t->first < 0 ? row : run.begin - t->first, run.end - run.begin, &bytes);
        cot_transfer *transfer = &t->list[(*t->count)++];
        CHECK(t->receive ? cot_group_receive(t->group, transfer, t->peer, t->tag, data, bytes)
                         : cot_group_send(t->group, transfer, t->peer, t->tag, data, bytes));
    }
    return COT_OK;
}

/* Copies the line's keys to their rows. */
static cot_status copy_line(const attention_call *c, const key_gather *to)
{
    const cot_segments *segments = &c->k_lines[c->line];
    for (int64_t n = 0; n < segments->count; n++) {
        const cot_segment *s = &segments->list[n];
        const block rows = rows_of_block(&to->keys, s->begin - to->rows.begin, s->rows);
        const cot_tensor k = cot_slice(&c->k, 1, s->row, s->rows), v = cot_slice(&c->v, 1, s->row, s->rows);
        CHECK(cot_group_copy(c->base.group, &rows.k, &k, false));
        CHECK(cot_group_copy(c->base.group, &rows.v, &v, false));
    }
    return COT_OK;
}

static cot_status exchange_keys(const attention_call *c, key_gather *g)
{
    cot_group *group = c->base.group;
    CHECK(copy_line(c, g));
    for (int64_t line = 0; line < c->R; line++) {
        run_transfers t = {.group = group,
                           .rows = &g->keys,
                           .first = g->rows.begin,
                           .peer = attention_rank_of(c, line),
                           .tag = TAG_KEYS,
                           .receive = true,
                           .list = g->receives,
                           .count = &g->receive_count};
        if (line == c->line)
            continue;
        CHECK(each_run(c, c->line, line, transfer_run, &t));
        t.receive = false, t.list = g->sends, t.count = &g->send_count;
        CHECK(each_run(c, line, c->line, transfer_run, &t));
    }
    CHECK(cot_group_flush(group));
    return cot_group_wait(group, g->receives, g->receive_count);
}

/* Sends each line the parts for its keys. */
static cot_status exchange_parts(const attention_call *c, key_gather *g)
{
    cot_group *group = c->base.group;
    for (int64_t line = 0; line < c->R; line++) {
        run_transfers t = {.group = group,
                           .rows = &g->received[line],
                           .first = -1,
                           .peer = attention_rank_of(c, line),
                           .tag = TAG_PARTS,
                           .receive = true,
                           .list = g->part_receives,
                           .count = &g->part_receive_count};
        if (line == c->line)
            continue;
        CHECK(each_run(c, line, c->line, transfer_run, &t));
        t.rows = &g->parts, t.first = g->part_rows.begin;
        t.receive = false, t.list = g->part_sends, t.count = &g->part_send_count;
        CHECK(each_run(c, c->line, line, transfer_run, &t));
    }
    CHECK(cot_group_flush(group));
    return cot_group_wait(group, g->part_receives, g->part_receive_count);
}

/* ---- shared memory ------------------------------------------------------------------------------------------------ */

static cot_status lend_to_lines(const attention_call *c, key_gather *g)
{
    for (int64_t line = 1; line < c->R; line++)
        CHECK(cot_group_lend(c->base.group, &g->sends[g->send_count++], attention_rank_of(c, line), TAG_KEYS, g));
    return COT_OK;
}

/* Line 0 lends its memory twice: the other lines write their keys there, and then read those of all lines. */
static cot_status lend_keys(const attention_call *c, key_gather *g)
{
    CHECK(lend_to_lines(c, g));
    CHECK(copy_line(c, g));
    CHECK(cot_group_wait(c->base.group, g->sends, g->send_count));
    return lend_to_lines(c, g);
}

static cot_status borrow_keys(const attention_call *c, key_gather *g)
{
    cot_group *group = c->base.group;
    const int lender = attention_rank_of(c, 0);
    CHECK(cot_group_borrow(group, &g->receives[0], lender, TAG_KEYS));
    CHECK(cot_group_wait(group, &g->receives[0], 1));
    CHECK(copy_line(c, g->receives[0].data));
    CHECK(cot_group_return(group, &g->receives[0]));
    CHECK(cot_group_borrow(group, &g->receives[0], lender, TAG_KEYS));
    CHECK(cot_group_wait(group, &g->receives[0], 1));
    const key_gather *other = g->receives[0].data;
    g->keys = other->keys, g->rows = other->rows;
    return COT_OK;
}

static cot_status gather_keys(const attention_call *c, key_gather *g)
{
    return !g->shared ? exchange_keys(c, g) : c->line == 0 ? lend_keys(c, g) : borrow_keys(c, g);
}

/* Follows after the last call that reads the keys. */
static cot_status release_keys(const attention_call *c, const key_gather *g)
{
    return g->shared && c->line > 0 ? cot_group_return(c->base.group, &g->receives[0]) : COT_OK;
}

static cot_status borrow_parts(const attention_call *c, key_gather *g)
{
    cot_group *group = c->base.group;
    for (int64_t line = 0; line < c->R; line++) {
        const int peer = attention_rank_of(c, line);
        g->part_receives[line] = (cot_transfer){0};
        if (line == c->line)
            continue;
        CHECK(cot_group_lend(group, &g->part_sends[g->part_send_count++], peer, TAG_PARTS, g));
        CHECK(cot_group_borrow(group, &g->part_receives[line], peer, TAG_PARTS));
    }
    return cot_group_wait(group, g->part_receives, (int)c->R);
}

static cot_status return_parts(const attention_call *c, const key_gather *g)
{
    for (int64_t line = 0; line < c->R; line++)
        if (line != c->line)
            CHECK(cot_group_return(c->base.group, &g->part_receives[line]));
    return COT_OK;
}

/* ---- forward ------------------------------------------------------------------------------------------------------ */

static cot_status attend_head(const attention_call *c, void *context, const range_pair *pair, int64_t b, int64_t h)
{
    const key_gather *g = context;
    const row_range *q = &pair->q;
    cot_attention_forward_args x;
    COT_INIT(&x);
    x.out = attention_rows_of(c, &g->results->out, false, b, q->row, q->rows, h);
    x.lse = attention_rows_of(c, &g->results->lse, true, b, q->row, q->rows, h);
    if (!attention_has_positions(c))
        x.sink = cot_slice(&c->a.sink, 0, c->column * c->heads, c->heads);
    return attention_core_forward(c, pair, &g->keys, b, h, &x);
}

static cot_status attend(const attention_call *c, void *context, const range_pair *pair)
{
    const key_gather *g = context;
    range_pair placed = *pair;
    placed.k.row = pair->k.rows > 0 ? pair->k.row - g->rows.begin : 0;
    return attention_each_head(c, context, &placed, attend_head);
}

/* Whether there are rows of queries that belong to no sequence. */
static bool has_rows_beyond(const attention_call *c)
{
    return c->packed && attention_index(&c->a.cu_seqlens_q, c->B) < c->Tq;
}

cot_status attention_gather_forward(const attention_call *c, key_gather *g, const results *to)
{
    cot_group *group = c->base.group;
    if (has_rows_beyond(c)) {
        CHECK(cot_group_fill(group, &to->out, 0));
        CHECK(cot_group_fill(group, &to->lse, -INFINITY));
    }
    g->results = to;
    CHECK(gather_keys(c, g));
    CHECK(attention_each_query_range(c, attend, g));
    CHECK(release_keys(c, g));
    return cot_group_wait(group, g->sends, g->send_count);
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

static cot_status clear_rows(const attention_call *c, const cot_tensor *t, int64_t first, int64_t rows)
{
    size_t bytes;
    if (!cot_is_present(t) || rows <= 0)
        return COT_OK;
    char *data = bytes_of_rows(t, first, rows, &bytes);
    return cot_group_clear(c->base.group, data, bytes);
}

static bool has_written(const row_spans *written, row_span span)
{
    for (int64_t n = 0; n < written->count; n++)
        if (cot_max(written->list[n].begin, span.begin) < cot_min(written->list[n].end, span.end))
            return true;
    return false;
}

/* Clears the rows of parts in a span that no call has written. */
static cot_status clear_unwritten(const attention_call *c, const key_gather *g, row_span span)
{
    int64_t row = span.begin;
    for (int64_t n = 0; n <= g->written.count && row < span.end; n++) {
        const row_span written = n < g->written.count ? g->written.list[n] : (row_span){span.end, span.end};
        const int64_t end = cot_min(written.begin, span.end);
        CHECK(clear_rows(c, &g->parts.k, row - g->part_rows.begin, end - row));
        CHECK(clear_rows(c, &g->parts.v, row - g->part_rows.begin, end - row));
        row = cot_max(row, written.end);
    }
    return COT_OK;
}

/* The first call on a key writes its part, and later calls add to it. A call that adds also adds to dq. */
static cot_status differentiate(const attention_call *c, void *context, const range_pair *pair)
{
    key_gather *g = context;
    const row_span span = {pair->k.row, pair->k.row + pair->k.rows};
    const bool empty = pair->k.rows == 0, has_parts = attention_has_key_gradients(c) && !empty;
    const block keys = rows_of_block(&g->keys, empty ? 0 : span.begin - g->rows.begin, pair->k.rows);
    const block parts = rows_of_block(&g->parts, empty ? 0 : span.begin - g->part_rows.begin, pair->k.rows);
    gradients to = *g->gradients;
    range_pair placed = *pair;
    placed.k.row = 0;
    to.dk = parts.k, to.dv = parts.v;
    to.add = to.add || cot_is_present(&to.dbias) || c->single || (has_parts && has_written(&g->written, span));
    if (to.add && has_parts)
        CHECK(clear_unwritten(c, g, span));
    if (to.add && !g->gradients->add) {
        const cot_tensor dq = attention_rows_of(c, &to.dq, false, -1, pair->q.row, pair->q.rows, -1);
        CHECK(cot_group_fill(c->base.group, &dq, 0));
    }
    if (has_parts)
        attention_add_span(&g->written, span);
    return attention_core_backward(c, &placed, &keys, &to);
}

/* The parts of a line for this line's keys. */
typedef struct part_source {
    block rows;
    int64_t first; /* as in run_transfers */
} part_source;

/* Whether a line attends to a row. Lowers *next to the next row where the answer differs. */
static bool attends_to_row(const row_spans *spans, int64_t row, int64_t *next)
{
    int64_t n = 0;
    while (n < spans->count && spans->list[n].end <= row)
        n++;
    if (n == spans->count)
        return false;
    const bool inside = spans->list[n].begin <= row;
    *next = cot_min(*next, inside ? spans->list[n].end : spans->list[n].begin);
    return inside;
}

/* Adds the parts of consecutive rows of keys to which the same lines attend. */
static cot_status sum_run(const attention_call *c, const part_source *sources, const int64_t lines[], int count,
                          row_span run, int64_t row, const gradients *to)
{
    cot_tensor k[COT_MAX_SOURCES], v[COT_MAX_SOURCES];
    const int64_t rows = run.end - run.begin;
    for (int n = 0; n < count; n++) {
        const part_source *s = &sources[lines[n]];
        const block part = rows_of_block(&s->rows, s->first < 0 ? row : run.begin - s->first, rows);
        k[n] = part.k, v[n] = part.v;
    }
    const cot_tensor dk = cot_slice(&to->dk, 1, row, rows), dv = cot_slice(&to->dv, 1, row, rows);
    CHECK(cot_group_sum_tensors(c->base.group, &dk, k, count, to->add));
    return cot_group_sum_tensors(c->base.group, &dv, v, count, to->add);
}

static cot_status sum_parts(const attention_call *c, const key_gather *g, const gradients *to)
{
    const cot_segments *own = &c->k_lines[c->line];
    part_source sources[COT_MAX_SOURCES];
    for (int64_t line = 0; line < c->R; line++) {
        const key_gather *other = line == c->line ? g : g->shared ? g->part_receives[line].data : NULL;
        sources[line] =
            other != NULL ? (part_source){other->parts, other->part_rows.begin} : (part_source){g->received[line], -1};
    }
    for (int64_t n = 0; n < own->count; n++) {
        const cot_segment *s = &own->list[n];
        int64_t next;
        for (int64_t row = s->begin; row < s->begin + s->rows; row = next) {
            int64_t lines[COT_MAX_SOURCES];
            int count = 0;
            next = s->begin + s->rows;
            for (int64_t line = 0; line < c->R; line++)
                if (attends_to_row(&c->seen[line], row, &next))
                    lines[count++] = line;
            CHECK(sum_run(c, sources, lines, count, (row_span){row, next}, s->row + row - s->begin, to));
        }
    }
    return COT_OK;
}

cot_status attention_gather_backward(const attention_call *c, key_gather *g, const gradients *to)
{
    cot_group *group = c->base.group;
    CHECK(cot_group_fill(group, &to->dbias, 0));
    if (has_rows_beyond(c) && !to->add)
        CHECK(cot_group_fill(group, &to->dq, 0));
    g->gradients = to;
    CHECK(gather_keys(c, g));
    CHECK(attention_each_query_range(c, differentiate, g));
    CHECK(release_keys(c, g));
    if (attention_has_key_gradients(c)) {
        CHECK(g->shared ? borrow_parts(c, g) : exchange_parts(c, g));
        CHECK(sum_parts(c, g, to));
        CHECK(g->shared ? return_parts(c, g) : COT_OK);
        CHECK(cot_group_wait(group, g->part_sends, g->part_send_count));
    }
    return cot_group_wait(group, g->sends, g->send_count);
}
