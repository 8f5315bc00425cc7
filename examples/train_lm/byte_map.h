/* SPDX-License-Identifier: Apache-2.0
 *
 * byte_map.h: a hash table from byte strings to integers, with open addressing. Keys are copied. A map of zeros is empty. */
#ifndef TRAIN_LM_BYTE_MAP_H
#define TRAIN_LM_BYTE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct byte_map_slot byte_map_slot;

typedef struct byte_map {
    byte_map_slot *slots;
    size_t capacity, count; /* capacity: a power of two, or 0 */
    char *keys;             /* of all slots, one after the other */
    size_t key_bytes, key_capacity;
} byte_map;

/* The value of a key, or NULL. The pointer is valid until the next byte_map_add. */
int64_t *byte_map_find(const byte_map *map, const void *key, size_t bytes);

/* The value of a key, which is added with the value `initial` if it is not there. NULL if there is no memory. */
int64_t *byte_map_add(byte_map *map, const void *key, size_t bytes, int64_t initial);

/* Calls visit for each key, in no particular order, until it returns false. Returns false then. */
bool byte_map_each(const byte_map *map, bool (*visit)(void *context, const char *key, size_t bytes, int64_t value),
                   void *context);

/* Removes all keys, and keeps the memory. */
void byte_map_clear(byte_map *map);
void byte_map_free(byte_map *map);

#endif
