/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d.c: the convolution of a sequence that is cut over the ranks.
 *
 * The formulas read columns beside a segment. Those of other ranks come in one all-to-all exchange before the arithmetic.
 * A rank then computes each of its segments in place, with the K-1 columns before it as initial_state:
 *
 *     y          of the segment
 *     dweight    of the segment. The same call gives dx of all its columns but the last K-1
 *     dx         of the last K-1 columns, on a *window*: K-1 columns before them, and K-1 after the segment
 *
 * A window is a copy. Of its columns only those asked for are kept. So every result is rounded once.
 *
 * With cu_seqlens or seq_idx, and at a segment that begins at one of the columns 1 to K-2, the columns before a segment do
 * not form a state. Then the first two results also come from a window: K-1 columns before the segment, where dy is 0,
 * and the segment. A window that begins inside a sequence has no state. This changes only columns that are not kept, or
 * whose dy is 0.
 *
 * States: every rank computes final_state from the last K-1 columns of each sequence, and dinitial_state from the first
 * K-1 columns of each sequence. */
#include "group.h"
#include "rows.h"
#include "shard.h"

#include "core/argument_checks.h"
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
    cot_group_call base;
    const cot_parallel_options *given;
    const void *args;
    cot_parallel_options options;
    bool backward;
    cot_causal_conv1d_backward_args a; /* of both directions. Its cu_seqlens is host memory */
    cot_tensor cu_seqlens;             /* where the queue is */
    void *index;                       /* the host copy of cu_seqlens */
    cot_tensor y, final_state;         /* of the forward */
    int64_t B, D, T, K, N;             /* N: sequences of cu_seqlens, else 0 */
    cot_dtype sum;
    bool channel_last;
    cot_segments *segments; /* [size] */
    ranges *wanted;         /* [size]: the positions that a rank needs and does not hold, ascending */
    columns fields[3];      /* x, dy, seq_idx */
    int field_count;
    int32_t *cu, *edges_cu; /* cu_seqlens of a window that is a range, and of the window of the edges */
    int32_t *host_cu;       /* host memory, to write them */
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
    const int64_t size = c->base.group->size;
    c->segments = calloc((size_t)size, sizeof *c->segments);
    c->wanted = calloc((size_t)size, sizeof *c->wanted);
    for (int64_t r = 0; c->segments != NULL && c->wanted != NULL && r < size; r++) {
        c->segments[r] = cot_segments_of(&c->options, c->T, size, r, 1);
        if (c->segments[r].list == NULL || !find_wanted(c, r, &c->wanted[r]))
            return false;
    }
    return c->segments != NULL && c->wanted != NULL;
}

