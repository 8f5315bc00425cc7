/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/core.h: what every op of the library shares: status and messages, tensor views, queues.
 *
 * Conventions of the whole interface
 *   - Every call returns a cot_status; COT_OK is 0. After any other value cot_error_message() says, on the
 *     same thread, which argument was refused, its value and what was expected. Nothing was written then.
 *   - The library never prints, exits, aborts or installs handlers, and keeps no mutable global state.
 *   - A cot_tensor is a view: the caller owns the memory and keeps it alive during the call (on a GPU: until
 *     the stream has passed the call).
 *   - Argument structs begin with struct_size and grow only at their end: set them up with COT_INIT.
 *   - Gradients are written (=). Where an argument struct has `accumulate`, it makes the parameter gradients +=.
 *   - An absent optional tensor is all zero (dtype COT_DTYPE_NONE); an absent output is not computed.
 *   - Results have the same bits every run, on the CPU for any number of threads.
 */
#ifndef COTANGENT_CORE_H
#define COTANGENT_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define COT_VERSION_MAJOR 0 /* semantic versioning; the library's soname carries it */
#define COT_VERSION_MINOR 1 /* what is added */
#define COT_VERSION_PATCH 0 /* what is mended */

/* Marks what the shared library exports. */
#if defined(COT_BUILDING_LIBRARY)
#define COT_API __attribute__((visibility("default")))
#else
#define COT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1.0": the version of the library that is running (the macros above: of this header). A static string. */
COT_API const char *cot_version(void);

/* ---- status ------------------------------------------------------------------------------------------- */

/* What every call returns. docs/errors.md has an example of each. */
typedef enum cot_status {
    COT_OK = 0,                  /* done */
    COT_INVALID_ARGUMENT = 1,    /* a null pointer, an option or flag out of its range, arguments in conflict */
    COT_INVALID_SHAPE = 2,       /* a rank or size that does not fit the other arguments, or overflows */
    COT_INVALID_DTYPE = 3,       /* an unknown dtype, or one that this argument cannot have */
    COT_INVALID_LAYOUT = 4,      /* strides, alignment, or an output that overlaps another argument */
    COT_INVALID_DATA = 5,        /* index data (cu_seqlens, conv_state_indices, ...) out of order or range */
    COT_UNSUPPORTED = 6,         /* legal, but no kernel of this queue's backend (or the forced one) does it */
    COT_WORKSPACE_TOO_SMALL = 7, /* the caller's workspace is smaller than cot_OP_DIR_workspace says */
    COT_OUT_OF_MEMORY = 8,       /* the queue's pool could not grow */
    COT_WOULD_ALLOCATE = 9,      /* the pool would have to grow during stream capture: cot_queue_reserve first */
    COT_NO_DEVICE = 10,          /* the backend is not there: no driver, no device, not built in */
    COT_DEVICE_ERROR = 11        /* the driver reported an error: the message carries it */
} cot_status;

/* "COT_INVALID_SHAPE" and so on; "COT_?" for a value that is no status. A static string. */
COT_API const char *cot_status_name(cot_status status);

/* The message of the last call that failed on this thread, "" if none has. Valid until the next failure on
 * this thread; never NULL. A successful call leaves it alone. */
COT_API const char *cot_error_message(void);

/* Copies that message, cut to fit and always terminated, and returns its full length without the terminator
 * (for runtimes that cannot hold a C pointer). size 0 writes nothing and may come with a null buffer. */
COT_API size_t cot_error_copy(char *buffer, size_t size);

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* What an element is. */
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

/* A non-owning strided view. Element (i0, i1, ...) lies at data + (i0*stride[0] + i1*stride[1] + ...) elements.
 * Strides count elements, may be negative, and may be 0 in inputs (broadcast). data must be aligned to the
 * element's size, and may be NULL when a size is 0. All zero = absent. */
typedef struct cot_tensor {
    void *data;                   /* element (0, 0, ...) */
    cot_dtype dtype;              /* COT_DTYPE_NONE = absent */
    int32_t rank;                 /* 0 to COT_MAX_RANK */
    int64_t shape[COT_MAX_RANK];  /* sizes of the first `rank` axes, 0 or more */
    int64_t stride[COT_MAX_RANK]; /* elements from one index of an axis to the next */
} cot_tensor;

/* Bytes of one element, 0 for a value that is no dtype. */
COT_API size_t cot_dtype_size(cot_dtype dtype);

/* "f32", "f16", "bf16", "f64", "i32", "u8", "none"; "?" for a value that is no dtype. A static string. */
COT_API const char *cot_dtype_name(cot_dtype dtype);

/* A row-major view of `rank` sizes (0 <= rank <= COT_MAX_RANK; an absent tensor otherwise). */
COT_API cot_tensor cot_tensor_contiguous(void *data, cot_dtype dtype, int rank, const int64_t *shape);

/* ---- argument structs --------------------------------------------------------------------------------- */

