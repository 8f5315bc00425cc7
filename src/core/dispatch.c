/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu_features.h"
#include "float_state.h"
#include "argument_checks.h"
#include "op.h"
#include "queue.h"
#include "status.h"
#include "tensor.h"

#include <inttypes.h>
#include <stdio.h>

/* Copies the caller's argument struct. A shorter struct comes from an older header: the missing members become zero. A
 * longer struct comes from a newer header: it is accepted if all members that this library does not know are zero. A
 * struct that ends before the first member after struct_size is refused. */
static cot_status copy_args(const cot_direction *direction, const void *args, void *copy)
{
    if (args == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: args is null", direction->call);
    size_t given;
    memcpy(&given, args, sizeof given);
    if (given <= sizeof given || given > COT_MAX_ARGS)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: struct_size is %zu, expected %zu (use COT_INIT)", direction->call,
                        given, direction->args_size);
    for (size_t byte = direction->args_size; byte < given; byte++)
        if (((const char *)args)[byte] != 0)
            return cot_fail(COT_INVALID_ARGUMENT,
                            "%s: struct_size is %zu and byte %zu is set, but this library supports only %zu bytes",
                            direction->call, given, byte, direction->args_size);
    const size_t known = given < direction->args_size ? given : direction->args_size;
    memcpy(copy, args, known);
    memset((char *)copy + known, 0, direction->args_size - known);
    return COT_OK;
}

static bool name_is(const cot_kernel *kernel, const char *name, size_t length)
{
    return strlen(kernel->name) == length && memcmp(kernel->name, name, length) == 0;
}

/* Finds the forced kernel. A kernel of another direction is ignored. A name that the op does not have is an error. */
static cot_status forced_kernel(const cot_direction *direction, const cot_queue *queue, const cot_kernel **forced)
{
    size_t length = 0;
    const char *name = cot_queue_forced_kernel(queue, direction->op->name, &length);
    *forced = NULL;
    if (name == NULL)
        return COT_OK;
    bool known = false;
    for (int k = 0; k < direction->op->kernel_count; k++) {
        const cot_kernel *kernel = &direction->op->kernels[k];
        if (!name_is(kernel, name, length))
            continue;
        known = true;
        if (&direction->op->directions[kernel->direction] == direction)
            *forced = kernel;
    }
    return known ? COT_OK
                 : cot_fail(COT_INVALID_ARGUMENT, "%s: the forced kernel \"%.*s\" is none of %s's", direction->call,
                            (int)length, name, direction->op->name);
}

static const char *missing_isa(const cot_kernel *kernel, const cot_queue *queue)
{
    const uint32_t missing = kernel->isa & ~queue->isa;
    if (missing & COT_ISA_CDNA)
        return "this device is no AMD GPU of gfx90a or gfx942";
    if (missing & COT_ISA_SM90)
        return "this device is no Hopper (compute capability 9.0)";
    if (missing & COT_ISA_SM80)
        return "this device's compute capability is below 8.0";
    if (missing & COT_ISA_AMX)
        return "this processor lacks AMX (tile, bf16), or the operating system does not grant its use";
    if (missing & COT_ISA_AVX512)
        return "this processor lacks AVX-512 (f, bw, dq, vl) or BMI2";
    if (missing & COT_ISA_AVX512BF16)
        return "this processor lacks AVX-512 bf16";
    return missing != 0 ? "this processor lacks AVX2, FMA or F16C" : NULL;
}

/* The bytes of scratch memory of all threads, which follows the kernel's own workspace. It uses queue->threads also in
 * a forked child, where only one thread runs: cot_queue_threads would make a system call, and the size stays the
 * same. */
static size_t scratch_of_threads(const cot_queue *queue, const cot_choice *choice)
{
    return (size_t)queue->threads * choice->scratch_bytes;
}

static const char too_large[] = "it needs more than 2^56 bytes of workspace for these sizes";

/* Plans the workspace of an admitted kernel. Refuses the kernel if it needs too much. */
static void plan_workspace(const cot_queue *queue, const void *problem, cot_choice *choice, void *plan)
{
    const cot_kernel *kernel = choice->kernel;
    choice->workspace_bytes = cot_kernel_plan(kernel, problem, plan);
    if (kernel->scratch != NULL) {
        choice->scratch_bytes = cot_align_up(kernel->scratch(problem));
        choice->workspace_bytes = cot_align_up(choice->workspace_bytes) + scratch_of_threads(queue, choice);
    }
    if (choice->workspace_bytes > COT_MAX_BYTES)
        choice->refusal = too_large;
}

