/* SPDX-License-Identifier: Apache-2.0
 * fuzz_options.c: the program's command line under a fuzzer: main and every command's parser as they are, up to the point
 * where a command would begin to work. An input is the arguments, one a line. The linker sends argp_parse and argp_error
 * here (--wrap): instead of working, or of ending the process, the call comes back to the fuzzer. */
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

static jmp_buf back;
static FILE *nowhere;

/* What argp allocates it frees before it returns, and an error does not let it return: the hooks keep the list of what
 * is left, so that an hour of errors does not fill the memory. */
static const void *left[1024];
static _Thread_local bool listing; /* the fuzzer has threads of its own */

static void allocated(const volatile void *memory, size_t size)
{
    (void)size;
    for (size_t i = 0; listing && memory != NULL && i < sizeof left / sizeof *left; i++) {
        if (left[i] == NULL) {
            left[i] = (const void *)memory;
            return;
        }
    }
}

static void freed(const volatile void *memory)
{
    for (size_t i = 0; listing && memory != NULL && i < sizeof left / sizeof *left; i++)
        if (left[i] == memory)
            left[i] = NULL;
}

void __wrap_argp_error(const struct argp_state *state, const char *format, ...)
{
    va_list arguments;
    (void)state;
    va_start(arguments, format);
    vfprintf(nowhere, format, arguments); /* reads what the message names */
    va_end(arguments);
    longjmp(back, 1);
}

/* `cotangent run` parses twice: the op and the direction say what options there are. */
error_t __wrap_argp_parse(const struct argp *argp, int argc, char **argv, unsigned flags, int *index, void *input)
{
    const error_t error = __real_argp_parse(argp, argc, argv, flags | ARGP_NO_EXIT, index, input);
    if (error != 0 || strcmp(argv[0], "cotangent run") != 0)
        longjmp(back, 1);
    return 0;
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static char buffer[1 << 16];
    (void)argc;
    (void)argv;
    nowhere = fopen("/dev/null", "w");
    setvbuf(nowhere, buffer, _IOFBF, sizeof buffer);
    stdout = nowhere; /* help and version; stderr is the fuzzer's own: -close_fd_mask=2 */
    return __sanitizer_install_malloc_and_free_hooks(allocated, freed) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { MAX_WORDS = 64 };
    static char *words[MAX_WORDS + 1]; /* the commands keep pointers into their arguments until the next call */
    static char program[] = "cotangent";
    char *text = malloc(size + 1), *next = text;
    memcpy(text, data, size);
    text[size] = '\0';
    int count = 0;
    words[count++] = program;
    while (next != NULL && *next != '\0' && count < MAX_WORDS) {
        const char *word = strsep(&next, "\n");
        if (strncmp(word, "--H", 3) == 0)
            continue;                  /* every argp program has a hidden --HANG, which sleeps for an hour */
        words[count++] = strdup(word); /* in memory of its own: a step beyond its end is seen */
    }
    words[count] = NULL;
    char *own[MAX_WORDS + 1];
    memcpy(own, words, sizeof own); /* argp sorts them */
    listing = true;
    if (setjmp(back) == 0)
        cotangent_main(count, words);
    listing = false;
    for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        free((void *)left[i]);
        left[i] = NULL;
    }
    for (int i = 1; i < count; i++)
        free(own[i]);
    free(text);
    return 0;
}
