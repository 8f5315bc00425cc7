/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/core.h: the types and functions that all ops share: status and messages, tensor views, queues.
 *
 * Conventions of the whole interface
 *   - Every call that can fail returns a cot_status. COT_OK is 0. After any other status, cot_error_message() on the same thread
 *     names the argument, its value and the expected value. A call that fails its checks has written nothing. After
 *     COT_DEVICE_ERROR, or an error of cot_queue_check, the contents of the outputs are undefined.
 *   - The library never prints, exits, aborts or installs handlers. It keeps no mutable global state.
 *   - A cot_tensor is a view. The caller owns the memory and keeps it alive during the call (on a GPU: until the
 *     stream has completed the call).
 *   - Argument structs begin with struct_size and grow only at their end. COT_INIT initialises them.
 *   - Gradients are overwritten (=). A struct with the member `accumulate` can add (+=) to the gradients that the
 *     comment of this member names: all gradients in attention, the parameter gradients in the other ops.
 *   - An optional tensor is absent if its struct is all zero (dtype COT_DTYPE_NONE). An absent output is not computed.
 *   - Results of one build on one kind of machine have the same bits in every run: on the CPU for any number of threads,
 *     on a GPU for tensors at the same alignment (address modulo 16 bytes). The only exception is attention's backward
 *     with allow_nondeterminism.
 */
#ifndef COTANGENT_CORE_H
#define COTANGENT_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define COT_VERSION_MAJOR 0 /* semantic versioning: incompatible changes; part of the library's soname */
#define COT_VERSION_MINOR 1 /* additions */
#define COT_VERSION_PATCH 0 /* fixes */

/* Marks the functions that the shared library exports. */
#if defined(COT_BUILDING_LIBRARY)
#define COT_API __attribute__((visibility("default")))
#else
#define COT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library at run time, "0.1.0". The macros above are the version of this header. A static string. */
COT_API const char *cot_version(void);

/* ---- status ------------------------------------------------------------------------------------------- */

/* The result of a call. docs/guide/errors_c.md describes them, with examples. */
typedef enum cot_status {
    COT_OK = 0,                  /* success */
    COT_INVALID_ARGUMENT = 1,    /* a null pointer, an option or flag out of its range, conflicting arguments */
    COT_INVALID_SHAPE = 2,       /* a rank or size that does not fit the other arguments, or overflows */
    COT_INVALID_DTYPE = 3,       /* an unknown dtype, or one that this argument cannot have */
    COT_INVALID_LAYOUT = 4,      /* invalid strides, misalignment, or an output that overlaps another argument */
    COT_INVALID_DATA = 5,        /* index data (cu_seqlens, conv_state_indices, ...) out of order or range */
    COT_UNSUPPORTED = 6,         /* valid, but not supported by any kernel of the backend, or by the forced kernel */
    COT_WORKSPACE_TOO_SMALL = 7, /* the caller's workspace is smaller than cot_OP_DIR_workspace says */
    COT_OUT_OF_MEMORY = 8,       /* the queue's pool could not grow, or its allocator returned NULL */
    COT_WOULD_ALLOCATE = 9,      /* the pool would have to grow during stream capture: call cot_queue_reserve first */
    COT_NO_DEVICE = 10,          /* the backend is not available: no driver, no device, or not built in */
    COT_DEVICE_ERROR = 11,       /* the driver reported an error; the message contains it */
    COT_PEER_ERROR = 12          /* parallel.h: another rank failed, left, or did not answer in time */
} cot_status;

/* The name of a status, such as "COT_INVALID_SHAPE". "COT_?" for an unknown value. A static string. */
COT_API const char *cot_status_name(cot_status status);

/* The message of the last failed call on this thread, or "". Never NULL. Valid until the next failure on this
 * thread; a successful call does not change it. */
COT_API const char *cot_error_message(void);

/* Copies that message, truncated to fit and always null-terminated. Returns its full length without the terminator.
 * For runtimes that cannot hold a C pointer. With size 0 it writes nothing, and buffer may be null. */
COT_API size_t cot_error_copy(char *buffer, size_t size);

/* Stores a message for cot_error_message() on this thread, truncated to fit, and returns `status`. For libraries that
 * build on this one, such as libcotangent_parallel. message = NULL: the message does not change. */
COT_API cot_status cot_error_set(cot_status status, const char *message);

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* The type of an element. */
typedef enum cot_dtype {
    COT_DTYPE_NONE = 0, /* absent */
    COT_F32 = 1,        /* IEEE binary32 */
    COT_F16 = 2,        /* IEEE binary16 */
    COT_BF16 = 3,       /* upper half of binary32 */
    COT_F64 = 4,        /* CPU only, through the scalar kernels */
    COT_I32 = 5,        /* index data */
    COT_U8 = 6          /* masks and bytes */
} cot_dtype;

