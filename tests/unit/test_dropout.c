/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dropout.c: properties of dropout that `cotangent check` does not test.
 *
 * - Every kernel draws the masks that the header defines, for every dtype, layout and number of threads.
 * - The masks pass tests of randomness. The mean of y is that of x.
 * - p = 0 and p = 1 are exact.
 * - Arguments that may share memory give the same results. */
#include "support.h"

#include "core/cpu_features.h"
#include "core/float16.h"
#include "core/philox.h"

#include <cotangent/dropout.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};

/* Names of the kernels of a direction that this machine can run for a dtype. Returns their number. */
static int kernels_for(const char *direction, cot_dtype dtype, char names[5][64])
{
    static const struct {
        const char *suffix;
        uint32_t isa;
        bool f64;
    } all[] = {{"scalar_f64", COT_ISA_PORTABLE, true},     {"scalar", COT_ISA_PORTABLE, false},
               {"rows_portable", COT_ISA_PORTABLE, false}, {"rows_avx2", COT_ISA_AVX2, false},
               {"rows_avx512", COT_ISA_AVX512, false},     {"rows_avx512bf16", COT_ISA_AVX512BF16, false}};
    int count = 0;
    for (size_t i = 0; i < COUNT(all); i++)
        if (all[i].f64 == (dtype == COT_F64) && (dtype == COT_BF16 || all[i].isa != COT_ISA_AVX512BF16) &&
            (cot_cpu_features() & all[i].isa) == all[i].isa)
            snprintf(names[count++], 64, "dropout=dropout_%s_%s", direction, all[i].suffix);
    return count;
}

static void *allocate_zeros(int64_t bytes)
{
    void *memory = calloc((size_t)bytes + 1, 1);
    assert_non_null(memory);
    return memory;
}

static cot_tensor matrix(void *data, cot_dtype dtype, int64_t R, int64_t D)
{
    return cot_tensor_contiguous(data, dtype, 2, (int64_t[]){R, D});
}

/* The keep bit of an element, by the rule of the header. */
static bool is_kept(uint64_t seed, uint64_t offset, int64_t r, int64_t d, int64_t D, double p)
{
    const uint64_t i = (uint64_t)(r * ((D + 7) / 8) + d / 8);
    return cot_dropout_keep(seed, offset, i, cot_dropout_threshold(p)) >> (d % 8) & 1;
}

static cot_dropout_forward_args forward_args(double p, uint64_t seed, uint64_t offset)
{
    cot_dropout_forward_args args;
    COT_INIT(&args);
    args.p = p;
    args.seed = seed;
    args.offset = offset;
    return args;
}

/* The mask of a call, as bytes. The queue chooses the kernel. */
static uint8_t *mask_bytes(int64_t R, int64_t D, double p, uint64_t seed, uint64_t offset)
{
    cot_queue *queue = make_queue(NULL, 2);
    uint8_t *mask = allocate_zeros(R * D);
    float *x = allocate_zeros(R * D * 4);
    cot_dropout_forward_args args = forward_args(p, seed, offset);
    args.x = matrix(x, COT_F32, R, D);
    args.mask_out = matrix(mask, COT_U8, R, D);
    assert_ok(cot_dropout_forward(queue, &args));
    free(x);
    cot_queue_destroy(queue);
    return mask;
}

/* ---- the rule ----------------------------------------------------------------------------------------- */

enum { MAX_BYTES_OF_FLOAT = 8 };

/* Compares the exported masks with the rule. x and y have row stride `pitch` and column stride `step`. x is 1, so
 * that y is nonzero where the element is kept. */
