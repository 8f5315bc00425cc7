/* SPDX-License-Identifier: Apache-2.0
 * fake_cuda.h: what fake_cuda.c gives tests/emulator. */
#ifndef COT_TESTS_FAKE_CUDA_H
#define COT_TESTS_FAKE_CUDA_H

#include <cuda.h>

/* The number of the device of this thread's current context, and of a stream. */
int fake_cuda_device(void);
int fake_cuda_device_of(CUstream stream);

#endif
