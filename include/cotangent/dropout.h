/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/dropout.h: dropout fused with any subset of bias, activation and residual.
 *
 * Symbols: R rows (any leading shape, flattened), D columns; m in {0,1} the keep mask, c its scale:
 *
 *     y  = c * m * act(x + bias) + residual
 *     dx = c * m * dy * act'(x + bias)        dbias[d] = sum_r dx[r,d]        (dresidual is dy itself)
 *
 *     act: none; ReLU (its derivative at 0 is 0); SiLU z * sigmoid(z); GELU z * Phi(z), Phi the normal distribution
 *     (GELU_ERF), or z/2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 z^3))) (GELU_TANH)
 *
 * The source of m:
 *   mask       u8, x's shape: an element is kept where bit 0 is set.                           c = 1/(1-p)
 *   mask_bits  u8, x's shape except for the last axis, which is ceil(D/8): bit d%8 of byte d/8
 *              (bit 0 is the least significant) keeps column d. Bits beyond D are ignored.     c = 1/(1-p)
 *   neither    generated from seed and offset by the rule below, and not stored.               c = 65536/(65536-P)
 * A positive `scale` replaces c. To use a mask that was generated and exported, set scale to the c of its generation,
 * cot_dropout_scale(p).
 * With p = 0 a generated mask keeps everything, and c is 1. With p = 1, c is 0: y = residual (or 0) and dx = 0,
 * whatever m and x contain. A dropped element is exactly 0 before the residual is added, even if x is inf or NaN.
 * Other NaN and infinities follow the formulas. SiLU and its derivative at -inf and inf are their limits or NaN. The dx
 * of ReLU is 0 where x + bias <= 0, whatever dy contains. Where x + bias is NaN, dx is c * m * dy.
 *
 * The random mask is part of the interface. It is the same on every backend, for every dtype, layout, tiling and thread
 * count. P = round(65536 p). The element in row r and column d is dropped if its 16 random bits are less than P: it is
 * kept with probability 1/c exactly. The bits come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random
 * numbers: as easy as 1, 2, 3; SC 2011):
 *     i        = r * ceil(D/8) + floor(d/8)                  (64 bits; also the index of the byte in dense mask_bits)
 *     w[0..3]  = philox4x32_10(key {seed low, seed high}, counter {offset low, offset high, i low, i high})
 *     bits     = bits [16*(d%2), 16*(d%2)+16) of w[(d%8)/2]
 * One evaluation serves 8 neighbouring columns. Rows are counted over the leading axes in row-major order, whatever the
 * strides are. Different offsets give independent masks: a trainer counts steps and layers in the offset.
 * seed_tensor and offset_tensor, i32 [2] (low word, high word), are added to seed and offset (modulo 2^64). They are
 * read when the work runs, on a GPU from device memory, so that a captured graph can use a new mask at each replay.
 * (attention.h has the same options with the prefix dropout_: dropout_seed_tensor, dropout_offset_tensor.)
 *
 * Tensors have rank 1 to 6 and any strides. The last axis is D, all leading shapes are equal, and sizes may be 0.
 * Dtypes: f32, f16, bf16. y, residual, dy and dx have x's dtype. bias and dbias may each have any of the three.
 * Arithmetic is float32, and every output is rounded once. The last level of dbias's sums is double on the CPU.
 * f64 (CPU): all tensors are f64, and so are the sums.
 * Outputs may not overlap inputs or each other, with two exceptions: y may be the same view as x or residual, and dx
 * the same view as dy or x.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT (queue, args, struct_size, a required tensor is missing, activation, p
 * outside [0,1] or NaN, scale, accumulate, mask together with mask_bits), COT_INVALID_SHAPE, COT_INVALID_DTYPE,
 * COT_INVALID_LAYOUT (misaligned data, output with repeated elements, overlap), COT_UNSUPPORTED (f64 on a GPU, or a
 * forced kernel does not support the arguments), COT_WORKSPACE_TOO_SMALL, COT_OUT_OF_MEMORY; on a GPU also
 * COT_WOULD_ALLOCATE and COT_DEVICE_ERROR.
 */