static void check_mask(const char *kernel, int threads, cot_dtype dtype, int64_t R, int64_t D, int64_t pitch,
                       int64_t step)
{
    const uint64_t seed = 0x123456789abcdef, offset = UINT64_C(0xfedcba9876543210);
    const double p = 0.3;
    const int64_t G = (D + 7) / 8;
    cot_queue *queue = make_queue(kernel, threads);
    void *x = allocate_zeros((R * pitch + 1) * MAX_BYTES_OF_FLOAT),
         *y = allocate_zeros((R * pitch + 1) * MAX_BYTES_OF_FLOAT);
    uint8_t *bytes = allocate_zeros(R * D), *bits = allocate_zeros(R * G);
    for (int64_t i = 0; i < R * pitch; i++)
        cot_store_f64(x, dtype, i, 1);
    cot_dropout_forward_args args = forward_args(p, seed, offset);
    args.x = matrix(x, dtype, R, D);
    args.x.stride[0] = pitch;
    args.x.stride[1] = step;
    args.y = args.x;
    args.y.data = y;
    args.mask_out = matrix(bytes, COT_U8, R, D);
    args.mask_bits_out = matrix(bits, COT_U8, R, G);
    assert_ok(cot_dropout_forward(queue, &args));
    for (int64_t r = 0; r < R; r++)
        for (int64_t d = 0; d < D; d++) {
            const bool expected = is_kept(seed, offset, r, d, D, p);
            if (bytes[r * D + d] != expected || (bits[r * G + d / 8] >> (d % 8) & 1) != expected ||
                (cot_load_f64(y, dtype, r * pitch + d * step) != 0) != expected)
                fail_msg("%s, %d threads, %s, R %d D %d: wrong mask at %d, %d", kernel, threads, cot_dtype_name(dtype),
                         (int)R, (int)D, (int)r, (int)d);
        }
    for (int64_t r = 0; D % 8 != 0 && r < R; r++)
        assert_int_equal(bits[r * G + G - 1] >> (D % 8), 0);
    free(x), free(y), free(bytes), free(bits);
    cot_queue_destroy(queue);
}

static const int64_t column_counts[] = {1, 3, 7, 8, 130, 1023, 1024, 4096, 4097};

static void masks_follow_the_rule(void **state)
{
    (void)state;
    char names[5][64];
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        const int count = kernels_for("fwd", dtypes[t], names);
        for (int k = 0; k < count; k++)
            for (size_t c = 0; c < COUNT(column_counts); c++) {
                const int64_t D = column_counts[c], R = D > 1000 ? 6 : 67;
                check_mask(names[k], 1 + (int)c % 3, dtypes[t], R, D, D, 1);
                check_mask(names[k], 2, dtypes[t], R, D, D + 3, 1);
                check_mask(names[k], 3, dtypes[t], R, D, 2 * D, 2);
            }
    }
}

/* The backward of dy = 1 without an activation is c where the forward kept the element, and 0 elsewhere. */
static void backward_draws_the_same_mask(void **state)
{
    (void)state;
    char names[5][64];
    const double p = 0.45;
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        const int count = kernels_for("bwd", dtypes[t], names);
        for (int k = 0; k < count; k++)
            for (size_t c = 0; c < COUNT(column_counts); c++) {
                const int64_t D = column_counts[c], R = D > 1000 ? 5 : 70;
                cot_queue *queue = make_queue(names[k], 1 + (int)c % 3);
                void *dy = allocate_zeros(R * D * MAX_BYTES_OF_FLOAT), *dx = allocate_zeros(R * D * MAX_BYTES_OF_FLOAT);
                for (int64_t i = 0; i < R * D; i++)
                    cot_store_f64(dy, dtypes[t], i, 1);
                cot_dropout_backward_args args;
                COT_INIT(&args);
                args.p = p;
                args.seed = 5;
                args.offset = 6;
                args.dy = matrix(dy, dtypes[t], R, D);
                args.dx = matrix(dx, dtypes[t], R, D);
                assert_ok(cot_dropout_backward(queue, &args));
                uint8_t *mask = mask_bytes(R, D, p, 5, 6);
                for (int64_t i = 0; i < R * D; i++)
                    assert_int_equal(cot_load_f64(dx, dtypes[t], i) != 0, mask[i]);
                free(dy), free(dx), free(mask);
                cot_queue_destroy(queue);
            }
    }
}

