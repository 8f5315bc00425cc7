/* SPDX-License-Identifier: Apache-2.0
 * ptx.h: the argument that test_ptx.c passes by value to the kernels of ptx.cu, and their sizes. For C and CUDA. */
#ifndef COT_TESTS_PTX_H
#define COT_TESTS_PTX_H

#include <cuda.h>
#include <stdint.h>

enum {
    PTX_CLUSTER = 4,
    PTX_BLOCKS = 8,   /* blocks of the kernels that synchronise through global memory */
    PTX_PIECES = 7,   /* pieces of 256 bytes that pass through the pipeline */
    PTX_TERMS = 3,    /* terms of split_bf16 */
    PTX_BOX = 8,      /* elements of a tensor map's box along the innermost axis; 4, 2 and 1 along the others */
    PTX_WGMMA_K = 64, /* the inner axis of the products, four instructions */
    PTX_WGMMA_M = 64
};

typedef struct ptx_call {
    CUtensorMap map;
    const void *in, *in2;
    void *out;
    int32_t at[4]; /* coordinates of a box's begin, innermost axis first */
} ptx_call;

#endif
