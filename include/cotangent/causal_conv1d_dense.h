/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/causal_conv1d_dense.h: dense causal convolution along time (every output channel sees every input channel),
 * with bias, SiLU and states. Where each channel sees itself alone, cotangent/causal_conv1d.h is the op.
 *
 * Symbols: B batch, Din and Dout channels, T time, K width (any K >= 1). With xe = [initial_state, x] along time (zeros
 * where there is no state) and sigma(z) = 1 / (1 + exp(-z)):
 *
 *     z[o,t] = bias[o] + sum_k sum_i weight[o,i,k] * xe[i,t+k]      weight[:,:,K-1] meets x[t], weight[:,:,0] the oldest
 *     y[o,t] = z[o,t]   or, with COT_ACTIVATION_SILU,   z[o,t] * sigma(z[o,t])
 *     final_state = the last K-1 columns of xe                      raw inputs, not outputs
 *
 * Layout: every tensor may have any strides. [B,Din,T] names the order of the indices, so a channel-last [B,T,Din]
 * array is the same op on a view with shape {B,Din,T} and strides {T*Din, 1, Din}; it is the faster one.
 *
 * Dtypes: f32, f16, bf16, chosen for x, weight, bias and each state independently; sums are float32 and every
 * output is rounded once. y, dy and dx have x's dtype. f64 (CPU): all of them f64, sums too. Where x, weight and every
 * output of a backward are bf16 and the processor has AMX, or where they are of one 16-bit dtype on a GPU's tensor cores,
 * the backward with SiLU rounds g (below) to that dtype before it multiplies; where they are f16, with AMX to 16 bits. With AMX,
 * numbers of f32 below 2^-110 lose their last bits, and with one above 3.38e38 a product is NaN.
 *
 * Not here: packed sequences (one call a sequence, its states handed on), decoding, groups, strides, dilation.
 * Sizes may be 0 (B, Din, Dout, T: without input channels y comes from bias alone). Outputs may not overlap each other
 * or any input.
 *
 * NaN and infinities follow the formulas; SiLU of -inf is 0 or NaN. Kernels may multiply by a 0 in place of a term beyond a
 * sequence's ends: a NaN or an infinity in weight may make NaN of any result, one in x, dy or a state of any dweight, and,
 * with SiLU, of any gradient.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor missing, activation,
 * accumulate), COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT (misaligned data, output with repeated elements,
 * overlap), COT_UNSUPPORTED (a forced kernel refuses), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY.
 */
#ifndef COTANGENT_CAUSAL_CONV1D_DENSE_H
#define COTANGENT_CAUSAL_CONV1D_DENSE_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Arguments of the forward. */
typedef struct cot_causal_conv1d_dense_forward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    cot_tensor x;              /* [B,Din,T] */
    cot_tensor weight;         /* [Dout,Din,K] */
    cot_tensor bias;           /* [Dout], optional */
    cot_tensor initial_state;  /* [B,Din,K-1], optional */
    cot_tensor y;              /* out [B,Dout,T], x's dtype; optional */
    cot_tensor final_state;    /* out [B,Din,K-1], any of the float dtypes; optional */
    void *workspace;           /* NULL = the queue's pool; else 64-byte aligned, workspace_bytes of it */
    size_t workspace_bytes;
} cot_causal_conv1d_dense_forward_args;

/* y and final_state from x. */
COT_API cot_status cot_causal_conv1d_dense_forward(cot_queue *queue, const cot_causal_conv1d_dense_forward_args *args);

/* Writes the bytes of workspace that this call would need; checks the arguments as the call itself does, but for
 * the data pointers and the overlaps. */
COT_API cot_status cot_causal_conv1d_dense_forward_workspace(cot_queue *queue,
                                                             const cot_causal_conv1d_dense_forward_args *args,
                                                             size_t *bytes);

/* With g[o,t] = dy[o,t], or dy[o,t] * sigma(z) * (1 + z * (1 - sigma(z))) for SiLU (z is computed again):
 *
 *     dx[i,t]         = sum_j sum_o weight[o,i,K-1-j] * g[o,t+j] over t+j < T,   plus dfinal_state[i,t-T+K-1]
 *                                                                              where t >= T-K+1
 *     dweight[o,i,k]  = sum_{b,t} g[o,t] * xe[i,t+k]                             dbias[o] = sum_{b,t} g[o,t]
 *     dinitial_state[i,s] = sum_{k<=s} sum_o weight[o,i,k] * g[o,s-k] over s-k < T,   plus dfinal_state[i,s-T]
 *                                                                              where s >= T */
typedef struct cot_causal_conv1d_dense_backward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    int32_t accumulate;        /* 0: dweight =, dbias =;  1: dweight +=, dbias += */
    cot_tensor x;              /* [B,Din,T] */
    cot_tensor weight;         /* [Dout,Din,K] */
    cot_tensor bias;           /* [Dout]: needed for SiLU if the forward had one; else ignored */
    cot_tensor initial_state;  /* as in the forward */
    cot_tensor dy;             /* [B,Dout,T], x's dtype */
    cot_tensor dfinal_state;   /* like final_state; optional (absent = zero) */
    cot_tensor dx;             /* out [B,Din,T], x's dtype; optional */
    cot_tensor dweight;        /* out [Dout,Din,K], any of the float dtypes; optional */
    cot_tensor dbias;          /* out [Dout], any of the float dtypes; optional */
    cot_tensor dinitial_state; /* out [B,Din,K-1]; optional; allowed without an initial_state (a state of zeros) */
    void *workspace;
    size_t workspace_bytes;
} cot_causal_conv1d_dense_backward_args;

/* dx, dweight, dbias and dinitial_state from x and dy. */
COT_API cot_status cot_causal_conv1d_dense_backward(cot_queue *queue,
                                                    const cot_causal_conv1d_dense_backward_args *args);
/* As cot_causal_conv1d_dense_forward_workspace. */
COT_API cot_status cot_causal_conv1d_dense_backward_workspace(cot_queue *queue,
                                                              const cot_causal_conv1d_dense_backward_args *args,
                                                              size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
