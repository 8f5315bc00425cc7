/* SPDX-License-Identifier: Apache-2.0 */
#include "bound_case.h"

#include "core/float16.h"
#include "core/queue.h"
#include "core/tensor.h"
#include "cuda/memory.h"
#include "random.h"

#include <stdlib.h>

const cot_direction *case_direction(const cot_op_cases *cases, const cot_case *c)
{
    return &cases->op->directions[c->direction];
}

bool case_is_within(const cot_direction *direction, const cot_case *c, int64_t max_elements)
{
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)c->args);
        if (cot_is_present(tensor) && cot_elements(tensor) > max_elements)
            return false;
    }
    return true;
}

bool field_has_initial_value(const cot_direction *direction, const cot_field *field, const void *args)
{
    int32_t accumulate = 0;
    if (field->accumulates)
        memcpy(&accumulate, (const char *)args + direction->accumulate_offset, sizeof accumulate);
    return field->role != COT_OUTPUT || accumulate != 0;
}

static void round_to(cot_dtype dtype, double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        double buffer; /* large enough for every dtype */
        cot_store_f64(&buffer, dtype, 0, values[i]);
        values[i] = cot_load_f64(&buffer, dtype, 0);
    }
}

static bool is_integer(const cot_tensor *tensor)
{
    return tensor->dtype == COT_I32 || tensor->dtype == COT_U8;
}

static bool has_zero_stride(const cot_tensor *tensor)
{
    for (int axis = 0; axis < tensor->rank; axis++)
        if (tensor->stride[axis] == 0)
            return true;
    return false;
}

/* The first element, in row-major order, that has the same memory as element `number`. Elements share memory along axes
 * of stride 0. */
static int64_t first_alias(const cot_tensor *tensor, int64_t number)
{
    int64_t first = 0, stride = 1;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        first += tensor->stride[axis] == 0 ? 0 : number % tensor->shape[axis] * stride;
        number /= tensor->shape[axis];
        stride *= tensor->shape[axis];
    }
    return first;
}

/* Stores the case's NaN or infinity in its element, and in every element with the same memory. */
static void store_special(const reference *ref)
{
    const cot_case *c = ref->c;
    double *values = ref->values[c->special_field];
    if (c->special == 0 || values == NULL)
        return;
    const cot_field *field = &case_direction(ref->cases, c)->fields[c->special_field];
    const cot_tensor *tensor = cot_field_tensor(field, (void *)c->args);
    const int64_t alias = first_alias(tensor, c->special_element);
    for (int64_t n = 0; n < cot_elements(tensor); n++)
        if (n == alias || (has_zero_stride(tensor) && first_alias(tensor, n) == alias))
            values[n] = c->special;
}

reference reference_make(const cot_op_cases *cases, const cot_case *c)
{
    reference ref = {.cases = cases, .c = c};
    const cot_direction *direction = case_direction(cases, c);
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)c->args);
        if (!cot_is_present(tensor))
            continue;
        const int64_t count = cot_elements(tensor);
        if (is_integer(tensor) && direction->fields[f].role == COT_INPUT) {
            ref.integers[f] = allocate((size_t)count, sizeof(int32_t));
            if (count > 0)
                cases->fill(c, direction->fields[f].name, ref.integers[f], count);
            for (int64_t n = 0; n < count; n++)
                ref.integers[f][n] = ref.integers[f][first_alias(tensor, n)];
        } else if (field_has_initial_value(direction, &direction->fields[f], c->args)) {
            ref.values[f] = allocate((size_t)count, sizeof(double));
            random_normal(c->seed * COT_MAX_FIELDS + (uint64_t)f, ref.values[f], count);
            round_to(tensor->dtype, ref.values[f], count);
            for (int64_t n = 0; has_zero_stride(tensor) && n < count; n++)
                ref.values[f][n] = ref.values[f][first_alias(tensor, n)];
        }
    }
    store_special(&ref);
    if (cases->prepare != NULL)
        cases->prepare(c, ref.values);
    store_special(&ref); /* prepare computes some inputs from others and can overwrite it */
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