/* Names the tensor with the max_elements elements. */
static cot_status fail_too_large(const cot_direction *direction, const char *args)
{
    char sizes[24 * COT_MAX_RANK] = "";
    const cot_field *largest = direction->fields;
    int64_t max_elements = -1;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = (const cot_tensor *)(args + direction->fields[f].offset);
        if (!cot_is_present(tensor) || cot_product(tensor->shape, (size_t)tensor->rank) <= max_elements)
            continue;
        max_elements = cot_product(tensor->shape, (size_t)tensor->rank);
        largest = &direction->fields[f];
    }
    const cot_tensor *tensor = (const cot_tensor *)(args + largest->offset);
    for (int axis = 0, at = 0; axis < tensor->rank; axis++)
        at += snprintf(sizes + at, sizeof sizes - (size_t)at, "%s%" PRId64, axis > 0 ? "," : "", tensor->shape[axis]);
    return cot_fail(COT_INVALID_SHAPE,
                    "%s: %s has the sizes [%s], for which a kernel needs more than 2^56 bytes of workspace",
                    direction->call, largest->name, sizes);
}

/* Fills a choice for each kernel of the direction: its refusal, or its cost. */
static void admit_kernels(const cot_direction *direction, const cot_queue *queue, const void *problem,
                          cot_choice choices[COT_MAX_KERNELS], int *count)
{
    *count = 0;
    for (int k = 0; k < direction->op->kernel_count && *count < COT_MAX_KERNELS; k++) {
        const cot_kernel *kernel = &direction->op->kernels[k];
        if (&direction->op->directions[kernel->direction] != direction)
            continue;
        cot_choice *choice = &choices[(*count)++];
        *choice = (cot_choice){.kernel = kernel};
        if (kernel->backend != queue->backend)
            choice->refusal = "it is a kernel of another backend";
        else if ((choice->refusal = missing_isa(kernel, queue)) == NULL)
            choice->refusal = kernel->admit(problem);
        if (choice->refusal == NULL)
            choice->cost = kernel->cost(problem);
    }
}

/* The cheapest admitted kernel, or NULL. Of two equal ones, the first. */
static cot_choice *cheapest(cot_choice *choices, int count)
{
    cot_choice *best = NULL;
    for (int k = 0; k < count; k++)
        if (choices[k].refusal == NULL && (best == NULL || choices[k].cost < best->cost))
            best = &choices[k];
    return best;
}

static cot_choice *choice_of(const cot_kernel *kernel, cot_choice *choices, int count)
{
    for (int k = 0; k < count; k++)
        if (choices[k].kernel == kernel)
            return &choices[k];
    return NULL;
}

/* Chooses a kernel and plans its workspace. Writes the kernel's plan to plan[COT_MAX_PLAN]. */
static cot_status choose(const cot_direction *direction, const cot_queue *queue, const char *args, const void *problem,
                         cot_choice choices[COT_MAX_KERNELS], int *count, cot_choice **chosen, void *plan)
{
    const cot_kernel *forced = NULL;
    const cot_status status = forced_kernel(direction, queue, &forced);
    if (status != COT_OK)
        return status;
    bool any_too_large = false;
    admit_kernels(direction, queue, problem, choices, count);
    cot_choice *best = forced != NULL ? choice_of(forced, choices, *count) : cheapest(choices, *count);
    while (best != NULL && best->refusal == NULL) {
        plan_workspace(queue, problem, best, plan);
        if (best->refusal == NULL) {
            best->chosen = true;
            *chosen = best;
            return COT_OK;
        }
        any_too_large = true;
        best = forced != NULL ? NULL : cheapest(choices, *count);
    }
    if (any_too_large)
        return fail_too_large(direction, args);
    if (best != NULL)
        return cot_fail(COT_UNSUPPORTED, "%s: the forced kernel %s refuses: %s", direction->call, best->kernel->name,
                        best->refusal);
    return cot_fail(COT_UNSUPPORTED, "%s: no kernel of this backend supports these arguments", direction->call);
}

