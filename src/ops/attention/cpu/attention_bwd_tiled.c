/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_tiled.c: dq, dk and dv in blocks, on the products of simd/matmul.h. Scores are formed transposed, keys
 * in rows and queries in lanes, so that P^T and dS^T lie as the products for dv and dk want them:
 *
 *     S^T = K Q^T;  dP^T = V dout^T;  P^T = exp(scale S^T - lse);  dS^T = P^T (dP^T - D)
 *     dv += P^T dout;  dk += dS^T q;  dq^T += K^T dS^T
 *
 * Passes: (1) every block of queries and of keys is packed once, in all forms that the five products read, with lse and
 * D beside the queries; (2) an item is one chunk of the key blocks of one sequence and key-value head: a few key
 * blocks at a time, it walks the query blocks that see them, keeps their dk and dv, and adds to the chunk's own dq^T; (3) dq is the sum
 * over the chunks, in their order. How many chunks there are follows from the shape alone. */
#include "attention_scores.h"

cot_status V_NAME(attention_bwd_tiled)(cot_queue *, const void *, void *);

typedef struct context {
    const attention_problem *p;
    attention_bwd_layout w;
    mt *qt, *q, *dot, *dout, *k, *kt, *v;
    float *lse, *D, *dq, *dk;
} context;

/* ---- packing -------------------------------------------------------------------------------------------- */

