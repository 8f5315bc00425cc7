/* SPDX-License-Identifier: Apache-2.0
 * group.h: a rank's handle of a group: transfers, collectives, the comparison of arguments, and faults.
 *
 * An engine moves bytes between ranks. It has four functions: start and wait for transfers, abort, destroy. Everything
 * else is built on them. */
#ifndef COT_PARALLEL_GROUP_H
#define COT_PARALLEL_GROUP_H

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
    bool copying; /* local engine: the peer reads the data */
    struct cot_transfer *next, *next_posted;
    uint64_t request[2]; /* MPI engine: the MPI_Request; custom engine: the callbacks' value */
} cot_transfer;

typedef struct cot_engine {
    cot_status (*start)(cot_group *group, cot_transfer *transfer);
    /* Waits until `count` started transfers are done. Fails if the group breaks. */
    cot_status (*wait)(cot_group *group, cot_transfer *transfers, int count);
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
    char *pool; /* the buffers of a call */
    size_t pool_bytes;
};

/* ---- engines -------------------------------------------------------------------------------------------------- */

/* Creates the parts of a handle that all engines share. NULL: no memory. */
cot_group *cot_group_make(const cot_engine *engine, int rank, int size, double timeout);
void cot_group_free(cot_group *group);

/* Reads the options of a group. */
cot_status cot_group_read_options(const char *call, const cot_group_options *options, double *timeout);

/* Removes a transfer that is done from group->transfers. */
void cot_group_finished(cot_group *group, cot_transfer *transfer);

double cot_seconds(void);

/* ---- calls ---------------------------------------------------------------------------------------------------- */

/* Begins a collective call: fails if the group is null or broken. Sets the first word, which stands for the call. */
cot_status cot_group_begin(cot_group *group, const char *call);

/* Adds a word that all ranks must share. */
void cot_group_word(cot_group *group, const char *name, int64_t word);
void cot_group_number(cot_group *group, const char *name, double number);
/* The dtype, rank, sizes and values of a tensor; one word. */
void cot_group_values(cot_group *group, const char *name, const cot_tensor *tensor);

/* Exchanges the statuses and words of all ranks. Returns `status` if it is an error, and COT_PEER_ERROR if another rank
 * has one, or if words differ. */
cot_status cot_group_agree(cot_group *group, const char *call, cot_status status);

/* Breaks the group after an error of this rank, which is `status` with the message of this thread. Returns status. */
cot_status cot_group_fail(cot_group *group, const char *call, cot_status status);

/* Grows the memory of the group. Contents are lost. */
cot_status cot_group_reserve(cot_group *group, const char *call, size_t bytes);

/* Starts a transfer. A transfer of 0 bytes is done at once. `transfer` must stay valid until it is done or the group
 * has failed. */
cot_status cot_group_send(cot_group *group, cot_transfer *transfer, int peer, int tag, void *data, size_t bytes);
cot_status cot_group_receive(cot_group *group, cot_transfer *transfer, int peer, int tag, void *data, size_t bytes);

/* Waits for the started ones of these transfers. */
cot_status cot_group_wait(cot_group *group, cot_transfer *transfers, int count);

/* Every rank of first .. first+count, one of which is this rank, sends send_bytes[i] bytes at send[i] to member i and
 * receives receive_bytes[i] bytes at receive[i] from it. The part of this rank is copied. */
cot_status cot_group_all_to_all(cot_group *group, int first, int count, void *const send[], const size_t send_bytes[],
                                void *const receive[], const size_t receive_bytes[]);

/* The bytes of memory that cot_group_sum needs for `count` numbers. */
size_t cot_group_sum_bytes(const cot_group *group, int64_t count);

/* Replaces values[0 .. count) on every rank by the sum over all ranks, added in the order of the ranks. */
cot_status cot_group_sum(cot_group *group, double *values, int64_t count, void *memory);

#endif
