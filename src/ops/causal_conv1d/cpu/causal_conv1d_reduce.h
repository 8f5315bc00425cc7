/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_reduce.h: reduces the partial sums of the items, [partial_count][K+1][D], to dweight and dbias.
 *
 * The partial sums are added in a fixed order and in double: so their number costs no accuracy. The pass is short. */
#ifndef COT_CAUSAL_CONV1D_REDUCE_H
#define COT_CAUSAL_CONV1D_REDUCE_H

#include "core/float16.h"
#include "ops/causal_conv1d/causal_conv1d_problem.h"

enum {
    /* Number of channels summed at once. Their terms in one partial sum are contiguous. The partial sums are far
     * apart. */
    CONV1D_REDUCE_CHANNELS = 512,
    /* Number of terms below which one thread sums them. Waking threads takes 2 us, 50 % of a small backward. */
    CONV1D_REDUCE_SERIAL_TERMS = 65536
};

typedef struct conv1d_reduction {
    const conv1d_backward_problem *problem;
    const float *partials;
    int64_t partial_count; /* number of partial sums per channel: items_along_batch * items_along_tokens */
    /* number of sums of an item of the reduction. A sum is of one tap or the bias, for CONV1D_REDUCE_CHANNELS
     * channels */
    int64_t sums_per_item;
} conv1d_reduction;

/* Rounds twice for 16-bit gradients: to float32 and then to 16 bits. */
static inline void conv1d_store_gradient(const cot_tensor *out, int64_t index, bool accumulate, double value)
{
    if (accumulate)
        value += cot_load_f64(out->data, out->dtype, index);
    cot_store_f64(out->data, out->dtype, index, (float)value);
}

/* Reduces dweight[.., k] of CONV1D_REDUCE_CHANNELS channels from `begin` on, or dbias for k = K. */
static inline void conv1d_reduce_channels(const conv1d_reduction *reduction, int64_t k, int64_t begin)
{
    const cot_causal_conv1d_backward_args *a = &reduction->problem->args;
    const int64_t K = reduction->problem->sizes.K, D = reduction->problem->sizes.D;
    const int64_t n = begin + CONV1D_REDUCE_CHANNELS < D ? CONV1D_REDUCE_CHANNELS : D - begin;
    const cot_tensor *out = k < K ? &a->dweight : &a->dbias;
    if (!cot_is_present(out))
        return;
    double sums[CONV1D_REDUCE_CHANNELS] = {0};
    for (int64_t partial = 0; partial < reduction->partial_count; partial++) {
        const float *terms = reduction->partials + (partial * (K + 1) + k) * D + begin;
        for (int64_t i = 0; i < n; i++)
            sums[i] += (double)terms[i];
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t index = (begin + i) * out->stride[0] + (k < K ? k * out->stride[1] : 0);
        conv1d_store_gradient(out, index, a->accumulate, sums[i]);
    }
}

static void conv1d_reduce_item(void *argument, int64_t item)
{
    const conv1d_reduction *reduction = argument;
    const int64_t sums_per_channel = reduction->problem->sizes.K + 1;
    for (int64_t i = item * reduction->sums_per_item; i < (item + 1) * reduction->sums_per_item; i++)
        conv1d_reduce_channels(reduction, i % sums_per_channel, i / sums_per_channel * CONV1D_REDUCE_CHANNELS);
}

static inline void conv1d_reduce(cot_queue *queue, const conv1d_backward_problem *problem, const float *partials,
                                 int64_t partial_count)
{
    if (!cot_is_present(&problem->args.dweight) && !cot_is_present(&problem->args.dbias))
        return;
    const int64_t D = problem->sizes.D, sums = (problem->sizes.K + 1) * cot_ceil_div(D, CONV1D_REDUCE_CHANNELS);
    const bool serial = (double)partial_count * (double)(problem->sizes.K + 1) * (double)D < CONV1D_REDUCE_SERIAL_TERMS;
    conv1d_reduction reduction = {problem, partials, partial_count, serial ? sums : 1};
    cot_run_items(queue, serial && sums > 0 ? 1 : sums, conv1d_reduce_item, &reduction);
}

#endif
