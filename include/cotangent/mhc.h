/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/mhc.h: manifold-constrained hyper-connections, which connect a layer f to n residual streams.
 * `pre` computes the layer's coefficients from the streams, and mixes the streams into the input of f. `sinkhorn` turns
 * one group of coefficients, the logits, into a nearly doubly stochastic matrix h_res. `post` mixes the output of f and
 * the old streams into the new streams. `post_pre` is post of one layer and pre of the next layer in one pass.
 *
 * Symbols: B batch, T time, n streams (any n >= 1), D model width (any D >= 1), M = n*n + 2n coefficients, in the order
 * pre (n) | post (n) | res (n*n, row-major). k = i*D + d is the index of the n*D inputs of a token. Per token:
 *
 *   pre       inv_rms = 1 / sqrt(mean_k x[k]^2 + norm_eps)              of x, not of gamma x
 *             h_mix_j = sum_k phi[j,k] * gamma[k] * x[k]
 *             z_j     = alpha_s(j) * h_mix_j * inv_rms + bias_j         s(j): pre, post or res
 *             h_pre   = sigmoid(z_pre) + hc_eps       h_post = post_scale * sigmoid(z_post)
 *             h_in[d] = sum_i h_pre[i] * x[i,d]       h_res_logits = z_res as [n,n]
 *   sinkhorn  h_res = softmax over rows of h_res_logits, + eps;  h_res /= colsum + eps;
 *             then iterations-1 times:  h_res /= rowsum + eps;  h_res /= colsum + eps
 *   post      y[o,d]  = h_post[o] * f[d] + sum_i h_res[i,o] * x[i,d]    h_res transposed times x
 *
 * h_pre, h_post and h_res are the mappings H of the paper (DeepSeek, "mHC: Manifold-Constrained Hyper-Connections",
 * 2025). The paper writes H_res times x. DeepSeek's and Megatron's kernels multiply by H_res transposed, as post does.
 * h_res_is_out_in = 1 selects the paper's form.
 *
 * Layout: every tensor may have any strides. [B,n,T,D] can be passed as a view, and so can a slice of a longer batch.
 * Fast kernels need n <= 8, and d contiguous in x and in all tensors of x's shape. On a CPU, other layouts use the
 * scalar kernel. On a GPU n is at most 8 and B*T is less than 2^30.
 *
 * Dtypes: x is f32, f16 or bf16. All tensors with the axes T and D (h_in, f, y, their gradients, dx_post) have x's
 * dtype. All others (phi, gamma, bias, alpha, the coefficients, their gradients) are f32. Sums are float32, and every
 * output is rounded once. f64 (CPU): all tensors are f64, and so are the sums.
 *
 * B and T may be 0. Outputs may not overlap each other or any input. NaN and infinities follow the formulas. On a GPU,
 * f32 values of phi, gamma and x are split into three bf16 numbers for the tensor cores: an infinity in them gives NaN.
 * So are phi gamma for AMX, on a CPU with bf16 x: an infinity in phi or gamma gives NaN.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor is missing, an option out of
 * its range), COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT (misaligned data, output with repeated elements,
 * overlap), COT_UNSUPPORTED (on a GPU f64, or n or B*T above the limit; a forced kernel does not support the call),
 * COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY; on a GPU also COT_WOULD_ALLOCATE and COT_DEVICE_ERROR.
 */
#ifndef COTANGENT_MHC_H
#define COTANGENT_MHC_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- pre ---------------------------------------------------------------------------------------------- */

/* The arguments of cot_mhc_pre_forward. */
typedef struct cot_mhc_pre_forward_args {
    size_t struct_size;          /* set by the init macro */
    double norm_eps;             /* >= 0 */
    double hc_eps;               /* >= 0 */
    double post_scale;           /* > 0 */
    double sinkhorn_eps;         /* >= 0; only with h_res; the eps of the sinkhorn op */
    int32_t sinkhorn_iterations; /* 1 to 4096; only with h_res; the iterations of the sinkhorn op */
    cot_tensor x;                /* [B,T,n,D] */
    cot_tensor phi;              /* [M,n*D] */
    cot_tensor alpha;            /* [3]: for pre, post, res */
    cot_tensor bias;             /* [M] */
    cot_tensor gamma;            /* [n,D], optional (absent = ones) */
    cot_tensor h_in;             /* output: [B,T,D], x's dtype; optional like every output below */
    cot_tensor h_pre;            /* output: [B,T,n] */
    cot_tensor h_post;           /* output: [B,T,n] */
    cot_tensor h_res_logits;     /* output: [B,T,n,n]: the logits */
    cot_tensor h_res;            /* output: [B,T,n,n]: sinkhorn of the logits, computed in the same pass */
    cot_tensor inv_rms;          /* output: [B,T]; the backward needs inv_rms, h_mix, h_pre and h_post */
    cot_tensor h_mix;            /* output: [B,T,M], before the multiplication by inv_rms */
    void *workspace;             /* NULL = memory of the queue; else workspace_bytes bytes, 64-byte aligned */
    size_t workspace_bytes;      /* size of workspace; 0 with NULL */
} cot_mhc_pre_forward_args;

