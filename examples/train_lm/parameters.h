/* SPDX-License-Identifier: Apache-2.0
 *
 * parameters.h: one table of everything that is learned. Layers hold pointers to its rows; the optimiser, and whatever
 * else walks all parameters, walks the table. */
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
    bool decays;   /* weight decay applies: to matrices, not to gains and biases */
    real *value, *gradient, *moment1, *moment2;
} parameter;

/* The values of all parameters lie in one block, and so do the gradients and the two moments: `elements` each, the
 * gaps that alignment leaves between parameters always zero. */
typedef struct parameter_table {
    parameter *items;
    int count, capacity;
    int64_t elements;
    real *values, *gradients, *moments1, *moments2;
} parameter_table;

/* Makes an empty table with room for `capacity` rows; false if there is no memory. */
bool parameter_table_create(parameter_table *table, int capacity);
void parameter_table_destroy(parameter_table *table);

/* Registers a parameter of shape [rows] (columns == 0) or [rows,columns]; it has no memory until
 * parameter_table_allocate. The pointer stays valid as long as the table. */
parameter *parameter_add(parameter_table *table, const char *name, int64_t rows, int64_t columns, bool decays);

/* Gives every registered parameter its zeroed memory; false if there is none. */
bool parameter_table_allocate(parameter_table *table);

/* Fills a parameter with uniform noise of the given standard deviation, a function of the seed and the name alone. */
void parameter_randomise(parameter *p, uint64_t seed, double deviation);
void parameter_fill(parameter *p, real value);

/* A hash of the bytes of all values: two runs that agree here agree in every bit. */
uint64_t parameter_table_hash(const parameter_table *table);

#endif
