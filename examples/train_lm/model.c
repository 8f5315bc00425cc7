/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include "layers.h"
#include "matrix.h"

#include <stdlib.h>

enum { OUTER_PARAMETERS = 3 + STEM_PARAMETERS }; /* embedding, final gain, head */

/* The sizes of block i. */
static block_sizes block_sizes_of(const model *m, int64_t i)
{
    return (block_sizes){.width = m->config.width,
                         .inner = m->config.inner,
                         .kernel = m->config.kernel,
                         .no_residual = m->config.streams > 0,
                         .attention = m->config.attention > 0 && (i + 1) % m->config.attention == 0};
}

/* The sizes of the block that needs the most memory: a block with attention, if there is one. */
static block_sizes largest_sizes(const model *m)
{
    return block_sizes_of(
        m, m->config.attention > 0 && m->config.attention <= m->config.layers ? m->config.attention - 1 : 0);
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
    parameter_randomise(m->embedding, seed, 1);
    if (m->config.dense > 0)
        stem_initialise(&m->stem, seed);
    for (int64_t i = 0; i < m->config.layers; i++)
        mixer_block_initialise(&m->blocks[i], block_sizes_of(m, i), m->config.layers, seed);
    for (int64_t i = 0; m->hypers != NULL && i < m->config.layers; i++)
        hyper_initialise(&m->hypers[i], hyper_sizes_of(m), seed);
    parameter_fill(m->gain, 1);
    parameter_fill(m->head, 0); /* the first prediction is uniform */
}

bool model_create(model *m, model_config config, uint64_t seed)
{
    *m = (model){.config = config, .blocks = calloc((size_t)config.layers, sizeof(mixer_block))};
    parameter_table *table = &m->parameters;
    if (config.streams > 0)
        m->hypers = calloc((size_t)config.layers, sizeof *m->hypers);
    const int parameters_per_block = MIXER_BLOCK_PARAMETERS + (config.streams > 0 ? HYPER_CONNECTION_PARAMETERS : 0);
    if (m->blocks == NULL || (config.streams > 0 && m->hypers == NULL) ||
        !parameter_table_create(table, (int)config.layers * parameters_per_block + OUTER_PARAMETERS))
        return false;
    m->embedding = parameter_add(table, "embedding.weight", config.vocabulary, config.width, false);
    if (config.dense > 0)
        stem_register(&m->stem, table, config.width, config.dense);
    for (int64_t i = 0; i < config.layers; i++)
        mixer_block_register(&m->blocks[i], table, block_sizes_of(m, i), i);
    for (int64_t i = 0; m->hypers != NULL && i < config.layers; i++)
        hyper_register(&m->hypers[i], table, hyper_sizes_of(m), i);
    m->gain = parameter_add(table, "norm.gain", config.width, 0, false);
    m->head = parameter_add(table, "head.weight", config.vocabulary, config.width, true);
    if (!parameter_table_allocate(table))
        return false;
    initialise(m, seed);
    return true;
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
    pass->hypers = calloc((size_t)m->config.layers, sizeof *pass->hypers);
    pass->streams = real_allocate(pass->rows * m->config.streams * m->config.width);
    bool complete = pass->hypers != NULL && pass->streams != NULL;
    for (int64_t i = 0; complete && i < pass->layers; i++)
        complete = hyper_saved_allocate(&pass->hypers[i], hyper_sizes_of(m), pass->rows);
    return complete;
}

static bool allocate_backward(model_pass *pass, const model *m)
{
    pass->dx = real_allocate(pass->rows * m->config.width);
    pass->order = calloc((size_t)pass->rows, sizeof *pass->order);
    if (m->hypers != NULL) {
        pass->dstreams = real_allocate(pass->rows * m->config.streams * m->config.width);
        if (pass->dstreams == NULL || !hyper_scratch_allocate(&pass->hyper_scratch, hyper_sizes_of(m), pass->rows))
            return false;
    }
    return mixer_block_scratch_allocate(&pass->scratch, largest_sizes(m), pass->rows) && pass->dx != NULL &&
           pass->order != NULL;
}

