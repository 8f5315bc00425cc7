/* SPDX-License-Identifier: Apache-2.0 */
#include "sharded.h"

#include "core/cpu_features.h"
#include "core/tensor.h"
#include "cuda/memory.h"
#include "cases/draw.h"
#include "check/check.h"
#include "ops/attention/attention_problem.h"
#include "ops/causal_conv1d/causal_conv1d_problem.h"

#include <pthread.h>
#include <stdlib.h>

/* ---- whole cases ---------------------------------------------------------------------------------------------- */

static const cot_tensor *field_of(const whole_case *w, const void *args, int f)
{
    return cot_field_tensor(&w->direction->fields[f], (void *)args);
}

static bool is_output(const whole_case *w, int f)
{
    return w->direction->fields[f].role != COT_INPUT;
}

const cot_op_cases *sharded_cases(const sharded_op *op)
{
    for (int n = 0; n < cot_op_count; n++)
        if (strcmp(cot_all_cases[n]->op->name, op->name) == 0)
            return cot_all_cases[n];
    abort();
}

bool whole_case_make(whole_case *w, const sharded_op *op, const cot_case *c)
{
    memset(w, 0, sizeof *w);
    w->op = op, w->c = *c;
    w->direction = &sharded_cases(op)->op->directions[c->direction];
    reference ref = reference_make(sharded_cases(op), &w->c);
    bound_case_make(&w->bound, &ref, false);
    reference_free(&ref);
    const cot_status status = verification_begin(&w->expected, sharded_cases(op), c->direction, w->bound.args);
    memcpy(w->expected.c.shared, c->shared, sizeof c->shared); /* arguments alone do not tell it */
    if (status == COT_UNSUPPORTED) /* f64: the first kernel is that of f32. The norm rule is left out */
        reference_run_oracle(&w->expected.ref);
    return status == COT_OK || status == COT_UNSUPPORTED;
}

void whole_case_free(whole_case *w)
{
    verification_free(&w->expected);
    bound_case_free(&w->bound, w->direction);
}

/* The kernel whose rounding decides the error rule: the one that rounds most. On a CPU, of those that it can run. */
static const cot_kernel *kernel_of_rule(const whole_case *w)
{
    const cot_op *op = sharded_cases(w->op)->op;
    const cot_kernel *found = NULL;
    for (int k = 0; k < op->kernel_count; k++) {
        const cot_kernel *kernel = &op->kernels[k];
        if (kernel->direction != w->c.direction || kernel->backend != sharded_backend ||
            (sharded_backend == COT_BACKEND_CPU && (kernel->isa & ~cot_cpu_features()) != 0))
            continue;
        if (found == NULL || kernel->intermediate == field_of(w, w->bound.args, 0)->dtype)
            found = kernel;
    }
    return found;
}

bool whole_case_check(const whole_case *w, const cot_parallel_options *options, int ranks)
{
    const cot_kernel *kernel = kernel_of_rule(w);
    bool good = true;
    for (int f = 0; f < w->direction->field_count; f++) {
        if (w->expected.ref.expected[f] == NULL)
            continue;
        const comparison c = verification_compare(&w->expected, f, w->bound.args, kernel);
        if (!c.failed)
            continue;
        char text[512], line[512];
        describe_case(sharded_cases(w->op), &w->c, text, sizeof text);
        comparison_line(&c, line, sizeof line);
        printf("%s: ranks %d cut %d stripe %d head_ranks %d all_gather %d: %s: %s\n", text, ranks, (int)options->cut,
               (int)options->stripe, (int)options->head_ranks, (int)options->all_gather, w->direction->fields[f].name,
               line);
        good = false;
    }
    return good;
}

/* ---- ranks ---------------------------------------------------------------------------------------------------- */

void whole_case_reset(const whole_case *w)
{
    for (int f = 0; f < w->direction->field_count; f++)
        if (is_output(w, f) && w->expected.ref.values[f] != NULL)
            tensor_store(field_of(w, w->bound.args, f), w->expected.ref.values[f]);
}

