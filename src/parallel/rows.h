/* SPDX-License-Identifier: Apache-2.0
 * rows.h: views of tensors in host memory, copies between them, and copies of argument structs. */
#ifndef COT_PARALLEL_ROWS_H
#define COT_PARALLEL_ROWS_H

#include <cotangent/core.h>

#include <stdbool.h>

/* Indices begin .. begin+size of one axis. An absent tensor stays absent. */
cot_tensor cot_slice(const cot_tensor *tensor, int axis, int64_t begin, int64_t size);

/* Copies elements between two views of one shape, and converts between float dtypes. With add, float elements are added
 * to those of `to`. Sums are f64, and each result is rounded once. The views may not overlap. */
void cot_copy_tensor(const cot_tensor *to, const cot_tensor *from, bool add);

/* The most tensors that cot_sum_tensors adds. */
enum { COT_MAX_SOURCES = 64 };

/* to = ((from[0] + from[1]) + ...) of `count` tensors, which have one shape and the same strides; with add:
 * to = (to + from[0]) + ... Sums are f64, and each result is rounded once. Without tensors the sum is 0. */
void cot_sum_tensors(const cot_tensor *to, const cot_tensor from[], int count, bool add);

/* Sets every element of a float tensor. */
void cot_fill_tensor(const cot_tensor *to, double value);

/* A hash of the shape and of the elements of a tensor, the same for every stride. 0 for an absent tensor. */
int64_t cot_hash_tensor(const cot_tensor *tensor);

/* Requires that the axis of a tensor has the rows of a part, and gives it those of the whole. Absent tensors, and those
 * without this axis, stay as they are. */
cot_status cot_widen(const char *call, const char *name, cot_tensor *tensor, int axis, int64_t part, int64_t whole);

/* Divides the group's memory: `base` for tensors and messages, on the queue's device, and `host` for what the host alone
 * reads. In a first pass, `counting`, both are NULL, and only the used bytes are counted. */
typedef struct cot_arena {
    char *base;
    size_t used;
    char *host;
    size_t host_used;
    bool counting;
} cot_arena;

/* The next `count` elements of `size` bytes of base or host; NULL in the first pass. */
void *cot_arena_take(cot_arena *arena, int64_t count, size_t size);
void *cot_arena_take_host(cot_arena *arena, int64_t count, size_t size);

/* Copies an argument struct of an older or a newer header: missing members become zero, and unknown members must be
 * zero. `member` names the size in messages. */
cot_status cot_copy_args(const char *call, const char *member, const void *args, size_t size, void *copy);

#endif
