/* SPDX-License-Identifier: Apache-2.0
 * cases.h: what an op gives to check and bench besides its kernels: an oracle and a list of cases. Linked into the
 * program, not into the library. */
#ifndef COT_CORE_CASES_H
#define COT_CORE_CASES_H

#include "op.h"

#include <math.h>
#include <string.h>

enum { COT_MAX_FIELDS = 32 };

/* What a case is good for; or-ed together. */
enum {
    COT_CASE_CHECK = 1,    /* every kernel against the oracle */
    COT_CASE_QUICK = 2,    /* part of check --quick too */
    COT_CASE_GRADIENT = 4, /* small enough for finite differences; only in a direction that has a primal */
    COT_CASE_BENCH = 8,
    COT_CASE_BENCH_CUDA = 16, /* bench --backend cuda */
    COT_CASE_CHECK_CUDA = 32, /* every kernel of that backend against the oracle, too many for the CPU's */
};

/* One call to make. `args` is the direction's argument struct with every tensor's dtype, shape and strides set and
 * its data null: whoever runs the case brings the memory. */
typedef struct cot_case {
    int direction;
    unsigned uses;
    _Alignas(16) char args[COT_MAX_ARGS];
    int64_t offset[COT_MAX_FIELDS]; /* elements left out before each field's first: misaligned slices */
    /* Of an output: how many elements have a factor in common that was summed up before, and with it that sum's error,
     * as h[token] * x[token, :] has; 0 = none. See compare.h. */
    int64_t shared[COT_MAX_FIELDS];
    bool any_order
        [COT_MAX_FIELDS]; /* of an output: the call leaves the order of its sums open, and with it the last bits */
    uint64_t seed;        /* of the data */
    /* A NaN or an infinity that takes the place of one element of a float input; 0 = none. */
    double special;
    int special_field;
    int64_t special_element; /* its row-major number */
    const char *layout;      /* for people and bench rows, like the two below */
    char shape[64];
    char options[96];
    double flops; /* of the whole call */
} cot_case;

typedef struct cot_op_cases {
    const cot_op *op;
    /* Calls visit for every case, always in the same order; stops when visit returns false. */
    void (*each)(bool (*visit)(void *context, const cot_case *), void *context);
    /* The case that words like "T=100" or "bf16" describe; returns the first word that it does not know, or NULL. */
    const char *(*parse)(int direction, int count, char *const words[], cot_case *c);
    const char *words_help;
    /* Contents of an i32 or u8 input, row-major. Float fields are random normal. */
    void (*fill)(const cot_case *c, const char *field, int32_t *data, int64_t elements);
    /* Makes sense of the random float inputs where the op needs more than that: scales a parameter, computes what an
     * earlier call would have saved. values: a field's elements as f64, row-major, NULL where it has none; they are
     * rounded to their dtypes before and after. May be NULL. */
    void (*prepare)(const cot_case *c, double *const values[COT_MAX_FIELDS]);
    /* Where the values of a float input lie about as a rule, for benches that do without `prepare`; NULL: about 0. */
    double (*typical)(const cot_case *c, const char *field);
    /* For each direction: computes the outputs of args, and into the same outputs of `magnitudes` the sum of the absolute
     * terms of each element: the formula evaluated with every term replaced by its absolute value. All tensors are
     * row-major; float ones and u8 outputs come as f64, integer inputs as i32. A NaN or an infinity among the inputs
     * follows the formula. A magnitude with its sign bit set allows NaN there instead: see check/compare.h. */
    void (*const *oracles)(const void *args, void *magnitudes);
    /* The direction whose gradient `direction` computes, or -1; and the options that the two have in common. */
    int (*primal)(int direction);
    void (*primal_options)(int direction, const void *args, void *primal_args);
} cot_op_cases;

/* What `each` visits with, until it is stopped: who makes the cases need not ask. */
typedef struct cot_case_visitor {
    bool (*visit)(void *context, const cot_case *);
    void *context;
    bool stopped;
} cot_case_visitor;

static inline void cot_visit_case(cot_case_visitor *v, const cot_case *c)
{
    v->stopped = v->stopped || !v->visit(v->context, c);
}

/* Every op's, in the order of cot_ops: in src/ops/cases.c. */
extern const cot_op_cases *const cot_all_cases[];

/* For oracles: is no value a NaN or an infinity? */
static inline bool cot_all_finite(const double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return false;
    return true;
}

/* Sets the sign bits of magnitudes: see cot_op_cases.oracles. */
static inline void cot_allow_nan(double *magnitudes, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        magnitudes[i] = copysign(magnitudes[i], -1);
}

/* The number of the field of this name, -1 = there is none. */
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

/* Prints one line and ends the program with exit status 1. For several threads at once, it prints one line. No file may be half
 * written then: the program opens its outputs after all of its work. */
_Noreturn void out_of_memory(size_t bytes);

/* calloc of one element more, so that none is never NULL; out_of_memory where there is no memory. */
void *allocate(size_t count, size_t size);

#endif
