/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <stdlib.h>

enum { OUTER_PARAMETERS = 5 + STEM_PARAMETERS }; /* embedding, positions, final norm, head */

static const double GPT2_DEVIATION = 0.02; /* of GPT-2's initial embeddings */

/* The sizes of block i. With MLP blocks, the odd ones are these. */
static block_sizes block_sizes_of(const model *m, int64_t i)
{
    const model_config *c = &m->config;
    const bool mlp = c->mlp > 0 && i % 2 == 1;
    const int64_t layer = c->mlp > 0 ? i / 2 : i;
    return (block_sizes){.width = c->width,
                         .inner = mlp ? c->mlp : c->inner,
                         .kernel = c->kernel,
                         .no_residual = c->streams > 0,
                         .attention = !mlp && c->attention > 0 && (layer + 1) % c->attention == 0,
                         .mlp = mlp,
                         .gpt2 = c->gpt2,
                         .heads = c->heads,
                         .kv_heads = c->kv_heads};
}

static hyper_sizes hyper_sizes_of(const model *m)
{
    return (hyper_sizes){.streams = m->config.streams, .width = m->config.width};
}

static linear_shape head_shape(const model *m, int64_t rows)
{
    return (linear_shape){.rows = rows, .in = m->config.width, .out = m->config.vocabulary};
}

/* ---- creation ----------------------------------------------------------------------------------------- */

static void initialise(model *m, uint64_t seed)
{
    parameter_randomise(m->embedding, seed, m->config.gpt2 ? GPT2_DEVIATION : 1);
    if (m->config.gpt2) {
        parameter_randomise(m->positions, seed, GPT2_DEVIATION);
        parameter_fill(m->norm.bias, 0);
    }
    if (m->config.dense > 0)
        stem_initialise(&m->stem, seed);
    for (int64_t i = 0; i < m->block_count; i++)
        mixer_block_initialise(&m->blocks[i], block_sizes_of(m, i), m->block_count, seed);
    for (int64_t i = 0; m->hypers != NULL && i < m->block_count; i++)
        hyper_initialise(&m->hypers[i], hyper_sizes_of(m), seed);
    parameter_fill(m->norm.gain, 1);
    if (!m->config.gpt2)
        parameter_fill(m->head, 0); /* the first prediction is uniform */
}

bool model_create(model *m, model_config config, uint64_t seed)
{
    const int64_t blocks = config.mlp > 0 ? 2 * config.layers : config.layers;
    *m = (model){.config = config, .block_count = blocks, .blocks = calloc((size_t)blocks, sizeof(mixer_block))};
    parameter_table *table = &m->parameters;
    if (config.streams > 0)
        m->hypers = calloc((size_t)blocks, sizeof *m->hypers);
    const int parameters_per_block = MIXER_BLOCK_PARAMETERS + (config.streams > 0 ? HYPER_CONNECTION_PARAMETERS : 0);
    if (m->blocks == NULL || (config.streams > 0 && m->hypers == NULL) ||
        !parameter_table_create(table, (int)blocks * parameters_per_block + OUTER_PARAMETERS))
        return false;
    m->embedding = parameter_add(table, "embedding.weight", config.vocabulary, config.width, config.gpt2);
    if (config.gpt2)
        m->positions = parameter_add(table, "positions.weight", config.context, config.width, false);
    if (config.dense > 0)
        stem_register(&m->stem, table, config.width, config.dense);
    for (int64_t i = 0; i < blocks; i++)
        mixer_block_register(&m->blocks[i], table, block_sizes_of(m, i), i);
    for (int64_t i = 0; m->hypers != NULL && i < blocks; i++)
        hyper_register(&m->hypers[i], table, hyper_sizes_of(m), i);
    m->norm.gain = parameter_add(table, "norm.gain", config.width, 0, false);
    if (config.gpt2)
        m->norm.bias = parameter_add(table, "norm.bias", config.width, 0, false);
    m->head = config.gpt2 ? m->embedding : parameter_add(table, "head.weight", config.vocabulary, config.width, true);
    if (!parameter_table_allocate(table))
        return false;
    initialise(m, seed);
    return true;
}

int64_t model_heads(const model *m)
{
    return mixer_block_query_heads(block_sizes_of(m, 0));
}

void model_destroy(model *m)
{
    parameter_table_destroy(&m->parameters);
    free(m->blocks);
    free(m->hypers);
    *m = (model){0};
}

