/* SPDX-License-Identifier: Apache-2.0
 * group.h: a rank's handle of a group: transfers, collectives, the comparison of arguments, and faults.
 *
 * An engine moves bytes between ranks: it starts transfers, waits for them, aborts, and frees its state. Everything else
 * is built on that.
 *
 * Memory: in a call on a CUDA queue (group->on_device), tensors and messages are device memory. Then a transfer is
 * complete when the queue's stream has passed the wait. The host does not wait for the GPU, unless the engine moves
 * host memory alone (staging.h). */
#ifndef COT_PARALLEL_GROUP_H
#define COT_PARALLEL_GROUP_H

#include "gpu.h"
#include "rows.h"

#include <cotangent/parallel.h>

#include <stdbool.h>

enum { COT_MAX_WORDS = 72, COT_MAX_REASON = 320 };

/* One message to or from a rank. A message matches the transfer of the other side with the same tag. Of several, the
 * first that was started. The memory and the struct belong to the engine from start until done. */
typedef struct cot_transfer {
    void *data;
    size_t bytes; /* a multiple of COT_ALIGNMENT, on both sides the same */
    int peer, tag;
    bool receive;
    bool started, done;
    bool on_device;              /* data is device memory */
    bool copying;                /* local engine: the peer reads the data */
    bool lends;                  /* cot_group_lend, cot_group_borrow */
    struct cot_transfer *lender; /* of a borrow: the peer's transfer, until cot_group_return */
    void *ready;                 /* CUDA event: the data may be read or overwritten */
    void *complete;              /* CUDA event: the transfer is complete */
    struct cot_transfer *next;
    struct cot_transfer *next_in_queue; /* local: of the posted sends; NCCL: of the batch; staged: of the sends */
    uint64_t request[2];                /* MPI engine: the MPI_Request; custom engine: the callbacks' value */
    void *device_data;                  /* staged: the device memory, and `data` is the staging buffer */
    struct cot_staging *staging;
} cot_transfer;

typedef struct cot_engine {
    const char *name;              /* completes "the group is ..." */
    bool moves_host, moves_device; /* the memory that transfers of calls may have. Device memory is staged if the engine
                                    * moves host memory alone */
    bool abort_stops_transfers; /* after an abort no transfer touches the caller's host memory. Else transfers of host
                                 * memory use memory of the group alone, which is not freed after a fault */
    cot_status (*start)(cot_group *group, cot_transfer *transfer);
    /* Issues all started transfers as one batch; NULL: `start` issues them. All ranks make the same batches in the same
     * order, though a batch may be empty on a rank. */
    cot_status (*flush)(cot_group *group);
    /* Waits until `count` started transfers are done. Fails if the group breaks. Device memory: the queue's stream
     * waits. */
    cot_status (*wait)(cot_group *group, cot_transfer *transfers, int count);
    /* Whether all ranks can read each other's memory in the current call, so that they may lend it. All ranks have the same
     * answer after the agreement, and false before it if they cannot know. NULL: false. */
    bool (*shares_memory)(cot_group *group);
    /* Ends a borrow. */
    cot_status (*give_back)(cot_group *group, cot_transfer *transfer);
    /* Exchanges group->agreement, which is host memory. NULL: by transfers. */
    cot_status (*gather)(cot_group *group);
    /* Waits for the work of the last call on a GPU, at most group->timeout seconds. NULL: nothing to wait for. */
    cot_status (*check)(cot_group *group);
    /* Breaks the group with group->reason: tells the other ranks, and takes back this rank's transfers. */
    void (*abort)(cot_group *group);
    void (*destroy)(cot_group *group);
} cot_engine;

/* The arguments that all ranks must share, as named words, and the rank's own status. All ranks send this struct. */
typedef struct cot_agreement {
    int64_t status;
    int64_t count;
    int64_t words[COT_MAX_WORDS];
    char message[COT_MAX_REASON];
    char padding[(64 - (8 * (COT_MAX_WORDS + 2) + COT_MAX_REASON) % 64) % 64];
} cot_agreement;

