/* SPDX-License-Identifier: Apache-2.0
 * test_tensor.c: tests views, the checks of single tensors with their messages, and the overlap search, which is
 * compared with an enumeration of every byte. */
#include "support.h"

#include "core/tensor.h"

#include <stdio.h>

static cot_tensor strided(void *data, cot_dtype dtype, int rank, const int64_t *shape, const int64_t *stride)
{
    cot_tensor tensor = cot_tensor_contiguous(data, dtype, rank, shape);
    for (int axis = 0; axis < rank; axis++)
        tensor.stride[axis] = stride[axis];
    return tensor;
}

/* ---- dtypes and views --------------------------------------------------------------------------------- */

static void dtypes_have_sizes_and_names(void **state)
{
    (void)state;
    static const struct {
        int dtype;
        size_t size;
        const char *name;
    } all[] = {{COT_DTYPE_NONE, 0, "none"}, {COT_F32, 4, "f32"}, {COT_F16, 2, "f16"},
               {COT_BF16, 2, "bf16"},       {COT_F64, 8, "f64"}, {COT_I32, 4, "i32"},
               {COT_U8, 1, "u8"},           {7, 0, "?"},         {1000, 0, "?"}};
    for (size_t i = 0; i < COUNT(all); i++) {
        assert_int_equal(cot_dtype_size((cot_dtype)all[i].dtype), all[i].size);
        assert_string_equal(cot_dtype_name((cot_dtype)all[i].dtype), all[i].name);
    }
}

static void contiguous_is_row_major(void **state)
{
    (void)state;
    float data[24];
    const cot_tensor tensor = cot_tensor_contiguous(data, COT_F32, 3, SHAPE(2, 3, 4));
    assert_ptr_equal(tensor.data, data);
    assert_int_equal(tensor.dtype, COT_F32);
    assert_int_equal(tensor.rank, 3);
    assert_memory_equal(tensor.shape, SHAPE(2, 3, 4, 0, 0, 0), sizeof tensor.shape);
    assert_memory_equal(tensor.stride, SHAPE(12, 4, 1, 0, 0, 0), sizeof tensor.stride);
    assert_int_equal(cot_elements(&tensor), 24);
}

static void contiguous_takes_odd_shapes(void **state)
{
    (void)state;
    const cot_tensor absent = {0};
    const cot_tensor scalar = cot_tensor_contiguous(NULL, COT_F64, 0, NULL);
    assert_int_equal(scalar.dtype, COT_F64);
    assert_int_equal(cot_elements(&scalar), 1);
    const cot_tensor empty = cot_tensor_contiguous(NULL, COT_F32, 3, SHAPE(2, 0, 4));
    assert_memory_equal(empty.stride, SHAPE(4, 4, 1), 3 * sizeof(int64_t));
    assert_int_equal(cot_elements(&empty), 0);
    cot_tensor refused = cot_tensor_contiguous(NULL, COT_F32, -1, SHAPE(1));
    assert_memory_equal(&refused, &absent, sizeof absent);
    refused = cot_tensor_contiguous(NULL, COT_F32, COT_MAX_RANK + 1, SHAPE(1, 1, 1, 1, 1, 1, 1));
    assert_memory_equal(&refused, &absent, sizeof absent);
    refused = cot_tensor_contiguous(NULL, COT_F32, 1, NULL);
    assert_memory_equal(&refused, &absent, sizeof absent);
}

static void contiguous_of_an_overflowing_shape_is_refused_later(void **state)
{
    (void)state;
    const int64_t big = (int64_t)1 << 40;
    const cot_tensor tensor = cot_tensor_contiguous(NULL, COT_F32, 3, SHAPE(big, big, big));
    assert_fails(cot_check_tensor("call", "x", &tensor, COT_FLOATS, 3, 3), COT_INVALID_SHAPE,
                 "call: x reaches past 2^56 bytes (size 1099511627776, stride 9223372036854775807 on axis 0)");
}

