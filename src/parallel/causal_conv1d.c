/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d.c: the convolution of a sequence that is cut over the ranks.
 *
 * A rank computes each of its segments on a *window*: the segment and the columns beside it that the formulas read.
 * Columns of other ranks come in one all-to-all exchange before the arithmetic. The core then runs on the window, and
 * only the columns of the segment are kept:
 *
 *     y          window: K-1 columns before the segment, and the segment
 *     dweight    the same window, with dy = 0 before the segment. Its dx is that of all columns but the last K-1
 *     dx         of the last K-1 columns of the segment: K-1 columns before them, and K-1 after the segment
 *
 * So every result is rounded once. In a window that begins inside a sequence, the core reads a state that does not
 * belong there. This changes only columns that are not kept, or whose dy is 0.
 *
 * States: every rank computes final_state from the last K-1 columns of each sequence, and dinitial_state from the first
 * K-1 columns of each sequence. */
#include "group.h"
#include "rows.h"
#include "shard.h"

#include "core/float_state.h"
#include "core/front.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <inttypes.h>
#include <stdlib.h>

/* A range of positions of the whole sequence. */
typedef struct range {
    int64_t begin, end;
} range;

typedef struct ranges {
    range *list;
    int64_t count;
} ranges;

/* A tensor whose columns are exchanged: [B,C,T of the rank]. others: [B,C,wanted columns]. */
typedef struct columns {
    cot_tensor own, others;
} columns;

typedef struct conv_call {
    const char *name;
    cot_group *group;
    cot_queue *queue;
    cot_parallel_options options;
    bool backward;
    cot_causal_conv1d_backward_args a; /* of both directions */
    cot_tensor y, final_state;         /* of the forward */
    int64_t B, D, T, K, N;             /* N: sequences of cu_seqlens, else 0 */
    cot_dtype sum;
    bool channel_last;
    cot_segments *segments; /* [size] */
    ranges *wanted;         /* [size]: the positions that a rank needs and does not hold, ascending */
    columns fields[3];      /* x, dy, seq_idx */
    int field_count;
    int32_t *cu; /* cu_seqlens of a window */
} conv_call;

/* ---- positions ------------------------------------------------------------------------------------------------ */

static bool has_cu(const conv_call *c)
{
    return cot_is_present(&c->a.cu_seqlens);
}

static int64_t cu_at(const conv_call *c, int64_t n)
{
    return ((const int32_t *)c->a.cu_seqlens.data)[n * c->a.cu_seqlens.stride[0]];
}

/* The first or last K-1 columns of sequence n. Without cu_seqlens there is one. */
static range edge_of(const conv_call *c, int64_t n, bool last)
{
    const range s = has_cu(c) ? (range){cu_at(c, n), cu_at(c, n + 1)} : (range){0, c->T};
    return last ? (range){cot_max(s.begin, s.end - (c->K - 1)), s.end}
                : (range){s.begin, cot_min(s.end, s.begin + c->K - 1)};
}

static int64_t sequences(const conv_call *c)
{
    return has_cu(c) ? c->N : 1;
}

static bool needs_edges(const conv_call *c)
{
    return cot_is_present(c->backward ? &c->a.dinitial_state : &c->final_state);
}

static int compare_ranges(const void *a, const void *b)
{
    const range *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin ? 1 : 0;
}

/* Appends a range to a sorted list, without positions that the list has. */
static void add_sorted(ranges *list, range r)
{
    if (list->count > 0)
        r.begin = cot_max(r.begin, list->list[list->count - 1].end);
    if (r.begin < r.end)
        list->list[list->count++] = r;
}

/* The part of a range that a rank does not hold, appended to the list. */
static void add_missing(ranges *list, const cot_segments *held, range r)
{
    for (int64_t n = 0; n < held->count && r.begin < r.end; n++) {
        const range s = {held->list[n].begin, held->list[n].begin + held->list[n].rows};
        if (s.end <= r.begin)
            continue;
        add_sorted(list, (range){r.begin, cot_min(r.end, s.begin)});
        r.begin = cot_max(r.begin, cot_min(r.end, s.end));
    }
    add_sorted(list, r);
}

