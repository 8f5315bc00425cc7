/* SPDX-License-Identifier: Apache-2.0
 *
 * cublaslt.c: a libcublasLt for tests, which multiplies on the CPU over the emulator's memory. It has the functions of
 * examples/train_lm/cuda/cublaslt_abi.h and refuses everything that the trainer does not use. Environment variable:
 *
 *   FAKE_CUBLASLT=no_algorithm    no product is supported */
#include "emulator.h"

#include "../../examples/train_lm/cuda/cublaslt_abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct lt_description {
    int32_t transpose[2];
    uint32_t epilogue; /* 0 or LT_EPILOGUE_BIAS */
    uint8_t *bias;
};

struct lt_matrix {
    int type;
    uint64_t rows, columns;
    int64_t ld;
};

typedef struct operand {
    struct lt_matrix layout;
    uint8_t *data;
} operand;

typedef struct product {
    operand a, b, c, d, bias; /* bias: a matrix of one column, or no data */
    int32_t transpose_a, transpose_b;
    float alpha, beta;
} product;

#define DECLARE(name, parameters) int name parameters;
LT_FUNCTIONS(DECLARE)
#undef DECLARE

/* ---- descriptions --------------------------------------------------------------------------------------- */

int cublasLtCreate(lt_handle *handle)
{
    *handle = malloc(1);
    return LT_SUCCESS;
}

int cublasLtDestroy(lt_handle handle)
{
    free(handle);
    return LT_SUCCESS;
}

int cublasLtMatmulDescCreate(lt_desc *desc, int compute_type, int scale_type)
{
    *desc = calloc(1, sizeof **desc);
    return compute_type == LT_COMPUTE_32F && scale_type == LT_R_32F ? LT_SUCCESS : LT_NOT_SUPPORTED;
}

int cublasLtMatmulDescDestroy(lt_desc desc)
{
    free(desc);
    return LT_SUCCESS;
}

int cublasLtMatmulDescSetAttribute(lt_desc desc, int attribute, const void *value, size_t bytes)
{
    void *const members[] = {&desc->transpose[0], &desc->transpose[1], &desc->epilogue, &desc->bias};
    const int attributes[] = {LT_DESC_TRANSA, LT_DESC_TRANSB, LT_DESC_EPILOGUE, LT_DESC_BIAS_POINTER};
    for (int i = 0; i < 4; i++)
        if (attribute == attributes[i] && bytes == (i < 3 ? sizeof(int32_t) : sizeof(void *))) {
            memcpy(members[i], value, bytes);
            return desc->epilogue == 0 || desc->epilogue == LT_EPILOGUE_BIAS ? LT_SUCCESS : LT_NOT_SUPPORTED;
        }
    return LT_INVALID_VALUE;
}

int cublasLtMatrixLayoutCreate(lt_layout *layout, int type, uint64_t rows, uint64_t columns, int64_t ld)
{
    *layout = malloc(sizeof **layout);
    **layout = (struct lt_matrix){type, rows, columns, ld};
    return ld >= (int64_t)rows && (type == LT_R_32F || type == LT_R_16F || type == LT_R_16BF) ? LT_SUCCESS
                                                                                              : LT_INVALID_VALUE;
}

int cublasLtMatrixLayoutDestroy(lt_layout layout)
{
    free(layout);
    return LT_SUCCESS;
}

