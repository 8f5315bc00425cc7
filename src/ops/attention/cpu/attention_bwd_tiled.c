/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_tiled.c: dq, dk and dv in blocks, on the products of simd/matmul.h. Scores are formed transposed, keys
 * in rows and queries in lanes, so that P^T and dS^T lie as the products for dv and dk want them:
 *
 *     S^T = K Q^T;  dP^T = V dout^T;  P^T = exp(scale S^T - lse);  dS^T = P^T (dP^T - D)
 *     dv += P^T dout;  dk += dS^T q;  dq^T += K^T dS^T
 *
 * With AMX's products of two and three bf16, P^T and dS^T are made beside products (see there).
 *
 * Passes: (1) every block of queries is packed once, in all forms that the five products read, with lse and D beside it;
 * (2) an item is one chunk of the key blocks of one sequence and key-value head: a few key blocks at a time, it packs
 * them, walks the query blocks that see them, keeps their dk and dv, and adds to the chunk's own dq^T;
 * (3) dq is the sum over the chunks, in their order. How many chunks there are follows from the shape alone. (4) dbias,
 * a tile at a time. */
#include "attention_scores.h"

cot_status V_NAME(attention_bwd_tiled)(cot_queue *, const void *, void *);

/* Blocks of keys that stay in the second-level cache, with their dk and dv, while queries go by. AMX reads more beside
 * them: of four, a backward took a fortieth to a sixth longer, one of d = 256 most. */
enum { SUPER = MT_ONE_FORM ? ATTENTION_SUPER : ATTENTION_SUPER / 2 };

typedef struct context {
    const attention_problem *p;
    attention_bwd_layout w;
    mt *queries, *keys;
    float *lse, *D, *dq, *dk; /* lse in the unit of exp_scores */
} context;

/* The forms of a block of queries, which lie together because they are fetched together. */
typedef struct query_forms {
    mt *qt, *q, *dot, *dout; /* q^T [d][BLOCK], q [BLOCK][d] and the same of dout, all in B form */
} query_forms;

static query_forms query_forms_at(const context *c, int64_t number)
{
    mt *at = c->queries + number * c->w.record, *dot = at + 2 * BLOCK * c->w.d;
    return (query_forms){at, at + BLOCK * c->w.d, dot, dot + BLOCK * c->w.dv};
}

/* ---- packing -------------------------------------------------------------------------------------------- */

/* `height` keys from key j on: k and v, and k^T unless NULL. */
static void pack_keys(const context *c, const attention_sequence *s, int64_t hkv, int64_t j, int64_t height, mt *k,
                      mt *kt, mt *v)
{
    const attention_problem *p = c->p;
    _Alignas(64) float x[STRIP * ATTENTION_MAX_D];
    for (int64_t r = 0; r < height; r += STRIP) {
        const int64_t rows = attention_clamp(s->Tk - j - r, 0, STRIP), row = s->k_row + j + r;
        load_rows(x, c->w.d, &p->k, s->b, row, hkv, rows, p->sizes.d);
        pack_a(k, height, r, x, c->w.d);
        if (kt != NULL)
            pack_transposed(kt, false, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->v, s->b, row, hkv, rows, p->sizes.dv);
        pack_a(v, height, r, x, c->w.dv);
    }
}

/* sum_c dout[i,c] out[i,c] of STRIP rows, with the roundings of dP = dout v^T: of a query that sees one key out is v, and
 * dP - D is 0, as it should be. */
static void sum_products(float *D, const float *dout, const float *out, int64_t columns)
{
    for (int64_t r = 0; r < STRIP; r += VW) {
        vf sum = v_zero();
        for (int64_t c = 0; c < columns; c += MT_CHAIN) {
            vf a[MT_CHAIN], b[MT_CHAIN];
            const int64_t n = columns - c < MT_CHAIN ? columns - c : MT_CHAIN;
            for (int64_t part = 0; part < n; part += VW) {
                for (int64_t i = 0; i < VW; i++) {
                    a[part + i] = v_load(dout + (r + i) * columns + c + part);
                    b[part + i] = v_load(out + (r + i) * columns + c + part);
                }
                mt_transpose(a + part);
                mt_transpose(b + part);
            }
            sum = mt_dot(sum, a, b, n);
        }
        v_store(D + r, sum);
    }
}

/* What lse is multiplied with: the unit of exp_scores with its rounding, which scores have too, so that it cancels. */
static double lse_unit(const attention_problem *p)
{
    return scores_unit(p) / (scores_have_extras(p) ? 1 : p->sizes.scale);
}

/* lse and D of STRIP queries. One that passes no gradient gets lse = inf, which makes its P zero. */
static void pack_statistics(const attention_problem *p, const attention_block *block, int64_t h, int64_t r, float *lse,
                            float *D)
{
    for (int64_t i = 0; i < STRIP; i++) {
        const int64_t row = block->s.q_row + block->first + r + i;
        lse[i] = INFINITY;
        if (r + i < block->used) {
            const float given = ((const float *)p->lse.data)[attention_lse_at(&p->lse, block->s.b, h, row)];
            lse[i] = given > -INFINITY ? (float)(given * lse_unit(p)) : INFINITY;
        }
        if (lse[i] == INFINITY)
            D[i] = 0;
        else if (cot_present(&p->delta))
            D[i] = ((const float *)p->delta.data)[attention_lse_at(&p->delta, block->s.b, h, row)];
        else if (cot_present(&p->dlse))
            D[i] -= ((const float *)p->dlse.data)[attention_lse_at(&p->dlse, block->s.b, h, row)];
    }
}