bool model_pass_create(model_pass *pass, const model *m, int64_t rows, bool backward)
{
    *pass = (model_pass){
        .rows = rows,
        .layers = m->config.layers,
        .blocks = calloc((size_t)m->config.layers, sizeof(mixer_block_saved)),
        .x = real_allocate(rows * m->config.width),
        .embedded = m->config.dense > 0 ? real_allocate(rows * m->config.width) : NULL,
        .inv_rms = real_allocate(rows),
        .normed = real_allocate(rows * m->config.width),
        .logits = real_allocate(rows * m->config.vocabulary),
        .row_loss = calloc((size_t)rows, sizeof(double)),
    };
    bool complete = pass->blocks != NULL && (m->config.dense == 0 || pass->embedded != NULL) && pass->x != NULL &&
                    pass->inv_rms != NULL && pass->normed != NULL && pass->logits != NULL && pass->row_loss != NULL;
    for (int64_t i = 0; complete && i < pass->layers; i++)
        complete = mixer_block_saved_allocate(&pass->blocks[i], block_sizes_of(m, i), rows);
    if (complete && m->hypers != NULL)
        complete = allocate_streams(pass, m);
    return complete && (!backward || allocate_backward(pass, m));
}

void model_pass_destroy(model_pass *pass)
{
    for (int64_t i = 0; pass->blocks != NULL && i < pass->layers; i++)
        mixer_block_saved_free(&pass->blocks[i]);
    free(pass->blocks);
    for (int64_t i = 0; pass->hypers != NULL && i < pass->layers; i++)
        hyper_saved_free(&pass->hypers[i]);
    free(pass->hypers);
    hyper_scratch_free(&pass->hyper_scratch);
    free(pass->streams);
    free(pass->dstreams);
    mixer_block_scratch_free(&pass->scratch);
    free(pass->embedded);
    free(pass->x);
    free(pass->inv_rms);
    free(pass->normed);
    free(pass->logits);
    free(pass->dx);
    free(pass->row_loss);
    free(pass->order);
    *pass = (model_pass){0};
}

/* ---- forward and backward ----------------------------------------------------------------------------- */

/* The input of block i. With i == layers: the output of the last block. */
static real *block_input(const model *m, model_pass *pass, int64_t i)
{
    return i < m->config.layers ? pass->blocks[i].x : pass->x;
}

static real *block_streams(const model *m, model_pass *pass, int64_t i)
{
    return i < m->config.layers ? pass->hypers[i].x : pass->streams;
}

/* Computes the input of block 0 for a batch, or with a decoder for one new token. */
static cot_status embed(const model *m, model_pass *pass, cot_queue *queue, int64_t batch, int64_t time,
                        const uint8_t *inputs, const model_decoder *decoder)
{
    const int64_t rows = batch * time;
    real *x = m->hypers != NULL ? pass->x : block_input(m, pass, 0);
    cot_status status = COT_OK;
    embedding_forward(rows, m->config.width, inputs, m->embedding->value, m->config.dense > 0 ? pass->embedded : x);
    if (m->config.dense > 0 && decoder == NULL)
        status = stem_forward(&m->stem, queue, batch, time, pass->embedded, x);
    else if (m->config.dense > 0)
        status = stem_step(&m->stem, queue, decoder->stem_state, pass->embedded, x);
    if (m->hypers != NULL)
        hyper_spread(hyper_sizes_of(m), rows, x, block_streams(m, pass, 0));
    return status;
}

/* With hyper-connections: computes the input of block i from the streams, or from the block before. */
static cot_status connect(const model *m, model_pass *pass, cot_queue *queue, int64_t rows, int64_t i)
{
    hyper_saved *hyper = &pass->hypers[i];
    if (i == 0)
        return hyper_pre(&m->hypers[i], hyper_sizes_of(m), queue, rows, hyper, pass->blocks[i].x);
    return hyper_seam(&m->hypers[i], hyper_sizes_of(m), queue, rows, &pass->hypers[i - 1], hyper, pass->blocks[i].x);
}

