/* SPDX-License-Identifier: Apache-2.0 */
#include "cublaslt.h"

#include "cublaslt_abi.h"

#include "cuda/device.h"

#include "core/status.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_SHAPES = 64, ALIGNMENT = 16 };

/* What a product needs besides the pointers. */
typedef struct shape {
    int64_t m, n, k;
    bool transpose_a, transpose_b, adds, has_bias;
    cot_dtype in, out;
} shape;

typedef struct prepared {
    shape shape;
    lt_desc desc;
    lt_layout first, second, d; /* the library's operands */
    lt_algorithm algorithm;
} prepared;

struct cublaslt {
    cot_queue *queue;
    void *library, *workspace;
    lt_handle handle;
    prepared products[MAX_SHAPES];
    int count;
#define MEMBER(name, parameters) int(*name) parameters;
    LT_FUNCTIONS(MEMBER)
#undef MEMBER
};

/* ---- opening ------------------------------------------------------------------------------------------ */

static void *open_library(char *tried, size_t size)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12",
                                        "/usr/local/cuda/lib64/libcublasLt.so.13",
                                        "/usr/local/cuda/lib64/libcublasLt.so.12"};
    const char *given = getenv("CUBLASLT");
    if (given != NULL && given[0] != '\0') {
        snprintf(tried, size, "%s", given);
        return dlopen(given, RTLD_NOW | RTLD_LOCAL);
    }
    void *library = NULL;
    for (size_t i = 0; library == NULL && i < sizeof names / sizeof *names; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    snprintf(tried, size, "libcublasLt.so.13 and .12");
    return library;
}

