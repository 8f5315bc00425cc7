/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_state.h: the items that write final_state, and dinitial_state of sequences without tokens.
 *
 * An item is CONV1D_STATE_CHANNELS channels of one span (conv1d_span). `index` is the index of the span along axis 0 of
 * the state tensors, state_item that of the item in the span. */
#ifndef COT_CAUSAL_CONV1D_STATE_H
#define COT_CAUSAL_CONV1D_STATE_H

#include "causal_conv1d_to_f32.h"

enum { CONV1D_STATE_CHANNELS = 256 };

/* Number of state items of one span. */
static inline int64_t conv1d_state_items_per_span(const conv1d_sizes *sizes)
{
    return cot_ceil_div(sizes->D, CONV1D_STATE_CHANNELS);
}

/* Copies the last K-1 inputs of the span to final_state. */
static inline void conv1d_store_final_state(const conv1d_sizes *sizes, const cot_causal_conv1d_forward_args *a,
                                            int64_t index, int64_t state_item)
{
    const conv1d_span span = conv1d_span_at(sizes, &a->seq_idx, &a->cu_seqlens, index);
    const int64_t positions = sizes->K - 1, begin = state_item * CONV1D_STATE_CHANNELS;
    const int64_t end = begin + CONV1D_STATE_CHANNELS < sizes->D ? begin + CONV1D_STATE_CHANNELS : sizes->D;
    for (int64_t d = begin; d < end; d++)
        for (int64_t i = 0; i < positions; i++) {
            const int64_t position = span.end - positions + i;
            float value = 0;
            if (conv1d_contributes(&span, position, span.end - 1)) {
                if (position >= span.first)
                    value = conv1d_load(&a->x, span.b, d, position);
                else if (cot_is_present(&a->initial_state))
                    value = conv1d_load(&a->initial_state, span.state, d, position - span.first + positions);
            }
            conv1d_store(&a->final_state, span.state, d, i, value);
        }
}

/* Copies dfinal_state to dinitial_state if the span has no tokens. If it has, its pieces write dinitial_state. */
static inline void conv1d_store_empty_dinitial_state(const conv1d_backward_problem *problem, int64_t index,
                                                     int64_t state_item)
{
    const cot_causal_conv1d_backward_args *a = &problem->args;
    const conv1d_sizes *sizes = &problem->sizes;
    const conv1d_span span = conv1d_span_at(sizes, &a->seq_idx, &a->cu_seqlens, index);
    if (span.first != span.end)
        return;
    const int64_t begin = state_item * CONV1D_STATE_CHANNELS;
    const int64_t end = begin + CONV1D_STATE_CHANNELS < sizes->D ? begin + CONV1D_STATE_CHANNELS : sizes->D;
    for (int64_t d = begin; d < end; d++)
        for (int64_t i = 0; i < sizes->K - 1; i++)
            conv1d_store(&a->dinitial_state, index, d, i,
                         cot_is_present(&a->dfinal_state) ? conv1d_load(&a->dfinal_state, index, d, i) : 0);
}

#endif
