/* SPDX-License-Identifier: Apache-2.0
 * ptx.h: what test_ptx.c hands to the kernels of ptx.cu, by value. For C and CUDA. */
#ifndef COT_TESTS_PTX_H
#define COT_TESTS_PTX_H

#include <cuda.h>
#include <stdint.h>

enum {
    PTX_CLUSTER = 4,
    PTX_BLOCKS = 8, /* of the kernels whose blocks meet in global memory */
    PTX_PIECES = 7, /* that go through the ring, of 256 bytes each */
    PTX_TERMS = 3,  /* of split_bf16 */
    PTX_BOX = 8,    /* elements along each axis of a tensor map's box, the innermost one; 4, 2 and 1 along the others */
    PTX_WGMMA_K = 64, /* the inner axis of the products, four instructions */
    PTX_WGMMA_M = 64
};

typedef struct ptx_call {
    CUtensorMap map;
    const void *in, *in2;
    void *out;
    int32_t at[4]; /* where a box begins, innermost axis first */
} ptx_call;

#endif
