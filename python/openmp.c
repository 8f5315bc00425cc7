/* SPDX-License-Identifier: Apache-2.0
 *
 * openmp.c: the functions of libgomp that gcc's code calls, as calls into the OpenMP runtime of torch. The extension
 * therefore is not linked to libgomp: wheels of torch contain a libgomp under a name of their own, and a second runtime
 * in the process would start a second set of threads. */
#include "openmp.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

static struct {
    void (*GOMP_parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
    bool (*GOMP_loop_nonmonotonic_dynamic_start)(long first, long end, long step, long chunk, long *begin, long *limit);
    bool (*GOMP_loop_nonmonotonic_dynamic_next)(long *begin, long *limit);
    void (*GOMP_loop_end)(void);
    int (*omp_get_max_threads)(void);
    int (*omp_get_thread_num)(void);
} runtime;

#define FUNCTIONS(X)                        \
    X(GOMP_parallel)                        \
    X(GOMP_loop_nonmonotonic_dynamic_start) \
    X(GOMP_loop_nonmonotonic_dynamic_next)  \
    X(GOMP_loop_end)                        \
    X(omp_get_max_threads)                  \
    X(omp_get_thread_num)

static const char *find_functions(void *library)
{
    void *found;
#define FIND(name)                                 \
    if ((found = dlsym(library, #name)) == NULL)   \
        return "the OpenMP runtime has no " #name; \
    memcpy(&runtime.name, &found, sizeof runtime.name);
    FUNCTIONS(FIND)
#undef FIND
    return NULL;
}

/* dlsym also searches the libraries that libtorch_cpu.so is linked to. Code that uses the extension without torch gets the
 * system's libgomp. No library is closed: its threads may run. */
const char *openmp_open(void)
{
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL && find_functions(library) == NULL)
        return NULL;
    library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_LOCAL);
    return library != NULL ? find_functions(library) : dlerror();
}

/* gcc's names, which only the linker sees. */
void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);
bool GOMP_loop_nonmonotonic_dynamic_start(long first, long end, long step, long chunk, long *begin, long *limit);
bool GOMP_loop_nonmonotonic_dynamic_next(long *begin, long *limit);
void GOMP_loop_end(void);
int omp_get_max_threads(void);
int omp_get_thread_num(void);

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
{
    runtime.GOMP_parallel(body, data, threads, flags);
}

bool GOMP_loop_nonmonotonic_dynamic_start(long first, long end, long step, long chunk, long *begin, long *limit)
{
    return runtime.GOMP_loop_nonmonotonic_dynamic_start(first, end, step, chunk, begin, limit);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long *begin, long *limit)
{
    return runtime.GOMP_loop_nonmonotonic_dynamic_next(begin, limit);
}

void GOMP_loop_end(void)
{
    runtime.GOMP_loop_end();
}

int omp_get_max_threads(void)
{
    return runtime.omp_get_max_threads();
}

int omp_get_thread_num(void)
{
    return runtime.omp_get_thread_num();
}
