/* SPDX-License-Identifier: Apache-2.0
 *
 * hash.h: FNV-1a, 64 bits, to identify texts, names and parameters. It is not cryptographic. */
#ifndef TRAIN_LM_HASH_H
#define TRAIN_LM_HASH_H

#include <stddef.h>
#include <stdint.h>

static const uint64_t HASH_START = 14695981039346656037ULL;

/* Continues the hash `hash`, which is HASH_START for the first bytes. */
static inline uint64_t hash_bytes(uint64_t hash, const void *data, size_t size)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * 1099511628211ULL;
    return hash;
}

#endif
