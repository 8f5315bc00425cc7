/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_ranges.c: which rows the lines hold, which of them attend to each other, and the core's arguments for two
 * ranges.
 *
 * A range of a packed sequence is a block of an unpacked call with one sequence. Its mask follows from the lengths in
 * seqused, so that q_begin and q_length are free to place the rows of the dropout mask: row h * R + row of the header's
 * formula is q_begin + i if q_begin is `base` plus the row in the sequence, and seqused_q is `base` plus the length. */
#include "attention_call.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/tensor.h"

#include <stdlib.h>

int64_t attention_index(const cot_tensor *tensor, int64_t i)
{
    return ((const int32_t *)tensor->data)[i * tensor->stride[0]];
}

/* Rows of sequence b, without seqused. */
static int64_t length_of(const attention_call *c, bool keys, int64_t b)
{
    const cot_tensor *cu = keys ? &c->a.cu_seqlens_k : &c->a.cu_seqlens_q;
    return c->packed ? attention_index(cu, b + 1) - attention_index(cu, b) : keys ? c->Tk : c->Tq;
}

int64_t attention_used(const attention_call *c, bool keys, int64_t b)
{
    const cot_tensor *used = keys ? &c->a.seqused_k : &c->a.seqused_q;
    return cot_is_present(used) ? attention_index(used, b) : length_of(c, keys, b);
}

/* The first row of sequence b among the rows of all sequences. */
static int64_t row_of(const attention_call *c, bool keys, int64_t b)
{
    return !c->packed ? 0 : attention_index(keys ? &c->a.cu_seqlens_k : &c->a.cu_seqlens_q, b);
}

static bool make_ranges(const attention_call *c, bool keys, const cot_segments *segments, row_ranges *p)
{
    const int64_t sequences = c->packed ? c->B : 1;
    int64_t count = 0;
    p->list = calloc((size_t)(segments->count + sequences), sizeof *p->list); /* a segment begins at most one more */
    p->first = calloc((size_t)sequences + 1, sizeof *p->first);
    if (p->list == NULL || p->first == NULL)
        return false;
    int64_t segment = 0;
    for (int64_t b = 0; b < sequences; b++) {
        const int64_t begin = row_of(c, keys, b), end = begin + length_of(c, keys, b);
        p->first[b] = count;
        while (segment < segments->count && segments->list[segment].begin + segments->list[segment].rows <= begin)
            segment++;
        for (int64_t n = segment; n < segments->count && segments->list[n].begin < end; n++) {
            const cot_segment *s = &segments->list[n];
            const int64_t first = cot_max(s->begin, begin), last = cot_min(s->begin + s->rows, end);
            p->list[count++] = (row_range){b, s->row + first - s->begin, last - first, first - begin};
        }
    }
    p->first[sequences] = count;
    return true;
}

/* The keys of sequence b that a range of queries attends to, as positions in the sequence. The visible keys of consecutive
 * queries overlap or meet, so that their union is a range. No keys: 0 .. 0. */
static row_span keys_of_batch(const attention_call *c, const row_range *q, int64_t b)
{
    const int64_t used_q = attention_used(c, false, b), used_k = attention_used(c, true, b), off = used_k - used_q;
    const int64_t last_q = cot_min(q->begin + q->rows, used_q) - 1;
    const row_span keys = {cot_max(q->begin + off - c->left, 0), cot_min(last_q + off + c->right + 1, used_k)};
    return q->begin <= last_q && keys.begin < keys.end ? keys : (row_span){0, 0};
}

static bool attends_to(const attention_call *c, const row_range *q, const row_range *k, int64_t b)
{
    const row_span keys = keys_of_batch(c, q, b);
    return cot_max(keys.begin, k->begin) < cot_min(keys.end, k->begin + k->rows);
}

/* Batches of an unpacked call that may differ in their visible keys. */
static int64_t batches_that_differ(const attention_call *c)
{
    const bool equal = !cot_is_present(&c->a.seqused_q) && !cot_is_present(&c->a.seqused_k);
    return equal ? cot_min(1, c->B) : c->B;
}

bool attention_attends(const attention_call *c, const row_range *q, const row_range *k)
{
    if (c->packed)
        return attends_to(c, q, k, q->b);
    for (int64_t b = 0; b < batches_that_differ(c); b++)
        if (attends_to(c, q, k, b))
            return true;
    return false;
}

