/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_none.c: stubs of gpu.h for a build without nvcc. They are never called, since no CUDA queue can be created, except
 * cot_gpu_close, and cot_gpu_open by a group over NCCL. */
#include "gpu.h"

#include "core/status.h"

cot_status cot_gpu_open(const char *call, void *context, int device, cot_gpu **out)
{
    (void)context, (void)device, (void)out;
    return cot_fail(COT_NO_DEVICE, "%s: built without kernels for NVIDIA GPUs (no nvcc was found, or COT_CUDA=OFF)",
                    call);
}

void cot_gpu_close(cot_gpu *gpu)
{
    (void)gpu;
}

const void *cot_gpu_context(const cot_gpu *gpu)
{
    (void)gpu;
    return NULL;
}

void cot_gpu_leave(cot_gpu *gpu)
{
    (void)gpu;
}

void cot_gpu_drop(cot_gpu *gpu, void **event)
{
    (void)gpu, (void)event;
}

void cot_gpu_host_free(cot_gpu *gpu, void *memory)
{
    (void)gpu, (void)memory;
}

void cot_gpu_free(cot_gpu *gpu, void *memory)
{
    (void)gpu, (void)memory;
}

void *cot_gpu_side_stream(const cot_gpu *gpu)
{
    (void)gpu;
    return NULL;
}

void *cot_gpu_last_event(const cot_gpu *gpu)
{
    (void)gpu;
    return NULL;
}

#define NONE(name, parameters, ...) \
    cot_status name parameters      \
    {                               \
        __VA_ARGS__;                \
        return COT_NO_DEVICE;       \
    }

/* clang-format off */
NONE(cot_gpu_enter, (cot_gpu *g, const char *c, void *x, void *s), (void)g, (void)c, (void)x, (void)s)
NONE(cot_gpu_push, (cot_gpu *g), (void)g)
NONE(cot_gpu_alloc, (cot_gpu *g, const char *c, size_t n, void **m), (void)g, (void)c, (void)n, (void)m)
NONE(cot_gpu_end, (cot_gpu *g, bool s), (void)g, (void)s)
NONE(cot_gpu_grow, (cot_gpu *g, const char *c, size_t n, void **m), (void)g, (void)c, (void)n, (void)m)
NONE(cot_gpu_host_memory, (cot_gpu *g, size_t n, void **m), (void)g, (void)n, (void)m)
NONE(cot_gpu_host_alloc, (cot_gpu *g, size_t n, void **m), (void)g, (void)n, (void)m)
NONE(cot_gpu_upload, (cot_gpu *g, void *t, const void *f, size_t n), (void)g, (void)t, (void)f, (void)n)
NONE(cot_gpu_move, (cot_gpu *g, void *t, const void *f, size_t n), (void)g, (void)t, (void)f, (void)n)
NONE(cot_gpu_clear, (cot_gpu *g, void *t, size_t n), (void)g, (void)t, (void)n)
NONE(cot_gpu_download, (cot_gpu *g, void *t, const void *f, size_t n), (void)g, (void)t, (void)f, (void)n)
NONE(cot_gpu_copy_tensor, (cot_gpu *g, const cot_tensor *t, const cot_tensor *f, bool a), (void)g, (void)t, (void)f, (void)a)
NONE(cot_gpu_fill_tensor, (cot_gpu *g, const cot_tensor *t, double v), (void)g, (void)t, (void)v)
NONE(cot_gpu_sum_tensors, (cot_gpu *g, const cot_tensor *t, const cot_tensor f[], int n, bool a), (void)g, (void)t, (void)f,
     (void)n, (void)a)
NONE(cot_gpu_add_sink, (cot_gpu *g, const cot_tensor *o, const cot_tensor *l, const cot_tensor *s), (void)g, (void)o, (void)l, (void)s)
NONE(cot_gpu_sum_dsink, (cot_gpu *g, double *u, const cot_tensor *l, const cot_tensor *d, const cot_tensor *s), (void)g, (void)u, (void)l, (void)d, (void)s)
NONE(cot_gpu_clamp_offsets, (cot_gpu *g, int32_t *t, const cot_tensor *f, int64_t b, int64_t e), (void)g, (void)t, (void)f, (void)b, (void)e)
NONE(cot_gpu_record, (cot_gpu *g, cot_stream s, void **e), (void)g, (void)s, (void)e)
NONE(cot_gpu_await, (cot_gpu *g, cot_stream s, void *e), (void)g, (void)s, (void)e)
NONE(cot_gpu_poll, (cot_gpu *g, void *e, bool *h), (void)g, (void)e, (void)h)
NONE(cot_gpu_synchronize, (cot_gpu *g, void *e), (void)g, (void)e)
NONE(cot_gpu_profile_begin, (cot_gpu *g), (void)g)
NONE(cot_gpu_profile_end, (cot_gpu *g, double *t, double *e), (void)g, (void)t, (void)e)
NONE(cot_gpu_mark_begin, (cot_gpu *g, cot_stream s), (void)g, (void)s)
NONE(cot_gpu_mark_end, (cot_gpu *g, cot_stream s), (void)g, (void)s)
NONE(cot_gpu_move_aside, (cot_gpu *g, const cot_gpu *p, void *t, const void *f, size_t n), (void)g, (void)p, (void)t, (void)f,
     (void)n)
NONE(cot_gpu_upload_aside, (cot_gpu *g, void *t, const void *f, size_t n), (void)g, (void)t, (void)f, (void)n)
NONE(cot_gpu_download_aside, (cot_gpu *g, void *t, const void *f, size_t n), (void)g, (void)t, (void)f, (void)n)
/* clang-format on */
