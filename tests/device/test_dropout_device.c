/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dropout_device.c: a GPU draws the same masks as the CPU, bit for bit. Tests every dtype, layout and kind of
 * memory access, forward and backward, seeds in memory, and in-place calls. Exit status 77, "skipped", without a
 * GPU. */
#include "device_queue.h"
#include "support.h"

#include "core/float16.h"
#include "cuda/memory.h"

#include <cotangent/dropout.h>
#include <stdio.h>
#include <stdlib.h>

static cot_queue *cpu, *gpu;

static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_BF16};
static const int64_t columns[] = {1, 3, 7, 8, 64, 130, 248, 1023, 1024, 1025, 4096, 4097};

static const uint64_t seed = UINT64_C(0xfedcba9876543210), offset = UINT64_C(0x0123456789abcdef);
static const double p = 0.3;

/* ---- memory ------------------------------------------------------------------------------------------- */

/* A buffer with the same bytes on host and device. */
typedef struct mirrored {
    char *host;
    void *device;
    size_t bytes;
} mirrored;

static mirrored mirrored_alloc(int64_t bytes, int value)
{
    mirrored t = {.bytes = (size_t)bytes};
    t.host = malloc(t.bytes);
    assert_non_null(t.host);
    memset(t.host, value, t.bytes);
    assert_ok(cot_cuda_alloc(gpu, t.bytes, &t.device));
    return t;
}

static void copy_to_device(const mirrored *t)
{
    assert_ok(cot_cuda_copy_to_device(gpu, t->device, t->host, t->bytes));
}

static void copy_to_host(const mirrored *t)
{
    assert_ok(cot_cuda_copy_to_host(gpu, t->host, t->device, t->bytes));
}

static void mirrored_free(mirrored *t)
{
    free(t->host);
    cot_cuda_free(gpu, t->device);
}

/* The layout of [R,D] elements: the offset of the first element, the row stride `pitch`, the column stride `step`. */
typedef struct layout {
    int64_t R, D, pitch, step, first_element;
} layout;

static int64_t span(const layout *l)
{
    return l->first_element + (l->R - 1) * l->pitch + (l->D - 1) * l->step + 1;
}

static cot_tensor view(const layout *l, void *memory, cot_dtype dtype)
{
    cot_tensor t = cot_tensor_contiguous((char *)memory + (size_t)l->first_element * cot_dtype_size(dtype), dtype, 2,
                                         (int64_t[]){l->R, l->D});
    t.stride[0] = l->pitch;
    t.stride[1] = l->step;
    return t;
}

static mirrored make_ones(const layout *l, cot_dtype dtype)
{
    mirrored t = mirrored_alloc(span(l) * (int64_t)cot_dtype_size(dtype), 0);
    for (int64_t i = 0; i < span(l); i++)
        cot_store_f64(t.host, dtype, i, 1);
    copy_to_device(&t);
    return t;
}

static bool is_zero(const layout *l, const mirrored *t, cot_dtype dtype, int64_t r, int64_t d)
{
    return cot_load_f64(t->host, dtype, l->first_element + r * l->pitch + d * l->step) == 0;
}

/* ---- masks -------------------------------------------------------------------------------------------- */

static cot_dropout_forward_args forward_args(void)
{
    cot_dropout_forward_args args;
    COT_INIT(&args);
    args.p = p;
    args.seed = seed;
    args.offset = offset;
    return args;
}

/* Draws the mask on the CPU, as bytes and as bits. */
static void draw_on_cpu(int64_t R, int64_t D, uint8_t *bytes, uint8_t *bits)
{
    float *x = calloc((size_t)(R * D), sizeof *x);
    cot_dropout_forward_args args = forward_args();
    args.x = cot_tensor_contiguous(x, COT_F32, 2, (int64_t[]){R, D});
    args.mask_out = cot_tensor_contiguous(bytes, COT_U8, 2, (int64_t[]){R, D});
    args.mask_bits_out = cot_tensor_contiguous(bits, COT_U8, 2, (int64_t[]){R, (D + 7) / 8});
    assert_ok(cot_dropout_forward(cpu, &args));
    free(x);
}

static void fail_at(const char *what, cot_dtype dtype, const layout *l, int64_t r, int64_t d)
{
    fail_msg("%s %s R %d D %d pitch %d step %d skipped %d: wrong at %d, %d", what, cot_dtype_name(dtype), (int)l->R,
             (int)l->D, (int)l->pitch, (int)l->step, (int)l->first_element, (int)r, (int)d);
}

/* y of x = 1 is 0 exactly where the element was dropped. The exported masks are those of the CPU. The backward drops
 * the same elements of dy = 1, in place or not. */
