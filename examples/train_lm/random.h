/* SPDX-License-Identifier: Apache-2.0
 *
 * random.h: splitmix64, a small generator with the same numbers on every machine. The seed and a number from the caller
 * select a stream, so that the draws of one part of the program do not change those of another. */
#ifndef TRAIN_LM_RANDOM_H
#define TRAIN_LM_RANDOM_H

#include <stdint.h>

typedef struct random_stream {
    uint64_t state;
} random_stream;

static inline uint64_t random_next(random_stream *stream)
{
    uint64_t z = stream->state += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

static inline random_stream random_start(uint64_t seed, uint64_t name)
{
    random_stream stream = {seed};
    stream.state = random_next(&stream) ^ name;
    stream.state = random_next(&stream);
    return stream;
}

/* Uniform on [0, 1), 53 bits. */
static inline double random_unit(random_stream *stream)
{
    return (double)(random_next(stream) >> 11) * 0x1p-53;
}

/* Uniform on 0 .. n-1. The remainder's bias is below n / 2^64. */
static inline int64_t random_below(random_stream *stream, int64_t n)
{
    return (int64_t)(random_next(stream) % (uint64_t)n);
}

#endif
