/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tables.c: checks that every op's tables describe its argument structs. `cotangent run` builds arguments from
 * fields, options and signature; they must equal those of the op's cases. Every op of the list is tested. */
#include "support.h"

#include "check/check.h"
#include "check/signature.h"
#include "core/argument_checks.h"
#include "core/tensor.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct visitor {
    const cot_op_cases *cases;
    int64_t visited;
} visitor;

static size_t option_size(const cot_option *option)
{
    const bool wide =
        option->kind == COT_OPTION_I64 || option->kind == COT_OPTION_U64 || option->kind == COT_OPTION_F64;
    return wide ? 8 : 4;
}

/* Rebuilds the arguments from fields, options and struct_size, and asserts that the rest of the struct is unused. */
static bool rebuild(void *context, const cot_case *c)
{
    visitor *v = context;
    const cot_direction *direction = &v->cases->op->directions[c->direction];
    _Alignas(16) char args[COT_MAX_ARGS] = {0};
    assert_true(direction->field_count <= COT_MAX_TENSORS);
    memcpy(args, &direction->args_size, sizeof direction->args_size);
    for (int f = 0; f < direction->field_count; f++)
        memcpy(args + direction->fields[f].offset, c->args + direction->fields[f].offset, sizeof(cot_tensor));
    for (int o = 0; o < direction->option_count; o++)
        memcpy(args + direction->options[o].offset, c->args + direction->options[o].offset,
               option_size(&direction->options[o]));
    if (memcmp(args, c->args, direction->args_size) != 0) {
        char text[256];
        describe_case(v->cases, c, text, sizeof text);
        fail_msg("%s: its tables of fields and options leave out a member that this case sets: %s", direction->call,
                 text);
    }
    v->visited++;
    return true;
}

static void options_and_fields_are_the_whole_struct(void **state)
{
    (void)state;
    for (int i = 0; i < cot_op_count; i++) {
        visitor v = {.cases = cot_all_cases[i]};
        v.cases->each(rebuild, &v);
        assert_true(v.visited > 0);
    }
}

/* Removes the outputs of a case and derives them from the signature again. */
static bool reshape(void *context, const cot_case *c)
{
    visitor *v = context;
    const cot_direction *direction = &v->cases->op->directions[c->direction];
    _Alignas(16) char args[COT_MAX_ARGS];
    char why[256], text[256];
    uint32_t wanted = 0;
    memcpy(args, c->args, sizeof args);
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
        if (direction->fields[f].role == COT_OUTPUT && cot_is_present(tensor)) {
            memset(tensor, 0, sizeof *tensor);
            wanted |= 1u << f;
        }
    }
    describe_case(v->cases, c, text, sizeof text);
    if (shape_outputs(direction, args, wanted, why, sizeof why) != NULL)
        fail_msg("%s: %s (%s)", direction->call, why, text);
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *derived = cot_field_tensor(&direction->fields[f], args);
        const cot_tensor *expected = cot_field_tensor(&direction->fields[f], (void *)c->args);
        const bool same_shape =
            derived->rank == expected->rank &&
            memcmp(derived->shape, expected->shape, (size_t)derived->rank * sizeof *derived->shape) == 0;
        if (!same_shape || cot_is_present(derived) != cot_is_present(expected))
            fail_msg("%s: the signature gives %s another shape than this case: %s", direction->call,
                     direction->fields[f].name, text);
    }
    v->visited++;
    return true;
}

static void signatures_shape_the_outputs(void **state)
{
    (void)state;
    for (int i = 0; i < cot_op_count; i++) {
        visitor v = {.cases = cot_all_cases[i]};
        v.cases->each(reshape, &v);
        assert_true(v.visited > 0);
    }
}

/* ---- the signature language, on an op of this test ------------------------------------------------------ */

typedef struct toy_args {
    size_t struct_size;
    cot_tensor x, w, a, b, c;
} toy_args;

#define TOY(name, role)                              \
    {                                                \
#name, offsetof(toy_args, name), role, false \
    }
static const cot_field toy_fields[] = {TOY(x, COT_INPUT), TOY(w, COT_INPUT), TOY(a, COT_OUTPUT), TOY(b, COT_OUTPUT),
                                       TOY(c, COT_OUTPUT)};

static const char *toy(const char *signature, toy_args *args, char why[256])
{
    const cot_direction direction = {.call = "toy",
                                     .args_size = sizeof *args,
                                     .fields = toy_fields,
                                     .field_count = COUNT(toy_fields),
                                     .signature = signature};
    return shape_outputs(&direction, args, ~0u, why, 256);
}