/* Runs block i on a batch, or with a decoder on one new token. */
static cot_status run_block(const model *m, model_pass *pass, cot_queue *queue, int64_t batch, int64_t time, int64_t i,
                            const model_decoder *decoder)
{
    const int64_t rows = batch * time;
    hyper_saved *hyper = m->hypers != NULL ? &pass->hypers[i] : NULL;
    real *next = hyper != NULL ? hyper->f : block_input(m, pass, i + 1);
    cot_status status = COT_OK;
    if (hyper != NULL)
        status = connect(m, pass, queue, rows, i);
    if (status == COT_OK && decoder == NULL)
        status = mixer_block_forward(&m->blocks[i], block_sizes_of(m, i), queue, batch, time, &pass->blocks[i], next);
    else if (status == COT_OK)
        status = mixer_block_step(&m->blocks[i], block_sizes_of(m, i), queue, m->config.context, decoder->tokens,
                                  decoder->states + i * decoder->state_size, &pass->blocks[i], next);
    if (hyper != NULL && i + 1 == m->config.layers && status == COT_OK)
        status = hyper_post(hyper_sizes_of(m), queue, rows, hyper, pass->streams);
    return status;
}

static block_dropout block_dropout_of(const model *m, const model_pass *pass, int64_t i)
{
    const model_dropout *d = &pass->dropout;
    return (block_dropout){d->p, d->seed, d->step * (uint64_t)m->config.layers + (uint64_t)i};
}

static void predict(const model *m, model_pass *pass, int64_t rows)
{
    if (m->hypers != NULL)
        hyper_collect(hyper_sizes_of(m), rows, pass->streams, pass->x);
    rmsnorm_forward(rows, m->config.width, pass->x, m->gain->value, pass->normed, pass->inv_rms);
    linear_forward(head_shape(m, rows), pass->normed, m->head->value, pass->logits, MATRIX_SET);
}

cot_status model_forward(const model *m, model_pass *pass, cot_queue *queue, int64_t batch, int64_t time,
                         const uint8_t *inputs)
{
    cot_status status = embed(m, pass, queue, batch, time, inputs, NULL);
    for (int64_t i = 0; i < m->config.layers && status == COT_OK; i++) {
        pass->blocks[i].drop = block_dropout_of(m, pass, i);
        status = run_block(m, pass, queue, batch, time, i, NULL);
    }
    if (status != COT_OK)
        return status;
    predict(m, pass, batch * time);
    return COT_OK;
}

double model_loss(const model *m, model_pass *pass, int64_t rows, const uint8_t *targets)
{
    return cross_entropy(rows, m->config.vocabulary, targets, pass->logits, pass->row_loss, false);
}

/* Replaces the gradient of the block's output, in pass->dx, by that of its input. */
static cot_status run_block_backward(const model *m, model_pass *pass, cot_queue *queue, int64_t batch, int64_t time,
                                     int64_t i)
{
    return mixer_block_backward(&m->blocks[i], block_sizes_of(m, i), queue, batch, time, &pass->blocks[i],
                                &pass->scratch, pass->dx);
}

/* The same with hyper-connections. The gradient of the block's output is gradients->df. The last block computes it from
 * pass->dstreams, and the first block replaces pass->dstreams by the gradient of its streams. */