void reference_run_oracle(reference *ref)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    _Alignas(16) char args[COT_MAX_ARGS], magnitudes[COT_MAX_ARGS];
    memcpy(args, ref->c->args, sizeof args);
    memcpy(magnitudes, ref->c->args, sizeof magnitudes);
    for (int f = 0; f < direction->field_count; f++) {
        const cot_field *field = &direction->fields[f];
        cot_tensor *tensor = cot_field_tensor(field, args);
        if (!cot_is_present(tensor))
            continue;
        const int64_t count = cot_elements(tensor);
        if (ref->integers[f] != NULL) {
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
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], b->args);
        b->fields[f] = storage_make(tensor, ref->c->offset[f], guarded);
        if (!cot_is_present(tensor))
            continue;
        *tensor = b->fields[f].view;
        if (ref->integers[f] != NULL)
            tensor_store_integers(tensor, ref->integers[f]);
        else if (ref->values[f] != NULL)
            tensor_store(tensor, ref->values[f]);
    }
}

/* Fills all bytes that the view spans, including the gaps between its elements. */
static void fill_repeating(const cot_tensor *view, const double *values, int64_t count)
{
    const int64_t size = (int64_t)cot_dtype_size(view->dtype);
    char *block = allocate((size_t)count, (size_t)size);
    for (int64_t i = 0; i < count; i++)
        cot_store_f64(block, view->dtype, i, values[i]);
    int64_t low, high;
    cot_extent(view, &low, &high);
    for (int64_t offset = low; offset < high; offset += count * size)
        memcpy((char *)view->data + offset, block,
               (size_t)(high - offset < count * size ? high - offset : count * size));
    free(block);
}

void bound_case_make_repeating(bound_case *b, const cot_op_cases *cases, const cot_case *c)
{
    enum { PERIOD = 99991 }; /* a prime, so that the rows of a tensor differ */
    const cot_direction *direction = case_direction(cases, c);
    memcpy(b->args, c->args, sizeof b->args);
    double *values = allocate(PERIOD, sizeof *values);
    for (int f = 0; f < direction->field_count; f++) {
        const cot_field *field = &direction->fields[f];
        cot_tensor *tensor = cot_field_tensor(field, b->args);
        b->fields[f] = storage_make(tensor, c->offset[f], false);
        if (!cot_is_present(tensor))
            continue;
        *tensor = b->fields[f].view;
        if (is_integer(tensor) && field->role == COT_INPUT) {
            int32_t *integers = allocate((size_t)cot_elements(tensor), sizeof *integers);
            cases->fill(c, field->name, integers, cot_elements(tensor));
            tensor_store_integers(tensor, integers);
            free(integers);
        } else if (field_has_initial_value(direction, field, c->args)) {
            random_normal(c->seed * COT_MAX_FIELDS + (uint64_t)f, values, PERIOD);
            const double typical = cases->typical != NULL ? cases->typical(c, field->name) : 0;
            for (int i = 0; i < PERIOD; i++)
                values[i] += typical;
            fill_repeating(tensor, values, PERIOD);
        }
    }
    free(values);
}

void bound_case_free(bound_case *b, const cot_direction *direction)
{
    for (int f = 0; f < direction->field_count; f++)
        storage_free(&b->fields[f]);
}

static void set_workspace(char *args, const cot_direction *direction, void *workspace, size_t bytes)
{
    memcpy(args + direction->workspace_offset, &workspace, sizeof workspace);
    memcpy(args + direction->workspace_bytes_offset, &bytes, sizeof bytes);
}

static cot_status run_on_host(bound_case *b, const cot_direction *direction, cot_queue *queue, size_t bytes)
{
    void *workspace = NULL;
    if (bytes > 0) {
        /* Exactly the bytes requested, so that the address sanitizer reports an access to the next byte. */
        workspace = aligned_alloc(COT_ALIGNMENT, cot_align_up(bytes));
        if (workspace == NULL)
            out_of_memory(cot_align_up(bytes));
        memset(workspace, POISON, cot_align_up(bytes));
    }
    set_workspace(b->args, direction, workspace, bytes);
    const cot_status status = cot_op_run(direction, queue, b->args);
    free(workspace);
    return status;
}

/* Computes where each field's memory begins in the image, and returns the bytes of all fields. Each offset is a
 * multiple of IMAGE_ALIGNMENT, so a field keeps the alignment that it has on the host. */