/* COT_INIT with the usual options: norm_eps = hc_eps = sinkhorn_eps = 1e-6, post_scale = 2, 20 iterations. */
#define COT_MHC_PRE_FORWARD_INIT(p) (COT_MHC_PRE_BACKWARD_INIT(p), (void)((p)->norm_eps = 1e-6))
/* The same for the backward, which has no norm_eps. */
#define COT_MHC_PRE_BACKWARD_INIT(p)                                                 \
    (COT_INIT(p), (p)->hc_eps = 1e-6, (p)->sinkhorn_eps = 1e-6, (p)->post_scale = 2, \
     (void)((p)->sinkhorn_iterations = 20))

/* Computes h_in, the coefficients, and the tensors that the backward needs, from x. */
COT_API cot_status cot_mhc_pre_forward(cot_queue *queue, const cot_mhc_pre_forward_args *args);

/* Writes the workspace size of this call in bytes. It checks the arguments as the call does, except data pointers and
 * overlaps. */
COT_API cot_status cot_mhc_pre_forward_workspace(cot_queue *queue, const cot_mhc_pre_forward_args *args, size_t *bytes);

/* The arguments of cot_mhc_pre_backward. The inputs are the gradients of h_in, of h_post and of the logits. The
 * gradient of the logits, g_res below, is dh_res_logits + sinkhorn_backward(dh_res). A term that is not given is 0.
 * With dh_res, the call computes the logits again.
 *
 *     dh_pre[i] = sum_d dh_in[d] * x[i,d]                       s = h_pre - hc_eps
 *     dz_pre    = dh_pre * s * (1 - s)      dz_post = dh_post * h_post * (1 - h_post / post_scale)      dz_res = g_res
 *     du_j      = alpha_s(j) * dz_j         dh_mix  = du * inv_rms      c = -(sum_j du_j * h_mix_j) * inv_rms^3 / (n*D)
 *     dx[i,d]   = gamma[k] * sum_j dh_mix_j * phi[j,k] + c * x[i,d] + h_pre[i] * dh_in[d] + dx_post[i,d]
 *     dbias_j   = sum_tokens dz_j           dalpha_s = sum_tokens sum_{j in s} dz_j * h_mix_j * inv_rms
 *     Q[j,k]    = sum_tokens dh_mix_j * x[k]      dphi = Q * gamma      dgamma[k] = sum_j phi[j,k] * Q[j,k] */
typedef struct cot_mhc_pre_backward_args {
    size_t struct_size;          /* set by the init macro */
    double hc_eps;               /* as in the forward */
    double post_scale;           /* as in the forward */
    double sinkhorn_eps;         /* as in the forward; only with dh_res */
    int32_t sinkhorn_iterations; /* as in the forward; only with dh_res */
    int32_t accumulate;          /* 0: dphi, dalpha, dbias, dgamma are set; 1: they are added to. dx is always set */
    cot_tensor x;                /* [B,T,n,D] */
    cot_tensor phi;              /* [M,n*D] */
    cot_tensor alpha;            /* [3] */
    cot_tensor bias;             /* [M], needed with dh_res; else ignored */
    cot_tensor gamma;            /* [n,D], optional */
    cot_tensor inv_rms;          /* [B,T], output of the forward */
    cot_tensor h_mix;            /* [B,T,M], output of the forward */
    cot_tensor h_pre;            /* [B,T,n], output of the forward */
    cot_tensor h_post;           /* [B,T,n], output of the forward */
    cot_tensor dh_in;            /* [B,T,D], x's dtype */
    cot_tensor dh_post;          /* [B,T,n] */
    cot_tensor dh_res_logits;    /* [B,T,n,n], gradient of the logits; optional */
    cot_tensor dh_res;           /* [B,T,n,n]; optional */
    cot_tensor dx_post;          /* [B,T,n,D], x's dtype: added to dx before dx is rounded; optional */
    cot_tensor dx;               /* output: [B,T,n,D], x's dtype; optional like every output below */
    cot_tensor dphi;             /* output: [M,n*D] */
    cot_tensor dalpha;           /* output: [3] */
    cot_tensor dbias;            /* output: [M] */
    cot_tensor dgamma;           /* output: [n,D]; allowed without gamma: the gradient at gamma = 1 */
    void *workspace;             /* as in cot_mhc_pre_forward_args */
    size_t workspace_bytes;      /* size of workspace; 0 with NULL */
} cot_mhc_pre_backward_args;