static void pack_queries_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_axis axis = {p, false, BLOCK};
    const int64_t h = item % p->sizes.H, at = item * BLOCK;
    const attention_block block = attention_block_at(&axis, item / p->sizes.H);
    const query_forms to = query_forms_at(c, item);
    _Alignas(64) float x[STRIP * ATTENTION_MAX_D], out[STRIP * ATTENTION_MAX_D];
    for (int64_t r = 0; block.rows > 0 && r < BLOCK; r += STRIP) {
        const int64_t rows = attention_clamp(block.used - r, 0, STRIP), row = block.s.q_row + block.first + r;
        load_rows(x, c->w.d, &p->q, block.s.b, row, h, rows, p->sizes.d);
        pack_transposed(to.qt, true, r, x, c->w.d);
        pack_b(to.q, BLOCK, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->dout, block.s.b, row, h, rows, p->sizes.dv);
        pack_transposed(to.dot, true, r, x, c->w.dv);
        pack_b(to.dout, BLOCK, r, x, c->w.dv);
        if (!cot_present(&p->delta)) {
            load_rows(out, c->w.dv, &p->out, block.s.b, row, h, rows, p->sizes.dv);
            sum_products(c->D + at + r, x, out, c->w.dv);
        }
        pack_statistics(p, &block, h, r, c->lse + at + r, c->D + at + r);
    }
}

/* ---- a block of keys and a block of queries --------------------------------------------------------------------- */

/* A strip of keys at a block of queries, [TALL][BLOCK]: S^T and dP^T become P^T and dS^T, for the product for dq those
 * of the whole block of keys. With AMX, dS^T is wanted in both forms. */
typedef struct strip_buffers {
    _Alignas(64) float s[TALL * BLOCK], dp[BLOCK * BLOCK];
    /* Otherwise in place. There is room for two strips, in turns. */
    _Alignas(64) mt prob[MT_ONE_FORM ? 1 : 2 * TALL * BLOCK], ds[MT_ONE_FORM ? 1 : 2 * TALL * BLOCK];
    _Alignas(64) mt ds_b[MT_ONE_FORM ? 1 : 2 * TALL * BLOCK];
    int64_t turn;
    _Alignas(64) float caps[TALL * BLOCK], keep[TALL * BLOCK]; /* of softcap and dropout */
} strip_buffers;

/* Operands where they lie: P^T and dS^T of a strip, and dS^T of the block in B form. */
typedef struct strip_operands {
    mt *prob, *ds, *ds_b;
    int64_t ds_rows;
} strip_operands;

V_INLINE strip_operands operands_of(strip_buffers *x, int64_t top)
{
    if (MT_ONE_FORM)
        return (strip_operands){(mt *)x->s, (mt *)x->dp + mt_at(BLOCK, top, 0), (mt *)x->dp, BLOCK};
    return (strip_operands){x->prob, x->ds, x->ds_b, TALL};
}

/* What is constant in a strip. The last three at compile time, so that what is not there costs nothing. */
typedef struct strip_options {
    vf unit;
    bool masked, cap, drop;
} strip_options;

/* P^T (times what dropout makes of it) and dZ^T of key j and VW queries from i on; s and dp are there, and `at` is their
 * place in the tile. */
V_INLINE void differentiate_scores(const scores *a, const strip_buffers *x, int64_t at, int64_t j, int64_t i,
                                   strip_options o, vf lse, vf D, vf dp, vf *prob, vf *ds)
{
    vf s = v_load(x->s + at);
    if (o.masked) {
        const attention_span seen = scores_queries(a, j);
        s = v_add(s, border(seen.first - i, seen.end - i));
    }
    *prob = exp_scores(s, o.unit, lse);
    if (o.drop)
        dp = v_mul(dp, v_load(x->keep + at));
    *ds = v_mul(*prob, v_sub(dp, D));
    if (o.drop)
        *prob = v_mul(*prob, v_load(x->keep + at));
    if (o.cap)
        *ds = v_mul(*ds, v_load(x->caps + at));
}

/* `height` keys from row `top` of the block on, the first of which is j, and queries first + [strips); lse and D are those of query `first` on. Two keys and 2 VW queries at a
 * time, which is what the stores want. */
V_INLINE void differentiate_strip(const scores *a, strip_buffers *x, int64_t top, int64_t height, int64_t j,
                                  int64_t first, attention_span strips, const float *lse, const float *D,
                                  strip_options o)
{
    const strip_operands to = operands_of(x, top);
    for (int64_t i = strips.first; i < strips.end; i += 2 * VW) {
        for (int64_t r = 0; r < height; r += 2) {
            vf prob[2][2], ds[2][2];
            V_UNROLL
            for (int64_t n = 0; n < 2; n++) {
                V_UNROLL
                for (int64_t m = 0; m < 2; m++) {
                    const vf dp = v_load(x->dp + cell(BLOCK, top + r + n, i) + m * VW);
                    differentiate_scores(a, x, cell(TALL, r + n, i) + m * VW, j + r + n, first + i + m * VW, o,
                                         v_load(lse + i + m * VW), v_load(D + i + m * VW), dp, &prob[n][m], &ds[n][m]);
                }
                mt_store_a2(to.prob + cell(TALL, r + n, i), prob[n][0], prob[n][1]);
                if (!MT_ONE_FORM)
                    mt_store_a2(to.ds + cell(TALL, r + n, i), ds[n][0], ds[n][1]);
            }
            mt_store_b(to.ds_b, BLOCK, top + r, i, ds[0][0], ds[1][0]);
            mt_store_b(to.ds_b, BLOCK, top + r, i + VW, ds[0][1], ds[1][1]);
        }
    }
}

