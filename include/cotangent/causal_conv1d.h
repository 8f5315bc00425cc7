/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/causal_conv1d.h: depthwise causal convolution along time, with bias, SiLU, states and packing.
 *
 * Symbols: B batch, D channels, T time, K width (any K >= 1), N sequences or state rows. With
 * xe = [initial_state, x] along time (zeros if there is no state) and sigma(z) = 1 / (1 + exp(-z)):
 *
 *     z[t] = bias + sum_k weight[k] * xe[t+k]          weight[K-1] multiplies x[t], weight[0] the oldest input
 *     y[t] = z[t]   or, with COT_ACTIVATION_SILU,   z[t] * sigma(z[t])
 *     final_state = the last K-1 time steps of xe      raw inputs, not outputs
 *
 * Layout: every input may have any strides. In an output, every element needs its own address. [B,D,T] is the order of
 * the indices. A channel-last [B,T,D] array is passed as a view with shape {B,D,T} and strides {T*D, 1, D}.
 * A call is fast if time is contiguous in all of x, y, dy and dx, or if channels are contiguous in all of them. Other
 * layouts are supported too, but more slowly: CPU kernels copy elements one by one, a GPU runs the generic kernel.
 *
 * Dtypes: x, weight, bias and each state may each be f32, f16 or bf16. Sums are float32. On a CPU, the partial sums of
 * dweight and dbias are added in double. A 16-bit output is rounded from a float32 result. y, dy and dx have x's dtype.
 * f64 (CPU): all tensors are f64, and so are the sums.
 *
 * Packed sequences, by one of two arguments:
 *   seq_idx    i32 [B,T]: the input at t' contributes to the output at t only if seq_idx[b,t'] == seq_idx[b,t]. A
 *              negative value marks padding: there y = 0, and there is no gradient. The time steps of initial_state
 *              belong to sequence seq_idx[b,0] (to no sequence if that is negative). A time step of final_state is its
 *              raw input if that input belongs to the sequence of the last token, else 0.
 *   cu_seqlens i32 [N+1], needs B = 1: sequence n is t in [cu_seqlens[n], cu_seqlens[n+1]). States are [N,D,K-1].
 *              cu_seqlens starts at 0, never decreases, and ends at T at most. Tokens beyond its end are padding.
 *
 * Sizes may be 0 (B, D, T, N). For an empty sequence, final_state is initial_state.
 * Outputs may not overlap each other or any input.
 *
 * NaN and infinities follow the formulas. SiLU of -inf is 0 or NaN. NaN and infinities affect only their channel and
 * their sequence. Those in padding have no effect. Kernels may multiply by 0 where the formulas leave out a term: a
 * kernel may treat a width below 8 as 8. A NaN or an infinity in x or dy may therefore make y and dx NaN up to
 * max(K-1, 7) tokens away, and the dweight and dbias of its channel. A NaN or an infinity in weight may make all results
 * of its channel NaN.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor is missing, activation,
 * seq_idx together with cu_seqlens), COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT (misaligned data,
 * output with repeated elements, overlap), COT_INVALID_DATA (cu_seqlens, cache_seqlens, conv_state_indices),
 * COT_UNSUPPORTED (no kernel of the backend supports the arguments, for example f64 on a GPU; or the forced kernel does
 * not), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY; on a GPU also COT_WOULD_ALLOCATE and COT_DEVICE_ERROR.
 */
#ifndef COTANGENT_CAUSAL_CONV1D_H
#define COTANGENT_CAUSAL_CONV1D_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The arguments of the forward. */
typedef struct cot_causal_conv1d_forward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    cot_tensor x;              /* [B,D,T] */
    cot_tensor weight;         /* [D,K] */
    cot_tensor bias;           /* [D], optional */
    cot_tensor initial_state;  /* [B,D,K-1], with cu_seqlens [N,D,K-1]; optional */
    cot_tensor seq_idx;        /* i32 [B,T], optional */
    cot_tensor cu_seqlens;     /* i32 [N+1], optional */
    cot_tensor y;              /* output: [B,D,T], x's dtype; optional */
    cot_tensor final_state;    /* output: like initial_state, any float dtype; optional */
    void *workspace;           /* NULL = memory of the queue; else workspace_bytes bytes, 64-byte aligned */
    size_t workspace_bytes;
} cot_causal_conv1d_forward_args;

/* Computes y and final_state from x. */
COT_API cot_status cot_causal_conv1d_forward(cot_queue *queue, const cot_causal_conv1d_forward_args *args);