struct cot_group {
    const cot_engine *engine;
    void *state; /* of the engine */
    int rank, size;
    double timeout;
    bool broken;
    bool keep_memory; /* the engine may still use the memory of a broken group: it is not freed */
    char reason[COT_MAX_REASON];
    cot_transfer *transfers;  /* started and not done */
    cot_agreement *agreement; /* size entries; that of this rank is filled first */
    cot_transfer *exchange;   /* 2 * size transfers of the collectives */
    const char *names[COT_MAX_WORDS];
    void **send, **receive; /* size entries each, of cot_group_sum */
    size_t *send_bytes, *receive_bytes;
    char *host; /* the memory of a call */
    size_t host_bytes;
    cot_gpu *gpu;                /* NULL until the first call on a CUDA queue */
    struct cot_staging *staging; /* all staging buffers */
    cot_transfer *staged;        /* sends that the engine does not have yet, the oldest first */
    bool on_device;              /* the current call is on a CUDA queue */
    char *device;                /* device memory of a call */
    size_t device_bytes;
    bool dry; /* explain.c: tensors have no memory, and nothing is computed */
    /* Of this rank so far: what its calls have sent, the calls of the core, merges of partial results, and pairs of a
     * query and a visible key. */
    uint64_t sent_bytes;
    int64_t messages, calls, merges;
    double pairs;
};

/* ---- engines -------------------------------------------------------------------------------------------------- */

/* Creates the parts of a handle that all engines share. NULL: no memory. */
cot_group *cot_group_make(const cot_engine *engine, int rank, int size, double timeout);
void cot_group_free(cot_group *group);

/* Reads the options of a group. If they are refused, *timeout is the default. */
cot_status cot_group_read_options(const char *call, const cot_group_options *options, double *timeout);

/* Gives a transfer to the engine. */
cot_status cot_group_issue(cot_group *group, cot_transfer *transfer);

/* Removes a transfer that is done from group->transfers. */
void cot_group_finished(cot_group *group, cot_transfer *transfer);

double cot_seconds(void);

/* ---- calls ---------------------------------------------------------------------------------------------------- */

/* What attention, the convolution and the sum of tensors have in common. */
typedef struct cot_group_call {
    const char *name;
    cot_group *group;
    cot_queue *queue;
    bool host; /* without a queue, the call uses host memory */
} cot_group_call;

/* Runs a collective call. `check` checks the arguments, and `words` adds what all ranks must share. `run` divides the
 * memory, and returns if it is only counting, else it computes. `release` follows in every case. */
cot_status cot_group_run(cot_group_call *call, cot_status (*check)(void *call), cot_status (*words)(const void *call),
                         cot_status (*run)(void *call, cot_arena *memory), void (*release)(void *call));

/* Calls that get no workspace from the caller. */
cot_status cot_group_no_workspace(const char *call, const void *workspace, size_t bytes);

/* Begins a collective call: fails if the group is null or broken. Sets the first word, which stands for the call. */
cot_status cot_group_begin(cot_group *group, const char *call);

/* Adds a word that all ranks must share. */
void cot_group_word(cot_group *group, const char *name, int64_t word);
void cot_group_number(cot_group *group, const char *name, double number);
/* The dtype, rank and sizes of a tensor, and its values in host memory; one word. Values on a GPU are not compared: to
 * read them, the host would wait for the GPU in every call. */
void cot_group_values(cot_group *group, const char *name, const cot_tensor *tensor);

/* The first agreement of a new group, on its options. `status` is what cot_group_read_options returned. A rank whose
 * options were refused takes part too, so that the others do not wait for it. */
cot_status cot_group_agree_on_options(cot_group *group, const char *call, cot_status status);

/* Exchanges the statuses and words of all ranks. Returns `status` if it is an error, and COT_PEER_ERROR if another rank
 * has one, or if words differ. */
cot_status cot_group_agree(cot_group *group, const char *call, cot_status status);

/* Breaks the group after an error of this rank, which is `status` with the message of this thread. Returns status. */
cot_status cot_group_fail(cot_group *group, const char *call, cot_status status);

/* ---- memory of a call ------------------------------------------------------------------------------------------ */

