/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/mhc.h: manifold-constrained hyper-connections. A layer f between n residual streams: `pre` mixes the
 * streams into f's input and computes the layer's coefficients from the streams themselves, `sinkhorn` turns one
 * group of them into a nearly doubly stochastic matrix, `post` mixes f's output and the old streams into the new ones.
 *
 * Symbols: B batch, T time, n streams (any n >= 1), D model width (any D >= 1), M = n*n + 2n coefficients, in the order
 * pre (n) | post (n) | res (n*n, row-major). k = i*D + d numbers the n*D inputs of a token. Per token:
 *
 *   pre       inv_rms = 1 / sqrt(mean_k x[k]^2 + norm_eps)              x without gamma
 *             h_mix_j = sum_k phi[j,k] * gamma[k] * x[k]
 *             z_j     = alpha_s(j) * h_mix_j * inv_rms + bias_j         s(j): pre, post or res
 *             h_pre   = sigmoid(z_pre) + hc_eps       h_post = post_scale * sigmoid(z_post)
 *             h_res   = z_res as [n,n]: logits        h_in[d] = sum_i h_pre[i] * x[i,d]
 *   sinkhorn  A = softmax over rows of h_res, + eps;  A /= colsum + eps;
 *             then iterations-1 times:  A /= rowsum + eps;  A /= colsum + eps
 *   post      y[o,d]  = h_post[o] * f[d] + sum_i A[i,o] * x[i,d]        A transposed times x
 *
 * (DeepSeek's "mHC: Manifold-Constrained Hyper-Connections", 2025; y's A is transposed as there.)
 *
 * Layout: every tensor may have any strides ([B,n,T,D] is a view; so is a batch cut out of a longer one). Fast kernels
 * need n <= 8 and d contiguous in x and whatever has its shape; anything else runs through the scalar kernel. On a GPU n
 * is at most 8 and B*T at most 2^30.
 *
 * Dtypes: x is f32, f16 or bf16, and so is whatever has a D and a T: h_in, f, y, their gradients, dx_post. Everything
 * else (phi, gamma, bias, alpha, the coefficients, their gradients) is f32. Sums are float32 and every output is
 * rounded once. f64 (CPU): all of them f64, sums too.
 *
 * B and T may be 0. Outputs may not overlap each other or any input. NaN and infinities follow the formulas; on a GPU's tensor
 * cores phi and gamma are sums of three bf16, and an infinity among them gives NaN.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor missing, an option out of
 * its range), COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT (misaligned data, output with repeated elements,
 * overlap), COT_UNSUPPORTED (a forced kernel refuses), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY.
 */
#ifndef COTANGENT_MHC_H
#define COTANGENT_MHC_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- pre ---------------------------------------------------------------------------------------------- */

/* Of cot_mhc_pre_forward. */
typedef struct cot_mhc_pre_forward_args {
    size_t struct_size;          /* set by the init macro */
    double norm_eps;             /* >= 0 */
    double hc_eps;               /* >= 0 */
    double post_scale;           /* > 0 */
    double sinkhorn_eps;         /* >= 0; only with A */
    int32_t sinkhorn_iterations; /* 1 to 4096; only with A */
    cot_tensor x;                /* [B,T,n,D] */
    cot_tensor phi;              /* [M,n*D] */
    cot_tensor alpha;            /* [3]: of pre, post, res */
    cot_tensor bias;             /* [M] */
    cot_tensor gamma;            /* [n,D], optional (absent = ones) */
    cot_tensor h_in;             /* out [B,T,D], x's dtype; optional like every output below */
    cot_tensor h_pre;            /* out [B,T,n] */
    cot_tensor h_post;           /* out [B,T,n] */
    cot_tensor h_res;            /* out [B,T,n,n]: the logits */
    cot_tensor A;                /* out [B,T,n,n]: sinkhorn of the logits, in the same pass */
    cot_tensor inv_rms;          /* out [B,T]; this and h_mix, h_pre, h_post are what backward needs */
    cot_tensor h_mix;            /* out [B,T,M], inv_rms not yet applied */
    void *workspace;             /* NULL = the queue's pool; else 64-byte aligned, workspace_bytes of it */
    size_t workspace_bytes;      /* of workspace; 0 without one */
} cot_mhc_pre_forward_args;

/* COT_INIT and the usual options: norm_eps = hc_eps = sinkhorn_eps = 1e-6, post_scale = 2, 20 iterations. */
#define COT_MHC_PRE_FORWARD_INIT(p) (COT_MHC_PRE_BACKWARD_INIT(p), (void)((p)->norm_eps = 1e-6))
/* The same for the backward, which has no norm_eps. */
#define COT_MHC_PRE_BACKWARD_INIT(p)                                                 \
    (COT_INIT(p), (p)->hc_eps = 1e-6, (p)->sinkhorn_eps = 1e-6, (p)->post_scale = 2, \
     (void)((p)->sinkhorn_iterations = 20))