static cot_status prepare(const cot_direction *direction, const cot_queue *queue, const void *args, bool with_data,
                          void *copy, void *problem)
{
    if (queue == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: queue is null", direction->call);
    const cot_status status = copy_args(direction, args, copy);
    return status != COT_OK ? status : direction->validate(direction->call, copy, with_data, problem);
}

/* Checks the workspace of the arguments. Sets *workspace to NULL if they have none. */
static cot_status check_workspace(const cot_direction *direction, const char *args, size_t needed, void **workspace)
{
    size_t given;
    memcpy(workspace, args + direction->workspace_offset, sizeof *workspace);
    memcpy(&given, args + direction->workspace_bytes_offset, sizeof given);
    if (*workspace == NULL && given == 0)
        return COT_OK;
    if (*workspace == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: workspace is null but workspace_bytes is %zu", direction->call,
                        given);
    if (given < needed)
        return cot_fail(COT_WORKSPACE_TOO_SMALL, "%s: workspace has %zu bytes, %zu are needed", direction->call, given,
                        needed);
    if ((uintptr_t)*workspace % COT_ALIGNMENT != 0)
        return cot_fail(COT_INVALID_LAYOUT, "%s: workspace is at %p, expected a multiple of %d", direction->call,
                        *workspace, COT_ALIGNMENT);
    return COT_OK;
}

static cot_status run_kernel(cot_queue *queue, const cot_choice *chosen, const void *problem, void *workspace)
{
    if (queue->device == NULL) {
        queue->scratch_bytes = chosen->scratch_bytes;
        queue->scratch = (char *)workspace + (chosen->workspace_bytes - scratch_of_threads(queue, chosen));
        return chosen->kernel->run(queue, problem, workspace);
    }
    cot_status status = queue->calls->enter(queue->device);
    if (status != COT_OK)
        return status;
    status = chosen->kernel->run(queue, problem, workspace);
    queue->calls->leave(queue->device);
    return status;
}

static cot_status run(const cot_direction *direction, cot_queue *queue, const void *args)
{
    _Alignas(16) char copy[COT_MAX_ARGS], problem[COT_MAX_PROBLEM], plan[COT_MAX_PLAN];
    cot_choice choices[COT_MAX_KERNELS], *chosen = NULL;
    int count = 0;
    void *workspace = NULL;
    CHECK(prepare(direction, queue, args, true, copy, problem));
    CHECK(choose(direction, queue, copy, problem, choices, &count, &chosen, plan));
    CHECK(check_workspace(direction, copy, chosen->workspace_bytes, &workspace));
    /* Index data is checked last: errors that do not depend on the data are reported first. */
    if (queue->device == NULL && direction->check_index_data != NULL)
        CHECK(direction->check_index_data(direction->call, problem));
    if (workspace == NULL && chosen->workspace_bytes > 0)
        CHECK(cot_queue_workspace(queue, direction->call, chosen->workspace_bytes, &workspace));
    queue->plan = plan;
    const cot_status status = run_kernel(queue, chosen, problem, workspace);
    queue->plan = NULL;
    return status;
}

/* The whole call runs in the default floating-point state, since validate and the launchers also compute scales and
 * thresholds. */
cot_status cot_op_run(const cot_direction *direction, cot_queue *queue, const void *args)
{
    fenv_t host;
    cot_enter_default_float_state(&host);
    const cot_status status = run(direction, queue, args);
    cot_restore_float_state(&host);
    return status;
}

/* With all: plans the workspace of every admitted kernel, not only of the chosen one. */
static cot_status explain(const cot_direction *direction, const cot_queue *queue, const void *args, bool all,
                          cot_choice choices[COT_MAX_KERNELS], int *count, cot_choice **chosen)
{
    _Alignas(16) char copy[COT_MAX_ARGS], problem[COT_MAX_PROBLEM], plan[COT_MAX_PLAN];
    CHECK(prepare(direction, queue, args, false, copy, problem));
    CHECK(choose(direction, queue, copy, problem, choices, count, chosen, plan));
    for (int k = 0; all && k < *count; k++)
        if (choices[k].refusal == NULL && !choices[k].chosen)
            plan_workspace(queue, problem, &choices[k], plan);
    return COT_OK;
}

cot_status cot_op_workspace(const cot_direction *direction, cot_queue *queue, const void *args, size_t *bytes)
{
    if (bytes == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s_workspace: bytes is null", direction->call);
    cot_choice choices[COT_MAX_KERNELS], *chosen = NULL;
    int count = 0;
    fenv_t host;
    cot_enter_default_float_state(&host);
    const cot_status status = explain(direction, queue, args, false, choices, &count, &chosen);
    cot_restore_float_state(&host);
    if (status == COT_OK)
        *bytes = chosen->workspace_bytes;
    return status;
}

cot_status cot_op_explain(const cot_direction *direction, const cot_queue *queue, const void *args,
                          cot_choice choices[COT_MAX_KERNELS], int *count)
{
    cot_choice *chosen = NULL;
    fenv_t host;
    cot_enter_default_float_state(&host);
    const cot_status status = explain(direction, queue, args, true, choices, count, &chosen);
    cot_restore_float_state(&host);
    return status;
}
