/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/causal_conv1d.h: depthwise causal convolution along time, with bias, SiLU, states and packing.
 *
 * Symbols: B batch, D channels, T time, K width (any K >= 1), N sequences or state rows. With
 * xe = [initial_state, x] along time (zeros where there is no state) and sigma(z) = 1 / (1 + exp(-z)):
 *
 *     z[t] = bias + sum_k weight[k] * xe[t+k]          weight[K-1] meets x[t], weight[0] the oldest input
 *     y[t] = z[t]   or, with COT_ACTIVATION_SILU,   z[t] * sigma(z[t])
 *     final_state = the last K-1 columns of xe         raw inputs, not outputs
 *
 * Layout: every tensor may have any strides. [B,D,T] names the order of the indices, so a channel-last
 * [B,T,D] array is the same op on a view with shape {B,D,T} and strides {T*D, 1, D}. Fast kernels need time or
 * channels contiguous in x, y, dy and dx alike; anything else runs through the scalar kernel.
 *
 * Dtypes: f32, f16, bf16, chosen for x, weight, bias and each state independently; sums are float32 and every
 * output is rounded once. y, dy and dx have x's dtype. f64 (CPU): all of them f64, sums too.
 *
 * Packed sequences, by one of two arguments:
 *   seq_idx    i32 [B,T]: a tap at t' counts for t only if seq_idx[b,t'] == seq_idx[b,t]. A negative value marks
 *              padding: y = 0 there, and no gradient passes. The columns of initial_state belong to sequence
 *              seq_idx[b,0] (to none if that is negative); a column of final_state is its raw input if that
 *              belongs to the last token's sequence, else 0.
 *   cu_seqlens i32 [N+1], needs B = 1: sequence n is t in [cu_seqlens[n], cu_seqlens[n+1]); states are [N,D,K-1].
 *              Starts at 0, never descends, ends at most at T; tokens beyond its end are padding.
 *
 * Sizes may be 0 (B, D, T, N; an empty sequence hands its initial state through to final_state).
 * Outputs may not overlap each other or any input.
 *
 * NaN and infinities follow the formulas; SiLU of -inf is 0 or NaN. They stay within their channel and their sequence, and
 * those of padding never show. Kernels may multiply by a 0 in place of a term that the formulas leave out: a NaN or an
 * infinity may make NaN of y and dx up to 7 tokens away, of its channel's dweight and dbias, and, in a weight, of all
 * results of its channel.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor missing, activation,
 * seq_idx together with cu_seqlens), COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT (misaligned data,
 * output with repeated elements, overlap), COT_INVALID_DATA (cu_seqlens, cache_seqlens, conv_state_indices),
 * COT_UNSUPPORTED (a forced kernel refuses), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY.
 */
#ifndef COTANGENT_CAUSAL_CONV1D_H
#define COTANGENT_CAUSAL_CONV1D_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Arguments of the forward. */
typedef struct cot_causal_conv1d_forward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    cot_tensor x;              /* [B,D,T] */
    cot_tensor weight;         /* [D,K] */
    cot_tensor bias;           /* [D], optional */
    cot_tensor initial_state;  /* [B,D,K-1], with cu_seqlens [N,D,K-1]; optional */
    cot_tensor seq_idx;        /* i32 [B,T], optional */
    cot_tensor cu_seqlens;     /* i32 [N+1], optional */
    cot_tensor y;              /* out [B,D,T], x's dtype */
    cot_tensor final_state;    /* out, like initial_state, any of the float dtypes; optional */
    void *workspace;           /* NULL = the queue's pool; else 64-byte aligned, workspace_bytes of it */
    size_t workspace_bytes;
} cot_causal_conv1d_forward_args;

/* y and final_state from x. */
COT_API cot_status cot_causal_conv1d_forward(cot_queue *queue, const cot_causal_conv1d_forward_args *args);

/* Writes the bytes of workspace that this call would need; checks the arguments as the call itself does, but for
 * the data pointers, the overlaps and the index data. */
COT_API cot_status cot_causal_conv1d_forward_workspace(cot_queue *queue, const cot_causal_conv1d_forward_args *args,
                                                       size_t *bytes);