static cot_status run_connected_block_backward(const model *m, model_pass *pass, cot_queue *queue, int64_t batch,
                                               int64_t time, int64_t i)
{
    const int64_t rows = batch * time;
    const hyper_sizes sizes = hyper_sizes_of(m);
    const hyper_gradients *gradients = &pass->hyper_scratch.gradients[i % 2],
                          *before = &pass->hyper_scratch.gradients[(i + 1) % 2];
    cot_status status = COT_OK;
    if (i + 1 == m->config.layers)
        status = hyper_post_backward(sizes, queue, rows, &pass->hypers[i], gradients, pass->dstreams);
    if (status == COT_OK)
        status = mixer_block_backward(&m->blocks[i], block_sizes_of(m, i), queue, batch, time, &pass->blocks[i],
                                      &pass->scratch, gradients->df);
    if (status == COT_OK && i > 0)
        status = hyper_seam_backward(&m->hypers[i], sizes, queue, rows, &pass->hypers[i - 1], &pass->hypers[i],
                                     gradients, before);
    else if (status == COT_OK)
        status = hyper_pre_backward(&m->hypers[i], sizes, queue, rows, &pass->hypers[i], gradients, pass->dstreams);
    return status;
}

cot_status model_backward(const model *m, model_pass *pass, cot_queue *queue, int64_t batch, int64_t time,
                          const uint8_t *inputs, const uint8_t *targets, double *loss)
{
    const int64_t rows = batch * time, width = m->config.width;
    real *dlogits = pass->logits, *dnormed = pass->scratch.dnormed;
    *loss = cross_entropy(rows, m->config.vocabulary, targets, dlogits, pass->row_loss, true);
    linear_backward(head_shape(m, rows), pass->normed, m->head->value, dlogits, dnormed, m->head->gradient);
    memset(pass->dx, 0, (size_t)(rows * width) * sizeof(real));
    rmsnorm_backward(rows, width, pass->x, m->gain->value, pass->inv_rms, dnormed, pass->scratch.partial, pass->dx,
                     m->gain->gradient);
    if (m->hypers != NULL)
        hyper_spread(hyper_sizes_of(m), rows, pass->dx, pass->dstreams);
    cot_status status = COT_OK;
    for (int64_t i = m->config.layers - 1; i >= 0 && status == COT_OK; i--)
        status = m->hypers != NULL ? run_connected_block_backward(m, pass, queue, batch, time, i)
                                   : run_block_backward(m, pass, queue, batch, time, i);
    if (status == COT_OK && m->hypers != NULL)
        hyper_collect(hyper_sizes_of(m), rows, pass->dstreams, pass->dx);
    if (status == COT_OK && m->config.dense > 0)
        status = stem_backward(&m->stem, queue, batch, time, pass->embedded, pass->dx, dnormed);
    if (status != COT_OK)
        return status;
    embedding_backward(rows, width, m->config.vocabulary, inputs, pass->dx, pass->order, m->embedding->gradient);
    return COT_OK;
}

/* ---- decoding ----------------------------------------------------------------------------------------- */

bool model_decoder_create(model_decoder *decoder, const model *m)
{
    *decoder = (model_decoder){0};
    for (int64_t i = 0; i < m->config.layers; i++) {
        const int64_t size = mixer_block_state_size(block_sizes_of(m, i), m->config.context);
        decoder->state_size = size > decoder->state_size ? size : decoder->state_size;
    }
    decoder->states = real_allocate(m->config.layers * decoder->state_size);
    decoder->stem_state = real_allocate(stem_state_size(&m->stem));
    return decoder->states != NULL && decoder->stem_state != NULL && model_pass_create(&decoder->pass, m, 1, false);
}

void model_decoder_destroy(model_decoder *decoder)
{
    model_pass_destroy(&decoder->pass);
    free(decoder->states);
    free(decoder->stem_state);
    *decoder = (model_decoder){0};
}

cot_status model_decoder_step(const model *m, model_decoder *decoder, cot_queue *queue, uint8_t byte)
{
    model_pass *pass = &decoder->pass;
    cot_status status = embed(m, pass, queue, 1, 1, &byte, decoder);
    for (int64_t i = 0; i < m->config.layers && status == COT_OK; i++)
        status = run_block(m, pass, queue, 1, 1, i, decoder);
    if (status != COT_OK)
        return status;
    decoder->tokens++;
    predict(m, pass, 1);
    return COT_OK;
}
