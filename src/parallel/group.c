/* SPDX-License-Identifier: Apache-2.0 */
#include "group.h"

#include "staging.h"

#include "core/float_state.h"
#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

_Static_assert(sizeof(cot_agreement) % COT_ALIGNMENT == 0, "a transfer has a multiple of COT_ALIGNMENT bytes");

enum { TAG_AGREE, TAG_ALL_TO_ALL, DEFAULT_TIMEOUT = 30 };

double cot_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- handles -------------------------------------------------------------------------------------------------- */

cot_status cot_group_read_options(const char *call, const cot_group_options *options, double *timeout)
{
    cot_group_options copy;
    COT_INIT(&copy);
    *timeout = DEFAULT_TIMEOUT;
    if (options != NULL)
        CHECK(cot_copy_args(call, "options.struct_size", options, sizeof copy, &copy));
    if (!(copy.timeout >= 0 && copy.timeout <= 1e9))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: options.timeout is %g, expected 0 (30 seconds) to 1e9", call,
                        copy.timeout);
    if (copy.timeout > 0)
        *timeout = copy.timeout;
    return COT_OK;
}

cot_group *cot_group_make(const cot_engine *engine, int rank, int size, double timeout)
{
    cot_group *group = calloc(1, sizeof *group);
    if (group == NULL)
        return NULL;
    *group = (cot_group){.engine = engine, .rank = rank, .size = size, .timeout = timeout};
    group->agreement = calloc((size_t)size, sizeof *group->agreement);
    group->exchange = calloc(2 * (size_t)size, sizeof *group->exchange);
    group->send = calloc(2 * (size_t)size, sizeof *group->send);
    group->send_bytes = calloc(2 * (size_t)size, sizeof *group->send_bytes);
    if (group->agreement == NULL || group->exchange == NULL || group->send == NULL || group->send_bytes == NULL) {
        cot_group_free(group);
        return NULL;
    }
    group->receive = group->send + size;
    group->receive_bytes = group->send_bytes + size;
    return group;
}

void cot_group_free(cot_group *group)
{
    cot_staging_free(group);
    cot_gpu_close(group->gpu);
    free(group->agreement);
    free(group->exchange);
    free(group->send);
    free(group->send_bytes);
    free(group->host);
    free(group);
}

void cot_group_destroy(cot_group *group)
{
    if (group == NULL)
        return;
    group->engine->destroy(group);
    if (!group->keep_memory)
        cot_group_free(group);
}

int32_t cot_group_rank(const cot_group *group)
{
    return group != NULL ? group->rank : -1;
}

int32_t cot_group_size(const cot_group *group)
{
    return group != NULL ? group->size : 0;
}

/* Breaks the group from this rank. */
static void break_group(cot_group *group, const char *reason)
{
    if (group->broken)
        return;
    group->broken = true;
    snprintf(group->reason, sizeof group->reason, "rank %d: %.280s", group->rank, reason);
    group->engine->abort(group);
    group->transfers = NULL;
}

cot_status cot_group_abort(cot_group *group, const char *reason)
{
    if (group == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "cot_group_abort: group is null");
    break_group(group, reason != NULL ? reason : "the caller aborted the group");
    return COT_OK;
}

cot_status cot_group_fail(cot_group *group, const char *call, cot_status status)
{
    char reason[COT_MAX_REASON];
    if (group->broken)
        return status;
    snprintf(reason, sizeof reason, "%s failed: %.240s", call, cot_error_message());
    break_group(group, reason);
    return status;
}

/* ---- agreement ------------------------------------------------------------------------------------------------ */

