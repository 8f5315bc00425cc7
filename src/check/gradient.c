/* SPDX-License-Identifier: Apache-2.0
 *
 * gradient.c: compares the oracle's gradients with finite differences. For a loss L = sum over outputs of <dOUT, OUT>,
 * the direction that computes dIN from dOUT must agree with (L(IN + h) - L(IN - h)) / 2h, element by element. Names
 * relate the two directions: the gradient's field "dx" belongs to the primal's field "x". */
#include "bound_case.h"
#include "check.h"

#include "core/tensor.h"

#include <math.h>
#include <stdlib.h>

/* Fourth-order central differences have an error of h^4. With this step it is about as small as the rounding error of L
 * divided by h. */
static const double step = 1e-3;

typedef struct gradient_check {
    const cot_op_cases *cases;
    const cot_direction *primal;
    int primal_index;
    _Alignas(16) char args[COT_MAX_ARGS], magnitudes[COT_MAX_ARGS]; /* of the primal */
    double *weights[COT_MAX_FIELDS];                                /* dOUT of each output */
} gradient_check;

static int find_field(const cot_direction *direction, const char *prefix, const char *name)
{
    const size_t length = strlen(prefix);
    for (int f = 0; f < direction->field_count; f++)
        if (strncmp(direction->fields[f].name, prefix, length) == 0 &&
            strcmp(direction->fields[f].name + length, name) == 0)
            return f;
    return -1;
}

static double loss(gradient_check *d)
{
    double sum = 0;
    d->cases->oracles[d->primal_index](d->args, d->magnitudes);
    for (int f = 0; f < d->primal->field_count; f++) {
        const cot_tensor *out = cot_field_tensor(&d->primal->fields[f], d->args);
        for (int64_t i = 0; d->weights[f] != NULL && i < cot_elements(out); i++)
            if (!isinf(((double *)out->data)[i])) /* a constant: lse of a row that attends to no key */
                sum += d->weights[f][i] * ((double *)out->data)[i];
    }
    return sum;
}

static double derivative(gradient_check *d, double *value)
{
    const double original = *value;
    double sums[4];
    static const double steps[4] = {-2, -1, 1, 2};
    for (int i = 0; i < 4; i++) {
        *value = original + steps[i] * step;
        sums[i] = loss(d);
    }
    *value = original;
    return (8 * (sums[2] - sums[1]) - (sums[3] - sums[0])) / (12 * step);
}

/* Gives the primal direction the gradient's inputs, and outputs with the shapes of the gradients dOUT that are
 * present. */
static void bind_primal(gradient_check *d, const reference *ref)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    memset(d->args, 0, sizeof d->args);
    d->cases->primal_options(ref->c->direction, ref->c->args, d->args);
    for (int f = 0; f < d->primal->field_count; f++) {
        const cot_field *field = &d->primal->fields[f];
        const bool output = field->role == COT_OUTPUT;
        const int source = find_field(direction, output ? "d" : "", field->name);
        const cot_tensor *tensor =
            source < 0 ? NULL : cot_field_tensor(&direction->fields[source], (void *)ref->c->args);
        if (tensor == NULL || !cot_is_present(tensor))
            continue;
        const bool integers = ref->integers[source] != NULL;
        void *data = integers ? (void *)ref->integers[source] : ref->values[source];
        if (output) {
            d->weights[f] = ref->values[source];
            data = allocate((size_t)cot_elements(tensor), sizeof(double));
        }
        *cot_field_tensor(field, d->args) =
            cot_tensor_contiguous(data, integers ? COT_I32 : COT_F64, tensor->rank, tensor->shape);
    }
    memcpy(d->magnitudes, d->args, sizeof d->args);
    for (int f = 0; f < d->primal->field_count; f++)
        if (d->weights[f] != NULL) {
            cot_tensor *out = cot_field_tensor(&d->primal->fields[f], d->magnitudes);
            out->data = allocate((size_t)cot_elements(out), sizeof(double));
        }
}

static double gradient_error(gradient_check *d, const reference *ref, int gradient, int primal_field)
{
    const cot_tensor *in = cot_field_tensor(&d->primal->fields[primal_field], d->args);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < cot_elements(in); i++) {
        const double initial = ref->values[gradient] != NULL ? ref->values[gradient][i] : 0; /* accumulate */
        const double expected = derivative(d, (double *)in->data + i);
        const double actual = ref->expected[gradient][i] - initial;
        error += (actual - expected) * (actual - expected);
        norm += expected * expected;
    }
    /* The gradients of such small cases are of order 1. A much smaller norm is that of a zero gradient. */
    return sqrt(error) / fmax(sqrt(norm), 1e-2);
}

double check_gradient(const cot_op_cases *cases, const cot_case *c)
{
    const cot_direction *direction = case_direction(cases, c);
    gradient_check d = {.cases = cases, .primal_index = cases->primal(c->direction)};
    d.primal = &cases->op->directions[d.primal_index];
    reference ref = reference_make(cases, c);
    reference_run_oracle(&ref);
    bind_primal(&d, &ref);
    double worst = 0;
    for (int f = 0; f < d.primal->field_count; f++) {
        const int gradient = find_field(direction, "d", d.primal->fields[f].name);
        if (d.primal->fields[f].role == COT_OUTPUT || gradient < 0 || ref.expected[gradient] == NULL)
            continue;
        const double error = gradient_error(&d, &ref, gradient, f);
        worst = !(error <= worst) ? error : worst;
    }
    for (int f = 0; f < d.primal->field_count; f++)
        if (d.weights[f] != NULL) {
            free(cot_field_tensor(&d.primal->fields[f], d.args)->data);
            free(cot_field_tensor(&d.primal->fields[f], d.magnitudes)->data);
        }
    reference_free(&ref);
    return worst;
}
