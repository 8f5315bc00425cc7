/* SPDX-License-Identifier: Apache-2.0
 * cases.h: the interface of an op's test cases and oracle, which check and bench use. Linked into the program, not into
 * the library. */
#ifndef COT_CASES_CASES_H
#define COT_CASES_CASES_H

#include "core/op.h"

#include <math.h>
#include <string.h>

enum { COT_MAX_FIELDS = 32 };

/* The uses of a case, combined with |. */
enum {
    COT_CASE_CHECK = 1,    /* check compares every kernel with the oracle */
    COT_CASE_QUICK = 2,    /* check --quick includes the case */
    COT_CASE_GRADIENT = 4, /* small enough for finite differences; only for a direction that has a primal */
    COT_CASE_BENCH = 8,
    COT_CASE_BENCH_CUDA = 16, /* bench --backend cuda */
    COT_CASE_CHECK_CUDA = 32, /* check compares only the CUDA kernels: too many cases for the CPU kernels */
};

/* One call. `args` is the direction's argument struct. Every tensor in it has its dtype, shape and strides, and null
 * data: the code that runs the case provides the memory. */
typedef struct cot_case {
    int direction;
    unsigned uses;
    _Alignas(16) char args[COT_MAX_ARGS];
    int64_t offset[COT_MAX_FIELDS]; /* for each field, elements skipped before the first: makes misaligned slices */
    /* For each output: the number of elements that have a common factor which is itself a rounded sum, and therefore a
     * common error. For example, h[token] is the common factor of h[token] * x[token, :]. 0 = none. See compare.h. */
    int64_t shared[COT_MAX_FIELDS];
    /* For each output: the call does not fix the order of the sums, so that the last bits may differ between runs. */
    bool nondeterministic[COT_MAX_FIELDS];
    uint64_t seed; /* of the random input data */
    /* A NaN or an infinity that replaces one element of a float input; 0 = none. */
    double special;
    int special_field;
    int64_t special_element; /* row-major index of that element */
    const char *layout;      /* layout, shape and options are descriptions, for reports */
    char shape[64];
    char options[104];
    double flops; /* floating-point operations of the whole call */
} cot_case;

typedef struct cot_op_cases {
    const cot_op *op;
    /* Calls visit for every case, always in the same order. Stops when visit returns false. */
    void (*each)(bool (*visit)(void *context, const cot_case *), void *context);
    /* Fills the case that the words describe, such as "T=100" or "bf16". Returns the first unknown word, or NULL. */
    const char *(*parse)(int direction, int count, char *const words[], cot_case *c);
    const char *options_help;
    /* Fills an i32 or u8 input, row-major. NULL if the op has none. Float inputs are filled with normally distributed
     * random numbers. */
    void (*fill)(const cot_case *c, const char *field, int32_t *data, int64_t elements);
    /* Adjusts the random float inputs where the op needs it: scales a parameter, or computes the values that an earlier
     * call would have saved. `values` has the elements of each field as f64, row-major, or NULL. The values are rounded
     * to their dtypes before and after the call. May be NULL. */
    void (*prepare)(const cot_case *c, double *const values[COT_MAX_FIELDS]);
    /* The typical value of a float input, for benchmarks that do not call `prepare`. NULL = 0 for every input. */
    double (*typical)(const cot_case *c, const char *field);
    /* For each direction, a function that computes the outputs of args. Into the outputs of `magnitudes` it writes the
     * magnitude of each element: the formula evaluated with every term replaced by its absolute value.
     * All tensors are row-major. Float tensors and u8 outputs are f64, integer inputs are i32. NaN and infinities among
     * the inputs follow the formula. A magnitude with its sign bit set allows NaN in place of the value, see
     * check/compare.h. */
    void (*const *oracles)(const void *args, void *magnitudes);
    /* primal: the direction whose gradient `direction` computes, or -1. primal_options: copies the options that the two
     * have in common. */
    int (*primal)(int direction);
    void (*primal_options)(int direction, const void *args, void *primal_args);
} cot_op_cases;

/* The visit function of `each`, with a flag that makes cot_visit_case ignore all cases after the first refusal. The
 * code that generates cases need not test the flag. */
typedef struct cot_case_visitor {
    bool (*visit)(void *context, const cot_case *);
    void *context;
    bool stopped;
} cot_case_visitor;

static inline void cot_visit_case(cot_case_visitor *v, const cot_case *c)
{
    v->stopped = v->stopped || !v->visit(v->context, c);
}

/* The cases of every op, in the order of cot_ops. Defined in src/cases/cases.c. */
extern const cot_op_cases *const cot_all_cases[];

/* Returns whether no value is a NaN or an infinity. For oracles. */
static inline bool cot_all_finite(const double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return false;
    return true;
}

/* Sets the sign bits of the magnitudes, which allows NaN: see cot_op_cases.oracles. */
static inline void cot_allow_nan(double *magnitudes, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        magnitudes[i] = copysign(magnitudes[i], -1);
}

/* The index of the field of this name, or -1. */
static inline int cot_field_index(const cot_direction *direction, const char *name)
{
    for (int field = 0; field < direction->field_count; field++)
        if (strcmp(direction->fields[field].name, name) == 0)
            return field;
    return -1;
}

static inline cot_tensor *cot_field_tensor(const cot_field *field, void *args)
{
    return (cot_tensor *)((char *)args + field->offset);
}

/* ---- memory of the program and of the oracles ---------------------------------------------------------------- */

/* Prints one line and exits with status 1. It prints only once if several threads call it. No output file is left half
 * written: the program opens its outputs after all other work. */
_Noreturn void out_of_memory(size_t bytes);

/* calloc of count + 1 elements, so that count = 0 does not return NULL. Calls out_of_memory on failure. */
void *allocate(size_t count, size_t size);

#endif
