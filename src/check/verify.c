/* SPDX-License-Identifier: Apache-2.0 */
#include "verify.h"

#include "signature.h"

#include "core/tensor.h"

#include <stdlib.h>

static int32_t *integer_values(const cot_tensor *view)
{
    const int64_t elements = cot_elements(view);
    int32_t *values = allocate((size_t)elements, sizeof *values);
    for (int64_t n = 0; n < elements; n++)
        values[n] = view->dtype == COT_I32 ? ((const int32_t *)view->data)[element_position(view, n)]
                                           : ((const uint8_t *)view->data)[element_position(view, n)];
    return values;
}

/* The first kernel of a direction runs on the CPU and supports every call. */
static const cot_kernel *scalar_kernel(const cot_op *op, int direction)
{
    const cot_kernel *kernel = op->kernels;
    while (kernel->direction != direction)
        kernel++;
    return kernel;
}

static cot_status run_scalar(verification *v)
{
    const cot_direction *direction = case_direction(v->ref.cases, &v->c);
    char forced[160];
    snprintf(forced, sizeof forced, "%s=%s", direction->op->name, scalar_kernel(direction->op, v->c.direction)->name);
    cot_queue_options options;
    COT_INIT(&options);
    options.kernels = forced;
    cot_queue *queue = NULL;
    bound_case b;
    bound_case_make(&b, &v->ref, false);
    cot_status status = cot_queue_create(&options, &queue);
    if (status == COT_OK)
        status = cot_op_run(direction, queue, b.args);
    for (int f = 0; status == COT_OK && f < direction->field_count; f++)
        if (direction->fields[f].role != COT_INPUT && cot_is_present(&b.fields[f].view))
            v->scalar[f] = tensor_values(&b.fields[f].view);
    cot_queue_destroy(queue);
    bound_case_free(&b, direction);
    return status;
}

cot_status verification_begin(verification *v, const cot_op_cases *cases, int direction, const void *args)
{
    memset(v, 0, sizeof *v);
    v->c.direction = direction;
    memcpy(v->c.args, args, cases->op->directions[direction].args_size);
    v->ref = (reference){.cases = cases, .c = &v->c};
    const cot_direction *d = case_direction(cases, &v->c);
    for (int f = 0; f < d->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&d->fields[f], v->c.args);
        if (!cot_is_present(tensor) || !field_has_initial_value(d, &d->fields[f], args))
            continue;
        if (tensor->dtype == COT_I32 || tensor->dtype == COT_U8)
            v->ref.integers[f] = integer_values(tensor);
        else
            v->ref.values[f] = tensor_values(tensor);
    }
    const cot_status status = run_scalar(v); /* checks index data, which the oracle does not */
    if (status == COT_OK)
        reference_run_oracle(&v->ref);
    return status;
}

cot_dtype intermediate_of(const cot_tensor *view, const cot_kernel *kernel)
{
    return view->dtype == COT_F64 ? COT_F64 : kernel->intermediate;
}

/* The argument `norm` of compare_with_norm for output f: the 16-bit dtype that the signature gives it, where the output is
 * f32 instead and the kernel rounds to this dtype. */
static cot_dtype norm_dtype_of(const cot_direction *direction, const void *args, int f, const cot_kernel *kernel)
{
    _Alignas(16) char copy[COT_MAX_ARGS];
    char why[256];
    const cot_dtype out = cot_field_tensor(&direction->fields[f], (void *)args)->dtype;
    memcpy(copy, args, direction->args_size);
    memset(cot_field_tensor(&direction->fields[f], copy), 0, sizeof(cot_tensor));
    if (out != COT_F32 || shape_outputs(direction, copy, 1u << f, why, sizeof why) != NULL)
        return out;
    const cot_dtype usual = cot_field_tensor(&direction->fields[f], copy)->dtype;
    return usual == kernel->intermediate ? usual : out;
}

comparison compare_output(const reference *ref, const double *scalar, const void *args, int f, const cot_kernel *kernel,
                          const cot_tensor *view, const double *y)
{
    const int64_t shared = ref->c->shared[f] > 0 ? ref->c->shared[f] : 1;
    return compare_with_norm(y, ref->expected[f], ref->magnitudes[f], scalar, cot_elements(view), view->dtype,
                             intermediate_of(view, kernel),
                             norm_dtype_of(case_direction(ref->cases, ref->c), args, f, kernel), shared);
}

comparison verification_compare(const verification *v, int f, const void *args, const cot_kernel *kernel)
{
    const cot_direction *direction = case_direction(v->ref.cases, &v->c);
    const cot_tensor *view = cot_field_tensor(&direction->fields[f], (void *)args);
    double *y = tensor_values(view);
    const comparison c = compare_output(&v->ref, v->scalar[f], args, f, kernel, view, y);
    free(y);
    return c;
}

bool verification_end(const verification *v, const void *args, const cot_kernel *kernel, FILE *report)
{
    const cot_direction *direction = case_direction(v->ref.cases, &v->c);
    bool good = true;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *view = cot_field_tensor(&direction->fields[f], (void *)args);
        if (v->ref.expected[f] == NULL)
            continue;
        const comparison c = verification_compare(v, f, args, kernel);
        double *y = tensor_values(view);
        comparison_report(report, direction->fields[f].name, &c, y, v->ref.expected[f], v->ref.magnitudes[f], view,
                          intermediate_of(view, kernel));
        good = good && !c.failed;
        free(y);
    }
    return good;
}

void verification_free(verification *v)
{
    reference_free(&v->ref);
    for (int f = 0; f < COT_MAX_FIELDS; f++)
        free(v->scalar[f]);
}