/* The keys that a range of queries attends to, from the first to the last one in any batch. */
static row_span visible_keys(const attention_call *c, const row_range *q)
{
    row_span keys = {0, 0};
    if (c->packed)
        return keys_of_batch(c, q, q->b);
    for (int64_t b = 0; b < batches_that_differ(c); b++) {
        const row_span other = keys_of_batch(c, q, b);
        if (other.begin < other.end)
            keys = keys.begin < keys.end ? (row_span){cot_min(keys.begin, other.begin), cot_max(keys.end, other.end)}
                                         : other;
    }
    return keys;
}

/* ---- pairs of ranges ------------------------------------------------------------------------------------------ */

bool attention_has_positions(const attention_call *c)
{
    return c->a.dropout_p > 0 || cot_is_present(&c->a.seqused_q) || cot_is_present(&c->a.seqused_k) ||
           cot_is_present(&c->a.alibi_slopes);
}

static bool can_join(const attention_call *c)
{
    return !c->packed && !attention_has_positions(c) && !cot_is_present(&c->a.bias);
}

/* Whether every query of one range attends to every key of another; without seqused. */
static bool attends_to_all(const attention_call *c, const row_range *q, const row_range *k)
{
    const int64_t off = c->Tk - c->Tq;
    return q->begin + q->rows - 1 + off - c->left <= k->begin && q->begin + off + c->right >= k->begin + k->rows - 1;
}

/* The consecutive ranges of keys that all queries of a range attend to: first .. end. They are one range, because both
 * bounds of the mask ascend. */
typedef struct range_run {
    int64_t first, end;
} range_run;

static range_run run_of(const attention_call *c, const row_range *q, const row_ranges *keys)
{
    range_run run = {0, 0};
    while (run.first < keys->first[1] && !attends_to_all(c, q, &keys->list[run.first]))
        run.first++;
    run.end = run.first;
    while (run.end < keys->first[1] && attends_to_all(c, q, &keys->list[run.end]))
        run.end++;
    return run;
}

/* The rows of ranges first .. end, which follow each other in the line's tensors. */
static row_range rows_of_ranges(const row_ranges *p, int64_t first, int64_t end)
{
    row_range joined = p->list[first];
    joined.rows = p->list[end - 1].row + p->list[end - 1].rows - joined.row;
    return joined;
}

static cot_status each_single_pair(const attention_call *c, const row_ranges *queries, const row_ranges *keys,
                                   int64_t i, int64_t first, int64_t end, pair_body *body, void *context)
{
    for (int64_t j = first; j < end; j++) {
        const range_pair pair = {.q_index = i, .q_count = 1, .q = queries->list[i], .k = keys->list[j]};
        if (attention_attends(c, &pair.q, &pair.k))
            CHECK(body(c, context, &pair));
    }
    return COT_OK;
}

static cot_status each_joined_pair(const attention_call *c, const row_ranges *queries, const row_ranges *keys,
                                   pair_body *body, void *context)
{
    const int64_t count = queries->first[1];
    int64_t next;
    for (int64_t i = 0; i < count; i = next) {
        const range_run run = run_of(c, &queries->list[i], keys);
        for (next = i + 1; next < count; next++) {
            const range_run other = run_of(c, &queries->list[next], keys);
            if (other.first != run.first || other.end != run.end)
                break;
        }
        if (run.end > run.first) {
            const range_pair pair = {.q_index = i,
                                     .q_count = next - i,
                                     .q = rows_of_ranges(queries, i, next),
                                     .k = rows_of_ranges(keys, run.first, run.end),
                                     .joined = true};
            CHECK(body(c, context, &pair));
        }
        for (int64_t n = i; n < next; n++) {
            CHECK(each_single_pair(c, queries, keys, n, 0, run.first, body, context));
            CHECK(each_single_pair(c, queries, keys, n, run.end, keys->first[1], body, context));
        }
    }
    return COT_OK;
}

cot_status attention_each_pair(const attention_call *c, int64_t k_line, pair_body *body, void *context)
{
    const row_ranges *queries = &c->q_ranges[c->line], *keys = &c->k_ranges[k_line];
    if (!can_join(c)) {
        for (int64_t b = 0; b < (c->packed ? c->B : 1); b++)
            for (int64_t i = queries->first[b]; i < queries->first[b + 1]; i++)
                CHECK(each_single_pair(c, queries, keys, i, keys->first[b], keys->first[b + 1], body, context));
        return COT_OK;
    }
    if (k_line != c->line || c->Tq != c->Tk || c->left < ATTENTION_UNBOUNDED || c->right != 0 || queries->first[1] == 0)
        return each_joined_pair(c, queries, keys, body, context);
    /* The rows are in ascending order: query i of this line attends to its keys 0 .. i. */
    const int64_t count = queries->first[1];
    const range_pair pair = {.q_count = count,
                             .q = rows_of_ranges(queries, 0, count),
                             .k = rows_of_ranges(keys, 0, count),
                             .joined = true,
                             .causal = true};
    return body(c, context, &pair);
}