static void extent_spans_negative_strides(void **state)
{
    (void)state;
    int64_t low = 1, high = 1;
    cot_tensor tensor = strided(NULL, COT_F32, 2, SHAPE(3, 4), SHAPE(-10, 2));
    cot_extent(&tensor, &low, &high);
    assert_int_equal(low, -80);
    assert_int_equal(high, 28);
    tensor.shape[0] = 0;
    cot_extent(&tensor, &low, &high);
    assert_int_equal(low, 0);
    assert_int_equal(high, 0);
    tensor = (cot_tensor){0};
    cot_extent(&tensor, &low, &high);
    assert_int_equal(high, 0);
}

/* ---- checks of one tensor ----------------------------------------------------------------------------- */

static void check_tensor_names_the_fault(void **state)
{
    (void)state;
    float data[8];
    cot_tensor t = {0};
    assert_ok(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2)); /* absent */
    assert_fails(cot_check_required("call", "x", &t), COT_INVALID_ARGUMENT, "call: x is required");

    t.data = data;
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_DTYPE,
                 "call: x has data or a rank but no dtype (an absent tensor is all zero)");
    t = (cot_tensor){.rank = 2};
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_DTYPE,
                 "call: x has data or a rank but no dtype (an absent tensor is all zero)");

    t = cot_tensor_contiguous(data, COT_F32, 2, SHAPE(2, 4));
    assert_ok(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2));
    assert_ok(cot_check_required("call", "x", &t));
    t.dtype = (cot_dtype)77;
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_DTYPE,
                 "call: x has the unknown dtype 77");
    t.dtype = COT_I32;
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_DTYPE,
                 "call: x has dtype i32, expected f32 or f16 or bf16 or f64");
    assert_fails(cot_check_tensor("call", "x", &t, COT_DTYPE_BIT(COT_U8), 2, 2), COT_INVALID_DTYPE,
                 "call: x has dtype i32, expected u8");
    t.dtype = COT_F32;
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 3, 3), COT_INVALID_SHAPE,
                 "call: x has 2 axes, expected 3");
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 0, 1), COT_INVALID_SHAPE,
                 "call: x has 2 axes, expected 0 to 1");
    t.rank = -1;
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 0, 6), COT_INVALID_SHAPE,
                 "call: x has -1 axes, expected 0 to 6");
    t.rank = INT32_MAX;
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 0, 6), COT_INVALID_SHAPE,
                 "call: x has 2147483647 axes, expected 0 to 6");
    t.rank = 2;
    assert_fails(cot_check_size("call", "x", &t, 1, "T", "dy", 5), COT_INVALID_SHAPE, "call: x has T=4, dy has T=5");
    assert_ok(cot_check_size("call", "x", &t, 1, "T", "dy", 4));
}

static void check_tensor_refuses_impossible_sizes(void **state)
{
    (void)state;
    cot_tensor t = strided(NULL, COT_F32, 2, SHAPE(2, -1), SHAPE(4, 1));
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_SHAPE,
                 "call: x has size -1 on axis 1, expected 0 or more");
    t = strided(NULL, COT_F32, 2, SHAPE(INT64_MIN, 2), SHAPE(4, 1));
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_SHAPE,
                 "call: x has size -9223372036854775808 on axis 0, expected 0 or more");
    t = strided(NULL, COT_F64, 1, SHAPE((int64_t)1 << 53), SHAPE(1));
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 1, 1), COT_INVALID_SHAPE,
                 "call: x has more than 2^56 bytes (size 9007199254740992 on axis 0)");
    /* Small storage, but a broadcast to too many elements. */
    t = strided(NULL, COT_F32, 2, SHAPE((int64_t)1 << 27, (int64_t)1 << 27), SHAPE(0, 0));
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_SHAPE,
                 "call: x has more than 2^56 bytes (size 134217728 on axis 1)");
    /* Also if another axis is empty: products of the other sizes must not overflow. */
    t = strided(NULL, COT_F32, 3, SHAPE(0, INT64_MAX, INT64_MAX), SHAPE(0, 0, 0));
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 3, 3), COT_INVALID_SHAPE,
                 "call: x has more than 2^56 bytes (size 9223372036854775807 on axis 1)");
}

