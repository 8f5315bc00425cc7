/* SPDX-License-Identifier: Apache-2.0
 *
 * model.h: the model: embedding, blocks, a final RMSNorm, a linear head. Its loss, gradients and decoding. */
#ifndef TRAIN_LM_MODEL_H
#define TRAIN_LM_MODEL_H

#include "mixer_block.h"
#include "hyper_connection.h"
#include "stem.h"

typedef struct model_config {
    int64_t vocabulary, width, inner, layers, kernel;
    int64_t streams;   /* of hyper-connections; 0 = one plain residual stream */
    int64_t attention; /* every attention-th block has attention instead of the convolution; 0 = none */
    int64_t dense;     /* width of the stem's dense convolution; 0 = no stem */
    int64_t context;   /* tokens that attention sees in decoding, including the new one */
} model_config;

typedef struct model {
    model_config config;
    parameter_table parameters;
    parameter *embedding;     /* [vocabulary,width] */
    stem stem;                /* between the embedding and the first block */
    mixer_block *blocks;      /* [layers] */
    hyper_connection *hypers; /* [layers], around the blocks; NULL without streams */
    parameter *gain;          /* [width] of the final norm */
    parameter *head;          /* [vocabulary,width] */
} model;

/* The dropout of one training step. Steps count from 1. Each step and each block has its own mask. */
typedef struct model_dropout {
    double p;
    uint64_t seed, step;
} model_dropout;

/* Memory for passes over up to `rows` tokens. Members that only the backward uses are NULL without `backward`. */
typedef struct model_pass {
    int64_t rows, layers;
    model_dropout dropout; /* set before a forward; all zero = none */
    mixer_block_saved *blocks;
    mixer_block_scratch scratch;
    hyper_saved *hypers; /* [layers]; this and the next three members are NULL or zero without streams */
    hyper_scratch hyper_scratch;
    real *streams;  /* [rows,streams,width] after the last block */
    real *dstreams; /* [rows,streams,width] its gradient */
    real *embedded; /* [rows,width] before the stem; NULL without a stem */
    real *x;        /* [rows,width] after the last block: with streams their sum */
    real *inv_rms;  /* [rows] */
    real *normed;   /* [rows,width] */
    real *logits;   /* [rows,vocabulary] */
    real *dx;       /* [rows,width] */
    double *row_loss;
    int64_t *order;
} model_pass;

/* The state of decoding one sequence, one token at a time. */
typedef struct model_decoder {
    model_pass pass;
    int64_t tokens;     /* fed so far */
    int64_t state_size; /* elements of one block's state */
    real *states;       /* [layers,state_size] */
    real *stem_state;   /* [stem_state_size] */
} model_decoder;

/* Creates a model with initial parameters. False if there is no memory. Call model_destroy in both cases. */
bool model_create(model *m, model_config config, uint64_t seed);
void model_destroy(model *m);

bool model_pass_create(model_pass *pass, const model *m, int64_t rows, bool backward);
void model_pass_destroy(model_pass *pass);

/* Computes pass->logits from inputs [batch,time]. */
cot_status model_forward(const model *m, model_pass *pass, cot_queue *queue, int64_t batch, int64_t time,
                         const uint8_t *inputs);

/* The mean loss of the targets for the logits of the last forward. Does not change the logits. */
double model_loss(const model *m, model_pass *pass, int64_t rows, const uint8_t *targets);

/* After a forward: computes the loss and the gradients of all parameters. Overwrites the logits. */
cot_status model_backward(const model *m, model_pass *pass, cot_queue *queue, int64_t batch, int64_t time,
                          const uint8_t *inputs, const uint8_t *targets, double *loss);

bool model_decoder_create(model_decoder *decoder, const model *m);
void model_decoder_destroy(model_decoder *decoder);

/* Feeds one byte. Then decoder->pass.logits are the logits of the next byte. */
cot_status model_decoder_step(const model *m, model_decoder *decoder, cot_queue *queue, uint8_t byte);

#endif