void rank_case_make(rank_case *r, const whole_case *w, const cot_parallel_options *options, int ranks, int rank)
{
    memset(r, 0, sizeof *r);
    memcpy(r->args, w->bound.args, sizeof r->args);
    r->options = *options;
    for (int f = 0; f < w->direction->field_count; f++) {
        const cot_tensor *whole = field_of(w, w->bound.args, f);
        cot_tensor part = *whole;
        const int axis = cot_is_present(whole) ? w->op->axis(&w->c, w->direction->fields[f].name) : -1;
        if (!cot_is_present(whole))
            continue;
        if (axis >= 0 && cot_shard_rows(options, whole->shape[axis], ranks, rank, &part.shape[axis]) != COT_OK)
            abort();
        r->fields[f] = storage_make(&part, w->c.offset[f], false);
        const cot_tensor *view = &r->fields[f].view;
        const bool has_value = field_has_initial_value(w->direction, &w->direction->fields[f], w->bound.args);
        if (has_value && cot_shard(options, axis >= 0 ? ranks : 1, axis >= 0 ? rank : 0, axis >= 0 ? axis : 0, whole,
                                   view) != COT_OK)
            abort();
        *(cot_tensor *)(r->args + w->direction->fields[f].offset) = *view;
    }
    w->op->adjust(&w->c, w->bound.args, r->args, &r->options);
}

void rank_case_free(rank_case *r, const whole_case *w)
{
    for (int f = 0; f < w->direction->field_count; f++)
        storage_free(&r->fields[f]);
}

cot_backend sharded_backend = COT_BACKEND_CPU;

bool sharded_admits(const sharded_op *op, const cot_case *c)
{
    char text[512];
    describe_case(sharded_cases(op), c, text, sizeof text);
    return op->admits(c) && (sharded_backend == COT_BACKEND_CPU || strstr(text, "f64") == NULL);
}

/* Copies the tensors to the device, and lets args point to the copies. */
static cot_status to_device(const rank_case *r, const whole_case *w, cot_queue *queue, char *args,
                            void *memory[COT_MAX_FIELDS])
{
    cot_status status = COT_OK;
    for (int f = 0; status == COT_OK && f < w->direction->field_count; f++) {
        const storage *s = &r->fields[f];
        if (s->bytes == 0)
            continue;
        status = cot_cuda_alloc(queue, s->bytes, &memory[f]);
        if (status == COT_OK)
            status = cot_cuda_copy_to_device(queue, memory[f], s->memory, s->bytes);
        cot_tensor *tensor = (cot_tensor *)(args + w->direction->fields[f].offset);
        tensor->data = (char *)memory[f] + ((char *)s->view.data - s->memory);
    }
    return status;
}

static cot_status run_on_device(rank_case *r, const whole_case *w, cot_group *group, cot_queue *queue)
{
    _Alignas(16) char args[COT_MAX_ARGS];
    void *memory[COT_MAX_FIELDS] = {NULL};
    memcpy(args, r->args, sizeof args);
    cot_status status = to_device(r, w, queue, args, memory);
    if (status == COT_OK)
        status = w->op->run(group, queue, &r->options, w->c.direction, args);
    if (status == COT_OK)
        status = cot_group_check(group);
    if (status == COT_OK)
        status = cot_queue_check(queue);
    for (int f = 0; f < w->direction->field_count; f++) {
        if (status == COT_OK && is_output(w, f) && memory[f] != NULL)
            status = cot_cuda_copy_to_host(queue, r->fields[f].memory, memory[f], r->fields[f].bytes);
        cot_cuda_free(queue, memory[f]);
    }
    return status;
}

/* The queue of a rank's group on a device, with a stream of its own. A queue loads all device code, so it is kept for
 * the next case. The queues live until the program ends. */
static cot_status find_device_queue(const cot_group *group, int device, cot_queue **queue)
{
    static struct {
        const cot_group *group;
        cot_queue *queue;
    } made[64];
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    cot_queue_options options;
    void *stream;
    int n = 0;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.device = device;
    pthread_mutex_lock(&mutex);
    while (n < 63 && made[n].group != NULL && made[n].group != group)
        n++;
    cot_status status = COT_OK;
    if (made[n].group != group) {
        status = cot_queue_create(&options, &made[n].queue);
        if (status == COT_OK)
            status = cot_cuda_stream_create(made[n].queue, &stream);
        if (status == COT_OK)
            status = cot_queue_set_stream(made[n].queue, stream);
        if (status == COT_OK)
            made[n].group = group;
    }
    *queue = made[n].queue;
    pthread_mutex_unlock(&mutex);
    return status;
}