#define COT_MAX_RANK 6 /* axes of a tensor, at most */

/* A non-owning strided view. Element (i0, i1, ...) is at data + (i0*stride[0] + i1*stride[1] + ...) elements.
 * Strides count elements. They may be negative, and may be 0 in inputs (broadcast). data must be aligned to the
 * element size, and may be NULL if a size is 0. A struct of zeros is an absent tensor. */
typedef struct cot_tensor {
    void *data;                   /* element (0, 0, ...) */
    cot_dtype dtype;              /* COT_DTYPE_NONE = absent */
    int32_t rank;                 /* 0 to COT_MAX_RANK */
    int64_t shape[COT_MAX_RANK];  /* sizes of the first `rank` axes, 0 or more */
    int64_t stride[COT_MAX_RANK]; /* elements from one index of an axis to the next */
} cot_tensor;

/* The size of an element in bytes; 0 for an unknown dtype. */
COT_API size_t cot_dtype_size(cot_dtype dtype);

/* "f32", "f16", "bf16", "f64", "i32", "u8" or "none"; "?" for an unknown dtype. A static string. */
COT_API const char *cot_dtype_name(cot_dtype dtype);

/* A row-major view with `rank` axes, 0 <= rank <= COT_MAX_RANK. For another rank, an absent tensor. */
COT_API cot_tensor cot_tensor_contiguous(void *data, cot_dtype dtype, int rank, const int64_t *shape);

/* ---- argument structs --------------------------------------------------------------------------------- */

/* Zeroes the struct that p points to and sets its struct_size. A designated initialiser with .struct_size = sizeof
 * does the same. */
#define COT_INIT(p) (memset((p), 0, sizeof *(p)), (void)((p)->struct_size = sizeof *(p)))

/* Elementwise activations. An op's header says which of them the op supports. */
typedef enum cot_activation {
    COT_ACTIVATION_NONE = 0,      /* z */
    COT_ACTIVATION_SILU = 1,      /* z * sigmoid(z) */
    COT_ACTIVATION_RELU = 2,      /* max(z, 0) */
    COT_ACTIVATION_GELU_TANH = 3, /* z/2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 z^3))) */
    COT_ACTIVATION_GELU_ERF = 4   /* z/2 * (1 + erf(z/sqrt(2))) */
} cot_activation;

/* ---- queues ------------------------------------------------------------------------------------------- */

/* The backend of a queue. */
typedef enum cot_backend {
    COT_BACKEND_CPU = 0,  /* threads of this process */
    COT_BACKEND_CUDA = 1, /* NVIDIA GPUs, optimised for Hopper; COT_NO_DEVICE in a build without CUDA */
    COT_BACKEND_HIP = 2   /* AMD GPUs, gfx90a and gfx942: some ops, tested in an emulator only; COT_NO_DEVICE in a build
                           * without HIP */
} cot_backend;

/* A queue runs work. Only one thread may use a queue at a time. Different queues are independent.
 *   CPU   a call is complete when it returns.
 *   CUDA  a call only enqueues work on the queue's stream. It does not wait, and it allocates memory only to grow the
 *         pool (see cot_queue_reserve and cot_queue_set_allocator). A CUDA graph can capture it. All tensor data and
 *         the workspace are device memory. The host cannot check index data: kernels clamp invalid entries, and
 *         cot_queue_check reports them.
 *   HIP   as CUDA. A call of an op without a HIP kernel returns COT_UNSUPPORTED. */
typedef struct cot_queue cot_queue;

/* Options of cot_queue_create. COT_INIT sets the defaults. */
typedef struct cot_queue_options {
    size_t struct_size;
    cot_backend backend; /* default: COT_BACKEND_CPU */
    int32_t threads; /* CPU: number of threads; 0 = OpenMP's default. Affects the workspace sizes, not the results */
    const char *kernels; /* forces kernels: "op=kernel,op=kernel"; copied. NULL = environment variable COT_KERNEL */
    int32_t device;      /* CUDA, HIP: index of the device; ignored if stream is set */
    void *stream;        /* CUDA: a CUstream (cudaStream_t) that the caller owns and destroys after the queue;
                          * NULL = the default stream of the device's primary context. HIP: a hipStream_t */
} cot_queue_options;

