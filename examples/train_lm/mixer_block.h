/* SPDX-License-Identifier: Apache-2.0
 *
 * mixer_block.h: the block that mixes tokens with a causal convolution or with attention. x [rows,width], E = inner,
 * rows = batch*time:
 *
 *     n      = rmsnorm(x) * gain
 *     [u|g]  = n w_in^T                   w_in [2E,width]
 *     c      = silu(conv(u))              depthwise, causal along time: weight [E,kernel], bias [E]
 *     x_next = x + drop((c * g) w_out^T)  w_out [width,E]; no x with no_residual; drop only in training
 *
 * With attention, the queries have H heads of E/H channels, and keys and values have G heads (H/G heads of q share one of
 * k):
 *
 *     [q|k|v] = n w_in^T                  w_in [2E,width]: E rows for q, E G/H each for k and v
 *     o       = attention(R q, R k, v)    causal; R rotates each head by its token's position (RoPE, layers.h)
 *     x_next  = x + drop(o w_out^T)
 *
 * An MLP block mixes no tokens. Its E is its own:
 *
 *     [a|g]  = n w_in^T                   w_in [2E,width]
 *     x_next = x + drop((silu(a) * g) w_out^T)
 *
 * With gpt2, attention and the MLP are those of GPT-2: n = LayerNorm(x), a bias after each product, no RoPE, and
 *
 *     a      = n w_in^T + bias            w_in [E,width]
 *     x_next = x + drop(gelu(a) w_out^T + bias)
 */
#ifndef TRAIN_LM_MIXER_BLOCK_H
#define TRAIN_LM_MIXER_BLOCK_H

#include "norm.h"

typedef struct block_sizes {
    int64_t width, inner, kernel;
    bool no_residual;
    bool attention;          /* instead of the convolution */
    bool mlp;                /* instead of either */
    bool gpt2;               /* attention or the MLP of GPT-2 */
    int64_t heads, kv_heads; /* of attention; 0: 4 and 2, or fewer if 4 does not divide the channels */
} block_sizes;

typedef struct mixer_block {
    norm_layer norm;
    parameter *w_in, *w_out;
    parameter *bias_in, *bias_out;      /* [mixed], [width]; NULL without gpt2 */
    parameter *conv_weight, *conv_bias; /* NULL without a convolution */
} mixer_block;

enum { MIXER_BLOCK_PARAMETERS = 6 };

/* The dropout of one block in one step. The mask depends only on seed and offset, so there is no state to store. The
 * backward draws it again, and so does a resumed run. backend.step_offset is added to the offset. */
typedef struct block_dropout {
    double p; /* 0: none */
    uint64_t seed, offset;
} block_dropout;

/* Results of the forward that the backward reads. */
typedef struct mixer_block_saved {
    block_dropout drop; /* set by the caller of the forward */
    void *x;            /* [rows,width] the block's input */
    norm_saved norm;
    void *normed;    /* [rows,width] n */
    void *mixed;     /* [rows,mixed] each row is u, then g; or R q, R k, v; or with gpt2 a */
    void *mixer_out; /* [rows,E] c, or o */
    void *gated;     /* [rows,E] c * g, or gelu(a) */
    void *lse;       /* [batch,heads,time] only with attention */
} mixer_block_saved;

/* Scratch memory of the backward. All blocks can share it. */
typedef struct mixer_block_scratch {
    void *dnormed;          /* [rows,width] */
    void *dmixed;           /* [rows,mixed] */
    void *dinner;           /* [rows,E] */
    void *sums;             /* backend_operations.scratch_bytes bytes, for the widest sums over rows */
    void *unused_gradients; /* [E,K] and [E], of a convolution whose gradients another rank keeps; else NULL */
} mixer_block_scratch;

/* The number of query heads, and of channels in a row of mixed. */
int64_t mixer_block_query_heads(block_sizes sizes);
int64_t mixer_block_mixed_width(block_sizes sizes);

/* Adds the parameters of block `index` to the table, and initialises them once they have memory. w_out is initially
 * smaller by 1/sqrt(2*layers), so that the magnitude of the residual stream hardly depends on the depth. */
void mixer_block_register(mixer_block *block, parameter_table *table, block_sizes sizes, int64_t index);
void mixer_block_initialise(mixer_block *block, block_sizes sizes, int64_t layers, uint64_t seed);

bool mixer_block_saved_allocate(mixer_block_saved *saved, block_sizes sizes, backend *b, int64_t rows);
void mixer_block_saved_free(mixer_block_saved *saved, backend *b);

/* Allocates all members but x, each for the largest of `count` blocks. mixer_block_saved_share: allocates x, and takes the
 * other members from `shared`. Then free only x. */
bool mixer_block_shared_allocate(mixer_block_saved *shared, const block_sizes *sizes, int64_t count, backend *b,
                                 int64_t rows);
bool mixer_block_saved_share(mixer_block_saved *saved, const mixer_block_saved *shared, block_sizes sizes, backend *b,
                             int64_t rows);

/* inner, mixed, kernel: the largest of all blocks. */
bool mixer_block_scratch_allocate(mixer_block_scratch *scratch, backend *b, int64_t rows, int64_t width, int64_t inner,
                                  int64_t mixed, int64_t kernel);
void mixer_block_scratch_free(mixer_block_scratch *scratch, backend *b);

/* Computes x_next from saved->x, and sets the other members of saved. */
cot_status mixer_block_forward(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, int64_t time,
                               mixer_block_saved *saved, void *x_next);

/* Sets the members of saved again, from saved->x, for the backward. */
cot_status mixer_block_recompute(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, int64_t time,
                                 mixer_block_saved *saved);

/* Replaces dx, the gradient of x_next, by the gradient of x. Sets the parameters' gradients. */
cot_status mixer_block_backward(const mixer_block *block, block_sizes sizes, backend *b, int64_t batch, int64_t time,
                                const mixer_block_saved *saved, const mixer_block_scratch *scratch, void *dx);

/* The size of a block's state in decoding one sequence, in elements. The state holds the convolution's last inputs
 * [E,kernel-1], or the rotated keys and the values of up to max_tokens tokens. */
int64_t mixer_block_state_size(block_sizes sizes, int64_t max_tokens);

/* Computes x_next from saved->x for one new token, and updates `state`. There were past_tokens tokens before. Attention
 * attends to the last max_tokens - 1 of them and the new one. */
cot_status mixer_block_step(const mixer_block *block, block_sizes sizes, backend *b, int64_t max_tokens,
                            int64_t past_tokens, void *state, mixer_block_saved *saved, void *x_next);

#endif