cot_status attention_each_query_range(const attention_call *c, pair_body *body, void *context)
{
    const row_ranges *queries = &c->q_ranges[c->line];
    const int64_t count = queries->first[c->packed ? c->B : 1];
    if (count > 1 && can_join(c) && c->left == ATTENTION_UNBOUNDED && c->right == ATTENTION_UNBOUNDED) {
        const range_pair pair = {
            .q_count = count, .q = rows_of_ranges(queries, 0, count), .k = {.rows = c->Tk}, .joined = true};
        return body(c, context, &pair);
    }
    for (int64_t i = count - 1; i >= 0; i--) {
        const row_range *q = &queries->list[i];
        const row_span keys = visible_keys(c, q);
        const range_pair pair = {.q_index = i,
                                 .q_count = 1,
                                 .q = *q,
                                 .k = {q->b, row_of(c, true, q->b) + keys.begin, keys.end - keys.begin, keys.begin},
                                 .complete = true};
        CHECK(body(c, context, &pair));
    }
    return COT_OK;
}

double attention_pairs(const attention_call *c, const range_pair *pair)
{
    const row_range *q = &pair->q, *k = &pair->k;
    const int64_t off = c->Tk - c->Tq;
    double pairs = 0;
    if (pair->joined)
        return pair->causal ? 0.5 * (double)q->rows * (double)(q->rows + 1) : (double)q->rows * (double)k->rows;
    for (int64_t i = q->begin + off; i < q->begin + off + q->rows; i++)
        pairs += (double)cot_max(cot_min(i + c->right, k->begin + k->rows - 1) - cot_max(i - c->left, k->begin) + 1, 0);
    return pairs;
}

static bool line_attends(const attention_call *c, const row_ranges *q, const row_ranges *k)
{
    for (int64_t b = 0; b < (c->packed ? c->B : 1); b++)
        for (int64_t i = q->first[b]; i < q->first[b + 1]; i++)
            for (int64_t j = k->first[b]; j < k->first[b + 1]; j++)
                if (attention_attends(c, &q->list[i], &k->list[j]))
                    return true;
    return false;
}

void attention_add_span(row_spans *spans, row_span span)
{
    int64_t first = 0, end;
    while (first < spans->count && spans->list[first].end < span.begin)
        first++;
    for (end = first; end < spans->count && spans->list[end].begin <= span.end; end++)
        span = (row_span){cot_min(span.begin, spans->list[end].begin), cot_max(span.end, spans->list[end].end)};
    memmove(&spans->list[first + 1], &spans->list[end], (size_t)(spans->count - end) * sizeof span);
    spans->list[first] = span;
    spans->count += first + 1 - end;
}

/* The rows of all keys that a line attends to. */
static bool find_seen(const attention_call *c, int64_t line, row_spans *seen)
{
    const row_ranges *queries = &c->q_ranges[line];
    const int64_t count = queries->first[c->packed ? c->B : 1];
    seen->list = calloc((size_t)count + 1, sizeof *seen->list);
    for (int64_t i = 0; seen->list != NULL && i < count; i++) {
        const row_span keys = visible_keys(c, &queries->list[i]);
        const int64_t row = row_of(c, true, queries->list[i].b);
        if (keys.begin < keys.end)
            attention_add_span(seen, (row_span){row + keys.begin, row + keys.end});
    }
    return seen->list != NULL;
}