/* Computes all gradients in one pass over x and dh_in. Parameter gradients are summed in a fixed order. */
COT_API cot_status cot_mhc_pre_backward(cot_queue *queue, const cot_mhc_pre_backward_args *args);
/* Like cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_pre_backward_workspace(cot_queue *queue, const cot_mhc_pre_backward_args *args,
                                                  size_t *bytes);

/* ---- sinkhorn ----------------------------------------------------------------------------------------- */

/* The arguments of cot_mhc_sinkhorn_forward. */
typedef struct cot_mhc_sinkhorn_forward_args {
    size_t struct_size;      /* set by the init macro */
    double eps;              /* >= 0; sinkhorn_eps of pre and post_pre, where the options of Sinkhorn have a prefix */
    int32_t iterations;      /* 1 to 4096; pre calls it sinkhorn_iterations */
    cot_tensor h_res_logits; /* [B,T,n,n]: logits, f32 or f64 */
    cot_tensor h_res;        /* output: [B,T,n,n] */
    void *workspace;         /* as in cot_mhc_pre_forward_args */
    size_t workspace_bytes;  /* size of workspace; 0 with NULL */
} cot_mhc_sinkhorn_forward_args;

/* COT_INIT with the usual options: 20 iterations, eps = 1e-6. For both directions. */
#define COT_MHC_SINKHORN_INIT(p) (COT_INIT(p), (p)->eps = 1e-6, (void)((p)->iterations = 20))

/* Computes h_res from the logits. */
COT_API cot_status cot_mhc_sinkhorn_forward(cot_queue *queue, const cot_mhc_sinkhorn_forward_args *args);
/* Like cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_sinkhorn_forward_workspace(cot_queue *queue, const cot_mhc_sinkhorn_forward_args *args,
                                                      size_t *bytes);

/* The arguments of cot_mhc_sinkhorn_backward, which computes the exact gradient of all iterations, including eps. It
 * needs no output of the forward. */
typedef struct cot_mhc_sinkhorn_backward_args {
    size_t struct_size;       /* set by the init macro */
    double eps;               /* as in the forward */
    int32_t iterations;       /* as in the forward */
    cot_tensor h_res_logits;  /* [B,T,n,n] */
    cot_tensor dh_res;        /* [B,T,n,n] */
    cot_tensor dh_res_logits; /* output: [B,T,n,n] */
    void *workspace;          /* as in cot_mhc_pre_forward_args */
    size_t workspace_bytes;   /* size of workspace; 0 with NULL */
} cot_mhc_sinkhorn_backward_args;

/* Computes dh_res_logits from the logits and dh_res. */
COT_API cot_status cot_mhc_sinkhorn_backward(cot_queue *queue, const cot_mhc_sinkhorn_backward_args *args);
/* Like cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_sinkhorn_backward_workspace(cot_queue *queue, const cot_mhc_sinkhorn_backward_args *args,
                                                       size_t *bytes);

/* ---- post --------------------------------------------------------------------------------------------- */

/* The arguments of cot_mhc_post_forward. */
typedef struct cot_mhc_post_forward_args {
    size_t struct_size;      /* set by the init macro */
    int32_t h_res_is_out_in; /* 0: h_res is [in,out], h_res[i,o] maps stream i to o;  1: h_res is [out,in] */
    cot_tensor x;            /* [B,T,n,D] */
    cot_tensor f;            /* [B,T,D], x's dtype */
    cot_tensor h_post;       /* [B,T,n] */
    cot_tensor h_res;        /* [B,T,n,n] */
    cot_tensor y;            /* output: [B,T,n,D], x's dtype */
    void *workspace;         /* as in cot_mhc_pre_forward_args */
    size_t workspace_bytes;  /* size of workspace; 0 with NULL */
} cot_mhc_post_forward_args;