static void check_tensor_refuses_impossible_strides(void **state)
{
    (void)state;
    static const struct {
        int64_t stride;
        const char *message;
    } cases[] = {
        {INT64_MAX, "call: x reaches past 2^56 bytes (size 3, stride 9223372036854775807 on axis 0)"},
        {INT64_MIN, "call: x reaches past 2^56 bytes (size 3, stride -9223372036854775808 on axis 0)"},
        {-INT64_MAX, "call: x reaches past 2^56 bytes (size 3, stride -9223372036854775807 on axis 0)"},
        {(int64_t)1 << 53, "call: x reaches past 2^56 bytes (size 3, stride 9007199254740992 on axis 0)"},
        {(int64_t)1 << 61, "call: x reaches past 2^56 bytes (size 3, stride 2305843009213693952 on axis 0)"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        cot_tensor t = strided(NULL, COT_F32, 2, SHAPE(3, 4), SHAPE(cases[i].stride, 1));
        assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_SHAPE, cases[i].message);
        t.shape[0] = 1; /* one element: its stride is ignored */
        assert_ok(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2));
        t.shape[0] = 0;
        assert_ok(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2));
    }
    /* Two axes that are valid alone and too large together. */
    const int64_t half = ((int64_t)1 << 53) - 2;
    const cot_tensor t = strided(NULL, COT_F32, 2, SHAPE(2, 3), SHAPE(half, half));
    assert_fails(cot_check_tensor("call", "x", &t, COT_FLOATS, 2, 2), COT_INVALID_SHAPE,
                 "call: x reaches past 2^56 bytes (size 3, stride 9007199254740990 on axis 1)");
}

static void check_data_wants_it_aligned(void **state)
{
    (void)state;
    _Alignas(16) char bytes[64];
    char message[128];
    cot_tensor t = {0};
    assert_ok(cot_check_data("call", "x", &t));
    t = cot_tensor_contiguous(NULL, COT_F32, 1, SHAPE(3));
    assert_fails(cot_check_data("call", "x", &t), COT_INVALID_ARGUMENT, "call: x has null data");
    t.shape[0] = 0;
    assert_ok(cot_check_data("call", "x", &t));
    t.shape[0] = 3;
    t.data = bytes + 2;
    snprintf(message, sizeof message, "call: x has data at %p, expected a multiple of 4 (one f32 element)", t.data);
    assert_fails(cot_check_data("call", "x", &t), COT_INVALID_LAYOUT, message);
    t.dtype = COT_BF16;
    assert_ok(cot_check_data("call", "x", &t));
    t.data = bytes + 1;
    t.dtype = COT_U8;
    assert_ok(cot_check_data("call", "x", &t));
}

/* ---- overlap ------------------------------------------------------------------------------------------ */

static bool overlaps(const cot_tensor *a, const cot_tensor *b)
{
    const cot_status status = cot_check_overlap("call", "y", a, "x", b);
    if (status != COT_OK)
        assert_fails(status, COT_INVALID_LAYOUT, "call: y overlaps x");
    return status != COT_OK;
}

static bool repeats(const cot_tensor *t)
{
    return cot_check_output("call", "y", t) != COT_OK;
}

static void interleaved_slices_do_not_overlap(void **state)
{
    (void)state;
    /* Three [B,D,T] views of adjacent channels of one [B,T,3*D] array. The memory is never read. */
    static float base[2048];
    const int64_t B = 8, D = 1024, T = 4096;
    const int64_t shape[] = {B, D, T}, stride[] = {T * 3 * D, 1, 3 * D};
    const cot_tensor first = strided(base, COT_F32, 3, shape, stride);
    const cot_tensor second = strided(base + D, COT_F32, 3, shape, stride);
    const cot_tensor late = strided(base + D - 1, COT_F32, 3, shape, stride);
    assert_false(overlaps(&first, &second));
    assert_true(overlaps(&first, &late));
    assert_true(overlaps(&first, &first));
    assert_false(repeats(&first));

    /* Even and odd elements. Also halves of elements of another size. */
    const cot_tensor even = strided(base, COT_F32, 1, SHAPE(1000), SHAPE(2));
    const cot_tensor odd = strided(base + 1, COT_F32, 1, SHAPE(1000), SHAPE(2));
    assert_false(overlaps(&even, &odd));
    const cot_tensor upper = strided((char *)base + 6, COT_BF16, 1, SHAPE(1000), SHAPE(4));
    assert_false(overlaps(&even, &upper));
    const cot_tensor lower = strided((char *)base + 2, COT_BF16, 1, SHAPE(1000), SHAPE(4));
    assert_true(overlaps(&even, &lower));
}

