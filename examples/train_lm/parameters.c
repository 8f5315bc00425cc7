/* SPDX-License-Identifier: Apache-2.0 */
#include "parameters.h"

#include "hash.h"
#include "random.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

/* Each parameter begins at a multiple of 64 bytes, in float and in double. */
enum { ELEMENT_ALIGNMENT = 16 };

static int64_t aligned_count(const parameter *p)
{
    return (p->count + ELEMENT_ALIGNMENT - 1) / ELEMENT_ALIGNMENT * ELEMENT_ALIGNMENT;
}

bool parameter_table_create(parameter_table *table, int capacity)
{
    *table = (parameter_table){.items = calloc((size_t)capacity, sizeof(parameter)), .capacity = capacity};
    return table->items != NULL;
}

void parameter_table_destroy(parameter_table *table)
{
    free(table->items);
    free(table->values);
    free(table->gradients);
    free(table->moments1);
    free(table->moments2);
    *table = (parameter_table){0};
}

parameter *parameter_add(parameter_table *table, const char *name, int64_t rows, int64_t columns, bool decays)
{
    assert(table->count < table->capacity);
    parameter *p = &table->items[table->count++];
    snprintf(p->name, sizeof p->name, "%s", name);
    p->rank = columns > 0 ? 2 : 1;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->count = columns > 0 ? rows * columns : rows;
    p->decays = decays;
    table->elements += aligned_count(p);
    return p;
}

bool parameter_table_allocate(parameter_table *table)
{
    table->values = real_allocate(table->elements);
    table->gradients = real_allocate(table->elements);
    table->moments1 = real_allocate(table->elements);
    table->moments2 = real_allocate(table->elements);
    if (table->values == NULL || table->gradients == NULL || table->moments1 == NULL || table->moments2 == NULL)
        return false;
    int64_t offset = 0;
    for (int i = 0; i < table->count; i++) {
        parameter *p = &table->items[i];
        p->value = table->values + offset;
        p->gradient = table->gradients + offset;
        p->moment1 = table->moments1 + offset;
        p->moment2 = table->moments2 + offset;
        offset += aligned_count(p);
    }
    parameter_table_use_host(table);
    return true;
}

void parameter_table_use_host(parameter_table *table)
{
    for (int i = 0; i < table->count; i++) {
        parameter *p = &table->items[i];
        p->w = p->w_wide = p->value;
        p->dw = p->gradient;
    }
}

void parameter_randomise(parameter *p, uint64_t seed, double deviation)
{
    const double half_width = sqrt(3.0) * deviation; /* a uniform variable on [-h, h] has deviation h / sqrt(3) */
    random_stream stream = random_start(seed, hash_bytes(HASH_START, p->name, strlen(p->name)));
    for (int64_t i = 0; i < p->count; i++)
        p->value[i] = (real)(half_width * (2 * random_unit(&stream) - 1));
}

void parameter_fill(parameter *p, real value)
{
    for (int64_t i = 0; i < p->count; i++)
        p->value[i] = value;
}

uint64_t parameter_table_hash(const parameter_table *table)
{
    return hash_bytes(HASH_START, table->values, (size_t)table->elements * sizeof(real));
}