static void memory_adds_to_seed_and_offset(void **state)
{
    (void)state;
    enum { R = 20, D = 100 };
    const uint64_t seed_words = UINT64_C(0xffffffff00000005), offset_words = UINT64_C(0x80000001ffffffff);
    int32_t seed_tensor[4], offset_tensor[2] = {(int32_t)(uint32_t)offset_words, (int32_t)(offset_words >> 32)};
    seed_tensor[0] = (int32_t)(uint32_t)seed_words;
    seed_tensor[2] = (int32_t)(seed_words >> 32);
    float x[R * D] = {0};
    uint8_t mask[R * D];
    cot_queue *queue = make_queue(NULL, 1);
    cot_dropout_forward_args args = forward_args(0.5, UINT64_C(0x100000000), 3);
    args.x = matrix(x, COT_F32, R, D);
    args.mask_out = matrix(mask, COT_U8, R, D);
    args.seed_tensor = cot_tensor_contiguous(seed_tensor, COT_I32, 1, (int64_t[]){2});
    args.seed_tensor.stride[0] = 2;
    args.offset_tensor = cot_tensor_contiguous(offset_tensor, COT_I32, 1, (int64_t[]){2});
    assert_ok(cot_dropout_forward(queue, &args));
    uint8_t *expected = mask_bytes(R, D, 0.5, seed_words + UINT64_C(0x100000000), offset_words + 3);
    assert_memory_equal(mask, expected, R * D);
    free(expected);
    cot_queue_destroy(queue);
}

/* The leading axes are numbered as rows in row-major order, for any strides. */
static void leading_axes_are_rows(void **state)
{
    (void)state;
    enum { A = 3, B = 4, C = 5, D = 21, R = A * B * C };
    float x[R * D] = {0};
    uint8_t mask[R * D], bits[R * 3];
    uint8_t *expected = mask_bytes(R, D, 0.5, 1, 2);
    cot_queue *queue = make_queue(NULL, 2);
    cot_dropout_forward_args args = forward_args(0.5, 1, 2);
    const int64_t shape[] = {A, B, C, D};
    args.x = cot_tensor_contiguous(x, COT_F32, 4, shape);
    args.x.stride[0] = D, args.x.stride[1] = A * C * D, args.x.stride[2] = A * D; /* memory order [B,C,A,D] */
    args.mask_out = cot_tensor_contiguous(mask, COT_U8, 4, shape);
    args.mask_bits_out = cot_tensor_contiguous(bits, COT_U8, 4, (int64_t[]){A, B, C, 3});
    assert_ok(cot_dropout_forward(queue, &args));
    assert_memory_equal(mask, expected, R * D);
    for (int i = 0; i < R * D; i++)
        assert_int_equal(bits[i / D * 3 + i % D / 8] >> (i % D % 8) & 1, expected[i]);
    free(expected);
    cot_queue_destroy(queue);
}

/* ---- randomness --------------------------------------------------------------------------------------- */

/* Asserts that |hits - n q| is within the bound that a binomial exceeds with probability 0.001. */
static void assert_binomial(int64_t hits, double n, double q)
{
    const double deviation = fabs((double)hits - n * q) / sqrt(n * q * (1 - q));
    if (!(deviation <= 3.2905))
        fail_msg("%lld of %.0f hits, expected a share of %g: %.2f standard deviations", (long long)hits, n, q,
                 deviation);
}

static void keep_rates_are_binomial(void **state)
{
    (void)state;
    enum { R = 1000, D = 1003 };
    static const double probabilities[] = {0.01, 0.1, 0.5, 0.9};
    for (size_t i = 0; i < COUNT(probabilities); i++) {
        const double q = 1 / cot_dropout_scale(probabilities[i]);
        uint8_t *mask = mask_bytes(R, D, probabilities[i], 2024, i);
        int64_t all = 0, per_column[8] = {0}, even_rows = 0;
        double n_per_column[8] = {0};
        for (int64_t r = 0; r < R; r++)
            for (int64_t d = 0; d < D; d++) {
                all += mask[r * D + d];
                per_column[d % 8] += mask[r * D + d];
                n_per_column[d % 8]++;
                even_rows += r % 2 == 0 ? mask[r * D + d] : 0;
            }
        assert_binomial(all, (double)R * D, q);
        assert_binomial(even_rows, (double)R * D / 2, q);
        for (int k = 0; k < 8; k++)
            assert_binomial(per_column[k], n_per_column[k], q);
        free(mask);
    }
}