static void broadcast_is_no_output(void **state)
{
    (void)state;
    static float base[64];
    cot_tensor t = strided(base, COT_F32, 2, SHAPE(3, 4), SHAPE(0, 1));
    assert_fails(cot_check_output("call", "y", &t), COT_INVALID_LAYOUT,
                 "call: y is an output but its strides give two elements one address (axis 0, stride 0)");
    t = strided(base, COT_F32, 2, SHAPE(3, 4), SHAPE(3, 1));
    assert_fails(cot_check_output("call", "y", &t), COT_INVALID_LAYOUT,
                 "call: y is an output but its strides give two elements one address (axis 0, stride 3)");
    t = strided(base, COT_F32, 2, SHAPE(3, 4), SHAPE(4, -1));
    assert_ok(cot_check_output("call", "y", &t));
    t = strided(base, COT_F32, 2, SHAPE(1, 4), SHAPE(0, 1)); /* an axis of one element has no stride */
    assert_ok(cot_check_output("call", "y", &t));
    t = strided(base, COT_F32, 2, SHAPE(0, 4), SHAPE(0, 0));
    assert_ok(cot_check_output("call", "y", &t));
    t = (cot_tensor){0};
    assert_ok(cot_check_output("call", "y", &t));
    assert_ok(cot_check_overlap("call", "y", &t, "x", &t));
}

/* The stride of an axis of one element is never used. The search must not overflow at the largest extent that the
 * checks accept. (The build with sanitizers detects an overflow.) */
static void extreme_strides_do_not_overflow(void **state)
{
    (void)state;
    static float base[64];
    static const int64_t extremes[] = {INT64_MAX, INT64_MIN, -INT64_MAX, (int64_t)1 << 61};
    const cot_tensor plain = cot_tensor_contiguous(base, COT_F32, 1, SHAPE(8));
    for (size_t i = 0; i < COUNT(extremes); i++) {
        const cot_tensor t = strided(base, COT_F32, 3, SHAPE(2, 1, 4), SHAPE(4, extremes[i], 1));
        assert_ok(cot_check_tensor("call", "y", &t, COT_FLOATS, 3, 3));
        assert_ok(cot_check_output("call", "y", &t));
        assert_true(overlaps(&t, &plain));
        assert_true(overlaps(&plain, &t));
    }
    const int64_t reach = ((int64_t)1 << 54) - 8;
    for (int sign_a = -1; sign_a <= 1; sign_a += 2) {
        for (int sign_b = -1; sign_b <= 1; sign_b += 2) {
            const cot_tensor a = strided(base, COT_F32, 2, SHAPE(2, 2), SHAPE(sign_a * reach, 1));
            const cot_tensor b = strided(base + 8, COT_F32, 2, SHAPE(2, 2), SHAPE(sign_b * (reach - 8), 3));
            assert_ok(cot_check_tensor("call", "y", &a, COT_FLOATS, 2, 2));
            assert_ok(cot_check_tensor("call", "x", &b, COT_FLOATS, 2, 2));
            assert_ok(cot_check_output("call", "y", &a));
            /* If both strides are positive, a ends at 8 + (reach - 8), inside b. Otherwise the views do not overlap. */
            assert_true(overlaps(&a, &b) == (sign_a > 0 && sign_b > 0));
            assert_true(overlaps(&b, &a) == (sign_a > 0 && sign_b > 0));
        }
    }
}