/* Creates a queue. options may be NULL (CPU, all threads). The caller destroys the queue with cot_queue_destroy.
 * In a process that was forked after the library was loaded, CPU queues run on one thread: OpenMP's threads do
 * not survive a fork.
 * A CUDA queue opens the driver (libcuda.so.1), of the build's major version of CUDA or newer. It uses the context of the
 * stream, else the device's primary context. No call changes the thread's current context. A HIP queue opens
 * libamdhip64.so of ROCm 6.0 or later. No call changes the thread's current device.
 * Errors: COT_INVALID_ARGUMENT (out, options, threads, kernels, device), COT_OUT_OF_MEMORY, COT_NO_DEVICE (no driver,
 * a driver that is too old, no device, an architecture that no kernel supports), COT_DEVICE_ERROR. */
COT_API cot_status cot_queue_create(const cot_queue_options *options, cot_queue **out);

/* Destroys a queue and frees its pool. On CUDA, it first waits for the enqueued work. NULL is allowed. */
COT_API void cot_queue_destroy(cot_queue *queue);

/* The number of CPU threads that calls on this queue use; 0 for a null queue. */
COT_API int32_t cot_queue_threads(const cot_queue *queue);

/* The backend of a queue; COT_BACKEND_CPU for a null queue. */
COT_API cot_backend cot_queue_backend(const cot_queue *queue);

/* Writes the CUcontext and the CUstream (NULL = the default stream) of a CUDA queue, for libraries that enqueue work of
 * their own on it, such as libcotangent_parallel. Both belong to the queue or to its caller.
 * Errors: COT_INVALID_ARGUMENT (queue; a CPU or HIP queue; context, stream). */
COT_API cot_status cot_queue_cuda(const cot_queue *queue, void **context, void **stream);

/* Grows the queue's pool to at least `bytes`. Calls without a workspace of their own use the pool, and allocate nothing
 * if the pool is large enough. The pool never shrinks. It cannot grow while the stream is being captured.
 * Errors: COT_INVALID_ARGUMENT (queue), COT_OUT_OF_MEMORY, COT_WOULD_ALLOCATE. */
COT_API cot_status cot_queue_reserve(cot_queue *queue, size_t bytes);

/* A callback that returns memory for the workspace of a call, or NULL if there is none. */
typedef void *cot_allocator(void *context, size_t bytes);

/* Sets the callback from which all later calls get their workspace, instead of from the queue's pool. A framework can
 * thus give a call memory from its own allocator, without a query of the size. allocator = NULL: the pool again.
 *   When      A call whose arguments have a workspace, or whose kernel needs none, does not call it. Every other call
 *             calls it once, on the calling thread, after all checks of the arguments and before any work. The
 *             functions cot_OP_DIR_workspace do not call it.
 *   Memory    `bytes` bytes or more (bytes > 0), at a multiple of 64 bytes; on a CUDA queue, device memory. The
 *             contents are undefined. The caller owns it, and keeps it valid until the call has returned; on a CUDA
 *             queue, until the queue's stream has completed the call's work. An allocator that is ordered by that
 *             stream may therefore free the memory as soon as the call has returned.
 *   Context   `context` is passed to the callback unchanged, and must stay valid as long as the queue has the callback.
 *             The callback runs in the default floating-point state and must return (no longjmp, no C++ exception).
 *             While it runs, the callback itself or one other thread may use the queue. If they set another stream, this call
 *             continues on that stream.
 *   Capture   The library allocates nothing. While the queue's stream is being captured, the callback must obey the
 *             rules of the capture, and the memory must stay valid for all launches of the graph.
 *   Errors    If the callback returns NULL, the call returns COT_OUT_OF_MEMORY. If the memory is misaligned, it returns
 *             COT_INVALID_LAYOUT. Both messages name the workspace. Nothing has been written then.
 * Errors of this function: COT_INVALID_ARGUMENT (queue). */
COT_API cot_status cot_queue_set_allocator(cot_queue *queue, cot_allocator *allocator, void *context);

/* Sets the stream of a CUDA or HIP queue, for all later calls. The stream belongs to the queue's context (HIP: its
 * device); NULL = the default stream. One queue, with the device code that it has loaded, can thus serve all streams of a device.
 * The caller synchronises streams whose work depends on each other. Streams that run at the same time need their own
 * workspaces, because the queue has only one pool. The function may be called during a capture.
 * Errors: COT_INVALID_ARGUMENT (queue; a CPU queue; a stream of another context), COT_DEVICE_ERROR. */
COT_API cot_status cot_queue_set_stream(cot_queue *queue, void *stream);

/* Waits for the enqueued work and returns whether it succeeded. On the CPU it returns COT_OK at once.
 * Errors: COT_INVALID_DATA (a kernel met a fault in index data since the last check; the message has the first fault,
 * and kernels clamped or skipped the invalid entries), COT_DEVICE_ERROR (the device failed), COT_INVALID_ARGUMENT
 * (queue; a stream that is being captured). */
COT_API cot_status cot_queue_check(cot_queue *queue);

#ifdef __cplusplus
}
#endif
#endif
