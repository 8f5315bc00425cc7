/* SPDX-License-Identifier: Apache-2.0
 * gpu.h: a rank's GPU: memory, copies, events and kernels of calls over a group. Work goes to two streams: the *main*
 * stream is that of the caller's queue, and the *side* stream carries transfers, so that they overlap with arithmetic.
 *
 * gpu_none.c replaces gpu.c in a build without nvcc, where no CUDA queue exists. */
#ifndef COT_PARALLEL_GPU_H
#define COT_PARALLEL_GPU_H

#include <cotangent/core.h>

#include <stdbool.h>

typedef struct cot_gpu cot_gpu;

typedef enum cot_stream { COT_MAIN_STREAM, COT_SIDE_STREAM } cot_stream;

/* Opens the driver, creates the side stream and loads the kernels. `context` is a CUcontext; NULL: the primary context
 * of device number `device`, which the driver counts. */
cot_status cot_gpu_open(const char *call, void *context, int device, cot_gpu **out);
/* Waits for the last call and for the side stream, and frees everything. */
void cot_gpu_close(cot_gpu *gpu);

/* The CUcontext, which never changes. */
const void *cot_gpu_context(const cot_gpu *gpu);

/* Makes the context current, for a call on a queue. The queue's work waits for the previous call's: both use the
 * group's memory. Fails if the stream is being captured. */
cot_status cot_gpu_enter(cot_gpu *gpu, const char *call, void *context, void *stream);
/* Makes the context current, between calls. */
cot_status cot_gpu_push(cot_gpu *gpu);
/* Restores the previous context. */
void cot_gpu_leave(cot_gpu *gpu);
/* Records the end of a call's work, before leave. side: the main stream first waits for the side stream. */
cot_status cot_gpu_end(cot_gpu *gpu, bool side);

/* ---- memory: between enter and leave --------------------------------------------------------------------------- */

/* Replaces device memory by a larger block, after the work that uses it. The contents are lost. */
cot_status cot_gpu_grow(cot_gpu *gpu, const char *call, size_t bytes, void **memory);
/* Device memory of its own. */
cot_status cot_gpu_alloc(cot_gpu *gpu, const char *call, size_t bytes, void **memory);
void cot_gpu_free(cot_gpu *gpu, void *memory);
/* Page-locked host memory, which cot_gpu_close frees. */
cot_status cot_gpu_host_memory(cot_gpu *gpu, size_t bytes, void **memory);
/* Page-locked host memory of its own. */
cot_status cot_gpu_host_alloc(cot_gpu *gpu, size_t bytes, void **memory);
void cot_gpu_host_free(cot_gpu *gpu, void *memory);

/* Enqueue on the main stream. The host memory of an upload may change when the function returns, because it is pageable:
 * the driver copies it to a buffer of its own before that. */
cot_status cot_gpu_upload(cot_gpu *gpu, void *to, const void *host, size_t bytes);
cot_status cot_gpu_move(cot_gpu *gpu, void *to, const void *from, size_t bytes);
cot_status cot_gpu_clear(cot_gpu *gpu, void *data, size_t bytes);
/* Copies to the host, and waits. */
cot_status cot_gpu_download(cot_gpu *gpu, void *host, const void *from, size_t bytes);

/* As cot_copy_tensor and cot_fill_tensor of rows.h. */
cot_status cot_gpu_copy_tensor(cot_gpu *gpu, const cot_tensor *to, const cot_tensor *from, bool add);
cot_status cot_gpu_fill_tensor(cot_gpu *gpu, const cot_tensor *to, double value);
/* As cot_sum_tensors of rows.h, of 1 to COT_MAX_SOURCES f32 tensors with the alignment of the first one. */
cot_status cot_gpu_sum_tensors(cot_gpu *gpu, const cot_tensor *to, const cot_tensor from[], int count, bool add);

/* out [rows,H,d_v] and lse [H,rows], f32: lse becomes log(exp(lse) + exp(sink)), out shrinks. */
cot_status cot_gpu_add_sink(cot_gpu *gpu, const cot_tensor *out, const cot_tensor *lse, const cot_tensor *sink);
/* sums[h] -= sum of exp(sink[h] - lse) * delta over the rows of lse and delta [H,rows], f32. sums is f64 [H]. */
cot_status cot_gpu_sum_dsink(cot_gpu *gpu, double *sums, const cot_tensor *lse, const cot_tensor *delta,
                             const cot_tensor *sink);
/* to[n] = clamp(from[n], begin, end) - begin. from is i32 of rank 1. */
cot_status cot_gpu_clamp_offsets(cot_gpu *gpu, int32_t *to, const cot_tensor *from, int64_t begin, int64_t end);

/* ---- streams and events ----------------------------------------------------------------------------------------- */

/* Creates the event unless *event has one, and records it on the stream. */
cot_status cot_gpu_record(cot_gpu *gpu, cot_stream stream, void **event);
/* Later work of the stream waits for the event. */
cot_status cot_gpu_await(cot_gpu *gpu, cot_stream stream, void *event);
/* Whether the event has happened. */
cot_status cot_gpu_poll(cot_gpu *gpu, void *event, bool *happened);
/* The host waits for the event. */
cot_status cot_gpu_synchronize(cot_gpu *gpu, void *event);
/* Destroys the event, if there is one. */
void cot_gpu_drop(cot_gpu *gpu, void **event);
/* Enqueue a copy on the side stream: from memory of this GPU or of the peer's, which may be the same GPU; from host
 * memory; to page-locked host memory. */
cot_status cot_gpu_move_aside(cot_gpu *gpu, const cot_gpu *peer, void *to, const void *from, size_t bytes);
cot_status cot_gpu_upload_aside(cot_gpu *gpu, void *to, const void *host, size_t bytes);
cot_status cot_gpu_download_aside(cot_gpu *gpu, void *host, const void *from, size_t bytes);
/* Measures transfers, from one call of profile_begin to one of profile_end: `transfers` are the seconds that they take on
 * the side stream, and `exposed` are those in which the main stream waits for them. The engine encloses what it enqueues
 * in marks. Between NCCL's marks are also the seconds in which a rank waits for another one. Without profile_begin a mark
 * does nothing. */
cot_status cot_gpu_profile_begin(cot_gpu *gpu);
cot_status cot_gpu_profile_end(cot_gpu *gpu, double *transfers, double *exposed);
cot_status cot_gpu_mark_begin(cot_gpu *gpu, cot_stream stream);
cot_status cot_gpu_mark_end(cot_gpu *gpu, cot_stream stream);
/* The CUstream of transfers. */
void *cot_gpu_side_stream(const cot_gpu *gpu);
/* The event at the end of the last call; NULL before the first. */
void *cot_gpu_last_event(const cot_gpu *gpu);

#endif
