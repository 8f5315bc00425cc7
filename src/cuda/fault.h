/* SPDX-License-Identifier: Apache-2.0
 * fault.h: faults in index data that only a kernel can see. For host and device code. */
#ifndef COT_CUDA_FAULT_H
#define COT_CUDA_FAULT_H

/* What was wrong; cot_queue_check puts it into words (device.c). A fault word holds the first one that a kernel met:
 * kind << 32 | index of the entry; 0 = none. */
enum cot_fault_kind {
    COT_FAULT_NONE,
    COT_FAULT_CU_SEQLENS,    /* out of order, or beyond the tensor */
    COT_FAULT_CACHE_SEQLENS, /* negative */
    COT_FAULT_STATE_INDEX,   /* beyond the rows of the state */
    COT_FAULT_SEQUSED        /* negative, or more than the sequence has */
};

#endif
