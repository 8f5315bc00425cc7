/* SPDX-License-Identifier: Apache-2.0
 * fault_text.h: what cot_queue_check says about a fault word, for both GPU backends. */
#ifndef COT_CUDA_FAULT_TEXT_H
#define COT_CUDA_FAULT_TEXT_H

#include "core/status.h"
#include "fault.h"

#include <stdio.h>

static inline cot_status cot_fail_with_fault(unsigned long long word)
{
    static const char *const formats[] = {
        [COT_FAULT_CU_SEQLENS] = "cu_seqlens[%u] is out of order or beyond the tensor",
        [COT_FAULT_CACHE_SEQLENS] = "cache_seqlens[%u] is negative",
        [COT_FAULT_STATE_INDEX] = "conv_state_indices[%u] is beyond the rows of conv_state",
        [COT_FAULT_SEQUSED] = "seqused[%u] is negative or more than its sequence has",
    };
    const unsigned kind = (unsigned)(word >> 32), index = (unsigned)word;
    if (kind >= sizeof formats / sizeof *formats)
        return cot_fail(COT_DEVICE_ERROR, "cot_queue_check: a kernel reported fault %u", kind);
    char text[120];
    snprintf(text, sizeof text, formats[kind], index);
    return cot_fail(COT_INVALID_DATA, "cot_queue_check: a kernel met index data at fault: %s", text);
}

#endif