/* Six axes of nearly equal strides have too many candidates. The search stops early and reports an overlap. */
static void hopeless_searches_are_refused(void **state)
{
    (void)state;
    static char base[1];
    const int64_t shape[] = {50, 50, 50, 50, 50, 50};
    const cot_tensor a = strided(base, COT_U8, 6, shape, SHAPE(2000, 2006, 2010, 2018, 2022, 2030));
    const cot_tensor b = strided(base + 1, COT_U8, 6, shape, SHAPE(2000, 2006, 2010, 2018, 2022, 2030));
    assert_true(overlaps(&a, &b));
}

/* Random views into `arena` start near its middle and reach at most 504 bytes either way. */
static _Alignas(8) char arena[4096];

/* Visits every byte of every element of t. Returns whether one was set in `marked`. Sets them if `set`. */
static bool visit_bytes(const cot_tensor *t, char marked[sizeof arena], bool set)
{
    const int64_t size = (int64_t)cot_dtype_size(t->dtype), elements = cot_elements(t);
    bool met = false;
    for (int64_t element = 0; element < elements; element++) {
        char *byte = marked + ((char *)t->data - arena);
        int64_t rest = element;
        for (int axis = t->rank - 1; axis >= 0; axis--) {
            byte += rest % t->shape[axis] * t->stride[axis] * size;
            rest /= t->shape[axis];
        }
        for (int64_t i = 0; i < size; i++) {
            met = met || byte[i];
            byte[i] = (char)(byte[i] || set);
        }
    }
    return met;
}

static cot_tensor random_view(uint64_t *seed)
{
    static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_F64, COT_U8};
    cot_tensor t = {.dtype = dtypes[random_int(seed, 0, 3)], .rank = (int32_t)random_int(seed, 0, 3)};
    const int64_t size = (int64_t)cot_dtype_size(t.dtype);
    t.data = arena + sizeof arena / 2 + random_int(seed, -64 / size, 64 / size) * size;
    for (int axis = 0; axis < t.rank; axis++) {
        t.shape[axis] = random_int(seed, random_int(seed, 0, 9) > 0, 4);
        t.stride[axis] = random_int(seed, -7, 7);
    }
    return t;
}

static void search_agrees_with_enumeration(void **state)
{
    (void)state;
    static char marked[sizeof arena];
    uint64_t seed = 1;
    int overlapping = 0, repeating = 0;
    enum { ROUNDS = 20000 };
    for (int round = 0; round < ROUNDS; round++) {
        const cot_tensor a = random_view(&seed), b = random_view(&seed);
        memset(marked, 0, sizeof marked);
        const bool repeated = visit_bytes(&a, marked, true), overlap = visit_bytes(&b, marked, false);
        assert_int_equal(repeats(&a), repeated);
        assert_int_equal(overlaps(&a, &b), overlap);
        assert_int_equal(overlaps(&b, &a), overlap);
        overlapping += overlap;
        repeating += repeated;
    }
    /* Both answers occurred often enough. */
    assert_in_range(overlapping, ROUNDS / 10, ROUNDS * 9 / 10);
    assert_in_range(repeating, ROUNDS / 10, ROUNDS * 9 / 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtypes_have_sizes_and_names),
        cmocka_unit_test(contiguous_is_row_major),
        cmocka_unit_test(contiguous_takes_odd_shapes),
        cmocka_unit_test(contiguous_of_an_overflowing_shape_is_refused_later),
        cmocka_unit_test(extent_spans_negative_strides),
        cmocka_unit_test(check_tensor_names_the_fault),
        cmocka_unit_test(check_tensor_refuses_impossible_sizes),
        cmocka_unit_test(check_tensor_refuses_impossible_strides),
        cmocka_unit_test(check_data_wants_it_aligned),
        cmocka_unit_test(interleaved_slices_do_not_overlap),
        cmocka_unit_test(broadcast_is_no_output),
        cmocka_unit_test(extreme_strides_do_not_overflow),
        cmocka_unit_test(hopeless_searches_are_refused),
        cmocka_unit_test(search_agrees_with_enumeration),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
