/* SPDX-License-Identifier: Apache-2.0
 * attention_call.h: one call of attention under a group.
 *
 * The N ranks are R lines of C columns: rank = line * C + column. The ranks of a line exchange heads, so that each
 * holds all rows of the line for its heads. The ring runs over the lines. With C = 1 a line is one rank and holds all
 * heads.
 *
 * Tensors of a call have a batch axis: a packed tensor [T,H,*] becomes [1,T,H,*]. */
#ifndef COT_PARALLEL_ATTENTION_CALL_H
#define COT_PARALLEL_ATTENTION_CALL_H

#include "group.h"
#include "rows.h"
#include "shard.h"

#include "core/integers.h"
#include "core/tensor.h"

/* A window without a bound. Sums with positions do not overflow. */
#define ATTENTION_UNBOUNDED (COT_HUGE / 4)

/* Rows of one sequence that a line holds without a gap: rows row .. row+rows of the line's tensors, which are rows
 * begin .. begin+rows of sequence b. An unpacked call has ranges of all batches at once: b is 0. */
typedef struct row_range {
    int64_t b, row, rows, begin;
} row_range;

/* The ranges of a line, ordered by b and then by begin. Those of sequence b are first[b] .. first[b+1]. */
typedef struct row_ranges {
    row_range *list;
    int64_t *first;
} row_ranges;

/* Rows begin .. end of all keys, and ascending spans that do not meet. */
typedef struct row_span {
    int64_t begin, end;
} row_span;

typedef struct row_spans {
    row_span *list;
    int64_t count;
} row_spans;

/* The keys and values of a line, or parts of their gradients, as one message. */
typedef struct block {
    char *data;
    size_t bytes;
    cot_tensor k, v;
} block;

/* Results of a line's queries. */
typedef struct results {
    cot_tensor out, lse;
} results;

/* Gradients of a line's queries, and of keys. */
typedef struct gradients {
    cot_tensor dq, dk, dv, dbias;
    bool add; /* they are added to */
} gradients;

typedef struct attention_call {
    cot_group_call base;
    const cot_parallel_options *given;
    const void *args;
    cot_parallel_options options;
    bool backward, packed;
    cot_attention_backward_args a;   /* of both directions; the forward leaves the members of the backward absent. Its
                                    * cu_seqlens and seqused are host memory */
    cot_tensor seqused_q, seqused_k; /* where the queue is */
    void *index[4];                  /* host copies of cu_seqlens and seqused */
    int32_t *used;                   /* host: the lengths that calls on single sequences pass as seqused */
    char *used_data;                 /* the same where the queue is */
    int64_t used_count;

    int64_t B, H, Hkv, d, d_v, Tq, Tk; /* of the whole; packed: B sequences, and Tq and Tk rows */
    int64_t batches;                   /* of the tensors: B, or 1 if packed */
    cot_dtype dtype, sum;              /* of q; of the sums: f32, or f64 in f64 calls */
    int64_t left, right;               /* window; ATTENTION_UNBOUNDED or less */
    bool single; /* the core gets one sequence and one head a call: the dropout mask of a part of the heads */

    int64_t C, R, line, column;
    int64_t heads, kv_heads;         /* that this rank holds after the exchange */
    cot_segments *q_lines, *k_lines; /* [R] */
    cot_segments *q_ranks, *k_ranks; /* [C]: the ranks of this line */
    row_ranges *q_ranges, *k_ranges; /* [R] */
    row_ranges own;                  /* the query ranges of this rank alone */
    bool *needed;                    /* [R*R]: whether line i attends to a key of line j, at i*R + j */
    row_spans *seen;                 /* [R], with all_gather: the rows of all keys that a line attends to */

    cot_tensor q, k, v, lse, delta, dout; /* of the line, for this rank's heads */
} attention_call;

/* attention_check.c: checks the arguments and fills the call. After an error too, attention_free must follow. */
cot_status attention_check(void *call);
/* Adds everything that all ranks must share to the agreement. */
cot_status attention_words(const void *call);
void attention_free(void *call);

/* attention_ranges.c: fills q_lines to seen. False: no memory. */
bool attention_cut(attention_call *c);
/* Adds a span to spans that have memory for one more. */
void attention_add_span(row_spans *spans, row_span span);
/* Whether the mask depends on positions that the core does not find from the sizes of a pair alone. The core then takes
 * positions as block arguments, and no sink. */
