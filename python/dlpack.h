/* SPDX-License-Identifier: Apache-2.0
 * dlpack.h: the part of DLPack's C exchange API that the extension uses. It reads a tensor of torch 2.10 or later
 * without Python attributes. The layout is that of DLPack 1.3, which is stable within major version 1. */
#ifndef COT_PYTHON_DLPACK_H
#define COT_PYTHON_DLPACK_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1 };
enum { DLPACK_CPU = 1, DLPACK_CUDA = 2 };
enum { DLPACK_INT = 0, DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_BOOL = 6 };

/* DLTensor. It borrows data, shape and stride from the tensor. */
typedef struct dlpack_tensor {
    void *data;
    int32_t device_type, device;
    int32_t rank;
    uint8_t code, bits; /* of the dtype */
    uint16_t lanes;
    int64_t *shape, *stride;
    uint64_t byte_offset;
} dlpack_tensor;

/* DLPackExchangeAPI, the content of the capsule Tensor.__dlpack_c_exchange_api__. */
typedef struct dlpack_exchange {
    uint32_t major, minor;
    struct dlpack_exchange *previous;
    void *unused[3]; /* the functions that make or own a tensor */
    /* Reads a tensor. Returns nonzero after an exception. May be NULL. */
    int (*read)(void *tensor, dlpack_tensor *result);
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} dlpack_exchange;

#endif