int cublasLtMatmulPreferenceCreate(lt_preference *preference)
{
    *preference = malloc(1);
    return LT_SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(lt_preference preference)
{
    free(preference);
    return LT_SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(lt_preference preference, int attribute, const void *value, size_t bytes)
{
    (void)preference, (void)value;
    return bytes == (attribute == LT_PREF_WORKSPACE_BYTES ? sizeof(uint64_t) : sizeof(uint32_t)) ? LT_SUCCESS
                                                                                                 : LT_INVALID_VALUE;
}

/* The sizes of op(x), whose memory has the layout m. */
static uint64_t op_rows(const struct lt_matrix *m, int32_t transpose)
{
    return transpose ? m->columns : m->rows;
}

static uint64_t op_columns(const struct lt_matrix *m, int32_t transpose)
{
    return transpose ? m->rows : m->columns;
}

static int fits(lt_desc desc, lt_layout a, lt_layout b, lt_layout c, lt_layout d)
{
    const int32_t ta = desc->transpose[0], tb = desc->transpose[1];
    return op_rows(a, ta) == d->rows && op_columns(b, tb) == d->columns && op_columns(a, ta) == op_rows(b, tb) &&
           c->rows == d->rows && c->columns == d->columns && c->type == d->type && a->type == b->type;
}

int cublasLtMatmulAlgoGetHeuristic(lt_handle handle, lt_desc desc, lt_layout a, lt_layout b, lt_layout c, lt_layout d,
                                   lt_preference preference, int requested, lt_heuristic *results, int *returned)
{
    (void)handle, (void)preference;
    const char *fake = getenv("FAKE_CUBLASLT");
    *returned = 0;
    if (requested < 1 || !fits(desc, a, b, c, d))
        return LT_INVALID_VALUE;
    if (fake != NULL && strcmp(fake, "no_algorithm") == 0)
        return LT_SUCCESS;
    *results = (lt_heuristic){.algorithm = {{1}}};
    *returned = 1;
    return LT_SUCCESS;
}

/* ---- the product ---------------------------------------------------------------------------------------- */

static size_t size_of(int type)
{
    return type == LT_R_32F ? 4 : 2;
}

static float load(const operand *o, uint64_t row, uint64_t column)
{
    const uint64_t at = row + column * (uint64_t)o->layout.ld;
    uint16_t half;
    float value;
    if (o->layout.type == LT_R_32F) {
        memcpy(&value, o->data + 4 * at, 4);
        return value;
    }
    memcpy(&half, o->data + 2 * at, 2);
    return o->layout.type == LT_R_16BF ? emu_from_bf16(half) : emu_from_f16(half);
}

static void store(const operand *o, uint64_t row, uint64_t column, float value)
{
    const uint64_t at = row + column * (uint64_t)o->layout.ld;
    if (o->layout.type == LT_R_32F) {
        memcpy(o->data + 4 * at, &value, 4);
        return;
    }
    const uint16_t half = (uint16_t)(o->layout.type == LT_R_16BF ? emu_bf16(value) : emu_f16(value));
    memcpy(o->data + 2 * at, &half, 2);
}

/* op(o) as floats; the k elements of a row (by_row) or of a column lie side by side. */
static float *unpack(const operand *o, int32_t transpose, int by_row)
{
    const uint64_t rows = op_rows(&o->layout, transpose), columns = op_columns(&o->layout, transpose);
    float *out = malloc((rows * columns + 1) * sizeof *out);
    for (uint64_t c = 0; c < columns; c++)
        for (uint64_t r = 0; r < rows; r++)
            out[by_row ? r * columns + c : c * rows + r] = transpose ? load(o, c, r) : load(o, r, c);
    return out;
}

static bool multiply(const void *parameters)
{
    const product *p = parameters;
    const uint64_t k = op_columns(&p->a.layout, p->transpose_a);
    float *a = unpack(&p->a, p->transpose_a, 1), *b = unpack(&p->b, p->transpose_b, 0);
    for (uint64_t c = 0; c < p->d.layout.columns; c++)
        for (uint64_t r = 0; r < p->d.layout.rows; r++) {
            float sum = 0;
            for (uint64_t i = 0; i < k; i++)
                sum += a[r * k + i] * b[c * k + i];
            sum *= p->alpha;
            if (p->beta != 0)
                sum += p->beta * load(&p->c, r, c);
            store(&p->d, r, c, p->bias.data == NULL ? sum : sum + load(&p->bias, r, 0));
        }
    free(a);
    free(b);
    return true;
}

static int is_memory(const operand *o)
{
    const size_t elements = (size_t)o->layout.ld * (o->layout.columns - 1) + o->layout.rows;
    return (uint64_t)o->data % 16 == 0 && emu_is_memory((uint64_t)o->data, elements * size_of(o->layout.type));
}

int cublasLtMatmul(lt_handle handle, lt_desc desc, const void *alpha, const void *a, lt_layout a_layout, const void *b,
                   lt_layout b_layout, const void *beta, const void *c, lt_layout c_layout, void *d, lt_layout d_layout,
                   const lt_algorithm *algorithm, void *workspace, size_t workspace_bytes, void *stream)
{
    (void)handle;
    const product p = {.a = {*a_layout, (uint8_t *)(uintptr_t)a},
                       .b = {*b_layout, (uint8_t *)(uintptr_t)b},
                       .c = {*c_layout, (uint8_t *)(uintptr_t)c},
                       .d = {*d_layout, d},
                       .bias = {{d_layout->type, d_layout->rows, 1, (int64_t)d_layout->rows},
                                desc->epilogue == LT_EPILOGUE_BIAS ? desc->bias : NULL},
                       .transpose_a = desc->transpose[0],
                       .transpose_b = desc->transpose[1],
                       .alpha = *(const float *)alpha,
                       .beta = *(const float *)beta};
    if (!fits(desc, a_layout, b_layout, c_layout, d_layout) || algorithm->data[0] != 1)
        return LT_INVALID_VALUE;
    if (!is_memory(&p.a) || !is_memory(&p.b) || !is_memory(&p.c) || !is_memory(&p.d) ||
        (desc->epilogue == LT_EPILOGUE_BIAS && !is_memory(&p.bias)) ||
        !emu_is_memory((uint64_t)workspace, workspace_bytes)) {
        fprintf(stderr, "cublaslt: an operand is misaligned or outside the device's memory\n");
        return LT_INVALID_VALUE;
    }
    return emu_enqueue(stream, multiply, &p, sizeof p) ? LT_SUCCESS : LT_EXECUTION_FAILED;
}