#if defined(COT_MATMUL_SPLIT)
/* A mask hides part of keys j .. and queries i .., s[STRIP][STRIP]: -inf there. */
static void hide_scores(const scores *a, float *s, int64_t j, int64_t i)
{
    for (int64_t r = 0; r < STRIP; r++) {
        const attention_span seen = scores_queries(a, j + r);
        for (int64_t c = 0; c < STRIP; c += VW)
            v_store(s + r * MT + c, v_add(v_load(s + r * MT + c), border(seen.first - i - c, seen.end - i - c)));
    }
}
#endif

/* Does every key of j .. j+height see every query of first + [strips)? */
static bool all_seen(const scores *a, int64_t j, int64_t height, int64_t first, attention_span strips)
{
    const attention_span top = scores_queries(a, j), bottom = scores_queries(a, j + height - 1);
    return bottom.first <= first + strips.first && top.end >= first + strips.end && bottom.first < bottom.end;
}

/* The operands of one block of keys and one of queries. */
typedef struct pair_of_blocks {
    int64_t first_key, first_query;
    query_forms q;
    const mt *k, *kt, *v;
    const float *lse, *D;
    float *dq; /* [d][BLOCK]; dk, dv [BLOCK][d] */
    float *dk, *dv;
    bool *dq_begun, *begun;           /* of each strip of dq; of dk and dv */
    mt_ahead *forms_ahead, *dq_ahead; /* of the next block of queries */
} pair_of_blocks;

/* `height` keys from row `top` of the block on, at the queries `strips` of their block. */
static void differentiate_keys(const context *c, const scores *a, const pair_of_blocks *b, strip_buffers *x,
                               int64_t top, int64_t height, attention_span strips, bool seen)
{
    const attention_problem *p = c->p;
    const int64_t d = c->w.d, dv = c->w.dv, j = b->first_key + top, n = strips.end - strips.first;
    const int64_t at = mt_at(BLOCK, top, 0);
    const strip_operands operands = operands_of(x, top);
    mt_product(height, n, d, b->k + at, BLOCK, b->q.qt + mt_at(d, 0, strips.first), d,
               x->s + mt_at(TALL, 0, strips.first), TALL, false, b->forms_ahead);
    mt_product_whole(height, n, dv, b->v + at, BLOCK, b->q.dot + mt_at(dv, 0, strips.first), dv,
                     x->dp + at + mt_at(BLOCK, 0, strips.first), BLOCK, false, b->forms_ahead);
    strip_options o = {.unit = v_set1(scores_unit(p)), .masked = true};
    if (a->extras) {
        const score_tile tile = {b->first_query, j, true, height, strips};
        scores_modify(a, &tile, x->s, x->caps);
        if (a->dropout.dropped > 0)
            scores_keep(a, &tile, x->keep);
        o.cap = p->sizes.softcap > 0;
        o.drop = a->dropout.dropped > 0;
        differentiate_strip(a, x, top, height, j, b->first_query, strips, b->lse, b->D, o);
    } else if (seen) {
        o.masked = false;
        differentiate_strip(a, x, top, height, j, b->first_query, strips, b->lse, b->D, o);
    } else {
        differentiate_strip(a, x, top, height, j, b->first_query, strips, b->lse, b->D, o);
    }
    mt_product(height, dv, n, operands.prob + mt_at(TALL, 0, strips.first), TALL,
               b->q.dout + mt_at(BLOCK, strips.first, 0), BLOCK, b->dv + at, BLOCK, b->begun[top / STRIP],
               b->forms_ahead);
    mt_product(height, d, n, operands.ds + mt_at(operands.ds_rows, 0, strips.first), operands.ds_rows,
               b->q.q + mt_at(BLOCK, strips.first, 0), BLOCK, b->dk + at, BLOCK, b->begun[top / STRIP], b->forms_ahead);
    for (int64_t r = top; r < top + height; r += STRIP)
        b->begun[r / STRIP] = true;
}

/* TALL keys at a time; STRIP where a mask's border runs through, since less of what it hides is then worked out. */
static void differentiate_blocks(const context *c, const scores *a, const pair_of_blocks *b, strip_buffers *x)
{
    const attention_sizes *z = &c->p->sizes;
    const int64_t d = c->w.d;
    attention_span keys[BLOCK / STRIP]; /* of each strip of queries: the strips of keys that it saw */
    for (int64_t n = 0; n < BLOCK / STRIP; n++)
        keys[n] = (attention_span){BLOCK, 0};
    for (int64_t top = 0, height; top < BLOCK; top += height) {
        const int64_t j = b->first_key + top;
        attention_span strips;
        for (height = top % TALL == 0 ? TALL : STRIP;; height = STRIP) {
            strips = attention_strips(attention_queries_of_rows(z, &a->s, j, j + height), b->first_query, BLOCK);
            if (height == STRIP || strips.first == strips.end ||
                (b->begun[top / STRIP] == b->begun[top / STRIP + 1] && all_seen(a, j, height, b->first_query, strips)))
                break;
        }
        if (strips.first == strips.end)
            continue;
        differentiate_keys(c, a, b, x, top, height, strips, all_seen(a, j, height, b->first_query, strips));
        for (int64_t i = strips.first / STRIP; i < strips.end / STRIP; i++) {
            keys[i].first = keys[i].first < top ? keys[i].first : top;
            keys[i].end = top + height;
        }
    }
    const mt *ds = operands_of(x, 0).ds_b;
    for (int64_t i = 0; i < BLOCK / STRIP; i++) {
        const int64_t n = keys[i].end - keys[i].first;
        if (n <= 0)
            continue;
        mt_product(d, STRIP, n, b->kt + mt_at(d, 0, keys[i].first), d, ds + mt_at(BLOCK, keys[i].first, i * STRIP),
                   BLOCK, b->dq + mt_at(d, 0, i * STRIP), d, b->dq_begun[i], b->dq_ahead);
        b->dq_begun[i] = true;
    }
}