static bool find_wanted(const conv_call *c, int64_t rank, ranges *wanted)
{
    const cot_segments *held = &c->segments[rank];
    const int64_t most = 2 * held->count + sequences(c);
    ranges all = {calloc((size_t)most + 1, sizeof(range)), 0};
    /* The parts between the segments of a rank are at most count + 1, each range is cut into as many more. */
    wanted->list = calloc((size_t)(most + held->count + 2) * 2, sizeof(range));
    for (int64_t n = 0; all.list != NULL && n < held->count; n++) {
        const int64_t begin = held->list[n].begin, end = begin + held->list[n].rows;
        all.list[all.count++] = (range){cot_max(0, begin - (c->K - 1)), begin};
        if (c->backward)
            all.list[all.count++] = (range){end, cot_min(c->T, end + c->K - 1)};
    }
    for (int64_t n = 0; all.list != NULL && needs_edges(c) && n < sequences(c); n++)
        all.list[all.count++] = edge_of(c, n, !c->backward);
    const bool good = all.list != NULL && wanted->list != NULL;
    if (good) {
        qsort(all.list, (size_t)all.count, sizeof(range), compare_ranges);
        for (int64_t n = 0; n < all.count; n++)
            add_missing(wanted, held, all.list[n]);
    }
    free(all.list);
    return good;
}

static int64_t count_of(const ranges *r)
{
    int64_t count = 0;
    for (int64_t n = 0; n < r->count; n++)
        count += r->list[n].end - r->list[n].begin;
    return count;
}

static bool cut(conv_call *c)
{
    const int64_t size = c->group->size;
    c->segments = calloc((size_t)size, sizeof *c->segments);
    c->wanted = calloc((size_t)size, sizeof *c->wanted);
    for (int64_t r = 0; c->segments != NULL && c->wanted != NULL && r < size; r++) {
        c->segments[r] = cot_segments_of(&c->options, c->T, size, r, 1);
        if (c->segments[r].list == NULL || !find_wanted(c, r, &c->wanted[r]))
            return false;
    }
    return c->segments != NULL && c->wanted != NULL;
}

