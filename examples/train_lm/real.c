/* SPDX-License-Identifier: Apache-2.0 */
#include "real.h"

#include <stdlib.h>

enum { ALIGNMENT = 64 };

real *real_allocate(int64_t count)
{
    const size_t limit = (size_t)PTRDIFF_MAX / sizeof(real) - ALIGNMENT;
    if (count < 0 || (size_t)count > limit)
        return NULL;
    const size_t bytes = ((size_t)count * sizeof(real) / ALIGNMENT + 1) * ALIGNMENT;
    real *memory = aligned_alloc(ALIGNMENT, bytes);
    return memory != NULL ? memset(memory, 0, bytes) : NULL;
}
