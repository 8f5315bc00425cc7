/* SPDX-License-Identifier: Apache-2.0
 *
 * cublaslt_abi.h: the part of cuBLASLt's binary interface that cublaslt.c uses, the same in versions 12 and 13. The test
 * library of tests/emulator implements it. */
#ifndef TRAIN_LM_CUBLASLT_ABI_H
#define TRAIN_LM_CUBLASLT_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { LT_SUCCESS = 0, LT_NOT_INITIALIZED = 1, LT_INVALID_VALUE = 7, LT_EXECUTION_FAILED = 13, LT_NOT_SUPPORTED = 15 };
enum { LT_R_32F = 0, LT_R_16F = 2, LT_R_16BF = 14 }; /* cudaDataType */
enum { LT_COMPUTE_32F = 68 };                        /* cublasComputeType_t */
enum { LT_OP_N = 0, LT_OP_T = 1 };                   /* cublasOperation_t */
enum { LT_EPILOGUE_BIAS = 4 };                       /* cublasLtEpilogue_t: adds a vector to every column of d */
enum {                                               /* cublasLtMatmulDescAttributes_t */
       LT_DESC_TRANSA = 3,                           /* int32 */
       LT_DESC_TRANSB = 4,
       LT_DESC_EPILOGUE = 7,    /* uint32 */
       LT_DESC_BIAS_POINTER = 8 /* of the dtype of d */
};
enum {                              /* cublasLtMatmulPreferenceAttributes_t */
       LT_PREF_WORKSPACE_BYTES = 1, /* uint64 */
       LT_PREF_REDUCTION_MASK = 3,  /* uint32 */
       LT_PREF_ALIGNMENT_A = 5,     /* uint32; then B, C and D */
       LT_PREF_ALIGNMENT_D = 8
};
enum { LT_REDUCTION_COMPUTE_TYPE = 2 }; /* partial sums of a split k go through the workspace, in float32 */

typedef struct lt_context *lt_handle;
typedef struct lt_description *lt_desc;
typedef struct lt_matrix *lt_layout;
typedef struct lt_preferences *lt_preference;

typedef struct lt_algorithm {
    uint64_t data[8];
} lt_algorithm;

typedef struct lt_heuristic {
    lt_algorithm algorithm;
    size_t workspace_bytes;
    int32_t status;
    float waves;
    int32_t reserved[4];
} lt_heuristic;

/* X(name, parameters): functions that return a status. Matrices are column-major with the leading dimension ld. */
#define LT_FUNCTIONS(X)                                                                                              \
    X(cublasLtCreate, (lt_handle * handle))                                                                          \
    X(cublasLtDestroy, (lt_handle handle))                                                                           \
    X(cublasLtMatmulDescCreate, (lt_desc * desc, int compute_type, int scale_type))                                  \
    X(cublasLtMatmulDescDestroy, (lt_desc desc))                                                                     \
    X(cublasLtMatmulDescSetAttribute, (lt_desc desc, int attribute, const void *value, size_t bytes))                \
    X(cublasLtMatrixLayoutCreate, (lt_layout * layout, int type, uint64_t rows, uint64_t columns, int64_t ld))       \
    X(cublasLtMatrixLayoutDestroy, (lt_layout layout))                                                               \
    X(cublasLtMatmulPreferenceCreate, (lt_preference * preference))                                                  \
    X(cublasLtMatmulPreferenceDestroy, (lt_preference preference))                                                   \
    X(cublasLtMatmulPreferenceSetAttribute,                                                                          \
      (lt_preference preference, int attribute, const void *value, size_t bytes))                                    \
    X(cublasLtMatmulAlgoGetHeuristic,                                                                                \
      (lt_handle handle, lt_desc desc, lt_layout a, lt_layout b, lt_layout c, lt_layout d, lt_preference preference, \
       int requested, lt_heuristic *results, int *returned))                                                         \
    X(cublasLtMatmul,                                                                                                \
      (lt_handle handle, lt_desc desc, const void *alpha, const void *a, lt_layout a_layout, const void *b,          \
       lt_layout b_layout, const void *beta, const void *c, lt_layout c_layout, void *d, lt_layout d_layout,         \
       const lt_algorithm *algorithm, void *workspace, size_t workspace_bytes, void *stream))

#endif