cot_status cot_group_begin(cot_group *group, const char *call)
{
    if (group == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: group is null", call);
    if (group->broken)
        return cot_fail(COT_PEER_ERROR, "%s: the group is broken: %s", call, group->reason);
    cot_agreement *own = &group->agreement[group->rank];
    memset(own, 0, sizeof *own);
    uint64_t hash = 0;
    for (const char *c = call; *c != '\0'; c++)
        hash = 31 * hash + (unsigned char)*c;
    cot_group_word(group, "the call", (int64_t)hash);
    return COT_OK;
}

void cot_group_word(cot_group *group, const char *name, int64_t word)
{
    cot_agreement *own = &group->agreement[group->rank];
    if (own->count == COT_MAX_WORDS)
        abort(); /* a fault of this library: a call has a fixed number of words */
    group->names[own->count] = name;
    own->words[own->count++] = word;
}

void cot_group_number(cot_group *group, const char *name, double number)
{
    int64_t word;
    memcpy(&word, &number, sizeof word);
    cot_group_word(group, name, word);
}

void cot_group_values(cot_group *group, const char *name, const cot_tensor *tensor)
{
    cot_tensor compared = *tensor;
    if (group->on_device)
        compared.data = NULL;
    if (!group->dry)
        cot_group_word(group, name, cot_hash_tensor(&compared));
}

/* The agreement of all ranks has arrived: finds the first rank with an error, then the first that differs. */
static cot_status compare(const cot_group *group, const char *call)
{
    const cot_agreement *first = &group->agreement[0];
    for (int r = 0; r < group->size; r++)
        if (group->agreement[r].status != COT_OK)
            return cot_fail(COT_PEER_ERROR, "%s: rank %d refuses its arguments: %s", call, r,
                            group->agreement[r].message);
    for (int r = 1; r < group->size; r++) {
        const cot_agreement *other = &group->agreement[r];
        for (int64_t n = 0; n < COT_MAX_WORDS; n++)
            if (other->words[n] != first->words[n])
                return cot_fail(COT_PEER_ERROR, "%s: rank %d passes another value of %s than rank 0", call, r,
                                n < group->agreement[group->rank].count ? group->names[n] : "the call");
    }
    return COT_OK;
}

static cot_status gather(cot_group *group)
{
    cot_agreement *own = &group->agreement[group->rank];
    int count = 0;
    for (int r = 0; r < group->size; r++) {
        if (r == group->rank)
            continue;
        CHECK(cot_group_send(group, &group->exchange[count++], r, TAG_AGREE, own, sizeof *own));
        CHECK(cot_group_receive(group, &group->exchange[count++], r, TAG_AGREE, &group->agreement[r], sizeof *own));
    }
    return cot_group_wait(group, group->exchange, count);
}

cot_status cot_group_agree(cot_group *group, const char *call, cot_status status)
{
    cot_agreement *own = &group->agreement[group->rank];
    if (group->broken) /* found before the agreement: the engine takes no transfers any more */
        return status;
    own->status = status;
    if (status != COT_OK)
        snprintf(own->message, sizeof own->message, "%s", cot_error_message());
    const bool on_device = group->on_device;
    group->on_device = false; /* agreements are host memory */
    const cot_status gathered = group->engine->gather != NULL ? group->engine->gather(group) : gather(group);
    group->on_device = on_device;
    if (gathered != COT_OK) /* the ranks no longer make the same transfers */
        return cot_group_fail(group, call, gathered);
    return status != COT_OK ? status : compare(group, call);
}

cot_status cot_group_agree_on_options(cot_group *group, const char *call, cot_status status)
{
    cot_group_begin(group, call);
    cot_group_number(group, "options.timeout", group->timeout);
    return cot_group_agree(group, call, status);
}

/* ---- memory of a call ------------------------------------------------------------------------------------------ */

static cot_status reserve_host(cot_group *group, const char *call, size_t bytes)
{
    void *grown = NULL;
    if (bytes <= group->host_bytes)
        return COT_OK;
    if (bytes > COT_MAX_BYTES || posix_memalign(&grown, COT_ALIGNMENT, bytes) != 0)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: the group has no memory for %zu bytes", call, bytes);
    free(group->host);
    group->host = grown;
    group->host_bytes = bytes;
    return COT_OK;
}

/* The work of the last call may never end, if another rank has died. The host waits for it with a limit of time, before
 * it waits for the stream. */
static cot_status await_last_call(cot_group *group)
{
    return group->engine->check != NULL ? group->engine->check(group) : COT_OK;
}

static cot_status reserve_device(cot_group *group, const char *call, size_t bytes)
{
    void *grown = NULL;
    if (bytes <= group->device_bytes)
        return COT_OK;
    if (bytes > COT_MAX_BYTES)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: the group has no memory for %zu bytes", call, bytes);
    CHECK(await_last_call(group));
    group->device = NULL, group->device_bytes = 0;
    CHECK(cot_gpu_grow(group->gpu, call, bytes, &grown));
    group->device = grown;
    group->device_bytes = bytes;
    return COT_OK;
}

/* Grows the memory of the group to what a first pass has counted. Contents are lost. */
static cot_status reserve(cot_group *group, const char *call, const cot_arena *counted)
{
    const size_t tensors = (size_t)cot_max((int64_t)counted->used, COT_ALIGNMENT);
    if (group->dry) {
        group->device_bytes = tensors;
        return reserve_host(group, call, (size_t)cot_max((int64_t)counted->host_used, COT_ALIGNMENT));
    }
    if (!group->on_device)
        return reserve_host(group, call, (size_t)cot_add((int64_t)tensors, (int64_t)counted->host_used));
    CHECK(reserve_host(group, call, (size_t)cot_max((int64_t)counted->host_used, COT_ALIGNMENT)));
    return reserve_device(group, call, tensors);
}

static cot_arena divide(const cot_group *group, const cot_arena *counted)
{
    cot_arena memory = {.base = group->host, .host = group->host};
    if (group->dry)
        memory.base = (char *)(uintptr_t)COT_ALIGNMENT;
    else if (group->on_device)
        memory.base = group->device;
    else
        memory.host += counted->used;
    return memory;
}

cot_status cot_group_to_host(cot_group *group, const cot_tensor *tensor, cot_tensor *view, void **copy)
{
    int64_t low, high;
    *view = *tensor;
    *copy = NULL;
    if (!group->on_device || !cot_is_present(tensor) || tensor->data == NULL || cot_elements(tensor) == 0)
        return COT_OK;
    CHECK(await_last_call(group));
    cot_extent(tensor, &low, &high);
    char *memory = malloc((size_t)(high - low));
    if (memory == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "no host memory for %lld bytes of index data", (long long)(high - low));
    const cot_status status =
        cot_gpu_download(group->gpu, memory, (const char *)tensor->data + low, (size_t)(high - low));
    if (status != COT_OK) {
        free(memory);
        return status;
    }
    view->data = memory - low;
    *copy = memory;
    return COT_OK;
}

cot_status cot_group_copy(cot_group *group, const cot_tensor *to, const cot_tensor *from, bool add)
{
    if (!cot_is_present(to) || group->dry)
        return COT_OK;
    if (group->on_device)
        return cot_gpu_copy_tensor(group->gpu, to, from, add);
    cot_copy_tensor(to, from, add);
    return COT_OK;
}

cot_status cot_group_fill(cot_group *group, const cot_tensor *to, double value)
{
    if (!cot_is_present(to) || group->dry)
        return COT_OK;
    if (group->on_device)
        return cot_gpu_fill_tensor(group->gpu, to, value);
    cot_fill_tensor(to, value);
    return COT_OK;
}

cot_status cot_group_sum_tensors(cot_group *group, const cot_tensor *to, const cot_tensor from[], int count, bool add)
{
    if (!cot_is_present(to) || group->dry || (count == 0 && add))
        return COT_OK;
    if (count == 0)
        return cot_group_fill(group, to, 0);
    if (group->on_device)
        return cot_gpu_sum_tensors(group->gpu, to, from, count, add);
    cot_sum_tensors(to, from, count, add);
    return COT_OK;
}

cot_status cot_group_clear(cot_group *group, void *data, size_t bytes)
{
    if (group->on_device)
        return cot_gpu_clear(group->gpu, data, bytes);
    if (bytes > 0 && !group->dry)
        memset(data, 0, bytes);
    return COT_OK;
}

cot_status cot_group_move(cot_group *group, void *to, const void *from, size_t bytes)
{
    if (group->on_device)
        return cot_gpu_move(group->gpu, to, from, bytes);
    if (bytes > 0 && !group->dry)
        memcpy(to, from, bytes);
    return COT_OK;
}

cot_status cot_group_upload(cot_group *group, void *to, const void *host, size_t bytes)
{
    if (group->on_device)
        return cot_gpu_upload(group->gpu, to, host, bytes);
    if (bytes > 0 && !group->dry)
        memcpy(to, host, bytes);
    return COT_OK;
}

/* ---- calls ----------------------------------------------------------------------------------------------------- */

cot_status cot_group_no_workspace(const char *call, const void *workspace, size_t bytes)
{
    if (workspace != NULL || bytes != 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: workspace is given, expected none (the queue's pool serves it)",
                        call);
    return COT_OK;
}

/* Makes the queue's GPU current, if it has one. */
static cot_status use_queue(cot_group *group, const char *call, cot_queue *queue, bool host)
{
    const cot_backend backend = cot_queue_backend(queue);
    void *context = NULL, *stream = NULL;
    if (queue == NULL && !host)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: queue is null", call);
    if (backend == COT_BACKEND_HIP)
        return cot_fail(COT_UNSUPPORTED, "%s: queue is of HIP, which groups do not support", call);
    if (backend == COT_BACKEND_CPU && !group->engine->moves_host)
        return cot_fail(COT_UNSUPPORTED, "%s: queue is of the CPU, expected one of CUDA: the group is %s", call,
                        group->engine->name);
    cot_group_word(group, "the queue's backend", backend);
    if (backend == COT_BACKEND_CPU || group->dry)
        return COT_OK;
    CHECK(cot_queue_cuda(queue, &context, &stream));
    if (group->gpu == NULL)
        CHECK(cot_gpu_open(call, context, 0, &group->gpu));
    CHECK(cot_gpu_enter(group->gpu, call, context, stream));
    group->on_device = true;
    return COT_OK;
}

/* Ends a call with this status, whose message stays. */
static cot_status leave_queue(cot_group *group, cot_status status)
{
    char message[512];
    if (!group->on_device)
        return status;
    cot_error_copy(message, sizeof message);
    const cot_status ended = cot_gpu_end(group->gpu, group->broken);
    cot_gpu_leave(group->gpu);
    group->on_device = false;
    return status != COT_OK ? cot_error_set(status, message) : ended;
}

/* Checks the arguments and gets the memory, before the ranks agree. */
static cot_status prepare(cot_group_call *call, cot_status (*check)(void *), cot_status (*words)(const void *),
                          cot_status (*run)(void *, cot_arena *), cot_arena *counted)
{
    CHECK(use_queue(call->group, call->name, call->queue, call->host));
    CHECK(check(call));
    CHECK(run(call, counted));
    CHECK(reserve(call->group, call->name, counted));
    return words(call);
}

cot_status cot_group_run(cot_group_call *call, cot_status (*check)(void *), cot_status (*words)(const void *),
                         cot_status (*run)(void *, cot_arena *), void (*release)(void *))
{
    cot_group *group = call->group;
    cot_arena counted = {.counting = true};
    fenv_t host;
    CHECK(cot_group_begin(group, call->name));
    cot_enter_default_float_state(&host);
    cot_status status = cot_group_agree(group, call->name, prepare(call, check, words, run, &counted));
    if (status == COT_OK) {
        cot_arena memory = divide(group, &counted);
        status = run(call, &memory);
        if (status != COT_OK)
            cot_group_fail(group, call->name, status);
    }
    status = leave_queue(group, status);
    release(call);
    cot_restore_float_state(&host);
    return status;
}

cot_status cot_group_check(cot_group *group)
{
    static const char call[] = "cot_group_check";
    if (group == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: group is null", call);
    if (group->broken)
        return cot_fail(COT_PEER_ERROR, "%s: the group is broken: %s", call, group->reason);
    return group->engine->check != NULL ? group->engine->check(group) : COT_OK;
}

/* ---- transfers ------------------------------------------------------------------------------------------------ */

cot_status cot_group_issue(cot_group *group, cot_transfer *transfer)
{
    transfer->next = group->transfers;
    group->transfers = transfer;
    return group->engine->start(group, transfer);
}

static cot_status start(cot_group *group, cot_transfer *transfer, const cot_transfer *values)
{
    *transfer = *values;
    transfer->on_device = group->on_device;
    transfer->started = transfer->bytes > 0;
    transfer->done = !transfer->started;
    if (transfer->done)
        return COT_OK;
    if (!transfer->receive && transfer->tag != TAG_AGREE)
        group->sent_bytes += transfer->bytes, group->messages++;
    return cot_is_staged(group) ? cot_staging_start(group, transfer) : cot_group_issue(group, transfer);
}

cot_status cot_group_send(cot_group *group, cot_transfer *transfer, int peer, int tag, void *data, size_t bytes)
{
    return start(group, transfer, &(cot_transfer){.data = data, .bytes = bytes, .peer = peer, .tag = tag});
}

cot_status cot_group_receive(cot_group *group, cot_transfer *transfer, int peer, int tag, void *data, size_t bytes)
{
    return start(group, transfer,
                 &(cot_transfer){.data = data, .bytes = bytes, .peer = peer, .tag = tag, .receive = true});
}

void cot_group_finished(cot_group *group, cot_transfer *transfer)
{
    cot_transfer **link = &group->transfers;
    while (*link != NULL && *link != transfer)
        link = &(*link)->next;
    if (*link != NULL)
        *link = transfer->next;
    transfer->done = true;
}

cot_status cot_group_flush(cot_group *group)
{
    return group->engine->flush != NULL ? group->engine->flush(group) : COT_OK;
}

cot_status cot_group_wait(cot_group *group, cot_transfer *transfers, int count)
{
    return cot_is_staged(group) ? cot_staging_wait(group, transfers, count)
                                : group->engine->wait(group, transfers, count);
}

bool cot_group_shares_memory(cot_group *group)
{
    return group->engine->shares_memory != NULL && group->engine->shares_memory(group);
}

/* Starts a lend or a borrow. */
static cot_status start_lending(cot_group *group, cot_transfer *transfer, const cot_transfer *values)
{
    *transfer = *values;
    transfer->lends = transfer->started = true;
    transfer->on_device = group->on_device;
    return cot_group_issue(group, transfer);
}

cot_status cot_group_lend(cot_group *group, cot_transfer *transfer, int peer, int tag, const void *what)
{
    void *data;
    memcpy(&data, &what, sizeof data);
    return start_lending(group, transfer, &(cot_transfer){.data = data, .peer = peer, .tag = tag});
}

cot_status cot_group_borrow(cot_group *group, cot_transfer *transfer, int peer, int tag)
{
    return start_lending(group, transfer, &(cot_transfer){.peer = peer, .tag = tag, .receive = true});
}

cot_status cot_group_return(cot_group *group, cot_transfer *transfer)
{
    return group->engine->give_back(group, transfer);
}

/* ---- collectives ---------------------------------------------------------------------------------------------- */

cot_status cot_group_all_to_all(cot_group *group, int first, int count, void *const send[], const size_t send_bytes[],
                                void *const receive[], const size_t receive_bytes[])
{
    int transfers = 0;
    for (int i = 0; i < count; i++) {
        const int peer = first + i;
        if (peer == group->rank) {
            CHECK(cot_group_move(group, receive[i], send[i], send_bytes[i]));
            continue;
        }
        CHECK(cot_group_receive(group, &group->exchange[transfers++], peer, TAG_ALL_TO_ALL, receive[i],
                                receive_bytes[i]));
        CHECK(cot_group_send(group, &group->exchange[transfers++], peer, TAG_ALL_TO_ALL, send[i], send_bytes[i]));
    }
    CHECK(cot_group_flush(group));
    return cot_group_wait(group, group->exchange, transfers);
}

cot_messages cot_messages_take(cot_arena *memory, int64_t count,
                               void (*sizes)(void *context, int64_t i, size_t *sent, size_t *received), void *context)
{
    cot_messages x = {
        cot_arena_take_host(memory, count, sizeof(char *)), cot_arena_take_host(memory, count, sizeof(char *)),
        cot_arena_take_host(memory, count, sizeof(size_t)), cot_arena_take_host(memory, count, sizeof(size_t))};
    for (int64_t i = 0; i < count; i++) {
        size_t sent, received;
        sizes(context, i, &sent, &received);
        char *const send = cot_arena_take(memory, (int64_t)sent, 1);
        char *const receive = cot_arena_take(memory, (int64_t)received, 1);
        if (memory->counting)
            continue;
        x.send[i] = send;
        x.receive[i] = receive;
        x.send_bytes[i] = sent;
        x.receive_bytes[i] = received;
    }
    return x;
}

cot_status cot_messages_exchange(cot_group *group, int first, int count, const cot_messages *messages)
{
    return cot_group_all_to_all(group, first, count, (void *const *)messages->send, messages->send_bytes,
                                (void *const *)messages->receive, messages->receive_bytes);
}

/* The numbers of COT_ALIGNMENT bytes: a share has a multiple of them. */
static int64_t unit_of(cot_dtype dtype)
{
    return COT_ALIGNMENT / (int64_t)cot_dtype_size(dtype);
}

static int64_t share_of(const cot_group *group, cot_dtype dtype, int64_t count)
{
    return cot_round_up(cot_ceil_div(count, group->size), unit_of(dtype));
}

size_t cot_group_sum_bytes(const cot_group *group, cot_dtype dtype, int64_t count)
{
    const int64_t share = share_of(group, dtype, count);
    return cot_bytes(cot_mul(share, group->size), cot_dtype_size(dtype)) + cot_bytes(share, sizeof(double));
}

/* Rank r adds share r of all ranks in f64, rounds the sum, and sends it to all. The last shares may be shorter. */
cot_status cot_group_sum(cot_group *group, cot_dtype dtype, void *values, int64_t count, void *memory)
{
    const int size = group->size, rank = group->rank;
    const size_t element = cot_dtype_size(dtype);
    const int64_t share = share_of(group, dtype, count), padded = cot_round_up(count, unit_of(dtype));
    const int64_t own = cot_min(rank * share, padded), own_count = cot_min(share, padded - own);
    char *const all = values, *const parts = memory, *const sum = parts + (size_t)(size * share) * element;
    const cot_tensor total = cot_tensor_contiguous(sum, COT_F64, 1, &own_count),
                     rounded = cot_tensor_contiguous(all + (size_t)own * element, dtype, 1, &own_count);
    if (size == 1)
        return COT_OK;
    for (int r = 0; r < size; r++) {
        const int64_t first = cot_min(r * share, padded);
        group->send[r] = all + (size_t)first * element;
        group->send_bytes[r] = (size_t)cot_min(share, padded - first) * element;
        group->receive[r] = parts + (size_t)(r * share) * element;
        group->receive_bytes[r] = (size_t)own_count * element;
    }
    CHECK(cot_group_all_to_all(group, 0, size, group->send, group->send_bytes, group->receive, group->receive_bytes));
    for (int r = 0; r < size; r++) {
        const cot_tensor part = cot_tensor_contiguous(group->receive[r], dtype, 1, &own_count);
        CHECK(cot_group_copy(group, &total, &part, r > 0));
    }
    CHECK(cot_group_copy(group, &rounded, &total, false));
    for (int r = 0; r < size; r++) { /* what was sent to rank r comes back as its sum */
        group->receive[r] = group->send[r], group->receive_bytes[r] = group->send_bytes[r];
        group->send[r] = rounded.data, group->send_bytes[r] = (size_t)own_count * element;
    }
    group->send_bytes[rank] = group->receive_bytes[rank] = 0; /* it is there */
    return cot_group_all_to_all(group, 0, size, group->send, group->send_bytes, group->receive, group->receive_bytes);
}

typedef struct reduce_call {
    cot_group_call base;
    const cot_tensor *tensor;
    int64_t count;
} reduce_call;

static cot_status check_reduced(void *call)
{
    reduce_call *c = call;
    const char *name = c->base.name;
    if (c->tensor == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: tensor is null", name);
    CHECK(cot_check_required(name, "tensor", c->tensor));
    CHECK(cot_check_tensor(name, "tensor", c->tensor, COT_FLOATS, 0, COT_MAX_RANK));
    CHECK(cot_check_memory(name, &(cot_named_tensor){"tensor", c->tensor, true, false}, 1));
    c->count = cot_elements(c->tensor);
    return COT_OK;
}

static cot_status words_of_reduced(const void *call)
{
    const reduce_call *c = call;
    cot_tensor shape = *c->tensor;
    shape.data = NULL; /* the values differ */
    cot_group_values(c->base.group, "tensor's shape or dtype", &shape);
    return COT_OK;
}

/* Whether the tensor is contiguous and has no end that needs padding, and transfers may use the caller's memory. */
static bool can_sum_in_place(const cot_group *group, const cot_tensor *t, int64_t count)
{
    const cot_tensor contiguous = cot_tensor_contiguous(t->data, t->dtype, t->rank, t->shape);
    bool equal = (group->on_device || group->engine->abort_stops_transfers) && count % unit_of(t->dtype) == 0 &&
                 (uintptr_t)t->data % COT_ALIGNMENT == 0;
    for (int axis = 0; axis < t->rank; axis++)
        equal = equal && (t->shape[axis] == 1 || t->stride[axis] == contiguous.stride[axis]);
    return equal;
}

static cot_status reduce(void *call, cot_arena *memory)
{
    const reduce_call *c = call;
    cot_group *group = c->base.group;
    const cot_dtype dtype = c->tensor->dtype;
    const bool in_place = can_sum_in_place(group, c->tensor, c->count);
    void *values = in_place ? c->tensor->data : cot_arena_take(memory, c->count, cot_dtype_size(dtype));
    void *parts = cot_arena_take(memory, (int64_t)cot_group_sum_bytes(group, dtype, c->count), 1);
    if (memory->counting || group->size == 1)
        return COT_OK;
    if (in_place)
        return cot_group_sum(group, dtype, values, c->count, parts);
    const cot_tensor numbers = cot_tensor_contiguous(values, dtype, c->tensor->rank, c->tensor->shape);
    CHECK(cot_group_copy(group, &numbers, c->tensor, false));
    CHECK(cot_group_sum(group, dtype, values, c->count, parts));
    return cot_group_copy(group, c->tensor, &numbers, false);
}

static void release_reduced(void *call)
{
    (void)call;
}

cot_status cot_group_all_reduce(cot_group *group, cot_queue *queue, const cot_tensor *tensor)
{
    reduce_call c = {{"cot_group_all_reduce", group, queue, true}, tensor, 0};
    return cot_group_run(&c.base, check_reduced, words_of_reduced, reduce, release_reduced);
}
