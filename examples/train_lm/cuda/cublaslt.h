/* SPDX-License-Identifier: Apache-2.0
 *
 * cublaslt.h: matrix products by cuBLASLt. The library is opened at run time: libcublasLt.so.13 or .12, of the CUDA
 * toolkit or of the Python package nvidia-cublas. */
#ifndef TRAIN_LM_CUBLASLT_H
#define TRAIN_LM_CUBLASLT_H

#include <cotangent/core.h>
#include <stdbool.h>

typedef struct cublaslt cublaslt;

/* d [m,n] = op(a) op(b) + c + bias. All matrices are row-major and contiguous, in device memory, aligned to 16 bytes. op(a) is
 * [m,k], stored as [k,m] with transpose_a; op(b) is [k,n], stored as [n,k] with transpose_b. a and b have the dtype
 * `in`, c and d have `out`: f32, f16 or bf16. c may be d, or null (zero). bias [n] has the dtype `out`;
 * null: zero. Sums are float32. */
typedef struct cublaslt_product {
    int64_t m, n, k;
    bool transpose_a, transpose_b;
    cot_dtype in, out;
    const void *a, *b, *c, *bias;
    void *d;
} cublaslt_product;

enum { CUBLASLT_WORKSPACE = 32 << 20 }; /* bytes of device memory, which NVIDIA recommends for Hopper */

/* Opens the library. workspace: CUBLASLT_WORKSPACE bytes of device memory. COT_NO_DEVICE, with a message that names the
 * files that were tried: there is no library. The environment variable CUBLASLT may name the file. */
cot_status cublaslt_open(cot_queue *queue, void *workspace, cublaslt **out);
void cublaslt_close(cublaslt *l);

/* Enqueues the product on the queue's stream. The first product of a shape chooses the algorithm. Later products use
 * the same one, also in later runs on the same GPU with the same library: the bits are the same. A captured product has
 * no other effect on the host. */
cot_status cublaslt_multiply(cublaslt *l, const cublaslt_product *product);

#endif
