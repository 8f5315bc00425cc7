/* SPDX-License-Identifier: Apache-2.0
 * mfma_probe.h: the parameter of the kernels of mfma_probe.cu. For C and device code. */
#ifndef COT_TESTS_MFMA_PROBE_H
#define COT_TESTS_MFMA_PROBE_H

typedef struct mfma_call {
    const void *a, *b, *c;
    void *d;
} mfma_call;

#endif