/* Counts the elements that both masks keep. For independent masks the probability is q^2. A mask is also compared
 * with a shifted copy of itself. */
static void assert_uncorrelated(const uint8_t *a, const uint8_t *b, int64_t n, double q)
{
    int64_t both = 0;
    for (int64_t i = 0; i < n; i++)
        both += a[i] & b[i];
    assert_binomial(both, (double)n, q * q);
}

static void masks_are_uncorrelated(void **state)
{
    (void)state;
    enum { R = 500, D = 1024, N = R * D };
    static const int64_t shifts[] = {1, 2, 3, 4, 7, 8, 9, 16, 64, 128, 129, D, D + 1, 2 * D};
    for (int half = 0; half < 2; half++) {
        const double p = half ? 0.5 : 0.2, q = 1 / cot_dropout_scale(p);
        uint8_t *mask = mask_bytes(R, D, p, 7, 100);
        for (size_t i = 0; i < COUNT(shifts); i++)
            assert_uncorrelated(mask, mask + shifts[i], N - shifts[i], q);
        static const uint64_t others[][2] = {
            {7, 101}, {7, 102}, {7, 0}, {7, 100 + (UINT64_C(1) << 32)}, {8, 100}, {7 + (UINT64_C(1) << 32), 100},
            {100, 7}};
        for (size_t i = 0; i < COUNT(others); i++) {
            uint8_t *other = mask_bytes(R, D, p, others[i][0], others[i][1]);
            assert_uncorrelated(mask, other, N, q);
            free(other);
        }
        free(mask);
    }
}

/* The difference between the mean of y over many masks and x, in standard errors. */
static double mean_error(double p, double c, uint64_t masks)
{
    enum { D = 1024, R = 1024 };
    float *x = allocate_zeros(R * D * 4), *y = allocate_zeros(R * D * 4);
    double sum = 0, variance = 0;
    cot_queue *queue = make_queue(NULL, 2);
    for (int64_t i = 0; i < R * D; i++)
        x[i] = (float)(i % 1021) / 1021 + 0.5f;
    for (uint64_t offset = 0; offset < masks; offset++) {
        cot_dropout_forward_args args = forward_args(p, 11, offset);
        args.scale = c;
        args.x = matrix(x, COT_F32, R, D);
        args.y = matrix(y, COT_F32, R, D);
        assert_ok(cot_dropout_forward(queue, &args));
        for (int64_t i = 0; i < R * D; i++)
            sum += (double)y[i] - (double)x[i];
    }
    for (int64_t i = 0; i < R * D; i++)
        variance += (double)masks * (double)x[i] * (double)x[i] * (cot_dropout_scale(p) - 1);
    free(x), free(y);
    cot_queue_destroy(queue);
    return fabs(sum) / sqrt(variance);
}

/* c is computed from the threshold P, not from p. At p = 1.4/65536 (P = 1) the difference is 40 % of the drop rate,
 * which is enough to detect the usual 1/(1-p). */
static void the_mean_is_the_undropped_value(void **state)
{
    (void)state;
    assert_true(cot_dropout_scale(0.3) == 65536.0 / (65536 - 19661));
    assert_true(cot_dropout_scale(1.4 / 65536) == 65536.0 / 65535);
    assert_true(cot_dropout_scale(0.4 / 65536) == 1);
    assert_true(cot_dropout_scale(1) == 0);
    assert_true(isnan(cot_dropout_scale(1.5)) && isnan(cot_dropout_scale(-0.5)) && isnan(cot_dropout_scale(NAN)));
    assert_true(mean_error(0.3, 0, 20) <= 3.2905);
    assert_true(mean_error(0.9, 0, 20) <= 3.2905);
    assert_true(mean_error(1.4 / 65536, 0, 60) <= 3.2905);
    assert_true(mean_error(1.4 / 65536, 1 / (1 - 1.4 / 65536), 60) > 8);
}

