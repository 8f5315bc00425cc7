/* SPDX-License-Identifier: Apache-2.0
 * product_rate.h: declarations that the product-rate kernels and their launcher share. */
#ifndef COT_BENCH_PRODUCT_RATE_H
#define COT_BENCH_PRODUCT_RATE_H

/* Each kernel repeats one product per block: C[M,N] += A[M,K] B[K,N]. The operands stay in shared memory or in
 * registers. */
typedef struct product_rate_call {
    int repeats;
    float *sum; /* NULL. The conditional store to `sum` keeps the compiler from removing the products. */
} product_rate_call;

/* wgmma: two warpgroups of 64 rows each, operands in shared memory. The tiles begin at a multiple of 1024 bytes. */
enum {
    WGMMA_RATE_M = 128,
    WGMMA_RATE_N = 256,
    WGMMA_RATE_K = 128,
    WGMMA_RATE_THREADS = 256,
    WGMMA_RATE_SHARED = (WGMMA_RATE_M + WGMMA_RATE_N) * WGMMA_RATE_K * 2 + 1024,
};

/* mma.sync: eight warps, each with 4 x 8 fragments of m16n8k16 in registers. */
enum { MMA_RATE_M = 64, MMA_RATE_N = 64, MMA_RATE_K = 16, MMA_RATE_THREADS = 256 };

/* FMA: each thread accumulates an outer product of 8 by 8 float32 numbers. */
enum { FMA_RATE_M = 8, FMA_RATE_N = 8, FMA_RATE_THREADS = 256 };

#endif
