/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_tiled.c: dq, dk and dv in blocks, on the products of simd/matmul.h. Scores are formed transposed, keys
 * in rows and queries in lanes, so that P^T and dS^T lie as the products for dv and dk want them:
 *
 *     S^T = K Q^T;  dP^T = V dout^T;  P^T = exp(scale S^T - lse);  dS^T = P^T (dP^T - D)
 *     dv += P^T dout;  dk += dS^T q;  dq^T += K^T dS^T
 *
 * attention_bwd_pairs.h has that for a block of keys and a block of queries, attention_bwd_beside.h, for AMX's products of two
 * and three bf16, with P^T and dS^T beside the products.
 *
 * Passes: (1) every block of queries is packed once, in all forms that the five products read, with lse and D beside it;
 * (2) an item is one chunk of the key blocks of one sequence and key-value head: a few key blocks at a time, it packs
 * them, walks the query blocks that see them, keeps their dk and dv, and adds to the chunk's own dq^T;
 * (3) dq is the sum over the chunks, in their order. How many chunks there are follows from the shape alone. (4) dbias,
 * a tile at a time (attention_bwd_dbias.h), and dsink. */
#include "attention_bwd_dbias.h"
#include "attention_bwd_pairs.h"
#if defined(COT_MATMUL_SPLIT)
#include "attention_bwd_beside.h"
#endif

cot_status V_NAME(attention_bwd_tiled)(cot_queue *, const void *, void *);

/* Blocks of keys that stay in the second-level cache, with their dk and dv, while queries go by. AMX reads more beside
 * them: of four, a backward took a fortieth to a sixth longer, one of d = 256 most. */
enum { SUPER = MT_ONE_FORM ? ATTENTION_SUPER : ATTENTION_SUPER / 2 };

/* ---- one item ------------------------------------------------------------------------------------------------- */

/* The key blocks that a block of queries sees. */
static attention_span blocks_seen(const attention_problem *p, const attention_sequence *s, int64_t query_block)
{
    const attention_span keys = attention_keys_of_rows(&p->sizes, s, query_block * BLOCK, (query_block + 1) * BLOCK);
    if (keys.first >= keys.end)
        return (attention_span){0, 0};
    return (attention_span){keys.first / BLOCK, cot_ceil_div(keys.end, BLOCK)};
}

