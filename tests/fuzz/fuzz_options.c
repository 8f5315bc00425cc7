/* SPDX-License-Identifier: Apache-2.0
 * fuzz_options.c: fuzzes the program's command line: main and the parser of every command, up to the point where a
 * command would start its work. An input holds one argument per line. The linker redirects argp_parse and argp_error
 * to this file (--wrap). They return to the fuzzer instead of working or ending the process. */
/* -max_len=512: tools/fuzz.sh reads it */
#include <argp.h>
#include <sanitizer/allocator_interface.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cotangent_main(int argc, char **argv); /* src/cli/main.c */
error_t __real_argp_parse(const struct argp *argp, int argc, char **argv, unsigned flags, int *index, void *input);
error_t __wrap_argp_parse(const struct argp *argp, int argc, char **argv, unsigned flags, int *index, void *input);
void __wrap_argp_error(const struct argp_state *state, const char *format, ...);

static jmp_buf parser_return;
static FILE *dev_null;

/* argp frees its allocations before it returns, but an error leaves it by longjmp. The hooks record the remaining
 * allocations, so that many errors do not fill the memory. */
static const void *live_allocations[1024];
static _Thread_local bool recording; /* thread-local, because the fuzzer has other threads */

static void allocated(const volatile void *memory, size_t size)
{
    (void)size;
    for (size_t i = 0; recording && memory != NULL && i < sizeof live_allocations / sizeof *live_allocations; i++) {
        if (live_allocations[i] == NULL) {
            live_allocations[i] = (const void *)memory;
            return;
        }
    }
}

static void freed(const volatile void *memory)
{
    for (size_t i = 0; recording && memory != NULL && i < sizeof live_allocations / sizeof *live_allocations; i++)
        if (live_allocations[i] == memory)
            live_allocations[i] = NULL;
}

void __wrap_argp_error(const struct argp_state *state, const char *format, ...)
{
    va_list arguments;
    (void)state;
    va_start(arguments, format);
    vfprintf(dev_null, format, arguments); /* reads the arguments of the message */
    va_end(arguments);
    longjmp(parser_return, 1);
}

/* `cotangent run` parses twice: the op and the direction determine the options. */
error_t __wrap_argp_parse(const struct argp *argp, int argc, char **argv, unsigned flags, int *index, void *input)
{
    const error_t error = __real_argp_parse(argp, argc, argv, flags | ARGP_NO_EXIT, index, input);
    if (error != 0 || strcmp(argv[0], "cotangent run") != 0)
        longjmp(parser_return, 1);
    return 0;
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static char buffer[1 << 16];
    (void)argc;
    (void)argv;
    dev_null = fopen("/dev/null", "w");
    setvbuf(dev_null, buffer, _IOFBF, sizeof buffer);
    stdout = dev_null; /* for help and version; the fuzzer closes stderr by -close_fd_mask=2 */
    return __sanitizer_install_malloc_and_free_hooks(allocated, freed) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { MAX_ARGUMENTS = 64 };
    static char *args[MAX_ARGUMENTS + 1]; /* the commands keep pointers into their arguments until the next call */
    static char program[] = "cotangent";
    char *text = malloc(size + 1), *next = text;
    memcpy(text, data, size);
    text[size] = '\0';
    int count = 0;
    args[count++] = program;
    while (next != NULL && *next != '\0' && count < MAX_ARGUMENTS) {
        const char *word = strsep(&next, "\n");
        if (strncmp(word, "--H", 3) == 0)
            continue;                 /* argp's hidden --HANG sleeps for an hour */
        args[count++] = strdup(word); /* a separate allocation, so that a read beyond its end is detected */
    }
    args[count] = NULL;
    char *original_arguments[MAX_ARGUMENTS + 1];
    memcpy(original_arguments, args, sizeof original_arguments); /* argp permutes the arguments */
    recording = true;
    if (setjmp(parser_return) == 0)
        cotangent_main(count, args);
    recording = false;
    for (size_t i = 0; i < sizeof live_allocations / sizeof *live_allocations; i++) {
        free((void *)live_allocations[i]);
        live_allocations[i] = NULL;
    }
    for (int i = 1; i < count; i++)
        free(original_arguments[i]);
    free(text);
    return 0;
}
