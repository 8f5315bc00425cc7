/* SPDX-License-Identifier: Apache-2.0
 * fault.cuh: lets a kernel report a fault in index data. The first report is kept until cot_queue_check reads it. */
#ifndef COT_CUDA_FAULT_CUH
#define COT_CUDA_FAULT_CUH

#include "../fault.h"

#include <stdint.h>

static __device__ __forceinline__ void cot_report_fault(unsigned long long *word, enum cot_fault_kind kind,
                                                        int64_t index)
{
    atomicCAS(word, 0ull, (unsigned long long)kind << 32 | (uint32_t)index);
}

#endif