static size_t image_offsets(const bound_case *b, const cot_direction *direction, size_t offsets[COT_MAX_FIELDS])
{
    enum { IMAGE_ALIGNMENT = 256 };
    size_t bytes = 0;
    for (int f = 0; f < direction->field_count; f++) {
        offsets[f] = bytes;
        bytes += (size_t)cot_round_up((int64_t)b->fields[f].bytes, IMAGE_ALIGNMENT);
    }
    return bytes;
}

cot_status device_image_make(device_image *image, const bound_case *b, const cot_direction *direction, cot_queue *queue,
                             size_t workspace_bytes)
{
    memset(image, 0, sizeof *image);
    memcpy(image->args, b->args, sizeof image->args);
    const size_t workspace = image_offsets(b, direction, image->offsets);
    image->bytes = workspace + workspace_bytes;
    const cot_status status = queue->calls->alloc(queue, image->bytes, (void **)&image->memory);
    if (status != COT_OK)
        return status;
    for (int f = 0; f < direction->field_count; f++) {
        const storage *s = &b->fields[f];
        if (s->memory != NULL)
            cot_field_tensor(&direction->fields[f], image->args)->data =
                image->memory + image->offsets[f] + ((char *)s->view.data - s->memory);
    }
    set_workspace(image->args, direction, workspace_bytes > 0 ? image->memory + workspace : NULL, workspace_bytes);
    return device_image_write(image, b, direction, queue);
}

/* The fill covers the whole image. Only the fields are then copied from the host, because the workspace is often most
 * of the image. */
cot_status device_image_write(const device_image *image, const bound_case *b, const cot_direction *direction,
                              cot_queue *queue)
{
    cot_status status = queue->calls->memset_async(queue, image->memory, POISON, image->bytes);
    for (int f = 0; status == COT_OK && f < direction->field_count; f++)
        if (b->fields[f].memory != NULL)
            status = queue->calls->copy_to_device(queue, image->memory + image->offsets[f], b->fields[f].memory,
                                                  b->fields[f].bytes);
    return status;
}

cot_status device_image_read(const device_image *image, bound_case *b, const cot_direction *direction, cot_queue *queue)
{
    cot_status status = COT_OK;
    for (int f = 0; status == COT_OK && f < direction->field_count; f++)
        if (b->fields[f].memory != NULL)
            status = queue->calls->copy_to_host(queue, b->fields[f].memory, image->memory + image->offsets[f],
                                                b->fields[f].bytes);
    return status;
}

/* One copy from the first output to the last: outputs follow the inputs. */
cot_status device_image_read_outputs(const device_image *image, bound_case *b, const cot_direction *direction,
                                     cot_queue *queue)
{
    size_t first = SIZE_MAX, end = 0;
    for (int f = 0; f < direction->field_count; f++)
        if (b->fields[f].memory != NULL && direction->fields[f].role != COT_INPUT) {
            first = image->offsets[f] < first ? image->offsets[f] : first;
            end = image->offsets[f] + b->fields[f].bytes;
        }
    if (end == 0)
        return COT_OK;
    char *host = allocate(end - first, 1);
    const cot_status status = queue->calls->copy_to_host(queue, host, image->memory + first, end - first);
    for (int f = 0; status == COT_OK && f < direction->field_count; f++)
        if (b->fields[f].memory != NULL && direction->fields[f].role != COT_INPUT)
            memcpy(b->fields[f].memory, host + image->offsets[f] - first, b->fields[f].bytes);
    free(host);
    return status;
}

void device_image_free(device_image *image, cot_queue *queue)
{
    queue->calls->free(queue, image->memory);
}

static cot_status run_on_device(bound_case *b, const cot_direction *direction, cot_queue *queue, size_t bytes)
{
    device_image image;
    cot_status status = device_image_make(&image, b, direction, queue, bytes);
    if (status == COT_OK)
        status = cot_op_run(direction, queue, image.args);
    if (status == COT_OK)
        status = cot_queue_check(queue);
    if (status == COT_OK)
        status = device_image_read(&image, b, direction, queue);
    device_image_free(&image, queue);
    return status;
}

cot_status bound_case_run(bound_case *b, const cot_direction *direction, cot_queue *queue)
{
    size_t bytes = 0;
    const cot_status status = cot_op_workspace(direction, queue, b->args, &bytes);
    if (status != COT_OK)
        return status;
    return queue->backend != COT_BACKEND_CPU ? run_on_device(b, direction, queue, bytes)
                                             : run_on_host(b, direction, queue, bytes);
}