#if defined(COT_MATMUL_SPLIT)

/* ---- arithmetic beside products --------------------------------------------------------------------------------- *
 * TALL keys at a block of queries after the other: P^T and dS^T of a part, 32 keys and 32 queries, are made a key at a time,
 * behind every second tile product of the next parts of S^T and dP^T and of dv, dk and dq of the keys before, whose
 * products are pending until then. Products of two and three bf16 are long enough to hide it all, and their terms cost it
 * more; of one bf16 they are not, and it is as fast by itself. */

enum {
    WAITING = 4, /* parts that wait for their exponentials, and the next ones */
    PENDING = (2 * TALL + BLOCK) / STRIP * ATTENTION_MAX_D / STRIP,
};

/* A part of dv, dk or dq, which is still to be added. */
typedef struct pending_part {
    const mt *a, *b;
    float *to;
    int64_t a_rows, n;
    bool add;
} pending_part;

typedef struct pending_products {
    pending_part parts[PENDING];
    int64_t count, done;
} pending_products;

/* A part whose P^T and dS^T are still to be made. */
typedef struct waiting_part {
    const float *s, *dp, *lse, *D;
    mt *prob, *ds, *ds_b;
} waiting_part;

/* Those that wait, in a ring: what is left of the oldest, `rows` of it, and the others from `next` on. */
typedef struct waiting_scores {
    const waiting_part *ring;
    int64_t next, count;
    waiting_part at;
    int64_t rows;
    vf unit, prob[2], ds[2];   /* of a key; dS^T of an even one */
    bool busy;                 /* the queue had rows when this step began */
    mt_ahead *ahead, *ahead_2; /* asked for meanwhile, one after the other */
} waiting_scores;

V_INLINE void scores_prob(waiting_scores *w)
{
    V_UNROLL
    for (int m = 0; m < 2; m++)
        w->prob[m] = exp_scores(v_load(w->at.s + m * VW), w->unit, v_load(w->at.lse + m * VW));
    mt_store_a2(w->at.prob, w->prob[0], w->prob[1]);
    w->at.s += MT;
    w->at.prob += MT;
}

V_INLINE void scores_ds(waiting_scores *w, vf ds[2])
{
    V_UNROLL
    for (int m = 0; m < 2; m++)
        ds[m] = v_mul(w->prob[m], v_sub(v_load(w->at.dp + m * VW), v_load(w->at.D + m * VW)));
    mt_store_a2(w->at.ds, ds[0], ds[1]);
    w->at.dp += MT;
    w->at.ds += MT;
}

/* Two keys in four turns. */
V_INLINE void scores_row(waiting_scores *w, int turn)
{
    if (turn % 2 == 0) {
        scores_prob(w);
    } else if (turn == 1) {
        scores_ds(w, w->ds);
    } else {
        vf odd[2];
        scores_ds(w, odd);
        V_UNROLL
        for (int m = 0; m < 2; m++)
            mt_store_b(w->at.ds_b, TALL, 0, m * VW, w->ds[m], odd[m]);
        w->at.ds_b += 2 * MT;
        w->rows -= 2;
    }
}

V_INLINE void scores_next(waiting_scores *w)
{
    w->at = w->ring[w->next];
    w->next = (w->next + 1) % WAITING;
    w->rows = STRIP;
    w->count--;
}

V_INLINE void scores_turn(void *with, int turn)
{
    waiting_scores *w = with;
    for (size_t line = 0; line < COT_MATMUL_SPLIT; line++)
        mt_ask(w->ahead->at < w->ahead->end ? w->ahead : w->ahead_2);
    if (turn == 0) {
        if (w->rows == 0 && w->count > 0)
            scores_next(w);
        w->busy = w->rows > 0;
    }
    if (w->busy)
        scores_row(w, turn);
}

/* Until `count` are left besides those that are done. */
V_INLINE void scores_until(waiting_scores *w, int64_t count)
{
    for (;;) {
        while (w->rows > 0)
            for (int turn = 0; turn < 4; turn++)
                scores_row(w, turn);
        if (w->count <= count)
            return;
        scores_next(w);
    }
}

V_INLINE void add_pending(pending_products *y, waiting_scores *w)
{
    const pending_part *at = &y->parts[y->done++];
    mt_part(at->n, 1, at->a, at->a_rows, at->b, at->to, at->add, false, scores_turn, w);
}

static void finish_pending(pending_products *y)
{
    mt_ahead nothing = {NULL, NULL};
    waiting_scores w = {.ahead = &nothing, .ahead_2 = &nothing};
    while (y->done < y->count)
        add_pending(y, &w);
    y->count = y->done = 0;
}

/* What each strip of TALL keys sees of a block of queries, and the other way round. */
typedef struct seen_strips {
    attention_span queries[TALL / STRIP], keys[BLOCK / STRIP];
    int64_t parts;
} seen_strips;

static seen_strips strips_seen(const context *c, const scores *a, int64_t first_key, int64_t first_query)
{
    seen_strips seen = {.parts = 0};
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        seen.keys[i] = (attention_span){TALL, 0};
    for (int64_t r = 0; r < TALL; r += STRIP) {
        const attention_span rows =
            attention_queries_of_rows(&c->p->sizes, &a->s, first_key + r, first_key + r + STRIP);
        const attention_span strips = seen.queries[r / STRIP] = attention_strips(rows, first_query, BLOCK);
        for (int64_t i = strips.first / STRIP; i < strips.end / STRIP; i++, seen.parts++) {
            seen.keys[i].first = seen.keys[i].first < r ? seen.keys[i].first : r;
            seen.keys[i].end = r + STRIP;
        }
    }
    return seen;
}

