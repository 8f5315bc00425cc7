/* SPDX-License-Identifier: Apache-2.0
 *
 * diff_command.c: `cotangent diff A B` compares tensors in files by the error rule (check/compare.h).
 *
 * The rule needs an oracle r, the magnitudes m of its sums and the scalar kernel's values s. Two files have none of
 * these. They are replaced as follows:
 *   r   B's value.
 *   m   sqrt(N) * max(|r|, the root mean square of r's tensor). N = --terms is the number of terms that an element sums
 *       up. N terms of size t with random signs add up to sqrt(N)*t, and their absolute values to N*t. An element that
 *       is small because its terms cancelled had terms as large as its neighbours'.
 *   u   Each side may have its own rounding and summation errors. The tolerance is
 *           u_A*|r| + 4*u_midA*m   +   u_B*|r| + 4*u_midB*m        u_mid: f64's unit for f64, else f32's
 *       For an f64 reference this is the rule itself, and of two f32 or bf16 results each may have errors.
 *   s   Missing, so the norm rule does not apply. The report still prints the error's norm in ulp.
 * Integers must be equal. Equal infinities, and NaN in both files, count as equal. */
#include "check/compare.h"
#include "check/storage.h"
#include "commands.h"
#include "core/tensor.h"
#include "tensor_file.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* An estimate for convolutions and attention heads. It is strict: two f32 results may differ by 2^-18 of the rms. */
enum { DEFAULT_TERMS = 64 };

typedef struct diff_input {
    char *paths[2];
    long terms;
} diff_input;

typedef struct diff_tally {
    double sqrt_terms; /* square root of --terms */
    int64_t same, within, beyond;
} diff_tally;

static bool is_float(const cot_tensor *tensor)
{
    return (COT_FLOATS & COT_DTYPE_BIT(tensor->dtype)) != 0;
}

static bool same_shape(const cot_tensor *a, const cot_tensor *b)
{
    return a->rank == b->rank && memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
}

static bool same_bits(const cot_tensor *a, const cot_tensor *b)
{
    const size_t size = cot_dtype_size(a->dtype);
    for (int64_t n = 0; n < cot_elements(a); n++)
        if (memcmp((char *)a->data + element_position(a, n) * (int64_t)size,
                   (char *)b->data + element_position(b, n) * (int64_t)size, size) != 0)
            return false;
    return a->dtype == b->dtype;
}

static void print_shape(const cot_tensor *tensor)
{
    printf("%s [", cot_dtype_name(tensor->dtype));
    for (int axis = 0; axis < tensor->rank; axis++)
        printf("%s%" PRId64, axis > 0 ? "," : "", tensor->shape[axis]);
    putchar(']');
}

static double root_mean_square(const double *values, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += isfinite(values[i]) ? values[i] * values[i] : 0;
    return count > 0 ? sqrt(sum / (double)count) : 0;
}

static double mid_unit(cot_dtype dtype)
{
    return unit_roundoff(dtype == COT_F64 ? COT_F64 : COT_F32);
}

/* The magnitude with which the rule of the coarser dtype allows the errors of both sides. */
static double magnitude(double r, double rms, double sqrt_terms, cot_dtype coarse, cot_dtype fine)
{
    const double m = sqrt_terms * fmax(fabs(r), rms);
    const double sums = 4 * (mid_unit(coarse) + mid_unit(fine)) * m;
    return (sums + unit_roundoff(fine) * fabs(r)) / (4 * mid_unit(coarse));
}

static bool compare_floats(const char *name, const cot_tensor *a, const cot_tensor *b, double sqrt_terms)
{
    const int64_t elements = cot_elements(a);
    const bool a_is_coarser = unit_roundoff(a->dtype) >= unit_roundoff(b->dtype);
    cot_tensor shape = a_is_coarser ? *a : *b;
    double *y = tensor_values(a), *r = tensor_values(b), *m = allocate((size_t)elements, sizeof *m);
    const double rms = root_mean_square(r, elements);
    int64_t equal = 0;
    for (int64_t i = 0; i < elements; i++) {
        if ((isinf(y[i]) && y[i] == r[i]) || (isnan(y[i]) && isnan(r[i]))) {
            y[i] = r[i] = 0;
            equal++;
        }
        m[i] = magnitude(r[i], rms, sqrt_terms, shape.dtype, (a_is_coarser ? b : a)->dtype);
    }
    const cot_dtype intermediate = shape.dtype == COT_F64 ? COT_F64 : COT_F32;
    const comparison c = compare(y, r, m, NULL, elements, shape.dtype, intermediate, 1);
    comparison_report(stdout, name, &c, y, r, m, &shape, intermediate);
    if (equal > 0)
        printf("      %" PRId64 " elements are the same infinity or NaN in both\n", equal);
    free(y);
    free(r);
    free(m);
    return !c.failed;
}

