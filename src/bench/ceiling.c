/* SPDX-License-Identifier: Apache-2.0 */
#include "ceiling.h"

#include "core/cpu_features.h"
#include "core/queue.h"
#include "check/storage.h"

#include <stdlib.h>
#include <time.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* Bytes of an item of the streaming copy: small enough to spread over threads, large enough for a low overhead. */
enum { STREAM_ITEM_BYTES = 1 << 19 };

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

copy_ceiling copy_ceiling_make(size_t footprint)
{
    copy_ceiling c = {.bytes = cot_align_up(footprint / 2)};
    if (posix_memalign((void **)&c.from, 4096, c.bytes + 1) != 0 ||
        posix_memalign((void **)&c.to, 4096, c.bytes + 1) != 0)
        exit(1);
    memset(c.from, 1, c.bytes); /* touched, so that the buffers have pages of their own, not the page of zeros */
    memset(c.to, 2, c.bytes);
    return c;
}

void copy_ceiling_free(copy_ceiling *c)
{
    free(c->from);
    free(c->to);
}

/* Item `item` copies the bytes from item * item_size on. memcpy gets one long run per thread, for which it has its best
 * code, including streaming stores. The streaming copy gets small items. */
typedef struct copy_work {
    const copy_ceiling *c;
    size_t item_size;
} copy_work;

static size_t item_bytes(const copy_work *items, size_t first)
{
    return items->c->bytes - first < items->item_size ? items->c->bytes - first : items->item_size;
}

static void copy_item(void *context, int64_t item)
{
    const copy_work *items = context;
    const size_t first = (size_t)item * items->item_size;
    memcpy(items->c->to + first, items->c->from + first, item_bytes(items, first));
}

static void stream_item(void *context, int64_t item)
{
#if defined(__x86_64__)
    const copy_work *items = context;
    const size_t first = (size_t)item * items->item_size, bytes = item_bytes(items, first); /* a multiple of 64 */
    for (size_t i = first; i < first + bytes; i += 64)
        for (size_t j = i; j < i + 64; j += 16)
            _mm_stream_si128((__m128i *)(items->c->to + j), _mm_load_si128((const __m128i *)(items->c->from + j)));
    _mm_sfence();
#else
    copy_item(context, item);
#endif
}

static void copy_in_items(const cot_queue *queue, const copy_ceiling *c, size_t item_size,
                          void (*body)(void *, int64_t))
{
    copy_work items = {c, item_size};
    cot_run_items(queue, cot_ceil_div((int64_t)c->bytes, (int64_t)item_size), body, &items);
}

void copy_plain(const cot_queue *queue, const copy_ceiling *c)
{
    const size_t thread_bytes = c->bytes / (size_t)cot_queue_threads(queue);
    copy_in_items(queue, c, cot_align_up(thread_bytes > 0 ? thread_bytes : 1), copy_item);
}

void copy_streaming(const cot_queue *queue, const copy_ceiling *c)
{
    copy_in_items(queue, c, STREAM_ITEM_BYTES, stream_item);
}

double product_flops_portable(const cot_queue *queue);
double product_flops_avx2(const cot_queue *queue);
double product_flops_avx512(const cot_queue *queue);
double product_flops_amx(const cot_queue *queue);
double product_flops_amx_split(const cot_queue *queue);
double product_flops_amx_split3(const cot_queue *queue);

double measure_products(const cot_queue *queue, cot_dtype dtype)
{
    enum { TRIES = 9 };
    double (*run)(const cot_queue *) = product_flops_portable;
    (void)dtype;
#if defined(__x86_64__)
    const uint32_t isa = cot_cpu_features();
    run = isa & COT_ISA_AMX && dtype == COT_BF16  ? product_flops_amx
          : isa & COT_ISA_AMX && dtype == COT_F16 ? product_flops_amx_split
          : isa & COT_ISA_AMX && dtype == COT_F32 ? product_flops_amx_split3
          : isa & COT_ISA_AVX512                  ? product_flops_avx512
          : isa & COT_ISA_AVX2                    ? product_flops_avx2
                                                  : run;
#endif
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        const double begin = now(), flops = run(queue), rate = flops / (now() - begin);
        best = rate > best ? rate : best;
    }
    return best;
}

double measure_clock(void)
{
    /* A multiplication takes 3 cycles on every x86-64 of the last ten years. Additions of constants are no alternative:
     * some processors fold them away. On other architectures the result is only a relative unit. */
    enum { MULTIPLICATIONS = 4000000, CYCLES = 3, TRIES = 9 };
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        uint64_t product = 1, factor = 3;
        const double begin = now();
        for (int64_t n = 0; n < MULTIPLICATIONS; n++) {
            product *= factor;
            __asm__ volatile("" : "+r"(product), "+r"(factor));
        }
        const double clock = CYCLES * MULTIPLICATIONS / (now() - begin);
        best = clock > best ? clock : best;
    }
    return best;
}