/* The products of keys from row `top` of their block on: one panel of columns after the other, since strips of keys share it, and
 * of dq^T two rows of parts. */
static void push_products(const context *c, const pair_of_blocks *b, const strip_buffers *x, const seen_strips *seen,
                          int64_t top, pending_products *pending)
{
    const int64_t d = c->w.d, dv = c->w.dv, half = x->turn * TALL * BLOCK;
    const mt *prob = x->prob + half, *ds = x->ds + half, *ds_b = x->ds_b + half;
    for (int64_t n = 0; n < dv + d; n += STRIP)
        for (int64_t r = 0; r < TALL; r += STRIP) {
            const attention_span of = seen->queries[r / STRIP];
            const mt *rows = n < dv ? prob : ds, *columns = n < dv ? b->q.dout : b->q.q;
            float *to = n < dv ? b->dv : b->dk;
            const int64_t column = n < dv ? n : n - dv;
            if (of.first < of.end)
                pending->parts[pending->count++] = (pending_part){.a = rows + mt_at(TALL, r, of.first),
                                                                  .a_rows = TALL,
                                                                  .b = columns + mt_at(BLOCK, of.first, column),
                                                                  .to = to + mt_at(BLOCK, top + r, column),
                                                                  .n = of.end - of.first,
                                                                  .add = b->begun[(top + r) / STRIP]};
        }
    for (int64_t two = 0; two < d; two += 2 * STRIP)
        for (int64_t i = 0; i < BLOCK; i += STRIP) {
            const attention_span of = seen->keys[i / STRIP];
            for (int64_t row = two; of.first < of.end && row < two + 2 * STRIP && row < d; row += STRIP)
                pending->parts[pending->count++] = (pending_part){.a = b->kt + mt_at(d, row, top + of.first),
                                                                  .a_rows = d,
                                                                  .b = ds_b + mt_at(TALL, of.first, i),
                                                                  .to = b->dq + mt_at(d, row, i),
                                                                  .n = of.end - of.first,
                                                                  .add = b->dq_begun[i / STRIP]};
        }
    for (int64_t r = 0; r < TALL / STRIP; r++)
        b->begun[top / STRIP + r] |= seen->queries[r].first < seen->queries[r].end;
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        b->dq_begun[i] |= seen->keys[i].first < seen->keys[i].end;
}

/* TALL keys from row `top` of the block on, at the block of queries: P^T and dS^T, while what was pending is added; their own products
 * are pending then. */
static void differentiate_beside(const context *c, const scores *a, const pair_of_blocks *b, strip_buffers *x,
                                 pending_products *pending, int64_t top)
{
    _Alignas(64) float s[WAITING][STRIP * STRIP], dp[WAITING][STRIP * STRIP];
    const int64_t d = c->w.d, dv = c->w.dv, first_key = b->first_key + top;
    const seen_strips seen = strips_seen(c, a, first_key, b->first_query);
    if (seen.parts == 0)
        return;
    x->turn = 1 - x->turn;
    const int64_t half = x->turn * TALL * BLOCK;
    waiting_part ring[WAITING];
    waiting_scores w = {
        .ring = ring, .unit = v_set1(scores_unit(c->p)), .ahead = b->forms_ahead, .ahead_2 = b->dq_ahead};
    int64_t slot = 0, due = 0;
    for (int64_t i = 0; i < BLOCK; i += STRIP) {
        const attention_span keys = seen.keys[i / STRIP], queries = {i, i + STRIP};
        const int64_t n = keys.end > keys.first ? (keys.end - keys.first) / STRIP : 0;
        if (w.count + (w.rows > 0) + n > WAITING)
            scores_until(&w, WAITING - n);
        for (int64_t r = keys.first; r < keys.end; r += STRIP)
            mt_part(d, 1, b->k + mt_at(BLOCK, top + r, 0), BLOCK, b->q.qt + mt_at(d, 0, i),
                    s[(slot + (r - keys.first) / STRIP) % WAITING], false, false, scores_turn, &w);
        for (int64_t r = keys.first; r < keys.end; r += STRIP, slot = (slot + 1) % WAITING) {
            mt_part(dv, 1, b->v + mt_at(BLOCK, top + r, 0), BLOCK, b->q.dot + mt_at(dv, 0, i), dp[slot], false, true,
                    scores_turn, &w);
            if (!all_seen(a, first_key + r, STRIP, b->first_query, queries))
                hide_scores(a, s[slot], first_key + r, b->first_query + i);
            const int64_t at = half + mt_at(TALL, r, i);
            ring[slot] =
                (waiting_part){s[slot], dp[slot], b->lse + i, b->D + i, x->prob + at, x->ds + at, x->ds_b + at};
            w.count++;
        }
        for (due += n * pending->count; due >= seen.parts; due -= seen.parts)
            add_pending(pending, &w);
    }
    scores_until(&w, 0);
    pending->count = pending->done = 0;
    push_products(c, b, x, &seen, top, pending);
}

#endif

/* ---- one item ------------------------------------------------------------------------------------------------- */

/* The key blocks that a block of queries sees. */
static attention_span blocks_seen(const attention_problem *p, const attention_sequence *s, int64_t query_block)
{
    const attention_span keys = attention_keys_of_rows(&p->sizes, s, query_block * BLOCK, (query_block + 1) * BLOCK);
    if (keys.first >= keys.end)
        return (attention_span){0, 0};
    return (attention_span){keys.first / BLOCK, attention_blocks_of(keys.end, BLOCK)};
}