void rank_case_run(rank_case *r, const whole_case *w, cot_group *group, int device)
{
    cot_queue_options options;
    cot_queue *queue = NULL;
    if (sharded_backend == COT_BACKEND_CUDA) {
        r->status = find_device_queue(group, device, &queue);
        if (r->status == COT_OK)
            r->status = run_on_device(r, w, group, queue);
        cot_error_copy(r->message, sizeof r->message);
        return;
    }
    COT_INIT(&options);
    options.threads = 1;
    r->status = cot_queue_create(&options, &queue);
    if (r->status == COT_OK)
        r->status = w->op->run(group, queue, &r->options, w->c.direction, r->args);
    cot_error_copy(r->message, sizeof r->message);
    cot_queue_destroy(queue);
}

void rank_case_collect(const rank_case *r, const whole_case *w, int ranks, int rank)
{
    for (int f = 0; f < w->direction->field_count; f++) {
        const cot_tensor *whole = field_of(w, w->bound.args, f);
        if (!is_output(w, f) || !cot_is_present(whole))
            continue;
        const int axis = w->op->axis(&w->c, w->direction->fields[f].name);
        if (cot_unshard(&r->options, axis >= 0 ? ranks : 1, axis >= 0 ? rank : 0, axis >= 0 ? axis : 0,
                        &r->fields[f].view, whole) != COT_OK)
            abort();
    }
}

bool rank_case_equal(const rank_case *a, const rank_case *b, const whole_case *w)
{
    for (int f = 0; f < w->direction->field_count; f++)
        if (is_output(w, f) && a->fields[f].bytes > 0 &&
            memcmp(a->fields[f].memory, b->fields[f].memory, a->fields[f].bytes) != 0)
            return false;
    return true;
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* The members that both directions have. */
#define EITHER(c, args, member)                                                               \
    ((c)->direction == COT_ATTENTION_FORWARD ? ((cot_attention_forward_args *)(args))->member \
                                             : ((cot_attention_backward_args *)(args))->member)

static int attention_axis(const cot_case *c, const char *field)
{
    static const char *const rows[] = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"};
    static const char *const statistics[] = {"lse", "dlse", "delta"};
    const bool packed = EITHER(c, c->args, cu_seqlens_q).dtype != COT_DTYPE_NONE;
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++)
        if (strcmp(field, rows[n]) == 0)
            return packed ? 0 : 1;
    for (size_t n = 0; n < sizeof statistics / sizeof *statistics; n++)
        if (strcmp(field, statistics[n]) == 0)
            return packed ? 1 : 2;
    if (strcmp(field, "bias") == 0 || strcmp(field, "dbias") == 0)
        return !packed && EITHER(c, c->args, bias).shape[2] != 1 ? 2 : -1;
    return -1;
}

static void attention_adjust(const cot_case *c, const void *whole, void *part, cot_parallel_options *options)
{
    const bool packed = EITHER(c, c->args, cu_seqlens_q).dtype != COT_DTYPE_NONE;
    const int64_t q = EITHER(c, whole, q).shape[packed ? 0 : 1], k = EITHER(c, whole, k).shape[packed ? 0 : 1];
    (void)options;
    if (c->direction == COT_ATTENTION_FORWARD) {
        cot_attention_forward_args *a = part;
        a->q_length = q, a->k_length = k;
    } else {
        cot_attention_backward_args *a = part;
        a->q_length = q, a->k_length = k;
    }
}

static cot_status attention_run(cot_group *group, cot_queue *queue, const cot_parallel_options *options, int direction,
                                const void *args)
{
    return direction == COT_ATTENTION_FORWARD ? cot_parallel_attention_forward(group, queue, options, args)
                                              : cot_parallel_attention_backward(group, queue, options, args);
}

static void draw_cut(uint64_t *state, cot_parallel_options *options)
{
    COT_INIT(options);
    options->cut = (cot_cut)cot_draw_below(state, 3);
    options->stripe = options->cut == COT_CUT_STRIPED ? 1 + cot_draw_below(state, 40) : 0;
}

