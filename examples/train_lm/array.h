/* SPDX-License-Identifier: Apache-2.0
 *
 * array.h: arrays that grow. */
#ifndef TRAIN_LM_ARRAY_H
#define TRAIN_LM_ARRAY_H

#include <stdlib.h>

/* The array with room for `count` elements of `size` bytes. NULL if there is no memory; the old array stays valid. */
static inline void *array_with_room(void *array, size_t *capacity, size_t count, size_t size)
{
    if (count <= *capacity)
        return array;
    const size_t larger = 2 * *capacity > count ? 2 * *capacity : count + 16;
    void *grown = realloc(array, larger * size);
    if (grown != NULL)
        *capacity = larger;
    return grown;
}

#endif