static void check_layout(const layout *l, cot_dtype dtype, bool in_place)
{
    const int64_t R = l->R, D = l->D, G = (D + 7) / 8;
    uint8_t *bytes = malloc((size_t)(R * D)), *bits = malloc((size_t)(R * G));
    draw_on_cpu(R, D, bytes, bits);
    mirrored x = make_ones(l, dtype), dy = make_ones(l, dtype), y = make_ones(l, dtype), dx = make_ones(l, dtype);
    mirrored out = mirrored_alloc(R * D, 0xee), bits_out = mirrored_alloc(R * G, 0xee);
    cot_dropout_forward_args f = forward_args();
    f.x = view(l, x.device, dtype);
    f.y = view(l, in_place ? x.device : y.device, dtype);
    f.mask_out = cot_tensor_contiguous(out.device, COT_U8, 2, (int64_t[]){R, D});
    f.mask_bits_out = cot_tensor_contiguous(bits_out.device, COT_U8, 2, (int64_t[]){R, G});
    assert_ok(cot_dropout_forward(gpu, &f));
    cot_dropout_backward_args b;
    COT_INIT(&b);
    b.p = p;
    b.seed = seed;
    b.offset = offset;
    b.dy = view(l, dy.device, dtype);
    b.dx = view(l, in_place ? dy.device : dx.device, dtype);
    assert_ok(cot_dropout_backward(gpu, &b));
    const mirrored *y_twin = in_place ? &x : &y, *dx_twin = in_place ? &dy : &dx;
    copy_to_host(y_twin), copy_to_host(dx_twin), copy_to_host(&out), copy_to_host(&bits_out);
    if (memcmp(out.host, bytes, (size_t)(R * D)) != 0)
        fail_at("mask_out", dtype, l, -1, -1);
    if (memcmp(bits_out.host, bits, (size_t)(R * G)) != 0)
        fail_at("mask_bits_out", dtype, l, -1, -1);
    for (int64_t r = 0; r < R; r++)
        for (int64_t d = 0; d < D; d++) {
            if (is_zero(l, y_twin, dtype, r, d) == (bytes[r * D + d] == 1))
                fail_at("y", dtype, l, r, d);
            if (is_zero(l, dx_twin, dtype, r, d) == (bytes[r * D + d] == 1))
                fail_at("dx", dtype, l, r, d);
        }
    free(bytes), free(bits);
    mirrored_free(&x), mirrored_free(&dy), mirrored_free(&y), mirrored_free(&dx), mirrored_free(&out),
        mirrored_free(&bits_out);
}

static void masks_are_the_cpus(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t c = 0; c < COUNT(columns); c++) {
            const int64_t D = columns[c], R = D > 1000 ? 37 : 300;
            const layout layouts[] = {
                {R, D, D, 1, 0},             /* contiguous */
                {R, D, D, 1, 1},             /* not aligned to 16 bytes */
                {R, D, D + 3, 1, 5},         /* rows of a wider matrix */
                {R, D, D + 8 - D % 8, 1, 0}, /* aligned rows whose last vector is partial */
                {R, D, 2 * D + 1, 2, 0},     /* every second column */
                {R, D, 1, R, 0},             /* transposed */
            };
            for (size_t i = 0; i < COUNT(layouts); i++)
                check_layout(&layouts[i], dtypes[t], i % 2 == 1);
        }
}

/* More rows than a tile has, and a partial last tile. */
static void rows_beyond_a_tile(void **state)
{
    (void)state;
    for (int64_t R = 120; R <= 130; R++)
        check_layout(&(layout){R, 72, 72, 1, 0}, COT_BF16, false);
    check_layout(&(layout){5000, 33, 33, 1, 0}, COT_F16, true);
}

static void memory_adds_to_seed_and_offset(void **state)
{
    (void)state;
    enum { R = 20, D = 100 };
    const uint64_t seed_words = UINT64_C(0xffffffff00000005), offset_words = UINT64_C(0x80000001ffffffff);
    uint8_t bytes[R * D], bits[R * 13];
    draw_on_cpu(R, D, bytes, bits);
    mirrored words = mirrored_alloc(24, 0), x = mirrored_alloc(R * D * 4, 0), out = mirrored_alloc(R * D, 0);
    const uint32_t contents[6] = {(uint32_t)seed_words,           77,
                                  (uint32_t)(seed_words >> 32),   (uint32_t)offset_words,
                                  (uint32_t)(offset_words >> 32), 0};
    memcpy(words.host, contents, sizeof contents);
    copy_to_device(&words);
    cot_dropout_forward_args args = forward_args();
    args.seed -= seed_words;
    args.offset -= offset_words;
    args.x = cot_tensor_contiguous(x.device, COT_F32, 2, (int64_t[]){R, D});
    args.mask_out = cot_tensor_contiguous(out.device, COT_U8, 2, (int64_t[]){R, D});
    args.seed_tensor = cot_tensor_contiguous(words.device, COT_I32, 1, (int64_t[]){2});
    args.seed_tensor.stride[0] = 2;
    args.offset_tensor = cot_tensor_contiguous((char *)words.device + 12, COT_I32, 1, (int64_t[]){2});
    assert_ok(cot_dropout_forward(gpu, &args));
    copy_to_host(&out);
    assert_memory_equal(out.host, bytes, R * D);
    mirrored_free(&words), mirrored_free(&x), mirrored_free(&out);
}

int main(void)
{
    const int none = open_device_queue(&gpu);
    if (none != 0)
        return none;
    if (cot_queue_create(NULL, &cpu) != COT_OK) {
        fprintf(stderr, "%s\n", cot_error_message());
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_are_the_cpus),
        cmocka_unit_test(rows_beyond_a_tile),
        cmocka_unit_test(memory_adds_to_seed_and_offset),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cot_queue_destroy(gpu);
    cot_queue_destroy(cpu);
    return failed;
}
