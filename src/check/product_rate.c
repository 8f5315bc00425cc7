/* SPDX-License-Identifier: Apache-2.0
 *
 * product_rate.c: matrix products out of the first-level cache, on the very micro-kernels of src/simd/matmul.h. Compiled
 * once per instruction set; the operands' type follows from it: f32, or with AMX bf16, f16 as two of them or f32 as three. */
#include "ceiling.h"
#include "core/draw.h"
#include "core/queue.h"
#include "simd/matmul.h"

double V_NAME(product_flops)(const cot_queue *queue);

enum { M = 64, N = 128, K = 128, REPEATS = 128 };

/* Parts of numbers around 1, of either sign: a processor multiplies zeros faster (an Emerald Rapids' tiles by a sixth). All
 * are alike, since it is the products that are timed. */
static void fill(mt *parts, int64_t count, uint64_t seed)
{
    for (int64_t at = 0; at < MT * MT; at += VW) {
        float values[VW];
        for (int i = 0; i < VW; i++)
            values[i] = (float)(int32_t)cot_draw(&seed) * 0x1p-30f;
        mt_store_a(parts + at / MT * MT, at % MT, v_load(values));
    }
    for (int64_t part = 1; part < count; part++)
        memcpy(parts + part * MT * MT, parts, MT * MT * sizeof(mt));
}

static void product_item(void *context, int64_t item)
{
    _Alignas(64) mt a[M * K], b[K * N];
    _Alignas(64) float c[M * N];
    mt_state host;
    (void)context;
    (void)item;
    fill(a, M * K / (MT * MT), 1);
    fill(b, K * N / (MT * MT), 2);
    mt_begin(&host);
    for (int repeat = 0; repeat < REPEATS; repeat++)
        mt_product(M, N, K, a, M, b, K, c, M, false, NULL);
    mt_end(&host);
    __asm__ volatile("" : : "r"(c) : "memory"); /* somebody reads it */
}

/* Multiplications and additions of one run over the queue's threads. */
double V_NAME(product_flops)(const cot_queue *queue)
{
    const int64_t items = 8 * cot_queue_threads(queue);
    cot_parallel(queue, items, product_item, NULL);
    return 2.0 * M * N * K * REPEATS * (double)items;
}