static void store_keys(const context *c, const attention_sequence *s, int64_t hkv, int64_t block, float *dk, float *dv,
                       const bool *begun)
{
    const attention_problem *p = c->p;
    const int64_t rows = cot_clamp(s->k_rows - block * BLOCK, 0, BLOCK), row = s->k_row + block * BLOCK;
    for (int64_t strip = 0; strip < BLOCK / STRIP; strip++) {
        if (begun[strip])
            continue;
        for (int64_t n = 0; n < c->w.d; n += MT)
            memset(dk + mt_at(BLOCK, strip * STRIP, n), 0, STRIP * MT * sizeof(float));
        for (int64_t n = 0; n < c->w.dv; n += MT)
            memset(dv + mt_at(BLOCK, strip * STRIP, n), 0, STRIP * MT * sizeof(float));
    }
    /* Keys that do not count: their weights are 0, and 0 times a NaN or an infinity of dout or q is NaN. */
    for (int64_t r = cot_clamp(s->Tk - block * BLOCK, 0, rows); r < rows; r++) {
        for (int64_t n = 0; n < c->w.d; n += MT)
            memset(dk + mt_at(BLOCK, r, n), 0, MT * sizeof(float));
        for (int64_t n = 0; n < c->w.dv; n += MT)
            memset(dv + mt_at(BLOCK, r, n), 0, MT * sizeof(float));
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

static void differentiate_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_sizes *z = &p->sizes;
    const int64_t group = z->H / z->Hkv, b = item / c->w.chunks / z->Hkv;
    key_blocks g = {.s = attention_sequence_at(p, b), .chunk = item % c->w.chunks, .hkv = item / c->w.chunks % z->Hkv};
    g.blocks = attention_chunk(g.chunk, c->w.chunks, cot_ceil_div(g.s.k_rows, BLOCK));
    g.k = c->keys + item * c->w.keys;
    g.kt = g.k + SUPER * BLOCK * c->w.d;
    g.v = g.kt + SUPER * BLOCK * c->w.d;
    g.dk = c->dk + item * SUPER * BLOCK * (c->w.d + c->w.dv);
    g.dv = g.dk + SUPER * BLOCK * c->w.d;
    strip_buffers *const x = scratch;
    mt_state host;
    x->turn = 0;
    mt_begin(&host);
    for (g.first = g.blocks.first; g.first < g.blocks.end; g.first = g.end) {
        g.end = g.first + SUPER < g.blocks.end ? g.first + SUPER : g.blocks.end;
        memset(g.begun, 0, sizeof g.begun);
        for (int64_t block = g.first; block < g.end; block++) {
            const int64_t at = (block - g.first) * BLOCK;
            pack_keys(c, &g.s, g.hkv, block * BLOCK, BLOCK, g.k + at * c->w.d, g.kt + at * c->w.d, g.v + at * c->w.dv,
                      x->rows[0]);
        }
        const attention_span rows = attention_queries_of_rows(z, &g.s, g.first * BLOCK, g.end * BLOCK);
        for (int64_t h = g.hkv * group; h < (g.hkv + 1) * group; h++) {
            const scores a = scores_of(p, &g.s, h);
            for (int64_t q_block = rows.first / BLOCK; q_block * BLOCK < rows.end; q_block++)
                differentiate_queries(c, &g, &a, q_block, (q_block + 1) * BLOCK >= rows.end, x);
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

static void store_queries_item(void *memory, int64_t item, void *scratch)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const attention_axis axis = {p, false, BLOCK};
    const int64_t h = item % p->sizes.H, d = c->w.d;
    const attention_block block = attention_block_at(&axis, item / p->sizes.H);
    if (block.rows == 0)
        return;
    const attention_span seen = blocks_seen(p, &block.s, block.first / BLOCK);
    const int64_t blocks = cot_ceil_div(block.s.k_rows, BLOCK);
    float *const x = scratch; /* [STRIP][d] */
    for (int64_t r = 0; r < block.rows; r += STRIP) {
        memset(x, 0, (size_t)(STRIP * d) * sizeof *x);
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
        /* Queries that do not count, likewise: see store_keys. */
        for (int64_t i = cot_clamp(block.used - r, 0, STRIP); i < STRIP; i++)
            for (int64_t n = 0; n < d; n += MT)
                memset(x + mt_at(STRIP, i, n), 0, MT * sizeof(float));
        store_rows(&p->dq, block.s.b, block.s.q_row + block.first + r, h, cot_clamp(block.rows - r, 0, STRIP),
                   p->sizes.d, x, STRIP, NULL, (float)p->sizes.scale, p->accumulate);
    }
}

/* ---- dsink: summed in double, from the lse and D that are packed ------------------------------------------------ */

static void dsink_item(void *memory, int64_t h)
{
    const context *c = memory;
    const attention_problem *p = c->p;
    const double unit = lse_unit(p);
    const float sink = (float)cot_load_f64(p->sink.data, p->sink.dtype, h * p->sink.stride[0]);
    const int64_t at = h * p->dsink.stride[0];
    double sum = p->accumulate ? cot_load_f64(p->dsink.data, p->dsink.dtype, at) : 0;
    const attention_axis axis = {p, false, BLOCK};
    for (int64_t slot = 0; slot < c->w.q_slots; slot++) {
        const attention_block block = attention_block_at(&axis, slot);
        const int64_t row = (slot * p->sizes.H + h) * BLOCK;
        for (int64_t i = 0; i < block.used; i++)
            sum -= (double)(expf(sink - (float)(c->lse[row + i] / unit)) * c->D[row + i]);
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
    cot_parallel_scratch(queue, w.q_slots * z->H, pack_queries_item, &c);
    cot_parallel_scratch(queue, attention_sequence_count(c.p) * z->Hkv * w.chunks, differentiate_item, &c);
    if (cot_present(&c.p->dq))
        cot_parallel_scratch(queue, w.q_slots * z->H, store_queries_item, &c);
    if (cot_present(&c.p->dsink))
        cot_parallel(queue, z->H, dsink_item, &c);
    if (cot_present(&c.p->dbias)) {
        const int64_t *shape = c.p->dbias.shape;
        cot_parallel_scratch(queue, shape[0] * shape[1] * cot_ceil_div(shape[2], BLOCK) * cot_ceil_div(shape[3], TALL),
                             dbias_item, &c);
    }
    return COT_OK;
}