static void store_keys(const context *c, const attention_sequence *s, int64_t hkv, int64_t block, float *dk, float *dv,
                       const bool *begun)
{
    const attention_problem *p = c->p;
    const int64_t rows = attention_clamp(s->k_rows - block * BLOCK, 0, BLOCK), row = s->k_row + block * BLOCK;
    for (int64_t strip = 0; strip < BLOCK / STRIP; strip++) {
        if (begun[strip])
            continue;
        for (int64_t n = 0; n < c->w.d; n += MT)
            memset(dk + mt_at(BLOCK, strip * STRIP, n), 0, STRIP * MT * sizeof(float));
        for (int64_t n = 0; n < c->w.dv; n += MT)
            memset(dv + mt_at(BLOCK, strip * STRIP, n), 0, STRIP * MT * sizeof(float));
    }
    if (cot_present(&p->dk))
        store_rows(&p->dk, s->b, row, hkv, rows, p->sizes.d, dk, BLOCK, NULL, (float)p->sizes.scale, p->accumulate);
    if (cot_present(&p->dv))
        store_rows(&p->dv, s->b, row, hkv, rows, p->sizes.dv, dv, BLOCK, NULL, 1, p->accumulate);
}

/* What an item works on: up to SUPER key blocks from `first` on, of one sequence and key-value head. */
typedef struct key_blocks {
    attention_sequence s;
    int64_t chunk, hkv, first, end;
    attention_span blocks; /* of the whole chunk */
    mt *k, *kt, *v;        /* [SUPER][BLOCK][d] and so on, as are */
    float *dk, *dv;
    bool begun[SUPER][BLOCK / STRIP];
#if defined(COT_MATMUL_SPLIT)
    pending_products pending;
#endif
} key_blocks;

/* A block of queries at all these key blocks: its operands and its dq are fetched once for all of them. */
static void differentiate_queries(const context *c, key_blocks *g, const scores *a, int64_t q_block, bool last,
                                  strip_buffers *x)
{
    const attention_problem *p = c->p;
    const attention_axis queries = {p, false, BLOCK};
    const int64_t q_at = ((attention_first_slot(&queries, g->s.b) + q_block) * p->sizes.H + a->h) * BLOCK;
    const attention_span seen = blocks_seen(p, &g->s, q_block);
    float *dq = c->dq + (g->chunk * c->w.q_slots * p->sizes.H * BLOCK + q_at) * c->w.d;
    mt_ahead forms = {NULL, NULL}, dq_ahead = {NULL, NULL};
    if (!last) {
        forms.at = (const char *)query_forms_at(c, q_at / BLOCK + p->sizes.H).qt;
        forms.end = forms.at + c->w.record * (int64_t)sizeof(mt);
        dq_ahead.at = (const char *)(dq + p->sizes.H * BLOCK * c->w.d);
        dq_ahead.end = dq_ahead.at + BLOCK * c->w.d * (int64_t)sizeof(float);
    }
    const attention_span blocks = {g->first > seen.first ? g->first : seen.first,
                                   g->end < seen.end ? g->end : seen.end};
    if (blocks.first >= blocks.end)
        return;
    bool begun[BLOCK / STRIP];
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        begun[i] = blocks.first > g->blocks.first && blocks.first > seen.first;
    for (int64_t block = blocks.first; block < blocks.end; block++) {
        const int64_t k_at = (block - g->first) * BLOCK;
        const pair_of_blocks pair = {
            .first_key = block * BLOCK,
            .first_query = q_block * BLOCK,
            .q = query_forms_at(c, q_at / BLOCK),
            .k = g->k + k_at * c->w.d,
            .kt = g->kt + k_at * c->w.d,
            .v = g->v + k_at * c->w.dv,
            .lse = c->lse + q_at,
            .D = c->D + q_at,
            .dq = dq,
            .dk = g->dk + k_at * c->w.d,
            .dv = g->dv + k_at * c->w.dv,
            .dq_begun = begun,
            .begun = g->begun[block - g->first],
            .forms_ahead = &forms,
            .dq_ahead = &dq_ahead,
        };
#if defined(COT_MATMUL_SPLIT)
        if (!a->extras) {
            for (int64_t top = 0; top < BLOCK; top += TALL)
                differentiate_beside(c, a, &pair, x, &g->pending, top);
            continue;
        }
#endif
        differentiate_blocks(c, a, &pair, x);
    }
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        if (!begun[i])
            memset(dq + mt_at(c->w.d, 0, i * STRIP), 0, (size_t)c->w.d * STRIP * sizeof *dq);
}