bool attention_has_positions(const attention_call *c);
/* Whether a query of one range attends to a key of another, in any batch. Both are of the same sequence. */
bool attention_attends(const attention_call *c, const row_range *q, const row_range *k);

/* Queries and keys of one call of the core. A *joined* pair holds all rows of several ranges, with a mask that does not
 * depend on the positions of the ranges: every query attends to every key, or, with `causal`, query i to keys up to i. */
typedef struct range_pair {
    int64_t q_index, q_count; /* the ranges of queries */
    row_range q, k;
    bool joined, causal;
    bool complete; /* the keys are all that a query of the range attends to; k.row is their row among all keys */
} range_pair;

double attention_pairs(const attention_call *c, const range_pair *pair); /* queries and visible keys of a pair */
typedef cot_status pair_body(const attention_call *c, void *context, const range_pair *pair);
/* Calls body for every visible pair of this line's queries and the keys of line k_line, in a fixed order. Ranges are
 * joined where the call has nothing that depends on positions but its mask. */
cot_status attention_each_pair(const attention_call *c, int64_t k_line, pair_body *body, void *context);
/* Calls body for every range of this line's queries with all keys that it attends to, from the last range to the first.
 * The keys may be none. */
cot_status attention_each_query_range(const attention_call *c, pair_body *body, void *context);
/* The lengths of sequence b that seqused leaves, and the whole lengths. */
int64_t attention_used(const attention_call *c, bool keys, int64_t b);
int64_t attention_index(const cot_tensor *tensor, int64_t i);

/* The core's arguments for queries of range q and keys of range k. */
typedef struct attention_block {
    int32_t causal, window;
    int64_t window_left, window_right;
    int64_t q_begin, q_length, k_begin, k_length;
    cot_tensor seqused_q, seqused_k, alibi_slopes, bias;
} attention_block;

/* b and h: one batch and one head of this rank, or -1 for all. */
void attention_place(const attention_call *c, const range_pair *pair, int64_t b, int64_t h, attention_block *x);
/* Rows of a line's tensor: [B,T,H,*], or [B,H,T] if statistic. `heads` of this tensor begin at `h`; h = -1: all. */
cot_tensor attention_rows_of(const attention_call *c, const cot_tensor *t, bool statistic, int64_t b, int64_t row,
                             int64_t rows, int64_t h);
/* The part of bias or dbias that belongs to two ranges. */
cot_tensor attention_bias_of(const attention_call *c, const cot_tensor *bias, const row_range *q, const row_range *k);

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* The memory of c->used, and its contents. */
void attention_take_used(attention_call *c, cot_arena *memory);
cot_status attention_fill_used(const attention_call *c);
cot_tensor attention_take(cot_arena *memory, cot_dtype dtype, int rank, const int64_t *shape);
/* Keys and values of a line in one message, of this dtype. Absent parts take no memory. */
block attention_take_block(const attention_call *c, cot_arena *memory, int64_t line, cot_dtype dtype, bool with_k,
                           bool with_v);

/* ---- attention_heads.c: the exchange of heads within a line ----------------------------------------------------- */

/* One tensor of an exchange. local: rows of this rank for all heads. gathered: rows of the line for this rank's heads.
 * Both are [B,T,H,*], or [B,H,T] if statistic. */
typedef struct head_field {
    cot_tensor local, gathered;
    bool keys, statistic;
    bool add; /* back to the rows: adds to local instead of replacing it */
} head_field;

/* A message to and from each column. */
cot_messages attention_take_exchange(const attention_call *c, cot_arena *memory, const head_field *fields, int count,
                                     bool to_heads);
cot_status attention_to_heads(const attention_call *c, const cot_messages *x, const head_field *fields, int count);
cot_status attention_to_rows(const attention_call *c, const cot_messages *x, const head_field *fields, int count);

/* ---- attention_core.c: calls of the core ------------------------------------------------------------------------- */

/* Calls body for each batch and head if the call is divided into single heads, else once with -1. */
typedef cot_status head_body(const attention_call *c, void *context, const range_pair *pair, int64_t b, int64_t h);
cot_status attention_each_head(const attention_call *c, void *context, const range_pair *pair, head_body *body);
/* The core's forward of a pair, whose key rows are rows of `keys`. Of `outputs`, out, lse and sink are read: views of the
 * pair's rows and heads. */