static void free_call(conv_call *c)
{
    for (int r = 0; r < c->group->size; r++) {
        if (c->segments != NULL)
            free(c->segments[r].list);
        if (c->wanted != NULL)
            free(c->wanted[r].list);
    }
    free(c->segments);
    free(c->wanted);
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* [B,C,T], with channels or time contiguous as in x. */
static cot_tensor take_columns(const conv_call *c, cot_arena *m, cot_dtype dtype, int64_t C, int64_t T)
{
    const int64_t shape[] = {c->B, C, T};
    cot_tensor t = cot_tensor_contiguous(NULL, dtype, 3, shape);
    t.data = cot_arena_take(m, COT_PRODUCT(c->B, C, T), cot_dtype_size(dtype));
    if (c->channel_last)
        t.stride[0] = T * C, t.stride[1] = 1, t.stride[2] = C;
    return t;
}

/* ---- exchange ------------------------------------------------------------------------------------------------- */

/* Calls body for every run of positions of wanted[to] that rank `from` holds: rows of `from`, columns of others. */
typedef void run_body(void *context, int64_t from_row, int64_t to_column, int64_t count);

static void each_run(const conv_call *c, int64_t from, int64_t to, run_body *body, void *context)
{
    const cot_segments *held = &c->segments[from];
    int64_t column = 0;
    for (int64_t n = 0; n < c->wanted[to].count; n++) {
        const range r = c->wanted[to].list[n];
        for (int64_t i = 0; i < held->count; i++) {
            const cot_segment *s = &held->list[i];
            const int64_t begin = cot_max(r.begin, s->begin), end = cot_min(r.end, s->begin + s->rows);
            if (begin < end)
                body(context, s->row + begin - s->begin, column + begin - r.begin, end - begin);
        }
        column += r.end - r.begin;
    }
}

static void add_count(void *context, int64_t from_row, int64_t to_column, int64_t count)
{
    (void)from_row, (void)to_column;
    *(int64_t *)context += count;
}

/* The columns of one field in a message. */
typedef struct message_part {
    const columns *field;
    cot_tensor message;
    int64_t next;
    bool pack;
} message_part;

static void copy_run(void *context, int64_t from_row, int64_t to_column, int64_t count)
{
    message_part *p = context;
    const cot_tensor in_message = cot_slice(&p->message, 2, p->next, count);
    const cot_tensor in_field =
        p->pack ? cot_slice(&p->field->own, 2, from_row, count) : cot_slice(&p->field->others, 2, to_column, count);
    cot_copy_tensor(p->pack ? &in_message : &in_field, p->pack ? &in_field : &in_message, false);
    p->next += count;
}

/* Packs the message from one rank to another, or unpacks it. data = NULL: only counts. Returns its bytes. */
static size_t copy_message(const conv_call *c, int64_t from, int64_t to, char *data, bool pack)
{
    cot_arena message = {data, 0};
    int64_t count = 0;
    each_run(c, from, to, add_count, &count);
    for (int f = 0; f < c->field_count && from != to; f++) {
        const columns *field = &c->fields[f];
        message_part part = {field, take_columns(c, &message, field->own.dtype, field->own.shape[1], count), 0, pack};
        if (data != NULL)
            each_run(c, from, to, copy_run, &part);
    }
    return message.used;
}

typedef struct conv_exchange {
    char **send, **receive;
    size_t *send_bytes, *receive_bytes;
} conv_exchange;

static conv_exchange take_exchange(const conv_call *c, cot_arena *m)
{
    const int size = c->group->size, self = c->group->rank;
    conv_exchange x = {cot_arena_take(m, size, sizeof(char *)), cot_arena_take(m, size, sizeof(char *)),
                       cot_arena_take(m, size, sizeof(size_t)), cot_arena_take(m, size, sizeof(size_t))};
    for (int r = 0; r < size; r++) {
        const size_t sent = copy_message(c, self, r, NULL, true), received = copy_message(c, r, self, NULL, false);
        char *const send = cot_arena_take(m, (int64_t)sent, 1), *const receive =
                                                                    cot_arena_take(m, (int64_t)received, 1);
        if (m->base != NULL)
            x.send[r] = send, x.receive[r] = receive, x.send_bytes[r] = sent, x.receive_bytes[r] = received;
    }
    return x;
}

static cot_status exchange(const conv_call *c, conv_exchange *x)
{
    const int size = c->group->size, self = c->group->rank;
    for (int r = 0; r < size; r++)
        if (x->send_bytes[r] > 0)
            copy_message(c, self, r, x->send[r], true);
    CHECK(cot_group_all_to_all(c->group, 0, size, (void *const *)x->send, x->send_bytes, (void *const *)x->receive,
                               x->receive_bytes));
    for (int r = 0; r < size; r++)
        if (x->receive_bytes[r] > 0)
            copy_message(c, r, self, x->receive[r], false);
    return COT_OK;
}

/* ---- windows -------------------------------------------------------------------------------------------------- */

/* Copies the columns of a range, which this rank holds or has received, to columns `at` on of a window. */
static void copy_range(const conv_call *c, const columns *field, range r, const cot_tensor *window, int64_t at)
{
    const cot_segments *held = &c->segments[c->group->rank];
    const ranges *wanted = &c->wanted[c->group->rank];
    for (int64_t n = 0; n < held->count; n++) {
        const cot_segment *s = &held->list[n];
        const int64_t begin = cot_max(r.begin, s->begin), end = cot_min(r.end, s->begin + s->rows);
        if (begin >= end)
            continue;
        const cot_tensor to = cot_slice(window, 2, at + begin - r.begin, end - begin);
        const cot_tensor from = cot_slice(&field->own, 2, s->row + begin - s->begin, end - begin);
        cot_copy_tensor(&to, &from, false);
    }
    int64_t column = 0;
    for (int64_t n = 0; n < wanted->count; n++) {
        const range w = wanted->list[n];
        const int64_t begin = cot_max(r.begin, w.begin), end = cot_min(r.end, w.end);
        if (begin < end) {
            const cot_tensor to = cot_slice(window, 2, at + begin - r.begin, end - begin);
            const cot_tensor from = cot_slice(&field->others, 2, column + begin - w.begin, end - begin);
            cot_copy_tensor(&to, &from, false);
        }
        column += w.end - w.begin;
    }
}

/* The tensors of a window of `width` columns. */
typedef struct window {
    cot_tensor x, dy, seq_idx, cu_seqlens, result; /* result: y or dx */
} window;

static window take_window(const conv_call *c, cot_arena *m, int64_t width)
{
    window w = {.x = take_columns(c, m, c->a.x.dtype, c->D, width),
                .result = take_columns(c, m, c->a.x.dtype, c->D, width)};
    if (c->backward)
        w.dy = take_columns(c, m, c->a.x.dtype, c->D, width);
    if (cot_is_present(&c->a.seq_idx))
        w.seq_idx = take_columns(c, m, COT_I32, 1, width);
    return w;
}

/* The seq_idx [B,T] of a window, from [B,1,T]. */
static cot_tensor without_channel(const cot_tensor *t)
{
    cot_tensor view = *t;
    if (cot_is_present(t))
        view.rank = 2, view.shape[1] = t->shape[2], view.stride[1] = t->stride[2];
    return view;
}

/* Copies the columns of the ranges, one after the other, into the window. */
static void fill_window(const conv_call *c, const window *w, const range *list, int64_t count)
{
    int64_t at = 0;
    for (int64_t n = 0; n < count; n++) {
        int field = 0;
        copy_range(c, &c->fields[field++], list[n], &w->x, at);
        if (c->backward)
            copy_range(c, &c->fields[field++], list[n], &w->dy, at);
        if (cot_is_present(&w->seq_idx))
            copy_range(c, &c->fields[field], list[n], &w->seq_idx, at);
        at += list[n].end - list[n].begin;
    }
}

/* cu_seqlens of a window that is one range: the parts of the sequences in it. */
static cot_tensor cu_of_range(const conv_call *c, range r)
{
    if (!has_cu(c))
        return (cot_tensor){0};
    for (int64_t n = 0; n <= c->N; n++)
        c->cu[n] = (int32_t)(cot_clamp(cu_at(c, n), r.begin, r.end) - r.begin);
    return cot_tensor_contiguous(c->cu, COT_I32, 1, (const int64_t[]){c->N + 1});
}

/* cu_seqlens of the window that holds the edges of all sequences. */
static cot_tensor cu_of_edges(const conv_call *c, bool last)
{
    if (!has_cu(c))
        return (cot_tensor){0};
    c->cu[0] = 0;
    for (int64_t n = 0; n < c->N; n++) {
        const range r = edge_of(c, n, last);
        c->cu[n + 1] = (int32_t)(c->cu[n] + r.end - r.begin);
    }
    return cot_tensor_contiguous(c->cu, COT_I32, 1, (const int64_t[]){c->N + 1});
}

static int64_t edge_width(const conv_call *c)
{
    int64_t width = 0;
    for (int64_t n = 0; needs_edges(c) && n < sequences(c); n++) {
        const range r = edge_of(c, n, !c->backward);
        width += r.end - r.begin;
    }
    return width;
}

static int64_t widest(const conv_call *c)
{
    const cot_segments *held = &c->segments[c->group->rank];
    int64_t width = cot_max(edge_width(c), 3 * (c->K - 1)); /* of the last columns in the backward */
    for (int64_t n = 0; n < held->count; n++)
        width = cot_max(width, held->list[n].rows + c->K - 1);
    return width;
}

static cot_status run_forward_window(const conv_call *c, const window *w, bool begins, const cot_tensor *final_state)
{
    cot_causal_conv1d_forward_args x;
    COT_INIT(&x);
    x.activation = c->a.activation;
    x.x = w->x, x.weight = c->a.weight, x.bias = c->a.bias;
    x.seq_idx = without_channel(&w->seq_idx), x.cu_seqlens = w->cu_seqlens;
    if (begins)
        x.initial_state = c->a.initial_state;
    if (final_state != NULL)
        x.final_state = *final_state;
    else
        x.y = w->result;
    return cot_causal_conv1d_forward(c->queue, &x);
}

/* A window for which `memory` has room: its tensors begin at the same address as those of every other window. */
static window window_of(const conv_call *c, cot_arena memory, int64_t width)
{
    return take_window(c, &memory, width);
}

static cot_status forward_segment(const conv_call *c, cot_arena memory, const cot_segment *s)
{
    const range r = {cot_max(0, s->begin - (c->K - 1)), s->begin + s->rows};
    window w = window_of(c, memory, r.end - r.begin);
    fill_window(c, &w, &r, 1);
    w.cu_seqlens = cu_of_range(c, r);
    CHECK(run_forward_window(c, &w, r.begin == 0 || has_cu(c), NULL));
    const cot_tensor to = cot_slice(&c->y, 2, s->row, s->rows);
    const cot_tensor from = cot_slice(&w.result, 2, s->begin - r.begin, s->rows);
    cot_copy_tensor(&to, &from, false);
    return COT_OK;
}

/* Fills a window with the first or last columns of all sequences. */
static void fill_edges(const conv_call *c, window *w, bool last)
{
    int64_t at = 0;
    for (int64_t n = 0; n < sequences(c); n++) {
        const range r = edge_of(c, n, last);
        const int64_t width = r.end - r.begin;
        window part = *w;
        part.x = cot_slice(&w->x, 2, at, width);
        part.dy = cot_is_present(&w->dy) ? cot_slice(&w->dy, 2, at, width) : w->dy;
        part.seq_idx = cot_is_present(&w->seq_idx) ? cot_slice(&w->seq_idx, 2, at, width) : w->seq_idx;
        fill_window(c, &part, &r, 1);
        at += width;
    }
    w->cu_seqlens = cu_of_edges(c, last);
}

static cot_status run_forward(conv_call *c, cot_arena memory)
{
    const cot_segments *held = &c->segments[c->group->rank];
    for (int64_t n = 0; cot_is_present(&c->y) && n < held->count; n++)
        CHECK(forward_segment(c, memory, &held->list[n]));
    if (!cot_is_present(&c->final_state))
        return COT_OK;
    window w = window_of(c, memory, edge_width(c));
    fill_edges(c, &w, true);
    return run_forward_window(c, &w, has_cu(c) || c->T < c->K - 1, &c->final_state);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

/* The call on a window that holds range r of the whole. */
static void set_backward(const conv_call *c, const window *w, bool begins, bool ends,
                         cot_causal_conv1d_backward_args *x)
{
    COT_INIT(x);
    x->activation = c->a.activation;
    x->x = w->x, x->dy = w->dy, x->weight = c->a.weight, x->bias = c->a.bias;
    x->seq_idx = without_channel(&w->seq_idx), x->cu_seqlens = w->cu_seqlens;
    if (begins)
        x->initial_state = c->a.initial_state;
    if (ends)
        x->dfinal_state = c->a.dfinal_state;
}

static void store_dx(const conv_call *c, const window *w, int64_t window_begin, const cot_segment *s, int64_t begin,
                     int64_t end)
{
    if (begin >= end)
        return;
    const cot_tensor to = cot_slice(&c->a.dx, 2, s->row + begin - s->begin, end - begin);
    const cot_tensor from = cot_slice(&w->result, 2, begin - window_begin, end - begin);
    cot_copy_tensor(&to, &from, false);
}

/* dweight and dbias of a segment, and dx of all columns but the last K-1. */
static cot_status backward_segment(const conv_call *c, cot_arena memory, const cot_segment *s,
                                   const cot_tensor *dweight, const cot_tensor *dbias)
{
    const int64_t begin = s->begin, end = begin + s->rows;
    const range r = {cot_max(0, begin - (c->K - 1)), end};
    cot_causal_conv1d_backward_args x;
    window w = window_of(c, memory, r.end - r.begin);
    fill_window(c, &w, &r, 1);
    w.cu_seqlens = cu_of_range(c, r);
    const cot_tensor before = cot_slice(&w.dy, 2, 0, begin - r.begin);
    cot_fill_tensor(&before, 0);
    /* dfinal_state of a sequence that ends in the segment. That of a cut sequence changes the last K-1 columns alone. */
    set_backward(c, &w, r.begin == 0 || has_cu(c), has_cu(c), &x);
    x.accumulate = 1;
    x.dweight = *dweight, x.dbias = *dbias;
    if (cot_is_present(&c->a.dx))
        x.dx = w.result;
    CHECK(cot_causal_conv1d_backward(c->queue, &x));
    if (cot_is_present(&c->a.dx))
        store_dx(c, &w, r.begin, s, begin, end - (c->K - 1));
    return COT_OK;
}

/* dx of the last K-1 columns of a segment. */
static cot_status backward_last(const conv_call *c, cot_arena memory, const cot_segment *s)
{
    const int64_t end = s->begin + s->rows, begin = cot_max(s->begin, end - (c->K - 1));
    const range r = {cot_max(0, begin - (c->K - 1)), cot_min(c->T, end + c->K - 1)};
    cot_causal_conv1d_backward_args x;
    if (begin == end)
        return COT_OK;
    window w = window_of(c, memory, r.end - r.begin);
    fill_window(c, &w, &r, 1);
    w.cu_seqlens = cu_of_range(c, r);
    set_backward(c, &w, r.begin == 0 || has_cu(c), r.end == c->T || has_cu(c), &x);
    x.dx = w.result;
    CHECK(cot_causal_conv1d_backward(c->queue, &x));
    store_dx(c, &w, r.begin, s, begin, end);
    return COT_OK;
}

static cot_status backward_edges(const conv_call *c, cot_arena memory)
{
    cot_causal_conv1d_backward_args x;
    if (!cot_is_present(&c->a.dinitial_state))
        return COT_OK;
    window w = window_of(c, memory, edge_width(c));
    fill_edges(c, &w, false);
    set_backward(c, &w, true, has_cu(c) || c->T <= c->K - 1, &x);
    x.dinitial_state = c->a.dinitial_state;
    return cot_causal_conv1d_backward(c->queue, &x);
}

typedef struct conv_sums {
    cot_tensor dweight, dbias; /* of this rank */
    double *values;            /* of all ranks */
    void *memory;
} conv_sums;

static conv_sums take_sums(const conv_call *c, cot_arena *m)
{
    conv_sums s = {0};
    const int64_t count = c->D * cot_max(c->K, 1);
    if (cot_is_present(&c->a.dweight))
        s.dweight = cot_tensor_contiguous(cot_arena_take(m, count, cot_dtype_size(c->sum)), c->sum, 2,
                                          (const int64_t[]){c->D, c->K});
    if (cot_is_present(&c->a.dbias))
        s.dbias = cot_tensor_contiguous(cot_arena_take(m, c->D, cot_dtype_size(c->sum)), c->sum, 1, &c->D);
    s.values = cot_arena_take(m, count, sizeof(double));
    s.memory = cot_arena_take(m, (int64_t)cot_group_sum_bytes(c->group, count), 1);
    return s;
}

static cot_status sum_over_ranks(const conv_call *c, const conv_sums *s, const cot_tensor *part, const cot_tensor *to)
{
    if (!cot_is_present(to))
        return COT_OK;
    const cot_tensor values = cot_tensor_contiguous(s->values, COT_F64, part->rank, part->shape);
    cot_copy_tensor(&values, part, false);
    CHECK(cot_group_sum(c->group, s->values, cot_elements(part), s->memory));
    cot_copy_tensor(to, &values, c->a.accumulate);
    return COT_OK;
}

static cot_status run_backward(conv_call *c, cot_arena memory, const conv_sums *s)
{
    const cot_segments *held = &c->segments[c->group->rank];
    const bool parameters = cot_is_present(&s->dweight) || cot_is_present(&s->dbias);
    if (cot_is_present(&s->dweight))
        cot_fill_tensor(&s->dweight, 0);
    if (cot_is_present(&s->dbias))
        cot_fill_tensor(&s->dbias, 0);
    for (int64_t n = 0; n < held->count; n++) {
        if (parameters || cot_is_present(&c->a.dx))
            CHECK(backward_segment(c, memory, &held->list[n], &s->dweight, &s->dbias));
        if (cot_is_present(&c->a.dx))
            CHECK(backward_last(c, memory, &held->list[n]));
    }
    CHECK(backward_edges(c, memory));
    CHECK(sum_over_ranks(c, s, &s->dweight, &c->a.dweight));
    return sum_over_ranks(c, s, &s->dbias, &c->a.dbias);
}

/* ---- the call ------------------------------------------------------------------------------------------------- */

static void add_field(conv_call *c, cot_arena *m, const cot_tensor *own)
{
    columns *f = &c->fields[c->field_count++];
    f->own = *own;
    if (own->rank == 2) { /* seq_idx [B,T] becomes [B,1,T] */
        f->own.rank = 3;
        f->own.shape[2] = own->shape[1], f->own.stride[2] = own->stride[1];
        f->own.shape[1] = 1, f->own.stride[1] = 0;
    }
    f->others = take_columns(c, m, own->dtype, f->own.shape[1], count_of(&c->wanted[c->group->rank]));
}

/* base = NULL: only counts the memory. */
static cot_status run_with_memory(conv_call *c, cot_arena *m)
{
    c->field_count = 0;
    add_field(c, m, &c->a.x);
    if (c->backward)
        add_field(c, m, &c->a.dy);
    if (cot_is_present(&c->a.seq_idx))
        add_field(c, m, &c->a.seq_idx);
    conv_exchange x = take_exchange(c, m);
    const conv_sums sums = take_sums(c, m);
    c->cu = cot_arena_take(m, c->N + 1, sizeof *c->cu);
    const cot_arena windows = *m;
    take_window(c, m, widest(c));
    if (m->base == NULL)
        return COT_OK;
    CHECK(exchange(c, &x));
    return c->backward ? run_backward(c, windows, &sums) : run_forward(c, windows);
}

static cot_status check_as_single_call(const conv_call *c)
{
    cot_causal_conv1d_backward_args b = c->a;
    cot_tensor y = c->y;
    const int64_t rows = b.x.shape[2];
    size_t bytes;
    cot_widen(&b.x, 2, rows, c->T), cot_widen(&b.dy, 2, rows, c->T), cot_widen(&b.dx, 2, rows, c->T),
        cot_widen(&y, 2, rows, c->T);
    cot_widen(&b.seq_idx, 1, rows, c->T);
    if (c->backward)
        return cot_causal_conv1d_backward_workspace(c->queue, &b, &bytes);
    cot_causal_conv1d_forward_args f;
    COT_INIT(&f);
    f.activation = b.activation, f.x = b.x, f.weight = b.weight, f.bias = b.bias, f.initial_state = b.initial_state;
    f.seq_idx = b.seq_idx, f.cu_seqlens = b.cu_seqlens, f.y = y, f.final_state = c->final_state;
    return cot_causal_conv1d_forward_workspace(c->queue, &f, &bytes);
}

static cot_status check_memory(const conv_call *c)
{
    const cot_causal_conv1d_backward_args *a = &c->a;
    const cot_named_tensor tensors[] = {{"x", &a->x, false, false},
                                        {"weight", &a->weight, false, false},
                                        {"bias", &a->bias, false, false},
                                        {"initial_state", &a->initial_state, false, false},
                                        {"seq_idx", &a->seq_idx, false, false},
                                        {"cu_seqlens", &a->cu_seqlens, false, false},
                                        {"dy", &a->dy, false, false},
                                        {"dfinal_state", &a->dfinal_state, false, false},
                                        {"y", &c->y, true, false},
                                        {"final_state", &c->final_state, true, false},
                                        {"dx", &a->dx, true, false},
                                        {"dweight", &a->dweight, true, false},
                                        {"dbias", &a->dbias, true, false},
                                        {"dinitial_state", &a->dinitial_state, true, false}};
    return cot_check_memory(c->name, tensors, sizeof tensors / sizeof *tensors);
}

static cot_status check_cu_seqlens(const conv_call *c)
{
    for (int64_t n = 0; has_cu(c) && n <= c->N; n++) {
        const int64_t before = n > 0 ? cu_at(c, n - 1) : 0;
        if (n == 0 && cu_at(c, 0) != 0)
            return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens[0] is %" PRId64 ", expected 0", c->name, cu_at(c, 0));
        if (cu_at(c, n) < before)
            return cot_fail(COT_INVALID_DATA,
                            "%s: cu_seqlens[%" PRId64 "] is %" PRId64 ", less than %" PRId64 " before it", c->name, n,
                            cu_at(c, n), before);
    }
    if (has_cu(c) && cu_at(c, c->N) > c->T)
        return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens ends at %" PRId64 ", options.length is %" PRId64, c->name,
                        cu_at(c, c->N), c->T);
    return COT_OK;
}

static cot_status check_rows(conv_call *c)
{
    const cot_segments own = cot_segments_of(&c->options, c->T, c->group->size, c->group->rank, 1);
    if (own.list == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for the cut", c->name);
    free(own.list);
    if (c->a.x.shape[2] != own.rows)
        return cot_fail(COT_INVALID_SHAPE,
                        "%s: x has T=%" PRId64 ", expected %" PRId64 ", the part of rank %d of options.length %" PRId64,
                        c->name, c->a.x.shape[2], own.rows, c->group->rank, c->T);
    return COT_OK;
}

static cot_status check(conv_call *c)
{
    const cot_causal_conv1d_backward_args *a = &c->a;
    if (c->queue == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: queue is null", c->name);
    if (cot_queue_backend(c->queue) != COT_BACKEND_CPU)
        return cot_fail(COT_UNSUPPORTED, "%s: queue is of CUDA, expected one of the CPU", c->name);
    c->T = c->options.length;
    CHECK(cot_check_cut(c->name, &c->options, c->T));
    if (c->options.columns != 0 && c->options.columns != 1)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: columns is %d, expected 0 or 1", c->name, (int)c->options.columns);
    if (a->workspace != NULL || a->workspace_bytes != 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: workspace is given, expected none (the queue's pool serves it)",
                        c->name);
    CHECK(cot_check_required(c->name, "x", &a->x));
    CHECK(cot_check_tensor(c->name, "x", &a->x, COT_FLOATS, 3, 3));
    CHECK(check_rows(c));
    CHECK(check_as_single_call(c));
    CHECK(check_memory(c));
    c->B = a->x.shape[0], c->D = a->x.shape[1], c->K = a->weight.shape[1];
    c->N = has_cu(c) ? a->cu_seqlens.shape[0] - 1 : 0;
    c->sum = a->x.dtype == COT_F64 ? COT_F64 : COT_F32;
    c->channel_last = a->x.stride[1] == 1 && a->x.stride[2] != 1;
    CHECK(check_cu_seqlens(c));
    return cut(c) ? COT_OK : cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for the cut", c->name);
}

static void add_words(const conv_call *c)
{
    const cot_causal_conv1d_backward_args *a = &c->a;
    cot_group *g = c->group;
    cot_group_word(g, "cut", c->options.cut);
    cot_group_word(g, "stripe", c->options.stripe);
    cot_group_word(g, "length", c->T);
    cot_group_word(g, "activation", a->activation);
    cot_group_word(g, "accumulate", a->accumulate);
    cot_group_word(g, "B", c->B);
    cot_group_word(g, "D", c->D);
    cot_group_word(g, "channels' place in x", c->channel_last);
    cot_group_word(g, "x", a->x.dtype);
    cot_group_values(g, "weight", &a->weight);
    cot_group_values(g, "bias", &a->bias);
    cot_group_values(g, "initial_state", &a->initial_state);
    cot_group_values(g, "cu_seqlens", &a->cu_seqlens);
    cot_group_values(g, "dfinal_state", &a->dfinal_state);
    const struct {
        const char *name;
        const cot_tensor *tensor;
    } present[] = {
        {"seq_idx", &a->seq_idx}, {"y", &c->y},         {"final_state", &c->final_state},      {"dx", &a->dx},
        {"dweight", &a->dweight}, {"dbias", &a->dbias}, {"dinitial_state", &a->dinitial_state}};
    for (size_t n = 0; n < sizeof present / sizeof *present; n++)
        cot_group_word(g, present[n].name, present[n].tensor->dtype);
}

static cot_status prepare(conv_call *c, const cot_parallel_options *options, const void *args)
{
    cot_arena count = {0};
    if (args == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: args is null", c->name);
    if (c->backward) {
        CHECK(cot_copy_args(c->name, "struct_size", args, sizeof c->a, &c->a));
    } else {
        cot_causal_conv1d_forward_args f;
        CHECK(cot_copy_args(c->name, "struct_size", args, sizeof f, &f));
        COT_INIT(&c->a);
        c->a.activation = f.activation, c->a.x = f.x, c->a.weight = f.weight, c->a.bias = f.bias;
        c->a.initial_state = f.initial_state, c->a.seq_idx = f.seq_idx, c->a.cu_seqlens = f.cu_seqlens;
        c->a.workspace = f.workspace, c->a.workspace_bytes = f.workspace_bytes;
        c->y = f.y, c->final_state = f.final_state;
    }
    CHECK(cot_copy_options(c->name, options, &c->options));
    CHECK(check(c));
    CHECK(run_with_memory(c, &count));
    CHECK(cot_group_reserve(c->group, c->name, count.used));
    add_words(c);
    return COT_OK;
}

static cot_status run_call(conv_call *c, const cot_parallel_options *options, const void *args)
{
    fenv_t host;
    CHECK(cot_group_begin(c->group, c->name));
    cot_enter_default_float_state(&host);
    cot_status status = cot_group_agree(c->group, c->name, prepare(c, options, args));
    if (status == COT_OK) {
        cot_arena memory = {c->group->pool, 0};
        status = run_with_memory(c, &memory);
        if (status != COT_OK)
            status = cot_group_fail(c->group, c->name, status);
    }
    free_call(c);
    cot_restore_float_state(&host);
    return status;
}

cot_status cot_parallel_causal_conv1d_forward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                              const cot_causal_conv1d_forward_args *args)
{
    conv_call c = {.name = "parallel_causal_conv1d_forward", .group = group, .queue = queue};
    return run_call(&c, options, args);
}

cot_status cot_parallel_causal_conv1d_backward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                               const cot_causal_conv1d_backward_args *args)
{
    conv_call c = {.name = "parallel_causal_conv1d_backward", .group = group, .queue = queue, .backward = true};
    return run_call(&c, options, args);
}
