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

/* The keys and values of a line, or parts of their gradients, as one message. */
typedef struct block {
    char *data;
    size_t bytes;
    cot_tensor k, v;
} block;

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

    cot_tensor q, k, v, lse, delta, dout; /* of the line, for this rank's heads */
} attention_call;

/* attention_check.c: checks the arguments and fills the call. After an error too, attention_free must follow. */
cot_status attention_check(void *call);
/* Adds everything that all ranks must share to the agreement. */
cot_status attention_words(const void *call);
void attention_free(void *call);

/* attention_ranges.c: fills q_lines to needed. False: no memory. */
bool attention_cut(attention_call *c);
/* Whether a query of one range attends to a key of another, in any batch. Both are of the same sequence. */
bool attention_attends(const attention_call *c, const row_range *q, const row_range *k);

/* Queries and keys of one call of the core. A *joined* pair holds all rows of several ranges, with a mask that does not
 * depend on the positions of the ranges: every query attends to every key, or, with `causal`, query i to keys up to i. */
typedef struct range_pair {
    int64_t q_index, q_count; /* the ranges of queries */
    row_range q, k;
    bool joined, causal;
} range_pair;

/* Calls body for every visible pair of this line's queries and the keys of line k_line, in a fixed order. Ranges are
 * joined where the call has nothing that depends on positions but its mask. */
double attention_pairs(const attention_call *c, const range_pair *pair); /* queries and visible keys of a pair */
typedef cot_status pair_body(const attention_call *c, void *context, const range_pair *pair);
cot_status attention_each_pair(const attention_call *c, int64_t k_line, pair_body *body, void *context);
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

/* ---- attention_ring.c ------------------------------------------------------------------------------------------- */

/* Divides the memory of a call, and runs it. memory->counting: only counts the bytes. */
cot_status attention_run_forward(attention_call *c, cot_arena *memory);
cot_status attention_run_backward(attention_call *c, cot_arena *memory);

#endif
