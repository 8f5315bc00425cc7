/* SPDX-License-Identifier: Apache-2.0
 *
 * openmp_linked.c: in place of openmp.c where the extension is linked to the compiler's OpenMP runtime. */
#include "openmp.h"

const char *openmp_open(void)
{
    return NULL;
}