static toy_args toy_inputs(cot_dtype x, cot_dtype w)
{
    toy_args args = {.struct_size = sizeof args};
    if (x != COT_DTYPE_NONE)
        args.x = cot_tensor_contiguous(NULL, x, 2, (const int64_t[]){3, 5});
    if (w != COT_DTYPE_NONE)
        args.w = cot_tensor_contiguous(NULL, w, 1, (const int64_t[]){7});
    return args;
}

static void terms_and_dtypes(void **state)
{
    (void)state;
    char why[256];
    toy_args args = toy_inputs(COT_BF16, COT_F16);
    args.x.stride[0] = 1, args.x.stride[1] = 3;
    assert_null(toy("x[M,N] w[K+2] a=x b:f32[K-1,2,Z|N] c:w[M]", &args, why));
    assert_memory_equal(args.a.shape, ((int64_t[]){3, 5}), 2 * sizeof(int64_t));
    assert_memory_equal(args.a.stride, ((int64_t[]){1, 3}), 2 * sizeof(int64_t)); /* also the layout */
    assert_int_equal(args.a.dtype, COT_BF16);
    assert_int_equal(args.b.rank, 3);
    assert_memory_equal(args.b.shape, ((int64_t[]){4, 2, 5}), 3 * sizeof(int64_t));
    assert_int_equal(args.b.dtype, COT_F32);
    assert_int_equal(args.c.dtype, COT_F16);
    args = toy_inputs(COT_F64, COT_DTYPE_NONE);
    assert_null(toy("x[M,N] w[K] a[] b:f32[N] c:w[M]", &args, why));
    assert_int_equal(args.a.rank, 0);
    assert_int_equal(args.b.dtype, COT_F64);
    assert_int_equal(args.c.dtype, COT_F64);
}

static void any_axes_and_quotients(void **state)
{
    (void)state;
    char why[256];
    toy_args args = toy_inputs(COT_F32, COT_F32);
    args.x = cot_tensor_contiguous(NULL, COT_F32, 4, (const int64_t[]){3, 5, 2, 17});
    assert_null(toy("x[...,D] w[K] a:u8[...,D/8] b[...,K,2] c:u8=x", &args, why));
    assert_int_equal(args.a.rank, 4);
    assert_memory_equal(args.a.shape, ((int64_t[]){3, 5, 2, 3}), 4 * sizeof(int64_t));
    assert_int_equal(args.a.dtype, COT_U8);
    assert_int_equal(args.b.rank, 5);
    assert_memory_equal(args.b.shape, ((int64_t[]){3, 5, 2, 7, 2}), 5 * sizeof(int64_t));
    assert_int_equal(args.c.dtype, COT_U8);
    args = toy_inputs(COT_F32, COT_F32);
    args.x = cot_tensor_contiguous(NULL, COT_F32, 1, (const int64_t[]){16});
    assert_null(toy("x[...,D] w[K] a:u8[...,D/8] b[D/5] c[K/7]", &args, why));
    assert_int_equal(args.a.rank, 1);
    assert_int_equal(args.a.shape[0], 2);
    assert_int_equal(args.b.shape[0], 4);
    assert_int_equal(args.c.shape[0], 1);
    args = toy_inputs(COT_DTYPE_NONE, COT_F32);
    assert_string_equal(toy("x[...,D] w[K] a[...,K] b=w c=w", &args, why),
                        "a has the axes of an input that is missing");
    args = toy_inputs(COT_F32, COT_F32);
    args.x = cot_tensor_contiguous(NULL, COT_F32, 6, (const int64_t[]){1, 1, 1, 1, 1, 1});
    assert_string_equal(toy("x[...,D] w[K] a[...,K,2,D] b=w c=w", &args, why),
                        "a has the axes of an input that is missing");
}

static void signatures_that_say_too_little(void **state)
{
    (void)state;
    char why[256];
    toy_args args = toy_inputs(COT_F32, COT_DTYPE_NONE);
    assert_string_equal(toy("x[M,N] w[K] a[K] b=x c=x", &args, why), "a has a size K, which no input gives");
    args = toy_inputs(COT_F32, COT_DTYPE_NONE);
    assert_string_equal(toy("x[M,N] w[K] a=w b=x c=x", &args, why), "a has the shape of w, which is missing");
    static const char *const wrong[] = {NULL,
                                        "",
                                        "x[M,N] w[K] a=x b=x",
                                        "x[M,N] w[K] a=x c=x b=x",
                                        "x[M,N w[K] a=x b=x c=x",
                                        "x[M,N] w[K] a=x b=x c=x d=x"};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        args = toy_inputs(COT_F32, COT_F32);
        assert_string_equal(toy(wrong[i], &args, why), "toy has no signature that matches its fields");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_and_fields_are_the_whole_struct),
        cmocka_unit_test(signatures_shape_the_outputs),
        cmocka_unit_test(terms_and_dtypes),
        cmocka_unit_test(any_axes_and_quotients),
        cmocka_unit_test(signatures_that_say_too_little),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
