/* SPDX-License-Identifier: Apache-2.0 */
#include "group.h"

#include "rows.h"

#include "core/front.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

_Static_assert(sizeof(cot_agreement) % COT_ALIGNMENT == 0, "a transfer has a multiple of COT_ALIGNMENT bytes");

enum { TAG_AGREE, TAG_ALL_TO_ALL };

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
    if (options != NULL)
        CHECK(cot_copy_args(call, "options.struct_size", options, sizeof copy, &copy));
    if (!(copy.timeout >= 0 && copy.timeout <= 1e9))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: options.timeout is %g, expected 0 (30 seconds) to 1e9", call,
                        copy.timeout);
    *timeout = copy.timeout > 0 ? copy.timeout : 30;
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
    if (group->agreement == NULL || group->exchange == NULL) {
        cot_group_free(group);
        return NULL;
    }
    return group;
}

void cot_group_free(cot_group *group)
{
    free(group->agreement);
    free(group->exchange);
    free(group->pool);
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
    cot_group_word(group, name, cot_hash_tensor(tensor));
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

cot_status cot_group_agree(cot_group *group, const char *call, cot_status status)
{
    cot_agreement *own = &group->agreement[group->rank];
    own->status = status;
    if (status != COT_OK)
        snprintf(own->message, sizeof own->message, "%s", cot_error_message());
    int count = 0;
    for (int r = 0; r < group->size; r++) {
        if (r == group->rank)
            continue;
        CHECK(cot_group_send(group, &group->exchange[count++], r, TAG_AGREE, own, sizeof *own));
        CHECK(cot_group_receive(group, &group->exchange[count++], r, TAG_AGREE, &group->agreement[r], sizeof *own));
    }
    CHECK(cot_group_wait(group, group->exchange, count));
    return status != COT_OK ? status : compare(group, call);
}

/* ---- transfers ------------------------------------------------------------------------------------------------ */

cot_status cot_group_reserve(cot_group *group, const char *call, size_t bytes)
{
    if (bytes <= group->pool_bytes)
        return COT_OK;
    void *pool = NULL;
    if (bytes > COT_MAX_BYTES || posix_memalign(&pool, COT_ALIGNMENT, bytes) != 0)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: the group has no memory for %zu bytes", call, bytes);
    free(group->pool);
    group->pool = pool;
    group->pool_bytes = bytes;
    return COT_OK;
}

static cot_status start(cot_group *group, cot_transfer *transfer, const cot_transfer *values)
{
    *transfer = *values;
    transfer->started = transfer->bytes > 0;
    transfer->done = !transfer->started;
    if (transfer->done)
        return COT_OK;
    transfer->next = group->transfers;
    group->transfers = transfer;
    return group->engine->start(group, transfer);
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

cot_status cot_group_wait(cot_group *group, cot_transfer *transfers, int count)
{
    return group->engine->wait(group, transfers, count);
}

/* ---- collectives ---------------------------------------------------------------------------------------------- */

cot_status cot_group_all_to_all(cot_group *group, int first, int count, void *const send[], const size_t send_bytes[],
                                void *const receive[], const size_t receive_bytes[])
{
    int transfers = 0;
    for (int i = 0; i < count; i++) {
        const int peer = first + i;
        if (peer == group->rank) {
            if (send_bytes[i] > 0)
                memcpy(receive[i], send[i], send_bytes[i]);
            continue;
        }
        CHECK(cot_group_receive(group, &group->exchange[transfers++], peer, TAG_ALL_TO_ALL, receive[i],
                                receive_bytes[i]));
        CHECK(cot_group_send(group, &group->exchange[transfers++], peer, TAG_ALL_TO_ALL, send[i], send_bytes[i]));
    }
    return cot_group_wait(group, group->exchange, transfers);
}

/* Numbers of a rank's share; a multiple of 8, so that its bytes are a multiple of COT_ALIGNMENT. */
static int64_t share_of(const cot_group *group, int64_t count)
{
    return cot_round_up(cot_ceil_div(count, group->size), 8);
}

size_t cot_group_sum_bytes(const cot_group *group, int64_t count)
{
    const int64_t share = share_of(group, count);
    return cot_bytes(cot_mul(share, 2 * (int64_t)group->size + 1), sizeof(double)) +
           (size_t)group->size * (2 * sizeof(void *) + sizeof(size_t));
}

/* Rank r adds share r of all ranks, and sends the sum to all. */
cot_status cot_group_sum(cot_group *group, double *values, int64_t count, void *memory)
{
    const int size = group->size;
    const int64_t share = share_of(group, count);
    double *all = memory, *parts = all + size * share, *sum = parts + size * share;
    void **send = (void **)(sum + share), **receive = send + size;
    size_t *bytes = (size_t *)(receive + size);
    if (size == 1)
        return COT_OK;
    memset(all, 0, (size_t)(size * share) * sizeof *all);
    memcpy(all, values, (size_t)count * sizeof *all);
    for (int r = 0; r < size; r++)
        send[r] = all + r * share, receive[r] = parts + r * share, bytes[r] = (size_t)share * sizeof *all;
    CHECK(cot_group_all_to_all(group, 0, size, send, bytes, receive, bytes));
    memcpy(sum, parts, (size_t)share * sizeof *sum);
    for (int r = 1; r < size; r++)
        for (int64_t i = 0; i < share; i++)
            sum[i] += parts[r * share + i];
    for (int r = 0; r < size; r++)
        send[r] = sum, receive[r] = all + r * share;
    CHECK(cot_group_all_to_all(group, 0, size, send, bytes, receive, bytes));
    memcpy(values, all, (size_t)count * sizeof *all);
    return COT_OK;
}

static cot_status check_reduced(const char *call, const cot_tensor *tensor)
{
    if (tensor == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: tensor is null", call);
    CHECK(cot_check_required(call, "tensor", tensor));
    CHECK(cot_check_tensor(call, "tensor", tensor, COT_FLOATS, 0, COT_MAX_RANK));
    return cot_check_memory(call, &(cot_named_tensor){"tensor", tensor, true, false}, 1);
}

cot_status cot_group_all_reduce(cot_group *group, const cot_tensor *tensor)
{
    static const char call[] = "cot_group_all_reduce";
    CHECK(cot_group_begin(group, call));
    cot_status status = check_reduced(call, tensor);
    const int64_t count = status == COT_OK ? cot_elements(tensor) : 0;
    const size_t values = cot_align_up(cot_bytes(count, sizeof(double)));
    if (status == COT_OK)
        status = cot_group_reserve(group, call, values + cot_group_sum_bytes(group, count));
    if (status == COT_OK) {
        cot_tensor shape = *tensor;
        shape.data = NULL; /* the values differ */
        cot_group_values(group, "tensor's shape or dtype", &shape);
    }
    CHECK(cot_group_agree(group, call, status));
    const cot_tensor numbers = cot_tensor_contiguous(group->pool, COT_F64, tensor->rank, tensor->shape);
    if (group->size == 1)
        return COT_OK;
    cot_copy_tensor(&numbers, tensor, false);
    CHECK(cot_group_sum(group, (double *)group->pool, count, group->pool + values));
    cot_copy_tensor(tensor, &numbers, false);
    return COT_OK;
}
