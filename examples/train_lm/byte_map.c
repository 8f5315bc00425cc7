/* SPDX-License-Identifier: Apache-2.0 */
#include "byte_map.h"

#include "array.h"
#include "hash.h"

#include <string.h>

struct byte_map_slot {
    uint64_t hash;
    size_t key; /* offset in `keys`, plus 1; 0: the slot is empty */
    size_t bytes;
    int64_t value;
};

/* The slot of a key, or the empty slot where it belongs. */
static byte_map_slot *locate(const byte_map *map, uint64_t hash, const void *key, size_t bytes)
{
    for (size_t i = hash & (map->capacity - 1);; i = (i + 1) & (map->capacity - 1)) {
        byte_map_slot *slot = &map->slots[i];
        if (slot->key == 0 ||
            (slot->hash == hash && slot->bytes == bytes && memcmp(map->keys + slot->key - 1, key, bytes) == 0))
            return slot;
    }
}

/* FNV-1a mixes its last bytes poorly into the low bits, which select the slot. */
static uint64_t hash_of(const void *key, size_t bytes)
{
    const uint64_t hash = hash_bytes(HASH_START, key, bytes) * 0x9e3779b97f4a7c15ULL;
    return hash ^ hash >> 32;
}

int64_t *byte_map_find(const byte_map *map, const void *key, size_t bytes)
{
    if (map->count == 0)
        return NULL;
    byte_map_slot *slot = locate(map, hash_of(key, bytes), key, bytes);
    return slot->key == 0 ? NULL : &slot->value;
}

/* At most half of the slots are full. */
static bool grow_slots(byte_map *map)
{
    if (2 * (map->count + 1) <= map->capacity)
        return true;
    byte_map grown = *map;
    grown.capacity = map->capacity == 0 ? 64 : 2 * map->capacity;
    grown.slots = calloc(grown.capacity, sizeof *grown.slots);
    if (grown.slots == NULL)
        return false;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->slots[i].key != 0) {
            size_t to = map->slots[i].hash & (grown.capacity - 1);
            while (grown.slots[to].key != 0)
                to = (to + 1) & (grown.capacity - 1);
            grown.slots[to] = map->slots[i];
        }
    free(map->slots);
    *map = grown;
    return true;
}

int64_t *byte_map_add(byte_map *map, const void *key, size_t bytes, int64_t initial)
{
    if (!grow_slots(map))
        return NULL;
    const uint64_t hash = hash_of(key, bytes);
    byte_map_slot *slot = locate(map, hash, key, bytes);
    if (slot->key != 0)
        return &slot->value;
    char *keys = array_with_room(map->keys, &map->key_capacity, map->key_bytes + bytes, 1);
    if (keys == NULL)
        return NULL;
    map->keys = keys;
    memcpy(map->keys + map->key_bytes, key, bytes);
    *slot = (byte_map_slot){hash, map->key_bytes + 1, bytes, initial};
    map->key_bytes += bytes;
    map->count++;
    return &slot->value;
}

bool byte_map_each(const byte_map *map, bool (*visit)(void *context, const char *key, size_t bytes, int64_t value),
                   void *context)
{
    for (size_t i = 0; i < map->capacity; i++) {
        const byte_map_slot *slot = &map->slots[i];
        if (slot->key != 0 && !visit(context, map->keys + slot->key - 1, slot->bytes, slot->value))
            return false;
    }
    return true;
}

void byte_map_clear(byte_map *map)
{
    if (map->capacity > 0)
        memset(map->slots, 0, map->capacity * sizeof *map->slots);
    map->count = map->key_bytes = 0;
}

void byte_map_free(byte_map *map)
{
    free(map->slots);
    free(map->keys);
    *map = (byte_map){0};
}