cot_status attention_core_forward(const attention_call *c, const range_pair *pair, const block *keys, int64_t b,
                                  int64_t h, const cot_attention_forward_args *outputs);
/* The core's backward of a pair. The key rows of the pair are rows of `keys`, of to->dk and of to->dv. */
cot_status attention_core_backward(const attention_call *c, const range_pair *pair, const block *keys,
                                   const gradients *to);

/* ---- attention_parameters.c: sinks, and gradients of parameters -------------------------------------------------- */

/* Adds the sink to results without it, in c->sum. */
cot_status attention_add_sinks(const attention_call *c, const results *r);

/* Sums of parameter gradients over all ranks, in f64. */
typedef struct parameter_sums {
    double *dsink, *dbias;
    int64_t dbias_count;
    void *memory;
} parameter_sums;

parameter_sums attention_take_parameters(const attention_call *c, cot_arena *memory);
cot_status attention_sum_parameters(const attention_call *c, const parameter_sums *p, const cot_tensor *delta,
                                    const cot_tensor *dbias);

/* ---- the ring, and the all-gather --------------------------------------------------------------------------------- */

enum { TAG_KEYS = 2, TAG_PARTS = 3 }; /* ring: plus twice the step */

/* The rank of another line with this rank's heads. */
static inline int attention_rank_of(const attention_call *c, int64_t line)
{
    return (int)(line * c->C + c->column);
}

/* dk and dv of some rows of keys, in the dtype of sums. */
static inline bool attention_has_key_gradients(const attention_call *c)
{
    return cot_is_present(&c->a.dk) || cot_is_present(&c->a.dv);
}

/* attention_ring.c */
typedef struct key_ring {
    block own, received[2];
    cot_transfer *sends; /* [R] */
    cot_transfer receives[2];
} key_ring;

typedef struct ring_forward {
    key_ring r;
    results to;                      /* of the keys so far */
    cot_tensor block_out, block_lse; /* of one block of keys */
    bool *started;                   /* for each range of queries: `to` has keys */
    block current;
} ring_forward;

typedef struct ring_backward {
    key_ring r;
    gradients to; /* dk and dv: of the current step */
    block sums;   /* dk and dv of this line's keys */
    block sent[2], received[2];
    cot_transfer sends[2], receives[2];
    block keys, part; /* of the current step; part: dk and dv */
} ring_backward;

/* to: in the dtype of sums. */
void attention_take_ring_forward(const attention_call *c, cot_arena *memory, const results *to, ring_forward *f);
cot_status attention_ring_forward(const attention_call *c, ring_forward *f);
void attention_take_ring_backward(const attention_call *c, cot_arena *memory, const gradients *to, const block *sums,
                                  ring_backward *w);
cot_status attention_ring_backward(const attention_call *c, ring_backward *w);

/* attention_gather.c */
typedef struct key_gather {
    bool shared;   /* all lines read the keys of one line, and each other's parts of gradients, where they are */
    row_span rows; /* of all keys, that `keys` holds */
    block keys;
    row_span part_rows; /* of all keys, that `parts` holds */
    block parts;        /* dk and dv of this line's queries alone */
    block *received;    /* [R]: the other lines' parts for this line's keys */
    cot_transfer *sends, *receives, *part_sends, *part_receives;
    int send_count, receive_count, part_send_count, part_receive_count;
    row_spans written; /* of the parts */
    const results *results;
    const gradients *gradients;
} key_gather;

void attention_take_gather(const attention_call *c, cot_arena *memory, key_gather *g);
/* Writes the results of the line's queries, with the sink if the call has no positions. */
cot_status attention_gather_forward(const attention_call *c, key_gather *g, const results *to);
/* Writes dq of the line's queries, and dk and dv of the line's keys. to->dbias is cleared before. */
cot_status attention_gather_backward(const attention_call *c, key_gather *g, const gradients *to);

/* ---- attention_run.c ---------------------------------------------------------------------------------------------- */

/* Divides the memory of a call, and runs it. memory->counting: only counts the bytes. */
cot_status attention_run_forward(attention_call *c, cot_arena *memory);
cot_status attention_run_backward(attention_call *c, cot_arena *memory);

#endif
