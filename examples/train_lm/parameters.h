/* SPDX-License-Identifier: Apache-2.0
 *
 * parameters.h: the table of all parameters. Layers hold pointers to its entries. The optimiser and other code for all
 * parameters iterate over the table. */
#ifndef TRAIN_LM_PARAMETERS_H
#define TRAIN_LM_PARAMETERS_H

#include "real.h"

#include <stdbool.h>

enum { PARAMETER_NAME_SIZE = 48, PARAMETER_MAX_RANK = 2 };

typedef struct parameter {
    char name[PARAMETER_NAME_SIZE];
    int rank;
    int64_t shape[PARAMETER_MAX_RANK];
    int64_t count; /* product of the shape */
    bool decays;   /* weight decay applies: true for matrices, false for gains and biases */
    real *value, *gradient, *moment1, *moment2; /* on the host */
    void *w, *w_wide, *dw; /* what the backend reads: the value, the value in the dtype `wide`, the gradient. On the CPU
                            * the same memory as value, value and gradient */
} parameter;

/* The values of all parameters are one array of `elements` elements, and so are the gradients and each of the two
 * moments. The alignment gaps between parameters are always zero. */
typedef struct parameter_table {
    parameter *items;
    int count, capacity;
    int64_t elements;
    real *values, *gradients, *moments1, *moments2;
} parameter_table;

/* Creates an empty table for up to `capacity` entries. False if there is no memory. */
bool parameter_table_create(parameter_table *table, int capacity);
void parameter_table_destroy(parameter_table *table);

/* Adds a parameter of shape [rows] (columns == 0) or [rows,columns]. parameter_table_allocate gives it memory. The
 * pointer is valid as long as the table. */
parameter *parameter_add(parameter_table *table, const char *name, int64_t rows, int64_t columns, bool decays);

/* Allocates zeroed memory of the host for all parameters. False if there is none. */
bool parameter_table_allocate(parameter_table *table);

/* Sets w, w_wide and dw to the memory of the host. parameter_table_allocate does it too. */
void parameter_table_use_host(parameter_table *table);

/* Fills a parameter with uniform noise of the given standard deviation. It depends only on the seed and the name. */
void parameter_randomise(parameter *p, uint64_t seed, double deviation);
void parameter_fill(parameter *p, real value);

/* A hash of the bytes of all values. Two runs with the same hash have the same bits. */
uint64_t parameter_table_hash(const parameter_table *table);

#endif