/* With g[t] = dy[t], or dy[t] * sigma(z) * (1 + z * (1 - sigma(z))) for SiLU (z is computed again):
 *
 *     dx[t]     = sum_j weight[K-1-j] * g[t+j] over t+j < T,   plus dfinal_state[t-T+K-1] where t >= T-K+1
 *     dweight[k] = sum_{b,t} g[t] * xe[t+k]                    dbias = sum_{b,t} g[t]
 *     dinitial_state[i] = sum_{k<=i} weight[k] * g[i-k] over i-k < T,   plus dfinal_state[i-T] where i >= T
 *
 * within each sequence, and g = 0 at padding. */
typedef struct cot_causal_conv1d_backward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    int32_t accumulate;        /* 0: dweight =, dbias =;  1: dweight +=, dbias += */
    cot_tensor x;              /* [B,D,T] */
    cot_tensor weight;         /* [D,K] */
    cot_tensor bias;           /* [D]: needed for SiLU if the forward had one; else ignored */
    cot_tensor initial_state;  /* as in the forward */
    cot_tensor seq_idx;        /* as in the forward */
    cot_tensor cu_seqlens;     /* as in the forward */
    cot_tensor dy;             /* [B,D,T], x's dtype */
    cot_tensor dfinal_state;   /* like final_state; optional (absent = zero) */
    cot_tensor dx;             /* out [B,D,T], x's dtype; optional */
    cot_tensor dweight;        /* out [D,K], any of the float dtypes; optional */
    cot_tensor dbias;          /* out [D], any of the float dtypes; optional */
    cot_tensor dinitial_state; /* out, like initial_state; optional; allowed without one (a state of zeros) */
    void *workspace;
    size_t workspace_bytes;
} cot_causal_conv1d_backward_args;

/* dx, dweight, dbias and dinitial_state from x and dy, in one pass over the data. */
COT_API cot_status cot_causal_conv1d_backward(cot_queue *queue, const cot_causal_conv1d_backward_args *args);
/* As cot_causal_conv1d_forward_workspace. */
COT_API cot_status cot_causal_conv1d_backward_workspace(cot_queue *queue, const cot_causal_conv1d_backward_args *args,
                                                        size_t *bytes);

/* One or more steps of decoding: T new tokens per row, the last inputs kept in conv_state, in place.
 *
 * S >= K-1 columns of state. Without cache_seqlens the state holds the latest S inputs, oldest first:
 * y comes from [conv_state, x], and conv_state becomes the last S columns of that. With cache_seqlens the state is
 * a ring: the input of position p lies in column p mod S; row b's new tokens are positions cache_seqlens[b] + t,
 * and its history is what the ring holds of positions before (columns never written should be 0, as positions
 * before the start).
 * conv_state_indices[b] picks the row of conv_state (b itself when absent; then N >= B); a negative index writes
 * y = 0 and leaves the state alone. Two rows of the batch may not pick the same state row. */
typedef struct cot_causal_conv1d_update_args {
    size_t struct_size;
    cot_activation activation;     /* NONE or SILU */
    cot_tensor x;                  /* [B,D] or [B,D,T] */
    cot_tensor weight;             /* [D,K] */
    cot_tensor bias;               /* [D], optional */
    cot_tensor conv_state;         /* in and out [N,D,S] */
    cot_tensor cache_seqlens;      /* i32 [B], >= 0, optional */
    cot_tensor conv_state_indices; /* i32 [B], optional */
    cot_tensor y;                  /* out, shape and dtype of x */
    void *workspace;
    size_t workspace_bytes;
} cot_causal_conv1d_update_args;

/* y from x and conv_state, and conv_state brought up to date. Errors besides those above: COT_INVALID_DATA for an
 * index >= N, for one that two rows share, and for a negative cache_seqlens. */
COT_API cot_status cot_causal_conv1d_update(cot_queue *queue, const cot_causal_conv1d_update_args *args);
/* As cot_causal_conv1d_forward_workspace. */
COT_API cot_status cot_causal_conv1d_update_workspace(cot_queue *queue, const cot_causal_conv1d_update_args *args,
                                                      size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