/* Allocates the streams of a forward. */
static bool allocate_streams(model_pass *pass, const model *m)
{
    backend *b = pass->b;
    pass->hypers = calloc((size_t)m->block_count, sizeof *pass->hypers);
    pass->streams = b->op->allocate(b, pass->rows * m->config.streams * m->config.width, b->dtype);
    bool complete = pass->hypers != NULL && pass->streams != NULL;
    for (int64_t i = 0; complete && i < m->block_count; i++)
        complete = hyper_saved_allocate(&pass->hypers[i], hyper_sizes_of(m), b, pass->rows);
    return complete;
}

static bool allocate_backward(model_pass *pass, const model *m)
{
    backend *b = pass->b;
    pass->dx = b->op->allocate(b, pass->rows * m->config.width, b->dtype);
    pass->embedding_scratch = b->op->allocate(b, b->op->scratch_bytes(b, pass->rows, m->config.width), COT_U8);
    if (m->hypers != NULL) {
        pass->dstreams = b->op->allocate(b, pass->rows * m->config.streams * m->config.width, b->dtype);
        if (pass->dstreams == NULL || !hyper_scratch_allocate(&pass->hyper_scratch, hyper_sizes_of(m), b, pass->rows))
            return false;
    }
    int64_t inner = 0, mixed = 0;
    for (int64_t i = 0; i < m->block_count; i++) {
        const block_sizes sizes = block_sizes_of(m, i);
        const int64_t columns = mixer_block_mixed_width(sizes);
        inner = sizes.inner > inner ? sizes.inner : inner;
        mixed = columns > mixed ? columns : mixed;
    }
    return mixer_block_scratch_allocate(&pass->scratch, b, pass->rows, m->config.width, inner, mixed,
                                        m->config.kernel) &&
           pass->dx != NULL && pass->embedding_scratch != NULL;
}

/* Allocates what each block stores for the backward. */
static bool allocate_blocks(model_pass *pass, const model *m)
{
    backend *b = pass->b;
    block_sizes *sizes = calloc((size_t)m->block_count, sizeof *sizes);
    bool complete = sizes != NULL;
    for (int64_t i = 0; complete && i < m->block_count; i++)
        sizes[i] = block_sizes_of(m, i);
    if (complete && pass->recompute)
        complete = mixer_block_shared_allocate(&pass->shared, sizes, m->block_count, b, pass->rows);
    for (int64_t i = 0; complete && i < m->block_count; i++)
        complete = pass->recompute ? mixer_block_saved_share(&pass->blocks[i], &pass->shared, sizes[i], b, pass->rows)
                                   : mixer_block_saved_allocate(&pass->blocks[i], sizes[i], b, pass->rows);
    free(sizes);
    return complete;
}

bool model_pass_create(model_pass *pass, const model *m, backend *b, int64_t rows, bool backward)
{
    const int64_t logit_rows = b->logit_rows > 0 && b->logit_rows < rows ? b->logit_rows : rows;
    *pass = (model_pass){
        .b = b,
        .rows = rows,
        .blocks_allocated = m->block_count,
        .recompute = b->recompute && backward,
        .logit_rows = logit_rows,
        .blocks = calloc((size_t)m->block_count, sizeof(mixer_block_saved)),
        .x = b->op->allocate(b, rows * m->config.width, b->dtype),
        .embedded = m->config.dense > 0 ? b->op->allocate(b, rows * m->config.width, b->dtype) : NULL,
        .norm = {.mean = b->op->allocate(b, m->config.gpt2 ? rows : 1, b->wide),
                 .inv_deviation = b->op->allocate(b, rows, b->wide)},
        .normed = b->op->allocate(b, rows * m->config.width, b->dtype),
        .logits = b->op->allocate(b, logit_rows * m->config.vocabulary, b->dtype),
        .row_loss = b->op->allocate(b, rows, COT_F64),
    };
    bool complete = pass->blocks != NULL && (m->config.dense == 0 || pass->embedded != NULL) && pass->x != NULL &&
                    pass->norm.mean != NULL && pass->norm.inv_deviation != NULL && pass->normed != NULL &&
                    pass->logits != NULL && pass->row_loss != NULL;
    complete = complete && allocate_blocks(pass, m);
    if (complete && m->hypers != NULL)
        complete = allocate_streams(pass, m);
    return complete && (!backward || allocate_backward(pass, m));
}