/* Computes the new streams y from x, f and the coefficients. */
COT_API cot_status cot_mhc_post_forward(cot_queue *queue, const cot_mhc_post_forward_args *args);
/* Like cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_post_forward_workspace(cot_queue *queue, const cot_mhc_post_forward_args *args,
                                                  size_t *bytes);

/* The arguments of cot_mhc_post_backward:
 *
 *     df[d]       = sum_o h_post[o] * dy[o,d]     dh_post[o] = sum_d f[d] * dy[o,d]
 *     dh_res[i,o] = sum_d x[i,d] * dy[o,d]        dx[i,d]    = sum_o h_res[i,o] * dy[o,d] */
typedef struct cot_mhc_post_backward_args {
    size_t struct_size;      /* set by the init macro */
    int32_t h_res_is_out_in; /* as in the forward, for h_res and dh_res */
    cot_tensor x;            /* [B,T,n,D] */
    cot_tensor f;            /* [B,T,D], x's dtype */
    cot_tensor h_post;       /* [B,T,n] */
    cot_tensor h_res;        /* [B,T,n,n] */
    cot_tensor dy;           /* [B,T,n,D], x's dtype */
    cot_tensor dx;           /* output: [B,T,n,D], x's dtype: pre's dx_post; optional like every output below */
    cot_tensor df;           /* output: [B,T,D], x's dtype */
    cot_tensor dh_post;      /* output: [B,T,n] */
    cot_tensor dh_res;       /* output: [B,T,n,n] */
    void *workspace;         /* as in cot_mhc_pre_forward_args */
    size_t workspace_bytes;  /* size of workspace; 0 with NULL */
} cot_mhc_post_backward_args;

/* Computes all four gradients in one pass. */
COT_API cot_status cot_mhc_post_backward(cot_queue *queue, const cot_mhc_post_backward_args *args);
/* Like cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_post_backward_workspace(cot_queue *queue, const cot_mhc_post_backward_args *args,
                                                   size_t *bytes);

/* ---- post_pre ----------------------------------------------------------------------------------------- */

/* The arguments of cot_mhc_post_pre_forward: post of a layer, then pre of the next layer, whose streams are y.
 *
 *     y[o,d]  = h_post[o] * f[d] + sum_i h_res[i,o] * x[i,d]       rounded once to x's dtype
 *     h_in[d] = sum_i h_pre[i] * y[i,d]                        pre's formulas, with y in the place of x
 *
 * Pre reads the rounded y. So the results are those of post and pre, one call after the other. phi, alpha, bias, gamma
 * and the coefficients h_pre and h_res_logits belong to the next layer. next_h_post and next_h_res are its h_post and
 * its h_res. */
typedef struct cot_mhc_post_pre_forward_args {
    size_t struct_size;          /* set by the init macro */
    double norm_eps;             /* as in cot_mhc_pre_forward_args */
    double hc_eps;               /* likewise */
    double post_scale;           /* likewise */
    double sinkhorn_eps;         /* likewise; only with next_h_res */
    int32_t sinkhorn_iterations; /* likewise; only with next_h_res */
    int32_t h_res_is_out_in;     /* of h_res, as in mhc_post; next_h_res is that of mhc_pre */
    cot_tensor x;                /* [B,T,n,D] */
    cot_tensor f;                /* [B,T,D], x's dtype */
    cot_tensor h_post;           /* [B,T,n] */
    cot_tensor h_res;            /* [B,T,n,n] */
    cot_tensor phi;              /* [M,n*D] */
    cot_tensor alpha;            /* [3]: for pre, post, res */
    cot_tensor bias;             /* [M] */
    cot_tensor gamma;            /* [n,D], optional (absent = ones) */
    cot_tensor y;                /* output: [B,T,n,D], x's dtype: the new streams */
    cot_tensor h_in;             /* output: [B,T,D], x's dtype; optional like every output below */
    cot_tensor h_pre;            /* output: [B,T,n] */
    cot_tensor next_h_post;      /* output: [B,T,n] */
    cot_tensor h_res_logits;     /* output: [B,T,n,n]: the logits */
    cot_tensor next_h_res;       /* output: [B,T,n,n]: sinkhorn of the logits */
    cot_tensor inv_rms;          /* output: [B,T]; the backward needs inv_rms, h_mix, h_pre and next_h_post */
    cot_tensor h_mix;            /* output: [B,T,M] */
    void *workspace;             /* as in cot_mhc_pre_forward_args */
    size_t workspace_bytes;      /* size of workspace; 0 with NULL */
} cot_mhc_post_pre_forward_args;