/* Whether no rank has just one row. Such a rank's bias would look like one that all queries share. */
static bool cuts_bias(const cot_case *c, int ranks, const cot_parallel_options *options)
{
    const cot_tensor bias = EITHER(c, c->args, bias);
    const bool packed = EITHER(c, c->args, cu_seqlens_q).dtype != COT_DTYPE_NONE;
    for (int rank = 0; bias.dtype != COT_DTYPE_NONE && !packed && bias.shape[2] != 1 && rank < ranks; rank++) {
        int64_t rows;
        if (cot_shard_rows(options, bias.shape[2], ranks, rank, &rows) != COT_OK || rows == 1)
            return false;
    }
    return true;
}

static bool attention_draw(const cot_case *c, int ranks, uint64_t *state, cot_parallel_options *options)
{
    const int heads_axis = EITHER(c, c->args, cu_seqlens_q).dtype != COT_DTYPE_NONE ? 1 : 2;
    const int64_t H = EITHER(c, c->args, q).shape[heads_axis], Hkv = EITHER(c, c->args, k).shape[heads_axis];
    draw_cut(state, options);
    options->head_ranks = 1 << cot_draw_below(state, 4);
    const int head_ranks = options->head_ranks;
    if (EITHER(c, c->args, bias).dtype != COT_DTYPE_NONE || ranks % head_ranks != 0 || H % head_ranks != 0 ||
        (Hkv % head_ranks != 0 && head_ranks % Hkv != 0))
        options->head_ranks = (int32_t)cot_draw_below(state, 2);
    options->all_gather = (int32_t)cot_draw_below(state, 2);
    return cuts_bias(c, ranks, options);
}

static bool attention_admits(const cot_case *c)
{
    if (c->direction > COT_ATTENTION_BACKWARD || !(c->uses & COT_CASE_CHECK) || c->special != 0)
        return false;
    const cot_tensor q = EITHER(c, c->args, q), k = EITHER(c, c->args, k);
    const bool packed = EITHER(c, c->args, cu_seqlens_q).dtype != COT_DTYPE_NONE;
    if (EITHER(c, c->args, q_length) != 0 || EITHER(c, c->args, k_length) != 0 || EITHER(c, c->args, q_begin) != 0 ||
        EITHER(c, c->args, k_begin) != 0)
        return false;
    return q.shape[packed ? 0 : 1] * k.shape[packed ? 0 : 1] <= 25000;
}

const sharded_op sharded_attention = {"attention",   attention_axis, attention_adjust,
                                      attention_run, attention_draw, attention_admits};

/* ---- causal_conv1d -------------------------------------------------------------------------------------------- */

static int conv_axis(const cot_case *c, const char *field)
{
    static const char *const columns[] = {"x", "y", "dy", "dx"};
    (void)c;
    for (size_t n = 0; n < sizeof columns / sizeof *columns; n++)
        if (strcmp(field, columns[n]) == 0)
            return 2;
    return strcmp(field, "seq_idx") == 0 ? 1 : -1;
}

static const cot_tensor *conv_x(const cot_case *c)
{
    return c->direction == COT_CAUSAL_CONV1D_FORWARD ? &((const cot_causal_conv1d_forward_args *)c->args)->x
                                                     : &((const cot_causal_conv1d_backward_args *)c->args)->x;
}

static void conv_adjust(const cot_case *c, const void *whole, void *part, cot_parallel_options *options)
{
    (void)whole, (void)part;
    options->length = conv_x(c)->shape[2];
}

static cot_status conv_run(cot_group *group, cot_queue *queue, const cot_parallel_options *options, int direction,
                           const void *args)
{
    return direction == COT_CAUSAL_CONV1D_FORWARD ? cot_parallel_causal_conv1d_forward(group, queue, options, args)
                                                  : cot_parallel_causal_conv1d_backward(group, queue, options, args);
}

static bool conv_draw(const cot_case *c, int ranks, uint64_t *state, cot_parallel_options *options)
{
    (void)c, (void)ranks;
    draw_cut(state, options);
    return true;
}

static bool conv_admits(const cot_case *c)
{
    if (c->direction > COT_CAUSAL_CONV1D_BACKWARD || !(c->uses & COT_CASE_CHECK) || c->special != 0)
        return false;
    const cot_tensor *x = conv_x(c);
    return x->shape[0] * x->shape[1] * x->shape[2] <= 5000;
}

const sharded_op sharded_causal_conv1d = {"causal_conv1d", conv_axis, conv_adjust, conv_run, conv_draw, conv_admits};