/* ---- p = 0 and p = 1, inf and NaN ------------------------------------------------------------------------ */

static void the_ends_are_exact(void **state)
{
    (void)state;
    enum { R = 9, D = 37, N = R * D };
    char names[5][64];
    static const double odd[] = {0, -0.0, 1, -1, 0.3, 60000, -1e-7};
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        const int count = kernels_for("fwd", dtypes[t], names);
        const size_t size = cot_dtype_size(dtypes[t]);
        for (int k = 0; k < count; k++) {
            cot_queue *queue = make_queue(names[k], 2);
            void *x = allocate_zeros(N * MAX_BYTES_OF_FLOAT), *y = allocate_zeros(N * MAX_BYTES_OF_FLOAT);
            void *residual = allocate_zeros(N * MAX_BYTES_OF_FLOAT);
            uint8_t mask[N];
            memset(mask, 1, N);
            for (int i = 0; i < N; i++) {
                cot_store_f64(x, dtypes[t], i, odd[i % (int)COUNT(odd)]);
                cot_store_f64(residual, dtypes[t], i, i % 5 - 2.5);
            }
            cot_dropout_forward_args args = forward_args(0, 1, 1);
            args.x = matrix(x, dtypes[t], R, D);
            args.y = matrix(y, dtypes[t], R, D);
            assert_ok(cot_dropout_forward(queue, &args));
            assert_memory_equal(x, y, N * size);

            for (int i = 0; i < N; i++) /* a dropped inf or NaN becomes 0 */
                cot_store_f64(x, dtypes[t], i, i % 3 == 0 ? INFINITY : i % 3 == 1 ? NAN : -INFINITY);
            args.p = 1;
            for (int mask_given = 0; mask_given < 2; mask_given++) {
                if (mask_given)
                    args.mask = matrix(mask, COT_U8, R, D);
                args.residual = matrix(residual, dtypes[t], R, D);
                assert_ok(cot_dropout_forward(queue, &args));
                assert_memory_equal(residual, y, N * size);
                args.residual = (cot_tensor){0};
                assert_ok(cot_dropout_forward(queue, &args));
                for (int i = 0; i < N; i++)
                    assert_true(cot_load_f64(y, dtypes[t], i) == 0);
            }
            args.p = 0.5; /* also where only some elements are dropped */
            args.mask = (cot_tensor){0};
            args.mask_out = matrix(mask, COT_U8, R, D);
            assert_ok(cot_dropout_forward(queue, &args));
            for (int i = 0; i < N; i++)
                assert_true(mask[i] ? !isfinite(cot_load_f64(y, dtypes[t], i)) : cot_load_f64(y, dtypes[t], i) == 0);
            free(x), free(y), free(residual);
            cot_queue_destroy(queue);
        }
    }
}

static void the_backward_ends_are_exact(void **state)
{
    (void)state;
    enum { R = 9, D = 37, N = R * D };
    char names[5][64];
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        const int count = kernels_for("bwd", dtypes[t], names);
        for (int k = 0; k < 2 * count; k++) {
            cot_queue *queue = make_queue(names[k / 2], 2);
            void *dy = allocate_zeros(N * MAX_BYTES_OF_FLOAT), *dx = allocate_zeros(N * MAX_BYTES_OF_FLOAT);
            double dbias[D];
            uint8_t mask[N];
            memset(mask, 1, N);
            for (int i = 0; i < N; i++)
                cot_store_f64(dy, dtypes[t], i, NAN);
            cot_dropout_backward_args args;
            COT_INIT(&args);
            args.p = 1;
            args.activation = COT_ACTIVATION_GELU_ERF;
            args.dy = args.x = matrix(dy, dtypes[t], R, D);
            args.dx = matrix(dx, dtypes[t], R, D);
            args.dbias = cot_tensor_contiguous(dbias, dtypes[t], 1, (int64_t[]){D});
            if (k % 2)
                args.mask = matrix(mask, COT_U8, R, D);
            assert_ok(cot_dropout_backward(queue, &args));
            for (int i = 0; i < N; i++)
                assert_true(cot_load_f64(dx, dtypes[t], i) == 0);
            for (int d = 0; d < D; d++)
                assert_true(cot_load_f64(dbias, dtypes[t], d) == 0);
            free(dy), free(dx);
            cot_queue_destroy(queue);
        }
    }
}