static void differentiate_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_sizes *z = &p->sizes;
    const int64_t group = z->H / z->Hkv, b = item / c->w.chunks / z->Hkv;
    key_blocks g = {.s = attention_sequence_at(p, b), .chunk = item % c->w.chunks, .hkv = item / c->w.chunks % z->Hkv};
    g.blocks = attention_chunk(g.chunk, c->w.chunks, attention_blocks_of(g.s.k_rows, BLOCK));
    g.k = c->keys + item * c->w.keys;
    g.kt = g.k + SUPER * BLOCK * c->w.d;
    g.v = g.kt + SUPER * BLOCK * c->w.d;
    g.dk = c->dk + item * SUPER * BLOCK * (c->w.d + c->w.dv);
    g.dv = g.dk + SUPER * BLOCK * c->w.d;
    strip_buffers x;
    mt_state host;
    x.turn = 0;
    mt_begin(&host);
    for (g.first = g.blocks.first; g.first < g.blocks.end; g.first = g.end) {
        g.end = g.first + SUPER < g.blocks.end ? g.first + SUPER : g.blocks.end;
        memset(g.begun, 0, sizeof g.begun);
        for (int64_t block = g.first; block < g.end; block++) {
            const int64_t at = (block - g.first) * BLOCK;
            pack_keys(c, &g.s, g.hkv, block * BLOCK, BLOCK, g.k + at * c->w.d, g.kt + at * c->w.d, g.v + at * c->w.dv);
        }
        const attention_span rows = attention_queries_of_rows(z, &g.s, g.first * BLOCK, g.end * BLOCK);
        for (int64_t h = g.hkv * group; h < (g.hkv + 1) * group; h++) {
            const scores a = scores_of(p, &g.s, h);
            for (int64_t q_block = rows.first / BLOCK; q_block * BLOCK < rows.end; q_block++)
                differentiate_queries(c, &g, &a, q_block, (q_block + 1) * BLOCK >= rows.end, &x);
        }
#if defined(COT_MATMUL_SPLIT)
        finish_pending(&g.pending);
#endif
        for (int64_t block = g.first; block < g.end; block++)
            store_keys(c, &g.s, g.hkv, block, g.dk + (block - g.first) * BLOCK * c->w.d,
                       g.dv + (block - g.first) * BLOCK * c->w.dv, g.begun[block - g.first]);
    }
    mt_end(&host);
}

/* ---- dq --------------------------------------------------------------------------------------------------------- */

static void store_queries_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_axis axis = {p, false, BLOCK};
    const int64_t h = item % p->sizes.H, d = c->w.d;
    const attention_block block = attention_block_at(&axis, item / p->sizes.H);
    if (block.rows == 0)
        return;
    const attention_span seen = blocks_seen(p, &block.s, block.first / BLOCK);
    const int64_t blocks = attention_blocks_of(block.s.k_rows, BLOCK);
    _Alignas(64) float x[STRIP * ATTENTION_MAX_D];
    for (int64_t r = 0; r < block.rows; r += STRIP) {
        memset(x, 0, sizeof x);
        for (int64_t chunk = 0; chunk < c->w.chunks; chunk++) {
            const attention_span own = attention_chunk(chunk, c->w.chunks, blocks);
            if (own.first >= seen.end || own.end <= seen.first || own.first == own.end)
                continue;
            const float *dq = c->dq + (chunk * c->w.q_slots * p->sizes.H + item) * BLOCK * d;
            for (int64_t n = 0; n < d; n += VW) {
                for (int64_t i = 0; i < STRIP; i += VW) {
                    vf v[VW];
                    for (int64_t k = 0; k < VW; k++)
                        v[k] = v_load(dq + cell(d, n + k, r + i));
                    mt_transpose(v);
                    for (int64_t k = 0; k < VW; k++) {
                        float *to = x + cell(STRIP, i + k, n);
                        v_store(to, v_add(v_load(to), v[k]));
                    }
                }
            }
        }
        store_rows(&p->dq, block.s.b, block.s.q_row + block.first + r, h, attention_clamp(block.rows - r, 0, STRIP),
                   p->sizes.d, x, STRIP, NULL, (float)p->sizes.scale, p->accumulate);
    }
}

/* ---- dbias --------------------------------------------------------------------------------------------------------
 * An element of dbias may be that of many heads, sequences, queries or keys, which other items differentiate. So it has
 * a pass of its own, two products and the exponentials once more: an item is a tile of dbias and sums all that its
 * elements stand for, in double, in the order of sequences and heads. */

/* k and v of TALL keys. */
typedef struct key_strip {
    _Alignas(64) mt k[TALL * ATTENTION_MAX_D], v[TALL * ATTENTION_MAX_D];
} key_strip;

/* dS^T of TALL keys from j on at a block of queries is added to sums[TALL][BLOCK]. */
static void sum_strip(const context *c, const scores *a, const key_strip *keys, strip_buffers *x, double *sums,
                      int64_t j, int64_t q_block)
{
    const attention_problem *p = c->p;
    const attention_axis queries = {p, false, BLOCK};
    const int64_t d = c->w.d, dv = c->w.dv, first = q_block * BLOCK;
    const attention_span strips =
        attention_strips(attention_queries_of_rows(&p->sizes, &a->s, j, j + TALL), first, BLOCK);
    const int64_t n = strips.end - strips.first;
    if (n == 0)
        return;
    const int64_t q_at = (attention_first_slot(&queries, a->s.b) + q_block) * p->sizes.H + a->h;
    const int64_t tile_at = mt_at(TALL, 0, strips.first);
    const query_forms q = query_forms_at(c, q_at);
    const float *lse = c->lse + q_at * BLOCK, *D = c->D + q_at * BLOCK;
    mt_product_whole(TALL, n, d, keys->k, TALL, q.qt + mt_at(d, 0, strips.first), d, x->s + tile_at, TALL, false, NULL);
    mt_product_whole(TALL, n, dv, keys->v, TALL, q.dot + mt_at(dv, 0, strips.first), dv, x->dp + tile_at, TALL, false,
                     NULL);
    const score_tile tile = {first, j, true, TALL, strips};
    const strip_options o = {.unit = v_set1(scores_unit(p)), .masked = true, .drop = a->dropout.dropped > 0};
    scores_modify(a, &tile, x->s, NULL);
    if (o.drop)
        scores_keep(a, &tile, x->keep);
    for (int64_t r = 0; r < TALL; r++)
        for (int64_t i = strips.first; i < strips.end; i += VW) {
            const int64_t at = cell(TALL, r, i);
            float values[VW];
            vf prob, ds;
            differentiate_scores(a, x, at, j + r, first + i, o, v_load(lse + i), v_load(D + i), v_load(x->dp + at),
                                 &prob, &ds);
            v_store(values, ds);
            for (int64_t lane = 0; lane < VW; lane++)
                sums[r * BLOCK + i + lane] += (double)values[lane];
        }
}