#ifndef COTANGENT_DROPOUT_H
#define COTANGENT_DROPOUT_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The c of a generated mask: 65536/(65536-P), or 0 if P = 65536. NaN for a p outside [0,1]. */
COT_API double cot_dropout_scale(double p);

/* The arguments of cot_dropout_forward. */
typedef struct cot_dropout_forward_args {
    size_t struct_size;
    cot_activation activation; /* NONE, SILU, RELU, GELU_TANH or GELU_ERF */
    double p;                  /* probability of dropping, 0 to 1 */
    double scale;              /* 0: c is computed from p; else c itself, positive and finite */
    uint64_t seed;             /* of a generated mask. mask or mask_bits make seed, offset and their tensors ignored */
    uint64_t offset;           /* of a generated mask: a different one for each step and layer */
    cot_tensor x;              /* [..., D] */
    cot_tensor bias;           /* [D], optional */
    cot_tensor residual;       /* like x, optional */
    cot_tensor mask;           /* u8, x's shape; optional, not with mask_bits */
    cot_tensor mask_bits;      /* u8 [..., ceil(D/8)], optional, not with mask */
    cot_tensor seed_tensor;    /* i32 [2], optional: added to seed */
    cot_tensor offset_tensor;  /* i32 [2], optional: added to offset */
    cot_tensor y;              /* output: like x; optional */
    cot_tensor mask_out;       /* output: u8, x's shape: m as 0 and 1; optional */
    cot_tensor mask_bits_out;  /* output: u8 [..., ceil(D/8)]: m as bits, bits beyond D are 0; optional */
    void *workspace;           /* NULL = memory of the queue; else workspace_bytes bytes, 64-byte aligned */
    size_t workspace_bytes;
} cot_dropout_forward_args;

/* Computes y from x, and the mask. */
COT_API cot_status cot_dropout_forward(cot_queue *queue, const cot_dropout_forward_args *args);

/* Writes the workspace size of this call in bytes. It checks the arguments as the call does, except data pointers and
 * overlaps. */
COT_API cot_status cot_dropout_forward_workspace(cot_queue *queue, const cot_dropout_forward_args *args, size_t *bytes);

/* The arguments of cot_dropout_backward. activation, p, scale and the source of the mask are as in the forward. */
typedef struct cot_dropout_backward_args {
    size_t struct_size;
    cot_activation activation; /* as in the forward */
    int32_t accumulate;        /* 0: dbias is set; 1: it is added to. dx is always set */
    double p;                  /* as in the forward */
    double scale;              /* as in the forward */
    uint64_t seed;             /* as in the forward */
    uint64_t offset;           /* as in the forward */
    cot_tensor dy;             /* [..., D] */
    cot_tensor x;              /* like dy; needed with an activation, else ignored */
    cot_tensor bias;           /* [D]: needed with an activation if the forward had a bias; else ignored */
    cot_tensor mask;           /* as in the forward */
    cot_tensor mask_bits;      /* as in the forward */
    cot_tensor seed_tensor;    /* as in the forward */
    cot_tensor offset_tensor;  /* as in the forward */
    cot_tensor dx;             /* output: like dy; optional */
    cot_tensor dbias;          /* output: [D], any float dtype; optional */
    void *workspace;           /* as in the forward */
    size_t workspace_bytes;
} cot_dropout_backward_args;

/* Computes dx and dbias from dy, in one pass over the data. dbias is the sum of dx before dx is rounded. */
COT_API cot_status cot_dropout_backward(cot_queue *queue, const cot_dropout_backward_args *args);

/* Like cot_dropout_forward_workspace. */
COT_API cot_status cot_dropout_backward_workspace(cot_queue *queue, const cot_dropout_backward_args *args,
                                                  size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
