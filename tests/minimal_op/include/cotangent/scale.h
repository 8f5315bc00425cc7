/* SPDX-License-Identifier: Apache-2.0
 * scale.h: y = factor x. */
#ifndef COTANGENT_SCALE_H
#define COTANGENT_SCALE_H

#include <cotangent/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The arguments of cot_scale_forward. */
typedef struct cot_scale_forward_args {
    size_t struct_size;
    double factor;
    cot_tensor x;    /* [N], any float dtype */
    cot_tensor y;    /* output: like x */
    void *workspace; /* NULL = memory of the queue; else workspace_bytes bytes, 64-byte aligned */
    size_t workspace_bytes;
} cot_scale_forward_args;

/* Computes y from x. */
COT_API cot_status cot_scale_forward(cot_queue *queue, const cot_scale_forward_args *args);

/* Writes the workspace size of this call in bytes. */
COT_API cot_status cot_scale_forward_workspace(cot_queue *queue, const cot_scale_forward_args *args, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
