/* SPDX-License-Identifier: Apache-2.0
 * launcher.h: what the host side of portable kernels includes. The build compiles it for CUDA, and with COT_FOR_HIP for
 * HIP, where the names of src/hip replace those of src/cuda. */
#ifndef COT_HIP_LAUNCHER_H
#define COT_HIP_LAUNCHER_H

#if defined(COT_FOR_HIP)
#include "device.h"
#define cot_cuda_kernel cot_hip_kernel
#define cot_cuda_grid cot_hip_grid
#define cot_cuda_launch cot_hip_launch
#define cot_cuda_fault_word cot_hip_fault_word
#define COT_IMAGE(stem) cot_hip_image_##stem
#define COT_LAUNCHER(stem) stem##_cdna
#define COT_KERNEL_NAME(stem) #stem "_cdna"
#else
#include "cuda/device.h"
/* The embedded code of stem.cu, the function that launches the kernels `stem`, and their name in the kernel table. */
#define COT_IMAGE(stem) cot_image_##stem
#define COT_LAUNCHER(stem) stem##_sm80
#define COT_KERNEL_NAME(stem) #stem "_sm80"
#endif

#endif