bool attention_cut(attention_call *c)
{
    const int64_t size = c->base.group->size;
    c->q_lines = calloc((size_t)c->R, sizeof *c->q_lines), c->k_lines = calloc((size_t)c->R, sizeof *c->k_lines);
    c->q_ranks = calloc((size_t)c->C, sizeof *c->q_ranks), c->k_ranks = calloc((size_t)c->C, sizeof *c->k_ranks);
    c->q_ranges = calloc((size_t)c->R, sizeof *c->q_ranges), c->k_ranges = calloc((size_t)c->R, sizeof *c->k_ranges);
    c->needed = calloc((size_t)(c->R * c->R), sizeof *c->needed);
    c->seen = calloc((size_t)c->R, sizeof *c->seen);
    if (c->q_lines == NULL || c->k_lines == NULL || c->q_ranks == NULL || c->k_ranks == NULL || c->q_ranges == NULL ||
        c->k_ranges == NULL || c->needed == NULL || c->seen == NULL)
        return false;
    for (int64_t line = 0; line < c->R; line++) {
        c->q_lines[line] = cot_segments_of(&c->options, c->Tq, size, line * c->C, c->C);
        c->k_lines[line] = cot_segments_of(&c->options, c->Tk, size, line * c->C, c->C);
        if (c->q_lines[line].list == NULL || c->k_lines[line].list == NULL ||
            !make_ranges(c, false, &c->q_lines[line], &c->q_ranges[line]) ||
            !make_ranges(c, true, &c->k_lines[line], &c->k_ranges[line]))
            return false;
    }
    for (int64_t column = 0; column < c->C; column++) {
        c->q_ranks[column] = cot_segments_of(&c->options, c->Tq, size, c->line * c->C + column, 1);
        c->k_ranks[column] = cot_segments_of(&c->options, c->Tk, size, c->line * c->C + column, 1);
        if (c->q_ranks[column].list == NULL || c->k_ranks[column].list == NULL)
            return false;
    }
    if (!make_ranges(c, false, &c->q_ranks[c->column], &c->own))
        return false;
    for (int64_t i = 0; i < c->R; i++) {
        if (c->options.all_gather && !find_seen(c, i, &c->seen[i]))
            return false;
        for (int64_t j = 0; !c->options.all_gather && j < c->R; j++)
            c->needed[i * c->R + j] = line_attends(c, &c->q_ranges[i], &c->k_ranges[j]);
    }
    return true;
}

/* ---- the core's arguments ------------------------------------------------------------------------------------- */

cot_tensor attention_rows_of(const attention_call *c, const cot_tensor *t, bool statistic, int64_t b, int64_t row,
                             int64_t rows, int64_t h)
{
    cot_tensor view = cot_slice(t, statistic ? 2 : 1, row, rows);
    if (h >= 0)
        view = cot_slice(&view, statistic ? 1 : 2, h, 1);
    return b >= 0 && !c->packed ? cot_slice(&view, 0, b, 1) : view;
}

cot_tensor attention_bias_of(const attention_call *c, const cot_tensor *bias, const row_range *q, const row_range *k)
{
    cot_tensor view = *bias;
    if (!cot_is_present(bias))
        return view;
    if (view.shape[2] != 1)
        view = cot_slice(&view, 2, c->packed ? q->begin : q->row, q->rows);
    if (view.shape[3] != 1)
        view = cot_slice(&view, 3, k->begin, k->rows);
    return c->packed && view.shape[0] != 1 ? cot_slice(&view, 0, q->b, 1) : view;
}

/* The slopes of this rank's heads, or of head h of them. */
static cot_tensor slopes_of(const attention_call *c, int64_t b, int64_t h)
{
    const cot_tensor *slopes = &c->a.alibi_slopes;
    if (!cot_is_present(slopes))
        return *slopes;
    cot_tensor view =
        cot_slice(slopes, slopes->rank - 1, c->column * c->heads + (h >= 0 ? h : 0), h >= 0 ? 1 : c->heads);
    return b >= 0 && view.rank == 2 ? cot_slice(&view, 0, b, 1) : view;
}

/* The queries of all sequences. */
static int64_t rows_of_all(const attention_call *c)
{
    return c->packed ? attention_index(&c->a.cu_seqlens_q, c->B) : c->B * c->Tq;
}

/* `base` of the top of this file, for head h of this rank, or -1 for all. */
static int64_t base_of(const attention_call *c, int64_t sequence, int64_t h)
{
    const int64_t head = h >= 0 ? c->column * c->heads + h : 0;
    return head * rows_of_all(c) + (c->packed ? row_of(c, false, sequence) : sequence * c->Tq);
}

static int64_t used_index(const attention_call *c, int64_t sequence, int64_t h)
{
    return 2 * (c->single ? sequence * c->heads + h : sequence);
}

void attention_take_used(attention_call *c, cot_arena *memory)
{
    c->used_count = c->packed || c->single ? 2 * c->B * (c->single ? c->heads : 1) : 0;
    c->used = cot_arena_take_host(memory, c->used_count, sizeof *c->used);
    c->used_data = cot_arena_take(memory, c->used_count, sizeof *c->used);
}