/* ---- an exported mask as input ------------------------------------------------------------------------- */

static void exported_masks_give_the_same(void **state)
{
    (void)state;
    enum { R = 33, D = 77, N = R * D, G = (D + 7) / 8 };
    float x[N], drawn[N], from_bytes[N], from_bits[N];
    uint8_t bytes[N], bits[R * G];
    uint64_t seed = 3;
    cot_queue *queue = make_queue(NULL, 2);
    for (int i = 0; i < N; i++)
        x[i] = (float)random_real(&seed);
    cot_dropout_forward_args args = forward_args(0.3, 1, 1);
    args.activation = COT_ACTIVATION_GELU_TANH;
    args.x = matrix(x, COT_F32, R, D);
    args.y = matrix(drawn, COT_F32, R, D);
    args.mask_out = matrix(bytes, COT_U8, R, D);
    args.mask_bits_out = matrix(bits, COT_U8, R, G);
    assert_ok(cot_dropout_forward(queue, &args));
    args.mask_out = args.mask_bits_out = (cot_tensor){0};
    args.scale = cot_dropout_scale(0.3);
    args.mask = matrix(bytes, COT_U8, R, D);
    args.y.data = from_bytes;
    assert_ok(cot_dropout_forward(queue, &args));
    args.mask = (cot_tensor){0};
    args.mask_bits = matrix(bits, COT_U8, R, G);
    args.y.data = from_bits;
    assert_ok(cot_dropout_forward(queue, &args));
    assert_memory_equal(drawn, from_bytes, sizeof drawn);
    assert_memory_equal(drawn, from_bits, sizeof drawn);
    cot_queue_destroy(queue);
}

/* ---- derivatives --------------------------------------------------------------------------------------- */

/* Compares dx of the f64 kernel with central differences of its y, over both tails of the activation. */
static void derivatives_agree_with_differences(void **state)
{
    (void)state;
    enum { N = 3001 };
    const double h = 1e-3;
    static const cot_activation activations[] = {COT_ACTIVATION_SILU, COT_ACTIVATION_GELU_TANH, COT_ACTIVATION_GELU_ERF,
                                                 COT_ACTIVATION_RELU};
    double *x = allocate_zeros(N * 8), *dy = allocate_zeros(N * 8), *dx = allocate_zeros(N * 8), *y[4];
    cot_queue *queue = make_queue(NULL, 1);
    for (int i = 0; i < 4; i++)
        y[i] = allocate_zeros(N * 8);
    for (size_t k = 0; k < COUNT(activations); k++) {
        cot_dropout_forward_args f = forward_args(0, 0, 0);
        cot_dropout_backward_args b;
        COT_INIT(&b);
        f.activation = b.activation = activations[k];
        f.x = b.x = matrix(x, COT_F64, 1, N);
        b.dy = matrix(dy, COT_F64, 1, N);
        b.dx = matrix(dx, COT_F64, 1, N);
        for (int step = 0; step < 4; step++) { /* -2h, -h, h, 2h */
            for (int i = 0; i < N; i++)
                x[i] = (i - N / 2 + 0.5) * 0.008 + (step < 2 ? step - 2 : step - 1) * h;
            f.y = matrix(y[step], COT_F64, 1, N);
            assert_ok(cot_dropout_forward(queue, &f));
        }
        for (int i = 0; i < N; i++) {
            x[i] = (i - N / 2 + 0.5) * 0.008;
            dy[i] = 1;
        }
        assert_ok(cot_dropout_backward(queue, &b));
        for (int i = 0; i < N; i++) {
            const double difference = (8 * (y[2][i] - y[1][i]) - (y[3][i] - y[0][i])) / (12 * h);
            if (!(fabs(difference - dx[i]) <= 1e-10))
                fail_msg("activation %d at %g: %.15g, difference quotient %.15g", (int)activations[k], x[i], dx[i],
                         difference);
        }
    }
    for (int i = 0; i < 4; i++)
        free(y[i]);
    free(x), free(dy), free(dx);
    cot_queue_destroy(queue);
}

