/* SPDX-License-Identifier: Apache-2.0
 *
 * product_rate.c: matrix products with operands in the L1 cache, by the micro-kernels of src/simd/matmul.h.
 * Compiled once per instruction set, which determines the operand type: f32, or with AMX bf16, f16 split into two bf16,
 * or f32 split into three bf16. */
#include "ceiling.h"
#include "cases/draw.h"
#include "core/queue.h"
#include "simd/matmul.h"

double V_NAME(product_flops)(const cot_queue *queue);

enum { M = 64, N = 128, K = 128, REPEATS = 128 };

/* Random numbers of both signs with absolute values up to 2. Zeros would be too fast: an Emerald Rapids multiplies
 * tiles of zeros 17 % faster. All squares are equal, because only the time of the products matters. */
static void fill(mt *squares, int64_t count, uint64_t seed)
{
    for (int64_t offset = 0; offset < PANEL * PANEL; offset += VW) {
        float values[VW];
        for (int i = 0; i < VW; i++)
            values[i] = (float)(int32_t)cot_draw(&seed) * 0x1p-30f;
        mt_store_a(squares + offset / PANEL * PANEL, offset % PANEL, v_load(values));
    }
    for (int64_t square = 1; square < count; square++)
        memcpy(squares + square * PANEL * PANEL, squares, PANEL * PANEL * sizeof(mt));
}

static void product_item(void *context, int64_t item)
{
    _Alignas(64) mt a[M * K], b[K * N];
    _Alignas(64) float c[M * N];
    mt_state saved_state;
    (void)context;
    (void)item;
    fill(a, M * K / (PANEL * PANEL), 1);
    fill(b, K * N / (PANEL * PANEL), 2);
    mt_begin(&saved_state);
    for (int repeat = 0; repeat < REPEATS; repeat++)
        mt_product(M, N, K, a, M, b, K, c, M, false, NULL);
    mt_end(&saved_state);
    __asm__ volatile("" : : "r"(c) : "memory"); /* keeps the compiler from removing the products */
}

/* Runs the products on the queue's threads and returns the number of floating-point operations. */
double V_NAME(product_flops)(const cot_queue *queue)
{
    const int64_t items = 8 * cot_queue_threads(queue);
    cot_run_items(queue, items, product_item, NULL);
    return 2.0 * M * N * K * REPEATS * (double)items;
}