/* Zeroes the struct that p points to and sets its struct_size. A designated initialiser that sets
 * .struct_size = sizeof does the same. */
#define COT_INIT(p) (memset((p), 0, sizeof *(p)), (void)((p)->struct_size = sizeof *(p)))

/* Elementwise activations; an op's header says which of them it takes. */
typedef enum cot_activation {
    COT_ACTIVATION_NONE = 0,      /* z */
    COT_ACTIVATION_SILU = 1,      /* z * sigmoid(z) */
    COT_ACTIVATION_RELU = 2,      /* max(z, 0) */
    COT_ACTIVATION_GELU_TANH = 3, /* z/2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 z^3))) */
    COT_ACTIVATION_GELU_ERF = 4   /* z/2 * (1 + erf(z/sqrt(2))) */
} cot_activation;

/* ---- queues ------------------------------------------------------------------------------------------- */

/* Where a queue's work runs. */
typedef enum cot_backend {
    COT_BACKEND_CPU = 0, /* threads of this process */
    COT_BACKEND_CUDA = 1 /* NVIDIA, Hopper first; COT_NO_DEVICE in a build without it */
} cot_backend;

/* Where work runs. One thread uses a queue at a time; different queues are independent.
 *   CPU   a call has finished when it returns.
 *   CUDA  a call only enqueues, on the queue's stream: it neither allocates (but see cot_queue_reserve) nor waits, and
 *         can be captured in a CUDA graph. Every tensor's data, and the workspace, is device memory. Faults in index
 *         data, which the host does not see, are clamped by the kernels and reported by cot_queue_check. */
typedef struct cot_queue cot_queue;

/* For cot_queue_create; COT_INIT sets what most callers want. */
typedef struct cot_queue_options {
    size_t struct_size;
    cot_backend backend; /* COT_BACKEND_CPU unless set */
    int32_t threads; /* CPU: number of threads, 0 = what OpenMP would use. Workspaces depend on it, results do not. */
    const char *kernels; /* "op=kernel,op=kernel": forces a kernel; NULL = the environment's COT_KERNEL. Copied. */
    int32_t device;      /* CUDA: number of the device; ignored where stream says it */
    void *stream;        /* CUDA: a CUstream (cudaStream_t) that the caller owns and keeps until the queue has ended;
                          * NULL = the default stream of the device's primary context */
} cot_queue_options;

/* Creates a queue; options may be NULL (CPU, all threads). The caller ends it with cot_queue_destroy.
 * In a process that was forked after the library was loaded, CPU queues run on one thread: OpenMP's threads do
 * not survive a fork.
 * A CUDA queue opens the driver (libcuda.so.1, version 12.0 or later), uses the stream's context, else the device's
 * primary one, and leaves the thread's current context as it was, as every call does.
 * Errors: COT_INVALID_ARGUMENT (out, options, threads, kernels, device), COT_OUT_OF_MEMORY, COT_NO_DEVICE (no driver,
 * a driver that is too old, no device, an architecture that no kernel serves), COT_DEVICE_ERROR. */
COT_API cot_status cot_queue_create(const cot_queue_options *options, cot_queue **out);

/* Ends a queue and frees its pool; on CUDA, waits first for the work it has enqueued. NULL is allowed. */
COT_API void cot_queue_destroy(cot_queue *queue);

/* The number of threads (CPU) that calls on this queue use; 0 for a null queue. */
COT_API int32_t cot_queue_threads(const cot_queue *queue);

/* Grows the queue's pool to at least `bytes`, so that later calls that bring no workspace of their own and need
 * no more than that allocate nothing. The pool never shrinks before the queue ends; while the stream is being
 * captured it does not grow either.
 * Errors: COT_INVALID_ARGUMENT (queue), COT_OUT_OF_MEMORY, COT_WOULD_ALLOCATE. */
COT_API cot_status cot_queue_reserve(cot_queue *queue, size_t bytes);

/* Moves a CUDA queue to another stream of its context, so that one queue, with the device code that it has loaded,
 * serves all streams of a device: what is called from now on is enqueued there. The caller orders the streams
 * where their work depends on each other, and brings a workspace to calls on streams that run at the same time: the
 * queue's pool is one. NULL = the default stream. Nothing else changes, so that it may be called during a capture.
 * Errors: COT_INVALID_ARGUMENT (queue; a CPU queue; a stream of another context), COT_DEVICE_ERROR. */
COT_API cot_status cot_queue_set_stream(cot_queue *queue, void *stream);

/* Waits for what the queue has enqueued, and tells whether all of it went well: COT_INVALID_DATA with the first fault
 * that a kernel met in index data since the last check (that argument's bad entries were clamped or skipped),
 * COT_DEVICE_ERROR if the device failed. On the CPU there is nothing to wait for.
 * Errors besides: COT_INVALID_ARGUMENT (queue; a stream that is being captured). */
COT_API cot_status cot_queue_check(cot_queue *queue);

#ifdef __cplusplus
}
#endif
#endif