/* h_in, the coefficients, and what backward needs, from x. */
COT_API cot_status cot_mhc_pre_forward(cot_queue *queue, const cot_mhc_pre_forward_args *args);

/* Writes the bytes of workspace that this call would need; checks the arguments as the call itself does, but for the
 * data pointers and the overlaps. So do the other calls' below. */
COT_API cot_status cot_mhc_pre_forward_workspace(cot_queue *queue, const cot_mhc_pre_forward_args *args, size_t *bytes);

/* Given the gradients of h_in, h_post and of the logits, these by dh_res, by dA (then Sinkhorn's own backward comes
 * first, on logits that are computed again), by both (they add up) or by neither (zero):
 *
 *     dh_pre[i] = sum_d dh_in[d] * x[i,d]                       s = h_pre - hc_eps
 *     dz_pre    = dh_pre * s * (1 - s)      dz_post = dh_post * h_post * (1 - h_post / post_scale)      dz_res = dh_res
 *     du_j      = alpha_s(j) * dz_j         dh_mix  = du * inv_rms      c = -(sum_j du_j * h_mix_j) * inv_rms^3 / (n*D)
 *     dx[i,d]   = gamma[k] * sum_j dh_mix_j * phi[j,k] + c * x[i,d] + h_pre[i] * dh_in[d] + dx_post[i,d]
 *     dbias_j   = sum_tokens dz_j           dalpha_s = sum_tokens sum_{j in s} dz_j * h_mix_j * inv_rms
 *     Q[j,k]    = sum_tokens dh_mix_j * x[k]      dphi = Q * gamma      dgamma[k] = sum_j phi[j,k] * Q[j,k] */
typedef struct cot_mhc_pre_backward_args {
    size_t struct_size;          /* set by the init macro */
    double hc_eps;               /* as in the forward */
    double post_scale;           /* as in the forward */
    double sinkhorn_eps;         /* as in the forward; only with dA */
    int32_t sinkhorn_iterations; /* as in the forward; only with dA */
    int32_t accumulate;          /* 0: dphi =, dalpha =, dbias =, dgamma =;  1: += */
    cot_tensor x;                /* [B,T,n,D] */
    cot_tensor phi;              /* [M,n*D] */
    cot_tensor alpha;            /* [3] */
    cot_tensor bias;             /* [M], needed with dA; else ignored */
    cot_tensor gamma;            /* [n,D], optional */
    cot_tensor inv_rms;          /* [B,T]; the forward's outputs */
    cot_tensor h_mix;            /* [B,T,M] */
    cot_tensor h_pre;            /* [B,T,n] */
    cot_tensor h_post;           /* [B,T,n] */
    cot_tensor dh_in;            /* [B,T,D], x's dtype */
    cot_tensor dh_post;          /* [B,T,n] */
    cot_tensor dh_res;           /* [B,T,n,n], of the logits; optional */
    cot_tensor dA;               /* [B,T,n,n]; optional */
    cot_tensor dx_post;          /* [B,T,n,D], x's dtype: added to dx before it is rounded; optional */
    cot_tensor dx;               /* out [B,T,n,D], x's dtype; optional like every output below */
    cot_tensor dphi;             /* out [M,n*D] */
    cot_tensor dalpha;           /* out [3] */
    cot_tensor dbias;            /* out [M] */
    cot_tensor dgamma;           /* out [n,D]; allowed without gamma (its gradient at ones) */
    void *workspace;             /* as in cot_mhc_pre_forward_args, like the next */
    size_t workspace_bytes;      /* of workspace; 0 without one */
} cot_mhc_pre_backward_args;

/* All gradients in one pass over x and dh_in; parameter gradients are summed in one fixed order. */
COT_API cot_status cot_mhc_pre_backward(cot_queue *queue, const cot_mhc_pre_backward_args *args);
/* As cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_pre_backward_workspace(cot_queue *queue, const cot_mhc_pre_backward_args *args,
                                                  size_t *bytes);

/* ---- sinkhorn ----------------------------------------------------------------------------------------- */

