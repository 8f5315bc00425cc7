/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COT_PYTHON_OPENMP_H
#define COT_PYTHON_OPENMP_H

/* Finds the OpenMP runtime of this process: that of torch, or libgomp.so.1. Returns NULL, or why there is none. */
const char *openmp_open(void);

#endif
