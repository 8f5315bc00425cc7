/* SPDX-License-Identifier: Apache-2.0 */
#include "bound_case.h"

#include "core/float16.h"
#include "core/queue.h"
#include "core/tensor.h"
#include "random.h"

#include <stdlib.h>

const cot_direction *case_direction(const cot_op_cases *cases, const cot_case *c)
{
    return &cases->op->directions[c->direction];
}

bool field_begins_with_value(const cot_direction *direction, const cot_field *field, const void *args)
{
    int32_t accumulate = 0;
    if (field->accumulates)
        memcpy(&accumulate, (const char *)args + direction->accumulate_offset, sizeof accumulate);
    return field->role != COT_OUTPUT || accumulate != 0;
}

static void round_to(cot_dtype dtype, double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        double cell; /* any dtype fits */
        cot_store_f64(&cell, dtype, 0, values[i]);
        values[i] = cot_load_f64(&cell, dtype, 0);
    }
}

reference reference_make(const cot_op_cases *cases, const cot_case *c)
{
    reference ref = {.cases = cases, .c = c};
    const cot_direction *direction = case_direction(cases, c);
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)c->args);
        if (!cot_present(tensor))
            continue;
        const int64_t count = cot_elements(tensor);
        if (tensor->dtype == COT_I32) {
            ref.integers[f] = allocate((size_t)count, sizeof(int32_t));
            if (count > 0)
                cases->fill(c, direction->fields[f].name, ref.integers[f], count);
        } else if (field_begins_with_value(direction, &direction->fields[f], c->args)) {
            ref.values[f] = allocate((size_t)count, sizeof(double));
            random_normal(c->seed * COT_MAX_FIELDS + (uint64_t)f, ref.values[f], count);
            round_to(tensor->dtype, ref.values[f], count);
        }
    }
    if (cases->prepare != NULL)
        cases->prepare(c, ref.values);
    for (int f = 0; cases->prepare != NULL && f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)c->args);
        if (ref.values[f] != NULL)
            round_to(tensor->dtype, ref.values[f], cot_elements(tensor));
    }
    return ref;
}

static cot_tensor row_major(const cot_tensor *like, cot_dtype dtype, void *data)
{
    return cot_tensor_contiguous(data, dtype, like->rank, like->shape);
}

void reference_solve(reference *ref)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    _Alignas(16) char args[COT_MAX_ARGS], magnitudes[COT_MAX_ARGS];
    memcpy(args, ref->c->args, sizeof args);
    memcpy(magnitudes, ref->c->args, sizeof magnitudes);
    for (int f = 0; f < direction->field_count; f++) {
        const cot_field *field = &direction->fields[f];
        cot_tensor *tensor = cot_field_tensor(field, args);
        if (!cot_present(tensor))
            continue;
        const int64_t count = cot_elements(tensor);
        if (tensor->dtype == COT_I32) {
            *tensor = row_major(tensor, COT_I32, ref->integers[f]);
        } else if (field->role == COT_INPUT) {
            *tensor = row_major(tensor, COT_F64, ref->values[f]);
        } else {
            ref->expected[f] = allocate((size_t)count, sizeof(double));
            ref->magnitudes[f] = allocate((size_t)count, sizeof(double));
            if (ref->values[f] != NULL)
                memcpy(ref->expected[f], ref->values[f], (size_t)count * sizeof(double));
            *cot_field_tensor(field, magnitudes) = row_major(tensor, COT_F64, ref->magnitudes[f]);
            *tensor = row_major(tensor, COT_F64, ref->expected[f]);
        }
    }
    ref->cases->oracles[ref->c->direction](args, magnitudes);
}

void reference_free(reference *ref)
{
    for (int f = 0; f < COT_MAX_FIELDS; f++) {
        free(ref->values[f]);
        free(ref->integers[f]);
        free(ref->expected[f]);
        free(ref->magnitudes[f]);
    }
}

void bound_case_make(bound_case *b, const reference *ref, bool guarded)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    memcpy(b->args, ref->c->args, sizeof b->args);
    b->workspace = NULL;
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], b->args);
        b->fields[f] = storage_make(tensor, ref->c->offset[f], guarded);
        if (!cot_present(tensor))
            continue;
        *tensor = b->fields[f].view;
        if (tensor->dtype == COT_I32)
            tensor_store_i32(tensor, ref->integers[f]);
        else if (ref->values[f] != NULL)
            tensor_store(tensor, ref->values[f]);
    }
}

void bound_case_free(bound_case *b, const cot_direction *direction)
{
    for (int f = 0; f < direction->field_count; f++)
        storage_free(&b->fields[f]);
    free(b->workspace);
}

void bound_case_set_workspace(bound_case *b, const cot_direction *direction, size_t bytes)
{
    free(b->workspace);
    b->workspace = NULL;
    if (bytes > 0) {
        /* Exactly as many bytes as were asked for: the sanitizer sees one more. */
        b->workspace = aligned_alloc(COT_ALIGNMENT, cot_align(bytes));
        if (b->workspace == NULL)
            exit(1);
        memset(b->workspace, 0xff, cot_align(bytes));
    }
    memcpy(b->args + direction->workspace_offset, &b->workspace, sizeof b->workspace);
    memcpy(b->args + direction->workspace_bytes_offset, &bytes, sizeof bytes);
}