/* Blocks or strips of `all` that tile `tile` of an axis of dbias stands for: all of them where the axis has one element. */
static attention_span tile_span(int64_t size, int64_t tile, int64_t all, int64_t each)
{
    return size == 1 ? (attention_span){0, attention_blocks_of(all, each)} : (attention_span){tile, tile + 1};
}

/* The keys of a row of sums together where the axis has one element, likewise the queries. */
static void store_tile(const cot_tensor *dbias, const int64_t at[4], const double *sums, bool accumulate)
{
    const bool one_query = dbias->shape[2] == 1, one_key = dbias->shape[3] == 1;
    const int64_t rows = one_key ? 1 : attention_clamp(dbias->shape[3] - at[3], 0, TALL);
    const int64_t columns = one_query ? 1 : attention_clamp(dbias->shape[2] - at[2], 0, BLOCK);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i++) {
            const int64_t to = attention_bias_at(dbias, at[0], at[1], at[2] + i, at[3] + r);
            double sum = accumulate ? cot_load_f64(dbias->data, dbias->dtype, to) : 0;
            for (int64_t m = r; m < (one_key ? TALL : r + 1); m++)
                for (int64_t n = i; n < (one_query ? BLOCK : i + 1); n++)
                    sum += sums[m * BLOCK + n];
            cot_store_f64(dbias->data, dbias->dtype, to, sum);
        }
}

static void dbias_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_sizes *z = &p->sizes;
    const int64_t *shape = p->dbias.shape;
    const int64_t q_tiles = attention_blocks_of(shape[2], BLOCK), k_tiles = attention_blocks_of(shape[3], TALL);
    const int64_t q_tile = item / k_tiles % q_tiles, k_tile = item % k_tiles;
    const int64_t at[4] = {item / k_tiles / q_tiles / shape[1], item / k_tiles / q_tiles % shape[1], q_tile * BLOCK,
                           k_tile * TALL};
    const attention_span batch = tile_span(shape[0], at[0], z->B, 1), heads = tile_span(shape[1], at[1], z->H, 1);
    _Alignas(64) double sums[TALL * BLOCK] = {0};
    strip_buffers x;
    key_strip keys;
    mt_state host;
    mt_begin(&host);
    for (int64_t b = batch.first; b < batch.end; b++) {
        const attention_sequence s = attention_sequence_at(p, b);
        const attention_span blocks = tile_span(shape[2], q_tile, s.Tq, BLOCK),
                             strips = tile_span(shape[3], k_tile, s.Tk, TALL);
        for (int64_t h = heads.first; h < heads.end; h++) {
            const scores a = scores_of(p, &s, h);
            for (int64_t strip = strips.first; strip < strips.end; strip++) {
                pack_keys(c, &s, h / (z->H / z->Hkv), strip * TALL, TALL, keys.k, NULL, keys.v);
                for (int64_t q_block = blocks.first; q_block < blocks.end; q_block++)
                    sum_strip(c, &a, &keys, &x, sums, strip * TALL, q_block);
            }
        }
    }
    mt_end(&host);
    store_tile(&p->dbias, at, sums, p->accumulate);
}

/* ---- dsink: summed in double, from the lse and D that are packed ------------------------------------------------ */

static void dsink_item(void *memory, int64_t h)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const float sink = (float)cot_load_f64(p->sink.data, p->sink.dtype, h * p->sink.stride[0]);
    const int64_t at = h * p->dsink.stride[0];
    double sum = p->accumulate ? cot_load_f64(p->dsink.data, p->dsink.dtype, at) : 0;
    const attention_axis axis = {p, false, BLOCK};
    for (int64_t slot = 0; slot < c->w.q_slots; slot++) {
        const attention_block block = attention_block_at(&axis, slot);
        const int64_t row = (slot * p->sizes.H + h) * BLOCK;
        for (int64_t i = 0; i < block.used; i++)
            sum -= (double)(expf(sink - (float)(c->lse[row + i] / lse_unit(p))) * c->D[row + i]);
    }
    cot_store_f64(p->dsink.data, p->dsink.dtype, at, sum);
}

cot_status V_NAME(attention_bwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const attention_sizes *z = &c.p->sizes;
    const attention_bwd_layout w = c.w = attention_bwd_layout_of(z, sizeof(mt));
    char *base = workspace;
    c.queries = (mt *)(base + w.queries);
    c.keys = (mt *)(base + w.k);
    c.lse = (float *)(base + w.lse), c.D = (float *)(base + w.D);
    c.dq = (float *)(base + w.dq), c.dk = (float *)(base + w.dk);
    cot_parallel(queue, w.q_slots * z->H, pack_queries_item, &c);
    cot_parallel(queue, attention_sequence_count(c.p) * z->Hkv * w.chunks, differentiate_item, &c);
    if (cot_present(&c.p->dq))
        cot_parallel(queue, w.q_slots * z->H, store_queries_item, &c);
    if (cot_present(&c.p->dsink))
        cot_parallel(queue, z->H, dsink_item, &c);
    if (cot_present(&c.p->dbias)) {
        const int64_t *shape = c.p->dbias.shape;
        cot_parallel(queue,
                     shape[0] * shape[1] * attention_blocks_of(shape[2], BLOCK) * attention_blocks_of(shape[3], TALL),
                     dbias_item, &c);
    }
    return COT_OK;
}