/* Of cot_mhc_sinkhorn_forward. */
typedef struct cot_mhc_sinkhorn_forward_args {
    size_t struct_size;     /* set by the init macro */
    double eps;             /* >= 0 */
    int32_t iterations;     /* 1 to 4096 */
    cot_tensor h_res;       /* [B,T,n,n]: logits, f32 or f64 */
    cot_tensor A;           /* out [B,T,n,n] */
    void *workspace;        /* as in cot_mhc_pre_forward_args, like the next */
    size_t workspace_bytes; /* of workspace; 0 without one */
} cot_mhc_sinkhorn_forward_args;

/* COT_INIT and the usual options: 20 iterations, eps = 1e-6. For both directions. */
#define COT_MHC_SINKHORN_INIT(p) (COT_INIT(p), (p)->eps = 1e-6, (void)((p)->iterations = 20))

/* A from the logits. */
COT_API cot_status cot_mhc_sinkhorn_forward(cot_queue *queue, const cot_mhc_sinkhorn_forward_args *args);
/* As cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_sinkhorn_forward_workspace(cot_queue *queue, const cot_mhc_sinkhorn_forward_args *args,
                                                      size_t *bytes);

/* The exact gradient of all the iterations, eps included; nothing is needed but the logits. */
typedef struct cot_mhc_sinkhorn_backward_args {
    size_t struct_size;     /* set by the init macro */
    double eps;             /* as in the forward */
    int32_t iterations;     /* as in the forward */
    cot_tensor h_res;       /* [B,T,n,n] */
    cot_tensor dA;          /* [B,T,n,n] */
    cot_tensor dh_res;      /* out [B,T,n,n] */
    void *workspace;        /* as in cot_mhc_pre_forward_args, like the next */
    size_t workspace_bytes; /* of workspace; 0 without one */
} cot_mhc_sinkhorn_backward_args;

/* dh_res from the logits and dA. */
COT_API cot_status cot_mhc_sinkhorn_backward(cot_queue *queue, const cot_mhc_sinkhorn_backward_args *args);
/* As cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_sinkhorn_backward_workspace(cot_queue *queue, const cot_mhc_sinkhorn_backward_args *args,
                                                       size_t *bytes);

/* ---- post --------------------------------------------------------------------------------------------- */

/* Of cot_mhc_post_forward. */
typedef struct cot_mhc_post_forward_args {
    size_t struct_size;     /* set by the init macro */
    int32_t A_is_out_in;    /* 0: A[i,o] takes stream i to o;  1: A is stored [out,in] */
    cot_tensor x;           /* [B,T,n,D] */
    cot_tensor f;           /* [B,T,D], x's dtype */
    cot_tensor h_post;      /* [B,T,n] */
    cot_tensor A;           /* [B,T,n,n] */
    cot_tensor y;           /* out [B,T,n,D], x's dtype */
    void *workspace;        /* as in cot_mhc_pre_forward_args, like the next */
    size_t workspace_bytes; /* of workspace; 0 without one */
} cot_mhc_post_forward_args;

/* The new streams y from x, f and the coefficients. */
COT_API cot_status cot_mhc_post_forward(cot_queue *queue, const cot_mhc_post_forward_args *args);
/* As cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_post_forward_workspace(cot_queue *queue, const cot_mhc_post_forward_args *args,
                                                  size_t *bytes);

/*     df[d]   = sum_o h_post[o] * dy[o,d]         dh_post[o] = sum_d f[d] * dy[o,d]
 *     dA[i,o] = sum_d x[i,d] * dy[o,d]            dx[i,d]    = sum_o A[i,o] * dy[o,d] */
typedef struct cot_mhc_post_backward_args {
    size_t struct_size;     /* set by the init macro */
    int32_t A_is_out_in;    /* of A and dA */
    cot_tensor x;           /* [B,T,n,D] */
    cot_tensor f;           /* [B,T,D], x's dtype */
    cot_tensor h_post;      /* [B,T,n] */
    cot_tensor A;           /* [B,T,n,n] */
    cot_tensor dy;          /* [B,T,n,D], x's dtype */
    cot_tensor dx;          /* out [B,T,n,D], x's dtype: pre's dx_post; optional like every output below */
    cot_tensor df;          /* out [B,T,D], x's dtype */
    cot_tensor dh_post;     /* out [B,T,n] */
    cot_tensor dA;          /* out [B,T,n,n] */
    void *workspace;        /* as in cot_mhc_pre_forward_args, like the next */
    size_t workspace_bytes; /* of workspace; 0 without one */
} cot_mhc_post_backward_args;

/* All four gradients in one pass. */
COT_API cot_status cot_mhc_post_backward(cot_queue *queue, const cot_mhc_post_backward_args *args);
/* As cot_mhc_pre_forward_workspace. */
COT_API cot_status cot_mhc_post_backward_workspace(cot_queue *queue, const cot_mhc_post_backward_args *args,
                                                   size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