static void pack_keys_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_axis axis = {p, true, BLOCK};
    const int64_t hkv = item % p->sizes.Hkv, at = item * BLOCK;
    const attention_block block = attention_block_at(&axis, item / p->sizes.Hkv);
    _Alignas(64) float x[STRIP * ATTENTION_MAX_D];
    for (int64_t r = 0; block.rows > 0 && r < BLOCK; r += STRIP) {
        const int64_t rows = attention_clamp(block.used - r, 0, STRIP), row = block.s.k_row + block.first + r;
        load_rows(x, c->w.d, &p->k, block.s.b, row, hkv, rows, p->sizes.d);
        pack_a(c->k + at * c->w.d, r, x, c->w.d);
        pack_transposed(c->kt + at * c->w.d, false, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->v, block.s.b, row, hkv, rows, p->sizes.dv);
        pack_a(c->v + at * c->w.dv, r, x, c->w.dv);
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

/* lse and D of STRIP queries. One that passes no gradient gets lse = inf, which makes its P zero. */
static void pack_statistics(const attention_problem *p, const attention_block *block, int64_t h, int64_t r, float *lse,
                            float *D)
{
    for (int64_t i = 0; i < STRIP; i++) {
        const int64_t row = block->s.q_row + block->first + r + i;
        lse[i] = INFINITY;
        if (r + i < block->used) {
            const float given = ((const float *)p->lse.data)[attention_lse_at(&p->lse, block->s.b, h, row)];
            lse[i] = given > -INFINITY ? given : INFINITY;
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
    _Alignas(64) float x[STRIP * ATTENTION_MAX_D], out[STRIP * ATTENTION_MAX_D];
    for (int64_t r = 0; block.rows > 0 && r < BLOCK; r += STRIP) {
        const int64_t rows = attention_clamp(block.used - r, 0, STRIP), row = block.s.q_row + block.first + r;
        load_rows(x, c->w.d, &p->q, block.s.b, row, h, rows, p->sizes.d);
        pack_transposed(c->qt + at * c->w.d, true, r, x, c->w.d);
        pack_b(c->q + at * c->w.d, r, x, c->w.d);
        load_rows(x, c->w.dv, &p->dout, block.s.b, row, h, rows, p->sizes.dv);
        pack_transposed(c->dot + at * c->w.dv, true, r, x, c->w.dv);
        pack_b(c->dout + at * c->w.dv, r, x, c->w.dv);
        if (!cot_present(&p->delta)) {
            load_rows(out, c->w.dv, &p->out, block.s.b, row, h, rows, p->sizes.dv);
            sum_products(c->D + at + r, x, out, c->w.dv);
        }
        pack_statistics(p, &block, h, r, c->lse + at + r, c->D + at + r);
    }
}

/* ---- a block of keys and a block of queries --------------------------------------------------------------------- */

/* One strip of keys at a block of queries: S^T and dP^T become P^T and dS^T. dS^T is wanted in two forms; the B form
 * has the strips of the whole block of keys. */
typedef struct strip_buffers {
    _Alignas(64) float s[TALL * BLOCK], dp[TALL * BLOCK];
    _Alignas(64) mt prob[TALL * BLOCK], ds[TALL * BLOCK];
    _Alignas(64) mt ds_b[BLOCK * BLOCK];
    _Alignas(64) float caps[TALL * BLOCK], keep[TALL * BLOCK]; /* of softcap and dropout */
} strip_buffers;

/* What is constant in a strip. The last three at compile time, so that what is not there costs nothing. */
typedef struct strip_options {
    vf scale;
    bool masked, cap, drop;
} strip_options;

/* P^T (times what dropout makes of it) and dZ^T of key j and VW queries from i on; `at` is their place in the tile. */
V_INLINE void differentiate_scores(const scores *a, const strip_buffers *x, int64_t at, int64_t j, int64_t i,
                                   strip_options o, vf lse, vf D, vf *prob, vf *ds)
{
    vf y = v_fma(v_load(x->s + at), o.scale, v_sub(v_zero(), lse)), dp = v_load(x->dp + at);
    if (o.masked) {
        const attention_span seen = scores_queries(a, j);
        y = v_add(y, border(seen.first - i, seen.end - i));
    }
    *prob = v_exp_flush(y);
    if (o.drop)
        dp = v_mul(dp, v_load(x->keep + at));
    *ds = v_mul(*prob, v_sub(dp, D));
    if (o.drop)
        *prob = v_mul(*prob, v_load(x->keep + at));
    if (o.cap)
        *ds = v_mul(*ds, v_load(x->caps + at));
}

/* Keys j .. j+TALL, queries first + [strips); lse and D are those of query `first` on. Two keys and 2 VW queries at a
 * time, which is what the stores want. */
V_INLINE void differentiate_strip(const scores *a, strip_buffers *x, int64_t strip, int64_t j, int64_t first,
                                  attention_span strips, const float *lse, const float *D, strip_options o)
{
    for (int64_t i = strips.first; i < strips.end; i += 2 * VW) {
        for (int64_t r = 0; r < TALL; r += 2) {
            vf prob[2][2], ds[2][2];
            V_UNROLL
            for (int64_t n = 0; n < 2; n++) {
                V_UNROLL
                for (int64_t m = 0; m < 2; m++)
                    differentiate_scores(a, x, (r + n) * BLOCK + i + m * VW, j + r + n, first + i + m * VW, o,
                                         v_load(lse + i + m * VW), v_load(D + i + m * VW), &prob[n][m], &ds[n][m]);
                mt_store_a2(x->prob + (r + n) * BLOCK + i, prob[n][0], prob[n][1]);
                mt_store_a2(x->ds + (r + n) * BLOCK + i, ds[n][0], ds[n][1]);
            }
            mt_store_b(x->ds_b, BLOCK, strip * TALL + r, i, ds[0][0], ds[1][0]);
            mt_store_b(x->ds_b, BLOCK, strip * TALL + r, i + VW, ds[0][1], ds[1][1]);
        }
    }
}

/* Does every key of the strip see every query of first + [strips)? */
static bool all_seen(const scores *a, int64_t j, int64_t first, attention_span strips)
{
    const attention_span top = scores_queries(a, j), bottom = scores_queries(a, j + TALL - 1);
    return bottom.first <= first + strips.first && top.end >= first + strips.end && bottom.first < bottom.end;
}

/* The operands of one block of keys and one of queries. */
typedef struct pair_of_blocks {
    int64_t first_key, first_query;
    const mt *qt, *q, *dot, *dout, *k, *kt, *v;
    const float *lse, *D;
    float *dq; /* [d][BLOCK] */
    float *dk, *dv;
    bool dq_begun;
    bool *begun; /* of each strip of dk and dv */
} pair_of_blocks;

static void differentiate_blocks(const context *c, const scores *a, const pair_of_blocks *b, strip_buffers *x)
{
    const attention_problem *p = c->p;
    const int64_t d = c->w.d, dv = c->w.dv;
    attention_span keys[BLOCK / STRIP]; /* of each strip of queries: the strips of keys that it saw */
    for (int64_t n = 0; n < BLOCK / STRIP; n++)
        keys[n] = (attention_span){BLOCK, 0};
    for (int64_t strip = 0; strip < BLOCK / TALL; strip++) {
        const int64_t j = b->first_key + strip * TALL;
        const attention_span strips =
            attention_strips(attention_queries_of_rows(&p->sizes, &a->s, j, j + TALL), b->first_query, BLOCK);
        const int64_t n = strips.end - strips.first;
        if (n == 0)
            continue;
        mt_product(TALL, n, d, b->k + strip * TALL * d, d, b->qt + mt_b(d, 0, strips.first), d, x->s + strips.first,
                   BLOCK, false);
        mt_product(TALL, n, dv, b->v + strip * TALL * dv, dv, b->dot + mt_b(dv, 0, strips.first), dv,
                   x->dp + strips.first, BLOCK, false);
        strip_options o = {.scale = v_set1((float)p->sizes.scale), .masked = true};
        if (a->extras) {
            const score_tile tile = {b->first_query, j, true, strips};
            scores_modify(a, &tile, x->s, x->caps);
            if (a->dropout.dropped > 0)
                scores_keep(a, &tile, x->keep);
            o.scale = v_set1(1);
            o.cap = p->sizes.softcap > 0;
            o.drop = a->dropout.dropped > 0;
            differentiate_strip(a, x, strip, j, b->first_query, strips, b->lse, b->D, o);
        } else if (all_seen(a, j, b->first_query, strips)) {
            o.masked = false;
            differentiate_strip(a, x, strip, j, b->first_query, strips, b->lse, b->D, o);
        } else {
            differentiate_strip(a, x, strip, j, b->first_query, strips, b->lse, b->D, o);
        }
        mt_product(TALL, dv, n, x->prob + strips.first, BLOCK, b->dout + mt_b(BLOCK, strips.first, 0), BLOCK,
                   b->dv + strip * TALL * dv, dv, b->begun[strip]);
        mt_product(TALL, d, n, x->ds + strips.first, BLOCK, b->q + mt_b(BLOCK, strips.first, 0), BLOCK,
                   b->dk + strip * TALL * d, d, b->begun[strip]);
        b->begun[strip] = true;
        for (int64_t i = strips.first / STRIP; i < strips.end / STRIP; i++) {
            keys[i].first = keys[i].first < strip * TALL ? keys[i].first : strip * TALL;
            keys[i].end = (strip + 1) * TALL;
        }
    }
    for (int64_t i = 0; i < BLOCK / STRIP; i++) {
        const int64_t n = keys[i].end - keys[i].first;
        if (n > 0)
            mt_product(d, STRIP, n, b->kt + keys[i].first, BLOCK, x->ds_b + mt_b(BLOCK, keys[i].first, i * STRIP),
                       BLOCK, b->dq + i * STRIP, BLOCK, b->dq_begun);
        else if (!b->dq_begun)
            for (int64_t row = 0; row < d; row++)
                memset(b->dq + row * BLOCK + i * STRIP, 0, STRIP * sizeof(float));
    }
}

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
    for (int64_t strip = 0; strip < BLOCK / TALL; strip++) {
        if (begun[strip])
            continue;
        memset(dk + strip * TALL * c->w.d, 0, (size_t)(TALL * c->w.d) * sizeof(float));
        memset(dv + strip * TALL * c->w.dv, 0, (size_t)(TALL * c->w.dv) * sizeof(float));
    }
    if (cot_present(&p->dk))
        store_rows(&p->dk, s->b, row, hkv, rows, p->sizes.d, dk, c->w.d, NULL, (float)p->sizes.scale, p->accumulate);
    if (cot_present(&p->dv))
        store_rows(&p->dv, s->b, row, hkv, rows, p->sizes.dv, dv, c->w.dv, NULL, 1, p->accumulate);
}

/* What an item works on: up to SUPER key blocks from `first` on, of one sequence and key-value head. */
typedef struct key_blocks {
    attention_sequence s;
    int64_t chunk, hkv, first, end;
    attention_span blocks; /* of the whole chunk */
    float *dk, *dv;        /* [SUPER][BLOCK][d], [SUPER][BLOCK][dv] */
    bool begun[ATTENTION_SUPER][BLOCK / TALL];
} key_blocks;

/* A block of queries at all these key blocks: its operands and its dq are fetched once for all of them. */
static void differentiate_queries(const context *c, key_blocks *g, const scores *a, int64_t q_block, strip_buffers *x)
{
    const attention_problem *p = c->p;
    const attention_axis queries = {p, false, BLOCK}, keys = {p, true, BLOCK};
    const int64_t q_at = ((attention_first_slot(&queries, g->s.b) + q_block) * p->sizes.H + a->h) * BLOCK;
    const attention_span seen = blocks_seen(p, &g->s, q_block);
    for (int64_t block = g->first > seen.first ? g->first : seen.first; block < g->end && block < seen.end; block++) {
        const int64_t k_at = ((attention_first_slot(&keys, g->s.b) + block) * p->sizes.Hkv + g->hkv) * BLOCK;
        const pair_of_blocks pair = {
            .first_key = block * BLOCK,
            .first_query = q_block * BLOCK,
            .qt = c->qt + q_at * c->w.d,
            .q = c->q + q_at * c->w.d,
            .dot = c->dot + q_at * c->w.dv,
            .dout = c->dout + q_at * c->w.dv,
            .k = c->k + k_at * c->w.d,
            .kt = c->kt + k_at * c->w.d,
            .v = c->v + k_at * c->w.dv,
            .lse = c->lse + q_at,
            .D = c->D + q_at,
            .dq = c->dq + (g->chunk * c->w.q_slots * p->sizes.H * BLOCK + q_at) * c->w.d,
            .dk = g->dk + (block - g->first) * BLOCK * c->w.d,
            .dv = g->dv + (block - g->first) * BLOCK * c->w.dv,
            .dq_begun = block > g->blocks.first && block > seen.first,
            .begun = g->begun[block - g->first],
        };
        differentiate_blocks(c, a, &pair, x);
    }
}

static void differentiate_item(void *memory, int64_t item)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_sizes *z = &p->sizes;
    const int64_t group = z->H / z->Hkv, b = item / c->w.chunks / z->Hkv;
    key_blocks g = {.s = attention_sequence_at(p, b), .chunk = item % c->w.chunks, .hkv = item / c->w.chunks % z->Hkv};
    g.blocks = attention_chunk(g.chunk, c->w.chunks, attention_blocks_of(g.s.k_rows, BLOCK));
    g.dk = c->dk + item * ATTENTION_SUPER * BLOCK * (c->w.d + c->w.dv);
    g.dv = g.dk + ATTENTION_SUPER * BLOCK * c->w.d;
    strip_buffers x;
    mt_state host;
    mt_begin(&host);
    for (g.first = g.blocks.first; g.first < g.blocks.end; g.first = g.end) {
        g.end = g.first + ATTENTION_SUPER < g.blocks.end ? g.first + ATTENTION_SUPER : g.blocks.end;
        memset(g.begun, 0, sizeof g.begun);
        const attention_span rows = attention_queries_of_rows(z, &g.s, g.first * BLOCK, g.end * BLOCK);
        for (int64_t h = g.hkv * group; h < (g.hkv + 1) * group; h++) {
            const scores a = scores_of(p, &g.s, h);
            for (int64_t q_block = rows.first / BLOCK; q_block * BLOCK < rows.end; q_block++)
                differentiate_queries(c, &g, &a, q_block, &x);
        }
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
                        v[k] = v_load(dq + (n + k) * BLOCK + r + i);
                    mt_transpose(v);
                    for (int64_t k = 0; k < VW; k++) {
                        float *to = x + (i + k) * d + n;
                        v_store(to, v_add(v_load(to), v[k]));
                    }
                }
            }
        }
        store_rows(&p->dq, block.s.b, block.s.q_row + block.first + r, h, attention_clamp(block.rows - r, 0, STRIP),
                   p->sizes.d, x, d, NULL, (float)p->sizes.scale, p->accumulate);
    }
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
            sum -= (double)(expf(sink - c->lse[row + i]) * c->D[row + i]);
    }
    cot_store_f64(p->dsink.data, p->dsink.dtype, at, sum);
}

cot_status V_NAME(attention_bwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const attention_sizes *z = &c.p->sizes;
    const attention_bwd_layout w = c.w = attention_bwd_layout_of(z, sizeof(mt));
    char *base = workspace;
    c.qt = (mt *)(base + w.qt), c.q = (mt *)(base + w.q);
    c.dot = (mt *)(base + w.dot), c.dout = (mt *)(base + w.dout);
    c.k = (mt *)(base + w.k), c.kt = (mt *)(base + w.kt), c.v = (mt *)(base + w.v);
    c.lse = (float *)(base + w.lse), c.D = (float *)(base + w.D);
    c.dq = (float *)(base + w.dq), c.dk = (float *)(base + w.dk);
    cot_parallel(queue, w.k_slots * z->Hkv, pack_keys_item, &c);
    cot_parallel(queue, w.q_slots * z->H, pack_queries_item, &c);
    cot_parallel(queue, attention_sequence_count(c.p) * z->Hkv * w.chunks, differentiate_item, &c);
    if (cot_present(&c.p->dq))
        cot_parallel(queue, w.q_slots * z->H, store_queries_item, &c);
    if (cot_present(&c.p->dsink))
        cot_parallel(queue, z->H, dsink_item, &c);
    return COT_OK;
}