/* A view of a tensor's values in host memory. If the tensor is device memory, they are copied, and the caller frees
 * *copy; else *copy is NULL. An absent tensor, or one without data, stays as it is. */
cot_status cot_group_to_host(cot_group *group, const cot_tensor *tensor, cot_tensor *view, void **copy);

/* Copy, add, convert and fill as cot_copy_tensor and cot_fill_tensor of rows.h, where the tensors of the call are. An
 * absent `to` is skipped. */
cot_status cot_group_copy(cot_group *group, const cot_tensor *to, const cot_tensor *from, bool add);
cot_status cot_group_fill(cot_group *group, const cot_tensor *to, double value);
/* As cot_sum_tensors. */
cot_status cot_group_sum_tensors(cot_group *group, const cot_tensor *to, const cot_tensor from[], int count, bool add);
cot_status cot_group_clear(cot_group *group, void *data, size_t bytes);
cot_status cot_group_move(cot_group *group, void *to, const void *from, size_t bytes);
/* From host memory to where the tensors of the call are. */
cot_status cot_group_upload(cot_group *group, void *to, const void *host, size_t bytes);

/* ---- transfers ------------------------------------------------------------------------------------------------- */

/* Starts a transfer. A transfer of 0 bytes is done at once. `transfer` must stay valid until it is done or the group
 * has failed. cot_group_flush follows after the last of a batch. */
cot_status cot_group_send(cot_group *group, cot_transfer *transfer, int peer, int tag, void *data, size_t bytes);
cot_status cot_group_receive(cot_group *group, cot_transfer *transfer, int peer, int tag, void *data, size_t bytes);
cot_status cot_group_flush(cot_group *group);

/* Waits for the started ones of these transfers. */
cot_status cot_group_wait(cot_group *group, cot_transfer *transfers, int count);

/* A rank lends memory that its peer uses where it is, if cot_group_shares_memory. `what` is the address of anything that
 * says where. The peer borrows it: after a wait, transfer->data is `what`, and later work of the queue may use the memory.
 * cot_group_return follows after the last such work. The wait of the lender ends then. Before, only the peer may write to
 * the memory, and it may only if the lender does not read it. If the group breaks, it returns what is borrowed. */
bool cot_group_shares_memory(cot_group *group);
cot_status cot_group_lend(cot_group *group, cot_transfer *transfer, int peer, int tag, const void *what);
cot_status cot_group_borrow(cot_group *group, cot_transfer *transfer, int peer, int tag);
cot_status cot_group_return(cot_group *group, cot_transfer *transfer);

/* Every rank of first .. first+count, one of which is this rank, sends send_bytes[i] bytes at send[i] to member i and
 * receives receive_bytes[i] bytes at receive[i] from it. The part of this rank is copied. */
cot_status cot_group_all_to_all(cot_group *group, int first, int count, void *const send[], const size_t send_bytes[],
                                void *const receive[], const size_t receive_bytes[]);

/* Messages to and from `count` ranks. The arrays are host memory. */
typedef struct cot_messages {
    char **send, **receive;
    size_t *send_bytes, *receive_bytes;
} cot_messages;

/* Takes the memory of messages. `sizes` gives the bytes to and from member i. */
cot_messages cot_messages_take(cot_arena *memory, int64_t count,
                               void (*sizes)(void *context, int64_t i, size_t *sent, size_t *received), void *context);
cot_status cot_messages_exchange(cot_group *group, int first, int count, const cot_messages *messages);

/* The bytes of memory that cot_group_sum needs for `count` numbers. */
size_t cot_group_sum_bytes(const cot_group *group, cot_dtype dtype, int64_t count);

/* Replaces values[0 .. count) on every rank by the sum over all ranks: added in f64 in the order of the ranks, and rounded
 * once. values and memory are where the tensors of the call are, and have the alignment of COT_ALIGNMENT. The bytes of
 * values are rounded up to a multiple of it, and the end is added too. */
cot_status cot_group_sum(cot_group *group, cot_dtype dtype, void *values, int64_t count, void *memory);

#endif