void model_pass_destroy(model_pass *pass)
{
    backend *b = pass->b;
    if (b == NULL)
        return;
    for (int64_t i = 0; pass->blocks != NULL && i < pass->blocks_allocated; i++)
        if (pass->recompute)
            b->op->release(b, pass->blocks[i].x);
        else
            mixer_block_saved_free(&pass->blocks[i], b);
    mixer_block_saved_free(&pass->shared, b);
    free(pass->blocks);
    for (int64_t i = 0; pass->hypers != NULL && i < pass->blocks_allocated; i++)
        hyper_saved_free(&pass->hypers[i], b);
    free(pass->hypers);
    hyper_scratch_free(&pass->hyper_scratch, b);
    mixer_block_scratch_free(&pass->scratch, b);
    void *const arrays[] = {
        pass->streams,
        pass->dstreams,
        pass->embedded,
        pass->x,
        pass->norm.mean,
        pass->norm.inv_deviation,
        pass->normed,
        pass->logits,
        pass->dx,
        pass->row_loss,
        pass->embedding_scratch,
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        b->op->release(b, arrays[i]);
    *pass = (model_pass){0};
}

/* ---- forward and backward ----------------------------------------------------------------------------- */

/* The input of block i. With i == block_count: the output of the last block. */
static void *block_input(const model *m, model_pass *pass, int64_t i)
{
    return i < m->block_count ? pass->blocks[i].x : pass->x;
}

static void *block_streams(const model *m, model_pass *pass, int64_t i)
{
    return i < m->block_count ? pass->hypers[i].x : pass->streams;
}

/* Computes the input of block 0 for a batch, or with a decoder for one new token. */
static cot_status embed(const model *m, model_pass *pass, int64_t batch, int64_t time, const void *inputs,
                        const model_decoder *decoder)
{
    backend *b = pass->b;
    const int64_t rows = batch * time;
    void *x = m->hypers != NULL ? pass->x : block_input(m, pass, 0);
    cot_status status = COT_OK;
    b->op->embedding_forward(b, rows, m->config.width, inputs, m->embedding->w,
                             m->positions != NULL ? m->positions->w : NULL, time,
                             decoder != NULL ? positions_from(decoder->tokens) : b->context.positions,
                             m->config.dense > 0 ? pass->embedded : x);
    if (m->config.dense > 0 && decoder == NULL)
        status = stem_forward(&m->stem, b, batch, time, pass->embedded, x);
    else if (m->config.dense > 0)
        status = stem_step(&m->stem, b, decoder->stem_state, pass->embedded, x);
    if (m->hypers != NULL)
        hyper_spread(hyper_sizes_of(m), b, rows, x, block_streams(m, pass, 0));
    return status;
}

/* With hyper-connections: computes the input of block i from the streams, or from the block before. */
static cot_status connect(const model *m, model_pass *pass, int64_t rows, int64_t i)
{
    backend *b = pass->b;
    hyper_saved *hyper = &pass->hypers[i];
    if (i == 0)
        return hyper_pre(&m->hypers[i], hyper_sizes_of(m), b, rows, hyper, pass->blocks[i].x);
    return hyper_post_pre(&m->hypers[i], hyper_sizes_of(m), b, rows, &pass->hypers[i - 1], hyper, pass->blocks[i].x);
}

/* Runs block i on a batch, or with a decoder on one new token. */
static cot_status run_block(const model *m, model_pass *pass, int64_t batch, int64_t time, int64_t i,
                            const model_decoder *decoder)
{
    backend *b = pass->b;
    const int64_t rows = batch * time;
    hyper_saved *hyper = m->hypers != NULL ? &pass->hypers[i] : NULL;
    void *next = hyper != NULL ? hyper->f : block_input(m, pass, i + 1);
    cot_status status = COT_OK;
    if (hyper != NULL)
        status = connect(m, pass, rows, i);
    if (status == COT_OK && decoder == NULL)
        status = mixer_block_forward(&m->blocks[i], block_sizes_of(m, i), b, batch, time, &pass->blocks[i], next);
    else if (status == COT_OK)
        status = mixer_block_step(&m->blocks[i], block_sizes_of(m, i), b, m->config.context, decoder->tokens,
                                  backend_at(b, decoder->states, i * decoder->state_size), &pass->blocks[i], next);
    if (hyper != NULL && i + 1 == m->block_count && status == COT_OK)
        status = hyper_post(hyper_sizes_of(m), b, rows, hyper, pass->streams);
    return status;
}

static block_dropout block_dropout_of(const model *m, const model_pass *pass, int64_t i)
{
    const model_dropout *d = &pass->dropout;
    return (block_dropout){d->p, d->seed, d->step * (uint64_t)m->block_count + (uint64_t)i};
}

/* The final norm, whose result the head reads. */
static void normalise(const model *m, model_pass *pass, int64_t rows)
{
    backend *b = pass->b;
    if (m->hypers != NULL)
        hyper_collect(hyper_sizes_of(m), b, rows, pass->streams, pass->x);
    norm_forward(&m->norm, b, rows, m->config.width, pass->x, pass->normed, &pass->norm);
}

cot_status model_forward(const model *m, model_pass *pass, int64_t batch, int64_t time, const void *inputs)
{
    cot_status status = embed(m, pass, batch, time, inputs, NULL);
    for (int64_t i = 0; i < m->block_count && status == COT_OK; i++) {
        pass->blocks[i].drop = block_dropout_of(m, pass, i);
        status = run_block(m, pass, batch, time, i, NULL);
    }
    if (status != COT_OK)
        return status;
    normalise(m, pass, batch * time);
    return pass->b->status;
}

/* The head and the loss, for a chunk of rows at a time. With `gradient`, the logits become their gradient, from which
 * the gradients of the head and of its input follow: no product runs twice. */
static void predict(const model *m, model_pass *pass, int64_t rows, int64_t mean_rows, const void *targets,
                    bool gradient)
{
    backend *b = pass->b;
    const int64_t width = m->config.width;
    for (int64_t first = 0; first < rows; first += pass->logit_rows) {
        const int64_t count = rows - first < pass->logit_rows ? rows - first : pass->logit_rows;
        const linear_shape head = head_shape(m, count);
        const void *normed = backend_at(b, pass->normed, first * width);
        b->op->linear_forward(b, head, normed, m->head->w, NULL, NULL, pass->logits);
        b->op->cross_entropy(b, first, count, mean_rows, m->config.vocabulary, targets, pass->logits, pass->row_loss,
                             gradient);
        if (gradient)
            b->op->linear_backward(b, head, normed, m->head->w, pass->logits,
                                   backend_at(b, pass->scratch.dnormed, first * width), m->head->dw);
    }
}

cot_status model_loss(const model *m, model_pass *pass, int64_t rows, const void *targets)
{
    predict(m, pass, rows, rows, targets, false);
    return pass->b->status;
}

/* Replaces the gradient of the block's output, in pass->dx, by that of its input. */
static cot_status run_block_backward(const model *m, model_pass *pass, int64_t batch, int64_t time, int64_t i)
{
    return mixer_block_backward(&m->blocks[i], block_sizes_of(m, i), pass->b, batch, time, &pass->blocks[i],
                                &pass->scratch, pass->dx);
}

/* The same with hyper-connections. The gradient of the block's output is gradients->df. The last block computes it from
 * pass->dstreams, and the first block replaces pass->dstreams by the gradient of its streams. */
static cot_status run_connected_block_backward(const model *m, model_pass *pass, int64_t batch, int64_t time, int64_t i)
{
    backend *b = pass->b;
    const int64_t rows = batch * time;
    const hyper_sizes sizes = hyper_sizes_of(m);
    const hyper_gradients *gradients = &pass->hyper_scratch.gradients[i % 2],
                          *before = &pass->hyper_scratch.gradients[(i + 1) % 2];
    cot_status status = COT_OK;
    if (i + 1 == m->block_count)
        status = hyper_post_backward(sizes, b, rows, &pass->hypers[i], gradients, pass->dstreams);
    if (status == COT_OK)
        status = mixer_block_backward(&m->blocks[i], block_sizes_of(m, i), b, batch, time, &pass->blocks[i],
                                      &pass->scratch, gradients->df);
    if (status == COT_OK && i > 0)
        status = hyper_post_pre_backward(&m->hypers[i], sizes, b, rows, &pass->hypers[i - 1], &pass->hypers[i],
                                         gradients, before);
    else if (status == COT_OK)
        status = hyper_pre_backward(&m->hypers[i], sizes, b, rows, &pass->hypers[i], gradients, pass->dstreams);
    return status;
}

cot_status model_backward(const model *m, model_pass *pass, int64_t batch, int64_t time, int64_t mean_rows,
                          const void *inputs, const void *targets)
{
    backend *b = pass->b;
    const int64_t rows = batch * time, width = m->config.width;
    void *dnormed = pass->scratch.dnormed;
    predict(m, pass, rows, mean_rows, targets, true);
    b->op->zero(b, rows * width, pass->dx);
    norm_backward(&m->norm, b, rows, width, pass->x, &pass->norm, dnormed, pass->scratch.sums, pass->dx);
    if (m->hypers != NULL)
        hyper_spread(hyper_sizes_of(m), b, rows, pass->dx, pass->dstreams);
    cot_status status = COT_OK;
    for (int64_t i = m->block_count - 1; i >= 0 && status == COT_OK; i--) {
        if (pass->recompute && i + 1 < m->block_count) /* the last block was the last that ran */
            status = mixer_block_recompute(&m->blocks[i], block_sizes_of(m, i), b, batch, time, &pass->blocks[i]);
        if (status == COT_OK)
            status = m->hypers != NULL ? run_connected_block_backward(m, pass, batch, time, i)
                                       : run_block_backward(m, pass, batch, time, i);
    }
    if (status == COT_OK && m->hypers != NULL)
        hyper_collect(hyper_sizes_of(m), b, rows, pass->dstreams, pass->dx);
    if (status == COT_OK && m->config.dense > 0)
        status = stem_backward(&m->stem, b, batch, time, pass->embedded, pass->dx, dnormed);
    if (status != COT_OK)
        return status;
    if (m->positions != NULL)
        b->op->positions_backward(b, rows, time, b->context.positions, width, m->config.context, pass->dx,
                                  m->positions->dw);
    const bool accumulate = b->accumulate;
    b->accumulate = accumulate || m->head == m->embedding; /* `predict` has set the gradient */
    b->op->embedding_backward(b, rows, width, m->config.vocabulary, inputs, pass->dx, pass->embedding_scratch,
                              m->embedding->dw);
    b->accumulate = accumulate;
    return b->status;
}

/* ---- decoding ----------------------------------------------------------------------------------------- */

bool model_decoder_create(model_decoder *decoder, const model *m, backend *b)
{
    *decoder = (model_decoder){.pass = {.b = b}};
    for (int64_t i = 0; i < m->block_count; i++) {
        const int64_t size = mixer_block_state_size(block_sizes_of(m, i), m->config.context);
        decoder->state_size = size > decoder->state_size ? size : decoder->state_size;
    }
    decoder->states = b->op->allocate(b, m->block_count * decoder->state_size, b->dtype);
    decoder->stem_state = b->op->allocate(b, stem_state_size(&m->stem), b->dtype);
    return decoder->states != NULL && decoder->stem_state != NULL && model_pass_create(&decoder->pass, m, b, 1, false);
}

void model_decoder_destroy(model_decoder *decoder)
{
    backend *b = decoder->pass.b;
    model_pass_destroy(&decoder->pass);
    b->op->release(b, decoder->states);
    b->op->release(b, decoder->stem_state);
    *decoder = (model_decoder){0};
}

void model_decoder_restart(const model *m, model_decoder *decoder)
{
    backend *b = decoder->pass.b;
    b->op->zero(b, m->block_count * decoder->state_size, decoder->states);
    b->op->zero(b, stem_state_size(&m->stem), decoder->stem_state);
    decoder->tokens = 0;
}

cot_status model_decoder_step(const model *m, model_decoder *decoder, int32_t token)
{
    model_pass *pass = &decoder->pass;
    backend *b = pass->b;
    if (m->config.gpt2 && decoder->tokens == m->config.context)
        return cot_error_set(COT_INVALID_SHAPE, "decoding: the model has no position for another token");
    cot_status status = embed(m, pass, 1, 1, &token, decoder);
    for (int64_t i = 0; i < m->block_count && status == COT_OK; i++)
        status = run_block(m, pass, 1, 1, i, decoder);
    if (status != COT_OK)
        return status;
    decoder->tokens++;
    normalise(m, pass, 1);
    b->op->linear_forward(b, head_shape(m, 1), pass->normed, m->head->w, NULL, NULL, pass->logits);
    return COT_OK;
}
