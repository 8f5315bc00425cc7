/* SPDX-License-Identifier: Apache-2.0
 * fault.h: the kinds of faults that a kernel finds in index data. For host and device code. */
#ifndef COT_CUDA_FAULT_H
#define COT_CUDA_FAULT_H

/* The kind of a fault. cot_queue_check turns it into a message (device.c). The fault word holds the first fault that a
 * kernel met, as kind << 32 | index of the entry; 0 = no fault. */
enum cot_fault_kind {
    COT_FAULT_NONE,
    COT_FAULT_CU_SEQLENS,    /* out of order, or beyond the tensor */
    COT_FAULT_CACHE_SEQLENS, /* negative */
    COT_FAULT_STATE_INDEX,   /* beyond the rows of the state */
    COT_FAULT_SEQUSED        /* negative, or more than the sequence has */
};

#endif