static bool compare_integers(const char *name, const cot_tensor *a, const cot_tensor *b)
{
    int64_t difference_count = 0, first = -1, values[2] = {0};
    for (int64_t n = 0; n < cot_elements(a); n++) {
        int64_t elements[2];
        const cot_tensor *const sides[2] = {a, b};
        for (int i = 0; i < 2; i++) {
            const int64_t position = element_position(sides[i], n);
            elements[i] = sides[i]->dtype == COT_I32 ? ((const int32_t *)sides[i]->data)[position]
                                                     : ((const uint8_t *)sides[i]->data)[position];
        }
        if (elements[0] == elements[1])
            continue;
        if (difference_count++ == 0) {
            first = n;
            memcpy(values, elements, sizeof values);
        }
    }
    printf("    %s ", name);
    print_shape(a);
    if (difference_count == 0)
        printf(": equal\n");
    else
        printf(": FAILED, %" PRId64 " of %" PRId64 " elements differ, first number %" PRId64 ": %" PRId64
               ", expected %" PRId64 "\n",
               difference_count, cot_elements(a), first, values[0], values[1]);
    return difference_count == 0;
}

static void compare_tensors(const char *name, const cot_tensor *a, const cot_tensor *b, diff_tally *tally)
{
    const char *label = name[0] != '\0' ? name : "tensor";
    if (!same_shape(a, b) || is_float(a) != is_float(b)) {
        printf("    %s: FAILED, ", label);
        print_shape(a);
        printf(" against ");
        print_shape(b);
        putchar('\n');
        tally->beyond++;
    } else if (same_bits(a, b)) {
        printf("    %s ", label);
        print_shape(a);
        printf(": the same bits\n");
        tally->same++;
    } else if (is_float(a) ? compare_floats(label, a, b, tally->sqrt_terms) : compare_integers(label, a, b)) {
        tally->within++;
    } else {
        tally->beyond++;
    }
}

/* Prints the names that are in one file and not in the other. Returns their number. */
static int64_t report_missing(const tensor_file *here, const tensor_file *there, const char *path)
{
    int64_t missing = 0;
    for (int i = 0; here->has_names && i < here->count; i++) {
        if (safetensors_find(&there->tensors, tensor_file_name(here, i)) >= 0)
            continue;
        printf("    %s: FAILED, not in %s\n", tensor_file_name(here, i), path);
        missing++;
    }
    return missing;
}

/* Compares the tensors that both files have. Without a tally it only reads them, so that an unreadable tensor fails
 * before the first line is printed. */
static bool each_pair(tensor_file files[2], diff_tally *tally, io_error *error)
{
    for (int i = 0; i < files[0].count; i++) {
        cot_tensor a, b;
        const char *name = tensor_file_name(&files[0], i);
        const int other = files[0].has_names ? safetensors_find(&files[1].tensors, name) : 0;
        if (other < 0)
            continue;
        if (!tensor_file_get(&files[0], i, &a, error) || !tensor_file_get(&files[1], other, &b, error))
            return false;
        if (tally != NULL)
            compare_tensors(name, &a, &b, tally);
    }
    return true;
}

static bool compare_files(tensor_file files[2], char *const paths[2], diff_tally *tally, io_error *error)
{
    if (!each_pair(files, NULL, error) || !each_pair(files, tally, error))
        return false;
    tally->beyond += report_missing(&files[0], &files[1], paths[1]) + report_missing(&files[1], &files[0], paths[0]);
    return true;
}

static error_t parse(int key, char *argument, struct argp_state *state)
{
    diff_input *input = state->input;
    char **paths = input->paths;
    switch (key) {
    case 't': input->terms = parse_number(state, "--terms", argument, 1, 1000000000); return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num == 2)
            argp_error(state, "unexpected argument '%s'", argument);
        paths[state->arg_num] = argument;
        return 0;
    case ARGP_KEY_END:
        if (state->arg_num < 2)
            argp_error(state, "%s is missing", state->arg_num == 0 ? "A" : "B");
        if (is_safetensors_name(paths[0]) != is_safetensors_name(paths[1]))
            argp_error(state, "one of A and B is a .safetensors, the other is not");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

int command_diff(int argc, char **argv)
{
    static const struct argp_option options[] = {{"terms", 't', "N", 0, "Each element is a sum of N terms (64)", 0},
                                                 {0}};
    static const struct argp parser = {
        options,
        parse,
        "A B",
        "Compares two .npy, or two .safetensors name by name, by the error rule.\v"
        "B is the reference. An element of A passes within u*|b| + 4*u_mid*sqrt(N)*max(|b|, rms of B's tensor) of it, u "
        "being A's rounding unit and u_mid float32's, plus the same of B, whose dtype may be a finer one. Integers must be "
        "equal.\nExit status: 0 where all agree, 1 where something differs, 2 where a file cannot be read.",
        0,
        0,
        0};
    diff_input input = {.terms = DEFAULT_TERMS};
    parse_arguments(&parser, argc, argv, &input);
    tensor_file files[2] = {0};
    diff_tally tally = {.sqrt_terms = sqrt((double)input.terms)};
    io_error error;
    const bool good = tensor_file_open(&files[0], input.paths[0], &error) &&
                      tensor_file_open(&files[1], input.paths[1], &error) &&
                      compare_files(files, input.paths, &tally, &error);
    for (int i = 0; i < 2; i++)
        tensor_file_close(&files[i]);
    if (!good) {
        fflush(stdout);
        fprintf(stderr, "cotangent: %s\n", error.text);
        return error.out_of_memory ? 1 : 2;
    }
    printf("%" PRId64 " the same, %" PRId64 " within the rule, %" PRId64 " beyond it\n", tally.same, tally.within,
           tally.beyond);
    return tally.beyond > 0;
}