/* ---- arguments that share memory------------------------------------------------------------------------ */

static void outputs_may_be_their_inputs(void **state)
{
    (void)state;
    enum { R = 50, D = 1031, N = R * D };
    char names[5][64];
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        const int64_t bytes = N * (int64_t)cot_dtype_size(dtypes[t]);
        void *x = allocate_zeros(bytes), *residual = allocate_zeros(bytes), *y = allocate_zeros(bytes),
             *shared = allocate_zeros(bytes);
        uint64_t seed = 9;
        for (int i = 0; i < N; i++) {
            cot_store_f64(x, dtypes[t], i, random_real(&seed));
            cot_store_f64(residual, dtypes[t], i, random_real(&seed));
        }
        int count = kernels_for("fwd", dtypes[t], names);
        for (int k = 0; k < 2 * count; k++) {
            cot_queue *queue = make_queue(names[k / 2], 3);
            cot_dropout_forward_args args = forward_args(0.4, 1, 2);
            args.activation = COT_ACTIVATION_SILU;
            args.x = matrix(x, dtypes[t], R, D);
            args.residual = matrix(residual, dtypes[t], R, D);
            args.y = matrix(y, dtypes[t], R, D);
            assert_ok(cot_dropout_forward(queue, &args));
            args.y = matrix(shared, dtypes[t], R, D);
            memcpy(shared, k % 2 ? x : residual, (size_t)bytes);
            *(k % 2 ? &args.x : &args.residual) = args.y;
            assert_ok(cot_dropout_forward(queue, &args));
            assert_memory_equal(y, shared, (size_t)bytes);
            cot_queue_destroy(queue);
        }
        count = kernels_for("bwd", dtypes[t], names);
        for (int k = 0; k < 2 * count; k++) {
            cot_queue *queue = make_queue(names[k / 2], 3);
            cot_dropout_backward_args args;
            COT_INIT(&args);
            args.activation = COT_ACTIVATION_SILU;
            args.p = 0.4;
            args.x = matrix(x, dtypes[t], R, D);
            args.dy = matrix(residual, dtypes[t], R, D);
            args.dx = matrix(y, dtypes[t], R, D);
            assert_ok(cot_dropout_backward(queue, &args));
            args.dx = matrix(shared, dtypes[t], R, D);
            memcpy(shared, k % 2 ? x : residual, (size_t)bytes);
            *(k % 2 ? &args.x : &args.dy) = args.dx;
            assert_ok(cot_dropout_backward(queue, &args));
            assert_memory_equal(y, shared, (size_t)bytes);
            cot_queue_destroy(queue);
        }
        free(x), free(residual), free(y), free(shared);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_follow_the_rule),
        cmocka_unit_test(backward_draws_the_same_mask),
        cmocka_unit_test(memory_adds_to_seed_and_offset),
        cmocka_unit_test(leading_axes_are_rows),
        cmocka_unit_test(keep_rates_are_binomial),
        cmocka_unit_test(masks_are_uncorrelated),
        cmocka_unit_test(the_mean_is_the_undropped_value),
        cmocka_unit_test(the_ends_are_exact),
        cmocka_unit_test(the_backward_ends_are_exact),
        cmocka_unit_test(exported_masks_give_the_same),
        cmocka_unit_test(derivatives_agree_with_differences),
        cmocka_unit_test(outputs_may_be_their_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