static cot_status find_functions(cublaslt *l)
{
#define FIND(name, parameters)                                                                        \
    {                                                                                                 \
        void *found = dlsym(l->library, #name);                                                       \
        if (found == NULL)                                                                            \
            return cot_fail(COT_NO_DEVICE, "cuBLASLt: the library has no function %s", #name);        \
        memcpy(&l->name, &found, sizeof found); /* ISO C does not convert it to a function pointer */ \
    }
    LT_FUNCTIONS(FIND)
#undef FIND
    return COT_OK;
}

cot_status cublaslt_open(cot_queue *queue, void *workspace, cublaslt **out)
{
    char tried[200];
    cublaslt *l = calloc(1, sizeof *l);
    *out = NULL;
    if (l == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "cuBLASLt: out of memory");
    l->queue = queue;
    l->workspace = workspace;
    l->library = open_library(tried, sizeof tried);
    cot_status status = COT_OK;
    if (l->library == NULL)
        status =
            cot_fail(COT_NO_DEVICE,
                     "no cuBLASLt: cannot open %s; install the CUDA toolkit or `pip install nvidia-cublas`, and set "
                     "CUBLASLT to the path of the library",
                     tried);
    if (status == COT_OK)
        status = find_functions(l);
    if (status == COT_OK)
        status = cot_cuda_enter(queue->device);
    if (status == COT_OK) {
        const int result = l->cublasLtCreate(&l->handle);
        cot_cuda_leave(queue->device);
        if (result != LT_SUCCESS)
            status = cot_fail(COT_DEVICE_ERROR, "cuBLASLt: cublasLtCreate failed with status %d", result);
    }
    if (status != COT_OK)
        cublaslt_close(l);
    else
        *out = l;
    return status;
}

static void destroy_product(cublaslt *l, prepared *p)
{
    if (p->desc != NULL)
        l->cublasLtMatmulDescDestroy(p->desc);
    if (p->first != NULL)
        l->cublasLtMatrixLayoutDestroy(p->first);
    if (p->second != NULL)
        l->cublasLtMatrixLayoutDestroy(p->second);
    if (p->d != NULL)
        l->cublasLtMatrixLayoutDestroy(p->d);
}

void cublaslt_close(cublaslt *l)
{
    if (l == NULL)
        return;
    for (int i = 0; i < l->count; i++)
        destroy_product(l, &l->products[i]);
    if (l->handle != NULL)
        l->cublasLtDestroy(l->handle);
    if (l->library != NULL)
        dlclose(l->library);
    free(l);
}

/* ---- products ----------------------------------------------------------------------------------------- */

static int type_of(cot_dtype dtype)
{
    return dtype == COT_F32 ? LT_R_32F : dtype == COT_F16 ? LT_R_16F : LT_R_16BF;
}

/* Makes the next call, unless an earlier one failed. */
#define THEN(call) (result = result != LT_SUCCESS ? result : (call))

static int choose_algorithm(cublaslt *l, prepared *p)
{
    const uint64_t workspace_bytes = CUBLASLT_WORKSPACE;
    const uint32_t alignment = ALIGNMENT, reductions = LT_REDUCTION_COMPUTE_TYPE;
    lt_heuristic found = {0};
    lt_preference preference = NULL;
    int count = 0, result = l->cublasLtMatmulPreferenceCreate(&preference);
    THEN(l->cublasLtMatmulPreferenceSetAttribute(preference, LT_PREF_WORKSPACE_BYTES, &workspace_bytes,
                                                 sizeof workspace_bytes));
    THEN(l->cublasLtMatmulPreferenceSetAttribute(preference, LT_PREF_REDUCTION_MASK, &reductions, sizeof reductions));
    for (int which = LT_PREF_ALIGNMENT_A; which <= LT_PREF_ALIGNMENT_D; which++)
        THEN(l->cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment));
    THEN(l->cublasLtMatmulAlgoGetHeuristic(l->handle, p->desc, p->first, p->second, p->d, p->d, preference, 1, &found,
                                           &count));
    if (preference != NULL)
        l->cublasLtMatmulPreferenceDestroy(preference);
    p->algorithm = found.algorithm;
    return result == LT_SUCCESS && (count == 0 || found.status != LT_SUCCESS) ? LT_NOT_SUPPORTED : result;
}

/* A row-major matrix [r,c] is a column-major matrix [c,r]. So the library computes the transposed product
 * d^T [n,m] = op(b)^T op(a)^T, and its first operand is b. */
static int prepare(cublaslt *l, prepared *p, const shape *s, const void *bias)
{
    const uint32_t epilogue = LT_EPILOGUE_BIAS;
    const int32_t op_first = s->transpose_b ? LT_OP_T : LT_OP_N, op_second = s->transpose_a ? LT_OP_T : LT_OP_N;
    const uint64_t m = (uint64_t)s->m, n = (uint64_t)s->n, k = (uint64_t)s->k;
    *p = (prepared){.shape = *s};
    int result = l->cublasLtMatmulDescCreate(&p->desc, LT_COMPUTE_32F, LT_R_32F);
    THEN(l->cublasLtMatmulDescSetAttribute(p->desc, LT_DESC_TRANSA, &op_first, sizeof op_first));
    THEN(l->cublasLtMatmulDescSetAttribute(p->desc, LT_DESC_TRANSB, &op_second, sizeof op_second));
    if (s->has_bias) {
        THEN(l->cublasLtMatmulDescSetAttribute(p->desc, LT_DESC_EPILOGUE, &epilogue, sizeof epilogue));
        THEN(l->cublasLtMatmulDescSetAttribute(p->desc, LT_DESC_BIAS_POINTER, &bias, sizeof bias));
    }
    THEN(s->transpose_b ? l->cublasLtMatrixLayoutCreate(&p->first, type_of(s->in), k, n, s->k)
                        : l->cublasLtMatrixLayoutCreate(&p->first, type_of(s->in), n, k, s->n));
    THEN(s->transpose_a ? l->cublasLtMatrixLayoutCreate(&p->second, type_of(s->in), m, k, s->m)
                        : l->cublasLtMatrixLayoutCreate(&p->second, type_of(s->in), k, m, s->k));
    THEN(l->cublasLtMatrixLayoutCreate(&p->d, type_of(s->out), n, m, s->n));
    THEN(choose_algorithm(l, p));
    return result;
}

static cot_status find_product(cublaslt *l, const shape *s, const void *bias, prepared **found)
{
    for (int i = 0; i < l->count; i++)
        if (memcmp(&l->products[i].shape, s, sizeof *s) == 0) {
            *found = &l->products[i];
            return COT_OK;
        }
    if (l->count == MAX_SHAPES)
        return cot_fail(COT_UNSUPPORTED, "cuBLASLt: more than %d shapes of products", MAX_SHAPES);
    *found = &l->products[l->count];
    const int result = prepare(l, *found, s, bias);
    if (result == LT_SUCCESS) {
        l->count++;
        return COT_OK;
    }
    destroy_product(l, *found);
    return cot_fail(COT_DEVICE_ERROR, "cuBLASLt: no algorithm for a product %lld x %lld x %lld of %s, status %d",
                    (long long)s->m, (long long)s->n, (long long)s->k, cot_dtype_name(s->in), result);
}

cot_status cublaslt_multiply(cublaslt *l, const cublaslt_product *product)
{
    static const float one = 1, zero = 0;
    shape s;
    prepared *p = NULL;
    memset(&s, 0, sizeof s); /* also the padding, which find_product compares */
    s.m = product->m, s.n = product->n, s.k = product->k;
    s.transpose_a = product->transpose_a, s.transpose_b = product->transpose_b;
    s.adds = product->c != NULL, s.has_bias = product->bias != NULL;
    s.in = product->in, s.out = product->out;
    cot_status status = cot_cuda_enter(l->queue->device);
    if (status != COT_OK)
        return status;
    status = find_product(l, &s, product->bias, &p);
    if (status == COT_OK) {
        int result = LT_SUCCESS;
        if (s.has_bias)
            result =
                l->cublasLtMatmulDescSetAttribute(p->desc, LT_DESC_BIAS_POINTER, &product->bias, sizeof product->bias);
        THEN(l->cublasLtMatmul(l->handle, p->desc, &one, product->b, p->first, product->a, p->second,
                               s.adds ? &one : &zero, s.adds ? product->c : product->d, p->d, product->d, p->d,
                               &p->algorithm, l->workspace, CUBLASLT_WORKSPACE, l->queue->device->stream));
        if (result != LT_SUCCESS)
            status = cot_fail(COT_DEVICE_ERROR, "cuBLASLt: a product %lld x %lld x %lld of %s failed with status %d",
                              (long long)s.m, (long long)s.n, (long long)s.k, cot_dtype_name(s.in), result);
    }
    cot_cuda_leave(l->queue->device);
    return status;
}
