/* SPDX-License-Identifier: Apache-2.0
 *
 * fail_allocations.c: a library for LD_PRELOAD that makes one allocation of a program fail, for test_memory.py.
 *
 *   FAIL_ALLOCATION=N       the N-th call of malloc, calloc, realloc, aligned_alloc, memalign or posix_memalign since
 *                           main began fails; N+: every later call fails too
 *   FAIL_ALLOCATION_LOG=F   the file that records each failed call: the function, the bytes and the caller
 *   FAIL_ALLOCATION_EXCEPT="A B"  calls from libraries whose names begin with A or B are not counted, and succeed
 *
 * Calls before main are not counted: they come from the dynamic loader and other libraries' constructors. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* glibc's functions under names that this library does not interpose. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

typedef int main_function(int argc, char **argv, char **environment);

/* The C library's entry point, which calls main. */
int __libc_start_main(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end);

static main_function *program_main;
static atomic_long call_count;
static long failing_call; /* 0: none */
static bool fail_all_later;
static int log_file = -1;
static char log_name[4096];
static const char *excepted_libraries;

/* Whether the caller's library is in FAIL_ALLOCATION_EXCEPT. */
static bool is_excepted(void *caller)
{
    Dl_info info;
    if (excepted_libraries == NULL || dladdr(caller, &info) == 0)
        return false;
    const char *slash = strrchr(info.dli_fname, '/'), *name = slash != NULL ? slash + 1 : info.dli_fname;
    for (const char *prefix = excepted_libraries; *prefix != '\0'; prefix += prefix[0] == ' ') {
        const size_t length = strcspn(prefix, " ");
        if (strncmp(name, prefix, length) == 0)
            return true;
        prefix += length;
    }
    return false;
}

static void report(const char *function, size_t size, void *caller)
{
    char line[512];
    Dl_info info = {0};
    dladdr(caller, &info);
    if (log_file < 0)
        log_file = open(log_name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const int length = snprintf(line, sizeof line, "%s of %zu bytes, called from %s+%#tx (%s)\n", function, size,
                                info.dli_fname != NULL ? info.dli_fname : "?", (char *)caller - (char *)info.dli_fbase,
                                info.dli_sname != NULL ? info.dli_sname : "?");
    if (write(log_file, line, (size_t)length) != length)
        _exit(99);
}

static bool fails(const char *function, size_t size, void *caller)
{
    if (failing_call == 0 || is_excepted(caller))
        return false;
    const long number = atomic_fetch_add(&call_count, 1) + 1;
    if (number != failing_call && !(fail_all_later && number > failing_call))
        return false;
    report(function, size, caller);
    errno = ENOMEM;
    return true;
}

void *malloc(size_t size)
{
    return fails("malloc", size, __builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails("calloc", count * size, __builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    return fails("realloc", size, __builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}

void *memalign(size_t alignment, size_t size)
{
    return fails("memalign", size, __builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return fails("aligned_alloc", size, __builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    void *const allocated =
        fails("posix_memalign", size, __builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
    if (allocated == NULL)
        return ENOMEM;
    *memory = allocated;
    return 0;
}

static int counted_main(int argc, char **argv, char **environment)
{
    const char *text = getenv("FAIL_ALLOCATION"), *log = getenv("FAIL_ALLOCATION_LOG");
    char *end = NULL;
    snprintf(log_name, sizeof log_name, "%s", log != NULL ? log : "/dev/stderr");
    excepted_libraries = getenv("FAIL_ALLOCATION_EXCEPT");
    unsetenv("LD_PRELOAD"); /* child processes run without failures */
    const long number = text != NULL ? strtol(text, &end, 10) : 0;
    fail_all_later = end != NULL && *end == '+';
    failing_call = number;
    return program_main(argc, argv, environment);
}

int __libc_start_main(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end)
{
    int (*real_start)(main_function *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
    *(void **)&real_start = dlsym(RTLD_NEXT, "__libc_start_main");
    program_main = main;
    return real_start(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
