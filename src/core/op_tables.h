/* SPDX-License-Identifier: Apache-2.0
 * op_tables.h: the macros for the tables of an op: its kernels, fields, options and directions (src/core/op.h).
 *
 * A `call` is op and direction, for example dropout_forward. Its argument struct is cot_dropout_forward_args.
 *
 * OP_kernels.def lists the kernels of an op, one entry each. The scalar kernels come first: plain loops for
 * every layout and dtype.
 *     COT_KERNEL_ENTRY(direction, name, isa, intermediate, admit, cost, workspace [, .plan = function] [, .scratch = function])
 * direction: FORWARD, BACKWARD...; isa: PORTABLE, AVX2...; intermediate: F32, F16 or BF16. The other columns are the members of
 * cot_kernel. Define COT_KERNEL_ENTRY before the list is included, and undefine it afterwards. */
#ifndef COT_CORE_OP_TABLES_H
#define COT_CORE_OP_TABLES_H

#include "op.h"

#include <stddef.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* A value of COT_KERNEL_ENTRY: a declaration of the kernel's function. */
#define COT_DECLARE_KERNEL(direction, name, ...) \
    cot_status name(cot_queue *queue, const void *problem, void *workspace);

/* A value of COT_KERNEL_ENTRY: the initializer of the cot_kernel in the table. direction_index: of the op's directions. */
#define COT_KERNEL_INITIALIZER(direction_index, name_, isa_, intermediate_, admit_, cost_, ...)                   \
    {                                                                                                             \
        .name = #name_, .direction = direction_index, .backend = COT_ISA_BACKEND(COT_ISA_##isa_),                 \
        .isa = COT_ISA_##isa_, .intermediate = COT_##intermediate_, .admit = admit_, .cost = cost_, .run = name_, \
        .workspace = __VA_ARGS__                                                                                  \
    }

/* Defines the function `name` for the member `plan` of cot_kernel. The plan is a struct of this type with the member
 * `bytes`, the size of the workspace. `expression` computes it from `problem`. */
#define COT_PLAN(name, type, expression)                                                     \
    _Static_assert(sizeof(type) <= COT_MAX_PLAN, "dispatch has enough memory for the plan"); \
    static inline size_t name(const void *problem, void *plan)                               \
    {                                                                                        \
        type *const to = plan;                                                               \
        *to = (expression);                                                                  \
        return to->bytes;                                                                    \
    }

/* The admissions of the scalar kernels: one computes in float32, one in f64. problem_sizes: the first member of every
 * problem of the op, which has the dtype. */
#define COT_ADMIT_SCALAR(problem_sizes)                                                                           \
    static inline const char *admit_scalar(const void *problem)                                                   \
    {                                                                                                             \
        return ((const problem_sizes *)problem)->dtype == COT_F64 ? "it computes in float32, the tensors are f64" \
                                                                  : NULL;                                         \
    }                                                                                                             \
    static inline const char *admit_scalar_f64(const void *problem)                                               \
    {                                                                                                             \
        return ((const problem_sizes *)problem)->dtype == COT_F64 ? NULL : "it supports f64 only";                \
    }

/* clang-format off */
/* A tensor of a call. COT_GRADIENT: an output to which `accumulate` adds. */
#define COT_FIELD(call, name, role) {#name, offsetof(cot_##call##_args, name), role, false}
#define COT_GRADIENT(call, name) {#name, offsetof(cot_##call##_args, name), COT_OUTPUT, true}

/* A member of a call's struct that is not a tensor. kind: I32, F64...; words and note: as in cot_option. */
#define COT_CALL_OPTION(call, name, kind, words, note) {#name, offsetof(cot_##call##_args, name), COT_OPTION_##kind, words, note}

/* A direction. `tables` is the prefix of its tables: tables_fields, tables_signature and validate_tables. The members that
 * follow are .problem_size, and COT_OPTIONS, COT_ACCUMULATE, .init and .check_index_data where the direction has them. */
#define COT_DIRECTION(op_, direction, tables, ...)                                               \
    {                                                                                            \
        .name = #direction,                                                                      \
        .call = #op_ "_" #direction,                                                             \
        .op = &cot_##op_##_op,                                                                   \
        .args_size = sizeof(cot_##op_##_##direction##_args),                                     \
        .workspace_offset = offsetof(cot_##op_##_##direction##_args, workspace),                 \
        .workspace_bytes_offset = offsetof(cot_##op_##_##direction##_args, workspace_bytes),     \
        .fields = tables##_fields,                                                               \
        .field_count = COUNT(tables##_fields),                                                   \
        .signature = tables##_signature,                                                         \
        .validate = validate_##tables,                                                           \
        __VA_ARGS__                                                                              \
    }
#define COT_OPTIONS(list) .options = list, .option_count = COUNT(list)
#define COT_ACCUMULATE(call) .accumulate_offset = offsetof(cot_##call##_args, accumulate)

/* An op with its table of directions, cot_OP_directions. */
#define COT_OP(op_, kernels_)                                \
    {                                                        \
        .name = #op_,                                        \
        .directions = cot_##op_##_directions,                \
        .direction_count = COUNT(cot_##op_##_directions),    \
        .kernels = kernels_,                                 \
        .kernel_count = COUNT(kernels_),                     \
    }

/* Defines the two public functions of a call, `name` and name_workspace. `name` is the whole name, such as
 * cot_dropout_forward, so that a search for the function finds its op. direction: an element of cot_OP_directions. */
#define COT_PUBLIC_CALL(name, direction)                                                           \
    cot_status name(cot_queue *queue, const name##_args *args)                                     \
    {                                                                                              \
        return cot_op_run(&(direction), queue, args);                                              \
    }                                                                                              \
    cot_status name##_workspace(cot_queue *queue, const name##_args *args, size_t *bytes)          \
    {                                                                                              \
        return cot_op_workspace(&(direction), queue, args, bytes);                                 \
    }
/* clang-format on */

#endif
