/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/causal_conv1d_dense.h: dense causal convolution along time, with bias, SiLU and states. Every output
 * channel depends on every input channel. cotangent/causal_conv1d.h is the depthwise op.
 *
 * Symbols: B batch, Din and Dout channels, T time, K width (any K >= 1). With xe = [initial_state, x] along time (zeros
 * if there is no state) and sigma(z) = 1 / (1 + exp(-z)):
 *
 *     z[o,t] = bias[o] + sum_k sum_i weight[o,i,k] * xe[i,t+k]      weight[:,:,K-1] multiplies x[t]
 *     y[o,t] = z[o,t]   or, with COT_ACTIVATION_SILU,   z[o,t] * sigma(z[o,t])
 *     final_state = the last K-1 columns of xe                      raw inputs, not outputs
 *
 * Layout: every tensor may have any strides. [B,Din,T] is the order of the indices. A channel-last [B,T,Din] array is
 * passed as a view with shape {B,Din,T} and strides {T*Din, 1, Din}; this layout is faster.
 *
 * Dtypes: x, weight, bias and each state may each be f32, f16 or bf16. Sums are float32, and every output is rounded
 * once. y, dy and dx have x's dtype. f64 (CPU): all tensors are f64, and so are the sums.
 * The backward with SiLU rounds g (below) before it multiplies, in these cases:
 *   - to bf16, if the processor has AMX and x, weight and every output are bf16;
 *   - to 16 significant bits (a sum of two bf16), if the processor has AMX and they are f16;
 *   - to their dtype, if they have one 16-bit dtype and the kernel uses a GPU's tensor cores.
 * With AMX, f32 numbers below 2^-110 lose their last bits, and a product with a number above 3.38e38 is NaN.
 *
 * Not supported: packed sequences (make one call per sequence and pass the states on), decoding, groups, strides,
 * dilation. Sizes may be 0 (B, Din, Dout, T). Without input channels, y depends only on bias. Outputs may not overlap
 * each other or any input.
 *
 * NaN and infinities follow the formulas. SiLU of -inf is 0 or NaN. Kernels may multiply by 0 in place of a term beyond
 * the ends of a sequence. A NaN or an infinity in weight may therefore make any result NaN. One in x, dy or a state may
 * make any dweight NaN and, with SiLU, any gradient.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor is missing, activation,
 * accumulate), COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT (misaligned data, output with repeated
 * elements, overlap), COT_UNSUPPORTED (no kernel of the backend supports the arguments, for example f64 on a GPU; or
 * the forced kernel does not), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY; on a GPU also COT_WOULD_ALLOCATE and
 * COT_DEVICE_ERROR.
 */
#ifndef COTANGENT_CAUSAL_CONV1D_DENSE_H
#define COTANGENT_CAUSAL_CONV1D_DENSE_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The arguments of the forward. */
typedef struct cot_causal_conv1d_dense_forward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    cot_tensor x;              /* [B,Din,T] */
    cot_tensor weight;         /* [Dout,Din,K] */
    cot_tensor bias;           /* [Dout], optional */
    cot_tensor initial_state;  /* [B,Din,K-1], optional */
    cot_tensor y;              /* output: [B,Dout,T], x's dtype; optional */
    cot_tensor final_state;    /* output: [B,Din,K-1], any float dtype; optional */
    void *workspace;           /* NULL = memory of the queue; else workspace_bytes bytes, 64-byte aligned */
    size_t workspace_bytes;
} cot_causal_conv1d_dense_forward_args;

/* Computes y and final_state from x. */
COT_API cot_status cot_causal_conv1d_dense_forward(cot_queue *queue, const cot_causal_conv1d_dense_forward_args *args);

/* Writes the workspace size of this call in bytes. It checks the arguments as the call does, except data pointers and
 * overlaps. */
COT_API cot_status cot_causal_conv1d_dense_forward_workspace(cot_queue *queue,
                                                             const cot_causal_conv1d_dense_forward_args *args,
                                                             size_t *bytes);

/* The arguments of the backward. With g[o,t] = dy[o,t], or dy[o,t] * sigma(z) * (1 + z * (1 - sigma(z))) for SiLU (z is
 * computed again):
 *
 *     dx[i,t]         = sum_j sum_o weight[o,i,K-1-j] * g[o,t+j] over t+j < T,   plus dfinal_state[i,t-T+K-1]
 *                                                                              where t >= T-K+1
 *     dweight[o,i,k]  = sum_{b,t} g[o,t] * xe[i,t+k]                             dbias[o] = sum_{b,t} g[o,t]
 *     dinitial_state[i,s] = sum_{k<=s} sum_o weight[o,i,k] * g[o,s-k] over s-k < T,   plus dfinal_state[i,s-T]
 *                                                                              where s >= T */
typedef struct cot_causal_conv1d_dense_backward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    int32_t accumulate;        /* 0: dweight, dbias are set; 1: they are added to. dx, dinitial_state are always set */
    cot_tensor x;              /* [B,Din,T] */
    cot_tensor weight;         /* [Dout,Din,K] */
    cot_tensor bias;           /* [Dout]: needed for SiLU if the forward had a bias; else ignored */
    cot_tensor initial_state;  /* as in the forward */
    cot_tensor dy;             /* [B,Dout,T], x's dtype */
    cot_tensor dfinal_state;   /* like final_state; optional (absent = zero) */
    cot_tensor dx;             /* output: [B,Din,T], x's dtype; optional */
    cot_tensor dweight;        /* output: [Dout,Din,K], any float dtype; optional */
    cot_tensor dbias;          /* output: [Dout], any float dtype; optional */
    cot_tensor dinitial_state; /* output: [B,Din,K-1]; optional; allowed without initial_state (= zeros) */
    void *workspace;
    size_t workspace_bytes;
} cot_causal_conv1d_dense_backward_args;

/* Computes dx, dweight, dbias and dinitial_state from x and dy. */
COT_API cot_status cot_causal_conv1d_dense_backward(cot_queue *queue,
                                                    const cot_causal_conv1d_dense_backward_args *args);
/* Like cot_causal_conv1d_dense_forward_workspace. */
COT_API cot_status cot_causal_conv1d_dense_backward_workspace(cot_queue *queue,
                                                              const cot_causal_conv1d_dense_backward_args *args,
                                                              size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
