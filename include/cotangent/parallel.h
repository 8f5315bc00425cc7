/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/parallel.h: attention and convolution of sequences that are cut over the ranks of a group. The functions
 * are in the library libcotangent_parallel, which uses libcotangent.
 *
 * Group: N ranks, each with its own cot_group handle. A rank is a thread of this process (cot_group_create_local), a
 * process of MPI (cot_group_create_mpi), a GPU (cot_group_create_nccl), or whatever the caller's transfers connect
 * (cot_group_create_custom). Every rank makes the same calls in the same order: a call of this header is collective.
 * Only one thread may use a handle at a time.
 *
 * Cuts: rank r of N holds these rows of a sequence of T rows, in ascending order. To *shard* a tensor is to take the
 * rows of a rank (cot_shard). floor(...) makes parts that differ by at most one row, so that T need not be a multiple of
 * N.
 *     contiguous   floor(T r / N) .. floor(T (r+1) / N)
 *     zigzag       chunks r and 2N-1-r of 2N chunks; chunk c is floor(T c / 2N) .. floor(T (c+1) / 2N)
 *     striped      stripes r, r+N, r+2N, ...; stripe c is c*stripe .. (c+1)*stripe, cut off at T
 * Zigzag and striped cuts give the ranks equal work under a causal mask. A stripe should have 128 rows or more: every
 * stripe of queries, or even every pair of stripes, is one call of the core.
 *
 * Results are those of the single call on the whole sequence, within the error rule of
 * docs/guide/accuracy.md. They have the same bits in every run with the same number of ranks and the same
 * options, except the backward of attention with allow_nondeterminism. Sums over ranks are added in the order of the
 * ranks, or of the steps of the ring.
 *
 * Before data travels, all ranks exchange their statuses and all options, shapes and index data. If a rank's arguments
 * are refused, that rank gets the status and message of the refusal, and all others get COT_PEER_ERROR with the same
 * message. If the arguments of two ranks differ, all ranks get COT_PEER_ERROR, and the message names the rank and the
 * argument. In both cases nothing has been written, and the group can go on.
 *
 * If a rank fails later, leaves (cot_group_destroy), or does not answer for `timeout` seconds, every rank gets
 * COT_PEER_ERROR from this call or from its next one. The group is then broken: every later call returns
 * COT_PEER_ERROR at once, and the contents of the outputs are undefined. Open MPI ends the whole job if a process dies.
 *
 * CUDA queues: tensors are device memory, and a call only enqueues work on the queue's stream, after the host has
 * exchanged the options and read the index data. Transfers use a stream of the group. All ranks pass queues of the same
 * backend. A call cannot be captured by a CUDA graph.
 *   threads      CPU queues, or CUDA queues of one or several devices, each with a stream of its own. Copy engines
 *                transfer the data between devices. Where the devices cannot read each other's memory, the driver
 *                copies through the host.
 *   NCCL         CUDA queues. A CPU queue gives COT_UNSUPPORTED.
 *   MPI, custom  CPU queues, or CUDA queues. Data of CUDA queues goes through page-locked host memory of the group, and
 *                the call waits for the GPU before each transfer. The rank's next transfer overlaps with arithmetic
 *                that was enqueued before.
 *
 * Errors, for all calls: COT_INVALID_ARGUMENT, COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT,
 * COT_INVALID_DATA and COT_UNSUPPORTED as the op's header says, COT_OUT_OF_MEMORY, COT_PEER_ERROR. With CUDA queues
 * also COT_NO_DEVICE and COT_DEVICE_ERROR, as in core.h.
 */
#ifndef COTANGENT_PARALLEL_H
#define COTANGENT_PARALLEL_H

#include <cotangent/attention.h>
#include <cotangent/causal_conv1d.h>
#include <cotangent/core.h>

/* Marks the functions that libcotangent_parallel exports. */
#define COT_PARALLEL_API COT_API