/* COT_INIT with pre's usual options. */
#define COT_MHC_POST_PRE_FORWARD_INIT(p) COT_MHC_PRE_FORWARD_INIT(p)
/* The same for the backward, which has no norm_eps. */
#define COT_MHC_POST_PRE_BACKWARD_INIT(p) COT_MHC_PRE_BACKWARD_INIT(p)

/* Computes the new streams, and from them h_in, the coefficients and the tensors that the backward needs. */
COT_API cot_status cot_mhc_post_pre_forward(cot_queue *queue, const cot_mhc_post_pre_forward_args *args);
/* Like cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_post_pre_forward_workspace(cot_queue *queue, const cot_mhc_post_pre_forward_args *args,
                                                      size_t *bytes);

/* The arguments of cot_mhc_post_pre_backward. The inputs dy, dh_in, dnext_h_post, dh_res_logits and dnext_h_res are the
 * gradients of the forward's outputs. Let g be the gradient of y from all uses of y:
 *
 *     g           = dy + the dx of pre's backward, with y in the place of x
 *     df[d]       = sum_o h_post[o] * g[o,d]    dh_post[o] = sum_d f[d] * g[o,d]
 *     dh_res[i,o] = sum_d x[i,d] * g[o,d]       dx[i,d]    = sum_o h_res[i,o] * g[o,d]
 *
 * g is float32 (f64 with f64) and is never rounded to x's dtype, unlike the dy of two calls. Without the input y, the
 * call computes y again from x and f as the forward does, rounded once to x's dtype. The gradients of the parameters
 * are those of pre's backward. */
typedef struct cot_mhc_post_pre_backward_args {
    size_t struct_size;          /* set by the init macro */
    double hc_eps;               /* as in the forward */
    double post_scale;           /* as in the forward */
    double sinkhorn_eps;         /* as in the forward; only with dnext_h_res */
    int32_t sinkhorn_iterations; /* as in the forward; only with dnext_h_res */
    /* 0: dphi, dalpha, dbias, dgamma are set; 1: they are added to. The other outputs are always set. */
    int32_t accumulate;
    int32_t h_res_is_out_in;  /* as in the forward, for h_res and dh_res */
    cot_tensor x;             /* [B,T,n,D] */
    cot_tensor f;             /* [B,T,D], x's dtype */
    cot_tensor h_post;        /* [B,T,n] */
    cot_tensor h_res;         /* [B,T,n,n] */
    cot_tensor y;             /* [B,T,n,D], x's dtype, output of the forward; optional (absent = computed again) */
    cot_tensor phi;           /* [M,n*D] */
    cot_tensor alpha;         /* [3] */
    cot_tensor bias;          /* [M], needed with dnext_h_res; else ignored */
    cot_tensor gamma;         /* [n,D], optional */
    cot_tensor inv_rms;       /* [B,T], output of the forward */
    cot_tensor h_mix;         /* [B,T,M], output of the forward */
    cot_tensor h_pre;         /* [B,T,n], output of the forward */
    cot_tensor next_h_post;   /* [B,T,n], output of the forward */
    cot_tensor dh_in;         /* [B,T,D], x's dtype */
    cot_tensor dnext_h_post;  /* [B,T,n] */
    cot_tensor dh_res_logits; /* [B,T,n,n], gradient of the logits; optional */
    cot_tensor dnext_h_res;   /* [B,T,n,n]; optional */
    cot_tensor dy;            /* [B,T,n,D], x's dtype: the gradient of y from its other uses; optional (absent = 0) */
    cot_tensor dx;            /* output: [B,T,n,D], x's dtype; optional like every output below */
    cot_tensor df;            /* output: [B,T,D], x's dtype */
    cot_tensor dh_post;       /* output: [B,T,n] */
    cot_tensor dh_res;        /* output: [B,T,n,n] */
    cot_tensor dphi;          /* output: [M,n*D] */
    cot_tensor dalpha;        /* output: [3] */
    cot_tensor dbias;         /* output: [M] */
    cot_tensor dgamma;        /* output: [n,D]; allowed without gamma: the gradient at gamma = 1 */
    void *workspace;          /* as in cot_mhc_pre_forward_args */
    size_t workspace_bytes;   /* size of workspace; 0 with NULL */
} cot_mhc_post_pre_backward_args;

/* Computes all gradients of both halves. Parameter gradients are summed in a fixed order. */
COT_API cot_status cot_mhc_post_pre_backward(cot_queue *queue, const cot_mhc_post_pre_backward_args *args);
/* Like cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_post_pre_backward_workspace(cot_queue *queue, const cot_mhc_post_pre_backward_args *args,
                                                       size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