/* Writes the workspace size of this call in bytes. It checks the arguments as the call does, except data pointers,
 * overlaps and index data. */
COT_API cot_status cot_causal_conv1d_forward_workspace(cot_queue *queue, const cot_causal_conv1d_forward_args *args,
                                                       size_t *bytes);

/* The arguments of the backward. With g[t] = dy[t], or dy[t] * sigma(z) * (1 + z * (1 - sigma(z))) for SiLU (z is
 * computed again):
 *
 *     dx[t]     = sum_j weight[K-1-j] * g[t+j] over t+j < T,   plus dfinal_state[t-T+K-1] where t >= T-K+1
 *     dweight[k] = sum_{b,t} g[t] * xe[t+k]                    dbias = sum_{b,t} g[t]
 *     dinitial_state[i] = sum_{k<=i} weight[k] * g[i-k] over i-k < T,   plus dfinal_state[i-T] where i >= T
 *
 * within each sequence; g = 0 at padding. */
typedef struct cot_causal_conv1d_backward_args {
    size_t struct_size;
    cot_activation activation; /* NONE or SILU */
    int32_t accumulate;        /* 0: dweight, dbias are set; 1: they are added to. dx, dinitial_state are always set */
    cot_tensor x;              /* [B,D,T] */
    cot_tensor weight;         /* [D,K] */
    cot_tensor bias;           /* [D]: needed for SiLU if the forward had a bias; else ignored */
    cot_tensor initial_state;  /* as in the forward */
    cot_tensor seq_idx;        /* as in the forward */
    cot_tensor cu_seqlens;     /* as in the forward */
    cot_tensor dy;             /* [B,D,T], x's dtype */
    cot_tensor dfinal_state;   /* like final_state; optional (absent = zero) */
    cot_tensor dx;             /* output: [B,D,T], x's dtype; optional */
    cot_tensor dweight;        /* output: [D,K], any float dtype; optional */
    cot_tensor dbias;          /* output: [D], any float dtype; optional */
    cot_tensor dinitial_state; /* output: like initial_state; optional; allowed without initial_state (= zeros) */
    void *workspace;
    size_t workspace_bytes;
} cot_causal_conv1d_backward_args;

/* Computes dx, dweight, dbias and dinitial_state from x and dy, in one pass over the data. */
COT_API cot_status cot_causal_conv1d_backward(cot_queue *queue, const cot_causal_conv1d_backward_args *args);
/* Like cot_causal_conv1d_forward_workspace. */
COT_API cot_status cot_causal_conv1d_backward_workspace(cot_queue *queue, const cot_causal_conv1d_backward_args *args,
                                                        size_t *bytes);

/* The arguments of the update: one or more steps of decoding, with T new tokens per row. conv_state holds the last
 * inputs and is updated in place.
 *
 * conv_state has S >= K-1 time steps. Without cache_seqlens they are the latest S inputs, oldest first: y is computed
 * from [conv_state, x], and conv_state becomes the last S time steps of this concatenation.
 * With cache_seqlens the state is a ring buffer: index p mod S holds the input of position p. The new tokens of row b
 * are the positions cache_seqlens[b] + t. Earlier positions are read from the ring buffer. Entries that were never
 * written should be 0: they stand for positions before the start.
 * conv_state_indices[b] is the row of conv_state for batch row b. If it is absent, the row is b, and N >= B. A negative
 * index writes y = 0 and does not change the state. Two rows of the batch may not use the same state row. */
typedef struct cot_causal_conv1d_update_args {
    size_t struct_size;
    cot_activation activation;     /* NONE or SILU */
    cot_tensor x;                  /* [B,D] or [B,D,T] */
    cot_tensor weight;             /* [D,K] */
    cot_tensor bias;               /* [D], optional */
    cot_tensor conv_state;         /* input and output: [N,D,S] */
    cot_tensor cache_seqlens;      /* i32 [B], >= 0, optional */
    cot_tensor conv_state_indices; /* i32 [B], optional */
    cot_tensor y;                  /* output: shape and dtype of x */
    void *workspace;
    size_t workspace_bytes;
} cot_causal_conv1d_update_args;

/* Computes y from x and conv_state, and updates conv_state. COT_INVALID_DATA also means: an index >= N, an index that
 * two rows share, or a negative cache_seqlens. */
COT_API cot_status cot_causal_conv1d_update(cot_queue *queue, const cot_causal_conv1d_update_args *args);
/* Like cot_causal_conv1d_forward_workspace. */
COT_API cot_status cot_causal_conv1d_update_workspace(cot_queue *queue, const cot_causal_conv1d_update_args *args,
                                                      size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