#ifdef __cplusplus
extern "C" {
#endif

/* ---- groups ------------------------------------------------------------------------------------------- */

/* One rank's handle of a group. */
typedef struct cot_group cot_group;

/* Options of a group. COT_INIT sets the defaults. All ranks pass the same options. */
typedef struct cot_group_options {
    size_t struct_size;
    double timeout; /* seconds to wait for another rank; 0 = 30. It must exceed the longest computation between two
                     * transfers, and the longest transfer */
} cot_group_options;

/* Creates the `ranks` handles of a group whose ranks are threads of this process. groups[r] is for rank r. The caller
 * gives each handle to a thread and a queue of its own, and destroys all handles. options may be NULL.
 * Errors: COT_INVALID_ARGUMENT (ranks outside 1 to 1024, options, groups), COT_OUT_OF_MEMORY. */
COT_PARALLEL_API cot_status cot_group_create_local(int32_t ranks, const cot_group_options *options, cot_group **groups);

/* Creates this process's handle of a group over the processes of an MPI communicator. comm points to the caller's
 * MPI_Comm. The library duplicates the communicator, so that its messages do not meet those of the caller. MPI is
 * initialised before this call, and finalised after cot_group_destroy. The calling thread must be allowed to call MPI.
 * The call is collective. options may be NULL.
 * Errors: COT_INVALID_ARGUMENT (comm, options, out), COT_OUT_OF_MEMORY, COT_PEER_ERROR (MPI reported an error; the
 * ranks have other options), COT_UNSUPPORTED (more ranks than this MPI's tags allow: 2 tags a rank), COT_NO_DEVICE (the
 * library was built without MPI). */
COT_PARALLEL_API cot_status cot_group_create_mpi(const void *comm, const cot_group_options *options, cot_group **out);

/* Transfers between ranks that the caller implements, for example on UCX, on libfabric or on a framework's process
 * group. The library calls the functions from the thread that calls the group, one at a time. A function that fails
 * calls cot_error_set with a message and returns an error status. The group is broken then. In a call on a CUDA queue,
 * the functions run with the queue's context current.
 *
 * A send of rank a to rank b matches the receive of rank b from rank a with the same tag. Of several, the first send
 * matches the first receive. Both have the same number of bytes. Tags are 0 to 2*size + 1. The data is host memory. */
typedef struct cot_group_callbacks {
    size_t struct_size;
    void *context; /* the first argument of every function */
    /* Starts to send `bytes` bytes at `data` to rank `peer`, or to receive them from it. Does not wait for the peer.
     * Writes a value that stands for the transfer. bytes is a multiple of 64, and at least 64. */
    cot_status (*start)(void *context, int32_t receive, int32_t peer, int32_t tag, void *data, size_t bytes,
                        void **transfer);
    /* Waits until a transfer is done, at most `timeout` seconds. All other started transfers move on meanwhile. */
    cot_status (*wait)(void *context, void *transfer, double timeout);
    /* Gives up all transfers that are not done, and tells the other ranks the reason, so that their wait or their next
     * start fails. Does not wait for them. Returns 1 if nothing touches the memory of these transfers any more, else 0:
     * the library never frees the memory then. Only destroy is called afterwards. */
    int32_t (*abort)(void *context, const char *reason);
    /* Called by cot_group_destroy. */
    void (*destroy)(void *context);
} cot_group_callbacks;

/* Creates the handle of rank `rank` in a group of `size` ranks that the caller's functions connect. callbacks is
 * copied; all of its functions are required. The call is collective. options may be NULL. If the call fails, `destroy`
 * is not called.
 * Errors: COT_INVALID_ARGUMENT (callbacks, rank, size, options, out), COT_OUT_OF_MEMORY, COT_PEER_ERROR (a callback
 * failed; the ranks have other options). */
COT_PARALLEL_API cot_status cot_group_create_custom(const cot_group_callbacks *callbacks, int32_t rank, int32_t size,
                                                    const cot_group_options *options, cot_group **out);

/* Creates the handle of one rank of a group over a NCCL communicator: CUDA queues, one GPU for each rank, in one
 * process or in many. comm points to the caller's ncclComm_t. The library opens libnccl.so.2 (version 2.18 or later) at
 * run time and duplicates the communicator (ncclCommSplit), so that its messages do not meet those of the caller, and a
 * fault does not abort the caller's communicator. All queues of the group use the primary context of the communicator's
 * device. `timeout` must be longer than the longest call takes on the GPU: a call compares the options of the ranks
 * only when the GPU has finished the call before. The call is collective: ranks of one process call it in a thread
 * each. If a rank has no memory or no driver, the other ranks wait for it in NCCL. options may be NULL.
 * Errors: COT_INVALID_ARGUMENT (comm, options, out), COT_OUT_OF_MEMORY, COT_NO_DEVICE (no NCCL, or one that is too old;
 * no driver; a build without CUDA), COT_DEVICE_ERROR, COT_PEER_ERROR (NCCL reported an error; the ranks have other
 * options). */
COT_PARALLEL_API cot_status cot_group_create_nccl(const void *comm, const cot_group_options *options, cot_group **out);

/* Destroys a handle. A rank that leaves while others wait for it breaks the group. With MPI and NCCL the call is
 * collective unless the group is broken. NULL is allowed. */
COT_PARALLEL_API void cot_group_destroy(cot_group *group);

/* The rank of this handle, 0 .. size-1; -1 for a null group. */
COT_PARALLEL_API int32_t cot_group_rank(const cot_group *group);

/* The number of ranks; 0 for a null group. */
COT_PARALLEL_API int32_t cot_group_size(const cot_group *group);

/* Waits for the work that the last call enqueued on a GPU, at most `timeout` seconds. Call it before cot_queue_check in
 * a group over NCCL: if a rank has died, the work of the others never ends, and cot_queue_check would wait for ever. In
 * other groups it returns at once.
 * Errors: COT_INVALID_ARGUMENT (group), COT_PEER_ERROR (the group is broken; then the GPU's work ends),
 * COT_DEVICE_ERROR. */
COT_PARALLEL_API cot_status cot_group_check(cot_group *group);

/* Breaks the group, for a caller that cannot go on. The other ranks get COT_PEER_ERROR with the reason, which may be
 * NULL; over NCCL without the reason, after `timeout` seconds. Returns COT_OK, or COT_INVALID_ARGUMENT for a null
 * group. */
COT_PARALLEL_API cot_status cot_group_abort(cot_group *group, const char *reason);

/* Replaces the tensor on every rank by the sum over all ranks: x = ((x[0] + x[1]) + x[2]) + ..., in the order of the
 * ranks. Sums are f64, and each result is rounded once to the tensor's dtype. For gradients of parameters, which each
 * rank computes from its own rows. tensor: any float dtype and strides, the same shape on all ranks, in the memory of
 * the queue; queue = NULL: in host memory.
 * Errors: COT_INVALID_ARGUMENT, COT_INVALID_SHAPE, COT_INVALID_DTYPE, COT_INVALID_LAYOUT (misaligned data, repeated
 * elements). The group keeps a buffer as large as the tensor, and 8/N bytes for each element. It keeps a second buffer
 * of this size if the tensor is not contiguous, not aligned to 64 bytes, or has a size that is no multiple of 64 bytes,
 * and for host memory unless the ranks are threads. */
COT_PARALLEL_API cot_status cot_group_all_reduce(cot_group *group, cot_queue *queue, const cot_tensor *tensor);

/* ---- cuts --------------------------------------------------------------------------------------------- */

/* How a sequence is cut over the ranks; see the top of this header. */
typedef enum cot_cut {
    COT_CUT_CONTIGUOUS = 0, /* one range of rows a rank */
    COT_CUT_ZIGZAG = 1,     /* a chunk from the front and its mirror image from the back */
    COT_CUT_STRIPED = 2     /* stripes of `stripe` rows in turn */
} cot_cut;

/* How a call is divided. COT_INIT sets the defaults: a contiguous cut, and the ring alone. */
typedef struct cot_parallel_options {
    size_t struct_size;
    cot_cut cut;        /* default: COT_CUT_CONTIGUOUS */
    int64_t stripe;     /* rows of a stripe with COT_CUT_STRIPED; else 0 */
    int32_t head_ranks; /* attention: ranks that exchange heads, see below; 0 = 1. Convolution: 0 or 1 */
    int64_t length; /* convolution: T of the whole sequence. Attention: 0, its arguments have the lengths. The functions
                     * cot_shard* read only cut and stripe */
    int32_t all_gather; /* attention: 1: each rank gathers all keys and values, see below; 0: a ring. Convolution: 0 */
} cot_parallel_options;

/* Writes the number of rows that a rank holds of `length` rows. options may be NULL, also in the next three calls.
 * Errors: COT_INVALID_ARGUMENT (options, ranks, rank, rows), COT_INVALID_SHAPE (length), COT_OUT_OF_MEMORY. */
COT_PARALLEL_API cot_status cot_shard_rows(const cot_parallel_options *options, int64_t length, int32_t ranks,
                                           int32_t rank, int64_t *rows);

/* Writes the position of each of the rank's rows in the whole sequence, for rotary embeddings and the like. positions
 * has cot_shard_rows elements. Errors as above. */
COT_PARALLEL_API cot_status cot_shard_positions(const cot_parallel_options *options, int64_t length, int32_t ranks,
                                                int32_t rank, int64_t *positions);

/* Copies a rank's rows of `axis` of a whole tensor into `part`. Both are in host memory and have the same dtype, of any
 * kind. part has cot_shard_rows rows on that axis, and the sizes of the whole on all others.
 * Errors: as above, also COT_INVALID_DTYPE and COT_INVALID_LAYOUT. */
COT_PARALLEL_API cot_status cot_shard(const cot_parallel_options *options, int32_t ranks, int32_t rank, int32_t axis,
                                      const cot_tensor *whole, const cot_tensor *part);

/* Copies `part` into the rank's rows of the whole tensor: the inverse of cot_shard. */
COT_PARALLEL_API cot_status cot_unshard(const cot_parallel_options *options, int32_t ranks, int32_t rank, int32_t axis,
                                        const cot_tensor *part, const cot_tensor *whole);

/* ---- attention ---------------------------------------------------------------------------------------- */

/* Attention over all ranks. The arguments are those of the single call (attention.h), with these differences:
 *
 *   rows       q, out, lse, dout, dlse, delta and dq have the rank's rows of all queries; k, v, dk and dv have its
 *              rows of all keys. Both axes are cut in the same way.
 *   lengths    q_length and k_length are the rows of the whole sequences: Tq and Tk of the single call, or total_q and
 *              total_k. q_begin and k_begin are 0.
 *   bias       [B or 1, H or 1, rows of the rank or 1, Tk or 1] of all keys. Size 1 on the third axis means that
 *              all queries of all ranks share the element. In packed calls every rank has the whole bias.
 *   dbias      like bias. Every rank gets the whole sum where all queries share an element, and in packed calls.
 *   dsink      every rank gets the whole sum.
 *   the rest   seqused, cu_seqlens, sink, alibi_slopes and the dropout tensors are those of the whole sequence, with
 *              the same values on every rank. Packed sequences may lie over several ranks.
 *   workspace  NULL: the queue's pool serves the calls of the core, and the group keeps memory for the transfers.
 *
 * Ring (head_ranks = 1): in step s = 0 .. N-1, rank r attends to the keys of rank r-s (modulo N). Their owner sends
 * them directly, during the arithmetic of the step before. Blocks that the rank's queries do not see are neither sent
 * nor computed. The results of two sets of keys a and b are merged in float32 (f64 in f64 calls), which is rounded to
 * out's dtype at the end:
 *
 *     lse = log(exp(lse_a) + exp(lse_b));    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
 *     at the end, with sink:    out = out * exp(lse - lse');    lse' = log(exp(lse) + exp(sink))
 *
 * In the backward, delta and lse are those of the whole sequence. Rank r computes its part of dk and dv for the keys of
 * rank r-s, in float32, and sends it to their owner, which adds the parts in the order of the steps.
 *
 * All-gather (all_gather = 1): instead of the ring, each rank gathers the keys and values that its queries attend to.
 * Each of its ranges of rows is one call of the core, which writes the results in their own dtypes. In the backward the
 * rank computes its part of dk and dv for these keys, in float32 (f64 in f64 calls). The owner of a key adds the parts in
 * the order of the ranks, in f64, and rounds once. Ranks that are threads with CPU queues, or with queues of one GPU,
 * read each other's memory: rank 0 gathers for all of them. N / head_ranks is at most 64: else COT_UNSUPPORTED.
 *
 * Heads (head_ranks = C > 1): ranks r with the same r / C exchange all-to-all, so that each holds the rows of all C
 * ranks for H/C heads. The ring, or the
 * all-gather, then has N/C places. C = N has neither. N and H must be multiples of C. Hkv must be
 * a multiple of C, or C of Hkv. A bias needs C = 1: else COT_UNSUPPORTED. So does dropout, unless H times the rows of
 * all queries (B*q_length, or q_length in packed calls) is less than 2^31. */
COT_PARALLEL_API cot_status cot_parallel_attention_forward(cot_group *group, cot_queue *queue,
                                                           const cot_parallel_options *options,
                                                           const cot_attention_forward_args *args);

/* The gradients over all ranks; see cot_parallel_attention_forward. allow_nondeterminism is passed on to the
 * calls of the core. */
COT_PARALLEL_API cot_status cot_parallel_attention_backward(cot_group *group, cot_queue *queue,
                                                            const cot_parallel_options *options,
                                                            const cot_attention_backward_args *args);

/* ---- causal_conv1d ------------------------------------------------------------------------------------ */

/* The convolution over all ranks. The arguments are those of the single call (causal_conv1d.h), with these differences:
 *
 *   rows       x, y, dy, dx and seq_idx have the rank's time steps of the whole sequence of options.length.
 *   the rest   weight, bias, cu_seqlens, initial_state and dfinal_state are those of the whole sequence, with the same
 *              values on every rank. Packed sequences may lie over several ranks.
 *   results    every rank gets the whole final_state, dinitial_state, dweight and dbias. The parts of dweight and dbias
 *              are added in the order of the ranks, in f64.
 *   workspace  NULL, as in attention.
 *
 * Each segment of a rank needs the K-1 time steps before it, and in the backward the K-1 of x and dy after it. The
 * ranks exchange them all-to-all before the arithmetic. They may come from several ranks. */
COT_PARALLEL_API cot_status cot_parallel_causal_conv1d_forward(cot_group *group, cot_queue *queue,
                                                               const cot_parallel_options *options,
                                                               const cot_causal_conv1d_forward_args *args);

/* The gradients over all ranks; see cot_parallel_causal_conv1d_forward. accumulate adds the whole sums to dweight and
 * dbias of every rank. */
COT_PARALLEL_API cot_status cot_parallel_causal_conv1d_backward(cot_group *group, cot_queue *queue,
                                                                const cot_parallel_options *options,
                                                                const cot_causal_conv1d_backward_args *args);

#ifdef __cplusplus
}
#endif
#endif