static void free_call(void *call)
{
    conv_call *c = call;
    free(c->index);
    for (int r = 0; r < c->base.group->size; r++) {
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
    cot_group *group;
    const columns *field;
    cot_tensor message;
    int64_t next;
    bool pack;
    cot_status status;
} message_part;

static void copy_run(void *context, int64_t from_row, int64_t to_column, int64_t count)
{
    message_part *p = context;
    const cot_tensor in_message = cot_slice(&p->message, 2, p->next, count);
    const cot_tensor in_field =
        p->pack ? cot_slice(&p->field->own, 2, from_row, count) : cot_slice(&p->field->others, 2, to_column, count);
    if (p->status == COT_OK)
        p->status =
            cot_group_copy(p->group, p->pack ? &in_message : &in_field, p->pack ? &in_field : &in_message, false);
    p->next += count;
}

static int64_t columns_between(const conv_call *c, int64_t from, int64_t to)
{
    int64_t count = 0;
    each_run(c, from, to, add_count, &count);
    return from != to ? count : 0;
}

static void sizes_of(void *context, int64_t rank, size_t *sent, size_t *received)
{
    const conv_call *c = context;
    const int64_t self = c->base.group->rank;
    cot_arena send = {0}, receive = {0};
    for (int f = 0; f < c->field_count; f++) {
        const cot_tensor *own = &c->fields[f].own;
        take_columns(c, &send, own->dtype, own->shape[1], columns_between(c, self, rank));
        take_columns(c, &receive, own->dtype, own->shape[1], columns_between(c, rank, self));
    }
    *sent = send.used, *received = receive.used;
}

/* Packs the message from one rank to another, or unpacks it. */
static cot_status copy_message(const conv_call *c, int64_t from, int64_t to, char *data, bool pack)
{
    cot_arena message = {.base = data};
    const int64_t count = columns_between(c, from, to);
    for (int f = 0; f < c->field_count && count > 0; f++) {
        const columns *field = &c->fields[f];
        message_part part = {.group = c->base.group, .field = field, .pack = pack};
        part.message = take_columns(c, &message, field->own.dtype, field->own.shape[1], count);
        each_run(c, from, to, copy_run, &part);
        CHECK(part.status);
    }
    return COT_OK;
}

static cot_status exchange(const conv_call *c, const cot_messages *x)
{
    const int size = c->base.group->size, self = c->base.group->rank;
    for (int r = 0; r < size; r++)
        CHECK(copy_message(c, self, r, x->send[r], true));
    CHECK(cot_messages_exchange(c->base.group, 0, size, x));
    for (int r = 0; r < size; r++)
        CHECK(copy_message(c, r, self, x->receive[r], false));
    return COT_OK;
}

/* ---- windows -------------------------------------------------------------------------------------------------- */

/* Copies the columns of a range, which this rank holds or has received, to columns `at` on of a window. */
static cot_status copy_range(const conv_call *c, const columns *field, range r, const cot_tensor *window, int64_t at)
{
    const cot_segments *held = &c->segments[c->base.group->rank];
    const ranges *wanted = &c->wanted[c->base.group->rank];
    for (int64_t n = 0; n < held->count; n++) {
        const cot_segment *s = &held->list[n];
        const int64_t begin = cot_max(r.begin, s->begin), end = cot_min(r.end, s->begin + s->rows);
        if (begin >= end)
            continue;
        const cot_tensor to = cot_slice(window, 2, at + begin - r.begin, end - begin);
        const cot_tensor from = cot_slice(&field->own, 2, s->row + begin - s->begin, end - begin);
        CHECK(cot_group_copy(c->base.group, &to, &from, false));
    }
    int64_t column = 0;
    for (int64_t n = 0; n < wanted->count; n++) {
        const range w = wanted->list[n];
        const int64_t begin = cot_max(r.begin, w.begin), end = cot_min(r.end, w.end);
        if (begin < end) {
            const cot_tensor to = cot_slice(window, 2, at + begin - r.begin, end - begin);
            const cot_tensor from = cot_slice(&field->others, 2, column + begin - w.begin, end - begin);
            CHECK(cot_group_copy(c->base.group, &to, &from, false));
        }
        column += w.end - w.begin;
    }
    return COT_OK;
}

/* The tensors of a window of `width` columns, or views of a segment. */
typedef struct window {
    cot_tensor x, dy, seq_idx, cu_seqlens, initial_state, result; /* result: y or dx */
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

/* Copies the columns of a range to columns `at` on of the window. */
static cot_status fill_window(const conv_call *c, const window *w, range r, int64_t at)
{
    int field = 0;
    CHECK(copy_range(c, &c->fields[field++], r, &w->x, at));
    if (c->backward)
        CHECK(copy_range(c, &c->fields[field++], r, &w->dy, at));
    return cot_is_present(&w->seq_idx) ? copy_range(c, &c->fields[field], r, &w->seq_idx, at) : COT_OK;
}

static cot_tensor cu_tensor(const conv_call *c, int32_t *cu)
{
    return has_cu(c) ? cot_tensor_contiguous(cu, COT_I32, 1, (const int64_t[]){c->N + 1}) : (cot_tensor){0};
}

/* Writes cu_seqlens of a window that is one range: the parts of the sequences in it. */
static cot_status write_cu_of_range(const conv_call *c, range r)
{
    if (has_cu(c) && c->base.group->on_device)
        return cot_gpu_clamp_offsets(c->base.group->gpu, c->cu, &c->cu_seqlens, r.begin, r.end);
    for (int64_t n = 0; has_cu(c) && n <= c->N; n++)
        c->cu[n] = (int32_t)(cot_clamp(cu_at(c, n), r.begin, r.end) - r.begin);
    return COT_OK;
}

/* Writes cu_seqlens of the window that holds the edges of all sequences. */
static cot_status write_cu_of_edges(const conv_call *c, bool last)
{
    if (!has_cu(c))
        return COT_OK;
    c->host_cu[0] = 0;
    for (int64_t n = 0; n < c->N; n++) {
        const range r = edge_of(c, n, last);
        c->host_cu[n + 1] = (int32_t)(c->host_cu[n] + r.end - r.begin);
    }
    return cot_group_upload(c->base.group, c->edges_cu, c->host_cu, (size_t)(c->N + 1) * sizeof *c->host_cu);
}

/* Fills a window that is one range. */
static cot_status fill_range(const conv_call *c, window *w, range r)
{
    CHECK(fill_window(c, w, r, 0));
    CHECK(write_cu_of_range(c, r));
    w->cu_seqlens = cu_tensor(c, c->cu);
    if (r.begin == 0 || has_cu(c))
        w->initial_state = c->a.initial_state;
    return COT_OK;
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

/* Whether the segment needs no window: the columns before it are its initial state. */
static bool is_in_place(const conv_call *c, const cot_segment *s)
{
    const bool packed = has_cu(c) || cot_is_present(&c->a.seq_idx);
    return !packed && (s->begin == 0 || s->begin >= c->K - 1);
}

/* The number of columns of the widest window. */
static int64_t widest(const conv_call *c)
{
    const cot_segments *held = &c->segments[c->base.group->rank];
    int64_t width = cot_max(edge_width(c), 3 * (c->K - 1)); /* of the last columns in the backward */
    for (int64_t n = 0; n < held->count; n++)
        if (!is_in_place(c, &held->list[n]))
            width = cot_max(width, held->list[n].rows + c->K - 1);
    return width;
}

/* A forward. The caller sets y or final_state. */
static void set_forward(const conv_call *c, const window *w, cot_causal_conv1d_forward_args *x)
{
    COT_INIT(x);
    x->activation = c->a.activation;
    x->x = w->x, x->weight = c->a.weight, x->bias = c->a.bias, x->initial_state = w->initial_state;
    x->seq_idx = without_channel(&w->seq_idx), x->cu_seqlens = w->cu_seqlens;
}

/* A window for which `memory` has room: its tensors begin at the same address as those of every other window. */
static window window_of(const conv_call *c, cot_arena memory, int64_t width)
{
    return take_window(c, &memory, width);
}

/* A view of the rank's columns of a segment. */
static cot_tensor own_columns(const cot_tensor *field, const cot_segment *s)
{
    return cot_slice(field, 2, s->row, s->rows);
}

/* Views of a segment that needs no window, and its initial state, for which `memory` has room. */
static cot_status view_segment(const conv_call *c, cot_arena memory, const cot_segment *s, window *own)
{
    *own = (window){.x = own_columns(&c->a.x, s), .dy = own_columns(&c->a.dy, s)};
    if (s->begin == 0)
        own->initial_state = c->a.initial_state;
    if (s->begin == 0 || c->K <= 1)
        return COT_OK;
    own->initial_state = take_columns(c, &memory, c->a.x.dtype, c->D, c->K - 1);
    return copy_range(c, &c->fields[0], (range){s->begin - (c->K - 1), s->begin}, &own->initial_state, 0);
}

static cot_status forward_in_place(const conv_call *c, cot_arena memory, const cot_segment *s)
{
    cot_causal_conv1d_forward_args x;
    window own;
    CHECK(view_segment(c, memory, s, &own));
    set_forward(c, &own, &x);
    x.y = own_columns(&c->y, s);
    return cot_causal_conv1d_forward(c->base.queue, &x);
}

static cot_status forward_segment(const conv_call *c, cot_arena memory, const cot_segment *s)
{
    if (is_in_place(c, s))
        return forward_in_place(c, memory, s);
    const range r = {cot_max(0, s->begin - (c->K - 1)), s->begin + s->rows};
    cot_causal_conv1d_forward_args x;
    window w = window_of(c, memory, r.end - r.begin);
    CHECK(fill_range(c, &w, r));
    set_forward(c, &w, &x);
    x.y = w.result;
    CHECK(cot_causal_conv1d_forward(c->base.queue, &x));
    const cot_tensor to = own_columns(&c->y, s);
    const cot_tensor from = cot_slice(&w.result, 2, s->begin - r.begin, s->rows);
    return cot_group_copy(c->base.group, &to, &from, false);
}

/* Fills a window with the first or last columns of all sequences. */
static cot_status fill_edges(const conv_call *c, window *w, bool last)
{
    int64_t at = 0;
    for (int64_t n = 0; n < sequences(c); n++) {
        const range r = edge_of(c, n, last);
        CHECK(fill_window(c, w, r, at));
        at += r.end - r.begin;
    }
    w->cu_seqlens = cu_tensor(c, c->edges_cu);
    if (!last || has_cu(c) || c->T < c->K - 1)
        w->initial_state = c->a.initial_state;
    return COT_OK;
}

static cot_status run_forward(conv_call *c, cot_arena memory)
{
    const cot_segments *held = &c->segments[c->base.group->rank];
    for (int64_t n = 0; cot_is_present(&c->y) && n < held->count; n++)
        CHECK(forward_segment(c, memory, &held->list[n]));
    if (!cot_is_present(&c->final_state))
        return COT_OK;
    cot_causal_conv1d_forward_args x;
    window w = window_of(c, memory, edge_width(c));
    CHECK(fill_edges(c, &w, true));
    set_forward(c, &w, &x);
    x.final_state = c->final_state;
    return cot_causal_conv1d_forward(c->base.queue, &x);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

/* A backward. The caller sets the gradients. ends: the last column of the window is that of the sequence. */
static void set_backward(const conv_call *c, const window *w, bool ends, cot_causal_conv1d_backward_args *x)
{
    COT_INIT(x);
    x->activation = c->a.activation;
    x->x = w->x, x->dy = w->dy, x->weight = c->a.weight, x->bias = c->a.bias;
    x->initial_state = w->initial_state;
    x->seq_idx = without_channel(&w->seq_idx), x->cu_seqlens = w->cu_seqlens;
    if (ends)
        x->dfinal_state = c->a.dfinal_state;
}

static cot_status store_dx(const conv_call *c, const window *w, int64_t window_begin, const cot_segment *s,
                           int64_t begin, int64_t end)
{
    if (begin >= end)
        return COT_OK;
    const cot_tensor to = cot_slice(&c->a.dx, 2, s->row + begin - s->begin, end - begin);
    const cot_tensor from = cot_slice(&w->result, 2, begin - window_begin, end - begin);
    return cot_group_copy(c->base.group, &to, &from, false);
}

/* The dx of the last K-1 columns that this writes is not that of the whole: backward_last follows. */
static cot_status backward_in_place(const conv_call *c, cot_arena memory, const cot_segment *s,
                                    const cot_tensor *dweight, const cot_tensor *dbias)
{
    cot_causal_conv1d_backward_args x;
    window own;
    CHECK(view_segment(c, memory, s, &own));
    set_backward(c, &own, false, &x);
    x.accumulate = 1;
    x.dweight = *dweight, x.dbias = *dbias, x.dx = own_columns(&c->a.dx, s);
    return cot_causal_conv1d_backward(c->base.queue, &x);
}

/* dweight and dbias of a segment, and dx of all columns but the last K-1. */
static cot_status backward_segment(const conv_call *c, cot_arena memory, const cot_segment *s,
                                   const cot_tensor *dweight, const cot_tensor *dbias)
{
    if (is_in_place(c, s))
        return backward_in_place(c, memory, s, dweight, dbias);
    const int64_t begin = s->begin, end = begin + s->rows;
    const range r = {cot_max(0, begin - (c->K - 1)), end};
    cot_causal_conv1d_backward_args x;
    window w = window_of(c, memory, r.end - r.begin);
    CHECK(fill_range(c, &w, r));
    const cot_tensor before = cot_slice(&w.dy, 2, 0, begin - r.begin);
    CHECK(cot_group_fill(c->base.group, &before, 0));
    /* dfinal_state of a sequence that ends in the segment. That of a cut sequence changes the last K-1 columns alone. */
    set_backward(c, &w, has_cu(c), &x);
    x.accumulate = 1;
    x.dweight = *dweight, x.dbias = *dbias;
    if (cot_is_present(&c->a.dx))
        x.dx = w.result;
    CHECK(cot_causal_conv1d_backward(c->base.queue, &x));
    return cot_is_present(&c->a.dx) ? store_dx(c, &w, r.begin, s, begin, end - (c->K - 1)) : COT_OK;
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
    CHECK(fill_range(c, &w, r));
    set_backward(c, &w, r.end == c->T || has_cu(c), &x);
    x.dx = w.result;
    CHECK(cot_causal_conv1d_backward(c->base.queue, &x));
    return store_dx(c, &w, r.begin, s, begin, end);
}

static cot_status backward_edges(const conv_call *c, cot_arena memory)
{
    cot_causal_conv1d_backward_args x;
    if (!cot_is_present(&c->a.dinitial_state))
        return COT_OK;
    window w = window_of(c, memory, edge_width(c));
    CHECK(fill_edges(c, &w, false));
    set_backward(c, &w, has_cu(c) || c->T <= c->K - 1, &x);
    x.dinitial_state = c->a.dinitial_state;
    return cot_causal_conv1d_backward(c->base.queue, &x);
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
    s.memory = cot_arena_take(m, (int64_t)cot_group_sum_bytes(c->base.group, COT_F64, count), 1);
    return s;
}

static cot_status sum_over_ranks(const conv_call *c, const conv_sums *s, const cot_tensor *part, const cot_tensor *to)
{
    if (!cot_is_present(to))
        return COT_OK;
    const cot_tensor values = cot_tensor_contiguous(s->values, COT_F64, part->rank, part->shape);
    CHECK(cot_group_copy(c->base.group, &values, part, false));
    CHECK(cot_group_sum(c->base.group, COT_F64, s->values, cot_elements(part), s->memory));
    return cot_group_copy(c->base.group, to, &values, c->a.accumulate);
}

static cot_status run_backward(conv_call *c, cot_arena memory, const conv_sums *s)
{
    const cot_segments *held = &c->segments[c->base.group->rank];
    const bool parameters = cot_is_present(&s->dweight) || cot_is_present(&s->dbias);
    CHECK(cot_group_fill(c->base.group, &s->dweight, 0));
    CHECK(cot_group_fill(c->base.group, &s->dbias, 0));
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
    f->others = take_columns(c, m, own->dtype, f->own.shape[1], count_of(&c->wanted[c->base.group->rank]));
}

static cot_status run_with_memory(void *call, cot_arena *m)
{
    conv_call *c = call;
    c->field_count = 0;
    add_field(c, m, &c->a.x);
    if (c->backward)
        add_field(c, m, &c->a.dy);
    if (cot_is_present(&c->a.seq_idx))
        add_field(c, m, &c->a.seq_idx);
    const cot_messages x = cot_messages_take(m, c->base.group->size, sizes_of, c);
    const conv_sums sums = take_sums(c, m);
    c->cu = cot_arena_take(m, c->N + 1, sizeof *c->cu), c->edges_cu = cot_arena_take(m, c->N + 1, sizeof *c->cu);
    c->host_cu = cot_arena_take_host(m, c->N + 1, sizeof *c->host_cu);
    const cot_arena windows = *m;
    take_window(c, m, widest(c));
    if (m->counting)
        return COT_OK;
    CHECK(write_cu_of_edges(c, !c->backward));
    CHECK(exchange(c, &x));
    return c->backward ? run_backward(c, windows, &sums) : run_forward(c, windows);
}

static cot_status check_as_single_call(const conv_call *c)
{
    cot_causal_conv1d_backward_args b = c->a;
    cot_tensor y = c->y;
    const int64_t rows = b.x.shape[2];
    size_t bytes;
    CHECK(cot_widen(c->base.name, "x", &b.x, 2, rows, c->T));
    CHECK(cot_widen(c->base.name, "y", &y, 2, rows, c->T));
    CHECK(cot_widen(c->base.name, "dy", &b.dy, 2, rows, c->T));
    CHECK(cot_widen(c->base.name, "dx", &b.dx, 2, rows, c->T));
    CHECK(cot_widen(c->base.name, "seq_idx", &b.seq_idx, 1, rows, c->T));
    if (c->backward)
        return cot_causal_conv1d_backward_workspace(c->base.queue, &b, &bytes);
    cot_causal_conv1d_forward_args f;
    COT_INIT(&f);
    f.activation = b.activation, f.x = b.x, f.weight = b.weight, f.bias = b.bias, f.initial_state = b.initial_state;
    f.seq_idx = b.seq_idx, f.cu_seqlens = b.cu_seqlens, f.y = y, f.final_state = c->final_state;
    return cot_causal_conv1d_forward_workspace(c->base.queue, &f, &bytes);
}

static cot_status check_memory(const conv_call *c)
{
    const cot_causal_conv1d_backward_args *a = &c->a;
    const cot_named_tensor tensors[] = {
        COT_IN(a, x),       COT_IN(a, weight),         COT_IN(a, bias), COT_IN(a, initial_state),
        COT_IN(a, seq_idx), COT_IN(a, cu_seqlens),     COT_IN(a, dy),   COT_IN(a, dfinal_state),
        COT_OUT(c, y),      COT_OUT(c, final_state),   COT_OUT(a, dx),  COT_OUT(a, dweight),
        COT_OUT(a, dbias),  COT_OUT(a, dinitial_state)};
    return cot_check_memory(c->base.name, tensors, sizeof tensors / sizeof *tensors);
}

static cot_status check_cu_seqlens(const conv_call *c)
{
    for (int64_t n = 0; has_cu(c) && n <= c->N; n++) {
        const int64_t before = n > 0 ? cu_at(c, n - 1) : 0;
        if (n == 0 && cu_at(c, 0) != 0)
            return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens[0] is %" PRId64 ", expected 0", c->base.name,
                            cu_at(c, 0));
        if (cu_at(c, n) < before)
            return cot_fail(COT_INVALID_DATA,
                            "%s: cu_seqlens[%" PRId64 "] is %" PRId64 ", less than %" PRId64 " before it", c->base.name,
                            n, cu_at(c, n), before);
    }
    if (has_cu(c) && cu_at(c, c->N) > c->T)
        return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens ends at %" PRId64 ", options.length is %" PRId64,
                        c->base.name, cu_at(c, c->N), c->T);
    return COT_OK;
}

static cot_status check_rows(conv_call *c)
{
    const cot_segments own = cot_segments_of(&c->options, c->T, c->base.group->size, c->base.group->rank, 1);
    if (own.list == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for the cut", c->base.name);
    free(own.list);
    if (c->a.x.shape[2] != own.rows)
        return cot_fail(COT_INVALID_SHAPE,
                        "%s: x has T=%" PRId64 ", expected %" PRId64 ", the part of rank %d of options.length %" PRId64,
                        c->base.name, c->a.x.shape[2], own.rows, c->base.group->rank, c->T);
    return COT_OK;
}

/* Copies the arguments of both directions to c->a. */
static cot_status copy_arguments(conv_call *c)
{
    cot_causal_conv1d_forward_args f;
    if (c->args == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: args is null", c->base.name);
    CHECK(cot_copy_options(c->base.name, c->given, &c->options));
    if (c->backward)
        return cot_copy_args(c->base.name, "struct_size", c->args, sizeof c->a, &c->a);
    CHECK(cot_copy_args(c->base.name, "struct_size", c->args, sizeof f, &f));
    COT_INIT(&c->a);
    c->a.activation = f.activation, c->a.x = f.x, c->a.weight = f.weight, c->a.bias = f.bias;
    c->a.initial_state = f.initial_state, c->a.seq_idx = f.seq_idx, c->a.cu_seqlens = f.cu_seqlens;
    c->a.workspace = f.workspace, c->a.workspace_bytes = f.workspace_bytes;
    c->y = f.y, c->final_state = f.final_state;
    return COT_OK;
}

static cot_status check(void *call)
{
    conv_call *c = call;
    cot_causal_conv1d_backward_args *a = &c->a;
    cot_tensor view;
    CHECK(copy_arguments(c));
    c->T = c->options.length;
    CHECK(cot_check_cut(c->base.name, &c->options, c->T));
    if (c->options.head_ranks != 0 && c->options.head_ranks != 1)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: head_ranks is %d, expected 0 or 1", c->base.name,
                        (int)c->options.head_ranks);
    if (c->options.all_gather != 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: all_gather is %d, expected 0", c->base.name,
                        (int)c->options.all_gather);
    CHECK(cot_group_no_workspace(c->base.name, a->workspace, a->workspace_bytes));
    CHECK(cot_check_required(c->base.name, "x", &a->x));
    CHECK(cot_check_tensor(c->base.name, "x", &a->x, COT_FLOATS, 3, 3));
    CHECK(check_rows(c));
    CHECK(check_as_single_call(c));
    CHECK(check_memory(c));
    c->B = a->x.shape[0], c->D = a->x.shape[1], c->K = a->weight.shape[1];
    c->N = has_cu(c) ? a->cu_seqlens.shape[0] - 1 : 0;
    c->sum = a->x.dtype == COT_F64 ? COT_F64 : COT_F32;
    c->channel_last = a->x.stride[1] == 1 && a->x.stride[2] != 1;
    c->cu_seqlens = a->cu_seqlens;
    CHECK(cot_group_to_host(c->base.group, &c->cu_seqlens, &view, &c->index));
    a->cu_seqlens = view; /* from here on the host reads it */
    CHECK(check_cu_seqlens(c));
    return cut(c) ? COT_OK : cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for the cut", c->base.name);
}

static cot_status add_words(const void *call)
{
    const conv_call *c = call;
    const cot_causal_conv1d_backward_args *a = &c->a;
    cot_group *g = c->base.group;
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
    cot_group_word(g, "cu_seqlens", cot_hash_tensor(&a->cu_seqlens));
    cot_group_values(g, "dfinal_state", &a->dfinal_state);
    const struct {
        const char *name;
        const cot_tensor *tensor;
    } present[] = {
        {"seq_idx", &a->seq_idx}, {"y", &c->y},         {"final_state", &c->final_state},      {"dx", &a->dx},
        {"dweight", &a->dweight}, {"dbias", &a->dbias}, {"dinitial_state", &a->dinitial_state}};
    for (size_t n = 0; n < sizeof present / sizeof *present; n++)
        cot_group_word(g, present[n].name, present[n].tensor->dtype);
    return COT_OK;
}

static cot_status run_call(conv_call *c)
{
    return cot_group_run(&c->base, check, add_words, run_with_memory, free_call);
}

cot_status cot_parallel_causal_conv1d_forward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                              const cot_causal_conv1d_forward_args *args)
{
    conv_call c = {.base = {.name = "parallel_causal_conv1d_forward", .group = group, .queue = queue},
                   .given = options,
                   .args = args};
    return run_call(&c);
}

cot_status cot_parallel_causal_conv1d_backward(cot_group *group, cot_queue *queue, const cot_parallel_options *options,
                                               const cot_causal_conv1d_backward_args *args)
{
    conv_call c = {.base = {.name = "parallel_causal_conv1d_backward", .group = group, .queue = queue},
                   .given = options,
                   .args = args,
                   .backward = true};
    return run_call(&c);
}
