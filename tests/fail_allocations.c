/* SPDX-License-Identifier: Apache-2.0
 *
 * fail_allocations.c: a library for LD_PRELOAD that lets one allocation of a program fail, for test_memory.py.
 *
 *   FAIL_ALLOCATION=N       the N-th call of malloc, calloc, realloc, aligned_alloc, memalign or posix_memalign since main
 *                           began returns as if there were no memory; N+ lets every later call fail too
 *   FAIL_ALLOCATION_LOG=F   the file that is made when a call fails: it names the call, the bytes and the caller
 *   FAIL_ALLOCATION_EXCEPT="A B"  calls from libraries whose names begin with A or B are not counted, and succeed
 *
 * Calls before main are not counted: the dynamic loader and the constructors of other libraries run there, none of ours. */
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

/* glibc's own, under names that nobody interposes. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

typedef int main_function(int argc, char **argv, char **environment);

/* The C library's entry, which calls main. */
int __libc_start_main(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end);

static main_function *program_main;
static atomic_long calls;
static long chosen; /* 0: none */
static bool all_later;
static int log_file = -1;
static char log_name[4096];
static const char *excepted;

/* Whether the caller's library is among the excepted. */
static bool is_excepted(void *caller)
{
    Dl_info where;
    if (excepted == NULL || dladdr(caller, &where) == 0)
        return false;
    const char *slash = strrchr(where.dli_fname, '/'), *name = slash != NULL ? slash + 1 : where.dli_fname;
    for (const char *word = excepted; *word != '\0'; word += word[0] == ' ') {
        const size_t length = strcspn(word, " ");
        if (strncmp(name, word, length) == 0)
            return true;
        word += length;
    }
    return false;
}

static void report(const char *function, size_t size, void *caller)
{
    char line[512];
    Dl_info where = {0};
    dladdr(caller, &where);
    if (log_file < 0)
        log_file = open(log_name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const int length =
        snprintf(line, sizeof line, "%s of %zu bytes, called from %s+%#tx (%s)\n", function, size,
                 where.dli_fname != NULL ? where.dli_fname : "?", (char *)caller - (char *)where.dli_fbase,
                 where.dli_sname != NULL ? where.dli_sname : "?");
    if (write(log_file, line, (size_t)length) != length)
        _exit(99);
}

static bool fails(const char *function, size_t size, void *caller)
{
    if (chosen == 0 || is_excepted(caller))
        return false;
    const long number = atomic_fetch_add(&calls, 1) + 1;
    if (number != chosen && !(all_later && number > chosen))
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
    void *const got =
        fails("posix_memalign", size, __builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
    if (got == NULL)
        return ENOMEM;
    *memory = got;
    return 0;
}

static int counted_main(int argc, char **argv, char **environment)
{
    const char *text = getenv("FAIL_ALLOCATION"), *log = getenv("FAIL_ALLOCATION_LOG");
    char *end = NULL;
    snprintf(log_name, sizeof log_name, "%s", log != NULL ? log : "/dev/stderr");
    excepted = getenv("FAIL_ALLOCATION_EXCEPT");
    unsetenv("LD_PRELOAD"); /* no failures in programs that this one starts */
    const long number = text != NULL ? strtol(text, &end, 10) : 0;
    all_later = end != NULL && *end == '+';
    chosen = number;
    return program_main(argc, argv, environment);
}

int __libc_start_main(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end)
{
    int (*next)(main_function *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "__libc_start_main");
    program_main = main;
    return next(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
