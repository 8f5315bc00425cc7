/* SPDX-License-Identifier: Apache-2.0
 *
 * model.h: the model: embedding, blocks, a final norm, a linear head. Its loss, gradients and decoding. */
#ifndef TRAIN_LM_MODEL_H
#define TRAIN_LM_MODEL_H

#include "mixer_block.h"
#include "hyper_connection.h"
#include "stem.h"

typedef struct model_config {
    int64_t vocabulary, width, inner, layers, kernel;
    int64_t streams;         /* of hyper-connections; 0 = one plain residual stream */
    int64_t attention;       /* every attention-th block has attention instead of the convolution; 0 = none */
    int64_t dense;           /* width of the stem's dense convolution; 0 = no stem */
    int64_t context;         /* tokens that attention reads in decoding, including the new one */
    int64_t mlp;             /* inner channels of the MLP block that follows each block; 0 = no MLP blocks */
    int64_t heads, kv_heads; /* of attention; 0: the rule of mixer_block.h */
    bool gpt2;               /* GPT-2: the blocks of mixer_block.h, learned positions, the embedding is the head too */
} model_config;

typedef struct model {
    model_config config;
    parameter_table parameters;
    parameter *embedding;     /* [vocabulary,width] */
    parameter *positions;     /* [context,width] learned; NULL without gpt2 */
    stem stem;                /* between the embedding and the first block */
    int64_t block_count;      /* layers, twice that with MLP blocks */
    mixer_block *blocks;      /* [block_count] */
    hyper_connection *hypers; /* [block_count], around the blocks; NULL without streams */
    norm_layer norm;          /* in front of the head */
    parameter *head;          /* [vocabulary,width]; with gpt2 the embedding */
} model;

/* The dropout of one training step. Steps count from 1. Each step and each block has its own mask. */
typedef struct model_dropout {
    double p;
    uint64_t seed, step;
} model_dropout;

/* Memory for passes over up to `rows` tokens, of the backend b. Members that only the backward uses are NULL without
 * `backward`. */
typedef struct model_pass {
    backend *b;
    int64_t rows, blocks_allocated, logit_rows;
    model_dropout dropout; /* set before a forward; all zero = none */
    mixer_block_saved *blocks;
    bool recompute;           /* `blocks` share the members of `shared`, which are those of the last block that ran */
    mixer_block_saved shared; /* zero without recompute */
    mixer_block_scratch scratch;
    hyper_saved *hypers; /* [block_count]; this and the next three members are NULL or zero without streams */
    hyper_scratch hyper_scratch;
    void *streams;  /* [rows,streams,width] after the last block */
    void *dstreams; /* [rows,streams,width] its gradient */
    void *embedded; /* [rows,width] before the stem; NULL without a stem */
    void *x;        /* [rows,width] after the last block: with streams their sum */
    norm_saved norm;
    void *normed;   /* [rows,width] */
    void *logits;   /* [logit_rows,vocabulary]: a chunk of rows at a time */
    void *row_loss; /* [rows], f64 */
    void *dx;       /* [rows,width] */
    void *embedding_scratch;
} model_pass;

/* The state of decoding one sequence, one token at a time. */
typedef struct model_decoder {
    model_pass pass;
    int64_t tokens;     /* fed so far; with gpt2 at most the context */
    int64_t state_size; /* elements of one block's state */
    void *states;       /* [block_count,state_size] */
    void *stem_state;   /* [stem_state_size] */
} model_decoder;

/* Creates a model with initial parameters. False if there is no memory. Call model_destroy in both cases. */
bool model_create(model *m, model_config config, uint64_t seed);
void model_destroy(model *m);

/* The number of query heads of attention. */
int64_t model_heads(const model *m);

bool model_pass_create(model_pass *pass, const model *m, backend *b, int64_t rows, bool backward);
void model_pass_destroy(model_pass *pass);

/* Computes pass->normed, the input of the head, from inputs [batch,time]. */
cot_status model_forward(const model *m, model_pass *pass, int64_t batch, int64_t time, const void *inputs);

/* After a forward: the backend's loss is the mean loss of the targets. pass->logits are those of the last chunk of rows. */
cot_status model_loss(const model *m, model_pass *pass, int64_t rows, const void *targets);

/* After a forward: adds to the backend's loss the sum of the losses of the targets / mean_rows, and computes its gradients
 * for all parameters. */
cot_status model_backward(const model *m, model_pass *pass, int64_t batch, int64_t time, int64_t mean_rows,
                          const void *inputs, const void *targets);

/* Decoding is for a CPU backend. */
bool model_decoder_create(model_decoder *decoder, const model *m, backend *b);
void model_decoder_destroy(model_decoder *decoder);

/* Feeds one token. Then decoder->pass.logits are the logits of the next token. With gpt2, there are positions for
 * `context` tokens: feed no more, or restart the decoder. */
cot_status model_decoder_step(const model *m, model_decoder *decoder, int32_t token);

/* Forgets all tokens. */
void model_decoder_restart(const model *m, model_decoder *decoder);

#endif