cot_status attention_fill_used(const attention_call *c)
{
    for (int64_t b = 0; c->used_count > 0 && b < c->B; b++)
        for (int64_t h = 0; h < (c->single ? c->heads : 1); h++) {
            int32_t *used = c->used + used_index(c, b, h);
            used[0] = (int32_t)(base_of(c, b, c->single ? h : -1) + attention_used(c, false, b));
            used[1] = (int32_t)attention_used(c, true, b);
        }
    return cot_group_upload(c->base.group, c->used_data, c->used, (size_t)c->used_count * sizeof *c->used);
}

/* The mask of a range of queries with all keys that it attends to. The core aligns it to the last query and the last key
 * of the pair, which are `shift` keys apart in the mask of the whole sequence. A side on which every query attends to
 * every key gets no bound. */
static void place_complete(const attention_call *c, const range_pair *pair, attention_block *x)
{
    const row_range *q = &pair->q, *k = &pair->k;
    const int64_t off = attention_used(c, true, q->b) - attention_used(c, false, q->b);
    const int64_t shift = k->begin + k->rows - (q->begin + q->rows + off);
    const bool bounds_left = c->left < ATTENTION_UNBOUNDED && c->left + shift < k->rows - 1;
    const bool bounds_right = c->right < ATTENTION_UNBOUNDED && c->right - shift < q->rows - 1;
    x->bias = attention_bias_of(c, &c->a.bias, q, k);
    if (k->rows == 0)
        return;
    x->causal = bounds_right && c->right == shift;
    x->window = bounds_left || (bounds_right && !x->causal);
    if (x->window) {
        x->window_left = bounds_left ? c->left + shift : -1;
        x->window_right = bounds_right ? c->right - shift : -1;
    }
}

void attention_place(const attention_call *c, const range_pair *pair, int64_t b, int64_t h, attention_block *x)
{
    const row_range *q = &pair->q, *k = &pair->k;
    memset(x, 0, sizeof *x);
    if (pair->joined) {
        x->causal = pair->causal;
        return;
    }
    if (pair->complete && !attention_has_positions(c)) {
        place_complete(c, pair, x);
        return;
    }
    x->causal = c->a.causal, x->window = c->a.window;
    x->window_left = c->a.window_left, x->window_right = c->a.window_right;
    const int64_t sequence = c->packed ? q->b : b;
    x->alibi_slopes = slopes_of(c, sequence, h);
    x->bias = attention_bias_of(c, &c->a.bias, q, k);
    x->k_begin = k->begin;
    x->k_length = c->packed ? c->a.max_seqlen_k : c->Tk;
    if (sequence < 0) {
        x->q_begin = q->begin, x->q_length = c->Tq;
        x->seqused_q = c->seqused_q, x->seqused_k = c->seqused_k;
        return;
    }
    const int64_t all = rows_of_all(c);
    x->q_begin = base_of(c, sequence, h) + q->begin;
    x->q_length = h >= 0 ? c->H * all : all;
    char *const used = c->used_data + used_index(c, sequence, h) * (int64_t)sizeof *c->used;
    x->seqused_q = cot_tensor_contiguous(used, COT_I32, 1, (const int64_t[]){1});
    x->seqused_k = cot_tensor_contiguous(used + sizeof *c->used, COT_I32, 1, (const int64_t[]){1});
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

cot_tensor attention_take(cot_arena *memory, cot_dtype dtype, int rank, const int64_t *shape)
{
    void *data = cot_arena_take(memory, cot_product(shape, (size_t)rank), cot_dtype_size(dtype));
    return cot_tensor_contiguous(data, dtype, rank, shape);
}

block attention_take_block(const attention_call *c, cot_arena *memory, int64_t line, cot_dtype dtype, bool with_k,
                           bool with_v)
{
    const int64_t rows = c->k_lines[line].rows;
    const size_t begin = memory->used;
    block b = {.data = memory->base != NULL ? memory->base + begin : NULL};
    if (with_k)
        b.k = attention_take(memory, dtype, 4, (const int64_t[]){c->batches, rows, c->kv_heads, c->d});
    if (with_v)
        b.v = attention_take(memory, dtype, 4, (const int64_t[]){c->batches, rows, c->kv_heads, c->d_v});
    b.bytes = memory->used - begin;
    return b;
}
